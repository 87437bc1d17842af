// SPDX-License-Identifier: Apache-2.0
// What one step runs: which timelines, which ids each, how each solves and samples.
//
// A batch is filled piece by piece, started, finished, read, and filled anew. The next step may be filled and started
// before the one under way is finished: a piece then reads the id that the step under way draws without anyone having
// seen it, as the device has it. A piece is part of a prompt (cut only at the
// absolute grid, so that the cut changes no bit) or ids read as generated tokens, one by one, or no id at all: the next
// one is drawn from what the session keeps of the last that it has read, with the same bits as then. Where logits are
// wanted,
// the next id is drawn by the piece's sampler; a scored piece has logits of every token besides, for the logprobs of
// the ids that follow. Logits of a step are bounded: a row each and one chunk more (that many vocabularies of floats on
// the device), edits of logits by ENG_ROW_EDITS a row on average; what does not fit waits for the next step. All memory
// is allocated at creation.
#ifndef ENGINE_BATCH_H
#define ENGINE_BATCH_H

#include "engine/forward.h"
#include "engine/session.h"

typedef struct eng_batch eng_batch;

enum {
    ENG_ROW_EDITS = 4096,
    ENG_FLIGHTS = 2, // steps under way
};

typedef struct eng_piece {
    eng_session *session;
    kern_row_kind kind;
    const int32_t *ids; // (count) read in this step; borrowed until it is started. NULL: the id that piece number
    int32_t after;      // `after` of the step started last, of the same session, drew; count 1, generated
    int32_t count;      // 0: with logits and unscored, behind what the session has read; a prompt piece ends at a grid
                        // boundary (eng_batch_piece_length) or with its prompt
    eng_knobs knobs;    // how Mesa layers solve, at which loop outputs are read
    bool logits;        // of the piece's last token
    const eng_sampling *sampling; // with logits: how the next id is drawn; borrowed like ids. NULL: logits are read
    const kern_logit_edit *edit;  // (edits) by ascending ids, of the logits that are drawn from; borrowed like ids
    int32_t edits;
    int32_t top; // likeliest ids wanted with every prediction, 0 .. KERN_MAX_TOP
    bool whole;  // all loops of a looped model run in this step, though the token is read before (loop.h)
    bool scored; // predictions of the ids after the first too; without logits of ids[count] as well, which stands there
} eng_piece;

typedef struct eng_piece_result {
    int64_t position;    // of the first id that was read
    int32_t count;       // ids that were read
    bool finite;         // the logits of this piece, if it asked for any
    int32_t id;          // drawn; without sampling the likeliest
    float logprob;       // of id, by the model's logits
    const float *logits; // (vocab) until the batch is cleared; NULL for a piece with sampling, which does not move them
    eng_compute compute; // of the piece's tokens
    int32_t loop;        // at which the output for id was read, from 1; 0: outputs of loops are not read
} eng_piece_result;

// What the model said about the id after one token, by its unedited logits.
typedef struct eng_prediction {
    int32_t id; // drawn, or the one that stands there
    float logprob;
    int32_t loop;          // as eng_piece_result's
    int32_t top;           // the vocabulary may be smaller than what was wanted
    const int32_t *top_id; // (top) best first; borrowed until the batch is cleared
    const float *top_logprob;
} eng_prediction;

// weights and pool are borrowed for the batch's life. max_tokens: ids a step over all pieces.
ENG_CHECKED eng_status eng_batch_create(const eng_weights *weights, eng_pool *pool, kern_stream *stream,
                                        int32_t max_rows, int32_t max_tokens, eng_batch **out, eng_error *error);
void eng_batch_free(eng_batch *batch);
// Device bytes of the activations of such a batch, without making it.
ENG_CHECKED eng_status eng_batch_measure(const eng_model *model, kern_device *device, int32_t max_rows,
                                         int32_t max_tokens, uint64_t *bytes, eng_error *error);
// The first steps, for a device whose first steps are slow (kern_plan_is_captured; on others nothing happens): a
// prompt, and generated tokens of each size of batch that the pool can hold. The pool must be unused and is so after.
ENG_CHECKED eng_status eng_batch_warm_up(eng_batch *batch, eng_error *error);

// Begins another step, with at most one under way.
void eng_batch_clear(eng_batch *batch);
// How many of `left` prompt ids bring this session to the next grid boundary: the shortest piece; further whole chunks
// may follow.
int32_t eng_batch_piece_length(const eng_batch *batch, const eng_session *session, int64_t left);
// Adds a piece and writes its index; ENG_FULL: no room in this step. Advances nothing yet.
ENG_CHECKED eng_status eng_batch_add(eng_batch *batch, const eng_piece *piece, int32_t *index, eng_error *error);
// Starts the step and advances the sessions: their `read` grows by the pieces' counts. Tails are the caller's. A step
// without pieces is none. At most two are under way. What is done to a session's state afterwards, through the batch's
// stream, comes after the step: the session may be closed, its slot taken by another.
ENG_CHECKED eng_status eng_batch_start(eng_batch *batch, eng_error *error);
// Waits for the step that was started first of those under way (none: ENG_INVALID). Results are its from then on until
// the batch is cleared.
ENG_CHECKED eng_status eng_batch_finish(eng_batch *batch, eng_error *error);
int eng_batch_underway(const eng_batch *batch);
// Both; nothing may be under way.
ENG_CHECKED eng_status eng_batch_run(eng_batch *batch, eng_error *error);
void eng_batch_result(const eng_batch *batch, int32_t index, eng_piece_result *out);
// Of the piece's token number `token`: any of a scored piece, otherwise the last of one with logits.
void eng_batch_prediction(const eng_batch *batch, int32_t index, int32_t token, eng_prediction *out);
void eng_batch_compute(const eng_batch *batch, int32_t index, int32_t token, eng_compute *out); // of one token

// Solver and sampler of the kernels from a request's knobs.
kern_solver eng_solver(const eng_knobs *knobs);
kern_exit eng_exit(const eng_knobs *knobs);
kern_sampler eng_sampler(const eng_sampling *sampling, int64_t position);

#endif

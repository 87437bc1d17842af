// SPDX-License-Identifier: Apache-2.0
// What batch.c and batch_rows.c share: the batch itself.
//
// The pieces keep the order in which they were added, which is that of their results; where a piece stands in the row
// table is noted in the piece when the table is written.
#ifndef ENGINE_BATCH_INTERNAL_H
#define ENGINE_BATCH_INTERNAL_H

#include "engine/batch.h"

typedef struct eng_batch_piece {
    eng_piece piece;
    int64_t position;   // of the first id
    int32_t token0;     // first token in the batch
    int32_t logits_row; // of the last token, among the step's logits; those of a scored piece end there. -1: none
    bool deferred;      // runs loop by loop (loop.h), behind the others' tokens and logits
    int32_t slot;       // deferred: of the session, which may be closed before the results are there
    uint64_t life;      // deferred: of its session's list (eng_pending); 0: it has gone through all loops
} eng_batch_piece;

typedef struct eng_loops eng_loops; // loop.h

// Where pieces without ids draw: a plan with memory and rows of its own, for a few of them a step (batch_head.c).
typedef struct eng_resume {
    eng_plan *plan;
    kern_memory memory;
    kern_rows *rows;
} eng_resume;

// A step from its filling to its results.
typedef struct eng_flight {
    eng_batch_piece *piece; // (max_rows)
    int32_t pieces;
    kern_event *done; // what follows is on the host
    // outputs
    void *results;                   // plan->results_bytes: the next five lie in it
    const int32_t *finite, *sampled; // (max_logits)
    const float *logprob;            // (max_logits)
    const int32_t *loops;            // (max_tokens); NULL where outputs of loops are not read
    const kern_solve_sum *solves;    // (max_tokens); NULL without Mesa layers
    void *top;                       // the next two lie in it
    int32_t *top_id;                 // (max_logits, KERN_MAX_TOP)
    float *top_logprob;              // (max_logits, KERN_MAX_TOP)
    float *logits;                   // (max_rows, vocab) by piece; touched only for pieces without sampling
} eng_flight;

struct eng_batch {
    const eng_weights *weights;
    eng_pool *pool;
    kern_stream *stream;
    int32_t chunk, max_rows, max_tokens, max_logits, max_edits;
    eng_plan *plan;
    kern_memory memory;
    kern_rows *rows;
    // By turns: steps are filled, started and finished in this order.
    eng_flight flight[ENG_FLIGHTS];
    uint64_t started, finished; // steps
    // of the step that is being filled
    int32_t tokens, logits_rows, edits, pages;
    int32_t most_top; // that a piece of it wants
    bool unsampled;   // a piece of it wants logits
    eng_loops *loops; // NULL: all loops run at once
    eng_resume resume;
    int32_t resumed, resumed_edits; // of the step that is being filled
    uint64_t fill;                  // its number
    uint64_t *slot_fill;            // (slots) the last fill that had a piece of this slot's session
};

// The step that is being filled, the one started last, the one finished last.
static inline eng_flight *eng_batch_filling(eng_batch *batch) {
    return &batch->flight[batch->started % ENG_FLIGHTS];
}
static inline const eng_flight *eng_batch_previous(const eng_batch *batch) {
    return &batch->flight[(batch->started + ENG_FLIGHTS - 1) % ENG_FLIGHTS];
}
static inline const eng_flight *eng_batch_read(const eng_batch *batch) {
    return &batch->flight[(batch->finished + ENG_FLIGHTS - 1) % ENG_FLIGHTS];
}

// Rows of logits that a piece takes.
static inline int32_t eng_piece_logits(const eng_piece *piece) {
    return piece->scored ? piece->count : piece->logits;
}

static inline bool eng_piece_resumes(const eng_piece *piece) {
    return piece->count == 0;
}

// Writes the row table of the pieces that were added: generated rows first, whatever the order they were added in.
// Deferred ones are left out; they have their places behind the others, and those without ids theirs behind them.
void eng_batch_fill_rows(eng_batch *batch);
// Appends the session's pages and returns where they begin (-1: none); the rows of logits of a piece whose tokens begin
// at token0, and returns the last one's place (-1: none).
int32_t eng_batch_add_pages(kern_rows *rows, const eng_session *session);
int32_t eng_batch_add_logits(kern_rows *rows, const eng_piece *piece, int32_t token0);

// Words of 4 bytes, `each` a row: `count` rows of another plan to those from `row` on of the batch's own.
kern_status eng_batch_copy_rows(const eng_batch *batch, const kern_memory *memory, kern_ptr from, kern_ptr to,
                                int32_t row, int32_t count, size_t each);
// `count` results of another plan's head, from its first row on, to where the batch's own plan leaves those of the rows
// from `row` on.
kern_status eng_batch_hand_over(const eng_batch *batch, const eng_plan *plan, const kern_memory *memory, int32_t row,
                                int32_t count);

ENG_CHECKED eng_status eng_resume_create(eng_batch *batch, eng_error *error);
void eng_resume_free(eng_batch *batch);
// Device bytes of its activations.
ENG_CHECKED eng_status eng_resume_measure(const eng_model *model, kern_device *device, int32_t max_rows,
                                          uint64_t *bytes, eng_error *error);
// Draws for the pieces without ids of the step that is being filled.
kern_status eng_resume_run(eng_batch *batch);

#endif

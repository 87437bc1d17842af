// SPDX-License-Identifier: Apache-2.0
// Log-probabilities and greedy continuations of very many texts, through the engine's batches.
//
// A *reading* is one text with the ids in it that are wanted; a *passage* is readings that begin alike (the choices of
// a question). What they share is read once and forked: the answers are those of reading each alone, bit for bit. So
// are they whatever else is in the batch. Passages come from a callback and go back to one, in any order, so
// that no more of them are in memory than run together. Owns the state pool and the batch; one thread.
#ifndef TRAINER_EVAL_READER_H
#define TRAINER_EVAL_READER_H

#include "engine/batch.h"

typedef struct trn_reading {
    const int32_t *ids; // (count), borrowed
    int32_t count;
    int32_t first;     // log-probabilities of ids[first .. count) are wanted; 1 .. count
    int32_t generate;  // ids to draw behind them, each the likeliest; with 0, first < count
    float *logprob;    // (count - first), out
    int32_t likeliest; // of those ids, how many were the likeliest; out
    int32_t *drawn;    // (generate), out; an end of text is not among them
    int32_t drawn_count;
} trn_reading;

typedef struct trn_passage {
    trn_reading *reading;
    int32_t readings; // at least one
} trn_passage;

typedef struct trn_passage_source {
    void *context;
    // The next passage, borrowed until `done`; NULL: there is none any more.
    eng_status (*next)(void *context, trn_passage **out, eng_error *error);
    eng_status (*done)(void *context, trn_passage *passage, eng_error *error);
    void (*drop)(void *context, trn_passage *passage); // instead of done, where the run failed
    bool (*stops)(void *context, const trn_passage *passage, const trn_reading *reading); // after what it drew so far
} trn_passage_source;

typedef struct trn_reading_figures {
    int64_t tokens;   // that were read or drawn
    int64_t unshared; // that would have been without sharing
    eng_compute solves;
    double seconds;
} trn_reading_figures;

typedef struct trn_reader trn_reader;

// weights: borrowed. batch_tokens: that run together. longest: the most ids of a reading, drawn ones included.
ENG_CHECKED eng_status trn_reader_create(const eng_weights *weights, int64_t batch_tokens, int64_t longest,
                                         trn_reader **out, eng_error *error);
void trn_reader_free(trn_reader *reader); // NULL: nothing

// Reads every passage. stem (may be NULL): ids that most readings begin with, read once for all of them. Adds to
// *figures. A reading whose logits are not finite is ENG_INVALID.
ENG_CHECKED eng_status trn_reader_run(trn_reader *reader, const trn_passage_source *source, const eng_knobs *knobs,
                                      const int32_t *stem, int32_t stem_count, trn_reading_figures *figures,
                                      eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// Evaluation: the losses of a checkpoint over windows of documents, as a whole and by position.
//
// A window is at most `context` pairs of one document, read from a zero state; a document is cut into windows from its
// start. All models and settings read the same windows. Bits per byte are the sum of the losses (end of text included)
// / ln 2 / UTF-8 bytes of the text.
#ifndef TRAINER_SCORE_H
#define TRAINER_SCORE_H

#include "engine/tokenizer.h"
#include "trainer/batch.h"
#include "trainer/dataset.h"

typedef struct trn_window {
    int64_t document, first;
    int32_t count;
} trn_window;

typedef struct trn_windows {
    trn_window *window;
    int64_t count;
    int64_t
        bytes; // UTF-8 bytes of the text that the windows cover; -1: unknown (parts of documents without a tokenizer)
} trn_windows;

// All windows of the data set; limit > 0: the first window of each of at most `limit` documents, in an order that
// depends on the number of documents alone. tokenizer (may be NULL) counts the bytes of parts of documents. Freed with
// trn_windows_free.
ENG_CHECKED eng_status trn_windows_choose(const trn_dataset *dataset, int32_t context, int64_t limit,
                                          const eng_tokenizer *tokenizer, trn_windows *out, eng_error *error);
void trn_windows_free(trn_windows *windows);

// Positions 1-64, 65-128, 129-256 ... of a window, by powers of two.
enum { TRN_BUCKETS = 24 };
int trn_bucket_of(int32_t place); // place 0 is the first position
void trn_bucket_range(int bucket, int64_t *first, int64_t *last);

typedef struct trn_scores {
    double loss;              // sums over targets, whole and by position
    double divergence;        // likewise, from the batch's teacher; 0 without one
    int64_t targets, windows; // windows with a target
    trn_hits hits;
    double bucket_loss[TRN_BUCKETS];
    int64_t bucket_targets[TRN_BUCKETS];
    eng_compute solves;
    int64_t loops; // sum over targets of the loop, from 1, at which each was read; 0: no outputs of loops
    double seconds;
} trn_scores;

// The same sums of one document's windows.
typedef struct trn_document_score {
    double loss;
    int64_t targets;
    double bucket_loss[TRN_BUCKETS];
    int64_t bucket_targets[TRN_BUCKETS];
} trn_document_score;

// batch's plan must take windows of `context` tokens. document: (documents of the data set), set to what is found of
// each; NULL: not wanted. progress (may be NULL) hears done and total windows.
ENG_CHECKED eng_status trn_score_windows(trn_batch *batch, const trn_dataset *dataset, const trn_windows *windows,
                                         kern_solver solver, trn_document_score *document,
                                         void (*progress)(void *context, uint64_t done, uint64_t total,
                                                          const char *text),
                                         void *context, trn_scores *scores, eng_error *error);

#endif

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
    int32_t token0;     // first token in the batch
    int32_t logits_row; // of the last token, among the step's logits; those of a scored piece end there. -1: none
} eng_batch_piece;

struct eng_batch {
    const eng_weights *weights;
    eng_pool *pool;
    kern_stream *stream;
    int32_t chunk, max_rows, max_tokens, max_logits, max_edits;
    eng_plan *plan;
    kern_memory memory;
    kern_rows *rows;
    eng_batch_piece *piece; // (max_rows)
    int32_t pieces, tokens, logits_rows, edits;
    int32_t most_top; // that a piece of the step wants
    // the last step's outputs on the host
    void *results;                   // plan->results_bytes: the next four lie in it
    const int32_t *finite, *sampled; // (max_logits)
    const float *logprob;            // (max_logits)
    const kern_solve_sum *solves;    // (max_tokens); NULL without Mesa layers
    void *top;                       // the next two lie in it
    int32_t *top_id;                 // (max_logits, KERN_MAX_TOP)
    float *top_logprob;              // (max_logits, KERN_MAX_TOP)
    float *logits;                   // (max_rows, vocab) by piece; touched only for pieces without sampling
};

// Rows of logits that a piece takes.
static inline int32_t eng_piece_logits(const eng_piece *piece) {
    return piece->scored ? piece->count : piece->logits;
}

// Writes the row table of the pieces that were added: generated rows first, whatever the order they were added in.
void eng_batch_fill_rows(eng_batch *batch);

#endif

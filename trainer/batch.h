// SPDX-License-Identifier: Apache-2.0
// Rows of a data set in a runner: adding them, running them, and what came out (losses, solver steps).
//
// The products of a batch run over all its rows at once (rows->merge). One thread.
#ifndef TRAINER_BATCH_H
#define TRAINER_BATCH_H

#include "trainer/dataset.h"
#include "trainer/teacher.h"

typedef struct trn_batch {
    trn_runner *runner;                  // borrowed; its plan is a SCORE or a TRAIN plan
    const trn_teacher *teacher;          // borrowed, of such plans; NULL: none
    float *loss;                         // (max_tokens) of each token, 0 without target, a NaN without sign
    float *divergence;                   // likewise, with a teacher
    int32_t *best;                       // (max_tokens) of a SCORE plan: its likeliest id, -1 without target
    int32_t *loops;                      // (max_tokens) of a plan with loops: where each is read, from 1; else 0
    kern_solve_sum *token_solves;        // (max_tokens) of the forward solves; NULL: no Mesa layer
    eng_compute solves, backward_solves; // of the last run
} trn_batch;

ENG_CHECKED eng_status trn_batch_create(trn_runner *runner, trn_batch *out, eng_error *error);
void trn_batch_free(trn_batch *batch);
void trn_batch_clear(trn_batch *batch);
// Adds a row that starts from a zero state; weight: of each target's loss in the gradient.
ENG_CHECKED eng_status trn_batch_add(trn_batch *batch, const trn_row *row, double weight, kern_solver solver,
                                     eng_error *error);
// Likewise, but as one row with the one before, with a document's start between, where both fit into a chunk of the
// device: many short rows cost as much as the chunks that they begin. Rows are no longer told apart (trn_batch_hits).
ENG_CHECKED eng_status trn_batch_join(trn_batch *batch, const trn_row *row, double weight, kern_solver solver,
                                      eng_error *error);
// The teacher first.
ENG_CHECKED eng_status trn_batch_run(trn_batch *batch, eng_error *error);
// Sum of the losses of the tokens [token0, token0 + count), in order.
double trn_batch_loss(const trn_batch *batch, int32_t token0, int32_t count);
double trn_batch_divergence(const trn_batch *batch); // of all tokens; 0 without a teacher

// How often the likeliest id was the target: over targets, and over rows that have any (right in all of them).
typedef struct trn_hits {
    int64_t targets, rows;
} trn_hits;
// Adds those of the last run of a SCORE plan.
void trn_batch_hits(const trn_batch *batch, trn_hits *sum);

#endif

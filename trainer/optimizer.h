// SPDX-License-Identifier: Apache-2.0
// AdamW over a model's tensor table (Loshchilov and Hutter 2019), with clipping by the gradient's norm.
//
// Norm, clipping and update follow one another on the device, which leaves everything as it is where the norm says that
// the gradient is of no use; the host learns the norm while the update runs, and only several ranks wait in between.
// Moments are float32, a pair a weight; of several ranks each has those of its parts of the blocks (blocks.h), sums
// their gradients, updates their weights and gathers the others. Weight decay applies to the tensors that the table
// marks (linear weights). One thread.
#ifndef TRAINER_OPTIMIZER_H
#define TRAINER_OPTIMIZER_H

#include "trainer/blocks.h"

typedef struct trn_adamw {
    double beta1, beta2, eps, weight_decay;
    double clip;     // largest norm of the gradient; 0: none
    bool gate_alone; // only the exit gate's tensors are updated
    kern_rounding rounding;
    uint64_t seed; // of KERN_ROUND_STOCHASTIC
} trn_adamw;

typedef struct trn_piece { // what lies in this rank's parts of a tensor
    int32_t tensor, block;
    int64_t first, count; // of the tensor's elements
    int64_t moment;       // where in m and v
    int32_t runs;         // KERN_OP_ADAMW's; 0: it is not trained
} trn_piece;

typedef struct trn_norm { // of the gradient
    double squares;       // their sum
    float scale;          // KERN_OP_CLIP_SCALE
} trn_norm;

typedef struct trn_optimizer {
    const eng_weights *weights; // trainable; borrowed
    kern_stream *stream;        // borrowed
    trn_adamw adamw;
    trn_blocks blocks;
    trn_piece *piece; // by block, and by tensor inside it; no tensor has two
    int32_t pieces;
    float *m, *v;        // (moments) device
    float *rest;         // likewise, of KERN_ROUND_COMPENSATED
    int64_t moments;     // of all pieces, each padded to 16
    kern_adamw_run *run; // device, in the pieces' order
    trn_norm *norm;      // device
    trn_norm *told;      // the same in host memory, when `known` is reached
    kern_event *known;
    int64_t updates; // made so far
    bool updating;   // one is launched whose outcome was not asked for yet
} trn_optimizer;

// plan: the training plan, which says when gradients are final; it and ranks may be NULL for a process alone.
ENG_CHECKED eng_status trn_optimizer_create(const eng_weights *weights, kern_stream *stream, const trn_adamw *adamw,
                                            const kern_plan *plan, trn_ranks *ranks, trn_optimizer *out,
                                            eng_error *error);
void trn_optimizer_free(trn_optimizer *optimizer);
ENG_CHECKED eng_status trn_optimizer_zero_gradients(trn_optimizer *optimizer, eng_error *error);
// Sums a block's gradients over the ranks, when all of them have begun it; the others' parts are then of no use.
ENG_CHECKED eng_status trn_optimizer_sum(trn_optimizer *optimizer, int32_t block, eng_error *error);
// Launches the norm of the whole gradient and what it is clipped by.
ENG_CHECKED eng_status trn_optimizer_norm(trn_optimizer *optimizer, eng_error *error);
// Launches, after the norm, the update of every weight; it does nothing where the gradient is of no use.
ENG_CHECKED eng_status trn_optimizer_update(trn_optimizer *optimizer, double rate, eng_error *error);
// What came of both: the 2-norm, NaN or infinite if the gradient is not finite, and whether the gradient was of use.
// Waits for the norm alone.
ENG_CHECKED eng_status trn_optimizer_outcome(trn_optimizer *optimizer, double *norm, bool *usable, eng_error *error);
// Of a block laid out as the weights (masters, gradients): the tensor nearest to the loss that holds a value not
// finite, and -1 where all are finite. A backward pass fills gradients in that order. An embedding that is the head too
// counts as the former.
ENG_CHECKED eng_status trn_optimizer_find_not_finite(trn_optimizer *optimizer, const float *block, int32_t *tensor,
                                                     eng_error *error);

// This rank's moments as m.NAME and v.NAME, and rests as r.NAME, in one safetensors file: whole tensors in their shape,
// or a piece as a vector whose first element is number metadata[NAME] of the tensor.
ENG_CHECKED eng_status trn_optimizer_save(trn_optimizer *optimizer, const char *path, eng_error *error);
// From the files of all ranks that saved, however many. Refuses missing tensors and pieces, wrong shapes, values not
// finite, and rests where there were none or the other way round.
ENG_CHECKED eng_status trn_optimizer_load(trn_optimizer *optimizer, const char *const *path, int32_t files,
                                          eng_error *error);

#endif

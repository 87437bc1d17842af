// SPDX-License-Identifier: Apache-2.0
// AdamW over a model's tensor table (Loshchilov and Hutter 2019), with clipping by the gradient's norm.
//
// Moments are float32, laid out as the weights. Weight decay applies to the tensors that the table marks (linear
// weights). One thread.
#ifndef TRAINER_OPTIMIZER_H
#define TRAINER_OPTIMIZER_H

#include "engine/checkpoint.h"
#include "kernels/kernels.h"

typedef struct trn_adamw {
    double beta1, beta2, eps, weight_decay;
    double clip; // largest norm of the gradient; 0: none
} trn_adamw;

typedef struct trn_optimizer {
    const eng_weights *weights; // trainable; borrowed
    kern_stream *stream;        // borrowed
    trn_adamw adamw;
    float *m, *v;    // (weights->count) device
    double *squares; // device double[1]
    float *scale;    // device float[1]
    int64_t updates; // made so far
    bool gate_alone; // only the exit gate's tensors are updated
} trn_optimizer;

ENG_CHECKED eng_status trn_optimizer_create(const eng_weights *weights, kern_stream *stream, const trn_adamw *adamw,
                                            trn_optimizer *out, eng_error *error);
void trn_optimizer_free(trn_optimizer *optimizer);
ENG_CHECKED eng_status trn_optimizer_zero_gradients(trn_optimizer *optimizer, eng_error *error);
// The 2-norm of the whole gradient, NaN or infinite if the gradient is not finite.
ENG_CHECKED eng_status trn_optimizer_norm(trn_optimizer *optimizer, double *norm, eng_error *error);
// Of a block laid out as the weights (masters, gradients): the tensor nearest to the loss that holds a value not
// finite, and -1 where all are finite. A backward pass fills gradients in that order. An embedding that is the head too
// counts as the former. Not between the norm and the update.
ENG_CHECKED eng_status trn_optimizer_find_not_finite(trn_optimizer *optimizer, const float *block, int32_t *tensor,
                                                     eng_error *error);
// Clips by the norm that trn_optimizer_norm found last and updates every weight.
ENG_CHECKED eng_status trn_optimizer_update(trn_optimizer *optimizer, double rate, eng_error *error);

// The moments as m.NAME and v.NAME in one safetensors file. Loading refuses missing tensors, wrong shapes, values not
// finite.
ENG_CHECKED eng_status trn_optimizer_save(trn_optimizer *optimizer, const char *path, eng_error *error);
ENG_CHECKED eng_status trn_optimizer_load(trn_optimizer *optimizer, const char *path, eng_error *error);

#endif

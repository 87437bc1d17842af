// SPDX-License-Identifier: Apache-2.0
// How far a tensor's gradients are from a reference's, over batches: what `check` says of each tensor.
//
// Rounding that is right in the mean leaves errors that differ from batch to batch, so that the mean of N batches keeps
// 1/sqrt(N) of one batch's error; an error that all batches share stays whole. No NaN is lost on the way. Any thread.
#ifndef TRAINER_GRADIENT_ERROR_H
#define TRAINER_GRADIENT_ERROR_H

#include <stdint.h>

typedef struct trn_gradient_error {
    int32_t batches;
    double error, norm; // sums of |mine - reference|^2 and |reference|^2
    double worst;       // relative error of the worst batch
    double cosine;      // the least of a batch; 1 where both are zero, 0 where one is
} trn_gradient_error;

// |mine - reference| / |reference|; |mine| where the reference is zero.
double trn_relative_error(const float *mine, const float *reference, int64_t count);

void trn_gradient_error_begin(trn_gradient_error *out);
// Adds a batch's gradients.
void trn_gradient_error_add(trn_gradient_error *sum, const float *mine, const float *reference, int64_t count);
// The root mean square of the batches' errors, relative to that of their gradients.
double trn_gradient_error_relative(const trn_gradient_error *sum);
// Of that error, the share that is left in the mean of the batches: 1 is a bias and nothing else; 0 without any error.
// shared: (count) the sum of the batches' differences.
double trn_gradient_error_left(const trn_gradient_error *sum, const double *shared, int64_t count);

#endif

// SPDX-License-Identifier: Apache-2.0
// The optimizer's operations, which take no rows (NULL). Part of kernels.h, which includes it behind what it needs and
// is what other folders include.
#ifndef KERNELS_OPTIM_H
#define KERNELS_OPTIM_H

#include "kernels/kernels.h"

// What ADAMW updates at once: all tensors, in runs of neighbouring elements, each inside a tensor. In device memory,
// and so is what it points to.
enum { KERN_ADAMW_RUN = 4096 };
typedef struct kern_adamw_run {
    float *parameter, *grad, *m, *v; // (count)
    float *rest;                     // (count), KERN_ROUND_COMPENSATED
    int64_t first;                   // number of the first element among all, a multiple of 4
    int32_t count;                   // 0 .. KERN_ADAMW_RUN
    float weight_decay;
} kern_adamw_run;
// What is kept of a new weight. But for NONE it is a bf16 number, in float32 memory (Zamirai et al. 2020, arXiv
// 2010.06192).
typedef enum kern_rounding {
    KERN_ROUND_NONE,
    KERN_ROUND_STOCHASTIC,  // one of the two around it, at random, so that the mean is the new weight
    KERN_ROUND_COMPENSATED, // the nearest; what it leaves out is the weight's rest, with which the next update begins
    KERN_ROUNDINGS
} kern_rounding;
// AdamW (Loshchilov and Hutter 2019, decoupled decay): m, v, then p -= lr (m^ / (sqrt(v^) + eps) + weight_decay p).
typedef struct kern_adamw_args {
    kern_ptr run;        // kern_adamw_run (runs)
    kern_ptr grad_scale; // optional float[1]: the gradient is multiplied by it first; NaN: nothing is updated
    int64_t count;       // elements of all runs
    int32_t runs;
    float lr, beta1, beta2, eps;
    float correction1, correction2; // 1 - beta^step
    int32_t rounding;               // kern_rounding
    uint32_t update;                // STOCHASTIC: a weight's random bits follow from seed, update and its number
    uint64_t seed;
} kern_adamw_args;
// sum[0] += sum of squares (double), fixed blocks in order.
typedef struct kern_square_sum_args {
    kern_ptr x, sum; // (count), double[1]
    int64_t count;
} kern_square_sum_args;
// scale[0] = min(1, clip / (sqrt(sum) + 1e-6)); clip <= 0: 1. NaN where the gradient is of no use: its sum of squares
// is not finite, or without clipping above the largest float, so that a moment could become infinite and stay so.
typedef struct kern_clip_scale_args {
    kern_ptr sum, scale; // double[1], float[1]
    float clip;
} kern_clip_scale_args;

#endif

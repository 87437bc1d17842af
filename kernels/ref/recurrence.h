// SPDX-License-Identifier: Apache-2.0
// The recurrence family in double, token by token, as models.md 11.1 and 11.3 write it. For tests.
//
// One row of `tokens` tokens. begins (may be NULL) is non-zero at tokens t > 0 that start a new document. Arrays have
// the shapes of kernels.h with T = tokens; state (heads, D, V') goes in and out. Every decay, update and map of heads.
#ifndef KERNELS_REF_RECURRENCE_H
#define KERNELS_REF_RECURRENCE_H

#include "kernels/kernels.h"

typedef struct kern_ref_recurrence_inputs {
    const double *q, *k, *v, *g, *beta, *skip;
    const unsigned char *begins;
} kern_ref_recurrence_inputs;

typedef struct kern_ref_recurrence_gradients {
    double *dq, *dk, *dv;
    double *dg;            // per token, SCALAR and CHANNEL; NULL: not wanted
    double *dbeta, *dskip; // NULL: not wanted
    double *dstate;        // (heads, D, V'): in at the end, out at the start; NULL: zero at the end
} kern_ref_recurrence_gradients;

void kern_ref_recurrence(const kern_recurrence *family, int tokens, const kern_ref_recurrence_inputs *in, double *state,
                         double *o);

// state: at the row's start, or NULL for zero.
void kern_ref_recurrence_backward(const kern_recurrence *family, int tokens, const kern_ref_recurrence_inputs *in,
                                  const double *state, const double *d_o, const kern_ref_recurrence_gradients *out);

#endif

// SPDX-License-Identifier: Apache-2.0
// References of the gates in double, one token a call.
//
// The laws stand at kern_gates in kernels.h. Used by tests only.
#ifndef KERNELS_REF_GATES_H
#define KERNELS_REF_GATES_H

#include "kernels/kernels.h"

// a (heads, channels), b (heads), A_log (heads), dt_bias (heads, channels) -> g like a, beta (heads). What a law does
// not use may be NULL.
typedef struct kern_ref_gates_input {
    const double *a, *b, *A_log, *dt_bias;
} kern_ref_gates_input;
void kern_ref_gates(const kern_gates *gates, kern_ref_gates_input in, double *g, double *beta);

// da and db are written, dA_log and ddt_bias added to.
typedef struct kern_ref_gates_gradient {
    double *da, *db, *dA_log, *ddt_bias;
} kern_ref_gates_gradient;
void kern_ref_gates_backward(const kern_gates *gates, kern_ref_gates_input in, const double *dg, const double *dbeta,
                             kern_ref_gates_gradient out);

#endif

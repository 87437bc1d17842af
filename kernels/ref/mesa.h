// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's core in double, token by token, as models.md 2.3, 2.6b and 2.8 write it. For tests.
//
// One row of `tokens` tokens. begins (may be NULL) is non-zero at tokens t > 0 that start a new document. Arrays have
// the shapes of kernels.h; keys (H, D, D) and values (H, D, V) are the states, in and out. The backward pass takes x
// and u as exact (Cholesky) solutions.
#ifndef KERNELS_REF_MESA_H
#define KERNELS_REF_MESA_H

#include "kernels/kernels.h"

typedef struct kern_ref_mesa_inputs {
    const double *q, *k, *v, *g, *beta, *lambda_params;
    const unsigned char *begins;
} kern_ref_mesa_inputs;

typedef struct kern_ref_mesa_gradients {
    double *dq, *dk, *dv, *dg, *dbeta;
    double *grad_lambda_params; // written
    double *dkeys, *dvalues;    // in: at the end, out: at the start; NULL: zero at the end
} kern_ref_mesa_gradients;

// x (tokens, H D) may be NULL.
void kern_ref_mesa(const kern_mesa *mesa, int tokens, const kern_ref_mesa_inputs *in, const kern_solver *solver,
                   double *keys, double *values, double *x, double *o);

// keys, values: at the row's start, or NULL for zero.
void kern_ref_mesa_backward(const kern_mesa *mesa, int tokens, const kern_ref_mesa_inputs *in, const double *keys,
                            const double *values, const double *d_o, const kern_ref_mesa_gradients *out);

// x = (h + diag(lambda))^-1 q by Cholesky; x is NaN if the matrix is not positive definite.
void kern_ref_mesa_exact(int depth, const double *h, const double *lambda, const double *q, double *x);
// The same by conjugate gradients with the solver's rule; returns the steps made.
int kern_ref_mesa_solve(int depth, const double *h, const double *lambda, const double *q, const kern_solver *solver,
                        double *x);

#endif

// SPDX-License-Identifier: Apache-2.0
// References of the gates of a scalar-decay mixer in double, one (token, head) a call.
//
// The mathematics stand in gates.c. Used by tests only.
#ifndef KERNELS_REF_GATES_H
#define KERNELS_REF_GATES_H

// g = log decay, beta = write weight; cap 1: none.
void kern_ref_gates(double a, double b, double cap, double *g, double *beta);
void kern_ref_gates_backward(double a, double b, double cap, double dg, double dbeta, double *da, double *db);

#endif

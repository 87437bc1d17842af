// SPDX-License-Identifier: Apache-2.0
// References of mLSTM's gates and of the division by a normaliser in double.
//
// The mathematics stand in maxplus_gates.c. Used by tests only.
#ifndef KERNELS_REF_MAXPLUS_GATES_H
#define KERNELS_REF_MAXPLUS_GATES_H

#include <stddef.h>

// One document of one head: input, forget, g, beta, m (length). before: m before the document. Returns the last m.
double kern_ref_maxplus_gates(const double *input, const double *forget, double cap, double before, double *g,
                              double *beta, double *m, size_t length);
// One token of one head, m a constant.
void kern_ref_maxplus_gates_backward(double input, double forget, double cap, double beta, double dg, double dbeta,
                                     double *dinput, double *dforget);

// One head of one token: o (width + 1) -> h (width). m: NULL or the stabiliser.
void kern_ref_normalise(const double *o, const double *m, double eps, double *h, size_t width);
void kern_ref_normalise_backward(const double *o, const double *m, double eps, const double *dh, double *d_o,
                                 size_t width);

#endif

// SPDX-License-Identifier: Apache-2.0
// References of RMSNorm and L2 normalisation in double, one vector of `width` a call.
//
// The mathematics stand in norm.c. Used by tests only.
#ifndef KERNELS_REF_NORM_H
#define KERNELS_REF_NORM_H

#include <stddef.h>

// One vector. gate may be NULL.
void kern_ref_rmsnorm(const double *x, const double *weight, const double *gate, double *y, size_t width, double eps,
                      double weight_offset);
// dx and dgate (NULL without gate) are written, dweight is added to.
void kern_ref_rmsnorm_backward(const double *x, const double *weight, const double *gate, const double *dy, double *dx,
                               double *dgate, double *dweight, size_t width, double eps, double weight_offset);
void kern_ref_l2norm(const double *x, double *y, size_t width, double eps);
void kern_ref_l2norm_backward(const double *x, const double *dy, double *dx, size_t width, double eps);

#endif

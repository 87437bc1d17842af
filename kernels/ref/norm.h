// SPDX-License-Identifier: Apache-2.0
// References of RMSNorm, LayerNorm and L2 normalisation in double, one vector of `width` a call.
//
// The mathematics stand in norm.c. Used by tests only.
#ifndef KERNELS_REF_NORM_H
#define KERNELS_REF_NORM_H

#include <stdbool.h>
#include <stddef.h>

typedef struct kern_ref_norm {
    size_t width;
    double eps, weight_offset;
    int activation; // of the gate, kern_activation
    bool gate_first, center;
} kern_ref_norm;

// One vector. weight and gate may be NULL.
void kern_ref_rmsnorm(kern_ref_norm norm, const double *x, const double *weight, const double *gate, double *y);
// dx and dgate (NULL without gate) are written, dweight (NULL without weight) is added to.
void kern_ref_rmsnorm_backward(kern_ref_norm norm, const double *x, const double *weight, const double *gate,
                               const double *dy, double *dx, double *dgate, double *dweight);
void kern_ref_l2norm(const double *x, double *y, size_t width, double eps);
void kern_ref_l2norm_backward(const double *x, const double *dy, double *dx, size_t width, double eps);

#endif

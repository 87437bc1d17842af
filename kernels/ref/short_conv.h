// SPDX-License-Identifier: Apache-2.0
// References of the depthwise causal convolution in double: one document, token by token.
//
// Documents and rows are cut by the caller; the mathematics stand in short_conv.c. Used by tests only.
#ifndef KERNELS_REF_SHORT_CONV_H
#define KERNELS_REF_SHORT_CONV_H

#include <stddef.h>

typedef struct kern_ref_conv {
    size_t channels, taps;
    int activation; // kern_activation
} kern_ref_conv;

// x, y (length, channels); weight (channels, taps); bias NULL or (channels); state NULL or (taps - 1, channels): the
// inputs before, oldest first, replaced by the last ones.
void kern_ref_short_conv(kern_ref_conv conv, const double *x, const double *weight, const double *bias, double *state,
                         double *y, size_t length);
// From an empty state. dx is written; dweight and dbias (may be NULL) are added to.
void kern_ref_short_conv_backward(kern_ref_conv conv, const double *x, const double *weight, const double *bias,
                                  const double *dy, double *dx, double *dweight, double *dbias, size_t length);

#endif

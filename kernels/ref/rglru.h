// SPDX-License-Identifier: Apache-2.0
// Reference of the RG-LRU in double: one channel of one document, token by token.
//
// The mathematics stand in rglru.c. Used by tests only.
#ifndef KERNELS_REF_RGLRU_H
#define KERNELS_REF_RGLRU_H

#include <stdbool.h>
#include <stddef.h>

// One channel: its token t at x[t * stride] and so on in all arrays.
typedef struct kern_ref_rglru_input {
    const double *x, *input_gate, *recurrence_gate;
    double recurrent_param;
    size_t length, stride;
    bool reset; // the first token is at position 0
} kern_ref_rglru_input;

// before: h before the document. Returns the last h.
double kern_ref_rglru(kern_ref_rglru_input in, double before, double *h);
// From h = 0 before the document. dx and the gates' gradients are written, *dparam is added to. The slope of the root
// is bounded by 1000.
typedef struct kern_ref_rglru_gradient {
    double *dx, *dinput_gate, *drecurrence_gate, *dparam;
} kern_ref_rglru_gradient;
void kern_ref_rglru_backward(kern_ref_rglru_input in, const double *h, const double *dh, kern_ref_rglru_gradient out);

#endif

// SPDX-License-Identifier: Apache-2.0
// References in double of the small families: rotary embedding, gated product, embedding, optimizer.
//
// Plain arrays, one token, element or parameter a call, the mathematics in elementwise.c. Used by tests only.
#ifndef KERNELS_REF_ELEMENTWISE_H
#define KERNELS_REF_ELEMENTWISE_H

#include <stddef.h>
#include <stdint.h>

// One head of one token in place: channels (i, i + rotary/2) turn by position * frequency[i]; sign -1 turns back.
void kern_ref_rope(double *x, const double *frequency, size_t rotary, int64_t position, double sign);

// One element: act(gate) up; activation: kern_activation.
double kern_ref_glu(int activation, double gate, double up);
void kern_ref_glu_backward(int activation, double gate, double up, double dy, double *dgate, double *dup);

// One token: y = scale weight[id]; grad[id] += scale dy.
void kern_ref_embed(const double *weight, int32_t id, double scale, double *y, size_t width);
void kern_ref_embed_backward(const double *dy, int32_t id, double scale, double *grad, size_t width);

typedef struct kern_ref_adamw {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step; // from 1
} kern_ref_adamw;

// One parameter.
void kern_ref_adamw_step(kern_ref_adamw adamw, double grad, double *parameter, double *m, double *v);

#endif

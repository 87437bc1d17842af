// SPDX-License-Identifier: Apache-2.0
// The output head in double precision: soft-capped logits, cross entropy and its gradients, divergence from a teacher.
//
// What the kernels are compared with: no tiles, no threads, the weight as plain numbers. Arrays are row-major. Tests
// only; memory is taken with malloc and never checked.
#ifndef KERNELS_REF_HEAD_H
#define KERNELS_REF_HEAD_H

// logits (tokens, vocabulary) = cap(W x), cap(l) = soft_cap tanh(l / soft_cap); soft_cap 0: none.
void kern_ref_head_logits(int tokens, int vocabulary, int width, double soft_cap, const double *x, const double *weight,
                          double *logits);

// loss (tokens) = -log softmax(logits)[target], 0 where target is -1. With dx (tokens, width): the gradient of
// sum_t target_weight[t] loss[t], and grad_weight (vocabulary, width) += it for W.
void kern_ref_head_loss(int tokens, int vocabulary, int width, double soft_cap, const double *x, const double *weight,
                        const int *target, const double *target_weight, double *loss, double *dx, double *grad_weight);

typedef struct kern_ref_head {
    int width;
    double soft_cap;
    const double *x, *weight; // (tokens, width), (vocabulary, width)
} kern_ref_head;

// divergence (tokens) = temperature^2 KL(softmax(teacher's logits / temperature) || softmax(logits / temperature)), 0
// where target is -1. With dx (tokens, width): dx and grad_weight += the gradient of sum_t target_weight[t]
// divergence[t].
void kern_ref_head_divergence(int tokens, int vocabulary, const kern_ref_head *head, const kern_ref_head *teacher,
                              double temperature, const int *target, const double *target_weight, double *divergence,
                              double *dx, double *grad_weight);

#endif

// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention in double precision: what the kernels are compared with.
//
// One document at a time: neither pages nor rings, neither batches nor blocks, all keys at hand. Arrays are row-major.
// Tests only; memory is taken with malloc and never checked.
#ifndef KERNELS_REF_ATTENTION_H
#define KERNELS_REF_ATTENTION_H

typedef struct kern_ref_attention {
    int heads, kv_heads, width, window; // window 0: full
    double scale;
} kern_ref_attention;

// Token t of `tokens` sees the keys max(0, t - window + 1) .. t. q, o (tokens, heads * width), k, v (tokens, kv_heads *
// width), lse (tokens, heads) may be NULL.
void kern_ref_attention_forward(const kern_ref_attention *s, int tokens, const double *q, const double *k,
                                const double *v, double *o, double *lse);
// Gradients of sum d_o . o; all of them are written.
void kern_ref_attention_backward(const kern_ref_attention *s, int tokens, const double *q, const double *k,
                                 const double *v, const double *d_o, double *dq, double *dk, double *dv);

#endif

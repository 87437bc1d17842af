// SPDX-License-Identifier: Apache-2.0
// SwiGLU (Shazeer 2020): y = silu(gate) up, silu(x) = x s(x), s the logistic function; over (T, width), element by
// element.
//
// Backward: dup = dy silu(gate), dgate = dy up s (1 + gate (1 - s)). Each element is read before it is written, so
// y may be gate and dgate or dup may be dy.
#include "kernels/cpu/isa/elementwise.h"

static void swiglu_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_swiglu_args *a = args;
    for (int64_t i = first; i < end; i += KERN_VL) {
        vf gate = vf_load_upto(a->gate.f + i, end - i), up = vf_load_upto(a->up.f + i, end - i);
        vf_store_upto(a->y.f + i, gate * vf_sigmoid(gate) * up, end - i);
    }
}

static void swiglu_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                  int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_swiglu_backward_args *a = args;
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf gate = vf_load_upto(a->gate.f + i, left), up = vf_load_upto(a->up.f + i, left);
        vf dy = vf_load_upto(a->dy.f + i, left), s = vf_sigmoid(gate);
        vf_store_upto(a->dgate.f + i, dy * up * (s * (1.0f + gate * (1.0f - s))), left);
        vf_store_upto(a->dup.f + i, dy * (gate * s), left);
    }
}

KERN_PREPARE(swiglu, kern_swiglu_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->width < 1 || !a->gate.ref || !a->up.ref || !a->y.ref ? KERN_INVALID : KERN_OK;
}

KERN_RUN(swiglu, kern_swiglu_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(swiglu_range, cpu, rows, a, count, 20.0 * (double)count);
    return KERN_OK;
}

KERN_PREPARE(swiglu_backward, kern_swiglu_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->gate.ref && a->up.ref && a->dy.ref && a->dgate.ref && a->dup.ref;
    return a->width < 1 || !complete ? KERN_INVALID : KERN_OK;
}

KERN_RUN(swiglu_backward, kern_swiglu_backward_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(swiglu_backward_range, cpu, rows, a, count, 30.0 * (double)count);
    return KERN_OK;
}

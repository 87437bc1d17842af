// SPDX-License-Identifier: Apache-2.0
// Gated product (GLU variants, Shazeer 2020): y = act(gate) up; over (T, width), element by element.
//
// Backward: dup = dy act(gate), dgate = dy up act'(gate). Each element is read before it is written, so y may be gate
// and dgate or dup may be dy.
#include "kernels/cpu/isa/activation.h"

static inline __attribute__((always_inline)) void glu_elements(const kern_glu_args *a, int64_t first, int64_t end,
                                                               int kind) {
    for (int64_t i = first; i < end; i += KERN_VL) {
        vf gate = vf_load_upto(a->gate.f + i, end - i), up = vf_load_upto(a->up.f + i, end - i);
        vf_store_upto(a->y.f + i, vf_activation(kind, gate) * up, end - i);
    }
}

static void glu_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_glu_args *a = args;
#define GLU_ELEMENTS(kind) glu_elements(a, first, end, kind)
    KERN_ACTIVATION_SWITCH(a->activation, GLU_ELEMENTS)
}

static inline __attribute__((always_inline)) void glu_gradients(const kern_glu_backward_args *a, int64_t first,
                                                                int64_t end, int kind) {
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf value, slope = vf_activation_slope(kind, vf_load_upto(a->gate.f + i, left), &value);
        vf up = vf_load_upto(a->up.f + i, left), dy = vf_load_upto(a->dy.f + i, left);
        vf_store_upto(a->dgate.f + i, dy * up * slope, left);
        vf_store_upto(a->dup.f + i, dy * value, left);
    }
}

static void glu_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                               int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_glu_backward_args *a = args;
#define GLU_GRADIENTS(kind) glu_gradients(a, first, end, kind)
    KERN_ACTIVATION_SWITCH(a->activation, GLU_GRADIENTS)
}

static bool shape_is_valid(int32_t width, int32_t activation) {
    return width >= 1 && kern_activation_is_valid(activation);
}

KERN_PREPARE(glu, kern_glu_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->gate.ref && a->up.ref && a->y.ref;
    return complete && shape_is_valid(a->width, a->activation) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(glu, kern_glu_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(glu_range, cpu, rows, a, count, 20.0 * (double)count);
    return KERN_OK;
}

KERN_PREPARE(glu_backward, kern_glu_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->gate.ref && a->up.ref && a->dy.ref && a->dgate.ref && a->dup.ref && a->dgate.ref != a->dup.ref;
    return complete && shape_is_valid(a->width, a->activation) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(glu_backward, kern_glu_backward_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(glu_backward_range, cpu, rows, a, count, 30.0 * (double)count);
    return KERN_OK;
}

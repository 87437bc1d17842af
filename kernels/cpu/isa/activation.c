// SPDX-License-Identifier: Apache-2.0
// Activations over (T, width), element by element: y = act(x), dx = dy act'(x); the kinds stand in kernels.h.
//
// Each element is read before it is written, so y may be x and dx may be dy.
#include "kernels/cpu/isa/activation.h"

static inline __attribute__((always_inline)) void values(const kern_activation_args *a, int64_t first, int64_t end,
                                                         int kind) {
    for (int64_t i = first; i < end; i += KERN_VL)
        vf_store_upto(a->y.f + i, vf_activation(kind, vf_load_upto(a->x.f + i, end - i)), end - i);
}

static void activation_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_activation_args *a = args;
#define VALUES(kind) values(a, first, end, kind)
    KERN_ACTIVATION_SWITCH(a->activation, VALUES)
}

static inline __attribute__((always_inline)) void gradients(const kern_activation_backward_args *a, int64_t first,
                                                            int64_t end, int kind) {
    for (int64_t i = first; i < end; i += KERN_VL) {
        vf value, slope = vf_activation_slope(kind, vf_load_upto(a->x.f + i, end - i), &value);
        vf_store_upto(a->dx.f + i, vf_load_upto(a->dy.f + i, end - i) * slope, end - i);
    }
}

static void activation_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                      int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_activation_backward_args *a = args;
#define GRADIENTS(kind) gradients(a, first, end, kind)
    KERN_ACTIVATION_SWITCH(a->activation, GRADIENTS)
}

static bool shape_is_valid(int32_t width, int32_t activation) {
    return width >= 1 && kern_activation_is_valid(activation);
}

KERN_PREPARE(activation, kern_activation_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->x.ref && a->y.ref && shape_is_valid(a->width, a->activation) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(activation, kern_activation_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(activation_range, cpu, rows, a, count, 20.0 * (double)count);
    return KERN_OK;
}

KERN_PREPARE(activation_backward, kern_activation_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->dy.ref && a->dx.ref;
    return complete && shape_is_valid(a->width, a->activation) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(activation_backward, kern_activation_backward_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(activation_backward_range, cpu, rows, a, count, 25.0 * (double)count);
    return KERN_OK;
}

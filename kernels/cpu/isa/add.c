// SPDX-License-Identifier: Apache-2.0
// y = 0, and the residual sum y += x over (T, width), element by element, exact up to the one rounding of the sum.
//
// Where a product precedes it, the product's own residual operand saves this pass over memory.
#include "kernels/cpu/isa/elementwise.h"

KERN_PREPARE(clear, kern_clear_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->width < 1 || !a->y.ref ? KERN_INVALID : KERN_OK;
}

KERN_RUN(clear, kern_clear_args) {
    (void)cpu;
    memset(a->y.p, 0, sizeof(float) * (size_t)rows->n_tokens * (size_t)a->width);
    return KERN_OK;
}

static void add_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_add_args *a = args;
    const float *x = a->x.f;
    float *y = a->y.f;
    for (int64_t i = first; i < end; i += KERN_VL)
        vf_store_upto(y + i, vf_load_upto(y + i, end - i) + vf_load_upto(x + i, end - i), end - i);
}

KERN_PREPARE(add, kern_add_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->width < 1 || !a->x.ref || !a->y.ref ? KERN_INVALID : KERN_OK;
}

KERN_RUN(add, kern_add_args) {
    int64_t count = (int64_t)rows->n_tokens * a->width;
    kern_over(add_range, cpu, rows, a, count, 2.0 * (double)count);
    return KERN_OK;
}

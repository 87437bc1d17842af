// SPDX-License-Identifier: Apache-2.0
// Exits of looped models: at which loop a token's output is read.
//
// What is left of the probability after r loops, S_r, is a product of logistic functions; p_1 + ... + p_r = 1 - S_r. A
// logit that is no number never ends a token.
#include "kernels/cpu/isa/elementwise.h"

// From 1 on.
static int32_t loop_of(const kern_exit_read_args *a, const kern_exit *wanted, int32_t t) {
    const int32_t most = wanted->max_loops > 0 && wanted->max_loops < a->loops ? wanted->max_loops : a->loops;
    if (!a->z.f || wanted->max_loops <= 0 || wanted->threshold >= 1)
        return most;
    float left = 1;
    for (int32_t r = 0; r + 1 < most; r++) {
        left /= 1 + expf(a->z.f[(int64_t)r * a->stride + t]);
        if (1 - left >= wanted->threshold)
            return r + 1;
    }
    return most;
}

static void read_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_exit_read_args *a = args;
    for (int64_t t = first; t < end; t++) {
        const int32_t loop = loop_of(a, &rows->row[rows->token_row[t]].exit, (int32_t)t);
        const float *x = a->x.f + ((int64_t)(loop - 1) * a->stride + t) * a->width;
        memcpy(a->y.f + t * a->width, x, (size_t)a->width * sizeof *x);
        a->loop.i[t] = loop;
    }
}

KERN_PREPARE(exit_read, kern_exit_read_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_exit_read_check(a);
}

KERN_RUN(exit_read, kern_exit_read_args) {
    if (rows->n_tokens > a->stride)
        return KERN_INVALID;
    kern_over(read_range, cpu, rows, a, rows->n_tokens, 2.0 * rows->n_tokens * a->width);
    return KERN_OK;
}

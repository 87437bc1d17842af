// SPDX-License-Identifier: Apache-2.0
// Embedding: y[t] = scale weight[id[t]]; ids from the row table, or from those drawn before where it says so; weight
// (vocabulary, width) in any type.
//
// Backward: grad[id[t]] += scale dy[t], tokens in ascending order. The team shares the columns, not the tokens, so one
// element of the gradient is the work of one thread and its order of sums is the order of the tokens. An id outside the
// vocabulary is refused before anything is written.
#include "kernels/cpu/isa/elementwise.h"
#include "kernels/cpu/isa/quant.h"

enum { COLUMN_UNIT = 64 }; // columns of one thread come in whole cache lines

static int32_t id_of(const kern_rows *rows, const kern_embed_args *a, int64_t t) {
    int32_t id = rows->id[t];
    return id < 0 && a->drawn.i ? a->drawn.i[-1 - id] : id;
}

static bool ids_are_below(const kern_rows *rows, const kern_embed_args *a, int64_t vocabulary) {
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        int32_t id = id_of(rows, a, t);
        if (id < 0 || id >= vocabulary)
            return false;
    }
    return true;
}

static void widen_row(const uint16_t *from, float *to, int32_t width, float scale) {
    for (int32_t i = 0; i < width; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        to[i] = scale * value;
    }
}

static void embed_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_embed_args *a = args;
    const kern_weight *weight = a->weight.w;
    for (int64_t t = first; t < end; t++) {
        size_t row = (size_t)id_of(rows, a, t) * (size_t)a->width;
        float *y = a->y.f + t * a->width;
        if (kern_is_quantised(weight)) {
            KERN_NAME(quant_row)(weight, id_of(rows, a, t), a->scale, y);
            continue;
        }
        if (weight->dtype == KERN_BF16) {
            widen_row((const uint16_t *)weight->data + row, y, a->width, a->scale);
            continue;
        }
        const float *from = (const float *)weight->data + row;
        for (int32_t i = 0; i < a->width; i += KERN_VL)
            vf_store_upto(y + i, a->scale * vf_load_upto(from + i, a->width - i), a->width - i);
    }
}

static void embed_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                 int64_t end) {
    (void)cpu;
    const kern_embed_backward_args *a = args;
    int64_t column0 = first * COLUMN_UNIT, column1 = end * COLUMN_UNIT < a->width ? end * COLUMN_UNIT : a->width;
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        const float *dy = a->dy.f + (int64_t)t * a->width;
        float *grad = a->grad.f + (int64_t)rows->id[t] * a->width;
        for (int64_t i = column0; i < column1; i += KERN_VL) {
            int64_t left = column1 - i;
            vf_store_upto(grad + i, vf_load_upto(grad + i, left) + a->scale * vf_load_upto(dy + i, left), left);
        }
    }
}

KERN_PREPARE(embed, kern_embed_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->width < 1 || !a->weight.ref || !a->y.ref ? KERN_INVALID : KERN_OK;
}

KERN_RUN(embed, kern_embed_args) {
    const kern_weight *weight = a->weight.w;
    if (weight->cols != a->width || !ids_are_below(rows, a, weight->rows))
        return KERN_INVALID;
    kern_over(embed_range, cpu, rows, a, rows->n_tokens, (double)rows->n_tokens * a->width);
    return KERN_OK;
}

KERN_PREPARE(embed_backward, kern_embed_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->width < 1 || !a->dy.ref || !a->grad.ref ? KERN_INVALID : KERN_OK;
}

KERN_RUN(embed_backward, kern_embed_backward_args) {
    int64_t units = ((int64_t)a->width + COLUMN_UNIT - 1) / COLUMN_UNIT;
    kern_over(embed_backward_range, cpu, rows, a, units, 2.0 * rows->n_tokens * a->width);
    return KERN_OK;
}

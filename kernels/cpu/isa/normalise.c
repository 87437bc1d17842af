// SPDX-License-Identifier: Apache-2.0
// A read-out divided by its normaliser n, the last of a head's V + 1 columns of o:
//
//     h = o / d,  d = max(|n|, e^-m) + eps (mLSTM, with m)  or  d = n + eps (linear attention)
// Backward: do = dh / d and, through the last column, dn = -(dh . o) / d^2 [sign(n), 0 where e^-m is the larger].
// h is not needed: dh . h = (dh . o) / d. Vectors are free of one another.
#include "kernels/cpu/isa/elementwise.h"

// d; *slope = dd/dn. Scalars: one a head and token.
static float divisor(float n, const float *m, float eps, float *slope) {
    *slope = 1;
    if (!m)
        return n + eps;
    const float size = fabsf(n), floor = expf(-*m);
    *slope = size >= floor ? copysignf(1, n) : 0;
    return (size < floor ? floor : size) + eps;
}

static void normalise_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_normalise_args *a = args;
    const int32_t width = a->value_width;
    for (int64_t vector = first; vector < end; vector++) {
        const float *o = a->o.f + vector * (width + 1);
        float *h = a->h.f + vector * width, slope;
        const float scale = 1.0f / divisor(o[width], a->m.f ? a->m.f + vector : NULL, a->eps, &slope);
        for (int32_t i = 0; i < width; i += KERN_VL)
            vf_store_upto(h + i, vf_load_upto(o + i, width - i) * scale, width - i);
    }
}

static void normalise_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                     int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_normalise_backward_args *a = args;
    const int32_t width = a->value_width;
    for (int64_t vector = first; vector < end; vector++) {
        const float *o = a->o.f + vector * (width + 1), *dh = a->dh.f + vector * width;
        float *d_o = a->d_o.f + vector * (width + 1), slope;
        const float scale = 1.0f / divisor(o[width], a->m.f ? a->m.f + vector : NULL, a->eps, &slope);
        const float along = kern_dot(dh, o, width) * scale;
        for (int32_t i = 0; i < width; i += KERN_VL)
            vf_store_upto(d_o + i, vf_load_upto(dh + i, width - i) * scale, width - i);
        d_o[width] = -along * scale * slope;
    }
}

static bool shape_is_valid(int32_t heads, int32_t width, float eps) {
    return heads >= 1 && width >= 1 && eps >= 0 && isfinite(eps);
}

KERN_PREPARE(normalise, kern_normalise_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->o.ref && a->h.ref && a->o.ref != a->h.ref;
    return complete && shape_is_valid(a->heads, a->value_width, a->eps) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(normalise, kern_normalise_args) {
    const int64_t vectors = (int64_t)rows->n_tokens * a->heads;
    kern_over(normalise_range, cpu, rows, a, vectors, (double)vectors * (a->value_width + 100.0));
    return KERN_OK;
}

KERN_PREPARE(normalise_backward, kern_normalise_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->o.ref && a->dh.ref && a->d_o.ref && a->d_o.ref != a->dh.ref && a->d_o.ref != a->o.ref;
    return complete && shape_is_valid(a->heads, a->value_width, a->eps) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(normalise_backward, kern_normalise_backward_args) {
    const int64_t vectors = (int64_t)rows->n_tokens * a->heads;
    kern_over(normalise_backward_range, cpu, rows, a, vectors, (double)vectors * (3.0 * a->value_width + 100.0));
    return KERN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// The step form that the recurrences share: one token, one state (D, width), in place, S~ = S + decay_m1 S row by row,
// then
//
//   u = weight v, or weight (v - S~^T k) by the delta rule      S = S~ + k u^T      o = S^T q
//
// Columns of a state do not see each other. A strip of columns is read once for the delta rule's error, when it is
// needed, and once more (from the nearest cache) for the write and the read-out together.
#ifndef KERNELS_CPU_ISA_RECURRENCE_STEP_H
#define KERNELS_CPU_ISA_RECURRENCE_STEP_H

#include "kernels/cpu/isa/gemm.h"

enum { STEP_VECTORS = 4 };

typedef struct step_token {
    const float *decay_m1; // decay of row d, minus 1, at decay_m1[d * decay_stride]
    int decay_stride;      // 0 or 1
    const float *k, *v;    // (D), (width rounded up to whole vectors)
    float weight;
    bool delta;
    const float *q; // NULL: no read-out
} step_token;

static inline __attribute__((always_inline)) vf step_load(const float *p, int v, int lanes) {
    return lanes == KERN_VL ? vf_load(p + v * KERN_VL) : vf_load_part(p, lanes);
}

// `vectors` vectors of each row; only the first `lanes` columns when they are fewer than one vector.
static inline __attribute__((always_inline)) void step_columns(const step_token *t, float *state, int64_t ld, int depth,
                                                               int column, float *o, const int vectors,
                                                               const int lanes) {
    const float *k = t->k, *q = t->q, *decay_m1 = t->decay_m1;
    const int64_t stride = t->decay_stride;
    vf write[STEP_VECTORS], sum[STEP_VECTORS];
    state += column;
    for (int v = 0; v < vectors; v++) {
        write[v] = vf_load(t->v + column + v * KERN_VL);
        sum[v] = (vf){0};
    }
    if (t->delta) {
        const float *s = state;
        for (int d = 0; d < depth; d++, s += ld) {
            const float key = k[d] + k[d] * decay_m1[d * stride];
            for (int v = 0; v < vectors; v++)
                sum[v] += key * step_load(s, v, lanes);
        }
        for (int v = 0; v < vectors; v++) {
            write[v] -= sum[v];
            sum[v] = (vf){0};
        }
    }
    for (int v = 0; v < vectors; v++)
        write[v] *= t->weight;
    for (int d = 0; d < depth; d++, state += ld) {
        const float key = k[d], decay = decay_m1[d * stride], query = q ? q[d] : 0;
        for (int v = 0; v < vectors; v++) {
            vf s = step_load(state, v, lanes);
            s += s * decay + key * write[v];
            if (lanes == KERN_VL)
                vf_store(state + v * KERN_VL, s);
            else
                vf_store_part(state, s, lanes);
            sum[v] += query * s;
        }
    }
    if (q)
        for (int v = 0; v < vectors; v++)
            vf_store(o + column + v * KERN_VL, sum[v]);
}

// o: width rounded up to whole vectors.
static inline void step_state(const step_token *t, float *state, int64_t ld, int depth, int width, float *o) {
    int j = 0;
    for (; j + STEP_VECTORS * KERN_VL <= width; j += STEP_VECTORS * KERN_VL)
        step_columns(t, state, ld, depth, j, o, STEP_VECTORS, KERN_VL);
    for (; j + KERN_VL <= width; j += KERN_VL)
        step_columns(t, state, ld, depth, j, o, 1, KERN_VL);
    if (j < width)
        step_columns(t, state, ld, depth, j, o, 1, width - j);
}

#endif

// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward of a Mesa layer share: shape checks, the padded rows of a chunk, Lambda, the
// advance of [Hk | Hv] over a chunk.
//
// [Hk | Hv] is one matrix (D, W) with W = padded D + padded V, so that both accumulators are one product. The chunk's
// write weights enter as square roots on both operands, K~ = sqrt(w) K and V~ = sqrt(w) V: Hk stays symmetric bit for
// bit and positive semidefinite under any rounding (models.md 2.9).
#ifndef KERNELS_CPU_ISA_MESA_H
#define KERNELS_CPU_ISA_MESA_H

#include "kernels/cpu/isa/mesa_solve.h"

enum { MESA_KEY_MAX = 256, MESA_VALUE_MAX = 1024 };

typedef struct mesa_shape {
    int heads, depth, width; // H, D, V
    int d, w, row;           // padded D, padded V, d + w
    int chunk;               // C
} mesa_shape;

static inline mesa_shape mesa_shape_of(const kern_mesa *mesa, int chunk) {
    const int d = gemm_pad(mesa->key_width), w = gemm_pad(mesa->value_width);
    return (mesa_shape){mesa->heads, mesa->key_width, mesa->value_width, d, w, d + w, chunk};
}

// log(1 + e^x) = max(x, 0) + log1p(y), y = e^-|x|; log1p(y) = 2 artanh(z), z = y / (2 + y) <= 1/3.
static inline vf mesa_softplus(vf x) {
    vf y = vf_exp(vf_min(x, -x)), z = y / (2.0f + y), s = z * z;
    vf p = vf_set(1.0f / 15);
    p = p * s + 1.0f / 13;
    p = p * s + 1.0f / 11;
    p = p * s + 1.0f / 9;
    p = p * s + 1.0f / 7;
    p = p * s + 1.0f / 5;
    p = p * s + 1.0f / 3;
    return vf_max(x, (vf){0}) + 2.0f * (z + z * s * p);
}

// Lambda of one head, zeros behind depth.
static inline void mesa_lambda(const mesa_shape *shape, const float *params, float bound, float *lambda) {
    chunk_load(lambda, shape->d, params, shape->depth, 1, shape->depth);
    for (int j = 0; j < shape->d; j += KERN_VL)
        vf_store(lambda + j, mesa_softplus(vf_load(lambda + j)) + bound);
    for (int j = shape->depth; j < shape->d; j++)
        lambda[j] = 0;
}

// [Hk | Hv] over a chunk. k (length, d) and v (length, w) as they are; written: (length, row) floats.
static inline void mesa_advance(const mesa_shape *shape, const chunk_decay *decay, const float *k, const float *v,
                                const float *beta, float *written, float *state) {
    for (int i = 0; i < decay->length; i++) {
        const float root = sqrtf(beta[i] * decay->to_end[i]);
        chunk_scale_rows(written + i * shape->row, k + i * shape->d, shape->d, &root, 1);
        chunk_scale_rows(written + i * shape->row + shape->d, v + i * shape->w, shape->w, &root, 1);
    }
    chunk_advance_state(decay, state, shape->row, written, shape->row, written, shape->row, shape->depth, shape->row);
}

#endif

// SPDX-License-Identifier: Apache-2.0
// Operations on the elements of activations, one element or four neighbours a thread: what elementwise.cu launches and
// a chain has as phases.
#ifndef KERNELS_CUDA_ELEMENTWISE_CUH
#define KERNELS_CUDA_ELEMENTWISE_CUH

#include <cmath>

#include "kernels/cuda/elements.cuh"

struct cuda_embedding {
    cuda_weight weight;
    const int32_t *drawn; // optional: ids that negative ones stand for
    float *y;
    float scale;
};

// An id outside the vocabulary gives a row that is not a number: the host's table may not be looked at in a graph.
static __device__ __forceinline__ void cuda_embed(const cuda_table *table, const cuda_embedding &e, int32_t t,
                                                  int32_t column) {
    int32_t id = table->id[t];
    if (id < 0 && e.drawn)
        id = e.drawn[-1 - id];
    const bool known = id >= 0 && id < e.weight.rows;
    e.y[(int64_t)t * e.weight.cols + column] = known ? e.scale * cuda_weight_at(e.weight, id, column) : NAN;
}

// Operations whose elements depend on their place in the array alone. Which way the four go does not change a bit.
enum cuda_elements_kind { CUDA_CLEAR, CUDA_ADD, CUDA_ACTIVATION, CUDA_GLU };

// y = 0;  y += x;  y = act(x);  y = act(x) more
struct cuda_elements {
    cuda_elements_kind kind;
    const float *x, *more;
    float *y;
    int32_t width, activation;
    bool wide;              // all operands are aligned
    __nv_bfloat16 *rounded; // optional: y also goes there (cuda_copies_offer)
};

// The four from element i on, of which `left` exist.
static __device__ __forceinline__ void cuda_elements_quad(const cuda_elements &e, int64_t i, int64_t left) {
    cuda_quad q = {}, more = {};
    if (e.kind != CUDA_CLEAR)
        q = cuda_load(e.x + i, left, e.wide);
    if (e.kind == CUDA_ADD)
        more = cuda_load(e.y + i, left, e.wide);
    if (e.kind == CUDA_GLU)
        more = cuda_load(e.more + i, left, e.wide);
    if (e.kind == CUDA_ACTIVATION || e.kind == CUDA_GLU)
        q = cuda_activate_quad(e.activation, q);
#pragma unroll
    for (int j = 0; j < 4; j++)
        q.v[j] = e.kind == CUDA_ADD ? more.v[j] + q.v[j] : e.kind == CUDA_GLU ? q.v[j] * more.v[j] : q.v[j];
    cuda_store(e.y + i, q, left, e.wide);
    if (e.rounded)
        *(uint2 *)(e.rounded + i) = cuda_round_quad(q);
}

#endif

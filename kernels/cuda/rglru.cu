// SPDX-License-Identifier: Apache-2.0
// RG-LRU (De et al. 2024), channel by channel: h_t = a h_{t-1} + b, with r = s(recurrence_gate), i = s(input_gate),
// L = -8 r softplus(p), a = e^L and b = sqrt(-expm1(2 L)) (i x)_t; at position 0 h_t = (i x)_t. -expm1 keeps its digits
// where the decay is near one.
//
// A step of generated tokens alone: a thread owns a channel of a row. Any other batch: a block owns 32 channels of a
// row and goes over its tokens 64 at a time; 16 warps make a and b of four tokens each, which is nearly all the work,
// while one more goes through those of the tile before in order, the state in a register. Both ways have the same bits.
#include "kernels/cuda/elements.cuh"

enum { MAKERS = 16, EACH = 4, TILE = MAKERS * EACH };

struct lru_terms {
    float decay, input; // decay < 0: the state starts anew
};

static __device__ __forceinline__ lru_terms terms_of(const kern_rglru_args &a, int64_t at, float softplus, bool reset) {
    const float input = __fmul_rn(cuda_sigmoid(a.input_gate.f[at]), a.x.f[at]);
    if (reset)
        return {-1.0f, input};
    const float r = cuda_sigmoid(a.recurrence_gate.f[at]);
    const float L = __fmul_rn(__fmul_rn(-8.0f, r), softplus);
    return {expf(L), __fmul_rn(sqrtf(-expm1f(__fmul_rn(2.0f, L))), input)};
}

static __device__ __forceinline__ float advance(const lru_terms &terms, float h) {
    return terms.decay < 0 ? terms.input : fmaf(terms.decay, h, terms.input);
}

// Generated tokens alone: row r is token r.
static __global__ void rglru_step_kernel(const cuda_table *table, kern_rglru_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), c = cuda_plane_column();
    if (t >= table->n_tokens || c >= a.width)
        return;
    float *state = cuda_slot(table, a.state, table->row[t].slot);
    const int64_t at = (int64_t)t * a.width + c;
    const lru_terms terms = terms_of(a, at, cuda_softplus(a.recurrent_param.f[c]), table->token_position[t] == 0);
    const float h = advance(terms, state ? state[c] : 0.0f);
    a.h.f[at] = h;
    if (state)
        state[c] = h;
}

// A maker's terms of the tile at `first`; nothing beyond `end`.
static __device__ __forceinline__ void make_terms(const cuda_table *table, const kern_rglru_args &a, int32_t first,
                                                  int32_t end, int32_t c, float softplus,
                                                  lru_terms (&terms)[TILE][CUDA_WARP]) {
    const int32_t lane = threadIdx.x, warp = threadIdx.y;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int32_t at = i * MAKERS + warp, t = first + at;
        if (t < end)
            terms[at][lane] = terms_of(a, (int64_t)t * a.width + c, softplus, table->token_position[t] == 0);
    }
}

static __global__ void __launch_bounds__((MAKERS + 1) * CUDA_WARP)
    rglru_kernel(const cuda_table *table, kern_rglru_args a) {
    cuda_begin();
    cuda_await();
    __shared__ lru_terms terms[2][TILE][CUDA_WARP];
    if ((int32_t)blockIdx.x >= table->n_rows)
        return;
    const int32_t c = blockIdx.y * CUDA_WARP + threadIdx.x;
    const bool there = c < a.width, makes = there && threadIdx.y < MAKERS, advances = there && threadIdx.y == MAKERS;
    const kern_row *row = &table->row[blockIdx.x];
    const int32_t end = row->token0 + row->length;
    float *state = cuda_slot(table, a.state, row->slot);
    const float softplus = makes ? cuda_softplus(a.recurrent_param.f[c]) : 0.0f;
    float h = advances && state ? state[c] : 0.0f;
    if (makes)
        make_terms(table, a, row->token0, end, c, softplus, terms[0]);
    for (int32_t first = row->token0, side = 0; first < end; first += TILE, side ^= 1) {
        __syncthreads();
        if (makes)
            make_terms(table, a, first + TILE, end, c, softplus, terms[side ^ 1]);
        for (int32_t i = 0; advances && i < min(end - first, (int32_t)TILE); i++) {
            h = advance(terms[side][i][threadIdx.x], h);
            a.h.f[(int64_t)(first + i) * a.width + c] = h;
        }
    }
    if (advances && state)
        state[c] = h;
}

kern_status cuda_rglru_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_rglru_args *a = (const kern_rglru_args *)args;
    const bool complete = a->x.ref && a->input_gate.ref && a->recurrence_gate.ref && a->recurrent_param.ref && a->h.ref;
    const bool apart = a->h.ref != a->x.ref && a->h.ref != a->input_gate.ref && a->h.ref != a->recurrence_gate.ref;
    return complete && apart && a->width >= 1 ? KERN_OK : KERN_INVALID;
}

kern_status cuda_rglru_run(const cuda_step *step, const void *args) {
    const kern_rglru_args *a = (const kern_rglru_args *)args;
    if (step->generated) {
        const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
        return cuda_start(step, rglru_step_kernel, plane.grid, plane.block, 0, step->table, *a);
    }
    const dim3 grid((unsigned)cuda_blocks(step->rows, 1), (unsigned)cuda_blocks(a->width, CUDA_WARP));
    return cuda_start(step, rglru_kernel, grid, dim3(CUDA_WARP, MAKERS + 1), 0, step->table, *a);
}

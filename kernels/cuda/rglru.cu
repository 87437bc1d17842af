// SPDX-License-Identifier: Apache-2.0
// RG-LRU (De et al. 2024), channel by channel: h_t = a h_{t-1} + b, with r = s(recurrence_gate), i = s(input_gate),
// L = -8 r softplus(p), a = e^L and b = sqrt(-expm1(2 L)) (i x)_t; at position 0 h_t = (i x)_t. -expm1 keeps its digits
// where the decay is near one.
//
// A step of generated tokens alone: a thread owns a channel of a row. Any other batch: a block owns 32 channels of a
// row and goes over its tokens 16 at a time; its 16 warps make a and b of a token each, which is nearly all the work,
// then the first warp goes through them in order, the state in a register. Both ways have the same bits.
#include "kernels/cuda/elements.cuh"

enum { TILE = 16 };

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

static __global__ void __launch_bounds__(TILE *CUDA_WARP) rglru_kernel(const cuda_table *table, kern_rglru_args a) {
    cuda_begin();
    cuda_await();
    __shared__ lru_terms terms[TILE][CUDA_WARP];
    if ((int32_t)blockIdx.x >= table->n_rows)
        return;
    const int32_t lane = threadIdx.x, warp = threadIdx.y, c = blockIdx.y * CUDA_WARP + lane;
    const bool there = c < a.width;
    const kern_row *row = &table->row[blockIdx.x];
    const int32_t end = row->token0 + row->length;
    float *state = cuda_slot(table, a.state, row->slot);
    const float softplus = there ? cuda_softplus(a.recurrent_param.f[c]) : 0.0f;
    float h = there && state ? state[c] : 0.0f;
    for (int32_t first = row->token0; first < end; first += TILE) {
        const int32_t t = first + warp, count = end - first < TILE ? end - first : TILE;
        if (there && warp < count)
            terms[warp][lane] = terms_of(a, (int64_t)t * a.width + c, softplus, table->token_position[t] == 0);
        __syncthreads();
        if (there && warp == 0)
            for (int32_t i = 0; i < count; i++) {
                h = advance(terms[i][lane], h);
                a.h.f[(int64_t)(first + i) * a.width + c] = h;
            }
        __syncthreads();
    }
    if (there && warp == 0 && state)
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
    return cuda_start(step, rglru_kernel, grid, dim3(CUDA_WARP, TILE), 0, step->table, *a);
}

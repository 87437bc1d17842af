// SPDX-License-Identifier: Apache-2.0
// Gates: log decay g (T, heads * channels) and write weight beta (T, heads), the laws stand in kernels.h; mLSTM's
// stabilised gates; a read-out divided by its normaliser.
//
// gates: a thread makes one decay, and where its channel is the head's first also the head's write weight.
// maxplus_gates: a warp owns one head of one row. Its lanes take 32 tokens at a time; then all go through the scan of
// the stabiliser together, each keeping its own token's values, so the order of the sums is that of the tokens.
// normalise: a warp owns one head of one token.
#include "kernels/cuda/gates.cuh"

enum { WARPS = 4, THREADS = WARPS * CUDA_WARP };

static __global__ void gates_kernel(const cuda_table *table, const kern_gates_args a, int32_t channels) {
    cuda_begin();
    const int32_t t = cuda_plane_item(), c = cuda_plane_column();
    const bool there = t < table->n_tokens && c < a.gates.heads * channels;
    cuda_await();
    if (there)
        cuda_gate(a, channels, t, c);
}

kern_status cuda_gates_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_gates_args_check((const kern_gates_args *)args);
}

kern_status cuda_gates_run(const cuda_step *step, const void *args) {
    const kern_gates_args *a = (const kern_gates_args *)args;
    const int32_t channels = cuda_gate_channels(&a->gates);
    const cuda_plane plane = cuda_plane_of(step->tokens, a->gates.heads * channels);
    return cuda_start(step, gates_kernel, plane.grid, plane.block, 0, step->table, *a, channels);
}

// -------------------------------------------------------------------------------------------------- stabilised gates

static __global__ void __launch_bounds__(THREADS) maxplus_kernel(const cuda_table *table, kern_maxplus_gates_args a) {
    cuda_begin();
    cuda_await();
    const int32_t lane = threadIdx.x % CUDA_WARP, head = blockIdx.y * WARPS + threadIdx.x / CUDA_WARP;
    if ((int32_t)blockIdx.x >= table->n_rows || head >= a.heads)
        return;
    const kern_row *row = &table->row[blockIdx.x];
    const int32_t token0 = row->token0, end = token0 + row->length;
    float *state = cuda_slot(table, a.state, row->slot);
    float m = state ? state[head] : 0.0f;
    for (int32_t first = token0; first < end; first += CUDA_WARP) {
        const int32_t t = first + lane, count = end - first < CUDA_WARP ? end - first : CUDA_WARP;
        const int64_t at = (int64_t)t * a.heads + head;
        float input = 0, forget = 0, kept = 0, stabiliser = 0;
        bool begins = false;
        if (lane < count) {
            input = cuda_soft_cap(a.input.f[at], a.soft_cap);
            forget = cuda_log_sigmoid(cuda_soft_cap(a.forget.f[at], a.soft_cap));
            begins = t > token0 && table->token_start[t] == t;
        }
        const unsigned beginnings = __ballot_sync(0xffffffffu, begins);
        for (int32_t i = 0; i < count; i++) {
            m = beginnings >> i & 1 ? 0.0f : m;
            const float sum = __fadd_rn(__shfl_sync(0xffffffffu, forget, i), m);
            m = cuda_max(sum, __shfl_sync(0xffffffffu, input, i));
            kept = i == lane ? sum : kept;
            stabiliser = i == lane ? m : stabiliser;
        }
        if (lane < count) {
            a.g.f[at] = __fsub_rn(kept, stabiliser);
            a.beta.f[at] = expf(__fsub_rn(input, stabiliser));
            a.m.f[at] = stabiliser;
        }
    }
    if (state && lane == 0)
        state[head] = m;
}

kern_status cuda_maxplus_gates_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_maxplus_gates_args *a = (const kern_maxplus_gates_args *)args;
    const bool complete = a->input.ref && a->forget.ref && a->g.ref && a->beta.ref && a->m.ref;
    return complete && a->heads >= 1 && a->soft_cap >= 0 && isfinite(a->soft_cap) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_maxplus_gates_run(const cuda_step *step, const void *args) {
    const kern_maxplus_gates_args *a = (const kern_maxplus_gates_args *)args;
    const dim3 grid((unsigned)cuda_blocks(step->rows, 1), (unsigned)cuda_blocks(a->heads, WARPS));
    return cuda_start(step, maxplus_kernel, grid, THREADS, 0, step->table, *a);
}

// -------------------------------------------------------------------------------------------------------- normaliser

static __global__ void __launch_bounds__(THREADS) normalise_kernel(const cuda_table *table, kern_normalise_args a) {
    cuda_begin();
    cuda_await();
    const int32_t lane = threadIdx.x % CUDA_WARP, width = a.value_width;
    const int64_t vector = (int64_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (vector >= (int64_t)table->n_tokens * a.heads)
        return;
    const float *o = a.o.f + vector * (width + 1);
    float *h = a.h.f + vector * width;
    float divisor = o[width];
    if (a.m.f) {
        const float size = fabsf(divisor), floor = expf(-a.m.f[vector]);
        divisor = size < floor ? floor : size;
    }
    const float scale = 1.0f / __fadd_rn(divisor, a.eps);
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        h[i] = o[i] * scale;
}

kern_status cuda_normalise_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_normalise_args *a = (const kern_normalise_args *)args;
    const bool complete = a->o.ref && a->h.ref && a->o.ref != a->h.ref;
    const bool valid = a->heads >= 1 && a->value_width >= 1 && a->eps >= 0 && isfinite(a->eps);
    return complete && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_normalise_run(const cuda_step *step, const void *args) {
    const kern_normalise_args *a = (const kern_normalise_args *)args;
    const int blocks = cuda_blocks((int64_t)step->tokens * a->heads, WARPS);
    return cuda_start(step, normalise_kernel, blocks, THREADS, 0, step->table, *a);
}

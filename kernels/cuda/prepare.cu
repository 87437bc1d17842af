// SPDX-License-Identifier: Apache-2.0
// Convolutions, norms of their heads and gates of generated tokens as one launch (prepare.cuh), or as a phase of a
// chain.
//
// heads_kernel, heads of up to 128 channels whose activation is none or SiLU: a warp has the same piece of some
// neighbouring tokens, as many as let all blocks be there at once. So it reads its weights once, and the next token's
// inputs are on their way while it works on one. prepare_kernel, all else: a piece of one token a warp.
#include "kernels/cuda/prepare.cuh"

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/recurrence.cuh"

enum { WARPS = 4 };

static __global__ void __launch_bounds__(WARPS *CUDA_WARP)
    prepare_kernel(const cuda_table *table, const __grid_constant__ preparation p) {
    cuda_begin();
    const int32_t t = blockIdx.x;
    const prepare_place at = prepare_find(p, blockIdx.y * WARPS + threadIdx.x / CUDA_WARP);
    const bool convolves = t < table->n_tokens && at.part < p.parts;
    prepare_fetched<PREPARE_QUADS> fetched;
    if (convolves)
        prepare_fetch_weights(p.part[at.part], at.index, fetched);
    cuda_await();
    if (convolves) {
        prepare_fetch_state(table, p.part[at.part], table->row[t].slot, at.index, fetched);
        prepare_convolutions(p.part[at.part], t, at.index, fetched, [](int32_t, const cuda_quad &) {});
    } else if (t < table->n_tokens)
        prepare_gates(p, t, at.index);
}

// ------------------------------------------------------------------------------------------------------- some tokens

constexpr int HEADS_BLOCKS = 6; // a processor

// Tokens first to end, a lane's window that of token first + lane.
static __device__ __forceinline__ void make_pieces(const prepare_part &p, int32_t index, int32_t first, int32_t end,
                                                   float *window, const prepare_fetched<1> &fetched) {
    const int32_t i = (int32_t)threadIdx.x % CUDA_WARP * CUDA_QUAD, c = index * p.width + i;
    const bool inside = i < p.width && c < p.conv.channels;
    const auto fetch = [&](int32_t t) {
        float *own = (float *)__shfl_sync(~0u, (unsigned long long)window, t - first);
        return inside ? prepare_fetch_inputs(p.conv, t, c, own) : prepare_inputs{};
    };
    prepare_inputs next = fetch(first);
    for (int32_t t = first; t < end; t++) {
        const prepare_inputs now = next;
        if (t + 1 < end)
            next = fetch(t + 1);
        const prepare_outputs made = prepare_make<CUDA_WARP>(p, fetched.weight[0], fetched.bias[0], now, inside);
        if (inside)
            prepare_keep<true>(p, (int64_t)t * p.conv.channels + c, now, made);
    }
}

static __device__ __forceinline__ void make_gates(const preparation &p, int32_t index, int32_t first, int32_t end) {
    const int32_t c0 = index * CUDA_WARP, width = min(CUDA_WARP, p.gates.gates.heads * p.gate_channels - c0);
    for (int32_t i = threadIdx.x % CUDA_WARP; i < (end - first) * width; i += CUDA_WARP)
        cuda_gate(p.gates, p.gate_channels, first + i / width, c0 + i % width);
}

// The piece's window of a lane's token; all blocks wait at once, so it is of use.
static __device__ __forceinline__ void prefetch_window(const prepare_part &p, int32_t index, const float *window) {
    const float *own = window + index * p.width;
    const int32_t width = min(p.width, p.conv.channels - index * p.width), line = 128 / sizeof(float);
    for (int32_t tap = 0; tap < PREPARE_TAPS - 1; tap++, own += p.conv.channels)
        for (int32_t i = 0; i < width; i += line)
            cuda_prefetch(own + i);
}

// tokens: of a warp, at most one a lane.
static __global__ void __launch_bounds__(WARPS *CUDA_WARP, HEADS_BLOCKS)
    heads_kernel(const cuda_table *table, const __grid_constant__ preparation p, int32_t tokens) {
    cuda_begin();
    const prepare_place at = prepare_find(p, blockIdx.y * WARPS + threadIdx.x / CUDA_WARP);
    const int32_t first = blockIdx.x * tokens, end = min(first + tokens, table->n_tokens);
    const int32_t own = first + (int32_t)threadIdx.x % CUDA_WARP;
    const bool convolves = at.part < p.parts && first < end;
    prepare_fetched<1> fetched;
    float *window = NULL;
    if (convolves) {
        prepare_fetch_weights(p.part[at.part], at.index, fetched);
        if (own < end)
            window = cuda_slot(table, p.part[at.part].conv.state, table->row[own].slot);
        if (window)
            prefetch_window(p.part[at.part], at.index, window);
    }
    cuda_await();
    if (convolves)
        make_pieces(p.part[at.part], at.index, first, end, window, fetched);
    else if (first < end)
        make_gates(p, at.index, first, end);
}

static bool has_heads(const preparation &p) {
    for (int32_t i = 0; i < p.parts; i++)
        if (!prepare_suits_heads(p.part[i]) || p.part[i].width > PREPARE_PIECE)
            return false;
    return true;
}

static kern_status launch_heads(const cuda_step *step, const preparation &p, int32_t pieces) {
    const int32_t columns = cuda_blocks(pieces, WARPS), blocks = HEADS_BLOCKS * step->cuda->processors;
    const int32_t tokens = min(CUDA_WARP, cuda_blocks((int64_t)step->tokens * columns, blocks));
    const dim3 grid((unsigned)cuda_blocks(step->tokens, tokens), (unsigned)columns);
    return cuda_start(step, heads_kernel, grid, WARPS * CUDA_WARP, 0, step->table, p, tokens);
}

// ----------------------------------------------------------------------------------------------------------- gathering

static bool conv_fits(const kern_short_conv_args *a) {
    return a->taps == PREPARE_TAPS && a->channels % CUDA_QUAD == 0 && cuda_is_wide(a->x.p) && cuda_is_wide(a->y.p) &&
           cuda_is_wide(a->weight.p) && cuda_is_wide(a->state.p);
}

// The convolution whose heads the norm takes.
static prepare_part *normed_by(preparation *p, const cuda_norm *n) {
    if (!n->wide || n->width > CUDA_NORM_NARROW)
        return NULL;
    for (int32_t i = 0; i < p->parts; i++)
        if (p->part[i].conv.y.f == n->x && !p->part[i].norm.y && p->part[i].conv.channels == n->groups * n->width)
            return &p->part[i];
    return NULL;
}

static bool gather(const kern_call *call, int convs, int norms, bool gates, preparation *p) {
    *p = {};
    for (int i = 0; i < convs; i++) {
        p->part[p->parts].conv = *(const kern_short_conv_args *)call[i].args;
        p->part[p->parts].width = PREPARE_PIECE;
        if (!conv_fits(&p->part[p->parts++].conv))
            return false;
    }
    for (int i = 0; i < norms; i++) {
        const cuda_norm n = cuda_l2norm_of((const kern_l2norm_args *)call[convs + i].args);
        prepare_part *own = normed_by(p, &n);
        if (!own)
            return false;
        own->norm = n;
        own->width = n.width;
    }
    if (gates) {
        p->gates = *(const kern_gates_args *)call[convs + norms].args;
        p->gate_channels = cuda_gate_channels(&p->gates.gates);
    }
    return true;
}

static int32_t pieces_of(const preparation &p) {
    int32_t pieces = 0;
    for (int32_t i = 0; i < p.parts; i++)
        pieces += prepare_pieces(p.part[i]);
    return p.gate_channels > 0 ? pieces + cuda_blocks(p.gates.gates.heads * p.gate_channels, CUDA_WARP) : pieces;
}

kern_status cuda_prepare_run(const cuda_step *step, const kern_call *call, int convs, int norms, bool gates,
                             const kern_call *core, size_t *taken) {
    preparation p;
    *taken = 0;
    if (!step->generated || !gather(call, convs, norms, gates, &p))
        return KERN_OK;
    *taken = (size_t)(convs + norms + (gates ? 1 : 0));
    const int32_t pieces = pieces_of(p);
    if (cuda_chain_takes(step, 0))
        return cuda_chain_prepare(step, &p, pieces);
    if (core) {
        bool joined = false;
        const kern_status status = cuda_recurrence_behind(step, p, (const kern_recurrence_args *)core->args, &joined);
        *taken += joined ? 1 : 0;
        if (status || joined)
            return status;
    }
    if (has_heads(p))
        return launch_heads(step, p, pieces);
    const dim3 grid((unsigned)cuda_blocks(step->tokens, 1), (unsigned)cuda_blocks(pieces, WARPS));
    return cuda_start(step, prepare_kernel, grid, WARPS * CUDA_WARP, 0, step->table, p);
}

// SPDX-License-Identifier: Apache-2.0
// What stands between a recurrent layer's products and its core in a step of generated tokens, as one launch:
// convolutions of four taps, the L2 norm of some of their outputs, gates.
//
// A warp owns a piece of a token: the channels of one head where they are normed, else 128 channels, or 32 decays.
// A lane's channels are those that the norm gives it (norm.cuh), so that it reads back what it wrote itself.
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/prepare.cuh"

enum { WARPS = 4, TAPS = 4, QUADS = 2, PIECE = CUDA_WARP * CUDA_QUAD }; // a lane's quads: a head of 256

struct conv_piece {
    kern_short_conv_args conv;
    cuda_norm norm; // y NULL: none
    int32_t width;  // channels of a piece
};

struct preparation {
    conv_piece part[CUDA_CONVS];
    int32_t parts;
    kern_gates_args gates;
    int32_t gate_channels; // a head; 0: no gates
};

// Four neighbouring channels: z = bias + the taps in their order; the inputs move up by one.
static __device__ __forceinline__ void convolve(const kern_short_conv_args &a, const cuda_quad (&weight)[CUDA_QUAD],
                                                float *state, int32_t t, int32_t c) {
    const int64_t at = (int64_t)t * a.channels + c;
    cuda_quad input[TAPS], y;
    input[TAPS - 1] = cuda_load(a.x.f + at, CUDA_QUAD, true);
#pragma unroll
    for (int tap = 0; tap < TAPS - 1; tap++)
        input[tap] = state ? cuda_load(state + (int64_t)tap * a.channels + c, CUDA_QUAD, true) : cuda_quad{};
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++) {
        float z = a.bias.f ? a.bias.f[a.channel0 + c + j] : 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
            z = fmaf(weight[j].v[tap], input[tap].v[j], z);
        y.v[j] = cuda_activate(a.activation, z);
    }
#pragma unroll
    for (int tap = 1; tap < TAPS; tap++)
        if (state)
            cuda_store(state + (int64_t)(tap - 1) * a.channels + c, input[tap], CUDA_QUAD, true);
    cuda_store(a.y.f + at, y, CUDA_QUAD, true);
}

static __device__ void prepare_piece(const cuda_table *table, const conv_piece &p, int32_t t, int32_t index) {
    const int32_t lane = threadIdx.x % CUDA_WARP, begin = index * p.width, end = min(begin + p.width, p.conv.channels);
    float *state = cuda_slot(table, p.conv.state, table->row[t].slot);
    cuda_quad weight[QUADS][CUDA_QUAD];
#pragma unroll
    for (int k = 0; k < QUADS; k++)
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++) {
            const int32_t c = begin + (k * CUDA_WARP + lane) * CUDA_QUAD;
            if (c < end)
                weight[k][j] = cuda_load(p.conv.weight.f + ((int64_t)p.conv.channel0 + c + j) * TAPS, CUDA_QUAD, true);
        }
    cuda_await();
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        const int32_t c = begin + (k * CUDA_WARP + lane) * CUDA_QUAD;
        if (c < end)
            convolve(p.conv, weight[k], state, t, c);
    }
    if (!p.norm.y)
        return;
    const int64_t vector = (int64_t)t * p.norm.groups + index;
    float *y = p.norm.y + vector * p.norm.width;
    cuda_normalise<CUDA_WARP, QUADS>(p.norm, vector, lane, NULL,
                                     [&](int32_t i, const cuda_quad &q) { cuda_store(y + i, q, CUDA_QUAD, true); });
}

static __host__ __device__ __forceinline__ int32_t pieces_of(const conv_piece &p) {
    return (p.conv.channels + p.width - 1) / p.width;
}

static __global__ void __launch_bounds__(WARPS *CUDA_WARP)
    prepare_kernel(const cuda_table *table, const __grid_constant__ preparation p) {
    cuda_begin();
    const int32_t t = blockIdx.x;
    int32_t index = blockIdx.y * WARPS + threadIdx.x / CUDA_WARP, i = 0;
    if (t >= table->n_tokens) {
        cuda_await();
        return;
    }
    for (; i < p.parts && index >= pieces_of(p.part[i]); i++)
        index -= pieces_of(p.part[i]);
    if (i < p.parts) {
        prepare_piece(table, p.part[i], t, index);
        return;
    }
    cuda_await();
    const int32_t c = index * CUDA_WARP + threadIdx.x % CUDA_WARP;
    if (c < p.gates.gates.heads * p.gate_channels)
        cuda_gate(p.gates, p.gate_channels, t, c);
}

// ----------------------------------------------------------------------------------------------------------- gathering

static bool conv_fits(const kern_short_conv_args *a) {
    return a->taps == TAPS && a->channels % CUDA_QUAD == 0 && cuda_is_wide(a->x.p) && cuda_is_wide(a->y.p) &&
           cuda_is_wide(a->weight.p) && cuda_is_wide(a->state.p);
}

// The convolution whose heads the norm takes.
static conv_piece *normed_by(preparation *p, const cuda_norm *n) {
    if (!n->wide || n->width > CUDA_NORM_NARROW)
        return NULL;
    for (int32_t i = 0; i < p->parts; i++)
        if (p->part[i].conv.y.f == n->x && !p->part[i].norm.y && p->part[i].conv.channels == n->groups * n->width)
            return &p->part[i];
    return NULL;
}

kern_status cuda_prepare_run(const cuda_step *step, const kern_call *call, int convs, int norms, const kern_call *gates,
                             bool *fits) {
    preparation p = {};
    int32_t pieces = 0;
    *fits = step->generated;
    for (int i = 0; i < convs && *fits; i++) {
        p.part[p.parts].conv = *(const kern_short_conv_args *)call[i].args;
        p.part[p.parts].width = PIECE;
        *fits = conv_fits(&p.part[p.parts++].conv);
    }
    for (int i = 0; i < norms && *fits; i++) {
        const cuda_norm n = cuda_l2norm_of((const kern_l2norm_args *)call[convs + i].args);
        conv_piece *own = normed_by(&p, &n);
        *fits = own != NULL;
        if (own) {
            own->norm = n;
            own->width = n.width;
        }
    }
    if (!*fits)
        return KERN_OK;
    for (int32_t i = 0; i < p.parts; i++)
        pieces += pieces_of(p.part[i]);
    if (gates) {
        p.gates = *(const kern_gates_args *)gates->args;
        p.gate_channels = cuda_gate_channels(&p.gates.gates);
        pieces += cuda_blocks(p.gates.gates.heads * p.gate_channels, CUDA_WARP);
    }
    const dim3 grid((unsigned)cuda_blocks(step->tokens, 1), (unsigned)cuda_blocks(pieces, WARPS));
    return cuda_start(step, prepare_kernel, grid, WARPS * CUDA_WARP, 0, step->table, p);
}

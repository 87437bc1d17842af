// SPDX-License-Identifier: Apache-2.0
// What stands between a recurrent layer's products and its core in a step of generated tokens: convolutions of four
// taps, the L2 norm of some of their outputs, gates. What fuse.cu has found side by side is offered to prepare.cu;
// shapes that this is not made for are left to the operations' own.
//
// A warp owns a piece of a token: the channels of one head where they are normed, else 128 channels, or 32 decays.
// A lane's channels are those that the norm gives it (norm.cuh), so that it reads back what it wrote itself. Weights
// and the inputs of earlier tokens are fetched apart from the work: they may be there before the inputs are.
#ifndef KERNELS_CUDA_PREPARE_CUH
#define KERNELS_CUDA_PREPARE_CUH

#include "kernels/cuda/fuse.cuh"
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/storage.cuh"

constexpr int PREPARE_TAPS = 4, PREPARE_QUADS = 2; // a lane's quads at most: a head of 256
constexpr int PREPARE_PIECE = CUDA_WARP * CUDA_QUAD;

struct prepare_part {
    kern_short_conv_args conv;
    cuda_norm norm; // y NULL: none
    int32_t width;  // channels of a piece
};

struct preparation {
    prepare_part part[CUDA_CONVS];
    int32_t parts;
    int32_t gate_channels; // a head; 0: no gates
    kern_gates_args gates;
};

static __host__ __device__ __forceinline__ int32_t prepare_pieces(const prepare_part &p) {
    return (p.conv.channels + p.width - 1) / p.width;
}

// ------------------------------------------------------------------------------------------------------ convolutions

// Of a lane with QUADS quads of channels: their weights, and their inputs from the slot.
template <int QUADS> struct prepare_fetched {
    cuda_quad weight[QUADS][CUDA_QUAD], bias[QUADS], earlier[QUADS][PREPARE_TAPS - 1];
    float *state;
};

// Calls use(k, c) for the lane's quads of channels, c the first.
template <int QUADS, typename Use>
static __device__ __forceinline__ void prepare_quads(const prepare_part &p, int32_t index, const Use &use) {
    const int32_t end = min((index + 1) * p.width, p.conv.channels);
#pragma unroll
    for (int k = 0; k < QUADS; k++) {
        const int32_t c = index * p.width + (k * CUDA_WARP + (int32_t)threadIdx.x % CUDA_WARP) * CUDA_QUAD;
        if (c < end)
            use(k, c);
    }
}

// Of four channels, c the first.
static __device__ __forceinline__ void prepare_fetch_taps(const kern_short_conv_args &a, int32_t c,
                                                          cuda_quad (&weight)[CUDA_QUAD], cuda_quad &bias) {
    const int32_t own = a.channel0 + c;
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++)
        weight[j] = cuda_load(a.weight.f + (int64_t)(own + j) * PREPARE_TAPS, CUDA_QUAD, true);
    bias = a.bias.f ? cuda_load(a.bias.f + own, CUDA_QUAD, false) : cuda_quad{};
}

template <int QUADS>
static __device__ __forceinline__ void prepare_fetch_weights(const prepare_part &p, int32_t index,
                                                             prepare_fetched<QUADS> &fetched) {
    prepare_quads<QUADS>(p, index,
                         [&](int k, int32_t c) { prepare_fetch_taps(p.conv, c, fetched.weight[k], fetched.bias[k]); });
}

template <int QUADS>
static __device__ __forceinline__ void prepare_fetch_state(const cuda_table *table, const prepare_part &p, int32_t slot,
                                                           int32_t index, prepare_fetched<QUADS> &fetched) {
    fetched.state = cuda_slot(table, p.conv.state, slot);
    prepare_quads<QUADS>(p, index, [&](int k, int32_t c) {
#pragma unroll
        for (int tap = 0; tap < PREPARE_TAPS - 1; tap++)
            fetched.earlier[k][tap] =
                fetched.state ? cuda_load(fetched.state + (int64_t)tap * p.conv.channels + c, CUDA_QUAD, true)
                              : cuda_quad{};
    });
}

static __device__ __forceinline__ void prepare_add_taps(const cuda_quad (&weight)[CUDA_QUAD],
                                                        const cuda_quad (&input)[PREPARE_TAPS], cuda_quad &y) {
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++)
#pragma unroll
        for (int tap = 0; tap < PREPARE_TAPS; tap++)
            y.v[j] = fmaf(weight[j].v[tap], input[tap].v[j], y.v[j]);
}

// Four neighbouring channels: z = bias + the taps in their order; the inputs move up by one.
template <int QUADS>
static __device__ __forceinline__ cuda_quad prepare_convolve(const kern_short_conv_args &a,
                                                             const prepare_fetched<QUADS> &fetched, int k, int32_t t,
                                                             int32_t c) {
    const int64_t at = (int64_t)t * a.channels + c;
    cuda_quad input[PREPARE_TAPS], y = fetched.bias[k];
    input[PREPARE_TAPS - 1] = cuda_load(a.x.f + at, CUDA_QUAD, true);
#pragma unroll
    for (int tap = 0; tap < PREPARE_TAPS - 1; tap++)
        input[tap] = fetched.earlier[k][tap];
    prepare_add_taps(fetched.weight[k], input, y);
    y = cuda_activate_quad(a.activation, y);
#pragma unroll
    for (int tap = 1; tap < PREPARE_TAPS; tap++)
        if (fetched.state)
            cuda_store(fetched.state + (int64_t)(tap - 1) * a.channels + c, input[tap], CUDA_QUAD, true);
    cuda_store(a.y.f + at, y, CUDA_QUAD, true);
    return y;
}

// Piece `index` of token t by a warp. What comes out in the end goes to give(i, quad) too, i its first channel in the
// piece.
template <int QUADS, typename Give>
static __device__ __forceinline__ void prepare_convolutions(const prepare_part &p, int32_t t, int32_t index,
                                                            const prepare_fetched<QUADS> &fetched, const Give &give) {
    cuda_quad y[QUADS] = {};
    prepare_quads<QUADS>(p, index, [&](int k, int32_t c) {
        y[k] = prepare_convolve(p.conv, fetched, k, t, c);
        if (!p.norm.y)
            give(c - index * p.width, y[k]);
    });
    if (!p.norm.y)
        return;
    const int64_t vector = (int64_t)t * p.norm.groups + index;
    float *normed = p.norm.y + vector * p.norm.width;
    cuda_normalise_inputs<QUADS>(
        p.norm, vector, cuda_team<CUDA_WARP>(), NULL, [&](int k, int32_t) { return y[k]; },
        [&](int32_t i, const cuda_quad &q) {
            cuda_store(normed + i, q, CUDA_QUAD, true);
            give(i, q);
        });
}

// ------------------------------------------------------------------------------------------------- a head of a token
//
// The same numbers where a piece is a head of at most 128 channels, without a call, a loop or a wait but for the
// token's own inputs: of what a chain's heads stand behind (chain.cu), whose activations are none or SiLU.

static __host__ __device__ __forceinline__ bool prepare_suits_heads(const prepare_part &p) {
    return p.conv.activation == KERN_SILU || p.conv.activation == KERN_IDENTITY;
}

// 1 / x correctly rounded, for x from 1 to 2^100: the chip's approximation and a step of Newton's, which is how the
// compiler divides when x is ordinary, without the question.
static __device__ __forceinline__ float prepare_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(y, -fmaf(x, y, -1.0f), y);
}

// cuda_activate of SiLU, the four side by side.
static __device__ __forceinline__ cuda_quad prepare_silu(cuda_quad z) {
    float below[CUDA_QUAD];
    bool ordinary = true;
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++) {
        below[j] = __fadd_rn(1.0f, expf(-z.v[j]));
        ordinary = ordinary && below[j] < 0x1p100f;
    }
    if (ordinary)
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            z.v[j] = __fmul_rn(z.v[j], prepare_reciprocal(below[j]));
    else
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            z.v[j] = __fmul_rn(z.v[j], __fdiv_rn(1.0f, below[j]));
    return z;
}

// A lane's four channels of a token: the inputs in the order of the taps, and the slot's window from there on, NULL
// without a slot.
struct prepare_inputs {
    cuda_quad tap[PREPARE_TAPS];
    float *state;
};
// Channels from c on of token t; window: the slot's, which comes past what caches hold.
static __device__ __forceinline__ prepare_inputs prepare_fetch_inputs(const kern_short_conv_args &a, int32_t t,
                                                                      int32_t c, float *window) {
    prepare_inputs input = {};
    input.state = window ? window + c : NULL;
    if (window)
#pragma unroll
        for (int tap = 0; tap < PREPARE_TAPS - 1; tap++)
            input.tap[tap] = cuda_load_once(cuda_in_global(input.state + (int64_t)tap * a.channels));
    input.tap[PREPARE_TAPS - 1] = cuda_load(cuda_in_global(a.x.f + (int64_t)t * a.channels + c), CUDA_QUAD, true);
    return input;
}

// What comes out of the convolution, and of the norm behind it or, without one, the same.
struct prepare_outputs {
    cuda_quad y, out;
};

// LANES lanes have a head where it is normed; those that are not inside one have zeros.
template <int LANES>
static __device__ __forceinline__ prepare_outputs prepare_make(const prepare_part &p,
                                                               const cuda_quad (&weight)[CUDA_QUAD],
                                                               const cuda_quad &bias, const prepare_inputs &input,
                                                               bool inside) {
    cuda_quad z = bias;
    prepare_add_taps(weight, input.tap, z);
    if (p.conv.activation == KERN_SILU)
        z = prepare_silu(z);
    prepare_outputs made = {z, z};
    if (p.norm.y) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            squares = fmaf(z.v[j], z.v[j], squares);
        squares = inside ? squares : 0;
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
            squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, distance));
        const float rstd = 1.0f / sqrtf(__fadd_rn(squares, p.norm.eps));
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            made.out.v[j] = __fmul_rn(z.v[j], rstd);
    }
    return made;
}

// What they leave in memory; at: the channels' place among all tokens'. By lanes inside a head. ONCE: the window goes
// past what caches hold.
template <bool ONCE>
static __device__ __forceinline__ void prepare_keep(const prepare_part &p, int64_t at, const prepare_inputs &input,
                                                    const prepare_outputs &made) {
    if (input.state)
#pragma unroll
        for (int tap = 1; tap < PREPARE_TAPS; tap++)
            cuda_store_state<ONCE>(cuda_in_global(input.state + (int64_t)(tap - 1) * p.conv.channels), input.tap[tap]);
    cuda_store(cuda_in_global(p.conv.y.f + at), made.y, CUDA_QUAD, true);
    if (p.norm.y)
        cuda_store(cuda_in_global(p.norm.y + at), made.out, CUDA_QUAD, true);
}

// Piece `index` of a token by a warp. give(i, quad): as above, for `room` numbers of a piece, those behind its end 0.
template <typename Give>
static __device__ __forceinline__ void prepare_head_part(const prepare_part &p, int32_t t, int32_t index,
                                                         const prepare_fetched<1> &fetched, const Give &give) {
    const int32_t i = (int32_t)threadIdx.x % CUDA_WARP * CUDA_QUAD, c = index * p.width + i;
    const bool inside = i < p.width;
    const int64_t at = (int64_t)t * p.conv.channels + c;
    prepare_inputs input = {{fetched.earlier[0][0], fetched.earlier[0][1], fetched.earlier[0][2], {}},
                            fetched.state ? fetched.state + c : NULL};
    if (inside)
        input.tap[PREPARE_TAPS - 1] = cuda_load(cuda_in_global(p.conv.x.f + at), CUDA_QUAD, true);
    const prepare_outputs made = prepare_make<CUDA_WARP>(p, fetched.weight[0], fetched.bias[0], input, inside);
    give(i, inside ? made.out : cuda_quad{});
    if (inside)
        prepare_keep<false>(p, at, input, made);
}

// --------------------------------------------------------------------------------------------------- pieces of a token

// All pieces of a token one after another, the gates behind the convolutions: the part, `parts` for the gates, and
// which of its pieces.
struct prepare_place {
    int32_t part, index;
};
static __device__ __forceinline__ prepare_place prepare_find(const preparation &p, int32_t index) {
    int32_t i = 0;
    for (; i < p.parts && index >= prepare_pieces(p.part[i]); i++)
        index -= prepare_pieces(p.part[i]);
    return {i, index};
}

static __device__ __forceinline__ void prepare_gates(const preparation &p, int32_t t, int32_t index) {
    const int32_t c = index * CUDA_WARP + (int32_t)threadIdx.x % CUDA_WARP;
    if (c < p.gates.gates.heads * p.gate_channels)
        cuda_gate(p.gates, p.gate_channels, t, c);
}

// call: `convs` short convolutions, `norms` L2 norms, gates or not. The caller has seen that none of them writes what
// another reads or writes, but for the norms' x. core: the recurrence behind them, which may join them, or NULL.
// *taken: how many calls ran, 0 where shapes are others.
kern_status cuda_prepare_run(const cuda_step *step, const kern_call *call, int convs, int norms, bool gates,
                             const kern_call *core, size_t *taken);

#endif

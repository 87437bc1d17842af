// SPDX-License-Identifier: Apache-2.0
// A head of one token by a whole block, as a phase of a chain (chain.cu): its preparation and its recurrence.
//
// What the head reads stands in shared memory once, where a warp of the preparation puts it (a part each, the gates by
// 32 decays) or, where nothing makes it, a warp that copies it. So one barrier of the block lies between the token's
// inputs and the sums. Whatever is there before the inputs are (weights, windows, the state) is loaded apart from the
// work, without being looked at. The numbers are those of prepare.cuh and recurrence.cuh, in the same order.
#ifndef KERNELS_CUDA_CHAIN_HEADS_CUH
#define KERNELS_CUDA_CHAIN_HEADS_CUH

#include "kernels/cuda/mesa.cuh"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/recurrence.cuh"

enum { HEAD_VECTORS = 3, HEAD_OPERANDS = 5 };
constexpr int HEAD_TEAMS = PREPARE_PIECE / RECURRENCE_SLICE; // of a block, a slice each

// Heads of the tokens, each behind its own preparation; without parts and gates nothing is prepared.
struct phase_core {
    preparation before;
    bool own;                            // no head reads another's operands
    int32_t to[CUDA_CONVS];              // which of q, k, v (0, 1, 2) a part makes; HEAD_VECTORS: none
    bool made[HEAD_OPERANDS];            // by the preparation, of q, k, v, g, beta
    bool fixed_decay;                    // g is of the heads, not of a token's
    const float *read[HEAD_OPERANDS];    // what the heads read, NULL: no such operand
    int32_t width[HEAD_OPERANDS], heads; // of it, a head
    union {
        recurrence linear;
        mesa solved;
    };
};

// Where a head's operands go in shared memory: q and k, of `depth` numbers, v, of `width`; the decays (of all channels
// or one) minus 1, of `decays`; beta. What stands behind an operand's end is 0.
struct head_places {
    float *vector[HEAD_VECTORS], *decay_m1, *beta;
    int32_t depth, width, decays;
};

// What is there before the token: a lane's of a part, or of the gates. Warps' shares: the parts, then gates by 32
// decays from the back, so that a head's only one is not behind a part.
struct head_fetched {
    prepare_fetched<1> part;
    cuda_gate_inputs gate;
};
enum { HEAD_GATES = 7, HEAD_THERE = 8 }; // the first gates' warp, the first one of operands that are there
static_assert(HEAD_GATES - PREPARE_PIECE / CUDA_WARP + 1 >= CUDA_CONVS, "a warp has one share");

static __device__ __forceinline__ int32_t gate_channel(int32_t warp) {
    return (HEAD_GATES - warp) * CUDA_WARP + (int32_t)threadIdx.x % CUDA_WARP;
}

static __device__ __forceinline__ void fetch_head(const cuda_table *table, const preparation &p, int32_t warp,
                                                  int32_t slot, int32_t head, head_fetched &fetched) {
    if (warp < p.parts) {
        prepare_fetch_weights(p.part[warp], head, fetched.part);
        prepare_fetch_state(table, p.part[warp], slot, head, fetched.part);
        return;
    }
    const int32_t c = gate_channel(warp);
    if (c >= 0 && c < p.gate_channels && cuda_gate_has_parameters(p.gates.gates)) {
        fetched.gate.dt_bias = *cuda_in_global(p.gates.dt_bias.f + head * p.gate_channels + c);
        fetched.gate.A_log = *cuda_in_global(p.gates.A_log.f + head);
    }
}

static __device__ __forceinline__ void make_gate(const phase_core &core, int32_t c, int32_t t, int32_t head,
                                                 cuda_gate_inputs in, const head_places &places) {
    const kern_gates_args &a = core.before.gates;
    const kern_gates &f = a.gates;
    const int32_t channels = core.before.gate_channels;
    const int64_t write = (int64_t)t * core.heads + head, at = write * channels + c;
    if (c >= channels) {
        if (core.made[3] && c < places.decays)
            places.decay_m1[c] = 0;
        return;
    }
    if (f.decay_law != KERN_DECAY_LAW_NONE)
        in.a = *cuda_in_global(a.a.f + at);
    if (f.write_law == KERN_WRITE_LAW_SIGMOID)
        in.b = *cuda_in_global(a.b.f + write);
    const cuda_gate_pair made = cuda_gate_of(f, in);
    if (core.made[3])
        places.decay_m1[c] = expm1f(made.g);
    if (core.made[4] && c == 0)
        *places.beta = made.beta;
    if (f.decay_law != KERN_DECAY_LAW_NONE)
        *cuda_in_global(a.g.f + at) = made.g;
    if (f.write_law != KERN_WRITE_LAW_NONE && c == 0)
        *cuda_in_global(a.beta.f + write) = made.beta;
}

// Behind the wait: what the preparation makes, into memory and into its place.
static __device__ __forceinline__ void prepare_head(const phase_core &core, int32_t warp, int32_t t, int32_t head,
                                                    const head_fetched &fetched, const head_places &places) {
    const preparation &p = core.before;
    if (warp < p.parts) {
        const int32_t which = core.to[warp];
        float *to = which == 0 ? places.vector[0] : which == 1 ? places.vector[1] : places.vector[2];
        const int32_t room = which == HEAD_VECTORS ? 0 : which == 2 ? places.width : places.depth;
        prepare_head_part(p.part[warp], t, head, fetched.part, [&](int32_t i, const cuda_quad &q) {
            if (i < room)
                cuda_store(to + i, q, CUDA_QUAD, true);
        });
    } else if (p.gate_channels > 0 && gate_channel(warp) >= 0)
        make_gate(core, gate_channel(warp), t, head, fetched.gate, places);
}

static __device__ __forceinline__ const float *operand_at(const phase_core &core, int which, int32_t t, int32_t head) {
    const bool fixed = which == HEAD_VECTORS && core.fixed_decay;
    return core.read[which] + ((int64_t)(fixed ? 0 : t) * core.heads + head) * core.width[which];
}

// And what it does not: a vector a warp, then the scalars.
static __device__ __forceinline__ void take_operands(const phase_core &core, int32_t warp, int32_t t, int32_t head,
                                                     const head_places &places) {
    const int32_t which = warp - HEAD_THERE, lane = (int32_t)threadIdx.x % CUDA_WARP;
    if (which < 0 || which > HEAD_VECTORS)
        return;
    if (!core.made[which]) {
        const float *from = core.read[which] ? operand_at(core, which, t, head) : NULL;
        const int32_t width = from ? core.width[which] : 0;
        const int32_t room = which < 2 ? places.depth : which == 2 ? places.width : places.decays;
#pragma unroll
        for (int k = 0; k < PREPARE_PIECE / CUDA_WARP; k++) {
            const int32_t i = k * CUDA_WARP + lane;
            const float x = i < width ? from[i] : 0;
            if (i >= room)
                break;
            if (which == HEAD_VECTORS)
                places.decay_m1[i] = expm1f(x);
            else
                (which == 0 ? places.vector[0] : which == 1 ? places.vector[1] : places.vector[2])[i] = x;
        }
    }
    if (which == HEAD_VECTORS && lane == 0 && !core.made[4])
        *places.beta = core.read[4] ? *operand_at(core, 4, t, head) : 1;
}

// Which head of which token an item is; tokens are few.
struct head_item {
    int32_t t, head;
};
static __device__ __forceinline__ head_item head_of(int32_t item, int32_t heads) {
    int32_t t = 0;
    for (; item >= heads; t++)
        item -= heads;
    return {t, item};
}

// ------------------------------------------------------------------------------------------------- a head's recurrence

// A block's shared memory for a head.
template <int R> struct head_memory {
    alignas(16) float value[PREPARE_PIECE];
    recurrence_token<R> token; // decay_m1: of all channels, or one
    recurrence_sums sums[HEAD_TEAMS];
    float weight;
};

// A slice of a head's state, which is this thread's row group and four columns of it.
struct head_slice {
    float *home;  // its first row's; NULL: none
    int32_t step; // floats between its rows
    int32_t rows; // that there are to load and to store
    int32_t column, left;
};
static __device__ __forceinline__ head_slice slice_of(const cuda_table *table, const recurrence &a, int32_t slot,
                                                      int32_t head, int32_t column0) {
    using Team = cuda_team<RECURRENCE_THREADS>;
    const int32_t group = Team::thread() / RECURRENCE_LANES;
    const int32_t column = column0 + Team::thread() % RECURRENCE_LANES * 4, left = a.columns - column;
    float *home = left > 0 ? cuda_slot(table, a.slots, slot) : NULL;
    if (home)
        home += (int64_t)(head * a.depth + group) * a.columns + column;
    const int32_t rows = (a.depth - group + RECURRENCE_GROUPS - 1) / RECURRENCE_GROUPS;
    return {home, RECURRENCE_GROUPS * a.columns, home ? rows : 0, column, left};
}

// s: zeros.
template <int R> static __device__ __forceinline__ void load_slice(const head_slice &slice, cuda_quad (&s)[R]) {
    const float *row = slice.home;
#pragma unroll
    for (int i = 0; i < R; i++, row += slice.step)
        if (i < slice.rows)
            s[i] = cuda_load(cuda_in_global(row), 4, true);
}
template <int R> static __device__ __forceinline__ void store_slice(const head_slice &slice, const cuda_quad (&s)[R]) {
    float *row = slice.home;
#pragma unroll
    for (int i = 0; i < R; i++, row += slice.step)
        if (i < slice.rows)
            cuda_store(cuda_in_global(row), s[i], 4, true);
}

// A slice behind the block's barrier; s: as it was before the token, then as it is.
template <int R, bool CHANNEL>
static __device__ __forceinline__ void run_slice(const phase_core &core, const head_item &at, const head_slice &slice,
                                                 cuda_quad (&s)[R], head_memory<R> &own) {
    using Team = cuda_team<RECURRENCE_THREADS>;
    const recurrence &a = core.linear;
    recurrence_sums &sums = own.sums[Team::number()];
    const cuda_quad value = recurrence_load_columns<true>(own.value + slice.column, slice.left);
    const float weight = own.weight;
    recurrence_decay<R, CHANNEL, Team>(own.token.decay_m1, own.token.decay_m1[0], false, s);
    recurrence_sum_columns<R, Team>(s, own.token, a.delta, sums);
    Team::sync();
    recurrence_write<R, true, Team>(a, s, own.token, at.t, at.head, slice.column, value, weight, sums);
    store_slice(slice, s);
}

#endif

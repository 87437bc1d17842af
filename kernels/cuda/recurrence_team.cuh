// SPDX-License-Identifier: Apache-2.0
// A strip of a state by four warps (recurrence_strip.cuh), for steps with so few strips that processors would idle: a
// block has one strip, a warp one tile of a chunk's tokens and a quarter of the channels. Left operands go through
// shared memory, as registers of mma, and with them the largest magnitudes that their powers are made of. Sums are made
// in a warpgroup's order (split_matrix.cuh) and have its bits.
//
// Of a chunk, behind each barrier: S as operand; the errors of the warp's tokens; the same as operand; what is written,
// weighed for P and for the state's end, as operands; the new state, and while its largest numbers go round the
// read-out with the old one.
#ifndef KERNELS_CUDA_RECURRENCE_TEAM_CUH
#define KERNELS_CUDA_RECURRENCE_TEAM_CUH

#include "kernels/cuda/recurrence_strip.cuh"

constexpr int TEAM_WARPS = CHUNK_TILES, TEAM_THREADS = TEAM_WARPS * CUDA_WARP;

template <int LIMBS> struct team_operand { uint4 limb[LIMBS][CUDA_WARP]; };
struct team_largest {
    float of[TEAM_WARPS][SPLIT_TILE]; // rows
};
template <int D, int LIMBS> struct alignas(16) team_shared {
    team_operand<LIMBS> state[D / SPLIT_TILE], errors[CHUNK_TILES], written[CHUNK_TILES], kept[CHUNK_TILES];
    team_largest state_largest, errors_largest, written_largest, kept_largest;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int LIMBS>
static __device__ __forceinline__ void team_put(team_operand<LIMBS> &to, const split_block &x,
                                                const split_powers &powers, int32_t lane) {
    const split_left<LIMBS> left = split_left_of<LIMBS>(x, powers);
#pragma unroll
    for (int limb = 0; limb < LIMBS; limb++)
        to.limb[limb][lane] =
            make_uint4(left.limb[limb][0], left.limb[limb][1], left.limb[limb][2], left.limb[limb][3]);
}
template <int N, int LIMBS>
static __device__ __forceinline__ void team_get(const team_operand<LIMBS> (&from)[N], int32_t lane,
                                                split_left<LIMBS> (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int limb = 0; limb < LIMBS; limb++) {
            const uint4 own = from[n].limb[limb][lane];
            uint32_t(&to)[4] = x[n].limb[limb];
            to[0] = own.x, to[1] = own.y, to[2] = own.z, to[3] = own.w;
        }
}

// A warp's share; behind a barrier team_powers has the powers of whole rows.
template <int N>
static __device__ __forceinline__ void team_tell(team_largest &largest, int32_t warp, int32_t lane,
                                                 const split_block (&x)[N]) {
    float own[2];
    split_largest_of_rows(x, own);
    if (lane % 4 == 0)
        for (int r = 0; r < 2; r++)
            largest.of[warp][split_row(lane, 2 * r)] = own[r];
}
static __device__ __forceinline__ split_powers team_powers(const team_largest &largest, int32_t lane) {
    split_powers powers;
    for (int r = 0; r < 2; r++) {
        float all = 0;
        for (int warp = 0; warp < TEAM_WARPS; warp++)
            all = fmaxf(all, largest.of[warp][split_row(lane, 2 * r)]);
        powers.row[r] = split_power_of(all);
    }
    return powers;
}

template <int D> struct team_state {
    static constexpr int TILES = D / SPLIT_TILE / TEAM_WARPS;
    split_block s[TILES]; // channels of tiles warp * TILES ..
};

// A tile of a product: the large products, and apart from them the small ones, as split_group has them.
template <int LIMBS> struct team_sum { split_block part[LIMBS]; };
template <int LIMBS>
static __device__ __forceinline__ void team_multiply(team_sum<LIMBS> &sum, const split_left<LIMBS> &a,
                                                     const split_right<LIMBS> &b) {
#pragma unroll
    for (int n = 0; n < split_products(LIMBS); n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            mma_half(sum.part[n != 0].v[half], a.limb[n == 1], b.limb[n == 2][2 * half], b.limb[n == 2][2 * half + 1]);
}
template <int LIMBS> static __device__ __forceinline__ split_block team_total(const team_sum<LIMBS> &sum) {
    split_block x = sum.part[0];
    if constexpr (LIMBS == 2)
#pragma unroll
        for (int i = 0; i < 8; i++)
            x.v[i / 4][i % 4] += sum.part[1].v[i / 4][i % 4];
    return x;
}
// x times the rows of a tile of b; of a lower triangle; and times rows of `keys`, columns of a tile.
template <int LIMBS, int TILES>
static __device__ __forceinline__ split_block team_rows(const split_left<LIMBS> (&x)[TILES],
                                                        const split_matrix<LIMBS, CHUNK, TILES * SPLIT_TILE> &b,
                                                        int tile, int32_t lane) {
    team_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < TILES; n++)
        team_multiply(sum, x[n], split_load_right(b, tile, n, lane));
    return team_total(sum);
}
template <int LIMBS>
static __device__ __forceinline__ split_block team_lower(const split_left<LIMBS> (&x)[CHUNK_TILES],
                                                         const split_lower<LIMBS, CHUNK> &b, int tile, int32_t lane) {
    team_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        if (n <= tile)
            team_multiply(sum, x[n], split_load_right(b, tile, n, lane));
    return team_total(sum);
}
template <int D, int LIMBS>
static __device__ __forceinline__ split_block team_keys(const split_left<LIMBS> (&x)[CHUNK_TILES],
                                                        const split_matrix<LIMBS, CHUNK, D> &keys, int tile,
                                                        int32_t lane) {
    team_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        team_multiply(sum, x[n], split_load_turned(keys, n, tile, lane));
    return team_total(sum);
}

// U^T of the warp's tokens; u: V^T.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void
team_correct(const recurrence_record<D, CHANNEL, LIMBS> &record, const recurrence_strip &strip, int32_t warp,
             const split_left<LIMBS> (&s)[D / SPLIT_TILE], const split_powers &powers, team_shared<D, LIMBS> &shared,
             split_block (&u)[1]) {
    const int32_t lane = strip.lane;
    strip_errors(record, strip, warp, team_rows(s, record.k, warp, lane), powers, u[0]);
    team_tell(shared.errors_largest, warp, lane, u);
    __syncthreads();
    const split_powers error_powers = team_powers(shared.errors_largest, lane);
    team_put(shared.errors[warp], u[0], error_powers, lane);
    __syncthreads();
    split_left<LIMBS> errors[CHUNK_TILES];
    team_get(shared.errors, lane, errors);
    strip_solved(record, strip, warp, team_lower(errors, record.system, warp, lane), error_powers, u[0]);
}

// One chunk; u: V^T of the warp's tokens. state_largest holds the state's before and after.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ __forceinline__ void
team_chunk(const recurrence &a, const recurrence_record<D, CHANNEL, LIMBS> &record, const kern_chunk &chunk,
           const recurrence_strip &strip, int32_t warp, team_shared<D, LIMBS> &shared, split_block (&u)[1],
           team_state<D> &state) {
    constexpr int TILES = team_state<D>::TILES;
    const int32_t lane = strip.lane;
    const split_powers powers = team_powers(shared.state_largest, lane);
#pragma unroll
    for (int n = 0; n < TILES; n++)
        team_put(shared.state[warp * TILES + n], state.s[n], powers, lane);
    __syncthreads();
    split_left<LIMBS> s[D / SPLIT_TILE];
    team_get(shared.state, lane, s);
    if constexpr (DELTA)
        team_correct(record, strip, warp, s, powers, shared, u);
    else
        strip_weigh(strip, warp, record.weight, u[0]);
    split_block kept[1] = {u[0]};
    strip_weigh(strip, warp, record.key_end, kept[0]);
    team_tell(shared.written_largest, warp, lane, u);
    team_tell(shared.kept_largest, warp, lane, kept);
    __syncthreads();
    const split_powers written_powers = team_powers(shared.written_largest, lane);
    const split_powers kept_powers = team_powers(shared.kept_largest, lane);
    team_put(shared.written[warp], u[0], written_powers, lane);
    team_put(shared.kept[warp], kept[0], kept_powers, lane);
    __syncthreads();
    split_left<LIMBS> written[CHUNK_TILES];
    team_get(shared.kept, lane, written);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int32_t tile = warp * TILES + n;
        strip_advance(record, strip, tile, team_keys(written, recurrence_keys_to_end(record), tile, lane), kept_powers,
                      state.s[n]);
    }
    team_tell(shared.state_largest, warp, lane, state.s);
    team_get(shared.written, lane, written);
    split_block o[1];
    strip_read_state(record, a.scale, strip, warp, team_rows(s, record.q, warp, lane), powers, o[0]);
    strip_read_chunk(record, a.scale, strip, warp, team_lower(written, record.pairs, warp, lane), written_powers, o[0]);
    strip_store(a, strip, chunk, warp, o);
    __syncthreads();
}

#endif

#endif

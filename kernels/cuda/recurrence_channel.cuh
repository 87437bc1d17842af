// SPDX-License-Identifier: Apache-2.0
// The record of a chunk and state where every key channel decays by itself (recurrence_chunk.cuh), by a block.
//
// P_ij = sum_d q_id k_jd e^(c_id - c_jd), and A likewise, in blocks of 16 tokens. Off the diagonal the exponent is cut
// where the rows' block begins, so that both parts are <= 0 and the block is a product on the tensor cores. On it the
// exponent is cut at the middle of the columns' half block, so that no part is further than four tokens from where it
// is cut: a product too, as long as no channel decays by more than 2^-MILD over four tokens (both parts then keep their
// digits). In a chunk where one does, every element of a block on the diagonal has exponents of its own. Sums of decays
// restart with each block: kept as a float and its rounding error, a difference inside a block is good to its own
// rounding, and what lies between two blocks is a sum of whole blocks. Sums are those of binary logarithms.
#ifndef KERNELS_CUDA_RECURRENCE_CHANNEL_CUH
#define KERNELS_CUDA_RECURRENCE_CHANNEL_CUH

#include "kernels/cuda/recurrence_chunk.cuh"

constexpr int CHANNEL_THREADS = 256;
constexpr float CHANNEL_MILD = 16;
constexpr double CHANNEL_LOG2_E = 1.4426950408889634;

template <int D> struct alignas(128) channel_shared {
    typedef float rows[CHUNK][D + 10]; // eight rows, or four runs of four rows, in different banks

    rows q, k, high, low; // c inside its block, inclusive
    float p[CHUNK][SYSTEM_ROW];
    recurrence_triangle system;
    chunk_decay decay;                                // `first` alone
    float start[CHUNK_TILES][D], end[CHUNK_TILES][D]; // sums of the blocks before, and behind
    float weight[CHUNK];
};

// 2^x, the chip's approximation (2^-22).
static __device__ __forceinline__ float channel_power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two neighbouring channels; d is even.
static __device__ __forceinline__ float2 channel_two(const float *row, int32_t d) {
    return *(const float2 *)&row[d];
}
static __device__ __forceinline__ float2 channel_scaled(float2 x, float2 exponent) {
    return make_float2(x.x * channel_power(exponent.x), x.y * channel_power(exponent.y));
}
// c_i - c_j inside a block.
template <int D>
static __device__ __forceinline__ float2 channel_inside(const channel_shared<D> &shared, int32_t i, int32_t j,
                                                        int32_t d) {
    const float2 high = channel_two(shared.high[i], d), low = channel_two(shared.low[i], d);
    const float2 high_j = channel_two(shared.high[j], d), low_j = channel_two(shared.low[j], d);
    return make_float2((high.x - high_j.x) + (low.x - low_j.x), (high.y - high_j.y) + (low.y - low_j.y));
}
// The sum over blocks [first, last).
template <int D>
static __device__ __forceinline__ float2 channel_blocks(const channel_shared<D> &shared, int32_t first, int32_t last,
                                                        int32_t d) {
    float2 sum = {0, 0};
    for (int32_t n = first; n < last; n++) {
        const float2 block = channel_two(shared.high[n * SPLIT_TILE + SPLIT_TILE - 1], d);
        sum = make_float2(sum.x + block.x, sum.y + block.y);
    }
    return sum;
}
// From token j to the end of its block.
template <int D>
static __device__ __forceinline__ float2 channel_rest(const channel_shared<D> &shared, int32_t j, int32_t d) {
    return channel_inside(shared, j / SPLIT_TILE * SPLIT_TILE + SPLIT_TILE - 1, j, d);
}

// Sums of decays of a channel in a block of 16 tokens, of which `exist`; g: the first's, `stride` floats apart. Whether
// its decay is mild.
template <int D>
static __device__ __forceinline__ bool channel_sum(const float *decay, int64_t stride, int32_t exist, int32_t i0,
                                                   int32_t d, channel_shared<D> &shared) {
    float g[SPLIT_TILE], high[SPLIT_TILE];
#pragma unroll
    for (int i = 0; i < SPLIT_TILE; i++)
        g[i] = i < exist ? decay[i * stride] : 0;
    double sum = 0;
#pragma unroll
    for (int i = 0; i < SPLIT_TILE; i++) {
        sum += CHANNEL_LOG2_E * (double)g[i];
        high[i] = (float)sum;
        shared.high[i0 + i][d] = high[i];
        shared.low[i0 + i][d] = (float)(sum - (double)high[i]);
    }
    bool mild = true;
#pragma unroll
    for (int half = 0; half < SPLIT_TILE; half += 8)
        mild = mild && high[half] - high[half + 3] <= CHANNEL_MILD && high[half + 3] - high[half + 7] <= CHANNEL_MILD;
    return mild;
}

// Rows of a chunk, `stride` floats apart.
template <int D>
static __device__ __forceinline__ void channel_load_rows(const float *from, int64_t stride, int32_t length,
                                                         int32_t depth, typename channel_shared<D>::rows &rows) {
    const bool wide = (uintptr_t)from % sizeof(float4) == 0 && stride % 4 == 0;
#pragma unroll
    for (int n = 0; n < CHUNK * D / 4 / CHANNEL_THREADS; n++) {
        const int32_t at = n * CHANNEL_THREADS + (int32_t)threadIdx.x, i = at / (D / 4), d = at % (D / 4) * 4;
        const cuda_quad x = cuda_load(from + i * stride + d, i < length ? depth - d : 0, wide);
        *(float2 *)&rows[i][d] = make_float2(x.v[0], x.v[1]);
        *(float2 *)&rows[i][d + 2] = make_float2(x.v[2], x.v[3]);
    }
}

// Operands and sums of decays; a token or channel that does not exist is zeros. Whether all decays are mild. Ends with
// a barrier.
template <int D>
static __device__ __forceinline__ bool channel_load(const recurrence &a, const kern_chunk &chunk, int32_t state,
                                                    channel_shared<D> &shared) {
    const float *decay = recurrence_channel_decay(a, chunk.token0, state);
    const int64_t stride = (int64_t)a.states * a.depth;
    bool mild = true;
    channel_load_rows<D>(recurrence_query(a, chunk.token0, state, 0), (int64_t)a.queries * a.depth, chunk.length,
                         a.depth, shared.q);
    channel_load_rows<D>(recurrence_key(a, chunk.token0, state), (int64_t)a.keys * a.depth, chunk.length, a.depth,
                         shared.k);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES * D / CHANNEL_THREADS; n++) {
        const int32_t at = n * CHANNEL_THREADS + (int32_t)threadIdx.x, i0 = at / D * SPLIT_TILE, d = at % D;
        const int32_t exist = d < a.depth ? chunk.length - i0 : 0;
        mild = channel_sum(decay + i0 * stride + d, stride, exist, i0, d, shared) && mild;
    }
    const bool all_mild = __syncthreads_and(mild);
    for (int32_t at = threadIdx.x; at < CHUNK_TILES * D / 2; at += CHANNEL_THREADS) {
        const int32_t tile = at / (D / 2), d = at % (D / 2) * 2;
        *(float2 *)&shared.start[tile][d] = channel_blocks(shared, 0, tile, d);
        *(float2 *)&shared.end[tile][d] = channel_blocks(shared, tile + 1, CHUNK_TILES, d);
    }
    __syncthreads();
    return all_mild;
}

// Rows of a block of 16 tokens by a warp: value(second, row, d) of a lane's pairs of channels; second: of its rows.
template <int D, typename Value>
static __device__ __forceinline__ void channel_rows(int32_t lane, int32_t row0, Value value,
                                                    split_block (&x)[D / SPLIT_TILE]) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 two =
                    value(r == 1, row0 + split_row(lane, 2 * r), n * SPLIT_TILE + split_column(lane, half, 0));
                x[n].v[half][2 * r] = two.x, x[n].v[half][2 * r + 1] = two.y;
            }
}

// Blocks (row, 0 .. row - 1) of `rows` against the keys, by a warp, to `to`.
template <int D, int LIMBS>
static __device__ __forceinline__ void channel_off_diagonal(const channel_shared<D> &shared,
                                                            const typename channel_shared<D>::rows &rows, int32_t row,
                                                            int32_t lane, float (&to)[CHUNK][SYSTEM_ROW]) {
    split_block x[D / SPLIT_TILE];
    split_powers powers;
    split_left<LIMBS> left[D / SPLIT_TILE];
    channel_rows<D>(
        lane, row * SPLIT_TILE,
        [&](bool, int32_t i, int32_t d) {
            return channel_scaled(channel_two(rows[i], d), channel_two(shared.high[i], d));
        },
        x);
    split_strip(x, powers, left);
    for (int32_t column = 0; column < row; column++) {
        channel_rows<D>(
            lane, column * SPLIT_TILE,
            [&](bool, int32_t j, int32_t d) {
                const float2 rest = channel_rest(shared, j, d), blocks = channel_blocks(shared, column + 1, row, d);
                return channel_scaled(channel_two(shared.k[j], d), make_float2(rest.x + blocks.x, rest.y + blocks.y));
            },
            x);
        const split_power keys = split_power_of(cuda_warp_max(split_largest(x)));
        split_sum<LIMBS> sum = {};
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
            split_multiply(sum, left[n], split_right_of<LIMBS>(x[n], keys));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t i = row * SPLIT_TILE + split_row(lane, e);
                const int32_t j = column * SPLIT_TILE + split_column(lane, half, e);
                to[i][j] = j < shared.decay.first[i]
                               ? 0
                               : split_total(sum, half, e) * powers.row[e / 2].inverse * keys.inverse;
            }
    }
}

// The block on the diagonal of `rows` against the keys, i - j >= nearest, by a warp, to `to`; all decays are mild.
template <int D, int LIMBS>
static __device__ __forceinline__ void channel_diagonal(const channel_shared<D> &shared,
                                                        const typename channel_shared<D>::rows &rows, int32_t row,
                                                        int32_t nearest, int32_t lane, float (&to)[CHUNK][SYSTEM_ROW]) {
    const int32_t row0 = row * SPLIT_TILE;
    split_block x[D / SPLIT_TILE];
    split_right<LIMBS> right[D / SPLIT_TILE];
    channel_rows<D>(
        lane, row0,
        [&](bool second, int32_t j, int32_t d) {
            return channel_scaled(channel_two(shared.k[j], d), channel_inside(shared, row0 + 8 * second + 3, j, d));
        },
        x);
    const split_power keys = split_power_of(cuda_warp_max(split_largest(x)));
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        right[n] = split_right_of<LIMBS>(x[n], keys);
#pragma unroll
    for (int half = 0; half < 2; half++) { // of the columns
        split_powers powers;
        split_left<LIMBS> left[D / SPLIT_TILE];
        float part[2 * LIMBS - 1][4] = {};
        channel_rows<D>(
            lane, row0,
            [&](bool second, int32_t i, int32_t d) {
                if (half == 1 && !second)
                    return make_float2(0, 0);
                return channel_scaled(channel_two(rows[i], d), channel_inside(shared, i, row0 + 8 * half + 3, d));
            },
            x);
        split_strip(x, powers, left);
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
            for (int i = 0; i < 2 * LIMBS - 1; i++)
                mma_half(part[i], left[n].limb[i == 1], right[n].limb[i == 2][2 * half],
                         right[n].limb[i == 2][2 * half + 1]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int32_t i = row0 + split_row(lane, e), j = row0 + split_column(lane, half, e);
            const float total = LIMBS == 1 ? part[0][e] : part[0][e] + (part[1][e] + part[2 * LIMBS - 2][e]);
            to[i][j] =
                i - j >= nearest && j >= shared.decay.first[i] ? total * powers.row[e / 2].inverse * keys.inverse : 0;
        }
    }
}

// The blocks on the diagonal in a chunk whose decays are not mild; a thread has an element at a time.
template <int D> static __device__ __noinline__ void channel_diagonal_anyhow(channel_shared<D> &shared, bool delta) {
    for (int32_t at = threadIdx.x; at < CHUNK_TILES * SPLIT_TILE * SPLIT_TILE; at += CHANNEL_THREADS) {
        const int32_t i = at / SPLIT_TILE, j = i / SPLIT_TILE * SPLIT_TILE + at % SPLIT_TILE;
        float p = 0, l = 0;
        if (j <= i && j >= shared.decay.first[i])
            for (int32_t d = 0; d < D; d += 2) {
                const float2 k = channel_scaled(channel_two(shared.k[j], d), channel_inside(shared, i, j, d));
                const float2 q = channel_two(shared.q[i], d), own = channel_two(shared.k[i], d);
                p = fmaf(q.y, k.y, fmaf(q.x, k.x, p));
                l = fmaf(own.y, k.y, fmaf(own.x, k.x, l));
            }
        shared.p[i][j] = p;
        if (delta)
            shared.system.m[i][j] = i > j ? l : 0;
    }
}

// K and Q of the chunk's start, K of its end, and their factors.
template <int D, int LIMBS>
static __device__ __forceinline__ void channel_operands(const channel_shared<D> &shared, int32_t length,
                                                        recurrence_record<D, true, LIMBS> &record) {
    constexpr int PARTS = CHANNEL_THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS, tile = token / SPLIT_TILE;
    const bool from_start = token < length && shared.decay.first[token] < 0;
    const bool to_end = token < length && token >= shared.decay.first[length - 1];
    const auto put = [&](split_matrix<LIMBS, CHUNK, D> &m, const float *x, bool end) {
        return chunk_put_row<D, PARTS>(m, token, part, [&](int32_t column) {
            cuda_quad quad;
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int32_t d = column + e;
                const float2 own = end ? channel_rest(shared, token, d) : channel_two(shared.high[token], d);
                const float2 far = channel_two(end ? shared.end[tile] : shared.start[tile], d);
                const float2 two = channel_scaled(channel_two(x, d), make_float2(own.x + far.x, own.y + far.y));
                const bool kept = end ? to_end : from_start;
                quad.v[e] = kept ? two.x : 0, quad.v[e + 1] = kept ? two.y : 0;
            }
            return quad;
        });
    };
    const float key_start = put(record.k, shared.k[token], false), query_start = put(record.q, shared.q[token], false);
    const float key_end = put(record.k_end, shared.k[token], true);
    if (part != 0)
        return;
    record.key_start[token] = key_start;
    record.query_start[token] = query_start;
    record.key_end[token] = key_end;
    record.weight[token] = shared.weight[token];
}

// weighted: the system is times w.
template <int D, int LIMBS>
static __device__ void channel_prepare(const cuda_table *table, const recurrence &a, const kern_chunk &chunk,
                                       int32_t state, bool weighted, recurrence_record<D, true, LIMBS> &record,
                                       channel_shared<D> &shared) {
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, tile = warp % CHUNK_TILES;
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay, [](int32_t) { return 0.0f; });
    for (int32_t i = threadIdx.x; i < CHUNK; i += CHANNEL_THREADS)
        shared.weight[i] = i < chunk.length ? recurrence_weight(a, chunk.token0 + i, state) : 0;
    const bool mild = channel_load(a, chunk, state, shared);
    const bool first_half = warp < CHUNK_TILES;
    if (first_half || a.delta)
        channel_off_diagonal<D, LIMBS>(shared, first_half ? shared.q : shared.k,
                                       first_half ? tile : CHUNK_TILES - 1 - tile, lane,
                                       first_half ? shared.p : shared.system.m);
    if (mild && first_half == a.delta)
        channel_diagonal<D, LIMBS>(shared, shared.q, tile, 0, lane, shared.p);
    else if (mild && a.delta)
        channel_diagonal<D, LIMBS>(shared, shared.k, CHUNK_TILES - 1 - tile, 1, lane, shared.system.m);
    if (!mild)
        channel_diagonal_anyhow(shared, a.delta);
    channel_operands(shared, chunk.length, record);
    for (int32_t d = threadIdx.x; d < D; d += CHANNEL_THREADS)
        record.whole_m1[d] =
            shared.decay.first[chunk.length - 1] < 0
                ? expm1f((shared.start[CHUNK_TILES - 1][d] + shared.high[CHUNK - 1][d]) * (float)(1 / CHANNEL_LOG2_E))
                : -1.0f;
    __syncthreads();
    if (a.delta) {
        for (int32_t at = threadIdx.x; at < CHUNK * CHUNK; at += CHANNEL_THREADS)
            shared.system.m[at / CHUNK][at % CHUNK] *= shared.weight[at / CHUNK];
        recurrence_invert(shared.system, warp, lane);
    }
    const auto place = [&](int n, int half, int e, int32_t &i, int32_t &j) {
        i = tile * SPLIT_TILE + split_row(lane, e), j = n * SPLIT_TILE + split_column(lane, half, e);
    };
    int32_t i, j;
    if (warp < CHUNK_TILES)
        recurrence_put_lower(record.pairs, record.pairs_inverse[tile], tile, lane, [&](int n, int half, int e) {
            place(n, half, e, i, j);
            return shared.p[i][j];
        });
    else if (a.delta)
        recurrence_put_lower(record.system, record.system_inverse[tile], tile, lane, [&](int n, int half, int e) {
            place(n, half, e, i, j);
            return i >= j ? recurrence_inverse_at(shared.system, i, j) * (weighted ? shared.weight[j] : 1.0f) : 0;
        });
}

#endif

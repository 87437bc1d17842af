// SPDX-License-Identifier: Apache-2.0
// The record of a chunk and state where every key channel decays by itself (recurrence_chunk.cuh), by a block.
//
// P_ij = sum_d q_id k_jd e^(c_id - c_jd), and A likewise, in blocks of 16 tokens. Off the diagonal the exponent is cut
// where the rows' block begins, so that both parts are <= 0 and the block is a product on the tensor cores; on it every
// element has exponents of its own. Sums of decays restart with each block: kept as a float and its rounding error, a
// difference inside a block is good to its own rounding, and what lies between two blocks is a sum of whole blocks.
#ifndef KERNELS_CUDA_RECURRENCE_CHANNEL_CUH
#define KERNELS_CUDA_RECURRENCE_CHANNEL_CUH

#include "kernels/cuda/recurrence_chunk.cuh"

constexpr int CHANNEL_THREADS = 256;

template <int D> struct alignas(128) channel_shared {
    typedef float rows[CHUNK][D + 4]; // neighbouring rows in different banks

    rows q, k, high, low; // c inside its block, inclusive
    float p[CHUNK][SYSTEM_ROW];
    recurrence_triangle system;
    chunk_decay decay; // `first` alone
    float weight[CHUNK];
};

// c_i - c_j of a channel inside a block.
template <int D>
static __device__ __forceinline__ float channel_inside(const channel_shared<D> &shared, int32_t i, int32_t j,
                                                       int32_t d) {
    return (shared.high[i][d] - shared.high[j][d]) + (shared.low[i][d] - shared.low[j][d]);
}
// The sum over blocks [first, last).
template <int D>
static __device__ __forceinline__ float channel_blocks(const channel_shared<D> &shared, int32_t first, int32_t last,
                                                       int32_t d) {
    float sum = 0;
    for (int32_t n = first; n < last; n++)
        sum += shared.high[n * SPLIT_TILE + SPLIT_TILE - 1][d];
    return sum;
}
// From token j to the end of its block.
template <int D>
static __device__ __forceinline__ float channel_rest(const channel_shared<D> &shared, int32_t j, int32_t d) {
    return channel_inside(shared, j / SPLIT_TILE * SPLIT_TILE + SPLIT_TILE - 1, j, d);
}

// Operands and sums of decays; a token or channel that does not exist is zeros.
template <int D>
static __device__ __forceinline__ void channel_load(const recurrence &a, const kern_chunk &chunk, int32_t state,
                                                    channel_shared<D> &shared) {
    for (int32_t at = threadIdx.x; at < CHUNK * D; at += CHANNEL_THREADS) {
        const int32_t i = at / D, d = at % D;
        const bool exists = i < chunk.length && d < a.depth;
        shared.q[i][d] = exists ? recurrence_query(a, chunk.token0 + i, state, 0)[d] : 0;
        shared.k[i][d] = exists ? recurrence_key(a, chunk.token0 + i, state)[d] : 0;
    }
    for (int32_t at = threadIdx.x; at < CHUNK_TILES * D; at += CHANNEL_THREADS) {
        const int32_t i0 = at / D * SPLIT_TILE, d = at % D;
        double sum = 0;
        for (int32_t i = i0; i < i0 + SPLIT_TILE; i++) {
            if (i < chunk.length && d < a.depth)
                sum += (double)recurrence_channel_decay(a, chunk.token0 + i, state)[d];
            shared.high[i][d] = (float)sum;
            shared.low[i][d] = (float)(sum - (double)shared.high[i][d]);
        }
    }
}

// Rows of a block of 16 tokens by a warp: value(row, d) of a lane's elements.
template <int D, typename Value>
static __device__ __forceinline__ void channel_rows(int32_t lane, int32_t row0, Value value,
                                                    split_block (&x)[D / SPLIT_TILE]) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[n].v[half][i] = value(row0 + split_row(lane, i), n * SPLIT_TILE + split_column(lane, half, i));
}

// Blocks (row, 0 .. row - 1) of `rows` against the keys, by a warp, to `to`.
template <int D>
static __device__ __forceinline__ void channel_off_diagonal(const channel_shared<D> &shared,
                                                            const typename channel_shared<D>::rows &rows, int32_t row,
                                                            int32_t lane, float (&to)[CHUNK][SYSTEM_ROW]) {
    split_block x[D / SPLIT_TILE];
    split_powers powers;
    split_left<2> left[D / SPLIT_TILE];
    channel_rows<D>(
        lane, row * SPLIT_TILE, [&](int32_t i, int32_t d) { return rows[i][d] * expf(shared.high[i][d]); }, x);
    split_strip(x, powers, left);
    for (int32_t column = 0; column < row; column++) {
        channel_rows<D>(
            lane, column * SPLIT_TILE,
            [&](int32_t j, int32_t d) {
                return shared.k[j][d] * expf(channel_rest(shared, j, d) + channel_blocks(shared, column + 1, row, d));
            },
            x);
        const split_power keys = split_power_of(cuda_warp_max(split_largest(x)));
        split_sum<2> sum = {};
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
            split_multiply(sum, left[n], split_right_of<2>(x[n], keys));
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

// Elements of the blocks on the diagonal, i >= j; a thread has one at a time.
template <int D> static __device__ __forceinline__ void channel_diagonal(channel_shared<D> &shared, bool delta) {
    for (int32_t at = threadIdx.x; at < CHUNK_TILES * SPLIT_TILE * SPLIT_TILE; at += CHANNEL_THREADS) {
        const int32_t i = at / SPLIT_TILE, j = i / SPLIT_TILE * SPLIT_TILE + at % SPLIT_TILE;
        float p = 0, l = 0;
        if (j <= i && j >= shared.decay.first[i])
            for (int32_t d = 0; d < D; d++) {
                const float k = shared.k[j][d] * expf(channel_inside(shared, i, j, d));
                p = fmaf(shared.q[i][d], k, p);
                l = fmaf(shared.k[i][d], k, l);
            }
        shared.p[i][j] = p;
        if (delta)
            shared.system.m[i][j] = i > j ? l : 0;
    }
}

// K and Q of the chunk's start, K of its end, and their factors.
template <int D>
static __device__ __forceinline__ void channel_operands(const channel_shared<D> &shared, int32_t length,
                                                        recurrence_record<D, true> &record) {
    constexpr int PARTS = CHANNEL_THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS, tile = token / SPLIT_TILE;
    const bool from_start = token < length && shared.decay.first[token] < 0;
    const bool to_end = token < length && token >= shared.decay.first[length - 1];
    const auto put = [&](split_tile<2>(&tiles)[CHUNK_TILES][D / SPLIT_TILE], const float *x, bool end) {
        return chunk_put_row<D, PARTS>(tiles[tile], token % SPLIT_TILE, part, [&](int32_t column) {
            cuda_quad quad;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t d = column + e;
                const float c = end ? channel_rest(shared, token, d) + channel_blocks(shared, tile + 1, CHUNK_TILES, d)
                                    : shared.high[token][d] + channel_blocks(shared, 0, tile, d);
                quad.v[e] = (end ? to_end : from_start) ? x[d] * expf(c) : 0;
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
template <int D>
static __device__ void channel_prepare(const cuda_table *table, const recurrence &a, const kern_chunk &chunk,
                                       int32_t state, bool weighted, recurrence_record<D, true> &record,
                                       channel_shared<D> &shared) {
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, tile = warp % CHUNK_TILES;
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay, [](int32_t) { return 0.0f; });
    channel_load(a, chunk, state, shared);
    for (int32_t i = threadIdx.x; i < CHUNK; i += CHANNEL_THREADS)
        shared.weight[i] = i < chunk.length ? recurrence_weight(a, chunk.token0 + i, state) : 0;
    __syncthreads();
    if (warp < CHUNK_TILES)
        channel_off_diagonal<D>(shared, shared.q, tile, lane, shared.p);
    else if (a.delta)
        channel_off_diagonal<D>(shared, shared.k, CHUNK_TILES - 1 - tile, lane, shared.system.m);
    channel_diagonal(shared, a.delta);
    channel_operands(shared, chunk.length, record);
    for (int32_t d = threadIdx.x; d < D; d += CHANNEL_THREADS)
        record.whole_m1[d] =
            shared.decay.first[chunk.length - 1] < 0 ? expm1f(channel_blocks(shared, 0, CHUNK_TILES, d)) : -1.0f;
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

// SPDX-License-Identifier: Apache-2.0
// A chunk of one head as the chunk kernels see it: which of its tokens belong together, and what decays between them.
//
// With c_i the running sum of log decays inside the chunk and E_ij = e^(c_i - c_j) for j <= i of one document, else 0:
// sums are made in double and kept as a float and its rounding error, so that a difference is good to its own rounding
// however far c has run. All exponents are <= 0, and a boundary is an index, never a decay of -infinity.
#ifndef KERNELS_CUDA_CHUNK_CUH
#define KERNELS_CUDA_CHUNK_CUH

#include "kernels/cuda/split_matrix.cuh"

constexpr int CHUNK = 64, CHUNK_TILES = CHUNK / SPLIT_TILE;
constexpr int CHUNK_LOWER = CHUNK_TILES * (CHUNK_TILES + 1) / 2; // tiles on and below the diagonal

static __host__ __device__ __forceinline__ constexpr int chunk_lower(int row, int column) {
    return row * (row + 1) / 2 + column;
}

struct chunk_decay {
    float high[CHUNK], low[CHUNK]; // c
    int32_t first[CHUNK];          // first token of the token's document inside the chunk; -1: it began before
};

// By one warp; decay_of(i) is token i's log decay, i < length. Behind it a barrier of those who read.
template <typename Decay>
static __device__ __forceinline__ void chunk_sum_decays(const cuda_table *table, const kern_chunk &chunk,
                                                        chunk_decay &decay, Decay decay_of) {
    const int32_t lane = threadIdx.x % CUDA_WARP, row0 = table->row[chunk.row].token0;
    double sum[2];
    for (int i = 0; i < 2; i++) {
        const int32_t at = 2 * lane + i;
        sum[i] = at < chunk.length ? (double)decay_of(at) : 0;
        const int32_t start = at < chunk.length ? table->token_start[chunk.token0 + at] : row0;
        decay.first[at] = start < chunk.token0 || start == row0 ? -1 : start - chunk.token0;
    }
    sum[1] += sum[0];
    double before = sum[1];
    for (int distance = 1; distance < CUDA_WARP; distance *= 2) {
        const double other = __shfl_up_sync(~0u, before, distance);
        before += lane >= distance ? other : 0;
    }
    before -= sum[1];
    for (int i = 0; i < 2; i++) {
        const double c = before + sum[i];
        decay.high[2 * lane + i] = (float)c;
        decay.low[2 * lane + i] = (float)(c - (double)(float)c);
    }
}

// E_ij; 0 where i or j is no token. No branch: e^-infinity is 0.
static __device__ __forceinline__ float chunk_pair(const chunk_decay &decay, int32_t length, int32_t i, int32_t j) {
    const float c = (decay.high[i] - decay.high[j]) + (decay.low[i] - decay.low[j]);
    return expf(i < length && j <= i && j >= decay.first[i] ? c : -INFINITY);
}
// What the state before the chunk still weighs at token i.
static __device__ __forceinline__ float chunk_from_start(const chunk_decay &decay, int32_t length, int32_t i) {
    return i < length && decay.first[i] < 0 ? expf(decay.high[i]) : 0;
}
// The decay of the state over the chunk, minus 1; -1: the state after it owes nothing to the one before.
static __device__ __forceinline__ float chunk_whole_m1(const chunk_decay &decay, int32_t length) {
    return decay.first[length - 1] < 0 ? expm1f(decay.high[length - 1]) : -1.0f;
}

// A thread's runs of a vector, one of PARTS threads that have it: put(run, its 8 numbers, scaled).
template <int RUNS, int PARTS, typename Put>
static __device__ __forceinline__ void chunk_each_run(int32_t part, const cuda_quad (&x)[RUNS][2], float scale,
                                                      Put put) {
#pragma unroll
    for (int n = 0; n < RUNS; n++) {
        float scaled[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            scaled[e] = x[n][e / 4].v[e % 4] * scale;
        put(n * PARTS + part, scaled);
    }
}
// The same into a row of tiles; row[i] is tile i's.
template <int RUNS, int PARTS, int LIMBS>
static __device__ __forceinline__ void chunk_put_runs(split_tile<LIMBS> *row, int32_t inner, int32_t part,
                                                      const cuda_quad (&x)[RUNS][2], float scale) {
    chunk_each_run<RUNS, PARTS>(
        part, x, scale, [&](int32_t run, const float *scaled) { split_put_run(row[run / 2], inner, run % 2, scaled); });
}

// A vector of a token, WIDTH floats, PARTS neighbouring threads a row. quad(c) is what stands in columns c .. c + 3,
// put as chunk_each_run's. Returns the inverse of its power.
template <int WIDTH, int PARTS, typename Quad, typename Put>
static __device__ __forceinline__ float chunk_split_row(int32_t part, Quad quad, Put put) {
    constexpr int RUNS = WIDTH / 8 / PARTS;
    cuda_quad x[RUNS][2];
    float largest = 0;
#pragma unroll
    for (int n = 0; n < RUNS; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            x[n][i] = quad((n * PARTS + part) * 8 + 4 * i);
#pragma unroll
    for (int n = 0; n < RUNS; n++)
#pragma unroll
        for (int e = 0; e < 8; e++)
            largest = fmaxf(largest, fabsf(x[n][e / 4].v[e % 4]));
#pragma unroll
    for (int distance = 1; distance < PARTS; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const split_power power = split_power_of(largest);
    chunk_each_run<RUNS, PARTS>(part, x, power.scale, put);
    return power.inverse;
}
// The same into a row of tiles, and into a row of a matrix.
template <int WIDTH, int PARTS, int LIMBS, typename Quad>
static __device__ __forceinline__ float chunk_put_row(split_tile<LIMBS> *row, int32_t inner, int32_t part, Quad quad) {
    return chunk_split_row<WIDTH, PARTS>(
        part, quad, [&](int32_t run, const float *scaled) { split_put_run(row[run / 2], inner, run % 2, scaled); });
}
template <int WIDTH, int PARTS, int LIMBS, int ROWS, typename Quad>
static __device__ __forceinline__ float chunk_put_row(split_matrix<LIMBS, ROWS, WIDTH> &m, int32_t row, int32_t part,
                                                      Quad quad) {
    return chunk_split_row<WIDTH, PARTS>(part, quad,
                                         [&](int32_t run, const float *scaled) { split_put_run(m, row, run, scaled); });
}

// --------------------------------------------------------------------------------------------------- chunks of a row

// The first chunk of a row, or of a later one.
static __device__ __forceinline__ int32_t chunk_of_row(const cuda_table *table, int32_t row) {
    int32_t low = 0, high = table->n_chunks;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (table->chunk[middle].row < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Whether a chunk of a prompt row begins at its token t.
static __device__ __forceinline__ bool chunk_begins(const kern_row &row, int32_t t) {
    return row.kind == KERN_ROW_PROMPT && (t == row.token0 || (row.position + (t - row.token0)) % CHUNK == 0);
}

// A row's chunks [first, last) among those of a group, and the state that they begin and end with: the row's home,
// where it has one, else between two groups carry[0] in front of the group and carry[1] behind it; NULL: from zeros, to
// nowhere. Two, since one row may still read what another one of the same launch would overwrite.
template <typename State> struct chunk_run {
    int32_t first, last;
    State *from, *to;
};
template <typename State>
static __device__ __forceinline__ chunk_run<State> chunk_run_of(const cuda_table *table, int32_t row, int32_t first,
                                                                int32_t count, State *home, State *const (&carry)[2]) {
    const int32_t begin = chunk_of_row(table, row), end = chunk_of_row(table, row + 1);
    return {max(begin, first), min(end, first + count), begin < first && !home ? carry[0] : home,
            end > first + count && !home ? carry[1] : home};
}

#endif

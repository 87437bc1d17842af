// SPDX-License-Identifier: Apache-2.0
// A strip of a state in the recurrence's chunk form: 16 columns, transposed, so that a lane has two of them and its
// elements are those of split_block: rows are columns of the state, columns are channels or tokens. What becomes of the
// sums of each product, tile by tile; whoever makes the sums, one warp (recurrence_chunk.cu) or four
// (recurrence_team.cuh), the bits are the same.
#ifndef KERNELS_CUDA_RECURRENCE_STRIP_CUH
#define KERNELS_CUDA_RECURRENCE_STRIP_CUH

#include "kernels/cuda/recurrence_chunk.cuh"

struct recurrence_strip {
    int32_t lane, state, column[2]; // columns of the lane's two rows
    bool exists[2], reads[2];       // reads: from v
    float constant[2];              // else: 1 of the unit column
    float skip[2];
};
static __device__ __forceinline__ recurrence_strip recurrence_strip_of(const recurrence &a, int32_t state,
                                                                       int32_t number) {
    recurrence_strip strip;
    strip.lane = threadIdx.x % CUDA_WARP;
    strip.state = state;
    for (int r = 0; r < 2; r++) {
        strip.column[r] = number * SPLIT_TILE + split_row(strip.lane, 2 * r);
        strip.exists[r] = strip.column[r] < a.columns;
        strip.reads[r] = strip.column[r] < a.width;
        strip.constant[r] = strip.exists[r] ? 1.0f : 0.0f;
        strip.skip[r] = recurrence_skip(a, state, 0, strip.column[r]);
    }
    return strip;
}

// Calls use(half, element, number of its column in a tile) for a lane's elements.
template <typename Use> static __device__ __forceinline__ void strip_each(const recurrence_strip &strip, Use use) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            use(half, i, split_column(strip.lane, half, i));
}

// ------------------------------------------------------------------------------------------------------------- memory

// Elements of channels of tile n of S^T, from or to the state (D, V') of the row.
template <typename Use>
static __device__ __forceinline__ void strip_places(const recurrence &a, const recurrence_strip &strip, int n,
                                                    Use use) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const int32_t d = n * SPLIT_TILE + column;
        if (d < a.depth && strip.exists[i / 2])
            use(half, i, (int64_t)d * a.columns + strip.column[i / 2]);
    });
}

// Calls use(half, column of two, whether that token exists, its row of `rows`) for a lane's tokens of tile n; the
// lane's second row is 8 columns on.
template <typename Float, typename Use>
static __device__ __forceinline__ void strip_tokens(const recurrence_strip &strip, const kern_chunk &chunk, Float *rows,
                                                    int64_t stride, int n, Use use) {
    const int32_t token = n * SPLIT_TILE + split_column(strip.lane, 0, 0);
    rows += token * stride + strip.column[0];
#pragma unroll
    for (int half = 0; half < 2; half++, rows += 8 * stride) {
        use(half, 0, token + 8 * half < chunk.length, rows);
        use(half, 1, token + 8 * half + 1 < chunk.length, rows + stride);
    }
}

// V^T.
static __device__ __forceinline__ void strip_values(const recurrence &a, const recurrence_strip &strip,
                                                    const kern_chunk &chunk, int n, split_block &v) {
    const float *from = recurrence_value(a, chunk.token0, strip.state);
    strip_tokens(strip, chunk, from, (int64_t)a.values * a.width, n,
                 [&](int half, int c, bool exists, const float *row) {
#pragma unroll
                     for (int r = 0; r < 2; r++)
                         v.v[half][2 * r + c] = exists && strip.reads[r] ? row[8 * r] : exists ? strip.constant[r] : 0;
                 });
}

// O^T with what skips the state.
static __device__ __forceinline__ void strip_store(const recurrence &a, const recurrence_strip &strip,
                                                   const kern_chunk &chunk, int n, split_block &o) {
    if (a.skip_width) {
        split_block v;
        strip_values(a, strip, chunk, n, v);
        strip_each(strip, [&](int half, int i, int32_t) {
            o.v[half][i] = fmaf(strip.skip[i / 2], v.v[half][i], o.v[half][i]);
        });
    }
    float *to = recurrence_output(a, chunk.token0, strip.state, 0);
    strip_tokens(strip, chunk, to, (int64_t)a.outputs * a.columns, n, [&](int half, int c, bool exists, float *row) {
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (exists && strip.exists[r])
                row[8 * r] = o.v[half][2 * r + c];
    });
}

// --------------------------------------------------------------------------------------------------------- the algebra

// The errors of the delta rule, V^T - e^c S^T K^T, in place of V^T.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void strip_errors(const recurrence_record<D, CHANNEL> &record,
                                                    const recurrence_strip &strip, int n, const split_sum<2> &sum,
                                                    const split_powers &powers, split_block &u) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const float start = record.key_start[n * SPLIT_TILE + column];
        u.v[half][i] = fmaf(-(split_total(sum, half, i) * powers.row[i / 2].inverse), start, u.v[half][i]);
    });
}
// U^T by the delta rule, from the errors times T.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void strip_solved(const recurrence_record<D, CHANNEL> &record,
                                                    const recurrence_strip &strip, int n, const split_sum<2> &sum,
                                                    const split_powers &powers, split_block &u) {
    strip_each(strip, [&](int half, int i, int32_t) {
        u.v[half][i] = split_total(sum, half, i) * powers.row[i / 2].inverse * record.system_inverse[n];
    });
}
// U^T times factors of its tokens.
static __device__ __forceinline__ void strip_weigh(const recurrence_strip &strip, int n, const float *factor,
                                                   split_block &u) {
    strip_each(strip, [&](int half, int i, int32_t column) { u.v[half][i] *= factor[n * SPLIT_TILE + column]; });
}
// O^T without what skips the state, from S^T Q^T and U^T P^T.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void strip_read(const recurrence_record<D, CHANNEL> &record, float scale,
                                                  const recurrence_strip &strip, int n, const split_sum<2> &before,
                                                  const split_powers &powers, const split_sum<2> &inside,
                                                  const split_powers &written, split_block &o) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const float start = record.query_start[n * SPLIT_TILE + column] * scale;
        const float own = split_total(inside, half, i) * (written.row[i / 2].inverse * scale);
        o.v[half][i] =
            fmaf(split_total(before, half, i) * powers.row[i / 2].inverse, start, own * record.pairs_inverse[n]);
    });
}
// S^T over the chunk, from what is written.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void strip_advance(const recurrence_record<D, CHANNEL> &record,
                                                     const recurrence_strip &strip, int n, const split_sum<2> &sum,
                                                     const split_powers &powers, split_block &s) {
    strip_each(strip, [&](int half, int i, int32_t column) {
        const float m1 = record.whole_m1[CHANNEL ? n * SPLIT_TILE + column : 0], x = s.v[half][i];
        s.v[half][i] = fmaf(split_total(sum, half, i), powers.row[i / 2].inverse, m1 > -1 ? fmaf(m1, x, x) : 0);
    });
}

// Rows x (a tile of tokens each) times a lower triangle: the sum over tiles n <= tile.
static __device__ __forceinline__ split_sum<2> strip_lower(const split_left<2> (&x)[CHUNK_TILES],
                                                           const split_tile<2> *lower, int32_t tile, int32_t lane) {
    split_sum<2> sum = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        if (n <= tile)
            split_multiply(sum, x[n], split_load_right(lower[chunk_lower(tile, n)], lane));
    return sum;
}
// Rows x times the keys of all tokens, channels of tile n.
template <int D>
static __device__ __forceinline__ split_sum<2> strip_keys(const split_left<2> (&x)[CHUNK_TILES],
                                                          const split_tile<2> (&keys)[CHUNK_TILES][D / SPLIT_TILE],
                                                          int n, int32_t lane) {
    split_sum<2> sum = {};
#pragma unroll
    for (int tile = 0; tile < CHUNK_TILES; tile++)
        split_multiply(sum, x[tile], split_load_turned(keys[tile][n], lane));
    return sum;
}

#endif

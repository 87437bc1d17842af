// SPDX-License-Identifier: Apache-2.0
// What the two kernels of the recurrence's chunk form hand to each other (recurrence_chunk.cu): a *record* for each
// chunk and state, in memory as in shared memory.
#ifndef KERNELS_CUDA_RECURRENCE_CHUNK_CUH
#define KERNELS_CUDA_RECURRENCE_CHUNK_CUH

#include <type_traits>

#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/recurrence.cuh"

// Rows of tiles are tokens; a token that does not exist is zeros. D: the key width, rounded up. With a decay of the
// head k and q are as they are and what decays them are factors of their rows; with one of each channel (CHANNEL) k and
// q are those of the chunk's start, k_end those of its end.
template <int D> struct recurrence_channel_part { split_tile<2> k_end[CHUNK_TILES][D / SPLIT_TILE]; };
struct recurrence_no_part {};
template <int D, bool CHANNEL>
struct alignas(128) recurrence_record
    : std::conditional<CHANNEL, recurrence_channel_part<D>, recurrence_no_part>::type {
    split_tile<2> k[CHUNK_TILES][D / SPLIT_TILE], q[CHUNK_TILES][D / SPLIT_TILE];
    split_tile<2> pairs[CHUNK_LOWER];  // P = Q K^T times the decays
    split_tile<2> system[CHUNK_LOWER]; // delta: (I + A)^-1 diag(w), A = strict_tril(w K K^T times the decays); backward
                                       // it is not times w
    float key_start[CHUNK];            // what a product of the state with row i of k is multiplied with
    float query_start[CHUNK];          // the same of q
    float key_end[CHUNK];              // row i of k, or k_end, on its way to the state's end
    float weight[CHUNK];               // w
    float pairs_inverse[CHUNK_TILES], system_inverse[CHUNK_TILES]; // of rows of tiles
    float whole_m1[CHANNEL ? D : 1];                               // decay over the chunk, minus 1; -1: begins anew
};
template <int D, bool CHANNEL>
static __device__ __forceinline__ auto recurrence_keys_to_end(const recurrence_record<D, CHANNEL> &record)
    -> const split_tile<2> (&)[CHUNK_TILES][D / SPLIT_TILE] {
    if constexpr (CHANNEL)
        return record.k_end;
    else
        return record.k;
}

constexpr int SYSTEM_ROW = CHUNK + 4; // floats; rows of tiles in different banks

// -------------------------------------------------------------------------------------------------------- the triangle

// A in the tiles below the diagonal, its inverse T = (I + A)^-1 in those above: tile (i, j) of T stands at (j, i). On
// the diagonal T takes the place of A, which is not needed any more.
struct recurrence_triangle {
    float m[CHUNK][SYSTEM_ROW];
    float between[CHUNK_TILES][SPLIT_TILE][SPLIT_TILE]; // of a warp
};
static __device__ __forceinline__ float recurrence_inverse_at(const recurrence_triangle &m, int32_t i, int32_t j) {
    return m.m[j / SPLIT_TILE * SPLIT_TILE + i % SPLIT_TILE][i / SPLIT_TILE * SPLIT_TILE + j % SPLIT_TILE];
}

// t of a diagonal tile, by a warp: a lane solves for a column.
static __device__ __forceinline__ void recurrence_invert_tile(recurrence_triangle &m, int32_t at, int32_t lane) {
    const int32_t column = lane % SPLIT_TILE;
    float x[SPLIT_TILE];
#pragma unroll
    for (int r = 0; r < SPLIT_TILE; r++) {
        x[r] = r == column ? 1.0f : 0.0f;
#pragma unroll
        for (int s = 0; s < SPLIT_TILE; s++)
            if (s < r)
                x[r] = fmaf(-m.m[at + r][at + s], x[s], x[r]);
    }
    __syncwarp();
    if (lane < SPLIT_TILE)
#pragma unroll
        for (int r = 0; r < SPLIT_TILE; r++)
            m.m[at + r][at + column] = x[r];
}

// 8 columns of a row of a 16 x 16 product, a lane's share: sum += a[k] b[k][0 .. 7].
static __device__ __forceinline__ void recurrence_add_rows(float (&sum)[8], const float *a, const float *b,
                                                           int32_t b_row) {
#pragma unroll
    for (int k = 0; k < SPLIT_TILE; k++) {
        const float4 first = *(const float4 *)(b + k * b_row), second = *(const float4 *)(b + k * b_row + 4);
        sum[0] = fmaf(a[k], first.x, sum[0]), sum[1] = fmaf(a[k], first.y, sum[1]);
        sum[2] = fmaf(a[k], first.z, sum[2]), sum[3] = fmaf(a[k], first.w, sum[3]);
        sum[4] = fmaf(a[k], second.x, sum[4]), sum[5] = fmaf(a[k], second.y, sum[5]);
        sum[6] = fmaf(a[k], second.z, sum[6]), sum[7] = fmaf(a[k], second.w, sum[7]);
    }
}

// The tile (i, j), i > j, by a warp, from those nearer to the diagonal: T_ij = -T_ii sum_k A_ik T_kj.
static __device__ __forceinline__ void recurrence_invert_between(recurrence_triangle &m, int32_t i, int32_t j,
                                                                 int32_t warp, int32_t lane) {
    const int32_t row = lane / 2, column = lane % 2 * 8;
    float sum[8] = {}, result[8] = {};
    for (int32_t k = j; k < i; k++)
        recurrence_add_rows(sum, &m.m[i * SPLIT_TILE + row][k * SPLIT_TILE],
                            &m.m[j * SPLIT_TILE][k * SPLIT_TILE + column], SYSTEM_ROW);
#pragma unroll
    for (int e = 0; e < 8; e++)
        m.between[warp][row][column + e] = -sum[e];
    __syncwarp();
    recurrence_add_rows(result, &m.m[i * SPLIT_TILE + row][i * SPLIT_TILE], &m.between[warp][0][column], SPLIT_TILE);
#pragma unroll
    for (int e = 0; e < 8; e++)
        m.m[j * SPLIT_TILE + row][i * SPLIT_TILE + column + e] = result[e];
}

// By the block; begins and ends with a barrier.
static __device__ void recurrence_invert(recurrence_triangle &m, int32_t warp, int32_t lane) {
    __syncthreads();
    if (warp < CHUNK_TILES)
        recurrence_invert_tile(m, warp * SPLIT_TILE, lane);
    for (int32_t distance = 1; distance < CHUNK_TILES; distance++) {
        __syncthreads();
        if (warp + distance < CHUNK_TILES)
            recurrence_invert_between(m, warp + distance, warp, warp, lane);
    }
    __syncthreads();
}

// Rows of tiles 0 .. `row` of a lower triangle, as operand; one power for the 16 rows.
template <typename Element>
static __device__ __forceinline__ void recurrence_put_lower(split_tile<2> *tiles, float &inverse, int32_t row,
                                                            int32_t lane, Element element) {
    float largest = 0;
    split_block x[CHUNK_TILES];
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[n].v[half][i] = n <= row ? element(n, half, i) : 0;
                largest = fmaxf(largest, fabsf(x[n].v[half][i]));
            }
    const split_power power = split_power_of(cuda_warp_max(largest));
    if (lane == 0)
        inverse = power.inverse;
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4 && n <= row; i += 2)
                split_put_pair(tiles[chunk_lower(row, n)], split_row(lane, i), split_column(lane, half, i),
                               x[n].v[half][i] * power.scale, x[n].v[half][i + 1] * power.scale);
}

#endif

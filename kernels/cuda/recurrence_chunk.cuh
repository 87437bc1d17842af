// SPDX-License-Identifier: Apache-2.0
// What the two kernels of the recurrence's chunk form hand to each other (recurrence_chunk.cu): a *record* for each
// chunk and state, in memory as in shared memory.
#ifndef KERNELS_CUDA_RECURRENCE_CHUNK_CUH
#define KERNELS_CUDA_RECURRENCE_CHUNK_CUH

#include <type_traits>

#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/recurrence.cuh"

// Rows of matrices are tokens; a token that does not exist is zeros. D: the key width, rounded up. With a decay of the
// head k and q are as they are and what decays them are factors of their rows; with one of each channel (CHANNEL) k and
// q are those of the chunk's start, k_end those of its end. LIMBS: split.cuh.
template <int D, int LIMBS> struct recurrence_channel_part { split_matrix<LIMBS, CHUNK, D> k_end; };
struct recurrence_no_part {};
template <int D, bool CHANNEL, int LIMBS>
struct alignas(128) recurrence_record
    : std::conditional<CHANNEL, recurrence_channel_part<D, LIMBS>, recurrence_no_part>::type {
    split_matrix<LIMBS, CHUNK, D> k, q;
    split_lower<LIMBS, CHUNK> pairs;  // P = Q K^T times the decays
    split_lower<LIMBS, CHUNK> system; // delta: (I + A)^-1 diag(w), A = strict_tril(w K K^T times the decays); backward
                                      // it is not times w
    float key_start[CHUNK];           // what a product of the state with row i of k is multiplied with
    float query_start[CHUNK];         // the same of q
    float key_end[CHUNK];             // row i of k, or k_end, on its way to the state's end
    float weight[CHUNK];              // w
    float pairs_inverse[CHUNK_TILES], system_inverse[CHUNK_TILES]; // of rows of tiles
    float whole_m1[CHANNEL ? D : 1];                               // decay over the chunk, minus 1; -1: begins anew
};
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ const split_matrix<LIMBS, CHUNK, D> &
recurrence_keys_to_end(const recurrence_record<D, CHANNEL, LIMBS> &record) {
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
    float between[CHUNK / 2][CHUNK / 2 + 4];
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
        for (int s = 0; s < r; s += 4) {
            const float4 a = *(const float4 *)&m.m[at + r][at + s];
            const float row[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (s + e < r)
                    x[r] = fmaf(-row[e], x[s + e], x[r]);
        }
    }
    __syncwarp();
    if (lane < SPLIT_TILE)
#pragma unroll
        for (int r = 0; r < SPLIT_TILE; r++)
            m.m[at + r][at + column] = x[r];
}

// N columns of a row of a product with 16 rows of b: sum += a[k] b[k][0 .. N - 1].
template <int N>
static __device__ __forceinline__ void recurrence_add_rows(float (&sum)[N], const float *a, const float *b,
                                                           int32_t b_row) {
#pragma unroll
    for (int k0 = 0; k0 < SPLIT_TILE; k0 += 4) {
        const float4 quad = *(const float4 *)(a + k0);
        const float x[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int e = 0; e < N; e += 2) {
                const float2 y = *(const float2 *)(b + (k0 + k) * b_row + e);
                sum[e] = fmaf(x[k], y.x, sum[e]), sum[e + 1] = fmaf(x[k], y.y, sum[e + 1]);
            }
    }
}

// The tiles (i, j), i in [middle, middle + SIDE), j in [middle - SIDE, middle), from the inverses on either side of
// `middle`: T_ij = -sum_k T_ik X_kj, X_ij = sum_k A_ik T_kj. By THREADS threads, behind a barrier of the block and with
// one inside. between: of these threads.
template <int SIDE, int THREADS>
static __device__ __forceinline__ void recurrence_invert_between(recurrence_triangle &m, int32_t middle, int32_t thread,
                                                                 float (*between)[CHUNK / 2 + 4]) {
    constexpr int WIDTH = SIDE * SPLIT_TILE, N = WIDTH * WIDTH / THREADS;
    const int32_t row = thread / (WIDTH / N), column = thread % (WIDTH / N) * N; // of the square
    const int32_t i = row / SPLIT_TILE, j = column / SPLIT_TILE, inner = row % SPLIT_TILE, c = column % SPLIT_TILE;
    const int32_t top = middle * SPLIT_TILE, left = top - WIDTH;
    float x[N] = {}, t[N] = {};
    for (int32_t k = j; k < SIDE; k++)
        recurrence_add_rows(x, &m.m[top + row][left + k * SPLIT_TILE],
                            &m.m[left + j * SPLIT_TILE][left + k * SPLIT_TILE + c], SYSTEM_ROW);
#pragma unroll
    for (int e = 0; e < N; e++)
        between[row][column + e] = -x[e];
    __syncthreads();
    for (int32_t k = 0; k <= i; k++)
        recurrence_add_rows(t, &m.m[top + k * SPLIT_TILE + inner][top + i * SPLIT_TILE],
                            &between[k * SPLIT_TILE][column], CHUNK / 2 + 4);
#pragma unroll
    for (int e = 0; e < N; e++)
        m.m[left + j * SPLIT_TILE + inner][top + i * SPLIT_TILE + c + e] = t[e];
}

// By a block of INVERT_THREADS; begins and ends with a barrier.
constexpr int INVERT_THREADS = 256;
static __device__ void recurrence_invert(recurrence_triangle &m, int32_t warp, int32_t lane) {
    const int32_t half = threadIdx.x / (INVERT_THREADS / 2);
    __syncthreads();
    if (warp < CHUNK_TILES)
        recurrence_invert_tile(m, warp * SPLIT_TILE, lane);
    __syncthreads();
    recurrence_invert_between<1, INVERT_THREADS / 2>(m, 1 + 2 * half, threadIdx.x % (INVERT_THREADS / 2),
                                                     m.between + half * SPLIT_TILE);
    __syncthreads();
    recurrence_invert_between<2, INVERT_THREADS>(m, 2, threadIdx.x, m.between);
    __syncthreads();
}

// Rows of tiles 0 .. `row` of a lower triangle, as operand; one power for the 16 rows.
template <int LIMBS, typename Element>
static __device__ __forceinline__ void recurrence_put_lower(split_lower<LIMBS, CHUNK> &lower, float &inverse,
                                                            int32_t row, int32_t lane, Element element) {
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
                split_put_pair(lower, row * SPLIT_TILE + split_row(lane, i),
                               n * SPLIT_TILE + split_column(lane, half, i), x[n].v[half][i] * power.scale,
                               x[n].v[half][i + 1] * power.scale);
}

#endif

// SPDX-License-Identifier: Apache-2.0
// Products of floats on the tensor cores (mma.m16n8k16) that lose no more than float32 does. A number is a power of two
// times the sum of two float16, 22 bits; a product is three of theirs, of which the large one and the two small ones
// are summed apart, as the tensor cores cut every sum off at 24 bits.
//
// The power of two brings the largest number of a vector near 2^14; what lies 2^28 below it and more is rounded to
// 2^-38 of it. Vectors are the rows of a left operand and of a right one (whose rows are the columns of the product),
// so that powers leave a sum as a factor of its row and one of its column.
//
// Operands lie in shared memory as tiles of 16 x 16, high halves before low ones. A run of 8 numbers stands at
// (row, column / 8) by split_run, which is where ldmatrix finds eight rows in eight different banks. A tile is read as
// a left operand (16 rows x 16 k), as a right one (rows are the columns of the product), or turned (rows are k).
#ifndef KERNELS_CUDA_SPLIT_CUH
#define KERNELS_CUDA_SPLIT_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/mma.cuh"

constexpr int SPLIT_TILE = 16;

struct alignas(16) split_tile {
    uint4 high[32], low[32]; // runs of 8
};

static __device__ __forceinline__ int32_t split_run(int32_t row, int32_t half) {
    return row * 2 + (half ^ (row >> 2 & 1));
}

// ------------------------------------------------------------------------------------------------------------- powers

struct split_power {
    float scale, inverse;
};

// Of the largest magnitude of a vector. 0 and what is not finite have one too.
static __device__ __forceinline__ split_power split_power_of(float largest) {
    constexpr uint32_t LEAST = 15, TARGET = 14, BIAS = 127;
    const uint32_t field = __float_as_uint(largest) >> 23 & 0xFF, e = field < LEAST ? LEAST : field;
    return {__uint_as_float((2 * BIAS + TARGET - e) << 23), __uint_as_float((e - TARGET) << 23)};
}

// ----------------------------------------------------------------------------------------------------------- operands

struct split_left { // a0 .. a3 of mma
    uint32_t high[4], low[4];
};
struct split_right { // b0, b1 of the columns 0 .. 7, then of 8 .. 15
    uint32_t high[4], low[4];
};

static __device__ __forceinline__ void split_pair(float x, float y, uint32_t &high, uint32_t &low) {
    high = mma_half_pair(x, y);
    const float2 back = mma_floats(high);
    low = mma_half_pair(x - back.x, y - back.y);
}

// 8 numbers, already scaled.
static __device__ __forceinline__ void split_put_run(split_tile &tile, int32_t row, int32_t half, const float *x) {
    uint4 high, low;
    split_pair(x[0], x[1], high.x, low.x);
    split_pair(x[2], x[3], high.y, low.y);
    split_pair(x[4], x[5], high.z, low.z);
    split_pair(x[6], x[7], high.w, low.w);
    tile.high[split_run(row, half)] = high;
    tile.low[split_run(row, half)] = low;
}
// Two neighbours, of which the first has an even column.
static __device__ __forceinline__ void split_put_pair(split_tile &tile, int32_t row, int32_t column, float x, float y) {
    const int32_t word = split_run(row, column / 8) * 4 + column % 8 / 2;
    split_pair(x, y, ((uint32_t *)tile.high)[word], ((uint32_t *)tile.low)[word]);
}

static __device__ __forceinline__ void split_load(const split_tile &tile, int32_t run, bool turned, uint32_t (&high)[4],
                                                  uint32_t (&low)[4]) {
    if (turned) {
        mma_load_turned(&tile.high[run], high);
        mma_load_turned(&tile.low[run], low);
    } else {
        mma_load(&tile.high[run], high);
        mma_load(&tile.low[run], low);
    }
}
static __device__ __forceinline__ split_left split_load_left(const split_tile &tile, int32_t lane) {
    split_left a;
    split_load(tile, split_run(lane & 15, lane >> 4), false, a.high, a.low);
    return a;
}
static __device__ __forceinline__ split_right split_load_right(const split_tile &tile, int32_t lane) {
    split_right b;
    split_load(tile, split_run((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1), false, b.high, b.low);
    return b;
}
static __device__ __forceinline__ split_right split_load_turned(const split_tile &tile, int32_t lane) {
    split_right b;
    split_load(tile, split_run(lane & 15, lane >> 4), true, b.high, b.low);
    return b;
}

// ----------------------------------------------------------------------------------------------------------- products

// 16 x 16 of a product as a warp has it: a lane has rows lane / 4 and lane / 4 + 8, columns 2 (lane % 4) and the next,
// of the first and the second 8. Element i of a half is row i / 2, column i % 2.
struct split_block {
    float v[2][4];
};
static __device__ __forceinline__ int32_t split_row(int32_t lane, int i) {
    return lane / 4 + i / 2 * 8;
}
static __device__ __forceinline__ int32_t split_column(int32_t lane, int half, int i) {
    return half * 8 + lane % 4 * 2 + i % 2;
}

// Sums of products so far; the small ones apart from each other too, so that no sum waits for the one before.
struct split_sum {
    split_block large, small, smaller;
};
static __device__ __forceinline__ void split_multiply(split_sum &sum, const split_left &a, const split_right &b) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mma_half(sum.large.v[half], a.high, b.high[2 * half], b.high[2 * half + 1]);
        mma_half(sum.small.v[half], a.low, b.high[2 * half], b.high[2 * half + 1]);
        mma_half(sum.smaller.v[half], a.high, b.low[2 * half], b.low[2 * half + 1]);
    }
}
static __device__ __forceinline__ float split_total(const split_sum &sum, int half, int i) {
    return sum.large.v[half][i] + (sum.small.v[half][i] + sum.smaller.v[half][i]);
}

// ------------------------------------------------------------------------------------------- rows of a warp as operand

// The largest magnitudes of a lane's two rows, over the four lanes that have them.
template <int N>
static __device__ __forceinline__ void split_largest_of_rows(const split_block (&x)[N], float (&largest)[2]) {
    largest[0] = largest[1] = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                largest[i / 2] = fmaxf(largest[i / 2], fabsf(x[n].v[half][i]));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
    }
}

// The powers of a lane's two rows; all four lanes of a row get the same.
struct split_powers {
    split_power row[2];
};
template <int N> static __device__ __forceinline__ split_powers split_powers_of(const split_block (&x)[N]) {
    float largest[2];
    split_largest_of_rows(x, largest);
    return {{split_power_of(largest[0]), split_power_of(largest[1])}};
}
// The largest magnitude that a lane has.
template <int N> static __device__ __forceinline__ float split_largest(const split_block (&x)[N]) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            largest = fmaxf(largest, fabsf(x[n].v[i / 4][i % 4]));
    return largest;
}

// A block whose rows are columns of the product.
static __device__ __forceinline__ split_right split_right_of(const split_block &x, const split_power &power) {
    split_right b;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            split_pair(x.v[half][2 * r] * power.scale, x.v[half][2 * r + 1] * power.scale, b.high[2 * r + half],
                       b.low[2 * r + half]);
    return b;
}

// A block of results as the left operand of the next product.
static __device__ __forceinline__ split_left split_left_of(const split_block &x, const split_powers &powers) {
    split_left a;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            split_pair(x.v[half][2 * r] * powers.row[r].scale, x.v[half][2 * r + 1] * powers.row[r].scale,
                       a.high[2 * half + r], a.low[2 * half + r]);
    return a;
}

template <int N>
static __device__ __forceinline__ void split_strip(const split_block (&x)[N], split_powers &powers,
                                                   split_left (&left)[N]) {
    powers = split_powers_of(x);
#pragma unroll
    for (int n = 0; n < N; n++)
        left[n] = split_left_of(x[n], powers);
}

// Such rows times rows of tiles: 16 x 16 of the product.
template <int N>
static __device__ __forceinline__ split_sum split_multiply_rows(const split_left (&a)[N], const split_tile (&rows)[N],
                                                                int32_t lane) {
    split_sum sum = {};
#pragma unroll
    for (int n = 0; n < N; n++)
        split_multiply(sum, a[n], split_load_right(rows[n], lane));
    return sum;
}

#endif

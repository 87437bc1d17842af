// SPDX-License-Identifier: Apache-2.0
// Products of floats on the tensor cores (mma.m16n8k16) that lose no more than float32 does. A number is a power of two
// times the sum of two float16, 22 bits; a product is three of theirs, of which the large one and the two small ones
// are summed apart, as the tensor cores cut every sum off at 24 bits.
//
// The power of two brings the largest number of a vector near 2^14; what lies 2^28 below it and more is rounded to
// 2^-38 of it. Vectors are the rows of a left operand and of a right one (whose rows are the columns of the product),
// so that powers leave a sum as a factor of its row and one of its column.
//
// LIMBS = 1 leaves the small ones out: 11 bits, one product, half the memory, where the device is `fast` or a tolerance
// allows it.
//
// Operands lie in shared memory as tiles of 16 x 16, high halves before low ones. A run of 8 numbers stands at
// (row, column / 8) by split_run, which is where ldmatrix finds eight rows in eight different banks. A tile is read as
// a left operand (16 rows x 16 k), as a right one (rows are the columns of the product), or turned (rows are k).
#ifndef KERNELS_CUDA_SPLIT_CUH
#define KERNELS_CUDA_SPLIT_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/mma.cuh"

constexpr int SPLIT_TILE = 16;

template <int LIMBS> struct alignas(16) split_tile {
    uint4 limb[LIMBS][32]; // runs of 8
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

template <int LIMBS> struct split_left { // a0 .. a3 of mma
    uint32_t limb[LIMBS][4];
};
template <int LIMBS> struct split_right { // b0, b1 of the columns 0 .. 7, then of 8 .. 15
    uint32_t limb[LIMBS][4];
};

// keep(limb, pair)
template <int LIMBS, typename Keep> static __device__ __forceinline__ void split_pair(float x, float y, Keep keep) {
    const uint32_t high = mma_half_pair(x, y);
    keep(0, high);
    if constexpr (LIMBS == 2) {
        const float2 back = mma_floats(high);
        keep(1, mma_half_pair(x - back.x, y - back.y));
    }
}

// 8 numbers, already scaled.
template <int LIMBS>
static __device__ __forceinline__ void split_put_run(split_tile<LIMBS> &tile, int32_t row, int32_t half,
                                                     const float *x) {
    uint32_t word[LIMBS][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        split_pair<LIMBS>(x[2 * i], x[2 * i + 1], [&](int limb, uint32_t pair) { word[limb][i] = pair; });
#pragma unroll
    for (int limb = 0; limb < LIMBS; limb++)
        tile.limb[limb][split_run(row, half)] = make_uint4(word[limb][0], word[limb][1], word[limb][2], word[limb][3]);
}
// Two neighbours, of which the first has an even column.
template <int LIMBS>
static __device__ __forceinline__ void split_put_pair(split_tile<LIMBS> &tile, int32_t row, int32_t column, float x,
                                                      float y) {
    const int32_t word = split_run(row, column / 8) * 4 + column % 8 / 2;
    split_pair<LIMBS>(x, y, [&](int limb, uint32_t pair) { ((uint32_t *)tile.limb[limb])[word] = pair; });
}

template <int LIMBS>
static __device__ __forceinline__ void split_load(const split_tile<LIMBS> &tile, int32_t run, bool turned,
                                                  uint32_t (&x)[LIMBS][4]) {
#pragma unroll
    for (int limb = 0; limb < LIMBS; limb++)
        if (turned)
            mma_load_turned(&tile.limb[limb][run], x[limb]);
        else
            mma_load(&tile.limb[limb][run], x[limb]);
}
template <int LIMBS>
static __device__ __forceinline__ split_left<LIMBS> split_load_left(const split_tile<LIMBS> &tile, int32_t lane) {
    split_left<LIMBS> a;
    split_load(tile, split_run(lane & 15, lane >> 4), false, a.limb);
    return a;
}
template <int LIMBS>
static __device__ __forceinline__ split_right<LIMBS> split_load_right(const split_tile<LIMBS> &tile, int32_t lane) {
    split_right<LIMBS> b;
    split_load(tile, split_run((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1), false, b.limb);
    return b;
}
template <int LIMBS>
static __device__ __forceinline__ split_right<LIMBS> split_load_turned(const split_tile<LIMBS> &tile, int32_t lane) {
    split_right<LIMBS> b;
    split_load(tile, split_run(lane & 15, lane >> 4), true, b.limb);
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

// Sums of products so far: the large ones, then the small ones, each apart, so that no sum waits for the one before.
template <int LIMBS> struct split_sum { split_block part[2 * LIMBS - 1]; };
template <int LIMBS>
static __device__ __forceinline__ void split_multiply(split_sum<LIMBS> &sum, const split_left<LIMBS> &a,
                                                      const split_right<LIMBS> &b) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int part = 0; part < 2 * LIMBS - 1; part++)
            mma_half(sum.part[part].v[half], a.limb[part == 1], b.limb[part == 2][2 * half],
                     b.limb[part == 2][2 * half + 1]);
}
template <int LIMBS> static __device__ __forceinline__ float split_total(const split_sum<LIMBS> &sum, int half, int i) {
    if constexpr (LIMBS == 1)
        return sum.part[0].v[half][i];
    else
        return sum.part[0].v[half][i] + (sum.part[1].v[half][i] + sum.part[2].v[half][i]);
}
template <int LIMBS> static __device__ __forceinline__ split_block split_totals(const split_sum<LIMBS> &sum) {
    split_block x;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x.v[i / 4][i % 4] = split_total(sum, i / 4, i % 4);
    return x;
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
template <int LIMBS>
static __device__ __forceinline__ split_right<LIMBS> split_right_of(const split_block &x, const split_power &power) {
    split_right<LIMBS> b;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            split_pair<LIMBS>(x.v[half][2 * r] * power.scale, x.v[half][2 * r + 1] * power.scale,
                              [&](int limb, uint32_t pair) { b.limb[limb][2 * r + half] = pair; });
    return b;
}

// A block of results as the left operand of the next product.
template <int LIMBS>
static __device__ __forceinline__ split_left<LIMBS> split_left_of(const split_block &x, const split_powers &powers) {
    split_left<LIMBS> a;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            split_pair<LIMBS>(x.v[half][2 * r] * powers.row[r].scale, x.v[half][2 * r + 1] * powers.row[r].scale,
                              [&](int limb, uint32_t pair) { a.limb[limb][2 * half + r] = pair; });
    return a;
}

template <int LIMBS, int N>
static __device__ __forceinline__ void split_strip(const split_block (&x)[N], split_powers &powers,
                                                   split_left<LIMBS> (&left)[N]) {
    powers = split_powers_of(x);
#pragma unroll
    for (int n = 0; n < N; n++)
        left[n] = split_left_of<LIMBS>(x[n], powers);
}

// Such rows times rows of tiles: 16 x 16 of the product.
template <int LIMBS, int N>
static __device__ __forceinline__ split_sum<LIMBS>
split_multiply_rows(const split_left<LIMBS> (&a)[N], const split_tile<LIMBS> (&rows)[N], int32_t lane) {
    split_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < N; n++)
        split_multiply(sum, a[n], split_load_right(rows[n], lane));
    return sum;
}

#endif

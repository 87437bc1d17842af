// SPDX-License-Identifier: Apache-2.0
// Tiles of attention on tensor cores, as training has them: rows of one head of neighbouring tokens of the batch.
//
// A warp owns 16 rows of a tile. Operands are rounded to bf16 in shared memory as they come, to one number where the
// device is `fast`, else to three (gemm.cu). Outputs of more than 128 columns are shared by two blocks.
#ifndef KERNELS_CUDA_ATTENTION_TILE_CUH
#define KERNELS_CUDA_ATTENTION_TILE_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/mma.cuh"

enum { CUDA_TILE_COLUMNS = 128 }; // of an output that a block owns

// WIDTH: of a head, rounded up.
template <int LIMBS, int WIDTH> struct cuda_tile {
    static constexpr int ROWS = LIMBS == 3 && WIDTH == 256 ? 32 : 64, THREADS = ROWS * 2;
    static constexpr int STRIDE = WIDTH + 8;     // bf16 numbers of a row: no bank conflicts
    static constexpr int LIMB = ROWS * STRIDE;   // numbers
    static constexpr int OPERAND = LIMBS * LIMB; // numbers
    static constexpr int COLUMNS = WIDTH < CUDA_TILE_COLUMNS ? WIDTH : (int)CUDA_TILE_COLUMNS;
    // Of `operands` and three numbers a row.
    static constexpr size_t bytes(int operands) { return operands * (size_t)OPERAND * 2 + 3 * ROWS * sizeof(float); }
};

// Two floats as a pair of bf16; they keep what that leaves.
static __device__ __forceinline__ uint32_t cuda_take_limb(float &x, float &y) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
    x -= __low2float(rounded);
    y -= __high2float(rounded);
    return *(const uint32_t *)&rounded;
}

// A tile of rows of one head, tokens [token0, ..), as bf16; with other, row_sum[row] = sum x other, by a warp a row.
template <int LIMBS, int WIDTH>
static __device__ __forceinline__ void cuda_load_tile(int32_t width, bool wide, const float *x, const float *other,
                                                      int32_t heads, int32_t head, int32_t token0, int32_t tokens,
                                                      uint16_t *to, float *row_sum) {
    typedef cuda_tile<LIMBS, WIDTH> layout;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int row = warp; row < layout::ROWS; row += layout::THREADS / 32) {
        const int32_t t = token0 + row;
        const int64_t at = ((int64_t)t * heads + head) * width;
        float sum = 0;
        for (int c = lane * 4; c < WIDTH; c += 128) {
            cuda_quad q = {}, p = {};
            if (t < tokens && c < width) {
                q = cuda_load(x + at + c, width - c, wide);
                if (other)
                    p = cuda_load(other + at + c, width - c, wide);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum = fmaf(q.v[j], p.v[j], sum);
#pragma unroll
            for (int limb = 0; limb < LIMBS; limb++) {
                const uint32_t low = cuda_take_limb(q.v[0], q.v[1]), high = cuda_take_limb(q.v[2], q.v[3]);
                *(uint2 *)(to + limb * layout::LIMB + row * layout::STRIDE + c) = make_uint2(low, high);
            }
        }
        if (other) {
            sum = cuda_warp_sum(sum);
            if (lane == 0)
                row_sum[row] = sum;
        }
    }
}

// Pairs of limbs whose products have weight, the least first.
template <int LIMBS, typename Visit> static __device__ __forceinline__ void cuda_each_pair(const Visit &visit) {
    if (LIMBS == 1) {
        visit(0, 0);
        return;
    }
    constexpr int LEFT[6] = {2, 0, 1, 1, 0, 0}, RIGHT[6] = {0, 2, 1, 0, 1, 0};
#pragma unroll
    for (int i = 0; i < 6; i++)
        visit(LEFT[i], RIGHT[i]);
}

// sum (16 own rows, other rows) = x y^T over the width.
template <int LIMBS, int WIDTH>
static __device__ __forceinline__ void cuda_score(const uint16_t *x, const uint16_t *y,
                                                  float (&sum)[cuda_tile<LIMBS, WIDTH>::ROWS / 8][4]) {
    typedef cuda_tile<LIMBS, WIDTH> layout;
    const int lane = threadIdx.x % 32, matrix = lane / 8, warp = threadIdx.x / 32;
    const uint16_t *own = x + (warp * 16 + matrix % 2 * 8 + lane % 8) * layout::STRIDE + matrix / 2 * 8;
    const uint16_t *other = y + (matrix / 2 * 8 + lane % 8) * layout::STRIDE + matrix % 2 * 8;
#pragma unroll
    for (int i = 0; i < layout::ROWS / 8; i++)
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
    cuda_each_pair<LIMBS>([&](int a, int b) {
#pragma unroll 2
        for (int k = 0; k < WIDTH; k += 16) {
            uint32_t left[4];
            mma_load(own + a * layout::LIMB + k, left);
#pragma unroll
            for (int j = 0; j < layout::ROWS / 16; j++) {
                uint32_t right[4];
                mma_load(other + b * layout::LIMB + j * 16 * layout::STRIDE + k, right);
                mma_bf16(sum[2 * j], left, right[0], right[1]);
                mma_bf16(sum[2 * j + 1], left, right[2], right[3]);
            }
        }
    });
}

// total (16 own rows, columns) += p y, p (16 own rows, other rows) in registers; column0: of y.
template <int LIMBS, int WIDTH>
static __device__ __forceinline__ void cuda_gather(const float (&p)[cuda_tile<LIMBS, WIDTH>::ROWS / 8][4],
                                                   const uint16_t *y, int column0,
                                                   float (&total)[cuda_tile<LIMBS, WIDTH>::COLUMNS / 8][4]) {
    typedef cuda_tile<LIMBS, WIDTH> layout;
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const uint16_t *other = y + (matrix % 2 * 8 + lane % 8) * layout::STRIDE + matrix / 2 * 8 + column0;
#pragma unroll
    for (int k = 0; k < layout::ROWS / 16; k++) {
        uint32_t left[LIMBS][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = p[2 * k + i / 2][i % 2 * 2], high = p[2 * k + i / 2][i % 2 * 2 + 1];
#pragma unroll
            for (int limb = 0; limb < LIMBS; limb++)
                left[limb][i] = cuda_take_limb(low, high);
        }
        cuda_each_pair<LIMBS>([&](int a, int b) {
#pragma unroll
            for (int c = 0; c < layout::COLUMNS / 16; c++) {
                uint32_t right[4];
                mma_load_turned(other + b * layout::LIMB + k * 16 * layout::STRIDE + c * 16, right);
                mma_bf16(total[2 * c], left[a], right[0], right[1]);
                mma_bf16(total[2 * c + 1], left[a], right[2], right[3]);
            }
        });
    }
}

template <int LIMBS, int WIDTH>
static __device__ __forceinline__ void cuda_write_tile(int32_t width, float *to, int32_t heads, int32_t head,
                                                       int32_t token0, int32_t tokens, int column0,
                                                       const float (&total)[cuda_tile<LIMBS, WIDTH>::COLUMNS / 8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < cuda_tile<LIMBS, WIDTH>::COLUMNS / 8; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int32_t t = token0 + warp * 16 + e / 2 * 8 + lane / 4;
            const int32_t column = column0 + c * 8 + lane % 4 * 2 + e % 2;
            if (t < tokens && column < width)
                to[((int64_t)t * heads + head) * width + column] = total[c][e];
        }
}

// attention of a batch whose rows have no earlier positions and whose bits may depend on it (attention_merged.cu).
bool cuda_attention_merges(const cuda_step *step, const kern_attention_args *a);
kern_status cuda_attention_merged(const cuda_step *step, const kern_attention_args *a);

#endif

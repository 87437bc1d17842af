// SPDX-License-Identifier: Apache-2.0
// What the kernels of gemm.cu and gemm_wide.cu share: a product of packed operands, in parts of k where they are many,
// and how its sums are written: with bias, with residual, added to what is there.
#ifndef KERNELS_CUDA_GEMM_TILE_CUH
#define KERNELS_CUDA_GEMM_TILE_CUH

#include "kernels/cuda/gemm.cuh"

enum {
    CUDA_GEMM_TILE = 128,                                  // rows of a packed block
    CUDA_GEMM_DEPTH = 32,                                  // its k
    CUDA_GEMM_PIECE = 2,                                   // k is padded to so many blocks
    CUDA_GEMM_CORE = 128,                                  // bytes of a core matrix
    CUDA_GEMM_CORES = CUDA_GEMM_TILE / 8,                  // of a block, of one group of 8 k
    CUDA_GEMM_LIMB = CUDA_GEMM_TILE * CUDA_GEMM_DEPTH * 2, // bytes of a block's limb
};

struct cuda_gemm_job {
    const char *a, *b;
    float *c, *partial; // partial: (splits, m, n), NULL: not split
    int64_t ldc;
    int32_t m, n, k_blocks;
    const float *bias, *residual;
    bool accumulate, even; // even: c and residual take two neighbours at once
};

// One sum, or two neighbours, of c.
static __device__ __forceinline__ void cuda_gemm_write(const cuda_gemm_job &job, int32_t row, int32_t column,
                                                       float value) {
    if (row >= job.m || column >= job.n)
        return;
    const int64_t at = row * job.ldc + column;
    if (job.bias)
        value = __fadd_rn(value, job.bias[column]);
    if (job.residual)
        value = __fadd_rn(value, job.residual[at]);
    job.c[at] = job.accumulate ? __fadd_rn(job.c[at], value) : value;
}

static __device__ __forceinline__ void cuda_gemm_write_pair(const cuda_gemm_job &job, int32_t row, int32_t column,
                                                            float x, float y) {
    if (!job.even || row >= job.m || column + 1 >= job.n) {
        cuda_gemm_write(job, row, column, x);
        cuda_gemm_write(job, row, column + 1, y);
        return;
    }
    const int64_t at = row * job.ldc + column;
    float2 value = make_float2(x, y);
    if (job.bias)
        value = make_float2(__fadd_rn(value.x, job.bias[column]), __fadd_rn(value.y, job.bias[column + 1]));
    if (job.residual) {
        const float2 r = *(const float2 *)(job.residual + at);
        value = make_float2(__fadd_rn(value.x, r.x), __fadd_rn(value.y, r.y));
    }
    if (job.accumulate) {
        const float2 old = *(const float2 *)(job.c + at);
        value = make_float2(__fadd_rn(old.x, value.x), __fadd_rn(old.y, value.y));
    }
    *(float2 *)(job.c + at) = value;
}

// Where parts of k are summed apart: the job of part `part`.
static __device__ __forceinline__ cuda_gemm_job cuda_gemm_part(const cuda_gemm_job &job, int part) {
    cuda_gemm_job out = job;
    if (job.partial) {
        out.c = job.partial + (int64_t)part * job.m * job.n;
        out.ldc = job.n;
        out.even = job.n % 2 == 0;
        out.bias = out.residual = NULL;
        out.accumulate = false;
    }
    return out;
}

// The product of operands of one limb by Hopper's warpgroups (gemm_wide.cu), in `parts` of k.
kern_status cuda_gemm_wide(const cuda_step *step, const cuda_gemm_job &job, bool a_turned, bool b_turned, int parts);

#endif

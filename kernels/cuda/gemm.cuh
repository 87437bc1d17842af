// SPDX-License-Identifier: Apache-2.0
// c (m x n) = a b^T by tensor cores, where sums are long and many vectors are there at once: training (gemm.cu).
// Operands lie in memory as floats and are rounded on their way, to one bf16 number where the device is `fast`, whose
// products are then cuBLASLt's (cublas.cu), else to three, whose six products of weight leave the accuracy of float32.
#ifndef KERNELS_CUDA_GEMM_CUH
#define KERNELS_CUDA_GEMM_CUH

#include "kernels/cuda/cuda.cuh"

// Element (i, k) of an operand: p[i ld + k], turned: p[k ld + i]. bf16: p is a weight in tiles (cuda_bf16_index) and ld
// its columns.
struct cuda_operand {
    const void *p;
    int64_t ld;
    bool turned, bf16;
};

struct cuda_gemm {
    cuda_operand a, b; // (m, k), (n, k)
    float *c;          // rows of ldc
    int64_t ldc, m, n, k;
    const float *bias, *residual; // optional (n) and like c, which residual may be
    bool accumulate;              // c += instead of =, without a residual
};

// Of the workspace, for any shape.
size_t cuda_gemm_bytes(const kern_cuda *cuda);
// Products of one a, of the same m and k. workspace: cuda_gemm_bytes. Any sizes from 1 on.
kern_status cuda_gemm_launch(const cuda_step *step, char *workspace, const cuda_gemm *gemm, int count);

// sum[c] += of x (rows, width) over rows, in a fixed order. workspace: cuda_column_sum_bytes.
size_t cuda_column_sum_bytes(int64_t width);
kern_status cuda_column_sum(const cuda_step *step, float *workspace, const float *x, int64_t rows, int32_t width,
                            float *sum);

#endif

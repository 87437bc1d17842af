// SPDX-License-Identifier: Apache-2.0
// The instructions that split.cuh is made of: pairs of float16, 8 x 8 matrices from shared memory, products of float16
// or bfloat16 with sums in float32.
#ifndef KERNELS_CUDA_MMA_CUH
#define KERNELS_CUDA_MMA_CUH

#include <cuda_fp16.h>

#include "kernels/cuda/cuda.cuh"

// The first in the low half, rounded to nearest.
static __device__ __forceinline__ uint32_t mma_half_pair(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *(const uint32_t *)&pair;
}
static __device__ __forceinline__ float2 mma_floats(uint32_t pair) {
    return __half22float2(*(const __half2 *)&pair);
}

// Four 8 x 8 matrices of float16; lane l points to row l % 8 of matrix l / 8. It gets of each the row lane / 4, columns
// 2 (lane % 4) and the next; turned: of their transposes.
static __device__ __forceinline__ void mma_load(const void *row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
static __device__ __forceinline__ void mma_load_turned(const void *row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// sum (16 x 8) += a (16 x 16) b (16 x 8).
static __device__ __forceinline__ void mma_half(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of bfloat16.
static __device__ __forceinline__ void mma_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

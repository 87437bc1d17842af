// SPDX-License-Identifier: Apache-2.0
// What the kernels of gemm*.cu share: how operands are read and how sums are written, in parts of k where they are
// many, with bias, with residual, added to what is there.
#ifndef KERNELS_CUDA_GEMM_TILE_CUH
#define KERNELS_CUDA_GEMM_TILE_CUH

#include "kernels/cuda/gemm.cuh"

enum { CUDA_GEMM_PARTIALS = 8 << 20 }; // floats that a workspace has for sums in parts

// Whether four neighbours of a row, the first a multiple of four, are one access.
static inline bool cuda_operand_is_wide(const cuda_operand &o) {
    return !o.bf16 && o.ld % 4 == 0 && (uintptr_t)o.p % 16 == 0;
}

// Eight elements of a row of memory, of which `left` exist; the others are 0.
static __device__ __forceinline__ void cuda_operand_eight(const cuda_operand &o, int64_t row, int64_t column,
                                                          int32_t left, bool wide, float (&x)[8]) {
    if (wide && left >= 8) {
        const float4 *from = (const float4 *)((const float *)o.p + row * o.ld + column);
        const float4 low = from[0], high = from[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x[j] = 0;
        if (j < left)
            x[j] = o.bf16
                       ? __bfloat162float(((const __nv_bfloat16 *)
                                               o.p)[cuda_bf16_index((int32_t)o.ld, (int32_t)row, (int32_t)column + j)])
                       : ((const float *)o.p)[row * o.ld + column + j];
    }
}

static __device__ __forceinline__ uint4 cuda_round_eight(const float (&x)[8]) {
    uint32_t pair[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const __nv_bfloat162 rounded = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]);
        pair[j] = *(const uint32_t *)&rounded;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

// Where sums go and what is added to them.
struct cuda_gemm_output {
    float *c, *partial; // partial: (parts, m, n), NULL: not in parts
    int64_t ldc;
    int32_t m, n;
    const float *bias, *residual;
    bool accumulate, even, quads; // even, quads: c, residual and bias take two, four neighbours at once
};

// Of k as it is given, for a c that begins at (m0, n0); first: of the products that are added up there.
static inline cuda_gemm_output cuda_gemm_output_of(const cuda_gemm &g, int64_t m0, int64_t m, int64_t n0, int64_t n,
                                                   bool first) {
    const int64_t at = m0 * g.ldc + n0;
    cuda_gemm_output out = {g.c + at, NULL, g.ldc, (int32_t)m, (int32_t)n, NULL, NULL, g.accumulate || !first,
                            false,    false};
    if (first) {
        out.bias = g.bias ? g.bias + n0 : NULL;
        out.residual = g.residual ? g.residual + at : NULL;
    }
    const uintptr_t places = (uintptr_t)out.c | (uintptr_t)out.residual | (uintptr_t)out.bias;
    out.even = g.ldc % 2 == 0 && places % 8 == 0;
    out.quads = g.ldc % 4 == 0 && places % 16 == 0;
    return out;
}

// One sum, or two or four neighbours, of c.
static __device__ __forceinline__ void cuda_gemm_write(const cuda_gemm_output &out, int32_t row, int32_t column,
                                                       float value) {
    if (row >= out.m || column >= out.n)
        return;
    const int64_t at = row * out.ldc + column;
    if (out.bias)
        value = __fadd_rn(value, out.bias[column]);
    if (out.residual)
        value = __fadd_rn(value, out.residual[at]);
    out.c[at] = out.accumulate ? __fadd_rn(out.c[at], value) : value;
}

static __device__ __forceinline__ void cuda_gemm_write_pair(const cuda_gemm_output &out, int32_t row, int32_t column,
                                                            float x, float y) {
    if (!out.even || row >= out.m || column + 1 >= out.n) {
        cuda_gemm_write(out, row, column, x);
        cuda_gemm_write(out, row, column + 1, y);
        return;
    }
    const int64_t at = row * out.ldc + column;
    float2 value = make_float2(x, y);
    if (out.bias)
        value = make_float2(__fadd_rn(value.x, out.bias[column]), __fadd_rn(value.y, out.bias[column + 1]));
    if (out.residual) {
        const float2 r = *(const float2 *)(out.residual + at);
        value = make_float2(__fadd_rn(value.x, r.x), __fadd_rn(value.y, r.y));
    }
    if (out.accumulate) {
        const float2 old = *(const float2 *)(out.c + at);
        value = make_float2(__fadd_rn(old.x, value.x), __fadd_rn(old.y, value.y));
    }
    *(float2 *)(out.c + at) = value;
}

static __device__ __forceinline__ float4 cuda_gemm_add(const float4 &a, const float4 &b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

static __device__ __forceinline__ void cuda_gemm_write_quad(const cuda_gemm_output &out, int32_t row, int32_t column,
                                                            float4 value) {
    if (!out.quads || row >= out.m || column + 3 >= out.n) {
        cuda_gemm_write_pair(out, row, column, value.x, value.y);
        cuda_gemm_write_pair(out, row, column + 2, value.z, value.w);
        return;
    }
    const int64_t at = row * out.ldc + column;
    if (out.bias)
        value = cuda_gemm_add(value, *(const float4 *)(out.bias + column));
    if (out.residual)
        value = cuda_gemm_add(value, *(const float4 *)(out.residual + at));
    if (out.accumulate)
        value = cuda_gemm_add(*(const float4 *)(out.c + at), value);
    *(float4 *)(out.c + at) = value;
}

// Where parts of k are summed apart: what part `part` writes.
static __device__ __forceinline__ cuda_gemm_output cuda_gemm_part(const cuda_gemm_output &whole, int part) {
    cuda_gemm_output out = whole;
    if (whole.partial) {
        out.c = whole.partial + (int64_t)part * whole.m * whole.n;
        out.ldc = whole.n;
        out.even = whole.n % 2 == 0;
        out.quads = whole.n % 4 == 0;
        out.bias = out.residual = NULL;
        out.accumulate = false;
    }
    return out;
}

// Products of few outputs, or of few numbers each (gemm_few.cu), *taken: whether it is one that is worth it. The
// workspace begins with the room for parts.
kern_status cuda_gemm_few(const cuda_step *step, char *workspace, const cuda_gemm &gemm, bool *taken);

#endif

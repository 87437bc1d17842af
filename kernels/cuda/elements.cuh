// SPDX-License-Identifier: Apache-2.0
// What the layer operations share: activations, four floats at a time, sums over a warp, threads laid over (T, width).
//
// Sums and products that are written apart here (__fadd_rn, __fmul_rn) are never contracted, so that a function has the
// same bits in every kernel that calls it. Maxima take their second operand where the first is not larger: NaN stays.
#ifndef KERNELS_CUDA_ELEMENTS_CUH
#define KERNELS_CUDA_ELEMENTS_CUH

#include "kernels/cuda/cuda.cuh"

// ------------------------------------------------------------------------------------------------------- activations

static __device__ __forceinline__ float cuda_max(float a, float b) {
    return a > b ? a : b;
}
static __device__ __forceinline__ float cuda_min(float a, float b) {
    return a < b ? a : b;
}
static __device__ __forceinline__ float cuda_sigmoid(float z) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-z)));
}
static __device__ __forceinline__ float cuda_softplus(float z) {
    return __fadd_rn(cuda_max(0.0f, z), log1pf(expf(-fabsf(z))));
}
static __device__ __forceinline__ float cuda_log_sigmoid(float z) {
    return __fsub_rn(cuda_min(0.0f, z), log1pf(expf(-fabsf(z))));
}
// cap tanh(z / cap); 0: no cap.
static __device__ __forceinline__ float cuda_soft_cap(float z, float cap) {
    return cap > 0 ? __fmul_rn(cap, tanhf(__fdiv_rn(z, cap))) : z;
}

static __device__ __forceinline__ float cuda_activate(int32_t kind, float z) {
    switch (kind) {
    case KERN_SILU:
        return __fmul_rn(z, cuda_sigmoid(z));
    case KERN_SIGMOID:
        return cuda_sigmoid(z);
    case KERN_RELU:
        return cuda_max(0.0f, z);
    case KERN_ELU1:
        return z > 0 ? __fadd_rn(z, 1.0f) : expf(z);
    case KERN_GELU_TANH: {
        const float cube = __fmul_rn(__fmul_rn(z, z), z);
        return __fmul_rn(z, cuda_sigmoid(__fmul_rn(1.5957691216f, fmaf(0.044715f, cube, z))));
    }
    default:
        return z;
    }
}

// Of SiLU, or else of the logistic function: the derivative and *value, with one exponential and one division.
static __device__ __forceinline__ float cuda_logistic_slope(bool silu, float z, float *value) {
    const float e = expf(-fabsf(z)), far = __fdiv_rn(1.0f, 1.0f + e), near = e * far; // s(|z|), s(-|z|)
    const float s = z >= 0 ? far : near, rest = z >= 0 ? near : far;
    *value = silu ? z * s : s;
    return silu ? s * fmaf(z, rest, 1.0f) : s * rest;
}

// The derivative; *value = act(z).
static __device__ __forceinline__ float cuda_activation_slope(int32_t kind, float z, float *value) {
    if (kind == KERN_SILU || kind == KERN_SIGMOID)
        return cuda_logistic_slope(kind == KERN_SILU, z, value);
    *value = cuda_activate(kind, z);
    switch (kind) {
    case KERN_RELU:
        return z > 0 ? 1.0f : 0.0f;
    case KERN_ELU1:
        return z > 0 ? 1.0f : *value;
    case KERN_GELU_TANH: {
        const float square = z * z, twice = 1.5957691216f * z * fmaf(0.044715f, square, 1.0f);
        const float s = cuda_sigmoid(twice);
        return s * fmaf(z * cuda_sigmoid(-twice), 1.5957691216f * fmaf(3 * 0.044715f, square, 1.0f), 1.0f);
    }
    default:
        return 1.0f;
    }
}

// ------------------------------------------------------------------------------------------------ four floats a time

static inline bool cuda_is_wide(const void *p) {
    return (uintptr_t)p % 16 == 0;
}

struct cuda_quad {
    float v[4];
};

// Of its own, as it is long and many kernels have several places for it.
static __device__ __noinline__ cuda_quad cuda_activate_quad(int32_t kind, cuda_quad z) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        z.v[i] = cuda_activate(kind, z.v[i]);
    return z;
}

// The four floats at p, of which `left` exist; the others are 0. wide: p may be read in one access.
static __device__ __forceinline__ cuda_quad cuda_load(const float *p, int64_t left, bool wide) {
    cuda_quad q;
    if (wide && left >= 4) {
        const float4 all = *(const float4 *)p;
        q.v[0] = all.x, q.v[1] = all.y, q.v[2] = all.z, q.v[3] = all.w;
        return q;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        q.v[i] = i < left ? p[i] : 0.0f;
    return q;
}

static __device__ __forceinline__ void cuda_store(float *p, const cuda_quad &q, int64_t left, bool wide) {
    if (wide && left >= 4) {
        *(float4 *)p = make_float4(q.v[0], q.v[1], q.v[2], q.v[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < left)
            p[i] = q.v[i];
}

// Four floats as bf16.
static __device__ __forceinline__ uint2 cuda_round_quad(const cuda_quad &q) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(q.v[0], q.v[1]), high = __floats2bfloat162_rn(q.v[2], q.v[3]);
    return make_uint2(*(const uint32_t *)&low, *(const uint32_t *)&high);
}

// ------------------------------------------------------------------------------------------------------------- warps

enum { CUDA_WARP = 32 };

// By halving; every lane has the result.
static __device__ __forceinline__ float cuda_warp_sum(float x) {
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
static __device__ __forceinline__ float cuda_warp_max(float x) {
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
static __device__ __forceinline__ int32_t cuda_warp_most(int32_t x) {
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
        x = max(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}

// ------------------------------------------------------------------------------------------------------------- grids

// Threads over (count, width), one an element, without a division: x runs over the columns, which a block holds a power
// of two of, y over what is counted. Blocks lie the other way round, because there may be many of the latter.
struct cuda_plane {
    dim3 grid, block;
};

static inline cuda_plane cuda_plane_of(int64_t count, int32_t width) {
    enum { THREADS = 256 };
    unsigned columns = CUDA_WARP;
    while (columns < THREADS && (int64_t)columns < width)
        columns *= 2;
    while (columns > 1 && (int64_t)columns / 2 >= width)
        columns /= 2;
    const unsigned rows = THREADS / columns;
    return {dim3((unsigned)cuda_blocks(count, (int)rows), (unsigned)cuda_blocks(width, (int)columns)),
            dim3(columns, rows)};
}
static __device__ __forceinline__ int32_t cuda_plane_item(void) {
    return (int32_t)(blockIdx.x * blockDim.y + threadIdx.y);
}
static __device__ __forceinline__ int32_t cuda_plane_column(void) {
    return (int32_t)(blockIdx.y * blockDim.x + threadIdx.x);
}

#endif

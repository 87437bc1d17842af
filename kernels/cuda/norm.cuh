// SPDX-License-Identifier: Apache-2.0
// The norm of one vector by LANES threads of a block, as norm.cu launches it and products.cu runs it before a product.
//
//     y = (u - m) r w [act(z)],   r = 1 / sqrt(sum (u - m)^2 / divisor + eps);   divisor = width, for L2 1
// How many lanes a vector has follows from its width alone: a warp up to 256, a block above. A lane takes every
// LANES-th quad of floats and keeps the first CACHE of them in registers, with their factors, between the sums and the
// product; a wider vector is read again. Sums: a lane's elements in order, lanes by halving, warps in order. Each
// element is given out by the thread that read it, after the sums, so y may be x.
#ifndef KERNELS_CUDA_NORM_CUH
#define KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/elements.cuh"

enum { CUDA_QUAD = 4, CUDA_NORM_NARROW = 256, CUDA_NORM_MIDDLE = 1024 }; // widths up to which 32 and 128 lanes do

struct cuda_norm {
    const float *x, *weight, *gate;
    float *y;
    int32_t groups, width;
    float divisor, eps, offset;
    int32_t activation;
    bool gate_first, center, group_weights, wide;
};

// The sum over a vector's lanes; every lane has it. shared: a float a warp; barriers keep two sums apart.
template <int LANES> static __device__ __forceinline__ float cuda_lanes_sum(float x, int32_t lane, float *shared) {
    x = cuda_warp_sum(x);
    if (LANES == CUDA_WARP)
        return x;
    __syncthreads();
    if (lane % CUDA_WARP == 0)
        shared[lane / CUDA_WARP] = x;
    __syncthreads();
    float sum = shared[0];
#pragma unroll
    for (int warp = 1; warp < LANES / CUDA_WARP; warp++)
        sum = __fadd_rn(sum, shared[warp]);
    return sum;
}

// u of the quad at element i of the vector at x: what is normalised.
static __device__ __forceinline__ cuda_quad cuda_norm_input(const cuda_norm &n, int64_t at, int32_t i) {
    const int32_t left = n.width - i;
    cuda_quad u = cuda_load(n.x + at + i, left, n.wide);
    if (n.gate_first) {
        const cuda_quad z = cuda_load(n.gate + at + i, left, n.wide);
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            u.v[j] = __fmul_rn(u.v[j], cuda_activate(n.activation, z.v[j]));
    }
    return u;
}

static __device__ __forceinline__ float cuda_quad_sum(float sum, const cuda_quad &u) {
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++)
        sum = __fadd_rn(sum, u.v[j]);
    return sum;
}

// sum += (u - mean)^2 of the elements that exist.
static __device__ __forceinline__ float cuda_quad_squares(float sum, const cuda_quad &u, float mean, int32_t left) {
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++) {
        const float d = j < left ? __fsub_rn(u.v[j], mean) : 0.0f;
        sum = fmaf(d, d, sum);
    }
    return sum;
}

// What the normalised quad is multiplied by: weight and the gate behind it.
static __device__ __forceinline__ cuda_quad cuda_norm_factor(const cuda_norm &n, const float *weight, int64_t at,
                                                             int32_t i) {
    const int32_t left = n.width - i;
    cuda_quad factor = {{1, 1, 1, 1}};
    if (weight) {
        factor = cuda_load(weight + i, left, n.wide);
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            factor.v[j] = __fadd_rn(factor.v[j], n.offset);
    }
    if (n.gate && !n.gate_first) {
        const cuda_quad z = cuda_load(n.gate + at + i, left, n.wide);
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            factor.v[j] = __fmul_rn(factor.v[j], cuda_activate(n.activation, z.v[j]));
    }
    return factor;
}

static __device__ __forceinline__ cuda_quad cuda_norm_output(cuda_quad u, const cuda_quad &factor, float mean,
                                                             float rstd) {
#pragma unroll
    for (int j = 0; j < CUDA_QUAD; j++)
        u.v[j] = __fmul_rn(__fmul_rn(__fsub_rn(u.v[j], mean), rstd), factor.v[j]);
    return u;
}

// The vector's quads go to output(i, quad), i its first element. LANES threads in a row, `lane` counts them; shared: a
// float a warp of theirs. Above a warp there are barriers of the whole block, as many in every thread.
template <int LANES, int CACHE, typename Output>
static __device__ __forceinline__ void cuda_normalise(const cuda_norm &n, int64_t vector, int32_t lane, float *shared,
                                                      const Output &output) {
    const int32_t first = lane * CUDA_QUAD, stride = LANES * CUDA_QUAD, width = n.width;
    const int64_t at = vector * width;
    const float *weight = n.weight && n.group_weights ? n.weight + vector % n.groups * width : n.weight;
    cuda_quad kept[CACHE], factor[CACHE];
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width) {
            kept[k] = cuda_norm_input(n, at, first + k * stride);
            factor[k] = cuda_norm_factor(n, weight, at, first + k * stride);
        }
    float mean = 0;
    if (n.center) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < CACHE; k++)
            if (first + k * stride < width)
                sum = cuda_quad_sum(sum, kept[k]);
        for (int32_t i = first + CACHE * stride; i < width; i += stride)
            sum = cuda_quad_sum(sum, cuda_norm_input(n, at, i));
        mean = __fdiv_rn(cuda_lanes_sum<LANES>(sum, lane, shared), (float)width);
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width)
            squares = cuda_quad_squares(squares, kept[k], mean, width - (first + k * stride));
    for (int32_t i = first + CACHE * stride; i < width; i += stride)
        squares = cuda_quad_squares(squares, cuda_norm_input(n, at, i), mean, width - i);
    squares = cuda_lanes_sum<LANES>(squares, lane, shared);
    const float rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps));
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width)
            output(first + k * stride, cuda_norm_output(kept[k], factor[k], mean, rstd));
    for (int32_t i = first + CACHE * stride; i < width; i += stride)
        output(i, cuda_norm_output(cuda_norm_input(n, at, i), cuda_norm_factor(n, weight, at, i), mean, rstd));
}

// What an operation asks for.
cuda_norm cuda_norm_of(const kern_rmsnorm_args *a);
cuda_norm cuda_l2norm_of(const kern_l2norm_args *a);

#endif

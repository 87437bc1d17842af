// SPDX-License-Identifier: Apache-2.0
// The norm of one vector by a team of threads, as norm.cu launches it and few.cuh runs it before a product.
//
//     y = (u - m) r w [act(z)],   r = 1 / sqrt(sum (u - m)^2 / divisor + eps);   divisor = width, for L2 1
// How many lanes a vector has follows from its width alone (cuda_norm_lanes). A lane takes every lanes-th quad of
// floats and keeps the first CACHE of them in registers, with their factors, between the sums and the product; a wider
// vector is read again. Sums: a lane's elements in order, lanes by halving, warps in order. Each element is given out
// by the thread that read it, after the sums, so y may be x.
#ifndef KERNELS_CUDA_NORM_CUH
#define KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/team.cuh"

enum { CUDA_QUAD = 4, CUDA_NORM_NARROW = 256, CUDA_NORM_MIDDLE = 1024 }; // widths up to which 32 and 128 lanes do

struct cuda_norm {
    const float *x, *weight, *gate;
    float *y;
    int32_t groups, width;
    float divisor, eps, offset;
    int32_t activation;
    bool gate_first, center, group_weights, wide;
    __nv_bfloat16 *rounded; // optional: norm.cu's launches write y there, too (cuda_copies_offer); width % 4 == 0
};

// The sum over a vector's lanes, which are a team; every lane has it. shared: a float a warp; barriers keep two sums
// apart.
template <typename Team>
static __device__ __forceinline__ float cuda_lanes_sum(float x, const Team &team, float *shared) {
    x = cuda_warp_sum(x);
    if (team.size() == CUDA_WARP)
        return x;
    team.sync();
    if (team.thread() % CUDA_WARP == 0)
        shared[team.thread() / CUDA_WARP] = x;
    team.sync();
    float sum = shared[0];
#pragma unroll
    for (int warp = 1; warp < team.size() / CUDA_WARP; warp++)
        sum = __fadd_rn(sum, shared[warp]);
    return sum;
}

// u of the quad at element i of the vector at x: what is normalised.
static __device__ __forceinline__ cuda_quad cuda_norm_input(const cuda_norm &n, int64_t at, int32_t i) {
    const int32_t left = n.width - i;
    cuda_quad u = cuda_load(n.x + at + i, left, n.wide);
    if (n.gate_first) {
        const cuda_quad z = cuda_activate_quad(n.activation, cuda_load(n.gate + at + i, left, n.wide));
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            u.v[j] = __fmul_rn(u.v[j], z.v[j]);
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
        const cuda_quad z = cuda_activate_quad(n.activation, cuda_load(n.gate + at + i, left, n.wide));
#pragma unroll
        for (int j = 0; j < CUDA_QUAD; j++)
            factor.v[j] = __fmul_rn(factor.v[j], z.v[j]);
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

// How many lanes the bits ask for.
static __host__ __device__ __forceinline__ int cuda_norm_lanes(int32_t width) {
    return width <= CUDA_NORM_NARROW ? CUDA_WARP : width <= CUDA_NORM_MIDDLE ? 4 * CUDA_WARP : 8 * CUDA_WARP;
}

// The vector's quads go to output(i, quad), i its first element. The team is the lanes; shared: a float a warp of
// theirs. input(k, i): u of the lane's quad k, which begins at element i.
template <int CACHE, typename Team, typename Input, typename Output>
static __device__ __forceinline__ void cuda_normalise_inputs(const cuda_norm &n, int64_t vector, const Team &team,
                                                             float *shared, const Input &input, const Output &output) {
    const int32_t first = team.thread() * CUDA_QUAD, stride = team.size() * CUDA_QUAD, width = n.width;
    const int64_t at = vector * width;
    const float *weight = n.weight && n.group_weights ? n.weight + vector % n.groups * width : n.weight;
    cuda_quad kept[CACHE] = {}, factor[CACHE] = {};
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width) {
            kept[k] = input(k, first + k * stride);
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
        mean = __fdiv_rn(cuda_lanes_sum(sum, team, shared), (float)width);
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width)
            squares = cuda_quad_squares(squares, kept[k], mean, width - (first + k * stride));
    for (int32_t i = first + CACHE * stride; i < width; i += stride)
        squares = cuda_quad_squares(squares, cuda_norm_input(n, at, i), mean, width - i);
    squares = cuda_lanes_sum(squares, team, shared);
    const float rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps));
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width)
            output(first + k * stride, cuda_norm_output(kept[k], factor[k], mean, rstd));
    for (int32_t i = first + CACHE * stride; i < width; i += stride)
        output(i, cuda_norm_output(cuda_norm_input(n, at, i), cuda_norm_factor(n, weight, at, i), mean, rstd));
}

template <int CACHE, typename Team, typename Output>
static __device__ __forceinline__ void cuda_normalise(const cuda_norm &n, int64_t vector, const Team &team,
                                                      float *shared, const Output &output) {
    cuda_normalise_inputs<CACHE>(
        n, vector, team, shared, [&](int, int32_t i) { return cuda_norm_input(n, vector * n.width, i); }, output);
}

// What an operation asks for.
cuda_norm cuda_norm_of(const kern_rmsnorm_args *a);
cuda_norm cuda_l2norm_of(const kern_l2norm_args *a);

#endif

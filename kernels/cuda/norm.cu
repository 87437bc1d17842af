// SPDX-License-Identifier: Apache-2.0
// RMSNorm, LayerNorm and L2 normalisation of each of the T * groups vectors of `width` floats (kernels.h).
//
//     y = (u - m) r w [act(z)],   r = 1 / sqrt(sum (u - m)^2 / divisor + eps);   divisor = width, for L2 1
// A vector is the work of LANES threads, chosen by its width alone: a warp up to 256, a block above. A lane takes every
// LANES-th quad of floats and keeps the first CACHE of them in registers, with their factors, between the sums and the
// product; a wider vector is read again. Sums: a lane's elements in order, lanes by halving, warps in order. Each
// element is written by the thread that read it, after the sums, so y may be x.
#include "kernels/cuda/elements.cuh"

enum { QUAD = 4, BLOCK_OF_WARPS = 4 };

struct norm_call {
    const float *x, *weight, *gate;
    float *y;
    int32_t groups, width;
    float divisor, eps, offset;
    int32_t activation;
    bool gate_first, center, group_weights, wide;
};

// The sum over a vector's lanes; every lane has it. shared: a float a warp; barriers keep two sums apart.
template <int LANES> static __device__ __forceinline__ float lanes_sum(float x, float *shared) {
    x = cuda_warp_sum(x);
    if (LANES == CUDA_WARP)
        return x;
    __syncthreads();
    if (threadIdx.x % CUDA_WARP == 0)
        shared[threadIdx.x / CUDA_WARP] = x;
    __syncthreads();
    float sum = shared[0];
#pragma unroll
    for (int warp = 1; warp < LANES / CUDA_WARP; warp++)
        sum = __fadd_rn(sum, shared[warp]);
    return sum;
}

// u of the quad at element i of the vector at x: what is normalised.
static __device__ __forceinline__ cuda_quad norm_input(const norm_call &n, int64_t at, int32_t i) {
    const int32_t left = n.width - i;
    cuda_quad u = cuda_load(n.x + at + i, left, n.wide);
    if (n.gate_first) {
        const cuda_quad z = cuda_load(n.gate + at + i, left, n.wide);
#pragma unroll
        for (int j = 0; j < QUAD; j++)
            u.v[j] = __fmul_rn(u.v[j], cuda_activate(n.activation, z.v[j]));
    }
    return u;
}

static __device__ __forceinline__ float quad_sum(float sum, const cuda_quad &u) {
#pragma unroll
    for (int j = 0; j < QUAD; j++)
        sum = __fadd_rn(sum, u.v[j]);
    return sum;
}

// sum += (u - mean)^2 of the elements that exist.
static __device__ __forceinline__ float quad_squares(float sum, const cuda_quad &u, float mean, int32_t left) {
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        const float d = j < left ? __fsub_rn(u.v[j], mean) : 0.0f;
        sum = fmaf(d, d, sum);
    }
    return sum;
}

// What the normalised quad is multiplied by: weight and the gate behind it.
static __device__ __forceinline__ cuda_quad norm_factor(const norm_call &n, const float *weight, int64_t at,
                                                        int32_t i) {
    const int32_t left = n.width - i;
    cuda_quad factor = {{1, 1, 1, 1}};
    if (weight) {
        factor = cuda_load(weight + i, left, n.wide);
#pragma unroll
        for (int j = 0; j < QUAD; j++)
            factor.v[j] = __fadd_rn(factor.v[j], n.offset);
    }
    if (n.gate && !n.gate_first) {
        const cuda_quad z = cuda_load(n.gate + at + i, left, n.wide);
#pragma unroll
        for (int j = 0; j < QUAD; j++)
            factor.v[j] = __fmul_rn(factor.v[j], cuda_activate(n.activation, z.v[j]));
    }
    return factor;
}

static __device__ __forceinline__ void norm_output(const norm_call &n, int64_t at, int32_t i, cuda_quad u,
                                                   const cuda_quad &factor, float mean, float rstd) {
#pragma unroll
    for (int j = 0; j < QUAD; j++)
        u.v[j] = __fmul_rn(__fmul_rn(__fsub_rn(u.v[j], mean), rstd), factor.v[j]);
    cuda_store(n.y + at + i, u, n.width - i, n.wide);
}

template <int LANES, int CACHE>
static __global__ void __launch_bounds__(LANES == CUDA_WARP ? CUDA_WARP * BLOCK_OF_WARPS : LANES)
    norm_kernel(const cuda_table *table, norm_call n) {
    __shared__ float shared[LANES / CUDA_WARP];
    const int64_t vector =
        LANES == CUDA_WARP ? (int64_t)blockIdx.x * BLOCK_OF_WARPS + threadIdx.x / CUDA_WARP : (int64_t)blockIdx.x;
    if (vector >= (int64_t)table->n_tokens * n.groups)
        return;
    const int32_t first = (int32_t)(threadIdx.x % LANES) * QUAD, stride = LANES * QUAD, width = n.width;
    const int64_t at = vector * width;
    const float *weight = n.weight && n.group_weights ? n.weight + vector % n.groups * width : n.weight;
    cuda_quad kept[CACHE], factor[CACHE];
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width) {
            kept[k] = norm_input(n, at, first + k * stride);
            factor[k] = norm_factor(n, weight, at, first + k * stride);
        }
    float mean = 0;
    if (n.center) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < CACHE; k++)
            if (first + k * stride < width)
                sum = quad_sum(sum, kept[k]);
        for (int32_t i = first + CACHE * stride; i < width; i += stride)
            sum = quad_sum(sum, norm_input(n, at, i));
        mean = __fdiv_rn(lanes_sum<LANES>(sum, shared), (float)width);
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width)
            squares = quad_squares(squares, kept[k], mean, width - (first + k * stride));
    for (int32_t i = first + CACHE * stride; i < width; i += stride)
        squares = quad_squares(squares, norm_input(n, at, i), mean, width - i);
    squares = lanes_sum<LANES>(squares, shared);
    const float rstd = 1.0f / sqrtf(__fadd_rn(__fdiv_rn(squares, n.divisor), n.eps));
#pragma unroll
    for (int k = 0; k < CACHE; k++)
        if (first + k * stride < width)
            norm_output(n, at, first + k * stride, kept[k], factor[k], mean, rstd);
    for (int32_t i = first + CACHE * stride; i < width; i += stride)
        norm_output(n, at, i, norm_input(n, at, i), norm_factor(n, weight, at, i), mean, rstd);
}

static kern_status launch_norm(const cuda_step *step, norm_call n) {
    const int64_t vectors = (int64_t)step->tokens * n.groups;
    n.wide =
        n.width % QUAD == 0 && cuda_is_wide(n.x) && cuda_is_wide(n.y) && cuda_is_wide(n.weight) && cuda_is_wide(n.gate);
    if (n.width <= 256)
        norm_kernel<CUDA_WARP, 2>
            <<<cuda_blocks(vectors, BLOCK_OF_WARPS), CUDA_WARP * BLOCK_OF_WARPS, 0, step->stream>>>(step->table, n);
    else if (n.width <= 1024)
        norm_kernel<128, 2><<<cuda_blocks(vectors, 1), 128, 0, step->stream>>>(step->table, n);
    else
        norm_kernel<256, 4><<<cuda_blocks(vectors, 1), 256, 0, step->stream>>>(step->table, n);
    return cuda_launched();
}

// --------------------------------------------------------------------------------------------------------- launchers

static bool shape_is_valid(int32_t groups, int32_t width, float eps) {
    return groups >= 1 && width >= 1 && eps >= 0 && eps < INFINITY;
}

kern_status cuda_rmsnorm_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_rmsnorm_args *a = (const kern_rmsnorm_args *)args;
    const bool complete =
        a->x.ref && a->y.ref && cuda_activation_is_valid(a->activation) && (a->gate.ref || !a->gate_first);
    return complete && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_rmsnorm_run(const cuda_step *step, const void *args) {
    const kern_rmsnorm_args *a = (const kern_rmsnorm_args *)args;
    norm_call n = {};
    n.x = a->x.f, n.weight = a->weight.f, n.gate = a->gate.f, n.y = a->y.f;
    n.groups = a->groups;
    n.width = a->width;
    n.divisor = (float)a->width;
    n.eps = a->eps;
    n.offset = a->weight_offset;
    n.activation = a->activation;
    n.gate_first = a->gate_first != 0;
    n.center = a->center != 0;
    n.group_weights = a->group_weights != 0;
    return launch_norm(step, n);
}

kern_status cuda_l2norm_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_l2norm_args *a = (const kern_l2norm_args *)args;
    return a->x.ref && a->y.ref && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_l2norm_run(const cuda_step *step, const void *args) {
    const kern_l2norm_args *a = (const kern_l2norm_args *)args;
    norm_call n = {};
    n.x = a->x.f, n.y = a->y.f;
    n.groups = a->groups;
    n.width = a->width;
    n.divisor = 1;
    n.eps = a->eps;
    return launch_norm(step, n);
}

// SPDX-License-Identifier: Apache-2.0
// Feature maps that change a vector as a whole (kernels.h): softmax of both signs, products of rolled halves, a
// division by the sum.
//
// A warp owns one of the T * groups vectors. Sums: a lane's elements in order, lanes by halving. Of SUM, whose y may be
// x, each lane writes the elements that it has read. A map reads its vector twice instead of keeping it: any width
// goes.
#include "kernels/cuda/elements.cuh"

enum { WARPS = 4, THREADS = WARPS * CUDA_WARP, ROLLS = 4 };

static __device__ void hedgehog(const float *z, float *y, int32_t width, int32_t lane) {
    float top = 0, sum = 0;
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        top = fmaxf(top, fabsf(z[i]));
    top = __fmul_rn(2.0f, cuda_warp_max(top));
    for (int32_t i = lane; i < width; i += CUDA_WARP) {
        const float twice = __fmul_rn(2.0f, z[i]);
        sum = __fadd_rn(sum, __fadd_rn(expf(__fsub_rn(twice, top)), expf(__fsub_rn(-twice, top))));
    }
    const float scale = 1.0f / cuda_warp_sum(sum);
    for (int32_t i = lane; i < width; i += CUDA_WARP) {
        const float twice = __fmul_rn(2.0f, z[i]);
        y[i] = __fmul_rn(scale, expf(__fsub_rn(twice, top)));
        y[width + i] = __fmul_rn(scale, expf(__fsub_rn(-twice, top)));
    }
}

// Element i of p = [relu(z), -relu(z)].
static __device__ __forceinline__ float part(const float *z, int32_t width, int32_t i) {
    return i < width ? cuda_max(0.0f, z[i]) : -cuda_max(0.0f, z[i - width]);
}

static __device__ void dpfp(const float *z, float *y, int32_t width, int32_t lane) {
    const int32_t n = 2 * width;
    for (int32_t i = lane; i < n; i += CUDA_WARP) {
        const float own = part(z, width, i);
#pragma unroll
        for (int32_t j = 1; j <= ROLLS; j++)
            y[(int64_t)(j - 1) * n + i] = own * part(z, width, (i + n - j % n) % n);
    }
}

static __device__ void divide_by_sum(const float *z, float *y, int32_t width, float eps, int32_t lane) {
    float sum = 0;
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        sum = __fadd_rn(sum, z[i]);
    const float scale = 1.0f / __fadd_rn(cuda_warp_sum(sum), eps);
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        y[i] = scale * z[i];
}

// ---------------------------------------------------------------------------------------------------------- backward

// dz = 2 (y_i (dy_i - m) - y_(width + i) (dy_(width + i) - m)), m = sum y dy.
static __device__ void hedgehog_backward(const float *z, const float *dy, float *dz, int32_t width, int32_t lane) {
    float top = 0, sum = 0, along = 0;
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        top = fmaxf(top, fabsf(z[i]));
    top = __fmul_rn(2.0f, cuda_warp_max(top));
    for (int32_t i = lane; i < width; i += CUDA_WARP) {
        const float twice = __fmul_rn(2.0f, z[i]), plus = expf(twice - top), minus = expf(-twice - top);
        sum = __fadd_rn(sum, __fadd_rn(plus, minus));
        along = fmaf(minus, dy[width + i], fmaf(plus, dy[i], along));
    }
    const float scale = 1.0f / cuda_warp_sum(sum), mean = cuda_warp_sum(along) * scale;
    for (int32_t i = lane; i < width; i += CUDA_WARP) {
        const float twice = __fmul_rn(2.0f, z[i]);
        const float plus = expf(twice - top) * (dy[i] - mean), minus = expf(-twice - top) * (dy[width + i] - mean);
        dz[i] = 2.0f * scale * (plus - minus);
    }
}

// What the products in which p_i stands give: p_i p_(i - j) and p_(i + j) p_i.
static __device__ __forceinline__ float part_gradient(const float *z, const float *dy, int32_t width, int32_t i) {
    const int32_t n = 2 * width;
    float d = 0;
#pragma unroll
    for (int32_t j = 1; j <= ROLLS; j++) {
        const float *row = dy + (int64_t)(j - 1) * n;
        d = fmaf(row[i], part(z, width, (i + n - j % n) % n), d);
        d = fmaf(row[(i + j) % n], part(z, width, (i + j) % n), d);
    }
    return d;
}

static __device__ void dpfp_backward(const float *z, const float *dy, float *dz, int32_t width, int32_t lane) {
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        dz[i] = z[i] > 0 ? part_gradient(z, dy, width, i) - part_gradient(z, dy, width, width + i) : 0.0f;
}

static __device__ void divide_by_sum_backward(const float *z, const float *dy, float *dz, int32_t width, float eps,
                                              int32_t lane) {
    float sum = 0, along = 0;
    for (int32_t i = lane; i < width; i += CUDA_WARP) {
        sum = __fadd_rn(sum, z[i]);
        along = fmaf(dy[i], z[i], along);
    }
    const float scale = 1.0f / __fadd_rn(cuda_warp_sum(sum), eps), mean = cuda_warp_sum(along) * scale;
    for (int32_t i = lane; i < width; i += CUDA_WARP)
        dz[i] = scale * (dy[i] - mean);
}

static __global__ void __launch_bounds__(THREADS)
    feature_map_backward_kernel(const cuda_table *table, const kern_feature_map_backward_args a) {
    cuda_begin();
    cuda_await();
    const int64_t vector = (int64_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    const int32_t lane = threadIdx.x % CUDA_WARP;
    if (vector >= (int64_t)table->n_tokens * a.groups)
        return;
    const float *z = a.x.f + vector * a.width;
    float *dz = a.dx.f + vector * a.width;
    if (a.feature == KERN_FEATURE_HEDGEHOG)
        hedgehog_backward(z, a.dy.f + vector * 2 * a.width, dz, a.width, lane);
    else if (a.feature == KERN_FEATURE_DPFP)
        dpfp_backward(z, a.dy.f + vector * 2 * ROLLS * a.width, dz, a.width, lane);
    else
        divide_by_sum_backward(z, a.dy.f + vector * a.width, dz, a.width, a.eps, lane);
}

// ----------------------------------------------------------------------------------------------------------- forward

static __global__ void __launch_bounds__(THREADS) feature_map_kernel(const cuda_table *table, kern_feature_map_args a) {
    cuda_begin();
    cuda_await();
    const int64_t vector = (int64_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    const int32_t lane = threadIdx.x % CUDA_WARP;
    if (vector >= (int64_t)table->n_tokens * a.groups)
        return;
    const float *z = a.x.f + vector * a.width;
    if (a.feature == KERN_FEATURE_HEDGEHOG)
        hedgehog(z, a.y.f + vector * 2 * a.width, a.width, lane);
    else if (a.feature == KERN_FEATURE_DPFP)
        dpfp(z, a.y.f + vector * 2 * ROLLS * a.width, a.width, lane);
    else
        divide_by_sum(z, a.y.f + vector * a.width, a.width, a.eps, lane);
}

static bool shape_is_valid(int32_t groups, int32_t width, int32_t feature, float eps) {
    return groups >= 1 && width >= 1 && width <= INT32_MAX / 8 && feature >= 0 && feature < KERN_FEATURES &&
           eps - eps == 0;
}

kern_status cuda_feature_map_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_feature_map_args *a = (const kern_feature_map_args *)args;
    const bool complete = a->x.ref && a->y.ref && (a->x.ref != a->y.ref || a->feature == KERN_FEATURE_SUM);
    return complete && shape_is_valid(a->groups, a->width, a->feature, a->eps) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_feature_map_run(const cuda_step *step, const void *args) {
    const kern_feature_map_args *a = (const kern_feature_map_args *)args;
    const int blocks = cuda_blocks((int64_t)step->tokens * a->groups, WARPS);
    return cuda_start(step, feature_map_kernel, blocks, THREADS, 0, step->table, *a);
}

kern_status cuda_feature_map_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_feature_map_backward_args *a = (const kern_feature_map_backward_args *)args;
    const bool apart = a->dx.ref != a->x.ref && (a->dx.ref != a->dy.ref || a->feature == KERN_FEATURE_SUM);
    const bool complete = a->x.ref && a->dy.ref && a->dx.ref && apart;
    return complete && shape_is_valid(a->groups, a->width, a->feature, a->eps) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_feature_map_backward_run(const cuda_step *step, const void *args) {
    const kern_feature_map_backward_args *a = (const kern_feature_map_backward_args *)args;
    const int blocks = cuda_blocks((int64_t)step->tokens * a->groups, WARPS);
    return cuda_start(step, feature_map_backward_kernel, blocks, THREADS, 0, step->table, *a);
}

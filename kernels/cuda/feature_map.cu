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

kern_status cuda_feature_map_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_feature_map_args *a = (const kern_feature_map_args *)args;
    const bool complete = a->x.ref && a->y.ref && (a->x.ref != a->y.ref || a->feature == KERN_FEATURE_SUM);
    const bool valid = a->groups >= 1 && a->width >= 1 && a->width <= INT32_MAX / 8 && a->feature >= 0 &&
                       a->feature < KERN_FEATURES && a->eps - a->eps == 0;
    return complete && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_feature_map_run(const cuda_step *step, const void *args) {
    const kern_feature_map_args *a = (const kern_feature_map_args *)args;
    const int blocks = cuda_blocks((int64_t)step->tokens * a->groups, WARPS);
    return cuda_start(step, feature_map_kernel, blocks, THREADS, 0, step->table, *a);
}

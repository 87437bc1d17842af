// SPDX-License-Identifier: Apache-2.0
// Optimizer: AdamW, sum of squares of gradients, scale that clips their norm.
//
//     g = s grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//     p -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p),   c = 1 - b^step
// Rounded to bf16 at random, a float gets 16 random bits added to the 16 that go; compensated, the sum p + rest is what
// is updated, and rest what is left of it.
// A block of threads updates a run of one tensor, so that all tensors are one launch, and finds the scale in device
// memory: one that is not a number says that the step is off. The sum of squares is double: each block's threads add
// every other element in order, threads by halving, then one block the blocks. The row table is not used.
#include <float.h>

#include "kernels/cuda/storage.cuh"

enum { THREADS = 256, QUAD = 4, SQUARE_BLOCKS = 1024 };

// Takes a step with a weight; rest and bits of those that round by them.
template <kern_rounding ROUNDING>
static __device__ __forceinline__ void take_step(const kern_adamw_args &a, float weight_decay, float step,
                                                 float *parameter, float *rest, uint32_t bits) {
    if constexpr (ROUNDING == KERN_ROUND_COMPENSATED) {
        const float change = *rest - a.lr * (step + weight_decay * (*parameter + *rest));
        const float next = __bfloat162float(__float2bfloat16_rn(*parameter + change));
        *rest = (*parameter - next) + change;
        *parameter = next;
    } else {
        *parameter -= a.lr * (step + weight_decay * *parameter);
        if constexpr (ROUNDING == KERN_ROUND_STOCHASTIC)
            *parameter = cuda_stored<cuda_bf16>(cuda_rounded(*parameter, bits >> 16));
    }
}

template <kern_rounding ROUNDING>
static __device__ __forceinline__ void update_quad(const kern_adamw_args &a, const kern_adamw_run &run, float scale,
                                                   bool wide, int32_t i) {
    const float rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;
    const int64_t left = run.count - i;
    const cuda_quad grad = cuda_load(run.grad + i, left, wide);
    cuda_quad parameter = cuda_load(run.parameter + i, left, wide);
    cuda_quad m = cuda_load(run.m + i, left, wide), v = cuda_load(run.v + i, left, wide), rest = {};
    kern_philox random = {};
    if constexpr (ROUNDING == KERN_ROUND_COMPENSATED)
        rest = cuda_load(run.rest + i, left, wide);
    if constexpr (ROUNDING == KERN_ROUND_STOCHASTIC)
        random = kern_philox_rounding(a.seed, (uint64_t)(run.first + i) / QUAD, a.update);
#pragma unroll
    for (int j = 0; j < QUAD; j++) {
        const float g = scale * grad.v[j];
        m.v[j] = a.beta1 * m.v[j] + rest1 * g;
        v.v[j] = a.beta2 * v.v[j] + rest2 * (g * g);
        const float step = (m.v[j] / a.correction1) / (sqrtf(v.v[j] / a.correction2) + a.eps);
        take_step<ROUNDING>(a, run.weight_decay, step, &parameter.v[j], &rest.v[j], random.word[j]);
    }
    cuda_store(run.m + i, m, left, wide);
    cuda_store(run.v + i, v, left, wide);
    cuda_store(run.parameter + i, parameter, left, wide);
    if constexpr (ROUNDING == KERN_ROUND_COMPENSATED)
        cuda_store(run.rest + i, rest, left, wide);
}

// The runs are a constant of the training: they are read before the kernel before has ended.
template <kern_rounding ROUNDING>
static __global__ void __launch_bounds__(THREADS) adamw_kernel(const kern_adamw_args a) {
    cuda_begin();
    kern_adamw_run run = ((const kern_adamw_run *)a.run.p)[blockIdx.x];
    run.parameter = cuda_in_global(run.parameter), run.grad = cuda_in_global(run.grad);
    run.m = cuda_in_global(run.m), run.v = cuda_in_global(run.v);
    uintptr_t places = (uintptr_t)run.parameter | (uintptr_t)run.grad | (uintptr_t)run.m | (uintptr_t)run.v;
    if constexpr (ROUNDING == KERN_ROUND_COMPENSATED)
        run.rest = cuda_in_global(run.rest), places |= (uintptr_t)run.rest;
    cuda_await();
    const float scale = a.grad_scale.f ? a.grad_scale.f[0] : 1.0f;
    if (isnan(scale))
        return;
#pragma unroll 2
    for (int32_t i = (int32_t)threadIdx.x * QUAD; i < run.count; i += THREADS * QUAD)
        update_quad<ROUNDING>(a, run, scale, places % 16 == 0, i);
}

kern_status cuda_adamw_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_adamw_args *a = (const kern_adamw_args *)args;
    const bool corrects = a->correction1 > 0 && a->correction2 > 0;
    const bool rounds = a->rounding >= 0 && a->rounding < KERN_ROUNDINGS;
    return !a->run.ref || a->count < 0 || a->runs < 0 || !corrects || !rounds ? KERN_INVALID : KERN_OK;
}

kern_status cuda_adamw_run(const cuda_step *step, const void *args) {
    const kern_adamw_args *a = (const kern_adamw_args *)args;
    if (a->runs == 0)
        return KERN_OK;
    switch ((kern_rounding)a->rounding) {
    case KERN_ROUND_STOCHASTIC:
        return cuda_start(step, adamw_kernel<KERN_ROUND_STOCHASTIC>, a->runs, THREADS, 0, *a);
    case KERN_ROUND_COMPENSATED:
        return cuda_start(step, adamw_kernel<KERN_ROUND_COMPENSATED>, a->runs, THREADS, 0, *a);
    default:
        return cuda_start(step, adamw_kernel<KERN_ROUND_NONE>, a->runs, THREADS, 0, *a);
    }
}

// ---------------------------------------------------------------------------------------------------- gradient norm

// The sum over the block's threads; thread 0 has it.
static __device__ __forceinline__ double block_sum(double x) {
    __shared__ double shared[THREADS];
    shared[threadIdx.x] = x;
    for (int distance = THREADS / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < distance)
            shared[threadIdx.x] += shared[threadIdx.x + distance];
    }
    return shared[0];
}

static __global__ void __launch_bounds__(THREADS)
    squares_kernel(const float *x, int64_t count, bool wide, double *partial) {
    cuda_begin();
    cuda_await();
    double sum = 0;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * QUAD; i < count;
         i += (int64_t)gridDim.x * THREADS * QUAD) {
        const cuda_quad q = cuda_load(x + i, count - i, wide);
#pragma unroll
        for (int j = 0; j < QUAD; j++)
            sum += (double)q.v[j] * (double)q.v[j];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(THREADS) add_squares_kernel(const double *partial, int blocks, double *total) {
    cuda_begin();
    cuda_await();
    double sum = 0;
    for (int i = threadIdx.x; i < blocks; i += THREADS)
        sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        total[0] += sum;
}

kern_status cuda_square_sum_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    const kern_square_sum_args *a = (const kern_square_sum_args *)args;
    *workspace_bytes = sizeof(double) * SQUARE_BLOCKS;
    return !a->x.ref || !a->sum.ref || a->count < 0 ? KERN_INVALID : KERN_OK;
}

kern_status cuda_square_sum_run(const cuda_step *step, const void *args) {
    const kern_square_sum_args *a = (const kern_square_sum_args *)args;
    double *partial = (double *)step->cuda->workspace;
    const int wanted = cuda_blocks(a->count, THREADS * QUAD), blocks = wanted < SQUARE_BLOCKS ? wanted : SQUARE_BLOCKS;
    const kern_status status =
        cuda_start(step, squares_kernel, blocks, THREADS, 0, a->x.f, a->count, cuda_is_wide(a->x.p), partial);
    return status ? status
                  : cuda_start(step, add_squares_kernel, 1, THREADS, 0, (const double *)partial, blocks,
                               (double *)a->sum.p);
}

static __global__ void clip_kernel(const double *sum, float *scale, float clip) {
    cuda_begin();
    cuda_await();
    const double wanted = clip > 0 ? (double)clip / (sqrt(sum[0]) + 1e-6) : 1.0;
    const bool usable = isfinite(sum[0]) && (clip > 0 || sum[0] <= (double)FLT_MAX);
    scale[0] = !usable ? NAN : wanted > 1.0 ? 1.0f : (float)wanted;
}

kern_status cuda_clip_scale_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_clip_scale_args *a = (const kern_clip_scale_args *)args;
    return a->sum.ref && a->scale.ref ? KERN_OK : KERN_INVALID;
}

kern_status cuda_clip_scale_run(const cuda_step *step, const void *args) {
    const kern_clip_scale_args *a = (const kern_clip_scale_args *)args;
    return cuda_start(step, clip_kernel, 1, 1, 0, (const double *)a->sum.p, a->scale.f, a->clip);
}

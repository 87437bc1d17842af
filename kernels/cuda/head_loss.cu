// SPDX-License-Identifier: Apache-2.0
// Cross entropy of many tokens and its backward, tile by tile of tokens, so that logits are never there whole:
//
//     l = cap(W x),  cap(z) = c tanh(z / c)         loss = log sum e^l - l[target]
//     dl = weight (softmax(l) - onehot) (1 - (l / c)^2)      dx = dl W,  dW += dl^T x
// A tile's logits are one product; a block of threads turns a token's into its loss and, in place, dl; two more
// products read that. Tiles follow one another, so dW is added in the order of tokens. A token without target has loss
// 0 and dl 0; one whose target is no id of the vocabulary, a loss that is not a number.
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/gemm.cuh"

enum { THREADS = 512 };

struct loss_job {
    float *logits; // (tokens of the tile, vocabulary)
    float *loss;
    int32_t *best;       // optional
    const float *factor; // optional
    int32_t token0, vocabulary;
    float soft_cap, scale;
    bool gradient, wide;
};

// Of the logits seen so far: the largest, its first place (-1: no number was larger than -infinity), and the sum of
// e^(l - value).
struct logit_sum {
    float value;
    int32_t place;
    float sum;

    __device__ __forceinline__ void take(float l, int32_t i) {
        const bool larger = l > value;
        place = larger || (place < 0 && l == value) ? i : place;
        if (larger) {
            sum = fmaf(sum, value > -INFINITY ? expf(value - l) : 0.0f, 1.0f);
            value = l;
        } else if (l != -INFINITY) {
            sum += expf(l - value);
        }
    }
};

static __device__ __forceinline__ bool is_before(const logit_sum &a, const logit_sum &b) {
    return a.value > b.value || (a.value == b.value && (uint32_t)a.place <= (uint32_t)b.place);
}

// One without a number is 0, and e^0 of the largest is not asked for: infinities have no difference.
static __device__ __forceinline__ double scaled(const logit_sum &s, float top) {
    return s.value == top || s.sum == 0 ? (double)s.sum : (double)s.sum * (double)expf(s.value - top);
}

// Of the block's threads; *sum is theirs together, warps in order.
static __device__ __forceinline__ logit_sum block_top(logit_sum own, double *sum) {
    __shared__ logit_sum tops[THREADS / CUDA_WARP];
    __shared__ double sums[THREADS / CUDA_WARP];
    logit_sum top = own;
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2) {
        const logit_sum other = {__shfl_xor_sync(0xffffffffu, top.value, distance),
                                 __shfl_xor_sync(0xffffffffu, top.place, distance), 0};
        top = is_before(top, other) ? top : other;
    }
    if (threadIdx.x % CUDA_WARP == 0)
        tops[threadIdx.x / CUDA_WARP] = top;
    __syncthreads();
    top = tops[0];
    for (int warp = 1; warp < THREADS / CUDA_WARP; warp++)
        top = is_before(top, tops[warp]) ? top : tops[warp];
    double part = scaled(own, top.value);
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
        part += __shfl_xor_sync(0xffffffffu, part, distance);
    if (threadIdx.x % CUDA_WARP == 0)
        sums[threadIdx.x / CUDA_WARP] = part;
    __syncthreads();
    *sum = 0;
    for (int warp = 0; warp < THREADS / CUDA_WARP; warp++)
        *sum += sums[warp];
    return top;
}

// Calls visit(i, quad) for the thread's quads of a token's logits; the quad goes back where KEEP.
template <bool KEEP, typename Visit>
static __device__ __forceinline__ void each_quad(const loss_job &job, float *logits, const Visit &visit) {
    for (int32_t i = (int32_t)threadIdx.x * 4; i < job.vocabulary; i += THREADS * 4) {
        cuda_quad q = cuda_load(logits + i, job.vocabulary - i, job.wide);
        visit(i, q);
        if (KEEP)
            cuda_store(logits + i, q, job.vocabulary - i, job.wide);
    }
}

// Caps the logits in place; the largest and the sum of all.
static __device__ __forceinline__ logit_sum cap_and_sum(const loss_job &job, float *logits, double *sum) {
    logit_sum own = {-INFINITY, -1, 0};
    const auto take = [&](int32_t i, cuda_quad &q) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            q.v[j] = cuda_soft_cap(q.v[j], job.soft_cap);
            if (i + j < job.vocabulary)
                own.take(q.v[j], i + j);
        }
    };
    if (job.soft_cap > 0)
        each_quad<true>(job, logits, take);
    else
        each_quad<false>(job, logits, take);
    return block_top(own, sum);
}

static __device__ __forceinline__ void logits_to_gradient(const loss_job &job, float *logits, float top, double sum,
                                                          float weight, int32_t target) {
    const float scale = (float)((double)weight / sum), inverse = job.soft_cap > 0 ? 1.0f / job.soft_cap : 0.0f;
    each_quad<true>(job, logits, [&](int32_t i, cuda_quad &q) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float capped = q.v[j] * inverse, slope = 1.0f - capped * capped;
            q.v[j] = expf(q.v[j] - top) * scale * slope - (i + j == target ? weight * slope : 0.0f);
        }
    });
}

static __device__ __forceinline__ void no_target(const cuda_table *table, const loss_job &job, float *logits,
                                                 int32_t t) {
    if (threadIdx.x == 0) {
        job.loss[t] = table->target[t] < 0 ? 0.0f : NAN;
        if (job.best)
            job.best[t] = -1;
    }
    if (job.gradient)
        each_quad<true>(job, logits, [&](int32_t, cuda_quad &q) { q = {}; });
}

static __global__ void __launch_bounds__(THREADS) loss_kernel(const cuda_table *table, const loss_job job) {
    cuda_begin();
    cuda_await();
    const int32_t t = job.token0 + (int32_t)blockIdx.x, target = table->target[t];
    float *logits = job.logits + (int64_t)blockIdx.x * job.vocabulary;
    if (target < 0 || target >= job.vocabulary) {
        no_target(table, job, logits, t);
        return;
    }
    double sum;
    const logit_sum top = cap_and_sum(job, logits, &sum);
    if (threadIdx.x == 0) {
        job.loss[t] = (float)(log(sum) + (double)top.value - (double)logits[target]);
        if (job.best)
            job.best[t] = top.place;
    }
    if (!job.gradient)
        return;
    __syncthreads(); // the target's logit has been read
    const float weight = table->target_weight[t] * (job.factor ? job.factor[t] : 1.0f) * job.scale;
    logits_to_gradient(job, logits, top.value, sum, weight, target);
}

// ----------------------------------------------------------------------------------------------------------- launches

static kern_status run_tile(const cuda_step *step, const kern_head_loss_args *a, int32_t token0, int32_t tokens) {
    const kern_weight *w = a->weight.w;
    const bool bf16 = w->dtype == KERN_BF16;
    char *workspace = step->cuda->workspace;
    const float *x = a->x.f + (int64_t)token0 * a->width;
    float *tile = a->tile.f;
    const int64_t width = a->width, vocabulary = a->vocabulary;
    const cuda_gemm logits = {{x, width, false, false},
                              {w->data, width, false, bf16},
                              tile,
                              vocabulary,
                              tokens,
                              vocabulary,
                              width,
                              NULL,
                              NULL,
                              false};
    kern_status status = cuda_gemm_launch(step, workspace, &logits, 1);
    const loss_job job = {tile,
                          a->loss.f,
                          a->best.i,
                          a->factor.f,
                          token0,
                          a->vocabulary,
                          a->soft_cap,
                          a->scale == 0 ? 1.0f : a->scale,
                          a->dx.f != NULL,
                          cuda_is_wide(tile) && vocabulary % 4 == 0};
    if (!status)
        status = cuda_start(step, loss_kernel, tokens, THREADS, 0, step->table, job);
    cuda_packs_written(step, tile, sizeof(float) * (size_t)tokens * (size_t)vocabulary);
    if (status || !a->dx.f)
        return status;
    const cuda_gemm input = {{tile, vocabulary, false, false},
                             {w->data, width, true, false},
                             a->dx.f + (int64_t)token0 * width,
                             width,
                             tokens,
                             width,
                             vocabulary,
                             NULL,
                             NULL,
                             false};
    status = cuda_gemm_launch(step, workspace, &input, 1);
    if (status || !a->grad_weight.f)
        return status;
    const cuda_gemm gradient = {{tile, vocabulary, true, false},
                                {x, width, true, false},
                                a->grad_weight.f,
                                width,
                                vocabulary,
                                width,
                                tokens,
                                NULL,
                                NULL,
                                true};
    return cuda_gemm_launch(step, workspace, &gradient, 1);
}

kern_status cuda_head_loss_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_head_loss_args *a = (const kern_head_loss_args *)args;
    if (a->width < 1 || a->vocabulary < 1 || a->tile_tokens < 1 || !(a->soft_cap >= 0) || !a->x.ref || !a->weight.ref ||
        !a->loss.ref || !a->tile.ref || (a->grad_weight.ref && !a->dx.ref))
        return KERN_INVALID;
    *workspace_bytes = cuda_gemm_bytes(cuda);
    return KERN_OK;
}

kern_status cuda_head_loss_run(const cuda_step *step, const void *args) {
    const kern_head_loss_args *a = (const kern_head_loss_args *)args;
    const kern_weight *w = a->weight.w;
    if (w->rows != a->vocabulary || w->cols != a->width)
        return KERN_INVALID;
    if (w->dtype != KERN_F32 && a->dx.f)
        return KERN_UNSUPPORTED;
    kern_status status = KERN_OK;
    for (int32_t token0 = 0; !status && token0 < step->tokens; token0 += a->tile_tokens) {
        const int32_t left = step->tokens - token0;
        status = run_tile(step, a, token0, left < a->tile_tokens ? left : a->tile_tokens);
    }
    return status;
}

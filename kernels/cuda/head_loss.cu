// SPDX-License-Identifier: Apache-2.0
// Cross entropy of many tokens and its backward, tile by tile of tokens, so that logits are never there whole:
//
//     l = cap(W x),  cap(z) = c tanh(z / c)         loss = log sum e^l - l[target]
//     dl = weight (softmax(l) - onehot) (1 - (l / c)^2)      dx = dl W,  dW += dl^T x
// A tile's logits are one product; a block of threads turns a token's into its loss and, in place, dl; two more
// products read that. Tiles follow one another, so dW is added in the order of tokens. A token without target has loss
// 0 and dl 0; one whose target is no id of the vocabulary, a loss that is not a number. With a teacher its logits l'
// are one more product; with q = softmax(l / T), q' likewise and d = log q' - log q,
//     divergence = T^2 sum q' (d + e^-d - 1)         dl = weight (loss_share (..) + divergence_share T (q - q')) (..)
// which is the usual sum q' d in terms that are never negative and in which an error of the normalisers cancels.
#include "kernels/arguments.h"
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
    __nv_bfloat16 *rounded; // optional: dl also goes there (cuda_copies_offer)
    // of a teacher
    float *teacher; // logits, like the student's; NULL: there is none
    float *divergence;
    float teacher_soft_cap, temperature, inverse; // 1 / temperature
    float loss_share, divergence_share;
};

// Of the logits seen so far: the largest, its first place (-1: no number was larger than -infinity), and the sum of
// e^((l - value) inverse), inverse that of a temperature.
struct logit_sum {
    float value;
    int32_t place;
    float sum;

    __device__ __forceinline__ void take(float l, int32_t i, float inverse) {
        const bool larger = l > value;
        place = larger || (place < 0 && l == value) ? i : place;
        if (larger) {
            sum = fmaf(sum, value > -INFINITY ? expf((value - l) * inverse) : 0.0f, 1.0f);
            value = l;
        } else if (l != -INFINITY) {
            sum += expf((l - value) * inverse);
        }
    }
};

static __device__ __forceinline__ bool is_before(const logit_sum &a, const logit_sum &b) {
    return a.value > b.value || (a.value == b.value && (uint32_t)a.place <= (uint32_t)b.place);
}

// One without a number is 0, and e^0 of the largest is not asked for: infinities have no difference.
static __device__ __forceinline__ double scaled(const logit_sum &s, float top, float inverse) {
    return s.value == top || s.sum == 0 ? (double)s.sum : (double)s.sum * (double)expf((s.value - top) * inverse);
}

// Of the block's threads, warps in order.
static __device__ __forceinline__ double block_sum(double part) {
    __shared__ double sums[THREADS / CUDA_WARP];
#pragma unroll
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
        part += __shfl_xor_sync(0xffffffffu, part, distance);
    if (threadIdx.x % CUDA_WARP == 0)
        sums[threadIdx.x / CUDA_WARP] = part;
    __syncthreads();
    double sum = 0;
    for (int warp = 0; warp < THREADS / CUDA_WARP; warp++)
        sum += sums[warp];
    return sum;
}

// Of the block's threads; *sum is theirs together.
static __device__ __forceinline__ logit_sum block_top(logit_sum own, float inverse, double *sum) {
    __shared__ logit_sum tops[THREADS / CUDA_WARP];
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
    *sum = block_sum(scaled(own, top.value, inverse));
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

// Four of dl as the products take them.
static __device__ __forceinline__ void round_gradient(const loss_job &job, const float *logits, int32_t i,
                                                      const cuda_quad &q) {
    if (job.rounded)
        *(uint2 *)(job.rounded + (logits - job.logits) + i) = cuda_round_quad(q);
}

// Caps the logits in place (cap 0: none); the largest and the sum of all.
static __device__ __forceinline__ logit_sum cap_and_sum(const loss_job &job, float *logits, float cap, float inverse,
                                                        double *sum) {
    logit_sum own = {-INFINITY, -1, 0};
    const auto take = [&](int32_t i, cuda_quad &q) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            q.v[j] = cuda_soft_cap(q.v[j], cap);
            if (i + j < job.vocabulary)
                own.take(q.v[j], i + j, inverse);
        }
    };
    if (cap > 0)
        each_quad<true>(job, logits, take);
    else
        each_quad<false>(job, logits, take);
    return block_top(own, inverse, sum);
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
        round_gradient(job, logits, i, q);
    });
}

// q' (d + e^-d - 1); near 0 by its series, elsewhere with q = q' e^-d.
static __device__ __forceinline__ float divergence_of(float q, float teacher, float d) {
    if (!(fabsf(d) < 0.5f))
        return fmaf(teacher, d - 1.0f, q);
    float series = fmaf(d, -1.0f / 5040, 1.0f / 720);
    series = fmaf(series, d, -1.0f / 120);
    series = fmaf(series, d, 1.0f / 24);
    series = fmaf(series, d, -1.0f / 6);
    series = fmaf(series, d, 0.5f);
    return teacher * (series * d * d);
}

// A token's divergence, and the gradient of both losses in place of its logits. top, sum: of these, at temperature 1.
static __device__ __forceinline__ void distil(const loss_job &job, float *logits, float *teacher, float top, double sum,
                                              float weight, int32_t target, int32_t t) {
    double own = sum, other, total = 0;
    if (job.temperature != 1.0f)
        cap_and_sum(job, logits, 0, job.inverse, &own);
    const float teacher_top = cap_and_sum(job, teacher, job.teacher_soft_cap, job.inverse, &other).value;
    const float scale = (float)(1 / own), teacher_scale = (float)(1 / other), shift = (float)(log(other) - log(own));
    const float inverse_cap = job.soft_cap > 0 ? 1.0f / job.soft_cap : 0.0f, share = weight * job.loss_share;
    const float soft = (float)((double)share / sum), pull = weight * job.divergence_share * job.temperature;
    __syncthreads(); // every thread has what it needs of the logits as they were
    each_quad<false>(job, teacher, [&](int32_t i, cuda_quad &y) {
        cuda_quad x = cuda_load(logits + i, job.vocabulary - i, job.wide);
        float part = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float l = x.v[j] - top, own_power = l * job.inverse, power = (y.v[j] - teacher_top) * job.inverse;
            const float q = expf(own_power) * scale, wanted = expf(power) * teacher_scale;
            const float capped = x.v[j] * inverse_cap, slope = 1.0f - capped * capped;
            part += i + j < job.vocabulary ? divergence_of(q, wanted, power - own_power - shift) : 0.0f;
            x.v[j] = (expf(l) * soft + (q - wanted) * pull - (i + j == target ? share : 0.0f)) * slope;
        }
        total += (double)part;
        if (job.gradient) {
            cuda_store(logits + i, x, job.vocabulary - i, job.wide);
            round_gradient(job, logits, i, x);
        }
    });
    total = block_sum(total);
    if (threadIdx.x == 0)
        job.divergence[t] = (float)((double)job.temperature * (double)job.temperature * total);
}

static __device__ __forceinline__ void no_target(const cuda_table *table, const loss_job &job, float *logits,
                                                 int32_t t) {
    if (threadIdx.x == 0) {
        job.loss[t] = table->target[t] < 0 ? 0.0f : NAN;
        if (job.best)
            job.best[t] = -1;
        if (job.teacher)
            job.divergence[t] = job.loss[t];
    }
    if (job.gradient)
        each_quad<true>(job, logits, [&](int32_t i, cuda_quad &q) {
            q = {};
            round_gradient(job, logits, i, q);
        });
}

template <bool TAUGHT>
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
    const logit_sum top = cap_and_sum(job, logits, job.soft_cap, 1.0f, &sum);
    if (threadIdx.x == 0) {
        job.loss[t] = (float)(log(sum) + (double)top.value - (double)logits[target]);
        if (job.best)
            job.best[t] = top.place;
    }
    const float weight = table->target_weight[t] * (job.factor ? job.factor[t] : 1.0f) * job.scale;
    if (TAUGHT) {
        float *teacher = job.teacher + (int64_t)blockIdx.x * job.vocabulary;
        distil(job, logits, teacher, top.value, sum, weight, target, t);
        return;
    }
    if (!job.gradient)
        return;
    __syncthreads(); // the target's logit has been read
    logits_to_gradient(job, logits, top.value, sum, weight, target);
}

// ----------------------------------------------------------------------------------------------------------- launches

// logits (tokens, vocabulary) = x W^T of a tile.
static kern_status make_logits(const cuda_step *step, const float *x, const kern_weight *w, float *logits,
                               int32_t tokens) {
    const cuda_gemm product = {{x, w->cols, false, false},
                               {w->data, w->cols, false, w->dtype == KERN_BF16},
                               logits,
                               w->rows,
                               tokens,
                               w->rows,
                               w->cols,
                               NULL,
                               NULL,
                               false};
    return cuda_gemm_launch(step, step->cuda->workspace, &product, 1);
}

static loss_job job_of(const kern_head_loss_args *a, int32_t token0) {
    loss_job job = {};
    job.logits = a->tile.f, job.loss = a->loss.f, job.best = a->best.i, job.factor = a->factor.f;
    job.token0 = token0, job.vocabulary = a->vocabulary;
    job.soft_cap = a->soft_cap, job.scale = a->scale == 0 ? 1.0f : a->scale;
    job.gradient = a->dx.f != NULL;
    job.wide = cuda_is_wide(a->tile.p) && a->vocabulary % 4 == 0;
    if (a->teacher_x.f) {
        job.wide = job.wide && cuda_is_wide(a->teacher_tile.p);
        job.teacher = a->teacher_tile.f, job.divergence = a->divergence.f;
        job.teacher_soft_cap = a->teacher_soft_cap;
        job.temperature = a->temperature, job.inverse = 1.0f / a->temperature;
        job.loss_share = a->loss_share, job.divergence_share = a->divergence_share;
    }
    return job;
}

static kern_status run_tile(const cuda_step *step, const kern_head_loss_args *a, int32_t token0, int32_t tokens) {
    const kern_weight *w = a->weight.w;
    char *workspace = step->cuda->workspace;
    const float *x = a->x.f + (int64_t)token0 * a->width;
    float *tile = a->tile.f;
    const int64_t width = a->width, vocabulary = a->vocabulary;
    kern_status status = make_logits(step, x, w, tile, tokens);
    if (!status && a->teacher_x.f)
        status = make_logits(step, a->teacher_x.f + (int64_t)token0 * a->teacher_width, a->teacher_weight.w,
                             a->teacher_tile.f, tokens);
    cuda_copies_written(step, tile, sizeof(float) * (size_t)tokens * (size_t)vocabulary);
    loss_job job = job_of(a, token0);
    if (job.gradient)
        job.rounded = cuda_copies_offer(step, tile, tokens, vocabulary);
    if (!status)
        status = cuda_start(step, a->teacher_x.f ? loss_kernel<true> : loss_kernel<false>, tokens, THREADS, 0,
                            step->table, job);
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
    const kern_status status = kern_head_loss_check(a);
    *workspace_bytes = cuda_gemm_bytes(cuda);
    return status;
}

kern_status cuda_head_loss_run(const cuda_step *step, const void *args) {
    const kern_head_loss_args *a = (const kern_head_loss_args *)args;
    const kern_weight *w = a->weight.w, *teacher = a->teacher_weight.w;
    if (w->rows != a->vocabulary || w->cols != a->width)
        return KERN_INVALID;
    if (teacher && (teacher->rows != a->vocabulary || teacher->cols != a->teacher_width))
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

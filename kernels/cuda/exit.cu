// SPDX-License-Identifier: Apache-2.0
// Exits of looped models: each token's output is read at one of its loops. Threads lie over (T, width); every thread of
// a token finds the loop for itself, from a few logits that lie in the caches.
#include "kernels/arguments.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/exit.cuh"

static __global__ void exit_read_kernel(const cuda_table *table, kern_exit_read_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), column = cuda_plane_column();
    if (t >= table->n_tokens || column >= a.width)
        return;
    const int32_t loop =
        cuda_exit_loop(a.z.f ? a.z.f + t : NULL, a.stride, table->row[table->token_row[t]].exit, a.loops);
    a.y.f[(int64_t)t * a.width + column] = a.x.f[((int64_t)(loop - 1) * a.stride + t) * a.width + column];
    if (column == 0)
        a.loop.i[t] = loop;
}

kern_status cuda_exit_read_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_exit_read_check((const kern_exit_read_args *)args);
}

kern_status cuda_exit_read_run(const cuda_step *step, const void *args) {
    const kern_exit_read_args *a = (const kern_exit_read_args *)args;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
    return cuda_start(step, exit_read_kernel, plane.grid, plane.block, 0, step->table, *a);
}

// -------------------------------------------------------------------------------------------------------------- losses
// In double, from logarithms: ln s(z) = -softplus(-z), so that probabilities near 0 and 1 keep their digits. With
// g_j = dL/dp_j and l = s(z): dp_r/dz_r = p_r (1 - l_r), dp_j/dz_r = -l_r p_j for j > r. A thread owns a token.

enum { LOSS_THREADS = 128 };

static __device__ double softplus(double x) {
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}
static __device__ double logistic(double x) {
    return 1 / (1 + exp(-x));
}

// A token's value of loop r in planes of loops.
struct exit_plane {
    const float *p;
    int64_t stride, t;
    __device__ double at(int32_t r) const { return (double)p[r * stride + t]; }
};

// ln p_r; *left: ln S_{r-1}, then ln S_r.
static __device__ double log_probability(const exit_plane &z, int32_t r, int32_t loops, double *left) {
    const double log_p = *left - (r + 1 < loops ? softplus(-z.at(r)) : 0);
    *left -= softplus(z.at(r));
    return log_p;
}

static __global__ void __launch_bounds__(LOSS_THREADS)
    exit_probability_kernel(const cuda_table *table, const kern_exit_probability_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = (int32_t)(blockIdx.x * LOSS_THREADS + threadIdx.x);
    if (t >= table->n_tokens)
        return;
    const exit_plane z = {a.z.f, a.stride, t};
    double left = 0;
    for (int32_t r = 0; r < a.loops; r++)
        a.p.f[(int64_t)r * a.stride + t] = (float)exp(log_probability(z, r, a.loops, &left));
}

// The losses of one token, its dz in dz (loops, stride) times `weight` (NULL: not wanted).
struct exit_gradient {
    float *dz;
    int64_t stride, t;
    double weight;
    __device__ void set(int32_t r, double value) const {
        if (dz)
            dz[r * stride + t] = (float)(weight * value);
    }
};

static __device__ double weighted(const kern_exit_loss_args &a, const exit_plane &losses) {
    double loss = 0;
    for (int32_t r = 0; r < a.loops; r++)
        if (a.constant[r] != 0)
            loss += (double)a.constant[r] * losses.at(r);
    return loss;
}

static __device__ double expected(const kern_exit_loss_args &a, const exit_plane &losses, const exit_plane &z,
                                  const exit_gradient &dz) {
    const double beta = (double)a.entropy.f[0];
    double loss = 0, behind = 0, left = 0, p[KERN_MAX_LOOPS], g[KERN_MAX_LOOPS];
    for (int32_t r = 0; r < a.loops; r++) {
        const double log_p = log_probability(z, r, a.loops, &left);
        p[r] = exp(log_p);
        const double surprise = p[r] > 0 ? log_p - (double)a.constant[r] : 0;
        loss += p[r] * (losses.at(r) + beta * surprise);
        g[r] = losses.at(r) + beta * (surprise + 1);
    }
    dz.set(a.loops - 1, 0);
    for (int32_t r = a.loops - 1; r-- > 0;) {
        behind += p[r + 1] * g[r + 1];
        dz.set(r, p[r] * logistic(-z.at(r)) * g[r] - logistic(z.at(r)) * behind);
    }
    return loss;
}

// The loops that have a label are [first, first + loops - 1).
static __device__ double improvement(const kern_exit_loss_args &a, const exit_plane &losses, const exit_plane &z,
                                     const exit_gradient &dz) {
    const int32_t first = a.objective == KERN_EXIT_PREVIOUS;
    double loss = 0;
    dz.set(first ? 0 : a.loops - 1, 0);
    for (int32_t i = 0; i + 1 < a.loops; i++) {
        const double gain = losses.at(i) - losses.at(i + 1), logit = z.at(first + i);
        const double goes_on = logistic((double)a.sharpness * ((gain > 0 ? gain : 0) - (double)a.margin));
        loss += (goes_on * softplus(logit) + (1 - goes_on) * softplus(-logit)) / a.loops;
        dz.set(first + i, (logistic(logit) - 1 + goes_on) / a.loops);
    }
    return loss;
}

static __global__ void __launch_bounds__(LOSS_THREADS)
    exit_loss_kernel(const cuda_table *table, const __grid_constant__ kern_exit_loss_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = (int32_t)(blockIdx.x * LOSS_THREADS + threadIdx.x);
    if (t >= table->n_tokens)
        return;
    const exit_plane losses = {a.losses.f, a.stride, t}, z = {a.z.f, a.stride, t};
    const exit_gradient dz = {a.dz.f, a.stride, t, (double)table->target_weight[t]};
    double loss = 0;
    if (table->target[t] < 0 || a.objective == KERN_EXIT_WEIGHTED)
        for (int32_t r = 0; r < a.loops; r++)
            dz.set(r, 0);
    if (table->target[t] >= 0)
        loss = a.objective == KERN_EXIT_WEIGHTED   ? weighted(a, losses)
               : a.objective == KERN_EXIT_EXPECTED ? expected(a, losses, z, dz)
                                                   : improvement(a, losses, z, dz);
    a.loss.f[t] = (float)loss;
}

kern_status cuda_exit_probability_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_exit_probability_check((const kern_exit_probability_args *)args);
}

kern_status cuda_exit_probability_run(const cuda_step *step, const void *args) {
    const kern_exit_probability_args *a = (const kern_exit_probability_args *)args;
    if (step->tokens > a->stride)
        return KERN_INVALID;
    return cuda_start(step, exit_probability_kernel, cuda_blocks(step->tokens, LOSS_THREADS), LOSS_THREADS, 0,
                      step->table, *a);
}

kern_status cuda_exit_loss_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_exit_loss_check((const kern_exit_loss_args *)args);
}

kern_status cuda_exit_loss_run(const cuda_step *step, const void *args) {
    const kern_exit_loss_args *a = (const kern_exit_loss_args *)args;
    if (step->tokens > a->stride)
        return KERN_INVALID;
    return cuda_start(step, exit_loss_kernel, cuda_blocks(step->tokens, LOSS_THREADS), LOSS_THREADS, 0, step->table,
                      *a);
}

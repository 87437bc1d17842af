// SPDX-License-Identifier: Apache-2.0
// Optimizer: AdamW (Loshchilov and Hutter 2019), sum of squares of gradients, scale that clips their norm.
//
//     g = s grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//     p -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p),   c = 1 - b^step
// Rounded to bf16 at random, a float gets 16 random bits added to the 16 that go; compensated, the sum p + rest is what
// is updated, and rest what is left of it.
// The sum of squares is double: each block of SQUARE_BLOCK elements is summed in lanes, then the blocks in order. A
// scale that is not a number says that the step is off. The row table is not used.
#include <float.h>

#include "kernels/cpu/isa/elementwise.h"
#include "kernels/philox.h"

enum { SQUARE_BLOCK = 16384 };

// Half as many lanes, so that a vector of doubles is as wide as a vector of floats.
typedef double vd __attribute__((vector_size(KERN_VL * 4)));
typedef float vh __attribute__((vector_size(KERN_VL * 2)));
typedef float vh_unaligned __attribute__((vector_size(KERN_VL * 2), aligned(4), may_alias));
enum { HALF = KERN_VL / 2 };

// The bf16 number nearest to x, ties to even; what is no number stays so.
static inline vf to_nearest(vf x) {
    const vu bits = (vu)x;
    return vf_select(x == x, (vf)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u), x);
}

static inline vf to_random(const kern_adamw_args *a, int64_t first, vf x) {
    vu random;
    uint32_t word[KERN_VL];
    for (int lane = 0; lane < KERN_VL; lane += 4) {
        const kern_philox quad = kern_philox_rounding(a->seed, (uint64_t)(first + lane) / 4, a->update);
        memcpy(word + lane, quad.word, sizeof quad.word);
    }
    memcpy(&random, word, sizeof random);
    return vf_select(x == x, (vf)(((vu)x + (random >> 16)) & 0xFFFF0000u), x);
}

// Takes a step with KERN_VL weights of a run, from its element i on.
static inline void take_step(const kern_adamw_args *a, const kern_adamw_run *run, int32_t i, vf step) {
    const int64_t left = run->count - i;
    const vf parameter = vf_load_upto(run->parameter + i, left);
    vf next = parameter - a->lr * (step + run->weight_decay * parameter);
    if (a->rounding == KERN_ROUND_STOCHASTIC)
        next = to_random(a, run->first + i, next);
    if (a->rounding == KERN_ROUND_COMPENSATED) {
        const vf rest = vf_load_upto(run->rest + i, left);
        const vf change = rest - a->lr * (step + run->weight_decay * (parameter + rest));
        next = to_nearest(parameter + change);
        vf_store_upto(run->rest + i, (parameter - next) + change, left);
    }
    vf_store_upto(run->parameter + i, next, left);
}

static void update_run(const kern_adamw_args *a, const kern_adamw_run *run, float grad_scale) {
    const float rest1 = 1.0f - a->beta1, rest2 = 1.0f - a->beta2;
    for (int32_t i = 0; i < run->count; i += KERN_VL) {
        const int64_t left = run->count - i;
        vf grad = grad_scale * vf_load_upto(run->grad + i, left);
        vf m = a->beta1 * vf_load_upto(run->m + i, left) + rest1 * grad;
        vf v = a->beta2 * vf_load_upto(run->v + i, left) + rest2 * (grad * grad);
        vf step = (m / a->correction1) / (vf_sqrt(v / a->correction2) + a->eps);
        vf_store_upto(run->m + i, m, left);
        vf_store_upto(run->v + i, v, left);
        take_step(a, run, i, step);
    }
}

static void update_runs(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_adamw_args *a = args;
    const kern_adamw_run *run = a->run.p;
    const float grad_scale = a->grad_scale.f ? a->grad_scale.f[0] : 1.0f;
    for (int64_t r = first; r < end; r++)
        update_run(a, &run[r], grad_scale);
}

static inline vd square_at(const float *x) {
    vd wide = __builtin_convertvector((vh) * (const vh_unaligned *)x, vd);
    return wide * wide;
}

static double square_sum(const float *x, int64_t count) {
    vd sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
    int64_t i = 0;
    for (; i + 4 * HALF <= count; i += 4 * HALF) {
        sum0 += square_at(x + i);
        sum1 += square_at(x + i + HALF);
        sum2 += square_at(x + i + 2 * HALF);
        sum3 += square_at(x + i + 3 * HALF);
    }
    sum0 = (sum0 + sum1) + (sum2 + sum3);
    double total = 0;
    for (int lane = 0; lane < HALF; lane++)
        total += sum0[lane];
    for (; i < count; i++)
        total += (double)x[i] * (double)x[i];
    return total;
}

static int64_t square_blocks(int64_t count) {
    return count / SQUARE_BLOCK + (count % SQUARE_BLOCK != 0);
}

static void square_sum_blocks(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                              int64_t end) {
    (void)rows;
    const kern_square_sum_args *a = args;
    double *partial = (double *)cpu->workspace;
    for (int64_t block = first; block < end; block++) {
        int64_t left = a->count - block * SQUARE_BLOCK;
        partial[block] = square_sum(a->x.f + block * SQUARE_BLOCK, left < SQUARE_BLOCK ? left : SQUARE_BLOCK);
    }
}

// --------------------------------------------------------------------------------------------------------- launchers

KERN_PREPARE(adamw, kern_adamw_args) {
    (void)cpu;
    *thread_bytes = 0;
    const bool corrects = a->correction1 > 0 && a->correction2 > 0;
    const bool rounds = a->rounding >= 0 && a->rounding < KERN_ROUNDINGS;
    return !a->run.ref || a->count < 0 || a->runs < 0 || !corrects || !rounds ? KERN_INVALID : KERN_OK;
}

KERN_RUN(adamw, kern_adamw_args) {
    if (!a->grad_scale.f || !isnan(a->grad_scale.f[0]))
        kern_over(update_runs, cpu, rows, a, a->runs, 15.0 * (double)a->count);
    return KERN_OK;
}

KERN_PREPARE(square_sum, kern_square_sum_args) {
    *thread_bytes = 0;
    if (!a->x.ref || !a->sum.ref || a->count < 0)
        return KERN_INVALID;
    size_t bytes = (size_t)square_blocks(a->count) * sizeof(double);
    *thread_bytes = kern_align64((bytes + (size_t)cpu->threads - 1) / (size_t)cpu->threads);
    return KERN_OK;
}

KERN_RUN(square_sum, kern_square_sum_args) {
    const int64_t blocks = square_blocks(a->count);
    kern_over(square_sum_blocks, cpu, rows, a, blocks, 2.0 * (double)a->count);
    const double *partial = (const double *)cpu->workspace;
    double *sum = a->sum.p;
    for (int64_t block = 0; block < blocks; block++)
        sum[0] += partial[block];
    return KERN_OK;
}

KERN_PREPARE(clip_scale, kern_clip_scale_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->sum.ref && a->scale.ref ? KERN_OK : KERN_INVALID;
}

KERN_RUN(clip_scale, kern_clip_scale_args) {
    (void)cpu;
    (void)rows;
    const double sum = *(const double *)a->sum.p, scale = a->clip > 0 ? a->clip / (sqrt(sum) + 1e-6) : 1.0;
    const bool usable = isfinite(sum) && (a->clip > 0 || sum <= (double)FLT_MAX);
    a->scale.f[0] = !usable ? NAN : scale > 1.0 ? 1.0f : (float)scale;
    return KERN_OK;
}

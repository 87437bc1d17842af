// SPDX-License-Identifier: Apache-2.0
// Exits of looped models: at which loop a token's output is read, and the losses that train the gate.
//
// What is left of the probability after r loops, S_r, is a product of logistic functions; p_1 + ... + p_r = 1 - S_r. A
// logit that is no number never ends a token. Losses are made in double, from logarithms: ln s(z) = -softplus(-z), so
// that probabilities near 0 and 1 keep their digits. With g_j = dL/dp_j and l = s(z):
//   dp_r/dz_r = p_r (1 - l_r),  dp_j/dz_r = -l_r p_j for j > r.
#include "kernels/cpu/isa/exit.h"
#include "kernels/arguments.h"
#include "kernels/cpu/isa/elementwise.h"

static void read_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_exit_read_args *a = args;
    for (int64_t t = first; t < end; t++) {
        const kern_exit *wanted = &rows->row[rows->token_row[t]].exit;
        const int32_t loop = kern_exit_loop(a->z.f ? a->z.f + t : NULL, a->stride, wanted, a->loops);
        const float *x = a->x.f + ((int64_t)(loop - 1) * a->stride + t) * a->width;
        memcpy(a->y.f + t * a->width, x, (size_t)a->width * sizeof *x);
        a->loop.i[t] = loop;
    }
}

KERN_PREPARE(exit_read, kern_exit_read_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_exit_read_check(a);
}

KERN_RUN(exit_read, kern_exit_read_args) {
    if (rows->n_tokens > a->stride)
        return KERN_INVALID;
    kern_over(read_range, cpu, rows, a, rows->n_tokens, 2.0 * rows->n_tokens * a->width);
    return KERN_OK;
}

// -------------------------------------------------------------------------------------------------------------- losses

// Of one token: its plane's logits, ln p and p.
typedef struct exits {
    double z[KERN_MAX_LOOPS], log_p[KERN_MAX_LOOPS], p[KERN_MAX_LOOPS];
} exits;

static double softplus(double x) {
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static double logistic(double x) {
    return 1 / (1 + exp(-x));
}

static void exits_of(const float *z, int32_t loops, int32_t stride, int64_t t, exits *out) {
    double left = 0;
    for (int32_t r = 0; r < loops; r++) {
        out->z[r] = (double)z[(int64_t)r * stride + t];
        out->log_p[r] = left - (r + 1 < loops ? softplus(-out->z[r]) : 0);
        out->p[r] = exp(out->log_p[r]);
        left -= softplus(out->z[r]);
    }
}

static void probability_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                              int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_exit_probability_args *a = args;
    exits own;
    for (int64_t t = first; t < end; t++) {
        exits_of(a->z.f, a->loops, a->stride, t, &own);
        for (int32_t r = 0; r < a->loops; r++)
            a->p.f[(int64_t)r * a->stride + t] = (float)own.p[r];
    }
}

KERN_PREPARE(exit_probability, kern_exit_probability_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_exit_probability_check(a);
}

KERN_RUN(exit_probability, kern_exit_probability_args) {
    if (rows->n_tokens > a->stride)
        return KERN_INVALID;
    kern_over(probability_range, cpu, rows, a, rows->n_tokens, 100.0 * rows->n_tokens * a->loops);
    return KERN_OK;
}

static double weighted(const kern_exit_loss_args *a, int64_t t) {
    double loss = 0;
    for (int32_t r = 0; r < a->loops; r++)
        if (a->constant[r] != 0)
            loss += (double)a->constant[r] * (double)a->losses.f[(int64_t)r * a->stride + t];
    return loss;
}

// dz (loops) at a weight of 1.
static double expected(const kern_exit_loss_args *a, int64_t t, double *dz) {
    const double beta = (double)a->entropy.f[0];
    double loss = 0, behind = 0, g[KERN_MAX_LOOPS];
    exits own;
    exits_of(a->z.f, a->loops, a->stride, t, &own);
    for (int32_t r = 0; r < a->loops; r++) {
        const double own_loss = (double)a->losses.f[(int64_t)r * a->stride + t];
        const double surprise = own.p[r] > 0 ? own.log_p[r] - (double)a->constant[r] : 0;
        loss += own.p[r] * (own_loss + beta * surprise);
        g[r] = own_loss + beta * (surprise + 1);
    }
    dz[a->loops - 1] = 0;
    for (int32_t r = a->loops - 1; r-- > 0;) {
        behind += own.p[r + 1] * g[r + 1];
        dz[r] = own.p[r] * logistic(-own.z[r]) * g[r] - logistic(own.z[r]) * behind;
    }
    return loss;
}

// The loops that have a label are [first, first + loops - 1).
static double improvement(const kern_exit_loss_args *a, int64_t t, double *dz) {
    const int32_t first = a->objective == KERN_EXIT_PREVIOUS;
    double loss = 0;
    memset(dz, 0, sizeof *dz * (size_t)a->loops);
    for (int32_t i = 0; i + 1 < a->loops; i++) {
        const double gain =
            (double)a->losses.f[(int64_t)i * a->stride + t] - (double)a->losses.f[(int64_t)(i + 1) * a->stride + t];
        const double goes_on = logistic((double)a->sharpness * ((gain > 0 ? gain : 0) - (double)a->margin));
        const double z = (double)a->z.f[(int64_t)(first + i) * a->stride + t];
        loss += (goes_on * softplus(z) + (1 - goes_on) * softplus(-z)) / a->loops;
        dz[first + i] = (logistic(z) - 1 + goes_on) / a->loops;
    }
    return loss;
}

static void loss_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_exit_loss_args *a = args;
    for (int64_t t = first; t < end; t++) {
        double dz[KERN_MAX_LOOPS] = {0}, loss = 0;
        if (rows->target[t] >= 0)
            loss = a->objective == KERN_EXIT_WEIGHTED   ? weighted(a, t)
                   : a->objective == KERN_EXIT_EXPECTED ? expected(a, t, dz)
                                                        : improvement(a, t, dz);
        a->loss.f[t] = (float)loss;
        for (int32_t r = 0; a->dz.f && r < a->loops; r++)
            a->dz.f[(int64_t)r * a->stride + t] = (float)((double)rows->target_weight[t] * dz[r]);
    }
}

KERN_PREPARE(exit_loss, kern_exit_loss_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_exit_loss_check(a);
}

KERN_RUN(exit_loss, kern_exit_loss_args) {
    if (rows->n_tokens > a->stride)
        return KERN_INVALID;
    kern_over(loss_range, cpu, rows, a, rows->n_tokens, 300.0 * rows->n_tokens * a->loops);
    return KERN_OK;
}

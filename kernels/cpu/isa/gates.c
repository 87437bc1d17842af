// SPDX-License-Identifier: Apache-2.0
// Gates of a scalar-decay mixer, over (T, heads), element by element (MesaNet, von Oswald et al. 2025):
//
//     beta = s(b)      g = log s(a) + ln(1 - (1 - cap) beta^2)      s the logistic function; last term with cap < 1
//
// log s(a) = min(a, 0) - log1p(e^-|a|), so that a decay close to one keeps its relative accuracy: g is summed over
// long horizons. log1p(z) = 2 atanh(z / (2 + z)) by its series, for |z / (2 + z)| <= 1/3: z in (0, 1], and -z up to
// 1/2, which is why a cap below 1/2 is refused.
// Backward: da = dg s(-a);  db = (dbeta - dg 2 (1 - cap) beta / (1 - (1 - cap) beta^2)) beta s(-b).
#include "kernels/cpu/isa/elementwise.h"

static inline vf log1p_series(vf z) {
    vf ratio = z / (z + 2.0f), square = ratio * ratio;
    vf sum = square * (1.0f / 15) + 1.0f / 13;
    sum = sum * square + 1.0f / 11;
    sum = sum * square + 1.0f / 9;
    sum = sum * square + 1.0f / 7;
    sum = sum * square + 1.0f / 5;
    sum = sum * square + 1.0f / 3;
    return 2.0f * (ratio + ratio * (square * sum));
}

static inline vf log_sigmoid(vf x) {
    vf magnitude = vf_max(x, -x);
    return vf_min(vf_set(0), x) - log1p_series(vf_exp(-magnitude)); // this order lets NaN through
}

static void gates_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_args *a = args;
    const float rest = 1.0f - a->cap;
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf beta = vf_sigmoid(vf_load_upto(a->b.f + i, left));
        vf g = log_sigmoid(vf_load_upto(a->a.f + i, left));
        if (rest > 0)
            g += log1p_series(-rest * (beta * beta));
        vf_store_upto(a->g.f + i, g, left);
        vf_store_upto(a->beta.f + i, beta, left);
    }
}

static void gates_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                 int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_backward_args *a = args;
    const float rest = 1.0f - a->cap;
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf b = vf_load_upto(a->b.f + i, left), beta = vf_sigmoid(b);
        vf dg = vf_load_upto(a->dg.f + i, left), dbeta = vf_load_upto(a->dbeta.f + i, left);
        if (rest > 0)
            dbeta -= dg * (2.0f * rest * beta) / (1.0f - rest * (beta * beta));
        vf da = dg * vf_sigmoid(-vf_load_upto(a->a.f + i, left));
        vf_store_upto(a->da.f + i, da, left);
        vf_store_upto(a->db.f + i, dbeta * beta * vf_sigmoid(-b), left);
    }
}

static kern_status check_gates(int32_t heads, float cap) {
    if (heads < 1 || !(cap > 0 && cap <= 1))
        return KERN_INVALID;
    return cap < 0.5f ? KERN_UNSUPPORTED : KERN_OK;
}

KERN_PREPARE(gates, kern_gates_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->a.ref && a->b.ref && a->g.ref && a->beta.ref ? check_gates(a->heads, a->cap) : KERN_INVALID;
}

KERN_RUN(gates, kern_gates_args) {
    int64_t count = (int64_t)rows->n_tokens * a->heads;
    kern_over(gates_range, cpu, rows, a, count, 110.0 * (double)count);
    return KERN_OK;
}

KERN_PREPARE(gates_backward, kern_gates_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->a.ref && a->b.ref && a->dg.ref && a->dbeta.ref && a->da.ref && a->db.ref;
    return complete ? check_gates(a->heads, a->cap) : KERN_INVALID;
}

KERN_RUN(gates_backward, kern_gates_backward_args) {
    int64_t count = (int64_t)rows->n_tokens * a->heads;
    kern_over(gates_backward_range, cpu, rows, a, count, 110.0 * (double)count);
    return KERN_OK;
}

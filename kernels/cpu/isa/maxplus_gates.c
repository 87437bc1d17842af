// SPDX-License-Identifier: Apache-2.0
// mLSTM's stabilised gates (Beck et al. 2024): i = cap(input), lf = log s(cap(forget)),
//
//     m_t = max(lf_t + m_{t-1}, i_t)      g_t = lf_t + m_{t-1} - m_t      beta_t = e^(i_t - m_t)
// m is 0 before a document, or the slot's. One of g and beta's exponent is exactly 0 at every token.
// Backward, m a constant: di = dbeta beta, dlf = dg, df = dlf s(-f), and 1 - tanh^2 for the cap.
// The scan runs over the tokens of a row, a vector of heads at a time; a row's bits depend on the row alone.
#include "kernels/cpu/isa/activation.h"

typedef struct soft_cap {
    float cap, inverse; // cap 0: none
} soft_cap;

static soft_cap soft_cap_of(float cap) {
    return (soft_cap){cap, cap > 0 ? 1.0f / cap : 0};
}

static inline vf capped(soft_cap c, vf z) {
    return c.cap > 0 ? vf_soft_cap(z, c.cap, c.inverse) : z;
}

// The heads [h, h + left) of one row.
static void scan_row(const kern_maxplus_gates_args *a, const kern_rows *rows, const kern_row *row, int32_t h,
                     int32_t left) {
    const soft_cap cap = soft_cap_of(a->soft_cap);
    float *state = kern_slot_state(rows, a->state, row->slot);
    vf m = state ? vf_load_upto(state + h, left) : vf_set(0);
    for (int32_t t = row->token0; t < row->token0 + row->length; t++) {
        const int64_t at = (int64_t)t * a->heads + h;
        if (rows->token_start[t] == t && t > row->token0)
            m = vf_set(0);
        vf input = capped(cap, vf_load_upto(a->input.f + at, left));
        vf kept = vf_log_sigmoid(capped(cap, vf_load_upto(a->forget.f + at, left))) + m;
        m = vf_max(kept, input);
        vf_store_upto(a->g.f + at, kept - m, left);
        vf_store_upto(a->beta.f + at, vf_exp(input - m), left);
        vf_store_upto(a->m.f + at, m, left);
    }
    if (state)
        vf_store_upto(state + h, m, left);
}

static void maxplus_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    const kern_maxplus_gates_args *a = args;
    for (int64_t r = first; r < end; r++)
        for (int32_t h = 0; h < a->heads; h += KERN_VL)
            scan_row(a, rows, &rows->row[r], h, a->heads - h);
}

// The derivative of the cap.
static inline vf cap_slope(soft_cap c, vf z) {
    if (!(c.cap > 0))
        return vf_set(1);
    vf tanh = vf_tanh(z * c.inverse);
    return (1.0f - tanh) * (1.0f + tanh);
}

static void maxplus_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                   int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_maxplus_gates_backward_args *a = args;
    const soft_cap cap = soft_cap_of(a->soft_cap);
    for (int64_t i = first; i < end; i += KERN_VL) {
        const int64_t left = end - i;
        vf input = vf_load_upto(a->input.f + i, left), forget = vf_load_upto(a->forget.f + i, left);
        vf di = vf_load_upto(a->dbeta.f + i, left) * vf_load_upto(a->beta.f + i, left);
        vf df = vf_load_upto(a->dg.f + i, left) * vf_sigmoid(-capped(cap, forget));
        vf_store_upto(a->dinput.f + i, di * cap_slope(cap, input), left);
        vf_store_upto(a->dforget.f + i, df * cap_slope(cap, forget), left);
    }
}

static bool shape_is_valid(int32_t heads, float cap) {
    return heads >= 1 && cap >= 0 && isfinite(cap);
}

KERN_PREPARE(maxplus_gates, kern_maxplus_gates_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->input.ref && a->forget.ref && a->g.ref && a->beta.ref && a->m.ref;
    return complete && shape_is_valid(a->heads, a->soft_cap) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(maxplus_gates, kern_maxplus_gates_args) {
    const double vectors = (double)rows->n_tokens * ((a->heads + KERN_VL - 1) / KERN_VL);
    kern_over(maxplus_range, cpu, rows, a, rows->n_rows, 150.0 * KERN_VL * vectors);
    return KERN_OK;
}

KERN_PREPARE(maxplus_gates_backward, kern_maxplus_gates_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->input.ref && a->forget.ref && a->beta.ref && a->dg.ref && a->dbeta.ref && a->dinput.ref &&
                    a->dforget.ref && a->dinput.ref != a->dforget.ref && a->dinput.ref != a->dg.ref;
    return complete && shape_is_valid(a->heads, a->soft_cap) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(maxplus_gates_backward, kern_maxplus_gates_backward_args) {
    const int64_t count = (int64_t)rows->n_tokens * a->heads;
    kern_over(maxplus_backward_range, cpu, rows, a, count, 100.0 * (double)count);
    return KERN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// Gates: log decay g (T, heads * channels) and write weight beta (T, heads); the laws stand in kernels.h.
//
// Backward, with s the logistic function, z = a + dt_bias, sp = softplus(z), e = e^A_log:
//     SIGMOID      da = dg s(-a) / divisor, 0 where clamped; with a cap also
//                  dbeta -= dg 2 (1 - cap) beta / (1 - (1 - cap) beta^2)
//     EXPONENTIAL  dz = -dg e s(z)                                     dA_log = sum dg g
//     BOUNDED      u = e z: dz = dg lower s(u) s(-u) e                 dA_log = sum dg lower s(u) s(-u) u
//     STEP         ddt = dbeta - dg e: dz = ddt s(z), 0 where clamped  dA_log = sum dg g
//     da = dz, ddt_bias = sum dz;  db = dbeta factor s(b) s(-b)
// SIGMOID runs element by element; the laws with parameters run token by token, a vector over heads (channels 1) or
// over the channels of a head. Sums over tokens are made in blocks (elementwise.h). Each element is read before it is
// written, so da and db may be dg and dbeta. A cap below 1/2 is refused: log1p's series ends there.
#include "kernels/cpu/isa/activation.h"

// ------------------------------------------------------------------------------------------- laws without parameters

static void sigmoid_decay_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_args *a = args;
    const float scale = 1.0f / a->gates.divisor, rest = 1.0f - a->gates.gamma_cap;
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf g = vf_log_sigmoid(vf_load_upto(a->a.f + i, left)) * scale;
        if (a->gates.clamp_min < 0)
            g = vf_max(vf_set(a->gates.clamp_min), g);
        if (rest > 0) {
            vf beta = vf_sigmoid(vf_load_upto(a->b.f + i, left));
            g += vf_log1p(-rest * (beta * beta));
        }
        vf_store_upto(a->g.f + i, g, left);
    }
}

static void sigmoid_decay_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                         int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_backward_args *a = args;
    const float scale = 1.0f / a->gates.divisor, clamp = a->gates.clamp_min;
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf z = vf_load_upto(a->a.f + i, left);
        vf da = vf_load_upto(a->dg.f + i, left) * vf_sigmoid(-z) * scale;
        if (clamp < 0)
            da = vf_select(vf_log_sigmoid(z) * scale < clamp, vf_set(0), da);
        vf_store_upto(a->da.f + i, da, left);
    }
}

static void write_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_args *a = args;
    const float factor = a->gates.write_factor;
    for (int64_t i = first; i < end; i += KERN_VL) {
        vf beta = vf_set(factor);
        if (a->gates.write_law == KERN_WRITE_LAW_SIGMOID)
            beta = factor * vf_sigmoid(vf_load_upto(a->b.f + i, end - i));
        vf_store_upto(a->beta.f + i, beta, end - i);
    }
}

// Reads dg before sigmoid_decay_backward_range overwrites it.
static void write_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                 int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_backward_args *a = args;
    const float factor = a->gates.write_factor, rest = 1.0f - a->gates.gamma_cap;
    const bool capped = a->gates.decay_law == KERN_DECAY_LAW_SIGMOID && rest > 0;
    for (int64_t i = first; i < end; i += KERN_VL) {
        int64_t left = end - i;
        vf b = vf_load_upto(a->b.f + i, left), beta = vf_sigmoid(b);
        vf dbeta = vf_load_upto(a->dbeta.f + i, left) * factor;
        if (capped)
            dbeta -= vf_load_upto(a->dg.f + i, left) * (2.0f * rest * beta) / (1.0f - rest * (beta * beta));
        vf_store_upto(a->db.f + i, dbeta * beta * vf_sigmoid(-b), left);
    }
}

// ---------------------------------------------------------------------------------------------- laws with parameters

// One vector of gates: z = a + dt_bias, rate = e^A_log. *dt is the step of the law STEP.
static inline vf decay(const kern_gates *f, vf z, vf rate, vf *dt) {
    if (f->decay_law == KERN_DECAY_LAW_BOUNDED)
        return f->lower_bound * vf_sigmoid(rate * z);
    *dt = vf_softplus(z);
    if (f->decay_law == KERN_DECAY_LAW_STEP)
        *dt = vf_min(vf_set(f->step_max), vf_max(vf_set(f->step_min), *dt));
    return -rate * *dt;
}

// e^A_log: with channels 1 of the heads from c on, otherwise what head h found once.
static inline vf rate_at(const kern_gates *f, const float *A_log, vf head_rate, int32_t c, int32_t left) {
    return f->channels == 1 ? vf_exp(vf_load_upto(A_log + c, left)) : head_rate;
}

static void parameter_decay_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                  int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_gates_args *a = args;
    const kern_gates *f = &a->gates;
    const int32_t runs = f->channels == 1 ? 1 : f->heads, run = f->channels == 1 ? f->heads : f->channels;
    for (int64_t t = first; t < end; t++) {
        for (int32_t h = 0; h < runs; h++) {
            const vf head_rate = vf_exp(vf_set(a->A_log.f[h]));
            for (int32_t c = 0; c < run; c += KERN_VL) {
                const int32_t left = run - c, channel = h * run + c;
                const int64_t at = t * runs * run + channel;
                vf z = vf_load_upto(a->a.f + at, left) + vf_load_upto(a->dt_bias.f + channel, left), dt = {0};
                vf g = decay(f, z, rate_at(f, a->A_log.f, head_rate, c, left), &dt);
                vf_store_upto(a->g.f + at, g, left);
                if (f->write_law == KERN_WRITE_LAW_STEP)
                    vf_store_upto(a->beta.f + at, dt, left);
            }
        }
    }
}

// dz of one vector of gates; *dlog = its contribution to A_log's gradient.
static inline vf decay_gradient(const kern_gates *f, vf z, vf rate, vf dg, vf dbeta, vf *dlog) {
    if (f->decay_law == KERN_DECAY_LAW_BOUNDED) {
        vf u = rate * z, du = dg * (f->lower_bound * vf_sigmoid(u) * vf_sigmoid(-u));
        *dlog = du * u;
        return du * rate;
    }
    vf dt = vf_softplus(z), ddt = dbeta - dg * rate, dz = ddt * vf_sigmoid(z);
    if (f->decay_law == KERN_DECAY_LAW_STEP) {
        vi outside = (dt < f->step_min) | (dt > f->step_max);
        dz = vf_select(outside, vf_set(0), dz);
        dt = vf_min(vf_set(f->step_max), vf_max(vf_set(f->step_min), dt));
    }
    *dlog = -dg * rate * dt;
    return dz;
}

static void token_gradients(const kern_gates_backward_args *a, int64_t t, float *sum_log, float *sum_bias) {
    const kern_gates *f = &a->gates;
    const int32_t runs = f->channels == 1 ? 1 : f->heads, run = f->channels == 1 ? f->heads : f->channels;
    for (int32_t h = 0; h < runs; h++) {
        vf head_log = {0}, head_rate = vf_exp(vf_set(a->A_log.f[h]));
        for (int32_t c = 0; c < run; c += KERN_VL) {
            const int32_t left = run - c, channel = h * run + c;
            const int64_t at = t * runs * run + channel;
            vf z = vf_load_upto(a->a.f + at, left) + vf_load_upto(a->dt_bias.f + channel, left), dlog;
            vf rate = rate_at(f, a->A_log.f, head_rate, c, left), dbeta = {0};
            if (f->write_law == KERN_WRITE_LAW_STEP)
                dbeta = vf_load_upto(a->dbeta.f + at, left);
            vf dz = decay_gradient(f, z, rate, vf_load_upto(a->dg.f + at, left), dbeta, &dlog);
            vf_store_upto(a->da.f + at, dz, left);
            vf_store_upto(sum_bias + channel, vf_load_upto(sum_bias + channel, left) + dz, left);
            if (f->channels == 1)
                vf_store_upto(sum_log + c, vf_load_upto(sum_log + c, left) + dlog, left);
            else
                head_log += dlog;
        }
        if (f->channels > 1)
            sum_log[h] += vf_sum(head_log);
    }
}

static int32_t sum_width(const kern_gates *f) {
    return f->heads + f->heads * f->channels;
}

static void parameter_decay_backward_blocks(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                            int64_t end) {
    const kern_gates_backward_args *a = args;
    const int32_t width = sum_width(&a->gates);
    const int64_t tokens = kern_sum_block_tokens(rows->n_tokens);
    for (int64_t block = first; block < end; block++) {
        float *partial = kern_sum_partial(cpu, width, block);
        memset(partial, 0, (size_t)width * sizeof(float));
        int64_t token1 = (block + 1) * tokens < rows->n_tokens ? (block + 1) * tokens : rows->n_tokens;
        for (int64_t t = block * tokens; t < token1; t++)
            token_gradients(a, t, partial, partial + a->gates.heads);
    }
}

static void add_parameter_gradients(const kern_cpu *cpu, const kern_gates_backward_args *a, int64_t blocks) {
    const int32_t width = sum_width(&a->gates), heads = a->gates.heads;
    for (int64_t block = 0; block < blocks; block++) {
        const float *partial = kern_sum_partial(cpu, width, block);
        for (int32_t h = 0; h < heads; h++)
            a->grad_A_log.f[h] += partial[h];
        for (int32_t c = 0; c < width - heads; c++)
            a->grad_dt_bias.f[c] += partial[heads + c];
    }
}

// ---------------------------------------------------------------------------------------------------------- launchers

KERN_PREPARE(gates, kern_gates_args) {
    (void)cpu;
    *thread_bytes = 0;
    return kern_gates_args_check(a);
}

KERN_RUN(gates, kern_gates_args) {
    const kern_gates *f = &a->gates;
    const int64_t writes = (int64_t)rows->n_tokens * f->heads, decays = writes * f->channels;
    if (f->decay_law == KERN_DECAY_LAW_SIGMOID)
        kern_over(sigmoid_decay_range, cpu, rows, a, decays, 60.0 * (double)decays);
    else if (f->decay_law != KERN_DECAY_LAW_NONE)
        kern_over(parameter_decay_range, cpu, rows, a, rows->n_tokens, 90.0 * (double)decays);
    if (f->write_law == KERN_WRITE_LAW_SIGMOID || f->write_law == KERN_WRITE_LAW_CONSTANT)
        kern_over(write_range, cpu, rows, a, writes, 25.0 * (double)writes);
    return KERN_OK;
}

KERN_PREPARE(gates_backward, kern_gates_backward_args) {
    *thread_bytes = 0;
    const kern_status status = kern_gates_backward_args_check(a);
    if (status == KERN_OK && kern_gates_operands_of(&a->gates).parameters)
        *thread_bytes = kern_sum_workspace(cpu, sum_width(&a->gates));
    return status;
}

KERN_RUN(gates_backward, kern_gates_backward_args) {
    const kern_gates *f = &a->gates;
    const int64_t writes = (int64_t)rows->n_tokens * f->heads, decays = writes * f->channels;
    if (f->write_law == KERN_WRITE_LAW_SIGMOID)
        kern_over(write_backward_range, cpu, rows, a, writes, 60.0 * (double)writes);
    if (f->decay_law == KERN_DECAY_LAW_SIGMOID) {
        kern_over(sigmoid_decay_backward_range, cpu, rows, a, decays, 30.0 * (double)decays);
    } else if (f->decay_law != KERN_DECAY_LAW_NONE) {
        int32_t tokens = kern_sum_block_tokens(rows->n_tokens);
        int64_t blocks = (rows->n_tokens + tokens - 1) / tokens;
        kern_over(parameter_decay_backward_blocks, cpu, rows, a, blocks, 100.0 * (double)decays);
        add_parameter_gradients(cpu, a, blocks);
    }
    return KERN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// Each law as a function of one gate and its derivatives by the chain rule.
//
// Decay laws: Mesa and GLA (von Oswald et al. 2025; Yang et al. 2024), Mamba-2 and gated DeltaNet (Dao and Gu 2024),
// Kimi delta attention (bounded).
#include "kernels/ref/gates.h"

#include <math.h>

#include "kernels/ref/activation.h"

// One gate: its log decay, and the derivatives to a (dt_bias has the same) and to A_log.
typedef struct decay {
    double g, da, dA_log;
    double step, step_da; // STEP
} decay;

static decay sigmoid_decay(const kern_gates *f, double a) {
    double g = kern_ref_log_sigmoid(a) / (double)f->divisor;
    if (f->clamp_min < 0 && g < (double)f->clamp_min)
        return (decay){.g = (double)f->clamp_min};
    return (decay){.g = g, .da = kern_ref_sigmoid(-a) / (double)f->divisor};
}

static decay parameter_decay(const kern_gates *f, double z, double A_log) {
    double rate = exp(A_log), step = kern_ref_softplus(z), slope = kern_ref_sigmoid(z);
    if (f->decay_law == KERN_DECAY_LAW_BOUNDED) {
        double s = kern_ref_sigmoid(rate * z), du = (double)f->lower_bound * s * (1 - s);
        return (decay){.g = (double)f->lower_bound * s, .da = du * rate, .dA_log = du * rate * z};
    }
    if (f->decay_law == KERN_DECAY_LAW_STEP && step < (double)f->step_min)
        step = (double)f->step_min, slope = 0;
    if (f->decay_law == KERN_DECAY_LAW_STEP && step > (double)f->step_max)
        step = (double)f->step_max, slope = 0;
    return (decay){.g = -rate * step, .da = -rate * slope, .dA_log = -rate * step, .step = step, .step_da = slope};
}

static decay decay_at(const kern_gates *f, kern_ref_gates_input in, int h, int c) {
    int at = h * f->channels + c;
    if (f->decay_law == KERN_DECAY_LAW_SIGMOID)
        return sigmoid_decay(f, in.a[at]);
    if (f->decay_law == KERN_DECAY_LAW_NONE)
        return (decay){.g = 0};
    return parameter_decay(f, in.a[at] + in.dt_bias[at], in.A_log[h]);
}

static double cap_of(const kern_gates *f) {
    return f->decay_law == KERN_DECAY_LAW_SIGMOID ? 1 - (double)f->gamma_cap : 0;
}

void kern_ref_gates(const kern_gates *f, kern_ref_gates_input in, double *g, double *beta) {
    for (int h = 0; h < f->heads; h++) {
        if (f->write_law == KERN_WRITE_LAW_SIGMOID)
            beta[h] = (double)f->write_factor * kern_ref_sigmoid(in.b[h]);
        if (f->write_law == KERN_WRITE_LAW_CONSTANT)
            beta[h] = (double)f->write_factor;
        if (f->write_law == KERN_WRITE_LAW_STEP)
            beta[h] = decay_at(f, in, h, 0).step;
        for (int c = 0; f->decay_law != KERN_DECAY_LAW_NONE && c < f->channels; c++)
            g[h * f->channels + c] =
                decay_at(f, in, h, c).g + (cap_of(f) > 0 ? log1p(-cap_of(f) * beta[h] * beta[h]) : 0);
    }
}

void kern_ref_gates_backward(const kern_gates *f, kern_ref_gates_input in, const double *dg, const double *dbeta,
                             kern_ref_gates_gradient out) {
    for (int h = 0; h < f->heads; h++) {
        if (f->write_law == KERN_WRITE_LAW_SIGMOID) {
            double s = kern_ref_sigmoid(in.b[h]), factor = (double)f->write_factor, rest = cap_of(f);
            double d = dbeta[h] * factor;
            if (rest > 0)
                d -= dg[h] * 2 * rest * s / (1 - rest * s * s);
            out.db[h] = d * s * (1 - s);
        }
        for (int c = 0; f->decay_law != KERN_DECAY_LAW_NONE && c < f->channels; c++) {
            int at = h * f->channels + c;
            decay d = decay_at(f, in, h, c);
            out.da[at] = dg[at] * d.da;
            if (f->write_law == KERN_WRITE_LAW_STEP)
                out.da[at] += dbeta[h] * d.step_da;
            if (f->decay_law == KERN_DECAY_LAW_SIGMOID)
                continue;
            out.ddt_bias[at] += out.da[at];
            out.dA_log[h] += dg[at] * d.dA_log;
        }
    }
}

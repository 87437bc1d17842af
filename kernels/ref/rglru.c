// SPDX-License-Identifier: Apache-2.0
// RG-LRU (De et al. 2024): a = e^L, L = -8 s(recurrence_gate) softplus(p);
// h_t = a h_{t-1} + sqrt(1 - a^2) s(input_gate) x_t, and at position 0 a = 0 with factor 1.
//
// Backward in reverse: G_t = dh_t + a_{t+1} G_{t+1};  dL = a h_{t-1} G + s x G d sqrt(1 - e^2L)/dL, the root's slope
// 1 / sqrt(max(4 (1 - a^2), 1e-6)) as the public code bounds it; a reset passes nothing to L.
#include "kernels/ref/rglru.h"

#include <math.h>

#include "kernels/ref/activation.h"

static double log_decay(kern_ref_rglru_input in, size_t t) {
    return -8 * kern_ref_sigmoid(in.recurrence_gate[t * in.stride]) * kern_ref_softplus(in.recurrent_param);
}

double kern_ref_rglru(kern_ref_rglru_input in, double before, double *h) {
    for (size_t t = 0; t < in.length; t++) {
        size_t at = t * in.stride;
        double L = log_decay(in, t), gated = kern_ref_sigmoid(in.input_gate[at]) * in.x[at];
        h[at] = t == 0 && in.reset ? gated : exp(L) * before + sqrt(-expm1(2 * L)) * gated;
        before = h[at];
    }
    return before;
}

void kern_ref_rglru_backward(kern_ref_rglru_input in, const double *h, const double *dh, kern_ref_rglru_gradient out) {
    double carried = 0;
    for (size_t t = in.length; t-- > 0;) {
        size_t at = t * in.stride;
        bool reset = t == 0 && in.reset;
        double L = log_decay(in, t), a = exp(L), rest = -expm1(2 * L);
        double input = kern_ref_sigmoid(in.input_gate[at]), r = kern_ref_sigmoid(in.recurrence_gate[at]);
        double G = dh[at] + carried, factor = reset ? 1 : sqrt(rest), dL = 0;
        if (!reset) {
            double before = t > 0 ? h[at - in.stride] : 0;
            dL = a * before * G - input * in.x[at] * G * 2 * a * a / sqrt(4 * rest > 1e-6 ? 4 * rest : 1e-6);
        }
        carried = reset ? 0 : a * G;
        out.dx[at] = G * factor * input;
        out.dinput_gate[at] = G * factor * in.x[at] * input * (1 - input);
        out.drecurrence_gate[at] = -8 * kern_ref_softplus(in.recurrent_param) * dL * r * (1 - r);
        *out.dparam += -8 * r * dL * kern_ref_sigmoid(in.recurrent_param);
    }
}

// SPDX-License-Identifier: Apache-2.0
// m_t = max(lf + m_{t-1}, i), g = lf + m_{t-1} - m_t, beta = e^(i - m_t) with i = cap(input), lf = ln s(cap(forget))
// (Beck et al. 2024), and h = o / d, d = max(|n|, e^-m) + eps or n + eps, n the last column of o.
//
// Backward of the gates with m a constant: d lf = dg, di = dbeta beta. Of the division: do = dh / d,
// dn = -(dh . h) / d times the derivative of d.
#include "kernels/ref/maxplus_gates.h"

#include <math.h>

#include "kernels/ref/activation.h"

double kern_ref_maxplus_gates(const double *input, const double *forget, double cap, double before, double *g,
                              double *beta, double *m, size_t length) {
    for (size_t t = 0; t < length; t++) {
        double i = kern_ref_soft_cap(input[t], cap), kept = kern_ref_log_sigmoid(kern_ref_soft_cap(forget[t], cap));
        m[t] = kept + before > i ? kept + before : i;
        g[t] = kept + before - m[t];
        beta[t] = exp(i - m[t]);
        before = m[t];
    }
    return before;
}

void kern_ref_maxplus_gates_backward(double input, double forget, double cap, double beta, double dg, double dbeta,
                                     double *dinput, double *dforget) {
    *dinput = dbeta * beta * kern_ref_soft_cap_slope(input, cap);
    *dforget = dg * kern_ref_sigmoid(-kern_ref_soft_cap(forget, cap)) * kern_ref_soft_cap_slope(forget, cap);
}

static double divisor(double n, const double *m, double eps, double *slope) {
    *slope = 1;
    if (!m)
        return n + eps;
    double floor = exp(-*m);
    *slope = fabs(n) < floor ? 0 : n < 0 ? -1 : 1;
    return (fabs(n) < floor ? floor : fabs(n)) + eps;
}

void kern_ref_normalise(const double *o, const double *m, double eps, double *h, size_t width) {
    double slope, d = divisor(o[width], m, eps, &slope);
    for (size_t i = 0; i < width; i++)
        h[i] = o[i] / d;
}

void kern_ref_normalise_backward(const double *o, const double *m, double eps, const double *dh, double *d_o,
                                 size_t width) {
    double slope, d = divisor(o[width], m, eps, &slope);
    d_o[width] = 0;
    for (size_t i = 0; i < width; i++) {
        d_o[i] = dh[i] / d;
        d_o[width] -= dh[i] * o[i] / (d * d) * slope;
    }
}

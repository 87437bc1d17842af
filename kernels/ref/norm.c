// SPDX-License-Identifier: Apache-2.0
// RMSNorm (Zhang and Sennrich 2019): y_i = u_i r (w_i + offset) [act(z_i)], r = (sum u^2 / n + eps)^-1/2 with u = x,
// or x act(z) and no factor after (gate first), less its mean (center, Ba et al. 2016).
// L2: y = x r, r = (sum x^2 + eps)^-1/2.
//
// Backward by the chain rule, written out: y_i depends on u_i directly and on every u through r, with
// dr/du_i = -r^3 u_i / n (RMS) and -r^3 x_i (L2); the mean takes the mean of the gradient out.
#include "kernels/ref/norm.h"

#include <math.h>

#include "kernels/ref/activation.h"

// act(z_i) where the gate stands behind the norm, and where it stands before it; 1 otherwise.
static double gate_after(kern_ref_norm norm, const double *gate, size_t i) {
    return gate && !norm.gate_first ? kern_ref_activation(norm.activation, gate[i]) : 1;
}
static double gate_before(kern_ref_norm norm, const double *gate, size_t i) {
    return gate && norm.gate_first ? kern_ref_activation(norm.activation, gate[i]) : 1;
}

static double factor(kern_ref_norm norm, const double *weight, size_t i) {
    return weight ? weight[i] + norm.weight_offset : 1;
}

static double mean_of(kern_ref_norm norm, const double *x, const double *gate) {
    double mean = 0;
    for (size_t i = 0; norm.center && i < norm.width; i++)
        mean += x[i] * gate_before(norm, gate, i) / (double)norm.width;
    return mean;
}

static double inverse_deviation(kern_ref_norm norm, const double *x, const double *gate, double mean) {
    double sum = 0;
    for (size_t i = 0; i < norm.width; i++)
        sum += pow(x[i] * gate_before(norm, gate, i) - mean, 2);
    return 1 / sqrt(sum / (double)norm.width + norm.eps);
}

void kern_ref_rmsnorm(kern_ref_norm norm, const double *x, const double *weight, const double *gate, double *y) {
    double mean = mean_of(norm, x, gate), r = inverse_deviation(norm, x, gate, mean);
    for (size_t i = 0; i < norm.width; i++)
        y[i] = (x[i] * gate_before(norm, gate, i) - mean) * r * factor(norm, weight, i) * gate_after(norm, gate, i);
}

void kern_ref_rmsnorm_backward(kern_ref_norm norm, const double *x, const double *weight, const double *gate,
                               const double *dy, double *dx, double *dgate, double *dweight) {
    double mean = mean_of(norm, x, gate), r = inverse_deviation(norm, x, gate, mean), dr = 0, dmean = 0;
    double n = (double)norm.width;
    for (size_t i = 0; i < norm.width; i++) {
        double u = x[i] * gate_before(norm, gate, i) - mean, h = dy[i] * factor(norm, weight, i);
        dr += h * u * gate_after(norm, gate, i);
        if (dweight)
            dweight[i] += dy[i] * u * r * gate_after(norm, gate, i);
        if (dgate && !norm.gate_first)
            dgate[i] = h * u * r * kern_ref_activation_slope(norm.activation, gate[i]);
    }
    for (size_t i = 0; i < norm.width; i++) {
        double u = x[i] * gate_before(norm, gate, i) - mean;
        dx[i] = dy[i] * r * factor(norm, weight, i) * gate_after(norm, gate, i) - dr * r * r * r * u / n;
        dmean += dx[i] / n;
    }
    for (size_t i = 0; i < norm.width; i++) {
        double du = norm.center ? dx[i] - dmean : dx[i];
        if (dgate && norm.gate_first)
            dgate[i] = du * x[i] * kern_ref_activation_slope(norm.activation, gate[i]);
        dx[i] = du * gate_before(norm, gate, i);
    }
}

static double inverse_length(const double *x, size_t width, double eps) {
    double sum = 0;
    for (size_t i = 0; i < width; i++)
        sum += x[i] * x[i];
    return 1 / sqrt(sum + eps);
}

void kern_ref_l2norm(const double *x, double *y, size_t width, double eps) {
    double r = inverse_length(x, width, eps);
    for (size_t i = 0; i < width; i++)
        y[i] = x[i] * r;
}

void kern_ref_l2norm_backward(const double *x, const double *dy, double *dx, size_t width, double eps) {
    double r = inverse_length(x, width, eps), dr = 0;
    for (size_t i = 0; i < width; i++)
        dr += dy[i] * x[i];
    for (size_t i = 0; i < width; i++)
        dx[i] = dy[i] * r - dr * r * r * r * x[i];
}

// SPDX-License-Identifier: Apache-2.0
// RMSNorm (Zhang and Sennrich 2019): y_i = x_i r (w_i + offset) [silu(z_i)], r = (sum x^2 / n + eps)^-1/2.
// L2: y = x r, r = (sum x^2 + eps)^-1/2.
//
// Backward by the chain rule, written out: y_i depends on x_i directly and on every x through r, with
// dr/dx_i = -r^3 x_i / n (RMS) and -r^3 x_i (L2).
#include "kernels/ref/norm.h"

#include <math.h>

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static double silu(double x) {
    return x * sigmoid(x);
}

static double silu_slope(double x) {
    double s = sigmoid(x);
    return s + x * s * (1 - s);
}

static double inverse_root(const double *x, size_t width, double divisor, double eps) {
    double sum = 0;
    for (size_t i = 0; i < width; i++)
        sum += x[i] * x[i];
    return 1 / sqrt(sum / divisor + eps);
}

void kern_ref_rmsnorm(const double *x, const double *weight, const double *gate, double *y, size_t width, double eps,
                      double weight_offset) {
    double r = inverse_root(x, width, (double)width, eps);
    for (size_t i = 0; i < width; i++)
        y[i] = x[i] * r * (weight[i] + weight_offset) * (gate ? silu(gate[i]) : 1);
}

void kern_ref_rmsnorm_backward(const double *x, const double *weight, const double *gate, const double *dy, double *dx,
                               double *dgate, double *dweight, size_t width, double eps, double weight_offset) {
    double r = inverse_root(x, width, (double)width, eps), dr = 0;
    for (size_t i = 0; i < width; i++)
        dr += dy[i] * x[i] * (weight[i] + weight_offset) * (gate ? silu(gate[i]) : 1);
    for (size_t i = 0; i < width; i++) {
        double w = weight[i] + weight_offset, z = gate ? silu(gate[i]) : 1;
        if (dgate)
            dgate[i] = dy[i] * x[i] * r * w * silu_slope(gate[i]);
        dweight[i] += dy[i] * x[i] * r * z;
        dx[i] = dy[i] * r * w * z - dr * r * r * r * x[i] / (double)width;
    }
}

void kern_ref_l2norm(const double *x, double *y, size_t width, double eps) {
    double r = inverse_root(x, width, 1, eps);
    for (size_t i = 0; i < width; i++)
        y[i] = x[i] * r;
}

void kern_ref_l2norm_backward(const double *x, const double *dy, double *dx, size_t width, double eps) {
    double r = inverse_root(x, width, 1, eps), dr = 0;
    for (size_t i = 0; i < width; i++)
        dr += dy[i] * x[i];
    for (size_t i = 0; i < width; i++)
        dx[i] = dy[i] * r - dr * r * r * r * x[i];
}

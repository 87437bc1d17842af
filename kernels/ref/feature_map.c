// SPDX-License-Identifier: Apache-2.0
// Hedgehog (Zhang et al. 2024): softmax of [2 z, -2 z]. DPFP with nu = 4 (Schlag et al. 2021) as
// flash-linear-attention has it: p = [relu(z), -relu(z)], features p_i p_{i - j}, indices modulo 2 width. Sum:
// z / (sum z + eps).
//
// Backward by the chain rule, one product at a time.
#include "kernels/ref/feature_map.h"

#include <math.h>

// e_i / sum e of the 2 width exponents.
static double hedgehog_at(const double *z, int i, int width) {
    double sum = 0, own = i < width ? 2 * z[i] : -2 * z[i - width];
    for (int j = 0; j < width; j++)
        sum += exp(2 * z[j] - own) + exp(-2 * z[j] - own);
    return 1 / sum;
}

static double dpfp_part(const double *z, int i, int width) {
    double part = z[i % width] > 0 ? z[i % width] : 0;
    return i < width ? part : -part;
}

static double sum_of(const double *z, int width) {
    double sum = 0;
    for (int i = 0; i < width; i++)
        sum += z[i];
    return sum;
}

// The index j places to the left of i.
static int rolled(int i, int j, int width) {
    return ((i - j) % (2 * width) + 2 * width) % (2 * width);
}

void kern_ref_feature_map(int feature, const double *z, double eps, double *y, int width) {
    for (int i = 0; feature == KERN_FEATURE_HEDGEHOG && i < 2 * width; i++)
        y[i] = hedgehog_at(z, i, width);
    for (int j = 1; feature == KERN_FEATURE_DPFP && j <= 4; j++)
        for (int i = 0; i < 2 * width; i++)
            y[(j - 1) * 2 * width + i] = dpfp_part(z, i, width) * dpfp_part(z, rolled(i, j, width), width);
    for (int i = 0; feature == KERN_FEATURE_SUM && i < width; i++)
        y[i] = z[i] / (sum_of(z, width) + eps);
}

// d of the part p_i goes to z with the sign of the part.
static void add_to_part(const double *z, int i, double d, double *dz, int width) {
    if (z[i % width] > 0)
        dz[i % width] += i < width ? d : -d;
}

void kern_ref_feature_map_backward(int feature, const double *z, double eps, const double *dy, double *dz, int width) {
    double mean = 0, divisor = sum_of(z, width) + eps;
    for (int i = 0; i < width; i++)
        dz[i] = 0;
    for (int i = 0; feature == KERN_FEATURE_HEDGEHOG && i < 2 * width; i++)
        mean += dy[i] * hedgehog_at(z, i, width);
    for (int i = 0; feature == KERN_FEATURE_HEDGEHOG && i < 2 * width; i++)
        dz[i % width] += (i < width ? 2 : -2) * hedgehog_at(z, i, width) * (dy[i] - mean);
    for (int j = 1; feature == KERN_FEATURE_DPFP && j <= 4; j++)
        for (int i = 0; i < 2 * width; i++) {
            double d = dy[(j - 1) * 2 * width + i];
            int other = rolled(i, j, width);
            add_to_part(z, i, d * dpfp_part(z, other, width), dz, width);
            add_to_part(z, other, d * dpfp_part(z, i, width), dz, width);
        }
    for (int i = 0; feature == KERN_FEATURE_SUM && i < width; i++)
        for (int j = 0; j < width; j++)
            dz[i] += dy[j] * ((i == j ? 1 / divisor : 0) - z[j] / (divisor * divisor));
}

// SPDX-License-Identifier: Apache-2.0
// Activations and the functions that gates are made of, as they are defined.
//
// ln s(z) = -log1p(e^-z) = z - log1p(e^z) and softplus(z) = -ln s(-z): the one of the two forms whose exponential does
// not overflow. gelu_tanh(z) = z (1 + tanh u) / 2, u = sqrt(2 / pi) (z + 0.044715 z^3) (Hendrycks and Gimpel 2016).
#include "kernels/ref/activation.h"

#include <math.h>

double kern_ref_sigmoid(double z) {
    return 1 / (1 + exp(-z));
}

double kern_ref_log_sigmoid(double z) {
    return z > 0 ? -log1p(exp(-z)) : z - log1p(exp(z));
}

double kern_ref_softplus(double z) {
    return -kern_ref_log_sigmoid(-z);
}

double kern_ref_soft_cap(double z, double cap) {
    return cap > 0 ? cap * tanh(z / cap) : z;
}

double kern_ref_soft_cap_slope(double z, double cap) {
    return cap > 0 ? 1 / (cosh(z / cap) * cosh(z / cap)) : 1;
}

static double gelu_argument(double z) {
    return sqrt(2 / acos(-1)) * (z + 0.044715 * z * z * z);
}

double kern_ref_activation(int activation, double z) {
    switch (activation) {
    case KERN_SILU:
        return z * kern_ref_sigmoid(z);
    case KERN_SIGMOID:
        return kern_ref_sigmoid(z);
    case KERN_RELU:
        return z > 0 ? z : 0;
    case KERN_ELU1:
        return z > 0 ? z + 1 : exp(z);
    case KERN_GELU_TANH:
        return 0.5 * z * (1 + tanh(gelu_argument(z)));
    default:
        return z;
    }
}

double kern_ref_activation_slope(int activation, double z) {
    double s = kern_ref_sigmoid(z), t = tanh(gelu_argument(z));
    switch (activation) {
    case KERN_SILU:
        return s + z * s * (1 - s);
    case KERN_SIGMOID:
        return s * (1 - s);
    case KERN_RELU:
        return z > 0 ? 1 : 0;
    case KERN_ELU1:
        return z > 0 ? 1 : exp(z);
    case KERN_GELU_TANH:
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * sqrt(2 / acos(-1)) * (1 + 3 * 0.044715 * z * z);
    default:
        return 1;
    }
}

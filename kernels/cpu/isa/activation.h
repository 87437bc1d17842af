// SPDX-License-Identifier: Apache-2.0
// The activations of kern_activation and what they are made of, on vectors of floats.
//
//     log s(z) = min(z, 0) - log1p(e^-|z|)         softplus(z) = max(z, 0) + log1p(e^-|z|)
//     cap(z) = c tanh(z / c),  tanh(z) = -e / (2 + e) with e = expm1(-2 |z|), the sign of z
// Each keeps its relative accuracy where its result is small, because decays are summed over long horizons. `kind` is a
// constant where speed matters: KERN_ACTIVATION_SWITCH makes one loop of each.
#ifndef KERNELS_CPU_ISA_ACTIVATION_H
#define KERNELS_CPU_ISA_ACTIVATION_H

#include "kernels/cpu/isa/elementwise.h"

// log1p(z) = 2 atanh(z / (2 + z)) by its series, for |z / (2 + z)| <= 1/3: z in [-1/2, 1].
static inline vf vf_log1p(vf z) {
    vf ratio = z / (z + 2.0f), square = ratio * ratio;
    vf sum = square * (1.0f / 15) + 1.0f / 13;
    sum = sum * square + 1.0f / 11;
    sum = sum * square + 1.0f / 9;
    sum = sum * square + 1.0f / 7;
    sum = sum * square + 1.0f / 5;
    sum = sum * square + 1.0f / 3;
    return 2.0f * (ratio + ratio * (square * sum));
}

// The order of operands in the minima and maxima below lets NaN through.
static inline vf vf_log_sigmoid(vf z) {
    return vf_min(vf_set(0), z) - vf_log1p(vf_exp(-vf_max(z, -z)));
}
static inline vf vf_softplus(vf z) {
    return vf_max(vf_set(0), z) + vf_log1p(vf_exp(-vf_max(z, -z)));
}

// e^z - 1 for z <= 0: 2^n (e^r - 1) + (2^n - 1) with the polynomial of vf_exp.
static inline vf vf_expm1_negative(vf z) {
    z = vf_max(vf_set(-87.0f), z);
    vf shifted = z * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    vf r = z - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = vf_set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return scale * p + (scale - 1.0f);
}

static inline vf vf_tanh(vf z) {
    vf e = vf_expm1_negative(-2.0f * vf_max(-z, z));
    return (vf)((vi)(-e / (2.0f + e)) | ((vi)z & (vi)vf_set(-0.0f)));
}

// cap(z); inverse = 1 / cap.
static inline vf vf_soft_cap(vf z, float cap, float inverse) {
    return cap * vf_tanh(z * inverse);
}

static inline vf gelu_argument(vf z) { // 2 u
    return 1.5957691216f * (z + 0.044715f * (z * z * z));
}

static inline __attribute__((always_inline)) vf vf_activation(int kind, vf z) {
    switch (kind) {
    case KERN_SILU:
        return z * vf_sigmoid(z);
    case KERN_SIGMOID:
        return vf_sigmoid(z);
    case KERN_RELU:
        return vf_max(vf_set(0), z);
    case KERN_ELU1:
        return vf_select(z > 0, z + 1.0f, vf_exp(z));
    case KERN_GELU_TANH:
        return z * vf_sigmoid(gelu_argument(z));
    default:
        return z;
    }
}

// The derivative; *value = act(z).
static inline __attribute__((always_inline)) vf vf_activation_slope(int kind, vf z, vf *value) {
    vf s;
    switch (kind) {
    case KERN_SILU:
        s = vf_sigmoid(z);
        *value = z * s;
        return s * (1.0f + z * (1.0f - s));
    case KERN_SIGMOID:
        s = vf_sigmoid(z);
        *value = s;
        return s * (1.0f - s);
    case KERN_RELU:
        *value = vf_max(vf_set(0), z);
        return vf_select(z > 0, vf_set(1), vf_set(0));
    case KERN_ELU1:
        s = vf_exp(z);
        *value = vf_select(z > 0, z + 1.0f, s);
        return vf_select(z > 0, vf_set(1), s);
    case KERN_GELU_TANH:
        s = vf_sigmoid(gelu_argument(z));
        *value = z * s;
        return s + *value * (1.0f - s) * (1.5957691216f * (1.0f + 3 * 0.044715f * (z * z)));
    default:
        *value = z;
        return vf_set(1);
    }
}

// CALL(kind) with a constant kind.
#define KERN_ACTIVATION_SWITCH(kind, CALL) \
    switch (kind) {                        \
    case KERN_SILU:                        \
        CALL(KERN_SILU);                   \
        break;                             \
    case KERN_SIGMOID:                     \
        CALL(KERN_SIGMOID);                \
        break;                             \
    case KERN_RELU:                        \
        CALL(KERN_RELU);                   \
        break;                             \
    case KERN_ELU1:                        \
        CALL(KERN_ELU1);                   \
        break;                             \
    case KERN_GELU_TANH:                   \
        CALL(KERN_GELU_TANH);              \
        break;                             \
    default:                               \
        CALL(KERN_IDENTITY);               \
        break;                             \
    }

#endif

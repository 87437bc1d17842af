// SPDX-License-Identifier: Apache-2.0
// Rotary embedding (Su et al. 2021), gated product (Shazeer 2020), embedding, AdamW (Loshchilov and Hutter 2019,
// algorithm 2).
//
// The rotation is orthogonal, so its backward is the rotation back.
#include "kernels/ref/elementwise.h"

#include <math.h>

#include "kernels/ref/activation.h"

void kern_ref_rope(double *x, const double *frequency, size_t rotary, int64_t position, double sign) {
    size_t half = rotary / 2;
    for (size_t i = 0; i < half; i++) {
        double angle = sign * (double)position * frequency[i], low = x[i], high = x[i + half];
        x[i] = low * cos(angle) - high * sin(angle);
        x[i + half] = high * cos(angle) + low * sin(angle);
    }
}

double kern_ref_glu(int activation, double gate, double up) {
    return kern_ref_activation(activation, gate) * up;
}

void kern_ref_glu_backward(int activation, double gate, double up, double dy, double *dgate, double *dup) {
    *dgate = dy * up * kern_ref_activation_slope(activation, gate);
    *dup = dy * kern_ref_activation(activation, gate);
}

void kern_ref_embed(const double *weight, int32_t id, double scale, double *y, size_t width) {
    for (size_t i = 0; i < width; i++)
        y[i] = scale * weight[(size_t)id * width + i];
}

void kern_ref_embed_backward(const double *dy, int32_t id, double scale, double *grad, size_t width) {
    for (size_t i = 0; i < width; i++)
        grad[(size_t)id * width + i] += scale * dy[i];
}

void kern_ref_adamw_step(kern_ref_adamw adamw, double grad, double *parameter, double *m, double *v) {
    *m = adamw.beta1 * *m + (1 - adamw.beta1) * grad;
    *v = adamw.beta2 * *v + (1 - adamw.beta2) * grad * grad;
    double m_corrected = *m / (1 - pow(adamw.beta1, (double)adamw.step));
    double v_corrected = *v / (1 - pow(adamw.beta2, (double)adamw.step));
    *parameter -= adamw.lr * (m_corrected / (sqrt(v_corrected) + adamw.eps) + adamw.weight_decay * *parameter);
}

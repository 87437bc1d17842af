// SPDX-License-Identifier: Apache-2.0
// The output head in double precision, token by token.
//
// loss = log sum_i e^l_i - l_target with the largest logit taken off first; its gradient in l is (softmax - onehot),
// times the derivative 1 - (l / cap)^2 of the soft cap, times the token's weight.
#include "kernels/ref/head.h"

#include <math.h>
#include <stdlib.h>

static double cap(double logit, double soft_cap) {
    return soft_cap > 0 ? soft_cap * tanh(logit / soft_cap) : logit;
}

void kern_ref_head_logits(int tokens, int vocabulary, int width, double soft_cap, const double *x, const double *weight,
                          double *logits) {
    for (int t = 0; t < tokens; t++) {
        for (int id = 0; id < vocabulary; id++) {
            double sum = 0;
            for (int k = 0; k < width; k++)
                sum += weight[(size_t)id * width + k] * x[(size_t)t * width + k];
            logits[(size_t)t * vocabulary + id] = cap(sum, soft_cap);
        }
    }
}

static double log_sum_exp(const double *logits, int vocabulary) {
    double top = logits[0], sum = 0;
    for (int id = 1; id < vocabulary; id++)
        top = fmax(top, logits[id]);
    for (int id = 0; id < vocabulary; id++)
        sum += exp(logits[id] - top);
    return top + log(sum);
}

void kern_ref_head_loss(int tokens, int vocabulary, int width, double soft_cap, const double *x, const double *weight,
                        const int *target, const double *target_weight, double *loss, double *dx, double *grad_weight) {
    double *logits = malloc((size_t)vocabulary * sizeof *logits);
    for (int t = 0; t < tokens; t++) {
        const double *x_t = x + (size_t)t * width;
        loss[t] = 0;
        for (int k = 0; dx && k < width; k++)
            dx[(size_t)t * width + k] = 0;
        if (target[t] < 0)
            continue;
        kern_ref_head_logits(1, vocabulary, width, soft_cap, x_t, weight, logits);
        double lse = log_sum_exp(logits, vocabulary);
        loss[t] = lse - logits[target[t]];
        for (int id = 0; dx && id < vocabulary; id++) {
            double d = target_weight[t] * (exp(logits[id] - lse) - (id == target[t]));
            if (soft_cap > 0)
                d *= 1 - (logits[id] / soft_cap) * (logits[id] / soft_cap);
            for (int k = 0; k < width; k++) {
                dx[(size_t)t * width + k] += d * weight[(size_t)id * width + k];
                grad_weight[(size_t)id * width + k] += d * x_t[k];
            }
        }
    }
    free(logits);
}

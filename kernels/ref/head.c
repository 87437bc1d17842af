// SPDX-License-Identifier: Apache-2.0
// The output head in double precision, token by token.
//
// loss = log sum_i e^l_i - l_target with the largest logit taken off first; its gradient in l is (softmax - onehot),
// times the derivative 1 - (l / cap)^2 of the soft cap, times the token's weight. The divergence's is T (q - q'), of
// the softmax at temperature T.
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

static void log_probabilities(const kern_ref_head *head, int t, int vocabulary, double temperature, double *logits,
                              double *log_p) {
    kern_ref_head_logits(1, vocabulary, head->width, head->soft_cap, head->x + (size_t)t * head->width, head->weight,
                         logits);
    for (int id = 0; id < vocabulary; id++)
        log_p[id] = logits[id] / temperature;
    const double lse = log_sum_exp(log_p, vocabulary);
    for (int id = 0; id < vocabulary; id++)
        log_p[id] -= lse;
}

void kern_ref_head_divergence(int tokens, int vocabulary, const kern_ref_head *head, const kern_ref_head *teacher,
                              double temperature, const int *target, const double *target_weight, double *divergence,
                              double *dx, double *grad_weight) {
    const double cap = head->soft_cap;
    double *logits = malloc(4 * (size_t)vocabulary * sizeof *logits), *log_q = logits + vocabulary;
    double *others = log_q + vocabulary, *log_p = others + vocabulary;
    for (int t = 0; t < tokens; t++) {
        divergence[t] = 0;
        if (target[t] < 0)
            continue;
        log_probabilities(head, t, vocabulary, temperature, logits, log_q);
        log_probabilities(teacher, t, vocabulary, temperature, others, log_p);
        for (int id = 0; id < vocabulary; id++) {
            const double p = exp(log_p[id]), pull = temperature * (exp(log_q[id]) - p);
            const double slope = cap > 0 ? 1 - logits[id] / cap * (logits[id] / cap) : 1;
            divergence[t] += temperature * temperature * p * (log_p[id] - log_q[id]);
            for (int k = 0; dx && k < head->width; k++) {
                const size_t at = (size_t)t * head->width + k, weight = (size_t)id * head->width + k;
                dx[at] += target_weight[t] * pull * slope * head->weight[weight];
                grad_weight[weight] += target_weight[t] * pull * slope * head->x[at];
            }
        }
    }
    free(logits);
}

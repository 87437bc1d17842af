// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention in double precision, token by token and head by head.
//
// models.md 9: o_t = sum_j softmax_j(scale q_t . k_j) v_j over the keys that token t sees; query head h reads the key
// head h / (heads / kv_heads). The backward makes the probabilities again and adds into dk and dv in the order of
// tokens.
#include "kernels/ref/attention.h"

#include <math.h>
#include <stdlib.h>

static const double *vector_at(const double *x, int heads, int width, int token, int head) {
    return x + ((long)token * heads + head) * width;
}

static double dot(const double *x, const double *y, int width) {
    double sum = 0;
    for (int c = 0; c < width; c++)
        sum += x[c] * y[c];
    return sum;
}

// p[first .. token] of one token and head; returns the log of the sum of exponentials.
static double softmax(const kern_ref_attention *s, int token, int head, const double *q, const double *k, double *p,
                      int *first) {
    const int kv_head = head / (s->heads / s->kv_heads);
    const double *q_t = vector_at(q, s->heads, s->width, token, head);
    double top = -INFINITY, sum = 0;
    *first = s->window > 0 && token >= s->window ? token - s->window + 1 : 0;
    for (int j = *first; j <= token; j++) {
        p[j] = s->scale * dot(q_t, vector_at(k, s->kv_heads, s->width, j, kv_head), s->width);
        top = fmax(top, p[j]);
    }
    for (int j = *first; j <= token; j++)
        sum += p[j] = exp(p[j] - top);
    for (int j = *first; j <= token; j++)
        p[j] /= sum;
    return top + log(sum);
}

void kern_ref_attention_forward(const kern_ref_attention *s, int tokens, const double *q, const double *k,
                                const double *v, double *o, double *lse) {
    double *p = malloc((size_t)tokens * sizeof *p);
    for (int t = 0; t < tokens; t++) {
        for (int h = 0; h < s->heads; h++) {
            double *o_t = o + ((long)t * s->heads + h) * s->width;
            int first;
            double log_sum = softmax(s, t, h, q, k, p, &first);
            if (lse)
                lse[t * s->heads + h] = log_sum;
            for (int c = 0; c < s->width; c++)
                o_t[c] = 0;
            for (int j = first; j <= t; j++)
                for (int c = 0; c < s->width; c++)
                    o_t[c] += p[j] * vector_at(v, s->kv_heads, s->width, j, h / (s->heads / s->kv_heads))[c];
        }
    }
    free(p);
}

void kern_ref_attention_backward(const kern_ref_attention *s, int tokens, const double *q, const double *k,
                                 const double *v, const double *d_o, double *dq, double *dk, double *dv) {
    const int width = s->width, group = s->heads / s->kv_heads;
    double *p = malloc((size_t)tokens * sizeof *p), *dp = malloc((size_t)tokens * sizeof *dp);
    for (long i = 0; i < (long)tokens * s->heads * width; i++)
        dq[i] = 0;
    for (long i = 0; i < (long)tokens * s->kv_heads * width; i++)
        dk[i] = dv[i] = 0;
    for (int t = 0; t < tokens; t++) {
        for (int h = 0; h < s->heads; h++) {
            const double *do_t = vector_at(d_o, s->heads, width, t, h), *q_t = vector_at(q, s->heads, width, t, h);
            double mean = 0; // sum_j p_j dp_j
            int first;
            softmax(s, t, h, q, k, p, &first);
            for (int j = first; j <= t; j++) {
                dp[j] = dot(do_t, vector_at(v, s->kv_heads, width, j, h / group), width);
                mean += p[j] * dp[j];
            }
            for (int j = first; j <= t; j++) {
                const double ds = s->scale * p[j] * (dp[j] - mean);
                const long at = ((long)j * s->kv_heads + h / group) * width;
                for (int c = 0; c < width; c++) {
                    dq[((long)t * s->heads + h) * width + c] += ds * k[at + c];
                    dk[at + c] += ds * q_t[c];
                    dv[at + c] += p[j] * do_t[c];
                }
            }
        }
    }
    free(p);
    free(dp);
}

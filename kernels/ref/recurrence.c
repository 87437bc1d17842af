// SPDX-License-Identifier: Apache-2.0
// The recurrence family in double. Written to be read: no blocking, every state of a head is kept for the backward
// pass.
#include "kernels/ref/recurrence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double log_decay(const kern_recurrence *f, const kern_ref_recurrence_inputs *in, int t, int h) {
    if (f->decay == KERN_DECAY_NONE)
        return 0;
    return f->decay == KERN_DECAY_HEAD ? in->g[h] : in->g[t * f->heads + h];
}

static bool begins(const kern_ref_recurrence_inputs *in, int t) {
    return t > 0 && in->begins && in->begins[t];
}

// One token of one head: next = gamma previous + w k v^T, o = scale next^T q.
static void step(const kern_recurrence *f, const kern_ref_recurrence_inputs *in, int t, int h, const double *previous,
                 double *next, double *o) {
    const int depth = f->key_width, width = f->value_width, key_head = h / (f->heads / f->key_heads);
    const double *q = in->q + (t * f->key_heads + key_head) * depth, *k = in->k + (t * f->key_heads + key_head) * depth;
    const double *v = in->v + (t * f->heads + h) * width;
    const double gamma = begins(in, t) ? 0 : exp(log_decay(f, in, t, h));
    const double w = f->weighted ? in->beta[t * f->heads + h] : 1;
    for (int j = 0; j < width; j++) {
        double read = 0;
        for (int d = 0; d < depth; d++) {
            next[d * width + j] = gamma * previous[d * width + j] + w * k[d] * v[j];
            read += next[d * width + j] * q[d];
        }
        if (o)
            o[(t * f->heads + h) * width + j] = f->scale * read;
    }
}

void kern_ref_recurrence(const kern_recurrence *f, int tokens, const kern_ref_recurrence_inputs *in, double *state,
                         double *o) {
    const int size = f->key_width * f->value_width;
    for (int h = 0; h < f->heads; h++)
        for (int t = 0; t < tokens; t++)
            step(f, in, t, h, state + h * size, state + h * size, o);
}

// One head. states: (tokens + 1) states of it; grad: dL/dS_t, in: at the end, out: at the start.
static void backward_head(const kern_recurrence *f, int tokens, const kern_ref_recurrence_inputs *in, int h,
                          const double *states, double *grad, const double *d_o,
                          const kern_ref_recurrence_gradients *out) {
    const int depth = f->key_width, width = f->value_width, size = depth * width;
    const int key_head = h / (f->heads / f->key_heads);
    for (int t = tokens - 1; t >= 0; t--) {
        const int key_at = (t * f->key_heads + key_head) * depth, value_at = (t * f->heads + h) * width;
        const double gamma = begins(in, t) ? 0 : exp(log_decay(f, in, t, h));
        const double w = f->weighted ? in->beta[t * f->heads + h] : 1;
        const double *next = states + (size_t)(t + 1) * size, *previous = states + (size_t)t * size;
        double dweight = 0, ddecay = 0;
        for (int d = 0; d < depth; d++)
            for (int j = 0; j < width; j++) {
                double *g = &grad[d * width + j];
                *g += f->scale * in->q[key_at + d] * d_o[value_at + j];
                out->dq[key_at + d] += f->scale * next[d * width + j] * d_o[value_at + j];
                out->dk[key_at + d] += w * *g * in->v[value_at + j];
                out->dv[value_at + j] += w * *g * in->k[key_at + d];
                dweight += in->k[key_at + d] * *g * in->v[value_at + j];
                ddecay += gamma * *g * previous[d * width + j];
                *g *= gamma;
            }
        if (out->dg)
            out->dg[t * f->heads + h] = ddecay;
        if (out->dbeta)
            out->dbeta[t * f->heads + h] = dweight;
    }
}

void kern_ref_recurrence_backward(const kern_recurrence *f, int tokens, const kern_ref_recurrence_inputs *in,
                                  const double *state, const double *d_o, const kern_ref_recurrence_gradients *out) {
    const size_t size = (size_t)f->key_width * (size_t)f->value_width;
    double *states = malloc((size_t)(tokens + 1) * size * sizeof(double)), *grad = malloc(size * sizeof(double));
    memset(out->dq, 0, (size_t)tokens * f->key_heads * f->key_width * sizeof(double));
    memset(out->dk, 0, (size_t)tokens * f->key_heads * f->key_width * sizeof(double));
    memset(out->dv, 0, (size_t)tokens * f->heads * f->value_width * sizeof(double));
    for (int h = 0; h < f->heads; h++) {
        for (size_t i = 0; i < size; i++) {
            states[i] = state ? state[h * size + i] : 0;
            grad[i] = out->dstate ? out->dstate[h * size + i] : 0;
        }
        for (int t = 0; t < tokens; t++)
            step(f, in, t, h, states + (size_t)t * size, states + (size_t)(t + 1) * size, NULL);
        backward_head(f, tokens, in, h, states, grad, d_o, out);
        if (out->dstate)
            memcpy(out->dstate + h * size, grad, size * sizeof(double));
    }
    free(grad);
    free(states);
}

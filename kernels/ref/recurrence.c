// SPDX-License-Identifier: Apache-2.0
// The recurrence family in double. Written to be read: no blocking, every state of a head is kept for the backward
// pass.
#include "kernels/ref/recurrence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct shape {
    int heads, queries, keys, values; // heads of each
    int outputs, readers;             // heads of o, and of these those that read one state
    int depth, width, columns;        // D, V, V'
} shape;

static shape shape_of(const kern_recurrence *f) {
    shape s = {.heads = f->heads, .depth = f->key_width, .width = f->value_width};
    s.queries = f->query_heads ? f->query_heads : s.heads;
    s.keys = f->key_heads ? f->key_heads : s.heads;
    s.values = f->value_heads ? f->value_heads : s.heads;
    s.outputs = s.queries > s.heads ? s.queries : s.heads;
    s.readers = s.outputs / s.heads;
    s.columns = s.width + (f->unit_column ? 1 : 0);
    return s;
}

static int query_of(const shape *s, int output) {
    return output / (s->outputs / s->queries);
}
static int key_of(const shape *s, int h) {
    return h / (s->heads / s->keys);
}
static int value_of(const shape *s, int h) {
    return h / (s->heads / s->values);
}

enum { DEPTH_MAX = 4096 };

// decay (D): of each channel before token t is written.
static void decays_at(const kern_recurrence *f, const kern_ref_recurrence_inputs *in, int t, int h, double *decay) {
    const bool begins = t > 0 && in->begins && in->begins[t];
    const double *g = f->decay == KERN_DECAY_HEAD      ? in->g + h
                      : f->decay == KERN_DECAY_SCALAR  ? in->g + t * f->heads + h
                      : f->decay == KERN_DECAY_CHANNEL ? in->g + (t * f->heads + h) * f->key_width
                                                       : NULL;
    for (int d = 0; d < f->key_width; d++)
        decay[d] = begins ? 0 : !g ? 1 : f->decay == KERN_DECAY_CHANNEL ? exp(g[d]) : d > 0 ? decay[0] : exp(g[0]);
}

static double weight_at(const kern_recurrence *f, const kern_ref_recurrence_inputs *in, int t, int h) {
    return f->weighted ? in->beta[t * f->heads + h] : 1;
}

// v of column j: what is written (additive), or what the state shall answer to k (delta).
static double value_at(const shape *s, const kern_ref_recurrence_inputs *in, int t, int h, int j) {
    return j < s->width ? in->v[(t * s->values + value_of(s, h)) * s->width + j] : 1;
}

// v - S~^T k of column j for the delta rule, v otherwise.
static double error_at(const kern_recurrence *f, const shape *s, const kern_ref_recurrence_inputs *in, int t, int h,
                       const double *decay, const double *previous, int j) {
    const double *k = in->k + (t * s->keys + key_of(s, h)) * s->depth;
    double error = value_at(s, in, t, h, j);
    if (f->update == KERN_UPDATE_DELTA)
        for (int d = 0; d < s->depth; d++)
            error -= decay[d] * previous[d * s->columns + j] * k[d];
    return error;
}

// One token of one head; next may be previous.
static void step(const kern_recurrence *f, const shape *s, const kern_ref_recurrence_inputs *in, int t, int h,
                 const double *previous, double *next) {
    const double *k = in->k + (t * s->keys + key_of(s, h)) * s->depth;
    double decay[DEPTH_MAX];
    decays_at(f, in, t, h, decay);
    for (int j = 0; j < s->columns; j++) {
        const double u = weight_at(f, in, t, h) * error_at(f, s, in, t, h, decay, previous, j);
        for (int d = 0; d < s->depth; d++)
            next[d * s->columns + j] = decay[d] * previous[d * s->columns + j] + k[d] * u;
    }
}

static double skip_at(const kern_recurrence *f, const kern_ref_recurrence_inputs *in, int output, int j) {
    if (f->skip_width == 0 || j >= f->value_width)
        return 0;
    return in->skip[output * f->skip_width + (f->skip_width > 1 ? j : 0)];
}

void kern_ref_recurrence(const kern_recurrence *f, int tokens, const kern_ref_recurrence_inputs *in, double *state,
                         double *o) {
    const shape s = shape_of(f);
    for (int h = 0; h < s.heads; h++)
        for (int t = 0; t < tokens; t++) {
            double *now = state + h * s.depth * s.columns;
            step(f, &s, in, t, h, now, now);
            for (int output = h * s.readers; output < (h + 1) * s.readers; output++) {
                const double *q = in->q + (t * s.queries + query_of(&s, output)) * s.depth;
                for (int j = 0; j < s.columns; j++) {
                    double read = 0;
                    for (int d = 0; d < s.depth; d++)
                        read += now[d * s.columns + j] * q[d];
                    o[(t * s.outputs + output) * s.columns + j] =
                        f->scale * read + skip_at(f, in, output, j) * value_at(&s, in, t, h, j);
                }
            }
        }
}

// What token t reads from the state after it: dq, dv and dskip of the skip, grad += scale q do^T.
static void backward_reads(const kern_recurrence *f, const shape *s, const kern_ref_recurrence_inputs *in, int t, int h,
                           const double *next, double *grad, const double *d_o,
                           const kern_ref_recurrence_gradients *out) {
    for (int output = h * s->readers; output < (h + 1) * s->readers; output++) {
        const int query_at = (t * s->queries + query_of(s, output)) * s->depth;
        for (int j = 0; j < s->columns; j++) {
            const double gradient = d_o[(t * s->outputs + output) * s->columns + j];
            for (int d = 0; d < s->depth; d++) {
                grad[d * s->columns + j] += f->scale * in->q[query_at + d] * gradient;
                out->dq[query_at + d] += f->scale * next[d * s->columns + j] * gradient;
            }
            if (j < s->width)
                out->dv[(t * s->values + value_of(s, h)) * s->width + j] += skip_at(f, in, output, j) * gradient;
            if (f->skip_width && out->dskip && j < s->width)
                out->dskip[output * f->skip_width + (f->skip_width > 1 ? j : 0)] += gradient * value_at(s, in, t, h, j);
        }
    }
}

// What token t writes; grad becomes dL/dS of the state before it.
static void backward_write(const kern_recurrence *f, const shape *s, const kern_ref_recurrence_inputs *in, int t, int h,
                           const double *previous, double *grad, const kern_ref_recurrence_gradients *out) {
    const int key_at = (t * s->keys + key_of(s, h)) * s->depth;
    const double weight = weight_at(f, in, t, h), *k = in->k + key_at;
    double decay[DEPTH_MAX];
    decays_at(f, in, t, h, decay);
    for (int j = 0; j < s->columns; j++) {
        const double error = error_at(f, s, in, t, h, decay, previous, j);
        double du = 0; // gradient of u = weight error
        for (int d = 0; d < s->depth; d++) {
            du += grad[d * s->columns + j] * k[d];
            out->dk[key_at + d] += grad[d * s->columns + j] * weight * error;
        }
        if (out->dbeta)
            out->dbeta[t * s->heads + h] += du * error;
        if (j < s->width)
            out->dv[(t * s->values + value_of(s, h)) * s->width + j] += weight * du;
        for (int d = 0; d < s->depth; d++) {
            const double decayed = decay[d] * previous[d * s->columns + j];
            double *g = &grad[d * s->columns + j];
            if (f->update == KERN_UPDATE_DELTA) {
                out->dk[key_at + d] -= decayed * weight * du;
                *g -= k[d] * weight * du;
            }
            if (out->dg && f->decay == KERN_DECAY_CHANNEL)
                out->dg[(t * s->heads + h) * s->depth + d] += *g * decayed;
            else if (out->dg)
                out->dg[t * s->heads + h] += *g * decayed;
            *g *= decay[d];
        }
    }
}

static void clear(double *x, int count) {
    if (x)
        memset(x, 0, (size_t)count * sizeof(double));
}

void kern_ref_recurrence_backward(const kern_recurrence *f, int tokens, const kern_ref_recurrence_inputs *in,
                                  const double *state, const double *d_o, const kern_ref_recurrence_gradients *out) {
    const shape s = shape_of(f);
    const int size = s.depth * s.columns;
    double *states = malloc((size_t)(tokens + 1) * (size_t)size * sizeof(double));
    double *grad = malloc((size_t)size * sizeof(double));
    clear(out->dq, tokens * s.queries * s.depth);
    clear(out->dk, tokens * s.keys * s.depth);
    clear(out->dv, tokens * s.values * s.width);
    clear(out->dg, tokens * s.heads * (f->decay == KERN_DECAY_CHANNEL ? s.depth : 1));
    clear(out->dbeta, tokens * s.heads);
    clear(out->dskip, s.outputs * f->skip_width);
    for (int h = 0; h < s.heads; h++) {
        for (int i = 0; i < size; i++) {
            states[i] = state ? state[h * size + i] : 0;
            grad[i] = out->dstate ? out->dstate[h * size + i] : 0;
        }
        for (int t = 0; t < tokens; t++)
            step(f, &s, in, t, h, states + (size_t)t * size, states + (size_t)(t + 1) * size);
        for (int t = tokens - 1; t >= 0; t--) {
            backward_reads(f, &s, in, t, h, states + (size_t)(t + 1) * size, grad, d_o, out);
            backward_write(f, &s, in, t, h, states + (size_t)t * size, grad, out);
        }
        if (out->dstate)
            memcpy(out->dstate + h * size, grad, (size_t)size * sizeof(double));
    }
    free(grad);
    free(states);
}

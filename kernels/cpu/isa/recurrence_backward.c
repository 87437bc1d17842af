// SPDX-License-Identifier: Apache-2.0
// The recurrence family, backward, for one decay a head (models.md 11.4, additive). Prompt rows only.
//
// With B = pair * Q K^T, Z = pair * dO V^T, S the state before the chunk and G the gradient of the state after it:
//   dQ = scale (from_start * dO S^T + Z (w * K))        dV = w * (to_end * K G + scale B^T dO)
//   dK = w * (to_end * V G^T + scale Z^T Q)             dw = rowsum(V * dV / w)
//   G  = e^{c_C} G + scale (from_start * Q)^T dO
// and the decays by chunk_decay_gradient. A work item is (row, key head): it walks the row's chunks backwards once for
// each value head of the group, and q's and k's gradients are added up over the group in that order.
#include "kernels/cpu/isa/recurrence_chunk.h"

typedef struct workspace {
    float *q, *k, *wk, *dq, *dk;         // (C, d)
    float *v, *d_o, *dv;                 // (C, w)
    float *state, *grad;                 // (D, w)
    float *turned;                       // (V, d): S^T, then G^T
    float *kt, *vt;                      // (D, C), (V, C)
    float *pair, *reads, *writes, *flow; // (C, C): pair, Q K^T, dO V^T, their product
    size_t bytes;
} workspace;

static workspace lay_out(char *base, int depth, int width, int chunk) {
    const size_t d = (size_t)gemm_pad(depth), w = (size_t)gemm_pad(width), c = (size_t)chunk;
    workspace ws;
    float **piece[] = {&ws.q,    &ws.k,      &ws.wk, &ws.dq, &ws.dk,   &ws.v,     &ws.d_o,    &ws.dv,  &ws.state,
                       &ws.grad, &ws.turned, &ws.kt, &ws.vt, &ws.pair, &ws.reads, &ws.writes, &ws.flow};
    const size_t count[] = {c * d, c * d, c * d, c * d, c * d, c * w, c * w, c * w, d * w,
                            d * w, w * d, d * c, w * c, c * c, c * c, c * c, c * c};
    size_t used = 0;
    for (size_t i = 0; i < sizeof count / sizeof count[0]; i++) {
        *piece[i] = (float *)(base + used);
        used += kern_align64(count[i] * sizeof(float));
    }
    ws.bytes = used;
    return ws;
}

KERN_PREPARE(recurrence_backward, kern_recurrence_backward_args) {
    const kern_recurrence *f = &a->family;
    kern_status status = KERN_NAME(recurrence_check)(f, a->g.ref != 0, a->beta.ref != 0);
    if (status != KERN_OK)
        return status;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->snapshots.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref ||
        !a->dv.ref || (f->weighted != 0) != (a->dbeta.ref != 0) || (f->decay == KERN_DECAY_SCALAR) != (a->dg.ref != 0))
        return KERN_INVALID;
    *thread_bytes = lay_out(NULL, f->key_width, f->value_width, cpu->chunk).bytes;
    return KERN_OK;
}

typedef struct job {
    const kern_recurrence_backward_args *a;
    const kern_rows *rows;
    workspace ws;
    int head, key_head, chunk; // chunk: C
    bool add;                  // dq, dk: a head of the group has written already
} job;

static void load_chunk(const job *j, int index, float *weight, chunk_decay *decay) {
    const kern_recurrence *f = &j->a->family;
    const kern_chunk *chunk = &j->rows->chunk[index];
    const int depth = f->key_width, width = f->value_width, d = gemm_pad(depth), w = gemm_pad(width), n = chunk->length;
    const int64_t keys = (int64_t)f->key_heads * depth, values = (int64_t)f->heads * width;
    const int64_t key0 = chunk->token0 * keys + j->key_head * depth, value0 = chunk->token0 * values + j->head * width;
    const float *g = f->decay == KERN_DECAY_NONE ? NULL : j->a->g.f + j->head;
    chunk_decay_fill(decay, j->rows, chunk, g, f->decay == KERN_DECAY_SCALAR ? f->heads : 0, j->chunk, j->ws.pair);
    chunk_load(j->ws.q, d, j->a->q.f + key0, keys, n, depth);
    chunk_load(j->ws.k, d, j->a->k.f + key0, keys, n, depth);
    chunk_load(j->ws.v, w, j->a->v.f + value0, values, n, width);
    chunk_load(j->ws.d_o, w, j->a->d_o.f + value0, values, n, width);
    chunk_load(j->ws.state, w, j->a->snapshots.f + ((int64_t)index * f->heads + j->head) * depth * width, width, depth,
               width);
    for (int i = 0; i < n; i++)
        weight[i] = f->weighted ? j->a->beta.f[(int64_t)(chunk->token0 + i) * f->heads + j->head] : 1;
    chunk_scale_rows(j->ws.wk, j->ws.k, d, weight, n);
    chunk_transpose(j->ws.kt, j->chunk, decay->columns, j->ws.k, d, n, depth);
    chunk_transpose(j->ws.vt, j->chunk, decay->columns, j->ws.v, w, n, width);
}

// q's, k's and v's gradients (k's and v's still without their weight); enter and leave as in chunk_decay_gradient.
static void chunk_gradients(const job *j, const chunk_decay *decay, const float *weight, float *enter, float *leave) {
    const kern_recurrence *f = &j->a->family;
    const workspace *ws = &j->ws;
    const int depth = f->key_width, width = f->value_width, d = gemm_pad(depth), w = gemm_pad(width);
    const int n = decay->length, c = j->chunk;
    gemm_lower_nn(n, decay->columns, depth, ws->q, d, ws->kt, c, ws->reads, c, 0);
    gemm_lower_nn(n, decay->columns, width, ws->d_o, w, ws->vt, c, ws->writes, c, 0);
    chunk_mask_pairs(decay, ws->writes, f->scale);
    for (int i = 0; i < n; i++)
        for (int column = 0, end = gemm_lower_columns(i, n); column < end; column += KERN_VL)
            vf_store(ws->flow + i * c + column, vf_load(ws->reads + i * c + column) *
                                                    vf_load(ws->writes + i * c + column) * vf_load(weight + column));
    chunk_mask_pairs(decay, ws->reads, f->scale);

    chunk_transpose(ws->turned, d, d, ws->state, w, depth, width);
    gemm_nn(n, d, width, ws->d_o, w, ws->turned, d, ws->dq, d, 0);
    for (int i = 0; i < n; i++) {
        const float factor = f->scale * decay->from_start[i];
        enter[i] = factor * chunk_dot(ws->q + i * d, ws->dq + i * d, d);
        chunk_scale_rows(ws->dq + i * d, ws->dq + i * d, d, &factor, 1);
    }
    gemm_nn_lower(n, d, n, ws->writes, c, ws->wk, d, ws->dq, d, 1);

    gemm_nn(n, w, depth, ws->k, d, ws->grad, w, ws->dv, w, 0);
    chunk_scale_rows(ws->dv, ws->dv, w, decay->to_end, n);
    gemm_tn_lower(n, w, n, ws->reads, c, ws->d_o, w, ws->dv, w, 1);

    chunk_transpose(ws->turned, d, d, ws->grad, w, depth, width);
    gemm_nn(n, d, width, ws->v, w, ws->turned, d, ws->dk, d, 0);
    for (int i = 0; i < n; i++) {
        leave[i] = weight[i] * decay->to_end[i] * chunk_dot(ws->k + i * d, ws->dk + i * d, d);
        chunk_scale_rows(ws->dk + i * d, ws->dk + i * d, d, &decay->to_end[i], 1);
    }
    gemm_tn_lower(n, d, n, ws->writes, c, ws->q, d, ws->dk, d, 1);
}

static void store_decay_gradient(const job *j, const chunk_decay *decay, int64_t token0, const float *enter,
                                 const float *leave) {
    const kern_recurrence *f = &j->a->family;
    const workspace *ws = &j->ws;
    const int w = gemm_pad(f->value_width), n = decay->length;
    float through = 0;
    if (decay->first[n - 1] < 0) {
        for (int i = 0; i < f->key_width; i++)
            through += chunk_dot(ws->grad + i * w, ws->state + i * w, w);
        through += through * decay->whole_m1;
    }
    chunk_decay_gradient(decay, ws->flow, enter, leave, through, j->a->dg.f + token0 * f->heads + j->head, f->heads);
}

static void run_chunk(const job *j, int index) {
    const kern_recurrence *f = &j->a->family;
    const kern_chunk *chunk = &j->rows->chunk[index];
    const workspace *ws = &j->ws;
    const int depth = f->key_width, width = f->value_width, d = gemm_pad(depth), w = gemm_pad(width), n = chunk->length;
    const int64_t keys = (int64_t)f->key_heads * depth, values = (int64_t)f->heads * width;
    const int64_t key0 = chunk->token0 * keys + j->key_head * depth, value0 = chunk->token0 * values + j->head * width;
    float weight[CHUNK_MAX] __attribute__((aligned(64))) = {0}, enter[CHUNK_MAX], leave[CHUNK_MAX], factor[CHUNK_MAX];
    chunk_decay decay;
    load_chunk(j, index, weight, &decay);
    chunk_gradients(j, &decay, weight, enter, leave);
    if (j->a->dg.p)
        store_decay_gradient(j, &decay, chunk->token0, enter, leave);
    for (int i = 0; i < n; i++) {
        if (f->weighted)
            j->a->dbeta.f[(int64_t)(chunk->token0 + i) * f->heads + j->head] =
                chunk_dot(ws->v + i * w, ws->dv + i * w, w);
        factor[i] = f->scale * decay.from_start[i];
    }
    chunk_scale_rows(ws->dk, ws->dk, d, weight, n);
    chunk_scale_rows(ws->dv, ws->dv, w, weight, n);
    (j->add ? chunk_store_add : chunk_store)(j->a->dq.f + key0, keys, ws->dq, d, n, depth);
    (j->add ? chunk_store_add : chunk_store)(j->a->dk.f + key0, keys, ws->dk, d, n, depth);
    chunk_store(j->a->dv.f + value0, values, ws->dv, w, n, width);
    chunk_scale_rows(ws->q, ws->q, d, factor, n);
    chunk_retreat_state(&decay, ws->grad, w, ws->q, d, ws->d_o, w, depth, w);
}

static void run_head(const job *j, int r) {
    const kern_recurrence *f = &j->a->family;
    const kern_rows *rows = j->rows;
    const int depth = f->key_width, width = f->value_width, w = gemm_pad(width);
    const int first = chunk_of_row(rows, r);
    float *dstate = j->a->dstate.p ? j->a->dstate.f + ((int64_t)r * f->heads + j->head) * depth * width : NULL;
    int last = first;
    while (last + 1 < rows->n_chunks && rows->chunk[last + 1].row == r)
        last++;
    if (dstate)
        chunk_load(j->ws.grad, w, dstate, width, depth, width);
    else
        memset(j->ws.grad, 0, (size_t)depth * w * sizeof(float));
    for (int i = last; i >= first; i--)
        run_chunk(j, i);
    if (dstate)
        chunk_store(dstate, width, j->ws.grad, w, depth, width);
}

KERN_RUN(recurrence_backward, kern_recurrence_backward_args) {
    const kern_recurrence *f = &a->family;
    const int items = rows->n_rows * f->key_heads, group = f->heads / f->key_heads;
    if (rows->n_generated > 0)
        return KERN_INVALID;
#pragma omp parallel for schedule( \
    dynamic) if (kern_worth_team(4.0 * rows->n_tokens * f->heads * f->key_width * f->value_width))
    for (int item = 0; item < items; item++) {
        job j = {.a = a, .rows = rows, .key_head = item % f->key_heads, .chunk = cpu->chunk};
        j.ws = lay_out(kern_cpu_workspace(cpu, kern_team_thread()), f->key_width, f->value_width, cpu->chunk);
        for (int i = 0; i < group; i++) {
            j.head = j.key_head * group + i;
            j.add = i > 0;
            run_head(&j, item / f->key_heads);
        }
    }
    return KERN_OK;
}

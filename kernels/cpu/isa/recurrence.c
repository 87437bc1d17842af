// SPDX-License-Identifier: Apache-2.0
// The recurrence family, forward, for one decay a head:
//
//   S_t = gamma_t S_{t-1} + w_t k_t v_t^T        o_t = scale S_t^T q_t        S (D, V), gamma_t = e^{g_t}, w_t 1 or
//   beta_t
//
// Prompt rows, chunk by chunk (S: state before the chunk, see recurrence_chunk.h for pair, from_start, to_end):
//   O = scale (from_start * Q S) + (scale pair * Q K^T) (w * V)
//   S = e^{c_C} S + (to_end * K)^T (w * V)
// Generated rows: token by token, the state in place. Work items are (row, value head); a state lives in the thread's
// workspace while its row lasts. Sums run over tokens in ascending order, so an item's bits depend on its row alone.
//
// Refused: decay a channel and the delta rule (other files' work), key heads that do not divide the heads.
#include "kernels/cpu/isa/recurrence_chunk.h"

typedef struct workspace {
    float *state;          // (D, V) padded
    float *q, *k, *v, *o;  // chunks, padded
    float *kt;             // (D, C)
    float *pair, *product; // (C, C)
    size_t bytes;
} workspace;

static workspace lay_out(char *base, int depth, int width, int chunk) {
    const size_t d = (size_t)gemm_pad(depth), w = (size_t)gemm_pad(width), c = (size_t)chunk;
    size_t used = 0;
    workspace ws;
    float **piece[] = {&ws.state, &ws.q, &ws.k, &ws.v, &ws.o, &ws.kt, &ws.pair, &ws.product};
    const size_t count[] = {d * w, c * d, c * d, c * w, c * w, d * c, c * c, c * c};
    for (size_t i = 0; i < sizeof count / sizeof count[0]; i++) {
        *piece[i] = (float *)(base + used);
        used += kern_align64(count[i] * sizeof(float));
    }
    ws.bytes = used;
    return ws;
}

kern_status KERN_NAME(recurrence_check)(const kern_recurrence *f, bool g, bool beta) {
    if (f->heads < 1 || f->key_heads < 1 || f->key_width < 1 || f->value_width < 1 || f->heads % f->key_heads != 0)
        return KERN_INVALID;
    if (f->decay != KERN_DECAY_NONE && f->decay != KERN_DECAY_HEAD && f->decay != KERN_DECAY_SCALAR)
        return KERN_UNSUPPORTED;
    if (f->update != KERN_UPDATE_ADD || f->key_width > RECURRENCE_WIDTH_MAX || f->value_width > RECURRENCE_WIDTH_MAX)
        return KERN_UNSUPPORTED;
    if ((f->decay != KERN_DECAY_NONE) != g || (f->weighted != 0) != beta)
        return KERN_INVALID;
    return KERN_OK;
}

KERN_PREPARE(recurrence, kern_recurrence_args) {
    const kern_recurrence *f = &a->family;
    kern_status status = KERN_NAME(recurrence_check)(f, a->g.ref != 0, a->beta.ref != 0);
    if (status != KERN_OK)
        return status;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref)
        return KERN_INVALID;
    *thread_bytes = lay_out(NULL, f->key_width, f->value_width, cpu->chunk).bytes;
    return KERN_OK;
}

// g of the first token and its distance from token to token, for head h.
static const float *decay_of(const kern_recurrence_args *a, int h, int64_t *stride) {
    *stride = a->family.decay == KERN_DECAY_SCALAR ? a->family.heads : 0;
    return a->family.decay == KERN_DECAY_NONE ? NULL : a->g.f + h;
}

static void run_chunk(const kern_rows *rows, const kern_chunk *chunk, const kern_recurrence_args *a, int h,
                      const workspace *ws, int c) {
    const kern_recurrence *f = &a->family;
    const int depth = f->key_width, width = f->value_width, d = gemm_pad(depth), w = gemm_pad(width);
    const int64_t keys = (int64_t)f->key_heads * depth, values = (int64_t)f->heads * width;
    const int64_t key0 = (int64_t)chunk->token0 * keys + (int64_t)(h / (f->heads / f->key_heads)) * depth;
    const int64_t value0 = (int64_t)chunk->token0 * values + (int64_t)h * width;
    const int n = chunk->length;
    int64_t stride;
    const float *g = decay_of(a, h, &stride);
    chunk_decay decay;
    chunk_decay_fill(&decay, rows, chunk, g, stride, c, ws->pair);
    chunk_load(ws->q, d, a->q.f + key0, keys, n, depth);
    chunk_load(ws->k, d, a->k.f + key0, keys, n, depth);
    chunk_load(ws->v, w, a->v.f + value0, values, n, width);
    if (f->weighted) {
        float weight[CHUNK_MAX];
        for (int i = 0; i < n; i++)
            weight[i] = a->beta.f[(int64_t)(chunk->token0 + i) * f->heads + h];
        chunk_scale_rows(ws->v, ws->v, w, weight, n);
    }
    bool carries = chunk_carries(&decay);
    if (carries) {
        float factor[CHUNK_MAX];
        for (int i = 0; i < n; i++)
            factor[i] = f->scale * decay.from_start[i];
        gemm_nn(n, w, depth, ws->q, d, ws->state, w, ws->o, w, 0);
        chunk_scale_rows(ws->o, ws->o, w, factor, n);
    }
    chunk_transpose(ws->kt, c, decay.columns, ws->k, d, n, depth);
    gemm_lower_nn(n, decay.columns, depth, ws->q, d, ws->kt, c, ws->product, c, 0);
    chunk_mask_pairs(&decay, ws->product, f->scale);
    gemm_nn_lower(n, w, n, ws->product, c, ws->v, w, ws->o, w, carries);
    chunk_store(a->o.f + value0, values, ws->o, w, n, width);
    chunk_scale_rows(ws->k, ws->k, d, decay.to_end, n);
    chunk_advance_state(&decay, ws->state, w, ws->k, d, ws->v, w, depth, w);
}

static void run_token(const kern_recurrence_args *a, int64_t t, int h, const workspace *ws, float *state, int64_t ld) {
    const kern_recurrence *f = &a->family;
    const int depth = f->key_width, width = f->value_width, w = gemm_pad(width);
    const int64_t key0 = (t * f->key_heads + h / (f->heads / f->key_heads)) * depth;
    int64_t stride;
    const float *g = decay_of(a, h, &stride);
    const float weight = f->weighted ? a->beta.f[t * f->heads + h] : 1.0f;
    chunk_load(ws->v, w, a->v.f + (t * f->heads + h) * width, width, 1, width);
    chunk_scale_rows(ws->v, ws->v, w, &weight, 1);
    step_state(state, ld, depth, w, g ? expm1f(g[t * stride]) : 0.0f, a->k.f + key0, ws->v, a->q.f + key0, ws->o);
    chunk_scale_rows(ws->o, ws->o, w, &f->scale, 1);
    chunk_store(a->o.f + (t * f->heads + h) * width, width, ws->o, w, 1, width);
}

static void run_generated(const kern_rows *rows, const kern_row *row, const kern_recurrence_args *a, int h,
                          const workspace *ws, float *slot) {
    const kern_recurrence *f = &a->family;
    const int depth = f->key_width, width = f->value_width, w = gemm_pad(width);
    const bool in_place = slot && w == width;
    float *state = in_place ? slot : ws->state;
    if (slot && !in_place)
        chunk_load(state, w, slot, width, depth, width);
    else if (!slot)
        memset(state, 0, (size_t)depth * w * sizeof(float));
    for (int t = row->token0; t < row->token0 + row->length; t++) {
        if (t > row->token0 && rows->token_start[t] == t)
            memset(state, 0, (size_t)depth * w * sizeof(float));
        run_token(a, t, h, ws, state, w);
    }
    if (slot && !in_place)
        chunk_store(slot, width, state, w, depth, width);
}

static void run_prompt(const kern_rows *rows, int row, int chunk0, const kern_recurrence_args *a, int h,
                       const workspace *ws, float *slot, int c) {
    const kern_recurrence *f = &a->family;
    const int depth = f->key_width, width = f->value_width, w = gemm_pad(width);
    if (slot)
        chunk_load(ws->state, w, slot, width, depth, width);
    else
        memset(ws->state, 0, (size_t)depth * w * sizeof(float));
    for (int i = chunk0; i < rows->n_chunks && rows->chunk[i].row == row; i++) {
        if (a->snapshots.p)
            chunk_store(a->snapshots.f + ((int64_t)i * f->heads + h) * depth * width, width, ws->state, w, depth,
                        width);
        run_chunk(rows, &rows->chunk[i], a, h, ws, c);
    }
    if (slot)
        chunk_store(slot, width, ws->state, w, depth, width);
}

KERN_RUN(recurrence, kern_recurrence_args) {
    const kern_recurrence *f = &a->family;
    const int items = rows->n_rows * f->heads;
    if (!a->state.p)
        for (int r = 0; r < rows->n_rows; r++)
            if (rows->row[r].slot >= 0)
                return KERN_INVALID;
#pragma omp parallel for schedule( \
    dynamic) if (kern_worth_team(4.0 * rows->n_tokens * f->heads * f->key_width * f->value_width))
    for (int item = 0; item < items; item++) {
        const int r = item / f->heads, h = item % f->heads;
        const kern_row *row = &rows->row[r];
        workspace ws = lay_out(kern_cpu_workspace(cpu, kern_team_thread()), f->key_width, f->value_width, cpu->chunk);
        float *slot = NULL;
        if (row->slot >= 0)
            slot = (float *)((char *)a->state.p + (size_t)row->slot * rows->slot_stride) +
                   (size_t)h * f->key_width * f->value_width;
        if (row->kind == KERN_ROW_GENERATED)
            run_generated(rows, row, a, h, &ws, slot);
        else
            run_prompt(rows, r, chunk_of_row(rows, r), a, h, &ws, slot, cpu->chunk);
    }
    return KERN_OK;
}

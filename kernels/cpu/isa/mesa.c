// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's core, forward (von Oswald et al. 2025, arXiv 2506.05233):
//
//   Hk_t = gamma_t Hk_{t-1} + beta_t k_t k_t^T     Hv_t = gamma_t Hv_{t-1} + beta_t k_t v_t^T
//   (Hk_t + Lambda) x_t = q_t                      o_t = Hv_t^T x_t
//
// Prompt rows go chunk by chunk (H: before the chunk): the solve of mesa_solve.h for all its tokens, then
//   O = from_start * (X Hv) + ((X K^T) * pair) (beta * V),   H = e^{c_C} H + K~^T [K~ | V~]
// Generated rows go token by token: update of Hk, solve with Hk in the cache, update of Hv and read-out in one pass.
// Chunk-start states run in order for each (row, head). With snapshots they are all stored first and the chunks' solves
// are work items of their own; without, a (row, head) is one item. The bits are the same.
#include "kernels/cpu/isa/mesa.h"

typedef struct workspace {
    float *state;          // [Hk | Hv] (D, row)
    float *q, *k, *bk, *x; // (C, d)
    float *v, *o;          // (C, w)
    float *written;        // (C, row)
    float *kt;             // (D, C)
    float *pair, *product; // (C, C)
    float *lambda;         // (d)
    float *solve;
    size_t bytes;
} workspace;

static workspace lay_out(char *base, const mesa_shape *shape) {
    const size_t d = (size_t)shape->d, w = (size_t)shape->w, c = (size_t)shape->chunk, depth = (size_t)shape->depth;
    workspace ws;
    float **piece[] = {&ws.state,   &ws.q,  &ws.k,    &ws.bk,      &ws.x,      &ws.v,    &ws.o,
                       &ws.written, &ws.kt, &ws.pair, &ws.product, &ws.lambda, &ws.solve};
    const size_t count[] = {depth * (d + w),
                            c * d,
                            c * d,
                            c * d,
                            c * d,
                            c * w,
                            c * w,
                            c * (d + w),
                            depth * c,
                            c * c,
                            c * c,
                            d,
                            mesa_chunk_size(shape->depth, shape->d, shape->chunk)};
    size_t used = 0;
    for (size_t i = 0; i < sizeof count / sizeof count[0]; i++) {
        *piece[i] = (float *)(base + used);
        used += kern_align64(count[i] * sizeof(float));
    }
    ws.bytes = used;
    return ws;
}

KERN_PREPARE(mesa, kern_mesa_args) {
    kern_status status = kern_mesa_check(&a->mesa, MESA_KEY_MAX, MESA_VALUE_MAX);
    if (status != KERN_OK)
        return status;
    if (a->mesa.storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->g.ref || !a->beta.ref || !a->lambda_params.ref || !a->o.ref)
        return KERN_INVALID;
    const mesa_shape shape = mesa_shape_of(&a->mesa, cpu->chunk);
    *thread_bytes = lay_out(NULL, &shape).bytes;
    return KERN_OK;
}

// One work item: a head of a row or chunk.
typedef struct job {
    const kern_mesa_args *a;
    const kern_rows *rows;
    mesa_shape shape;
    workspace ws;
    int head;
} job;

static void load_state(const job *j, const float *hk, const float *hv, int64_t hk_ld, int64_t hv_ld) {
    const mesa_shape *s = &j->shape;
    for (int i = 0; i < s->depth; i++) {
        chunk_load(j->ws.state + i * s->row, s->d, hk + i * hk_ld, hk_ld, 1, s->depth);
        chunk_load(j->ws.state + i * s->row + s->d, s->w, hv + i * hv_ld, hv_ld, 1, s->width);
    }
}

static void store_state(const job *j, float *hk, float *hv, int64_t hk_ld, int64_t hv_ld) {
    const mesa_shape *s = &j->shape;
    for (int i = 0; i < s->depth; i++) {
        chunk_store(hk + i * hk_ld, hk_ld, j->ws.state + i * s->row, s->d, 1, s->depth);
        chunk_store(hv + i * hv_ld, hv_ld, j->ws.state + i * s->row + s->d, s->w, 1, s->width);
    }
}

static float *snapshot_of(const job *j, int chunk) {
    const mesa_shape *s = &j->shape;
    return j->a->snapshots.f + ((int64_t)chunk * s->heads + j->head) * s->depth * (s->depth + s->width);
}

// The slot's Hk of this head, NULL without a slot; its Hv starts slot_values floats after Hk of head 0.
static float *slot_of(const job *j, const kern_row *row) {
    if (row->slot < 0)
        return NULL;
    return (float *)((char *)j->a->state.p + (size_t)row->slot * j->rows->slot_stride);
}
static float *slot_keys(const job *j, float *slot) {
    return slot + (int64_t)j->head * j->shape.depth * j->shape.depth;
}
static float *slot_values(const job *j, float *slot) {
    const mesa_shape *s = &j->shape;
    return slot + (int64_t)s->heads * s->depth * s->depth + (int64_t)j->head * s->depth * s->width;
}

static mesa_reports reports_of(const job *j, int64_t token) {
    return mesa_reports_of(j->a->report, j->a->sum, token, j->head, j->shape.heads);
}

// k, v, beta and decay of a chunk.
static void load_chunk(const job *j, const kern_chunk *chunk, chunk_decay *decay, float *beta) {
    const mesa_shape *s = &j->shape;
    const int64_t keys = (int64_t)s->heads * s->depth, values = (int64_t)s->heads * s->width;
    chunk_decay_fill(decay, j->rows, chunk, j->a->g.f + j->head, s->heads, s->chunk, j->ws.pair);
    chunk_load(j->ws.k, s->d, j->a->k.f + chunk->token0 * keys + j->head * s->depth, keys, chunk->length, s->depth);
    chunk_load(j->ws.v, s->w, j->a->v.f + chunk->token0 * values + j->head * s->width, values, chunk->length, s->width);
    for (int i = 0; i < chunk->length; i++)
        beta[i] = j->a->beta.f[(int64_t)(chunk->token0 + i) * s->heads + j->head];
}

// Solutions and outputs of a loaded chunk, from the state before it.
static void solve_chunk(const job *j, const kern_chunk *chunk, const chunk_decay *decay, const float *beta) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const kern_mesa_args *a = j->a;
    const int64_t keys = (int64_t)s->heads * s->depth, values = (int64_t)s->heads * s->width;
    const int n = chunk->length, c = s->chunk;
    const bool carries = chunk_carries(decay);
    chunk_load(ws->q, s->d, a->q.f + chunk->token0 * keys + j->head * s->depth, keys, n, s->depth);
    chunk_scale_rows(ws->bk, ws->k, s->d, beta, n);
    chunk_transpose(ws->kt, c, decay->columns, ws->k, s->d, n, s->depth);
    const mesa_system system = {.decay = decay,
                                .hk = ws->state,
                                .ld = s->row,
                                .kt = ws->kt,
                                .k = ws->k,
                                .bk = ws->bk,
                                .beta = beta,
                                .lambda = ws->lambda,
                                .depth = s->depth,
                                .width = s->d};
    const mesa_reports reports = reports_of(j, chunk->token0);
    mesa_solve_chunk(&system, &j->rows->row[chunk->row].solver, ws->q, ws->x, &reports, ws->solve);
    if (a->x.p)
        chunk_store(a->x.f + chunk->token0 * keys + j->head * s->depth, keys, ws->x, s->d, n, s->depth);
    if (carries) {
        gemm_nn(n, s->w, s->depth, ws->x, s->d, ws->state + s->d, s->row, ws->o, s->w, 0);
        chunk_scale_rows(ws->o, ws->o, s->w, decay->from_start, n);
    }
    gemm_lower_nn(n, decay->columns, s->depth, ws->x, s->d, ws->kt, c, ws->product, c, 0);
    chunk_mask_pairs(decay, ws->product, 1);
    float *bv = ws->written; // (length, w)
    chunk_scale_rows(bv, ws->v, s->w, beta, n);
    gemm_nn_lower(n, s->w, n, ws->product, c, bv, s->w, ws->o, s->w, carries);
    chunk_store(a->o.f + chunk->token0 * values + j->head * s->width, values, ws->o, s->w, n, s->width);
}

static void run_prompt(const job *j, int r) {
    const mesa_shape *s = &j->shape;
    const kern_rows *rows = j->rows;
    float *slot = slot_of(j, &rows->row[r]);
    float beta[CHUNK_MAX];
    chunk_decay decay;
    if (slot)
        load_state(j, slot_keys(j, slot), slot_values(j, slot), s->depth, s->width);
    else
        memset(j->ws.state, 0, (size_t)s->depth * s->row * sizeof(float));
    for (int i = chunk_of_row(rows, r); i < rows->n_chunks && rows->chunk[i].row == r; i++) {
        load_chunk(j, &rows->chunk[i], &decay, beta);
        if (j->a->snapshots.p) {
            float *snapshot = snapshot_of(j, i);
            store_state(j, snapshot, snapshot + s->depth, s->depth + s->width, s->depth + s->width);
        } else {
            solve_chunk(j, &rows->chunk[i], &decay, beta);
        }
        mesa_advance(s, &decay, j->ws.k, j->ws.v, beta, j->ws.written, j->ws.state);
    }
    if (slot)
        store_state(j, slot_keys(j, slot), slot_values(j, slot), s->depth, s->width);
}

static void run_snapshot(const job *j, int chunk) {
    const mesa_shape *s = &j->shape;
    const float *snapshot = snapshot_of(j, chunk);
    float beta[CHUNK_MAX];
    chunk_decay decay;
    load_chunk(j, &j->rows->chunk[chunk], &decay, beta);
    load_state(j, snapshot, snapshot + s->depth, s->depth + s->width, s->depth + s->width);
    solve_chunk(j, &j->rows->chunk[chunk], &decay, beta);
}

static void run_token(const job *j, int64_t t, const kern_solver *solver, float *hk, int64_t hk_ld, float *hv,
                      int64_t hv_ld) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const kern_mesa_args *a = j->a;
    const int64_t at = t * s->heads + j->head;
    const float gamma_m1 = expm1f(a->g.f[at]), beta = a->beta.f[at], root = sqrtf(beta);
    chunk_load(ws->q, s->d, a->q.f + at * s->depth, s->depth, 1, s->depth);
    chunk_load(ws->k, s->d, a->k.f + at * s->depth, s->depth, 1, s->depth);
    chunk_load(ws->v, s->w, a->v.f + at * s->width, s->width, 1, s->width);
    chunk_scale_rows(ws->bk, ws->k, s->d, &root, 1);
    const step_token keys = {.decay_m1 = &gamma_m1, .k = ws->bk, .v = ws->bk, .weight = 1};
    step_state(&keys, hk, hk_ld, s->depth, s->d, NULL);
    kern_solve_report report = mesa_solve_token(hk, hk_ld, ws->lambda, s->depth, s->d, solver, ws->q, ws->x, ws->solve);
    const mesa_reports reports = reports_of(j, t);
    mesa_report(&reports, 0, report);
    const step_token values = {.decay_m1 = &gamma_m1, .k = ws->k, .v = ws->v, .weight = beta, .q = ws->x};
    step_state(&values, hv, hv_ld, s->depth, s->w, ws->o);
    if (a->x.p)
        chunk_store(a->x.f + at * s->depth, s->depth, ws->x, s->d, 1, s->depth);
    chunk_store(a->o.f + at * s->width, s->width, ws->o, s->w, 1, s->width);
}

static void run_generated(const job *j, const kern_row *row) {
    const mesa_shape *s = &j->shape;
    float *slot = slot_of(j, row), *hk = j->ws.state, *hv = hk + s->d;
    int64_t hk_ld = s->row, hv_ld = s->row;
    const bool in_place = slot && s->d == s->depth && s->w == s->width;
    if (in_place) {
        hk = slot_keys(j, slot);
        hv = slot_values(j, slot);
        hk_ld = s->depth;
        hv_ld = s->width;
    } else if (slot) {
        load_state(j, slot_keys(j, slot), slot_values(j, slot), s->depth, s->width);
    } else {
        memset(hk, 0, (size_t)s->depth * s->row * sizeof(float));
    }
    for (int t = row->token0; t < row->token0 + row->length; t++) {
        if (t > row->token0 && j->rows->token_start[t] == t)
            for (int i = 0; i < s->depth; i++) {
                memset(hk + i * hk_ld, 0, (size_t)s->d * sizeof(float));
                memset(hv + i * hv_ld, 0, (size_t)s->w * sizeof(float));
            }
        run_token(j, t, &row->solver, hk, hk_ld, hv, hv_ld);
    }
    if (slot && !in_place)
        store_state(j, slot_keys(j, slot), slot_values(j, slot), s->depth, s->width);
}

static job job_of(const kern_cpu *cpu, const kern_rows *rows, const kern_mesa_args *a, int head) {
    job j = {.a = a, .rows = rows, .shape = mesa_shape_of(&a->mesa, cpu->chunk), .head = head};
    j.ws = lay_out(kern_cpu_workspace(cpu, kern_team_thread()), &j.shape);
    mesa_lambda(&j.shape, a->lambda_params.f + (int64_t)head * j.shape.depth, a->mesa.lambda_bound, j.ws.lambda);
    return j;
}

typedef struct launch {
    const kern_cpu *cpu;
    const kern_rows *rows;
    const kern_mesa_args *a;
} launch;

// A row and a head.
static void run_item(const void *context, int64_t item) {
    const launch *l = context;
    const int heads = l->a->mesa.heads, r = (int)(item / heads);
    const job j = job_of(l->cpu, l->rows, l->a, (int)(item % heads));
    if (l->rows->row[r].kind == KERN_ROW_GENERATED)
        run_generated(&j, &l->rows->row[r]);
    else
        run_prompt(&j, r);
}

// A chunk and a head.
static void run_snapshot_item(const void *context, int64_t item) {
    const launch *l = context;
    const job j = job_of(l->cpu, l->rows, l->a, (int)(item % l->a->mesa.heads));
    run_snapshot(&j, (int)(item / l->a->mesa.heads));
}

KERN_RUN(mesa, kern_mesa_args) {
    const launch l = {cpu, rows, a};
    const int64_t heads = a->mesa.heads;
    const double operations = 40.0 * (double)(rows->n_tokens * heads) * a->mesa.key_width * a->mesa.key_width;
    kern_share(cpu, run_item, &l, rows->n_rows * heads, operations);
    if (a->snapshots.p)
        kern_share(cpu, run_snapshot_item, &l, rows->n_chunks * heads, operations);
    return KERN_OK;
}

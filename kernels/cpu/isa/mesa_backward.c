// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's core, backward, by implicit differentiation (models.md 2.8). Prompt rows only.
//
// 1. For each (chunk, head): the right-hand sides dX = from_start * (dO Hv^T) + (pair * dO V^T) (beta * K), each
// divided by its
//    norm, a second solve with the forward's rule, U = dX A^-1. dQ = U. A norm below 1e-30 gives u = 0 without a solve.
// 2. For each (row, head), its chunks backwards, with F and G the gradients of Hk and Hv after the chunk, and
//    B = pair * X K^T, Z = pair * (dO V^T - U K^T):
//      dV = beta * (to_end * K G + B^T dO)
//      dK = beta * (to_end * (V G^T + K (F + F^T)) + Z^T X - B^T U)
//      dbeta = (rowsum(K * dK) + rowsum(V * dV)) / (2 beta)
//      G = e^{c_C} G + (from_start * X)^T dO,   F = e^{c_C} F - (from_start * U)^T X
//    and the decays by chunk_decay_gradient. Every sum takes x and u as they are, so the gradient of a decay needs
//    neither o nor Hk x and stays the right one for the u and x of an inexact solve.
// 3. For each head, dlambda = - sum over tokens of u * x, in fixed blocks of tokens, whatever the number of threads.
#include "kernels/cpu/isa/mesa.h"

enum { TOKEN_BLOCK = 64 };

typedef struct workspace {
    float *k, *bk, *x, *u, *dk;          // (C, d); u: solutions, in the second pass -U
    float *v, *d_o, *dv;                 // (C, w)
    float *state, *grad;                 // (D, row): [Hk | Hv], [F | G]
    float *turned, *symmetric;           // (V, d): Hv^T, then G^T; (D, d): F + F^T
    float *kt, *vt;                      // (D, C), (V, C)
    float *pair, *reads, *writes, *flow; // (C, C)
    float *lambda, *solve;
    size_t bytes;
} workspace;

static workspace lay_out(char *base, const mesa_shape *shape) {
    const size_t d = (size_t)shape->d, w = (size_t)shape->w, c = (size_t)shape->chunk, depth = (size_t)shape->depth;
    const size_t cd = c * d, cw = c * w, cc = c * c, state = depth * (d + w);
    workspace ws;
    float **piece[] = {&ws.k,    &ws.bk,    &ws.x,      &ws.u,      &ws.dk,        &ws.v,    &ws.d_o,
                       &ws.dv,   &ws.state, &ws.grad,   &ws.turned, &ws.symmetric, &ws.kt,   &ws.vt,
                       &ws.pair, &ws.reads, &ws.writes, &ws.flow,   &ws.lambda,    &ws.solve};
    const size_t count[] = {cd,    cd,        cd,        cd,    cd,
                            cw,    cw,        cw,        state, state,
                            w * d, depth * d, depth * c, w * c, cc,
                            cc,    cc,        cc,        d,     mesa_chunk_size(shape->depth, shape->d, shape->chunk)};
    size_t used = 0;
    for (size_t i = 0; i < sizeof count / sizeof count[0]; i++) {
        *piece[i] = (float *)(base + used);
        used += kern_align64(count[i] * sizeof(float));
    }
    ws.bytes = used;
    return ws;
}

KERN_PREPARE(mesa_backward, kern_mesa_backward_args) {
    kern_status status = kern_mesa_check(&a->mesa, MESA_KEY_MAX, MESA_VALUE_MAX);
    if (status != KERN_OK)
        return status;
    if (a->mesa.storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->g.ref || !a->beta.ref || !a->lambda_params.ref || !a->x.ref ||
        !a->snapshots.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref || !a->dv.ref || !a->dg.ref || !a->dbeta.ref ||
        !a->grad_lambda_params.ref || !(a->backward_tolerance >= 0))
        return KERN_INVALID;
    const mesa_shape shape = mesa_shape_of(&a->mesa, cpu->chunk);
    *thread_bytes = lay_out(NULL, &shape).bytes;
    return KERN_OK;
}

// One work item: a head of a chunk or row.
typedef struct job {
    const kern_mesa_backward_args *a;
    const kern_rows *rows;
    mesa_shape shape;
    workspace ws;
    int head;
} job;

static job job_of(const kern_cpu *cpu, const kern_rows *rows, const kern_mesa_backward_args *a, int head) {
    job j = {.a = a, .rows = rows, .shape = mesa_shape_of(&a->mesa, cpu->chunk), .head = head};
    j.ws = lay_out(kern_cpu_workspace(cpu, kern_team_thread()), &j.shape);
    return j;
}

static int64_t key_at(const job *j, int64_t token) {
    return (token * j->shape.heads + j->head) * j->shape.depth;
}
static int64_t value_at(const job *j, int64_t token) {
    return (token * j->shape.heads + j->head) * j->shape.width;
}

// What both passes need of a chunk: decays, k, v, d_o, beta, K^T, V^T, the state before it and Hv^T.
static void load_chunk(const job *j, int index, chunk_decay *decay, float *beta) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const kern_chunk *chunk = &j->rows->chunk[index];
    const int64_t keys = (int64_t)s->heads * s->depth, values = (int64_t)s->heads * s->width;
    const int n = chunk->length, c = s->chunk;
    const float *snapshot =
        j->a->snapshots.f + ((int64_t)index * s->heads + j->head) * s->depth * (s->depth + s->width);
    chunk_decay_fill(decay, j->rows, chunk, j->a->g.f + j->head, s->heads, c, ws->pair);
    chunk_load(ws->k, s->d, j->a->k.f + key_at(j, chunk->token0), keys, n, s->depth);
    chunk_load(ws->v, s->w, j->a->v.f + value_at(j, chunk->token0), values, n, s->width);
    chunk_load(ws->d_o, s->w, j->a->d_o.f + value_at(j, chunk->token0), values, n, s->width);
    for (int i = 0; i < n; i++)
        beta[i] = j->a->beta.f[(int64_t)(chunk->token0 + i) * s->heads + j->head];
    chunk_transpose(ws->kt, c, decay->columns, ws->k, s->d, n, s->depth);
    chunk_transpose(ws->vt, c, decay->columns, ws->v, s->w, n, s->width);
    for (int i = 0; i < s->depth; i++) {
        const float *from = snapshot + (int64_t)i * (s->depth + s->width);
        chunk_load(ws->state + i * s->row, s->d, from, s->depth, 1, s->depth);
        chunk_load(ws->state + i * s->row + s->d, s->w, from + s->depth, s->width, 1, s->width);
    }
    chunk_transpose(ws->turned, s->d, s->d, ws->state + s->d, s->row, s->depth, s->width);
}

// ----------------------------------------------------------------------------------------------------- second solve

// Divides each row by its norm; norm[i] = 0 where it is below 1e-30, and the row is zero then.
static void normalise(float *rows, int width, int count, float *norm) {
    for (int i = 0; i < count; i++) {
        float *row = rows + i * width, largest = 0, poison = 0;
        for (int l = 0; l < width; l++) {
            largest = fabsf(row[l]) > largest ? fabsf(row[l]) : largest;
            poison += row[l] * 0.0f; // NaN where anything is not finite
        }
        largest += poison;
        if (largest < 1e-30f) {
            memset(row, 0, (size_t)width * sizeof(float));
            norm[i] = 0;
            continue;
        }
        const float down = 1 / largest;
        chunk_scale_rows(row, row, width, &down, 1);
        const float rest = sqrtf(chunk_dot(row, row, width)), unit = 1 / rest;
        chunk_scale_rows(row, row, width, &unit, 1);
        norm[i] = largest * rest;
    }
}

static void solve_chunk(const job *j, int index) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const kern_chunk *chunk = &j->rows->chunk[index];
    const int n = chunk->length, c = s->chunk;
    float beta[CHUNK_MAX], norm[CHUNK_MAX], *rhs = ws->x;
    chunk_decay decay;
    kern_solver solver = j->rows->row[chunk->row].solver;
    solver.tolerance = fminf(solver.tolerance, j->a->backward_tolerance);
    load_chunk(j, index, &decay, beta);
    mesa_lambda(s, j->a->lambda_params.f + (int64_t)j->head * s->depth, j->a->mesa.lambda_bound, ws->lambda);
    chunk_scale_rows(ws->bk, ws->k, s->d, beta, n);
    const bool carries = chunk_carries(&decay);
    if (carries) {
        gemm_nn(n, s->d, s->width, ws->d_o, s->w, ws->turned, s->d, rhs, s->d, 0);
        chunk_scale_rows(rhs, rhs, s->d, decay.from_start, n);
    }
    gemm_lower_nn(n, decay.columns, s->width, ws->d_o, s->w, ws->vt, c, ws->writes, c, 0);
    chunk_mask_pairs(&decay, ws->writes, 1);
    gemm_nn_lower(n, s->d, n, ws->writes, c, ws->bk, s->d, rhs, s->d, carries);
    normalise(rhs, s->d, n, norm);
    const mesa_system system = {.decay = &decay,
                                .hk = ws->state,
                                .ld = s->row,
                                .kt = ws->kt,
                                .k = ws->k,
                                .bk = ws->bk,
                                .beta = beta,
                                .lambda = ws->lambda,
                                .depth = s->depth,
                                .width = s->d};
    const mesa_reports reports = mesa_reports_of(j->a->report, j->a->sum, chunk->token0, j->head, s->heads);
    mesa_solve_chunk(&system, &solver, rhs, ws->u, &reports, ws->solve);
    chunk_scale_rows(ws->u, ws->u, s->d, norm, n);
    chunk_store(j->a->dq.f + key_at(j, chunk->token0), (int64_t)s->heads * s->depth, ws->u, s->d, n, s->depth);
}

// ------------------------------------------------------------------------------------------------ chunks, backwards

// B, Z and the flows beta Z (X K^T); u holds -U.
static void fill_pairs(const job *j, const chunk_decay *decay, const float *beta) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const int n = decay->length, c = s->chunk;
    gemm_lower_nn(n, decay->columns, s->depth, ws->x, s->d, ws->kt, c, ws->reads, c, 0);
    gemm_lower_nn(n, decay->columns, s->width, ws->d_o, s->w, ws->vt, c, ws->writes, c, 0);
    gemm_lower_nn(n, decay->columns, s->depth, ws->u, s->d, ws->kt, c, ws->writes, c, 1);
    chunk_mask_pairs(decay, ws->writes, 1);
    for (int i = 0; i < n; i++)
        for (int column = 0, end = gemm_lower_columns(i, n); column < end; column += KERN_VL) {
            const int at = i * c + column;
            vf_store(ws->flow + at, vf_load(ws->reads + at) * vf_load(ws->writes + at) * vf_load(beta + column));
        }
    chunk_mask_pairs(decay, ws->reads, 1);
}

// dK / beta and dV / beta; leave as in chunk_decay_gradient.
static void key_value_gradients(const job *j, const chunk_decay *decay, const float *beta, float *leave) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const int n = decay->length, c = s->chunk;
    float *const f = ws->grad, *const g = ws->grad + s->d;
    gemm_nn(n, s->w, s->depth, ws->k, s->d, g, s->row, ws->dv, s->w, 0);
    chunk_scale_rows(ws->dv, ws->dv, s->w, decay->to_end, n);
    gemm_tn_lower(n, s->w, n, ws->reads, c, ws->d_o, s->w, ws->dv, s->w, 1);

    chunk_transpose(ws->turned, s->d, s->d, g, s->row, s->depth, s->width);
    chunk_transpose(ws->symmetric, s->d, s->d, f, s->row, s->depth, s->depth);
    for (int i = 0; i < s->depth; i++)
        for (int l = 0; l < s->d; l += KERN_VL)
            vf_store(ws->symmetric + i * s->d + l, vf_load(ws->symmetric + i * s->d + l) + vf_load(f + i * s->row + l));
    gemm_nn(n, s->d, s->width, ws->v, s->w, ws->turned, s->d, ws->dk, s->d, 0);
    for (int i = 0; i < n; i++)
        leave[i] = chunk_dot(ws->k + i * s->d, ws->dk + i * s->d, s->d);
    gemm_nn(n, s->d, s->depth, ws->k, s->d, ws->symmetric, s->d, ws->dk, s->d, 1);
    for (int i = 0; i < n; i++) { // k G v + k F k = (k G v + k (G v + (F + F^T) k)) / 2
        leave[i] += chunk_dot(ws->k + i * s->d, ws->dk + i * s->d, s->d);
        leave[i] *= 0.5f * beta[i] * decay->to_end[i];
    }
    chunk_scale_rows(ws->dk, ws->dk, s->d, decay->to_end, n);
    gemm_tn_lower(n, s->d, n, ws->writes, c, ws->x, s->d, ws->dk, s->d, 1);
    gemm_tn_lower(n, s->d, n, ws->reads, c, ws->u, s->d, ws->dk, s->d, 1);
}

static void decay_gradients(const job *j, const chunk_decay *decay, int64_t token0, const float *leave) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const int n = decay->length;
    float enter[CHUNK_MAX] = {0}, through = 0, *sum = ws->bk; // (C, d)
    if (chunk_carries(decay)) {
        gemm_nn(n, s->d, s->width, ws->d_o, s->w, ws->turned, s->d, sum, s->d, 0);
        gemm_nn(n, s->d, s->depth, ws->u, s->d, ws->state, s->row, sum, s->d, 1);
        for (int i = 0; i < n; i++)
            enter[i] = decay->from_start[i] * chunk_dot(sum + i * s->d, ws->x + i * s->d, s->d);
    }
    if (decay->first[n - 1] < 0) {
        for (int i = 0; i < s->depth; i++)
            through += chunk_dot(ws->grad + i * s->row, ws->state + i * s->row, s->row);
        through += through * decay->whole_m1;
    }
    chunk_decay_gradient(decay, ws->flow, enter, leave, through, j->a->dg.f + token0 * s->heads + j->head, s->heads);
}

static void run_chunk(const job *j, int index) {
    const mesa_shape *s = &j->shape;
    const workspace *ws = &j->ws;
    const kern_chunk *chunk = &j->rows->chunk[index];
    const int64_t keys = (int64_t)s->heads * s->depth, values = (int64_t)s->heads * s->width;
    const int64_t key0 = key_at(j, chunk->token0), value0 = value_at(j, chunk->token0);
    const int n = chunk->length;
    float beta[CHUNK_MAX] __attribute__((aligned(64))) = {0}, leave[CHUNK_MAX], minus = -1;
    chunk_decay decay;
    load_chunk(j, index, &decay, beta);
    chunk_load(ws->x, s->d, j->a->x.f + key0, keys, n, s->depth);
    chunk_load(ws->u, s->d, j->a->dq.f + key0, keys, n, s->depth);
    for (int i = 0; i < n; i++)
        chunk_scale_rows(ws->u + i * s->d, ws->u + i * s->d, s->d, &minus, 1);
    fill_pairs(j, &decay, beta);
    key_value_gradients(j, &decay, beta, leave);
    chunk_transpose(ws->turned, s->d, s->d, ws->state + s->d, s->row, s->depth, s->width);
    decay_gradients(j, &decay, chunk->token0, leave);
    for (int i = 0; i < n; i++)
        j->a->dbeta.f[(int64_t)(chunk->token0 + i) * s->heads + j->head] =
            0.5f * (chunk_dot(ws->k + i * s->d, ws->dk + i * s->d, s->d) +
                    chunk_dot(ws->v + i * s->w, ws->dv + i * s->w, s->w));
    chunk_scale_rows(ws->dk, ws->dk, s->d, beta, n);
    chunk_scale_rows(ws->dv, ws->dv, s->w, beta, n);
    chunk_store(j->a->dk.f + key0, keys, ws->dk, s->d, n, s->depth);
    chunk_store(j->a->dv.f + value0, values, ws->dv, s->w, n, s->width);
    float *scaled = ws->bk;
    chunk_scale_rows(scaled, ws->u, s->d, decay.from_start, n);
    chunk_retreat_state(&decay, ws->grad, s->row, scaled, s->d, ws->x, s->d, s->depth, s->d);
    chunk_scale_rows(scaled, ws->x, s->d, decay.from_start, n);
    chunk_retreat_state(&decay, ws->grad + s->d, s->row, scaled, s->d, ws->d_o, s->w, s->depth, s->w);
}

static void run_row(const job *j, int r) {
    const mesa_shape *s = &j->shape;
    const kern_rows *rows = j->rows;
    const int64_t kk = (int64_t)s->depth * s->depth, kv = (int64_t)s->depth * s->width;
    const int first = chunk_of_row(rows, r);
    float *dkeys = NULL, *dvalues = NULL;
    int last = first;
    while (last + 1 < rows->n_chunks && rows->chunk[last + 1].row == r)
        last++;
    memset(j->ws.grad, 0, (size_t)s->depth * s->row * sizeof(float));
    if (j->a->dstate.p) {
        dkeys = j->a->dstate.f + r * s->heads * (kk + kv) + j->head * kk;
        dvalues = j->a->dstate.f + r * s->heads * (kk + kv) + s->heads * kk + j->head * kv;
        for (int i = 0; i < s->depth; i++) {
            chunk_load(j->ws.grad + i * s->row, s->d, dkeys + i * s->depth, s->depth, 1, s->depth);
            chunk_load(j->ws.grad + i * s->row + s->d, s->w, dvalues + i * s->width, s->width, 1, s->width);
        }
    }
    for (int i = last; i >= first; i--)
        run_chunk(j, i);
    if (dkeys) {
        chunk_store(dkeys, s->depth, j->ws.grad, s->row, s->depth, s->depth);
        chunk_store(dvalues, s->width, j->ws.grad + s->d, s->row, s->depth, s->width);
    }
}

// ------------------------------------------------------------------------------------------------------------ lambda

static void lambda_gradient(const kern_mesa_backward_args *a, int64_t tokens, int head) {
    const kern_mesa *mesa = &a->mesa;
    const int depth = mesa->key_width;
    const int64_t stride = (int64_t)mesa->heads * depth;
    for (int l = 0; l < depth; l += KERN_VL) {
        const int lanes = depth - l < KERN_VL ? depth - l : KERN_VL;
        const int64_t at = (int64_t)head * depth + l;
        vf total = {0};
        for (int64_t t0 = 0; t0 < tokens; t0 += TOKEN_BLOCK) {
            vf sum = {0};
            for (int64_t t = t0; t < t0 + TOKEN_BLOCK && t < tokens; t++) {
                const float *u = a->dq.f + t * stride + at, *x = a->x.f + t * stride + at;
                sum += lanes == KERN_VL ? vf_load(u) * vf_load(x) : vf_load_part(u, lanes) * vf_load_part(x, lanes);
            }
            total += sum;
        }
        float params[KERN_VL] = {0}, *grad = a->grad_lambda_params.f + at;
        memcpy(params, a->lambda_params.f + at, (size_t)lanes * sizeof(float));
        vf chain = total * vf_sigmoid(vf_load(params));
        for (int i = 0; i < lanes; i++)
            grad[i] -= chain[i];
    }
}

KERN_RUN(mesa_backward, kern_mesa_backward_args) {
    const int heads = a->mesa.heads;
    const double operations = 40.0 * rows->n_tokens * heads * a->mesa.key_width * a->mesa.key_width;
    if (rows->n_generated > 0)
        return KERN_INVALID;
#pragma omp parallel for schedule(dynamic) if (kern_worth_team(operations))
    for (int item = 0; item < rows->n_chunks * heads; item++) {
        const job j = job_of(cpu, rows, a, item % heads);
        solve_chunk(&j, item / heads);
    }
#pragma omp parallel for schedule(dynamic) if (kern_worth_team(operations))
    for (int item = 0; item < rows->n_rows * heads; item++) {
        const job j = job_of(cpu, rows, a, item % heads);
        run_row(&j, item / heads);
    }
#pragma omp parallel for schedule(static) if (kern_worth_team(operations))
    for (int head = 0; head < heads; head++)
        lambda_gradient(a, rows->n_tokens, head);
    return KERN_OK;
}

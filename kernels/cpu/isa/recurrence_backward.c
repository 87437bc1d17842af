// SPDX-License-Identifier: Apache-2.0
// The recurrence family, backward (models.md 11.3, 11.4). Prompt rows only.
//
// A strip of a state walks its row's chunks backwards; the states before the blocks of a chunk, and what was written in
// them, are made again from the chunk's snapshot. For a block, with S the state before it, G the gradient of the state
// after it, `*` for the decays (start: from the block's start, end: to its end, E: between two tokens of it):
//   dU = (end * K) G + P^T dO                         P = scale Q K^T * E
//   delta rule: errors e = u / w answer to M = dU + N^T (w * M), N = -strict_tril(K K^T * E); otherwise M = dU, e = v
//   dw = rowsum(M * e)        dV = w * M + skip * dO
//   Z = scale tril(dO U^T), Y = -strict_tril(w * M U^T) the gradients of the decayed products q k and k k:
//   dQ = scale start * (dO S^T) + (Z * E) K
//   dK = end * (U G^T) + (Z * E)^T Q + (Y * E) K + (Y * E)^T K - start * (w * M S^T)
//   G  = decay G + scale (start * Q)^T dO - (start * K)^T (w * M)
// The delta rule's error is a reading of the state by k: its terms are those of q with the gradient -w * M, strictly
// from earlier tokens. Gradients of decays: chunk_decay_gradient, channel_decay_gradient.
//
// A work item is the smallest group of states that shares no head of q, k and v with another, of one row. Its strips
// follow one another, and what they share is added up in that order.
#include "kernels/cpu/isa/recurrence_block.h"

enum { BLOCKS_MAX = CHUNK_MAX / CHANNEL_BLOCK, TOKEN_BLOCK = 64 };

typedef struct workspace {
    recurrence_block block[BLOCKS_MAX];
    float *state[BLOCKS_MAX];        // (D, w): before each block
    float *grad;                     // (D, w): G
    float *turned;                   // (w, d): S^T or G^T
    float *q, *dx, *scaled;          // (B, d)
    float *dk, *leave, *rest;        // (B, d): of K to later tokens, to the state after the block, otherwise
    float *arrives;                  // (B, d): what tokens take from before them, with a decay a channel
    float *enter;                    // (C): from the state before the block, with a decay a head
    float *through;                  // (d): what the decay over the block lets through from state to state
    float *d_o, *dv, *errors;        // (B, w): dO, M, w * M
    float *skipped;                  // (B, w): skip * dO
    float *ut;                       // (w, B)
    float *products, *writes, *flow; // (B, B): P, Z or Y, what flows between tokens with a decay a head
    size_t bytes;
} workspace;

static workspace lay_out(char *base, const recurrence_shape *s, const kern_recurrence *f, int chunk) {
    const size_t d = (size_t)s->d, w = (size_t)gemm_pad(s->strip), b = (size_t)s->block;
    size_t used = 0;
    workspace ws;
    float **const key_rows[] = {&ws.q, &ws.dx, &ws.scaled, &ws.dk, &ws.leave, &ws.rest, &ws.arrives};
    float **const value_rows[] = {&ws.d_o, &ws.dv, &ws.errors, &ws.skipped};
    float **const squares[] = {&ws.products, &ws.writes, &ws.flow};
    for (int i = 0; i < 7; i++)
        *key_rows[i] = workspace_take(base, &used, b * d);
    for (int i = 0; i < 4; i++)
        *value_rows[i] = workspace_take(base, &used, b * w);
    for (int i = 0; i < 3; i++)
        *squares[i] = workspace_take(base, &used, b * b);
    ws.grad = workspace_take(base, &used, d * w);
    ws.turned = workspace_take(base, &used, w * d);
    ws.ut = workspace_take(base, &used, w * b);
    ws.enter = workspace_take(base, &used, CHUNK_MAX);
    ws.through = workspace_take(base, &used, d);
    for (int i = 0; i < chunk / s->block; i++) {
        ws.state[i] = workspace_take(base, &used, d * w);
        block_lay_out(&ws.block[i], s, f, base, &used);
    }
    ws.bytes = used;
    return ws;
}

KERN_PREPARE(recurrence_backward, kern_recurrence_backward_args) {
    const kern_recurrence *f = &a->family;
    kern_status status =
        kern_recurrence_check(f, RECURRENCE_WIDTH_MAX, a->g.ref != 0, a->beta.ref != 0, a->skip.ref != 0);
    if (status != KERN_OK)
        return status;
    if (f->storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    const bool decays = f->decay == KERN_DECAY_SCALAR || f->decay == KERN_DECAY_CHANNEL;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->snapshots.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref ||
        !a->dv.ref || (f->weighted != 0) != (a->dbeta.ref != 0) || decays != (a->dg.ref != 0) ||
        (f->skip_width != 0) != (a->grad_skip.ref != 0))
        return KERN_INVALID;
    const recurrence_shape shape = recurrence_shape_of(f, cpu->chunk);
    *thread_bytes = lay_out(NULL, &shape, f, cpu->chunk).bytes;
    return KERN_OK;
}

typedef struct backward_job {
    recurrence_job strip;
    const kern_recurrence_backward_args *a;
    workspace ws;
    bool add_query, add_key, add_value, add_gate; // an earlier strip has written there already
} backward_job;

// A reading of the block by the rows x of q or k: y is its output gradient, scale * products what it finds.
typedef struct reading {
    const float *x, *y;    // (n, d), (n, w)
    const float *products; // scale x K^T * E
    float scale;
    bool own; // a token reads what it has written itself
} reading;

static void store(bool add, float *to, int64_t stride, const float *from, int ld, int count, int width) {
    (add ? chunk_store_add : chunk_store)(to, stride, from, ld, count, width);
}

static void load_reader(const backward_job *j, const recurrence_block *block, int reader) {
    const recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const int64_t token0 = block->piece.token0;
    block_rows(block, j->ws.q, s->d, job->q + query_at(job, token0, reader), (int64_t)s->queries * s->depth, s->depth);
    chunk_load(j->ws.d_o, job->w, j->a->d_o.f + output_at(job, token0, reader), (int64_t)s->outputs * s->columns,
               block->piece.length, job->columns);
    block_pairs(block, s, j->ws.q, job->family->scale, j->ws.products);
}

// skipped += skip * dO of one reader.
static void add_skip(const backward_job *j, int n, int reader) {
    const recurrence_job *job = &j->strip;
    const int skip_width = job->family->skip_width, head = job->state * job->shape.readers + reader;
    const float *skip = job->skip + (int64_t)head * skip_width + (skip_width > 1 ? job->column0 : 0);
    for (int i = 0; i < n; i++)
        for (int l = 0; l < job->values; l++)
            j->ws.skipped[i * job->w + l] += skip[skip_width > 1 ? l : 0] * j->ws.d_o[i * job->w + l];
}

// dU, then M and w * M; dV and dw go out. Leaves the last reader loaded.
static void value_gradients(const backward_job *j, const recurrence_block *block) {
    const recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const workspace *ws = &j->ws;
    const int n = block->piece.length, w = job->w, ld = s->block;
    const int64_t token0 = block->piece.token0;
    const bool delta = job->family->update == KERN_UPDATE_DELTA;
    gemm_nn(n, w, s->depth, block->ended, s->d, ws->grad, w, ws->dv, w, 0);
    if (job->skip)
        memset(ws->skipped, 0, (size_t)(n * w) * sizeof(float));
    for (int reader = 0; reader < s->readers; reader++) {
        load_reader(j, block, reader);
        gemm_tn_lower(n, w, n, ws->products, ld, ws->d_o, w, ws->dv, w, 1);
        if (job->skip)
            add_skip(j, n, reader);
    }
    if (delta)
        delta_solve_transposed(n, block->inner, ld, block->weight, ws->dv, ws->errors, w);
    else
        chunk_scale_rows(ws->errors, ws->dv, w, block->weight, n);
    if (j->a->dbeta.p)
        for (int i = 0; i < n; i++) {
            float *dbeta = j->a->dbeta.f + (token0 + i) * s->states + job->state;
            const float *answer = delta ? block->error : block->v;
            *dbeta = (j->add_gate ? *dbeta : 0) + chunk_dot(answer + i * w, ws->dv + i * w, w);
        }
    float *dv = ws->errors;
    if (job->skip)
        for (int i = 0; i < n * w; i += KERN_VL)
            vf_store(ws->skipped + i, vf_load(ws->skipped + i) + vf_load(ws->errors + i));
    store(j->add_value, j->a->dv.f + value_at(job, token0), (int64_t)s->values * s->width, job->skip ? ws->skipped : dv,
          w, n, job->values);
}

// What one reading of the block gets through the decayed products x k^T * E, whose gradients are writes = scale y U^T.
static void pair_gradients(const backward_job *j, const recurrence_block *block, const reading *r) {
    const recurrence_shape *s = &j->strip.shape;
    const workspace *ws = &j->ws;
    const int n = block->piece.length, d = s->d, ld = s->block;
    for (int i = 0; i < n; i++)
        for (int at = i * ld, end = at + gemm_lower_columns(i, n); j->a->dg.p && at < end; at += KERN_VL)
            vf_store(ws->flow + at, vf_load(ws->flow + at) + vf_load(ws->writes + at) * vf_load(r->products + at));
    chunk_mask_pairs(&block->decay, ws->writes, r->scale);
    for (int i = 0; !r->own && i < n; i++)
        ws->writes[i * ld + i] = 0;
    gemm_nn_lower(n, d, n, ws->writes, ld, block->k, d, ws->dx, d, 1);
    gemm_tn_lower(n, d, n, ws->writes, ld, r->x, d, ws->dk, d, 1);
}

static void pair_gradients_by_channel(const backward_job *j, const recurrence_block *block, const reading *r) {
    const workspace *ws = &j->ws;
    const int n = block->piece.length, d = j->strip.shape.d, ld = j->strip.shape.block;
    for (int i = 0; i < CHANNEL_BLOCK; i++)
        for (int l = 0; l < ld; l += KERN_VL)
            vf_store(ws->writes + i * ld + l, i < n && l <= i ? vf_load(ws->writes + i * ld + l) * r->scale : (vf){0});
    channel_pair_gradients(ws->writes, ld, r->x, block->k, block->alpha, d, ws->dx, ws->dk);
    for (int i = 0; i < n; i++) {
        const float own = r->own ? ws->writes[i * ld + i] : 0;
        for (int at = i * d; at < (i + 1) * d; at += KERN_VL) {
            const vf x = vf_load(r->x + at), dx = vf_load(ws->dx + at);
            vf_store(ws->arrives + at, vf_load(ws->arrives + at) + x * dx);
            vf_store(ws->dx + at, dx + own * vf_load(block->k + at));
            vf_store(ws->rest + at, vf_load(ws->rest + at) + own * x);
        }
    }
}

// dx, its part of dk and of the state's gradient. turned is S^T.
static void run_reading(const backward_job *j, const recurrence_block *block, const reading *r) {
    const recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const workspace *ws = &j->ws;
    const int n = block->piece.length, w = job->w, d = s->d;
    if (chunk_carries(&block->decay)) {
        gemm_nn(n, d, job->columns, r->y, w, ws->turned, d, ws->dx, d, 0);
        block_from_start(block, ws->dx, ws->dx, d, r->scale);
        for (int i = 0; i < n; i++)
            ws->enter[i] += chunk_dot(r->x + i * d, ws->dx + i * d, d);
    } else {
        memset(ws->dx, 0, (size_t)(n * d) * sizeof(float));
    }
    gemm_lower_nn(n, block->decay.columns, job->columns, r->y, w, ws->ut, s->block, ws->writes, s->block, 0);
    (block->alpha ? pair_gradients_by_channel : pair_gradients)(j, block, r);
    if (block->decay.first[0] < 0) {
        block_from_start(block, ws->scaled, r->x, d, r->scale);
        gemm_tn(s->depth, w, n, ws->scaled, d, r->y, w, ws->grad, w, 1);
    }
}

// ws->through: what the decay over the block lets through from state to state, by channel.
static void flow_through(const backward_job *j, const recurrence_block *block, const float *state) {
    const int w = j->strip.w;
    const bool keeps = block->decay.first[block->piece.length - 1] < 0;
    float *through = j->ws.through;
    memset(through, 0, (size_t)j->strip.shape.d * sizeof(float));
    for (int i = 0; keeps && i < j->strip.shape.depth; i++) {
        const float sum = chunk_dot(j->ws.grad + i * w, state + i * w, w);
        through[i] = sum + sum * (block->alpha ? block->whole_m1[i] : block->decay.whole_m1);
    }
}

static void decay_gradients(const backward_job *j, const recurrence_block *block) {
    const recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const workspace *ws = &j->ws;
    const int n = block->piece.length, d = s->d;
    float *dg = j->a->dg.f + gate_at(job, block->piece.token0), leave[CHUNK_MAX], sum[CHUNK_MAX], all = 0;
    if (block->alpha) {
        channel_decay_gradient(&block->decay, d, block->k, ws->arrives, ws->dk, ws->leave, ws->through, ws->arrives);
        store(j->add_gate, dg, (int64_t)s->states * s->depth, ws->arrives, d, n, s->depth);
        return;
    }
    for (int i = 0; i < s->depth; i++)
        all += ws->through[i];
    for (int i = 0; i < n; i++)
        leave[i] = chunk_dot(block->k + i * d, ws->leave + i * d, d);
    chunk_decay_gradient(&block->decay, ws->flow, ws->enter, leave, all, sum, 1);
    store(j->add_gate, dg, s->states, sum, 1, n, 1);
}

static void run_block(const backward_job *j, const recurrence_block *block, const float *state) {
    const recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const workspace *ws = &j->ws;
    const int n = block->piece.length, w = job->w, d = s->d, ld = s->block;
    const int64_t token0 = block->piece.token0;
    value_gradients(j, block);
    chunk_transpose(ws->turned, d, d, ws->grad, w, s->depth, job->columns);
    gemm_nn(n, d, job->columns, block->u, w, ws->turned, d, ws->leave, d, 0);
    block_to_end(block, ws->leave, ws->leave, d);
    if (j->a->dg.p)
        flow_through(j, block, state);
    block_decay_state(job, block, ws->grad);
    chunk_transpose(ws->turned, d, d, state, w, s->depth, job->columns);
    chunk_transpose(ws->ut, ld, block->decay.columns, block->u, w, n, job->columns);
    memset(ws->dk, 0, (size_t)(ld * d) * sizeof(float));
    memset(ws->rest, 0, (size_t)(n * d) * sizeof(float));
    memset(ws->arrives, 0, (size_t)(n * d) * sizeof(float));
    memset(ws->enter, 0, CHUNK_MAX * sizeof(float));
    memset(ws->flow, 0, (size_t)(ld * ld) * sizeof(float));
    for (int reader = s->readers - 1; reader >= 0; reader--) {
        if (reader < s->readers - 1)
            load_reader(j, block, reader);
        run_reading(j, block, &(reading){ws->q, ws->d_o, ws->products, job->family->scale, true});
        store(j->add_query, j->a->dq.f + query_at(job, token0, reader), (int64_t)s->queries * s->depth, ws->dx, d, n,
              s->depth);
    }
    if (job->family->update == KERN_UPDATE_DELTA) {
        run_reading(j, block, &(reading){block->k, ws->errors, block->inner, -1, false});
        for (int i = 0; i < n * d; i += KERN_VL)
            vf_store(ws->rest + i, vf_load(ws->rest + i) + vf_load(ws->dx + i));
    }
    if (j->a->dg.p)
        decay_gradients(j, block);
    for (int i = 0; i < n * d; i += KERN_VL)
        vf_store(ws->dk + i, vf_load(ws->dk + i) + vf_load(ws->rest + i) + vf_load(ws->leave + i));
    store(j->add_key, j->a->dk.f + key_at(job, token0), (int64_t)s->keys * s->depth, ws->dk, d, n, s->depth);
}

// Makes the chunk's blocks and the states before them again, then goes through them backwards.
static void run_chunk(backward_job *j, int index) {
    const recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const kern_chunk *chunk = &job->rows->chunk[index];
    workspace *ws = &j->ws;
    const int blocks = (chunk->length + s->block - 1) / s->block;
    chunk_load(ws->state[0], job->w, j->a->snapshots.f + state_at(job, index), s->columns, s->depth, job->columns);
    for (int b = 0; b < blocks; b++) {
        const kern_chunk piece = block_piece(s, chunk, b * s->block);
        block_load(job, &piece, &ws->block[b]);
        block_write(job, &ws->block[b], ws->state[b], ws->scaled);
        if (b + 1 < blocks) {
            memcpy(ws->state[b + 1], ws->state[b], (size_t)(s->depth * job->w) * sizeof(float));
            block_advance(job, &ws->block[b], ws->state[b + 1]);
        }
    }
    for (int b = blocks - 1; b >= 0; b--)
        run_block(j, &ws->block[b], ws->state[b]);
}

static void run_strip(backward_job *j, int row, int state, int strip) {
    recurrence_job *job = &j->strip;
    const recurrence_shape *s = &job->shape;
    const kern_rows *rows = job->rows;
    const int first = chunk_of_row(rows, row);
    recurrence_take_strip(job, state, strip);
    j->add_gate = strip > 0;
    j->add_key = strip > 0 || state % (s->states / s->keys) > 0;
    j->add_query = strip > 0 || (s->queries < s->states && state % (s->states / s->queries) > 0);
    j->add_value = state % (s->states / s->values) > 0;
    float *dstate = j->a->dstate.p ? j->a->dstate.f + state_at(job, row) : NULL;
    int last = first;
    while (last + 1 < rows->n_chunks && rows->chunk[last + 1].row == row)
        last++;
    if (dstate)
        chunk_load(j->ws.grad, job->w, dstate, s->columns, s->depth, job->columns);
    else
        memset(j->ws.grad, 0, (size_t)(s->depth * job->w) * sizeof(float));
    for (int i = last; i >= first; i--)
        run_chunk(j, i);
    if (dstate)
        chunk_store(dstate, s->columns, j->ws.grad, job->w, s->depth, job->columns);
}

// ------------------------------------------------------------------------------------------------------------- skip

// grad_skip of one head of o: sums over tokens in fixed blocks.
static void skip_gradient(const kern_recurrence_backward_args *a, const recurrence_shape *s, int64_t tokens, int head) {
    const int value = head / s->readers / (s->states / s->values), skip_width = a->family.skip_width;
    float *grad = a->grad_skip.f + (int64_t)head * skip_width;
    vf all = {0};
    for (int l = 0; l < s->width; l += KERN_VL) {
        const int lanes = s->width - l < KERN_VL ? s->width - l : KERN_VL;
        vf total = {0};
        for (int64_t t0 = 0; t0 < tokens; t0 += TOKEN_BLOCK) {
            vf sum = {0};
            for (int64_t t = t0; t < t0 + TOKEN_BLOCK && t < tokens; t++) {
                const float *d_o = a->d_o.f + (t * s->outputs + head) * s->columns + l;
                const float *v = a->v.f + (t * s->values + value) * s->width + l;
                sum += lanes == KERN_VL ? vf_load(d_o) * vf_load(v) : vf_load_part(d_o, lanes) * vf_load_part(v, lanes);
            }
            total += sum;
        }
        all += total;
        for (int i = 0; skip_width > 1 && i < lanes; i++)
            grad[l + i] += total[i];
    }
    if (skip_width == 1)
        grad[0] += vf_sum(all);
}

// The least common multiple of two divisors of the number of states.
static int common_multiple(int a, int b) {
    int multiple = a;
    while (multiple % b)
        multiple += a;
    return multiple;
}

KERN_RUN(recurrence_backward, kern_recurrence_backward_args) {
    const recurrence_shape s = recurrence_shape_of(&a->family, cpu->chunk);
    const int group = common_multiple(common_multiple(s.states / s.keys, s.states / s.values),
                                      s.queries < s.states ? s.states / s.queries : 1);
    const double operations = 10.0 * rows->n_tokens * s.outputs * s.depth * s.columns;
    const int row_items = s.states / group;
    if (rows->n_generated > 0)
        return KERN_INVALID;
#pragma omp parallel if (kern_worth_team(operations))
    {
        backward_job j = {.strip = {.family = &a->family,
                                    .rows = rows,
                                    .q = a->q.f,
                                    .k = a->k.f,
                                    .v = a->v.f,
                                    .g = a->g.f,
                                    .beta = a->beta.f,
                                    .skip = a->skip.f,
                                    .shape = s},
                          .a = a};
        j.ws = lay_out(kern_cpu_workspace(cpu, kern_team_thread()), &s, &a->family, cpu->chunk);
#pragma omp for schedule(dynamic)
        for (int item = 0; item < rows->n_rows * row_items; item++)
            for (int i = 0; i < group * s.strips; i++)
                run_strip(&j, item / row_items, item % row_items * group + i / s.strips, i % s.strips);
    }
#pragma omp parallel for schedule(static) if (kern_worth_team(2.0 * rows->n_tokens * s.outputs * s.width))
    for (int head = 0; head < (a->family.skip_width ? s.outputs : 0); head++)
        skip_gradient(a, &s, rows->n_tokens, head);
    return KERN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// The recurrence family, forward (models.md 11):
//
//   S~_t = gamma_t S_{t-1}      u_t = w_t v_t, or w_t (v_t - S~_t^T k_t)      S_t = S~_t + k_t u_t^T
//   o_t = scale S_t^T q_t + skip * v_t                                        S (D, V')
//
// Prompt rows, block by block (recurrence_block.h; S: state before the block, P = scale Q K^T times the decays):
//   O = scale (start * Q) S + P U          S = decay S + (end * K)^T U
// Generated rows: token by token, the state in place. A work item is a strip of a state of a row; a prompt row's strip
// lives in the thread's workspace while its row lasts. Sums run over tokens or channels in ascending order, so an
// item's bits depend on its row alone.
#include "kernels/cpu/isa/recurrence_block.h"
#include "kernels/cpu/isa/recurrence_step.h"

typedef struct workspace {
    recurrence_block block;
    float *state;      // (D, w)
    float *q, *scaled; // (B, d)
    float *o;          // (B, w) or (readers, w)
    float *product;    // (B, B)
    float *decay_m1;   // (d), step form
    size_t bytes;
} workspace;

static workspace lay_out(char *base, const recurrence_shape *s, const kern_recurrence *f) {
    const size_t d = (size_t)s->d, w = (size_t)gemm_pad(s->strip), b = (size_t)s->block;
    const size_t readers = (size_t)s->readers;
    size_t used = 0;
    workspace ws;
    ws.state = workspace_take(base, &used, d * w);
    ws.q = workspace_take(base, &used, b * d);
    ws.scaled = workspace_take(base, &used, b * d);
    ws.o = workspace_take(base, &used, (b > readers ? b : readers) * w);
    ws.product = workspace_take(base, &used, b * b);
    ws.decay_m1 = workspace_take(base, &used, d);
    block_lay_out(&ws.block, s, f, base, &used);
    ws.bytes = used;
    return ws;
}

KERN_PREPARE(recurrence, kern_recurrence_args) {
    const kern_recurrence *f = &a->family;
    kern_status status =
        kern_recurrence_check(f, RECURRENCE_WIDTH_MAX, a->g.ref != 0, a->beta.ref != 0, a->skip.ref != 0);
    if (status != KERN_OK)
        return status;
    if (f->storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref)
        return KERN_INVALID;
    const recurrence_shape shape = recurrence_shape_of(f, cpu->chunk);
    *thread_bytes = lay_out(NULL, &shape, f).bytes;
    return KERN_OK;
}

// o (n, w) of consecutive tokens of one reader: + skip * v, to its place.
static void store_outputs(const recurrence_job *job, int64_t token0, int n, int reader, float *o, const float *v,
                          float *to) {
    const recurrence_shape *s = &job->shape;
    const int skip_width = job->family->skip_width, head = job->state * s->readers + reader;
    if (job->skip) {
        const float *skip = job->skip + (int64_t)head * skip_width + (skip_width > 1 ? job->column0 : 0);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < job->values; j++)
                o[i * job->w + j] += skip[skip_width > 1 ? j : 0] * v[i * job->w + j];
    }
    chunk_store(to + output_at(job, token0, reader), (int64_t)s->outputs * s->columns, o, job->w, n, job->columns);
}

static void run_block(const recurrence_job *job, const kern_chunk *piece, workspace *ws, float *o) {
    const recurrence_shape *s = &job->shape;
    const float scale = job->family->scale;
    const int n = piece->length, w = job->w, ld = s->block;
    recurrence_block *block = &ws->block;
    block_load(job, piece, block);
    block_write(job, block, ws->state, ws->scaled);
    const bool carries = chunk_carries(&block->decay);
    for (int reader = 0; reader < s->readers; reader++) {
        block_rows(block, ws->q, s->d, job->q + query_at(job, piece->token0, reader), (int64_t)s->queries * s->depth,
                   s->depth);
        if (carries) {
            block_from_start(block, ws->scaled, ws->q, s->d, scale);
            gemm_nn(n, w, s->depth, ws->scaled, s->d, ws->state, w, ws->o, w, 0);
        }
        block_pairs(block, s, ws->q, scale, ws->product);
        gemm_nn_lower(n, w, n, ws->product, ld, block->u, w, ws->o, w, carries);
        store_outputs(job, piece->token0, n, reader, ws->o, block->v, o);
    }
    block_advance(job, block, ws->state);
}

static void run_prompt(const recurrence_job *job, int row, workspace *ws, float *slot, const kern_recurrence_args *a) {
    const recurrence_shape *s = &job->shape;
    const kern_rows *rows = job->rows;
    if (slot)
        chunk_load(ws->state, job->w, slot, s->columns, s->depth, job->columns);
    else
        memset(ws->state, 0, (size_t)(s->depth * job->w) * sizeof(float));
    for (int i = chunk_of_row(rows, row); i < rows->n_chunks && rows->chunk[i].row == row; i++) {
        if (a->snapshots.p)
            chunk_store(a->snapshots.f + state_at(job, i), s->columns, ws->state, job->w, s->depth, job->columns);
        for (int offset = 0; offset < rows->chunk[i].length; offset += s->block) {
            const kern_chunk piece = block_piece(s, &rows->chunk[i], offset);
            run_block(job, &piece, ws, a->o.f);
        }
    }
    if (slot)
        chunk_store(slot, s->columns, ws->state, job->w, s->depth, job->columns);
}

static void run_token(const recurrence_job *job, int64_t t, const workspace *ws, float *state, int ld, float *o) {
    const recurrence_shape *s = &job->shape;
    const kern_recurrence *f = job->family;
    const float *q = job->q + query_at(job, t, 0);
    float *v = ws->block.v;
    chunk_load(v, job->w, job->v + value_at(job, t), job->values, 1, job->values);
    if (job->values < job->columns)
        v[job->values] = 1;
    if (f->decay == KERN_DECAY_CHANNEL)
        channel_decay_m1(job->g + gate_at(job, t), s->depth, ws->decay_m1);
    else
        ws->decay_m1[0] = f->decay == KERN_DECAY_NONE   ? 0.0f
                          : f->decay == KERN_DECAY_HEAD ? expm1f(job->g[job->state])
                                                        : expm1f(job->g[gate_at(job, t)]);
    const step_token token = {.decay_m1 = ws->decay_m1,
                              .decay_stride = f->decay == KERN_DECAY_CHANNEL,
                              .k = job->k + key_at(job, t),
                              .v = v,
                              .weight = weight_at(job, t),
                              .delta = f->update == KERN_UPDATE_DELTA,
                              .q = q};
    step_state(&token, state, ld, s->depth, job->columns, ws->o);
    if (s->readers > 1)
        gemm_nn(s->readers - 1, job->columns, s->depth, q + s->depth, s->depth, state, ld, ws->o + job->w, job->w, 0);
    for (int reader = 0; reader < s->readers; reader++) {
        chunk_scale_rows(ws->o + reader * job->w, ws->o + reader * job->w, job->w, &f->scale, 1);
        store_outputs(job, t, 1, reader, ws->o + reader * job->w, v, o);
    }
}

static void run_generated(const recurrence_job *job, const kern_row *row, const workspace *ws, float *slot, float *o) {
    const recurrence_shape *s = &job->shape;
    const int ld = slot ? s->columns : job->w;
    float *state = slot ? slot : ws->state;
    for (int t = row->token0; t < row->token0 + row->length; t++) {
        if (t > row->token0 ? job->rows->token_start[t] == t : !slot)
            for (int i = 0; i < s->depth; i++)
                memset(state + (int64_t)i * ld, 0, (size_t)job->columns * sizeof(float));
        run_token(job, t, ws, state, ld, o);
    }
}

typedef struct launch {
    const kern_cpu *cpu;
    const kern_recurrence_args *a;
    recurrence_job job; // of all items
} launch;

// A row and a strip of a state.
static void run_item(const void *context, int64_t item) {
    const launch *l = context;
    const kern_recurrence_args *a = l->a;
    recurrence_job job = l->job;
    workspace ws = lay_out(kern_cpu_workspace(l->cpu, kern_team_thread()), &job.shape, &a->family);
    const int row_items = job.shape.states * job.shape.strips, r = (int)(item / row_items);
    const kern_row *row = &job.rows->row[r];
    float *slot = NULL;
    recurrence_take_strip(&job, (int)(item % row_items) / job.shape.strips, (int)(item % job.shape.strips));
    if (row->slot >= 0)
        slot = (float *)((char *)a->state.p + (size_t)row->slot * job.rows->slot_stride) + state_at(&job, 0);
    if (row->kind == KERN_ROW_GENERATED)
        run_generated(&job, row, &ws, slot, a->o.f);
    else
        run_prompt(&job, r, &ws, slot, a);
}

KERN_RUN(recurrence, kern_recurrence_args) {
    const recurrence_shape shape = recurrence_shape_of(&a->family, cpu->chunk);
    const launch l = {.cpu = cpu,
                      .a = a,
                      .job = {.family = &a->family,
                              .rows = rows,
                              .q = a->q.f,
                              .k = a->k.f,
                              .v = a->v.f,
                              .g = a->g.f,
                              .beta = a->beta.f,
                              .skip = a->skip.f,
                              .shape = shape}};
    kern_share(cpu, run_item, &l, (int64_t)rows->n_rows * shape.states * shape.strips,
               4.0 * rows->n_tokens * shape.outputs * shape.depth * shape.columns);
    return KERN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward of the recurrence family share: heads and strips, and one block of tokens of one
// strip, the same steps for every decay and update.
//
// A *strip* is a piece of the columns of a state: columns do not see each other, so a wide state is several narrow ones
// that share k, g and beta. A *block* is a chunk with one decay a head, and 16 tokens of it with a decay a channel: the
// state moves on after every block, so that decays between tokens are needed inside the block alone
// (recurrence_channel.h). Steps, with S the state before the block:
//   block_load     K, V, weights, decays; K times the decay from its token to the block's end
//   block_write    U = w * V, or by the delta rule (recurrence_delta.h)
//   block_pairs    x K^T times the decays between the tokens, lower triangular
//   block_advance  S to the block's end, + K^T U
#ifndef KERNELS_CPU_ISA_RECURRENCE_BLOCK_H
#define KERNELS_CPU_ISA_RECURRENCE_BLOCK_H

#include "kernels/cpu/isa/recurrence_channel.h"
#include "kernels/cpu/isa/recurrence_delta.h"

enum { RECURRENCE_WIDTH_MAX = 4096, RECURRENCE_STRIP = 256 };

typedef struct recurrence_shape {
    int states, queries, keys, values; // heads of each
    int outputs, readers;              // heads of o, and of these those that read one state
    int depth, d;                      // D, rounded up to whole vectors
    int width, columns;                // V, V'
    int strips, strip;                 // of so many columns each, the last one of what is left
    int block;                         // tokens of a block at most
} recurrence_shape;

static inline recurrence_shape recurrence_shape_of(const kern_recurrence *f, int chunk) {
    recurrence_shape s = {.states = f->heads, .depth = f->key_width, .width = f->value_width};
    s.queries = f->query_heads ? f->query_heads : s.states;
    s.keys = f->key_heads ? f->key_heads : s.states;
    s.values = f->value_heads ? f->value_heads : s.states;
    s.outputs = s.queries > s.states ? s.queries : s.states;
    s.readers = s.outputs / s.states;
    s.d = gemm_pad(s.depth);
    s.columns = s.width + (f->unit_column ? 1 : 0);
    s.strips = (s.columns + RECURRENCE_STRIP - 1) / RECURRENCE_STRIP;
    s.strip = ((s.columns + s.strips - 1) / s.strips + 15) / 16 * 16;
    s.block = f->decay == KERN_DECAY_CHANNEL ? CHANNEL_BLOCK : chunk;
    return s;
}

// A strip of a state: what a work item is made of.
typedef struct recurrence_job {
    const kern_recurrence *family;
    const kern_rows *rows;
    const float *q, *k, *v, *g, *beta, *skip;
    recurrence_shape shape;
    int state;
    int column0, columns, w; // of the strip; padded
    int values;              // of its columns, those that are v's
} recurrence_job;

static inline void recurrence_take_strip(recurrence_job *job, int state, int strip) {
    const recurrence_shape *s = &job->shape;
    const int rest = s->columns - strip * s->strip;
    job->state = state;
    job->column0 = strip * s->strip;
    job->columns = rest < s->strip ? rest : s->strip;
    job->w = gemm_pad(job->columns);
    job->values = job->column0 + job->columns > s->width ? s->width - job->column0 : job->columns;
}

// Where head, token and strip of an operand begin.
static inline int64_t query_at(const recurrence_job *job, int64_t token, int reader) {
    const recurrence_shape *s = &job->shape;
    return (token * s->queries + (job->state * s->readers + reader) / (s->outputs / s->queries)) * s->depth;
}
static inline int64_t key_at(const recurrence_job *job, int64_t token) {
    const recurrence_shape *s = &job->shape;
    return (token * s->keys + job->state / (s->states / s->keys)) * s->depth;
}
static inline int64_t value_at(const recurrence_job *job, int64_t token) {
    const recurrence_shape *s = &job->shape;
    return (token * s->values + job->state / (s->states / s->values)) * s->width + job->column0;
}
static inline int64_t output_at(const recurrence_job *job, int64_t token, int reader) {
    const recurrence_shape *s = &job->shape;
    return (token * s->outputs + job->state * s->readers + reader) * s->columns + job->column0;
}
static inline int64_t gate_at(const recurrence_job *job, int64_t token) {
    const int64_t at = token * job->shape.states + job->state;
    return job->family->decay == KERN_DECAY_CHANNEL ? at * job->shape.depth : at;
}
static inline int64_t state_at(const recurrence_job *job, int64_t index) { // of `index` sets of all states
    const recurrence_shape *s = &job->shape;
    return (index * s->states + job->state) * s->depth * s->columns + job->column0;
}
static inline float weight_at(const recurrence_job *job, int64_t token) {
    return job->beta ? job->beta[token * job->shape.states + job->state] : 1.0f;
}

typedef struct recurrence_block {
    kern_chunk piece;
    chunk_decay decay; // documents; and the decays, if there is one a head
    float weight[CHUNK_MAX];
    float *alpha, *start, *end, *whole_m1; // decays, if there is one a channel: (B, d) three times, (d)
    float *pair;                           // (B, B)
    float *k, *ended, *kt;                 // (B, d), (B, d) times the decay to the end, (D, B)
    float *v, *error, *u;                  // (B, w): values, errors of the delta rule, what is written
    float *inner;                          // (B, B): -tril(K K^T * E); its diagonal has no meaning
} recurrence_block;

// The next `count` floats of a workspace at base, 64-byte aligned; NULL for none.
static inline float *workspace_take(char *base, size_t *used, size_t count) {
    float *piece = count ? (float *)(base + *used) : NULL;
    *used += kern_align64(count * sizeof(float));
    return piece;
}

// Gives a block its memory.
static inline void block_lay_out(recurrence_block *block, const recurrence_shape *s, const kern_recurrence *f,
                                 char *base, size_t *used) {
    const size_t b = (size_t)s->block, d = (size_t)s->d, bd = b * d, bw = b * (size_t)gemm_pad(s->strip);
    const bool channel = f->decay == KERN_DECAY_CHANNEL, delta = f->update == KERN_UPDATE_DELTA;
    block->alpha = workspace_take(base, used, channel ? bd : 0);
    block->start = workspace_take(base, used, channel ? bd : 0);
    block->end = workspace_take(base, used, channel ? bd : 0);
    block->whole_m1 = workspace_take(base, used, channel ? d : 0);
    block->pair = workspace_take(base, used, channel ? 0 : b * b);
    block->kt = workspace_take(base, used, channel ? 0 : bd);
    block->k = workspace_take(base, used, bd);
    block->ended = workspace_take(base, used, bd);
    block->v = workspace_take(base, used, bw);
    block->u = workspace_take(base, used, bw);
    block->error = workspace_take(base, used, delta ? bw : 0);
    block->inner = workspace_take(base, used, delta ? b * b : 0);
}

// Rows of q, k or v of a block; rows behind its length are zero where the products by channel look at them.
static inline void block_rows(const recurrence_block *block, float *to, int ld, const float *from, int64_t stride,
                              int width) {
    const int n = block->piece.length;
    chunk_load(to, ld, from, stride, n, width);
    if (block->alpha && n < CHANNEL_BLOCK)
        memset(to + n * ld, 0, (size_t)((CHANNEL_BLOCK - n) * ld) * sizeof(float));
}

// to = factor * (x times the decay from the block's start to its token).
static inline void block_from_start(const recurrence_block *block, float *to, const float *x, int d, float factor) {
    for (int i = 0; i < block->piece.length; i++, to += d, x += d) {
        if (!block->alpha) {
            const float whole = factor * block->decay.from_start[i];
            chunk_scale_rows(to, x, d, &whole, 1);
            continue;
        }
        for (int c = 0; c < d; c += KERN_VL)
            vf_store(to + c, vf_load(x + c) * vf_load(block->start + i * d + c) * factor);
    }
}

// to = x times the decay from its token to the block's end.
static inline void block_to_end(const recurrence_block *block, float *to, const float *x, int d) {
    const int n = block->piece.length;
    if (!block->alpha) {
        chunk_scale_rows(to, x, d, block->decay.to_end, n);
        return;
    }
    for (int i = 0; i < n * d; i += KERN_VL)
        vf_store(to + i, vf_load(x + i) * vf_load(block->end + i));
}

static inline void block_load(const recurrence_job *job, const kern_chunk *piece, recurrence_block *block) {
    const recurrence_shape *s = &job->shape;
    const int n = piece->length, decay = job->family->decay;
    const int64_t token0 = piece->token0;
    block->piece = *piece;
    block->decay.ld = s->block;
    if (decay == KERN_DECAY_CHANNEL) {
        chunk_documents(&block->decay, job->rows, piece);
        channel_fill(&block->decay, job->g + gate_at(job, token0), (int64_t)s->states * s->depth, s->depth, s->d,
                     block->alpha, block->start, block->end, block->whole_m1);
    } else {
        chunk_decay_fill(&block->decay, job->rows, piece, decay == KERN_DECAY_NONE ? NULL : job->g + job->state,
                         decay == KERN_DECAY_SCALAR ? s->states : 0, s->block, block->pair);
    }
    block_rows(block, block->k, s->d, job->k + key_at(job, token0), (int64_t)s->keys * s->depth, s->depth);
    block_to_end(block, block->ended, block->k, s->d);
    if (block->kt)
        chunk_transpose(block->kt, s->block, block->decay.columns, block->k, s->d, n, s->depth);
    chunk_load(block->v, job->w, job->v + value_at(job, token0), (int64_t)s->values * s->width, n, job->values);
    if (job->values < job->columns)
        for (int i = 0; i < n; i++)
            block->v[i * job->w + job->values] = 1;
    for (int i = 0; i < n; i++)
        block->weight[i] = weight_at(job, token0 + i);
}

// out (n, block) = scale x K^T * E, lower triangular; what gemm's lower forms read above the diagonal is zero.
static inline void block_pairs(const recurrence_block *block, const recurrence_shape *s, const float *x, float scale,
                               float *out) {
    const int n = block->piece.length, ld = s->block;
    if (block->alpha) {
        channel_pairs(x, block->k, block->alpha, s->d, scale, out, ld);
        return;
    }
    gemm_lower_nn(n, block->decay.columns, s->depth, x, s->d, block->kt, ld, out, ld, 0);
    chunk_mask_pairs(&block->decay, out, scale);
}

// scratch: (B, d).
static inline void block_write(const recurrence_job *job, recurrence_block *block, const float *state, float *scratch) {
    const recurrence_shape *s = &job->shape;
    const int n = block->piece.length, w = job->w, ld = s->block;
    if (job->family->update == KERN_UPDATE_ADD) {
        chunk_scale_rows(block->u, block->v, w, block->weight, n);
        return;
    }
    memcpy(block->error, block->v, (size_t)(n * w) * sizeof(float));
    if (chunk_carries(&block->decay)) {
        block_from_start(block, scratch, block->k, s->d, -1);
        gemm_nn(n, w, s->depth, scratch, s->d, state, w, block->error, w, 1);
    }
    block_pairs(block, s, block->k, -1, block->inner);
    delta_solve(n, block->inner, ld, block->weight, block->error, block->u, w);
}

// S, or its gradient going backwards: times the decay over the block, 0 when a document starts in it.
static inline void block_decay_state(const recurrence_job *job, const recurrence_block *block, float *state) {
    const int depth = job->shape.depth, w = job->w;
    if (block->decay.first[block->piece.length - 1] >= 0) {
        memset(state, 0, (size_t)(depth * w) * sizeof(float));
        return;
    }
    for (int i = 0; i < depth; i++) {
        const float whole_m1 = block->alpha ? block->whole_m1[i] : block->decay.whole_m1;
        for (int j = i * w; j < (i + 1) * w; j += KERN_VL)
            vf_store(state + j, vf_load(state + j) + vf_load(state + j) * whole_m1);
    }
}

static inline void block_advance(const recurrence_job *job, const recurrence_block *block, float *state) {
    block_decay_state(job, block, state);
    gemm_tn(job->shape.depth, job->w, block->piece.length, block->ended, job->shape.d, block->u, job->w, state, job->w,
            1);
}

// The block of a chunk that begins `offset` tokens after it.
static inline kern_chunk block_piece(const recurrence_shape *s, const kern_chunk *chunk, int offset) {
    kern_chunk piece = *chunk;
    piece.token0 += offset;
    piece.position += offset;
    piece.length = chunk->length - offset < s->block ? chunk->length - offset : s->block;
    return piece;
}

#endif

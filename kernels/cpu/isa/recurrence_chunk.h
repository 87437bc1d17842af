// SPDX-License-Identifier: Apache-2.0
// What the recurrences share: one chunk of one head, its document masks and its decays where a head has one a token,
// padded copies of its rows, the update of a state by a chunk.
//
// With c_i the running sum of log decays inside the chunk:
//   pair_ij = e^{c_i - c_j}  for j <= i of one document, else 0       what token j still weighs at token i
//   from_start_i = e^{c_i}   while the first document of the chunk lasts and it began before the chunk, else 0
//   to_end_j = pair_Lj       of the last token L
// All exponents are <= 0, and a boundary is an index, never a decay of -infinity. c is kept as a float and its rounding
// error, so that a difference is good to its own rounding however far c has run. Decays of a state are applied as
// S + (e^c - 1) S: with gammas near 1 the rounding of gamma itself would otherwise be a thousandth of 1 - gamma.
//
// Copies are padded with zeros to whole vectors, so that the products need no edges.
#ifndef KERNELS_CPU_ISA_RECURRENCE_CHUNK_H
#define KERNELS_CPU_ISA_RECURRENCE_CHUNK_H

#include "kernels/cpu/isa/gemm.h"

enum { CHUNK_MAX = 64 };

typedef struct chunk_decay {
    int length, columns;  // tokens, and rounded up to whole vectors
    int ld;               // row distance of pair: C
    bool empty;           // the state before the chunk is known to be zero: products with it are left out
    int first[CHUNK_MAX]; // first token of the token's document inside the chunk; -1: it began before
    float from_start[CHUNK_MAX];
    float to_end[CHUNK_MAX];
    float whole_m1; // decay over the whole chunk, minus 1; -1: the state after it owes nothing to the one before
    float *pair;    // (length, columns)
} chunk_decay;

// Whether the state before the chunk contributes to it.
static inline bool chunk_carries(const chunk_decay *decay) {
    return decay->first[0] < 0 && !decay->empty;
}

// The first chunk of a row; the chunks stand in the order of the rows.
static inline int chunk_of_row(const kern_rows *rows, int row) {
    int low = 0, high = rows->n_chunks;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (rows->chunk[middle].row < row)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Length and documents of a chunk; no decays yet.
static inline void chunk_documents(chunk_decay *decay, const kern_rows *rows, const kern_chunk *chunk) {
    const kern_row *row = &rows->row[chunk->row];
    decay->empty = row->slot < 0 && chunk->token0 == row->token0;
    decay->length = chunk->length;
    decay->columns = gemm_pad(chunk->length);
    for (int i = 0; i < chunk->length; i++) {
        int start = rows->token_start[chunk->token0 + i];
        bool carried = start < chunk->token0 || start == row->token0;
        decay->first[i] = carried ? -1 : start - chunk->token0;
    }
}

// The log decay of token t is g[t * stride] (g already at the head); NULL: no decay. pair has room for C * C floats.
static inline void chunk_decay_fill(chunk_decay *decay, const kern_rows *rows, const kern_chunk *chunk, const float *g,
                                    int64_t stride, int ld, float *pair) {
    const int length = chunk->length;
    float high[CHUNK_MAX] __attribute__((aligned(64))) = {0}, low[CHUNK_MAX] __attribute__((aligned(64))) = {0};
    double sum = 0;
    chunk_documents(decay, rows, chunk);
    decay->ld = ld;
    decay->pair = pair;
    for (int i = 0; i < length; i++) {
        if (decay->first[i] == i)
            sum = 0; // sums of different documents are never compared, and must not share their rounding
        sum += g ? (double)g[(chunk->token0 + i) * stride] : 0.0;
        high[i] = (float)sum;
        low[i] = (float)(sum - (double)high[i]);
    }
    vi lane;
    for (int l = 0; l < KERN_VL; l++)
        lane[l] = l;
    for (int i = 0; i < length; i++) {
        for (int j = 0; j < decay->columns; j += KERN_VL) {
            vf e = {0};
            if (j <= i) {
                vf exponent = (high[i] - vf_load(high + j)) + (low[i] - vf_load(low + j));
                vi column = lane + j;
                e = g ? vf_exp(exponent) : vf_set(1);
                e = vf_select((column <= i) & (column >= decay->first[i]), e, (vf){0});
            }
            vf_store(pair + i * ld + j, e);
        }
    }
    for (int i = 0; i < length; i += KERN_VL) {
        vf e = vf_exp(vf_load(high + i));
        for (int l = 0; l < KERN_VL && i + l < length; l++)
            decay->from_start[i + l] = decay->first[i + l] < 0 ? e[l] : 0.0f;
    }
    memcpy(decay->to_end, pair + (length - 1) * ld, (size_t)length * sizeof(float));
    decay->whole_m1 = decay->first[length - 1] < 0 ? (float)expm1(sum) : -1.0f;
}

// matrix (length, columns) of a lower triangular product, times pair. What lies above the diagonal becomes 0.
static inline void chunk_mask_pairs(const chunk_decay *decay, float *matrix, float scale) {
    for (int i = 0; i < decay->length; i++)
        for (int j = 0, end = gemm_lower_columns(i, decay->length); j < end; j += KERN_VL) {
            float *m = matrix + i * decay->ld + j;
            vf_store(m, vf_load(m) * vf_load(decay->pair + i * decay->ld + j) * scale);
        }
}

// Padded copy of `count` rows of `width` floats: to (count, ld), ld whole vectors.
static inline void chunk_load(float *to, int ld, const float *from, int64_t stride, int count, int width) {
    int whole = width / KERN_VL * KERN_VL;
    for (int i = 0; i < count; i++, to += ld, from += stride) {
        for (int j = 0; j < whole; j += KERN_VL)
            vf_store(to + j, vf_load(from + j));
        if (whole < ld) {
            memset(to + whole, 0, (size_t)(ld - whole) * sizeof(float));
            memcpy(to + whole, from + whole, (size_t)(width - whole) * sizeof(float));
        }
    }
}

static inline void chunk_store(float *to, int64_t stride, const float *from, int ld, int count, int width) {
    int whole = width / KERN_VL * KERN_VL;
    for (int i = 0; i < count; i++, to += stride, from += ld) {
        for (int j = 0; j < whole; j += KERN_VL)
            vf_store(to + j, vf_load(from + j));
        if (whole < width)
            memcpy(to + whole, from + whole, (size_t)(width - whole) * sizeof(float));
    }
}

static inline void chunk_store_add(float *to, int64_t stride, const float *from, int ld, int count, int width) {
    for (int i = 0; i < count; i++, to += stride, from += ld)
        for (int j = 0; j < width; j++)
            to[j] += from[j];
}

// to_i = factor_i * from_i for `count` rows of ld floats (whole vectors); to may be from.
static inline void chunk_scale_rows(float *to, const float *from, int ld, const float *factor, int count) {
    for (int i = 0; i < count; i++)
        for (int j = 0; j < ld; j += KERN_VL)
            vf_store(to + i * ld + j, vf_load(from + i * ld + j) * factor[i]);
}

// The transpose (width, ld) of a padded copy (count, width): columns past count are zero up to `columns`.
static inline void chunk_transpose(float *to, int ld, int columns, const float *from, int from_ld, int count,
                                   int width) {
    gemm_transpose(count, width, from, from_ld, to, ld);
    if (count < columns)
        for (int i = 0; i < width; i++)
            memset(to + i * ld + count, 0, (size_t)(columns - count) * sizeof(float));
}

// A sum in fixed order over whole vectors.
static inline float chunk_dot(const float *a, const float *b, int width) {
    vf sum = {0};
    for (int j = 0; j < width; j += KERN_VL)
        sum += vf_load(a + j) * vf_load(b + j);
    return vf_sum(sum);
}

// S (depth, width) at row distance ld: S + whole_m1 S, then + A^T B with A (length, depth), B (length, width).
static inline void chunk_advance_state(const chunk_decay *decay, float *state, int ld, const float *a, int lda,
                                       const float *b, int ldb, int depth, int width) {
    bool keep = decay->first[decay->length - 1] < 0;
    if (keep)
        for (int i = 0; i < depth; i++)
            for (int j = 0; j < width; j += KERN_VL) {
                vf s = vf_load(state + i * ld + j);
                vf_store(state + i * ld + j, s + s * decay->whole_m1);
            }
    gemm_tn(depth, width, decay->length, a, lda, b, ldb, state, ld, keep);
}

// The other way: dL/dS at the chunk's start from the one at its end, + A^T B with A already times from_start.
static inline void chunk_retreat_state(const chunk_decay *decay, float *state, int ld, const float *a, int lda,
                                       const float *b, int ldb, int depth, int width) {
    if (decay->first[0] < 0) {
        chunk_advance_state(decay, state, ld, a, lda, b, ldb, depth, width);
        return;
    }
    for (int i = 0; i < depth; i++)
        memset(state + i * ld, 0, (size_t)width * sizeof(float));
}

// Gradient of the log decays of a chunk. A decay scales all that flows from before its token to the token and after it;
// pairs_ij is what flows from token j to token i (j < i, loss gradient times value; the diagonal flows past no decay
// and is overwritten), enter_i from the state before the chunk to token i, leave_j from token j to the state after the
// chunk, through from state to state. dg_t is the running sum from the chunk's end of what arrives minus what departs;
// sums never leave the chunk (models.md 11.7). dg of a document's first token is 0, and so it is behind a zero state.
static inline void chunk_decay_gradient(const chunk_decay *decay, float *pairs, const float *enter, const float *leave,
                                        float through, float *dg, int64_t stride) {
    const int n = decay->length, ld = decay->ld;
    float departs[CHUNK_MAX] __attribute__((aligned(64))) = {0}, arrives[CHUNK_MAX];
    double running = (double)through;
    for (int i = 0; i < n; i++) {
        float *row = pairs + i * ld;
        vf sum = {0};
        row[i] = 0;
        for (int j = 0, end = gemm_lower_columns(i, n); j < end; j += KERN_VL) {
            vf flow = vf_load(row + j);
            sum += flow;
            vf_store(departs + j, vf_load(departs + j) + flow);
        }
        arrives[i] = vf_sum(sum) + enter[i];
        running += (double)leave[i];
    }
    for (int i = n - 1; i >= 0; i--) {
        running += (double)arrives[i] - (double)departs[i] - (double)leave[i];
        dg[i * stride] = decay->first[i] == i ? 0.0f : (float)running;
        if (decay->first[i] == i)
            running = 0;
    }
    if (decay->empty)
        dg[0] = 0;
}

#endif

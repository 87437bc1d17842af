// SPDX-License-Identifier: Apache-2.0
// What the elementwise families share: pieces of work for the team, dot products, square roots, the tail of a row.
//
// A piece is a range of items (tokens, vectors, elements) whose results do not depend on where the range is cut, so the
// number of pieces may follow the number of threads. Sums over tokens (gradients of parameters) are different: they are
// made in blocks that depend on the number of tokens alone, one partial sum a block, added in the order of the blocks.
// Work too small for a team runs as a plain call: a decode step has hundreds of such operations.
#ifndef KERNELS_CPU_ISA_ELEMENTWISE_H
#define KERNELS_CPU_ISA_ELEMENTWISE_H

#include "kernels/cpu/isa/isa.h"

typedef void (*kern_range)(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end);

typedef struct kern_ranges {
    kern_range run;
    const kern_cpu *cpu;
    const kern_rows *rows;
    const void *args;
    int64_t count, pieces;
} kern_ranges;

static inline void kern_run_range(const void *context, int64_t piece) {
    const kern_ranges *r = context;
    r->run(r->cpu, r->rows, r->args, r->count * piece / r->pieces, r->count * (piece + 1) / r->pieces);
}

// Calls range over [0, count), cut for the team when `operations` (float operations in all) are worth it.
static inline void kern_over(kern_range range, const kern_cpu *cpu, const kern_rows *rows, const void *args,
                             int64_t count, double operations) {
    const double vectors = operations / KERN_VL; // elementwise work runs in full vectors
    const bool shared = vectors > (kern_team_in_session(cpu->team) ? 10000.0 : 50000.0);
    const kern_ranges ranges = {range, cpu, rows, args, count, count < cpu->threads ? count : cpu->threads};
    if (shared)
        kern_team_run(cpu->team, kern_run_range, &ranges, ranges.pieces);
    else
        range(cpu, rows, args, 0, count);
}

// Blocks of tokens for sums over tokens: at most KERN_SUM_BLOCKS, whatever the number of threads.
enum { KERN_SUM_BLOCKS = 64, KERN_SUM_BLOCK_LEAST = 8 };

static inline int32_t kern_sum_block_tokens(int32_t tokens) {
    int32_t share = (tokens + KERN_SUM_BLOCKS - 1) / KERN_SUM_BLOCKS;
    return share < KERN_SUM_BLOCK_LEAST ? KERN_SUM_BLOCK_LEAST : share;
}

// Workspace of one thread such that all threads together hold one partial sum of `width` floats a block.
static inline size_t kern_sum_workspace(const kern_cpu *cpu, int32_t width) {
    size_t all = KERN_SUM_BLOCKS * kern_align64((size_t)width * sizeof(float));
    return kern_align64((all + (size_t)cpu->threads - 1) / (size_t)cpu->threads);
}

static inline float *kern_sum_partial(const kern_cpu *cpu, int32_t width, int64_t block) {
    return (float *)(cpu->workspace + (size_t)block * kern_align64((size_t)width * sizeof(float)));
}

// sum += the partial sums, in order.
static inline void kern_sum_partials(const kern_cpu *cpu, int32_t width, int64_t blocks, float *sum) {
    for (int64_t block = 0; block < blocks; block++) {
        const float *partial = kern_sum_partial(cpu, width, block);
        for (int32_t i = 0; i < width; i++)
            sum[i] += partial[i];
    }
}

static inline float kern_dot(const float *x, const float *y, int32_t count) {
    vf sum0 = {0}, sum1 = {0}, sum2 = {0}, sum3 = {0};
    int32_t i = 0;
    for (; i + 4 * KERN_VL <= count; i += 4 * KERN_VL) {
        sum0 += vf_load(x + i) * vf_load(y + i);
        sum1 += vf_load(x + i + KERN_VL) * vf_load(y + i + KERN_VL);
        sum2 += vf_load(x + i + 2 * KERN_VL) * vf_load(y + i + 2 * KERN_VL);
        sum3 += vf_load(x + i + 3 * KERN_VL) * vf_load(y + i + 3 * KERN_VL);
    }
    for (; i + KERN_VL <= count; i += KERN_VL)
        sum0 += vf_load(x + i) * vf_load(y + i);
    if (i < count)
        sum1 += vf_load_part(x + i, count - i) * vf_load_part(y + i, count - i);
    return vf_sum((sum0 + sum1) + (sum2 + sum3));
}

static inline vf vf_sqrt(vf x) {
#if defined(KERN_ISA_AVX512)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(KERN_ISA_AVX2)
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int lane = 0; lane < KERN_VL; lane++)
        x[lane] = sqrtf(x[lane]);
    return x;
#endif
}

// x in the first `left` lanes, 0 in the others.
static inline vf vf_keep(vf x, int64_t left) {
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi lanes;
    memcpy(&lanes, lane, sizeof lanes);
    return left >= KERN_VL ? x : (vf)((vi)x & (lanes < (int32_t)left));
}

// The slot's part of a state operand; NULL where the operation or the row has none.
static inline float *kern_slot_state(const kern_rows *rows, kern_ptr state, int32_t slot) {
    return state.p && slot >= 0 ? (float *)((char *)state.p + (size_t)slot * rows->slot_stride) : NULL;
}

// The vector at p + i and its store, where fewer than KERN_VL elements may be left.
static inline vf vf_load_upto(const float *p, int64_t left) {
    return left >= KERN_VL ? vf_load(p) : vf_load_part(p, (int)left);
}
static inline void vf_store_upto(float *p, vf x, int64_t left) {
    if (left >= KERN_VL)
        vf_store(p, x);
    else
        vf_store_part(p, x, (int)left);
}

#endif

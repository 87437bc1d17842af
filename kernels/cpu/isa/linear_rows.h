// SPDX-License-Identifier: Apache-2.0
// The row kernel: y = x W^T for tokens one by one, memory-bound. Shared by linear (generated tokens) and head (logits).
//
// A dot product has KERN_VL running sums over k = lane, lane + VL, ... and adds the lanes by halving; no other order
// exists, so that a (token, output) pair has the same bits whatever else is computed beside it.
#ifndef KERNELS_CPU_ISA_LINEAR_ROWS_H
#define KERNELS_CPU_ISA_LINEAR_ROWS_H

#include "kernels/cpu/isa/isa.h"

typedef struct kern_linear_rows {
    const kern_weight *weight; // KERN_F32 or KERN_BF16
    const float *x;            // (.., weight->cols)
    const int32_t *token;      // optional: product i reads row token[i] of x instead of row i
    const float *bias;         // optional (weight->rows)
    const float *residual;     // optional (tokens, rows); may be y
    float *y;                  // (tokens, rows)
    int64_t row0, rows;        // outputs: these rows of weight and bias
    int32_t tokens;
} kern_linear_rows;

// All outputs of all tokens, on the team, in one phase. jobs: up to KERN_LINEAR_PARTS products of the same x, tokens
// and dtype; none writes what another one reads.
void KERN_NAME(linear_rows)(const kern_cpu *cpu, const kern_linear_rows *job, int jobs);

// Pieces of several jobs in a row: job i's are [first[i], first[i + 1]).
typedef struct kern_linear_pieces {
    int64_t first[KERN_LINEAR_PARTS + 1];
} kern_linear_pieces;

// The job of a piece, which becomes the job's own.
static inline int kern_linear_job(const kern_linear_pieces *pieces, int64_t *piece) {
    int i = 0;
    while (*piece >= pieces->first[i + 1])
        i++;
    *piece -= pieces->first[i];
    return i;
}

// VL bf16 values as floats.
typedef uint16_t vh __attribute__((vector_size(KERN_VL * 2)));
typedef uint16_t vh_unaligned __attribute__((vector_size(KERN_VL * 2), aligned(2), may_alias));

static inline vf vf_load_bf16(const uint16_t *p) {
    return (vf)(__builtin_convertvector(*(const vh_unaligned *)p, vu) << 16);
}
static inline vf vf_load_bf16_part(const uint16_t *p, int n) {
    vh x = {0};
    memcpy(&x, p, (size_t)n * sizeof(uint16_t));
    return (vf)(__builtin_convertvector(x, vu) << 16);
}
static inline void vf_widen(const uint16_t *from, float *to, int64_t count) {
    int64_t i = 0;
    for (; i + KERN_VL <= count; i += KERN_VL)
        vf_store(to + i, vf_load_bf16(from + i));
    int rest = (int)(count - i);
    if (rest > 0)
        vf_store_part(to + i, vf_load_bf16_part(from + i, rest), rest);
}

#endif

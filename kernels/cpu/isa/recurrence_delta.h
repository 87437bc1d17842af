// SPDX-License-Identifier: Apache-2.0
// The delta rule inside a block of tokens. With N = -strict_tril(K K^T * E) (E: decays from token j to token i) and X
// the errors against the state before the block,
//
//   forward    e_i = x_i + sum_{j<i} N_ij w_j e_j,   u_i = w_i e_i          e = (I + diag(w) A)^-1 ..., A = -N
//   backward   m_i = y_i + sum_{j>i} N_ji w_j m_j,   n_i = w_i m_i          the transposed system
//
// That is the WY form (models.md 11.2) without its inverse: a triangular solve costs what the product with the inverse
// does. Whole rows of earlier blocks of 16 are products; the triangle of 16 stays in registers, a vector of columns at
// a time. Sums run over j away from the start in the first system, towards it in the second.
#ifndef KERNELS_CPU_ISA_RECURRENCE_DELTA_H
#define KERNELS_CPU_ISA_RECURRENCE_DELTA_H

#include "kernels/cpu/isa/gemm.h"

enum { DELTA_BLOCK = 16 };

// Row r of x is at x + r * stride. x_r += sum_{s<r} factor[s][r] x_s in the order of r, y_r = weight[r] x_r; `count`
// rows, whole vectors of columns.
static inline void delta_triangle(const float factor[DELTA_BLOCK][DELTA_BLOCK], const float *weight, float *x, float *y,
                                  int64_t stride, int count, int width) {
    for (int column = 0; column < width; column += KERN_VL) {
        vf row[DELTA_BLOCK];
        KERN_UNROLL
        for (int r = 0; r < DELTA_BLOCK; r++)
            row[r] = r < count ? vf_load(x + r * stride + column) : (vf){0};
        KERN_UNROLL
        for (int s = 0; s < DELTA_BLOCK; s++) {
            KERN_UNROLL
            for (int r = 0; r < DELTA_BLOCK; r++)
                if (r > s)
                    row[r] += factor[s][r] * row[s];
        }
        KERN_UNROLL
        for (int r = 0; r < DELTA_BLOCK; r++)
            if (r < count) {
                vf_store(x + r * stride + column, row[r]);
                vf_store(y + r * stride + column, row[r] * weight[r]);
            }
    }
}

// x (length, width): in X, out the errors; u: what is written. n (length, ld).
static inline void delta_solve(int length, const float *n, int ld, const float *weight, float *x, float *u, int width) {
    float factor[DELTA_BLOCK][DELTA_BLOCK];
    for (int i = 0; i < length; i += DELTA_BLOCK) {
        const int count = length - i < DELTA_BLOCK ? length - i : DELTA_BLOCK;
        if (i > 0)
            gemm_nn(count, width, i, n + i * ld, ld, u, width, x + i * width, width, 1);
        memset(factor, 0, sizeof factor);
        for (int r = 1; r < count; r++)
            for (int s = 0; s < r; s++)
                factor[s][r] = n[(i + r) * ld + i + s] * weight[i + s];
        delta_triangle(factor, weight + i, x + i * width, u + i * width, width, count, width);
    }
}

// m: in Y, out m; u: w m.
static inline void delta_solve_transposed(int length, const float *n, int ld, const float *weight, float *m, float *u,
                                          int width) {
    float factor[DELTA_BLOCK][DELTA_BLOCK], turned[DELTA_BLOCK];
    for (int i = (length - 1) / DELTA_BLOCK * DELTA_BLOCK; i >= 0; i -= DELTA_BLOCK) {
        const int count = length - i < DELTA_BLOCK ? length - i : DELTA_BLOCK, end = i + count, last = end - 1;
        if (end < length)
            gemm_tn(count, width, length - end, n + end * ld + i, ld, u + end * width, width, m + i * width, width, 1);
        memset(factor, 0, sizeof factor);
        for (int r = 0; r < count; r++) {
            turned[r] = weight[last - r];
            for (int s = 0; s < r; s++)
                factor[s][r] = n[(last - s) * ld + last - r] * weight[last - s];
        }
        delta_triangle(factor, turned, m + last * width, u + last * width, -width, count, width);
    }
}

#endif

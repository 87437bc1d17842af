// SPDX-License-Identifier: Apache-2.0
// Products of small row-major float matrices that live in a core's own caches: chunks, heads, states.
//
//   gemm_nn        C (m, n) = A (m, k) B (k, n)
//   gemm_tn        C (m, n) = A (k, m)^T B (k, n)
//   gemm_nn_lower  as gemm_nn, A lower triangular: row i takes p <= i (what lies above is read as far as a tile reaches
//                  and must be zero)
//   gemm_tn_lower  as gemm_tn, A lower triangular: row i of C takes p >= i (likewise)
//   gemm_lower_nn  as gemm_nn, only the lower triangle of C is wanted: row i is written up to a column past i at least
//
// ld* are the distances of rows in floats; `add` accumulates into C. Every element of C is one chain of multiply-adds
// over p in ascending order, starting at 0 or at C, whatever tile it falls into: its bits depend on its row of A and
// its column of B alone, not on m, n or the neighbours. C overlaps neither A nor B. Runs on the calling thread. Fastest
// when n is a multiple of the vector length (4 vectors at best) and rows of B are aligned.
#ifndef KERNELS_CPU_ISA_GEMM_H
#define KERNELS_CPU_ISA_GEMM_H

#include "kernels/cpu/isa/isa.h"

#if defined(KERN_ISA_AVX512)
enum { GEMM_ROWS = 6, GEMM_VECTORS = 4 };
#elif defined(KERN_ISA_AVX2)
enum { GEMM_ROWS = 6, GEMM_VECTORS = 2 };
#elif defined(__aarch64__)
enum { GEMM_ROWS = 6, GEMM_VECTORS = 4 };
#else
enum { GEMM_ROWS = 6, GEMM_VECTORS = 2 };
#endif

#define GEMM_FUNCTION(name)                                                                                         \
    void name(int m, int n, int k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc, \
              int add)

#define gemm_nn KERN_NAME(gemm_nn)
#define gemm_tn KERN_NAME(gemm_tn)
#define gemm_nn_lower KERN_NAME(gemm_nn_lower)
#define gemm_tn_lower KERN_NAME(gemm_tn_lower)
#define gemm_lower_nn KERN_NAME(gemm_lower_nn)
#define gemm_transpose KERN_NAME(gemm_transpose)

GEMM_FUNCTION(gemm_nn);
GEMM_FUNCTION(gemm_tn);
GEMM_FUNCTION(gemm_nn_lower);
GEMM_FUNCTION(gemm_tn_lower);
GEMM_FUNCTION(gemm_lower_nn);

// y (cols, rows) = x (rows, cols)^T.
void gemm_transpose(int rows, int cols, const float *x, int64_t ldx, float *y, int64_t ldy);

// A width rounded up to whole vectors, for padded copies.
static inline int gemm_pad(int n) {
    return (n + KERN_VL - 1) / KERN_VL * KERN_VL;
}

// gemm_lower_nn writes columns [0, this) of row i of m rows, and the products with a lower triangular A read no
// further.
static inline int gemm_lower_columns(int i, int m) {
    int end = i / GEMM_ROWS * GEMM_ROWS + GEMM_ROWS;
    return gemm_pad(end < m ? end : m);
}

#endif

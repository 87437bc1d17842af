// SPDX-License-Identifier: Apache-2.0
// Matrix products by oneDNN: row-major C = alpha op(A) op(B) + beta C, one library call on one thread.
//
// Called whole, a product's bits depend on the number of threads that the library takes. So the launchers cut it into
// fixed slices and call the library inside the team, where each call is told to stay on its thread
// (kern_products_begin). Only dnnl_sgemm is used: it is the same in versions 2 and 3.
#ifndef KERNELS_CPU_ISA_PRODUCTS_H
#define KERNELS_CPU_ISA_PRODUCTS_H

#include <dnnl.h>

#include "kernels/cpu/isa/isa.h"

enum { KERN_SLICE = 192 }; // outputs of one call

// First statement of a parallel region that calls kern_product. The setting ends with the region, in inactive regions
// too.
static inline void kern_products_begin(void) {
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
}

// C (m, n) = alpha op(A) op(B) + beta C with op(A) (m, k), op(B) (k, n); 't' transposes the stored matrix. *failed is
// set when the library has no memory for its packed copies.
static inline void kern_product(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                                const float *b, int64_t ldb, float beta, float *c, int64_t ldc, int *failed) {
    if (dnnl_sgemm(op_a, op_b, m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc) != dnnl_success) {
#pragma omp atomic write
        *failed = 1;
    }
}

#endif

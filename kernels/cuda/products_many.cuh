// SPDX-License-Identifier: Apache-2.0
// Products of bf16 weights with more than a few vectors at the rate of Hopper's tensor cores (products_many.cu). The
// device must have them; shapes are all welcome.
#ifndef KERNELS_CUDA_PRODUCTS_MANY_CUH
#define KERNELS_CUDA_PRODUCTS_MANY_CUH

#include "kernels/cuda/products.cuh"

static inline bool cuda_has_many(const kern_cuda *cuda) {
    return cuda->overlaps;
}

// Whether the norm before the product may be made with it.
bool cuda_many_takes_norm(const cuda_product *product);

// vectors: at least as many as the step has. Uses the workspace that cuda_many_bytes asked for.
kern_status cuda_many_launch(const cuda_step *step, const cuda_product *product, int64_t vectors);

#endif

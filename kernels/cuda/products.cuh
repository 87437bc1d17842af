// SPDX-License-Identifier: Apache-2.0
// y = x W^T for vectors of activations: what linear and head_logits launch (products.cu). Whoever fills in the job has
// checked that the weight holds its rows.
#ifndef KERNELS_CUDA_PRODUCTS_CUH
#define KERNELS_CUDA_PRODUCTS_CUH

#include "kernels/cuda/cuda.cuh"

struct cuda_product {
    cuda_weight weight;
    const float *x;        // (.., weight.cols)
    const float *bias;     // optional (weight.rows)
    const float *residual; // optional (vectors, rows); may be y
    float *y;              // (vectors, rows)
    int32_t *finite;       // optional (vectors), 1 everywhere before: 0 where an output is not finite before the cap
    int32_t row0, rows;    // outputs: these rows of weight and bias
    int32_t groups;        // vectors of a token
    bool wanted;           // the vectors are the tokens whose logits are wanted; groups is 1
    float soft_cap;        // 0: none
};

kern_status cuda_product_launch(const cuda_step *step, const cuda_product *product);

#endif

// SPDX-License-Identifier: Apache-2.0
// y = x W^T for vectors of activations and several weights: what linear and head_logits launch (products.cu). Whoever
// fills in the job has checked that the weights hold their rows.
#ifndef KERNELS_CUDA_PRODUCTS_CUH
#define KERNELS_CUDA_PRODUCTS_CUH

#include "kernels/cuda/norm.cuh"

enum { CUDA_PARTS = 8 };

// One weight of a product.
struct cuda_product_part {
    const void *weight;
    const float *bias;     // optional (rows of the weight)
    const float *residual; // optional (vectors, rows); may be y
    float *y;              // (vectors, rows)
    int32_t row0, rows;    // outputs: these rows of weight and bias
};

struct cuda_product {
    cuda_product_part part[CUDA_PARTS];
    int32_t parts;
    bool bf16;       // all weights; else float32
    const float *x;  // (.., cols)
    int32_t cols;    // of every weight
    int32_t groups;  // vectors of a token
    bool wanted;     // the vectors are the tokens whose logits are wanted; groups is 1
    float soft_cap;  // 0: none
    bool fast;       // kern_cuda.fast: vectors of bf16 weights are rounded to bf16; set by the launch
    bool looks;      // there may be none: weights are not asked for before that is known; set by the launch
    int32_t *finite; // optional (vectors), 1 everywhere before: 0 where an output is not finite before the cap
    // Optional: gated = act(y of part 0) y of part 1, behind the products of the only two parts. May be part 0's y.
    float *gated;
    int32_t activation;
    // Optional (y is NULL where there is none): the vectors, those of all tokens, are made by this norm, whose y is x.
    // Written once.
    cuda_norm norm;
};

// Whether the launch of a step may write `gated`, and may begin with a norm: not every shape is worth it.
bool cuda_product_takes_gated(const cuda_product *product);
bool cuda_product_takes_norm(const cuda_step *step, const cuda_product *product);
kern_status cuda_product_launch(const cuda_step *step, const cuda_product *product);
// Bytes of workspace that a launch with weights of this width takes, for any number of vectors.
size_t cuda_product_workspace(const kern_cuda *cuda, int32_t cols);

// What a linear asks for: a product of one part. KERN_INVALID: its weight does not have the rows or columns.
kern_status cuda_product_of(const kern_linear_args *a, cuda_product *product);
// What head_logits asks for, and its launch: the flags are raised before.
kern_status cuda_head_product_of(const kern_head_logits_args *a, cuda_product *product);
kern_status cuda_head_launch(const cuda_step *step, const cuda_product *product);

#endif

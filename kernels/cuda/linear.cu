// SPDX-License-Identifier: Apache-2.0
// linear: products of the tokens' vectors with a slice of a weight's rows. Prompts and generated tokens alike: a
// token's bits are one thing. Only float32 weights with rows->merge go another way (gemm.cu); their workspace is made
// when such rows are prepared first (rows.cu), since a device that serves never meets them.
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/products.cuh"

kern_status cuda_linear_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_linear_args *a = (const kern_linear_args *)args;
    if (a->cols < 1 || a->rows < 1 || a->row0 < 0 || a->groups < 0 || !a->x.ref || !a->weight.ref || !a->y.ref)
        return KERN_INVALID;
    *workspace_bytes = cuda_product_workspace(cuda, a->cols);
    return KERN_OK;
}

kern_status cuda_product_of(const kern_linear_args *a, cuda_product *product) {
    const cuda_weight weight = cuda_weight_of(a->weight.w);
    if (weight.cols != a->cols || (int64_t)a->row0 + a->rows > weight.rows)
        return KERN_INVALID;
    *product = {};
    product->part[0] = {weight.data, a->bias.f, a->residual.f, a->y.f, a->row0, a->rows};
    product->parts = 1;
    product->bf16 = weight.bf16;
    product->x = a->x.f;
    product->cols = a->cols;
    product->groups = a->groups > 0 ? a->groups : 1;
    return KERN_OK;
}

kern_status cuda_linear_run(const cuda_step *step, const void *args) {
    cuda_product product;
    const kern_status status = cuda_product_of((const kern_linear_args *)args, &product);
    return status ? status : cuda_product_launch(step, &product);
}

// SPDX-License-Identifier: Apache-2.0
// linear: products of the tokens' vectors with a slice of a weight's rows. Prompts and generated tokens alike: a
// token's bits are one thing, so rows->merge changes nothing.
#include "kernels/cuda/products.cuh"

kern_status cuda_linear_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_linear_args *a = (const kern_linear_args *)args;
    if (a->cols < 1 || a->rows < 1 || a->row0 < 0 || a->groups < 0 || !a->x.ref || !a->weight.ref || !a->y.ref)
        return KERN_INVALID;
    return KERN_OK;
}

kern_status cuda_linear_run(const cuda_step *step, const void *args) {
    const kern_linear_args *a = (const kern_linear_args *)args;
    if (a->weight.w->cols != a->cols || (int64_t)a->row0 + a->rows > a->weight.w->rows)
        return KERN_INVALID;
    cuda_product product = {};
    product.weight = cuda_weight_of(a->weight.w);
    product.x = a->x.f;
    product.bias = a->bias.f;
    product.residual = a->residual.f;
    product.y = a->y.f;
    product.row0 = a->row0;
    product.rows = a->rows;
    product.groups = a->groups > 0 ? a->groups : 1;
    return cuda_product_launch(step, &product);
}

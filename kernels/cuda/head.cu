// SPDX-License-Identifier: Apache-2.0
// head_logits: the products of the tokens whose logits are wanted with the whole head. They are looked at and capped as
// they are written; the flags are raised by a launch or phase before, since any of a row's blocks may lower its flag.
#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/products.cuh"

enum { THREADS = 256 };

static __global__ void begin_finite(const cuda_table *table, int32_t *finite) {
    cuda_begin();
    const int32_t i = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    cuda_await();
    if (i < table->n_logits)
        finite[i] = 1;
}

kern_status cuda_head_logits_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_head_logits_args *a = (const kern_head_logits_args *)args;
    if (a->width < 1 || a->vocabulary < 1 || !(a->soft_cap >= 0) || !a->x.ref || !a->weight.ref || !a->logits.ref)
        return KERN_INVALID;
    *workspace_bytes = cuda_product_workspace(cuda, a->width);
    return KERN_OK;
}

kern_status cuda_head_product_of(const kern_head_logits_args *a, cuda_product *product) {
    if (a->weight.w->rows != a->vocabulary || a->weight.w->cols != a->width)
        return KERN_INVALID;
    const cuda_weight weight = cuda_weight_of(a->weight.w);
    *product = {};
    product->part[0] = {weight.data, NULL, NULL, a->logits.f, 0, weight.rows};
    product->parts = 1;
    product->bf16 = weight.bf16;
    product->x = a->x.f;
    product->cols = weight.cols;
    product->groups = 1;
    product->wanted = true;
    product->soft_cap = a->soft_cap;
    product->finite = a->finite.i;
    return KERN_OK;
}

kern_status cuda_head_launch(const cuda_step *step, const cuda_product *product) {
    if (step->logits == 0)
        return KERN_OK;
    kern_status status = KERN_OK;
    if (product->finite && !cuda_chain_raise(step, product->finite))
        status = cuda_start(step, begin_finite, cuda_blocks(step->logits, THREADS), THREADS, 0, step->table,
                            product->finite);
    return status ? status : cuda_product_launch(step, product);
}

kern_status cuda_head_logits_run(const cuda_step *step, const void *args) {
    cuda_product product;
    const kern_status status = cuda_head_product_of((const kern_head_logits_args *)args, &product);
    return status ? status : cuda_head_launch(step, &product);
}

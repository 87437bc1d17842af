// SPDX-License-Identifier: Apache-2.0
// head_logits: the products of the tokens whose logits are wanted with the whole head. They are looked at and capped as
// they are written; the flags are raised by a launch before, since any of a row's blocks may lower its flag.
#include "kernels/cuda/products.cuh"

enum { THREADS = 256 };

static __global__ void begin_finite(const cuda_table *table, int32_t *finite) {
    const int32_t i = (int32_t)(blockIdx.x * THREADS + threadIdx.x);
    if (i < table->n_logits)
        finite[i] = 1;
}

kern_status cuda_head_logits_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_head_logits_args *a = (const kern_head_logits_args *)args;
    if (a->width < 1 || a->vocabulary < 1 || !(a->soft_cap >= 0) || !a->x.ref || !a->weight.ref || !a->logits.ref)
        return KERN_INVALID;
    return KERN_OK;
}

kern_status cuda_head_logits_run(const cuda_step *step, const void *args) {
    const kern_head_logits_args *a = (const kern_head_logits_args *)args;
    if (a->weight.w->rows != a->vocabulary || a->weight.w->cols != a->width)
        return KERN_INVALID;
    if (step->logits == 0)
        return KERN_OK;
    if (a->finite.i)
        begin_finite<<<cuda_blocks(step->logits, THREADS), THREADS, 0, step->stream>>>(step->table, a->finite.i);
    cuda_product product = {};
    product.weight = cuda_weight_of(a->weight.w);
    product.x = a->x.f;
    product.y = a->logits.f;
    product.finite = a->finite.i;
    product.rows = a->vocabulary;
    product.groups = 1;
    product.wanted = true;
    product.soft_cap = a->soft_cap;
    return cuda_product_launch(step, &product);
}

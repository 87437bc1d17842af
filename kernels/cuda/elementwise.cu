// SPDX-License-Identifier: Apache-2.0
// Operations on the elements of activations: the residual sum.
#include "kernels/cuda/cuda.cuh"

enum { THREADS = 256 };

// ---------------------------------------------------------------------------------------------------------- residual

static __global__ void add_kernel(const cuda_table *table, const float *x, float *y, int32_t width) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < (int64_t)table->n_tokens * width)
        y[i] += x[i];
}

kern_status cuda_add_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_add_args *a = (const kern_add_args *)args;
    return a->x.ref && a->y.ref && a->width > 0 ? KERN_OK : KERN_INVALID;
}

kern_status cuda_add_run(const cuda_step *step, const void *args) {
    const kern_add_args *a = (const kern_add_args *)args;
    const int blocks = cuda_blocks((int64_t)step->tokens * a->width, THREADS);
    add_kernel<<<blocks, THREADS, 0, step->stream>>>(step->table, a->x.f, a->y.f, a->width);
    return cuda_launched();
}

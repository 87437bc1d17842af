// SPDX-License-Identifier: Apache-2.0
// What the next id is drawn from lies in the slot with the state. Threads lie over (T, width); those of a row's last
// token copy.
#include "kernels/arguments.h"
#include "kernels/cuda/elements.cuh"

static __global__ void row_end_kernel(const cuda_table *table, kern_row_end_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), column = cuda_plane_column();
    if (t >= table->n_tokens || column >= a.width)
        return;
    const kern_row *row = &table->row[table->token_row[t]];
    float *kept = cuda_slot(table, a.state, row->slot);
    if (!kept || t != row->token0 + row->length - 1)
        return;
    for (int32_t plane = 0; plane < a.planes; plane++) {
        float *x = a.x.f + ((int64_t)plane * a.stride + t) * a.width + column;
        float *own = kept + (int64_t)plane * a.state_stride + column;
        *(a.back ? x : own) = *(a.back ? own : x);
    }
}

kern_status cuda_row_end_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_row_end_check((const kern_row_end_args *)args);
}

kern_status cuda_row_end_run(const cuda_step *step, const void *args) {
    const kern_row_end_args *a = (const kern_row_end_args *)args;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
    return cuda_start(step, row_end_kernel, plane.grid, plane.block, 0, step->table, *a);
}

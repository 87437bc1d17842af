// SPDX-License-Identifier: Apache-2.0
// Exits of looped models: each token's output is read at one of its loops. Threads lie over (T, width); every thread of
// a token finds the loop for itself, from a few logits that lie in the caches.
#include "kernels/arguments.h"
#include "kernels/cuda/elements.cuh"

static __device__ __forceinline__ int32_t loop_of(const kern_exit_read_args &a, const kern_exit &wanted, int32_t t) {
    const int32_t most = wanted.max_loops > 0 && wanted.max_loops < a.loops ? wanted.max_loops : a.loops;
    if (!a.z.f || wanted.max_loops <= 0 || wanted.threshold >= 1)
        return most;
    float left = 1;
    for (int32_t r = 0; r + 1 < most; r++) {
        left = __fdiv_rn(left, __fadd_rn(1.0f, expf(a.z.f[(int64_t)r * a.stride + t])));
        if (__fsub_rn(1.0f, left) >= wanted.threshold)
            return r + 1;
    }
    return most;
}

static __global__ void exit_read_kernel(const cuda_table *table, kern_exit_read_args a) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), column = cuda_plane_column();
    if (t >= table->n_tokens || column >= a.width)
        return;
    const int32_t loop = loop_of(a, table->row[table->token_row[t]].exit, t);
    a.y.f[(int64_t)t * a.width + column] = a.x.f[((int64_t)(loop - 1) * a.stride + t) * a.width + column];
    if (column == 0)
        a.loop.i[t] = loop;
}

kern_status cuda_exit_read_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    return kern_exit_read_check((const kern_exit_read_args *)args);
}

kern_status cuda_exit_read_run(const cuda_step *step, const void *args) {
    const kern_exit_read_args *a = (const kern_exit_read_args *)args;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
    return cuda_start(step, exit_read_kernel, plane.grid, plane.block, 0, step->table, *a);
}

// SPDX-License-Identifier: Apache-2.0
// Partial sums into gradients: a block owns 32 columns, its 32 warps share the rows, a contiguous part each, and the
// warps' sums are added in order.
#include "kernels/cuda/sums.cuh"

enum { PARTS = 32 };

static __global__ void __launch_bounds__(CUDA_WARP *PARTS) add_partials_kernel(const cuda_partials p) {
    __shared__ float shared[PARTS][CUDA_WARP];
    cuda_begin();
    cuda_await();
    const int64_t rows = (int64_t)p.count * p.members, each = (rows + PARTS - 1) / PARTS;
    const int64_t first = threadIdx.y * each, end = first + each < rows ? first + each : rows;
    const int32_t c = (int32_t)(blockIdx.x * CUDA_WARP + threadIdx.x);
    float sum = 0;
    if (c < p.width) {
        const float *from = p.partial + (int64_t)c * p.members;
#pragma unroll 4
        for (int64_t row = first; row < end; row++)
            sum = __fadd_rn(sum, from[row / p.members * p.stride + row % p.members]);
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= p.width)
        return;
    for (int part = 1; part < PARTS; part++)
        sum = __fadd_rn(sum, shared[part][threadIdx.x]);
    p.sum[c] = fmaf(p.scale, sum, p.sum[c]);
}

kern_status cuda_add_partials(const cuda_step *step, const cuda_partials &partials) {
    return cuda_start(step, add_partials_kernel, cuda_blocks(partials.width, CUDA_WARP), dim3(CUDA_WARP, PARTS), 0,
                      partials);
}

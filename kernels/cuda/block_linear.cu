// SPDX-License-Identifier: Apache-2.0
// Block-diagonal product with row vectors: y_b = x_b W_b [+ bias_b], for each block b of `width` channels.
//
// A block of threads owns 32 outputs of one W_b for up to 8 tokens. Its 8 warps share the inputs, each a contiguous
// eighth of them: a warp reads 32 neighbouring weights of an input row once for all tokens, and each token's input is
// one address for the warp. The eight partial sums are added in order, so every output has one order of sums, whatever
// tokens are computed beside it.
#include "kernels/cuda/elements.cuh"

enum { TOKENS = 8, SLICES = 8 };

static __global__ void __launch_bounds__(CUDA_WARP *SLICES)
    block_linear_kernel(const cuda_table *table, cuda_weight weight, kern_block_linear_args a, int32_t pieces) {
    cuda_begin();
    cuda_await();
    __shared__ float partial[SLICES][TOKENS][CUDA_WARP];
    const int32_t token0 = (int32_t)blockIdx.x * TOKENS, left = table->n_tokens - token0;
    if (left <= 0)
        return;
    const int32_t count = left < TOKENS ? left : TOKENS, lane = threadIdx.x, slice = threadIdx.y;
    const int32_t block = (int32_t)blockIdx.y / pieces, column0 = ((int32_t)blockIdx.y % pieces) * CUDA_WARP;
    const int32_t column = column0 + lane, width = a.width, share = (width + SLICES - 1) / SLICES;
    const int32_t first = slice * share, end = first + share < width ? first + share : width;
    const int64_t channels = (int64_t)a.blocks * width, channel = (int64_t)block * width;
    float sum[TOKENS] = {};
    if (column < width) {
        const float *x = a.x.f + token0 * channels + channel;
#pragma unroll 4
        for (int32_t i = first; i < end; i++) {
            const float w = cuda_weight_at(weight, block * width + i, column);
#pragma unroll
            for (int k = 0; k < TOKENS; k++)
                if (k < count)
                    sum[k] = fmaf(x[k * channels + i], w, sum[k]);
        }
    }
#pragma unroll
    for (int k = 0; k < TOKENS; k++)
        partial[slice][k][lane] = sum[k];
    __syncthreads();
    if (slice >= count || column >= width) // from here a warp owns a token
        return;
    float y = partial[0][slice][lane];
#pragma unroll
    for (int i = 1; i < SLICES; i++)
        y = __fadd_rn(y, partial[i][slice][lane]);
    if (a.bias.f)
        y = __fadd_rn(y, a.bias.f[channel + column]);
    a.y.f[(token0 + slice) * channels + channel + column] = y;
}

static_assert(TOKENS == SLICES, "a warp makes one partial sum of every token and the whole sum of one");

kern_status cuda_block_linear_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_block_linear_args *a = (const kern_block_linear_args *)args;
    if (!a->x.ref || !a->weight.ref || !a->y.ref || a->x.ref == a->y.ref || a->blocks < 1 || a->width < 1)
        return KERN_INVALID;
    return (int64_t)a->blocks * a->width <= INT32_MAX ? KERN_OK : KERN_INVALID;
}

kern_status cuda_block_linear_run(const cuda_step *step, const void *args) {
    enum { GRID_Y = 65535 };
    const kern_block_linear_args *a = (const kern_block_linear_args *)args;
    if (a->weight.w->rows != (int64_t)a->blocks * a->width || a->weight.w->cols != a->width)
        return KERN_INVALID;
    const int pieces = cuda_blocks(a->width, CUDA_WARP);
    if ((int64_t)a->blocks * pieces > GRID_Y)
        return KERN_UNSUPPORTED;
    const dim3 grid((unsigned)cuda_blocks(step->tokens, TOKENS), (unsigned)(a->blocks * pieces));
    return cuda_start(step, block_linear_kernel, grid, dim3(CUDA_WARP, SLICES), 0, step->table,
                      cuda_weight_of(a->weight.w), *a, pieces);
}

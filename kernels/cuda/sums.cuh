// SPDX-License-Identifier: Apache-2.0
// Sums over the tokens of a batch, as the gradients of parameters are: blocks of tokens add their own into partial sums
// in the workspace, which a second launch adds to the gradient in the order of the blocks. How many blocks there are is
// a function of the number of tokens alone, and so are the bits.
#ifndef KERNELS_CUDA_SUMS_CUH
#define KERNELS_CUDA_SUMS_CUH

#include "kernels/cuda/elements.cuh"

enum { CUDA_SUM_BLOCKS = 1024, CUDA_SUM_FEW_BLOCKS = 128, CUDA_SUM_THREADS = 256 };

// The blocks that `count` tokens are cut into, of `each` but the last.
struct cuda_sum_cut {
    int32_t blocks, each;
};

static inline cuda_sum_cut cuda_sum_cut_of(int64_t count, int32_t least, int32_t most_blocks) {
    cuda_sum_cut cut;
    cut.each = (int32_t)((count + most_blocks - 1) / most_blocks);
    cut.each = cut.each > least ? cut.each : least;
    cut.blocks = cuda_blocks(count, cut.each);
    return cut;
}

static inline size_t cuda_sum_bytes(int64_t width, int32_t most_blocks) {
    return sizeof(float) * (size_t)width * (size_t)most_blocks;
}

// sum[c] += of rows 0 .. count - 1 in order, at partial + row stride + c members: the next `members` elements.
struct cuda_partials {
    const float *partial;
    float *sum;
    int64_t stride;
    int32_t count, width, members;
    float scale; // of what is added
};
kern_status cuda_add_partials(const cuda_step *step, const cuda_partials &partials);

// Threads over columns and tokens of a block, as many tokens side by side as columns leave room for.
static inline dim3 cuda_sum_shape(int32_t width) {
    unsigned columns = 4;
    while (columns < CUDA_SUM_THREADS / 2 && (int64_t)columns < width)
        columns *= 2;
    return dim3(columns, CUDA_SUM_THREADS / columns);
}

// The sums of one block of tokens over N quantities of every column: each(t, c, sum) adds those of token t to sum.
// They go to partial (blocks, N, width). Grid: blocks, pieces of the columns; all threads of a block call it.
template <int N, typename Each>
static __device__ __forceinline__ void cuda_sum_columns(int32_t tokens, int32_t each_block, int32_t width,
                                                        float *partial, const Each &each) {
    __shared__ float shared[N][CUDA_SUM_THREADS];
    const int32_t c = (int32_t)(blockIdx.y * blockDim.x + threadIdx.x), first = (int32_t)blockIdx.x * each_block;
    const int32_t end = first + each_block < tokens ? first + each_block : tokens;
    const int place = (int)(threadIdx.y * blockDim.x + threadIdx.x);
    float sum[N] = {};
    if (c < width)
        for (int32_t t = first + (int32_t)threadIdx.y; t < end; t += (int32_t)blockDim.y)
            each(t, c, sum);
#pragma unroll
    for (int n = 0; n < N; n++)
        shared[n][place] = sum[n];
    __syncthreads();
    if (threadIdx.y != 0 || c >= width)
        return;
#pragma unroll
    for (int n = 0; n < N; n++) {
        float total = shared[n][threadIdx.x];
        for (unsigned row = 1; row < blockDim.y; row++)
            total = __fadd_rn(total, shared[n][row * blockDim.x + threadIdx.x]);
        partial[((int64_t)blockIdx.x * N + n) * width + c] = total;
    }
}

#endif

// SPDX-License-Identifier: Apache-2.0
// Gradients of parameters that are products of two activations summed over all tokens: skip of the recurrence family,
// Lambda of Mesa. Sums in double over fixed pieces of the tokens, added up in their order.
#ifndef KERNELS_CUDA_TOKEN_SUMS_CUH
#define KERNELS_CUDA_TOKEN_SUMS_CUH

#include "kernels/cuda/elements.cuh"

constexpr int SUMS_PIECES = 64, SUMS_PARTS = 8;

// Of head h, column c < width: sum over t of x[t x_token + h x_head + c] y[t y_token + h / y_share y_head + c].
struct token_sums {
    const float *x, *y;
    double *piece; // workspace: (SUMS_PIECES, heads, width)
    int64_t x_token, y_token;
    int32_t heads, width, x_head, y_head, y_share;
};
static inline size_t token_sums_bytes(int64_t heads, int64_t width) {
    return sizeof(double) * SUMS_PIECES * (size_t)(heads * width);
}

// A block has a piece of the tokens and 32 columns of a head; a thread every SUMS_PARTS-th token of a column.
static __global__ void __launch_bounds__(CUDA_WARP *SUMS_PARTS)
    token_sums_kernel(const cuda_table *table, const token_sums s) {
    cuda_begin();
    cuda_await();
    __shared__ double part[SUMS_PARTS][CUDA_WARP];
    const int32_t groups = (s.width + CUDA_WARP - 1) / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    const int32_t head = (int32_t)blockIdx.x / groups, c = (int32_t)blockIdx.x % groups * CUDA_WARP + lane;
    const int32_t row = threadIdx.x / CUDA_WARP, size = (table->n_tokens + SUMS_PIECES - 1) / SUMS_PIECES;
    const int32_t first = (int32_t)blockIdx.y * size, end = min(first + size, table->n_tokens);
    const float *x = s.x + head * s.x_head + c, *y = s.y + head / s.y_share * s.y_head + c;
    double sum = 0;
    for (int32_t t = first + row; c < s.width && t < end; t += SUMS_PARTS)
        sum += (double)(x[t * s.x_token] * y[t * s.y_token]);
    part[row][lane] = sum;
    __syncthreads();
    for (int i = 1; i < SUMS_PARTS; i++)
        sum += part[i][lane];
    if (row == 0 && c < s.width)
        s.piece[((int64_t)blockIdx.y * s.heads + head) * s.width + c] = sum;
}

static __device__ __forceinline__ double token_sum_of(const token_sums &s, int32_t head, int32_t c) {
    double sum = 0;
    for (int piece = 0; piece < SUMS_PIECES; piece++)
        sum += s.piece[((int64_t)piece * s.heads + head) * s.width + c];
    return sum;
}

static inline kern_status token_sums_start(const cuda_step *step, const token_sums &s) {
    const unsigned groups = (unsigned)((s.width + CUDA_WARP - 1) / CUDA_WARP);
    return cuda_start(step, token_sums_kernel, dim3((unsigned)s.heads * groups, SUMS_PIECES), CUDA_WARP * SUMS_PARTS, 0,
                      step->table, s);
}

#endif

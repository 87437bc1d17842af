// SPDX-License-Identifier: Apache-2.0
// Backward of linear and of the block-diagonal products: dx = dy W, dW += dy^T x, db += column sums of dy, by the
// products of gemm.cu. A block of the latter is such a product of its own, its vectors lying apart in memory.
#include "kernels/cuda/gemm.cuh"

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static int64_t vectors_of(const cuda_step *step, int32_t groups) {
    return (int64_t)step->tokens * (groups > 0 ? groups : 1);
}

static bool shape_is_valid(int32_t cols, int32_t rows, int32_t row0, int32_t groups) {
    return cols >= 1 && rows >= 1 && row0 >= 0 && groups >= 0;
}

kern_status cuda_linear_backward_input_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_linear_backward_input_args *a = (const kern_linear_backward_input_args *)args;
    *workspace_bytes = cuda_gemm_bytes(cuda);
    const bool complete = a->dy.ref && a->weight.ref && a->dx.ref && a->dx.ref != a->dy.ref;
    return complete && shape_is_valid(a->cols, a->rows, a->row0, a->groups) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_linear_backward_input_run(const cuda_step *step, const void *args) {
    const kern_linear_backward_input_args *a = (const kern_linear_backward_input_args *)args;
    const kern_weight *w = a->weight.w;
    if (w->cols != a->cols || (int64_t)a->row0 + a->rows > w->rows)
        return KERN_INVALID;
    if (w->dtype != KERN_F32)
        return KERN_UNSUPPORTED;
    cuda_gemm g = {};
    g.a = {a->dy.f, a->rows, false, false};
    g.b = {(const float *)w->data + (int64_t)a->row0 * a->cols, a->cols, true, false};
    g.c = a->dx.f;
    g.ldc = g.n = a->cols;
    g.m = vectors_of(step, a->groups);
    g.k = a->rows;
    g.accumulate = a->accumulate != 0;
    return cuda_gemm_launch(step, step->cuda->workspace, &g, 1);
}

kern_status cuda_linear_backward_weight_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_linear_backward_weight_args *a = (const kern_linear_backward_weight_args *)args;
    *workspace_bytes = larger(cuda_gemm_bytes(cuda), a->grad_bias.ref ? cuda_column_sum_bytes(a->rows) : 0);
    const bool complete = a->x.ref && a->dy.ref && a->grad_weight.ref;
    return complete && shape_is_valid(a->cols, a->rows, a->row0, a->groups) ? KERN_OK : KERN_INVALID;
}

kern_status cuda_linear_backward_weight_run(const cuda_step *step, const void *args) {
    const kern_linear_backward_weight_args *a = (const kern_linear_backward_weight_args *)args;
    cuda_gemm g = {};
    g.a = {a->dy.f, a->rows, true, false};
    g.b = {a->x.f, a->cols, true, false};
    g.c = a->grad_weight.f + (int64_t)a->row0 * a->cols;
    g.ldc = g.n = a->cols;
    g.m = a->rows;
    g.k = vectors_of(step, a->groups);
    g.accumulate = true;
    const kern_status status = cuda_gemm_launch(step, step->cuda->workspace, &g, 1);
    if (status || !a->grad_bias.f)
        return status;
    return cuda_column_sum(step, (float *)step->cuda->workspace, a->dy.f, g.k, a->rows, a->grad_bias.f + a->row0);
}

// ------------------------------------------------------------------------------------------------------ blocks of them

kern_status cuda_block_linear_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_block_linear_backward_args *a = (const kern_block_linear_backward_args *)args;
    const bool complete = a->x.ref && a->weight.ref && a->dy.ref && a->dx.ref && a->grad_weight.ref;
    const bool apart = a->dx.ref != a->dy.ref && a->dx.ref != a->x.ref;
    const int64_t wide = (int64_t)a->blocks * a->width;
    if (!complete || !apart || a->blocks < 1 || a->width < 1 || wide > INT32_MAX)
        return KERN_INVALID;
    *workspace_bytes = larger(cuda_gemm_bytes(cuda), a->grad_bias.ref ? cuda_column_sum_bytes(wide) : 0);
    return KERN_OK;
}

static kern_status run_block(const cuda_step *step, const kern_block_linear_backward_args *a, int32_t block) {
    const int64_t wide = (int64_t)a->blocks * a->width, channel = (int64_t)block * a->width;
    const int64_t square = (int64_t)a->width * a->width;
    const float *x = a->x.f + channel, *dy = a->dy.f + channel;
    const float *weight = (const float *)a->weight.w->data + block * square;
    const int64_t tokens = step->tokens, width = a->width;
    const cuda_gemm input = {{dy, wide, false, false},
                             {weight, width, false, false},
                             a->dx.f + channel,
                             wide,
                             tokens,
                             width,
                             width,
                             NULL,
                             NULL,
                             a->accumulate != 0};
    const kern_status status = cuda_gemm_launch(step, step->cuda->workspace, &input, 1);
    const cuda_gemm gradient = {{x, wide, true, false},
                                {dy, wide, true, false},
                                a->grad_weight.f + block * square,
                                width,
                                width,
                                width,
                                tokens,
                                NULL,
                                NULL,
                                true};
    return status ? status : cuda_gemm_launch(step, step->cuda->workspace, &gradient, 1);
}

kern_status cuda_block_linear_backward_run(const cuda_step *step, const void *args) {
    const kern_block_linear_backward_args *a = (const kern_block_linear_backward_args *)args;
    const kern_weight *w = a->weight.w;
    if (w->rows != (int64_t)a->blocks * a->width || w->cols != a->width)
        return KERN_INVALID;
    if (w->dtype != KERN_F32)
        return KERN_UNSUPPORTED;
    kern_status status = KERN_OK;
    for (int32_t block = 0; !status && block < a->blocks; block++)
        status = run_block(step, a, block);
    if (status || !a->grad_bias.f)
        return status;
    return cuda_column_sum(step, (float *)step->cuda->workspace, a->dy.f, step->tokens, a->blocks * a->width,
                           a->grad_bias.f);
}

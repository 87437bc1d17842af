// SPDX-License-Identifier: Apache-2.0
// Block-diagonal product with row vectors: y_b = x_b W_b + bias_b, for each block b of `width` channels.
//
// Forward. Every element is one chain of multiply-adds over the inputs in ascending order (gemm.h), whatever tokens are
// computed beside it, so rows of both kinds go one way. A task is one block, a slice of its outputs and some tokens;
// bf16 weights are widened a slice at a time.
// Backward: dx_b = dy_b W_b^T, dW_b += x_b^T dy_b, dbias += sum_t dy. Tasks own blocks of their output and one library
// call sums over all that is summed over. W must be float32 there.
#include "kernels/cpu/isa/elementwise.h"
#include "kernels/cpu/isa/gemm.h"
#include "kernels/cpu/isa/linear_rows.h"
#include "kernels/cpu/isa/products.h"

enum { TOKENS = 64, OUTPUTS = 64, BACKWARD_TOKENS = 512, BIAS_OUTPUTS = 256 };

// W_b[.., col0 .. col0 + count) as floats: in place, or widened into `memory` (width, OUTPUTS). *stride is its row's.
static const float *weight_slice(const kern_block_linear_args *a, int32_t block, int32_t col0, int32_t count,
                                 float *memory, int64_t *stride) {
    const int64_t at = (int64_t)block * a->width * a->width + col0;
    *stride = a->width;
    if (a->weight.w->dtype == KERN_F32)
        return (const float *)a->weight.w->data + at;
    *stride = OUTPUTS;
    for (int32_t i = 0; i < a->width; i++)
        vf_widen((const uint16_t *)a->weight.w->data + at + (int64_t)i * a->width, memory + (int64_t)i * OUTPUTS,
                 count);
    return memory;
}

static void add_bias(const kern_block_linear_args *a, int64_t token0, int64_t token1, int64_t channel, int32_t count) {
    const int64_t width = (int64_t)a->blocks * a->width;
    for (int64_t t = token0; t < token1; t++)
        for (int32_t o = 0; o < count; o += KERN_VL) {
            float *y = a->y.f + t * width + channel + o;
            vf_store_upto(y, vf_load_upto(y, count - o) + vf_load_upto(a->bias.f + channel + o, count - o), count - o);
        }
}

// Slice `slice` of the blocks' outputs for all tokens.
static void forward_slices(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    const kern_block_linear_args *a = args;
    const int64_t width = (int64_t)a->blocks * a->width, slices = (a->width + OUTPUTS - 1) / OUTPUTS;
    for (int64_t slice = first; slice < end; slice++) {
        const int32_t block = (int32_t)(slice / slices), col0 = (int32_t)(slice % slices) * OUTPUTS;
        const int32_t count = a->width - col0 < OUTPUTS ? a->width - col0 : OUTPUTS;
        const int64_t input = (int64_t)block * a->width, output = input + col0;
        int64_t stride;
        const float *w = weight_slice(a, block, col0, count, kern_cpu_workspace(cpu, kern_team_thread()), &stride);
        for (int64_t t = 0; t < rows->n_tokens; t += TOKENS) {
            const int64_t end_token = t + TOKENS < rows->n_tokens ? t + TOKENS : rows->n_tokens;
            gemm_nn((int)(end_token - t), count, a->width, a->x.f + t * width + input, width, w, stride,
                    a->y.f + t * width + output, width, 0);
            if (a->bias.f)
                add_bias(a, t, end_token, output, count);
        }
    }
}

static bool shape_is_valid(int32_t blocks, int32_t width) {
    return blocks >= 1 && width >= 1 && (int64_t)blocks * width <= INT32_MAX;
}

static bool weight_fits(const kern_weight *w, int32_t blocks, int32_t width) {
    return w->rows == (int64_t)blocks * width && w->cols == width;
}

KERN_PREPARE(block_linear, kern_block_linear_args) {
    (void)cpu;
    *thread_bytes = 0;
    if (!a->x.ref || !a->weight.ref || !a->y.ref || a->x.ref == a->y.ref || !shape_is_valid(a->blocks, a->width))
        return KERN_INVALID;
    *thread_bytes = kern_align64((size_t)a->width * OUTPUTS * sizeof(float));
    return KERN_OK;
}

KERN_RUN(block_linear, kern_block_linear_args) {
    if (!weight_fits(a->weight.w, a->blocks, a->width))
        return KERN_INVALID;
    if (a->weight.w->dtype != KERN_F32 && a->weight.w->dtype != KERN_BF16)
        return KERN_UNSUPPORTED;
    const int64_t slices = (int64_t)a->blocks * ((a->width + OUTPUTS - 1) / OUTPUTS);
    kern_over(forward_slices, cpu, rows, a, slices, (2.0 * rows->n_tokens + 20.0) * a->blocks * a->width * a->width);
    return KERN_OK;
}

// ----------------------------------------------------------------------------------------------------------- backward

// Column sums of the outputs [channel, channel + width) of dy, tokens in order, BIAS_OUTPUTS at a time.
static void block_bias_gradient(const kern_block_linear_backward_args *a, int32_t tokens, int64_t channel) {
    const int64_t width = (int64_t)a->blocks * a->width;
    for (int32_t first = 0; first < a->width; first += BIAS_OUTPUTS) {
        const int32_t count = a->width - first < BIAS_OUTPUTS ? a->width - first : BIAS_OUTPUTS;
        double sum[BIAS_OUTPUTS] = {0};
        for (int32_t t = 0; t < tokens; t++)
            for (int32_t o = 0; o < count; o++)
                sum[o] += a->dy.f[t * width + channel + first + o];
        for (int32_t o = 0; o < count; o++)
            a->grad_bias.f[channel + first + o] += (float)sum[o];
    }
}

KERN_PREPARE(block_linear_backward, kern_block_linear_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->weight.ref && a->dy.ref && a->dx.ref && a->grad_weight.ref;
    bool apart = a->dx.ref != a->dy.ref && a->dx.ref != a->x.ref;
    return complete && apart && shape_is_valid(a->blocks, a->width) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(block_linear_backward, kern_block_linear_backward_args) {
    (void)cpu;
    const kern_weight *w = a->weight.w;
    if (!weight_fits(w, a->blocks, a->width))
        return KERN_INVALID;
    if (w->dtype != KERN_F32)
        return KERN_UNSUPPORTED;
    const int64_t wide = (int64_t)a->blocks * a->width, square = (int64_t)a->width * a->width;
    const int64_t pieces = (rows->n_tokens + BACKWARD_TOKENS - 1) / BACKWARD_TOKENS;
    const float beta = a->accumulate ? 1.0f : 0.0f;
    int failed = 0;
#pragma omp parallel if (kern_worth_team(4.0 * rows->n_tokens * a->blocks * square))
    {
        kern_products_begin();
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a->blocks * (pieces + 1); task++) { // pieces of dx, then dW
            const int64_t block = task / (pieces + 1), piece = task % (pieces + 1), channel = block * a->width;
            const int64_t token0 = piece * BACKWARD_TOKENS, left = rows->n_tokens - token0;
            if (piece < pieces) {
                kern_product('n', 't', left < BACKWARD_TOKENS ? left : BACKWARD_TOKENS, a->width, a->width,
                             a->dy.f + token0 * wide + channel, wide, (const float *)w->data + block * square, a->width,
                             beta, a->dx.f + token0 * wide + channel, wide, &failed);
                continue;
            }
            kern_product('t', 'n', a->width, a->width, rows->n_tokens, a->x.f + channel, wide, a->dy.f + channel, wide,
                         1.0f, a->grad_weight.f + block * square, a->width, &failed);
            if (a->grad_bias.f)
                block_bias_gradient(a, rows->n_tokens, channel);
        }
    }
    return failed ? KERN_NO_MEMORY : KERN_OK;
}

// SPDX-License-Identifier: Apache-2.0
// RMSNorm (Zhang and Sennrich 2019) and L2 normalisation of each of the T * groups vectors of `width` floats.
//
//     rms:  y = x r (w + offset) [silu(gate)],  r = 1 / sqrt(sum x^2 / width + eps)
//     l2:   y = x r,                            r = 1 / sqrt(sum x^2 + eps)
// Backward of rms, with h = dy [silu(gate)] (w + offset) and n = x r:
//     dx = r (h - n sum(h n) / width)    dw += dy [silu(gate)] n    dgate = dy n (w + offset) silu'(gate)
// Backward of l2: dx = r dy - x r^3 sum(x dy). r is computed again, nothing is saved. Sums over a vector run in vector
// lanes of float32 in fixed order; dw is summed over blocks of tokens (elementwise.h). Each element is read before it
// is written, so y may be x and dx may be dy.
#include "kernels/cpu/isa/elementwise.h"

// ----------------------------------------------------------------------------------------------------------- forward

static void rmsnorm_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_rmsnorm_args *a = args;
    const int32_t width = a->width;
    for (int64_t vector = first; vector < end; vector++) {
        const float *x = a->x.f + vector * width, *gate = a->gate.f ? a->gate.f + vector * width : NULL;
        float *y = a->y.f + vector * width;
        const float rstd = 1.0f / sqrtf(kern_dot(x, x, width) / (float)width + a->eps);
        for (int32_t i = 0; i < width; i += KERN_VL) {
            int32_t left = width - i;
            vf scaled = vf_load_upto(x + i, left) * rstd * (vf_load_upto(a->weight.f + i, left) + a->weight_offset);
            if (gate) {
                vf z = vf_load_upto(gate + i, left);
                scaled *= z * vf_sigmoid(z);
            }
            vf_store_upto(y + i, scaled, left);
        }
    }
}

static void l2norm_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_l2norm_args *a = args;
    for (int64_t vector = first; vector < end; vector++) {
        const float *x = a->x.f + vector * a->width;
        float *y = a->y.f + vector * a->width;
        const float scale = 1.0f / sqrtf(kern_dot(x, x, a->width) + a->eps);
        for (int32_t i = 0; i < a->width; i += KERN_VL)
            vf_store_upto(y + i, scale * vf_load_upto(x + i, a->width - i), a->width - i);
    }
}

// ---------------------------------------------------------------------------------------------------------- backward

// sum of dy [silu(gate)] (w + offset) x.
static float weighted_sum(const kern_rmsnorm_backward_args *a, const float *x, const float *gate, const float *dy) {
    vf sum = {0};
    for (int32_t i = 0; i < a->width; i += KERN_VL) {
        int32_t left = a->width - i;
        vf h = vf_load_upto(dy + i, left) * (vf_load_upto(a->weight.f + i, left) + a->weight_offset);
        if (gate) {
            vf z = vf_load_upto(gate + i, left);
            h *= z * vf_sigmoid(z);
        }
        sum += h * vf_load_upto(x + i, left);
    }
    return vf_sum(sum);
}

static void rmsnorm_backward_vector(const kern_rmsnorm_backward_args *a, int64_t vector, float *grad_weight) {
    const int32_t width = a->width;
    const int64_t offset = vector * width;
    const float *x = a->x.f + offset, *dy = a->dy.f + offset, *gate = a->gate.f ? a->gate.f + offset : NULL;
    float *dx = a->dx.f + offset, *dgate = a->dgate.f ? a->dgate.f + offset : NULL;
    const float rstd = 1.0f / sqrtf(kern_dot(x, x, width) / (float)width + a->eps);
    const float mean = weighted_sum(a, x, gate, dy) * rstd / (float)width;
    for (int32_t i = 0; i < width; i += KERN_VL) {
        int32_t left = width - i;
        vf n = vf_load_upto(x + i, left) * rstd, w = vf_load_upto(a->weight.f + i, left) + a->weight_offset;
        vf gated = vf_load_upto(dy + i, left);
        if (gate) {
            vf z = vf_load_upto(gate + i, left), s = vf_sigmoid(z);
            if (dgate)
                vf_store_upto(dgate + i, gated * n * w * (s * (1.0f + z * (1.0f - s))), left);
            gated *= z * s;
        }
        vf gradient = rstd * (gated * w - n * mean);
        if (a->accumulate)
            gradient += vf_load_upto(dx + i, left);
        vf_store_upto(grad_weight + i, vf_load_upto(grad_weight + i, left) + gated * n, left);
        vf_store_upto(dx + i, gradient, left);
    }
}

static void rmsnorm_backward_blocks(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                    int64_t end) {
    const kern_rmsnorm_backward_args *a = args;
    const int64_t tokens = kern_sum_block_tokens(rows->n_tokens);
    for (int64_t block = first; block < end; block++) {
        float *partial = kern_sum_partial(cpu, a->width, block);
        memset(partial, 0, (size_t)a->width * sizeof(float));
        int64_t token1 = (block + 1) * tokens < rows->n_tokens ? (block + 1) * tokens : rows->n_tokens;
        for (int64_t vector = block * tokens * a->groups; vector < token1 * a->groups; vector++)
            rmsnorm_backward_vector(a, vector, partial);
    }
}

static void l2norm_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                  int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_l2norm_backward_args *a = args;
    for (int64_t vector = first; vector < end; vector++) {
        const float *x = a->x.f + vector * a->width, *dy = a->dy.f + vector * a->width;
        float *dx = a->dx.f + vector * a->width;
        const float scale = 1.0f / sqrtf(kern_dot(x, x, a->width) + a->eps);
        const float along = scale * scale * kern_dot(x, dy, a->width);
        for (int32_t i = 0; i < a->width; i += KERN_VL) {
            int32_t left = a->width - i;
            vf_store_upto(dx + i, scale * (vf_load_upto(dy + i, left) - along * vf_load_upto(x + i, left)), left);
        }
    }
}

// --------------------------------------------------------------------------------------------------------- launchers

static bool shape_is_valid(int32_t groups, int32_t width, float eps) {
    return groups >= 1 && width >= 1 && eps >= 0 && isfinite(eps);
}

KERN_PREPARE(rmsnorm, kern_rmsnorm_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->weight.ref && a->y.ref;
    return complete && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(rmsnorm, kern_rmsnorm_args) {
    int64_t vectors = (int64_t)rows->n_tokens * a->groups;
    kern_over(rmsnorm_range, cpu, rows, a, vectors, (double)vectors * a->width * (a->gate.f ? 20 : 4));
    return KERN_OK;
}

KERN_PREPARE(l2norm, kern_l2norm_args) {
    (void)cpu;
    *thread_bytes = 0;
    return a->x.ref && a->y.ref && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(l2norm, kern_l2norm_args) {
    int64_t vectors = (int64_t)rows->n_tokens * a->groups;
    kern_over(l2norm_range, cpu, rows, a, vectors, 3.0 * (double)vectors * a->width);
    return KERN_OK;
}

KERN_PREPARE(rmsnorm_backward, kern_rmsnorm_backward_args) {
    *thread_bytes = 0;
    bool complete = a->x.ref && a->weight.ref && a->dy.ref && a->dx.ref && a->grad_weight.ref;
    if (!complete || (a->dgate.ref && !a->gate.ref) || !shape_is_valid(a->groups, a->width, a->eps))
        return KERN_INVALID;
    *thread_bytes = kern_sum_workspace(cpu, a->width);
    return KERN_OK;
}

KERN_RUN(rmsnorm_backward, kern_rmsnorm_backward_args) {
    int32_t tokens = kern_sum_block_tokens(rows->n_tokens);
    int64_t blocks = (rows->n_tokens + tokens - 1) / tokens;
    double operations = (double)rows->n_tokens * a->groups * a->width * (a->gate.f ? 50 : 12);
    kern_over(rmsnorm_backward_blocks, cpu, rows, a, blocks, operations);
    kern_sum_partials(cpu, a->width, blocks, a->grad_weight.f);
    return KERN_OK;
}

KERN_PREPARE(l2norm_backward, kern_l2norm_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->dy.ref && a->dx.ref;
    return complete && shape_is_valid(a->groups, a->width, a->eps) ? KERN_OK : KERN_INVALID;
}

KERN_RUN(l2norm_backward, kern_l2norm_backward_args) {
    int64_t vectors = (int64_t)rows->n_tokens * a->groups;
    kern_over(l2norm_backward_range, cpu, rows, a, vectors, 8.0 * (double)vectors * a->width);
    return KERN_OK;
}

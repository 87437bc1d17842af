// SPDX-License-Identifier: Apache-2.0
// Feature maps that change a vector as a whole, for each of the T * groups vectors z of n floats:
//
//     HEDGEHOG (Zhang et al. 2024)    y = softmax([2 z, -2 z]); y_i = e^(2 z_i - top) / S
//                                     dz_i = 2 (y_i (dy_i - c) - y_{n+i} (dy_{n+i} - c)), c = sum y dy
//     DPFP (Schlag et al. 2021)       p = [relu(z), -relu(z)], y_{j,i} = p_i p_{(i - j) mod 2n}, j = 1 .. 4
//                                     dp_i = sum_j dy_{j,i} p_{i-j} + dy_{j,i+j} p_{i+j}, dz_i = dp_i - dp_{n+i}, z > 0
//     SUM                             y = z r, r = 1 / (sum z + eps);  dz = r (dy - sum(dy y))
// Sums over a vector run in vector lanes in fixed order. Vectors are free of one another.
#include "kernels/cpu/isa/elementwise.h"

enum { DPFP_ROLLS = 4, WRAP = 16 }; // at least the rolls, a whole line

static vf largest_size(const float *z, int32_t width) {
    vf top = {0};
    for (int32_t i = 0; i < width; i += KERN_VL) {
        vf v = vf_load_upto(z + i, width - i);
        top = vf_max(vf_max(v, -v), top);
    }
    return vf_set(2.0f * vf_largest(top));
}

static void hedgehog(const float *z, float *y, int32_t width) {
    const vf top = largest_size(z, width);
    vf sum = {0};
    for (int32_t i = 0; i < width; i += KERN_VL) {
        const int32_t left = width - i;
        vf twice = 2.0f * vf_load_upto(z + i, left), up = vf_exp(twice - top), down = vf_exp(-twice - top);
        vf_store_upto(y + i, up, left);
        vf_store_upto(y + width + i, down, left);
        sum += vf_keep(up + down, left);
    }
    const float scale = 1.0f / vf_sum(sum);
    for (int32_t i = 0; i < 2 * width; i += KERN_VL)
        vf_store_upto(y + i, scale * vf_load_upto(y + i, 2 * width - i), 2 * width - i);
}

// The softmax again, its two parts times the gradient's.
static void hedgehog_backward(const float *z, const float *dy, float *dz, int32_t width) {
    const vf top = largest_size(z, width);
    vf sum = {0}, along = {0};
    for (int32_t i = 0; i < width; i += KERN_VL) {
        const int32_t left = width - i;
        vf twice = 2.0f * vf_load_upto(z + i, left), up = vf_exp(twice - top), down = vf_exp(-twice - top);
        sum += vf_keep(up + down, left);
        along += up * vf_load_upto(dy + i, left) + down * vf_load_upto(dy + width + i, left);
    }
    const float scale = 1.0f / vf_sum(sum), mean = vf_sum(along) * scale;
    for (int32_t i = 0; i < width; i += KERN_VL) {
        const int32_t left = width - i;
        vf twice = 2.0f * vf_load_upto(z + i, left), up = vf_exp(twice - top), down = vf_exp(-twice - top);
        vf du = up * (vf_load_upto(dy + i, left) - mean), dd = down * (vf_load_upto(dy + width + i, left) - mean);
        vf_store_upto(dz + i, 2.0f * scale * (du - dd), left);
    }
}

// x (n) has DPFP_ROLLS elements more on either side: those of the other end.
static void wrap(float *x, int32_t n) {
    for (int32_t j = 1; j <= DPFP_ROLLS; j++) {
        x[-j] = x[(n - j % n) % n];
        x[n + j - 1] = x[(j - 1) % n];
    }
}

// p = [relu(z), -relu(z)], wrapped.
static void dpfp_parts(const float *z, float *p, int32_t width) {
    for (int32_t i = 0; i < width; i += KERN_VL) {
        vf part = vf_max(vf_set(0), vf_load_upto(z + i, width - i));
        vf_store_upto(p + i, part, width - i);
        vf_store_upto(p + width + i, -part, width - i);
    }
    wrap(p, 2 * width);
}

static void dpfp(const float *z, float *y, float *p, int32_t width) {
    const int32_t n = 2 * width;
    dpfp_parts(z, p, width);
    for (int32_t j = 1; j <= DPFP_ROLLS; j++, y += n)
        for (int32_t i = 0; i < n; i += KERN_VL)
            vf_store_upto(y + i, vf_load_upto(p + i, n - i) * vf_load_upto(p + i - j, n - i), n - i);
}

// turned: (n) dy p of one roll, wrapped; dp (n).
static void dpfp_backward(const float *z, const float *dy, float *dz, float *p, float *turned, float *dp,
                          int32_t width) {
    const int32_t n = 2 * width;
    dpfp_parts(z, p, width);
    memset(dp, 0, (size_t)n * sizeof(float));
    for (int32_t j = 1; j <= DPFP_ROLLS; j++, dy += n) {
        for (int32_t i = 0; i < n; i += KERN_VL) {
            const int32_t left = n - i;
            vf d = vf_load_upto(dy + i, left);
            vf_store_upto(turned + i, d * vf_load_upto(p + i, left), left);
            vf_store_upto(dp + i, vf_load_upto(dp + i, left) + d * vf_load_upto(p + i - j, left), left);
        }
        wrap(turned, n);
        for (int32_t i = 0; i < n; i += KERN_VL)
            vf_store_upto(dp + i, vf_load_upto(dp + i, n - i) + vf_load_upto(turned + i + j, n - i), n - i);
    }
    for (int32_t i = 0; i < width; i += KERN_VL) {
        const int32_t left = width - i;
        vf d = vf_load_upto(dp + i, left) - vf_load_upto(dp + width + i, left);
        vf_store_upto(dz + i, vf_select(vf_load_upto(z + i, left) > 0, d, vf_set(0)), left);
    }
}

static float vector_sum(const float *z, int32_t width) {
    vf sum = {0};
    for (int32_t i = 0; i < width; i += KERN_VL)
        sum += vf_load_upto(z + i, width - i);
    return vf_sum(sum);
}

static void divide_by_sum(const float *z, float *y, int32_t width, float eps) {
    const float scale = 1.0f / (vector_sum(z, width) + eps);
    for (int32_t i = 0; i < width; i += KERN_VL)
        vf_store_upto(y + i, scale * vf_load_upto(z + i, width - i), width - i);
}

static void divide_by_sum_backward(const float *z, const float *dy, float *dz, int32_t width, float eps) {
    const float scale = 1.0f / (vector_sum(z, width) + eps), along = scale * kern_dot(z, dy, width);
    for (int32_t i = 0; i < width; i += KERN_VL)
        vf_store_upto(dz + i, scale * (vf_load_upto(dy + i, width - i) - along), width - i);
}

// Piece `index` of the thread's workspace: 2 width floats and what a wrap adds on either side.
static size_t part_bytes(int32_t width) {
    return kern_align64((2 * (size_t)width + 2 * WRAP) * sizeof(float));
}
static float *part_of(const kern_cpu *cpu, size_t index, int32_t width) {
    char *memory = kern_cpu_workspace(cpu, kern_team_thread());
    return (float *)(memory + index * part_bytes(width)) + WRAP;
}

static void feature_map_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                              int64_t end) {
    (void)rows;
    const kern_feature_map_args *a = args;
    const int32_t width = a->width, wide = kern_feature_width(a->feature, width);
    for (int64_t vector = first; vector < end; vector++) {
        const float *x = a->x.f + vector * width;
        float *y = a->y.f + vector * wide;
        switch (a->feature) {
        case KERN_FEATURE_HEDGEHOG:
            hedgehog(x, y, width);
            break;
        case KERN_FEATURE_DPFP:
            dpfp(x, y, part_of(cpu, 0, width), width);
            break;
        default:
            divide_by_sum(x, y, width, a->eps);
        }
    }
}

static void feature_map_backward_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                       int64_t end) {
    (void)rows;
    const kern_feature_map_backward_args *a = args;
    const int32_t width = a->width, wide = kern_feature_width(a->feature, width);
    for (int64_t vector = first; vector < end; vector++) {
        const float *x = a->x.f + vector * width, *dy = a->dy.f + vector * wide;
        float *dx = a->dx.f + vector * width;
        switch (a->feature) {
        case KERN_FEATURE_HEDGEHOG:
            hedgehog_backward(x, dy, dx, width);
            break;
        case KERN_FEATURE_DPFP:
            dpfp_backward(x, dy, dx, part_of(cpu, 0, width), part_of(cpu, 1, width), part_of(cpu, 2, width), width);
            break;
        default:
            divide_by_sum_backward(x, dy, dx, width, a->eps);
        }
    }
}

static bool shape_is_valid(int32_t groups, int32_t width, int32_t feature, float eps) {
    return groups >= 1 && width >= 1 && width <= INT32_MAX / 8 && feature >= 0 && feature < KERN_FEATURES &&
           isfinite(eps);
}

static double operations(const kern_rows *rows, int32_t groups, int32_t width, int32_t feature) {
    return (double)rows->n_tokens * groups * width * (feature == KERN_FEATURE_HEDGEHOG ? 80 : 20);
}

KERN_PREPARE(feature_map, kern_feature_map_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->y.ref && (a->x.ref != a->y.ref || a->feature == KERN_FEATURE_SUM);
    if (!complete || !shape_is_valid(a->groups, a->width, a->feature, a->eps))
        return KERN_INVALID;
    if (a->feature == KERN_FEATURE_DPFP)
        *thread_bytes = part_bytes(a->width);
    return KERN_OK;
}

KERN_RUN(feature_map, kern_feature_map_args) {
    const int64_t vectors = (int64_t)rows->n_tokens * a->groups;
    kern_over(feature_map_range, cpu, rows, a, vectors, operations(rows, a->groups, a->width, a->feature));
    return KERN_OK;
}

KERN_PREPARE(feature_map_backward, kern_feature_map_backward_args) {
    (void)cpu;
    *thread_bytes = 0;
    bool complete = a->x.ref && a->dy.ref && a->dx.ref && (a->dx.ref != a->dy.ref || a->feature == KERN_FEATURE_SUM);
    if (!complete || !shape_is_valid(a->groups, a->width, a->feature, a->eps))
        return KERN_INVALID;
    if (a->feature == KERN_FEATURE_DPFP)
        *thread_bytes = 3 * part_bytes(a->width);
    return KERN_OK;
}

KERN_RUN(feature_map_backward, kern_feature_map_backward_args) {
    const int64_t vectors = (int64_t)rows->n_tokens * a->groups;
    kern_over(feature_map_backward_range, cpu, rows, a, vectors, 2 * operations(rows, a->groups, a->width, a->feature));
    return KERN_OK;
}

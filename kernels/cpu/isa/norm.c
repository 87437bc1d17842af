// SPDX-License-Identifier: Apache-2.0
// RMSNorm (Zhang and Sennrich 2019) and L2 normalisation of each of the T * groups vectors of `width` floats.
//
//     rms:  y = (u - m) r w [act(z)],  r = 1 / sqrt(sum (u - m)^2 / n + eps),  w = weight + offset
//           u = x, or x act(z) and no factor after (gate_first);  m = 0, or sum u / n (center: LayerNorm)
//     l2:   y = x r,                   r = 1 / sqrt(sum x^2 + eps)
// Backward of rms, with v = (u - m) r and h = dy w [act(z)]:
//     du = r (h - [sum h / n] - v sum(h v) / n)    dw += dy v [act(z)]
//     dx = du, dz = dy v w act'(z);  gate_first: dx = du act(z), dz = du x act'(z)
// Backward of l2: dx = r dy - x r^3 sum(x dy). r is computed again, nothing is saved. Sums over a vector run in vector
// lanes of float32 in fixed order; dw is summed over blocks of tokens (elementwise.h). Each element is read before it
// is written, so y may be x and dx may be dy. The loops are made once for the norm without gate, once for that with
// a SiLU gate behind it, and once for all others.
#include "kernels/cpu/isa/activation.h"

// What one vector's element loops read. weight is NULL where there is none, gate likewise.
typedef struct norm_vector {
    const float *x, *weight, *gate;
    int32_t width, activation;
    bool gate_first, center;
    float offset, eps;
    float mean, rstd;
} norm_vector;

static inline vf gate_value(const norm_vector *n, int32_t i, int32_t left) {
    return vf_activation(n->activation, vf_load_upto(n->gate + i, left));
}

// u of the elements from i on.
static inline vf input(const norm_vector *n, int32_t i, int32_t left) {
    vf x = vf_load_upto(n->x + i, left);
    return n->gate_first ? x * gate_value(n, i, left) : x;
}

static inline vf factor(const norm_vector *n, int32_t i, int32_t left) {
    return n->weight ? vf_load_upto(n->weight + i, left) + n->offset : vf_set(1);
}

static inline __attribute__((always_inline)) void find_statistics(norm_vector *n) {
    const int32_t width = n->width;
    float squares;
    n->mean = 0;
    if (!n->center && !n->gate_first) {
        squares = kern_dot(n->x, n->x, width);
    } else {
        vf sum = {0}, square_sum = {0};
        for (int32_t i = 0; n->center && i < width; i += KERN_VL)
            sum += input(n, i, width - i);
        n->mean = vf_sum(sum) / (float)width;
        for (int32_t i = 0; i < width; i += KERN_VL) {
            vf u = vf_keep(input(n, i, width - i) - n->mean, width - i);
            square_sum += u * u;
        }
        squares = vf_sum(square_sum);
    }
    n->rstd = 1.0f / sqrtf(squares / (float)width + n->eps);
}

// ----------------------------------------------------------------------------------------------------------- forward

static inline __attribute__((always_inline)) void norm_vectors(const kern_rmsnorm_args *a, norm_vector n, bool gated,
                                                               int64_t first, int64_t end) {
    const int32_t width = a->width;
    for (int64_t vector = first; vector < end; vector++) {
        n.x = a->x.f + vector * width;
        n.gate = gated ? a->gate.f + vector * width : NULL;
        n.weight = a->weight.f && a->group_weights ? a->weight.f + vector % a->groups * width : a->weight.f;
        find_statistics(&n);
        float *y = a->y.f + vector * width;
        for (int32_t i = 0; i < width; i += KERN_VL) {
            int32_t left = width - i;
            vf scaled = (input(&n, i, left) - n.mean) * n.rstd * factor(&n, i, left);
            if (gated && !n.gate_first)
                scaled *= gate_value(&n, i, left);
            vf_store_upto(y + i, scaled, left);
        }
    }
}

static void rmsnorm_range(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first, int64_t end) {
    (void)cpu;
    (void)rows;
    const kern_rmsnorm_args *a = args;
    norm_vector n = {.width = a->width, .offset = a->weight_offset, .eps = a->eps};
    if (!a->center && !a->gate.f) {
        norm_vectors(a, n, false, first, end);
    } else if (!a->center && !a->gate_first && a->activation == KERN_SILU) {
        n.activation = KERN_SILU;
        norm_vectors(a, n, true, first, end);
    } else {
        n.activation = a->activation;
        n.gate_first = a->gate_first;
        n.center = a->center;
        norm_vectors(a, n, a->gate.f != NULL, first, end);
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

// The gradient h of v, before the norm's own backward.
static inline vf normed_gradient(const norm_vector *n, const float *dy, int32_t i, int32_t left) {
    vf h = vf_load_upto(dy + i, left) * factor(n, i, left);
    return n->gate && !n->gate_first ? h * gate_value(n, i, left) : h;
}

static inline __attribute__((always_inline)) void backward_vector(const kern_rmsnorm_backward_args *a, norm_vector *n,
                                                                  int64_t vector, float *grad_weight) {
    const int32_t width = n->width;
    const int64_t offset = vector * width;
    const float *dy = a->dy.f + offset;
    float *dx = a->dx.f + offset, *dgate = a->dgate.f ? a->dgate.f + offset : NULL;
    find_statistics(n);
    vf sum = {0}, along = {0};
    for (int32_t i = 0; i < width; i += KERN_VL) {
        int32_t left = width - i;
        vf h = normed_gradient(n, dy, i, left);
        sum += h;
        along += h * (input(n, i, left) - n->mean);
    }
    const float mean = n->center ? vf_sum(sum) / (float)width : 0, slope = vf_sum(along) * n->rstd / (float)width;
    for (int32_t i = 0; i < width; i += KERN_VL) {
        int32_t left = width - i;
        vf gated = vf_load_upto(dy + i, left), w = factor(n, i, left), value = vf_set(1), rise = {0};
        if (n->gate)
            rise = vf_activation_slope(n->activation, vf_load_upto(n->gate + i, left), &value);
        vf x = vf_load_upto(n->x + i, left), v = ((n->gate_first ? x * value : x) - n->mean) * n->rstd;
        if (dgate && !n->gate_first)
            vf_store_upto(dgate + i, gated * v * w * rise, left);
        if (!n->gate_first)
            gated *= value;
        vf gradient = n->rstd * (gated * w - mean - v * slope);
        if (dgate && n->gate_first)
            vf_store_upto(dgate + i, gradient * x * rise, left);
        if (n->gate_first)
            gradient *= value;
        if (a->accumulate)
            gradient += vf_load_upto(dx + i, left);
        if (grad_weight)
            vf_store_upto(grad_weight + i, vf_load_upto(grad_weight + i, left) + gated * v, left);
        vf_store_upto(dx + i, gradient, left);
    }
}

static int32_t weight_count(const kern_rmsnorm_backward_args *a) {
    return a->group_weights ? a->groups * a->width : a->width;
}

static inline __attribute__((always_inline)) void backward_blocks(const kern_cpu *cpu, const kern_rows *rows,
                                                                  const kern_rmsnorm_backward_args *a, norm_vector n,
                                                                  bool gated, int64_t first, int64_t end) {
    const int32_t count = a->weight.f ? weight_count(a) : 0;
    const int64_t tokens = kern_sum_block_tokens(rows->n_tokens);
    for (int64_t block = first; block < end; block++) {
        float *partial = count ? kern_sum_partial(cpu, count, block) : NULL;
        if (partial)
            memset(partial, 0, (size_t)count * sizeof(float));
        int64_t token1 = (block + 1) * tokens < rows->n_tokens ? (block + 1) * tokens : rows->n_tokens;
        for (int64_t vector = block * tokens * a->groups; vector < token1 * a->groups; vector++) {
            const int64_t group = a->group_weights ? vector % a->groups * a->width : 0;
            n.x = a->x.f + vector * a->width;
            n.gate = gated ? a->gate.f + vector * a->width : NULL;
            n.weight = a->weight.f ? a->weight.f + group : NULL;
            backward_vector(a, &n, vector, partial ? partial + group : NULL);
        }
    }
}

static void rmsnorm_backward_blocks(const kern_cpu *cpu, const kern_rows *rows, const void *args, int64_t first,
                                    int64_t end) {
    const kern_rmsnorm_backward_args *a = args;
    norm_vector n = {.width = a->width, .offset = a->weight_offset, .eps = a->eps};
    if (!a->center && !a->gate.f) {
        backward_blocks(cpu, rows, a, n, false, first, end);
    } else if (!a->center && !a->gate_first && a->activation == KERN_SILU) {
        n.activation = KERN_SILU;
        backward_blocks(cpu, rows, a, n, true, first, end);
    } else {
        n.activation = a->activation;
        n.gate_first = a->gate_first;
        n.center = a->center;
        backward_blocks(cpu, rows, a, n, a->gate.f != NULL, first, end);
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
    bool complete = a->x.ref && a->y.ref && kern_activation_is_valid(a->activation) && (a->gate.ref || !a->gate_first);
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
    bool complete = a->x.ref && a->dy.ref && a->dx.ref && (a->weight.ref != 0) == (a->grad_weight.ref != 0);
    bool gated = a->gate.ref || (!a->gate_first && !a->dgate.ref);
    if (!complete || !gated || !kern_activation_is_valid(a->activation) ||
        !shape_is_valid(a->groups, a->width, a->eps) || (int64_t)a->groups * a->width > INT32_MAX)
        return KERN_INVALID;
    if (a->weight.ref)
        *thread_bytes = kern_sum_workspace(cpu, weight_count(a));
    return KERN_OK;
}

KERN_RUN(rmsnorm_backward, kern_rmsnorm_backward_args) {
    int32_t tokens = kern_sum_block_tokens(rows->n_tokens);
    int64_t blocks = (rows->n_tokens + tokens - 1) / tokens;
    double operations = (double)rows->n_tokens * a->groups * a->width * (a->gate.f ? 50 : 12);
    kern_over(rmsnorm_backward_blocks, cpu, rows, a, blocks, operations);
    if (a->weight.f)
        kern_sum_partials(cpu, weight_count(a), blocks, a->grad_weight.f);
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

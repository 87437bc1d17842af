// SPDX-License-Identifier: Apache-2.0
// Operations on the elements of activations: embedding, activations, gated products, residual sums, rotary positions.
//
// Where an element depends on its place in the array alone, a thread takes four neighbours, in one access each where
// all operands are aligned; which way it goes does not change a bit. The others lay threads over (T, width).
#include <cmath>

#include "kernels/cuda/elements.cuh"

enum { THREADS = 256, QUAD = 4 };

static int quad_blocks(const cuda_step *step, int32_t width) {
    return cuda_blocks((int64_t)step->tokens * width, THREADS * QUAD);
}

static __device__ __forceinline__ int64_t quad_start(void) {
    return ((int64_t)blockIdx.x * THREADS + threadIdx.x) * QUAD;
}

// ---------------------------------------------------------------------------------------------------------- embedding

// An id outside the vocabulary gives a row that is not a number: the host's table may not be looked at in a graph.
static __global__ void embed_kernel(const cuda_table *table, cuda_weight weight, const int32_t *drawn, float *y,
                                    float scale) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), column = cuda_plane_column();
    if (t >= table->n_tokens || column >= weight.cols)
        return;
    int32_t id = table->id[t];
    if (id < 0 && drawn)
        id = drawn[-1 - id];
    const bool known = id >= 0 && id < weight.rows;
    y[(int64_t)t * weight.cols + column] = known ? scale * cuda_weight_at(weight, id, column) : NAN;
}

kern_status cuda_embed_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_embed_args *a = (const kern_embed_args *)args;
    return a->width < 1 || !a->weight.ref || !a->y.ref ? KERN_INVALID : KERN_OK;
}

kern_status cuda_embed_run(const cuda_step *step, const void *args) {
    const kern_embed_args *a = (const kern_embed_args *)args;
    if (a->weight.w->cols != a->width)
        return KERN_INVALID;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
    return cuda_start(step, embed_kernel, plane.grid, plane.block, 0, step->table, cuda_weight_of(a->weight.w),
                      a->drawn.i, a->y.f, a->scale);
}

// -------------------------------------------------------------------------------------------------------- activations

static __global__ void activation_kernel(const cuda_table *table, const float *x, float *y, int32_t width, int32_t kind,
                                         bool wide) {
    cuda_begin();
    cuda_await();
    const int64_t i = quad_start(), left = (int64_t)table->n_tokens * width - i;
    if (left <= 0)
        return;
    cuda_quad q = cuda_load(x + i, left, wide);
#pragma unroll
    for (int j = 0; j < QUAD; j++)
        q.v[j] = cuda_activate(kind, q.v[j]);
    cuda_store(y + i, q, left, wide);
}

kern_status cuda_activation_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_activation_args *a = (const kern_activation_args *)args;
    const bool valid = a->width >= 1 && kern_activation_is_valid(a->activation);
    return a->x.ref && a->y.ref && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_activation_run(const cuda_step *step, const void *args) {
    const kern_activation_args *a = (const kern_activation_args *)args;
    const bool wide = cuda_is_wide(a->x.p) && cuda_is_wide(a->y.p);
    return cuda_start(step, activation_kernel, quad_blocks(step, a->width), THREADS, 0, step->table, a->x.f, a->y.f,
                      a->width, a->activation, wide);
}

// ----------------------------------------------------------------------------------------------------- gated products

static __global__ void glu_kernel(const cuda_table *table, const float *gate, const float *up, float *y, int32_t width,
                                  int32_t kind, bool wide) {
    cuda_begin();
    cuda_await();
    const int64_t i = quad_start(), left = (int64_t)table->n_tokens * width - i;
    if (left <= 0)
        return;
    cuda_quad q = cuda_load(gate + i, left, wide);
    const cuda_quad factor = cuda_load(up + i, left, wide);
#pragma unroll
    for (int j = 0; j < QUAD; j++)
        q.v[j] = cuda_activate(kind, q.v[j]) * factor.v[j];
    cuda_store(y + i, q, left, wide);
}

kern_status cuda_glu_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_glu_args *a = (const kern_glu_args *)args;
    const bool valid = a->width >= 1 && kern_activation_is_valid(a->activation);
    return a->gate.ref && a->up.ref && a->y.ref && valid ? KERN_OK : KERN_INVALID;
}

kern_status cuda_glu_run(const cuda_step *step, const void *args) {
    const kern_glu_args *a = (const kern_glu_args *)args;
    const bool wide = cuda_is_wide(a->gate.p) && cuda_is_wide(a->up.p) && cuda_is_wide(a->y.p);
    return cuda_start(step, glu_kernel, quad_blocks(step, a->width), THREADS, 0, step->table, a->gate.f, a->up.f,
                      a->y.f, a->width, a->activation, wide);
}

// ------------------------------------------------------------------------------------------------- zeros and residual

static __global__ void clear_kernel(const cuda_table *table, float *y, int32_t width, bool wide) {
    cuda_begin();
    cuda_await();
    const int64_t i = quad_start(), left = (int64_t)table->n_tokens * width - i;
    if (left > 0)
        cuda_store(y + i, {{0, 0, 0, 0}}, left, wide);
}

kern_status cuda_clear_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_clear_args *a = (const kern_clear_args *)args;
    return a->y.ref && a->width > 0 ? KERN_OK : KERN_INVALID;
}

kern_status cuda_clear_run(const cuda_step *step, const void *args) {
    const kern_clear_args *a = (const kern_clear_args *)args;
    return cuda_start(step, clear_kernel, quad_blocks(step, a->width), THREADS, 0, step->table, a->y.f, a->width,
                      cuda_is_wide(a->y.p));
}

static __global__ void add_kernel(const cuda_table *table, const float *x, float *y, int32_t width, bool wide) {
    cuda_begin();
    cuda_await();
    const int64_t i = quad_start(), left = (int64_t)table->n_tokens * width - i;
    if (left <= 0)
        return;
    cuda_quad q = cuda_load(y + i, left, wide);
    const cuda_quad more = cuda_load(x + i, left, wide);
#pragma unroll
    for (int j = 0; j < QUAD; j++)
        q.v[j] += more.v[j];
    cuda_store(y + i, q, left, wide);
}

kern_status cuda_add_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_add_args *a = (const kern_add_args *)args;
    return a->x.ref && a->y.ref && a->width > 0 ? KERN_OK : KERN_INVALID;
}

kern_status cuda_add_run(const cuda_step *step, const void *args) {
    const kern_add_args *a = (const kern_add_args *)args;
    const bool wide = cuda_is_wide(a->x.p) && cuda_is_wide(a->y.p);
    return cuda_start(step, add_kernel, quad_blocks(step, a->width), THREADS, 0, step->table, a->x.f, a->y.f, a->width,
                      wide);
}

// --------------------------------------------------------------------------------------------------------- positions

// Sine and cosine of an angle below 2^51. The angle is formed and reduced in double; the rest, in [-pi/4, pi/4], has
// minimax polynomials of the Cephes library within 1 ulp.
static __device__ __forceinline__ void turn(double angle, float *sine, float *cosine) {
    const double turns = rint(angle * 0.63661977236758134308);
    const float r = (float)fma(-turns, 6.123233995736766e-17, fma(-turns, 1.5707963267948966, angle));
    const int quadrant = (int)((long long)turns & 3);
    const float square = r * r;
    const float s =
        fmaf(r * square, fmaf(square, fmaf(square, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f), r);
    const float c =
        fmaf(square * square,
             fmaf(square, fmaf(square, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f),
             fmaf(-0.5f, square, 1.0f));
    const float swapped_sine = quadrant & 1 ? c : s, swapped_cosine = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -swapped_sine : swapped_sine;
    *cosine = (quadrant + 1) & 2 ? -swapped_cosine : swapped_cosine;
}

// A thread turns one pair of one head of one token.
static __global__ void rope_kernel(const cuda_table *table, kern_rope_args a) {
    cuda_begin();
    cuda_await();
    const int32_t half = a.rotary / 2, t = cuda_plane_item(), column = cuda_plane_column();
    if (t >= table->n_tokens || column >= a.heads * half)
        return;
    const int32_t head = column / half, i = column - head * half;
    float sine, cosine;
    turn((double)a.frequency.f[i] * (double)table->token_position[t], &sine, &cosine);
    sine = a.inverse ? -sine : sine;
    float *x = a.x.f + ((int64_t)t * a.heads + head) * a.head_width + i;
    const float low = x[0], high = x[half];
    x[0] = fmaf(low, cosine, -(high * sine));
    x[half] = fmaf(high, cosine, low * sine);
}

kern_status cuda_rope_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_rope_args *a = (const kern_rope_args *)args;
    if (!a->x.ref || !a->frequency.ref || a->heads < 1 || a->head_width < 1)
        return KERN_INVALID;
    return a->rotary < 2 || a->rotary % 2 != 0 || a->rotary > a->head_width ? KERN_INVALID : KERN_OK;
}

kern_status cuda_rope_run(const cuda_step *step, const void *args) {
    const kern_rope_args *a = (const kern_rope_args *)args;
    const cuda_plane plane = cuda_plane_of(step->tokens, a->heads * (a->rotary / 2));
    return cuda_start(step, rope_kernel, plane.grid, plane.block, 0, step->table, *a);
}

// SPDX-License-Identifier: Apache-2.0
// Operations on the elements of activations: embedding, activations, gated products, residual sums, rotary positions.
// Where an element depends on its place in the array alone, a thread takes four neighbours, in one access each where
// all operands are aligned. The others lay threads over (T, width).
#include "kernels/cuda/elementwise.cuh"

#include "kernels/cuda/chain.cuh"

enum { THREADS = 256, QUAD = 4 };

// ---------------------------------------------------------------------------------------------------------- embedding

static __global__ void embed_kernel(const cuda_table *table, const cuda_embedding e) {
    cuda_begin();
    cuda_await();
    const int32_t t = cuda_plane_item(), column = cuda_plane_column();
    if (t < table->n_tokens && column < e.weight.cols)
        cuda_embed(table, e, t, column);
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
    const cuda_embedding e = {cuda_weight_of(a->weight.w), a->drawn.i, a->y.f, a->scale};
    if (cuda_chain_takes(step, 0))
        return cuda_chain_embed(step, &e);
    const cuda_plane plane = cuda_plane_of(step->tokens, a->width);
    return cuda_start(step, embed_kernel, plane.grid, plane.block, 0, step->table, e);
}

// ------------------------------------------------------------------------------------------------ element by element

static __global__ void elements_kernel(const cuda_table *table, const cuda_elements e) {
    cuda_begin();
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * QUAD;
    const int64_t left = (int64_t)table->n_tokens * e.width - i;
    cuda_await();
    if (left > 0)
        cuda_elements_quad(e, i, left);
}

static kern_status run_elements(const cuda_step *step, const cuda_elements *e) {
    if (cuda_chain_takes(step, 0))
        return cuda_chain_elements(step, e);
    return cuda_start(step, elements_kernel, cuda_blocks((int64_t)step->tokens * e->width, THREADS * QUAD), THREADS, 0,
                      step->table, *e);
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
    const cuda_elements e = {CUDA_ACTIVATION, a->x.f, NULL, a->y.f, a->width, a->activation, wide, NULL};
    return run_elements(step, &e);
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
    const cuda_elements e = {CUDA_GLU, a->gate.f,     a->up.f, a->y.f,
                             a->width, a->activation, wide,    cuda_copies_offer_expected(step, a->y.f, a->width, 0)};
    return run_elements(step, &e);
}

kern_status cuda_clear_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    (void)workspace_bytes;
    const kern_clear_args *a = (const kern_clear_args *)args;
    return a->y.ref && a->width > 0 ? KERN_OK : KERN_INVALID;
}

kern_status cuda_clear_run(const cuda_step *step, const void *args) {
    const kern_clear_args *a = (const kern_clear_args *)args;
    const cuda_elements e = {CUDA_CLEAR, NULL, NULL, a->y.f, a->width, 0, cuda_is_wide(a->y.p), NULL};
    return run_elements(step, &e);
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
    const cuda_elements e = {CUDA_ADD, a->x.f, NULL, a->y.f, a->width, 0, wide, NULL};
    return run_elements(step, &e);
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

// SPDX-License-Identifier: Apache-2.0
// Solves of a Mesa layer of any shape, a head by a block: Hk in global memory, seen by this block alone, vectors in
// shared memory, dot products by every warp for itself. What forward (mesa.cu) and backward (mesa_backward.cu) share.
#ifndef KERNELS_CUDA_MESA_ANY_CUH
#define KERNELS_CUDA_MESA_ANY_CUH

#include "kernels/cuda/mesa.cuh"

constexpr int KEY_MAX = 256, VALUE_MAX = 1024, ANY_THREADS = 256, ANY_BLOCKS_A_PROCESSOR = 2;

struct any_shared {
    float q[KEY_MAX], key[KEY_MAX], root_key[KEY_MAX], lambda[KEY_MAX];
    float x[KEY_MAX], r[KEY_MAX], p[KEY_MAX], ap[KEY_MAX];
    double column[KEY_MAX], solution[KEY_MAX];
};

// A block's memory, when there is no slot and for exact solves.
struct any_workspace {
    double *factor; // L, packed by rows
    float *hk, *hv;
};

static __host__ __device__ __forceinline__ int64_t any_workspace_floats(int32_t depth, int32_t width) {
    const int64_t floats = 2 * (int64_t)mesa_packed(depth, 0) + (int64_t)depth * (depth + width);
    return (floats + 3) / 4 * 4;
}
static inline int any_blocks(const kern_cuda *cuda) {
    return ANY_BLOCKS_A_PROCESSOR * cuda->processors;
}
static inline size_t any_workspace_bytes(const kern_cuda *cuda, const kern_mesa *mesa) {
    return sizeof(float) * (size_t)any_workspace_floats(mesa->key_width, mesa->value_width) * (size_t)any_blocks(cuda);
}
static __device__ __forceinline__ any_workspace any_workspace_of(const mesa &a, float *workspace) {
    double *factor = (double *)(workspace + blockIdx.x * any_workspace_floats(a.depth, a.width));
    float *hk = (float *)(factor + mesa_packed(a.depth, 0));
    return {factor, hk, hk + (int64_t)a.depth * a.depth};
}

// Every warp has the sum.
static __device__ __forceinline__ float any_dot(const float *a, const float *b, int32_t n) {
    float sum = 0;
    for (int32_t j = threadIdx.x % 32; j < n; j += 32)
        sum = fmaf(a[j], b[j], sum);
    return mesa_warp_sum(sum);
}

// ap = (H + Lambda) p, a row a warp. Barriers before and after.
static __device__ void any_product(any_shared &shared, const float *hk, int32_t depth, const float *p) {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    for (int32_t i = warp; i < depth; i += ANY_THREADS / 32) {
        float sum = 0;
        for (int32_t j = lane; j < depth; j += 32)
            sum = fmaf(hk[(int64_t)i * depth + j], p[j], sum);
        sum = mesa_warp_sum(sum);
        if (lane == 0)
            shared.ap[i] = fmaf(shared.lambda[i], p[i], sum);
    }
    __syncthreads();
}

static __device__ kern_solve_report any_solve_exact(any_shared &shared, const float *hk, int32_t depth,
                                                    double *factor) {
    for (int32_t i = threadIdx.x / 32; i < depth; i += ANY_THREADS / 32)
        for (int32_t j = threadIdx.x % 32; j <= i; j += 32)
            factor[mesa_packed(i, j)] = (double)hk[(int64_t)i * depth + j] + (i == j ? (double)shared.lambda[i] : 0);
    const int32_t d = threadIdx.x;
    if (d < depth)
        shared.solution[d] = shared.q[d];
    if (!mesa_factorise<cuda_whole_block>(factor, depth, shared.column)) {
        if (d < depth)
            shared.x[d] = NAN;
        kern_solve_report report = mesa_report_of(0, KERN_REPORT_BREAKDOWN, 0, 0);
        report.residual = NAN;
        return report;
    }
    if (threadIdx.x < 32)
        mesa_substitute(factor, depth, shared.solution);
    __syncthreads();
    if (d < depth)
        shared.x[d] = (float)shared.solution[d];
    any_product(shared, hk, depth, shared.x);
    if (d < depth)
        shared.r[d] = shared.q[d] - shared.ap[d];
    __syncthreads();
    return mesa_report_of(0, 0, any_dot(shared.r, shared.r, depth), any_dot(shared.q, shared.q, depth));
}

// r = p = q - (H + Lambda) x, the start of conjugate gradients; |r|^2.
static __device__ float any_first_residual(any_shared &shared, const float *hk, int32_t depth, bool from_zero) {
    const int32_t d = threadIdx.x;
    if (!from_zero)
        any_product(shared, hk, depth, shared.x);
    if (d < depth)
        shared.r[d] = shared.p[d] = from_zero ? shared.q[d] : shared.q[d] - shared.ap[d];
    __syncthreads();
    return any_dot(shared.r, shared.r, depth);
}

// Conjugate gradients (Hestenes and Stiefel 1952); thread d has element d of every vector.
static __device__ kern_solve_report any_solve(any_shared &shared, const float *hk, int32_t depth,
                                              const kern_solver &solver, double *factor) {
    if (solver.mode == KERN_SOLVE_EXACT)
        return any_solve_exact(shared, hk, depth, factor);
    const bool fixed = solver.mode == KERN_SOLVE_FIXED;
    const float epsilon = fixed ? 1e-5f : 0.0f, rhs = any_dot(shared.q, shared.q, depth);
    const int32_t d = threadIdx.x;
    if (d < depth)
        shared.x[d] = fixed || rhs == 0 ? 0 : shared.q[d] / (hk[(int64_t)d * depth + d] + shared.lambda[d]);
    if (rhs == 0)
        return mesa_report_of(0, 0, 0, rhs);
    float residual = any_first_residual(shared, hk, depth, fixed);
    const float stop = fixed ? -1 : mesa_threshold(solver, rhs, residual);
    for (int32_t steps = 0;; steps++) {
        if (residual <= stop)
            return mesa_report_of(steps, 0, residual, rhs);
        if (steps >= solver.max_steps)
            return mesa_report_of(steps, solver.mode == KERN_SOLVE_TOLERANCE ? KERN_REPORT_UNCONVERGED : 0, residual,
                                  rhs);
        any_product(shared, hk, depth, shared.p);
        const float curvature = any_dot(shared.p, shared.ap, depth), length = residual / (curvature + epsilon);
        if ((!(curvature > 0) && !fixed) || !isfinite(curvature) || !isfinite(length))
            return mesa_report_of(steps, KERN_REPORT_BREAKDOWN, residual, rhs);
        if (d < depth) {
            shared.x[d] = fmaf(length, shared.p[d], shared.x[d]);
            shared.r[d] = fmaf(-length, shared.ap[d], shared.r[d]);
        }
        __syncthreads();
        const float next = any_dot(shared.r, shared.r, depth), keep = next / (residual + epsilon);
        if (d < depth)
            shared.p[d] = fmaf(keep, shared.p[d], shared.r[d]);
        residual = next;
    }
}

#endif

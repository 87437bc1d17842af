// SPDX-License-Identifier: Apache-2.0
// The second solve of a Mesa layer's backward pass on the tensor cores (wgmma, sm_90a), D = V of 64 or 128: a block,
// one warpgroup, has a chunk of a head, a warp 16 of its tokens, with the solver of forward (mesa_chunk.cuh). The
// right-hand sides
//   dX = (e^c * dO) Hv^T + ((dO V^T) * E beta) K
// are one more product of its kind, with Hv^T in Hk's place. Hv and Hk come from the states that forward left.
#include "kernels/cuda/mesa_backward.cuh"
#include "kernels/cuda/mesa_chunk.cuh"

struct second_solve {
    mesa a; // q: the right-hand sides, in dq
    const float *d_o;
    float *dq, tolerance;
    bool fast;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

static __device__ __forceinline__ kern_solver solver_of(kern_solver solver, float tolerance) {
    solver.tolerance = fminf(solver.tolerance, tolerance);
    return solver;
}

// D columns of a state's rows, from column0 of a snapshot's, as operand, and what its powers leave of the unit.
template <int D, int LIMBS>
static __device__ __forceinline__ void put_state(solve_shared<D, LIMBS> &shared, const float *snapshot, int32_t column0,
                                                 const solve_unit &unit) {
    constexpr int ROWS = SOLVE_THREADS / 4, QUADS = D / SPLIT_TILE;
    const int32_t part = threadIdx.x % CUDA_WARP / 8, row0 = threadIdx.x / CUDA_WARP * 8 + threadIdx.x % 8;
#pragma unroll 2
    for (int32_t d = row0; d < D; d += ROWS) {
        const float *from = snapshot + (int64_t)d * 2 * D + column0;
        cuda_quad x[QUADS];
        float largest = 0;
#pragma unroll
        for (int n = 0; n < QUADS; n++)
            x[n] = cuda_load(from + 16 * n + 4 * part, 4, true);
#pragma unroll
        for (int n = 0; n < QUADS; n++)
            largest = solve_largest(largest, x[n]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
        const split_power power = split_power_of(largest);
#pragma unroll
        for (int n = 0; n < QUADS; n++)
            solve_put_quad(shared.state, d, 4 * n + part, solve_scaled(x[n], power.scale));
        if (part == 0)
            shared.scale[d] = power.inverse * unit.unit;
    }
}

// The warp's right-hand sides divided by their norms, to dq; the norms of a lane's two tokens.
template <int D>
static __device__ __forceinline__ void put_right_sides(const second_solve &b, const kern_chunk &chunk, int64_t at,
                                                       const solve_sums<D> &rhs, float (&norm)[2]) {
    float largest[2] = {0, 0}, poison[2] = {0, 0}, square[2] = {0, 0}, down[2];
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t) {
        const float x = rhs[n].v[half][2 * r], y = rhs[n].v[half][2 * r + 1];
        largest[r] = fmaxf(largest[r], fmaxf(fabsf(x), fabsf(y)));
        poison[r] = fmaf(x, 0.0f, fmaf(y, 0.0f, poison[r])); // NaN where anything is not finite
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2)) + solve_over_row(poison[r]);
        down[r] = largest[r] < 1e-30f ? 0 : 1 / largest[r];
    }
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t) {
        const float x = rhs[n].v[half][2 * r] * down[r], y = rhs[n].v[half][2 * r + 1] * down[r];
        square[r] = fmaf(x, x, fmaf(y, y, square[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float rest = sqrtf(solve_over_row(square[r]));
        norm[r] = down[r] == 0 ? 0 : largest[r] * rest;
        down[r] = down[r] == 0 ? 0 : down[r] / rest;
    }
    solve_each_pair<D>([&](int n, int half, int r, int32_t token, int32_t column) {
        if (token < chunk.length)
            *(float2 *)&b.dq[(at + (int64_t)token * b.a.heads) * D + column] =
                make_float2(rhs[n].v[half][2 * r] * down[r], rhs[n].v[half][2 * r + 1] * down[r]);
    });
}

// From gradients of the outputs; behind solve_put_decays and a barrier.
template <int D, int LIMBS>
static __device__ __forceinline__ void right_sides(const second_solve &b, const kern_chunk &chunk, int64_t at,
                                                   float inverse, solve_shared<D, LIMBS> &shared, float (&norm)[2]) {
    solve_sums<D> y;
    solve_limbs<D, LIMBS> d_o;
    split_powers powers;
    solve_each_pair<D>([&](int n, int half, int r, int32_t token, int32_t column) {
        float2 two = make_float2(0, 0);
        if (token < chunk.length)
            two = *(const float2 *)&b.d_o[(at + (int64_t)token * b.a.heads) * D + column];
        y[n].v[half][2 * r] = two.x, y[n].v[half][2 * r + 1] = two.y;
    });
    split_strip(y, powers, d_o);
    solve_apply(shared, shared.values, shared.keys, d_o, y);
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t) {
        float *v = &y[n].v[half][2 * r];
        v[0] *= inverse * powers.row[r].inverse, v[1] *= inverse * powers.row[r].inverse;
    });
    put_right_sides<D>(b, chunk, at, y, norm);
}

template <int D, int LIMBS>
static __device__ __forceinline__ void run_solve(const cuda_table *table, const second_solve &b, int32_t item,
                                                 solve_shared<D, LIMBS> &shared) {
    const mesa &a = b.a;
    const int32_t head = item % a.heads;
    const kern_chunk chunk = table->chunk[item / a.heads];
    const int64_t at = (int64_t)chunk.token0 * a.heads + head, stride = (int64_t)a.heads * D;
    const float *snapshot = a.snapshots + (int64_t)item * D * 2 * D;
    const kern_solver solver = solver_of(table->row[chunk.row].solver, b.tolerance);
    if (!solve_has(solver, LIMBS, b.fast))
        return;
    if (threadIdx.x == 0)
        cuda_bulk_prefetch(snapshot, D * 2 * D * sizeof(float));
    const split_power values = solve_put_rows(shared, 0, shared.values, chunk.length, a.v + at * D, stride,
                                              [&] { solve_begin_chunk(table, a, chunk, head, shared); });
    const split_power keys = solve_put_rows(shared, 1, shared.keys, chunk.length, a.k + at * D, stride, [] {});
    const solve_unit outer = solve_unit_of(values, keys), unit = solve_unit_of(keys, keys);
    put_state(shared, snapshot, D, outer);
    solve_put_lambda(a, head, unit, shared);
    solve_put_decays(chunk, shared);
    cuda_bulk_fence();
    __syncthreads();
    float norm[2];
    right_sides<D, LIMBS>(b, chunk, at, outer.inverse, shared, norm);
    __syncthreads();
    put_state(shared, snapshot, 0, unit);
    solve_put_start(a, solver, chunk, head, snapshot[(int64_t)(threadIdx.x % D) * 2 * D + threadIdx.x % D], shared);
    cuda_bulk_fence();
    __syncthreads();
    solve_tokens(a, solver, chunk, head, unit.inverse, shared);
    solve_sums<D> x;
    solve_load_x(shared, x);
    solve_each_pair<D>([&](int n, int half, int r, int32_t token, int32_t column) {
        if (token < chunk.length)
            *(float2 *)&b.dq[(at + (int64_t)token * a.heads) * D + column] =
                make_float2(x[n].v[half][2 * r] * norm[r], x[n].v[half][2 * r + 1] * norm[r]);
    });
}

#endif

template <int D, int LIMBS>
static __global__ void __launch_bounds__(SOLVE_THREADS, LIMBS == 1 ? 2 : 1)
    solve_kernel(const cuda_table *table, const second_solve b) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    run_solve(table, b, blockIdx.x, *(solve_shared<D, LIMBS> *)memory);
#endif
}

template <int D, int LIMBS> static kern_status start(const cuda_step *step, const second_solve &b) {
    constexpr size_t bytes = sizeof(solve_shared<D, LIMBS>);
    const kern_status status = cuda_allow_shared(solve_kernel<D, LIMBS>, bytes);
    return status ? status
                  : cuda_start(step, solve_kernel<D, LIMBS>, step->chunks * b.a.heads, SOLVE_THREADS, bytes,
                               step->table, b);
}

template <int D> static kern_status launch(const cuda_step *step, const second_solve &b) {
    const kern_solver loosest = {KERN_SOLVE_TOLERANCE, 0, b.tolerance};
    const bool coarse = step->coarse_prompts && cuda_solve_coarse(loosest);
    kern_status status = KERN_OK;
    if (b.fast || coarse)
        status = start<D, 1>(step, b);
    if (!status && !b.fast && (step->fine_prompts || !coarse))
        status = start<D, 2>(step, b);
    return status;
}

kern_status cuda_mesa_second_solve(const cuda_step *step, const mesa &a, const float *d_o, float *dq, float tolerance) {
    second_solve b = {a, d_o, dq, tolerance, step->cuda->fast};
    b.a.q = dq;
    if (!cuda_is_wide(a.k) || !cuda_is_wide(a.v) || !cuda_is_wide(a.snapshots) || (uintptr_t)d_o % 8 ||
        (uintptr_t)dq % 8)
        return KERN_INVALID;
    return a.depth == 64 ? launch<64>(step, b) : launch<128>(step, b);
}

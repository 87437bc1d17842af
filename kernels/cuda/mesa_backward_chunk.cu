// SPDX-License-Identifier: Apache-2.0
// The second solve of a Mesa layer's backward pass on the tensor cores (sm_90), D = V of 64 or 128: a block has a chunk
// of a head, a warp 16 of its tokens, with the solver of forward (mesa_chunk.cuh). The right-hand sides
//   dX = (e^c * dO) Hv^T + ((dO V^T) * E beta) K
// are one more product of its kind, with Hv^T in Hk's place. Hv and Hk come from the states that forward left.
#include "kernels/cuda/mesa_backward.cuh"
#include "kernels/cuda/mesa_chunk.cuh"

struct second_solve {
    mesa a; // q: the right-hand sides, in dq
    const float *d_o;
    float *dq, tolerance;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// D columns of a state's rows, from column0 of a snapshot's, as operand.
template <int D>
static __device__ __forceinline__ void put_state(solve_shared<D> &shared, const float *snapshot, int32_t column0) {
    constexpr int PARTS = 8, ROWS = SOLVE_THREADS / PARTS;
    const int32_t part = threadIdx.x % PARTS;
    for (int32_t d = threadIdx.x / PARTS; d < D; d += ROWS) {
        const float *from = snapshot + (int64_t)d * 2 * D + column0;
        const float inverse =
            chunk_put_row<D, PARTS>(shared.state[d / SPLIT_TILE], d % SPLIT_TILE, part,
                                    [&](int32_t column) { return cuda_load(from + column, 4, true); });
        if (part == 0)
            shared.state_inverse[d] = inverse;
    }
}

// The warp's right-hand sides divided by their norms, to dq; the norms of a lane's two tokens.
template <int D>
static __device__ __forceinline__ void put_right_sides(const second_solve &b, const kern_chunk &chunk, int64_t at,
                                                       int32_t warp, int32_t lane,
                                                       const split_block (&rhs)[D / SPLIT_TILE], float (&norm)[2]) {
    float largest[2] = {0, 0}, poison[2] = {0, 0}, square[2] = {0, 0}, down[2];
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t, int32_t) {
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
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t, int32_t) {
        const float x = rhs[n].v[half][2 * r] * down[r], y = rhs[n].v[half][2 * r + 1] * down[r];
        square[r] = fmaf(x, x, fmaf(y, y, square[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float rest = sqrtf(solve_over_row(square[r]));
        norm[r] = down[r] == 0 ? 0 : largest[r] * rest;
        down[r] = down[r] == 0 ? 0 : down[r] / rest;
    }
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        if (token < chunk.length)
            *(float2 *)&b.dq[(at + (int64_t)token * b.a.heads) * D + column] =
                make_float2(rhs[n].v[half][2 * r] * down[r], rhs[n].v[half][2 * r + 1] * down[r]);
    });
}

template <int D>
static __device__ void run_solve(const cuda_table *table, const second_solve &b, int32_t item,
                                 solve_shared<D> &shared) {
    const mesa &a = b.a;
    const int32_t head = item % a.heads, warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    const kern_chunk chunk = table->chunk[item / a.heads];
    const int64_t at = (int64_t)chunk.token0 * a.heads + head, stride = (int64_t)a.heads * D;
    const float *snapshot = a.snapshots + (int64_t)item * D * 2 * D;
    kern_solver solver = table->row[chunk.row].solver;
    if (solved_elsewhere(table->row[chunk.row]))
        return;
    solver.tolerance = fminf(solver.tolerance, b.tolerance);
    put_state(shared, snapshot, D);
    solve_put_rows<D>(shared.values, shared.value_inverse, chunk.length, a.v + at * D, stride);
    for (int32_t i = threadIdx.x; i < CHUNK * D / 2; i += SOLVE_THREADS) {
        const int32_t token = i / (D / 2), column = i % (D / 2) * 2;
        float2 two = make_float2(0, 0);
        if (token < chunk.length)
            two = *(const float2 *)&b.d_o[(at + (int64_t)token * a.heads) * D + column];
        *(float2 *)&shared.x[token][column] = two;
    }
    solve_begin_chunk<D>(table, a, chunk, head, shared);
    solve_put_pairs(shared, chunk.length, shared.value_inverse, shared.key_inverse);
    __syncthreads();
    split_block rhs[D / SPLIT_TILE];
    float norm[2];
    solve_apply<D, false>(shared, shared.x, shared.values, shared.keys, warp, lane, rhs);
    put_right_sides<D>(b, chunk, at, warp, lane, rhs, norm);
    __syncthreads();
    put_state(shared, snapshot, 0);
    solve_put_pairs(shared, chunk.length, shared.key_inverse, shared.key_inverse);
    if (threadIdx.x < D)
        solve_put_start<D>(a, solver, chunk, at, snapshot[(int64_t)threadIdx.x * 2 * D + threadIdx.x], shared);
    __syncthreads();
    solve_tokens<D>(a, solver, chunk, head, warp, lane, shared);
    solve_each_pair<D>(warp, lane, [&](int, int, int r, int32_t token, int32_t column) {
        const float2 x = *(const float2 *)&shared.x[token][column];
        if (token < chunk.length)
            *(float2 *)&b.dq[(at + (int64_t)token * a.heads) * D + column] = make_float2(x.x * norm[r], x.y * norm[r]);
    });
}

#endif

template <int D>
static __global__ void __launch_bounds__(SOLVE_THREADS, 1) solve_kernel(const cuda_table *table, const second_solve b) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    run_solve<D>(table, b, blockIdx.x, *(solve_shared<D> *)memory);
#endif
}

template <int D> static kern_status launch(const cuda_step *step, const second_solve &b) {
    const kern_status status = cuda_allow_shared(solve_kernel<D>, sizeof(solve_shared<D>));
    return status ? status
                  : cuda_start(step, solve_kernel<D>, step->chunks * b.a.heads, SOLVE_THREADS, sizeof(solve_shared<D>),
                               step->table, b);
}

kern_status cuda_mesa_second_solve(const cuda_step *step, const mesa &a, const float *d_o, float *dq, float tolerance) {
    second_solve b = {a, d_o, dq, tolerance};
    b.a.q = dq;
    if (!cuda_is_wide(a.k) || !cuda_is_wide(a.v) || !cuda_is_wide(a.snapshots) || (uintptr_t)d_o % 8 ||
        (uintptr_t)dq % 8)
        return KERN_INVALID;
    return a.depth == 64 ? launch<64>(step, b) : launch<128>(step, b);
}

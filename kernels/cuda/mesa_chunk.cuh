// SPDX-License-Identifier: Apache-2.0
// The solves of a chunk of a Mesa head by a block, a warp 16 of its tokens (mesa_chunk.cu): what forward and backward
// share. A row whose tolerance is above SOLVE_COARSE multiplies high halves alone while it iterates: what that leaves
// out of the operator, 2^-11, is small against the residual that it stops at.
#ifndef KERNELS_CUDA_MESA_CHUNK_CUH
#define KERNELS_CUDA_MESA_CHUNK_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/mesa.cuh"

constexpr int SOLVE_THREADS = CHUNK / SPLIT_TILE * CUDA_WARP;

static __device__ __forceinline__ bool solved_elsewhere(const kern_row &row) {
    return row.solver.mode == KERN_SOLVE_EXACT;
}

template <int D> struct alignas(128) solve_shared {
    typedef float rows[CHUNK][D + 8]; // eight rows in different banks

    split_tile<2> state[D / SPLIT_TILE][D / SPLIT_TILE]; // Hk, then Hv
    split_tile<2> keys[CHUNK_TILES][D / SPLIT_TILE];
    rows x, r;
    union alignas(16) {
        rows p;
        split_tile<2> values[CHUNK_TILES][D / SPLIT_TILE]; // behind the last step
    };
    float pair[CHUNK][CHUNK + 8]; // E_ij beta_j, with the inverse powers of both operands j
    chunk_decay decay;
    float state_inverse[D], lambda[D], beta[CHUNK], start[CHUNK], key_inverse[CHUNK], value_inverse[CHUNK];
    cuda_mbarrier came;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr float SOLVE_COARSE = 4e-3f; // tolerance from which high halves suffice

// A lane's pairs of columns in its two rows: use(tile, half, row of two, token, column).
template <int D, typename Use>
static __device__ __forceinline__ void solve_each_pair(int32_t warp, int32_t lane, Use use) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                use(n, half, r, warp * SPLIT_TILE + split_row(lane, 2 * r),
                    n * SPLIT_TILE + split_column(lane, half, 0));
}

static __device__ __forceinline__ float solve_over_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <bool COARSELY>
static __device__ __forceinline__ void solve_multiply(split_sum<2> &sum, const split_left<2> &a,
                                                      const split_right<2> &b) {
    if constexpr (COARSELY) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            mma_half(sum.part[0].v[half], a.limb[0], b.limb[0][2 * half], b.limb[0][2 * half + 1]);
    } else {
        split_multiply(sum, a, b);
    }
}

// (e^c * P) H + ((P J^T) * pair) W for a warp's rows of P; J and W: keys or values.
template <int D, bool COARSELY>
static __device__ __forceinline__ void solve_apply(const solve_shared<D> &shared,
                                                   const typename solve_shared<D>::rows &rows,
                                                   const split_tile<2> (&inner)[CHUNK_TILES][D / SPLIT_TILE],
                                                   const split_tile<2> (&w)[CHUNK_TILES][D / SPLIT_TILE], int32_t warp,
                                                   int32_t lane, split_block (&y)[D / SPLIT_TILE]) {
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        const float2 two = *(const float2 *)&rows[token][column];
        y[n].v[half][2 * r] = two.x, y[n].v[half][2 * r + 1] = two.y;
    });
    split_powers powers, inside_powers;
    split_left<2> left[D / SPLIT_TILE], inside[CHUNK_TILES];
    split_strip(y, powers, left);
    split_block product[CHUNK_TILES] = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        if (n > warp)
            continue;
        split_sum<2> sum = {};
#pragma unroll
        for (int d = 0; d < D / SPLIT_TILE; d++)
            solve_multiply<COARSELY>(sum, left[d], split_load_right(inner[n][d], lane));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                product[n].v[half][i] =
                    split_total(sum, half, i) * powers.row[i / 2].inverse *
                    shared.pair[warp * SPLIT_TILE + split_row(lane, i)][n * SPLIT_TILE + split_column(lane, half, i)];
    }
    split_strip(product, inside_powers, inside);
    float start[2];
    for (int r = 0; r < 2; r++)
        start[r] = powers.row[r].inverse * shared.start[warp * SPLIT_TILE + split_row(lane, 2 * r)];
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++) {
        split_sum<2> before = {}, within = {};
#pragma unroll
        for (int d = 0; d < D / SPLIT_TILE; d++)
            solve_multiply<COARSELY>(before, left[d], split_load_right(shared.state[n][d], lane));
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++)
            if (tile <= warp)
                solve_multiply<COARSELY>(within, inside[tile], split_load_turned(w[tile][n], lane));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[n].v[half][i] = fmaf(split_total(before, half, i) *
                                           shared.state_inverse[n * SPLIT_TILE + split_column(lane, half, i)],
                                       start[i / 2], split_total(within, half, i) * inside_powers.row[i / 2].inverse);
    }
}

// A lane's two tokens.
struct solve_lane {
    float rhs[2], residual[2], stop[2];
    int32_t steps[2];
    uint16_t flags[2];
    bool going[2];
};

// r = q - A x, p = r; in mode FIXED x is zero.
template <int D, bool COARSELY>
static __device__ void solve_open(const mesa &a, const kern_solver &solver, const kern_chunk &chunk, int32_t head,
                                  int32_t warp, int32_t lane, solve_shared<D> &shared, solve_lane &state) {
    split_block ax[D / SPLIT_TILE] = {};
    float square[2] = {0, 0}, rhs[2] = {0, 0};
    if (solver.mode != KERN_SOLVE_FIXED)
        solve_apply<D, COARSELY>(shared, shared.x, shared.keys, shared.keys, warp, lane, ax);
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        float2 q = make_float2(0, 0);
        if (token < chunk.length)
            q = *(const float2 *)&a.q[((int64_t)(chunk.token0 + token) * a.heads + head) * D + column];
        float2 left;
        const float2 x = *(const float2 *)&shared.x[token][column];
        left.x = q.x - fmaf(shared.lambda[column], x.x, ax[n].v[half][2 * r]);
        left.y = q.y - fmaf(shared.lambda[column + 1], x.y, ax[n].v[half][2 * r + 1]);
        *(float2 *)&shared.r[token][column] = left;
        *(float2 *)&shared.p[token][column] = left;
        rhs[r] = fmaf(q.x, q.x, fmaf(q.y, q.y, rhs[r]));
        square[r] = fmaf(left.x, left.x, fmaf(left.y, left.y, square[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        state.rhs[r] = solve_over_row(rhs[r]);
        state.residual[r] = solve_over_row(square[r]);
        state.stop[r] = solver.mode == KERN_SOLVE_FIXED ? -1 : mesa_threshold(solver, state.rhs[r], state.residual[r]);
        state.steps[r] = 0;
        state.flags[r] = 0;
        const bool above = state.rhs[r] != 0 && !(state.residual[r] <= state.stop[r]);
        state.going[r] = above && solver.max_steps > 0;
        if (above && !state.going[r] && solver.mode == KERN_SOLVE_TOLERANCE)
            state.flags[r] = KERN_REPORT_UNCONVERGED;
        if (state.rhs[r] == 0)
            state.residual[r] = 0;
    }
}

// One step of the tokens that are going; ap is A p.
template <int D>
static __device__ __forceinline__ void solve_step(const kern_solver &solver, const split_block (&ap)[D / SPLIT_TILE],
                                                  int32_t warp, int32_t lane, solve_shared<D> &shared,
                                                  solve_lane &state) {
    const bool fixed = solver.mode == KERN_SOLVE_FIXED;
    const float epsilon = fixed ? 1e-5f : 0;
    float curvature[2] = {0, 0}, square[2] = {0, 0}, length[2], keep[2];
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        const float2 p = *(const float2 *)&shared.p[token][column];
        curvature[r] = fmaf(p.x, ap[n].v[half][2 * r], fmaf(p.y, ap[n].v[half][2 * r + 1], curvature[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        curvature[r] = solve_over_row(curvature[r]);
        length[r] = state.residual[r] / (curvature[r] + epsilon);
        if (state.going[r] && ((!(curvature[r] > 0) && !fixed) || !isfinite(curvature[r]) || !isfinite(length[r]))) {
            state.going[r] = false;
            state.flags[r] |= KERN_REPORT_BREAKDOWN;
        }
    }
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        if (!state.going[r])
            return;
        const float2 p = *(const float2 *)&shared.p[token][column];
        float2 x = *(const float2 *)&shared.x[token][column], left = *(const float2 *)&shared.r[token][column];
        x.x = fmaf(length[r], p.x, x.x), x.y = fmaf(length[r], p.y, x.y);
        left.x = fmaf(-length[r], ap[n].v[half][2 * r], left.x);
        left.y = fmaf(-length[r], ap[n].v[half][2 * r + 1], left.y);
        *(float2 *)&shared.x[token][column] = x;
        *(float2 *)&shared.r[token][column] = left;
        square[r] = fmaf(left.x, left.x, fmaf(left.y, left.y, square[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float residual = solve_over_row(square[r]);
        keep[r] = residual / (state.residual[r] + epsilon);
        if (!state.going[r])
            continue;
        state.residual[r] = residual;
        state.steps[r]++;
        const bool above = !(residual <= state.stop[r]);
        if (above && state.steps[r] >= solver.max_steps && solver.mode == KERN_SOLVE_TOLERANCE)
            state.flags[r] |= KERN_REPORT_UNCONVERGED;
        state.going[r] = above && state.steps[r] < solver.max_steps;
    }
    solve_each_pair<D>(warp, lane, [&](int, int, int r, int32_t token, int32_t column) {
        if (!state.going[r])
            return;
        float2 p = *(const float2 *)&shared.p[token][column];
        const float2 left = *(const float2 *)&shared.r[token][column];
        p.x = fmaf(keep[r], p.x, left.x), p.y = fmaf(keep[r], p.y, left.y);
        *(float2 *)&shared.p[token][column] = p;
    });
}

template <int D, bool COARSELY>
static __device__ void solve_all(const mesa &a, const kern_solver &solver, const kern_chunk &chunk, int32_t head,
                                 int32_t warp, int32_t lane, solve_shared<D> &shared) {
    solve_lane state;
    solve_open<D, COARSELY>(a, solver, chunk, head, warp, lane, shared, state);
    while (__any_sync(~0u, state.going[0] || state.going[1])) {
        split_block ap[D / SPLIT_TILE];
        solve_apply<D, COARSELY>(shared, shared.p, shared.keys, shared.keys, warp, lane, ap);
        solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
            const float2 p = *(const float2 *)&shared.p[token][column];
            ap[n].v[half][2 * r] = fmaf(shared.lambda[column], p.x, ap[n].v[half][2 * r]);
            ap[n].v[half][2 * r + 1] = fmaf(shared.lambda[column + 1], p.y, ap[n].v[half][2 * r + 1]);
        });
        solve_step<D>(solver, ap, warp, lane, shared, state);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = warp * SPLIT_TILE + split_row(lane, 2 * r);
        if (lane % 4 != 0 || token >= chunk.length)
            continue;
        const float residual = state.rhs[r] == 0 ? 0 : sqrtf(state.residual[r] / state.rhs[r]);
        const kern_solve_report report = {(uint16_t)state.steps[r], state.flags[r], residual};
        mesa_tell(a, (int64_t)(chunk.token0 + token) * a.heads + head, report);
    }
}

// ------------------------------------------------------------------------------------------------------ its beginning

// K or V as operand: two threads a token.
template <int D>
static __device__ __forceinline__ void solve_put_rows(split_tile<2> (&tiles)[CHUNK_TILES][D / SPLIT_TILE],
                                                      float *inverse, int32_t length, const float *from,
                                                      int64_t stride) {
    constexpr int PARTS = SOLVE_THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const float got = chunk_put_row<D, PARTS>(tiles[token / SPLIT_TILE], token % SPLIT_TILE, part, [&](int32_t column) {
        return cuda_load(from + token * stride + column, token < length ? 4 : 0, true);
    });
    if (part == 0)
        inverse[token] = got;
}

// inner, outer: of the operands on both sides.
template <int D>
static __device__ __forceinline__ void solve_put_pairs(solve_shared<D> &shared, int32_t length, const float *inner,
                                                       const float *outer) {
    for (int32_t at = threadIdx.x; at < CHUNK * CHUNK; at += SOLVE_THREADS) {
        const int32_t i = at / CHUNK, j = at % CHUNK;
        shared.pair[i][j] = chunk_pair(shared.decay, length, i, j) * shared.beta[j] * inner[j] * outer[j];
    }
}

// x0 = q / diag(Hk + Lambda), or zeros; a thread has a column.
template <int D>
static __device__ __forceinline__ void solve_put_start(const mesa &a, const kern_solver &solver,
                                                       const kern_chunk &chunk, int64_t at, float diagonal,
                                                       solve_shared<D> &shared) {
    const int32_t column = threadIdx.x;
    for (int32_t t = 0; t < CHUNK; t++) {
        float x = 0;
        if (t < chunk.length && solver.mode != KERN_SOLVE_FIXED) {
            const int64_t place = (at + t * a.heads) * D + column;
            const float k = a.k[place],
                        gamma = t == 0 ? shared.start[0] : chunk_pair(shared.decay, chunk.length, t, t - 1);
            diagonal = fmaf(diagonal, gamma, k * (shared.beta[t] * k));
            x = a.q[place] / (diagonal + shared.lambda[column]);
        }
        shared.x[t][column] = x;
    }
}

// Decays, keys and factors of a chunk; ends with a barrier.
template <int D>
static __device__ __forceinline__ void solve_begin_chunk(const cuda_table *table, const mesa &a,
                                                         const kern_chunk &chunk, int32_t head,
                                                         solve_shared<D> &shared) {
    const int64_t at = (int64_t)chunk.token0 * a.heads + head;
    if (threadIdx.x < CUDA_WARP)
        chunk_sum_decays(table, chunk, shared.decay, [&](int32_t i) { return a.g[at + i * a.heads]; });
    solve_put_rows<D>(shared.keys, shared.key_inverse, chunk.length, a.k + at * D, (int64_t)a.heads * D);
    for (int32_t i = threadIdx.x; i < CHUNK; i += SOLVE_THREADS)
        shared.beta[i] = i < chunk.length ? a.beta[at + i * a.heads] : 0;
    for (int32_t i = threadIdx.x; i < D; i += SOLVE_THREADS)
        shared.lambda[i] = mesa_lambda_of(a, a.lambda_params[head * D + i]);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < CHUNK; i += SOLVE_THREADS)
        shared.start[i] = chunk_from_start(shared.decay, chunk.length, i);
    __syncthreads();
}

template <int D>
static __device__ __forceinline__ void solve_tokens(const mesa &a, const kern_solver &solver, const kern_chunk &chunk,
                                                    int32_t head, int32_t warp, int32_t lane, solve_shared<D> &shared) {
    if (solver.mode == KERN_SOLVE_TOLERANCE && solver.tolerance >= SOLVE_COARSE)
        solve_all<D, true>(a, solver, chunk, head, warp, lane, shared);
    else
        solve_all<D, false>(a, solver, chunk, head, warp, lane, shared);
}

#endif

#endif

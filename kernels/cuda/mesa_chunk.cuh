// SPDX-License-Identifier: Apache-2.0
// The solves of a chunk of a Mesa head by a warpgroup, a warp 16 of its tokens, a lane two of them (mesa_chunk.cu):
// what forward and backward share.
//
// Directions p are kept as operands, LIMBS float16 a number under a power of two for each token, and are what is
// rounded: x and r move along the very numbers that A was applied to, so that rounding turns a direction a little and
// parts no residual from its x. The power is that of a bound of |p|, |r| + keep |p before|, which costs no pass.
//
// All sums of a product share one accumulator: its unit is the token's power times `unit`, 2^-24 of the powers of both
// operands that the tokens of the chunk are, so that a pair's weight fits a float16 whatever the keys are.
//
// One limb serves where the device is `fast`, and rows that are solved coarsely (cuda_solve_coarse): what that leaves
// out of the operator, 2^-11, is small against the residual that they stop at.
#ifndef KERNELS_CUDA_MESA_CHUNK_CUH
#define KERNELS_CUDA_MESA_CHUNK_CUH

#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/mesa.cuh"
#include "kernels/cuda/split_matrix.cuh"

constexpr int SOLVE_THREADS = CHUNK / SPLIT_TILE * CUDA_WARP;
constexpr float SOLVE_LEAST = 0x1p-24f; // magnitude below which the largest number of a chunk raises its power no more
constexpr float SOLVE_ROOM = 0x1p-24f;  // so that products times weights up to 4 fit a float16

// Whether a launch with so many limbs has the row's solves; fast: one limb has all.
static __device__ __forceinline__ bool solve_has(const kern_solver &solver, int limbs, bool fast) {
    return solver.mode != KERN_SOLVE_EXACT && (fast || cuda_solve_coarse(solver) == (limbs == 1));
}

// A lane's sums: of tile n, half h, those of both of its tokens.
template <int D, int LIMBS> struct alignas(128) solve_shared {
    static constexpr int PAD = 4; // eight columns of a token in other banks than the next eight

    split_matrix<LIMBS, D, D> state; // rows for columns of the product
    split_matrix<LIMBS, CHUNK, D> keys;
    union {
        float4 x[D / 8][SOLVE_THREADS + PAD];
        split_matrix<LIMBS, CHUNK, D> values;
    };
    float4 pair[CHUNK / 8][SOLVE_THREADS]; // E_ij beta_j times SOLVE_ROOM
    chunk_decay decay;
    float scale[D], lambda[D]; // unit over the power of a column of the state; unit times Lambda
    float beta[CHUNK], start[CHUNK], decay_of[CHUNK], largest[2][SOLVE_THREADS / CUDA_WARP];
    cuda_mbarrier came;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int D> using solve_sums = split_block[D / SPLIT_TILE];
template <int D, int LIMBS> using solve_limbs = split_left<LIMBS>[D / SPLIT_TILE];

struct solve_unit {
    float unit, inverse;
};
static __device__ __forceinline__ solve_unit solve_unit_of(const split_power &inner, const split_power &outer) {
    return {inner.scale * outer.scale * SOLVE_ROOM, inner.inverse * outer.inverse / SOLVE_ROOM};
}

static __device__ __forceinline__ int32_t solve_token(int r) {
    return threadIdx.x / CUDA_WARP * SPLIT_TILE + split_row(threadIdx.x % CUDA_WARP, 2 * r);
}

// A lane's pairs of columns in its two rows: use(tile, half, row of two, token, column).
template <int D, typename Use> static __device__ __forceinline__ void solve_each_pair(Use use) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                use(n, half, r, solve_token(r), n * SPLIT_TILE + split_column(threadIdx.x % CUDA_WARP, half, 0));
}

static __device__ __forceinline__ float solve_over_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <int LIMBS> static __device__ __forceinline__ float2 solve_value(const split_left<LIMBS> &a, int half, int r) {
    float2 x = mma_floats(a.limb[0][2 * half + r]);
    if constexpr (LIMBS == 2) {
        const float2 low = mma_floats(a.limb[1][2 * half + r]);
        x.x += low.x, x.y += low.y;
    }
    return x;
}

template <int D, int LIMBS>
static __device__ __forceinline__ void solve_load_x(const solve_shared<D, LIMBS> &shared, solve_sums<D> &x) {
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        const float4 four = shared.x[j][threadIdx.x];
        float *v = x[j / 2].v[j % 2];
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
}

// ------------------------------------------------------------------------------------------------------- the operator

// sum += a b^T, all rows of b, or a b (TURNED): the small products of two limbs first, as what is added to a large sum
// is cut off at 24 bits of it.
template <bool TURNED, int LIMBS, int K_TILES, int TILES, typename Matrix>
static __device__ __forceinline__ void solve_multiply(split_block (&sum)[TILES], const split_left<LIMBS> (&a)[K_TILES],
                                                      const Matrix &b) {
    constexpr uint32_t CORE = 8 * sizeof(uint4), COLUMNS = SPLIT_TILE * (TURNED ? K_TILES : TILES) * sizeof(uint4);
#pragma unroll
    for (int part = 2 * LIMBS - 2; part >= 0; part--) {
        const cuda_wgmma_operand operand(b.limb[part == 2], TURNED ? COLUMNS : CORE, TURNED ? CORE : COLUMNS);
#pragma unroll
        for (int k = 0; k < K_TILES; k++)
            cuda_wgmma_half<TURNED>((float(&)[8 * TILES]) sum, a[k].limb[part == 1],
                                    operand.at(k * 2 * (TURNED ? CORE : COLUMNS)));
    }
}
template <int LIMBS, int N> static __device__ __forceinline__ void solve_hold(split_left<LIMBS> (&a)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4 * LIMBS; i++)
            cuda_wgmma_hold(a[n].limb[i / 4][i % 4]);
}

// y = (e^c * P) H + ((P J^T) * pair) W for a lane's rows of P, in its unit; J and W: keys or values.
template <int D, int LIMBS>
static __device__ __forceinline__ void
solve_apply(const solve_shared<D, LIMBS> &shared, const split_matrix<LIMBS, CHUNK, D> &inner,
            const split_matrix<LIMBS, CHUNK, D> &outer, solve_limbs<D, LIMBS> &p, solve_sums<D> &y) {
    split_block product[CHUNK_TILES] = {};
    split_left<LIMBS> inside[CHUNK_TILES];
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        y[n] = {};
    cuda_wgmma_begin();
    solve_multiply<false>(product, p, inner);
    cuda_wgmma_commit();
    solve_multiply<false>(y, p, shared.state);
    cuda_wgmma_commit();
    cuda_wgmma_wait<1>();
    split_group_hold(product);
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) {
        const float4 pair = shared.pair[j][threadIdx.x];
        const float *v = product[j / 2].v[j % 2];
        split_pair<LIMBS>(v[0] * pair.x, v[1] * pair.y,
                          [&](int limb, uint32_t two) { inside[j / 2].limb[limb][j % 2 * 2] = two; });
        split_pair<LIMBS>(v[2] * pair.z, v[3] * pair.w,
                          [&](int limb, uint32_t two) { inside[j / 2].limb[limb][j % 2 * 2 + 1] = two; });
    }
    cuda_wgmma_wait<0>();
    split_group_hold(y);
    solve_hold(p);
    const float start[2] = {shared.start[solve_token(0)], shared.start[solve_token(1)]};
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t column) {
        const float2 scale = *(const float2 *)&shared.scale[column];
        y[n].v[half][2 * r] *= scale.x * start[r];
        y[n].v[half][2 * r + 1] *= scale.y * start[r];
    });
    cuda_wgmma_begin();
    solve_multiply<true>(y, inside, outer);
    cuda_wgmma_commit();
    cuda_wgmma_wait<0>();
    split_group_hold(y);
    solve_hold(inside);
}

// --------------------------------------------------------------------------------------------------------- the solver

// A lane's two tokens. Those that stand still have directions of 0.
template <int D, int LIMBS> struct solve_lane {
    solve_sums<D> r;
    solve_limbs<D, LIMBS> p;
    split_powers powers;
    float rhs[2], residual[2], stop[2], bound[2];
    int32_t steps[2];
    uint16_t flags[2];
    bool going[2];
};

// p = r + keep p, bound: of its length.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_turn(solve_lane<D, LIMBS> &lane, const float (&keep)[2]) {
    float kept[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        kept[r] = keep[r] * lane.powers.row[r].inverse;
        const float residual = lane.residual[r], norm = residual > 0 ? residual * rsqrtf(residual) : 0;
        lane.bound[r] = fmaf(keep[r], lane.bound[r], norm);
        lane.powers.row[r] = split_power_of(lane.bound[r]);
    }
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t) {
        const float2 p = solve_value(lane.p[n], half, r);
        const float scale = lane.powers.row[r].scale, *left = &lane.r[n].v[half][2 * r];
        split_pair<LIMBS>(
            fmaf(kept[r], p.x, left[0]) * scale, fmaf(kept[r], p.y, left[1]) * scale,
            [&](int limb, uint32_t pair) { lane.p[n].limb[limb][2 * half + r] = lane.going[r] ? pair : 0; });
    });
}

// x as operand, in x's place too; y = A x.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_apply_to_x(solve_shared<D, LIMBS> &shared, solve_lane<D, LIMBS> &lane,
                                                        float inverse, solve_sums<D> &y) {
    solve_load_x(shared, y);
    split_strip(y, lane.powers, lane.p);
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t) {
        const float2 x = solve_value(lane.p[n], half, r);
        const float back = lane.powers.row[r].inverse;
        ((float2 *)&shared.x[2 * n + half][threadIdx.x])[r] = make_float2(x.x * back, x.y * back);
    });
    solve_apply(shared, shared.keys, shared.keys, lane.p, y);
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t column) {
        const float2 x = solve_value(lane.p[n], half, r), lambda = *(const float2 *)&shared.lambda[column];
        const float back = lane.powers.row[r].inverse;
        float *v = &y[n].v[half][2 * r];
        v[0] = fmaf(lambda.x, x.x, v[0]) * inverse * back;
        v[1] = fmaf(lambda.y, x.y, v[1]) * inverse * back;
    });
}

// r = q - A x, p = r; in mode FIXED x is zero.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_open(const mesa &a, const kern_solver &solver, const kern_chunk &chunk,
                                                  int32_t head, float inverse, solve_shared<D, LIMBS> &shared,
                                                  solve_lane<D, LIMBS> &lane, solve_sums<D> &y) {
    const bool fixed = solver.mode == KERN_SOLVE_FIXED;
    float square[2] = {0, 0}, rhs[2] = {0, 0};
    const float nothing[2] = {0, 0};
    if (!fixed)
        solve_apply_to_x(shared, lane, inverse, y);
    solve_each_pair<D>([&](int n, int half, int r, int32_t token, int32_t column) {
        float2 q = make_float2(0, 0);
        if (token < chunk.length)
            q = *(const float2 *)&a.q[((int64_t)(chunk.token0 + token) * a.heads + head) * D + column];
        float *left = &lane.r[n].v[half][2 * r];
        left[0] = fixed ? q.x : q.x - y[n].v[half][2 * r];
        left[1] = fixed ? q.y : q.y - y[n].v[half][2 * r + 1];
        rhs[r] = fmaf(q.x, q.x, fmaf(q.y, q.y, rhs[r]));
        square[r] = fmaf(left[0], left[0], fmaf(left[1], left[1], square[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        lane.rhs[r] = solve_over_row(rhs[r]);
        lane.residual[r] = solve_over_row(square[r]);
        lane.stop[r] = fixed ? -1 : mesa_threshold(solver, lane.rhs[r], lane.residual[r]);
        lane.steps[r] = 0;
        lane.flags[r] = 0;
        const bool above = lane.rhs[r] != 0 && !(lane.residual[r] <= lane.stop[r]);
        lane.going[r] = above && solver.max_steps > 0;
        if (above && !lane.going[r] && solver.mode == KERN_SOLVE_TOLERANCE)
            lane.flags[r] = KERN_REPORT_UNCONVERGED;
        if (lane.rhs[r] == 0)
            lane.residual[r] = 0;
        lane.bound[r] = lane.powers.row[r].inverse = 0;
    }
    if (fixed)
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
            lane.p[n] = {};
    solve_turn(lane, nothing);
}

// How far the tokens go; y = A p, without Lambda p at first.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_lengths(const kern_solver &solver, float inverse,
                                                     const solve_shared<D, LIMBS> &shared, solve_lane<D, LIMBS> &lane,
                                                     solve_sums<D> &y, float (&length)[2]) {
    const bool fixed = solver.mode == KERN_SOLVE_FIXED;
    float curvature[2] = {0, 0};
    solve_each_pair<D>([&](int n, int half, int r, int32_t, int32_t column) {
        const float2 p = solve_value(lane.p[n], half, r), lambda = *(const float2 *)&shared.lambda[column];
        float *v = &y[n].v[half][2 * r];
        v[0] = fmaf(lambda.x, p.x, v[0]);
        v[1] = fmaf(lambda.y, p.y, v[1]);
        curvature[r] = fmaf(p.x, v[0], fmaf(p.y, v[1], curvature[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float back = lane.powers.row[r].inverse, all = solve_over_row(curvature[r]) * inverse * back * back;
        length[r] = __fdividef(lane.residual[r], all + (fixed ? 1e-5f : 0));
        if (lane.going[r] && ((!(all > 0) && !fixed) || !isfinite(all) || !isfinite(length[r]))) {
            lane.going[r] = false;
            lane.flags[r] |= KERN_REPORT_BREAKDOWN;
        }
        length[r] = lane.going[r] ? length[r] * back : 0;
    }
}

// One step of the tokens that are going; y = A p, without Lambda p.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_step(const kern_solver &solver, float inverse,
                                                  solve_shared<D, LIMBS> &shared, solve_lane<D, LIMBS> &lane,
                                                  solve_sums<D> &y) {
    float square[2] = {0, 0}, length[2], down[2], keep[2];
    solve_lengths(solver, inverse, shared, lane, y, length);
    for (int r = 0; r < 2; r++)
        down[r] = -length[r] * inverse;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        float4 x = shared.x[j][threadIdx.x];
        const float2 first = solve_value(lane.p[j / 2], j % 2, 0), second = solve_value(lane.p[j / 2], j % 2, 1);
        x.x = fmaf(length[0], first.x, x.x), x.y = fmaf(length[0], first.y, x.y);
        x.z = fmaf(length[1], second.x, x.z), x.w = fmaf(length[1], second.y, x.w);
        shared.x[j][threadIdx.x] = x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &left = lane.r[j / 2].v[j % 2][i];
            left = fmaf(down[i / 2], y[j / 2].v[j % 2][i], left);
            square[i / 2] = fmaf(left, left, square[i / 2]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float residual = solve_over_row(square[r]);
        keep[r] = __fdividef(residual, lane.residual[r] + (solver.mode == KERN_SOLVE_FIXED ? 1e-5f : 0));
        if (!lane.going[r])
            continue;
        lane.residual[r] = residual;
        lane.steps[r]++;
        const bool above = !(residual <= lane.stop[r]);
        if (above && lane.steps[r] >= solver.max_steps && solver.mode == KERN_SOLVE_TOLERANCE)
            lane.flags[r] |= KERN_REPORT_UNCONVERGED;
        lane.going[r] = above && lane.steps[r] < solver.max_steps;
    }
    solve_turn(lane, keep);
}

// From what stands in x, which becomes the solutions. inverse: of the unit.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_tokens(const mesa &a, const kern_solver &solver, const kern_chunk &chunk,
                                                    int32_t head, float inverse, solve_shared<D, LIMBS> &shared) {
    solve_lane<D, LIMBS> lane;
    solve_sums<D> y;
    solve_open(a, solver, chunk, head, inverse, shared, lane, y);
    while (__syncthreads_or(lane.going[0] || lane.going[1])) {
        solve_apply(shared, shared.keys, shared.keys, lane.p, y);
        solve_step(solver, inverse, shared, lane, y);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = solve_token(r);
        if (threadIdx.x % 4 != 0 || token >= chunk.length)
            continue;
        const float residual = lane.rhs[r] == 0 ? 0 : sqrtf(lane.residual[r] / lane.rhs[r]);
        const kern_solve_report report = {(uint16_t)lane.steps[r], lane.flags[r], residual};
        mesa_tell(a, (int64_t)(chunk.token0 + token) * a.heads + head, report);
    }
}

// ------------------------------------------------------------------------------------------------------ its beginning

// Four numbers, already scaled, in columns 4 c .. 4 c + 3.
template <typename Matrix>
static __device__ __forceinline__ void solve_put_quad(Matrix &m, int32_t row, int32_t c, const cuda_quad &x) {
    uint2 word[Matrix::LIMBS];
    split_pair<Matrix::LIMBS>(x.v[0], x.v[1], [&](int limb, uint32_t pair) { word[limb].x = pair; });
    split_pair<Matrix::LIMBS>(x.v[2], x.v[3], [&](int limb, uint32_t pair) { word[limb].y = pair; });
#pragma unroll
    for (int limb = 0; limb < Matrix::LIMBS; limb++)
        ((uint2 *)&m.limb[limb][Matrix::run(row, c / 2)])[c % 2] = word[limb];
}
static __device__ __forceinline__ cuda_quad solve_scaled(cuda_quad x, float scale) {
#pragma unroll
    for (int e = 0; e < 4; e++)
        x.v[e] *= scale;
    return x;
}
static __device__ __forceinline__ float solve_largest(float largest, const cuda_quad &x) {
#pragma unroll
    for (int e = 0; e < 4; e++)
        largest = fmaxf(largest, fabsf(x.v[e]));
    return largest;
}

// K or V as operand under one power, by the block, which passes a barrier. place: of two, in turns. meanwhile(): while
// the numbers are on their way.
template <int D, int LIMBS, typename Meanwhile>
static __device__ __forceinline__ split_power solve_put_rows(solve_shared<D, LIMBS> &shared, int place,
                                                             split_matrix<LIMBS, CHUNK, D> &to, int32_t length,
                                                             const float *from, int64_t stride, Meanwhile meanwhile) {
    constexpr int WARPS = SOLVE_THREADS / CUDA_WARP, GROUPS = CHUNK / 8 / WARPS, QUADS = D / SPLIT_TILE;
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    cuda_quad x[GROUPS][QUADS];
    float largest = SOLVE_LEAST;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
            const int32_t token = (g * WARPS + warp) * 8 + lane % 8;
            x[g][n] = cuda_load(from + token * stride + 16 * n + lane / 8 * 4, token < length ? 4 : 0, true);
        }
    meanwhile();
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int n = 0; n < QUADS; n++)
            largest = solve_largest(largest, x[g][n]);
    largest = cuda_warp_max(largest);
    if (lane == 0)
        shared.largest[place][warp] = largest;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < WARPS; n++)
        largest = fmaxf(largest, shared.largest[place][n]);
    const split_power power = split_power_of(largest);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int n = 0; n < QUADS; n++)
            solve_put_quad(to, (g * WARPS + warp) * 8 + lane % 8, 4 * n + lane / 8, solve_scaled(x[g][n], power.scale));
    return power;
}

// Decays and beta of a chunk; a barrier follows, then solve_put_decays.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_begin_chunk(const cuda_table *table, const mesa &a,
                                                         const kern_chunk &chunk, int32_t head,
                                                         solve_shared<D, LIMBS> &shared) {
    const int64_t at = (int64_t)chunk.token0 * a.heads + head;
    if (threadIdx.x < CUDA_WARP)
        chunk_sum_decays(table, chunk, shared.decay, [&](int32_t i) { return a.g[at + i * a.heads]; });
    else if (threadIdx.x >= CHUNK) {
        const int32_t i = threadIdx.x - CHUNK;
        shared.beta[i] = i < chunk.length ? a.beta[at + i * a.heads] : 0;
    }
}
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_put_decays(const kern_chunk &chunk, solve_shared<D, LIMBS> &shared) {
    if (threadIdx.x < CHUNK) {
        const int32_t i = threadIdx.x;
        shared.start[i] = chunk_from_start(shared.decay, chunk.length, i);
        shared.decay_of[i] = i == 0 ? shared.start[0] : chunk_pair(shared.decay, chunk.length, i, i - 1);
    }
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++) {
        float pair[4] = {0, 0, 0, 0};
        if (j / 2 <= threadIdx.x / CUDA_WARP)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t other = j / 2 * SPLIT_TILE + split_column(threadIdx.x % CUDA_WARP, j % 2, i);
                pair[i] =
                    chunk_pair(shared.decay, chunk.length, solve_token(i / 2), other) * shared.beta[other] * SOLVE_ROOM;
            }
        shared.pair[j][threadIdx.x] = make_float4(pair[0], pair[1], pair[2], pair[3]);
    }
}

// Of a state whose columns have these inverse powers.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_put_scales(const float *state_inverse, const solve_unit &unit,
                                                        solve_shared<D, LIMBS> &shared) {
    if (threadIdx.x < D)
        shared.scale[threadIdx.x] = state_inverse[threadIdx.x] * unit.unit;
}
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_put_lambda(const mesa &a, int32_t head, const solve_unit &unit,
                                                        solve_shared<D, LIMBS> &shared) {
    if (threadIdx.x < D)
        shared.lambda[threadIdx.x] = mesa_lambda_of(a, a.lambda_params[head * D + threadIdx.x]) * unit.unit;
}

// x0 = q / diag(Hk + Lambda), or zeros; a thread has a column.
template <int D, int LIMBS>
static __device__ __forceinline__ void solve_put_start(const mesa &a, const kern_solver &solver,
                                                       const kern_chunk &chunk, int32_t head, float diagonal,
                                                       solve_shared<D, LIMBS> &shared) {
    constexpr int AHEAD = 32; // loads of each under way
    const int32_t column = threadIdx.x;
    if (column >= D)
        return;
    const int64_t at = ((int64_t)chunk.token0 * a.heads + head) * D + column, stride = (int64_t)a.heads * D;
    const float lambda = mesa_lambda_of(a, a.lambda_params[head * D + column]);
    float *to = &((float *)&shared.x[column / 8][column % 8 / 2])[column % 2];
#pragma unroll 1
    for (int32_t t0 = 0; t0 < CHUNK; t0 += AHEAD) {
        float k[AHEAD], q[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int64_t place = at + min(t0 + i, chunk.length - 1) * stride;
            k[i] = a.k[place];
            q[i] = a.q[place];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int32_t t = t0 + i, lane = t / SPLIT_TILE * CUDA_WARP + t % 8 * 4;
            const bool there = t < chunk.length && solver.mode != KERN_SOLVE_FIXED;
            diagonal = fmaf(diagonal, shared.decay_of[t], k[i] * (shared.beta[t] * k[i]));
            to[lane * 4 + t / 8 % 2 * 2] = there ? __fdividef(q[i], diagonal + lambda) : 0;
        }
    }
}

#endif

#endif

// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's chunk form on the tensor cores (sm_90), D = V of 64 or 128: what prompt rows run.
//
//   (Hk_t + Lambda) x_t = q_t      o_t = Hv_t^T x_t      H_t = e^(c_t) H + sum_j E_tj beta_j k_j [k_j | v_j]^T
//
// states_kernel: a block has Hk or Hv of a head of a row, a warp 16 columns, transposed, in registers from the row's
// first chunk to its last; it leaves each state that a chunk begins with as operand (a record). solve_kernel: a block
// has a chunk of a head, a warp 16 of its tokens. With P the tokens' directions
//   A(P) = (e^c * P) Hk + ((P K^T) * E beta) K + P Lambda
// conjugate gradients need nothing of other warps: all products have the warp's rows on the left, dot products are sums
// over the four lanes of a row. A token stops by itself (mesa_solve.cuh), a warp with its last token.
//
// To Hk both sides of k_j k_j^T go as the same rounded numbers, so it keeps its symmetry bit for bit. Exact solves are
// left to mesa.cu. Groups of chunks as in recurrence_chunk.cu; numbers are those of split.cuh. A row whose tolerance is
// above COARSE multiplies high halves alone while it iterates: what that leaves out of the operator, 2^-11, is small
// against the residual that it stops at.
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/mesa.cuh"

constexpr int SOLVE_THREADS = CHUNK / SPLIT_TILE * CUDA_WARP;
constexpr size_t RECORDS_BYTES = (size_t)288 << 20;

// What a chunk of a head begins with. Rows of tiles are columns of Hk and Hv, columns of tiles their rows.
template <int D> struct alignas(128) mesa_record {
    split_tile hk[D / SPLIT_TILE][D / SPLIT_TILE], hv[D / SPLIT_TILE][D / SPLIT_TILE];
    float hk_inverse[D], hv_inverse[D], diagonal[D]; // of Hk
};

struct mesa_group {
    mesa a;
    int32_t first, count; // chunks
    char *records;        // (count, heads)
    float *carry;         // (heads, [Hk, Hv])
};

static __device__ __forceinline__ bool solved_elsewhere(const kern_row &row) {
    return row.solver.mode == KERN_SOLVE_EXACT;
}

// ----------------------------------------------------------------------------------------------------------- the
// states

template <int D> struct alignas(128) states_shared {
    split_tile keys[CHUNK_TILES][D / SPLIT_TILE];
    chunk_decay decay;
    float root[CHUNK]; // sqrt(beta e^(c_C - c)): on both sides
    float largest[D / SPLIT_TILE];
};

// Keys times their roots as operand, by the block, under one power.
template <int D>
static __device__ __forceinline__ split_power put_keys(states_shared<D> &shared, const float *k, int64_t stride,
                                                       int32_t length) {
    constexpr int PARTS = 2 * D / CHUNK, RUNS = D / 8 / PARTS;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    cuda_quad x[RUNS][2];
    float largest = 0;
#pragma unroll
    for (int n = 0; n < RUNS; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[n][i] = cuda_load(k + token * stride + (n * PARTS + part) * 8 + 4 * i, token < length ? 4 : 0, true);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                x[n][i].v[e] = __fmul_rn(x[n][i].v[e], shared.root[token]);
                largest = fmaxf(largest, fabsf(x[n][i].v[e]));
            }
        }
    largest = cuda_warp_max(largest);
    if (threadIdx.x % CUDA_WARP == 0)
        shared.largest[threadIdx.x / CUDA_WARP] = largest;
    __syncthreads();
    for (int n = 0; n < D / SPLIT_TILE; n++)
        largest = fmaxf(largest, shared.largest[n]);
    const split_power power = split_power_of(largest);
#pragma unroll
    for (int n = 0; n < RUNS; n++) {
        const int32_t run = n * PARTS + part;
        float scaled[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            scaled[e] = x[n][e / 4].v[e % 4] * power.scale;
        split_put_run(shared.keys[token / SPLIT_TILE][run / 2], token % SPLIT_TILE, run % 2, scaled);
    }
    return power;
}

// Columns of [K | V] times the tokens' roots, transposed.
static __device__ __forceinline__ void load_columns(const float *from, int64_t stride, int32_t length,
                                                    const float *root, int32_t column, int32_t lane,
                                                    split_block (&x)[CHUNK_TILES]) {
    int32_t token = split_column(lane, 0, 0);
    from += token * stride + column + split_row(lane, 0);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++, token += 8, from += 8 * stride)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    x[n].v[half][2 * r + c] =
                        token + c < length ? __fmul_rn(from[c * stride + 8 * r], root[token + c]) : 0;
}

// A warp's columns of a state into a record.
template <int D>
static __device__ __forceinline__ void keep_state(const split_block (&s)[D / SPLIT_TILE], mesa_record<D> &record,
                                                  bool values, int32_t warp, int32_t lane) {
    const split_powers powers = split_powers_of(s);
    split_tile *tiles = values ? record.hv[warp] : record.hk[warp];
    float *inverse = values ? record.hv_inverse : record.hk_inverse;
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int32_t row = split_row(lane, i), column = split_column(lane, half, i);
                const float scale = powers.row[i / 2].scale, *x = &s[n].v[half][i];
                split_put_pair(tiles[n], row, column, x[0] * scale, x[1] * scale);
                for (int e = 0; e < 2; e++)
                    if (!values && n == warp && row == column + e)
                        record.diagonal[warp * SPLIT_TILE + row] = x[e];
            }
    if (lane % 4 == 0)
        for (int r = 0; r < 2; r++)
            inverse[warp * SPLIT_TILE + split_row(lane, 2 * r)] = powers.row[r].inverse;
}

// S^T, a warp's 16 columns, over a chunk.
template <int D>
static __device__ __forceinline__ void advance(const states_shared<D> &shared, const split_left (&left)[CHUNK_TILES],
                                               const split_powers &powers, float keys_inverse, float whole_m1,
                                               int32_t lane, split_block (&s)[D / SPLIT_TILE]) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++) {
        split_sum sum = {};
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++)
            split_multiply(sum, left[tile], split_load_turned(shared.keys[tile][n], lane));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x = s[n].v[half][i], kept = whole_m1 > -1 ? mesa_decayed(x, whole_m1, false) : 0;
                s[n].v[half][i] = fmaf(split_total(sum, half, i) * powers.row[i / 2].inverse, keys_inverse, kept);
            }
    }
}

// One chunk of Hk or Hv; begins and ends with a barrier.
template <int D>
static __device__ __forceinline__ void states_chunk(const cuda_table *table, const mesa &a, const kern_chunk &chunk,
                                                    int32_t head, bool values, states_shared<D> &shared,
                                                    split_block (&s)[D / SPLIT_TILE]) {
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, length = chunk.length;
    const int64_t at = (int64_t)chunk.token0 * a.heads + head, stride = (int64_t)a.heads * D;
    __syncthreads();
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay, [&](int32_t i) { return a.g[at + i * a.heads]; });
    __syncthreads();
    for (int32_t i = threadIdx.x; i < CHUNK; i += blockDim.x)
        shared.root[i] =
            i < length ? sqrtf(a.beta[at + i * a.heads] * chunk_pair(shared.decay, length, length - 1, i)) : 0;
    const float whole_m1 = chunk_whole_m1(shared.decay, length);
    __syncthreads();
    const split_power keys = put_keys<D>(shared, a.k + at * D, stride, length);
    split_block x[CHUNK_TILES];
    load_columns((values ? a.v : a.k) + at * D, stride, length, shared.root, warp * SPLIT_TILE, lane, x);
    split_powers powers = {{keys, keys}};
    if (values)
        powers = split_powers_of(x);
    split_left left[CHUNK_TILES];
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        left[n] = split_left_of(x[n], powers);
    __syncthreads();
    advance<D>(shared, left, powers, keys.inverse, whole_m1, lane, s);
}

template <int D>
static __device__ __forceinline__ void run_states(const cuda_table *table, const mesa_group &group, int32_t row,
                                                  int32_t head, bool values, states_shared<D> &shared) {
    const mesa &a = group.a;
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    const mesa_state home = mesa_state_of(table, a, table->row[row].slot, head);
    float *carry = group.carry + ((int64_t)head * 2 + values) * D * D;
    const chunk_run<float> run =
        chunk_run_of(table, row, group.first, group.count, values ? (float *)home.hv : home.hk, carry);
    if (run.first >= run.last || solved_elsewhere(table->row[row]))
        return;
    const auto place = [&](int n, int half, int i) { // of element (column of S, row d)
        return (n * SPLIT_TILE + split_column(lane, half, i)) * D + warp * SPLIT_TILE + split_row(lane, i);
    };
    split_block s[D / SPLIT_TILE] = {};
    for (int n = 0; n < D / SPLIT_TILE && run.from; n++)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 4; i++)
                s[n].v[half][i] = run.from[place(n, half, i)];
    for (int32_t at = run.first; at < run.last; at++) {
        mesa_record<D> *record = (mesa_record<D> *)group.records + ((int64_t)(at - group.first) * a.heads + head);
        float *snapshot = a.snapshots + ((int64_t)at * a.heads + head) * D * 2 * D + values * D;
        for (int n = 0; n < D / SPLIT_TILE && a.snapshots; n++)
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 4; i++)
                    snapshot[place(n, half, i) / D * 2 * D + place(n, half, i) % D] = s[n].v[half][i];
        keep_state<D>(s, *record, values, warp, lane);
        states_chunk<D>(table, a, table->chunk[at], head, values, shared, s);
    }
    for (int n = 0; n < D / SPLIT_TILE && run.to; n++)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 4; i++)
                run.to[place(n, half, i)] = s[n].v[half][i];
}

// ------------------------------------------------------------------------------------------------------------ the
// solve

template <int D> struct alignas(128) solve_shared {
    typedef float rows[CHUNK][D + 8]; // eight rows in different banks

    split_tile state[D / SPLIT_TILE][D / SPLIT_TILE]; // Hk, then Hv
    split_tile keys[CHUNK_TILES][D / SPLIT_TILE];
    rows x, r;
    union alignas(16) {
        rows p;
        split_tile values[CHUNK_TILES][D / SPLIT_TILE]; // behind the last step
    };
    float pair[CHUNK][CHUNK + 8]; // E_ij beta_j, with the inverse powers of both operands j
    chunk_decay decay;
    float state_inverse[D], lambda[D], beta[CHUNK], start[CHUNK], key_inverse[CHUNK], value_inverse[CHUNK];
    cuda_mbarrier came;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr float COARSE = 4e-3f; // tolerance from which high halves suffice

// A lane's pairs of columns in its two rows: use(tile, half, row of two, token, column).
template <int D, typename Use> static __device__ __forceinline__ void each_pair(int32_t warp, int32_t lane, Use use) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                use(n, half, r, warp * SPLIT_TILE + split_row(lane, 2 * r),
                    n * SPLIT_TILE + split_column(lane, half, 0));
}

static __device__ __forceinline__ float over_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <bool COARSELY>
static __device__ __forceinline__ void multiply(split_sum &sum, const split_left &a, const split_right &b) {
    if constexpr (COARSELY) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            mma_half(sum.large.v[half], a.high, b.high[2 * half], b.high[2 * half + 1]);
    } else {
        split_multiply(sum, a, b);
    }
}

// (e^c * P) H + ((P K^T) * pair) W for a warp's rows of P; W: keys or values.
template <int D, bool COARSELY>
static __device__ __forceinline__ void apply(const solve_shared<D> &shared, const typename solve_shared<D>::rows &rows,
                                             const split_tile (&w)[CHUNK_TILES][D / SPLIT_TILE], int32_t warp,
                                             int32_t lane, split_block (&y)[D / SPLIT_TILE]) {
    each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        const float2 two = *(const float2 *)&rows[token][column];
        y[n].v[half][2 * r] = two.x, y[n].v[half][2 * r + 1] = two.y;
    });
    split_powers powers, inside_powers;
    split_left left[D / SPLIT_TILE], inside[CHUNK_TILES];
    split_strip(y, powers, left);
    split_block product[CHUNK_TILES] = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        if (n > warp)
            continue;
        split_sum sum = {};
#pragma unroll
        for (int d = 0; d < D / SPLIT_TILE; d++)
            multiply<COARSELY>(sum, left[d], split_load_right(shared.keys[n][d], lane));
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
        split_sum before = {}, within = {};
#pragma unroll
        for (int d = 0; d < D / SPLIT_TILE; d++)
            multiply<COARSELY>(before, left[d], split_load_right(shared.state[n][d], lane));
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++)
            if (tile <= warp)
                multiply<COARSELY>(within, inside[tile], split_load_turned(w[tile][n], lane));
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
static __device__ void begin(const mesa &a, const kern_solver &solver, const kern_chunk &chunk, int32_t head,
                             int32_t warp, int32_t lane, solve_shared<D> &shared, solve_lane &state) {
    split_block ax[D / SPLIT_TILE] = {};
    float square[2] = {0, 0}, rhs[2] = {0, 0};
    if (solver.mode != KERN_SOLVE_FIXED)
        apply<D, COARSELY>(shared, shared.x, shared.keys, warp, lane, ax);
    each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
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
        state.rhs[r] = over_row(rhs[r]);
        state.residual[r] = over_row(square[r]);
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
static __device__ __forceinline__ void step(const kern_solver &solver, const split_block (&ap)[D / SPLIT_TILE],
                                            int32_t warp, int32_t lane, solve_shared<D> &shared, solve_lane &state) {
    const bool fixed = solver.mode == KERN_SOLVE_FIXED;
    const float epsilon = fixed ? 1e-5f : 0;
    float curvature[2] = {0, 0}, square[2] = {0, 0}, length[2], keep[2];
    each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        const float2 p = *(const float2 *)&shared.p[token][column];
        curvature[r] = fmaf(p.x, ap[n].v[half][2 * r], fmaf(p.y, ap[n].v[half][2 * r + 1], curvature[r]));
    });
#pragma unroll
    for (int r = 0; r < 2; r++) {
        curvature[r] = over_row(curvature[r]);
        length[r] = state.residual[r] / (curvature[r] + epsilon);
        if (state.going[r] && ((!(curvature[r] > 0) && !fixed) || !isfinite(curvature[r]) || !isfinite(length[r]))) {
            state.going[r] = false;
            state.flags[r] |= KERN_REPORT_BREAKDOWN;
        }
    }
    each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
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
        const float residual = over_row(square[r]);
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
    each_pair<D>(warp, lane, [&](int, int, int r, int32_t token, int32_t column) {
        if (!state.going[r])
            return;
        float2 p = *(const float2 *)&shared.p[token][column];
        const float2 left = *(const float2 *)&shared.r[token][column];
        p.x = fmaf(keep[r], p.x, left.x), p.y = fmaf(keep[r], p.y, left.y);
        *(float2 *)&shared.p[token][column] = p;
    });
}

template <int D, bool COARSELY>
static __device__ void solve(const mesa &a, const kern_solver &solver, const kern_chunk &chunk, int32_t head,
                             int32_t warp, int32_t lane, solve_shared<D> &shared) {
    solve_lane state;
    begin<D, COARSELY>(a, solver, chunk, head, warp, lane, shared, state);
    while (__any_sync(~0u, state.going[0] || state.going[1])) {
        split_block ap[D / SPLIT_TILE];
        apply<D, COARSELY>(shared, shared.p, shared.keys, warp, lane, ap);
        each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
            const float2 p = *(const float2 *)&shared.p[token][column];
            ap[n].v[half][2 * r] = fmaf(shared.lambda[column], p.x, ap[n].v[half][2 * r]);
            ap[n].v[half][2 * r + 1] = fmaf(shared.lambda[column + 1], p.y, ap[n].v[half][2 * r + 1]);
        });
        step<D>(solver, ap, warp, lane, shared, state);
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

// ---------------------------------------------------------------------------------------------------- a chunk of a
// head

// K or V as operand: two threads a token.
template <int D>
static __device__ __forceinline__ void put_rows(split_tile (&tiles)[CHUNK_TILES][D / SPLIT_TILE], float *inverse,
                                                int32_t length, const float *from, int64_t stride) {
    constexpr int PARTS = SOLVE_THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const float got = chunk_put_row<D, PARTS>(tiles[token / SPLIT_TILE], token % SPLIT_TILE, part, [&](int32_t column) {
        return cuda_load(from + token * stride + column, token < length ? 4 : 0, true);
    });
    if (part == 0)
        inverse[token] = got;
}

template <int D>
static __device__ __forceinline__ void put_pairs(solve_shared<D> &shared, int32_t length, const float *inverse) {
    for (int32_t at = threadIdx.x; at < CHUNK * CHUNK; at += SOLVE_THREADS) {
        const int32_t i = at / CHUNK, j = at % CHUNK;
        shared.pair[i][j] =
            chunk_pair(shared.decay, length, i, j) * shared.beta[j] * shared.key_inverse[j] * inverse[j];
    }
}

// x0 = q / diag(Hk + Lambda), or zeros; a thread has a column.
template <int D>
static __device__ __forceinline__ void put_start(const mesa &a, const kern_solver &solver, const kern_chunk &chunk,
                                                 int64_t at, float diagonal, solve_shared<D> &shared) {
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

static __device__ __forceinline__ void bring(void *to, const void *from, uint32_t bytes, cuda_mbarrier *came) {
    cuda_mbarrier_expect(came, bytes);
    cuda_bulk_load(to, from, bytes, came);
    cuda_mbarrier_arrive(came);
}

template <int D>
static __device__ void run_solve(const cuda_table *table, const mesa_group &group, int32_t item, char *memory) {
    solve_shared<D> &shared = *(solve_shared<D> *)memory;
    const mesa &a = group.a;
    const int32_t head = item % a.heads, warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    const kern_chunk chunk = table->chunk[group.first + item / a.heads];
    const kern_solver solver = table->row[chunk.row].solver;
    const mesa_record<D> &record = ((const mesa_record<D> *)group.records)[item];
    const int64_t at = (int64_t)chunk.token0 * a.heads + head, stride = (int64_t)a.heads * D;
    if (solved_elsewhere(table->row[chunk.row]))
        return;
    if (threadIdx.x == 0) {
        cuda_mbarrier_make(&shared.came, 1);
        cuda_mbarrier_made();
        bring(shared.state, record.hk, sizeof record.hk, &shared.came);
    }
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay, [&](int32_t i) { return a.g[at + i * a.heads]; });
    put_rows<D>(shared.keys, shared.key_inverse, chunk.length, a.k + at * D, stride);
    for (int32_t i = threadIdx.x; i < CHUNK; i += SOLVE_THREADS)
        shared.beta[i] = i < chunk.length ? a.beta[at + i * a.heads] : 0;
    for (int32_t i = threadIdx.x; i < D; i += SOLVE_THREADS) {
        shared.lambda[i] = mesa_lambda_of(a, a.lambda_params[head * D + i]);
        shared.state_inverse[i] = record.hk_inverse[i];
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < CHUNK; i += SOLVE_THREADS)
        shared.start[i] = chunk_from_start(shared.decay, chunk.length, i);
    put_pairs(shared, chunk.length, shared.key_inverse);
    __syncthreads();
    if (threadIdx.x < D)
        put_start<D>(a, solver, chunk, at, record.diagonal[threadIdx.x], shared);
    __syncthreads();
    cuda_mbarrier_wait(&shared.came, 0);
    if (solver.mode == KERN_SOLVE_TOLERANCE && solver.tolerance >= COARSE)
        solve<D, true>(a, solver, chunk, head, warp, lane, shared);
    else
        solve<D, false>(a, solver, chunk, head, warp, lane, shared);
    cuda_bulk_fence();
    __syncthreads();
    if (threadIdx.x == 0)
        bring(shared.state, record.hv, sizeof record.hv, &shared.came);
    put_rows<D>(shared.values, shared.value_inverse, chunk.length, a.v + at * D, stride);
    for (int32_t i = threadIdx.x; i < D; i += SOLVE_THREADS)
        shared.state_inverse[i] = record.hv_inverse[i];
    __syncthreads();
    put_pairs(shared, chunk.length, shared.value_inverse);
    __syncthreads();
    cuda_mbarrier_wait(&shared.came, 1);
    split_block o[D / SPLIT_TILE];
    apply<D, false>(shared, shared.x, shared.values, warp, lane, o);
    each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
        const int64_t place = (at + (int64_t)token * a.heads) * D + column;
        if (token >= chunk.length)
            return;
        *(float2 *)&a.o[place] = make_float2(o[n].v[half][2 * r], o[n].v[half][2 * r + 1]);
        if (a.x)
            *(float2 *)&a.x[place] = *(const float2 *)&shared.x[token][column];
    });
}

#endif

// ------------------------------------------------------------------------------------------------------------
// launching

template <int D>
static __global__ void __launch_bounds__(2 * D, 2)
    states_kernel(const cuda_table *table, const mesa_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
    extern __shared__ __align__(128) char memory[];
    const int32_t row = first_row + (int32_t)blockIdx.x / (2 * group.a.heads), item = blockIdx.x % (2 * group.a.heads);
    run_states<D>(table, group, row, item / 2, item % 2, *(states_shared<D> *)memory);
}

template <int D>
static __global__ void __launch_bounds__(SOLVE_THREADS, 1)
    solve_kernel(const cuda_table *table, const mesa_group group) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    run_solve<D>(table, group, blockIdx.x, memory);
#endif
}

template <int D> static kern_status launch_groups(const cuda_step *step, mesa_group group) {
    const int32_t heads = group.a.heads, most = (int32_t)(RECORDS_BYTES / (sizeof(mesa_record<D>) * (size_t)heads));
    const int blocks = (step->rows - step->generated_rows) * 2 * heads;
    kern_status status = cuda_allow_shared(states_kernel<D>, sizeof(states_shared<D>));
    if (!status)
        status = cuda_allow_shared(solve_kernel<D>, sizeof(solve_shared<D>));
    for (group.first = 0; !status && group.first < step->chunks; group.first += most) {
        const int32_t left = step->chunks - group.first;
        group.count = left < most ? left : most;
        status = cuda_start(step, states_kernel<D>, blocks, 2 * D, sizeof(states_shared<D>), step->table, group,
                            step->generated_rows);
        if (!status)
            status = cuda_start(step, solve_kernel<D>, group.count * heads, SOLVE_THREADS, sizeof(solve_shared<D>),
                                step->table, group);
    }
    return status;
}

bool cuda_mesa_has_chunks(const kern_cuda *cuda, const kern_mesa *mesa) {
    return cuda->overlaps && mesa->key_width == mesa->value_width && mesa->storage == KERN_STORE_F32 &&
           (mesa->key_width == 64 || mesa->key_width == 128) && cuda->shared_limit >= sizeof(solve_shared<128>) &&
           sizeof(mesa_record<128>) * (size_t)mesa->heads <= RECORDS_BYTES;
}

size_t cuda_mesa_chunk_workspace(const kern_mesa *mesa) {
    return RECORDS_BYTES + sizeof(float) * 2 * (size_t)mesa->heads * (size_t)(mesa->key_width * mesa->key_width);
}

kern_status cuda_mesa_chunks(const cuda_step *step, const mesa &a) {
    mesa_group group = {};
    group.a = a;
    group.records = step->cuda->workspace;
    group.carry = (float *)(step->cuda->workspace + RECORDS_BYTES);
    if (!cuda_is_wide(a.k) || !cuda_is_wide(a.v) || (uintptr_t)a.q % 8 || (uintptr_t)a.o % 8 || (uintptr_t)a.x % 8)
        return KERN_INVALID;
    return a.depth == 64 ? launch_groups<64>(step, group) : launch_groups<128>(step, group);
}

// SPDX-License-Identifier: Apache-2.0
// The gradients of one chunk of a state by a block (recurrence_backward_chunk.cu), from S before it, G behind it, U, M
// and dO:
//
//   Z = scale tril(dO U^T)      Y = -strict_tril(w M U^T)      the gradients of the decayed products Q K^T, K K^T
//   dQ = scale e^c (dO S^T) + (Z * E) K                                              dV = w M + skip dO
//   dK = e^(c_C - c) (U G^T) + (Z * E)^T Q + (Y * E) K + (Y * E)^T K - e^c w (M S^T)
//   dw = rowsum(V * M) - e^c rowsum(K * (M S^T)) - rowsum(strict_tril(M U^T) * (K K^T * E))
//
// the terms of K K^T by the delta rule alone. What flows between two tokens is the product of Z and P, of Y and
// K K^T * E; with what comes from S, goes to G and passes by, that makes the gradients of the decays
// (recurrence_backward.cuh).
//
// A warp has 16 tokens and a quarter of the channels, and of products between tokens a tile. Columns of the state
// come in slabs; sums over them stay in registers. Z and Y go through shared memory as operands in two forms: times the
// inverse powers of their columns for products with rows of K, of their rows for those of the transpose.
#ifndef KERNELS_CUDA_RECURRENCE_PAIRS_CUH
#define KERNELS_CUDA_RECURRENCE_PAIRS_CUH

#include "kernels/cuda/recurrence_backward_chunk.cuh"
#include "kernels/cuda/recurrence_prepare.cuh"

constexpr int PAIRS_THREADS = 512, PAIRS_WARPS = PAIRS_THREADS / CUDA_WARP, PAIRS_PARTS = PAIRS_WARPS / CHUNK_TILES;
constexpr int SLAB = 64, SLAB_TILES = SLAB / SPLIT_TILE, PAIRS_COLUMNS = CHUNK_TILES / PAIRS_PARTS;

// Operands of a slab, and the inverse powers of their rows.
template <int D, int LIMBS> struct alignas(128) pairs_slab {
    split_tile<LIMBS> s[D / SPLIT_TILE][SLAB_TILES], g[D / SPLIT_TILE][SLAB_TILES], u[CHUNK_TILES][SLAB_TILES];
    float s_inverse[D], g_inverse[D], u_inverse[CHUNK];
};
// Z and Y times the decays, as operands; Z alone without the delta rule.
template <int LIMBS> struct pairs_operands {
    split_tile<LIMBS> z_columns[CHUNK_LOWER], z_rows[CHUNK_LOWER], y_columns[CHUNK_LOWER], y_rows[CHUNK_LOWER];
};
template <int D, int LIMBS> struct alignas(128) pairs_shared {
    split_matrix<LIMBS, CHUNK, D> k, q;
    union {
        pairs_slab<D, LIMBS> slab;
        pairs_operands<LIMBS> pair; // behind the last slab
    };
    float key_inverse[CHUNK], query_inverse[CHUNK], weight[CHUNK], start[CHUNK], end[CHUNK];
    chunk_decay decay;
    float enters[PAIRS_PARTS][CHUNK], leaves[PAIRS_PARTS][CHUNK], answers[PAIRS_PARTS][CHUNK];
    float arrives[PAIRS_PARTS][CHUNK], departs[CHUNK_TILES][CHUNK];
    float largest[4][PAIRS_WARPS], through[PAIRS_WARPS];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What a warp has summed up over the slabs.
template <int D> struct pairs_sums {
    static constexpr int TILES = D / SPLIT_TILE / PAIRS_PARTS;
    split_block from_s[TILES], to_g[TILES], answers_s[TILES]; // dO S^T, U G^T, M S^T
    split_block z[PAIRS_COLUMNS], y[PAIRS_COLUMNS];           // dO U^T, M U^T
    float value[2];                                           // rowsum(V * M) of a lane's rows
    float through;                                            // of a thread
};

// A block's work and a warp's share.
struct pairs_job {
    const cuda_table *table;
    kern_chunk chunk;
    int64_t index, item;
    int32_t state, lane, row, part; // row: tile of tokens
    bool whole; // tokens, channels and columns fill their tiles, two neighbours may be read in one access
};
static __device__ __forceinline__ bool pairs_are_whole(const gradients_group &group, const kern_chunk &chunk,
                                                       int32_t depth) {
    const recurrence &a = group.b.a;
    const uintptr_t bits = (uintptr_t)a.q | (uintptr_t)a.k | (uintptr_t)a.v | (uintptr_t)group.b.d_o |
                           (uintptr_t)group.b.dq | (uintptr_t)group.b.dk | (uintptr_t)group.b.dv;
    return chunk.length == CHUNK && a.depth == depth && a.columns % SLAB == 0 && a.columns == a.width &&
           bits % sizeof(float2) == 0;
}

static __device__ __forceinline__ pairs_job pairs_job_of(const cuda_table *table, const gradients_group &group,
                                                         int64_t index, int32_t state, int32_t depth) {
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    const kern_chunk chunk = table->chunk[index];
    const int64_t item = (index - group.first) * group.b.a.states + state;
    return {table,
            chunk,
            index,
            item,
            state,
            lane,
            warp % CHUNK_TILES,
            warp / CHUNK_TILES,
            pairs_are_whole(group, chunk, depth)};
}

// Asks for a run of memory, its whole lines.
static __device__ __forceinline__ void pairs_ask(const float *from, int64_t floats) {
    const uintptr_t first = ((uintptr_t)from + 15) / 16 * 16, end = (uintptr_t)(from + floats) / 16 * 16;
    if (first < end)
        cuda_bulk_prefetch((const void *)first, (uint32_t)(end - first));
}
// Asks for all that is read behind the keys and queries, by threads of a token each.
static __device__ __forceinline__ void pairs_ask_all(const gradients_group &group, const pairs_job &j) {
    const recurrence &a = group.b.a;
    const int32_t token = threadIdx.x;
    const int64_t rows = j.item * CHUNK;
    if (threadIdx.x == 0) {
        pairs_ask(gradients_snapshot(group.b, j.index, j.state),
                  (int64_t)(a.depth - 1) * group.b.snapshot_row + a.columns);
        pairs_ask(group.grads + j.item * a.depth * group.pitch, (int64_t)a.depth * group.pitch);
        pairs_ask(group.answers + rows * group.pitch, (int64_t)j.chunk.length * group.pitch);
        if (a.delta)
            pairs_ask(group.written + rows * group.pitch, (int64_t)j.chunk.length * group.pitch);
    }
    if (token < j.chunk.length) {
        pairs_ask(gradients_output(group.b, j.chunk.token0 + token, j.state, 0), a.columns);
        pairs_ask(recurrence_value(a, j.chunk.token0 + token, j.state), a.width);
    }
}

static __device__ __forceinline__ int32_t pairs_token(const pairs_job &j, int i) {
    return j.row * SPLIT_TILE + split_row(j.lane, i);
}
static __device__ __forceinline__ float pairs_over_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
// Over the rows of a block: a lane's column.
static __device__ __forceinline__ float pairs_over_column(float x) {
    x += __shfl_xor_sync(~0u, x, 4);
    x += __shfl_xor_sync(~0u, x, 8);
    return x + __shfl_xor_sync(~0u, x, 16);
}
template <typename Use> static __device__ __forceinline__ void pairs_each(Use use) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            use(half, i);
}

// --------------------------------------------------------------------------------------------------------------- slabs

// Four columns of a token's V'.
static __device__ __forceinline__ cuda_quad pairs_values(const recurrence &a, int64_t t, int32_t state,
                                                         int32_t column) {
    const float *from = recurrence_value(a, t, state) + column;
    cuda_quad v = cuda_load(from, a.width - column, (uintptr_t)from % 16 == 0);
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (column + e == a.width && a.columns > a.width)
            v.v[e] = 1;
    return v;
}

// S, G and U of a slab as operands; what S carries through the chunk.
template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_load_slab(const gradients_group &group, const pairs_job &j,
                                                       int32_t column0, bool delta, const float *weight,
                                                       pairs_slab<D, LIMBS> &slab, float &through) {
    constexpr int STATE_PARTS = PAIRS_THREADS / D, TOKEN_PARTS = PAIRS_THREADS / CHUNK;
    const recurrence &a = group.b.a;
    const int32_t d = threadIdx.x / STATE_PARTS, state_part = threadIdx.x % STATE_PARTS;
    const int32_t token = threadIdx.x / TOKEN_PARTS, token_part = threadIdx.x % TOKEN_PARTS;
    const bool exists = d < a.depth;
    const float *s = gradients_snapshot(group.b, j.index, j.state) + (int64_t)d * group.b.snapshot_row + column0;
    const float *g = group.grads + (j.item * a.depth + d) * group.pitch + column0;
    const bool wide = (uintptr_t)s % 16 == 0;
    const auto state_quad = [&](int32_t c) { return cuda_load(s + c, exists ? a.columns - column0 - c : 0, wide); };
    const float s_inverse =
        chunk_put_row<SLAB, STATE_PARTS>(slab.s[d / SPLIT_TILE], d % SPLIT_TILE, state_part, state_quad);
    const float g_inverse =
        chunk_put_row<SLAB, STATE_PARTS>(slab.g[d / SPLIT_TILE], d % SPLIT_TILE, state_part, [&](int32_t c) {
            const cuda_quad x = state_quad(c), y = cuda_load(g + c, exists ? a.columns - column0 - c : 0, true);
#pragma unroll
            for (int e = 0; e < 4; e++)
                through = fmaf(x.v[e], y.v[e], through);
            return y;
        });
    if (state_part == 0)
        slab.s_inverse[d] = s_inverse, slab.g_inverse[d] = g_inverse;
    const float *u = group.written + (j.item * CHUNK + token) * group.pitch + column0;
    const float u_inverse =
        chunk_put_row<SLAB, TOKEN_PARTS>(slab.u[token / SPLIT_TILE], token % SPLIT_TILE, token_part, [&](int32_t c) {
            const int32_t left = token < j.chunk.length ? a.columns - column0 - c : 0;
            if (delta)
                return cuda_load(u + c, left, true);
            cuda_quad v = {};
            if (left > 0)
                v = pairs_values(a, j.chunk.token0 + token, j.state, column0 + c);
#pragma unroll
            for (int e = 0; e < 4; e++)
                v.v[e] *= weight[token];
            return v;
        });
    if (token_part == 0)
        slab.u_inverse[token] = u_inverse;
}

// A warp's rows of (tokens, V') in a slab; row(t): where its columns begin.
template <typename Row>
static __device__ __forceinline__ void pairs_load_rows(const pairs_job &j, int32_t left, Row row,
                                                       split_block (&x)[SLAB_TILES]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = pairs_token(j, 2 * r);
        const float *from = row(token) + split_column(j.lane, 0, 0);
        if (j.whole) {
#pragma unroll
            for (int n = 0; n < 2 * SLAB_TILES; n++) {
                const float2 two = *(const float2 *)(from + n * 8);
                x[n / 2].v[n % 2][2 * r] = two.x, x[n / 2].v[n % 2][2 * r + 1] = two.y;
            }
            continue;
        }
        const int32_t some = token < j.chunk.length ? left - split_column(j.lane, 0, 0) : 0;
#pragma unroll
        for (int n = 0; n < 2 * SLAB_TILES; n++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                x[n / 2].v[n % 2][2 * r + c] = n * 8 + c < some ? from[n * 8 + c] : 0;
    }
}

// Rows times the state's, over the warp's channels: sum += x S^T.
template <int D, int LIMBS>
static __device__ __forceinline__ void
pairs_times_state(const pairs_job &j, const split_left<LIMBS> (&x)[SLAB_TILES], const float (&row_inverse)[2],
                  const split_tile<LIMBS> (&state)[D / SPLIT_TILE][SLAB_TILES], const float *inverse,
                  split_block (&sum)[pairs_sums<D>::TILES]) {
#pragma unroll
    for (int n = 0; n < pairs_sums<D>::TILES; n++) {
        const int32_t tile = j.part * pairs_sums<D>::TILES + n;
        const split_sum<LIMBS> product = split_multiply_rows(x, state[tile], j.lane);
        pairs_each([&](int half, int i) {
            const float column = inverse[tile * SPLIT_TILE + split_column(j.lane, half, i)];
            sum[n].v[half][i] = fmaf(split_total(product, half, i) * row_inverse[i / 2], column, sum[n].v[half][i]);
        });
    }
}
// Rows times those of U, over the warp's tiles on and below the diagonal.
template <int D, int LIMBS>
static __device__ __forceinline__ void
pairs_times_written(const pairs_job &j, const split_left<LIMBS> (&x)[SLAB_TILES], const float (&row_inverse)[2],
                    const pairs_slab<D, LIMBS> &slab, split_block (&sum)[PAIRS_COLUMNS]) {
#pragma unroll
    for (int n = 0; n < PAIRS_COLUMNS; n++) {
        const int32_t tile = n * PAIRS_PARTS + j.part;
        if (tile > j.row)
            continue;
        const split_sum<LIMBS> product = split_multiply_rows(x, slab.u[tile], j.lane);
        pairs_each([&](int half, int i) {
            const float column = slab.u_inverse[tile * SPLIT_TILE + split_column(j.lane, half, i)];
            sum[n].v[half][i] = fmaf(split_total(product, half, i) * row_inverse[i / 2], column, sum[n].v[half][i]);
        });
    }
}

static __device__ __forceinline__ void pairs_put_two(float *to, bool add, float x, float y) {
    if (add) {
        const float2 before = *(const float2 *)to;
        x += before.x, y += before.y;
    }
    *(float2 *)to = make_float2(x, y);
}

// dV of the warp's rows, and rowsum(V * M); m: M.
static __device__ __forceinline__ void pairs_value_gradient(const gradients_group &group, const pairs_job &j,
                                                            int32_t column0, const split_block (&m)[SLAB_TILES],
                                                            const float *weight, float (&value)[2]) {
    const recurrence &a = group.b.a;
    const bool add = gradients_adds_of(group.b, j.state).value;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = pairs_token(j, 2 * r);
        const int64_t t = j.chunk.token0 + token;
        if (token >= j.chunk.length)
            continue;
        const int32_t first = column0 + split_column(j.lane, 0, 0);
        const float *v = recurrence_value(a, t, j.state) + first;
        const float *d_o = gradients_output(group.b, t, j.state, 0) + first;
        float *dv = gradients_value(group.b, t, j.state) + first;
        if (j.whole && !a.skip_width) {
#pragma unroll
            for (int n = 0; n < 2 * SLAB_TILES; n++) {
                const float2 two = *(const float2 *)(v + n * 8);
                const float x = m[n / 2].v[n % 2][2 * r], y = m[n / 2].v[n % 2][2 * r + 1];
                value[r] = fmaf(two.x, x, fmaf(two.y, y, value[r]));
                pairs_put_two(dv + n * 8, add, weight[token] * x, weight[token] * y);
            }
            continue;
        }
#pragma unroll
        for (int n = 0; n < 2 * SLAB_TILES; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int32_t column = first + n * 8 + c;
                const float x = m[n / 2].v[n % 2][2 * r + c];
                if (column < a.width) {
                    const float skipped = a.skip_width ? recurrence_skip(a, j.state, 0, column) * d_o[n * 8 + c] : 0;
                    value[r] = fmaf(v[n * 8 + c], x, value[r]);
                    gradients_put(&dv[n * 8 + c], add, fmaf(weight[token], x, skipped));
                } else if (column < a.columns) {
                    value[r] += x; // the unit column
                }
            }
    }
}

// All that is summed over V'.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_slabs(const gradients_group &group, const pairs_job &j,
                                                   const float *weight, pairs_slab<D, LIMBS> &slab,
                                                   pairs_sums<D> &sums) {
    const recurrence &a = group.b.a;
    for (int32_t column0 = 0; column0 < a.columns; column0 += SLAB) {
        const int32_t left = a.columns - column0;
        __syncthreads();
        pairs_load_slab<D>(group, j, column0, DELTA, weight, slab, sums.through);
        __syncthreads();
        split_block x[SLAB_TILES];
        split_powers powers;
        split_left<LIMBS> rows[SLAB_TILES];
        float inverse[2];
        const auto take = [&] {
            split_strip(x, powers, rows);
            inverse[0] = powers.row[0].inverse, inverse[1] = powers.row[1].inverse;
        };
        pairs_load_rows(
            j, left,
            [&](int32_t token) { return gradients_output(group.b, j.chunk.token0 + token, j.state, 0) + column0; }, x);
        take();
        pairs_times_state<D>(j, rows, inverse, slab.s, slab.s_inverse, sums.from_s);
        pairs_times_written<D>(j, rows, inverse, slab, sums.z);
        if (DELTA || j.part == 0)
            pairs_load_rows(
                j, left,
                [&](int32_t token) { return group.answers + (j.item * CHUNK + token) * group.pitch + column0; }, x);
        if (j.part == 0)
            pairs_value_gradient(group, j, column0, x, weight, sums.value);
        if (DELTA) {
            take();
            pairs_times_state<D>(j, rows, inverse, slab.s, slab.s_inverse, sums.answers_s);
            pairs_times_written<D>(j, rows, inverse, slab, sums.y);
        }
#pragma unroll
        for (int n = 0; n < SLAB_TILES; n++)
            rows[n] = split_load_left(slab.u[j.row][n], j.lane);
        inverse[0] = slab.u_inverse[pairs_token(j, 0)], inverse[1] = slab.u_inverse[pairs_token(j, 2)];
        pairs_times_state<D>(j, rows, inverse, slab.g, slab.g_inverse, sums.to_g);
    }
    __syncthreads();
}

// ------------------------------------------------------------------------------------------------------- the channels

// Two neighbours, of which `left` exist.
static __device__ __forceinline__ float2 pairs_two(const float *from, int32_t left, bool whole) {
    if (whole)
        return *(const float2 *)from;
    return make_float2(left > 0 ? from[0] : 0, left > 1 ? from[1] : 0);
}

// Sums over the channels of a lane's rows of x times a row of q or k; every lane of a row has it.
template <int D>
static __device__ __forceinline__ void pairs_dot_rows(const gradients_group &group, const pairs_job &j, bool queries,
                                                      const split_block (&x)[pairs_sums<D>::TILES], float (&sum)[2]) {
    const recurrence &a = group.b.a;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = pairs_token(j, 2 * r);
        const int64_t t = j.chunk.token0 + token;
        const float *row = queries ? recurrence_query(a, t, j.state, 0) : recurrence_key(a, t, j.state);
        const int32_t first = j.part * pairs_sums<D>::TILES * SPLIT_TILE + split_column(j.lane, 0, 0);
        const int32_t some = token < j.chunk.length ? a.depth - first : 0;
        float all = 0;
        row += first;
#pragma unroll
        for (int n = 0; n < 2 * pairs_sums<D>::TILES; n++) {
            const float2 two = pairs_two(row + n * 8, some - n * 8, j.whole);
            all = fmaf(two.x, x[n / 2].v[n % 2][2 * r], fmaf(two.y, x[n / 2].v[n % 2][2 * r + 1], all));
        }
        sum[r] = pairs_over_row(all);
    }
}

// The sums with the state's get their decays, and the tokens' scalars of them go to shared memory.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_scale_state(const gradients_group &group, const pairs_job &j,
                                                         pairs_shared<D, LIMBS> &shared, pairs_sums<D> &sums) {
    float enters[2], leaves[2], answers[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < pairs_sums<D>::TILES; n++)
        pairs_each([&](int half, int i) {
            const int32_t token = pairs_token(j, i);
            sums.from_s[n].v[half][i] *= group.b.a.scale * shared.start[token];
            sums.to_g[n].v[half][i] *= shared.end[token];
            if (DELTA)
                sums.answers_s[n].v[half][i] *= shared.start[token];
        });
    pairs_dot_rows<D>(group, j, true, sums.from_s, enters);
    pairs_dot_rows<D>(group, j, false, sums.to_g, leaves);
    if (DELTA)
        pairs_dot_rows<D>(group, j, false, sums.answers_s, answers);
    if (j.lane % 4 != 0)
        return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = pairs_token(j, 2 * r);
        shared.enters[j.part][token] = enters[r] - (DELTA ? shared.weight[token] * answers[r] : 0);
        shared.leaves[j.part][token] = leaves[r];
        shared.answers[j.part][token] = (j.part == 0 ? sums.value[r] : 0) - answers[r];
    }
}

// ------------------------------------------------------------------------------------------------------ between tokens

// Z and Y times the decays in place of dO U^T and M U^T; what flows; the largest of the four operands.
template <int D, bool DELTA, int LIMBS>
static __device__ __forceinline__ void pairs_flow(const gradients_group &group, const pairs_job &j,
                                                  pairs_shared<D, LIMBS> &shared, pairs_sums<D> &sums) {
    const float scale = group.b.a.scale;
    float arrives[2] = {0, 0}, answers[2] = {0, 0}, largest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < PAIRS_COLUMNS; n++) {
        const int32_t tile = n * PAIRS_PARTS + j.part;
        if (tile > j.row)
            continue;
        const split_block queries = split_multiply_tiles(shared.q, j.row, shared.k, tile, j.lane);
        split_block keys;
        if (DELTA)
            keys = split_multiply_tiles(shared.k, j.row, shared.k, tile, j.lane);
        float departs[2][2] = {{0, 0}, {0, 0}};
        pairs_each([&](int half, int i) {
            const int32_t at = pairs_token(j, i), from = tile * SPLIT_TILE + split_column(j.lane, half, i);
            const float e = chunk_pair(shared.decay, j.chunk.length, at, from), column = shared.key_inverse[from];
            float &z = sums.z[n].v[half][i], &y = sums.y[n].v[half][i], flow = 0;
            z *= scale * e;
            if (from < at)
                flow = z * (queries.v[half][i] * shared.query_inverse[at] * column);
            largest[0] = fmaxf(largest[0], fabsf(z * column));
            largest[1] = fmaxf(largest[1], fabsf(z * shared.query_inverse[at]));
            if (DELTA) {
                const float row = shared.key_inverse[at];
                y = from < at ? y * e : 0;
                const float found = y * (keys.v[half][i] * row * column);
                answers[i / 2] -= found;
                y *= -shared.weight[at];
                flow = fmaf(-shared.weight[at], found, flow);
                largest[2] = fmaxf(largest[2], fabsf(y * column));
                largest[3] = fmaxf(largest[3], fabsf(y * row));
            }
            arrives[i / 2] += flow;
            departs[half][i % 2] += flow;
        });
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float sum = pairs_over_column(departs[half][c]);
                if (j.lane < 4)
                    shared.departs[j.row][tile * SPLIT_TILE + split_column(j.lane, half, c)] = sum;
            }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float arrived = pairs_over_row(arrives[r]), answer = pairs_over_row(answers[r]);
        const int32_t token = pairs_token(j, 2 * r);
        if (j.lane % 4 != 0)
            continue;
        shared.arrives[j.part][token] = arrived;
        shared.answers[j.part][token] += answer;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float all = cuda_warp_max(largest[n]);
        if (j.lane == 0)
            shared.largest[n][threadIdx.x / CUDA_WARP] = all;
    }
}

static __device__ __forceinline__ split_power pairs_power(const float (&of_warps)[PAIRS_WARPS]) {
    float largest = 0;
    for (int warp = 0; warp < PAIRS_WARPS; warp++)
        largest = fmaxf(largest, of_warps[warp]);
    return split_power_of(largest);
}

// A warp's tiles of x as operands: times the inverse powers of the columns, and of the rows.
template <int LIMBS>
static __device__ __forceinline__ void pairs_put(const pairs_job &j, const split_block (&x)[PAIRS_COLUMNS],
                                                 const float *column_inverse, const float *row_inverse,
                                                 const split_power &columns, const split_power &rows,
                                                 split_tile<LIMBS> *by_column, split_tile<LIMBS> *by_row) {
#pragma unroll
    for (int n = 0; n < PAIRS_COLUMNS; n++) {
        const int32_t tile = n * PAIRS_PARTS + j.part;
        if (tile > j.row)
            continue;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int32_t row = split_row(j.lane, i), column = split_column(j.lane, half, i);
                const float *of = column_inverse + tile * SPLIT_TILE + column;
                const float own = row_inverse[j.row * SPLIT_TILE + row], *y = &x[n].v[half][i];
                split_put_pair(by_column[chunk_lower(j.row, tile)], row, column, y[0] * of[0] * columns.scale,
                               y[1] * of[1] * columns.scale);
                split_put_pair(by_row[chunk_lower(j.row, tile)], row, column, y[0] * own * rows.scale,
                               y[1] * own * rows.scale);
            }
    }
}

// The left operand of a tile's transpose.
template <int LIMBS>
static __device__ __forceinline__ split_left<LIMBS> pairs_load_turned(const split_tile<LIMBS> &tile, int32_t lane) {
    split_left<LIMBS> a;
    split_load(tile, split_run((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1), true, a.limb);
    return a;
}

// sum += x rows, over the warp's channels and the tokens up to its own (x lower triangular), or from its own on.
template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_times_rows(const pairs_job &j, bool turned, const split_tile<LIMBS> *x,
                                                        float inverse, const split_matrix<LIMBS, CHUNK, D> &rows,
                                                        split_block (&sum)[pairs_sums<D>::TILES]) {
    split_left<LIMBS> left[CHUNK_TILES];
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        if (turned && n >= j.row)
            left[n] = pairs_load_turned(x[chunk_lower(n, j.row)], j.lane);
        else if (!turned && n <= j.row)
            left[n] = split_load_left(x[chunk_lower(j.row, n)], j.lane);
#pragma unroll
    for (int c = 0; c < pairs_sums<D>::TILES; c++) {
        split_sum<LIMBS> product = {};
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            if (turned ? n >= j.row : n <= j.row)
                split_multiply(product, left[n], split_load_turned(rows, n, j.part * pairs_sums<D>::TILES + c, j.lane));
        pairs_each([&](int half, int i) {
            sum[c].v[half][i] = fmaf(split_total(product, half, i), inverse, sum[c].v[half][i]);
        });
    }
}

// A warp's rows and channels of dQ or dK.
template <int D>
static __device__ __forceinline__ void pairs_store(const gradients_group &group, const pairs_job &j, bool queries,
                                                   const split_block (&x)[pairs_sums<D>::TILES]) {
    const gradients_adds adds = gradients_adds_of(group.b, j.state);
    const bool add = queries ? adds.query : adds.key;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t token = pairs_token(j, 2 * r);
        const int64_t t = j.chunk.token0 + token;
        const int32_t first = j.part * pairs_sums<D>::TILES * SPLIT_TILE + split_column(j.lane, 0, 0);
        const int32_t some = token < j.chunk.length ? group.b.a.depth - first : 0;
        float *to = (queries ? gradients_query(group.b, t, j.state, 0) : gradients_key(group.b, t, j.state)) + first;
#pragma unroll
        for (int n = 0; n < 2 * pairs_sums<D>::TILES; n++) {
            const float *two = &x[n / 2].v[n % 2][2 * r];
            if (j.whole) {
                pairs_put_two(to + n * 8, add, two[0], two[1]);
                continue;
            }
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (n * 8 + c < some)
                    gradients_put(&to[n * 8 + c], add, two[c]);
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- scalars

// dw and dg, by one warp; a lane has two tokens. Sums from the chunk's end begin anew behind each document.
template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_scalars(const gradients_group &group, const pairs_job &j,
                                                     const pairs_shared<D, LIMBS> &shared) {
    const recurrence_gradients &b = group.b;
    const int32_t length = j.chunk.length;
    double own[2], leaves = 0, through = 0;
    bool ends[2]; // a document begins at the next token
    for (int i = 0; i < 2; i++) {
        const int32_t token = 2 * j.lane + i;
        double arrive = 0, leave = 0, depart = 0;
        float answer = 0;
        for (int part = 0; part < PAIRS_PARTS && token < length; part++) {
            arrive += (double)shared.enters[part][token] + (double)shared.arrives[part][token];
            leave += (double)shared.leaves[part][token];
            answer += shared.answers[part][token];
        }
        for (int row = token / SPLIT_TILE; row < CHUNK_TILES && token < length; row++)
            depart += (double)shared.departs[row][token];
        own[i] = arrive - depart - leave;
        leaves += leave;
        ends[i] = token + 1 < length && shared.decay.first[token + 1] == token + 1;
        if (b.dbeta && token < length)
            gradients_put(&b.dbeta[(int64_t)(j.chunk.token0 + token) * b.a.states + j.state], b.add, answer);
    }
    if (!b.dg)
        return;
    for (int distance = CUDA_WARP / 2; distance > 0; distance /= 2)
        leaves += __shfl_xor_sync(~0u, leaves, distance);
    for (int warp = 0; warp < PAIRS_WARPS; warp++)
        through += (double)shared.through[warp];
    const float whole = 1.0f + chunk_whole_m1(shared.decay, length);
    double sum = own[0] + (ends[0] ? 0 : own[1]); // from the lane's first token on
    int32_t ended = ends[0] || ends[1];
    for (int distance = 1; distance < CUDA_WARP; distance *= 2) {
        const double other = __shfl_down_sync(~0u, sum, distance);
        const int32_t others = __shfl_down_sync(~0u, ended, distance);
        if (j.lane + distance < CUDA_WARP) {
            sum += ended ? 0 : other;
            ended |= others;
        }
    }
    const double after = __shfl_down_sync(~0u, sum, 1);
    const int32_t after_ended = __shfl_down_sync(~0u, ended, 1);
    const bool last = j.lane == CUDA_WARP - 1;
    const double beyond = through * (double)whole + leaves; // of the last document
    for (int i = 0; i < 2; i++) {
        const int32_t token = 2 * j.lane + i;
        const bool stops = i == 0 ? ended : ends[1] || (!last && after_ended);
        double dg = i == 0 ? sum : own[1] + (ends[1] || last ? 0 : after);
        dg += stops ? 0 : beyond;
        const kern_row &row = j.table->row[j.chunk.row];
        const bool nothing = token < length && (shared.decay.first[token] == token ||
                                                (row.slot < 0 && j.chunk.token0 + token == row.token0));
        if (token < length)
            gradients_put(&b.dg[(int64_t)(j.chunk.token0 + token) * b.a.states + j.state], b.add,
                          nothing ? 0 : (float)dg);
    }
}

// ------------------------------------------------------------------------------------------------------------- a chunk

// Operands and factors that do not depend on the columns.
template <int D, int LIMBS>
static __device__ __forceinline__ void pairs_begin(const gradients_group &group, const pairs_job &j,
                                                   pairs_shared<D, LIMBS> &shared) {
    const recurrence &a = group.b.a;
    const int32_t length = j.chunk.length;
    __syncthreads();
    if (threadIdx.x < CUDA_WARP)
        chunk_sum_decays(j.table, j.chunk, shared.decay,
                         [&](int32_t i) { return recurrence_head_decay(a, j.chunk.token0 + i, j.state); });
    prepare_operand<D, PAIRS_THREADS>(shared.k, shared.key_inverse, length, recurrence_key(a, j.chunk.token0, j.state),
                                      a.keys * a.depth, a.depth);
    prepare_operand<D, PAIRS_THREADS>(shared.q, shared.query_inverse, length,
                                      recurrence_query(a, j.chunk.token0, j.state, 0), a.queries * a.depth, a.depth);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < CHUNK; i += PAIRS_THREADS) {
        shared.weight[i] = i < length ? recurrence_weight(a, j.chunk.token0 + i, j.state) : 0;
        shared.start[i] = chunk_from_start(shared.decay, length, i);
        shared.end[i] = i < length ? chunk_pair(shared.decay, length, length - 1, i) : 0;
    }
}

template <int D, bool DELTA, int LIMBS>
static __device__ void pairs_run(const cuda_table *table, const gradients_group &group, int64_t index, int32_t state,
                                 pairs_shared<D, LIMBS> &shared) {
    const int32_t warp = threadIdx.x / CUDA_WARP;
    const pairs_job j = pairs_job_of(table, group, index, state, D);
    pairs_sums<D> sums = {};
    pairs_ask_all(group, j);
    pairs_begin<D>(group, j, shared);
    pairs_slabs<D, DELTA>(group, j, shared.weight, shared.slab, sums);
    const float through = cuda_warp_sum(sums.through);
    if (j.lane == 0)
        shared.through[warp] = through;
    sums.value[0] = pairs_over_row(sums.value[0]), sums.value[1] = pairs_over_row(sums.value[1]);
    pairs_scale_state<D, DELTA>(group, j, shared, sums);
    __syncwarp(); // some lanes came back earlier
    pairs_flow<D, DELTA>(group, j, shared, sums);
    __syncthreads();
    const split_power z_columns = pairs_power(shared.largest[0]), z_rows = pairs_power(shared.largest[1]);
    const split_power y_columns = pairs_power(shared.largest[2]), y_rows = pairs_power(shared.largest[3]);
    pairs_put(j, sums.z, shared.key_inverse, shared.query_inverse, z_columns, z_rows, shared.pair.z_columns,
              shared.pair.z_rows);
    if (DELTA)
        pairs_put(j, sums.y, shared.key_inverse, shared.key_inverse, y_columns, y_rows, shared.pair.y_columns,
                  shared.pair.y_rows);
    if (warp == 0)
        pairs_scalars(group, j, shared);
    __syncthreads();
    if (group.b.dq) {
        pairs_times_rows<D>(j, false, shared.pair.z_columns, z_columns.inverse, shared.k, sums.from_s);
        pairs_store<D>(group, j, true, sums.from_s);
    }
    if (DELTA) {
#pragma unroll
        for (int n = 0; n < pairs_sums<D>::TILES; n++)
            pairs_each([&](int half, int i) {
                sums.to_g[n].v[half][i] =
                    fmaf(-shared.weight[pairs_token(j, i)], sums.answers_s[n].v[half][i], sums.to_g[n].v[half][i]);
            });
        pairs_times_rows<D>(j, false, shared.pair.y_columns, y_columns.inverse, shared.k, sums.to_g);
        pairs_times_rows<D>(j, true, shared.pair.y_rows, y_rows.inverse, shared.k, sums.to_g);
    }
    pairs_times_rows<D>(j, true, shared.pair.z_rows, z_rows.inverse, shared.q, sums.to_g);
    pairs_store<D>(group, j, false, sums.to_g);
}

#endif

#endif

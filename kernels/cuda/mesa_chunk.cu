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
// left to mesa.cu. Groups of chunks as in recurrence_chunk.cu; numbers are those of split.cuh.
#include <utility>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/mesa_chunk.cuh"

constexpr size_t RECORDS_BYTES = (size_t)288 << 20;

// What a chunk of a head begins with. Rows of tiles are columns of Hk and Hv, columns of tiles their rows.
template <int D> struct alignas(128) mesa_record {
    split_tile<2> hk[D / SPLIT_TILE][D / SPLIT_TILE], hv[D / SPLIT_TILE][D / SPLIT_TILE];
    float hk_inverse[D], hv_inverse[D], diagonal[D]; // of Hk
};

struct mesa_group {
    mesa a;
    int32_t first, count; // chunks
    char *records;        // (count, heads)
    float *carry[2];      // (heads, [Hk, Hv]) each; chunk_run_of
};

// --------------------------------------------------------------------------------------------------------- the states

template <int D> struct alignas(128) states_shared {
    split_tile<2> keys[CHUNK_TILES][D / SPLIT_TILE];
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
    chunk_put_runs<RUNS, PARTS>(shared.keys[token / SPLIT_TILE], token % SPLIT_TILE, part, x, power.scale);
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
    split_tile<2> *tiles = values ? record.hv[warp] : record.hk[warp];
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
static __device__ __forceinline__ void advance(const states_shared<D> &shared, const split_left<2> (&left)[CHUNK_TILES],
                                               const split_powers &powers, float keys_inverse, float whole_m1,
                                               int32_t lane, split_block (&s)[D / SPLIT_TILE]) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++) {
        split_sum<2> sum = {};
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
    split_left<2> left[CHUNK_TILES];
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        left[n] = split_left_of<2>(x[n], powers);
    __syncthreads();
    advance<D>(shared, left, powers, keys.inverse, whole_m1, lane, s);
}

template <int D>
static __device__ __forceinline__ void run_states(const cuda_table *table, const mesa_group &group, int32_t row,
                                                  int32_t head, bool values, states_shared<D> &shared) {
    const mesa &a = group.a;
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    const mesa_state home = mesa_state_of(table, a, table->row[row].slot, head);
    const int64_t carried = ((int64_t)head * 2 + values) * D * D;
    const chunk_run<float> run = chunk_run_of(table, row, group.first, group.count, values ? (float *)home.hv : home.hk,
                                              {group.carry[0] + carried, group.carry[1] + carried});
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

// ----------------------------------------------------------------------------------------------------------- the solve

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

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
    solve_begin_chunk<D>(table, a, chunk, head, shared);
    for (int32_t i = threadIdx.x; i < D; i += SOLVE_THREADS)
        shared.state_inverse[i] = record.hk_inverse[i];
    solve_put_pairs(shared, chunk.length, shared.key_inverse, shared.key_inverse);
    __syncthreads();
    if (threadIdx.x < D)
        solve_put_start<D>(a, solver, chunk, at, record.diagonal[threadIdx.x], shared);
    __syncthreads();
    cuda_mbarrier_wait(&shared.came, 0);
    solve_tokens<D>(a, solver, chunk, head, warp, lane, shared);
    cuda_bulk_fence();
    __syncthreads();
    if (threadIdx.x == 0)
        bring(shared.state, record.hv, sizeof record.hv, &shared.came);
    solve_put_rows<D>(shared.values, shared.value_inverse, chunk.length, a.v + at * D, stride);
    for (int32_t i = threadIdx.x; i < D; i += SOLVE_THREADS)
        shared.state_inverse[i] = record.hv_inverse[i];
    __syncthreads();
    solve_put_pairs(shared, chunk.length, shared.key_inverse, shared.value_inverse);
    __syncthreads();
    cuda_mbarrier_wait(&shared.came, 1);
    split_block o[D / SPLIT_TILE];
    solve_apply<D, false>(shared, shared.x, shared.keys, shared.values, warp, lane, o);
    solve_each_pair<D>(warp, lane, [&](int n, int half, int r, int32_t token, int32_t column) {
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
        std::swap(group.carry[0], group.carry[1]);
    }
    return status;
}

bool cuda_mesa_has_chunks(const kern_cuda *cuda, const kern_mesa *mesa) {
    return cuda->overlaps && mesa->key_width == mesa->value_width && mesa->storage == KERN_STORE_F32 &&
           (mesa->key_width == 64 || mesa->key_width == 128) && cuda->shared_limit >= sizeof(solve_shared<128>) &&
           sizeof(mesa_record<128>) * (size_t)mesa->heads <= RECORDS_BYTES;
}

size_t cuda_mesa_chunk_workspace(const kern_mesa *mesa) {
    return RECORDS_BYTES + sizeof(float) * 4 * (size_t)mesa->heads * (size_t)(mesa->key_width * mesa->key_width);
}

kern_status cuda_mesa_chunks(const cuda_step *step, const mesa &a) {
    mesa_group group = {};
    group.a = a;
    group.records = step->cuda->workspace;
    group.carry[0] = (float *)(step->cuda->workspace + RECORDS_BYTES);
    group.carry[1] = group.carry[0] + (int64_t)a.heads * 2 * a.depth * a.depth;
    if (!cuda_is_wide(a.k) || !cuda_is_wide(a.v) || (uintptr_t)a.q % 8 || (uintptr_t)a.o % 8 || (uintptr_t)a.x % 8)
        return KERN_INVALID;
    return a.depth == 64 ? launch_groups<64>(step, group) : launch_groups<128>(step, group);
}

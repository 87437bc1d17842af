// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's chunk form on the tensor cores (wgmma, sm_90a), D = V of 64 or 128: what prompt rows run.
//
//   (Hk_t + Lambda) x_t = q_t      o_t = Hv_t^T x_t      H_t = e^(c_t) H + sum_j E_tj beta_j k_j [k_j | v_j]^T
//
// states_kernel: a block has 64 columns of both states of a head of a row, a warpgroup those of Hk, another those of
// Hv, transposed, in registers from the row's first chunk to its last; it leaves each state that a chunk begins with as
// operand (a record). solve_kernel: a block, one warpgroup, has a chunk of a head. With P the tokens' directions
//   A(P) = (e^c * P) Hk + ((P K^T) * E beta) K + P Lambda
// conjugate gradients need nothing of other warps: all products have the warp's rows on the left, dot products are sums
// over the four lanes of a row. A token stops by itself (mesa_solve.cuh), a block with its last token.
//
// To Hk both sides of k_j k_j^T go as the same rounded numbers, so it keeps its symmetry bit for bit. Exact solves are
// left to mesa.cu. Groups of chunks as in recurrence_chunk.cu; numbers are those of split.cuh, records of one limb
// where the device is `fast`.
#include <utility>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/mesa_chunk.cuh"

constexpr size_t RECORDS_BYTES = (size_t)288 << 20;
constexpr int GROUP = 128; // threads of a warpgroup
constexpr int STATES_THREADS = 2 * GROUP, STATES_WARPS = STATES_THREADS / CUDA_WARP, STRIP = 64;

struct mesa_group {
    mesa a;
    int32_t first, count; // chunks
    int32_t limbs;        // of records
    char *records;        // (count, heads)
    float *carry[2];      // (heads, [Hk, Hv]) each; chunk_run_of
};

// What a chunk of a head begins with: split_matrix of Hk's and of Hv's columns, their inverse powers, Hk's diagonal.
template <int D> struct mesa_record {
    uint4 *hk, *hv;
    float *hk_inverse, *hv_inverse, *diagonal;
};
template <int D> static __host__ __device__ __forceinline__ constexpr size_t record_bytes(int limbs) {
    return (size_t)limbs * 2 * sizeof(split_matrix<1, D, D>) + 3 * D * sizeof(float);
}
template <int D>
static __device__ __forceinline__ mesa_record<D> record_of(const mesa_group &group, int32_t chunk, int32_t head) {
    const int64_t item = (int64_t)(chunk - group.first) * group.a.heads + head;
    const size_t state = (size_t)group.limbs * sizeof(split_matrix<1, D, D>);
    char *base = group.records + item * record_bytes<D>(group.limbs);
    float *inverse = (float *)(base + 2 * state);
    return {(uint4 *)base, (uint4 *)(base + state), inverse, inverse + D, inverse + 2 * D};
}

// --------------------------------------------------------------------------------------------------------- the states

template <int D, int LIMBS> struct alignas(128) states_shared {
    static constexpr int KEYS = D / SPLIT_TILE, VALUES = STRIP / SPLIT_TILE; // of a thread
    static constexpr int AHEAD = 4;                                          // chunks whose roots are made at once

    split_matrix<LIMBS, CHUNK, D> keys;
    split_matrix<LIMBS, CHUNK, STRIP> values;
    float4 raw[KEYS + VALUES][STATES_THREADS]; // of the next chunk
    chunk_decay decay[AHEAD];
    float root[AHEAD][CHUNK]; // sqrt(beta e^(c_C - c)): on both sides
    float whole_m1[AHEAD];
    float largest[2][STATES_WARPS];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A thread's quads of a chunk: a token of its warp's eight, every fourth quad.
static __device__ __forceinline__ int32_t states_token(void) {
    return threadIdx.x / CUDA_WARP * 8 + threadIdx.x % 8;
}
static __device__ __forceinline__ int32_t states_quad(int n) {
    return 4 * n + threadIdx.x % CUDA_WARP / 8;
}

template <int D, int LIMBS>
static __device__ __forceinline__ void copy_chunk(const mesa &a, const kern_chunk &chunk, int32_t head, int32_t column0,
                                                  states_shared<D, LIMBS> &shared) {
    typedef states_shared<D, LIMBS> all;
    const int32_t token = states_token();
    const bool there = token < chunk.length;
    const int64_t at = ((int64_t)(chunk.token0 + (there ? token : 0)) * a.heads + head) * D;
#pragma unroll
    for (int n = 0; n < all::KEYS + all::VALUES; n++) {
        const float *from =
            n < all::KEYS ? a.k + at + 4 * states_quad(n) : a.v + at + column0 + 4 * states_quad(n - all::KEYS);
        __pipeline_memcpy_async(&shared.raw[n][threadIdx.x], from, sizeof(float4), there ? 0 : sizeof(float4));
    }
    __pipeline_commit();
}

// A warp's chunk, if the run has it.
template <int D, int LIMBS>
static __device__ __forceinline__ void make_roots(const cuda_table *table, const mesa &a, int32_t at, int32_t last,
                                                  int32_t head, states_shared<D, LIMBS> &shared) {
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    if (warp >= states_shared<D, LIMBS>::AHEAD || at + warp >= last)
        return;
    const kern_chunk chunk = table->chunk[at + warp];
    const int64_t gate = (int64_t)chunk.token0 * a.heads + head;
    chunk_decay &decay = shared.decay[warp];
    chunk_sum_decays(table, chunk, decay, [&](int32_t i) { return a.g[gate + i * a.heads]; });
    __syncwarp();
    for (int32_t i = lane; i < CHUNK; i += CUDA_WARP)
        shared.root[warp][i] =
            i < chunk.length ? sqrtf(a.beta[gate + i * a.heads] * chunk_pair(decay, chunk.length, chunk.length - 1, i))
                             : 0;
    if (lane == 0)
        shared.whole_m1[warp] = chunk_whole_m1(decay, chunk.length);
}

static __device__ __forceinline__ cuda_quad with_root(const float4 &x, float root) {
    return {{__fmul_rn(x.x, root), __fmul_rn(x.y, root), __fmul_rn(x.z, root), __fmul_rn(x.w, root)}};
}

// What has come times its roots, as operands: keys under one power, values under another. A barrier follows.
template <int D, int LIMBS>
static __device__ __forceinline__ void put_operands(states_shared<D, LIMBS> &shared, float root,
                                                    split_power (&power)[2]) {
    typedef states_shared<D, LIMBS> all;
    float largest[2] = {0, 0};
#pragma unroll 4
    for (int n = 0; n < all::KEYS; n++)
        largest[0] = solve_largest(largest[0], with_root(shared.raw[n][threadIdx.x], root));
#pragma unroll
    for (int n = all::KEYS; n < all::KEYS + all::VALUES; n++)
        largest[1] = solve_largest(largest[1], with_root(shared.raw[n][threadIdx.x], root));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        largest[i] = cuda_warp_max(largest[i]);
        if (threadIdx.x % CUDA_WARP == 0)
            shared.largest[i][threadIdx.x / CUDA_WARP] = largest[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        for (int n = 0; n < STATES_WARPS; n++)
            largest[i] = fmaxf(largest[i], shared.largest[i][n]);
        power[i] = split_power_of(largest[i]);
    }
#pragma unroll 4
    for (int n = 0; n < all::KEYS; n++)
        solve_put_quad(shared.keys, states_token(), states_quad(n),
                       solve_scaled(with_root(shared.raw[n][threadIdx.x], root), power[0].scale));
#pragma unroll
    for (int n = 0; n < all::VALUES; n++)
        solve_put_quad(shared.values, states_token(), states_quad(n),
                       solve_scaled(with_root(shared.raw[all::KEYS + n][threadIdx.x], root), power[1].scale));
}

// A warp's columns of a state, from column0 on, into a record.
template <int D, int LIMBS>
static __device__ __forceinline__ void keep_state(const split_block (&s)[D / SPLIT_TILE], const mesa_record<D> &record,
                                                  bool values, int32_t column0) {
    typedef split_matrix<LIMBS, D, D> matrix;
    const int32_t lane = threadIdx.x % CUDA_WARP;
    const split_powers powers = split_powers_of(s);
    uint32_t *words = (uint32_t *)((values ? record.hv : record.hk) + column0 + lane / 4) + lane % 4;
    float *inverse = values ? record.hv_inverse : record.hk_inverse;
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                const int32_t row = column0 + split_row(lane, i), column = split_column(lane, half, i);
                const float scale = powers.row[i / 2].scale, *x = &s[n].v[half][i];
                split_pair<LIMBS>(x[0] * scale, x[1] * scale, [&](int limb, uint32_t pair) {
                    words[limb * (D * D / 2) + matrix::run(i / 2 * 8, 2 * n + half) * 4] = pair;
                });
                for (int e = 0; e < 2 && !values && n * SPLIT_TILE == column0; e++)
                    if (split_row(lane, i) == column + e)
                        record.diagonal[row] = x[e];
            }
    if (lane % 4 == 0)
        for (int r = 0; r < 2; r++)
            inverse[column0 + split_row(lane, 2 * r)] = powers.row[r].inverse;
}

// Products of TILES tiles of d, from tile `first` on: a strip's columns on the left.
template <int D, int LIMBS, int TILES>
static __device__ __forceinline__ void multiply_strip(const states_shared<D, LIMBS> &shared, const uint4 *left,
                                                      int32_t left_limb, int first,
                                                      split_block (&part)[2 * LIMBS - 1][TILES]) {
    constexpr uint32_t CORE = 8 * sizeof(uint4), NEXT = CHUNK * sizeof(uint4);
#pragma unroll
    for (int n = 0; n < 2 * LIMBS - 1; n++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            part[n][tile] = {};
    cuda_wgmma_begin();
#pragma unroll
    for (int n = 0; n < 2 * LIMBS - 1; n++) {
        const cuda_wgmma_operand a(left + (n == 1 ? left_limb : 0), NEXT, CORE);
        const cuda_wgmma_operand b(&shared.keys.limb[n == 2][shared.keys.run(0, 2 * first)], NEXT, CORE);
#pragma unroll
        for (int k = 0; k < CHUNK_TILES; k++)
            cuda_wgmma_half_shared<true, true>((float(&)[8 * TILES]) part[n], a.at(k * 2 * CORE), b.at(k * 2 * CORE));
    }
    cuda_wgmma_commit();
}

// S^T of a strip, a warp's 16 columns, over a chunk; meanwhile(): before it changes.
template <int D, int LIMBS, typename Meanwhile>
static __device__ __forceinline__ void advance(const states_shared<D, LIMBS> &shared, int32_t strip, bool values,
                                               const split_power (&power)[2], float whole_m1,
                                               split_block (&s)[D / SPLIT_TILE], Meanwhile meanwhile) {
    constexpr int TILES = 2; // as many as registers allow
    const uint4 *left = values ? shared.values.limb[0] : &shared.keys.limb[0][shared.keys.run(0, strip * STRIP / 8)];
    const int32_t left_limb = values ? CHUNK * STRIP / 8 : CHUNK * D / 8;
    const float left_inverse = power[values].inverse, keys_inverse = power[0].inverse;
#pragma unroll
    for (int first = 0; first < D / SPLIT_TILE; first += TILES) {
        split_block part[2 * LIMBS - 1][TILES];
        multiply_strip<D, LIMBS, TILES>(shared, left, left_limb, first, part);
        if (first == 0)
            meanwhile();
        cuda_wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < 2 * LIMBS - 1; n++)
            split_group_hold(part[n]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float &x = s[first + tile].v[i / 4][i % 4], sum = part[0][tile].v[i / 4][i % 4];
                if constexpr (LIMBS == 2)
                    sum += part[1][tile].v[i / 4][i % 4] + part[2][tile].v[i / 4][i % 4];
                const float kept = whole_m1 > -1 ? mesa_decayed(x, whole_m1, false) : 0;
                x = fmaf(sum * left_inverse, keys_inverse, kept);
            }
    }
}

// use(element, where it lies) of a warp's columns, from column0 on, of a state whose rows are STRIDE floats apart.
template <int D, int STRIDE, typename Use>
static __device__ __forceinline__ void each_element(split_block (&s)[D / SPLIT_TILE], float *state, int32_t column0,
                                                    Use use) {
    const int32_t lane = threadIdx.x % CUDA_WARP;
    state += split_column(lane, 0, 0) * STRIDE + column0 + split_row(lane, 0);
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            use(s[n].v[i / 4][i % 4], state[(n * SPLIT_TILE + i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8]);
}

template <int D, int LIMBS>
static __device__ __forceinline__ void run_states(const cuda_table *table, const mesa_group &group, int32_t row,
                                                  int32_t head, int32_t strip, states_shared<D, LIMBS> &shared) {
    constexpr int AHEAD = states_shared<D, LIMBS>::AHEAD;
    const mesa &a = group.a;
    const bool values = threadIdx.x >= GROUP;
    const int32_t column0 = strip * STRIP + threadIdx.x % GROUP / CUDA_WARP * SPLIT_TILE; // the warp's
    const mesa_state home = mesa_state_of(table, a, table->row[row].slot, head);
    const int64_t carried = ((int64_t)head * 2 + values) * D * D;
    const chunk_run<float> run = chunk_run_of(table, row, group.first, group.count, values ? (float *)home.hv : home.hk,
                                              {group.carry[0] + carried, group.carry[1] + carried});
    if (run.first >= run.last || table->row[row].solver.mode == KERN_SOLVE_EXACT)
        return;
    split_block s[D / SPLIT_TILE] = {};
    if (run.from)
        each_element<D, D>(s, run.from, column0, [](float &x, float &there) { x = there; });
    copy_chunk(a, table->chunk[run.first], head, strip * STRIP, shared);
    for (int32_t at = run.first; at < run.last; at++) {
        const int32_t slot = (at - run.first) % AHEAD;
        const kern_chunk next = table->chunk[min(at + 1, run.last - 1)];
        split_power power[2];
        if (slot == 0) {
            make_roots(table, a, at, run.last, head, shared);
            __syncthreads();
        }
        const float whole_m1 = shared.whole_m1[slot];
        __pipeline_wait_prior(0);
        put_operands(shared, shared.root[slot][states_token()], power);
        cuda_bulk_fence(); // which would wait for copies
        __syncthreads();
        advance(shared, strip, values, power, whole_m1, s, [&] {
            if (at + 1 < run.last)
                copy_chunk(a, next, head, strip * STRIP, shared);
            float *snapshot = a.snapshots + ((int64_t)at * a.heads + head) * D * 2 * D + values * D;
            if (a.snapshots)
                each_element<D, 2 * D>(s, snapshot, column0, [](float &x, float &there) { there = x; });
            keep_state<D, LIMBS>(s, record_of<D>(group, at, head), values, column0);
        });
    }
    if (run.to)
        each_element<D, D>(s, run.to, column0, [](float &x, float &there) { there = x; });
}

// ----------------------------------------------------------------------------------------------------------- the solve

// A limb or two of a state.
template <int D, int LIMBS>
static __device__ __forceinline__ void bring(solve_shared<D, LIMBS> &shared, const uint4 *from) {
    cuda_mbarrier_expect(&shared.came, sizeof shared.state);
    cuda_bulk_load(&shared.state, from, sizeof shared.state, &shared.came);
    cuda_mbarrier_arrive(&shared.came);
}

// o = Hv^T x, and x; from here on values stand where x did.
template <int D, int LIMBS>
static __device__ __forceinline__ void run_read(const mesa &a, const mesa_record<D> &record, const kern_chunk &chunk,
                                                int32_t head, const split_power &keys, solve_shared<D, LIMBS> &shared) {
    const int64_t at = (int64_t)chunk.token0 * a.heads + head;
    solve_sums<D> y;
    solve_limbs<D, LIMBS> x;
    split_powers powers;
    solve_load_x(shared, y);
    const auto place = [&](int32_t token, int32_t column) { return (at + (int64_t)token * a.heads) * D + column; };
    if (a.x)
        solve_each_pair<D>([&](int n, int half, int r, int32_t token, int32_t column) {
            if (token < chunk.length)
                *(float2 *)&a.x[place(token, column)] = make_float2(y[n].v[half][2 * r], y[n].v[half][2 * r + 1]);
        });
    split_strip(y, powers, x);
    cuda_bulk_fence();
    const split_power values =
        solve_put_rows(shared, 1, shared.values, chunk.length, a.v + at * D, (int64_t)a.heads * D, [&] {
            __syncthreads(); // all have their x
            if (threadIdx.x == 0)
                bring(shared, record.hv);
        });
    const solve_unit unit = solve_unit_of(keys, values);
    solve_put_scales(record.hv_inverse, unit, shared);
    cuda_bulk_fence();
    __syncthreads();
    cuda_mbarrier_wait(&shared.came, 1);
    solve_apply(shared, shared.keys, shared.values, x, y);
    solve_each_pair<D>([&](int n, int half, int r, int32_t token, int32_t column) {
        const float back = powers.row[r].inverse, *v = &y[n].v[half][2 * r];
        if (token < chunk.length)
            *(float2 *)&a.o[place(token, column)] = make_float2(v[0] * unit.inverse * back, v[1] * unit.inverse * back);
    });
}

template <int D, int LIMBS>
static __device__ __forceinline__ void run_solve(const cuda_table *table, const mesa_group &group, bool fast,
                                                 int32_t item, solve_shared<D, LIMBS> &shared) {
    const mesa &a = group.a;
    const int32_t head = item % a.heads, at_chunk = group.first + item / a.heads;
    const kern_chunk chunk = table->chunk[at_chunk];
    const kern_solver solver = table->row[chunk.row].solver;
    if (!solve_has(solver, LIMBS, fast))
        return;
    const mesa_record<D> record = record_of<D>(group, at_chunk, head);
    const int64_t at = (int64_t)chunk.token0 * a.heads + head;
    if (threadIdx.x == 0) {
        cuda_mbarrier_make(&shared.came, 1);
        cuda_mbarrier_made();
        bring(shared, record.hk);
        cuda_bulk_prefetch(record.hv, sizeof shared.state);
    }
    constexpr int LINES = D * sizeof(float) / 128;
    for (int32_t i = threadIdx.x; i < chunk.length * LINES; i += SOLVE_THREADS)
        cuda_prefetch(a.v + (at + (int64_t)(i / LINES) * a.heads) * D + i % LINES * 32);
    const split_power keys = solve_put_rows(shared, 0, shared.keys, chunk.length, a.k + at * D, (int64_t)a.heads * D,
                                            [&] { solve_begin_chunk(table, a, chunk, head, shared); });
    const solve_unit unit = solve_unit_of(keys, keys);
    solve_put_scales(record.hk_inverse, unit, shared);
    solve_put_lambda(a, head, unit, shared);
    solve_put_decays(chunk, shared);
    cuda_bulk_fence();
    __syncthreads();
    solve_put_start(a, solver, chunk, head, record.diagonal[threadIdx.x % D], shared);
    __syncthreads();
    cuda_mbarrier_wait(&shared.came, 0);
    solve_tokens(a, solver, chunk, head, unit.inverse, shared);
    run_read(a, record, chunk, head, keys, shared);
}

#endif

// ----------------------------------------------------------------------------------------------------------- launching

template <int D, int LIMBS>
static __global__ void __launch_bounds__(STATES_THREADS, 2)
    states_kernel(const cuda_table *table, const mesa_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t strips = D / STRIP, item = (int32_t)blockIdx.x / strips, row = first_row + item / group.a.heads;
    run_states(table, group, row, item % group.a.heads, (int32_t)blockIdx.x % strips,
               *(states_shared<D, LIMBS> *)memory);
#endif
}

template <int D, int LIMBS>
static __global__ void __launch_bounds__(SOLVE_THREADS, LIMBS == 1 ? 2 : 1)
    solve_kernel(const cuda_table *table, const mesa_group group, bool fast) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    run_solve(table, group, fast, blockIdx.x, *(solve_shared<D, LIMBS> *)memory);
#endif
}

template <int D, int LIMBS> static kern_status start_states(const cuda_step *step, const mesa_group &group) {
    constexpr size_t bytes = sizeof(states_shared<D, LIMBS>);
    const int blocks = (step->rows - step->generated_rows) * group.a.heads * (D / STRIP);
    const kern_status status = cuda_allow_shared(states_kernel<D, LIMBS>, bytes);
    return status ? status
                  : cuda_start(step, states_kernel<D, LIMBS>, blocks, STATES_THREADS, bytes, step->table, group,
                               step->generated_rows);
}

template <int D, int LIMBS> static kern_status start_solve(const cuda_step *step, const mesa_group &group) {
    constexpr size_t bytes = sizeof(solve_shared<D, LIMBS>);
    const kern_status status = cuda_allow_shared(solve_kernel<D, LIMBS>, bytes);
    return status ? status
                  : cuda_start(step, solve_kernel<D, LIMBS>, group.count * group.a.heads, SOLVE_THREADS, bytes,
                               step->table, group, step->cuda->fast);
}

template <int D> static kern_status launch_groups(const cuda_step *step, mesa_group group) {
    const bool fast = step->cuda->fast;
    group.limbs = fast ? 1 : 2;
    const int32_t most = (int32_t)(RECORDS_BYTES / (record_bytes<D>(group.limbs) * (size_t)group.a.heads));
    kern_status status = KERN_OK;
    for (group.first = 0; !status && group.first < step->chunks; group.first += most) {
        const int32_t left = step->chunks - group.first;
        group.count = left < most ? left : most;
        status = fast ? start_states<D, 1>(step, group) : start_states<D, 2>(step, group);
        if (!status && (fast || step->coarse_prompts))
            status = start_solve<D, 1>(step, group);
        if (!status && !fast && step->fine_prompts)
            status = start_solve<D, 2>(step, group);
        std::swap(group.carry[0], group.carry[1]);
    }
    return status;
}

bool cuda_mesa_has_chunks(const kern_cuda *cuda, const kern_mesa *mesa) {
    return cuda->overlaps && mesa->key_width == mesa->value_width && mesa->storage == KERN_STORE_F32 &&
           (mesa->key_width == 64 || mesa->key_width == 128) && cuda->shared_limit >= sizeof(solve_shared<128, 2>) &&
           cuda->shared_limit >= sizeof(states_shared<128, 2>) &&
           record_bytes<128>(2) * (size_t)mesa->heads <= RECORDS_BYTES;
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

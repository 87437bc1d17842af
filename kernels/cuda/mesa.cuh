// SPDX-License-Identifier: Apache-2.0
// A head of a Mesa layer on a team of threads, D = V of 64 or 128, token by token (models.md 2):
//
//   Hk = gamma Hk + beta k k^T      Hv = gamma Hv + beta k v^T      (Hk + Lambda) x = q      o = Hv^T x
//
// Hk goes to registers (mesa_solve.cuh) and, for the row's last token, back as soon as it is updated, so that it is
// read once and written once whatever the solver does; Hv lies in shared memory, where it may arrive while the solve
// runs, and is updated, read with x and written in one pass. Between the tokens of a row both stay on chip. beta k k^T
// is formed of sqrt(beta) k: Hk keeps its symmetry bit for bit.
#ifndef KERNELS_CUDA_MESA_CUH
#define KERNELS_CUDA_MESA_CUH

#include <cuda_pipeline_primitives.h>

#include "kernels/cuda/mesa_solve.cuh"

struct mesa {
    const float *q, *k, *v, *g, *beta, *lambda_params;
    kern_ptr slots;
    float *o, *x;
    kern_solve_report *report;
    kern_solve_sum *sum;
    int32_t heads, depth, width; // H, D, V
    float lambda_bound;
};

// Hk and Hv of a head in its slot, NULL without a slot.
struct mesa_state {
    float *hk, *hv;
};
static __device__ __forceinline__ mesa_state mesa_state_of(const cuda_table *table, const mesa &a, int32_t slot,
                                                           int32_t head) {
    float *base = cuda_slot(table, a.slots, slot);
    if (!base)
        return {NULL, NULL};
    const int64_t keys = (int64_t)a.depth * a.depth, values = (int64_t)a.depth * a.width;
    return {base + head * keys, base + a.heads * keys + head * values};
}

static __device__ __forceinline__ float mesa_lambda_of(const mesa &a, float param) {
    return cuda_softplus(param) + a.lambda_bound;
}

// One thread of a solve's block. Heads and layers add to a token's sum, integers, so their order is free.
static __device__ __forceinline__ void mesa_tell(const mesa &a, int64_t at, const kern_solve_report &report) {
    if (a.report)
        a.report[at] = report;
    if (!a.sum)
        return;
    kern_solve_sum *sum = &a.sum[at / a.heads];
    atomicAdd(&sum->solves, 1u);
    atomicAdd(&sum->steps, (uint32_t)report.steps);
    atomicMax(&sum->steps_max, (uint32_t)report.steps);
    if (report.flags)
        atomicAdd(&sum->unconverged, 1u);
}

// Whether a document that is not the row's first begins at token t.
static __device__ __forceinline__ bool mesa_begins_anew(const cuda_table *table, const kern_row &row, int32_t t) {
    return t > row.token0 && table->token_start[t] == t;
}

// The decay of a state, minus 1; a state that begins anew is not looked at.
static __device__ __forceinline__ float mesa_decayed(float h, float gamma_m1, bool anew) {
    return anew ? 0 : fmaf(h, gamma_m1, h);
}

// --------------------------------------------------------------------------------------------------- a team and a
// token

// A token as it lies in global memory.
template <int D> struct alignas(16) mesa_token {
    float q[D], k[D], v[D], g, beta;
    int32_t start; // of its document
};

// What a team keeps in shared memory besides Hv.
template <int D> struct alignas(16) mesa_work {
    static constexpr int THREADS = D * D / 64;                                     // of a team
    static constexpr int LANES = D / 4, PARTS = THREADS / LANES, ROWS = D / PARTS; // of the read-out
    float key[D], root_key[D], value[D];                                           // k, sqrt(beta) k, beta v
    float part[PARTS][D];                                                          // of the output
    mesa_shared<D> solve;
    // What holds for the row and the token: kept here, as the solver leaves no register free.
    kern_row row;
    mesa_state home;
    int32_t head;
    float gamma_m1;
    bool anew;
};

template <int D, typename Team>
static __device__ __forceinline__ void mesa_load_keys(mesa_tile<D, Team> &tile, const float *hk) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (hk)
            mesa_take(tile, hk + (tile.row0() + i) * D, tile.h[i]);
        else
#pragma unroll
            for (int j = 0; j < 8; j++)
                tile.h[i][j] = 0;
}

template <int D, typename Team>
static __device__ __forceinline__ void mesa_store_keys(const mesa_tile<D, Team> &tile, float *hk) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        mesa_give(tile, hk + (tile.row0() + i) * D, tile.h[i]);
}

template <int D, typename Team>
static __device__ __forceinline__ void mesa_stage_token(const cuda_table *table, const mesa &a, int32_t head, int32_t t,
                                                        mesa_token<D> &token) {
    const int32_t d = Team::thread();
    const int64_t at = (int64_t)t * a.heads + head;
    if (d < D) {
        __pipeline_memcpy_async(token.q + d, a.q + at * D + d, sizeof(float));
        __pipeline_memcpy_async(token.k + d, a.k + at * D + d, sizeof(float));
        __pipeline_memcpy_async(token.v + d, a.v + at * D + d, sizeof(float));
    }
    if (d == 0) {
        __pipeline_memcpy_async(&token.g, a.g + at, sizeof(float));
        __pipeline_memcpy_async(&token.beta, a.beta + at, sizeof(float));
        __pipeline_memcpy_async(&token.start, table->token_start + t, sizeof(int32_t));
    }
    __pipeline_commit();
}

// The staged token becomes the one that is worked on. anew: there is no state before it.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_take_token(const mesa_token<D> &token, bool anew, mesa_work<D> &work) {
    const int32_t d = Team::thread();
    if (d < D) {
        work.solve.q[d] = token.q[d];
        work.key[d] = token.k[d];
        work.root_key[d] = sqrtf(token.beta) * token.k[d];
        work.value[d] = token.beta * token.v[d];
    }
    if (d == 0) {
        work.gamma_m1 = expm1f(token.g);
        work.anew = anew;
    }
}

// Hk of this token.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_update_keys(mesa_tile<D, Team> &tile, mesa_work<D> &work) {
    const float gamma_m1 = work.gamma_m1;
    const bool anew = work.anew;
    float key[8];
    mesa_take(tile, work.root_key, key);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float row_key = work.root_key[tile.row0() + i];
#pragma unroll
        for (int j = 0; j < 8; j++)
            tile.h[i][j] = fmaf(row_key, key[j], mesa_decayed(tile.h[i][j], gamma_m1, anew));
    }
}

// Hv of this token and its share of the output: a warp's lanes stand along the columns, PARTS groups of lanes have ROWS
// rows each. Hv goes to `to`, NULL: nowhere.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_read_values(mesa_work<D> &work, const float *hv, float *to) {
    const float gamma_m1 = work.gamma_m1;
    const bool anew = work.anew;
    const int32_t part = Team::thread() / work.LANES, column = Team::thread() % work.LANES * 4;
    const float4 value = *(const float4 *)(work.value + column);
    float4 o = make_float4(0, 0, 0, 0);
    for (int first = part * work.ROWS; first < (part + 1) * work.ROWS; first += 4) {
        float4 h[4]; // all four on their way before the first is stored
#pragma unroll
        for (int i = 0; i < 4; i++)
            h[i] = *(const float4 *)(hv + (first + i) * D + column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float key = work.key[first + i], x = work.solve.x[first + i];
            h[i].x = fmaf(key, value.x, mesa_decayed(h[i].x, gamma_m1, anew));
            h[i].y = fmaf(key, value.y, mesa_decayed(h[i].y, gamma_m1, anew));
            h[i].z = fmaf(key, value.z, mesa_decayed(h[i].z, gamma_m1, anew));
            h[i].w = fmaf(key, value.w, mesa_decayed(h[i].w, gamma_m1, anew));
            o.x = fmaf(x, h[i].x, o.x);
            o.y = fmaf(x, h[i].y, o.y);
            o.z = fmaf(x, h[i].z, o.z);
            o.w = fmaf(x, h[i].w, o.w);
            if (to)
                *(float4 *)(to + (first + i) * D + column) = h[i];
        }
    }
    *(float4 *)(work.part[part] + column) = o;
}

template <int D, typename Team>
static __device__ __forceinline__ void mesa_write_results(const mesa &a, int64_t at, const mesa_work<D> &work,
                                                          const kern_solve_report &report) {
    const int32_t d = Team::thread();
    if (d == 0)
        mesa_tell(a, at, report);
    if (d >= D)
        return;
    float o = work.part[0][d];
#pragma unroll
    for (int part = 1; part < work.PARTS; part++)
        o += work.part[part][d];
    a.o[at * D + d] = o;
    if (a.x)
        a.x[at * D + d] = work.solve.x[d];
}

// --------------------------------------------------------------------------------------------------- a row by one team

// Shared memory of mesa_row.
template <int D> struct alignas(16) mesa_row_memory {
    float hv[D * D];
    mesa_token<D> next; // on its way while one is worked on
    mesa_work<D> work;
    float factor[MESA_FACTOR<D>];
};

template <int D, typename Team> static __device__ __forceinline__ void mesa_stage_values(float *to, const float *hv) {
    for (int32_t i = 4 * Team::thread(); i < D * D; i += 4 * mesa_work<D>::THREADS)
        if (hv)
            __pipeline_memcpy_async(to + i, hv + i, sizeof(float4));
        else
            *(float4 *)(to + i) = make_float4(0, 0, 0, 0);
    __pipeline_commit();
}

// The row's facts, its first token, its states on their way. The token is waited for, the values are not.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_begin_row(const cuda_table *table, const mesa &a, const kern_row &row,
                                                      int32_t head, const mesa_state &home, mesa_tile<D, Team> &tile,
                                                      mesa_row_memory<D> &memory) {
    mesa_work<D> &work = memory.work;
    mesa_stage_token<D, Team>(table, a, head, row.token0, memory.next);
    mesa_load_keys(tile, home.hk);
    mesa_stage_values<D, Team>(memory.hv, home.hv);
    for (int32_t d = Team::thread(); d < D; d += tile.THREADS)
        work.solve.lambda[d] = mesa_lambda_of(a, a.lambda_params[(int64_t)head * D + d]);
    if (Team::thread() == 0) {
        work.row = row;
        work.home = home;
        work.head = head;
    }
    __pipeline_wait_prior(1);
    Team::sync();
    mesa_take_token<D, Team>(memory.next, false, work);
}

// A head of a row, all its tokens. After cuda_await; a team that goes on with the same memory syncs in between.
//
// A barrier stands between every write to shared memory and the reads of other threads. The next token's operands may
// be written while this one's results still are: those read only what no operand overwrites.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_row(const cuda_table *table, const mesa &a, const kern_row &row,
                                                int32_t head, const mesa_state &home, mesa_row_memory<D> &memory) {
    mesa_work<D> &work = memory.work;
    mesa_tile<D, Team> tile;
    mesa_begin_row(table, a, row, head, home, tile, memory);
    for (int32_t n = 0;;) {
        Team::sync();
        mesa_update_keys(tile, work);
        const bool last = ++n == work.row.length;
        if (last && work.home.hk)
            mesa_store_keys(tile, work.home.hk);
        mesa_open(tile, work.solve);
        if (!last)
            mesa_stage_token<D, Team>(table, a, work.head, work.row.token0 + n, memory.next);
        Team::sync();
        const kern_solve_report report = mesa_solve(tile, work.solve, memory.factor, work.row.solver);
        __pipeline_wait_prior(0);
        Team::sync();
        mesa_read_values<D, Team>(work, memory.hv, n == work.row.length ? work.home.hv : memory.hv);
        Team::sync();
        const int32_t t = work.row.token0 + n;
        mesa_write_results<D, Team>(a, (int64_t)(t - 1) * a.heads + work.head, work, report);
        if (n == work.row.length)
            return;
        mesa_close(tile, work.solve);
        mesa_take_token<D, Team>(memory.next, memory.next.start == t, work);
    }
}

// ------------------------------------------------------------------------------------------------------ many sessions

// mesa_stream.cu: steps of generated tokens, with the same bits. Whether it is for this step; the launch.
bool cuda_mesa_streams(const cuda_step *step, const mesa &a);
kern_status cuda_mesa_stream(const cuda_step *step, const mesa &a);

#endif

// SPDX-License-Identifier: Apache-2.0
// A head of a Mesa layer on a team of threads, D = V of 64 or 128, token by token (models.md 2):
//
//   Hk = gamma Hk + beta k k^T      Hv = gamma Hv + beta k v^T      (Hk + Lambda) x = q      o = Hv^T x
//
// Hk goes to registers (mesa_solve.cuh) and, for the row's last token, back as soon as it is updated, so that it is
// read once and written once whatever the solver does; Hv lies in shared memory, where it may arrive while the solve
// runs, and is updated, read with x and written in one pass. Between the tokens of a row both stay on chip. beta k k^T
// is formed of sqrt(beta) k: Hk keeps its symmetry bit for bit.
//
// Stored: what Hv's elements are in the slot, float or bfloat16 (kern_storage). With bfloat16 Hv is rounded after each
// token, on chip too, so that a row may be cut anywhere, and Hk lies in the slot as its lower triangle, in floats,
// which loses nothing. The triangle is stored by groups of eight rows: first what stands left of the group's diagonal
// block, row by row, then the block's own triangle by rows. So pieces of rows move 16 bytes at a time.
#ifndef KERNELS_CUDA_MESA_CUH
#define KERNELS_CUDA_MESA_CUH

#include <cuda_pipeline_primitives.h>

#include "kernels/cuda/mesa_solve.cuh"
#include "kernels/cuda/storage.cuh"

struct mesa {
    const float *q, *k, *v, *g, *beta, *lambda_params;
    kern_ptr slots;
    float *o, *x;
    kern_solve_report *report;
    kern_solve_sum *sum;
    float *snapshots;            // of prompt rows, for backward
    int32_t heads, depth, width; // H, D, V
    float lambda_bound;
    bool chunked; // prompt rows go elsewhere (mesa_chunk.cu), but those solved exactly
};

// ---------------------------------------------------------------------------------------------- states in their slot

mesa cuda_mesa_of(const kern_mesa *mesa); // without operands

// mesa_chunk.cu: the prompt rows of a step chunk by chunk, where the chip and the shape allow; else they go token by
// token as generated ones do, and so do always those that are solved exactly.
bool cuda_mesa_has_chunks(const kern_cuda *cuda, const kern_mesa *mesa);
size_t cuda_mesa_chunk_workspace(const kern_mesa *mesa);
kern_status cuda_mesa_chunks(const cuda_step *step, const mesa &a);

template <typename Stored> constexpr bool MESA_TRIANGLE = sizeof(Stored) < sizeof(float);

// Floats of Hk.
template <typename Stored> static __host__ __device__ __forceinline__ int64_t mesa_keys(int32_t depth) {
    const int64_t square = (int64_t)depth * depth;
    return MESA_TRIANGLE<Stored> ? ((square + depth) / 2 + 3) / 4 * 4 : square;
}

// Place of (row, column <= row) in a stored triangle.
static __device__ __forceinline__ int32_t mesa_triangle_place(int32_t depth, int32_t row, int32_t column) {
    const int32_t first = row / 8 * 8, left = depth - first, rows = left < 8 ? left : 8, group = mesa_packed(first, 0);
    return column < first ? group + (row - first) * first + column
                          : group + rows * first + mesa_packed(row - first, column - first);
}

// Hk and Hv (Stored) of a head in its slot, NULL without a slot.
struct mesa_state {
    float *hk;
    void *hv;
};
template <typename Stored = float>
static __device__ __forceinline__ mesa_state mesa_state_of(const cuda_table *table, const mesa &a, int32_t slot,
                                                           int32_t head) {
    float *base = cuda_slot(table, a.slots, slot);
    if (!base)
        return {NULL, NULL};
    const int64_t keys = mesa_keys<Stored>(a.depth), values = (int64_t)a.depth * a.width;
    return {base + head * keys, (Stored *)(base + a.heads * keys) + head * values};
}

// ---------------------------------------------------------------------------------------------------- the arithmetic

static __device__ __forceinline__ float mesa_lambda_of(const mesa &a, float param) {
    return cuda_softplus(param) + a.lambda_bound;
}

// One thread of a solve's block. Heads and layers add to a token's sum, integers, so their order is free.
static __device__ __forceinline__ void mesa_tell(const mesa &a, int64_t t, int64_t at,
                                                 const kern_solve_report &report) {
    if (a.report)
        a.report[at] = report;
    if (!a.sum)
        return;
    kern_solve_sum *sum = &a.sum[t];
    atomicAdd(&sum->solves, 1u);
    atomicAdd(&sum->steps, (uint32_t)report.steps);
    atomicMax(&sum->steps_max, (uint32_t)report.steps);
    if (report.flags)
        atomicAdd(&sum->unconverged, 1u);
}

static __device__ __forceinline__ void mesa_tell(const mesa &a, int64_t at, const kern_solve_report &report) {
    mesa_tell(a, a.sum ? at / a.heads : 0, at, report);
}

// Whether a document that is not the row's first begins at token t.
static __device__ __forceinline__ bool mesa_begins_anew(const cuda_table *table, const kern_row &row, int32_t t) {
    return t > row.token0 && table->token_start[t] == t;
}

// The decay of a state, minus 1; a state that begins anew is not looked at.
static __device__ __forceinline__ float mesa_decayed(float h, float gamma_m1, bool anew) {
    return anew ? 0 : fmaf(h, gamma_m1, h);
}

// -------------------------------------------------------------------------------------------------- a token of a team

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
    float gamma_m1, beta; // beta of a token that stands here as it is
    bool anew;
    cuda_rounding rounding;
};

// A thread's columns are two quads. Calls use(j0, quad, place) with the first of a quad's registers in a row, which
// quad of a row it is, and whether it lies left of the diagonal block of the thread's rows (-1), in it (0) or right of
// it (1).
template <int D, typename Team, typename Use>
static __device__ __forceinline__ void mesa_quads(const mesa_tile<D, Team> &tile, Use use) {
    const int32_t group = mesa_anew(tile.row0()) / 8, column_group = mesa_anew(tile.group());
#pragma unroll
    for (int j0 = 0; j0 < 8; j0 += 4) {
        const int32_t quad = j0 * (D / 32) + column_group;
        use(j0, quad, quad / 2 < group ? -1 : quad / 2 > group);
    }
}

// What stands right of the diagonal block is read where its mirror image stands.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_load_triangle(mesa_tile<D, Team> &tile, const float *triangle) {
    const int32_t row0 = mesa_anew(tile.row0());
    const float *own = triangle + mesa_packed(row0, 0), *block = own + 8 * row0;
    mesa_quads(tile, [&](int j0, int32_t quad, int32_t place) {
        if (place < 0)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float4 h = *(const float4 *)(own + i * row0 + 4 * quad);
                tile.h[i][j0] = h.x, tile.h[i][j0 + 1] = h.y, tile.h[i][j0 + 2] = h.z, tile.h[i][j0 + 3] = h.w;
            }
        else if (place > 0) {
            const int32_t first = quad / 2 * 8;
            const float *mirror = triangle + mesa_packed(first, 0) + (quad & 1) * 4 * first + row0;
#pragma unroll
            for (int j = j0; j < j0 + 4; j++, mirror += first) {
                const float4 low = *(const float4 *)mirror, high = *(const float4 *)(mirror + 4);
                tile.h[0][j] = low.x, tile.h[1][j] = low.y, tile.h[2][j] = low.z, tile.h[3][j] = low.w;
                tile.h[4][j] = high.x, tile.h[5][j] = high.y, tile.h[6][j] = high.z, tile.h[7][j] = high.w;
            }
        } else
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int32_t column = (quad & 1) * 4 + j;
                    tile.h[i][j0 + j] = block[column <= i ? mesa_packed(i, column) : mesa_packed(column, i)];
                }
    });
}

// ONCE: past what caches hold (cuda_store_once).
template <bool ONCE, int D, typename Team>
static __device__ __forceinline__ void mesa_store_triangle(const mesa_tile<D, Team> &tile, float *triangle) {
    const int32_t row0 = mesa_anew(tile.row0());
    float *own = triangle + mesa_packed(row0, 0), *block = own + 8 * row0;
    mesa_quads(tile, [&](int j0, int32_t quad, int32_t place) {
        if (place < 0)
#pragma unroll
            for (int i = 0; i < 8; i++)
                cuda_store_state<ONCE>(own + i * row0 + 4 * quad,
                                       {tile.h[i][j0], tile.h[i][j0 + 1], tile.h[i][j0 + 2], tile.h[i][j0 + 3]});
        else if (place == 0)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int32_t column = (quad & 1) * 4 + j;
                    if (column <= i)
                        block[mesa_packed(i, column)] = tile.h[i][j0 + j];
                }
    });
}

// hk: in the slot or a copy of what is there; NULL: zero.
template <typename Stored, int D, typename Team>
static __device__ __forceinline__ void mesa_load_keys(mesa_tile<D, Team> &tile, const float *hk) {
    if (MESA_TRIANGLE<Stored> && hk)
        mesa_load_triangle(tile, hk);
    else
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (hk)
                mesa_take(tile, hk + (tile.row0() + i) * D, tile.h[i]);
            else
#pragma unroll
                for (int j = 0; j < 8; j++)
                    tile.h[i][j] = 0;
}

template <typename Stored, bool ONCE = false, int D, typename Team>
static __device__ __forceinline__ void mesa_store_keys(const mesa_tile<D, Team> &tile, float *hk) {
    if (MESA_TRIANGLE<Stored>)
        mesa_store_triangle<ONCE>(tile, hk);
    else
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float *to = hk + (tile.row0() + i) * D + 4 * tile.group();
            cuda_store_state<ONCE>(to, {tile.h[i][0], tile.h[i][1], tile.h[i][2], tile.h[i][3]});
            cuda_store_state<ONCE>(to + tile.HALF, {tile.h[i][4], tile.h[i][5], tile.h[i][6], tile.h[i][7]});
        }
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

// Hk of a token. root(x): sqrt(beta) x for an element of `from`.
template <int D, typename Team, typename Root>
static __device__ __forceinline__ void mesa_add_key(mesa_tile<D, Team> &tile, const float *from, const Root &root,
                                                    float gamma_m1, bool anew) {
    float key[8];
    mesa_take(tile, from, key);
#pragma unroll
    for (int j = 0; j < 8; j++)
        key[j] = root(key[j]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float row_key = root(from[tile.row0() + i]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            tile.h[i][j] = fmaf(row_key, key[j], mesa_decayed(tile.h[i][j], gamma_m1, anew));
    }
}
template <int D, typename Team>
static __device__ __forceinline__ void mesa_update_keys(mesa_tile<D, Team> &tile, mesa_work<D> &work) {
    mesa_add_key(
        tile, work.root_key, [](float x) { return x; }, work.gamma_m1, work.anew);
}

// One thread, between barriers: how Hv of the token at this position is rounded.
template <typename Stored, int D>
static __device__ __forceinline__ void mesa_choose_rounding(mesa_work<D> &work, int64_t position, int32_t head) {
    if (sizeof(Stored) < sizeof(float))
        work.rounding = cuda_rounding_of(position, head);
}

// Hv of this token and its share of the output: a warp's lanes stand along the columns, PARTS groups of lanes have ROWS
// rows each. Hv goes to `to`, NULL: nowhere. weighted(x): beta x for an element of work.value.
template <typename Team, bool ONCE = false, int D, typename Stored, typename Weighted>
static __device__ __forceinline__ void mesa_read_values(mesa_work<D> &work, const Stored *hv, Stored *to,
                                                        const Weighted &weighted) {
    constexpr int BATCH = 8;
    const float gamma_m1 = work.gamma_m1;
    const bool anew = work.anew;
    const cuda_rounding rounding = work.rounding;
    const int32_t part = Team::thread() / work.LANES, quad = Team::thread() % work.LANES;
    cuda_quad value = cuda_load(work.value + 4 * quad, 4, true);
#pragma unroll
    for (int j = 0; j < 4; j++)
        value.v[j] = weighted(value.v[j]);
    cuda_quad o = {};
    for (int first = part * work.ROWS; first < (part + 1) * work.ROWS; first += BATCH) {
        cuda_quad h[BATCH], key[BATCH / 4], x[BATCH / 4]; // all on their way before the first is stored
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            h[i] = cuda_load(hv + (first + i) * D + 4 * quad, 4, true);
#pragma unroll
        for (int i = 0; i < BATCH / 4; i++) {
            key[i] = cuda_load(work.key + first + 4 * i, 4, true);
            x[i] = cuda_load(work.solve.x + first + 4 * i, 4, true);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                h[i].v[j] = fmaf(key[i / 4].v[i % 4], value.v[j], mesa_decayed(h[i].v[j], gamma_m1, anew));
                o.v[j] = fmaf(x[i / 4].v[i % 4], h[i].v[j], o.v[j]);
            }
            cuda_round<Stored>(h[i], rounding, (uint32_t)((first + i) * work.LANES + quad));
            if (to)
                cuda_store_state<ONCE>(to + (first + i) * D + 4 * quad, h[i]);
        }
    }
    cuda_store(work.part[part] + 4 * quad, o, 4, true);
}
template <typename Team, bool ONCE = false, int D, typename Stored>
static __device__ __forceinline__ void mesa_read_values(mesa_work<D> &work, const Stored *hv, Stored *to) {
    mesa_read_values<Team, ONCE>(work, hv, to, [](float x) { return x; });
}

template <int D, typename Team>
static __device__ __forceinline__ void mesa_write_output(const mesa &a, int64_t at, const mesa_work<D> &work) {
    const int32_t d = Team::thread();
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
template <int D, typename Team>
static __device__ __forceinline__ void mesa_write_results(const mesa &a, int64_t at, const mesa_work<D> &work,
                                                          const kern_solve_report &report) {
    mesa_write_output<D, Team>(a, at, work);
    if (Team::thread() == 0)
        mesa_tell(a, at, report);
}

// --------------------------------------------------------------------------------------------------- a row by one team

// Shared memory of mesa_row.
template <int D, typename Stored = float> struct alignas(16) mesa_row_memory {
    Stored hv[D * D];
    mesa_token<D> next; // on its way while one is worked on
    mesa_work<D> work;
    float factor[MESA_FACTOR<D>];
};

template <typename Team, int D, typename Stored>
static __device__ __forceinline__ void mesa_stage_values(mesa_row_memory<D, Stored> &memory, const void *hv) {
    constexpr int32_t PIECE = 16 / sizeof(Stored);
    for (int32_t i = PIECE * Team::thread(); i < D * D; i += PIECE * Team::size())
        if (hv)
            __pipeline_memcpy_async(memory.hv + i, (const Stored *)hv + i, 16);
        else
            *(float4 *)(memory.hv + i) = make_float4(0, 0, 0, 0);
    __pipeline_commit();
}

// A head's states on their way, and what does not depend on a token.
template <int D, typename Stored, typename Team>
static __device__ __forceinline__ void mesa_fetch_states(const mesa &a, int32_t head, const mesa_state &home,
                                                         mesa_tile<D, Team> &tile, mesa_row_memory<D, Stored> &memory) {
    mesa_load_keys<Stored>(tile, home.hk);
    mesa_stage_values<Team>(memory, home.hv);
    for (int32_t d = Team::thread(); d < D; d += tile.THREADS)
        memory.work.solve.lambda[d] = mesa_lambda_of(a, a.lambda_params[(int64_t)head * D + d]);
}

// Behind a barrier of the team, with the row's first token in memory.next: the facts for mesa_tokens.
template <int D, typename Stored, typename Team>
static __device__ __forceinline__ void mesa_begin_tokens(const kern_row &row, int32_t head, const mesa_state &home,
                                                         mesa_row_memory<D, Stored> &memory) {
    mesa_work<D> &work = memory.work;
    if (Team::thread() == 0) {
        work.row = row;
        work.home = home;
        work.head = head;
    }
    mesa_take_token<D, Team>(memory.next, false, work);
}

// The tokens of a row, of which the first has been taken and the values may still be on their way.
//
// A barrier stands between every write to shared memory and the reads of other threads. The next token's operands may
// be written while this one's results still are: those read only what no operand overwrites.
template <int D, typename Team, typename Stored>
static __device__ __forceinline__ void mesa_tokens(const cuda_table *table, const mesa &a, mesa_tile<D, Team> &tile,
                                                   mesa_row_memory<D, Stored> &memory) {
    mesa_work<D> &work = memory.work;
    for (int32_t n = 0;;) {
        Team::sync();
        if (Team::thread() == 0)
            mesa_choose_rounding<Stored>(work, work.row.position + n, work.head);
        mesa_update_keys(tile, work);
        const bool last = ++n == work.row.length;
        if (last && work.home.hk)
            mesa_store_keys<Stored>(tile, work.home.hk);
        mesa_open(tile, work.solve);
        if (!last)
            mesa_stage_token<D, Team>(table, a, work.head, work.row.token0 + n, memory.next);
        Team::sync();
        const kern_solve_report report = mesa_solve(tile, work.solve, memory.factor, work.row.solver);
        __pipeline_wait_prior(0);
        Team::sync();
        mesa_read_values<Team>(work, memory.hv, n == work.row.length ? (Stored *)work.home.hv : memory.hv);
        Team::sync();
        const int32_t t = work.row.token0 + n;
        mesa_write_results<D, Team>(a, (int64_t)(t - 1) * a.heads + work.head, work, report);
        if (n == work.row.length)
            return;
        mesa_close(tile, work.solve);
        mesa_take_token<D, Team>(memory.next, memory.next.start == t, work);
    }
}

// The only token of a row whose operands stand in memory.work as they are: q, k, v, beta, gamma - 1; and where its
// states go, and lambda. Behind a barrier of the team, with the values there.
template <int D, typename Team>
static __device__ __forceinline__ void mesa_one_token(const mesa &a, int32_t t, int32_t head, const kern_solver &solver,
                                                      mesa_tile<D, Team> &tile, mesa_row_memory<D> &memory) {
    mesa_work<D> &work = memory.work;
    const float root = sqrtf(work.beta);
    mesa_add_key(
        tile, work.key, [root](float x) { return root * x; }, work.gamma_m1, false);
    if (work.home.hk)
        mesa_store_keys<float>(tile, cuda_in_global(work.home.hk));
    mesa_open(tile, work.solve);
    Team::sync();
    const kern_solve_report report = mesa_solve(tile, work.solve, memory.factor, solver);
    Team::sync();
    const float beta = work.beta;
    mesa_read_values<Team>(work, memory.hv, (float *)work.home.hv, [beta](float x) { return beta * x; });
    Team::sync();
    const int64_t at = (int64_t)t * a.heads + head;
    mesa_write_output<D, Team>(a, at, work);
    if (Team::thread() == 0)
        mesa_tell(a, t, at, report);
}

// A head of a row, all its tokens. After cuda_await; a team that goes on with the same memory syncs in between. The
// first token is waited for, the values are not.
template <int D, typename Team, typename Stored>
static __device__ __forceinline__ void mesa_row(const cuda_table *table, const mesa &a, const kern_row &row,
                                                int32_t head, const mesa_state &home,
                                                mesa_row_memory<D, Stored> &memory) {
    mesa_tile<D, Team> tile;
    mesa_stage_token<D, Team>(table, a, head, row.token0, memory.next);
    mesa_fetch_states(a, head, home, tile, memory);
    __pipeline_wait_prior(1);
    Team::sync();
    mesa_begin_tokens<D, Stored, Team>(row, head, home, memory);
    mesa_tokens<D, Team>(table, a, tile, memory);
}

// ------------------------------------------------------------------------------------------------------ many sessions

// mesa_stream.cu: steps of generated tokens, with the same bits. Whether it is for this step; the launch.
bool cuda_mesa_streams(const cuda_step *step, const mesa &a, kern_storage storage);
kern_status cuda_mesa_stream(const cuda_step *step, const mesa &a, kern_storage storage);

#endif

// SPDX-License-Identifier: Apache-2.0
// The chain: one kernel, a block on every multiprocessor, that walks a list of phases in device memory. A launch costs
// a step of few tokens microseconds, most of them for code that is fetched anew; here it stays where it is.
//
// Between two phases stands a barrier of the grid: one counter, to which each block that had a share in a phase adds 1
// behind its last write, and which a block that has a share in the next one waits for. How many have arrived when a
// phase is over is known from the list, so blocks without a share go on to the phase after, and wait there. Before a
// block waits it asks for what is there already: the registers' weights and the second-level cache's, the latter two
// phases ahead. The last block to leave puts the counter back to 0.
//
// Whatever another phase wrote is read by plain loads behind the wait (ld.acquire and a barrier of the block); loads
// that may take an old line (.nc) are for weights alone. A phase's arguments are copied into shared memory three phases
// ahead, a ring of four. Blocks are resident together by a cooperative launch.
//
// Shares: item i of a phase is block i % blocks'. Products: row tiles, a team of as many warps as share K.
// Preparations: pieces of a token, a warp each. Cores (recurrence, Mesa): a head of a row is a block's, and where the
// preparation before is of the same heads it is made by the same block, without a barrier of the grid.
#include "kernels/cuda/chain.cuh"

#include <stdlib.h>

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/chain_heads.cuh"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/few_even.cuh"
#include "kernels/cuda/grid_barrier.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, RING = 4, AHEAD = 2;
static_assert(AHEAD < RING - 1, "what is looked at has been copied");
static_assert(THREADS == HEAD_TEAMS * RECURRENCE_THREADS && HEAD_THERE + HEAD_VECTORS < WARPS, "a head is a block's");

enum phase_kind { PRODUCT, PREPARE, RECURRENCE, MESA, EMBED, ELEMENTS };

struct phase_product {
    product_facts facts;
    cuda_product asked;
};

struct alignas(16) phase {
    phase_kind kind;
    int32_t items;
    uint32_t awaited; // arrivals when all phases before are over
    int32_t pieces;   // of a token, PREPARE
    int32_t *flags;   // optional: become 1, one a token whose logits are wanted
    union {
        phase_product product;
        phase_core core; // PREPARE has `before` alone
        cuda_embedding embedding;
        cuda_elements elements;
    };
};
static_assert(sizeof(phase) / 16 <= THREADS, "a phase is copied in one turn");

// What a block keeps of the step, as it is asked for again and again.
struct step_table {
    cuda_table there, table; // as it is in device memory, and one that points to what stands below
    kern_row row[CUDA_CHAIN_TOKENS];
    int32_t id[CUDA_CHAIN_TOKENS], token_start[CUDA_CHAIN_TOKENS], logits_token[CUDA_CHAIN_TOKENS];
};

// The block's: phases, what they work with. Kinds of phases are functions of their own, each with all registers, and
// find it all here.
static __shared__ phase ring[RING];
static __shared__ step_table here;
extern __shared__ __align__(16) char memory[];

// ---------------------------------------------------------------------------------------------------------- products

// What lies before the vectors in shared memory: the sums.
static __host__ __device__ __forceinline__ int sums_of(int sides) {
    static_assert(2 * WARPS * PRODUCT_SUMS <= product_even_floats(1), "of either form");
    return product_even_floats(sides);
}

template <bool GATED, bool NORM> static __device__ __noinline__ void run_any(int32_t turn, phase_await await) {
    constexpr int SIDES = GATED ? 2 : 1;
    const phase &now = ring[turn];
    const cuda_product &p = now.product.asked;
    const int32_t warps = product_warps(p.cols), blocks = (int32_t)gridDim.x;
    const cuda_team_of team(32 * warps);
    const product_items items = {(int32_t)blockIdx.x + team.number() * blocks, WARPS / warps * blocks, now.items};
    float *partial = (float *)memory + team.number() * 2 * SIDES * warps * PRODUCT_SUMS;
    product_few<true, GATED, NORM>(&here.table, p, items, team, partial, (float *)memory + sums_of(SIDES), await);
}

template <int SIDE, int HELD, bool GATED, bool NORM>
static __device__ __noinline__ void run_even(int32_t turn, const uint32_t *arrived) {
    const phase &now = ring[turn];
    const phase_await await = {arrived, now.awaited};
    product_few_even<SIDE, HELD, GATED, NORM>(&here.table, now.product.asked, now.product.facts, now.items,
                                              (float *)memory, (float *)memory + sums_of(GATED ? 2 : 1), await);
}

template <bool GATED, bool NORM>
static __device__ __forceinline__ void run_product_as(int32_t turn, const phase_await &await) {
    switch (ring[turn].product.facts.form) {
    case PRODUCT_8_6:
        run_even<8, 6, GATED, NORM>(turn, await.arrived);
        break;
    case PRODUCT_8_8:
        run_even<8, 8, GATED, NORM>(turn, await.arrived);
        break;
    case PRODUCT_16_8:
        if constexpr (!GATED)
            run_even<16, 8, false, NORM>(turn, await.arrived);
        break;
    default:
        run_any<GATED, NORM>(turn, await);
    }
}

static __device__ __forceinline__ void run_product(int32_t turn, const phase_await &await) {
    const cuda_product &p = ring[turn].product.asked;
    if (p.gated)
        p.norm.y ? run_product_as<true, true>(turn, await) : run_product_as<true, false>(turn, await);
    else
        p.norm.y ? run_product_as<false, true>(turn, await) : run_product_as<false, false>(turn, await);
}

size_t cuda_chain_product_bytes(const cuda_product *p, int64_t vectors) {
    return sizeof(float) * (size_t)sums_of(p->gated ? 2 : 1) + product_vectors_bytes(p->cols, vectors);
}

// ------------------------------------------------------------------------------------------------ preparations, cores

static __device__ __noinline__ void run_prepare(int32_t turn, phase_await await) {
    const phase &now = ring[turn];
    const preparation &p = now.core.before;
    const int32_t blocks = (int32_t)gridDim.x, warp = (int32_t)threadIdx.x / 32;
    int32_t item = (int32_t)blockIdx.x + warp * blocks;
    for (bool first = true; first || item < now.items; first = false, item += WARPS * blocks) {
        const int32_t t = item / now.pieces;
        const bool there = item < now.items && t < here.table.n_tokens;
        const prepare_place at = prepare_find(p, item % now.pieces);
        prepare_fetched<PREPARE_QUADS> fetched = {};
        if (there && at.part < p.parts) {
            prepare_fetch_weights(p.part[at.part], at.index, fetched);
            prepare_fetch_state(&here.table, p.part[at.part], here.row[t].slot, at.index, fetched);
        }
        if (first)
            await();
        if (there && at.part < p.parts)
            prepare_convolutions(p.part[at.part], t, at.index, fetched, [](int32_t, const cuda_quad &) {});
        else if (there)
            prepare_gates(p, t, at.index);
    }
}

// -------------------------------------------------------------------------------------------------------- recurrence

// A state of a token at a time, its slices a team each; row r is token r. What is in slots comes before the wait.
template <int R, bool CHANNEL> static __device__ __noinline__ void run_states(int32_t turn, phase_await await) {
    using Team = cuda_team<RECURRENCE_THREADS>;
    const recurrence &a = ring[turn].core.linear;
    recurrence_memory<R> &own = ((recurrence_memory<R> *)memory)[Team::number()];
    for (int32_t item = (int32_t)blockIdx.x; item < ring[turn].items; item += (int32_t)gridDim.x) {
        const head_item at = head_of(item, a.states);
        const bool there = at.t < here.table.n_tokens;
        recurrence_piece piece = {at.t, at.head, Team::number() * RECURRENCE_SLICE};
        cuda_quad s[R] = {};
        if (there)
            recurrence_load_piece<R, true, float, Team>(&here.table, a, here.row[at.t], piece, s);
        if (item == (int32_t)blockIdx.x)
            await();
        for (int32_t slice = Team::number(); there && slice < a.slices; slice += THREADS / RECURRENCE_THREADS) {
            piece.column0 = slice * RECURRENCE_SLICE;
            if (slice != Team::number())
                recurrence_load_piece<R, true, float, Team>(&here.table, a, here.row[at.t], piece, s);
            recurrence_tokens<R, true, CHANNEL, float, Team>(&here.table, a, here.row[at.t], piece, s, own);
            Team::sync();
        }
    }
}

// The same where no head reads another's operands and a slice is one team's (chain_heads.cuh).
template <int R, bool CHANNEL> static __device__ __noinline__ void run_heads(int32_t turn, phase_await await) {
    using Team = cuda_team<RECURRENCE_THREADS>;
    const phase_core &core = ring[turn].core;
    const recurrence &a = core.linear;
    const int32_t warp = (int32_t)threadIdx.x / CUDA_WARP, items = ring[turn].items;
    head_memory<R> &own = *(head_memory<R> *)memory;
    const head_places places = {
        {own.token.q, own.token.k, own.value}, own.token.decay_m1, &own.weight, R * RECURRENCE_GROUPS, PREPARE_PIECE,
        CHANNEL ? R * RECURRENCE_GROUPS : 1};
    for (int32_t item = (int32_t)blockIdx.x; item < items; item += (int32_t)gridDim.x) {
        const head_item at = head_of(item, a.states);
        const bool there = at.t < here.table.n_tokens;
        head_fetched fetched = {};
        const head_slice slice =
            slice_of(&here.table, a, here.row[at.t].slot, at.head, Team::number() * RECURRENCE_SLICE);
        cuda_quad s[R] = {};
        if (there) {
            load_slice(slice, s);
            fetch_head(&here.table, core.before, warp, here.row[at.t].slot, at.head, fetched);
        }
        if (item == (int32_t)blockIdx.x)
            await();
        if (!there)
            return;
        prepare_head(core, warp, at.t, at.head, fetched, places);
        take_operands(core, warp, at.t, at.head, places);
        __syncthreads();
        if (Team::number() < a.slices)
            run_slice<R, CHANNEL>(core, at, slice, s, own);
        if (item + (int32_t)gridDim.x < items)
            __syncthreads();
    }
}

template <int R, bool CHANNEL>
static __device__ __forceinline__ void run_states_as(int32_t turn, const phase_await &await) {
    ring[turn].core.own ? run_heads<R, CHANNEL>(turn, await) : run_states<R, CHANNEL>(turn, await);
}

static __device__ __forceinline__ void run_recurrence(int32_t turn, const phase_await &await) {
    const recurrence &a = ring[turn].core.linear;
    const bool channel = a.decay == KERN_DECAY_CHANNEL;
    if (a.depth <= 2 * RECURRENCE_GROUPS)
        channel ? run_states_as<2, true>(turn, await) : run_states_as<2, false>(turn, await);
    else if (a.depth <= 4 * RECURRENCE_GROUPS)
        channel ? run_states_as<4, true>(turn, await) : run_states_as<4, false>(turn, await);
    else
        channel ? run_states_as<8, true>(turn, await) : run_states_as<8, false>(turn, await);
}

// -------------------------------------------------------------------------------------------------------------- Mesa

// A head of a token at a time: the first warps solve, the last ones prepare. What is in slots comes before the wait.
template <int D> static __device__ __noinline__ void run_solves(int32_t turn, phase_await await) {
    using Team = cuda_team<mesa_work<D>::THREADS, 0>;
    const phase_core &core = ring[turn].core;
    const mesa &a = core.solved;
    mesa_row_memory<D> &own = *(mesa_row_memory<D> *)memory;
    mesa_work<D> &work = own.work;
    const head_places places = {{work.solve.q, work.key, work.value}, &work.gamma_m1, &work.beta, D, D, 1};
    const bool solves = threadIdx.x < mesa_work<D>::THREADS;
    const int32_t warp = WARPS - 1 - (int32_t)threadIdx.x / CUDA_WARP, items = ring[turn].items;
    for (int32_t item = (int32_t)blockIdx.x; item < items; item += (int32_t)gridDim.x) {
        const head_item at = head_of(item, a.heads);
        const bool there = at.t < here.table.n_tokens, first = item == (int32_t)blockIdx.x;
        const mesa_state home =
            there ? mesa_state_of(&here.table, a, here.row[at.t].slot, at.head) : mesa_state{NULL, NULL};
        if (there)
            mesa_stage_values<cuda_team<THREADS, 0>>(own, home.hv);
        mesa_tile<D, Team> tile;
        if (solves && there) {
            const int32_t d = (int32_t)threadIdx.x;
            mesa_load_keys<float>(tile, home.hk ? cuda_in_global(home.hk) : NULL);
            const float lambda = d < D ? *cuda_in_global(a.lambda_params + at.head * D + d) : 0;
            if (first)
                await();
            if (d < D)
                work.solve.lambda[d] = mesa_lambda_of(a, lambda);
            if (d == 0) {
                work.home = home;
                work.anew = false;
            }
            take_operands(core, warp, at.t, at.head, places);
        } else {
            head_fetched fetched = {};
            if (there)
                fetch_head(&here.table, core.before, warp, here.row[at.t].slot, at.head, fetched);
            if (first)
                await();
            if (there) {
                prepare_head(core, warp, at.t, at.head, fetched, places);
                take_operands(core, warp, at.t, at.head, places);
            }
            tile = {}; // defined on all paths, but no earlier
        }
        __pipeline_wait_prior(0); // else it would stand in the solver
        __syncthreads();
        if (solves && there)
            mesa_one_token<D, Team>(a, at.t, at.head, here.row[at.t].solver, tile, own);
        if (item + (int32_t)gridDim.x < items)
            __syncthreads();
    }
}

// ---------------------------------------------------------------------------------------------------------- elements

static __device__ __noinline__ void run_embed(int32_t turn, phase_await await) {
    const cuda_embedding &e = ring[turn].embedding;
    const int32_t count = here.table.n_tokens * e.weight.cols;
    await();
    for (int32_t i = (int32_t)(blockIdx.x * THREADS + threadIdx.x); i < count; i += (int32_t)gridDim.x * THREADS)
        cuda_embed(&here.table, e, i / e.weight.cols, i % e.weight.cols);
}

static __device__ __noinline__ void run_elements(int32_t turn, phase_await await) {
    const cuda_elements &e = ring[turn].elements;
    const int32_t count = here.table.n_tokens * e.width;
    await();
    for (int32_t i = (int32_t)(blockIdx.x * THREADS + threadIdx.x) * 4; i < count;
         i += (int32_t)gridDim.x * THREADS * 4)
        cuda_elements_quad(e, i, count - i);
}

// ------------------------------------------------------------------------------------------------------------ phases

// A block's first items of a phase that is still to come, a lane of one warp each, to the second-level cache. The
// states as they lie there: what writes them has run, or is another chain.
static __device__ __noinline__ void prefetch(int32_t turn) {
    const phase &later = ring[turn];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int32_t MOST = 96 * 1024; // bytes of weights
    const int32_t lane = (int32_t)threadIdx.x - (THREADS - 32);
    const int32_t item = (int32_t)blockIdx.x + lane * (int32_t)gridDim.x;
    if (lane < 0 || item >= later.items)
        return;
    if (later.kind == PRODUCT) {
        const cuda_product &p = later.product.asked;
        const int32_t bytes = product_tiles(p.cols) * 512, sides = p.gated ? 2 : 1;
        if (lane > 0 && (lane + 1) * bytes * sides > MOST)
            return;
        const product_place at = p.gated ? product_place{0, item} : product_find_even(later.product.facts, item);
        for (int side = 0; side < sides; side++)
            cuda_bulk_prefetch(product_item_tiles(p, at.item, at.own, side), (uint32_t)bytes);
    } else if (later.kind == RECURRENCE) {
        const recurrence &a = later.core.linear;
        const int32_t t = item / a.states;
        const float *home =
            t < here.table.n_tokens ? recurrence_state<float>(&here.table, a, here.row[t].slot, item % a.states) : NULL;
        if (home)
            cuda_bulk_prefetch(home, (uint32_t)(a.depth * a.columns) * sizeof(float));
    } else if (later.kind == MESA) {
        const mesa &a = later.core.solved;
        const int32_t t = item / a.heads;
        if (t >= here.table.n_tokens)
            return;
        const mesa_state home = mesa_state_of(&here.table, a, here.row[t].slot, item % a.heads);
        if (home.hk) {
            cuda_bulk_prefetch(home.hk, (uint32_t)(a.depth * a.depth) * sizeof(float));
            cuda_bulk_prefetch(home.hv, (uint32_t)(a.depth * a.width) * sizeof(float));
        }
    }
#else
    (void)later;
#endif
}

static __device__ __forceinline__ void run_phase(int32_t turn, const phase_await &await) {
    const phase &now = ring[turn];
    switch (now.kind) {
    case PRODUCT:
        run_product(turn, await);
        break;
    case PREPARE:
        run_prepare(turn, await);
        break;
    case RECURRENCE:
        run_recurrence(turn, await);
        break;
    case MESA:
        now.core.solved.depth == 64 ? run_solves<64>(turn, await) : run_solves<128>(turn, await);
        break;
    case EMBED:
        run_embed(turn, await);
        break;
    case ELEMENTS:
        run_elements(turn, await);
        break;
    }
    if (now.flags && blockIdx.x == 0 && (int32_t)threadIdx.x < here.table.n_logits)
        now.flags[threadIdx.x] = 1;
}

static __device__ __forceinline__ void stage(phase *to, const phase *from) {
    const uint32_t word = THREADS - 1 - threadIdx.x; // the first warps have more to do
    if (word < sizeof(phase) / 16)
        __pipeline_memcpy_async((uint4 *)to + word, (const uint4 *)from + word, sizeof(uint4));
    __pipeline_commit();
}

// Behind it a barrier of the block.
static __device__ __forceinline__ void copy_words(void *to, const void *from, size_t bytes) {
    for (size_t i = threadIdx.x; i < bytes / sizeof(int32_t); i += THREADS)
        ((int32_t *)to)[i] = ((const int32_t *)from)[i];
}

// The counts are at most those of a chain's step.
static __device__ __forceinline__ void take_table(const cuda_table *table) {
    const int32_t tokens = min(table->n_tokens, (int32_t)CUDA_CHAIN_TOKENS);
    const int32_t logits = min(table->n_logits, (int32_t)CUDA_CHAIN_TOKENS);
    copy_words(&here.there, table, sizeof *table);
    copy_words(&here.table, table, sizeof *table);
    copy_words(here.row, table->row, sizeof(kern_row) * (size_t)tokens);
    copy_words(here.id, table->id, sizeof(int32_t) * (size_t)tokens);
    copy_words(here.token_start, table->token_start, sizeof(int32_t) * (size_t)tokens);
    copy_words(here.logits_token, table->logits_token, sizeof(int32_t) * (size_t)logits);
    __syncthreads();
    if (threadIdx.x == 0) {
        here.table.row = here.row;
        here.table.id = here.id;
        here.table.token_start = here.token_start;
        here.table.logits_token = here.logits_token;
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    chain_kernel(const cuda_table *table, const phase *phases, int32_t count, counters *counts) {
    for (int32_t i = 0; i < RING - 1 && i < count; i++)
        stage(&ring[i], phases + i);
    take_table(table);
    __pipeline_wait_prior(0);
    __syncthreads();
    for (int32_t i = 1; i < AHEAD && i < count; i++)
        prefetch(i);
    for (int32_t i = 0; i < count; i++) {
        const int32_t turn = i % RING;
        const bool shares = (int32_t)blockIdx.x < ring[turn].items;
        if (i + RING - 1 < count)
            stage(&ring[(i + RING - 1) % RING], phases + i + RING - 1);
        if (i + AHEAD < count)
            prefetch((i + AHEAD) % RING);
        if (shares)
            run_phase(turn, {&counts->arrived.value, ring[turn].awaited});
        __pipeline_wait_prior(0);
        __syncthreads();
        if (shares && threadIdx.x == 0)
            arrive(&counts->arrived.value);
    }
    if (threadIdx.x == 0)
        leave(counts);
}

// --------------------------------------------------------------------------------------------------------- gathering

struct cuda_chain {
    phase *list, *device; // on the host and, the same, on the device
    counters *counts;     // device
    cuda_range *state;    // of slots, what the phases write that are not launched yet
    size_t capacity, count, launched, states;
    size_t room, shared; // bytes of dynamic shared memory: a block may have, the phases not launched need
    int blocks;
};

enum { STATES = CUDA_CONVS + 1 }; // of a phase, at most

static size_t room_of(const kern_cuda *cuda) {
    cudaFuncAttributes attributes;
    int cooperative = 0, resident = 0;
    if (cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, cuda->ordinal) != cudaSuccess ||
        !cooperative || cudaFuncGetAttributes(&attributes, chain_kernel) != cudaSuccess ||
        attributes.sharedSizeBytes >= cuda->shared_limit)
        return 0;
    const size_t room = cuda->shared_limit - attributes.sharedSizeBytes;
    if (cudaFuncSetAttribute(chain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room) != cudaSuccess ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, chain_kernel, THREADS, room) != cudaSuccess)
        return 0;
    return resident > 0 ? room : 0;
}

kern_status cuda_chain_create(const kern_cuda *cuda, size_t operations, cuda_chain **out) {
    *out = NULL;
    const size_t room = room_of(cuda);
    if (room == 0 || operations == 0) {
        (void)cudaGetLastError();
        return KERN_OK;
    }
    cuda_chain *chain = (cuda_chain *)calloc(1, sizeof *chain);
    if (!chain)
        return KERN_NO_MEMORY;
    chain->capacity = operations;
    chain->room = room;
    chain->blocks = cuda->processors;
    chain->list = (phase *)calloc(operations, sizeof *chain->list);
    chain->state = (cuda_range *)calloc(operations * STATES, sizeof *chain->state);
    cudaError_t error = cudaMalloc((void **)&chain->device, operations * sizeof *chain->device);
    if (error == cudaSuccess)
        error = cudaMalloc((void **)&chain->counts, sizeof *chain->counts);
    if (error == cudaSuccess && chain->list && chain->state) {
        *out = chain;
        return KERN_OK;
    }
    cuda_chain_free(chain);
    (void)cudaGetLastError();
    return error == cudaSuccess ? KERN_NO_MEMORY : cuda_status(error);
}

void cuda_chain_free(cuda_chain *chain) {
    if (!chain)
        return;
    cudaFree(chain->device);
    cudaFree(chain->counts);
    free(chain->list);
    free(chain->state);
    free(chain);
}

kern_status cuda_chain_send(const cuda_step *step) {
    const cuda_chain *chain = step->chain;
    cudaError_t error = cudaMemcpyAsync(chain->device, chain->list, chain->count * sizeof *chain->list,
                                        cudaMemcpyHostToDevice, step->stream);
    if (error == cudaSuccess)
        error = cudaMemsetAsync(chain->counts, 0, sizeof *chain->counts, step->stream);
    return cuda_status(error);
}

kern_status cuda_chain_flush(const cuda_step *step, bool *launched) {
    cuda_chain *chain = step->chain;
    *launched = chain && chain->launched < chain->count;
    if (!*launched)
        return KERN_OK;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)chain->blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = chain->shared;
    config.stream = step->stream;
    config.attrs = &together;
    config.numAttrs = 1;
    const phase *first = chain->device + chain->launched;
    const int32_t count = (int32_t)(chain->count - chain->launched);
    (void)cudaLaunchKernelEx(&config, chain_kernel, step->table, first, count, chain->counts);
    chain->launched = chain->count;
    chain->shared = chain->states = 0;
    return cuda_launched();
}

bool cuda_chain_takes(const cuda_step *step, size_t shared) {
    const cuda_chain *chain = step->chain;
    return chain && chain->count < chain->capacity && shared <= chain->room;
}

// The last phase that is not launched; NULL: none.
static phase *last_of(const cuda_chain *chain) {
    return chain->count > chain->launched ? &chain->list[chain->count - 1] : NULL;
}

// Slots are read before the barrier, so a chain writes a part of them once. All slots are alike: their first ones are
// compared.
static kern_status write_states(const cuda_step *step, const cuda_range *state, size_t count) {
    cuda_chain *chain = step->chain;
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < chain->states; j++)
            if (cuda_overlap(state[i], chain->state[j])) {
                bool launched = false;
                const kern_status status = cuda_chain_flush(step, &launched);
                if (status)
                    return status;
            }
    for (size_t i = 0; i < count; i++)
        chain->state[chain->states++] = state[i];
    return KERN_OK;
}

static kern_status gather(const cuda_step *step, phase *next, size_t shared) {
    cuda_chain *chain = step->chain;
    const phase *last = last_of(chain);
    if (last)
        next->awaited = last->awaited + (uint32_t)(last->items < chain->blocks ? last->items : chain->blocks);
    chain->list[chain->count++] = *next;
    chain->shared = shared > chain->shared ? shared : chain->shared;
    return KERN_OK;
}

bool cuda_chain_raise(const cuda_step *step, int32_t *flags) {
    phase *last = step->chain ? last_of(step->chain) : NULL;
    if (!last || last->flags || (last->kind == PRODUCT && last->product.asked.finite))
        return false;
    last->flags = flags;
    return true;
}

kern_status cuda_chain_product(const cuda_step *step, const cuda_product *product, int items) {
    phase next = {};
    next.kind = PRODUCT;
    next.items = items;
    next.product = {product_facts_of(product), *product};
    return gather(step, &next, cuda_chain_product_bytes(product, step->tokens));
}

kern_status cuda_chain_embed(const cuda_step *step, const cuda_embedding *embedding) {
    phase next = {};
    next.kind = EMBED;
    next.items = cuda_blocks((int64_t)step->tokens * embedding->weight.cols, THREADS);
    next.embedding = *embedding;
    return gather(step, &next, 0);
}

kern_status cuda_chain_elements(const cuda_step *step, const cuda_elements *elements) {
    phase next = {};
    next.kind = ELEMENTS;
    next.items = cuda_blocks((int64_t)step->tokens * elements->width, 4 * THREADS);
    next.elements = *elements;
    return gather(step, &next, 0);
}

static size_t windows_of(const preparation *p, cuda_range *state) {
    size_t count = 0;
    for (int32_t i = 0; i < p->parts; i++) {
        const kern_short_conv_args &a = p->part[i].conv;
        if (a.state.p)
            state[count++] = {(const char *)a.state.p, sizeof(float) * (size_t)(a.taps - 1) * (size_t)a.channels};
    }
    return count;
}

kern_status cuda_chain_prepare(const cuda_step *step, const preparation *prepare, int32_t pieces) {
    cuda_range state[CUDA_CONVS];
    const kern_status status = write_states(step, state, windows_of(prepare, state));
    phase next = {};
    next.kind = PREPARE;
    next.items = step->tokens * pieces;
    next.pieces = pieces;
    next.core.before = *prepare;
    return status ? status : gather(step, &next, 0);
}

// ------------------------------------------------------------------------------------------------------------- cores

// What a core reads, and o, which it writes: `width` floats a head.
struct operand {
    const float *p;
    int32_t width;
};
struct operands {
    operand read[HEAD_OPERANDS], o;
    int32_t heads;
};

// Whether a head of the core may run behind the same head's preparation alone: what is written on one side and read on
// the other is divided into heads in the same way.
static bool is_apart(const cuda_step *step, const operands &core, const float *p, int32_t width, bool written) {
    const cuda_range range = cuda_floats_at(step, p, (int64_t)width * core.heads);
    if (cuda_overlap(range, cuda_floats_at(step, core.o.p, (int64_t)core.o.width * core.heads)))
        return false;
    for (const operand &read : core.read) {
        const bool same = p == read.p && width == read.width;
        if (written && !same && cuda_overlap(range, cuda_floats_at(step, read.p, (int64_t)read.width * core.heads)))
            return false;
    }
    return true;
}

static bool divides(const cuda_step *step, preparation *p, const operands &core) {
    const kern_gates_args &g = p->gates;
    const operand *read = core.read;
    if (read[0].p == read[1].p || read[1].p == read[2].p || read[2].p == read[0].p) // a part makes one of them
        return false;
    for (int32_t i = 0; i < p->parts; i++) {
        const kern_short_conv_args &a = p->part[i].conv;
        const int32_t width = a.channels / core.heads;
        if (!prepare_suits_heads(p->part[i]) || width * core.heads != a.channels || width % CUDA_QUAD != 0 ||
            width > PREPARE_PIECE || (p->part[i].norm.y && p->part[i].norm.width != width) ||
            !is_apart(step, core, a.x.f, width, false) || !is_apart(step, core, a.y.f, width, true) ||
            !is_apart(step, core, p->part[i].norm.y, width, true))
            return false;
    }
    if (p->gate_channels > 0 &&
        (g.gates.heads != core.heads || p->gate_channels > PREPARE_PIECE ||
         !is_apart(step, core, g.a.f, p->gate_channels, false) || !is_apart(step, core, g.b.f, 1, false) ||
         !is_apart(step, core, g.g.f, p->gate_channels, true) || !is_apart(step, core, g.beta.f, 1, true)))
        return false;
    for (int32_t i = 0; i < p->parts; i++)
        p->part[i].width = p->part[i].conv.channels / core.heads;
    return true;
}

// Which operands the preparation makes.
static void find_made(phase_core *core) {
    const preparation &p = core->before;
    for (int32_t part = 0; part < p.parts; part++) {
        const float *y = p.part[part].norm.y ? p.part[part].norm.y : p.part[part].conv.y.f;
        core->to[part] = 0;
        while (core->to[part] < HEAD_VECTORS && core->read[core->to[part]] != y)
            core->to[part]++;
        if (core->to[part] < HEAD_VECTORS)
            core->made[core->to[part]] = true;
    }
    core->made[3] = p.gate_channels > 0 && core->read[3] && core->read[3] == p.gates.g.f;
    core->made[4] = p.gate_channels > 0 && core->read[4] && core->read[4] == p.gates.beta.f;
}

// The core becomes a phase, or takes in the preparation that is the last one; own: no head reads another's operands.
static kern_status gather_core(const cuda_step *step, phase *next, const operands &core, bool own, cuda_range state,
                               size_t shared) {
    cuda_chain *chain = step->chain;
    const kern_status status = write_states(step, &state, state.bytes > 0 ? 1 : 0);
    if (status)
        return status;
    next->items = step->tokens * core.heads;
    next->core.own = own;
    next->core.heads = core.heads;
    for (int i = 0; i < HEAD_OPERANDS; i++) {
        next->core.read[i] = core.read[i].p;
        next->core.width[i] = core.read[i].width;
    }
    phase *last = last_of(chain);
    if (!own || !last || last->kind != PREPARE || !divides(step, &last->core.before, core))
        return gather(step, next, shared);
    next->awaited = last->awaited;
    next->flags = last->flags;
    next->core.before = last->core.before;
    find_made(&next->core);
    *last = *next;
    chain->shared = shared > chain->shared ? shared : chain->shared;
    return KERN_OK;
}

template <int R> static size_t recurrence_bytes(void) {
    static_assert(sizeof(head_memory<R>) <= THREADS / RECURRENCE_THREADS * sizeof(recurrence_memory<R>),
                  "room for both");
    return THREADS / RECURRENCE_THREADS * sizeof(recurrence_memory<R>);
}

kern_status cuda_chain_recurrence(const cuda_step *step, const recurrence *core, bool *fits) {
    const recurrence &a = *core;
    const bool wide = a.columns % 4 == 0 && cuda_is_wide(a.v) && cuda_is_wide(a.o) && cuda_is_wide(a.slots.p);
    *fits = wide && a.columns == a.width && a.depth <= 8 * RECURRENCE_GROUPS &&
            cuda_chain_takes(step, recurrence_bytes<8>());
    if (!*fits)
        return KERN_OK;
    phase next = {};
    next.kind = RECURRENCE;
    next.core.linear = a;
    next.core.fixed_decay = a.decay == KERN_DECAY_HEAD;
    const bool own = a.queries == a.states && a.keys == a.states && a.values == a.states && a.readers == 1 &&
                     a.columns <= PREPARE_PIECE;
    operands used = {};
    used.heads = a.states;
    used.read[0] = {a.q, a.depth}, used.read[1] = {a.k, a.depth}, used.read[2] = {a.v, a.width};
    used.read[3] = {a.decay == KERN_DECAY_NONE ? NULL : a.g, a.decay == KERN_DECAY_CHANNEL ? a.depth : 1},
    used.read[4] = {a.beta, 1};
    used.o = {a.o, a.columns};
    const size_t bytes = sizeof(float) * (size_t)a.states * (size_t)a.depth * (size_t)a.columns;
    return gather_core(step, &next, used, own, {(const char *)a.slots.p, a.slots.p ? bytes : 0}, recurrence_bytes<8>());
}

kern_status cuda_chain_mesa(const cuda_step *step, const mesa *core, bool *fits) {
    const mesa &a = *core;
    const size_t shared = a.depth == 64 ? sizeof(mesa_row_memory<64>) : sizeof(mesa_row_memory<128>);
    *fits = a.depth == a.width && (a.depth == 64 || a.depth == 128) && !a.x && !a.report && cuda_is_wide(a.slots.p) &&
            cuda_chain_takes(step, shared);
    if (!*fits)
        return KERN_OK;
    phase next = {};
    next.kind = MESA;
    next.core.solved = a;
    operands used = {};
    used.heads = a.heads;
    used.read[0] = {a.q, a.depth}, used.read[1] = {a.k, a.depth}, used.read[2] = {a.v, a.width};
    used.read[3] = {a.g, 1}, used.read[4] = {a.beta, 1};
    used.o = {a.o, a.width};
    const size_t bytes = sizeof(float) * (size_t)a.heads * (size_t)a.depth * (size_t)(a.depth + a.width);
    return gather_core(step, &next, used, true, {(const char *)a.slots.p, a.slots.p ? bytes : 0}, shared);
}

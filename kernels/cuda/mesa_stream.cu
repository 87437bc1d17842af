// SPDX-License-Identifier: Apache-2.0
// The Mesa layer's step of many sessions on sm_90: states stream past the solver, which should cost nothing.
//
// One block a processor walks its share of the heads of all rows. Its teams have a head each, with the arithmetic and
// thus the bits of mesa.cuh. The next heads' Hk, token and Lambda come by the copy engine into a ring of places that
// all teams share: whichever team is free takes the next of them, Hk into registers, which frees the place at once for
// the head after it. A team's Hv comes into a buffer of its own from the moment its last head has left that. So while
// some teams solve there are loads on their way, and teams do not keep step, as the ring serves them one after another.
//
// Heads of a block are numbered n = 0, 1, ..; head n comes into place n % RING as its load n / RING, and who takes it
// asks for head n + RING. A place has a barrier for each team, by turns: teams may wait for as many of its loads, all
// that came before these have been taken.
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/mesa.cuh"

template <int D, typename Stored> struct stream_shape {
    static constexpr int TEAMS = D == 128 ? 2 : 8, RING = D == 128 && sizeof(Stored) == sizeof(float) ? 1 : 3;
    static constexpr int THREADS = TEAMS * mesa_work<D>::THREADS;
    static constexpr int FEW_HEADS = TEAMS; // a processor: so many or fewer are left to tile_kernel
};

constexpr int BLOCK_HEADS = 1024; // at most, as a block keeps the slots of its heads in shared memory

template <int D, typename Stored> struct alignas(16) stream_place {
    float hk[MESA_TRIANGLE<Stored> ? MESA_FACTOR<D> : D * D]; // as in the slot
    mesa_token<D> token;
    float lambda_params[D];
    cuda_mbarrier here[stream_shape<D, Stored>::TEAMS];
};

template <int D, typename Stored> struct alignas(16) stream_memory {
    stream_place<D, Stored> place[stream_shape<D, Stored>::RING];
    Stored hv[stream_shape<D, Stored>::TEAMS][D * D];
    cuda_mbarrier values[stream_shape<D, Stored>::TEAMS]; // Hv is here
    mesa_work<D> work[stream_shape<D, Stored>::TEAMS];
    int32_t turn[stream_shape<D, Stored>::TEAMS];   // the head that a team has or waits for
    int32_t parity[stream_shape<D, Stored>::TEAMS]; // of the load of its Hv
    int32_t count, begun;                           // heads of this block, of these given to teams
    int32_t slot[BLOCK_HEADS];
};

constexpr size_t SHARED_LIMIT = 227 << 10; // of a block on sm_90
static_assert(sizeof(stream_memory<64, float>) <= SHARED_LIMIT && sizeof(stream_memory<128, float>) <= SHARED_LIMIT &&
                  sizeof(stream_memory<64, cuda_bf16>) <= SHARED_LIMIT &&
                  sizeof(stream_memory<128, cuda_bf16>) <= SHARED_LIMIT,
              "a block's memory");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Place of the block's n-th head among (row, head), as every row has one token also among tokens.
static __device__ __forceinline__ int32_t stream_item(int32_t n) {
    return n * (int32_t)gridDim.x + (int32_t)blockIdx.x;
}

template <int D, typename Stored>
static __device__ __forceinline__ mesa_state stream_home(const cuda_table *table, const mesa &a,
                                                         const stream_memory<D, Stored> &memory, int32_t n) {
    return mesa_state_of<Stored>(table, a, memory.slot[n], stream_item(n) % a.heads);
}

// One thread: Hk of head n comes as far as the second-level cache.
template <int D, typename Stored>
static __device__ __forceinline__ void stream_announce_keys(const cuda_table *table, const mesa &a,
                                                            const stream_memory<D, Stored> &memory, int32_t n) {
    const float *hk = n < memory.count ? stream_home(table, a, memory, n).hk : NULL;
    if (hk)
        cuda_bulk_prefetch(hk, sizeof memory.place[0].hk);
}

// One thread: what belongs to head n comes into its place, which nobody reads any more; the next load of the place is
// announced, so that memory does not rest while all teams solve.
template <int D, typename Stored>
static __device__ __forceinline__ void stream_fetch_keys(const cuda_table *table, const mesa &a,
                                                         stream_memory<D, Stored> &memory, int32_t n) {
    constexpr uint32_t VECTOR = D * sizeof(float), MATRIX = sizeof memory.place[0].hk;
    if (n >= memory.count)
        return;
    stream_place<D, Stored> &place = memory.place[n % stream_shape<D, Stored>::RING];
    cuda_mbarrier *barrier = &place.here[n / stream_shape<D, Stored>::RING % stream_shape<D, Stored>::TEAMS];
    const int64_t at = stream_item(n);
    const int32_t head = stream_item(n) % a.heads;
    const float *hk = stream_home(table, a, memory, n).hk;
    __pipeline_memcpy_async(&place.token.g, a.g + at, sizeof(float));
    __pipeline_memcpy_async(&place.token.beta, a.beta + at, sizeof(float));
    cuda_mbarrier_arrive_after_copies(barrier);
    cuda_mbarrier_expect(barrier, (hk ? MATRIX : 0) + 4 * VECTOR);
    cuda_mbarrier_arrive(barrier);
    cuda_bulk_load(place.token.q, a.q + at * D, VECTOR, barrier);
    cuda_bulk_load(place.token.k, a.k + at * D, VECTOR, barrier);
    cuda_bulk_load(place.token.v, a.v + at * D, VECTOR, barrier);
    cuda_bulk_load(place.lambda_params, a.lambda_params + (int64_t)head * D, VECTOR, barrier);
    if (hk)
        cuda_bulk_load_once(place.hk, hk, MATRIX, barrier);
    stream_announce_keys(table, a, memory, n + stream_shape<D, Stored>::RING);
}

// One thread of a team that has no head: the next head becomes the team's, its Hv and its row's solver on their way.
template <int D, typename Stored>
static __device__ __forceinline__ void stream_begin_head(const cuda_table *table, const mesa &a,
                                                         stream_memory<D, Stored> &memory, int32_t team) {
    mesa_work<D> &work = memory.work[team];
    const int32_t n = atomicAdd(&memory.begun, 1);
    memory.turn[team] = n;
    memory.parity[team] ^= 1;
    if (n >= memory.count)
        return;
    const mesa_state home = stream_home(table, a, memory, n);
    if (home.hv) {
        cuda_mbarrier_expect(&memory.values[team], sizeof memory.hv[0]);
        cuda_bulk_load_once(memory.hv[team], home.hv, sizeof memory.hv[0], &memory.values[team]);
    }
    cuda_mbarrier_arrive(&memory.values[team]);
    const kern_row *row = &table->row[stream_item(n) / a.heads];
    __pipeline_memcpy_async(&work.row.position, &row->position, sizeof row->position);
    __pipeline_memcpy_async(&work.row.solver.mode, &row->solver.mode, sizeof row->solver.mode);
    __pipeline_memcpy_async(&work.row.solver.max_steps, &row->solver.max_steps, sizeof row->solver.max_steps);
    __pipeline_memcpy_async(&work.row.solver.tolerance, &row->solver.tolerance, sizeof row->solver.tolerance);
    __pipeline_commit();
    work.home = home;
}

// Before anything that an earlier kernel writes is touched: the row table went over before all of them.
template <int D, typename Stored>
static __device__ __forceinline__ void stream_open(const cuda_table *table, const mesa &a,
                                                   stream_memory<D, Stored> &memory) {
    const int32_t items = table->n_rows * a.heads, block = (int32_t)blockIdx.x, blocks = (int32_t)gridDim.x;
    const int32_t count = items > block ? (items - block + blocks - 1) / blocks : 0;
    for (int32_t n = threadIdx.x; n < count; n += blockDim.x)
        memory.slot[n] = table->row[stream_item(n) / a.heads].slot;
    if (threadIdx.x == 0) {
        memory.count = count;
        memory.begun = 0;
        for (stream_place<D, Stored> &place : memory.place)
            for (cuda_mbarrier &barrier : place.here)
                cuda_mbarrier_make(&barrier, 2); // who asked for the copies, and that thread's small copies
        for (cuda_mbarrier &barrier : memory.values)
            cuda_mbarrier_make(&barrier, 1);
        cuda_mbarrier_made();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        stream_announce_keys(table, a, memory, 0);
}

// The token of head n with its Lambda and Hk, from their place.
template <int D, typename Stored, typename Team>
static __device__ __forceinline__ void stream_take(const mesa &a, const stream_place<D, Stored> &place,
                                                   mesa_work<D> &work, mesa_tile<D, Team> &tile) {
    mesa_load_keys<Stored>(tile, place.hk);
    mesa_take_token<D, Team>(place.token, !work.home.hk, work);
    for (int32_t d = Team::thread(); d < D; d += Team::size())
        work.solve.lambda[d] = mesa_lambda_of(a, place.lambda_params[d]);
}

// A barrier of the team stands between every write to its shared memory and the reads of other threads. Exact solves
// keep their factor in the head's place, which is let go after them. What is known about the head is read again where
// it is needed: the solver leaves no register free.
template <typename Team, int D, typename Stored>
static __device__ __forceinline__ void stream_heads(const cuda_table *table, const mesa &a,
                                                    stream_memory<D, Stored> &memory) {
    using Shape = stream_shape<D, Stored>;
    const int32_t team = Team::number();
    const bool porter = Team::thread() == Team::size() - 1;
    mesa_work<D> &work = memory.work[team];
    mesa_tile<D, Team> tile;
    if (porter) {
        memory.parity[team] = 1;
        stream_begin_head(table, a, memory, team);
    }
    for (;;) {
        Team::sync();
        const int32_t n = memory.turn[team], load = n / Shape::RING;
        if (n >= memory.count)
            return;
        stream_place<D, Stored> &place = memory.place[n % Shape::RING];
        cuda_mbarrier_wait(&place.here[load % Shape::TEAMS], load / Shape::TEAMS & 1);
        stream_take(a, place, work, tile);
        if (porter)
            __pipeline_wait_prior(0);
        Team::sync();
        if (porter) {
            if (work.row.solver.mode != KERN_SOLVE_EXACT)
                stream_fetch_keys(table, a, memory, n + Shape::RING);
            mesa_choose_rounding<Stored>(work, work.row.position, stream_item(n) % a.heads);
        }
        mesa_update_keys(tile, work);
        if (work.home.hk)
            mesa_store_keys<Stored, true>(tile, work.home.hk);
        mesa_open(tile, work.solve);
        Team::sync();
        const kern_solve_report report =
            mesa_solve(tile, work.solve, memory.place[memory.turn[team] % Shape::RING].hk, work.row.solver);
        const bool exact = work.row.solver.mode == KERN_SOLVE_EXACT;
        if (exact)
            cuda_bulk_fence();
        cuda_mbarrier_wait(&memory.values[team], (uint32_t)memory.parity[team]);
        Team::sync();
        if (porter && exact)
            stream_fetch_keys(table, a, memory, memory.turn[team] + Shape::RING);
        const int64_t at = stream_item(memory.turn[team]);
        mesa_read_values<Team, true>(work, memory.hv[team], (Stored *)work.home.hv);
        Team::sync();
        if (porter)
            stream_begin_head(table, a, memory, team);
        mesa_write_results<D, Team>(a, at, work, report);
    }
}

#endif

template <int D, typename Stored>
static __global__ void __launch_bounds__(stream_shape<D, Stored>::THREADS, 1)
    stream_kernel(const cuda_table *table, const mesa a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cuda_begin();
    extern __shared__ __align__(16) char shared[];
    stream_memory<D, Stored> &memory = *(stream_memory<D, Stored> *)shared;
    stream_open(table, a, memory);
    cuda_await();
    if (threadIdx.x == 0)
        for (int32_t n = 0; n < stream_shape<D, Stored>::RING; n++)
            stream_fetch_keys(table, a, memory, n);
    constexpr int THREADS = mesa_work<D>::THREADS;
    if (stream_shape<D, Stored>::TEAMS > 2)
        stream_heads<cuda_team<THREADS>>(table, a, memory);
    else if (threadIdx.x < THREADS)
        stream_heads<cuda_team<THREADS, 0>>(table, a, memory);
    else
        stream_heads<cuda_team<THREADS, 1>>(table, a, memory);
#endif
}

// ----------------------------------------------------------------------------------------------------------- launching

template <int D, typename Stored> static bool can_stream(const cuda_step *step, const mesa &a) {
    const int64_t items = (int64_t)step->rows * a.heads, processors = step->cuda->processors;
    return items > stream_shape<D, Stored>::FEW_HEADS * processors && items <= BLOCK_HEADS * processors &&
           sizeof(stream_memory<D, Stored>) <= step->cuda->shared_limit;
}

template <int D, typename Stored> static kern_status launch(const cuda_step *step, const mesa &a) {
    constexpr size_t bytes = sizeof(stream_memory<D, Stored>);
    const kern_status status = cuda_allow_shared(stream_kernel<D, Stored>, bytes);
    if (status)
        return status;
    return cuda_start(step, stream_kernel<D, Stored>, step->cuda->processors, stream_shape<D, Stored>::THREADS, bytes,
                      step->table, a);
}

bool cuda_mesa_streams(const cuda_step *step, const mesa &a, kern_storage storage) {
    const bool can = storage == KERN_STORE_F32
                         ? (a.depth == 64 ? can_stream<64, float>(step, a) : can_stream<128, float>(step, a))
                         : (a.depth == 64 ? can_stream<64, cuda_bf16>(step, a) : can_stream<128, cuda_bf16>(step, a));
    return can && step->cuda->overlaps && step->generated && cuda_is_wide(a.q) && cuda_is_wide(a.k) &&
           cuda_is_wide(a.v) && cuda_is_wide(a.lambda_params);
}

kern_status cuda_mesa_stream(const cuda_step *step, const mesa &a, kern_storage storage) {
    if (storage == KERN_STORE_F32)
        return a.depth == 64 ? launch<64, float>(step, a) : launch<128, float>(step, a);
    return a.depth == 64 ? launch<64, cuda_bf16>(step, a) : launch<128, cuda_bf16>(step, a);
}

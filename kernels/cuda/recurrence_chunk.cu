// SPDX-License-Identifier: Apache-2.0
// The recurrence family's chunk form on the tensor cores (sm_90), decays of a head: what prompt rows run.
//
//   A_ij = w_i k_i.k_j E_ij (i > j)       T = (I + A)^-1 diag(w)       P_ij = q_i.k_j E_ij (i >= j)
//   U = T (V - e^c K S), or w V           O = scale (e^c Q S + P U)    S = e^(c_C) S + (e^(c_C - c) K)^T U
//
// prepare_kernel: a block has one chunk of one state and makes what does not depend on S: K and Q as operands, P, T
// (a record). All chunks at once. states_kernel: a warp has 16 columns of a state, transposed, in registers from a
// row's first chunk to its last, so that every result is the left operand of the next product as it stands; warps
// exchange nothing. A block's warps share the records, which the copy engine brings one ahead.
//
// Records of all chunks need not fit in the workspace: then chunks go in groups, and the one row that is cut between
// two of them leaves its state in its slot, or in the workspace where it has none. Numbers are those of split.cuh; a
// row's bits depend on its chunks alone.
#include <utility>

#include "kernels/cuda/recurrence_prepare.cuh"
#include "kernels/cuda/recurrence_team.cuh"

constexpr int STATES_WARPS = 8;
constexpr size_t RECORDS_BYTES = (size_t)288 << 20;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ---------------------------------------------------------------------------------------------------------- the states

// One chunk of a strip by a warp; u: V^T.
template <int D, bool CHANNEL, bool DELTA>
static __device__ __forceinline__ void run_chunk(const recurrence &a, const recurrence_record<D, CHANNEL> &record,
                                                 const kern_chunk &chunk, const recurrence_strip &strip,
                                                 split_block (&u)[CHUNK_TILES], split_block (&state)[D / SPLIT_TILE]) {
    const int32_t lane = strip.lane;
    split_powers powers, written_powers;
    split_left<2> s[D / SPLIT_TILE], written[CHUNK_TILES];
    split_strip(state, powers, s);
    if (DELTA) {
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            strip_errors(record, strip, n, split_multiply_rows(s, record.k[n], lane), powers, u[n]);
        split_strip(u, written_powers, written);
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            strip_solved(record, strip, n, strip_lower(written, record.system, n, lane), written_powers, u[n]);
    } else {
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            strip_weigh(strip, n, record.weight, u[n]);
    }
    split_strip(u, written_powers, written);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        split_block o;
        strip_read(record, a.scale, strip, n, split_multiply_rows(s, record.q[n], lane), powers,
                   strip_lower(written, record.pairs, n, lane), written_powers, o);
        strip_store(a, strip, chunk, n, o);
        strip_weigh(strip, n, record.key_end, u[n]);
    }
    split_strip(u, written_powers, written);
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        strip_advance(record, strip, n, strip_keys<D>(written, recurrence_keys_to_end(record), n, lane), written_powers,
                      state[n]);
}

static __device__ __forceinline__ chunk_run<float> states_run(const cuda_table *table, const chunk_group &group,
                                                              int32_t row, int32_t state) {
    float *home = recurrence_state<float>(table, group.a, table->row[row].slot, state);
    const int64_t at = (int64_t)state * group.a.depth * group.a.columns;
    return chunk_run_of(table, row, group.first, group.count, home, {group.carry[0] + at, group.carry[1] + at});
}

// Strips of a state by a warp each; item: a state and a slice of it.
template <int D, bool CHANNEL, bool DELTA>
static __device__ void run_states(const cuda_table *table, const chunk_group &group, int32_t row, int32_t item,
                                  char *memory) {
    states_shared<D, CHANNEL> &shared = *(states_shared<D, CHANNEL> *)memory;
    const recurrence &a = group.a;
    const int32_t warps = blockDim.x / CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    const recurrence_strip strip = recurrence_strip_of(a, item / a.slices, item % a.slices * warps + warp);
    const chunk_run<float> run = states_run(table, group, row, strip.state);
    if (run.first >= run.last)
        return;
    if (threadIdx.x == 0)
        begin_records<D, CHANNEL, false>(group, run, strip.state, warps, shared);
    split_block state[D / SPLIT_TILE] = {};
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        if (run.from)
            strip_places(a, strip, n, [&](int half, int i, int64_t at) { state[n].v[half][i] = run.from[at]; });
    __syncthreads();
    for (int32_t at = 0; run.first + at < run.last; at++) {
        const kern_chunk chunk = table->chunk[run.first + at];
        const int32_t stage = at % STAGES<D, CHANNEL>;
        const uint32_t parity = at / STAGES<D, CHANNEL> % 2;
        split_block u[CHUNK_TILES];
        if (float *snapshot = recurrence_snapshot(a, run.first + at, strip.state))
#pragma unroll
            for (int n = 0; n < D / SPLIT_TILE; n++)
                strip_places(a, strip, n, [&](int half, int i, int64_t at) { snapshot[at] = state[n].v[half][i]; });
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            strip_values(a, strip, chunk, n, u[n]);
        cuda_mbarrier_wait(&shared.full[stage], parity);
        run_chunk<D, CHANNEL, DELTA>(a, shared.record[stage], chunk, strip, u, state);
        __syncwarp();
        if (strip.lane == 0)
            cuda_mbarrier_arrive(&shared.empty[stage]);
        if (threadIdx.x == 0) {
            cuda_mbarrier_wait(&shared.empty[stage], parity);
            bring<D, CHANNEL, false>(group, run, strip.state, at + STAGES<D, CHANNEL>, shared);
        }
        __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        if (run.to)
            strip_places(a, strip, n, [&](int half, int i, int64_t at) { run.to[at] = state[n].v[half][i]; });
}

// One strip by a block.
template <int D, bool CHANNEL, bool DELTA>
static __device__ void run_team(const cuda_table *table, const chunk_group &group, int32_t row, int32_t item,
                                char *memory) {
    constexpr int TILES = team_state<D>::TILES;
    states_shared<D, CHANNEL> &shared = *(states_shared<D, CHANNEL> *)memory;
    team_shared<D> &team = *(team_shared<D> *)(&shared + 1);
    const recurrence &a = group.a;
    const int32_t warp = threadIdx.x / CUDA_WARP;
    const recurrence_strip strip = recurrence_strip_of(a, item / a.slices, item % a.slices);
    const chunk_run<float> run = states_run(table, group, row, strip.state);
    if (run.first >= run.last)
        return;
    if (threadIdx.x == 0)
        begin_records<D, CHANNEL, false>(group, run, strip.state, 1, shared);
    team_state<D> state = {};
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (run.from)
            strip_places(a, strip, warp * TILES + n,
                         [&](int half, int i, int64_t at) { state.s[n].v[half][i] = run.from[at]; });
    team_tell(team.state_largest, warp, strip.lane, state.s);
    __syncthreads();
    for (int32_t at = 0; run.first + at < run.last; at++) {
        const kern_chunk chunk = table->chunk[run.first + at];
        const int32_t stage = at % STAGES<D, CHANNEL>;
        split_block u[1];
        if (float *snapshot = recurrence_snapshot(a, run.first + at, strip.state))
#pragma unroll
            for (int n = 0; n < TILES; n++)
                strip_places(a, strip, warp * TILES + n,
                             [&](int half, int i, int64_t at) { snapshot[at] = state.s[n].v[half][i]; });
        strip_values(a, strip, chunk, warp, u[0]);
        cuda_mbarrier_wait(&shared.full[stage], at / STAGES<D, CHANNEL> % 2);
        team_chunk<D, CHANNEL, DELTA>(a, shared.record[stage], chunk, strip, warp, team, u, state);
        if (threadIdx.x == 0) // behind its last barrier
            bring<D, CHANNEL, false>(group, run, strip.state, at + STAGES<D, CHANNEL>, shared);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (run.to)
            strip_places(a, strip, warp * TILES + n,
                         [&](int half, int i, int64_t at) { run.to[at] = state.s[n].v[half][i]; });
}

#endif

template <int D>
static __global__ void __launch_bounds__(PREPARE_THREADS, 2)
    prepare_kernel(const cuda_table *table, const chunk_group group) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    prepare_shared<D> &shared = *(prepare_shared<D> *)memory;
    const int32_t state = blockIdx.x % group.a.states;
    prepare_record<D>(table, group.a, table->chunk[group.first + blockIdx.x / group.a.states], state, true, shared);
    if (threadIdx.x == 0)
        cuda_bulk_store((recurrence_record<D, false> *)group.records + blockIdx.x, &shared.record,
                        sizeof shared.record);
#endif
}

template <int D>
static __global__ void __launch_bounds__(CHANNEL_THREADS, 1)
    prepare_channel_kernel(const cuda_table *table, const chunk_group group) {
    cuda_begin();
    cuda_await();
    extern __shared__ __align__(128) char memory[];
    const recurrence &a = group.a;
    const int32_t state = blockIdx.x % a.states;
    channel_prepare<D>(table, a, table->chunk[group.first + blockIdx.x / a.states], state, true,
                       ((recurrence_record<D, true> *)group.records)[blockIdx.x], *(channel_shared<D> *)memory);
}

template <int D, bool CHANNEL, bool DELTA>
static __global__ void __launch_bounds__(STATES_WARPS *CUDA_WARP, 1)
    states_kernel(const cuda_table *table, const chunk_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t items = group.a.states * group.a.slices;
    run_states<D, CHANNEL, DELTA>(table, group, first_row + blockIdx.x / items, blockIdx.x % items, memory);
#endif
}

template <int D, bool CHANNEL, bool DELTA>
static __global__ void __launch_bounds__(TEAM_THREADS, 1)
    team_kernel(const cuda_table *table, const chunk_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t items = group.a.states * group.a.slices;
    run_team<D, CHANNEL, DELTA>(table, group, first_row + blockIdx.x / items, blockIdx.x % items, memory);
#endif
}

// ------------------------------------------------------------------------------------------------------------
// launching

constexpr int DEPTH_LEAST = 64, DEPTH_MOST = 128;

// Where strips are few each has a block, elsewhere the warps of a block share the records. Both have the same bits.
template <int D, bool CHANNEL, bool DELTA> static kern_status launch_states(const cuda_step *step, chunk_group group) {
    const int32_t strips = (group.a.columns + SPLIT_TILE - 1) / SPLIT_TILE, rows = step->rows - step->generated_rows;
    const bool few = (int64_t)rows * group.a.states * strips <= step->cuda->processors;
    const int warps = few ? TEAM_WARPS : strips < STATES_WARPS ? strips : STATES_WARPS;
    const size_t bytes = states_bytes<D, CHANNEL>() + (few ? sizeof(team_shared<D>) : 0);
    const auto kernel = few ? team_kernel<D, CHANNEL, DELTA> : states_kernel<D, CHANNEL, DELTA>;
    group.a.slices = few ? strips : (strips + STATES_WARPS - 1) / STATES_WARPS;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status
                  : cuda_start(step, kernel, rows * group.a.states * group.a.slices, warps * CUDA_WARP, bytes,
                               step->table, group, step->generated_rows);
}

template <int D> static kern_status launch_prepare(const cuda_step *step, const chunk_group &group) {
    const bool channel = group.a.decay == KERN_DECAY_CHANNEL;
    const size_t bytes = channel ? sizeof(channel_shared<D>) : prepare_bytes<D>();
    const auto kernel = channel ? prepare_channel_kernel<D> : prepare_kernel<D>;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status
                  : cuda_start(step, kernel, group.count * group.a.states, channel ? CHANNEL_THREADS : PREPARE_THREADS,
                               bytes, step->table, group);
}

template <int D, bool CHANNEL> static kern_status launch_groups(const cuda_step *step, chunk_group group) {
    const size_t of_chunk = sizeof(recurrence_record<D, CHANNEL>) * (size_t)group.a.states;
    const int32_t most = (int32_t)(RECORDS_BYTES / of_chunk);
    kern_status status = KERN_OK;
    for (group.first = 0; !status && group.first < step->chunks; group.first += most) {
        const int32_t left = step->chunks - group.first;
        group.count = left < most ? left : most;
        status = launch_prepare<D>(step, group);
        if (!status)
            status = group.a.delta ? launch_states<D, CHANNEL, true>(step, group)
                                   : launch_states<D, CHANNEL, false>(step, group);
        std::swap(group.carry[0], group.carry[1]);
    }
    return status;
}

static size_t carry_bytes(const kern_recurrence *f) {
    return 2 * sizeof(float) * (size_t)f->heads * (size_t)f->key_width * (size_t)(f->value_width + 1);
}

bool cuda_recurrence_has_chunks(const kern_cuda *cuda, const kern_recurrence *f) {
    constexpr size_t most = states_bytes<DEPTH_MOST, false>() + sizeof(team_shared<DEPTH_MOST>);
    static_assert(sizeof(channel_shared<DEPTH_MOST>) <= most, "what needs the most");
    return cuda->overlaps && cuda->shared_limit >= most && f->storage == KERN_STORE_F32 && f->key_width <= DEPTH_MOST &&
           f->query_heads <= f->heads &&
           sizeof(recurrence_record<DEPTH_MOST, true>) * (size_t)f->heads <= RECORDS_BYTES;
}

size_t cuda_recurrence_chunk_workspace(const kern_recurrence *f) {
    return RECORDS_BYTES + carry_bytes(f);
}

kern_status cuda_recurrence_chunks(const cuda_step *step, const recurrence &a) {
    chunk_group group = {};
    group.a = a;
    group.records = step->cuda->workspace;
    group.carry[0] = (float *)(step->cuda->workspace + RECORDS_BYTES);
    group.carry[1] = group.carry[0] + (int64_t)a.states * a.depth * a.columns;
    if (a.decay == KERN_DECAY_CHANNEL)
        return a.depth <= DEPTH_LEAST ? launch_groups<DEPTH_LEAST, true>(step, group)
                                      : launch_groups<DEPTH_MOST, true>(step, group);
    return a.depth <= DEPTH_LEAST ? launch_groups<DEPTH_LEAST, false>(step, group)
                                  : launch_groups<DEPTH_MOST, false>(step, group);
}

// SPDX-License-Identifier: Apache-2.0
// The recurrence family's chunk form on the tensor cores (sm_90), decays of a head: what prompt rows run.
//
//   A_ij = w_i k_i.k_j E_ij (i > j)       T = (I + A)^-1 diag(w)       P_ij = q_i.k_j E_ij (i >= j)
//   U = T (V - e^c K S), or w V           O = scale (e^c Q S + P U)    S = e^(c_C) S + (e^(c_C - c) K)^T U
//
// prepare_kernel: a block has one chunk of one state and makes what does not depend on S: K and Q as operands, P, T
// (a record). All chunks at once. states_kernel: a warpgroup has 64 columns of a state, transposed, in registers from a
// row's first chunk to its last, 16 of them a warp (a strip), so that every result is the left operand of the next
// product as it stands; right operands are the records, which the copy engine brings ahead and the warpgroups of a
// block share.
//
// Records of all chunks need not fit in the workspace: then chunks go in groups, and the one row that is cut between
// two of them leaves its state in its slot, or in the workspace where it has none. Numbers are those of split.cuh, of
// one limb where the device is `fast`; a row's bits depend on its chunks alone.
#include <utility>

#include "kernels/cuda/recurrence_prepare.cuh"
#include "kernels/cuda/recurrence_team.cuh"

constexpr size_t RECORDS_BYTES = (size_t)288 << 20;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ---------------------------------------------------------------------------------------------------------- the states

// U^T by the delta rule in place of V^T.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void
group_correct(const recurrence &a, const recurrence_record<D, CHANNEL, LIMBS> &record, const kern_chunk &chunk,
              const recurrence_strip &strip, split_left<LIMBS> (&s)[D / SPLIT_TILE], const split_powers &powers,
              split_block (&u)[CHUNK_TILES]) {
    split_group<LIMBS, CHUNK_TILES> sum;
    split_left<LIMBS> errors[CHUNK_TILES];
    split_powers error_powers;
    split_group_rows(sum, s, record.k);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_values(a, strip, chunk, n, u[n]);
    split_group_wait<0>(sum, s);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_errors(record, strip, n, split_totals(sum, n), powers, u[n]);
    split_strip(u, error_powers, errors);
    split_group_lower(sum, errors, record.system);
    split_group_wait<0>(sum, errors);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_solved(record, strip, n, split_totals(sum, n), error_powers, u[n]);
}

// O^T of the chunk; u: U^T.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void
group_read(const recurrence &a, const recurrence_record<D, CHANNEL, LIMBS> &record, const kern_chunk &chunk,
           const recurrence_strip &strip, split_left<LIMBS> (&s)[D / SPLIT_TILE], const split_powers &powers,
           const split_block (&u)[CHUNK_TILES]) {
    split_group<LIMBS, CHUNK_TILES> sum;
    split_left<LIMBS> written[CHUNK_TILES];
    split_powers written_powers;
    split_block o[CHUNK_TILES];
    split_group_rows(sum, s, record.q);
    split_strip(u, written_powers, written);
    split_group_wait<0>(sum, s);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_read_state(record, a.scale, strip, n, split_totals(sum, n), powers, o[n]);
    split_group_lower(sum, written, record.pairs);
    split_group_wait<0>(sum, written);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_read_chunk(record, a.scale, strip, n, split_totals(sum, n), written_powers, o[n]);
    strip_store(a, strip, chunk, 0, o);
}

// One chunk of a warpgroup's columns; a warp's strip.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ __forceinline__ void
run_chunk(const recurrence &a, const recurrence_record<D, CHANNEL, LIMBS> &record, const kern_chunk &chunk,
          const recurrence_strip &strip, split_block (&state)[D / SPLIT_TILE]) {
    split_powers powers;
    split_left<LIMBS> s[D / SPLIT_TILE];
    split_block u[CHUNK_TILES];
    split_strip(state, powers, s);
    if constexpr (DELTA) {
        group_correct(a, record, chunk, strip, s, powers, u);
    } else {
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++) {
            strip_values(a, strip, chunk, n, u[n]);
            strip_weigh(strip, n, record.weight, u[n]);
        }
    }
    group_read(a, record, chunk, strip, s, powers, u);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_weigh(strip, n, record.key_end, u[n]);
    strip_write(u, recurrence_keys_to_end(record), [&](int n, const split_block &sum, const split_powers &of_u) {
        strip_advance(record, strip, n, sum, of_u, state[n]);
    });
}

static __device__ __forceinline__ chunk_run<float> states_run(const cuda_table *table, const chunk_group &group,
                                                              int32_t row, int32_t state) {
    float *home = recurrence_state<float>(table, group.a, table->row[row].slot, state);
    const int64_t at = (int64_t)state * group.a.depth * group.a.columns;
    return chunk_run_of(table, row, group.first, group.count, home, {group.carry[0] + at, group.carry[1] + at});
}

// Columns of a state by a warpgroup each; item: a state and a slice of it.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ void run_states(const cuda_table *table, const chunk_group &group, int32_t row, int32_t item,
                                  states_shared<D, CHANNEL, LIMBS> &shared) {
    constexpr int DEPTH = STAGES<D, CHANNEL, LIMBS>;
    const recurrence &a = group.a;
    const int32_t warps = blockDim.x / CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    const recurrence_strip strip = recurrence_strip_of(a, item / a.slices, item % a.slices * warps + warp);
    const chunk_run<float> run = states_run(table, group, row, strip.state);
    if (run.first >= run.last)
        return;
    if (threadIdx.x == 0)
        begin_records<D, CHANNEL, false>(group, run, strip.state, shared);
    split_block state[D / SPLIT_TILE] = {};
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        if (run.from)
            strip_places(a, strip, n, [&](int half, int i, int64_t at) { state[n].v[half][i] = run.from[at]; });
    __syncthreads();
    for (int32_t at = 0; run.first + at < run.last; at++) {
        const int32_t index = run.first + at, stage = at % DEPTH;
        const kern_chunk chunk = table->chunk[index];
        const uint32_t parity = at / DEPTH % 2;
        if (index + 1 < run.last)
            strip_ask(strip, table->chunk[index + 1], recurrence_value(a, table->chunk[index + 1].token0, strip.state),
                      (int32_t)(a.values * a.width), a.width);
        if (float *snapshot = recurrence_snapshot(a, index, strip.state))
#pragma unroll
            for (int n = 0; n < D / SPLIT_TILE; n++)
                strip_places(a, strip, n, [&](int half, int i, int64_t at) { snapshot[at] = state[n].v[half][i]; });
        cuda_mbarrier_wait(&shared.full[stage], parity);
        run_chunk<D, CHANNEL, DELTA>(a, shared.record[stage], chunk, strip, state);
        leave_record<D, CHANNEL, false>(group, run, strip.state, at, shared);
    }
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        if (run.to)
            strip_places(a, strip, n, [&](int half, int i, int64_t at) { run.to[at] = state[n].v[half][i]; });
}

// One strip by a block.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ void run_team(const cuda_table *table, const chunk_group &group, int32_t row, int32_t item,
                                states_shared<D, CHANNEL, LIMBS> &shared) {
    constexpr int TILES = team_state<D>::TILES, DEPTH = STAGES<D, CHANNEL, LIMBS>;
    team_shared<D, LIMBS> &team = *(team_shared<D, LIMBS> *)(&shared + 1);
    const recurrence &a = group.a;
    const int32_t warp = threadIdx.x / CUDA_WARP;
    const recurrence_strip strip = recurrence_strip_of(a, item / a.slices, item % a.slices);
    const chunk_run<float> run = states_run(table, group, row, strip.state);
    if (run.first >= run.last)
        return;
    if (threadIdx.x == 0)
        begin_records<D, CHANNEL, false>(group, run, strip.state, shared);
    team_state<D> state = {};
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (run.from)
            strip_places(a, strip, warp * TILES + n,
                         [&](int half, int i, int64_t at) { state.s[n].v[half][i] = run.from[at]; });
    team_tell(team.state_largest, warp, strip.lane, state.s);
    __syncthreads();
    for (int32_t at = 0; run.first + at < run.last; at++) {
        const int32_t index = run.first + at, stage = at % DEPTH;
        const kern_chunk chunk = table->chunk[index];
        split_block u[1];
        if (float *snapshot = recurrence_snapshot(a, index, strip.state))
#pragma unroll
            for (int n = 0; n < TILES; n++)
                strip_places(a, strip, warp * TILES + n,
                             [&](int half, int i, int64_t at) { snapshot[at] = state.s[n].v[half][i]; });
        strip_values(a, strip, chunk, warp, u[0]);
        cuda_mbarrier_wait(&shared.full[stage], at / DEPTH % 2);
        team_chunk<D, CHANNEL, DELTA>(a, shared.record[stage], chunk, strip, warp, team, u, state);
        if (threadIdx.x == 0) // behind its last barrier
            bring<D, CHANNEL, false>(group, run, strip.state, at + DEPTH, shared);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (run.to)
            strip_places(a, strip, warp * TILES + n,
                         [&](int half, int i, int64_t at) { run.to[at] = state.s[n].v[half][i]; });
}

#endif

template <int D, int LIMBS>
static __global__ void __launch_bounds__(PREPARE_THREADS, LIMBS == 1 ? 3 : 2)
    prepare_kernel(const cuda_table *table, const chunk_group group) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    prepare_shared<D, LIMBS> &shared = *(prepare_shared<D, LIMBS> *)memory;
    const int32_t state = blockIdx.x % group.a.states;
    prepare_record(table, group.a, table->chunk[group.first + blockIdx.x / group.a.states], state, true, shared);
    if (threadIdx.x == 0)
        cuda_bulk_store((recurrence_record<D, false, LIMBS> *)group.records + blockIdx.x, &shared.record,
                        sizeof shared.record);
#endif
}

template <int D, int LIMBS>
static __global__ void __launch_bounds__(CHANNEL_THREADS, 1)
    prepare_channel_kernel(const cuda_table *table, const chunk_group group) {
    cuda_begin();
    cuda_await();
    extern __shared__ __align__(128) char memory[];
    const recurrence &a = group.a;
    const int32_t state = blockIdx.x % a.states;
    channel_prepare(table, a, table->chunk[group.first + blockIdx.x / a.states], state, true,
                    ((recurrence_record<D, true, LIMBS> *)group.records)[blockIdx.x], *(channel_shared<D> *)memory);
}

template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __global__ void __launch_bounds__(STATES_GROUPS *GROUP_THREADS, 1)
    states_kernel(const cuda_table *table, const chunk_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t items = group.a.states * group.a.slices;
    run_states<D, CHANNEL, DELTA>(table, group, first_row + blockIdx.x / items, blockIdx.x % items,
                                  *(states_shared<D, CHANNEL, LIMBS> *)memory);
#endif
}

template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __global__ void __launch_bounds__(TEAM_THREADS, 1)
    team_kernel(const cuda_table *table, const chunk_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t items = group.a.states * group.a.slices;
    run_team<D, CHANNEL, DELTA>(table, group, first_row + blockIdx.x / items, blockIdx.x % items,
                                *(states_shared<D, CHANNEL, LIMBS> *)memory);
#endif
}

// ----------------------------------------------------------------------------------------------------------- launching

constexpr int DEPTH_LEAST = 64, DEPTH_MOST = 128;

// Where strips are few each has a block, elsewhere warpgroups share the records. Both have the same bits.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static kern_status launch_states(const cuda_step *step, chunk_group group) {
    const int32_t strips = (group.a.columns + SPLIT_TILE - 1) / SPLIT_TILE, rows = step->rows - step->generated_rows;
    const bool few = (int64_t)rows * group.a.states * strips <= step->cuda->processors;
    const size_t bytes = states_bytes<D, CHANNEL, LIMBS>() + (few ? sizeof(team_shared<D, LIMBS>) : 0);
    const auto kernel = few ? team_kernel<D, CHANNEL, DELTA, LIMBS> : states_kernel<D, CHANNEL, DELTA, LIMBS>;
    const int groups = few ? 1 : recurrence_groups(step, rows, group.a);
    if (few)
        group.a.slices = strips;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status
                  : cuda_start(step, kernel, rows * group.a.states * group.a.slices,
                               few ? TEAM_THREADS : groups * GROUP_THREADS, bytes, step->table, group,
                               step->generated_rows);
}

template <int D, bool CHANNEL, int LIMBS>
static kern_status launch_prepare(const cuda_step *step, const chunk_group &group) {
    const int blocks = group.count * group.a.states;
    if constexpr (CHANNEL) {
        const kern_status status = cuda_allow_shared(prepare_channel_kernel<D, LIMBS>, sizeof(channel_shared<D>));
        return status ? status
                      : cuda_start(step, prepare_channel_kernel<D, LIMBS>, blocks, CHANNEL_THREADS,
                                   sizeof(channel_shared<D>), step->table, group);
    } else {
        constexpr size_t bytes = prepare_bytes<D, LIMBS>();
        const kern_status status = cuda_allow_shared(prepare_kernel<D, LIMBS>, bytes);
        return status ? status
                      : cuda_start(step, prepare_kernel<D, LIMBS>, blocks, PREPARE_THREADS, bytes, step->table, group);
    }
}

template <int D, bool CHANNEL, int LIMBS> static kern_status launch_groups(const cuda_step *step, chunk_group group) {
    const size_t of_chunk = sizeof(recurrence_record<D, CHANNEL, LIMBS>) * (size_t)group.a.states;
    const int32_t most = (int32_t)(RECORDS_BYTES / of_chunk);
    kern_status status = KERN_OK;
    for (group.first = 0; !status && group.first < step->chunks; group.first += most) {
        const int32_t left = step->chunks - group.first;
        group.count = left < most ? left : most;
        status = launch_prepare<D, CHANNEL, LIMBS>(step, group);
        if (!status)
            status = group.a.delta ? launch_states<D, CHANNEL, true, LIMBS>(step, group)
                                   : launch_states<D, CHANNEL, false, LIMBS>(step, group);
        std::swap(group.carry[0], group.carry[1]);
    }
    return status;
}
template <int D, bool CHANNEL> static kern_status launch(const cuda_step *step, const chunk_group &group) {
    return step->cuda->fast ? launch_groups<D, CHANNEL, 1>(step, group) : launch_groups<D, CHANNEL, 2>(step, group);
}

static size_t carry_bytes(const kern_recurrence *f) {
    return 2 * sizeof(float) * (size_t)f->heads * (size_t)f->key_width * (size_t)(f->value_width + 1);
}

bool cuda_recurrence_has_chunks(const kern_cuda *cuda, const kern_recurrence *f) {
    constexpr size_t most = RECORDS_MOST + 128 + sizeof(team_shared<DEPTH_MOST, 2>);
    static_assert(sizeof(channel_shared<DEPTH_MOST>) <= most, "what needs the most");
    return cuda->overlaps && cuda->shared_limit >= most && f->storage == KERN_STORE_F32 && f->key_width <= DEPTH_MOST &&
           f->query_heads <= f->heads &&
           sizeof(recurrence_record<DEPTH_MOST, true, 2>) * (size_t)f->heads <= RECORDS_BYTES;
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
        return a.depth <= DEPTH_LEAST ? launch<DEPTH_LEAST, true>(step, group) : launch<DEPTH_MOST, true>(step, group);
    return a.depth <= DEPTH_LEAST ? launch<DEPTH_LEAST, false>(step, group) : launch<DEPTH_MOST, false>(step, group);
}

// SPDX-License-Identifier: Apache-2.0
// The recurrence family's gradients chunk by chunk on the tensor cores (sm_90; models.md 11.4), with the operands and
// strips of forward (recurrence_chunk.cu), B = (I + A)^-1 and E the decays between two tokens:
//
//   U = B w (V - e^c K S), or w V                       what the chunk's tokens write
//   dU = e^(c_C - c) K G + scale P^T dO      M = B^T dU, or dU
//   G = e^(c_C) G + scale (e^c Q)^T dO [- (e^c K)^T w M]
//
// prepare_kernel: a record for each chunk and state, and U by the delta rule, from the state before the chunk that
// forward left. All chunks at once. states_kernel: a warpgroup has 64 columns of G, transposed, in registers from a
// row's last chunk to its first, and leaves M and the G of each chunk's end. pairs_kernel: all else of a chunk
// (recurrence_pairs.cuh), all chunks at once.
//
// Groups of chunks, the row that is cut between two of them and numbers are those of recurrence_chunk.cu; groups go
// backwards.
#include <utility>

#include "kernels/cuda/recurrence_backward_chunk.cuh"
#include "kernels/cuda/recurrence_pairs_channel.cuh"
#include "kernels/cuda/recurrence_prepare.cuh"
#include "kernels/cuda/recurrence_strip.cuh"

constexpr size_t GROUP_BYTES = (size_t)640 << 20;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ------------------------------------------------------------------------------------------------------------- written

// Rows x (a tile of tokens each) times a lower triangle: the sum over tiles n <= tile.
template <int LIMBS>
static __device__ __forceinline__ split_block strip_lower(const split_left<LIMBS> (&x)[CHUNK_TILES],
                                                          const split_lower<LIMBS, CHUNK> &lower, int32_t tile,
                                                          int32_t lane) {
    split_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        if (n <= tile)
            split_multiply(sum, x[n], split_load_right(lower, tile, n, lane));
    return split_totals(sum);
}

// U^T of a strip by a warp, from the state before the chunk.
template <int D, bool CHANNEL, int LIMBS>
static __device__ __forceinline__ void
write_strip(const gradients_group &group, const recurrence_record<D, CHANNEL, LIMBS> &record, const kern_chunk &chunk,
            int64_t item, const float *snapshot, const recurrence_strip &strip) {
    const recurrence &a = group.b.a;
    const int32_t lane = strip.lane;
    split_block state[D / SPLIT_TILE] = {}, u[CHUNK_TILES];
    split_powers powers, written_powers;
    split_left<LIMBS> s[D / SPLIT_TILE], written[CHUNK_TILES];
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        strip_each(strip, [&](int half, int i, int32_t column) {
            const int32_t d = n * SPLIT_TILE + column;
            if (d < a.depth && strip.exists[i / 2])
                state[n].v[half][i] = snapshot[(int64_t)d * group.b.snapshot_row + strip.column[i / 2]];
        });
    split_strip(state, powers, s);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        strip_values(a, strip, chunk, n, u[n]);
        strip_errors(record, strip, n, split_multiply_rows(s, record.k, n, lane), powers, u[n]);
        strip_weigh(strip, n, record.weight, u[n]);
    }
    split_strip(u, written_powers, written);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_solved(record, strip, n, strip_lower(written, record.system, n, lane), written_powers, u[n]);
    store_tokens(group, strip, chunk, group.written, item, u);
}

// Every strip of the state; a record in shared memory.
template <int D, bool CHANNEL, int LIMBS>
static __device__ void write_strips(const gradients_group &group, const recurrence_record<D, CHANNEL, LIMBS> &record,
                                    const kern_chunk &chunk, int64_t item, int32_t state, int32_t warps) {
    const recurrence &a = group.b.a;
    const float *snapshot = gradients_snapshot(group.b, group.first + item / a.states, state);
    for (int32_t number = threadIdx.x / CUDA_WARP; number * SPLIT_TILE < a.columns; number += warps)
        write_strip(group, record, chunk, item, snapshot, recurrence_strip_of(a, state, number));
}

// --------------------------------------------------------------------------------------------------- states, backwards

// dO^T of a tile of tokens.
static __device__ __forceinline__ void load_outputs(const gradients_group &group, const recurrence_strip &strip,
                                                    const kern_chunk &chunk, int n, split_block &o) {
    const recurrence &a = group.b.a;
    const float none[2] = {0, 0};
    strip_load(strip, chunk, gradients_output(group.b, chunk.token0, strip.state, 0), (int32_t)(a.outputs * a.columns),
               strip.exists, none, n, o);
}

// M^T in place of what the chunk's end gives to it, from dO^T times the inverse powers of P's rows.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ __forceinline__ void answer(const recurrence_record<D, CHANNEL, LIMBS> &record,
                                              const recurrence_strip &strip, const split_block (&o)[CHUNK_TILES],
                                              split_block (&m)[CHUNK_TILES]) {
    split_group<LIMBS, CHUNK_TILES> sum;
    split_left<LIMBS> left[CHUNK_TILES];
    split_powers powers;
    split_strip(o, powers, left);
    split_group_upper(sum, left, record.pairs);
    split_group_wait<0>(sum, left);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        const split_block inside = split_totals(sum, n);
        strip_each(strip, [&](int half, int i, int32_t) {
            m[n].v[half][i] = fmaf(inside.v[half][i], powers.row[i / 2].inverse, m[n].v[half][i]);
            if (DELTA)
                m[n].v[half][i] *= record.system_inverse[n];
        });
    }
    if constexpr (DELTA) {
        split_strip(m, powers, left);
        split_group_upper(sum, left, record.system);
        split_group_wait<0>(sum, left);
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++) {
            const split_block solved = split_totals(sum, n);
            strip_each(strip, [&](int half, int i, int32_t) {
                m[n].v[half][i] = solved.v[half][i] * powers.row[i / 2].inverse;
            });
        }
    }
}

// One chunk of a warpgroup's columns; a warp's strip.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ __forceinline__ void
retreat(const gradients_group &group, const recurrence_record<D, CHANNEL, LIMBS> &record, const kern_chunk &chunk,
        int64_t item, const recurrence_strip &strip, split_block (&grad)[D / SPLIT_TILE]) {
    const float scale = group.b.a.scale;
    split_block o[CHUNK_TILES], m[CHUNK_TILES], x[CHUNK_TILES];
    {
        split_group<LIMBS, CHUNK_TILES> sum;
        split_left<LIMBS> g[D / SPLIT_TILE];
        split_powers powers;
        split_strip(grad, powers, g);
        split_group_rows(sum, g, recurrence_keys_to_end(record));
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            load_outputs(group, strip, chunk, n, o[n]);
        split_group_wait<0>(sum, g);
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++) {
            const split_block end = split_totals(sum, n);
            strip_each(strip, [&](int half, int i, int32_t column) {
                m[n].v[half][i] = end.v[half][i] * powers.row[i / 2].inverse * record.key_end[n * SPLIT_TILE + column];
            });
        }
    }
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        strip_each(strip, [&](int half, int i, int32_t column) {
            x[n].v[half][i] = o[n].v[half][i] * scale * record.query_start[n * SPLIT_TILE + column];
            o[n].v[half][i] *= scale * record.pairs_inverse[n];
        });
    strip_write(x, record.q, [&](int n, const split_block &sum, const split_powers &powers) {
        strip_advance(record, strip, n, sum, powers, grad[n]);
    });
    answer<D, CHANNEL, DELTA>(record, strip, o, m);
    store_tokens(group, strip, chunk, group.answers, item, m);
    if constexpr (DELTA) { // less what the errors' readings give: (e^c K)^T w M
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
            strip_each(strip, [&](int half, int i, int32_t column) {
                const int32_t token = n * SPLIT_TILE + column;
                m[n].v[half][i] *= -record.weight[token] * record.key_start[token];
            });
        strip_write(m, record.k, [&](int n, const split_block &sum, const split_powers &powers) {
            strip_each(strip, [&](int half, int i, int32_t) {
                grad[n].v[half][i] = fmaf(sum.v[half][i], powers.row[i / 2].inverse, grad[n].v[half][i]);
            });
        });
    }
}

// Columns of a state by a warpgroup each; slice: a state and a part of it.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __device__ void run_states(const cuda_table *table, const gradients_group &group, int32_t row, int32_t slice,
                                  states_shared<D, CHANNEL, LIMBS> &shared) {
    const recurrence &a = group.b.a;
    const int32_t warps = blockDim.x / CUDA_WARP, warp = threadIdx.x / CUDA_WARP;
    const recurrence_strip strip = recurrence_strip_of(a, slice / a.slices, slice % a.slices * warps + warp);
    const chunk_group records = {a, group.first, group.count, group.records, {}};
    const int64_t carried = (int64_t)strip.state * a.depth * a.columns;
    const chunk_run<float> run =
        chunk_run_of(table, row, group.first, group.count, gradients_dstate(group.b, row, strip.state),
                     {group.carry[0] + carried, group.carry[1] + carried});
    if (run.first >= run.last)
        return;
    if (threadIdx.x == 0)
        begin_records<D, CHANNEL, true>(records, run, strip.state, shared);
    split_block grad[D / SPLIT_TILE] = {};
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        if (run.to)
            strip_places(a, strip, n, [&](int half, int i, int64_t at) { grad[n].v[half][i] = run.to[at]; });
    __syncthreads();
    for (int32_t at = 0; run.first + at < run.last; at++) {
        const int32_t index = run.last - 1 - at, stage = at % STAGES<D, CHANNEL, LIMBS>;
        const uint32_t parity = at / STAGES<D, CHANNEL, LIMBS> % 2;
        const int64_t item = (int64_t)(index - group.first) * a.states + strip.state;
        const kern_chunk chunk = table->chunk[index];
        if (index > run.first)
            strip_ask(strip, table->chunk[index - 1],
                      gradients_output(group.b, table->chunk[index - 1].token0, strip.state, 0),
                      (int32_t)(a.outputs * a.columns), a.columns);
        float *keep = group.grads + item * a.depth * group.pitch;
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
            strip_each(strip, [&](int half, int i, int32_t column) {
                const int32_t d = n * SPLIT_TILE + column;
                if (d < a.depth && strip.exists[i / 2])
                    keep[(int64_t)d * group.pitch + strip.column[i / 2]] = grad[n].v[half][i];
            });
        cuda_mbarrier_wait(&shared.full[stage], parity);
        retreat<D, CHANNEL, DELTA>(group, shared.record[stage], chunk, item, strip, grad);
        leave_record<D, CHANNEL, true>(records, run, strip.state, at, shared);
    }
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
        if (run.from)
            strip_places(a, strip, n, [&](int half, int i, int64_t at) { run.from[at] = grad[n].v[half][i]; });
}

#endif

// ------------------------------------------------------------------------------------------------------------- kernels

template <int D, bool DELTA, int LIMBS>
static __global__ void __launch_bounds__(PREPARE_THREADS, 2)
    prepare_kernel(const cuda_table *table, const gradients_group group) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    prepare_shared<D, LIMBS> &shared = *(prepare_shared<D, LIMBS> *)memory;
    const recurrence &a = group.b.a;
    const int32_t state = blockIdx.x % a.states;
    const kern_chunk chunk = table->chunk[group.first + blockIdx.x / a.states];
    prepare_record(table, a, chunk, state, false, shared);
    if (threadIdx.x == 0)
        cuda_bulk_store((recurrence_record<D, false, LIMBS> *)group.records + blockIdx.x, &shared.record,
                        sizeof shared.record);
    if (DELTA)
        write_strips(group, shared.record, chunk, blockIdx.x, state, PREPARE_THREADS / CUDA_WARP);
#endif
}

template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __global__ void __launch_bounds__(STATES_GROUPS *GROUP_THREADS, 1)
    states_kernel(const cuda_table *table, const gradients_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t items = group.b.a.states * group.b.a.slices;
    run_states<D, CHANNEL, DELTA>(table, group, first_row + blockIdx.x / items, blockIdx.x % items,
                                  *(states_shared<D, CHANNEL, LIMBS> *)memory);
#endif
}

template <int D, int LIMBS>
static __global__ void __launch_bounds__(CHANNEL_THREADS, 1)
    prepare_channel_kernel(const cuda_table *table, const gradients_group group) {
    cuda_begin();
    cuda_await();
    extern __shared__ __align__(128) char memory[];
    const int32_t state = blockIdx.x % group.b.a.states;
    channel_prepare(table, group.b.a, table->chunk[group.first + blockIdx.x / group.b.a.states], state, false,
                    ((recurrence_record<D, true, LIMBS> *)group.records)[blockIdx.x], *(channel_shared<D> *)memory);
}

// U by the delta rule where prepare_channel_kernel has made the record.
template <int D, int LIMBS>
static __global__ void __launch_bounds__(CHANNEL_THREADS, 1)
    written_kernel(const cuda_table *table, const gradients_group group) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    states_shared<D, true, LIMBS> &shared = *(states_shared<D, true, LIMBS> *)memory;
    const int32_t states = group.b.a.states, state = blockIdx.x % states;
    if (threadIdx.x == 0) {
        cuda_mbarrier_make(&shared.full[0], 1);
        cuda_mbarrier_made();
        cuda_mbarrier_expect(&shared.full[0], sizeof shared.record[0]);
        cuda_bulk_load(&shared.record[0], (const recurrence_record<D, true, LIMBS> *)group.records + blockIdx.x,
                       sizeof shared.record[0], &shared.full[0]);
        cuda_mbarrier_arrive(&shared.full[0]);
    }
    __syncthreads();
    cuda_mbarrier_wait(&shared.full[0], 0);
    write_strips(group, shared.record[0], table->chunk[group.first + blockIdx.x / states], blockIdx.x, state,
                 CHANNEL_THREADS / CUDA_WARP);
#endif
}

// A block has a chunk of the states that share heads, one after another.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static __global__ void __launch_bounds__(PAIRS_THREADS, 1)
    pairs_kernel(const cuda_table *table, const gradients_group group, int32_t shared_by) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t teams = group.b.a.states / shared_by, index = group.first + (int32_t)blockIdx.x / teams;
    for (int32_t i = 0; i < shared_by; i++) {
        const int32_t state = (int32_t)blockIdx.x % teams * shared_by + i;
        if constexpr (CHANNEL)
            pairs_channel_run<D, DELTA>(table, group, index, state, *(pairs_channel_shared<D, LIMBS> *)memory);
        else
            pairs_run<D, DELTA>(table, group, index, state, *(pairs_shared<D, LIMBS> *)memory);
    }
#endif
}

// ----------------------------------------------------------------------------------------------------------- launching

constexpr int DEPTH_LEAST = 64, DEPTH_MOST = 128;

template <int D, bool CHANNEL, int LIMBS> constexpr size_t pairs_bytes(void) {
    return CHANNEL ? sizeof(pairs_channel_shared<D, LIMBS>) : sizeof(pairs_shared<D, LIMBS>);
}

// Bytes of a chunk and state in the workspace.
template <int D, bool CHANNEL, int LIMBS> static size_t item_bytes(const gradients_group &group) {
    const recurrence &a = group.b.a;
    const size_t tokens = (a.delta ? 2 : 1) * CHUNK * (size_t)group.pitch,
                 state = (size_t)a.depth * (size_t)group.pitch;
    return sizeof(recurrence_record<D, CHANNEL, LIMBS>) + sizeof(float) * (tokens + state);
}

// The records, and U by the delta rule.
template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static kern_status launch_prepare(const cuda_step *step, const gradients_group &group) {
    const int blocks = group.count * group.b.a.states;
    kern_status status;
    if constexpr (CHANNEL) {
        status = cuda_start(step, prepare_channel_kernel<D, LIMBS>, blocks, CHANNEL_THREADS, sizeof(channel_shared<D>),
                            step->table, group);
        if (!status && DELTA)
            status = cuda_start(step, written_kernel<D, LIMBS>, blocks, CHANNEL_THREADS, states_bytes<D, true, LIMBS>(),
                                step->table, group);
    } else {
        status = cuda_start(step, prepare_kernel<D, DELTA, LIMBS>, blocks, PREPARE_THREADS, prepare_bytes<D, LIMBS>(),
                            step->table, group);
    }
    return status;
}

template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static kern_status launch_group(const cuda_step *step, gradients_group group) {
    const recurrence &a = group.b.a;
    const int32_t shared_by = cuda_gradients_group(a);
    const int groups = recurrence_groups(step, step->rows, group.b.a);
    kern_status status = launch_prepare<D, CHANNEL, DELTA, LIMBS>(step, group);
    if (!status)
        status = cuda_start(step, states_kernel<D, CHANNEL, DELTA, LIMBS>, step->rows * a.states * group.b.a.slices,
                            groups * GROUP_THREADS, states_bytes<D, CHANNEL, LIMBS>(), step->table, group, 0);
    return status ? status
                  : cuda_start(step, pairs_kernel<D, CHANNEL, DELTA, LIMBS>, group.count * (a.states / shared_by),
                               PAIRS_THREADS, pairs_bytes<D, CHANNEL, LIMBS>(), step->table, group, shared_by);
}

template <int D, bool CHANNEL, bool DELTA, int LIMBS> static kern_status allow_shared(void) {
    kern_status status;
    if constexpr (CHANNEL) {
        status = cuda_allow_shared(prepare_channel_kernel<D, LIMBS>, sizeof(channel_shared<D>));
        if (!status)
            status = cuda_allow_shared(written_kernel<D, LIMBS>, states_bytes<D, true, LIMBS>());
    } else {
        status = cuda_allow_shared(prepare_kernel<D, DELTA, LIMBS>, prepare_bytes<D, LIMBS>());
    }
    if (!status)
        status = cuda_allow_shared(states_kernel<D, CHANNEL, DELTA, LIMBS>, states_bytes<D, CHANNEL, LIMBS>());
    return status ? status
                  : cuda_allow_shared(pairs_kernel<D, CHANNEL, DELTA, LIMBS>, pairs_bytes<D, CHANNEL, LIMBS>());
}

template <int D, bool CHANNEL, bool DELTA, int LIMBS>
static kern_status launch_groups(const cuda_step *step, gradients_group group) {
    const recurrence &a = group.b.a;
    const int32_t most = (int32_t)(GROUP_BYTES / (item_bytes<D, CHANNEL, LIMBS>(group) * (size_t)a.states));
    kern_status status = allow_shared<D, CHANNEL, DELTA, LIMBS>();
    for (int32_t end = step->chunks; !status && end > 0; end = group.first) {
        group.count = end < most ? end : most;
        group.first = end - group.count;
        const size_t items = (size_t)group.count * (size_t)a.states, tokens = CHUNK * (size_t)group.pitch;
        float *floats = (float *)(group.records + items * sizeof(recurrence_record<D, CHANNEL, LIMBS>));
        group.grads = floats;
        group.answers = floats + items * (size_t)a.depth * (size_t)group.pitch;
        group.written = a.delta ? group.answers + items * tokens : NULL;
        status = launch_group<D, CHANNEL, DELTA, LIMBS>(step, group);
        std::swap(group.carry[0], group.carry[1]);
    }
    return status;
}
template <int D, int LIMBS> static kern_status launch_limbs(const cuda_step *step, const gradients_group &group) {
    const recurrence &a = group.b.a;
    if (a.decay == KERN_DECAY_CHANNEL)
        return a.delta ? launch_groups<D, true, true, LIMBS>(step, group)
                       : launch_groups<D, true, false, LIMBS>(step, group);
    return a.delta ? launch_groups<D, false, true, LIMBS>(step, group)
                   : launch_groups<D, false, false, LIMBS>(step, group);
}
template <int D> static kern_status launch(const cuda_step *step, const gradients_group &group) {
    return step->cuda->fast ? launch_limbs<D, 1>(step, group) : launch_limbs<D, 2>(step, group);
}

static int32_t pitch_of(const recurrence &a) {
    return (a.columns + 3) / 4 * 4;
}

bool cuda_gradients_have_chunks(const kern_cuda *cuda, const recurrence &a) {
    constexpr size_t most = pairs_bytes<DEPTH_MOST, true, 2>();
    static_assert(most >= pairs_bytes<DEPTH_MOST, false, 2>() && most >= states_bytes<DEPTH_MOST, false, 2>() &&
                      most >= sizeof(channel_shared<DEPTH_MOST>),
                  "what needs the most");
    gradients_group group = {};
    group.b.a = a;
    group.pitch = pitch_of(a);
    return cuda->overlaps && cuda->shared_limit >= most && a.depth <= DEPTH_MOST && a.readers == 1 &&
           item_bytes<DEPTH_MOST, true, 2>(group) * (size_t)a.states <= GROUP_BYTES;
}

size_t cuda_gradients_chunk_workspace(const recurrence &a) {
    return GROUP_BYTES + 2 * sizeof(float) * (size_t)a.states * (size_t)a.depth * (size_t)a.columns;
}

kern_status cuda_gradients_chunks(const cuda_step *step, const recurrence_gradients &b, char *workspace) {
    gradients_group group = {};
    group.b = b;
    group.pitch = pitch_of(b.a);
    group.records = workspace;
    group.carry[0] = (float *)(workspace + GROUP_BYTES);
    group.carry[1] = group.carry[0] + (int64_t)b.a.states * b.a.depth * b.a.columns;
    return b.a.depth <= DEPTH_LEAST ? launch<DEPTH_LEAST>(step, group) : launch<DEPTH_MOST>(step, group);
}

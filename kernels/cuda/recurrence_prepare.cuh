// SPDX-License-Identifier: Apache-2.0
// How a record of the recurrence's chunk form (recurrence_chunk.cuh) comes to be where a head decays as a whole, and
// how records come to those who read them: forward (recurrence_chunk.cu) and backward (recurrence_backward_chunk.cu).
#ifndef KERNELS_CUDA_RECURRENCE_PREPARE_CUH
#define KERNELS_CUDA_RECURRENCE_PREPARE_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/recurrence_channel.cuh"

constexpr int PREPARE_THREADS = 128;

// A group of chunks.
struct chunk_group {
    recurrence a;
    int32_t first, count; // chunks
    char *records;        // (count, states)
    float *carry[2];      // (states, D, V') each; chunk_run_of
};

// Records in shared memory: two where they fit.
template <int D, bool CHANNEL> constexpr int STAGES = CHANNEL &&D > 64 ? 1 : 2;

// sizeof(prepare_shared) and sizeof(states_shared) of a chip that has them.
template <int D> constexpr size_t prepare_bytes(void) {
    return sizeof(recurrence_record<D, false>) + sizeof(chunk_decay) + 2 * CHUNK * sizeof(float) +
           sizeof(recurrence_triangle) + 128;
}
template <int D, bool CHANNEL> constexpr size_t states_bytes(void) {
    return STAGES<D, CHANNEL> * sizeof(recurrence_record<D, CHANNEL>) + 128;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// --------------------------------------------------------------------------------------------------- a record is made

template <int D> struct alignas(128) prepare_shared {
    recurrence_record<D, false> record;
    chunk_decay decay;
    float key_inverse[CHUNK], query_inverse[CHUNK];
    recurrence_triangle system;
};

// K or Q of a chunk: neighbouring threads have a token.
template <int D, int THREADS>
static __device__ __forceinline__ void prepare_operand(split_tile<2> (&tiles)[CHUNK_TILES][D / SPLIT_TILE],
                                                       float *inverse, int32_t length, const float *rows,
                                                       int64_t stride, int32_t depth) {
    constexpr int PARTS = THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const float *from = rows + token * stride;
    const bool wide = (uintptr_t)from % sizeof(float4) == 0;
    const float got = chunk_put_row<D, PARTS>(tiles[token / SPLIT_TILE], token % SPLIT_TILE, part, [&](int32_t column) {
        return cuda_load(from + column, token < length ? depth - column : 0, wide);
    });
    if (part == 0)
        inverse[token] = got;
}

// A row of tiles of `rows` times those of k, into x.
template <int D>
static __device__ __forceinline__ void
prepare_lower(const split_tile<2> (&rows)[CHUNK_TILES][D / SPLIT_TILE], const prepare_shared<D> &shared,
              const float *inverse, int32_t length, int32_t row, int32_t lane, split_block (&x)[CHUNK_TILES]) {
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        if (n > row)
            continue;
        split_sum<2> sum = {};
        chunk_multiply(sum, rows[row], shared.record.k[n], lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t i = row * SPLIT_TILE + split_row(lane, e);
                const int32_t j = n * SPLIT_TILE + split_column(lane, half, e);
                x[n].v[half][e] = split_total(sum, half, e) * inverse[i] * shared.key_inverse[j] *
                                  chunk_pair(shared.decay, length, i, j);
            }
    }
}

// A; the tiles above the diagonal are not looked at.
template <int D>
static __device__ __forceinline__ void prepare_system(prepare_shared<D> &shared, int32_t length, int32_t row,
                                                      int32_t lane) {
    split_block x[CHUNK_TILES];
    prepare_lower<D>(shared.record.k, shared, shared.key_inverse, length, row, lane, x);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t i = row * SPLIT_TILE + split_row(lane, e);
                const int32_t j = n * SPLIT_TILE + split_column(lane, half, e);
                if (n <= row)
                    shared.system.m[i][j] = i > j ? shared.record.weight[i] * x[n].v[half][e] : 0;
            }
}

// What the tokens are multiplied with, by threads of a token each.
template <int D> static __device__ __forceinline__ void prepare_factors(prepare_shared<D> &shared, int32_t length) {
    recurrence_record<D, false> &record = shared.record;
    for (int32_t i = threadIdx.x; i < CHUNK; i += PREPARE_THREADS) {
        const float start = chunk_from_start(shared.decay, length, i);
        record.key_start[i] = start * shared.key_inverse[i];
        record.query_start[i] = start * shared.query_inverse[i];
        record.key_end[i] = (i < length ? chunk_pair(shared.decay, length, length - 1, i) : 0) * shared.key_inverse[i];
    }
    if (threadIdx.x == 0)
        record.whole_m1[0] = chunk_whole_m1(shared.decay, length);
}

// The record of a chunk and state in shared memory, by the block; behind a barrier. weighted: its system is times w.
template <int D>
static __device__ void prepare_record(const cuda_table *table, const recurrence &a, const kern_chunk &chunk,
                                      int32_t state, bool weighted, prepare_shared<D> &shared) {
    recurrence_record<D, false> &record = shared.record;
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, length = chunk.length;
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay,
                         [&](int32_t i) { return recurrence_head_decay(a, chunk.token0 + i, state); });
    for (int32_t i = threadIdx.x; i < CHUNK; i += PREPARE_THREADS)
        record.weight[i] = i < length ? recurrence_weight(a, chunk.token0 + i, state) : 0;
    prepare_operand<D, PREPARE_THREADS>(record.k, shared.key_inverse, length, recurrence_key(a, chunk.token0, state),
                                        a.keys * a.depth, a.depth);
    prepare_operand<D, PREPARE_THREADS>(record.q, shared.query_inverse, length,
                                        recurrence_query(a, chunk.token0, state, 0), a.queries * a.depth, a.depth);
    __syncthreads();
    prepare_factors(shared, length);
    split_block p[CHUNK_TILES];
    prepare_lower<D>(record.q, shared, shared.query_inverse, length, warp, lane, p);
    recurrence_put_lower(record.pairs, record.pairs_inverse[warp], warp, lane,
                         [&](int n, int half, int i) { return p[n].v[half][i]; });
    if (a.delta) {
        prepare_system(shared, length, CHUNK_TILES - 1 - warp, lane); // even shares
        recurrence_invert(shared.system, warp, lane);
        recurrence_put_lower(record.system, record.system_inverse[warp], warp, lane, [&](int n, int half, int e) {
            const int32_t i = warp * SPLIT_TILE + split_row(lane, e), j = n * SPLIT_TILE + split_column(lane, half, e);
            return i >= j ? recurrence_inverse_at(shared.system, i, j) * (weighted ? record.weight[j] : 1.0f) : 0;
        });
    }
    cuda_bulk_fence();
    __syncthreads();
}
// ---------------------------------------------------------------------------------------------------- records are read

template <int D, bool CHANNEL> struct alignas(128) states_shared {
    recurrence_record<D, CHANNEL> record[STAGES<D, CHANNEL>];
    cuda_mbarrier full[STAGES<D, CHANNEL>], empty[STAGES<D, CHANNEL>];
};

// The record of a run's chunk number `at`, counted from its end where it goes backwards.
template <int D, bool CHANNEL, bool BACKWARDS>
static __device__ __forceinline__ void bring(const chunk_group &group, const chunk_run<float> &run, int32_t state,
                                             int32_t at, states_shared<D, CHANNEL> &shared) {
    if (run.first + at >= run.last)
        return;
    const int32_t chunk = BACKWARDS ? run.last - 1 - at : run.first + at;
    const int64_t record = (int64_t)(chunk - group.first) * group.a.states + state;
    const int32_t stage = at % STAGES<D, CHANNEL>;
    cuda_mbarrier_expect(&shared.full[stage], sizeof(recurrence_record<D, CHANNEL>));
    cuda_bulk_load(&shared.record[stage], (const recurrence_record<D, CHANNEL> *)group.records + record,
                   sizeof(recurrence_record<D, CHANNEL>), &shared.full[stage]);
    cuda_mbarrier_arrive(&shared.full[stage]);
}

// The records of a run, one thread; a stage is empty when `readers` have arrived.
template <int D, bool CHANNEL, bool BACKWARDS>
static __device__ __forceinline__ void begin_records(const chunk_group &group, const chunk_run<float> &run,
                                                     int32_t state, int32_t readers,
                                                     states_shared<D, CHANNEL> &shared) {
    for (int i = 0; i < STAGES<D, CHANNEL>; i++) {
        cuda_mbarrier_make(&shared.full[i], 1);
        cuda_mbarrier_make(&shared.empty[i], readers);
    }
    cuda_mbarrier_made();
    for (int i = 0; i < STAGES<D, CHANNEL>; i++)
        bring<D, CHANNEL, BACKWARDS>(group, run, state, i, shared);
}

#endif

#endif

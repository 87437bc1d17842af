// SPDX-License-Identifier: Apache-2.0
// How a record of the recurrence's chunk form (recurrence_chunk.cuh) comes to be where a head decays as a whole, and
// how records come to those who read them: forward (recurrence_chunk.cu) and backward (recurrence_backward_chunk.cu).
#ifndef KERNELS_CUDA_RECURRENCE_PREPARE_CUH
#define KERNELS_CUDA_RECURRENCE_PREPARE_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/recurrence_channel.cuh"

constexpr int PREPARE_THREADS = INVERT_THREADS;

// A group of chunks.
struct chunk_group {
    recurrence a;
    int32_t first, count; // chunks
    char *records;        // (count, states)
    float *carry[2];      // (states, D, V') each; chunk_run_of
};

// Records in shared memory of those who read them.
constexpr size_t RECORDS_MOST = 200 << 10;
template <int D, bool CHANNEL, int LIMBS> constexpr int stages_of(void) {
    constexpr int fit = (int)(RECORDS_MOST / sizeof(recurrence_record<D, CHANNEL, LIMBS>));
    return fit < 4 ? fit : 4;
}
template <int D, bool CHANNEL, int LIMBS> constexpr int STAGES = stages_of<D, CHANNEL, LIMBS>();

// sizeof(prepare_shared) and sizeof(states_shared) of a chip that has them.
template <int D, int LIMBS> constexpr size_t prepare_bytes(void) {
    return sizeof(recurrence_record<D, false, LIMBS>) + sizeof(chunk_decay) + 2 * CHUNK * sizeof(float) +
           sizeof(recurrence_triangle) + 128;
}
template <int D, bool CHANNEL, int LIMBS> constexpr size_t states_bytes(void) {
    return STAGES<D, CHANNEL, LIMBS> * sizeof(recurrence_record<D, CHANNEL, LIMBS>) + 128;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// --------------------------------------------------------------------------------------------------- a record is made

template <int D, int LIMBS> struct alignas(128) prepare_shared {
    recurrence_record<D, false, LIMBS> record;
    chunk_decay decay;
    float key_inverse[CHUNK], query_inverse[CHUNK];
    recurrence_triangle system;
};

// K or Q of a chunk: neighbouring threads have a token. Rows that are whole are read without a branch, from the first
// where there is no token.
template <int D, int THREADS, int LIMBS>
static __device__ __forceinline__ void prepare_operand(split_matrix<LIMBS, CHUNK, D> &m, float *inverse, int32_t length,
                                                       const float *rows, int64_t stride, int32_t depth) {
    constexpr int PARTS = THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const bool exists = token < length, wide = (uintptr_t)rows % 16 == 0 && stride % 4 == 0;
    const float *from = rows + (exists ? token : 0) * stride;
    const float got =
        wide && depth == D
            ? chunk_put_row<D, PARTS>(
                  m, token, part,
                  [&](int32_t column) {
                      const float4 x = *(const float4 *)(from + column);
                      return cuda_quad{{exists ? x.x : 0, exists ? x.y : 0, exists ? x.z : 0, exists ? x.w : 0}};
                  })
            : chunk_put_row<D, PARTS>(m, token, part, [&](int32_t column) {
                  return cuda_load(from + column, exists ? depth - column : 0, wide);
              });
    if (part == 0)
        inverse[token] = got;
}
// Asks for what prepare_operand reads.
template <int D, int THREADS>
static __device__ __forceinline__ void prepare_ask(int32_t length, const float *rows, int64_t stride) {
    constexpr int PARTS = THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS;
    if (token < length)
        cuda_prefetch(rows + token * stride + threadIdx.x % PARTS * (D / PARTS));
}

// A row of tiles of `rows` times those of k, into x.
template <int D, int LIMBS>
static __device__ __forceinline__ void
prepare_lower(const split_matrix<LIMBS, CHUNK, D> &rows, const prepare_shared<D, LIMBS> &shared, const float *inverse,
              int32_t length, int32_t row, int32_t lane, split_block (&x)[CHUNK_TILES]) {
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        if (n > row)
            continue;
        x[n] = split_multiply_tiles(rows, row, shared.record.k, n, lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t i = row * SPLIT_TILE + split_row(lane, e);
                const int32_t j = n * SPLIT_TILE + split_column(lane, half, e);
                x[n].v[half][e] *= inverse[i] * shared.key_inverse[j] * chunk_pair(shared.decay, length, i, j);
            }
    }
}

// A; the tiles above the diagonal are not looked at.
template <int D, int LIMBS>
static __device__ __forceinline__ void prepare_system(prepare_shared<D, LIMBS> &shared, int32_t length, int32_t row,
                                                      int32_t lane) {
    split_block x[CHUNK_TILES];
    prepare_lower(shared.record.k, shared, shared.key_inverse, length, row, lane, x);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int32_t i = row * SPLIT_TILE + split_row(lane, e);
                const int32_t j = n * SPLIT_TILE + split_column(lane, half, e);
                const float w = shared.record.weight[i];
                if (n <= row)
                    *(float2 *)&shared.system.m[i][j] =
                        make_float2(i > j ? w * x[n].v[half][e] : 0, i > j + 1 ? w * x[n].v[half][e + 1] : 0);
            }
}

// What the tokens are multiplied with, by threads of a token each.
template <int D, int LIMBS>
static __device__ __forceinline__ void prepare_factors(prepare_shared<D, LIMBS> &shared, int32_t length) {
    recurrence_record<D, false, LIMBS> &record = shared.record;
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
template <int D, int LIMBS>
static __device__ void prepare_record(const cuda_table *table, const recurrence &a, const kern_chunk &chunk,
                                      int32_t state, bool weighted, prepare_shared<D, LIMBS> &shared) {
    recurrence_record<D, false, LIMBS> &record = shared.record;
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, tile = warp % CHUNK_TILES;
    const int32_t length = chunk.length;
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay,
                         [&](int32_t i) { return recurrence_head_decay(a, chunk.token0 + i, state); });
    for (int32_t i = threadIdx.x; i < CHUNK; i += PREPARE_THREADS)
        record.weight[i] = i < length ? recurrence_weight(a, chunk.token0 + i, state) : 0;
    prepare_ask<D, PREPARE_THREADS>(length, recurrence_query(a, chunk.token0, state, 0), a.queries * a.depth);
    prepare_operand<D, PREPARE_THREADS>(record.k, shared.key_inverse, length, recurrence_key(a, chunk.token0, state),
                                        a.keys * a.depth, a.depth);
    prepare_operand<D, PREPARE_THREADS>(record.q, shared.query_inverse, length,
                                        recurrence_query(a, chunk.token0, state, 0), a.queries * a.depth, a.depth);
    __syncthreads();
    prepare_factors(shared, length);
    if (warp < CHUNK_TILES) {
        split_block p[CHUNK_TILES];
        prepare_lower(record.q, shared, shared.query_inverse, length, warp, lane, p);
        recurrence_put_lower(record.pairs, record.pairs_inverse[warp], warp, lane,
                             [&](int n, int half, int i) { return p[n].v[half][i]; });
    } else if (a.delta) {
        prepare_system(shared, length, CHUNK_TILES - 1 - tile, lane); // even shares of a scheduler
    }
    if (a.delta) {
        recurrence_invert(shared.system, warp, lane);
        if (warp < CHUNK_TILES)
            recurrence_put_lower(record.system, record.system_inverse[tile], tile, lane, [&](int n, int half, int e) {
                const int32_t i = tile * SPLIT_TILE + split_row(lane, e);
                const int32_t j = n * SPLIT_TILE + split_column(lane, half, e);
                return i >= j ? recurrence_inverse_at(shared.system, i, j) * (weighted ? record.weight[j] : 1.0f) : 0;
            });
    }
    cuda_bulk_fence();
    __syncthreads();
}
// ---------------------------------------------------------------------------------------------------- records are read

template <int D, bool CHANNEL, int LIMBS> struct alignas(128) states_shared {
    recurrence_record<D, CHANNEL, LIMBS> record[STAGES<D, CHANNEL, LIMBS>];
    cuda_mbarrier full[STAGES<D, CHANNEL, LIMBS>];
    uint32_t readers[STAGES<D, CHANNEL, LIMBS>]; // warps that have read the record
};

// The record of a run's chunk number `at`, counted from its end where it goes backwards.
template <int D, bool CHANNEL, bool BACKWARDS, int LIMBS>
static __device__ __forceinline__ void bring(const chunk_group &group, const chunk_run<float> &run, int32_t state,
                                             int32_t at, states_shared<D, CHANNEL, LIMBS> &shared) {
    if (run.first + at >= run.last)
        return;
    const int32_t chunk = BACKWARDS ? run.last - 1 - at : run.first + at;
    const int64_t record = (int64_t)(chunk - group.first) * group.a.states + state;
    const int32_t stage = at % STAGES<D, CHANNEL, LIMBS>;
    cuda_mbarrier_expect(&shared.full[stage], sizeof(recurrence_record<D, CHANNEL, LIMBS>));
    cuda_bulk_load(&shared.record[stage], (const recurrence_record<D, CHANNEL, LIMBS> *)group.records + record,
                   sizeof(recurrence_record<D, CHANNEL, LIMBS>), &shared.full[stage]);
    cuda_mbarrier_arrive(&shared.full[stage]);
}

// The records of a run, one thread.
template <int D, bool CHANNEL, bool BACKWARDS, int LIMBS>
static __device__ __forceinline__ void begin_records(const chunk_group &group, const chunk_run<float> &run,
                                                     int32_t state, states_shared<D, CHANNEL, LIMBS> &shared) {
    for (int i = 0; i < STAGES<D, CHANNEL, LIMBS>; i++) {
        cuda_mbarrier_make(&shared.full[i], 1);
        shared.readers[i] = 0;
    }
    cuda_mbarrier_made();
    for (int i = 0; i < STAGES<D, CHANNEL, LIMBS>; i++)
        bring<D, CHANNEL, BACKWARDS>(group, run, state, i, shared);
}

// A warp is done with the record number `at`; the last one asks for that which takes its place.
template <int D, bool CHANNEL, bool BACKWARDS, int LIMBS>
static __device__ __forceinline__ void leave_record(const chunk_group &group, const chunk_run<float> &run,
                                                    int32_t state, int32_t at,
                                                    states_shared<D, CHANNEL, LIMBS> &shared) {
    constexpr int DEPTH = STAGES<D, CHANNEL, LIMBS>;
    __syncwarp();
    if (threadIdx.x % CUDA_WARP == 0 && cuda_shared_count(&shared.readers[at % DEPTH]) == blockDim.x / CUDA_WARP - 1) {
        shared.readers[at % DEPTH] = 0;
        bring<D, CHANNEL, BACKWARDS>(group, run, state, at + DEPTH, shared);
    }
    __syncwarp();
}

#endif

#endif

// SPDX-License-Identifier: Apache-2.0
// The recurrence family's chunk form on the tensor cores (sm_90), decays of a head: what prompt rows run.
//
//   A_ij = w_i k_i.k_j E_ij (i > j)       T = (I + A)^-1 diag(w)       P_ij = q_i.k_j E_ij (i >= j)
//   U = T (V - e^c K S), or w V           O = scale (e^c Q S + P U)    S = e^(c_C) S + (e^(c_C - c) K)^T U
//
// prepare_kernel: a block has one chunk of one state and makes what does not depend on S: K and Q as operands, P, T
// (a record). All chunks at once. states_kernel: a warp has 16 columns of a state, transposed, in registers from a row's
// first chunk to its last, so that every result is the left operand of the next product as it stands; warps exchange
// nothing. A block's warps share the records, which the copy engine brings one ahead.
//
// Records of all chunks need not fit in the workspace: then chunks go in groups, and the one row that is cut between
// two of them leaves its state in its slot, or in the workspace where it has none. Numbers are those of split.cuh; a
// row's bits depend on its chunks alone.
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/recurrence_channel.cuh"

constexpr int PREPARE_THREADS = 128;
constexpr size_t RECORDS_BYTES = (size_t)288 << 20;

// Records in shared memory: two where they fit.
template <int D, bool CHANNEL> constexpr int STAGES = CHANNEL && D > 64 ? 1 : 2;

// A group of chunks.
struct chunk_group {
    recurrence a;
    int32_t first, count; // chunks
    char *records;        // (count, states)
    float *carry;         // (states, D, V')
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// ------------------------------------------------------------------------------------------------------- the preparation

template <int D> struct alignas(128) prepare_shared {
    recurrence_record<D, false> record;
    chunk_decay decay;
    float key_inverse[CHUNK], query_inverse[CHUNK];
    recurrence_triangle system;
};

// K or Q of a chunk: two threads a token.
template <int D>
static __device__ __forceinline__ void put_operand(split_tile (&tiles)[CHUNK_TILES][D / SPLIT_TILE], float *inverse,
                                                   int32_t length, const float *rows, int64_t stride, int32_t depth) {
    constexpr int PARTS = PREPARE_THREADS / CHUNK;
    const int32_t token = threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const float *from = rows + token * stride;
    const bool wide = (uintptr_t)from % sizeof(float4) == 0;
    const float got =
        chunk_put_row<D, PARTS>(tiles[token / SPLIT_TILE], token % SPLIT_TILE, part, [&](int32_t column) {
            return cuda_load(from + column, token < length ? depth - column : 0, wide);
        });
    if (part == 0)
        inverse[token] = got;
}

// A row of tiles of `rows` times those of k, into x.
template <int D>
static __device__ __forceinline__ void multiply_lower(const split_tile (&rows)[CHUNK_TILES][D / SPLIT_TILE],
                                                      const prepare_shared<D> &shared, const float *inverse,
                                                      int32_t length, int32_t row, int32_t lane,
                                                      split_block (&x)[CHUNK_TILES]) {
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        if (n > row)
            continue;
        split_sum sum = {};
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
static __device__ __forceinline__ void put_system(prepare_shared<D> &shared, int32_t length, int32_t row,
                                                  int32_t lane) {
    split_block x[CHUNK_TILES];
    multiply_lower<D>(shared.record.k, shared, shared.key_inverse, length, row, lane, x);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t i = row * SPLIT_TILE + split_row(lane, e);
                const int32_t j = n * SPLIT_TILE + split_column(lane, half, e);
                if (n <= row)
                    shared.system.l[i][j] = i > j ? shared.record.weight[i] * x[n].v[half][e] : 0;
            }
}

// What the tokens are multiplied with, by threads of a token each.
template <int D> static __device__ __forceinline__ void put_factors(prepare_shared<D> &shared, int32_t length) {
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

template <int D> static __device__ void prepare(const cuda_table *table, const chunk_group &group, char *memory) {
    prepare_shared<D> &shared = *(prepare_shared<D> *)memory;
    recurrence_record<D, false> &record = shared.record;
    const recurrence &a = group.a;
    const int32_t at = blockIdx.x / a.states, state = blockIdx.x % a.states;
    const kern_chunk chunk = table->chunk[group.first + at];
    const int32_t warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP, length = chunk.length;
    if (warp == 0)
        chunk_sum_decays(table, chunk, shared.decay,
                         [&](int32_t i) { return recurrence_head_decay(a, chunk.token0 + i, state); });
    for (int32_t i = threadIdx.x; i < CHUNK; i += PREPARE_THREADS)
        record.weight[i] = i < length ? recurrence_weight(a, chunk.token0 + i, state) : 0;
    put_operand<D>(record.k, shared.key_inverse, length, recurrence_key(a, chunk.token0, state), a.keys * a.depth,
                   a.depth);
    put_operand<D>(record.q, shared.query_inverse, length, recurrence_query(a, chunk.token0, state, 0),
                   a.queries * a.depth, a.depth);
    __syncthreads();
    put_factors(shared, length);
    split_block p[CHUNK_TILES];
    multiply_lower<D>(record.q, shared, shared.query_inverse, length, warp, lane, p);
    recurrence_put_lower(record.pairs, record.pairs_inverse[warp], warp, lane, [&](int n, int half, int i) { return p[n].v[half][i]; });
    if (a.delta) {
        put_system(shared, length, CHUNK_TILES - 1 - warp, lane); // even shares
        recurrence_invert(shared.system, warp, lane);
        recurrence_put_lower(record.system, record.system_inverse[warp], warp, lane, [&](int n, int half, int e) {
            const int32_t i = warp * SPLIT_TILE + split_row(lane, e), j = n * SPLIT_TILE + split_column(lane, half, e);
            return i >= j ? shared.system.t[i][j] * record.weight[j] : 0;
        });
    }
    cuda_bulk_fence();
    __syncthreads();
    if (threadIdx.x == 0)
        cuda_bulk_store((recurrence_record<D, false> *)group.records + blockIdx.x, &record, sizeof record);
}

// ----------------------------------------------------------------------------------------------------------- the states

template <int D, bool CHANNEL> struct alignas(128) states_shared {
    recurrence_record<D, CHANNEL> record[STAGES<D, CHANNEL>];
    cuda_mbarrier full[STAGES<D, CHANNEL>], empty[STAGES<D, CHANNEL>];
};

// A warp's part of a row: 16 columns of a state from a lane's first on, those of the group's chunks.
struct column_strip {
    int32_t lane, state, column[2]; // columns of the lane's two rows
    bool exists[2], reads[2];       // reads: from v
    float constant[2];              // else: 1 of the unit column
    float skip[2];
};

// S^T, rows are columns of the state.
template <int D> struct strip_state {
    split_block s[D / SPLIT_TILE];
};

template <int D, typename Use>
static __device__ __forceinline__ void each_element(const column_strip &strip, int32_t depth, Use use) {
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t d = n * SPLIT_TILE + split_column(strip.lane, half, i);
                if (d < depth && strip.exists[i / 2])
                    use(n, half, i, d);
            }
}

// Calls use(tile, half, column of two, first of its tokens' rows at `rows`) for a lane's tokens; `stride`: of a token. Its
// second row is 8 columns on.
template <typename Float, typename Use>
static __device__ __forceinline__ void each_token_row(const column_strip &strip, Float *rows, int64_t stride, Use use) {
    rows += split_column(strip.lane, 0, 0) * stride + strip.column[0];
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++, rows += 8 * stride) {
            use(n, half, 0, rows);
            use(n, half, 1, rows + stride);
        }
}

// V^T of a chunk, tile by tile of tokens.
static __device__ __forceinline__ void load_values(const recurrence &a, const kern_chunk &chunk,
                                                   const column_strip &strip, split_block (&v)[CHUNK_TILES]) {
    const float *from = recurrence_value(a, chunk.token0, strip.state);
    each_token_row(strip, from, (int64_t)a.values * a.width, [&](int n, int half, int c, const float *row) {
        const bool exists = n * SPLIT_TILE + split_column(strip.lane, half, c) < chunk.length;
#pragma unroll
        for (int r = 0; r < 2; r++)
            v[n].v[half][2 * r + c] = exists && strip.reads[r] ? row[8 * r] : exists ? strip.constant[r] : 0;
    });
}

// Every element x of a strip of tokens becomes value(element, token, row of the lane).
template <typename Value>
static __device__ __forceinline__ void each_token(const column_strip &strip, split_block (&x)[CHUNK_TILES],
                                                  Value value) {
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[n].v[half][i] = value(x[n].v[half][i], n * SPLIT_TILE + split_column(strip.lane, half, i), i / 2);
}

// x times a lower triangle, transposed: element (row, token i) is the sum over j <= i.
static __device__ __forceinline__ split_sum multiply_tile(const split_left (&x)[CHUNK_TILES], const split_tile *lower,
                                                          int32_t tile, int32_t lane) {
    split_sum sum = {};
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++)
        if (n <= tile)
            split_multiply(sum, x[n], split_load_right(lower[chunk_lower(tile, n)], lane));
    return sum;
}

// U^T by the delta rule, in place of V^T.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void correct(const recurrence_record<D, CHANNEL> &record, const column_strip &strip,
                                               const split_left (&s)[D / SPLIT_TILE], const split_powers &powers,
                                               split_block (&u)[CHUNK_TILES]) {
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        const split_sum sum = split_multiply_rows(s, record.k[n], strip.lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float start = record.key_start[n * SPLIT_TILE + split_column(strip.lane, half, i)];
                u[n].v[half][i] = fmaf(-(split_total(sum, half, i) * powers.row[i / 2].inverse), start, u[n].v[half][i]);
            }
    }
    split_powers error_powers;
    split_left error[CHUNK_TILES];
    split_strip(u, error_powers, error);
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        const split_sum sum = multiply_tile(error, record.system, n, strip.lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                u[n].v[half][i] = split_total(sum, half, i) * error_powers.row[i / 2].inverse * record.system_inverse[n];
    }
}

// O^T of a chunk without what skips the state.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void read_out(const recurrence_record<D, CHANNEL> &record, float scale,
                                                const column_strip &strip, const split_left (&s)[D / SPLIT_TILE],
                                                const split_powers &powers, const split_block (&u)[CHUNK_TILES],
                                                split_block (&o)[CHUNK_TILES]) {
    split_powers written_powers;
    split_left written[CHUNK_TILES];
    split_strip(u, written_powers, written);
    for (int r = 0; r < 2; r++)
        written_powers.row[r].inverse *= scale;
#pragma unroll
    for (int n = 0; n < CHUNK_TILES; n++) {
        const split_sum before = split_multiply_rows(s, record.q[n], strip.lane);
        const split_sum inside = multiply_tile(written, record.pairs, n, strip.lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float start = record.query_start[n * SPLIT_TILE + split_column(strip.lane, half, i)] * scale;
                const float own = split_total(inside, half, i) * written_powers.row[i / 2].inverse;
                o[n].v[half][i] = fmaf(split_total(before, half, i) * powers.row[i / 2].inverse, start,
                                       own * record.pairs_inverse[n]);
            }
    }
}

static __device__ __forceinline__ void store_outputs(const recurrence &a, const kern_chunk &chunk,
                                                     const column_strip &strip, split_block (&o)[CHUNK_TILES]) {
    if (a.skip_width) {
        split_block v[CHUNK_TILES];
        load_values(a, chunk, strip, v);
#pragma unroll
        for (int n = 0; n < CHUNK_TILES; n++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                o[n].v[i / 4][i % 4] = fmaf(strip.skip[i % 4 / 2], v[n].v[i / 4][i % 4], o[n].v[i / 4][i % 4]);
    }
    float *to = recurrence_output(a, chunk.token0, strip.state, 0);
    each_token_row(strip, to, (int64_t)a.outputs * a.columns, [&](int n, int half, int c, float *row) {
        const bool exists = n * SPLIT_TILE + split_column(strip.lane, half, c) < chunk.length;
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (exists && strip.exists[r])
                row[8 * r] = o[n].v[half][2 * r + c];
    });
}

// S^T over a chunk; u is spent.
template <int D, bool CHANNEL>
static __device__ __forceinline__ void advance(const recurrence_record<D, CHANNEL> &record, const column_strip &strip,
                                               split_block (&u)[CHUNK_TILES], strip_state<D> &state) {
    each_token(strip, u, [&](float x, int32_t token, int) { return x * record.key_end[token]; });
    split_powers powers;
    split_left left[CHUNK_TILES];
    split_strip(u, powers, left);
    const auto &keys = recurrence_keys_to_end(record);
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++) {
        split_sum sum = {};
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++)
            split_multiply(sum, left[tile], split_load_turned(keys[tile][n], strip.lane));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t d = CHANNEL ? n * SPLIT_TILE + split_column(strip.lane, half, i) : 0;
                const float s = state.s[n].v[half][i], m1 = record.whole_m1[d], kept = m1 > -1 ? fmaf(m1, s, s) : 0;
                state.s[n].v[half][i] = fmaf(split_total(sum, half, i), powers.row[i / 2].inverse, kept);
            }
    }
}

// One chunk.
template <int D, bool CHANNEL, bool DELTA>
static __device__ __forceinline__ void run_chunk(const recurrence &a, const recurrence_record<D, CHANNEL> &record,
                                                 const kern_chunk &chunk, const column_strip &strip,
                                                 split_block (&u)[CHUNK_TILES], strip_state<D> &state) {
    split_powers powers;
    split_left s[D / SPLIT_TILE];
    split_strip(state.s, powers, s);
    if (DELTA)
        correct<D, CHANNEL>(record, strip, s, powers, u);
    else
        each_token(strip, u, [&](float x, int32_t token, int) { return x * record.weight[token]; });
    split_block o[CHUNK_TILES];
    read_out<D, CHANNEL>(record, a.scale, strip, s, powers, u, o);
    store_outputs(a, chunk, strip, o);
    advance<D, CHANNEL>(record, strip, u, state);
}

static __device__ __forceinline__ chunk_run<float> states_run(const cuda_table *table, const chunk_group &group,
                                                              int32_t row, int32_t state) {
    float *home = recurrence_state<float>(table, group.a, table->row[row].slot, state);
    return chunk_run_of(table, row, group.first, group.count, home,
                        group.carry + (int64_t)state * group.a.depth * group.a.columns);
}

template <int D, bool CHANNEL>
static __device__ __forceinline__ void bring(const chunk_group &group, const chunk_run<float> &run, int32_t state,
                                                              int32_t at, states_shared<D, CHANNEL> &shared) {
    if (run.first + at >= run.last)
        return;
    const int64_t record = (int64_t)(run.first + at - group.first) * group.a.states + state;
    const int32_t stage = at % STAGES<D, CHANNEL>;
    cuda_mbarrier_expect(&shared.full[stage], sizeof(recurrence_record<D, CHANNEL>));
    cuda_bulk_load(&shared.record[stage], (const recurrence_record<D, CHANNEL> *)group.records + record,
                   sizeof(recurrence_record<D, CHANNEL>), &shared.full[stage]);
    cuda_mbarrier_arrive(&shared.full[stage]);
}

template <int D, bool CHANNEL, bool DELTA>
static __device__ void run_states(const cuda_table *table, const chunk_group &group, int32_t row, int32_t item,
                                  char *memory) {
    states_shared<D, CHANNEL> &shared = *(states_shared<D, CHANNEL> *)memory;
    const recurrence &a = group.a;
    const int32_t warps = blockDim.x / CUDA_WARP, warp = threadIdx.x / CUDA_WARP, lane = threadIdx.x % CUDA_WARP;
    column_strip strip = {lane, item / a.slices, {}, {}, {}, {}, {}};
    for (int r = 0; r < 2; r++) {
        strip.column[r] = (item % a.slices * warps + warp) * SPLIT_TILE + lane / 4 + 8 * r;
        strip.exists[r] = strip.column[r] < a.columns;
        strip.reads[r] = strip.column[r] < a.width;
        strip.constant[r] = strip.exists[r] ? 1.0f : 0.0f;
        strip.skip[r] = recurrence_skip(a, strip.state, 0, strip.column[r]);
    }
    const chunk_run<float> run = states_run(table, group, row, strip.state);
    if (run.first >= run.last)
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES<D, CHANNEL>; i++) {
            cuda_mbarrier_make(&shared.full[i], 1);
            cuda_mbarrier_make(&shared.empty[i], warps);
        }
        cuda_mbarrier_made();
        for (int i = 0; i < STAGES<D, CHANNEL>; i++)
            bring<D, CHANNEL>(group, run, strip.state, i, shared);
    }
    strip_state<D> state = {};
    if (run.from)
        each_element<D>(strip, a.depth, [&](int n, int half, int i, int32_t d) {
            state.s[n].v[half][i] = run.from[(int64_t)d * a.columns + strip.column[i / 2]];
        });
    __syncthreads();
    for (int32_t at = 0; run.first + at < run.last; at++) {
        const kern_chunk chunk = table->chunk[run.first + at];
        const int32_t stage = at % STAGES<D, CHANNEL>;
        const uint32_t parity = at / STAGES<D, CHANNEL> % 2;
        split_block u[CHUNK_TILES];
        load_values(a, chunk, strip, u);
        cuda_mbarrier_wait(&shared.full[stage], parity);
        run_chunk<D, CHANNEL, DELTA>(a, shared.record[stage], chunk, strip, u, state);
        __syncwarp();
        if (lane == 0)
            cuda_mbarrier_arrive(&shared.empty[stage]);
        if (threadIdx.x == 0) {
            cuda_mbarrier_wait(&shared.empty[stage], parity);
            bring<D, CHANNEL>(group, run, strip.state, at + STAGES<D, CHANNEL>, shared);
        }
        __syncwarp();
    }
    if (run.to)
        each_element<D>(strip, a.depth, [&](int n, int half, int i, int32_t d) {
            run.to[(int64_t)d * a.columns + strip.column[i / 2]] = state.s[n].v[half][i];
        });
}

#endif

template <int D>
static __global__ void __launch_bounds__(PREPARE_THREADS, 2)
    prepare_kernel(const cuda_table *table, const chunk_group group) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    prepare<D>(table, group, memory);
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
    channel_prepare<D>(table, a, table->chunk[group.first + blockIdx.x / a.states], state,
                       ((recurrence_record<D, true> *)group.records)[blockIdx.x], *(channel_shared<D> *)memory);
}

template <int D, bool CHANNEL, bool DELTA, int WARPS>
static __global__ void __launch_bounds__(WARPS * CUDA_WARP, 1)
    states_kernel(const cuda_table *table, const chunk_group group, int32_t first_row) {
    cuda_begin();
    cuda_await();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const int32_t items = group.a.states * group.a.slices;
    run_states<D, CHANNEL, DELTA>(table, group, first_row + blockIdx.x / items, blockIdx.x % items, memory);
#endif
}

// ------------------------------------------------------------------------------------------------------------ launching

constexpr int DEPTH_LEAST = 64, DEPTH_MOST = 128, WARPS_LEAST = 4, WARPS_MOST = 8;

// sizeof(prepare_shared) and sizeof(states_shared) of a chip that has them.
template <int D> constexpr size_t prepare_bytes(void) {
    return sizeof(recurrence_record<D, false>) + sizeof(chunk_decay) + 2 * CHUNK * sizeof(float) +
           sizeof(recurrence_triangle) + 128;
}
template <int D, bool CHANNEL> constexpr size_t states_bytes(void) {
    return STAGES<D, CHANNEL> * sizeof(recurrence_record<D, CHANNEL>) + 128;
}

template <int D, bool CHANNEL, bool DELTA, int WARPS>
static kern_status launch_strips(const cuda_step *step, chunk_group group) {
    constexpr size_t bytes = states_bytes<D, CHANNEL>();
    group.a.slices = (group.a.columns + WARPS * SPLIT_TILE - 1) / (WARPS * SPLIT_TILE);
    const kern_status status = cuda_allow_shared(states_kernel<D, CHANNEL, DELTA, WARPS>, bytes);
    if (status)
        return status;
    const int blocks = (step->rows - step->generated_rows) * group.a.states * group.a.slices;
    return cuda_start(step, states_kernel<D, CHANNEL, DELTA, WARPS>, blocks, WARPS * CUDA_WARP, bytes, step->table,
                      group, step->generated_rows);
}

// Warps of a block share the records, but where there are few they had better be on different processors.
template <int D, bool CHANNEL, bool DELTA>
static kern_status launch_states(const cuda_step *step, const chunk_group &group) {
    const int strips = (group.a.columns + SPLIT_TILE - 1) / SPLIT_TILE, small = (strips + WARPS_LEAST - 1) / WARPS_LEAST;
    const int64_t blocks = (int64_t)(step->rows - step->generated_rows) * group.a.states * small;
    return strips <= WARPS_LEAST || blocks <= step->cuda->processors
               ? launch_strips<D, CHANNEL, DELTA, WARPS_LEAST>(step, group)
               : launch_strips<D, CHANNEL, DELTA, WARPS_MOST>(step, group);
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
    }
    return status;
}

static size_t carry_bytes(const kern_recurrence *f) {
    return sizeof(float) * (size_t)f->heads * (size_t)f->key_width * (size_t)(f->value_width + 1);
}

bool cuda_recurrence_has_chunks(const kern_cuda *cuda, const kern_recurrence *f) {
    const size_t most = sizeof(channel_shared<DEPTH_MOST>) > states_bytes<DEPTH_MOST, false>()
                            ? sizeof(channel_shared<DEPTH_MOST>)
                            : states_bytes<DEPTH_MOST, false>();
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
    group.carry = (float *)(step->cuda->workspace + RECORDS_BYTES);
    if (a.decay == KERN_DECAY_CHANNEL)
        return a.depth <= DEPTH_LEAST ? launch_groups<DEPTH_LEAST, true>(step, group)
                                      : launch_groups<DEPTH_MOST, true>(step, group);
    return a.depth <= DEPTH_LEAST ? launch_groups<DEPTH_LEAST, false>(step, group)
                                  : launch_groups<DEPTH_MOST, false>(step, group);
}

// SPDX-License-Identifier: Apache-2.0
// One token of very many states (sm_90): states stream through the processors at the rate of memory.
//
// A block a processor, there as long as states are left. What it works on at a time is a *stage*: one state, or several
// small ones, or a band of columns of a large one. A warp of its own, the producer, finds the next states and has the
// copy engine bring them, with their query, key, decay and value, into a ring of stages in shared memory. Teams of 128
// threads, one for 32 columns, take their part of a stage into registers and do as recurrence_row does, with the same
// sums in the same order: the bits are those of recurrence.cu. They write the state home from registers, past shared
// memory. So all stages but the one that is worked on are on their way at any time, 128 KiB a processor and more, and
// teams run apart from one another as far as the ring is deep.
//
// A stage is `full` when all its bytes have come and `empty` when every warp of the teams has done with it.
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/recurrence.cuh"

constexpr int TEAMS = 4, STAGES = 8, BAND = TEAMS * RECURRENCE_SLICE;
constexpr int STAGE_BYTES = 64 << 10, LEAST_STAGE_BYTES = 16 << 10;
constexpr int PAST_END = BAND * sizeof(float); // a last row's columns that are none
// From here on a stream is quicker than a block for each piece: bytes of states a processor.
constexpr int64_t STREAM_BYTES = 128 << 10;

struct stream {
    recurrence a;           // slices: bands of a state
    int32_t band, teams;    // columns of a band, teams that share one
    int32_t pieces, stages; // bands of a stage, stages of the ring
    int32_t piece_bytes;    // of a band and its operands in a stage
};

template <typename Stored> struct stream_piece {
    Stored *home; // the first of its columns
    int32_t row, state, column0;
    float weight, head_m1;
    cuda_rounding rounding;
};
template <int R> struct stream_operands {
    recurrence_token<R> token; // decay_m1: the log decay
    float v[BAND];
};
template <int R, typename Stored> struct alignas(128) stream_shared { // before the stages
    cuda_mbarrier full[STAGES], empty[STAGES];
    stream_piece<Stored> piece[STAGES][TEAMS];
    recurrence_sums sums[TEAMS][2];
    float decay_m1[TEAMS][R * RECURRENCE_GROUPS];
};

// Stages by turns.
struct stream_turn {
    int32_t stage;
    uint32_t parity;

    __device__ __forceinline__ void advance(int32_t stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int R, typename Stored>
static __device__ __forceinline__ stream_operands<R> &operands_at(const stream &s, char *memory, int32_t stage,
                                                                  int32_t piece) {
    return *(stream_operands<R> *)(memory + sizeof(stream_shared<R, Stored>) +
                                   (stage * s.pieces + piece) * s.piece_bytes);
}
template <int R, typename Stored> static __device__ __forceinline__ Stored *state_at(stream_operands<R> &operands) {
    return (Stored *)(&operands + 1);
}

// -------------------------------------------------------------------------------------------------------- the producer

// What lane `lane` of the producer brings in round i; no row: nothing.
template <typename Stored>
static __device__ __forceinline__ stream_piece<Stored> find(const cuda_table *table, const stream &s, int32_t i) {
    stream_piece<Stored> found = {};
    const int32_t lane = threadIdx.x % 32, item = ((int32_t)blockIdx.x + i * (int32_t)gridDim.x) * s.pieces + lane;
    const recurrence_piece p = recurrence_piece_of(s.a, item, s.band);
    found.row = -1;
    if (lane >= s.pieces || p.row >= table->n_rows)
        return found;
    Stored *home = recurrence_state<Stored>(table, s.a, table->row[p.row].slot, p.state);
    found.home = home ? home + p.column0 : NULL;
    found.row = p.row;
    found.state = p.state;
    found.column0 = p.column0;
    return found;
}

static __device__ __forceinline__ int32_t width_of(const stream &s, int32_t column0) {
    return min(s.band, s.a.columns - column0);
}

// A lane's operands, and its state where that is one run.
template <int R, bool CHANNEL, typename Stored>
static __device__ __forceinline__ void bring(const stream &s, const stream_piece<Stored> &p,
                                             stream_operands<R> &operands, cuda_mbarrier *full) {
    const recurrence &a = s.a;
    const uint32_t width = width_of(s, p.column0), row_bytes = a.depth * sizeof(float);
    const uint32_t state_bytes = p.home ? a.depth * width * sizeof(Stored) : 0;
    cuda_mbarrier_expect(full, state_bytes + (CHANNEL ? 3 : 2) * row_bytes + width * sizeof(float));
    if (p.home && s.band == a.columns)
        cuda_bulk_load(state_at<R, Stored>(operands), p.home, state_bytes, full);
    cuda_bulk_load(operands.token.q, recurrence_query(a, p.row, p.state, 0), row_bytes, full);
    cuda_bulk_load(operands.token.k, recurrence_key(a, p.row, p.state), row_bytes, full);
    if (CHANNEL)
        cuda_bulk_load(operands.token.decay_m1, recurrence_channel_decay(a, p.row, p.state), row_bytes, full);
    cuda_bulk_load(operands.v, recurrence_value(a, p.row, p.state) + p.column0, width * sizeof(float), full);
}

// Bands of larger states, row by row, by all lanes.
template <int R, typename Stored>
static __device__ __forceinline__ void bring_bands(const stream &s, const stream_piece<Stored> &own, char *memory,
                                                   int32_t stage, cuda_mbarrier *full) {
    for (int32_t piece = 0; piece < s.pieces; piece++) {
        const Stored *from = (const Stored *)__shfl_sync(~0u, (unsigned long long)own.home, piece);
        const uint32_t bytes = width_of(s, __shfl_sync(~0u, own.column0, piece)) * sizeof(Stored);
        Stored *to = state_at<R, Stored>(operands_at<R, Stored>(s, memory, stage, piece));
        for (int32_t d = threadIdx.x % 32; from && d < s.a.depth; d += 32)
            cuda_bulk_load(to + d * s.band, from + (int64_t)d * s.a.columns, bytes, full);
    }
}

template <int R, bool CHANNEL, typename Stored>
static __device__ __forceinline__ void produce(const cuda_table *table, const stream &s, char *memory, int32_t rounds) {
    stream_shared<R, Stored> &shared = *(stream_shared<R, Stored> *)memory;
    const recurrence &a = s.a;
    const int32_t lane = threadIdx.x % 32;
    for (int32_t i = 0; i < min(rounds, s.stages); i++) {
        const stream_piece<Stored> p = find<Stored>(table, s, i);
        if (p.home && s.band == a.columns)
            cuda_bulk_prefetch(p.home, a.depth * a.columns * sizeof(Stored));
    }
    cuda_await();
    stream_turn turn = {0, 0};
    for (int32_t i = 0; i < rounds; i++, turn.advance(s.stages)) {
        stream_piece<Stored> p = find<Stored>(table, s, i);
        float head_g = 0;
        int64_t position = 0;
        if (p.row >= 0) {
            p.weight = recurrence_weight(a, p.row, p.state);
            head_g = CHANNEL ? 0 : recurrence_head_decay(a, p.row, p.state);
            position = table->row[p.row].position;
        }
        cuda_mbarrier *full = &shared.full[turn.stage];
        cuda_mbarrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
        if (p.row >= 0)
            bring<R, CHANNEL, Stored>(s, p, operands_at<R, Stored>(s, memory, turn.stage, lane), full);
        __syncwarp();
        if (s.band < a.columns)
            bring_bands<R, Stored>(s, p, memory, turn.stage, full);
        p.head_m1 = expm1f(head_g);
        if (sizeof(Stored) < sizeof(float))
            p.rounding = cuda_rounding_of(position, p.state);
        if (lane < s.pieces)
            shared.piece[turn.stage][lane] = p;
        __syncwarp();
        if (lane == 0)
            cuda_mbarrier_arrive(full);
    }
}

// ----------------------------------------------------------------------------------------------------------- the teams

// This thread's part of a band; NULL: zeros. Rows from D on are zeros, columns that are none may be any numbers, as no
// other column sees them.
template <int R, typename Team, typename Stored>
static __device__ __forceinline__ void take(const Stored *from, int32_t band, cuda_quad (&state)[R]) {
    const Stored *first = from + Team::thread() / RECURRENCE_LANES * band;
    if (from)
#pragma unroll
        for (int i = 0; i < R; i++)
            state[i] = cuda_load(first + i * RECURRENCE_GROUPS * band, 4, true);
    else
#pragma unroll
        for (int i = 0; i < R; i++)
            state[i] = cuda_quad{};
}

template <int R, bool CHANNEL, typename Stored>
static __device__ __forceinline__ void consume(const stream &s, char *memory, int32_t rounds) {
    typedef cuda_team<RECURRENCE_THREADS> team;
    stream_shared<R, Stored> &shared = *(stream_shared<R, Stored> *)memory;
    const recurrence &a = s.a;
    const int32_t number = team::number(), piece = number / s.teams;
    const int32_t inner = number % s.teams * RECURRENCE_SLICE + team::thread() % RECURRENCE_LANES * 4; // of the band
    cuda_await();
    uint32_t barriers = 0;
    stream_turn turn = {0, 0};
    for (int32_t i = 0; i < rounds; i++, turn.advance(s.stages)) {
        cuda_mbarrier_wait(&shared.full[turn.stage], turn.parity);
        const stream_piece<Stored> p = shared.piece[turn.stage][piece];
        stream_operands<R> &operands = operands_at<R, Stored>(s, memory, turn.stage, piece);
        const int32_t column = p.column0 + inner, left = p.row < 0 ? 0 : width_of(s, p.column0) - inner;
        cuda_quad state[R];
        take<R, team>(p.home ? state_at<R, Stored>(operands) + inner : NULL, s.band, state);
        if (CHANNEL) {
            for (int32_t d = team::thread(); d < R * RECURRENCE_GROUPS; d += RECURRENCE_THREADS)
                shared.decay_m1[number][d] = expm1f(operands.token.decay_m1[d]);
            team::sync();
        }
        recurrence_decay<R, CHANNEL, team>(shared.decay_m1[number], p.head_m1, false, state);
        recurrence_sums &sums = shared.sums[number][barriers++ & 1];
        recurrence_sum_columns<R, team>(state, operands.token, a.delta, sums);
        team::sync();
        const cuda_quad v = recurrence_load_columns<true>(operands.v + inner, left);
        if (p.row >= 0)
            recurrence_write<R, true, team>(a, state, operands.token, p.row, p.state, column, v, p.weight, sums);
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            cuda_mbarrier_arrive(&shared.empty[turn.stage]);
        if (p.row < 0)
            continue;
        recurrence_read_more<R, true, team>(a, state, p.row, p.state, column, v, shared.sums[number], barriers);
        recurrence_round<R, team, Stored>(a, p.rounding, column, state);
        recurrence_store_state<R, true, team>(p.home ? p.home + inner : NULL, a.depth, a.columns, left, state);
    }
}

template <int R, typename Stored> static __device__ __forceinline__ void make_ring(const stream &s, char *memory) {
    stream_shared<R, Stored> &shared = *(stream_shared<R, Stored> *)memory;
    const int32_t teams = s.pieces * s.teams;
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < s.stages; i++) {
            cuda_mbarrier_make(&shared.full[i], 1);
            cuda_mbarrier_make(&shared.empty[i], teams * RECURRENCE_WARPS);
        }
        cuda_mbarrier_made();
    }
    for (int32_t piece = 0; piece < s.stages * s.pieces; piece++) { // what copies leave alone
        stream_operands<R> &operands = operands_at<R, Stored>(s, memory, 0, piece);
        recurrence_token<R> &token = operands.token;
        for (int32_t d = s.a.depth + threadIdx.x; d < token.DEPTH; d += blockDim.x)
            token.q[d] = token.k[d] = token.decay_m1[d] = 0;
        uint32_t *state = (uint32_t *)state_at<R, Stored>(operands);
        const int32_t row_words = s.band * (int32_t)sizeof(Stored) / 4;
        for (int32_t i = s.a.depth * row_words + threadIdx.x; i < token.DEPTH * row_words; i += blockDim.x)
            state[i] = 0;
    }
    __syncthreads();
}

#endif

// Every thread comes to each barrier of its team in every round, also where its piece is none.
template <int R, bool CHANNEL, typename Stored>
static __global__ void __launch_bounds__((R <= 8 ? TEAMS : TEAMS / 2) * RECURRENCE_THREADS + 32, 1)
    stream_kernel(const cuda_table *table, const stream s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cuda_begin();
    extern __shared__ __align__(128) char memory[];
    make_ring<R, Stored>(s, memory);
    const int32_t items = table->n_rows * s.a.states * s.a.slices, all = (items + s.pieces - 1) / s.pieces;
    const int32_t rounds = (all - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x; // perhaps none
    if (threadIdx.x < s.pieces * s.teams * RECURRENCE_THREADS)
        consume<R, CHANNEL, Stored>(s, memory, rounds);
    else
        produce<R, CHANNEL, Stored>(table, s, memory, rounds);
#endif
}

// ----------------------------------------------------------------------------------------------------------- launching

// Bands as equal as whole slices of 32 columns allow; pieces side by side until there are threads or bytes enough.
template <int R, typename Stored> static stream stream_of(const recurrence &a, size_t shared_limit) {
    stream s = {};
    s.a = a;
    const int32_t depth = R * RECURRENCE_GROUPS, slice_bytes = depth * RECURRENCE_SLICE * (int32_t)sizeof(Stored);
    const int32_t most = min(R <= 8 ? BAND : BAND / 2, STAGE_BYTES / slice_bytes * RECURRENCE_SLICE);
    const int32_t bands = (a.columns + most - 1) / most;
    s.band = bands == 1 ? a.columns
                        : (a.columns + bands * RECURRENCE_SLICE - 1) / (bands * RECURRENCE_SLICE) * RECURRENCE_SLICE;
    s.a.slices = (a.columns + s.band - 1) / s.band;
    s.teams = (s.band + RECURRENCE_SLICE - 1) / RECURRENCE_SLICE;
    const int32_t state_bytes = depth * s.band * (int32_t)sizeof(Stored);
    s.pieces = max(1, min(most / RECURRENCE_SLICE / s.teams, STAGE_BYTES / state_bytes));
    s.piece_bytes = ((int32_t)sizeof(stream_operands<R>) + state_bytes + 127) / 128 * 128;
    s.stages = min(STAGES, ((int32_t)shared_limit - (int32_t)sizeof(stream_shared<R, Stored>) - PAST_END) /
                               (s.pieces * s.piece_bytes));
    return s;
}

template <int R, bool CHANNEL, typename Stored>
static kern_status launch(const cuda_step *step, const recurrence &a, bool *fits) {
    const stream s = stream_of<R, Stored>(a, step->cuda->shared_limit);
    const int64_t band_bytes = (int64_t)a.depth * s.band * sizeof(Stored);
    *fits = s.stages >= 2 && s.pieces * band_bytes >= LEAST_STAGE_BYTES &&
            (s.band == a.columns || a.columns * sizeof(Stored) % 16 == 0);
    if (!*fits)
        return KERN_OK;
    const size_t bytes = sizeof(stream_shared<R, Stored>) + (size_t)s.stages * s.pieces * s.piece_bytes + PAST_END;
    const kern_status status = cuda_allow_shared(stream_kernel<R, CHANNEL, Stored>, bytes);
    if (status)
        return status;
    const int blocks = cuda_blocks((int64_t)step->rows * a.states * s.a.slices, s.pieces);
    return cuda_start(step, stream_kernel<R, CHANNEL, Stored>, min(blocks, step->cuda->processors),
                      s.pieces * s.teams * RECURRENCE_THREADS + 32, bytes, step->table, s);
}

template <int R, typename Stored> static kern_status launch(const cuda_step *step, const recurrence &a, bool *fits) {
    return a.decay == KERN_DECAY_CHANNEL ? launch<R, true, Stored>(step, a, fits)
                                         : launch<R, false, Stored>(step, a, fits);
}

template <typename Stored> static kern_status launch(const cuda_step *step, const recurrence &a, bool *fits) {
    const int64_t bytes = (int64_t)step->rows * a.states * a.depth * a.columns * sizeof(Stored);
    *fits = bytes >= STREAM_BYTES * step->cuda->processors;
    if (!*fits)
        return KERN_OK;
    return a.depth <= 2 * RECURRENCE_GROUPS   ? launch<2, Stored>(step, a, fits)
           : a.depth <= 4 * RECURRENCE_GROUPS ? launch<4, Stored>(step, a, fits)
           : a.depth <= 8 * RECURRENCE_GROUPS ? launch<8, Stored>(step, a, fits)
                                              : launch<16, Stored>(step, a, fits);
}

kern_status cuda_recurrence_stream(const cuda_step *step, const recurrence &a, kern_storage storage, bool *fits) {
    *fits = step->generated && step->cuda->overlaps && a.slots.p && cuda_is_wide(a.slots.p) && a.depth % 4 == 0 &&
            a.depth <= 16 * RECURRENCE_GROUPS && a.columns % 4 == 0 && a.columns == a.width && cuda_is_wide(a.q) &&
            cuda_is_wide(a.k) && cuda_is_wide(a.v) && cuda_is_wide(a.o) && cuda_is_wide(a.g);
    if (!*fits)
        return KERN_OK;
    return storage == KERN_STORE_BF16 ? launch<cuda_bf16>(step, a, fits) : launch<float>(step, a, fits);
}

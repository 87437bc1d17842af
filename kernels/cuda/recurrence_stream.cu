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
//
// Where the states' heads have operands of their own, of 64 or 128 channels, the stream takes in what makes these
// (prepare.cuh): three more warps, one for the queries of a stage, one for the keys, one for the values, put them into
// the stage while its states come, and into memory; the producer makes the gates. A warp's inputs and windows are on
// their way while it works on the stage before.
#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/prepare.cuh"
#include "kernels/cuda/recurrence.cuh"

constexpr int TEAMS = 4, STAGES = 8, BAND = TEAMS * RECURRENCE_SLICE;
constexpr int STAGE_BYTES = 64 << 10, LEAST_STAGE_BYTES = 16 << 10;
constexpr int PAST_END = BAND * sizeof(float); // a last row's columns that are none
// From here on a stream is quicker than a block for each piece: bytes of states a processor.
constexpr int64_t STREAM_BYTES = 128 << 10;

struct stream {
    static constexpr int PREPARERS = 0; // warps

    recurrence a;           // slices: bands of a state
    int32_t band, teams;    // columns of a band, teams that share one
    int32_t pieces, stages; // bands of a stage, stages of the ring
    int32_t piece_bytes;    // of a band and its operands in a stage
};

struct prepared_stream : stream {
    static constexpr int PREPARERS = 3;

    prepare_part part[PREPARERS]; // that make q, k, v
    kern_gates_args gates;
    bool gated, decays, weighs; // whether there are gates; whether they make g, beta
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

// A lane's operands, where nobody makes them, and its state where that is one run.
template <int R, bool CHANNEL, typename Stored, typename Work>
static __device__ __forceinline__ void bring(const Work &s, const stream_piece<Stored> &p, stream_operands<R> &operands,
                                             cuda_mbarrier *full) {
    const recurrence &a = s.a;
    const uint32_t width = width_of(s, p.column0), row_bytes = a.depth * sizeof(float);
    const uint32_t state_bytes = p.home ? a.depth * width * sizeof(Stored) : 0;
    const uint32_t operand_bytes = Work::PREPARERS ? 0 : (CHANNEL ? 3 : 2) * row_bytes + width * sizeof(float);
    cuda_mbarrier_expect(full, state_bytes + operand_bytes);
    if (p.home && s.band == a.columns)
        cuda_bulk_load(state_at<R, Stored>(operands), p.home, state_bytes, full);
    if (Work::PREPARERS)
        return;
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

// The scalars of a lane's token as they lie in memory, then in the piece.
struct stream_scalars {
    float weight, head_g;
    int64_t position;
    cuda_gate_inputs gate;
};
template <bool CHANNEL, typename Work>
static __device__ __forceinline__ stream_scalars fetch_scalars(const cuda_table *table, const Work &s, int32_t row,
                                                               int32_t state) {
    stream_scalars scalars = {};
    if (row < 0)
        return scalars;
    bool decays = CHANNEL, weighs = false; // somebody else has them
    if constexpr (Work::PREPARERS > 0) {
        decays = s.decays;
        weighs = s.weighs;
        if (s.gated)
            scalars.gate = cuda_gate_fetch(s.gates, 1, row, state);
    }
    scalars.weight = weighs ? 0 : recurrence_weight(s.a, row, state);
    scalars.head_g = decays ? 0 : recurrence_head_decay(s.a, row, state);
    scalars.position = table->row[row].position;
    return scalars;
}
template <typename Stored, typename Work>
static __device__ __forceinline__ void put_scalars(const Work &s, stream_scalars scalars, stream_piece<Stored> &p) {
    if constexpr (Work::PREPARERS > 0)
        if (s.gated && p.row >= 0) {
            const cuda_gate_pair made = cuda_gate_of(s.gates.gates, scalars.gate);
            scalars.head_g = s.decays ? made.g : scalars.head_g;
            scalars.weight = s.weighs ? made.beta : scalars.weight;
            cuda_gate_keep(s.gates, 1, p.row, p.state, made);
        }
    p.weight = scalars.weight;
    p.head_m1 = expm1f(scalars.head_g);
    if (sizeof(Stored) < sizeof(float))
        p.rounding = cuda_rounding_of(scalars.position, p.state);
}

template <int R, bool CHANNEL, typename Stored, typename Work>
static __device__ __forceinline__ void produce(const cuda_table *table, const Work &s, char *memory, int32_t rounds) {
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
        const stream_scalars scalars = fetch_scalars<CHANNEL>(table, s, p.row, p.state);
        cuda_mbarrier *full = &shared.full[turn.stage];
        cuda_mbarrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
        if (p.row >= 0)
            bring<R, CHANNEL, Stored>(s, p, operands_at<R, Stored>(s, memory, turn.stage, lane), full);
        __syncwarp();
        if (s.band < a.columns)
            bring_bands<R, Stored>(s, p, memory, turn.stage, full);
        put_scalars(s, scalars, p);
        if (lane < s.pieces)
            shared.piece[turn.stage][lane] = p;
        __syncwarp();
        if (lane == 0)
            cuda_mbarrier_arrive(full);
    }
}

// ------------------------------------------------------------------------------------------------------- the preparers

// Whose operand a lane has a quad of in round i; row -1: nobody's.
struct prepared_head {
    int32_t row, head, slot;
};
template <int R>
static __device__ __forceinline__ prepared_head find_head(const cuda_table *table, const prepared_stream &s,
                                                          int32_t i) {
    constexpr int LANES = R * RECURRENCE_GROUPS / CUDA_QUAD;
    const int32_t first = ((int32_t)blockIdx.x + i * (int32_t)gridDim.x) * s.pieces;
    const int32_t item = first + (int32_t)threadIdx.x % CUDA_WARP / LANES, row = item / s.a.states;
    return row < table->n_rows ? prepared_head{row, item % s.a.states, table->row[row].slot}
                               : prepared_head{-1, -1, -1};
}

// One of q, k and v of all heads of a stage, stage after stage.
template <int R, typename Stored>
static __device__ __forceinline__ void prepare(const cuda_table *table, const prepared_stream &s, char *memory,
                                               int32_t which, int32_t rounds) {
    constexpr int DEPTH = R * RECURRENCE_GROUPS, LANES = DEPTH / CUDA_QUAD;
    stream_shared<R, Stored> &shared = *(stream_shared<R, Stored> *)memory;
    const prepare_part &part = s.part[which];
    const int32_t lane = threadIdx.x % CUDA_WARP, piece = lane / LANES, inner = lane % LANES * CUDA_QUAD;
    const auto window_of = [&](const prepared_head &h) { return cuda_slot(table, part.conv.state, h.slot); };
    const auto fetch = [&](const prepared_head &h) {
        return h.row < 0 ? prepare_inputs{}
                         : prepare_fetch_inputs(part.conv, h.row, h.head * DEPTH + inner, window_of(h));
    };
    for (int32_t i = 0; i < min(rounds, s.stages); i++) {
        const prepared_head ahead = find_head<R>(table, s, i);
        const float *window = window_of(ahead);
        for (int32_t tap = 0; window && tap < PREPARE_TAPS - 1 && lane % 8 == 0; tap++) // a line
            cuda_prefetch(window + (int64_t)tap * part.conv.channels + ahead.head * DEPTH + inner);
    }
    cuda_quad weight[CUDA_QUAD] = {}, bias = {};
    prepared_head next = find_head<R>(table, s, 0), after = find_head<R>(table, s, 1);
    int32_t held = next.head; // whose weights these are
    if (held >= 0)
        prepare_fetch_taps(part.conv, held * DEPTH + inner, weight, bias);
    cuda_await();
    prepare_inputs coming = fetch(next);
    stream_turn turn = {0, 0};
    for (int32_t i = 0; i < rounds; i++, turn.advance(s.stages)) {
        const prepared_head now = next;
        const prepare_inputs input = coming;
        next = after;
        after = find_head<R>(table, s, i + 2);
        coming = fetch(next);
        if (now.head >= 0 && now.head != held) {
            held = now.head;
            prepare_fetch_taps(part.conv, held * DEPTH + inner, weight, bias);
        }
        const prepare_outputs made = prepare_make<LANES>(part, weight, bias, input, true);
        stream_operands<R> &operands = operands_at<R, Stored>(s, memory, turn.stage, piece);
        float *to = which == 0 ? operands.token.q : which == 1 ? operands.token.k : operands.v;
        cuda_mbarrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
        cuda_store(to + inner, made.out, CUDA_QUAD, true);
        __syncwarp();
        if (lane == 0)
            cuda_mbarrier_arrive(&shared.full[turn.stage]);
        if (now.row >= 0)
            prepare_keep<true>(part, (int64_t)now.row * part.conv.channels + now.head * DEPTH + inner, input, made);
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

template <int R, typename Stored, typename Work>
static __device__ __forceinline__ void make_ring(const Work &s, char *memory) {
    stream_shared<R, Stored> &shared = *(stream_shared<R, Stored> *)memory;
    const int32_t teams = s.pieces * s.teams;
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < s.stages; i++) {
            cuda_mbarrier_make(&shared.full[i], 1 + Work::PREPARERS);
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

template <int R, typename Work>
constexpr int THREADS = (R <= 8 ? TEAMS : TEAMS / 2) * RECURRENCE_THREADS + (1 + Work::PREPARERS) * CUDA_WARP;

// Every thread comes to each barrier of its team in every round, also where its piece is none.
template <int R, bool CHANNEL, typename Stored, typename Work>
static __global__ void __launch_bounds__(THREADS<R, Work>, 1)
    stream_kernel(const cuda_table *table, const __grid_constant__ Work s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cuda_begin();
    extern __shared__ __align__(128) char memory[];
    make_ring<R, Stored>(s, memory);
    const int32_t items = table->n_rows * s.a.states * s.a.slices, all = (items + s.pieces - 1) / s.pieces;
    const int32_t rounds = (all - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x; // perhaps none
    const int32_t past = (int32_t)threadIdx.x - s.pieces * s.teams * RECURRENCE_THREADS;
    if (past < 0)
        consume<R, CHANNEL, Stored>(s, memory, rounds);
    else if (past < CUDA_WARP)
        produce<R, CHANNEL, Stored>(table, s, memory, rounds);
    else if constexpr (Work::PREPARERS > 0)
        prepare<R, Stored>(table, s, memory, past / CUDA_WARP - 1, rounds);
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

template <typename Stored> static bool has_bytes(const stream &s) {
    return s.stages >= 2 && s.pieces * (int64_t)s.a.depth * s.band * (int)sizeof(Stored) >= LEAST_STAGE_BYTES &&
           (s.band == s.a.columns || s.a.columns * sizeof(Stored) % 16 == 0);
}

template <int R, bool CHANNEL, typename Stored, typename Work>
static kern_status start(const cuda_step *step, const Work &s) {
    const size_t bytes = sizeof(stream_shared<R, Stored>) + (size_t)s.stages * s.pieces * s.piece_bytes + PAST_END;
    const kern_status status = cuda_allow_shared(stream_kernel<R, CHANNEL, Stored, Work>, bytes);
    if (status)
        return status;
    const int blocks = cuda_blocks((int64_t)step->rows * s.a.states * s.a.slices, s.pieces);
    const int warps = s.pieces * s.teams * RECURRENCE_WARPS + 1 + Work::PREPARERS;
    return cuda_start(step, stream_kernel<R, CHANNEL, Stored, Work>, min(blocks, step->cuda->processors),
                      warps * CUDA_WARP, bytes, step->table, s);
}

template <int R, bool CHANNEL, typename Stored>
static kern_status launch(const cuda_step *step, const recurrence &a, bool *fits) {
    const stream s = stream_of<R, Stored>(a, step->cuda->shared_limit);
    *fits = has_bytes<Stored>(s);
    return *fits ? start<R, CHANNEL, Stored>(step, s) : KERN_OK;
}

template <int R, typename Stored> static kern_status launch(const cuda_step *step, const recurrence &a, bool *fits) {
    return a.decay == KERN_DECAY_CHANNEL ? launch<R, true, Stored>(step, a, fits)
                                         : launch<R, false, Stored>(step, a, fits);
}

template <typename Stored> static kern_status launch(const cuda_step *step, const recurrence &a, bool *fits) {
    return a.depth <= 2 * RECURRENCE_GROUPS   ? launch<2, Stored>(step, a, fits)
           : a.depth <= 4 * RECURRENCE_GROUPS ? launch<4, Stored>(step, a, fits)
           : a.depth <= 8 * RECURRENCE_GROUPS ? launch<8, Stored>(step, a, fits)
                                              : launch<16, Stored>(step, a, fits);
}

static bool streams(const cuda_step *step, const recurrence &a, kern_storage storage) {
    const int64_t bytes = (int64_t)step->rows * a.states * a.depth * a.columns * (storage == KERN_STORE_BF16 ? 2 : 4);
    return bytes >= STREAM_BYTES * step->cuda->processors && step->generated && step->cuda->overlaps && a.slots.p &&
           cuda_is_wide(a.slots.p) && a.depth % 4 == 0 && a.depth <= 16 * RECURRENCE_GROUPS && a.columns % 4 == 0 &&
           a.columns == a.width && cuda_is_wide(a.q) && cuda_is_wide(a.k) && cuda_is_wide(a.v) && cuda_is_wide(a.o) &&
           cuda_is_wide(a.g);
}

kern_status cuda_recurrence_stream(const cuda_step *step, const recurrence &a, kern_storage storage, bool *fits) {
    *fits = streams(step, a, storage);
    if (!*fits)
        return KERN_OK;
    return storage == KERN_STORE_BF16 ? launch<cuda_bf16>(step, a, fits) : launch<float>(step, a, fits);
}

// --------------------------------------------------------------------------------------------- behind its preparation

// What the preparation makes of the recurrence's operands; false: not all heads' vectors, or not head by head.
static bool take_in(const preparation &before, const recurrence &a, prepared_stream *s) {
    const float *const made[] = {a.q, a.k, a.v};
    int32_t found = 0;
    for (int32_t which = 0; which < s->PREPARERS; which++)
        for (int32_t i = 0; i < before.parts; i++) {
            const prepare_part &part = before.part[i];
            if ((part.norm.y ? part.norm.y : part.conv.y.f) != made[which] || !prepare_suits_heads(part) ||
                part.conv.channels != a.states * a.depth || (part.norm.y && part.norm.width != a.depth))
                continue;
            s->part[which] = part;
            found |= 1 << i;
        }
    s->gates = before.gates;
    s->gated = before.gate_channels > 0;
    s->decays = s->gated && a.decay == KERN_DECAY_SCALAR && a.g == before.gates.g.f;
    s->weighs = s->gated && a.beta && a.beta == before.gates.beta.f;
    return before.parts == s->PREPARERS && found == (1 << s->PREPARERS) - 1 &&
           (!s->gated || (before.gate_channels == 1 && before.gates.gates.heads == a.states));
}

// Whether the recurrence writes nothing that the preparation reads or writes, and reads nothing that it writes but what
// it makes for the same head.
static bool is_apart(const cuda_step *step, const prepared_stream &s, size_t state_bytes) {
    const recurrence &a = s.a;
    const cuda_range o = cuda_floats_at(step, a.o, (int64_t)a.states * a.columns);
    const cuda_range state = {(const char *)a.slots.p, state_bytes};
    const float *const scalar[] = {s.decays || a.decay != KERN_DECAY_SCALAR ? NULL : a.g, s.weighs ? NULL : a.beta};
    const float *const gate[] = {s.gates.a.f, s.gates.b.f, s.gates.g.f, s.gates.beta.f};
    bool apart = true;
    for (const float *p : scalar) {
        const cuda_range read = cuda_floats_at(step, p, a.states);
        apart = apart && !cuda_overlap(read, o);
        for (const prepare_part &part : s.part)
            apart = apart && !cuda_overlap(read, cuda_floats_at(step, part.conv.y.f, part.conv.channels)) &&
                    !cuda_overlap(read, cuda_floats_at(step, part.norm.y, part.conv.channels));
        for (int i = 2; i < 4; i++)
            apart = apart && (!s.gated || !cuda_overlap(read, cuda_floats_at(step, gate[i], a.states)));
    }
    for (const float *p : gate)
        apart = apart && (!s.gated || !cuda_overlap(o, cuda_floats_at(step, p, a.states)));
    for (const prepare_part &part : s.part) {
        const kern_short_conv_args &conv = part.conv;
        const size_t window = conv.state.p ? sizeof(float) * (PREPARE_TAPS - 1) * (size_t)conv.channels : 0;
        apart = apart && !cuda_overlap(o, cuda_floats_at(step, conv.x.f, conv.channels)) &&
                !cuda_overlap(o, cuda_floats_at(step, conv.y.f, conv.channels)) &&
                !cuda_overlap(o, cuda_floats_at(step, part.norm.y, conv.channels)) &&
                !cuda_overlap(state, {(const char *)conv.state.p, window});
    }
    return apart;
}

template <int R, typename Stored>
static kern_status launch_behind(const cuda_step *step, const preparation &before, const recurrence &a, bool *fits) {
    prepared_stream s = {};
    (stream &)s = stream_of<R, Stored>(a, step->cuda->shared_limit);
    *fits = has_bytes<Stored>(s) && s.band == a.columns && s.pieces * a.depth == PREPARE_PIECE &&
            take_in(before, a, &s) && is_apart(step, s, sizeof(Stored) * (size_t)a.states * a.depth * a.columns);
    return *fits ? start<R, false, Stored>(step, s) : KERN_OK;
}

kern_status cuda_recurrence_stream_behind(const cuda_step *step, const preparation &before, const recurrence &a,
                                          kern_storage storage, bool *fits) {
    *fits = streams(step, a, storage) && a.depth == a.width && (a.depth == 64 || a.depth == 128) &&
            a.decay != KERN_DECAY_CHANNEL && a.queries == a.states && a.keys == a.states && a.values == a.states;
    if (!*fits)
        return KERN_OK;
    if (storage == KERN_STORE_BF16)
        return a.depth == 64 ? launch_behind<4, cuda_bf16>(step, before, a, fits)
                             : launch_behind<8, cuda_bf16>(step, before, a, fits);
    return a.depth == 64 ? launch_behind<4, float>(step, before, a, fits)
                         : launch_behind<8, float>(step, before, a, fits);
}

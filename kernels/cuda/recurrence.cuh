// SPDX-License-Identifier: Apache-2.0
// The recurrence family (models.md 11) on a team of 128 threads, token by token with the state on chip: read once,
// written once in place, however many tokens a row has. With S~ = decay S, u = S~^T k and w = S~^T q of one pass:
//
//   v' = weight v, or weight (v - u) by the delta rule      o = scale (w + (q.k) v') [+ skip v]      S = S~ + k v'^T
//
// Columns of a state do not see each other: a team owns 32 of them (8 lanes x 4 floats) and all D rows, R rows a
// thread in registers, row i * 16 + g for row group g of 16. Sums over D: a thread's rows, the four row groups of its
// warp by shuffles, the four warps through shared memory, always in that order. Query, key and decay of a token lie in
// shared memory in three places by turns, the sums in two, so that a token needs one barrier: sums are read between it
// and the next, where those after them are made; a token is read up to the next barrier, where the one after the next
// comes.
#ifndef KERNELS_CUDA_RECURRENCE_CUH
#define KERNELS_CUDA_RECURRENCE_CUH

#include "kernels/cuda/storage.cuh"
#include "kernels/cuda/team.cuh"

constexpr int RECURRENCE_THREADS = 128, RECURRENCE_WARPS = RECURRENCE_THREADS / 32, RECURRENCE_LANES = 8;
constexpr int RECURRENCE_SLICE = 4 * RECURRENCE_LANES, RECURRENCE_GROUPS = RECURRENCE_THREADS / RECURRENCE_LANES;

// The family with its zeros resolved, and its operands.
struct recurrence {
    const float *q, *k, *v, *g, *beta, *skip;
    float *o;
    kern_ptr slots;
    float *snapshots;                                        // of prompt rows, for backward
    int32_t states, queries, keys, values, outputs, readers; // heads of each; heads of o that read one state
    int32_t depth, width, columns, slices;                   // D, V, V', pieces of a state
    int32_t decay, delta, skip_width;
    float scale;
};

// What a team works on: `slices` pieces a state, all states of a row one after another.
struct recurrence_piece {
    int32_t row, state, column0;
};
static __device__ __forceinline__ recurrence_piece recurrence_piece_of(const recurrence &a, int32_t item,
                                                                       int32_t slice_width) {
    const int32_t state = item / a.slices;
    return {state / a.states, state % a.states, item % a.slices * slice_width};
}

// ------------------------------------------------------------------------------------------------ heads and their data

static __device__ __forceinline__ const float *recurrence_query(const recurrence &a, int64_t t, int32_t state,
                                                                int32_t reader) {
    const int32_t head = (state * a.readers + reader) / (a.outputs / a.queries);
    return a.q + (t * a.queries + head) * a.depth;
}
static __device__ __forceinline__ const float *recurrence_key(const recurrence &a, int64_t t, int32_t state) {
    return a.k + (t * a.keys + state / (a.states / a.keys)) * a.depth;
}
static __device__ __forceinline__ const float *recurrence_value(const recurrence &a, int64_t t, int32_t state) {
    return a.v + (t * a.values + state / (a.states / a.values)) * a.width;
}
static __device__ __forceinline__ float *recurrence_output(const recurrence &a, int64_t t, int32_t state,
                                                           int32_t reader) {
    return a.o + (t * a.outputs + state * a.readers + reader) * a.columns;
}
static __device__ __forceinline__ const float *recurrence_channel_decay(const recurrence &a, int64_t t, int32_t state) {
    return a.g + (t * a.states + state) * a.depth;
}
// The log decay of a head; every kind but CHANNEL.
static __device__ __forceinline__ float recurrence_head_decay(const recurrence &a, int64_t t, int32_t state) {
    if (a.decay == KERN_DECAY_NONE)
        return 0;
    return a.g[a.decay == KERN_DECAY_HEAD ? state : t * a.states + state];
}
static __device__ __forceinline__ float recurrence_weight(const recurrence &a, int64_t t, int32_t state) {
    return a.beta ? a.beta[t * a.states + state] : 1.0f;
}
static __device__ __forceinline__ float recurrence_skip(const recurrence &a, int32_t state, int32_t reader,
                                                        int32_t column) {
    if (a.skip_width == 0 || column >= a.width)
        return 0;
    return a.skip[(int64_t)(state * a.readers + reader) * a.skip_width + (a.skip_width > 1 ? column : 0)];
}
template <typename Stored>
static __device__ __forceinline__ Stored *recurrence_state(const cuda_table *table, const recurrence &a, int32_t slot,
                                                           int32_t state) {
    Stored *base = (Stored *)cuda_slot(table, a.slots, slot);
    return base ? base + (int64_t)state * a.depth * a.columns : NULL;
}

// Of the state before a chunk.
static __device__ __forceinline__ float *recurrence_snapshot(const recurrence &a, int64_t chunk, int32_t state) {
    return a.snapshots ? a.snapshots + (chunk * a.states + state) * a.depth * a.columns : NULL;
}

// ----------------------------------------------------------------------------------------------- four columns a thread

// `left` columns exist from p on, perhaps none. VECTOR: all or none of the four, aligned.
template <bool VECTOR, typename Stored>
static __device__ __forceinline__ cuda_quad recurrence_load_columns(const Stored *p, int32_t left) {
    if (VECTOR)
        return left > 0 ? cuda_load(p, 4, true) : cuda_quad{};
    return cuda_load(p, left, false);
}
template <bool VECTOR, typename Stored>
static __device__ __forceinline__ void recurrence_store_columns(Stored *p, const cuda_quad &x, int32_t left) {
    if (!VECTOR)
        cuda_store(p, x, left, false);
    else if (left > 0)
        cuda_store(p, x, 4, true);
}
static __device__ __forceinline__ void recurrence_add_multiple(cuda_quad &y, float factor, const cuda_quad &x) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        y.v[j] = fmaf(factor, x.v[j], y.v[j]);
}

// The values of a token in these columns. Without VECTOR the unit column may be among them.
template <bool VECTOR>
static __device__ __forceinline__ cuda_quad recurrence_values(const recurrence &a, int64_t t, int32_t state,
                                                              int32_t column) {
    cuda_quad v = recurrence_load_columns<VECTOR>(recurrence_value(a, t, state) + column, a.width - column);
    if (!VECTOR && a.columns > a.width)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (column + j == a.width)
                v.v[j] = 1;
    return v;
}

template <bool VECTOR>
static __device__ __forceinline__ void recurrence_write_out(const recurrence &a, int64_t t, int32_t state,
                                                            int32_t reader, int32_t column, cuda_quad o,
                                                            const cuda_quad &v) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        o.v[j] = fmaf(recurrence_skip(a, state, reader, column + j), v.v[j], a.scale * o.v[j]);
    recurrence_store_columns<VECTOR>(recurrence_output(a, t, state, reader) + column, o, a.columns - column);
}

// ------------------------------------------------------------------------------------------- the state in registers

// What the warps of a team tell each other: column sums of one vector or two, and a scalar.
struct alignas(16) recurrence_sums {
    cuda_quad u[RECURRENCE_WARPS][RECURRENCE_LANES], w[RECURRENCE_WARPS][RECURRENCE_LANES];
    float dot[RECURRENCE_WARPS];
};
template <int R> struct recurrence_token {
    static constexpr int DEPTH = R * RECURRENCE_GROUPS; // zeros from D on
    float q[DEPTH], k[DEPTH];
    float decay_m1[DEPTH]; // with a decay for each channel
};
// A team's shared memory.
template <int R> struct recurrence_memory {
    recurrence_token<R> token[3];
    recurrence_sums sums[2];
};

// A token on its way from global memory, as it lies there: the channels that this thread puts into shared memory, its
// own columns, scalars. Nothing looks at a number before the token that is worked on has been summed.
template <int R> struct recurrence_fetched {
    static constexpr int CHANNELS = (R * RECURRENCE_GROUPS + RECURRENCE_THREADS - 1) / RECURRENCE_THREADS;
    float q[CHANNELS], k[CHANNELS], g[CHANNELS];
    cuda_quad v;
    float weight, head_g;
    int32_t start; // of the token's document
};

template <int R, bool VECTOR, bool CHANNEL, typename Team>
static __device__ __forceinline__ recurrence_fetched<R> recurrence_fetch(const cuda_table *table, const recurrence &a,
                                                                         int32_t t, int32_t state, int32_t column) {
    recurrence_fetched<R> token;
    const float *q = recurrence_query(a, t, state, 0), *k = recurrence_key(a, t, state);
#pragma unroll
    for (int i = 0; i < recurrence_fetched<R>::CHANNELS; i++) {
        const int32_t d = Team::thread() + i * RECURRENCE_THREADS;
        const bool inside = d < a.depth;
        token.q[i] = inside ? q[d] : 0;
        token.k[i] = inside ? k[d] : 0;
        token.g[i] = CHANNEL && inside ? recurrence_channel_decay(a, t, state)[d] : 0;
    }
    token.v = recurrence_values<VECTOR>(a, t, state, column);
    token.weight = recurrence_weight(a, t, state);
    token.head_g = CHANNEL ? 0 : recurrence_head_decay(a, t, state);
    token.start = table->token_start[t];
    return token;
}

template <int R, bool CHANNEL, typename Team>
static __device__ __forceinline__ void recurrence_put(const recurrence_fetched<R> &token, recurrence_token<R> &shared) {
#pragma unroll
    for (int i = 0; i < recurrence_fetched<R>::CHANNELS; i++) {
        const int32_t d = Team::thread() + i * RECURRENCE_THREADS;
        if (d >= R * RECURRENCE_GROUPS)
            continue;
        shared.q[d] = token.q[i];
        shared.k[d] = token.k[i];
        if (CHANNEL)
            shared.decay_m1[d] = expm1f(token.g[i]);
    }
}

// Sums over the row groups of a warp; every lane has those of its columns.
static __device__ __forceinline__ float recurrence_over_groups(float x) {
#pragma unroll
    for (int distance = RECURRENCE_LANES; distance < 32; distance *= 2)
        x += __shfl_xor_sync(~0u, x, distance);
    return x;
}
static __device__ __forceinline__ cuda_quad recurrence_over_groups(cuda_quad x) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        x.v[j] = recurrence_over_groups(x.v[j]);
    return x;
}
template <typename Team>
static __device__ __forceinline__ cuda_quad
recurrence_over_warps(const cuda_quad (&part)[RECURRENCE_WARPS][RECURRENCE_LANES]) {
    cuda_quad sum = part[0][Team::thread() % RECURRENCE_LANES];
#pragma unroll
    for (int warp = 1; warp < RECURRENCE_WARPS; warp++)
        recurrence_add_multiple(sum, 1, part[warp][Team::thread() % RECURRENCE_LANES]);
    return sum;
}

// u = S^T k and w = S^T q as this thread's warp sees them, into `sums`.
template <int R, typename Team>
static __device__ __forceinline__ void recurrence_sum_columns(const cuda_quad (&s)[R], const recurrence_token<R> &token,
                                                              bool delta, recurrence_sums &sums) {
    const int32_t group = Team::thread() / RECURRENCE_LANES, warp = Team::thread() / 32, lane = Team::thread() % 32;
    cuda_quad u = {}, w = {};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < R; i++) {
        const float q = token.q[i * RECURRENCE_GROUPS + group], k = token.k[i * RECURRENCE_GROUPS + group];
        dot = fmaf(q, k, dot);
        recurrence_add_multiple(w, q, s[i]);
        if (delta)
            recurrence_add_multiple(u, k, s[i]);
    }
    w = recurrence_over_groups(w);
    dot = recurrence_over_groups(dot);
    if (delta)
        u = recurrence_over_groups(u);
    if (lane < RECURRENCE_LANES) {
        sums.u[warp][lane] = u;
        sums.w[warp][lane] = w;
    }
    if (lane == 0)
        sums.dot[warp] = dot;
}

// The sums of all warps, behind a barrier: S = S~ + k v'^T, and o of the first head that reads this state.
template <int R, bool VECTOR, typename Team>
static __device__ __forceinline__ void
recurrence_write(const recurrence &a, cuda_quad (&s)[R], const recurrence_token<R> &token, int64_t t, int32_t state,
                 int32_t column, const cuda_quad &value, float weight, const recurrence_sums &sums) {
    const int32_t group = Team::thread() / RECURRENCE_LANES;
    cuda_quad v = value;
    if (a.delta)
        recurrence_add_multiple(v, -1, recurrence_over_warps<Team>(sums.u));
#pragma unroll
    for (int j = 0; j < 4; j++)
        v.v[j] *= weight;
    if (Team::thread() < RECURRENCE_LANES) {
        const float dot = ((sums.dot[0] + sums.dot[1]) + sums.dot[2]) + sums.dot[3];
        cuda_quad w = recurrence_over_warps<Team>(sums.w);
        recurrence_add_multiple(w, dot, v);
        recurrence_write_out<VECTOR>(a, t, state, 0, column, w, value);
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        recurrence_add_multiple(s[i], token.k[i * RECURRENCE_GROUPS + group], v);
}

// Further heads of o that read this state, after the token is written. turn: barriers so far.
template <int R, bool VECTOR, typename Team>
static __device__ void recurrence_read_more(const recurrence &a, const cuda_quad (&s)[R], int64_t t, int32_t state,
                                            int32_t column, const cuda_quad &v, recurrence_sums (&sums)[2],
                                            uint32_t &turn) {
    const int32_t group = Team::thread() / RECURRENCE_LANES, warp = Team::thread() / 32, lane = Team::thread() % 32;
    for (int32_t reader = 1; reader < a.readers; reader++, turn++) {
        const float *q = recurrence_query(a, t, state, reader);
        cuda_quad w = {};
#pragma unroll
        for (int i = 0; i < R; i++)
            if (i * RECURRENCE_GROUPS + group < a.depth)
                recurrence_add_multiple(w, q[i * RECURRENCE_GROUPS + group], s[i]);
        w = recurrence_over_groups(w);
        if (lane < RECURRENCE_LANES)
            sums[turn & 1].w[warp][lane] = w;
        Team::sync();
        if (Team::thread() < RECURRENCE_LANES)
            recurrence_write_out<VECTOR>(a, t, state, reader, column, recurrence_over_warps<Team>(sums[turn & 1].w), v);
    }
}

// This thread's part of D rows that are `pitch` apart, of which `left` columns exist from `from` or `to` on; NULL:
// zeros, or dropped.
template <int R, bool VECTOR, typename Team, typename Stored>
static __device__ __forceinline__ void recurrence_load_state(const Stored *from, int32_t depth, int32_t pitch,
                                                             int32_t left, cuda_quad (&s)[R]) {
    const int32_t group = Team::thread() / RECURRENCE_LANES;
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int32_t d = i * RECURRENCE_GROUPS + group;
        s[i] = cuda_quad{};
        if (from && d < depth)
            s[i] = recurrence_load_columns<VECTOR>(from + (int64_t)d * pitch, left);
    }
}
template <int R, bool VECTOR, typename Team, typename Stored>
static __device__ __forceinline__ void recurrence_store_state(Stored *to, int32_t depth, int32_t pitch, int32_t left,
                                                              const cuda_quad (&s)[R]) {
    const int32_t group = Team::thread() / RECURRENCE_LANES;
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int32_t d = i * RECURRENCE_GROUPS + group;
        if (to && d < depth)
            recurrence_store_columns<VECTOR>(to + (int64_t)d * pitch, s[i], left);
    }
}

template <int R, typename Team, typename Stored>
static __device__ __forceinline__ void recurrence_round(const recurrence &a, const cuda_rounding &key, int32_t column,
                                                        cuda_quad (&s)[R]) {
    const uint32_t quads = (a.columns + 3) / 4, group = Team::thread() / RECURRENCE_LANES;
#pragma unroll
    for (int i = 0; i < R; i++)
        cuda_round<Stored>(s[i], key, (i * RECURRENCE_GROUPS + group) * quads + column / 4);
}

template <int R, bool CHANNEL, typename Team>
static __device__ __forceinline__ void recurrence_decay(const float (&decay_m1)[R * RECURRENCE_GROUPS], float head_m1,
                                                        bool anew, cuda_quad (&s)[R]) {
    const int32_t group = Team::thread() / RECURRENCE_LANES;
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            s[i].v[j] =
                anew ? 0 : fmaf(CHANNEL ? decay_m1[i * RECURRENCE_GROUPS + group] : head_m1, s[i].v[j], s[i].v[j]);
}

// The state's part of a piece as it lies in its slot.
template <int R, bool VECTOR, typename Stored, typename Team>
static __device__ __forceinline__ void recurrence_load_piece(const cuda_table *table, const recurrence &a,
                                                             const kern_row &row, const recurrence_piece &p,
                                                             cuda_quad (&s)[R]) {
    const int32_t column = p.column0 + Team::thread() % RECURRENCE_LANES * 4;
    const Stored *home = recurrence_state<Stored>(table, a, row.slot, p.state);
    recurrence_load_state<R, VECTOR, Team>(home ? home + column : NULL, a.depth, a.columns, a.columns - column, s);
}

// A piece of a row from its first token to its last, with the loaded state; what is stored is rounded after each. The
// team's memory is free again at its next barrier.
template <int R, bool VECTOR, bool CHANNEL, typename Stored, typename Team>
static __device__ __forceinline__ void recurrence_tokens(const cuda_table *table, const recurrence &a,
                                                         const kern_row &row, const recurrence_piece &p,
                                                         cuda_quad (&s)[R], recurrence_memory<R> &memory) {
    const int32_t column = p.column0 + Team::thread() % RECURRENCE_LANES * 4, left = a.columns - column;
    Stored *home = recurrence_state<Stored>(table, a, row.slot, p.state), *part = home ? home + column : NULL;
    const int32_t last = row.token0 + row.length - 1;
    recurrence_fetched<R> next = recurrence_fetch<R, VECTOR, CHANNEL, Team>(table, a, row.token0, p.state, column);
    recurrence_put<R, CHANNEL, Team>(next, memory.token[0]);
    float next_m1 = expm1f(next.head_g);
    Team::sync();
    uint32_t turn = 0, place = 0;
    for (int32_t t = row.token0; t <= last; t++) {
        const recurrence_fetched<R> token = next;
        const float head_m1 = next_m1;
        const recurrence_token<R> &now = memory.token[place];
        place = place < 2 ? place + 1 : 0;
        if (t < last)
            next = recurrence_fetch<R, VECTOR, CHANNEL, Team>(table, a, t + 1, p.state, column);
        const bool anew = t > row.token0 && token.start == t; // a document that is not the row's first
        recurrence_decay<R, CHANNEL, Team>(now.decay_m1, head_m1, anew, s);
        recurrence_sums &sums = memory.sums[turn++ & 1];
        recurrence_sum_columns<R, Team>(s, now, a.delta, sums);
        if (t < last) {
            recurrence_put<R, CHANNEL, Team>(next, memory.token[place]);
            next_m1 = expm1f(next.head_g);
        }
        Team::sync();
        recurrence_write<R, VECTOR, Team>(a, s, now, t, p.state, column, token.v, token.weight, sums);
        recurrence_read_more<R, VECTOR, Team>(a, s, t, p.state, column, token.v, memory.sums, turn);
        recurrence_round<R, Team, Stored>(a, cuda_rounding_of(row.position + (t - row.token0), p.state), column, s);
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[i].v[j] = cuda_stored<Stored>(s[i].v[j]);
    }
    recurrence_store_state<R, VECTOR, Team>(part, a.depth, a.columns, left, s);
}

// -------------------------------------------------------------------------------------- one token of very many states

// recurrence_stream.cu. *fits: false, and nothing ran, where the shape, the chip or the step is another; then a piece a
// block it is (recurrence.cu), with the same bits.
kern_status cuda_recurrence_stream(const cuda_step *step, const recurrence &a, kern_storage storage, bool *fits);

// The same behind the preparation of its operands (prepare.cuh), one launch.
struct preparation;
kern_status cuda_recurrence_stream_behind(const cuda_step *step, const preparation &before, const recurrence &a,
                                          kern_storage storage, bool *fits);
kern_status cuda_recurrence_behind(const cuda_step *step, const preparation &before, const kern_recurrence_args *args,
                                   bool *fits);

// ------------------------------------------------------------------------------------------------------- prompt rows

// recurrence_chunk.cu: the prompt rows of a step chunk by chunk, where the chip and the shape allow; else they go token
// by token as generated ones do.
recurrence cuda_recurrence_of(const kern_recurrence *family);
bool cuda_recurrence_has_chunks(const kern_cuda *cuda, const kern_recurrence *family);
size_t cuda_recurrence_chunk_workspace(const kern_recurrence *family);
kern_status cuda_recurrence_chunks(const cuda_step *step, const recurrence &a);

// ---------------------------------------------------------------------------------------------------------- a row

template <int R, bool VECTOR, bool CHANNEL, typename Stored, typename Team>
static __device__ __forceinline__ void recurrence_row(const cuda_table *table, const recurrence &a, const kern_row &row,
                                                      const recurrence_piece &p, recurrence_memory<R> &memory) {
    cuda_quad s[R];
    recurrence_load_piece<R, VECTOR, Stored, Team>(table, a, row, p, s);
    recurrence_tokens<R, VECTOR, CHANNEL, Stored, Team>(table, a, row, p, s, memory);
}

#endif

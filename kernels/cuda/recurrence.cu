// SPDX-License-Identifier: Apache-2.0
// The recurrence family (models.md 11), token by token with the state on chip: read once, written once in place,
// however many tokens a row has. With S~ = decay S, u = S~^T k and w = S~^T q of one pass over S:
//
//   v' = weight v, or weight (v - u) by the delta rule      o = scale (w + (q.k) v') [+ skip v]      S = S~ + k v'^T
//
// Columns of a state do not see each other: a block owns 32 of them (8 lanes x 4 floats) and all D rows, R rows a
// thread in registers, row i * 16 + g for row group g of 16. Sums over D: a thread's rows, the four row groups of its
// warp by shuffles, the four warps through shared memory, always in that order. Query, key and decay of a token lie in
// shared memory in two places by turns, as do the sums, so that a token needs one barrier: what is written before a
// barrier was last read before the barrier before it.
//
// Keys wider than 256 have 8 columns of the state a block, in shared memory (wide_kernel).
#include "kernels/cuda/elements.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, LANES = 8, SLICE = 4 * LANES, GROUPS = THREADS / LANES;
constexpr int WIDE_THREADS = 256, WIDE_WARPS = WIDE_THREADS / 32, WIDE_SLICE = 8, WIDE_GROUPS = 256 / WIDE_SLICE;
constexpr int WIDTH_MAX = 4096, REGISTER_DEPTH = 256;

// The family with its zeros resolved, and its operands.
struct recurrence {
    const float *q, *k, *v, *g, *beta, *skip;
    float *o;
    kern_ptr slots;
    int32_t states, queries, keys, values, outputs, readers; // heads of each; heads of o that read one state
    int32_t depth, width, columns, slices;                   // D, V, V', blocks that share a state
    int32_t decay, delta, skip_width;
    float scale;
};

// What a block works on: `slices` blocks a state, all states of a row one after another.
struct piece {
    int32_t row, state, column0;
};
static __device__ __forceinline__ piece piece_of(const recurrence &a, int32_t slice_width) {
    const int32_t item = blockIdx.x, state = item / a.slices;
    return {state / a.states, state % a.states, item % a.slices * slice_width};
}

// ------------------------------------------------------------------------------------------------ heads and their data

static __device__ __forceinline__ const float *query_of(const recurrence &a, int64_t t, int32_t state, int32_t reader) {
    const int32_t head = (state * a.readers + reader) / (a.outputs / a.queries);
    return a.q + (t * a.queries + head) * a.depth;
}
static __device__ __forceinline__ const float *key_of(const recurrence &a, int64_t t, int32_t state) {
    return a.k + (t * a.keys + state / (a.states / a.keys)) * a.depth;
}
static __device__ __forceinline__ const float *value_of(const recurrence &a, int64_t t, int32_t state) {
    return a.v + (t * a.values + state / (a.states / a.values)) * a.width;
}
static __device__ __forceinline__ float *output_of(const recurrence &a, int64_t t, int32_t state, int32_t reader) {
    return a.o + (t * a.outputs + state * a.readers + reader) * a.columns;
}
static __device__ __forceinline__ const float *channel_decay_of(const recurrence &a, int64_t t, int32_t state) {
    return a.g + (t * a.states + state) * a.depth;
}
// The log decay of a head; every kind but CHANNEL.
static __device__ __forceinline__ float head_decay_of(const recurrence &a, int64_t t, int32_t state) {
    if (a.decay == KERN_DECAY_NONE)
        return 0;
    return a.g[a.decay == KERN_DECAY_HEAD ? state : t * a.states + state];
}
static __device__ __forceinline__ float weight_of(const recurrence &a, int64_t t, int32_t state) {
    return a.beta ? a.beta[t * a.states + state] : 1.0f;
}
static __device__ __forceinline__ float skip_of(const recurrence &a, int32_t state, int32_t reader, int32_t column) {
    if (a.skip_width == 0 || column >= a.width)
        return 0;
    return a.skip[(int64_t)(state * a.readers + reader) * a.skip_width + (a.skip_width > 1 ? column : 0)];
}
static __device__ __forceinline__ float *state_of(const cuda_table *table, const recurrence &a, int32_t slot,
                                                  int32_t state) {
    float *base = cuda_slot(table, a.slots, slot);
    return base ? base + (int64_t)state * a.depth * a.columns : NULL;
}

// ----------------------------------------------------------------------------------------------- four columns a thread

// `left` columns exist from p on, perhaps none. VECTOR: all or none of the four, aligned.
template <bool VECTOR> static __device__ __forceinline__ cuda_quad load_columns(const float *p, int32_t left) {
    if (VECTOR)
        return left > 0 ? cuda_load(p, 4, true) : cuda_quad{};
    return cuda_load(p, left, false);
}
template <bool VECTOR>
static __device__ __forceinline__ void store_columns(float *p, const cuda_quad &x, int32_t left) {
    if (!VECTOR)
        cuda_store(p, x, left, false);
    else if (left > 0)
        cuda_store(p, x, 4, true);
}
static __device__ __forceinline__ void add_multiple(cuda_quad &y, float factor, const cuda_quad &x) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        y.v[j] = fmaf(factor, x.v[j], y.v[j]);
}

// The values of a token in these columns. Without VECTOR the unit column may be among them.
template <bool VECTOR>
static __device__ __forceinline__ cuda_quad load_values(const recurrence &a, int64_t t, int32_t state, int32_t column) {
    cuda_quad v = load_columns<VECTOR>(value_of(a, t, state) + column, a.width - column);
    if (!VECTOR && a.columns > a.width)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (column + j == a.width)
                v.v[j] = 1;
    return v;
}

template <bool VECTOR>
static __device__ __forceinline__ void write_out(const recurrence &a, int64_t t, int32_t state, int32_t reader,
                                                 int32_t column, cuda_quad o, const cuda_quad &v) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        o.v[j] = fmaf(skip_of(a, state, reader, column + j), v.v[j], a.scale * o.v[j]);
    store_columns<VECTOR>(output_of(a, t, state, reader) + column, o, a.columns - column);
}

// ------------------------------------------------------------------------------------------- the state in registers

// What the warps of a block tell each other: column sums of one vector or two, and a scalar.
struct block_sums {
    cuda_quad u[WARPS][LANES], w[WARPS][LANES];
    float dot[WARPS];
};
template <int R> struct block_token { float q[R * GROUPS], k[R * GROUPS], decay_m1[R * GROUPS]; };

// A token on its way from global memory, as it lies there: the channels that this thread puts into shared memory, its
// own columns, scalars. Nothing looks at a number before the token that is worked on has been summed.
template <int R> struct fetched {
    static constexpr int CHANNELS = (R * GROUPS + THREADS - 1) / THREADS;
    float q[CHANNELS], k[CHANNELS], g[CHANNELS];
    cuda_quad v;
    float weight, head_g;
    int32_t start; // of the token's document
};

template <int R, bool VECTOR, bool CHANNEL>
static __device__ __forceinline__ fetched<R> fetch(const cuda_table *table, const recurrence &a, int32_t t,
                                                   int32_t state, int32_t column) {
    fetched<R> token;
    const float *q = query_of(a, t, state, 0), *k = key_of(a, t, state);
#pragma unroll
    for (int i = 0; i < fetched<R>::CHANNELS; i++) {
        const int32_t d = threadIdx.x + i * THREADS;
        const bool inside = d < a.depth;
        token.q[i] = inside ? q[d] : 0;
        token.k[i] = inside ? k[d] : 0;
        token.g[i] = CHANNEL && inside ? channel_decay_of(a, t, state)[d] : 0;
    }
    token.v = load_values<VECTOR>(a, t, state, column);
    token.weight = weight_of(a, t, state);
    token.head_g = CHANNEL ? 0 : head_decay_of(a, t, state);
    token.start = table->token_start[t];
    return token;
}

template <int R, bool CHANNEL>
static __device__ __forceinline__ void put(const fetched<R> &token, block_token<R> &shared) {
#pragma unroll
    for (int i = 0; i < fetched<R>::CHANNELS; i++) {
        const int32_t d = threadIdx.x + i * THREADS;
        if (d >= R * GROUPS)
            continue;
        shared.q[d] = token.q[i];
        shared.k[d] = token.k[i];
        if (CHANNEL)
            shared.decay_m1[d] = expm1f(token.g[i]);
    }
}

// Sums over the row groups of a warp; every lane has those of its columns.
static __device__ __forceinline__ float over_groups(float x) {
#pragma unroll
    for (int distance = LANES; distance < 32; distance *= 2)
        x += __shfl_xor_sync(~0u, x, distance);
    return x;
}
static __device__ __forceinline__ cuda_quad over_groups(cuda_quad x) {
#pragma unroll
    for (int j = 0; j < 4; j++)
        x.v[j] = over_groups(x.v[j]);
    return x;
}
static __device__ __forceinline__ cuda_quad over_warps(const cuda_quad (&part)[WARPS][LANES]) {
    cuda_quad sum = part[0][threadIdx.x % LANES];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++)
        add_multiple(sum, 1, part[warp][threadIdx.x % LANES]);
    return sum;
}

// u = S^T k and w = S^T q as this thread's warp sees them, into `sums`; k stays with the thread for the write.
template <int R>
static __device__ __forceinline__ void sum_columns(const cuda_quad (&s)[R], const block_token<R> &token, bool delta,
                                                   float (&k)[R], block_sums &sums) {
    const int32_t group = threadIdx.x / LANES, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    cuda_quad u = {}, w = {};
    float dot = 0;
#pragma unroll
    for (int i = 0; i < R; i++) {
        const float q = token.q[i * GROUPS + group];
        k[i] = token.k[i * GROUPS + group];
        dot = fmaf(q, k[i], dot);
        add_multiple(w, q, s[i]);
        if (delta)
            add_multiple(u, k[i], s[i]);
    }
    w = over_groups(w);
    dot = over_groups(dot);
    if (delta)
        u = over_groups(u);
    if (lane < LANES) {
        sums.u[warp][lane] = u;
        sums.w[warp][lane] = w;
    }
    if (lane == 0)
        sums.dot[warp] = dot;
}

// Further heads of o that read this state, after the token is written. turn: barriers so far.
template <int R, bool VECTOR>
static __device__ void read_more(const recurrence &a, const cuda_quad (&s)[R], int64_t t, int32_t state, int32_t column,
                                 const cuda_quad &v, block_sums (&sums)[2], uint32_t &turn) {
    const int32_t group = threadIdx.x / LANES, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int32_t reader = 1; reader < a.readers; reader++, turn++) {
        const float *q = query_of(a, t, state, reader);
        cuda_quad w = {};
#pragma unroll
        for (int i = 0; i < R; i++)
            if (i * GROUPS + group < a.depth)
                add_multiple(w, q[i * GROUPS + group], s[i]);
        w = over_groups(w);
        if (lane < LANES)
            sums[turn & 1].w[warp][lane] = w;
        __syncthreads();
        if (threadIdx.x < LANES)
            write_out<VECTOR>(a, t, state, reader, column, over_warps(sums[turn & 1].w), v);
    }
}

template <int R, bool VECTOR>
static __device__ __forceinline__ void load_state(const recurrence &a, const float *from, int32_t column,
                                                  cuda_quad (&s)[R]) {
    const int32_t group = threadIdx.x / LANES;
#pragma unroll
    for (int i = 0; i < R; i++) {
        const int32_t d = i * GROUPS + group;
        s[i] = cuda_quad{};
        if (from && d < a.depth)
            s[i] = load_columns<VECTOR>(from + (int64_t)d * a.columns + column, a.columns - column);
    }
}

template <int R, bool VECTOR, bool CHANNEL>
static __global__ void __launch_bounds__(THREADS, R <= 8 ? 4 : 2)
    recurrence_kernel(const cuda_table *table, const recurrence a) {
    cuda_begin();
    __shared__ block_token<R> shared[2];
    __shared__ block_sums sums[2];
    const piece p = piece_of(a, SLICE);
    if (p.row >= table->n_rows) {
        cuda_await();
        return;
    }
    const kern_row row = table->row[p.row];
    const int32_t group = threadIdx.x / LANES, column = p.column0 + threadIdx.x % LANES * 4;
    float *home = state_of(table, a, row.slot, p.state);
    if (home && gridDim.x <= CUDA_FEW_BLOCKS)
        for (int32_t d = threadIdx.x; d < a.depth; d += THREADS)
            cuda_prefetch(home + (int64_t)d * a.columns + p.column0); // its slice is a line
    cuda_await();
    cuda_quad s[R];
    load_state<R, VECTOR>(a, home, column, s);
    const int32_t last = row.token0 + row.length - 1;
    fetched<R> next = fetch<R, VECTOR, CHANNEL>(table, a, row.token0, p.state, column);
    put<R, CHANNEL>(next, shared[0]);
    float next_m1 = expm1f(next.head_g);
    __syncthreads();
    uint32_t turn = 0;
    for (int32_t t = row.token0; t <= last; t++) {
        const fetched<R> token = next;
        const float head_m1 = next_m1;
        const block_token<R> &now = shared[(t - row.token0) & 1];
        if (t < last)
            next = fetch<R, VECTOR, CHANNEL>(table, a, t + 1, p.state, column);
        const bool anew = t > row.token0 && token.start == t; // a document that is not the row's first
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[i].v[j] = anew ? 0 : fmaf(CHANNEL ? now.decay_m1[i * GROUPS + group] : head_m1, s[i].v[j], s[i].v[j]);
        float k[R];
        block_sums &turn_sums = sums[turn++ & 1];
        sum_columns(s, now, a.delta, k, turn_sums);
        if (t < last) {
            put<R, CHANNEL>(next, shared[(t - row.token0 + 1) & 1]);
            next_m1 = expm1f(next.head_g);
        }
        __syncthreads();
        const float dot = ((turn_sums.dot[0] + turn_sums.dot[1]) + turn_sums.dot[2]) + turn_sums.dot[3];
        cuda_quad v = token.v, w = over_warps(turn_sums.w);
        if (a.delta)
            add_multiple(v, -1, over_warps(turn_sums.u));
#pragma unroll
        for (int j = 0; j < 4; j++)
            v.v[j] *= token.weight;
#pragma unroll
        for (int i = 0; i < R; i++)
            add_multiple(s[i], k[i], v);
        add_multiple(w, dot, v);
        if (threadIdx.x < LANES)
            write_out<VECTOR>(a, t, p.state, 0, column, w, token.v);
        read_more<R, VECTOR>(a, s, t, p.state, column, token.v, sums, turn);
    }
#pragma unroll
    for (int i = 0; i < R; i++)
        if (home && i * GROUPS + group < a.depth)
            store_columns<VECTOR>(home + (int64_t)(i * GROUPS + group) * a.columns + column, s[i], a.columns - column);
}

// --------------------------------------------------------------------------------------- the state in shared memory

struct wide_sums {
    float u[WIDE_WARPS][WIDE_SLICE], w[WIDE_WARPS][WIDE_SLICE], dot[WIDE_WARPS];
};

static __device__ __forceinline__ float over_wide_warps(const float (&part)[WIDE_WARPS][WIDE_SLICE], int32_t lane) {
    float sum = part[0][lane];
#pragma unroll
    for (int warp = 1; warp < WIDE_WARPS; warp++)
        sum += part[warp][lane];
    return sum;
}

// A thread owns one column and every 32nd row of it; k, q and g are read where they lie.
static __global__ void __launch_bounds__(WIDE_THREADS) wide_kernel(const cuda_table *table, const recurrence a) {
    cuda_begin();
    cuda_await();
    extern __shared__ float s[]; // (D, WIDE_SLICE)
    __shared__ wide_sums sums[2];
    const piece p = piece_of(a, WIDE_SLICE);
    if (p.row >= table->n_rows)
        return;
    const kern_row row = table->row[p.row];
    const int32_t lane = threadIdx.x % WIDE_SLICE, group = threadIdx.x / WIDE_SLICE, warp = threadIdx.x / 32;
    const int32_t column = p.column0 + lane;
    const bool exists = column < a.columns;
    float *home = state_of(table, a, row.slot, p.state);
    for (int32_t d = group; d < a.depth; d += WIDE_GROUPS)
        s[d * WIDE_SLICE + lane] = home && exists ? home[(int64_t)d * a.columns + column] : 0;
    uint32_t turn = 0;
    for (int32_t t = row.token0; t < row.token0 + row.length; t++) {
        const bool anew = t > row.token0 && table->token_start[t] == t, channel = a.decay == KERN_DECAY_CHANNEL;
        const float *k = key_of(a, t, p.state), *v = value_of(a, t, p.state);
        const float head_m1 = channel ? 0 : expm1f(head_decay_of(a, t, p.state));
        const float value = column < a.width ? v[column] : exists ? 1.0f : 0.0f;
        float written = 0;
        for (int32_t reader = 0; reader < a.readers; reader++, turn++) {
            const float *q = query_of(a, t, p.state, reader);
            float u = 0, w = 0, dot = 0;
            for (int32_t d = group; d < a.depth; d += WIDE_GROUPS) {
                float x = s[d * WIDE_SLICE + lane];
                if (reader == 0) {
                    const float m1 = channel ? expm1f(channel_decay_of(a, t, p.state)[d]) : head_m1;
                    s[d * WIDE_SLICE + lane] = x = anew ? 0 : fmaf(m1, x, x);
                }
                u = fmaf(k[d], x, u);
                w = fmaf(q[d], x, w);
                dot = fmaf(q[d], k[d], dot);
            }
            u = over_groups(u);
            w = over_groups(w);
            dot = over_groups(dot);
            wide_sums &now = sums[turn & 1];
            if (threadIdx.x % 32 < WIDE_SLICE) {
                now.u[warp][lane] = u;
                now.w[warp][lane] = w;
                now.dot[warp] = dot;
            }
            __syncthreads();
            float query_key = 0;
            for (int i = 0; i < WIDE_WARPS; i++)
                query_key += now.dot[i];
            if (reader == 0)
                written = weight_of(a, t, p.state) * (a.delta ? value - over_wide_warps(now.u, lane) : value);
            const float o = fmaf(query_key, written, over_wide_warps(now.w, lane));
            if (group == 0 && exists)
                output_of(a, t, p.state, reader)[column] =
                    fmaf(skip_of(a, p.state, reader, column), value, a.scale * o);
        }
        for (int32_t d = group; d < a.depth; d += WIDE_GROUPS)
            s[d * WIDE_SLICE + lane] = fmaf(k[d], written, s[d * WIDE_SLICE + lane]);
    }
    for (int32_t d = group; d < a.depth; d += WIDE_GROUPS)
        if (home && exists)
            home[(int64_t)d * a.columns + column] = s[d * WIDE_SLICE + lane];
}

// ------------------------------------------------------------------------------------------------------------
// launching

static size_t wide_bytes(int32_t depth) {
    return (size_t)depth * WIDE_SLICE * sizeof(float);
}

kern_status cuda_recurrence_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)workspace_bytes;
    const kern_recurrence_args *a = (const kern_recurrence_args *)args;
    const kern_recurrence *f = &a->family;
    const kern_status status = kern_recurrence_check(f, WIDTH_MAX, a->g.ref != 0, a->beta.ref != 0, a->skip.ref != 0);
    if (status)
        return status;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref)
        return KERN_INVALID;
    if (a->snapshots.ref)
        return KERN_UNSUPPORTED; // there is no backward pass to read them
    if (f->key_width > REGISTER_DEPTH && wide_bytes(f->key_width) + sizeof(wide_sums[2]) > cuda->shared_limit)
        return KERN_UNSUPPORTED;
    return KERN_OK;
}

static recurrence recurrence_of(const kern_recurrence_args *a, int32_t slice_width) {
    const kern_recurrence *f = &a->family;
    recurrence r = {};
    r.q = a->q.f;
    r.k = a->k.f;
    r.v = a->v.f;
    r.g = a->g.f;
    r.beta = a->beta.f;
    r.skip = a->skip.f;
    r.o = a->o.f;
    r.slots = a->state;
    r.states = f->heads;
    r.queries = f->query_heads ? f->query_heads : r.states;
    r.keys = f->key_heads ? f->key_heads : r.states;
    r.values = f->value_heads ? f->value_heads : r.states;
    r.outputs = r.queries > r.states ? r.queries : r.states;
    r.readers = r.outputs / r.states;
    r.depth = f->key_width;
    r.width = f->value_width;
    r.columns = r.width + (f->unit_column ? 1 : 0);
    r.slices = (r.columns + slice_width - 1) / slice_width;
    r.decay = f->decay;
    r.delta = f->update == KERN_UPDATE_DELTA;
    r.skip_width = f->skip_width;
    r.scale = f->scale;
    return r;
}

template <int R, bool VECTOR> static kern_status launch(const cuda_step *step, const recurrence &a) {
    const int blocks = step->rows * a.states * a.slices;
    return cuda_start(
        step, a.decay == KERN_DECAY_CHANNEL ? recurrence_kernel<R, VECTOR, true> : recurrence_kernel<R, VECTOR, false>,
        blocks, THREADS, 0, step->table, a);
}
template <int R> static kern_status launch(const cuda_step *step, const recurrence &a) {
    const bool vector =
        a.columns % 4 == 0 && a.columns == a.width && cuda_is_wide(a.v) && cuda_is_wide(a.o) && cuda_is_wide(a.slots.p);
    return vector ? launch<R, true>(step, a) : launch<R, false>(step, a);
}

kern_status cuda_recurrence_run(const cuda_step *step, const void *args) {
    const kern_recurrence_args *a = (const kern_recurrence_args *)args;
    const int32_t depth = a->family.key_width;
    const recurrence r = recurrence_of(a, depth > REGISTER_DEPTH ? WIDE_SLICE : SLICE);
    if (depth > REGISTER_DEPTH) {
        const kern_status status = cuda_allow_shared(wide_kernel, wide_bytes(depth));
        if (status)
            return status;
        const int blocks = step->rows * r.states * r.slices;
        return cuda_start(step, wide_kernel, blocks, WIDE_THREADS, wide_bytes(depth), step->table, r);
    }
    return depth <= 2 * GROUPS   ? launch<2>(step, r)
           : depth <= 4 * GROUPS ? launch<4>(step, r)
           : depth <= 8 * GROUPS ? launch<8>(step, r)
                                 : launch<16>(step, r);
}

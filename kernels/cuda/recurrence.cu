// SPDX-License-Identifier: Apache-2.0
// The recurrence family as launches. recurrence_kernel: a block has a piece of a state (recurrence.cuh) from a row's
// first token to its last. wide_kernel: keys wider than 256 have 8 columns of the state a block, in shared memory; so
// have all whose states before each chunk are wanted, where recurrence_chunk.cu does not do it.
#include "kernels/cuda/recurrence.cuh"

#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/chunk.cuh"

constexpr int WIDE_THREADS = 256, WIDE_WARPS = WIDE_THREADS / 32, WIDE_SLICE = 8, WIDE_GROUPS = 256 / WIDE_SLICE;
constexpr int WIDTH_MAX = 4096, REGISTER_DEPTH = 256;

// ------------------------------------------------------------------------------------------- the state in registers

template <int R, bool VECTOR, bool CHANNEL, typename Stored>
static __global__ void __launch_bounds__(RECURRENCE_THREADS, R <= 8 ? 4 : 2)
    recurrence_kernel(const cuda_table *table, const recurrence a) {
    cuda_begin();
    __shared__ recurrence_memory<R> memory;
    const recurrence_piece p = recurrence_piece_of(a, blockIdx.x, RECURRENCE_SLICE);
    if (p.row >= table->n_rows) {
        cuda_await();
        return;
    }
    const kern_row row = table->row[p.row];
    const Stored *home = recurrence_state<Stored>(table, a, row.slot, p.state);
    if (home && gridDim.x <= CUDA_FEW_BLOCKS)
        for (int32_t d = threadIdx.x; d < a.depth; d += RECURRENCE_THREADS)
            cuda_prefetch(home + (int64_t)d * a.columns + p.column0); // its slice is a line or half
    cuda_await();
    recurrence_row<R, VECTOR, CHANNEL, Stored, cuda_whole_block>(table, a, row, p, memory);
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
template <typename Stored>
static __global__ void __launch_bounds__(WIDE_THREADS) wide_kernel(const cuda_table *table, const recurrence a) {
    cuda_begin();
    cuda_await();
    extern __shared__ float s[]; // (D, WIDE_SLICE)
    __shared__ wide_sums sums[2];
    const recurrence_piece p = recurrence_piece_of(a, blockIdx.x, WIDE_SLICE);
    if (p.row >= table->n_rows)
        return;
    const kern_row row = table->row[p.row];
    const int32_t lane = threadIdx.x % WIDE_SLICE, group = threadIdx.x / WIDE_SLICE, warp = threadIdx.x / 32;
    const int32_t column = p.column0 + lane;
    const bool exists = column < a.columns;
    Stored *home = recurrence_state<Stored>(table, a, row.slot, p.state);
    for (int32_t d = group; d < a.depth; d += WIDE_GROUPS)
        s[d * WIDE_SLICE + lane] =
            home && exists ? cuda_load(home + (int64_t)d * a.columns + column, 1, false).v[0] : 0;
    uint32_t turn = 0;
    int64_t chunk = a.snapshots ? chunk_of_row(table, p.row) : 0;
    for (int32_t t = row.token0; t < row.token0 + row.length; t++) {
        float *snapshot = chunk_begins(row, t) && exists ? recurrence_snapshot(a, chunk++, p.state) : NULL;
        for (int32_t d = group; snapshot && d < a.depth; d += WIDE_GROUPS)
            snapshot[(int64_t)d * a.columns + column] = s[d * WIDE_SLICE + lane];
        const bool anew = t > row.token0 && table->token_start[t] == t, channel = a.decay == KERN_DECAY_CHANNEL;
        const float *k = recurrence_key(a, t, p.state), *v = recurrence_value(a, t, p.state);
        const float head_m1 = channel ? 0 : expm1f(recurrence_head_decay(a, t, p.state));
        const float value = column < a.width ? v[column] : exists ? 1.0f : 0.0f;
        float written = 0;
        for (int32_t reader = 0; reader < a.readers; reader++, turn++) {
            const float *q = recurrence_query(a, t, p.state, reader);
            float u = 0, w = 0, dot = 0;
            for (int32_t d = group; d < a.depth; d += WIDE_GROUPS) {
                float x = s[d * WIDE_SLICE + lane];
                if (reader == 0) {
                    const float m1 = channel ? expm1f(recurrence_channel_decay(a, t, p.state)[d]) : head_m1;
                    s[d * WIDE_SLICE + lane] = x = anew ? 0 : fmaf(m1, x, x);
                }
                u = fmaf(k[d], x, u);
                w = fmaf(q[d], x, w);
                dot = fmaf(q[d], k[d], dot);
            }
            u = recurrence_over_groups(u);
            w = recurrence_over_groups(w);
            dot = recurrence_over_groups(dot);
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
                written = recurrence_weight(a, t, p.state) * (a.delta ? value - over_wide_warps(now.u, lane) : value);
            const float o = fmaf(query_key, written, over_wide_warps(now.w, lane));
            if (group == 0 && exists)
                recurrence_output(a, t, p.state, reader)[column] =
                    fmaf(recurrence_skip(a, p.state, reader, column), value, a.scale * o);
        }
        const cuda_rounding key = cuda_rounding_of(row.position + (t - row.token0), p.state);
        for (int32_t d = group; d < a.depth; d += WIDE_GROUPS)
            s[d * WIDE_SLICE + lane] = cuda_rounded_at<Stored>(fmaf(k[d], written, s[d * WIDE_SLICE + lane]), key,
                                                               d * ((a.columns + 3) / 4) + column / 4, column % 4);
    }
    for (int32_t d = group; d < a.depth; d += WIDE_GROUPS)
        if (home && exists)
            cuda_store(home + (int64_t)d * a.columns + column, {{s[d * WIDE_SLICE + lane]}}, 1, false);
}

// -------------------------------------------------------------------------------------------------------- launching

static size_t wide_bytes(int32_t depth) {
    return (size_t)depth * WIDE_SLICE * sizeof(float);
}

kern_status cuda_recurrence_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_recurrence_args *a = (const kern_recurrence_args *)args;
    const kern_recurrence *f = &a->family;
    const kern_status status = kern_recurrence_check(f, WIDTH_MAX, a->g.ref != 0, a->beta.ref != 0, a->skip.ref != 0);
    if (status)
        return status;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref)
        return KERN_INVALID;
    if (a->snapshots.ref && f->storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    if ((f->key_width > REGISTER_DEPTH || a->snapshots.ref) &&
        wide_bytes(f->key_width) + sizeof(wide_sums[2]) > cuda->shared_limit)
        return KERN_UNSUPPORTED;
    if (cuda_recurrence_has_chunks(cuda, f))
        *workspace_bytes = cuda_recurrence_chunk_workspace(f);
    return KERN_OK;
}

recurrence cuda_recurrence_of(const kern_recurrence *f) {
    recurrence r = {};
    r.states = f->heads;
    r.queries = f->query_heads ? f->query_heads : r.states;
    r.keys = f->key_heads ? f->key_heads : r.states;
    r.values = f->value_heads ? f->value_heads : r.states;
    r.outputs = r.queries > r.states ? r.queries : r.states;
    r.readers = r.outputs / r.states;
    r.depth = f->key_width;
    r.width = f->value_width;
    r.columns = r.width + (f->unit_column ? 1 : 0);
    r.decay = f->decay;
    r.delta = f->update == KERN_UPDATE_DELTA;
    r.skip_width = f->skip_width;
    r.scale = f->scale;
    return r;
}

static recurrence recurrence_of(const kern_recurrence_args *a, int32_t slice_width) {
    recurrence r = cuda_recurrence_of(&a->family);
    r.q = a->q.f;
    r.k = a->k.f;
    r.v = a->v.f;
    r.g = a->g.f;
    r.beta = a->beta.f;
    r.skip = a->skip.f;
    r.o = a->o.f;
    r.slots = a->state;
    r.snapshots = a->snapshots.f;
    r.slices = (r.columns + slice_width - 1) / slice_width;
    return r;
}

template <int R, bool VECTOR, typename Stored> static kern_status launch(const cuda_step *step, const recurrence &a) {
    const int blocks = step->rows * a.states * a.slices;
    return cuda_start(step,
                      a.decay == KERN_DECAY_CHANNEL ? recurrence_kernel<R, VECTOR, true, Stored>
                                                    : recurrence_kernel<R, VECTOR, false, Stored>,
                      blocks, RECURRENCE_THREADS, 0, step->table, a);
}
template <int R, typename Stored> static kern_status launch(const cuda_step *step, const recurrence &a) {
    const bool vector =
        a.columns % 4 == 0 && a.columns == a.width && cuda_is_wide(a.v) && cuda_is_wide(a.o) && cuda_is_wide(a.slots.p);
    return vector ? launch<R, true, Stored>(step, a) : launch<R, false, Stored>(step, a);
}

template <typename Stored> static kern_status run(const cuda_step *step, const kern_recurrence_args *args) {
    const int32_t depth = args->family.key_width;
    const bool wide = depth > REGISTER_DEPTH || args->snapshots.p;
    const recurrence a = recurrence_of(args, wide ? WIDE_SLICE : RECURRENCE_SLICE);
    bool fits = false;
    kern_status status = KERN_OK;
    if (!a.snapshots && args->family.storage == KERN_STORE_F32)
        status = cuda_chain_recurrence(step, &a, &fits);
    if (status || fits)
        return status;
    if (!a.snapshots)
        status = cuda_recurrence_stream(step, a, (kern_storage)args->family.storage, &fits);
    if (status || fits)
        return status;
    if (wide) {
        status = cuda_allow_shared(wide_kernel<Stored>, wide_bytes(depth));
        if (status)
            return status;
        const int blocks = step->rows * a.states * a.slices;
        return cuda_start(step, wide_kernel<Stored>, blocks, WIDE_THREADS, wide_bytes(depth), step->table, a);
    }
    return depth <= 2 * RECURRENCE_GROUPS   ? launch<2, Stored>(step, a)
           : depth <= 4 * RECURRENCE_GROUPS ? launch<4, Stored>(step, a)
           : depth <= 8 * RECURRENCE_GROUPS ? launch<8, Stored>(step, a)
                                            : launch<16, Stored>(step, a);
}

// Token by token; all rows.
static kern_status run_tokens(const cuda_step *step, const kern_recurrence_args *a) {
    return a->family.storage == KERN_STORE_BF16 ? run<cuda_bf16>(step, a) : run<float>(step, a);
}

kern_status cuda_recurrence_run(const cuda_step *step, const void *args) {
    const kern_recurrence_args *a = (const kern_recurrence_args *)args;
    if (step->chunks == 0 || !cuda_recurrence_has_chunks(step->cuda, &a->family))
        return run_tokens(step, a);
    cuda_step generated = *step;
    kern_recurrence_args only = *a;
    generated.rows = step->generated_rows;
    only.snapshots.p = NULL;
    const kern_status status = generated.rows > 0 ? run_tokens(&generated, &only) : KERN_OK;
    return status ? status : cuda_recurrence_chunks(step, recurrence_of(a, RECURRENCE_SLICE));
}

kern_status cuda_recurrence_behind(const cuda_step *step, const preparation &before, const kern_recurrence_args *args,
                                   bool *fits) {
    const recurrence a = recurrence_of(args, RECURRENCE_SLICE);
    return cuda_recurrence_stream_behind(step, before, a, (kern_storage)args->family.storage, fits);
}

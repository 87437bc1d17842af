// SPDX-License-Identifier: Apache-2.0
// The recurrence family's gradients, token by token (recurrence_backward.cuh): every family, every chip. A block has a
// group of states of a row, one after another, and goes through its chunks from the last to the first. Of a chunk,
//   forwards   S from its snapshot: u, e and dQ
//   backwards  G: M, dV, dw and what of dK comes from G
//   forwards   S once more, by the delta rule: what of dK comes from S
// and the decays of its tokens. States lie in shared memory where they fit, else in the block's workspace.
#include "kernels/cuda/recurrence_backward.cuh"
#include "kernels/cuda/sums.cuh"

constexpr int TOKEN_THREADS = 256, TOKEN_WARPS = TOKEN_THREADS / CUDA_WARP, WIDTH_MAX = 4096;
constexpr size_t WORKSPACE_MOST = (size_t)1 << 30;

// --------------------------------------------------------------------------------------------------- a block's memory

// Floats of a block's pieces.
struct token_sizes {
    int64_t states, values, keys, vectors; // S and G; u, e, w M; arrives, leaves; what lies in shared memory anyway
};
static __host__ __device__ __forceinline__ token_sizes token_sizes_of(const recurrence &a) {
    const int64_t depth = (a.depth + 3) / 4 * 4, columns = (a.columns + 3) / 4 * 4;
    return {2 * depth * columns, 3 * CHUNK * columns, 2 * CHUNK * depth, 3 * depth};
}

struct token_memory {
    float *state, *grad;               // (D, V')
    float *written, *errors, *answers; // (CHUNK, V'): u, e, w M
    float *arrives, *leaves;           // (CHUNK, D)
    float *decay_m1, *key, *through;   // (D)
};
static __device__ __forceinline__ token_memory token_memory_of(const recurrence &a, float *shared, float *workspace,
                                                               bool shared_states) {
    const token_sizes sizes = token_sizes_of(a);
    token_memory m;
    m.decay_m1 = shared;
    m.key = shared + sizes.vectors / 3;
    m.through = shared + sizes.vectors / 3 * 2;
    m.written = workspace;
    m.errors = workspace + sizes.values / 3;
    m.answers = workspace + sizes.values / 3 * 2;
    m.arrives = workspace + sizes.values;
    m.leaves = m.arrives + sizes.keys / 2;
    m.state = shared_states ? shared + sizes.vectors : m.arrives + sizes.keys;
    m.grad = m.state + sizes.states / 2;
    return m;
}

// A state of a row, and its chunk that is worked on.
struct token_job {
    const cuda_table *table;
    recurrence_gradients b;
    token_memory m;
    int32_t row, state;
    kern_chunk chunk;
};

// ------------------------------------------------------------------------------------------------------------- a token

static __device__ __forceinline__ bool begins_anew(const token_job &j, int32_t t) {
    return t > j.table->row[j.row].token0 && j.table->token_start[t] == t;
}

// Its key and decays; begins and ends with a barrier.
static __device__ __forceinline__ void take_token(const token_job &j, int32_t t) {
    const recurrence &a = j.b.a;
    const bool anew = begins_anew(j, t), channel = a.decay == KERN_DECAY_CHANNEL;
    const float *k = recurrence_key(a, t, j.state);
    __syncthreads();
    for (int32_t d = threadIdx.x; d < a.depth; d += TOKEN_THREADS) {
        const float g = channel ? recurrence_channel_decay(a, t, j.state)[d] : recurrence_head_decay(a, t, j.state);
        j.m.decay_m1[d] = anew ? -1.0f : expm1f(g);
        j.m.key[d] = k[d];
    }
    __syncthreads();
}
static __device__ __forceinline__ float decayed(float m1, float x) {
    return m1 > -1 ? fmaf(m1, x, x) : 0;
}

static __device__ __forceinline__ float dot_of(const float *x, const float *y, int32_t count) {
    float sum = 0;
    for (int32_t j = threadIdx.x % CUDA_WARP; j < count; j += CUDA_WARP)
        sum = fmaf(x[j], y[j], sum);
    return cuda_warp_sum(sum);
}

// u and e, S~ in place of S; a thread has columns.
static __device__ __forceinline__ void find_errors(const token_job &j, int32_t t) {
    const recurrence &a = j.b.a;
    const int32_t i = t - j.chunk.token0, columns = a.columns;
    const float *v = recurrence_value(a, t, j.state);
    const float weight = recurrence_weight(a, t, j.state);
    for (int32_t c = threadIdx.x; c < columns; c += TOKEN_THREADS) {
        float answer = 0;
        for (int32_t d = 0; d < a.depth; d++) {
            float &s = j.m.state[(int64_t)d * columns + c];
            s = decayed(j.m.decay_m1[d], s);
            answer = fmaf(s, j.m.key[d], answer);
        }
        const float value = c < a.width ? v[c] : 1.0f, e = a.delta ? value - answer : value;
        j.m.errors[i * columns + c] = e;
        j.m.written[i * columns + c] = weight * e;
    }
}

// dQ, and S~ becomes S; a warp has rows.
static __device__ __forceinline__ void read_and_write(const token_job &j, int32_t t, bool add_query) {
    const recurrence &a = j.b.a;
    const int32_t i = t - j.chunk.token0, columns = a.columns, lane = threadIdx.x % CUDA_WARP;
    const float *u = j.m.written + (int64_t)i * columns;
    for (int32_t reader = 0; reader < a.readers; reader++) {
        const float *q = recurrence_query(a, t, j.state, reader), *d_o = gradients_output(j.b, t, j.state, reader);
        const float own = dot_of(u, d_o, columns);
        float *dq = gradients_query(j.b, t, j.state, reader);
        for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth; d += TOKEN_WARPS) {
            const float found = dot_of(j.m.state + (int64_t)d * columns, d_o, columns);
            if (lane != 0)
                continue;
            gradients_put(&j.m.arrives[(int64_t)i * a.depth + d], reader > 0, q[d] * (a.scale * found));
            if (dq)
                gradients_put(&dq[d], add_query, a.scale * fmaf(own, j.m.key[d], found));
        }
    }
    for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth; d += TOKEN_WARPS)
        for (int32_t c = lane; c < columns; c += CUDA_WARP)
            j.m.state[(int64_t)d * columns + c] = fmaf(j.m.key[d], u[c], j.m.state[(int64_t)d * columns + c]);
}

// The token's readings go to G; M, dV, dw; a thread has columns.
static __device__ __forceinline__ void answer(const token_job &j, int32_t t, bool add_value,
                                              float (&partial)[TOKEN_WARPS]) {
    const recurrence &a = j.b.a;
    const int32_t i = t - j.chunk.token0, columns = a.columns;
    const float weight = recurrence_weight(a, t, j.state);
    float *dv = gradients_value(j.b, t, j.state), dw = 0;
    for (int32_t c = threadIdx.x; c < columns; c += TOKEN_THREADS) {
        float m = 0, skipped = 0;
        for (int32_t reader = 0; reader < a.readers; reader++) {
            const float *q = recurrence_query(a, t, j.state, reader);
            const float d_o = gradients_output(j.b, t, j.state, reader)[c], scaled = a.scale * d_o;
            skipped = fmaf(recurrence_skip(a, j.state, reader, c), d_o, skipped);
            for (int32_t d = 0; d < a.depth; d++)
                j.m.grad[(int64_t)d * columns + c] = fmaf(q[d], scaled, j.m.grad[(int64_t)d * columns + c]);
        }
        for (int32_t d = 0; d < a.depth; d++)
            m = fmaf(j.m.grad[(int64_t)d * columns + c], j.m.key[d], m);
        dw = fmaf(m, j.m.errors[i * columns + c], dw);
        j.m.answers[i * columns + c] = weight * m;
        if (c < a.width)
            gradients_put(&dv[c], add_value, weight * m + skipped);
    }
    dw = cuda_warp_sum(dw);
    if (threadIdx.x % CUDA_WARP == 0)
        partial[threadIdx.x / CUDA_WARP] = dw;
}

// What of dK comes from G, its own readings added, and what leaves the token for those after it; a warp has rows.
static __device__ __forceinline__ void give(const token_job &j, int32_t t, bool add_key) {
    const recurrence &a = j.b.a;
    const int32_t i = t - j.chunk.token0, columns = a.columns, lane = threadIdx.x % CUDA_WARP;
    const float *u = j.m.written + (int64_t)i * columns;
    float *dk = gradients_key(j.b, t, j.state);
    for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth; d += TOKEN_WARPS) {
        const float found = dot_of(j.m.grad + (int64_t)d * columns, u, columns);
        if (lane != 0)
            continue;
        gradients_put(&dk[d], add_key, found);
        j.m.leaves[(int64_t)i * a.depth + d] = j.m.key[d] * found;
    }
    for (int32_t reader = 0; reader < a.readers; reader++) {
        const float *q = recurrence_query(a, t, j.state, reader);
        const float own = a.scale * dot_of(u, gradients_output(j.b, t, j.state, reader), columns);
        for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth && lane == 0; d += TOKEN_WARPS)
            dk[d] = fmaf(q[d], own, dk[d]);
    }
}

// G becomes that of the state before the token; a warp has rows.
static __device__ __forceinline__ void retreat(const token_job &j, int32_t t) {
    const recurrence &a = j.b.a;
    const int32_t columns = a.columns;
    const float *answers = j.m.answers + (int64_t)(t - j.chunk.token0) * columns;
    for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth; d += TOKEN_WARPS) {
        float *g = j.m.grad + (int64_t)d * columns;
        const float key = j.m.key[d], m1 = j.m.decay_m1[d];
        for (int32_t c = threadIdx.x % CUDA_WARP; c < columns; c += CUDA_WARP)
            g[c] = decayed(m1, a.delta ? fmaf(-key, answers[c], g[c]) : g[c]);
    }
}

// By the delta rule: what of dK comes from S; a warp has rows.
static __device__ __forceinline__ void read_errors(const token_job &j, int32_t t) {
    const recurrence &a = j.b.a;
    const int32_t i = t - j.chunk.token0, columns = a.columns, lane = threadIdx.x % CUDA_WARP;
    const float *u = j.m.written + (int64_t)i * columns, *answers = j.m.answers + (int64_t)i * columns;
    float *dk = gradients_key(j.b, t, j.state);
    for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth; d += TOKEN_WARPS) {
        const float key = j.m.key[d], m1 = j.m.decay_m1[d];
        float *s = j.m.state + (int64_t)d * columns, found = 0;
        for (int32_t c = lane; c < columns; c += CUDA_WARP) {
            const float before = decayed(m1, s[c]);
            found = fmaf(before, answers[c], found);
            s[c] = fmaf(key, u[c], before);
        }
        found = cuda_warp_sum(found);
        if (lane != 0)
            continue;
        dk[d] -= found;
        j.m.arrives[(int64_t)i * a.depth + d] -= key * found;
    }
}

// ------------------------------------------------------------------------------------------------------------- a chunk

static __device__ __forceinline__ void load_snapshot(const token_job &j, int64_t chunk) {
    const recurrence &a = j.b.a;
    const float *from = gradients_snapshot(j.b, chunk, j.state);
    __syncthreads();
    for (int64_t at = threadIdx.x; at < (int64_t)a.depth * a.columns; at += TOKEN_THREADS)
        j.m.state[at] = from[at / a.columns * j.b.snapshot_row + at % a.columns];
}

// What the state that the chunk's last token finds gives to the chunk's end, by channel.
static __device__ __forceinline__ void carry_through(const token_job &j) {
    const recurrence &a = j.b.a;
    for (int32_t d = threadIdx.x / CUDA_WARP; d < a.depth; d += TOKEN_WARPS) {
        const int64_t at = (int64_t)d * a.columns;
        const float sum = dot_of(j.m.grad + at, j.m.state + at, a.columns);
        if (threadIdx.x % CUDA_WARP == 0)
            j.m.through[d] = sum;
    }
}

// dg of the chunk's tokens, from the last; flow(t): what arrives there less what leaves. What leaves the last is not in
// what is carried through.
template <typename Flow>
static __device__ __forceinline__ void sum_decays(const token_job &j, double through, float *dg, int64_t stride,
                                                  Flow flow) {
    const kern_row &row = j.table->row[j.row];
    for (int32_t i = j.chunk.length - 1; i >= 0; i--) {
        const int32_t t = j.chunk.token0 + i;
        const bool nothing = begins_anew(j, t);
        through = nothing ? 0 : through + flow(i);
        gradients_put(&dg[t * stride], j.b.add, row.slot < 0 && t == row.token0 ? 0 : (float)through);
    }
}

static __device__ __forceinline__ void decay_gradients(const token_job &j, double (&sums)[CHUNK + 1]) {
    const recurrence &a = j.b.a;
    const float *arrives = j.m.arrives, *leaves = j.m.leaves;
    const int32_t last = j.chunk.length - 1;
    __syncthreads();
    if (a.decay == KERN_DECAY_CHANNEL) {
        for (int32_t d = threadIdx.x; d < a.depth; d += TOKEN_THREADS)
            sum_decays(j, j.m.through[d], j.b.dg + (int64_t)j.state * a.depth + d, (int64_t)a.states * a.depth,
                       [&](int32_t i) {
                           const int64_t at = (int64_t)i * a.depth + d;
                           return (double)arrives[at] - (i < last ? (double)leaves[at] : 0);
                       });
        return;
    }
    for (int32_t i = threadIdx.x; i <= CHUNK; i += TOKEN_THREADS) {
        double sum = 0;
        for (int32_t d = 0; d < a.depth && (i <= last || i == CHUNK); d++) {
            const int64_t at = (int64_t)i * a.depth + d;
            sum += i == CHUNK ? (double)j.m.through[d] : (double)arrives[at] - (i < last ? (double)leaves[at] : 0);
        }
        sums[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        sum_decays(j, sums[CHUNK], j.b.dg + j.state, a.states, [&](int32_t i) { return sums[i]; });
}

static __device__ void run_chunk(const token_job &j, int64_t index, float (&partial)[TOKEN_WARPS],
                                 double (&sums)[CHUNK + 1]) {
    const recurrence &a = j.b.a;
    const gradients_adds adds = gradients_adds_of(j.b, j.state);
    const int32_t begin = j.chunk.token0, end = j.chunk.token0 + j.chunk.length;
    load_snapshot(j, index);
    for (int32_t t = begin; t < end; t++) {
        take_token(j, t);
        find_errors(j, t);
        __syncthreads();
        if (t == end - 1)
            carry_through(j);
        read_and_write(j, t, adds.query);
    }
    for (int32_t t = end - 1; t >= begin; t--) {
        take_token(j, t);
        give(j, t, adds.key);
        __syncthreads();
        answer(j, t, adds.value, partial);
        __syncthreads();
        retreat(j, t);
        if (threadIdx.x == 0 && j.b.dbeta) {
            float sum = 0;
            for (int i = 0; i < TOKEN_WARPS; i++)
                sum += partial[i];
            gradients_put(&j.b.dbeta[(int64_t)t * a.states + j.state], j.b.add, sum);
        }
    }
    if (a.delta) {
        load_snapshot(j, index);
        for (int32_t t = begin; t < end; t++) {
            take_token(j, t);
            read_errors(j, t);
        }
    }
    if (j.b.dg)
        decay_gradients(j, sums);
}

static __device__ void run_state(token_job &j, float (&partial)[TOKEN_WARPS], double (&sums)[CHUNK + 1]) {
    const recurrence &a = j.b.a;
    const int64_t floats = (int64_t)a.depth * a.columns;
    float *dstate = gradients_dstate(j.b, j.row, j.state);
    __syncthreads();
    for (int64_t at = threadIdx.x; at < floats; at += TOKEN_THREADS)
        j.m.grad[at] = dstate ? dstate[at] : 0;
    for (int32_t index = chunk_of_row(j.table, j.row + 1) - 1, first = chunk_of_row(j.table, j.row); index >= first;
         index--) {
        j.chunk = j.table->chunk[index];
        run_chunk(j, index, partial, sums);
    }
    __syncthreads();
    for (int64_t at = threadIdx.x; dstate && at < floats; at += TOKEN_THREADS)
        dstate[at] = j.m.grad[at];
}

static __global__ void __launch_bounds__(TOKEN_THREADS)
    tokens_kernel(const cuda_table *table, const recurrence_gradients b, float *workspace, int64_t block_floats,
                  int32_t group, bool shared_states) {
    cuda_begin();
    cuda_await();
    extern __shared__ __align__(16) char memory[];
    __shared__ float partial[TOKEN_WARPS];
    __shared__ double sums[CHUNK + 1];
    token_job j = {table, b,
                   token_memory_of(b.a, (float *)memory, workspace + blockIdx.x * block_floats, shared_states)};
    const int32_t groups = b.a.states / group;
    for (int64_t item = blockIdx.x; item < (int64_t)table->n_rows * groups; item += gridDim.x) {
        j.row = (int32_t)(item / groups);
        for (int32_t i = 0; i < group; i++) {
            j.state = (int32_t)(item % groups) * group + i;
            run_state(j, partial, sums);
        }
    }
}

// --------------------------------------------------------------------------------------------------------------- skip

constexpr int SKIP_LEAST_TOKENS = 256;

static __global__ void __launch_bounds__(CUDA_SUM_THREADS)
    skip_kernel(const cuda_table *table, const recurrence_gradients b, int32_t each, float *partial) {
    cuda_begin();
    cuda_await();
    const recurrence &a = b.a;
    cuda_sum_columns<1>(table->n_tokens, each, a.outputs * a.width, partial, [&](int32_t t, int32_t c, float(&sum)[1]) {
        const int32_t head = c / a.width, state = head / a.readers, column = c % a.width;
        sum[0] = fmaf(gradients_output(b, t, state, head % a.readers)[column], recurrence_value(a, t, state)[column],
                      sum[0]);
    });
}

static kern_status launch_skip(const cuda_step *step, const recurrence_gradients &b, float *grad_skip) {
    const recurrence &a = b.a;
    const int32_t width = a.outputs * a.width, members = a.skip_width == 1 ? a.width : 1;
    const cuda_sum_cut cut = cuda_sum_cut_of(step->tokens, SKIP_LEAST_TOKENS, CUDA_SUM_FEW_BLOCKS);
    const dim3 block = cuda_sum_shape(width);
    const dim3 grid((unsigned)cut.blocks, (unsigned)cuda_blocks(width, (int)block.x));
    float *partial = (float *)step->cuda->workspace;
    const kern_status status = cuda_start(step, skip_kernel, grid, block, 0, step->table, b, cut.each, partial);
    return status ? status
                  : cuda_add_partials(step, {partial, grad_skip, width, cut.blocks, width / members, members, 1});
}

// ----------------------------------------------------------------------------------------------------------- launching

int32_t cuda_gradients_group(const recurrence &a) {
    const int32_t shared[3] = {a.states / a.keys, a.states / a.values, a.queries < a.states ? a.states / a.queries : 1};
    int32_t group = 1;
    for (int i = 0; i < 3; i++) {
        int32_t multiple = group;
        while (multiple % shared[i])
            multiple += group;
        group = multiple;
    }
    return group;
}

struct token_plan {
    int64_t block_floats;
    size_t shared;
    bool shared_states;
    int most_blocks;
};
static token_plan token_plan_of(const kern_cuda *cuda, const recurrence &a) {
    const token_sizes sizes = token_sizes_of(a);
    const size_t least = (size_t)sizes.vectors * sizeof(float), all = least + (size_t)sizes.states * sizeof(float);
    token_plan plan;
    plan.shared_states = all + 2048 <= cuda->shared_limit; // beside what is static
    plan.shared = plan.shared_states ? all : least;
    plan.block_floats = sizes.values + sizes.keys + (plan.shared_states ? 0 : sizes.states);
    const int64_t fit = (int64_t)(WORKSPACE_MOST / sizeof(float)) / plan.block_floats, most = 4 * cuda->processors;
    plan.most_blocks = fit < 1 ? 1 : fit < most ? (int)fit : (int)most;
    return plan;
}

size_t cuda_gradients_token_workspace(const kern_cuda *cuda, const recurrence &a) {
    const token_plan plan = token_plan_of(cuda, a);
    return (size_t)plan.block_floats * (size_t)plan.most_blocks * sizeof(float);
}

kern_status cuda_gradients_tokens(const cuda_step *step, const recurrence_gradients &b, char *workspace) {
    const token_plan plan = token_plan_of(step->cuda, b.a);
    const int32_t group = cuda_gradients_group(b.a);
    const int64_t items = (int64_t)step->rows * (b.a.states / group);
    const int blocks = items < plan.most_blocks ? (int)items : plan.most_blocks;
    const kern_status status = cuda_allow_shared(tokens_kernel, plan.shared);
    return status ? status
                  : cuda_start(step, tokens_kernel, blocks, TOKEN_THREADS, plan.shared, step->table, b,
                               (float *)workspace, plan.block_floats, group, plan.shared_states);
}

size_t cuda_gradients_workspace(const kern_cuda *cuda, const recurrence &a) {
    return cuda_gradients_have_chunks(cuda, a) ? cuda_gradients_chunk_workspace(a)
                                               : cuda_gradients_token_workspace(cuda, a);
}
kern_status cuda_gradients(const cuda_step *step, const recurrence_gradients &b, char *workspace) {
    return cuda_gradients_have_chunks(step->cuda, b.a) ? cuda_gradients_chunks(step, b, workspace)
                                                       : cuda_gradients_tokens(step, b, workspace);
}

kern_status cuda_recurrence_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    const kern_recurrence_backward_args *a = (const kern_recurrence_backward_args *)args;
    const kern_recurrence *f = &a->family;
    const kern_status status = kern_recurrence_check(f, WIDTH_MAX, a->g.ref != 0, a->beta.ref != 0, a->skip.ref != 0);
    if (status)
        return status;
    if (f->storage != KERN_STORE_F32)
        return KERN_UNSUPPORTED;
    const bool decays = f->decay == KERN_DECAY_SCALAR || f->decay == KERN_DECAY_CHANNEL;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->snapshots.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref ||
        !a->dv.ref || (f->weighted != 0) != (a->dbeta.ref != 0) || decays != (a->dg.ref != 0) ||
        (f->skip_width != 0) != (a->grad_skip.ref != 0))
        return KERN_INVALID;
    const recurrence all = cuda_recurrence_of(f);
    const size_t skip = f->skip_width ? cuda_sum_bytes((int64_t)all.outputs * all.width, CUDA_SUM_FEW_BLOCKS) : 0;
    *workspace_bytes = cuda_gradients_workspace(cuda, all);
    if (*workspace_bytes < skip)
        *workspace_bytes = skip;
    return KERN_OK;
}

kern_status cuda_recurrence_backward_run(const cuda_step *step, const void *args) {
    const kern_recurrence_backward_args *from = (const kern_recurrence_backward_args *)args;
    if (step->generated_rows > 0)
        return KERN_INVALID;
    recurrence_gradients b = {};
    b.a = cuda_recurrence_of(&from->family);
    b.a.q = from->q.f;
    b.a.k = from->k.f;
    b.a.v = from->v.f;
    b.a.g = from->g.f;
    b.a.beta = from->beta.f;
    b.a.skip = from->skip.f;
    b.d_o = from->d_o.f;
    b.snapshots = from->snapshots.f;
    b.snapshot_row = b.a.columns;
    b.snapshot_state = (int64_t)b.a.depth * b.a.columns;
    b.snapshot_chunk = b.a.states * b.snapshot_state;
    b.dq = from->dq.f;
    b.dk = from->dk.f;
    b.dv = from->dv.f;
    b.dg = from->dg.f;
    b.dbeta = from->dbeta.f;
    b.dstate = from->dstate.f;
    b.dstate_state = b.snapshot_state;
    b.dstate_row = b.snapshot_chunk;
    const kern_status status = cuda_gradients(step, b, step->cuda->workspace);
    return status || !b.a.skip_width ? status : launch_skip(step, b, from->grad_skip.f);
}

// SPDX-License-Identifier: Apache-2.0
// Backward of attention, of rows without earlier positions: probabilities are made again from the forward's log sums.
//
//     p = e^(scale q k - lse)    dp = do v    ds = scale p (dp - do o)    dq = ds k    dk = ds^T q    dv = p^T do
// Two launches of one kernel. In the first a block owns a tile of keys of one kv head and goes over the tiles of
// queries that see them, head by head of the group; in the second it owns queries of one head and goes over keys. Each
// output is summed by one block in one order. Tiles are of tokens of the batch: what a query sees follows from where
// its document starts and from the window.
//
// A warp owns 16 rows of its tile. Scores and dp are products of own rows with the other tile's, and as they lie in
// registers they are the left operand of the products that follow. Operands are rounded to bf16 in shared memory as
// they come, to one number where the device is `fast`, else to three (gemm.cu). Outputs of more than 128 columns are
// shared by two blocks.
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/attention_wide.cuh"

struct attention_job {
    const float *q, *k, *v, *o, *lse, *d_o;
    float *dq, *dk, *dv;
    kern_attention shape;
    bool wide;
};

// What a block knows of the queries of a tile.
struct query_facts {
    float *lse, *along; // along: do . o
    int32_t *start;     // first token of the document; past the batch: no key is seen
};

template <int ROWS>
static __device__ __forceinline__ void load_facts(const cuda_table *table, const attention_job &job, int32_t head,
                                                  int32_t token0, const query_facts &facts) {
    for (int row = threadIdx.x; row < ROWS; row += ROWS * 2) {
        const int32_t t = token0 + row;
        const bool there = t < table->n_tokens;
        facts.lse[row] = there ? job.lse[(int64_t)t * job.shape.heads + head] : 0.0f;
        facts.start[row] = there ? table->token_start[t] : INT32_MAX;
    }
}

// Scores and dp become probabilities and ds. KEYS: own rows are keys, else queries.
template <int ROWS, bool KEYS>
static __device__ __forceinline__ void differentiate(const kern_attention &shape, const query_facts &facts,
                                                     int32_t own0, int32_t other0, float (&p)[ROWS / 8][4],
                                                     float (&ds)[ROWS / 8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int own = warp * 16 + e / 2 * 8 + lane / 4, other = i * 8 + lane % 4 * 2 + e % 2;
            const int query = KEYS ? other : own;
            const int32_t t = (KEYS ? other0 : own0) + query, j = KEYS ? own0 + own : other0 + other;
            const bool seen = j <= t && j >= facts.start[query] && (shape.window == 0 || t - j < shape.window);
            const float probability = seen ? expf(fmaf(shape.scale, p[i][e], -facts.lse[query])) : 0.0f;
            ds[i][e] = seen ? shape.scale * probability * (ds[i][e] - facts.along[query]) : 0.0f;
            p[i][e] = probability;
        }
}

// Grid: tiles of keys, kv heads, pieces of the columns.
template <int LIMBS, int WIDTH>
static __global__ void __launch_bounds__(cuda_tile<LIMBS, WIDTH>::THREADS)
    keys_kernel(const cuda_table *table, const __grid_constant__ attention_job job) {
    extern __shared__ __align__(16) uint16_t memory[];
    cuda_begin();
    cuda_await();
    typedef cuda_tile<LIMBS, WIDTH> layout;
    constexpr int ROWS = layout::ROWS;
    const kern_attention &s = job.shape;
    uint16_t *k = memory, *v = k + layout::OPERAND, *q = v + layout::OPERAND, *d_o = q + layout::OPERAND;
    float *numbers = (float *)(d_o + layout::OPERAND);
    const query_facts facts = {numbers, numbers + ROWS, (int32_t *)(numbers + 2 * ROWS)};
    const int32_t tokens = table->n_tokens, key0 = (int32_t)blockIdx.x * ROWS, kv_head = (int32_t)blockIdx.y;
    const int32_t group = s.heads / s.kv_heads, column0 = (int32_t)blockIdx.z * layout::COLUMNS;
    const int32_t last = key0 + ROWS - 1;
    cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.k, NULL, s.kv_heads, kv_head, key0, tokens, k, NULL);
    cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.v, NULL, s.kv_heads, kv_head, key0, tokens, v, NULL);
    float dk[layout::COLUMNS / 8][4] = {}, dv[layout::COLUMNS / 8][4] = {};
    for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int32_t query0 = key0; query0 < tokens; query0 += ROWS) {
            if (table->token_start[query0] > last || (s.window > 0 && query0 - last >= s.window))
                break; // and so all behind them
            __syncthreads();
            cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.q, NULL, s.heads, head, query0, tokens, q, NULL);
            cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.d_o, job.o, s.heads, head, query0, tokens, d_o,
                                         facts.along);
            load_facts<ROWS>(table, job, head, query0, facts);
            __syncthreads();
            float p[ROWS / 8][4], ds[ROWS / 8][4];
            cuda_score<LIMBS, WIDTH>(k, q, p);
            cuda_score<LIMBS, WIDTH>(v, d_o, ds);
            differentiate<ROWS, true>(s, facts, key0, query0, p, ds);
            cuda_gather<LIMBS, WIDTH>(p, d_o, column0, dv);
            cuda_gather<LIMBS, WIDTH>(ds, q, column0, dk);
        }
    cuda_write_tile<LIMBS, WIDTH>(s.head_width, job.dk, s.kv_heads, kv_head, key0, tokens, column0, dk);
    cuda_write_tile<LIMBS, WIDTH>(s.head_width, job.dv, s.kv_heads, kv_head, key0, tokens, column0, dv);
}

// Grid: tiles of queries, heads, pieces of the columns.
template <int LIMBS, int WIDTH>
static __global__ void __launch_bounds__(cuda_tile<LIMBS, WIDTH>::THREADS)
    queries_kernel(const cuda_table *table, const __grid_constant__ attention_job job) {
    extern __shared__ __align__(16) uint16_t memory[];
    cuda_begin();
    cuda_await();
    typedef cuda_tile<LIMBS, WIDTH> layout;
    constexpr int ROWS = layout::ROWS;
    const kern_attention &s = job.shape;
    uint16_t *k = memory, *v = k + layout::OPERAND, *q = v + layout::OPERAND, *d_o = q + layout::OPERAND;
    float *numbers = (float *)(d_o + layout::OPERAND);
    const query_facts facts = {numbers, numbers + ROWS, (int32_t *)(numbers + 2 * ROWS)};
    const int32_t tokens = table->n_tokens, query0 = (int32_t)blockIdx.x * ROWS, head = (int32_t)blockIdx.y;
    const int32_t kv_head = head / (s.heads / s.kv_heads), column0 = (int32_t)blockIdx.z * layout::COLUMNS;
    if (query0 >= tokens)
        return;
    cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.q, NULL, s.heads, head, query0, tokens, q, NULL);
    cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.d_o, job.o, s.heads, head, query0, tokens, d_o,
                                 facts.along);
    load_facts<ROWS>(table, job, head, query0, facts);
    int32_t first = table->token_start[query0];
    if (s.window > 0 && query0 - s.window + 1 > first)
        first = query0 - s.window + 1;
    float dq[layout::COLUMNS / 8][4] = {};
    for (int32_t key0 = first / ROWS * ROWS; key0 <= query0; key0 += ROWS) {
        __syncthreads();
        cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.k, NULL, s.kv_heads, kv_head, key0, tokens, k, NULL);
        cuda_load_tile<LIMBS, WIDTH>(s.head_width, job.wide, job.v, NULL, s.kv_heads, kv_head, key0, tokens, v, NULL);
        __syncthreads();
        float p[ROWS / 8][4], ds[ROWS / 8][4];
        cuda_score<LIMBS, WIDTH>(q, k, p);
        cuda_score<LIMBS, WIDTH>(d_o, v, ds);
        differentiate<ROWS, false>(s, facts, query0, key0, p, ds);
        cuda_gather<LIMBS, WIDTH>(ds, k, column0, dq);
    }
    cuda_write_tile<LIMBS, WIDTH>(s.head_width, job.dq, s.heads, head, query0, tokens, column0, dq);
}

// --------------------------------------------------------------------------------------------------------- launchers

template <int LIMBS, int WIDTH> static kern_status launch(const cuda_step *step, const attention_job &job) {
    typedef cuda_tile<LIMBS, WIDTH> layout;
    const unsigned tiles = (unsigned)cuda_blocks(step->tokens, layout::ROWS), pieces = WIDTH / layout::COLUMNS;
    kern_status status = cuda_allow_shared(keys_kernel<LIMBS, WIDTH>, layout::bytes(4));
    if (!status)
        status = cuda_allow_shared(queries_kernel<LIMBS, WIDTH>, layout::bytes(4));
    if (!status)
        status = cuda_start(step, keys_kernel<LIMBS, WIDTH>, dim3(tiles, (unsigned)job.shape.kv_heads, pieces),
                            layout::THREADS, layout::bytes(4), step->table, job);
    if (!status)
        status = cuda_start(step, queries_kernel<LIMBS, WIDTH>, dim3(tiles, (unsigned)job.shape.heads, pieces),
                            layout::THREADS, layout::bytes(4), step->table, job);
    return status;
}

template <int LIMBS> static kern_status launch_width(const cuda_step *step, const attention_job &job) {
    if (job.shape.head_width <= 64)
        return launch<LIMBS, 64>(step, job);
    return job.shape.head_width <= 128 ? launch<LIMBS, 128>(step, job) : launch<LIMBS, 256>(step, job);
}

static size_t shared_bytes(const kern_cuda *cuda, int32_t width) {
    if (cuda->fast)
        return width <= 64    ? cuda_tile<1, 64>::bytes(4)
               : width <= 128 ? cuda_tile<1, 128>::bytes(4)
                              : cuda_tile<1, 256>::bytes(4);
    return width <= 64    ? cuda_tile<3, 64>::bytes(4)
           : width <= 128 ? cuda_tile<3, 128>::bytes(4)
                          : cuda_tile<3, 256>::bytes(4);
}

kern_status cuda_attention_backward_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)workspace_bytes;
    const kern_attention_backward_args *a = (const kern_attention_backward_args *)args;
    const kern_attention *s = &a->attention;
    if (s->heads < 1 || s->kv_heads < 1 || s->heads % s->kv_heads != 0 || s->head_width < 1 || s->window < 0 ||
        !isfinite(s->scale))
        return KERN_INVALID;
    if (!a->q.ref || !a->k.ref || !a->v.ref || !a->o.ref || !a->lse.ref || !a->d_o.ref || !a->dq.ref || !a->dk.ref ||
        !a->dv.ref)
        return KERN_INVALID;
    return s->head_width > 256 || shared_bytes(cuda, s->head_width) > cuda->shared_limit ? KERN_UNSUPPORTED : KERN_OK;
}

kern_status cuda_attention_backward_run(const cuda_step *step, const void *args) {
    const kern_attention_backward_args *a = (const kern_attention_backward_args *)args;
    if (cuda_attention_is_wide(step, &a->attention))
        return cuda_attention_wide_backward(step, a);
    const bool wide = a->attention.head_width % 4 == 0 && cuda_is_wide(a->q.p) && cuda_is_wide(a->k.p) &&
                      cuda_is_wide(a->v.p) && cuda_is_wide(a->o.p) && cuda_is_wide(a->d_o.p);
    const attention_job job = {a->q.f,  a->k.f,  a->v.f,  a->o.f,       a->lse.f, a->d_o.f,
                               a->dq.f, a->dk.f, a->dv.f, a->attention, wide};
    return step->cuda->fast ? launch_width<1>(step, job) : launch_width<3>(step, job);
}

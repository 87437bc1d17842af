// SPDX-License-Identifier: Apache-2.0
// The backward of attention_wide.cuh: probabilities are made again from the forward's log sums.
//
//     p = e^(scale q k - lse)    dp = do v    ds = p (dp - do o)    dq = scale ds k    dk = scale ds^T q    dv = p^T do
// A launch gathers what is known of the queries (lse, do . o, where their documents start) by head. In the next a block
// owns keys of one kv head and goes over the queries that see them, head by head of the group; in the last it owns
// queries and goes over keys. Scores and dp, of own rows with a tile's, are the left operands of what follows as they
// lie in registers.
#include "kernels/cuda/attention_wide.cuh"

enum {
    WARPS = 8,
    THREADS = (WIDE_GROUPS + 1) * WIDE_GROUP, // a warpgroup fills, whose registers the others take
    FEW_REGISTERS = 24,
    MANY_REGISTERS = 240,
};

// A warp a query of a head.
static __global__ void __launch_bounds__(WARPS *CUDA_WARP)
    facts_kernel(const cuda_table *table, const wide_facts facts, const kern_attention s, const float *o,
                 const float *d_o, const float *lse) {
    cuda_begin();
    cuda_await();
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    const int32_t lane = (int32_t)threadIdx.x % CUDA_WARP, t = (int32_t)(i / s.heads), head = (int32_t)(i % s.heads);
    if (t >= facts.tokens)
        return;
    const bool there = t < table->n_tokens;
    float along = 0;
    for (int32_t c = lane; there && c < s.head_width; c += CUDA_WARP)
        along = fmaf(o[i * s.head_width + c], d_o[i * s.head_width + c], along);
    along = cuda_warp_sum(along);
    if (lane > 0)
        return;
    const int64_t at = (int64_t)head * facts.tokens + t;
    facts.along[at] = along;
    facts.lse[at] = there ? lse[i] * wide_log2e : 0.0f;
    if (head == 0)
        facts.start[t] = there ? table->token_start[t] : INT32_MAX;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What a query of the other or the own side is known by.
struct query_facts {
    float lse, along;
    int32_t start;
};

static __device__ __forceinline__ void differentiate(const kern_attention &s, bool whole, const query_facts &f,
                                                     int32_t query, int32_t key, float &p, float &ds) {
    const bool seen = whole || wide_sees(s, query, f.start, key);
    p = seen ? exp2f(fmaf(s.scale * wide_log2e, p, -f.lse)) : 0.0f;
    ds = p * (ds - f.along);
}

// ------------------------------------------------------------------------------------------------------- own keys

static constexpr int FACTS_BYTES = WIDE_TOKENS * 4; // of one kind, in a slot

template <int WIDTH> static constexpr int keys_slot = 2 * wide_bytes<WIDTH> + 3 * FACTS_BYTES; // q, do, facts

// The tiles of queries that see one of the keys [key0, key0 + count); by a whole warp.
static __device__ __forceinline__ int32_t queries_end(const wide_attention &job, int32_t key0, int32_t count,
                                                      int32_t tokens) {
    const int32_t last = key0 + count - 1, tiles = (tokens - 1) / WIDE_TOKENS + 1, lane = threadIdx.x % 32;
    for (int32_t base = key0 / WIDE_TOKENS; base < tiles; base += 32) {
        const int32_t query0 = (base + lane) * WIDE_TOKENS;
        const bool sees = base + lane < tiles && job.facts.start[query0] <= last &&
                          (job.shape.window == 0 || query0 - last < job.shape.window);
        const unsigned mask = __ballot_sync(0xffffffffu, sees);
        if (~mask != 0)
            return base + __ffs((int)~mask) - 1;
    }
    return tiles;
}

// Scores (own keys, queries of the slot) and dp become probabilities and ds.
static __device__ __forceinline__ void differentiate_keys(const kern_attention &s, const char *facts, int32_t query0,
                                                          int32_t key0, float (&p)[WIDE_SCORES],
                                                          float (&ds)[WIDE_SCORES]) {
    const float *lse = (const float *)facts, *along = lse + WIDE_TOKENS;
    const int32_t *start = (const int32_t *)(along + WIDE_TOKENS);
    const int32_t newest = query0 + WIDE_TOKENS - 1;
    const bool whole = key0 + WIDE_TOKENS - 1 <= query0 && start[WIDE_TOKENS - 1] <= key0 &&
                       (s.window == 0 || newest - key0 < s.window);
#pragma unroll
    for (int j = 0; j < WIDE_SCORES / 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int32_t query = wide_column(j) + e;
            const query_facts f = {lse[query], along[query], start[query]};
#pragma unroll
            for (int half = 0; half < 2; half++)
                differentiate(s, whole, f, query0 + query, key0 + wide_row(half), p[4 * j + 2 * half + e],
                              ds[4 * j + 2 * half + e]);
        }
}

// x (64 own, 64 of the slot) = own other^T.
template <int WIDTH>
static __device__ __forceinline__ void score_shared(const char *own, const char *other, float (&x)[WIDE_SCORES]) {
    const cuda_wgmma_operand left = wide_tokens(own), right = wide_tokens(other);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
        cuda_wgmma_shared<false, false>(x, left.at(k * WIDE_STEP_TOKENS), right.at(k * WIDE_STEP_TOKENS));
}

// By a warpgroup; own: its keys, then values.
template <int WIDTH>
static __device__ __forceinline__ void gather_keys(const wide_attention &job, const char *own, wide_range block,
                                                   int32_t key0, int32_t kv_head, int32_t tokens,
                                                   wide_ring<keys_slot<WIDTH>> &ring) {
    constexpr int BYTES = wide_bytes<WIDTH>;
    const kern_attention &s = job.shape;
    const wide_range seen = {key0 / WIDE_TOKENS, key0 < tokens ? queries_end(job, key0, WIDE_TOKENS, tokens) : 0};
    float dk[WIDTH / 2] = {}, dv[WIDTH / 2] = {};
    for (int32_t member = 0; member < s.heads / s.kv_heads; member++)
        for (int32_t tile = block.first; tile < block.end; tile++, ring.turn++) {
            ring.await();
            const char *q = ring.slot(), *d_o = q + BYTES;
            if (tile >= seen.first && tile < seen.end) {
                float p[WIDE_SCORES], ds[WIDE_SCORES];
                wide_clear(p);
                wide_clear(ds);
                cuda_wgmma_begin();
                score_shared<WIDTH>(own, q, p);
                score_shared<WIDTH>(own + BYTES, d_o, ds);
                cuda_wgmma_commit();
                wide_done(p);
                wide_done(ds);
                differentiate_keys(s, d_o + BYTES, tile * WIDE_TOKENS, key0, p, ds);
                wide_gather(p, d_o, dv);
                wide_gather(ds, q, dk);
            }
            ring.release();
        }
    wide_write(job.dk, s.kv_heads, kv_head, key0, tokens, s.scale, s.scale, dk);
    wide_write(job.dv, s.kv_heads, kv_head, key0, tokens, 1, 1, dv);
}

// By one thread.
template <int WIDTH>
static __device__ __forceinline__ void fill_queries(const wide_attention &job, wide_range block, int32_t kv_head,
                                                    wide_ring<keys_slot<WIDTH>> &ring) {
    constexpr int BYTES = wide_bytes<WIDTH>;
    const int32_t group = job.shape.heads / job.shape.kv_heads;
    for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int32_t tile = block.first; tile < block.end; tile++, ring.turn++) {
            const int64_t at = (int64_t)head * job.facts.tokens + tile * WIDE_TOKENS;
            cuda_mbarrier *full = ring.begin_fill();
            char *to = ring.slot();
            cuda_bulk_load(to, wide_tile<WIDTH>(job.q, tile, head), BYTES, full);
            cuda_bulk_load(to + BYTES, wide_tile<WIDTH>(job.d_o, tile, head), BYTES, full);
            cuda_bulk_load(to + 2 * BYTES, job.facts.lse + at, FACTS_BYTES, full);
            cuda_bulk_load(to + 2 * BYTES + FACTS_BYTES, job.facts.along + at, FACTS_BYTES, full);
            cuda_bulk_load(to + 2 * BYTES + 2 * FACTS_BYTES, job.facts.start + tile * WIDE_TOKENS, FACTS_BYTES, full);
        }
}

// ---------------------------------------------------------------------------------------------------- own queries

template <int WIDTH> static constexpr int queries_slot = 2 * wide_bytes<WIDTH>; // k, v

// By a warpgroup; own: its queries, then do.
template <int WIDTH>
static __device__ __forceinline__ void gather_queries(const cuda_table *table, const wide_attention &job,
                                                      const char *own, wide_range block, int32_t query0, int32_t head,
                                                      wide_ring<queries_slot<WIDTH>> &ring) {
    const kern_attention &s = job.shape;
    const wide_range seen = wide_keys_seen(table, s, query0);
    query_facts facts[2];
    int32_t query[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        query[half] = min(query0 + wide_row(half), job.facts.tokens - 1);
        const int64_t at = (int64_t)head * job.facts.tokens + query[half];
        facts[half] = {job.facts.lse[at], job.facts.along[at], job.facts.start[query[half]]};
    }
    float dq[WIDTH / 2] = {};
    for (int32_t tile = block.first; tile < block.end; tile++, ring.turn++) {
        ring.await();
        const char *keys = ring.slot();
        if (tile >= seen.first && tile < seen.end) {
            const int32_t key0 = tile * WIDE_TOKENS;
            uint4 q[WIDTH / 16], d_o[WIDTH / 16]; // anew for every tile, as the forward's
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++) {
                q[k] = wide_left(own, k);
                d_o[k] = wide_left(own + wide_bytes<WIDTH>, k);
            }
            float p[WIDE_SCORES], ds[WIDE_SCORES];
            const cuda_wgmma_operand k_rows = wide_tokens(keys), v_rows = wide_tokens(keys + wide_bytes<WIDTH>);
            wide_clear(p);
            wide_clear(ds);
            cuda_wgmma_begin();
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++) {
                cuda_wgmma(p, q[k], k_rows.at(k * WIDE_STEP_TOKENS));
                cuda_wgmma(ds, d_o[k], v_rows.at(k * WIDE_STEP_TOKENS));
            }
            cuda_wgmma_commit();
            wide_done(p);
            wide_done(ds);
            bool whole = true;
#pragma unroll
            for (int half = 0; half < 2; half++)
                whole = whole && wide_sees(s, query[half], facts[half].start, key0) &&
                        key0 + WIDE_TOKENS - 1 <= query[half];
            whole = __all_sync(0xffffffffu, whole);
#pragma unroll
            for (int i = 0; i < WIDE_SCORES; i++)
                differentiate(s, whole, facts[i / 2 % 2], query[i / 2 % 2], key0 + wide_column(i / 4) + i % 2, p[i],
                              ds[i]);
            wide_gather(ds, keys, dq);
        }
        ring.release();
    }
    wide_write(job.dq, s.heads, head, query0, table->n_tokens, s.scale, s.scale, dq);
}

#endif

// --------------------------------------------------------------------------------------------------------- the kernels

// Of a slot without facts, and with them.
static constexpr size_t shared_bytes(int width, bool facts) {
    const size_t tile = (size_t)width * WIDE_TOKENS * 2, slot = 2 * tile + (facts ? 3 * WIDE_TOKENS * 4 : 0);
    return WIDE_GROUPS * 2 * tile + WIDE_SLOTS * slot + (1 + 2 * WIDE_SLOTS) * sizeof(uint64_t);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Own tiles of two operands for each warpgroup; by one thread.
template <int WIDTH>
static __device__ __forceinline__ void bring_own(const wide_heads &x, const wide_heads &y, int32_t token0, int32_t head,
                                                 int32_t tokens, char *memory, cuda_mbarrier *own) {
    constexpr int BYTES = wide_bytes<WIDTH>;
    cuda_mbarrier_expect(own, WIDE_GROUPS * 2 * BYTES);
    cuda_mbarrier_arrive(own);
    for (int g = 0; g < WIDE_GROUPS; g++) {
        const int32_t tile = min(token0 / WIDE_TOKENS + g, (tokens - 1) / WIDE_TOKENS);
        cuda_bulk_load(memory + 2 * g * BYTES, wide_tile<WIDTH>(x, tile, head), BYTES, own);
        cuda_bulk_load(memory + (2 * g + 1) * BYTES, wide_tile<WIDTH>(y, tile, head), BYTES, own);
    }
}

template <int BYTES>
static __device__ __forceinline__ void make_barriers(const wide_ring<BYTES> &ring, cuda_mbarrier *own) {
    if (threadIdx.x == 0) {
        ring.make();
        cuda_mbarrier_make(own, 1);
        cuda_mbarrier_made();
    }
    __syncthreads();
}

#endif

// Grid: blocks of keys, kv heads.
template <int WIDTH>
static __global__ void __launch_bounds__(THREADS, 1)
    keys_kernel(const cuda_table *table, const __grid_constant__ wide_attention job) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    cuda_begin();
    char *slots = memory + WIDE_GROUPS * 2 * wide_bytes<WIDTH>;
    cuda_mbarrier *barriers = (cuda_mbarrier *)(slots + WIDE_SLOTS * keys_slot<WIDTH>),
                  *own = barriers + 2 * WIDE_SLOTS;
    wide_ring<keys_slot<WIDTH>> ring(slots, barriers);
    make_barriers(ring, own);
    cuda_await();
    const int32_t key0 = (int32_t)blockIdx.x * WIDE_GROUPS * WIDE_TOKENS, kv_head = (int32_t)blockIdx.y;
    const int32_t group = (int32_t)threadIdx.x / WIDE_GROUP, tokens = table->n_tokens;
    const wide_range block = {key0 / WIDE_TOKENS, queries_end(job, key0, WIDE_GROUPS * WIDE_TOKENS, tokens)};
    if (group < WIDE_GROUPS) {
        cuda_wgmma_take_registers<MANY_REGISTERS>();
        cuda_mbarrier_wait(own, 0);
        gather_keys<WIDTH>(job, memory + 2 * group * wide_bytes<WIDTH>, block, key0 + group * WIDE_TOKENS, kv_head,
                           tokens, ring);
    } else {
        cuda_wgmma_give_registers<FEW_REGISTERS>();
        if (threadIdx.x == WIDE_GROUPS * WIDE_GROUP) {
            bring_own<WIDTH>(job.k, job.v, key0, kv_head, tokens, memory, own);
            fill_queries<WIDTH>(job, block, kv_head, ring);
        }
    }
#endif
}

// Grid: blocks of queries, heads.
template <int WIDTH>
static __global__ void __launch_bounds__(THREADS, 1)
    queries_kernel(const cuda_table *table, const __grid_constant__ wide_attention job) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    constexpr int BYTES = wide_bytes<WIDTH>;
    cuda_begin();
    char *slots = memory + WIDE_GROUPS * 2 * BYTES;
    cuda_mbarrier *barriers = (cuda_mbarrier *)(slots + WIDE_SLOTS * queries_slot<WIDTH>),
                  *own = barriers + 2 * WIDE_SLOTS;
    wide_ring<queries_slot<WIDTH>> ring(slots, barriers);
    make_barriers(ring, own);
    cuda_await();
    const int32_t head = (int32_t)blockIdx.y, kv_head = head / (job.shape.heads / job.shape.kv_heads);
    const int32_t query0 = (int32_t)blockIdx.x * WIDE_GROUPS * WIDE_TOKENS, group = (int32_t)threadIdx.x / WIDE_GROUP;
    const wide_range block = wide_keys_of_block(table, job.shape, query0);
    if (group < WIDE_GROUPS) {
        cuda_wgmma_take_registers<MANY_REGISTERS>();
        cuda_mbarrier_wait(own, 0);
        gather_queries<WIDTH>(table, job, memory + 2 * group * BYTES, block, query0 + group * WIDE_TOKENS, head, ring);
    } else {
        cuda_wgmma_give_registers<FEW_REGISTERS>();
        if (threadIdx.x == WIDE_GROUPS * WIDE_GROUP) {
            bring_own<WIDTH>(job.q, job.d_o, query0, head, table->n_tokens, memory, own);
            wide_fill_keys<WIDTH>(job, block, kv_head, ring);
        }
    }
#endif
}

// --------------------------------------------------------------------------------------------------------- launchers

template <int WIDTH> static kern_status launch(const cuda_step *step, const wide_attention &job) {
    const unsigned blocks = (unsigned)cuda_blocks(step->tokens, WIDE_GROUPS * WIDE_TOKENS);
    const size_t keys = shared_bytes(WIDTH, true), queries = shared_bytes(WIDTH, false);
    kern_status status = cuda_allow_shared(keys_kernel<WIDTH>, keys);
    if (!status)
        status = cuda_allow_shared(queries_kernel<WIDTH>, queries);
    if (!status)
        status = cuda_start(step, keys_kernel<WIDTH>, dim3(blocks, (unsigned)job.shape.kv_heads), THREADS, keys,
                            step->table, job);
    if (!status)
        status = cuda_start(step, queries_kernel<WIDTH>, dim3(blocks, (unsigned)job.shape.heads), THREADS, queries,
                            step->table, job);
    return status;
}

// lse, do . o and starts lie where products have their partial sums.
static kern_status gather_facts(const cuda_step *step, const kern_attention_backward_args *a, wide_facts *facts) {
    const kern_attention &s = a->attention;
    const int32_t tokens = (step->tokens + WIDE_TOKENS - 1) / WIDE_TOKENS * WIDE_TOKENS;
    float *room = (float *)step->cuda->workspace;
    *facts = {room, room + (int64_t)s.heads * tokens, (int32_t *)(room + 2 * (int64_t)s.heads * tokens), tokens};
    return cuda_start(step, facts_kernel, cuda_blocks((int64_t)tokens * s.heads, WARPS), WARPS * CUDA_WARP, 0,
                      step->table, *facts, s, (const float *)a->o.f, (const float *)a->d_o.f, (const float *)a->lse.f);
}

kern_status cuda_attention_wide_backward(const cuda_step *step, const kern_attention_backward_args *a) {
    const kern_attention &s = a->attention;
    wide_attention job = {};
    job.shape = s;
    job.dq = a->dq.f;
    job.dk = a->dk.f;
    job.dv = a->dv.f;
    kern_status status = cuda_attention_pack(step, a->q.f, a->k.f, a->v.f, a->d_o.f, &job);
    if (!status)
        status = gather_facts(step, a, &job.facts);
    if (status)
        return status;
    return s.head_width == 64 ? launch<64>(step, job) : launch<128>(step, job);
}

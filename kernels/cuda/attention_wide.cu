// SPDX-License-Identifier: Apache-2.0
// The forward of attention_wide.cuh (Dao et al. 2022, FlashAttention): a warpgroup has its queries, running maxima,
// sums and outputs in registers, scores of a tile of keys become probabilities there and are the left operand of the
// product with the values. Exponentials are powers of two.
#include "kernels/cuda/attention_wide.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Of a thread's two rows.
struct running {
    float top[2], sum[2]; // sum: over the keys of this thread
};

// Of keys that a row does not see: minus infinity. Most tiles are seen whole.
static __device__ __forceinline__ void mask(const kern_attention &s, const int32_t (&query)[2],
                                            const int32_t (&start)[2], int32_t key0, float (&score)[WIDE_SCORES]) {
    bool whole = true;
#pragma unroll
    for (int half = 0; half < 2; half++)
        whole = whole && wide_sees(s, query[half], start[half], key0) && key0 + WIDE_TOKENS - 1 <= query[half];
    if (__all_sync(0xffffffffu, whole))
        return;
#pragma unroll
    for (int i = 0; i < WIDE_SCORES; i++)
        if (!wide_sees(s, query[i / 2 % 2], start[i / 2 % 2], key0 + wide_column(i / 4) + i % 2))
            score[i] = -INFINITY;
}

template <int N>
static __device__ __forceinline__ void to_probabilities(float scale, running &run, float (&score)[WIDE_SCORES],
                                                        float (&o)[N]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int j = 0; j < WIDE_SCORES / 4; j++)
            top = fmaxf(top, fmaxf(score[4 * j + 2 * half] * scale, score[4 * j + 2 * half + 1] * scale));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(top, run.top[half]);
        const float base = top > -INFINITY ? top : 0.0f, kept = exp2f(run.top[half] - base);
#pragma unroll
        for (int j = 0; j < WIDE_SCORES / 4; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = score[4 * j + 2 * half + e];
                x = exp2f(fmaf(x, scale, -base));
                sum += x;
            }
        run.top[half] = top;
        run.sum[half] = fmaf(run.sum[half], kept, sum);
#pragma unroll
        for (int j = 0; j < N / 4; j++) {
            o[4 * j + 2 * half] *= kept;
            o[4 * j + 2 * half + 1] *= kept;
        }
    }
}

template <int WIDTH>
static __device__ __forceinline__ void attend(const cuda_table *table, const wide_attention &job, const char *own,
                                              wide_range block, int32_t query0, int32_t head,
                                              wide_ring<2 * wide_bytes<WIDTH>> &ring) {
    const kern_attention &s = job.shape;
    const float scale = s.scale * wide_log2e;
    const wide_range seen = wide_keys_seen(table, s, query0);
    const int32_t tokens = table->n_tokens;
    int32_t query[2], start[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        query[half] = query0 + wide_row(half);
        start[half] = query[half] < tokens ? table->token_start[query[half]] : INT32_MAX;
    }
    running run = {{-INFINITY, -INFINITY}, {0, 0}};
    float o[WIDTH / 2] = {};
    for (int32_t tile = block.first; tile < block.end; tile++, ring.turn++) {
        ring.await();
        if (tile >= seen.first && tile < seen.end) {
            // Anew for every tile: the compiler has been seen to give registers of a left operand that outlives its
            // products to the next one.
            uint4 q[WIDTH / 16];
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++)
                q[k] = wide_left(own, k);
            float score[WIDE_SCORES];
            wide_clear(score);
            const cuda_wgmma_operand keys = wide_tokens(ring.slot());
            cuda_wgmma_begin();
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++)
                cuda_wgmma(score, q[k], keys.at(k * WIDE_STEP_TOKENS));
            cuda_wgmma_commit();
            wide_done(score);
            mask(s, query, start, tile * WIDE_TOKENS, score);
            to_probabilities(scale, run, score, o);
            wide_gather(score, ring.slot() + wide_bytes<WIDTH>, o);
        }
        ring.release();
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = run.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[half] = 1.0f / sum;
        if (job.lse && query[half] < tokens && threadIdx.x % 4 == 0)
            job.lse[(int64_t)query[half] * s.heads + head] = (run.top[half] + log2f(sum)) * wide_ln2;
    }
    wide_write(job.o, s.heads, head, query0, tokens, inverse[0], inverse[1], o);
}

#endif

template <int WIDTH> static constexpr size_t shared_bytes(void) {
    return (WIDE_GROUPS + 2 * WIDE_SLOTS) * (size_t)(WIDTH * WIDE_TOKENS * 2) + (1 + 2 * WIDE_SLOTS) * sizeof(uint64_t);
}

// Grid: blocks of queries, heads.
template <int WIDTH>
static __global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_kernel(const cuda_table *table, const __grid_constant__ wide_attention job) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    constexpr int BYTES = wide_bytes<WIDTH>;
    cuda_begin();
    char *slots = memory + WIDE_GROUPS * BYTES;
    cuda_mbarrier *barriers = (cuda_mbarrier *)(slots + WIDE_SLOTS * 2 * BYTES), *own = barriers + 2 * WIDE_SLOTS;
    wide_ring<2 * BYTES> ring(slots, barriers);
    if (threadIdx.x == 0) {
        ring.make();
        cuda_mbarrier_make(own, 1);
        cuda_mbarrier_made();
    }
    __syncthreads();
    cuda_await();
    const int32_t head = (int32_t)blockIdx.y, kv_head = head / (job.shape.heads / job.shape.kv_heads);
    const int32_t query0 = (int32_t)blockIdx.x * WIDE_GROUPS * WIDE_TOKENS, group = (int32_t)threadIdx.x / WIDE_GROUP;
    const wide_range block = wide_keys_of_block(table, job.shape, query0);
    if (group < WIDE_GROUPS) {
        cuda_mbarrier_wait(own, 0);
        attend<WIDTH>(table, job, memory + group * BYTES, block, query0 + group * WIDE_TOKENS, head, ring);
    } else if (threadIdx.x == WIDE_GROUPS * WIDE_GROUP) {
        const int32_t tile0 = query0 / WIDE_TOKENS, last = (table->n_tokens - 1) / WIDE_TOKENS;
        cuda_mbarrier_expect(own, WIDE_GROUPS * BYTES);
        cuda_mbarrier_arrive(own);
        for (int g = 0; g < WIDE_GROUPS; g++)
            cuda_bulk_load(memory + g * BYTES, wide_tile<WIDTH>(job.q, min(tile0 + g, last), head), BYTES, own);
        wide_fill_keys<WIDTH>(job, block, kv_head, ring);
    }
#endif
}

// ----------------------------------------------------------------------------------------------------------- packing

enum { PACK_THREADS = 256, HALF = WIDE_TOKENS / 2 };

struct pack_job {
    cuda_operand from;
    int32_t tokens, across; // across: tiles of a row of them
    bool wide;
    char *to;
};

// A block of threads owns a tile: a warp 8 tokens of it, read as whole lines, a lane two pieces of 8 columns; 8 lanes
// write a core matrix.
static __global__ void __launch_bounds__(PACK_THREADS) pack_kernel(const pack_job job) {
    cuda_begin();
    cuda_await();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t token = (int32_t)blockIdx.x / job.across * WIDE_TOKENS + warp * 8 + lane % 8;
    const int32_t column = (int32_t)blockIdx.x % job.across * WIDE_TOKENS + lane / 8 * 8;
    char *to = job.to + (int64_t)blockIdx.x * WIDE_TILE + lane / 8 * WIDE_RIGHT + warp * WIDE_DOWN + lane % 8 * 16;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[8];
        cuda_operand_eight(job.from, token, column + half * HALF, token < job.tokens ? 8 : 0, job.wide, x);
        *(uint4 *)(to + half * (HALF / 8 * WIDE_RIGHT)) = cuda_round_eight(x);
    }
}

// --------------------------------------------------------------------------------------------------------- launchers

static int64_t tiles_of(int64_t elements) {
    return (elements + WIDE_TOKENS - 1) / WIDE_TOKENS;
}

bool cuda_attention_is_wide(const cuda_step *step, const kern_attention *s) {
    const int64_t columns = (int64_t)s->heads * s->head_width;
    return step->cuda->fast && step->cuda->overlaps && step->merge && (s->head_width == 64 || s->head_width == 128) &&
           tiles_of(step->tokens) * tiles_of(columns) * WIDE_TILE <= WIDE_MOST &&
           ((int64_t)step->tokens + WIDE_TOKENS) * (2 * s->heads + 1) <= CUDA_GEMM_PARTIALS;
}

static kern_status pack(const cuda_step *step, const float *x, int32_t heads, int32_t width, int place,
                        wide_heads *out) {
    char *room = step->cuda->workspace + sizeof(float) * CUDA_GEMM_PARTIALS;
    const int64_t columns = (int64_t)heads * width, across = tiles_of(columns);
    const cuda_operand from = {x, columns, false, false};
    const pack_job job = {from, step->tokens, (int32_t)across, cuda_operand_is_wide(from),
                          room + (int64_t)place * WIDE_MOST};
    *out = {job.to, across * WIDE_TILE};
    return cuda_start(step, pack_kernel, cuda_blocks(tiles_of(step->tokens) * across, 1), PACK_THREADS, 0, job);
}

kern_status cuda_attention_pack(const cuda_step *step, const float *q, const float *k, const float *v, const float *d_o,
                                wide_attention *job) {
    const kern_attention &s = job->shape;
    kern_status status = pack(step, q, s.heads, s.head_width, 0, &job->q);
    if (!status)
        status = pack(step, k, s.kv_heads, s.head_width, 1, &job->k);
    if (!status)
        status = pack(step, v, s.kv_heads, s.head_width, 2, &job->v);
    return status || !d_o ? status : pack(step, d_o, s.heads, s.head_width, 3, &job->d_o);
}

template <int WIDTH> static kern_status launch(const cuda_step *step, const wide_attention &job) {
    const dim3 grid((unsigned)cuda_blocks(step->tokens, WIDE_GROUPS * WIDE_TOKENS), (unsigned)job.shape.heads);
    const kern_status status = cuda_allow_shared(wide_kernel<WIDTH>, shared_bytes<WIDTH>());
    return status ? status
                  : cuda_start(step, wide_kernel<WIDTH>, grid, WIDE_THREADS, shared_bytes<WIDTH>(), step->table, job);
}

kern_status cuda_attention_wide(const cuda_step *step, const kern_attention_args *a) {
    const kern_attention &s = a->attention;
    wide_attention job = {};
    job.shape = s;
    job.o = a->o.f;
    job.lse = a->lse.f;
    const kern_status status = cuda_attention_pack(step, a->q.f, a->k.f, a->v.f, NULL, &job);
    if (status)
        return status;
    return s.head_width == 64 ? launch<64>(step, job) : launch<128>(step, job);
}

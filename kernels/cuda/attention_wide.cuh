// SPDX-License-Identifier: Apache-2.0
// Attention of training on a `fast` device, by Hopper's warpgroups (sm_90a), of heads 64 or 128 wide.
//
// q, k, v and do are packed as bf16 before: tiles of 64 tokens x 64 columns, made of core matrices of 8 x 8 (128 bytes
// each) ordered by column, then token, so that 64 tokens of a head are a run of memory, as the tensor cores read it. A
// block owns 64 tokens for each of two warpgroups; a warp fills a ring with tiles of the tokens that these meet, 64 at
// a time, by the copy engine. Tiles are of tokens of the batch: what a query sees follows from where its document
// starts and from the window. Every output is summed by one warpgroup in one order.
#ifndef KERNELS_CUDA_ATTENTION_WIDE_CUH
#define KERNELS_CUDA_ATTENTION_WIDE_CUH

#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    WIDE_TOKENS = 64,                          // of a tile, and its columns
    WIDE_TILE = WIDE_TOKENS * WIDE_TOKENS * 2, // bytes
    WIDE_MOST = 96 << 20,                      // bytes that packed q, k, v and do have each
    WIDE_GROUPS = 2,
    WIDE_GROUP = 128, // threads
    WIDE_THREADS = WIDE_GROUPS * WIDE_GROUP + 32,
    WIDE_SLOTS = 3,
    WIDE_SCORES = WIDE_TOKENS / 2, // that a thread has of 64 x 64
    WIDE_DOWN = 128,               // from a core matrix to that of the next 8 tokens, columns
    WIDE_RIGHT = 8 * WIDE_DOWN,
};
static constexpr float wide_log2e = 1.44269504089f, wide_ln2 = 0.69314718056f;

// Packed vectors of heads, by tiles of tokens.
struct wide_heads {
    const char *tiles;
    int64_t next; // bytes from a tile to the next
};

// Of queries, by head: lse (to base 2), do . o; and where a token's document starts, past the batch INT32_MAX.
struct wide_facts {
    float *lse, *along; // (heads, tokens)
    int32_t *start;     // (tokens)
    int32_t tokens;     // rounded up to tiles
};

struct wide_attention {
    wide_heads q, k, v, d_o;
    wide_facts facts; // of the backward
    kern_attention shape;
    float *o, *lse, *dq, *dk, *dv;
};

// Tiles [first, end).
struct wide_range {
    int32_t first, end;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int WIDTH> static constexpr int wide_bytes = WIDTH *WIDE_TOKENS * 2; // of a tile of a head

template <int WIDTH>
static __device__ __forceinline__ const char *wide_tile(const wide_heads &x, int32_t tile, int32_t head) {
    return x.tiles + tile * x.next + head * wide_bytes<WIDTH>;
}

// Slots of BYTES; `arrivals` of whoever reads.
template <int BYTES> struct wide_ring {
    char *memory;
    cuda_mbarrier *full, *empty;
    int turn;

    __device__ __forceinline__ wide_ring(char *slots, cuda_mbarrier *barriers)
        : memory(slots), full(barriers), empty(barriers + WIDE_SLOTS), turn(0) {}
    // By one thread, then to be made known.
    __device__ __forceinline__ void make(void) const {
        for (int i = 0; i < WIDE_SLOTS; i++) {
            cuda_mbarrier_make(&full[i], 1);
            cuda_mbarrier_make(&empty[i], WIDE_GROUPS);
        }
    }
    __device__ __forceinline__ char *slot(void) const { return memory + turn % WIDE_SLOTS * BYTES; }
    __device__ __forceinline__ cuda_mbarrier *begin_fill(void) const {
        cuda_mbarrier_wait(&empty[turn % WIDE_SLOTS], (uint32_t)(turn / WIDE_SLOTS % 2) ^ 1);
        cuda_mbarrier_expect(&full[turn % WIDE_SLOTS], BYTES);
        cuda_mbarrier_arrive(&full[turn % WIDE_SLOTS]);
        return &full[turn % WIDE_SLOTS];
    }
    __device__ __forceinline__ void await(void) const {
        cuda_mbarrier_wait(&full[turn % WIDE_SLOTS], (uint32_t)(turn / WIDE_SLOTS % 2));
    }
    // By a warpgroup.
    __device__ __forceinline__ void release(void) const {
        if (threadIdx.x % WIDE_GROUP == 0)
            cuda_mbarrier_arrive(&empty[turn % WIDE_SLOTS]);
    }
};

// A tile as b: its tokens or its columns are the vectors.
static __device__ __forceinline__ cuda_wgmma_operand wide_tokens(const char *tile) {
    return cuda_wgmma_operand(tile, WIDE_DOWN, WIDE_RIGHT);
}
static __device__ __forceinline__ cuda_wgmma_operand wide_columns(const char *tile) {
    return cuda_wgmma_operand(tile, WIDE_RIGHT, WIDE_DOWN);
}
enum { WIDE_STEP_TOKENS = 2 * WIDE_RIGHT, WIDE_STEP_COLUMNS = 2 * WIDE_DOWN }; // of 16 k

// 16 columns of the warp's 16 tokens of a tile as a.
static __device__ __forceinline__ uint4 wide_left(const char *tile, int k16) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
    uint32_t x[4];
    mma_load(tile + (2 * k16 + matrix / 2) * WIDE_RIGHT + (2 * warp + matrix % 2) * WIDE_DOWN + lane % 8 * 16, x);
    return make_uint4(x[0], x[1], x[2], x[3]);
}

// Scores of 16 columns as a.
static __device__ __forceinline__ uint4 wide_left(const float (&s)[WIDE_SCORES], int k16) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 rounded = __floats2bfloat162_rn(s[8 * k16 + 2 * i], s[8 * k16 + 2 * i + 1]);
        pair[i] = *(const uint32_t *)&rounded;
    }
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

template <int N> static __device__ __forceinline__ void wide_done(float (&x)[N]) {
    cuda_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N; i++)
        cuda_wgmma_hold(x[i]);
}

// Zeros that the tensor cores add to from here on.
template <int N> static __device__ __forceinline__ void wide_clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = 0;
        cuda_wgmma_hold(x[i]);
    }
}

// total (64 own, WIDTH) += s (64 own, 64) of a tile.
template <int N>
static __device__ __forceinline__ void wide_gather(const float (&s)[WIDE_SCORES], const char *tile, float (&total)[N]) {
    uint4 left[WIDE_TOKENS / 16];
#pragma unroll
    for (int k = 0; k < WIDE_TOKENS / 16; k++) {
        left[k] = wide_left(s, k);
        cuda_wgmma_hold(left[k]);
    }
    const cuda_wgmma_operand right = wide_columns(tile);
    cuda_wgmma_begin();
#pragma unroll
    for (int k = 0; k < WIDE_TOKENS / 16; k++)
        cuda_wgmma<true>(total, left[k], right.at(k * WIDE_STEP_COLUMNS));
    cuda_wgmma_commit();
    wide_done(total);
}

// The tiles of keys that queries [query0, query0 + 64) see.
static __device__ __forceinline__ wide_range wide_keys_seen(const cuda_table *table, const kern_attention &s,
                                                            int32_t query0) {
    if (query0 >= table->n_tokens)
        return {0, 0};
    int32_t first = table->token_start[query0];
    if (s.window > 0 && query0 - s.window + 1 > first)
        first = query0 - s.window + 1;
    return {first / WIDE_TOKENS, query0 / WIDE_TOKENS + 1};
}

// Those that the queries of all warpgroups of a block see.
static __device__ __forceinline__ wide_range wide_keys_of_block(const cuda_table *table, const kern_attention &s,
                                                                int32_t query0) {
    wide_range block = wide_keys_seen(table, s, query0);
    for (int g = 1; g < WIDE_GROUPS && query0 + g * WIDE_TOKENS < table->n_tokens; g++)
        block.end++;
    return block;
}

// Tiles of keys and their values, by one thread.
template <int WIDTH>
static __device__ __forceinline__ void wide_fill_keys(const wide_attention &job, wide_range block, int32_t kv_head,
                                                      wide_ring<2 * wide_bytes<WIDTH>> &ring) {
    for (int32_t tile = block.first; tile < block.end; tile++, ring.turn++) {
        cuda_mbarrier *full = ring.begin_fill();
        cuda_bulk_load(ring.slot(), wide_tile<WIDTH>(job.k, tile, kv_head), wide_bytes<WIDTH>, full);
        cuda_bulk_load(ring.slot() + wide_bytes<WIDTH>, wide_tile<WIDTH>(job.v, tile, kv_head), wide_bytes<WIDTH>,
                       full);
    }
}

static __device__ __forceinline__ bool wide_sees(const kern_attention &s, int32_t query, int32_t start, int32_t key) {
    return key <= query && key >= start && (s.window == 0 || query - key < s.window);
}

// Row `half` of a thread: of the warpgroup's 64.
static __device__ __forceinline__ int32_t wide_row(int half) {
    return (int32_t)threadIdx.x / 32 % 4 * 16 + half * 8 + (int32_t)threadIdx.x % 32 / 4;
}
// The first of the two neighbouring columns of group j.
static __device__ __forceinline__ int32_t wide_column(int j) {
    return j * 8 + (int32_t)threadIdx.x % 4 * 2;
}

template <int N>
static __device__ __forceinline__ void wide_write(float *to, int32_t heads, int32_t head, int32_t token0,
                                                  int32_t tokens, float scale0, float scale1, const float (&x)[N]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int32_t t = token0 + wide_row(half);
        const float scale = half ? scale1 : scale0;
        float *row = to + ((int64_t)t * heads + head) * (2 * N);
        if (t < tokens)
#pragma unroll
            for (int j = 0; j < N / 4; j++)
                *(float2 *)(row + wide_column(j)) =
                    make_float2(x[4 * j + 2 * half] * scale, x[4 * j + 2 * half + 1] * scale);
    }
}

#endif

// Whether a shape is taken, of so many tokens; and the launches.
bool cuda_attention_is_wide(const cuda_step *step, const kern_attention *shape);
kern_status cuda_attention_wide(const cuda_step *step, const kern_attention_args *a);
kern_status cuda_attention_wide_backward(const cuda_step *step, const kern_attention_backward_args *a);
// Packs q, k, v and do, of heads as job->shape says; d_o: NULL in the forward.
kern_status cuda_attention_pack(const cuda_step *step, const float *q, const float *k, const float *v, const float *d_o,
                                wide_attention *job);

#endif

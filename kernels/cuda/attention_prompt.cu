// SPDX-License-Identifier: Apache-2.0
// attention of prompt rows on the tensor cores, heads up to 128 wide (Dao et al. 2022, FlashAttention): what
// attention.cu does query by query for generated tokens.
//
// A block has 128 consecutive prompt tokens of one head, a warp 16 of them: its queries, running maxima, sums and
// outputs stay in registers. Keys are visited in tiles of 64 positions of the document, in their order, all warps the
// same tile. A row of a product depends on its own row of the left operand alone, and keys that a query does not see
// add zeros: so a token's bits depend on its own query and keys, neither on the tokens beside it nor on where a prompt
// was cut. Numbers are those of split.cuh; what a row of V lost as its power of two the softmax's p takes on.
//
// A tile comes by asynchronous copies while the one before is multiplied. A thread copies to places of its own and
// makes operands of them itself, so nothing waits for the copies of others.
#include <cuda_pipeline_primitives.h>
#include <math.h>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/chunk.cuh"

constexpr int QUERIES = 128, QUERY_THREADS = QUERIES / SPLIT_TILE * CUDA_WARP;
constexpr int KEYS = 64, KEY_TILES = KEYS / SPLIT_TILE, KEY_THREADS = QUERY_THREADS / KEYS;
constexpr int WIDTH_LEAST = 64, WIDTH_MOST = 128;

template <int D> constexpr int QUADS = D / 4 / KEY_THREADS; // of a thread's share of a key

template <int D> struct alignas(16) tile_memory {
    split_tile<2> k[KEY_TILES][D / SPLIT_TILE], v[KEY_TILES][D / SPLIT_TILE];
    float4 came[2][QUADS<D>][QUERY_THREADS]; // of k, then v
    float k_inverse[KEYS], v_inverse[KEYS];
};

// 16 queries of a head, a lane's rows of them.
template <int D> struct query_strip {
    split_left<2> q[D / SPLIT_TILE];
    float q_inverse[2];
    split_block o[D / SPLIT_TILE];
    float largest[2], sum[2]; // sum: over the keys of this lane
    int32_t token[2];         // batch index; -1: none
};

// ------------------------------------------------------------------------------------------------------------ queries

template <int D>
static __device__ __forceinline__ query_strip<D> begin_strip(const attention_call &c, int32_t head, int32_t token0,
                                                             int32_t tokens, int32_t lane) {
    const kern_attention &s = c.shape;
    query_strip<D> strip = {};
    split_block x[D / SPLIT_TILE];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t row = split_row(lane, 2 * r);
        strip.token[r] = row < tokens ? token0 + row : -1;
        strip.largest[r] = -INFINITY;
        const float *q = c.q + ((int64_t)(token0 + row) * s.heads + head) * s.head_width;
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int32_t column = n * SPLIT_TILE + split_column(lane, half, e);
                    x[n].v[half][2 * r + e] = row < tokens && column < s.head_width ? q[column] * s.scale : 0;
                }
    }
    split_powers powers;
    split_strip(x, powers, strip.q);
    strip.q_inverse[0] = powers.row[0].inverse;
    strip.q_inverse[1] = powers.row[1].inverse;
    return strip;
}

template <int D>
static __device__ __forceinline__ void finish_strip(const attention_call &c, int32_t head, int32_t lane,
                                                    const query_strip<D> &strip) {
    const kern_attention &s = c.shape;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = strip.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (strip.token[r] < 0)
            continue;
        const int64_t at = (int64_t)strip.token[r] * s.heads + head;
        if (c.lse && lane % 4 == 0)
            c.lse[at] = strip.largest[r] + logf(sum);
#pragma unroll
        for (int n = 0; n < D / SPLIT_TILE; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int32_t column = n * SPLIT_TILE + split_column(lane, half, e);
                    if (column < s.head_width)
                        c.o[at * s.head_width + column] = strip.o[n].v[half][2 * r + e] / sum;
                }
    }
}

// --------------------------------------------------------------------------------------------------------------- keys

// What queries of one document see of it: positions [oldest, newest].
struct view {
    document d;
    int64_t oldest, newest;
};

// Asks for this thread's share of a tile; what does not exist becomes zeros.
template <int D>
static __device__ __forceinline__ void bring_tile(const cuda_table *table, const attention_call &c, const view &seen,
                                                  int32_t kv_head, int64_t tile, tile_memory<D> &memory) {
    const int32_t key = threadIdx.x / KEY_THREADS, part = threadIdx.x % KEY_THREADS, width = c.shape.head_width;
    const int64_t position = tile * KEYS + key;
    const bool exists = position >= seen.oldest && position <= seen.newest;
    const float *from[2] = {c.k, c.v};
    if (exists && position < seen.d.start) {
        const key_value kept = kept_at(table, c, seen.d.row, kv_head, position);
        from[0] = kept.k;
        from[1] = kept.v;
    } else if (exists) {
        const int64_t token = seen.d.start_token + (position - seen.d.start);
        from[0] += (token * c.shape.kv_heads + kv_head) * width;
        from[1] += (token * c.shape.kv_heads + kv_head) * width;
    }
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const bool wide = width % 4 == 0 && (uintptr_t)from[which] % sizeof(float4) == 0;
#pragma unroll
        for (int n = 0; n < QUADS<D>; n++) {
            const int32_t column = (n / 2 * KEY_THREADS + part) * 8 + n % 2 * 4, left = exists ? width - column : 0;
            float4 *to = &memory.came[which][n][threadIdx.x];
            if (wide) {
                __pipeline_memcpy_async(to, from[which] + (left > 0 ? column : 0), sizeof *to,
                                        left > 0 ? 0 : sizeof *to);
            } else {
                const cuda_quad x = cuda_load(from[which] + column, left, false);
                *to = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
            }
        }
    }
    __pipeline_commit();
}

// What this thread asked for as operand.
template <int D> static __device__ __forceinline__ void put_tile(tile_memory<D> &memory) {
    const int32_t key = threadIdx.x / KEY_THREADS, part = threadIdx.x % KEY_THREADS;
    __pipeline_wait_prior(0);
    const auto share = [&](int which) {
        return [&memory, which](int32_t column) {
            const float4 x = memory.came[which][column / 8 / KEY_THREADS * 2 + column / 4 % 2][threadIdx.x];
            return cuda_quad{{x.x, x.y, x.z, x.w}};
        };
    };
    const float k_inverse = chunk_put_row<D, KEY_THREADS>(memory.k[key / SPLIT_TILE], key % SPLIT_TILE, part, share(0));
    const float v_inverse = chunk_put_row<D, KEY_THREADS>(memory.v[key / SPLIT_TILE], key % SPLIT_TILE, part, share(1));
    if (part == 0) {
        memory.k_inverse[key] = k_inverse;
        memory.v_inverse[key] = v_inverse;
    }
}

// ------------------------------------------------------------------------------------------------ the running softmax

// The keys of a tile that a lane's rows see: [low, high]; none of them where high < low.
struct seen_keys {
    int32_t low[2], high[2];
};

static __device__ __forceinline__ seen_keys keys_seen(const cuda_table *table, const attention_call &c,
                                                      const view &seen, const int32_t (&token)[2], int32_t begin,
                                                      int32_t end, int64_t tile) {
    seen_keys keys;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        keys.low[r] = 0;
        keys.high[r] = -1;
        if (token[r] < begin || token[r] >= end)
            continue;
        const int64_t own = table->token_position[token[r]], window = c.shape.window;
        const int64_t first = window > 0 ? max(own - window + 1, seen.d.first) : seen.d.first;
        keys.low[r] = (int32_t)min(max(first - tile * KEYS, (int64_t)0), (int64_t)KEYS);
        keys.high[r] = (int32_t)max(min(own - tile * KEYS, (int64_t)KEYS - 1), (int64_t)-1);
    }
    return keys;
}

// Scores of the tile; -INFINITY where a key is not seen. Tiles of keys behind `last` are seen by none.
template <int D>
static __device__ __forceinline__ void score_tile(const tile_memory<D> &memory, const query_strip<D> &strip,
                                                  const seen_keys &keys, int32_t last, int32_t lane,
                                                  split_block (&score)[KEY_TILES]) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++) {
        split_sum<2> sum = {};
        if (n <= last)
            sum = split_multiply_rows(strip.q, memory.k[n], lane);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t column = n * SPLIT_TILE + split_column(lane, half, i);
                const bool is_seen = column >= keys.low[i / 2] && column <= keys.high[i / 2];
                score[n].v[half][i] =
                    is_seen ? split_total(sum, half, i) * strip.q_inverse[i / 2] * memory.k_inverse[column] : -INFINITY;
            }
    }
}

// Scores become p times the powers of the values; the strip's maxima and sums move on. factor: of what was summed.
template <int D>
static __device__ __forceinline__ void weigh_tile(const tile_memory<D> &memory, int32_t lane, query_strip<D> &strip,
                                                  split_block (&score)[KEY_TILES], float (&factor)[2]) {
    float largest[2] = {strip.largest[0], strip.largest[1]}, base[2];
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                largest[i / 2] = fmaxf(largest[i / 2], score[n].v[half][i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
        largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
        base[r] = largest[r] > -INFINITY ? largest[r] : 0;
        factor[r] = strip.largest[r] == largest[r] ? 1 : expf(strip.largest[r] - base[r]);
        strip.largest[r] = largest[r];
        strip.sum[r] *= factor[r];
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float p = expf(score[n].v[half][i] - base[i / 2]);
                strip.sum[i / 2] += p;
                score[n].v[half][i] = p * memory.v_inverse[n * SPLIT_TILE + split_column(lane, half, i)];
            }
}

template <int D>
static __device__ __forceinline__ void visit_tile(const tile_memory<D> &memory, const seen_keys &keys, int32_t lane,
                                                  query_strip<D> &strip) {
    const int32_t last = cuda_warp_most(max(keys.high[0], keys.high[1])) / SPLIT_TILE;
    split_block p[KEY_TILES];
    split_left<2> left[KEY_TILES];
    split_powers powers;
    float factor[2];
    score_tile(memory, strip, keys, last, lane, p);
    weigh_tile(memory, lane, strip, p, factor);
    split_strip(p, powers, left);
#pragma unroll
    for (int n = 0; n < D / SPLIT_TILE; n++) {
        split_sum<2> sum = {};
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; tile++)
            if (tile <= last)
                split_multiply(sum, left[tile], split_load_turned(memory.v[tile][n], lane));
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                strip.o[n].v[half][i] =
                    fmaf(split_total(sum, half, i), powers.row[i / 2].inverse, strip.o[n].v[half][i] * factor[i / 2]);
    }
}

// ---------------------------------------------------------------------------------------------------------- the block

// The block's tokens [begin, end), which are of one document, against what they see of it.
template <int D>
static __device__ __forceinline__ void visit_document(const cuda_table *table, const attention_call &c, int32_t head,
                                                      int32_t begin, int32_t end, int32_t lane, tile_memory<D> &memory,
                                                      query_strip<D> &strip) {
    const int32_t kv_head = head / (c.shape.heads / c.shape.kv_heads), window = c.shape.window;
    view seen;
    seen.d = document_of(table, c, begin);
    seen.newest = table->token_position[end - 1];
    seen.oldest = window > 0 ? max(table->token_position[begin] - window + 1, seen.d.first) : seen.d.first;
    int64_t tile = seen.oldest / KEYS;
    bring_tile(table, c, seen, kv_head, tile, memory);
    for (; tile * KEYS <= seen.newest; tile++) {
        __syncthreads(); // the tile before has been read
        put_tile(memory);
        if ((tile + 1) * KEYS <= seen.newest)
            bring_tile(table, c, seen, kv_head, tile + 1, memory);
        __syncthreads();
        const seen_keys keys = keys_seen(table, c, seen, strip.token, begin, end, tile);
        if (__any_sync(~0u, keys.low[0] <= keys.high[0] || keys.low[1] <= keys.high[1]))
            visit_tile(memory, keys, lane, strip);
    }
}

template <int D>
static __global__ void __launch_bounds__(QUERY_THREADS, D == WIDTH_LEAST ? 2 : 1)
    prompt_kernel(const cuda_table *table, const attention_call c) {
    cuda_begin();
    cuda_await();
    extern __shared__ __align__(16) char memory[];
    tile_memory<D> &tile = *(tile_memory<D> *)memory;
    const int32_t lane = threadIdx.x % CUDA_WARP, head = (int32_t)blockIdx.x % c.shape.heads;
    // the last pieces see the most keys: they go first
    const int32_t token0 = c.first_token + (c.pieces - 1 - (int32_t)blockIdx.x / c.shape.heads) * QUERIES;
    const int32_t stop = min(token0 + QUERIES, c.last_token), own = token0 + threadIdx.x / CUDA_WARP * SPLIT_TILE;
    query_strip<D> strip = begin_strip<D>(c, head, own, stop - own, lane);
    for (int32_t begin = token0, end; begin < stop; begin = end) {
        const int32_t start = table->token_start[begin];
        for (end = begin + 1; end < stop && table->token_start[end] == start;)
            end++;
        visit_document<D>(table, c, head, begin, end, lane, tile, strip);
    }
    finish_strip(c, head, lane, strip);
}

bool cuda_attention_has_prompts(const kern_cuda *cuda, const kern_attention *shape) {
    return shape->head_width <= WIDTH_MOST && cuda->shared_limit >= sizeof(tile_memory<WIDTH_MOST>);
}

kern_status cuda_attention_prompts(const cuda_step *step, attention_call c) {
    const bool narrow = c.shape.head_width <= WIDTH_LEAST;
    const size_t bytes = narrow ? sizeof(tile_memory<WIDTH_LEAST>) : sizeof(tile_memory<WIDTH_MOST>);
    const auto kernel = narrow ? prompt_kernel<WIDTH_LEAST> : prompt_kernel<WIDTH_MOST>;
    c.first_token = step->generated_tokens;
    c.last_token = step->tokens;
    c.pieces = cuda_blocks(c.last_token - c.first_token, QUERIES);
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status : cuda_start(step, kernel, c.pieces * c.shape.heads, QUERY_THREADS, bytes, step->table, c);
}

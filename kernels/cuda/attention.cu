// SPDX-License-Identifier: Apache-2.0
// attention: o_t = sum_j softmax_j(scale q_t . k_j) v_j over the keys j of the token's document up to itself, at most
// `window` of them; models.md 9. Heads up to 256 wide.
//
// Keys are visited in tiles of 32 positions of the document with a running maximum m, sum l and output o, as on the
// CPU. Tile i belongs to warp i % 8 of a block; the warps' m, l and o are merged in the order of the warps at the end
// of a span of 1024 positions, and spans in their order. A query skips a tile of which it sees nothing. So a token's
// bits depend on its own query and keys alone: neither on the tokens computed beside it nor on where a prompt was cut,
// nor on who had which span: where generated tokens are few, several blocks share the spans of each and finish_kernel
// merges what they left in the workspace.
//
// A block owns some queries of one kv head: consecutive (token, head of the group) pairs, which mostly share keys, so
// that all but the first find them in the first-level cache. In a tile a lane owns channels lane, lane + 32 ..: loads
// are coalesced at any width and distance, and a transposing sum leaves the scores of some keys in as many lanes. The
// tile after this one is on its way to the second-level cache.
//
// Prompt rows go to attention_prompt.cu where it has their shape. A last launch keeps the new keys in the row's pages
// or ring, since a ring's new entries overwrite old ones that the others still read.
#include <math.h>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/attention_tile.cuh"

enum {
    WARPS = 8,
    KEYS = 32,       // of a tile
    MAX_WIDTH = 256, // of a head
    MAX_QUERIES = 4, // of a block
    SPAN = 1024,     // positions
    MAX_SPLITS = 32, // blocks that share a token's spans
    BLOCKS_A_PROCESSOR = 2,
    FINISH_THREADS = 128
};

static const unsigned ALL = 0xffffffffu;
static const size_t PARTIAL_BYTES = (size_t)16 << 20;

// A tile's keys as a lane sees them: its own one, and, where all lie at equal distances, the first and the distance.
struct tile_keys {
    const float *k, *v; // of key `lane`
    const float *first_k, *first_v;
    int64_t distance;
    int32_t low; // the first key
    bool together;
};

static __device__ __forceinline__ const float *broadcast(const float *p, int lane) {
    return (const float *)(uintptr_t)__shfl_sync(ALL, (unsigned long long)(uintptr_t)p, lane);
}

// Keys [low, high] of the tile at `position`.
static __device__ tile_keys locate(const cuda_table *table, const attention_call &c, const document &d, int32_t kv_head,
                                   int64_t position, int32_t low, int32_t high) {
    const int lane = threadIdx.x % 32, own = min(max(lane, low), high);
    const int64_t at = position + own;
    tile_keys keys;
    if (at < d.start) {
        const key_value kept = kept_at(table, c, d.row, kv_head, at);
        keys.k = kept.k;
        keys.v = kept.v;
    } else {
        const int64_t token = d.start_token + (at - d.start);
        const int64_t offset = (token * c.shape.kv_heads + kv_head) * c.shape.head_width;
        keys.k = c.k + offset;
        keys.v = c.v + offset;
    }
    keys.low = low;
    keys.first_k = broadcast(keys.k, low);
    keys.first_v = broadcast(keys.v, low);
    keys.distance = broadcast(keys.k, min(low + 1, high)) - keys.first_k;
    const int64_t step = (own - low) * keys.distance;
    keys.together = __all_sync(ALL, keys.k == keys.first_k + step && keys.v == keys.first_v + step);
    return keys;
}

static __device__ __forceinline__ void prefetch(const tile_keys &keys, int32_t width) {
    for (int32_t channel = 0; channel < width; channel += 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(keys.k + channel));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(keys.v + channel));
    }
}

template <bool TOGETHER, bool VALUES>
static __device__ __forceinline__ const float *key_at(const tile_keys &keys, int32_t j) {
    if (TOGETHER)
        return (VALUES ? keys.first_v : keys.first_k) + (j - keys.low) * keys.distance;
    return broadcast(VALUES ? keys.v : keys.k, j);
}

// ------------------------------------------------------------------------------------------------ the running softmax

// A query's sums in one warp, in shared memory. Lane l owns o[l], o[l + 32] ..
struct running {
    float *max, *sum, *o;
};

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(ALL, x, distance));
    return x;
}

static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(ALL, x, distance);
    return x;
}

// Keys whose loads are in flight at once, as many as registers allow.
template <int C> constexpr int BATCH_OF = C <= 2 ? 16 : 8;

// Halves how many sums a lane has: for half = 8, 4, 2, 1 of those left, the lanes whose bit `half` is set keep the
// upper ones.
template <int HALF, int BATCH> static __device__ __forceinline__ void halve_sums(float (&part)[BATCH]) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        const float give = upper ? part[j] : part[j + HALF];
        const float keep = upper ? part[j + HALF] : part[j];
        part[j] = keep + __shfl_xor_sync(ALL, give, HALF);
    }
    if constexpr (HALF > 1)
        halve_sums<HALF / 2>(part);
}

// The sum over lanes of part[j], in the lanes l with l % BATCH = j.
template <int BATCH> static __device__ __forceinline__ float transposing_sum(float (&part)[BATCH]) {
    halve_sums<BATCH / 2>(part);
    float sum = part[0];
#pragma unroll
    for (int distance = BATCH; distance < 32; distance *= 2)
        sum += __shfl_xor_sync(ALL, sum, distance);
    return sum;
}

// Channels of the keys or values [j0, j0 + BATCH), zeros where they are not in [low, high].
template <int C, int BATCH, bool TOGETHER, bool VALUES>
static __device__ __forceinline__ void load_batch(float (&x)[BATCH][C], const tile_keys &keys, int32_t width, int j0,
                                                  int32_t low, int32_t high) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
        const float *at = key_at<TOGETHER, VALUES>(keys, j0 + j);
#pragma unroll
        for (int c = 0; c < C; c++) {
            const bool seen = j0 + j >= low && j0 + j <= high && lane + 32 * c < width;
            x[j][c] = seen ? at[lane + 32 * c] : 0.0f;
        }
    }
}

// q . k of key `lane` of the tile.
template <int C, bool TOGETHER>
static __device__ __forceinline__ float score_of(const tile_keys &keys, const float *q, int32_t width, int32_t low,
                                                 int32_t high) {
    constexpr int BATCH = BATCH_OF<C>;
    const int lane = threadIdx.x % 32;
    float score = 0.0f;
#pragma unroll 1
    for (int j0 = 0; j0 < KEYS; j0 += BATCH) {
        float x[BATCH][C], part[BATCH] = {};
        load_batch<C, BATCH, TOGETHER, false>(x, keys, width, j0, low, high);
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float q_c = q[lane + 32 * c];
#pragma unroll
            for (int j = 0; j < BATCH; j++)
                part[j] = fmaf(q_c, x[j][c], part[j]);
        }
        const float sum = transposing_sum(part);
        score = lane / BATCH * BATCH == j0 ? sum : score;
    }
    return score;
}

// One query and one tile, of which it sees the keys [low, high]. C: channels of a lane.
template <int C, bool TOGETHER>
static __device__ __forceinline__ void visit_tile(const tile_keys &keys, const float *q, const running &state,
                                                  int32_t width, int32_t low, int32_t high) {
    constexpr int BATCH = BATCH_OF<C>;
    const int lane = threadIdx.x % 32;
    const float dot = score_of<C, TOGETHER>(keys, q, width, low, high);
    const float score = lane >= low && lane <= high ? dot : -INFINITY;
    const float before = *state.max, after = fmaxf(before, warp_max(score));
    const float base = after > -INFINITY ? after : 0.0f;
    const float p = expf(score - base), factor = before == after ? 1.0f : expf(before - base);
    const float sum = *state.sum * factor + warp_sum(p);
    float o[C];
#pragma unroll
    for (int c = 0; c < C; c++)
        o[c] = state.o[lane + 32 * c] * factor;
#pragma unroll 1
    for (int j0 = 0; j0 < KEYS; j0 += BATCH) {
        float x[BATCH][C];
        load_batch<C, BATCH, TOGETHER, true>(x, keys, width, j0, low, high);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const float p_j = __shfl_sync(ALL, p, j0 + j);
#pragma unroll
            for (int c = 0; c < C; c++)
                o[c] = fmaf(p_j, x[j][c], o[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < C; c++)
        state.o[lane + 32 * c] = o[c];
    __syncwarp(); // all have read max and sum
    if (lane == 0) {
        *state.max = after;
        *state.sum = sum;
    }
    __syncwarp();
}

// ---------------------------------------------------------------------------------------------------------- the block

// Shared memory of a block: queries (MAX_QUERIES, padded width), scaled; for each warp and query its sums of a span;
// for each query those of the spans so far, of which max and sum stand twice: a span's merge reads one and writes the
// other.
struct block_memory {
    float *q, *max, *sum, *o;
    float *all_max, *all_sum, *all_o;
    int32_t padded;
};

static __host__ __device__ int32_t padded_width(int32_t width) {
    return width <= 32 ? 32 : width <= 64 ? 64 : width <= 128 ? 128 : 256;
}
static size_t shared_bytes(const attention_call &c) {
    return sizeof(float) * c.queries * ((WARPS + 2) * padded_width(c.shape.head_width) + 2 * WARPS + 4);
}

static __device__ block_memory block_memory_of(const attention_call &c, float *shared) {
    block_memory m;
    m.padded = padded_width(c.shape.head_width);
    m.q = shared;
    m.o = m.q + c.queries * m.padded;
    m.max = m.o + WARPS * c.queries * m.padded;
    m.sum = m.max + WARPS * c.queries;
    m.all_o = m.sum + WARPS * c.queries;
    m.all_max = m.all_o + c.queries * m.padded;
    m.all_sum = m.all_max + 2 * c.queries;
    return m;
}

static __device__ void begin_queries(const attention_call &c, const block_memory &m, int32_t kv_head, int32_t query0,
                                     int32_t queries) {
    const kern_attention &s = c.shape;
    const int32_t group = s.heads / s.kv_heads;
    for (int i = threadIdx.x; i < queries * m.padded; i += blockDim.x) {
        const int32_t query = query0 + i / m.padded, channel = i % m.padded;
        const int64_t head = (int64_t)(query / group) * s.heads + kv_head * group + query % group;
        m.q[i] = channel < s.head_width ? c.q[head * s.head_width + channel] * s.scale : 0.0f;
    }
    for (int i = threadIdx.x; i < queries * m.padded; i += blockDim.x)
        m.all_o[i] = 0.0f;
    for (int i = threadIdx.x; i < queries; i += blockDim.x) {
        m.all_max[i] = -INFINITY;
        m.all_sum[i] = 0.0f;
    }
}

// This warp's sums of the queries [begin, end), before a span.
static __device__ void begin_span(const attention_call &c, const block_memory &m, int32_t begin, int32_t end) {
    const int32_t lane = threadIdx.x % 32, place = (int32_t)threadIdx.x / 32 * c.queries;
    for (int32_t i = (place + begin) * m.padded + lane; i < (place + end) * m.padded; i += 32)
        m.o[i] = 0.0f;
    for (int32_t i = begin + lane; i < end; i += 32) {
        m.max[place + i] = -INFINITY;
        m.sum[place + i] = 0.0f;
    }
    __syncwarp();
}

// What some queries, tokens of one document, see of it: positions [oldest, newest].
struct view {
    document d;
    int64_t oldest, newest;
};

static __device__ tile_keys keys_of_tile(const cuda_table *table, const attention_call &c, const view &seen,
                                         int32_t kv_head, int64_t tile) {
    const int64_t at = tile * KEYS;
    return locate(table, c, seen.d, kv_head, at, (int32_t)max(seen.oldest - at, (int64_t)0),
                  (int32_t)min(seen.newest - at, (int64_t)KEYS - 1));
}

// The block's queries [begin, end) against a tile of this warp's.
template <int C>
static __device__ void visit_queries(const cuda_table *table, const attention_call &c, const block_memory &m,
                                     const tile_keys &keys, int64_t first_key, int64_t at, int32_t query0,
                                     int32_t begin, int32_t end) {
    const int32_t group = c.shape.heads / c.shape.kv_heads, window = c.shape.window;
    for (int32_t query = begin; query < end; query++) {
        const int64_t own = table->token_position[(query0 + query) / group];
        const int64_t first = window > 0 ? max(own - window + 1, first_key) : first_key;
        const int32_t low = (int32_t)min(max(first - at, (int64_t)0), (int64_t)KEYS);
        const int32_t high = (int32_t)max(min(own - at, (int64_t)KEYS - 1), (int64_t)-1);
        if (low > high)
            continue;
        const int32_t place = (int32_t)threadIdx.x / 32 * c.queries + query;
        const running state = {m.max + place, m.sum + place, m.o + place * m.padded};
        if (keys.together)
            visit_tile<C, true>(keys, m.q + query * m.padded, state, c.shape.head_width, low, high);
        else
            visit_tile<C, false>(keys, m.q + query * m.padded, state, c.shape.head_width, low, high);
    }
}

// The block's queries [begin, end) against this warp's tiles of a span.
template <int C>
static __device__ void visit_span(const cuda_table *table, const attention_call &c, const block_memory &m,
                                  const view &seen, int32_t kv_head, int32_t query0, int32_t begin, int32_t end,
                                  int64_t span) {
    const int warp = threadIdx.x / 32;
    const int64_t newest = min(seen.newest, span * SPAN + SPAN - 1);
    int64_t tile = max(seen.oldest, span * SPAN) / KEYS;
    tile += (warp - tile % WARPS + WARPS) % WARPS;
    if (tile * KEYS <= newest)
        prefetch(keys_of_tile(table, c, seen, kv_head, tile), c.shape.head_width);
    for (; tile * KEYS <= newest; tile += WARPS) {
        if ((tile + WARPS) * KEYS <= newest)
            prefetch(keys_of_tile(table, c, seen, kv_head, tile + WARPS), c.shape.head_width);
        const tile_keys keys = keys_of_tile(table, c, seen, kv_head, tile);
        visit_queries<C>(table, c, m, keys, seen.d.first, tile * KEYS, query0, begin, end);
    }
}

static __device__ __forceinline__ int64_t head_of(const attention_call &c, int32_t kv_head, int32_t query) {
    const int32_t group = c.shape.heads / c.shape.kv_heads;
    return (int64_t)(query / group) * c.shape.heads + kv_head * group + query % group;
}

// A channel of a query's sums over some keys.
struct summed {
    float max, sum, o;
};

static __device__ __forceinline__ summed join(const summed &a, const summed &b) {
    if (b.sum == 0.0f) // saw nothing
        return a;
    const float largest = fmaxf(a.max, b.max), of_a = expf(a.max - largest), of_b = expf(b.max - largest);
    return {largest, fmaf(b.sum, of_b, a.sum * of_a), fmaf(b.o, of_b, a.o * of_a)};
}

static __device__ __forceinline__ summed sum_of_warps(const attention_call &c, const block_memory &m, int32_t query,
                                                      int32_t channel) {
    summed all = {-INFINITY, 0.0f, 0.0f};
    for (int w = 0; w < WARPS; w++)
        all.max = fmaxf(all.max, m.max[w * c.queries + query]);
    const float base = all.max > -INFINITY ? all.max : 0.0f;
    for (int w = 0; w < WARPS; w++) {
        const int32_t place = w * c.queries + query;
        const float factor = expf(m.max[place] - base);
        all.sum = fmaf(m.sum[place], factor, all.sum);
        all.o = fmaf(m.o[place * m.padded + channel], factor, all.o);
    }
    return all;
}

// The warps' sums of a span go to the workspace, or to those of the spans before. side: where those begin that are
// read.
static __device__ void end_span(const attention_call &c, const block_memory &m, int32_t kv_head, int32_t query0,
                                int32_t begin, int32_t end, int32_t partial, int32_t side) {
    const int32_t width = c.shape.head_width;
    for (int32_t i = begin * width + (int32_t)threadIdx.x; i < end * width; i += blockDim.x) {
        const int32_t query = i / width, channel = i % width, at = query * m.padded + channel;
        const summed span = sum_of_warps(c, m, query, channel);
        if (partial >= 0) {
            float *to = c.partial + (head_of(c, kv_head, query0 + query) * c.max_spans + partial) * (width + 2);
            to[2 + channel] = span.o;
            if (channel == 0) {
                to[0] = span.max;
                to[1] = span.sum;
            }
            continue;
        }
        const summed all = join({m.all_max[side + query], m.all_sum[side + query], m.all_o[at]}, span);
        m.all_o[at] = all.o;
        if (channel == 0) {
            m.all_max[c.queries - side + query] = all.max;
            m.all_sum[c.queries - side + query] = all.sum;
        }
    }
}

static __device__ __forceinline__ void tell(const attention_call &c, int64_t head, int32_t channel, const summed &all) {
    c.o[head * c.shape.head_width + channel] = all.o / all.sum;
    if (channel == 0 && c.lse)
        c.lse[head] = all.max + logf(all.sum);
}

// The spans [first, last] of a token's keys; several blocks share them if `shared`.
struct spans {
    int64_t first, last;
    bool shared;
};
static __device__ __forceinline__ spans spans_of(const attention_call &c, const view &seen) {
    spans s = {seen.oldest / SPAN, seen.newest / SPAN, false};
    s.shared = c.splits > 1 && s.first < s.last && s.last - s.first < c.max_spans;
    return s;
}

static __device__ __forceinline__ view view_of(const cuda_table *table, const attention_call &c, int32_t first_token,
                                               int32_t last_token) {
    view seen;
    seen.d = document_of(table, c, first_token);
    seen.newest = table->token_position[last_token];
    seen.oldest =
        c.shape.window > 0 ? max(table->token_position[first_token] - c.shape.window + 1, seen.d.first) : seen.d.first;
    return seen;
}

// The block's queries [begin, end), which are tokens of one document, against it; the spans of this block.
template <int C>
static __device__ void visit_document(const cuda_table *table, const attention_call &c, const block_memory &m,
                                      int32_t kv_head, int32_t query0, int32_t begin, int32_t end, int32_t split) {
    const int32_t group = c.shape.heads / c.shape.kv_heads, width = c.shape.head_width;
    const view seen = view_of(table, c, (query0 + begin) / group, (query0 + end - 1) / group);
    const spans s = spans_of(c, seen);
    if (!s.shared && split > 0)
        return;
    int32_t side = 0;
    for (int64_t span = s.first + (s.shared ? split : 0); span <= s.last; span += s.shared ? c.splits : 1) {
        begin_span(c, m, begin, end);
        visit_span<C>(table, c, m, seen, kv_head, query0, begin, end, span);
        __syncthreads();
        end_span(c, m, kv_head, query0, begin, end, s.shared ? (int32_t)(span - s.first) : -1, side);
        __syncthreads();
        side = c.queries - side;
    }
    if (s.shared)
        return;
    for (int32_t i = begin * width + (int32_t)threadIdx.x; i < end * width; i += blockDim.x) {
        const int32_t query = i / width, channel = i % width;
        tell(c, head_of(c, kv_head, query0 + query), channel,
             {m.all_max[side + query], m.all_sum[side + query], m.all_o[query * m.padded + channel]});
    }
}

template <int C>
static __global__ void __launch_bounds__(WARPS * 32, C < 8 ? 2 : 1)
    attention_kernel(const cuda_table *table, const attention_call c) {
    cuda_begin();
    cuda_await();
    extern __shared__ float shared[];
    const int32_t group = c.shape.heads / c.shape.kv_heads, items = c.pieces * c.shape.kv_heads;
    const int32_t split = (int32_t)blockIdx.x / items, item = (int32_t)blockIdx.x % items;
    const int32_t kv_head = item % c.shape.kv_heads;
    // the last pieces see the most keys: they go first
    const int32_t query0 = (c.pieces - 1 - item / c.shape.kv_heads) * c.queries;
    const int32_t queries = min(c.queries, min(table->n_tokens, c.last_token) * group - query0);
    if (queries <= 0)
        return;
    const block_memory m = block_memory_of(c, shared);
    begin_queries(c, m, kv_head, query0, queries);
    __syncthreads();
    for (int32_t begin = 0, end; begin < queries; begin = end) {
        const int32_t start = table->token_start[(query0 + begin) / group];
        for (end = begin + 1; end < queries && table->token_start[(query0 + end) / group] == start;)
            end++;
        visit_document<C>(table, c, m, kv_head, query0, begin, end, split);
    }
}

// ------------------------------------------------------------------------------------------------------------ the end

// What blocks that shared a token's spans left in the workspace, in the order of the spans.
static __device__ void merge_spans(const cuda_table *table, const attention_call &c, int32_t token, int32_t kv_head) {
    const spans s = spans_of(c, view_of(table, c, token, token));
    const int32_t group = c.shape.heads / c.shape.kv_heads, width = c.shape.head_width;
    if (!s.shared)
        return;
    for (int32_t i = (int32_t)threadIdx.x; i < group * width; i += FINISH_THREADS) {
        const int32_t channel = i % width;
        const int64_t head = head_of(c, kv_head, token * group + i / width);
        summed all = {-INFINITY, 0.0f, 0.0f};
        for (int64_t span = s.first; span <= s.last; span++) {
            const float *from = c.partial + (head * c.max_spans + (span - s.first)) * (width + 2);
            all = join(all, {from[0], from[1], from[2 + channel]});
        }
        tell(c, head, channel, all);
    }
}

// The tokens of the row's last document stay: all of them in pages, the newest in a ring.
static __device__ void keep(const cuda_table *table, const attention_call &c, int32_t token, int32_t kv_head) {
    const kern_row *row = &table->row[table->token_row[token]];
    const int32_t last = row->token0 + row->length - 1, width = c.shape.head_width;
    const int64_t position = table->token_position[token];
    if (!has_history(c, row) || table->token_start[token] != table->token_start[last])
        return;
    if (c.shape.window > 0 && position + c.shape.window <= table->token_position[last])
        return;
    const key_value to = kept_at(table, c, row, kv_head, position);
    const int64_t from = ((int64_t)token * c.shape.kv_heads + kv_head) * width;
    for (int32_t i = (int32_t)threadIdx.x; i < width; i += FINISH_THREADS) {
        to.k[i] = c.k[from + i];
        to.v[i] = c.v[from + i];
    }
}

// A block a token and kv head.
static __global__ void __launch_bounds__(FINISH_THREADS)
    finish_kernel(const cuda_table *table, const attention_call c) {
    cuda_begin();
    cuda_await();
    const int32_t token = (int32_t)blockIdx.x / c.shape.kv_heads, kv_head = (int32_t)blockIdx.x % c.shape.kv_heads;
    if (token >= table->n_tokens)
        return;
    if (c.splits > 1)
        merge_spans(table, c, token, kv_head);
    keep(table, c, token, kv_head);
}

// ----------------------------------------------------------------------------------------------------------- launcher

kern_status cuda_attention_prepare(const kern_cuda *cuda, const void *args, size_t *workspace_bytes) {
    (void)cuda;
    const kern_attention_args *a = (const kern_attention_args *)args;
    const kern_status status = kern_attention_args_check(a);
    if (status)
        return status;
    *workspace_bytes = PARTIAL_BYTES;
    return a->attention.head_width <= MAX_WIDTH ? KERN_OK : KERN_UNSUPPORTED;
}

// Generated tokens share keys inside a group of heads alone, prompt tokens with their neighbours too.
static attention_call call_of(const cuda_step *step, const kern_attention_args *a) {
    const int32_t group = a->attention.heads / a->attention.kv_heads;
    attention_call c;
    c.q = a->q.f;
    c.k = a->k.f;
    c.v = a->v.f;
    c.ring = a->ring;
    c.pages = a->pages;
    c.o = a->o.f;
    c.lse = a->lse.f;
    c.shape = a->attention;
    c.page_offset = a->page_offset;
    c.first_token = 0;
    c.last_token = cuda_attention_has_prompts(step->cuda, &a->attention) ? step->generated_tokens : step->tokens;
    c.queries = step->generated && group < MAX_QUERIES ? group : MAX_QUERIES;
    c.pieces = cuda_blocks((int64_t)c.last_token * group, c.queries);
    c.partial = (float *)step->cuda->workspace;
    const size_t of_span =
        sizeof(float) * (size_t)step->tokens * (size_t)c.shape.heads * (size_t)(c.shape.head_width + 2);
    const int wanted = BLOCKS_A_PROCESSOR * step->cuda->processors / (c.pieces * c.shape.kv_heads);
    c.max_spans = (int32_t)(PARTIAL_BYTES / of_span);
    c.splits = !step->generated || wanted < 1 ? 1 : wanted < MAX_SPLITS ? wanted : MAX_SPLITS;
    return c;
}

kern_status cuda_attention_run(const cuda_step *step, const void *args) {
    const kern_attention_args *a = (const kern_attention_args *)args;
    if (step->tokens == 0)
        return KERN_OK;
    if (cuda_attention_merges(step, a))
        return cuda_attention_merged(step, a);
    const attention_call c = call_of(step, a);
    const int blocks = c.pieces * c.shape.kv_heads * c.splits, padded = padded_width(c.shape.head_width);
    auto *kernel = padded == 32    ? attention_kernel<1>
                   : padded == 64  ? attention_kernel<2>
                   : padded == 128 ? attention_kernel<4>
                                   : attention_kernel<8>;
    kern_status status = KERN_OK;
    if (c.last_token > 0)
        status = cuda_start(step, kernel, blocks, WARPS * 32, shared_bytes(c), step->table, c);
    if (!status && c.last_token < step->tokens)
        status = cuda_attention_prompts(step, c);
    if (!status && (a->ring.p || a->pages.p))
        status = cuda_start(step, finish_kernel, step->tokens * c.shape.kv_heads, FINISH_THREADS, 0, step->table, c);
    return status;
}

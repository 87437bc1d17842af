// SPDX-License-Identifier: Apache-2.0
// y = x W^T with bf16 weights for up to 8 vectors, on a team of threads; what it shares with the kernels for more
// vectors (products.cu), where the arithmetic is told.
//
// A block splits the vectors once, into shared memory. A team goes from one tile of 16 rows to another, the next one's
// weights under way while the sums of this one are added; the first tile's are asked for before the vectors exist. A
// norm before the product is made by every block for itself, with the bits of norm.cu.
#ifndef KERNELS_CUDA_FEW_CUH
#define KERNELS_CUDA_FEW_CUH

#include "kernels/cuda/products.cuh"

constexpr int PRODUCT_TILE = 16;   // rows and columns of a weight tile
constexpr int PRODUCT_VECTORS = 8; // of operand B
constexpr int PRODUCT_SPLIT = 16;  // warps that share a row tile, at most
constexpr int PRODUCT_COLUMN = 20; // floats between the vectors of a tile in shared memory: no bank conflicts
constexpr int PRODUCT_HELD = 8;    // tiles of K that a warp holds
constexpr int PRODUCT_SUMS = PRODUCT_VECTORS * PRODUCT_COLUMN; // floats of a warp's sums of a row tile

static __device__ __forceinline__ int32_t product_vectors(const cuda_table *table, const cuda_product &p) {
    return p.wanted ? table->n_logits : table->n_tokens * p.groups;
}

// The vector's place among those of all tokens.
static __device__ __forceinline__ int32_t product_source(const cuda_table *table, const cuda_product &p, int32_t v) {
    return p.wanted ? table->logits_token[v] : v;
}

// A sum of vector v's becomes an output. bias, residual: what the part has of them, else not looked at.
static __device__ __forceinline__ float product_value(const cuda_product &p, const cuda_product_part &part, int32_t v,
                                                      float y, float bias, float residual) {
    if (part.bias)
        y += bias;
    if (part.residual)
        y += residual;
    if (p.finite && !isfinite(y))
        p.finite[v] = 0; // whoever writes writes the same
    return p.soft_cap > 0 ? p.soft_cap * tanhf(y / p.soft_cap) : y;
}

// Output `row` (of the part's) of vector v.
static __device__ __forceinline__ float product_write(const cuda_product &p, const cuda_product_part &part, int32_t v,
                                                      int32_t row, float y) {
    const int64_t at = (int64_t)v * part.rows + row;
    const float bias = part.bias ? part.bias[part.row0 + row] : 0, residual = part.residual ? part.residual[at] : 0;
    return part.y[at] = product_value(p, part, v, y, bias, residual);
}

// Row tiles of 16 that a part's rows lie in.
static __host__ __device__ __forceinline__ int product_row_tiles(const cuda_product_part &part) {
    return (part.row0 + part.rows - 1) / PRODUCT_TILE - part.row0 / PRODUCT_TILE + 1;
}

// The part that piece `index` belongs to, and which of the part's it is; pieces_of(part) says how many it has.
template <typename Pieces>
static __device__ __forceinline__ int product_find_part(const cuda_product &p, int &index, const Pieces &pieces_of) {
    int i = 0;
    for (; i + 1 < p.parts; i++) {
        const int pieces = pieces_of(p.part[i]);
        if (index < pieces)
            break;
        index -= pieces;
    }
    return i;
}

// Tiles of K, and the parts of K, which are the warps of a team: at a width of 768 each has 6 tiles, at 1024 and 2048
// it has 8.
static __host__ __device__ __forceinline__ int product_tiles(int32_t cols) {
    return (cols + PRODUCT_TILE - 1) / PRODUCT_TILE;
}
static __host__ __device__ __forceinline__ int product_warps(int32_t cols) {
    const int tiles = product_tiles(cols);
    return tiles >= 96 ? PRODUCT_SPLIT : tiles >= 16 ? 8 : tiles >= 4 ? 4 : 1;
}

// ------------------------------------------------------------------------------------------------------------- tiles

static __device__ __forceinline__ uint4 product_load_tile(const uint4 *at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// Columns k and k + 1 of a vector, zeros past its end; NULL: no vector. EVEN: pairs are aligned and none is cut.
template <bool EVEN>
static __device__ __forceinline__ float2 product_load_pair(const float *x, int32_t k, int32_t cols) {
    float2 pair = make_float2(0.0f, 0.0f);
    if (!x || k >= cols)
        return pair;
    if (EVEN)
        return *(const float2 *)(x + k);
    pair.x = x[k];
    if (k + 1 < cols)
        pair.y = x[k + 1];
    return pair;
}

// x = hi + lo, each a pair of bf16, the first in the low half.
static __device__ __forceinline__ void product_split_pair(float2 x, uint32_t &hi, uint32_t &lo) {
    const __nv_bfloat162 high = __floats2bfloat162_rn(x.x, x.y);
    const float2 wide = __bfloat1622float2(high);
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.x - wide.x, x.y - wide.y);
    memcpy(&hi, &high, sizeof hi);
    memcpy(&lo, &low, sizeof lo);
}

static __device__ __forceinline__ void product_multiply(float (&sum)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A warp's sums of 16 rows and 8 vectors, vector by vector.
static __device__ __forceinline__ void product_put_sum(const float (&sum)[4], float *to, int lane) {
    to += lane % 4 * 2 * PRODUCT_COLUMN + lane / 4;
    to[0] = sum[0];
    to[PRODUCT_COLUMN] = sum[1];
    to[8] = sum[2];
    to[PRODUCT_COLUMN + 8] = sum[3];
}

// One output's sums of the warps, in their order.
static __device__ __forceinline__ float product_add_warps(const float *part, int stride, int warps) {
    float total = part[0];
    for (int w = 1; w < warps; w++)
        total += part[w * stride];
    return total;
}

// ------------------------------------------------------------------------------------------------------- few vectors

// Items of a launch, which are row tiles of all parts one after another, or of parts 0 and 1 together: a team has
// first, first + stride .. below end.
struct product_items {
    int32_t first, stride, end;
};

// A warp's tiles of K, of which it holds some at a time.
struct product_columns {
    int begin, count;
};
static __device__ __forceinline__ product_columns product_piece(const product_columns &all, int piece) {
    const int skipped = piece * PRODUCT_HELD;
    return {all.begin + skipped, min(all.count - skipped, PRODUCT_HELD)};
}

static __device__ __forceinline__ const uint4 *product_item_tiles(const cuda_product &p, int item, int own, int side) {
    const int64_t tile = p.part[own + side].row0 / PRODUCT_TILE + item;
    return (const uint4 *)p.part[own + side].weight + tile * product_tiles(p.cols) * 32;
}

// Where an item is: a part, and which of its row tiles.
struct product_place {
    int own, item;
};
template <bool GATED> static __device__ __forceinline__ product_place product_find(const cuda_product &p, int item) {
    const int own = GATED ? 0 : product_find_part(p, item, product_row_tiles);
    return {own, item};
}

// A warp's tiles of an item, of both its sides where it has two.
template <int SIDES>
static __device__ __forceinline__ void product_load_item(const cuda_product &p, const product_place &at,
                                                         const product_columns &columns,
                                                         uint4 (&a)[SIDES][PRODUCT_HELD]) {
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        const uint4 *from = product_item_tiles(p, at.item, at.own, side) + columns.begin * 32 + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < PRODUCT_HELD; i++)
            if (i < columns.count)
                a[side][i] = product_load_tile(from + i * 32);
    }
}

// ------------------------------------------------------------------------------------------------- the split vectors

// The vectors as a warp's lanes take them, a word of 16 bytes a lane: of vector v and tile i four words, the q-th with
// hi of columns 2 q and 2 q + 1, hi of 2 q + 8 and 2 q + 9, then lo of both. An odd number of tiles lies between two
// vectors, so that lanes of neighbouring vectors meet no bank conflict.
struct product_vectors_memory {
    uint4 *word;
    int32_t vectors, stride;

    __device__ __forceinline__ const uint4 *lane_of(int32_t v) const {
        return word + v * stride * 4 + (int)threadIdx.x % 4;
    }
    __device__ __forceinline__ uint4 take(int tile, int32_t v) const { return lane_of(v)[tile * 4]; }
    __device__ __forceinline__ void put(int32_t v, int32_t k, float2 pair) const { // k: even
        const int32_t tile = k / PRODUCT_TILE, place = k % PRODUCT_TILE / 2;
        uint32_t *half = (uint32_t *)(word + (v * stride + tile) * 4 + place % 4) + place / 4;
        uint32_t hi, lo;
        product_split_pair(pair, hi, lo);
        half[0] = hi;
        half[2] = lo;
    }
};
static __host__ __device__ __forceinline__ int32_t product_vector_stride(int32_t tiles) {
    return tiles | 1;
}
static __host__ __device__ __forceinline__ size_t product_vectors_bytes(int32_t cols, int64_t vectors) {
    return (size_t)vectors * (size_t)product_vector_stride(product_tiles(cols)) * 4 * sizeof(uint4);
}

// Pairs of columns [first, end of the last tile) of all vectors, a thread of the block each, AHEAD under way.
template <bool EVEN>
static __device__ __forceinline__ void product_split(const cuda_table *table, const cuda_product &p,
                                                     const product_vectors_memory &to) {
    constexpr int AHEAD = 4;
    const int32_t pairs = product_tiles(p.cols) * (PRODUCT_TILE / 2), total = pairs * to.vectors;
    for (int32_t first = threadIdx.x; first < total; first += AHEAD * (int32_t)blockDim.x) {
        float2 pair[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int32_t i = first + j * (int32_t)blockDim.x, v = i / pairs;
            pair[j] = i < total ? product_load_pair<EVEN>(p.x + (int64_t)product_source(table, p, v) * p.cols,
                                                          i % pairs * 2, p.cols)
                                : make_float2(0, 0);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int32_t i = first + j * (int32_t)blockDim.x;
            if (i < total)
                to.put(i / pairs, i % pairs * 2, pair[j]);
        }
    }
}

// The vectors by the norm. y is written by one block.
static __device__ __forceinline__ void product_normalise(const cuda_norm &n, const product_vectors_memory &to) {
    __shared__ float sums[PRODUCT_SPLIT];
    const cuda_team_of team(cuda_norm_lanes(n.width));
    const int32_t teams = (int32_t)blockDim.x / team.size(), total = to.vectors * n.groups, cols = n.groups * n.width;
    for (int32_t i = team.number(); i < total; i += teams) {
        const int32_t v = i / n.groups, column0 = i % n.groups * n.width;
        float *y = n.y + (int64_t)i * n.width;
        cuda_normalise<2>(n, i, team, sums + team.number() * (team.size() / 32), [&](int32_t at, const cuda_quad &q) {
            to.put(v, column0 + at, make_float2(q.v[0], q.v[1]));
            to.put(v, column0 + at + 2, make_float2(q.v[2], q.v[3]));
            if (blockIdx.x == 0)
                cuda_store(y + at, q, 4, true);
        });
    }
    const int32_t rest = (product_tiles(cols) * PRODUCT_TILE - cols) / 2;
    for (int32_t i = threadIdx.x; i < rest * to.vectors; i += (int32_t)blockDim.x)
        to.put(i / rest, cols + i % rest * 2, make_float2(0, 0));
}

static __device__ __forceinline__ int32_t product_row(const cuda_product_part &part, int item, int r) {
    return (part.row0 / PRODUCT_TILE + item) * PRODUCT_TILE + r - part.row0;
}

// What is added to an output, 0 where there is nothing.
struct product_addend {
    float bias, residual;
};
static __device__ __forceinline__ product_addend product_addend_of(const cuda_product_part &part, int32_t v,
                                                                   int32_t row) {
    return {part.bias ? part.bias[part.row0 + row] : 0,
            part.residual ? part.residual[(int64_t)v * part.rows + row] : 0};
}
// Of a thread's first output, which it may have before the sums.
static __device__ __forceinline__ product_addend product_first_addend(const cuda_product &p, const product_place &at,
                                                                      int thread, int32_t vectors) {
    const int n = thread / PRODUCT_TILE;
    const cuda_product_part &part = p.part[at.own];
    const int32_t row = product_row(part, at.item, thread % PRODUCT_TILE);
    const bool there = n < vectors && row >= 0 && row < part.rows;
    return there ? product_addend_of(part, n, row) : product_addend{0, 0};
}

// The sums of the warps, partial: (sides, warps, PRODUCT_SUMS), become outputs. A thread owns one of each side.
template <bool GATED, typename Team>
static __device__ __forceinline__ void product_finish_item(const cuda_product &p, const product_place &at,
                                                           const Team &team, int warps, const float *partial,
                                                           int32_t vectors, const product_addend &first) {
    constexpr int SIDES = GATED ? 2 : 1;
    for (int i = team.thread(); i < PRODUCT_VECTORS * PRODUCT_TILE; i += team.size()) {
        const int n = i / PRODUCT_TILE, r = i % PRODUCT_TILE;
        if (n >= vectors)
            break;
        float y[SIDES] = {};
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
            const cuda_product_part &part = p.part[at.own + side];
            const float *sums = partial + side * warps * PRODUCT_SUMS + n * PRODUCT_COLUMN + r;
            const int32_t row = product_row(part, at.item, r);
            if (row < 0 || row >= part.rows)
                continue;
            const product_addend added = !GATED && i == team.thread() ? first : product_addend_of(part, n, row);
            y[side] =
                product_value(p, part, n, product_add_warps(sums, PRODUCT_SUMS, warps), added.bias, added.residual);
            part.y[(int64_t)n * part.rows + row] = y[side];
        }
        const int32_t row = at.item * PRODUCT_TILE + r; // both parts begin with a tile
        if (GATED && row < p.part[0].rows)
            p.gated[(int64_t)n * p.part[0].rows + row] = cuda_activate(p.activation, y[0]) * y[SIDES - 1];
    }
}

// The tiles that a warp holds times the vectors; v: the lane's, negative: none.
template <int SIDES>
static __device__ __forceinline__ void
product_multiply_held(const uint4 (&a)[SIDES][PRODUCT_HELD], const product_columns &columns,
                      const product_vectors_memory &vectors, int32_t v, bool fast, float (&sum)[SIDES][4]) {
    uint4 x[PRODUCT_HELD];
#pragma unroll
    for (int i = 0; i < PRODUCT_HELD; i++)
        x[i] = i < columns.count && v >= 0 ? vectors.take(columns.begin + i, v) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < PRODUCT_HELD; i++)
        if (i < columns.count)
#pragma unroll
            for (int side = 0; side < SIDES; side++) {
                product_multiply(sum[side], a[side][i], x[i].x, x[i].y);
                if (!fast)
                    product_multiply(sum[side], a[side][i], x[i].z, x[i].w);
            }
}

// The items of a team. All teams of a block come here, also those without items: await and the vectors are the block's.
// At most 8 vectors. The team is product_warps(cols) warps. A warp that cannot hold its tiles of K takes them in
// pieces. partial: the team's, 2 * sides * warps *
// PRODUCT_SUMS floats; split: the block's, product_vectors_bytes.
template <bool EVEN, bool GATED, bool NORM, typename Team, typename Await>
static __device__ __forceinline__ void product_few(const cuda_table *table, const cuda_product &p,
                                                   const product_items &items, const Team &team, float *partial,
                                                   void *split, const Await &await) {
    constexpr int SIDES = GATED ? 2 : 1;
    const int lane = threadIdx.x % 32, warps = team.size() / 32, warp = team.thread() / 32;
    const int tiles = product_tiles(p.cols), pieces = (tiles + warps * PRODUCT_HELD - 1) / (warps * PRODUCT_HELD);
    product_columns all = {tiles * warp / warps, 0};
    all.count = tiles * (warp + 1) / warps - all.begin;
    uint4 a[SIDES][PRODUCT_HELD] = {}; // defined on all paths: else it would stay alive around a caller's loop
    product_place at = product_find<GATED>(p, min(items.first, items.end - 1));
    if (items.first < items.end && (!p.looks || product_vectors(table, p) > 0))
        product_load_item(p, at, product_piece(all, 0), a);
    const int32_t vectors = product_vectors(table, p);
    const product_vectors_memory all_vectors = {(uint4 *)split, NORM ? table->n_tokens : vectors,
                                                product_vector_stride(tiles)};
    const int32_t own = lane / 4 >= vectors ? -1 : NORM ? product_source(table, p, lane / 4) : lane / 4;
    await();
    if (vectors <= 0)
        return;
    product_addend addend = {0, 0};
    if (!GATED && items.first < items.end)
        addend = product_first_addend(p, at, team.thread(), vectors);
    if (NORM)
        product_normalise(p.norm, all_vectors);
    else
        product_split<EVEN>(table, p, all_vectors);
    __syncthreads();
    for (int item = items.first, turn = 0; item < items.end; item += items.stride, turn ^= 1) {
        float sum[SIDES][4] = {}, *now = partial + turn * SIDES * warps * PRODUCT_SUMS;
        const bool last = item + items.stride >= items.end;
        const product_place next = last ? at : product_find<GATED>(p, item + items.stride);
        for (int piece = 0; piece < pieces; piece++) {
            product_multiply_held(a, product_piece(all, piece), all_vectors, own, p.fast, sum);
            const bool more = piece + 1 < pieces;
            if (more || !last)
                product_load_item(p, more ? at : next, product_piece(all, more ? piece + 1 : 0), a);
        }
#pragma unroll
        for (int side = 0; side < SIDES; side++)
            product_put_sum(sum[side], now + (side * warps + warp) * PRODUCT_SUMS, lane);
        team.sync();
        product_finish_item<GATED>(p, at, team, warps, now, vectors, addend);
        at = next;
        if (!GATED && !last)
            addend = product_first_addend(p, at, team.thread(), vectors);
    }
}

#endif

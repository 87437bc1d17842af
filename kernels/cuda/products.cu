// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias + residual. The bits of an output are a function of its vector and its weight row: how many vectors
// there are chooses tiles, never the order of a sum.
//
// bf16 weights. Tensor cores at every batch: weights are operand A, one 16-byte load a lane and tile of 16 x 16, as
// they lie in memory; vectors are operand B, 8 to a tile. An activation x is split into two bf16 numbers, hi = bf16(x)
// and lo = bf16(x - hi), which leaves 2^-18 of it, and both are multiplied into one float32 sum. The warps of a block
// share its rows and split K into contiguous parts; how many there are is a function of the width alone (split_of).
// Their sums are added in the order of the parts through shared memory. Within a part: columns ascending, hi before lo.
//   Up to 8 vectors (few_kernel): the vectors lie in a warp's registers, split, and the block goes from one tile of 16
//   rows to another, the next one's weights under way while the sums of this one are added; the first tile's are asked
//   for before the vectors exist. 768 x 768 is 48 blocks, 4 of it side by side 192, 32000 x 768 two on each
//   multiprocessor. A norm before the product is made by every block for itself, with the bits of norm.cu. Many
//   vectors: a block owns up to 64 rows and 32 vectors; blocks that share weights follow each other.
//
// float32 weights. A warp owns a tile of rows and vectors; lane l sums over k = 4 l + 128 j + (0 .. 3), ascending, by
// fused multiply-add, and the lanes are added by halving.
#include "kernels/cuda/products.cuh"

enum {
    TILE = 16,        // rows and columns of a weight tile
    TILE_VECTORS = 8, // of operand B
    MAX_SPLIT = 16,   // warps of a block, bf16
    COLUMN = 20,      // floats between the vectors of a tile in shared memory: no bank conflicts
    F32_WARPS = 8,
    HELD = 8,         // tiles of K that a warp of few_kernel holds
    NORM_VECTORS = 4, // up to which a product makes its norm
};

static __device__ __forceinline__ int32_t vector_count(const cuda_table *table, const cuda_product &p) {
    return p.wanted ? table->n_logits : table->n_tokens * p.groups;
}

static __device__ __forceinline__ const float *vector_at(const cuda_table *table, const cuda_product &p, int32_t v) {
    return p.x + (int64_t)(p.wanted ? table->logits_token[v] : v) * p.cols;
}

// Output `row` (of the part's) of vector v.
static __device__ __forceinline__ float write_output(const cuda_product &p, const cuda_product_part &part, int32_t v,
                                                     int32_t row, float y) {
    const int64_t at = (int64_t)v * part.rows + row;
    if (part.bias)
        y += part.bias[part.row0 + row];
    if (part.residual)
        y += part.residual[at];
    if (p.finite && !isfinite(y))
        p.finite[v] = 0; // whoever writes writes the same
    if (p.soft_cap > 0)
        y = p.soft_cap * tanhf(y / p.soft_cap);
    part.y[at] = y;
    return y;
}

// Row tiles of 16 that a part's rows lie in.
static __host__ __device__ __forceinline__ int row_tiles_of(const cuda_product_part &part) {
    return (part.row0 + part.rows - 1) / TILE - part.row0 / TILE + 1;
}

// The part that piece `index` belongs to, and which of the part's it is; pieces_of(part) says how many it has.
template <typename Pieces>
static __device__ __forceinline__ int find_part(const cuda_product &p, int &index, const Pieces &pieces_of) {
    int i = 0;
    for (; i + 1 < p.parts; i++) {
        const int pieces = pieces_of(p.part[i]);
        if (index < pieces)
            break;
        index -= pieces;
    }
    return i;
}

// -------------------------------------------------------------------------------------------------------------- bf16

static __device__ __forceinline__ uint4 load_tile(const uint4 *at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// Columns k and k + 1 of a vector, zeros past its end; NULL: no vector. EVEN: pairs are aligned and none is cut.
template <bool EVEN> static __device__ __forceinline__ float2 load_pair(const float *x, int32_t k, int32_t cols) {
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
static __device__ __forceinline__ void split_pair(float2 x, uint32_t &hi, uint32_t &lo) {
    const __nv_bfloat162 high = __floats2bfloat162_rn(x.x, x.y);
    const float2 wide = __bfloat1622float2(high);
    const __nv_bfloat162 low = __floats2bfloat162_rn(x.x - wide.x, x.y - wide.y);
    memcpy(&hi, &high, sizeof hi);
    memcpy(&lo, &low, sizeof lo);
}

static __device__ __forceinline__ void multiply(float (&sum)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Adds the products of weight tiles [begin, end) of R row tiles with N tiles of vectors. Loads of AHEAD tiles of K are
// in flight before the first is used.
template <int R, int N, bool EVEN, int AHEAD>
static __device__ __forceinline__ void multiply_part(float (&sum)[R][N][4], const uint4 *const (&weight)[R],
                                                     const float *const (&x)[N], int32_t cols, int begin, int end) {
    const int lane = threadIdx.x % 32;
    for (int tile = begin; tile < end; tile += AHEAD) {
        uint4 a[AHEAD][R];
        float2 pair[AHEAD][N][2];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (tile + i < end) {
#pragma unroll
                for (int r = 0; r < R; r++)
                    a[i][r] = load_tile(weight[r] + (int64_t)(tile + i) * 32);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int32_t k = (tile + i) * TILE + lane % 4 * 2;
                    pair[i][n][0] = load_pair<EVEN>(x[n], k, cols);
                    pair[i][n][1] = load_pair<EVEN>(x[n], k + 8, cols);
                }
            }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (tile + i < end) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    uint32_t hi[2], lo[2];
                    split_pair(pair[i][n][0], hi[0], lo[0]);
                    split_pair(pair[i][n][1], hi[1], lo[1]);
#pragma unroll
                    for (int r = 0; r < R; r++)
                        multiply(sum[r][n], a[i][r], hi[0], hi[1]);
#pragma unroll
                    for (int r = 0; r < R; r++)
                        multiply(sum[r][n], a[i][r], lo[0], lo[1]);
                }
            }
    }
}

// A warp's sums of 16 rows and 8 vectors, vector by vector.
static __device__ __forceinline__ void put_sum(const float (&sum)[4], float *to, int lane) {
    to += lane % 4 * 2 * COLUMN + lane / 4;
    to[0] = sum[0];
    to[COLUMN] = sum[1];
    to[8] = sum[2];
    to[COLUMN + 8] = sum[3];
}

// One output's sums of the warps, in their order.
static __device__ __forceinline__ float add_warps(const float *part, int stride, int warps) {
    float total = part[0];
    for (int w = 1; w < warps; w++)
        total += part[w * stride];
    return total;
}

// The warps' sums of one row tile, added in their order, become outputs. partial: (warps, N * 8, COLUMN). GATED: the
// tile is of part 1 and its thread has written the same place of part 0.
template <int N, bool GATED>
static __device__ void finish_tile(const cuda_product &p, const cuda_product_part &part, const float (&sum)[N][4],
                                   float *partial, int32_t row0, int32_t vector0, int32_t vectors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    constexpr int FLOATS = N * TILE_VECTORS * COLUMN;
    __syncthreads(); // the tile before has been read
#pragma unroll
    for (int n = 0; n < N; n++)
        put_sum(sum[n], partial + warp * FLOATS + n * TILE_VECTORS * COLUMN, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < N * TILE_VECTORS * TILE; i += blockDim.x) {
        const int n = i / TILE, r = i % TILE;
        const float total = add_warps(partial + n * COLUMN + r, FLOATS, warps);
        const int32_t row = row0 + r - part.row0;
        if (row < 0 || row >= part.rows || n >= vectors)
            continue;
        const float y = write_output(p, part, vector0 + n, row, total);
        if (GATED) {
            const int64_t at = (int64_t)(vector0 + n) * part.rows + row;
            p.gated[at] = cuda_activate(p.activation, p.part[0].y[at]) * y;
        }
    }
}

// A block: R row tiles, N tiles of vectors. Row tiles past the part's last are its last again and not written. GATED:
// the row tiles are of parts 0 and 1 by turns.
template <int R, int N, bool EVEN, bool GATED, int AHEAD>
static __global__ void __launch_bounds__(MAX_SPLIT * 32)
    bf16_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, int vector_blocks) {
    extern __shared__ float partial[];
    cuda_begin();
    constexpr int SIDES = GATED ? 2 : 1, DEEP = R / SIDES; // row tiles of a part
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tiles = (p.cols + TILE - 1) / TILE; // of one row tile
    const int begin = tiles * warp / warps, end = tiles * (warp + 1) / warps;
    int index = (int)(blockIdx.x / vector_blocks);
    const int own = GATED ? 0 : find_part(p, index, [](const cuda_product_part &part) {
        return (row_tiles_of(part) + DEEP - 1) / DEEP;
    });
    const uint4 *weight[R];
    int tile[R], last = 0;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const cuda_product_part &part = p.part[own + r % SIDES];
        last = (part.row0 + part.rows - 1) / TILE;
        tile[r] = part.row0 / TILE + index * DEEP + r / SIDES;
        weight[r] = (const uint4 *)part.weight + (int64_t)min(tile[r], last) * tiles * 32 + lane;
    }
    const int32_t vector0 = (int32_t)(blockIdx.x % vector_blocks) * N * TILE_VECTORS;
    const int32_t vectors = vector_count(table, p) - vector0;
    cuda_await();
    if (vectors <= 0)
        return;
    const float *x[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int32_t v = n * TILE_VECTORS + lane / 4;
        x[n] = v < vectors ? vector_at(table, p, vector0 + v) : NULL;
    }
    float sum[R][N][4] = {};
    multiply_part<R, N, EVEN, AHEAD>(sum, weight, x, p.cols, begin, end);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const cuda_product_part part = p.part[own + r % SIDES];
        if (tile[r] * TILE >= part.row0 + part.rows)
            continue;
        if (GATED && r % SIDES == 1)
            finish_tile<N, true>(p, part, sum[r], partial, tile[r] * TILE, vector0, vectors);
        else
            finish_tile<N, false>(p, part, sum[r], partial, tile[r] * TILE, vector0, vectors);
    }
}

// ------------------------------------------------------------------------------------------------------- few vectors

// A warp's weight tiles of item `item` of the grid: row tiles of all parts one after another, or of parts 0 and 1.
template <int SIDES>
static __device__ __forceinline__ void load_item(const cuda_product &p, int item, int begin, int count,
                                                 uint4 (&a)[SIDES][HELD]) {
    const int tiles = (p.cols + TILE - 1) / TILE;
    const int own = SIDES == 2 ? 0 : find_part(p, item, row_tiles_of);
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
        const int64_t tile = p.part[own + side].row0 / TILE + item;
        const uint4 *from = (const uint4 *)p.part[own + side].weight + (tile * tiles + begin) * 32 + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (i < count)
                a[side][i] = load_tile(from + i * 32);
    }
}

// The vectors by the norm, into shared memory at x, `stride` floats apart.
template <int LANES, int CACHE>
static __device__ void normalise_vectors(const cuda_norm &n, int32_t vectors, float *x, int stride, float *sums) {
    const int team = threadIdx.x / LANES, teams = blockDim.x / LANES, total = vectors * n.groups;
    for (int i = team; i - team < total; i += teams) { // the same turns for all teams: there are barriers
        const int v = min(i, total - 1);
        float *to = x + v / n.groups * stride + v % n.groups * n.width, *y = n.y + (int64_t)v * n.width;
        cuda_normalise<LANES, CACHE>(n, v, threadIdx.x % LANES, sums + team * (LANES / 32),
                                     [&](int32_t at, const cuda_quad &q) {
                                         cuda_store(to + at, q, 4, true);
                                         if (blockIdx.x == 0 && i == v)
                                             cuda_store(y + at, q, 4, true);
                                     });
    }
}

static __device__ void normalise_inputs(const cuda_norm &n, int32_t vectors, float *x, int stride) {
    __shared__ float sums[MAX_SPLIT];
    if (n.width <= CUDA_NORM_NARROW)
        normalise_vectors<32, 2>(n, vectors, x, stride, sums);
    else if (n.width <= CUDA_NORM_MIDDLE)
        normalise_vectors<128, 2>(n, vectors, x, stride, sums);
    else
        normalise_vectors<256, 4>(n, vectors, x, stride, sums);
    __syncthreads();
}

static __host__ __device__ __forceinline__ int norm_stride(int32_t cols) {
    return cols + TILE_VECTORS; // the vectors' pairs in banks of their own
}

// partial: (SIDES, warps, 8, COLUMN). A thread owns one output of each side.
template <int SIDES>
static __device__ __forceinline__ void finish_item(const cuda_product &p, int item, const float (&sum)[SIDES][4],
                                                   float *partial, int32_t vectors) {
    constexpr int FLOATS = TILE_VECTORS * COLUMN;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int side = 0; side < SIDES; side++)
        put_sum(sum[side], partial + (side * warps + warp) * FLOATS, lane);
    __syncthreads();
    const int own = SIDES == 2 ? 0 : find_part(p, item, row_tiles_of);
    for (int i = threadIdx.x; i < TILE_VECTORS * TILE; i += blockDim.x) {
        const int n = i / TILE, r = i % TILE;
        if (n >= vectors)
            break;
        float y[SIDES] = {};
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
            const cuda_product_part &part = p.part[own + side];
            const int32_t row = (part.row0 / TILE + item) * TILE + r - part.row0;
            if (row >= 0 && row < part.rows)
                y[side] = write_output(p, part, n, row,
                                       add_warps(partial + side * warps * FLOATS + n * COLUMN + r, FLOATS, warps));
        }
        const int32_t row = item * TILE + r; // both parts begin with a tile
        if (SIDES == 2 && row < p.part[0].rows)
            p.gated[(int64_t)n * p.part[0].rows + row] = cuda_activate(p.activation, y[0]) * y[SIDES - 1];
    }
}

// At most 8 vectors, at most HELD tiles a warp.
template <bool EVEN, bool GATED, bool NORM>
static __global__ void __launch_bounds__(MAX_SPLIT * 32)
    few_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, int items) {
    extern __shared__ float memory[]; // two `partial`, the vectors of the norm
    cuda_begin();
    constexpr int SIDES = GATED ? 2 : 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tiles = (p.cols + TILE - 1) / TILE, partial = SIDES * warps * TILE_VECTORS * COLUMN;
    const int begin = tiles * warp / warps, count = tiles * (warp + 1) / warps - begin;
    uint4 a[SIDES][HELD];
    load_item<SIDES>(p, blockIdx.x, begin, count, a);
    const int32_t vectors = vector_count(table, p);
    cuda_await();
    if (vectors <= 0)
        return;
    const float *x = NULL;
    if (NORM)
        normalise_inputs(p.norm, vectors, memory + 2 * partial, norm_stride(p.cols));
    if (lane / 4 < vectors)
        x = NORM ? memory + 2 * partial + lane / 4 * norm_stride(p.cols) : vector_at(table, p, lane / 4);
    uint32_t hi[HELD][2], lo[HELD][2];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (i < count)
#pragma unroll
            for (int half = 0; half < 2; half++)
                split_pair(load_pair<EVEN>(x, (begin + i) * TILE + lane % 4 * 2 + half * 8, p.cols), hi[i][half],
                           lo[i][half]);
    int turn = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
        float sum[SIDES][4] = {};
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (i < count)
#pragma unroll
                for (int side = 0; side < SIDES; side++) {
                    multiply(sum[side], a[side][i], hi[i][0], hi[i][1]);
                    multiply(sum[side], a[side][i], lo[i][0], lo[i][1]);
                }
        if (item + (int)gridDim.x < items)
            load_item<SIDES>(p, item + gridDim.x, begin, count, a);
        finish_item<SIDES>(p, item, sum, memory + turn * partial, vectors);
    }
}

// Parts of K, which are the warps of a block: at a width of 768 each has 6 tiles, at 1024 and 2048 it has 8.
static int split_of(int32_t cols) {
    const int tiles = (cols + TILE - 1) / TILE;
    return tiles >= 96 ? MAX_SPLIT : tiles >= 16 ? 8 : tiles >= 4 ? 4 : 1;
}

static bool is_even(const cuda_product *p) {
    return p->cols % 2 == 0 && (uintptr_t)p->x % 8 == 0;
}

static bool has_few(const cuda_product *p, int64_t vectors) {
    const int tiles = (p->cols + TILE - 1) / TILE, warps = split_of(p->cols);
    return vectors <= TILE_VECTORS && (tiles + warps - 1) / warps <= HELD;
}

// Pieces of `deep` row tiles that the parts have together.
static int pieces_of(const cuda_product *p, int deep) {
    int pieces = 0;
    for (int i = 0; i < (p->gated ? 1 : p->parts); i++)
        pieces += cuda_blocks(row_tiles_of(p->part[i]), deep);
    return pieces;
}

static size_t few_bytes(const cuda_product *p, int64_t vectors) {
    const int partial = (p->gated ? 2 : 1) * split_of(p->cols) * TILE_VECTORS * COLUMN;
    return sizeof(float) * (size_t)(2 * partial + (p->norm.y ? vectors * norm_stride(p->cols) : 0));
}

bool cuda_product_takes_gated(const cuda_product *p) {
    return p->bf16 && p->parts == 2 && is_even(p) && p->part[0].row0 % TILE == 0 && p->part[1].row0 % TILE == 0;
}

// Every block makes the norm: worth it while the vectors are very few.
bool cuda_product_takes_norm(const cuda_step *step, const cuda_product *p) {
    const int64_t vectors = step->tokens;
    return p->bf16 && vectors > 0 && vectors <= NORM_VECTORS && has_few(p, vectors) && is_even(p) && p->norm.wide &&
           few_bytes(p, vectors) <= 48 * 1024;
}

template <bool EVEN, bool GATED, bool NORM>
static kern_status start_few(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int items = pieces_of(p, 1), most = 2 * step->cuda->processors;
    return cuda_start(step, few_kernel<EVEN, GATED, NORM>, items < most ? items : most, split_of(p->cols) * 32,
                      few_bytes(p, vectors), step->table, *p, items);
}

static kern_status launch_few(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    if (p->norm.y)
        return p->gated ? start_few<true, true, true>(step, p, vectors)
                        : start_few<true, false, true>(step, p, vectors);
    if (p->gated)
        return start_few<true, true, false>(step, p, vectors);
    return is_even(p) ? start_few<true, false, false>(step, p, vectors)
                      : start_few<false, false, false>(step, p, vectors);
}

// DEEP row tiles of a part.
template <int DEEP, int N, int AHEAD>
static kern_status launch_bf16(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int warps = split_of(p->cols), vector_blocks = cuda_blocks(vectors, N * TILE_VECTORS);
    const size_t shared = sizeof(float) * warps * N * TILE_VECTORS * COLUMN;
    const int blocks = pieces_of(p, DEEP) * vector_blocks;
    auto *kernel = is_even(p) ? bf16_kernel<DEEP, N, true, false, AHEAD> : bf16_kernel<DEEP, N, false, false, AHEAD>;
    return cuda_start(step, kernel, blocks, warps * 32, shared, step->table, *p, vector_blocks);
}
template <int DEEP, int N>
static kern_status launch_gated(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int warps = split_of(p->cols), vector_blocks = cuda_blocks(vectors, N * TILE_VECTORS);
    const size_t shared = sizeof(float) * warps * N * TILE_VECTORS * COLUMN;
    return cuda_start(step, bf16_kernel<2 * DEEP, N, true, true, 1>, pieces_of(p, DEEP) * vector_blocks, warps * 32,
                      shared, step->table, *p, vector_blocks);
}

// Many vectors: the most rows a block that still gives every multiprocessor one.
static kern_status launch_bf16_tiles(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int64_t blocks = (int64_t)cuda_blocks(vectors, 4 * TILE_VECTORS) * pieces_of(p, 1);
    const int processors = step->cuda->processors;
    if (has_few(p, vectors))
        return launch_few(step, p, vectors);
    if (p->gated)
        return vectors > 2 * TILE_VECTORS ? blocks >= 2 * processors ? launch_gated<2, 4>(step, p, vectors)
                                                                     : launch_gated<1, 4>(step, p, vectors)
                                          : launch_gated<1, 2>(step, p, vectors);
    if (vectors <= TILE_VECTORS)
        return launch_bf16<1, 1, 8>(step, p, vectors);
    if (vectors <= 2 * TILE_VECTORS)
        return launch_bf16<1, 2, 4>(step, p, vectors);
    if (blocks >= 4 * processors)
        return launch_bf16<4, 4, 1>(step, p, vectors);
    if (blocks >= 2 * processors)
        return launch_bf16<2, 4, 2>(step, p, vectors);
    return launch_bf16<1, 4, 2>(step, p, vectors);
}

// ----------------------------------------------------------------------------------------------------------- float32

// Columns k .. k + 3, zeros past the end. WHOLE: 16-byte loads.
template <bool WHOLE> static __device__ __forceinline__ float4 load_four(const float *x, int32_t k, int32_t cols) {
    if (WHOLE)
        return *(const float4 *)(x + k);
    float4 four = make_float4(x[k], 0.0f, 0.0f, 0.0f);
    if (k + 1 < cols)
        four.y = x[k + 1];
    if (k + 2 < cols)
        four.z = x[k + 2];
    if (k + 3 < cols)
        four.w = x[k + 3];
    return four;
}

// A lane's part of R x N dot products.
template <int R, int N, bool WHOLE>
static __device__ __forceinline__ void multiply_lane(float (&sum)[N][R], const float *const (&weight)[R],
                                                     const float *const (&x)[N], int32_t cols) {
#pragma unroll(R *N <= 8 ? 4 : 1)
    for (int32_t k = threadIdx.x % 32 * 4; k < cols; k += 128) {
        float4 a[R], b[N];
#pragma unroll
        for (int r = 0; r < R; r++)
            a[r] = load_four<WHOLE>(weight[r], k, cols);
#pragma unroll
        for (int n = 0; n < N; n++)
            b[n] = load_four<WHOLE>(x[n], k, cols);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                sum[n][r] = fmaf(a[r].x, b[n].x, sum[n][r]);
                sum[n][r] = fmaf(a[r].y, b[n].y, sum[n][r]);
                sum[n][r] = fmaf(a[r].z, b[n].z, sum[n][r]);
                sum[n][r] = fmaf(a[r].w, b[n].w, sum[n][r]);
            }
    }
}

// A warp: R rows, N vectors; rows and vectors past the last are the last again and not written. The warps of a block
// lie ACROSS along vectors, the others along rows, so that they find each other's operands in the first-level cache.
template <int R, int N, int ACROSS, bool WHOLE>
static __global__ void __launch_bounds__(F32_WARPS * 32)
    f32_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, int vector_blocks) {
    cuda_begin();
    constexpr int ROWS = R * (F32_WARPS / ACROSS); // of a block
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int index = (int)(blockIdx.x / vector_blocks);
    const cuda_product_part part =
        p.part[find_part(p, index, [](const cuda_product_part &of) { return (of.rows + ROWS - 1) / ROWS; })];
    const int32_t vector0 = ((int32_t)(blockIdx.x % vector_blocks) * ACROSS + warp % ACROSS) * N;
    const int32_t row0 = index * ROWS + warp / ACROSS * R;
    const int32_t vectors = vector_count(table, p) - vector0, rows = part.rows - row0;
    cuda_await();
    if (vectors <= 0 || rows <= 0)
        return; // whole warps; no barrier follows
    const float *weight[R], *x[N];
#pragma unroll
    for (int r = 0; r < R; r++)
        weight[r] = (const float *)part.weight + (int64_t)(part.row0 + row0 + min(r, rows - 1)) * p.cols;
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = vector_at(table, p, vector0 + min(n, vectors - 1));
    float sum[N][R] = {};
    multiply_lane<R, N, WHOLE>(sum, weight, x, p.cols);
    constexpr int TURNS = (R * N + 31) / 32;
    float mine[TURNS] = {}; // lane l writes outputs l, l + 32 ..
#pragma unroll
    for (int i = 0; i < R * N; i++) {
        float total = sum[i / R][i % R];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, distance);
        mine[i / 32] = lane == i % 32 ? total : mine[i / 32];
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * 32 + lane, n = i / R, r = i % R;
        if (i < R * N && n < vectors && r < rows)
            write_output(p, part, vector0 + n, row0 + r, mine[turn]);
    }
}

static int f32_pieces_of(const cuda_product *p, int rows) {
    int pieces = 0;
    for (int i = 0; i < p->parts; i++)
        pieces += cuda_blocks(p->part[i].rows, rows);
    return pieces;
}

template <int R, int N, int ACROSS>
static kern_status launch_f32(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int vector_blocks = cuda_blocks(vectors, N * ACROSS);
    const int blocks = f32_pieces_of(p, R * (F32_WARPS / ACROSS)) * vector_blocks;
    bool whole = p->cols % 4 == 0 && cuda_is_wide(p->x);
    for (int i = 0; i < p->parts; i++)
        whole = whole && cuda_is_wide(p->part[i].weight);
    return cuda_start(step, whole ? f32_kernel<R, N, ACROSS, true> : f32_kernel<R, N, ACROSS, false>, blocks,
                      F32_WARPS * 32, 0, step->table, *p, vector_blocks);
}

static kern_status launch_f32_tiles(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    if (vectors == 1)
        return launch_f32<1, 1, 1>(step, p, vectors);
    if (vectors <= 4)
        return launch_f32<2, 4, 1>(step, p, vectors);
    if ((int64_t)cuda_blocks(vectors, 16) * f32_pieces_of(p, 32) >= step->cuda->processors)
        return launch_f32<8, 8, 2>(step, p, vectors);
    return launch_f32<2, 8, 1>(step, p, vectors);
}

kern_status cuda_product_launch(const cuda_step *step, const cuda_product *product) {
    const int64_t vectors = product->wanted ? step->logits : (int64_t)step->tokens * product->groups;
    if (vectors == 0)
        return KERN_OK;
    return product->bf16 ? launch_bf16_tiles(step, product, vectors) : launch_f32_tiles(step, product, vectors);
}

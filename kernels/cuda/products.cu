// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias + residual. The bits of an output are a function of its vector and its weight row: how many vectors
// there are chooses tiles, never the order of a sum.
//
// bf16 weights. Tensor cores at every batch: weights are operand A, one 16-byte load a lane and tile of 16 x 16, as
// they lie in memory; vectors are operand B, 8 to a tile. An activation x is split into two bf16 numbers, hi = bf16(x)
// and lo = bf16(x - hi), which leaves 2^-18 of it, and both are multiplied into one float32 sum. The warps of a block
// share its rows and split K into contiguous parts; how many there are is a function of the width alone (split_of).
// Their sums are added in the order of the parts through shared memory. Within a part: columns ascending, hi before lo.
//   One vector: a block owns 16 rows, so that 768 x 768 and 768 x 2048 are 48 blocks of 24 and 64 KiB, all of which is
//   asked for at once, 2048 x 768 are 128 blocks, 4096 x 1024 are 256 and 32000 x 768 are 2000, several on each
//   multiprocessor. Many vectors: a block owns up to 64 rows and 32 vectors; blocks that share weights follow each
//   other.
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
};

static __device__ __forceinline__ int32_t vector_count(const cuda_table *table, const cuda_product &p) {
    return p.wanted ? table->n_logits : table->n_tokens * p.groups;
}

static __device__ __forceinline__ const float *vector_at(const cuda_table *table, const cuda_product &p, int32_t v) {
    return p.x + (int64_t)(p.wanted ? table->logits_token[v] : v) * p.weight.cols;
}

// Output `row` (of the call's) of vector v.
static __device__ __forceinline__ void write_output(const cuda_product &p, int32_t v, int32_t row, float y) {
    const int64_t at = (int64_t)v * p.rows + row;
    if (p.bias)
        y += p.bias[p.row0 + row];
    if (p.residual)
        y += p.residual[at];
    if (p.finite && !isfinite(y))
        p.finite[v] = 0; // whoever writes writes the same
    if (p.soft_cap > 0)
        y = p.soft_cap * tanhf(y / p.soft_cap);
    p.y[at] = y;
}

// -------------------------------------------------------------------------------------------------------------- bf16

static __device__ __forceinline__ uint4 load_tile(const uint4 *at) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at));
    return x;
}

// Brings the first of the weight tiles [begin, end) near, a line a lane, while the row table is still on its way.
static __device__ __forceinline__ void prefetch_part(const uint4 *weight, int begin, int end) {
    const int lane = threadIdx.x % 32, line = 128 / (int)sizeof(uint4);
    if (lane * line < (end - begin) * 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + (int64_t)begin * 32 + lane * line));
}

// Columns k and k + 1 of a vector, zeros past its end; NULL: no vector. EVEN: pairs are aligned and none is cut.
template <bool EVEN> static __device__ __forceinline__ float2 load_pair(const float *x, int32_t k, int32_t cols) {
    float2 pair = make_float2(0.0f, 0.0f);
    if (!x || k >= cols)
        return pair;
    if (EVEN)
        return __ldg((const float2 *)(x + k));
    pair.x = __ldg(x + k);
    if (k + 1 < cols)
        pair.y = __ldg(x + k + 1);
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

// The warps' sums of one row tile, added in their order, become outputs. partial: (warps, N * 8, COLUMN).
template <int N>
static __device__ void finish_tile(const cuda_product &p, const float (&sum)[N][4], float *partial, int32_t row0,
                                   int32_t vector0, int32_t vectors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    constexpr int FLOATS = N * TILE_VECTORS * COLUMN;
    __syncthreads(); // the tile before has been read
#pragma unroll
    for (int n = 0; n < N; n++) {
        float *to = partial + warp * FLOATS + (n * TILE_VECTORS + lane % 4 * 2) * COLUMN + lane / 4;
        to[0] = sum[n][0];
        to[COLUMN] = sum[n][1];
        to[8] = sum[n][2];
        to[COLUMN + 8] = sum[n][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < N * TILE_VECTORS * TILE; i += blockDim.x) {
        const int n = i / TILE, r = i % TILE;
        float total = partial[n * COLUMN + r];
        for (int w = 1; w < warps; w++)
            total += partial[w * FLOATS + n * COLUMN + r];
        const int32_t row = row0 + r - p.row0;
        if (row >= 0 && row < p.rows && n < vectors)
            write_output(p, vector0 + n, row, total);
    }
}

// A block: R row tiles, N tiles of vectors. Row tiles past the call's last are its last again and not written.
template <int R, int N, bool EVEN, int AHEAD, int RESIDENT>
static __global__ void __launch_bounds__(MAX_SPLIT * 32, RESIDENT)
    bf16_kernel(const cuda_table *table, const cuda_product p, int vector_blocks) {
    extern __shared__ float partial[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tiles = (p.weight.cols + TILE - 1) / TILE; // of one row tile
    const int first = p.row0 / TILE + (int)(blockIdx.x / vector_blocks) * R, last = (p.row0 + p.rows - 1) / TILE;
    const int begin = tiles * warp / warps, end = tiles * (warp + 1) / warps;
    const uint4 *weight[R];
#pragma unroll
    for (int r = 0; r < R; r++)
        weight[r] = (const uint4 *)p.weight.data + (int64_t)min(first + r, last) * tiles * 32 + lane;
    if (R == 1)
        prefetch_part(weight[0] - lane, begin, end);
    const int32_t vector0 = (int32_t)(blockIdx.x % vector_blocks) * N * TILE_VECTORS;
    const int32_t vectors = vector_count(table, p) - vector0;
    if (vectors <= 0)
        return;
    const float *x[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int32_t v = n * TILE_VECTORS + lane / 4;
        x[n] = v < vectors ? vector_at(table, p, vector0 + v) : NULL;
    }
    float sum[R][N][4] = {};
    multiply_part<R, N, EVEN, AHEAD>(sum, weight, x, p.weight.cols, begin, end);
#pragma unroll
    for (int r = 0; r < R; r++)
        if (first + r <= last)
            finish_tile<N>(p, sum[r], partial, (first + r) * TILE, vector0, vectors);
}

// Parts of K, which are the warps of a block: at a width of 768 each has 6 tiles, at 1024 and 2048 it has 8.
static int split_of(int32_t cols) {
    const int tiles = (cols + TILE - 1) / TILE;
    return tiles >= 96 ? MAX_SPLIT : tiles >= 16 ? 8 : tiles >= 4 ? 4 : 1;
}

static int row_tiles_of(const cuda_product *p) {
    return (p->row0 + p->rows - 1) / TILE - p->row0 / TILE + 1;
}

template <int R, int N, int AHEAD, int RESIDENT>
static kern_status launch_bf16(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int warps = split_of(p->weight.cols);
    const int vector_blocks = cuda_blocks(vectors, N * TILE_VECTORS);
    const size_t shared = sizeof(float) * warps * N * TILE_VECTORS * COLUMN;
    const int blocks = cuda_blocks(row_tiles_of(p), R) * vector_blocks;
    const bool even = p->weight.cols % 2 == 0 && (uintptr_t)p->x % 8 == 0;
    auto *kernel = even ? bf16_kernel<R, N, true, AHEAD, RESIDENT> : bf16_kernel<R, N, false, AHEAD, RESIDENT>;
    kernel<<<blocks, warps * 32, shared, step->stream>>>(step->table, *p, vector_blocks);
    return cuda_launched();
}

// Few vectors: where all blocks are resident at once, each asks for its weights at once; where there are more, the
// registers that this takes are better spent on more blocks. Many: the most rows a block that still gives every
// multiprocessor one.
static kern_status launch_bf16_tiles(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int64_t blocks = (int64_t)cuda_blocks(vectors, 4 * TILE_VECTORS) * row_tiles_of(p);
    const int processors = step->cuda->processors;
    if (vectors <= TILE_VECTORS)
        return blocks <= 2 * processors ? launch_bf16<1, 1, 8, 1>(step, p, vectors)
                                        : launch_bf16<1, 1, 4, 2>(step, p, vectors);
    if (vectors <= 2 * TILE_VECTORS)
        return launch_bf16<1, 2, 4, 1>(step, p, vectors);
    if (blocks >= 4 * processors)
        return launch_bf16<4, 4, 1, 1>(step, p, vectors);
    if (blocks >= 2 * processors)
        return launch_bf16<2, 4, 2, 1>(step, p, vectors);
    return launch_bf16<1, 4, 2, 1>(step, p, vectors);
}

// ----------------------------------------------------------------------------------------------------------- float32

// Columns k .. k + 3, zeros past the end. WHOLE: 16-byte loads.
template <bool WHOLE> static __device__ __forceinline__ float4 load_four(const float *x, int32_t k, int32_t cols) {
    if (WHOLE)
        return __ldg((const float4 *)(x + k));
    float4 four = make_float4(__ldg(x + k), 0.0f, 0.0f, 0.0f);
    if (k + 1 < cols)
        four.y = __ldg(x + k + 1);
    if (k + 2 < cols)
        four.z = __ldg(x + k + 2);
    if (k + 3 < cols)
        four.w = __ldg(x + k + 3);
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
    f32_kernel(const cuda_table *table, const cuda_product p, int vector_blocks) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t vector0 = ((int32_t)(blockIdx.x % vector_blocks) * ACROSS + warp % ACROSS) * N;
    const int32_t row0 = ((int32_t)(blockIdx.x / vector_blocks) * (F32_WARPS / ACROSS) + warp / ACROSS) * R;
    const int32_t vectors = vector_count(table, p) - vector0, rows = p.rows - row0;
    if (vectors <= 0 || rows <= 0)
        return; // whole warps; no barrier follows
    const float *weight[R], *x[N];
#pragma unroll
    for (int r = 0; r < R; r++)
        weight[r] = (const float *)p.weight.data + (int64_t)(p.row0 + row0 + min(r, rows - 1)) * p.weight.cols;
#pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = vector_at(table, p, vector0 + min(n, vectors - 1));
    float sum[N][R] = {};
    multiply_lane<R, N, WHOLE>(sum, weight, x, p.weight.cols);
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
            write_output(p, vector0 + n, row0 + r, mine[turn]);
    }
}

template <int R, int N, int ACROSS>
static kern_status launch_f32(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int vector_blocks = cuda_blocks(vectors, N * ACROSS);
    const int blocks = cuda_blocks(p->rows, R * (F32_WARPS / ACROSS)) * vector_blocks;
    const bool whole = p->weight.cols % 4 == 0 && (uintptr_t)p->x % 16 == 0 && (uintptr_t)p->weight.data % 16 == 0;
    auto *kernel = whole ? f32_kernel<R, N, ACROSS, true> : f32_kernel<R, N, ACROSS, false>;
    kernel<<<blocks, F32_WARPS * 32, 0, step->stream>>>(step->table, *p, vector_blocks);
    return cuda_launched();
}

static kern_status launch_f32_tiles(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    if (vectors == 1)
        return launch_f32<1, 1, 1>(step, p, vectors);
    if (vectors <= 4)
        return launch_f32<2, 4, 1>(step, p, vectors);
    if ((int64_t)cuda_blocks(vectors, 16) * cuda_blocks(p->rows, 32) >= step->cuda->processors)
        return launch_f32<8, 8, 2>(step, p, vectors);
    return launch_f32<2, 8, 1>(step, p, vectors);
}

kern_status cuda_product_launch(const cuda_step *step, const cuda_product *product) {
    const int64_t vectors = product->wanted ? step->logits : (int64_t)step->tokens * product->groups;
    if (vectors == 0)
        return KERN_OK;
    return product->weight.bf16 ? launch_bf16_tiles(step, product, vectors) : launch_f32_tiles(step, product, vectors);
}

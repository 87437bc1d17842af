// SPDX-License-Identifier: Apache-2.0
// y = x W^T + bias + residual. The bits of an output are a function of its vector and its weight row: how many vectors
// there are chooses tiles, never the order of a sum.
//
// bf16 weights. Tensor cores at every batch: weights are operand A, one 16-byte load a lane and tile of 16 x 16, as
// they lie in memory; vectors are operand B, 8 to a tile. An activation x is split into two bf16 numbers, hi = bf16(x)
// and lo = bf16(x - hi), which leaves 2^-18 of it, and both are multiplied into one float32 sum. The warps of a block
// share its rows and split K into contiguous parts; how many there are is a function of the width alone
// (product_warps). Their sums are added in the order of the parts through shared memory. Within a part: columns
// ascending, hi before lo.
//   Up to 8 vectors (few.cuh): 768 x 768 is 48 blocks, 4 of it side by side 192, 32000 x 768 two on each
//   multiprocessor. Many vectors: products_many.cu where the device has it, else a block owns up to 64 rows and 32
//   vectors; blocks that share weights follow each other.
//
// float32 weights. Training and evaluation: gemm.cu. Otherwise a warp owns a tile of rows and vectors; lane l sums over
// k = 4 l + 128 j + (0 .. 3), ascending, by fused multiply-add, and the lanes are added by halving.
#include "kernels/cuda/chain.cuh"
#include "kernels/cuda/few.cuh"
#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/products_many.cuh"

enum {
    F32_WARPS = 8,
    NORM_VECTORS = 4,           // up to which a product makes its norm
    MOST_MIDDLING = 64,         // vectors up to which a whole step is quicker without products_many.cu, as measured
    MOST_FEW_BYTES = 48 * 1024, // of shared memory
};

static __device__ __forceinline__ const float *vector_at(const cuda_table *table, const cuda_product &p, int32_t v) {
    return p.x + (int64_t)product_source(table, p, v) * p.cols;
}

// -------------------------------------------------------------------------------------------------------------- bf16

// Adds the products of weight tiles [begin, end) of R row tiles with N tiles of vectors. Loads of AHEAD tiles of K are
// in flight before the first is used.
template <int R, int N, bool EVEN, int AHEAD>
static __device__ __forceinline__ void multiply_part(float (&sum)[R][N][4], const uint4 *const (&weight)[R],
                                                     const float *const (&x)[N], int32_t cols, bool fast, int begin,
                                                     int end) {
    const int lane = threadIdx.x % 32;
    for (int tile = begin; tile < end; tile += AHEAD) {
        uint4 a[AHEAD][R];
        float2 pair[AHEAD][N][2];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (tile + i < end) {
#pragma unroll
                for (int r = 0; r < R; r++)
                    a[i][r] = product_load_tile(weight[r] + (int64_t)(tile + i) * 32);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int32_t k = (tile + i) * PRODUCT_TILE + lane % 4 * 2;
                    pair[i][n][0] = product_load_pair<EVEN>(x[n], k, cols);
                    pair[i][n][1] = product_load_pair<EVEN>(x[n], k + 8, cols);
                }
            }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (tile + i < end) {
#pragma unroll
                for (int n = 0; n < N; n++) {
                    uint32_t hi[2], lo[2];
                    product_split_pair(pair[i][n][0], hi[0], lo[0]);
                    product_split_pair(pair[i][n][1], hi[1], lo[1]);
#pragma unroll
                    for (int r = 0; r < R; r++)
                        product_multiply(sum[r][n], a[i][r], hi[0], hi[1]);
#pragma unroll
                    for (int r = 0; r < R; r++)
                        if (!fast)
                            product_multiply(sum[r][n], a[i][r], lo[0], lo[1]);
                }
            }
    }
}

// The warps' sums of one row tile, added in their order, become outputs. partial: (warps, N * 8, PRODUCT_COLUMN).
// GATED: the tile is of part 1 and its thread has written the same place of part 0.
template <int N, bool GATED>
static __device__ void finish_tile(const cuda_product &p, const cuda_product_part &part, const float (&sum)[N][4],
                                   float *partial, int32_t row0, int32_t vector0, int32_t vectors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    constexpr int FLOATS = N * PRODUCT_VECTORS * PRODUCT_COLUMN;
    __syncthreads(); // the tile before has been read
#pragma unroll
    for (int n = 0; n < N; n++)
        product_put_sum(sum[n], partial + warp * FLOATS + n * PRODUCT_VECTORS * PRODUCT_COLUMN, lane);
    __syncthreads();
    for (int i = threadIdx.x; i < N * PRODUCT_VECTORS * PRODUCT_TILE; i += blockDim.x) {
        const int n = i / PRODUCT_TILE, r = i % PRODUCT_TILE;
        const float total = product_add_warps(partial + n * PRODUCT_COLUMN + r, FLOATS, warps);
        const int32_t row = row0 + r - part.row0;
        if (row < 0 || row >= part.rows || n >= vectors)
            continue;
        const float y = product_write(p, part, vector0 + n, row, total);
        if (GATED) {
            const int64_t at = (int64_t)(vector0 + n) * part.rows + row;
            p.gated[at] = cuda_activate(p.activation, p.part[0].y[at]) * y;
        }
    }
}

// A block: R row tiles, N tiles of vectors. Row tiles past the part's last are its last again and not written. GATED:
// the row tiles are of parts 0 and 1 by turns.
template <int R, int N, bool EVEN, bool GATED, int AHEAD>
static __global__ void __launch_bounds__(PRODUCT_SPLIT * 32)
    bf16_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, int vector_blocks) {
    extern __shared__ float partial[];
    cuda_begin();
    constexpr int SIDES = GATED ? 2 : 1, DEEP = R / SIDES; // row tiles of a part
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int tiles = (p.cols + PRODUCT_TILE - 1) / PRODUCT_TILE; // of one row tile
    const int begin = tiles * warp / warps, end = tiles * (warp + 1) / warps;
    int index = (int)(blockIdx.x / vector_blocks);
    const int own = GATED ? 0 : product_find_part(p, index, [](const cuda_product_part &part) {
        return (product_row_tiles(part) + DEEP - 1) / DEEP;
    });
    const uint4 *weight[R];
    int tile[R], last = 0;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const cuda_product_part &part = p.part[own + r % SIDES];
        last = (part.row0 + part.rows - 1) / PRODUCT_TILE;
        tile[r] = part.row0 / PRODUCT_TILE + index * DEEP + r / SIDES;
        weight[r] = (const uint4 *)part.weight + (int64_t)min(tile[r], last) * tiles * 32 + lane;
    }
    const int32_t vector0 = (int32_t)(blockIdx.x % vector_blocks) * N * PRODUCT_VECTORS;
    const int32_t vectors = product_vectors(table, p) - vector0;
    cuda_await();
    if (vectors <= 0)
        return;
    const float *x[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int32_t v = n * PRODUCT_VECTORS + lane / 4;
        x[n] = v < vectors ? vector_at(table, p, vector0 + v) : NULL;
    }
    float sum[R][N][4] = {};
    multiply_part<R, N, EVEN, AHEAD>(sum, weight, x, p.cols, p.fast, begin, end);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const cuda_product_part part = p.part[own + r % SIDES];
        if (tile[r] * PRODUCT_TILE >= part.row0 + part.rows)
            continue;
        if (GATED && r % SIDES == 1)
            finish_tile<N, true>(p, part, sum[r], partial, tile[r] * PRODUCT_TILE, vector0, vectors);
        else
            finish_tile<N, false>(p, part, sum[r], partial, tile[r] * PRODUCT_TILE, vector0, vectors);
    }
}

// ------------------------------------------------------------------------------------------------------- few vectors

template <bool EVEN, bool GATED, bool NORM>
static __global__ void __launch_bounds__(PRODUCT_SPLIT * 32)
    few_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, int items) {
    extern __shared__ __align__(16) float memory[]; // two `partial`, the vectors
    cuda_begin();
    const int partial = 2 * (GATED ? 2 : 1) * (int)(blockDim.x / 32) * PRODUCT_SUMS;
    product_few<EVEN, GATED, NORM>(table, p, {(int32_t)blockIdx.x, (int32_t)gridDim.x, items}, cuda_whole_block(),
                                   memory, memory + partial, cuda_await);
}

static bool is_even(const cuda_product *p) {
    return p->cols % 2 == 0 && (uintptr_t)p->x % 8 == 0;
}

static size_t few_bytes(const cuda_product *p, int64_t vectors) {
    const int partial = 2 * (p->gated ? 2 : 1) * product_warps(p->cols) * PRODUCT_SUMS;
    return sizeof(float) * (size_t)partial + product_vectors_bytes(p->cols, vectors);
}

static bool has_few(const cuda_product *p, int64_t vectors) {
    const int tiles = (p->cols + PRODUCT_TILE - 1) / PRODUCT_TILE, warps = product_warps(p->cols);
    return vectors <= PRODUCT_VECTORS && (tiles + warps - 1) / warps <= PRODUCT_HELD &&
           few_bytes(p, vectors) <= MOST_FEW_BYTES;
}

// Pieces of `deep` row tiles that the parts have together.
static int pieces_of(const cuda_product *p, int deep) {
    int pieces = 0;
    for (int i = 0; i < (p->gated ? 1 : p->parts); i++)
        pieces += cuda_blocks(product_row_tiles(p->part[i]), deep);
    return pieces;
}

bool cuda_product_takes_gated(const cuda_product *p) {
    return p->bf16 && p->parts == 2 && is_even(p) && p->part[0].row0 % PRODUCT_TILE == 0 &&
           p->part[1].row0 % PRODUCT_TILE == 0;
}

static bool is_phase(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    return p->bf16 && vectors <= PRODUCT_VECTORS && is_even(p) &&
           cuda_chain_takes(step, cuda_chain_product_bytes(p, step->tokens));
}

static bool has_many(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    return p->bf16 && vectors > MOST_MIDDLING && cuda_has_many(step->cuda);
}

// Of few vectors every block makes the norm: worth it while they are very few, or where a phase of its own would be
// slower.
bool cuda_product_takes_norm(const cuda_step *step, const cuda_product *p) {
    const int64_t vectors = step->tokens;
    if (p->wanted && step->logits != step->tokens)
        return false; // the norm is of all tokens: they may be many, and the launch is sized for those wanted
    if (has_many(step, p, vectors))
        return cuda_many_takes_norm(p);
    if (is_phase(step, p, vectors))
        return p->norm.wide;
    return p->bf16 && vectors > 0 && vectors <= NORM_VECTORS && has_few(p, vectors) && is_even(p) && p->norm.wide;
}

template <bool EVEN, bool GATED, bool NORM>
static kern_status start_few(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int items = pieces_of(p, 1), most = 2 * step->cuda->processors;
    return cuda_start(step, few_kernel<EVEN, GATED, NORM>, items < most ? items : most, product_warps(p->cols) * 32,
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
    const int warps = product_warps(p->cols), vector_blocks = cuda_blocks(vectors, N * PRODUCT_VECTORS);
    const size_t shared = sizeof(float) * warps * N * PRODUCT_VECTORS * PRODUCT_COLUMN;
    const int blocks = pieces_of(p, DEEP) * vector_blocks;
    auto *kernel = is_even(p) ? bf16_kernel<DEEP, N, true, false, AHEAD> : bf16_kernel<DEEP, N, false, false, AHEAD>;
    return cuda_start(step, kernel, blocks, warps * 32, shared, step->table, *p, vector_blocks);
}
template <int DEEP, int N>
static kern_status launch_gated(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int warps = product_warps(p->cols), vector_blocks = cuda_blocks(vectors, N * PRODUCT_VECTORS);
    const size_t shared = sizeof(float) * warps * N * PRODUCT_VECTORS * PRODUCT_COLUMN;
    return cuda_start(step, bf16_kernel<2 * DEEP, N, true, true, 1>, pieces_of(p, DEEP) * vector_blocks, warps * 32,
                      shared, step->table, *p, vector_blocks);
}

// Many vectors without products_many.cu: the most rows a block that still gives every multiprocessor one.
static kern_status launch_bf16_tiles(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    const int64_t blocks = (int64_t)cuda_blocks(vectors, 4 * PRODUCT_VECTORS) * pieces_of(p, 1);
    const int processors = step->cuda->processors;
    if (has_few(p, vectors))
        return launch_few(step, p, vectors);
    if (has_many(step, p, vectors))
        return cuda_many_launch(step, p, vectors);
    if (p->gated)
        return vectors > 2 * PRODUCT_VECTORS ? blocks >= 2 * processors ? launch_gated<2, 4>(step, p, vectors)
                                                                        : launch_gated<1, 4>(step, p, vectors)
                                             : launch_gated<1, 2>(step, p, vectors);
    if (vectors <= PRODUCT_VECTORS)
        return launch_bf16<1, 1, 8>(step, p, vectors);
    if (vectors <= 2 * PRODUCT_VECTORS)
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
        p.part[product_find_part(p, index, [](const cuda_product_part &of) { return (of.rows + ROWS - 1) / ROWS; })];
    const int32_t vector0 = ((int32_t)(blockIdx.x % vector_blocks) * ACROSS + warp % ACROSS) * N;
    const int32_t row0 = index * ROWS + warp / ACROSS * R;
    const int32_t vectors = product_vectors(table, p) - vector0, rows = part.rows - row0;
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
            product_write(p, part, vector0 + n, row0 + r, mine[turn]);
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

// Training and evaluation: a token's bits may depend on the batch.
static kern_status launch_merged(const cuda_step *step, const cuda_product *p, int64_t vectors) {
    cuda_gemm gemm[CUDA_PARTS] = {};
    for (int i = 0; i < p->parts; i++) {
        const cuda_product_part &part = p->part[i];
        gemm[i].a = {p->x, p->cols, false, false};
        gemm[i].b = {(const float *)part.weight + (int64_t)part.row0 * p->cols, p->cols, false, false};
        gemm[i].c = part.y;
        gemm[i].ldc = gemm[i].n = part.rows;
        gemm[i].m = vectors;
        gemm[i].k = p->cols;
        gemm[i].bias = part.bias ? part.bias + part.row0 : NULL;
        gemm[i].residual = part.residual;
    }
    return cuda_gemm_launch(step, step->cuda->workspace, gemm, p->parts);
}

kern_status cuda_product_launch(const cuda_step *step, const cuda_product *asked) {
    const int64_t vectors = asked->wanted ? step->logits : (int64_t)step->tokens * asked->groups;
    if (vectors == 0)
        return KERN_OK;
    cuda_product product = *asked;
    product.fast = step->cuda->fast;
    product.looks = step->followed;
    if (is_phase(step, &product, vectors))
        return cuda_chain_product(step, &product, pieces_of(&product, 1));
    if (!product.bf16 && step->merge && !product.wanted)
        return launch_merged(step, &product, vectors);
    cuda_copies_forget(step);
    return product.bf16 ? launch_bf16_tiles(step, &product, vectors) : launch_f32_tiles(step, &product, vectors);
}

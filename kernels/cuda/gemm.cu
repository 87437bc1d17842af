// SPDX-License-Identifier: Apache-2.0
// c = a b^T on tensor cores, with the accuracy of float32; gemm.cuh.
//
// Packing. An operand is written into the workspace as bf16, in blocks of 128 i x 32 k, of each first all of its limb 0
// (the number rounded), then limb 1 (what that left), then 2; a block is made of core matrices of 8 x 8, 128 bytes
// each, ordered by k, then i. A core matrix has rows of memory as its rows, so one that lies turned is turned when it
// is loaded (ldmatrix.trans): all reads and writes of the packing are of whole lines. Past the edges are zeros.
// Operands go in slices of at most OPERAND_BYTES and SLICE_K.
//
// Products. A block of threads owns 128 x 128 of c, a warp 64 x 32 of it; blocks of both operands come by cp.async,
// some ahead. The six products of the limbs of one block, least weight first, are summed apart and then added to the
// total, as tensor cores cut where float32 additions round. Where tiles are few, k is split over blocks of threads:
// their sums go through the workspace and are added in order by a launch of its own. How it is split is a function of
// the shape, so the bits are. A `fast` device has the products of cublas.cu and gemm_few.cu instead.
#include <cuda_pipeline_primitives.h>

#include "kernels/cuda/cublas.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sums.cuh"

enum {
    TILE = 128,       // rows of a packed block
    DEPTH = 32,       // its k
    CORE = 128,       // bytes of a core matrix
    CORES = TILE / 8, // of a block, of one group of 8 k
    LIMBS = 3,
    LIMB_BYTES = TILE * DEPTH * 2, // of a block
    BLOCK_BYTES = LIMBS * LIMB_BYTES,
    STAGE_BYTES = 2 * BLOCK_BYTES,
    STAGES = 2,
    THREADS = 256,
    WARP_ROWS = 64,
    WARP_COLUMNS = 32,
    SLICE_K = 8192,
    OPERAND_BYTES = 32 << 20,
    SPLIT_TILES = 264, // tiles that a launch should have, and most that split sums have
    LEAST_SPLIT = 8,   // blocks of k worth a part of their own
};

static_assert(SPLIT_TILES * TILE * TILE <= CUDA_GEMM_PARTIALS, "the room for sums in parts");

// ----------------------------------------------------------------------------------------------------------- packing

struct pack_job {
    cuda_operand from;
    int64_t i0, k0;  // of the slice
    int32_t rows, k; // i and k that exist in it
    int32_t k_blocks;
    bool wide;
    char *to;
};

// A warp: 8 rows of memory, 32 columns; 4 lanes of a row read a line, 8 lanes of a core matrix write one.
static __global__ void __launch_bounds__(THREADS) pack_kernel(const pack_job job) {
    cuda_begin();
    cuda_await();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t row = ((int32_t)blockIdx.x * (THREADS / 32) + warp) * 8 + lane % 8;
    const int32_t column = ((int32_t)blockIdx.y * 4 + lane / 8) * 8;
    const bool turned = job.from.turned;
    const int32_t i = turned ? column : row, k = turned ? row : column;
    if (k >= job.k_blocks * DEPTH)
        return;
    const bool there = row < (turned ? job.k : job.rows);
    float x[8];
    cuda_operand_eight(job.from, (turned ? job.k0 : job.i0) + row, (turned ? job.i0 : job.k0) + column,
                       there ? (turned ? job.rows : job.k) - column : 0, job.wide, x);
    char *to = job.to + ((int64_t)(i / TILE) * job.k_blocks + k / DEPTH) * BLOCK_BYTES +
               (k % DEPTH / 8 * CORES + i % TILE / 8) * CORE + row % 8 * 16;
#pragma unroll
    for (int limb = 0; limb < LIMBS; limb++) {
        uint32_t pair[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const __nv_bfloat162 rounded = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]);
            pair[j] = *(const uint32_t *)&rounded;
            x[2 * j] -= __low2float(rounded);
            x[2 * j + 1] -= __high2float(rounded);
        }
        *(uint4 *)(to + limb * LIMB_BYTES) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

// ---------------------------------------------------------------------------------------------------------- products

// Four core matrices, the second k or second i first as the operand's registers have it.
template <bool TURNED>
static __device__ __forceinline__ void load_cores(const char *block, int k_core, int i_core, uint32_t (&x)[4]) {
    const char *row = block + (k_core * CORES + i_core) * CORE + threadIdx.x % 8 * 16;
    if (TURNED)
        mma_load_turned(row, x);
    else
        mma_load(row, x);
}

// sum += the product of one limb of a and one of b, 16 k from k16 on.
template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void multiply_limbs(const char *a, const char *b, int k16, int warp_row,
                                                      int warp_column, float (&sum)[4][4][4]) {
    const int matrix = threadIdx.x % 32 / 8;
    uint32_t left[4][4], right[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_cores<A_TURNED>(a, 2 * k16 + matrix / 2, warp_row / 8 + 2 * i + matrix % 2, left[i]);
#pragma unroll
    for (int j = 0; j < 2; j++)
        load_cores<B_TURNED>(b, 2 * k16 + matrix % 2, warp_column / 8 + 2 * j + matrix / 2, right[j]);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            mma_bf16(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
}

template <bool A_TURNED, bool B_TURNED>
static __device__ __forceinline__ void multiply_block(const char *a, const char *b, int warp_row, int warp_column,
                                                      float (&total)[4][4][4]) {
    constexpr int LEFT[6] = {2, 0, 1, 1, 0, 0}, RIGHT[6] = {0, 2, 1, 0, 1, 0};
    float sum[4][4][4] = {};
#pragma unroll
    for (int pair = 0; pair < 6; pair++)
#pragma unroll 1
        for (int k16 = 0; k16 < DEPTH / 16; k16++)
            multiply_limbs<A_TURNED, B_TURNED>(a + LEFT[pair] * LIMB_BYTES, b + RIGHT[pair] * LIMB_BYTES, k16, warp_row,
                                               warp_column, sum);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                total[i][j][e] = __fadd_rn(total[i][j][e], sum[i][j][e]);
}

struct product_job {
    const char *a, *b; // packed
    int32_t k_blocks;
    cuda_gemm_output out;
};

static __device__ __forceinline__ void fetch_stage(const product_job &job, char *stage, int64_t block_a,
                                                   int64_t block_b) {
    const char *a = job.a + block_a * BLOCK_BYTES, *b = job.b + block_b * BLOCK_BYTES;
#pragma unroll
    for (int at = 0; at < BLOCK_BYTES; at += THREADS * 16) {
        const int own = at + (int)threadIdx.x * 16;
        __pipeline_memcpy_async(stage + own, a + own, 16);
        __pipeline_memcpy_async(stage + BLOCK_BYTES + own, b + own, 16);
    }
}

// Grid: tiles of n, tiles of m, parts of k.
template <bool A_TURNED, bool B_TURNED>
static __global__ void __launch_bounds__(THREADS, 1) product_kernel(const __grid_constant__ product_job job) {
    extern __shared__ __align__(128) char memory[];
    cuda_begin();
    cuda_await();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;
    const int first = (int)((int64_t)job.k_blocks * blockIdx.z / gridDim.z);
    const int blocks = (int)((int64_t)job.k_blocks * (blockIdx.z + 1) / gridDim.z) - first;
    const int64_t a0 = (int64_t)blockIdx.y * job.k_blocks + first, b0 = (int64_t)blockIdx.x * job.k_blocks + first;
    float total[4][4][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < blocks)
            fetch_stage(job, memory + s * STAGE_BYTES, a0 + s, b0 + s);
        __pipeline_commit();
    }
    for (int block = 0; block < blocks; block++) {
        __pipeline_wait_prior(STAGES - 2);
        __syncthreads();
        const int next = block + STAGES - 1;
        if (next < blocks)
            fetch_stage(job, memory + next % STAGES * STAGE_BYTES, a0 + next, b0 + next);
        __pipeline_commit();
        const char *stage = memory + block % STAGES * STAGE_BYTES;
        multiply_block<A_TURNED, B_TURNED>(stage, stage + BLOCK_BYTES, warp_row, warp_column, total);
    }
    const cuda_gemm_output out = cuda_gemm_part(job.out, (int)blockIdx.z);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                cuda_gemm_write_pair(out, (int32_t)blockIdx.y * TILE + warp_row + 16 * i + 8 * half + lane / 4,
                                     (int32_t)blockIdx.x * TILE + warp_column + 8 * j + lane % 4 * 2,
                                     total[i][j][2 * half], total[i][j][2 * half + 1]);
}

// The parts of k in their order.
static __global__ void __launch_bounds__(THREADS)
    add_parts_kernel(const __grid_constant__ cuda_gemm_output out, int parts) {
    cuda_begin();
    cuda_await();
    const int32_t row = cuda_plane_item(), column = cuda_plane_column();
    if (row >= out.m || column >= out.n)
        return;
    const int64_t plane = (int64_t)out.m * out.n, at = (int64_t)row * out.n + column;
    float sum = out.partial[at];
#pragma unroll 4
    for (int part = 1; part < parts; part++)
        sum = __fadd_rn(sum, out.partial[part * plane + at]);
    cuda_gemm_write(out, row, column, sum);
}

static kern_status add_parts(const cuda_step *step, const cuda_gemm_output &out, int parts) {
    const cuda_plane plane = cuda_plane_of(out.m, out.n);
    return cuda_start(step, add_parts_kernel, plane.grid, plane.block, 0, out, parts);
}

// ----------------------------------------------------------------------------------------------------------- launches

static int32_t k_blocks_of(int64_t k) {
    return cuda_blocks(k, DEPTH);
}

size_t cuda_gemm_bytes(const kern_cuda *cuda) {
    return cuda->fast ? cuda_cublas_bytes() : sizeof(float) * CUDA_GEMM_PARTIALS + 2 * (size_t)OPERAND_BYTES;
}

static kern_status pack(const cuda_step *step, const cuda_operand &from, int64_t i0, int64_t rows, int64_t k0,
                        int64_t k, char *to) {
    pack_job job = {from, i0, k0, (int32_t)rows, (int32_t)k, k_blocks_of(k), false, to};
    const int64_t column0 = from.turned ? i0 : k0;
    job.wide = cuda_operand_is_wide(from) && column0 % 4 == 0;
    const int64_t i_padded = cuda_blocks(rows, TILE) * (int64_t)TILE, k_padded = job.k_blocks * (int64_t)DEPTH;
    const int64_t lines = from.turned ? k_padded : i_padded, columns = from.turned ? i_padded : k_padded;
    const dim3 grid((unsigned)cuda_blocks(lines, 8 * THREADS / 32), (unsigned)(columns / 32));
    return cuda_start(step, pack_kernel, grid, THREADS, 0, job);
}

template <bool A_TURNED, bool B_TURNED>
static kern_status start(const cuda_step *step, const product_job &job, dim3 grid) {
    auto *kernel = product_kernel<A_TURNED, B_TURNED>;
    constexpr size_t bytes = (size_t)STAGES * STAGE_BYTES;
    const kern_status status = cuda_allow_shared(kernel, bytes);
    return status ? status : cuda_start(step, kernel, grid, THREADS, bytes, job);
}

static kern_status start_turned(const cuda_step *step, const product_job &job, dim3 grid, bool a, bool b) {
    if (a)
        return b ? start<true, true>(step, job, grid) : start<true, false>(step, job, grid);
    return b ? start<false, true>(step, job, grid) : start<false, false>(step, job, grid);
}

// A slice's product, its operands packed.
static kern_status multiply(const cuda_step *step, const cuda_gemm &gemm, product_job job, float *partial) {
    const int64_t tiles = (int64_t)cuda_blocks(job.out.m, TILE) * cuda_blocks(job.out.n, TILE);
    const int64_t most = job.k_blocks / LEAST_SPLIT, wanted = SPLIT_TILES / tiles;
    const int parts = (int)(wanted < 1 ? 1 : wanted < most ? wanted : most < 1 ? 1 : most);
    const dim3 grid((unsigned)cuda_blocks(job.out.n, TILE), (unsigned)cuda_blocks(job.out.m, TILE), (unsigned)parts);
    job.out.partial = parts > 1 ? partial : NULL;
    const kern_status status = start_turned(step, job, grid, gemm.a.turned, gemm.b.turned);
    return status || parts == 1 ? status : add_parts(step, job.out, parts);
}

static int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// The products of a packed slice of a, rows [m0, m0 + m) and k [k0, k0 + k), with all of one b.
static kern_status multiply_slice(const cuda_step *step, char *a, const cuda_gemm &g, int64_t rows, int64_t m0,
                                  int64_t m, int64_t k0, int64_t k, float *partial) {
    char *b = a + OPERAND_BYTES;
    kern_status status = KERN_OK;
    for (int64_t n0 = 0; !status && n0 < g.n; n0 += rows) {
        const int64_t n = least(rows, g.n - n0);
        const product_job job = {a, b, k_blocks_of(k), cuda_gemm_output_of(g, m0, m, n0, n, k0 == 0)};
        status = pack(step, g.b, n0, n, k0, k, b);
        if (!status)
            status = multiply(step, g, job, partial);
    }
    return status;
}

static kern_status multiply_all(const cuda_step *step, char *workspace, const cuda_gemm *gemm, int count) {
    const int64_t all_m = gemm->m, all_k = gemm->k, deepest = k_blocks_of(least(all_k, SLICE_K)) * (int64_t)DEPTH;
    const int64_t rows = OPERAND_BYTES / (deepest * 2 * LIMBS) / TILE * TILE; // of a slice
    char *a = workspace + sizeof(float) * CUDA_GEMM_PARTIALS;
    kern_status status = KERN_OK;
    for (int64_t k0 = 0; k0 < all_k; k0 += SLICE_K)
        for (int64_t m0 = 0; !status && m0 < all_m; m0 += rows) {
            const int64_t m = least(rows, all_m - m0), k = least(SLICE_K, all_k - k0);
            status = pack(step, gemm->a, m0, m, k0, k, a);
            for (int i = 0; !status && i < count; i++)
                status = multiply_slice(step, a, gemm[i], rows, m0, m, k0, k, (float *)workspace);
        }
    return status;
}

kern_status cuda_gemm_launch(const cuda_step *step, char *workspace, const cuda_gemm *gemm, int count) {
    if (!step->cuda->fast)
        return multiply_all(step, workspace, gemm, count);
    kern_status status = KERN_OK;
    for (int i = 0; !status && i < count; i++) {
        const cuda_gemm &g = gemm[i];
        bool taken = false;
        status = cuda_gemm_few(step, workspace, g, &taken);
        if (!status && !taken)
            status = cuda_cublas_run(step, workspace, g);
        cuda_copies_written(step, g.c, sizeof(float) * (size_t)((g.m - 1) * g.ldc + g.n));
    }
    return status;
}

// -------------------------------------------------------------------------------------------------------- column sums

enum { LEAST_ROWS = 16 };

static __global__ void __launch_bounds__(CUDA_SUM_THREADS)
    column_sum_kernel(const float *x, int32_t rows, int32_t width, int32_t each, float *partial) {
    cuda_begin();
    cuda_await();
    cuda_sum_columns<1>(rows, each, width, partial, [&](int32_t row, int32_t c, float(&sum)[1]) {
        sum[0] = __fadd_rn(sum[0], x[(int64_t)row * width + c]);
    });
}

size_t cuda_column_sum_bytes(int64_t width) {
    return cuda_sum_bytes(width, CUDA_SUM_BLOCKS);
}

kern_status cuda_column_sum(const cuda_step *step, float *workspace, const float *x, int64_t rows, int32_t width,
                            float *sum) {
    if (rows > INT32_MAX)
        return KERN_UNSUPPORTED;
    const cuda_sum_cut cut = cuda_sum_cut_of(rows, LEAST_ROWS, CUDA_SUM_BLOCKS);
    const dim3 shape = cuda_sum_shape(width), grid((unsigned)cut.blocks, (unsigned)cuda_blocks(width, (int)shape.x));
    cuda_copies_written(step, workspace, cuda_column_sum_bytes(width));
    cuda_copies_written(step, sum, sizeof(float) * (size_t)width);
    const kern_status status =
        cuda_start(step, column_sum_kernel, grid, shape, 0, x, (int32_t)rows, width, cut.each, workspace);
    return status ? status : cuda_add_partials(step, {workspace, sum, width, cut.blocks, width, 1, 1});
}

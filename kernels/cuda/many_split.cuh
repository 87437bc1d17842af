// SPDX-License-Identifier: Apache-2.0
// The first launch of products with many vectors (many.cuh): it writes the vectors into the workspace, split into hi
// and lo, as the tensor cores read them; a norm before the product is made there. Vectors go in slices of SLICE, so
// that the workspace is a function of the width and a slice stays in the second-level cache.
//
// Scratch: for the vectors of each item, for each tile of 16 columns, for each group of 8 of the vectors, hi then lo:
// two core matrices of 8 vectors x 8 columns. An item's vectors are one run of memory, as the tiles of a row tile of
// weights are.
#ifndef KERNELS_CUDA_MANY_SPLIT_CUH
#define KERNELS_CUDA_MANY_SPLIT_CUH

#include "kernels/cuda/few.cuh"

enum {
    CORE = 128,               // bytes of a core matrix
    SLICE = 2048,             // vectors of a launch
    SLICE_ROOM = SLICE + 128, // and the last item's
    NORMS = 4,                // of a block, where a warp makes one
};

// What a launch knows beside the product.
struct many_shape {
    char *scratch;
    int32_t groups;  // of 8 vectors, of an item
    int32_t vector0; // of the slice
    int32_t row_tiles, shared;
    int32_t cluster;           // blocks that the parts of K are spread over
    int32_t slots, slot_bytes; // of the ring
    bool wide;                 // x is read four columns at a time
};

static __device__ __forceinline__ int32_t slice_vectors(const cuda_table *table, const cuda_product &p,
                                                        const many_shape &shape) {
    return min(product_vectors(table, p) - shape.vector0, (int32_t)SLICE);
}

// --------------------------------------------------------------------------------------------------- the split vectors

// Where columns 8 k .. 8 k + 7 of a vector go; their lo is 2 CORE further.
template <int LIMBS>
static __device__ __forceinline__ char *scratch_at(const cuda_product &p, const many_shape &shape, int32_t v,
                                                   int32_t k) {
    const int32_t group = v / PRODUCT_VECTORS, item = group / shape.groups;
    const int64_t run = ((int64_t)item * product_tiles(p.cols) + k / 2) * shape.groups + group % shape.groups;
    return shape.scratch + run * (LIMBS * 2 * CORE) + k % 2 * CORE + v % PRODUCT_VECTORS * 16;
}

// Eight columns of a vector, zeros past the last.
struct many_eight {
    cuda_quad half[2];

    // NORM: what it normalises.
    template <bool NORM>
    __device__ __forceinline__ void load(const cuda_table *table, const cuda_product &p, const many_shape &shape,
                                         int32_t v, int32_t column) {
        if (NORM) {
            const int64_t at = (int64_t)(shape.vector0 + v) * p.norm.width;
            half[0] = cuda_norm_input(p.norm, at, column);
            half[1] = cuda_norm_input(p.norm, at, column + 4);
            return;
        }
        const float *x = p.x + (int64_t)product_source(table, p, shape.vector0 + v) * p.cols + column;
        half[0] = cuda_load(x, p.cols - column, shape.wide);
        half[1] = cuda_load(x + 4, p.cols - column - 4, shape.wide);
    }
    template <int LIMBS> __device__ __forceinline__ void store(char *to) const {
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            product_split_pair(make_float2(half[i / 2].v[i % 2 * 2], half[i / 2].v[i % 2 * 2 + 1]), hi[i], lo[i]);
        *(uint4 *)to = make_uint4(hi[0], hi[1], hi[2], hi[3]);
        if (LIMBS == 2)
            *(uint4 *)(to + 2 * CORE) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
    }
};

// A warp: 8 vectors, 32 columns; 4 lanes of a vector read a line, 8 lanes of a core matrix write one.
template <int LIMBS>
static __global__ void __launch_bounds__(256)
    split_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, const many_shape shape) {
    cuda_begin();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t v = (int32_t)blockIdx.x * PRODUCT_VECTORS + lane % 8;
    const int32_t k = ((int32_t)blockIdx.y * 8 + warp) * 4 + lane / 8;
    const int32_t vectors = slice_vectors(table, p, shape);
    cuda_await();
    if (v >= vectors || k / 2 >= product_tiles(p.cols))
        return; // what is past the vectors gives outputs that nobody writes
    many_eight eight;
    eight.load<false>(table, p, shape, v, 8 * k);
    eight.store<LIMBS>(scratch_at<LIMBS>(p, shape, v, k));
}

// The same behind the norm, whose y is written too. A team of LANES makes one norm, as in norm.cu.
template <int LANES, int CACHE, int LIMBS>
static __global__ void __launch_bounds__(LANES == CUDA_WARP ? CUDA_WARP * NORMS : LANES)
    normalise_kernel(const cuda_table *table, const __grid_constant__ cuda_product p, const many_shape shape) {
    __shared__ float shared[LANES / CUDA_WARP];
    cuda_begin();
    const cuda_norm &n = p.norm;
    const int32_t i =
        LANES == CUDA_WARP ? (int32_t)blockIdx.x * NORMS + (int32_t)threadIdx.x / CUDA_WARP : (int32_t)blockIdx.x;
    const int32_t v = i / n.groups, column = i % n.groups * n.width;
    const int32_t vectors = slice_vectors(table, p, shape);
    cuda_await();
    if (v >= vectors)
        return;
    const int64_t at = (int64_t)shape.vector0 * n.groups + i;
    float *y = n.y + at * n.width;
    cuda_normalise<CACHE>(n, at, cuda_team<LANES>(), shared, [&](int32_t j, const cuda_quad &q) {
        uint2 hi, lo;
        product_split_pair(make_float2(q.v[0], q.v[1]), hi.x, lo.x);
        product_split_pair(make_float2(q.v[2], q.v[3]), hi.y, lo.y);
        char *to = scratch_at<LIMBS>(p, shape, v, (column + j) / 8) + (column + j) % 8 * 2;
        cuda_store(y + j, q, 4, true);
        *(uint2 *)to = hi;
        if (LIMBS == 2)
            *(uint2 *)(to + 2 * CORE) = lo;
    });
}

#endif

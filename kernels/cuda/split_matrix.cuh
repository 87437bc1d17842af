// SPDX-License-Identifier: Apache-2.0
// Matrices of split.cuh's numbers in shared memory, as both kinds of products on the tensor cores read them: runs of 8
// numbers, those of the same columns one after another, so that 8 rows are a core matrix of wgmma (wgmma.cuh) and stand
// in different banks for ldmatrix. A lower triangle has the tiles on and below the diagonal alone.
//
// A warpgroup's products are those of four strips (split_strip), 16 rows each, with all rows of a matrix: the large
// products of each sum, and apart from them the small ones.
#ifndef KERNELS_CUDA_SPLIT_MATRIX_CUH
#define KERNELS_CUDA_SPLIT_MATRIX_CUH

#include "kernels/cuda/split.cuh"
#include "kernels/cuda/wgmma.cuh"

template <int N, int ROWS, int COLUMNS> struct alignas(128) split_matrix {
    static constexpr int LIMBS = N;
    uint4 limb[LIMBS][COLUMNS / 8 * ROWS]; // runs of 8

    // Of a row, columns 8 c and on.
    static __host__ __device__ __forceinline__ constexpr int run(int row, int c) { return c * ROWS + row; }
};
template <int N, int ROWS> struct alignas(128) split_lower {
    static constexpr int LIMBS = N;
    uint4 limb[LIMBS][ROWS * (ROWS + SPLIT_TILE) / 16];

    static __host__ __device__ __forceinline__ constexpr int run(int row, int c) {
        const int tile = c / 2, first = tile * SPLIT_TILE;
        return 2 * tile * ROWS - first * (tile - 1) + c % 2 * (ROWS - first) + row - first;
    }
};

// 8 numbers, already scaled, from column 8 c on.
template <typename Matrix>
static __device__ __forceinline__ void split_put_run(Matrix &m, int32_t row, int32_t c, const float *x) {
    uint32_t word[Matrix::LIMBS][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        split_pair<Matrix::LIMBS>(x[2 * i], x[2 * i + 1], [&](int limb, uint32_t pair) { word[limb][i] = pair; });
#pragma unroll
    for (int limb = 0; limb < Matrix::LIMBS; limb++)
        m.limb[limb][Matrix::run(row, c)] = make_uint4(word[limb][0], word[limb][1], word[limb][2], word[limb][3]);
}
// Two neighbours, of which the first has an even column.
template <typename Matrix>
static __device__ __forceinline__ void split_put_pair(Matrix &m, int32_t row, int32_t column, float x, float y) {
    const int32_t word = Matrix::run(row, column / 8) * 4 + column % 8 / 2;
    split_pair<Matrix::LIMBS>(x, y, [&](int limb, uint32_t pair) { ((uint32_t *)m.limb[limb])[word] = pair; });
}

// ----------------------------------------------------------------------------------------------------- tiles of a warp

template <typename Matrix>
static __device__ __forceinline__ void split_load(const Matrix &m, int32_t row, int32_t c, bool turned,
                                                  uint32_t (&x)[Matrix::LIMBS][4]) {
#pragma unroll
    for (int limb = 0; limb < Matrix::LIMBS; limb++)
        if (turned)
            mma_load_turned(&m.limb[limb][Matrix::run(row, c)], x[limb]);
        else
            mma_load(&m.limb[limb][Matrix::run(row, c)], x[limb]);
}
// Tile (i, j) as a left operand; as a right one, its rows for columns of the product; turned, its rows for k.
template <typename Matrix>
static __device__ __forceinline__ split_left<Matrix::LIMBS> split_load_left(const Matrix &m, int i, int j,
                                                                            int32_t lane) {
    split_left<Matrix::LIMBS> a;
    split_load(m, i * SPLIT_TILE + (lane & 15), 2 * j + (lane >> 4), false, a.limb);
    return a;
}
template <typename Matrix>
static __device__ __forceinline__ split_right<Matrix::LIMBS> split_load_right(const Matrix &m, int i, int j,
                                                                              int32_t lane) {
    split_right<Matrix::LIMBS> b;
    split_load(m, i * SPLIT_TILE + (lane & 7) + (lane >> 4) * 8, 2 * j + (lane >> 3 & 1), false, b.limb);
    return b;
}
template <typename Matrix>
static __device__ __forceinline__ split_right<Matrix::LIMBS> split_load_turned(const Matrix &m, int i, int j,
                                                                               int32_t lane) {
    split_right<Matrix::LIMBS> b;
    split_load(m, i * SPLIT_TILE + (lane & 15), 2 * j + (lane >> 4), true, b.limb);
    return b;
}

// A strip times the rows of tile `tile`: 16 x 16 of the product.
template <int LIMBS, int TILES, int ROWS>
static __device__ __forceinline__ split_block
split_multiply_rows(const split_left<LIMBS> (&a)[TILES], const split_matrix<LIMBS, ROWS, TILES * SPLIT_TILE> &rows,
                    int tile, int32_t lane) {
    split_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < TILES; n++)
        split_multiply(sum, a[n], split_load_right(rows, tile, n, lane));
    return split_totals(sum);
}
// Rows of tile i of a times those of tile j of b.
template <int LIMBS, int ROWS, int COLUMNS>
static __device__ __forceinline__ split_block split_multiply_tiles(const split_matrix<LIMBS, ROWS, COLUMNS> &a, int i,
                                                                   const split_matrix<LIMBS, ROWS, COLUMNS> &b, int j,
                                                                   int32_t lane) {
    split_sum<LIMBS> sum = {};
#pragma unroll
    for (int n = 0; n < COLUMNS / SPLIT_TILE; n++)
        split_multiply(sum, split_load_left(a, i, n, lane), split_load_right(b, j, n, lane));
    return split_totals(sum);
}

// ------------------------------------------------------------------------------------------- products of a warpgroup

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A warp's share of a product: TILES tiles of its 16 rows. Not to be touched before split_group_wait.
template <int LIMBS, int TILES> struct split_group { split_block part[LIMBS][TILES]; };

static __host__ __device__ __forceinline__ constexpr int split_products(int limbs) {
    return limbs == 1 ? 1 : 3;
}

// Tiles FIRST .. FIRST + N - 1 (+)= a b, one tile of k; b: `vectors` bytes between groups of 8 of its vectors, `depth`
// between those of its k.
template <int FIRST, int N, bool TURNED, int LIMBS, int TILES, typename Matrix>
static __device__ __forceinline__ void split_group_step(split_group<LIMBS, TILES> &sum, const split_left<LIMBS> &a,
                                                        const Matrix &b, int run, uint32_t vectors, uint32_t depth,
                                                        bool add) {
#pragma unroll
    for (int n = 0; n < split_products(LIMBS); n++) {
        const cuda_wgmma_operand operand(&b.limb[n == 2][run], vectors, depth);
        cuda_wgmma_half<TURNED>((float(&)[8 * N]) sum.part[n != 0][FIRST], a.limb[n == 1], operand.at(0),
                                add || n == 2);
    }
}

// sum = a b^T, all rows of b.
template <int LIMBS, int TILES, int ROWS>
static __device__ __forceinline__ void split_group_rows(split_group<LIMBS, ROWS / SPLIT_TILE> &sum,
                                                        const split_left<LIMBS> (&a)[TILES],
                                                        const split_matrix<LIMBS, ROWS, TILES * SPLIT_TILE> &b) {
    sum = {};
    cuda_wgmma_begin();
#pragma unroll
    for (int k = 0; k < TILES; k++)
        split_group_step<0, ROWS / SPLIT_TILE, false>(sum, a[k], b, b.run(0, 2 * k), 128, ROWS * sizeof(uint4), k > 0);
    cuda_wgmma_commit();
}
// sum = a b, columns of b from tile `first` on.
template <int LIMBS, int TILES, int K_TILES, int COLUMNS>
static __device__ __forceinline__ void
split_group_turned(split_group<LIMBS, TILES> &sum, const split_left<LIMBS> (&a)[K_TILES],
                   const split_matrix<LIMBS, K_TILES * SPLIT_TILE, COLUMNS> &b, int first) {
    sum = {};
    cuda_wgmma_begin();
#pragma unroll
    for (int k = 0; k < K_TILES; k++)
        split_group_step<0, TILES, true>(sum, a[k], b, b.run(k * SPLIT_TILE, 2 * first),
                                         K_TILES * SPLIT_TILE * sizeof(uint4), 128, k > 0);
    cuda_wgmma_commit();
}
// Tile by tile, as sums that overlap in part would have to be moved.
template <int TILE, int LIMBS, int TILES>
static __device__ __forceinline__ void split_group_lower_from(split_group<LIMBS, TILES> &sum,
                                                              const split_left<LIMBS> (&a)[TILES],
                                                              const split_lower<LIMBS, TILES * SPLIT_TILE> &b) {
    if constexpr (TILE < TILES) {
#pragma unroll
        for (int k = 0; k <= TILE; k++)
            split_group_step<TILE, 1, false>(sum, a[k], b, b.run(TILE * SPLIT_TILE, 2 * k), 128,
                                             (TILES - k) * SPLIT_TILE * sizeof(uint4), k > 0);
        split_group_lower_from<TILE + 1>(sum, a, b);
    }
}
// sum = a b^T of a lower triangle b.
template <int LIMBS, int TILES>
static __device__ __forceinline__ void split_group_lower(split_group<LIMBS, TILES> &sum,
                                                         const split_left<LIMBS> (&a)[TILES],
                                                         const split_lower<LIMBS, TILES * SPLIT_TILE> &b) {
    sum = {};
    cuda_wgmma_begin();
    split_group_lower_from<0>(sum, a, b);
    cuda_wgmma_commit();
}

template <int TILE, int LIMBS, int TILES>
static __device__ __forceinline__ void split_group_upper_from(split_group<LIMBS, TILES> &sum,
                                                              const split_left<LIMBS> (&a)[TILES],
                                                              const split_lower<LIMBS, TILES * SPLIT_TILE> &b) {
    if constexpr (TILE < TILES) {
#pragma unroll
        for (int k = TILE; k < TILES; k++)
            split_group_step<TILE, 1, true>(sum, a[k], b, b.run(k * SPLIT_TILE, 2 * TILE),
                                            (TILES - TILE) * SPLIT_TILE * sizeof(uint4), 128, k > TILE);
        split_group_upper_from<TILE + 1>(sum, a, b);
    }
}
// sum = a b of a lower triangle b.
template <int LIMBS, int TILES>
static __device__ __forceinline__ void split_group_upper(split_group<LIMBS, TILES> &sum,
                                                         const split_left<LIMBS> (&a)[TILES],
                                                         const split_lower<LIMBS, TILES * SPLIT_TILE> &b) {
    sum = {};
    cuda_wgmma_begin();
    split_group_upper_from<0>(sum, a, b);
    cuda_wgmma_commit();
}

template <int N> static __device__ __forceinline__ void split_group_hold(split_block (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            cuda_wgmma_hold(x[n].v[i / 4][i % 4]);
}
// All products but those of the last LEFT calls are done; what they read from registers may change.
template <int LEFT, int LIMBS, int TILES, int K_TILES>
static __device__ __forceinline__ void split_group_wait(split_group<LIMBS, TILES> &sum,
                                                        split_left<LIMBS> (&a)[K_TILES]) {
    cuda_wgmma_wait<LEFT>();
#pragma unroll
    for (int limb = 0; limb < LIMBS; limb++) {
        split_group_hold(sum.part[limb]);
#pragma unroll
        for (int k = 0; k < K_TILES; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                cuda_wgmma_hold(a[k].limb[limb][i]);
    }
}
template <int LIMBS, int TILES>
static __device__ __forceinline__ split_block split_totals(const split_group<LIMBS, TILES> &sum, int n) {
    split_block x = sum.part[0][n];
    if constexpr (LIMBS == 2)
#pragma unroll
        for (int i = 0; i < 8; i++)
            x.v[i / 4][i % 4] += sum.part[1][n].v[i / 4][i % 4];
    return x;
}

#endif
#endif

// SPDX-License-Identifier: Apache-2.0
// Register-blocked products of small matrices. See gemm.h for the forms and the promise about bits.
//
// A tile of up to GEMM_ROWS x GEMM_VECTORS accumulators stays in registers while p runs: a row of B is loaded once,
// each element of A is broadcast. Both forms of A differ in two strides only. Tiles of fewer rows or vectors are the
// same code with other constants, so that an odd edge costs speed, never other bits.
#include "kernels/cpu/isa/gemm.h"

typedef struct gemm_job {
    const float *a, *b;
    float *c;
    int64_t row_stride, depth_stride; // of A
    int64_t ldb, ldc;
    int add;
} gemm_job;

// One tile at row i, column j, p in [p0, p1). lanes: of the last vector, KERN_VL = all.
static inline __attribute__((always_inline)) void tile(const gemm_job *job, int i, int j, int p0, int p1,
                                                       const int rows, const int vectors, const int lanes) {
    const int64_t row_stride = job->row_stride, depth_stride = job->depth_stride, ldb = job->ldb, ldc = job->ldc;
    const float *a = job->a + i * row_stride + p0 * depth_stride, *b = job->b + p0 * ldb + j;
    float *c = job->c + i * ldc + j;
    vf sum[GEMM_ROWS][GEMM_VECTORS];
    KERN_UNROLL
    for (int r = 0; r < rows; r++) {
        KERN_UNROLL
        for (int v = 0; v < vectors; v++)
            sum[r][v] = !job->add          ? (vf){0}
                        : lanes == KERN_VL ? vf_load(c + r * ldc + v * KERN_VL)
                                           : vf_load_part(c + r * ldc, lanes);
    }
    for (int p = p0; p < p1; p++, a += depth_stride, b += ldb) {
        vf row[GEMM_VECTORS];
        KERN_UNROLL
        for (int v = 0; v < vectors; v++)
            row[v] = lanes == KERN_VL ? vf_load(b + v * KERN_VL) : vf_load_part(b, lanes);
        KERN_UNROLL
        for (int r = 0; r < rows; r++) {
            const float factor = a[r * row_stride];
            KERN_UNROLL
            for (int v = 0; v < vectors; v++)
                sum[r][v] += factor * row[v];
        }
    }
    KERN_UNROLL
    for (int r = 0; r < rows; r++) {
        KERN_UNROLL
        for (int v = 0; v < vectors; v++)
            if (lanes == KERN_VL)
                vf_store(c + r * ldc + v * KERN_VL, sum[r][v]);
            else
                vf_store_part(c + r * ldc, sum[r][v], lanes);
    }
}

typedef void (*tile_function)(const gemm_job *job, int i, int j, int p0, int p1);

#define TILE(rows, vectors)                                                                  \
    static void tile_##rows##x##vectors(const gemm_job *job, int i, int j, int p0, int p1) { \
        tile(job, i, j, p0, p1, rows, vectors, KERN_VL);                                     \
    }
#define TILE_ROWS(vectors) \
    TILE(1, vectors) TILE(2, vectors) TILE(3, vectors) TILE(4, vectors) TILE(5, vectors) TILE(6, vectors)
#define TILE_NAMES(vectors) \
    { tile_1x##vectors, tile_2x##vectors, tile_3x##vectors, tile_4x##vectors, tile_5x##vectors, tile_6x##vectors }

_Static_assert(GEMM_ROWS == 6, "the tiles below");
TILE_ROWS(1)
TILE_ROWS(2)
#if defined(KERN_ISA_AVX512) || defined(__aarch64__)
TILE_ROWS(3)
TILE_ROWS(4)
static const tile_function tiles[GEMM_VECTORS][GEMM_ROWS] = {TILE_NAMES(1), TILE_NAMES(2), TILE_NAMES(3),
                                                             TILE_NAMES(4)};
#else
static const tile_function tiles[GEMM_VECTORS][GEMM_ROWS] = {TILE_NAMES(1), TILE_NAMES(2)};
#endif

// The last n % KERN_VL columns.
static void tile_part(const gemm_job *job, int i, int j, int p0, int p1, int rows, int lanes) {
    if (rows == GEMM_ROWS) {
        tile(job, i, j, p0, p1, GEMM_ROWS, 1, lanes);
        return;
    }
    for (int r = 0; r < rows; r++)
        tile(job, i + r, j, p0, p1, 1, 1, lanes);
}

typedef enum gemm_form { FULL, LOWER_A_NN, LOWER_A_TN, LOWER_C } gemm_form;

static inline void product(const gemm_job *job, gemm_form form, int m, int n, int k) {
    for (int i = 0; i < m; i += GEMM_ROWS) {
        int rows = m - i < GEMM_ROWS ? m - i : GEMM_ROWS;
        int p0 = form == LOWER_A_TN ? i : 0;
        int p1 = form == LOWER_A_NN && i + rows < k ? i + rows : k;
        int columns = n;
        if (form == LOWER_C && gemm_pad(i + rows) < n)
            columns = gemm_pad(i + rows);
        int j = 0;
        for (int vectors; (vectors = (columns - j) / KERN_VL) > 0; j += vectors * KERN_VL) {
            vectors = vectors < GEMM_VECTORS ? vectors : GEMM_VECTORS;
            tiles[vectors - 1][rows - 1](job, i, j, p0, p1);
        }
        if (j < columns)
            tile_part(job, i, j, p0, p1, rows, columns - j);
    }
}

GEMM_FUNCTION(gemm_nn) {
    product(&(gemm_job){a, b, c, lda, 1, ldb, ldc, add}, FULL, m, n, k);
}
GEMM_FUNCTION(gemm_tn) {
    product(&(gemm_job){a, b, c, 1, lda, ldb, ldc, add}, FULL, m, n, k);
}
GEMM_FUNCTION(gemm_nn_lower) {
    product(&(gemm_job){a, b, c, lda, 1, ldb, ldc, add}, LOWER_A_NN, m, n, k);
}
GEMM_FUNCTION(gemm_tn_lower) {
    product(&(gemm_job){a, b, c, 1, lda, ldb, ldc, add}, LOWER_A_TN, m, n, k);
}
GEMM_FUNCTION(gemm_lower_nn) {
    product(&(gemm_job){a, b, c, lda, 1, ldb, ldc, add}, LOWER_C, m, n, k);
}

// Stage `s` of a transpose: the off-diagonal s x s blocks of every 2s x 2s block change places.
#define STAGE(row, s)                            \
    KERN_UNROLL                                  \
    for (int i = 0; i < KERN_VL; i++)            \
        if ((i & (s)) == 0) {                    \
            vf x = row[i], y = row[i + (s)];     \
            row[i] = vf_mix_low(x, y, s);        \
            row[i + (s)] = vf_mix_high(x, y, s); \
        }

static void transpose_block(const float *x, int64_t ldx, float *y, int64_t ldy) {
    vf row[KERN_VL];
    KERN_UNROLL
    for (int i = 0; i < KERN_VL; i++)
        row[i] = vf_load(x + i * ldx);
#if defined(KERN_ISA_AVX512)
    STAGE(row, 8)
#endif
#if defined(KERN_ISA_AVX512) || defined(KERN_ISA_AVX2)
    STAGE(row, 4)
#endif
    STAGE(row, 2)
    STAGE(row, 1)
    KERN_UNROLL
    for (int i = 0; i < KERN_VL; i++)
        vf_store(y + i * ldy, row[i]);
}

void gemm_transpose(int rows, int cols, const float *x, int64_t ldx, float *y, int64_t ldy) {
    const int whole_rows = rows / KERN_VL * KERN_VL, whole_cols = cols / KERN_VL * KERN_VL;
    for (int i = 0; i < whole_rows; i += KERN_VL)
        for (int j = 0; j < whole_cols; j += KERN_VL)
            transpose_block(x + i * ldx + j, ldx, y + j * ldy + i, ldy);
    for (int i = 0; i < rows; i++)
        for (int j = i < whole_rows ? whole_cols : 0; j < cols; j++)
            y[j * ldy + i] = x[i * ldx + j];
}

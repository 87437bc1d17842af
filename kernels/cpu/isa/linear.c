// SPDX-License-Identifier: Apache-2.0
// linear and its backward:  y = x W^T + bias + residual,  dx = dy W,  dW += dy^T x,  dbias += sum_t dy.
//
// A token has `groups` vectors of cols floats; W is a slice of rows of a wider weight.
//
// Forward. Generated tokens go through the row kernel (linear_rows.h). A prompt chunk is a product of its own: its
// vectors, 512 at a time, are padded with zeros to 8, 16, 32 or a multiple of 64 and multiplied with slices of 192
// outputs, so that its bits are a function of the chunk alone. With rows->merge the prompt's vectors are cut into
// blocks of 512 instead. bf16 weights
// are widened a slice at a time. A task is one slice and some chunks; the products land in the thread's workspace and
// are added to bias, then residual. Quantised weights have one way for tokens of both kinds (quant.h).
//
// Backward. Tasks own blocks of their output, and one library call sums over all that is summed over, so the order over
// tokens is fixed. W must be float32.
#include "kernels/cpu/isa/linear_rows.h"
#include "kernels/cpu/isa/products.h"
#include "kernels/cpu/isa/quant.h"

enum {
    BLOCK_VECTORS = 512,    // of one product
    CHUNKS_A_TASK = 8,      // at most: chunks that share one widened slice
    BACKWARD_VECTORS = 512, // vectors of one task of dx
    GRAD_ROWS = 192,        // block of dW of one task
    GRAD_COLS = 512,
};

static int padded_length(int length) {
    if (length > 64)
        return (length + 63) / 64 * 64;
    int padded = 8;
    while (padded < length)
        padded *= 2;
    return padded;
}

static int64_t groups_of(int32_t groups) {
    return groups > 0 ? groups : 1;
}

// ---------------------------------------------------------------------------------------------- forward, prompt tokens

typedef struct vector_block {
    int64_t vector0;
    int32_t length; // 0: the chunk has no such block
} vector_block;

static int64_t blocks_of(int64_t vectors) {
    return (vectors + BLOCK_VECTORS - 1) / BLOCK_VECTORS;
}

// Every chunk counts as many blocks as a whole one has.
static int64_t block_count(const kern_cpu *cpu, const kern_rows *rows, int64_t groups) {
    if (!rows->merge)
        return rows->n_chunks * blocks_of(cpu->chunk * groups);
    return blocks_of((rows->n_tokens - rows->n_generated) * groups);
}

static vector_block block_at(const kern_cpu *cpu, const kern_rows *rows, int64_t groups, int64_t index) {
    int64_t first = rows->n_generated * groups, vectors = (rows->n_tokens - rows->n_generated) * groups;
    if (!rows->merge) {
        const int64_t blocks = blocks_of(cpu->chunk * groups);
        const kern_chunk *chunk = &rows->chunk[index / blocks];
        first = chunk->token0 * groups, vectors = chunk->length * groups;
        index %= blocks;
    }
    const int64_t left = vectors - index * BLOCK_VECTORS;
    const int64_t length = left < 0 ? 0 : left < BLOCK_VECTORS ? left : BLOCK_VECTORS;
    return (vector_block){first + index * BLOCK_VECTORS, (int32_t)length};
}

// Pieces of one thread's workspace.
typedef struct scratch {
    float *x;       // a block of a chunk with zero rows behind it
    float *product; // (BLOCK_VECTORS, KERN_SLICE)
    float *weight;  // (KERN_SLICE, cols) widened
} scratch;

static size_t padded_bytes(const kern_cpu *cpu, int64_t cols, int64_t groups) {
    const int64_t vectors = cpu->chunk * groups < BLOCK_VECTORS ? cpu->chunk * groups : BLOCK_VECTORS;
    return kern_align64((size_t)padded_length((int)vectors) * cols * sizeof(float));
}

static size_t scratch_bytes(const kern_cpu *cpu, int64_t cols, int64_t groups) {
    return padded_bytes(cpu, cols, groups) + kern_align64((size_t)BLOCK_VECTORS * KERN_SLICE * sizeof(float)) +
           kern_align64((size_t)KERN_SLICE * cols * sizeof(float));
}

static scratch scratch_of(const kern_cpu *cpu, int64_t cols, int64_t groups) {
    char *memory = kern_cpu_workspace(cpu, kern_team_thread());
    scratch s = {.x = (float *)memory};
    memory += padded_bytes(cpu, cols, groups);
    s.product = (float *)memory;
    memory += kern_align64((size_t)BLOCK_VECTORS * KERN_SLICE * sizeof(float));
    s.weight = (float *)memory;
    return s;
}

// y (length, width) = product + bias + residual for outputs [row0, row0 + width).
static void write_outputs(const kern_linear_args *a, vector_block block, int64_t row0, int width,
                          const float *product) {
    for (int t = 0; t < block.length; t++) {
        const float *from = product + (int64_t)t * KERN_SLICE;
        int64_t at = (block.vector0 + t) * a->rows + row0;
        float *y = a->y.f + at;
        const float *bias = a->bias.f ? a->bias.f + a->row0 + row0 : NULL;
        const float *residual = a->residual.f ? a->residual.f + at : NULL;
        if (bias && residual)
            for (int o = 0; o < width; o++)
                y[o] = from[o] + bias[o] + residual[o];
        else if (residual)
            for (int o = 0; o < width; o++)
                y[o] = from[o] + residual[o];
        else if (bias)
            for (int o = 0; o < width; o++)
                y[o] = from[o] + bias[o];
        else
            memcpy(y, from, (size_t)width * sizeof(float));
    }
}

// One slice of outputs for the blocks [first, last).
static void prompt_task(const kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *a, int64_t row0,
                        int64_t first, int64_t last, scratch s, int *failed) {
    const int64_t cols = a->cols, at = (a->row0 + row0) * cols;
    const int width = (int)(a->rows - row0 < KERN_SLICE ? a->rows - row0 : KERN_SLICE);
    const kern_weight *w = a->weight.w;
    const float *weight = (const float *)w->data + (w->dtype == KERN_F32 ? at : 0);
    if (w->dtype == KERN_BF16) {
        vf_widen((const uint16_t *)w->data + at, s.weight, width * cols);
        weight = s.weight;
    }
    for (int64_t index = first; index < last; index++) {
        vector_block block = block_at(cpu, rows, groups_of(a->groups), index);
        if (block.length == 0)
            continue;
        const float *x = a->x.f + block.vector0 * cols;
        int padded = rows->merge ? block.length : padded_length(block.length);
        if (padded != block.length) {
            memcpy(s.x, x, (size_t)block.length * cols * sizeof(float));
            memset(s.x + block.length * cols, 0, (size_t)(padded - block.length) * cols * sizeof(float));
            x = s.x;
        }
        kern_product('n', 't', padded, width, cols, x, cols, weight, cols, 0, s.product, KERN_SLICE, failed);
        write_outputs(a, block, row0, width, s.product);
    }
}

// Blocks that share one widened slice; the bits do not depend on it. Tasks of one slice follow each other in any case.
static int32_t task_blocks(const kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *a, int64_t products) {
    if (rows->merge || a->weight.w->dtype == KERN_F32)
        return 1;
    const int64_t share = products / (2 * cpu->threads);
    return share < 1 ? 1 : share < CHUNKS_A_TASK ? (int32_t)share : CHUNKS_A_TASK;
}

static kern_status prompt_tokens(const kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *a) {
    const int64_t blocks = block_count(cpu, rows, groups_of(a->groups));
    const int64_t vectors = (rows->n_tokens - rows->n_generated) * groups_of(a->groups);
    const int64_t slices = (a->rows + KERN_SLICE - 1) / KERN_SLICE;
    const int32_t blocks_a_task = task_blocks(cpu, rows, a, slices * blocks);
    const int64_t pieces = (blocks + blocks_a_task - 1) / blocks_a_task;
    int failed = 0;
#pragma omp parallel if (kern_worth_team(2.0 * (double)vectors * a->rows * a->cols))
    {
        kern_products_begin();
        scratch s = scratch_of(cpu, a->cols, groups_of(a->groups));
#pragma omp for schedule(static)
        for (int64_t task = 0; task < slices * pieces; task++) {
            int64_t first = task % pieces * blocks_a_task;
            int64_t last = first + blocks_a_task < blocks ? first + blocks_a_task : blocks;
            prompt_task(cpu, rows, a, task / pieces * KERN_SLICE, first, last, s, &failed);
        }
    }
    return failed ? KERN_NO_MEMORY : KERN_OK;
}

// ----------------------------------------------------------------------------------------------------------- launchers

static bool shape_is_valid(int32_t cols, int32_t rows, int32_t row0, int32_t groups) {
    return cols >= 1 && rows >= 1 && row0 >= 0 && groups >= 0;
}

// Whether the weight holds the slice.
static bool weight_fits(const kern_weight *w, int32_t cols, int32_t rows, int32_t row0) {
    return w->cols == cols && (int64_t)row0 + rows <= w->rows;
}

KERN_PREPARE(linear, kern_linear_args) {
    if (!shape_is_valid(a->cols, a->rows, a->row0, a->groups) || !a->x.ref || !a->weight.ref || !a->y.ref)
        return KERN_INVALID;
    const size_t floats = scratch_bytes(cpu, a->cols, groups_of(a->groups)), codes = KERN_NAME(quant_bytes)(a->cols);
    *thread_bytes = floats > codes ? floats : codes;
    return KERN_OK;
}

static kern_linear_rows job_of(const kern_linear_args *a, int64_t tokens) {
    return (kern_linear_rows){.weight = a->weight.w,
                              .x = a->x.f,
                              .bias = a->bias.f,
                              .residual = a->residual.f,
                              .y = a->y.f,
                              .row0 = a->row0,
                              .rows = a->rows,
                              .tokens = (int32_t)(tokens * groups_of(a->groups))};
}

kern_status KERN_NAME(linear_parts)(kern_cpu *cpu, const kern_rows *rows, const kern_linear_args *const *a, int parts) {
    const bool quantised = kern_is_quantised(a[0]->weight.w); // these have one way for tokens of both kinds
    kern_linear_rows job[KERN_LINEAR_PARTS] = {{0}};
    for (int i = 0; i < parts; i++) {
        if (!weight_fits(a[i]->weight.w, a[i]->cols, a[i]->rows, a[i]->row0))
            return KERN_INVALID;
        job[i] = job_of(a[i], quantised ? rows->n_tokens : rows->n_generated);
    }
    if (quantised)
        KERN_NAME(quant_rows)(cpu, job, parts, kern_cpu_workspace(cpu, 0));
    else if (rows->n_generated > 0)
        KERN_NAME(linear_rows)(cpu, job, parts);
    kern_status status = KERN_OK;
    for (int i = 0; i < parts && !quantised && rows->n_generated < rows->n_tokens && !status; i++)
        status = prompt_tokens(cpu, rows, a[i]);
    return status;
}

KERN_RUN(linear, kern_linear_args) {
    return KERN_NAME(linear_parts)(cpu, rows, &a, 1);
}

KERN_PREPARE(linear_backward_input, kern_linear_backward_input_args) {
    (void)cpu;
    if (!shape_is_valid(a->cols, a->rows, a->row0, a->groups) || !a->dy.ref || !a->weight.ref || !a->dx.ref)
        return KERN_INVALID;
    *thread_bytes = 0;
    return KERN_OK;
}

KERN_RUN(linear_backward_input, kern_linear_backward_input_args) {
    (void)cpu;
    const kern_weight *w = a->weight.w;
    if (!weight_fits(w, a->cols, a->rows, a->row0))
        return KERN_INVALID;
    if (w->dtype != KERN_F32)
        return KERN_UNSUPPORTED;
    const int64_t vectors = rows->n_tokens * groups_of(a->groups);
    const int64_t blocks = (vectors + BACKWARD_VECTORS - 1) / BACKWARD_VECTORS;
    const float *weight = (const float *)w->data + (int64_t)a->row0 * a->cols;
    const int64_t slices = (a->cols + KERN_SLICE - 1) / KERN_SLICE;
    const float beta = a->accumulate ? 1.0f : 0.0f;
    int failed = 0;
#pragma omp parallel if (kern_worth_team(2.0 * (double)vectors * a->rows * a->cols))
    {
        kern_products_begin();
#pragma omp for schedule(static)
        for (int64_t task = 0; task < slices * blocks; task++) {
            int64_t vector0 = task % blocks * BACKWARD_VECTORS, col0 = task / blocks * KERN_SLICE;
            int64_t length = vectors - vector0 < BACKWARD_VECTORS ? vectors - vector0 : BACKWARD_VECTORS;
            int64_t width = a->cols - col0 < KERN_SLICE ? a->cols - col0 : KERN_SLICE;
            kern_product('n', 'n', length, width, a->rows, a->dy.f + vector0 * a->rows, a->rows, weight + col0, a->cols,
                         beta, a->dx.f + vector0 * a->cols + col0, a->cols, &failed);
        }
    }
    return failed ? KERN_NO_MEMORY : KERN_OK;
}

KERN_PREPARE(linear_backward_weight, kern_linear_backward_weight_args) {
    (void)cpu;
    if (!shape_is_valid(a->cols, a->rows, a->row0, a->groups) || !a->x.ref || !a->dy.ref || !a->grad_weight.ref)
        return KERN_INVALID;
    *thread_bytes = 0;
    return KERN_OK;
}

// Bias gradient of the outputs [row0, row0 + width) of dy: column sums, vectors in order.
static void bias_gradient(const kern_linear_backward_weight_args *a, int64_t vectors, int64_t row0, int64_t width) {
    double sum[GRAD_ROWS] = {0};
    for (int64_t v = 0; v < vectors; v++)
        for (int64_t o = 0; o < width; o++)
            sum[o] += a->dy.f[v * a->rows + row0 + o];
    for (int64_t o = 0; o < width; o++)
        a->grad_bias.f[a->row0 + row0 + o] += (float)sum[o];
}

KERN_RUN(linear_backward_weight, kern_linear_backward_weight_args) {
    (void)cpu;
    const int64_t vectors = rows->n_tokens * groups_of(a->groups);
    const int64_t row_blocks = (a->rows + GRAD_ROWS - 1) / GRAD_ROWS;
    const int64_t col_blocks = (a->cols + GRAD_COLS - 1) / GRAD_COLS;
    int failed = 0;
#pragma omp parallel if (kern_worth_team(2.0 * (double)vectors * a->rows * a->cols))
    {
        kern_products_begin();
#pragma omp for schedule(static)
        for (int64_t task = 0; task < row_blocks * col_blocks; task++) {
            int64_t row0 = task / col_blocks * GRAD_ROWS, col0 = task % col_blocks * GRAD_COLS;
            int64_t height = a->rows - row0 < GRAD_ROWS ? a->rows - row0 : GRAD_ROWS;
            int64_t width = a->cols - col0 < GRAD_COLS ? a->cols - col0 : GRAD_COLS;
            kern_product('t', 'n', height, width, vectors, a->dy.f + row0, a->rows, a->x.f + col0, a->cols, 1.0f,
                         a->grad_weight.f + (a->row0 + row0) * a->cols + col0, a->cols, &failed);
            if (col0 == 0 && a->grad_bias.f)
                bias_gradient(a, vectors, row0, height);
        }
    }
    return failed ? KERN_NO_MEMORY : KERN_OK;
}

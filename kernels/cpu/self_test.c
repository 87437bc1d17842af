// SPDX-License-Identifier: Apache-2.0
// The start-up self-test of the CPU device: products against a plain loop, a row alone against the same row among
// others.
//
// A matrix library that takes a new processor for another one gives wrong numbers without an error, so none is trusted
// before it has been asked. Checked for float32 and bf16 weights: generated tokens, chunks of every padded size, a
// merged block; then, bit for bit, one row at every place of a batch of both kinds. A few milliseconds, memory of its
// own, no word to anyone but the reason.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum {
    TOKENS = 80,
    SHAPES = 3,
    MAX_COLS = 70,
    MAX_OUTPUTS = 203, // more than one slice
};
static const struct {
    int cols, outputs;
} shape[SHAPES] = {{64, 48}, {MAX_COLS, MAX_OUTPUTS}, {33, 7}}; // the second one is the batch test's

// Everything the test holds, so that one free ends it.
typedef struct bench {
    kern_cpu cpu; // the device under test with a workspace of its own
    kern_rows rows;
    kern_chunk chunk[TOKENS];
    kern_weight weight;
    float x[TOKENS * MAX_COLS], batch[TOKENS * MAX_COLS];
    float y[TOKENS * MAX_OUTPUTS], alone[TOKENS * MAX_OUTPUTS];
    float w[MAX_OUTPUTS * MAX_COLS], bias[MAX_OUTPUTS];
    uint16_t w_bf16[MAX_OUTPUTS * MAX_COLS];
    double want[TOKENS * MAX_OUTPUTS], bound[TOKENS * MAX_OUTPUTS];
} bench;

// Values in [-1, 1) that bf16 holds exactly.
static float next_value(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return (float)((int)(*seed >> 24) - 128) / 128.0f;
}

static void fill(bench *b) {
    uint32_t seed = 1;
    for (size_t i = 0; i < sizeof b->x / sizeof b->x[0]; i++)
        b->x[i] = next_value(&seed);
    for (size_t i = 0; i < sizeof b->bias / sizeof b->bias[0]; i++)
        b->bias[i] = next_value(&seed);
    for (size_t i = 0; i < sizeof b->w / sizeof b->w[0]; i++) {
        uint32_t bits;
        b->w[i] = next_value(&seed);
        memcpy(&bits, &b->w[i], sizeof bits);
        b->w_bf16[i] = (uint16_t)(bits >> 16);
    }
}

// One generated row of `generated` tokens, then prompt chunks of `length` tokens.
static void place_rows(bench *b, int generated, int chunks, int length, bool merge) {
    b->rows.n_generated = generated;
    b->rows.n_tokens = generated + chunks * length;
    b->rows.n_chunks = chunks;
    b->rows.merge = merge;
    for (int i = 0; i < chunks; i++)
        b->chunk[i] = (kern_chunk){.token0 = generated + i * length, .length = length};
}

static kern_status run_linear(bench *b, int s, kern_dtype dtype, float *x, float *y) {
    b->weight = (kern_weight){.dtype = dtype,
                              .rows = shape[s].outputs,
                              .cols = shape[s].cols,
                              .data = dtype == KERN_BF16 ? (void *)b->w_bf16 : b->w};
    const kern_linear_args args = {
        .x.f = x, .weight.w = &b->weight, .bias.f = b->bias, .y.f = y, .cols = shape[s].cols, .rows = shape[s].outputs};
    return b->cpu.table->run[KERN_OP_LINEAR](&b->cpu, &b->rows, &args);
}

// The same in a plain loop, and how far a float32 sum may be from it.
static void plain_loop(bench *b, int s) {
    const int cols = shape[s].cols, outputs = shape[s].outputs;
    for (int t = 0; t < TOKENS; t++) {
        for (int o = 0; o < outputs; o++) {
            double sum = (double)b->bias[o], size = 1;
            for (int k = 0; k < cols; k++) {
                const double product = (double)b->x[t * cols + k] * (double)b->w[o * cols + k];
                sum += product;
                size += fabs(product);
            }
            b->want[t * outputs + o] = sum;
            b->bound[t * outputs + o] = 1e-6 * size;
        }
    }
}

static bool close_to_plain_loop(const bench *b, int s) {
    for (int i = 0; i < b->rows.n_tokens * shape[s].outputs; i++)
        if (!(fabs(b->want[i] - (double)b->y[i]) <= b->bound[i])) // NaN fails
            return false;
    return true;
}

static kern_status products_are_right(bench *b, int s, kern_dtype dtype, char *reason, size_t size) {
    static const int length[] = {1, 8, 11, 16, 21, 32, 40, 64};
    enum { LENGTHS = sizeof length / sizeof length[0] };
    for (int i = 0; i <= LENGTHS; i++) {
        const bool merged = i == LENGTHS;
        const int tokens = merged ? TOKENS - 5 : length[i] <= b->cpu.chunk ? length[i] : b->cpu.chunk;
        place_rows(b, 5, 1, tokens, merged);
        memset(b->y, 0, sizeof b->y);
        kern_status status = run_linear(b, s, dtype, b->x, b->y);
        if (status)
            return status;
        if (!close_to_plain_loop(b, s)) {
            kern_set_reason(reason, size, "matrix product %d x %d x %d (%s) is wrong on this processor", tokens,
                            shape[s].outputs, shape[s].cols, dtype == KERN_BF16 ? "bf16" : "float32");
            return KERN_SELF_TEST;
        }
    }
    return KERN_OK;
}

// Token 0 and the chunk behind it alone, then the same at every place of a batch of other tokens.
static kern_status rows_stand_alone(bench *b, kern_dtype dtype, char *reason, size_t size) {
    enum { GENERATED = 9, CHUNKS = 5, LENGTH = 11, S = 1 };
    const size_t cols = MAX_COLS, outputs = MAX_OUTPUTS, x_row = cols * sizeof(float), y_row = outputs * sizeof(float);
    place_rows(b, 1, 1, LENGTH, false);
    kern_status status = run_linear(b, S, dtype, b->x, b->alone);
    place_rows(b, GENERATED, CHUNKS, LENGTH, false);
    for (size_t place = 0; place < GENERATED && !status; place++) {
        const size_t chunk = GENERATED + place % CHUNKS * LENGTH;
        memcpy(b->batch, b->x + 10 * cols, (size_t)b->rows.n_tokens * x_row);
        memcpy(b->batch + place * cols, b->x, x_row);
        memcpy(b->batch + chunk * cols, b->x + cols, LENGTH * x_row);
        status = run_linear(b, S, dtype, b->batch, b->y);
        if (!status && (memcmp(b->y + place * outputs, b->alone, y_row) != 0 ||
                        memcmp(b->y + chunk * outputs, b->alone + outputs, LENGTH * y_row) != 0)) {
            kern_set_reason(reason, size, "a row's product depends on its neighbours (place %zu)", place);
            status = KERN_SELF_TEST;
        }
    }
    return status;
}

kern_status kern_cpu_self_test(kern_cpu *cpu, char *reason, size_t size) {
    bench *b = aligned_alloc(64, (sizeof *b + 63) & ~(size_t)63);
    if (!b)
        return KERN_NO_MEMORY;
    memset(b, 0, sizeof *b);
    b->cpu = *cpu;
    b->rows.chunk = b->chunk;
    fill(b);
    kern_ptr present = {.ref = 1};
    const kern_linear_args largest = {
        .x = present, .weight = present, .y = present, .cols = MAX_COLS, .rows = MAX_OUTPUTS};
    kern_status status = cpu->table->prepare[KERN_OP_LINEAR](cpu, &largest, &b->cpu.thread_bytes);
    b->cpu.thread_bytes = (b->cpu.thread_bytes + 63) & ~(size_t)63;
    b->cpu.workspace = status ? NULL : aligned_alloc(64, b->cpu.thread_bytes * (size_t)cpu->threads);
    if (!status && !b->cpu.workspace)
        status = KERN_NO_MEMORY;
    for (int s = 0; s < SHAPES && !status; s++) {
        plain_loop(b, s);
        status = products_are_right(b, s, KERN_F32, reason, size);
        if (!status)
            status = products_are_right(b, s, KERN_BF16, reason, size);
    }
    if (!status)
        status = rows_stand_alone(b, KERN_F32, reason, size);
    if (!status)
        status = rows_stand_alone(b, KERN_BF16, reason, size);
    free(b->cpu.workspace);
    free(b);
    return status;
}

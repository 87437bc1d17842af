// SPDX-License-Identifier: Apache-2.0
// What the tests of the recurrences share: mixes of rows, the documents of a row for the references, keys and decays.
//
// The mixes put boundaries and row starts where the grid of chunks is most easily got wrong. Memory is kept by the
// kernel_test and freed with it.
#ifndef TESTS_KERNELS_SEQUENCE_TEST_H
#define TESTS_KERNELS_SEQUENCE_TEST_H

#include "tests/kernels/kernel_test.h"

static const char *const sequence_devices[] = {"cpu:16", "cpu:32", "cpu:64"};
enum { SEQUENCE_DEVICES = 3 };

// Two generated rows and three prompt rows: with and without slots, on and off the grid, documents of 1, 2 and 3
// tokens, two boundaries in a chunk, boundaries on the grid. Slots 0 .. 3.
static inline void sequence_mixed_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, 1, 7);
    kernel_test_row(test, KERN_ROW_GENERATED, 3, 5, 100);
    kernel_test_boundary(test, 3);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, 70, 64);
    kernel_test_row(test, KERN_ROW_PROMPT, 2, 45, 37);
    kernel_test_boundary(test, 20);
    kernel_test_documents(test);
    kernel_test_prepare(test);
}

// One byte a token of the row: a new document begins there.
static inline unsigned char *sequence_begins(kernel_test *test, const kern_row *row) {
    unsigned char *begins = kernel_test_bytes(test, (size_t)row->length);
    for (int b = 0; b < row->boundaries; b++)
        begins[test->rows->boundary[row->boundary0 + b] - row->token0] = 1;
    return begins;
}

// Prompt rows with and without documents and initial states.
static inline void sequence_training_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 150, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, 100, 21);
    kernel_test_documents(test);
    kernel_test_prepare(test);
}

// k or q: `count` vectors of unit length with a common direction, as convolution, SiLU and normalisation leave them.
static inline float *sequence_keys(kernel_test *test, size_t count, int width) {
    float *x = kernel_test_floats(test, count * (size_t)width, -0.5, 1);
    for (size_t i = 0; i < count; i++) {
        double square = 0;
        for (int j = 0; j < width; j++)
            square += (double)x[i * width + j] * x[i * width + j];
        for (int j = 0; j < width; j++)
            x[i * width + j] = (float)(x[i * width + j] / sqrt(square + 1e-12));
    }
    return x;
}

// Log decays: gamma uniform in [low, high).
static inline float *sequence_decays(kernel_test *test, size_t count, double low, double high) {
    float *g = kernel_test_floats(test, count, low, high);
    for (size_t i = 0; i < count; i++)
        g[i] = (float)log((double)g[i]);
    return g;
}

#endif

// SPDX-License-Identifier: Apache-2.0
// What the tests of the kernels share: a device of each instruction set, row tables in a line, random data, relative
// norms.
//
// A case that shall run on every instruction set is a loop test over KERNEL_TEST_ISAS: libcheck forks it once a value
// of _i, so each process opens its device first thing and oneDNN takes the same limit. kernel_test_open returns false
// where the processor lacks the set.
#ifndef TESTS_KERNELS_KERNEL_TEST_H
#define TESTS_KERNELS_KERNEL_TEST_H

#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/kernels.h"
#include "tests/check_main.h"

enum { KERNEL_TEST_ISAS = 3, KERNEL_TEST_MEMORY = 1024 };

typedef struct kernel_test {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    uint64_t seed;
    void *memory[KERNEL_TEST_MEMORY]; // freed with the test
    int memories;
} kernel_test;

// The team of devices opened from now on; a build without OpenMP has one thread whatever is asked.
static inline void kernel_test_threads(int threads) {
#ifdef _OPENMP
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
}

// name: "cpu", "cpu:16", "cpu:64".
static inline bool kernel_test_open(kernel_test *test, int isa, const char *name) {
    static const char *const names[KERNEL_TEST_ISAS] = {"portable", "avx2", "avx512"};
    char reason[256] = "";
    memset(test, 0, sizeof *test);
    test->seed = 1;
    setenv("MESA_CPU_ISA", names[isa], 1);
    kern_status status = kern_device_open(name, &test->device, reason, sizeof reason);
    if (status == KERN_NO_DEVICE || (status == KERN_INVALID && isa > 0))
        return false; // this processor or this build has no such set
    ck_assert_msg(status == KERN_OK, "%s: %s", names[isa], reason);
    ck_assert_int_eq(kern_stream_open(test->device, &test->stream), KERN_OK);
    ck_assert_int_eq(kern_rows_create(test->device, 64, 8192, 256, 256, 1024, 1024, &test->rows), KERN_OK);
    for (int32_t t = 0; t < 8192; t++)
        test->rows->target[t] = -1;
    return true;
}

static inline void kernel_test_close(kernel_test *test) {
    for (int i = 0; i < test->memories; i++)
        free(test->memory[i]);
    kern_rows_free(test->rows);
    kern_stream_close(test->stream);
    kern_device_close(test->device);
}

// ------------------------------------------------------------------------------------------------------------- rows

static inline void kernel_test_clear_rows(kernel_test *test) {
    kern_rows *rows = test->rows;
    rows->n_rows = rows->n_tokens = rows->n_generated = rows->n_logits = 0;
    rows->n_boundaries = rows->n_pages = rows->n_edits = 0;
    rows->merge = false;
}

// Appends a row; generated rows first. The row may be changed before kernel_test_prepare.
static inline kern_row *kernel_test_row(kernel_test *test, kern_row_kind kind, int32_t slot, int32_t length,
                                        int64_t position) {
    kern_rows *rows = test->rows;
    kern_row *row = &rows->row[rows->n_rows++];
    *row = (kern_row){.kind = kind, .slot = slot, .token0 = rows->n_tokens, .length = length, .position = position};
    row->boundary0 = rows->n_boundaries;
    row->page0 = -1;
    rows->n_tokens += length;
    if (kind == KERN_ROW_GENERATED)
        rows->n_generated += length;
    return row;
}

// A new document begins at token `offset` of the last row.
static inline void kernel_test_boundary(kernel_test *test, int32_t offset) {
    kern_rows *rows = test->rows;
    kern_row *row = &rows->row[rows->n_rows - 1];
    rows->boundary[rows->n_boundaries++] = row->token0 + offset;
    row->boundaries++;
}

static inline void kernel_test_prepare(kernel_test *test) {
    ck_assert_int_eq(kern_rows_prepare(test->stream, test->rows), KERN_OK);
}

static inline void kernel_test_launch(kernel_test *test, kern_op op, const void *args) {
    kern_status status = kern_reserve(test->device, op, args);
    if (!status)
        status = kern_launch(test->stream, op, test->rows, args);
    ck_assert_msg(status == KERN_OK, "%s: %s", kern_op_name(op), kern_status_text(status));
}

// ------------------------------------------------------------------------------------------------------------- data

static inline double kernel_test_uniform(kernel_test *test) { // [0, 1)
    test->seed = test->seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(test->seed >> 11) * 0x1p-53;
}

// count floats uniform in [low, high); freed with free.
static inline float *kernel_test_random(kernel_test *test, size_t count, double low, double high) {
    float *x = malloc(count * sizeof *x + 1);
    ck_assert_ptr_nonnull(x);
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(low + (high - low) * kernel_test_uniform(test));
    return x;
}

static inline float *kernel_test_zeros(size_t count) {
    float *x = calloc(count + 1, sizeof *x);
    ck_assert_ptr_nonnull(x);
    return x;
}

static inline double *kernel_test_doubles(const float *x, size_t count) {
    double *y = malloc(count * sizeof *y + 1);
    ck_assert_ptr_nonnull(y);
    for (size_t i = 0; i < count; i++)
        y[i] = (double)x[i];
    return y;
}

// The same, freed with the test.
static inline void *kernel_test_keep(kernel_test *test, void *memory) {
    ck_assert(memory && test->memories < KERNEL_TEST_MEMORY);
    return test->memory[test->memories++] = memory;
}
static inline float *kernel_test_floats(kernel_test *test, size_t count, double low, double high) {
    return kernel_test_keep(test, kernel_test_random(test, count, low, high));
}
static inline float *kernel_test_zero_floats(kernel_test *test, size_t count) {
    return kernel_test_keep(test, kernel_test_zeros(count));
}
static inline float *kernel_test_copy(kernel_test *test, const float *x, size_t count) {
    return memcpy(kernel_test_zero_floats(test, count), x, count * sizeof *x);
}
static inline double *kernel_test_widened(kernel_test *test, const float *x, size_t count) {
    return kernel_test_keep(test, kernel_test_doubles(x, count));
}
static inline double *kernel_test_zero_doubles(kernel_test *test, size_t count) {
    return kernel_test_keep(test, calloc(count + 1, sizeof(double)));
}

// ------------------------------------------------------------------------------------------------------- comparisons

#define kernel_test_assert_same(a, b, count) \
    ck_assert_msg(memcmp(a, b, (size_t)(count) * sizeof *(a)) == 0, "%s and %s differ in bits", #a, #b)
#define kernel_test_assert_refused(test, op, args, status) \
    ck_assert_int_eq(kern_reserve((test)->device, op, args), status)

// gradient (count) of loss against central differences in x, at up to 64 places; for the references, in double.
static inline void kernel_test_gradient(const char *what, double (*loss)(void *context), void *context, double *x,
                                        const double *gradient, size_t count, double tolerance) {
    double error = 0, size = 0;
    for (size_t i = 0; i < count; i += count / 64 + 1) {
        double saved = x[i], h = 1e-5 * (1 + fabs(saved));
        x[i] = saved + h;
        double above = loss(context);
        x[i] = saved - h;
        double below = loss(context);
        x[i] = saved;
        double numeric = (above - below) / (2 * h);
        error += (numeric - gradient[i]) * (numeric - gradient[i]);
        size += numeric * numeric;
    }
    ck_assert_msg(sqrt(error) <= tolerance * sqrt(size), "%s against finite differences: %.3g > %.3g", what,
                  sqrt(error / size), tolerance);
}

static inline double kernel_test_dot(const double *x, const double *y, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += x[i] * y[i];
    return sum;
}

// ||got - want|| <= tolerance ||want||; NaN fails.
static inline void kernel_test_norm(const char *file, int line, const char *what, const float *got, const double *want,
                                    size_t count, double tolerance) {
    double error = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    if (!(sqrt(error) <= tolerance * sqrt(size)))
        ck_abort_msg("%s:%d: %s: relative norm of the difference %.3g, allowed %.3g (size %.3g)", file, line, what,
                     sqrt(error / size), tolerance, sqrt(size));
}
#define kernel_test_assert_norm(got, want, count, tolerance) \
    kernel_test_norm(__FILE__, __LINE__, #got, got, want, count, tolerance)

#endif

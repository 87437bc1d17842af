// SPDX-License-Identifier: Apache-2.0
// What the kernel tests share: a device of every instruction set, arrays, row tables, errors by norm, finite differences.
//
// kernel_test_each_isa opens the device once for every instruction set that the machine has and calls the body. Arrays have a
// host and a device side; everything made through a kernel_test is freed when it closes. Errors are ||a - b|| / ||b||, and a
// NaN or an infinity anywhere is a failure, because a comparison with it is never less.
#ifndef TESTS_KERNELS_KERNEL_TEST_H
#define TESTS_KERNELS_KERNEL_TEST_H

#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tests/check_main.h"

enum { KERNEL_TEST_MEMORY = 512 };

typedef struct kernel_test {
    kern_device *device;
    kern_stream *stream;
    const char *isa;
    uint64_t random;
    void *host[KERNEL_TEST_MEMORY], *on_device[KERNEL_TEST_MEMORY];
    kern_rows *rows[KERNEL_TEST_MEMORY];
    int hosts, on_devices, row_tables;
} kernel_test;

// ------------------------------------------------------------------------------------------------------------ device

static inline bool kernel_test_open(kernel_test *k, const char *device, const char *isa) {
    char reason[256] = "";
    *k = (kernel_test){.isa = isa, .random = 0x9e3779b97f4a7c15u};
    setenv("MESA_CPU_ISA", isa, 1);
    kern_status status = kern_device_open(device, &k->device, reason, sizeof reason);
    if (status == KERN_NO_DEVICE) {
        printf("no %s here: %s\n", isa, reason);
        return false;
    }
    ck_assert_msg(status == KERN_OK, "open %s (%s): %s", device, isa, reason);
    ck_assert_int_eq(kern_stream_open(k->device, &k->stream), KERN_OK);
    return true;
}

static inline void kernel_test_close(kernel_test *k) {
    for (int i = 0; i < k->hosts; i++)
        free(k->host[i]);
    for (int i = 0; i < k->on_devices; i++)
        kern_free(k->device, k->on_device[i]);
    for (int i = 0; i < k->row_tables; i++)
        kern_rows_free(k->rows[i]);
    kern_stream_close(k->stream);
    kern_device_close(k->device);
}

// body runs once for each instruction set that is here; at least the portable one is.
static inline void kernel_test_each_isa(const char *device, void (*body)(kernel_test *k)) {
    static const char *const isas[] = {"portable", "avx2", "avx512"};
    int ran = 0;
    for (int i = 0; i < 3; i++) {
        kernel_test k;
#if !defined(__x86_64__)
        if (i > 0)
            break;
#endif
        if (!kernel_test_open(&k, device, isas[i]))
            continue;
        body(&k);
        kernel_test_close(&k);
        ran++;
    }
    ck_assert_int_ge(ran, 1);
}

// ------------------------------------------------------------------------------------------------------------ arrays

static inline void *kernel_test_host(kernel_test *k, size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    ck_assert(memory && k->hosts < KERNEL_TEST_MEMORY);
    return k->host[k->hosts++] = memory;
}

static inline void *kernel_test_device(kernel_test *k, size_t bytes) {
    void *memory = NULL;
    ck_assert_int_eq(kern_alloc(k->device, bytes, &memory), KERN_OK);
    ck_assert(k->on_devices < KERNEL_TEST_MEMORY);
    return k->on_device[k->on_devices++] = memory;
}

typedef struct test_array {
    size_t count;
    float *h;   // host
    kern_ptr d; // device
} test_array;

static inline void test_push(kernel_test *k, test_array a) {
    ck_assert_int_eq(kern_upload(k->stream, a.d.p, a.h, a.count * sizeof(float)), KERN_OK);
}
static inline void test_pull(kernel_test *k, test_array a) {
    ck_assert_int_eq(kern_download(k->stream, a.h, a.d.p, a.count * sizeof(float)), KERN_OK);
    ck_assert_int_eq(kern_synchronize(k->stream), KERN_OK);
}
static inline test_array test_zeros(kernel_test *k, size_t count) {
    test_array a = {count, kernel_test_host(k, count * sizeof(float)), {0}};
    a.d.p = kernel_test_device(k, count * sizeof(float));
    return a;
}
// Uniform in (-1, 1); splitmix64.
static inline double test_random(kernel_test *k) {
    uint64_t z = k->random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-52 - 1.0;
}
static inline test_array test_uniform(kernel_test *k, size_t count, double scale) {
    test_array a = test_zeros(k, count);
    for (size_t i = 0; i < count; i++)
        a.h[i] = (float)(scale * test_random(k));
    test_push(k, a);
    return a;
}
// The host side in double, for the reference.
static inline double *test_doubles(kernel_test *k, test_array a) {
    double *x = kernel_test_host(k, a.count * sizeof(double));
    for (size_t i = 0; i < a.count; i++)
        x[i] = a.h[i];
    return x;
}
static inline double *test_double_zeros(kernel_test *k, size_t count) {
    return kernel_test_host(k, count * sizeof(double));
}

// ------------------------------------------------------------------------------------------------------- comparisons

static inline double test_error(const float *got, const double *want, size_t count) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(difference) / (sqrt(norm) + 1e-300);
}

#define assert_close_norm(k, got, want, tolerance)                                                                     \
    do {                                                                                                               \
        test_pull(k, got);                                                                                             \
        double error_ = test_error((got).h, want, (got).count);                                                        \
        ck_assert_msg(error_ <= (tolerance), "%s: %s against %s: relative error %.3g > %.3g", (k)->isa, #got, #want,   \
                      error_, (double)(tolerance));                                                                    \
    } while (0)

#define assert_same_bits(k, a, b, count)                                                                               \
    ck_assert_msg(memcmp(a, b, (count) * sizeof *(a)) == 0, "%s: %s and %s differ in bits", (k)->isa, #a, #b)

// gradient[0 .. count) against central differences of loss in x, at up to 64 places.
static inline void test_gradient(const char *what, double (*loss)(void *context), void *context, double *x,
                                 const double *gradient, size_t count, double tolerance) {
    size_t stride = count / 64 + 1;
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; i += stride) {
        double saved = x[i], h = 1e-5 * (1 + fabs(saved));
        x[i] = saved + h;
        double above = loss(context);
        x[i] = saved - h;
        double below = loss(context);
        x[i] = saved;
        double numeric = (above - below) / (2 * h);
        difference += (numeric - gradient[i]) * (numeric - gradient[i]);
        norm += numeric * numeric;
    }
    double error = sqrt(difference) / (sqrt(norm) + 1e-300);
    ck_assert_msg(error <= tolerance, "%s: against finite differences: %.3g > %.3g", what, error, tolerance);
}

static inline double test_dot(const double *x, const double *y, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += x[i] * y[i];
    return sum;
}

// -------------------------------------------------------------------------------------------------------------- rows

typedef struct test_row {
    kern_row_kind kind;
    int32_t slot, length;
    int64_t position;
    int32_t boundary[4]; // offsets in the row at which documents start, > 0; 0 ends the list
} test_row;

// A prepared table of these rows; logits, edits, pages have room for more, see the capacities.
static inline kern_rows *test_rows(kernel_test *k, const test_row *row, int32_t count) {
    int32_t tokens = 0;
    for (int32_t r = 0; r < count; r++)
        tokens += row[r].length;
    kern_rows *rows = NULL;
    ck_assert_int_eq(kern_rows_create(k->device, count, tokens, tokens, 4 * count, 64 * count, 1024, &rows), KERN_OK);
    ck_assert(k->row_tables < KERNEL_TEST_MEMORY);
    k->rows[k->row_tables++] = rows;
    for (int32_t r = 0; r < count; r++) {
        kern_row *to = &rows->row[r];
        *to = (kern_row){.kind = row[r].kind, .slot = row[r].slot, .token0 = rows->n_tokens, .length = row[r].length,
                         .position = row[r].position, .boundary0 = rows->n_boundaries, .page0 = -1};
        for (int i = 0; i < 4 && row[r].boundary[i] > 0; i++, to->boundaries++)
            rows->boundary[rows->n_boundaries++] = rows->n_tokens + row[r].boundary[i];
        rows->n_tokens += row[r].length;
        if (row[r].kind == KERN_ROW_GENERATED)
            rows->n_generated += row[r].length;
    }
    rows->n_rows = count;
    ck_assert_int_eq(kern_rows_prepare(k->stream, rows), KERN_OK);
    return rows;
}

static inline void test_launch(kernel_test *k, kern_op op, const kern_rows *rows, const void *args) {
    kern_status status = kern_reserve(k->device, op, args);
    ck_assert_msg(status == KERN_OK, "%s: reserve %s: %s", k->isa, kern_op_name(op), kern_status_text(status));
    status = kern_launch(k->stream, op, rows, args);
    ck_assert_msg(status == KERN_OK, "%s: launch %s: %s", k->isa, kern_op_name(op), kern_status_text(status));
}

#define assert_refused(k, op, args, status) ck_assert_int_eq(kern_reserve((k)->device, op, args), status)

#endif

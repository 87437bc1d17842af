// SPDX-License-Identifier: Apache-2.0
// What the tests of the kernels share: a device of each instruction set and a CUDA device, row tables in a line, random
// data, relative norms.
//
// A case that shall run on every device is a loop test over KERNEL_TEST_DEVICES, one of the CPU alone (its threads,
// quantised weights) over KERNEL_TEST_ISAS: libcheck forks it once a value of _i, so each process opens its device
// first thing and oneDNN takes the same limit. kernel_test_open returns false where the processor lacks the set, and
// for the last value where there is no CUDA device.
//
// Tests hand host memory to operations. On a CUDA device kernel_test_launch brings over whole what the operands lie in,
// and back: so this memory comes from the helpers below, or is lent (kernel_test_lend).
#ifndef TESTS_KERNELS_KERNEL_TEST_H
#define TESTS_KERNELS_KERNEL_TEST_H

#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/backend.h"
#include "tests/check_main.h"

enum { KERNEL_TEST_ISAS = 3, KERNEL_TEST_DEVICES = 4, KERNEL_TEST_MEMORY = 1024 };

typedef struct kernel_test_memory {
    char *host;
    size_t bytes;
    char *device; // the same on a CUDA device, made when an operand lies in it
    bool owned;   // freed with the test
    bool master;  // a weight reads the device's
} kernel_test_memory;

typedef struct kernel_test {
    kern_device *device;
    kern_stream *stream;
    kern_rows *rows;
    uint64_t seed;
    bool cuda, fast;
    kernel_test_memory memory[KERNEL_TEST_MEMORY];
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

// What a loop's _i stands for.
static inline const char *kernel_test_device_name(int device) {
    static const char *const names[KERNEL_TEST_DEVICES] = {"portable", "avx2", "avx512", "cuda:0"};
    return names[device];
}

// Sends "cuda:0" in place of the CPU's name where _i says so.
static inline kern_status kernel_test_open_device(kernel_test *test, int device, const char *name, const char **set,
                                                  char *reason, size_t reason_size) {
    test->cuda = device == KERNEL_TEST_ISAS;
    *set = kernel_test_device_name(device);
    if (!test->cuda)
        setenv("MESA_CPU_ISA", *set, 1);
    return kern_device_open(&(kern_device_options){.name = test->cuda ? *set : name}, &test->device, reason,
                            reason_size);
}

// device: the loop's _i. name: "cpu", "cpu:16", "cpu:64"; a CUDA device has one C.
static inline bool kernel_test_open(kernel_test *test, int device, const char *name) {
    char reason[256] = "";
    const char *set;
    memset(test, 0, sizeof *test);
    test->seed = 1;
    kern_status status = kernel_test_open_device(test, device, name, &set, reason, sizeof reason);
    if (status == KERN_NO_DEVICE && test->cuda)
        printf("skipped: no device (%s)\n", reason);
    if (status == KERN_NO_DEVICE || (status == KERN_INVALID && device > 0 && !test->cuda))
        return false; // this processor or this build has no such set
    ck_assert_msg(status == KERN_OK, "%s: %s", set, reason);
    ck_assert_int_eq(kern_stream_open(test->device, &test->stream), KERN_OK);
    ck_assert_int_eq(kern_rows_create(test->device, 64, 8192, 256, 256, 1024, 1024, &test->rows), KERN_OK);
    for (int32_t t = 0; t < 8192; t++)
        test->rows->target[t] = -1;
    return true;
}

// A GPU whose products may round their operands, opened to train or not; false: there is none.
static inline bool kernel_test_open_rounding(kernel_test *test, bool trains) {
    if (!kernel_test_open(test, KERNEL_TEST_ISAS, "cuda:0"))
        return false;
    kern_rows_free(test->rows);
    kern_stream_close(test->stream);
    kern_device_close(test->device);
    char reason[256] = "";
    const kern_device_options options = {.name = "cuda:0", .fast = true, .trains = trains};
    test->fast = true;
    ck_assert_msg(kern_device_open(&options, &test->device, reason, sizeof reason) == KERN_OK, "%s", reason);
    ck_assert_int_eq(kern_stream_open(test->device, &test->stream), KERN_OK);
    ck_assert_int_eq(kern_rows_create(test->device, 64, 8192, 256, 256, 1024, 1024, &test->rows), KERN_OK);
    return true;
}
static inline bool kernel_test_open_fast(kernel_test *test) {
    return kernel_test_open_rounding(test, true);
}

static inline void kernel_test_close(kernel_test *test) {
    for (int i = 0; i < test->memories; i++) {
        kern_free(test->device, test->memory[i].device);
        if (test->memory[i].owned)
            free(test->memory[i].host);
    }
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

// A prompt row of documents of 1, 2, 61, 3, 64 and 69 tokens, on and off the grid.
static inline void kernel_test_documents(kernel_test *test) {
    static const int32_t begins[] = {1, 3, 64, 67, 131};
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 200, 0);
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        kernel_test_boundary(test, begins[i]);
}

static inline void kernel_test_prepare(kernel_test *test) {
    ck_assert_int_eq(kern_rows_prepare(test->stream, test->rows), KERN_OK);
}

// ----------------------------------------------------------------------------------------------------------- memory

// Memory of the caller's that operands lie in; it outlives the launches.
static inline void kernel_test_lend(kernel_test *test, void *memory, size_t bytes) {
    ck_assert(memory && test->memories < KERNEL_TEST_MEMORY);
    test->memory[test->memories++] = (kernel_test_memory){.host = (char *)memory, .bytes = bytes};
}

// Zeroed memory, freed with the test.
static inline void *kernel_test_bytes(kernel_test *test, size_t bytes) {
    void *memory = calloc(bytes + 1, 1);
    kernel_test_lend(test, memory, bytes);
    test->memory[test->memories - 1].owned = true;
    return memory;
}

// The latest of what holds p: the stack's may have been lent before for another array.
static inline kernel_test_memory *kernel_test_find(kernel_test *test, const void *p) {
    for (int i = test->memories - 1; i >= 0; i--) {
        kernel_test_memory *m = &test->memory[i];
        if ((const char *)p == m->host || ((const char *)p > m->host && (const char *)p < m->host + m->bytes))
            return m;
    }
    ck_abort_msg("%p is no memory that the test knows", p);
    return NULL;
}

// Where the device finds what the host has at p.
static inline void *kernel_test_on_device(kernel_test *test, void *p) {
    if (!test->cuda)
        return p;
    kernel_test_memory *m = kernel_test_find(test, p);
    if (!m->device)
        ck_assert_int_eq(kern_alloc(test->device, m->bytes, (void **)&m->device), KERN_OK);
    return m->device + ((char *)p - m->host);
}

// The same for the master of a weight, which each launch brings up to date.
static inline float *kernel_test_master(kernel_test *test, float *p) {
    kernel_test_find(test, p)->master = true;
    return (float *)kernel_test_on_device(test, p);
}

static inline void kernel_test_send(kernel_test *test, kernel_test_memory *m) {
    ck_assert_int_eq(kern_upload(test->stream, m->device, m->host, m->bytes), KERN_OK);
}

// ----------------------------------------------------------------------------------------------------------- launches

static inline bool kernel_test_is_weight(kern_op op, size_t operand) {
    switch (op) {
    case KERN_OP_EMBED:
        return operand == 0;
    case KERN_OP_LINEAR:
    case KERN_OP_LINEAR_BACKWARD_INPUT:
    case KERN_OP_BLOCK_LINEAR:
    case KERN_OP_BLOCK_LINEAR_BACKWARD:
    case KERN_OP_HEAD_LOGITS:
        return operand == 1;
    case KERN_OP_HEAD_LOSS:
        return operand == 1 || operand == 9;
    default:
        return false;
    }
}

static inline void kernel_test_run(kernel_test *test, kern_op op, const void *args) {
    kern_status status = kern_reserve(test->device, op, args);
    if (!status)
        status = kern_launch(test->stream, op, test->rows, args);
    if (!status)
        status = kern_synchronize(test->stream);
    ck_assert_msg(status == KERN_OK, "%s: %s", kern_op_name(op), kern_status_text(status));
}

// Tests may change the row table after kernel_test_prepare, so it is sent once more.
static inline void kernel_test_run_on_cuda(kernel_test *test, kern_op op, const void *args) {
    union {
        kern_ptr operand[32];
        char bytes[512];
    } own;
    kernel_test_memory *used[32];
    size_t uses = 0;
    ck_assert(kern_op_args_size(op) <= sizeof own && kern_op_operands(op) <= 32);
    memcpy(own.bytes, args, kern_op_args_size(op));
    for (size_t i = 0; i < kern_op_operands(op); i++) {
        if (!own.operand[i].p || kernel_test_is_weight(op, i))
            continue;
        used[uses++] = kernel_test_find(test, own.operand[i].p);
        own.operand[i].p = kernel_test_on_device(test, own.operand[i].p);
    }
    for (size_t i = 0; i < uses; i++)
        kernel_test_send(test, used[i]);
    for (int i = 0; i < test->memories; i++)
        if (test->memory[i].master)
            kernel_test_send(test, &test->memory[i]);
    ck_assert_int_eq(kern_rows_prepare(test->stream, test->rows), KERN_OK);
    kernel_test_run(test, op, own.bytes);
    for (size_t i = 0; i < uses; i++)
        ck_assert_int_eq(kern_download(test->stream, used[i]->host, used[i]->device, used[i]->bytes), KERN_OK);
    ck_assert_int_eq(kern_synchronize(test->stream), KERN_OK);
}

static inline void kernel_test_launch(kernel_test *test, kern_op op, const void *args) {
    if (test->cuda)
        kernel_test_run_on_cuda(test, op, args);
    else
        kernel_test_run(test, op, args);
}

// ------------------------------------------------------------------------------------------------------------- data

static inline double kernel_test_uniform(kernel_test *test) { // [0, 1)
    test->seed = test->seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(test->seed >> 11) * 0x1p-53;
}

// count floats uniform in [low, high), like all that follow freed with the test.
static inline float *kernel_test_floats(kernel_test *test, size_t count, double low, double high) {
    float *x = kernel_test_bytes(test, count * sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = (float)(low + (high - low) * kernel_test_uniform(test));
    return x;
}
// To numbers that bf16 holds, which products of a fast device do not round.
static inline void kernel_test_cut_to_bf16(float *x, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0xffff0000u;
        memcpy(&x[i], &bits, sizeof bits);
    }
}
static inline float *kernel_test_zero_floats(kernel_test *test, size_t count) {
    return kernel_test_bytes(test, count * sizeof(float));
}
static inline float *kernel_test_copy(kernel_test *test, const float *x, size_t count) {
    return memcpy(kernel_test_zero_floats(test, count), x, count * sizeof *x);
}
static inline double *kernel_test_zero_doubles(kernel_test *test, size_t count) {
    return kernel_test_bytes(test, count * sizeof(double));
}
static inline double *kernel_test_widened(kernel_test *test, const float *x, size_t count) {
    double *y = kernel_test_zero_doubles(test, count);
    for (size_t i = 0; i < count; i++)
        y[i] = (double)x[i];
    return y;
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

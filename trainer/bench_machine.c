// SPDX-License-Identifier: Apache-2.0
// The machine's limits, measured; see bench.h.
// The probes use what the machine has, not what a plain build gives: a weak limit would flatter the model.
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"
#include "trainer/bench.h"
#include "trainer/profile.h"
#include "trainer/progress.h"

// Far above any cache that a few cores share.
enum { READ_BYTES = 768 << 20, COPY_BYTES = 512 << 20, PRODUCT_TOKENS = 1024, PRODUCT_WIDTH = 2048 };

typedef uint64_t line __attribute__((vector_size(64)));

eng_status trn_read_probe_create(trn_read_probe *out, eng_error *error) {
    size_t words = READ_BYTES / sizeof(uint64_t);
    uint64_t *block = aligned_alloc(sizeof(line), words * sizeof *block);
    if (!block)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the read probe");
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < words; i++)
        block[i] = i;
    *out = (trn_read_probe){block, words};
    return ENG_OK;
}

void trn_read_probe_free(trn_read_probe *probe) {
    free(probe->block);
    *probe = (trn_read_probe){0};
}

// A limit that is measured too low flatters every share of it, so the probe reads as well as it can: whole cache lines
// with the widest loads, into sums enough to hide their latency, with a prefetch ahead of what the hardware does by
// itself.
enum { LINES = 8, AHEAD = 64 }; // lines at once; lines ahead: 4 KiB

static inline __attribute__((always_inline)) uint64_t xor_lines(const line *from, size_t count) {
    line sum[LINES] = {0};
    for (size_t i = 0; i + LINES <= count; i += LINES)
        for (size_t j = 0; j < LINES; j++) {
            __builtin_prefetch(from + i + j + AHEAD);
            sum[j] ^= from[i + j];
        }
    for (size_t j = 1; j < LINES; j++)
        sum[0] ^= sum[j];
    uint64_t words = 0;
    for (int k = 0; k < 8; k++)
        words ^= sum[0][k];
    return words;
}

static uint64_t read_baseline(const line *from, size_t count) {
    return xor_lines(from, count);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static uint64_t read_avx512(const line *from, size_t count) {
    return xor_lines(from, count);
}

__attribute__((target("avx2"))) static uint64_t read_avx2(const line *from, size_t count) {
    return xor_lines(from, count);
}
#endif

typedef uint64_t (*read_lines)(const line *from, size_t count);

static read_lines choose_reader(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return read_avx512;
    if (__builtin_cpu_supports("avx2"))
        return read_avx2;
#endif
    return read_baseline;
}

double trn_read_probe_run(const trn_read_probe *probe, double bytes) {
    enum { PIECE = 1 << 13 }; // words: 64 KiB
    size_t all = probe->words / PIECE, pieces = (size_t)(bytes / (PIECE * sizeof *probe->block));
    if (pieces == 0 || pieces > all)
        pieces = all;
    size_t repeats = all / pieces;
    read_lines read = choose_reader();
    uint64_t sum = 0;
    double start = trn_seconds();
    for (size_t repeat = 0; repeat < repeats; repeat++) {
#pragma omp parallel for schedule(static) reduction(^ : sum)
        for (size_t i = 0; i < pieces; i++)
            sum ^= read((const line *)(probe->block + i * PIECE), PIECE * sizeof *probe->block / sizeof(line));
    }
    double seconds = trn_seconds() - start;
    probe->block[0] ^= sum & 1; // the sum is needed, so the reads are
    return (double)(repeats * pieces * PIECE * sizeof *probe->block) / seconds;
}

static void fill(float *values, size_t count) {
    for (size_t i = 0; i < count; i++)
        values[i] = (float)(i % 251) / 251.0F - 0.5F;
}

static kern_status create_product(trn_matrix_probe *probe, const float *host) {
    kern_weight_desc weight = {.dtype = KERN_F32, .rows = PRODUCT_WIDTH, .cols = PRODUCT_WIDTH, .host = host};
    size_t bytes = sizeof(float) * PRODUCT_TOKENS * PRODUCT_WIDTH;
    kern_status status = kern_stream_open(probe->device, &probe->stream);
    if (status == KERN_OK)
        status = kern_rows_create(probe->device, 1, PRODUCT_TOKENS, 0, 0, 0, 0, &probe->rows);
    if (status == KERN_OK)
        status = kern_weight_create(probe->device, &weight, &probe->weight);
    if (status == KERN_OK)
        status = kern_alloc(probe->device, bytes, &probe->x);
    if (status == KERN_OK)
        status = kern_alloc(probe->device, bytes, &probe->y);
    if (status == KERN_OK)
        status = kern_upload(probe->stream, probe->x, host, bytes);
    return status;
}

static kern_linear_args product(const trn_matrix_probe *probe) {
    return (kern_linear_args){
        .x.p = probe->x, .weight.w = probe->weight, .y.p = probe->y, .cols = PRODUCT_WIDTH, .rows = PRODUCT_WIDTH};
}

eng_status trn_matrix_probe_create(kern_device *device, trn_matrix_probe *out, eng_error *error) {
    trn_matrix_probe probe = {.device = device};
    float *host = malloc(sizeof *host * PRODUCT_WIDTH * PRODUCT_WIDTH);
    if (!host)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the matrix probe");
    fill(host, (size_t)PRODUCT_WIDTH * PRODUCT_WIDTH);
    kern_status status = create_product(&probe, host);
    if (status == KERN_OK) {
        kern_linear_args arguments = product(&probe);
        status = kern_reserve(device, KERN_OP_LINEAR, &arguments);
    }
    free(host);
    if (status == KERN_OK) {
        kern_rows *rows = probe.rows;
        rows->n_rows = 1;
        rows->n_tokens = PRODUCT_TOKENS;
        rows->merge = true;
        rows->row[0] = (kern_row){.kind = KERN_ROW_PROMPT, .slot = -1, .length = PRODUCT_TOKENS, .page0 = -1};
        for (int32_t i = 0; i < PRODUCT_TOKENS; i++)
            rows->target[i] = -1;
        status = kern_rows_prepare(probe.stream, rows);
    }
    if (status != KERN_OK) {
        trn_matrix_probe_free(&probe);
        return eng_fail_kernel(error, status, "preparing the matrix probe");
    }
    *out = probe;
    return ENG_OK;
}

void trn_matrix_probe_free(trn_matrix_probe *probe) {
    if (!probe->device)
        return;
    kern_free(probe->device, probe->x);
    kern_free(probe->device, probe->y);
    kern_weight_free(probe->weight);
    kern_rows_free(probe->rows);
    kern_stream_close(probe->stream);
    *probe = (trn_matrix_probe){0};
}

eng_status trn_matrix_probe_run(trn_matrix_probe *probe, double *rate, eng_error *error) {
    enum { REPEATS = 4 };
    kern_linear_args arguments = product(probe);
    kern_status status = KERN_OK;
    double start = trn_seconds();
    for (int i = 0; status == KERN_OK && i < REPEATS; i++)
        status = kern_launch(probe->stream, KERN_OP_LINEAR, probe->rows, &arguments);
    if (status == KERN_OK)
        status = kern_synchronize(probe->stream);
    double seconds = trn_seconds() - start;
    *rate = REPEATS * 2.0 * PRODUCT_TOKENS * PRODUCT_WIDTH * PRODUCT_WIDTH / seconds;
    return eng_fail_kernel(error, status, "running the matrix probe");
}

// ------------------------------------------------------------------------------------------------------------- copying

eng_status trn_copy_probe_create(kern_device *device, trn_copy_probe *out, eng_error *error) {
    trn_copy_probe probe = {.device = device};
    kern_status status = kern_stream_open(device, &probe.stream);
    if (status == KERN_OK)
        status = kern_alloc(device, COPY_BYTES, &probe.from);
    if (status == KERN_OK)
        status = kern_alloc(device, COPY_BYTES, &probe.to);
    if (status != KERN_OK) {
        trn_copy_probe_free(&probe);
        return eng_fail_kernel(error, status, "allocating blocks to copy");
    }
    *out = probe;
    return ENG_OK;
}

void trn_copy_probe_free(trn_copy_probe *probe) {
    if (!probe->device)
        return;
    kern_stream_close(probe->stream);
    kern_free(probe->device, probe->from);
    kern_free(probe->device, probe->to);
    *probe = (trn_copy_probe){0};
}

eng_status trn_copy_probe_run(const trn_copy_probe *probe, double *rate, eng_error *error) {
    enum { COPIES = 4 };
    double start = trn_seconds();
    kern_status status = KERN_OK;
    for (int i = 0; i < COPIES && status == KERN_OK; i++)
        status = kern_copy(probe->stream, probe->to, probe->from, COPY_BYTES);
    if (status == KERN_OK)
        status = kern_synchronize(probe->stream);
    *rate = 2.0 * COPIES * COPY_BYTES / (trn_seconds() - start);
    return eng_fail_kernel(error, status, "copying device memory");
}

// -------------------------------------------------------------------------------------------------------------- limits

enum { LIMIT_ROUNDS = 3 };

// Reading is the higher limit of a CPU; a device that is asked to read tells no time without computing.
static eng_status measure_memory(kern_device *device, double *rate, eng_error *error) {
    double rates[LIMIT_ROUNDS] = {0};
    trn_read_probe read = {0};
    trn_copy_probe copy = {0};
    const bool copies = kern_device_describe(device)->asynchronous;
    eng_status status = copies ? trn_copy_probe_create(device, &copy, error) : trn_read_probe_create(&read, error);
    for (int i = 0; status == ENG_OK && i < LIMIT_ROUNDS; i++) {
        if (copies)
            status = trn_copy_probe_run(&copy, &rates[i], error);
        else
            rates[i] = trn_read_probe_run(&read, 0);
    }
    trn_copy_probe_free(&copy);
    trn_read_probe_free(&read);
    *rate = trn_median(rates, LIMIT_ROUNDS);
    return status;
}

eng_status trn_limits_measure(kern_device *device, trn_limits *out, eng_error *error) {
    double rates[LIMIT_ROUNDS] = {0};
    trn_matrix_probe matrix = {0};
    eng_status status = measure_memory(device, &out->memory, error);
    if (status == ENG_OK)
        status = trn_matrix_probe_create(device, &matrix, error);
    for (int i = 0; status == ENG_OK && i < LIMIT_ROUNDS; i++)
        status = trn_matrix_probe_run(&matrix, &rates[i], error);
    trn_matrix_probe_free(&matrix);
    out->matrix = trn_median(rates, LIMIT_ROUNDS);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
// Samples in one growing array; see samples.h.
// Ranks are found in integers where a product of doubles would round up by one.
#include "clients/cli/samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void cli_samples_add_many(cli_samples *samples, int64_t value, size_t count) {
    if (samples->failed || count == 0)
        return;
    if (samples->count + count > samples->capacity) {
        size_t capacity = samples->capacity ? samples->capacity : 64;
        while (capacity < samples->count + count)
            capacity *= 2;
        int64_t *grown = realloc(samples->value, capacity * sizeof *grown);
        if (!grown) {
            samples->failed = true;
            return;
        }
        samples->value = grown;
        samples->capacity = capacity;
    }
    for (size_t i = 0; i < count; i++)
        samples->value[samples->count++] = value;
    samples->sorted = false;
}

void cli_samples_add(cli_samples *samples, int64_t value) {
    cli_samples_add_many(samples, value, 1);
}

void cli_samples_add_all(cli_samples *samples, const cli_samples *more) {
    const size_t before = samples->count;

    cli_samples_add_many(samples, 0, more->count);
    if (!samples->failed && more->count)
        memcpy(samples->value + before, more->value, more->count * sizeof *more->value);
    samples->failed = samples->failed || more->failed;
}

void cli_samples_free(cli_samples *samples) {
    free(samples->value);
    *samples = (cli_samples){0};
}

static int ascending(const void *left, const void *right) {
    const int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

int64_t cli_samples_quantile(cli_samples *samples, double q) {
    if (samples->count == 0)
        return 0;
    if (!samples->sorted)
        qsort(samples->value, samples->count, sizeof *samples->value, ascending);
    samples->sorted = true;
    // 0.9 * 10 is 9.000000000000002 in some roundings: the rank is 9, not 10.
    const double exact = q * (double)samples->count, rank = ceil(exact - 1e-9 * exact);
    size_t at = rank < 1 ? 0 : (size_t)rank - 1;
    if (at >= samples->count)
        at = samples->count - 1;
    return samples->value[at];
}

bool cli_samples_resolve(const cli_samples *samples, double q) {
    return (double)samples->count * (1 - q) >= 1 - 1e-9;
}

double cli_samples_mean(const cli_samples *samples) {
    double sum = 0;
    for (size_t i = 0; i < samples->count; i++)
        sum += (double)samples->value[i];
    return samples->count ? sum / (double)samples->count : 0;
}

// SPDX-License-Identifier: Apache-2.0
// Exact distributions of times: every sample is kept, quantiles are samples.
//
// The q-quantile of n samples is the nearest rank: the smallest sample that at least q * n of all samples do not
// exceed. It is always a time that was measured. No histogram, no interpolation.
#ifndef CLIENTS_CLI_SAMPLES_H
#define CLIENTS_CLI_SAMPLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cli_samples {
    int64_t *value; // nanoseconds
    size_t count, capacity;
    bool sorted, failed; // failed: memory ran out, samples are missing
} cli_samples;

void cli_samples_add(cli_samples *samples, int64_t value);
// count times the same value.
void cli_samples_add_many(cli_samples *samples, int64_t value, size_t count);
void cli_samples_add_all(cli_samples *samples, const cli_samples *more);
void cli_samples_free(cli_samples *samples);

// Sorts on demand. 0 < q <= 1; without samples 0.
int64_t cli_samples_quantile(cli_samples *samples, double q);
// Whether n samples can tell the q-quantile from their maximum: n * (1 - q) >= 1.
bool cli_samples_resolve(const cli_samples *samples, double q);
double cli_samples_mean(const cli_samples *samples);

#endif

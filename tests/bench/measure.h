// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder share that measure operations on a device: the clock, the time of a call, medians,
// and an end with a line where an operation is refused.
#ifndef TESTS_BENCH_MEASURE_H
#define TESTS_BENCH_MEASURE_H

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/kernels.h"

static inline void check(kern_status status, const char *what) {
    if (status == KERN_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, kern_status_text(status));
    exit(1);
}

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Seconds of one call, from as many as fill the least time; *count, 1 at first, is kept from round to round.
static inline double time_call(kern_stream *stream, double least_seconds, void (*call)(void *context), void *context,
                               int *count) {
    for (;; *count *= 2) {
        check(kern_synchronize(stream), "waiting");
        const double start = now();
        for (int i = 0; i < *count; i++)
            call(context);
        check(kern_synchronize(stream), "waiting");
        const double seconds = now() - start;
        if (seconds >= least_seconds || *count > 1 << 24)
            return seconds / *count;
    }
}

// Of so many solves, whose reports lie in device memory.
static inline double mean_steps(kern_stream *stream, const void *reports, size_t solves) {
    kern_solve_report *report = malloc(solves * sizeof *report);
    double steps = 0;
    check(report ? KERN_OK : KERN_NO_MEMORY, "reports");
    check(kern_download(stream, report, reports, solves * sizeof *report), "reports");
    check(kern_synchronize(stream), "reports");
    for (size_t i = 0; i < solves; i++)
        steps += report[i].steps;
    free(report);
    return steps / (double)solves;
}

static inline int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Of count >= 1 numbers, which it sorts.
static inline double median(double *x, int count) {
    qsort(x, (size_t)count, sizeof *x, compare_doubles);
    return count % 2 ? x[count / 2] : 0.5 * (x[count / 2 - 1] + x[count / 2]);
}

#endif

// SPDX-License-Identifier: Apache-2.0
// What the programs of this folder share that measure operations on a device: the clock, medians, and an end with a
// line where an operation is refused.
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

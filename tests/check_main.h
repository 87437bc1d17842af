// SPDX-License-Identifier: Apache-2.0
// What every test program written in C shares: main, skipping, comparing arrays, finding the optional outside files.
//
// A test file defines one `static Suite *NAME(void)` and ends with MESA_TEST_MAIN(NAME). Each test case runs in a
// process of its own (libcheck's default), so a crash fails one case only; CK_FORK=no turns that off for a debugger,
// CK_RUN_CASE selects one case. Cases that lack something optional say MESA_TEST_SKIP("why"): tests/run.sh counts these
// lines apart, so that a skipped case never looks like a passed one. A whole program that cannot run exits 77.
//
// Outside files (golden models, data) are in the folder named by MESA_SHARED, else in ../shared beside the source tree.
#ifndef TESTS_CHECK_MAIN_H
#define TESTS_CHECK_MAIN_H

#include <check.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef MESA_SOURCE_DIR
#define MESA_SOURCE_DIR "."
#endif

enum { MESA_TEST_SKIPPED = 77 };

// Ends the running test case without a verdict.
#define MESA_TEST_SKIP(...)            \
    do {                               \
        printf("SKIP %s: ", __func__); \
        printf(__VA_ARGS__);           \
        printf("\n");                  \
        fflush(stdout);                \
        return;                        \
    } while (0)

// Writes the path of an outside file to path; false when it is not there.
static inline bool mesa_test_shared(const char *relative, char *path, size_t size) {
    const char *folder = getenv("MESA_SHARED");
    int length = folder && folder[0] ? snprintf(path, size, "%s/%s", folder, relative)
                                     : snprintf(path, size, "%s/../shared/%s", MESA_SOURCE_DIR, relative);
    return length > 0 && (size_t)length < size && access(path, R_OK) == 0;
}

// Every |got - want| <= absolute + relative * |want|; a NaN or an infinity on one side alone is a failure.
static inline void mesa_test_close(const char *file, int line, const char *what, const float *got, const float *want,
                                   size_t count, double absolute, double relative) {
    size_t worst = 0, failures = 0;
    double worst_excess = -INFINITY;
    for (size_t i = 0; i < count; i++) {
        if (got[i] == want[i])
            continue;
        double excess = fabs((double)got[i] - want[i]) - absolute - relative * fabs((double)want[i]);
        if (excess <= 0)
            continue;
        if (failures++ == 0 || !(excess <= worst_excess)) {
            worst = i;
            worst_excess = excess;
        }
    }
    if (failures)
        ck_abort_msg("%s:%d: %s: %zu of %zu differ; at %zu got %.9g, want %.9g (absolute %g, relative %g)", file, line,
                     what, failures, count, worst, (double)got[worst], (double)want[worst], absolute, relative);
}
#define mesa_assert_close(got, want, count, absolute, relative) \
    mesa_test_close(__FILE__, __LINE__, #got, got, want, count, absolute, relative)

static inline int mesa_test_main(Suite *(*make)(void)) {
    SRunner *runner = srunner_create(make());
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner), run = srunner_ntests_run(runner);
    srunner_free(runner);
    if (run == 0)
        fprintf(stderr, "no test case ran\n"); // an empty suite or a CK_RUN_CASE that names nothing is no success
    return failed == 0 && run > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#define MESA_TEST_MAIN(suite_function)         \
    int main(void) {                           \
        return mesa_test_main(suite_function); \
    }

#endif

// SPDX-License-Identifier: Apache-2.0
// The device that the engine's suites run on: MESA_TEST_DEVICE, or a CPU.
//
// A suite whose cases ask test_device ends with DEVICE_TEST_MAIN. What trains or reads device memory in place names a
// CPU by itself.
#ifndef TESTS_ENGINE_TEST_DEVICE_H
#define TESTS_ENGINE_TEST_DEVICE_H

#include <stdbool.h>

// MESA_TEST_DEVICE; where it is not set, cpu ("cpu", "cpu:16").
const char *test_device(const char *cpu);
bool test_device_is_cpu(void);
// Says `skipped: no device (why)` and returns true when MESA_TEST_DEVICE names one that is not there. The device is
// opened in a child, as one that was opened before a fork is of no use to the cases.
bool test_device_is_missing(void);

#define DEVICE_TEST_MAIN(suite_function)                                                      \
    int main(void) {                                                                          \
        return test_device_is_missing() ? MESA_TEST_SKIPPED : mesa_test_main(suite_function); \
    }

#endif

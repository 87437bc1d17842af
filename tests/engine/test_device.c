// SPDX-License-Identifier: Apache-2.0
// The device of test_device.h.
//
// The name is read from the environment each time, so that a case may choose another before it opens one.
#include "tests/engine/test_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/kernels.h"

const char *test_device(const char *cpu) {
    const char *name = getenv("MESA_TEST_DEVICE");
    return name && name[0] ? name : cpu;
}

bool test_device_is_cpu(void) {
    return strncmp(test_device("cpu"), "cpu", 3) == 0;
}

// In the child. Any other fault than an absent device is left to the cases, which fail by it.
static void probe(void) {
    kern_device *device = NULL;
    char reason[256] = "";
    kern_status status =
        kern_device_open(&(kern_device_options){.name = test_device("cpu")}, &device, reason, sizeof reason);
    if (status == KERN_NO_DEVICE)
        printf("skipped: no device (%s)\n", reason);
    kern_device_close(device);
    fflush(stdout);
    _exit(status == KERN_NO_DEVICE);
}

bool test_device_is_missing(void) {
    int status = 0;
    if (test_device_is_cpu())
        return false;
    pid_t child = fork();
    if (child == 0)
        probe();
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

// SPDX-License-Identifier: Apache-2.0
// The input of a fuzz target as a file, for readers that open one by its path; it is held in memory.
// The source that includes this defines _GNU_SOURCE first.
#ifndef TESTS_FUZZ_MEMORY_FILE_H
#define TESTS_FUZZ_MEMORY_FILE_H

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fuzz/fuzz.h"

// The path is there until the result, a descriptor, is closed.
static inline int memory_file(const uint8_t *data, size_t size, char path[64]) {
    const int fd = memfd_create("input", MFD_CLOEXEC);
    require(fd >= 0);
    for (size_t done = 0; done < size;) {
        const ssize_t put = write(fd, data + done, size - done);
        require(put > 0);
        done += (size_t)put;
    }
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

#endif

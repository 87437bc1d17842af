// SPDX-License-Identifier: Apache-2.0
// What a fuzz target is: one function, in libFuzzer's convention, that returns 0; a broken promise ends the program.
//
// With clang: -fsanitize=fuzzer,address,undefined. With any compiler and corpus_main.c: a program that runs the files
// named on its command line.
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

static inline void require(int condition) {
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif

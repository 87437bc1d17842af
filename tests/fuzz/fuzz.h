// SPDX-License-Identifier: Apache-2.0
// The one function of a fuzz target, in libFuzzer's convention.
//
// Returns 0; a broken promise ends the program.
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif

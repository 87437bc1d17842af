// SPDX-License-Identifier: Apache-2.0
// A keyed permutation of 0..size-1 that is computed at any place without a table.
//
// A Feistel network (Luby and Rackoff 1988) of Philox rounds over the next power of four, walked until the value falls
// below size (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): at most a few evaluations a value.
#ifndef TRAINER_PERMUTATION_H
#define TRAINER_PERMUTATION_H

#include <stdint.h>

// The value at `place` (0 <= place < size) of the permutation of (seed, epoch).
uint64_t trn_permute(uint64_t size, uint64_t seed, uint64_t epoch, uint64_t place);

#endif

// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers: the value at a place depends on the place alone, never on what was drawn before.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) for start weights and the order
// of training data. No state; any thread.
#ifndef ENGINE_RANDOM_H
#define ENGINE_RANDOM_H

#include <stdint.h>

// Four independent uniform words: key = seed, counter words = (counter low, high, stream low, high).
void eng_philox(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t out[4]);

// Elements [first, first + count) of the stream's normal variates N(0, deviation), first a multiple of 4: Box and
// Muller (1958), with a logarithm, sine and cosine of basic IEEE operations only, so that every machine gets the same
// bits.
void eng_normals(uint64_t seed, uint64_t stream, int64_t first, int64_t count, float deviation, float *out);

#endif

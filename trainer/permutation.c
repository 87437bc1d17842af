// SPDX-License-Identifier: Apache-2.0
// The keyed permutation; see permutation.h.
// Six rounds of the network; no state, so any thread may ask for any place.
#include "trainer/permutation.h"

#include "engine/random.h"

enum { ROUNDS = 6 };

// Streams of start weights are small numbers; the order of data lies apart from them.
static const uint64_t order_stream = UINT64_C(1) << 63;

static uint64_t encrypt(uint64_t value, int half, uint64_t seed, uint64_t epoch) {
    uint64_t mask = (UINT64_C(1) << half) - 1, left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint32_t word[4];
        eng_philox(seed, order_stream | epoch, round << 32 | right, word);
        uint64_t next = left ^ (word[0] & mask);
        left = right;
        right = next;
    }
    return left << half | right;
}

uint64_t trn_permute(uint64_t size, uint64_t seed, uint64_t epoch, uint64_t place) {
    int half = 1;
    while (half < 31 && UINT64_C(1) << 2 * half < size)
        half++;
    do
        place = encrypt(place, half, seed, epoch);
    while (place >= size);
    return place;
}

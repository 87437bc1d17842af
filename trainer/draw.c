// SPDX-License-Identifier: Apache-2.0
// Draws from a Philox stream; see draw.h.
// Bounded numbers by multiplication with rejection (Lemire, "Fast random integer generation in an interval", 2019).
#include "trainer/draw.h"

#include <stdbool.h>

#include "engine/random.h"

trn_draw trn_draw_begin(uint64_t seed, uint64_t stream) {
    return (trn_draw){.seed = seed, .stream = stream};
}

static uint32_t next_word(trn_draw *draw) {
    if (draw->left == 0) {
        eng_philox(draw->seed, draw->stream, draw->counter++, draw->word);
        draw->left = 4;
    }
    return draw->word[--draw->left];
}

uint32_t trn_draw_below(trn_draw *draw, uint32_t bound) {
    uint64_t product = (uint64_t)next_word(draw) * bound;
    uint32_t refused = -bound % bound; // 2^32 mod bound
    while ((uint32_t)product < refused)
        product = (uint64_t)next_word(draw) * bound;
    return (uint32_t)(product >> 32);
}

double trn_draw_unit(trn_draw *draw) {
    uint64_t high = next_word(draw) >> 5, low = next_word(draw) >> 6;
    return (double)(high << 26 | low) * 0x1p-53;
}

static bool holds(const int32_t *values, int32_t count, int32_t value) {
    for (int32_t i = 0; i < count; i++)
        if (values[i] == value)
            return true;
    return false;
}

void trn_draw_distinct(trn_draw *draw, int32_t first, int32_t pool, int32_t count, int32_t *out) {
    for (int32_t i = 0; i < count;) {
        out[i] = first + (int32_t)trn_draw_below(draw, (uint32_t)pool);
        i += !holds(out, i, out[i]);
    }
}

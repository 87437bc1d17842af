// SPDX-License-Identifier: Apache-2.0
// Random draws in a row: a stream of numbers that seed and stream number decide alone (engine/random.h), so that what
// is made of one stream does not depend on how much another has drawn. No allocation; one thread a draw.
#ifndef TRAINER_DRAW_H
#define TRAINER_DRAW_H

#include <stdint.h>

typedef struct trn_draw {
    uint64_t seed, stream, counter;
    uint32_t word[4];
    int left; // words not used yet
} trn_draw;

trn_draw trn_draw_begin(uint64_t seed, uint64_t stream);
uint32_t trn_draw_below(trn_draw *draw, uint32_t bound); // uniform in 0 .. bound - 1, bound >= 1
double trn_draw_unit(trn_draw *draw);                    // uniform in [0, 1)
// `count` different numbers of first .. first + pool - 1 in random order, count <= pool.
void trn_draw_distinct(trn_draw *draw, int32_t first, int32_t pool, int32_t count, int32_t *out);

#endif

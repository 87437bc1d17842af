// SPDX-License-Identifier: Apache-2.0
// Learning rates by step: linear warm-up, then cosine to the floor, or flat with a linear end (warm-up, stable, decay).
//
// The rate depends on the step alone, so that a resumed run continues exactly.
#ifndef TRAINER_SCHEDULE_H
#define TRAINER_SCHEDULE_H

#include <stdint.h>

typedef enum trn_schedule_kind { TRN_COSINE, TRN_WSD } trn_schedule_kind;

typedef struct trn_schedule {
    trn_schedule_kind kind;
    double peak, min_ratio; // the floor is min_ratio * peak, reached at the last step
    int64_t warmup, steps;
    double decay_fraction; // WSD: the share of the steps that decay, at the end
} trn_schedule;

// Step 0 .. steps - 1. Warm-up step s has peak (s + 1) / warmup; the last warm-up step has the peak.
double trn_schedule_rate(const trn_schedule *schedule, int64_t step);

#endif

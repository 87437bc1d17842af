// SPDX-License-Identifier: Apache-2.0
// Learning rates by step; see schedule.h.
// Pure functions of the step: a resumed run computes the same rate from its step number alone.
#include "trainer/schedule.h"

#include <math.h>

static const double pi = 3.14159265358979323846;

// How far step is on the way from `first` steps done to all: 0 .. 1, 1 at the last step.
static double progress(int64_t step, int64_t first, int64_t steps) {
    if (steps <= first)
        return 1;
    double fraction = (double)(step + 1 - first) / (double)(steps - first);
    return fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
}

double trn_schedule_rate(const trn_schedule *schedule, int64_t step) {
    double peak = schedule->peak, floor = schedule->min_ratio * peak;
    if (step < schedule->warmup)
        return peak * (double)(step + 1) / (double)schedule->warmup;
    if (schedule->kind == TRN_COSINE)
        return floor + (peak - floor) * 0.5 * (1 + cos(pi * progress(step, schedule->warmup, schedule->steps)));
    int64_t start = schedule->steps - (int64_t)llround(schedule->decay_fraction * (double)schedule->steps);
    if (start < schedule->warmup)
        start = schedule->warmup;
    return step < start ? peak : peak + (floor - peak) * progress(step, start, schedule->steps);
}

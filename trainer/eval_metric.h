// SPDX-License-Identifier: Apache-2.0
// Estimates with standard errors.
//
// A metric is a ratio of sums over items, sum(value) / sum(weight): a mean where every weight is 1, bits per byte where
// the value of a document is its bits and the weight its bytes. The error of a ratio is the linearised one, sqrt(n / (n
// - 1) sum((value - ratio weight)^2)) / sum(weight) (Cochran, "Sampling techniques", 1977, 6.2), which for weights of 1
// is the usual error of a mean, and for values 0 and 1 the binomial one with n - 1. Items without a value (NAN) do not
// count. No state; any thread.
#ifndef TRAINER_EVAL_METRIC_H
#define TRAINER_EVAL_METRIC_H

#include <stdbool.h>
#include <stdint.h>

typedef struct trn_metric {
    char name[40];
    double *value, *weight; // (items); weight NULL: 1 each
    int64_t items;
    double chance; // of guessing; NAN: none
} trn_metric;

typedef struct trn_estimate {
    double mean, error; // NAN: nothing to estimate from (error: fewer than two items)
    int64_t count;
} trn_estimate;

// Of the items that are not left out and are of the group. left_out (items) may be NULL, group (items) too.
trn_estimate trn_metric_estimate(const trn_metric *metric, const bool *left_out, const int32_t *group, int32_t which);
// a - b over the same items, which must have the same weights. false: they have not.
bool trn_metric_difference(const trn_metric *a, const trn_metric *b, const bool *left_out, trn_estimate *out);

#endif

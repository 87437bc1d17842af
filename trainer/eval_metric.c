// SPDX-License-Identifier: Apache-2.0
// Ratios of sums and their errors; see eval_metric.h.
// Two passes, so that nothing cancels. No state; any thread.
#include "trainer/eval_metric.h"

#include <math.h>
#include <stddef.h>

typedef struct selection {
    const double *value, *minus, *weight; // minus: subtracted; NULL: nothing
    int64_t items;
    const bool *left_out;
    const int32_t *group;
    int32_t which;
} selection;

static bool counts(const selection *s, int64_t i) {
    return !(s->left_out && s->left_out[i]) && !(s->group && s->group[i] != s->which) && !isnan(s->value[i]) &&
           !(s->minus && isnan(s->minus[i]));
}

static double value_of(const selection *s, int64_t i) {
    return s->value[i] - (s->minus ? s->minus[i] : 0);
}

static double weight_of(const selection *s, int64_t i) {
    return s->weight ? s->weight[i] : 1;
}

static trn_estimate estimate(const selection *s) {
    trn_estimate out = {NAN, NAN, 0};
    double values = 0, weights = 0, squares = 0;
    for (int64_t i = 0; i < s->items; i++) {
        if (!counts(s, i))
            continue;
        values += value_of(s, i);
        weights += weight_of(s, i);
        out.count++;
    }
    if (!(weights > 0))
        return out;
    out.mean = values / weights;
    for (int64_t i = 0; i < s->items; i++) {
        double rest = counts(s, i) ? value_of(s, i) - out.mean * weight_of(s, i) : 0;
        squares += rest * rest;
    }
    double n = (double)out.count;
    if (out.count > 1)
        out.error = sqrt(n / (n - 1) * squares) / weights;
    return out;
}

trn_estimate trn_metric_estimate(const trn_metric *metric, const bool *left_out, const int32_t *group, int32_t which) {
    return estimate(&(selection){.value = metric->value,
                                 .weight = metric->weight,
                                 .items = metric->items,
                                 .left_out = left_out,
                                 .group = group,
                                 .which = which});
}

bool trn_metric_difference(const trn_metric *a, const trn_metric *b, const bool *left_out, trn_estimate *out) {
    if (a->items != b->items || !a->weight != !b->weight)
        return false;
    for (int64_t i = 0; a->weight && i < a->items; i++)
        if (a->weight[i] != b->weight[i])
            return false;
    *out = estimate(&(selection){
        .value = a->value, .minus = b->value, .weight = a->weight, .items = a->items, .left_out = left_out});
    return true;
}

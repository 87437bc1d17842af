// SPDX-License-Identifier: Apache-2.0
// Rules of exits; see exit_rules.h.
// Limits of entropy and change are quantiles of what the data has of them, so that they reach all mean depths.
#include "trainer/exit_rules.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double thresholds[] = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9};
enum { THRESHOLDS = sizeof thresholds / sizeof *thresholds, SAMPLE = 4096 };

static const char *const names[] = {
    [TRN_EXIT_LOOP] = "loop",       [TRN_EXIT_GATE] = "gate",       [TRN_EXIT_MATCHED] = "matched",
    [TRN_EXIT_BETWEEN] = "between", [TRN_EXIT_ENTROPY] = "entropy", [TRN_EXIT_CHANGE] = "change",
    [TRN_EXIT_SHARES] = "shares",   [TRN_EXIT_ORACLE] = "oracle"};

static const char *const legends[] = {[TRN_EXIT_LOOP] = "fixed loop",
                                      [TRN_EXIT_GATE] = "gate",
                                      [TRN_EXIT_MATCHED] = "random, the gate's shares",
                                      [TRN_EXIT_BETWEEN] = "between fixed loops",
                                      [TRN_EXIT_ENTROPY] = "entropy",
                                      [TRN_EXIT_CHANGE] = "divergence from the loop before",
                                      [TRN_EXIT_SHARES] = "random, given shares",
                                      [TRN_EXIT_ORACLE] = "oracle (bound)"};

void trn_exit_rule_name(const trn_exit_rule *rule, char *name, size_t size) {
    if (rule->kind >= TRN_EXIT_SHARES)
        snprintf(name, size, "%s", names[rule->kind]);
    else
        snprintf(name, size, "%s %.4g", names[rule->kind], rule->at);
}

trn_exit_kind trn_exit_kind_of(const char *setting) {
    const size_t length = strcspn(setting, " ");
    int kind = 0;
    while (kind < TRN_EXIT_KINDS && (strlen(names[kind]) != length || strncmp(names[kind], setting, length) != 0))
        kind++;
    return (trn_exit_kind)kind;
}

const char *trn_exit_kind_name(trn_exit_kind kind) {
    return legends[kind];
}

// The first loop whose value is at most `most`, or at least `least`; the last one at any rate.
static int32_t first_at_most(const float *value, int32_t loops, double most) {
    int32_t loop = 0;
    while (loop + 1 < loops && !((double)value[loop] <= most))
        loop++;
    return loop;
}

static int32_t first_at_least(const float *value, int32_t loops, float least) {
    int32_t loop = 0;
    while (loop + 1 < loops && !(value[loop] >= least))
        loop++;
    return loop;
}

static int32_t least_of(const float *value, int32_t count) {
    int32_t best = 0;
    for (int32_t i = 1; i < count; i++)
        best = value[i] < value[best] ? i : best;
    return best;
}

static int32_t choose(const trn_exit_data *data, const trn_exit_rule *rule, int64_t target) {
    const int64_t first = target * data->loops;
    switch (rule->kind) {
    case TRN_EXIT_LOOP:
        return (int32_t)rule->at - 1;
    case TRN_EXIT_GATE:
        return first_at_least(data->gate + first, data->loops, (float)rule->at);
    case TRN_EXIT_ENTROPY:
        return first_at_most(data->entropy + first, data->loops, rule->at);
    case TRN_EXIT_CHANGE:
        return first_at_most(data->change + first, data->loops, rule->at);
    default:
        return least_of(data->loss + first, data->loops);
    }
}

void trn_exit_weigh(const trn_exit_data *data, const trn_exit_rule *rule, int64_t target, double *weight) {
    const bool mixed =
        rule->kind == TRN_EXIT_MATCHED || rule->kind == TRN_EXIT_BETWEEN || rule->kind == TRN_EXIT_SHARES;
    for (int32_t r = 0; r < data->loops; r++)
        weight[r] = mixed ? rule->share[r] : 0;
    if (!mixed)
        weight[choose(data, rule, target)] = 1;
}

// --------------------------------------------------------------------------------------------------------------- rules

// The two that a gate is held against, from how often it takes each loop.
static void add_gate(const trn_exit_data *data, double threshold, trn_exit_rule *out) {
    double mean = 0;
    out[0] = (trn_exit_rule){.kind = TRN_EXIT_GATE, .at = threshold};
    out[1] = (trn_exit_rule){.kind = TRN_EXIT_MATCHED, .at = threshold};
    out[2] = (trn_exit_rule){.kind = TRN_EXIT_BETWEEN, .at = threshold};
    for (int64_t t = 0; t < data->targets; t++)
        out[1].share[choose(data, &out[0], t)] += 1.0 / (double)data->targets;
    for (int32_t r = 0; r < data->loops; r++)
        mean += r * out[1].share[r];
    const int32_t low = (int32_t)mean < data->loops - 1 ? (int32_t)mean : data->loops - 2;
    out[2].share[low] = 1 - (mean - low);
    out[2].share[low + 1] = mean - low;
}

static int ascending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Limits at quantiles of the values at all loops but the last, of targets evenly spread; a limit twice counts once.
static int add_limits(const trn_exit_data *data, trn_exit_kind kind, const float *value, trn_exit_rule *out) {
    float sample[SAMPLE];
    int count = 0, rules = 0;
    const int32_t first = kind == TRN_EXIT_CHANGE, each = data->loops - 1 - first;
    const int64_t most = each > 0 ? SAMPLE / each : 0, targets = data->targets < most ? data->targets : most;
    for (int64_t i = 0; i < targets; i++)
        for (int32_t r = first; r + 1 < data->loops; r++)
            sample[count++] = value[i * data->targets / targets * data->loops + r];
    qsort(sample, (size_t)count, sizeof *sample, ascending);
    for (int i = 0; i < THRESHOLDS && count > 0; i++) {
        const double limit = (double)sample[(int)(thresholds[i] * count)];
        if (rules == 0 || limit > out[rules - 1].at)
            out[rules++] = (trn_exit_rule){.kind = kind, .at = limit};
    }
    return rules;
}

int trn_exit_rules(const trn_exit_data *data, const double *shares, trn_exit_rule out[TRN_EXIT_RULES]) {
    int rules = 0;
    for (int32_t r = 1; r <= data->loops; r++)
        out[rules++] = (trn_exit_rule){.kind = TRN_EXIT_LOOP, .at = r};
    for (int i = 0; data->gated && i < THRESHOLDS; i++, rules += 3)
        add_gate(data, thresholds[i], &out[rules]);
    rules += add_limits(data, TRN_EXIT_ENTROPY, data->entropy, &out[rules]);
    rules += add_limits(data, TRN_EXIT_CHANGE, data->change, &out[rules]);
    if (shares) {
        out[rules] = (trn_exit_rule){.kind = TRN_EXIT_SHARES};
        memcpy(out[rules++].share, shares, sizeof *shares * (size_t)data->loops);
    }
    out[rules++] = (trn_exit_rule){.kind = TRN_EXIT_ORACLE};
    return rules;
}

eng_status trn_exit_read_shares(const char *text, int32_t loops, double *out, eng_error *error) {
    double sum = 0;
    const char *at = text;
    for (int32_t r = 0; r < loops; r++) {
        char *end = NULL;
        out[r] = strtod(at, &end);
        if (end == at || !(out[r] >= 0 && out[r] <= 1e6) || *end != (r + 1 < loops ? ',' : '\0'))
            return eng_fail(error, ENG_INVALID, "--exit-shares: \"%.40s\" is no list of %d numbers such as 0.2,0.3,0.5",
                            text, loops);
        sum += out[r];
        at = end + 1;
    }
    if (sum == 0)
        return eng_fail(error, ENG_INVALID, "--exit-shares: all are 0");
    for (int32_t r = 0; r < loops; r++)
        out[r] /= sum;
    return ENG_OK;
}

// ----------------------------------------------------------------------------------------------------------------- row

enum { LOSS, HITS, DEPTH, SUMS };

static void sum_window(const trn_exit_data *data, const trn_exit_rule *rule, int64_t first, int64_t end, double *sum) {
    double weight[ENG_MAX_LOOPS];
    memset(sum, 0, SUMS * sizeof *sum);
    for (int64_t t = first; t < end; t++) {
        trn_exit_weigh(data, rule, t, weight);
        for (int32_t r = 0; r < data->loops; r++) {
            const int64_t at = t * data->loops + r;
            if (weight[r] == 0)
                continue;
            sum[LOSS] += weight[r] * (double)data->loss[at];
            sum[HITS] += weight[r] * data->right[at];
            sum[DEPTH] += weight[r] * (r + 1);
        }
    }
}

eng_status trn_exit_row(const trn_exit_data *data, const trn_exit_rule *rule, const char *task, bool examples,
                        trn_result_row *out, eng_error *error) {
    static const char *const metrics[SUMS] = {[LOSS] = "loss", [HITS] = "acc", [DEPTH] = "loops"};
    double sum[SUMS];
    eng_status status = trn_result_row_create(task, data->windows, out, error);
    if (status != ENG_OK)
        return status;
    for (int m = 0; m < SUMS; m++)
        if (!trn_result_metric(out, metrics[m], true)) {
            trn_result_row_free(out);
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for a row of results");
        }
    for (int64_t w = 0, first = 0; w < data->windows; first = data->end[w++]) {
        sum_window(data, rule, first, data->end[w], sum);
        for (int m = 0; m < SUMS && data->end[w] > first; m++) {
            out->metric[m].value[w] = sum[m];
            out->metric[m].weight[w] = (double)(data->end[w] - first);
        }
    }
    snprintf(out->primary, sizeof out->primary, "%s", metrics[examples ? HITS : LOSS]);
    trn_exit_rule_name(rule, out->setting.name, sizeof out->setting.name);
    return ENG_OK;
}

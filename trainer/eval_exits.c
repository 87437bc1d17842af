// SPDX-License-Identifier: Apache-2.0
// The table of exits; see eval_exits.h.
// A gate's row tells besides, with 95 % intervals over windows, what it gains over exits that know nothing of the
// token.
#include "trainer/eval_exits.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/files.h"
#include "trainer/eval_tasks.h"
#include "trainer/exit_rules.h"

typedef struct table {
    trn_evaluation *e;
    const trn_exit_options *options;
    const eng_knobs *knobs;
    trn_exit_data data;
    trn_exit_rule rule[TRN_EXIT_RULES];
    int rules;
    trn_result result; // a row a rule
} table;

enum { ROUNDS = 5 };

static void set_knobs(const table *t, const trn_exit_rule *rule, trn_result_row *row) {
    const bool gate = rule->kind == TRN_EXIT_GATE;
    row->setting.knobs = *t->knobs;
    if (gate || rule->kind == TRN_EXIT_LOOP) {
        row->setting.knobs.exit_threshold = gate ? (float)rule->at : 1;
        row->setting.knobs.max_loops = gate ? t->data.loops : (int32_t)rule->at;
    }
}

static eng_status time_row(table *t, trn_result_row *row, eng_error *error) {
    trn_reading_figures *figures = &row->figures;
    int64_t tokens = 0;
    double seconds = 0;
    eng_status status = trn_exit_time(t->e, &row->setting.knobs, t->options->tokens, &tokens, &seconds, error);
    if (figures->tokens == 0 || seconds < figures->seconds)
        figures->seconds = seconds;
    figures->tokens = tokens;
    return status;
}

// Of the rows that a request can ask for. Round after round, so that what else the machine does falls on all of them;
// the least time of each counts.
static eng_status time_rows(table *t, eng_error *error) {
    eng_status status = ENG_OK;
    for (int round = 0; round < ROUNDS && t->options->tokens > 0; round++) {
        for (int i = 0; status == ENG_OK && i < t->rules; i++)
            if (t->rule[i].kind == TRN_EXIT_LOOP || t->rule[i].kind == TRN_EXIT_GATE)
                status = time_row(t, &t->result.row[i], error);
        trn_progress_part(&t->e->progress, (uint64_t)round + 1, ROUNDS, "timing");
    }
    trn_progress_end(&t->e->progress);
    return status;
}

static eng_status add_row(table *t, const trn_exit_rule *rule, eng_error *error) {
    char task[96];
    const trn_strings *data = &t->options->data;
    snprintf(task, sizeof task, "%.64s%s", eng_path_tail(data->item[0]), data->count > 1 ? " and others" : "");
    trn_result_row row = {0};
    eng_status status = trn_exit_row(&t->data, rule, task, trn_dataset_has_examples(t->e->dataset), &row, error);
    if (status != ENG_OK)
        return status;
    snprintf(row.digest, sizeof row.digest, "%016" PRIx64, t->data.digest);
    set_knobs(t, rule, &row);
    status = trn_result_add(&t->result, &row, error);
    trn_result_row_free(&row);
    return status;
}

static trn_estimate estimate_of(const trn_result_row *row, const char *metric) {
    return trn_metric_estimate(trn_result_find(row, metric), NULL, NULL, 0);
}

// A row less another, over the same windows; what would be written as 0 is neither better nor worse.
static void print_gain(const trn_result_row *row, const trn_result_row *other, const char *metric) {
    const bool share = strcmp(metric, "acc") == 0;
    const double scale = share ? 100 : 1, shown = share ? 0.005 : 0.00005;
    const int digits = share ? 2 : 4;
    trn_estimate gain;
    if (!trn_metric_difference(trn_result_find(row, metric), trn_result_find(other, metric), NULL, &gain))
        return;
    const double mean = scale * gain.mean, reach = scale * 1.96 * gain.error;
    const bool apart = fabs(mean) > reach && fabs(mean) >= shown;
    printf(" %+.*f (%+.*f .. %+.*f)%s |", digits, mean, digits, mean - reach, digits, mean + reach,
           !apart                ? ""
           : (mean > 0) == share ? " better"
                                 : " worse");
}

static void print_row(const table *t, int number) {
    const trn_result_row *row = &t->result.row[number];
    const trn_estimate loss = estimate_of(row, "loss"), right = estimate_of(row, "acc");
    printf("| %s | %.3f |", row->setting.name, estimate_of(row, "loops").mean);
    printf(" %.4f ± %.4f | %.2f ± %.2f %% |", loss.mean, loss.error, 100 * right.mean, 100 * right.error);
    if (row->figures.tokens > 0)
        printf(" %.3f |", 1e3 * row->figures.seconds / (double)row->figures.tokens);
    else
        printf(" |");
    if (t->rule[number].kind == TRN_EXIT_GATE) {
        for (int m = 0; m < 4; m++)
            print_gain(row, row + 1 + m / 2, m % 2 ? "acc" : "loss");
    } else
        printf(" | | | |");
    printf("\n");
}

static eng_status fill(table *t, eng_error *error) {
    double shares[ENG_MAX_LOOPS];
    eng_status status = ENG_OK;
    if (t->options->shares)
        status = trn_exit_read_shares(t->options->shares, t->e->model->config.loop.loops, shares, error);
    if (status == ENG_OK)
        status = trn_exit_data_read(t->e, eng_solver(t->knobs), &t->data, error);
    if (status == ENG_OK)
        t->rules = trn_exit_rules(&t->data, t->options->shares ? shares : NULL, t->rule);
    for (int i = 0; status == ENG_OK && i < t->rules; i++) {
        trn_progress_part(&t->e->progress, (uint64_t)i, (uint64_t)t->rules, "rules of exits");
        status = add_row(t, &t->rule[i], error);
    }
    trn_progress_end(&t->e->progress);
    return status == ENG_OK ? time_rows(t, error) : status;
}

eng_status trn_exit_table(trn_evaluation *e, const char *dir, const trn_exit_options *options, const eng_knobs *knobs,
                          eng_error *error) {
    table t = {.e = e, .options = options, .knobs = knobs};
    eng_status status = trn_result_check_output(options->out, error);
    if (status == ENG_OK)
        status = trn_result_describe(e, dir, options->name, &t.result, error);
    if (status == ENG_OK)
        status = fill(&t, error);
    if (status == ENG_OK && options->out)
        status = trn_result_write(&t.result, options->out, error);
    if (status == ENG_OK)
        puts("| read at | loops | loss | right | ms a token | gate less its shares at random, 95 %: loss | right, % | "
             "gate less between fixed loops: loss | right, % |\n|---|---|---|---|---|---|---|---|---|");
    for (int i = 0; status == ENG_OK && i < t.rules; i++)
        print_row(&t, i);
    trn_exit_data_free(&t.data);
    trn_result_free(&t.result);
    return status;
}

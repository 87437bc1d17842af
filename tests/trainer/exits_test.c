// SPDX-License-Identifier: Apache-2.0
// Rules of exits: what all loops say is what scoring says at each of them, rules choose what they promise on values
// made by hand, and the table is kept and drawn.
#include "trainer/exit_rules.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/commands.h"
#include "trainer/probe.h"

enum { CONTEXT = 48, LOOPS = 3, DOCUMENTS = 12 };

static const char gated[] =
    "model_type = mesa_net\nhidden_size = 32\nnum_hidden_layers = 2\nnum_heads = 2\nhead_dim = 16\n"
    "intermediate_size = 64\ntie_word_embeddings = false\ninitializer_range = 0.2\nloop_blocks = [1]\n"
    "num_loops = 3\nexit_gate = true\n";

// A checkpoint whose gate tells tokens apart, or with a head that tells nothing; and data for it.
static void write_model(bool silent) {
    int lengths[DOCUMENTS];
    trn_run run;
    eng_error error = {0};
    for (int i = 0; i < DOCUMENTS; i++)
        lengths[i] = 40 + 7 * i;
    write_documents("d", lengths, DOCUMENTS);
    open_run(write_run(gated, "d", CONTEXT, "[train]\nsteps = 1\nbatch_tokens = 192\nmicro_rows = 2\n"), &run);
    for (int i = 0; i < 32; i++)
        run.weights->master[run.model->exit_gate][i] = 0.5F * sinf((float)i);
    const size_t head = (size_t)run.model->tensor[run.model->head].count;
    if (silent)
        memset(run.weights->master[run.model->head], 0, sizeof(float) * head);
    ck_assert_msg(eng_checkpoint_save(temp_path("m"), run.weights, ENG_F32, NULL, &error) == ENG_OK, "%s", error.text);
    trn_run_close(&run);
}

static void open_model(trn_evaluation *e) {
    static char data[512];
    eng_error error = {0};
    snprintf(data, sizeof data, "%s", temp_path("d"));
    const trn_evaluation_options options = {
        .data = {{data}, 1}, .device = "cpu", .context = CONTEXT, .batch_tokens = 200};
    ck_assert_msg(trn_evaluation_open(temp_path("m"), &options, e, &error) == ENG_OK, "%s", error.text);
}

static void read_data(trn_evaluation *e, trn_exit_data *data) {
    eng_error error = {0};
    ck_assert_msg(trn_exit_data_read(e, trn_model_solver(e->model), data, &error) == ENG_OK, "%s", error.text);
}

// What a rule that is served says, and what scoring at the same exit says.
static void same_scores(trn_evaluation *e, const trn_exit_data *data, trn_exit_rule rule, kern_exit at) {
    trn_scores scores;
    trn_result_row row;
    e->runner.exit = at;
    ck_assert_int_eq(trn_evaluation_score(e, trn_model_solver(e->model), &scores, NULL), ENG_OK);
    ck_assert_int_eq(trn_exit_row(data, &rule, "d", false, &row, NULL), ENG_OK);
    const double targets = (double)scores.targets;
    const trn_estimate loss = trn_metric_estimate(trn_result_find(&row, "loss"), NULL, NULL, 0),
                       loops = trn_metric_estimate(trn_result_find(&row, "loops"), NULL, NULL, 0),
                       right = trn_metric_estimate(trn_result_find(&row, "acc"), NULL, NULL, 0);
    ck_assert_int_eq(data->targets, scores.targets);
    ck_assert_double_eq_tol(loops.mean, (double)scores.loops / targets, 1e-9);
    ck_assert_double_eq_tol(loss.mean, scores.loss / targets, 1e-5);
    ck_assert_double_eq_tol(right.mean, (double)scores.hits.targets / targets, 1e-9);
    trn_result_row_free(&row);
}

START_TEST(all_loops_are_what_scoring_says) {
    trn_evaluation e;
    trn_exit_data data;
    double mean = 0;
    write_model(false);
    open_model(&e);
    read_data(&e, &data);
    ck_assert_int_eq(data.windows, e.windows.count);
    ck_assert_int_eq(data.end[data.windows - 1], data.targets);
    for (int r = 1; r <= LOOPS; r++)
        same_scores(&e, &data, (trn_exit_rule){.kind = TRN_EXIT_LOOP, .at = r}, (kern_exit){1, r});
    for (double q = 0.1; q < 0.95; q += 0.1)
        same_scores(&e, &data, (trn_exit_rule){.kind = TRN_EXIT_GATE, .at = q}, (kern_exit){(float)q, LOOPS});
    for (int64_t t = 0; t < data.targets; t++) {
        double weight[ENG_MAX_LOOPS];
        trn_exit_weigh(&data, &(trn_exit_rule){.kind = TRN_EXIT_GATE, .at = 0.6}, t, weight);
        mean += (weight[1] + 2 * weight[2]) / (double)data.targets;
    }
    ck_assert(mean > 0.1 && mean < 1.9); // it does choose
    trn_exit_data_free(&data);
    trn_evaluation_close(&e);
}
END_TEST

// Logits of the first window when the model has so many loops: those of a looped model's loop `loops`.
static void read_logits(const trn_row *row, int loops, float *logits) {
    char text[8192], *number;
    trn_probe probe;
    eng_error error = {0};
    FILE *file = fopen(temp_path("m/config.json"), "r");
    ck_assert_ptr_nonnull(file);
    const size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = '\0';
    ck_assert_ptr_nonnull(number = strstr(text, "\"num_loops\":"));
    number += strcspn(number, "123");
    *number = (char)('0' + loops);
    temp_write("m/config.json", text, size);
    ck_assert_msg(trn_probe_open(temp_path("m"), "cpu", false, KERN_STORE_F32, &probe, &error) == ENG_OK, "%s",
                  error.text);
    ck_assert_int_eq(
        trn_probe_logits(&probe, row->id, row->length, row->length, trn_model_solver(probe.model), logits, &error),
        ENG_OK);
    trn_probe_close(&probe);
}

static void log_softmax(const float *logits, double *log_p) {
    double sum = 0;
    for (int i = 0; i < TEST_VOCABULARY; i++)
        sum += exp((double)logits[i]);
    for (int i = 0; i < TEST_VOCABULARY; i++)
        log_p[i] = (double)logits[i] - log(sum);
}

START_TEST(entropies_and_divergences_are_those_of_the_logits) {
    static float logits[LOOPS][CONTEXT * TEST_VOCABULARY];
    double log_p[TEST_VOCABULARY], before[TEST_VOCABULARY], largest = 0;
    trn_evaluation e;
    trn_exit_data data;
    trn_row row;
    write_model(false);
    open_model(&e);
    read_data(&e, &data);
    const trn_window *window = &e.windows.window[0];
    ck_assert_int_eq(trn_row_create(CONTEXT, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_window(e.dataset, window->document, window->first, window->count, &row, NULL), ENG_OK);
    ck_assert_int_eq(data.end[0], row.length); // each has a target
    for (int r = 0; r < LOOPS; r++)
        read_logits(&row, r + 1, logits[r]);
    for (int32_t t = 0; t < row.length; t++)
        for (int r = 0; r < LOOPS; r++) {
            double entropy = 0, change = 0;
            log_softmax(logits[r] + (size_t)t * TEST_VOCABULARY, log_p);
            for (int i = 0; i < TEST_VOCABULARY; i++) {
                entropy -= exp(log_p[i]) * log_p[i];
                change += r > 0 ? exp(log_p[i]) * (log_p[i] - before[i]) : 0;
                before[i] = log_p[i];
            }
            ck_assert_double_eq_tol((double)data.entropy[t * LOOPS + r], entropy, 1e-5);
            if (r > 0)
                ck_assert_double_eq_tol((double)data.change[t * LOOPS + r], change, 1e-5);
            largest = change > largest ? change : largest;
        }
    ck_assert(largest > 1e-3);
    trn_row_free(&row);
    trn_exit_data_free(&data);
    trn_evaluation_close(&e);
}
END_TEST

START_TEST(a_silent_head_is_uniform) {
    trn_evaluation e;
    trn_exit_data data;
    write_model(true);
    open_model(&e);
    read_data(&e, &data);
    for (int64_t i = 0; i < data.targets * LOOPS; i++) {
        ck_assert_double_eq_tol((double)data.entropy[i], log(TEST_VOCABULARY), 1e-5);
        ck_assert_double_eq_tol((double)data.loss[i], log(TEST_VOCABULARY), 1e-5);
        ck_assert(i % LOOPS == 0 ? isinf(data.change[i]) : data.change[i] == 0);
    }
    trn_exit_data_free(&data);
    trn_evaluation_close(&e);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- rules

// Four targets of two windows, and one window without any.
static int64_t ends[] = {1, 1, 4};
static float losses[] = {3, 1, 2, 5, 4, 1, 1, 2, 3, 2, 2, 0.5F}, entropies[] = {0.5F, 2, 3, 3, 1, 9, 2, 2, 2, 9, 9, 9},
             changes[] = {INFINITY, 0.1F, 5, INFINITY, 2, 0, INFINITY, 0.5F, 0, INFINITY, 3, 3},
             gates[] = {0.2F, 0.9F, 1, 0.6F, 0.7F, 1, 0.1F, 0.3F, 1, 0.55F, 0.5F, 1};
static bool rights[] = {false, true, true, false, false, true, true, true, false, false, false, true};
static const trn_exit_data made = {.loops = LOOPS,
                                   .gated = true,
                                   .targets = 4,
                                   .windows = 3,
                                   .end = ends,
                                   .loss = losses,
                                   .entropy = entropies,
                                   .change = changes,
                                   .gate = gates,
                                   .right = rights};

START_TEST(rules_choose_what_they_promise) {
    static const struct {
        trn_exit_rule rule;
        int loop[4]; // from 1
    } cases[] = {
        {{.kind = TRN_EXIT_LOOP, .at = 2}, {2, 2, 2, 2}},     {{.kind = TRN_EXIT_GATE, .at = 0.5}, {2, 1, 3, 1}},
        {{.kind = TRN_EXIT_GATE, .at = 0.95}, {3, 3, 3, 3}},  {{.kind = TRN_EXIT_ENTROPY, .at = 1}, {1, 2, 3, 3}},
        {{.kind = TRN_EXIT_CHANGE, .at = 0.5}, {2, 3, 2, 3}}, {{.kind = TRN_EXIT_ORACLE}, {2, 3, 1, 3}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int t = 0; t < 4; t++) {
            double weight[ENG_MAX_LOOPS] = {0};
            trn_exit_weigh(&made, &cases[i].rule, t, weight);
            for (int r = 0; r < LOOPS; r++)
                ck_assert_msg(weight[r] == (r + 1 == cases[i].loop[t]), "case %zu, target %d, loop %d", i, t, r + 1);
        }
}
END_TEST

static const trn_exit_rule *find_rule(const trn_exit_rule *rule, int rules, trn_exit_kind kind, double at) {
    for (int i = 0; i < rules; i++)
        if (rule[i].kind == kind && fabs(rule[i].at - at) < 1e-9)
            return &rule[i];
    ck_abort_msg("no such rule");
}

static double mean_of(const trn_exit_rule *rule, const char *metric) {
    trn_result_row row;
    ck_assert_int_eq(trn_exit_row(&made, rule, "d", true, &row, NULL), ENG_OK);
    const trn_metric *values = trn_result_find(&row, metric);
    ck_assert_int_eq(values->items, 3);
    ck_assert(isnan(values->value[1])); // nothing is asked for there
    ck_assert_str_eq(row.primary, "acc");
    ck_assert_int_eq(trn_exit_kind_of(row.setting.name), rule->kind);
    const double mean = trn_metric_estimate(values, NULL, NULL, 0).mean;
    trn_result_row_free(&row);
    return mean;
}

// The gate at 0.5 takes loops 2 1 3 1: half of all at the first, a quarter at the others; in the mean 1.75.
START_TEST(baselines_know_the_gates_shares_alone) {
    trn_exit_rule rule[TRN_EXIT_RULES];
    const int rules = trn_exit_rules(&made, (double[]){0.5, 0, 0.5}, rule);
    const trn_exit_rule *gate = find_rule(rule, rules, TRN_EXIT_GATE, 0.5),
                        *matched = find_rule(rule, rules, TRN_EXIT_MATCHED, 0.5),
                        *between = find_rule(rule, rules, TRN_EXIT_BETWEEN, 0.5);
    const double first = 11.0 / 4, second = 9.0 / 4, third = 6.5 / 4; // mean losses of the loops
    ck_assert_double_eq_tol(mean_of(gate, "loops"), 1.75, 1e-9);
    ck_assert_double_eq_tol(mean_of(gate, "loss"), (1 + 5 + 3 + 2) / 4.0, 1e-6);
    ck_assert_double_eq_tol(mean_of(gate, "acc"), 0.25, 1e-9);
    ck_assert_double_eq_tol(mean_of(matched, "loops"), 1.75, 1e-9);
    ck_assert_double_eq_tol(mean_of(matched, "loss"), 0.5 * first + 0.25 * second + 0.25 * third, 1e-6);
    ck_assert_double_eq_tol(mean_of(between, "loops"), 1.75, 1e-9);
    ck_assert_double_eq_tol(mean_of(between, "loss"), 0.25 * first + 0.75 * second, 1e-6);
    ck_assert_double_eq_tol(mean_of(find_rule(rule, rules, TRN_EXIT_ORACLE, 0), "loss"), (1 + 1 + 1 + 0.5) / 4, 1e-6);
    ck_assert_double_eq_tol(mean_of(find_rule(rule, rules, TRN_EXIT_SHARES, 0), "loss"), (first + third) / 2, 1e-6);
    double last = 0; // limits ascend
    for (int i = 0; i < rules; i++)
        if (rule[i].kind == TRN_EXIT_ENTROPY) {
            ck_assert_double_gt(rule[i].at, last);
            last = rule[i].at;
        }
    ck_assert_double_gt(last, 0);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- table

START_TEST(shares_are_read) {
    static const char *const bad[] = {"",      "1,1",   "1,1,1,1", "0,0,0",  "1,-1,1",
                                      "1,x,1", "1 1,1", "1,1,1x",  "1,1,1,", "1,nan,1"};
    double share[ENG_MAX_LOOPS];
    eng_error error = {0};
    ck_assert_int_eq(trn_exit_read_shares("1,2.5,1.5", LOOPS, share, &error), ENG_OK);
    ck_assert(share[0] == 0.2 && share[1] == 0.5 && share[2] == 0.3);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ck_assert_msg(trn_exit_read_shares(bad[i], LOOPS, share, &error) == ENG_INVALID, "%s", bad[i]);
        ck_assert_ptr_nonnull(strstr(error.text, "--exit-shares"));
    }
}
END_TEST

START_TEST(time_is_that_of_generated_tokens) {
    trn_evaluation e;
    int64_t read = 0;
    double seconds = 0;
    eng_error error = {0};
    write_model(false);
    open_model(&e);
    const eng_knobs one = {ENG_CG_EXACT, 0, 0, 1, 1};
    ck_assert_msg(trn_exit_time(&e, &one, 200, &read, &seconds, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(read, 200);
    ck_assert_double_gt(seconds, 0);
    ck_assert_int_eq(trn_exit_time(&e, &one, 1 << 20, &read, &seconds, &error), ENG_OK);
    int64_t pairs = 0; // no more than there are
    for (int64_t i = 0; i < e.windows.count; i++)
        pairs += e.windows.window[i].count;
    ck_assert_int_eq(read, pairs);
    trn_evaluation_close(&e);
}
END_TEST

static int times(const char *text, const char *word) {
    int count = 0;
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word))
        count++;
    return count;
}

// Loss and score, each by loops and by time; a legend a rule, of which two have times.
static void check_page(const char *results) {
    char page[512], *text;
    size_t length;
    snprintf(page, sizeof page, "%s", temp_path("x.html"));
    const char *words[] = {"report", results, "--out", page, NULL};
    ck_assert_int_eq(trn_command_report(4, (char **)words), TRN_EXIT_OK);
    ck_assert_int_eq(eng_read_file(page, 1 << 24, &text, &length, NULL), ENG_OK);
    ck_assert_int_eq(times(text, "<figcaption>By loops: "), 2);
    ck_assert_int_eq(times(text, "<figcaption>By time of loops: "), 2);
    ck_assert_int_eq(times(text, "milliseconds a generated token</text>"), 2);
    ck_assert_int_eq(times(text, "between fixed loops</"), 2);
    ck_assert_int_eq(times(text, "fixed loop</"), 4);
    free(text);
}

// Each by itself and both beside each other, of which no rule is left out.
static void check_pair(const char *results) {
    char page[512], other[512], *text, *renamed;
    size_t length;
    snprintf(page, sizeof page, "%s", temp_path("xy.html"));
    snprintf(other, sizeof other, "%s", temp_path("y.json"));
    ck_assert_int_eq(eng_read_file(results, 1 << 24, &text, &length, NULL), ENG_OK);
    renamed = strstr(text, "\"digest\":");
    ck_assert_ptr_nonnull(renamed);
    renamed = strchr(renamed + 9, '"'); // of the checkpoint: another one
    renamed[1] = renamed[1] == '0' ? '1' : '0';
    temp_write("y.json", text, length);
    free(text);
    const char *words[] = {"report", results, other, "--out", page, NULL};
    ck_assert_int_eq(trn_command_report(5, (char **)words), TRN_EXIT_OK);
    ck_assert_int_eq(eng_read_file(page, 1 << 24, &text, &length, NULL), ENG_OK);
    ck_assert_int_eq(times(text, "<figcaption>By loops: "), 2 * 3);
    ck_assert_int_eq(times(text, "<figcaption>By time of loops: "), 2 * 3);
    ck_assert_int_eq(times(text, ", gate</"), 2 * 2 * 2); // names of both where both are
    free(text);
}

START_TEST(the_table_is_kept) {
    char model[512], data[512], out[512];
    trn_result result;
    eng_error error = {0};
    write_model(false);
    snprintf(model, sizeof model, "%s", temp_path("m"));
    snprintf(data, sizeof data, "%s", temp_path("d"));
    snprintf(out, sizeof out, "%s", temp_path("x.json"));
    const char *words[] = {"eval",          model, "--data", data, "--context",     "48",    "--exit-table",
                           "--exit-tokens", "20",  "--out",  out,  "--exit-shares", "1,1,2", NULL};
    ck_assert_int_eq(trn_command_eval(13, (char **)words), TRN_EXIT_OK);
    ck_assert_msg(trn_result_read(out, &result, &error) == ENG_OK, "%s", error.text);
    int timed = 0, of_kind[TRN_EXIT_KINDS + 1] = {0};
    for (int i = 0; i < result.rows; i++) {
        timed += result.row[i].figures.tokens == 20;
        of_kind[trn_exit_kind_of(result.row[i].setting.name)]++;
        ck_assert_str_eq(result.row[i].primary, "loss");
    }
    ck_assert_int_eq(timed, LOOPS + 9);
    ck_assert_int_eq(of_kind[TRN_EXIT_LOOP], LOOPS);
    for (int kind = TRN_EXIT_GATE; kind <= TRN_EXIT_BETWEEN; kind++)
        ck_assert_int_eq(of_kind[kind], 9);
    ck_assert_int_eq(of_kind[TRN_EXIT_SHARES], 1);
    ck_assert_int_eq(of_kind[TRN_EXIT_ORACLE], 1);
    ck_assert_int_eq(of_kind[TRN_EXIT_KINDS], 0);
    trn_result_free(&result);
    check_page(out);
    check_pair(out);
    words[8] = "-1";
    ck_assert_int_eq(trn_command_eval(11, (char **)words), TRN_EXIT_USAGE);
}
END_TEST

static Suite *exits_suite(void) {
    Suite *suite = suite_create("exits");
    TCase *cases = tcase_create("exits");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, all_loops_are_what_scoring_says);
    tcase_add_test(cases, entropies_and_divergences_are_those_of_the_logits);
    tcase_add_test(cases, a_silent_head_is_uniform);
    tcase_add_test(cases, rules_choose_what_they_promise);
    tcase_add_test(cases, baselines_know_the_gates_shares_alone);
    tcase_add_test(cases, shares_are_read);
    tcase_add_test(cases, time_is_that_of_generated_tokens);
    tcase_add_test(cases, the_table_is_kept);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(exits_suite)

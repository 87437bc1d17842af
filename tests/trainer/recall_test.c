// SPDX-License-Identifier: Apache-2.0
// Training on a task and its accuracy: a small Mesa network learns to recall, stops where it is told to, and what eval
// counts as right is what its logits say, counted here by hand.
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/commands.h"
#include "trainer/probe.h"
#include "trainer/score.h"
#include "trainer/train_loop.h"

enum { VOCABULARY = 16, LENGTH = 12, PAIRS = 2, EXAMPLES = 100, STEPS = 1500 };

static const char config[] = "[model]\n%svocab_size = 16\n"
                             "[data]\ntrain = %s/train\nvalid = %s/valid-2\ncontext = 12\n"
                             "[optim]\nlr = 0.01\nwarmup_steps = 20\nschedule = wsd\n"
                             "[train]\nsteps = 1500\nbatch_tokens = 384\nmicro_rows = 32\neval_every = 50\n"
                             "eval_rows = 0\nsave_every = 0\nstop_accuracy = 0.9\n";

static void make_data(void) {
    char folder[512];
    snprintf(folder, sizeof folder, "%s", temp_path("data"));
    const char *task[] = {"task",    "mqar", "--out",      folder, "--vocab",          "16", "--length", "12",
                          "--pairs", "2",    "--examples", "5000", "--valid-examples", "100"};
    ck_assert_int_eq(trn_command_task(sizeof task / sizeof *task, (char **)task), TRN_EXIT_OK);
}

static const char *write_config(void) {
    char text[4096], data[512];
    snprintf(data, sizeof data, "%s", temp_path("data"));
    int length = snprintf(text, sizeof text, config, mesa_model, data, data);
    temp_write("run.ini", text, (size_t)length);
    return temp_path("run.ini");
}

static double accuracy(trn_run *run) {
    trn_score score;
    eng_error error = {0};
    ck_assert_msg(trn_run_validate(run, &score, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(score.targets, EXAMPLES * PAIRS);
    return (double)score.hits.targets / (double)score.targets;
}

typedef struct counts {
    int64_t targets, examples;
} counts;

// The likeliest id of each token that is asked, by serving plans.
static counts count_by_hand(const char *dir, const trn_dataset *dataset) {
    const kern_solver exact = {.mode = KERN_SOLVE_EXACT};
    counts right = {0};
    trn_probe probe;
    trn_row row;
    float logits[LENGTH * VOCABULARY];
    ck_assert_int_eq(trn_probe_open(dir, "cpu", false, KERN_STORE_F32, &probe, NULL), ENG_OK);
    ck_assert_int_eq(trn_row_create(LENGTH, &row, NULL), ENG_OK);
    for (int64_t e = 0; e < EXAMPLES; e++) {
        int hits = 0;
        ck_assert_int_eq(trn_dataset_row(dataset, e, &row, NULL), ENG_OK);
        ck_assert_int_eq(trn_probe_logits(&probe, row.id, LENGTH, LENGTH, exact, logits, NULL), ENG_OK);
        for (int t = 0; t < LENGTH; t++) {
            int best = 0;
            for (int id = 1; id < VOCABULARY; id++)
                if (logits[t * VOCABULARY + id] > logits[t * VOCABULARY + best])
                    best = id;
            hits += row.target[t] >= 0 && row.target[t] == best;
        }
        right.targets += hits;
        right.examples += hits == PAIRS;
    }
    trn_row_free(&row);
    trn_probe_close(&probe);
    return right;
}

static void check_scores(trn_run *run, counts right) {
    const kern_solver exact = {.mode = KERN_SOLVE_EXACT};
    trn_windows windows;
    trn_scores scores;
    run->runner.plan = run->score_plan;
    ck_assert_int_eq(trn_windows_choose(run->valid, LENGTH, 0, NULL, &windows, NULL), ENG_OK);
    ck_assert_int_eq(windows.count, EXAMPLES);
    ck_assert_int_eq(trn_score_windows(&run->batch, run->valid, &windows, exact, NULL, NULL, NULL, &scores, NULL),
                     ENG_OK);
    ck_assert_int_eq(scores.targets, EXAMPLES * PAIRS);
    ck_assert_int_eq(scores.windows, EXAMPLES);
    ck_assert_int_eq(scores.hits.targets, right.targets);
    ck_assert_int_eq(scores.hits.rows, right.examples);
    trn_windows_free(&windows);
    run->runner.plan = run->train_plan;
}

START_TEST(a_network_learns_to_recall) {
    trn_run run;
    eng_error error = {0};
    char folder[512], dir[600], *log = NULL;
    size_t length = 0;
    make_data();
    open_run(write_config(), &run);
    double before = accuracy(&run);
    ck_assert_int_eq(mkdir(temp_path("run"), 0777), 0);
    snprintf(folder, sizeof folder, "%s", temp_path("run"));
    trn_loop_options options = {.folder = folder};
    ck_assert_msg(trn_train_loop(&run, &options, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(before < 0.5 && accuracy(&run) >= 0.9, "from %g to %g in %lld steps", before, accuracy(&run),
                  (long long)run.state.step);
    ck_assert(run.state.step < STEPS && run.state.step % 50 == 0); // where the accuracy was reached
    ck_assert_int_eq(eng_read_file(temp_path("run/log.jsonl"), 1 << 22, &log, &length, NULL), ENG_OK);
    ck_assert_ptr_nonnull(strstr(log, "\"valid_accuracy\""));
    free(log);
    snprintf(dir, sizeof dir, "%s/step-%08lld", folder, (long long)run.state.step);
    counts right = count_by_hand(dir, run.valid);
    ck_assert(right.targets >= 170 && right.examples < EXAMPLES); // neither nothing nor everything
    check_scores(&run, right);
    trn_run_close(&run);
}
END_TEST

START_TEST(stopping_needs_something_to_measure) {
    trn_run_config parsed;
    eng_error error = {0};
    make_data();
    const char *without[] = {"data.valid="}, *never[] = {"train.eval_every=0"};
    ck_assert_int_eq(trn_run_config_read(write_config(), without, 1, &parsed, &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "stop_accuracy"));
    ck_assert_int_eq(trn_run_config_read(write_config(), never, 1, &parsed, &error), ENG_INVALID);
}
END_TEST

static Suite *recall_suite(void) {
    Suite *suite = suite_create("recall");
    TCase *cases = tcase_create("recall");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, a_network_learns_to_recall);
    tcase_add_test(cases, stopping_needs_something_to_measure);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(recall_suite)

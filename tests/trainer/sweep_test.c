// SPDX-License-Identifier: Apache-2.0
// Sweeps: which runs a file means, that a run of one is the run it would be alone, that what is done is not done again,
// that a failing run is a row with its reason, and that an interrupted sweep ends as one that was not.
#include "trainer/sweep_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/train_run.h"

static const char plan[] = "[optim]\nwarmup_steps = 1\n[train]\nsteps = 4\nbatch_tokens = 64\neval_every = 2\n"
                           "save_every = 2\n";

static void write_base(char config[512]) {
    const int lengths[] = {60, 33, 40, 12};
    write_documents("d", lengths, 4);
    snprintf(config, 512, "%s", write_run(mesa_model, "d", 32, plan));
}

static void read_sweep(const char *text, trn_sweep *sweep) {
    eng_error error = {0};
    temp_write("sweep.ini", text, strlen(text));
    ck_assert_msg(trn_sweep_read(temp_path("sweep.ini"), NULL, 0, sweep, &error) == ENG_OK, "%s", error.text);
}

static trn_sweep_run *run_named(const trn_sweep *sweep, const char *name) {
    for (int i = 0; i < sweep->runs; i++)
        if (strcmp(sweep->run[i].name, name) == 0)
            return &sweep->run[i];
    ck_abort_msg("no run %s", name);
    return NULL;
}

static eng_status run_sweep(trn_sweep *sweep, const char *config, const char *folder, int64_t parallel,
                            const sigset_t *signals, eng_error *error) {
    char out[512];
    snprintf(out, sizeof out, "%s", temp_path(folder));
    const trn_sweep_options options = {.config = config, .out = out, .parallel = parallel, .signals = signals};
    return trn_sweep_train(sweep, &options, error);
}

static char *read_file(const char *name, size_t *length) {
    char *data = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_read_file(temp_path(name), 1 << 24, &data, length, &error) == ENG_OK, "%s", error.text);
    return data;
}

static void same_file(const char *left, const char *right) {
    size_t a = 0, b = 0;
    char *first = read_file(left, &a), *second = read_file(right, &b);
    ck_assert_msg(a == b && memcmp(first, second, a) == 0, "%s differs from %s", left, right);
    free(first);
    free(second);
}

START_TEST(a_file_means_its_combinations) {
    trn_sweep sweep;
    read_sweep("[sweep]\nseeds = 1 2\n[grid]\noptim.lr = 0.001 0.002\n    0.004\ntrain.warm_start = a/b\n"
               "[variant x]\nmodel.num_heads = 2\nmodel.hidden_size = 8\n[variant y]\nmodel.num_heads = 4\n",
               &sweep);
    ck_assert_int_eq(sweep.runs, 2 * 3 * 2);
    ck_assert_str_eq(sweep.run[0].name, "x,lr=0.001,warm_start=a_b,seed=1");
    const trn_sweep_run *run = run_named(&sweep, "x,lr=0.004,warm_start=a_b,seed=2");
    static const char *const set[] = {"model.num_heads=2", "model.hidden_size=8", "optim.lr=0.004",
                                      "train.warm_start=a/b", "train.seed=2"};
    ck_assert_int_eq(run->set.count, 5);
    for (int i = 0; i < 5; i++)
        ck_assert_str_eq(run->set.item[i], set[i]);
    trn_sweep_free(&sweep);
    read_sweep("[grid]\noptim.lr = 1 2\n", &sweep);
    ck_assert(sweep.runs == 2 && strcmp(sweep.run[1].name, "lr=2") == 0);
    trn_sweep_free(&sweep);
    read_sweep("[variant plain]\n[variant x]\na.b = 1\n[sweep]\nseeds =\n    7\n", &sweep); // plain: as it is
    ck_assert(sweep.runs == 2 && strcmp(sweep.run[0].name, "plain,seed=7") == 0 && sweep.run[0].set.count == 1);
    trn_sweep_free(&sweep);
}
END_TEST

START_TEST(what_is_no_sweep_is_refused) {
    static const char *const wrong[][2] = {
        {"[grid]\noptim.lr = 1 1\n", "given twice"},
        {"[grid]\noptim.lr =\n", "sweep.ini:2: grid.optim.lr: no value"},
        {"[sweep]\nseeds =\n", "sweep.ini:2: sweep.seeds: no value"},
        {"[grid]\noptim.lr = 1\n[sweep]\n\nseeds =\n    \n", "sweep.ini:5: sweep.seeds: no value"},
        {"", "sweep.ini:1: nothing to try"},
        {"# later\n[grid]\n[sweep]\n", "sweep.ini:1: nothing to try"},
        {"[variant a]\n\n[variants]\n", "sweep.ini:3: variants: unknown"},
        {"[variant a\n", "sweep.ini:1: neither"},
        {"[grid]\nx\n[nothing]\n", "sweep.ini:2: neither"},
        {"[variant 123456789012345678901234567890123456789012]\n", "sweep.ini:1: a section's name is longer"},
        {"[grid]\ntrain.seed = 1 2\n", "seeds stand in [sweep]"},
        {"[sweep]\nseed = 1\n", "sweep.ini:2: sweep.seed: unknown"},
        {"[variant ]\na.b = 1\n", "unknown"},
        {"[variant x]\na.b = 1\n[variant x]\na.b = 2\n", "sweep.ini:4: variant x.a.b: given twice"},
        {"[grid]\na.b = 1 2\n[variant x]\na.b = 3\n", "variant x.a.b: stands in [grid] too"},
        {"[sweep]\nseeds = 1 2\n[variant x]\ntrain.seed = 3\n", "seeds stand in [sweep] too"},
        {"[grid]\na.a = 1 2 3 4 5 6 7 8 9 10\na.b = 1 2 3 4 5 6 7 8 9 10\na.c = 1 2 3 4 5 6 7 8 9 10\n"
         "a.d = 1 2 3 4 5 6 7 8 9 10\n",
         "more than 4096 runs"},
        {"[variant a/b]\nx.y = 1\n[variant a_b]\nx.y = 2\n", "sweep.ini: two runs have the name"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        trn_sweep sweep;
        eng_error error = {0};
        temp_write("sweep.ini", wrong[i][0], strlen(wrong[i][0]));
        ck_assert_int_eq(trn_sweep_read(temp_path("sweep.ini"), NULL, 0, &sweep, &error), ENG_INVALID);
        ck_assert_msg(strstr(error.text, wrong[i][1]) != NULL, "%s: %s", wrong[i][1], error.text);
        trn_sweep_free(&sweep);
    }
}
END_TEST

START_TEST(a_wrong_value_is_told_before_anything_runs) {
    char config[512];
    trn_sweep sweep;
    eng_error error = {0};
    struct stat facts;
    write_base(config);
    read_sweep("[grid]\noptim.lr = 0.001 quick\n", &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "out", 1, NULL, &error), ENG_INVALID);
    ck_assert_msg(strstr(error.text, "lr=quick") && strstr(error.text, "optim.lr"), "%s", error.text);
    ck_assert_int_ne(stat(temp_path("out/lr=0.001"), &facts), 0);
    trn_sweep_free(&sweep);
}
END_TEST

static const char four_and_lost[] = "[sweep]\nseeds = 1 2\n[grid]\noptim.lr = 0.001 0.003\n[variant m]\n"
                                    "optim.clip = 2\n[variant lost]\ntrain.warm_start = /nowhere\n";

static void check_results(const trn_sweep *sweep) {
    int groups = 0;
    trn_sweep_group *group = trn_sweep_groups(sweep, &groups);
    ck_assert_int_eq(groups, 4);
    for (int g = 0; g < 2; g++) {
        ck_assert(group[g].done == 2 && group[g].failed == 0 && isfinite(group[g].valid));
        const trn_sweep_run *run = &sweep->run[2 * g];
        const double mean = (run[0].result.valid_loss + run[1].result.valid_loss) / 2;
        ck_assert_double_eq_tol(group[g].valid, mean, 1e-12);
        ck_assert_double_eq_tol(group[g].deviation, fabs(run[0].result.valid_loss - mean) * sqrt(2), 1e-12);
        ck_assert(group[2 + g].done == 0 && group[2 + g].failed == 2 && !group[2 + g].best);
        ck_assert_msg(strstr(group[2 + g].reason, "/nowhere") != NULL, "%s", group[2 + g].reason);
    }
    const int best = group[0].valid < group[1].valid ? 0 : 1;
    ck_assert(group[best].best && !group[1 - best].best);
    ck_assert_str_eq(group[best].edge, best == 0 ? "lr is the least tried" : "lr is the largest tried");
    free(group);
}

// _i + 1 at once. Failing runs are tried again, others are not: a checkpoint that is gone stays away.
START_TEST(a_sweep_and_the_same_again) {
    char config[512], gone[512];
    trn_sweep sweep;
    eng_error error = {0};
    struct stat facts;
    write_base(config);
    read_sweep(four_and_lost, &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "out", _i + 1, NULL, &error), ENG_NUMERIC);
    ck_assert_msg(strstr(error.text, "4 of 8 runs failed") != NULL, "%s", error.text);
    check_results(&sweep);
    trn_sweep_free(&sweep);
    snprintf(gone, sizeof gone, "%s", temp_path("out/m,lr=0.001,seed=1/step-00000004"));
    ck_assert_int_eq(eng_remove_tree(gone, NULL), ENG_OK);
    read_sweep(four_and_lost, &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "out", _i + 1, NULL, NULL), ENG_NUMERIC);
    check_results(&sweep);
    ck_assert_int_ne(stat(gone, &facts), 0);
    trn_sweep_group *group = NULL;
    int groups = 0;
    ck_assert_int_eq(trn_sweep_read_groups(temp_path("out/sweep.json"), &group, &groups, &error), ENG_OK);
    ck_assert(groups == 4 && group[0].done == 2 && group[3].failed == 2 && (group[0].best || group[1].best));
    free(group);
    trn_sweep_free(&sweep);
}
END_TEST

// A teacher in some of the runs: a column that is empty in the others. Elsewhere there is no such column.
START_TEST(a_teacher_is_told_by_the_tables) {
    char config[512], text[1024];
    trn_sweep sweep;
    trn_sweep_group *group = NULL;
    int groups = 0;
    size_t length = 0;
    write_base(config);
    read_sweep("[sweep]\nseeds = 1\n[variant a]\n", &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "plain", 1, NULL, NULL), ENG_OK);
    trn_sweep_free(&sweep);
    snprintf(text, sizeof text, "[sweep]\nseeds = 1 2\n[variant taught]\nteacher.model = %s\n[variant alone]\n",
             temp_path("plain/a,seed=1/step-00000004"));
    read_sweep(text, &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "out", 2, NULL, NULL), ENG_OK);
    trn_sweep_free(&sweep);
    ck_assert_int_eq(trn_sweep_read_groups(temp_path("out/sweep.json"), &group, &groups, NULL), ENG_OK);
    ck_assert(groups == 2 && group[0].divergence > 0 && isnan(group[1].divergence));
    free(group);
    char *taught = read_file("out/sweep.md", &length), *plain = read_file("plain/sweep.md", &length);
    ck_assert(strstr(taught, "| right | divergence | loss") && !strstr(plain, "divergence"));
    free(taught);
    free(plain);
}
END_TEST

START_TEST(a_run_of_a_sweep_is_the_run_alone) {
    char config[512], folder[512];
    trn_sweep sweep;
    eng_error error = {0};
    trn_run_config alone;
    write_base(config);
    read_sweep("[sweep]\nseeds = 1 2 3\n[grid]\noptim.lr = 0.001 0.003\n", &sweep);
    ck_assert_msg(run_sweep(&sweep, config, "out", 3, NULL, &error) == ENG_OK, "%s", error.text);
    trn_sweep_run *run = run_named(&sweep, "lr=0.003,seed=2");
    snprintf(folder, sizeof folder, "%s", temp_path("alone"));
    ck_assert_int_eq(trn_run_config_read(config, (const char *const *)run->set.item, run->set.count, &alone, NULL),
                     ENG_OK);
    const trn_train_options options = {.loop = {.folder = folder}};
    ck_assert_msg(trn_train(&alone, NULL, &options, &error) == ENG_OK, "%s", error.text);
    same_file("alone/step-00000004/model.safetensors", "out/lr=0.003,seed=2/step-00000004/model.safetensors");
    trn_sweep_free(&sweep);
}
END_TEST

START_TEST(another_configuration_is_not_mixed_in) {
    char config[512];
    trn_sweep sweep;
    eng_error error = {0};
    write_base(config);
    read_sweep("[grid]\noptim.lr = 0.001 0.003\n", &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "out", 1, NULL, NULL), ENG_OK);
    trn_sweep_free(&sweep);
    const char *other = write_run(mesa_model, "d", 32, "[train]\nsteps = 3\nbatch_tokens = 64\n");
    read_sweep("[grid]\noptim.lr = 0.001 0.003\n", &sweep);
    ck_assert_int_eq(run_sweep(&sweep, other, "out", 1, NULL, &error), ENG_INVALID);
    ck_assert_msg(strstr(error.text, "was made with another configuration file") != NULL, "%s", error.text);
    trn_sweep_free(&sweep);
}
END_TEST

// A signal that is there from the start: some runs may have ended before it is seen, the others stand where they were
// stopped, and the next call brings all to the end that they would have had.
START_TEST(an_interrupted_sweep_goes_on) {
    static const char three[] = "[sweep]\nseeds = 1 2 3\n";
    const struct timespec at_once = {0};
    char config[512];
    trn_sweep sweep;
    sigset_t signals;
    eng_error error = {0};
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    ck_assert_int_eq(sigprocmask(SIG_BLOCK, &signals, NULL), 0); // before there are threads that would take it
    write_base(config);
    read_sweep(three, &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "straight", 1, NULL, NULL), ENG_OK);
    trn_sweep_free(&sweep);
    ck_assert_int_eq(kill(getpid(), SIGTERM), 0);
    read_sweep(three, &sweep);
    ck_assert_msg(run_sweep(&sweep, config, "stopped", 2, &signals, &error) == ENG_OK, "%s", error.text);
    for (int i = 0; i < sweep.runs; i++)
        ck_assert_int_ne(sweep.run[i].result.end, TRN_SWEEP_FAILED);
    trn_sweep_free(&sweep);
    while (sigtimedwait(&signals, NULL, &at_once) > 0) // runs that were quicker left it
        ;
    read_sweep(three, &sweep);
    ck_assert_int_eq(run_sweep(&sweep, config, "stopped", 2, &signals, NULL), ENG_OK);
    for (int i = 0; i < sweep.runs; i++)
        ck_assert_int_eq(sweep.run[i].result.end, TRN_SWEEP_DONE);
    same_file("straight/seed=3/step-00000004/model.safetensors", "stopped/seed=3/step-00000004/model.safetensors");
    trn_sweep_free(&sweep);
}
END_TEST

static Suite *sweep_suite(void) {
    Suite *suite = suite_create("sweep");
    TCase *cases = tcase_create("sweep");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 240);
    tcase_add_test(cases, a_file_means_its_combinations);
    tcase_add_test(cases, what_is_no_sweep_is_refused);
    tcase_add_test(cases, a_wrong_value_is_told_before_anything_runs);
    tcase_add_loop_test(cases, a_sweep_and_the_same_again, 0, 3);
    tcase_add_test(cases, a_teacher_is_told_by_the_tables);
    tcase_add_test(cases, a_run_of_a_sweep_is_the_run_alone);
    tcase_add_test(cases, another_configuration_is_not_mixed_in);
    tcase_add_test(cases, an_interrupted_sweep_goes_on);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(sweep_suite)

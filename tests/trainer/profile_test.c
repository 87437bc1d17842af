// SPDX-License-Identifier: Apache-2.0
// A profile: its lines add up to the steps' time, no operation of the plan is missing, and what is profiled is what is
// trained.
#include "trainer/profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/train_loop.h"

static const char plan[] = "[train]\nsteps = 6\nbatch_tokens = 128\nmicro_rows = 1\neval_every = 3\nsave_every = 0\n";

static void train(int64_t profile_steps, const char *folder, trn_run *run) {
    eng_error error = {0};
    open_run(write_run(hybrid_model, "d", 64, plan), run);
    trn_loop_options options = {.folder = folder, .profile_steps = profile_steps};
    ck_assert_msg(trn_train_loop(run, &options, &error) == ENG_OK, "%s", error.text);
}

static void write_data(void) {
    const int lengths[] = {90, 33, 70, 12};
    write_documents("d", lengths, 4);
}

// The column of a line "| a | b | ...", 0 the first.
static const char *column(const char *line, int number) {
    for (int i = 0; i <= number && line; i++) {
        line = strchr(line, '|');
        line = line ? line + 1 : NULL;
    }
    return line;
}

START_TEST(lines_add_up_to_the_steps) {
    trn_run run;
    char *text = NULL;
    size_t length = 0;
    double sum = 0, share = 0, all = 0, wall = 0, products = 0;
    int phases = 0;
    write_data();
    train(3, temp_folder(), &run);
    trn_run_close(&run);
    ck_assert_int_eq(eng_read_file(temp_path("profile.md"), 1 << 20, &text, &length, NULL), ENG_OK);
    ck_assert_int_eq(sscanf(text, "3 steps of %lf ms each", &wall), 1);
    for (char *rest = NULL, *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        double calls, ms, part;
        if (sscanf(line, "| all | %lf |", &all) == 1)
            continue;
        if (column(line, 5) && sscanf(column(line, 2), "%lf | %lf | %lf %%", &calls, &ms, &part) == 3) {
            sum += ms;
            share += part;
            ck_assert_double_ge(ms, 0);
            products += strncmp(line, "| linear ", 9) == 0 ? calls : 0;
        } else if (column(line, 3) && strstr(line, " %") && sscanf(column(line, 1), "%lf", &ms) == 1) {
            phases++;
        }
    }
    ck_assert_double_eq_tol(all, wall, 1e-9);
    ck_assert_double_eq_tol(sum, wall, 1e-3 * 60); // of so many lines, in thousandths
    ck_assert_double_eq_tol(share, 100, 0.1 * 60);
    ck_assert_int_eq(phases, TRN_PHASES - 1); // no teacher
    ck_assert(products > 40);
    free(text);
}
END_TEST

START_TEST(what_is_profiled_is_what_is_trained) {
    trn_run plain, profiled;
    write_data();
    train(0, temp_folder(), &plain);
    mkdir(temp_path("profiled"), 0777);
    char folder[512];
    snprintf(folder, sizeof folder, "%s", temp_path("profiled"));
    train(2, folder, &profiled);
    ck_assert_mem_eq(plain.weights->masters, profiled.weights->masters, sizeof(float) * (size_t)plain.weights->count);
    ck_assert_ptr_null(profiled.runner.profile);
    trn_run_close(&plain);
    trn_run_close(&profiled);
}
END_TEST

// A run that ends before its steps are over tells those that there were.
START_TEST(a_short_run_tells_what_it_has) {
    trn_run run;
    char *text = NULL;
    size_t length = 0;
    write_data();
    train(100, temp_folder(), &run);
    trn_run_close(&run);
    ck_assert_int_eq(eng_read_file(temp_path("profile.md"), 1 << 20, &text, &length, NULL), ENG_OK);
    ck_assert_int_eq(strncmp(text, "4 steps of ", 11), 0);
    free(text);
}
END_TEST

static Suite *profile_suite(void) {
    Suite *suite = suite_create("profile");
    TCase *cases = tcase_create("profile");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, lines_add_up_to_the_steps);
    tcase_add_test(cases, what_is_profiled_is_what_is_trained);
    tcase_add_test(cases, a_short_run_tells_what_it_has);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(profile_suite)

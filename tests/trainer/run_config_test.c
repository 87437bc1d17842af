// SPDX-License-Identifier: Apache-2.0
// run.ini: defaults, sources, what is refused and where, and that the written configuration reads back.
// Every refusal is asked for its file, line and key, since that is all that a user has to find the fault.
#include "trainer/run_config.h"

#include <string.h>

#include "engine/files.h"
#include "engine/forward.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "trainer/schedule.h"

static const char smallest[] = "[data]\ntrain = a\n[train]\nsteps = 10\n";

static eng_status read_text(const char *text, trn_run_config *config, eng_error *error) {
    temp_write("run.ini", text, strlen(text));
    return trn_run_config_read(temp_path("run.ini"), NULL, 0, config, error);
}

static void refused(const char *text, const char *where, const char *why) {
    trn_run_config config;
    eng_error error = {0};
    ck_assert_msg(read_text(text, &config, &error) == ENG_INVALID, "accepted: %s", text);
    ck_assert_msg(strstr(error.text, where) && strstr(error.text, why), "\"%s\" for %s", error.text, text);
}

START_TEST(defaults_are_those_of_the_design) {
    trn_run_config c;
    ck_assert_int_eq(read_text(smallest, &c, NULL), ENG_OK);
    ck_assert(c.min_lr_ratio == 0.1 && c.decay_fraction == 0.2 && c.beta1 == 0.9 && c.beta2 == 0.98);
    ck_assert(c.eps == 1e-8 && c.weight_decay == 0.1 && c.clip == 1);
    ck_assert_int_eq(c.schedule, TRN_COSINE);
    ck_assert_int_eq(c.rounding, KERN_ROUND_NONE);
    ck_assert_int_eq(c.recompute, ENG_RECOMPUTE_NONE);
    ck_assert_int_eq(c.solver_mode, KERN_SOLVE_TOLERANCE);
    ck_assert(c.solver_tolerance == 1e-4 && c.backward_tolerance == 1e-5);
    trn_run_config_free(&c);
}
END_TEST

START_TEST(faults_name_file_and_line) {
    refused("[data]\ntrain = a\n[train]\nsteps = 10\nstep = 3\n", "run.ini:5", "train.step: unknown key");
    refused("[dat]\ntrain = a\n", "run.ini:2", "dat.train: unknown key");
    refused("steps = 3\n", "run.ini:1", "unknown key");
    refused("[train]\nsteps = 3\nsteps = 4\n", "run.ini:3", "given twice");
    refused("[model]\nhidden_size = 3\nhidden_size = 4\n", "run.ini:3", "given twice");
    refused("[model]\n\nhiden_size = 3\n", "run.ini:3", "model.hiden_size: unknown key");
    refused("[train]\nsteps = 3x\n", "run.ini:2", "not an integer");
    refused("[train]\nsteps = -3\n", "run.ini:2", "not in");
    refused("[optim]\nlr = nan\n", "run.ini:2", "optim.lr");
    refused("[optim]\nbeta1 = 1\n", "run.ini:2", "1 is not in 0..0.999");
    refused("[data]\ncontext = 16777217\n", "run.ini:2", "is not in 1..16777216");
    refused("[data]\ntrain = a\n[train]\nsteps = 0\n", "train.steps", "or 0");
    refused("[optim]\nschedule = linear\n", "run.ini:2", "none of cosine, wsd");
    refused("[optim]\nrounding = up\n", "run.ini:2", "none of nearest, stochastic, compensated");
    refused("[train]\nsteps 3\n", "run.ini:2", "neither");
    refused("[train]\nsteps = 10\n", "data.train", "missing");
    refused("[data]\ntrain = a\n", "train.steps", "missing");
    refused("[data]\ntrain = a\ncontext = 100\n[train]\nsteps = 1\nbatch_tokens = 250\n", "batch_tokens", "multiple");
    char text[400] = "[data]\ntrain = ";
    memset(text + strlen(text), 'x', 300);
    refused(text, "run.ini:2", "longer");
}
END_TEST

START_TEST(sets_win_over_the_file) {
    const char *const sets[] = {"optim.lr=0.5", "train.seed=7", "optim.lr=0.25", "model.num_heads=3",
                                "data.valid=with=equals"};
    trn_run_config c;
    temp_write("run.ini", smallest, sizeof smallest - 1);
    ck_assert_int_eq(trn_run_config_read(temp_path("run.ini"), sets, 5, &c, NULL), ENG_OK);
    int64_t heads = 0;
    ck_assert(c.lr == 0.25 && c.seed == 7);
    ck_assert_int_eq(trn_json_integer(c.model, "num_heads", &heads, NULL), ENG_OK);
    ck_assert_int_eq(heads, 3);
    ck_assert_str_eq(c.valid, "with=equals");
    trn_run_config_free(&c);
    const char *const bad[] = {"optim.lr", "lr=3", "optim.lrr=3", "=", ".=", "optim.lr=x"};
    for (int i = 0; i < 6; i++) {
        eng_error error = {0};
        ck_assert_int_eq(trn_run_config_read(temp_path("run.ini"), &bad[i], 1, &c, &error), ENG_INVALID);
        ck_assert_msg(strstr(error.text, "--set"), "%s", error.text);
    }
}
END_TEST

START_TEST(what_is_written_reads_the_same) {
    char text[2048];
    snprintf(text, sizeof text,
             "[model]\nmodel_type = mesa_net\nattn = {\"layers\": [1, 2,\n   3], \"num_heads\": 2}\nnorm_eps = 1e-5\n%s"
             "seed = 9007199254740992\n[optim]\nlr = 0.0012345678901234567\nschedule = wsd\n",
             smallest);
    trn_run_config first, second;
    eng_error error = {0};
    ck_assert_msg(read_text(text, &first, &error) == ENG_OK, "%s", error.text);
    for (int i = 0; i < 60; i++) { // a long array is broken into lines that can be read again
        char types[1024] = "[";
        for (int j = 0; j <= i; j++)
            strcat(types, j ? ", \"mesa_net\"" : "\"mesa_net\"");
        trn_json_set_text(first.model, "layer_types", strcat(types, "]"));
    }
    ck_assert_int_eq(trn_run_config_write(&first, temp_path("a.ini"), &error), ENG_OK);
    ck_assert_msg(trn_run_config_read(temp_path("a.ini"), NULL, 0, &second, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(trn_run_config_write(&second, temp_path("b.ini"), &error), ENG_OK);
    char *a = NULL, *b = NULL;
    size_t length = 0;
    ck_assert_int_eq(eng_read_file(temp_path("a.ini"), 1 << 20, &a, &length, NULL), ENG_OK);
    ck_assert_int_eq(eng_read_file(temp_path("b.ini"), 1 << 20, &b, &length, NULL), ENG_OK);
    ck_assert_str_eq(a, b);
    ck_assert_ptr_nonnull(strstr(a, "schedule = wsd"));
    ck_assert(first.lr == second.lr && second.seed == INT64_C(9007199254740992));
    char *left = trn_json_text(first.model, false), *right = trn_json_text(second.model, false);
    ck_assert_str_eq(left, right);
    free(left);
    free(right);
    free(a);
    free(b);
    trn_run_config_free(&first);
    trn_run_config_free(&second);
}
END_TEST

START_TEST(a_base_lends_what_is_not_given) {
    static const char base[] =
        "{\"model_type\": \"mesa_net\", \"hidden_size\": 64, \"num_heads\": 2, \"fuse_norm\": true,"
        "\"architectures\": [\"MesaNetForCausalLM\"]}";
    trn_run_config c;
    char text[1024];
    int64_t size = 0, heads = 0;
    eng_error error = {0};
    temp_write("config.json", base, sizeof base - 1);
    snprintf(text, sizeof text, "[model]\nbase = %s\nnum_heads = 4\n%s", temp_path("config.json"), smallest);
    ck_assert_msg(read_text(text, &c, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(trn_run_config_merge_base(&c, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(trn_json_integer(c.model, "hidden_size", &size, NULL), ENG_OK);
    ck_assert_int_eq(trn_json_integer(c.model, "num_heads", &heads, NULL), ENG_OK);
    ck_assert(size == 64 && heads == 4 && c.base[0] == '\0' && !trn_json_has(c.model, "fuse_norm"));
    ck_assert(trn_json_has(c.model, "architectures"));
    trn_run_config_free(&c);
    snprintf(text, sizeof text, "[model]\nbase = %s\nmodel_type = gla\n%s", temp_path("config.json"), smallest);
    ck_assert_int_eq(read_text(text, &c, NULL), ENG_OK);
    ck_assert_int_eq(trn_run_config_merge_base(&c, NULL), ENG_OK);
    ck_assert(trn_json_has(c.model, "hidden_size") && !trn_json_has(c.model, "architectures")); // another family's
    trn_run_config_free(&c);
    snprintf(text, sizeof text, "[model]\nbase = %s\n%s", temp_folder(), smallest); // a folder
    ck_assert_int_eq(read_text(text, &c, NULL), ENG_OK);
    ck_assert_int_eq(trn_run_config_merge_base(&c, NULL), ENG_OK);
    trn_run_config_free(&c);
    temp_write("config.json", "{\"model_type\": \"mesa_net\", \"num_experts\": 8}", 44);
    ck_assert_int_eq(read_text(text, &c, NULL), ENG_OK);
    ck_assert_int_ne(trn_run_config_merge_base(&c, NULL), ENG_OK);
    trn_run_config_free(&c);
}
END_TEST

static Suite *run_config_suite(void) {
    Suite *suite = suite_create("run_config");
    TCase *cases = tcase_create("run.ini");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, defaults_are_those_of_the_design);
    tcase_add_test(cases, faults_name_file_and_line);
    tcase_add_test(cases, sets_win_over_the_file);
    tcase_add_test(cases, what_is_written_reads_the_same);
    tcase_add_test(cases, a_base_lends_what_is_not_given);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(run_config_suite)

// SPDX-License-Identifier: Apache-2.0
// Runs over the loops of a looped model: the gate alone leaves everything else as it was, the whole learns with it, a
// gate is made where the weights have none, and what does not fit the model is refused.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/commands.h"

enum { CONTEXT = 48 };

#define LOOPED                                                                                       \
    "model_type = mesa_net\nhidden_size = 32\nnum_hidden_layers = 2\nnum_heads = 2\nhead_dim = 16\n" \
    "intermediate_size = 64\ntie_word_embeddings = true\ninitializer_range = 0.1\nloop_blocks = [1]\n"

static const char gated[] = LOOPED "num_loops = 3\nexit_gate = true\n", bare[] = LOOPED "num_loops = 3\n";
static const char once[] = LOOPED "num_loops = 1\nexit_gate = true\n";
static const char train[] = "[optim]\nlr = 0.01\nwarmup_steps = 2\n[train]\nsteps = 40\nbatch_tokens = 192\n"
                            "micro_rows = 2\n";

static void make_documents(void) {
    int lengths[12];
    for (int i = 0; i < 12; i++)
        lengths[i] = 40 + 7 * i;
    write_documents("d", lengths, 12);
}

static void open_with(const char *model, const char *more, trn_run *run) {
    char text[1024];
    snprintf(text, sizeof text, "%s%s", train, more);
    open_run(write_run(model, "d", CONTEXT, text), run);
}

static trn_step_report take_step(trn_run *run) {
    trn_step_report report;
    eng_error error = {0};
    ck_assert_msg(trn_run_step(run, &report, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(report.outcome, TRN_STEP_DONE);
    return report;
}

static trn_score validate(trn_run *run) {
    trn_score score;
    eng_error error = {0};
    ck_assert_msg(trn_run_validate(run, &score, &error) == ENG_OK, "%s", error.text);
    return score;
}

static bool is_gate(const trn_run *run, int32_t tensor) {
    return tensor == run->model->exit_gate || tensor == run->model->exit_bias;
}

START_TEST(the_gate_alone) {
    trn_run run;
    make_documents();
    open_with(gated, _i ? "[loop]\nloss = previous\n" : "[loop]\nloss = next\n", &run);
    const size_t bytes = sizeof(float) * (size_t)run.weights->count;
    float *before = malloc(bytes);
    memcpy(before, run.weights->masters, bytes);
    const double first = take_step(&run).loss;
    double last = first;
    for (int i = 1; i < 40; i++)
        last = take_step(&run).loss;
    ck_assert_msg(last < 0.96 * first, "the gate's loss goes from %g to %g", first, last);
    for (int32_t i = 0; i < run.model->tensors; i++) {
        const float *now = run.weights->master[i], *then = before + (now - run.weights->masters);
        const bool same = memcmp(now, then, sizeof *now * (size_t)run.model->tensor[i].count) == 0;
        ck_assert_msg(same != is_gate(&run, i), "%s", run.model->tensor[i].name);
    }
    free(before);
    trn_run_close(&run);
}
END_TEST

// Figures of the gate add up, and the entropy falls as the configuration says.
START_TEST(the_whole_model) {
    trn_run run;
    make_documents();
    open_with(gated, "[loop]\nloss = expected\nentropy = 0.2\nentropy_decay = 0.5\nprior = 1 2 1\n", &run);
    const trn_score before = validate(&run);
    for (int i = 0; i < 40; i++) {
        const trn_step_report report = take_step(&run);
        const float entropy = *(const float *)eng_plan_address(&run.runner.memory, run.train_plan->entropy);
        ck_assert_double_eq_tol((double)entropy, 0.2 * (1 - 0.5 * i / 40.0), 1e-6);
        double sum = 0, likeliest = 0, bound = 0;
        for (int r = 0; r < 3; r++) {
            sum += report.exits.probability[r];
            likeliest += (double)report.exits.likeliest[r];
            bound = fmax(bound, report.exits.loss[r]);
        }
        ck_assert_int_eq(report.exits.targets, report.targets);
        ck_assert_double_eq_tol(sum, (double)report.targets, 1e-3);
        ck_assert_double_eq(likeliest, (double)report.targets);
        ck_assert_double_lt(report.loss, bound / (double)report.targets + 0.2 * log(4));
    }
    const trn_score after = validate(&run);
    ck_assert_int_eq(after.exits.loops, 3);
    ck_assert_int_eq(after.exits.targets, after.targets);
    ck_assert_double_eq_tol(after.exits.loss[2], after.loss, 1e-3 * after.loss); // read at the last loop
    for (int r = 0; r < 3; r++)
        ck_assert_msg(after.exits.loss[r] < 0.97 * before.exits.loss[r], "loop %d learns nothing", r + 1);
    for (int r = 0; r < 3; r++) { // read at any loop, the loss is that loop's
        run.runner.exit = (kern_exit){.threshold = 1, .max_loops = r + 1};
        const trn_score there = validate(&run);
        ck_assert_double_eq_tol(there.loss, after.exits.loss[r], 1e-5 * there.loss);
    }
    trn_run_close(&run);
}
END_TEST

// With one loop there is nothing to choose.
START_TEST(one_loop_is_the_plain_loss) {
    trn_run plain, expected;
    make_documents();
    open_with(bare, "", &plain);
    eng_error error = {0};
    trn_run_config config;
    trn_run run;
    char text[1024];
    snprintf(text, sizeof text, "%s[loop]\nloss = expected\n", train);
    ck_assert_int_eq(trn_run_config_read(write_run(once, "d", CONTEXT, text), NULL, 0, &config, &error), ENG_OK);
    ck_assert_int_eq(trn_run_open(&config, NULL, &run, &error), ENG_UNSUPPORTED); // no loops to choose from
    trn_run_close(&plain);
    open_with(gated, "", &plain);
    open_with(gated, "[loop]\nloss = weighted\nweights = 0 0 1\n", &expected);
    for (int i = 0; i < 3; i++)
        ck_assert_double_eq_tol(take_step(&plain).loss, take_step(&expected).loss, 1e-5);
    trn_run_close(&plain);
    trn_run_close(&expected);
}
END_TEST

// A model trained without a gate gets one.
START_TEST(a_gate_is_made_where_there_is_none) {
    trn_run first, second;
    eng_error error = {0};
    char more[600];
    make_documents();
    open_with(bare, "", &first);
    for (int i = 0; i < 5; i++)
        take_step(&first);
    ck_assert_msg(eng_checkpoint_save(temp_path("start"), first.weights, ENG_F32, NULL, &error) == ENG_OK, "%s",
                  error.text);
    snprintf(more, sizeof more, "warm_start = %s\n[loop]\nloss = next\n", temp_path("start"));
    open_with(gated, more, &second);
    for (int32_t i = 0; i < second.model->tensors; i++) {
        const int32_t from = eng_model_find(first.model, second.model->tensor[i].name);
        ck_assert((from < 0) == is_gate(&second, i));
        if (from >= 0)
            ck_assert_mem_eq(second.weights->master[i], first.weights->master[from],
                             sizeof(float) * (size_t)second.model->tensor[i].count);
    }
    take_step(&second);
    trn_run_close(&first);
    trn_run_close(&second);
}
END_TEST

START_TEST(eval_tells_every_loop) {
    trn_run run;
    eng_error error = {0};
    char data[512], looped[512], plain[512];
    make_documents();
    snprintf(data, sizeof data, "%s", temp_path("d"));
    snprintf(looped, sizeof looped, "%s", temp_path("looped"));
    snprintf(plain, sizeof plain, "%s", temp_path("plain"));
    open_with(gated, "", &run);
    ck_assert_int_eq(eng_checkpoint_save(looped, run.weights, ENG_F32, NULL, &error), ENG_OK);
    trn_run_close(&run);
    open_with(mesa_model, "", &run);
    ck_assert_int_eq(eng_checkpoint_save(plain, run.weights, ENG_F32, NULL, &error), ENG_OK);
    trn_run_close(&run);
    const char *words[] = {"eval", looped, "--data", data, "--exit-table", NULL};
    ck_assert_int_eq(trn_command_eval(5, (char **)words), TRN_EXIT_OK);
    words[1] = plain;
    ck_assert_int_eq(trn_command_eval(5, (char **)words), TRN_EXIT_USAGE);
    words[1] = looped;
    words[2] = "--task";
    ck_assert_int_eq(trn_command_eval(5, (char **)words), TRN_EXIT_USAGE); // tasks have a setting, not a table
}
END_TEST

START_TEST(truncated_loops_learn) {
    trn_run run;
    make_documents();
    open_with(gated, "[loop]\nbackward_loops = 1\n", &run);
    const double before = validate(&run).loss;
    for (int i = 0; i < 40; i++)
        take_step(&run);
    ck_assert_double_lt(validate(&run).loss, 0.97 * before);
    trn_run_close(&run);
}
END_TEST

START_TEST(what_does_not_fit_is_refused) {
    static const struct {
        const char *model, *loop, *words;
    } cases[] = {
        {gated, "loss = weighted\nweights = 1 2\n", "loop.weights: has 2 numbers, the model 3 loops"},
        {gated, "loss = weighted\nweights = 0 0 0\n", "loop.weights: all are 0"},
        {gated, "loss = weighted\nweights = 1 -1 0\n", "loop.weights: -1"},
        {gated, "loss = expected\nprior = 1 0 1\n", "loop.prior: an exit"},
        {gated, "loss = expected\nprior = 1 x 1\n", "loop.prior"},
        {gated, "backward_loops = 4\n", "loop.backward_loops: 4"},
        {bare, "loss = expected\n", "exit gate"},
        {mesa_model, "loss = weighted\n", "ends with its loop"},
    };
    make_documents();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        trn_run_config config;
        trn_run run;
        eng_error error = {0};
        char text[1024];
        snprintf(text, sizeof text, "%s[loop]\n%s", train, cases[i].loop);
        eng_status status =
            trn_run_config_read(write_run(cases[i].model, "d", CONTEXT, text), NULL, 0, &config, &error);
        ck_assert_msg(status == ENG_OK, "%s", error.text);
        ck_assert_int_ne(trn_run_open(&config, NULL, &run, &error), ENG_OK);
        ck_assert_msg(strstr(error.text, cases[i].words), "%s: %s", cases[i].loop, error.text);
    }
}
END_TEST

static Suite *gate_suite(void) {
    Suite *suite = suite_create("gate");
    TCase *cases = tcase_create("runs");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_loop_test(cases, the_gate_alone, 0, 2);
    tcase_add_test(cases, the_whole_model);
    tcase_add_test(cases, one_loop_is_the_plain_loss);
    tcase_add_test(cases, a_gate_is_made_where_there_is_none);
    tcase_add_test(cases, eval_tells_every_loop);
    tcase_add_test(cases, truncated_loops_learn);
    tcase_add_test(cases, what_does_not_fit_is_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(gate_suite)

// SPDX-License-Identifier: Apache-2.0
// Evaluation: windows, buckets, bits per byte, and losses equal to those computed from served logits.
// Expected values come from elsewhere: a uniform model has a known loss, served logits give the same one.
#include <math.h>
#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/commands.h"
#include "trainer/eval_result.h"
#include "trainer/probe.h"
#include "trainer/score.h"

static const int lengths[] = {100, 3, 0, 63, 64};
enum { DOCUMENTS = 5, CONTEXT = 48 };
static const char plan[] = "[train]\nsteps = 5\nbatch_tokens = 96\nmicro_rows = 4\n";

START_TEST(windows_cover_every_target) {
    trn_run run;
    trn_windows windows;
    int64_t seen[DOCUMENTS] = {0};
    write_documents("d", lengths, DOCUMENTS);
    open_run(write_run(mesa_model, "d", CONTEXT, plan), &run);
    ck_assert_int_eq(trn_windows_choose(run.train, CONTEXT, 0, NULL, &windows, NULL), ENG_OK);
    for (int64_t i = 0; i < windows.count; i++) {
        const trn_window *window = &windows.window[i];
        ck_assert_int_eq(window->first, seen[window->document]); // in order, without gaps, from the start
        ck_assert(window->count >= 1 && window->count <= CONTEXT);
        seen[window->document] += window->count;
    }
    for (int d = 0; d < DOCUMENTS; d++)
        ck_assert_int_eq(seen[d], lengths[d] + 1);
    ck_assert_int_eq(windows.count, 3 + 1 + 1 + 2 + 2);
    ck_assert_int_eq(windows.bytes, 3 * (100 + 3 + 63 + 64));
    trn_windows_free(&windows);

    ck_assert_int_eq(trn_windows_choose(run.train, CONTEXT, 99, NULL, &windows, NULL), ENG_OK);
    ck_assert_int_eq(windows.count, DOCUMENTS); // the first of each
    ck_assert_int_eq(windows.bytes, -1);        // parts of documents, no tokenizer
    for (int64_t i = 0; i < windows.count; i++)
        ck_assert_int_eq(windows.window[i].first, 0);
    trn_windows_free(&windows);
    ck_assert_int_eq(trn_windows_choose(run.train, 1000, 99, NULL, &windows, NULL), ENG_OK);
    ck_assert_int_eq(windows.bytes, 3 * (100 + 3 + 63 + 64)); // all whole: the table knows
    trn_windows_free(&windows);
    trn_run_close(&run);
}
END_TEST

START_TEST(buckets_double) {
    const struct {
        int32_t place;
        int bucket;
    } wanted[] = {{0, 0},   {63, 0},  {64, 1},   {127, 1},  {128, 2},
                  {255, 2}, {256, 3}, {1023, 4}, {1024, 5}, {INT32_MAX, 23}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        int64_t first, last;
        int bucket = trn_bucket_of(wanted[i].place);
        ck_assert_int_eq(bucket, wanted[i].bucket);
        trn_bucket_range(bucket, &first, &last);
        ck_assert(first <= (int64_t)wanted[i].place + 1);
        ck_assert(wanted[i].place == INT32_MAX || (int64_t)wanted[i].place + 1 <= last);
    }
}
END_TEST

static void save_checkpoint(const trn_run *run, const char *path) {
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_save(path, run->weights, ENG_F32, NULL, &error) == ENG_OK, "%s", error.text);
}

// A model whose head is zero gives every id the same probability.
static void make_uniform(const trn_run *run) {
    memset(run->weights->master[run->model->head], 0,
           sizeof(float) * (size_t)run->model->tensor[run->model->head].count);
}

START_TEST(a_uniform_model_has_known_scores) {
    trn_run run;
    trn_windows windows;
    trn_scores scores;
    write_documents("d", lengths, DOCUMENTS);
    open_run(write_run(mesa_model, "d", CONTEXT, plan), &run);
    make_uniform(&run);
    run.runner.plan = run.score_plan;
    ck_assert_int_eq(trn_windows_choose(run.train, CONTEXT, 0, NULL, &windows, NULL), ENG_OK);
    ck_assert_int_eq(trn_score_windows(&run.batch, run.train, &windows, run.solver, NULL, NULL, NULL, &scores, NULL),
                     ENG_OK);
    ck_assert_int_eq(scores.targets, 235);
    ck_assert_double_eq_tol(scores.loss, 235 * log(TEST_VOCABULARY), 1e-3);
    ck_assert_int_eq(scores.bucket_targets[0], 235); // no window is longer than 48
    ck_assert_double_eq_tol(scores.bucket_loss[0], scores.loss, 1e-9);
    ck_assert_int_eq(scores.solves.solves, 235 * 2 * 2); // layers, heads
    trn_windows_free(&windows);
    trn_run_close(&run);
}
END_TEST

// What --out keeps of each document: its targets, cut into windows and gathered into batches, and its bytes.
START_TEST(documents_are_kept_apart) {
    trn_run run;
    trn_result result = {0};
    char model[512], data[512], out[512];
    snprintf(model, sizeof model, "%s", temp_path("model"));
    snprintf(data, sizeof data, "%s", temp_path("d"));
    snprintf(out, sizeof out, "%s", temp_path("result.json"));
    write_documents("d", lengths, DOCUMENTS);
    open_run(write_run(mesa_model, "d", CONTEXT, plan), &run);
    make_uniform(&run);
    save_checkpoint(&run, model);
    trn_run_close(&run);
    const char *eval[] = {"eval",           model, "--data",   data,        "--context", "80",
                          "--batch-tokens", "90",  "--solver", "exact",     "--solver",  "steps:1",
                          "--out",          out,   "--name",   "even dice", NULL};
    ck_assert_int_eq(trn_command_eval(16, (char **)eval), TRN_EXIT_OK);
    ck_assert_int_eq(trn_result_read(out, &result, NULL), ENG_OK);
    ck_assert_str_eq(result.name, "even dice");
    ck_assert_int_eq(result.rows, 2);
    for (int r = 0; r < 2; r++) {
        const trn_result_row *row = &result.row[r];
        const trn_metric *bits = trn_result_find(row, "bits_per_byte"), *loss = trn_result_find(row, "loss");
        ck_assert_str_eq(row->task, "d 80");
        ck_assert_str_eq(row->setting.name, r ? "steps 1" : "exact");
        ck_assert_str_eq(row->primary, "bits_per_byte");
        ck_assert(bits && loss && row->items == DOCUMENTS);
        for (int d = 0; d < DOCUMENTS; d++) {
            const double targets = lengths[d] + 1, nats = targets * log(TEST_VOCABULARY);
            ck_assert_double_eq(loss->weight[d], targets);
            ck_assert_double_eq_tol(loss->value[d], nats, 1e-3);
            ck_assert_double_eq(bits->weight[d], 3 * lengths[d]);
            ck_assert_double_eq_tol(bits->value[d], nats / log(2), 1e-3);
            ck_assert_double_eq(row->position[0].weight[d], fmin(targets, 64) + fmax(0, targets - 80));
        }
        ck_assert_double_eq(row->position[1].weight[0], 16);
    }
    trn_result_free(&result);

    const char *parts[] = {"eval", model, "--data", data, "--windows", "3", "--context", "8", "--out", out, NULL};
    ck_assert_int_eq(trn_command_eval(10, (char **)parts), TRN_EXIT_OK);
    ck_assert_int_eq(trn_result_read(out, &result, NULL), ENG_OK);
    ck_assert_str_eq(result.row[0].primary, "loss"); // nobody counted the bytes of parts
    ck_assert_int_eq(trn_metric_estimate(trn_result_find(&result.row[0], "loss"), NULL, NULL, 0).count, 3);
    trn_result_free(&result);
}
END_TEST

// The same document through serving plans, chunk by chunk, and through the scorer.
START_TEST(scores_are_those_of_served_logits) {
    const char *model = _i == 0 ? mesa_model : hybrid_model;
    trn_run run;
    trn_windows windows;
    trn_scores scores;
    trn_probe probe;
    const kern_solver exact = {.mode = KERN_SOLVE_EXACT};
    write_documents("d", lengths, 1);
    open_run(write_run(model, "d", 101, "[train]\nsteps = 5\nbatch_tokens = 202\n"), &run);
    run.runner.plan = run.score_plan;
    ck_assert_int_eq(trn_windows_choose(run.train, 101, 0, NULL, &windows, NULL), ENG_OK);
    ck_assert_int_eq(trn_score_windows(&run.batch, run.train, &windows, exact, NULL, NULL, NULL, &scores, NULL),
                     ENG_OK);
    save_checkpoint(&run, temp_path("model"));
    trn_run_close(&run);
    trn_windows_free(&windows);

    int32_t ids[102] = {TEST_BOS};
    for (int i = 0; i < 100; i++)
        ids[i + 1] = document_id(0, i);
    ids[101] = TEST_EOS;
    float *logits = malloc(sizeof *logits * 102 * TEST_VOCABULARY);
    ck_assert_int_eq(trn_probe_open(temp_path("model"), "cpu", true, KERN_STORE_F32, &probe, NULL), ENG_OK);
    ck_assert_int_eq(trn_probe_logits(&probe, ids, 102, 102, exact, logits, NULL), ENG_OK);
    double mean = trn_mean_cross_entropy(logits, ids, 102, TEST_VOCABULARY);
    ck_assert_int_eq(scores.targets, 101);
    ck_assert_double_eq_tol(scores.loss / 101, mean, 1e-5 * mean);
    ck_assert(scores.bucket_targets[0] == 64 && scores.bucket_targets[1] == 37);
    trn_probe_close(&probe);
    free(logits);
}
END_TEST

// Batches of one window and of many give the same sums, up to the order of a product's additions.
START_TEST(scores_do_not_depend_on_the_batch) {
    trn_run run;
    trn_windows windows;
    double loss[2];
    write_documents("d", lengths, DOCUMENTS);
    for (int many = 0; many < 2; many++) {
        trn_scores scores;
        open_run(write_run(mesa_model, "d", CONTEXT,
                           many ? "[train]\nsteps = 5\nbatch_tokens = 192\nmicro_rows = 4\n"
                                : "[train]\nsteps = 5\nbatch_tokens = 48\nmicro_rows = 1\n"),
                 &run);
        run.runner.plan = run.score_plan;
        ck_assert_int_eq(trn_windows_choose(run.train, CONTEXT, 0, NULL, &windows, NULL), ENG_OK);
        ck_assert_int_eq(
            trn_score_windows(&run.batch, run.train, &windows, run.solver, NULL, NULL, NULL, &scores, NULL), ENG_OK);
        loss[many] = scores.loss;
        trn_windows_free(&windows);
        trn_run_close(&run);
    }
    ck_assert_double_eq_tol(loss[0], loss[1], 1e-5 * loss[0]);
}
END_TEST

START_TEST(the_commands_run) {
    trn_run run;
    char model[512], half[512], data[512];
    snprintf(model, sizeof model, "%s", temp_path("model"));
    snprintf(half, sizeof half, "%s", temp_path("half"));
    snprintf(data, sizeof data, "%s", temp_path("d"));
    write_documents("d", lengths, DOCUMENTS);
    open_run(write_run(mesa_model, "d", CONTEXT, plan), &run);
    save_checkpoint(&run, model);
    trn_run_close(&run);
    const char *eval[] = {"eval", model, "--data", data, "--solver-table", NULL};
    ck_assert_int_eq(trn_command_eval(4, (char **)eval), TRN_EXIT_OK);
    ck_assert_int_eq(trn_command_eval(5, (char **)eval), TRN_EXIT_OK);
    ck_assert_int_eq(trn_command_eval(2, (char **)eval), TRN_EXIT_USAGE); // no data
    const char *convert[] = {"export", model, "--out", half, "--dtype", "bf16", NULL};
    ck_assert_int_eq(trn_command_export(6, (char **)convert), TRN_EXIT_OK);
    const char *again[] = {"eval", half, "--data", data, NULL};
    ck_assert_int_eq(trn_command_eval(4, (char **)again), TRN_EXIT_OK);
    const char *inspect[] = {"inspect", half, NULL};
    ck_assert_int_eq(trn_command_inspect(2, (char **)inspect), TRN_EXIT_OK);
    const char *bench[] = {"bench",  "--random", "tiny",     "--rounds", "1",        "--context", "64",
                           "--rows", "2",        "--prompt", "64",       "--tokens", "4",         NULL};
    ck_assert_int_eq(trn_command_bench(13, (char **)bench), TRN_EXIT_OK);
    ck_assert_int_eq(trn_command_bench(1, (char **)bench), TRN_EXIT_USAGE); // neither a folder nor a random model
    const char *bad[] = {"export", model, "--out", half, "--dtype", "f16", NULL};
    ck_assert_int_eq(trn_command_export(6, (char **)bad), TRN_EXIT_USAGE);
    const char *form[] = {"export", model, "--out", half, "--as", "gguf", NULL};
    ck_assert_int_eq(trn_command_export(6, (char **)form), TRN_EXIT_USAGE);
    ck_assert_int_eq(trn_command_import(6, (char **)form), TRN_EXIT_USAGE); // has one form alone
    ck_assert_int_eq(trn_command_import(2, (char **)form), TRN_EXIT_USAGE); // where to
}
END_TEST

// Without an option an element type stays what it is.
static void expect_type(const char *dir, eng_dtype wanted) {
    eng_checkpoint *checkpoint = NULL;
    const char *out = temp_path("again");
    const char *import[] = {"import", dir, "--out", out, NULL};
    ck_assert_int_eq(trn_command_import(4, (char **)import), TRN_EXIT_OK);
    ck_assert_int_eq(eng_checkpoint_open(out, &checkpoint, NULL), ENG_OK);
    for (int32_t i = 0; i < eng_checkpoint_model(checkpoint)->tensors; i++)
        ck_assert_int_eq(eng_checkpoint_dtype(checkpoint, i), wanted);
    eng_checkpoint_close(checkpoint);
}

START_TEST(converting_rounds_to_bf16) {
    trn_run run;
    eng_checkpoint *checkpoint = NULL;
    char model[512], half[512];
    snprintf(model, sizeof model, "%s", temp_path("model"));
    snprintf(half, sizeof half, "%s", temp_path("half"));
    write_documents("d", lengths, DOCUMENTS);
    open_run(write_run(mesa_model, "d", CONTEXT, plan), &run);
    save_checkpoint(&run, model);
    const char *convert[] = {"export", model, "--out", half, "--dtype", "bf16", NULL};
    ck_assert_int_eq(trn_command_export(6, (char **)convert), TRN_EXIT_OK);
    eng_weights *weights = NULL;
    ck_assert_int_eq(eng_checkpoint_open(half, &checkpoint, NULL), ENG_OK);
    ck_assert_int_eq(eng_weights_load(checkpoint, run.device, true, &weights, NULL), ENG_OK);
    int rounded = 0;
    for (int64_t i = 0; i < weights->count; i++) {
        float wanted = eng_bf16_to_f32(eng_bf16_from_f32(run.weights->masters[i]));
        ck_assert_msg(weights->masters[i] == wanted, "value %lld", (long long)i);
        rounded += wanted != run.weights->masters[i];
    }
    ck_assert_int_gt(rounded, 1000);
    eng_weights_free(weights);
    eng_checkpoint_close(checkpoint);
    trn_run_close(&run);
    expect_type(model, ENG_F32);
    expect_type(half, ENG_BF16);
}
END_TEST

static Suite *eval_suite(void) {
    Suite *suite = suite_create("eval");
    TCase *cases = tcase_create("scores");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, windows_cover_every_target);
    tcase_add_test(cases, buckets_double);
    tcase_add_test(cases, a_uniform_model_has_known_scores);
    tcase_add_test(cases, documents_are_kept_apart);
    tcase_add_loop_test(cases, scores_are_those_of_served_logits, 0, 2);
    tcase_add_test(cases, scores_do_not_depend_on_the_batch);
    tcase_add_test(cases, the_commands_run);
    tcase_add_test(cases, converting_rounds_to_bf16);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(eval_suite)

// SPDX-License-Identifier: Apache-2.0
// Training as a whole: the loss of a step does not depend on how it is cut, packed documents do not feel each other, a
// model learns, a step that cannot be taken changes nothing.
#include "trainer/train_loop.h"

#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"

static const char *const models[] = {mesa_model, hybrid_model};
enum { MODELS = 2 };

// ------------------------------------------------------------------------------------------------------- accumulation

typedef struct step_result {
    trn_step_report report;
    float *gradients;
    int64_t count;
} step_result;

static step_result run_step(const char *model, int context, const char *more) {
    trn_run run;
    eng_error error = {0};
    step_result result = {0};
    open_run(write_run(model, "d", context, more), &run);
    ck_assert_msg(trn_run_step(&run, &result.report, &error) == ENG_OK, "%s", error.text);
    result.count = run.weights->count;
    result.gradients = malloc(sizeof(float) * (size_t)result.count);
    ck_assert_int_eq(
        kern_download(run.runner.stream, result.gradients, run.weights->grads, sizeof(float) * (size_t)result.count),
        KERN_OK);
    ck_assert_int_eq(kern_synchronize(run.runner.stream), KERN_OK);
    trn_run_close(&run);
    return result;
}

static double relative_distance(const float *a, const float *b, int64_t count) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(difference / size);
}

// Two steps of one row each at rate 0: the rows' own mean losses and gradients, weighed by their targets.
static void weigh_rows(const char *model, int context, step_result *sum) {
    trn_run run;
    trn_step_report report;
    open_run(write_run(model, "d", context, "[optim]\nlr = 0\n[train]\nsteps = 5\nbatch_tokens = 101\n"), &run);
    *sum = (step_result){.count = run.weights->count, .gradients = calloc((size_t)run.weights->count, sizeof(float))};
    for (int step = 0; step < 2; step++) {
        ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
        double share = (double)report.targets / 112;
        sum->report.loss += share * report.loss;
        sum->report.targets += report.targets;
        for (int64_t i = 0; i < sum->count; i++)
            sum->gradients[i] += (float)(share * (double)run.weights->grads[i]);
    }
    trn_run_close(&run);
}

static void same_step(const step_result *got, const step_result *wanted) {
    double distance = relative_distance(got->gradients, wanted->gradients, wanted->count);
    ck_assert_int_eq(got->report.targets, wanted->report.targets);
    ck_assert_double_eq_tol(got->report.loss, wanted->report.loss, 1e-6 * wanted->report.loss);
    ck_assert_msg(distance < 3e-6, "gradients differ by %g", distance);
}

// Rows of 101 and 11 targets: as one batch of two, as two batches of one, and each alone, weighed by its targets. A
// mean of means would weigh a target of the short row nine times as much.
START_TEST(a_step_does_not_depend_on_its_micro_batches) {
    const int lengths[] = {100, 10};
    write_documents("d", lengths, 2);
    step_result whole = run_step(models[_i], 101, "[train]\nsteps = 5\nbatch_tokens = 202\nmicro_rows = 2\n");
    step_result parts = run_step(models[_i], 101, "[train]\nsteps = 5\nbatch_tokens = 202\nmicro_rows = 1\n");
    step_result weighed;
    weigh_rows(models[_i], 101, &weighed);
    ck_assert_int_eq(whole.report.targets, 112);
    ck_assert_double_eq_tol(parts.report.gradient_norm, whole.report.gradient_norm, 1e-6 * whole.report.gradient_norm);
    same_step(&parts, &whole);
    same_step(&weighed, &whole);
    free(whole.gradients);
    free(parts.gradients);
    free(weighed.gradients);
}
END_TEST

// A whole step on a CUDA device: float32 as on the CPU, bf16 near it.
START_TEST(a_step_on_a_device_is_that_of_the_cpu) {
    const int lengths[] = {100, 10};
    kern_device *device = NULL;
    if (kern_device_open(&(kern_device_options){.name = "cuda:0"}, &device, NULL, 0) != KERN_OK)
        MESA_TEST_SKIP("no device %s", "cuda:0");
    kern_device_close(device);
    write_documents("d", lengths, 2);
    step_result cpu = run_step(models[_i], 101, "[train]\nsteps = 5\nbatch_tokens = 202\nmicro_rows = 2\n");
    step_result exact =
        run_step(models[_i], 101, "[train]\nsteps = 5\nbatch_tokens = 202\nmicro_rows = 2\ndevice = cuda:0\n");
    step_result near = run_step(
        models[_i], 101, "[train]\nsteps = 5\nbatch_tokens = 202\nmicro_rows = 2\ndevice = cuda:0\nprecision = bf16\n");
    ck_assert_double_eq_tol(exact.report.loss, cpu.report.loss, 1e-5 * cpu.report.loss);
    ck_assert_double_eq_tol(near.report.loss, cpu.report.loss, 1e-2 * cpu.report.loss);
    ck_assert_double_lt(relative_distance(exact.gradients, cpu.gradients, cpu.count), 2e-4);
    ck_assert_double_lt(relative_distance(near.gradients, cpu.gradients, cpu.count), 5e-2);
    free(cpu.gradients);
    free(exact.gradients);
    free(near.gradients);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- packing

typedef struct batch_result {
    float *loss, *gradients;
    int32_t tokens;
} batch_result;

// Runs rows (a row's documents are cut at its boundaries) and takes losses and gradients.
static batch_result run_rows_by(trn_run *run, const trn_row *row, int rows,
                                eng_status (*add)(trn_batch *, const trn_row *, double, kern_solver, eng_error *)) {
    eng_error error = {0};
    ck_assert_int_eq(trn_optimizer_zero_gradients(&run->optimizer, NULL), ENG_OK);
    trn_batch_clear(&run->batch);
    for (int i = 0; i < rows; i++)
        ck_assert_msg(add(&run->batch, &row[i], 1e-2, run->solver, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(trn_batch_run(&run->batch, &error) == ENG_OK, "%s", error.text);
    batch_result result = {.tokens = run->runner.rows->n_tokens};
    size_t floats = (size_t)run->weights->count;
    result.loss = malloc(sizeof(float) * (size_t)result.tokens);
    result.gradients = malloc(sizeof(float) * floats);
    memcpy(result.loss, run->batch.loss, sizeof(float) * (size_t)result.tokens);
    memcpy(result.gradients, run->weights->grads, sizeof(float) * floats);
    return result;
}

static batch_result run_rows(trn_run *run, const trn_row *row, int rows) {
    return run_rows_by(run, row, rows, trn_batch_add);
}

enum { DOCUMENTS = 7, PAIRS = 1 + 2 + 3 + 63 + 64 + 65 + 130 };
static const int ids_of_document[DOCUMENTS] = {0, 1, 2, 62, 63, 64, 129}; // pairs 1, 2, 3, 63, 64, 65, 130

static const char packed_run[] =
    "[train]\nsteps = 5\nbatch_tokens = 2296\nmicro_rows = 7\n[solver]\nmode = exact\n"; // 7 rows of 328

static void read_documents(const trn_run *run, trn_row *row) {
    for (int d = 0; d < DOCUMENTS; d++) {
        ck_assert_int_eq(trn_row_create(PAIRS, &row[d], NULL), ENG_OK);
        ck_assert_int_eq(trn_dataset_window(run->train, d, 0, ids_of_document[d] + 1, &row[d], NULL), ENG_OK);
    }
}

static void same_results(const trn_run *run, batch_result *together, batch_result *apart) {
    ck_assert_int_eq(together->tokens, apart->tokens);
    mesa_assert_close(together->loss, apart->loss, apart->tokens, 2e-5, 2e-5);
    double distance = relative_distance(together->gradients, apart->gradients, run->weights->count);
    ck_assert_msg(distance < 2e-5, "gradients differ by %g", distance);
    free(together->loss);
    free(together->gradients);
    free(apart->loss);
    free(apart->gradients);
}

START_TEST(packed_documents_are_documents_alone) {
    write_documents("d", ids_of_document, DOCUMENTS);
    trn_run run;
    trn_row alone[DOCUMENTS], packed;
    open_run(write_run(models[_i], "d", PAIRS, packed_run), &run);
    ck_assert_int_eq(trn_row_create(PAIRS, &packed, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(run.train, 0, &packed, NULL), ENG_OK);
    ck_assert_int_eq(packed.length, PAIRS);
    ck_assert_int_eq(packed.boundaries, DOCUMENTS - 1);
    read_documents(&run, alone);
    batch_result together = run_rows(&run, &packed, 1), apart = run_rows(&run, alone, DOCUMENTS);
    same_results(&run, &together, &apart);
    for (int d = 0; d < DOCUMENTS; d++)
        trn_row_free(&alone[d]);
    trn_row_free(&packed);
    trn_run_close(&run);
}
END_TEST

START_TEST(joined_rows_are_rows_alone) {
    write_documents("d", ids_of_document, DOCUMENTS);
    trn_run run;
    trn_row row[DOCUMENTS];
    open_run(write_run(models[_i], "d", PAIRS, packed_run), &run);
    read_documents(&run, row);
    batch_result together = run_rows_by(&run, row, DOCUMENTS, trn_batch_join);
    const kern_rows *rows = run.runner.rows;
    ck_assert_int_lt(rows->n_rows, DOCUMENTS);
    for (int32_t r = 0; r < rows->n_rows; r++)
        ck_assert(rows->row[r].boundaries == 0 || rows->row[r].length <= kern_device_describe(run.device)->chunk);
    ck_assert_int_eq(rows->n_rows + rows->n_boundaries, DOCUMENTS);
    batch_result apart = run_rows(&run, row, DOCUMENTS);
    same_results(&run, &together, &apart);

    const trn_row rows_of_two[] = {row[2], {row[1].id, row[1].target, (int32_t[]){1}, 2, 1, 2}, row[0]};
    together = run_rows_by(&run, rows_of_two, 3, trn_batch_join);
    ck_assert_int_eq(rows->n_rows, 1);
    ck_assert_int_eq(rows->row[0].boundaries, 3);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(rows->boundary[i], 3 + i);
    apart = run_rows(&run, rows_of_two, 3);
    same_results(&run, &together, &apart);
    for (int d = 0; d < DOCUMENTS; d++)
        trn_row_free(&row[d]);
    trn_run_close(&run);
}
END_TEST

// The last token of one document is changed: no later document's loss may feel it, not in a bit.
START_TEST(a_document_does_not_reach_the_next) {
    write_documents("d", ids_of_document, DOCUMENTS);
    trn_run run;
    trn_row packed;
    open_run(write_run(models[_i], "d", PAIRS, packed_run), &run);
    ck_assert_int_eq(trn_row_create(PAIRS, &packed, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(run.train, 0, &packed, NULL), ENG_OK);
    batch_result before = run_rows(&run, &packed, 1);
    int32_t changed = packed.boundary[3] - 1; // the last token of the document of 63 pairs
    packed.id[changed] = packed.id[changed] == 5 ? 6 : 5;
    batch_result after = run_rows(&run, &packed, 1);
    ck_assert(before.loss[changed] != after.loss[changed]);
    ck_assert_mem_eq(before.loss, after.loss, sizeof(float) * (size_t)changed);
    ck_assert_mem_eq(before.loss + changed + 1, after.loss + changed + 1,
                     sizeof(float) * (size_t)(PAIRS - changed - 1));
    free(before.loss);
    free(before.gradients);
    free(after.loss);
    free(after.gradients);
    trn_row_free(&packed);
    trn_run_close(&run);
}
END_TEST

// A validation between two steps shares the training plan's memory and must leave no trace.
START_TEST(validation_changes_nothing) {
    const int lengths[] = {90, 33, 70, 12};
    write_documents("d", lengths, 4);
    const char more[] = "[train]\nsteps = 5\nbatch_tokens = 128\nmicro_rows = 2\neval_rows = 3\n";
    double loss[2], norm[2];
    for (int validates = 0; validates < 2; validates++) {
        trn_run run;
        trn_score first, second;
        trn_step_report report;
        open_run(write_run(models[_i], "d", 64, more), &run);
        ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
        if (validates) {
            ck_assert_int_eq(trn_run_validate(&run, &first, NULL), ENG_OK);
            ck_assert_int_eq(trn_run_validate(&run, &second, NULL), ENG_OK);
            ck_assert(first.targets > 128 && first.loss == second.loss);
        }
        ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
        loss[validates] = report.loss;
        norm[validates] = report.gradient_norm;
        trn_run_close(&run);
    }
    ck_assert(loss[0] == loss[1] && norm[0] == norm[1]);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ learning

START_TEST(one_batch_is_learned_by_heart) {
    const int lengths[] = {60, 40, 25};
    write_documents("d", lengths, 3);
    trn_run run;
    trn_step_report report;
    open_run(write_run(models[_i], "d", 64,
                       "[optim]\nlr = 0.01\nwarmup_steps = 10\nweight_decay = 0\n"
                       "[train]\nsteps = 150\nbatch_tokens = 128\nmicro_rows = 2\n"),
             &run);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_double_eq_tol(report.loss, log(TEST_VOCABULARY), 1.0);
    while (run.state.step < 150)
        ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_msg(report.loss < 0.05, "loss %g", report.loss);
    trn_run_close(&run);
}
END_TEST

START_TEST(recomputation_gives_the_same_step) {
    const int lengths[] = {90, 33, 70, 12};
    write_documents("d", lengths, 4);
    const char *const more[] = {"[train]\nsteps = 5\nbatch_tokens = 128\nmicro_rows = 2\nrecompute = none\n",
                                "[train]\nsteps = 5\nbatch_tokens = 128\nmicro_rows = 2\nrecompute = mixer\n",
                                "[train]\nsteps = 5\nbatch_tokens = 128\nmicro_rows = 2\nrecompute = block\n"};
    step_result plain = run_step(models[_i], 64, more[0]);
    for (int r = 1; r < 3; r++) {
        step_result again = run_step(models[_i], 64, more[r]);
        ck_assert(again.report.loss == plain.report.loss);
        ck_assert_mem_eq(again.gradients, plain.gradients, sizeof(float) * (size_t)plain.count);
        free(again.gradients);
    }
    free(plain.gradients);
}
END_TEST

// ------------------------------------------------------------------------------------------- steps that are not taken

static void mask_everything(const char *name, size_t ids) {
    char *bytes = NULL;
    size_t length = 0, table = (64 + 2 * ids + 7) & ~(size_t)7, masked_table = (64 + 3 * ids + 7) & ~(size_t)7;
    ck_assert_int_eq(eng_read_file(temp_path(name), 1 << 20, &bytes, &length, NULL), ENG_OK);
    char *masked = calloc(1, masked_table + length - table);
    memcpy(masked, bytes, 64 + 2 * ids);
    masked[10] = 1;
    memcpy(masked + masked_table, bytes + table, length - table);
    temp_write(name, masked, masked_table + length - table);
    free(masked);
    free(bytes);
}

START_TEST(a_step_without_targets_changes_nothing) {
    const int lengths[] = {31, 31};
    write_documents("d", lengths, 2);
    mask_everything("d-00000.tok", 62);
    trn_run run;
    trn_step_report report;
    open_run(write_run(mesa_model, "d", 32, "[train]\nsteps = 5\nbatch_tokens = 64\n"), &run);
    size_t bytes = sizeof(float) * (size_t)run.weights->count;
    float *before = malloc(bytes);
    memcpy(before, run.weights->masters, bytes);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_int_eq(report.outcome, TRN_STEP_EMPTY);
    ck_assert_mem_eq(before, run.weights->masters, bytes);
    ck_assert(run.state.step == 1 && run.optimizer.updates == 0);
    free(before);
    trn_run_close(&run);
}
END_TEST

static float *copy_of(const trn_run *run, const float *block) {
    float *copy = malloc(sizeof(float) * (size_t)run->weights->count);
    memcpy(copy, block, sizeof(float) * (size_t)run->weights->count);
    return copy;
}

START_TEST(a_step_that_is_not_finite_changes_nothing) {
    const int lengths[] = {31, 31};
    write_documents("d", lengths, 2);
    trn_run run;
    trn_step_report report;
    eng_error error = {0};
    open_run(write_run(mesa_model, "d", 32, "[train]\nsteps = 50\nbatch_tokens = 64\nmax_bad_steps = 3\n"), &run);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    run.weights->master[run.model->final_norm][3] = INFINITY;
    float *weights = copy_of(&run, run.weights->masters), *m = copy_of(&run, run.optimizer.m);
    float *v = copy_of(&run, run.optimizer.v);
    size_t bytes = sizeof(float) * (size_t)run.weights->count;
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_int_eq(report.outcome, TRN_STEP_NOT_FINITE);
    ck_assert(isnan(report.loss) && !signbit(report.loss)); // "-nan" is nobody's number
    ck_assert(!signbit(report.gradient_norm));
    ck_assert_str_eq(report.culprit, "weight model.norm.weight");
    ck_assert_int_eq(report.first_place, 2);
    ck_assert_mem_eq(weights, run.weights->masters, bytes);
    ck_assert_mem_eq(m, run.optimizer.m, bytes);
    ck_assert_mem_eq(v, run.optimizer.v, bytes);
    ck_assert(run.optimizer.updates == 1 && run.state.bad_steps == 1 && run.state.bad_in_row == 1);
    trn_loop_options options = {.folder = temp_folder()};
    ck_assert_int_eq(trn_train_loop(&run, &options, &error), ENG_NUMERIC); // and a run of them ends
    ck_assert_msg(strstr(error.text, "step 4") && strstr(error.text, "weight model.norm.weight"), "%s", error.text);
    ck_assert(run.state.step == 4 && run.state.bad_in_row == 3);
    free(weights);
    free(m);
    free(v);
    trn_run_close(&run);
}
END_TEST

static void scale_tensor(trn_run *run, int32_t tensor, float factor) {
    ck_assert_int_ge(tensor, 0);
    for (int64_t i = 0; i < run->model->tensor[tensor].count; i++)
        run->weights->master[tensor][i] *= factor;
}

// What a mixer's last product reads grows and the product's weights shrink as much: forward nothing changes, but their
// gradient, of a loss made steep by the last norm, is beyond float32. It is so in both layers, and nowhere else.
static void make_steep(trn_run *run, float steep, float large) {
    scale_tensor(run, run->model->final_norm, steep);
    for (int layer = 0; layer < 2; layer++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.%d.attn.o_norm.weight", layer);
        scale_tensor(run, eng_model_find(run->model, name), large);
        snprintf(name, sizeof name, "model.layers.%d.attn.o_proj.weight", layer);
        scale_tensor(run, eng_model_find(run->model, name), 1 / large);
    }
}

START_TEST(a_gradient_that_overflows_is_named_and_passed) {
    const int lengths[] = {31, 31, 31, 31};
    write_documents("d", lengths, 4);
    trn_run run;
    trn_step_report report;
    open_run(write_run(mesa_model, "d", 32, "[train]\nsteps = 50\nbatch_tokens = 64\n"), &run);
    make_steep(&run, 1e12F, 1e32F);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_int_eq(report.outcome, TRN_STEP_NOT_FINITE);
    ck_assert(isfinite(report.loss));
    ck_assert_str_eq(report.culprit, "gradient model.layers.1.attn.o_proj.weight");
    make_steep(&run, 1e-12F, 1e-32F);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
    ck_assert_int_eq(report.outcome, TRN_STEP_DONE);
    ck_assert_int_eq(report.first_place, 2);
    ck_assert(run.state.bad_steps == 1 && run.state.bad_in_row == 0);
    trn_run_close(&run);
}
END_TEST

// Without clipping a gradient whose square does not fit would leave a moment infinite for good.
START_TEST(a_gradient_too_large_for_the_moments_is_passed) {
    const int lengths[] = {31, 31};
    write_documents("d", lengths, 2);
    for (int clips = 0; clips < 2; clips++) {
        trn_run run;
        trn_step_report report;
        const char *more = clips ? "[train]\nsteps = 50\nbatch_tokens = 64\n"
                                 : "[optim]\nclip = 0\n[train]\nsteps = 50\nbatch_tokens = 64\n";
        open_run(write_run(mesa_model, "d", 32, more), &run);
        make_steep(&run, 1e12F, 1e12F);
        ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK);
        ck_assert(isfinite(report.gradient_norm) && report.gradient_norm > 1e20);
        ck_assert_int_eq(report.outcome, clips ? TRN_STEP_DONE : TRN_STEP_NOT_FINITE);
        for (int64_t i = 0; i < run.weights->count; i++)
            ck_assert(isfinite(run.optimizer.v[i]));
        trn_run_close(&run);
    }
}
END_TEST

START_TEST(batches_may_be_longer_than_an_epoch) {
    const int lengths[] = {5};
    write_documents("d", lengths, 1);
    trn_run run;
    trn_step_report report;
    open_run(write_run(mesa_model, "d", 4, "[train]\nsteps = 5\nbatch_tokens = 20\nmicro_rows = 3\n"), &run);
    ck_assert_int_eq(trn_run_step(&run, &report, NULL), ENG_OK); // 5 rows of the epoch's 2: 4 and 2 pairs
    ck_assert(report.targets == 2 * 6 + 4 || report.targets == 2 * 6 + 2);
    ck_assert(isfinite(report.loss));
    trn_run_close(&run);
}
END_TEST

static Suite *train_suite(void) {
    Suite *suite = suite_create("train");
    TCase *cases = tcase_create("steps");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 120);
    tcase_add_loop_test(cases, a_step_does_not_depend_on_its_micro_batches, 0, MODELS);
    tcase_add_loop_test(cases, a_step_on_a_device_is_that_of_the_cpu, 0, MODELS);
    tcase_add_loop_test(cases, packed_documents_are_documents_alone, 0, MODELS);
    tcase_add_loop_test(cases, joined_rows_are_rows_alone, 0, MODELS);
    tcase_add_loop_test(cases, a_document_does_not_reach_the_next, 0, MODELS);
    tcase_add_loop_test(cases, validation_changes_nothing, 0, MODELS);
    tcase_add_loop_test(cases, one_batch_is_learned_by_heart, 0, MODELS);
    tcase_add_loop_test(cases, recomputation_gives_the_same_step, 0, MODELS);
    tcase_add_test(cases, a_step_without_targets_changes_nothing);
    tcase_add_test(cases, a_step_that_is_not_finite_changes_nothing);
    tcase_add_test(cases, a_gradient_that_overflows_is_named_and_passed);
    tcase_add_test(cases, a_gradient_too_large_for_the_moments_is_passed);
    tcase_add_test(cases, batches_may_be_longer_than_an_epoch);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(train_suite)

// SPDX-License-Identifier: Apache-2.0
// Runs that learn from a teacher: the divergence is that of the served logits, gradients are differences, a student
// that equals its teacher is at rest, nothing depends on how a step is cut or interrupted, and another vocabulary is
// refused.
#include "trainer/teacher.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/trainer/run_support.h"
#include "trainer/evaluation.h"
#include "trainer/probe.h"
#include "trainer/train_loop.h"

enum { CONTEXT = 48 };

// A Transformer, wider than its students and with another head; its loops are read where its gate says.
static const char llama_model[] =
    "model_type = llama\nhidden_size = 48\nnum_hidden_layers = 2\nnum_attention_heads = 3\n"
    "num_key_value_heads = 1\nintermediate_size = 80\ntie_word_embeddings = false\n"
    "initializer_range = 0.2\nhidden_act = silu\n";
static const char looped_model[] =
    "model_type = mesa_net\nhidden_size = 32\nnum_hidden_layers = 3\nnum_heads = 2\nhead_dim = 16\n"
    "intermediate_size = 64\ntie_word_embeddings = true\ninitializer_range = 0.2\nlogits_soft_cap = 5.0\n"
    "num_loops = 3\nloop_blocks = [1, 2]\nexit_gate = true\nmesa = {\"exit_threshold\": 0.6, \"cg_tolerance\": 1e-3}\n";

static const char *const models[] = {mesa_model, hybrid_model, llama_model, looped_model};
enum { MODELS = 4 };

static void write_data(void) {
    const int lengths[] = {40, 9, 21, 70, 5, 33, 60, 2, 30};
    write_documents("d", lengths, 9);
}

// A checkpoint with start values of the model, of this seed, in dtype or in blocks.
static const char *write_rounded(const char *name, const char *model, int seed, eng_dtype dtype, kern_dtype blocks) {
    char more[96];
    trn_run run;
    eng_error error = {0};
    snprintf(more, sizeof more, "[train]\nsteps = 1\nbatch_tokens = 48\nseed = %d\n", seed);
    open_run(write_run(model, "d", CONTEXT, more), &run);
    const eng_status status = blocks == KERN_F32
                                  ? eng_checkpoint_save(temp_path(name), run.weights, dtype, NULL, &error)
                                  : eng_checkpoint_quantize(temp_path(name), run.weights, blocks, NULL, NULL, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
    trn_run_close(&run);
    return temp_path(name);
}

static const char *write_teacher(const char *name, const char *model, int seed, eng_dtype dtype) {
    return write_rounded(name, model, seed, dtype, KERN_F32);
}

static const char *taught_by(const char *teacher, double loss_share, double divergence_share, double temperature,
                             const char *more) {
    static char text[2048];
    snprintf(
        text, sizeof text,
        "[teacher]\nmodel = %s\nloss_share = %g\ndivergence_share = %g\ntemperature = %g\n[solver]\nmode = exact\n%s",
        teacher, loss_share, divergence_share, temperature, more);
    return text;
}

static void open_student(const char *model, const char *more, trn_run *run) {
    open_run(write_run(model, "d", CONTEXT, more), run);
}

// The same step again and again, as long as the rate is 0.
static trn_step_report step_of(trn_run *run) {
    trn_step_report report;
    eng_error error = {0};
    run->state.step = 0;
    ck_assert_msg(trn_run_step(run, &report, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(report.outcome, TRN_STEP_DONE);
    return report;
}

#define STILL "[optim]\nlr = 0\n[train]\nsteps = 50\n"

// ------------------------------------------------------------------------------------------------------------- figures

// log softmax(l / temperature) in double.
static void log_probabilities(const float *logits, double temperature, double *out) {
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < TEST_VOCABULARY; i++)
        top = fmax(top, (double)logits[i] / temperature);
    for (int i = 0; i < TEST_VOCABULARY; i++)
        sum += exp((double)logits[i] / temperature - top);
    for (int i = 0; i < TEST_VOCABULARY; i++)
        out[i] = (double)logits[i] / temperature - top - log(sum);
}

static double divergence_of(const float *logits, const float *teacher, double temperature) {
    double p[TEST_VOCABULARY], q[TEST_VOCABULARY], sum = 0;
    log_probabilities(teacher, temperature, p);
    log_probabilities(logits, temperature, q);
    for (int i = 0; i < TEST_VOCABULARY; i++)
        sum += exp(p[i]) * (p[i] - q[i]);
    return temperature * temperature * sum;
}

// Both models' logits of a document that stands alone.
static void read_alone(const char *dir, const int32_t *ids, int32_t count, kern_solver *solver, float *logits) {
    trn_probe probe;
    eng_error error = {0};
    ck_assert_msg(trn_probe_open(dir, "cpu", false, KERN_STORE_F32, &probe, &error) == ENG_OK, "%s", error.text);
    const kern_solver own = trn_model_solver(probe.model);
    ck_assert_int_eq(trn_probe_logits(&probe, ids, count, count, solver ? *solver : own, logits, &error), ENG_OK);
    trn_probe_close(&probe);
}

static void check_document(const trn_run *run, const char *student, const char *teacher, int32_t first, int32_t end,
                           double temperature, double tolerance) {
    static float own[CONTEXT * TEST_VOCABULARY], other[CONTEXT * TEST_VOCABULARY];
    const kern_rows *rows = run->runner.rows;
    kern_solver solver = run->solver;
    read_alone(student, rows->id + first, end - first, &solver, own);
    read_alone(teacher, rows->id + first, end - first, NULL, other);
    for (int32_t t = first; t < end; t++) {
        const double got = (double)run->batch.divergence[t];
        const int64_t at = (int64_t)(t - first) * TEST_VOCABULARY;
        const double wanted = rows->target[t] < 0 ? 0 : divergence_of(own + at, other + at, temperature);
        ck_assert_msg(fabs(got - wanted) <= tolerance * (1 + wanted), "token %d: %g, not %g", t, got, wanted);
    }
}

// A row of several documents: each diverges as it does alone, by the logits that are served, in 4 bits too.
START_TEST(divergence_is_that_of_served_logits) {
    trn_run run;
    trn_row row;
    char teacher[512], student[512];
    write_data();
    // Products with blocks round their inputs to int8, so that other last digits may make another code.
    const kern_dtype blocks = _i < MODELS ? KERN_F32 : KERN_Q4;
    const double tolerance = _i < MODELS ? 2e-5 : 2e-2;
    write_rounded("teacher", models[_i % MODELS], 7, _i % 2 ? ENG_F32 : ENG_BF16, blocks);
    snprintf(teacher, sizeof teacher, "%s", temp_path("teacher"));
    open_student(mesa_model, taught_by(teacher, 1, 1, 1.5, "[train]\nsteps = 5\nbatch_tokens = 96\n"), &run);
    snprintf(student, sizeof student, "%s", temp_path("student"));
    ck_assert_int_eq(eng_checkpoint_save(student, run.weights, ENG_F32, NULL, NULL), ENG_OK);
    ck_assert_int_eq(trn_row_create(CONTEXT, &row, NULL), ENG_OK);
    int documents = 0;
    for (int64_t r = 0; r < trn_dataset_rows(run.train); r++) {
        ck_assert_int_eq(trn_dataset_row(run.train, r, &row, NULL), ENG_OK);
        trn_batch_clear(&run.batch);
        ck_assert_int_eq(trn_batch_add(&run.batch, &row, 1e-2, run.solver, NULL), ENG_OK);
        ck_assert_int_eq(trn_batch_run(&run.batch, NULL), ENG_OK);
        for (int32_t i = 0; i <= row.boundaries; i++, documents++)
            check_document(&run, student, teacher, i > 0 ? row.boundary[i - 1] : 0,
                           i < row.boundaries ? row.boundary[i] : row.length, 1.5, tolerance);
    }
    ck_assert_int_gt(documents, trn_dataset_rows(run.train));
    trn_row_free(&row);
    trn_run_close(&run);
}
END_TEST

// The same of a checkpoint that is evaluated, window by window.
START_TEST(an_evaluation_tells_it_too) {
    static float own[CONTEXT * TEST_VOCABULARY], other[CONTEXT * TEST_VOCABULARY];
    char teacher[512], student[512], data[512];
    trn_evaluation e;
    trn_scores scores;
    trn_row row;
    double sum = 0;
    eng_error error = {0};
    write_data();
    snprintf(teacher, sizeof teacher, "%s", write_teacher("teacher", looped_model, 7, ENG_BF16));
    snprintf(student, sizeof student, "%s", write_teacher("student", hybrid_model, 8, ENG_F32));
    snprintf(data, sizeof data, "%s", temp_path("d"));
    const trn_evaluation_options options = {.data = {.item = {data}, .count = 1},
                                            .device = "cpu",
                                            .teacher = teacher,
                                            .context = CONTEXT,
                                            .batch_tokens = 2 * CONTEXT};
    ck_assert_msg(trn_evaluation_open(student, &options, &e, &error) == ENG_OK, "%s", error.text);
    kern_solver solver = {.mode = KERN_SOLVE_EXACT};
    ck_assert_int_eq(trn_evaluation_score(&e, solver, &scores, NULL), ENG_OK);
    ck_assert_int_eq(trn_row_create(CONTEXT, &row, NULL), ENG_OK);
    for (int64_t w = 0; w < e.windows.count; w++) {
        const trn_window *window = &e.windows.window[w];
        ck_assert_int_eq(trn_dataset_window(e.dataset, window->document, window->first, window->count, &row, NULL),
                         ENG_OK);
        read_alone(student, row.id, row.length, &solver, own);
        read_alone(teacher, row.id, row.length, NULL, other);
        for (int64_t t = 0; t < row.length; t++)
            sum += divergence_of(own + t * TEST_VOCABULARY, other + t * TEST_VOCABULARY, 1);
    }
    ck_assert_int_gt(e.windows.count, 9);
    ck_assert_double_eq_tol(scores.divergence, sum, 1e-5 * sum);
    trn_row_free(&row);
    trn_evaluation_close(&e);
}
END_TEST

// What is trained and what is validated are the same figures, and the loss is the one without a teacher, to the last
// bit: the teacher leaves no trace in the student's pass.
START_TEST(loss_is_that_without_a_teacher) {
    trn_run run;
    trn_score plain, taught;
    write_data();
    write_teacher("teacher", looped_model, 7, ENG_F32);
    open_student(models[_i], "[solver]\nmode = exact\n" STILL "batch_tokens = 240\nmicro_rows = 2\n", &run);
    const trn_step_report before = step_of(&run);
    ck_assert_int_eq(trn_run_validate(&run, &plain, NULL), ENG_OK);
    ck_assert(before.divergence == 0 && plain.divergence == 0);
    trn_run_close(&run);
    open_student(models[_i],
                 taught_by(temp_path("teacher"), 1, 1, 1, STILL "batch_tokens = 240\nmicro_rows = 2\neval_rows = 0\n"),
                 &run);
    const trn_step_report report = step_of(&run);
    ck_assert_double_eq(report.loss, before.loss);
    ck_assert_double_gt(report.divergence, 0.01);
    ck_assert_int_eq(trn_run_validate(&run, &taught, NULL), ENG_OK);
    ck_assert_double_eq(taught.loss, plain.loss);
    ck_assert_int_eq(taught.hits.targets, plain.hits.targets);
    ck_assert_double_gt(taught.divergence, 0.01 * (double)taught.targets);
    trn_run_close(&run);
}
END_TEST

START_TEST(a_student_that_is_its_teacher_is_at_rest) {
    trn_run run;
    char more[768];
    trn_score score;
    write_data();
    const char *teacher = write_teacher("teacher", models[_i], 7, ENG_F32);
    snprintf(more, sizeof more, STILL "batch_tokens = 144\nmicro_rows = 2\nwarm_start = %s\n", teacher);
    open_student(models[_i], taught_by(teacher, 0, 1, 2, more), &run);
    run.solver = trn_model_solver(run.model);
    const trn_step_report report = step_of(&run);
    ck_assert_double_lt(fabs(report.divergence), 1e-6);
    ck_assert_double_lt(report.gradient_norm, 1e-5);
    ck_assert_double_gt(report.loss, 1);
    ck_assert_int_eq(trn_run_validate(&run, &score, NULL), ENG_OK);
    ck_assert_double_lt(fabs(score.divergence), 1e-6 * (double)score.targets);
    trn_run_close(&run);
}
END_TEST

// ----------------------------------------------------------------------------------------------------------- gradients

static double objective_of(trn_run *run) {
    const trn_step_report report = step_of(run);
    return run->config.loss_share * report.loss + run->config.divergence_share * report.divergence;
}

static double objective_beside(trn_run *run, int32_t tensor, const float *signs, float step) {
    const int64_t count = run->model->tensor[tensor].count;
    float *values = run->weights->master[tensor], *kept = malloc(sizeof *kept * (size_t)count);
    memcpy(kept, values, sizeof *kept * (size_t)count);
    for (int64_t i = 0; i < count; i++)
        values[i] += signs[i] < 0 ? -step : step;
    const double objective = objective_of(run);
    memcpy(values, kept, sizeof *kept * (size_t)count);
    free(kept);
    return objective;
}

static void check_tensor(trn_run *run, int32_t t, const float *gradient) {
    const eng_tensor *tensor = &run->model->tensor[t];
    const float step = 2e-4F;
    float *signs = malloc(sizeof *signs * (size_t)tensor->count);
    eng_normals(3, (uint64_t)t, 0, tensor->count, 1, signs);
    double slope = 0, norm = 0;
    for (int64_t i = 0; i < tensor->count; i++) {
        slope += (double)(signs[i] < 0 ? -gradient[i] : gradient[i]);
        norm += (double)gradient[i] * (double)gradient[i];
    }
    const double above = objective_beside(run, t, signs, step), below = objective_beside(run, t, signs, -step);
    const double difference = (above - below) / (2 * (double)step);
    ck_assert_msg(fabs(difference - slope) <= 0.02 * sqrt(norm) + 1e-3, "%s: slope %g, difference %g, norm %g",
                  tensor->name, slope, difference, sqrt(norm));
    free(signs);
}

static const struct { double loss, divergence, temperature; } shares[] = {{1, 1, 1}, {0, 1, 2}, {0.3, 2, 0.7}};

START_TEST(gradients_are_differences) {
    trn_run run;
    write_data();
    const char *teacher = write_teacher("teacher", llama_model, 7, ENG_BF16);
    open_student(hybrid_model,
                 taught_by(teacher, shares[_i].loss, shares[_i].divergence, shares[_i].temperature,
                           STILL "batch_tokens = 144\nmicro_rows = 2\n"),
                 &run);
    objective_of(&run);
    const size_t bytes = sizeof(float) * (size_t)run.weights->count;
    float *gradients = malloc(bytes);
    memcpy(gradients, run.weights->grads, bytes);
    for (int32_t t = 0; t < run.model->tensors; t++)
        check_tensor(&run, t, gradients + (run.weights->grad[t] - run.weights->grads));
    free(gradients);
    trn_run_close(&run);
}
END_TEST

static double distance(const float *got, const float *want, int64_t count) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += pow((double)got[i] - (double)want[i], 2);
        norm += pow((double)want[i], 2);
    }
    return sqrt(difference / norm);
}

// The losses and the gradients of a step with the lines of [train]; *gradients is new.
static trn_step_report step_with(const char *train, float **gradients, int64_t *count) {
    trn_run run;
    char more[256];
    snprintf(more, sizeof more, STILL "batch_tokens = 192\n%s", train);
    open_student(hybrid_model, taught_by(temp_path("teacher"), 1, 1, 1, more), &run);
    const trn_step_report report = step_of(&run);
    const size_t bytes = sizeof(float) * (size_t)run.weights->count;
    *count = run.weights->count;
    *gradients = malloc(bytes);
    ck_assert_int_eq(kern_download(run.runner.stream, *gradients, run.weights->grads, bytes), KERN_OK);
    ck_assert_int_eq(kern_synchronize(run.runner.stream), KERN_OK);
    trn_run_close(&run);
    return report;
}

START_TEST(a_step_does_not_depend_on_how_it_is_cut) {
    static const char *const cuts[] = {"micro_rows = 1\n", "micro_rows = 3\nrecompute = mixer\n",
                                       "micro_rows = 3\nrecompute = block\n"};
    float *wanted = NULL, *got = NULL;
    int64_t count = 0;
    write_data();
    write_teacher("teacher", llama_model, 7, ENG_F32);
    const trn_step_report whole = step_with("micro_rows = 4\n", &wanted, &count);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        const trn_step_report report = step_with(cuts[i], &got, &count);
        ck_assert_double_eq_tol(report.loss, whole.loss, 1e-6 * whole.loss);
        ck_assert_double_eq_tol(report.divergence, whole.divergence, 1e-6 * whole.divergence);
        ck_assert_double_lt(distance(got, wanted, count), 3e-6);
        free(got);
    }
    free(wanted);
}
END_TEST

// On a CUDA device: float32 as on the CPU, bf16 near it.
START_TEST(a_step_on_a_device_is_that_of_the_cpu) {
    static const struct {
        const char *train;
        double loss, gradient;
    } cases[] = {{"device = cuda:0\n", 1e-5, 2e-4}, {"device = cuda:0\nprecision = bf16\n", 1e-2, 5e-2}};
    kern_device *device = NULL;
    float *wanted = NULL, *got = NULL;
    int64_t count = 0;
    if (kern_device_open(&(kern_device_options){.name = "cuda:0"}, &device, NULL, 0) != KERN_OK)
        MESA_TEST_SKIP("no device %s", "cuda:0");
    kern_device_close(device);
    write_data();
    write_teacher("teacher", llama_model, 7, ENG_BF16);
    const trn_step_report cpu = step_with("", &wanted, &count);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const trn_step_report report = step_with(cases[i].train, &got, &count);
        ck_assert_double_eq_tol(report.loss, cpu.loss, cases[i].loss * cpu.loss);
        ck_assert_double_eq_tol(report.divergence, cpu.divergence, 2 * cases[i].loss * cpu.divergence);
        ck_assert_double_lt(distance(got, wanted, count), cases[i].gradient);
        free(got);
    }
    free(wanted);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- runs

START_TEST(teaching_lowers_the_divergence) {
    trn_run run;
    trn_score before, after;
    eng_error error = {0};
    write_data();
    write_teacher("teacher", llama_model, 7, ENG_F32);
    open_student(mesa_model,
                 taught_by(temp_path("teacher"), 0, 1, 1,
                           "[optim]\nlr = 0.01\nwarmup_steps = 2\n[train]\nsteps = 40\nbatch_tokens = 144\n"
                           "eval_rows = 0\neval_every = 0\nsave_every = 0\n"),
                 &run);
    ck_assert_int_eq(trn_run_validate(&run, &before, NULL), ENG_OK);
    const trn_loop_options options = {.folder = temp_folder()};
    ck_assert_msg(trn_train_loop(&run, &options, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(trn_run_validate(&run, &after, NULL), ENG_OK);
    ck_assert_msg(after.divergence < 0.5 * before.divergence, "%g of %g", after.divergence, before.divergence);
    trn_run_close(&run);
}
END_TEST

static void tell(const char *dir, const char *why) {
    printf("passed over %s: %s\n", dir, why);
}

// Runs in `folder` until `stop` steps, from its newest checkpoint if it has one; what resuming says.
static eng_status train_until(const char *folder, const char *teacher, int64_t stop, eng_error *error) {
    trn_run run;
    trn_run_state state;
    char *dir = NULL;
    bool has = false;
    mkdir(folder, 0777);
    open_student(hybrid_model,
                 taught_by(teacher, 1, 1, 1,
                           "[optim]\nlr = 0.003\nwarmup_steps = 3\n[train]\nsteps = 7\nbatch_tokens = 96\n"
                           "micro_rows = 1\neval_every = 2\nsave_every = 3\n"),
                 &run);
    ck_assert_int_eq(trn_run_has_checkpoints(folder, &has, NULL), ENG_OK);
    eng_status status = has ? trn_run_newest(folder, tell, &dir, &state, error) : ENG_OK;
    if (status == ENG_OK && has)
        status = trn_run_resume(&run, dir, &state, error);
    run.config.steps = stop; // the schedule keeps the whole run's length
    const trn_loop_options options = {.folder = folder};
    if (status == ENG_OK)
        status = trn_train_loop(&run, &options, error);
    free(dir);
    trn_run_close(&run);
    return status;
}

static void same_file(const char *left, const char *right, const char *name) {
    char *path[2] = {eng_join_path(left, name), eng_join_path(right, name)}, *data[2] = {0};
    size_t length[2] = {0};
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(eng_read_file(path[i], 1 << 26, &data[i], &length[i], NULL), ENG_OK);
    ck_assert_msg(length[0] == length[1] && memcmp(data[0], data[1], length[0]) == 0, "%s differs", name);
    for (int i = 0; i < 2; i++) {
        free(path[i]);
        free(data[i]);
    }
}

START_TEST(going_on_is_never_stopping) {
    char straight[512], parts[512], teacher[512], other[512], log[512];
    eng_error error = {0};
    write_data();
    snprintf(teacher, sizeof teacher, "%s", write_teacher("teacher", llama_model, 7, ENG_BF16));
    snprintf(other, sizeof other, "%s", write_teacher("other", llama_model, 8, ENG_BF16));
    snprintf(straight, sizeof straight, "%s", temp_path("straight"));
    snprintf(parts, sizeof parts, "%s", temp_path("parts"));
    ck_assert_msg(train_until(straight, teacher, 7, &error) == ENG_OK, "%s", error.text);
    ck_assert_msg(train_until(parts, teacher, 3, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(train_until(parts, other, 7, &error), ENG_INVALID);
    ck_assert_msg(strstr(error.text, "teacher.model was ") != NULL, "%s", error.text);
    error = (eng_error){0};
    ck_assert_msg(train_until(parts, teacher, 7, &error) == ENG_OK, "%s", error.text);
    same_file(straight, parts, "step-00000007/model.safetensors");
    same_file(straight, parts, "step-00000007/trainer/optim-0.safetensors");
    snprintf(log, sizeof log, "%s", temp_path("straight/log.jsonl"));
    char *text = NULL;
    size_t length = 0;
    ck_assert_int_eq(eng_read_file(log, 1 << 20, &text, &length, NULL), ENG_OK);
    ck_assert(strstr(text, "\"divergence\":") && strstr(text, "\"valid_divergence\":"));
    free(text);
}
END_TEST

// The teacher's operations are a phase of their own.
START_TEST(a_profile_tells_the_teacher_apart) {
    trn_run run;
    char *text = NULL;
    size_t length = 0;
    eng_error error = {0};
    write_data();
    write_teacher("teacher", llama_model, 7, ENG_F32);
    open_student(mesa_model,
                 taught_by(temp_path("teacher"), 1, 1, 1, "[train]\nsteps = 4\nbatch_tokens = 96\nsave_every = 0\n"),
                 &run);
    const trn_loop_options options = {.folder = temp_folder(), .profile_steps = 2};
    ck_assert_msg(trn_train_loop(&run, &options, &error) == ENG_OK, "%s", error.text);
    trn_run_close(&run);
    ck_assert_int_eq(eng_read_file(temp_path("profile.md"), 1 << 20, &text, &length, NULL), ENG_OK);
    ck_assert_msg(strstr(text, "| linear 48 to 80 | teacher | 4 |") && strstr(text, "\n| teacher | ") &&
                      !strstr(text, "| linear 48 to 80 | forward |"),
                  "%s", text);
    free(text);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ refusals

static void refused(const char *path, const char *words) {
    trn_run_config config;
    trn_run run;
    eng_error error = {0};
    eng_status status = trn_run_config_read(path, NULL, 0, &config, &error);
    if (status == ENG_OK)
        status = trn_run_open(&config, NULL, &run, &error);
    ck_assert_int_ne(status, ENG_OK);
    ck_assert_msg(strstr(error.text, words) != NULL, "%s", error.text);
}

START_TEST(what_cannot_teach_is_refused) {
    char more[256];
    const char train[] = "[train]\nsteps = 5\nbatch_tokens = 96\n";
    write_data();
    small_checkpoint(temp_path("large"), &small_models[SMALL_MESA], NULL, false);
    write_teacher("teacher", mesa_model, 7, ENG_F32);
    refused(write_run(mesa_model, "d", CONTEXT, taught_by(temp_path("large"), 1, 1, 1, train)),
            "teacher: a vocabulary of 272 ids, the student's has 61");
    refused(write_run(mesa_model, "d", CONTEXT, taught_by(temp_path("nobody"), 1, 1, 1, train)), "nobody");
    refused(write_run(mesa_model, "d", CONTEXT, taught_by(temp_path("teacher"), 0, 0, 1, train)), "both are 0");
    refused(write_run(mesa_model, "d", CONTEXT, taught_by(temp_path("teacher"), 1, 1, 0, train)),
            "teacher.temperature: 0 is not in 0.01..100");
    snprintf(more, sizeof more, "%s[loop]\nloss = weighted\n", train);
    refused(write_run(looped_model, "d", CONTEXT, taught_by(temp_path("teacher"), 1, 1, 1, more)),
            "goes with loop.loss = final alone");
}
END_TEST

// One letter of the file is another one.
static void edit_file(const char *path, const char *from, const char *to) {
    char *text = NULL;
    size_t length = 0;
    ck_assert_int_eq(eng_read_file(path, 1 << 20, &text, &length, NULL), ENG_OK);
    char *at = strstr(text, from);
    ck_assert_ptr_nonnull(at);
    memcpy(at, to, strlen(to));
    ck_assert_int_eq(eng_write_file_atomic(path, text, length, NULL), ENG_OK);
    free(text);
}

static void check_tokenizers(const trn_teacher *teacher, const char *dir, const char *words) {
    eng_tokenizer *own = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_tokenizer_open(dir, 0, &own, NULL), ENG_OK);
    const eng_status status = trn_teacher_check(teacher, teacher->model, own, NULL, &error);
    ck_assert_msg(words ? status == ENG_INVALID && strstr(error.text, words) : status == ENG_OK, "%s", error.text);
    eng_tokenizer_close(own);
}

START_TEST(another_tokenizer_is_refused_by_its_first_id) {
    static const uint8_t another[ENG_DIGEST_BYTES] = {1, 2, 3};
    trn_teacher teacher;
    eng_error error = {0};
    char own[512], file[512];
    small_checkpoint(temp_path("teacher"), &small_models[SMALL_MESA], NULL, true);
    small_checkpoint(temp_path("own"), &small_models[SMALL_MESA], NULL, true);
    snprintf(own, sizeof own, "%s", temp_path("own"));
    snprintf(file, sizeof file, "%s", temp_path("own/tokenizer.json"));
    ck_assert_int_eq(trn_teacher_open(temp_path("teacher"), &teacher, &error), ENG_OK);
    check_tokenizers(&teacher, own, NULL);
    ck_assert_int_eq(trn_teacher_check(&teacher, teacher.model, NULL, eng_tokenizer_digest(teacher.tokenizer), NULL),
                     ENG_OK);
    ck_assert_int_eq(trn_teacher_check(&teacher, teacher.model, NULL, another, &error), ENG_INVALID);
    edit_file(file, "\"normalizer\": null,", "\"normalizer\":null, "); // another file, the same ids
    check_tokenizers(&teacher, own, NULL);
    edit_file(file, "\"</s>\", \"special\": true", "\"</s>\", \"special\":false");
    check_tokenizers(&teacher, own, "id 257 is the special \"</s>\" there, \"</s>\" in the student's");
    edit_file(file, "\"\\u0041\": 65, \"\\u0042\": 66", "\"\\u0042\": 65, \"\\u0041\": 66");
    check_tokenizers(&teacher, own, "id 65 is \"A\" there, \"B\" in the student's");
    edit_file(file, "\"id\": 257", "\"id\": 259");
    check_tokenizers(&teacher, own, "its tokenizer has 258 ids, the student's 260");
    trn_teacher_close(&teacher);
}
END_TEST

static Suite *teacher_suite(void) {
    Suite *suite = suite_create("teacher");
    TCase *cases = tcase_create("runs");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 120);
    tcase_add_loop_test(cases, divergence_is_that_of_served_logits, 0, 2 * MODELS);
    tcase_add_test(cases, an_evaluation_tells_it_too);
    tcase_add_loop_test(cases, loss_is_that_without_a_teacher, 0, MODELS);
    tcase_add_loop_test(cases, a_student_that_is_its_teacher_is_at_rest, 0, MODELS - 1);
    tcase_add_loop_test(cases, gradients_are_differences, 0, (int)(sizeof shares / sizeof *shares));
    tcase_add_test(cases, a_step_does_not_depend_on_how_it_is_cut);
    tcase_add_test(cases, a_step_on_a_device_is_that_of_the_cpu);
    tcase_add_test(cases, teaching_lowers_the_divergence);
    tcase_add_test(cases, going_on_is_never_stopping);
    tcase_add_test(cases, a_profile_tells_the_teacher_apart);
    tcase_add_test(cases, what_cannot_teach_is_refused);
    tcase_add_test(cases, another_tokenizer_is_refused_by_its_first_id);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(teacher_suite)

// SPDX-License-Identifier: Apache-2.0
// Gradients of a checkpoint on one device held against those on another; see check.h.
//
// What runs is what trains: training plans over rows of the data, weights in float32, every target's loss weighed by
// 1 / (targets of the batch). The reference takes a batch's rows all at once in float32, each by itself. Both devices
// hold weights and gradients; the host holds both gradients and, in double, the sum of their differences. One thread.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/batch.h"
#include "trainer/bench.h"
#include "trainer/check.h"
#include "trainer/eval_setting.h"
#include "trainer/evaluation.h"
#include "trainer/gradient_error.h"

enum { FEW_BATCHES = 4 }; // of which a mean tells nothing

// left: of the error in the mean of N batches, times sqrt(N); 0: not judged.
typedef struct tolerances {
    double median, worst, cosine, loss, left;
} tolerances;

static const tolerances of_float32 = {1e-4, 1e-3, 1e-5, 1e-5, 0};
static const tolerances of_bf16 = {1e-2, 5e-2, 1e-3, 1e-2, 2};

typedef struct side {
    kern_device *device;
    eng_weights *weights;
    trn_runner runner;
    trn_batch batch;
    kern_solver solver;
    bool joins;       // short rows, as a step of training does
    float *gradients; // (weights->count) host
    double loss;      // mean of the batch's targets
} side;

typedef struct comparison {
    const trn_against *options;
    eng_checkpoint *checkpoint;
    const eng_model *model;
    trn_dataset *dataset;
    trn_row *row; // (options->rows)
    side mine, reference;
    double *shared;             // (weights->count) sum of the differences
    trn_gradient_error *tensor; // (model->tensors)
    trn_gradient_error whole;   // of all tensors as one
    double loss_error;          // relative, of the worst batch
    bool fast;
    int32_t context;
    trn_progress progress;
} comparison;

// ------------------------------------------------------------------------------------------------------------- opening

static eng_status open_side(const comparison *c, const char *device, bool fast, int32_t rows, side *out,
                            eng_error *error) {
    const kern_device_options options = {.name = device, .fast = fast, .trains = true};
    const int32_t tokens = rows * c->context;
    eng_status status = eng_open_device(&options, NULL, 0, &out->device, error);
    if (status == ENG_OK)
        status = eng_weights_load(c->checkpoint, out->device, true, &out->weights, error);
    const trn_runner_options runner = {.plan = {.kind = ENG_PLAN_TRAIN, .max_tokens = tokens, .max_rows = rows},
                                       .max_boundaries = tokens};
    if (status == ENG_OK)
        status = trn_runner_create(out->weights, &runner, &out->runner, error);
    if (status == ENG_OK)
        status = trn_batch_create(&out->runner, &out->batch, error);
    if (status == ENG_OK && !(out->gradients = calloc((size_t)out->weights->count, sizeof *out->gradients)))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for gradients");
    return status;
}

static void close_side(side *s) {
    free(s->gradients);
    trn_batch_free(&s->batch);
    trn_runner_free(&s->runner);
    eng_weights_free(s->weights);
    kern_device_close(s->device);
}

static const char default_solver[] = "tolerance:0.0001";

static eng_status choose_solver(const comparison *c, const char *text, kern_solver *out, eng_error *error) {
    eng_knobs knobs = c->model->config.knobs;
    trn_setting setting = {0};
    knobs.cg_max_steps = eng_model_training_steps(c->model);
    eng_status status = trn_setting_parse(text ? text : default_solver, &knobs, &setting, error);
    *out = (kern_solver){.mode = (int32_t)setting.knobs.cg_mode,
                         .max_steps = setting.knobs.cg_max_steps,
                         .tolerance = setting.knobs.cg_tolerance};
    return status;
}

static eng_status choose_solvers(comparison *c, eng_error *error) {
    const char *own = c->options->solver, *other = c->options->reference_solver;
    eng_status status = choose_solver(c, own, &c->mine.solver, error);
    return status == ENG_OK ? choose_solver(c, other ? other : own, &c->reference.solver, error) : status;
}

static eng_status open_rows(comparison *c, eng_error *error) {
    const trn_against *o = c->options;
    eng_status status = trn_evaluation_open_data(c->model, &o->data, c->context, NULL, &c->dataset, error);
    if (status == ENG_OK && !(c->row = calloc((size_t)o->rows, sizeof *c->row)))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the rows of a batch");
    for (int64_t i = 0; status == ENG_OK && i < o->rows; i++)
        status = trn_row_create(c->context, &c->row[i], error);
    return status;
}

// Weights of one model lie alike on all devices.
static int64_t place_of(const comparison *c, int32_t tensor) {
    return c->mine.weights->grad[tensor] - c->mine.weights->grads;
}

static eng_status begin_sums(comparison *c, eng_error *error) {
    c->shared = calloc((size_t)c->mine.weights->count, sizeof *c->shared);
    c->tensor = calloc((size_t)c->model->tensors, sizeof *c->tensor);
    if (!c->shared || !c->tensor)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the differences of gradients");
    trn_gradient_error_begin(&c->whole);
    for (int32_t i = 0; i < c->model->tensors; i++)
        trn_gradient_error_begin(&c->tensor[i]);
    return ENG_OK;
}

static eng_status open_all(comparison *c, const char *dir, eng_error *error) {
    const trn_against *o = c->options;
    eng_status status = eng_checkpoint_open(dir, &c->checkpoint, error);
    if (status != ENG_OK)
        return status;
    c->model = eng_checkpoint_model(c->checkpoint);
    const int64_t context = o->context > 0 ? o->context : trn_evaluation_context(c->model);
    if (context * o->rows > 1 << 26)
        return eng_fail(error, ENG_INVALID, "--rows: %lld tokens at once are too many", (long long)(context * o->rows));
    c->context = (int32_t)context;
    status = choose_solvers(c, error);
    if (status == ENG_OK)
        status = open_rows(c, error);
    const int64_t at_once = o->micro_rows > 0 && o->micro_rows < o->rows ? o->micro_rows : o->rows;
    c->mine.joins = true;
    if (status == ENG_OK)
        status = open_side(c, o->device, c->fast, (int32_t)at_once, &c->mine, error);
    if (status == ENG_OK)
        status = open_side(c, o->reference, false, (int32_t)o->rows, &c->reference, error);
    return status == ENG_OK ? begin_sums(c, error) : status;
}

static void close_all(comparison *c) {
    free(c->tensor);
    free(c->shared);
    close_side(&c->mine);
    close_side(&c->reference);
    for (int64_t i = 0; c->row && i < c->options->rows; i++)
        trn_row_free(&c->row[i]);
    free(c->row);
    trn_dataset_close(c->dataset);
    eng_checkpoint_close(c->checkpoint);
}

// ----------------------------------------------------------------------------------------------------------- gradients

static eng_status run_rows(const comparison *c, side *s, double weight, eng_error *error) {
    const int32_t at_once = s->runner.rows->max_rows;
    const size_t bytes = sizeof(float) * (size_t)s->weights->count;
    eng_status status =
        eng_fail_kernel(error, kern_zero(s->runner.stream, s->weights->grads, bytes), "clearing gradients");
    s->loss = 0;
    for (int64_t first = 0; status == ENG_OK && first < c->options->rows; first += at_once) {
        trn_batch_clear(&s->batch);
        for (int64_t i = first; status == ENG_OK && i < c->options->rows && i < first + at_once; i++)
            status = s->joins ? trn_batch_join(&s->batch, &c->row[i], weight, s->solver, error)
                              : trn_batch_add(&s->batch, &c->row[i], weight, s->solver, error);
        if (status == ENG_OK)
            status = trn_batch_run(&s->batch, error);
        s->loss += weight * trn_batch_loss(&s->batch, 0, s->runner.rows->n_tokens);
    }
    if (status != ENG_OK)
        return status;
    kern_status copied = kern_download(s->runner.stream, s->gradients, s->weights->grads, bytes);
    if (copied == KERN_OK)
        copied = kern_synchronize(s->runner.stream);
    return eng_fail_kernel(error, copied, "reading gradients");
}

static eng_status load_batch(comparison *c, int64_t batch, double *weight, eng_error *error) {
    const trn_against *o = c->options;
    int64_t targets = 0;
    for (int64_t i = 0; i < o->rows; i++) {
        const int64_t index = trn_dataset_order(c->dataset, (uint64_t)o->seed, batch * o->rows + i);
        eng_status status = trn_dataset_row(c->dataset, index, &c->row[i], error);
        if (status != ENG_OK)
            return status;
        targets += c->row[i].counted;
    }
    if (targets == 0)
        return eng_fail(error, ENG_INVALID, "batch %lld has no counted target", (long long)batch + 1);
    *weight = 1.0 / (double)targets;
    return ENG_OK;
}

static eng_status compare_batch(comparison *c, int64_t batch, eng_error *error) {
    double weight = 0;
    eng_status status = load_batch(c, batch, &weight, error);
    if (status == ENG_OK)
        status = run_rows(c, &c->mine, weight, error);
    if (status == ENG_OK)
        status = run_rows(c, &c->reference, weight, error);
    if (status != ENG_OK)
        return status;
    const float *mine = c->mine.gradients, *reference = c->reference.gradients;
    const int64_t count = c->mine.weights->count;
    for (int32_t i = 0; i < c->model->tensors; i++)
        trn_gradient_error_add(&c->tensor[i], mine + place_of(c, i), reference + place_of(c, i),
                               c->model->tensor[i].count);
    trn_gradient_error_add(&c->whole, mine, reference, count);
    for (int64_t i = 0; i < count; i++)
        c->shared[i] += (double)mine[i] - (double)reference[i];
    const double off = fabs(c->mine.loss - c->reference.loss) / c->reference.loss;
    if (!(off <= c->loss_error) && !isnan(c->loss_error))
        c->loss_error = off;
    return ENG_OK;
}

// --------------------------------------------------------------------------------------------------------------- table

static void print_head(const comparison *c) {
    const trn_against *o = c->options;
    printf("%s, %s, against %s, float32\n", kern_device_describe(c->mine.device)->description, o->precision,
           kern_device_describe(c->reference.device)->description);
    printf("%lld batches of %lld rows of %d, %d at once; weights in float32", (long long)o->batches, (long long)o->rows,
           (int)c->context, (int)c->mine.runner.rows->max_rows);
    if (eng_model_has_mesa(c->model)) {
        const char *own = o->solver ? o->solver : default_solver, *other = o->reference_solver;
        printf("; solver %s against %s", own, other ? other : own);
    }
    printf("\n\n%-58s %10s %9s %9s %9s %9s %6s\n", "gradient of", "values", "norm", "error", "worst", "1 - cos",
           "left");
}

static void print_error(const char *name, const trn_gradient_error *e, int64_t values, double left) {
    char text[16] = "-";
    if (e->batches > 1)
        snprintf(text, sizeof text, "%.3f", trn_unsigned_nan(left));
    printf("%-58s %10lld %9.2e %9.2e %9.2e %9.2e %6s\n", name, (long long)values,
           trn_unsigned_nan(sqrt(e->norm / e->batches)), trn_unsigned_nan(trn_gradient_error_relative(e)),
           trn_unsigned_nan(e->worst), trn_unsigned_nan(1 - e->cosine), text);
}

static double left_of(const comparison *c, int32_t tensor) {
    return trn_gradient_error_left(&c->tensor[tensor], c->shared + place_of(c, tensor), c->model->tensor[tensor].count);
}

static void print_errors(const comparison *c) {
    int64_t values = 0;
    for (int32_t i = 0; i < c->model->tensors; i++) {
        const eng_tensor *tensor = &c->model->tensor[i];
        print_error(tensor->name, &c->tensor[i], tensor->count, left_of(c, i));
        values += tensor->count;
    }
    print_error("(all)", &c->whole, values, trn_gradient_error_left(&c->whole, c->shared, c->mine.weights->count));
}

// A NaN as the largest number, so that there is an order.
static double ordered(double value) {
    return isnan(value) ? INFINITY : value;
}

static eng_status print_verdicts(const comparison *c, trn_verdicts *verdicts, eng_error *error) {
    const int32_t tensors = c->model->tensors;
    const double batches = (double)c->options->batches;
    const tolerances *allowed = c->fast ? &of_bf16 : &of_float32;
    double *relative = calloc(2 * (size_t)tensors, sizeof *relative), worst = 0, cosine = 1;
    if (!relative)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the errors of tensors");
    double *left = relative + tensors;
    for (int32_t i = 0; i < tensors; i++) {
        relative[i] = ordered(trn_gradient_error_relative(&c->tensor[i]));
        left[i] = ordered(left_of(c, i));
        worst = fmax(worst, relative[i]);
        cosine = fmin(cosine, isnan(c->tensor[i].cosine) ? -INFINITY : c->tensor[i].cosine);
    }
    printf("\n");
    trn_judge(verdicts, "error of a tensor, median", trn_median(relative, tensors), allowed->median);
    trn_judge(verdicts, "error of a tensor, largest", worst, allowed->worst);
    trn_judge(verdicts, "1 - cosine, largest", 1 - cosine, allowed->cosine);
    trn_judge(verdicts, "loss", c->loss_error, allowed->loss);
    const double middle = trn_median(left, tensors);
    if (batches >= FEW_BATCHES && allowed->left > 0)
        trn_judge(verdicts, "left of it in the batches' mean, median", middle, allowed->left / sqrt(batches));
    else if (batches > 1)
        printf("%-58s %9.2e\n", "left of it in the batches' mean, median", middle);
    free(relative);
    return ENG_OK;
}

static eng_status compare(comparison *c, trn_verdicts *verdicts, eng_error *error) {
    const int64_t batches = c->options->batches;
    eng_status status = ENG_OK;
    trn_progress_begin(&c->progress);
    for (int64_t i = 0; status == ENG_OK && i < batches; i++) {
        status = compare_batch(c, i, error);
        trn_progress_part(&c->progress, (uint64_t)i + 1, (uint64_t)batches, "comparing");
    }
    trn_progress_end(&c->progress);
    if (status != ENG_OK)
        return status;
    print_head(c);
    print_errors(c);
    return print_verdicts(c, verdicts, error);
}

eng_status trn_check_against(const char *dir, const trn_against *options, trn_verdicts *verdicts, eng_error *error) {
    comparison c = {.options = options, .fast = strcmp(options->precision, "bf16") == 0};
    eng_status status = open_all(&c, dir, error);
    if (status == ENG_OK)
        status = compare(&c, verdicts, error);
    close_all(&c);
    return status;
}

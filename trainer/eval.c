// SPDX-License-Identifier: Apache-2.0
// mesa-trainer eval DIR --data NAME: loss and bits per byte of a checkpoint, by token position and by solver setting.
//
// --solver-table reads the same windows under fifteen settings of the solver and prints a Markdown table: what a
// request pays and gains with cg_tolerance and cg_max_steps.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/commands.h"
#include "trainer/evaluation.h"

typedef struct eval_options {
    trn_evaluation_options evaluation;
    const char *cg_mode;
    int64_t cg_steps;    // -1: the model's
    double cg_tolerance; // < 0: the model's
    bool solver_table;
} eval_options;

// ------------------------------------------------------------------------------------------------------------- results

static double mean_steps(const trn_scores *scores) {
    return scores->solves.solves > 0 ? (double)scores->solves.steps / (double)scores->solves.solves : 0;
}

static double tokens_per_second(const trn_scores *scores) {
    return scores->seconds > 0 ? (double)scores->targets / scores->seconds : 0;
}

static double bits_per_byte(const trn_evaluation *e, const trn_scores *scores) {
    return e->windows.bytes > 0 ? scores->loss / log(2) / (double)e->windows.bytes : NAN;
}

static double share(int64_t part, int64_t whole) {
    return whole > 0 ? 100 * (double)part / (double)whole : 0;
}

static void print_scores(const trn_evaluation *e, const trn_scores *scores) {
    printf("windows         %lld of at most %d tokens, each from a zero state\n", (long long)e->windows.count,
           e->context);
    printf("targets         %lld\n", (long long)scores->targets);
    printf("loss            %.5f nats a token\n", trn_mean_loss(scores));
    printf("perplexity      %.3f\n", exp(trn_mean_loss(scores)));
    printf("right           %.3f %% of the targets, %.3f %% of the windows wholly\n",
           share(scores->hits.targets, scores->targets), share(scores->hits.rows, scores->windows));
    if (trn_dataset_has_examples(e->dataset))
        printf("bits per byte   none: examples\n");
    else if (e->windows.bytes > 0)
        printf("bits per byte   %.5f over %lld bytes\n", bits_per_byte(e, scores), (long long)e->windows.bytes);
    else
        printf("bits per byte   unknown: parts of documents, and no tokenizer beside the weights\n");
    printf("rate            %.0f tokens/s\n", tokens_per_second(scores));
    if (scores->solves.solves > 0)
        printf("solver          %.2f steps a solve, at most %d; %llu of %llu unconverged\n", mean_steps(scores),
               scores->solves.steps_max, (unsigned long long)scores->solves.unconverged,
               (unsigned long long)scores->solves.solves);
    printf("\nposition          targets      loss\n");
    for (int b = 0; b < TRN_BUCKETS; b++) {
        int64_t first, last;
        trn_bucket_range(b, &first, &last);
        if (scores->bucket_targets[b] > 0)
            printf("%6lld-%-7lld %10lld   %.5f\n", (long long)first, (long long)last,
                   (long long)scores->bucket_targets[b], scores->bucket_loss[b] / (double)scores->bucket_targets[b]);
    }
}

static void print_table_head(const trn_scores *scores) {
    printf("| solver | loss | bits/byte |");
    for (int b = 0; b < TRN_BUCKETS; b++) {
        int64_t first, last;
        trn_bucket_range(b, &first, &last);
        if (scores->bucket_targets[b] > 0)
            printf(" %lld-%lld |", (long long)first, (long long)last);
    }
    printf(" mean steps | unconverged | tokens/s |\n|---|---|---|");
    for (int b = 0; b < TRN_BUCKETS; b++)
        if (scores->bucket_targets[b] > 0)
            printf("---|");
    printf("---|---|---|\n");
}

static void print_table_row(const trn_evaluation *e, const char *name, const trn_scores *scores) {
    printf("| %s | %.4f |", name, trn_mean_loss(scores));
    if (e->windows.bytes > 0)
        printf(" %.4f |", bits_per_byte(e, scores));
    else
        printf(" - |");
    for (int b = 0; b < TRN_BUCKETS; b++)
        if (scores->bucket_targets[b] > 0)
            printf(" %.4f |", scores->bucket_loss[b] / (double)scores->bucket_targets[b]);
    printf(" %.2f | %.3f %% | %.0f |\n", mean_steps(scores),
           scores->solves.solves ? 100.0 * (double)scores->solves.unconverged / (double)scores->solves.solves : 0,
           tokens_per_second(scores));
    fflush(stdout);
}

static eng_status print_solver_table(trn_evaluation *e, int32_t max_steps, eng_error *error) {
    static const float tolerances[] = {1, 1e-1F, 1e-2F, 1e-3F, 1e-4F};
    static const int32_t steps[] = {1, 2, 4, 6, 8, 10, 15, 20, 30};
    enum { TOLERANCES = sizeof tolerances / sizeof *tolerances, STEPS = sizeof steps / sizeof *steps };
    eng_status status = ENG_OK;
    if (!eng_model_has_mesa(e->model))
        return eng_fail(error, ENG_INVALID, "--solver-table: the model has no Mesa layer");
    for (int i = 0; status == ENG_OK && i < TOLERANCES + 1 + STEPS; i++) {
        kern_solver solver = {.mode = KERN_SOLVE_EXACT};
        char name[32] = "exact";
        trn_scores scores;
        if (i < TOLERANCES) {
            solver = (kern_solver){KERN_SOLVE_TOLERANCE, max_steps, tolerances[i]};
            snprintf(name, sizeof name, "tolerance %g", (double)tolerances[i]);
        } else if (i > TOLERANCES) {
            solver = (kern_solver){.mode = KERN_SOLVE_STEPS, .max_steps = steps[i - TOLERANCES - 1]};
            snprintf(name, sizeof name, "steps %d", steps[i - TOLERANCES - 1]);
        }
        status = trn_evaluation_score(e, solver, &scores, error);
        if (status == ENG_OK && i == 0)
            print_table_head(&scores);
        if (status == ENG_OK)
            print_table_row(e, name, &scores);
    }
    return status;
}

// ------------------------------------------------------------------------------------------------------------- command

static eng_status choose_solver(const eng_model *model, const eval_options *o, kern_solver *solver, eng_error *error) {
    *solver = trn_model_solver(model);
    kern_solve_mode mode = (kern_solve_mode)solver->mode;
    eng_status status = o->cg_mode ? trn_parse_cg_mode(o->cg_mode, &mode, error) : ENG_OK;
    solver->mode = (int32_t)mode;
    if (o->cg_steps >= 0)
        solver->max_steps = (int32_t)o->cg_steps;
    if (o->cg_tolerance >= 0)
        solver->tolerance = (float)o->cg_tolerance;
    return status;
}

static eng_status evaluate(trn_evaluation *e, const char *dir, const eval_options *o, eng_error *error) {
    kern_solver solver = {0};
    trn_scores scores;
    eng_status status = trn_evaluation_open(dir, &o->evaluation, e, error);
    if (status == ENG_OK)
        status = choose_solver(e->model, o, &solver, error);
    if (status == ENG_OK && o->solver_table)
        return print_solver_table(e, solver.max_steps, error);
    if (status == ENG_OK)
        status = trn_evaluation_score(e, solver, &scores, error);
    if (status == ENG_OK)
        print_scores(e, &scores);
    return status;
}

static eng_status check_options(const eval_options *o, eng_error *error) {
    const trn_evaluation_options *e = &o->evaluation;
    if (e->data.count == 0)
        return eng_fail(error, ENG_INVALID, "--data is needed");
    if (e->context != -1 && (e->context < 1 || e->context > 1 << 22))
        return eng_fail(error, ENG_INVALID, "--context: not in 1..4194304");
    if (e->batch_tokens < 1 || e->batch_tokens > 1 << 22)
        return eng_fail(error, ENG_INVALID, "--batch-tokens: not in 1..4194304");
    if (e->windows < 0)
        return eng_fail(error, ENG_INVALID, "--windows: negative");
    if (o->cg_steps < -1 || o->cg_steps > 256)
        return eng_fail(error, ENG_INVALID, "--cg-steps: not in 0..256");
    if (!(o->cg_tolerance <= 1) || (o->cg_tolerance < 0 && o->cg_tolerance != -1))
        return eng_fail(error, ENG_INVALID, "--cg-tolerance: not in 0..1");
    return ENG_OK;
}

int trn_command_eval(int argc, char **argv) {
    eval_options o = {
        .evaluation = {.device = "cpu", .context = -1, .batch_tokens = 4096}, .cg_steps = -1, .cg_tolerance = -1};
    trn_evaluation_options *own = &o.evaluation;
    const trn_option options[] = {
        {"data", "NAME", TRN_STRINGS, &own->data, "token shards NAME-00000.tok ...; may be repeated"},
        {"context", "N", TRN_INTEGER, &own->context, "most tokens a window (default: the trained length)"},
        {"windows", "N", TRN_INTEGER, &own->windows, "only the first window of N documents (default 0: everything)"},
        {"batch-tokens", "N", TRN_INTEGER, &own->batch_tokens, "tokens that run together (default 4096)"},
        {"cg-mode", "MODE", TRN_STRING, &o.cg_mode, "tolerance, steps, exact or fixed (default: the model's)"},
        {"cg-tolerance", "X", TRN_REAL, &o.cg_tolerance, "relative residual (default: the model's)"},
        {"cg-steps", "N", TRN_INTEGER, &o.cg_steps, "bound of steps, or their number (default: the model's)"},
        {"solver-table", NULL, TRN_FLAG, &o.solver_table, "fifteen settings of the solver as a Markdown table"},
        {"device", "NAME", TRN_STRING, &own->device, "cpu, cpu:16, cuda:0 (default cpu)"},
    };
    const trn_command_line line = {
        "eval DIR --data NAME [options]",
        "Loss, accuracy, bits per byte and solver steps of a checkpoint over packed documents\n"
        "or the examples of a task.",
        options,
        sizeof options / sizeof *options,
        1,
        1};
    const char *dir = NULL;
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    trn_evaluation e = {0};
    eng_status status = trn_options_parse(&line, argc, argv, &dir, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_options(&o, &error);
    if (status == ENG_OK)
        status = evaluate(&e, dir, &o, &error);
    trn_evaluation_close(&e);
    if (status == ENG_OK)
        return TRN_EXIT_OK;
    fprintf(stderr, "mesa-trainer eval: %s\n", error.text);
    bool usage = status == ENG_INVALID || status == ENG_NOT_FOUND || status == ENG_FORMAT || status == ENG_UNSUPPORTED;
    return usage ? TRN_EXIT_USAGE : TRN_EXIT_FAILED;
}

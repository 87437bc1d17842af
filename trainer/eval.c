// SPDX-License-Identifier: Apache-2.0
// mesa-trainer eval DIR --data NAME: loss and bits per byte of a checkpoint, by token position and by solver setting.
//
// --solver-table reads the same windows under fifteen settings of the solver and prints a Markdown table: what a
// request pays and gains with cg_tolerance and cg_max_steps.
//
// mesa-trainer eval DIR --task FILE ...: tasks (eval_tasks.h) instead of shards, under one setting or, with --solver or
// --solver-table, several.
//
// --out keeps the values of every document or item for `report`.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/eval_documents.h"
#include "trainer/eval_exits.h"
#include "trainer/eval_setting.h"
#include "trainer/eval_tasks.h"
#include "trainer/evaluation.h"
#include "trainer/floors.h"

typedef struct eval_options {
    trn_evaluation_options evaluation;
    trn_tasks_options tasks;
    trn_strings solvers;
    const char *cg_mode;
    int64_t cg_steps;    // -1: the model's
    double cg_tolerance; // < 0: the model's
    bool solver_table, exit_table;
    trn_exit_options exits;
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

static double mean_divergence(const trn_scores *scores) {
    return scores->divergence / (double)scores->targets;
}

static void print_scores(const trn_evaluation *e, const trn_scores *scores) {
    printf("windows         %lld of at most %d tokens, each from a zero state\n", (long long)e->windows.count,
           e->context);
    printf("targets         %lld\n", (long long)scores->targets);
    printf("loss            %.5f nats a token\n", trn_mean_loss(scores));
    printf("perplexity      %.3f\n", exp(trn_mean_loss(scores)));
    if (e->teacher.checkpoint)
        printf("divergence      %.6f nats a token from the teacher\n", mean_divergence(scores));
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
    if (scores->loops > 0)
        printf("loops           %.3f a target\n", (double)scores->loops / (double)scores->targets);
    printf("\nposition          targets      loss\n");
    for (int b = 0; b < TRN_BUCKETS; b++) {
        int64_t first, last;
        trn_bucket_range(b, &first, &last);
        if (scores->bucket_targets[b] > 0)
            printf("%6lld-%-7lld %10lld   %.5f\n", (long long)first, (long long)last,
                   (long long)scores->bucket_targets[b], scores->bucket_loss[b] / (double)scores->bucket_targets[b]);
    }
}

static void print_table_head(const trn_evaluation *e, const trn_scores *scores) {
    printf("| solver | loss | bits/byte |%s", e->teacher.checkpoint ? " divergence |" : "");
    for (int b = 0; b < TRN_BUCKETS; b++) {
        int64_t first, last;
        trn_bucket_range(b, &first, &last);
        if (scores->bucket_targets[b] > 0)
            printf(" %lld-%lld |", (long long)first, (long long)last);
    }
    printf(" mean steps | unconverged | tokens/s |\n|---|---|---|%s", e->teacher.checkpoint ? "---|" : "");
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
    if (e->teacher.checkpoint)
        printf(" %.6f |", mean_divergence(scores));
    for (int b = 0; b < TRN_BUCKETS; b++)
        if (scores->bucket_targets[b] > 0)
            printf(" %.4f |", scores->bucket_loss[b] / (double)scores->bucket_targets[b]);
    printf(" %.2f | %.3f %% | %.0f |\n", mean_steps(scores),
           scores->solves.solves ? 100.0 * (double)scores->solves.unconverged / (double)scores->solves.solves : 0,
           tokens_per_second(scores));
    fflush(stdout);
}

// One setting, and what --out keeps of it: a row of `result`, written anew after each.
static eng_status score(trn_evaluation *e, const eval_options *o, const trn_setting *setting, trn_scores *scores,
                        trn_result *result, eng_error *error) {
    trn_result_row row = {0};
    eng_status status = trn_evaluation_score(e, eng_solver(&setting->knobs), scores, error);
    if (status != ENG_OK || !o->tasks.out)
        return status;
    status = trn_documents_row(e, &o->evaluation.data, setting, scores, &row, error);
    if (status == ENG_OK)
        status = trn_result_add(result, &row, error);
    if (status == ENG_OK)
        status = trn_result_write(result, o->tasks.out, error);
    trn_result_row_free(&row);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- command

// The model's own knobs with what the command line says otherwise.
static eng_status choose_knobs(const eng_model *model, const eval_options *o, eng_knobs *knobs, eng_error *error) {
    kern_solve_mode mode = (kern_solve_mode)trn_model_solver(model).mode;
    *knobs = model->config.knobs;
    eng_status status = o->cg_mode ? trn_parse_cg_mode(o->cg_mode, &mode, error) : ENG_OK;
    knobs->cg_mode = (eng_cg_mode)mode;
    if (o->cg_steps >= 0)
        knobs->cg_max_steps = (int32_t)o->cg_steps;
    if (o->cg_tolerance >= 0)
        knobs->cg_tolerance = (float)o->cg_tolerance;
    return status;
}

// The settings that are wanted, the knobs themselves where none is named.
static eng_status choose_settings(const eng_model *model, const eval_options *o, const eng_knobs *knobs,
                                  trn_setting *setting, int *settings, eng_error *error) {
    bool named = o->cg_mode || o->cg_steps >= 0 || o->cg_tolerance >= 0, has_mesa = eng_model_has_mesa(model);
    eng_status status = ENG_OK;
    if ((o->solver_table || o->solvers.count > 0) && !has_mesa)
        return eng_fail(error, ENG_INVALID, "%s: the model has no Mesa layer",
                        o->solver_table ? "--solver-table" : "--solver");
    *settings = 0;
    if (o->solver_table) {
        trn_setting_table(knobs, setting);
        *settings = TRN_TABLE_SETTINGS;
    }
    for (int i = 0; i < o->solvers.count && status == ENG_OK; i++) {
        if (*settings == TRN_MAX_SETTINGS)
            return eng_fail(error, ENG_INVALID, "--solver: more than %d settings", TRN_MAX_SETTINGS);
        status = trn_setting_parse(o->solvers.item[i], knobs, &setting[(*settings)++], error);
    }
    if (*settings == 0) {
        setting[0] = (trn_setting){.knobs = *knobs};
        snprintf(setting[0].name, sizeof setting[0].name, "%s", !has_mesa ? "-" : named ? "as given" : "default");
        *settings = 1;
    }
    return status;
}

// What stands beside the shards about scores without the work.
static eng_status print_floors(const trn_strings *data, eng_error *error) {
    eng_status status = ENG_OK;
    for (int i = 0; status == ENG_OK && i < data->count; i++) {
        trn_floors floors;
        status = trn_floors_read(data->item[i], &floors, error);
        for (int row = 0; status == ENG_OK && row < floors.rows; row++)
            printf("%s%s: %.3f %% right by %s\n", i + row == 0 ? "\n" : "", eng_path_tail(data->item[i]),
                   100 * floors.row[row].right, floors.row[row].name);
    }
    return status;
}

static eng_status score_settings(trn_evaluation *e, const char *dir, const eval_options *o, const trn_setting *setting,
                                 int settings, eng_error *error) {
    const bool table = o->solver_table || o->solvers.count > 0;
    trn_result result = {0};
    trn_scores scores;
    eng_status status = trn_result_check_output(o->tasks.out, error);
    if (status == ENG_OK && o->tasks.out)
        status = trn_result_describe(e, dir, o->tasks.name, &result, error);
    for (int i = 0; status == ENG_OK && i < settings; i++) {
        status = score(e, o, &setting[i], &scores, &result, error);
        if (status == ENG_OK && table && i == 0)
            print_table_head(e, &scores);
        if (status == ENG_OK && table)
            print_table_row(e, setting[i].name, &scores);
    }
    trn_result_free(&result);
    if (status != ENG_OK || table)
        return status;
    print_scores(e, &scores);
    return print_floors(&o->evaluation.data, error);
}

static eng_status evaluate_data(trn_evaluation *e, const char *dir, const eval_options *o, eng_error *error) {
    eng_knobs knobs = {0};
    trn_setting setting[TRN_MAX_SETTINGS];
    int settings = 0;
    eng_status status = trn_evaluation_open(dir, &o->evaluation, e, error);
    if (status == ENG_OK)
        status = choose_knobs(e->model, o, &knobs, error);
    if (status == ENG_OK)
        status = choose_settings(e->model, o, &knobs, setting, &settings, error);
    if (status == ENG_OK && o->exit_table)
        return trn_exit_table(e, dir, &o->exits, &knobs, error);
    return status == ENG_OK ? score_settings(e, dir, o, setting, settings, error) : status;
}

static eng_status evaluate_tasks(trn_evaluation *e, const char *dir, const eval_options *o, eng_error *error) {
    eng_knobs knobs = {0};
    trn_setting setting[TRN_MAX_SETTINGS];
    trn_tasks tasks = {0};
    int settings = 0;
    eng_status status = trn_evaluation_open_model(dir, o->evaluation.device, e, error);
    if (status == ENG_OK && !e->tokenizer)
        status = eng_fail(error, ENG_NOT_FOUND, "%s: no tokenizer.json, which tasks need", dir);
    if (status == ENG_OK)
        status = choose_knobs(e->model, o, &knobs, error);
    if (status == ENG_OK)
        status = choose_settings(e->model, o, &knobs, setting, &settings, error);
    if (status == ENG_OK)
        status = trn_tasks_open(&o->tasks, e->tokenizer, &tasks, error);
    if (status == ENG_OK)
        status = trn_tasks_run(e, dir, &o->tasks, &tasks, setting, settings, error);
    trn_tasks_free(&tasks);
    return status;
}

static bool wants_tasks(const eval_options *o) {
    return o->tasks.files.count > 0 || o->tasks.needles || o->tasks.pairs;
}

static eng_status check_options(const eval_options *o, eng_error *error) {
    if (o->exit_table && (wants_tasks(o) || o->solver_table || o->solvers.count > 0))
        return eng_fail(error, ENG_INVALID, "--exit-table: is for --data alone");
    const trn_evaluation_options *e = &o->evaluation;
    const trn_tasks_options *t = &o->tasks;
    if (e->teacher && (wants_tasks(o) || o->exit_table))
        return eng_fail(error, ENG_INVALID, "--teacher: is for --data, without --exit-table");
    if ((e->data.count > 0) == wants_tasks(o))
        return eng_fail(error, ENG_INVALID, "either --data or tasks (--task, --needles, --pairs) are needed");
    if (o->exits.tokens < 0)
        return eng_fail(error, ENG_INVALID, "--exit-tokens: negative");
    if (t->limit < 0 || t->shots < 0 || t->shots > 1000 || t->seed < 0)
        return eng_fail(error, ENG_INVALID, "--limit, --shots or --seed: out of range");
    if (t->made_items < 1 || t->made_items > 1 << 24)
        return eng_fail(error, ENG_INVALID, "--made-items: not in 1..16777216");
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

static eng_status run(const char *dir, eval_options *o, trn_evaluation *e, eng_error *error) {
    o->tasks.context = o->evaluation.context;
    o->tasks.batch_tokens = o->evaluation.batch_tokens;
    o->exits.data = o->evaluation.data;
    o->exits.out = o->tasks.out;
    o->exits.name = o->tasks.name;
    o->evaluation.by_document = o->tasks.out && !o->exit_table;
    eng_status status = check_options(o, error);
    if (status != ENG_OK)
        return status;
    return wants_tasks(o) ? evaluate_tasks(e, dir, o, error) : evaluate_data(e, dir, o, error);
}

int trn_command_eval(int argc, char **argv) {
    eval_options o = {.evaluation = {.device = "cpu", .context = -1, .batch_tokens = 4096},
                      .tasks = {.value = "number", .made_items = 1000},
                      .exits = {.tokens = 512},
                      .cg_steps = -1,
                      .cg_tolerance = -1};
    trn_evaluation_options *own = &o.evaluation;
    trn_tasks_options *tasks = &o.tasks;
    const trn_option options[] = {
        {"data", "NAME", TRN_STRINGS, &own->data, "token shards NAME-00000.tok ...; may be repeated"},
        {"task", "FILE", TRN_STRINGS, &tasks->files, "records as JSONL, or documents as .txt; may be repeated"},
        {"needles", "LENGTHS", TRN_STRING, &tasks->needles, "a value hidden in texts of so many tokens, \"1024,2048\""},
        {"pairs", "LENGTHS", TRN_STRING, &tasks->pairs, "a value of a JSON object of so many tokens"},
        {"haystack", "FILE", TRN_STRING, &tasks->haystack, "texts to hide needles in (default: repeated sentences)"},
        {"value", "KIND", TRN_STRING, &tasks->value, "of needles: number, word or uuid (default number)"},
        {"made-items", "N", TRN_INTEGER, &tasks->made_items, "needles or pairs of each length (default 1000)"},
        {"limit", "N", TRN_INTEGER, &tasks->limit, "items of a task, at random (default 0: all)"},
        {"shots", "N", TRN_INTEGER, &tasks->shots, "examples from the task before each item (default 0)"},
        {"seed", "N", TRN_INTEGER, &tasks->seed, "of needles, pairs, examples and --limit (default 0)"},
        {"overlap", "NAME", TRN_STRINGS, &tasks->overlap, "training shards: estimates without items that occur there"},
        {"in-domain", "TASK", TRN_STRINGS, &tasks->in_domain, "the model was tuned on this task; may be repeated"},
        {"out", "FILE", TRN_STRING, &tasks->out, "results by document or item, for mesa-trainer report"},
        {"name", "TEXT", TRN_STRING, &tasks->name, "of the checkpoint in reports (default: from DIR)"},
        {"context", "N", TRN_INTEGER, &own->context, "most tokens a window (default: the trained length)"},
        {"teacher", "DIR", TRN_STRING, &own->teacher, "of data: how far the model is from that checkpoint's logits"},
        {"windows", "N", TRN_INTEGER, &own->windows,
         "of data: the first window of N documents (default 0: everything)"},
        {"batch-tokens", "N", TRN_INTEGER, &own->batch_tokens, "tokens that run together (default 4096)"},
        {"cg-mode", "MODE", TRN_STRING, &o.cg_mode, "tolerance, steps, exact or fixed (default: the model's)"},
        {"cg-tolerance", "X", TRN_REAL, &o.cg_tolerance, "relative residual (default: the model's)"},
        {"cg-steps", "N", TRN_INTEGER, &o.cg_steps, "bound of steps, or their number (default: the model's)"},
        {"solver", "SETTING", TRN_STRINGS, &o.solvers, "a row with tolerance:X, steps:N or exact; may be repeated"},
        {"solver-table", NULL, TRN_FLAG, &o.solver_table, "fifteen settings of the solver as a Markdown table"},
        {"exit-table", NULL, TRN_FLAG, &o.exit_table,
         "looped models, data: every bound of loops, thresholds of the gate, and what they are held against"},
        {"exit-shares", "P,P..", TRN_STRING, &o.exits.shares,
         "of --exit-table: a row that draws loops with these shares"},
        {"exit-tokens", "N", TRN_INTEGER, &o.exits.tokens,
         "of --exit-table: tokens that are generated to time a row (default 512; 0: none)"},
        {"device", "NAME", TRN_STRING, &own->device, "cpu, cpu:16, cuda:0 (default cpu)"},
    };
    const trn_command_line line = {
        "eval DIR --data NAME | --task FILE [options]",
        "Loss, accuracy, bits per byte and solver steps of a checkpoint over packed documents,\n"
        "the examples of a task, or likelihoods and answers on evaluation tasks.",
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
        status = run(dir, &o, &e, &error);
    trn_evaluation_close(&e);
    return trn_command_end("eval", status, &error);
}

// SPDX-License-Identifier: Apache-2.0
// mesa-trainer report INPUT... --out PAGE: one HTML page that needs nothing but itself.
//
// An input says itself what it is: a run or a sweep by its folder or its file, results by their "format". What an input
// cannot be is refused with its name before anything is written.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/report_results.h"
#include "trainer/report_runs.h"
#include "trainer/report_sweep.h"

enum { MAX_INPUTS = 256 };

// Rows of a checkpoint that an earlier file has results of go there, so that its settings stand together.
static eng_status gather(trn_result *result, int *results, eng_error *error) {
    eng_status status = ENG_OK;
    int kept = 0;
    for (int i = 0; i < *results; i++) {
        int same = 0;
        while (same < kept &&
               (strcmp(result[same].name, result[i].name) != 0 || strcmp(result[same].digest, result[i].digest) != 0))
            same++;
        for (int r = 0; same < kept && r < result[i].rows && status == ENG_OK; r++)
            status = trn_result_add(&result[same], &result[i].row[r], error);
        if (same < kept) {
            trn_result_free(&result[i]);
            continue;
        }
        trn_result moved = result[i];
        result[i] = (trn_result){0};
        result[kept++] = moved;
    }
    *results = kept;
    return status;
}

static bool same_file(const char *path, const struct stat *page) {
    struct stat input;
    return stat(path, &input) == 0 && input.st_dev == page->st_dev && input.st_ino == page->st_ino;
}

static eng_status check_out(const char *const *input, int inputs, const char *out, eng_error *error) {
    struct stat page;
    if (!out)
        return eng_fail(error, ENG_INVALID, "--out is needed");
    for (int i = 0; i < inputs && stat(out, &page) == 0; i++) {
        char *log = eng_join_path(input[i], "log.jsonl");
        if (!log)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
        const bool read = same_file(input[i], &page) || same_file(log, &page);
        free(log);
        if (read)
            return eng_fail(error, ENG_INVALID, "--out: %s is one of the results", eng_path_tail(out));
    }
    return ENG_OK;
}

typedef struct inputs {
    trn_result *result; // (MAX_INPUTS)
    trn_report_run *run;
    const char **sweep; // paths
    int results, runs, sweeps;
} inputs;

static eng_status read_input(inputs *all, const char *path, eng_error *error) {
    eng_status status = ENG_OK;
    struct stat facts;
    if (trn_report_is_sweep(path)) {
        all->sweep[all->sweeps++] = path;
    } else if (trn_report_is_run(path)) {
        status = trn_report_run_read(path, &all->run[all->runs], error);
        all->runs++;
    } else if (stat(path, &facts) == 0 && S_ISDIR(facts.st_mode)) {
        status = eng_fail(error, ENG_INVALID, "%s: neither a run (no log.jsonl) nor a sweep (no sweep.json)",
                          eng_path_tail(path));
    } else {
        status = trn_result_read(path, &all->result[all->results], error);
        all->results++;
    }
    return status;
}

static eng_status read_inputs(inputs *all, const char *const *input, int count, eng_error *error) {
    *all = (inputs){.result = calloc(MAX_INPUTS, sizeof *all->result),
                    .run = calloc(MAX_INPUTS, sizeof *all->run),
                    .sweep = calloc(MAX_INPUTS, sizeof *all->sweep)};
    eng_status status =
        all->result && all->run && all->sweep ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for the inputs");
    for (int i = 0; i < count && status == ENG_OK; i++)
        status = read_input(all, input[i], error);
    return status == ENG_OK ? gather(all->result, &all->results, error) : status;
}

static void free_inputs(inputs *all) {
    for (int i = 0; all->result && i < MAX_INPUTS; i++)
        trn_result_free(&all->result[i]);
    for (int i = 0; all->run && i < MAX_INPUTS; i++)
        trn_log_free(&all->run[i].log);
    free(all->result);
    free(all->run);
    free(all->sweep);
}

typedef struct report_options {
    const char *out, *title, *log;
    bool teacher;
    trn_report_axes axes;
} report_options;

static eng_status report(const char *const *input, int count, const report_options *o, eng_error *error) {
    inputs all;
    trn_page page;
    eng_status status = read_inputs(&all, input, count, error);
    if (status == ENG_OK) {
        trn_page_begin(&page, o->title ? o->title : all.results > 0 ? "Checkpoints compared" : "Training runs");
        trn_report_runs_shorten(all.run, all.runs);
        for (int i = 0; i < all.sweeps && status == ENG_OK; i++)
            status = trn_report_sweep(&page, all.sweep[i], error);
        if (status == ENG_OK && all.runs > 0)
            status = trn_report_runs(&page, all.run, all.runs, o->axes, error);
        if (status == ENG_OK && all.results > 0)
            status = trn_report_results(&page, all.result, all.results, o->teacher, error);
        if (status == ENG_OK)
            status = trn_page_write(&page, o->out, error);
        else
            trn_page_free(&page);
    }
    free_inputs(&all);
    return status;
}

static eng_status parse_axes(report_options *o, eng_error *error) {
    for (const char *at = o->log; at && *at; at++) {
        if (*at != 'x' && *at != 'y')
            return eng_fail(error, ENG_INVALID, "--log: \"%.20s\" is not x, y or xy", o->log);
        o->axes.log_x = o->axes.log_x || *at == 'x';
        o->axes.log_y = o->axes.log_y || *at == 'y';
    }
    return ENG_OK;
}

int trn_command_report(int argc, char **argv) {
    report_options o = {.title = NULL};
    const char *input[MAX_INPUTS];
    const trn_option options[] = {
        {"out", "FILE", TRN_STRING, &o.out, "the page"},
        {"title", "TEXT", TRN_STRING, &o.title, "its title"},
        {"log", "AXES", TRN_STRING, &o.log, "x, y or xy: logarithmic axes of the runs' curves"},
        {"teacher", NULL, TRN_FLAG, &o.teacher, "the first file is a teacher's: what the others recover of it"},
    };
    const trn_command_line line = {
        "report RUN|SWEEP|RESULT... --out PAGE.html",
        "One HTML page that compares training runs, by their folders or logs, and\n"
        "checkpoints and settings of the solver, by what mesa-trainer eval --out has written.",
        options,
        sizeof options / sizeof *options,
        1,
        MAX_INPUTS};
    bool helped = false;
    int count = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, input, &count, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_out(input, count, o.out, &error);
    if (status == ENG_OK)
        status = parse_axes(&o, &error);
    if (status == ENG_OK)
        status = report(input, count, &o, &error);
    return trn_command_end("report", status, &error);
}

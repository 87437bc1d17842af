// SPDX-License-Identifier: Apache-2.0
// mesa-trainer report INPUT... --out PAGE: one HTML page that needs nothing but itself.
//
// An input says itself what it is: a file of results by its "format". What one input cannot be is refused with its name
// before anything is written.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/report_results.h"

enum { MAX_INPUTS = 64 };

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

static eng_status check_out(const char *const *input, int inputs, const char *out, eng_error *error) {
    struct stat page, result;
    if (!out)
        return eng_fail(error, ENG_INVALID, "--out is needed");
    for (int i = 0; i < inputs && stat(out, &page) == 0; i++)
        if (stat(input[i], &result) == 0 && result.st_dev == page.st_dev && result.st_ino == page.st_ino)
            return eng_fail(error, ENG_INVALID, "--out: %s is one of the results", eng_path_tail(out));
    return ENG_OK;
}

static eng_status report(const char *const *input, int inputs, const char *out, const char *title, bool teacher,
                         eng_error *error) {
    trn_page page;
    int read = 0;
    trn_result *result = calloc(MAX_INPUTS, sizeof *result);
    eng_status status = result ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for the inputs");
    for (; read < inputs && status == ENG_OK; read++)
        status = trn_result_read(input[read], &result[read], error);
    if (status == ENG_OK)
        status = gather(result, &read, error);
    if (status == ENG_OK) {
        trn_page_begin(&page, title);
        status = trn_report_results(&page, result, read, teacher, error);
        if (status == ENG_OK)
            status = trn_page_write(&page, out, error);
        else
            trn_page_free(&page);
    }
    for (int i = 0; result && i < inputs; i++)
        trn_result_free(&result[i]);
    free(result);
    return status;
}

int trn_command_report(int argc, char **argv) {
    const char *out = NULL, *title = "Checkpoints compared", *input[MAX_INPUTS];
    bool teacher = false;
    const trn_option options[] = {
        {"out", "FILE", TRN_STRING, &out, "the page"},
        {"title", "TEXT", TRN_STRING, &title, "its title"},
        {"teacher", NULL, TRN_FLAG, &teacher, "the first file is a teacher's: what the others recover of it"},
    };
    const trn_command_line line = {"report RESULT... --out PAGE.html",
                                   "One HTML page that compares checkpoints and settings of the solver, from what\n"
                                   "mesa-trainer eval --out has written.",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   MAX_INPUTS};
    bool helped = false;
    int inputs = 0;
    eng_error error = {0};
    eng_status status = trn_options_parse(&line, argc, argv, input, &inputs, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_out(input, inputs, out, &error);
    if (status == ENG_OK)
        status = report(input, inputs, out, title, teacher, &error);
    return trn_command_end("report", status, &error);
}

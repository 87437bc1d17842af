// SPDX-License-Identifier: Apache-2.0
// Training runs on a page: a table, and curves of loss, validation, gradient norm and learning rate over targets read.
//
// Losses are smoothed by a mean over two hundredths of a run, with what was smoothed behind; a run of fewer than a
// hundred steps is drawn as it is. Steps that were skipped are left out of the curves and counted in the table.
#ifndef TRAINER_REPORT_RUNS_H
#define TRAINER_REPORT_RUNS_H

#include "trainer/report_page.h"
#include "trainer/run_log.h"

typedef struct trn_report_run {
    char name[120];
    trn_log log;
} trn_report_run;

// Whether a path is a run: a folder with log.jsonl, or such a file.
bool trn_report_is_run(const char *path);
// Freed with trn_log_free.
ENG_CHECKED eng_status trn_report_run_read(const char *path, trn_report_run *out, eng_error *error);

// Leaves out the folders that the names of all runs begin with.
void trn_report_runs_shorten(trn_report_run *run, int runs);

typedef struct trn_report_axes {
    bool log_x, log_y;
} trn_report_axes;
ENG_CHECKED eng_status trn_report_runs(trn_page *page, const trn_report_run *run, int runs, trn_report_axes axes,
                                       eng_error *error);

#endif

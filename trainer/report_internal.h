// SPDX-License-Identifier: Apache-2.0
// What the parts of a report of results share: columns, tasks, and how a number is written.
// Everything is borrowed from the results; lists are the report's.
#ifndef TRAINER_REPORT_INTERNAL_H
#define TRAINER_REPORT_INTERNAL_H

#include "trainer/report_results.h"

typedef struct trn_column {
    const trn_result *result;
    const char *setting; // NULL: the first that a task was read with
    char name[120];
} trn_column;

typedef struct trn_report {
    const trn_result *result;
    int results;
    trn_column *column;
    int columns;
    trn_column *shown; // in the overview and where room is short: all, or one a checkpoint
    int shown_count;
    const trn_result_row **task; // the first row of each task
    int tasks;
    bool settings; // some checkpoint has several
} trn_report;

bool trn_report_same_task(const trn_result_row *a, const trn_result_row *b);
// The column's row of a task; NULL: none.
const trn_result_row *trn_report_row(const trn_column *column, const trn_result_row *task);
bool trn_report_is_share(const char *metric); // between 0 and 1, more is better
const char *trn_report_metric_name(const char *metric);
void trn_report_put_task(trn_page *page, const trn_result_row *task); // its name with shots
double trn_report_mean_steps(const trn_result_row *row);              // NAN: no Mesa layer

void trn_report_overview(trn_page *page, const trn_report *report); // all tasks in one table
void trn_report_details(trn_page *page, const trn_report *report);  // a table of each
void trn_report_recovery(trn_page *page, const trn_report *report); // of the first column by the others
void trn_report_plots(trn_page *page, const trn_report *report);

#endif

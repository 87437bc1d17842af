// SPDX-License-Identifier: Apache-2.0
// The report's order: which columns and tasks there are, the checkpoints, then plots and tables; see report_results.h.
// Columns are all checkpoints under all settings, in the order of the files.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/report_internal.h"

bool trn_report_same_task(const trn_result_row *a, const trn_result_row *b) {
    return strcmp(a->task, b->task) == 0 && strcmp(a->digest, b->digest) == 0 && a->seed == b->seed &&
           a->shots == b->shots && a->limit == b->limit && a->items == b->items;
}

const trn_result_row *trn_report_row(const trn_column *column, const trn_result_row *task) {
    for (int i = 0; i < column->result->rows; i++) {
        const trn_result_row *row = &column->result->row[i];
        if ((!column->setting || strcmp(row->setting.name, column->setting) == 0) && trn_report_same_task(row, task))
            return row;
    }
    return NULL;
}

bool trn_report_is_share(const char *metric) {
    static const char *const shares[] = {"acc", "acc_norm", "exact", "contains"};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (strcmp(shares[i], metric) == 0)
            return true;
    return false;
}

const char *trn_report_metric_name(const char *metric) {
    static const char *const names[][2] = {{"acc", "accuracy"},
                                           {"acc_norm", "accuracy a byte"},
                                           {"exact", "exact, greedy"},
                                           {"contains", "answer contained"},
                                           {"logprob", "log-probability, nats"},
                                           {"bits_per_byte", "bits per byte"},
                                           {"loss", "loss, nats a token"},
                                           {"loops", "loops a target"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i][0], metric) == 0)
            return names[i][1];
    return metric;
}

void trn_report_put_task(trn_page *page, const trn_result_row *task) {
    trn_page_text(page, task->task);
    if (task->shots > 0)
        trn_page_put(page, ", %lld-shot", (long long)task->shots);
}

double trn_report_mean_steps(const trn_result_row *row) {
    const eng_compute *solves = &row->figures.solves;
    return solves->solves > 0 ? (double)solves->steps / (double)solves->solves : NAN;
}

// ------------------------------------------------------------------------------------------------------------ contents

static void name_column(trn_column *column, bool setting) {
    const char *name = column->result->name;
    if (setting && column->setting && column->setting[0] && strcmp(column->setting, "-") != 0)
        snprintf(column->name, sizeof column->name, "%.70s, %.40s", name, column->setting);
    else
        snprintf(column->name, sizeof column->name, "%.110s", name);
}

static void collect_columns(trn_report *report) {
    for (int r = 0; r < report->results; r++) {
        const trn_result *result = &report->result[r];
        int first = report->columns;
        for (int i = 0; i < result->rows; i++) {
            bool new = true;
            for (int c = first; c < report->columns; c++)
                new = new &&strcmp(report->column[c].setting, result->row[i].setting.name) != 0;
            if (new)
                report->column[report->columns++] =
                    (trn_column){.result = result, .setting = result->row[i].setting.name};
        }
        report->settings = report->settings || report->columns - first > 1;
    }
    for (int c = 0; c < report->columns; c++)
        name_column(&report->column[c], report->settings);
}

// One column a checkpoint where all columns are too many to be told apart; of a single one the first settings.
static void choose_shown(trn_report *report) {
    bool all = report->columns <= TRN_PLOT_SERIES || report->results == 1;
    int count = all ? report->columns : report->results;
    report->shown_count = count < TRN_PLOT_SERIES ? count : TRN_PLOT_SERIES;
    for (int i = 0; i < report->shown_count; i++) {
        report->shown[i] = all ? report->column[i] : (trn_column){.result = &report->result[i]};
        name_column(&report->shown[i], report->settings);
    }
}

static void collect_tasks(trn_report *report) {
    for (int r = 0; r < report->results; r++)
        for (int i = 0; i < report->result[r].rows; i++) {
            bool new = true;
            for (int t = 0; t < report->tasks && new; t++)
                new = !trn_report_same_task(report->task[t], &report->result[r].row[i]);
            if (new)
                report->task[report->tasks++] = &report->result[r].row[i];
        }
}

// --------------------------------------------------------------------------------------------------------- checkpoints

static void put_count(trn_page *page, int64_t count) {
    if (count < 0)
        trn_page_put(page, "<td>unknown</td>");
    else if (count >= 1000000)
        trn_page_put(page, "<td>%.1f M</td>", (double)count / 1e6);
    else
        trn_page_put(page, "<td>%lld</td>", (long long)count);
}

static void put_bytes(trn_page *page, int64_t bytes) {
    if (bytes < 0)
        trn_page_put(page, "<td>unknown</td>");
    else if (bytes == 0)
        trn_page_put(page, "<td>none</td>");
    else
        trn_page_put(page, "<td>%.*f MB</td>", bytes < 10000000 ? 2 : 1, (double)bytes / 1e6);
}

static void put_checkpoints(trn_page *page, const trn_report *report) {
    trn_page_put(page, "<h2>Checkpoints</h2>\n<div class=\"wide\"><table><thead><tr><th>name</th><th>type</th>"
                       "<th>parameters</th><th>weights</th><th>state</th><th>trained length</th><th>device</th>"
                       "<th>digest</th></tr></thead><tbody>\n");
    for (int r = 0; r < report->results; r++) {
        const trn_result *result = &report->result[r];
        trn_page_put(page, "<tr><th>");
        trn_page_text(page, result->name);
        trn_page_put(page, "</th><td>");
        trn_page_text(page, result->model_type);
        trn_page_put(page, "</td>");
        put_count(page, result->parameters);
        put_bytes(page, result->weight_bytes);
        put_bytes(page, result->state_bytes);
        put_count(page, result->trained_length);
        trn_page_put(page, "<td>");
        trn_page_text(page, result->device);
        char digest[13];
        snprintf(digest, sizeof digest, "%.12s", result->digest);
        trn_page_put(page, "</td><td>");
        trn_page_text(page, digest);
        trn_page_put(page, "</td></tr>\n");
    }
    trn_page_put(page, "</tbody></table></div>\n");
}

eng_status trn_report_results(trn_page *page, const trn_result *result, int results, bool teacher, eng_error *error) {
    trn_report report = {.result = result, .results = results};
    size_t rows = 1;
    for (int r = 0; r < results; r++)
        rows += (size_t)result[r].rows;
    report.column = calloc(rows, sizeof *report.column);
    report.task = calloc(rows, sizeof *report.task);
    report.shown = calloc(TRN_PLOT_SERIES, sizeof *report.shown);
    eng_status status = report.column && report.task && report.shown
                            ? ENG_OK
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for the report");
    if (status == ENG_OK) {
        collect_columns(&report);
        choose_shown(&report);
        collect_tasks(&report);
        put_checkpoints(page, &report);
        trn_report_overview(page, &report);
        if (teacher && report.columns > 0)
            trn_report_recovery(page, &report);
        trn_report_plots(page, &report);
        trn_report_details(page, &report);
    }
    free(report.column);
    free(report.task);
    free(report.shown);
    return status;
}

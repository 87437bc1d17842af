// SPDX-License-Identifier: Apache-2.0
// Tables of a report: one of all tasks, a column a checkpoint, and one of each task with every metric and setting.
// A number is never without its standard error. Shares are written in percent.
#include <math.h>
#include <string.h>

#include "trainer/report_internal.h"

enum { MAX_GROUPS = 100 };

static void put_number(trn_page *page, const char *metric, trn_estimate estimate) {
    if (isnan(estimate.mean))
        trn_page_put(page, "-");
    else if (trn_report_is_share(metric))
        trn_page_put(page, "%.1f %% <span class=\"error\">± %.1f</span>", 100 * estimate.mean, 100 * estimate.error);
    else
        trn_page_put(page, "%.4f <span class=\"error\">± %.4f</span>", estimate.mean, estimate.error);
}

static void put_difference(trn_page *page, const trn_metric *metric, const trn_metric *base) {
    trn_estimate difference;
    if (!base || base == metric || !trn_metric_difference(metric, base, NULL, &difference) || isnan(difference.mean))
        return;
    bool share = trn_report_is_share(metric->name), more_is_better = share || strcmp(metric->name, "logprob") == 0;
    double shown = share ? 0.0005 : 0.00005; // less is written as 0
    bool apart = fabs(difference.mean) > 1.96 * difference.error && fabs(difference.mean) >= shown;
    const char *class = !apart ? "soft" : (difference.mean > 0) == more_is_better ? "good" : "bad";
    trn_page_put(page, "<br><small class=\"%s\">%s ", class, !apart ? "=" : difference.mean > 0 ? "▲" : "▼");
    if (share)
        trn_page_put(page, "%+.1f ± %.1f</small>", 100 * difference.mean, 100 * difference.error);
    else
        trn_page_put(page, "%+.4f ± %.4f</small>", difference.mean, difference.error);
}

static void put_cell(trn_page *page, const trn_result_row *row, const trn_result_row *base, const char *name) {
    const trn_metric *metric = row ? trn_result_find(row, name) : NULL;
    trn_page_put(page, "<td>");
    if (metric) {
        put_number(page, name, trn_metric_estimate(metric, NULL, NULL, 0));
        put_difference(page, metric, base ? trn_result_find(base, name) : NULL);
    } else
        trn_page_put(page, "-");
    trn_page_put(page, "</td>");
}

// Without the items that occur in the training data.
static void put_clean_cell(trn_page *page, const trn_result_row *row) {
    const trn_metric *metric = trn_result_find(row, row->primary);
    int64_t left_out = 0;
    if (!row->overlap) {
        trn_page_put(page, "<td class=\"soft\">not looked for</td>");
        return;
    }
    for (int64_t i = 0; i < row->items; i++)
        left_out += row->overlap[i];
    trn_page_put(page, "<td>");
    put_number(page, row->primary, trn_metric_estimate(metric, row->overlap, NULL, 0));
    trn_page_put(page, "<br><small>%lld left out</small></td>", (long long)left_out);
}

// ------------------------------------------------------------------------------------------------------------ overview

static void put_head(trn_page *page, const trn_report *report) {
    for (int c = 0; c < report->shown_count; c++) {
        trn_page_put(page, "<th>");
        trn_page_text(page, report->shown[c].name);
        trn_page_put(page, "</th>");
    }
    trn_page_put(page, "</tr></thead><tbody>\n");
}

// The items of a task that occur in some checkpoint's training data.
static int64_t most_overlap(const trn_report *report, const trn_result_row *task) {
    int64_t most = 0;
    for (int c = 0; c < report->columns; c++) {
        const trn_result_row *row = trn_report_row(&report->column[c], task);
        int64_t count = 0;
        for (int64_t i = 0; row && row->overlap && i < row->items; i++)
            count += row->overlap[i];
        most = count > most ? count : most;
    }
    return most;
}

static void put_name(trn_page *page, const trn_report *report, const trn_result_row *task) {
    int64_t overlap = most_overlap(report, task);
    trn_report_put_task(page, task);
    trn_page_put(page, "<br><small>");
    trn_page_text(page, trn_report_metric_name(task->primary));
    trn_page_put(page, ", %lld items", (long long)task->items);
    if (overlap > 0)
        trn_page_put(page, ", <span class=\"bad\">%lld in training data</span>", (long long)overlap);
    trn_page_put(page, "%s</small>", task->in_domain ? ", <span class=\"bad\">in-domain</span>" : "");
}

void trn_report_overview(trn_page *page, const trn_report *report) {
    trn_page_put(page,
                 "<h2>Tasks</h2>\n<p class=\"soft\">Each number with its standard error. Below it the difference "
                 "from the first column over the same items, with the standard error of that difference: ▲ and ▼ "
                 "where 1.96 of them do not reach 0, = where the two cannot be told apart. %s</p>\n",
                 report->shown_count < report->columns
                     ? "Not all settings are shown here; the tables of the tasks have them."
                     : "");
    trn_page_put(page, "<div class=\"wide\"><table><thead><tr><th>task</th><th>chance</th>");
    put_head(page, report);
    for (int t = 0; t < report->tasks; t++) {
        const trn_result_row *task = report->task[t], *base = NULL;
        double chance = trn_result_find(task, task->primary)->chance;
        trn_page_put(page, "<tr><th>");
        put_name(page, report, task);
        if (isnan(chance))
            trn_page_put(page, "</th><td></td>");
        else
            trn_page_put(page, "</th><td class=\"soft\">%.1f %%</td>", 100 * chance);
        for (int c = 0; c < report->shown_count; c++) {
            const trn_result_row *row = trn_report_row(&report->shown[c], task);
            put_cell(page, row, base, task->primary);
            base = base ? base : row;
        }
        trn_page_put(page, "</tr>\n");
    }
    trn_page_put(page, "</tbody></table></div>\n");
}

// ------------------------------------------------------------------------------------------------------------- details

static void put_row(trn_page *page, const trn_column *column, const trn_result_row *task, const trn_result_row *row,
                    const trn_result_row *base) {
    const trn_reading_figures *figures = &row->figures;
    double steps = trn_report_mean_steps(row);
    trn_page_put(page, "<tr><th>");
    trn_page_text(page, column->name);
    if (row->length > 0 && column->result->trained_length > 0 && row->length > column->result->trained_length)
        trn_page_put(page, "<br><small>beyond the trained length</small>");
    if (row->truncated > 0)
        trn_page_put(page, "<br><small>%lld texts cut to the context</small>", (long long)row->truncated);
    trn_page_put(page, "</th>");
    for (int m = 0; m < task->metrics; m++)
        put_cell(page, row, base, task->metric[m].name);
    put_clean_cell(page, row);
    if (isnan(steps))
        trn_page_put(page, "<td>-</td>");
    else
        trn_page_put(page, "<td>%.2f<br><small>%.3f %% at the bound</small></td>", steps,
                     100 * (double)figures->solves.unconverged / (double)figures->solves.solves);
    trn_page_put(page, "<td>%.0f</td></tr>\n", figures->seconds > 0 ? (double)figures->tokens / figures->seconds : 0.0);
}

static void put_groups(trn_page *page, const trn_report *report, const trn_result_row *task) {
    if (task->groups == 0)
        return;
    trn_page_put(page, "<div class=\"wide\"><table><thead><tr><th>");
    trn_page_text(page, trn_report_metric_name(task->primary));
    trn_page_put(page, "</th>");
    put_head(page, report);
    for (int32_t g = 0; g < task->groups && g < MAX_GROUPS; g++) {
        trn_page_put(page, "<tr><th>");
        trn_page_text(page, task->group_name[g]);
        trn_page_put(page, "</th>");
        for (int c = 0; c < report->shown_count; c++) {
            const trn_result_row *row = trn_report_row(&report->shown[c], task);
            const trn_metric *metric = row ? trn_result_find(row, task->primary) : NULL;
            trn_page_put(page, "<td>");
            if (metric && row->group)
                put_number(page, task->primary, trn_metric_estimate(metric, NULL, row->group, g));
            trn_page_put(page, "</td>");
        }
        trn_page_put(page, "</tr>\n");
    }
    trn_page_put(page, "</tbody></table></div>\n");
}

static void put_details(trn_page *page, const trn_report *report, const trn_result_row *task) {
    const trn_result_row *base = NULL;
    trn_page_put(page, "<details><summary>");
    trn_report_put_task(page, task);
    trn_page_put(page, "</summary><p class=\"soft\">%lld items%s, seed %lld, digest %.12s.</p>\n",
                 (long long)task->items, task->limit > 0 && task->limit == task->items ? " drawn from the task" : "",
                 (long long)task->seed,
                 strspn(task->digest, "0123456789abcdef") == strlen(task->digest) ? task->digest : "unknown");
    trn_page_put(page, "<div class=\"wide\"><table><thead><tr><th>checkpoint</th>");
    for (int m = 0; m < task->metrics; m++) {
        trn_page_put(page, "<th>");
        trn_page_text(page, trn_report_metric_name(task->metric[m].name));
        trn_page_put(page, "</th>");
    }
    trn_page_put(page, "<th>without overlap</th><th>steps a solve</th><th>tokens/s</th></tr></thead><tbody>\n");
    for (int c = 0; c < report->columns; c++) {
        const trn_result_row *row = trn_report_row(&report->column[c], task);
        if (!row)
            continue;
        put_row(page, &report->column[c], task, row, base);
        base = base ? base : row;
    }
    trn_page_put(page, "</tbody></table></div>\n");
    put_groups(page, report, task);
    trn_page_put(page, "</details>\n");
}

void trn_report_details(trn_page *page, const trn_report *report) {
    trn_page_put(page, "<h2>Each task</h2>\n");
    for (int t = 0; t < report->tasks; t++)
        put_details(page, report, report->task[t]);
}

// SPDX-License-Identifier: Apache-2.0
// Plots of a report: loss by position, score by length, score by what the solver or the loops spend.
//
// A plot is drawn where it shows a course: texts have positions, a family of made tasks several lengths, a checkpoint
// several settings. The exact solve spends no steps and is drawn as a level. Rules of exits are a line each.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/exit_rules.h"
#include "trainer/report_internal.h"

// Room for one plot; points of all series lie in one array.
typedef struct canvas {
    trn_series *series;
    trn_point *point;
    int series_count, points;
} canvas;

static bool canvas_open(canvas *c, const trn_report *report) {
    size_t series = 3 * (size_t)report->columns + 1, each = TRN_BUCKETS;
    if ((size_t)report->tasks > each)
        each = (size_t)report->tasks;
    if ((size_t)report->columns > each)
        each = (size_t)report->columns;
    *c = (canvas){.series = calloc(series, sizeof *c->series), .point = calloc(series * each, sizeof *c->point)};
    return c->series && c->point;
}

static void canvas_clear(canvas *c) {
    c->series_count = c->points = 0;
}

static void canvas_close(canvas *c) {
    free(c->series);
    free(c->point);
}

static trn_series *begin_series(canvas *c, const char *name, const char *more) {
    trn_series *series = &c->series[c->series_count];
    *series = (trn_series){.point = &c->point[c->points]};
    snprintf(series->name, sizeof series->name, "%.80s%s%.30s", name, more[0] ? ", " : "", more);
    return series;
}

static void add_point(canvas *c, double x, trn_estimate estimate, const char *label) {
    trn_point *point = &c->point[c->points++];
    *point = (trn_point){.x = x, .y = estimate.mean, .error = estimate.error};
    snprintf(point->label, sizeof point->label, "%s", label);
    c->series[c->series_count].points++;
}

static int by_x(const void *a, const void *b) {
    double x = ((const trn_point *)a)->x, y = ((const trn_point *)b)->x;
    return (x > y) - (x < y);
}

// A series without a point is none. Times do not ascend with what is spent: such points stay as they came.
static void end_series(canvas *c, bool ascending) {
    trn_series *series = &c->series[c->series_count];
    if (series->points == 0)
        return;
    trn_point *first = &c->point[c->points - series->points];
    if (ascending)
        qsort(first, (size_t)series->points, sizeof *first, by_x);
    c->series_count++;
}

static trn_estimate primary(const trn_result_row *row) {
    return trn_metric_estimate(trn_result_find(row, row->primary), NULL, NULL, 0);
}

static trn_plot plot_of(const canvas *c, const trn_result_row *task) {
    return (trn_plot){.y_name = trn_report_metric_name(task->primary),
                      .percent = trn_report_is_share(task->primary),
                      .mark = NAN,
                      .chance = trn_result_find(task, task->primary)->chance,
                      .series = c->series,
                      .count = c->series_count};
}

// ------------------------------------------------------------------------------------------------------------ position

static void plot_positions(trn_page *page, const trn_report *report, canvas *c) {
    for (int t = 0; t < report->tasks; t++) {
        const trn_result_row *task = report->task[t];
        canvas_clear(c);
        for (int i = 0; i < report->shown_count; i++) {
            const trn_result_row *row = trn_report_row(&report->shown[i], task);
            begin_series(c, report->shown[i].name, "");
            for (int b = 0; row && b < TRN_BUCKETS; b++) {
                int64_t first, last;
                trn_bucket_range(b, &first, &last);
                if (row->position[b].items > 0)
                    add_point(c, (double)last, trn_metric_estimate(&row->position[b], NULL, NULL, 0),
                              row->position[b].name);
            }
            end_series(c, true);
        }
        trn_plot plot = {.x_name = "position in the window, tokens, up to",
                         .y_name = "loss, nats a token",
                         .log_x = true,
                         .mark = NAN,
                         .chance = NAN,
                         .series = c->series,
                         .count = c->series_count};
        snprintf(plot.title, sizeof plot.title, "Loss by position: %.100s", task->task);
        trn_page_plot(page, &plot);
    }
}

// -------------------------------------------------------------------------------------------------------------- length

// Names of one family differ in the length at their end alone.
static size_t family_length(const trn_result_row *task) {
    const char *space = strrchr(task->task, ' ');
    return task->length > 0 && space ? (size_t)(space - task->task) : 0;
}

static bool same_family(const trn_result_row *a, const trn_result_row *b) {
    size_t length = family_length(a);
    return length > 0 && length == family_length(b) && strncmp(a->task, b->task, length) == 0 && a->limit == b->limit &&
           a->seed == b->seed;
}

static void plot_family(trn_page *page, const trn_report *report, int first, canvas *c) {
    const trn_result_row *task = report->task[first];
    double mark = NAN;
    int lengths = 0;
    for (int t = first; t < report->tasks; t++)
        lengths += same_family(task, report->task[t]);
    if (lengths < 2)
        return;
    canvas_clear(c);
    for (int i = 0; i < report->shown_count; i++) {
        begin_series(c, report->shown[i].name, "");
        for (int t = first; t < report->tasks; t++) {
            const trn_result_row *row =
                same_family(task, report->task[t]) ? trn_report_row(&report->shown[i], report->task[t]) : NULL;
            char label[40];
            if (!row)
                continue;
            snprintf(label, sizeof label, "%lld tokens", (long long)row->length);
            add_point(c, (double)row->length, primary(row), label);
        }
        end_series(c, true);
        double trained = (double)report->shown[i].result->trained_length;
        mark = i == 0 ? trained : mark == trained ? mark : NAN;
    }
    trn_plot plot = plot_of(c, task);
    plot.x_name = "length in tokens";
    plot.log_x = true;
    plot.mark = mark > 0 ? mark : NAN;
    plot.mark_name = "trained length";
    snprintf(plot.title, sizeof plot.title, "By length: %.*s", (int)family_length(task), task->task);
    trn_page_plot(page, &plot);
}

static void plot_lengths(trn_page *page, const trn_report *report, canvas *c) {
    for (int t = 0; t < report->tasks; t++) {
        bool first = family_length(report->task[t]) > 0;
        for (int earlier = 0; earlier < t && first; earlier++)
            first = !same_family(report->task[earlier], report->task[t]);
        if (first)
            plot_family(page, report, t, c);
    }
}

// -------------------------------------------------------------------------------------------------------------- solver

static double milliseconds(const trn_result_row *row) {
    return row->figures.tokens > 0 ? 1e3 * row->figures.seconds / (double)row->figures.tokens : NAN;
}

static const char *const mode_names[] = {
    [ENG_CG_TOLERANCE] = "by tolerance", [ENG_CG_STEPS] = "fixed steps", [ENG_CG_EXACT] = "exact"};

// One mode of the solver of one checkpoint as a series.
static void add_mode(canvas *c, const trn_report *report, const trn_result *result, const trn_result_row *task,
                     eng_cg_mode mode, bool by_time) {
    trn_series *series = begin_series(c, result->name, mode_names[mode]);
    series->level = mode == ENG_CG_EXACT && !by_time;
    for (int i = 0; i < report->columns; i++) {
        const trn_column *column = &report->column[i];
        const trn_result_row *row = column->result == result ? trn_report_row(column, task) : NULL;
        if (row && row->setting.knobs.cg_mode == mode && !isnan(trn_report_mean_steps(row)))
            add_point(c, by_time ? milliseconds(row) : trn_report_mean_steps(row), primary(row), row->setting.name);
    }
    end_series(c, !by_time);
}

static void plot_solver(trn_page *page, const trn_report *report, const trn_result_row *task, bool by_time, canvas *c) {
    canvas_clear(c);
    for (int r = 0; r < report->results; r++)
        for (int mode = ENG_CG_TOLERANCE; mode <= ENG_CG_EXACT; mode++)
            add_mode(c, report, &report->result[r], task, (eng_cg_mode)mode, by_time);
    int most = 0;
    for (int s = 0; s < c->series_count; s++)
        most = c->series[s].points > most ? c->series[s].points : most;
    if (most < 2)
        return;
    trn_plot plot = plot_of(c, task);
    plot.x_name = by_time ? "milliseconds a token read" : "steps a solve, mean";
    snprintf(plot.title, sizeof plot.title, "By %s: %.100s", by_time ? "time" : "solver steps", task->task);
    trn_page_plot(page, &plot);
}

// --------------------------------------------------------------------------------------------------------------- exits

// One plot of rules: of the checkpoints [first, end), the first `kinds` of each.
typedef struct frontier {
    const trn_result_row *task;
    const char *metric;
    bool by_time;
    int first, end, kinds;
} frontier;

// One rule of one checkpoint as a series: what it scores for what it runs.
static void add_rule(canvas *c, const trn_report *report, const trn_result *result, const frontier *f,
                     trn_exit_kind kind) {
    const bool several = f->end - f->first > 1;
    begin_series(c, several ? result->name : trn_exit_kind_name(kind), several ? trn_exit_kind_name(kind) : "");
    for (int i = 0; i < report->columns; i++) {
        const trn_column *column = &report->column[i];
        const trn_result_row *row = column->result == result ? trn_report_row(column, f->task) : NULL;
        if (!row || trn_exit_kind_of(row->setting.name) != kind || !trn_result_find(row, f->metric))
            continue;
        const double loops = trn_metric_estimate(trn_result_find(row, "loops"), NULL, NULL, 0).mean,
                     x = f->by_time ? milliseconds(row) : loops;
        if (!isnan(x))
            add_point(c, x, trn_metric_estimate(trn_result_find(row, f->metric), NULL, NULL, 0), row->setting.name);
    }
    end_series(c, true);
}

static void plot_frontier(trn_page *page, const trn_report *report, const frontier *f, canvas *c) {
    canvas_clear(c);
    for (int r = f->first; r < f->end; r++)
        for (int kind = 0; kind < f->kinds; kind++)
            add_rule(c, report, &report->result[r], f, (trn_exit_kind)kind);
    if (c->series_count == 0)
        return;
    const bool one = f->end - f->first == 1 && report->results > 1;
    trn_plot plot = plot_of(c, f->task);
    plot.y_name = trn_report_metric_name(f->metric);
    plot.percent = trn_report_is_share(f->metric);
    plot.x_name = f->by_time ? "milliseconds a generated token" : "loops a target, mean";
    snprintf(plot.title, sizeof plot.title, "By %s: %.70s%s%.60s", f->by_time ? "time of loops" : "loops",
             f->task->task, one ? ", " : "", one ? report->result[f->first].name : "");
    trn_page_plot(page, &plot);
}

// All rules of each checkpoint, and of several those that a request can ask for beside each other.
static void plot_frontiers(trn_page *page, const trn_report *report, const trn_result_row *task, canvas *c) {
    static const char *const metrics[] = {"loss", "acc"};
    for (int i = 0; i < 4; i++) {
        frontier f = {.task = task, .metric = metrics[i / 2], .by_time = i % 2, .kinds = TRN_EXIT_KINDS};
        for (f.end = 1; f.end <= report->results; f.first++, f.end++)
            plot_frontier(page, report, &f, c);
        f = (frontier){task, f.metric, f.by_time, 0, report->results, TRN_EXIT_GATE + 1};
        if (report->results > 1)
            plot_frontier(page, report, &f, c);
    }
}

void trn_report_plots(trn_page *page, const trn_report *report) {
    canvas c;
    if (!canvas_open(&c, report)) {
        page->failed = true;
        canvas_close(&c);
        return;
    }
    size_t before = page->length;
    trn_page_put(page, "<h2>Plots</h2>\n<p class=\"soft\">Bars are 95 %% intervals of each number alone, 1.96 "
                       "standard errors to each side. Over the same items two numbers differ less by chance than "
                       "their bars: the tables' differences allow for that.</p>\n<div class=\"plots\">\n");
    size_t empty = page->length;
    plot_positions(page, report, &c);
    plot_lengths(page, report, &c);
    for (int t = 0; t < report->tasks; t++)
        if (trn_result_find(report->task[t], "loops"))
            plot_frontiers(page, report, report->task[t], &c);
    for (int t = 0; t < report->tasks && report->settings; t++) {
        plot_solver(page, report, report->task[t], false, &c);
        plot_solver(page, report, report->task[t], true, &c);
    }
    if (page->length == empty)
        trn_page_drop(page, before);
    else
        trn_page_put(page, "</div>\n");
    canvas_close(&c);
}

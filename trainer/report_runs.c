// SPDX-License-Identifier: Apache-2.0
// Training runs on a page; see report_runs.h. A curve has at most a few hundred points, however long its run was: of
// the raw one the least and the largest of each piece, so that no spike is lost.
#include "trainer/report_runs.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/progress.h"

enum { PIECES = 300, LAST_STEPS = 50 };

static const char log_name[] = "log.jsonl";

// ------------------------------------------------------------------------------------------------------------- reading

static bool is_folder(const char *path) {
    struct stat facts;
    return stat(path, &facts) == 0 && S_ISDIR(facts.st_mode);
}

bool trn_report_is_run(const char *path) {
    const size_t length = strlen(path);
    struct stat facts;
    if (!is_folder(path))
        return length > 6 && strcmp(path + length - 6, ".jsonl") == 0;
    char *log = eng_join_path(path, log_name);
    const bool is = log && stat(log, &facts) == 0;
    free(log);
    return is;
}

// The folder's name stands for the run.
static void name_run(const char *path, char *name, size_t size) {
    size_t length = strlen(path);
    const size_t own = sizeof log_name; // with the slash before it
    if (length > own && strcmp(path + length - own + 1, log_name) == 0 && path[length - own] == '/')
        length -= own;
    while (length > 1 && path[length - 1] == '/')
        length--;
    const size_t most = 60, from = length > most ? length - most : 0;
    snprintf(name, size, "%.*s", (int)(length - from), path + from);
}

eng_status trn_report_run_read(const char *path, trn_report_run *out, eng_error *error) {
    *out = (trn_report_run){0};
    name_run(path, out->name, sizeof out->name);
    char *log = is_folder(path) ? eng_join_path(path, log_name) : strdup(path);
    eng_status status =
        log ? trn_log_read(log, &out->log, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    free(log);
    return status;
}

static bool all_begin_alike(const trn_report_run *run, int runs, size_t length) {
    for (int r = 1; r < runs; r++)
        if (strncmp(run[r].name, run[0].name, length) != 0)
            return false;
    return true;
}

void trn_report_runs_shorten(trn_report_run *run, int runs) {
    size_t shared = 0;
    for (size_t i = 0; runs > 1 && run[0].name[i]; i++)
        if (run[0].name[i] == '/' && all_begin_alike(run, runs, i + 1))
            shared = i + 1;
    for (int r = 0; r < runs; r++)
        memmove(run[r].name, run[r].name + shared, strlen(run[r].name) + 1 - shared);
}

// -------------------------------------------------------------------------------------------------------------- curves

typedef double (*value_of)(const trn_log_entry *entry);

static double loss_of(const trn_log_entry *entry) {
    return entry->bad ? NAN : entry->loss;
}
static double valid_of(const trn_log_entry *entry) {
    return entry->valid_loss;
}
static double divergence_of(const trn_log_entry *entry) {
    return entry->bad ? NAN : entry->divergence;
}
static double valid_divergence_of(const trn_log_entry *entry) {
    return entry->valid_divergence;
}
static double norm_of(const trn_log_entry *entry) {
    return entry->bad ? NAN : entry->gradient_norm;
}
static double rate_of(const trn_log_entry *entry) {
    return entry->rate;
}

typedef struct curve_plot {
    const char *title, *y_name;
    value_of value;
    bool smooths;
    bool log_y;    // also where the page's axes are linear
    bool rare;     // of validations
    bool optional; // left out where no run has it
} curve_plot;

typedef struct curves {
    trn_series *series; // (runs)
    trn_point *point;   // (runs, 3 PIECES): smoothed, then raw
} curves;

// The mean over the entries around `at`; NAN: none is finite.
static double mean_around(const trn_log *log, value_of value, int64_t at, int64_t reach) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = at - reach < 0 ? 0 : at - reach; i <= at + reach && i < log->entries; i++) {
        const double one = value(&log->entry[i]);
        sum += isfinite(one) ? one : 0;
        count += isfinite(one);
    }
    return count > 0 ? sum / (double)count : NAN;
}

static int64_t piece_begin(const trn_log *log, int64_t piece, int64_t pieces) {
    return log->entries * piece / pieces;
}

static void add_point(const trn_point **first, int *count, trn_point *room, const trn_log_entry *entry, double value) {
    if (!isfinite(value))
        return;
    room[(*count)++] = (trn_point){.x = (double)entry->tokens, .y = value, .error = NAN};
    *first = room;
}

static void add_extremes(trn_series *series, trn_point *room, const trn_log *log, value_of value, int64_t begin,
                         int64_t end) {
    int64_t least = -1, most = -1;
    for (int64_t i = begin; i < end; i++) {
        const double one = value(&log->entry[i]);
        if (!isfinite(one))
            continue;
        least = least < 0 || one < value(&log->entry[least]) ? i : least;
        most = most < 0 || one > value(&log->entry[most]) ? i : most;
    }
    if (least < 0)
        return;
    const int64_t first = least < most ? least : most, second = least < most ? most : least;
    add_point(&series->raw, &series->raws, room, &log->entry[first], value(&log->entry[first]));
    if (second != first)
        add_point(&series->raw, &series->raws, room, &log->entry[second], value(&log->entry[second]));
}

// They are few and far between; of very many, every so many.
static void add_validations(trn_series *series, trn_point *room, const trn_log *log, value_of value) {
    int64_t all = 0, seen = 0;
    for (int64_t i = 0; i < log->entries; i++)
        all += isfinite(value(&log->entry[i]));
    const int64_t every = all / PIECES + 1;
    for (int64_t i = 0; i < log->entries; i++)
        if (isfinite(value(&log->entry[i])) && ++seen % every == 0)
            add_point(&series->point, &series->points, room, &log->entry[i], value(&log->entry[i]));
}

static void make_series(const trn_report_run *run, const curve_plot *plot, trn_point *room, trn_series *series) {
    const trn_log *log = &run->log;
    const int64_t pieces = log->entries < PIECES ? log->entries : PIECES;
    const int64_t reach = plot->smooths ? log->entries / 100 : 0;
    snprintf(series->name, sizeof series->name, "%s", run->name);
    if (plot->rare) {
        add_validations(series, room, log, plot->value);
        return;
    }
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t begin = piece_begin(log, p, pieces), end = piece_begin(log, p + 1, pieces);
        add_point(&series->point, &series->points, room, &log->entry[end - 1],
                  mean_around(log, plot->value, end - 1, reach));
        if (reach > 0)
            add_extremes(series, room + PIECES, log, plot->value, begin, end);
    }
}

static void put_plot(trn_page *page, const trn_report_run *run, int runs, const curve_plot *plot, trn_report_axes axes,
                     const curves *room) {
    int count = 0;
    for (int r = 0; r < runs; r++) {
        trn_series *series = &room->series[count];
        *series = (trn_series){.point = NULL};
        make_series(&run[r], plot, room->point + (size_t)count * 3 * PIECES, series);
        count += series->points > 0;
    }
    if (count == 0 && plot->optional)
        return;
    trn_plot drawn = {.x_name = "targets read",
                      .y_name = plot->y_name,
                      .curves = true,
                      .log10_x = axes.log_x,
                      .log10_y = axes.log_y || plot->log_y,
                      .mark = NAN,
                      .chance = NAN,
                      .series = room->series,
                      .count = count};
    snprintf(drawn.title, sizeof drawn.title, "%s", plot->title);
    trn_page_plot(page, &drawn);
}

// --------------------------------------------------------------------------------------------------------------- table

static void put_real(trn_page *page, double value, int digits) {
    if (isfinite(value))
        trn_page_put(page, "<td>%.*f</td>", digits, value);
    else
        trn_page_put(page, "<td>-</td>");
}

static double best_valid(const trn_log *log) {
    double best = NAN;
    for (int64_t i = 0; i < log->entries; i++)
        best = fmin(best, log->entry[i].valid_loss);
    return best;
}

static double peak_rate(const trn_log *log) {
    double peak = NAN;
    for (int64_t i = 0; i < log->entries; i++)
        peak = fmax(peak, log->entry[i].rate);
    return peak;
}

static bool is_taught(const trn_report_run *run, int runs) {
    for (int r = 0; r < runs; r++)
        for (int64_t i = 0; i < run[r].log.entries; i++)
            if (isfinite(run[r].log.entry[i].divergence))
                return true;
    return false;
}

static void put_row(trn_page *page, const trn_report_run *run, bool taught) {
    const trn_log *log = &run->log;
    const trn_log_entry *last = log->entries > 0 ? &log->entry[log->entries - 1] : NULL;
    const trn_log_entry *valid = trn_log_last_valid(log);
    char time[24];
    trn_page_put(page, "<tr><th scope=\"row\">");
    trn_page_text(page, run->name);
    trn_page_put(page, "</th>");
    if (!last) {
        trn_page_put(page,
                     "<td>0</td><td>-</td><td>-</td><td>-</td><td>-</td><td>-</td><td>-</td><td>-</td>"
                     "<td>-</td>%s</tr>\n",
                     taught ? "<td>-</td>" : "");
        return;
    }
    trn_page_put(page, "<td>%lld</td><td>%.2f M</td><td>%.2g</td>", (long long)last->step, 1e-6 * (double)last->tokens,
                 peak_rate(log));
    put_real(page, trn_log_last_loss(log, LAST_STEPS), 4);
    put_real(page, valid ? valid->valid_loss : NAN, 4);
    put_real(page, best_valid(log), 4);
    put_real(page, valid ? 100 * valid->valid_accuracy : NAN, 2);
    if (taught)
        put_real(page, valid ? valid->valid_divergence : NAN, 4);
    const int64_t bad = trn_log_bad_steps(log);
    trn_page_put(page, "<td%s>%lld</td><td>%s</td></tr>\n", bad > 0 ? " class=\"bad\"" : "", (long long)bad,
                 isfinite(last->seconds) ? trn_duration(last->seconds, time) : "-");
}

static void put_table(trn_page *page, const trn_report_run *run, int runs) {
    const bool taught = is_taught(run, runs);
    trn_page_put(
        page,
        "<h2>Runs</h2>\n<div class=\"wide runs\"><table><thead><tr><th>run</th><th>steps</th><th>targets</th>"
        "<th>peak<br>rate</th><th>loss<br><small>last %d steps</small></th><th>validation<br><small>last</small>"
        "</th><th>validation<br><small>best</small></th><th>right<br><small>last, %%</small></th>"
        "%s<th>bad<br>steps</th><th>time</th></tr></thead><tbody>\n",
        (int)LAST_STEPS, taught ? "<th>divergence<br><small>last</small></th>" : "");
    for (int r = 0; r < runs; r++)
        put_row(page, &run[r], taught);
    trn_page_put(page, "</tbody></table></div>\n");
}

eng_status trn_report_runs(trn_page *page, const trn_report_run *run, int runs, trn_report_axes axes,
                           eng_error *error) {
    static const curve_plot plots[] = {
        {"Training loss", "loss, nats a token", loss_of, .smooths = true},
        {"Validation loss", "loss, nats a token", valid_of, .rare = true},
        {"Divergence from the teacher", "nats a token", divergence_of, .smooths = true, .optional = true},
        {"Validation: divergence", "nats a token", valid_divergence_of, .rare = true, .optional = true},
        {"Gradient norm", "2-norm", norm_of, .smooths = true, .log_y = true},
        {"Learning rate", "rate", rate_of, .smooths = false}};
    curves room = {calloc((size_t)runs + 1, sizeof *room.series),
                   calloc(((size_t)runs + 1) * 3 * PIECES, sizeof *room.point)};
    eng_status status =
        room.series && room.point ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for %d curves", runs);
    if (status == ENG_OK) {
        put_table(page, run, runs);
        trn_page_put(page, "<div class=\"plots\">\n");
        for (size_t i = 0; i < sizeof plots / sizeof *plots; i++)
            put_plot(page, run, runs, &plots[i], axes, &room);
        trn_page_put(page, "</div>\n");
    }
    free(room.series);
    free(room.point);
    return status;
}

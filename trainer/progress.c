// SPDX-License-Identifier: Apache-2.0
// The progress line; see progress.h.
// Lines are spaced in time, not in calls, so callers may report as often as they like.
#include "trainer/progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const double interval = 0.25; // seconds between two lines

double trn_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void trn_progress_begin(trn_progress *progress) {
    const char *terminal = getenv("TERM");
    double now = trn_seconds();
    *progress = (trn_progress){
        .terminal = isatty(STDERR_FILENO) && terminal && strcmp(terminal, "dumb") != 0, .start = now, .next = now};
}

bool trn_progress_due(const trn_progress *progress) {
    return progress->terminal && trn_seconds() >= progress->next;
}

void trn_progress_show(trn_progress *progress, const char *format, ...) {
    if (!progress->terminal)
        return;
    va_list arguments;
    va_start(arguments, format);
    fputs("\r", stderr);
    vfprintf(stderr, format, arguments);
    fputs("\x1b[K", stderr); // clears what an earlier, longer line left
    fflush(stderr);
    va_end(arguments);
    progress->shown = true;
    progress->next = trn_seconds() + interval;
}

void trn_progress_part(void *context, uint64_t done, uint64_t total, const char *what) {
    trn_progress *progress = context;
    if (!trn_progress_due(progress) || total == 0)
        return;
    char left[24];
    double elapsed = trn_seconds() - progress->start, fraction = (double)done / (double)total;
    double remaining = fraction > 0 ? elapsed / fraction - elapsed : 0;
    trn_progress_show(progress, "%s: %.0f %%, %s left", what, 100 * fraction, trn_duration(remaining, left));
}

void trn_progress_end(trn_progress *progress) {
    if (progress->shown)
        fputs("\r\x1b[K", stderr);
    fflush(stderr);
    progress->shown = false;
}

const char *trn_duration(double seconds, char text[24]) {
    const double most = 3599999999; // 999999:59:59
    const long whole = lround(seconds > most ? most : seconds > 0 ? seconds : 0);
    if (whole >= 3600)
        snprintf(text, 24, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
    else
        snprintf(text, 24, "%ld:%02ld", whole / 60, whole % 60);
    return text;
}

// SPDX-License-Identifier: Apache-2.0
// One line on a terminal that tells how far a long command is: rewritten in place, at most a few times a second.
//
// When stderr is no terminal nothing is written; what must be kept belongs on stdout or in a log file. One thread.
#ifndef TRAINER_PROGRESS_H
#define TRAINER_PROGRESS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct trn_progress {
    bool terminal;
    bool shown;         // a line stands on the terminal
    double start, next; // seconds of the monotonic clock
} trn_progress;

double trn_seconds(void); // the monotonic clock

void trn_progress_begin(trn_progress *progress);
// Whether a line is due now; callers that must compute something for it ask first.
bool trn_progress_due(const trn_progress *progress);
__attribute__((format(printf, 2, 3))) void trn_progress_show(trn_progress *progress, const char *format, ...);
// "WHAT: 12 %, 0:31 left" when due; context is a trn_progress.
void trn_progress_part(void *context, uint64_t done, uint64_t total, const char *what);
void trn_progress_end(trn_progress *progress); // clears the line

// What is shown of a NaN that the processor gave a sign: printf would write "-nan".
static inline double trn_unsigned_nan(double value) {
    return isnan(value) ? (double)NAN : value;
}

// "1:02:03" or "2:03" of a duration.
const char *trn_duration(double seconds, char text[24]);

#endif

// SPDX-License-Identifier: Apache-2.0
// A run's log.jsonl read back: what `report` and a sweep's table are made of.
//
// A last line that its writer has not finished is left out; any other that is not a step's is an error with its number.
#ifndef TRAINER_RUN_LOG_H
#define TRAINER_RUN_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct trn_log_entry {
    int64_t step, tokens;                // after it; targets counted so far
    double loss, gradient_norm, rate;    // NAN: not finite
    double valid_loss, valid_accuracy;   // NAN: not validated here
    double divergence, valid_divergence; // from a teacher; NAN: likewise, or there is none
    double seconds;                      // of the run so far
    bool bad;                            // it was skipped
} trn_log_entry;

typedef struct trn_log {
    trn_log_entry *entry;
    int64_t entries;
} trn_log;

// ENG_NOT_FOUND: there is no such file. Freed with trn_log_free.
ENG_CHECKED eng_status trn_log_read(const char *path, trn_log *out, eng_error *error);
void trn_log_free(trn_log *log);
int64_t trn_log_bad_steps(const trn_log *log);
// The mean training loss of the last `steps` that are not bad; NAN: there is none.
double trn_log_last_loss(const trn_log *log, int64_t steps);
// The last validation; NULL: none.
const trn_log_entry *trn_log_last_valid(const trn_log *log);

#endif

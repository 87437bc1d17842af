// SPDX-License-Identifier: Apache-2.0
// Step after step until the run is finished, a signal comes or time is up; the log, the progress, the checkpoints.
// The loop owns the run folder; a step itself is train_step.c, which knows nothing of files. Of several ranks the first
// alone logs and prints; all of them stop together, whichever is asked to.
#ifndef TRAINER_TRAIN_LOOP_H
#define TRAINER_TRAIN_LOOP_H

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

#include "trainer/run.h"

typedef struct trn_loop_options {
    const char *folder;      // RUN
    double max_seconds;      // stop after a checkpoint; 0: no limit
    int64_t profile_steps;   // that are timed by operation, after two that warm up; 0: none
    const sigset_t *signals; // blocked signals that ask for a checkpoint and an end; NULL: none
    const atomic_bool *stop; // set by another thread that asks for the same; NULL: none
    FILE *out;               // where people read; NULL: stdout, and a progress line on the terminal
    bool *unfinished;        // may be NULL: set where the run was asked to end before it was over
} trn_loop_options;

// What was profiled is printed and goes to RUN/profile.md. Runs until config.steps, one JSON line a step in
// RUN/log.jsonl. The last step is always saved. A step whose loss or gradient is not finite changes nothing and is
// told; config.max_bad_steps of them in a row end the run with ENG_NUMERIC. Weights that are not finite are never
// saved: that too ends the run so.
ENG_CHECKED eng_status trn_train_loop(trn_run *run, const trn_loop_options *options, eng_error *error);

#endif

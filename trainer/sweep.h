// SPDX-License-Identifier: Apache-2.0
// Many small runs from one file, and one table of what came out.
//
// FILE has the sections [grid], whose values are tried in every combination, [variant NAME], of which each is tried
// with all of the grid and whose keys are single values (or none: what the configuration says), and [sweep] with
// `seeds`. Keys are those of --set:
//     [sweep]                      [grid]                              [variant mesa]
//     seeds = 1 2 3                optim.lr = 0.001 0.002 0.004        model.model_type = mesa_net
//
// Every run has a folder of its own under the sweep's; run.json there says what it was made with and how it ended.
// Finished runs are not done again, others go on from their newest checkpoint. Several run at once, each on a thread
// with a device of its own: on a GPU they are streams beside each other, on a CPU they share its threads evenly. A run
// that the device's memory has no room for waits until another has ended.
#ifndef TRAINER_SWEEP_H
#define TRAINER_SWEEP_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/status.h"

enum { TRN_SWEEP_AXES = 8, TRN_SWEEP_RUNS = 4096 };

typedef struct trn_list {
    char **item;
    int count;
    int line; // of the file that has its first value; 0: none
} trn_list;

typedef struct trn_axis {
    char *key; // "optim.lr"
    trn_list value;
} trn_axis;

typedef struct trn_variant {
    char *name;
    trn_list set; // "section.key=value"
} trn_variant;

typedef enum trn_sweep_end { TRN_SWEEP_OPEN, TRN_SWEEP_DONE, TRN_SWEEP_FAILED } trn_sweep_end;

typedef struct trn_sweep_result {
    trn_sweep_end end;
    char reason[256];                        // of a failure
    double valid_loss, valid_accuracy, loss; // NAN: none; loss: the mean of the last 50 steps
    double valid_divergence;                 // NAN: likewise, or no teacher
    int64_t step, tokens, bad_steps;
    double seconds;
} trn_sweep_result;

typedef struct trn_sweep_run {
    char name[192]; // its folder
    int variant;
    int place[TRN_SWEEP_AXES]; // of its values
    int seed;                  // place in seeds
    trn_list set;
    trn_sweep_result result;
} trn_sweep_run;

typedef struct trn_sweep {
    trn_variant *variant; // one of no name where the file has none
    int variants;
    trn_axis axis[TRN_SWEEP_AXES];
    int axes;
    trn_list seed;      // empty: the configuration's
    trn_sweep_run *run; // (runs) by variant, then by the first axis and so on, then by seed
    int runs;
} trn_sweep;

// Reads FILE and makes the list of runs; set: (sets) assignments of all of them, before the sweep's own. Freed with
// trn_sweep_free, also on failure.
ENG_CHECKED eng_status trn_sweep_read(const char *path, const char *const *set, int sets, trn_sweep *sweep,
                                      eng_error *error);
void trn_sweep_free(trn_sweep *sweep);

typedef struct trn_sweep_options {
    const char *config, *out;
    int64_t parallel;        // 0: as many as suits the device
    double max_seconds;      // 0: no limit
    const sigset_t *signals; // blocked signals that ask for an end; NULL: none
} trn_sweep_options;

// Runs what is not done. Runs that fail are results, not errors. Prints a line a run, then the tables, and writes
// OUT/sweep.json and OUT/sweep.md. ENG_NUMERIC where some run has failed.
ENG_CHECKED eng_status trn_sweep_train(trn_sweep *sweep, const trn_sweep_options *options, eng_error *error);

#endif

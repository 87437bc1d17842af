// SPDX-License-Identifier: Apache-2.0
// What the parts of a sweep share: how a run ended, and what seeds gave together.
// Private to sweep*.c and the report of one.
#ifndef TRAINER_SWEEP_INTERNAL_H
#define TRAINER_SWEEP_INTERNAL_H

#include <stdio.h>

#include "trainer/sweep.h"

// OUT/NAME/run.json: how the run was made and how it ended. Reading: TRN_SWEEP_OPEN where there is none; one that was
// made otherwise is ENG_INVALID.
ENG_CHECKED eng_status trn_sweep_read_result(const char *folder, trn_sweep_run *run, const char *config_digest,
                                             eng_error *error);
ENG_CHECKED eng_status trn_sweep_write_result(const char *folder, const trn_sweep_run *run, const char *config_digest,
                                              eng_error *error);

// What the seeds of one variant at one place of the grid gave.
typedef struct trn_sweep_group {
    char variant[64];
    char setting[192]; // "lr=0.001,layers=4"; "": no grid
    char reason[256];  // of the first failure
    int done, failed, open;
    double valid, deviation; // mean and standard deviation over the seeds that are done; NAN: none, fewer than two
    double accuracy, divergence, loss, seconds;
    bool best;     // of its variant: the least mean of those without a failure, where it has several
    char edge[96]; // of the best: the keys of which it takes the least or the largest value
} trn_sweep_group;

// (runs / seeds) groups in the order of the runs, new (free); NULL: out of memory.
trn_sweep_group *trn_sweep_groups(const trn_sweep *sweep, int *count);
bool trn_sweep_is_taught(const trn_sweep_group *group, int groups);        // whether any tells of a teacher
void trn_sweep_print(const trn_sweep_group *group, int groups, FILE *out); // as Markdown
// OUT/sweep.json, which `report` reads, and OUT/sweep.md.
ENG_CHECKED eng_status trn_sweep_write(const char *out, const trn_sweep_group *group, int groups, eng_error *error);
ENG_CHECKED eng_status trn_sweep_read_groups(const char *path, trn_sweep_group **group, int *groups, eng_error *error);

#endif

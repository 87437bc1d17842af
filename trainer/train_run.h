// SPDX-License-Identifier: Apache-2.0
// A run from its configuration to its last checkpoint: the folder is made and locked, the newest checkpoint found, the
// run opened, resumed and trained. What `train`, `gate` and every run of a sweep do.
//
// One thread a run; several runs of one process need nothing of each other.
#ifndef TRAINER_TRAIN_RUN_H
#define TRAINER_TRAIN_RUN_H

#include "trainer/train_loop.h"

typedef struct trn_train_options {
    bool resume;           // where the folder holds checkpoints
    trn_loop_options loop; // with the folder
} trn_train_options;

// Takes config, also on failure; borrows ranks (NULL: one process), who all call this.
ENG_CHECKED eng_status trn_train(trn_run_config *config, trn_ranks *ranks, const trn_train_options *options,
                                 eng_error *error);
// A folder that only one program at a time may write: made where it is missing. The system frees the lock with the
// process at the latest.
typedef struct trn_own_folder {
    int lock; // a file; -1: none
    bool made;
} trn_own_folder;
ENG_CHECKED eng_status trn_enter_folder(const char *path, trn_own_folder *out, eng_error *error);
// Also after a failure. A folder that was made and holds nothing is removed.
void trn_leave_folder(const char *path, const trn_own_folder *own);

#endif

// SPDX-License-Identifier: Apache-2.0
// What the ranks of a run have in common: the program, the configuration, the data, the folder, the checkpoint that
// they go on from. Ranks that differ would train on in silence, so they are compared before the first step.
//
// For a process alone all of this does nothing.
#ifndef TRAINER_RUN_RANKS_H
#define TRAINER_RUN_RANKS_H

#include "trainer/run.h"

// Before a run is opened: the same program, the same configuration.
ENG_CHECKED eng_status trn_ranks_agree_program(trn_ranks *ranks, const trn_run_config *config, eng_error *error);
// When it is: the same model, data, kind of device.
ENG_CHECKED eng_status trn_ranks_agree_run(const trn_run *run, eng_error *error);
// Whether every rank sees what rank 0 writes to the folder, which exists on rank 0.
ENG_CHECKED eng_status trn_ranks_agree_folder(trn_ranks *ranks, const char *folder, eng_error *error);
// Rank 0 has found where the run goes on: *dir (new; NULL: nowhere) and *state become the others', dir inside folder.
ENG_CHECKED eng_status trn_ranks_share_start(trn_ranks *ranks, const char *folder, char **dir, trn_run_state *state,
                                             eng_error *error);

#endif

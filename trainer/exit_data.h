// SPDX-License-Identifier: Apache-2.0
// What every loop of a looped model says about every target: losses, hits, and what rules that stop early look at.
//
// One pass over the windows: the outputs of all loops are kept by the scoring plan and go through the head loop by
// loop, so that nothing is computed twice whatever the rules. Values are (targets, loops); losses and divergences are
// made in double precision. Owns all of it; one thread.
#ifndef TRAINER_EXIT_DATA_H
#define TRAINER_EXIT_DATA_H

#include "trainer/evaluation.h"

typedef struct trn_exit_data {
    int32_t loops;
    bool gated;
    int64_t targets, windows;
    uint64_t digest; // of the targets
    int64_t *end;    // (windows) targets up to the window's end
    float *loss;     // nats
    float *entropy;  // of the output's distribution, nats
    float *change;   // KL(this loop's output | the loop's before), nats; of the first loop infinite
    float *gate;     // probability of having left by this loop, 1 behind the last; NULL: no gate
    bool *right;     // the likeliest id is the target
} trn_exit_data;

// Of the windows of an open evaluation. A model without outputs to choose from is ENG_INVALID. Freed by
// trn_exit_data_free.
ENG_CHECKED eng_status trn_exit_data_read(trn_evaluation *evaluation, kern_solver solver, trn_exit_data *out,
                                          eng_error *error);
void trn_exit_data_free(trn_exit_data *data); // a zeroed struct is accepted

// Measures what serving pays: generated tokens of the data, at most `tokens`, one timeline after another, as the knobs
// say. Loops that no token needs are not run. *read of them take *seconds.
ENG_CHECKED eng_status trn_exit_time(trn_evaluation *evaluation, const eng_knobs *knobs, int64_t tokens, int64_t *read,
                                     double *seconds, eng_error *error);

#endif

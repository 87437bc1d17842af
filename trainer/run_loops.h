// SPDX-License-Identifier: Apache-2.0
// The [loop] section of a run: what of it a plan is made with, what changes from step to step, what it leaves alone.
//
// Values are checked against the model when the run is opened. One thread; private to run*.c and train_step.c.
#ifndef TRAINER_RUN_LOOPS_H
#define TRAINER_RUN_LOOPS_H

#include "trainer/run.h"

// Fills what options say of loops.
ENG_CHECKED eng_status trn_run_loop_options(const trn_run *run, eng_plan_options *options, eng_error *error);
// The entropy's coefficient of the step at hand.
ENG_CHECKED eng_status trn_run_set_entropy(trn_run *run, eng_error *error);
// Whether the gate alone is trained.
bool trn_run_trains_gate_alone(const trn_run *run);

#endif

// SPDX-License-Identifier: Apache-2.0
// Where the time of steps goes: by operation, beside what each needs at least on this machine.
//
// While a runner has a profile its plan runs operation by operation (kernels/profile.h) and is waited for. What happens
// between plans is attributed by whoever did it, piece after piece: a piece's time is all since the piece before. What
// nobody claims is the rest, so the lines of the table add up to the steps' time. The profile's own work is left out of
// it. Every function takes NULL for a profile and then does nothing. One thread.
#ifndef TRAINER_PROFILE_H
#define TRAINER_PROFILE_H

#include <stdio.h>

#include "trainer/runner.h"

typedef enum trn_phase {
    TRN_PHASE_TEACHER,
    TRN_PHASE_FORWARD,
    TRN_PHASE_LOSS,
    TRN_PHASE_BACKWARD, // with what is computed again
    TRN_PHASE_OPTIMIZER,
    TRN_PHASE_DATA,
    TRN_PHASE_REST,
    TRN_PHASES
} trn_phase;

ENG_CHECKED eng_status trn_profile_create(kern_device *device, trn_profile **out, eng_error *error);
void trn_profile_free(trn_profile *profile);

void trn_profile_begin(trn_profile *profile); // a step
void trn_profile_end(trn_profile *profile);
// In place of kern_plan_run, of a runner whose rows are prepared.
ENG_CHECKED eng_status trn_profile_run(trn_profile *profile, trn_runner *runner, eng_error *error);
// What the time since the piece before was: waits for the stream first (NULL: nothing was launched). cost: of all of
// it.
void trn_profile_piece(trn_profile *profile, kern_stream *stream, trn_phase phase, const char *name, kern_cost cost);

// The same of the optimizer, which reads or writes `words` floats a parameter.
void trn_profile_parameters(trn_profile *profile, kern_stream *stream, const char *name, int64_t parameters,
                            double words, double operations);

// What the machine can do, measured as `bench` does; bench_machine.c.
typedef struct trn_limits {
    double memory, matrix; // bytes and operations a second
} trn_limits;
ENG_CHECKED eng_status trn_limits_measure(kern_device *device, trn_limits *out, eng_error *error);

// A Markdown table of the steps' mean, the longest line first, with the phases' sums. unit: what a step is ("step").
void trn_profile_print(const trn_profile *profile, const trn_limits *limits, const char *unit, FILE *out);
// The same as text (free); NULL: out of memory.
char *trn_profile_text(const trn_profile *profile, const trn_limits *limits, const char *unit);

#endif

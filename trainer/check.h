// SPDX-License-Identifier: Apache-2.0
// What the parts of the command `check` share: verdicts, and the comparison of two devices.
//
// Both print what they find. One thread, beside those of the devices.
#ifndef TRAINER_CHECK_H
#define TRAINER_CHECK_H

#include "trainer/options.h"

typedef struct trn_verdicts {
    int compared, outside; // of their tolerance
} trn_verdicts;

// A line "WHAT ERROR (TOLERANCE)" on stdout, counted. A NaN is outside every tolerance.
void trn_judge(trn_verdicts *verdicts, const char *what, double error, double tolerance);

typedef struct trn_against {
    trn_strings data;             // token shards
    const char *device;           // that is looked at,
    const char *precision;        // its products: "float32" or "bf16",
    const char *reference;        // and the device, in float32, that it is held against
    const char *solver;           // (eval_setting.h); NULL: as training has it by default
    const char *reference_solver; // NULL: the same
    int64_t batches, rows;        // batches of so many rows of training
    int64_t micro_rows, context;  // rows at once on `device`, 0: all; pairs of a row, 0: the trained length
    int64_t seed;                 // of the order of the rows
} trn_against;

// Gradients of the checkpoint's loss over the same batches on both devices: a table by tensor, then the verdicts.
ENG_CHECKED eng_status trn_check_against(const char *dir, const trn_against *options, trn_verdicts *verdicts,
                                         eng_error *error);

#endif

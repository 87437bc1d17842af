// SPDX-License-Identifier: Apache-2.0
// Settings of the solver that a row of results was made with, by the names that users write.
// A setting is a name and all of a request's knobs, so that a row can be repeated through the server.
#ifndef TRAINER_EVAL_SETTING_H
#define TRAINER_EVAL_SETTING_H

#include "engine/model.h"

typedef struct trn_setting {
    char name[40]; // "tolerance 0.01", "steps 4", "exact", "default"
    eng_knobs knobs;
} trn_setting;

enum { TRN_MAX_SETTINGS = 64, TRN_TABLE_SETTINGS = 15 };

// "tolerance:X", "steps:N" or "exact" beside what the knobs say otherwise.
ENG_CHECKED eng_status trn_setting_parse(const char *text, const eng_knobs *knobs, trn_setting *out, eng_error *error);
// The fifteen of the solver table: tolerances 1 .. 1e-4, exact, 1 .. 30 steps.
void trn_setting_table(const eng_knobs *knobs, trn_setting out[TRN_TABLE_SETTINGS]);

#endif

// SPDX-License-Identifier: Apache-2.0
// A looped model under all rules of exits: the table of eval --exit-table and its file of results.
// Everything is read once at all loops; the rules choose from that (exit_rules.h). One thread.
#ifndef TRAINER_EVAL_EXITS_H
#define TRAINER_EVAL_EXITS_H

#include "trainer/evaluation.h"

typedef struct trn_exit_options {
    trn_strings data;       // names the rows
    int64_t tokens;         // generated to time a rule that is served; 0: not timed
    const char *shares;     // of the loops, for a rule that draws with them; may be NULL
    const char *out, *name; // may be NULL
} trn_exit_options;

// Prints a Markdown table. A model without outputs to choose from is ENG_INVALID.
ENG_CHECKED eng_status trn_exit_table(trn_evaluation *evaluation, const char *dir, const trn_exit_options *options,
                                      const eng_knobs *knobs, eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// What a looped model's gate did over a batch: the loss of each loop, how likely each exit was, and their entropy.
//
// Sums over targets, so that batches add up. Of plans whose loop_loss is not FINAL; a model without a gate has losses
// alone. Copies results to the host; one thread.
#ifndef TRAINER_EXITS_H
#define TRAINER_EXITS_H

#include "trainer/jsonl.h"
#include "trainer/runner.h"

typedef struct trn_exits {
    int32_t loops; // 0: nothing was added
    bool gated;
    int64_t targets;
    double loss[ENG_MAX_LOOPS], probability[ENG_MAX_LOOPS], entropy;
    int64_t likeliest[ENG_MAX_LOOPS]; // targets whose likeliest exit it was
} trn_exits;

// Adds the tokens with a target of the runner's last run.
ENG_CHECKED eng_status trn_exits_add(trn_exits *sum, trn_runner *runner, eng_error *error);
void trn_exits_merge(trn_exits *sum, const trn_exits *part);
// PREFIXloop_loss, PREFIXexit_probability, PREFIXexit_likeliest (a number a loop) and PREFIXexit_entropy, as means.
void trn_exits_write(const trn_exits *exits, const char *prefix, trn_json *line);
// Whether the gate has stopped choosing: nearly all tokens leave at one loop, or all exits are alike everywhere.
bool trn_exits_collapsed(const trn_exits *exits);

#endif

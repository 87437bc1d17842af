// SPDX-License-Identifier: Apache-2.0
// Rules that say at which loop a token is read, and what each is worth on the same targets.
//
// The gate at a threshold and a bound of loops are what is served; entropy and change of the output (its divergence
// from the loop before) stop where they fall to a limit. What a gate is worth shows against two that know nothing of
// the token: each exit as often as the gate takes it, and the two bounds around its mean. Both are exact means, no
// draws. The oracle stops at each token's least loss: nobody can know that, it is a bound. No state; one thread.
#ifndef TRAINER_EXIT_RULES_H
#define TRAINER_EXIT_RULES_H

#include "trainer/eval_result.h"
#include "trainer/exit_data.h"

typedef enum trn_exit_kind {
    TRN_EXIT_LOOP,    // all at loop `at`
    TRN_EXIT_GATE,    // at the first loop where the probability of having left reaches `at`
    TRN_EXIT_MATCHED, // at random, each loop as often as the gate at `at`
    TRN_EXIT_BETWEEN, // at random at the two loops around the mean of the gate at `at`
    TRN_EXIT_ENTROPY, // at the first loop whose output's entropy is at most `at`
    TRN_EXIT_CHANGE,  // at the first loop whose output has changed by at most `at`
    TRN_EXIT_SHARES,  // at random with shares that are given
    TRN_EXIT_ORACLE,  // at the least loss
    TRN_EXIT_KINDS
} trn_exit_kind;

typedef struct trn_exit_rule {
    trn_exit_kind kind;
    double at;
    double share[ENG_MAX_LOOPS]; // MATCHED, BETWEEN, SHARES: of the loops
} trn_exit_rule;

enum { TRN_EXIT_RULES = 96 }; // at most: a loop each, three times nine of a gate, nine limits twice, the oracle

// All rules for the data; returns how many. shares (loops): of SHARES, with a sum of 1; NULL: none.
int trn_exit_rules(const trn_exit_data *data, const double *shares, trn_exit_rule out[TRN_EXIT_RULES]);
// "0.2,0.3,0.5", a number a loop, brought to a sum of 1.
ENG_CHECKED eng_status trn_exit_read_shares(const char *text, int32_t loops, double *out, eng_error *error);
// "gate 0.3", for people and for the rows' settings.
void trn_exit_rule_name(const trn_exit_rule *rule, char *name, size_t size);
// The kind that a setting's name says; KINDS: none.
trn_exit_kind trn_exit_kind_of(const char *setting);
const char *trn_exit_kind_name(trn_exit_kind kind); // for legends
// The loops' shares for one target.
void trn_exit_weigh(const trn_exit_data *data, const trn_exit_rule *rule, int64_t target, double *weight);
// A row of results with an item a window: "loss", "acc" and "loops" by targets.
ENG_CHECKED eng_status trn_exit_row(const trn_exit_data *data, const trn_exit_rule *rule, const char *task,
                                    bool examples, trn_result_row *out, eng_error *error);

#endif

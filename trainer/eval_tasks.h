// SPDX-License-Identifier: Apache-2.0
// A checkpoint on tasks, under settings of the solver: a table on the terminal and a file of results.
// Everything that was asked for is opened and checked before the model reads anything.
#ifndef TRAINER_EVAL_TASKS_H
#define TRAINER_EVAL_TASKS_H

#include "trainer/eval_result.h"
#include "trainer/eval_setting.h"
#include "trainer/eval_task.h"
#include "trainer/evaluation.h"

typedef struct trn_tasks_options {
    trn_strings files;    // of tasks
    const char *needles;  // lengths in tokens, "1024,2048"; NULL: none
    const char *pairs;    // likewise
    const char *haystack; // of the needles; NULL: noise
    const char *value;    // of the needles: number, word, uuid
    int64_t made_items;   // of each length
    int64_t limit;        // items of a task; 0: all
    int64_t shots;        // examples before every context
    int64_t seed;
    int64_t context;      // pairs of a text's window; -1: the trained length
    int64_t batch_tokens; // that run together
    trn_strings overlap;  // packed training data
    trn_strings in_domain;
    const char *out, *name; // may be NULL
} trn_tasks_options;

// Opens every task before the first is run. *tasks is new (trn_tasks_free), also on failure.
typedef struct trn_tasks {
    trn_task *task;
    int count;
} trn_tasks;
ENG_CHECKED eng_status trn_tasks_open(const trn_tasks_options *options, const eng_tokenizer *tokenizer, trn_tasks *out,
                                      eng_error *error);
void trn_tasks_free(trn_tasks *tasks);

// Hours of reading shall not end at a file that cannot be written. path may be NULL.
ENG_CHECKED eng_status trn_result_check_output(const char *path, eng_error *error);
// What a file of results says of the checkpoint; name NULL: from dir. Freed by trn_result_free.
ENG_CHECKED eng_status trn_result_describe(const trn_evaluation *evaluation, const char *dir, const char *name,
                                           trn_result *out, eng_error *error);
// Every task under every setting; options->out, where it is wanted, is written anew after each.
ENG_CHECKED eng_status trn_tasks_run(trn_evaluation *evaluation, const char *dir, const trn_tasks_options *options,
                                     const trn_tasks *tasks, const trn_setting *setting, int settings,
                                     eng_error *error);

#endif

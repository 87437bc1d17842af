// SPDX-License-Identifier: Apache-2.0
// Synthetic tasks with known answers: one table of generators, options and metrics.
//
// A generator makes one example from a stream of draws: ids, and at each place the id to answer or -1. It draws
// nothing from elsewhere, so an example is a function of the options, the seed and its number. A new task is one
// generator and one row of the table (task_table.c); the command (cmd_task.c) knows none of them.
#ifndef TRAINER_TASK_H
#define TRAINER_TASK_H

#include <stdbool.h>

#include "engine/status.h"
#include "trainer/draw.h"
#include "trainer/floors.h"

enum { TRN_TASK_MAX_LEVELS = 16, TRN_TASK_MAX_OPTIONS = 12 };

// The values of all options of all tasks; a task reads those that its row names.
typedef struct trn_task_settings {
    int64_t seed, examples, valid_examples;
    int64_t vocab, length; // ids 0 .. vocab - 1; length: what each task says
    const char *pairs;     // mqar: "4,8,16", read into level
    const char *hops;      // p-hop: likewise
    int64_t level[TRN_TASK_MAX_LEVELS];
    int levels; // kinds of examples, mixed in training and apart in validation; 1 for most tasks
    double power_a, noise_fraction;
    int64_t noise_vocab, key_motif, value_motif, copies;
    int64_t modulus, operations; // mano
    bool blank_non_queries, single_query, train_answers_only, train_every_letter;
} trn_task_settings;

typedef struct trn_task_example {
    int32_t *id, *target; // (capacity) target -1: no answer is asked for
    int32_t length, capacity;
    int32_t *scratch; // (4 capacity + vocab) the generator's own
    double *weight;   // (capacity) likewise
} trn_task_example;

typedef struct trn_task {
    const char *name, *summary;
    const char *metric; // what eval's accuracy means here
    struct {
        const char *option, *value; // its default
    } option[TRN_TASK_MAX_OPTIONS]; // ends with a NULL
    // Bounds that involve several options; also fills levels. The error names the option.
    eng_status (*check)(trn_task_settings *settings, eng_error *error);
    int32_t (*longest)(const trn_task_settings *settings); // ids of the longest example
    // level: of settings->level. training: the public code's training examples may differ from those that are scored.
    void (*generate)(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                     trn_task_example *example);
    // Rules that answer without the work, tried on an example that is scored (floors.h). NULL: none of its own.
    void (*floors)(const trn_task_settings *settings, const trn_task_example *example, trn_floors *floors);
} trn_task;

const trn_task *trn_task_find(const char *name); // NULL: none
const trn_task *trn_task_at(int index);          // NULL behind the last

ENG_CHECKED eng_status trn_task_example_create(const trn_task *task, const trn_task_settings *settings,
                                               trn_task_example *out, eng_error *error);
void trn_task_example_free(trn_task_example *example);

// Reads "4,8,16", the value of --option, into level.
ENG_CHECKED eng_status trn_task_read_levels(trn_task_settings *settings, const char *option, const char *text,
                                            eng_error *error);

// The generators.
ENG_CHECKED eng_status trn_mqar_check(trn_task_settings *settings, eng_error *error);
void trn_mqar_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                       trn_task_example *example);
ENG_CHECKED eng_status trn_recall_check(trn_task_settings *settings, eng_error *error);
void trn_recall_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                         trn_task_example *example);
ENG_CHECKED eng_status trn_fuzzy_check(trn_task_settings *settings, eng_error *error);
void trn_fuzzy_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                        trn_task_example *example);
ENG_CHECKED eng_status trn_copy_check(trn_task_settings *settings, eng_error *error);
void trn_copy_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                       trn_task_example *example);
ENG_CHECKED eng_status trn_compression_check(trn_task_settings *settings, eng_error *error);
void trn_compression_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                              trn_task_example *example);
ENG_CHECKED eng_status trn_memorization_check(trn_task_settings *settings, eng_error *error);
void trn_memorization_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                               trn_task_example *example);
ENG_CHECKED eng_status trn_hop_check(trn_task_settings *settings, eng_error *error);
void trn_hop_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                      trn_task_example *example);
void trn_hop_floors(const trn_task_settings *settings, const trn_task_example *example, trn_floors *floors);
ENG_CHECKED eng_status trn_mano_check(trn_task_settings *settings, eng_error *error);
void trn_mano_generate(const trn_task_settings *settings, int64_t level, bool training, trn_draw *draw,
                       trn_task_example *example);

#endif

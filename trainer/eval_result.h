// SPDX-License-Identifier: Apache-2.0
// What one run of `eval` over tasks found: a JSON file that is written once and compared later by `report`.
//
// A row is one task under one setting of the solver. It keeps a value of every item, so that two files can be compared
// item by item, and says what it was made from: digests, seeds, shots, how many items. Estimates are written for
// readers; `report` computes them again from the values.
#ifndef TRAINER_EVAL_RESULT_H
#define TRAINER_EVAL_RESULT_H

#include "trainer/eval_metric.h"
#include "trainer/eval_reader.h"
#include "trainer/eval_setting.h"
#include "trainer/score.h"

enum { TRN_MAX_METRICS = 8, TRN_PLACES = 8 };

typedef struct trn_result_row {
    char *task;
    char digest[65];
    trn_setting setting;
    char primary[40];                          // the metric that stands for the row
    int64_t items, length, shots, seed, limit; // length 0: not made by length; limit 0: all
    int64_t truncated;                         // readings whose beginning did not fit into the model's context
    int64_t taken[TRN_PLACES];                 // how often the best sum was that of choice i; not kept in files
    bool normalises;                           // choices are more than labels, behind a context
    bool in_domain;                            // the model was tuned on this task's training set
    trn_metric metric[TRN_MAX_METRICS];
    int metrics;
    trn_metric position[TRN_BUCKETS]; // loss by position, of texts; items 0 where there is no target
    char **group_name;
    int32_t groups;
    int32_t *group; // (items), -1: none; NULL where no item has one
    bool *overlap;  // (items); NULL: not looked for
    trn_reading_figures figures;
} trn_result_row;

typedef struct trn_result {
    char *name, *model, *digest, *model_type, *device;
    int64_t parameters, weight_bytes, state_bytes, trained_length; // -1: unknown
    trn_result_row *row;
    int rows;
} trn_result;

// Values are NAN, groups -1, nothing overlaps. The row is zeroed first; freed by trn_result_row_free, also on failure.
ENG_CHECKED eng_status trn_result_row_create(const char *task, int64_t items, trn_result_row *out, eng_error *error);
void trn_result_row_free(trn_result_row *row);
// The metric of that name, made if it is new; chance of guessing NAN: none. NULL: out of memory.
trn_metric *trn_result_metric(trn_result_row *row, const char *name, bool weighted);
const trn_metric *trn_result_find(const trn_result_row *row, const char *name); // NULL: none
// Position bucket b, made if new. NULL: out of memory.
trn_metric *trn_result_position(trn_result_row *row, int bucket);
// The group's number, added if it is new; -1: out of memory.
int32_t trn_result_group(trn_result_row *row, const char *name);

// Takes the row.
ENG_CHECKED eng_status trn_result_add(trn_result *result, trn_result_row *row, eng_error *error);
void trn_result_free(trn_result *result);
ENG_CHECKED eng_status trn_result_write(const trn_result *result, const char *path, eng_error *error);
// Errors name file and key.
ENG_CHECKED eng_status trn_result_read(const char *path, trn_result *out, eng_error *error);

#endif

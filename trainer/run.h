// SPDX-License-Identifier: Apache-2.0
// A training run opened: model, weights, optimizer, data, plans. What happens step after step is in train_loop.c, the
// command in train.c.
//
// Everything that decides the numbers follows from the configuration, the step and the number of ranks: a run opened
// from its checkpoint of step N goes on bit for bit as one that was never interrupted (on one machine, with one build
// and instruction set); on another number of ranks its sums have another order, and nothing else changes. What a report
// or a score tells is of all ranks.
// One thread; the compute team belongs to the device.
#ifndef TRAINER_RUN_H
#define TRAINER_RUN_H

#include "trainer/batch.h"
#include "trainer/dataset.h"
#include "trainer/exits.h"
#include "trainer/optimizer.h"
#include "trainer/run_config.h"
#include "trainer/run_folder.h"
#include "trainer/schedule.h"

typedef struct trn_run {
    trn_run_config config;
    kern_device *device;
    eng_model *model;
    eng_weights *weights;
    trn_dataset *train, *valid; // valid NULL: none
    eng_plan *score_plan;       // shares the runner's memory
    eng_plan *train_plan;       // the runner's own
    trn_runner runner;
    trn_batch batch;
    trn_teacher teacher; // of the configuration; its checkpoint is NULL without one
    trn_optimizer optimizer;
    trn_schedule schedule;
    kern_solver solver;
    char *start;       // with start_from: the table of what was taken from there
    char no_cuda[256]; // why a device = auto is the CPU; "": it is not
    trn_ranks *ranks;  // borrowed; NULL: one process
    size_t *block_end; // (optimizer.blocks) operations of the training plan after which a block's gradients are final
    trn_row *row;      // (own_rows) this rank's rows of the step at hand
    int32_t batch_rows, micro_rows;
    int32_t first_row, own_rows; // this rank's of the batch_rows
    trn_run_state state;
} trn_run;

// Takes config, also on failure; borrows ranks, who open the same run all together. Weights are the table's start
// values.
ENG_CHECKED eng_status trn_run_open(trn_run_config *config, trn_ranks *ranks, trn_run *run, eng_error *error);
// A fresh run's weights where the configuration names a checkpoint: those of warm_start, where an exit gate may be
// missing and then has its start values, or those of start_from that fit (start.h). A run that goes on needs neither
// folder.
ENG_CHECKED eng_status trn_run_start(trn_run *run, eng_error *error);
// Loads weights, moments and place from a checkpoint of this run (trn_run_newest); refuses one whose order of data
// differs.
ENG_CHECKED eng_status trn_run_resume(trn_run *run, const char *dir, const trn_run_state *state, eng_error *error);
void trn_run_close(trn_run *run);
// The device that the configuration names; "cuda" alone is the one of number `local`. why: as of eng_open_device.
ENG_CHECKED eng_status trn_run_open_device(const trn_run_config *config, int32_t local, char *why, size_t why_size,
                                           kern_device **out, eng_error *error);
ENG_CHECKED eng_status trn_run_checkpoint(trn_run *run, const char *folder, eng_error *error);

typedef struct trn_step_report {
    int64_t step;        // after it: 1 for the first
    int64_t first_place; // of its rows in the endless order
    double rate, loss, gradient_norm;
    double divergence;       // from the teacher, a target; 0 without one
    int64_t tokens, targets; // read; with a loss
    eng_compute solves, backward_solves;
    trn_exits exits;
    enum { TRN_STEP_DONE, TRN_STEP_EMPTY, TRN_STEP_NOT_FINITE } outcome;
    char culprit[160]; // NOT_FINITE: the first tensor that is not finite, "weight NAME" before "gradient NAME"
} trn_step_report;

// One optimizer step. A step without counted targets changes nothing; neither does one whose loss or gradient is not
// finite, or too large for the moments: both count as steps, and the report says so.
ENG_CHECKED eng_status trn_run_step(trn_run *run, trn_step_report *report, eng_error *error);

typedef struct trn_score {
    double loss, divergence; // sums over targets; divergence 0 without a teacher
    int64_t targets;
    trn_hits hits;
    eng_compute solves;
    trn_exits exits;
} trn_score;

// The loss over config.eval_rows rows of the validation set (0: all), the same rows at every call.
ENG_CHECKED eng_status trn_run_validate(trn_run *run, trn_score *score, eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// One plan with its memory, row tables and stream: what every offline command runs.
//
// The caller fills runner->rows (kernels.h) and calls trn_runner_run; outputs are then read by their references in
// runner->plan. Serving plans get `slots` state slots and, with full-attention layers, enough KV pages for max_tokens a
// slot.
#ifndef TRAINER_RUNNER_H
#define TRAINER_RUNNER_H

#include "engine/forward.h"

// Places at which a plan makes way: when operations up to end[i] (ascending) have been launched, reached(context, i).
typedef struct trn_stops {
    const size_t *end;
    int32_t count;
    eng_status (*reached)(void *context, int32_t stop, eng_error *error);
    void *context;
} trn_stops;

typedef struct trn_profile trn_profile; // profile.h

typedef struct trn_runner {
    kern_device *device; // borrowed
    kern_stream *stream;
    eng_plan *plan;
    kern_memory memory;
    kern_rows *rows;
    void *states, *pages;
    int32_t slot_pages;     // KV pages of each slot
    kern_exit exit;         // of the rows that will be added; at first the model's own
    const trn_stops *stops; // of the next runs, which have prompt rows; NULL: none
    trn_profile *profile;   // of the next runs; NULL: none. What stops would have begun begins behind the plan
} trn_runner;

typedef struct trn_runner_options {
    eng_plan_options plan;
    int32_t max_boundaries;  // documents that may start inside rows
    int32_t slots;           // SERVE
    int32_t slot_tokens;     // SERVE: the longest timeline of a slot
    const eng_plan *also[2]; // other plans of these sizes that run in the same memory, in turns; may be NULL
} trn_runner_options;

ENG_CHECKED eng_status trn_runner_create(const eng_weights *weights, const trn_runner_options *options, trn_runner *out,
                                         eng_error *error);
void trn_runner_free(trn_runner *runner);
// Prepares the rows and runs the plan; _run waits for it, after _start what is read waits.
ENG_CHECKED eng_status trn_runner_start(trn_runner *runner, eng_error *error);
ENG_CHECKED eng_status trn_runner_run(trn_runner *runner, eng_error *error);
// Copies `bytes` of an output to the host.
ENG_CHECKED eng_status trn_runner_read(trn_runner *runner, kern_ptr reference, void *host, size_t bytes,
                                       eng_error *error);
// Adds a row at the end of runner->rows (slot -1: none, with its pages if the plan has any) and its ids; token0 follows
// from the tokens before. Generated rows must be added before prompt rows.
ENG_CHECKED eng_status trn_runner_add_row(trn_runner *runner, kern_row_kind kind, int32_t slot, int64_t position,
                                          const int32_t *ids, int32_t count, kern_solver solver, eng_error *error);
void trn_runner_clear(trn_runner *runner); // no rows, no logits

// The model's own knobs.
kern_solver trn_model_solver(const eng_model *model);
// "tolerance", "steps", "exact", "fixed" by kern_solve_mode; NULL behind them.
extern const char *const trn_cg_modes[];
ENG_CHECKED eng_status trn_parse_cg_mode(const char *text, kern_solve_mode *out, eng_error *error);
const char *trn_cg_mode_name(kern_solve_mode mode);
// The storage of --state-storage; NULL: float32.
ENG_CHECKED eng_status trn_parse_storage(const char *text, kern_storage *out, eng_error *error);
// Whether the device can keep states so.
ENG_CHECKED eng_status trn_check_storage(const kern_device *device, kern_storage storage, eng_error *error);

#endif

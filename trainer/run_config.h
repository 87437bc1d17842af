// SPDX-License-Identifier: Apache-2.0
// run.ini: what a training run is. Sections [model] [data] [optim] [train] [solver] [loop] [teacher], one table of
// keys.
//
// [model] holds the keys of config.json (values are JSON, or plain words), on top of those of `base`, a config.json or
// a folder with one. A value that continues on indented lines is allowed in [model] for arrays and objects. Unknown
// keys, values out of range and keys given twice are errors with file and line. Later sources win: the file, then each
// --set section.key=value.
#ifndef TRAINER_RUN_CONFIG_H
#define TRAINER_RUN_CONFIG_H

#include <stdint.h>

#include "engine/status.h"
#include "trainer/jsonl.h"

typedef struct trn_run_config {
    // [model]
    trn_json *model; // the keys given in [model] but base
    char *base;      // "": none
    // [data]; texts are "" where nothing was given
    char *train, *valid; // names of shards, separated by white space
    char *tokenizer;     // folder
    int64_t context;
    // [optim]
    double lr, min_lr_ratio, decay_fraction, beta1, beta2, eps, weight_decay, clip;
    int64_t warmup_steps, schedule; // trn_schedule_kind
    int64_t rounding;               // kern_rounding; NONE: to nearest, where a product reads a weight as bf16
    // [train]
    int64_t steps, batch_tokens, micro_rows, seed, eval_every, eval_rows, save_every, keep;
    int64_t recompute;     // eng_recompute
    int64_t precision;     // 1: products round their operands to bf16 where the device gains by it
    int64_t threads;       // of the CPU at most; 0: all that there are
    int64_t max_bad_steps; // in a row that are not finite, after which the run ends; 0: it goes on
    double stop_accuracy;  // of the validation's targets, at which the run ends; 0: none
    char *device, *warm_start;
    char *start_from; // a folder of whose weights those are taken that fit; "": none
    // [solver]
    int64_t solver_mode, solver_steps; // kern_solve_mode; steps 0: the model's max_cg_step_training
    double solver_tolerance, backward_tolerance;
    // [loop], of looped models
    int64_t loop_loss, backward_loops;  // eng_loop_loss; loops that are differentiated, 0: all
    char *loop_weights, *loop_prior;    // numbers, one a loop; "": 1 / loops each; no prior
    double loop_entropy, entropy_decay; // of the gate's exits; the part of it that is gone by the last step
    double gate_sharpness, gate_margin;
    // [teacher]
    char *teacher;                       // folder of a checkpoint; "": none
    double loss_share, divergence_share; // of a token's loss and of its divergence in what is minimised
    double temperature;
} trn_run_config;

// Starts with the defaults; reads path (NULL: none), then the `sets` texts "section.key=value", then checks the whole.
// Freed with trn_run_config_free.
ENG_CHECKED eng_status trn_run_config_read(const char *path, const char *const *set, int sets, trn_run_config *out,
                                           eng_error *error);
void trn_run_config_free(trn_run_config *config);
// Replaces one value, as a --set would.
ENG_CHECKED eng_status trn_run_config_set(trn_run_config *config, const char *assignment, eng_error *error);
ENG_CHECKED eng_status trn_run_config_set_base(trn_run_config *config, const char *base, eng_error *error);
// Makes [model] whole: adds the keys of base (those that the table of [model] knows) and from then on needs no base.
// Base is read by the engine first, so that what it refuses is refused here too.
ENG_CHECKED eng_status trn_run_config_merge_base(trn_run_config *config, eng_error *error);
// Every key with its value, as run.ini has them. *text is new (free).
ENG_CHECKED eng_status trn_run_config_text(const trn_run_config *config, char **text, eng_error *error);
// Writes that text to path, atomically; reading it gives the same configuration.
ENG_CHECKED eng_status trn_run_config_write(const trn_run_config *config, const char *path, eng_error *error);

#endif

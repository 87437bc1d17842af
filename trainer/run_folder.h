// SPDX-License-Identifier: Apache-2.0
// The checkpoints of a run: RUN/step-00000100/, each a Hugging Face folder in float32 that a server loads as it is,
// with trainer/optim-RANK.safetensors (the moments of each rank) and trainer/state.json (where the run stands, SHA-256
// of every file) written last. All ranks must reach the folder: rank 0 writes all but the others' moments.
//
// A checkpoint is filled under a hidden name, made durable and renamed: a name is a whole checkpoint or not there.
#ifndef TRAINER_RUN_FOLDER_H
#define TRAINER_RUN_FOLDER_H

#include "engine/checkpoint.h"
#include "engine/digest.h"
#include "trainer/optimizer.h"

// Where a run stands after `step` steps. The order of the data is a function of seed, context, batch_rows and the data
// set, so a resumed run must agree in them.
typedef struct trn_run_state {
    int64_t step;
    int64_t updates;    // of the optimizer: steps but those refused or skipped
    int64_t epoch, row; // of the next step's first row, and its place in the epoch
    int64_t seed, context, batch_rows, data_rows;
    int64_t tokens;                // targets counted so far
    int64_t bad_steps, bad_in_row; // not finite: so far, and up to this step without a good one between
    int64_t ranks;                 // that have saved
    double seconds;                // spent so far
    char teacher[ENG_DIGEST_HEX];  // the digest of its files; "": none
} trn_run_state;

// Writes RUN/step-N for state->step = N, of all ranks (the optimizer's) together: it stands when rank 0 returns. With
// keep > 0 only the newest `keep` checkpoints stay.
ENG_CHECKED eng_status trn_run_save(const char *run, const trn_run_state *state, const eng_weights *weights,
                                    trn_optimizer *optimizer, const char *tokenizer_dir, int64_t keep,
                                    eng_error *error);

// The checkpoint of the highest step whose files all have the digests that its state.json tells; damaged ones are told
// to `damaged` (with a sentence) and passed over. *dir is new (free). ENG_NOT_FOUND: there is none.
ENG_CHECKED eng_status trn_run_newest(const char *run, void (*damaged)(const char *dir, const char *why), char **dir,
                                      trn_run_state *state, eng_error *error);
// The moments of such a checkpoint, whatever the number of ranks that saved them.
ENG_CHECKED eng_status trn_run_load_moments(const char *dir, const trn_run_state *state, trn_optimizer *optimizer,
                                            eng_error *error);
// Whether RUN holds anything that looks like a checkpoint.
ENG_CHECKED eng_status trn_run_has_checkpoints(const char *run, bool *has, eng_error *error);
// Removes what interrupted saves left behind.
ENG_CHECKED eng_status trn_run_clean(const char *run, eng_error *error);

// Cuts RUN/log.jsonl after the lines of `step`: what a killed run logged beyond its last checkpoint will be logged
// again.
ENG_CHECKED eng_status trn_run_trim_log(const char *run, int64_t step, eng_error *error);

#endif

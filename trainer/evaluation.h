// SPDX-License-Identifier: Apache-2.0
// A checkpoint as it is served, opened with the data that it is scored on: what `eval` and `quantize` share.
// Owns the device, the weights and the plan that scores. One thread.
#ifndef TRAINER_EVALUATION_H
#define TRAINER_EVALUATION_H

#include "trainer/options.h"
#include "trainer/progress.h"
#include "trainer/score.h"

typedef struct trn_evaluation_options {
    trn_strings data; // token shards
    const char *device;
    const char *teacher;  // folder of a checkpoint from which divergence is told; NULL: none
    int64_t context;      // -1: the trained length
    int64_t windows;      // 0: all; else the first window of that many documents
    int64_t batch_tokens; // that run together
    bool by_document;     // keep sums of every document
} trn_evaluation_options;

typedef struct trn_evaluation {
    kern_device *device;
    eng_checkpoint *checkpoint;
    const eng_model *model;
    eng_weights *weights;
    trn_teacher teacher;      // its checkpoint is NULL without one
    eng_tokenizer *tokenizer; // NULL: the folder has none
    trn_dataset *dataset;
    trn_windows windows;
    trn_document_score *document; // (documents) of the last scoring; NULL: not kept
    trn_runner runner;
    trn_batch batch;
    int32_t context;
    trn_progress progress;
} trn_evaluation;

// A checkpoint alone, without data to score: device, model, weights and, where the folder has one, tokenizer.
ENG_CHECKED eng_status trn_evaluation_open_model(const char *dir, const char *device, trn_evaluation *out,
                                                 eng_error *error);
// *out is closed with trn_evaluation_close, which takes a zeroed struct as well.
ENG_CHECKED eng_status trn_evaluation_open(const char *dir, const trn_evaluation_options *options, trn_evaluation *out,
                                           eng_error *error);
void trn_evaluation_close(trn_evaluation *evaluation);
// Token shards as rows or windows for a model; tokenizer: the digest that they must have, NULL: any.
ENG_CHECKED eng_status trn_evaluation_open_data(const eng_model *model, const trn_strings *data, int32_t context,
                                                const uint8_t *tokenizer, trn_dataset **out, eng_error *error);
int32_t trn_evaluation_context(const eng_model *model); // the trained length, where it is known
// All windows; data without a counted target is ENG_INVALID. Progress goes to the terminal.
ENG_CHECKED eng_status trn_evaluation_score(trn_evaluation *evaluation, kern_solver solver, trn_scores *scores,
                                            eng_error *error);
double trn_mean_loss(const trn_scores *scores); // nats a target

#endif

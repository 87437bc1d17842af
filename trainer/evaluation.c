// SPDX-License-Identifier: Apache-2.0
// Opening a checkpoint with data to be scored on; see evaluation.h.
// What was opened before a failure is closed by trn_evaluation_close, which takes a struct at any stage of its making.
#include "trainer/evaluation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"

enum { MAX_BATCH_ROWS = 64 };

static eng_status open_checkpoint(trn_evaluation *e, const char *dir, const char *device, eng_error *error) {
    eng_status status = eng_open_device(&(kern_device_options){.name = device}, NULL, 0, &e->device, error);
    if (status == ENG_OK)
        status = eng_checkpoint_open(dir, &e->checkpoint, error);
    if (status != ENG_OK)
        return status;
    e->model = eng_checkpoint_model(e->checkpoint);
    status = eng_weights_load(e->checkpoint, e->device, false, &e->weights, error);
    char *tokenizer = eng_join_path(dir, "tokenizer.json");
    if (status == ENG_OK && !tokenizer)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (status == ENG_OK && access(tokenizer, F_OK) == 0)
        status = eng_tokenizer_open(dir, e->model->config.vocab_size, &e->tokenizer, error);
    free(tokenizer);
    return status;
}

int32_t trn_evaluation_context(const eng_model *model) {
    return (int32_t)(model->config.trained_length > 0 ? model->config.trained_length : 1024);
}

eng_status trn_evaluation_open_data(const eng_model *model, const trn_strings *data, int32_t context,
                                    const uint8_t *tokenizer, trn_dataset **out, eng_error *error) {
    const eng_config *config = &model->config;
    const trn_dataset_options options = {.name = data->item,
                                         .names = data->count,
                                         .context = context,
                                         .bos_id = config->bos_id,
                                         .eos_id = config->eos_count > 0 ? config->eos_id[0] : -1,
                                         .vocab_size = config->vocab_size,
                                         .tokenizer = tokenizer};
    return trn_dataset_open(&options, out, error);
}

static eng_status open_data(trn_evaluation *e, const trn_evaluation_options *o, eng_error *error) {
    const uint8_t *digest = e->tokenizer ? eng_tokenizer_digest(e->tokenizer) : NULL;
    e->context = o->context > 0 ? (int32_t)o->context : trn_evaluation_context(e->model);
    eng_status status = trn_evaluation_open_data(e->model, &o->data, e->context, digest, &e->dataset, error);
    if (status == ENG_OK)
        status = trn_windows_choose(e->dataset, e->context, o->windows, e->tokenizer, &e->windows, error);
    if (status == ENG_OK && o->by_document) {
        e->document = calloc((size_t)trn_dataset_documents(e->dataset), sizeof *e->document);
        if (!e->document)
            status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the documents' scores");
    }
    return status;
}

static eng_status open_teacher(trn_evaluation *e, const char *dir, int32_t tokens, int32_t rows, eng_error *error) {
    eng_status status = trn_teacher_open(dir, &e->teacher, error);
    if (status == ENG_OK)
        status = trn_teacher_check(&e->teacher, e->model, e->tokenizer, trn_dataset_tokenizer(e->dataset), error);
    return status == ENG_OK ? trn_teacher_load(&e->teacher, e->weights, tokens, rows, error) : status;
}

static eng_status create_batch(trn_evaluation *e, const trn_evaluation_options *o, eng_error *error) {
    int32_t tokens = o->batch_tokens > e->context ? (int32_t)o->batch_tokens : e->context;
    int32_t rows = tokens < MAX_BATCH_ROWS ? tokens : MAX_BATCH_ROWS;
    eng_status status = o->teacher ? open_teacher(e, o->teacher, tokens, rows, error) : ENG_OK;
    trn_runner_options options = {.plan = {.kind = ENG_PLAN_SCORE,
                                           .max_tokens = tokens,
                                           .max_rows = rows,
                                           .teacher = e->teacher.model,
                                           .temperature = 1},
                                  .also = {e->teacher.plan}};
    if (status == ENG_OK)
        status = trn_runner_create(e->weights, &options, &e->runner, error);
    if (status == ENG_OK)
        status = trn_batch_create(&e->runner, &e->batch, error);
    if (e->teacher.checkpoint)
        e->batch.teacher = &e->teacher;
    return status;
}

eng_status trn_evaluation_open_model(const char *dir, const char *device, trn_evaluation *out, eng_error *error) {
    memset(out, 0, sizeof *out);
    trn_progress_begin(&out->progress);
    eng_status status = open_checkpoint(out, dir, device, error);
    if (status != ENG_OK)
        trn_evaluation_close(out);
    return status;
}

eng_status trn_evaluation_open(const char *dir, const trn_evaluation_options *options, trn_evaluation *out,
                               eng_error *error) {
    eng_status status = trn_evaluation_open_model(dir, options->device, out, error);
    if (status == ENG_OK)
        status = open_data(out, options, error);
    if (status == ENG_OK)
        status = create_batch(out, options, error);
    if (status != ENG_OK)
        trn_evaluation_close(out);
    return status;
}

void trn_evaluation_close(trn_evaluation *e) {
    trn_batch_free(&e->batch);
    trn_runner_free(&e->runner);
    trn_windows_free(&e->windows);
    free(e->document);
    trn_dataset_close(e->dataset);
    eng_tokenizer_close(e->tokenizer);
    trn_teacher_close(&e->teacher);
    eng_weights_free(e->weights);
    eng_checkpoint_close(e->checkpoint);
    kern_device_close(e->device);
    memset(e, 0, sizeof *e);
}

eng_status trn_evaluation_score(trn_evaluation *e, kern_solver solver, trn_scores *scores, eng_error *error) {
    eng_status status = trn_score_windows(&e->batch, e->dataset, &e->windows, solver, e->document, trn_progress_part,
                                          &e->progress, scores, error);
    trn_progress_end(&e->progress);
    if (status == ENG_OK && scores->targets == 0)
        return eng_fail(error, ENG_INVALID, "the data has no counted target");
    return status;
}

double trn_mean_loss(const trn_scores *scores) {
    return scores->targets > 0 ? scores->loss / (double)scores->targets : NAN;
}

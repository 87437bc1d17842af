// SPDX-License-Identifier: Apache-2.0
// Opening, resuming and closing a training run; see run.h.
// Parts are opened in the order of their needs and closed in reverse; a run that failed half way closes the same way.
#include "trainer/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/tokenizer.h"
#include "trainer/run_loops.h"
#include "trainer/start.h"
#include "trainer/tokenizer.h"

enum { MAX_NAMES = 256 };

// -------------------------------------------------------------------------------------------------------------- model

static void set_default_integer(trn_json *json, const char *key, int64_t value) {
    if (value >= 0 && !trn_json_has(json, key))
        trn_json_set_integer(json, key, value);
}

// What [model] leaves open follows from the teacher, the tokenizer and the context.
static void set_model_defaults(trn_run_config *config, const trn_teacher *teacher, const eng_tokenizer *tokenizer) {
    trn_json *model = config->model;
    set_default_integer(model, "max_position_embeddings", config->context);
    set_default_integer(model, "trained_length", config->context);
    if (teacher->model)
        set_default_integer(model, "vocab_size", teacher->model->config.vocab_size);
    if (!tokenizer)
        return;
    int32_t end = eng_tokenizer_special(tokenizer, TRN_END_OF_TEXT), bos = eng_tokenizer_bos(tokenizer);
    set_default_integer(model, "vocab_size", eng_tokenizer_size(tokenizer));
    set_default_integer(model, "bos_token_id", bos >= 0 ? bos : end);
    set_default_integer(model, "eos_token_id", end);
}

static eng_status create_model(trn_run *run, eng_error *error) {
    char *text = trn_json_text(run->config.model, true);
    if (!text)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the model's configuration");
    eng_config parsed;
    eng_status status = eng_config_parse(text, strlen(text), "[model]", &parsed, error);
    free(text);
    return status == ENG_OK ? eng_model_create(&parsed, &run->model, error) : status;
}

static eng_status check_vocabulary(const trn_run *run, const eng_tokenizer *tokenizer, eng_error *error) {
    if (tokenizer && eng_tokenizer_size(tokenizer) > run->model->config.vocab_size)
        return eng_fail(error, ENG_INVALID, "model.vocab_size: %d, but the tokenizer has %d ids",
                        run->model->config.vocab_size, eng_tokenizer_size(tokenizer));
    return ENG_OK;
}

// --------------------------------------------------------------------------------------------------------------- data

static eng_status open_data(const trn_run *run, const char *list, const uint8_t *tokenizer, trn_dataset **out,
                            eng_error *error) {
    const eng_config *config = &run->model->config;
    const char *name[MAX_NAMES];
    char *copy = strdup(list), *rest = NULL;
    int names = 0;
    if (!copy)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the names of shards");
    for (char *word = strtok_r(copy, " \t", &rest); word && names < MAX_NAMES; word = strtok_r(NULL, " \t", &rest))
        name[names++] = word;
    trn_dataset_options options = {.name = name,
                                   .names = names,
                                   .context = (int32_t)run->config.context,
                                   .bos_id = config->bos_id,
                                   .eos_id = config->eos_count > 0 ? config->eos_id[0] : -1,
                                   .vocab_size = config->vocab_size,
                                   .tokenizer = tokenizer};
    eng_status status = trn_dataset_open(&options, out, error);
    free(copy);
    return status;
}

static eng_status open_datasets(trn_run *run, const eng_tokenizer *tokenizer, eng_error *error) {
    const uint8_t *digest = tokenizer ? eng_tokenizer_digest(tokenizer) : NULL;
    eng_status status = open_data(run, run->config.train, digest, &run->train, error);
    if (status == ENG_OK && run->config.valid[0])
        status = open_data(run, run->config.valid, trn_dataset_tokenizer(run->train), &run->valid, error);
    if (status == ENG_OK && run->teacher.checkpoint)
        status = trn_teacher_check(&run->teacher, run->model, tokenizer, trn_dataset_tokenizer(run->train), error);
    run->row = calloc((size_t)run->own_rows, sizeof *run->row);
    if (status == ENG_OK && !run->row)
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the rows of a step");
    for (int32_t i = 0; status == ENG_OK && i < run->own_rows; i++)
        status = trn_row_create((int32_t)run->config.context, &run->row[i], error);
    return status;
}

// -------------------------------------------------------------------------------------------------------------- plans

static eng_status create_batch(trn_run *run, eng_error *error) {
    eng_status status = trn_batch_create(&run->runner, &run->batch, error);
    if (run->teacher.checkpoint)
        run->batch.teacher = &run->teacher;
    return status;
}

static eng_status create_plans(trn_run *run, eng_error *error) {
    int64_t tokens = run->config.context * run->micro_rows;
    if (tokens > 1 << 26)
        return eng_fail(error, ENG_INVALID, "train.micro_rows: %lld tokens at once are too many", (long long)tokens);
    eng_plan_options options = {.kind = ENG_PLAN_SCORE,
                                .max_tokens = (int32_t)tokens,
                                .max_rows = run->micro_rows,
                                .recompute = (eng_recompute)run->config.recompute,
                                .backward_tolerance = (float)run->config.backward_tolerance,
                                .teacher = run->teacher.model,
                                .temperature = (float)run->config.temperature,
                                .loss_share = (float)run->config.loss_share,
                                .divergence_share = (float)run->config.divergence_share};
    eng_status status = trn_run_loop_options(run, &options, error);
    if (status == ENG_OK && run->teacher.checkpoint)
        status = trn_teacher_load(&run->teacher, run->weights, options.max_tokens, options.max_rows, error);
    if (status == ENG_OK)
        status = eng_plan_create(run->model, run->device, &options, &run->score_plan, error);
    if (status != ENG_OK)
        return status;
    options.kind = ENG_PLAN_TRAIN;
    trn_runner_options runner = {
        .plan = options, .max_boundaries = (int32_t)tokens, .also = {run->score_plan, run->teacher.plan}};
    status = trn_runner_create(run->weights, &runner, &run->runner, error);
    if (status != ENG_OK)
        return status;
    run->train_plan = run->runner.plan;
    return create_batch(run, error);
}

static eng_status create_optimizer(trn_run *run, eng_error *error) {
    const trn_run_config *config = &run->config;
    trn_adamw adamw = {.beta1 = config->beta1,
                       .beta2 = config->beta2,
                       .eps = config->eps,
                       .weight_decay = config->weight_decay,
                       .clip = config->clip,
                       .gate_alone = trn_run_trains_gate_alone(run),
                       .rounding = (kern_rounding)config->rounding,
                       .seed = (uint64_t)config->seed};
    run->schedule = (trn_schedule){.kind = (trn_schedule_kind)config->schedule,
                                   .peak = config->lr,
                                   .min_ratio = config->min_lr_ratio,
                                   .warmup = config->warmup_steps,
                                   .steps = config->steps,
                                   .decay_fraction = config->decay_fraction};
    eng_status status = trn_optimizer_create(run->weights, run->runner.stream, &adamw, run->train_plan->plan,
                                             run->ranks, &run->optimizer, error);
    if (status != ENG_OK)
        return status;
    const trn_blocks *blocks = &run->optimizer.blocks;
    run->block_end = calloc((size_t)blocks->count, sizeof *run->block_end);
    if (!run->block_end)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the blocks of the parameters");
    for (int32_t b = 0; b < blocks->count; b++)
        run->block_end[b] = blocks->block[b].final;
    return ENG_OK;
}

static kern_solver choose_solver(const trn_run *run) {
    const trn_run_config *config = &run->config;
    int32_t steps = (int32_t)config->solver_steps;
    if (steps == 0)
        steps = eng_model_training_steps(run->model);
    return (kern_solver){
        .mode = (int32_t)config->solver_mode, .max_steps = steps, .tolerance = (float)config->solver_tolerance};
}

// ------------------------------------------------------------------------------------------------------------- weights

static bool same_tensor(const eng_tensor *a, const eng_tensor *b) {
    return strcmp(a->name, b->name) == 0 && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, sizeof *a->shape * (size_t)a->ndim) == 0;
}

// A gate may be new to the weights that a run starts from.
static bool may_be_missing(const eng_model *model, int32_t tensor, bool starts) {
    return starts && (tensor == model->exit_gate || tensor == model->exit_bias);
}

static eng_status copy_weights(trn_run *run, const eng_weights *from, const char *dir, bool starts, eng_error *error) {
    const eng_model *model = run->model;
    kern_status status = KERN_OK;
    int32_t taken = 0;
    for (int32_t i = 0; status == KERN_OK && i < model->tensors; i++) {
        const int32_t own = eng_model_find(from->model, model->tensor[i].name);
        if (own < 0 && may_be_missing(model, i, starts))
            continue;
        if (own < 0 || !same_tensor(&model->tensor[i], &from->model->tensor[own]))
            return eng_fail(error, ENG_INVALID, "%s: not a checkpoint of this model: %s is missing or of another shape",
                            eng_path_tail(dir), model->tensor[i].name);
        status = kern_copy(run->runner.stream, run->weights->master[i], from->master[own],
                           sizeof(float) * (size_t)model->tensor[i].count);
        taken++;
    }
    if (status == KERN_OK && from->model->tensors != taken)
        return eng_fail(error, ENG_INVALID, "%s: has tensors that this model does not have", eng_path_tail(dir));
    if (status == KERN_OK)
        status = kern_synchronize(run->runner.stream);
    return eng_fail_kernel(error, status, "loading weights");
}

static eng_status start_weights(trn_run *run, const eng_weights *from, const char *dir, eng_error *error) {
    eng_error fault = {0};
    eng_status status = trn_start_weights(from, run->weights, run->runner.stream, &run->start, &fault);
    return status == ENG_OK ? status : eng_fail(error, status, "%s: %s", eng_path_tail(dir), fault.text);
}

typedef enum load { LOAD_RESUMED, LOAD_WARM, LOAD_FITTING } load;

static eng_status load_weights(trn_run *run, const char *dir, load load, eng_error *error) {
    eng_checkpoint *checkpoint = NULL;
    eng_weights *weights = NULL;
    eng_status status = eng_checkpoint_open(dir, &checkpoint, error);
    if (status == ENG_OK)
        status = eng_weights_load(checkpoint, run->device, true, &weights, error);
    if (status == ENG_OK)
        status = load == LOAD_FITTING ? start_weights(run, weights, dir, error)
                                      : copy_weights(run, weights, dir, load == LOAD_WARM, error);
    eng_weights_free(weights);
    eng_checkpoint_close(checkpoint);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- whole

eng_status trn_run_open_device(const trn_run_config *config, int32_t local, char *why, size_t why_size,
                               kern_device **out, eng_error *error) {
    char own[32];
    snprintf(own, sizeof own, "cuda:%d", local);
    const kern_device_options options = {.name = strcmp(config->device, "cuda") == 0 ? own : config->device,
                                         .threads = (int32_t)config->threads,
                                         .fast = config->precision == 1,
                                         .trains = true};
    return eng_open_device(&options, why, why_size, out, error);
}

static eng_status open_device(trn_run *run, eng_error *error) {
    eng_status status = trn_run_open_device(&run->config, trn_ranks_local(run->ranks), run->no_cuda,
                                            sizeof run->no_cuda, &run->device, error);
    return status == ENG_OK ? trn_ranks_use(run->ranks, run->device, error) : status;
}

static eng_status open_parts(trn_run *run, const eng_tokenizer *tokenizer, eng_error *error) {
    eng_status status = open_device(run, error);
    if (status == ENG_OK)
        status = create_model(run, error);
    if (status == ENG_OK)
        status = check_vocabulary(run, tokenizer, error);
    if (status == ENG_OK)
        status = open_datasets(run, tokenizer, error);
    if (status == ENG_OK)
        status = eng_weights_init(run->model, run->device, (uint64_t)run->config.seed, false, &run->weights, error);
    if (status == ENG_OK)
        status = create_plans(run, error);
    if (status == ENG_OK)
        status = create_optimizer(run, error);
    return status;
}

static void begin_state(trn_run *run) {
    run->solver = choose_solver(run);
    run->state = (trn_run_state){.seed = run->config.seed,
                                 .context = run->config.context,
                                 .batch_rows = run->batch_rows,
                                 .data_rows = trn_dataset_rows(run->train)};
    memcpy(run->state.teacher, run->teacher.digest, sizeof run->state.teacher);
}

// A rank's rows lie side by side in the step's, whatever their number.
static eng_status divide_rows(trn_run *run, eng_error *error) {
    const int32_t rank = trn_ranks_own(run->ranks), ranks = trn_ranks_count(run->ranks);
    run->batch_rows = (int32_t)(run->config.batch_tokens / run->config.context);
    run->first_row = (int32_t)((int64_t)run->batch_rows * rank / ranks);
    run->own_rows = (int32_t)((int64_t)run->batch_rows * (rank + 1) / ranks) - run->first_row;
    run->micro_rows = run->config.micro_rows < run->own_rows ? (int32_t)run->config.micro_rows : run->own_rows;
    if (run->batch_rows < ranks)
        return eng_fail(error, ENG_INVALID, "train.batch_tokens: a step of %d rows is too small for %d ranks",
                        run->batch_rows, ranks);
    return ENG_OK;
}

eng_status trn_run_open(trn_run_config *config, trn_ranks *ranks, trn_run *run, eng_error *error) {
    *run = (trn_run){.config = *config, .ranks = ranks};
    memset(config, 0, sizeof *config);
    const char *warm_start = run->config.warm_start;
    eng_tokenizer *tokenizer = NULL;
    eng_status status = divide_rows(run, error);
    if (status == ENG_OK && warm_start[0] && !run->config.base[0] && !trn_json_has(run->config.model, "model_type"))
        status = trn_run_config_set_base(&run->config, warm_start, error);
    if (status == ENG_OK)
        status = trn_run_config_merge_base(&run->config, error);
    if (status == ENG_OK && run->config.tokenizer[0])
        status = eng_tokenizer_open(run->config.tokenizer, 0, &tokenizer, error);
    if (status == ENG_OK && run->config.teacher[0])
        status = trn_teacher_open(run->config.teacher, &run->teacher, error);
    if (status == ENG_OK) {
        set_model_defaults(&run->config, &run->teacher, tokenizer);
        status = open_parts(run, tokenizer, error);
    }
    eng_tokenizer_close(tokenizer);
    if (status == ENG_OK)
        begin_state(run);
    else
        trn_run_close(run);
    return status;
}

eng_status trn_run_start(trn_run *run, eng_error *error) {
    if (run->config.warm_start[0])
        return load_weights(run, run->config.warm_start, LOAD_WARM, error);
    return run->config.start_from[0] ? load_weights(run, run->config.start_from, LOAD_FITTING, error) : ENG_OK;
}

// By its digest; borrowed from it.
static const char *name_teacher(const char *digest) {
    return digest[0] ? digest + ENG_DIGEST_HEX - 1 - 8 : "none";
}

eng_status trn_run_resume(trn_run *run, const char *dir, const trn_run_state *state, eng_error *error) {
    const struct {
        const char *what;
        int64_t saved, given;
    } same[] = {
        {"train.seed", state->seed, run->state.seed},
        {"data.context", state->context, run->state.context},
        {"rows a step (train.batch_tokens / data.context)", state->batch_rows, run->state.batch_rows},
        {"rows of the training data", state->data_rows, run->state.data_rows},
    };
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].saved != same[i].given)
            return eng_fail(error, ENG_INVALID, "%s: %s was %lld and is now %lld; the order of the data would change",
                            eng_path_tail(dir), same[i].what, (long long)same[i].saved, (long long)same[i].given);
    if (strcmp(state->teacher, run->state.teacher) != 0)
        return eng_fail(error, ENG_INVALID, "%s: teacher.model was %s and is now %s; train.warm_start begins anew",
                        eng_path_tail(dir), name_teacher(state->teacher), name_teacher(run->state.teacher));
    eng_status status = load_weights(run, dir, LOAD_RESUMED, error);
    if (status == ENG_OK)
        status = trn_run_load_moments(dir, state, &run->optimizer, error);
    if (status != ENG_OK)
        return status;
    run->optimizer.updates = state->updates;
    run->state = *state;
    return ENG_OK;
}

void trn_run_close(trn_run *run) {
    trn_ranks_leave(run->ranks);
    for (int32_t i = 0; run->row && i < run->own_rows; i++)
        trn_row_free(&run->row[i]);
    free(run->row);
    free(run->block_end);
    free(run->start);
    trn_optimizer_free(&run->optimizer);
    trn_batch_free(&run->batch);
    if (run->train_plan)
        run->runner.plan = run->train_plan;
    trn_runner_free(&run->runner);
    eng_plan_free(run->score_plan);
    trn_teacher_close(&run->teacher);
    trn_dataset_close(run->train);
    trn_dataset_close(run->valid);
    eng_weights_free(run->weights);
    eng_model_free(run->model);
    kern_device_close(run->device);
    trn_run_config_free(&run->config);
    memset(run, 0, sizeof *run);
}

eng_status trn_run_checkpoint(trn_run *run, const char *folder, eng_error *error) {
    const char *tokenizer = run->config.tokenizer[0] ? run->config.tokenizer : NULL;
    int64_t place = run->state.step * run->batch_rows;
    run->state.updates = run->optimizer.updates;
    run->state.epoch = place / run->state.data_rows;
    run->state.row = place % run->state.data_rows;
    return trn_run_save(folder, &run->state, run->weights, &run->optimizer, tokenizer, run->config.keep, error);
}

// SPDX-License-Identifier: Apache-2.0
// The model's speed, measured; see bench.h.
//
// Operations are the model's own (eng_model_flops), so the work of a chunk form beyond the step form counts as
// overhead. A training step is the forward pass, twice its products for the two gradients of each, and the second solve
// of every Mesa head.
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "trainer/bench.h"
#include "trainer/profile.h"
#include "trainer/progress.h"

// Ids that the model has never seen in this order; the cost of a token depends little on them.
static void random_ids(int32_t *ids, int32_t count, int32_t vocabulary) {
    for (int32_t i = 0; i < count; i++) {
        uint32_t word[4];
        eng_philox(1, 2, (uint64_t)i, word);
        ids[i] = (int32_t)(word[0] % (uint32_t)vocabulary);
    }
}

static double head_operations(const eng_model *model) {
    return 2.0 * (double)model->config.vocab_size * model->config.hidden_size;
}

// ------------------------------------------------------------------------------------------------------------- serving

eng_status trn_serve_bench_create(const eng_weights *weights, int32_t prompt, int32_t generated, trn_serve_bench *out,
                                  eng_error *error) {
    trn_serve_bench bench = {
        .weights = weights, .prompt = prompt, .generated = generated, .solver = trn_model_solver(weights->model)};
    trn_runner_options options = {
        .plan = {.kind = ENG_PLAN_SERVE, .max_tokens = prompt, .max_rows = 1, .max_logits = 1},
        .slots = 1,
        .slot_tokens = prompt + generated};
    bench.ids = malloc(sizeof *bench.ids * (size_t)prompt);
    eng_status status = bench.ids ? trn_runner_create(weights, &options, &bench.prefill, error)
                                  : eng_fail(error, ENG_NO_MEMORY, "out of memory for a prompt");
    options.plan.max_tokens = 1;
    if (status == ENG_OK)
        status = trn_runner_create(weights, &options, &bench.decode, error);
    if (status != ENG_OK) {
        trn_serve_bench_free(&bench);
        return status;
    }
    // Both run on the states and pages of the first.
    bench.decode.memory.state = bench.prefill.states;
    bench.decode.memory.pages = bench.prefill.pages;
    random_ids(bench.ids, prompt, weights->model->config.vocab_size);
    *out = bench;
    return ENG_OK;
}

void trn_serve_bench_free(trn_serve_bench *bench) {
    trn_runner_free(&bench->decode);
    trn_runner_free(&bench->prefill);
    free(bench->ids);
    *bench = (trn_serve_bench){0};
}

eng_status trn_bench_solver_steps(trn_runner *runner, double *steps, eng_error *error) {
    int32_t tokens = runner->rows->n_tokens;
    eng_compute sum = {0};
    *steps = 0;
    if (!runner->plan->solves.ref)
        return ENG_OK;
    kern_solve_sum *solves = malloc(sizeof *solves * (size_t)tokens);
    if (!solves)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the figures of %d tokens", tokens);
    eng_status status = trn_runner_read(runner, runner->plan->solves, solves, sizeof *solves * (size_t)tokens, error);
    if (status == ENG_OK) {
        eng_add_solves(solves, tokens, &sum);
        *steps = (double)sum.steps / (double)sum.solves;
    }
    free(solves);
    return status;
}

static eng_status run_row(trn_serve_bench *bench, trn_runner *runner, kern_row_kind kind, int64_t position,
                          const int32_t *ids, int32_t count, int32_t *next, eng_error *error) {
    trn_profile_begin(runner->profile);
    trn_runner_clear(runner);
    eng_status status = trn_runner_add_row(runner, kind, 0, position, ids, count, bench->solver, error);
    if (status != ENG_OK)
        return status;
    runner->rows->n_logits = 1;
    runner->rows->logits_token[0] = count - 1;
    runner->rows->sampler[0] = (kern_sampler){.forced = -1};
    status = trn_runner_run(runner, error);
    if (status == ENG_OK)
        status = trn_runner_read(runner, runner->plan->sampled, next, sizeof *next, error);
    trn_profile_end(runner->profile);
    return status;
}

static eng_status run_prefill(trn_serve_bench *bench, int32_t *next, trn_speed *speed, eng_error *error) {
    const eng_model *model = bench->weights->model;
    size_t stride = bench->prefill.rows->slot_stride;
    kern_status zeroed = kern_zero(bench->prefill.stream, bench->prefill.states, stride);
    if (zeroed != KERN_OK)
        return eng_fail_kernel(error, zeroed, "clearing a state");
    double start = trn_seconds();
    eng_status status = run_row(bench, &bench->prefill, KERN_ROW_PROMPT, 0, bench->ids, bench->prompt, next, error);
    double steps = 0;
    *speed = (trn_speed){.seconds = trn_seconds() - start, .tokens = bench->prompt};
    if (status == ENG_OK)
        status = trn_bench_solver_steps(&bench->prefill, &steps, error);
    double token = eng_model_flops(model, bench->prompt / 2.0, steps) - head_operations(model);
    speed->operations = bench->prompt * token + head_operations(model);
    speed->solver_steps = steps;
    return status;
}

eng_status trn_serve_bench_run(trn_serve_bench *bench, trn_speed *prefill, trn_speed *decode, eng_error *error) {
    int32_t id = 0;
    eng_status status = run_prefill(bench, &id, prefill, error);
    double start = trn_seconds();
    for (int32_t i = 0; status == ENG_OK && i < bench->generated; i++)
        status = run_row(bench, &bench->decode, KERN_ROW_GENERATED, bench->prompt + i, &id, 1, &id, error);
    const eng_model *model = bench->weights->model;
    *decode = (trn_speed){.seconds = trn_seconds() - start, .tokens = bench->generated};
    if (status == ENG_OK)
        status = trn_bench_solver_steps(&bench->decode, &decode->solver_steps, error);
    decode->operations =
        bench->generated * eng_model_flops(model, bench->prompt + bench->generated / 2.0, decode->solver_steps);
    double pages = (double)model->page_bytes / KERN_PAGE_TOKENS * (bench->prompt + bench->generated / 2.0);
    decode->bytes = bench->generated * ((double)bench->weights->bytes + 2.0 * (double)model->state_bytes + pages);
    return status;
}

// ------------------------------------------------------------------------------------------------------------ training

eng_status trn_train_bench_create(const eng_weights *weights, int32_t context, int32_t rows, trn_train_bench *bench,
                                  eng_error *error) {
    *bench = (trn_train_bench){.weights = weights, .context = context, .rows = rows};
    trn_runner_options options = {.plan = {.kind = ENG_PLAN_TRAIN, .max_tokens = context * rows, .max_rows = rows}};
    trn_adamw adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.1, .clip = 1};
    eng_status status = trn_runner_create(weights, &options, &bench->runner, error);
    if (status == ENG_OK)
        status = trn_batch_create(&bench->runner, &bench->batch, error);
    if (status == ENG_OK)
        status = trn_optimizer_create(weights, bench->runner.stream, &adamw, NULL, NULL, &bench->optimizer, error);
    if (status == ENG_OK)
        status = trn_row_create(context, &bench->row, error);
    if (status != ENG_OK) {
        trn_train_bench_free(bench);
        return status;
    }
    bench->solver = (kern_solver){
        .mode = KERN_SOLVE_TOLERANCE, .max_steps = eng_model_training_steps(weights->model), .tolerance = 1e-4F};
    random_ids(bench->row.id, context, weights->model->config.vocab_size);
    for (int32_t i = 0; i < context; i++)
        bench->row.target[i] = bench->row.id[(i + 1) % context];
    bench->row.length = bench->row.counted = context;
    return ENG_OK;
}

void trn_train_bench_free(trn_train_bench *bench) {
    trn_row_free(&bench->row);
    trn_optimizer_free(&bench->optimizer);
    trn_batch_free(&bench->batch);
    trn_runner_free(&bench->runner);
    memset(bench, 0, sizeof *bench);
}

static double mean_steps(const eng_compute *compute) {
    return compute->solves > 0 ? (double)compute->steps / (double)compute->solves : 0;
}

eng_status trn_train_bench_run(trn_train_bench *bench, trn_speed *speed, eng_error *error) {
    const eng_model *model = bench->weights->model;
    trn_profile *profile = bench->runner.profile;
    kern_stream *stream = bench->runner.stream;
    const int64_t count = bench->weights->count;
    double norm = 0, start = trn_seconds(), middle = bench->context / 2.0;
    bool usable = false;
    trn_profile_begin(profile);
    eng_status status = trn_optimizer_zero_gradients(&bench->optimizer, error);
    trn_profile_parameters(profile, stream, "clearing gradients", count, 1, 0);
    trn_batch_clear(&bench->batch);
    for (int32_t i = 0; status == ENG_OK && i < bench->rows; i++)
        status = trn_batch_add(&bench->batch, &bench->row, 1.0 / bench->context / bench->rows, bench->solver, error);
    trn_profile_piece(profile, NULL, TRN_PHASE_DATA, "rows into the batch", (kern_cost){0});
    if (status == ENG_OK)
        status = trn_batch_run(&bench->batch, error);
    if (status == ENG_OK)
        status = trn_optimizer_norm(&bench->optimizer, error);
    trn_profile_parameters(profile, stream, "gradient norm", count, 1, 2);
    if (status == ENG_OK)
        status = trn_optimizer_update(&bench->optimizer, 1e-4, error);
    trn_profile_parameters(profile, stream, "AdamW", count, 7, 15);
    if (status == ENG_OK)
        status = trn_optimizer_outcome(&bench->optimizer, &norm, &usable, error);
    trn_profile_end(profile);
    double forward = mean_steps(&bench->batch.solves), backward = mean_steps(&bench->batch.backward_solves);
    double plain = eng_model_flops(model, middle, 0);
    double token =
        eng_model_flops(model, middle, forward) + 2 * plain + eng_model_flops(model, middle, backward) - plain;
    *speed = (trn_speed){.seconds = trn_seconds() - start,
                         .tokens = (int64_t)bench->context * bench->rows,
                         .operations = token * bench->context * bench->rows,
                         .solver_steps = forward};
    return status;
}

// SPDX-License-Identifier: Apache-2.0
// Generating at several batch sizes on a device, beside the time that its memory needs: weights once a step, every
// state in and out. The rate of memory is that of the device copying a block far above its caches, measured in the same
// round. Prints a Markdown table of medians over the rounds.
//
// Every session is warmed up by generating, so that states are full and solvers have something to solve. A step is what
// the server does: row table over, plan, drawn ids back.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/bench.h"
#include "trainer/progress.h"

enum { WARM_UP_STEPS = 48, MOST_ROUNDS = 99 };

// --------------------------------------------------------------------------------------------------------- generating

void trn_decode_bench_free(trn_decode_bench *d) {
    if (d->device)
        kern_free_host(d->device, d->id);
    trn_runner_free(&d->runner);
    *d = (trn_decode_bench){0};
}

static eng_status decode_step(trn_decode_bench *d, eng_error *error) {
    trn_runner *runner = &d->runner;
    trn_runner_clear(runner);
    for (int32_t i = 0; i < d->batch; i++) {
        eng_status status =
            trn_runner_add_row(runner, KERN_ROW_GENERATED, i, d->position, &d->id[i], 1, d->solver, error);
        if (status != ENG_OK)
            return status;
        runner->rows->logits_token[i] = i;
        runner->rows->sampler[i] = (kern_sampler){.forced = -1};
    }
    runner->rows->n_logits = d->batch;
    d->position++;
    eng_status status = trn_runner_start(runner, error);
    return status == ENG_OK
               ? trn_runner_read(runner, runner->plan->sampled, d->id, sizeof *d->id * (size_t)d->batch, error)
               : status;
}

eng_status trn_decode_bench_run(trn_decode_bench *d, int32_t steps, eng_error *error) {
    eng_status status = ENG_OK;
    for (int32_t i = 0; i < steps && status == ENG_OK; i++)
        status = decode_step(d, error);
    return status;
}

eng_status trn_decode_bench_create(const eng_weights *weights, int32_t batch, int32_t most_steps, kern_solver solver,
                                   trn_decode_bench *out, eng_error *error) {
    trn_runner_options sizes = {
        .plan = {.kind = ENG_PLAN_SERVE, .max_tokens = batch, .max_rows = batch, .max_logits = batch},
        .slots = batch,
        .slot_tokens = WARM_UP_STEPS + most_steps};
    void *ids = NULL;
    if (kern_alloc_host(weights->device, sizeof(int32_t) * (size_t)batch, &ids))
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for %d ids", batch);
    trn_decode_bench d = {.device = weights->device, .solver = solver, .batch = batch, .id = ids};
    for (int32_t i = 0; i < batch; i++)
        d.id[i] = i % weights->model->config.vocab_size;
    eng_status status = trn_runner_create(weights, &sizes, &d.runner, error);
    if (status == ENG_OK)
        status = trn_decode_bench_run(&d, WARM_UP_STEPS, error);
    if (status == ENG_OK)
        *out = d;
    else
        trn_decode_bench_free(&d);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- table

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double trn_median(double *value, int count) {
    qsort(value, (size_t)count, sizeof *value, ascending);
    return count % 2 ? value[count / 2] : (value[count / 2 - 1] + value[count / 2]) / 2;
}

// Weights that a step reads: an embedding that is not also the head is read a row a token.
static double step_bytes(const eng_weights *weights, int32_t batch) {
    const eng_model *model = weights->model;
    double bytes = (double)weights->bytes + 2.0 * (double)model->state_bytes * batch;
    if (model->head != model->embed)
        bytes -= (double)kern_weight_bytes(weights->param[model->embed]);
    return bytes;
}

static eng_status print_batch(const eng_weights *weights, const trn_decode_options *options,
                              const trn_copy_probe *probe, int32_t batch, eng_error *error) {
    trn_decode_bench d = {0};
    double seconds[MOST_ROUNDS], share[MOST_ROUNDS], rates[MOST_ROUNDS], steps = 0;
    eng_status status =
        trn_decode_bench_create(weights, batch, options->steps * options->rounds, options->solver, &d, error);
    for (int round = 0; round < options->rounds && status == ENG_OK; round++) {
        status = trn_copy_probe_run(probe, &rates[round], error);
        double start = trn_seconds();
        if (status == ENG_OK)
            status = trn_decode_bench_run(&d, options->steps, error);
        seconds[round] = (trn_seconds() - start) / options->steps;
        share[round] = step_bytes(weights, batch) / rates[round] / seconds[round];
    }
    if (status == ENG_OK)
        status = trn_bench_solver_steps(&d.runner, &steps, error);
    if (status == ENG_OK) {
        double step = trn_median(seconds, options->rounds), rate = trn_median(rates, options->rounds);
        double middle = trn_median(share, options->rounds); // sorts: the range stands at the ends
        printf("| %d | %.0f | %.1f | %.1f | %.2f (%.2f-%.2f) | %.1f |\n", batch, batch / step, 1e6 * step,
               1e6 * step_bytes(weights, batch) / rate, middle, share[0], share[options->rounds - 1], steps);
        fflush(stdout);
    }
    trn_decode_bench_free(&d);
    return status;
}

eng_status trn_bench_decode(const eng_weights *weights, const trn_decode_options *options, eng_error *error) {
    trn_copy_probe probe;
    double rate = 0;
    if (options->rounds < 1 || options->rounds > MOST_ROUNDS || options->steps < 1)
        return eng_fail(error, ENG_INVALID, "rounds: 1 to %d, with at least one step each", (int)MOST_ROUNDS);
    eng_status status = trn_copy_probe_create(weights->device, &probe, error);
    if (status == ENG_OK)
        status = trn_copy_probe_run(&probe, &rate, error); // the first one pays for first touches
    if (status == ENG_OK)
        status = trn_copy_probe_run(&probe, &rate, error);
    if (status == ENG_OK) {
        printf("%s: copying %.0f GB/s; weights %.1f MB, a state %.3f MB\n\n",
               kern_device_describe(weights->device)->description, 1e-9 * rate, 1e-6 * (double)weights->bytes,
               1e-6 * (double)weights->model->state_bytes);
        puts("| sessions | tokens/s | us a step | memory needs us | share (range) | solver steps |\n"
             "|---|---|---|---|---|---|");
    }
    for (int i = 0; i < options->batches && status == ENG_OK; i++)
        status = print_batch(weights, options, &probe, options->batch[i], error);
    trn_copy_probe_free(&probe);
    return status;
}

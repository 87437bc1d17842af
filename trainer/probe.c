// SPDX-License-Identifier: Apache-2.0
// Runs a checkpoint on given ids; see probe.h. The logits come from a serving plan and the gradients from a training
// plan, so a comparison with expected values covers what the server and the trainer run.
#include "trainer/probe.h"

#include <math.h>
#include <string.h>

#include "trainer/runner.h"

eng_status trn_probe_open(const char *dir, const char *device, bool trainable, trn_probe *out, eng_error *error) {
    trn_probe probe = {0};
    char reason[160] = "";
    kern_status opened = kern_device_open(&(kern_device_options){.name = device}, &probe.device, reason, sizeof reason);
    if (opened != KERN_OK)
        return eng_fail(error, ENG_DEVICE, "device %s: %s", device, reason[0] ? reason : kern_status_text(opened));
    eng_status status = eng_checkpoint_open(dir, &probe.checkpoint, error);
    if (status == ENG_OK) {
        probe.model = eng_checkpoint_model(probe.checkpoint);
        status = eng_weights_load(probe.checkpoint, probe.device, trainable, &probe.weights, error);
    }
    if (status != ENG_OK) {
        trn_probe_close(&probe);
        return status;
    }
    *out = probe;
    return ENG_OK;
}

void trn_probe_close(trn_probe *probe) {
    eng_weights_free(probe->weights);
    eng_checkpoint_close(probe->checkpoint);
    kern_device_close(probe->device);
    memset(probe, 0, sizeof *probe);
}

// Reads ids[first .. first + count) as one row of slot 0 and writes the logits of each.
static eng_status run_piece(trn_runner *runner, kern_row_kind kind, const int32_t *ids, int32_t first, int32_t count,
                            kern_solver solver, float *logits, eng_error *error) {
    size_t vocabulary = (size_t)runner->plan->model->config.vocab_size;
    trn_runner_clear(runner);
    eng_status status = trn_runner_add_row(runner, kind, 0, first, ids + first, count, solver, error);
    if (status != ENG_OK)
        return status;
    runner->rows->n_logits = count;
    for (int32_t i = 0; i < count; i++) {
        runner->rows->logits_token[i] = i;
        runner->rows->sampler[i] = (kern_sampler){.forced = -1};
    }
    status = trn_runner_run(runner, error);
    if (status != ENG_OK)
        return status;
    return trn_runner_read(runner, runner->plan->logits, logits + (size_t)first * vocabulary,
                           sizeof(float) * vocabulary * (size_t)count, error);
}

eng_status trn_probe_logits(trn_probe *probe, const int32_t *ids, int32_t count, int32_t split, kern_solver solver,
                            float *logits, eng_error *error) {
    int32_t chunk = kern_device_describe(probe->device)->chunk;
    trn_runner runner = {0};
    trn_runner_options options = {
        .plan = {.kind = ENG_PLAN_SERVE, .max_tokens = chunk, .max_rows = 1, .max_logits = chunk},
        .slots = 1,
        .slot_tokens = count};
    eng_status status = trn_runner_create(probe->weights, &options, &runner, error);
    for (int32_t first = 0; status == ENG_OK && first < split; first += chunk) {
        int32_t length = split - first < chunk ? split - first : chunk;
        status = run_piece(&runner, KERN_ROW_PROMPT, ids, first, length, solver, logits, error);
    }
    for (int32_t first = split; status == ENG_OK && first < count; first++)
        status = run_piece(&runner, KERN_ROW_GENERATED, ids, first, 1, solver, logits, error);
    trn_runner_free(&runner);
    return status;
}

static eng_status run_training_row(trn_probe *probe, trn_runner *runner, const int32_t *ids, int32_t pairs,
                                   kern_solver solver, eng_error *error) {
    eng_status status = trn_runner_add_row(runner, KERN_ROW_PROMPT, -1, 0, ids, pairs, solver, error);
    if (status != ENG_OK)
        return status;
    for (int32_t i = 0; i < pairs; i++) {
        runner->rows->target[i] = ids[i + 1];
        runner->rows->target_weight[i] = 1.0F / (float)pairs;
    }
    runner->rows->merge = true;
    kern_status zeroed =
        kern_zero(runner->stream, probe->weights->grads, sizeof(float) * (size_t)probe->weights->count);
    if (zeroed != KERN_OK)
        return eng_fail_kernel(error, zeroed, "clearing gradients");
    return trn_runner_run(runner, error);
}

eng_status trn_probe_gradients(trn_probe *probe, const int32_t *ids, int32_t count, kern_solver solver, double *loss,
                               eng_error *error) {
    if (count < 2)
        return eng_fail(error, ENG_INVALID, "a loss needs at least two ids");
    int32_t pairs = count - 1;
    trn_runner runner = {0};
    trn_runner_options options = {.plan = {.kind = ENG_PLAN_TRAIN, .max_tokens = pairs, .max_rows = 1}};
    eng_status status = trn_runner_create(probe->weights, &options, &runner, error);
    if (status == ENG_OK)
        status = run_training_row(probe, &runner, ids, pairs, solver, error);
    *loss = 0;
    for (int32_t i = 0; status == ENG_OK && i < pairs; i++) {
        kern_ptr one = {.ref = runner.plan->loss.ref + sizeof(float) * (uint64_t)i};
        float token_loss = 0;
        status = trn_runner_read(&runner, one, &token_loss, sizeof token_loss, error);
        *loss += (double)token_loss / pairs;
    }
    trn_runner_free(&runner);
    return status;
}

double trn_mean_cross_entropy(const float *logits, const int32_t *ids, int32_t count, int32_t vocabulary) {
    double total = 0;
    for (int32_t t = 0; t + 1 < count; t++) {
        const float *row = logits + (size_t)t * (size_t)vocabulary;
        double top = -INFINITY, sum = 0;
        for (int32_t i = 0; i < vocabulary; i++)
            top = fmax(top, (double)row[i]);
        for (int32_t i = 0; i < vocabulary; i++)
            sum += exp((double)row[i] - top);
        total += top + log(sum) - (double)row[ids[t + 1]];
    }
    return total / (count - 1);
}

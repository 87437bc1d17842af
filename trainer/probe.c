// SPDX-License-Identifier: Apache-2.0
// Runs a checkpoint on given ids; see probe.h. The logits come from a serving plan and the gradients from a training
// plan, so a comparison with expected values covers what the server and the trainer run.
#include "trainer/probe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/progress.h"
#include "trainer/runner.h"

eng_status trn_probe_open(const char *dir, const char *device, bool trainable, kern_storage storage, trn_probe *out,
                          eng_error *error) {
    trn_probe probe = {0};
    eng_status status = eng_open_device(&(kern_device_options){.name = device}, NULL, 0, &probe.device, error);
    if (status != ENG_OK)
        return status;
    status = trn_check_storage(probe.device, storage, error);
    if (status == ENG_OK)
        status = eng_checkpoint_open(dir, &probe.checkpoint, error);
    if (status == ENG_OK) {
        eng_checkpoint_store_states(probe.checkpoint, storage);
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
    free(probe->gradients);
    eng_weights_free(probe->weights);
    eng_checkpoint_close(probe->checkpoint);
    kern_device_close(probe->device);
    memset(probe, 0, sizeof *probe);
}

// Reads ids[0 .. count) as one row of slot 0 from `position` on and writes the logits of the last `wanted` of them.
static eng_status run_piece(trn_runner *runner, kern_row_kind kind, const int32_t *ids, int64_t position, int32_t count,
                            kern_solver solver, int32_t wanted, float *logits, eng_error *error) {
    size_t vocabulary = (size_t)runner->plan->model->config.vocab_size;
    trn_runner_clear(runner);
    eng_status status = trn_runner_add_row(runner, kind, 0, position, ids, count, solver, error);
    if (status != ENG_OK)
        return status;
    runner->rows->n_logits = wanted;
    for (int32_t i = 0; i < wanted; i++) {
        runner->rows->logits_token[i] = count - wanted + i;
        runner->rows->sampler[i] = (kern_sampler){.forced = -1};
    }
    status = trn_runner_run(runner, error);
    if (status != ENG_OK || wanted == 0)
        return status;
    return trn_runner_read(runner, runner->plan->logits, logits, sizeof(float) * vocabulary * (size_t)wanted, error);
}

static eng_status create_runner(trn_probe *probe, int32_t count, trn_runner *runner, eng_error *error) {
    const int32_t chunk = kern_device_describe(probe->device)->chunk;
    const trn_runner_options options = {
        .plan = {.kind = ENG_PLAN_SERVE, .max_tokens = chunk, .max_rows = 1, .max_logits = chunk},
        .slots = 1,
        .slot_tokens = count};
    return trn_runner_create(probe->weights, &options, runner, error);
}

// How many ids the next piece has: a chunk of the prompt, or one that is generated.
static int32_t piece_of(const trn_probe *probe, int32_t first, int32_t split, int32_t end) {
    const int32_t chunk = kern_device_describe(probe->device)->chunk, last = split < end ? split : end;
    return first >= split ? 1 : last - first < chunk ? last - first : chunk;
}

eng_status trn_check_target(const char *from, const char *out, eng_error *error) {
    struct stat read, written;
    if (!out)
        return eng_fail(error, ENG_INVALID, "--out is needed");
    if (stat(from, &read) == 0 && stat(out, &written) == 0 && read.st_dev == written.st_dev &&
        read.st_ino == written.st_ino)
        return eng_fail(error, ENG_INVALID, "--out: %s is what is read; another folder is needed", eng_path_tail(out));
    return eng_checkpoint_check_target(out, error);
}

eng_status trn_probe_logits(trn_probe *probe, const int32_t *ids, int32_t count, int32_t split, kern_solver solver,
                            float *logits, eng_error *error) {
    const size_t vocabulary = (size_t)probe->model->config.vocab_size;
    trn_runner runner = {0};
    eng_status status = create_runner(probe, count, &runner, error);
    for (int32_t first = 0, length; status == ENG_OK && first < count; first += length) {
        length = piece_of(probe, first, split, count);
        status = run_piece(&runner, first < split ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, ids + first, first, length,
                           solver, length, logits + (size_t)first * vocabulary, error);
    }
    trn_runner_free(&runner);
    return status;
}

eng_status trn_probe_looks(trn_probe *probe, const int32_t *ids, int32_t split, kern_solver solver,
                           const trn_probe_look *looks, int32_t n, eng_error *error) {
    trn_runner runner = {0};
    eng_status status = create_runner(probe, looks[n - 1].after, &runner, error);
    int32_t first = 0;
    for (int32_t i = 0; i < n; i++) {
        for (int32_t length; status == ENG_OK && first < looks[i].after; first += length) {
            length = piece_of(probe, first, split, looks[i].after);
            status = run_piece(&runner, first < split ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, ids + first, first,
                               length, solver, first + length == looks[i].after, looks[i].logits, error);
        }
        if (status == ENG_OK) {
            kern_status copied = kern_download(runner.stream, looks[i].state, runner.states, probe->model->state_bytes);
            if (copied == KERN_OK)
                copied = kern_synchronize(runner.stream);
            status = copied == KERN_OK ? ENG_OK : eng_fail_kernel(error, copied, "reading a state");
        }
    }
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

static eng_status keep_gradients(trn_probe *probe, trn_runner *runner, eng_error *error) {
    const eng_weights *weights = probe->weights;
    const size_t bytes = sizeof(float) * (size_t)weights->count;
    if (!probe->gradients && !(probe->gradients = malloc(bytes)))
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for gradients");
    kern_status copied = kern_download(runner->stream, probe->gradients, weights->grads, bytes);
    if (copied == KERN_OK)
        copied = kern_synchronize(runner->stream);
    return eng_fail_kernel(error, copied, "reading gradients");
}

const float *trn_probe_gradient(const trn_probe *probe, int32_t tensor) {
    return probe->gradients + (probe->weights->grad[tensor] - probe->weights->grads);
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
    if (status == ENG_OK)
        status = keep_gradients(probe, &runner, error);
    *loss = 0;
    for (int32_t i = 0; status == ENG_OK && i < pairs; i++) {
        kern_ptr one = {.ref = runner.plan->loss.ref + sizeof(float) * (uint64_t)i};
        float token_loss = 0;
        status = trn_runner_read(&runner, one, &token_loss, sizeof token_loss, error);
        *loss += (double)token_loss / pairs;
    }
    *loss = trn_unsigned_nan(*loss);
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

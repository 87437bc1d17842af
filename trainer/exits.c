// SPDX-License-Identifier: Apache-2.0
// Figures of exits; see exits.h.
// Planes come over one loop at a time, into memory of one batch.
#include "trainer/exits.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double all_at_one = 0.95, all_alike = 0.98;

// Plane `loop` of a plan's planes.
static eng_status read_plane(trn_runner *runner, kern_ptr planes, int32_t loop, float *out, eng_error *error) {
    const uint64_t bytes = sizeof(float) * (uint64_t)runner->plan->loop_stride;
    const kern_ptr at = {.ref = planes.ref + (uint64_t)loop * bytes};
    return trn_runner_read(runner, at, out, sizeof *out * (size_t)runner->rows->n_tokens, error);
}

// values (loops, tokens)
static eng_status read_planes(trn_runner *runner, kern_ptr planes, float *values, eng_error *error) {
    eng_status status = ENG_OK;
    for (int32_t loop = 0; status == ENG_OK && loop < runner->plan->model->config.loop.loops; loop++)
        status = read_plane(runner, planes, loop, values + (size_t)loop * (size_t)runner->rows->n_tokens, error);
    return status;
}

static void add_token(trn_exits *sum, const float *probability, size_t stride) {
    int32_t best = 0;
    for (int32_t r = 0; r < sum->loops; r++) {
        const double p = (double)probability[(size_t)r * stride];
        sum->probability[r] += p;
        sum->entropy -= p > 0 ? p * log(p) : 0;
        best = probability[(size_t)r * stride] > probability[(size_t)best * stride] ? r : best;
    }
    sum->likeliest[best]++;
}

static void add_targets(trn_exits *sum, const kern_rows *rows, const float *losses, const float *probabilities) {
    const size_t stride = (size_t)rows->n_tokens;
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        if (rows->target[t] < 0)
            continue;
        sum->targets++;
        for (int32_t r = 0; r < sum->loops; r++)
            sum->loss[r] += (double)losses[(size_t)r * stride + (size_t)t];
        if (sum->gated)
            add_token(sum, probabilities + t, stride);
    }
}

eng_status trn_exits_add(trn_exits *sum, trn_runner *runner, eng_error *error) {
    const eng_plan *plan = runner->plan;
    if (plan->loop_loss.ref == 0)
        return ENG_OK;
    sum->loops = plan->model->config.loop.loops;
    sum->gated = plan->exit_probability.ref != 0;
    const size_t floats = (size_t)sum->loops * (size_t)runner->rows->n_tokens;
    float *losses = malloc(2 * floats * sizeof *losses + 1);
    if (!losses)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the losses of %d loops", sum->loops);
    float *probabilities = losses + floats;
    eng_status status = read_planes(runner, plan->loop_loss, losses, error);
    if (status == ENG_OK && sum->gated)
        status = read_planes(runner, plan->exit_probability, probabilities, error);
    if (status == ENG_OK)
        add_targets(sum, runner->rows, losses, probabilities);
    free(losses);
    return status;
}

void trn_exits_merge(trn_exits *sum, const trn_exits *part) {
    sum->loops = part->loops > sum->loops ? part->loops : sum->loops; // 0 where nothing was added
    sum->gated |= part->gated;
    sum->targets += part->targets;
    sum->entropy += part->entropy;
    for (int32_t r = 0; r < part->loops; r++) {
        sum->loss[r] += part->loss[r];
        sum->probability[r] += part->probability[r];
        sum->likeliest[r] += part->likeliest[r];
    }
}

static void write_means(const trn_exits *exits, const char *prefix, const char *name, const double *sum,
                        trn_json *line) {
    char key[64];
    double mean[ENG_MAX_LOOPS];
    for (int32_t r = 0; r < exits->loops; r++)
        mean[r] = sum[r] / (double)exits->targets;
    snprintf(key, sizeof key, "%s%s", prefix, name);
    trn_json_set_reals(line, key, mean, exits->loops);
}

void trn_exits_write(const trn_exits *exits, const char *prefix, trn_json *line) {
    char key[64];
    double likeliest[ENG_MAX_LOOPS];
    if (exits->loops == 0 || exits->targets == 0)
        return;
    write_means(exits, prefix, "loop_loss", exits->loss, line);
    if (!exits->gated)
        return;
    for (int32_t r = 0; r < exits->loops; r++)
        likeliest[r] = (double)exits->likeliest[r];
    write_means(exits, prefix, "exit_probability", exits->probability, line);
    write_means(exits, prefix, "exit_likeliest", likeliest, line);
    snprintf(key, sizeof key, "%sexit_entropy", prefix);
    trn_json_set_real(line, key, exits->entropy / (double)exits->targets);
}

bool trn_exits_collapsed(const trn_exits *exits) {
    if (!exits->gated || exits->loops < 2 || exits->targets == 0)
        return false;
    const double targets = (double)exits->targets;
    for (int32_t r = 0; r < exits->loops; r++)
        if (exits->probability[r] > all_at_one * targets)
            return true;
    return exits->entropy / targets > all_alike * log(exits->loops);
}

// SPDX-License-Identifier: Apache-2.0
// The [loop] section of a run; see run_loops.h.
// Lists are numbers with white space between, one a loop. A prior is brought to a sum of 1 first.
#include "trainer/run_loops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/options.h"

static eng_status read_list(const char *key, const char *text, int32_t loops, double *out, eng_error *error) {
    char *copy = strdup(text), *rest = NULL;
    int32_t count = 0;
    eng_status status = copy ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a list");
    for (char *word = copy ? strtok_r(copy, " \t", &rest) : NULL; status == ENG_OK && word;
         word = strtok_r(NULL, " \t", &rest), count++)
        if (count < loops)
            status = trn_parse_real(key, word, &out[count], error);
    free(copy);
    if (status == ENG_OK && count != loops)
        return eng_fail(error, ENG_INVALID, "%s: has %d numbers, the model %d loops", key, count, loops);
    for (int32_t i = 0; status == ENG_OK && i < loops; i++)
        if (!(out[i] >= 0 && out[i] <= 1e6))
            return eng_fail(error, ENG_INVALID, "%s: %g is not in 0..1e6", key, out[i]);
    return status;
}

static eng_status set_weights(const trn_run *run, eng_plan_options *options, eng_error *error) {
    const int32_t loops = run->model->config.loop.loops;
    double weight[ENG_MAX_LOOPS] = {0}, sum = 0;
    eng_status status = ENG_OK;
    for (int32_t i = 0; i < loops; i++)
        weight[i] = 1.0 / loops;
    if (run->config.loop_weights[0])
        status = read_list("loop.weights", run->config.loop_weights, loops, weight, error);
    for (int32_t i = 0; status == ENG_OK && i < loops; i++)
        options->loop_constant[i] = (float)weight[i];
    for (int32_t i = 0; i < loops; i++)
        sum += weight[i];
    return status == ENG_OK && sum == 0 ? eng_fail(error, ENG_INVALID, "loop.weights: all are 0") : status;
}

static eng_status set_prior(const trn_run *run, eng_plan_options *options, eng_error *error) {
    const int32_t loops = run->model->config.loop.loops;
    double prior[ENG_MAX_LOOPS] = {0}, sum = 0;
    if (!run->config.loop_prior[0])
        return ENG_OK;
    eng_status status = read_list("loop.prior", run->config.loop_prior, loops, prior, error);
    for (int32_t i = 0; i < loops; i++)
        sum += prior[i];
    for (int32_t i = 0; status == ENG_OK && i < loops; i++) {
        if (prior[i] == 0)
            return eng_fail(error, ENG_INVALID, "loop.prior: an exit of probability 0 has no logarithm");
        options->loop_constant[i] = (float)log(prior[i] / sum);
    }
    return status;
}

eng_status trn_run_loop_options(const trn_run *run, eng_plan_options *options, eng_error *error) {
    const trn_run_config *config = &run->config;
    const int32_t loops = run->model->config.loop.loops;
    options->backward_loops = (int32_t)config->backward_loops;
    options->loop_loss = (eng_loop_loss)config->loop_loss;
    options->gate_sharpness = (float)config->gate_sharpness;
    options->gate_margin = (float)config->gate_margin;
    if (options->backward_loops > loops)
        return eng_fail(error, ENG_INVALID, "loop.backward_loops: %d, the model has %d loops", options->backward_loops,
                        loops);
    if (options->loop_loss == ENG_LOOP_LOSS_WEIGHTED)
        return set_weights(run, options, error);
    return options->loop_loss == ENG_LOOP_LOSS_EXPECTED ? set_prior(run, options, error) : ENG_OK;
}

eng_status trn_run_set_entropy(trn_run *run, eng_error *error) {
    const trn_run_config *config = &run->config;
    if (!run->train_plan->entropy.ref)
        return ENG_OK;
    const double done = (double)run->state.step / (double)config->steps;
    const float entropy = (float)(config->loop_entropy * (1 - config->entropy_decay * (done < 1 ? done : 1)));
    kern_status status = kern_upload(
        run->runner.stream, eng_plan_address(&run->runner.memory, run->train_plan->entropy), &entropy, sizeof entropy);
    if (status == KERN_OK)
        status = kern_synchronize(run->runner.stream);
    return eng_fail_kernel(error, status, "writing the entropy's coefficient");
}

bool trn_run_trains_gate_alone(const trn_run *run) {
    return run->config.loop_loss == ENG_LOOP_LOSS_NEXT || run->config.loop_loss == ENG_LOOP_LOSS_PREVIOUS;
}

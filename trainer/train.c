// SPDX-License-Identifier: Apache-2.0
// mesa-trainer train --config run.ini --out RUN: trains a model, or with --resume goes on from RUN's newest whole
// checkpoint. mesa-trainer gate is the same for a looped model's exit gate: a stage is a loss. Each of several ranks
// (ranks.h) runs this command; the first alone owns the folder, logs and prints. With --sweep it is many runs
// (sweep.h).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "trainer/commands.h"
#include "trainer/options.h"
#include "trainer/sweep.h"
#include "trainer/train_run.h"

typedef struct train_options {
    const char *config, *out, *warm_start, *sweep;
    trn_strings set;
    bool resume, gate;
    int64_t stage; // of gate
    bool previous;
    double max_seconds, rank_wait;
    int64_t profile, parallel;
} train_options;

static const char *loss_of_stage(const train_options *o) {
    return o->stage == 1 ? "loop.loss=expected" : o->previous ? "loop.loss=previous" : "loop.loss=next";
}

// Options are keys of the configuration like any other, so that what does not go together is refused however it is
// said.
static eng_status read_with(const train_options *o, const char *path, const char *warm_start, trn_run_config *config,
                            eng_error *error) {
    const char *set[TRN_MAX_STRINGS + 2];
    int sets = o->set.count;
    memcpy(set, o->set.item, sizeof *set * (size_t)sets);
    if (o->gate)
        set[sets++] = loss_of_stage(o);
    if (o->warm_start)
        set[sets++] = warm_start;
    eng_status status = trn_run_config_read(path, set, sets, config, error);
    // A gate where the configuration says nothing of one.
    if (status == ENG_OK && o->gate && !trn_json_has(config->model, "exit_gate")) {
        status = trn_run_config_set(config, "model.exit_gate=true", error);
        if (status != ENG_OK)
            trn_run_config_free(config);
    }
    return status;
}

// New.
static char *assign(const char *key, const char *value) {
    const size_t size = strlen(key) + strlen(value) + 2;
    char *text = malloc(size);
    if (text)
        snprintf(text, size, "%s=%s", key, value);
    return text;
}

static eng_status read_config(const train_options *o, trn_run_config *config, eng_error *error) {
    char *path = o->config ? strdup(o->config) : eng_join_path(o->out, "config.ini");
    char *warm_start = assign("train.warm_start", o->warm_start ? o->warm_start : "");
    eng_status status = path && warm_start ? read_with(o, path, warm_start, config, error)
                                           : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    free(path);
    free(warm_start);
    return status;
}

static eng_status train_as(const train_options *o, trn_ranks *ranks, const sigset_t *signals, eng_error *error) {
    trn_run_config config = {0};
    const trn_train_options options = {
        .resume = o->resume,
        .loop = {.folder = o->out, .max_seconds = o->max_seconds, .profile_steps = o->profile, .signals = signals}};
    eng_status status = read_config(o, &config, error);
    return status == ENG_OK ? trn_train(&config, ranks, &options, error) : status;
}

// *place says which rank a failure is told of.
static eng_status train(const train_options *o, const sigset_t *signals, trn_rank_place *place, eng_error *error) {
    trn_ranks *ranks = NULL;
    eng_status status = trn_rank_place_read(place, error);
    if (status == ENG_OK)
        status = trn_ranks_open(place, o->rank_wait, &ranks, error);
    if (status == ENG_OK)
        status = train_as(o, ranks, signals, error);
    return trn_ranks_close(ranks, status, error);
}

static eng_status sweep(const train_options *o, const sigset_t *signals, trn_rank_place *place, eng_error *error) {
    trn_sweep sweep = {0};
    const trn_sweep_options options = {
        .config = o->config, .out = o->out, .parallel = o->parallel, .max_seconds = o->max_seconds, .signals = signals};
    eng_status status = trn_rank_place_read(place, error);
    if (status == ENG_OK && place->ranks > 1)
        status = eng_fail(error, ENG_INVALID, "--sweep: runs of a sweep have one process");
    if (status == ENG_OK)
        status = trn_sweep_read(o->sweep, o->set.item, o->set.count, &sweep, error);
    if (status == ENG_OK)
        status = trn_sweep_train(&sweep, &options, error);
    trn_sweep_free(&sweep);
    return status;
}

static eng_status check_sweep(const train_options *o, eng_error *error) {
    if (!o->sweep)
        return o->parallel == 0 ? ENG_OK : eng_fail(error, ENG_INVALID, "--parallel: goes with --sweep");
    if (!o->config)
        return eng_fail(error, ENG_INVALID, "--config is needed");
    if (o->warm_start || o->profile > 0)
        return eng_fail(error, ENG_INVALID, "--sweep: takes no --profile, and train.warm_start by --set");
    return o->parallel < 0 ? eng_fail(error, ENG_INVALID, "--parallel: negative") : ENG_OK;
}

static eng_status check_options(const train_options *o, eng_error *error) {
    if (!o->out)
        return eng_fail(error, ENG_INVALID, "--out is needed");
    if (!o->config && !o->resume)
        return eng_fail(error, ENG_INVALID, "--config is needed");
    if (!(o->max_seconds >= 0))
        return eng_fail(error, ENG_INVALID, "--max-seconds: negative");
    if (!(o->rank_wait > 0))
        return eng_fail(error, ENG_INVALID, "--rank-wait: must be above 0");
    if (o->profile < 0)
        return eng_fail(error, ENG_INVALID, "--profile: negative");
    if (o->gate && o->stage != 1 && o->stage != 2)
        return eng_fail(error, ENG_INVALID, "--stage: 1 or 2 is needed");
    if (o->previous && o->stage == 1)
        return eng_fail(error, ENG_INVALID, "--previous is for stage 2");
    if (o->gate && !o->warm_start && !o->resume)
        return eng_fail(error, ENG_INVALID, "--warm-start is needed: the model whose gate is trained");
    return check_sweep(o, error);
}

static int run_line(const trn_command_line *line, int argc, char **argv, train_options *o, const char *name) {
    bool helped = false;
    int positional = 0;
    eng_error error = {0};
    trn_rank_place place = {.ranks = 1};
    // Blocked before the compute team starts, so that no thread of it takes them.
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    eng_status status = trn_options_parse(line, argc, argv, NULL, &positional, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_options(o, &error);
    if (status == ENG_OK) {
        sigprocmask(SIG_BLOCK, &signals, NULL);
        status = o->sweep ? sweep(o, &signals, &place, &error) : train(o, &signals, &place, &error);
    }
    char who[40];
    snprintf(who, sizeof who, place.ranks > 1 ? "%s, rank %d" : "%s", name, place.rank);
    return trn_command_end(who, status, &error);
}

// What both commands take.
#define COMMON_OPTIONS                                                                                                 \
    {"config", "FILE", TRN_STRING, &o.config, "run.ini (default with --resume: RUN/config.ini)"},                      \
        {"out", "RUN", TRN_STRING, &o.out, "folder of the run"},                                                       \
        {"set", "SECTION.KEY=VALUE", TRN_STRINGS, &o.set, "changes a value of the configuration; may be repeated"},    \
        {"resume", NULL, TRN_FLAG, &o.resume, "go on from the newest whole checkpoint; a fresh run if there is none"}, \
        {"warm-start", "DIR", TRN_STRING, &o.warm_start,                                                               \
         "start from the weights of a checkpoint, with a new optimizer"},                                              \
        {"profile", "N", TRN_INTEGER, &o.profile, "time N steps by operation; the table goes to RUN/profile.md too"},  \
        {"max-seconds", "S", TRN_REAL, &o.max_seconds, "save and stop after this time"}, {                             \
        "rank-wait", "S", TRN_REAL, &o.rank_wait,                                                                      \
            "how long another rank is waited for, to come and later to answer (default 600)"                           \
    }

int trn_command_train(int argc, char **argv) {
    train_options o = {.rank_wait = 600};
    const trn_option options[] = {
        COMMON_OPTIONS,
        {"sweep", "FILE", TRN_STRING, &o.sweep, "many runs, in folders under RUN: what is tried stands in FILE"},
        {"parallel", "N", TRN_INTEGER, &o.parallel, "with --sweep: runs at once (default: one a thread of the CPU)"}};
    const trn_command_line line = {"train --config run.ini --out RUN [options]",
                                   "Trains a model. SIGINT and SIGTERM save a checkpoint and stop.",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   0};
    return run_line(&line, argc, argv, &o, "train");
}

int trn_command_gate(int argc, char **argv) {
    train_options o = {.gate = true, .rank_wait = 600};
    const trn_option options[] = {
        {"stage", "N", TRN_INTEGER, &o.stage,
         "1: the whole model, on the loops' losses as the gate mixes them and [loop] entropy; 2: the gate alone, on "
         "whether another loop gains more than [loop] margin"},
        {"previous", NULL, TRN_FLAG, &o.previous, "stage 2: by what a loop has gained, not by what the next one will"},
        COMMON_OPTIONS};
    const trn_command_line line = {
        "gate --stage 1|2 --warm-start DIR --config run.ini --out RUN [options]",
        "Trains the exit gate of a looped model (Zhu et al. 2025, arXiv 2510.25741), which is made where\n"
        "the checkpoint has none. SIGINT and SIGTERM save a checkpoint and stop.",
        options,
        sizeof options / sizeof *options,
        0,
        0};
    return run_line(&line, argc, argv, &o, "gate");
}

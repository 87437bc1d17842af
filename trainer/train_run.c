// SPDX-License-Identifier: Apache-2.0
// A run from its configuration to its last checkpoint; see train_run.h.
// Rank 0 alone owns the folder, logs and prints.
#include "trainer/train_run.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "engine/files.h"
#include "trainer/run_ranks.h"

static void tell_damaged(const char *dir, const char *why) {
    fprintf(stderr, "mesa-trainer train: %s is passed over: %s\n", dir, why);
}

static eng_status lock_folder(const char *path, int *lock, eng_error *error) {
    *lock = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*lock < 0)
        return eng_fail(error, ENG_IO, "%s: %s", path, strerror(errno));
    if (flock(*lock, LOCK_EX | LOCK_NB) != 0)
        return eng_fail(error, ENG_INVALID, "%s: another program is training there", path);
    return ENG_OK;
}

eng_status trn_enter_folder(const char *path, trn_own_folder *out, eng_error *error) {
    *out = (trn_own_folder){.lock = -1};
    eng_status status = eng_make_folder(path, &out->made, error);
    return status == ENG_OK ? lock_folder(path, &out->lock, error) : status;
}

void trn_leave_folder(const char *path, const trn_own_folder *own) {
    if (own->made)
        rmdir(path); // only where it is empty
    if (own->lock >= 0)
        close(own->lock);
}

static eng_status write_config(const char *folder, const trn_run *run, eng_error *error) {
    char *path = eng_join_path(folder, "config.ini");
    eng_status status = path ? trn_run_config_write(&run->config, path, error)
                             : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    free(path);
    return status;
}

// Where the run goes on: *dir stays NULL for a fresh one. Rank 0's alone.
static eng_status find_start(const char *folder, bool resume, char **dir, trn_run_state *state, eng_error *error) {
    bool has = false;
    eng_status status = trn_run_clean(folder, error);
    if (status == ENG_OK)
        status = trn_run_has_checkpoints(folder, &has, error);
    if (status == ENG_OK && has && !resume)
        return eng_fail(error, ENG_INVALID, "%s: holds checkpoints; --resume goes on from them", folder);
    if (status == ENG_OK && has)
        status = trn_run_newest(folder, tell_damaged, dir, state, error);
    return status == ENG_OK ? trn_run_trim_log(folder, *dir ? state->step : 0, error) : status;
}

// A run that was to start from weights, and was ended before its first checkpoint, would start from random ones.
static eng_status check_warm_start(const char *folder, const trn_run_config *config, eng_error *error) {
    trn_run_config before = {0};
    char *path = eng_join_path(folder, "config.ini");
    eng_status status = !path                     ? eng_fail(error, ENG_NO_MEMORY, "out of memory for a path")
                        : access(path, F_OK) != 0 ? ENG_OK
                                                  : trn_run_config_read(path, NULL, 0, &before, error);
    if (status == ENG_OK && before.warm_start && before.warm_start[0] && !config->warm_start[0])
        status =
            eng_fail(error, ENG_INVALID, "%s: no checkpoint yet, and it started from %.100s: --warm-start is needed",
                     folder, before.warm_start);
    trn_run_config_free(&before);
    free(path);
    return status;
}

static void announce_teacher(const trn_run *run, FILE *out) {
    const eng_model *teacher = run->teacher.model;
    const int64_t length = teacher->config.trained_length;
    fprintf(out, "teacher: %s, %llu parameters", run->config.teacher, (unsigned long long)teacher->parameters);
    if (length > 0 && length < run->config.context)
        fprintf(out, ", of texts of %lld tokens: rows here are longer", (long long)length);
    fprintf(out, "\n");
}

static void announce(const trn_run *run, const char *dir, FILE *out) {
    if (trn_ranks_own(run->ranks) > 0)
        return;
    if (run->ranks)
        fprintf(out, "%d ranks, ", trn_ranks_count(run->ranks));
    fprintf(out, "%llu parameters, %lld rows of %d pairs an epoch, %d rows a step, %s%s%s\n",
            (unsigned long long)run->model->parameters, (long long)run->state.data_rows, (int)run->state.context,
            run->batch_rows, kern_device_describe(run->device)->description, run->no_cuda[0] ? ", not CUDA: " : "",
            run->no_cuda);
    if (run->teacher.checkpoint)
        announce_teacher(run, out);
    if (dir)
        fprintf(out, "going on from %s\n", dir);
    else if (run->start)
        fprintf(out, "start weights from %s\n%s", run->config.start_from, run->start);
    fflush(out);
}

// Makes the folder this run's own and finds where it goes on.
static eng_status enter_folder(const trn_train_options *o, const trn_run_config *config, trn_ranks *ranks,
                               trn_own_folder *own, char **dir, trn_run_state *state, eng_error *error) {
    const bool first = trn_ranks_own(ranks) == 0;
    const char *folder = o->loop.folder;
    eng_status status = first ? trn_enter_folder(folder, own, error) : ENG_OK;
    if (status == ENG_OK && first)
        status = find_start(folder, o->resume, dir, state, error);
    if (status == ENG_OK && first && o->resume && !*dir)
        status = check_warm_start(folder, config, error);
    if (status == ENG_OK)
        status = trn_ranks_share_start(ranks, folder, dir, state, error);
    return status == ENG_OK ? trn_ranks_agree_folder(ranks, folder, error) : status;
}

eng_status trn_train(trn_run_config *config, trn_ranks *ranks, const trn_train_options *o, eng_error *error) {
    trn_run run = {0};
    trn_run_state state = {0};
    char *dir = NULL;
    trn_own_folder own = {.lock = -1};
    eng_status status = trn_ranks_agree_program(ranks, config, error);
    if (status == ENG_OK)
        status = enter_folder(o, config, ranks, &own, &dir, &state, error);
    if (status == ENG_OK)
        status = trn_run_open(config, ranks, &run, error);
    if (status == ENG_OK)
        status = trn_ranks_agree_run(&run, error);
    if (status == ENG_OK)
        status = dir ? trn_run_resume(&run, dir, &state, error) : trn_run_start(&run, error);
    if (status == ENG_OK && trn_ranks_own(ranks) == 0)
        status = write_config(o->loop.folder, &run, error);
    if (status == ENG_OK) {
        announce(&run, dir, o->loop.out ? o->loop.out : stdout);
        status = trn_train_loop(&run, &o->loop, error);
    }
    trn_run_close(&run);
    trn_run_config_free(config);
    free(dir);
    trn_leave_folder(o->loop.folder, &own);
    return status;
}

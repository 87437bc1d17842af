// SPDX-License-Identifier: Apache-2.0
// The runs of a sweep; see sweep.h.
//
// One thread takes run after run from the list; what they share stands under one lock. The thread that began them
// waits for signals alone: for one that asks for an end, or SIGUSR1, with which a thread says that it has ended. A run
// whose memory was refused while others had theirs goes back to the list and is taken up when one of them has ended.
#include "trainer/sweep.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/digest.h"
#include "engine/files.h"
#include "trainer/progress.h"
#include "trainer/run_log.h"
#include "trainer/sweep_internal.h"
#include "trainer/train_run.h"

enum { MOST_THREADS = 64, GPU_THREADS = 16, LAST_STEPS = 50 };

typedef enum place { WAITING, RUNNING, OVER } place;

typedef struct work {
    trn_sweep *sweep;
    const trn_sweep_options *options;
    char config_digest[ENG_DIGEST_HEX];
    pthread_t waiter;     // who began the threads
    int team;             // compute threads of a run
    pthread_mutex_t lock; // of what follows
    pthread_cond_t ended;
    place *place; // (runs)
    int running, over, threads;
    atomic_bool stop;
    sigset_t signals; // that the waiter waits for
} work;

// ------------------------------------------------------------------------------------------------------------- one run

static eng_status read_config(const work *w, const trn_sweep_run *run, trn_run_config *config, eng_error *error) {
    return trn_run_config_read(w->options->config, (const char *const *)run->set.item, run->set.count, config, error);
}

static eng_status read_figures(const char *folder, trn_sweep_result *result, eng_error *error) {
    trn_log log;
    char *path = eng_join_path(folder, "log.jsonl");
    eng_status status =
        path ? trn_log_read(path, &log, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    free(path);
    if (status != ENG_OK)
        return status;
    const trn_log_entry *last = log.entries > 0 ? &log.entry[log.entries - 1] : NULL;
    const trn_log_entry *valid = trn_log_last_valid(&log);
    result->loss = trn_log_last_loss(&log, LAST_STEPS);
    result->valid_loss = valid ? valid->valid_loss : NAN;
    result->valid_accuracy = valid ? valid->valid_accuracy : NAN;
    result->valid_divergence = valid ? valid->valid_divergence : NAN;
    result->bad_steps = trn_log_bad_steps(&log);
    if (last) {
        result->step = last->step;
        result->tokens = last->tokens;
        result->seconds = last->seconds;
    }
    trn_log_free(&log);
    return ENG_OK;
}

// What people would have read goes to NAME/output.txt.
static eng_status train(const work *w, const trn_sweep_run *run, const char *folder, bool *unfinished,
                        eng_error *error) {
    trn_run_config config = {0};
    char *path = eng_join_path(folder, "output.txt");
    FILE *out = path ? fopen(path, "ae") : NULL;
    eng_status status = out ? read_config(w, run, &config, error)
                            : eng_fail(error, ENG_IO, "%s: %s", run->name, strerror(path ? errno : ENOMEM));
    if (status == ENG_OK) {
        if (config.threads == 0)
            config.threads = w->team;
        const trn_train_options options = {
            .resume = true, .loop = {.folder = folder, .stop = &w->stop, .out = out, .unfinished = unfinished}};
        status = trn_train(&config, NULL, &options, error);
    }
    if (out && fclose(out) != 0 && status == ENG_OK)
        status = eng_fail(error, ENG_IO, "%s/output.txt: %s", run->name, strerror(errno));
    free(path);
    return status;
}

// Ends with the run's result written; what comes back is a fault of the sweep itself, or ENG_NO_MEMORY of the run.
static eng_status do_run(const work *w, trn_sweep_run *run, eng_error *error) {
    char *folder = eng_join_path(w->options->out, run->name);
    bool unfinished = false;
    eng_error fault = {0};
    eng_status status =
        folder ? eng_make_folder(folder, NULL, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    if (status == ENG_OK)
        status = trn_sweep_write_result(folder, run, w->config_digest, error);
    if (status == ENG_OK) {
        trn_sweep_result *result = &run->result;
        *result = (trn_sweep_result){.valid_loss = NAN, .valid_accuracy = NAN, .valid_divergence = NAN, .loss = NAN};
        eng_status trained = train(w, run, folder, &unfinished, &fault);
        if (read_figures(folder, result, NULL) != ENG_OK && trained == ENG_OK)
            trained = eng_fail(&fault, ENG_IO, "its log cannot be read");
        result->end = trained != ENG_OK ? TRN_SWEEP_FAILED : unfinished ? TRN_SWEEP_OPEN : TRN_SWEEP_DONE;
        snprintf(result->reason, sizeof result->reason, "%s", trained != ENG_OK ? fault.text : "");
        status = trn_sweep_write_result(folder, run, w->config_digest, error);
        if (status == ENG_OK && trained == ENG_NO_MEMORY)
            status = trained;
    }
    free(folder);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- threads

// Under the lock. Each run's end in a line.
static void tell(const work *w, const trn_sweep_run *run) {
    const trn_sweep_result *result = &run->result;
    printf("%d of %d: %s: ", w->over, w->sweep->runs, run->name);
    if (result->end == TRN_SWEEP_FAILED)
        printf("failed: %s\n", result->reason);
    else if (result->end == TRN_SWEEP_OPEN)
        printf("stopped at step %lld\n", (long long)result->step);
    else if (isfinite(result->valid_loss))
        printf("validation %.4f, loss %.4f\n", result->valid_loss, result->loss);
    else
        printf("loss %.4f\n", result->loss);
    fflush(stdout);
}

// Under the lock: the next run that waits; -1: there is none now.
static int take(work *w) {
    for (int i = 0; i < w->sweep->runs && !atomic_load(&w->stop); i++)
        if (w->place[i] == WAITING) {
            w->place[i] = RUNNING;
            w->running++;
            return i;
        }
    return -1;
}

// Under the lock: where a run that came back with `status` goes. true: wait before the next is taken.
static bool put_back(work *w, int index, eng_status status, const eng_error *error) {
    trn_sweep_run *run = &w->sweep->run[index];
    w->running--;
    if (status == ENG_NO_MEMORY && w->running > 0) {
        w->place[index] = WAITING;
        return true;
    }
    if (status != ENG_OK && status != ENG_NO_MEMORY) {
        run->result.end = TRN_SWEEP_FAILED;
        snprintf(run->result.reason, sizeof run->result.reason, "%s", error->text);
    }
    w->place[index] = OVER;
    w->over++;
    tell(w, run);
    pthread_cond_broadcast(&w->ended);
    return false;
}

static void *thread(void *context) {
    work *w = context;
    pthread_mutex_lock(&w->lock);
    for (int index; (index = take(w)) >= 0;) {
        eng_error error = {0};
        pthread_mutex_unlock(&w->lock);
        const eng_status status = do_run(w, &w->sweep->run[index], &error);
        pthread_mutex_lock(&w->lock);
        const int over = w->over;
        if (put_back(w, index, status, &error))
            while (w->over == over && w->running > 0)
                pthread_cond_wait(&w->ended, &w->lock);
    }
    w->threads--;
    pthread_mutex_unlock(&w->lock);
    pthread_kill(w->waiter, SIGUSR1);
    return NULL;
}

static bool threads_are_left(work *w) {
    pthread_mutex_lock(&w->lock);
    const bool left = w->threads > 0;
    pthread_mutex_unlock(&w->lock);
    return left;
}

// Until all threads have ended; a signal or the time asks the runs to stop.
static void wait_for_threads(work *w) {
    const double end = w->options->max_seconds > 0 ? trn_seconds() + w->options->max_seconds : 0;
    while (threads_are_left(w)) {
        double left = end > 0 ? end - trn_seconds() : 3600;
        left = left < 0 || atomic_load(&w->stop) ? 3600 : left;
        const struct timespec limit = {.tv_sec = (time_t)left, .tv_nsec = (long)(1e9 * (left - floor(left)))};
        const int signal = sigtimedwait(&w->signals, NULL, &limit);
        if (signal == SIGUSR1)
            continue;
        if (signal > 0 || (end > 0 && trn_seconds() >= end))
            atomic_store(&w->stop, true);
    }
}

static eng_status run_threads(work *w, int count, eng_error *error) {
    pthread_t threads[MOST_THREADS];
    int begun = 0;
    w->waiter = pthread_self();
    pthread_mutex_lock(&w->lock);
    while (begun < count && pthread_create(&threads[begun], NULL, thread, w) == 0)
        begun++;
    w->threads = begun;
    pthread_mutex_unlock(&w->lock);
    wait_for_threads(w);
    for (int i = 0; i < begun; i++)
        pthread_join(threads[i], NULL);
    return begun > 0 ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "no thread could be made");
}

// With SIGUSR1 blocked, by which threads tell their end; none is left pending.
static eng_status run_blocked(work *w, int count, eng_error *error) {
    const struct timespec at_once = {0};
    sigset_t own, before;
    sigemptyset(&own);
    sigaddset(&own, SIGUSR1);
    w->signals = own;
    if (w->options->signals)
        w->signals = *w->options->signals;
    sigaddset(&w->signals, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &own, &before);
    eng_status status = run_threads(w, count, error);
    while (sigtimedwait(&own, NULL, &at_once) > 0)
        ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- whole

// What is wrong with a run's configuration is told before the first begins; what was done is read.
static eng_status prepare(work *w, eng_error *error) {
    trn_sweep *sweep = w->sweep;
    eng_status status = ENG_OK;
    for (int i = 0; i < sweep->runs && status == ENG_OK; i++) {
        trn_sweep_run *run = &sweep->run[i];
        trn_run_config config = {0};
        eng_error fault = {0};
        if (read_config(w, run, &config, &fault) != ENG_OK)
            return eng_fail(error, fault.code, "%.100s: %s", run->name, fault.text);
        trn_run_config_free(&config);
        char *folder = eng_join_path(w->options->out, run->name);
        status = folder ? trn_sweep_read_result(folder, run, w->config_digest, error)
                        : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
        free(folder);
        w->place[i] = run->result.end == TRN_SWEEP_DONE ? OVER : WAITING;
        w->over += run->result.end == TRN_SWEEP_DONE;
    }
    return status;
}

// Threads of the CPU that the sweep may have; 0: its device is none.
static eng_status count_threads(const work *w, int *threads, eng_error *error) {
    trn_run_config config = {0};
    kern_device *device = NULL;
    eng_status status = read_config(w, &w->sweep->run[0], &config, error);
    if (status != ENG_OK)
        return status;
    status = trn_run_open_device(&config, 0, NULL, 0, &device, error);
    if (status == ENG_OK)
        *threads = kern_device_describe(device)->threads;
    kern_device_close(device);
    trn_run_config_free(&config);
    return status;
}

// Small runs gain little by sharing an operation among threads: each has one, and there are as many as threads.
static eng_status choose_threads(work *w, int *count, eng_error *error) {
    const int waiting = w->sweep->runs - w->over;
    int all = 0;
    eng_status status = count_threads(w, &all, error);
    if (status != ENG_OK)
        return status;
    int64_t wanted = w->options->parallel > 0 ? w->options->parallel : all > 0 ? all : GPU_THREADS;
    wanted = wanted < MOST_THREADS ? wanted : MOST_THREADS;
    *count = wanted < waiting ? (int)wanted : waiting;
    w->team = *count > 0 && all / *count > 1 ? all / *count : 1;
    return ENG_OK;
}

static eng_status conclude(const work *w, eng_error *error) {
    int groups = 0, failed = 0;
    for (int i = 0; i < w->sweep->runs; i++)
        failed += w->sweep->run[i].result.end == TRN_SWEEP_FAILED;
    trn_sweep_group *group = trn_sweep_groups(w->sweep, &groups);
    if (!group)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the table");
    eng_status status = trn_sweep_write(w->options->out, group, groups, error);
    printf("\n");
    trn_sweep_print(group, groups, stdout);
    free(group);
    if (status == ENG_OK && failed > 0)
        status = eng_fail(error, ENG_NUMERIC, "%d of %d runs failed", failed, w->sweep->runs);
    return status;
}

static eng_status sweep_all(work *w, eng_error *error) {
    unsigned char digest[ENG_DIGEST_BYTES];
    int count = 0;
    eng_status status = eng_digest_file(w->options->config, digest, error);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(digest, w->config_digest);
    status = prepare(w, error);
    if (status == ENG_OK)
        status = choose_threads(w, &count, error);
    if (status == ENG_OK && count > 0) {
        printf("%d runs, %d done before; %d at once, %d threads each\n", w->sweep->runs, w->over, count, w->team);
        fflush(stdout);
        status = run_blocked(w, count, error);
    }
    return status == ENG_OK ? conclude(w, error) : status;
}

eng_status trn_sweep_train(trn_sweep *sweep, const trn_sweep_options *options, eng_error *error) {
    work w = {.sweep = sweep,
              .options = options,
              .lock = PTHREAD_MUTEX_INITIALIZER,
              .ended = PTHREAD_COND_INITIALIZER,
              .place = calloc((size_t)sweep->runs, sizeof *w.place)};
    trn_own_folder folder = {.lock = -1};
    eng_status status = w.place ? trn_enter_folder(options->out, &folder, error)
                                : eng_fail(error, ENG_NO_MEMORY, "out of memory for %d runs", sweep->runs);
    if (status == ENG_OK)
        status = sweep_all(&w, error);
    trn_leave_folder(options->out, &folder);
    free(w.place);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
// The loop of a training run; see train_loop.h.
//
// Signals are blocked and asked for between two steps, so that no step is torn and no state is shared with a handler.
// What people read goes to stdout (lines) and, on a terminal, to a progress line; what programs read goes to log.jsonl.
#include "trainer/train_loop.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/files.h"
#include "trainer/jsonl.h"
#include "trainer/profile.h"
#include "trainer/progress.h"

static const double line_interval = 10; // seconds between two lines when stdout is no terminal

typedef struct loop {
    trn_run *run;
    const trn_loop_options *options;
    FILE *log;
    trn_progress progress;
    double started, seconds_before; // of this process; of the run before it
    double step_seconds;            // smoothed
    double next_line;
    int64_t saved_step; // -1: none by this process
    trn_step_report report;
    trn_score score;
    bool scored;
    trn_profile *profile; // NULL: none, or it has been told
    int64_t steps_done;   // by this process
} loop;

// ---------------------------------------------------------------------------------------------------------------- log

static double mean_steps(const eng_compute *compute) {
    return compute->solves > 0 ? (double)compute->steps / (double)compute->solves : 0;
}

static void set_compute(trn_json *line, const char *prefix, const eng_compute *compute) {
    char key[64];
    if (compute->solves == 0)
        return;
    snprintf(key, sizeof key, "%s_steps", prefix);
    trn_json_set_real(line, key, mean_steps(compute));
    snprintf(key, sizeof key, "%s_steps_max", prefix);
    trn_json_set_integer(line, key, compute->steps_max);
    snprintf(key, sizeof key, "%s_unconverged", prefix);
    trn_json_set_integer(line, key, (int64_t)compute->unconverged);
}

static double accuracy(const loop *loop) {
    return (double)loop->score.hits.targets / (double)loop->score.targets;
}

static trn_json *log_line(const loop *loop, double seconds) {
    static const char *const outcomes[] = {"done", "empty", "not finite"};
    const trn_run *run = loop->run;
    const trn_step_report *report = &loop->report;
    trn_json *line = trn_json_create();
    if (!line)
        return NULL;
    trn_json_set_integer(line, "step", report->step);
    trn_json_set_real(line, "loss", report->loss);
    if (run->teacher.checkpoint)
        trn_json_set_real(line, "divergence", report->divergence);
    trn_json_set_real(line, "lr", report->rate);
    trn_json_set_real(line, "gradient_norm", report->gradient_norm);
    trn_json_set_integer(line, "targets", report->targets);
    trn_json_set_integer(line, "tokens", run->state.tokens);
    trn_json_set_integer(line, "epoch", report->first_place / run->state.data_rows);
    trn_json_set_integer(line, "row", report->first_place % run->state.data_rows);
    set_compute(line, "cg", &report->solves);
    set_compute(line, "cg_backward", &report->backward_solves);
    trn_exits_write(&report->exits, "", line);
    if (report->outcome != TRN_STEP_DONE)
        trn_json_set_string(line, "outcome", outcomes[report->outcome]);
    if (report->culprit[0])
        trn_json_set_string(line, "culprit", report->culprit);
    trn_json_set_integer(line, "bad_steps", run->state.bad_steps);
    if (loop->scored) {
        trn_json_set_real(line, "valid_loss", loop->score.loss / (double)loop->score.targets);
        if (run->teacher.checkpoint)
            trn_json_set_real(line, "valid_divergence", loop->score.divergence / (double)loop->score.targets);
        trn_json_set_real(line, "valid_accuracy", accuracy(loop));
        trn_json_set_integer(line, "valid_targets", loop->score.targets);
        trn_exits_write(&loop->score.exits, "valid_", line);
    }
    trn_json_set_real(line, "step_seconds", seconds);
    trn_json_set_real(line, "seconds", run->state.seconds);
    return line;
}

static bool speaks(const loop *loop) {
    return trn_ranks_own(loop->run->ranks) == 0;
}

static FILE *output(const loop *loop) {
    return loop->options->out ? loop->options->out : stdout;
}

static eng_status write_log(loop *loop, double seconds, eng_error *error) {
    if (!speaks(loop))
        return ENG_OK;
    trn_json *line = log_line(loop, seconds);
    char *text = line ? trn_json_text(line, false) : NULL;
    trn_json_free(line);
    if (!text)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a line of the log");
    bool failed = fprintf(loop->log, "%s\n", text) < 0 || fflush(loop->log) != 0;
    free(text);
    return failed ? eng_fail(error, ENG_IO, "%s/log.jsonl: %s", loop->options->folder, strerror(errno)) : ENG_OK;
}

static eng_status open_log(loop *loop, eng_error *error) {
    if (!speaks(loop))
        return ENG_OK;
    char *path = eng_join_path(loop->options->folder, "log.jsonl");
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    loop->log = fopen(path, "ae");
    eng_status status = loop->log ? ENG_OK : eng_fail(error, ENG_IO, "%s: %s", eng_path_tail(path), strerror(errno));
    free(path);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- lines

static void describe(const loop *loop, char *text, size_t size) {
    const trn_step_report *report = &loop->report;
    char left[24], taught[40] = "", solver[48] = "", bad[40] = "";
    double rate = loop->step_seconds > 0 ? (double)report->tokens / loop->step_seconds : 0;
    double remaining = (double)(loop->run->config.steps - report->step) * loop->step_seconds;
    if (loop->run->teacher.checkpoint)
        snprintf(taught, sizeof taught, "  divergence %.4f", report->divergence);
    if (report->solves.solves > 0)
        snprintf(solver, sizeof solver, "  cg %.1f/%.1f", mean_steps(&report->solves),
                 mean_steps(&report->backward_solves));
    if (loop->run->state.bad_steps > 0)
        snprintf(bad, sizeof bad, "  %lld bad", (long long)loop->run->state.bad_steps);
    snprintf(text, size, "step %lld/%lld  loss %.4f%s  lr %.2e  |g| %.3f%s%s  %.0f tokens/s  %s left",
             (long long)report->step, (long long)loop->run->config.steps, report->loss, taught, report->rate,
             report->gradient_norm, solver, bad, rate, trn_duration(remaining, left));
}

static void print_line(loop *loop, const char *text) {
    if (!speaks(loop))
        return;
    trn_progress_end(&loop->progress);
    FILE *out = output(loop);
    fprintf(out, "%s\n", text);
    fflush(out);
}

// Of the validation, where losses of all loops are known.
static void show_exits(loop *loop) {
    const trn_exits *exits = &loop->score.exits;
    char line[32 * ENG_MAX_LOOPS];
    int at = 0;
    if (exits->loops == 0 || exits->targets == 0)
        return;
    for (int32_t r = 0; r < exits->loops; r++) {
        at += snprintf(line + at, sizeof line - (size_t)at, "%s%.4f",
                       r ? "  " : "loops: ", exits->loss[r] / (double)exits->targets);
        if (exits->gated)
            at += snprintf(line + at, sizeof line - (size_t)at, " (%.0f %%)",
                           100 * exits->probability[r] / (double)exits->targets);
    }
    print_line(loop, line);
    if (trn_exits_collapsed(exits))
        print_line(loop, "the exit gate has stopped choosing");
}

static void show_step(loop *loop) {
    char text[280], taught[40] = "", line[400];
    describe(loop, text, sizeof text);
    if (loop->scored && loop->run->teacher.checkpoint)
        snprintf(taught, sizeof taught, " (divergence %.4f)", loop->score.divergence / (double)loop->score.targets);
    uint64_t unconverged = loop->report.solves.unconverged + loop->report.backward_solves.unconverged;
    if (trn_progress_due(&loop->progress))
        trn_progress_show(&loop->progress, "%s", text);
    if (loop->scored)
        snprintf(line, sizeof line, "%s  valid %.4f%s  right %.2f %%", text,
                 loop->score.loss / (double)loop->score.targets, taught, 100 * accuracy(loop));
    else if (!loop->progress.terminal && trn_seconds() >= loop->next_line && unconverged > 0)
        snprintf(line, sizeof line, "%s  %llu solves unconverged", text, (unsigned long long)unconverged);
    else if (!loop->progress.terminal && trn_seconds() >= loop->next_line)
        snprintf(line, sizeof line, "%s", text);
    else
        return;
    print_line(loop, line);
    if (loop->scored)
        show_exits(loop);
    loop->next_line = trn_seconds() + line_interval;
}

// ------------------------------------------------------------------------------------------------------------- profile

enum { WARM_UP_STEPS = 2 };

static eng_status write_profile(loop *loop, eng_error *error) {
    trn_limits limits = {0};
    eng_status status = trn_limits_measure(loop->run->device, &limits, error);
    char *path = eng_join_path(loop->options->folder, "profile.md");
    char *text = status == ENG_OK ? trn_profile_text(loop->profile, &limits, "step") : NULL;
    if (status == ENG_OK && (!path || !text))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the profile");
    if (status == ENG_OK)
        status = eng_write_file_atomic(path, text, strlen(text), error);
    if (status == ENG_OK)
        print_line(loop, text);
    free(path);
    free(text);
    return status;
}

// Before a step, or when there are no more: switches the profile on, and off again when its steps are over.
static eng_status turn_profile(loop *loop, bool over, eng_error *error) {
    const int64_t steps = loop->options->profile_steps;
    trn_profile **of_runs = &loop->run->runner.profile;
    if (steps > 0 && !over && loop->steps_done == WARM_UP_STEPS) {
        eng_status status = trn_profile_create(loop->run->device, &loop->profile, error);
        *of_runs = loop->profile;
        return status;
    }
    if (!loop->profile || (!over && loop->steps_done < WARM_UP_STEPS + steps))
        return ENG_OK;
    *of_runs = NULL;
    eng_status status = speaks(loop) ? write_profile(loop, error) : ENG_OK;
    trn_profile_free(loop->profile);
    loop->profile = NULL;
    return status;
}

// --------------------------------------------------------------------------------------------------------------- steps

static double elapsed(const loop *loop) {
    return trn_seconds() - loop->started;
}

static eng_status check_weights(const loop *loop, eng_error *error) {
    trn_run *run = loop->run;
    int32_t tensor = -1;
    eng_status status = trn_optimizer_find_not_finite(&run->optimizer, run->weights->masters, &tensor, error);
    if (status != ENG_OK || tensor < 0)
        return status;
    return eng_fail(error, ENG_NUMERIC, "step %lld: not saved: weight %s is not finite", (long long)run->state.step,
                    run->model->tensor[tensor].name);
}

static eng_status save(loop *loop, eng_error *error) {
    loop->run->state.seconds = loop->seconds_before + elapsed(loop);
    eng_status status = check_weights(loop, error);
    if (status == ENG_OK)
        status = trn_run_checkpoint(loop->run, loop->options->folder, error);
    if (status != ENG_OK)
        return status;
    char text[96];
    snprintf(text, sizeof text, "saved step-%08lld", (long long)loop->run->state.step);
    print_line(loop, text);
    loop->saved_step = loop->run->state.step;
    return ENG_OK;
}

static void show_outcome(loop *loop) {
    const trn_step_report *report = &loop->report;
    char text[400];
    if (report->outcome == TRN_STEP_DONE)
        return;
    if (report->outcome == TRN_STEP_EMPTY)
        snprintf(text, sizeof text, "step %lld: no counted target; nothing was changed", (long long)report->step);
    else
        snprintf(text, sizeof text, "step %lld: loss %g, gradient norm %g: skipped, %lld bad steps so far; first: %s",
                 (long long)report->step, report->loss, report->gradient_norm, (long long)loop->run->state.bad_steps,
                 report->culprit);
    print_line(loop, text);
}

// After the step was logged.
static eng_status judge_bad_steps(const loop *loop, eng_error *error) {
    const trn_run *run = loop->run;
    int64_t most = run->config.max_bad_steps;
    if (loop->report.outcome != TRN_STEP_NOT_FINITE || most == 0 || run->state.bad_in_row < most)
        return ENG_OK;
    return eng_fail(error, ENG_NUMERIC, "step %lld: not finite, %lld in a row (train.max_bad_steps); first: %s",
                    (long long)loop->report.step, (long long)run->state.bad_in_row, loop->report.culprit);
}

static bool is_due(int64_t step, int64_t every, int64_t last) {
    return every > 0 && (step % every == 0 || step == last);
}

static eng_status one_step(loop *loop, eng_error *error) {
    trn_run *run = loop->run;
    eng_status status = turn_profile(loop, false, error);
    double start = trn_seconds();
    if (status == ENG_OK)
        status = trn_run_step(run, &loop->report, error);
    if (status != ENG_OK)
        return status;
    double seconds = trn_seconds() - start;
    loop->steps_done++;
    loop->step_seconds = loop->step_seconds > 0 ? 0.9 * loop->step_seconds + 0.1 * seconds : seconds;
    show_outcome(loop);
    loop->scored = run->valid && is_due(run->state.step, run->config.eval_every, run->config.steps);
    run->runner.profile = NULL; // of training steps alone
    if (loop->scored)
        status = trn_run_validate(run, &loop->score, error);
    run->runner.profile = loop->profile;
    run->state.seconds = loop->seconds_before + elapsed(loop);
    if (status == ENG_OK)
        status = write_log(loop, seconds, error);
    if (status == ENG_OK)
        status = judge_bad_steps(loop, error);
    if (status != ENG_OK)
        return status;
    show_step(loop);
    bool due = is_due(run->state.step, run->config.save_every, run->config.steps);
    return due ? save(loop, error) : ENG_OK;
}

typedef enum stop_reason { STOP_NO, STOP_ACCURACY, STOP_TIME, STOP_TERMINATE, STOP_INTERRUPT } stop_reason;

static stop_reason own_reason(const loop *loop) {
    const struct timespec at_once = {0};
    double wanted = loop->run->config.stop_accuracy;
    if (wanted > 0 && loop->scored && accuracy(loop) >= wanted)
        return STOP_ACCURACY;
    int signal = loop->options->signals ? sigtimedwait(loop->options->signals, NULL, &at_once) : 0;
    if (signal > 0)
        return signal == SIGINT ? STOP_INTERRUPT : STOP_TERMINATE;
    if (loop->options->stop && atomic_load(loop->options->stop))
        return STOP_TERMINATE;
    return loop->options->max_seconds > 0 && elapsed(loop) >= loop->options->max_seconds ? STOP_TIME : STOP_NO;
}

// All ranks stop behind the same step, for the strongest of their reasons.
static eng_status ask_to_stop(loop *loop, bool *stopped, eng_error *error) {
    static const char *const words[] = {[STOP_ACCURACY] = "the accuracy is reached",
                                        [STOP_TIME] = "time is up",
                                        [STOP_TERMINATE] = "asked to end",
                                        [STOP_INTERRUPT] = "interrupted"};
    trn_ranks *ranks = loop->run->ranks;
    char own = (char)own_reason(loop), strongest = STOP_NO;
    char *all = malloc((size_t)trn_ranks_count(ranks));
    eng_status status = all ? trn_ranks_exchange(ranks, &own, sizeof own, all, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for the ranks' reasons to stop");
    for (int32_t r = 0; status == ENG_OK && r < trn_ranks_count(ranks); r++)
        strongest = all[r] > strongest ? all[r] : strongest;
    free(all);
    *stopped = strongest != STOP_NO;
    if (loop->options->unfinished)
        *loop->options->unfinished = *stopped && strongest != STOP_ACCURACY;
    if (*stopped)
        print_line(loop, words[(int)strongest]);
    return status;
}

eng_status trn_train_loop(trn_run *run, const trn_loop_options *options, eng_error *error) {
    loop loop = {.run = run,
                 .options = options,
                 .started = trn_seconds(),
                 .seconds_before = run->state.seconds,
                 .saved_step = -1};
    eng_status status = open_log(&loop, error);
    if (status != ENG_OK)
        return status;
    if (speaks(&loop) && !options->out)
        trn_progress_begin(&loop.progress);
    bool stopped = false;
    while (status == ENG_OK && run->state.step < run->config.steps) {
        status = ask_to_stop(&loop, &stopped, error);
        if (status != ENG_OK || stopped)
            break;
        status = one_step(&loop, error);
    }
    bool worked = loop.report.step > 0;
    if (status == ENG_OK)
        status = turn_profile(&loop, true, error);
    run->runner.profile = NULL;
    trn_profile_free(loop.profile);
    if (status == ENG_OK && worked && loop.saved_step != run->state.step)
        status = save(&loop, error);
    trn_progress_end(&loop.progress);
    if (loop.log && fclose(loop.log) != 0 && status == ENG_OK)
        status = eng_fail(error, ENG_IO, "%s/log.jsonl: %s", options->folder, strerror(errno));
    if (status == ENG_OK && !stopped && !worked && speaks(&loop))
        fprintf(output(&loop), "all %lld steps are done\n", (long long)run->config.steps);
    return status;
}

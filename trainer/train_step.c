// SPDX-License-Identifier: Apache-2.0
// One optimizer step of a run, and its validation; see run.h.
//
// The loss of a step is the sum over all its targets divided by their number, whatever the micro-batches: every
// target's weight is 1 / (counted targets of the step), so that gradients of micro-batches simply add up.
#include <float.h>
#include <math.h>
#include <stdio.h>

#include "trainer/run_loops.h"

static eng_status load_rows(trn_run *run, trn_step_report *report, eng_error *error) {
    for (int32_t i = 0; i < run->batch_rows; i++) {
        int64_t index = trn_dataset_order(run->train, (uint64_t)run->config.seed, report->first_place + i);
        eng_status status = trn_dataset_row(run->train, index, &run->row[i], error);
        if (status != ENG_OK)
            return status;
        report->tokens += run->row[i].length;
        report->targets += run->row[i].counted;
    }
    return ENG_OK;
}

static void add_compute(eng_compute *sum, const eng_compute *part) {
    sum->solves += part->solves;
    sum->steps += part->steps;
    sum->unconverged += part->unconverged;
    if (part->steps_max > sum->steps_max)
        sum->steps_max = part->steps_max;
}

static eng_status run_micro_batches(trn_run *run, trn_step_report *report, eng_error *error) {
    double loss = 0;
    for (int32_t first = 0; first < run->batch_rows; first += run->micro_rows) {
        eng_status status = ENG_OK;
        trn_batch_clear(&run->batch);
        for (int32_t i = first; status == ENG_OK && i < run->batch_rows && i < first + run->micro_rows; i++)
            status = trn_batch_add(&run->batch, &run->row[i], 1.0 / (double)report->targets, run->solver, error);
        if (status == ENG_OK)
            status = trn_batch_run(&run->batch, error);
        if (status != ENG_OK)
            return status;
        loss += trn_batch_loss(&run->batch, 0, run->runner.rows->n_tokens);
        add_compute(&report->solves, &run->batch.solves);
        add_compute(&report->backward_solves, &run->batch.backward_solves);
        status = trn_exits_add(&report->exits, &run->runner, error);
        if (status != ENG_OK)
            return status;
    }
    report->loss = loss / (double)report->targets;
    return ENG_OK;
}

// Weights first: what is wrong with one is seen in every gradient.
static eng_status find_culprit(trn_run *run, trn_step_report *report, eng_error *error) {
    const struct {
        const char *what;
        const float *block;
    } blocks[] = {{"weight", run->weights->masters}, {"gradient", run->weights->grads}};
    int32_t tensor = -1;
    eng_status status = ENG_OK;
    for (size_t i = 0; status == ENG_OK && tensor < 0 && i < sizeof blocks / sizeof *blocks; i++) {
        status = trn_optimizer_find_not_finite(&run->optimizer, blocks[i].block, &tensor, error);
        if (tensor >= 0)
            snprintf(report->culprit, sizeof report->culprit, "%s %s", blocks[i].what, run->model->tensor[tensor].name);
    }
    if (tensor < 0)
        snprintf(report->culprit, sizeof report->culprit, "%s", isfinite(report->loss) ? "gradient norm" : "loss");
    return status;
}

// Without clipping the square of a gradient must fit into a float: a moment that is infinite stays so.
static bool is_usable(const trn_run *run, const trn_step_report *report) {
    return isfinite(report->loss) && isfinite(report->gradient_norm) &&
           (run->optimizer.adamw.clip > 0 || report->gradient_norm < sqrt(FLT_MAX));
}

static eng_status compute_update(trn_run *run, trn_step_report *report, eng_error *error) {
    eng_status status = trn_optimizer_zero_gradients(&run->optimizer, error);
    if (status == ENG_OK)
        status = trn_run_set_entropy(run, error);
    if (status == ENG_OK)
        status = run_micro_batches(run, report, error);
    if (status == ENG_OK)
        status = trn_optimizer_norm(&run->optimizer, &report->gradient_norm, error);
    if (status != ENG_OK)
        return status;
    if (!is_usable(run, report)) {
        report->outcome = TRN_STEP_NOT_FINITE;
        return find_culprit(run, report, error);
    }
    return trn_optimizer_update(&run->optimizer, report->rate, error);
}

eng_status trn_run_step(trn_run *run, trn_step_report *report, eng_error *error) {
    int64_t step = run->state.step;
    *report = (trn_step_report){.step = step + 1,
                                .first_place = step * run->batch_rows,
                                .rate = trn_schedule_rate(&run->schedule, step),
                                .outcome = TRN_STEP_DONE};
    eng_status status = load_rows(run, report, error);
    if (status != ENG_OK)
        return status;
    if (report->targets == 0)
        report->outcome = TRN_STEP_EMPTY;
    else
        status = compute_update(run, report, error);
    if (status == ENG_OK) {
        run->state.step++;
        run->state.tokens += report->targets;
        run->state.bad_steps += report->outcome == TRN_STEP_NOT_FINITE;
        if (report->outcome != TRN_STEP_EMPTY)
            run->state.bad_in_row = report->outcome == TRN_STEP_NOT_FINITE ? run->state.bad_in_row + 1 : 0;
    }
    return status;
}

// Rows of the validation set in an order of their own, so that a few of them are a fair sample.
static eng_status score_rows(trn_run *run, int64_t first, int64_t end, trn_score *score, eng_error *error) {
    trn_batch_clear(&run->batch);
    int64_t targets = 0;
    for (int64_t place = first; place < end; place++) {
        trn_row *row = &run->row[0];
        eng_status status = trn_dataset_row(run->valid, trn_dataset_order(run->valid, 0, place), row, error);
        if (status == ENG_OK)
            status = trn_batch_add(&run->batch, row, 0, run->solver, error);
        if (status != ENG_OK)
            return status;
        targets += row->counted;
    }
    eng_status status = trn_batch_run(&run->batch, error);
    if (status != ENG_OK)
        return status;
    score->loss += trn_batch_loss(&run->batch, 0, run->runner.rows->n_tokens);
    score->targets += targets;
    trn_batch_hits(&run->batch, &score->hits);
    add_compute(&score->solves, &run->batch.solves);
    return trn_exits_add(&score->exits, &run->runner, error);
}

eng_status trn_run_validate(trn_run *run, trn_score *score, eng_error *error) {
    int64_t rows = trn_dataset_rows(run->valid), limit = run->config.eval_rows;
    if (limit > 0 && limit < rows)
        rows = limit;
    *score = (trn_score){0};
    eng_status status = ENG_OK;
    run->runner.plan = run->score_plan;
    for (int64_t first = 0; status == ENG_OK && first < rows; first += run->micro_rows) {
        int64_t end = first + run->micro_rows < rows ? first + run->micro_rows : rows;
        status = score_rows(run, first, end, score, error);
    }
    run->runner.plan = run->train_plan;
    return status;
}

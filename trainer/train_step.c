// SPDX-License-Identifier: Apache-2.0
// One optimizer step of a run, and its validation; see run.h.
//
// The loss of a step is the sum over all its targets divided by their number, whatever the micro-batches: every
// target's weight is 1 / (counted targets of the step), so that gradients of micro-batches, and of ranks, simply add
// up.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "trainer/profile.h"
#include "trainer/run_loops.h"

// What a rank has of a step or a validation, and the ranks together.
typedef struct figures {
    double loss, divergence; // sums over targets
    int64_t tokens, targets;
    trn_hits hits;
    eng_compute solves, backward_solves;
    trn_exits exits;
} figures;

static void add_compute(eng_compute *sum, const eng_compute *part) {
    sum->solves += part->solves;
    sum->steps += part->steps;
    sum->unconverged += part->unconverged;
    if (part->steps_max > sum->steps_max)
        sum->steps_max = part->steps_max;
}

static void add_figures(figures *sum, const figures *part) {
    sum->loss += part->loss;
    sum->divergence += part->divergence;
    sum->tokens += part->tokens;
    sum->targets += part->targets;
    sum->hits.targets += part->hits.targets;
    sum->hits.rows += part->hits.rows;
    add_compute(&sum->solves, &part->solves);
    add_compute(&sum->backward_solves, &part->backward_solves);
    trn_exits_merge(&sum->exits, &part->exits);
}

// In the ranks' order, so that all come to the same bits.
static eng_status add_ranks(const trn_run *run, figures *own, eng_error *error) {
    const int32_t ranks = trn_ranks_count(run->ranks);
    figures *all = calloc((size_t)ranks, sizeof *all);
    eng_status status = all ? trn_ranks_exchange(run->ranks, own, sizeof *own, all, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for the figures of %d ranks", ranks);
    if (status == ENG_OK)
        *own = all[0];
    for (int32_t r = 1; status == ENG_OK && r < ranks; r++)
        add_figures(own, &all[r]);
    free(all);
    return status;
}

static eng_status load_rows(trn_run *run, trn_step_report *report, eng_error *error) {
    figures read = {0};
    for (int32_t i = 0; i < run->own_rows; i++) {
        int64_t index =
            trn_dataset_order(run->train, (uint64_t)run->config.seed, report->first_place + run->first_row + i);
        eng_status status = trn_dataset_row(run->train, index, &run->row[i], error);
        if (status != ENG_OK)
            return status;
        read.tokens += run->row[i].length;
        read.targets += run->row[i].counted;
    }
    eng_status status = add_ranks(run, &read, error);
    report->tokens = read.tokens;
    report->targets = read.targets;
    return status;
}

// Backward has ended with a block of the parameters.
static eng_status sum_block(void *context, int32_t block, eng_error *error) {
    return trn_optimizer_sum(context, block, error);
}

static eng_status run_micro_batch(trn_run *run, int32_t first, double weight, figures *sum, eng_error *error) {
    eng_status status = trn_ranks_check(run->ranks, error);
    trn_batch_clear(&run->batch);
    for (int32_t i = first; status == ENG_OK && i < run->own_rows && i < first + run->micro_rows; i++)
        status = trn_batch_join(&run->batch, &run->row[i], weight, run->solver, error);
    trn_profile_piece(run->runner.profile, NULL, TRN_PHASE_DATA, "rows into the batch", (kern_cost){0});
    if (status == ENG_OK)
        status = trn_batch_run(&run->batch, error);
    if (status != ENG_OK)
        return status;
    sum->loss += trn_batch_loss(&run->batch, 0, run->runner.rows->n_tokens);
    sum->divergence += trn_batch_divergence(&run->batch);
    add_compute(&sum->solves, &run->batch.solves);
    add_compute(&sum->backward_solves, &run->batch.backward_solves);
    return trn_exits_add(&sum->exits, &run->runner, error);
}

// The last one's backward sums gradients over the ranks while it goes on.
static eng_status run_micro_batches(trn_run *run, trn_step_report *report, eng_error *error) {
    const trn_stops stops = {run->block_end, run->optimizer.blocks.count, sum_block, &run->optimizer};
    figures sum = {0};
    eng_status status = ENG_OK;
    for (int32_t first = 0; status == ENG_OK && first < run->own_rows; first += run->micro_rows) {
        const bool last = first + run->micro_rows >= run->own_rows;
        run->runner.stops = run->ranks && last ? &stops : NULL;
        status = run_micro_batch(run, first, 1.0 / (double)report->targets, &sum, error);
    }
    run->runner.stops = NULL;
    if (status == ENG_OK)
        status = add_ranks(run, &sum, error);
    report->loss = sum.loss / (double)report->targets;
    report->divergence = sum.divergence / (double)report->targets;
    report->solves = sum.solves;
    report->backward_solves = sum.backward_solves;
    report->exits = sum.exits;
    return status;
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
        snprintf(report->culprit, sizeof report->culprit, "%s",
                 !isfinite(report->loss)         ? "loss"
                 : !isfinite(report->divergence) ? "divergence"
                                                 : "gradient norm");
    return status;
}

static void profile_optimizer(const trn_run *run, const char *name, double words, double operations) {
    trn_profile_parameters(run->runner.profile, run->runner.stream, name, run->weights->count, words, operations);
}

static eng_status compute_update(trn_run *run, trn_step_report *report, eng_error *error) {
    eng_status status = trn_optimizer_zero_gradients(&run->optimizer, error);
    profile_optimizer(run, "clearing gradients", 1, 0);
    if (status == ENG_OK)
        status = trn_run_set_entropy(run, error);
    if (status == ENG_OK)
        status = run_micro_batches(run, report, error);
    if (status == ENG_OK)
        status = trn_optimizer_norm(&run->optimizer, error);
    profile_optimizer(run, "gradient norm", 1, 2);
    const bool known = isfinite(report->loss) && isfinite(report->divergence);
    if (status == ENG_OK && known)
        status = trn_optimizer_update(&run->optimizer, report->rate, error);
    profile_optimizer(run, "AdamW", run->optimizer.rest ? 9 : 7, 15);
    bool usable = false;
    if (status == ENG_OK)
        status = trn_optimizer_outcome(&run->optimizer, &report->gradient_norm, &usable, error);
    if (status != ENG_OK || (usable && known))
        return status;
    report->outcome = TRN_STEP_NOT_FINITE;
    return find_culprit(run, report, error);
}

eng_status trn_run_step(trn_run *run, trn_step_report *report, eng_error *error) {
    int64_t step = run->state.step;
    *report = (trn_step_report){.step = step + 1,
                                .first_place = step * run->batch_rows,
                                .rate = trn_schedule_rate(&run->schedule, step),
                                .outcome = TRN_STEP_DONE};
    trn_profile_begin(run->runner.profile);
    eng_status status = load_rows(run, report, error);
    trn_profile_piece(run->runner.profile, NULL, TRN_PHASE_DATA, "rows from shards", (kern_cost){0});
    if (status != ENG_OK)
        return status;
    if (report->targets == 0)
        report->outcome = TRN_STEP_EMPTY;
    else
        status = compute_update(run, report, error);
    trn_profile_end(run->runner.profile);
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
static eng_status score_rows(trn_run *run, int64_t first, int64_t end, figures *sum, eng_error *error) {
    trn_batch_clear(&run->batch);
    for (int64_t place = first; place < end; place++) {
        trn_row *row = &run->row[0];
        eng_status status = trn_dataset_row(run->valid, trn_dataset_order(run->valid, 0, place), row, error);
        if (status == ENG_OK)
            status = trn_batch_add(&run->batch, row, 0, run->solver, error);
        if (status != ENG_OK)
            return status;
        sum->targets += row->counted;
    }
    eng_status status = trn_batch_run(&run->batch, error);
    if (status != ENG_OK)
        return status;
    sum->loss += trn_batch_loss(&run->batch, 0, run->runner.rows->n_tokens);
    sum->divergence += trn_batch_divergence(&run->batch);
    trn_batch_hits(&run->batch, &sum->hits);
    add_compute(&sum->solves, &run->batch.solves);
    return trn_exits_add(&sum->exits, &run->runner, error);
}

eng_status trn_run_validate(trn_run *run, trn_score *score, eng_error *error) {
    const int64_t rank = trn_ranks_own(run->ranks), ranks = trn_ranks_count(run->ranks);
    int64_t rows = trn_dataset_rows(run->valid), limit = run->config.eval_rows;
    if (limit > 0 && limit < rows)
        rows = limit;
    const int64_t last = rows * (rank + 1) / ranks;
    figures sum = {0};
    eng_status status = ENG_OK;
    run->runner.plan = run->score_plan;
    for (int64_t first = rows * rank / ranks; status == ENG_OK && first < last; first += run->micro_rows) {
        int64_t end = first + run->micro_rows < last ? first + run->micro_rows : last;
        status = score_rows(run, first, end, &sum, error);
    }
    run->runner.plan = run->train_plan;
    if (status == ENG_OK)
        status = add_ranks(run, &sum, error);
    *score = (trn_score){.loss = sum.loss,
                         .divergence = sum.divergence,
                         .targets = sum.targets,
                         .hits = sum.hits,
                         .solves = sum.solves,
                         .exits = sum.exits};
    return status;
}

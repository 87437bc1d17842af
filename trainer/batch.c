// SPDX-License-Identifier: Apache-2.0
// Rows of a data set in a runner; see batch.h.
// Copies results to the host after each run, so that callers never look into device memory.
#include "trainer/batch.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/progress.h"

eng_status trn_batch_create(trn_runner *runner, trn_batch *out, eng_error *error) {
    size_t tokens = (size_t)runner->plan->options.max_tokens;
    bool solves = runner->plan->solves.ref != 0;
    trn_batch batch = {.runner = runner,
                       .loss = calloc(tokens, sizeof *batch.loss),
                       .divergence = calloc(tokens, sizeof *batch.divergence),
                       .best = calloc(tokens, sizeof *batch.best),
                       .loops = calloc(tokens, sizeof *batch.loops),
                       .token_solves = solves ? calloc(tokens, sizeof *batch.token_solves) : NULL};
    if (!batch.loss || !batch.divergence || !batch.best || !batch.loops || (solves && !batch.token_solves)) {
        trn_batch_free(&batch);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the results of %zu tokens", tokens);
    }
    *out = batch;
    return ENG_OK;
}

void trn_batch_free(trn_batch *batch) {
    free(batch->loss);
    free(batch->divergence);
    free(batch->best);
    free(batch->loops);
    free(batch->token_solves);
    memset(batch, 0, sizeof *batch);
}

void trn_batch_clear(trn_batch *batch) {
    trn_runner_clear(batch->runner);
    batch->runner->rows->merge = true;
}

eng_status trn_batch_add(trn_batch *batch, const trn_row *row, double weight, kern_solver solver, eng_error *error) {
    kern_rows *rows = batch->runner->rows;
    int32_t token0 = rows->n_tokens;
    if (row->boundaries > rows->max_boundaries - rows->n_boundaries)
        return eng_fail(error, ENG_FULL, "more than %d documents start inside the rows of a batch",
                        rows->max_boundaries);
    eng_status status = trn_runner_add_row(batch->runner, KERN_ROW_PROMPT, -1, 0, row->id, row->length, solver, error);
    if (status != ENG_OK)
        return status;
    memcpy(rows->target + token0, row->target, sizeof *row->target * (size_t)row->length);
    for (int32_t i = 0; i < row->length; i++)
        rows->target_weight[token0 + i] = row->target[i] >= 0 ? (float)weight : 0;
    rows->row[rows->n_rows - 1].boundaries = row->boundaries;
    for (int32_t i = 0; i < row->boundaries; i++)
        rows->boundary[rows->n_boundaries++] = token0 + row->boundary[i];
    return ENG_OK;
}

eng_status trn_batch_join(trn_batch *batch, const trn_row *row, double weight, kern_solver solver, eng_error *error) {
    kern_rows *rows = batch->runner->rows;
    const int32_t chunk = kern_device_describe(batch->runner->device)->chunk, token0 = rows->n_tokens;
    const bool follows = rows->n_rows > 0 && rows->row[rows->n_rows - 1].length + row->length <= chunk &&
                         rows->n_boundaries < rows->max_boundaries;
    eng_status status = trn_batch_add(batch, row, weight, solver, error);
    if (status != ENG_OK || !follows)
        return status;
    kern_row *last = &rows->row[rows->n_rows - 2];
    const int32_t own = row->boundaries, first = rows->n_boundaries - own;
    memmove(rows->boundary + first + 1, rows->boundary + first, sizeof *rows->boundary * (size_t)own);
    rows->boundary[first] = token0;
    rows->n_boundaries++;
    last->length += row->length;
    last->boundaries += 1 + own;
    rows->n_rows--;
    return ENG_OK;
}

static eng_status read_solves(trn_batch *batch, kern_ptr reference, eng_compute *sum, eng_error *error) {
    int32_t tokens = batch->runner->rows->n_tokens;
    size_t bytes = sizeof *batch->token_solves * (size_t)tokens;
    *sum = (eng_compute){0};
    if (!reference.ref)
        return ENG_OK;
    eng_status status = trn_runner_read(batch->runner, reference, batch->token_solves, bytes, error);
    if (status == ENG_OK)
        eng_add_solves(batch->token_solves, tokens, sum);
    return status;
}

// A float a token; nothing is read from a null reference.
static eng_status read_floats(trn_batch *batch, kern_ptr reference, float *out, eng_error *error) {
    const size_t tokens = (size_t)batch->runner->rows->n_tokens;
    if (!reference.ref)
        return ENG_OK;
    eng_status status = trn_runner_read(batch->runner, reference, out, sizeof *out * tokens, error);
    for (size_t i = 0; status == ENG_OK && i < tokens; i++)
        out[i] = (float)trn_unsigned_nan((double)out[i]);
    return status;
}

eng_status trn_batch_run(trn_batch *batch, eng_error *error) {
    trn_runner *runner = batch->runner;
    const eng_plan *plan = runner->plan;
    size_t tokens = (size_t)runner->rows->n_tokens;
    eng_status status = batch->teacher ? trn_teacher_run(batch->teacher, runner, error) : ENG_OK;
    if (status == ENG_OK)
        status = trn_runner_run(runner, error);
    if (status == ENG_OK)
        status = read_floats(batch, plan->loss, batch->loss, error);
    if (status == ENG_OK)
        status = read_floats(batch, plan->divergence, batch->divergence, error);
    if (status == ENG_OK && plan->best.ref)
        status = trn_runner_read(runner, plan->best, batch->best, sizeof *batch->best * tokens, error);
    if (status == ENG_OK && plan->loops.ref)
        status = trn_runner_read(runner, plan->loops, batch->loops, sizeof *batch->loops * tokens, error);
    if (status == ENG_OK)
        status = read_solves(batch, plan->backward_solves, &batch->backward_solves, error);
    return status == ENG_OK ? read_solves(batch, plan->solves, &batch->solves, error) : status;
}

double trn_batch_loss(const trn_batch *batch, int32_t token0, int32_t count) {
    double sum = 0;
    for (int32_t i = 0; i < count; i++)
        sum += (double)batch->loss[token0 + i];
    return sum;
}

double trn_batch_divergence(const trn_batch *batch) {
    double sum = 0;
    for (int32_t i = 0; batch->teacher && i < batch->runner->rows->n_tokens; i++)
        sum += (double)batch->divergence[i];
    return sum;
}

void trn_batch_hits(const trn_batch *batch, trn_hits *sum) {
    const kern_rows *rows = batch->runner->rows;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        int64_t targets = 0, right = 0;
        for (int32_t t = row->token0; t < row->token0 + row->length; t++) {
            targets += rows->target[t] >= 0;
            right += rows->target[t] >= 0 && batch->best[t] == rows->target[t];
        }
        sum->targets += right;
        sum->rows += targets > 0 && right == targets;
    }
}

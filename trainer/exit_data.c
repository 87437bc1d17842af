// SPDX-License-Identifier: Apache-2.0
// Outputs of all loops; see exit_data.h.
// The head has a plan of its own, with a row a token, and takes a tile of targets at a time.
#include "trainer/exit_data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"

enum { TILE = 128 };

typedef struct normaliser {
    double top, log_sum; // the largest logit, and the logarithm of the sum of exp(logit - top)
} normaliser;

typedef struct reading {
    trn_evaluation *e;
    trn_exit_data *out;
    trn_runner head;
    int32_t width, vocabulary;
    float *hidden;           // (TILE, width) of one loop
    float *logits, *earlier; // (TILE, vocabulary) of this loop and of the one before
    normaliser before[TILE]; // of the one before
    int64_t capacity;        // targets that there is room for
} reading;

void trn_exit_data_free(trn_exit_data *data) {
    free(data->end);
    free(data->loss);
    free(data->entropy);
    free(data->change);
    free(data->gate);
    free(data->right);
    *data = (trn_exit_data){0};
}

// -------------------------------------------------------------------------------------------------------------- output

// One pass with exponentials: with e = exp(logit - top), the entropy is log_sum - sum e (logit - top) / sum, and the
// divergence from the loop before likewise.
static void measure(reading *r, int32_t place_in_tile, bool first, int32_t target, int64_t place) {
    const size_t at = (size_t)place_in_tile * (size_t)r->vocabulary;
    const float *logits = r->logits + at, *earlier = r->earlier + at;
    const normaliser before = r->before[place_in_tile];
    double sum = 0, log_mean = 0, change = 0;
    int32_t best = 0;
    for (int32_t i = 1; i < r->vocabulary; i++)
        best = logits[i] > logits[best] ? i : best;
    const double top = (double)logits[best];
    for (int32_t i = 0; i < r->vocabulary; i++) {
        const double below = (double)logits[i] - top, e = exp(below);
        sum += e;
        log_mean += e * below;
        if (!first)
            change += e * (below - ((double)earlier[i] - before.top));
    }
    const double log_sum = log(sum);
    r->before[place_in_tile] = (normaliser){top, log_sum};
    r->out->loss[place] = (float)(top + log_sum - (double)logits[target]);
    r->out->right[place] = best == target;
    r->out->entropy[place] = (float)(log_sum - log_mean / sum);
    r->out->change[place] = first ? INFINITY : (float)fmax(change / sum - log_sum + before.log_sum, 0);
}

static eng_status run_head(reading *r, int32_t count, eng_error *error) {
    trn_runner *head = &r->head;
    const int32_t none = 0;
    const size_t bytes = sizeof(float) * (size_t)count * (size_t)r->width;
    eng_status status = ENG_OK;
    trn_runner_clear(head);
    for (int32_t i = 0; status == ENG_OK && i < count; i++) {
        status = trn_runner_add_row(head, KERN_ROW_GENERATED, -1, 0, &none, 1, (kern_solver){0}, error);
        head->rows->logits_token[i] = i;
        head->rows->sampler[i] = (kern_sampler){.forced = 0};
    }
    head->rows->n_logits = count;
    if (status == ENG_OK)
        status = eng_fail_kernel(
            error, kern_upload(head->stream, eng_plan_address(&head->memory, head->plan->hidden), r->hidden, bytes),
            "copying outputs of loops");
    if (status == ENG_OK)
        status = trn_runner_run(head, error);
    if (status != ENG_OK)
        return status;
    return trn_runner_read(head, head->plan->logits, r->logits, sizeof(float) * (size_t)count * (size_t)r->vocabulary,
                           error);
}

// (count, width) of planes of loops; neighbouring tokens in one copy.
static eng_status read_tokens(reading *r, kern_ptr planes, int32_t width, const int32_t *token, int32_t count,
                              int32_t loop, float *to, eng_error *error) {
    trn_runner *runner = &r->e->runner;
    const size_t bytes = sizeof(float) * (size_t)width;
    eng_status status = ENG_OK;
    for (int32_t i = 0, next; status == ENG_OK && i < count; i = next) {
        for (next = i + 1; next < count && token[next] == token[next - 1] + 1;)
            next++;
        const uint64_t row = (uint64_t)loop * (uint64_t)runner->plan->loop_stride + (uint64_t)token[i];
        status = trn_runner_read(runner, (kern_ptr){.ref = planes.ref + row * bytes}, to + (size_t)i * (size_t)width,
                                 (size_t)(next - i) * bytes, error);
    }
    return status;
}

// Of the tokens token[0 .. count) of the batch, whose values stand at targets first .. .
static eng_status run_loop(reading *r, const int32_t *token, int32_t count, int32_t loop, int64_t first,
                           eng_error *error) {
    const kern_rows *rows = r->e->runner.rows;
    float *before = r->logits;
    r->logits = r->earlier;
    r->earlier = before;
    eng_status status = read_tokens(r, r->e->runner.plan->loop_hidden, r->width, token, count, loop, r->hidden, error);
    if (status == ENG_OK)
        status = run_head(r, count, error);
    for (int32_t i = 0; status == ENG_OK && i < count; i++)
        measure(r, i, loop == 0, rows->target[token[i]], (first + i) * r->out->loops + loop);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- batch

// Probabilities of having left, from the gate's logits in planes.
static eng_status read_gate(reading *r, const int32_t *token, int32_t count, int64_t first, eng_error *error) {
    float left[TILE], z[TILE];
    eng_status status = ENG_OK;
    for (int32_t i = 0; i < count; i++)
        left[i] = 1;
    for (int32_t loop = 0; status == ENG_OK && loop < r->out->loops; loop++) {
        status = read_tokens(r, r->e->runner.plan->loop_gate, 1, token, count, loop, z, error);
        for (int32_t i = 0; status == ENG_OK && i < count; i++) {
            left[i] /= 1 + expf(z[i]); // as serving does it
            r->out->gate[(first + i) * r->out->loops + loop] = loop + 1 < r->out->loops ? 1 - left[i] : 1;
        }
    }
    return status;
}

static bool grow_array(void **array, int64_t count, size_t each) {
    void *grown = realloc(*array, (size_t)count * each);
    if (grown)
        *array = grown;
    return grown != NULL;
}

static eng_status grow(reading *r, int64_t targets, eng_error *error) {
    trn_exit_data *out = r->out;
    if (targets <= r->capacity)
        return ENG_OK;
    r->capacity = 2 * targets;
    const int64_t count = r->capacity * out->loops;
    if (grow_array((void **)&out->loss, count, sizeof *out->loss) &&
        grow_array((void **)&out->entropy, count, sizeof *out->entropy) &&
        grow_array((void **)&out->change, count, sizeof *out->change) &&
        grow_array((void **)&out->right, count, sizeof *out->right) &&
        (!out->gated || grow_array((void **)&out->gate, count, sizeof *out->gate)))
        return ENG_OK;
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for what %d loops say about %lld targets", out->loops,
                    (long long)r->capacity);
}

static eng_status take_tile(reading *r, const int32_t *token, int32_t count, eng_error *error) {
    trn_exit_data *out = r->out;
    eng_status status = grow(r, out->targets + count, error);
    for (int32_t loop = 0; status == ENG_OK && loop < out->loops; loop++)
        status = run_loop(r, token, count, loop, out->targets, error);
    if (status == ENG_OK && out->gated)
        status = read_gate(r, token, count, out->targets, error);
    out->targets += count;
    return status;
}

// All targets of the batch, in order; rows are windows.
static eng_status take_batch(reading *r, eng_error *error) {
    const kern_rows *rows = r->e->runner.rows;
    int32_t token[TILE], count = 0;
    int64_t seen = r->out->targets;
    eng_status status = trn_runner_run(&r->e->runner, error);
    for (int32_t i = 0; status == ENG_OK && i < rows->n_rows; i++) {
        for (int32_t t = rows->row[i].token0; status == ENG_OK && t < rows->row[i].token0 + rows->row[i].length; t++) {
            if (rows->target[t] < 0)
                continue;
            token[count++] = t;
            seen++;
            if (count == TILE) {
                status = take_tile(r, token, count, error);
                count = 0;
            }
        }
        r->out->digest =
            eng_hash_mix(r->out->digest ^ eng_hash_bytes((const char *)(rows->target + rows->row[i].token0),
                                                         sizeof(int32_t) * (size_t)rows->row[i].length));
        r->out->end[r->out->windows++] = seen;
    }
    return status == ENG_OK && count > 0 ? take_tile(r, token, count, error) : status;
}

static eng_status read_windows(reading *r, kern_solver solver, eng_error *error) {
    trn_evaluation *e = r->e;
    const kern_rows *rows = e->runner.rows;
    trn_row row = {0};
    eng_status status = trn_row_create(rows->max_tokens, &row, error);
    trn_batch_clear(&e->batch);
    for (int64_t i = 0; status == ENG_OK && i < e->windows.count; i++) {
        const trn_window *window = &e->windows.window[i];
        if (rows->n_rows == rows->max_rows || window->count > rows->max_tokens - rows->n_tokens) {
            status = take_batch(r, error);
            trn_batch_clear(&e->batch);
            trn_progress_part(&e->progress, (uint64_t)i, (uint64_t)e->windows.count, "reading at every loop");
        }
        if (status == ENG_OK)
            status = trn_dataset_window(e->dataset, window->document, window->first, window->count, &row, error);
        if (status == ENG_OK)
            status = trn_batch_add(&e->batch, &row, 0, solver, error);
    }
    if (status == ENG_OK && rows->n_rows > 0)
        status = take_batch(r, error);
    trn_row_free(&row);
    trn_progress_end(&e->progress);
    return status;
}

static eng_status begin(reading *r, eng_error *error) {
    const trn_runner_options options = {
        .plan = {
            .kind = ENG_PLAN_SERVE, .part = ENG_PART_HEAD, .max_tokens = TILE, .max_rows = TILE, .max_logits = TILE}};
    r->hidden = malloc(sizeof(float) * TILE * (size_t)r->width);
    r->logits = malloc(sizeof(float) * TILE * (size_t)r->vocabulary);
    r->earlier = malloc(sizeof(float) * TILE * (size_t)r->vocabulary);
    r->out->end = malloc(sizeof *r->out->end * (size_t)(r->e->windows.count + 1));
    if (!r->hidden || !r->logits || !r->earlier || !r->out->end)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the outputs of loops");
    return trn_runner_create(r->e->weights, &options, &r->head, error);
}

eng_status trn_exit_data_read(trn_evaluation *e, kern_solver solver, trn_exit_data *out, eng_error *error) {
    const eng_config *config = &e->model->config;
    *out = (trn_exit_data){.loops = config->loop.loops, .gated = config->loop.exit_gate};
    if (!eng_model_reads_loops(e->model))
        return eng_fail(error, ENG_INVALID, "the model has no loops to read at");
    reading r = {.e = e, .out = out, .width = config->hidden_size, .vocabulary = config->vocab_size};
    eng_status status = begin(&r, error);
    if (status == ENG_OK)
        status = read_windows(&r, solver, error);
    if (status == ENG_OK && out->targets == 0)
        status = eng_fail(error, ENG_INVALID, "the data has no counted target");
    trn_runner_free(&r.head);
    free(r.hidden);
    free(r.logits);
    free(r.earlier);
    if (status != ENG_OK)
        trn_exit_data_free(out);
    return status;
}

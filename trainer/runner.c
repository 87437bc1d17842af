// SPDX-License-Identifier: Apache-2.0
// Makes a plan's surroundings and runs it; see runner.h. Owns everything but the device and the weights.
// One thread; a runner holds one batch at a time, which the caller fills and runs.
#include "trainer/runner.h"

#include <string.h>

#include "engine/batch.h"
#include "trainer/profile.h"

static int32_t pages_of(const trn_runner_options *options) {
    return (options->slot_tokens + KERN_PAGE_TOKENS - 1) / KERN_PAGE_TOKENS;
}

static kern_status create_pools(const eng_model *model, const trn_runner_options *options, trn_runner *runner) {
    size_t slots = (size_t)options->slots, stride = (model->state_bytes + 63) & ~(size_t)63;
    kern_status status = kern_alloc(runner->device, slots * stride, &runner->states);
    if (status == KERN_OK && eng_model_has_pages(model))
        status = kern_alloc(runner->device, slots * (size_t)pages_of(options) * model->page_bytes, &runner->pages);
    return status;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static eng_status create_memory(const eng_weights *weights, const eng_plan *const also[2], trn_runner *runner,
                                eng_error *error) {
    size_t saved = runner->plan->saved_bytes, scratch = runner->plan->scratch_bytes;
    for (int i = 0; i < 2; i++) {
        saved = larger(saved, also[i] ? also[i]->saved_bytes : 0);
        scratch = larger(scratch, also[i] ? also[i]->scratch_bytes : 0);
    }
    return eng_memory_create(runner->device, weights, saved, scratch, runner->states, runner->pages, &runner->memory,
                             error);
}

eng_status trn_runner_create(const eng_weights *weights, const trn_runner_options *options, trn_runner *out,
                             eng_error *error) {
    const eng_model *model = weights->model;
    trn_runner runner = {
        .device = weights->device, .slot_pages = pages_of(options), .exit = eng_exit(&model->config.knobs)};
    bool serves = options->plan.kind == ENG_PLAN_SERVE;
    int32_t pages = serves && eng_model_has_pages(model) ? options->slots * pages_of(options) : 0;
    eng_status status = eng_plan_create(model, runner.device, &options->plan, &runner.plan, error);
    if (status != ENG_OK)
        return status;
    kern_status made = kern_stream_open(runner.device, &runner.stream);
    if (made == KERN_OK)
        made = kern_rows_create(runner.device, options->plan.max_rows, options->plan.max_tokens,
                                options->plan.max_logits, options->max_boundaries, pages, 0, &runner.rows);
    if (made == KERN_OK && serves)
        made = create_pools(model, options, &runner);
    status = eng_fail_kernel(error, made, "allocating row tables and states");
    if (status == ENG_OK)
        status = create_memory(weights, options->also, &runner, error);
    if (status != ENG_OK) {
        trn_runner_free(&runner);
        return status;
    }
    runner.rows->slot_stride = (model->state_bytes + 63) & ~(size_t)63;
    runner.rows->page_stride = model->page_bytes;
    for (int32_t page = 0; page < pages; page++) // slot s owns the pages [s p, (s + 1) p)
        runner.rows->page[page] = page;
    runner.rows->n_pages = pages;
    *out = runner;
    return ENG_OK;
}

void trn_runner_free(trn_runner *runner) {
    if (!runner->device)
        return;
    eng_memory_free(runner->device, &runner->memory);
    kern_free(runner->device, runner->states);
    kern_free(runner->device, runner->pages);
    kern_rows_free(runner->rows);
    kern_stream_close(runner->stream);
    eng_plan_free(runner->plan);
    memset(runner, 0, sizeof *runner);
}

void trn_runner_clear(trn_runner *runner) {
    kern_rows *rows = runner->rows;
    rows->n_rows = rows->n_tokens = rows->n_generated = rows->n_logits = rows->n_boundaries = 0;
}

eng_status trn_runner_add_row(trn_runner *runner, kern_row_kind kind, int32_t slot, int64_t position,
                              const int32_t *ids, int32_t count, kern_solver solver, eng_error *error) {
    kern_rows *rows = runner->rows;
    if (count < 1 || rows->n_rows == rows->max_rows || count > rows->max_tokens - rows->n_tokens)
        return eng_fail(error, ENG_FULL, "a row of %d ids does not fit into a batch of %d tokens and %d rows", count,
                        rows->max_tokens, rows->max_rows);
    if (kind == KERN_ROW_GENERATED && rows->n_tokens > rows->n_generated)
        return eng_fail(error, ENG_INVALID, "a generated row after a prompt row");
    bool paged = slot >= 0 && runner->pages;
    rows->row[rows->n_rows++] = (kern_row){.kind = kind,
                                           .slot = slot,
                                           .token0 = rows->n_tokens,
                                           .length = count,
                                           .position = position,
                                           .boundary0 = rows->n_boundaries,
                                           .page0 = -1,
                                           .solver = solver,
                                           .exit = runner->exit};
    if (paged)
        rows->row[rows->n_rows - 1].page0 = slot * runner->slot_pages;
    memcpy(rows->id + rows->n_tokens, ids, sizeof *ids * (size_t)count);
    for (int32_t i = 0; i < count; i++) {
        rows->target[rows->n_tokens + i] = -1;
        rows->target_weight[rows->n_tokens + i] = 0;
    }
    rows->n_tokens += count;
    if (kind == KERN_ROW_GENERATED)
        rows->n_generated = rows->n_tokens;
    return ENG_OK;
}

static eng_status run_in_parts(trn_runner *runner, const trn_stops *stops, eng_error *error) {
    const kern_plan *plan = runner->plan->plan;
    eng_status status = ENG_OK;
    size_t first = 0;
    for (int32_t i = 0; status == ENG_OK && i <= stops->count; i++) {
        const size_t end = i < stops->count ? stops->end[i] : kern_plan_length(plan);
        status =
            eng_fail_kernel(error, kern_plan_run_part(plan, runner->stream, runner->rows, &runner->memory, first, end),
                            "running the model");
        if (status == ENG_OK && i < stops->count)
            status = stops->reached(stops->context, i, error);
        first = end;
    }
    return status;
}

static eng_status run_profiled(trn_runner *runner, eng_error *error) {
    const trn_stops *stops = runner->stops;
    eng_status status = trn_profile_run(runner->profile, runner, error);
    for (int32_t i = 0; status == ENG_OK && stops && i < stops->count; i++)
        status = stops->reached(stops->context, i, error);
    return status;
}

eng_status trn_runner_start(trn_runner *runner, eng_error *error) {
    kern_status status = kern_rows_prepare(runner->stream, runner->rows);
    if (status == KERN_OK && runner->profile)
        return run_profiled(runner, error);
    if (status == KERN_OK && runner->stops)
        return run_in_parts(runner, runner->stops, error);
    if (status == KERN_OK)
        status = kern_plan_run(runner->plan->plan, runner->stream, runner->rows, &runner->memory);
    return eng_fail_kernel(error, status, "running the model");
}

eng_status trn_runner_run(trn_runner *runner, eng_error *error) {
    eng_status status = trn_runner_start(runner, error);
    return status == ENG_OK ? eng_fail_kernel(error, kern_synchronize(runner->stream), "running the model") : status;
}

eng_status trn_runner_read(trn_runner *runner, kern_ptr reference, void *host, size_t bytes, eng_error *error) {
    kern_status status = kern_download(runner->stream, host, eng_plan_address(&runner->memory, reference), bytes);
    if (status == KERN_OK)
        status = kern_synchronize(runner->stream);
    return eng_fail_kernel(error, status, "reading an output");
}

kern_solver trn_model_solver(const eng_model *model) {
    const eng_knobs *knobs = &model->config.knobs;
    return (kern_solver){
        .mode = (int32_t)knobs->cg_mode, .max_steps = knobs->cg_max_steps, .tolerance = knobs->cg_tolerance};
}

eng_status trn_parse_storage(const char *text, kern_storage *out, eng_error *error) {
    *out = KERN_STORE_F32;
    if (text && strcmp(text, "bf16") == 0)
        *out = KERN_STORE_BF16;
    else if (text && strcmp(text, "float32") != 0)
        return eng_fail(error, ENG_INVALID, "--state-storage: \"%.20s\" is not float32 or bf16", text);
    return ENG_OK;
}

eng_status trn_check_storage(const kern_device *device, kern_storage storage, eng_error *error) {
    if (storage == KERN_STORE_F32 || kern_device_describe(device)->stores_bf16)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "--state-storage bf16 needs a CUDA device");
}

const char *const trn_cg_modes[] = {[KERN_SOLVE_TOLERANCE] = "tolerance",
                                    [KERN_SOLVE_STEPS] = "steps",
                                    [KERN_SOLVE_EXACT] = "exact",
                                    [KERN_SOLVE_FIXED] = "fixed",
                                    NULL};

const char *trn_cg_mode_name(kern_solve_mode mode) {
    return trn_cg_modes[mode];
}

eng_status trn_parse_cg_mode(const char *text, kern_solve_mode *out, eng_error *error) {
    for (int i = 0; trn_cg_modes[i]; i++)
        if (strcmp(trn_cg_modes[i], text) == 0) {
            *out = (kern_solve_mode)i;
            return ENG_OK;
        }
    return eng_fail(error, ENG_INVALID, "cg-mode: \"%.20s\" is none of tolerance, steps, exact, fixed", text);
}

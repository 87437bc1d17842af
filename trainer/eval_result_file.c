// SPDX-License-Identifier: Apache-2.0
// Results as JSON; see eval_result.h. A file is believed only after every array has as many entries as the row has
// items and every number that is an index is one.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "trainer/eval_result.h"
#include "trainer/jsonl.h"
#include "trainer/runner.h"

#define FORMAT "mesa-trainer eval"

enum { VERSION = 1, MAX_ITEMS = 1 << 26 };

// ------------------------------------------------------------------------------------------------------------- writing

static void set_estimate(trn_json *json, const char *prefix, trn_estimate estimate) {
    static const char *const part[] = {"mean", "error", "count"};
    char key[3][32];
    for (int i = 0; i < 3; i++)
        snprintf(key[i], sizeof key[i], "%s%s", prefix, part[i]);
    trn_json_set_real(json, key[0], estimate.mean);
    trn_json_set_real(json, key[1], estimate.error);
    trn_json_set_integer(json, key[2], estimate.count);
}

static trn_json *metric_json(const trn_result_row *row, const trn_metric *metric) {
    trn_json *json = trn_json_create();
    if (!json)
        return NULL;
    trn_json_set_string(json, "name", metric->name);
    set_estimate(json, "", trn_metric_estimate(metric, NULL, NULL, 0));
    if (row->overlap)
        set_estimate(json, "clean_", trn_metric_estimate(metric, row->overlap, NULL, 0));
    trn_json_set_real(json, "chance", metric->chance);
    for (int32_t g = 0; g < row->groups; g++) {
        trn_json *group = trn_json_create();
        if (group) {
            trn_json_set_string(group, "group", row->group_name[g]);
            set_estimate(group, "", trn_metric_estimate(metric, NULL, row->group, g));
        }
        trn_json_add_object(json, "by_group", group);
    }
    trn_json_set_reals(json, "values", metric->value, metric->items);
    if (metric->weight)
        trn_json_set_reals(json, "weights", metric->weight, metric->items);
    return json;
}

static void set_items(trn_json *json, const trn_result_row *row) {
    double *numbers = malloc(sizeof *numbers * ((size_t)row->items + 1));
    int64_t count = 0;
    for (int64_t i = 0; numbers && row->overlap && i < row->items; i++)
        if (row->overlap[i])
            numbers[count++] = (double)i;
    if (numbers && row->overlap)
        trn_json_set_reals(json, "overlap", numbers, count);
    for (int64_t i = 0; numbers && row->group && i < row->items; i++)
        numbers[i] = row->group[i];
    if (numbers && row->groups > 0) {
        trn_json_set_strings(json, "groups", row->group_name, row->groups);
        trn_json_set_reals(json, "group", numbers, row->items);
    }
    free(numbers);
}

static void set_solver(trn_json *json, const trn_result_row *row) {
    const eng_knobs *knobs = &row->setting.knobs;
    trn_json_set_string(json, "setting", row->setting.name);
    trn_json_set_string(json, "cg_mode", trn_cg_mode_name((kern_solve_mode)eng_solver(knobs).mode));
    trn_json_set_real(json, "cg_tolerance", (double)knobs->cg_tolerance);
    trn_json_set_integer(json, "cg_max_steps", knobs->cg_max_steps);
}

static void set_figures(trn_json *json, const trn_reading_figures *figures) {
    trn_json_set_integer(json, "tokens", figures->tokens);
    trn_json_set_integer(json, "unshared_tokens", figures->unshared);
    trn_json_set_real(json, "seconds", figures->seconds);
    trn_json_set_integer(json, "solves", (int64_t)figures->solves.solves);
    trn_json_set_integer(json, "solver_steps", (int64_t)figures->solves.steps);
    trn_json_set_integer(json, "solver_steps_max", figures->solves.steps_max);
    trn_json_set_integer(json, "unconverged", (int64_t)figures->solves.unconverged);
}

static trn_json *row_json(const trn_result_row *row) {
    trn_json *json = trn_json_create();
    if (!json)
        return NULL;
    trn_json_set_string(json, "task", row->task);
    trn_json_set_string(json, "digest", row->digest);
    set_solver(json, row);
    trn_json_set_string(json, "primary", row->primary);
    trn_json_set_integer(json, "items", row->items);
    trn_json_set_integer(json, "length", row->length);
    trn_json_set_integer(json, "shots", row->shots);
    trn_json_set_integer(json, "seed", row->seed);
    trn_json_set_integer(json, "limit", row->limit);
    trn_json_set_integer(json, "truncated", row->truncated);
    trn_json_set_integer(json, "in_domain", row->in_domain);
    set_figures(json, &row->figures);
    for (int i = 0; i < row->metrics; i++)
        trn_json_add_object(json, "metrics", metric_json(row, &row->metric[i]));
    for (int b = 0; b < TRN_BUCKETS; b++)
        if (row->position[b].items > 0) {
            trn_json *position = metric_json(row, &row->position[b]);
            if (position)
                trn_json_set_integer(position, "bucket", b);
            trn_json_add_object(json, "positions", position);
        }
    set_items(json, row);
    return json;
}

eng_status trn_result_write(const trn_result *result, const char *path, eng_error *error) {
    trn_json *json = trn_json_create();
    if (!json)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    trn_json_set_string(json, "format", FORMAT);
    trn_json_set_integer(json, "version", VERSION);
    trn_json_set_string(json, "name", result->name);
    trn_json_set_string(json, "model", result->model);
    trn_json_set_string(json, "digest", result->digest);
    trn_json_set_string(json, "model_type", result->model_type);
    trn_json_set_string(json, "device", result->device);
    trn_json_set_integer(json, "parameters", result->parameters);
    trn_json_set_integer(json, "weight_bytes", result->weight_bytes);
    trn_json_set_integer(json, "state_bytes", result->state_bytes);
    trn_json_set_integer(json, "trained_length", result->trained_length);
    for (int i = 0; i < result->rows; i++)
        trn_json_add_object(json, "rows", row_json(&result->row[i]));
    char *text = trn_json_text(json, false);
    eng_status status = text ? eng_write_file_atomic(path, text, strlen(text), error)
                             : eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    free(text);
    trn_json_free(json);
    return status;
}

// ------------------------------------------------------------------------------------------------------------- reading

static eng_status bad(const trn_json *json, const char *key, const char *what, eng_error *error) {
    return eng_fail(error, ENG_FORMAT, "%s: %s: %s", trn_json_origin(json), key, what);
}

static eng_status read_integer(const trn_json *json, const char *key, int64_t least, int64_t most, int64_t *out,
                               eng_error *error) {
    eng_status status = trn_json_integer(json, key, out, error);
    if (status == ENG_OK && (*out < least || *out > most))
        return bad(json, key, "out of range", error);
    return status;
}

static eng_status read_copy(const trn_json *json, const char *key, char **out, eng_error *error) {
    const char *text = NULL;
    eng_status status = trn_json_string(json, key, &text, error);
    if (status == ENG_OK && !(*out = strdup(text)))
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", trn_json_origin(json));
    return status;
}

static eng_status read_short(const trn_json *json, const char *key, char *out, size_t size, eng_error *error) {
    const char *text = NULL;
    eng_status status = trn_json_string(json, key, &text, error);
    if (status == ENG_OK && strlen(text) >= size)
        return bad(json, key, "too long", error);
    if (status == ENG_OK)
        memcpy(out, text, strlen(text) + 1);
    return status;
}

// As many numbers as the row has items.
static eng_status read_reals(const trn_json *json, const char *key, int64_t items, double **out, eng_error *error) {
    int64_t count = 0;
    eng_status status = trn_json_reals(json, key, out, &count, error);
    return status == ENG_OK && count != items ? bad(json, key, "not a number for each item", error) : status;
}

static eng_status read_metric(const trn_json *json, int64_t items, trn_metric *out, eng_error *error) {
    *out = (trn_metric){.items = items, .chance = NAN};
    eng_status status = read_short(json, "name", out->name, sizeof out->name, error);
    if (status == ENG_OK)
        status = read_reals(json, "values", items, &out->value, error);
    if (status == ENG_OK && trn_json_has(json, "weights"))
        status = read_reals(json, "weights", items, &out->weight, error);
    if (status == ENG_OK && trn_json_is_number(json, "chance"))
        status = trn_json_real(json, "chance", &out->chance, error);
    return status;
}

static eng_status visit_metric(void *context, const trn_json *json, eng_error *error) {
    trn_result_row *row = context;
    if (row->metrics == TRN_MAX_METRICS)
        return bad(json, "metrics", "too many", error);
    return read_metric(json, row->items, &row->metric[row->metrics++], error);
}

static eng_status visit_position(void *context, const trn_json *json, eng_error *error) {
    trn_result_row *row = context;
    int64_t bucket = 0;
    eng_status status = read_integer(json, "bucket", 0, TRN_BUCKETS - 1, &bucket, error);
    if (status == ENG_OK && row->position[bucket].items > 0)
        return bad(json, "bucket", "twice", error);
    return status == ENG_OK ? read_metric(json, row->items, &row->position[bucket], error) : status;
}

static eng_status read_overlap(const trn_json *json, trn_result_row *row, eng_error *error) {
    double *list = NULL;
    int64_t count = 0;
    if (!trn_json_has(json, "overlap"))
        return ENG_OK;
    eng_status status = trn_json_reals(json, "overlap", &list, &count, error);
    row->overlap = status == ENG_OK ? calloc((size_t)row->items + 1, sizeof *row->overlap) : NULL;
    if (status == ENG_OK && !row->overlap)
        status = eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", trn_json_origin(json));
    for (int64_t i = 0; i < count && status == ENG_OK; i++) {
        if (!(list[i] >= 0 && list[i] < (double)row->items))
            status = bad(json, "overlap", "no number of an item", error);
        else
            row->overlap[(int64_t)list[i]] = true;
    }
    free(list);
    return status;
}

static eng_status read_groups(const trn_json *json, trn_result_row *row, eng_error *error) {
    const char **name = NULL;
    double *list = NULL;
    int32_t names = 0;
    if (!trn_json_has(json, "groups"))
        return ENG_OK;
    eng_status status = trn_json_strings(json, "groups", &name, &names, error);
    for (int32_t i = 0; i < names && status == ENG_OK; i++)
        if (trn_result_group(row, name[i]) != i)
            status = bad(json, "groups", "a name twice", error);
    if (status == ENG_OK)
        status = read_reals(json, "group", row->items, &list, error);
    row->group = status == ENG_OK ? malloc(sizeof *row->group * ((size_t)row->items + 1)) : NULL;
    if (status == ENG_OK && !row->group)
        status = eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", trn_json_origin(json));
    for (int64_t i = 0; i < row->items && status == ENG_OK; i++) {
        if (!(list[i] >= -1 && list[i] < row->groups))
            status = bad(json, "group", "no number of a group", error);
        else
            row->group[i] = (int32_t)list[i];
    }
    free(name);
    free(list);
    return status;
}

static eng_status read_solver(const trn_json *json, trn_result_row *row, eng_error *error) {
    const char *mode = NULL;
    double tolerance = 0;
    int64_t steps = 0;
    kern_solve_mode parsed = KERN_SOLVE_TOLERANCE;
    eng_status status = read_short(json, "setting", row->setting.name, sizeof row->setting.name, error);
    if (status == ENG_OK)
        status = trn_json_string(json, "cg_mode", &mode, error);
    if (status == ENG_OK && trn_parse_cg_mode(mode, &parsed, NULL) != ENG_OK)
        status = bad(json, "cg_mode", "unknown", error);
    if (status == ENG_OK)
        status = trn_json_real(json, "cg_tolerance", &tolerance, error);
    if (status == ENG_OK)
        status = read_integer(json, "cg_max_steps", 0, INT32_MAX, &steps, error);
    row->setting.knobs.cg_mode = (eng_cg_mode)parsed;
    row->setting.knobs.cg_tolerance = (float)tolerance;
    row->setting.knobs.cg_max_steps = (int32_t)steps;
    return status;
}

static eng_status read_figures(const trn_json *json, trn_reading_figures *out, eng_error *error) {
    int64_t value[6] = {0};
    static const char *const keys[] = {"tokens",       "unshared_tokens", "solves",
                                       "solver_steps", "unconverged",     "solver_steps_max"};
    eng_status status = trn_json_real(json, "seconds", &out->seconds, error);
    for (int i = 0; i < 6 && status == ENG_OK; i++)
        status = read_integer(json, keys[i], 0, i == 5 ? INT32_MAX : INT64_MAX, &value[i], error);
    out->tokens = value[0];
    out->unshared = value[1];
    out->solves = (eng_compute){.solves = (uint64_t)value[2],
                                .steps = (uint64_t)value[3],
                                .unconverged = (uint64_t)value[4],
                                .steps_max = (int32_t)value[5]};
    return status;
}

static eng_status read_row(const trn_json *json, trn_result_row *row, eng_error *error) {
    int64_t *const place[] = {&row->items, &row->length, &row->shots, &row->seed, &row->limit, &row->truncated};
    static const char *const keys[] = {"items", "length", "shots", "seed", "limit", "truncated"};
    int64_t in_domain = 0;
    eng_status status = read_copy(json, "task", &row->task, error);
    if (status == ENG_OK)
        status = read_short(json, "digest", row->digest, sizeof row->digest, error);
    if (status == ENG_OK)
        status = read_short(json, "primary", row->primary, sizeof row->primary, error);
    if (status == ENG_OK)
        status = read_solver(json, row, error);
    for (int i = 0; i < 6 && status == ENG_OK; i++)
        status = read_integer(json, keys[i], i == 0, i == 0 ? MAX_ITEMS : INT64_MAX, place[i], error);
    if (status == ENG_OK)
        status = read_integer(json, "in_domain", 0, 1, &in_domain, error);
    row->in_domain = in_domain != 0;
    if (status == ENG_OK)
        status = read_figures(json, &row->figures, error);
    if (status == ENG_OK)
        status = trn_json_each_object(json, "metrics", visit_metric, row, error);
    if (status == ENG_OK && trn_json_has(json, "positions"))
        status = trn_json_each_object(json, "positions", visit_position, row, error);
    if (status == ENG_OK && !trn_result_find(row, row->primary))
        status = bad(json, "primary", "no metric of that name", error);
    if (status == ENG_OK)
        status = read_groups(json, row, error);
    return status == ENG_OK ? read_overlap(json, row, error) : status;
}

static eng_status visit_row(void *context, const trn_json *json, eng_error *error) {
    trn_result_row row = {0};
    eng_status status = read_row(json, &row, error);
    if (status == ENG_OK)
        status = trn_result_add(context, &row, error);
    trn_result_row_free(&row);
    return status;
}

static eng_status read_head(const trn_json *json, trn_result *out, eng_error *error) {
    const char *format = NULL;
    int64_t version = 0;
    eng_status status = trn_json_string(json, "format", &format, error);
    if (status == ENG_OK && strcmp(format, FORMAT) != 0)
        status = bad(json, "format", "not \"" FORMAT "\"", error);
    if (status == ENG_OK)
        status = read_integer(json, "version", VERSION, VERSION, &version, error);
    char **const text[] = {&out->name, &out->model, &out->digest, &out->model_type, &out->device};
    static const char *const texts[] = {"name", "model", "digest", "model_type", "device"};
    for (int i = 0; i < 5 && status == ENG_OK; i++)
        status = read_copy(json, texts[i], text[i], error);
    int64_t *const number[] = {&out->parameters, &out->state_bytes, &out->trained_length};
    static const char *const numbers[] = {"parameters", "state_bytes", "trained_length"};
    for (int i = 0; i < 3 && status == ENG_OK; i++)
        status = read_integer(json, numbers[i], -1, INT64_MAX, number[i], error);
    out->weight_bytes = -1; // the first files did not tell it
    if (status == ENG_OK && trn_json_has(json, "weight_bytes"))
        status = read_integer(json, "weight_bytes", -1, INT64_MAX, &out->weight_bytes, error);
    return status;
}

eng_status trn_result_read(const char *path, trn_result *out, eng_error *error) {
    trn_json *json = NULL;
    *out = (trn_result){0};
    eng_status status = trn_json_read(path, &json, error);
    if (status == ENG_OK)
        status = read_head(json, out, error);
    if (status == ENG_OK)
        status = trn_json_each_object(json, "rows", visit_row, out, error);
    trn_json_free(json);
    if (status != ENG_OK)
        trn_result_free(out);
    return status;
}

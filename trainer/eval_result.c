// SPDX-License-Identifier: Apache-2.0
// Rows of results in memory; see eval_result.h.
// Everything in a row and a result is their own; a failure leaves them as they were.
#include "trainer/eval_result.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_metric(trn_metric *metric) {
    free(metric->value);
    free(metric->weight);
}

static double *not_a_number(int64_t count) {
    double *values = malloc(sizeof *values * ((size_t)count + 1));
    for (int64_t i = 0; values && i < count; i++)
        values[i] = NAN;
    return values;
}

static bool make_metric(trn_metric *metric, const char *name, int64_t items, bool weighted) {
    *metric = (trn_metric){.items = items, .chance = NAN, .value = not_a_number(items)};
    snprintf(metric->name, sizeof metric->name, "%s", name);
    if (weighted)
        metric->weight = calloc((size_t)items + 1, sizeof *metric->weight);
    if (metric->value && (metric->weight || !weighted))
        return true;
    free_metric(metric);
    *metric = (trn_metric){0};
    return false;
}

eng_status trn_result_row_create(const char *task, int64_t items, trn_result_row *out, eng_error *error) {
    *out = (trn_result_row){.task = strdup(task), .items = items};
    return out->task ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a row of results");
}

void trn_result_row_free(trn_result_row *row) {
    for (int i = 0; i < row->metrics; i++)
        free_metric(&row->metric[i]);
    for (int b = 0; b < TRN_BUCKETS; b++)
        free_metric(&row->position[b]);
    for (int32_t i = 0; i < row->groups; i++)
        free(row->group_name[i]);
    free(row->group_name);
    free(row->group);
    free(row->overlap);
    free(row->task);
    *row = (trn_result_row){0};
}

const trn_metric *trn_result_find(const trn_result_row *row, const char *name) {
    for (int i = 0; i < row->metrics; i++)
        if (strcmp(row->metric[i].name, name) == 0)
            return &row->metric[i];
    return NULL;
}

trn_metric *trn_result_metric(trn_result_row *row, const char *name, bool weighted) {
    for (int i = 0; i < row->metrics; i++)
        if (strcmp(row->metric[i].name, name) == 0)
            return &row->metric[i];
    if (row->metrics == TRN_MAX_METRICS || !make_metric(&row->metric[row->metrics], name, row->items, weighted))
        return NULL;
    return &row->metric[row->metrics++];
}

trn_metric *trn_result_position(trn_result_row *row, int bucket) {
    trn_metric *metric = &row->position[bucket];
    int64_t first, last;
    char name[40];
    if (metric->items > 0)
        return metric;
    trn_bucket_range(bucket, &first, &last);
    snprintf(name, sizeof name, "%lld-%lld", (long long)first, (long long)last);
    return make_metric(metric, name, row->items, true) ? metric : NULL;
}

int32_t trn_result_group(trn_result_row *row, const char *name) {
    for (int32_t i = 0; i < row->groups; i++)
        if (strcmp(row->group_name[i], name) == 0)
            return i;
    char **grown = realloc(row->group_name, sizeof *grown * ((size_t)row->groups + 1));
    if (grown)
        row->group_name = grown;
    char *copy = grown ? strdup(name) : NULL;
    if (!copy)
        return -1;
    row->group_name[row->groups] = copy;
    return row->groups++;
}

eng_status trn_result_add(trn_result *result, trn_result_row *row, eng_error *error) {
    trn_result_row *grown = realloc(result->row, sizeof *grown * ((size_t)result->rows + 1));
    if (!grown)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for results");
    result->row = grown;
    result->row[result->rows++] = *row;
    *row = (trn_result_row){0};
    return ENG_OK;
}

void trn_result_free(trn_result *result) {
    for (int i = 0; i < result->rows; i++)
        trn_result_row_free(&result->row[i]);
    free(result->row);
    free(result->name);
    free(result->model);
    free(result->digest);
    free(result->model_type);
    free(result->device);
    *result = (trn_result){0};
}

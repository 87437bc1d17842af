// SPDX-License-Identifier: Apache-2.0
// Reading a run's log; see run_log.h. The whole file is in memory while it is read, its entries afterwards.
// A number that is not finite stands there as null, and is NAN here.
#include "trainer/run_log.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "trainer/jsonl.h"

enum { LOG_LIMIT = 1 << 30 };

static double number_or_nan(const trn_json *json, const char *key) {
    double value = NAN;
    if (!trn_json_is_number(json, key) || trn_json_real(json, key, &value, NULL) != ENG_OK)
        return NAN;
    return value;
}

static eng_status read_entry(const trn_json *json, trn_log_entry *entry, eng_error *error) {
    eng_status status = trn_json_integer(json, "step", &entry->step, error);
    if (status == ENG_OK)
        status = trn_json_integer(json, "tokens", &entry->tokens, error);
    entry->loss = number_or_nan(json, "loss");
    entry->gradient_norm = number_or_nan(json, "gradient_norm");
    entry->rate = number_or_nan(json, "lr");
    entry->valid_loss = number_or_nan(json, "valid_loss");
    entry->valid_accuracy = number_or_nan(json, "valid_accuracy");
    entry->divergence = number_or_nan(json, "divergence");
    entry->valid_divergence = number_or_nan(json, "valid_divergence");
    entry->seconds = number_or_nan(json, "seconds");
    const char *outcome = "";
    if (status == ENG_OK && trn_json_has(json, "outcome"))
        status = trn_json_string(json, "outcome", &outcome, error);
    entry->bad = strcmp(outcome, "not finite") == 0;
    return status;
}

static eng_status add_line(trn_log *log, int64_t *capacity, const char *line, size_t length, const char *origin,
                           eng_error *error) {
    trn_json *json = NULL;
    if (log->entries == *capacity) {
        const int64_t grown = 2 * *capacity + 256;
        trn_log_entry *entry = realloc(log->entry, sizeof *entry * (size_t)grown);
        if (!entry)
            return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for its lines", origin);
        log->entry = entry;
        *capacity = grown;
    }
    eng_status status = trn_json_parse(line, length, origin, &json, error);
    if (status == ENG_OK)
        status = read_entry(json, &log->entry[log->entries], error);
    trn_json_free(json);
    log->entries += status == ENG_OK;
    return status;
}

eng_status trn_log_read(const char *path, trn_log *out, eng_error *error) {
    char *text = NULL;
    size_t length = 0;
    struct stat facts;
    trn_log log = {0};
    int64_t capacity = 0, number = 1;
    *out = log;
    if (stat(path, &facts) != 0)
        return eng_fail(error, ENG_NOT_FOUND, "%s: not there", path);
    eng_status status = eng_read_file(path, LOG_LIMIT, &text, &length, error);
    const char *at = text;
    for (const char *end; status == ENG_OK && (end = memchr(at, '\n', length - (size_t)(at - text))); number++) {
        char origin[160];
        snprintf(origin, sizeof origin, "%.120s:%lld", eng_path_tail(path), (long long)number);
        status = add_line(&log, &capacity, at, (size_t)(end - at), origin, error);
        at = end + 1;
    }
    free(text);
    if (status == ENG_OK)
        *out = log;
    else
        trn_log_free(&log);
    return status;
}

void trn_log_free(trn_log *log) {
    free(log->entry);
    *log = (trn_log){0};
}

int64_t trn_log_bad_steps(const trn_log *log) {
    int64_t bad = 0;
    for (int64_t i = 0; i < log->entries; i++)
        bad += log->entry[i].bad;
    return bad;
}

double trn_log_last_loss(const trn_log *log, int64_t steps) {
    double sum = 0;
    int64_t taken = 0;
    for (int64_t i = log->entries - 1; i >= 0 && taken < steps; i--)
        if (!log->entry[i].bad && isfinite(log->entry[i].loss)) {
            sum += log->entry[i].loss;
            taken++;
        }
    return taken > 0 ? sum / (double)taken : NAN;
}

const trn_log_entry *trn_log_last_valid(const trn_log *log) {
    for (int64_t i = log->entries - 1; i >= 0; i--)
        if (isfinite(log->entry[i].valid_loss))
            return &log->entry[i];
    return NULL;
}

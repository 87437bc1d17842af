// SPDX-License-Identifier: Apache-2.0
// Scores without the work; see floors.h.
// Sums while examples are made, shares afterwards. A file is small, and no more is read than a report can show.
#include "trainer/floors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"
#include "trainer/jsonl.h"

static const char format[] = "mesa-floors-1";

eng_status trn_floors_create(int32_t vocabulary, trn_floors *out, eng_error *error) {
    *out = (trn_floors){.vocabulary = vocabulary, .count = calloc((size_t)vocabulary, sizeof *out->count)};
    return out->count ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for the counts of %d ids", vocabulary);
}

void trn_floors_free(trn_floors *floors) {
    free(floors->count);
    *floors = (trn_floors){0};
}

void trn_floors_count(trn_floors *floors, const int32_t *target, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (target[i] >= 0) {
            floors->targets++;
            floors->count[target[i]]++;
        }
}

static void name_row(trn_floor *row, const char *name) {
    snprintf(row->name, sizeof row->name, "%s", name);
}

void trn_floors_try(trn_floors *floors, int rule, const char *group, double right) {
    if (rule == floors->rows && rule < TRN_MAX_FLOORS - 1) // one is for the commonest answer
        name_row(&floors->row[floors->rows++], group);
    if (rule < floors->rows)
        floors->row[rule].right += right;
}

static int32_t commonest(const trn_floors *floors) {
    int32_t best = 0;
    for (int32_t id = 1; id < floors->vocabulary; id++)
        best = floors->count[id] > floors->count[best] ? id : best;
    return best;
}

void trn_floors_end(trn_floors *floors) {
    const double targets = floors->targets > 0 ? (double)floors->targets : 1;
    const int32_t best = commonest(floors);
    trn_floor kept[TRN_MAX_FLOORS] = {{"", (double)floors->count[best] / targets}};
    int rows = 1;
    snprintf(kept[0].name, sizeof kept[0].name, "always %" PRId32, best);
    for (int i = 0; i < floors->rows; i++) {
        const double right = floors->row[i].right / targets;
        int same = 1;
        while (same < rows && strcmp(kept[same].name, floors->row[i].name) != 0)
            same++;
        if (same == rows)
            kept[rows++] = (trn_floor){"", 0};
        memcpy(kept[same].name, floors->row[i].name, sizeof kept[same].name);
        kept[same].right = right > kept[same].right ? right : kept[same].right;
    }
    memcpy(floors->row, kept, sizeof kept);
    floors->rows = rows;
}

// ---------------------------------------------------------------------------------------------------------------- file

static char *path_of(const char *name) {
    const size_t length = strlen(name) + sizeof ".floors.json";
    char *path = malloc(length);
    if (path)
        snprintf(path, length, "%s.floors.json", name);
    return path;
}

eng_status trn_floors_write(const trn_floors *floors, const char *name, eng_error *error) {
    trn_json *json = trn_json_create();
    char *path = path_of(name), *text = NULL;
    trn_json_set_string(json, "format", format);
    trn_json_set_integer(json, "targets", floors->targets);
    for (int i = 0; i < floors->rows; i++) {
        trn_json *row = trn_json_create();
        trn_json_set_string(row, "name", floors->row[i].name);
        trn_json_set_real(row, "right", floors->row[i].right);
        trn_json_add_object(json, "floors", row);
    }
    text = trn_json_text(json, true);
    eng_status status = path && text ? eng_write_file_atomic(path, text, strlen(text), error)
                                     : eng_fail(error, ENG_NO_MEMORY, "out of memory for what rules score");
    free(text);
    free(path);
    trn_json_free(json);
    return status;
}

static eng_status read_row(void *context, const trn_json *entry, eng_error *error) {
    trn_floors *floors = context;
    const char *name = NULL;
    double right = 0;
    eng_status status = trn_json_string(entry, "name", &name, error);
    if (status == ENG_OK)
        status = trn_json_real(entry, "right", &right, error);
    if (status != ENG_OK)
        return status;
    if (!(right >= 0 && right <= 1) || strlen(name) >= TRN_FLOOR_NAME || floors->rows == TRN_MAX_FLOORS)
        return eng_fail(error, ENG_FORMAT, "%s: more than %d floors, a long name, or a share not in 0..1",
                        trn_json_origin(entry), TRN_MAX_FLOORS);
    trn_floor *row = &floors->row[floors->rows++];
    name_row(row, name);
    row->right = right;
    return ENG_OK;
}

static eng_status read_file(const char *path, trn_floors *out, eng_error *error) {
    trn_json *json = NULL;
    const char *kind = NULL;
    eng_status status = trn_json_read(path, &json, error);
    if (status != ENG_OK)
        return status;
    status = trn_json_string(json, "format", &kind, error);
    if (status == ENG_OK && strcmp(kind, format) != 0)
        status = eng_fail(error, ENG_FORMAT, "%s: \"format\" is not %s", path, format);
    if (status == ENG_OK)
        status = trn_json_integer(json, "targets", &out->targets, error);
    if (status == ENG_OK)
        status = trn_json_each_object(json, "floors", read_row, out, error);
    trn_json_free(json);
    return status;
}

eng_status trn_floors_read(const char *name, trn_floors *out, eng_error *error) {
    char *path = path_of(name);
    *out = (trn_floors){0};
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    eng_status status = access(path, F_OK) == 0 ? read_file(path, out, error) : ENG_OK;
    free(path);
    return status;
}

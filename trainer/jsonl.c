// SPDX-License-Identifier: Apache-2.0
// JSON for the trainer; see jsonl.h. Keeps jansson's types in this file.
// Members keep the order in which they were set, so that logs read the same from run to run.
#include "trainer/jsonl.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/config_json.h"
#include "engine/files.h"

struct trn_json {
    json_t *root;
    bool failed; // a set lacked memory
    char path[512];
};

enum { JSON_FILE_LIMIT = 64 << 20 };

static eng_status wrap(json_t *root, const char *path, trn_json **out, eng_error *error) {
    trn_json *json = calloc(1, sizeof *json);
    if (!json) {
        json_decref(root);
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    }
    json->root = root;
    strncpy(json->path, path, sizeof json->path - 1);
    *out = json;
    return ENG_OK;
}

eng_status trn_json_parse(const char *text, size_t length, const char *origin, trn_json **out, eng_error *error) {
    json_error_t at;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &at);
    if (!root || !json_is_object(root)) {
        json_decref(root);
        return eng_fail(error, ENG_FORMAT, "%s: not a JSON object (byte %d)", origin, root ? 0 : at.position);
    }
    return wrap(root, origin, out, error);
}

eng_status trn_json_read(const char *path, trn_json **out, eng_error *error) {
    char *text = NULL;
    size_t length = 0;
    eng_status status = eng_read_file(path, JSON_FILE_LIMIT, &text, &length, error);
    if (status == ENG_OK)
        status = trn_json_parse(text, length, path, out, error);
    free(text);
    return status;
}

eng_status trn_json_read_config(const char *path, trn_json **out, eng_error *error) {
    json_t *root = NULL;
    eng_status status = eng_json_read(path, JSON_FILE_LIMIT, &root, NULL, error);
    return status == ENG_OK ? wrap(root, path, out, error) : status;
}

void trn_json_free(trn_json *json) {
    if (!json)
        return;
    json_decref(json->root);
    free(json);
}

const char *trn_json_origin(const trn_json *json) {
    return json->path;
}

bool trn_json_has(const trn_json *json, const char *key) {
    return json_object_get(json->root, key) != NULL;
}

bool trn_json_is_number(const trn_json *json, const char *key) {
    return json_is_number(json_object_get(json->root, key));
}

static eng_status wrong(const trn_json *json, const char *key, const char *wanted, eng_error *error) {
    return eng_fail(error, ENG_FORMAT, "%s: %s: %s", json->path, key,
                    json_object_get(json->root, key) ? wanted : "missing");
}

eng_status trn_json_real(const trn_json *json, const char *key, double *out, eng_error *error) {
    const json_t *value = json_object_get(json->root, key);
    if (!json_is_number(value))
        return wrong(json, key, "not a number", error);
    *out = json_number_value(value);
    return ENG_OK;
}

eng_status trn_json_integer(const trn_json *json, const char *key, int64_t *out, eng_error *error) {
    const json_t *value = json_object_get(json->root, key);
    if (!json_is_integer(value))
        return wrong(json, key, "not an integer", error);
    *out = json_integer_value(value);
    return ENG_OK;
}

eng_status trn_json_string(const trn_json *json, const char *key, const char **out, eng_error *error) {
    const json_t *value = json_object_get(json->root, key);
    if (!json_is_string(value))
        return wrong(json, key, "not a string", error);
    *out = json_string_value(value);
    return ENG_OK;
}

eng_status trn_json_ids(const trn_json *json, const char *key, int32_t limit, int32_t **ids, int32_t *count,
                        eng_error *error) {
    const json_t *array = json_object_get(json->root, key);
    if (!json_is_array(array) || json_array_size(array) > INT32_MAX)
        return wrong(json, key, "not an array of ids", error);
    size_t size = json_array_size(array);
    int32_t *list = malloc(sizeof *list * (size + 1));
    if (!list)
        return eng_fail(error, ENG_NO_MEMORY, "%s: %s: out of memory", json->path, key);
    for (size_t i = 0; i < size; i++) {
        const json_t *item = json_array_get(array, i);
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id >= limit) {
            free(list);
            return eng_fail(error, ENG_FORMAT, "%s: %s[%zu]: not an id below %d", json->path, key, i, limit);
        }
        list[i] = (int32_t)id;
    }
    *ids = list;
    *count = (int32_t)size;
    return ENG_OK;
}

eng_status trn_json_strings(const trn_json *json, const char *key, const char ***list, int32_t *count,
                            eng_error *error) {
    const json_t *array = json_object_get(json->root, key);
    if (!json_is_array(array) || json_array_size(array) > INT32_MAX)
        return wrong(json, key, "not an array of strings", error);
    size_t size = json_array_size(array);
    const char **strings = malloc(sizeof *strings * (size + 1));
    if (!strings)
        return eng_fail(error, ENG_NO_MEMORY, "%s: %s: out of memory", json->path, key);
    for (size_t i = 0; i < size; i++) {
        strings[i] = json_string_value(json_array_get(array, i));
        if (!strings[i]) {
            free(strings);
            return eng_fail(error, ENG_FORMAT, "%s: %s[%zu]: not a string", json->path, key, i);
        }
    }
    *list = strings;
    *count = (int32_t)size;
    return ENG_OK;
}

eng_status trn_json_reals(const trn_json *json, const char *key, double **list, int64_t *count, eng_error *error) {
    const json_t *array = json_object_get(json->root, key);
    if (!json_is_array(array))
        return wrong(json, key, "not an array of numbers", error);
    size_t size = json_array_size(array);
    double *reals = malloc(sizeof *reals * (size + 1));
    if (!reals)
        return eng_fail(error, ENG_NO_MEMORY, "%s: %s: out of memory", json->path, key);
    for (size_t i = 0; i < size; i++) {
        const json_t *item = json_array_get(array, i);
        if (!json_is_number(item) && !json_is_null(item)) {
            free(reals);
            return eng_fail(error, ENG_FORMAT, "%s: %s[%zu]: not a number", json->path, key, i);
        }
        reals[i] = json_is_null(item) ? (double)NAN : json_number_value(item);
    }
    *list = reals;
    *count = (int64_t)size;
    return ENG_OK;
}

eng_status trn_json_each_object(const trn_json *json, const char *key,
                                eng_status (*visit)(void *context, const trn_json *entry, eng_error *error),
                                void *context, eng_error *error) {
    const json_t *array = json_object_get(json->root, key);
    if (!json_is_array(array))
        return wrong(json, key, "not an array of objects", error);
    for (size_t i = 0; i < json_array_size(array); i++) {
        trn_json entry = {.root = json_array_get(array, i)};
        snprintf(entry.path, sizeof entry.path, "%.400s: %.64s[%zu]", json->path, key, i);
        if (!json_is_object(entry.root))
            return eng_fail(error, ENG_FORMAT, "%s: not an object", entry.path);
        eng_status status = visit(context, &entry, error);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

eng_status trn_json_each_string(const trn_json *json, const char *key,
                                eng_status (*visit)(void *context, const char *name, const char *value), void *context,
                                eng_error *error) {
    json_t *object = json_object_get(json->root, key), *value;
    const char *name;
    if (!json_is_object(object))
        return wrong(json, key, "not an object", error);
    json_object_foreach(object, name, value) {
        if (!json_is_string(value))
            return eng_fail(error, ENG_FORMAT, "%s: %s.%s: not a string", json->path, key, name);
        eng_status status = visit(context, name, json_string_value(value));
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

// ----------------------------------------------------------------------------------------------------------- building

trn_json *trn_json_create(void) {
    json_t *root = json_object();
    trn_json *json = NULL;
    return root && wrap(root, "", &json, NULL) == ENG_OK ? json : NULL;
}

static void set(trn_json *json, const char *key, json_t *value) {
    if (json_object_set_new(json->root, key, value) != 0)
        json->failed = true;
}

void trn_json_set_integer(trn_json *json, const char *key, int64_t value) {
    set(json, key, json_integer(value));
}

void trn_json_set_real(trn_json *json, const char *key, double value) {
    set(json, key, isfinite(value) ? json_real(value) : json_null());
}

void trn_json_set_string(trn_json *json, const char *key, const char *value) {
    set(json, key, json_string(value));
}

void trn_json_set_object(trn_json *json, const char *key, trn_json *value) {
    if (!value || value->failed)
        json->failed = true;
    else
        set(json, key, json_incref(value->root));
    trn_json_free(value);
}

static json_t *array_at(trn_json *json, const char *key) {
    json_t *array = json_object_get(json->root, key);
    if (!array) {
        set(json, key, json_array());
        array = json_object_get(json->root, key);
    }
    return array;
}

void trn_json_add_object(trn_json *json, const char *key, trn_json *value) {
    if (!value || value->failed || json_array_append(array_at(json, key), value->root) != 0)
        json->failed = true;
    trn_json_free(value);
}

void trn_json_set_reals(trn_json *json, const char *key, const double *values, int64_t count) {
    json_t *array = json_array();
    for (int64_t i = 0; i < count && array; i++) {
        bool whole = isfinite(values[i]) && fabs(values[i]) < 0x1p53 && values[i] == floor(values[i]);
        json_t *item = !isfinite(values[i]) ? json_null()
                       : whole              ? json_integer((json_int_t)values[i])
                                            : json_real(values[i]);
        if (json_array_append_new(array, item) != 0)
            json->failed = true;
    }
    set(json, key, array);
}

void trn_json_set_strings(trn_json *json, const char *key, char *const *values, int32_t count) {
    json_t *array = json_array();
    for (int32_t i = 0; i < count && array; i++)
        if (json_array_append_new(array, json_string(values[i])) != 0)
            json->failed = true;
    set(json, key, array);
}

void trn_json_set_text(trn_json *json, const char *key, const char *text) {
    json_t *value = json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    set(json, key, value ? value : json_string(text));
}

eng_status trn_json_each_text(const trn_json *json,
                              eng_status (*visit)(void *context, const char *key, const char *text), void *context,
                              eng_error *error) {
    const char *key;
    json_t *value;
    json_object_foreach(json->root, key, value) {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
        if (!text)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for the text of %s", key);
        eng_status status = visit(context, key, text);
        free(text);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

char *trn_json_text(const trn_json *json, bool indented) {
    if (json->failed)
        return NULL;
    if (indented)
        return eng_json_write(json->root);
    return json_dumps(json->root, JSON_COMPACT | JSON_REAL_PRECISION(17));
}

// SPDX-License-Identifier: Apache-2.0
// JSON for the trainer; see jsonl.h. Keeps jansson's types in this file.
#include "trainer/jsonl.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"

struct trn_json {
    json_t *root;
    char path[512];
};

enum { JSON_FILE_LIMIT = 64 << 20 };

eng_status trn_json_read(const char *path, trn_json **out, eng_error *error) {
    char *text = NULL;
    size_t length = 0;
    eng_status status = eng_read_file(path, JSON_FILE_LIMIT, &text, &length, error);
    if (status != ENG_OK)
        return status;
    json_error_t at;
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &at);
    free(text);
    if (!root || !json_is_object(root)) {
        json_decref(root);
        return eng_fail(error, ENG_FORMAT, "%s: not a JSON object (byte %d)", path, root ? 0 : at.position);
    }
    trn_json *json = malloc(sizeof *json);
    if (!json) {
        json_decref(root);
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", path);
    }
    json->root = root;
    strncpy(json->path, path, sizeof json->path - 1);
    json->path[sizeof json->path - 1] = '\0';
    *out = json;
    return ENG_OK;
}

void trn_json_free(trn_json *json) {
    if (!json)
        return;
    json_decref(json->root);
    free(json);
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

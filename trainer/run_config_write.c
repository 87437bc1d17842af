// SPDX-License-Identifier: Apache-2.0
// Writes a run's configuration; see run_config.h. Numbers in the fewest digits that read back as the same value; long
// arrays and objects of [model] go on in indented lines, broken at their spaces.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/buffer.h"
#include "engine/files.h"
#include "trainer/run_config_keys.h"

enum { LINE_WIDTH = 120 };

static eng_status append(eng_buffer *text, const char *format, ...) ENG_PRINTF(2, 3);

static eng_status append(eng_buffer *text, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    eng_status status = eng_buffer_reserve(text, (size_t)length + 1);
    if (status == ENG_OK) {
        vsnprintf(text->bytes + text->length, (size_t)length + 1, format, again);
        text->length += (size_t)length;
    }
    va_end(again);
    va_end(arguments);
    return status;
}

static eng_status append_real(eng_buffer *text, const char *name, double value) {
    char number[40];
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(number, sizeof number, "%.*g", digits, value);
        if (strtod(number, NULL) == value)
            break;
    }
    return append(text, "%s = %s\n", name, number);
}

static eng_status append_key(eng_buffer *text, const trn_run_config *config, const trn_run_key *key) {
    const char *at = (const char *)config + key->offset;
    switch (key->kind) {
    case TRN_KEY_TEXT:
        return append(text, "%s = %s\n", key->name, *(char *const *)at);
    case TRN_KEY_INTEGER:
        return append(text, "%s = %lld\n", key->name, (long long)*(const int64_t *)at);
    case TRN_KEY_REAL:
        return append_real(text, key->name, *(const double *)at);
    case TRN_KEY_CHOICE:
        return append(text, "%s = %s\n", key->name, key->choice[*(const int64_t *)at]);
    }
    return ENG_INTERNAL;
}

static eng_status append_model_key(void *context, const char *key, const char *value) {
    eng_buffer *text = context;
    eng_status status = append(text, "%s =", key);
    for (size_t width = strlen(key) + 2; status == ENG_OK && *value;) {
        size_t length = strcspn(value, " ");
        bool breaks = width + length > LINE_WIDTH && width > 4;
        status = append(text, "%s%.*s", breaks ? "\n    " : " ", (int)length, value);
        width = breaks ? 4 + length : width + 1 + length;
        value += length + (value[length] == ' ');
    }
    return status == ENG_OK ? append(text, "\n") : status;
}

static eng_status compose(const trn_run_config *config, eng_buffer *text, eng_error *error) {
    eng_status status = append(text, "[model]\n");
    if (status == ENG_OK && config->base[0])
        status = append(text, "base = %s\n", config->base);
    if (status == ENG_OK)
        status = trn_json_each_text(config->model, append_model_key, text, error);
    const char *section = "model";
    for (int i = 0; status == ENG_OK && i < trn_run_key_count; i++) {
        const trn_run_key *key = &trn_run_keys[i];
        if (strcmp(section, key->section) != 0)
            status = append(text, "\n[%s]\n", key->section);
        section = key->section;
        if (status == ENG_OK)
            status = append_key(text, config, key);
    }
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "out of memory for a configuration");
}

eng_status trn_run_config_text(const trn_run_config *config, char **text, eng_error *error) {
    eng_buffer buffer = {0};
    eng_status status = compose(config, &buffer, error);
    *text = status == ENG_OK ? strndup(buffer.bytes, buffer.length) : NULL;
    eng_buffer_free(&buffer);
    if (status == ENG_OK && !*text)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a configuration");
    return status;
}

eng_status trn_run_config_write(const trn_run_config *config, const char *path, eng_error *error) {
    eng_buffer text = {0};
    eng_status status = compose(config, &text, error);
    if (status == ENG_OK)
        status = eng_write_file_atomic(path, text.bytes, text.length, error);
    eng_buffer_free(&text);
    return status;
}

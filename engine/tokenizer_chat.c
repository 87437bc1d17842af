// SPDX-License-Identifier: Apache-2.0
// The chat template of a folder: found, compiled, run, and its text encoded.
//
// The text carries a mark a byte of where it is from, which the tokenizer heeds; nobody else sees the marks.
#include "engine/tokenizer_chat.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/config_json.h"
#include "engine/files.h"
#include "engine/template.h"

enum { MAX_CONFIG_FILE = 16 << 20, MAX_TEMPLATE_FILE = 1 << 20 };

// Variables that transformers gives a template, as keys of tokenizer_config.json.
static const char *const named[] = {"bos_token", "eos_token", "unk_token", "pad_token",
                                    "sep_token", "cls_token", "mask_token"};
enum { NAMES = sizeof named / sizeof *named };

struct eng_chat_format {
    char *text;
    eng_template *compiled; // NULL: fault says why
    eng_error fault;
    json_t *config; // owns the texts of names; NULL: there is none
    eng_template_name names[NAMES];
    size_t name_count;
};

// ---- opening

static eng_status read_optional(const char *dir, const char *name, size_t limit, char **text, size_t *length,
                                eng_error *error) {
    char *path = eng_join_path(dir, name);
    eng_error found = {0};
    eng_status status = path ? eng_read_file(path, limit, text, length, &found) : ENG_NO_MEMORY;
    free(path);
    if (status == ENG_NOT_FOUND)
        return ENG_OK;
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "%s", found.text);
}

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "no memory for the chat template");
}

// Of a list of templates with names the default one.
static const char *template_of(const json_t *value) {
    const json_t *entry;
    size_t i;
    if (!json_is_array(value))
        return json_string_value(value);
    json_array_foreach(value, i, entry) {
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(entry, "template"));
    }
    return NULL;
}

static void read_names(eng_chat_format *format) {
    for (size_t i = 0; i < NAMES; i++) {
        const json_t *value = json_object_get(format->config, named[i]);
        const char *text = json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
        if (text)
            format->names[format->name_count++] = (eng_template_name){named[i], text};
    }
}

static eng_status read_config(const char *dir, eng_chat_format *format, eng_error *error) {
    char *text = NULL;
    size_t length = 0;
    eng_status status = read_optional(dir, "tokenizer_config.json", MAX_CONFIG_FILE, &text, &length, error);
    if (status != ENG_OK || !text)
        return status;
    status = eng_json_parse(text, length, "tokenizer_config.json", &format->config, error);
    free(text);
    if (status != ENG_OK)
        return status;
    read_names(format);
    const char *template = template_of(json_object_get(format->config, "chat_template"));
    if (template && !format->text && !(format->text = strdup(template)))
        return no_memory(error);
    return ENG_OK;
}

eng_status eng_chat_format_open(const char *dir, eng_chat_format **out, eng_error *error) {
    size_t length = 0;
    *out = NULL;
    eng_chat_format *format = calloc(1, sizeof *format);
    if (!format)
        return no_memory(error);
    eng_status status = read_optional(dir, "chat_template.jinja", MAX_TEMPLATE_FILE, &format->text, &length, error);
    if (status == ENG_OK)
        status = read_config(dir, format, error);
    if (status != ENG_OK || !format->text) {
        eng_chat_format_close(format);
        return status;
    }
    status = eng_template_compile(format->text, strlen(format->text), &format->compiled, &format->fault);
    if (status == ENG_NO_MEMORY) {
        eng_chat_format_close(format);
        return no_memory(error);
    }
    *out = format;
    return ENG_OK;
}

void eng_chat_format_close(eng_chat_format *format) {
    if (!format)
        return;
    eng_template_free(format->compiled);
    json_decref(format->config);
    free(format->text);
    free(format);
}

const char *eng_chat_format_text(const eng_chat_format *format) {
    return format->text;
}

const char *eng_chat_format_fault(const eng_chat_format *format) {
    return format->compiled ? NULL : format->fault.text;
}

// ---- running

static eng_status run(const eng_chat_format *format, const eng_chat *chat, eng_buffer *text, eng_buffer *given,
                      eng_error *error) {
    if (!format->compiled)
        return eng_fail(error, ENG_UNSUPPORTED, "%s", format->fault.text);
    const eng_template_input input = {chat, format->names, format->name_count};
    eng_status status = eng_template_run(format->compiled, &input, text, given, error);
    if (status == ENG_OK && eng_buffer_append(text, "", 1) != ENG_OK)
        status = no_memory(error);
    return status;
}

eng_status eng_chat_render(const eng_chat_format *format, const eng_chat *chat, char **text, size_t *length,
                           eng_error *error) {
    eng_buffer made = {0}, given = {0};
    eng_status status = run(format, chat, &made, &given, error);
    eng_buffer_free(&given);
    if (status != ENG_OK) {
        eng_buffer_free(&made);
        return status;
    }
    *text = made.bytes;
    *length = made.length - 1;
    return ENG_OK;
}

eng_status eng_chat_encode(const eng_chat_format *format, const eng_tokenizer *tokenizer, const eng_chat *chat,
                           int32_t **ids, size_t *count, eng_error *error) {
    eng_buffer made = {0}, given = {0};
    eng_status status = run(format, chat, &made, &given, error);
    if (status == ENG_OK)
        status = eng_tokenizer_encode_marked(tokenizer, made.bytes, made.length - 1, (const uint8_t *)given.bytes, ids,
                                             count, error);
    eng_buffer_free(&given);
    eng_buffer_free(&made);
    return status;
}

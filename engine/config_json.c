// SPDX-License-Identifier: Apache-2.0
// Strict JSON objects with typed keys, and the bare Infinity and NaN of public writers.
//
// jansson refuses the bare words, so a copy of the text is parsed in which each stands as a string that begins with
// U+0001. No file of a sane writer holds such a string; if one does, it is read as the number. Writing turns the
// strings back into bare words, which is what Python's json module reads and writes.
// No state; any thread.
#include "engine/config_json.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"

enum { VALUE_SHOWN = 40 };

static const char *const bare_words[] = {"Infinity", "-Infinity", "NaN"};
enum { BARE_WORDS = sizeof bare_words / sizeof bare_words[0] };

static const char mark[] = "\\u0001"; // as JSON spells it, the same in reading and in jansson's output

static const char *bare_word_at(const char *text, const char *end) {
    for (int i = 0; i < BARE_WORDS; i++) {
        size_t length = strlen(bare_words[i]);
        if ((size_t)(end - text) >= length && memcmp(text, bare_words[i], length) == 0)
            return bare_words[i];
    }
    return NULL;
}

static const char *end_of_string(const char *text, const char *end) {
    for (text++; text < end && *text != '"'; text++) {
        if (*text == '\\' && end - text > 1)
            text++;
    }
    return text < end ? text + 1 : end;
}

// Copies the text with every bare word quoted and marked; returns the length. to may be NULL: only counts.
static size_t quote_bare_words(const char *text, size_t length, char *to) {
    const char *end = text + length;
    size_t written = 0;
    while (text < end) {
        const char *word = bare_word_at(text, end);
        const char *next = word ? text + strlen(word) : *text == '"' ? end_of_string(text, end) : text + 1;
        size_t piece = (size_t)(next - text);
        if (to && word)
            written += (size_t)sprintf(to + written, "\"%s%s\"", mark, word);
        else if (word)
            written += piece + strlen(mark) + 2;
        if (to && !word)
            memcpy(to + written, text, piece);
        if (!word)
            written += piece;
        text = next;
    }
    return written;
}

// The reverse, in place.
static void unquote_bare_words(char *text) {
    char *to = text;
    const char *end = text + strlen(text);
    while (text < end) {
        const char *word = NULL;
        size_t prefix = 1 + strlen(mark);
        if (text[0] == '"' && strncmp(text + 1, mark, strlen(mark)) == 0)
            word = bare_word_at(text + prefix, end);
        if (word && text[prefix + strlen(word)] == '"') {
            memcpy(to, word, strlen(word));
            to += strlen(word);
            text += prefix + strlen(word) + 1;
            continue;
        }
        const char *next = *text == '"' ? end_of_string(text, end) : text + 1;
        size_t piece = (size_t)(next - text);
        memmove(to, text, piece);
        to += piece;
        text += piece;
    }
    *to = '\0';
}

eng_status eng_json_parse(const char *text, size_t length, const char *path, json_t **out, eng_error *error) {
    size_t quoted_length = quote_bare_words(text, length, NULL);
    char *quoted = malloc(quoted_length + 1);
    if (!quoted)
        return eng_fail(error, ENG_NO_MEMORY, "%s: no memory to parse it", eng_path_tail(path));
    quote_bare_words(text, length, quoted);
    json_error_t found;
    json_t *root = json_loadb(quoted, quoted_length, JSON_REJECT_DUPLICATES, &found);
    free(quoted);
    if (!root) {
        bool memory = json_error_code(&found) == json_error_out_of_memory;
        return eng_fail(error, memory ? ENG_NO_MEMORY : ENG_FORMAT, "%s: line %d: %s", eng_path_tail(path), found.line,
                        found.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return eng_fail(error, ENG_FORMAT, "%s: not a JSON object", eng_path_tail(path));
    }
    *out = root;
    return ENG_OK;
}

eng_status eng_json_read(const char *path, size_t limit, json_t **out, char **text, eng_error *error) {
    char *data;
    size_t length;
    eng_status status = eng_read_file(path, limit, &data, &length, error);
    if (status != ENG_OK)
        return status;
    status = eng_json_parse(data, length, path, out, error);
    if (status != ENG_OK || !text)
        free(data);
    else
        *text = data;
    return status;
}

char *eng_json_write(const json_t *object) {
    char *text = json_dumps(object, JSON_INDENT(2));
    if (!text)
        return NULL;
    unquote_bare_words(text);
    size_t length = strlen(text);
    char *longer = realloc(text, length + 2);
    if (!longer) {
        free(text);
        return NULL;
    }
    memcpy(longer + length, "\n", 2);
    return longer;
}

// The keys that hold `key`, from the innermost on; those themselves when none does.
static const eng_keys *holder(const eng_keys *keys, const char *key) {
    for (const eng_keys *level = keys; level; level = level->outer) {
        if (json_object_get(level->object, key))
            return level;
    }
    return keys;
}

eng_status eng_keys_fail(eng_keys *keys, eng_status code, const char *key, const char *format, ...) {
    if (keys->status != ENG_OK)
        return keys->status;
    char fault[208];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    keys->status = code;
    return eng_fail(keys->error, code, "%s: %s%.64s: %s", eng_path_tail(keys->path), holder(keys, key)->scope, key,
                    fault);
}

const json_t *eng_keys_value(const eng_keys *keys, const char *key) {
    if (keys->status != ENG_OK)
        return NULL;
    const json_t *value = json_object_get(holder(keys, key)->object, key);
    return json_is_null(value) ? NULL : value;
}

static void refuse_value(eng_keys *keys, const char *key, const json_t *value, const char *wanted) {
    char *shown = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    if (shown)
        unquote_bare_words(shown);
    eng_keys_fail(keys, ENG_FORMAT, key, "is %.*s%s, must be %s", VALUE_SHOWN, shown ? shown : "unreadable",
                  shown && strlen(shown) > VALUE_SHOWN ? "..." : "", wanted);
    free(shown);
}

static bool word_number(const char *word, double *number) {
    if (!word)
        return false;
    if (strcmp(word, "Infinity") == 0)
        *number = INFINITY;
    else if (strcmp(word, "-Infinity") == 0)
        *number = -INFINITY;
    else if (strcmp(word, "NaN") == 0)
        *number = NAN;
    else
        return false;
    return true;
}

static bool number_of(const json_t *value, double *number) {
    if (json_is_number(value)) {
        *number = json_number_value(value);
        return true;
    }
    const char *text = json_string_value(value);
    if (text)
        return text[0] == '\1' && word_number(text + 1, number);
    return json_object_size(value) == 1 && word_number(json_string_value(json_object_get(value, "__float__")), number);
}

int64_t eng_keys_integer(eng_keys *keys, const char *key, int64_t fallback, int64_t least, int64_t most) {
    const json_t *value = eng_keys_value(keys, key);
    if (!value)
        return fallback;
    double real = json_real_value(value);
    bool whole = json_is_integer(value) || (json_is_real(value) && fabs(real) <= 0x1p53 && real == trunc(real));
    int64_t number = json_is_integer(value) ? json_integer_value(value) : whole ? (int64_t)real : 0;
    if (whole && number >= least && number <= most)
        return number;
    char wanted[80];
    snprintf(wanted, sizeof wanted, "an integer from %lld to %lld", (long long)least, (long long)most);
    refuse_value(keys, key, value, wanted);
    return fallback;
}

double eng_keys_number(eng_keys *keys, const char *key, double fallback, double least, double most) {
    const json_t *value = eng_keys_value(keys, key);
    if (!value)
        return fallback;
    double number;
    if (number_of(value, &number) && number >= least && number <= most)
        return number;
    char wanted[80];
    snprintf(wanted, sizeof wanted, "a number from %g to %g", least, most);
    refuse_value(keys, key, value, wanted);
    return fallback;
}

bool eng_keys_flag(eng_keys *keys, const char *key, bool fallback) {
    const json_t *value = eng_keys_value(keys, key);
    if (!value)
        return fallback;
    if (json_is_boolean(value))
        return json_is_true(value);
    refuse_value(keys, key, value, "true or false");
    return fallback;
}

const char *eng_keys_text(eng_keys *keys, const char *key, const char *fallback) {
    const json_t *value = eng_keys_value(keys, key);
    if (!value)
        return fallback;
    if (json_is_string(value) && json_string_value(value)[0] != '\1')
        return json_string_value(value);
    refuse_value(keys, key, value, "a string");
    return fallback;
}

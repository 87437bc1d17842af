// SPDX-License-Identifier: Apache-2.0
// Typed reading of a GGUF file's keys for the importer: absent, right, or an error that names file and key.
//
// Any width of integer serves where an integer is meant: writers differ. No state; any thread.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files.h"
#include "engine/import_internal.h"

eng_status eng_gguf_fail(const eng_gguf *file, eng_status code, const char *key, eng_error *error, const char *format,
                         ...) {
    char fault[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault, sizeof fault, format, arguments);
    va_end(arguments);
    return eng_fail(error, code, "%s: key '%.64s': %s", eng_path_tail(eng_gguf_path(file)), key, fault);
}

eng_status eng_gguf_read_integer(const eng_gguf *file, const char *key, int64_t least, int64_t most, int64_t *out,
                                 eng_error *error) {
    const eng_gguf_value *value = eng_gguf_key(file, key);
    int64_t given = 0;
    if (!value)
        return ENG_OK;
    if (!eng_gguf_integer(value, &given) || given < least || given > most)
        return eng_gguf_fail(file, ENG_FORMAT, key, error, "must be an integer from %lld to %lld", (long long)least,
                             (long long)most);
    *out = given;
    return ENG_OK;
}

eng_status eng_gguf_read_real(const eng_gguf *file, const char *key, double *out, eng_error *error) {
    const eng_gguf_value *value = eng_gguf_key(file, key);
    return !value || eng_gguf_real(value, out) ? ENG_OK
                                               : eng_gguf_fail(file, ENG_FORMAT, key, error, "must be a real number");
}

eng_status eng_gguf_read_flag(const eng_gguf *file, const char *key, bool *out, eng_error *error) {
    const eng_gguf_value *value = eng_gguf_key(file, key);
    return !value || eng_gguf_flag(value, out) ? ENG_OK
                                               : eng_gguf_fail(file, ENG_FORMAT, key, error, "must be true or false");
}

eng_status eng_gguf_read_text(const eng_gguf *file, const char *key, char **out, eng_error *error) {
    const eng_gguf_value *value = eng_gguf_key(file, key);
    if (!value)
        return ENG_OK;
    if (!eng_gguf_is_string(value) || memchr(value->data, 0, (size_t)value->count))
        return eng_gguf_fail(file, ENG_FORMAT, key, error, "must be a text without a NUL");
    char *text = strndup((const char *)value->data, (size_t)value->count);
    if (!text)
        return eng_gguf_fail(file, ENG_NO_MEMORY, key, error, "no memory");
    *out = text;
    return ENG_OK;
}

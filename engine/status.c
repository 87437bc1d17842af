// SPDX-License-Identifier: Apache-2.0
// Texts of the status codes and the one place where error text is made.
//
// Error texts quote names out of files that nobody vouches for and end up in logs and in JSON responses. So eng_fail
// leaves only printable, valid UTF-8 behind: a byte that is neither becomes '?', and a cut never splits a character.
// Any thread; an eng_error belongs to its caller.
#include "engine/status.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

const char *eng_status_text(eng_status status) {
    switch (status) {
#define ENG_STATUS_CASE(name, value, text) \
    case ENG_##name:                       \
        return text;
        ENG_STATUS_MAP(ENG_STATUS_CASE)
#undef ENG_STATUS_CASE
    }
    return "unknown status";
}

// Bytes of the well-formed UTF-8 character at text (Unicode 15, table 3-7), 0 when there is none.
static size_t utf8_length(const unsigned char *text) {
    unsigned char lead = text[0];
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (text[1] < low || text[1] > high)
        return 0;
    size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    for (size_t i = 2; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80) // the closing NUL ends this loop too
            return 0;
    }
    return length;
}

static void make_printable(char *text) {
    unsigned char *at = (unsigned char *)text;
    while (*at) {
        size_t length = utf8_length(at);
        unsigned control = *at < 0x20 || *at == 0x7f || (length == 2 && *at == 0xc2 && at[1] < 0xa0);
        if (length == 0 || control) {
            *at++ = '?';
            continue;
        }
        at += length;
    }
}

eng_status eng_fail(eng_error *error, eng_status code, const char *format, ...) {
    if (!error || error->code != ENG_OK)
        return code;
    error->code = code;
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(error->text, sizeof error->text, format, arguments) < 0)
        snprintf(error->text, sizeof error->text, "%s", eng_status_text(code));
    va_end(arguments);
    make_printable(error->text);
    return code;
}

// SPDX-License-Identifier: Apache-2.0
// JSON output. Strings are copied in runs of plain bytes between the few that need an escape, and are checked as UTF-8
// on the way, because error texts may carry file names or be cut in the middle of a character.
// Stateless; any thread.
#include "server/json_writer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Length of the well-formed UTF-8 character at bytes, 0 if there is none (RFC 3629: no overlong form, no surrogate).
static size_t character_length(const unsigned char *bytes, size_t available) {
    static const struct {
        unsigned char first_low, first_high, second_low, second_high;
        size_t length;
    } forms[] = {
        {0x00, 0x7f, 0x00, 0x00, 1}, {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (bytes[0] < forms[i].first_low || bytes[0] > forms[i].first_high)
            continue;
        const size_t length = forms[i].length;
        if (length > available)
            return 0;
        if (length > 1 && (bytes[1] < forms[i].second_low || bytes[1] > forms[i].second_high))
            return 0;
        for (size_t k = 2; k < length; k++)
            if ((bytes[k] & 0xc0) != 0x80)
                return 0;
        return length;
    }
    return 0;
}

static void escape(srv_buf *out, unsigned char byte) {
    static const char named[][2] = {{'"', '"'},  {'\\', '\\'}, {'\n', 'n'}, {'\r', 'r'},
                                    {'\t', 't'}, {'\b', 'b'},  {'\f', 'f'}};

    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if ((unsigned char)named[i][0] == byte) {
            srv_buf_append(out, (const char[]){'\\', named[i][1]}, 2);
            return;
        }
    srv_buf_printf(out, "\\u%04x", byte);
}

void srv_json_characters(srv_buf *out, const char *bytes, size_t length) {
    const unsigned char *data = (const unsigned char *)bytes;
    size_t run = 0, at = 0;

    while (at < length) {
        if (data[at] >= 0x20 && data[at] < 0x7f && data[at] != '"' && data[at] != '\\') {
            at++;
            continue;
        }
        const size_t character = character_length(data + at, length - at);
        if (character > 1) {
            at += character;
            continue;
        }
        srv_buf_append(out, bytes + run, at - run);
        if (character == 1)
            escape(out, data[at]);
        else
            srv_buf_puts(out, "\xef\xbf\xbd");
        run = ++at;
    }
    if (length > run)
        srv_buf_append(out, bytes + run, length - run);
}

void srv_json_string(srv_buf *out, const char *bytes, size_t length) {
    srv_buf_puts(out, "\"");
    srv_json_characters(out, bytes, length);
    srv_buf_puts(out, "\"");
}

void srv_json_text(srv_buf *out, const char *text) {
    if (text)
        srv_json_string(out, text, strlen(text));
    else
        srv_buf_puts(out, "null");
}

void srv_json_literal(srv_buf *out, const char *json) {
    for (const char *quote; (quote = strchr(json, '\'')) != NULL; json = quote + 1) {
        srv_buf_append(out, json, (size_t)(quote - json));
        srv_buf_puts(out, "\"");
    }
    srv_buf_puts(out, json);
}

void srv_json_integer(srv_buf *out, int64_t value) {
    char text[24]; // many stand in each event of a stream: printf takes ten times as long
    size_t at = sizeof text;
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;

    do
        text[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    if (value < 0)
        text[--at] = '-';
    srv_buf_append(out, text + at, sizeof text - at);
}

void srv_json_number(srv_buf *out, double value) {
    if (isfinite(value))
        srv_buf_printf(out, "%.9g", value);
    else
        srv_buf_puts(out, "null");
}

void srv_json_float(srv_buf *out, float value) {
    enum { ALWAYS_ENOUGH = 9 };
    char text[32];

    if (!isfinite(value)) {
        srv_buf_puts(out, "null");
        return;
    }
    for (int digits = 6; digits <= ALWAYS_ENOUGH; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    srv_buf_puts(out, text);
}

void srv_json_bool(srv_buf *out, bool value) {
    srv_buf_puts(out, value ? "true" : "false");
}

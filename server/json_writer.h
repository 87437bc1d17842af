// SPDX-License-Identifier: Apache-2.0
// Writes JSON values into a buffer: the one place that escapes strings and prints numbers.
//
// Whatever goes in, what comes out is JSON in UTF-8: control characters, quotes and backslashes are escaped, bytes that
// are not UTF-8 become U+FFFD, and numbers that are not finite become null. Punctuation and keys are the caller's.
#ifndef SERVER_JSON_WRITER_H
#define SERVER_JSON_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/buf.h"

void srv_json_characters(srv_buf *out, const char *bytes, size_t length); // a string without its quotes
void srv_json_string(srv_buf *out, const char *bytes, size_t length);
void srv_json_text(srv_buf *out, const char *text);    // NUL-terminated; NULL: null
void srv_json_literal(srv_buf *out, const char *json); // JSON of our own, with ' for "
void srv_json_integer(srv_buf *out, int64_t value);
void srv_json_number(srv_buf *out, double value);
void srv_json_float(srv_buf *out, float value); // the fewest digits that give the same float back
void srv_json_bool(srv_buf *out, bool value);

#endif

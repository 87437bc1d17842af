// SPDX-License-Identifier: Apache-2.0
// Growable byte buffer: doubles until the limit, one byte more than the content for the final NUL.
// No function here exits or logs; the sticky `failed` mark is the only report (see buf.h).
// Used from every thread of the server, each on its own buffers.
#include "server/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_CAPACITY = 256 };

void srv_buf_init(srv_buf *buf, size_t limit) {
    *buf = (srv_buf){.limit = limit};
}

void srv_buf_free(srv_buf *buf) {
    free(buf->data);
    srv_buf_init(buf, buf->limit);
}

void srv_buf_clear(srv_buf *buf) {
    buf->length = 0;
    buf->failed = false;
}

bool srv_buf_ok(const srv_buf *buf) {
    return !buf->failed;
}

static bool reserve(srv_buf *buf, size_t extra) {
    if (buf->failed || extra > buf->limit - buf->length) {
        buf->failed = true;
        return false;
    }
    const size_t needed = buf->length + extra + 1;
    if (needed <= buf->capacity)
        return true;
    size_t capacity = buf->capacity ? buf->capacity : FIRST_CAPACITY;
    while (capacity < needed)
        capacity *= 2;
    if (capacity > buf->limit + 1)
        capacity = buf->limit + 1;
    char *data = realloc(buf->data, capacity);
    if (!data) {
        buf->failed = true;
        return false;
    }
    buf->data = data;
    buf->capacity = capacity;
    return true;
}

void srv_buf_append(srv_buf *buf, const void *bytes, size_t length) {
    if (!reserve(buf, length))
        return;
    if (length)
        memcpy(buf->data + buf->length, bytes, length);
    buf->length += length;
    buf->data[buf->length] = '\0';
}

void srv_buf_printf(srv_buf *buf, const char *format, ...) {
    char text[256];
    va_list arguments;

    va_start(arguments, format);
    const int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= sizeof text) {
        buf->failed = true;
        return;
    }
    srv_buf_append(buf, text, (size_t)length);
}

char *srv_buf_take(srv_buf *buf, size_t *length) {
    char *data = NULL;

    *length = 0;
    if (!buf->failed && buf->data) {
        data = buf->data;
        *length = buf->length;
        buf->data = NULL;
    }
    srv_buf_free(buf);
    return data;
}

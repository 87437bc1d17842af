// SPDX-License-Identifier: Apache-2.0
// The small things that all commands use; see cli.h.
// Complaints are the only words on standard error that every command may say.
#include "clients/cli/cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void cli_complain(const char *format, ...) {
    va_list arguments;

    fflush(stdout);
    fputs("mesa: ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

int64_t cli_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void cli_buf_append(cli_buf *buf, const void *bytes, size_t length) {
    if (buf->failed || length >= buf->limit - buf->length) {
        buf->failed = true;
        return;
    }
    if (buf->length + length + 1 > buf->capacity) {
        size_t capacity = buf->capacity ? buf->capacity : 4096;
        while (capacity < buf->length + length + 1)
            capacity *= 2;
        char *data = realloc(buf->data, capacity);
        if (!data) {
            buf->failed = true;
            return;
        }
        buf->data = data;
        buf->capacity = capacity;
    }
    memcpy(buf->data + buf->length, bytes, length);
    buf->length += length;
    buf->data[buf->length] = '\0';
}

void cli_buf_free(cli_buf *buf) {
    free(buf->data);
    *buf = (cli_buf){.limit = buf->limit};
}

bool cli_read_all(FILE *file, const char *name, cli_buf *text) {
    char piece[65536];
    size_t got;

    while ((got = fread(piece, 1, sizeof piece, file)) > 0 && !text->failed)
        cli_buf_append(text, piece, got);
    if (ferror(file))
        cli_complain("%s: %s", name, strerror(errno));
    else if (text->failed)
        cli_complain("%s: larger than %zu MiB", name, text->limit >> 20);
    return !ferror(file) && !text->failed;
}

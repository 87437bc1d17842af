// SPDX-License-Identifier: Apache-2.0
// Growable byte buffer with a mandatory maximum.
//
// Appending never reports by itself: an append that would cross the limit, or for which there is no memory, sets
// `failed`, keeps what was there and turns every later append into nothing. Whoever built the content asks once, at the
// end, with srv_buf_ok. Not for sharing between threads.
#ifndef SERVER_BUF_H
#define SERVER_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "engine/status.h"

typedef struct srv_buf {
    char *data; // NULL while nothing was appended; otherwise NUL after length bytes
    size_t length, capacity, limit;
    bool failed;
} srv_buf;

void srv_buf_init(srv_buf *buf, size_t limit);
void srv_buf_free(srv_buf *buf);  // may be used again with the same limit
void srv_buf_clear(srv_buf *buf); // length 0, not failed; keeps the memory
bool srv_buf_ok(const srv_buf *buf);
void srv_buf_append(srv_buf *buf, const void *bytes, size_t length);
// Inline, so that the length of a literal is known.
static inline void srv_buf_puts(srv_buf *buf, const char *text) {
    srv_buf_append(buf, text, strlen(text));
}
void srv_buf_printf(srv_buf *buf, const char *format, ...) ENG_PRINTF(2, 3); // at most 255 bytes
// Hands the memory over: free() by the caller. NULL when empty or failed. The buffer is empty afterwards.
char *srv_buf_take(srv_buf *buf, size_t *length);

#endif

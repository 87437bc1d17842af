// SPDX-License-Identifier: Apache-2.0
// One JSON object a line on a descriptor: time, level, event, message, and for requests their figures.
//
// A line never holds a prompt, generated text, a key, a URL or a header: callers pass what they made up themselves, and
// whatever a text holds, control characters are escaped, so that no input can forge a line. The event is a short
// constant name; srv_log_repeated allows each event a few lines in a time window and then counts in silence, and the
// next line says how many were left out. Any thread.
#ifndef SERVER_LOG_H
#define SERVER_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

typedef struct srv_log srv_log;

// Lines below level are dropped. The descriptor stays the caller's. NULL: no memory.
srv_log *srv_log_create(int descriptor, eng_log_level level);
void srv_log_free(srv_log *log);
void srv_log_set_level(srv_log *log, eng_log_level level);

void srv_log_write(srv_log *log, eng_log_level level, const char *event, const char *format, ...) ENG_PRINTF(4, 5);
void srv_log_repeated(srv_log *log, eng_log_level level, const char *event, const char *format, ...) ENG_PRINTF(4, 5);
// An eng_log_fn whose context is the srv_log.
void srv_log_engine(void *context, eng_log_level level, const char *text);

typedef struct srv_access {
    eng_log_level level;
    const char *id;    // of the answer; NULL: none
    const char *route; // the route's own pattern, never the request's path
    const char *method;
    const char *model; // NULL: none
    const char *key;   // its name; NULL: none
    int status;        // 0: none was sent
    bool client_left;  // before the answer was whole
    uint64_t milliseconds;
    int64_t prompt_tokens, completion_tokens; // -1: none
} srv_access;
void srv_log_access(srv_log *log, const srv_access *access);

#endif

// SPDX-License-Identifier: Apache-2.0
// Log lines: built in a bounded buffer of the caller's thread, written by one write(2), so lines of several threads do
// not mix. Only the table of repeats is shared; its mutex is never held while writing.
#include "server/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/json_writer.h"
#include "server/limits.h"

enum { EVENT_SLOTS = 32, LINES_A_WINDOW = 5, WINDOW_SECONDS = 10 };

struct repeats {
    const char *event;
    time_t since;
    unsigned lines, left_out;
};

struct srv_log {
    int descriptor;
    atomic_int level;     // eng_log_level
    pthread_mutex_t lock; // guards events
    struct repeats events[EVENT_SLOTS];
};

srv_log *srv_log_create(int descriptor, eng_log_level level) {
    srv_log *log = calloc(1, sizeof *log);
    if (!log)
        return NULL;
    log->descriptor = descriptor;
    atomic_init(&log->level, (int)level);
    if (pthread_mutex_init(&log->lock, NULL) != 0) {
        free(log);
        return NULL;
    }
    return log;
}

void srv_log_set_level(srv_log *log, eng_log_level level) {
    atomic_store_explicit(&log->level, (int)level, memory_order_relaxed);
}

static bool is_below(const srv_log *log, eng_log_level level) {
    return (int)level < atomic_load_explicit(&log->level, memory_order_relaxed);
}

void srv_log_free(srv_log *log) {
    if (!log)
        return;
    pthread_mutex_destroy(&log->lock);
    free(log);
}

static const char *level_name(eng_log_level level) {
    switch (level) {
    case ENG_LOG_DEBUG:
        return "debug";
    case ENG_LOG_INFO:
        return "info";
    case ENG_LOG_WARNING:
        return "warning";
    case ENG_LOG_ERROR:
        return "error";
    }
    return "error";
}

static void begin_line(srv_buf *line, eng_log_level level, const char *event) {
    struct timespec now;
    struct tm utc;
    char date[32];

    srv_buf_init(line, SRV_MAX_LOG_LINE);
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &utc);
    srv_buf_printf(line, "{\"time\":\"%s.%03ldZ\",\"level\":\"%s\",\"event\":", date, now.tv_nsec / 1000000,
                   level_name(level));
    srv_json_text(line, event);
}

static void end_line(srv_log *log, srv_buf *line) {
    srv_buf_puts(line, "}\n");
    if (srv_buf_ok(line)) {
        // A log that cannot be written has no place to say so.
        ssize_t written = write(log->descriptor, line->data, line->length);
        (void)written;
    }
    srv_buf_free(line);
}

static void write_message(srv_log *log, eng_log_level level, const char *event, unsigned left_out, const char *format,
                          va_list arguments) {
    char message[512];
    srv_buf line;

    if (vsnprintf(message, sizeof message, format, arguments) < 0)
        return;
    begin_line(&line, level, event);
    srv_buf_puts(&line, ",\"message\":");
    srv_json_text(&line, message);
    if (left_out)
        srv_buf_printf(&line, ",\"left_out\":%u", left_out);
    end_line(log, &line);
}

void srv_log_write(srv_log *log, eng_log_level level, const char *event, const char *format, ...) {
    if (is_below(log, level))
        return;
    va_list arguments;
    va_start(arguments, format);
    write_message(log, level, event, 0, format, arguments);
    va_end(arguments);
}

// Whether the event may write a line now; *left_out: lines dropped since the last one.
static bool may_write(srv_log *log, const char *event, unsigned *left_out) {
    const time_t now = time(NULL);
    bool allowed = true;

    *left_out = 0;
    pthread_mutex_lock(&log->lock);
    for (size_t i = 0; i < EVENT_SLOTS; i++) {
        struct repeats *slot = &log->events[i];
        if (slot->event && strcmp(slot->event, event) != 0)
            continue;
        if (!slot->event || now - slot->since >= WINDOW_SECONDS) {
            *left_out = slot->left_out;
            *slot = (struct repeats){.event = event, .since = now};
        }
        allowed = slot->lines < LINES_A_WINDOW;
        if (allowed)
            slot->lines++;
        else
            slot->left_out++;
        break;
    }
    pthread_mutex_unlock(&log->lock);
    return allowed;
}

void srv_log_repeated(srv_log *log, eng_log_level level, const char *event, const char *format, ...) {
    unsigned left_out;

    if (is_below(log, level) || !may_write(log, event, &left_out))
        return;
    va_list arguments;
    va_start(arguments, format);
    write_message(log, level, event, left_out, format, arguments);
    va_end(arguments);
}

void srv_log_engine(void *context, eng_log_level level, const char *text) {
    srv_log_repeated(context, level, "engine", "%s", text);
}

void srv_log_access(srv_log *log, const srv_access *access) {
    srv_buf line;

    if (is_below(log, access->level))
        return;
    begin_line(&line, access->level, "request");
    srv_buf_printf(&line, ",\"method\":\"%s\",\"route\":\"%s\",\"status\":%d,\"ms\":%llu", access->method,
                   access->route, access->status, (unsigned long long)access->milliseconds);
    if (access->client_left)
        srv_buf_puts(&line, ",\"client_left\":true");
    if (access->id) {
        srv_buf_puts(&line, ",\"id\":");
        srv_json_text(&line, access->id);
    }
    if (access->model) {
        srv_buf_puts(&line, ",\"model\":");
        srv_json_text(&line, access->model);
    }
    if (access->key) {
        srv_buf_puts(&line, ",\"key\":");
        srv_json_text(&line, access->key);
    }
    if (access->prompt_tokens >= 0)
        srv_buf_printf(&line, ",\"prompt_tokens\":%lld,\"completion_tokens\":%lld", (long long)access->prompt_tokens,
                       (long long)access->completion_tokens);
    end_line(log, &line);
}

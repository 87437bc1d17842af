// SPDX-License-Identifier: Apache-2.0
// The parser of server-sent events; see events.h.
// An event whose end has not arrived when the connection ends is dropped, as the standard says.
#include "clients/cli/events.h"

#include <string.h>

void cli_events_init(cli_events *events) {
    *events = (cli_events){.line.limit = CLI_MAX_EVENT, .data.limit = CLI_MAX_EVENT};
}

void cli_events_free(cli_events *events) {
    cli_buf_free(&events->line);
    cli_buf_free(&events->data);
}

static void clear(cli_buf *buf) {
    buf->length = 0;
}

static bool end_line(cli_events *events, cli_event_fn *each, void *context) {
    const cli_buf *line = &events->line;
    bool go_on = true;

    if (line->length == 0) {
        if (events->has_data) {
            cli_buf_append(&events->data, "", 0);
            go_on = !events->data.failed && each(context, events->data.data, events->data.length);
        }
        clear(&events->data);
        events->has_data = false;
    } else if (line->length >= 5 && memcmp(line->data, "data:", 5) == 0) {
        const size_t skip = line->length > 5 && line->data[5] == ' ' ? 6 : 5;
        if (events->has_data)
            cli_buf_append(&events->data, "\n", 1);
        cli_buf_append(&events->data, line->data + skip, line->length - skip);
        events->has_data = true;
    }
    clear(&events->line);
    return go_on && !events->data.failed;
}

bool cli_events_feed(cli_events *events, const char *bytes, size_t length, cli_event_fn *each, void *context) {
    size_t at = 0;

    while (at < length) {
        if (events->after_cr && bytes[at] == '\n') {
            events->after_cr = false;
            at++;
            continue;
        }
        events->after_cr = false;
        size_t end = at;
        while (end < length && bytes[end] != '\n' && bytes[end] != '\r')
            end++;
        cli_buf_append(&events->line, bytes + at, end - at);
        if (events->line.failed)
            return false;
        if (end == length)
            return true;
        events->after_cr = bytes[end] == '\r';
        if (!end_line(events, each, context))
            return false;
        at = end + 1;
    }
    return true;
}

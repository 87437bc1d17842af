// SPDX-License-Identifier: Apache-2.0
// Server-sent events out of bytes that arrive in any pieces.
// Lines end in LF, CR LF or CR; only data lines count; an event ends at an empty line. Linear in the bytes.
#ifndef CLIENTS_CLI_EVENTS_H
#define CLIENTS_CLI_EVENTS_H

#include "clients/cli/cli.h"

enum { CLI_MAX_EVENT = 64 << 20 };

typedef struct cli_events {
    cli_buf line, data;
    bool has_data, after_cr;
} cli_events;

// data has length bytes and a NUL behind them, and lives until the callback returns. false: stop, the rest is dropped.
typedef bool cli_event_fn(void *context, const char *data, size_t length);

void cli_events_init(cli_events *events);
void cli_events_free(cli_events *events);
// false: the callback stopped, or an event is larger than CLI_MAX_EVENT, or no memory.
bool cli_events_feed(cli_events *events, const char *bytes, size_t length, cli_event_fn *each, void *context);

#endif

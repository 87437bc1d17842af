// SPDX-License-Identifier: Apache-2.0
// One request and its answer, driven to the end: a stream's events as they arrive, any other body whole.
// Used by every command that asks one thing at a time. Ctrl-C closes the connection, which cancels the request.
#ifndef CLIENTS_CLI_EXCHANGE_H
#define CLIENTS_CLI_EXCHANGE_H

#include "clients/cli/endpoint.h"
#include "clients/cli/events.h"

enum { CLI_MAX_ANSWER = 1 << 30 };

typedef struct cli_exchange {
    long status;  // of HTTP; 0: none came
    cli_buf body; // of everything but a stream
    bool streamed;
} cli_exchange;

// each may be NULL. CLI_EXIT_OK: an answer arrived, whatever it says; else the reason is on
// standard error. Free the exchange in any case.
int cli_exchange_run(const cli_endpoint *endpoint, const cli_request *request, cli_event_fn *each, void *context,
                     cli_exchange *out);
void cli_exchange_free(cli_exchange *exchange);

// A status other than 2xx is said on standard error, with the server's words.
bool cli_exchange_accepted(const cli_exchange *exchange);

#endif

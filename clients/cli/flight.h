// SPDX-License-Identifier: Apache-2.0
// One request of the load on its way: its bytes, its clock, and whether it came through.
// The load owns flights and uses each for one request after another, so that nothing is allocated anew in between.
#ifndef CLIENTS_CLI_FLIGHT_H
#define CLIENTS_CLI_FLIGHT_H

#include "clients/cli/events.h"
#include "clients/cli/load.h"

typedef struct cli_flight {
    CURL *easy;
    char *request; // JSON
    cli_events events;
    cli_buf body; // of an answer that is no stream
    bool began, streamed, ended, has_usage, untold;
    int64_t tries; // of this request, earlier ones included; the load's
    long status;
    int64_t arrival, sent, first, last; // times; 0: not yet
    int64_t tokens;                     // told by events so far
    int64_t prompt_tokens, completion_tokens;
    cli_samples between, event_gaps;
    char problem[CLI_PROBLEM_SIZE]; // "": none
    int64_t retry_after;            // seconds that a refusal asks for; 0: none
    struct cli_flight *next;        // in a list of the load's
} cli_flight;

// Takes request (malloc'd, or the flight's own to send it again). Everything else but tries begins anew.
void cli_flight_begin(cli_flight *flight, char *request, int64_t arrival);
void cli_flight_free(cli_flight *flight);
// A write callback of libcurl; context is the flight.
size_t cli_flight_bytes(char *bytes, size_t size, size_t count, void *context);
// After the transfer: true if a whole and good answer came; otherwise problem says what did not.
bool cli_flight_end(cli_flight *flight, CURLcode result);

#endif

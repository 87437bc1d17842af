// SPDX-License-Identifier: Apache-2.0
// The load: many requests on one loop, and what was measured.
//
// Closed loop: `concurrency` requests are always running, the next begins when one ends. Open loop: arrivals are a
// Poisson process drawn beforehand; a request's times count from its arrival, also when the generator sends it late, so
// that a stalled server is charged for all who would have waited (no coordinated omission). Bytes get their time when
// the socket was read. A request that is refused with 429 and a Retry-After may be sent again after it; its times count
// from the try that was taken. An event that carries m tokens is one gap and m - 1 gaps of zero; gaps between events
// are kept beside them.
#ifndef CLIENTS_CLI_LOAD_H
#define CLIENTS_CLI_LOAD_H

#include <jansson.h>

#include "clients/cli/answer.h"
#include "clients/cli/endpoint.h"
#include "clients/cli/options.h"
#include "clients/cli/samples.h"

typedef struct cli_load_plan {
    const cli_endpoint *endpoint;
    const json_t *fields; // of every request; borrowed
    const char *text;     // the prompt; NULL: random ids below vocabulary
    int64_t vocabulary;
    cli_range prompt_tokens, max_tokens;
    bool stream, final_usage, ignore_eos;
    int64_t concurrency; // closed loop
    double rate;         // requests a second; 0: closed loop
    int64_t requests;    // 0: until the time is over
    int64_t retries;     // of a request that is refused for the time being
    double seconds;      // no request begins after it; 0: any time
    double timeout;      // of a request
    uint64_t seed;
    double slo_first_ms, slo_gap_ms; // 0: any
} cli_load_plan;

enum { CLI_MAX_FAULTS = 8 };

typedef struct cli_load_fault {
    char text[CLI_PROBLEM_SIZE];
    int64_t count;
} cli_load_fault;

typedef struct cli_load_result {
    int64_t succeeded, failed;
    int64_t tried_again, accepted_again;                   // after a Retry-After
    int64_t prompt_tokens, completion_tokens, good_tokens; // of requests that succeeded; good: within the objectives
    double seconds, cpu_seconds;                           // from the first arrival to the last answer; the generator's
    cli_samples first, between, events, whole, late;       // late: sending after the arrival
    cli_samples refused;                                   // from sending to a 429
    cli_load_fault faults[CLI_MAX_FAULTS];
    size_t fault_count;
    bool interrupted, gave_up; // gave_up: nothing but failures for too long
    bool untold_tokens;        // some events did not tell how many tokens they carry: taken as one
} cli_load_result;

// false: the reason is on standard error. Free the result in any case.
bool cli_load_run(const cli_load_plan *plan, cli_load_result *result);
void cli_load_result_free(cli_load_result *result);

#endif

// SPDX-License-Identifier: Apache-2.0
// Reads one answer of the load while it comes; see flight.h.
// A time is taken once for each read of the socket, before anything is parsed.
#include "clients/cli/flight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_BODY = 64 << 20, REFUSED = 429 };

void cli_flight_begin(cli_flight *flight, char *request, int64_t arrival) {
    if (flight->request != request)
        free(flight->request);
    cli_events_free(&flight->events);
    cli_events_init(&flight->events);
    cli_buf_free(&flight->body);
    flight->body.limit = MAX_BODY;
    flight->request = request;
    flight->began = flight->streamed = flight->ended = flight->has_usage = flight->untold = false;
    flight->status = 0;
    flight->retry_after = 0;
    flight->arrival = arrival;
    flight->sent = cli_now();
    flight->first = flight->last = 0;
    flight->tokens = flight->prompt_tokens = flight->completion_tokens = 0;
    flight->between.count = flight->event_gaps.count = 0;
    flight->problem[0] = '\0';
}

void cli_flight_free(cli_flight *flight) {
    free(flight->request);
    cli_events_free(&flight->events);
    cli_buf_free(&flight->body);
    cli_samples_free(&flight->between);
    cli_samples_free(&flight->event_gaps);
    curl_easy_cleanup(flight->easy);
    free(flight);
}

static void keep_usage(cli_flight *flight, const json_t *usage) {
    const int64_t prompt = cli_usage_count(usage, "prompt_tokens"),
                  completion = cli_usage_count(usage, "completion_tokens");

    if (prompt < 0 || completion < 0)
        return;
    flight->has_usage = true;
    flight->prompt_tokens = prompt;
    flight->completion_tokens = completion;
}

// count tokens arrived in an event at this time.
static void take_tokens(cli_flight *flight, int64_t count, int64_t now) {
    flight->tokens += count;
    if (!flight->first)
        flight->first = now;
    else {
        cli_samples_add(&flight->between, now - flight->last);
        cli_samples_add(&flight->event_gaps, now - flight->last);
    }
    cli_samples_add_many(&flight->between, 0, (size_t)count - 1);
    flight->last = now;
}

typedef struct reading {
    cli_flight *flight;
    int64_t now;
} reading;

static bool on_event(void *context, const char *data, size_t length) {
    const reading *reading = context;
    cli_flight *flight = reading->flight;
    cli_answer answer;

    if (strcmp(data, "[DONE]") == 0) {
        flight->ended = true;
        return true;
    }
    if (!cli_answer_read(data, length, &answer)) {
        snprintf(flight->problem, sizeof flight->problem, "an event that is not JSON");
        return false;
    }
    if (answer.error)
        cli_problem_text(0, data, length, flight->problem);
    if (answer.usage)
        keep_usage(flight, answer.usage);
    if (answer.choices && json_array_size(answer.choices) > 0) {
        const cli_choice choice = cli_answer_choice(&answer, 0);
        const bool told = answer.usage && flight->has_usage;
        const int64_t count = told ? flight->completion_tokens - flight->tokens : choice.length > 0;
        flight->untold = flight->untold || (!told && choice.length > 0);
        if (count > 0 && count <= CLI_MAX_EVENT)
            take_tokens(flight, count, reading->now);
    }
    cli_answer_free(&answer);
    return !flight->problem[0];
}

size_t cli_flight_bytes(char *bytes, size_t size, size_t count, void *context) {
    cli_flight *flight = context;
    reading reading = {.flight = flight, .now = cli_now()};
    const size_t length = size * count;

    if (!flight->began) {
        const char *type = NULL;
        flight->began = true;
        curl_easy_getinfo(flight->easy, CURLINFO_RESPONSE_CODE, &flight->status);
        curl_easy_getinfo(flight->easy, CURLINFO_CONTENT_TYPE, &type);
        flight->streamed = flight->status == 200 && type && strncasecmp(type, "text/event-stream", 17) == 0;
    }
    if (flight->streamed)
        return cli_events_feed(&flight->events, bytes, length, on_event, &reading) ? length : 0;
    flight->last = reading.now;
    cli_buf_append(&flight->body, bytes, length);
    return flight->body.failed ? 0 : length;
}

static void read_body(cli_flight *flight) {
    cli_answer answer;

    if (!cli_answer_read(flight->body.data ? flight->body.data : "", flight->body.length, &answer)) {
        snprintf(flight->problem, sizeof flight->problem, "an answer that is not JSON");
        return;
    }
    if (answer.error || !answer.choices)
        cli_problem_text(0, flight->body.data, flight->body.length, flight->problem);
    else if (answer.usage)
        keep_usage(flight, answer.usage);
    if (!flight->has_usage && !flight->problem[0])
        snprintf(flight->problem, sizeof flight->problem, "an answer without usage");
    cli_answer_free(&answer);
}

bool cli_flight_end(cli_flight *flight, CURLcode result) {
    curl_off_t wait = 0;

    curl_easy_getinfo(flight->easy, CURLINFO_RESPONSE_CODE, &flight->status);
    if (curl_easy_getinfo(flight->easy, CURLINFO_RETRY_AFTER, &wait) == CURLE_OK && flight->status == REFUSED)
        flight->retry_after = (int64_t)wait;
    if (flight->problem[0])
        return false;
    if (result != CURLE_OK) {
        snprintf(flight->problem, sizeof flight->problem, "%s", curl_easy_strerror(result));
        return false;
    }
    if (flight->status != 200)
        cli_problem_text(flight->status, flight->body.data, flight->body.length, flight->problem);
    else if (!flight->streamed)
        read_body(flight);
    else if (!flight->ended)
        snprintf(flight->problem, sizeof flight->problem, "a stream without its end mark");
    else if (!flight->has_usage)
        flight->completion_tokens = flight->tokens;
    return !flight->problem[0];
}

// SPDX-License-Identifier: Apache-2.0
// Runs one transfer on a loop of its own; see exchange.h.
// Whether an answer is a stream is told by its content type, so that a refusal of a stream is read whole.
#include "clients/cli/exchange.h"

#include <string.h>
#include <strings.h>

#include "clients/cli/answer.h"
#include "clients/cli/loop.h"

typedef struct run {
    cli_exchange *exchange;
    cli_loop *loop;
    CURL *easy;
    cli_events events;
    cli_event_fn *each;
    void *context;
    CURLcode result;
    char fault[CURL_ERROR_SIZE];
    bool began, stopped, interrupted;
} run;

static void begin_body(run *run) {
    const char *type = NULL;

    run->began = true;
    curl_easy_getinfo(run->easy, CURLINFO_RESPONSE_CODE, &run->exchange->status);
    curl_easy_getinfo(run->easy, CURLINFO_CONTENT_TYPE, &type);
    run->exchange->streamed = run->each && type && strncasecmp(type, "text/event-stream", 17) == 0;
}

static size_t on_bytes(char *bytes, size_t size, size_t count, void *context) {
    run *run = context;
    const size_t length = size * count;

    if (!run->began)
        begin_body(run);
    if (run->exchange->streamed)
        run->stopped = !cli_events_feed(&run->events, bytes, length, run->each, run->context);
    else {
        cli_buf_append(&run->exchange->body, bytes, length);
        run->stopped = run->exchange->body.failed;
    }
    return run->stopped ? 0 : length;
}

static void on_done(void *context, CURL *easy, CURLcode result) {
    run *run = context;
    (void)easy;
    run->result = result;
    cli_loop_stop(run->loop);
}

static void on_interrupted(void *context) {
    run *run = context;
    run->interrupted = true;
    cli_loop_stop(run->loop);
}

static int judge(run *run, const cli_endpoint *endpoint) {
    if (run->interrupted)
        return CLI_EXIT_INTERRUPTED;
    if (run->result == CURLE_OK) {
        curl_easy_getinfo(run->easy, CURLINFO_RESPONSE_CODE, &run->exchange->status);
        return CLI_EXIT_OK;
    }
    if (run->stopped) {
        if (run->exchange->body.failed || run->events.line.failed || run->events.data.failed)
            cli_complain("the answer is larger than memory or the limit of this program");
        return CLI_EXIT_REFUSED;
    }
    const char *where = endpoint->socket ? endpoint->socket : endpoint->base;
    long fault = 0;
    if (run->result == CURLE_COULDNT_CONNECT && curl_easy_getinfo(run->easy, CURLINFO_OS_ERRNO, &fault) == CURLE_OK &&
        fault)
        cli_complain("%s: no server answers there: %s (--url or MESA_URL names another)", where, strerror((int)fault));
    else
        cli_complain("%s: %s", where, run->fault[0] ? run->fault : curl_easy_strerror(run->result));
    return CLI_EXIT_CONNECTION;
}

int cli_exchange_run(const cli_endpoint *endpoint, const cli_request *request, cli_event_fn *each, void *context,
                     cli_exchange *out) {
    static const cli_loop_calls calls = {.done = on_done, .interrupted = on_interrupted};
    run run = {.exchange = out, .each = each, .context = context};
    int result = CLI_EXIT_REFUSED;

    *out = (cli_exchange){.body.limit = CLI_MAX_ANSWER};
    cli_events_init(&run.events);
    run.loop = cli_loop_create(&calls, &run);
    run.easy = cli_endpoint_request(endpoint, request, on_bytes, &run);
    if (run.loop && run.easy && curl_easy_setopt(run.easy, CURLOPT_ERRORBUFFER, run.fault) == CURLE_OK &&
        cli_loop_add(run.loop, run.easy)) {
        cli_loop_run(run.loop);
        result = judge(&run, endpoint);
        if (run.interrupted)
            cli_loop_remove(run.loop, run.easy);
    } else
        cli_complain("out of memory");
    curl_easy_cleanup(run.easy);
    cli_loop_free(run.loop);
    cli_events_free(&run.events);
    return result;
}

void cli_exchange_free(cli_exchange *exchange) {
    cli_buf_free(&exchange->body);
}

bool cli_exchange_accepted(const cli_exchange *exchange) {
    char text[CLI_PROBLEM_SIZE];

    if (exchange->status >= 200 && exchange->status < 300)
        return true;
    cli_problem_text(exchange->status, exchange->body.data, exchange->body.length, text);
    cli_complain("the server answered %s", text);
    return false;
}

// SPDX-License-Identifier: Apache-2.0
// The load generator against a server whose times are known: a child process that answers one connection after another.
//
// What it waits is what must be measured: a time from the sending of a request is never shorter than what the server
// waited. It may be longer by any amount, and a gap between two events shorter, where a busy machine keeps the client
// from the first of them.
#include "clients/cli/load.h"

#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "clients/cli/cli.h"
#include "tests/check_main.h"

typedef struct answer {
    int first_ms, gap_ms;    // before the first event, between events
    int events, tokens;      // events, tokens an event
    bool tells, cut, refuse; // usage with each event; end without the end mark; 429
    int refuse_every;        // every so many requests; 0: never
    bool comes_again;        // a refusal says when to come again
} answer;

static void wait_ms(int milliseconds) {
    const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static void send_text(int connection, const char *text) {
    for (size_t left = strlen(text); left;) {
        const ssize_t sent = send(connection, text, left, MSG_NOSIGNAL);
        if (sent <= 0)
            return;
        text += sent;
        left -= (size_t)sent;
    }
}

static bool read_request(int connection, bool *streamed) {
    static char text[1 << 16];
    size_t length = 0, whole = SIZE_MAX;

    while (length < whole) {
        const ssize_t got = recv(connection, text + length, sizeof text - 1 - length, 0);
        if (got <= 0)
            return false;
        text[length += (size_t)got] = '\0';
        const char *end = strstr(text, "\r\n\r\n"), *size = strstr(text, "Content-Length: ");
        if (end && size)
            whole = (size_t)(end + 4 - text) + strtoul(size + 16, NULL, 10);
    }
    *streamed = strstr(text, "\"stream\":true") != NULL;
    return true;
}

static void send_stream(int connection, const answer *answer) {
    char event[512], usage[128] = "";

    send_text(connection, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n");
    for (int i = 0; i < answer->events; i++) {
        wait_ms(i ? answer->gap_ms : answer->first_ms);
        if (answer->tells)
            snprintf(usage, sizeof usage, ",\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":%d}",
                     (i + 1) * answer->tokens);
        snprintf(event, sizeof event, "data: {\"choices\":[{\"index\":0,\"text\":\"x\",\"finish_reason\":null}]%s}\n\n",
                 usage);
        send_text(connection, event);
    }
    snprintf(event, sizeof event,
             "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":%d}}\n\n%s",
             answer->events * answer->tokens, answer->cut ? "" : "data: [DONE]\n\n");
    send_text(connection, event);
}

static void send_whole(int connection, const answer *answer) {
    char body[256], head[256];

    wait_ms(answer->first_ms);
    snprintf(body, sizeof body,
             "{\"choices\":[{\"text\":\"x\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":%d}}",
             answer->events * answer->tokens);
    snprintf(head, sizeof head,
             "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
             strlen(body));
    send_text(connection, head);
    send_text(connection, body);
}

static void send_refusal(int connection, bool comes_again) {
    send_text(connection, "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n");
    if (comes_again)
        send_text(connection, "Retry-After: 1\r\n");
    send_text(connection, "Content-Length: 45\r\nConnection: close\r\n\r\n"
                          "{\"error\":{\"message\":\"full\",\"code\":\"busy\"}}   ");
}

static void serve(int listener, const answer *answer) {
    for (int number = 1;; number++) {
        const int connection = accept(listener, NULL, NULL);
        bool streamed;
        if (connection < 0)
            _exit(1);
        if (!read_request(connection, &streamed))
            number--;
        else if (answer->refuse || (answer->refuse_every && number % answer->refuse_every == 0))
            send_refusal(connection, answer->comes_again);
        else if (streamed)
            send_stream(connection, answer);
        else
            send_whole(connection, answer);
        close(connection);
    }
}

typedef struct server {
    char folder[64], url[128];
    pid_t child;
} server;

static void start_server(server *server, const answer *answer) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    strcpy(server->folder, "/tmp/mesa-load-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(server->folder));
    snprintf(address.sun_path, sizeof address.sun_path, "%s/socket", server->folder);
    snprintf(server->url, sizeof server->url, "unix:%s", address.sun_path);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    ck_assert_int_eq(listen(listener, 1024), 0);
    server->child = fork();
    if (server->child == 0)
        serve(listener, answer);
    close(listener);
}

static void stop_server(const server *server) {
    char path[128];

    kill(server->child, SIGKILL);
    waitpid(server->child, NULL, 0);
    snprintf(path, sizeof path, "%s/socket", server->folder);
    unlink(path);
    rmdir(server->folder);
}

static void run(const answer *answer, cli_load_plan plan, cli_load_result *result) {
    server server;
    cli_endpoint endpoint;

    start_server(&server, answer);
    ck_assert(cli_endpoint_open(server.url, NULL, &endpoint));
    plan.endpoint = &endpoint;
    plan.fields = json_object();
    plan.vocabulary = 100;
    plan.prompt_tokens = (cli_range){3, 3};
    plan.max_tokens = (cli_range){4, 4};
    plan.timeout = 300;
    plan.seed = 7;
    ck_assert(cli_load_run(&plan, result));
    json_decref((json_t *)plan.fields);
    cli_endpoint_close(&endpoint);
    stop_server(&server);
}

static double ms(int64_t nanoseconds) {
    return (double)nanoseconds * 1e-6;
}

START_TEST(test_stream_times) {
    const answer answer = {.first_ms = 30, .gap_ms = 10, .events = 5, .tokens = 3, .tells = true};
    cli_load_result result;

    run(&answer, (cli_load_plan){.stream = true, .concurrency = 1, .requests = 6}, &result);
    ck_assert_int_eq(result.succeeded, 6);
    ck_assert_int_eq(result.failed, 0);
    ck_assert_int_eq(result.prompt_tokens, 18);
    ck_assert_int_eq(result.completion_tokens, 90);
    ck_assert(!result.untold_tokens);
    // Five events of three tokens: four gaps, and two zeros an event.
    ck_assert_uint_eq(result.first.count, 6);
    ck_assert_uint_eq(result.events.count, 24);
    ck_assert_uint_eq(result.between.count, 84);
    ck_assert_int_eq(cli_samples_quantile(&result.between, 60.0 / 84), 0);
    ck_assert_double_ge(ms(cli_samples_quantile(&result.first, 0.01)), 30);
    const double first = cli_samples_mean(&result.first) * 6e-6, events = cli_samples_mean(&result.events) * 24e-6;
    ck_assert_double_ge(first + events, 6 * 69.9);
    ck_assert_double_le(first + events, cli_samples_mean(&result.whole) * 6e-6 + 0.1);
    ck_assert_double_eq_tol(cli_samples_mean(&result.between) * 84e-6, events, 0.1);
    ck_assert_double_ge(ms(cli_samples_quantile(&result.whole, 0.01)), 70);
    ck_assert_double_ge(result.seconds, 6 * 0.070);
    cli_load_result_free(&result);
}
END_TEST

START_TEST(test_untold_tokens) {
    const answer answer = {.events = 4, .tokens = 2};
    cli_load_result result;

    run(&answer, (cli_load_plan){.stream = true, .concurrency = 1, .requests = 2}, &result);
    ck_assert_int_eq(result.succeeded, 2);
    ck_assert(result.untold_tokens);
    ck_assert_int_eq(result.completion_tokens, 16); // the last event tells
    ck_assert_uint_eq(result.between.count, 6);
    cli_load_result_free(&result);
}
END_TEST

START_TEST(test_plain) {
    const answer answer = {.first_ms = 20, .events = 4, .tokens = 1};
    cli_load_result result;

    run(&answer, (cli_load_plan){.concurrency = 2, .requests = 8}, &result);
    ck_assert_int_eq(result.succeeded, 8);
    ck_assert_int_eq(result.completion_tokens, 32);
    ck_assert_uint_eq(result.first.count, 0);
    ck_assert_uint_eq(result.whole.count, 8);
    ck_assert_double_ge(ms(cli_samples_quantile(&result.whole, 1.0 / 8)), 20);
    ck_assert_double_ge(result.seconds, 8 * 0.020); // served one after the other
    cli_load_result_free(&result);
}
END_TEST

// Arrivals come twice as fast as they are served. A generator that waited for answers before it sent, or that counted
// from sending, would see some 20 ms a request; from their arrival the last ones waited for half of the run.
START_TEST(test_open_loop) {
    const answer answer = {.first_ms = 20, .events = 1, .tokens = 1, .tells = true};
    cli_load_result result;

    run(&answer, (cli_load_plan){.stream = true, .rate = 100, .requests = 60}, &result);
    ck_assert_int_eq(result.succeeded, 60);
    ck_assert_double_ge(result.seconds, 1.2);
    ck_assert_double_ge(ms(cli_samples_quantile(&result.whole, 1)), 300);
    ck_assert_double_ge(ms(cli_samples_quantile(&result.first, 0.5)), 100);
    ck_assert_uint_eq(result.late.count, 60);
    ck_assert_double_ge(ms(cli_samples_quantile(&result.late, 0.01)), 0);
    cli_load_result_free(&result);
}
END_TEST

START_TEST(test_arrivals_are_poisson) {
    const answer answer = {.events = 1, .tokens = 1, .tells = true};
    cli_load_result result;

    run(&answer, (cli_load_plan){.stream = true, .rate = 400, .requests = 400}, &result);
    ck_assert_int_eq(result.succeeded, 400);
    // The sum of 400 exponential gaps: 1 s with a deviation of 5 %.
    ck_assert_double_ge(result.seconds, 0.8);
    cli_load_result_free(&result);
}
END_TEST

START_TEST(test_time_limit) {
    const answer answer = {.first_ms = 10, .events = 1, .tokens = 1, .tells = true};
    cli_load_result result;

    run(&answer, (cli_load_plan){.stream = true, .concurrency = 2, .seconds = 0.5}, &result);
    ck_assert_int_ge(result.succeeded, 1);
    ck_assert_int_le(result.succeeded, 52);
    ck_assert_double_ge(result.seconds, 0.45);
    cli_load_result_free(&result);
}
END_TEST

// A refusal for the time being is not the end, but as often as was said and after the time that was asked for.
START_TEST(test_retries) {
    const answer some = {.events = 2, .tokens = 1, .tells = true, .refuse_every = 3, .comes_again = true};
    const answer all = {.refuse = true, .comes_again = true};
    cli_load_result result;

    run(&some, (cli_load_plan){.stream = true, .concurrency = 1, .requests = 6, .retries = 1}, &result);
    ck_assert_int_eq(result.succeeded, 6);
    ck_assert_int_eq(result.failed, 0);
    ck_assert_int_eq(result.tried_again, 2);
    ck_assert_int_eq(result.accepted_again, 2);
    ck_assert_uint_eq(result.refused.count, 2);
    // Of those that were taken at last only the last try counts: each waited for a second before.
    ck_assert_double_le(cli_samples_mean(&result.whole) * 6e-9, result.seconds - 2);
    cli_load_result_free(&result);

    run(&all, (cli_load_plan){.stream = true, .rate = 100, .requests = 100, .retries = 1}, &result);
    ck_assert(!result.gave_up);
    ck_assert_int_eq(result.failed, 100);
    ck_assert_int_eq(result.tried_again, 100);
    ck_assert_int_eq(result.accepted_again, 0);
    ck_assert_uint_eq(result.refused.count, 200);
    cli_load_result_free(&result);
}
END_TEST

START_TEST(test_faults) {
    const answer some = {.events = 2, .tokens = 1, .tells = true, .refuse_every = 3};
    const answer cut = {.events = 2, .tokens = 1, .tells = true, .cut = true};
    const answer all = {.refuse = true};
    cli_load_result result;

    run(&some, (cli_load_plan){.stream = true, .concurrency = 1, .requests = 9}, &result);
    ck_assert_int_eq(result.succeeded, 6);
    ck_assert_int_eq(result.failed, 3);
    ck_assert_uint_eq(result.fault_count, 1);
    ck_assert_int_eq(result.faults[0].count, 3);
    ck_assert_str_eq(result.faults[0].text, "429 busy: full");
    ck_assert_uint_eq(result.whole.count, 6);
    cli_load_result_free(&result);

    run(&cut, (cli_load_plan){.stream = true, .concurrency = 1, .requests = 2}, &result);
    ck_assert_int_eq(result.failed, 2);
    ck_assert_str_eq(result.faults[0].text, "a stream without its end mark");
    cli_load_result_free(&result);

    // Nothing but refusals: it does not go on for ever.
    run(&all, (cli_load_plan){.stream = true, .concurrency = 4, .seconds = 600}, &result);
    ck_assert(result.gave_up);
    ck_assert_int_eq(result.succeeded, 0);
    ck_assert_int_le(result.failed, 80);
    cli_load_result_free(&result);
}
END_TEST

START_TEST(test_objectives) {
    const answer answer = {.first_ms = 30, .gap_ms = 20, .events = 3, .tokens = 1, .tells = true};
    static const struct {
        double first, gap;
        int64_t good;
    } cases[] = {{10, 0, 0}, {10000, 0, 6}, {10000, 5, 0}, {10000, 10000, 6}};
    cli_load_result result;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t good = -1;
        for (int tries = 0; tries < 20 && good != cases[i].good; tries++) { // gaps may be short on a busy machine
            run(&answer,
                (cli_load_plan){.stream = true,
                                .concurrency = 1,
                                .requests = 2,
                                .slo_first_ms = cases[i].first,
                                .slo_gap_ms = cases[i].gap},
                &result);
            good = result.good_tokens;
            cli_load_result_free(&result);
        }
        ck_assert_int_eq(good, cases[i].good);
    }
}
END_TEST

static Suite *load_suite(void) {
    Suite *suite = suite_create("load");
    TCase *all = tcase_create("load");
    tcase_set_timeout(all, 60);
    tcase_add_test(all, test_stream_times);
    tcase_add_test(all, test_untold_tokens);
    tcase_add_test(all, test_plain);
    tcase_add_test(all, test_open_loop);
    tcase_add_test(all, test_arrivals_are_poisson);
    tcase_add_test(all, test_time_limit);
    tcase_add_test(all, test_retries);
    tcase_add_test(all, test_faults);
    tcase_add_test(all, test_objectives);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(load_suite)

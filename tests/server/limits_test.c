// SPDX-License-Identifier: Apache-2.0
// Every limit from both sides: queue, bodies, connections, times.
// The bounds are set so low that a test reaches them within a second.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;

static int wanted_active;
static bool enough_active(void) {
    return atomic_load(&fake_engine()->active) >= wanted_active;
}

static void expect_ok(const char *path, const char *body) {
    answer answer;
    fixture_post(&server, path, body, &answer);
    ck_assert_msg(answer.status == 200, "%d: %s", answer.status, answer.body);
    answer_free(&answer);
}

START_TEST(full_queue_is_429) {
    static const char *const options[] = {"--rows", "1", "--queue-requests", "2", NULL};
    int clients[3];
    answer answer;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    for (int i = 0; i < 3; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60}");
    }
    wanted_active = 3;
    wait_for(enough_active, "one runs and two wait");
    for (int stream = 0; stream < 2; stream++) {
        fixture_post(&server, "/v1/completions", stream ? "{\"prompt\":\"hi\",\"stream\":true}" : "{\"prompt\":\"hi\"}",
                     &answer);
        expect_error(&answer, 429, NULL, "queue_full");
        int seconds = 0; // 1 on an idle machine
        ck_assert_int_eq(sscanf(strstr(answer.head, "Retry-After: "), "Retry-After: %d", &seconds), 1);
        ck_assert(seconds >= 1 && seconds <= 10);
        answer_free(&answer);
    }
    for (int i = 0; i < 3; i++) {
        client_read(clients[i], &answer, false);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        close(clients[i]);
    }
    expect_ok("/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}"); // room again
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Refused at once, and with a time after which there is room indeed.
START_TEST(retry_after_is_true) {
    static const char *const options[] = {"--rows", "2", "--queue-requests", "1", NULL};
    int clients[3];
    answer answer;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    for (int i = 0; i < 3; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":500}");
    }
    wanted_active = 3;
    wait_for(enough_active, "two run and one waits");
    sleep_ms(300); // until a step's time is known
    long longest = 0;
    int seconds = 0, first = 0;
    for (int i = 0; i < 20; i++) {
        const long began = now_ms();
        fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}", &answer);
        const long taken = now_ms() - began;
        longest = taken > longest ? taken : longest;
        expect_error(&answer, 429, NULL, "queue_full");
        ck_assert_int_eq(sscanf(strstr(answer.head, "Retry-After: "), "Retry-After: %d", &seconds), 1);
        answer_free(&answer);
        if (i == 0)
            first = seconds;
        ck_assert_int_ge(seconds + 1, first); // a pace that was slow at first is forgotten
    }
    // Bounds for a machine that does other things too; an idle one answers in a millisecond and says 3 seconds.
    ck_assert_msg(longest < 2000, "%ld ms", longest);
    ck_assert_msg(first >= 2 && first <= 10, "%d s for 2.5 s of work", first);
    ck_assert_int_gt(seconds, first); // the others after it
    sleep_ms(first * 1000);
    for (int tries = 0; tries < 20; tries++) { // the estimate was made at the pace of then
        fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}", &answer);
        const int status = answer.status;
        answer_free(&answer);
        if (status == 200)
            break;
        ck_assert_int_eq(status, 429);
        ck_assert_int_lt(tries, 19);
        sleep_ms(500);
    }
    for (int i = 0; i < 3; i++)
        close(clients[i]);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(waiting_tokens_are_bounded) {
    static const char *const options[] = {"--rows", "1", "--queue-tokens", "100", "--max-prompt-tokens", "90", NULL};
    char body[600], ids[256] = "[1";
    answer answer;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    for (int i = 1; i < 60; i++)
        strcat(ids, ",1");
    strcat(ids, "]");
    snprintf(body, sizeof body, "{\"prompt\":%s,\"max_tokens\":50}", ids);
    const int first = client_connect(&server), second = client_connect(&server);
    client_post(first, "/v1/completions", body);
    wanted_active = 1;
    wait_for(enough_active, "the first runs");
    while (atomic_load(&fake_engine()->tokens) == 0) // its prompt waits no more
        sleep_ms(5);
    client_post(second, "/v1/completions", body);
    wanted_active = 2;
    wait_for(enough_active, "the second waits");
    fixture_post(&server, "/v1/completions", body, &answer);
    expect_error(&answer, 429, NULL, "queue_full");
    answer_free(&answer);
    // What could never be admitted is no matter of waiting.
    snprintf(body, sizeof body, "{\"prompt\":[%s,%s]}", ids, ids);
    fixture_post(&server, "/v1/completions", body, &answer);
    expect_error(&answer, 400, "prompt", "prompt_too_long");
    answer_free(&answer);
    close(first);
    close(second);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(context_and_prompt_lengths) {
    static const char *const options[] = {"--model", "b=/models/short", "--max-prompt-tokens", "80", NULL};
    static const struct {
        const char *model;
        int ids, max_tokens, status;
        const char *code;
    } cases[] = {
        {"b", 63, 1, 200, NULL},
        {"b", 64, 0, 200, NULL},
        {"b", 64, 1, 400, "context_length_exceeded"},
        {"b", 1, 64, 400, "context_length_exceeded"},
        {"demo", 80, 100, 200, NULL},
        {"demo", 81, 1, 400, "prompt_too_long"},
    };
    fixture_start(&server, options);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int text = 0; text < 2; text++) {
            char body[1024], *at = body;
            answer answer;
            at += sprintf(at, "{\"model\":\"%s\",\"add_special_tokens\":false,\"max_tokens\":%d,\"prompt\":%s",
                          cases[i].model, cases[i].max_tokens, text ? "\"" : "[1");
            for (int k = text ? 0 : 1; k < cases[i].ids; k++)
                at += sprintf(at, text ? "x" : ",1");
            sprintf(at, text ? "\"}" : "]}");
            fixture_post(&server, "/v1/completions", body, &answer);
            if (cases[i].status == 200)
                ck_assert_msg(answer.status == 200, "%s", answer.body);
            else
                expect_error(&answer, 400, "prompt", cases[i].code);
            answer_free(&answer);
        }
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static void send_large(int client, size_t length) {
    char *data = malloc(length);
    ck_assert_ptr_nonnull(data);
    memset(data, ' ', length);
    send(client, data, length, MSG_NOSIGNAL); // the server may have closed
    free(data);
}

START_TEST(bodies_are_bounded) {
    static const char *const options[] = {"--max-body", "4K", "--body-memory", "6K", NULL};
    static const char head[] = "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n";
    char text[512];
    answer answer;

    fixture_start(&server, options);
    // At the bound, and one above it.
    for (int above = 0; above < 2; above++) {
        char *body = calloc(1, 4200);
        sprintf(body, "{\"prompt\":\"hi\"%*s}", 4096 + above - 15, "");
        ck_assert_uint_eq(strlen(body), 4096u + (unsigned)above);
        fixture_post(&server, "/tokenize", body, &answer);
        if (above)
            expect_error(&answer, 413, NULL, "body_too_large");
        else
            ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        free(body);
    }
    // Declared, with an offer to wait: refused before a byte of it.
    int client = client_connect(&server);
    snprintf(text, sizeof text, "%sContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n", head);
    client_puts(client, text);
    client_read(client, &answer, false);
    expect_error(&answer, 413, NULL, "body_too_large");
    answer_free(&answer);
    ck_assert(client_closed(client, 2000));
    close(client);
    // Chunked over the bound: read on for a while, answered at the end, connection kept.
    client = client_connect(&server);
    snprintf(text, sizeof text, "%sTransfer-Encoding: chunked\r\n\r\n1388\r\n", head);
    client_puts(client, text);
    send_large(client, 5000);
    client_puts(client, "\r\n0\r\n\r\n");
    client_read(client, &answer, false);
    expect_error(&answer, 413, NULL, "body_too_large");
    ck_assert(!answer.closed);
    answer_free(&answer);
    client_post(client, "/tokenize", "{\"prompt\":\"hi\"}");
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    close(client);
    // Without an end: told and cut off. In pieces: what is not read at the close would take the answer with it.
    client = client_connect(&server);
    snprintf(text, sizeof text, "%sTransfer-Encoding: chunked\r\n\r\nFFFFFFF\r\n", head);
    client_puts(client, text);
    for (int i = 0; i < 50 && recv(client, text, 1, MSG_PEEK | MSG_DONTWAIT) != 1; i++) {
        send_large(client, 4000);
        sleep_ms(10);
    }
    client_read(client, &answer, false);
    expect_error(&answer, 413, NULL, "body_too_large");
    answer_free(&answer);
    ck_assert(client_closed(client, 2000));
    close(client);
    // All bodies together.
    client = client_connect(&server);
    snprintf(text, sizeof text, "%sContent-Length: 4000\r\n\r\n{", head);
    client_puts(client, text);
    sleep_ms(100);
    const int second = client_connect(&server);
    client_puts(second, text);
    client_puts(second, "                                                                     ");
    send_large(second, 3930);
    client_read(second, &answer, false);
    expect_error(&answer, 429, NULL, "memory_full");
    answer_free(&answer);
    close(second);
    close(client);
    sleep_ms(50);
    expect_ok("/tokenize", "{\"prompt\":\"hi\"}");
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(headers_are_bounded) {
    static const char *const options[] = {"--max-headers", "2K", NULL};
    char *request = calloc(1, 100000);
    answer answer;

    fixture_start(&server, options);
    sprintf(request, "GET /health HTTP/1.1\r\nHost: t\r\nX-Long: %090000d\r\n\r\n", 1);
    const int client = client_connect(&server);
    send(client, request, strlen(request), MSG_NOSIGNAL);
    ck_assert(client_closed(client, 3000));
    close(client);
    // The bound itself: names, values and the path count.
    for (int over = 0; over <= 1; over++) {
        const int others = (int)strlen("/health"
                                       "Host: t\r\n"
                                       "X-Long: \r\n");
        const int last = client_connect(&server);
        sprintf(request, "GET /health HTTP/1.1\r\nHost: t\r\nX-Long: %0*d\r\n\r\n", 2048 - others + over, 1);
        client_puts(last, request);
        client_read(last, &answer, false);
        if (over)
            expect_error(&answer, 431, NULL, "headers_too_large");
        else
            ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        close(last);
    }
    fixture_get(&server, "/health", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    free(request);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(slow_requests_are_closed) {
    static const char *const options[] = {"--header-time", "0.5", "--body-time", "0.5", NULL};
    char text[1024] = "";

    fixture_start(&server, options);
    // A header byte by byte: each one restarts the library's clock, not ours.
    const int slow = client_connect(&server);
    static const char head[] = "GET /health HTTP/1.1\r\nX: ";
    bool closed = false;
    for (int i = 0; i < 60 && !closed; i++) {
        const char byte = i < (int)sizeof head - 1 ? head[i] : 'x';
        closed = send(slow, &byte, 1, MSG_NOSIGNAL) != 1 || client_closed(slow, 50);
    }
    ck_assert(closed);
    close(slow);
    // A connection that says nothing.
    const int silent = client_connect(&server);
    ck_assert(client_closed(silent, 3000));
    close(silent);
    // A body that stops: told why.
    const int body = client_connect(&server);
    client_puts(body, "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                      "Content-Length: 100\r\n\r\n{\"prompt\":");
    client_read_until(body, "body_timeout", text, sizeof text);
    ck_assert_ptr_nonnull(strstr(text, "HTTP/1.1 408 "));
    ck_assert(client_closed(body, 2000));
    close(body);
    // A kept-alive connection may rest longer than a header may take.
    const int idle = client_connect(&server);
    for (int i = 0; i < 2; i++) {
        answer answer;
        client_puts(idle, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
        client_read(idle, &answer, false);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        sleep_ms(900);
    }
    close(idle);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(long_generation_outlives_the_timeouts) {
    static const char *const options[] = {"--header-time", "0.5", "--body-time", "0.5", "--idle-time", "1", NULL};
    answer answer;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 100000);
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":25}", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(idle_connections_are_closed) {
    static const char *const options[] = {"--idle-time", "1", NULL};
    answer answer;

    fixture_start(&server, options);
    const int client = client_connect(&server);
    client_puts(client, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
    client_read(client, &answer, false);
    answer_free(&answer);
    ck_assert(!client_closed(client, 500));
    ck_assert(client_closed(client, 4000));
    close(client);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// At its limit the server must listen again as soon as a connection ends.
START_TEST(connection_limit_recovers) {
    static const char *const options[] = {"--connections", "10", NULL};
    int clients[10];
    answer answer;

    fixture_start(&server, options);
    sleep_ms(100); // the probes for readiness are gone
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 10; i++) {
            clients[i] = client_connect(&server);
            client_puts(clients[i], "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
            client_read(clients[i], &answer, false);
            ck_assert_int_eq(answer.status, 200);
            answer_free(&answer);
        }
        const int eleventh = client_connect(&server); // in the backlog
        client_puts(eleventh, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
        ck_assert(!client_closed(eleventh, 200));
        close(clients[round]);
        client_read(eleventh, &answer, false);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        close(eleventh);
        for (int i = 0; i < 10; i++)
            if (i != round)
                close(clients[i]);
        sleep_ms(50);
    }
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(ping_fills_silence) {
    static const char *const options[] = {"--ping", "0.1", NULL};
    char text[65536] = "";

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 400000);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":2,\"stream\":true}");
    client_read_until(client, "[DONE]\n\n", text, sizeof text);
    const char *ping = strstr(text, ": ping\n\n"), *data = strstr(text, "data: ");
    ck_assert(ping && data && ping < data); // the header came before the first token
    close(client);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static Suite *limits_suite(void) {
    Suite *suite = suite_create("limits");
    TCase *tests = tcase_create("limits");
    tcase_add_test(tests, full_queue_is_429);
    tcase_add_test(tests, retry_after_is_true);
    tcase_add_test(tests, waiting_tokens_are_bounded);
    tcase_add_test(tests, context_and_prompt_lengths);
    tcase_add_test(tests, bodies_are_bounded);
    tcase_add_test(tests, headers_are_bounded);
    tcase_add_test(tests, slow_requests_are_closed);
    tcase_add_test(tests, long_generation_outlives_the_timeouts);
    tcase_add_test(tests, idle_connections_are_closed);
    tcase_add_test(tests, connection_limit_recovers);
    tcase_add_test(tests, ping_fills_silence);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(limits_suite)

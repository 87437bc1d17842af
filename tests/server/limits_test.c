// SPDX-License-Identifier: Apache-2.0
// Every limit from both sides: queue, bodies, connections, times.
// The bounds are set so low that a test reaches them within seconds. A time that a client has for something is two
// seconds at least: a busy machine keeps the test's thread from it for a while.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;

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
    atomic_store(&fake_engine()->held, 1);
    for (int i = 0; i < 3; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60}");
    }
    wait_engine_active(3); // one runs and two wait
    for (int stream = 0; stream < 2; stream++) {
        fixture_post(&server, "/v1/completions", stream ? "{\"prompt\":\"hi\",\"stream\":true}" : "{\"prompt\":\"hi\"}",
                     &answer);
        expect_error(&answer, 429, NULL, "queue_full");
        int seconds = 0;
        ck_assert_int_eq(sscanf(strstr(answer.head, "Retry-After: "), "Retry-After: %d", &seconds), 1);
        ck_assert_int_ge(seconds, 1);
        answer_free(&answer);
    }
    atomic_store(&fake_engine()->held, 0);
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

static int status_of_one_more(void) {
    answer answer;
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}", &answer);
    const int status = answer.status;
    answer_free(&answer);
    return status;
}

static bool has_room(void) {
    const int status = status_of_one_more();
    ck_assert(status == 200 || status == 429);
    return status == 200;
}

// Refused without a step, and with a time before which there is no room. Steps take five milliseconds, or longer on a
// busy machine: a time may be too long, for there the steps were slow, but not shorter than the work that is left.
START_TEST(retry_after_is_true) {
    static const char *const options[] = {"--rows", "2", "--queue-requests", "1", NULL};
    int clients[3];
    double last = 0;
    answer answer;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    for (int i = 0; i < 2; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":500}");
    }
    wait_engine_tokens(6);
    atomic_store(&fake_engine()->held, 1);
    const double left = (500 - atomic_load(&fake_engine()->tokens) - 2) * 0.005; // of either: a step may go on
    clients[2] = client_connect(&server);
    client_post(clients[2], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":500}");
    wait_engine_active(3); // two run and one waits
    const double began = now_s();
    for (int i = 0; i < 20; i++) {
        int seconds = 0;
        fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}", &answer);
        expect_error(&answer, 429, NULL, "queue_full");
        ck_assert_int_eq(sscanf(strstr(answer.head, "Retry-After: "), "Retry-After: %d", &seconds), 1);
        answer_free(&answer);
        ck_assert_msg(seconds >= left, "%d s for %.1f s of work", seconds, left);
        last = now_s() + seconds > last ? now_s() + seconds : last;
    }
    ck_assert_double_ge(last - began, left + 19 * left / 2); // one after the other, in two rows
    atomic_store(&fake_engine()->stuck, 1);
    ck_assert_int_eq(status_of_one_more(), 429);
    atomic_store(&fake_engine()->stuck, 0);
    ck_assert_int_eq(status_of_one_more(), 429);
    atomic_store(&fake_engine()->held, 0);
    wait_for(has_room, "there is room");
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
    snprintf(body, sizeof body, "{\"prompt\":%s,\"max_tokens\":60000}", ids);
    const int first = client_connect(&server), second = client_connect(&server);
    client_post(first, "/v1/completions", body);
    wait_engine_tokens(2); // its prompt waits no more
    client_post(second, "/v1/completions", body);
    wait_engine_active(2);
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

static bool body_is_awaited(void) {
    return metric(&server, "mesa_memory_bytes{model=\"\",what=\"bodies\"}") == 4000;
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
    ck_assert(client_closed(client));
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
    for (int i = 0; i < 5000 && recv(client, text, 1, MSG_PEEK | MSG_DONTWAIT) != 1; i++) {
        if (i < 50)
            send_large(client, 4000);
        sleep_ms(10);
    }
    client_read(client, &answer, false);
    expect_error(&answer, 413, NULL, "body_too_large");
    answer_free(&answer);
    ck_assert(client_closed(client));
    close(client);
    // All bodies together.
    client = client_connect(&server);
    snprintf(text, sizeof text, "%sContent-Length: 4000\r\n\r\n{", head);
    client_puts(client, text);
    wait_for(body_is_awaited, "the first has its memory");
    const int second = client_connect(&server);
    client_puts(second, text);
    client_puts(second, "                                                                     ");
    send_large(second, 3930);
    client_read(second, &answer, false);
    expect_error(&answer, 429, NULL, "memory_full");
    answer_free(&answer);
    close(second);
    close(client);
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
    ck_assert(client_closed(client));
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

static void ask_for_health(int client) {
    answer answer;

    client_puts(client, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
}

// A header byte by byte: each one restarts the library's clock, not ours.
static void drip_until_closed(int client) {
    static const char head[] = "GET /health HTTP/1.1\r\nX: ";
    bool open = true;

    for (int i = 0; open; i++) {
        const char byte = i < (int)sizeof head - 1 ? head[i] : 'x';
        ck_assert_int_lt(i, 2000);
        open = send(client, &byte, 1, MSG_NOSIGNAL) == 1 && client_open(client, 50);
    }
}

START_TEST(slow_requests_are_closed) {
    static const char *const options[] = {"--header-time", "2", "--body-time", "2", NULL};
    char text[1024] = "";

    fixture_start(&server, options);
    const int silent = client_connect(&server), body = client_connect(&server), idle = client_connect(&server);
    client_puts(body, "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                      "Content-Length: 100\r\n\r\n{\"prompt\":");
    ask_for_health(idle);
    const int slow = client_connect(&server);
    drip_until_closed(slow); // and so it is later than their times
    ck_assert(client_closed(silent));
    client_read_until(body, "body_timeout", text, sizeof text); // told why
    ck_assert_ptr_nonnull(strstr(text, "HTTP/1.1 408 "));
    ck_assert(client_closed(body));
    ask_for_health(idle); // a kept-alive connection may rest longer than a header may take
    close(slow);
    close(silent);
    close(body);
    close(idle);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(long_generation_outlives_the_timeouts) {
    static const char *const options[] = {"--header-time", "2", "--body-time", "2", "--idle-time", "2", NULL};
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

    fixture_start(&server, options);
    const int client = client_connect(&server);
    const double asked = now_s(); // before it became idle
    ask_for_health(client);
    ck_assert(client_closed(client));
    ck_assert_double_ge(now_s() - asked, 0.99);
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
        ck_assert(client_open(eleventh, 200));
        close(clients[round]);
        client_read(eleventh, &answer, false);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        close(eleventh);
        for (int i = 0; i < 10; i++)
            if (i != round)
                close(clients[i]);
    }
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(ping_fills_silence) {
    static const char *const options[] = {"--ping", "0.1", NULL};
    char text[65536] = "";

    fixture_start(&server, options);
    atomic_store(&fake_engine()->stuck, 1);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":2,\"stream\":true}");
    client_read_until(client, ": ping\n\n", text, sizeof text);
    atomic_store(&fake_engine()->stuck, 0);
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

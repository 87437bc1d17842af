// SPDX-License-Identifier: Apache-2.0
// Streams: framing, equality with the plain answer, and what happens when the client leaves, stalls or fails.
// What a stream's pieces add up to is compared with the plain answer of the same seed.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;

static void setup(void) {
    fixture_start(&server, NULL);
}

static void teardown(void) {
    ck_assert_int_eq(fixture_stop(&server), 0);
}

static char *plain_text(const char *body, unsigned index) {
    answer answer;
    fixture_post(&server, "/v1/completions", body, &answer);
    ck_assert_msg(answer.status == 200, "%s", answer.body);
    json_t *json = answer_json(&answer);
    json_t *choice = json_array_get(json_object_get(json, "choices"), index);
    char *text = strdup(json_string_value(json_object_get(choice, "text")));
    json_decref(json);
    answer_free(&answer);
    return text;
}

static void stream_of(const char *body, answer *answer, sse *sse) {
    fixture_post(&server, "/v1/completions", body, answer);
    ck_assert_msg(answer->status == 200, "%s", answer->body);
    ck_assert(answer->chunked);
    sse_parse(answer, sse);
    ck_assert(sse->done);
}

START_TEST(stream_equals_plain) {
    static const char *const fields[] = {
        "\"seed\":1,\"max_tokens\":1",
        "\"seed\":1,\"max_tokens\":0",
        "\"seed\":1,\"max_tokens\":200",
        "\"seed\":2,\"max_tokens\":400,\"stop\":[\"a\"]",
        "\"seed\":2,\"max_tokens\":50,\"stop\":[\"zzzzzzzz\",\"yyyyyyyyy\"]",
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        char body[256];
        answer answer;
        sse sse;
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",%s}", fields[i]);
        char *plain = plain_text(body, 0);
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"stream\":true,%s}", fields[i]);
        stream_of(body, &answer, &sse);
        char *streamed = sse_text(&sse, 0);
        ck_assert_str_eq(streamed, plain);
        free(plain);
        free(streamed);
        sse_free(&sse);
        answer_free(&answer);
    }
}
END_TEST

START_TEST(framing) {
    answer answer;
    sse sse;
    const char *id = NULL;
    long long created = 0;

    stream_of(
        "{\"prompt\":\"hi\",\"max_tokens\":5,\"seed\":9,\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
        &answer, &sse);
    ck_assert(answer_has(&answer, "Cache-Control: no-cache"));
    ck_assert(answer_has(&answer, "X-Accel-Buffering: no"));
    const size_t count = json_array_size(sse.events);
    ck_assert_uint_eq(count, 6);
    for (size_t i = 0; i < count; i++) {
        json_t *event = json_array_get(sse.events, i), *choices = json_object_get(event, "choices");
        const char *found = json_string_value(json_object_get(event, "id"));
        ck_assert_str_eq(id ? id : found, found);
        id = found;
        const long long at = json_integer_value(json_object_get(event, "created"));
        ck_assert(created == 0 || created == at);
        created = at;
        ck_assert_str_eq(json_string_value(json_object_get(event, "object")), "text_completion");
        ck_assert_str_eq(json_string_value(json_object_get(event, "model")), "demo");
        if (i == count - 1) {
            ck_assert_uint_eq(json_array_size(choices), 0);
            json_t *usage = json_object_get(event, "usage");
            ck_assert_int_eq(json_integer_value(json_object_get(usage, "prompt_tokens")), 3);
            ck_assert_int_eq(json_integer_value(json_object_get(usage, "completion_tokens")), 5);
            ck_assert(json_is_object(json_object_get(usage, "compute")));
            continue;
        }
        ck_assert(json_is_null(json_object_get(event, "usage")));
        json_t *reason = json_object_get(json_array_get(choices, 0), "finish_reason");
        if (i == count - 2)
            ck_assert_str_eq(json_string_value(reason), "length");
        else
            ck_assert(json_is_null(reason));
        ck_assert(i > 0 || json_integer_value(json_object_get(event, "seed")) == 9);
    }
    sse_free(&sse);
    answer_free(&answer);

    stream_of("{\"prompt\":\"hi\",\"max_tokens\":2,\"stream\":true}", &answer, &sse);
    ck_assert_uint_eq(json_array_size(sse.events), 2);
    ck_assert_ptr_null(json_object_get(json_array_get(sse.events, 0), "usage"));
    sse_free(&sse);
    answer_free(&answer);
}
END_TEST

START_TEST(continuous_usage) {
    answer answer;
    sse sse;

    stream_of("{\"prompt\":\"hi\",\"max_tokens\":4,\"stream\":true,"
              "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}}",
              &answer, &sse);
    ck_assert_uint_eq(json_array_size(sse.events), 5);
    for (size_t i = 0; i < 5; i++) {
        json_t *usage = json_object_get(json_array_get(sse.events, i), "usage");
        ck_assert_int_eq(json_integer_value(json_object_get(usage, "completion_tokens")),
                         (json_int_t)(i < 4 ? i + 1 : 4));
    }
    sse_free(&sse);
    answer_free(&answer);
}
END_TEST

START_TEST(several_choices) {
    answer answer;
    sse sse;
    int finishes[4] = {0};
    size_t i;
    json_t *event;

    stream_of("{\"prompt\":[\"hi\",\"ho\"],\"n\":2,\"seed\":4,\"max_tokens\":20,\"stream\":true}", &answer, &sse);
    json_array_foreach(sse.events, i, event) {
        json_t *choice = json_array_get(json_object_get(event, "choices"), 0);
        const long long index = json_integer_value(json_object_get(choice, "index"));
        ck_assert(index >= 0 && index < 4);
        finishes[index] += !json_is_null(json_object_get(choice, "finish_reason"));
    }
    for (unsigned k = 0; k < 4; k++) {
        ck_assert_int_eq(finishes[k], 1);
        char *streamed = sse_text(&sse, (int)k);
        char *plain = plain_text("{\"prompt\":[\"hi\",\"ho\"],\"n\":2,\"seed\":4,\"max_tokens\":20}", k);
        ck_assert_str_eq(streamed, plain);
        free(streamed);
        free(plain);
    }
    sse_free(&sse);
    answer_free(&answer);
}
END_TEST

START_TEST(http_1_0_gets_no_chunks) {
    static const char body[] = "{\"prompt\":\"hi\",\"max_tokens\":5,\"seed\":1,\"stream\":true}";
    char request[512];
    answer answer;
    sse sse;
    const int client = client_connect(&server);

    snprintf(request, sizeof request,
             "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
             strlen(body), body);
    client_puts(client, request);
    client_read(client, &answer, false);
    ck_assert(!answer.chunked && answer.closed);
    sse_parse(&answer, &sse);
    ck_assert(sse.done);
    char *streamed = sse_text(&sse, 0), *plain = plain_text("{\"prompt\":\"hi\",\"max_tokens\":5,\"seed\":1}", 0);
    ck_assert_str_eq(streamed, plain);
    free(streamed);
    free(plain);
    sse_free(&sse);
    answer_free(&answer);
    close(client);
}
END_TEST

START_TEST(keep_alive_after_a_stream) {
    const int client = client_connect(&server);

    for (int i = 0; i < 5; i++) {
        answer answer;
        client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":3,\"stream\":true}");
        client_read(client, &answer, false);
        ck_assert_int_eq(answer.status, 200);
        ck_assert(!answer.closed);
        answer_free(&answer);
    }
    close(client);
}
END_TEST

START_TEST(late_fault_is_an_event) {
    answer answer;
    sse sse;

    atomic_store(&fake_engine()->numeric_at, 4);
    stream_of("{\"prompt\":\"hi\",\"max_tokens\":20,\"seed\":1,\"stream\":true}", &answer, &sse);
    const size_t count = json_array_size(sse.events);
    ck_assert_uint_eq(count, 4);
    json_t *error = json_object_get(json_array_get(sse.events, count - 1), "error");
    ck_assert_str_eq(json_string_value(json_object_get(error, "code")), "numeric");
    char *text = sse_text(&sse, 0);
    ck_assert_uint_eq(strlen(text), 3); // what came before it is not lost
    free(text);
    sse_free(&sse);
    answer_free(&answer);
}
END_TEST

// ---- clients that leave --------------------------------------------------------------------------------------------

typedef enum leave { FIN, RESET, HALF_CLOSE } leave;

static void leave_by(int client, leave how) {
    if (how == HALF_CLOSE)
        shutdown(client, SHUT_WR);
    if (how == RESET) {
        const struct linger linger = {.l_onoff = 1};
        setsockopt(client, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    }
    if (how != HALF_CLOSE)
        close(client);
}

static int wanted_cancelled;
static bool all_cancelled(void) {
    return atomic_load(&fake_engine()->cancelled) >= wanted_cancelled;
}

// In prefill (a prompt of many chunks) and in decode, streamed and plain.
START_TEST(leaving_cancels) {
    char long_prompt[8192];

    memset(long_prompt, 'x', sizeof long_prompt);
    long_prompt[8000] = '\0';
    atomic_store(&fake_engine()->step_us, 2000);
    for (int prefill = 0; prefill < 2; prefill++)
        for (int stream = 0; stream < 2; stream++)
            for (int how = FIN; how <= HALF_CLOSE; how++) {
                char body[9000], text[16384] = "";
                const int before = atomic_load(&fake_engine()->cancelled);
                const int client = client_connect(&server);
                snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"max_tokens\":60000,\"stream\":%s}",
                         prefill ? long_prompt : "hi", stream ? "true" : "false");
                client_post(client, "/v1/completions", body);
                wait_engine_active(1);
                if (stream && !prefill)
                    for (int i = 0; i < 3; i++) {
                        text[0] = '\0';
                        client_read_until(client, "\n\n", text, sizeof text);
                    }
                else
                    sleep_ms(20);
                leave_by(client, (leave)how);
                wanted_cancelled = before + 1;
                wait_for(all_cancelled, "the engine is told");
                wait_engine_empty();
                if (how == HALF_CLOSE)
                    close(client);
            }
}
END_TEST

START_TEST(leaving_the_queue_cancels) {
    int clients[8];

    atomic_store(&fake_engine()->step_us, 2000);
    for (int i = 0; i < 8; i++) { // four run, four wait
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000}");
    }
    wait_engine_active(8);
    for (int i = 7; i >= 0; i--)
        close(clients[i]);
    wanted_cancelled = 8;
    wait_for(all_cancelled, "the engine is told");
    wait_engine_empty();
}
END_TEST

// The next request never gets a token of a cancelled one.
START_TEST(cancelled_tokens_reach_nobody) {
    char *expected = plain_text("{\"prompt\":\"hi\",\"max_tokens\":8,\"seed\":77}", 0);

    for (int i = 0; i < 100; i++) {
        char text[16384] = "";
        const int client = client_connect(&server);
        client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000,\"stream\":true}");
        client_read_until(client, "\n\n", text, sizeof text);
        close(client);
        char *next = plain_text("{\"prompt\":\"hi\",\"max_tokens\":8,\"seed\":77}", 0);
        ck_assert_str_eq(next, expected);
        free(next);
    }
    free(expected);
    wait_engine_empty();
}
END_TEST

// Whatever happens at the same moment - the last token, a cancel, a close, a pipelined request - nothing is lost or
// touched after its end. Meant for the sanitizers.
START_TEST(random_aborts) {
    unsigned state = 12345;

    for (int i = 0; i < 400; i++) {
        char body[160], text[64];
        state = state * 1103515245u + 12345u;
        const unsigned draw = state >> 8;
        const int client = client_connect(&server);
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"max_tokens\":%u,\"stream\":%s,\"n\":%u}", draw % 40,
                 draw & 64 ? "true" : "false", 1 + draw / 256 % 3);
        client_post(client, "/v1/completions", body);
        if (draw & 128)
            client_post(client, "/v1/completions", body);
        if (draw & 1024)
            recv(client, text, sizeof text, MSG_DONTWAIT);
        if (draw & 2048)
            recv(client, text, sizeof text, 0);
        if (draw & 4096) {
            leave_by(client, HALF_CLOSE);
            close(client);
        } else
            leave_by(client, draw & 512 ? RESET : FIN);
    }
    wait_engine_empty();
    answer answer;
    fixture_get(&server, "/health", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
}
END_TEST

// ---- clients that do not read --------------------------------------------------------------------------------------

static bool one_paused(void) {
    return atomic_load(&fake_engine()->paused) == 1;
}

// The system keeps little for it.
static int connect_slow_reader(void) {
    const int client = client_connect(&server), bytes = 65536;
    ck_assert_int_eq(setsockopt(client, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes), 0);
    return client;
}

START_TEST(slow_reader_is_paused_and_resumed) {
    answer answer;

    atomic_store(&fake_engine()->text_bytes, 1000);
    const int client = connect_slow_reader();
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20000,\"seed\":6,\"stream\":true}");
    // The system's buffers swallow some megabytes first, with a pause now and then.
    int made = -1, before;
    do {
        before = made;
        wait_for(one_paused, "the request is paused");
        made = atomic_load(&fake_engine()->tokens);
        sleep_ms(300);
    } while (made != before);
    ck_assert_int_lt(made, 20000); // nothing grows any more
    // Others are served meanwhile.
    char *other = plain_text("{\"prompt\":\"hi\",\"max_tokens\":8}", 0);
    ck_assert_uint_eq(strlen(other), 8000);
    free(other);
    client_read(client, &answer, false);
    sse sse;
    sse_parse(&answer, &sse);
    ck_assert(sse.done);
    char *text = sse_text(&sse, 0);
    ck_assert_uint_eq(strlen(text), 20000u * 1000u);
    free(text);
    sse_free(&sse);
    answer_free(&answer);
    close(client);
}
END_TEST

START_TEST(slow_reader_that_leaves) {
    atomic_store(&fake_engine()->text_bytes, 1000);
    for (int how = FIN; how <= HALF_CLOSE; how++) {
        const int client = connect_slow_reader();
        client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20000,\"stream\":true}");
        wait_for(one_paused, "the request is paused");
        leave_by(client, (leave)how);
        wait_engine_empty();
        if (how == HALF_CLOSE)
            close(client);
    }
}
END_TEST

static Suite *stream_suite(void) {
    Suite *suite = suite_create("stream");
    TCase *tests = tcase_create("stream");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, stream_equals_plain);
    tcase_add_test(tests, framing);
    tcase_add_test(tests, continuous_usage);
    tcase_add_test(tests, several_choices);
    tcase_add_test(tests, http_1_0_gets_no_chunks);
    tcase_add_test(tests, keep_alive_after_a_stream);
    tcase_add_test(tests, late_fault_is_an_event);
    tcase_add_test(tests, leaving_cancels);
    tcase_add_test(tests, leaving_the_queue_cancels);
    tcase_add_test(tests, cancelled_tokens_reach_nobody);
    tcase_add_test(tests, random_aborts);
    tcase_add_test(tests, slow_reader_is_paused_and_resumed);
    tcase_add_test(tests, slow_reader_that_leaves);
    tcase_set_timeout(tests, 120);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(stream_suite)

// SPDX-License-Identifier: Apache-2.0
// HTTP as the server speaks it: routes, statuses, framing, bodies, keep-alive, what smells of smuggling.
// Each case runs against a server of its own with the fake engine.
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

static const char *text_of(json_t *json, size_t index) {
    json_t *choice = json_array_get(json_object_get(json, "choices"), index);
    return json_string_value(json_object_get(choice, "text"));
}

static long integer_at(json_t *json, const char *object, const char *name) {
    return (long)json_integer_value(json_object_get(json_object_get(json, object), name));
}

static void post_expect(const char *body, int status, const char *param, const char *code) {
    answer answer;
    fixture_post(&server, "/v1/completions", body, &answer);
    expect_error(&answer, status, param, code);
    answer_free(&answer);
}

START_TEST(completion) {
    answer answer;
    char expected[32];

    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"seed\":3,\"max_tokens\":10}", &answer);
    ck_assert_int_eq(answer.status, 200);
    ck_assert(answer_has(&answer, "Content-Type: application/json"));
    json_t *json = answer_json(&answer);
    fake_engine_text(3, 0, 3, 10, expected);
    ck_assert_str_eq(text_of(json, 0), expected);
    ck_assert_int_eq(strncmp(json_string_value(json_object_get(json, "id")), "cmpl-", 5), 0);
    ck_assert_str_eq(json_string_value(json_object_get(json, "object")), "text_completion");
    ck_assert_str_eq(json_string_value(json_object_get(json, "model")), "demo");
    ck_assert_int_eq(json_integer_value(json_object_get(json, "seed")), 3);
    json_t *choice = json_array_get(json_object_get(json, "choices"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(choice, "finish_reason")), "length");
    ck_assert_int_eq(integer_at(json, "usage", "prompt_tokens"), 3);
    ck_assert_int_eq(integer_at(json, "usage", "completion_tokens"), 10);
    ck_assert_int_eq(integer_at(json, "usage", "total_tokens"), 13);
    json_t *compute = json_object_get(json_object_get(json, "usage"), "compute");
    ck_assert_double_eq(json_number_value(json_object_get(json_object_get(compute, "completion"), "cg_steps_mean")),
                        2.5);
    ck_assert_int_eq(integer_at(compute, "completion", "cg_steps_max"), 3);
    ck_assert_double_eq(json_number_value(json_object_get(json_object_get(compute, "prompt"), "cg_steps_mean")), 2);
    ck_assert(json_array_size(json_object_get(compute, "ignored")) == 0 && json_object_get(compute, "ignored"));
    json_decref(json);
    answer_free(&answer);
}
END_TEST

START_TEST(seed_is_drawn_and_returned) {
    answer first, again;
    char body[128];

    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\"}", &first);
    json_t *json = answer_json(&first);
    const long long seed = json_integer_value(json_object_get(json, "seed"));
    ck_assert(seed >= 0 && seed < 1ll << 53);
    snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"seed\":%lld}", seed);
    fixture_post(&server, "/v1/completions", body, &again);
    json_t *repeated = answer_json(&again);
    ck_assert_str_eq(text_of(json, 0), text_of(repeated, 0));
    json_decref(json);
    json_decref(repeated);
    answer_free(&first);
    answer_free(&again);
}
END_TEST

START_TEST(choices_come_in_order) {
    answer answer;
    char expected[32];

    fixture_post(&server, "/v1/completions", "{\"prompt\":[\"hi\",\"longer\"],\"n\":2,\"seed\":5,\"max_tokens\":6}",
                 &answer);
    ck_assert_int_eq(answer.status, 200);
    json_t *json = answer_json(&answer);
    ck_assert_uint_eq(json_array_size(json_object_get(json, "choices")), 4);
    for (unsigned i = 0; i < 4; i++) {
        json_t *choice = json_array_get(json_object_get(json, "choices"), i);
        ck_assert_int_eq(json_integer_value(json_object_get(choice, "index")), i);
        fake_engine_text(5, i % 2, i < 2 ? 3 : 7, 6, expected);
        ck_assert_str_eq(text_of(json, i), expected);
    }
    ck_assert_int_eq(integer_at(json, "usage", "prompt_tokens"), 10);
    ck_assert_int_eq(integer_at(json, "usage", "completion_tokens"), 24);
    json_decref(json);
    answer_free(&answer);

    fixture_post(&server, "/v1/completions", "{\"prompt\":[[1,2],[3]],\"max_tokens\":1}", &answer);
    json = answer_json(&answer);
    ck_assert_uint_eq(json_array_size(json_object_get(json, "choices")), 2);
    ck_assert_int_eq(integer_at(json, "usage", "prompt_tokens"), 3); // ids get no BOS
    json_decref(json);
    answer_free(&answer);
}
END_TEST

START_TEST(prompt_borders) {
    answer answer;

    fixture_post(&server, "/v1/completions", "{\"max_tokens\":0}", &answer);
    ck_assert_int_eq(answer.status, 200);
    json_t *json = answer_json(&answer);
    ck_assert_str_eq(text_of(json, 0), "");
    ck_assert_int_eq(integer_at(json, "usage", "prompt_tokens"), 1);
    ck_assert_int_eq(integer_at(json, "usage", "completion_tokens"), 0);
    json_decref(json);
    answer_free(&answer);
    post_expect("{\"prompt\":\"\",\"add_special_tokens\":false}", 400, "prompt", NULL);
    post_expect("{\"prompt\":[259]}", 400, "prompt", "out_of_range");
    post_expect("{\"prompt\":[[1],[400]],\"stream\":true}", 400, "prompt", NULL);
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"ab\\u0000cd\",\"max_tokens\":0}", &answer);
    json = answer_json(&answer);
    ck_assert_int_eq(integer_at(json, "usage", "prompt_tokens"), 6);
    json_decref(json);
    answer_free(&answer);
}
END_TEST

START_TEST(refusals_say_what_there_is) {
    static const struct {
        const char *path, *body, *words;
    } cases[] = {{"/v1/completions", "", "the body is empty; it must be a JSON object"},
                 {"/v1/completions", "\"hi\"", "the body must be a JSON object"},
                 {"/v1/completions", "{\"model\":\"gpt\"}", "there is no such model; GET /v1/models lists them"},
                 {"/v1/completions", "{\"model\":\"g\\u0000\"}", "there is no such model; GET /v1/models lists them"},
                 {"/completion", "{\"prompt\":\"hi\"}", "there is no such path; GET / and GET /openapi.json tell"}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        answer answer;
        fixture_post(&server, cases[i].path, cases[i].body, &answer);
        ck_assert_msg(strstr(answer.body, cases[i].words), "%s %s: %s", cases[i].path, cases[i].body, answer.body);
        answer_free(&answer);
    }
}
END_TEST

START_TEST(errors_are_named) {
    answer answer;

    post_expect("{\"prompt\":\"a\xff\"}", 400, NULL, "invalid_json");
    post_expect("{\"prompt\":\"\\ud83d\",\"stream\":true}", 400, NULL, "invalid_json");
    post_expect("", 400, NULL, "invalid_json");
    post_expect("{\"temperature\":1e308}", 400, "temperature", "out_of_range");
    post_expect("{\"suffix\":\"x\"}", 400, "suffix", "not_supported");
    post_expect("{\"stop_token_ids\":[259]}", 400, "stop_token_ids", "out_of_range");
    post_expect("{\"logit_bias\":{\"99999999\":5}}", 400, "logit_bias", "out_of_range");
    post_expect("{\"model\":\"other\"}", 404, "model", "model_not_found");
    post_expect("{\"model\":\"other\",\"stream\":true}", 404, "model", "model_not_found");
    fixture_get(&server, "/v1/models/other", &answer);
    expect_error(&answer, 404, "model", "model_not_found");
    answer_free(&answer);
    for (int i = 0; i < 20; i++) {
        fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}", &answer);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
    }
}
END_TEST

START_TEST(knobs_reach_the_engine) {
    answer answer;

    fixture_post(&server, "/v1/completions",
                 "{\"prompt\":\"hi\",\"max_tokens\":1,\"cg_mode\":\"steps\",\"cg_max_steps\":7,\"max_loops\":2,"
                 "\"on_unconverged\":\"error\"}",
                 &answer);
    ck_assert_int_eq(answer.status, 200);
    ck_assert_int_eq(atomic_load(&fake_engine()->last_cg_mode), ENG_CG_STEPS);
    ck_assert_int_eq(atomic_load(&fake_engine()->last_cg_max_steps), 7);
    ck_assert_int_eq(atomic_load(&fake_engine()->last_fail_unconverged), 1);
    json_t *json = answer_json(&answer);
    json_t *ignored = json_object_get(json_object_get(json_object_get(json, "usage"), "compute"), "ignored");
    ck_assert_uint_eq(json_array_size(ignored), 1); // this model has no loops
    ck_assert_str_eq(json_string_value(json_array_get(ignored, 0)), "max_loops");
    json_decref(json);
    answer_free(&answer);
}
END_TEST

START_TEST(engine_faults_have_statuses) {
    answer answer;

    atomic_store(&fake_engine()->unconverged_at, 1);
    post_expect("{\"prompt\":\"hi\",\"on_unconverged\":\"error\"}", 422, "on_unconverged", "unconverged");
    post_expect("{\"prompt\":\"hi\",\"on_unconverged\":\"error\",\"stream\":true}", 422, "on_unconverged", NULL);
    atomic_store(&fake_engine()->numeric_at, 3);
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\"}", &answer);
    expect_error(&answer, 500, NULL, "numeric");
    ck_assert(answer_has(&answer, "X-Should-Retry: false"));
    answer_free(&answer);
}
END_TEST

START_TEST(models_and_tokens) {
    answer answer;

    fixture_get(&server, "/v1/models", &answer);
    json_t *json = answer_json(&answer), *model = json_array_get(json_object_get(json, "data"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(model, "id")), "demo");
    ck_assert_int_eq(integer_at(model, "meta", "parameters"), 5123456);
    ck_assert_int_eq(integer_at(model, "meta", "prefix_audit"), 256);
    ck_assert(json_is_false(json_object_get(json_object_get(model, "meta"), "fast")));
    ck_assert(json_is_null(json_object_get(json_object_get(model, "meta"), "context_length")));
    json_decref(json);
    answer_free(&answer);
    fixture_get(&server, "/v1/models/demo", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    fixture_post(&server, "/tokenize", "{\"prompt\":\"hi\"}", &answer);
    ck_assert_str_eq(answer.body, "{\"count\":3,\"max_model_len\":null,\"tokens\":[256,104,105]}");
    answer_free(&answer);
    fixture_post(&server, "/tokenize", "{\"prompt\":\"hi\",\"add_special_tokens\":false}", &answer);
    ck_assert_str_eq(answer.body, "{\"count\":2,\"max_model_len\":null,\"tokens\":[104,105]}");
    answer_free(&answer);
    fixture_post(&server, "/detokenize", "{\"tokens\":[104,34,10]}", &answer);
    ck_assert_str_eq(answer.body, "{\"prompt\":\"h\\\"\\n\"}");
    answer_free(&answer);
    fixture_post(&server, "/detokenize", "{\"tokens\":[259]}", &answer);
    expect_error(&answer, 400, "tokens", NULL);
    answer_free(&answer);
}
END_TEST

START_TEST(wrong_ids_are_told) {
    static const struct {
        const char *path, *body, *words;
    } cases[] = {
        {"/detokenize", "{\"tokens\":[1,259]}", "token id 259 (at index 1) "},
        {"/detokenize", "{\"tokens\":[1,-5]}", "token id -5 (at index 1) "},
        {"/detokenize", "{\"tokens\":[1.5]}", "tokens must be a list of token ids\""},
        {"/v1/completions", "{\"prompt\":[1,2,300]}", "token id 300 (at index 2) "},
        {"/v1/completions", "{\"prompt\":[[1],[9999999999]]}", "token id 9999999999 (at index 0) "},
        {"/v1/completions", "{\"stop_token_ids\":[1,300]}", "token id 300 (at index 1) "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        answer answer;
        fixture_post(&server, cases[i].path, cases[i].body, &answer);
        ck_assert_int_eq(answer.status, 400);
        ck_assert_msg(strstr(answer.body, cases[i].words), "%s: %s", cases[i].body, answer.body);
        answer_free(&answer);
    }
}
END_TEST

// One raw request on a connection of its own; the answer's status, 0 if the connection just closed. *closed, where it
// is asked for: it closed after the answer.
static int raw_status(const char *request, bool *closed) {
    const int client = client_connect(&server);
    char text[4096] = "";
    int status = 0;

    client_puts(client, request);
    ssize_t got = recv(client, text, sizeof text - 1, 0);
    if (got > 0)
        sscanf(text, "HTTP/1.%*d %d", &status);
    if (closed)
        *closed = client_closed(client);
    close(client);
    return status;
}

START_TEST(routes_and_methods) {
    static const struct {
        const char *line;
        int status;
        const char *allow;
    } cases[] = {
        {"GET /v1/completions", 405, "Allow: POST\r"},
        {"HEAD /v1/completions", 405, "Allow: POST\r"},
        {"PUT /v1/completions", 405, "Allow: POST\r"},
        {"OPTIONS /v1/completions", 405, "Allow: POST\r"},
        {"DELETE /health", 405, "Allow: GET, HEAD\r"},
        {"GET /", 200, NULL},
        {"POST /", 405, "Allow: GET, HEAD\r"},
        {"GET /metrics/", 404, NULL},
        {"GET /health%00", 404, NULL},
        {"GET /health%00/x", 404, NULL},
        {"GET /health?x=%00", 200, NULL},
        {"PUT /metrics", 405, "Allow: GET, HEAD\r"},
        {"GET //v1/completions", 404, NULL},
        {"GET /v1/completions/", 404, NULL},
        {"GET /V1/models", 404, NULL},
        {"GET /v1/models/", 404, NULL},
        {"GET /v1/models/demo", 200, NULL},
        {"GET /health?x=1", 200, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char request[256];
        answer answer;
        const int client = client_connect(&server);
        snprintf(request, sizeof request, "%s HTTP/1.1\r\nHost: test\r\n\r\n", cases[i].line);
        // Twice: a refusal without a body keeps the connection.
        for (int k = 0; k < 2; k++) {
            client_puts(client, request);
            client_read(client, &answer, strncmp(cases[i].line, "HEAD", 4) == 0);
            ck_assert_msg(answer.status == cases[i].status, "%s: %d", cases[i].line, answer.status);
            ck_assert_msg(!cases[i].allow || answer_has(&answer, cases[i].allow), "%s", answer.head);
            answer_free(&answer);
        }
        close(client);
    }
}
END_TEST

START_TEST(head_of_known_size) {
    const int client = client_connect(&server);
    answer answer;

    for (int i = 0; i < 2; i++) {
        client_puts(client, "HEAD /health HTTP/1.1\r\nHost: test\r\n\r\n");
        client_read(client, &answer, true);
        ck_assert_int_eq(answer.status, 200);
        ck_assert(answer_has(&answer, "Content-Length: "));
        answer_free(&answer);
    }
    close(client);
}
END_TEST

START_TEST(media_types) {
    static const struct {
        const char *headers;
        int status;
    } cases[] = {
        {"Content-Type: text/plain\r\n", 415},
        {"Content-Type: application/json; charset=utf-16\r\n", 415},
        {"Content-Type: application/jsonx\r\n", 415},
        {"Content-Type: application/json\r\nContent-Encoding: gzip\r\n", 415},
        {"Content-Type: application/x-www-form-urlencoded\r\nOrigin: http://evil\r\n", 415},
        {"Origin: http://evil\r\n", 415},
        {"Content-Type: application/json; charset=UTF-8\r\nOrigin: http://app\r\n", 200},
        {"Content-Type: application/x-www-form-urlencoded\r\n", 200},
        {"", 200},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char request[512];
        snprintf(request, sizeof request,
                 "POST /tokenize HTTP/1.1\r\nHost: test\r\n%sContent-Length: 15\r\n\r\n{\"prompt\":\"hi\"}",
                 cases[i].headers);
        ck_assert_msg(raw_status(request, NULL) == cases[i].status, "%s", cases[i].headers);
    }
}
END_TEST

// Whatever hides a second request in a body: one 400, then the end of the connection.
START_TEST(smuggling) {
    static const char *const heads[] = {
        "Host: t\r\nContent-Length: 15\r\nContent-Length: 0\r\n",
        "Host: t\r\nContent-Length: 15\r\nContent-Length: 15\r\n",
        "Host: t\r\nContent-Length: 15\r\nTransfer-Encoding: chunked\r\n",
        "Host: t\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Host: t\r\nTransfer-Encoding: gzip\r\n",
        "Host: t\r\nTransfer-Encoding : chunked\r\nContent-Length: 15\r\n",
        "Host: t\r\nContent-Length: +15\r\n",
        "Host: t\r\nContent-Length: -1\r\n",
        "Host: t\r\nContent-Length: 1 5\r\n",
        "Host: t\r\nContent-Length: 99999999999999999999\r\n",
        "Host: t\r\nContent-Length: 1\r\n 5\r\n", // folded
        "Host: t\r\nContent-Length:\r\n\t15\r\nContent-Length: 15\r\n",
        "Host: t\r\nTransfer-Encoding:\r\n chunked\r\nContent-Length: 15\r\n",
        "Host: t\r\nX: y\rContent-Length: 15\r\n",
        "Host: t\r\nX: y\rTransfer-Encoding: chunked\r\nContent-Length: 15\r\n",
        "Host: t\r\nX: \x7f\r\nContent-Length: 15\r\n",
        "Host: t\r\nContent-Length: 9223372036854775807\r\n",
        "Host: t\r\nContent-Length: 9223372036854775808\r\n",
        "Content-Length: 15\r\n",
        "Host: t\r\nHost: u\r\nContent-Length: 15\r\n",
    };
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        char request[1024];
        bool closed;
        snprintf(request, sizeof request,
                 "POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n%s\r\n{\"prompt\":\"hi\"}"
                 "GET /v1/models/smuggled HTTP/1.1\r\nHost: t\r\n\r\n",
                 heads[i]);
        const int status = raw_status(request, &closed);
        ck_assert_msg(status == 400 || status == 413, "%d: %s", status, heads[i]);
        ck_assert_msg(closed, "still open: %s", heads[i]);
    }
    char *log = fixture_log(&server);
    ck_assert_ptr_null(strstr(log, "/v1/models/"));
    free(log);
}
END_TEST

static void read_tokens(int client) {
    answer answer;
    client_read(client, &answer, false);
    ck_assert_msg(answer.status == 200, "%s %s", answer.head, answer.body);
    ck_assert_str_eq(answer.body, "{\"count\":3,\"max_model_len\":null,\"tokens\":[256,104,105]}");
    answer_free(&answer);
}

START_TEST(chunked_bodies) {
    static const char head[] = "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                               "Transfer-Encoding: chunked\r\n\r\n";
    static const char body[] = "{\"prompt\":\"hi\"}";
    const int client = client_connect(&server);
    char bad[512];

    client_puts(client, head);
    client_puts(client, "f\r\n{\"prompt\":\"hi\"}\r\n0\r\n\r\n");
    read_tokens(client);
    client_puts(client, head);
    for (const char *at = body; *at; at++) { // one byte a chunk, with an extension
        char chunk[16];
        snprintf(chunk, sizeof chunk, "1;x=y\r\n%c\r\n", *at);
        client_puts(client, chunk);
    }
    client_puts(client, "0\r\nX-Trailer: 1\r\n\r\n");
    read_tokens(client);
    close(client);
    snprintf(bad, sizeof bad, "%szz\r\n{}\r\n0\r\n\r\n", head);
    ck_assert_int_eq(raw_status(bad, NULL), 400);
    // A size that no body reaches is a body that does not end: the time for bodies bounds it.
    const int endless = client_connect(&server);
    client_puts(endless, head);
    client_puts(endless, "FFFFFFFFFFFFFFFF\r\n{}\r\n0\r\n\r\n");
    ck_assert(client_open(endless, 200));
    close(endless);
}
END_TEST

START_TEST(keep_alive_and_pipelining) {
    static const char one[] = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                              "Content-Length: 27\r\n\r\n{\"seed\":%d,\"max_tokens\":  4}";
    char requests[4096] = "", expected[8];
    const int client = client_connect(&server);

    for (int i = 1; i <= 5; i++) {
        char request[512];
        snprintf(request, sizeof request, one, i);
        strcat(requests, request);
    }
    client_puts(client, requests);
    for (int i = 1; i <= 5; i++) {
        answer answer;
        client_read(client, &answer, false);
        ck_assert_msg(answer.status == 200, "%s", answer.body);
        ck_assert(!answer.closed);
        json_t *json = answer_json(&answer);
        fake_engine_text((unsigned long long)i, 0, 1, 4, expected);
        ck_assert_str_eq(text_of(json, 0), expected);
        json_decref(json);
        answer_free(&answer);
    }
    close(client);
}
END_TEST

START_TEST(expect_continue) {
    const int client = client_connect(&server);
    char text[4096] = "";

    client_puts(client,
                "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
                "Content-Length: 15\r\n\r\n");
    client_read_until(client, "100 Continue\r\n\r\n", text, sizeof text);
    client_puts(client, "{\"prompt\":\"hi\"}");
    read_tokens(client);
    close(client);
    // A refusal comes instead of the invitation.
    bool closed;
    ck_assert_int_eq(
        raw_status("POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\nExpect: 100-continue\r\n"
                   "Content-Length: 15\r\n\r\n",
                   &closed),
        415);
    ck_assert(closed);
}
END_TEST

START_TEST(health_while_busy) {
    static const char *const paths[] = {"/health", "/health/ready", "/metrics", "/v1/models"};
    int clients[6];

    atomic_store(&fake_engine()->held, 1);
    for (int i = 0; i < 6; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000}");
    }
    wait_engine_active(6);
    atomic_store(&fake_engine()->stuck, 1); // what is asked for now waits for no step
    for (int i = 0; i < 20; i++) {
        answer answer;
        fixture_get(&server, paths[i % 4], &answer);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
    }
    atomic_store(&fake_engine()->stuck, 0);
    for (int i = 0; i < 6; i++)
        close(clients[i]);
    wait_engine_empty();
}
END_TEST

static Suite *http_suite(void) {
    Suite *suite = suite_create("http");
    TCase *tests = tcase_create("http");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, completion);
    tcase_add_test(tests, seed_is_drawn_and_returned);
    tcase_add_test(tests, choices_come_in_order);
    tcase_add_test(tests, prompt_borders);
    tcase_add_test(tests, errors_are_named);
    tcase_add_test(tests, refusals_say_what_there_is);
    tcase_add_test(tests, knobs_reach_the_engine);
    tcase_add_test(tests, engine_faults_have_statuses);
    tcase_add_test(tests, models_and_tokens);
    tcase_add_test(tests, routes_and_methods);
    tcase_add_test(tests, head_of_known_size);
    tcase_add_test(tests, wrong_ids_are_told);
    tcase_add_test(tests, media_types);
    tcase_add_test(tests, smuggling);
    tcase_add_test(tests, chunked_bodies);
    tcase_add_test(tests, keep_alive_and_pipelining);
    tcase_add_test(tests, expect_continue);
    tcase_add_test(tests, health_while_busy);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(http_suite)

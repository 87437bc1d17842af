// SPDX-License-Identifier: Apache-2.0
// Bodies that are wrong in every way there is: each gets a refusal of the client's fault that names the field, in valid
// JSON and UTF-8, without a byte of the body; the process goes on, and a fixed request gets its fixed answer.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

#define CANARY "QzCanary"

static fixture server;
static char *control; // the fixed answer's choices

static char *ask_control(void) {
    answer answer;
    fixture_post(&server, "/v1/completions",
                 "{\"prompt\":\"control\",\"seed\":11,\"max_tokens\":20,\"logprobs\":2,\"echo\":true,\"n\":2}",
                 &answer);
    ck_assert_msg(answer.status == 200, "%s", answer.body);
    json_t *json = answer_json(&answer);
    char *text = json_dumps(json_object_get(json, "choices"), JSON_SORT_KEYS);
    json_decref(json);
    answer_free(&answer);
    return text;
}

static void setup(void) {
    fixture_start(&server, NULL);
    control = ask_control();
}

static bool bodies_are_gone(void) {
    return metric(&server, "mesa_memory_bytes{model=\"\",what=\"bodies\"}") == 0;
}

static void teardown(void) {
    char *again = ask_control();
    ck_assert_str_eq(again, control);
    free(again);
    free(control);
    wait_engine_empty();
    wait_for(bodies_are_gone, "no memory is kept for bodies");
    ck_assert_int_eq(fixture_stop(&server), 0);
}

// One body to each path that takes one, plain and, for completions, as a stream would be asked for.
static void refuse(const char *path, const char *body, size_t length, const char *param) {
    char head[256];
    answer answer;
    const int client = client_connect(&server);

    snprintf(head, sizeof head,
             "POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", path,
             length);
    client_puts(client, head);
    client_send(client, body, length);
    client_read(client, &answer, false);
    close(client);
    ck_assert_msg(answer.status >= 400 && answer.status < 500, "%.60s: %d", body, answer.status);
    ck_assert(answer_has(&answer, "Content-Type: application/json\r"));
    json_t *json = answer_json(&answer), *error = json_object_get(json, "error"); // strict JSON, valid UTF-8
    ck_assert_msg(json_string_length(json_object_get(error, "message")) > 5, "%s", answer.body);
    ck_assert_msg(!strstr(answer.body, CANARY), "%s", answer.body);
    const char *named = json_string_value(json_object_get(error, "param"));
    if (param)
        ck_assert_msg(named && strcmp(named, param) == 0, "%.60s: param %s, want %s", body, named, param);
    json_decref(json);
    answer_free(&answer);
}

static void refuse_everywhere(const char *body, size_t length) {
    static const char *const paths[] = {"/v1/completions", "/tokenize", "/detokenize"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        refuse(paths[i], body, length, NULL);
}

START_TEST(what_is_no_json) {
    static const char *const bodies[] = {
        "",
        " ",
        "{",
        "}",
        "[]",
        "null",
        "1",
        "\"" CANARY "\"",
        "{}x",
        "{}{}",
        "{\"prompt\":\"a\",}",
        "{'prompt':'a'}",
        "{prompt:1}",
        "{/* */}",
        "{\"prompt\":\"a\nb\"}",
        "{\"prompt\":\"a\tb\"}",
        "\xef\xbb\xbf{}",
        "{\"prompt\":01}",
        "{\"prompt\":+1}",
        "{\"prompt\":.5}",
        "{\"prompt\":5.}",
        "{\"prompt\":NaN}",
        "{\"prompt\":-Infinity}",
        "{\"prompt\":1e999}",
        "{\"prompt\":1" CANARY "}",
        "{\"prompt\":\"" CANARY,
        "{\"" CANARY "\"}",
        "{\"prompt\":tru}",
        "{\"a\":1,\"a\":2}",
        "{\"x\":{\"b\":1,\"b\":1}}",
        "{\"\\u0000\":1}",
        "{\"" CANARY "\\u0000\":1}",
        "{\"seed\":18446744073709551615}",
        "{\"seed\":"
        "99999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999}"};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++)
        refuse_everywhere(bodies[i], strlen(bodies[i]));
    refuse_everywhere("{\"prompt\":\"a\0b\"}", 16);
    refuse_everywhere("{}\0", 3);
    refuse_everywhere("\xff\xfe{\0}\0", 6); // UTF-16
}
END_TEST

// Bytes that are not UTF-8, wherever a string may stand.
START_TEST(what_is_no_utf8) {
    static const char *const bytes[] = {"\xff",         "\xc0\xaf",     "\xc1\xbf",         "\xe0\x80\xaf",
                                        "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x80\x80\xaf", "\xf4\x90\x80\x80",
                                        "\xf8\x88\x80", "\x80",         "\xe2\x82",         "\xf0\x9f\x98",
                                        "\xc4\xe3\xba", "\xc2"}; // the last but one is GBK
    static const char *const forms[] = {"{\"prompt\":\"" CANARY "%s\"}",
                                        "{\"prompt\":[\"a\",\"%s" CANARY "\"]}",
                                        "{\"%s" CANARY "\":1}",
                                        "{\"model\":\"%s\"}",
                                        "{\"stop\":\"x%s\"}",
                                        "{\"user\":\"%s\"}",
                                        "{\"unknown\":{\"deep\":[\"%s\"]}}",
                                        "{\"logit_bias\":{\"%s\":1}}",
                                        "%sQzCanary",
                                        "{\"prompt\":\"a\"}%s"};
    char body[256];

    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        for (size_t k = 0; k < sizeof forms / sizeof *forms; k++) {
            const int length = snprintf(body, sizeof body, forms[k], bytes[i]);
            refuse("/v1/completions", body, (size_t)length, NULL);
        }
    static const char *const escapes[] = {"\\ud83d", "\\ude00", "\\ud83d\\u0041", "\\ud83dx", "\\uDFFF\\uD800"};
    for (size_t i = 0; i < sizeof escapes / sizeof *escapes; i++) {
        int length = snprintf(body, sizeof body, "{\"prompt\":\"x%sy\",\"stream\":true}", escapes[i]);
        refuse_everywhere(body, (size_t)length);
        length = snprintf(body, sizeof body, "{\"stop\":[\"a\",\"%s\"],\"stream\":true}", escapes[i]);
        refuse("/v1/completions", body, (size_t)length, NULL);
    }
}
END_TEST

// With a square of the depth the deepest would not be answered within a client's patience.
START_TEST(depth) {
    static const size_t depths[] = {100, 2040, 2047, 2048, 60000, 1000000};
    static const char *const forms[][3] = {{"{\"prompt\":", "[", "]"},           {"{\"prompt\":", "{\"a\":", "}"},
                                           {"{\"logit_bias\":", "{\"5\":", "}"}, {"{\"stop\":", "[", "]"},
                                           {"{\"stop_token_ids\":", "[", "]"},   {"{\"tokens\":", "[", "]"},
                                           {"{\"stream_options\":", "[", "]"}};

    for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
        for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
            const size_t open = strlen(forms[f][1]), count = depths[d];
            char *body = malloc(count * (open + 1) + 64), *at = body;
            at += sprintf(at, "%s", forms[f][0]);
            for (size_t i = 0; i < count; i++, at += open)
                memcpy(at, forms[f][1], open);
            *at++ = '1';
            memset(at, forms[f][2][0], count + 1);
            at += count;
            *at++ = '}';
            refuse(f == 5 ? "/detokenize" : "/v1/completions", body, (size_t)(at - body), NULL);
            free(body);
        }
}
END_TEST

// Every number at, and just beyond, what it may be: the field is named.
START_TEST(numbers) {
    static const char *const integers[] = {"max_tokens", "min_tokens",   "n",         "best_of", "logprobs", "top_k",
                                           "seed",       "cg_max_steps", "max_loops", "priority"};
    static const char *const numbers[] = {
        "temperature",        "top_p",        "min_p",         "presence_penalty", "frequency_penalty",
        "repetition_penalty", "cg_tolerance", "exit_threshold"};
    static const char *const never[] = {"\"1\"", "true", "[]", "{}", "[1]", "\"NaN\"", "\"" CANARY "\""};
    static const char *const no_integers[] = {"0.5", "1.5", "1e308", "-1e308", "1e-999999", "2e-9"};
    static const char *const no_numbers[] = {"1e308", "-1e308", "1e39", "-1e39", "1e9", "-3"};
    char body[128];

    for (size_t k = 0; k < sizeof integers / sizeof *integers + sizeof numbers / sizeof *numbers; k++) {
        const bool integer = k < sizeof integers / sizeof *integers;
        const char *name = integer ? integers[k] : numbers[k - sizeof integers / sizeof *integers];
        for (size_t i = 0; i < sizeof never / sizeof *never; i++) {
            const int length = snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":%s}", name, never[i]);
            refuse("/v1/completions", body, (size_t)length, name);
        }
        for (size_t i = 0; i < 6; i++) {
            const char *value = integer ? no_integers[i] : no_numbers[i];
            const int length = snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":%s}", name, value);
            if (strcmp(value, "1e-999999") != 0) // which is 0.0
                refuse("/v1/completions", body, (size_t)length, name);
        }
    }
}
END_TEST

START_TEST(too_many) {
    static const struct {
        const char *before, *item, *after, *param, *path;
        size_t count;
    } cases[] = {
        {"{\"stop\":[\"a\"", ",\"a\"", "]}", "stop", "/v1/completions", 5000},
        {"{\"stop\":[\"\"", ",\"\"", "]}", "stop", "/v1/completions", 3},
        {"{\"stop_token_ids\":[1", ",1", "]}", "stop_token_ids", "/v1/completions", 5000},
        {"{\"prompt\":[\"a\"", ",\"a\"", "]}", "prompt", "/v1/completions", 5000},
        {"{\"prompt\":[[1]", ",[1]", "]}", "prompt", "/v1/completions", 5000},
        {"{\"prompt\":[[]", ",[]", "]}", NULL, "/v1/completions", 2000000},
        {"{\"prompt\":[[1", ",1", "]]}", "prompt", "/v1/completions", 1048576},
        {"{\"tokens\":[1", ",1", "]}", "tokens", "/detokenize", 1048576},
        {"{\"unknown\":[0", ",0", "]}", NULL, "/v1/completions", 2000000},
        {"{\"prompt\":\"a", "a", "\"}", "prompt", "/v1/completions", 1048576}, // as many tokens
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t item = strlen(cases[i].item);
        char *body = malloc(cases[i].count * item + 64), *at = body + sprintf(body, "%s", cases[i].before);
        for (size_t k = 0; k < cases[i].count; k++, at += item)
            memcpy(at, cases[i].item, item);
        at += sprintf(at, "%s", cases[i].after);
        refuse(cases[i].path, body, (size_t)(at - body), cases[i].param);
        free(body);
    }
}
END_TEST

// Ids just inside the vocabulary pass, the next one does not.
START_TEST(ids_at_the_border) {
    static const struct {
        const char *form, *param;
    } cases[] = {{"{\"prompt\":[%d]}", "prompt"},
                 {"{\"prompt\":[[1],[2,%d]]}", "prompt"},
                 {"{\"stop_token_ids\":[1,%d]}", "stop_token_ids"},
                 {"{\"logit_bias\":{\"1\":1,\"%d\":-100}}", "logit_bias"}};
    static const int beyond[] = {FAKE_VOCABULARY, 99999999, 2147483647};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[128];
        answer answer;
        snprintf(body, sizeof body, cases[i].form, FAKE_VOCABULARY - 1);
        fixture_post(&server, "/v1/completions", body, &answer);
        ck_assert_msg(answer.status == 200, "%s: %s", body, answer.body);
        answer_free(&answer);
        for (size_t k = 0; k < sizeof beyond / sizeof *beyond; k++) {
            const int length = snprintf(body, sizeof body, cases[i].form, beyond[k]);
            refuse("/v1/completions", body, (size_t)length, cases[i].param);
        }
    }
}
END_TEST

// Noise of every length on the wire, and noise behind a proper head.
START_TEST(noise) {
    unsigned long long random = 88172645463325252ull;

    for (int i = 0; i < 300; i++) {
        char data[4096];
        answer answer;
        for (size_t k = 0; k < sizeof data; k++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            data[k] = (char)random;
        }
        const size_t length = random % sizeof data;
        if (i % 2) {
            data[0] = '{';
            refuse("/v1/completions", data, length ? length : 1, NULL);
            continue;
        }
        const int client = client_connect(&server);
        send(client, data, length, MSG_NOSIGNAL);
        close(client);
        if (i % 20 == 0) {
            fixture_get(&server, "/health", &answer);
            ck_assert_int_eq(answer.status, 200);
            answer_free(&answer);
        }
    }
}
END_TEST

static Suite *hostile_suite(void) {
    Suite *suite = suite_create("hostile");
    TCase *tests = tcase_create("hostile");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, what_is_no_json);
    tcase_add_test(tests, what_is_no_utf8);
    tcase_add_test(tests, depth);
    tcase_add_test(tests, numbers);
    tcase_add_test(tests, too_many);
    tcase_add_test(tests, ids_at_the_border);
    tcase_add_test(tests, noise);
    tcase_set_timeout(tests, 120);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(hostile_suite)

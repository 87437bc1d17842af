// SPDX-License-Identifier: Apache-2.0
// The document and the server against each other: what the one says of a field the other does.
// Every field of a completion is tried at the ends of its documented range, beyond them, at its default, and as null.
#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;
static json_t *document;

static void load(void) {
    answer answer;
    fixture_get(&server, "/openapi.json", &answer);
    ck_assert_int_eq(answer.status, 200);
    document = answer_json(&answer);
    answer_free(&answer);
}

static void start(const char *const *options) {
    fixture_start(&server, options);
    load();
}

static void stop(void) {
    json_decref(document);
    ck_assert_int_eq(fixture_stop(&server), 0);
}

static json_t *schema(const char *name) {
    json_t *found = json_object_get(json_object_get(json_object_get(document, "components"), "schemas"), name);
    ck_assert_msg(json_is_object(found), "no schema %s", name);
    return found;
}

// Sends a completion with this field, whose value is taken. wanted 400: the field must be named.
static void try(const char *name, json_t *value, int wanted) {
    if (strncmp(name, "session_", 8) == 0 && wanted == 200) { // they need one
        json_decref(value);
        return;
    }
    json_t *body = json_pack("{s:s,s:i}", "prompt", "hi", "max_tokens", 1);
    answer answer;

    if (strcmp(name, "min_tokens") == 0 && wanted == 200) // what it must not exceed
        json_object_set_new(body, "max_tokens", json_integer(65536));
    if (strcmp(name, "stream_options") == 0)
        json_object_set_new(body, "stream", json_true());
    if (strcmp(name, "cg_mode") == 0)
        json_object_set_new(body, "cg_max_steps", json_integer(2));
    if (strcmp(name, "n") == 0)
        json_object_set_new(body, "logit_bias", json_object());
    json_object_set_new(body, name, value);
    char *text = json_dumps(body, 0);
    fixture_post(&server, "/v1/completions", text, &answer);
    if (wanted == 400)
        expect_error(&answer, 400, name, NULL);
    else
        ck_assert_msg(answer.status == wanted, "%s: %d, want %d: %s", text, answer.status, wanted, answer.body);
    answer_free(&answer);
    free(text);
    json_decref(body);
}

static bool has_type(const json_t *field, const char *type) {
    json_t *types = json_object_get(field, "type"), *item;
    size_t i;

    json_array_foreach(types, i, item) if (strcmp(json_string_value(item), type) == 0) return true;
    return json_is_string(types) && strcmp(json_string_value(types), type) == 0;
}

static void try_range(const char *name, const json_t *field) {
    json_t *low = json_object_get(field, "minimum"), *high = json_object_get(field, "maximum");

    ck_assert_msg(json_is_number(low) && json_is_number(high), "%s has no range", name);
    try(name, json_deep_copy(low), 200);
    try(name, json_deep_copy(high), 200);
    if (has_type(field, "integer")) {
        try(name, json_real(0.5), 400);
        if (json_integer_value(low) > INT64_MIN) { // beyond that the body is no JSON to read
            try(name, json_integer(json_integer_value(low) - 1), 400);
            try(name, json_integer(json_integer_value(high) + 1), 400);
        }
    } else {
        try(name, json_real(json_number_value(low) - 0.001), 400);
        try(name, json_real(json_number_value(high) + 0.001), 400);
    }
    try(name, json_string("1"), 400);
    try(name, json_true(), 400);
}

START_TEST(fields_are_as_documented) {
    json_t *properties, *field;
    const char *name;
    size_t ranges = 0, flags = 0;

    start(NULL);
    properties = json_object_get(schema("completion_request"), "properties");
    ck_assert_uint_gt(json_object_size(properties), 40);
    json_object_foreach(properties, name, field) {
        ck_assert_msg(json_string_length(json_object_get(field, "description")) > 3, "%s", name);
        ck_assert_msg(json_object_get(field, "default") != NULL, "%s", name);
        try(name, json_null(), 200);
        try(name, json_deep_copy(json_object_get(field, "default")), 200);
        if (has_type(field, "integer") || has_type(field, "number")) {
            try_range(name, field);
            ranges++;
        } else if (has_type(field, "boolean")) {
            try(name, json_true(), 200);
            try(name, json_integer(1), 400);
            flags++;
        } else if (strcmp(name, "model") != 0) {
            try(name, json_integer(5), 400);
        }
    }
    ck_assert_uint_ge(ranges, 18);
    ck_assert_uint_ge(flags, 7);
    stop();
}
END_TEST

START_TEST(ranges_follow_the_configuration) {
    static const char *const options[] = {"--max-tokens",  "50", "--max-cg-steps",     "9",    "--max-loops", "3",
                                          "--allow-exact", "no", "--min-cg-tolerance", "1e-3", NULL};
    json_t *properties;

    start(options);
    properties = json_object_get(schema("completion_request"), "properties");
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(properties, "max_tokens"), "maximum")), 50);
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(properties, "cg_max_steps"), "maximum")), 9);
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(properties, "max_loops"), "maximum")), 3);
    const double low = json_number_value(json_object_get(json_object_get(properties, "cg_tolerance"), "minimum"));
    ck_assert_double_eq_tol(low, 1e-3, 1e-9);
    try("max_tokens", json_integer(51), 400);
    try("cg_max_steps", json_integer(10), 400);
    try("cg_tolerance", json_real(1e-3), 200);
    try("cg_tolerance", json_real(9e-4), 400);
    try("cg_tolerance", json_integer(0), 400);
    try("cg_mode", json_string("exact"), 400);
    stop();
}
END_TEST

START_TEST(ids_and_texts_follow_the_models) {
    static const char *const options[] = {"--model", "other=/models/nobos", NULL};
    start(NULL);
    ck_assert_int_eq(json_integer_value(json_object_get(schema("token_id"), "maximum")), FAKE_VOCABULARY - 1);
    ck_assert_ptr_null(json_object_get(schema("prompt_text"), "minLength"));
    stop();
    start(options);
    ck_assert_int_eq(json_integer_value(json_object_get(schema("prompt_text"), "minLength")), 1);
    stop();
}
END_TEST

static void check_references(const json_t *value, size_t *count) {
    const char *name;
    json_t *member;
    size_t i;

    json_object_foreach((json_t *)value, name, member) {
        if (strcmp(name, "$ref") == 0) {
            static const char prefix[] = "#/components/schemas/";
            ck_assert_int_eq(strncmp(json_string_value(member), prefix, sizeof prefix - 1), 0);
            schema(json_string_value(member) + sizeof prefix - 1);
            ++*count;
        } else
            check_references(member, count);
    }
    json_array_foreach(value, i, member) check_references(member, count);
}

// The members that a schema requires are there in what the server says.
static void check_members(const char *name, const json_t *value) {
    json_t *required = json_object_get(schema(name), "required"), *member;
    size_t i;

    ck_assert_uint_gt(json_array_size(required), 0);
    json_array_foreach(required, i, member) ck_assert_msg(json_object_get(value, json_string_value(member)) != NULL,
                                                          "%s lacks %s", name, json_string_value(member));
}

static void check_answer(const char *method, const char *path, const char *body, const char *name, int status) {
    answer answer;
    fixture_ask(&server, method, path, "", body, &answer);
    ck_assert_msg(answer.status == status, "%s: %d", path, answer.status);
    json_t *json = answer_json(&answer);
    check_members(name, json);
    if (strcmp(name, "completion") == 0) {
        json_t *choice = json_array_get(json_object_get(json, "choices"), 0);
        check_members("choice", choice);
        check_members("logprobs", json_object_get(choice, "logprobs"));
        check_members("usage", json_object_get(json, "usage"));
        check_members("computes", json_object_get(json_object_get(json, "usage"), "compute"));
    }
    json_decref(json);
    answer_free(&answer);
}

START_TEST(answers_are_as_documented) {
    size_t references = 0;
    const char *path;
    json_t *methods;

    start(NULL);
    check_references(document, &references);
    ck_assert_uint_gt(references, 30);
    check_answer("POST", "/v1/completions", "{\"prompt\":\"hi\",\"logprobs\":1}", "completion", 200);
    check_answer("POST", "/v1/completions", "{\"prompt\":5}", "error", 400);
    check_answer("POST", "/tokenize", "{\"prompt\":\"hi\"}", "tokens", 200);
    check_answer("POST", "/detokenize", "{\"tokens\":[1]}", "text", 200);
    check_answer("POST", "/v1/sessions", "{}", "session", 201);
    check_answer("GET", "/v1/sessions", NULL, "sessions", 200);
    check_answer("GET", "/v1/models", NULL, "models", 200);
    check_answer("GET", "/v1/models/demo", NULL, "model", 200);
    check_answer("GET", "/tokenizer_info", NULL, "tokenizer", 200);
    check_answer("GET", "/health", NULL, "health", 200);
    // Every documented path is there, and takes the documented method.
    json_object_foreach(json_object_get(document, "paths"), path, methods) {
        answer answer;
        const bool sessions = strcmp(path, "/v1/sessions") == 0;
        const bool post = json_object_get(methods, "post") != NULL && !sessions;
        if (strncmp(path, "/v1/sessions/", 13) == 0)
            continue; // sessions_test.sh
        fixture_ask(&server, post ? "POST" : "GET", strchr(path, '{') ? "/v1/models/demo" : path, "",
                    post ? "{\"prompt\":\"x\",\"tokens\":[]}" : NULL, &answer);
        ck_assert_msg(answer.status == 200, "%s: %d", path, answer.status);
        answer_free(&answer);
    }
    ck_assert_ptr_null(json_object_get(document, "security")); // there are no keys
    stop();
}
END_TEST

static Suite *openapi_suite(void) {
    Suite *suite = suite_create("openapi");
    TCase *tests = tcase_create("openapi");
    tcase_add_test(tests, fields_are_as_documented);
    tcase_add_test(tests, ranges_follow_the_configuration);
    tcase_add_test(tests, ids_and_texts_follow_the_models);
    tcase_add_test(tests, answers_are_as_documented);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(openapi_suite)

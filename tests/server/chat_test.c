// SPDX-License-Identifier: Apache-2.0
// Chats: messages to a prompt, the answer's shape, streams that add up to it, and each refusal with its field.
//
// The fake engine's template writes BOS, then "role: content", a line end and EOS for each message.
#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;

static void start(const char *model) {
    fixture_start_model(&server, model, NULL);
    fixture_wait(&server);
}

static void setup(void) {
    start("demo=/models/chat");
}

static void teardown(void) {
    ck_assert_int_eq(fixture_stop(&server), 0);
}

static void ask(const char *body, answer *answer) {
    fixture_post(&server, "/v1/chat/completions", body, answer);
}

static json_t *converse(const char *body) {
    answer answer;
    ask(body, &answer);
    ck_assert_msg(answer.status == 200, "%s: %s", body, answer.body);
    json_t *json = answer_json(&answer);
    answer_free(&answer);
    return json;
}

static json_t *first_choice(const json_t *json) {
    return json_array_get(json_object_get(json, "choices"), 0);
}

static const char *text_in(const json_t *object, const char *name) {
    const char *text = json_string_value(json_object_get(object, name));
    ck_assert_msg(text != NULL, "no text %s", name);
    return text;
}

#define HI "{\"role\":\"user\",\"content\":\"hi\"}"

// ---- answers

START_TEST(an_answer_is_a_message) {
    json_t *json = converse("{\"messages\":[" HI "],\"max_tokens\":5,\"seed\":3,\"temperature\":0}");
    json_t *choice = first_choice(json), *usage = json_object_get(json, "usage");
    ck_assert_str_eq(text_in(json, "object"), "chat.completion");
    ck_assert_int_eq(strncmp(text_in(json, "id"), "chatcmpl-", 9), 0);
    ck_assert_str_eq(text_in(json_object_get(choice, "message"), "role"), "assistant");
    ck_assert_uint_eq(strlen(text_in(json_object_get(choice, "message"), "content")), 5);
    ck_assert(json_is_null(json_object_get(choice, "logprobs")));
    ck_assert_str_eq(text_in(choice, "finish_reason"), "length");
    ck_assert_ptr_null(json_object_get(choice, "text"));
    // BOS, "user: hi\n", EOS, "assistant: "
    ck_assert_int_eq(json_integer_value(json_object_get(usage, "prompt_tokens")), 1 + 9 + 1 + 11);
    ck_assert_int_eq(json_integer_value(json_object_get(usage, "completion_tokens")), 5);
    json_decref(json);
}
END_TEST

START_TEST(the_prompt_is_the_templates) {
    static const struct {
        const char *messages, *wanted;
        const char *more;
    } cases[] = {
        {"[" HI "]", "user: hi\n", ""},
        {"[{\"role\":\"system\",\"content\":\"s\"}," HI "]", "system: s\nuser: hi\n", ""},
        {"[{\"role\":\"developer\",\"content\":\"s\"}," HI "]", "system: s\nuser: hi\n", ""},
        {"[" HI ",{\"role\":\"assistant\",\"content\":\"yes\",\"refusal\":null,\"name\":\"x\"}," HI "]",
         "user: hi\nassistant: yes\nuser: hi\n", ""},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}]",
         "user: a\nb\n", ""},
        {"[{\"role\":\"user\",\"content\":[]}]", "user: \n", ""},
        {"[{\"role\":\"user\",\"content\":\"\"}]", "user: \n", ""},
        {"[" HI "]", "user: hi\n", ",\"add_generation_prompt\":false"},
    };
    char body[1024], prompt[256] = "";
    snprintf(body, sizeof body, "{\"messages\":%s,\"max_tokens\":1,\"return_token_ids\":true%s}", cases[_i].messages,
             cases[_i].more);
    json_t *json = converse(body), *ids = json_object_get(first_choice(json), "prompt_token_ids"), *id;
    size_t i, length = 0;
    ck_assert_uint_gt(json_array_size(ids), 0);
    json_array_foreach(ids, i, id) {
        if (json_integer_value(id) < 256)
            prompt[length++] = (char)json_integer_value(id);
    }
    char wanted[256];
    snprintf(wanted, sizeof wanted, "%s%s", cases[_i].wanted, *cases[_i].more ? "" : "assistant: ");
    ck_assert_str_eq(prompt, wanted);
    json_decref(json);
}
END_TEST

START_TEST(logprobs_have_the_chats_shape) {
    json_t *json = converse("{\"messages\":[" HI "],\"max_tokens\":4,\"seed\":3,\"logprobs\":true,\"top_logprobs\":2}");
    json_t *tokens = json_object_get(json_object_get(first_choice(json), "logprobs"), "content"), *token;
    const char *content = text_in(json_object_get(first_choice(json), "message"), "content");
    size_t i;
    ck_assert_uint_eq(json_array_size(tokens), 4);
    json_array_foreach(tokens, i, token) {
        json_t *bytes = json_object_get(token, "bytes"), *top = json_object_get(token, "top_logprobs");
        ck_assert(text_in(token, "token")[0] == content[i]);
        ck_assert_uint_eq(json_array_size(bytes), 1);
        ck_assert_int_eq(json_integer_value(json_array_get(bytes, 0)), content[i]);
        ck_assert(json_is_number(json_object_get(token, "logprob")));
        ck_assert_uint_eq(json_array_size(top), 2);
        ck_assert(json_is_number(json_object_get(json_array_get(top, 1), "logprob")));
    }
    json_decref(json);
    json = converse("{\"messages\":[" HI "],\"max_tokens\":2,\"logprobs\":true}");
    tokens = json_object_get(json_object_get(first_choice(json), "logprobs"), "content");
    ck_assert_uint_eq(json_array_size(tokens), 2);
    ck_assert_uint_eq(json_array_size(json_object_get(json_array_get(tokens, 0), "top_logprobs")), 0);
    json_decref(json);
}
END_TEST

START_TEST(several_choices) {
    json_t *json = converse("{\"messages\":[" HI "],\"max_tokens\":4,\"n\":3,\"seed\":5}"), *choice;
    size_t i;
    ck_assert_uint_eq(json_array_size(json_object_get(json, "choices")), 3);
    json_array_foreach(json_object_get(json, "choices"), i, choice) {
        ck_assert_int_eq(json_integer_value(json_object_get(choice, "index")), (int)i);
        ck_assert_uint_eq(strlen(text_in(json_object_get(choice, "message"), "content")), 4);
    }
    json_decref(json);
}
END_TEST

// ---- streams

static char *streamed_text(const sse *sse, int index, int *roles) {
    char *text = calloc(1, 4096);
    json_t *event, *choice;
    size_t i, k;
    json_array_foreach(sse->events, i, event) {
        ck_assert_str_eq(text_in(event, "object"), "chat.completion.chunk");
        json_array_foreach(json_object_get(event, "choices"), k, choice) {
            json_t *delta = json_object_get(choice, "delta"), *content = json_object_get(delta, "content");
            ck_assert(json_is_object(delta) && !json_object_get(choice, "message"));
            if (json_integer_value(json_object_get(choice, "index")) != index)
                continue;
            *roles += json_object_get(delta, "role") != NULL;
            if (content)
                strcat(text, json_string_value(content));
        }
    }
    return text;
}

START_TEST(a_stream_adds_up) {
    static const char fields[] = "\"messages\":[" HI "],\"max_tokens\":40,\"seed\":9,\"n\":2";
    char body[256];
    snprintf(body, sizeof body, "{%s}", fields);
    json_t *whole = converse(body);
    answer answer;
    sse sse;
    snprintf(body, sizeof body, "{%s,\"stream\":true,\"stream_options\":{\"include_usage\":true}}", fields);
    ask(body, &answer);
    ck_assert_int_eq(answer.status, 200);
    sse_parse(&answer, &sse);
    ck_assert(sse.done);
    for (int index = 0; index < 2; index++) {
        int roles = 0;
        char *text = streamed_text(&sse, index, &roles);
        const json_t *choice = json_array_get(json_object_get(whole, "choices"), (size_t)index);
        ck_assert_str_eq(text, text_in(json_object_get(choice, "message"), "content"));
        ck_assert_int_eq(roles, 1);
        free(text);
    }
    json_t *last = json_array_get(sse.events, json_array_size(sse.events) - 1);
    ck_assert_uint_eq(json_array_size(json_object_get(last, "choices")), 0);
    ck_assert(json_equal(json_object_get(json_object_get(last, "usage"), "completion_tokens"),
                         json_object_get(json_object_get(whole, "usage"), "completion_tokens")));
    sse_free(&sse);
    answer_free(&answer);
    json_decref(whole);
}
END_TEST

START_TEST(the_end_of_a_turn_ends_the_answer) {
    atomic_store(&fake_engine()->eos_at, 4);
    json_t *json = converse("{\"messages\":[" HI "]}");
    ck_assert_str_eq(text_in(first_choice(json), "finish_reason"), "stop");
    ck_assert_uint_eq(strlen(text_in(json_object_get(first_choice(json), "message"), "content")), 3);
    json_decref(json);
    atomic_store(&fake_engine()->eos_at, 0);
}
END_TEST

// ---- lengths

START_TEST(lengths_have_defaults) {
    json_t *json = converse("{\"messages\":[" HI "]}");
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(json, "usage"), "completion_tokens")), 4096);
    json_decref(json);
    json = converse("{\"messages\":[" HI "],\"max_completion_tokens\":7}");
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(json, "usage"), "completion_tokens")), 7);
    json_decref(json);
    json = converse("{\"messages\":[" HI "],\"max_completion_tokens\":7,\"max_tokens\":7}");
    json_decref(json);
}
END_TEST

START_TEST(a_short_context_is_filled) {
    start("demo=/models/short-chat");
    json_t *json = converse("{\"messages\":[" HI "]}");
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(json, "usage"), "completion_tokens")), 64 - 22);
    json_decref(json);
    answer answer;
    ask("{\"messages\":[{\"role\":\"user\",\"content\":"
        "\"0123456789012345678901234567890123456789012345678901234567890123\"}]}",
        &answer);
    expect_error(&answer, 400, "messages", "context_length_exceeded");
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- refusals

static const struct {
    const char *body, *param, *code, *words;
} refused[] = {
    {"{}", "messages", "missing_field", "messages is missing"},
    {"{\"messages\":null}", "messages", "missing_field", "messages"},
    {"{\"messages\":\"hi\"}", "messages", "invalid_type", "list of messages"},
    {"{\"messages\":[]}", "messages", "out_of_range", "0 messages"},
    {"{\"messages\":[\"hi\"]}", "messages", "invalid_value", "messages[0].role"},
    {"{\"messages\":[" HI ",{\"role\":\"tool\",\"content\":\"x\"}]}", "messages", "invalid_value", "messages[1].role"},
    {"{\"messages\":[{\"role\":5,\"content\":\"x\"}]}", "messages", "invalid_value", "messages[0].role"},
    {"{\"messages\":[{\"role\":\"user\"}]}", "messages", "invalid_type", "messages[0].content"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages", "invalid_type", "messages[0].content"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[\"a\"]}]}", "messages", "invalid_value", "messages[0].content[0]"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"image_url\","
     "\"image_url\":{\"url\":\"x\"}}]}]}",
     "messages", "invalid_value", "messages[0].content[1]"},
    {"{\"messages\":[" HI "],\"max_tokens\":5,\"max_completion_tokens\":6}", "max_completion_tokens", "invalid_value",
     "different"},
    {"{\"messages\":[" HI "],\"max_tokens\":-1}", "max_tokens", "out_of_range", "max_tokens"},
    {"{\"messages\":[" HI "],\"max_completion_tokens\":-1}", "max_completion_tokens", "out_of_range",
     "max_completion_tokens"},
    {"{\"messages\":[" HI "],\"top_logprobs\":3}", "top_logprobs", "invalid_value", "needs logprobs"},
    {"{\"messages\":[" HI "],\"logprobs\":5}", "logprobs", "invalid_type", "logprobs"},
    {"{\"messages\":[" HI "],\"logprobs\":true,\"top_logprobs\":21}", "top_logprobs", "out_of_range", "top_logprobs"},
    {"{\"messages\":[" HI "],\"tools\":[{\"type\":\"function\"}]}", "tools", NULL, "tools"},
    {"{\"messages\":[" HI "],\"response_format\":{\"type\":\"json_object\"}}", "response_format", NULL,
     "response_format"},
    {"{\"messages\":[" HI "],\"session\":\"x\"}", "session", NULL, "session"},
    {"{\"messages\":[" HI "],\"min_tokens\":9,\"max_tokens\":5}", "min_tokens", "out_of_range", "min_tokens"},
    {"{\"messages\":[" HI "],\"min_tokens\":9999}", "min_tokens", "out_of_range", "min_tokens"},
    {"{\"messages\":[" HI "],\"stream_options\":{}}", "stream_options", "invalid_value", "needs stream"},
};

START_TEST(refuses) {
    answer answer;
    ask(refused[_i].body, &answer);
    ck_assert_msg(answer.status == 400, "%s: %d %s", refused[_i].body, answer.status, answer.body);
    json_t *json = answer_json(&answer), *error = json_object_get(json, "error");
    ck_assert_str_eq(text_in(error, "param"), refused[_i].param);
    if (refused[_i].code)
        ck_assert_str_eq(text_in(error, "code"), refused[_i].code);
    ck_assert_msg(strstr(text_in(error, "message"), refused[_i].words) != NULL, "%s", text_in(error, "message"));
    json_decref(json);
    answer_free(&answer);
}
END_TEST

// What a client may leave out or null changes nothing; what only a prompt has is unknown here.
START_TEST(neutral_fields_pass) {
    json_t *json = converse("{\"messages\":[" HI "],\"max_tokens\":1,\"tools\":[],\"tool_choice\":\"none\",\"n\":null,"
                            "\"logprobs\":false,\"top_logprobs\":0,\"response_format\":{\"type\":\"text\"},"
                            "\"chat_template_kwargs\":{},\"best_of\":\"x\",\"echo\":5,\"store\":true}");
    json_decref(json);
}
END_TEST

START_TEST(a_model_without_template_says_so) {
    start("demo=/models/demo");
    answer answer;
    ask("{\"messages\":[" HI "]}", &answer);
    expect_error(&answer, 400, "messages", "invalid_request");
    ck_assert_ptr_nonnull(strstr(answer.body, "no chat template; POST /v1/completions needs none"));
    answer_free(&answer);
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// What the document says is taken is taken, what it says is answered is answered.
START_TEST(the_document_has_the_path) {
    answer answer;
    fixture_get(&server, "/openapi.json", &answer);
    json_t *json = answer_json(&answer), *schemas = json_object_get(json_object_get(json, "components"), "schemas");
    ck_assert(json_is_object(json_object_get(json_object_get(json, "paths"), "/v1/chat/completions")));
    json_t *fields = json_object_get(json_object_get(schemas, "chat_request"), "properties");
    static const char *const names[] = {"messages", "max_completion_tokens", "temperature", "stream", "cg_tolerance"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        ck_assert_msg(json_object_get(fields, names[i]) != NULL, "%s", names[i]);
    ck_assert_ptr_null(json_object_get(fields, "prompt"));
    ck_assert_ptr_null(json_object_get(fields, "echo"));
    json_t *whole = converse("{\"messages\":[" HI "],\"max_tokens\":2,\"logprobs\":true,\"top_logprobs\":1}"), *member;
    json_t *choice = first_choice(whole);
    json_t *tokens = json_object_get(json_object_get(choice, "logprobs"), "content");
    const struct {
        const char *name;
        const json_t *value;
    } parts[] = {
        {"chat_completion", whole},
        {"chat_choice", choice},
        {"message", json_object_get(choice, "message")},
        {"chat_logprobs", json_object_get(choice, "logprobs")},
        {"chat_token", json_array_get(tokens, 0)},
        {"alternative", json_array_get(json_object_get(json_array_get(tokens, 0), "top_logprobs"), 0)},
    };
    for (size_t i = 0, k; i < sizeof parts / sizeof *parts; i++) {
        const json_t *required = json_object_get(json_object_get(schemas, parts[i].name), "required");
        ck_assert_uint_gt(json_array_size(required), 0);
        json_array_foreach(required, k, member)
            ck_assert_msg(json_object_get(parts[i].value, json_string_value(member)) != NULL, "%s lacks %s",
                          parts[i].name, json_string_value(member));
    }
    json_decref(whole);
    json_decref(json);
    answer_free(&answer);
}
END_TEST

START_TEST(the_template_is_told) {
    answer answer;
    fixture_get(&server, "/tokenizer_info", &answer);
    json_t *json = answer_json(&answer);
    ck_assert_str_eq(text_in(json, "chat_template"), "role: content");
    json_decref(json);
    answer_free(&answer);
}
END_TEST

#define COUNT(table) (int)(sizeof(table) / sizeof(table)[0])

static Suite *chat_suite(void) {
    Suite *suite = suite_create("chat");
    TCase *answers = tcase_create("answers");
    tcase_add_checked_fixture(answers, setup, teardown);
    tcase_add_test(answers, an_answer_is_a_message);
    tcase_add_loop_test(answers, the_prompt_is_the_templates, 0, 8);
    tcase_add_test(answers, logprobs_have_the_chats_shape);
    tcase_add_test(answers, several_choices);
    tcase_add_test(answers, a_stream_adds_up);
    tcase_add_test(answers, the_end_of_a_turn_ends_the_answer);
    tcase_add_test(answers, lengths_have_defaults);
    tcase_add_loop_test(answers, refuses, 0, COUNT(refused));
    tcase_add_test(answers, neutral_fields_pass);
    tcase_add_test(answers, the_document_has_the_path);
    tcase_add_test(answers, the_template_is_told);
    suite_add_tcase(suite, answers);
    TCase *models = tcase_create("models");
    tcase_add_test(models, a_short_context_is_filled);
    tcase_add_test(models, a_model_without_template_says_so);
    suite_add_tcase(suite, models);
    return suite;
}

MESA_TEST_MAIN(chat_suite)

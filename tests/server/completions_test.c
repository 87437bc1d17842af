// SPDX-License-Identifier: Apache-2.0
// The fields of a completion: logprobs and their four arrays, echo, best_of, what reaches the engine, and that a stream
// adds up to the plain answer. The engine's figures are made up, so every one can be computed here.
#include <math.h>
#include <stdlib.h>
#include <string.h>
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

static json_t *complete(const char *body) {
    answer answer;
    fixture_post(&server, "/v1/completions", body, &answer);
    ck_assert_msg(answer.status == 200, "%s: %s", body, answer.body);
    json_t *json = answer_json(&answer);
    answer_free(&answer);
    return json;
}

static json_t *choice_of(json_t *json, size_t index) {
    return json_array_get(json_object_get(json, "choices"), index);
}

static const char *text_of(json_t *json, size_t index) {
    return json_string_value(json_object_get(choice_of(json, index), "text"));
}

static json_t *array_of(json_t *choice, const char *name) {
    json_t *array = json_object_get(json_object_get(choice, "logprobs"), name);
    ck_assert_msg(json_is_array(array), "no %s", name);
    return array;
}

static void check_lengths(json_t *choice, size_t wanted) {
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        ck_assert_msg(json_array_size(array_of(choice, names[i])) == wanted, "%s has %zu, want %zu", names[i],
                      json_array_size(array_of(choice, names[i])), wanted);
}

// ---- logprobs ------------------------------------------------------------------------------------------------------

START_TEST(logprobs_of_a_completion) {
    for (int top = 0; top <= 20; top += 5) {
        char body[160];
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"max_tokens\":6,\"seed\":3,\"logprobs\":%d}", top);
        json_t *json = complete(body), *choice = choice_of(json, 0);
        const char *text = text_of(json, 0);
        check_lengths(choice, 6);
        for (size_t i = 0; i < 6; i++) {
            const long position = 3 + (long)i; // BOS and two letters before
            const char *token = json_string_value(json_array_get(array_of(choice, "tokens"), i));
            json_t *map = json_array_get(array_of(choice, "top_logprobs"), i);
            const double logprob = json_number_value(json_array_get(array_of(choice, "token_logprobs"), i));
            ck_assert(token[0] == text[i] && token[1] == '\0');
            ck_assert_float_eq((float)logprob, fake_engine_logprob(token[0], position));
            ck_assert_int_eq(json_integer_value(json_array_get(array_of(choice, "text_offset"), i)), (int)i);
            // The same number by the same name, and at most one more than was asked for.
            ck_assert_double_eq(json_number_value(json_object_get(map, token)), logprob);
            ck_assert_uint_ge(json_object_size(map), top ? (size_t)top : 1);
            ck_assert_uint_le(json_object_size(map), (size_t)top + 1);
            const bool other_is_best = position % 3 == 1;
            ck_assert_int_eq(json_object_get(map, "Z") != NULL, top > 0 && other_is_best);
        }
        json_decref(json);
    }
}
END_TEST

// Two ids that look the same, an id that is a part of a character, an impossible one.
START_TEST(names_and_numbers_of_alternatives) {
    json_t *json = complete("{\"prompt\":\"hi\",\"max_tokens\":2,\"seed\":3,\"logprobs\":5}");
    json_t *map = json_array_get(array_of(choice_of(json, 0), "top_logprobs"), 0);

    ck_assert_double_eq(json_number_value(json_object_get(map, "a")), -10);
    ck_assert_double_eq(json_number_value(json_object_get(map, "token_id:258")), -11);
    ck_assert_double_eq(json_number_value(json_object_get(map, "bytes:\\xf0")), -12);
    ck_assert_double_eq(json_number_value(json_object_get(map, "D")), -9999);
    json_decref(json);
}
END_TEST

START_TEST(without_logprobs_there_are_none) {
    json_t *json = complete("{\"prompt\":\"hi\",\"logprobs\":null,\"echo\":true}");
    ck_assert(json_is_null(json_object_get(choice_of(json, 0), "logprobs")));
    ck_assert_int_eq(atomic_load(&fake_engine()->last_logprobs), -1);
    json_decref(json);
}
END_TEST

// What evaluation harnesses send: id lists of different lengths, echo, one token or none.
START_TEST(scoring_requests) {
    static const char *const prompts[] = {"[[72,105,33],[65],[66,67]]", "[\"i!\",\"\",\"B\"]"};
    static const size_t lengths[] = {3, 1, 2};

    for (int eos = 0; eos < 2; eos++)
        for (int max_tokens = 0; max_tokens < 2; max_tokens++)
            for (size_t p = 0; p < 2; p++) {
                char body[256];
                atomic_store(&fake_engine()->eos_at, eos); // then the one token is the end of text
                snprintf(body, sizeof body,
                         "{\"model\":\"demo\",\"prompt\":%s,\"temperature\":0,\"max_tokens\":%d,\"logprobs\":1,"
                         "\"seed\":1234,\"echo\":true}",
                         prompts[p], max_tokens);
                json_t *json = complete(body);
                ck_assert_uint_eq(json_array_size(json_object_get(json, "choices")), 3);
                for (size_t i = 0; i < 3; i++) {
                    json_t *choice = choice_of(json, i);
                    ck_assert_int_eq(json_integer_value(json_object_get(choice, "index")), (int)i);
                    check_lengths(choice, lengths[i] + (size_t)max_tokens);
                    ck_assert(json_is_null(json_array_get(array_of(choice, "token_logprobs"), 0)));
                    ck_assert(json_is_null(json_array_get(array_of(choice, "top_logprobs"), 0)));
                    for (size_t k = 1; k < lengths[i] + (size_t)max_tokens; k++) {
                        ck_assert(json_is_number(json_array_get(array_of(choice, "token_logprobs"), k)));
                        ck_assert(json_is_object(json_array_get(array_of(choice, "top_logprobs"), k)));
                    }
                    const char *reason = json_string_value(json_object_get(choice, "finish_reason"));
                    ck_assert_str_eq(reason, eos && max_tokens ? "stop" : "length");
                    if (eos && max_tokens) {
                        json_t *tokens = array_of(choice, "tokens");
                        ck_assert_str_eq(json_string_value(json_array_get(tokens, lengths[i])), "</s>");
                    }
                }
                json_t *usage = json_object_get(json, "usage");
                ck_assert_int_eq(json_integer_value(json_object_get(usage, "prompt_tokens")), 6);
                ck_assert_int_eq(json_integer_value(json_object_get(usage, "completion_tokens")), 3 * max_tokens);
                json_decref(json);
            }
    atomic_store(&fake_engine()->eos_at, 0);
}
END_TEST

START_TEST(echo_gives_the_prompt_back) {
    static const struct {
        const char *body, *text;
        size_t prompt_length;
    } cases[] = {
        {"{\"prompt\":\"Snow is\",\"max_tokens\":0,\"echo\":true,\"logprobs\":1}", "Snow is", 7},
        {"{\"prompt\":\"Snow is\",\"max_tokens\":2,\"echo\":true}", "Snow is", 7},
        {"{\"prompt\":\"a\\u0000\\\"\\n\",\"max_tokens\":1,\"echo\":true}", "a", 4},
        {"{\"prompt\":[9,11,8],\"max_tokens\":2,\"echo\":true}", "\t\v\b", 3},
        {"{\"prompt\":[256,104],\"max_tokens\":2,\"echo\":true,\"logprobs\":0}", "<s>h", 4}, // what the client gave
        {"{\"prompt\":\"\",\"max_tokens\":2,\"echo\":true,\"logprobs\":0}", "", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *json = complete(cases[i].body);
        json_t *text = json_object_get(choice_of(json, 0), "text");
        const int generated =
            (int)json_integer_value(json_object_get(json_object_get(json, "usage"), "completion_tokens"));
        ck_assert_uint_eq(json_string_length(text), cases[i].prompt_length + (size_t)generated);
        ck_assert_mem_eq(json_string_value(text), cases[i].text, strlen(cases[i].text));
        json_decref(json);
    }
    json_t *json = complete("{\"prompt\":[[1,2],[3]],\"n\":2,\"echo\":true,\"max_tokens\":1}");
    ck_assert_uint_eq(json_array_size(json_object_get(json, "choices")), 4);
    for (size_t i = 0; i < 4; i++)
        ck_assert_int_eq(text_of(json, i)[0], i < 2 ? 1 : 3);
    json_decref(json);
}
END_TEST

static void check_offsets(json_t *choice, const int *wanted, size_t count) {
    check_lengths(choice, count);
    for (size_t i = 0; i < count; i++) {
        const int got = (int)json_integer_value(json_array_get(array_of(choice, "text_offset"), i));
        ck_assert_msg(got == wanted[i], "offset %zu is %d, want %d", i, got, wanted[i]);
    }
}

// Offsets count characters of the text, also where a character is several tokens or a token has no text.
START_TEST(text_offsets) {
    static const int emoji[] = {0, 1, 1, 1, 1, 2, 3, 4};
    static const int echoed[] = {0, 0, 1, 1, 2, 3, 3, 3, 3};
    static const int stopped[] = {0, 1, 2, 2};
    static const int ended[] = {0, 1, 2};
    static const int invalid[] = {0, 1, 2, 2, 3, 4};

    atomic_store(&fake_engine()->script, "x\xf0\x9f\x98\x80yz!");
    json_t *json = complete("{\"prompt\":\"hi\",\"max_tokens\":8,\"logprobs\":0}");
    ck_assert_str_eq(text_of(json, 0), "x\xf0\x9f\x98\x80yz!");
    check_offsets(choice_of(json, 0), emoji, 8);
    json_decref(json);

    // BOS stands for nothing, the prompt's character is two tokens, the last character stays a part of one.
    json = complete("{\"prompt\":\"h\\u00e9\",\"max_tokens\":5,\"logprobs\":0,\"echo\":true,"
                    "\"logit_bias\":{\"240\":100}}");
    ck_assert_str_eq(text_of(json, 0), "h\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    json_decref(json);
    json = complete("{\"prompt\":\"h\\u00e9\",\"max_tokens\":5,\"logprobs\":0,\"echo\":true}");
    ck_assert_str_eq(text_of(json, 0), "h\xc3\xa9x\xf0\x9f\x98\x80");
    check_offsets(choice_of(json, 0), echoed, 9);
    json_decref(json);

    atomic_store(&fake_engine()->script, "abcdefgh");
    json = complete("{\"prompt\":\"hi\",\"max_tokens\":8,\"logprobs\":0,\"stop\":\"cd\"}");
    ck_assert_str_eq(text_of(json, 0), "ab");
    check_offsets(choice_of(json, 0), stopped, 4);
    json_decref(json);

    atomic_store(&fake_engine()->eos_at, 3);
    json = complete("{\"prompt\":\"hi\",\"max_tokens\":8,\"logprobs\":0}");
    check_offsets(choice_of(json, 0), ended, 3);
    ck_assert_str_eq(json_string_value(json_array_get(array_of(choice_of(json, 0), "tokens"), 2)), "</s>");
    json_decref(json);
    atomic_store(&fake_engine()->eos_at, 0);

    atomic_store(&fake_engine()->script, "a\xff\xe2\x82z\x80");
    json = complete("{\"prompt\":\"hi\",\"max_tokens\":6,\"logprobs\":0}");
    ck_assert_str_eq(text_of(json, 0), "a\xef\xbf\xbd\xef\xbf\xbdz\xef\xbf\xbd");
    check_offsets(choice_of(json, 0), invalid, 6);
    json_decref(json);
    atomic_store(&fake_engine()->script, NULL);
}
END_TEST

// ---- streams -------------------------------------------------------------------------------------------------------

// Puts the choices of a stream together as a plain answer has them.
static json_t *gather(const char *body) {
    static const char *const lists[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    json_t *choices = json_array(), *event, *piece;
    size_t i, k;
    answer answer;
    sse sse;

    fixture_post(&server, "/v1/completions", body, &answer);
    ck_assert_msg(answer.status == 200, "%s", answer.body);
    sse_parse(&answer, &sse);
    ck_assert(sse.done);
    json_array_foreach(sse.events, i, event) {
        json_array_foreach(json_object_get(event, "choices"), k, piece) {
            const size_t index = (size_t)json_integer_value(json_object_get(piece, "index"));
            while (json_array_size(choices) <= index)
                json_array_append_new(choices, json_null());
            json_t *sum = json_array_get(choices, index);
            if (json_is_null(sum)) {
                json_array_set_new(choices, index, json_deep_copy(piece));
                continue;
            }
            json_t *text = json_object_get(sum, "text"), *more = json_object_get(piece, "text");
            json_object_set_new(sum, "text", json_sprintf("%s%s", json_string_value(text), json_string_value(more)));
            json_t *logprobs = json_object_get(sum, "logprobs");
            for (size_t l = 0; json_is_object(logprobs) && l < 4; l++)
                json_array_extend(json_object_get(logprobs, lists[l]),
                                  json_object_get(json_object_get(piece, "logprobs"), lists[l]));
            if (json_object_get(sum, "token_ids"))
                json_array_extend(json_object_get(sum, "token_ids"), json_object_get(piece, "token_ids"));
            const char *name;
            json_t *figures;
            json_object_foreach(json_object_get(sum, "compute_details"), name, figures)
                json_array_extend(figures, json_object_get(json_object_get(piece, "compute_details"), name));
            ck_assert(json_is_null(json_object_get(sum, "finish_reason")));
            json_object_set(sum, "finish_reason", json_object_get(piece, "finish_reason"));
        }
    }
    sse_free(&sse);
    answer_free(&answer);
    return choices;
}

START_TEST(streams_add_up) {
    static const char *const fields[] = {
        "\"prompt\":\"hi\",\"logprobs\":5",
        "\"prompt\":\"hi\",\"logprobs\":3,\"echo\":true",
        "\"prompt\":\"hi\",\"echo\":true",
        "\"prompt\":\"hi\",\"echo\":true,\"max_tokens\":0",
        "\"prompt\":\"hi\",\"echo\":true,\"max_tokens\":0,\"logprobs\":1",
        "\"prompt\":[[104,105],[65,66,67]],\"n\":2,\"echo\":true,\"logprobs\":2,\"return_token_ids\":true",
        "\"prompt\":\"hi\",\"return_token_ids\":true,\"compute_details\":true",
        "\"prompt\":\"hi\",\"logprobs\":2,\"echo\":true,\"compute_details\":true",
        "\"prompt\":\"hi\",\"logprobs\":2,\"stop\":[\"yz\",\"\\ud83d\\ude00y\"]",
        "\"prompt\":\"hi\",\"logprobs\":2,\"stop\":\"z\",\"include_stop_str_in_output\":true",
        "\"prompt\":\"hi\",\"logprobs\":2,\"stop_token_ids\":[121],\"include_stop_str_in_output\":true",
        "\"prompt\":\"hi\",\"logprobs\":2,\"stop_token_ids\":[121]",
        // Longer than one step reads.
        ("\"prompt\":\"0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123"
         "456789012345678901234567890123456789012345678901234567890123456789\",\"echo\":true,\"logprobs\":1"),
        // The other choices are ahead of the first, which tells the prompt.
        ("\"prompt\":\"0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123"
         "456789012345678901234567890123456789012345678901234567890123456789\",\"echo\":true,\"logprobs\":1,\"n\":3"),
    };
    for (int script = 0; script < 2; script++)
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
            char body[600];
            atomic_store(&fake_engine()->script, script ? "x\xf0\x9f\x98\x80yz\xff" : NULL);
            snprintf(body, sizeof body, "{%s,\"seed\":5%s}", fields[i],
                     strstr(fields[i], "max_tokens") ? "" : ",\"max_tokens\":9");
            json_t *json = complete(body), *plain = json_object_get(json, "choices");
            snprintf(body + strlen(body) - 1, 20, ",\"stream\":true}");
            json_t *streamed = gather(body);
            if (!json_equal(plain, streamed))
                ck_abort_msg("%s:\n%s\n%s", fields[i], json_dumps(plain, 0), json_dumps(streamed, 0));
            json_decref(streamed);
            json_decref(json);
        }
    atomic_store(&fake_engine()->script, NULL);
}
END_TEST

// Cut in the middle of a character, and with text held back that may still become a stop string: neither is lost, and
// both ways tell the same.
START_TEST(cut_texts) {
    static const struct {
        int max_tokens;
        const char *text;
    } cases[] = {{1, "x"},
                 {2, "x\xef\xbf\xbd"},
                 {3, "x\xef\xbf\xbd"},
                 {4, "x\xef\xbf\xbd"},
                 {5, "x\xf0\x9f\x98\x80"},
                 {6, "x\xf0\x9f\x98\x80y"},
                 {7, "x\xf0\x9f\x98\x80yz"}};

    atomic_store(&fake_engine()->script, "x\xf0\x9f\x98\x80yz!");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[160];
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"max_tokens\":%d,\"stop\":[\"yzQ\",\"\\ud83d\\ude00yzz\"]}",
                 cases[i].max_tokens);
        json_t *json = complete(body), *plain = json_object_get(json, "choices");
        ck_assert_str_eq(text_of(json, 0), cases[i].text);
        ck_assert_str_eq(json_string_value(json_object_get(choice_of(json, 0), "finish_reason")), "length");
        snprintf(body + strlen(body) - 1, 20, ",\"stream\":true}");
        json_t *streamed = gather(body);
        ck_assert_msg(json_equal(plain, streamed), "%d tokens", cases[i].max_tokens);
        json_decref(streamed);
        json_decref(json);
    }
    atomic_store(&fake_engine()->script, NULL);
}
END_TEST

START_TEST(token_ids_and_figures) {
    json_t *json = complete("{\"prompt\":\"hi\",\"max_tokens\":3,\"seed\":1,\"return_token_ids\":true,"
                            "\"compute_details\":true}");
    json_t *choice = choice_of(json, 0), *prompt = json_object_get(choice, "prompt_token_ids");
    json_t *drawn = json_object_get(choice, "token_ids"), *figures = json_object_get(choice, "compute_details");

    ck_assert_uint_eq(json_array_size(prompt), 3);
    ck_assert_int_eq(json_integer_value(json_array_get(prompt, 0)), FAKE_BOS);
    ck_assert_int_eq(json_integer_value(json_array_get(prompt, 2)), 'i');
    ck_assert_uint_eq(json_array_size(drawn), 3);
    for (size_t i = 0; i < 3; i++) {
        ck_assert_int_eq(json_integer_value(json_array_get(drawn, i)), text_of(json, 0)[i]);
        ck_assert_double_eq(json_number_value(json_array_get(json_object_get(figures, "cg_steps_mean"), i)), 2.5);
        ck_assert_int_eq(json_integer_value(json_array_get(json_object_get(figures, "cg_steps_max"), i)), 3);
        ck_assert_int_eq(json_integer_value(json_array_get(json_object_get(figures, "cg_unconverged"), i)), 0);
    }
    json_decref(json);
    json = complete("{\"prompt\":\"hi\",\"max_tokens\":3}");
    ck_assert_ptr_null(json_object_get(choice_of(json, 0), "token_ids"));
    ck_assert_ptr_null(json_object_get(choice_of(json, 0), "compute_details"));
    json_decref(json);
}
END_TEST

// ---- best_of -------------------------------------------------------------------------------------------------------

static double mean_of(const char *text) {
    double sum = 0;
    for (long i = 0; text[i]; i++)
        sum += (double)fake_engine_logprob(text[i], 3 + i);
    return sum / (double)strlen(text);
}

START_TEST(best_of_returns_the_best) {
    json_t *all = complete("{\"prompt\":[\"hi\",\"ho\"],\"max_tokens\":5,\"seed\":8,\"n\":6}");
    json_t *best = complete("{\"prompt\":[\"hi\",\"ho\"],\"max_tokens\":5,\"seed\":8,\"n\":3,\"best_of\":6}");

    ck_assert_uint_eq(json_array_size(json_object_get(best, "choices")), 6);
    for (size_t prompt = 0; prompt < 2; prompt++) {
        double last = 1;
        for (size_t k = 0; k < 3; k++) {
            const size_t index = prompt * 3 + k;
            const double mean = mean_of(text_of(best, index));
            size_t better = 0, same = 0;
            ck_assert_int_eq(json_integer_value(json_object_get(choice_of(best, index), "index")), (int)index);
            ck_assert(json_is_null(json_object_get(choice_of(best, index), "logprobs")));
            ck_assert(mean <= last);
            last = mean;
            for (size_t i = 0; i < 6; i++) {
                better += mean_of(text_of(all, prompt * 6 + i)) > mean;
                same += strcmp(text_of(all, prompt * 6 + i), text_of(best, index)) == 0;
            }
            ck_assert_uint_eq(same, 1);
            ck_assert_uint_le(better, k);
        }
    }
    // All that was made counts.
    json_t *usage = json_object_get(best, "usage");
    ck_assert_int_eq(json_integer_value(json_object_get(usage, "completion_tokens")), 60);
    ck_assert_int_eq(json_integer_value(json_object_get(usage, "prompt_tokens")), 6);
    json_decref(all);
    json_decref(best);

    answer answer;
    fixture_post(&server, "/v1/completions", "{\"best_of\":2,\"n\":2,\"stream\":true}", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    fixture_post(&server, "/v1/completions", "{\"best_of\":3,\"n\":2,\"stream\":true}", &answer);
    expect_error(&answer, 400, "best_of", NULL);
    answer_free(&answer);
}
END_TEST

// A prompt of many chunks is read by one choice, but for its last chunk, and is told and counted once.
START_TEST(choices_share_their_prompt) {
    enum { COUNT = 1000, CHOICES = 16, CHUNK = 64, REST = COUNT % CHUNK };
    char body[COUNT * 2 + 200], prompt[COUNT + 1] = "";

    memset(prompt, 'p', COUNT);
    for (int stream = 0; stream < 2; stream++) {
        atomic_store(&fake_engine()->prompt_tokens, 0);
        const double before = metric(&server, "mesa_tokens_total{model=\"demo\",kind=\"prompt\"}");
        snprintf(body, sizeof body,
                 "{\"prompt\":\"%s\",\"add_special_tokens\":false,\"n\":%d,\"seed\":3,\"max_tokens\":20%s}", prompt,
                 CHOICES, stream ? ",\"stream\":true,\"stream_options\":{\"include_usage\":true}" : "");
        answer answer;
        fixture_post(&server, "/v1/completions", body, &answer);
        ck_assert_int_eq(answer.status, 200);
        sse sse = {0};
        json_t *json = NULL;
        if (stream)
            sse_parse(&answer, &sse);
        else
            json = answer_json(&answer);
        json_t *last = stream ? json_array_get(sse.events, json_array_size(sse.events) - 1) : json;
        json_t *usage = json_object_get(last, "usage");
        ck_assert_int_eq(json_integer_value(json_object_get(usage, "prompt_tokens")), COUNT);
        ck_assert_int_eq(json_integer_value(json_object_get(usage, "completion_tokens")), CHOICES * 20);
        ck_assert_int_eq(
            json_integer_value(json_object_get(json_object_get(usage, "prompt_tokens_details"), "cached_tokens")), 0);
        for (unsigned k = 0; k < CHOICES; k++) {
            char wanted[21], *text = stream ? sse_text(&sse, (int)k) : strdup(text_of(json, k));
            fake_engine_text(3, k, COUNT, 20, wanted);
            ck_assert_str_eq(text, wanted);
            free(text);
        }
        ck_assert_int_eq(atomic_load(&fake_engine()->last_choices), CHOICES);
        ck_assert_int_eq(atomic_load(&fake_engine()->prompt_tokens), COUNT + (CHOICES - 1) * REST);
        ck_assert_double_eq(metric(&server, "mesa_tokens_total{model=\"demo\",kind=\"prompt\"}") - before,
                            COUNT + (CHOICES - 1) * REST);
        ck_assert_double_eq(metric(&server, "mesa_tokens_total{model=\"demo\",kind=\"cached\"}"), 0);
        if (stream)
            sse_free(&sse);
        json_decref(json);
        answer_free(&answer);
    }
}
END_TEST

// One choice fails: so does the request, and the others end.
START_TEST(choices_fail_together) {
    answer answer;

    atomic_store(&fake_engine()->numeric_at, 5);
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"n\":3,\"max_tokens\":2000}", &answer);
    expect_error(&answer, 500, NULL, "numeric");
    answer_free(&answer);
    wait_engine_empty();
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"n\":3,\"max_tokens\":2000,\"stream\":true}",
                 &answer);
    ck_assert_int_eq(answer.status, 200);
    ck_assert_ptr_nonnull(strstr(answer.body, "\"code\":\"numeric\""));
    answer_free(&answer);
    atomic_store(&fake_engine()->numeric_at, 0);
    wait_engine_empty();
}
END_TEST

// ---- the engine's part ---------------------------------------------------------------------------------------------

START_TEST(fields_reach_the_engine) {
    fake_engine_controls *engine = fake_engine();

    json_decref(complete("{\"prompt\":\"hi\",\"max_tokens\":7,\"min_tokens\":4,\"presence_penalty\":-1.5,"
                         "\"frequency_penalty\":0.25,\"repetition_penalty\":1.5,\"priority\":-9,"
                         "\"logit_bias\":{\"5\":-100,\"7\":1},\"logprobs\":2,\"echo\":true}"));
    ck_assert_int_eq(atomic_load(&engine->last_min_tokens), 4);
    ck_assert_int_eq(atomic_load(&engine->last_presence), -150);
    ck_assert_int_eq(atomic_load(&engine->last_frequency), 25);
    ck_assert_int_eq(atomic_load(&engine->last_repetition), 150);
    ck_assert_int_eq(atomic_load(&engine->last_priority), -9);
    ck_assert_int_eq(atomic_load(&engine->last_bias_count), 2);
    ck_assert_int_eq(atomic_load(&engine->last_logprobs), 2);
    ck_assert_int_eq(atomic_load(&engine->last_prompt_logprobs), 1);
    ck_assert_int_eq(atomic_load(&engine->last_owner), 0);
    json_decref(complete("{\"prompt\":\"hi\"}"));
    ck_assert_int_eq(atomic_load(&engine->last_logprobs), -1);
    ck_assert_int_eq(atomic_load(&engine->last_prompt_logprobs), 0);
    ck_assert_int_eq(atomic_load(&engine->last_repetition), 100);
    json_decref(complete("{\"prompt\":\"hi\",\"n\":1,\"best_of\":2}"));
    ck_assert_int_eq(atomic_load(&engine->last_logprobs), 0); // to compare by

    json_t *json = complete("{\"prompt\":\"hi\",\"logit_bias\":{\"122\":100},\"max_tokens\":4}");
    ck_assert_str_eq(text_of(json, 0), "zzzz");
    json_decref(json);
    atomic_store(&engine->eos_at, 2);
    static const struct {
        const char *fields;
        size_t length;
        const char *reason;
    } cases[] = {{"\"max_tokens\":6", 1, "stop"},
                 {"\"max_tokens\":6,\"min_tokens\":4", 4, "stop"},
                 {"\"max_tokens\":6,\"min_tokens\":6", 6, "length"},
                 {"\"max_tokens\":6,\"ignore_eos\":true", 6, "length"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[128];
        snprintf(body, sizeof body, "{\"prompt\":\"hi\",%s}", cases[i].fields);
        json = complete(body);
        ck_assert_uint_eq(strlen(text_of(json, 0)), cases[i].length);
        ck_assert_str_eq(json_string_value(json_object_get(choice_of(json, 0), "finish_reason")), cases[i].reason);
        json_decref(json);
    }
    atomic_store(&engine->eos_at, 0);
}
END_TEST

// A bias of every id, as many ids as stop strings may be, and the most alternatives.
START_TEST(the_most_of_everything) {
    char *body = calloc(1, 1 << 16), *at = body;

    at += sprintf(at, "{\"prompt\":\"hi\",\"max_tokens\":3,\"logprobs\":20,\"logit_bias\":{\"0\":-100");
    for (int i = 1; i < FAKE_VOCABULARY; i++)
        at += sprintf(at, ",\"%d\":-100", i);
    at += sprintf(at, "},\"stop_token_ids\":[1");
    for (int i = 1; i < 64; i++)
        at += sprintf(at, ",1");
    sprintf(at, "]}");
    json_t *json = complete(body);
    check_lengths(choice_of(json, 0), 3);
    json_decref(json);
    free(body);
}
END_TEST

START_TEST(answers_are_bounded) {
    answer answer;
    fixture_post(&server, "/v1/completions",
                 "{\"prompt\":\"hi\",\"max_tokens\":65536,\"n\":128,\"logprobs\":20,\"best_of\":128}", &answer);
    expect_error(&answer, 400, "logprobs", "answer_too_large");
    answer_free(&answer);
}
END_TEST

START_TEST(tokenizer_is_described) {
    answer answer;
    fixture_get(&server, "/tokenizer_info", &answer);
    ck_assert_int_eq(answer.status, 200);
    json_t *json = answer_json(&answer);
    ck_assert_str_eq(json_string_value(json_object_get(json, "bos_token")), "<s>");
    ck_assert_str_eq(json_string_value(json_object_get(json, "eos_token")), "</s>");
    ck_assert_int_eq(json_integer_value(json_object_get(json, "eos_token_id")), FAKE_EOS);
    ck_assert(json_is_null(json_object_get(json, "pad_token")));
    ck_assert(json_is_null(json_object_get(json, "chat_template")));
    ck_assert_ptr_nonnull(json_object_get(json, "chat_template"));
    json_decref(json);
    answer_free(&answer);
}
END_TEST

static Suite *completions_suite(void) {
    Suite *suite = suite_create("completions");
    TCase *tests = tcase_create("completions");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, logprobs_of_a_completion);
    tcase_add_test(tests, names_and_numbers_of_alternatives);
    tcase_add_test(tests, without_logprobs_there_are_none);
    tcase_add_test(tests, scoring_requests);
    tcase_add_test(tests, echo_gives_the_prompt_back);
    tcase_add_test(tests, text_offsets);
    tcase_add_test(tests, streams_add_up);
    tcase_add_test(tests, cut_texts);
    tcase_add_test(tests, token_ids_and_figures);
    tcase_add_test(tests, best_of_returns_the_best);
    tcase_add_test(tests, choices_share_their_prompt);
    tcase_add_test(tests, choices_fail_together);
    tcase_add_test(tests, fields_reach_the_engine);
    tcase_add_test(tests, the_most_of_everything);
    tcase_add_test(tests, answers_are_bounded);
    tcase_add_test(tests, tokenizer_is_described);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(completions_suite)

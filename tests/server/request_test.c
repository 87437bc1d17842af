// SPDX-License-Identifier: Apache-2.0
// Request bodies against the field table: what is accepted and how it reads, what is refused and which field is named.
// Refusals must also keep the body's bytes out of their message: bodies carry a canary for that.
#include <stdlib.h>
#include <string.h>

#include "server/request.h"
#include "tests/check_main.h"

static const srv_bounds bounds = {.max_tokens = 1000,
                                  .max_prompt_tokens = 100,
                                  .max_prompts = 8,
                                  .max_values = 5000,
                                  .max_cg_steps = 256,
                                  .max_loops = 256,
                                  .allow_exact = true};

typedef struct refusal {
    const char *body;
    int status;
    const char *param; // NULL: none
} refusal;

static void expect_refusals(const refusal *cases, size_t count, const srv_bounds *limits) {
    for (size_t i = 0; i < count; i++) {
        srv_request request;
        srv_problem problem = {0};
        const eng_status status = srv_request_parse(cases[i].body, strlen(cases[i].body), limits, &request, &problem);
        ck_assert_msg(status != ENG_OK, "accepted: %s", cases[i].body);
        ck_assert_msg(problem.status == cases[i].status, "%d: %s", problem.status, cases[i].body);
        ck_assert_msg(strcmp(problem.param ? problem.param : "", cases[i].param ? cases[i].param : "") == 0,
                      "param %s: %s", problem.param, cases[i].body);
        ck_assert_msg(problem.message[0] && strstr(problem.message, "CANARY") == NULL, "%s", problem.message);
        srv_request_free(&request);
    }
}
#define EXPECT_REFUSALS(cases) expect_refusals(cases, sizeof cases / sizeof *cases, &bounds)

static void expect_accepted(const char *body, srv_request *request) {
    srv_problem problem = {0};
    const eng_status status = srv_request_parse(body, strlen(body), &bounds, request, &problem);
    ck_assert_msg(status == ENG_OK, "%s: %s (%s)", body, problem.message, problem.param);
}

static const refusal bad_fields[] = {
    {"{\"max_tokens\":-1}", 400, "max_tokens"},
    {"{\"max_tokens\":-223}", 400, "max_tokens"},
    {"{\"max_tokens\":1001}", 400, "max_tokens"},
    {"{\"max_tokens\":9223372036854775807}", 400, "max_tokens"},
    {"{\"max_tokens\":1e18}", 400, "max_tokens"},
    {"{\"max_tokens\":1.5}", 400, "max_tokens"},
    {"{\"max_tokens\":\"1\"}", 400, "max_tokens"},
    {"{\"max_tokens\":true}", 400, "max_tokens"},
    {"{\"temperature\":1e308}", 400, "temperature"},
    {"{\"temperature\":-1}", 400, "temperature"},
    {"{\"temperature\":\"NaN\"}", 400, "temperature"},
    {"{\"temperature\":100.001}", 400, "temperature"},
    {"{\"degrade\":true}", 400, "degrade"},
    {"{\"degrade\":[]}", 400, "degrade"},
    {"{\"degrade\":{\"cg_tolerance\":1.5}}", 400, "degrade.cg_tolerance"},
    {"{\"degrade\":{\"cg_tolerance\":\"0.1\"}}", 400, "degrade.cg_tolerance"},
    {"{\"degrade\":{\"cg_max_steps\":257}}", 400, "degrade.cg_max_steps"},
    {"{\"degrade\":{\"cg_max_steps\":1.5}}", 400, "degrade.cg_max_steps"},
    {"{\"degrade\":{\"exit_threshold\":-0.1}}", 400, "degrade.exit_threshold"},
    {"{\"top_p\":1.0000002}", 400, "top_p"},
    {"{\"top_p\":-0.5}", 400, "top_p"},
    {"{\"min_p\":1e308}", 400, "min_p"},
    {"{\"top_k\":-2}", 400, "top_k"},
    {"{\"top_k\":1e10}", 400, "top_k"},
    {"{\"n\":0}", 400, "n"},
    {"{\"n\":129}", 400, "n"},
    {"{\"n\":3,\"best_of\":2}", 400, "best_of"},
    {"{\"best_of\":2,\"stream\":true}", 400, "best_of"},
    {"{\"best_of\":129}", 400, "best_of"},
    {"{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\"],\"best_of\":128,\"n\":1,\"max_tokens\":1001}", 400,
     "max_tokens"},
    {"{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\"],\"n\":128}", 400, "prompt"},
    {"{\"echo\":1}", 400, "echo"},
    {"{\"logprobs\":-1}", 400, "logprobs"},
    {"{\"logprobs\":21}", 400, "logprobs"},
    {"{\"logprobs\":true}", 400, "logprobs"},
    {"{\"logprobs\":\"1\"}", 400, "logprobs"},
    {"{\"logprobs\":1.5}", 400, "logprobs"},
    {"{\"logit_bias\":[]}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"-1\":5}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"1e1\":5}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\" 5\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5 \":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"05\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"+5\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5.0\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"CANARY\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"2147483648\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"99999999999999999999\":1}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5\":\"x\"}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5\":null}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5\":1e9}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5\":1e308}}", 400, "logit_bias"},
    {"{\"logit_bias\":{\"5\":100.5}}", 400, "logit_bias"},
    {"{\"presence_penalty\":2.5}", 400, "presence_penalty"},
    {"{\"presence_penalty\":\"0\"}", 400, "presence_penalty"},
    {"{\"frequency_penalty\":-2.01}", 400, "frequency_penalty"},
    {"{\"frequency_penalty\":1e308}", 400, "frequency_penalty"},
    {"{\"repetition_penalty\":0}", 400, "repetition_penalty"},
    {"{\"repetition_penalty\":10.5}", 400, "repetition_penalty"},
    {"{\"min_tokens\":-1}", 400, "min_tokens"},
    {"{\"min_tokens\":17}", 400, "min_tokens"},
    {"{\"min_tokens\":5,\"max_tokens\":4}", 400, "min_tokens"},
    {"{\"ignore_eos\":\"yes\"}", 400, "ignore_eos"},
    {"{\"stop_token_ids\":5}", 400, "stop_token_ids"},
    {"{\"stop_token_ids\":{}}", 400, "stop_token_ids"},
    {"{\"stop_token_ids\":[-1]}", 400, "stop_token_ids"},
    {"{\"stop_token_ids\":[1.5]}", 400, "stop_token_ids"},
    {"{\"stop_token_ids\":[\"1\"]}", 400, "stop_token_ids"},
    {"{\"stop_token_ids\":[2147483648]}", 400, "stop_token_ids"},
    {"{\"include_stop_str_in_output\":0}", 400, "include_stop_str_in_output"},
    {"{\"return_token_ids\":0}", 400, "return_token_ids"},
    {"{\"priority\":2147483648}", 400, "priority"},
    {"{\"priority\":-2147483649}", 400, "priority"},
    {"{\"priority\":0.5}", 400, "priority"},
    {"{\"compute_details\":1}", 400, "compute_details"},
    {"{\"user\":5}", 400, "user"},
    {"{\"best_of\":0}", 400, "best_of"},
    {"{\"seed\":\"7\"}", 400, "seed"},
    {"{\"seed\":1.5}", 400, "seed"},
    {"{\"stream\":1}", 400, "stream"},
    {"{\"stream\":\"true\"}", 400, "stream"},
    {"{\"stream_options\":{\"include_usage\":true}}", 400, "stream_options"},
    {"{\"stream\":true,\"stream_options\":[]}", 400, "stream_options"},
    {"{\"stream\":true,\"stream_options\":{\"include_usage\":1}}", 400, "stream_options.include_usage"},
    {"{\"stop\":[\"\"]}", 400, "stop"},
    {"{\"stop\":\"\"}", 400, "stop"},
    {"{\"stop\":5}", 400, "stop"},
    {"{\"stop\":[\"a\",5]}", 400, "stop"},
    {"{\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\","
     "\"h\"]}",
     400, "stop"},
    {"{\"model\":5}", 400, "model"},
    {"{\"model\":\"a\\u0000b\"}", 404, "model"},
    {"{\"cg_tolerance\":-0.1}", 400, "cg_tolerance"},
    {"{\"cg_tolerance\":1e9}", 400, "cg_tolerance"},
    {"{\"cg_max_steps\":-1}", 400, "cg_max_steps"},
    {"{\"cg_max_steps\":257}", 400, "cg_max_steps"},
    {"{\"cg_max_steps\":4.5}", 400, "cg_max_steps"},
    {"{\"cg_max_steps\":1e308}", 400, "cg_max_steps"},
    {"{\"cg_max_steps\":9223372036854775807}", 400, "cg_max_steps"},
    {"{\"cg_max_steps\":\"4\"}", 400, "cg_max_steps"},
    {"{\"cg_mode\":\"fixed\"}", 400, "cg_mode"},
    {"{\"cg_mode\":\"exact\\u0000\"}", 400, "cg_mode"},
    {"{\"exit_threshold\":1.1}", 400, "exit_threshold"},
    {"{\"exit_threshold\":\"0.5\"}", 400, "exit_threshold"},
    {"{\"exit_threshold\":[]}", 400, "exit_threshold"},
    {"{\"max_loops\":0}", 400, "max_loops"},
    {"{\"max_loops\":true}", 400, "max_loops"},
    {"{\"on_unconverged\":\"explode\"}", 400, "on_unconverged"},
    {"{\"add_special_tokens\":0}", 400, "add_special_tokens"},
};

START_TEST(refuses_bad_fields) {
    EXPECT_REFUSALS(bad_fields);
}
END_TEST

START_TEST(refuses_bad_prompts) {
    static const refusal cases[] = {
        {"{\"prompt\":[]}", 400, "prompt"},
        {"{\"prompt\":[[]]}", 400, "prompt"},
        {"{\"prompt\":[[],[1]]}", 400, "prompt"},
        {"{\"prompt\":[[1],[]]}", 400, "prompt"},
        {"{\"prompt\":{}}", 400, "prompt"},
        {"{\"prompt\":5}", 400, "prompt"},
        {"{\"prompt\":true}", 400, "prompt"},
        {"{\"prompt\":[1,\"CANARY\"]}", 400, "prompt"},
        {"{\"prompt\":[\"a\",1]}", 400, "prompt"},
        {"{\"prompt\":[\"a\",[1]]}", 400, "prompt"},
        {"{\"prompt\":[[1],\"a\"]}", 400, "prompt"},
        {"{\"prompt\":[[1.5]]}", 400, "prompt"},
        {"{\"prompt\":[-1]}", 400, "prompt"},
        {"{\"prompt\":[2147483648]}", 400, "prompt"},
        {"{\"prompt\":[null]}", 400, "prompt"},
        {"{\"prompt\":[{}]}", 400, "prompt"},
        {"{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\"]}", 400, "prompt"},
    };
    EXPECT_REFUSALS(cases);
}
END_TEST

// What the contract lists but this version does not build must not be ignored in silence.
START_TEST(refuses_unbuilt_by_name) {
    static const refusal cases[] = {
        {"{\"session_rollback\":true}", 400, "session_rollback"},
        {"{\"tool_choice\":\"required\"}", 400, "tool_choice"},
        {"{\"suffix\":\"x\"}", 400, "suffix"},
        {"{\"session\":5}", 400, "session"},
        {"{\"session_position\":1}", 400, "session_position"},
        {"{\"response_format\":{\"type\":\"json_object\"}}", 400, "response_format"},
        {"{\"response_format\":5}", 400, "response_format"},
        {"{\"tools\":[{}]}", 400, "tools"},
        {"{\"guided_regex\":\"a\"}", 400, "guided_regex"},
        {"{\"grammar\":\"root\"}", 400, "grammar"},
        {"{\"prompt_embeds\":\"x\"}", 400, "prompt_embeds"},
    };
    EXPECT_REFUSALS(cases);
}
END_TEST

START_TEST(refuses_what_is_no_json) {
    static const refusal cases[] = {
        {"", 400, NULL},
        {"   ", 400, NULL},
        {"\xef\xbb\xbf{}", 400, NULL},
        {"{}x", 400, NULL},
        {"{}{}", 400, NULL},
        {"{\"prompt\":\"a\",}", 400, NULL},
        {"{'prompt':'CANARY'}", 400, NULL},
        {"{/*CANARY*/}", 400, NULL},
        {"{\"prompt\":\"a\nCANARY\"}", 400, NULL},
        {"[]", 400, NULL},
        {"\"CANARY\"", 400, NULL},
        {"1", 400, NULL},
        {"null", 400, NULL},
        {"{\"prompt\":\"CANARY\xff\"}", 400, NULL},
        {"{\"prompt\":\"\xc0\xaf\"}", 400, NULL},
        {"{\"prompt\":\"\xed\xa0\x80\"}", 400, NULL},
        {"{\"prompt\":\"\\ud83d\",\"stream\":true}", 400, NULL},
        {"{\"prompt\":\"x \\ude00 y\"}", 400, NULL},
        {"{\"prompt\":\"\\ud83d\\u0041\"}", 400, NULL},
        {"{\"a\\u0000b\":1}", 400, NULL},
        {"{\"prompt\":\"a\",\"prompt\":\"b\"}", 400, NULL},
        {"{\"logit_bias\":{\"1\":1,\"1\":2}}", 400, NULL},
        {"{\"temperature\":NaN}", 400, NULL},
        {"{\"temperature\":Infinity}", 400, NULL},
        {"{\"temperature\":1e999}", 400, NULL},
        {"{\"seed\":9223372036854775808}", 400, NULL},
    };
    EXPECT_REFUSALS(cases);
}
END_TEST

START_TEST(survives_depth_and_width) {
    static const size_t depths[] = {100, 2047, 2048, 60000};
    static const struct {
        const char *open, *close, *before;
    } forms[] = {{"[", "]", "{\"prompt\":"}, {"[", "]", "{\"unknown\":"}, {"{\"a\":", "}", "{\"prompt\":"}};

    for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
        for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
            const size_t open = strlen(forms[f].open);
            char *body = calloc(1, depths[d] * (open + 1) + 64), *at = body;
            at += sprintf(at, "%s", forms[f].before);
            for (size_t i = 0; i < depths[d]; i++)
                at += sprintf(at, "%s", forms[f].open);
            if (forms[f].open[0] == '{')
                at += sprintf(at, "1");
            for (size_t i = 0; i < depths[d]; i++)
                at += sprintf(at, "%s", forms[f].close);
            sprintf(at, "}");
            srv_request request;
            srv_problem problem = {0};
            const eng_status status = srv_request_parse(body, strlen(body), &bounds, &request, &problem);
            // Under an unknown key what the JSON library takes is accepted.
            const bool unknown = strstr(forms[f].before, "unknown") && depths[d] < 2048;
            ck_assert_msg((status == ENG_OK) == unknown, "depth %zu, form %zu: %s", depths[d], f, problem.message);
            srv_request_free(&request);
            free(body);
        }

    char *wide = malloc(20000);
    strcpy(wide, "{\"unknown\":[0");
    for (int i = 0; i < 5000; i++)
        strcat(wide + 2 * (size_t)i, ",0");
    strcat(wide, "]}");
    const refusal cases[] = {{wide, 400, NULL}};
    EXPECT_REFUSALS(cases);
    free(wide);
}
END_TEST

START_TEST(null_and_neutral_count_as_absent) {
    static const char *const bodies[] = {
        "{}",
        "{\"prompt\":null,\"max_tokens\":null,\"temperature\":null,\"top_p\":null,\"top_k\":null,\"min_p\":null,\"n\":"
        "null,"
        "\"best_of\":null,\"stop\":null,\"seed\":null,\"logit_bias\":null,\"stream\":null,\"logprobs\":null,\"echo\":"
        "null,"
        "\"user\":null,\"stream_options\":null,\"exit_threshold\":null,\"max_loops\":null,\"cg_tolerance\":null,"
        "\"cg_max_steps\":null,\"cg_mode\":null,\"on_unconverged\":null,\"session\":null,\"suffix\":null,\"tools\":"
        "null,"
        "\"response_format\":null,\"model\":null,\"add_special_tokens\":null,\"guided_json\":null}",
        "{\"echo\":false,\"logit_bias\":{},\"presence_penalty\":0,\"frequency_penalty\":0.0,\"repetition_penalty\":1,"
        "\"min_tokens\":0,\"ignore_eos\":false,\"stop_token_ids\":[],\"include_stop_str_in_output\":false,\"suffix\":"
        "\"\","
        "\"return_token_ids\":false,\"response_format\":{\"type\":\"text\"},\"tools\":[],\"tool_choice\":\"none\","
        "\"best_of\":1,\"n\":1,\"stop\":[],\"user\":\"me\",\"unknown\":{\"x\":[1]},\"degrade\":{},\"priority\":0}",
    };
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        srv_request request;
        expect_accepted(bodies[i], &request);
        ck_assert_ptr_null(request.model);
        ck_assert_uint_eq(request.prompt_count, 1);
        ck_assert_str_eq(request.prompts[0].text, "");
        ck_assert(request.add_special_tokens && !request.stream && !request.seed_given);
        ck_assert_int_eq(request.max_tokens, 16);
        ck_assert_int_eq(request.n, 1);
        ck_assert_float_eq(request.temperature, 1);
        ck_assert_float_eq(request.top_p, 1);
        ck_assert_float_eq(request.min_p, 0);
        ck_assert_int_eq(request.top_k, 0);
        ck_assert_uint_eq(request.stop_count, 0);
        ck_assert_uint_eq(request.knobs.given & ~(unsigned)SRV_GIVEN_DEGRADE, 0);
        ck_assert_int_eq(request.best_of, 1);
        ck_assert_int_eq(request.logprobs, -1);
        ck_assert_float_eq(request.repetition_penalty, 1);
        ck_assert(request.presence_penalty == 0 && request.frequency_penalty == 0);
        ck_assert(!request.echo && !request.ignore_eos && !request.include_stop && !request.return_token_ids);
        ck_assert(request.min_tokens == 0 && request.stop_id_count == 0 && request.bias_count == 0);
        srv_request_free(&request);
    }
}
END_TEST

START_TEST(reads_every_field) {
    srv_request request;

    expect_accepted("{\"model\":\"m\",\"prompt\":\"a\\u0000b\",\"add_special_tokens\":false,\"max_tokens\":1.0,\"n\":2,"
                    "\"best_of\":2,\"temperature\":0.5,\"top_p\":0,\"top_k\":-1,\"min_p\":0.25,\"seed\":-7,"
                    "\"stop\":[\"x\",\"y\\u0000z\"],\"stream\":true,"
                    "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true,\"other\":1},"
                    "\"cg_tolerance\":1e-6,\"cg_max_steps\":9,\"cg_mode\":\"steps\",\"exit_threshold\":0.75,"
                    "\"max_loops\":3,\"on_unconverged\":\"error\","
                    "\"degrade\":{\"cg_tolerance\":0.5,\"cg_max_steps\":2,\"exit_threshold\":0.25,\"other\":1}}",
                    &request);
    ck_assert_uint_eq(request.knobs.degrade.given,
                      SRV_GIVEN_CG_TOLERANCE | SRV_GIVEN_CG_MAX_STEPS | SRV_GIVEN_EXIT_THRESHOLD);
    ck_assert_float_eq(request.knobs.degrade.cg_tolerance, 0.5f);
    ck_assert_int_eq(request.knobs.degrade.cg_max_steps, 2);
    ck_assert_float_eq(request.knobs.degrade.exit_threshold, 0.25f);
    ck_assert_str_eq(request.model, "m");
    ck_assert_uint_eq(request.prompts[0].length, 3);
    ck_assert_mem_eq(request.prompts[0].text, "a\0b", 4);
    ck_assert(!request.add_special_tokens && request.stream && request.include_usage && request.continuous_usage);
    ck_assert_int_eq(request.max_tokens, 1);
    ck_assert_int_eq(request.n, 2);
    ck_assert_float_eq(request.temperature, 0.5f);
    ck_assert_float_eq(request.top_p, 0);
    ck_assert_int_eq(request.top_k, -1);
    ck_assert_float_eq(request.min_p, 0.25f);
    ck_assert(request.seed_given && request.seed == -7);
    ck_assert_uint_eq(request.stop_count, 2);
    ck_assert_uint_eq(request.stops[1].length, 3);
    ck_assert_mem_eq(request.stops[1].bytes, "y\0z", 3);
    ck_assert_uint_eq(request.knobs.given, 127);
    ck_assert_float_eq(request.knobs.cg_tolerance, 1e-6f);
    ck_assert_int_eq(request.knobs.cg_max_steps, 9);
    ck_assert_int_eq(request.knobs.cg_mode, ENG_CG_STEPS);
    ck_assert_float_eq(request.knobs.exit_threshold, 0.75f);
    ck_assert_int_eq(request.knobs.max_loops, 3);
    ck_assert(request.knobs.fail_unconverged);
    srv_request_free(&request);

    expect_accepted("{\"max_tokens\":9,\"n\":2,\"best_of\":4,\"echo\":true,\"logprobs\":20.0,\"min_tokens\":9,"
                    "\"logit_bias\":{\"0\":-100,\"2147483647\":100,\"17\":0.5},\"presence_penalty\":-2,"
                    "\"frequency_penalty\":2,\"repetition_penalty\":0.01,\"stop_token_ids\":[3,0],"
                    "\"include_stop_str_in_output\":true,\"ignore_eos\":true,\"return_token_ids\":true,"
                    "\"compute_details\":true,\"priority\":-2147483648}",
                    &request);
    ck_assert(request.n == 2 && request.best_of == 4 && request.echo && request.logprobs == 20);
    ck_assert_int_eq(request.min_tokens, 9);
    ck_assert_uint_eq(request.bias_count, 3);
    ck_assert(request.biases[0].id == 0 && request.biases[0].bias == -100);
    ck_assert(request.biases[1].id == 2147483647 && request.biases[1].bias == 100);
    ck_assert_float_eq(request.presence_penalty, -2);
    ck_assert_float_eq(request.frequency_penalty, 2);
    ck_assert_float_eq(request.repetition_penalty, 0.01f);
    ck_assert(request.stop_id_count == 2 && request.stop_ids[0] == 3 && request.stop_ids[1] == 0);
    ck_assert(request.include_stop && request.ignore_eos && request.return_token_ids && request.compute_details);
    ck_assert_int_eq(request.priority, INT32_MIN);
    srv_request_free(&request);
}
END_TEST

// As many as may be, and one more.
START_TEST(lists_are_bounded) {
    static const struct {
        const char *before, *item, *after, *param;
        int most;
    } lists[] = {
        {"{\"stop\":[\"a\"", ",\"a\"", "]}", "stop", 16},
        {"{\"stop_token_ids\":[1", ",1", "]}", "stop_token_ids", 64},
        {"{\"prompt\":[\"a\"", ",\"a\"", "]}", "prompt", 8},
        {"{\"prompt\":[1", ",1", "]}", "prompt", 100},
        {"{\"prompt\":[[1", ",1", "]]}", "prompt", 100},
    };
    static const int more[] = {0, 1, 4000};

    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (size_t k = 0; k < sizeof more / sizeof *more; k++) {
            char *body = calloc(1, 65536), *at = body + sprintf(body, "%s", lists[i].before);
            for (int item = 1; item < lists[i].most + more[k]; item++)
                at += sprintf(at, "%s", lists[i].item);
            sprintf(at, "%s", lists[i].after);
            const refusal cases[] = {{body, 400, lists[i].param}};
            srv_request request;
            if (more[k])
                EXPECT_REFUSALS(cases);
            else {
                expect_accepted(body, &request);
                srv_request_free(&request);
            }
            free(body);
        }
}
END_TEST

START_TEST(reads_every_prompt_form) {
    srv_request request;

    expect_accepted("{\"prompt\":[9,11.0,8]}", &request);
    ck_assert_uint_eq(request.prompt_count, 1);
    ck_assert_uint_eq(request.prompts[0].count, 3);
    ck_assert_int_eq(request.prompts[0].ids[1], 11);
    ck_assert_ptr_null(request.prompts[0].text);
    srv_request_free(&request);

    expect_accepted("{\"prompt\":[[1,2],[3]]}", &request);
    ck_assert_uint_eq(request.prompt_count, 2);
    ck_assert_uint_eq(request.prompts[1].count, 1);
    ck_assert_int_eq(request.prompts[1].ids[0], 3);
    srv_request_free(&request);

    expect_accepted("{\"prompt\":[\"a\",\"\"]}", &request);
    ck_assert_uint_eq(request.prompt_count, 2);
    ck_assert_str_eq(request.prompts[0].text, "a");
    ck_assert_str_eq(request.prompts[1].text, "");
    srv_request_free(&request);

    expect_accepted("{\"prompt\":\"\\ud83d\\ude00\",\"stop\":\"end\"}", &request);
    ck_assert_str_eq(request.prompts[0].text, "\xf0\x9f\x98\x80");
    ck_assert_uint_eq(request.stop_count, 1);
    srv_request_free(&request);
}
END_TEST

START_TEST(borders_are_closed) {
    srv_request request;

    expect_accepted("{\"max_tokens\":0,\"temperature\":0,\"top_p\":-0.0,\"cg_tolerance\":1,\"cg_max_steps\":0,"
                    "\"exit_threshold\":1e-300,\"seed\":9223372036854775807}",
                    &request);
    ck_assert_int_eq(request.max_tokens, 0);
    ck_assert(request.seed == INT64_MAX);
    ck_assert_float_eq(request.knobs.exit_threshold, 0);
    srv_request_free(&request);
    expect_accepted("{\"max_tokens\":1000,\"temperature\":100,\"top_k\":2147483647,\"n\":128,\"seed\":1.0}", &request);
    ck_assert_int_eq(request.top_k, INT32_MAX);
    ck_assert(request.seed == 1);
    srv_request_free(&request);
    expect_accepted("{\"temperature\":1e-999,\"min_p\":-1e-320}", &request);
    ck_assert_float_eq(request.temperature, 0);
    srv_request_free(&request);
}
END_TEST

START_TEST(tolerance_zero_means_exact) {
    srv_request request;
    srv_bounds strict = bounds;

    expect_accepted("{\"cg_tolerance\":0}", &request);
    ck_assert_int_eq(request.knobs.cg_mode, ENG_CG_EXACT);
    ck_assert(request.knobs.given & SRV_GIVEN_CG_MODE);
    srv_request_free(&request);
    expect_accepted("{\"cg_tolerance\":0,\"cg_mode\":\"steps\",\"cg_max_steps\":3}", &request);
    ck_assert_int_eq(request.knobs.cg_mode, ENG_CG_STEPS);
    srv_request_free(&request);

    strict.allow_exact = false;
    strict.min_cg_tolerance = 1e-5;
    strict.max_cg_steps = 20;
    strict.max_loops = 2;
    static const refusal cases[] = {
        {"{\"cg_tolerance\":0}", 400, "cg_tolerance"},    {"{\"cg_mode\":\"exact\"}", 400, "cg_mode"},
        {"{\"cg_tolerance\":1e-6}", 400, "cg_tolerance"}, {"{\"cg_max_steps\":21}", 400, "cg_max_steps"},
        {"{\"max_loops\":3}", 400, "max_loops"},
    };
    expect_refusals(cases, sizeof cases / sizeof *cases, &strict);
}
END_TEST

START_TEST(token_requests) {
    srv_token_request request;
    srv_problem problem = {0};
    static const char tokenize[] = "{\"prompt\":\"hi\",\"add_special_tokens\":false,\"model\":\"m\"}";
    static const char detokenize[] = "{\"tokens\":[1,2]}", empty[] = "{\"tokens\":[]}";

    ck_assert_int_eq(
        srv_token_request_parse(SRV_REQUEST_TOKENIZE, tokenize, strlen(tokenize), &bounds, &request, &problem), ENG_OK);
    ck_assert_str_eq(request.prompt.text, "hi");
    ck_assert_str_eq(request.model, "m");
    ck_assert(!request.add_special_tokens);
    srv_token_request_free(&request);
    ck_assert_int_eq(
        srv_token_request_parse(SRV_REQUEST_DETOKENIZE, detokenize, strlen(detokenize), &bounds, &request, &problem),
        ENG_OK);
    ck_assert_uint_eq(request.prompt.count, 2);
    srv_token_request_free(&request);
    ck_assert_int_eq(srv_token_request_parse(SRV_REQUEST_DETOKENIZE, empty, strlen(empty), &bounds, &request, &problem),
                     ENG_OK);
    ck_assert_uint_eq(request.prompt.count, 0);
    srv_token_request_free(&request);

    ck_assert_int_ne(srv_token_request_parse(SRV_REQUEST_TOKENIZE, "{}", 2, &bounds, &request, &problem), ENG_OK);
    ck_assert_str_eq(problem.param, "prompt");
    srv_token_request_free(&request);
    problem = (srv_problem){0};
    ck_assert_int_ne(srv_token_request_parse(SRV_REQUEST_DETOKENIZE, "{}", 2, &bounds, &request, &problem), ENG_OK);
    ck_assert_str_eq(problem.param, "tokens");
    srv_token_request_free(&request);
}
END_TEST

static Suite *request_suite(void) {
    Suite *suite = suite_create("request");
    TCase *tests = tcase_create("request");
    tcase_add_test(tests, refuses_bad_fields);
    tcase_add_test(tests, refuses_bad_prompts);
    tcase_add_test(tests, refuses_unbuilt_by_name);
    tcase_add_test(tests, refuses_what_is_no_json);
    tcase_add_test(tests, survives_depth_and_width);
    tcase_add_test(tests, null_and_neutral_count_as_absent);
    tcase_add_test(tests, reads_every_field);
    tcase_add_test(tests, lists_are_bounded);
    tcase_add_test(tests, reads_every_prompt_form);
    tcase_add_test(tests, borders_are_closed);
    tcase_add_test(tests, tolerance_zero_means_exact);
    tcase_add_test(tests, token_requests);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(request_suite)

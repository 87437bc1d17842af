// SPDX-License-Identifier: Apache-2.0
// Command lines become requests: every field in its JSON type, every fault refused, and words for people without
// characters that a terminal obeys.
#include "clients/cli/options.h"

#include <string.h>

#include "clients/cli/answer.h"
#include "clients/cli/cli.h"
#include "clients/cli/terminal.h"
#include "tests/check_main.h"

enum { MAX_WORDS = 32 };

typedef struct parsed {
    cli_parsed result;
    json_t *body;
    const char *positional[2];
    int count;
    bool flag;
    int64_t integer;
    double real;
    cli_range range;
    cli_list list;
} parsed;

// Splits the line at spaces.
static parsed parse(const char *line_text) {
    static char text[1024];
    static char name[] = "test";
    char *argv[MAX_WORDS] = {name}, *rest = NULL;
    int argc = 1;
    parsed out = {.body = json_object()};

    snprintf(text, sizeof text, "%s", line_text);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        argv[argc++] = word;
    const cli_option options[] = {
        {"flag", NULL, CLI_FLAG, &out.flag, "a flag"},          {"integer", "N", CLI_INTEGER, &out.integer, "one"},
        {"real", "X", CLI_REAL, &out.real, "a number"},         {"range", "R", CLI_RANGE, &out.range, "a range"},
        {"list", "X,...", CLI_LIST, &out.list, "some numbers"},
    };
    const cli_command_line line = {.usage = "test",
                                   .summary = "A test.",
                                   .options = options,
                                   .option_count = sizeof options / sizeof *options,
                                   .takes_fields = true,
                                   .max_positional = 2};
    out.result = cli_options_parse(&line, argc, argv, out.body, out.positional, &out.count);
    return out;
}

static void expect_body(const char *line, const char *json) {
    parsed got = parse(line);
    json_t *wanted = json_loads(json, 0, NULL);

    ck_assert_ptr_nonnull(wanted);
    ck_assert_int_eq(got.result, CLI_PARSED);
    ck_assert_msg(json_equal(got.body, wanted), "%s: %s, want %s", line, json_dumps(got.body, JSON_COMPACT), json);
    json_decref(got.body);
    json_decref(wanted);
}

static void expect_wrong(const char *line) {
    parsed got = parse(line);
    ck_assert_msg(got.result == CLI_WRONG, "accepted: %s", line);
    json_decref(got.body);
}

START_TEST(test_fields) {
    expect_body("--max-tokens 5 --temperature 0.5 --seed -3", "{\"max_tokens\":5,\"temperature\":0.5,\"seed\":-3}");
    expect_body("--temperature 1", "{\"temperature\":1.0}");
    expect_body("--model=x=y --user u", "{\"model\":\"x=y\",\"user\":\"u\"}");
    expect_body("--stop a --stop=b", "{\"stop\":[\"a\",\"b\"]}");
    expect_body("--stop-token-id 3 --stop-token-id 4", "{\"stop_token_ids\":[3,4]}");
    expect_body("--logit-bias 7=-100 --logit-bias 8=1.5", "{\"logit_bias\":{\"7\":-100.0,\"8\":1.5}}");
    expect_body("--echo --ignore-eos --no-special-tokens",
                "{\"echo\":true,\"ignore_eos\":true,\"add_special_tokens\":false}");
    expect_body("--field degrade={\"cg_tolerance\":0.1} --field top_k=5",
                "{\"degrade\":{\"cg_tolerance\":0.1},\"top_k\":5}");
    expect_body("--cg-mode exact --on-unconverged error --cg-max-steps 9",
                "{\"cg_mode\":\"exact\",\"on_unconverged\":\"error\",\"cg_max_steps\":9}");
    expect_body("--seed 9223372036854775807", "{\"seed\":9223372036854775807}");
}
END_TEST

START_TEST(test_wrong_values) {
    expect_wrong("--max-tokens five");
    expect_wrong("--max-tokens 5.0");
    expect_wrong("--max-tokens");
    expect_wrong("--seed 9223372036854775808");
    expect_wrong("--temperature nan");
    expect_wrong("--temperature 1e999");
    expect_wrong("--stop \xff");
    expect_wrong("--logit-bias 7");
    expect_wrong("--logit-bias x=1");
    expect_wrong("--logit-bias =1");
    expect_wrong("--field x");
    expect_wrong("--field x={");
    expect_wrong("--echo=yes");
    expect_wrong("--max_tokens 5");
    expect_wrong("-m 5");
    expect_wrong("a b c");
}
END_TEST

START_TEST(test_own_options) {
    parsed got = parse("--flag --integer -7 one --real=2.5 --range 3:9 --list 1,2.5,8 -- --flag");

    ck_assert_int_eq(got.result, CLI_PARSED);
    ck_assert(got.flag);
    ck_assert_int_eq(got.integer, -7);
    ck_assert_double_eq(got.real, 2.5);
    ck_assert_int_eq(got.range.low, 3);
    ck_assert_int_eq(got.range.high, 9);
    ck_assert_uint_eq(got.list.count, 3);
    ck_assert_double_eq(got.list.value[1], 2.5);
    ck_assert_int_eq(got.count, 2);
    ck_assert_str_eq(got.positional[0], "one");
    ck_assert_str_eq(got.positional[1], "--flag");
    json_decref(got.body);

    expect_wrong("--range 9:3");
    expect_wrong("--range 0");
    expect_wrong("--range 1:");
    expect_wrong("--range 1:2:3");
    expect_wrong("--list 1,");
    expect_wrong("--list ,1");
    expect_wrong("--list x");
    got = parse("- x");
    ck_assert_int_eq(got.result, CLI_PARSED);
    ck_assert_str_eq(got.positional[0], "-");
    json_decref(got.body);
}
END_TEST

static void expect_problem(long status, const char *body, const char *wanted) {
    char text[CLI_PROBLEM_SIZE];
    cli_problem_text(status, body, strlen(body), text);
    ck_assert_str_eq(text, wanted);
}

START_TEST(test_problems) {
    expect_problem(400, "{\"error\":{\"message\":\"no\",\"code\":\"bad\",\"param\":null}}", "400 bad: no");
    expect_problem(400, "{\"error\":{\"message\":\"must be 1\",\"code\":null,\"param\":\"n\"}}", "400: must be 1 (n)");
    expect_problem(400, "{\"error\":{\"message\":\"n must be 1\",\"code\":\"c\",\"param\":\"n\"}}",
                   "400 c: n must be 1");
    expect_problem(503, "{\"message\":\"flat\"}", "503: flat");
    expect_problem(500, "{\"error\":\"text\"}", "500: text");
    expect_problem(502, "<html>", "502: (an answer that is not JSON)");
    expect_problem(502, "", "502: (an answer that is not JSON)");
    expect_problem(400, "{\"error\":{\"message\":5,\"code\":7}}", "400: (an answer without a message)");
    expect_problem(0, "{\"error\":{\"message\":\"a\\u001b[2Jb\\u0007\"}}", "a [2Jb ");
    expect_problem(400, "{}", "400: (an answer without a message)");
}
END_TEST

START_TEST(test_long_problem) {
    char body[8192] = "{\"error\":{\"message\":\"", text[CLI_PROBLEM_SIZE];

    memset(body + strlen(body), 'x', 5000);
    strcpy(strchr(body, 'x') + 5000, "\",\"param\":\"y\"}}");
    cli_problem_text(400, body, strlen(body), text);
    ck_assert_uint_lt(strlen(text), sizeof text);
    ck_assert_int_eq(strncmp(text, "400: xxx", 8), 0);
}
END_TEST

static void expect_shown(const char *text, bool terminal, const char *wanted) {
    char got[256] = "";
    FILE *file = tmpfile();
    const int kept = dup(STDOUT_FILENO);

    fflush(stdout);
    dup2(fileno(file), STDOUT_FILENO);
    cli_put_text(text, strlen(text), terminal);
    fflush(stdout);
    dup2(kept, STDOUT_FILENO);
    close(kept);
    rewind(file);
    const size_t length = fread(got, 1, sizeof got - 1, file);
    got[length] = '\0';
    fclose(file);
    ck_assert_str_eq(got, wanted);
}

#define SHOWN "\xef\xbf\xbd"
START_TEST(test_terminal) {
    expect_shown("a\x1b[2J\tb\r\n\x7f", true, "a" SHOWN "[2J\tb" SHOWN "\n" SHOWN);
    expect_shown("\xc2\x9b"
                 "5m",
                 true, SHOWN "5m");
    expect_shown("\xc2\xa0\xc3\xa9\xe2\x82\xac", true, "\xc2\xa0\xc3\xa9\xe2\x82\xac");
    expect_shown("a\x1b[2J", false, "a\x1b[2J");
}
END_TEST

static Suite *options_suite(void) {
    Suite *suite = suite_create("options");
    TCase *all = tcase_create("options");
    tcase_add_test(all, test_fields);
    tcase_add_test(all, test_wrong_values);
    tcase_add_test(all, test_own_options);
    tcase_add_test(all, test_problems);
    tcase_add_test(all, test_long_problem);
    tcase_add_test(all, test_terminal);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(options_suite)

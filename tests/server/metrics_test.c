// SPDX-License-Identifier: Apache-2.0
// GET /metrics: the exposition's grammar, every name that is promised, and that the figures are those of what happened.
// The grammar is checked line by line; gauges must be back at zero when nothing runs.
#include <ctype.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;

static char *exposition(void) {
    answer answer;
    fixture_get(&server, "/metrics", &answer);
    ck_assert_int_eq(answer.status, 200);
    ck_assert(answer_has(&answer, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r"));
    return answer.body;
}

static void post(const char *body, int wanted) {
    answer answer;
    fixture_post(&server, "/v1/completions", body, &answer);
    ck_assert_msg(answer.status == wanted, "%d: %s", answer.status, answer.body);
    answer_free(&answer);
}

// Length of a metric's or label's name.
static size_t name_length(const char *text) {
    size_t length = 0;
    while (isalnum((unsigned char)text[length]) || text[length] == '_' || text[length] == ':')
        length++;
    return isdigit((unsigned char)text[0]) ? 0 : length;
}

// A sample: NAME or NAME{LABEL="VALUE",...}, a space, a number. Returns its name's length.
static size_t check_sample(const char *line) {
    const size_t name = name_length(line);
    const char *at = line + name;
    char *end;

    ck_assert_msg(name > 0, "no name: %s", line);
    if (*at == '{') {
        do {
            at++;
            const size_t label = name_length(at);
            ck_assert_msg(label > 0 && at[label] == '=' && at[label + 1] == '"', "labels: %s", line);
            for (at += label + 2; *at != '"'; at++) {
                ck_assert_msg(*at, "an open label: %s", line);
                if (*at == '\\') {
                    at++;
                    ck_assert_msg(*at == '\\' || *at == '"' || *at == 'n', "an escape: %s", line);
                }
            }
            at++;
        } while (*at == ',');
        ck_assert_msg(*at == '}', "labels: %s", line);
        at++;
    }
    ck_assert_msg(*at == ' ', "no space: %s", line);
    strtod(at + 1, &end);
    ck_assert_msg(end > at + 1 && *end == '\0', "no number: %s", line);
    return name;
}

static bool ends_with(const char *text, size_t length, const char *end) {
    return length >= strlen(end) && memcmp(text + length - strlen(end), end, strlen(end)) == 0;
}

static void check_grammar(const char *exposition) {
    char *text = strdup(exposition), *rest = NULL, family[128] = "", type[32] = "";
    char seen[64][128];
    size_t families = 0;

    ck_assert_int_eq(text[strlen(text) - 1], '\n');
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (strncmp(line, "# HELP ", 7) == 0) {
            ck_assert_int_eq(sscanf(line + 7, "%127s", family), 1);
            ck_assert_msg(strlen(line) > 8 + strlen(family), "no help: %s", line);
            for (size_t i = 0; i < families; i++)
                ck_assert_msg(strcmp(seen[i], family) != 0, "%s twice", family);
            ck_assert_uint_lt(families, 64);
            strcpy(seen[families++], family);
            continue;
        }
        if (strncmp(line, "# TYPE ", 7) == 0) {
            char name[128];
            ck_assert_int_eq(sscanf(line + 7, "%127s %31s", name, type), 2);
            ck_assert_str_eq(name, family);
            ck_assert_int_eq(strcmp(type, "counter") == 0, ends_with(name, strlen(name), "_total"));
            continue;
        }
        const size_t name = check_sample(line), own = strlen(family);
        ck_assert_msg(name >= own && memcmp(line, family, own) == 0, "%s under %s", line, family);
        if (strcmp(type, "histogram") == 0)
            ck_assert(ends_with(line, name, "_bucket") || ends_with(line, name, "_sum") ||
                      ends_with(line, name, "_count"));
        else
            ck_assert_uint_eq(name, own);
    }
    free(text);
}

START_TEST(every_name_and_the_grammar) {
    static const char *const names[] = {"mesa_requests_total",
                                        "mesa_tokens_total",
                                        "mesa_queue_requests",
                                        "mesa_queue_tokens",
                                        "mesa_rows",
                                        "mesa_step_seconds",
                                        "mesa_ttft_seconds",
                                        "mesa_itl_seconds",
                                        "mesa_cg_steps",
                                        "mesa_cg_unconverged_total",
                                        "mesa_states",
                                        "mesa_memory_bytes",
                                        "mesa_cancelled_total",
                                        "mesa_numeric_total",
                                        "mesa_prefix_states",
                                        "mesa_prefix_budget_bytes",
                                        "mesa_prefix_hits_total",
                                        "mesa_prefix_misses_total",
                                        "mesa_prefix_evictions_total",
                                        "mesa_prefix_audits_total",
                                        "mesa_prefix_stored_total",
                                        "mesa_prefix_fetched_total",
                                        "mesa_prefix_damaged_total",
                                        "mesa_state_audit_mismatch_total",
                                        "mesa_sessions",
                                        "mesa_session_budget_bytes",
                                        "mesa_sessions_behind",
                                        "mesa_sessions_parked_total",
                                        "mesa_states_stored_total",
                                        "process_resident_memory_bytes",
                                        "process_cpu_seconds_total",
                                        "process_open_fds"};
    static const char *const options[] = {"--model", "a\"b\\c=/models/other", NULL};

    fixture_start(&server, options);
    for (int round = 0; round < 2; round++) {
        char *text = exposition();
        check_grammar(text);
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            char line[128];
            snprintf(line, sizeof line, "# TYPE %s ", names[i]);
            ck_assert_msg(strstr(text, line) != NULL, "no %s", names[i]);
        }
        ck_assert_ptr_nonnull(strstr(text, "mesa_rows{model=\"a\\\"b\\\\c\"} 0\n"));
        free(text);
        post("{\"prompt\":\"hi\",\"max_tokens\":3}", 200);
        post("{\"prompt\":5}", 400);
        post("{\"model\":\"a\\\"b\\\\c\",\"max_tokens\":3}", 200);
    }
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(figures_are_those_of_what_happened) {
    fixture_start(&server, NULL);
    const double before = metric(&server, "mesa_requests_total{model=\"\",status=\"200\"}");

    ck_assert_double_eq(metric(&server, "mesa_states_capacity{model=\"demo\"}"), 4); // before the first step too
    for (int i = 0; i < 3; i++)
        post("{\"prompt\":\"hi\",\"max_tokens\":5}", 200);
    post("{\"prompt\":[1,2],\"max_tokens\":4,\"n\":2}", 200);
    post("{\"prompt\":[1,2],\"max_tokens\":4,\"stream\":true}", 200);
    post("{\"temperature\":-1}", 400);
    post("{\"max_tokens\":-1}", 400);
    post("{\"model\":\"none\"}", 404);
    ck_assert_double_eq(metric(&server, "mesa_requests_total{model=\"demo\",status=\"200\"}"), 5);
    ck_assert_double_eq(metric(&server, "mesa_requests_total{model=\"\",status=\"400\"}"), 2);
    ck_assert_double_eq(metric(&server, "mesa_requests_total{model=\"\",status=\"404\"}"), 1);
    ck_assert_double_ge(metric(&server, "mesa_requests_total{model=\"\",status=\"200\"}"), before + 1);
    ck_assert_double_eq(metric(&server, "mesa_tokens_total{model=\"demo\",kind=\"prompt\"}"), 3 * 3 + 2 * 2 + 2);
    ck_assert_double_eq(metric(&server, "mesa_tokens_total{model=\"demo\",kind=\"completion\"}"), 3 * 5 + 2 * 4 + 4);
    ck_assert_double_eq(metric(&server, "mesa_tokens_total{model=\"demo\",kind=\"cached\"}"), 0);
    ck_assert_double_eq(metric(&server, "mesa_ttft_seconds_count{model=\"demo\"}"), 6);
    ck_assert_double_eq(metric(&server, "mesa_itl_seconds_count{model=\"demo\"}"), 3 * 4 + 2 * 3 + 3);
    ck_assert_double_eq(metric(&server, "mesa_step_seconds_count{model=\"demo\"}"), atomic_load(&fake_engine()->steps));
    // Each token's mean is 2.5 steps, each prompt's is 2.
    ck_assert_double_eq(metric(&server, "mesa_cg_steps_bucket{model=\"demo\",le=\"1\"}"), 0);
    ck_assert_double_eq(metric(&server, "mesa_cg_steps_bucket{model=\"demo\",le=\"2\"}"), 6);
    ck_assert_double_eq(metric(&server, "mesa_cg_steps_bucket{model=\"demo\",le=\"3\"}"), 6 + 27);
    ck_assert_double_eq(metric(&server, "mesa_cg_steps_bucket{model=\"demo\",le=\"+Inf\"}"), 33);
    ck_assert_double_eq_tol(metric(&server, "mesa_cg_steps_sum{model=\"demo\"}"), 6 * 2 + 27 * 2.5, 1e-6);
    ck_assert_double_eq(metric(&server, "mesa_rows{model=\"demo\"}"), 0);
    ck_assert_double_eq(metric(&server, "mesa_states{model=\"demo\",residence=\"device\"}"), 0);
    ck_assert_double_eq(metric(&server, "mesa_states_capacity{model=\"demo\"}"), 4);
    ck_assert_double_gt(metric(&server, "process_open_fds"), 5);
    ck_assert_double_gt(metric(&server, "process_resident_memory_bytes"), 1e6);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(times_are_measured) {
    fixture_start(&server, NULL);
    atomic_store(&fake_engine()->step_us, 20000);
    const double began = now_s();
    post("{\"prompt\":\"hi\",\"max_tokens\":6}", 200);
    const double taken = now_s() - began;
    const double first = metric(&server, "mesa_ttft_seconds_sum{model=\"demo\"}");
    const double others = metric(&server, "mesa_itl_seconds_sum{model=\"demo\"}");
    // One step reads the prompt, one makes the first token, five more follow.
    ck_assert_msg(first >= 0.0399 && others >= 0.0999, "%g and %g s", first, others);
    ck_assert_msg(first + others <= taken, "%g and %g s of %g", first, others, taken);
    ck_assert_double_eq(metric(&server, "mesa_itl_seconds_bucket{model=\"demo\",le=\"0.01\"}"), 0);
    ck_assert_double_ge(metric(&server, "mesa_step_seconds_sum{model=\"demo\"}"), 0.14);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static int wanted;
static bool rows_and_queue(void) {
    return metric(&server, "mesa_rows{model=\"demo\"}") == 1 &&
           metric(&server, "mesa_queue_requests{model=\"demo\"}") == wanted;
}
static bool nothing_is_left(void) {
    return metric(&server, "mesa_rows{model=\"demo\"}") == 0 &&
           metric(&server, "mesa_queue_requests{model=\"demo\"}") == 0 &&
           metric(&server, "mesa_queue_tokens{model=\"demo\"}") == 0 &&
           metric(&server, "mesa_states{model=\"demo\",residence=\"device\"}") == 0;
}

// Until one of them is readable.
static void wait_for_one(const int *clients, int count) {
    struct pollfd readable[8];

    ck_assert_int_le(count, 8);
    for (int i = 0; i < count; i++)
        readable[i] = (struct pollfd){.fd = clients[i], .events = POLLIN};
    ck_assert_int_gt(poll(readable, (nfds_t)count, 100000), 0);
}

START_TEST(gauges_and_cancellations) {
    static const char *const options[] = {"--rows", "1", NULL};
    int clients[4];

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 2000);
    for (int i = 0; i < 4; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":[1,2,3],\"max_tokens\":60000,\"stream\":true}");
    }
    wanted = 3;
    wait_for(rows_and_queue, "one runs and three wait");
    wait_for_one(clients, 4); // it is being answered
    ck_assert_double_eq(metric(&server, "mesa_queue_tokens{model=\"demo\"}"), 9);
    ck_assert_double_ge(metric(&server, "mesa_connections"), 4);
    for (int i = 0; i < 4; i++)
        close(clients[i]);
    wait_for(nothing_is_left, "all gauges are back");
    ck_assert_double_eq(metric(&server, "mesa_cancelled_total{model=\"demo\"}"), 4);
    // Three had nothing to tell yet, the first was being answered.
    ck_assert_double_eq(metric(&server, "mesa_requests_total{model=\"demo\",status=\"499\"}"), 3);
    atomic_store(&fake_engine()->step_us, 0);
    atomic_store(&fake_engine()->numeric_at, 1);
    post("{\"prompt\":\"hi\"}", 500);
    ck_assert_double_eq(metric(&server, "mesa_numeric_total{model=\"demo\"}"), 1);
    ck_assert_double_eq(metric(&server, "mesa_requests_total{model=\"demo\",status=\"500\"}"), 1);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static Suite *metrics_suite(void) {
    Suite *suite = suite_create("metrics");
    TCase *tests = tcase_create("metrics");
    tcase_add_test(tests, every_name_and_the_grammar);
    tcase_add_test(tests, figures_are_those_of_what_happened);
    tcase_add_test(tests, times_are_measured);
    tcase_add_test(tests, gauges_and_cancellations);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(metrics_suite)

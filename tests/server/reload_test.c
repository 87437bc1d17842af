// SPDX-License-Identifier: Apache-2.0
// Configuration and checkpoints that are read again while requests of every kind are under way.
//
// The configuration is a file of the test's; the checkpoints are those of the fake engine, whose revision the test
// moves. What is looked at is told by the server itself: the counters of rounds, the fingerprint of the list of models,
// the log. No step waits for a time.
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;
static char config_path[] = "/tmp/mesa-reload-XXXXXX.ini";

static void write_config(const char *lines) {
    FILE *file = fopen(config_path, "w");
    ck_assert_ptr_nonnull(file);
    fprintf(file, "[server]\n%s", lines);
    ck_assert_int_eq(fclose(file), 0);
}

static void make_config(void) {
    const int descriptor = mkstemps(config_path, 4);
    ck_assert_int_ge(descriptor, 0);
    close(descriptor);
}

static char keys_path[sizeof config_path + 8];
static void write_keys(void) {
    snprintf(keys_path, sizeof keys_path, "%s.keys", config_path);
    FILE *file = fopen(keys_path, "w");
    ck_assert_ptr_nonnull(file);
    fprintf(file, "alice %064d\n", 7);
    ck_assert_int_eq(fclose(file), 0);
}

static void remove_config(void) {
    unlink(config_path);
}

static void start(const char *lines) {
    const char *const options[] = {"--config", config_path, NULL};

    write_config(lines);
    fixture_start(&server, options);
}

static double rounds(const char *result) {
    char sample[64];
    snprintf(sample, sizeof sample, "mesa_reloads_total{result=\"%s\"}", result);
    return metric(&server, sample);
}

static double wanted_done, wanted_failed;
static bool rounds_are_over(void) {
    return rounds("done") == wanted_done && rounds("failed") == wanted_failed;
}

// One round; it ends as it should.
static void reload(bool succeeds) {
    wanted_done = rounds("done") + succeeds;
    wanted_failed = rounds("failed") + !succeeds;
    srv_server_reload(server.server);
    wait_for(rounds_are_over, "the round ends");
}

static bool log_says(const char *text) {
    char *log = fixture_log(&server);
    const bool found = strstr(log, text) != NULL;
    free(log);
    return found;
}

static const char *awaited;
static bool awaited_is_said(void) {
    return log_says(awaited);
}
static void wait_for_log(const char *text) {
    awaited = text;
    wait_for(awaited_is_said, text);
}

// Of the first model; free().
static char *fingerprint(void) {
    answer answer;
    fixture_get(&server, "/v1/models", &answer);
    json_t *json = answer_json(&answer);
    const json_t *meta = json_object_get(json_array_get(json_object_get(json, "data"), 0), "meta");
    char *text = strdup(json_string_value(json_object_get(meta, "fingerprint")));
    json_decref(json);
    answer_free(&answer);
    return text;
}

static int ask(const char *body) {
    answer answer;
    fixture_post(&server, "/v1/completions", body, &answer);
    const int status = answer.status;
    answer_free(&answer);
    return status;
}

static int wanted_closed, wanted_opening;
static bool enough_closed(void) {
    return atomic_load(&fake_engine()->closed) >= wanted_closed;
}
static bool enough_opening(void) {
    return atomic_load(&fake_engine()->opening) >= wanted_opening;
}
static void wait_closed(int count) {
    wanted_closed = count;
    wait_for(enough_closed, "the old engine is closed");
}
static void wait_opening(int count) {
    wanted_opening = count;
    wait_for(enough_opening, "an engine is being opened");
}

static void expect_ready(void) {
    answer answer;
    fixture_get(&server, "/health/ready", &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
}

// ---- options -------------------------------------------------------------------------------------------------------

START_TEST(options_take_effect) {
    answer answer;

    start("max_tokens = 5\nqueue_requests = 3\n");
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 400);
    write_config("max_tokens = 6\nqueue_requests = 4\nlog_level = error\nmin_cg_tolerance = 0.5\n");
    reload(true);
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200);
    ck_assert_int_eq(ask("{\"max_tokens\":7}"), 400);
    ck_assert_int_eq(ask("{\"cg_tolerance\":0.1}"), 400);
    fixture_get(&server, "/v1/models", &answer);
    ck_assert_ptr_nonnull(strstr(answer.body, "\"minimum\":0.5"));
    answer_free(&answer);
    char *before = fixture_log(&server);
    ck_assert_int_eq(ask("{}"), 200);
    char *after = fixture_log(&server); // nothing below error any more
    ck_assert_str_eq(before, after);
    free(before);
    free(after);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 1); // the engine is the same
    write_config("rows = 2\n");
    reload(true);
    wait_closed(1);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 2);
    ck_assert_double_eq(metric(&server, "mesa_states_capacity{model=\"demo\"}"), 2);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// With one row: those that wait are as many as the queue may hold, before and after.
START_TEST(a_queue_grows) {
    start("queue_requests = 1\nrows = 1\n");
    atomic_store(&fake_engine()->step_us, 2000);
    const int running = client_connect(&server), first = client_connect(&server);
    client_post(running, "/v1/completions", "{\"max_tokens\":60000,\"stream\":true}");
    wait_engine_active(1);
    client_post(first, "/v1/completions", "{\"max_tokens\":60000,\"stream\":true}");
    wait_engine_active(2); // one waits
    ck_assert_int_eq(ask("{}"), 429);
    write_config("queue_requests = 2\nrows = 1\n");
    reload(true);
    const int second = client_connect(&server);
    client_post(second, "/v1/completions", "{\"max_tokens\":60000,\"stream\":true}");
    wait_engine_active(3); // two wait
    ck_assert_int_eq(ask("{}"), 429);
    close(running);
    close(first);
    close(second);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// Of connections that come later: one that is silent is closed.
START_TEST(times_take_effect) {
    answer answer;

    start("idle_time = 3600\n");
    write_config("idle_time = 1\n");
    reload(true);
    const int client = client_connect(&server);
    client_ask(client, "GET", "/health", "", NULL);
    client_read(client, &answer, false);
    answer_free(&answer);
    ck_assert(client_closed(client));
    close(client);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(some_options_need_a_restart) {
    start("max_tokens = 5\n");
    write_config("max_tokens = 6\nsocket_mode = 0600\nstore = /tmp/elsewhere\ndevice = cpu,cpu\nconnections = 7\n"
                 "max_headers = 32K\nadmin_listen = 127.0.0.1:0\nallow_anonymous = yes\nstore_budget = 2M\n"
                 "store_lease = 3\nidle_time = 3\n");
    reload(true);
    ck_assert(log_says("until a restart: admin_listen, allow_anonymous, device, socket_mode, store, "
                       "store_budget, store_lease, max_headers, connections"));
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200); // the others hold
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 1);
    write_config("max_tokens = 5\n");
    reload(true);
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 400);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// Neither would be taken now, but a restart would fail by it.
START_TEST(what_waits_for_a_restart_is_checked) {
    char lines[256];

    start("max_tokens = 5\n");
    write_config("max_tokens = 6\ndevice = cpu,none\n");
    reload(false);
    ck_assert(log_says("--device: no device \\\"none\\\"; nothing is changed"));
    write_config("max_tokens = 6\nkeys = /tmp/no/keys\n");
    reload(false);
    ck_assert(log_says("/tmp/no/keys: "));
    write_config("max_tokens = 6\ntls_cert = /tmp/no/cert\ntls_key = /tmp/no/key\n");
    reload(false);
    ck_assert(log_says("/tmp/no/cert: "));
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 400);
    write_keys();
    snprintf(lines, sizeof lines, "max_tokens = 6\nkeys = %s\n", keys_path);
    write_config(lines);
    reload(true); // good ones wait
    ck_assert(log_says("until a restart: keys"));
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200);
    unlink(keys_path);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(a_wrong_file_changes_nothing) {
    char told[128];

    start("max_tokens = 5\n");
    write_config("max_tokens = 6\nrows = many\n");
    atomic_store(&fake_engine()->revision, 1);
    char *before = fingerprint();
    reload(false);
    snprintf(told, sizeof told, "%s:3: rows: the value must be", config_path);
    ck_assert(log_says(told));
    write_config("max_tokens = 6\nmodel = other=/models/missing\n"); // the command line's list wins
    reload(true);
    char *after = fingerprint();
    ck_assert_str_ne(before, after);
    unlink(config_path);
    reload(false);
    ck_assert(log_says("No such file"));
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200);
    ck_assert_int_eq(ask("{\"max_tokens\":7}"), 400);
    free(before);
    free(after);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- checkpoints ---------------------------------------------------------------------------------------------------

START_TEST(an_unchanged_model_is_not_touched) {
    start("");
    char *before = fingerprint();
    const double loaded = metric(&server, "mesa_model_loaded_timestamp_seconds{model=\"demo\"}");
    reload(true);
    reload(true);
    char *after = fingerprint();
    ck_assert_str_eq(before, after);
    ck_assert_int_eq(atomic_load(&fake_engine()->opening), 1);
    ck_assert_double_eq(metric(&server, "mesa_model_loaded_timestamp_seconds{model=\"demo\"}"), loaded);
    free(before);
    free(after);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// Streams, a request that waits, choices, and one whose body is not whole: all begin before, all end.
START_TEST(what_runs_ends_on_the_old_engine) {
    static const char body[] = "{\"max_tokens\":3}";
    char expected[64];
    answer answer;
    sse sse;

    start("");
    atomic_store(&fake_engine()->held, 1);
    int clients[6];
    for (int i = 0; i < 6; i++)
        clients[i] = client_connect(&server);
    for (int i = 0; i < 4; i++) // as many as there are rows, of which one is two
        client_post(clients[i], "/v1/completions",
                    i < 2    ? "{\"max_tokens\":40,\"stream\":true,\"seed\":7}"
                    : i == 2 ? "{\"max_tokens\":40,\"n\":2,\"seed\":7}"
                             : "{\"max_tokens\":40,\"seed\":7}");
    client_post(clients[4], "/v1/completions", "{\"max_tokens\":40,\"seed\":7}");
    wait_engine_active(6); // all run or wait
    client_puts(clients[5], "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                            "Content-Length: 16\r\n\r\n{");
    char *before = fingerprint();
    atomic_store(&fake_engine()->revision, 1);
    reload(true);
    char *after = fingerprint();
    ck_assert_str_ne(before, after);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 2);
    expect_ready();
    ck_assert_int_eq(ask("{\"max_tokens\":1}"), 200); // does not wait for those
    atomic_store(&fake_engine()->held, 0);
    client_puts(clients[5], body + 1);
    client_read(clients[5], &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    fake_engine_text(7, 0, 1, 40, expected);
    for (int i = 0; i < 5; i++) {
        client_read(clients[i], &answer, false);
        ck_assert_int_eq(answer.status, 200);
        if (i < 2) {
            sse_parse(&answer, &sse);
            ck_assert(sse.done);
            char *text = sse_text(&sse, 0);
            ck_assert_str_eq(text, expected);
            free(text);
            sse_free(&sse);
        } else
            ck_assert_ptr_nonnull(strstr(answer.body, expected));
        answer_free(&answer);
    }
    wait_closed(1);
    ck_assert_double_eq(metric(&server, "mesa_requests_total{model=\"demo\",status=\"200\"}"), 7);
    for (int i = 0; i < 6; i++)
        close(clients[i]);
    free(before);
    free(after);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// The old engine is held by no request but its own.
START_TEST(one_model_of_two_is_replaced) {
    static const char *const no_options[] = {"--config", config_path, "--model", "other=/models/other", NULL};
    char text[65536] = "";

    write_config("");
    fixture_start(&server, no_options);
    atomic_store(&fake_engine()->step_us, 1000);
    const int stream = client_connect(&server);
    client_post(stream, "/v1/completions", "{\"model\":\"other\",\"max_tokens\":60000,\"stream\":true}");
    client_read_until(stream, "data: ", text, sizeof text);
    atomic_store(&fake_engine()->revision, 1);
    reload(true);
    wait_closed(1); // though the stream goes on
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 3);
    ck_assert_int_ge(atomic_load(&fake_engine()->active), 1);
    text[0] = '\0';
    client_read_until(stream, "data: ", text, sizeof text);
    close(stream);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(models_come_and_go) {
    const char *arguments[] = {"mesa-server", "--config", config_path, "--listen", "127.0.0.1:0"};
    srv_config_action action;
    eng_error error = {0};
    answer answer;

    // Without models on the command line the file's are those that hold.
    write_config("model = demo=/models/demo\n");
    memset(&server, 0, sizeof server);
    memcpy(server.arguments, arguments, sizeof arguments);
    ck_assert_int_eq(
        srv_config_load(&server.config, 5, (char *const *)server.arguments, server.environment, &action, &error),
        ENG_OK);
    fixture_run(&server);
    fixture_wait(&server);
    ck_assert_int_eq(ask("{\"model\":\"plain\"}"), 404);
    write_config("model = demo=/models/demo\nmodel = plain=/models/plain\n");
    reload(true);
    ck_assert_int_eq(ask("{\"model\":\"plain\"}"), 200);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 2);
    atomic_store(&fake_engine()->held, 1);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"model\":\"demo\",\"max_tokens\":30}");
    wait_engine_active(1);
    write_config("model = plain=/models/plain\n");
    reload(true);
    ck_assert_int_eq(ask("{\"model\":\"demo\"}"), 404);
    ck_assert_int_eq(ask("{}"), 200); // plain is the first now
    atomic_store(&fake_engine()->held, 0);
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    wait_closed(1);
    ck_assert_double_eq(metric(&server, "mesa_model_loaded_timestamp_seconds{model=\"demo\"}"), -1);
    close(client);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(what_cannot_be_loaded_leaves_the_old) {
    start("max_tokens = 5\n");
    char *before = fingerprint();
    atomic_store(&fake_engine()->revision, 1);
    atomic_store(&fake_engine()->refuse_open, 1);
    write_config("max_tokens = 6\n");
    reload(false);
    ck_assert(
        log_says("model demo cannot be loaded: fake has 1.0 of 2.0 MiB free; 1.5 are needed; nothing is changed"));
    char *after = fingerprint();
    ck_assert_str_eq(before, after);
    ck_assert_int_eq(ask("{\"max_tokens\":5}"), 200);
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 400); // nor anything else of it
    atomic_store(&fake_engine()->refuse_open, 0);
    reload(true);
    free(after);
    after = fingerprint();
    ck_assert_str_ne(before, after);
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200);
    wait_closed(1);
    free(before);
    free(after);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(a_folder_that_changes_meanwhile_is_refused) {
    start("");
    char *before = fingerprint();
    atomic_store(&fake_engine()->revision, 1);
    atomic_store(&fake_engine()->hold_open, 1);
    wanted_done = 0;
    wanted_failed = 1;
    srv_server_reload(server.server);
    wait_opening(2);
    atomic_store(&fake_engine()->revision, 2);
    atomic_store(&fake_engine()->hold_open, 0);
    wait_for(rounds_are_over, "the round ends");
    ck_assert(log_says("changed while it was read"));
    char *after = fingerprint();
    ck_assert_str_eq(before, after);
    free(before);
    free(after);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- when signals come ---------------------------------------------------------------------------------------------

// While one round loads others are asked for: they become one more.
START_TEST(rounds_do_not_overlap) {
    start("max_tokens = 5\n");
    atomic_store(&fake_engine()->revision, 1);
    atomic_store(&fake_engine()->hold_open, 1);
    srv_server_reload(server.server);
    wait_opening(2);
    write_config("max_tokens = 6\n");
    srv_server_reload(server.server);
    wait_for_log("all is read again after that");
    srv_server_reload(server.server);
    expect_ready();
    ck_assert_int_eq(ask("{\"max_tokens\":5}"), 200);
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 400);
    ck_assert_double_eq(rounds("done"), 0);
    wanted_done = 2;
    wanted_failed = 0;
    atomic_store(&fake_engine()->hold_open, 0);
    wait_for(rounds_are_over, "both rounds end");
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200);
    wait_closed(1);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 2);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(a_signal_while_the_server_starts_comes_after) {
    const char *const options[] = {"--config", config_path, NULL};

    write_config("max_tokens = 5\n");
    atomic_store(&fake_engine()->hold_open, 1);
    fixture_start_model(&server, "demo=/models/demo", options);
    wait_opening(1);
    write_config("max_tokens = 6\n");
    srv_server_reload(server.server);
    wait_for_log("all is read again after that");
    wanted_done = 1;
    wanted_failed = 0;
    atomic_store(&fake_engine()->hold_open, 0);
    wait_for(rounds_are_over, "the round ends");
    ck_assert_int_eq(ask("{\"max_tokens\":6}"), 200);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(a_signal_while_the_server_ends_does_nothing) {
    answer answer;

    start("");
    atomic_store(&fake_engine()->held, 1);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"max_tokens\":60}");
    wait_engine_active(1);
    atomic_store(&fake_engine()->revision, 1);
    srv_server_stop(server.server);
    wait_for_log("no new requests");
    srv_server_reload(server.server);
    wait_for_log("nothing is read again: the server ends");
    atomic_store(&fake_engine()->held, 0);
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    close(client);
    ck_assert_int_eq(fixture_join(&server), 0);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), 1);
}
END_TEST

START_TEST(a_stop_gives_a_round_up) {
    start("");
    atomic_store(&fake_engine()->revision, 1);
    atomic_store(&fake_engine()->hold_open, 1);
    srv_server_reload(server.server);
    wait_opening(2);
    srv_server_stop(server.server);
    wait_for_log("given up: the server ends");
    atomic_store(&fake_engine()->hold_open, 0);
    ck_assert_int_eq(fixture_join(&server), 0);
    ck_assert_int_eq(atomic_load(&fake_engine()->opened), atomic_load(&fake_engine()->closed));
}
END_TEST

// ---- sessions ------------------------------------------------------------------------------------------------------

static void make_session(char id[64]) {
    answer answer;

    fixture_post(&server, "/v1/sessions", "{}", &answer);
    ck_assert_msg(answer.status == 201, "%s", answer.body);
    json_t *json = answer_json(&answer);
    snprintf(id, 64, "%s", json_string_value(json_object_get(json, "id")));
    json_decref(json);
    answer_free(&answer);
}

static const char *sought;
static bool session_is_foreign(void) {
    char path[128];
    answer answer;

    snprintf(path, sizeof path, "/v1/sessions/%s", sought);
    fixture_get(&server, path, &answer);
    const bool foreign = answer.status == 409;
    answer_free(&answer);
    return foreign;
}

// Whatever is asked of it, both fingerprints are named; it is not listed, can be dropped, and the old engine is freed.
START_TEST(a_session_of_another_checkpoint_is_refused) {
    char id[64], body[128], path[128];
    answer answer;

    start("");
    make_session(id);
    char *before = fingerprint();
    atomic_store(&fake_engine()->revision, 1);
    reload(true);
    char *after = fingerprint();
    sought = id;
    wait_for(session_is_foreign, "the session is refused");
    wait_closed(1);
    snprintf(body, sizeof body, "{\"session\":\"%s\",\"prompt\":\"a\"}", id);
    fixture_post(&server, "/v1/completions", body, &answer);
    expect_error(&answer, 409, "session", "foreign_state");
    ck_assert(answer_has(&answer, "X-Should-Retry: false"));
    before[12] = after[12] = '\0';
    ck_assert_ptr_nonnull(strstr(answer.body, before));
    ck_assert_ptr_nonnull(strstr(answer.body, after));
    answer_free(&answer);
    snprintf(path, sizeof path, "/v1/sessions/%s/fork", id);
    fixture_post(&server, path, "{}", &answer);
    expect_error(&answer, 409, "session", "foreign_state");
    answer_free(&answer);
    fixture_get(&server, "/v1/sessions", &answer);
    ck_assert_ptr_null(strstr(answer.body, id));
    answer_free(&answer);
    snprintf(path, sizeof path, "/v1/sessions/%s/state", id);
    fixture_get(&server, path, &answer);
    expect_error(&answer, 409, "session", "foreign_state");
    answer_free(&answer);
    snprintf(path, sizeof path, "/v1/sessions/%s", id);
    fixture_ask(&server, "DELETE", path, "Connection: close\r\n", NULL, &answer);
    ck_assert_int_eq(answer.status, 204);
    answer_free(&answer);
    fixture_get(&server, path, &answer);
    expect_error(&answer, 404, "session", "session_not_found");
    answer_free(&answer);
    free(before);
    free(after);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static Suite *reload_suite(void) {
    Suite *suite = suite_create("reload");
    TCase *tests = tcase_create("reload");
    tcase_add_checked_fixture(tests, make_config, remove_config);
    tcase_add_test(tests, options_take_effect);
    tcase_add_test(tests, a_queue_grows);
    tcase_add_test(tests, times_take_effect);
    tcase_add_test(tests, some_options_need_a_restart);
    tcase_add_test(tests, what_waits_for_a_restart_is_checked);
    tcase_add_test(tests, a_wrong_file_changes_nothing);
    tcase_add_test(tests, an_unchanged_model_is_not_touched);
    tcase_add_test(tests, what_runs_ends_on_the_old_engine);
    tcase_add_test(tests, one_model_of_two_is_replaced);
    tcase_add_test(tests, models_come_and_go);
    tcase_add_test(tests, what_cannot_be_loaded_leaves_the_old);
    tcase_add_test(tests, a_folder_that_changes_meanwhile_is_refused);
    tcase_add_test(tests, rounds_do_not_overlap);
    tcase_add_test(tests, a_signal_while_the_server_starts_comes_after);
    tcase_add_test(tests, a_signal_while_the_server_ends_does_nothing);
    tcase_add_test(tests, a_stop_gives_a_round_up);
    tcase_add_test(tests, a_session_of_another_checkpoint_is_refused);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(reload_suite)

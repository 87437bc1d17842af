// SPDX-License-Identifier: Apache-2.0
// Start, load, drain, end, and what is said meanwhile: several models, addresses in use, engines that fail, the log.
// A server that ends by itself is joined, one that runs is drained; either way its engine must be left empty.
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

static fixture server;

START_TEST(serves_while_loading) {
    answer answer;

    atomic_store(&fake_engine()->hold_open, 1);
    fixture_start_model(&server, "demo=/models/demo", NULL);
    fixture_get(&server, "/health", &answer);
    ck_assert_int_eq(answer.status, 200);
    ck_assert_ptr_nonnull(strstr(answer.body, "\"loading\""));
    answer_free(&answer);
    fixture_get(&server, "/health/ready", &answer);
    ck_assert_int_eq(answer.status, 503);
    ck_assert(answer_has(&answer, "Retry-After: "));
    json_decref(answer_json(&answer));
    answer_free(&answer);
    fixture_get(&server, "/v1/models", &answer);
    ck_assert_int_eq(answer.status, 200);
    ck_assert_ptr_nonnull(strstr(answer.body, "\"meta\":null"));
    answer_free(&answer);
    fixture_post(&server, "/v1/completions", "{\"prompt\":\"hi\",\"stream\":true}", &answer);
    expect_error(&answer, 503, NULL, "loading");
    ck_assert(answer_has(&answer, "Retry-After: "));
    answer_free(&answer);
    atomic_store(&fake_engine()->hold_open, 0);
    fixture_wait(&server);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(stops_while_loading) {
    atomic_store(&fake_engine()->hold_open, 1);
    fixture_start_model(&server, "demo=/models/demo", NULL);
    srv_server_stop(server.server);
    sleep_ms(100); // in which it may stop already
    atomic_store(&fake_engine()->hold_open, 0);
    ck_assert_int_eq(fixture_join(&server), 0);
}
END_TEST

static const char *wanted_line;
static bool log_says(void) {
    char *log = fixture_log(&server);
    const bool found = strstr(log, wanted_line) != NULL;
    free(log);
    return found;
}

START_TEST(unloadable_model_ends_with_4) {
    fixture_start_model(&server, "demo=/models/missing", NULL);
    wanted_line = "/models/missing/config.json: no such file";
    wait_for(log_says, wanted_line);
    ck_assert_int_eq(fixture_join(&server), 4);
}
END_TEST

// Three tokens read at the second of four loops, or nothing of loops.
static void check_exits(const json_t *json, bool loops) {
    const json_t *usage = json_object_get(json_object_get(json_object_get(json, "usage"), "compute"), "completion");
    const json_t *choice = json_array_get(json_object_get(json, "choices"), 0);
    const json_t *read = json_object_get(json_object_get(choice, "compute_details"), "loops");
    char *histogram = json_dumps(json_object_get(usage, "exit_histogram"), JSON_COMPACT | JSON_ENCODE_ANY);
    char *each = json_dumps(read, JSON_COMPACT | JSON_ENCODE_ANY);

    ck_assert((read != NULL) == loops && (histogram != NULL) == loops);
    if (loops) {
        ck_assert_str_eq(histogram, "[0,3,0,0]");
        ck_assert_str_eq(each, "[2,2,2]");
        ck_assert_double_eq(json_number_value(json_object_get(usage, "loops_mean")), 2);
    }
    free(histogram);
    free(each);
}

START_TEST(several_models) {
    static const char *const options[] = {"--model", "plain=/models/plain",   "--model", "/models/loops",
                                          "--model", "/models/ungated-loops", NULL};
    static const struct {
        const char *model, *ignored;
    } cases[] = {{"demo", "[\"exit_threshold\",\"max_loops\"]"},
                 {"plain", "[\"cg_tolerance\",\"exit_threshold\",\"max_loops\"]"},
                 {"loops", "[]"},
                 {"ungated-loops", "[\"exit_threshold\"]"}};
    answer answer;

    fixture_start(&server, options);
    fixture_get(&server, "/v1/models", &answer);
    json_t *json = answer_json(&answer);
    ck_assert_uint_eq(json_array_size(json_object_get(json, "data")), 4);
    json_decref(json);
    answer_free(&answer);
    for (size_t i = 0; i < 4; i++) {
        char body[256];
        snprintf(body, sizeof body,
                 "{\"model\":\"%s\",\"cg_tolerance\":0.1,\"max_loops\":2,\"exit_threshold\":0.5,\"max_tokens\":3,"
                 "\"compute_details\":true}",
                 cases[i].model);
        fixture_post(&server, "/v1/completions", body, &answer);
        ck_assert_msg(answer.status == 200, "%s", answer.body);
        json = answer_json(&answer);
        ck_assert_str_eq(json_string_value(json_object_get(json, "model")), cases[i].model);
        json_t *compute = json_object_get(json_object_get(json, "usage"), "compute");
        char *ignored = json_dumps(json_object_get(compute, "ignored"), JSON_COMPACT);
        ck_assert_str_eq(ignored, cases[i].ignored);
        // Without Mesa layers there are no solver figures.
        ck_assert((i == 1) == (json_object_get(json_object_get(compute, "prompt"), "cg_steps_mean") == NULL));
        check_exits(json, i >= 2);
        free(ignored);
        json_decref(json);
        answer_free(&answer);
    }
    fixture_post(&server, "/v1/completions", "{\"model\":\"loops\",\"max_loops\":5}", &answer);
    expect_error(&answer, 400, "max_loops", NULL);
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(empty_prompt_without_bos) {
    answer answer;

    fixture_start_model(&server, "demo=/models/nobos", NULL);
    do {
        fixture_post(&server, "/v1/completions", "{}", &answer);
        if (answer.status == 503)
            answer_free(&answer);
    } while (answer.status == 503);
    expect_error(&answer, 400, "prompt", NULL);
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- draining ------------------------------------------------------------------------------------------------------

START_TEST(drain_finishes_what_runs) {
    answer answer;
    sse sse;

    fixture_start(&server, NULL);
    atomic_store(&fake_engine()->held, 1);
    const int stream = client_connect(&server), plain = client_connect(&server), idle = client_connect(&server);
    const int half = client_connect(&server);
    client_post(stream, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20,\"stream\":true}");
    client_post(plain, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20}");
    client_puts(idle, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
    client_read(idle, &answer, false);
    answer_free(&answer);
    client_puts(half, "POST /v1/completions HTTP/1.1\r\nHo");
    wait_engine_active(2);
    srv_server_stop(server.server);
    ck_assert(client_closed(idle));
    ck_assert(client_closed(half));
    atomic_store(&fake_engine()->held, 0);
    client_read(stream, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    sse_parse(&answer, &sse);
    ck_assert(sse.done);
    ck_assert_uint_eq(json_array_size(sse.events), 20);
    sse_free(&sse);
    answer_free(&answer);
    client_read(plain, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    ck_assert_int_eq(fixture_join(&server), 0);
    close(stream);
    close(plain);
    close(idle);
    close(half);
}
END_TEST

START_TEST(draining_closes_after_the_answer) {
    answer answer;

    fixture_start(&server, NULL);
    atomic_store(&fake_engine()->held, 1);
    const int client = client_connect(&server), other = client_connect(&server), idle = client_connect(&server);
    // The second is pipelined behind the first: the first's answer says that the connection ends with it.
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20}");
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20}");
    client_post(other, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":30}");
    client_puts(idle, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
    client_read(idle, &answer, false);
    answer_free(&answer);
    wait_engine_active(2);
    srv_server_stop(server.server);
    ck_assert(client_closed(idle)); // so it has begun to drain
    atomic_store(&fake_engine()->held, 0);
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    ck_assert(answer.closed);
    answer_free(&answer);
    ck_assert(client_closed(client));
    client_read(other, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    ck_assert(answer.closed);
    answer_free(&answer);
    ck_assert_int_eq(fixture_join(&server), 0);
    close(client);
    close(other);
    close(idle);
}
END_TEST

START_TEST(drain_deadline_says_so) {
    static const char *const options[] = {"--drain-time", "0.3", NULL};
    answer answer;
    sse sse;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 10000);
    const int stream = client_connect(&server), plain = client_connect(&server), deaf = client_connect(&server);
    client_post(stream, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000,\"stream\":true}");
    client_post(plain, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000}");
    client_puts(deaf, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\n{");
    wait_engine_active(2);
    char byte;
    ck_assert_int_eq(recv(stream, &byte, 1, MSG_PEEK), 1); // it is being answered
    srv_server_stop(server.server);
    client_read(stream, &answer, false);
    sse_parse(&answer, &sse);
    json_t *error = json_object_get(json_array_get(sse.events, json_array_size(sse.events) - 1), "error");
    ck_assert_str_eq(json_string_value(json_object_get(error, "code")), "draining");
    ck_assert(sse.done);
    sse_free(&sse);
    answer_free(&answer);
    client_read(plain, &answer, false);
    expect_error(&answer, 503, NULL, "draining");
    answer_free(&answer);
    ck_assert_int_eq(fixture_join(&server), 0);
    close(stream);
    close(plain);
    close(deaf);
}
END_TEST

START_TEST(stop_with_a_slow_reader) {
    static const char *const options[] = {"--drain-time", "0.2", NULL};

    fixture_start(&server, options);
    atomic_store(&fake_engine()->text_bytes, 1000);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000,\"stream\":true}");
    wait_engine_active(1);
    ck_assert_int_eq(fixture_stop(&server), 0);
    close(client);
}
END_TEST

static bool one_paused(void) {
    return atomic_load(&fake_engine()->paused) == 1;
}

// Blocked in a write, its input at an end: without a shutdown the connection would last until a timeout.
START_TEST(half_closed_slow_reader_is_let_go) {
    static const char *const options[] = {"--drain-time", "1000", NULL}; // which the end would wait for

    fixture_start(&server, options);
    atomic_store(&fake_engine()->text_bytes, 1000);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000,\"stream\":true}");
    wait_for(one_paused, "the request is paused");
    sleep_ms(200);
    shutdown(client, SHUT_WR);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
    close(client);
}
END_TEST

START_TEST(lost_device_ends_with_1) {
    answer answer;
    sse sse;

    fixture_start(&server, NULL);
    atomic_store(&fake_engine()->step_us, 10000);
    const int stream = client_connect(&server), plain = client_connect(&server);
    char byte;
    client_post(plain, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000}");
    client_post(stream, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":60000,\"stream\":true}");
    wait_engine_active(2);
    ck_assert_int_eq(recv(stream, &byte, 1, MSG_PEEK), 1);
    atomic_store(&fake_engine()->fail_step, 1);
    client_read(stream, &answer, false);
    sse_parse(&answer, &sse);
    ck_assert_ptr_nonnull(json_object_get(json_array_get(sse.events, json_array_size(sse.events) - 1), "error"));
    sse_free(&sse);
    answer_free(&answer);
    client_read(plain, &answer, false);
    expect_error(&answer, 500, NULL, "internal");
    answer_free(&answer);
    ck_assert_int_eq(fixture_join(&server), 1);
    close(stream);
    close(plain);
}
END_TEST

// ---- the service manager --------------------------------------------------------------------------------------------

static void expect_notice(int manager, const char *wanted) {
    char text[256] = "";

    for (double until = now_s() + 100; !strstr(text, wanted);) {
        const ssize_t length = recv(manager, text, sizeof text - 1, 0);
        ck_assert_msg(length > 0 && now_s() < until, "waited in vain for %s", wanted);
        text[length] = '\0';
    }
}

// Whether nothing is told for so long. False: the manager is told again and again.
static bool falls_silent(int manager, int milliseconds) {
    struct pollfd readable = {.fd = manager, .events = POLLIN};
    char text[256];

    for (double until = now_s() + 100; now_s() < until;) {
        if (poll(&readable, 1, milliseconds) == 0)
            return true;
        ck_assert_int_gt(recv(manager, text, sizeof text, 0), 0);
    }
    return false;
}

// A datagram socket with an abstract name, announced in the environment as the manager's.
static int open_manager(void) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    const struct timeval patience = {.tv_sec = 100};
    char process[32];

    snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "mesa-notify-%d", (int)getpid());
    const socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name.sun_path + 1));
    const int manager = socket(AF_UNIX, SOCK_DGRAM, 0);
    ck_assert_int_eq(bind(manager, (const struct sockaddr *)&name, length), 0);
    setsockopt(manager, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    name.sun_path[0] = '@';
    setenv("NOTIFY_SOCKET", name.sun_path, 1);
    setenv("WATCHDOG_USEC", "400000", 1);
    snprintf(process, sizeof process, "%d", (int)getpid());
    setenv("WATCHDOG_PID", process, 1);
    return manager;
}

START_TEST(service_manager_is_told) {
    const int manager = open_manager();
    answer answer;

    atomic_store(&fake_engine()->hold_open, 1);
    fixture_start_model(&server, "demo=/models/demo", NULL);
    expect_notice(manager, "EXTEND_TIMEOUT_USEC=30000000");
    atomic_store(&fake_engine()->hold_open, 0);
    expect_notice(manager, "READY=1");
    fixture_get(&server, "/health/ready", &answer);
    ck_assert_int_eq(answer.status, 200); // what READY says is true
    answer_free(&answer);
    expect_notice(manager, "WATCHDOG=1");
    // Every reload ends.
    srv_server_reload(server.server);
    expect_notice(manager, "RELOADING=1");
    expect_notice(manager, "READY=1");
    // A step that takes too long must not be vouched for.
    atomic_store(&fake_engine()->stuck, 1);
    const int client = client_connect(&server);
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":1}");
    wait_engine_active(1);
    ck_assert(falls_silent(manager, 2000)); // one came every 200 ms until the step was 400 ms old
    atomic_store(&fake_engine()->stuck, 0);
    expect_notice(manager, "WATCHDOG=1");
    close(client);
    srv_server_stop(server.server);
    expect_notice(manager, "STOPPING=1");
    ck_assert_int_eq(fixture_join(&server), 0);
    close(manager);
}
END_TEST

// ---- addresses -----------------------------------------------------------------------------------------------------

static eng_status try_listen(const char *where, char *text, size_t size) {
    char address[160];
    eng_error error = {0};
    int descriptor = -1;
    const eng_status status = srv_listen(where, 0640, &descriptor, address, sizeof address, &error);

    snprintf(text, size, "%s", status ? error.text : address);
    if (descriptor >= 0)
        close(descriptor);
    return status;
}

START_TEST(used_ports_are_named) {
    char where[64], text[512];

    fixture_start(&server, NULL);
    snprintf(where, sizeof where, "127.0.0.1:%d", server.port);
    ck_assert_int_eq(try_listen(where, text, sizeof text), ENG_IO);
    ck_assert_ptr_nonnull(strstr(text, where));
    ck_assert_ptr_nonnull(strstr(text, "in use"));
    ck_assert_int_eq(fixture_stop(&server), 0);
    ck_assert_int_eq(try_listen("127.0.0.1:0", text, sizeof text), ENG_OK);
    ck_assert_ptr_null(strstr(text, ":0"));
    ck_assert_int_eq(try_listen("no.such.host.invalid:80", text, sizeof text), ENG_IO);
}
END_TEST

START_TEST(unix_sockets) {
    char folder[] = "/tmp/mesa-socket-XX"
                    "XX"
                    "XX",
         where[128], text[512], path[100], long_path[256];
    struct stat info;

    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/s", folder);
    snprintf(where, sizeof where, "unix:%s", path);
    // A stale one is replaced; the mode is as configured.
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(try_listen(where, text, sizeof text), ENG_OK);
        ck_assert_int_eq(stat(path, &info), 0);
        ck_assert(S_ISSOCK(info.st_mode) && (info.st_mode & 0777) == 0640);
    }
    // A live one is not.
    const char *const options[] = {"--listen", where, NULL};
    fixture_start(&server, options);
    ck_assert_int_eq(try_listen(where, text, sizeof text), ENG_IO);
    ck_assert_ptr_nonnull(strstr(text, "another process"));
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    const int client = socket(AF_UNIX, SOCK_STREAM, 0);
    ck_assert_int_eq(connect(client, (const struct sockaddr *)&name, sizeof name), 0);
    answer answer;
    client_post(client, "/v1/completions", "{\"prompt\":\"hi\",\"stream\":true}");
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    close(client);
    ck_assert_int_eq(fixture_stop(&server), 0);
    ck_assert_int_ne(stat(path, &info), 0); // gone with the server
    // Nothing but a socket is removed.
    fclose(fopen(path, "w"));
    ck_assert_int_eq(try_listen(where, text, sizeof text), ENG_IO);
    ck_assert_int_eq(stat(path, &info), 0);
    unlink(path);
    snprintf(long_path, sizeof long_path, "unix:%s/%0120d", folder, 1);
    ck_assert_int_eq(try_listen(long_path, text, sizeof text), ENG_IO);
    ck_assert_int_eq(try_listen("unix:/no/such/folder/s", text, sizeof text), ENG_IO);
    ck_assert_ptr_nonnull(strstr(text, "No such file"));
    rmdir(folder);
}
END_TEST

// ---- the log -------------------------------------------------------------------------------------------------------

START_TEST(log_holds_no_content) {
    static const char *const bodies[] = {
        "{\"prompt\":\"CANARY\\n\\u001b[31m\",\"max_tokens\":1}",
        "{\"prompt\":\"CANARY\",\"session\":\"CANARY\"}",
        "{\"model\":\"CANARY\"}",
        "CANARY{\"bad",
        "{\"stop\":\"CANARY\",\"prompt\":[\"CANARY\",1]}",
    };
    answer answer;

    fixture_start(&server, NULL);
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        fixture_post(&server, "/v1/completions", bodies[i], &answer);
        ck_assert_ptr_null(strstr(answer.body, "CANARY"));
        answer_free(&answer);
    }
    fixture_get(&server, "/CANARY?CANARY", &answer);
    ck_assert_ptr_null(strstr(answer.body, "CANARY"));
    answer_free(&answer);
    fixture_get(&server, "/v1/models/CANARY", &answer);
    ck_assert_ptr_null(strstr(answer.body, "CANARY"));
    answer_free(&answer);
    const int client = client_connect(&server);
    client_puts(client, "CANARY /health HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer CANARY\r\n\r\n");
    client_read(client, &answer, false);
    ck_assert_int_eq(answer.status, 405);
    answer_free(&answer);
    close(client);
    wanted_line = "\"status\":405"; // which comes after the answer
    wait_for(log_says, wanted_line);
    char *log = fixture_log(&server); // at level debug
    ck_assert_ptr_null(strstr(log, "CANARY"));
    ck_assert_ptr_nonnull(strstr(log, "\"route\":\"/v1/completions\""));
    for (char *line = strtok(log, "\n"); line; line = strtok(NULL, "\n")) {
        json_t *json = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        ck_assert_msg(json != NULL, "%s", line);
        json_decref(json);
    }
    free(log);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(repeats_are_counted) {
    int pipes[2];
    char text[8192] = "";

    ck_assert_int_eq(pipe(pipes), 0);
    srv_log *log = srv_log_create(pipes[1], ENG_LOG_INFO);
    for (int i = 0; i < 100; i++)
        srv_log_repeated(log, ENG_LOG_WARNING, "same", "line %d", i);
    srv_log_repeated(log, ENG_LOG_WARNING, "other", "quote \" newline \n escape \x1b end");
    srv_log_write(log, ENG_LOG_DEBUG, "debug", "below the level");
    close(pipes[1]);
    ck_assert_int_gt(read(pipes[0], text, sizeof text - 1), 0);
    int lines = 0;
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        lines++;
    ck_assert(lines == 6 || lines == 11); // the second: ten seconds passed between them
    ck_assert_ptr_nonnull(strstr(text, "quote \\\" newline \\n escape \\u001b end"));
    srv_log_free(log);
    close(pipes[0]);
}
END_TEST

static Suite *lifecycle_suite(void) {
    Suite *suite = suite_create("lifecycle");
    TCase *tests = tcase_create("lifecycle");
    tcase_add_test(tests, serves_while_loading);
    tcase_add_test(tests, stops_while_loading);
    tcase_add_test(tests, unloadable_model_ends_with_4);
    tcase_add_test(tests, several_models);
    tcase_add_test(tests, empty_prompt_without_bos);
    tcase_add_test(tests, drain_finishes_what_runs);
    tcase_add_test(tests, draining_closes_after_the_answer);
    tcase_add_test(tests, drain_deadline_says_so);
    tcase_add_test(tests, stop_with_a_slow_reader);
    tcase_add_test(tests, half_closed_slow_reader_is_let_go);
    tcase_add_test(tests, lost_device_ends_with_1);
    tcase_add_test(tests, service_manager_is_told);
    tcase_add_test(tests, used_ports_are_named);
    tcase_add_test(tests, unix_sockets);
    tcase_add_test(tests, log_holds_no_content);
    tcase_add_test(tests, repeats_are_counted);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(lifecycle_suite)

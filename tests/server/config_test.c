// SPDX-License-Identifier: Apache-2.0
// Configuration: sources and their order, what is refused and how it is named, the printed form; and the buffers and
// JSON strings that everything else is written with.
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/buf.h"
#include "server/config.h"
#include "server/json_writer.h"
#include "tests/check_main.h"

static char path[64];

static void write_file(const char *text) {
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
}

static void setup(void) {
    snprintf(path, sizeof path, "/tmp/mesa-config-%d", (int)getpid());
}

static void teardown(void) {
    unlink(path);
}

// arguments and environment: words separated by spaces; @ stands for the file's path.
static eng_status load(srv_config *config, const char *arguments, const char *environment, eng_error *error) {
    char *words[32] = {NULL}, *variables[32] = {NULL}, *rest = NULL;
    char argument_text[1024], environment_text[1024];
    int count = 1;
    size_t variable_count = 0;
    srv_config_action action;
    static char program[] = "mesa-server";

    words[0] = program;
    snprintf(argument_text, sizeof argument_text, "%s", arguments);
    snprintf(environment_text, sizeof environment_text, "%s", environment);
    for (char *word = strtok_r(argument_text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        words[count++] = strcmp(word, "@") == 0 ? path : word;
    for (char *word = strtok_r(environment_text, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        variables[variable_count++] = word;
    *error = (eng_error){0};
    return srv_config_load(config, count, words, variables, &action, error);
}

static void expect_refused(const char *arguments, const char *environment, const char *named) {
    srv_config config;
    eng_error error;

    ck_assert_msg(load(&config, arguments, environment, &error) != ENG_OK, "accepted: %s %s", arguments, environment);
    ck_assert_msg(strstr(error.text, named) != NULL, "\"%s\" lacks %s", error.text, named);
    srv_config_free(&config);
}

START_TEST(defaults) {
    srv_config config;
    eng_error error;

    ck_assert_msg(load(&config, "--model /x/demo/", "", &error) == ENG_OK, "%s", error.text);
    ck_assert_uint_eq(config.model_count, 1);
    ck_assert_str_eq(config.models[0].name, "demo");
    ck_assert_str_eq(config.models[0].folder, "/x/demo/");
    ck_assert_uint_eq(config.listen_count, 1);
    ck_assert_str_eq(config.listen[0], "127.0.0.1:8080");
    ck_assert_int_eq(config.max_body, 16 << 20);
    ck_assert_int_eq(config.max_headers, 16 << 10);
    ck_assert_int_eq(config.header_time_ms, 10000);
    ck_assert_int_eq(config.body_time_ms, 60000);
    ck_assert_int_eq(config.connections, 1024);
    ck_assert_int_eq(config.queue_requests, 256);
    ck_assert_int_eq(config.queue_tokens, 1 << 20);
    ck_assert_double_eq(config.key_queue, 0.5);
    ck_assert_double_eq(config.degrade_queue, 0.5);
    ck_assert_int_eq(config.max_tokens, 65536);
    ck_assert_int_eq(config.max_prompt_tokens, 1 << 20);
    ck_assert_int_eq(config.drain_time_ms, 30000);
    ck_assert_int_eq(config.ping_ms, 0);
    ck_assert_int_eq(config.socket_mode, 0660);
    ck_assert_int_eq(config.rows, 0);
    ck_assert(config.allow_exact);
    srv_config_free(&config);
}
END_TEST

START_TEST(stronger_sources_win) {
    srv_config config;
    eng_error error;

    write_file("# comment\n[server]\nmodel = a=/a\nmodel = b=/b\nrows = 3\nqueue_tokens = 5\nping = 1.5\n"
               "listen = unix:/tmp/x\nallow_exact = no\n");
    ck_assert_msg(load(&config, "--config @", "", &error) == ENG_OK, "%s", error.text);
    ck_assert_uint_eq(config.model_count, 2);
    ck_assert_str_eq(config.models[1].name, "b");
    ck_assert_int_eq(config.rows, 3);
    ck_assert_int_eq(config.ping_ms, 1500);
    ck_assert(!config.allow_exact);
    ck_assert_str_eq(config.listen[0], "unix:/tmp/x");
    ck_assert_uint_eq(config.listen_count, 1); // the default's list is gone
    srv_config_free(&config);

    ck_assert_msg(load(&config, "--config=@ --queue-tokens 7 --model c=/c --model d=/d",
                       "MESA_ROWS=4 MESA_QUEUE_TOKENS=6 MESA_MODEL=e=/e MESA_LISTEN=h:1,h:2 MESA_OTHER=x OTHER=y",
                       &error) != ENG_OK,
                  "@ is no path here");
    srv_config_free(&config);
    ck_assert_msg(load(&config, "--config @ --queue-tokens 7 --model c=/c --model d=/d",
                       "MESA_ROWS=4 MESA_QUEUE_TOKENS=6 MESA_MODEL=e=/e MESA_LISTEN=h:1,h:2 MESA_OTHER=x OTHER=y",
                       &error) == ENG_OK,
                  "%s", error.text);
    ck_assert_int_eq(config.rows, 4);
    ck_assert_int_eq(config.queue_tokens, 7);
    ck_assert_uint_eq(config.model_count, 2);
    ck_assert_str_eq(config.models[0].name, "c");
    ck_assert_uint_eq(config.listen_count, 2);
    ck_assert_str_eq(config.listen[1], "h:2");
    srv_config_free(&config);
}
END_TEST

START_TEST(flags_and_credentials) {
    srv_config config;
    eng_error error;

    ck_assert_msg(load(&config,
                       "--allow-anonymous --model /x --keys credential:keys --tls-cert /c --tls-key credential:k",
                       "CREDENTIALS_DIRECTORY=/run/credentials/mesa", &error) == ENG_OK,
                  "%s", error.text);
    ck_assert(config.allow_anonymous);
    ck_assert_str_eq(config.keys, "/run/credentials/mesa/keys");
    ck_assert_str_eq(config.tls_cert, "/c");
    ck_assert_str_eq(config.tls_key, "/run/credentials/mesa/k");
    srv_config_free(&config);
    ck_assert_int_eq(load(&config, "--model /x --allow-anonymous no --allow-exact --rows 3", "", &error), ENG_OK);
    ck_assert(!config.allow_anonymous && config.allow_exact);
    ck_assert_int_eq(config.rows, 3);
    ck_assert_ptr_null(config.keys);
    ck_assert_ptr_null(config.admin_listen);
    srv_config_free(&config);
    ck_assert_int_eq(load(&config, "--model /x --allow-anonymous", "MESA_ADMIN_LISTEN=unix:/a MESA_KEYS=/k", &error),
                     ENG_OK);
    ck_assert(config.allow_anonymous);
    ck_assert_str_eq(config.admin_listen, "unix:/a");
    ck_assert_str_eq(config.keys, "/k");
    srv_config_free(&config);
}
END_TEST

START_TEST(bad_command_lines) {
    expect_refused("", "", "--model");
    expect_refused("demo", "", "demo");
    expect_refused("--model", "", "--model");
    expect_refused("--model /x --colour red", "", "--colour");
    expect_refused("--model /x --rows", "", "--rows");
    expect_refused("--model /x --rows 0", "", "--rows");
    expect_refused("--model /x --rows -1", "", "--rows");
    expect_refused("--model /x --rows 100000", "", "1 to 4096");
    expect_refused("--model /x --rows 1.0", "", "--rows");
    expect_refused("--model /x --rows 2 --rows 3", "", "twice");
    expect_refused("--model /x --queue-requests 0", "", "--queue-requests");
    expect_refused("--model /x --max-body 16T", "", "--max-body");
    expect_refused("--model /x --max-body 512M", "", "--body-memory");
    expect_refused("--model /x --listen 127.0.0.1:65536", "", "--listen");
    expect_refused("--model /x --listen 127.0.0.1:-1", "", "--listen");
    expect_refused("--model /x --listen 127.0.0.1:http", "", "--listen");
    expect_refused("--model /x --listen 8080", "", "--listen");
    expect_refused("--model /x --listen unix:", "", "--listen");
    expect_refused("--model /x --header-time nan", "", "--header-time");
    expect_refused("--model /x --header-time 1e9", "", "--header-time");
    expect_refused("--model /x --min-cg-tolerance 2", "", "--min-cg-tolerance");
    expect_refused("--model /x --allow-exact maybe", "", "--allow-exact");
    expect_refused("--model /x --socket-mode 0888", "", "--socket-mode");
    expect_refused("--model /x --log-level loud", "", "--log-level");
    expect_refused("--model a=/x --model a=/y", "", "each name once");
    expect_refused("--model =/x", "", "--model");
    expect_refused("--model /x --help=1", "", "--help");
    expect_refused("--model /x --admin-listen 8080", "", "--admin-listen");
    expect_refused("--model /x --admin-listen h:1 --admin-listen h:2", "", "twice");
    expect_refused("--model /x --allow-anonymous perhaps", "", "--allow-anonymous");
    expect_refused("--model /x --tls-cert /c", "", "--tls-key");
    expect_refused("--model /x --tls-key /c", "", "--tls-cert");
    expect_refused("--model /x --keys credential:", "CREDENTIALS_DIRECTORY=/run", "keys");
    expect_refused("--model /x --keys credential:../x", "CREDENTIALS_DIRECTORY=/run", "has no /");
    expect_refused("--model /x --keys credential:x", "", "CREDENTIALS_DIRECTORY");
    expect_refused("--model /x", "MESA_ROWS=many", "MESA_ROWS");
}
END_TEST

START_TEST(bad_files) {
    static const struct {
        const char *text, *named;
    } cases[] = {
        {"[server]\nmodel = /x\ncolour = red\n", ":3: unknown key colour"},
        {"[server]\nmodel = /x\nrows = 0\n", ":3: rows"},
        {"[server]\nmodel = /x\nrows = 1\nrows = 2\n", ":4: rows: given twice"},
        {"[server]\nmodel = /x\n\nnonsense\n", ":4: neither"},
        {"[server\nmodel = /x\n", ":1: neither"},
        {"[other]\nmodel = /x\n", ":2: only section [server]"},
        {"model = /x\n", ":1: only section [server]"},
        {"[server]\nrows = \"8\"\n", ":2: rows"},
        {"[server]\nqueue_tokens = 8080.0\n", ":2: queue_tokens"},
        {"", "--model"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(cases[i].text);
        expect_refused("--config @", "", cases[i].named);
    }
    char *text = calloc(1, 1 << 21);
    sprintf(text, "[server]\nmodel = /%0300d\n", 1);
    write_file(text);
    expect_refused("--config @", "", ":2: the line is longer");
    for (size_t i = 0; i < 20000; i++)
        strcpy(text + i * 100,
               "# 345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
               "0123456789\n");
    write_file(text);
    expect_refused("--config @", "", "larger than 1 MiB");
    free(text);
    unlink(path);
    expect_refused("--config @", "", "No such file");
    expect_refused("--config /tmp", "", "/tmp: is a directory");
}
END_TEST

START_TEST(printed_form_reads_back) {
    srv_config config, again;
    eng_error error;
    char first[4096] = "", second[4096] = "";

    ck_assert_int_eq(
        load(&config, "--model a=/x --rows 7 --ping 0.25 --max-body 4K --min-cg-tolerance 1e-7", "", &error), ENG_OK);
    FILE *out = fmemopen(first, sizeof first, "w");
    srv_config_print(&config, out);
    fclose(out);
    write_file(first);
    ck_assert_msg(load(&again, "--config @", "", &error) == ENG_OK, "%s", error.text);
    out = fmemopen(second, sizeof second, "w");
    srv_config_print(&again, out);
    fclose(out);
    ck_assert_str_eq(first, second);
    ck_assert_ptr_nonnull(strstr(first, "ping = 0.25\n"));
    ck_assert_int_eq(again.max_body, 4096);
    srv_config_free(&config);
    srv_config_free(&again);
}
END_TEST

START_TEST(buffers_are_bounded) {
    srv_buf buf;
    size_t length;

    srv_buf_init(&buf, 1000);
    for (int i = 0; i < 100; i++)
        srv_buf_append(&buf, "0123456789", 10);
    ck_assert(srv_buf_ok(&buf));
    srv_buf_puts(&buf, "");
    ck_assert(srv_buf_ok(&buf));
    srv_buf_puts(&buf, "x");
    ck_assert(!srv_buf_ok(&buf));
    ck_assert_uint_eq(buf.length, 1000);
    srv_buf_append(&buf, "y", 0);
    ck_assert_ptr_null(srv_buf_take(&buf, &length)); // failed content is handed to nobody
    srv_buf_append(&buf, "again", 5);
    char *data = srv_buf_take(&buf, &length);
    ck_assert_str_eq(data, "again");
    ck_assert_uint_eq(length, 5);
    free(data);
    srv_buf_append(&buf, "z", SIZE_MAX);
    ck_assert(!srv_buf_ok(&buf));
    srv_buf_free(&buf);
}
END_TEST

static void expect_json(const char *bytes, size_t length, const char *wanted) {
    srv_buf out;
    srv_buf_init(&out, 1000);
    srv_json_string(&out, bytes, length);
    ck_assert_str_eq(out.data, wanted);
    srv_buf_free(&out);
}

START_TEST(json_strings_and_numbers) {
    static const struct {
        double value;
        const char *wanted;
    } numbers[] = {{0.1, "0.1"}, {INFINITY, "null"}, {-INFINITY, "null"}, {NAN, "null"}, {1e-308, "1e-308"}};

    expect_json("", 0, "\"\"");
    expect_json("a\"b\\c\n\t\x01\x7f/", 10, "\"a\\\"b\\\\c\\n\\t\\u0001\\u007f/\"");
    expect_json("a\0b", 3, "\"a\\u0000b\"");
    expect_json("\xc3\xa9\xf0\x9f\x98\x80", 6, "\"\xc3\xa9\xf0\x9f\x98\x80\"");
    expect_json("a\xff", 2, "\"a\xef\xbf\xbd\"");
    expect_json("\xc0\xaf", 2, "\"\xef\xbf\xbd\xef\xbf\xbd\"");
    expect_json("\xed\xa0\x80x", 4, "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdx\"");
    expect_json("\xf0\x9f\x98", 3, "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    expect_json("\xf4\x90\x80\x80", 4, "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        srv_buf out;
        srv_buf_init(&out, 100);
        srv_json_number(&out, numbers[i].value);
        ck_assert_str_eq(out.data, numbers[i].wanted);
        srv_buf_free(&out);
    }
    srv_buf out;
    srv_buf_init(&out, 100);
    srv_json_float(&out, 1e-4f);
    ck_assert_str_eq(out.data, "0.0001");
    srv_buf_free(&out);
}
END_TEST

static Suite *config_suite(void) {
    Suite *suite = suite_create("config");
    TCase *tests = tcase_create("config");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, defaults);
    tcase_add_test(tests, stronger_sources_win);
    tcase_add_test(tests, flags_and_credentials);
    tcase_add_test(tests, bad_command_lines);
    tcase_add_test(tests, bad_files);
    tcase_add_test(tests, printed_form_reads_back);
    tcase_add_test(tests, buffers_are_bounded);
    tcase_add_test(tests, json_strings_and_numbers);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(config_suite)

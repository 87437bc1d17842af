// SPDX-License-Identifier: Apache-2.0
// Who may do what: keys and their limits, addresses that other machines reach, administration, TLS, and what the log
// must not say. Keys are hashed by the library that the server uses; their texts are the tests' own.
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

#define ALICE "Authorization: Bearer alice-0123456789abcdef\r\n"
#define BOB "Authorization: Bearer bob-0123456789abcdef\r\n"
#define HELLO "{\"prompt\":\"hi\",\"max_tokens\":1}"

static fixture server;
static char path[64], second_path[64];

static void setup(void) {
    snprintf(path, sizeof path, "/tmp/mesa-keys-%d", (int)getpid());
    snprintf(second_path, sizeof second_path, "/tmp/mesa-cert-%d", (int)getpid());
}

static void teardown(void) {
    unlink(path);
    unlink(second_path);
}

static void write_file(const char *name, const char *text) {
    FILE *file = fopen(name, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
}

static void add_key(const char *name, const char *key, const char *limits) {
    uint8_t digest[32];
    FILE *file = fopen(path, "a");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(gnutls_hash_fast(GNUTLS_DIG_SHA256, key, strlen(key), digest), 0);
    fprintf(file, "%s ", name);
    for (size_t i = 0; i < sizeof digest; i++)
        fprintf(file, i % 2 ? "%02x" : "%02X", digest[i]);
    fprintf(file, " %s\n", limits);
    fclose(file);
}

static void start_with_keys(const char *alice_limits, const char *const *more) {
    const char *options[16] = {"--keys", path};
    int count = 2;

    write_file(path, "# a comment\n\n");
    add_key("alice", "alice-0123456789abcdef", alice_limits);
    add_key("bob", "bob-0123456789abcdef", "");
    for (; more && *more; more++)
        options[count++] = *more;
    fixture_start(&server, options);
}

static int status_of(const char *method, const char *where, const char *headers, const char *body) {
    answer answer;
    fixture_ask(&server, method, where, headers, body, &answer);
    const int status = answer.status;
    if (status == 401 && strcmp(method, "HEAD") != 0)
        expect_error(&answer, 401, NULL, headers[0] ? "invalid_api_key" : "missing_api_key");
    ck_assert_int_eq(status == 401, answer_has(&answer, "WWW-Authenticate: Bearer realm=\"mesa\"\r"));
    ck_assert_int_eq(status == 405, answer_has(&answer, "Allow: "));
    answer_free(&answer);
    return status;
}

// Every path with every method, without a key and with one.
START_TEST(every_route_needs_a_key) {
    static const char *const methods[] = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"};
    static const struct {
        const char *path;
        bool is_public;
        int get, post; // with a key
    } routes[] = {
        {"/health", true, 200, 405},
        {"/health/ready", true, 200, 405},
        {"/", true, 200, 405},
        {"/metrics", false, 200, 405},
        {"/openapi.json", false, 200, 405},
        {"/tokenizer_info", false, 200, 405},
        {"/v1/models", false, 200, 405},
        {"/v1/models/demo", false, 200, 405},
        {"/v1/completions", false, 405, 200},
        {"/tokenize", false, 405, 200},
        {"/v1/sessions", false, 200, 201},
        {"//v1/completions", false, 404, 404},
        {"/v1/completions/", false, 404, 404},
        {"/V1/completions", false, 404, 404},
        {"/health/", false, 404, 404},
        {"//", false, 404, 404},
        {"/%2e/metrics", false, 404, 404},
        {"/nothing", false, 404, 404},
    };
    start_with_keys("", NULL);
    for (size_t r = 0; r < sizeof routes / sizeof *routes; r++)
        for (size_t m = 0; m < sizeof methods / sizeof *methods; m++) {
            const bool get = m < 2, post = m == 2;
            const char *body = post ? HELLO : NULL;
            const int other = routes[r].get == 404 ? 404 : 405;
            const int with_key = get ? routes[r].get : post ? routes[r].post : other;
            const int got = status_of(methods[m], routes[r].path, ALICE, body);
            ck_assert_msg(got == with_key, "%s %s: %d, want %d", methods[m], routes[r].path, got, with_key);
            const int bare = status_of(methods[m], routes[r].path, "", body);
            ck_assert_msg(bare == (routes[r].is_public ? with_key : 401), "%s %s without a key: %d", methods[m],
                          routes[r].path, bare);
        }
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(forms_of_authorization) {
    static const struct {
        const char *headers;
        int status;
    } cases[] = {
        {ALICE, 200},
        {BOB, 200},
        {"authorization: bearer alice-0123456789abcdef\r\n", 200},
        {"Authorization: Bearer   alice-0123456789abcdef\r\n", 200},
        {"Authorization: Bearer alice-0123456789abcdef \t\r\n", 200},
        {"Authorization: Bearer alice-0123456789abcdeg\r\n", 401},
        {"Authorization: Bearer alice-0123456789abcde\r\n", 401},
        {"Authorization: Bearer alice-0123456789abcdef0\r\n", 401},
        {"Authorization: Bearer \r\n", 401},
        {"Authorization: Bearer\r\n", 401},
        {"Authorization: Basic YTpi\r\n", 401},
        {"Authorization: alice-0123456789abcdef\r\n", 401},
        {"Authorization: \r\n", 401},
        {ALICE BOB, 401},
        {ALICE ALICE, 401},
        {"X-Api-Key: alice-0123456789abcdef\r\nAuthorization: x\r\n", 401},
    };
    start_with_keys("", NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int got = status_of("POST", "/v1/completions", cases[i].headers, HELLO);
        ck_assert_msg(got == cases[i].status, "%s: %d", cases[i].headers, got);
    }
    // A body that nobody will read is not waited for.
    const int client = client_connect(&server);
    answer answer;
    client_puts(client, "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9999999\r\n"
                        "Expect: 100-continue\r\n\r\n");
    client_read(client, &answer, false);
    expect_error(&answer, 401, NULL, "missing_api_key");
    answer_free(&answer);
    close(client);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// The engine takes turns over the owners of what waits.
START_TEST(keys_are_owners) {
    start_with_keys("", NULL);
    ck_assert_int_eq(status_of("POST", "/v1/completions", BOB, HELLO), 200);
    ck_assert_int_eq(atomic_load(&fake_engine()->last_owner), 2);
    ck_assert_int_eq(status_of("POST", "/v1/completions", ALICE, HELLO), 200);
    ck_assert_int_eq(atomic_load(&fake_engine()->last_owner), 1);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(empty_bearer_without_keys) {
    answer answer;
    fixture_start(&server, NULL);
    fixture_ask(&server, "POST", "/v1/completions", "Authorization: Bearer \r\n", HELLO, &answer);
    ck_assert_int_eq(answer.status, 200);
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(rate_of_a_key) {
    enum { MANY = 6000 }; // a slow machine sends them while the budget grows again
    answer answer;
    int refused = 0;

    start_with_keys("rate=60", NULL);
    for (int i = 0; i < MANY && refused == 0; i++) {
        fixture_ask(&server, "POST", "/v1/completions", ALICE, HELLO, &answer);
        if (answer.status == 429) {
            expect_error(&answer, 429, NULL, "rate_limit_exceeded");
            ck_assert(answer_has(&answer, "Retry-After: 1\r"));
            ck_assert_int_ge(i, 60);
            refused++;
        } else
            ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
    }
    ck_assert_int_eq(refused, 1);
    ck_assert_int_eq(status_of("POST", "/v1/completions", BOB, HELLO), 200); // another's budget
    ck_assert_int_eq(status_of("GET", "/v1/models", ALICE, NULL), 200);      // only work counts
    sleep_ms(1100);                                                          // as long as Retry-After said
    ck_assert_int_eq(status_of("POST", "/v1/completions", ALICE, HELLO), 200);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(requests_of_a_key_at_once) {
    int clients[2];
    answer answer;

    start_with_keys("max_requests=2", NULL);
    atomic_store(&fake_engine()->step_us, 5000);
    for (int i = 0; i < 2; i++) {
        clients[i] = client_connect(&server);
        client_ask(clients[i], "POST", "/v1/completions", ALICE, "{\"prompt\":\"hi\",\"max_tokens\":60000}");
    }
    wait_engine_active(2);
    fixture_ask(&server, "POST", "/v1/completions", ALICE, HELLO, &answer);
    expect_error(&answer, 429, NULL, "too_many_requests");
    ck_assert(answer_has(&answer, "Retry-After: "));
    answer_free(&answer);
    ck_assert_int_eq(status_of("POST", "/v1/completions", BOB, HELLO), 200);
    // Whoever leaves, and whoever is refused for another reason, gives the place back.
    close(clients[0]);
    close(clients[1]);
    wait_engine_empty();
    for (int i = 0; i < 5; i++) {
        ck_assert_int_eq(status_of("POST", "/v1/completions", ALICE, "{"), 400);
        ck_assert_int_eq(status_of("POST", "/v1/completions", ALICE, HELLO), 200);
    }
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(models_of_a_key) {
    static const char *const more[] = {"--model", "other=/models/other", NULL};
    answer answer;

    start_with_keys("models=other,third", more);
    fixture_ask(&server, "POST", "/v1/completions", ALICE, HELLO, &answer);
    expect_error(&answer, 403, "model", "model_not_allowed"); // the first model is the default
    answer_free(&answer);
    fixture_ask(&server, "POST", "/tokenize", ALICE, "{\"prompt\":\"x\",\"model\":\"demo\"}", &answer);
    expect_error(&answer, 403, "model", "model_not_allowed");
    answer_free(&answer);
    ck_assert_int_eq(
        status_of("POST", "/v1/completions", ALICE, "{\"model\":\"other\",\"prompt\":\"hi\",\"max_tokens\":1}"), 200);
    ck_assert_int_eq(status_of("GET", "/v1/models/other", ALICE, NULL), 200);
    ck_assert_int_eq(status_of("GET", "/v1/models/demo", ALICE, NULL), 404);
    ck_assert_int_eq(status_of("GET", "/v1/models/demo", BOB, NULL), 200);
    fixture_ask(&server, "GET", "/v1/models", ALICE, NULL, &answer);
    json_t *json = answer_json(&answer);
    ck_assert_uint_eq(json_array_size(json_object_get(json, "data")), 1);
    json_decref(json);
    answer_free(&answer);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static bool log_says(const char *text) {
    char *log = fixture_log(&server);
    const bool found = strstr(log, text) != NULL;
    free(log);
    return found;
}
static bool bad_file_told(void) {
    return log_says("must be followed by the 64 hexadecimal digits of the key's SHA-256; nothing is changed");
}
static bool new_file_told(void) {
    return log_says("1 keys are read");
}

// A key is added and another withdrawn without a restart; a request that runs meanwhile goes on, and so does a stream.
START_TEST(keys_are_read_again) {
    answer answer;

    start_with_keys("max_requests=1", NULL);
    atomic_store(&fake_engine()->step_us, 2000);
    const int running = client_connect(&server);
    client_ask(running, "POST", "/v1/completions", ALICE, "{\"prompt\":\"hi\",\"max_tokens\":500,\"stream\":true}");
    wait_engine_active(1);
    atomic_store(&fake_engine()->held, 1); // until the keys are others
    write_file(path, "nonsense\n");
    srv_server_reload(server.server);
    wait_for(bad_file_told, "a bad file is told");
    ck_assert_int_eq(status_of("GET", "/v1/models", BOB, NULL), 200);
    write_file(path, "");
    add_key("carol", "carol-0123456789abcdef", "");
    srv_server_reload(server.server);
    wait_for(new_file_told, "the new keys are there");
    ck_assert_int_eq(status_of("GET", "/v1/models", "Authorization: Bearer carol-0123456789abcdef\r\n", NULL), 200);
    ck_assert_int_eq(status_of("GET", "/v1/models", BOB, NULL), 401);
    ck_assert_int_eq(status_of("POST", "/v1/completions", ALICE, HELLO), 401);
    atomic_store(&fake_engine()->held, 0);
    client_read(running, &answer, false);
    ck_assert_int_eq(answer.status, 200);
    ck_assert_ptr_nonnull(strstr(answer.body, "[DONE]"));
    answer_free(&answer);
    close(running);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static bool model_is_opening(void) {
    return atomic_load(&fake_engine()->opening) >= 2;
}

// What was read when the round began holds, whatever stands in the file when its models are there.
START_TEST(keys_are_read_once) {
    start_with_keys("", NULL);
    atomic_store(&fake_engine()->revision, 1);
    atomic_store(&fake_engine()->hold_open, 1);
    write_file(path, "");
    add_key("carol", "carol-0123456789abcdef", "");
    srv_server_reload(server.server);
    wait_for(model_is_opening, "a model is being opened");
    write_file(path, "nonsense\n");
    ck_assert_int_eq(status_of("GET", "/v1/models", BOB, NULL), 200);
    atomic_store(&fake_engine()->hold_open, 0);
    wait_for(new_file_told, "the new keys are there");
    ck_assert_int_eq(status_of("GET", "/v1/models", "Authorization: Bearer carol-0123456789abcdef\r\n", NULL), 200);
    ck_assert_int_eq(status_of("GET", "/v1/models", BOB, NULL), 401);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

#define DIGEST "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

START_TEST(bad_key_files) {
    static const struct {
        const char *text, *named;
    } cases[] = {
        {"", "the file is empty"},
        {"# nobody\n", "no key in the file"},
        {"alice\n", ":1: the name must be followed"},
        {"alice 0123\n", ":1: the name must be followed"},
        {"\nal/ice " DIGEST "\n", ":2: a name has"},
        {"alice " DIGEST "0\n", ":1: "},
        {"alice g123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n", ":1: "},
        {"alice " DIGEST " rate=0\n", ":1: rate="},
        {"alice " DIGEST " rate=1.5\n", ":1: rate="},
        {"alice " DIGEST " rate=-1\n", ":1: rate="},
        {"alice " DIGEST " max_requests=many\n", ":1: max_requests="},
        {"alice " DIGEST " models=\n", ":1: models="},
        {"alice " DIGEST " colour=red\n", ":1: the limits are"},
        {"alice " DIGEST "\nalice " DIGEST "\n", ":2: the name is there already"},
        {"alice " DIGEST "\nbob " DIGEST "\n", ":2: the key is there already"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        srv_keys *keys = NULL;
        eng_error error = {0};
        write_file(path, cases[i].text);
        ck_assert_msg(srv_keys_load(path, &keys, &error) != ENG_OK, "accepted: %s", cases[i].text);
        ck_assert_msg(strstr(error.text, cases[i].named) && strstr(error.text, path), "%s: %s", cases[i].text,
                      error.text);
        ck_assert_ptr_null(strstr(error.text, "0123456789abcdef"));
        ck_assert_ptr_null(keys);
    }
    srv_keys *keys = NULL;
    eng_error error = {0};
    ck_assert_int_eq(srv_keys_load("/tmp", &keys, &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "/tmp: not a regular file"));
    write_file(path, " \talice\t" DIGEST "  rate=5\tmax_requests=7 models=a,b\r\n");
    error = (eng_error){0};
    ck_assert_msg(srv_keys_load(path, &keys, &error) == ENG_OK, "%s", error.text);
    ck_assert_uint_eq(srv_keys_count(keys), 1);
    srv_keys_free(keys);
}
END_TEST

static void try_address(const char *address, const char *const *more, eng_status wanted, const char *named) {
    const char *arguments[16] = {"mesa-server", "--model", "demo=/models/demo", "--listen", address};
    char *environment[] = {NULL};
    int count = 5;
    srv_config config;
    srv_config_action action;
    srv_server *made = NULL;
    eng_error error = {0};
    srv_log *log = srv_log_create(STDERR_FILENO, ENG_LOG_ERROR);

    for (; more && *more; more++)
        arguments[count++] = *more;
    ck_assert_msg(srv_config_load(&config, count, (char *const *)arguments, environment, &action, &error) == ENG_OK,
                  "%s", error.text);
    const eng_status status = srv_server_create(&config, log, &made, &error);
    ck_assert_msg(status == wanted, "%s: status %d, %s", address, (int)status, error.text);
    if (wanted)
        ck_assert_msg(strstr(error.text, named) != NULL, "%s lacks %s", error.text, named);
    srv_server_free(made);
    srv_config_free(&config);
    srv_log_free(log);
}

START_TEST(exposed_addresses_need_keys) {
    static const char *const exposed[] = {"0.0.0.0:0", "*:0", "[::]:0", "[::ffff:0.0.0.0]:0"};
    static const char *const local[] = {"127.0.0.1:0", "127.9.9.9:0", "localhost:0"};
    static const char *const anonymous[] = {"--allow-anonymous", NULL};
    const char *const with_keys[] = {"--keys", path, NULL};
    const char *const admin[] = {"--admin-listen", "0.0.0.0:0", NULL};

    write_file(path, "alice " DIGEST "\n");
    for (size_t i = 0; i < sizeof exposed / sizeof *exposed; i++) {
        try_address(exposed[i], NULL, ENG_INVALID, "--allow-anonymous");
        try_address(exposed[i], NULL, ENG_INVALID, exposed[i]);
    }
    try_address(exposed[0], anonymous, ENG_OK, NULL);
    try_address(exposed[0], with_keys, ENG_OK, NULL);
    for (size_t i = 0; i < sizeof local / sizeof *local; i++)
        try_address(local[i], NULL, ENG_OK, NULL);
    try_address(local[0], admin, ENG_OK, NULL); // its keys are a firewall's matter
}
END_TEST

START_TEST(administration_has_its_own_address) {
    static const char *const more[] = {"--admin-listen", "127.0.0.1:0", NULL};
    static const struct {
        const char *path;
        int status;
    } cases[] = {{"/metrics", 200},        {"/health", 200}, {"/health/ready", 200}, {"/v1/models", 404},
                 {"/v1/completions", 404}, {"/", 404},       {"/openapi.json", 404}};
    answer answer;

    start_with_keys("", more);
    const int port = fixture_port(&server, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int client = client_connect_port(&server, port);
        client_ask(client, "GET", cases[i].path, "", NULL);
        client_read(client, &answer, false);
        ck_assert_msg(answer.status == cases[i].status, "%s: %d", cases[i].path, answer.status);
        answer_free(&answer);
        close(client);
    }
    ck_assert_int_eq(status_of("GET", "/metrics", "", NULL), 401);
    ck_assert_int_eq(status_of("GET", "/metrics", BOB, NULL), 200);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- the log -------------------------------------------------------------------------------------------------------

#define CANARY "CANARY-7c1f"

START_TEST(log_keeps_secrets) {
    static const char *const bodies[] = {
        "{\"prompt\":\"" CANARY "\",\"max_tokens\":2}",
        "{\"prompt\":\"" CANARY "\\n\\u001b[31m\",\"session\":\"" CANARY "\"}",
        "{\"prompt\":\"" CANARY,
        "{\"model\":\"" CANARY "\"}",
        "{\"prompt\":\"x\",\"stop\":\"" CANARY "\",\"user\":\"" CANARY "\",\"" CANARY "\":1}",
        "{\"prompt\":\"x\",\"cg_mode\":\"" CANARY "\"}",
        "{\"prompt\":\"x\",\"logit_bias\":{\"" CANARY "\":1}}",
        "{\"prompt\":\"" CANARY "\xff\"}",
    };
    answer answer;

    start_with_keys("", NULL);
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        fixture_ask(&server, "POST", "/v1/completions", ALICE "X-Request-Id: " CANARY "\r\n", bodies[i], &answer);
        // A refusal tells the field, never what stood there.
        ck_assert_msg(answer.status == 200 || !strstr(answer.body, CANARY), "%s", answer.body);
        answer_free(&answer);
    }
    fixture_ask(&server, "POST", "/v1/completions", "Authorization: Bearer " CANARY "\r\n", HELLO, &answer);
    ck_assert_int_eq(answer.status, 401);
    ck_assert_ptr_null(strstr(answer.body, CANARY));
    answer_free(&answer);
    fixture_ask(&server, "GET", "/v1/models/" CANARY "%0a{\"forged\":1}?" CANARY, ALICE, NULL, &answer);
    ck_assert_int_eq(answer.status, 404);
    answer_free(&answer);
    fixture_ask(&server, CANARY, "/health", ALICE, NULL, &answer);
    ck_assert_int_eq(answer.status, 405);
    answer_free(&answer);
    char *log = fixture_log(&server);
    ck_assert_msg(!strstr(log, CANARY), "%s", log);
    ck_assert_ptr_null(strstr(log, "0123456789abcdef"));
    ck_assert_ptr_null(strstr(log, "forged"));
    ck_assert_ptr_nonnull(strstr(log, "\"key\":\"alice\""));
    for (const char *line = log; *line; line = strchr(line, '\n') + 1) { // every line is one object
        json_t *json = json_loadb(line, (size_t)(strchr(line, '\n') - line), JSON_REJECT_DUPLICATES, NULL);
        ck_assert_msg(json != NULL, "%s", line);
        json_decref(json);
    }
    free(log);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- TLS -----------------------------------------------------------------------------------------------------------

static void write_pem(const char *name, const gnutls_datum_t *data) {
    char *text = strndup((const char *)data->data, data->size);
    write_file(name, text);
    free(text);
}

// A key and a certificate that it signed itself, in PEM.
static void make_pair(const char *cert_name, const char *key_name) {
    gnutls_x509_privkey_t key;
    gnutls_x509_crt_t cert;
    gnutls_datum_t pem;
    const unsigned char serial = 1;

    ck_assert_int_eq(gnutls_x509_privkey_init(&key), 0);
    ck_assert_int_eq(
        gnutls_x509_privkey_generate(key, GNUTLS_PK_ECDSA, GNUTLS_CURVE_TO_BITS(GNUTLS_ECC_CURVE_SECP256R1), 0), 0);
    ck_assert_int_eq(gnutls_x509_crt_init(&cert), 0);
    ck_assert_int_eq(gnutls_x509_crt_set_version(cert, 3), 0);
    ck_assert_int_eq(gnutls_x509_crt_set_serial(cert, &serial, 1), 0);
    ck_assert_int_eq(gnutls_x509_crt_set_dn_by_oid(cert, GNUTLS_OID_X520_COMMON_NAME, 0, "localhost", 9), 0);
    ck_assert_int_eq(gnutls_x509_crt_set_activation_time(cert, time(NULL) - 60), 0);
    ck_assert_int_eq(gnutls_x509_crt_set_expiration_time(cert, time(NULL) + 3600), 0);
    ck_assert_int_eq(gnutls_x509_crt_set_key(cert, key), 0);
    ck_assert_int_eq(gnutls_x509_crt_sign2(cert, cert, key, GNUTLS_DIG_SHA256, 0), 0);
    ck_assert_int_eq(gnutls_x509_crt_export2(cert, GNUTLS_X509_FMT_PEM, &pem), 0);
    write_pem(cert_name, &pem);
    gnutls_free(pem.data);
    ck_assert_int_eq(gnutls_x509_privkey_export2(key, GNUTLS_X509_FMT_PEM, &pem), 0);
    write_pem(key_name, &pem);
    gnutls_free(pem.data);
    gnutls_x509_crt_deinit(cert);
    gnutls_x509_privkey_deinit(key);
}

typedef struct tls_client {
    int descriptor;
    gnutls_session_t session;
    gnutls_certificate_credentials_t credentials;
} tls_client;

static void tls_connect(tls_client *client) {
    client->descriptor = client_connect(&server);
    ck_assert_int_eq(gnutls_certificate_allocate_credentials(&client->credentials), 0);
    ck_assert_int_eq(gnutls_init(&client->session, GNUTLS_CLIENT), 0);
    ck_assert_int_eq(gnutls_set_default_priority(client->session), 0);
    ck_assert_int_eq(gnutls_credentials_set(client->session, GNUTLS_CRD_CERTIFICATE, client->credentials), 0);
    gnutls_transport_set_int(client->session, client->descriptor);
    int result;
    while ((result = gnutls_handshake(client->session)) < 0 && !gnutls_error_is_fatal(result))
        ;
    ck_assert_msg(result == 0, "%s", gnutls_strerror(result));
}

static void tls_close(tls_client *client) {
    gnutls_deinit(client->session);
    gnutls_certificate_free_credentials(client->credentials);
    close(client->descriptor);
}

// Reads until needle stands in text.
static void tls_read_until(tls_client *client, const char *needle, char *text, size_t size) {
    size_t length = strlen(text);

    while (!strstr(text, needle)) {
        const ssize_t got = gnutls_record_recv(client->session, text + length, size - length - 1);
        ck_assert_msg(got > 0, "ended before %s: %s", needle, text);
        length += (size_t)got;
        text[length] = '\0';
    }
}

static void start_with_tls(const char *const *more) {
    const char *options[16] = {"--tls-cert", second_path, "--tls-key", path, "--admin-listen", "127.0.0.1:0"};
    int count = 6;
    answer answer;

    make_pair(second_path, path);
    for (; more && *more; more++)
        options[count++] = *more;
    fixture_start_model(&server, "demo=/models/demo", options);
    do { // its readiness is asked where there is no TLS
        sleep_ms(5);
        const int client = client_connect_port(&server, fixture_port(&server, 1));
        client_ask(client, "GET", "/health/ready", "", NULL);
        client_read(client, &answer, false);
        answer_free(&answer);
        close(client);
    } while (answer.status != 200);
}

START_TEST(serves_tls) {
    static const char request[] = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                                  "Content-Length: 46\r\n\r\n{\"prompt\":\"hi\",\"max_tokens\":20,\"stream\":true }\n";
    tls_client client;
    char text[65536] = "";

    start_with_tls(NULL);
    ck_assert_int_eq(strncmp(srv_server_address(server.server, 0), "https://127.0.0.1:", 18), 0);
    tls_connect(&client);
    for (int i = 0; i < 3; i++) { // kept alive
        text[0] = '\0';
        ck_assert_int_eq(gnutls_record_send(client.session, request, sizeof request - 2), (ssize_t)sizeof request - 2);
        tls_read_until(&client, "[DONE]\n\n\r\n0\r\n\r\n", text, sizeof text);
        ck_assert_ptr_nonnull(strstr(text, "HTTP/1.1 200 OK"));
    }
    tls_close(&client);
    // Somebody who speaks no TLS is turned away, and nobody else notices.
    const int plain = client_connect(&server);
    client_puts(plain, "GET /health HTTP/1.1\r\nHost: t\r\n\r\n");
    ck_assert(client_closed(plain));
    close(plain);
    tls_connect(&client);
    tls_close(&client);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static void expect_health(tls_client *client) {
    static const char request[] = "GET /health HTTP/1.1\r\nHost: t\r\n\r\n";
    char text[4096] = "";

    ck_assert_int_gt(gnutls_record_send(client->session, request, sizeof request - 1), 0);
    tls_read_until(client, "\"models\"", text, sizeof text);
    ck_assert_ptr_nonnull(strstr(text, "HTTP/1.1 200 OK"));
}

// A connection of its own, and whether it is shown the certificate in the file.
static bool is_shown(const char *file) {
    tls_client client;
    unsigned count = 0;
    gnutls_datum_t wanted, pem;

    tls_connect(&client);
    expect_health(&client);
    const gnutls_datum_t *shown = gnutls_certificate_get_peers(client.session, &count);
    ck_assert_uint_eq(count, 1);
    ck_assert_int_eq(gnutls_load_file(file, &pem), 0);
    ck_assert_int_eq(gnutls_pem_base64_decode2("CERTIFICATE", &pem, &wanted), 0);
    const bool same = shown[0].size == wanted.size && memcmp(shown[0].data, wanted.data, wanted.size) == 0;
    gnutls_free(wanted.data);
    gnutls_free(pem.data);
    tls_close(&client);
    return same;
}

static void reload_until(const char *told) {
    char *log = NULL;

    srv_server_reload(server.server);
    do {
        free(log);
        sleep_ms(5);
        log = fixture_log(&server);
    } while (!strstr(log, told));
    free(log);
}

// New handshakes get the new pair, connections live on, a wrong pair changes nothing.
START_TEST(certificates_are_read_again) {
    tls_client early;
    char first[80];

    start_with_tls(NULL);
    snprintf(first, sizeof first, "%s.first", path);
    make_pair(second_path, path);
    ck_assert(!is_shown(second_path)); // nobody has told the server
    tls_connect(&early);
    reload_until("the certificate is read");
    ck_assert(is_shown(second_path));
    expect_health(&early);
    ck_assert_int_eq(rename(second_path, first), 0);
    write_file(second_path, "nonsense");
    reload_until("; nothing is changed");
    ck_assert(is_shown(first));
    make_pair(second_path, first); // the certificate of another key than the server's file holds
    reload_until("not the key of the certificate");
    expect_health(&early);
    tls_close(&early);
    unlink(first);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(slow_bodies_over_tls) {
    static const char *const more[] = {"--body-time", "0.5", NULL};
    static const char request[] =
        "POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{";
    tls_client client;
    char text[4096] = "";

    start_with_tls(more);
    tls_connect(&client);
    ck_assert_int_gt(gnutls_record_send(client.session, request, sizeof request - 1), 0);
    tls_read_until(&client, "body_timeout", text, sizeof text);
    ck_assert_ptr_nonnull(strstr(text, "HTTP/1.1 408 "));
    tls_close(&client);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

START_TEST(bad_tls_files) {
    const char *const pair[] = {"--tls-cert", second_path, "--tls-key", path, NULL};
    char other[80];

    make_pair(second_path, path);
    try_address("127.0.0.1:0", pair, ENG_OK, NULL);
    snprintf(other, sizeof other, "%s.key", path);
    make_pair(second_path, other); // another key's certificate
    unlink(other);
    try_address("127.0.0.1:0", pair, ENG_INVALID, "not the key of the certificate in /tmp/mesa-cert-");
    try_address("127.0.0.1:0", pair, ENG_INVALID, path);
    write_file(path, "-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n");
    try_address("127.0.0.1:0", pair, ENG_INVALID, path);
    unlink(path);
    try_address("127.0.0.1:0", pair, ENG_INVALID, "No such file");
    write_file(second_path, "nonsense");
    try_address("127.0.0.1:0", pair, ENG_INVALID, second_path);
    unlink(second_path);
    try_address("127.0.0.1:0", pair, ENG_INVALID, second_path);
}
END_TEST

static Suite *access_suite(void) {
    Suite *suite = suite_create("access");
    TCase *tests = tcase_create("access");
    tcase_add_checked_fixture(tests, setup, teardown);
    tcase_add_test(tests, every_route_needs_a_key);
    tcase_add_test(tests, forms_of_authorization);
    tcase_add_test(tests, keys_are_owners);
    tcase_add_test(tests, empty_bearer_without_keys);
    tcase_add_test(tests, rate_of_a_key);
    tcase_add_test(tests, requests_of_a_key_at_once);
    tcase_add_test(tests, models_of_a_key);
    tcase_add_test(tests, keys_are_read_again);
    tcase_add_test(tests, keys_are_read_once);
    tcase_add_test(tests, bad_key_files);
    tcase_add_test(tests, exposed_addresses_need_keys);
    tcase_add_test(tests, administration_has_its_own_address);
    tcase_add_test(tests, log_keeps_secrets);
    tcase_add_test(tests, serves_tls);
    tcase_add_test(tests, certificates_are_read_again);
    tcase_add_test(tests, slow_bodies_over_tls);
    tcase_add_test(tests, bad_tls_files);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(access_suite)

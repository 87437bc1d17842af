// SPDX-License-Identifier: Apache-2.0
// The queue when too much is asked: who finds room, what the others are told, whose solve is loosened.
// Steps take five milliseconds and requests stay until their clients leave, so that the queue is as full as wanted.
#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/server/fake_engine.h"
#include "tests/server/harness.h"

#define LONG "{\"prompt\":\"hi\",\"max_tokens\":60000}"
#define HELLO "{\"prompt\":\"hi\",\"max_tokens\":1}"

static fixture server;

// Requests that run or wait until they are closed.
static void block(int *clients, int count, const char *headers) {
    const int before = atomic_load(&fake_engine()->active);

    for (int i = 0; i < count; i++) {
        clients[i] = client_connect(&server);
        client_ask(clients[i], "POST", "/v1/completions", headers, LONG);
    }
    wait_engine_active(before + count);
}

static void unblock(const int *clients, int count) {
    for (int i = 0; i < count; i++)
        close(clients[i]);
    wait_engine_empty();
}

// Seconds after which a refused request may come again.
static int refused(const char *headers, const char *code) {
    answer answer;
    int seconds = 0;

    fixture_ask(&server, "POST", "/v1/completions", headers, HELLO, &answer);
    expect_error(&answer, 429, NULL, code);
    ck_assert_int_eq(sscanf(strstr(answer.head, "Retry-After: "), "Retry-After: %d", &seconds), 1);
    answer_free(&answer);
    return seconds;
}

// ---- Retry-After ---------------------------------------------------------------------------------------------------

enum { PLACES = 16, REFUSED = 60 };

// As many as there are places at once: the prompt, and 20 tokens, in two rows and steps of five milliseconds.
static void serve_all_places(int *clients) {
    answer answer;

    atomic_store(&fake_engine()->held, 1);
    for (int i = 0; i < PLACES; i++) {
        clients[i] = client_connect(&server);
        client_post(clients[i], "/v1/completions", "{\"prompt\":\"hi\",\"max_tokens\":20}");
    }
    wait_engine_active(PLACES);
    atomic_store(&fake_engine()->held, 0);
    for (int i = 0; i < PLACES; i++) {
        client_read(clients[i], &answer, false);
        ck_assert_int_eq(answer.status, 200);
        answer_free(&answer);
        close(clients[i]);
    }
}

// Those who are refused get their turns at the pace that was seen, however close together they came. A place takes no
// less than its steps, and no more than the time in which all were served and refused.
START_TEST(turns_are_spread) {
    static const char *const options[] = {"--rows", "2", "--queue-requests", "14", NULL};
    const double least = 21 * 0.005 / 2;
    int clients[PLACES], first = 0, longest = 0;
    long comes[REFUSED]; // tenth of a second; 0: not known, for the tenth turned while it was refused
    double last = 0;

    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    const double began = now_s();
    serve_all_places(clients);
    block(clients, PLACES, "");
    const double asked = now_s();
    for (int i = 0; i < REFUSED; i++) {
        const long before = (long)(now_s() * 10);
        const int told = refused("", "queue_full");
        const double now = now_s();
        comes[i] = (long)(now * 10) == before ? before + 10 * told : 0;
        last = now + told > last ? now + told : last;
        longest = told > longest ? told : longest;
        first = i ? first : told;
    }
    const double most = (now_s() - began) / PLACES;
    ck_assert_msg(first <= 1 + (int)ceil(2 * most), "%d s where a place takes %.2f s", first, most);
    ck_assert_msg(last - asked >= REFUSED * least, "%.1f s", last - asked);
    ck_assert_msg(longest <= 2 + REFUSED * (1 + 2 * most), "%d s where a place takes %.2f s", longest, most);
    for (int i = 0; i < REFUSED; i++) {
        int come = 0;
        for (int k = 0; k < REFUSED; k++)
            come += comes[i] && comes[k] == comes[i];
        ck_assert_msg(come <= 2, "%d come at once, where a place takes %.3f s", come, least);
    }
    // Nobody waits: nothing is owed to those who did not come back.
    unblock(clients, PLACES);
    block(clients, PLACES, "");
    ck_assert_int_lt(refused("", "queue_full"), longest);
    unblock(clients, PLACES);
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// ---- keys ----------------------------------------------------------------------------------------------------------

#define ALICE "Authorization: Bearer alice-0123456789abcdef\r\n"
#define BOB "Authorization: Bearer bob-0123456789abcdef\r\n"

static char key_path[64];

static void write_keys(bool both) {
    static const char *const names[] = {"alice", "bob"};
    snprintf(key_path, sizeof key_path, "/tmp/mesa-queue-keys-%d", (int)getpid());
    FILE *file = fopen(key_path, "w");
    ck_assert_ptr_nonnull(file);
    for (int i = 0; i < (both ? 2 : 1); i++) {
        char key[64];
        uint8_t digest[32];
        snprintf(key, sizeof key, "%s-0123456789abcdef", names[i]);
        ck_assert_int_eq(gnutls_hash_fast(GNUTLS_DIG_SHA256, key, strlen(key), digest), 0);
        fprintf(file, "%s ", names[i]);
        for (size_t k = 0; k < sizeof digest; k++)
            fprintf(file, "%02x", digest[k]);
        fprintf(file, "\n");
    }
    fclose(file);
}

// One of several keys may take every row and half of what may wait; the other half is there for the others.
START_TEST(keys_share_the_queue) {
    const char *const options[] = {"--keys", key_path, "--rows", "1", "--queue-requests", "8", NULL};
    int alice[5], bob[4];

    write_keys(true);
    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    block(alice, 5, ALICE);
    for (int i = 0; i < 3; i++)
        ck_assert_int_ge(refused(ALICE, "key_queue_full"), 1);
    block(bob, 4, BOB);
    ck_assert_int_ge(refused(BOB, "queue_full"), 1);
    // A place that is given back is hers.
    close(alice[4]);
    while (atomic_load(&fake_engine()->active) > 8)
        sleep_ms(5);
    block(alice + 4, 1, ALICE);
    ck_assert_int_ge(refused(ALICE, "queue_full"), 1);
    for (int i = 0; i < 4; i++)
        close(bob[i]);
    unblock(alice, 5);
    ck_assert_int_eq(fixture_stop(&server), 0);
    unlink(key_path);
}
END_TEST

// Prompt tokens are shared likewise; a prompt that is longer than the share still finds room where its key waits alone.
START_TEST(keys_share_the_tokens) {
    const char *const options[] = {"--keys", key_path, "--rows", "1", "--queue-tokens", "100", NULL};
    char body[300] = "{\"max_tokens\":5000,\"add_special_tokens\":false,\"prompt\":\"";
    int first;
    answer answer;

    write_keys(true);
    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    block(&first, 1, BOB);
    wait_engine_tokens(2); // its prompt waits no more
    memset(body + strlen(body), 'x', 60);
    strcat(body, "\"}");
    const int second = client_connect(&server);
    client_ask(second, "POST", "/v1/completions", ALICE, body);
    wait_engine_active(2); // 60 of 100 tokens wait
    ck_assert_int_ge(refused(ALICE, "key_queue_full"), 1);
    fixture_ask(&server, "POST", "/v1/completions", BOB, body, &answer);
    expect_error(&answer, 429, NULL, "queue_full");
    answer_free(&answer);
    close(second);
    unblock(&first, 1);
    ck_assert_int_eq(fixture_stop(&server), 0);
    unlink(key_path);
}
END_TEST

START_TEST(a_single_key_has_it_all) {
    const char *const options[] = {"--keys", key_path, "--rows", "1", "--queue-requests", "8", NULL};
    int alice[9];

    write_keys(false);
    fixture_start(&server, options);
    atomic_store(&fake_engine()->step_us, 5000);
    block(alice, 9, ALICE);
    ck_assert_int_ge(refused(ALICE, "queue_full"), 1);
    unblock(alice, 9);
    ck_assert_int_eq(fixture_stop(&server), 0);
    unlink(key_path);
}
END_TEST

// ---- degrade -------------------------------------------------------------------------------------------------------

typedef struct permission {
    const char *fields;
    int mode;
    double tolerance;
    int steps;
    bool loosened;
} permission;

static const permission permissions[] = {
    {"\"user\":\"me\"", ENG_CG_TOLERANCE, 1e-4, 30, false},
    {"\"degrade\":{}", ENG_CG_TOLERANCE, 1e-4, 30, false},
    {"\"degrade\":null", ENG_CG_TOLERANCE, 1e-4, 30, false},
    {"\"degrade\":{\"cg_tolerance\":0.01}", ENG_CG_TOLERANCE, 0.01, 30, true},
    {"\"degrade\":{\"cg_max_steps\":5,\"cg_tolerance\":null}", ENG_CG_TOLERANCE, 1e-4, 5, true},
    {"\"degrade\":{\"cg_max_steps\":31}", ENG_CG_TOLERANCE, 1e-4, 30, false},
    {"\"degrade\":{\"exit_threshold\":0.5}", ENG_CG_TOLERANCE, 1e-4, 30, false},
    {"\"cg_tolerance\":0.05,\"degrade\":{\"cg_tolerance\":0.01}", ENG_CG_TOLERANCE, 0.05, 30, false},
    {"\"cg_mode\":\"exact\",\"degrade\":{\"cg_tolerance\":0.01,\"cg_max_steps\":7}", ENG_CG_TOLERANCE, 0.01, 7, true},
    {"\"cg_mode\":\"exact\",\"degrade\":{\"cg_max_steps\":7}", ENG_CG_EXACT, 1e-4, 30, false},
    {"\"cg_mode\":\"steps\",\"cg_max_steps\":9,\"degrade\":{\"cg_max_steps\":3,\"cg_tolerance\":0.5}", ENG_CG_STEPS,
     1e-4, 3, true},
    {"\"n\":2,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"degrade\":{\"cg_tolerance\":0.01}",
     ENG_CG_TOLERANCE, 0.01, 30, true},
};
enum { PERMISSIONS = sizeof permissions / sizeof *permissions };

static void ask_with(int client, const permission *permission) {
    char body[256];
    const int before = atomic_load(&fake_engine()->submitted);

    snprintf(body, sizeof body, "{\"prompt\":\"hi\",\"max_tokens\":2,%s}", permission->fields);
    client_post(client, "/v1/completions", body);
    while (atomic_load(&fake_engine()->submitted) == before)
        sleep_ms(1);
}

static void expect_knobs(const permission *permission, bool overloaded) {
    const fake_engine_controls *engine = fake_engine();
    const bool given = strstr(permission->fields, "cg_tolerance\":0.05") != NULL;

    if (overloaded || !permission->loosened) {
        ck_assert_msg(atomic_load(&engine->last_cg_mode) == permission->mode, "%s", permission->fields);
        ck_assert_msg(atomic_load(&engine->last_cg_max_steps) == permission->steps, "%s", permission->fields);
        ck_assert_msg(atomic_load(&engine->last_cg_tolerance) == (int)lround(permission->tolerance * 1e6), "%s",
                      permission->fields);
    } else
        ck_assert_msg(given || atomic_load(&engine->last_cg_tolerance) == 100, "%s", permission->fields);
}

static void expect_told(int client, const permission *permission, bool overloaded) {
    const bool wanted = overloaded && permission->loosened;
    answer answer;

    client_read(client, &answer, false);
    ck_assert_msg(answer.status == 200, "%s: %s", permission->fields, answer.body);
    ck_assert_msg(strstr(answer.body, wanted ? "\"degraded\":true" : "\"degraded\":false"), "%s: %s",
                  permission->fields, answer.body);
    ck_assert_msg(!strstr(answer.body, wanted ? "\"degraded\":false" : "\"degraded\":true"), "%s: %s",
                  permission->fields, answer.body);
    answer_free(&answer);
    close(client);
}

// Only what a request permits, only while more waits than degrade_queue says, all of it or nothing.
START_TEST(permitted_requests_are_degraded) {
    static const char *const options[] = {"--rows", "1", "--queue-requests", "64", "--degrade-queue", "0.05", NULL};
    int blockers[5], clients[PERMISSIONS], loosened = 0;

    fixture_start(&server, options);
    for (int i = 0; i < PERMISSIONS; i++) {
        const int client = client_connect(&server);
        ask_with(client, &permissions[i]);
        expect_knobs(&permissions[i], false);
        expect_told(client, &permissions[i], false);
    }
    ck_assert_double_eq(metric(&server, "mesa_degraded_total{model=\"demo\"}"), 0);
    atomic_store(&fake_engine()->step_us, 5000);
    block(blockers, 4, ""); // one runs; three of 64 are not more than the twentieth part
    int client = client_connect(&server);
    ask_with(client, &permissions[3]);
    expect_knobs(&permissions[3], false);
    close(client);
    while (atomic_load(&fake_engine()->active) > 4)
        sleep_ms(1);
    block(blockers + 4, 1, "");
    for (int i = 0; i < PERMISSIONS; i++) {
        clients[i] = client_connect(&server);
        ask_with(clients[i], &permissions[i]);
        expect_knobs(&permissions[i], true);
        loosened += permissions[i].loosened;
    }
    for (int i = 0; i < 5; i++)
        close(blockers[i]);
    for (int i = 0; i < PERMISSIONS; i++)
        expect_told(clients[i], &permissions[i], true);
    ck_assert_double_eq(metric(&server, "mesa_degraded_total{model=\"demo\"}"), loosened);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

// Of a model with an exit gate; a threshold that is low already stays.
START_TEST(thresholds_are_degraded) {
    static const char *const options[] = {"--rows", "1", "--queue-requests", "64", "--degrade-queue", "0.05", NULL};
    static const struct {
        permission asked;
        int threshold; // millionths
    } cases[] = {
        {{"\"degrade\":{\"exit_threshold\":0.5}", ENG_CG_TOLERANCE, 1e-4, 30, true}, 500000},
        {{"\"exit_threshold\":0.25,\"degrade\":{\"exit_threshold\":0.5}", ENG_CG_TOLERANCE, 1e-4, 30, false}, 250000},
        {{"\"degrade\":{\"cg_max_steps\":5}", ENG_CG_TOLERANCE, 1e-4, 5, true}, 1000000}};
    enum { CASES = sizeof cases / sizeof *cases };
    int blockers[5], clients[CASES];

    fixture_start_model(&server, "demo=/models/loops", options);
    fixture_wait(&server);
    atomic_store(&fake_engine()->step_us, 5000);
    block(blockers, 5, "");
    for (int i = 0; i < CASES; i++) {
        clients[i] = client_connect(&server);
        ask_with(clients[i], &cases[i].asked);
        expect_knobs(&cases[i].asked, true);
        ck_assert_int_eq(atomic_load(&fake_engine()->last_exit_threshold), cases[i].threshold);
    }
    for (int i = 0; i < 5; i++)
        close(blockers[i]);
    for (int i = 0; i < CASES; i++)
        expect_told(clients[i], &cases[i].asked, true);
    wait_engine_empty();
    ck_assert_int_eq(fixture_stop(&server), 0);
}
END_TEST

static Suite *queue_suite(void) {
    Suite *suite = suite_create("queue");
    TCase *tests = tcase_create("queue");
    tcase_add_test(tests, turns_are_spread);
    tcase_add_test(tests, keys_share_the_queue);
    tcase_add_test(tests, keys_share_the_tokens);
    tcase_add_test(tests, a_single_key_has_it_all);
    tcase_add_test(tests, permitted_requests_are_degraded);
    tcase_add_test(tests, thresholds_are_degraded);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(queue_suite)

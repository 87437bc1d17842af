// SPDX-License-Identifier: Apache-2.0
// Server-sent events: every way to cut the bytes gives the same events.
// What is no event gives none, and a stream without line ends stops at its bound.
#include "clients/cli/events.h"

#include <stdlib.h>
#include <string.h>

#include "tests/check_main.h"

typedef struct seen {
    char text[4096];
    int events, stop_at;
} seen;

static bool on_event(void *context, const char *data, size_t length) {
    seen *seen = context;
    ck_assert_uint_eq(strlen(data), length);
    strcat(seen->text, "[");
    strcat(seen->text, data);
    strcat(seen->text, "]");
    return ++seen->events != seen->stop_at;
}

static void expect(const char *bytes, const char *wanted) {
    const size_t length = strlen(bytes);

    for (size_t piece = 1; piece <= length; piece++) {
        seen seen = {0};
        cli_events events;
        cli_events_init(&events);
        for (size_t at = 0; at < length; at += piece)
            ck_assert(cli_events_feed(&events, bytes + at, length - at < piece ? length - at : piece, on_event, &seen));
        ck_assert_msg(strcmp(seen.text, wanted) == 0, "in pieces of %zu: %s, want %s", piece, seen.text, wanted);
        cli_events_free(&events);
    }
}

START_TEST(test_events) {
    expect("data: a\n\ndata: b\n\n", "[a][b]");
    expect("data: a\r\n\r\ndata: b\r\r", "[a][b]");
    expect("data:a\n\n", "[a]");
    expect("data:  a\n\n", "[ a]");
    expect("data: a\ndata: b\n\n", "[a\nb]");
    expect("data:\n\n", "[]");
    expect("data: a\ndata:\n\n", "[a\n]");
}
END_TEST

START_TEST(test_what_is_no_event) {
    expect(": ping\n\ndata: a\n\n", "[a]");
    expect("\n\n\ndata: a\n\n\n\n", "[a]");
    expect("event: x\nid: 7\nretry: 5\n\ndata: a\n\n", "[a]");
    expect("dat: b\ndatax: c\n\n", "");
    expect("data: a\n", ""); // its end is missing
    expect("data: a", "");
}
END_TEST

START_TEST(test_stop) {
    const char bytes[] = "data: a\n\ndata: b\n\n";
    seen seen = {.stop_at = 1};
    cli_events events;

    cli_events_init(&events);
    ck_assert(!cli_events_feed(&events, bytes, strlen(bytes), on_event, &seen));
    ck_assert_str_eq(seen.text, "[a]");
    cli_events_free(&events);
}
END_TEST

START_TEST(test_bound) {
    char *piece = malloc(1 << 20);
    seen seen = {0};
    cli_events events;
    size_t fed = 0;

    memset(piece, 'x', 1 << 20);
    cli_events_init(&events);
    while (fed <= CLI_MAX_EVENT && cli_events_feed(&events, piece, 1 << 20, on_event, &seen))
        fed += 1 << 20;
    ck_assert_uint_le(fed, CLI_MAX_EVENT);
    ck_assert_uint_ge(fed, CLI_MAX_EVENT - (2 << 20));
    cli_events_free(&events);
    free(piece);
}
END_TEST

static Suite *events_suite(void) {
    Suite *suite = suite_create("events");
    TCase *all = tcase_create("events");
    tcase_add_test(all, test_events);
    tcase_add_test(all, test_what_is_no_event);
    tcase_add_test(all, test_stop);
    tcase_add_test(all, test_bound);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(events_suite)

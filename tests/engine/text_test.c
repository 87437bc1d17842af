// SPDX-License-Identifier: Apache-2.0
// Generated text: UTF-8 repair, stop strings over any cut into tokens, what is held back and what counts as settled.
//
// The reference is brute force on the whole text: the stop that is complete first is searched for at every byte, and
// repair follows the examples of the Unicode standard. Every property is then checked for random cuts.
#include "engine/text.h"

#include <string.h>

#include "tests/check_main.h"

#define REPLACED "\xef\xbf\xbd"
#define MAX_TEXT 4096

typedef struct collected {
    char bytes[3 * MAX_TEXT];
    size_t length;
} collected;

// ck_assert reports every success to the parent process; where millions succeed that is all the time there is.
#define CHECK(condition)                                       \
    do {                                                       \
        if (!(condition))                                      \
            ck_abort_msg("line %d: %s", __LINE__, #condition); \
    } while (0)

static eng_text text_of(const char *string) {
    return (eng_text){.bytes = string, .length = strlen(string)};
}

static eng_text_out *create(const eng_text *stops, size_t count) {
    eng_text_out *out = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_text_create(stops, count, false, &out, &error) == ENG_OK, "%s", error.text);
    return out;
}

static void take(eng_text_out *out, collected *into) {
    const char *bytes;
    size_t length;
    eng_text_take(out, &bytes, &length);
    CHECK(into->length + length <= sizeof into->bytes);
    memcpy(into->bytes + into->length, bytes, length);
    into->length += length;
    CHECK(eng_utf8_valid(bytes, length, NULL));
    eng_text_take(out, &bytes, &length);
    CHECK(length == 0);
}

static bool push(eng_text_out *out, const char *bytes, size_t length) {
    bool stopped = false;
    CHECK(eng_text_push(out, bytes, length, &stopped) == ENG_OK);
    return stopped;
}

// Pushes the whole as tokens of at most longest bytes (random when seed is not 0) and returns whether it was stopped.
static bool run(const char *bytes, size_t length, const eng_text *stops, size_t stop_count, size_t longest,
                unsigned *seed, collected *into) {
    eng_text_out *out = create(stops, stop_count);
    bool stopped = false;
    size_t tokens = 0;
    into->length = 0;
    for (size_t at = 0; at < length && !stopped;) {
        size_t size = seed ? (size_t)rand_r(seed) % (longest + 1) : longest;
        size = size < length - at ? size : length - at;
        char *copy = malloc(size + 1); // so that a sanitizer sees a read behind it
        memcpy(copy, bytes + at, size);
        stopped = push(out, copy, size);
        free(copy);
        at += size;
        tokens++;
        if (!seed || rand_r(seed) % 3)
            take(out, into);
        CHECK(eng_text_settled(out) <= tokens);
    }
    ck_assert_int_eq(eng_text_finish(out), ENG_OK);
    take(out, into);
    ck_assert_uint_eq(eng_text_settled(out), tokens);
    eng_text_free(out);
    return stopped;
}

static void assert_text(const collected *got, const char *want, size_t length) {
    ck_assert_msg(got->length == length && memcmp(got->bytes, want, length) == 0, "got '%.*s', want '%.*s'",
                  (int)got->length, got->bytes, (int)length, want);
}

// ---- UTF-8 ----------------------------------------------------------------------------------------------------------

START_TEST(well_formed) {
    static const struct {
        const char *bytes;
        size_t length, fault; // fault == length: none
    } cases[] = {
        {"", 0, 0},
        {"abc", 3, 3},
        {"a\0b", 3, 3},
        {"\xc3\xa9", 2, 2},
        {"\xe2\x82\xac", 3, 3},
        {"\xf0\x9f\xa6\xab", 4, 4},
        {"\xf4\x8f\xbf\xbf", 4, 4},
        {"\xed\x9f\xbf\xee\x80\x80", 6, 6},
        {"a\xff", 2, 1},
        {"ab\xc0\xaf", 4, 2},   // overlong
        {"\xe0\x80\xaf", 3, 0}, // overlong
        {"\xf0\x80\x80\xaf", 4, 0},
        {"\xed\xa0\x80", 3, 0}, // surrogate
        {"\xf4\x90\x80\x80", 4, 0},
        {"\xf5\x80\x80\x80", 4, 0},
        {"x\x80", 2, 1},
        {"\xe2\x82", 2, 0},
        {"ok\xf0\x9f\xa6", 5, 2},
        {"\xe2\x82\x41", 3, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t offset = cases[i].length;
        bool valid = eng_utf8_valid(cases[i].bytes, cases[i].length, &offset);
        ck_assert_msg(valid == (cases[i].fault == cases[i].length) && offset == cases[i].fault,
                      "case %zu: valid %d, offset %zu", i, valid, offset);
    }
}
END_TEST

START_TEST(maximal_subparts) { // Unicode 15, tables 3-8 to 3-11
    static const struct {
        const char *bytes, *want;
    } cases[] = {
        {"\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64",
         "a" REPLACED REPLACED REPLACED "b" REPLACED "c" REPLACED REPLACED "d"},
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41",
         REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED "A"},
        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41",
         REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED REPLACED "A"},
        {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42",
         REPLACED REPLACED REPLACED REPLACED REPLACED "A" REPLACED REPLACED "B"},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", REPLACED REPLACED REPLACED REPLACED "A"},
    };
    collected got;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t size = 1; size < 14; size++) {
            run(cases[i].bytes, strlen(cases[i].bytes), NULL, 0, size, NULL, &got);
            assert_text(&got, cases[i].want, strlen(cases[i].want));
        }
    }
}
END_TEST

START_TEST(character_over_tokens) {
    const char *beaver = "\xf0\x9f\xa6\xab";
    collected got = {0};
    eng_text_out *out = create(NULL, 0);
    for (size_t i = 0; i < 4; i++) {
        push(out, beaver + i, 1);
        take(out, &got);
        ck_assert_uint_eq(got.length, i < 3 ? 0 : 4);
        ck_assert_uint_eq(eng_text_settled(out), i < 3 ? 0 : 4);
    }
    assert_text(&got, beaver, 4);
    eng_text_free(out);
    for (size_t length = 1; length < 4; length++) { // cut by a token limit: one replacement character
        run(beaver, length, NULL, 0, 1, NULL, &got);
        assert_text(&got, REPLACED, 3);
    }
}
END_TEST

// ---- stop strings ---------------------------------------------------------------------------------------------------

START_TEST(stop_strings) {
    static const struct {
        const char *text, *stops[3], *want;
        bool stopped;
    } cases[] = {
        {"ABCDEFGHIJKLMNOPQRS", {"KLMNOPQ"}, "ABCDEFGHIJ", true},
        {"the lazy dog", {"azy dog"}, "the l", true},
        {"xxabcyy", {"ab", "abc"}, "xx", true},
        {"xxabcyy", {"abc", "ab"}, "xx", true},
        {"hello", {"o"}, "hell", true},
        {"o", {"o"}, "", true},
        {"xbcd", {"abcd", "bcd"}, "x", true},
        {"xabcd", {"abcde", "bc"}, "xa", true},  // complete first
        {"xabc", {"abc", "bc", "c"}, "x", true}, // complete together: the longest
        {"aaab", {"aab"}, "a", true},
        {"abababc", {"ababc"}, "ab", true},
        {"text\n\n", {"\n\nZZZ"}, "text\n\n", false}, // held text is not lost at the end
        {"text\n\nZZ", {"\n\nZZZ"}, "text\n\nZZ", false},
        {"abcab", {"cabx"}, "abcab", false},
        {"caf\xc3\xa9 noir", {"\xc3\xa9"}, "caf", true},
        {"\xe2STOP", {"STOP"}, REPLACED, true}, // an incomplete character before a stop
        {"a\xf0\x9f\xa6\xab", {"\xab"}, "a" REPLACED, true},
        {"", {"x"}, "", false},
    };
    collected got;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        eng_text stops[3];
        size_t count = 0;
        while (count < 3 && cases[i].stops[count]) {
            stops[count] = text_of(cases[i].stops[count]);
            count++;
        }
        for (size_t size = 1; size < 20; size++) {
            bool stopped = run(cases[i].text, strlen(cases[i].text), stops, count, size, NULL, &got);
            ck_assert_msg(stopped == cases[i].stopped, "case %zu, tokens of %zu", i, size);
            assert_text(&got, cases[i].want, strlen(cases[i].want));
        }
    }
}
END_TEST

START_TEST(a_stop_may_be_kept) {
    static const struct {
        const char *text, *stops[2], *want;
    } cases[] = {
        {"ABCDEFGHIJKLMN", {"FGH"}, "ABCDEFGH"},  {"xxabcyy", {"abc", "ab"}, "xxab"},
        {"xabc", {"abc", "c"}, "xabc"},           {"caf\xc3\xa9 noir", {"\xc3\xa9"}, "caf\xc3\xa9"},
        {"\xe2STOP!", {"STOP"}, REPLACED "STOP"}, {"text\n\n", {"\n\nZ"}, "text\n\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        eng_text stops[2] = {text_of(cases[i].stops[0])};
        if (cases[i].stops[1])
            stops[1] = text_of(cases[i].stops[1]);
        for (size_t size = 1; size < 15; size++) {
            collected got = {0};
            eng_text_out *out;
            bool stopped = false;
            ck_assert_int_eq(eng_text_create(stops, cases[i].stops[1] ? 2 : 1, true, &out, NULL), ENG_OK);
            size_t tokens = 0, length = strlen(cases[i].text);
            for (size_t at = 0; at < length && !stopped; at += size, tokens++) {
                stopped = push(out, cases[i].text + at, size < length - at ? size : length - at);
                take(out, &got);
            }
            ck_assert_int_eq(eng_text_finish(out), ENG_OK);
            take(out, &got);
            assert_text(&got, cases[i].want, strlen(cases[i].want));
            ck_assert_uint_eq(eng_text_settled(out), tokens);
            eng_text_free(out);
        }
    }
}
END_TEST

START_TEST(nothing_after_a_stop) {
    eng_text stop = text_of("END");
    collected got = {0};
    eng_text_out *out = create(&stop, 1);
    ck_assert(!push(out, "oneE", 4));
    take(out, &got);
    assert_text(&got, "one", 3);
    ck_assert_uint_eq(eng_text_settled(out), 0); // its E is held back
    ck_assert(push(out, "NDmore", 6));
    ck_assert_uint_eq(eng_text_settled(out), 2);
    ck_assert(push(out, "even more", 9));
    take(out, &got);
    assert_text(&got, "one", 3);
    ck_assert_int_eq(eng_text_finish(out), ENG_OK);
    take(out, &got);
    assert_text(&got, "one", 3);
    ck_assert_uint_eq(eng_text_settled(out), 3);
    eng_text_free(out);
}
END_TEST

START_TEST(held_back_and_settled) {
    eng_text stop = text_of("\n\nZZZ");
    collected got = {0};
    eng_text_out *out = create(&stop, 1);
    push(out, "", 0); // a token without text, as a special one
    ck_assert_uint_eq(eng_text_settled(out), 1);
    push(out, "a\n", 2);
    push(out, "", 0);
    take(out, &got);
    assert_text(&got, "a", 1);
    ck_assert_uint_eq(eng_text_settled(out), 1);
    push(out, "\nZ", 2);
    take(out, &got);
    assert_text(&got, "a", 1);
    push(out, "y", 1); // no stop after all
    take(out, &got);
    assert_text(&got, "a\n\nZy", 5);
    ck_assert_uint_eq(eng_text_settled(out), 5);
    push(out, "\n", 1);
    ck_assert_uint_eq(eng_text_settled(out), 5);
    ck_assert_int_eq(eng_text_finish(out), ENG_OK);
    ck_assert_int_eq(eng_text_finish(out), ENG_OK);
    take(out, &got);
    assert_text(&got, "a\n\nZy\n", 6);
    ck_assert_uint_eq(eng_text_settled(out), 6);
    bool stopped;
    ck_assert_int_eq(eng_text_push(out, "x", 1, &stopped), ENG_INVALID);
    eng_text_free(out);
}
END_TEST

START_TEST(empty_stop_is_refused) {
    eng_text stops[2] = {text_of("a"), text_of("")};
    eng_text_out *out = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_text_create(stops, 2, false, &out, &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "1"));
    ck_assert_ptr_null(out);
    eng_text_free(NULL);
}
END_TEST

// ---- any cut --------------------------------------------------------------------------------------------------------

// The end of the text by brute force: before the stop that is complete first, of those the longest.
static size_t cut_at(const char *bytes, size_t length, const eng_text *stops, size_t count, bool *stopped) {
    for (size_t end = 1; end <= length; end++) {
        size_t longest = 0;
        for (size_t i = 0; i < count; i++) {
            if (stops[i].length <= end && stops[i].length > longest &&
                memcmp(bytes + end - stops[i].length, stops[i].bytes, stops[i].length) == 0)
                longest = stops[i].length;
        }
        if (longest) {
            *stopped = true;
            return end - longest;
        }
    }
    *stopped = false;
    return length;
}

static size_t random_text(char *bytes, size_t limit, unsigned *seed) {
    static const char *const parts[] = {
        "a",    "b",    "ab",   "ba",       "c",   "\n", "\xc3\xa9", "\xf0\x9f\xa6\xab", "\xe2\x82\xac",
        "\xe2", "\x80", "\xff", "\xf0\x9f", "\xc3"};
    size_t length = 0, wanted = (size_t)rand_r(seed) % limit;
    while (length + 4 < wanted) {
        const char *part = parts[(size_t)rand_r(seed) % (sizeof parts / sizeof *parts)];
        memcpy(bytes + length, part, strlen(part));
        length += strlen(part);
    }
    return length;
}

START_TEST(streamed_equals_plain) {
    static char bytes[MAX_TEXT], stop_bytes[3][32];
    static collected got, plain;
    unsigned seed = 20;
    int stopped_runs = 0;
    for (int round = 0; round < 2000; round++) {
        size_t length = random_text(bytes, round % 2 ? 60 : 600, &seed);
        eng_text stops[3];
        size_t count = 0;
        for (size_t i = 0; i < (size_t)round % 4; i++) {
            size_t size = random_text(stop_bytes[count], 16, &seed);
            if (size > 0)
                stops[count] = (eng_text){stop_bytes[count], size}, count++;
        }
        bool want_stopped;
        size_t end = cut_at(bytes, length, stops, count, &want_stopped);
        run(bytes, end, NULL, 0, MAX_TEXT, NULL, &plain);
        for (int cut = 0; cut < 4; cut++) {
            bool stopped = run(bytes, length, stops, count, cut == 0 ? 1 : 9, cut == 0 ? NULL : &seed, &got);
            ck_assert_int_eq(stopped, want_stopped);
            assert_text(&got, plain.bytes, plain.length);
        }
        stopped_runs += want_stopped;
    }
    ck_assert_int_gt(stopped_runs, 100); // both outcomes must be common, or little was tested
    ck_assert_int_lt(stopped_runs, 1900);
}
END_TEST

START_TEST(long_stop_and_long_text) { // every byte keeps a kilobyte held back: quadratic work would not end in time
    enum { STOP = 1024, TEXT = 1 << 20 };
    char *stop = malloc(STOP);
    memset(stop, 'a', STOP);
    stop[STOP - 1] = 'b';
    eng_text stops = {stop, STOP};
    eng_text_out *out = create(&stops, 1);
    size_t written = 0, length;
    const char *bytes;
    for (size_t i = 0; i < TEXT; i++) {
        bool stopped;
        eng_status status = eng_text_push(out, "a", 1, &stopped);
        eng_text_take(out, &bytes, &length);
        written += length;
        bool right = written == (i + 1 < STOP ? 0 : i + 2 - STOP) && eng_text_settled(out) == written;
        if (status != ENG_OK || stopped || !right)
            ck_abort_msg("after %zu bytes: %zu written, %zu settled", i + 1, written, eng_text_settled(out));
    }
    ck_assert(push(out, "b", 1));
    eng_text_take(out, &bytes, &length);
    ck_assert_uint_eq(length, 0);
    eng_text_free(out);
    free(stop);
}
END_TEST

static Suite *text_suite(void) {
    Suite *suite = suite_create("text");
    TCase *tests = tcase_create("text");
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, well_formed);
    tcase_add_test(tests, maximal_subparts);
    tcase_add_test(tests, character_over_tokens);
    tcase_add_test(tests, stop_strings);
    tcase_add_test(tests, a_stop_may_be_kept);
    tcase_add_test(tests, nothing_after_a_stop);
    tcase_add_test(tests, held_back_and_settled);
    tcase_add_test(tests, empty_stop_is_refused);
    tcase_add_test(tests, streamed_equals_plain);
    tcase_add_test(tests, long_stop_and_long_text);
    suite_add_tcase(suite, tests);
    return suite;
}
MESA_TEST_MAIN(text_suite)

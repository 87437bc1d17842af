// SPDX-License-Identifier: Apache-2.0
// Merging against its definition: while some neighbours have a merge, apply the lowest rank, leftmost first.
//
// Random merge tables over few letters, random pieces around and far beyond the length at which scanning gives way to
// the heap. Also the matcher of added tokens and the pattern translation, each against brute force or a table.
#include "engine/bpe.h"

#include <string.h>

#include "engine/matcher.h"
#include "engine/pattern.h"
#include "tests/check_main.h"

enum { LETTERS = 3, MAX_TOKENS = 60, MAX_BYTES = 4096 };

typedef struct rule {
    int32_t left, right, result;
} rule;

typedef struct table {
    char texts[MAX_TOKENS][MAX_BYTES];
    int32_t tokens;
    rule rules[4 * MAX_TOKENS];
    size_t rule_count;
} table;

static int32_t token_of(table *t, const char *text) {
    for (int32_t i = 0; i < t->tokens; i++) {
        if (strcmp(t->texts[i], text) == 0)
            return i;
    }
    strcpy(t->texts[t->tokens], text);
    return t->tokens++;
}

// Tokens and rules as a trainer could have made them; several rules may lead to one token.
static void random_table(table *t, unsigned *seed) {
    t->tokens = 0;
    t->rule_count = 0;
    for (char letter = 'a'; letter < 'a' + LETTERS; letter++)
        token_of(t, (char[]){letter, 0});
    while (t->tokens < MAX_TOKENS && t->rule_count < 4 * MAX_TOKENS) {
        int32_t left = rand_r(seed) % t->tokens, right = rand_r(seed) % t->tokens;
        char joined[2 * MAX_BYTES];
        strcpy(joined, t->texts[left]);
        strcat(joined, t->texts[right]);
        bool known = strlen(joined) > 12;
        for (size_t i = 0; i < t->rule_count && !known; i++)
            known = t->rules[i].left == left && t->rules[i].right == right;
        if (!known)
            t->rules[t->rule_count++] = (rule){left, right, token_of(t, joined)};
        else if (rand_r(seed) % 50 == 0)
            break;
    }
}

static eng_bpe *build(const table *t, bool ignore_merges) {
    eng_bpe_options options = {
        .byte_level = true, .ignore_merges = ignore_merges, .tokens = (size_t)t->tokens, .merges = t->rule_count};
    eng_bpe *bpe = NULL;
    ck_assert_int_eq(eng_bpe_create(&options, &bpe), ENG_OK);
    for (int32_t i = 0; i < t->tokens; i++) {
        ck_assert_int_eq(eng_bpe_add_token(bpe, t->texts[i], strlen(t->texts[i]), i), ENG_OK);
        if (i < LETTERS)
            eng_bpe_set_byte(bpe, (uint8_t)t->texts[i][0], i);
    }
    for (size_t i = 0; i < t->rule_count; i++)
        eng_bpe_add_merge(bpe, t->rules[i].left, t->rules[i].right, (uint32_t)i, t->rules[i].result);
    ck_assert_int_eq(eng_bpe_finish(bpe), ENG_OK);
    return bpe;
}

static size_t merge_by_definition(const table *t, int32_t *symbols, size_t count) {
    for (;;) {
        size_t best_rule = t->rule_count, best = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            for (size_t k = 0; k < best_rule; k++) {
                if (t->rules[k].left == symbols[i] && t->rules[k].right == symbols[i + 1]) {
                    best_rule = k;
                    best = i;
                }
            }
        }
        if (best_rule == t->rule_count)
            return count;
        symbols[best] = t->rules[best_rule].result;
        count--;
        memmove(symbols + best + 1, symbols + best + 2, (count - best - 1) * sizeof *symbols);
    }
}

static void compare(const table *t, const eng_bpe *bpe, eng_bpe_memory *memory, const char *piece, size_t length) {
    int32_t want[256];
    for (size_t i = 0; i < length; i++)
        want[i] = piece[i] - 'a';
    size_t count = merge_by_definition(t, want, length);
    eng_ids got = {0};
    eng_status status = eng_bpe_encode(bpe, memory, piece, length, &got);
    if (status != ENG_OK || got.count != count || memcmp(got.ids, want, count * sizeof *want) != 0)
        ck_abort_msg("'%.*s': %zu ids, want %zu", (int)length, piece, got.count, count);
    eng_ids_free(&got);
}

START_TEST(merging_by_definition) {
    static table t;
    unsigned seed = 11;
    eng_bpe_memory memory = {0};
    for (int round = 0; round < 60; round++) {
        random_table(&t, &seed);
        eng_bpe *bpe = build(&t, false);
        for (int k = 0; k < 60; k++) {
            char piece[200];
            size_t length = 1 + (size_t)rand_r(&seed) % (k < 40 ? 40 : sizeof piece);
            int letters = 1 + rand_r(&seed) % LETTERS; // runs of one letter too
            for (size_t i = 0; i < length; i++)
                piece[i] = (char)('a' + rand_r(&seed) % letters);
            compare(&t, bpe, &memory, piece, length);
        }
        eng_bpe_free(bpe);
    }
    eng_bpe_memory_free(&memory);
}
END_TEST

START_TEST(ignoring_merges) {
    static table t;
    t.tokens = 0;
    t.rule_count = 0;
    for (int i = 0; i < LETTERS; i++)
        token_of(&t, (char[]){(char)('a' + i), 0});
    int32_t ab = token_of(&t, "ab"), abc = token_of(&t, "abc");
    t.rules[t.rule_count++] = (rule){0, 1, ab};
    for (int ignore = 0; ignore < 2; ignore++) {
        eng_bpe *bpe = build(&t, ignore);
        eng_bpe_memory memory = {0};
        eng_ids ids = {0};
        ck_assert_int_eq(eng_bpe_encode(bpe, &memory, "abc", 3, &ids), ENG_OK);
        ck_assert_uint_eq(ids.count, ignore ? 1 : 2);
        ck_assert_int_eq(ids.ids[0], ignore ? abc : ab);
        ck_assert_int_eq(eng_bpe_encode(bpe, &memory, "abd", 3, &ids), ENG_UNSUPPORTED);
        ck_assert_int_eq(memory.missing, 'd');
        eng_ids_free(&ids);
        eng_bpe_memory_free(&memory);
        eng_bpe_free(bpe);
    }
}
END_TEST

// ---- matcher --------------------------------------------------------------------------------------------------------

static bool find_by_force(const eng_text *patterns, size_t count, const char *text, size_t length, size_t from,
                          size_t *start, size_t *end) {
    for (size_t at = from; at < length; at++) {
        size_t longest = 0;
        for (size_t i = 0; i < count; i++) {
            size_t size = patterns[i].length;
            if (size <= length - at && size > longest && memcmp(text + at, patterns[i].bytes, size) == 0)
                longest = size;
        }
        if (longest) {
            *start = at;
            *end = at + longest;
            return true;
        }
    }
    return false;
}

START_TEST(leftmost_longest) {
    unsigned seed = 3;
    char bytes[8][8], text[64];
    for (int round = 0; round < 3000; round++) {
        eng_text patterns[8];
        size_t count = (size_t)rand_r(&seed) % 8, length = (size_t)rand_r(&seed) % sizeof text;
        for (size_t i = 0; i < count; i++) {
            patterns[i] = (eng_text){bytes[i], 1 + (size_t)rand_r(&seed) % 8};
            for (size_t k = 0; k < patterns[i].length; k++)
                bytes[i][k] = (char)('a' + rand_r(&seed) % 2);
        }
        for (size_t i = 0; i < length; i++)
            text[i] = (char)('a' + rand_r(&seed) % (2 + round % 2));
        eng_matcher *matcher = NULL;
        if (eng_matcher_create(patterns, count, &matcher) != ENG_OK)
            ck_abort_msg("no matcher");
        for (size_t from = 0;;) {
            size_t start = 0, end = 0, pattern = 0, want_start = 0, want_end = 0;
            bool found = eng_matcher_find(matcher, text, length, from, &start, &end, &pattern);
            bool want = find_by_force(patterns, count, text, length, from, &want_start, &want_end);
            if (found != want || start != want_start || end != want_end ||
                (found && (patterns[pattern].length != end - start ||
                           memcmp(patterns[pattern].bytes, text + start, end - start) != 0)))
                ck_abort_msg("round %d, from %zu: %zu..%zu, want %zu..%zu", round, from, start, end, want_start,
                             want_end);
            if (!found)
                break;
            from = end;
        }
        eng_matcher_free(matcher);
    }
}
END_TEST

// ---- patterns -------------------------------------------------------------------------------------------------------

START_TEST(translation) {
    static const struct {
        const char *pattern, *want; // NULL: refused
    } cases[] = {
        {"a.b|c+?", "a.b|c+?"},
        {"(?i:'s)", "(?i:'s)"},
        {"\\p{L}\\P{Nd}\\pL", "\\p{L}\\P{Nd}\\pL"},
        {"\\p{^L}", "\\p{^L}"},
        {"\\p{Han}", "\\p{sc:Han}"},
        {"[\\p{Han}]+", "[\\p{sc:Han}]+"},
        {"\\u00e9", "\\x{00e9}"},
        {"\\v", "\\x{b}"},
        {"[\\w]", "[\\p{L}\\p{M}\\p{Nd}\\p{Pc}]"},
        {"\\W", "[^\\p{L}\\p{M}\\p{Nd}\\p{Pc}]"},
        {"[^\\r\\n]", "[^\\r\\n]"},
        {"[\\]a]", "[\\]a]"},
        {"\\[\\(", "\\[\\("},
        {"x{1,3}", "x{1,3}"},
        {"[$^]", "[$^]"},
        {"x{,3}", NULL},
        {"[a[b]]", NULL},
        {"[a&&b]", NULL},
        {"[]a]", NULL},
        {"[\\S]", NULL},
        {"[\\W]", NULL},
        {"\\b", NULL},
        {"\\h", NULL},
        {"\\K", NULL},
        {"^a", NULL},
        {"a$", NULL},
        {"\\u12", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        eng_buffer out = {0};
        eng_error error = {0};
        eng_status status = eng_pattern_translate(cases[i].pattern, strlen(cases[i].pattern), &out, &error);
        ck_assert_int_eq(eng_buffer_append(&out, "", 1), ENG_OK);
        if (cases[i].want)
            ck_assert_msg(status == ENG_OK && strcmp(out.bytes, cases[i].want) == 0, "%s: %s", cases[i].pattern,
                          out.bytes);
        else
            ck_assert_msg(status == ENG_UNSUPPORTED && strstr(error.text, "offset"), "%s: %s", cases[i].pattern,
                          out.bytes);
        eng_buffer_free(&out);
    }
    eng_pattern *pattern = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_pattern_compile("(a", 2, false, &pattern, &error), ENG_FORMAT);
    ck_assert_ptr_null(pattern);
}
END_TEST

START_TEST(white_space_of_unicode) {
    static const char *const spaces[] = {
        " ",        "\t",           "\n",           "\v",           "\f",           "\r",           "\xc2\x85",
        "\xc2\xa0", "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x8a", "\xe2\x80\xa8", "\xe2\x80\xaf", "\xe3\x80\x80"};
    static const char *const others[] = {"a", "\xe1\xa0\x8e", "\xe2\x80\x8b", "\xef\xbb\xbf",
                                         "\x1c"}; // 180e, 200b, feff
    eng_pattern *space = NULL, *other = NULL;
    eng_match *match = NULL;
    ck_assert_int_eq(eng_pattern_compile("\\s", 2, false, &space, NULL), ENG_OK);
    ck_assert_int_eq(eng_pattern_compile("[^\\s]", 5, false, &other, NULL), ENG_OK);
    ck_assert_int_eq(eng_match_create(&match), ENG_OK);
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces + sizeof others / sizeof *others; i++) {
        bool is_space = i < sizeof spaces / sizeof *spaces, found, found_other;
        const char *text = is_space ? spaces[i] : others[i - sizeof spaces / sizeof *spaces];
        size_t start, end;
        ck_assert_int_eq(eng_pattern_find(space, match, text, strlen(text), 0, &found, &start, &end, NULL), ENG_OK);
        ck_assert_int_eq(eng_pattern_find(other, match, text, strlen(text), 0, &found_other, &start, &end, NULL),
                         ENG_OK);
        ck_assert_msg(found == is_space && found_other == !is_space, "case %zu", i);
    }
    eng_match_free(match);
    eng_pattern_free(space);
    eng_pattern_free(other);
}
END_TEST

static Suite *bpe_suite(void) {
    Suite *suite = suite_create("bpe");
    TCase *tests = tcase_create("bpe");
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, merging_by_definition);
    tcase_add_test(tests, ignoring_merges);
    tcase_add_test(tests, leftmost_longest);
    tcase_add_test(tests, translation);
    tcase_add_test(tests, white_space_of_unicode);
    suite_add_tcase(suite, tests);
    return suite;
}
MESA_TEST_MAIN(bpe_suite)

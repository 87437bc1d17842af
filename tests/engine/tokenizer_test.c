// SPDX-License-Identifier: Apache-2.0
// The tokenizer against Hugging Face's: exact ids for every string in tests/engine/data, by every kind of file there.
//
// Beside the reference ids: what a bad file is refused with, round trips, streams against whole texts, and the work of
// encoding counted (merges, look-ups, heap steps) for texts of which each half costs half.
#define _GNU_SOURCE // asprintf
#include "engine/tokenizer.h"

#include <jansson.h>
#include <pthread.h>
#include <string.h>

#include "engine/digest.h"
#include "engine/text.h"
#include "engine/tokenizer_internal.h"
#include "tests/check_main.h"

#define DATA MESA_SOURCE_DIR "/tests/engine/data/"

static char *read_data(const char *name, size_t *length) {
    char path[512];
    snprintf(path, sizeof path, DATA "%s", name);
    FILE *file = fopen(path, "rb");
    ck_assert_msg(file != NULL, "%s", path);
    char *bytes = malloc(1 << 20);
    *length = fread(bytes, 1, 1 << 20, file);
    ck_assert_uint_lt(*length, 1 << 20);
    fclose(file);
    return bytes;
}

static eng_tokenizer *parse(const char *json, const char *config) {
    eng_tokenizer *tokenizer = NULL;
    eng_error error = {0};
    eng_status status =
        eng_tokenizer_parse(json, strlen(json), config, config ? strlen(config) : 0, 0, &tokenizer, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
    return tokenizer;
}

static eng_tokenizer *load(const char *name) {
    char file[64];
    size_t length;
    snprintf(file, sizeof file, "%s.tokenizer.json", name);
    char *json = read_data(file, &length);
    eng_tokenizer *tokenizer = NULL;
    eng_error error = {0};
    eng_status status = eng_tokenizer_parse(json, length, NULL, 0, 0, &tokenizer, &error);
    ck_assert_msg(status == ENG_OK, "%s: %s", name, error.text);
    free(json);
    return tokenizer;
}

static size_t encode(const eng_tokenizer *tokenizer, const char *text, size_t length, bool special, int32_t **ids) {
    size_t count = 0;
    eng_error error = {0};
    eng_status status = eng_tokenizer_encode(tokenizer, text, length, special, false, ids, &count, &error);
    ck_assert_msg(status == ENG_OK, "'%.60s': %s", text, error.text);
    return count;
}

static char *decode(const eng_tokenizer *tokenizer, const int32_t *ids, size_t count, size_t *length) {
    char *text = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_tokenizer_decode(tokenizer, ids, count, true, &text, length, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(text[*length], '\0');
    return text;
}

// ---- reference ids --------------------------------------------------------------------------------------------------

static json_t *golden_rows(void) {
    size_t length;
    char *text = read_data("tokenizer_golden.json", &length);
    json_t *rows = json_loadb(text, length, JSON_ALLOW_NUL, NULL);
    free(text);
    ck_assert(json_array_size(rows) > 2000);
    return rows;
}

typedef void (*row_fn)(const eng_tokenizer *tokenizer, const char *name, const char *text, size_t length, bool special,
                       const json_t *ids);

static void for_golden(row_fn check) {
    json_t *rows = golden_rows(), *row;
    eng_tokenizer *tokenizer = NULL;
    const char *loaded = "";
    size_t i;
    json_array_foreach(rows, i, row) {
        const char *name = json_string_value(json_array_get(row, 0));
        if (strcmp(name, loaded) != 0) {
            eng_tokenizer_close(tokenizer);
            tokenizer = load(name);
            loaded = name;
        }
        const json_t *text = json_array_get(row, 2);
        check(tokenizer, name, json_string_value(text), json_string_length(text), json_is_true(json_array_get(row, 1)),
              json_array_get(row, 3));
    }
    eng_tokenizer_close(tokenizer);
    json_decref(rows);
}

static void check_ids(const eng_tokenizer *tokenizer, const char *name, const char *text, size_t length, bool special,
                      const json_t *want) {
    int32_t *ids;
    size_t count = encode(tokenizer, text, length, special, &ids);
    bool same = count == json_array_size(want);
    for (size_t i = 0; i < count && same; i++)
        same = ids[i] == json_integer_value(json_array_get(want, i));
    if (!same) {
        char *wanted = json_dumps(want, JSON_COMPACT);
        printf("got:");
        for (size_t i = 0; i < count; i++)
            printf(" %d", ids[i]);
        ck_abort_msg("%s (special %d): '%s': want %s", name, special, text, wanted);
    }
    free(ids);
}

START_TEST(reference_ids) {
    for_golden(check_ids);
}
END_TEST

// The text of the tokens one by one, through the assembly that streams use, is the text decoded at once.
static void check_stream(const eng_tokenizer *tokenizer, const char *name, const char *text, size_t length,
                         bool special, const json_t *unused) {
    (void)unused;
    int32_t *ids;
    size_t count = encode(tokenizer, text, length, special, &ids), whole_length, written = 0, out_length;
    char *whole = decode(tokenizer, ids, count, &whole_length);
    eng_text_out *out = NULL;
    ck_assert_int_eq(eng_text_create(NULL, 0, false, &out, NULL), ENG_OK);
    const char *bytes;
    bool same = true, stopped;
    // Files with a Strip decoder lose the space at the start of a whole text; a stream goes on from a text.
    bool may_strip = strcmp(name, "fallback") == 0 || strcmp(name, "metaspace") == 0;
    for (size_t i = 0; i <= count && same; i++) {
        size_t size = 0;
        bytes = i < count ? eng_tokenizer_bytes(tokenizer, ids[i], &size) : "";
        eng_status status = i < count ? eng_text_push(out, bytes, size, &stopped) : eng_text_finish(out);
        eng_text_take(out, &bytes, &out_length);
        if (may_strip && out_length > 0) {
            may_strip = false;
            out_length -= *bytes == ' ';
            bytes += *bytes == ' ';
        }
        same =
            status == ENG_OK && written + out_length <= whole_length && memcmp(whole + written, bytes, out_length) == 0;
        written += out_length;
    }
    ck_assert_msg(same && written == whole_length, "%s: '%s' decodes to '%s', streams otherwise", name, text, whole);
    eng_text_free(out);
    free(whole);
    free(ids);
}

START_TEST(stream_equals_whole) {
    for_golden(check_stream);
}
END_TEST

static void check_round_trip(const eng_tokenizer *tokenizer, const char *name, const char *text, size_t length,
                             bool special, const json_t *unused) {
    static const char *const exact[] = {"gpt2",       "llama3",    "o200k",         "digits",
                                        "digit_runs", "behaviors", "ignore_merges", "odd_merges"};
    (void)unused;
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        if (strcmp(name, exact[i]) != 0)
            continue;
        int32_t *ids;
        size_t count = encode(tokenizer, text, length, special, &ids), got_length;
        char *got = decode(tokenizer, ids, count, &got_length);
        ck_assert_msg(got_length == length && memcmp(got, text, length) == 0, "%s: '%s' came back as '%s'", name, text,
                      got);
        free(got);
        free(ids);
    }
}

START_TEST(round_trip) {
    for_golden(check_round_trip);
}
END_TEST

START_TEST(newline_is_not_backslash_n) {
    eng_tokenizer *tokenizer = load("llama3");
    int32_t *one, *other;
    size_t count = encode(tokenizer, "a\\nb", 4, true, &one), other_count = encode(tokenizer, "a\nb", 3, true, &other);
    ck_assert(count != other_count || memcmp(one, other, count * sizeof *one) != 0);
    free(one);
    free(other);
    eng_tokenizer_close(tokenizer);
}
END_TEST

// ---- small files written here ---------------------------------------------------------------------------------------

// A byte-level file of the letters a, b, c and the space; members goes in at the top, after a comma.
static char *small_file(const char *vocab, const char *merges, const char *model, const char *members) {
    char *json = NULL;
    int length = asprintf(&json,
                          "{\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true},"
                          "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":%s%s%s%s}%s}",
                          vocab, merges ? ",\"merges\":" : "", merges ? merges : "", model, members);
    ck_assert_int_gt(length, 0);
    return json;
}
#define VOCAB "{\"a\":0,\"b\":1,\"c\":2,\"\\u0120\":3,\"ab\":4,\"abc\":5}"
#define MERGES "[\"a b\",[\"ab\",\"c\"]]"

static void assert_refused(char *json, const char *config, int32_t vocab_size, eng_status want, const char *words) {
    eng_tokenizer *tokenizer = NULL;
    eng_error error = {0};
    eng_status status =
        eng_tokenizer_parse(json, strlen(json), config, config ? strlen(config) : 0, vocab_size, &tokenizer, &error);
    ck_assert_msg(status == want && error.code == want && strstr(error.text, words), "%d '%s'; want %d '%s' for %s",
                  status, error.text, want, words, json);
    ck_assert_ptr_null(tokenizer);
    free(json);
}

START_TEST(malformed_vocabulary) {
    static const struct {
        const char *vocab, *merges, *words;
    } cases[] = {
        {"{\"a\":0,\"b\":1}", "[\"a b\"]", "'ab'"},
        {"{\"a\":0,\"ab\":1}", "[\"a b\"]", "'b'"},
        {"{\"a\":0,\"b\":1}", NULL, "merges"},
        {"{\"a\":0,\"b\":1}", "{}", "merges"},
        {"{\"a\":0,\"b\":1,\"ab\":2}", "[\"ab\"]", "merge 0"},
        {"{\"a\":0,\"b\":1,\"ab\":2}", "[\"a b\",\"a b a\"]", "merge 1"},
        {"{\"a\":0,\"b\":1,\"ab\":2}", "[[\"a\"]]", "merge 0"},
        {"{\"a\":0,\"b\":1,\"ab\":2}", "[7]", "merge 0"},
        {"{\"a\":0,\"b\":0}", "[]", "id 0"},
        {"{\"a\":-1}", "[]", "-1"},
        {"{\"a\":2147483648}", "[]", "2147483648"},
        {"{\"a\":16777216}", "[]", "16777216"},
        {"{\"a\":1.5}", "[]", "'a'"},
        {"{\"a\":\"1\"}", "[]", "'a'"},
        {"{\"a\":0,\"a\":1}", "[]", "duplicate"},
        {"{}", "[]", "empty"},
        {"[]", "[]", "vocab"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *const options[] = {"", ",\"ignore_merges\":true"};
        for (size_t k = 0; k < 2; k++)
            assert_refused(small_file(cases[i].vocab, cases[i].merges, options[k], ""), NULL, 0, ENG_FORMAT,
                           cases[i].words);
    }
    assert_refused(small_file(VOCAB, MERGES, "", ""), NULL, 5, ENG_FORMAT, "'abc' has id 5");
    eng_tokenizer_close(parse("{\"model\":{\"vocab\":{\"a\":7,\"b\":100},\"merges\":[]}}", NULL)); // holes are allowed
}
END_TEST

START_TEST(malformed_added_tokens) {
    static const struct {
        const char *tokens, *words;
    } cases[] = {
        {"[{\"id\":4,\"content\":\"<s>\"}]", "both have id 4"},
        {"[{\"id\":9,\"content\":\"ab\"}]", "'ab' has id 9"},
        {"[{\"id\":9,\"content\":\"x\"},{\"id\":9,\"content\":\"y\"}]", "both have id 9"},
        {"[{\"id\":9,\"content\":\"\"}]", "without content"},
        {"[{\"id\":-3,\"content\":\"x\"}]", "-3"},
        {"[{\"content\":\"x\"}]", "'x'"},
        {"[{\"id\":9,\"content\":\"x\",\"lstrip\":1}]", "lstrip"},
        {"[3]", "entry 0"},
        {"{}", "added_tokens"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char members[256];
        snprintf(members, sizeof members, ",\"added_tokens\":%s", cases[i].tokens);
        assert_refused(small_file(VOCAB, MERGES, "", members), NULL, 0, ENG_FORMAT, cases[i].words);
    }
}
END_TEST

START_TEST(unsupported_parts) {
    static const struct {
        const char *members, *words;
    } cases[] = {
        {",\"normalizer\":{\"type\":\"Lowercase\"}", "normalizer Lowercase"},
        {",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"BertNormalizer\"}]}",
         "normalizer BertNormalizer"},
        {",\"pre_tokenizer\":{\"type\":\"Whitespace\"}", "pre_tokenizer Whitespace"},
        {",\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}", "pre_tokenizer BertPreTokenizer"},
        {",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Halved\"}", "Halved"},
        {",\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"Digits\"}]"
         "}",
         "Digits behind ByteLevel"},
        {",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a-z&&[^b]]\"},\"behavior\":\"Isolated\"}",
         "&&"},
        {",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\bx\"},\"behavior\":\"Isolated\"}", "\\b"},
        {",\"post_processor\":{\"type\":\"BertProcessing\"}", "post_processor BertProcessing"},
        {",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"Sequence\":{\"id\":\"A\"}},"
         "{\"SpecialToken\":{\"id\":\"a\"}}],\"special_tokens\":{\"a\":{\"ids\":[0]}}}",
         "behind the text"},
        {",\"decoder\":{\"type\":\"WordPiece\"}", "decoder WordPiece"},
        {",\"model\":{\"type\":\"Unigram\"}", "model Unigram"},
        {",\"model\":{\"type\":\"BPE\",\"dropout\":0.1}", "dropout"},
        {",\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\"}", "end_of_word_suffix"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        // The member under test stands alone: a second key of one name would be refused for that.
        bool model = strstr(cases[i].members, "\"model\"") != NULL;
        char *json = NULL;
        int length = asprintf(&json, "{%s%s}", cases[i].members + 1,
                              model ? "" : ",\"model\":{\"type\":\"BPE\",\"vocab\":" VOCAB ",\"merges\":" MERGES "}");
        ck_assert_int_gt(length, 0);
        assert_refused(json, NULL, 0, ENG_UNSUPPORTED, cases[i].words);
    }
}
END_TEST

START_TEST(not_json) {
    static const char *const texts[] = {"", "[]", "{", "{}", "{} x", "nonsense", "{\"model\":null}", "\xef\xbb\xbf{}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        assert_refused(strdup(texts[i]), NULL, 0, ENG_FORMAT, "tokenizer.json");
    eng_tokenizer *tokenizer = NULL;
    eng_error error = {0};
    ck_assert_int_eq(eng_tokenizer_open("/nonexistent", 0, &tokenizer, &error), ENG_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.text, "tokenizer.json"));
    eng_tokenizer_close(NULL);
}
END_TEST

#define BOS_TOKENS                                                                                                  \
    ",\"added_tokens\":[{\"id\":6,\"content\":\"<s>\",\"special\":true},{\"id\":7,\"content\":\"<p>\",\"special\":" \
    "true}]"
#define TEMPLATE                                                                                     \
    ",\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":\"ByteLevel\"},{\"type\":" \
    "\"TemplateProcessing\","                                                                        \
    "\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{\"id\":\"A\"}}],"                \
    "\"special_tokens\":{\"<s>\":{\"id\":\"<s>\",\"ids\":[6]}}}]}"

START_TEST(which_bos) {
    static const struct {
        const char *members, *config;
        int32_t bos;
    } cases[] = {
        {BOS_TOKENS, NULL, -1},
        {BOS_TOKENS, "{\"bos_token\":\"<s>\"}", -1},
        {BOS_TOKENS, "{\"add_bos_token\":true,\"bos_token\":\"<s>\"}", 6},
        {BOS_TOKENS, "{\"add_bos_token\":true,\"bos_token\":{\"content\":\"<p>\"}}", 7},
        {BOS_TOKENS TEMPLATE, NULL, 6},
        {BOS_TOKENS TEMPLATE, "{\"add_bos_token\":null}", 6},
        {BOS_TOKENS TEMPLATE, "{\"add_bos_token\":true}", 6},
        {BOS_TOKENS TEMPLATE, "{\"add_bos_token\":false}", -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *json = small_file(VOCAB, MERGES, "", cases[i].members);
        eng_tokenizer *tokenizer = parse(json, cases[i].config);
        int32_t bos = cases[i].bos, *ids;
        ck_assert_msg(eng_tokenizer_bos(tokenizer) == bos, "case %zu: %d", i, eng_tokenizer_bos(tokenizer));
        size_t count;
        ck_assert_int_eq(eng_tokenizer_encode(tokenizer, "abc", 3, true, true, &ids, &count, NULL), ENG_OK);
        ck_assert_uint_eq(count, bos >= 0 ? 2 : 1);
        ck_assert_int_eq(ids[0], bos >= 0 ? bos : 5);
        free(ids);
        eng_tokenizer_close(tokenizer);
        free(json);
    }
    assert_refused(small_file(VOCAB, MERGES, "", BOS_TOKENS), "{\"add_bos_token\":true}", 0, ENG_FORMAT, "bos_token");
    assert_refused(small_file(VOCAB, MERGES, "", BOS_TOKENS), "{\"add_bos_token\":true,\"bos_token\":\"<x>\"}", 0,
                   ENG_FORMAT, "'<x>'");
    assert_refused(small_file(VOCAB, MERGES, "", BOS_TOKENS), "{\"add_bos_token\":1}", 0, ENG_FORMAT, "add_bos_token");
}
END_TEST

START_TEST(ids_and_texts) {
    char *json = small_file("{\"a\":0,\"b\":1,\"\\u0120\":3,\"ab\":9,\"<s>\":11}", "[\"a b\"]", "",
                            ",\"added_tokens\":[{\"id\":11,\"content\":\"<s>\",\"special\":true},"
                            "{\"id\":12,\"content\":\"\\u00e9 x\",\"special\":false}]");
    eng_tokenizer *tokenizer = parse(json, NULL);
    ck_assert_int_eq(eng_tokenizer_size(tokenizer), 13);
    size_t length;
    ck_assert_str_eq((eng_tokenizer_bytes(tokenizer, 3, &length), length == 1 ? " " : ""), " ");
    ck_assert(memcmp(eng_tokenizer_bytes(tokenizer, 9, &length), "ab", 2) == 0 && length == 2);
    ck_assert(memcmp(eng_tokenizer_bytes(tokenizer, 12, &length), "\xc3\xa9 x", 4) == 0 && length == 4);
    static const int32_t unknown[] = {-1, 2, 10, 13, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        char *text = NULL;
        eng_error error = {0};
        eng_tokenizer_bytes(tokenizer, unknown[i], &length);
        ck_assert_uint_eq(length, 0);
        ck_assert(!eng_tokenizer_is_special(tokenizer, unknown[i]));
        ck_assert_int_eq(eng_tokenizer_decode(tokenizer, &unknown[i], 1, true, &text, &length, &error), ENG_INVALID);
        ck_assert_ptr_null(text);
    }
    ck_assert(eng_tokenizer_is_special(tokenizer, 11) && !eng_tokenizer_is_special(tokenizer, 12));
    ck_assert_int_eq(eng_tokenizer_special(tokenizer, "<s>"), 11);
    ck_assert_int_eq(eng_tokenizer_special(tokenizer, "ab"), -1);
    char *text;
    ck_assert_int_eq(eng_tokenizer_decode(tokenizer, (int32_t[]){11, 0, 11, 12}, 4, false, &text, &length, NULL),
                     ENG_OK);
    ck_assert_str_eq(text, "a\xc3\xa9 x");
    free(text);
    unsigned char digest[ENG_DIGEST_BYTES];
    ck_assert_int_eq(eng_digest_bytes(json, strlen(json), digest), ENG_OK);
    ck_assert_mem_eq(eng_tokenizer_digest(tokenizer), digest, sizeof digest);
    eng_tokenizer_close(tokenizer);
    free(json);
}
END_TEST

START_TEST(text_that_cannot_be_encoded) {
    char *json = small_file(VOCAB, MERGES, "", "");
    eng_tokenizer *tokenizer = parse(json, NULL);
    static const struct {
        const char *text, *words;
        size_t length;
        eng_status status;
    } cases[] = {
        {"ab\xff", "byte 2", 3, ENG_INVALID},       {"a\xc0\xaf", "byte 1", 3, ENG_INVALID},
        {"\xed\xa0\x80", "byte 0", 3, ENG_INVALID}, {"abc\xf4\x90\x80\x80", "byte 3", 7, ENG_INVALID},
        {"ab\xe2\x82", "byte 2", 4, ENG_INVALID},   {"abx", "0x78", 3, ENG_UNSUPPORTED},
        {"ab\xc3\xa9", "0xc3", 4, ENG_UNSUPPORTED}, {"a\0b", "0x00", 3, ENG_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t *ids = NULL;
        size_t count;
        eng_error error = {0};
        eng_status status =
            eng_tokenizer_encode(tokenizer, cases[i].text, cases[i].length, true, true, &ids, &count, &error);
        ck_assert_msg(status == cases[i].status && strstr(error.text, cases[i].words), "case %zu: %s", i, error.text);
        ck_assert_ptr_null(ids);
    }
    int32_t *ids;
    ck_assert_uint_eq(encode(tokenizer, "", 0, true, &ids), 0);
    ck_assert_ptr_nonnull(ids);
    free(ids);
    eng_tokenizer_close(tokenizer);
    free(json);
}
END_TEST

START_TEST(plain_text_never_gives_a_special_token) { // even where one is a whole piece and merges are ignored
    char *json = small_file("{\"a\":0,\"b\":1,\"ab\":2}", "[\"a b\"]", ",\"ignore_merges\":true",
                            ",\"added_tokens\":[{\"id\":9,\"content\":\"ba\",\"special\":true}]");
    eng_tokenizer *tokenizer = parse(json, NULL);
    int32_t *ids;
    ck_assert_uint_eq(encode(tokenizer, "ba", 2, true, &ids), 1);
    ck_assert_int_eq(ids[0], 9);
    free(ids);
    ck_assert_uint_eq(encode(tokenizer, "ba", 2, false, &ids), 2);
    free(ids);
    eng_tokenizer_close(tokenizer);
    free(json);
}
END_TEST

START_TEST(pathological_pattern_fails) {
    char *json = NULL;
    ck_assert_int_gt(asprintf(&json, "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?:a|a)*[bc]\"},"
                                     "\"behavior\":\"Isolated\"},\"model\":{\"vocab\":" VOCAB ",\"merges\":[]}}"),
                     0);
    eng_tokenizer *tokenizer = parse(json, NULL);
    char text[64];
    memset(text, 'a', sizeof text);
    int32_t *ids = NULL;
    size_t count;
    eng_error error = {0};
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, sizeof text, true, true, &ids, &count, &error),
                     ENG_TOO_LONG);
    ck_assert_ptr_nonnull(strstr(error.text, "(?:a|a)*[bc]"));
    ck_assert_ptr_null(ids);
    eng_tokenizer_close(tokenizer);
    free(json);
}
END_TEST

// ---- cost -----------------------------------------------------------------------------------------------------------

static void fill(char *text, size_t length, int shape) {
    static const char *const units[] = {"a",  "_",   " ",  "ab",  "\n", "the", "\xcc\x81", "1", "\xe5\xb7\x9d",
                                        "'s", " \n", "</", "<s> "};
    unsigned seed = 5;
    size_t count = sizeof units / sizeof *units;
    if (shape >= (int)count) { // random letters, or compact JSON
        static const char json[] = "{\"k\":[1,22,333],\"v\":\"x\"},";
        for (size_t i = 0; i < length; i++)
            text[i] = shape == (int)count ? (char)('a' + rand_r(&seed) % 26) : json[i % (sizeof json - 1)];
        return;
    }
    size_t unit = strlen(units[shape]);
    for (size_t i = 0; i < length; i++)
        text[i] = i < length / unit * unit ? units[shape][i % unit] : 'x';
}
enum { SHAPES = 15 };

START_TEST(work_is_linear) {
    static const char *const names[] = {"gpt2", "llama3", "o200k", "added_nfkc", "fallback", "metaspace"};
    enum { LONGEST = 400000 };
    char *text = malloc(LONGEST);
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        eng_tokenizer *tokenizer = load(names[n]);
        for (int shape = 0; shape < SHAPES; shape++) {
            uint64_t before = 0;
            for (size_t length = 25000; length <= LONGEST; length *= 2) {
                int32_t *ids;
                size_t count;
                eng_bpe_work work;
                fill(text, length, shape);
                ck_assert_int_eq(
                    eng_tokenizer_encode_counted(tokenizer, text, length, true, false, &ids, &count, &work, NULL),
                    ENG_OK);
                free(ids);
                uint64_t steps = work.merges + work.lookups + work.heap_steps + count;
                ck_assert_msg(before == 0 || (double)steps / (double)before < 2.3,
                              "%s, shape %d: %llu after %llu steps", names[n], shape, (unsigned long long)steps,
                              (unsigned long long)before);
                ck_assert_uint_lt(steps, 60 * length);
                before = steps;
            }
        }
        eng_tokenizer_close(tokenizer);
    }
    free(text);
}
END_TEST

START_TEST(marks_in_any_order_are_linear) { // a long row of combining marks of two classes, to be put in order
    eng_tokenizer *tokenizer = load("nfc");
    enum { MARKS = 400000 };
    char *text = malloc(1 + 2 * MARKS);
    text[0] = 'q';
    for (size_t i = 0; i < MARKS; i++)
        memcpy(text + 1 + 2 * i, i % 2 ? "\xcc\xa3" : "\xcc\x81", 2); // below (class 220) and above (class 230)
    int32_t *ids;
    size_t count = encode(tokenizer, text, 1 + 2 * MARKS, true, &ids), length;
    char *got = decode(tokenizer, ids, count, &length);
    ck_assert_uint_eq(length, 1 + 2 * MARKS);
    ck_assert_mem_eq(got, "q\xcc\xa3\xcc\xa3", 5);
    ck_assert_mem_eq(got + length - 4, "\xcc\x81\xcc\x81", 4);
    free(got);
    free(ids);
    free(text);
    eng_tokenizer_close(tokenizer);
}
END_TEST

static void *encode_often(void *tokenizer) {
    for (int i = 0; i < 300; i++) {
        int32_t *ids;
        size_t count = 0;
        const char text[] = "The ferry isn't only for water, e\xcc\x81 <s> 1234567";
        if (eng_tokenizer_encode(tokenizer, text, sizeof text - 1, true, true, &ids, &count, NULL) != ENG_OK)
            return NULL;
        free(ids);
        if (count < 10)
            return NULL;
    }
    return tokenizer;
}

START_TEST(threads_share_one) {
    eng_tokenizer *tokenizer = load("added_nfkc");
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, encode_often, tokenizer), 0);
    for (int i = 0; i < 4; i++) {
        void *result = NULL;
        pthread_join(threads[i], &result);
        ck_assert_ptr_eq(result, tokenizer);
    }
    eng_tokenizer_close(tokenizer);
}
END_TEST

static Suite *tokenizer_suite(void) {
    Suite *suite = suite_create("tokenizer");
    TCase *tests = tcase_create("tokenizer");
    tcase_set_timeout(tests, 120);
    tcase_add_test(tests, reference_ids);
    tcase_add_test(tests, stream_equals_whole);
    tcase_add_test(tests, round_trip);
    tcase_add_test(tests, newline_is_not_backslash_n);
    tcase_add_test(tests, malformed_vocabulary);
    tcase_add_test(tests, malformed_added_tokens);
    tcase_add_test(tests, unsupported_parts);
    tcase_add_test(tests, not_json);
    tcase_add_test(tests, which_bos);
    tcase_add_test(tests, ids_and_texts);
    tcase_add_test(tests, text_that_cannot_be_encoded);
    tcase_add_test(tests, plain_text_never_gives_a_special_token);
    tcase_add_test(tests, pathological_pattern_fails);
    tcase_add_test(tests, work_is_linear);
    tcase_add_test(tests, marks_in_any_order_are_linear);
    tcase_add_test(tests, threads_share_one);
    suite_add_tcase(suite, tests);
    return suite;
}
MESA_TEST_MAIN(tokenizer_suite)

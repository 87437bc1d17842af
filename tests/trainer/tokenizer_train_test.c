// SPDX-License-Identifier: Apache-2.0
// Tokenizer training against its definition, and the files it writes through the engine's own reader.
//
// The reference counts all pairs anew for every merge. The written folder is opened by eng_tokenizer_open, so training
// and serving are shown to cut text alike; texts come back whole, BOS and the special ids stand where they are
// promised.
#include "trainer/tokenizer.h"

#include <jansson.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/files.h"
#include "engine/tokenizer.h"
#include "tests/check_main.h"
#include "trainer/merge_learner.h"

static char folder[64];

static void make_folder(void) {
    strcpy(folder, "/tmp/mesa_tokenizer_");
    memset(folder + strlen(folder), 'X', 6); // what mkdtemp replaces
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void remove_folder(void) {
    ck_assert_int_eq(eng_remove_tree(folder, NULL), ENG_OK);
}

static const char *in_folder(const char *name) {
    static char paths[64][128]; // more than a case names
    static int next;
    char *path = paths[next++ % 64];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static const char *write_text(const char *name, const void *text, size_t length) {
    const char *path = in_folder(name);
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(text, 1, length, file), length);
    ck_assert_int_eq(fclose(file), 0);
    return path;
}

static const char corpus[] =
    "The river was low that summer, and the children walked across it without wetting their knees.\n"
    "Old Marta kept the ferry anyway. \"A ferry isn't only for water,\" she said; \"it's for waiting.\"\n"
    "<|endoftext|>\n"
    "In 1947, in 1963 and in 2004 there were floods: 12 boats, 350 sheep, one wedding.\n\n\n  The children waited.\n"
    "<|endoftext|>\n"
    "Se\xc3\xb1or N\xc3\xba\xc3\xb1"
    "ez \xf0\x9f\x99\x82 said that the ferry and the river and the children were there.\n"
    "a <|endoftext|> in a line is text, and so is a\\nb.\n";

static eng_status train(const char *path, int32_t size, const trn_tokenizer_options *options, const char *out,
                        eng_error *error) {
    return trn_tokenizer_train(&path, 1, size, options, in_folder(out), error);
}

static void train_well(const char *path, int32_t size, const trn_tokenizer_options *options, const char *out) {
    eng_error error = {0};
    ck_assert_msg(train(path, size, options, out, &error) == ENG_OK, "%s", error.text);
}

static eng_tokenizer *open_trained(const char *out, int32_t size) {
    eng_tokenizer *tokenizer = NULL;
    eng_error error = {0};
    ck_assert_msg(eng_tokenizer_open(in_folder(out), size, &tokenizer, &error) == ENG_OK, "%s", error.text);
    return tokenizer;
}

static void assert_round_trip(const eng_tokenizer *tokenizer, const char *text, size_t length) {
    int32_t *ids;
    size_t count, got_length;
    char *got;
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, text, length, false, false, &ids, &count, NULL), ENG_OK);
    ck_assert_int_eq(eng_tokenizer_decode(tokenizer, ids, count, true, &got, &got_length, NULL), ENG_OK);
    ck_assert_uint_eq(got_length, length);
    ck_assert_mem_eq(got, text, length);
    free(got);
    free(ids);
}

START_TEST(trained_and_used) {
    train_well(write_text("corpus.txt", corpus, sizeof corpus - 1), 310, NULL, "out");
    eng_tokenizer *tokenizer = open_trained("out", 310);
    ck_assert_int_eq(eng_tokenizer_size(tokenizer), 310);
    ck_assert_int_eq(eng_tokenizer_special(tokenizer, "<|endoftext|>"), 0);
    ck_assert_int_eq(eng_tokenizer_bos(tokenizer), 0);
    ck_assert(eng_tokenizer_is_special(tokenizer, 0));
    for (int byte = 0; byte < 256; byte++) {
        size_t length;
        const char *bytes = eng_tokenizer_bytes(tokenizer, 1 + byte, &length);
        ck_assert(length == 1 && (unsigned char)bytes[0] == byte);
    }
    assert_round_trip(tokenizer, corpus, sizeof corpus - 1);
    const char all[] = "\0\1 \x7f \xc3\xbf \xe2\x80\xa8 \xf0\x9f\xa6\xab \xd8\xa7\xd9\x84";
    assert_round_trip(tokenizer, all, sizeof all - 1);
    int32_t *ids;
    size_t count;
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, " the<|endoftext|>", 17, true, true, &ids, &count, NULL), ENG_OK);
    ck_assert(count == 3 && ids[0] == 0 && ids[2] == 0 && ids[1] > 256); // " the" is frequent: one token
    free(ids);
    eng_tokenizer_close(tokenizer);
}
END_TEST

START_TEST(separators_are_no_text) {
    char text[64 * 40] = "";
    for (int i = 0; i < 64; i++)
        strcat(text, i % 2 ? "<|endoftext|>\n" : "ab cd ef gh!\n"); // no token "!\n"
    strcat(text, "<|endoftext|>");                                  // the last line, without its end
    train_well(write_text("corpus.txt", text, strlen(text)), 264, NULL, "out");
    eng_tokenizer *tokenizer = open_trained("out", 0);
    for (int32_t id = 257; id < 264; id++) {
        size_t length;
        const char *bytes = eng_tokenizer_bytes(tokenizer, id, &length);
        ck_assert_msg(length >= 2 && strcspn(bytes, "<|>\n") >= length, "token %d holds part of a separator", id);
    }
    eng_tokenizer_close(tokenizer);
}
END_TEST

START_TEST(newline_and_backslash_n) {
    char text[2048] = "";
    for (int i = 0; i < 100; i++)
        strcat(text, i % 2 ? "x\\ny " : "x\n\ny ");
    train_well(write_text("corpus.txt", text, strlen(text)), 261, NULL, "out");
    eng_tokenizer *tokenizer = open_trained("out", 0);
    assert_round_trip(tokenizer, text, strlen(text));
    eng_tokenizer_close(tokenizer);
}
END_TEST

// ---- the definition -------------------------------------------------------------------------------------------------

enum { MAX_WORDS = 200, WORD = 24, VOCABULARY = 256 + 200 };

typedef struct word {
    int32_t symbols[WORD];
    size_t length;
    uint64_t count;
} word;

// The most frequent pair of neighbours, of equal ones the lowest; 0 when there is none.
static uint64_t best_pair(const word *words, size_t count, int32_t ids, int32_t *left, int32_t *right) {
    uint64_t *counts = calloc((size_t)ids * (size_t)ids, sizeof *counts), best = 0;
    for (size_t w = 0; w < count; w++) {
        for (size_t i = 0; i + 1 < words[w].length; i++)
            counts[words[w].symbols[i] * ids + words[w].symbols[i + 1]] += words[w].count;
    }
    for (int32_t pair = 0; pair < ids * ids; pair++) {
        if (counts[pair] > best) {
            best = counts[pair];
            *left = pair / ids;
            *right = pair % ids;
        }
    }
    free(counts);
    return best;
}

static void merge_words(word *words, size_t count, int32_t left, int32_t right, int32_t result) {
    for (size_t w = 0; w < count; w++) {
        size_t kept = 0;
        for (size_t i = 0; i < words[w].length; i++) {
            bool here = i + 1 < words[w].length && words[w].symbols[i] == left && words[w].symbols[i + 1] == right;
            words[w].symbols[kept++] = here ? result : words[w].symbols[i];
            i += here;
        }
        words[w].length = kept;
    }
}

static size_t random_pieces(trn_piece_map *pieces, word *words, unsigned *seed) {
    size_t wanted = 1 + (size_t)rand_r(seed) % MAX_WORDS;
    int letters = 1 + rand_r(seed) % 4; // few letters: runs and ties
    for (size_t i = 0; i < wanted; i++) {
        char text[WORD];
        size_t length = 1 + (size_t)rand_r(seed) % (WORD - 1);
        for (size_t k = 0; k < length; k++)
            text[k] = (char)('a' + rand_r(seed) % letters);
        trn_piece_map_at(pieces, text, length)->value += 1 + (uint64_t)rand_r(seed) % 3;
    }
    for (size_t i = 0; i < pieces->count; i++) {
        words[i].length = pieces->pieces[i].length;
        words[i].count = pieces->pieces[i].value;
        for (size_t k = 0; k < words[i].length; k++)
            words[i].symbols[k] = (uint8_t)pieces->keys.bytes[pieces->pieces[i].offset + k];
    }
    return pieces->count;
}

START_TEST(learned_by_definition) {
    static word words[MAX_WORDS];
    unsigned seed = 9;
    for (int round = 0; round < 20; round++) {
        trn_piece_map pieces = {0};
        size_t count = random_pieces(&pieces, words, &seed);
        trn_learn_options options = {.vocab_size = VOCABULARY, .min_count = 2, .max_token_bytes = WORD};
        trn_learned learned;
        eng_status status = trn_learn_merges(&pieces, &options, &learned, NULL);
        ck_assert(status == ENG_OK || status == ENG_INVALID); // too few pairs is a right answer too
        for (size_t m = 0; m < learned.merge_count; m++) {
            int32_t left = -1, right = -1;
            uint64_t best = best_pair(words, count, VOCABULARY, &left, &right);
            trn_merge merge = learned.merges[m];
            ck_assert_msg(best >= 2 && merge.left == left && merge.right == right,
                          "round %d, merge %zu: %d %d, want %d %d", round, m, merge.left, merge.right, left, right);
            merge_words(words, count, left, right, merge.result);
        }
        if (status == ENG_INVALID) { // it stopped because nothing is left
            int32_t left, right;
            ck_assert_uint_lt(best_pair(words, count, VOCABULARY, &left, &right), 2);
        }
        ck_assert_uint_eq(learned.tokens.count, 256 + learned.merge_count);
        trn_learned_free(&learned);
        trn_piece_map_free(&pieces);
    }
}
END_TEST

START_TEST(token_length_is_bounded) {
    char text[4096];
    memset(text, 'a', sizeof text);
    trn_tokenizer_options options = {.max_token_bytes = 4};
    eng_error error = {0};
    const char *path = write_text("corpus.txt", text, sizeof text);
    train_well(path, 259, &options, "out"); // aa and aaaa, nothing longer
    eng_tokenizer *tokenizer = open_trained("out", 0);
    for (int32_t id = 257; id < 259; id++) {
        size_t length;
        eng_tokenizer_bytes(tokenizer, id, &length);
        ck_assert_uint_le(length, 4);
    }
    eng_tokenizer_close(tokenizer);
    ck_assert_int_eq(train(path, 260, &options, "more", &error), ENG_INVALID); // there is no third
    ck_assert(access(in_folder("more"), F_OK) != 0);
}
END_TEST

// ---- files and options ----------------------------------------------------------------------------------------------

static void assert_same_file(const char *one, const char *other, bool same) {
    char *bytes, *other_bytes;
    size_t length, other_length;
    ck_assert_int_eq(eng_read_file(in_folder(one), 1 << 24, &bytes, &length, NULL), ENG_OK);
    ck_assert_int_eq(eng_read_file(in_folder(other), 1 << 24, &other_bytes, &other_length, NULL), ENG_OK);
    ck_assert_int_eq(length == other_length && memcmp(bytes, other_bytes, length) == 0, same);
    free(bytes);
    free(other_bytes);
}

START_TEST(same_input_same_file) {
    const char *path = write_text("corpus.txt", corpus, sizeof corpus - 1);
    train_well(path, 310, NULL, "one");
    train_well(path, 310, NULL, "two");
    assert_same_file("one/tokenizer.json", "two/tokenizer.json", true);
    assert_same_file("one/tokenizer_config.json", "two/tokenizer_config.json", true);
    // Documents in another order, over two files: the same counts.
    const char *cut = strstr(corpus, "<|endoftext|>\n") + strlen("<|endoftext|>\n");
    char first[128], second[128];
    strcpy(first, write_text("b.txt", cut, strlen(cut)));
    strcpy(second, write_text("a.txt", corpus, (size_t)(cut - corpus)));
    const char *const paths[] = {first, second};
    ck_assert_int_eq(trn_tokenizer_train(paths, 2, 310, NULL, in_folder("three"), NULL), ENG_OK);
    assert_same_file("one/tokenizer.json", "three/tokenizer.json", true);
    train_well(path, 311, NULL, "four");
    assert_same_file("one/tokenizer.json", "four/tokenizer.json", false);
}
END_TEST

START_TEST(long_documents_and_blocks) { // blocks of 1 MiB, documents beyond 8 MiB, lines without end
    size_t length = 20 << 20, at = 0;
    char *text = malloc(length);
    const char *unit = "na\xc3\xafve \xf0\x9f\xa6\xab ";
    while (at + strlen(unit) < length) {
        memcpy(text + at, unit, strlen(unit));
        at += strlen(unit);
    }
    train_well(write_text("one_line.txt", text, at), 262, NULL, "one");
    for (size_t i = 0; i + strlen(unit) < at; i += 100 * strlen(unit))
        text[i + strlen(unit) - 1] = '\n';
    train_well(write_text("lines.txt", text, at), 262, NULL, "two");
    for (int i = 0; i < 2; i++) {
        eng_tokenizer *tokenizer = open_trained(i ? "two" : "one", 0);
        assert_round_trip(tokenizer, text, 1 << 16);
        eng_tokenizer_close(tokenizer);
    }
    text[at - 1] = '\xff'; // the offset is that of the file
    eng_error error = {0};
    char words[64];
    snprintf(words, sizeof words, "byte %zu", at - 1);
    ck_assert_int_eq(train(write_text("bad.txt", text, at), 262, NULL, "bad", &error), ENG_INVALID);
    ck_assert_msg(strstr(error.text, words) && strstr(error.text, "bad.txt"), "%s, want %s", error.text, words);
    free(text);
}
END_TEST

START_TEST(rest_of_a_cut_line_is_no_separator) { // what is in hand is cut at 8 MiB, right before the last word
    size_t cut = 8 << 20, length = cut + strlen("<|endoftext|>\n");
    char *text = malloc(length + 1);
    for (size_t i = 0; i < cut; i += 2)
        memcpy(text + i, "a ", 2);
    strcpy(text + cut, "<|endoftext|>\n");
    trn_tokenizer_options options = {.min_count = 1};
    train_well(write_text("corpus.txt", text, length), 264, &options, "out"); // " a" alone would give 258
    free(text);
}
END_TEST

START_TEST(rare_pieces_are_dropped) {
    enum { FREQUENT = 1000, RARE = 20000 };
    char *text = malloc(FREQUENT * 16 + RARE * 8);
    size_t length = 0;
    for (int i = 0; i < FREQUENT; i++)
        length += (size_t)sprintf(text + length, " ferryboat");
    for (int i = 0; i < RARE; i++) // each word is new
        length += (size_t)sprintf(text + length, " %c%c%c%c", 'a' + i % 26, 'a' + i / 26 % 26, 'a' + i / 676 % 26,
                                  'A' + i / 17576 % 26);
    trn_tokenizer_options options = {.max_pieces = 1024};
    train_well(write_text("corpus.txt", text, length), 270, &options, "out");
    eng_tokenizer *tokenizer = open_trained("out", 0);
    int32_t *ids;
    size_t count;
    ck_assert_int_eq(eng_tokenizer_encode(tokenizer, " ferryboat", 10, true, false, &ids, &count, NULL), ENG_OK);
    ck_assert_uint_eq(count, 1);
    free(ids);
    eng_tokenizer_close(tokenizer);
    free(text);
}
END_TEST

START_TEST(digits_and_special_tokens) {
    char text[8192] = "";
    for (int i = 0; i < 300; i++)
        strcat(text, "year 1947 and ");
    const char *path = write_text("corpus.txt", text, strlen(text));
    const char *const special[] = {"<|user|>", "<|a \"quoted\" \\ one|>"};
    for (int32_t digits = 1; digits <= 3; digits += 2) {
        trn_tokenizer_options options = {.digits = digits, .special = special, .special_count = 2};
        train_well(path, digits == 1 ? 266 : 268, &options, "out"); // " and", " year" and, as one piece, 194
        eng_tokenizer *tokenizer = open_trained("out", 0);
        int32_t *ids;
        size_t count;
        ck_assert_int_eq(eng_tokenizer_encode(tokenizer, "1947", 4, true, false, &ids, &count, NULL), ENG_OK);
        ck_assert_uint_eq(count, digits == 1 ? 4 : 2); // 194 and 7
        free(ids);
        ck_assert_int_eq(eng_tokenizer_special(tokenizer, special[0]), 1);
        ck_assert_int_eq(eng_tokenizer_special(tokenizer, special[1]), 2);
        ck_assert(eng_tokenizer_is_special(tokenizer, 2) && !eng_tokenizer_is_special(tokenizer, 3));
        eng_tokenizer_close(tokenizer);
    }
}
END_TEST

START_TEST(refused) {
    const char *path = write_text("corpus.txt", corpus, sizeof corpus - 1);
    static const char *const empty[] = {""}, *const twice[] = {"<|endoftext|>"}, *const broken[] = {"\xff"};
    const struct {
        trn_tokenizer_options options;
        int32_t size;
        const char *words;
    } cases[] = {
        {{0}, 256, "vocab_size"},
        {{0}, -5, "vocab_size"},
        {{0}, INT32_MAX, "vocab_size"},
        {{0}, 1 << 20, "tokens"}, // more than the text gives
        {{.digits = 2}, 300, "digits"},
        {{.max_pieces = 5}, 300, "max_pieces"},
        {{.special = empty, .special_count = 1}, 300, "special"},
        {{.special = twice, .special_count = 1}, 300, "twice"},
        {{.special = broken, .special_count = 1}, 300, "special"},
        {{.special_count = 5000}, 300, "special"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        eng_error error = {0};
        eng_status status = train(path, cases[i].size, &cases[i].options, "out", &error);
        ck_assert_msg(status == ENG_INVALID && strstr(error.text, cases[i].words), "case %zu: %s", i, error.text);
    }
    eng_error error = {0};
    ck_assert_int_eq(train(in_folder("nothing.txt"), 300, NULL, "out", &error), ENG_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(error.text, "nothing.txt"));
    ck_assert(access(in_folder("out"), F_OK) != 0);
    error.code = ENG_OK;
    ck_assert_int_eq(train(write_text("empty.txt", "", 0), 257, NULL, "out", &error),
                     ENG_OK); // bytes alone need no text
    ck_assert_int_eq(train(in_folder("empty.txt"), 258, NULL, "out", &error), ENG_INVALID);
}
END_TEST

static void count_calls(void *context, uint64_t done, uint64_t total, const char *text) {
    ck_assert_uint_le(done, total);
    ck_assert_ptr_nonnull(text);
    ++*(int *)context;
}

START_TEST(progress_is_told) {
    int calls = 0;
    trn_tokenizer_options options = {.progress = count_calls, .context = &calls};
    train_well(write_text("corpus.txt", corpus, sizeof corpus - 1), 310, &options, "out");
    ck_assert_int_ge(calls, 2);
}
END_TEST

static Suite *tokenizer_train_suite(void) {
    Suite *suite = suite_create("tokenizer_train");
    TCase *tests = tcase_create("tokenizer_train");
    tcase_set_timeout(tests, 60);
    tcase_add_checked_fixture(tests, make_folder, remove_folder);
    tcase_add_test(tests, trained_and_used);
    tcase_add_test(tests, separators_are_no_text);
    tcase_add_test(tests, newline_and_backslash_n);
    tcase_add_test(tests, learned_by_definition);
    tcase_add_test(tests, token_length_is_bounded);
    tcase_add_test(tests, same_input_same_file);
    tcase_add_test(tests, long_documents_and_blocks);
    tcase_add_test(tests, rest_of_a_cut_line_is_no_separator);
    tcase_add_test(tests, rare_pieces_are_dropped);
    tcase_add_test(tests, digits_and_special_tokens);
    tcase_add_test(tests, refused);
    tcase_add_test(tests, progress_is_told);
    suite_add_tcase(suite, tests);
    return suite;
}
MESA_TEST_MAIN(tokenizer_train_suite)

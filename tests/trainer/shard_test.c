// SPDX-License-Identifier: Apache-2.0
// Token shards: what is written is read; anything else that a file may hold is refused before it is used. Documents of
// text files; the pack command as a whole.
#include "trainer/shard.h"

#include <string.h>

#include "engine/files.h"
#include "engine/tokenizer.h"
#include "tests/check_main.h"
#include "tests/engine/temp_folder.h"
#include "trainer/commands.h"
#include "trainer/documents.h"
#include "trainer/tokenizer.h"

static const uint8_t digest[TRN_TOKENIZER_DIGEST] = {7, 8, 9};

static trn_shard_writer *create(const char *name, int32_t vocabulary, uint64_t limit) {
    trn_shard_writer *writer = NULL;
    ck_assert_int_eq(trn_shard_writer_create(temp_path(name), digest, vocabulary, limit, &writer, NULL), ENG_OK);
    return writer;
}

static void add(trn_shard_writer *writer, const int32_t *ids, uint32_t count, uint64_t hash) {
    ck_assert_int_eq(trn_shard_writer_add(writer, ids, count, 5 * count, hash, NULL), ENG_OK);
}

static trn_shard *open_shard(const char *name) {
    trn_shard *shard = NULL;
    eng_error error = {0};
    ck_assert_msg(trn_shard_open(temp_path(name), &shard, &error) == ENG_OK, "%s", error.text);
    return shard;
}

static void round_trip(int32_t vocabulary) {
    const int32_t ids[] = {0, 1, vocabulary - 1, 40, 500};
    int shards = 0;
    uint64_t documents = 0, total = 0;
    trn_shard_writer *writer = create("a", vocabulary, 1 << 20);
    add(writer, ids, 5, 0x1122334455667788);
    add(writer, ids + 2, 1, 7);
    ck_assert_int_eq(trn_shard_writer_finish(writer, &shards, &documents, &total, NULL), ENG_OK);
    trn_shard_writer_free(writer);
    ck_assert_int_eq(shards, 1);
    ck_assert_uint_eq(documents, 2);
    ck_assert_uint_eq(total, 6);
    trn_shard *shard = open_shard("a-00000.tok");
    trn_document first = trn_shard_document(shard, 0), second = trn_shard_document(shard, 1);
    ck_assert_uint_eq(first.ids, 5);
    ck_assert_uint_eq(first.text_bytes, 25);
    ck_assert_uint_eq(first.hash, 0x1122334455667788);
    ck_assert_uint_eq(second.first, 5);
    ck_assert_mem_eq(trn_shard_tokenizer(shard), digest, sizeof digest);
    int32_t read[6];
    uint8_t mask[6] = {0};
    ck_assert_int_eq(trn_shard_read(shard, 0, 6, vocabulary, read, mask, NULL), ENG_OK);
    ck_assert_mem_eq(read, ids, sizeof ids);
    ck_assert_int_eq(read[5], vocabulary - 1);
    ck_assert_int_eq(mask[5], 1);
    ck_assert_int_eq(trn_shard_read(shard, 1, 6, vocabulary, read, NULL, NULL), ENG_INVALID);
    ck_assert_int_eq(trn_shard_read(shard, UINT64_MAX, 1, vocabulary, read, NULL, NULL), ENG_INVALID);
    eng_error error = {0};
    ck_assert_int_eq(trn_shard_read(shard, 0, 5, vocabulary - 1, read, NULL, &error), ENG_FORMAT);
    ck_assert_ptr_nonnull(strstr(error.text, vocabulary > 65536 ? "byte 72" : "byte 68")); // the third id
    trn_shard_close(shard);
}

START_TEST(what_is_written_is_read) {
    round_trip(600);
    ck_assert_int_eq(eng_remove_tree(temp_path("a-00000.tok"), NULL), ENG_OK);
    round_trip(65536); // still two bytes an id
    ck_assert_int_eq(eng_remove_tree(temp_path("a-00000.tok"), NULL), ENG_OK);
    round_trip(65537); // four
}
END_TEST

START_TEST(shards_are_cut_between_documents) {
    int32_t ids[100] = {0};
    int shards = 0;
    trn_shard_writer *writer = create("a", 10, 40); // twenty ids
    add(writer, ids, 12, 1);
    add(writer, ids, 8, 2);   // fits exactly
    add(writer, ids, 100, 3); // longer than the limit: alone
    add(writer, ids, 1, 4);
    ck_assert_int_eq(trn_shard_writer_finish(writer, &shards, NULL, NULL, NULL), ENG_OK);
    trn_shard_writer_free(writer);
    ck_assert_int_eq(shards, 3);
    const uint64_t wanted[] = {20, 100, 1};
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, "a-%05d.tok", i);
        trn_shard *shard = open_shard(name);
        ck_assert_uint_eq(trn_shard_ids(shard), wanted[i]);
        trn_shard_close(shard);
    }
}
END_TEST

START_TEST(names_are_not_mixed) {
    const int32_t id = 1;
    trn_shard_writer *writer = create("a", 10, 2);
    add(writer, &id, 1, 1);
    add(writer, &id, 1, 2);
    ck_assert(temp_exists("a-00000.tok"));
    trn_shard_writer_free(writer); // without finish: nothing stays
    ck_assert(!temp_exists("a-00000.tok"));
    writer = create("a", 10, 2);
    add(writer, &id, 1, 1);
    ck_assert_int_eq(trn_shard_writer_finish(writer, NULL, NULL, NULL, NULL), ENG_OK);
    trn_shard_writer_free(writer);
    writer = NULL;
    ck_assert_int_eq(trn_shard_writer_create(temp_path("a"), digest, 10, 2, &writer, NULL), ENG_INVALID);
    writer = create("none", 10, 2);
    ck_assert_int_eq(trn_shard_writer_finish(writer, NULL, NULL, NULL, NULL), ENG_OK);
    trn_shard_writer_free(writer);
    ck_assert(!temp_exists("none-00000.tok"));
}
END_TEST

static char *sample(size_t *length) {
    const int32_t ids[] = {3, 4, 5};
    trn_shard_writer *writer = create("s", 10, 1 << 20);
    add(writer, ids, 3, 1);
    add(writer, ids, 2, 2);
    ck_assert_int_eq(trn_shard_writer_finish(writer, NULL, NULL, NULL, NULL), ENG_OK);
    trn_shard_writer_free(writer);
    char *bytes = NULL;
    ck_assert_int_eq(eng_read_file(temp_path("s-00000.tok"), 1 << 20, &bytes, length, NULL), ENG_OK);
    return bytes;
}

static void refused(const char *bytes, size_t length, const char *why) {
    trn_shard *shard = NULL;
    eng_error error = {0};
    temp_write("bad.tok", bytes, length);
    eng_status status = trn_shard_open(temp_path("bad.tok"), &shard, &error);
    ck_assert_msg(status == ENG_FORMAT && strstr(error.text, "bad.tok") && strstr(error.text, why),
                  "length %zu: status %d, \"%s\"", length, (int)status, error.text);
}

START_TEST(every_truncation_is_refused) {
    size_t length = 0;
    char *bytes = sample(&length);
    ck_assert_uint_eq(length, 64 + 16 + 2 * 24);
    for (size_t cut = 0; cut < length; cut++)
        refused(bytes, cut, "byte");
    char longer[256] = {0};
    memcpy(longer, bytes, length);
    refused(longer, length + 1, "does not end");
    free(bytes);
}
END_TEST

START_TEST(every_field_is_checked) {
    size_t length = 0;
    char *bytes = sample(&length), changed[256];
    const struct {
        size_t at, count;
        const char *value, *why;
    } changes[] = {
        {0, 1, "m", "not a token shard"},
        {8, 1, "\2", "version"},
        {10, 1, "\4", "flags"},
        {10, 1, "\2", "does not end"},
        {12, 1, "\3", "bytes an id"},
        {16, 8, "\xff\xff\xff\xff\xff\xff\xff\xff", "more ids"},
        {16, 8, "\0\0\0\0\0\0\0\x80", "more ids"},
        {24, 8, "\xff\xff\xff\xff\xff\xff\xff\xff", "more documents"},
        {24, 1, "\1", "does not end"},
        {80, 8, "\xff\xff\xff\xff\xff\xff\xff\xff", "beyond"},
        {88, 4, "\6\0\0\0", "beyond"},
        {104 + 8, 4, "\xff\xff\xff\xff", "beyond"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        memcpy(changed, bytes, length);
        memcpy(changed + changes[i].at, changes[i].value, changes[i].count);
        refused(changed, length, changes[i].why);
    }
    free(bytes);
}
END_TEST

START_TEST(masks_are_read) {
    size_t length = 0;
    char *bytes = sample(&length), masked[256] = {0};
    memcpy(masked, bytes, 64 + 10);
    masked[10] = 1;
    masked[64 + 10] = 1; // of the five ids the first and the last count
    masked[64 + 14] = 1;
    memcpy(masked + 80, bytes + 80, length - 80); // 64 + 10 + 5 = 79, aligned to 80 as before
    temp_write("m-00000.tok", masked, length);
    trn_shard *shard = open_shard("m-00000.tok");
    int32_t ids[5];
    uint8_t mask[5];
    ck_assert(trn_shard_masked(shard));
    ck_assert_int_eq(trn_shard_read(shard, 0, 5, 10, ids, mask, NULL), ENG_OK);
    const uint8_t wanted[] = {1, 0, 0, 0, 1};
    ck_assert_mem_eq(mask, wanted, 5);
    trn_shard_close(shard);
    free(bytes);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------- documents

static void splits(const char *text, const char *const *wanted) {
    temp_write("t.txt", text, strlen(text));
    trn_documents *documents = NULL;
    ck_assert_int_eq(trn_documents_open(temp_path("t.txt"), &documents, NULL), ENG_OK);
    for (int i = 0;; i++) {
        const char *found = NULL;
        size_t length = 0;
        ck_assert_int_eq(trn_documents_next(documents, &found, &length, NULL), ENG_OK);
        if (!found || !wanted[i]) {
            ck_assert_msg(!found && !wanted[i], "\"%s\": document %d", text, i);
            break;
        }
        ck_assert_msg(length == strlen(wanted[i]) && memcmp(found, wanted[i], length) == 0,
                      "\"%s\": document %d is \"%.*s\"", text, i, (int)length, found);
    }
    trn_documents_close(documents);
}

START_TEST(documents_end_at_separator_lines) {
    splits("", (const char *[]){NULL});
    splits("a", (const char *[]){"a", NULL});
    splits("a\n", (const char *[]){"a", NULL});
    splits("a\n\n", (const char *[]){"a\n", NULL});
    splits("a\n<|endoftext|>\nb\n", (const char *[]){"a", "b", NULL});
    splits("a\n<|endoftext|>", (const char *[]){"a", NULL});
    splits("a\n<|endoftext|>\n", (const char *[]){"a", NULL});
    splits("<|endoftext|>\n<|endoftext|>\nb", (const char *[]){"", "", "b", NULL});
    splits("a <|endoftext|>\n<|endoftext|> b\n", (const char *[]){"a <|endoftext|>\n<|endoftext|> b", NULL});
    splits("a\r\n<|endoftext|>\r\nb", (const char *[]){"a\r\n<|endoftext|>\r\nb", NULL}); // not the line alone
}
END_TEST

START_TEST(documents_longer_than_a_block) {
    enum { LENGTH = (3 << 20) + 5 };
    char *text = malloc(LENGTH + 32);
    memset(text, 'x', LENGTH);
    memcpy(text + LENGTH, "\n<|endoftext|>\nlast", 19);
    temp_write("t.txt", text, LENGTH + 19);
    trn_documents *documents = NULL;
    const char *found = NULL;
    size_t length = 0;
    ck_assert_int_eq(trn_documents_open(temp_path("t.txt"), &documents, NULL), ENG_OK);
    ck_assert_int_eq(trn_documents_next(documents, &found, &length, NULL), ENG_OK);
    ck_assert_uint_eq(length, LENGTH);
    ck_assert_int_eq(trn_documents_next(documents, &found, &length, NULL), ENG_OK);
    ck_assert(length == 4 && memcmp(found, "last", 4) == 0);
    trn_documents_close(documents);
    free(text);
}
END_TEST

START_TEST(text_that_is_not_utf8_is_refused_with_its_place) {
    const char text[] = "good\n<|endoftext|>\nab\xff"
                        "c";
    temp_write("t.txt", text, sizeof text - 1);
    trn_documents *documents = NULL;
    const char *found = NULL;
    size_t length = 0;
    eng_error error = {0};
    ck_assert_int_eq(trn_documents_open(temp_path("t.txt"), &documents, NULL), ENG_OK);
    ck_assert_int_eq(trn_documents_next(documents, &found, &length, &error), ENG_OK);
    ck_assert_int_eq(trn_documents_next(documents, &found, &length, &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "t.txt"));
    ck_assert_ptr_nonnull(strstr(error.text, "byte 21"));
    trn_documents_close(documents);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------------- pack

enum { PACKED = 40 };

static void write_corpus(void) {
    char text[8192] = "";
    for (int i = 0; i < PACKED; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "document %d says %d times: so it is, %d\n%s", i,
                 i * i, 7 * i, i % 9 == 4 ? "<|endoftext|>\n<|endoftext|>\n" : "<|endoftext|>\n"); // some are empty
    temp_write("corpus.txt", text, strlen(text));
    const char *path = temp_path("corpus.txt");
    eng_error error = {0};
    ck_assert_msg(trn_tokenizer_train(&path, 1, 280, NULL, temp_path("tok"), &error) == ENG_OK, "%s", error.text);
}

static int pack(const char *out, const char *holdout) {
    char tokenizer[512], target[512], corpus[512];
    snprintf(tokenizer, sizeof tokenizer, "%s", temp_path("tok"));
    snprintf(target, sizeof target, "%s", temp_path(out));
    snprintf(corpus, sizeof corpus, "%s", temp_path("corpus.txt"));
    const char *argv[] = {"pack", "--tokenizer", tokenizer, "--out", target, corpus, "--holdout", holdout, NULL};
    return trn_command_pack(holdout ? 8 : 6, (char **)argv);
}

static int count_and_check(const char *name, const eng_tokenizer *tokenizer, bool *seen) {
    trn_shard *shard = open_shard(name);
    int documents = (int)trn_shard_documents(shard);
    for (int i = 0; i < documents; i++) {
        trn_document document = trn_shard_document(shard, (uint64_t)i);
        int32_t ids[256];
        char *text = NULL;
        size_t length = 0;
        int number = -1;
        ck_assert_int_eq(trn_shard_read(shard, document.first, document.ids, 280, ids, NULL, NULL), ENG_OK);
        ck_assert_int_eq(eng_tokenizer_decode(tokenizer, ids, document.ids, true, &text, &length, NULL), ENG_OK);
        ck_assert_uint_eq(length, document.text_bytes);
        ck_assert_int_eq(sscanf(text, "document %d", &number), 1);
        ck_assert(number >= 0 && number < PACKED && !seen[number]);
        seen[number] = true;
        free(text);
    }
    trn_shard_close(shard);
    return documents;
}

START_TEST(pack_keeps_every_document_once) {
    eng_tokenizer *tokenizer = NULL;
    write_corpus();
    ck_assert_int_eq(eng_tokenizer_open(temp_path("tok"), 0, &tokenizer, NULL), ENG_OK);
    ck_assert_int_eq(pack("all", NULL), TRN_EXIT_OK);
    bool seen[PACKED] = {false};
    ck_assert_int_eq(count_and_check("all-00000.tok", tokenizer, seen), PACKED);
    ck_assert_int_eq(pack("all", NULL), TRN_EXIT_USAGE); // exists

    ck_assert_int_eq(pack("part", "1/4"), TRN_EXIT_OK);
    bool split[PACKED] = {false};
    int kept = count_and_check("part-00000.tok", tokenizer, split);
    int held = count_and_check("part-valid-00000.tok", tokenizer, split);
    ck_assert_int_eq(kept + held, PACKED);
    ck_assert(held > 2 && held < 20);
    ck_assert_int_eq(pack("bad", "4/4"), TRN_EXIT_USAGE);
    ck_assert_int_eq(pack("bad", "x"), TRN_EXIT_USAGE);
    eng_tokenizer_close(tokenizer);
}
END_TEST

static Suite *shard_suite(void) {
    Suite *suite = suite_create("shard");
    TCase *cases = tcase_create("shards");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, what_is_written_is_read);
    tcase_add_test(cases, shards_are_cut_between_documents);
    tcase_add_test(cases, names_are_not_mixed);
    tcase_add_test(cases, every_truncation_is_refused);
    tcase_add_test(cases, every_field_is_checked);
    tcase_add_test(cases, masks_are_read);
    tcase_add_test(cases, documents_end_at_separator_lines);
    tcase_add_test(cases, documents_longer_than_a_block);
    tcase_add_test(cases, text_that_is_not_utf8_is_refused_with_its_place);
    tcase_add_test(cases, pack_keeps_every_document_once);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(shard_suite)

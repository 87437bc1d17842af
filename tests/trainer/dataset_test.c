// SPDX-License-Identifier: Apache-2.0
// Rows of pairs: every target once an epoch, documents kept apart, border sizes; the order of the rows.
// Content is compared pair by pair with a plain walk over the documents, so no code of the reader is trusted.
#include "trainer/dataset.h"

#include <string.h>

#include "engine/files.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"
#include "trainer/permutation.h"

static trn_dataset_options options_of(const char *const *name, int32_t context) {
    return (trn_dataset_options){.name = name,
                                 .names = 1,
                                 .context = context,
                                 .bos_id = TEST_BOS,
                                 .eos_id = TEST_EOS,
                                 .vocab_size = TEST_VOCABULARY};
}

static trn_dataset *open_set(const char *name, int32_t context) {
    trn_dataset *dataset = NULL;
    eng_error error = {0};
    const char *path = temp_path(name);
    trn_dataset_options options = options_of(&path, context);
    ck_assert_msg(trn_dataset_open(&options, &dataset, &error) == ENG_OK, "%s", error.text);
    return dataset;
}

// The pairs of all rows, one after the other, must be those of all documents, and boundaries stand exactly at their
// starts.
static void check_epoch(const int *lengths, int documents, int32_t context) {
    write_documents("d", lengths, documents);
    trn_dataset *dataset = open_set("d", context);
    int64_t pairs = 0;
    for (int d = 0; d < documents; d++)
        pairs += lengths[d] + 1;
    ck_assert_int_eq(trn_dataset_pairs(dataset), pairs);
    ck_assert_int_eq(trn_dataset_rows(dataset), (pairs + context - 1) / context);
    trn_row row;
    ck_assert_int_eq(trn_row_create(context, &row, NULL), ENG_OK);
    int document = 0, place = 0;
    for (int64_t r = 0; r < trn_dataset_rows(dataset); r++) {
        ck_assert_int_eq(trn_dataset_row(dataset, r, &row, NULL), ENG_OK);
        int32_t left = (int32_t)(pairs - r * context), boundary = 0;
        ck_assert_int_eq(row.length, left < context ? left : context);
        ck_assert_int_eq(row.counted, row.length);
        for (int32_t i = 0; i < row.length; i++) {
            if (i > 0 && place == 0)
                ck_assert_int_eq(row.boundary[boundary++], i);
            ck_assert_int_eq(row.id[i], place == 0 ? TEST_BOS : document_id(document, place - 1));
            ck_assert_int_eq(row.target[i], place == lengths[document] ? TEST_EOS : document_id(document, place));
            if (place++ == lengths[document]) {
                document++;
                place = 0;
            }
        }
        ck_assert_int_eq(row.boundaries, boundary);
    }
    ck_assert_int_eq(document, documents);
    trn_row_free(&row);
    trn_dataset_close(dataset);
    ck_assert_int_eq(eng_remove_tree(temp_path("d-00000.tok"), NULL), ENG_OK);
}

START_TEST(every_target_stands_in_one_row) {
    const int32_t context = 8;
    for (int length = 0; length <= 2 * context + 1; length++) // 1 .. 2 context + 2 pairs
        check_epoch(&length, 1, context);
    check_epoch((const int[]){7, 7, 7}, 3, context); // a row each
    check_epoch((const int[]){0, 0, 0, 0, 0, 0, 0, 0, 0}, 9, context);
    check_epoch((const int[]){3, 30, 0, 6, 1, 64, 9}, 7, context);
    check_epoch((const int[]){5, 2}, 2, 1);
    check_epoch((const int[]){100}, 1, 1000);
}
END_TEST

START_TEST(windows_are_pieces_of_one_document) {
    const int lengths[] = {3, 20, 1};
    write_documents("d", lengths, 3);
    trn_dataset *dataset = open_set("d", 8);
    trn_row row;
    ck_assert_int_eq(trn_row_create(8, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_document_pairs(dataset, 1), 21);
    ck_assert_int_eq(trn_dataset_document_bytes(dataset, 1), 60);
    ck_assert_int_eq(trn_dataset_window(dataset, 1, 16, 5, &row, NULL), ENG_OK);
    ck_assert_int_eq(row.length, 5);
    ck_assert_int_eq(row.boundaries, 0);
    ck_assert_int_eq(row.id[0], document_id(1, 15));
    ck_assert_int_eq(row.target[0], document_id(1, 16));
    ck_assert_int_eq(row.target[4], TEST_EOS);
    ck_assert_int_eq(trn_dataset_window(dataset, 1, 16, 6, &row, NULL), ENG_INVALID);
    ck_assert_int_eq(trn_dataset_window(dataset, 3, 0, 1, &row, NULL), ENG_INVALID);
    ck_assert_int_eq(trn_dataset_window(dataset, 1, -1, 1, &row, NULL), ENG_INVALID);
    ck_assert_int_eq(trn_dataset_window(dataset, 1, 0, 9, &row, NULL), ENG_INVALID); // more than the row takes
    ck_assert_int_eq(trn_dataset_row(dataset, 4, &row, NULL), ENG_INVALID);
    trn_row_free(&row);
    trn_dataset_close(dataset);
}
END_TEST

START_TEST(what_does_not_fit_is_refused) {
    const int lengths[] = {3, 20};
    write_documents("d", lengths, 2);
    const char *path = temp_path("d");
    trn_dataset *dataset = NULL;
    trn_dataset_options options = options_of(&path, 8);
    uint8_t other[TRN_TOKENIZER_DIGEST] = {9};
    options.tokenizer = other;
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_INVALID);
    options = options_of(&path, 8);
    options.bos_id = -1;
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_INVALID);
    options = options_of(&path, 0);
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_INVALID);
    const char *missing = temp_path("nothing");
    options = options_of(&missing, 8);
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_NOT_FOUND);

    options = options_of(&path, 8);
    options.vocab_size = 20; // the files have higher ids
    trn_row row;
    eng_error error = {0};
    ck_assert_int_eq(trn_row_create(8, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(dataset, 1, &row, &error), ENG_FORMAT);
    ck_assert_ptr_nonnull(strstr(error.text, "d-00000.tok"));
    trn_row_free(&row);
    trn_dataset_close(dataset);
}
END_TEST

START_TEST(masked_targets_do_not_count) {
    const int lengths[] = {4, 2};
    write_documents("d", lengths, 2);
    char *bytes = NULL, masked[256] = {0};
    size_t length = 0;
    ck_assert_int_eq(eng_read_file(temp_path("d-00000.tok"), 1 << 20, &bytes, &length, NULL), ENG_OK);
    memcpy(masked, bytes, 64 + 12);
    masked[10] = 1;
    memcpy(masked + 64 + 12, (const char[]){0, 1, 0, 1, 1, 0}, 6);
    memcpy(masked + 88, bytes + 80, 48); // 64 + 12 + 6 = 82, aligned to 88
    temp_write("d-00000.tok", masked, 88 + 48);
    free(bytes);
    trn_dataset *dataset = open_set("d", 8);
    trn_row row;
    ck_assert_int_eq(trn_row_create(8, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(dataset, 0, &row, NULL), ENG_OK);
    const int32_t wanted[] = {-1, document_id(0, 1), -1, document_id(0, 3), TEST_EOS, document_id(1, 0), -1, -1};
    ck_assert_mem_eq(row.target, wanted, sizeof wanted); // the end counts as the last id does
    ck_assert_int_eq(row.counted, 4);
    ck_assert_int_eq(row.id[1], document_id(0, 0)); // inputs keep their ids
    trn_row_free(&row);
    trn_dataset_close(dataset);
}
END_TEST

START_TEST(several_shards_are_one_set) {
    const int first[] = {3, 5}, second[] = {9};
    write_documents("d", first, 2);
    write_documents("e", second, 1);
    ck_assert_int_eq(rename(temp_path("e-00000.tok"), temp_path("d-00001.tok")), 0);
    trn_dataset *dataset = open_set("d", 64);
    ck_assert_int_eq(trn_dataset_documents(dataset), 3);
    ck_assert_int_eq(trn_dataset_pairs(dataset), 4 + 6 + 10);
    trn_row row;
    ck_assert_int_eq(trn_row_create(64, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(dataset, 0, &row, NULL), ENG_OK);
    ck_assert_int_eq(row.boundary[1], 10);
    ck_assert_int_eq(row.target[10], document_id(0, 0)); // the second file's first document
    trn_row_free(&row);
    trn_dataset_close(dataset);
}
END_TEST

START_TEST(the_permutation_is_one) {
    const uint64_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 64, 100, 1000, 4096, 4097};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint64_t size = sizes[s], moved = 0, differs = 0;
        bool *seen = calloc(size, sizeof *seen);
        for (uint64_t i = 0; i < size; i++) {
            uint64_t at = trn_permute(size, 5, 3, i);
            ck_assert(at < size && !seen[at]);
            seen[at] = true;
            moved += at != i;
            differs += at != trn_permute(size, 5, 4, i);
            differs += at != trn_permute(size, 6, 3, i);
        }
        free(seen);
        if (size >= 64)
            ck_assert(moved > size * 9 / 10 && differs > size * 18 / 10); // 2 size (1 - 1 / size) expected
    }
}
END_TEST

START_TEST(the_order_goes_through_every_epoch) {
    const int lengths[] = {50, 31, 18};
    write_documents("d", lengths, 3);
    trn_dataset *dataset = open_set("d", 8);
    int64_t rows = trn_dataset_rows(dataset);
    bool same = true;
    for (int64_t epoch = 0; epoch < 3; epoch++) {
        bool seen[64] = {false};
        for (int64_t i = 0; i < rows; i++) {
            int64_t row = trn_dataset_order(dataset, 11, epoch * rows + i);
            ck_assert(row >= 0 && row < rows && !seen[row]);
            seen[row] = true;
            same = same && row == trn_dataset_order(dataset, 11, i);
        }
    }
    ck_assert(!same);
    trn_dataset_close(dataset);
}
END_TEST

// -------------------------------------------------------------------------------------------------------- examples

static void write_examples(const char *name) {
    static const uint8_t none[TRN_TOKENIZER_DIGEST] = {0};
    static const int32_t ids[3][4] = {{0, 7, 9, 60}, {5}, {8, 8, 8}},
                         targets[3][4] = {{-1, 3, -1, 0}, {-1}, {4, 5, 60}};
    static const uint32_t count[] = {4, 1, 3};
    trn_shard_writer *writer = NULL;
    ck_assert_int_eq(trn_shard_writer_create(temp_path(name), none, TEST_VOCABULARY, 1 << 20, &writer, NULL), ENG_OK);
    for (int e = 0; e < 3; e++)
        ck_assert_int_eq(trn_shard_writer_add_example(writer, ids[e], targets[e], count[e], 0, NULL), ENG_OK);
    ck_assert_int_eq(trn_shard_writer_add(writer, ids[0], 4, 0, 0, NULL), ENG_INVALID); // text
    ck_assert_int_eq(trn_shard_writer_finish(writer, NULL, NULL, NULL, NULL), ENG_OK);
    trn_shard_writer_free(writer);
}

START_TEST(an_example_is_a_row) {
    trn_row row;
    write_examples("e");
    const char *path = temp_path("e");
    trn_dataset *dataset = NULL;
    trn_dataset_options options = options_of(&path, 4);
    options.bos_id = options.eos_id = -1; // examples have their own ends
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_OK);
    ck_assert(trn_dataset_has_examples(dataset));
    ck_assert_int_eq(trn_dataset_rows(dataset), 3);
    ck_assert_int_eq(trn_dataset_pairs(dataset), 8);
    ck_assert_int_eq(trn_row_create(4, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(dataset, 0, &row, NULL), ENG_OK);
    ck_assert_int_eq(row.length, 4);
    ck_assert_int_eq(row.counted, 2);
    ck_assert_int_eq(row.boundaries, 0);
    ck_assert_mem_eq(row.id, ((const int32_t[]){0, 7, 9, 60}), 16);
    ck_assert_mem_eq(row.target, ((const int32_t[]){-1, 3, -1, 0}), 16);
    ck_assert_int_eq(trn_dataset_row(dataset, 1, &row, NULL), ENG_OK);
    ck_assert(row.length == 1 && row.counted == 0 && row.id[0] == 5);
    ck_assert_int_eq(trn_dataset_window(dataset, 2, 1, 2, &row, NULL), ENG_OK);
    ck_assert(row.length == 2 && row.counted == 2 && row.target[0] == 5 && row.target[1] == 60);
    trn_row_free(&row);
    trn_dataset_close(dataset);
}
END_TEST

START_TEST(examples_that_do_not_fit_are_refused) {
    const int lengths[] = {5};
    eng_error error = {0};
    write_examples("e");
    write_documents("d", lengths, 1);
    char examples[512];
    snprintf(examples, sizeof examples, "%s", temp_path("e"));
    const char *both[] = {examples, temp_path("d")};
    trn_dataset *dataset = NULL;
    trn_dataset_options options = options_of(both, 3); // shorter than the longest
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "an example of 4 ids"));
    options.context = 4;
    options.vocab_size = 60;
    trn_row row;
    ck_assert_int_eq(trn_row_create(4, &row, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_OK);
    ck_assert_int_eq(trn_dataset_row(dataset, 0, &row, NULL), ENG_FORMAT); // an id
    ck_assert_int_eq(trn_dataset_row(dataset, 2, &row, NULL), ENG_FORMAT); // a target
    trn_dataset_close(dataset);
    trn_row_free(&row);
    options.names = 2; // other tokenizers, other kinds
    ck_assert_int_eq(trn_dataset_open(&options, &dataset, NULL), ENG_INVALID);
}
END_TEST

static Suite *dataset_suite(void) {
    Suite *suite = suite_create("dataset");
    TCase *cases = tcase_create("rows");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, every_target_stands_in_one_row);
    tcase_add_test(cases, windows_are_pieces_of_one_document);
    tcase_add_test(cases, what_does_not_fit_is_refused);
    tcase_add_test(cases, masked_targets_do_not_count);
    tcase_add_test(cases, several_shards_are_one_set);
    tcase_add_test(cases, an_example_is_a_row);
    tcase_add_test(cases, examples_that_do_not_fit_are_refused);
    tcase_add_test(cases, the_permutation_is_one);
    tcase_add_test(cases, the_order_goes_through_every_epoch);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(dataset_suite)

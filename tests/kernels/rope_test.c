// SPDX-License-Identifier: Apache-2.0
// Rotary embedding against its reference: positions of documents, positions of a session that never ends, and back.
//
// Positions up to 3 * 2^30 hold the angle to the accuracy that position 0 has.
#include "kernels/ref/elementwise.h"
#include "tests/kernels/kernel_test.h"

static const struct {
    int32_t heads, head_width, rotary;
} shape[] = {{1, 2, 2}, {3, 10, 6}, {4, 64, 64}, {2, 128, 96}, {5, 33, 30}};
enum { SHAPES = sizeof shape / sizeof shape[0] };

static float *frequencies(kernel_test *test, int32_t rotary) {
    float *frequency = kernel_test_zero_floats(test, (size_t)rotary / 2);
    for (int32_t i = 0; i < rotary / 2; i++)
        frequency[i] = (float)pow(10000.0, -2.0 * i / rotary);
    return frequency;
}

// position0 of the first two rows; the third holds documents.
static void rows_at(kernel_test *test, int64_t position0) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 1, position0);
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 2, position0 / 3);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 90, position0 + 5);
    kernel_test_boundary(test, 31);
    kernel_test_boundary(test, 64);
    kernel_test_prepare(test);
}

static void check_rope(kernel_test *test, int s, int64_t position0) {
    const int32_t heads = shape[s].heads, head_width = shape[s].head_width, rotary = shape[s].rotary;
    rows_at(test, position0);
    const kern_rows *rows = test->rows;
    size_t count = (size_t)rows->n_tokens * (size_t)heads * (size_t)head_width;
    float *x = kernel_test_floats(test, count, -1, 1), *frequency = frequencies(test, rotary);
    double *original = kernel_test_widened(test, x, count), *want = kernel_test_widened(test, x, count);
    double *wide_frequency = kernel_test_widened(test, frequency, (size_t)rotary / 2);
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        const kern_row *row = &rows->row[rows->token_row[t]];
        int64_t position = row->position + t - row->token0; // the rows' own rule, restated
        for (int32_t i = 0; i < row->boundaries; i++)
            if (rows->boundary[row->boundary0 + i] <= t)
                position = t - rows->boundary[row->boundary0 + i];
        for (int32_t h = 0; h < heads; h++)
            kern_ref_rope(want + ((size_t)t * (size_t)heads + (size_t)h) * (size_t)head_width, wide_frequency,
                          (size_t)rotary, position, 1);
    }
    kern_rope_args args = {{x}, {frequency}, heads, head_width, rotary, 0};
    kernel_test_launch(test, KERN_OP_ROPE, &args);
    kernel_test_assert_norm(x, want, count, 2e-7);
    args.inverse = 1;
    kernel_test_launch(test, KERN_OP_ROPE, &args);
    kernel_test_assert_norm(x, original, count, 3e-7);
}

START_TEST(rope_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    static const int64_t positions[] = {0, 12345, 1 << 24, (int64_t)3 << 30};
    for (int s = 0; s < SHAPES; s++)
        for (int p = 0; p < 4; p++)
            check_rope(&test, s, positions[p]);
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_are_free_of_batch) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    enum { TOKENS = 90, WIDTH = 8 * 64 };
    float *x = kernel_test_floats(&test, TOKENS * WIDTH, -1, 1), *alone = kernel_test_copy(&test, x, TOKENS * WIDTH);
    kern_rope_args args = {{x}, {frequencies(&test, 62)}, 8, 64, 62, 0};
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, TOKENS, 1000);
    kernel_test_prepare(&test);
    kernel_test_launch(&test, KERN_OP_ROPE, &args);
    for (int t = 0; t < TOKENS; t++) {
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_GENERATED, -1, 1, 1000 + t);
        kernel_test_prepare(&test);
        args.x.f = alone + t * WIDTH;
        kernel_test_launch(&test, KERN_OP_ROPE, &args);
    }
    kernel_test_assert_same(x, alone, TOKENS * WIDTH);
    kernel_test_close(&test);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_rope_args args = {{place}, {place}, 1, 4, 3, 0};
    kernel_test_assert_refused(&test, KERN_OP_ROPE, &args, KERN_INVALID); // odd
    args.rotary = 6;
    kernel_test_assert_refused(&test, KERN_OP_ROPE, &args, KERN_INVALID); // wider than the head
    args.rotary = 0;
    kernel_test_assert_refused(&test, KERN_OP_ROPE, &args, KERN_INVALID);
    args.rotary = 4, args.frequency.p = NULL;
    kernel_test_assert_refused(&test, KERN_OP_ROPE, &args, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *rope_suite(void) {
    Suite *suite = suite_create("rope");
    TCase *tests = tcase_create("rope");
    tcase_add_loop_test(tests, rope_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_batch, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, shapes_are_checked);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(rope_suite)

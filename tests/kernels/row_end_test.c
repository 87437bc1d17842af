// SPDX-License-Identifier: Apache-2.0
// What rows keep of their last token: to the slot and back, plane by plane, and nothing else is touched.
//
// Rows of both kinds, with and without a slot, on every device.
#include "tests/kernels/kernel_test.h"

enum { PLANES = 3, TOKENS = 90, STRIDE = 96, WIDTH = 37, APART = 48, SLOTS = 6, SLOT = 64 + PLANES * APART };

static const struct {
    kern_row_kind kind;
    int32_t slot, length;
} wanted[] = {{KERN_ROW_GENERATED, 4, 1}, {KERN_ROW_GENERATED, -1, 3}, {KERN_ROW_GENERATED, 0, 5},
              {KERN_ROW_PROMPT, 5, 64},   {KERN_ROW_PROMPT, -1, 16},   {KERN_ROW_PROMPT, 2, 1}};
enum { ROWS = sizeof wanted / sizeof wanted[0] };

static void place_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    for (int r = 0; r < ROWS; r++)
        kernel_test_row(test, wanted[r].kind, wanted[r].slot, wanted[r].length, 0);
    test->rows->slot_stride = SLOT * sizeof(float);
    kernel_test_prepare(test);
    ck_assert_int_eq(test->rows->n_tokens, TOKENS);
}

// The row whose last token it is, with a slot; -1: none.
static int row_of_last(const kernel_test *test, int token) {
    for (int r = 0; r < ROWS; r++)
        if (wanted[r].slot >= 0 && token == test->rows->row[r].token0 + wanted[r].length - 1)
            return r;
    return -1;
}

static float *kept(float *slots, int slot, int plane) {
    return slots + (size_t)slot * SLOT + 64 + (size_t)plane * APART;
}

START_TEST(last_tokens_go_there_and_back) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const size_t floats = PLANES * STRIDE * WIDTH;
    float *x = kernel_test_floats(&test, floats, -1, 1), *y = kernel_test_floats(&test, floats, -1, 1);
    float *slots = kernel_test_zero_floats(&test, SLOTS * SLOT), *were = malloc(floats * sizeof *were);
    memcpy(were, y, floats * sizeof *were);
    place_rows(&test);
    kern_row_end_args args = {{x}, {slots + 64}, WIDTH, PLANES, STRIDE, APART, false};
    kernel_test_launch(&test, KERN_OP_ROW_END, &args);
    args.x.p = y;
    args.back = true;
    kernel_test_launch(&test, KERN_OP_ROW_END, &args);
    size_t set = 0, filled = 0;
    for (int plane = 0; plane < PLANES; plane++) {
        for (int t = 0; t < STRIDE; t++) {
            const size_t at = ((size_t)plane * STRIDE + (size_t)t) * WIDTH;
            const int row = row_of_last(&test, t);
            ck_assert_mem_eq(y + at, row >= 0 ? x + at : were + at, WIDTH * sizeof *y);
            if (row >= 0)
                ck_assert_mem_eq(kept(slots, wanted[row].slot, plane), x + at, WIDTH * sizeof *y);
            filled += row >= 0 ? WIDTH : 0;
        }
    }
    for (size_t i = 0; i < SLOTS * SLOT; i++)
        set += slots[i] != 0;
    ck_assert_uint_eq(set, filled);
    free(were);
    kernel_test_close(&test);
}
END_TEST

START_TEST(refusals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float *x = kernel_test_zero_floats(&test, 8), *slot = kernel_test_zero_floats(&test, 8);
    const kern_row_end_args right = {{x}, {slot}, 4, 1, 2, 4, false};
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, 2, 0);
    kernel_test_prepare(&test);
    kern_row_end_args wrong[6];
    for (int i = 0; i < 6; i++)
        wrong[i] = right;
    wrong[0].width = 0;
    wrong[1].planes = 0;
    wrong[2].stride = 0;
    wrong[3].state_stride = 3;
    wrong[4].x.p = NULL;
    wrong[5].state.p = NULL;
    for (int i = 0; i < 6; i++)
        kernel_test_assert_refused(&test, KERN_OP_ROW_END, &wrong[i], KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *row_end_suite(void) {
    Suite *suite = suite_create("row_end");
    TCase *all = tcase_create("row ends");
    tcase_add_loop_test(all, last_tokens_go_there_and_back, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(all, refusals, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, all);
    return suite;
}
MESA_TEST_MAIN(row_end_suite)

// SPDX-License-Identifier: Apache-2.0
// Where a looped model's token is read: by threshold and bound of its row, against the reference.
//
// Rows of both kinds with all the ways to say it; a gate that is no number.
#include "kernels/ref/exit.h"
#include "tests/kernels/kernel_test.h"

enum { LOOPS = 5, TOKENS = 90, STRIDE = 96, WIDTH = 37 };

static const kern_exit wanted[] = {{0.5f, 5}, {0, 5}, {0.9f, 3}, {1, 5}, {0.3f, 0}, {0.7f, 99}, {1, 2}, {0.2f, 1}};
enum { ROWS = sizeof wanted / sizeof wanted[0] };

static void place_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    for (int r = 0; r < ROWS; r++)
        kernel_test_row(test, r < 3 ? KERN_ROW_GENERATED : KERN_ROW_PROMPT, -1, r + 1 < ROWS ? 7 : TOKENS - 49, 0)
            ->exit = wanted[r];
    kernel_test_prepare(test);
}

// All but a sum that meets the threshold to the last digits, where the next loop is as right.
static void check_token(const kernel_test *test, int t, const float *x, const float *z, const float *y, int32_t loop) {
    const kern_exit *exit = &test->rows->row[test->rows->token_row[t]].exit;
    const int most = exit->max_loops > 0 && exit->max_loops < LOOPS ? exit->max_loops : LOOPS;
    double own[LOOPS];
    for (int r = 0; r < LOOPS; r++)
        own[r] = (double)z[r * STRIDE + t];
    const double threshold = exit->max_loops == 0 || exit->threshold >= 1 ? INFINITY : (double)exit->threshold;
    const int low = kern_ref_exit_loop(LOOPS, own, threshold - 1e-6, most),
              high = kern_ref_exit_loop(LOOPS, own, threshold + 1e-6, most);
    ck_assert_msg(loop >= low && loop <= high, "token %d is read at %d, not %d", t, loop, low);
    ck_assert_mem_eq(y + (size_t)t * WIDTH, x + ((size_t)(loop - 1) * STRIDE + (size_t)t) * WIDTH, WIDTH * sizeof *y);
}

START_TEST(read_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const float *x = kernel_test_floats(&test, LOOPS * STRIDE * WIDTH, -1, 1);
    float *z = kernel_test_floats(&test, LOOPS * STRIDE, -4, 3), *y = kernel_test_zero_floats(&test, TOKENS * WIDTH);
    int32_t *loop = kernel_test_bytes(&test, TOKENS * sizeof *loop), seen[LOOPS] = {0};
    kern_exit_read_args args = {{(void *)x}, {z}, {y}, {loop}, WIDTH, LOOPS, STRIDE};
    place_rows(&test);
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    for (int t = 0; t < TOKENS; t++) {
        check_token(&test, t, x, z, y, loop[t]);
        seen[loop[t] - 1]++;
    }
    for (int r = 0; r < LOOPS; r++)
        ck_assert_int_gt(seen[r], 0);
    args.z.p = NULL; // no gate: the bound alone
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    for (int r = 0; r < ROWS; r++)
        ck_assert_int_eq(loop[test.rows->row[r].token0],
                         wanted[r].max_loops > 0 && wanted[r].max_loops < LOOPS ? wanted[r].max_loops : LOOPS);
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends_and_refusals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float x[3] = {1, 2, 3}, z[3] = {-1e30f, 1e30f, 0}, y[1];
    int32_t loop[1];
    kernel_test_lend(&test, x, sizeof x);
    kernel_test_lend(&test, z, sizeof z);
    kernel_test_lend(&test, y, sizeof y);
    kernel_test_lend(&test, loop, sizeof loop);
    kern_exit_read_args args = {{x}, {z}, {y}, {loop}, 1, 3, 1};
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, 1, 0)->exit = (kern_exit){0.999f, 3};
    kernel_test_prepare(&test);
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    ck_assert(loop[0] == 2 && y[0] == 2);
    z[0] = z[1] = NAN; // never leaves
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    ck_assert(loop[0] == 3 && y[0] == 3);
    args.loops = 0;
    kernel_test_assert_refused(&test, KERN_OP_EXIT_READ, &args, KERN_INVALID);
    args.loops = 3;
    args.y.p = x;
    kernel_test_assert_refused(&test, KERN_OP_EXIT_READ, &args, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *exit_suite(void) {
    Suite *suite = suite_create("exit");
    TCase *tests = tcase_create("exit");
    tcase_add_loop_test(tests, read_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends_and_refusals, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(exit_suite)

// SPDX-License-Identifier: Apache-2.0
// clear, and a token's sums of solves, which several layers add up: over the heads of two Mesa calls they are what the
// calls' reports say.
#include "tests/kernels/sequence_test.h"

enum { HEADS = 3, DEPTH = 16, TOKENS = 75 };

static void make_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 1, 0)->solver =
        (kern_solver){KERN_SOLVE_TOLERANCE, .max_steps = 2, .tolerance = 1e-6f};
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 4, 9)->solver = (kern_solver){KERN_SOLVE_STEPS, .max_steps = 5};
    kernel_test_row(test, KERN_ROW_PROMPT, -1, TOKENS - 5, 0)->solver =
        (kern_solver){KERN_SOLVE_TOLERANCE, .max_steps = 200, .tolerance = 1e-3f};
    kernel_test_prepare(test);
}

static void solve(kernel_test *test, kern_solve_report *report, kern_solve_sum *sum) {
    const size_t vectors = TOKENS * HEADS, floats = vectors * DEPTH;
    const kern_mesa_args args = {
        .q.f = sequence_keys(test, vectors, DEPTH),
        .k.f = sequence_keys(test, vectors, DEPTH),
        .v.f = kernel_test_floats(test, floats, -1, 1),
        .g.f = sequence_decays(test, vectors, 0.95, 1),
        .beta.f = kernel_test_floats(test, vectors, 0.1, 0.95),
        .lambda_params.f = kernel_test_floats(test, HEADS * DEPTH, -2, 2),
        .o.f = kernel_test_zero_floats(test, floats),
        .report.p = report,
        .sum.p = sum,
        .mesa = {.heads = HEADS, .key_width = DEPTH, .value_width = DEPTH, .lambda_bound = 0.25f}};
    kernel_test_launch(test, KERN_OP_MESA, &args);
}

static void add_reports(const kern_solve_report *report, kern_solve_sum *sum) {
    for (int i = 0; i < TOKENS * HEADS; i++) {
        kern_solve_sum *of = &sum[i / HEADS];
        of->solves++;
        of->steps += report[i].steps;
        of->unconverged += report[i].flags != 0;
        of->steps_max = report[i].steps > of->steps_max ? report[i].steps : of->steps_max;
    }
}

START_TEST(sums_are_those_of_the_reports) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        return;
    make_rows(&test);
    kern_solve_report *report[2];
    kern_solve_sum *sum = kernel_test_bytes(&test, (TOKENS + 1) * sizeof *sum), want[TOKENS + 1] = {{0}};
    memset(sum, 0x5a, (TOKENS + 1) * sizeof *sum);
    want[TOKENS] = sum[TOKENS]; // behind the batch
    kernel_test_launch(&test, KERN_OP_CLEAR, &(kern_clear_args){{sum}, sizeof *sum / 4});
    for (int layer = 0; layer < 2; layer++) {
        report[layer] = kernel_test_bytes(&test, TOKENS * HEADS * sizeof **report);
        solve(&test, report[layer], sum);
        add_reports(report[layer], want);
    }
    kernel_test_assert_same(sum, want, TOKENS + 1);
    ck_assert_int_eq(sum[0].unconverged, 2 * HEADS);
    ck_assert_int_eq(sum[1].steps, 2 * HEADS * 5);
    ck_assert_int_eq(sum[TOKENS - 1].unconverged, 0);
    ck_assert(sum[TOKENS - 1].steps_max > 1);
    kernel_test_assert_refused(&test, KERN_OP_CLEAR, (&(kern_clear_args){{sum}, 0}), KERN_INVALID);
    kernel_test_assert_refused(&test, KERN_OP_CLEAR, (&(kern_clear_args){{NULL}, 4}), KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *solve_sum_suite(void) {
    Suite *suite = suite_create("solve_sum");
    TCase *tests = tcase_create("solve_sum");
    tcase_add_loop_test(tests, sums_are_those_of_the_reports, 0, KERNEL_TEST_DEVICES);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(solve_sum_suite)

// SPDX-License-Identifier: Apache-2.0
// Gates against their reference: also element by element, because a decay near one is summed over long horizons.
//
// Far ends of both gates, every cap that is allowed, the reference by finite differences.
#include "kernels/ref/gates.h"
#include "tests/kernels/kernel_test.h"

static void rows_of(kernel_test *test, int32_t tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    kernel_test_prepare(test);
}

static kern_gates sigmoid_gates(int32_t heads, float cap) {
    return (kern_gates){.heads = heads,
                        .channels = 1,
                        .decay_law = KERN_DECAY_LAW_SIGMOID,
                        .write_law = KERN_WRITE_LAW_SIGMOID,
                        .divisor = 1,
                        .gamma_cap = cap,
                        .write_factor = 1};
}

static void check_gates(kernel_test *test, int32_t tokens, int32_t heads, float cap, double range) {
    size_t count = (size_t)tokens * (size_t)heads;
    float *a = kernel_test_floats(test, count, -range, range), *b = kernel_test_floats(test, count, -range, range);
    float *dg = kernel_test_floats(test, count, -1, 1), *dbeta = kernel_test_floats(test, count, -1, 1);
    float *g = kernel_test_zero_floats(test, count), *beta = kernel_test_zero_floats(test, count);
    double *g_want = kernel_test_zero_doubles(test, count), *beta_want = kernel_test_zero_doubles(test, count);
    double *da = kernel_test_zero_doubles(test, count), *db = kernel_test_zero_doubles(test, count);
    for (size_t i = 0; i < count; i++) {
        kern_ref_gates((double)a[i], (double)b[i], (double)cap, &g_want[i], &beta_want[i]);
        kern_ref_gates_backward((double)a[i], (double)b[i], (double)cap, (double)dg[i], (double)dbeta[i], &da[i],
                                &db[i]);
    }
    rows_of(test, tokens);
    kern_gates_args forward = {.a.f = a, .b.f = b, .g.f = g, .beta.f = beta, .gates = sigmoid_gates(heads, cap)};
    kernel_test_launch(test, KERN_OP_GATES, &forward);
    for (size_t i = 0; i < count; i++) {
        ck_assert_msg(fabs((double)g[i] - g_want[i]) <= 1e-6 * fabs(g_want[i]) + 1e-37, "g(%g, %g) = %.9g, not %.9g",
                      (double)a[i], (double)b[i], (double)g[i], g_want[i]);
        ck_assert_double_le(fabs((double)beta[i] - beta_want[i]), 5e-7 * beta_want[i] + 1e-37);
    }
    kern_gates_backward_args backward = {.a.f = a,
                                         .b.f = b,
                                         .dg.f = dg,
                                         .dbeta.f = dbeta,
                                         .da.f = dg,
                                         .db.f = dbeta,
                                         .gates = sigmoid_gates(heads, cap)}; // in place
    kernel_test_launch(test, KERN_OP_GATES_BACKWARD, &backward);
    kernel_test_assert_norm(dg, da, count, 1e-6);
    kernel_test_assert_norm(dbeta, db, count, 1e-6);
}

START_TEST(gates_equal_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("instruction set %d is not here", _i);
    static const float caps[] = {1.0f, 0.9975f, 0.5f};
    for (int i = 0; i < 3; i++) {
        check_gates(&test, 1, 1, caps[i], 5);
        check_gates(&test, 3, 7, caps[i], 5);
        check_gates(&test, 257, 16, caps[i], 80);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("instruction set %d is not here", _i);
    float a[6] = {-1e30f, -200, 200, 1e30f, 0, NAN}, b[6] = {-1e30f, -200, 200, 1e30f, NAN, 0}, g[6], beta[6];
    rows_of(&test, 6);
    kern_gates_args args = {.a.f = a, .b.f = b, .g.f = g, .beta.f = beta, .gates = sigmoid_gates(1, 0.9975f)};
    kernel_test_launch(&test, KERN_OP_GATES, &args);
    ck_assert(g[0] == -1e30f && g[1] == -200);
    const double cap_term = log(0.9975);
    ck_assert_double_le(fabs((double)g[2] - cap_term), 1e-8);
    ck_assert_double_le(fabs((double)g[3] - cap_term), 1e-8);
    ck_assert(beta[0] >= 0 && beta[0] < 1e-37f && beta[2] == 1 && beta[3] == 1);
    ck_assert(isnan(g[5]) && isnan(beta[4]) && isnan(g[4]));
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_are_free_of_batch) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("instruction set %d is not here", _i);
    enum { TOKENS = 400, HEADS = 13, COUNT = TOKENS * HEADS };
    float *a = kernel_test_floats(&test, COUNT, -9, 9), *b = kernel_test_floats(&test, COUNT, -9, 9);
    float *g = kernel_test_zero_floats(&test, COUNT), *beta = kernel_test_zero_floats(&test, COUNT);
    float *g_alone = kernel_test_zero_floats(&test, COUNT), *beta_alone = kernel_test_zero_floats(&test, COUNT);
    rows_of(&test, TOKENS);
    kern_gates_args args = {.a.f = a, .b.f = b, .g.f = g, .beta.f = beta, .gates = sigmoid_gates(HEADS, 0.9975f)};
    kernel_test_launch(&test, KERN_OP_GATES, &args);
    rows_of(&test, 1);
    for (int i = 0; i < COUNT; i += HEADS) {
        kern_gates_args one = {.a.f = a + i,
                               .b.f = b + i,
                               .g.f = g_alone + i,
                               .beta.f = beta_alone + i,
                               .gates = sigmoid_gates(HEADS, 0.9975f)};
        kernel_test_launch(&test, KERN_OP_GATES, &one);
    }
    kernel_test_assert_same(g, g_alone, COUNT);
    kernel_test_assert_same(beta, beta_alone, COUNT);
    kernel_test_close(&test);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_gates_args args = {.a.f = place, .b.f = place, .g.f = place, .beta.f = place, .gates = sigmoid_gates(0, 1)};
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.heads = 4, args.gates.gamma_cap = 0;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.gamma_cap = 1.5f;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.gamma_cap = 0.25f;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_UNSUPPORTED);
    args.gates.gamma_cap = 1, args.beta.p = NULL;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    kern_gates_backward_args backward = {
        .a.f = place, .b.f = place, .dg.f = place, .dbeta.f = place, .da.f = place, .gates = sigmoid_gates(4, 1)};
    kernel_test_assert_refused(&test, KERN_OP_GATES_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static double loss(void *context) {
    const double *point = context;
    double g, beta;
    kern_ref_gates(point[0], point[1], 0.9, &g, &beta);
    return 0.7 * g - 1.3 * beta;
}

START_TEST(reference_gradients) {
    for (double at = -4; at <= 4; at += 0.5) {
        double point[2] = {at, 1 - at}, gradient[2];
        kern_ref_gates_backward(point[0], point[1], 0.9, 0.7, -1.3, &gradient[0], &gradient[1]);
        kernel_test_gradient("gates", loss, point, point, gradient, 2, 1e-8);
    }
}
END_TEST

static Suite *gates_suite(void) {
    Suite *suite = suite_create("gates");
    TCase *tests = tcase_create("gates");
    tcase_add_loop_test(tests, gates_equal_reference, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tests, far_ends, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tests, bits_are_free_of_batch, 0, KERNEL_TEST_ISAS);
    tcase_add_test(tests, shapes_are_checked);
    tcase_add_test(tests, reference_gradients);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(gates_suite)

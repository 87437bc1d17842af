// SPDX-License-Identifier: Apache-2.0
// AdamW over several steps against its reference, the sum of squares in double, the clipping scale.
//
// A norm that is not a number must reach the scale; a sum must not know the number of threads.
#include "kernels/ref/elementwise.h"
#include "tests/kernels/kernel_test.h"

static void check_adamw(kernel_test *test, int64_t length, bool scaled) {
    size_t count = (size_t)length;
    const kern_ref_adamw rule = {(double)1e-2f, (double)0.9f, (double)0.98f, (double)1e-8f, (double)0.1f, 0};
    float *parameter = kernel_test_floats(test, count, -1, 1), *m = kernel_test_zero_floats(test, count);
    float *v = kernel_test_zero_floats(test, count), grad_scale = 0.25f;
    double *parameter_want = kernel_test_widened(test, parameter, count),
           *m_want = kernel_test_zero_doubles(test, count);
    double *v_want = kernel_test_zero_doubles(test, count);
    kernel_test_lend(test, &grad_scale, sizeof grad_scale);
    for (int step = 1; step <= 5; step++) {
        float *grad = kernel_test_floats(test, count, -1, 1);
        kern_ref_adamw at = rule;
        at.step = step;
        kern_adamw_args args = {{parameter},
                                {grad},
                                {m},
                                {v},
                                {scaled ? &grad_scale : NULL},
                                length,
                                1e-2f,
                                0.9f,
                                0.98f,
                                1e-8f,
                                0.1f,
                                (float)(1 - pow(rule.beta1, step)),
                                (float)(1 - pow(rule.beta2, step))};
        kernel_test_launch(test, KERN_OP_ADAMW, &args);
        for (size_t i = 0; i < count; i++)
            kern_ref_adamw_step(at, (scaled ? 0.25 : 1.0) * (double)grad[i], &parameter_want[i], &m_want[i],
                                &v_want[i]);
    }
    kernel_test_assert_norm(m, m_want, count, 1e-6);
    kernel_test_assert_norm(v, v_want, count, 1e-6);
    kernel_test_assert_norm(parameter, parameter_want, count, 1e-6);
}

START_TEST(adamw_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    check_adamw(&test, 1, false);
    check_adamw(&test, 37, true);
    check_adamw(&test, 20011, false);
    float *none = kernel_test_zero_floats(&test, 1);
    kern_adamw_args nothing = {{none}, {none}, {none}, {none}, {NULL}, 0, 1, 0, 0, 1, 0, 1, 1};
    kernel_test_launch(&test, KERN_OP_ADAMW, &nothing);
    kernel_test_close(&test);
}
END_TEST

START_TEST(square_sum_is_double_and_fixed) {
    static const int64_t counts[] = {1, 15, 16384, 16385, 300001};
    for (int i = 0; i < 5; i++) {
        double first = 0;
        for (int threads = 1; threads <= 3; threads++) {
            kernel_test test;
            kernel_test_threads(threads);
            if (!kernel_test_open(&test, _i, "cpu"))
                MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
            float *x = kernel_test_floats(&test, (size_t)counts[i], -1e-3, 1e3);
            long double exact = 7; // a plain sum in double is less accurate than the blocks are
            double sum = 7;
            for (int64_t j = 0; j < counts[i]; j++)
                exact += (long double)x[j] * (long double)x[j];
            const double want = (double)exact;
            kernel_test_lend(&test, &sum, sizeof sum);
            kern_square_sum_args args = {{x}, {&sum}, counts[i]};
            kernel_test_launch(&test, KERN_OP_SQUARE_SUM, &args);
            ck_assert_double_le(fabs(sum - want), 1e-14 * want);
            if (threads == 1)
                first = sum;
            kernel_test_assert_same(&sum, &first, 1);
            kernel_test_close(&test);
        }
    }
}
END_TEST

static float scale_of(kernel_test *test, double sum, float clip) {
    float scale = -1;
    kernel_test_lend(test, &sum, sizeof sum);
    kernel_test_lend(test, &scale, sizeof scale);
    kern_clip_scale_args args = {{&sum}, {&scale}, clip};
    kernel_test_launch(test, KERN_OP_CLIP_SCALE, &args);
    return scale;
}

START_TEST(clip_scale) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    ck_assert(scale_of(&test, 0, 1) == 1);
    ck_assert(scale_of(&test, 0.25, 1) == 1);
    ck_assert_double_le(fabs((double)scale_of(&test, 16, 1) - 0.25), 1e-6);
    ck_assert(scale_of(&test, 16, 0) == 1 && scale_of(&test, 16, -1) == 1);
    ck_assert(isnan(scale_of(&test, (double)NAN, 1)));
    ck_assert(scale_of(&test, (double)INFINITY, 1) == 0);
    kernel_test_close(&test);
}
END_TEST

START_TEST(arguments_are_checked) {
    kernel_test test;
    float place[4] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_adamw_args args = {{place}, {place}, {place}, {place}, {NULL}, 4, 1, 0, 0, 1, 0, 0, 1}; // correction 0: step 0
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_INVALID);
    args.correction1 = 1, args.v.p = NULL;
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_INVALID);
    kern_square_sum_args sum = {{place}, {place}, -1};
    kernel_test_assert_refused(&test, KERN_OP_SQUARE_SUM, &sum, KERN_INVALID);
    kern_clip_scale_args clip = {{NULL}, {place}, 1};
    kernel_test_assert_refused(&test, KERN_OP_CLIP_SCALE, &clip, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *optim_suite(void) {
    Suite *suite = suite_create("optim");
    TCase *tests = tcase_create("optim");
    tcase_add_loop_test(tests, adamw_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, square_sum_is_double_and_fixed, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, clip_scale, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, arguments_are_checked);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(optim_suite)

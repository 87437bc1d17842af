// SPDX-License-Identifier: Apache-2.0
// Activations against their references, forward, backward and in place; their far ends, the references by differences.
//
// Element by element as well: the small values of a gate matter as much as the large ones.
#include "kernels/ref/activation.h"
#include "tests/kernels/kernel_test.h"

static void rows_of(kernel_test *test, int32_t tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    kernel_test_prepare(test);
}

static void check_activation(kernel_test *test, int activation, int32_t tokens, int32_t width) {
    size_t count = (size_t)tokens * (size_t)width;
    float *x = kernel_test_floats(test, count, -12, 12), *dy = kernel_test_floats(test, count, -1, 1);
    float *y = kernel_test_zero_floats(test, count);
    double *y_want = kernel_test_zero_doubles(test, count), *dx_want = kernel_test_zero_doubles(test, count);
    for (size_t i = 0; i < count; i++) {
        y_want[i] = kern_ref_activation(activation, (double)x[i]);
        dx_want[i] = (double)dy[i] * kern_ref_activation_slope(activation, (double)x[i]);
    }
    rows_of(test, tokens);
    kern_activation_args forward = {{x}, {y}, width, activation};
    kernel_test_launch(test, KERN_OP_ACTIVATION, &forward);
    kernel_test_assert_norm(y, y_want, count, 5e-7);
    for (size_t i = 0; i < count; i++)
        ck_assert_msg(fabs((double)y[i] - y_want[i]) <=
                          1e-5 * fabs(y_want[i]) + (activation == KERN_GELU_TANH ? 1e-9 : 1e-36),
                      "activation %d of %.9g: %.9g", activation, (double)x[i], (double)y[i]);
    kern_activation_backward_args backward = {{x}, {dy}, {dy}, width, activation}; // dx is dy
    kernel_test_launch(test, KERN_OP_ACTIVATION_BACKWARD, &backward);
    kernel_test_assert_norm(dy, dx_want, count, count == 1 ? 1e-5 : 1e-6); // one alone may be in the far tail
    forward.y.f = x;                                                       // y is x
    kernel_test_launch(test, KERN_OP_ACTIVATION, &forward);
    kernel_test_assert_same(x, y, count);
}

START_TEST(activations_equal_reference) {
    static const struct { int32_t tokens, width; } shape[] = {{1, 1}, {3, 37}, {90, 512}, {7, 3001}};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (size_t s = 0; s < sizeof shape / sizeof shape[0]; s++)
        for (int activation = 0; activation < KERN_ACTIVATIONS; activation++)
            check_activation(&test, activation, shape[s].tokens, shape[s].width);
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends_and_refusals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    static const float end[KERN_ACTIVATIONS][2] = {{-90, 90}, {0, 90}, {0, 1}, {0, 90}, {0, 91}, {0, 90}};
    float x[3] = {-90, 90, NAN}, y[3], one[3] = {1, 1, 1}, dx[3] = {0};
    kernel_test_lend(&test, x, sizeof x);
    kernel_test_lend(&test, y, sizeof y);
    kernel_test_lend(&test, one, sizeof one);
    kernel_test_lend(&test, dx, sizeof dx);
    rows_of(&test, 1);
    for (int activation = 0; activation < KERN_ACTIVATIONS; activation++) {
        kern_activation_args args = {{x}, {y}, 3, activation};
        kern_activation_backward_args backward = {{x}, {one}, {dx}, 3, activation};
        kernel_test_launch(&test, KERN_OP_ACTIVATION, &args);
        kernel_test_launch(&test, KERN_OP_ACTIVATION_BACKWARD, &backward);
        ck_assert_msg(fabsf(y[0] - end[activation][0]) < 1e-35f && y[1] == end[activation][1] && isnan(y[2]),
                      "activation %d: %g %g %g", activation, (double)y[0], (double)y[1], (double)y[2]);
        ck_assert(isfinite(dx[0]) && isfinite(dx[1]));
    }
    kern_activation_args args = {{x}, {y}, 3, KERN_ACTIVATIONS};
    kernel_test_assert_refused(&test, KERN_OP_ACTIVATION, &args, KERN_INVALID);
    args.activation = KERN_SILU, args.width = 0;
    kernel_test_assert_refused(&test, KERN_OP_ACTIVATION, &args, KERN_INVALID);
    kern_activation_backward_args backward = {{x}, {NULL}, {y}, 3, KERN_RELU};
    if (!test.cuda)
        kernel_test_assert_refused(&test, KERN_OP_ACTIVATION_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static int looped;

static double loss(void *context) {
    return kern_ref_activation(looped, *(const double *)context);
}

static double capped(void *context) {
    return kern_ref_soft_cap(*(const double *)context, 3);
}

START_TEST(reference_gradients) {
    for (double at = -4.1; at <= 4; at += 0.5) {
        double z = at, slope;
        for (looped = 0; looped < KERN_ACTIVATIONS; looped++) {
            slope = kern_ref_activation_slope(looped, z);
            kernel_test_gradient("activation", loss, &z, &z, &slope, 1, 1e-7);
        }
        slope = kern_ref_soft_cap_slope(z, 3);
        kernel_test_gradient("soft cap", capped, &z, &z, &slope, 1, 1e-8);
    }
}
END_TEST

static Suite *activation_suite(void) {
    Suite *suite = suite_create("activation");
    TCase *tests = tcase_create("activation");
    tcase_add_loop_test(tests, activations_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends_and_refusals, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, reference_gradients);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(activation_suite)

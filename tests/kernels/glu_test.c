// SPDX-License-Identifier: Apache-2.0
// Gated products against their reference, forward, backward and in place; the residual sum, which is exact.
//
// Far ends of the logistic function and the reference by finite differences.
#include "kernels/ref/elementwise.h"
#include "tests/kernels/kernel_test.h"

static const struct { int32_t tokens, width; } shape[] = {{1, 1}, {1, 2048}, {3, 37}, {90, 512}, {7, 3001}};
enum { SHAPES = sizeof shape / sizeof shape[0] };

static void rows_of(kernel_test *test, int32_t tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    kernel_test_prepare(test);
}

static void check_glu(kernel_test *test, int activation, int32_t tokens, int32_t width) {
    size_t count = (size_t)tokens * (size_t)width;
    float *gate = kernel_test_floats(test, count, -12, 12), *up = kernel_test_floats(test, count, -2, 2);
    float *dy = kernel_test_floats(test, count, -1, 1), *dup = kernel_test_zero_floats(test, count);
    double *y = kernel_test_zero_doubles(test, count);
    double *dgate_want = kernel_test_zero_doubles(test, count), *dup_want = kernel_test_zero_doubles(test, count);
    for (size_t i = 0; i < count; i++) {
        y[i] = kern_ref_glu(activation, (double)gate[i], (double)up[i]);
        kern_ref_glu_backward(activation, (double)gate[i], (double)up[i], (double)dy[i], &dgate_want[i], &dup_want[i]);
    }
    rows_of(test, tokens);
    kern_glu_backward_args backward = {{gate}, {up}, {dy}, {dy}, {dup}, width, activation}; // dgate is dy
    kernel_test_launch(test, KERN_OP_GLU_BACKWARD, &backward);
    kernel_test_assert_norm(dy, dgate_want, count, 1e-6);
    kernel_test_assert_norm(dup, dup_want, count, 5e-7);
    kern_glu_args forward = {{gate}, {up}, {gate}, width, activation}; // y is gate
    kernel_test_launch(test, KERN_OP_GLU, &forward);
    kernel_test_assert_norm(gate, y, count, 5e-7);
}

START_TEST(glu_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int s = 0; s < SHAPES; s++)
        for (int activation = 0; activation < KERN_ACTIVATIONS; activation++)
            check_glu(&test, activation, shape[s].tokens, shape[s].width);
    kernel_test_close(&test);
}
END_TEST

START_TEST(add_is_exact) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int s = 0; s < SHAPES; s++) {
        size_t count = (size_t)shape[s].tokens * (size_t)shape[s].width;
        float *x = kernel_test_floats(&test, count, -1, 1), *y = kernel_test_floats(&test, count, -1, 1);
        float *want = kernel_test_copy(&test, y, count);
        for (size_t i = 0; i < count; i++)
            want[i] += x[i];
        rows_of(&test, shape[s].tokens);
        kern_add_args args = {{x}, {y}, shape[s].width};
        kernel_test_launch(&test, KERN_OP_ADD, &args);
        kernel_test_assert_same(y, want, count);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_are_free_of_batch) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    enum { TOKENS = 301, WIDTH = 53, COUNT = TOKENS * WIDTH };
    float *gate = kernel_test_floats(&test, COUNT, -9, 9), *up = kernel_test_floats(&test, COUNT, -2, 2);
    float *dy = kernel_test_floats(&test, COUNT, -1, 1);
    float *got[3], *alone[3];
    for (int i = 0; i < 3; i++) {
        got[i] = kernel_test_zero_floats(&test, COUNT);
        alone[i] = kernel_test_zero_floats(&test, COUNT);
    }
    rows_of(&test, TOKENS);
    kern_glu_args forward = {{gate}, {up}, {got[0]}, WIDTH, KERN_SILU};
    kern_glu_backward_args backward = {{gate}, {up}, {dy}, {got[1]}, {got[2]}, WIDTH, KERN_SILU};
    kernel_test_launch(&test, KERN_OP_GLU, &forward);
    kernel_test_launch(&test, KERN_OP_GLU_BACKWARD, &backward);
    rows_of(&test, 1);
    for (int i = 0; i < COUNT; i += WIDTH) {
        kern_glu_args one = {{gate + i}, {up + i}, {alone[0] + i}, WIDTH, KERN_SILU};
        kern_glu_backward_args back = {{gate + i},     {up + i}, {dy + i}, {alone[1] + i},
                                       {alone[2] + i}, WIDTH,    KERN_SILU};
        kernel_test_launch(&test, KERN_OP_GLU, &one);
        kernel_test_launch(&test, KERN_OP_GLU_BACKWARD, &back);
    }
    for (int i = 0; i < 3; i++)
        kernel_test_assert_same(got[i], alone[i], COUNT);
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends_and_refusals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float gate[5] = {-1e30f, -100, 100, 1e30f, NAN}, up[5] = {1, 1, 1, 1, 1}, y[5];
    kernel_test_lend(&test, gate, sizeof gate);
    kernel_test_lend(&test, up, sizeof up);
    kernel_test_lend(&test, y, sizeof y);
    rows_of(&test, 1);
    kern_glu_args args = {{gate}, {up}, {y}, 5, KERN_SILU};
    kernel_test_launch(&test, KERN_OP_GLU, &args);
    // The logistic function ends at e^-88.7, so a far negative gate leaves a trace no larger than this.
    ck_assert(fabsf(y[0]) < 1e-7f && fabsf(y[1]) < 1e-35f && y[2] == 100 && y[3] == 1e30f && isnan(y[4]));
    args.width = 0;
    kernel_test_assert_refused(&test, KERN_OP_GLU, &args, KERN_INVALID);
    kern_add_args add = {{up}, {NULL}, 5};
    kernel_test_assert_refused(&test, KERN_OP_ADD, &add, KERN_INVALID);
    kern_glu_backward_args backward = {{gate}, {up}, {up}, {NULL}, {y}, 5, KERN_SILU};
    kernel_test_assert_refused(&test, KERN_OP_GLU_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static double loss(void *context) {
    const double *point = context;
    return 1.7 * kern_ref_glu(KERN_SILU, point[0], point[1]);
}

START_TEST(reference_gradients) {
    for (double gate = -4; gate <= 4; gate += 0.5) {
        double point[2] = {gate, 1 - gate / 3}, gradient[2];
        kern_ref_glu_backward(KERN_SILU, point[0], point[1], 1.7, &gradient[0], &gradient[1]);
        kernel_test_gradient("glu", loss, point, point, gradient, 2, 1e-8);
    }
}
END_TEST

static Suite *glu_suite(void) {
    Suite *suite = suite_create("glu");
    TCase *tests = tcase_create("glu");
    tcase_add_loop_test(tests, glu_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, add_is_exact, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_batch, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends_and_refusals, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, reference_gradients);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(glu_suite)

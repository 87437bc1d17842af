// SPDX-License-Identifier: Apache-2.0
// Feature maps against their references, forward and backward; the references against finite differences.
//
// Odd widths, widths below a vector and below the number of rolls; far ends of the softmax; bits free of the batch.
#include "kernels/ref/feature_map.h"
#include "tests/kernels/kernel_test.h"

static void rows_of(kernel_test *test, int32_t tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    kernel_test_prepare(test);
}

static void check_map(kernel_test *test, int feature, int32_t tokens, int32_t groups, int32_t width) {
    const size_t vectors = (size_t)tokens * (size_t)groups, w = (size_t)width;
    const size_t wide = (size_t)kern_feature_width(feature, width);
    // A sum that may be small would make the comparison one of conditioning.
    float *x = kernel_test_floats(test, vectors * w, feature == KERN_FEATURE_SUM ? 0.1 : -2, 2);
    float *y = kernel_test_zero_floats(test, vectors * wide), *dy = kernel_test_floats(test, vectors * wide, -1, 1);
    float *dx = kernel_test_zero_floats(test, vectors * w);
    double *wide_x = kernel_test_widened(test, x, vectors * w),
           *wide_dy = kernel_test_widened(test, dy, vectors * wide);
    double *y_want = kernel_test_zero_doubles(test, vectors * wide);
    double *dx_want = kernel_test_zero_doubles(test, vectors * w), eps = (double)1e-4f;
    for (size_t i = 0; i < vectors; i++) {
        kern_ref_feature_map(feature, wide_x + i * w, eps, y_want + i * wide, width);
        kern_ref_feature_map_backward(feature, wide_x + i * w, eps, wide_dy + i * wide, dx_want + i * w, width);
    }
    rows_of(test, tokens);
    kern_feature_map_args forward = {{x}, {y}, groups, width, feature, 1e-4f};
    kern_feature_map_backward_args backward = {{x}, {dy}, {dx}, groups, width, feature, 1e-4f};
    kernel_test_launch(test, KERN_OP_FEATURE_MAP, &forward);
    kernel_test_assert_norm(y, y_want, vectors * wide, 1e-6);
    kernel_test_launch(test, KERN_OP_FEATURE_MAP_BACKWARD, &backward);
    // Of one element that is divided by itself the gradient is all but zero.
    kernel_test_assert_norm(dx, dx_want, feature == KERN_FEATURE_SUM && width == 1 ? 0 : vectors * w, 2e-6);
    if (feature != KERN_FEATURE_SUM)
        return;
    forward.y.f = x, backward.x.f = kernel_test_copy(test, x, vectors * w), backward.dx.f = dy; // in place
    kernel_test_launch(test, KERN_OP_FEATURE_MAP, &forward);
    kernel_test_assert_same(x, y, vectors * w);
    kernel_test_launch(test, KERN_OP_FEATURE_MAP_BACKWARD, &backward);
    kernel_test_assert_same(dy, dx, vectors * w);
}

START_TEST(maps_equal_reference) {
    static const struct {
        int32_t tokens, groups, width;
    } shape[] = {{1, 1, 1}, {1, 1, 2}, {5, 3, 7}, {40, 4, 64}, {3, 2, 37}, {9, 1, 130}};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (size_t s = 0; s < sizeof shape / sizeof shape[0]; s++)
        for (int feature = 0; feature < KERN_FEATURES; feature++)
            check_map(&test, feature, shape[s].tokens, shape[s].groups, shape[s].width);
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_are_free_of_batch_and_threads) {
    enum { TOKENS = 300, GROUPS = 4, WIDTH = 37, VECTOR = GROUPS * WIDTH };
    for (int feature = 0; feature < KERN_FEATURES; feature++) {
        kernel_test test;
        kernel_test_threads(3);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        int32_t wide = GROUPS * kern_feature_width(feature, WIDTH);
        float *x = kernel_test_floats(&test, TOKENS * VECTOR, 0, 1);
        float *y = kernel_test_zero_floats(&test, (size_t)(TOKENS * wide)), *alone;
        alone = kernel_test_zero_floats(&test, (size_t)wide);
        rows_of(&test, TOKENS);
        kern_feature_map_args args = {{x}, {y}, GROUPS, WIDTH, feature, 0};
        kernel_test_launch(&test, KERN_OP_FEATURE_MAP, &args);
        rows_of(&test, 1);
        for (int t = 0; t < TOKENS; t++) {
            args.x.f = x + t * VECTOR, args.y.f = alone;
            kernel_test_launch(&test, KERN_OP_FEATURE_MAP, &args);
            kernel_test_assert_same(alone, y + t * wide, wide);
        }
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(far_ends_and_refusals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float x[3] = {300, -300, 0}, y[24], z[3] = {NAN, 1, 2};
    kernel_test_lend(&test, x, sizeof x);
    kernel_test_lend(&test, y, sizeof y);
    kernel_test_lend(&test, z, sizeof z);
    rows_of(&test, 1);
    kern_feature_map_args args = {{x}, {y}, 1, 3, KERN_FEATURE_HEDGEHOG, 0};
    kernel_test_launch(&test, KERN_OP_FEATURE_MAP, &args);
    ck_assert(y[0] == 0.5f && y[1] == 0 && y[2] == 0 && y[3] == 0 && y[4] == 0.5f && y[5] == 0);
    for (int feature = 0; feature < KERN_FEATURES; feature++) {
        args = (kern_feature_map_args){{z}, {y}, 1, 3, feature, 0};
        kernel_test_launch(&test, KERN_OP_FEATURE_MAP, &args);
        ck_assert_msg(isnan(y[0]), "feature %d hides NaN", feature);
    }
    args.width = 0;
    kernel_test_assert_refused(&test, KERN_OP_FEATURE_MAP, &args, KERN_INVALID);
    args.width = 3, args.feature = KERN_FEATURES;
    kernel_test_assert_refused(&test, KERN_OP_FEATURE_MAP, &args, KERN_INVALID);
    args.feature = KERN_FEATURE_DPFP, args.y.f = z; // y is x
    kernel_test_assert_refused(&test, KERN_OP_FEATURE_MAP, &args, KERN_INVALID);
    kern_feature_map_backward_args backward = {{NULL}, {y}, {x}, 1, 3, KERN_FEATURE_SUM, 0};
    kernel_test_assert_refused(&test, KERN_OP_FEATURE_MAP_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

enum { WIDTH = 5, WIDEST = 8 * WIDTH };
static struct {
    double z[WIDTH], dy[WIDEST];
    int feature;
} point;

static double loss(void *context) {
    (void)context;
    double y[WIDEST] = {0};
    kern_ref_feature_map(point.feature, point.z, 0.1, y, WIDTH);
    return kernel_test_dot(y, point.dy, WIDEST);
}

START_TEST(reference_gradients) {
    double dz[WIDTH];
    for (int i = 0; i < WIDTH; i++)
        point.z[i] = sin(2.0 * i + 1) + 0.3;
    for (int i = 0; i < WIDEST; i++)
        point.dy[i] = cos(3.0 * i);
    point.feature = _i;
    kern_ref_feature_map_backward(_i, point.z, 0.1, point.dy, dz, WIDTH);
    kernel_test_gradient("feature map", loss, NULL, point.z, dz, WIDTH, 1e-8);
}
END_TEST

static Suite *feature_map_suite(void) {
    Suite *suite = suite_create("feature_map");
    TCase *tests = tcase_create("feature_map");
    tcase_add_loop_test(tests, maps_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_batch_and_threads, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends_and_refusals, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, reference_gradients, 0, KERN_FEATURES);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(feature_map_suite)

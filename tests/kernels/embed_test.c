// SPDX-License-Identifier: Apache-2.0
// Embedding from float32, bfloat16 and a master, ids that only the device knows, its gradient with repeated ids, ids
// outside the vocabulary.
//
// Weights are made here too, so what a weight refuses to be made of is a case of this file.
#include "kernels/ref/elementwise.h"
#include "tests/kernels/kernel_test.h"

enum { VOCABULARY = 19, TOKENS = 90 };

static void rows_with_ids(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 4, 2);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, TOKENS - 4, 0);
    for (int t = 0; t < TOKENS; t++)
        test->rows->id[t] = (int32_t)(kernel_test_uniform(test) * VOCABULARY);
    kernel_test_prepare(test);
}

static kern_weight *make_weight(kernel_test *test, kern_weight_desc desc) {
    kern_weight *weight = NULL;
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &weight), KERN_OK);
    return weight;
}

static void check_embed(kernel_test *test, kern_weight *weight, const double *wide, int32_t width, double tolerance) {
    const float scale = 1.37f;
    float *y = kernel_test_zero_floats(test, TOKENS * (size_t)width);
    double *want = kernel_test_zero_doubles(test, TOKENS * (size_t)width);
    for (int t = 0; t < TOKENS; t++)
        kern_ref_embed(wide, test->rows->id[t], (double)scale, want + t * width, (size_t)width);
    kern_embed_args args = {.weight = {weight}, .y = {y}, .width = width, .scale = scale};
    kernel_test_launch(test, KERN_OP_EMBED, &args);
    kernel_test_assert_norm(y, want, TOKENS * (size_t)width, tolerance);
}

// Generated tokens whose ids were drawn before, in another order.
static void check_drawn(kernel_test *test, kern_weight *weight, int32_t width) {
    int32_t *id = test->rows->id, *drawn = kernel_test_bytes(test, 4 * sizeof *drawn);
    float *want = kernel_test_zero_floats(test, TOKENS * (size_t)width);
    float *y = kernel_test_zero_floats(test, TOKENS * (size_t)width);
    kern_embed_args args = {.weight = {weight}, .y = {want}, .width = width, .scale = 1};
    kernel_test_launch(test, KERN_OP_EMBED, &args);
    for (int32_t t = 0; t < 4; t++) {
        drawn[3 - t] = id[t];
        id[t] = -1 - (3 - t);
    }
    kernel_test_prepare(test);
    args.drawn.i = drawn;
    args.y.f = y;
    kernel_test_launch(test, KERN_OP_EMBED, &args);
    ck_assert_mem_eq(y, want, sizeof *y * TOKENS * (size_t)width);
    for (int32_t t = 0; t < 4; t++)
        id[t] = drawn[3 - t];
    kernel_test_prepare(test);
}

static void check_width(kernel_test *test, int32_t width) {
    size_t count = VOCABULARY * (size_t)width;
    rows_with_ids(test);
    float *values = kernel_test_floats(test, count, -1, 1);
    uint16_t *narrow = kernel_test_bytes(test, count * sizeof *narrow);
    float *rounded = kernel_test_zero_floats(test, count);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        narrow[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        memcpy(&rounded[i], &bits, 4);
    }
    double *wide = kernel_test_widened(test, values, count), *wide_rounded = kernel_test_widened(test, rounded, count);
    kern_weight *copied =
        make_weight(test, (kern_weight_desc){.dtype = KERN_F32, .rows = VOCABULARY, .cols = width, .host = values});
    kern_weight *bf16 =
        make_weight(test, (kern_weight_desc){.dtype = KERN_BF16, .rows = VOCABULARY, .cols = width, .host = narrow});
    float *master_values = kernel_test_zero_floats(test, count);
    kern_weight *master = make_weight(test, (kern_weight_desc){.dtype = KERN_F32,
                                                               .rows = VOCABULARY,
                                                               .cols = width,
                                                               .master = kernel_test_master(test, master_values)});
    memcpy(master_values, values, count * sizeof(float)); // after the creation: a master is read in place
    check_embed(test, copied, wide, width, 1e-7);
    check_embed(test, master, wide, width, 1e-7);
    check_embed(test, bf16, wide_rounded, width, 1e-7);
    check_drawn(test, copied, width);
    check_drawn(test, bf16, width);
    ck_assert_uint_eq(kern_weight_bytes(copied), count * 4);
    if (!test->cuda) // which pads to tiles
        ck_assert_uint_eq(kern_weight_bytes(bf16), count * 2);
    kern_weight_free(copied);
    kern_weight_free(bf16);
    kern_weight_free(master);
}

static void check_gradient(kernel_test *test, int32_t width) {
    size_t count = VOCABULARY * (size_t)width;
    rows_with_ids(test);
    float *dy = kernel_test_floats(test, TOKENS * (size_t)width, -1, 1), *grad = kernel_test_floats(test, count, -1, 1);
    double *wide_dy = kernel_test_widened(test, dy, TOKENS * (size_t)width);
    double *want = kernel_test_widened(test, grad, count);
    for (int t = 0; t < TOKENS; t++)
        kern_ref_embed_backward(wide_dy + t * width, test->rows->id[t], 0.5, want, (size_t)width);
    kern_embed_backward_args args = {{dy}, {grad}, width, 0.5f};
    kernel_test_launch(test, KERN_OP_EMBED_BACKWARD, &args);
    kernel_test_assert_norm(grad, want, count, 5e-7);
}

START_TEST(embed_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    static const int32_t widths[] = {1, 33, 64, 768};
    for (int i = 0; i < 4; i++) {
        check_width(&test, widths[i]);
        check_gradient(&test, widths[i]);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(gradient_is_free_of_threads) {
    enum { WIDTH = 515, COUNT = VOCABULARY * WIDTH };
    float *first = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        kernel_test test;
        kernel_test_threads(threads);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        rows_with_ids(&test);
        float *dy = kernel_test_floats(&test, TOKENS * WIDTH, -1, 1), *grad = kernel_test_zero_floats(&test, COUNT);
        kern_embed_backward_args args = {{dy}, {grad}, WIDTH, 1.5f};
        kernel_test_launch(&test, KERN_OP_EMBED_BACKWARD, &args);
        if (!first)
            first = memcpy(malloc(COUNT * sizeof *first), grad, COUNT * sizeof *first);
        kernel_test_assert_same(grad, first, COUNT);
        kernel_test_close(&test);
    }
    free(first);
}
END_TEST

START_TEST(bad_ids_and_weights_are_refused) {
    kernel_test test;
    float values[VOCABULARY * 4] = {0}, y[TOKENS * 4] = {0};
    y[0] = 5;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    rows_with_ids(&test);
    kern_weight *weight =
        make_weight(&test, (kern_weight_desc){.dtype = KERN_F32, .rows = VOCABULARY, .cols = 4, .host = values});
    kern_embed_args args = {.weight = {weight}, .y = {y}, .width = 4, .scale = 1};
    test.rows->id[TOKENS - 1] = VOCABULARY;
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_EMBED, test.rows, &args), KERN_INVALID);
    ck_assert(y[0] == 5);
    test.rows->id[TOKENS - 1] = -1; // nothing was drawn
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_EMBED, test.rows, &args), KERN_INVALID);
    test.rows->id[TOKENS - 1] = -1 - test.rows->max_logits;
    ck_assert_int_eq(kern_rows_prepare(test.stream, test.rows), KERN_INVALID);
    test.rows->id[TOKENS - 1] = 0;
    args.width = 5;
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_EMBED, test.rows, &args), KERN_INVALID);
    args.width = 0;
    kernel_test_assert_refused(&test, KERN_OP_EMBED, &args, KERN_INVALID);
    kern_embed_backward_args backward = {{y}, {NULL}, 4, 1};
    kernel_test_assert_refused(&test, KERN_OP_EMBED_BACKWARD, &backward, KERN_INVALID);
    kern_weight_free(weight);

    kern_weight *none = NULL;
    kern_weight_desc desc = {.dtype = KERN_BF16, .rows = VOCABULARY, .cols = 4, .master = values}; // it is float32
    ck_assert_int_eq(kern_weight_create(test.device, &desc, &none), KERN_INVALID);
    desc = (kern_weight_desc){.dtype = KERN_F32, .rows = VOCABULARY, .cols = 4, .host = values, .master = values};
    ck_assert_int_eq(kern_weight_create(test.device, &desc, &none), KERN_INVALID);
    desc = (kern_weight_desc){.dtype = KERN_F32, .cols = 4, .host = values};
    ck_assert_int_eq(kern_weight_create(test.device, &desc, &none), KERN_INVALID);
    ck_assert_ptr_null(none);
    kern_weight_free(NULL);
    kernel_test_close(&test);
}
END_TEST

static Suite *embed_suite(void) {
    Suite *suite = suite_create("embed");
    TCase *tests = tcase_create("embed");
    tcase_add_loop_test(tests, embed_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, gradient_is_free_of_threads, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, bad_ids_and_weights_are_refused);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(embed_suite)

// SPDX-License-Identifier: Apache-2.0
// The block-diagonal product against its reference, forward with both types of weight, backward, bits, refusals.
//
// Weights hold values that bf16 has exactly, so that both types have one reference.
#include "kernels/ref/linear.h"
#include "tests/kernels/kernel_test.h"

enum { TOKENS = 100 };

typedef struct blocks {
    int32_t blocks, width;
    size_t count, weights, outputs; // floats of x, of the weight, of the bias
    float *x, *w, *bias, *y, *dy;
    kern_weight *weight;
} blocks;

static void some_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, -1, 3, 10);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, TOKENS - 3, 5);
    kernel_test_prepare(test);
}

static blocks make_blocks(kernel_test *test, int32_t count, int32_t width, kern_dtype dtype) {
    blocks b = {.blocks = count, .width = width, .outputs = (size_t)count * (size_t)width};
    b.count = TOKENS * b.outputs;
    b.weights = b.outputs * (size_t)width;
    b.x = kernel_test_floats(test, b.count, -1, 1);
    b.w = kernel_test_floats(test, b.weights, -1, 1);
    b.bias = kernel_test_floats(test, b.outputs, -1, 1);
    b.y = kernel_test_zero_floats(test, b.count);
    b.dy = kernel_test_floats(test, b.count, -1, 1);
    uint16_t *halves = kernel_test_bytes(test, b.weights * sizeof *halves);
    for (size_t i = 0; i < b.weights; i++) {
        uint32_t bits;
        memcpy(&bits, &b.w[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        memcpy(&b.w[i], &bits, sizeof bits);
    }
    const kern_weight_desc desc = {.dtype = dtype,
                                   .rows = (int64_t)b.outputs,
                                   .cols = width,
                                   .host = dtype == KERN_BF16 ? (const void *)halves : b.w};
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &b.weight), KERN_OK);
    return b;
}

static const struct { int32_t blocks, width; } shape[] = {{1, 1}, {3, 5}, {2, 64}, {10, 37}, {2, 130}};
enum { SHAPES = sizeof shape / sizeof shape[0] };

START_TEST(forward_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int s = 0; s < SHAPES; s++) {
        for (int variant = 0; variant < 4; variant++) {
            blocks b = make_blocks(&test, shape[s].blocks, shape[s].width, variant & 2 ? KERN_BF16 : KERN_F32);
            float *bias = variant & 1 ? b.bias : NULL;
            double *want = kernel_test_zero_doubles(&test, b.count);
            kern_ref_block_linear(TOKENS, b.blocks, b.width, kernel_test_widened(&test, b.x, b.count),
                                  kernel_test_widened(&test, b.w, b.weights),
                                  bias ? kernel_test_widened(&test, bias, b.outputs) : NULL, want);
            some_rows(&test);
            kern_block_linear_args args = {
                .x.f = b.x, .weight.w = b.weight, .bias.f = bias, .y.f = b.y, .blocks = b.blocks, .width = b.width};
            kernel_test_launch(&test, KERN_OP_BLOCK_LINEAR, &args);
            kernel_test_assert_norm(b.y, want, b.count, 1e-6);
            kern_weight_free(b.weight);
        }
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(token_alone_equals_token_in_batch) {
    enum { BLOCKS = 3, WIDTH = 37, ALL = BLOCKS * WIDTH };
    kernel_test test;
    kernel_test_threads(3);
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int bf16 = 0; bf16 < 2; bf16++) {
        blocks b = make_blocks(&test, BLOCKS, WIDTH, bf16 ? KERN_BF16 : KERN_F32);
        float *alone = kernel_test_zero_floats(&test, ALL);
        some_rows(&test);
        kern_block_linear_args args = {
            .x.f = b.x, .weight.w = b.weight, .bias.f = b.bias, .y.f = b.y, .blocks = BLOCKS, .width = WIDTH};
        kernel_test_launch(&test, KERN_OP_BLOCK_LINEAR, &args);
        for (int t = 0; t < TOKENS; t++) {
            kernel_test_clear_rows(&test);
            kernel_test_row(&test, t % 2 ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, -1, 1, t);
            kernel_test_prepare(&test);
            args.x.f = b.x + t * ALL, args.y.f = alone;
            kernel_test_launch(&test, KERN_OP_BLOCK_LINEAR, &args);
            kernel_test_assert_same(alone, b.y + t * ALL, ALL);
        }
        kern_weight_free(b.weight);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(backward_equals_reference) {
    for (int s = 0; s < SHAPES; s++) {
        float *first = NULL;
        for (int threads = 1; threads <= 2; threads++) {
            kernel_test test;
            kernel_test_threads(threads);
            if (!kernel_test_open(&test, _i, "cpu"))
                MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
            blocks b = make_blocks(&test, shape[s].blocks, shape[s].width, KERN_F32);
            float *dx = kernel_test_floats(&test, b.count, -1, 1), *dw = kernel_test_floats(&test, b.weights, -1, 1);
            float *db = kernel_test_floats(&test, b.outputs, -1, 1);
            double *dx_want = kernel_test_zero_doubles(&test, b.count), *sum = kernel_test_widened(&test, dx, b.count);
            double *dw_want = kernel_test_widened(&test, dw, b.weights);
            double *db_want = kernel_test_widened(&test, db, b.outputs);
            kern_ref_block_linear_backward(TOKENS, b.blocks, b.width, kernel_test_widened(&test, b.x, b.count),
                                           kernel_test_widened(&test, b.w, b.weights),
                                           kernel_test_widened(&test, b.dy, b.count), dx_want, dw_want, db_want);
            for (size_t i = 0; i < b.count; i++)
                sum[i] += dx_want[i];
            some_rows(&test);
            kern_block_linear_backward_args args = {{b.x}, {.w = b.weight}, {b.dy},  {dx}, {dw},
                                                    {db},  b.blocks,        b.width, 1};
            kernel_test_launch(&test, KERN_OP_BLOCK_LINEAR_BACKWARD, &args);
            kernel_test_assert_norm(dx, sum, b.count, 1e-6);
            kernel_test_assert_norm(dw, dw_want, b.weights, 1e-6);
            kernel_test_assert_norm(db, db_want, b.outputs, 1e-6);
            if (threads == 1)
                first = memcpy(malloc(b.weights * sizeof *first), dw, b.weights * sizeof *first);
            kernel_test_assert_same(dw, first, b.weights);
            args.accumulate = 0;
            kernel_test_launch(&test, KERN_OP_BLOCK_LINEAR_BACKWARD, &args);
            kernel_test_assert_norm(dx, dx_want, b.count, 1e-6);
            kern_weight_free(b.weight);
            kernel_test_close(&test);
        }
        free(first);
    }
}
END_TEST

START_TEST(refuses_what_it_cannot_do) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    blocks b = make_blocks(&test, 2, 8, KERN_BF16);
    some_rows(&test);
    kern_block_linear_args args = {.x.f = b.x, .weight.w = b.weight, .y.f = b.y, .blocks = 2, .width = 8};
    kernel_test_launch(&test, KERN_OP_BLOCK_LINEAR, &args);
    args.width = 4; // not the weight's
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_BLOCK_LINEAR, test.rows, &args), KERN_INVALID);
    args.width = 8, args.y.f = b.x;
    kernel_test_assert_refused(&test, KERN_OP_BLOCK_LINEAR, &args, KERN_INVALID);
    args.y.f = b.y, args.blocks = 0;
    kernel_test_assert_refused(&test, KERN_OP_BLOCK_LINEAR, &args, KERN_INVALID);
    kern_block_linear_backward_args backward = {{b.x}, {.w = b.weight}, {b.dy}, {b.y}, {b.w}, {NULL}, 2, 8, 0};
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_BLOCK_LINEAR_BACKWARD, test.rows, &backward), KERN_UNSUPPORTED);
    backward.dx = backward.dy;
    kernel_test_assert_refused(&test, KERN_OP_BLOCK_LINEAR_BACKWARD, &backward, KERN_INVALID);
    kern_weight_free(b.weight);
    kernel_test_close(&test);
}
END_TEST

enum { REF_TOKENS = 3, REF_BLOCKS = 2, REF_WIDTH = 4, REF_ALL = REF_BLOCKS * REF_WIDTH, REF_COUNT = 3 * REF_ALL };
static struct { double x[REF_COUNT], w[REF_ALL * REF_WIDTH], b[REF_ALL], dy[REF_COUNT]; } point;

static double loss(void *context) {
    (void)context;
    double y[REF_COUNT];
    kern_ref_block_linear(REF_TOKENS, REF_BLOCKS, REF_WIDTH, point.x, point.w, point.b, y);
    return kernel_test_dot(y, point.dy, REF_COUNT);
}

START_TEST(reference_backward_equals_differences) {
    kernel_test test = {.seed = 5};
    double *values = (double *)&point, dx[REF_COUNT], dw[REF_ALL * REF_WIDTH] = {0}, db[REF_ALL] = {0};
    for (size_t i = 0; i < sizeof point / sizeof *values; i++)
        values[i] = kernel_test_uniform(&test) - 0.5;
    kern_ref_block_linear_backward(REF_TOKENS, REF_BLOCKS, REF_WIDTH, point.x, point.w, point.dy, dx, dw, db);
    kernel_test_gradient("dx", loss, NULL, point.x, dx, REF_COUNT, 1e-8);
    kernel_test_gradient("dw", loss, NULL, point.w, dw, REF_ALL * REF_WIDTH, 1e-8);
    kernel_test_gradient("db", loss, NULL, point.b, db, REF_ALL, 1e-8);
}
END_TEST

static Suite *block_linear_suite(void) {
    Suite *suite = suite_create("block_linear");
    TCase *tests = tcase_create("block_linear");
    tcase_add_loop_test(tests, forward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, token_alone_equals_token_in_batch, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, backward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, refuses_what_it_cannot_do);
    tcase_add_test(tests, reference_backward_equals_differences);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(block_linear_suite)

// SPDX-License-Identifier: Apache-2.0
// Quantised weights: products, logits, losses and embeddings against the double reference, bits that do not depend on
// the batch, the slice or the processor's instruction, what is not finite, refusals.
//
// The reference gets the weights as their codes say and the inputs as they are rounded, in double, so what is left is
// the rounding of float32 sums; the rounding of the inputs itself is held to its own bound.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/packed.h"
#include "kernels/ref/head.h"
#include "kernels/ref/linear.h"
#include "tests/kernels/kernel_test.h"

typedef enum form { Q8, Q4, Q4_MINIMUM, FORMS } form;

typedef struct matrix {
    int rows, cols, blocks;
    double *value; // (rows, cols)
    kern_weight *weight;
} matrix;

// Float16 of a random scale in 2^-8 .. 2^-4, either sign.
static uint16_t random_half(kernel_test *test) {
    const unsigned bits = (unsigned)(kernel_test_uniform(test) * 65536);
    return (uint16_t)((bits & 0x8000) | (7 + bits % 4) << 10 | (bits >> 4 & 0x3ff));
}

static kern_dtype dtype_of(form f) {
    return f == Q8 ? KERN_Q8 : KERN_Q4;
}

// native: by the processor's instruction for dots where it has one.
static matrix make_matrix(kernel_test *test, int rows, int cols, form f, bool native) {
    matrix m = {.rows = rows, .cols = cols, .blocks = (cols + KERN_QUANT_BLOCK - 1) / KERN_QUANT_BLOCK};
    const size_t stride = f == Q8 ? (size_t)cols : (size_t)(cols + 1) / 2, scales = (size_t)rows * m.blocks;
    uint8_t *codes = kernel_test_bytes(test, (size_t)rows * stride);
    uint16_t *scale = kernel_test_bytes(test, scales * sizeof *scale), *minimum = NULL;
    if (f == Q4_MINIMUM)
        minimum = kernel_test_bytes(test, scales * sizeof *minimum);
    for (size_t i = 0; i < scales; i++) {
        scale[i] = random_half(test);
        if (minimum)
            minimum[i] = random_half(test);
    }
    m.value = kernel_test_zero_doubles(test, (size_t)rows * cols);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < cols; c++) {
            const size_t block = (size_t)r * m.blocks + c / KERN_QUANT_BLOCK;
            int code = (int)(kernel_test_uniform(test) * (f == Q8 ? 256 : 16)) - (f == Q8 ? 128 : 0);
            if (f == Q8)
                codes[r * stride + c] = (uint8_t)code;
            else
                codes[r * stride + c / 2] |= (uint8_t)(code << (c % 2 ? 4 : 0));
            if (f == Q4)
                code -= 8;
            m.value[(size_t)r * cols + c] =
                (double)kern_f16(scale[block]) * code + (minimum ? (double)kern_f16(minimum[block]) : 0);
        }
    }
    const kern_weight_desc desc = {
        .dtype = dtype_of(f), .rows = rows, .cols = cols, .host = codes, .scale = scale, .minimum = minimum};
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &m.weight), KERN_OK);
    if (!native)
        m.weight->dots = 0;
    return m;
}

// The inputs as the product takes them.
static double *rounded_inputs(kernel_test *test, const float *x, int vectors, int cols) {
    double *y = kernel_test_zero_doubles(test, (size_t)vectors * cols);
    for (int v = 0; v < vectors; v++) {
        for (int first = 0; first < cols; first += KERN_QUANT_BLOCK) {
            const int end = first + KERN_QUANT_BLOCK < cols ? first + KERN_QUANT_BLOCK : cols;
            double top = 0;
            for (int c = first; c < end; c++)
                top = fmax(top, fabs((double)x[v * cols + c]));
            for (int c = first; c < end && top > 0; c++)
                y[v * cols + c] = rint((double)x[v * cols + c] * 127 / top) * top / 127;
        }
    }
    return y;
}

enum { MIXED_ROWS = 4, MIXED_TOKENS = 3 + 1 + 37 + 150 };
static void mixed_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, 3, 10);
    kernel_test_row(test, KERN_ROW_GENERATED, 1, 1, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 2, 37, 5);
    kernel_test_row(test, KERN_ROW_PROMPT, 3, 150, 0);
    kernel_test_prepare(test);
}

static const struct {
    int rows, cols;
} shapes[] = {{1, 1}, {16, 32}, {33, 64}, {47, 33}, {100, 70}, {7, 257}, {192, 576}};
enum { SHAPES = sizeof shapes / sizeof shapes[0], MOST_OUTPUTS = 192 * MIXED_TOKENS };

static void check_linear(kernel_test *test, int rows, int cols, form f, bool native, float *y) {
    const matrix m = make_matrix(test, rows, cols, f, native);
    const size_t outputs = (size_t)MIXED_TOKENS * rows;
    float *x = kernel_test_floats(test, (size_t)MIXED_TOKENS * cols, -1, 1);
    float *bias = kernel_test_floats(test, (size_t)rows, -1, 1);
    double *wide_bias = kernel_test_widened(test, bias, (size_t)rows);
    double *want = kernel_test_zero_doubles(test, outputs), *rounded = rounded_inputs(test, x, MIXED_TOKENS, cols);
    mixed_rows(test);
    const kern_linear_args args = {
        .x.f = x, .weight.w = m.weight, .bias.f = bias, .y.f = y, .cols = cols, .rows = rows};
    kernel_test_lend(test, y, outputs * sizeof *y);
    kernel_test_launch(test, KERN_OP_LINEAR, &args);
    kern_ref_linear(MIXED_TOKENS, rows, cols, rounded, m.value, wide_bias, NULL, want);
    kernel_test_assert_norm(y, want, outputs, 1e-5);
    kern_ref_linear(MIXED_TOKENS, rows, cols, kernel_test_widened(test, x, (size_t)MIXED_TOKENS * cols), m.value,
                    wide_bias, NULL, want);
    kernel_test_assert_norm(y, want, outputs, 1e-2);
    const kern_linear_args in_place = {
        .x.f = x, .weight.w = m.weight, .residual.f = y, .y.f = y, .cols = cols, .rows = rows};
    for (size_t i = 0; i < outputs; i++)
        want[i] += (double)y[i] - wide_bias[i % (size_t)rows];
    kernel_test_launch(test, KERN_OP_LINEAR, &in_place);
    kernel_test_assert_norm(y, want, outputs, 1e-2);
    kern_weight_free(m.weight);
}

START_TEST(linear_equals_reference) {
    static float by_instruction[MOST_OUTPUTS], without[MOST_OUTPUTS];
    for (int s = 0; s < SHAPES * FORMS; s++) {
        const int rows = shapes[s / FORMS].rows, cols = shapes[s / FORMS].cols;
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        check_linear(&test, rows, cols, s % FORMS, true, by_instruction);
        test.seed = 1;
        check_linear(&test, rows, cols, s % FORMS, false, without);
        kernel_test_assert_same(by_instruction, without, (size_t)MIXED_TOKENS * rows);
        kernel_test_close(&test);
    }
}
END_TEST

// Every row alone, its operands elsewhere, and every slice: the bits of the whole.
START_TEST(rows_and_slices_stand_alone) {
    enum { ROWS = 75, COLS = 100 };
    static const int slices[][2] = {{0, 1}, {3, 40}, {16, 16}, {31, 33}, {74, 1}};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (form f = 0; f < FORMS; f++) {
        const matrix m = make_matrix(&test, ROWS, COLS, f, true);
        float *x = kernel_test_floats(&test, MIXED_TOKENS * COLS, -1, 1);
        float *bias = kernel_test_floats(&test, ROWS, -1, 1);
        float *y = kernel_test_zero_floats(&test, MIXED_TOKENS * ROWS),
              *alone = kernel_test_zero_floats(&test, 1 + MIXED_TOKENS * ROWS);
        kern_linear_args args = {.x.f = x, .weight.w = m.weight, .bias.f = bias, .y.f = y, .cols = COLS, .rows = ROWS};
        mixed_rows(&test);
        kernel_test_launch(&test, KERN_OP_LINEAR, &args);
        args.y.f = alone + 1;
        for (size_t s = 0; s < sizeof slices / sizeof *slices; s++) {
            args.row0 = slices[s][0], args.rows = slices[s][1];
            kernel_test_launch(&test, KERN_OP_LINEAR, &args);
            for (int t = 0; t < MIXED_TOKENS; t++)
                kernel_test_assert_same(alone + 1 + t * args.rows, y + t * ROWS + args.row0, args.rows);
        }
        args.row0 = 0, args.rows = ROWS;
        kern_row row[MIXED_ROWS];
        memcpy(row, test.rows->row, sizeof row);
        for (int r = 0; r < MIXED_ROWS; r++) {
            kernel_test_clear_rows(&test);
            kernel_test_row(&test, KERN_ROW_GENERATED, row[r].slot, row[r].length, row[r].position); // of either kind
            kernel_test_prepare(&test);
            args.x.f = x + row[r].token0 * COLS;
            kernel_test_launch(&test, KERN_OP_LINEAR, &args);
            kernel_test_assert_same(alone + 1, y + row[r].token0 * ROWS, row[r].length * ROWS);
        }
        kern_weight_free(m.weight);
    }
    kernel_test_close(&test);
}
END_TEST

#ifdef _OPENMP
START_TEST(threads_do_not_matter) {
    enum { ROWS = 300, COLS = 400 };
    float *first = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        kernel_test test;
        kernel_test_threads(threads);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const matrix m = make_matrix(&test, ROWS, COLS, Q4, true);
        float *x = kernel_test_floats(&test, MIXED_TOKENS * COLS, -1, 1);
        float *y = kernel_test_zero_floats(&test, MIXED_TOKENS * ROWS);
        mixed_rows(&test);
        const kern_linear_args args = {.x.f = x, .weight.w = m.weight, .y.f = y, .cols = COLS, .rows = ROWS};
        kernel_test_launch(&test, KERN_OP_LINEAR, &args);
        if (!first)
            first = memcpy(malloc(sizeof *y * MIXED_TOKENS * ROWS), y, sizeof *y * MIXED_TOKENS * ROWS);
        kernel_test_assert_same(first, y, MIXED_TOKENS * ROWS);
        kern_weight_free(m.weight);
        kernel_test_close(&test);
    }
    free(first);
}
END_TEST
#endif

// A fault in one token's inputs reaches all its outputs and no other token; what is tiny or zero gives zero.
START_TEST(what_is_not_finite_stays_so) {
    enum { ROWS = 40, COLS = 70, TOKENS = 6 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const matrix m = make_matrix(&test, ROWS, COLS, Q4_MINIMUM, true);
    float *x = kernel_test_floats(&test, TOKENS * COLS, -1, 1), *y = kernel_test_zero_floats(&test, TOKENS * ROWS);
    x[1 * COLS + 3] = NAN;
    x[2 * COLS + 69] = INFINITY;
    x[3 * COLS + 40] = -INFINITY;
    for (int c = 0; c < COLS; c++) {
        x[4 * COLS + c] = 0;
        x[5 * COLS + c] = c % 2 ? 1e-42f : -1e-38f;
    }
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, TOKENS, 0);
    kernel_test_prepare(&test);
    const kern_linear_args args = {.x.f = x, .weight.w = m.weight, .y.f = y, .cols = COLS, .rows = ROWS};
    kernel_test_launch(&test, KERN_OP_LINEAR, &args);
    for (int t = 0; t < TOKENS; t++) {
        for (int r = 0; r < ROWS; r++) {
            const float found = y[t * ROWS + r];
            ck_assert_msg(t >= 1 && t <= 3 ? isnan(found) : isfinite(found), "token %d, output %d: %g", t, r,
                          (double)found);
            ck_assert(t < 4 || found == 0);
        }
    }
    kern_weight_free(m.weight);
    kernel_test_close(&test);
}
END_TEST

// Logits of some tokens and losses of others: one product.
START_TEST(head_equals_reference) {
    enum { VOCABULARY = 211, WIDTH = 50, TOKENS = 9, LOGITS = 3 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (form f = 0; f < FORMS; f++) {
        const matrix m = make_matrix(&test, VOCABULARY, WIDTH, f, true);
        float *x = kernel_test_floats(&test, TOKENS * WIDTH, -1, 1);
        float *logits = kernel_test_zero_floats(&test, LOGITS * VOCABULARY);
        float *loss = kernel_test_zero_floats(&test, TOKENS);
        float *tile = kernel_test_zero_floats(&test, 4 * VOCABULARY);
        double *want = kernel_test_zero_doubles(&test, TOKENS * VOCABULARY),
               *rounded = rounded_inputs(&test, x, TOKENS, WIDTH);
        kern_ref_linear(TOKENS, VOCABULARY, WIDTH, rounded, m.value, NULL, NULL, want);
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, TOKENS, 0);
        test.rows->n_logits = LOGITS;
        for (int i = 0; i < LOGITS; i++)
            test.rows->logits_token[i] = 8 - 3 * i;
        for (int t = 0; t < TOKENS; t++) {
            test.rows->target[t] = t == 2 ? -1 : 20 * t;
            test.rows->target_weight[t] = 1;
        }
        kernel_test_prepare(&test);
        const kern_head_logits_args args = {
            .x.f = x, .weight.w = m.weight, .logits.f = logits, .width = WIDTH, .vocabulary = VOCABULARY};
        kernel_test_launch(&test, KERN_OP_HEAD_LOGITS, &args);
        for (int i = 0; i < LOGITS; i++)
            kernel_test_assert_norm(logits + i * VOCABULARY, want + (8 - 3 * i) * VOCABULARY, VOCABULARY, 1e-5);
        const kern_head_loss_args losses = {.x.f = x,
                                            .weight.w = m.weight,
                                            .loss.f = loss,
                                            .tile.f = tile,
                                            .width = WIDTH,
                                            .vocabulary = VOCABULARY,
                                            .tile_tokens = 4};
        kernel_test_launch(&test, KERN_OP_HEAD_LOSS, &losses);
        for (int t = 0; t < TOKENS; t++) {
            double sum = 0;
            for (int o = 0; o < VOCABULARY; o++)
                sum += exp(want[t * VOCABULARY + o]);
            const double wanted = t == 2 ? 0 : log(sum) - want[t * VOCABULARY + 20 * t];
            ck_assert_double_le(fabs((double)loss[t] - wanted), 1e-4 * (1 + fabs(wanted)));
        }
        kern_weight_free(m.weight);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(embedding_is_exact) {
    enum { VOCABULARY = 50, WIDTH = 45, TOKENS = 50 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (form f = 0; f < FORMS; f++) {
        const matrix m = make_matrix(&test, VOCABULARY, WIDTH, f, true);
        float *y = kernel_test_zero_floats(&test, TOKENS * WIDTH);
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, 0, TOKENS, 0);
        for (int t = 0; t < TOKENS; t++)
            test.rows->id[t] = (7 * t + 3) % VOCABULARY;
        kernel_test_prepare(&test);
        const kern_embed_args args = {.weight.w = m.weight, .y.f = y, .width = WIDTH, .scale = 2};
        kernel_test_launch(&test, KERN_OP_EMBED, &args);
        for (int t = 0; t < TOKENS; t++)
            for (int c = 0; c < WIDTH; c++)
                ck_assert_float_eq_tol(y[t * WIDTH + c], (float)(2 * m.value[test.rows->id[t] * WIDTH + c]), 1e-7);
        kern_weight_free(m.weight);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(bad_weights_are_refused) {
    uint16_t scale[4] = {0};
    uint8_t codes[64] = {0};
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_weight *none = NULL;
    const kern_weight_desc bad[] = {
        {.dtype = KERN_Q8, .rows = 2, .cols = 32, .host = codes},
        {.dtype = KERN_Q4, .rows = 2, .cols = 32, .host = codes, .minimum = scale},
        {.dtype = KERN_Q8, .rows = 2, .cols = 32, .host = codes, .scale = scale, .minimum = scale},
        {.dtype = KERN_BF16, .rows = 2, .cols = 16, .host = codes, .scale = scale},
        {.dtype = KERN_Q8, .rows = 2, .cols = 32, .scale = scale},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        ck_assert_int_eq(kern_weight_create(test.device, &bad[i], &none), KERN_INVALID);
    const kern_weight_desc good = {.dtype = KERN_Q4, .rows = 2, .cols = 33, .host = codes, .scale = scale};
    kern_weight *weight = NULL;
    ck_assert_int_eq(kern_weight_create(test.device, &good, &weight), KERN_OK);
    ck_assert_uint_eq(kern_weight_bytes(weight), 128 + 2 * 512);
    float x[33] = {0}, y[33] = {0};
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, 1, 0);
    kernel_test_prepare(&test);
    const kern_linear_backward_input_args backward = {.dy.f = x, .weight.w = weight, .dx.f = y, .cols = 33, .rows = 2};
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_LINEAR_BACKWARD_INPUT, test.rows, &backward), KERN_UNSUPPORTED);
    kern_weight_free(weight);
    kernel_test_close(&test);
}
END_TEST

static Suite *quant_suite(void) {
    Suite *suite = suite_create("kernels/quant");
    TCase *tests = tcase_create("quant");
    tcase_set_timeout(tests, 60);
    tcase_add_loop_test(tests, linear_equals_reference, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tests, rows_and_slices_stand_alone, 0, KERNEL_TEST_ISAS);
#ifdef _OPENMP
    tcase_add_loop_test(tests, threads_do_not_matter, 0, KERNEL_TEST_ISAS);
#endif
    tcase_add_loop_test(tests, what_is_not_finite_stays_so, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tests, head_equals_reference, 0, KERNEL_TEST_ISAS);
    tcase_add_loop_test(tests, embedding_is_exact, 0, KERNEL_TEST_ISAS);
    tcase_add_test(tests, bad_weights_are_refused);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(quant_suite)

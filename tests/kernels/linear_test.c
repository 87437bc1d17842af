// SPDX-License-Identifier: Apache-2.0
// linear: forward of generated and prompt tokens, backward, bits that do not depend on the batch, refusals.
//
// Weights hold values that bf16 has exactly, so that both types have one reference. Shapes are odd on purpose: fewer
// outputs than a tile, more than a slice, widths that are no multiple of a vector.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/ref/linear.h"
#include "tests/kernels/kernel_test.h"

typedef struct layer {
    int rows, cols, tokens;
    double tolerance; // of the forward
    size_t x_count, w_count, y_count;
    float *x, *w, *bias, *residual, *y;
    kern_weight *weight;
} layer;

static uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static kern_weight *make_weight(kernel_test *test, const float *w, int rows, int cols, kern_dtype dtype) {
    uint16_t *halves = kernel_test_bytes(test, (size_t)rows * cols * sizeof *halves);
    for (int i = 0; i < rows * cols; i++)
        halves[i] = (uint16_t)(float_bits(w[i]) >> 16);
    const kern_weight_desc desc = {
        .dtype = dtype, .rows = rows, .cols = cols, .host = dtype == KERN_BF16 ? (const void *)halves : w};
    kern_weight *weight = NULL;
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &weight), KERN_OK);
    return weight;
}

static layer make_layer(kernel_test *test, int rows, int cols, int tokens, kern_dtype dtype) {
    layer l = {.rows = rows, .cols = cols, .tokens = tokens};
    l.x_count = (size_t)tokens * cols;
    l.w_count = (size_t)rows * cols;
    l.y_count = (size_t)tokens * rows;
    l.x = kernel_test_floats(test, l.x_count, -1, 1);
    l.w = kernel_test_floats(test, l.w_count, -1, 1);
    kernel_test_cut_to_bf16(l.w, l.w_count);
    l.bias = kernel_test_floats(test, (size_t)rows, -1, 1);
    l.residual = kernel_test_floats(test, l.y_count, -1, 1);
    if (test->fast) {
        kernel_test_cut_to_bf16(l.x, l.x_count);
        kernel_test_cut_to_bf16(l.residual, l.y_count);
    }
    l.y = kernel_test_zero_floats(test, l.y_count);
    l.weight = make_weight(test, l.w, rows, cols, dtype);
    l.tolerance = test->cuda && dtype == KERN_BF16 ? 5e-6 : 1e-6; // activations as pairs of bf16
    return l;
}

static kern_linear_args layer_args(const layer *l, bool bias, bool residual) {
    return (kern_linear_args){.x.f = l->x,
                              .weight.w = l->weight,
                              .bias.f = bias ? l->bias : NULL,
                              .residual.f = residual ? l->residual : NULL,
                              .y.f = l->y,
                              .cols = l->cols,
                              .rows = l->rows};
}

// Rows [row0, row0 + rows) of the weight, for tokens of `groups` vectors.
typedef struct slice {
    int row0, rows, groups;
} slice;

// Both kinds, prompts on and off the grid: 3 + 1 + 37 + 90 + 5 tokens.
enum { MIXED_ROWS = 5, MIXED_TOKENS = 136 };
static void mixed_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, 3, 10);
    kernel_test_row(test, KERN_ROW_GENERATED, 1, 1, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 2, 37, 5);
    kernel_test_row(test, KERN_ROW_PROMPT, 3, 90, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 4, 5, 31);
    kernel_test_prepare(test);
}

static const struct {
    int rows, cols;
} shapes[] = {{1, 1}, {6, 48}, {192, 64}, {193, 33}, {400, 130}, {25, 257}, {7, 15}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void check_forward(kernel_test *test, layer *l, bool bias, bool residual) {
    double *want = kernel_test_zero_doubles(test, l->y_count);
    kern_ref_linear(l->tokens, l->rows, l->cols, kernel_test_widened(test, l->x, l->x_count),
                    kernel_test_widened(test, l->w, l->w_count),
                    bias ? kernel_test_widened(test, l->bias, (size_t)l->rows) : NULL,
                    residual ? kernel_test_widened(test, l->residual, l->y_count) : NULL, want);
    kern_linear_args args = layer_args(l, bias, residual);
    kernel_test_launch(test, KERN_OP_LINEAR, &args);
    kernel_test_assert_norm(l->y, want, l->y_count, l->tolerance);
    if (residual) { // in place
        args.y.f = l->residual;
        kernel_test_launch(test, KERN_OP_LINEAR, &args);
        kernel_test_assert_same(l->residual, l->y, l->y_count);
    }
}

START_TEST(forward_equals_reference) {
    for (int s = 0; s < SHAPES; s++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        for (int variant = 0; variant < 16; variant++) {
            layer l =
                make_layer(&test, shapes[s].rows, shapes[s].cols, MIXED_TOKENS, variant & 8 ? KERN_BF16 : KERN_F32);
            mixed_rows(&test);
            test.rows->merge = variant & 4;
            check_forward(&test, &l, variant & 1, variant & 2);
            kern_weight_free(l.weight);
        }
        kernel_test_close(&test);
    }
}
END_TEST

// Every row of the mixed batch once more alone, its operands at other addresses.
static void check_rows_alone(kernel_test *test, layer *l) {
    kern_linear_args args = layer_args(l, true, false);
    kern_row row[MIXED_ROWS];
    mixed_rows(test);
    memcpy(row, test->rows->row, sizeof row);
    kernel_test_launch(test, KERN_OP_LINEAR, &args);
    for (int r = 0; r < MIXED_ROWS; r++) {
        const size_t x_count = (size_t)row[r].length * l->cols, y_count = (size_t)row[r].length * l->rows;
        float *x = kernel_test_zero_floats(test, x_count + 3), *y = kernel_test_zero_floats(test, y_count + 1);
        memcpy(x + 3, l->x + (size_t)row[r].token0 * l->cols, x_count * sizeof *x);
        kernel_test_clear_rows(test);
        kernel_test_row(test, row[r].kind, row[r].slot, row[r].length, row[r].position);
        kernel_test_prepare(test);
        args.x.f = x + 3;
        args.y.f = y + 1;
        kernel_test_launch(test, KERN_OP_LINEAR, &args);
        kernel_test_assert_same(y + 1, l->y + (size_t)row[r].token0 * l->rows, y_count);
    }
}

START_TEST(row_alone_equals_row_in_batch) {
    for (int s = 0; s < SHAPES; s++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        for (int bf16 = 0; bf16 < 2; bf16++) {
            layer l = make_layer(&test, shapes[s].rows, shapes[s].cols, MIXED_TOKENS, bf16 ? KERN_BF16 : KERN_F32);
            check_rows_alone(&test, &l);
            kern_weight_free(l.weight);
        }
        kernel_test_close(&test);
    }
}
END_TEST

// n generated rows of the same token give n equal outputs, for every number of rows.
START_TEST(place_and_batch_size_do_not_matter) {
    enum { ROWS = 50, COLS = 70, MOST = 19 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    layer l = make_layer(&test, ROWS, COLS, MOST, KERN_F32);
    for (int t = 1; t < MOST; t++)
        memcpy(l.x + t * COLS, l.x, COLS * sizeof(float));
    float first[ROWS];
    for (int n = 1; n <= MOST; n++) {
        kernel_test_clear_rows(&test);
        for (int r = 0; r < n; r++)
            kernel_test_row(&test, KERN_ROW_GENERATED, r, 1, 7 * r);
        kernel_test_prepare(&test);
        const kern_linear_args args = layer_args(&l, true, false);
        kernel_test_launch(&test, KERN_OP_LINEAR, &args);
        if (n == 1)
            memcpy(first, l.y, sizeof first);
        for (int t = 0; t < n; t++)
            kernel_test_assert_same(first, l.y + t * ROWS, ROWS);
    }
    kern_weight_free(l.weight);
    kernel_test_close(&test);
}
END_TEST

// Vectors in numbers around the tiles of a device, shapes around those of a weight: as the reference, and the same bits
// whatever their number is.
enum { MANY = 300 };
static void generated_tokens(kernel_test *test, int tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, tokens, 7);
    kernel_test_prepare(test);
}

static void check_many(kernel_test *test, layer *l) {
    static const int counts[] = {9, 16, 17, 64, 65, 200, MANY}, alone[] = {0, 8, 63, 150, MANY - 1};
    double *want = kernel_test_zero_doubles(test, l->y_count);
    kern_ref_linear(MANY, l->rows, l->cols, kernel_test_widened(test, l->x, l->x_count),
                    kernel_test_widened(test, l->w, l->w_count), kernel_test_widened(test, l->bias, (size_t)l->rows),
                    kernel_test_widened(test, l->residual, l->y_count), want);
    kern_linear_args args = layer_args(l, true, true);
    args.y.f = kernel_test_zero_floats(test, l->y_count);
    generated_tokens(test, MANY);
    kernel_test_launch(test, KERN_OP_LINEAR, &args);
    kernel_test_assert_norm(args.y.f, want, l->y_count, l->tolerance);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        kern_linear_args some = args;
        some.y.f = kernel_test_zero_floats(test, (size_t)counts[i] * l->rows + 1);
        generated_tokens(test, counts[i]);
        kernel_test_launch(test, KERN_OP_LINEAR, &some);
        kernel_test_assert_same(some.y.f, args.y.f, (size_t)counts[i] * l->rows);
        ck_assert(some.y.f[counts[i] * l->rows] == 0); // nothing is written behind the last vector
    }
    for (size_t i = 0; i < sizeof alone / sizeof alone[0]; i++) {
        kern_linear_args one = args;
        one.x.f += alone[i] * l->cols;
        one.residual.f += alone[i] * l->rows;
        one.y.f = kernel_test_zero_floats(test, (size_t)l->rows);
        generated_tokens(test, 1);
        kernel_test_launch(test, KERN_OP_LINEAR, &one);
        kernel_test_assert_same(one.y.f, args.y.f + alone[i] * l->rows, (size_t)l->rows);
    }
}

// So many outputs and vectors that a device goes from one tile to the next: the bits of fewer vectors.
START_TEST(very_many_vectors) {
    enum { ROWS = 1000, COLS = 260, VECTORS = 2100, SOME = 20 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    layer l = make_layer(&test, ROWS, COLS, VECTORS, KERN_BF16);
    kern_linear_args args = layer_args(&l, true, true);
    generated_tokens(&test, VECTORS);
    kernel_test_launch(&test, KERN_OP_LINEAR, &args);
    for (int first = 0; first + SOME <= VECTORS; first += 520) {
        kern_linear_args some = args;
        some.x.f += first * COLS;
        some.residual.f += first * ROWS;
        some.y.f = kernel_test_zero_floats(&test, SOME * ROWS);
        generated_tokens(&test, SOME);
        kernel_test_launch(&test, KERN_OP_LINEAR, &some);
        kernel_test_assert_same(some.y.f, l.y + (size_t)first * ROWS, SOME * ROWS);
    }
    kern_weight_free(l.weight);
    kernel_test_close(&test);
}
END_TEST

START_TEST(number_of_vectors_does_not_matter) {
    static const int rows[] = {1, 6, 100, 129}, cols[] = {5, 100, 768};
    for (int i = 0; i < 12; i++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        layer l = make_layer(&test, rows[i / 3], cols[i % 3], MANY, KERN_BF16);
        check_many(&test, &l);
        kern_weight_free(l.weight);
        kernel_test_close(&test);
    }
}
END_TEST

static const slice slices[] = {{0, 400, 1}, {3, 200, 1}, {207, 193, 1}, {399, 1, 1}, {10, 7, 40}, {0, 400, 4}};
enum { SLICES = sizeof slices / sizeof slices[0], SLICED_ROWS = 400, SLICED_COLS = 66 };

static layer make_sliced(kernel_test *test, slice s, kern_dtype dtype) {
    layer l = make_layer(test, SLICED_ROWS, SLICED_COLS, MIXED_TOKENS * s.groups, dtype);
    l.y_count = (size_t)l.tokens * s.rows;
    return l;
}

static void check_slice(kernel_test *test, slice s, kern_dtype dtype, bool merge) {
    layer l = make_sliced(test, s, dtype);
    double *want = kernel_test_zero_doubles(test, l.y_count);
    double *wide = kernel_test_widened(test, l.w, l.w_count), *bias = kernel_test_widened(test, l.bias, l.rows);
    kern_ref_linear(l.tokens, s.rows, l.cols, kernel_test_widened(test, l.x, l.x_count), wide + s.row0 * l.cols,
                    bias + s.row0, kernel_test_widened(test, l.residual, l.y_count), want);
    mixed_rows(test);
    test->rows->merge = merge;
    kern_linear_args args = layer_args(&l, true, true);
    args.row0 = s.row0, args.rows = s.rows, args.groups = s.groups;
    kernel_test_launch(test, KERN_OP_LINEAR, &args);
    kernel_test_assert_norm(l.y, want, l.y_count, l.tolerance);
    kern_weight_free(l.weight);
}

START_TEST(slices_and_groups_equal_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int i = 0; i < SLICES * 4; i++)
        check_slice(&test, slices[i / 4], i & 1 ? KERN_BF16 : KERN_F32, i & 2);
    kernel_test_close(&test);
}
END_TEST

// A row of several vectors a token alone and in the mixed batch.
START_TEST(row_of_groups_alone_equals_row_in_batch) {
    enum { ROWS = 30, COLS = 20, GROUPS = 5 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:32"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    layer l = make_layer(&test, ROWS, COLS, MIXED_TOKENS * GROUPS, KERN_F32);
    float *alone = kernel_test_zero_floats(&test, l.y_count);
    kern_linear_args args = layer_args(&l, true, false);
    args.row0 = 4, args.rows = ROWS - 7, args.groups = GROUPS;
    kern_row row[MIXED_ROWS];
    mixed_rows(&test);
    memcpy(row, test.rows->row, sizeof row);
    kernel_test_launch(&test, KERN_OP_LINEAR, &args);
    for (int r = 0; r < MIXED_ROWS; r++) {
        kern_linear_args one = args;
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, row[r].kind, row[r].slot, row[r].length, row[r].position);
        kernel_test_prepare(&test);
        one.x.f += row[r].token0 * GROUPS * COLS;
        one.y.f = alone;
        kernel_test_launch(&test, KERN_OP_LINEAR, &one);
        kernel_test_assert_same(alone, l.y + row[r].token0 * GROUPS * args.rows, row[r].length * GROUPS * args.rows);
    }
    kern_weight_free(l.weight);
    kernel_test_close(&test);
}
END_TEST

// Gradients of the slice alone: what lies beside it in the weight's and the bias's stays.
static void check_slice_backward(kernel_test *test, slice s) {
    layer l = make_sliced(test, s, KERN_F32);
    float *dx = kernel_test_zero_floats(test, l.x_count), *dw = kernel_test_floats(test, l.w_count, -1, 1);
    float *db = kernel_test_floats(test, (size_t)l.rows, -1, 1);
    double *dx_want = kernel_test_zero_doubles(test, l.x_count), *dw_want = kernel_test_widened(test, dw, l.w_count);
    double *db_want = kernel_test_widened(test, db, (size_t)l.rows), *w = kernel_test_widened(test, l.w, l.w_count);
    kern_ref_linear_backward(l.tokens, s.rows, l.cols, kernel_test_widened(test, l.x, l.x_count), w + s.row0 * l.cols,
                             kernel_test_widened(test, l.residual, l.y_count), dx_want, dw_want + s.row0 * l.cols,
                             db_want + s.row0);
    mixed_rows(test);
    const kern_linear_backward_input_args input = {.dy.f = l.residual,
                                                   .weight.w = l.weight,
                                                   .dx.f = dx,
                                                   .cols = l.cols,
                                                   .rows = s.rows,
                                                   .row0 = s.row0,
                                                   .groups = s.groups};
    const kern_linear_backward_weight_args weight = {.x.f = l.x,
                                                     .dy.f = l.residual,
                                                     .grad_weight.f = dw,
                                                     .grad_bias.f = db,
                                                     .cols = l.cols,
                                                     .rows = s.rows,
                                                     .row0 = s.row0,
                                                     .groups = s.groups};
    kernel_test_launch(test, KERN_OP_LINEAR_BACKWARD_INPUT, &input);
    kernel_test_launch(test, KERN_OP_LINEAR_BACKWARD_WEIGHT, &weight);
    kernel_test_assert_norm(dx, dx_want, l.x_count, 1e-6);
    kernel_test_assert_norm(dw, dw_want, l.w_count, 1e-6);
    kernel_test_assert_norm(db, db_want, (size_t)l.rows, 1e-6);
    kern_weight_free(l.weight);
}

START_TEST(gradients_of_slices_and_groups) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int i = 0; i < SLICES; i++)
        check_slice_backward(&test, slices[i]);
    kernel_test_close(&test);
}
END_TEST

// residual plays dy; the gradients start at values that must be kept.
static void check_backward(kernel_test *test, const layer *l) {
    const float *dy = l->residual;
    float *dx = kernel_test_floats(test, l->x_count, -1, 1), *dw = kernel_test_floats(test, l->w_count, -1, 1);
    float *db = kernel_test_floats(test, (size_t)l->rows, -1, 1);
    double *dx_want = kernel_test_zero_doubles(test, l->x_count), *dx_sum = kernel_test_widened(test, dx, l->x_count);
    double *dw_want = kernel_test_widened(test, dw, l->w_count);
    double *db_want = kernel_test_widened(test, db, (size_t)l->rows);
    kern_ref_linear_backward(l->tokens, l->rows, l->cols, kernel_test_widened(test, l->x, l->x_count),
                             kernel_test_widened(test, l->w, l->w_count), kernel_test_widened(test, dy, l->y_count),
                             dx_want, dw_want, db_want);
    for (size_t i = 0; i < l->x_count; i++)
        dx_sum[i] += dx_want[i];
    kern_linear_backward_input_args input = {
        .dy.f = l->residual, .weight.w = l->weight, .dx.f = dx, .cols = l->cols, .rows = l->rows, .accumulate = 1};
    kernel_test_launch(test, KERN_OP_LINEAR_BACKWARD_INPUT, &input);
    kernel_test_assert_norm(dx, dx_sum, l->x_count, 1e-6);
    input.accumulate = 0;
    kernel_test_launch(test, KERN_OP_LINEAR_BACKWARD_INPUT, &input);
    kernel_test_assert_norm(dx, dx_want, l->x_count, 1e-6);
    const kern_linear_backward_weight_args weight = {
        .x.f = l->x, .dy.f = l->residual, .grad_weight.f = dw, .grad_bias.f = db, .cols = l->cols, .rows = l->rows};
    kernel_test_launch(test, KERN_OP_LINEAR_BACKWARD_WEIGHT, &weight);
    kernel_test_assert_norm(dw, dw_want, l->w_count, 1e-6);
    kernel_test_assert_norm(db, db_want, (size_t)l->rows, 1e-6);
}

START_TEST(backward_equals_reference) {
    for (int s = 0; s < SHAPES; s++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        layer l = make_layer(&test, shapes[s].rows, shapes[s].cols, MIXED_TOKENS, KERN_F32);
        mixed_rows(&test);
        check_backward(&test, &l);
        kern_weight_free(l.weight);
        kernel_test_close(&test);
    }
}
END_TEST

#ifdef _OPENMP
// All of linear with one thread and with two, bit for bit.
START_TEST(threads_do_not_matter) {
    enum { ROWS = 400, COLS = 520, X = MIXED_TOKENS * COLS, W = ROWS * COLS, Y = MIXED_TOKENS * ROWS };
    float *y[2], *dx[2], *dw[2];
    kernel_test test[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i + 1);
        if (!kernel_test_open(&test[i], _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        layer l = make_layer(&test[i], ROWS, COLS, MIXED_TOKENS, KERN_F32);
        mixed_rows(&test[i]);
        y[i] = l.y;
        dx[i] = kernel_test_zero_floats(&test[i], X);
        dw[i] = kernel_test_zero_floats(&test[i], W);
        const kern_linear_args forward = layer_args(&l, true, true);
        const kern_linear_backward_input_args input = {
            .dy.f = l.residual, .weight.w = l.weight, .dx.f = dx[i], .cols = COLS, .rows = ROWS};
        const kern_linear_backward_weight_args weight = {
            .x.f = l.x, .dy.f = l.residual, .grad_weight.f = dw[i], .cols = COLS, .rows = ROWS};
        kernel_test_launch(&test[i], KERN_OP_LINEAR, &forward);
        kernel_test_launch(&test[i], KERN_OP_LINEAR_BACKWARD_INPUT, &input);
        kernel_test_launch(&test[i], KERN_OP_LINEAR_BACKWARD_WEIGHT, &weight);
        ck_assert_int_eq(omp_get_max_threads(), i + 1); // what a launch sets inside the team stays there
        kern_weight_free(l.weight);
    }
    kernel_test_assert_same(y[0], y[1], Y);
    kernel_test_assert_same(dx[0], dx[1], X);
    kernel_test_assert_same(dw[0], dw[1], W);
    kernel_test_close(&test[0]);
    kernel_test_close(&test[1]);
}
END_TEST
#endif

// The reference's own backward against central differences of its forward.
enum { REF_TOKENS = 3, REF_ROWS = 4, REF_COLS = 5 };
typedef struct ref_problem {
    double x[REF_TOKENS * REF_COLS], w[REF_ROWS * REF_COLS], b[REF_ROWS], dy[REF_TOKENS * REF_ROWS];
} ref_problem;

static double ref_loss(void *context) {
    const ref_problem *p = context;
    double y[REF_TOKENS * REF_ROWS];
    kern_ref_linear(REF_TOKENS, REF_ROWS, REF_COLS, p->x, p->w, p->b, NULL, y);
    return kernel_test_dot(y, p->dy, REF_TOKENS * REF_ROWS);
}

START_TEST(reference_backward_equals_differences) {
    kernel_test test = {.seed = 5};
    ref_problem p;
    double *values = (double *)&p, dx[REF_TOKENS * REF_COLS], dw[REF_ROWS * REF_COLS] = {0}, db[REF_ROWS] = {0};
    for (size_t i = 0; i < sizeof p / sizeof *values; i++)
        values[i] = kernel_test_uniform(&test) - 0.5;
    kern_ref_linear_backward(REF_TOKENS, REF_ROWS, REF_COLS, p.x, p.w, p.dy, dx, dw, db);
    kernel_test_gradient("dx", ref_loss, &p, p.x, dx, REF_TOKENS * REF_COLS, 1e-8);
    kernel_test_gradient("dw", ref_loss, &p, p.w, dw, REF_ROWS * REF_COLS, 1e-8);
    kernel_test_gradient("db", ref_loss, &p, p.b, db, REF_ROWS, 1e-8);
}
END_TEST

START_TEST(refuses_what_it_cannot_do) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    layer l = make_layer(&test, 4, 8, 1, KERN_BF16);
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_GENERATED, 0, 1, 0);
    kernel_test_prepare(&test);
    kern_linear_args args = layer_args(&l, false, false);
    kernel_test_launch(&test, KERN_OP_LINEAR, &args);
    args.cols = 7; // not the weight's
    kernel_test_assert_refused(&test, KERN_OP_LINEAR, &args, KERN_OK);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_LINEAR, test.rows, &args), KERN_INVALID);
    args.cols = 8, args.row0 = 1; // past the weight's last row
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_LINEAR, test.rows, &args), KERN_INVALID);
    args.row0 = -1;
    kernel_test_assert_refused(&test, KERN_OP_LINEAR, &args, KERN_INVALID);
    args.row0 = 0, args.cols = 0;
    kernel_test_assert_refused(&test, KERN_OP_LINEAR, &args, KERN_INVALID);
    args.cols = 8;
    args.y.f = NULL;
    kernel_test_assert_refused(&test, KERN_OP_LINEAR, &args, KERN_INVALID);
    const kern_linear_backward_input_args backward = {
        .dy.f = l.y, .weight.w = l.weight, .dx.f = l.x, .cols = 8, .rows = 4}; // bf16 has no backward
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_LINEAR_BACKWARD_INPUT, test.rows, &backward), KERN_UNSUPPORTED);
    kern_weight_free(l.weight);
    kernel_test_close(&test);
}
END_TEST

// Products that may round their operands to bf16, of numbers that bf16 holds: as exact as others.
static void merged_row(kernel_test *test, int tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    test->rows->merge = true;
    kernel_test_prepare(test);
}

START_TEST(fast_products_of_bf16_numbers) {
    static const struct {
        int rows, cols, tokens;
    } fast_shapes[] = {{5, 3, 7}, {129, 70, 40}, {390, 257, 300}, {6, 132, 200}, {16, 256, 70}, {256, 512, 1000}};
    for (size_t s = 0; s < sizeof fast_shapes / sizeof fast_shapes[0]; s++) {
        kernel_test test;
        if (!kernel_test_open_fast(&test))
            MESA_TEST_SKIP("no device %s", "cuda:0");
        layer l = make_layer(&test, fast_shapes[s].rows, fast_shapes[s].cols, fast_shapes[s].tokens, KERN_F32);
        merged_row(&test, l.tokens);
        check_backward(&test, &l);
        for (int variant = 0; variant < 4; variant++)
            check_forward(&test, &l, variant & 1, variant & 2);
        kern_weight_free(l.weight);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(merging_asks_for_a_device_that_trains) {
    kernel_test test;
    if (!kernel_test_open_rounding(&test, false))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    layer l = make_layer(&test, 40, 30, 50, KERN_F32);
    const kern_linear_args args = layer_args(&l, true, true);
    merged_row(&test, l.tokens);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_LINEAR, test.rows, &args), KERN_UNSUPPORTED);
    kern_weight_free(l.weight);
    kernel_test_close(&test);
}
END_TEST

// Rows of a weight that begin anywhere, also where a bias is not aligned.
START_TEST(fast_slices_and_groups) {
    kernel_test test;
    if (!kernel_test_open_fast(&test))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    for (int i = 0; i < SLICES; i++) {
        check_slice(&test, slices[i], KERN_F32, true);
        check_slice_backward(&test, slices[i]);
    }
    kernel_test_close(&test);
}
END_TEST

static uint64_t bits_of(const float *x, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum = sum * UINT64_C(6364136223846793005) + float_bits(x[i]) + 1;
    return sum;
}

// So many shapes that a device may forget the first ones: the bits of a product are those that it had before.
START_TEST(fast_products_of_many_shapes) {
    enum { ROWS = 24, COLS = 40, MOST = 300 };
    kernel_test test;
    if (!kernel_test_open_fast(&test))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    layer l = make_layer(&test, ROWS, COLS, MOST, KERN_F32);
    double *want = kernel_test_zero_doubles(&test, l.y_count);
    uint64_t first[MOST + 1];
    kern_ref_linear(MOST, ROWS, COLS, kernel_test_widened(&test, l.x, l.x_count),
                    kernel_test_widened(&test, l.w, l.w_count), NULL, NULL, want);
    const kern_linear_args args = layer_args(&l, false, false);
    for (int round = 0; round < 2; round++)
        for (int tokens = 1; tokens <= MOST; tokens++) {
            merged_row(&test, tokens);
            kernel_test_launch(&test, KERN_OP_LINEAR, &args);
            const uint64_t now = bits_of(l.y, (size_t)tokens * ROWS);
            kernel_test_assert_norm(l.y, want, (size_t)tokens * ROWS, 1e-6);
            ck_assert(round == 0 || now == first[tokens]);
            first[tokens] = now;
        }
    kern_weight_free(l.weight);
    kernel_test_close(&test);
}
END_TEST

// Operations of a plan that follow one another may share what they have made of an operand, until something writes it:
// the bits of those that are launched one by one.
enum {
    KEPT_TOKENS = 130,
    KEPT_COLS = 96,
    KEPT_ROWS = 72,
    KEPT_X = 0,
    KEPT_DY = KEPT_X + KEPT_TOKENS * KEPT_COLS,
    KEPT_DX = KEPT_DY + KEPT_TOKENS * KEPT_ROWS,
    KEPT_UP = KEPT_DX + KEPT_TOKENS * KEPT_COLS,
    KEPT_GRAD = KEPT_UP + KEPT_TOKENS * KEPT_ROWS,
    KEPT_TAPS = KEPT_GRAD + KEPT_ROWS * KEPT_COLS,
    KEPT_END = KEPT_TAPS + KEPT_ROWS * 4
};

typedef struct kept {
    kernel_test *test;
    kern_plan *plan;                            // that operations go into; NULL: they are launched
    kern_ptr weight, x, dy, dx, up, grad, taps; // up: like dy
} kept;

static kept make_kept(kernel_test *test, kern_weight *weight, float *memory, kern_plan *plan) {
    static const int at[] = {KEPT_X, KEPT_DY, KEPT_DX, KEPT_UP, KEPT_GRAD, KEPT_TAPS};
    kern_ptr place[6];
    for (int i = 0; i < 6; i++)
        place[i] =
            plan ? kern_ref(KERN_CLASS_SCRATCH, (uint64_t)at[i] * sizeof(float)) : (kern_ptr){.f = memory + at[i]};
    const kern_ptr w = plan ? kern_ref(KERN_CLASS_PARAM, 0) : (kern_ptr){.w = weight};
    return (kept){test, plan, w, place[0], place[1], place[2], place[3], place[4], place[5]};
}

static void emit(const kept *k, kern_op op, const void *args) {
    ck_assert_int_eq(k->plan ? kern_plan_add(k->plan, op, args) : kern_launch(k->test->stream, op, k->test->rows, args),
                     KERN_OK);
}

static void emit_forward(const kept *k) {
    const kern_linear_args args = {.x = k->x, .weight = k->weight, .y = k->dy, .cols = KEPT_COLS, .rows = KEPT_ROWS};
    emit(k, KERN_OP_LINEAR, &args);
}
static void emit_input(const kept *k, kern_ptr dy, kern_ptr dx, int accumulate) {
    const kern_linear_backward_input_args args = {
        .dy = dy, .weight = k->weight, .dx = dx, .cols = KEPT_COLS, .rows = KEPT_ROWS, .accumulate = accumulate};
    emit(k, KERN_OP_LINEAR_BACKWARD_INPUT, &args);
}
static void emit_gradient(const kept *k, kern_ptr dy) {
    const kern_linear_backward_weight_args args = {
        .x = k->x, .dy = dy, .grad_weight = k->grad, .cols = KEPT_COLS, .rows = KEPT_ROWS};
    emit(k, KERN_OP_LINEAR_BACKWARD_WEIGHT, &args);
}
static void emit_activation(const kept *k) {
    const kern_activation_args args = {.x = k->dy, .y = k->dy, .width = KEPT_ROWS, .activation = KERN_SILU};
    emit(k, KERN_OP_ACTIVATION, &args);
}

static void emit_products(const kept *k) {
    emit_input(k, k->dy, k->dx, 0);
    emit_gradient(k, k->dy);
    emit_input(k, k->dy, k->x, 1);
    emit_gradient(k, k->dy);
    emit_activation(k);
    emit_gradient(k, k->dy);
    emit_forward(k);
    emit_input(k, k->dy, k->dx, 0);
    emit_gradient(k, k->dy);
}

// Operations whose outputs products read next, or read when something else has written them.
static void emit_producers(const kept *k) {
    const kern_rmsnorm_args norm = {.x = k->x, .y = k->x, .groups = 2, .width = KEPT_COLS / 2, .eps = 1e-6f};
    const kern_glu_args glu = {.gate = k->dy, .up = k->up, .y = k->dy, .width = KEPT_ROWS, .activation = KERN_SILU};
    const kern_glu_backward_args backward = {.gate = k->dy,
                                             .up = k->up,
                                             .dy = k->dy,
                                             .dgate = k->dy,
                                             .dup = k->up,
                                             .width = KEPT_ROWS,
                                             .activation = KERN_SILU};
    const kern_rmsnorm_backward_args norm_backward = {
        .x = k->up, .dy = k->dy, .dx = k->dy, .groups = 1, .width = KEPT_ROWS, .eps = 1e-6f, .accumulate = 1};
    const kern_short_conv_backward_args conv_backward = {.x = k->x, // as if it had KEPT_ROWS columns
                                                         .weight = k->taps,
                                                         .dy = k->dy,
                                                         .dx = k->up,
                                                         .grad_weight = k->grad,
                                                         .channels = KEPT_ROWS,
                                                         .taps = 4};
    emit(k, KERN_OP_RMSNORM, &norm);
    emit_forward(k);
    emit_gradient(k, k->dy);
    emit(k, KERN_OP_GLU, &glu);
    emit_gradient(k, k->dy);
    emit_input(k, k->dy, k->x, 1);
    emit(k, KERN_OP_GLU_BACKWARD, &backward);
    emit_input(k, k->dy, k->dx, 0);
    emit_gradient(k, k->dy);
    emit_input(k, k->up, k->x, 1);
    emit_gradient(k, k->up);
    emit(k, KERN_OP_RMSNORM, &norm);
    emit_activation(k);
    emit_gradient(k, k->dy);
    emit_forward(k);
    emit(k, KERN_OP_RMSNORM_BACKWARD, &norm_backward);
    emit_input(k, k->dy, k->dx, 0);
    emit_gradient(k, k->dy);
    emit(k, KERN_OP_SHORT_CONV_BACKWARD, &conv_backward);
    emit_input(k, k->up, k->dx, 1);
    emit_gradient(k, k->up);
}

static void check_plan(kernel_test *test, void (*emit_all)(const kept *k)) {
    layer l = make_layer(test, KEPT_ROWS, KEPT_COLS, 1, KERN_F32);
    const float *before = kernel_test_floats(test, KEPT_END, -1, 1);
    float *after[2] = {kernel_test_zero_floats(test, KEPT_END), kernel_test_zero_floats(test, KEPT_END)};
    void *memory = NULL, *const param[1] = {l.weight};
    kern_plan *plan = NULL;
    merged_row(test, KEPT_TOKENS);
    ck_assert_int_eq(kern_alloc(test->device, KEPT_END * sizeof(float), &memory), KERN_OK);
    ck_assert_int_eq(kern_plan_create(test->device, &plan), KERN_OK);
    const kept planned = make_kept(test, NULL, NULL, plan), launched = make_kept(test, l.weight, memory, NULL);
    emit_all(&planned);
    ck_assert_int_eq(kern_plan_seal(plan), KERN_OK);
    for (int i = 0; i < 2; i++) {
        const kern_memory place = {.param = param, .scratch = memory};
        ck_assert_int_eq(kern_upload(test->stream, memory, before, KEPT_END * sizeof(float)), KERN_OK);
        if (i == 0)
            ck_assert_int_eq(kern_plan_run(plan, test->stream, test->rows, &place), KERN_OK);
        else
            emit_all(&launched);
        ck_assert_int_eq(kern_download(test->stream, after[i], memory, KEPT_END * sizeof(float)), KERN_OK);
        ck_assert_int_eq(kern_synchronize(test->stream), KERN_OK);
    }
    kernel_test_assert_same(after[0], after[1], KEPT_END);
    for (int i = 0; i < KEPT_END; i++)
        ck_assert(isfinite(after[0][i]));
    kern_plan_free(plan);
    kern_free(test->device, memory);
    kern_weight_free(l.weight);
}

START_TEST(products_in_a_row_see_what_is_written) {
    kernel_test test;
    if (!kernel_test_open_fast(&test))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    check_plan(&test, emit_products);
    kernel_test_close(&test);
}
END_TEST

START_TEST(products_see_what_is_rounded_for_them) {
    kernel_test test;
    if (!kernel_test_open_fast(&test))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    check_plan(&test, emit_producers);
    kernel_test_close(&test);
}
END_TEST

static Suite *linear_suite(void) {
    Suite *suite = suite_create("kernels/linear");
    TCase *tcase = tcase_create("linear");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, forward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, row_alone_equals_row_in_batch, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, place_and_batch_size_do_not_matter, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, number_of_vectors_does_not_matter, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, very_many_vectors, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, slices_and_groups_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, row_of_groups_alone_equals_row_in_batch, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, backward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, gradients_of_slices_and_groups, 0, KERNEL_TEST_DEVICES);
#ifdef _OPENMP
    tcase_add_loop_test(tcase, threads_do_not_matter, 0, KERNEL_TEST_ISAS);
#endif
    tcase_add_test(tcase, fast_products_of_bf16_numbers);
    tcase_add_test(tcase, merging_asks_for_a_device_that_trains);
    tcase_add_test(tcase, fast_slices_and_groups);
    tcase_add_test(tcase, fast_products_of_many_shapes);
    tcase_add_test(tcase, products_in_a_row_see_what_is_written);
    tcase_add_test(tcase, products_see_what_is_rounded_for_them);
    tcase_add_test(tcase, reference_backward_equals_differences);
    tcase_add_test(tcase, refuses_what_it_cannot_do);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(linear_suite)

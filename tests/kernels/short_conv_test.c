// SPDX-License-Identifier: Apache-2.0
// Short convolution against its reference: rows of both kinds, states, documents, backward; the reference by
// differences.
//
// The expected values are made document by document with the reference, so the row table's bookkeeping is tested as
// well.
#include "kernels/ref/short_conv.h"
#include "tests/kernels/kernel_test.h"

enum { SLOTS = 4 };

typedef struct conv_case {
    int32_t channels, taps;
    int activation;
    bool bias;
    int32_t channel0; // channels of the weight before the case's
} conv_case;

static const conv_case cases[] = {
    {1, 4, KERN_SILU, false, 0},     {37, 4, KERN_SILU, true, 0},       {300, 4, KERN_IDENTITY, true, 0},
    {64, 1, KERN_SILU, true, 0},     {65, 3, KERN_SILU, false, 0},      {20, 9, KERN_IDENTITY, false, 0},
    {33, 4, KERN_SILU, true, 70},    {300, 4, KERN_IDENTITY, false, 5}, {16, 3, KERN_GELU_TANH, true, 1},
    {40, 4, KERN_SIGMOID, false, 0}, {7, 5, KERN_ELU1, true, 0},
};
enum { CASES = sizeof cases / sizeof cases[0] };

typedef struct conv_data {
    conv_case shape;
    float *x, *weight, *bias, *y, *state; // state (SLOTS, stride)
    double *x_wide, *weight_wide, *bias_wide, *state_wide;
    size_t stride; // floats of a slot, more than the operation uses
    size_t state0; // floats before it in a slot
} conv_data;

// A generated row of 1 and one of 3 tokens, prompts in and out of the grid, documents in two of them, one without slot.
static void mixed_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 2, 1, 9);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, 3, 77);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, 71, 13);
    kernel_test_boundary(test, 19);
    kernel_test_boundary(test, 20);
    kernel_test_boundary(test, 69);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 33, 0);
    kernel_test_boundary(test, 32);
    kernel_test_row(test, KERN_ROW_PROMPT, 3, 2, 64);
    kernel_test_prepare(test);
}

static conv_data make_data(kernel_test *test, conv_case shape) {
    conv_data d = {.shape = shape};
    size_t tokens = (size_t)test->rows->n_tokens, channels = (size_t)shape.channels, taps = (size_t)shape.taps;
    size_t wide = channels + (size_t)shape.channel0 + 3; // of the weight
    d.state0 = 16;
    d.stride = d.state0 + ((taps - 1) * channels + 15) / 16 * 16 + 16;
    d.x = kernel_test_floats(test, tokens * channels, -2, 2);
    d.weight = kernel_test_floats(test, wide * taps, -1, 1);
    d.bias = shape.bias ? kernel_test_floats(test, wide, -1, 1) : NULL;
    d.state = kernel_test_floats(test, SLOTS * d.stride, -1, 1);
    d.y = kernel_test_zero_floats(test, tokens * channels);
    d.x_wide = kernel_test_widened(test, d.x, tokens * channels);
    d.weight_wide = kernel_test_widened(test, d.weight + (size_t)shape.channel0 * taps, channels * taps);
    d.bias_wide = shape.bias ? kernel_test_widened(test, d.bias + shape.channel0, channels) : NULL;
    d.state_wide = kernel_test_widened(test, d.state, SLOTS * d.stride);
    test->rows->slot_stride = d.stride * sizeof(float);
    return d;
}

static kern_short_conv_args forward_args(const conv_data *d) {
    return (kern_short_conv_args){{d->x},           {d->weight},       {d->bias},     {d->state + d->state0},
                                  {d->y},           d->shape.channels, d->shape.taps, d->shape.activation,
                                  d->shape.channel0};
}

// Runs body(first token, tokens, state or NULL) for each document of each row.
typedef void (*document_body)(const conv_data *d, size_t first, size_t length, double *state, double *out);

static void each_document(const kern_rows *rows, const conv_data *d, document_body body, double *out) {
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        size_t first = (size_t)row->token0;
        double *state = row->slot >= 0 ? d->state_wide + (size_t)row->slot * d->stride + d->state0 : NULL;
        for (int32_t i = 0; i <= row->boundaries; i++) {
            size_t end = (size_t)(i < row->boundaries ? rows->boundary[row->boundary0 + i] : row->token0 + row->length);
            if (i > 0 && state)
                memset(state, 0, (size_t)(d->shape.taps - 1) * (size_t)d->shape.channels * sizeof *state);
            body(d, first, end - first, state, out);
            first = end;
        }
    }
}

static void reference_forward(const conv_data *d, size_t first, size_t length, double *state, double *out) {
    kern_ref_conv conv = {(size_t)d->shape.channels, (size_t)d->shape.taps, d->shape.activation};
    size_t at = first * conv.channels;
    kern_ref_short_conv(conv, d->x_wide + at, d->weight_wide, d->bias_wide, state, out + at, length);
}

START_TEST(forward_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int i = 0; i < CASES; i++) {
        mixed_rows(&test);
        conv_data d = make_data(&test, cases[i]);
        size_t count = (size_t)test.rows->n_tokens * (size_t)d.shape.channels;
        double *want = kernel_test_zero_doubles(&test, count);
        each_document(test.rows, &d, reference_forward, want);
        kern_short_conv_args args = forward_args(&d);
        kernel_test_launch(&test, KERN_OP_SHORT_CONV, &args);
        kernel_test_assert_norm(d.y, want, count, 5e-7);
        for (size_t j = 0; j < SLOTS * d.stride; j++) // copies, and nothing beside them touched
            ck_assert_msg((double)d.state[j] == d.state_wide[j], "state at %zu", j);
    }
    kernel_test_close(&test);
}
END_TEST

// One row in one launch, cut into launches anywhere, as prompt or generated: the same bits.
START_TEST(cuts_change_nothing) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    enum { LENGTH = 50 };
    static const int32_t cut[] = {1, 1, 2, 3, 16, 27};
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 3);
    kernel_test_prepare(&test);
    conv_data d = make_data(&test, cases[1]);
    float *state = kernel_test_copy(&test, d.state, SLOTS * d.stride), *whole = d.y;
    kern_short_conv_args args = forward_args(&d);
    kernel_test_launch(&test, KERN_OP_SHORT_CONV, &args);
    float *pieces = kernel_test_zero_floats(&test, (size_t)(LENGTH * d.shape.channels));
    int32_t done = 0;
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, i % 2 ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, 0, cut[i], 3 + done);
        kernel_test_prepare(&test);
        kern_short_conv_args piece = args;
        piece.x.f += done * d.shape.channels;
        piece.y.f = pieces + done * d.shape.channels;
        piece.state.f = state + d.state0;
        kernel_test_launch(&test, KERN_OP_SHORT_CONV, &piece);
        done += cut[i];
    }
    ck_assert_int_eq(done, LENGTH);
    kernel_test_assert_same(whole, pieces, LENGTH * d.shape.channels);
    kernel_test_assert_same(d.state, state, SLOTS * d.stride);
    kernel_test_close(&test);
}
END_TEST

typedef struct conv_gradients {
    const double *dy;
    double *dweight, *dbias;
} conv_gradients;
static conv_gradients wanted; // of the reference; one test a process

static void reference_backward(const conv_data *d, size_t first, size_t length, double *state, double *dx) {
    (void)state;
    kern_ref_conv conv = {(size_t)d->shape.channels, (size_t)d->shape.taps, d->shape.activation};
    size_t at = first * conv.channels;
    kern_ref_short_conv_backward(conv, d->x_wide + at, d->weight_wide, d->bias_wide, wanted.dy + at, dx + at,
                                 wanted.dweight, wanted.dbias, length);
}

static void check_backward(kernel_test *test, conv_case shape) {
    conv_data d = make_data(test, shape);
    size_t wide = (size_t)shape.channels + (size_t)shape.channel0 + 3, taps = (size_t)shape.taps;
    size_t channels = (size_t)shape.channels, weights = wide * taps, channel0 = (size_t)shape.channel0;
    size_t count = (size_t)test->rows->n_tokens * channels;
    float *dy = kernel_test_floats(test, count, -1, 1), *dx = kernel_test_zero_floats(test, count);
    float *dweight = kernel_test_floats(test, weights, -1, 1);
    float *dbias = shape.bias ? kernel_test_floats(test, wide, -1, 1) : NULL;
    double *dx_want = kernel_test_zero_doubles(test, count);
    wanted.dy = kernel_test_widened(test, dy, count);
    double *dweight_want = kernel_test_widened(test, dweight, weights); // what lies beside the channels stays
    double *dbias_want = dbias ? kernel_test_widened(test, dbias, wide) : NULL;
    wanted.dweight = dweight_want + channel0 * taps;
    wanted.dbias = dbias ? dbias_want + channel0 : NULL;
    each_document(test->rows, &d, reference_backward, dx_want);
    kern_short_conv_backward_args args = {{d.x},      {d.weight},       {d.bias},      {dy},
                                          {dx},       {dweight},        {dbias},       shape.channels,
                                          shape.taps, shape.activation, shape.channel0};
    kernel_test_launch(test, KERN_OP_SHORT_CONV_BACKWARD, &args);
    kernel_test_assert_norm(dx, dx_want, count, 1e-6);
    kernel_test_assert_norm(dweight, dweight_want, weights, 2e-6);
    if (dbias)
        kernel_test_assert_norm(dbias, dbias_want, wide, 2e-6);
}

START_TEST(backward_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int i = 0; i < CASES; i++) {
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, 71, 0);
        kernel_test_boundary(&test, 19);
        kernel_test_boundary(&test, 20);
        kernel_test_boundary(&test, 64);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, 1, 0);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, 130, 0);
        kernel_test_prepare(&test);
        check_backward(&test, cases[i]);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_are_free_of_threads) {
    enum { CHANNELS = 400, TAPS = 4, TOKENS = 150 };
    float *first_y = NULL, *first_grad = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        kernel_test test;
        kernel_test_threads(threads);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, KERN_ROW_PROMPT, -1, TOKENS, 0);
        kernel_test_prepare(&test);
        conv_data d = make_data(&test, (conv_case){CHANNELS, TAPS, KERN_SILU, false, 0});
        float *dy = kernel_test_floats(&test, TOKENS * CHANNELS, -1, 1);
        float *dx = kernel_test_zero_floats(&test, TOKENS * CHANNELS);
        float *grad = kernel_test_zero_floats(&test, CHANNELS * TAPS);
        kern_short_conv_args forward = forward_args(&d);
        kern_short_conv_backward_args backward = {{d.x},  {d.weight}, {NULL}, {dy},      {dx}, {grad},
                                                  {NULL}, CHANNELS,   TAPS,   KERN_SILU, 0};
        kernel_test_launch(&test, KERN_OP_SHORT_CONV, &forward);
        kernel_test_launch(&test, KERN_OP_SHORT_CONV_BACKWARD, &backward);
        if (threads == 1) {
            first_y = memcpy(malloc(sizeof(float) * TOKENS * CHANNELS), d.y, sizeof(float) * TOKENS * CHANNELS);
            first_grad = memcpy(malloc(sizeof(float) * CHANNELS * TAPS), grad, sizeof(float) * CHANNELS * TAPS);
        }
        kernel_test_assert_same(d.y, first_y, TOKENS * CHANNELS);
        kernel_test_assert_same(grad, first_grad, CHANNELS * TAPS);
        kernel_test_close(&test);
    }
    free(first_y);
    free(first_grad);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0}, other[4];
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_short_conv_args args = {{place}, {place}, {NULL}, {NULL}, {place}, 4, 4, KERN_SILU, 0};
    kernel_test_assert_refused(&test, KERN_OP_SHORT_CONV, &args, KERN_INVALID); // y is x
    args.y.f = other, args.taps = 0;
    kernel_test_assert_refused(&test, KERN_OP_SHORT_CONV, &args, KERN_INVALID);
    args.taps = 33;
    kernel_test_assert_refused(&test, KERN_OP_SHORT_CONV, &args, KERN_UNSUPPORTED);
    args.taps = 4, args.activation = KERN_ACTIVATIONS;
    kernel_test_assert_refused(&test, KERN_OP_SHORT_CONV, &args, KERN_INVALID);
    kern_short_conv_backward_args backward = {{place}, {place}, {NULL}, {place},   {other}, {NULL},
                                              {NULL},  4,       4,      KERN_SILU, 0};
    kernel_test_assert_refused(&test, KERN_OP_SHORT_CONV_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ----------------------------------------------------------------------------------------- references, by differences

enum { LENGTH = 6, CHANNELS = 3, TAPS = 4, COUNT = LENGTH * CHANNELS };
static const kern_ref_conv small = {CHANNELS, TAPS, KERN_SILU};
static struct { double x[COUNT], weight[CHANNELS * TAPS], bias[CHANNELS], dy[COUNT]; } point;

static double loss(void *context) {
    (void)context;
    double y[COUNT];
    kern_ref_short_conv(small, point.x, point.weight, point.bias, NULL, y, LENGTH);
    return kernel_test_dot(y, point.dy, COUNT);
}

START_TEST(reference_gradients) {
    double dx[COUNT], dweight[CHANNELS * TAPS] = {0}, dbias[CHANNELS] = {0};
    for (int i = 0; i < COUNT; i++)
        point.x[i] = 2 * sin(i + 1.0), point.dy[i] = cos(3.0 * i);
    for (int i = 0; i < CHANNELS * TAPS; i++)
        point.weight[i] = cos(5.0 * i);
    kern_ref_short_conv_backward(small, point.x, point.weight, point.bias, point.dy, dx, dweight, dbias, LENGTH);
    kernel_test_gradient("dx", loss, NULL, point.x, dx, COUNT, 1e-8);
    kernel_test_gradient("dweight", loss, NULL, point.weight, dweight, CHANNELS * TAPS, 1e-8);
    kernel_test_gradient("dbias", loss, NULL, point.bias, dbias, CHANNELS, 1e-8);
}
END_TEST

static Suite *short_conv_suite(void) {
    Suite *suite = suite_create("short_conv");
    TCase *tests = tcase_create("short_conv");
    tcase_add_loop_test(tests, forward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, cuts_change_nothing, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, backward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_threads, 0, KERNEL_TEST_ISAS);
    tcase_add_test(tests, shapes_are_checked);
    tcase_add_test(tests, reference_gradients);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(short_conv_suite)

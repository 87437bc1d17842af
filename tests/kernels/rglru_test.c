// SPDX-License-Identifier: Apache-2.0
// RG-LRU against its reference: rows of both kinds, states, documents, resets, backward; the reference by differences.
//
// Decays near one, where 1 - a^2 loses its digits when it is formed carelessly, and a decay of exactly one.
#include "kernels/ref/rglru.h"
#include "tests/kernels/sequence_test.h"

enum { SLOTS = 4, STATE0 = 16 };

typedef struct lru_data {
    int32_t width;
    size_t count, stride; // floats of an operand, of a slot
    float *x, *input_gate, *recurrence_gate, *param, *h, *state;
} lru_data;

// recurrence: bounds of the recurrence gate before its activation.
static lru_data make_data(kernel_test *test, int32_t width, double low, double high) {
    lru_data d = {.width = width, .stride = STATE0 + ((size_t)width + 31) / 16 * 16};
    d.count = (size_t)test->rows->n_tokens * (size_t)width;
    d.x = kernel_test_floats(test, d.count, -2, 2);
    d.input_gate = kernel_test_floats(test, d.count, -4, 4);
    d.recurrence_gate = kernel_test_floats(test, d.count, low, high);
    d.param = kernel_test_floats(test, (size_t)width, -7, 1);
    d.h = kernel_test_zero_floats(test, d.count);
    d.state = kernel_test_floats(test, SLOTS * d.stride, -1, 1);
    test->rows->slot_stride = d.stride * sizeof(float);
    return d;
}

static kern_rglru_args forward_args(const lru_data *d) {
    return (kern_rglru_args){{d->x}, {d->input_gate}, {d->recurrence_gate}, {d->param}, {d->state + STATE0},
                             {d->h}, d->width};
}

typedef struct lru_wide {
    double *x, *input_gate, *recurrence_gate, *h, *state;
    double *dh, *dx, *dinput, *drecurrence, *dparam; // backward
} lru_wide;

static lru_wide widen(kernel_test *test, const lru_data *d) {
    return (lru_wide){.x = kernel_test_widened(test, d->x, d->count),
                      .input_gate = kernel_test_widened(test, d->input_gate, d->count),
                      .recurrence_gate = kernel_test_widened(test, d->recurrence_gate, d->count),
                      .h = kernel_test_zero_doubles(test, d->count),
                      .state = kernel_test_widened(test, d->state, SLOTS * d->stride)};
}

// Channel c of every document of every row; backward too when w->dh is there.
static void reference(const kern_rows *rows, const lru_data *d, const lru_wide *w, size_t c) {
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        double *slot = row->slot < 0 ? NULL : &w->state[(size_t)row->slot * d->stride + STATE0 + c];
        double before = slot ? *slot : 0;
        for (int32_t first = row->token0, end; first < row->token0 + row->length; first = end) {
            for (end = first + 1;
                 end < row->token0 + row->length && rows->token_start[end] == rows->token_start[first];)
                end++;
            size_t at = (size_t)first * (size_t)d->width + c;
            kern_ref_rglru_input in = {w->x + at,
                                       w->input_gate + at,
                                       w->recurrence_gate + at,
                                       (double)d->param[c],
                                       (size_t)(end - first),
                                       (size_t)d->width,
                                       rows->token_position[first] == 0};
            before = kern_ref_rglru(in, first > row->token0 ? 0 : before, w->h + at);
            if (w->dh)
                kern_ref_rglru_backward(
                    in, w->h + at, w->dh + at,
                    (kern_ref_rglru_gradient){w->dx + at, w->dinput + at, w->drecurrence + at, w->dparam + c});
        }
        if (slot)
            *slot = before;
    }
}

START_TEST(forward_equals_reference) {
    static const int32_t width[] = {1, 37, 256, 300};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int i = 0; i < 4; i++) {
        sequence_mixed_rows(&test);
        lru_data d = make_data(&test, width[i], -6, 4);
        lru_wide w = widen(&test, &d);
        for (int32_t c = 0; c < width[i]; c++)
            reference(test.rows, &d, &w, (size_t)c);
        kern_rglru_args args = forward_args(&d);
        kernel_test_launch(&test, KERN_OP_RGLRU, &args);
        kernel_test_assert_norm(d.h, w.h, d.count, 1e-6);
        kernel_test_assert_norm(d.state, w.state, SLOTS * d.stride, 1e-6);
    }
    kernel_test_close(&test);
}
END_TEST

// log a down to 1e-9: the factor is sqrt(2e-9), not zero, and h does not drift.
START_TEST(decays_near_one_keep_their_digits) {
    enum { LENGTH = 500, W = 16 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, LENGTH, 0);
    kernel_test_prepare(&test);
    lru_data d = make_data(&test, W, -16, -13);
    lru_wide w = widen(&test, &d);
    for (size_t c = 0; c < W; c++)
        reference(test.rows, &d, &w, c);
    kern_rglru_args args = forward_args(&d);
    kernel_test_launch(&test, KERN_OP_RGLRU, &args);
    kernel_test_assert_norm(d.h + W, w.h + W, d.count - W, 3e-6); // 500 roundings
    kernel_test_close(&test);
}
END_TEST

START_TEST(cuts_and_neighbours_change_nothing) {
    enum { LENGTH = 50, AT = 5, W = 37 };
    static const int32_t cut[] = {1, 1, 2, 3, 16, 27};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_GENERATED, 2, AT, 9);
    kernel_test_row(&test, KERN_ROW_PROMPT, 0, LENGTH, 0);
    kernel_test_prepare(&test);
    lru_data d = make_data(&test, W, -6, 4);
    float *state = kernel_test_copy(&test, d.state, SLOTS * d.stride);
    float *pieces = kernel_test_zero_floats(&test, LENGTH * W);
    kern_rglru_args args = forward_args(&d);
    kernel_test_launch(&test, KERN_OP_RGLRU, &args);
    int32_t done = 0;
    for (size_t i = 0; i < sizeof cut / sizeof cut[0]; i++) {
        kernel_test_clear_rows(&test);
        kernel_test_row(&test, i % 2 ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, 0, cut[i], done);
        kernel_test_prepare(&test);
        kern_rglru_args piece = args;
        piece.x.f += (AT + done) * W, piece.input_gate.f += (AT + done) * W;
        piece.recurrence_gate.f += (AT + done) * W, piece.h.f = pieces + done * W;
        piece.state.f = state + STATE0;
        kernel_test_launch(&test, KERN_OP_RGLRU, &piece);
        done += cut[i];
    }
    kernel_test_assert_same(d.h + AT * W, pieces, LENGTH * W);
    kernel_test_assert_same(d.state, state, d.stride); // slot 0
    kernel_test_close(&test);
}
END_TEST

// Rows of documents of 1, 2 and 3 tokens, and one that continues a document from a zero state.
static void training_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 71, 0);
    kernel_test_boundary(test, 19);
    kernel_test_boundary(test, 20);
    kernel_test_boundary(test, 22);
    kernel_test_boundary(test, 64);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 1, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, 130, 64);
    kernel_test_boundary(test, 3);
    kernel_test_prepare(test);
}

typedef struct lru_gradients {
    float *dh, *dx, *dinput, *drecurrence, *dparam;
} lru_gradients;

static kern_rglru_backward_args backward_args(const lru_data *d, const lru_gradients *g) {
    return (kern_rglru_backward_args){{d->x},  {d->input_gate}, {d->recurrence_gate}, {d->param},  {d->h},  {g->dh},
                                      {g->dx}, {g->dinput},     {g->drecurrence},     {g->dparam}, d->width};
}

static lru_gradients make_gradients(kernel_test *test, const lru_data *d) {
    return (lru_gradients){.dh = kernel_test_floats(test, d->count, -1, 1),
                           .dx = kernel_test_zero_floats(test, d->count),
                           .dinput = kernel_test_zero_floats(test, d->count),
                           .drecurrence = kernel_test_zero_floats(test, d->count),
                           .dparam = kernel_test_floats(test, (size_t)d->width, -1, 1)};
}

static void check_backward(kernel_test *test, int32_t width, double low, double high) {
    training_rows(test);
    lru_data d = make_data(test, width, low, high);
    lru_gradients g = make_gradients(test, &d);
    lru_wide w = widen(test, &d);
    w.dh = kernel_test_widened(test, g.dh, d.count);
    w.dx = kernel_test_zero_doubles(test, d.count);
    w.dinput = kernel_test_zero_doubles(test, d.count);
    w.drecurrence = kernel_test_zero_doubles(test, d.count);
    w.dparam = kernel_test_widened(test, g.dparam, (size_t)width);
    for (int32_t c = 0; c < width; c++)
        reference(test->rows, &d, &w, (size_t)c);
    kern_rglru_args forward = forward_args(&d);
    kern_rglru_backward_args backward = backward_args(&d, &g);
    forward.state.f = NULL;
    kernel_test_launch(test, KERN_OP_RGLRU, &forward);
    kernel_test_launch(test, KERN_OP_RGLRU_BACKWARD, &backward);
    kernel_test_assert_norm(d.h, w.h, d.count, 1e-6);
    kernel_test_assert_norm(g.dx, w.dx, d.count, 2e-6);
    kernel_test_assert_norm(g.dinput, w.dinput, d.count, 2e-6);
    kernel_test_assert_norm(g.drecurrence, w.drecurrence, d.count, 5e-6);
    kernel_test_assert_norm(g.dparam, w.dparam, (size_t)width, 5e-6);
    backward.dx = backward.dh; // in place
    kernel_test_launch(test, KERN_OP_RGLRU_BACKWARD, &backward);
    kernel_test_assert_same(g.dh, g.dx, d.count);
}

START_TEST(backward_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu:16"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    check_backward(&test, 1, -6, 4);
    check_backward(&test, 300, -6, 4);
    check_backward(&test, 37, -20, -10); // the slope of the root at its bound
    kernel_test_close(&test);
}
END_TEST

// A gate so far down that log a is exactly 0: h stays, and every gradient is finite.
START_TEST(decay_of_exactly_one) {
    enum { LENGTH = 3 };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, LENGTH, 0);
    kernel_test_prepare(&test);
    float x[LENGTH] = {2, 3, 4}, gate[LENGTH] = {0, 0, 0}, far[LENGTH] = {-200, -200, -200}, param[1] = {-200};
    float h[LENGTH], dh[LENGTH] = {1, 1, 1}, dx[LENGTH], dinput[LENGTH], drecurrence[LENGTH], dparam[1] = {0};
    kern_rglru_args forward = {{x}, {gate}, {far}, {param}, {NULL}, {h}, 1};
    kern_rglru_backward_args backward = {{x},  {gate},   {far},         {param},  {h}, {dh},
                                         {dx}, {dinput}, {drecurrence}, {dparam}, 1};
    float *const lent[] = {x, gate, far, h, dh, dx, dinput, drecurrence};
    for (int i = 0; i < 8; i++)
        kernel_test_lend(&test, lent[i], sizeof x);
    kernel_test_lend(&test, param, sizeof param);
    kernel_test_lend(&test, dparam, sizeof dparam);
    kernel_test_launch(&test, KERN_OP_RGLRU, &forward);
    ck_assert(h[0] == 1 && h[1] == 1 && h[2] == 1);
    kernel_test_launch(&test, KERN_OP_RGLRU_BACKWARD, &backward);
    ck_assert(dx[0] == 1.5f && dx[1] == 0 && dinput[0] == 1.5f && isfinite(drecurrence[1]) && isfinite(dparam[0]));
    x[1] = NAN;
    param[0] = 0;
    kernel_test_launch(&test, KERN_OP_RGLRU, &forward);
    ck_assert(h[0] == 1 && isnan(h[2]));
    kernel_test_close(&test);
}
END_TEST

START_TEST(bits_are_free_of_threads) {
    enum { W = 1000 };
    float *first[2] = {NULL, NULL};
    for (int threads = 1; threads <= 3; threads++) {
        kernel_test test;
        kernel_test_threads(threads);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        training_rows(&test);
        lru_data d = make_data(&test, W, -6, 4);
        lru_gradients g = make_gradients(&test, &d);
        kern_rglru_args forward = forward_args(&d);
        kern_rglru_backward_args backward = backward_args(&d, &g);
        kernel_test_launch(&test, KERN_OP_RGLRU, &forward);
        kernel_test_launch(&test, KERN_OP_RGLRU_BACKWARD, &backward);
        if (threads == 1) {
            first[0] = memcpy(malloc(sizeof(float) * d.count), g.drecurrence, sizeof(float) * d.count);
            first[1] = memcpy(malloc(sizeof(float) * W), g.dparam, sizeof(float) * W);
        }
        kernel_test_assert_same(g.drecurrence, first[0], d.count);
        kernel_test_assert_same(g.dparam, first[1], W);
        kernel_test_close(&test);
    }
    free(first[0]);
    free(first[1]);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0}, other[4];
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_rglru_args args = {{place}, {place}, {place}, {place}, {NULL}, {place}, 4}; // h is x
    kernel_test_assert_refused(&test, KERN_OP_RGLRU, &args, KERN_INVALID);
    args.h.f = other, args.width = 0;
    kernel_test_assert_refused(&test, KERN_OP_RGLRU, &args, KERN_INVALID);
    kern_rglru_backward_args backward = {{place}, {place}, {place}, {place}, {NULL}, {place},
                                         {other}, {other}, {other}, {other}, 4};
    kernel_test_assert_refused(&test, KERN_OP_RGLRU_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ------------------------------------------------------------------------------------------ reference, by differences

enum { LENGTH = 7 };
static struct { double x[LENGTH], input_gate[LENGTH], recurrence_gate[LENGTH], param[1], dh[LENGTH]; } point;

static kern_ref_rglru_input point_input(bool reset) {
    return (kern_ref_rglru_input){point.x, point.input_gate, point.recurrence_gate, point.param[0], LENGTH, 1, reset};
}

static double loss(void *context) {
    double h[LENGTH];
    kern_ref_rglru(point_input(*(bool *)context), 0, h);
    return kernel_test_dot(h, point.dh, LENGTH);
}

START_TEST(reference_gradients) {
    bool reset = _i;
    double h[LENGTH], dx[LENGTH], dinput[LENGTH], drecurrence[LENGTH], dparam[1] = {0};
    for (int i = 0; i < LENGTH; i++) {
        point.x[i] = 2 * sin(i + 1.0), point.input_gate[i] = cos(3.0 * i), point.dh[i] = cos(5.0 * i + 1);
        point.recurrence_gate[i] = 2 * sin(4.0 * i);
    }
    point.param[0] = -2;
    kern_ref_rglru(point_input(reset), 0, h);
    kern_ref_rglru_backward(point_input(reset), h, point.dh,
                            (kern_ref_rglru_gradient){dx, dinput, drecurrence, dparam});
    kernel_test_gradient("x", loss, &reset, point.x, dx, LENGTH, 1e-8);
    kernel_test_gradient("input gate", loss, &reset, point.input_gate, dinput, LENGTH, 1e-8);
    kernel_test_gradient("recurrence gate", loss, &reset, point.recurrence_gate, drecurrence, LENGTH, 1e-7);
    kernel_test_gradient("parameter", loss, &reset, point.param, dparam, 1, 1e-7);
}
END_TEST

static Suite *rglru_suite(void) {
    Suite *suite = suite_create("rglru");
    TCase *tests = tcase_create("rglru");
    tcase_add_loop_test(tests, forward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, decays_near_one_keep_their_digits, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, cuts_and_neighbours_change_nothing, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, backward_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, decay_of_exactly_one, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_threads, 0, KERNEL_TEST_ISAS);
    tcase_add_test(tests, shapes_are_checked);
    tcase_add_loop_test(tests, reference_gradients, 0, 2);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(rglru_suite)

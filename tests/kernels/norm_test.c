// SPDX-License-Identifier: Apache-2.0
// RMSNorm and L2 normalisation against their references, their references against finite differences.
//
// The norms of all mixers: gates before and behind, centred, a weight a group or none. A token alone has the bits that
// it has in a batch, and a gradient those of any number of threads.
#include "kernels/ref/norm.h"
#include "tests/kernels/kernel_test.h"

static const struct {
    int32_t tokens, groups, width;
} shape[] = {{1, 1, 1},     {1, 1, 768},   {5, 3, 5},    {70, 4, 33},  {9, 2, 128},
             {700, 1, 130}, {131, 16, 64}, {60, 1, 700}, {12, 1, 1500}};
enum { SHAPES = sizeof shape / sizeof shape[0] };

static void some_rows(kernel_test *test, int32_t tokens) {
    kernel_test_clear_rows(test);
    if (tokens > 2) {
        kernel_test_row(test, KERN_ROW_GENERATED, -1, 2, 7);
        kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens - 2, 5);
    } else {
        kernel_test_row(test, KERN_ROW_GENERATED, -1, tokens, 0);
    }
    kernel_test_prepare(test);
}

typedef struct rms_kind {
    bool gated, gate_first, center, weighted, group_weights;
    int activation;
    float offset;
} rms_kind;

// RMSNorm, Griffin, Mesa and gated DeltaNet, KDA, GLA without weight, Mamba-2 whole and by group, xLSTM, LayerNorm.
static const rms_kind kinds[] = {
    {.weighted = true},
    {.weighted = true, .offset = 1},
    {.weighted = true, .gated = true, .activation = KERN_SILU},
    {.weighted = true, .gated = true, .activation = KERN_SIGMOID},
    {.gated = true, .activation = KERN_GELU_TANH},
    {.weighted = true, .gated = true, .activation = KERN_SILU, .gate_first = true},
    {.weighted = true, .gated = true, .activation = KERN_SILU, .gate_first = true, .group_weights = true},
    {.weighted = true, .gated = true, .activation = KERN_SIGMOID, .center = true, .group_weights = true},
    {.center = true},
    {.weighted = true, .gated = true, .activation = KERN_SIGMOID, .center = true, .gate_first = true, .offset = 0.5f},
};
enum { KINDS = sizeof kinds / sizeof kinds[0], SILU_KIND = 2 };

typedef struct rms_case {
    rms_kind kind;
    int32_t groups, width;
    size_t count, weights; // floats of x, of the weight
    double eps;
    float *x, *weight, *gate, *dy;
    double *y, *dx, *dgate, *dweight; // by the reference
} rms_case;

static rms_case make_rms(kernel_test *test, rms_kind kind, int32_t tokens, int32_t groups, int32_t width) {
    size_t w = (size_t)width, vectors = (size_t)tokens * (size_t)groups, count = vectors * w;
    rms_case c = {.kind = kind, .groups = groups, .width = width, .count = count, .eps = (double)1e-5f};
    c.weights = kind.group_weights ? (size_t)groups * w : w;
    c.x = kernel_test_floats(test, count, kind.center ? -1 : -2, kind.center ? 3 : 2);
    c.weight = kind.weighted ? kernel_test_floats(test, c.weights, -1, 2) : NULL;
    c.gate = kind.gated ? kernel_test_floats(test, count, -6, 6) : NULL;
    c.dy = kernel_test_floats(test, count, -1, 1);
    double *x = kernel_test_widened(test, c.x, count), *dy = kernel_test_widened(test, c.dy, count);
    double *weight = kind.weighted ? kernel_test_widened(test, c.weight, c.weights) : NULL;
    double *gate = kind.gated ? kernel_test_widened(test, c.gate, count) : NULL;
    c.y = kernel_test_zero_doubles(test, count);
    c.dx = kernel_test_zero_doubles(test, count);
    c.dgate = kind.gated ? kernel_test_zero_doubles(test, count) : NULL;
    c.dweight = kernel_test_zero_doubles(test, c.weights);
    kern_ref_norm norm = {w, c.eps, (double)kind.offset, kind.activation, kind.gate_first, kind.center};
    for (size_t i = 0; i < vectors; i++) {
        size_t at = i * w, group = kind.group_weights ? i % (size_t)groups * w : 0;
        const double *own = weight ? weight + group : NULL;
        kern_ref_rmsnorm(norm, x + at, own, gate ? gate + at : NULL, c.y + at);
        kern_ref_rmsnorm_backward(norm, x + at, own, gate ? gate + at : NULL, dy + at, c.dx + at,
                                  gate ? c.dgate + at : NULL, weight ? c.dweight + group : NULL);
    }
    return c;
}

static kern_rmsnorm_args forward_args(const rms_case *c, float *y) {
    return (kern_rmsnorm_args){{c->x},
                               {c->weight},
                               {c->gate},
                               {y},
                               c->groups,
                               c->width,
                               (float)c->eps,
                               c->kind.offset,
                               c->kind.activation,
                               c->kind.gate_first,
                               c->kind.center,
                               c->kind.group_weights};
}

static kern_rmsnorm_backward_args backward_args(const rms_case *c, float *dx, float *dgate, float *grad) {
    return (kern_rmsnorm_backward_args){{c->x},
                                        {c->weight},
                                        {c->gate},
                                        {c->dy},
                                        {dx},
                                        {dgate},
                                        {grad},
                                        c->groups,
                                        c->width,
                                        (float)c->eps,
                                        c->kind.offset,
                                        0,
                                        c->kind.activation,
                                        c->kind.gate_first,
                                        c->kind.center,
                                        c->kind.group_weights};
}

static void check_rms_backward(kernel_test *test, const rms_case *c) {
    const size_t count = c->count, told = c->width > 1 ? count : 0; // of width 1 the gradient is all but zero
    float *dx = kernel_test_floats(test, count, -1, 1), *dx0 = kernel_test_copy(test, dx, count);
    float *dgate = c->gate ? kernel_test_zero_floats(test, count) : NULL;
    float *grad = c->weight ? kernel_test_floats(test, c->weights, -1, 1) : NULL;
    double *sum_want = kernel_test_widened(test, dx, count);
    kern_rmsnorm_backward_args backward = backward_args(c, dx, dgate, grad);
    for (size_t i = 0; grad && i < c->weights; i++)
        c->dweight[i] += (double)grad[i];
    kernel_test_launch(test, KERN_OP_RMSNORM_BACKWARD, &backward);
    kernel_test_assert_norm(dx, c->dx, told, 3e-6);
    if (grad)
        kernel_test_assert_norm(grad, c->dweight, c->weights, 2e-6);
    if (dgate)
        kernel_test_assert_norm(dgate, c->dgate, told, 3e-6);
    backward.dx.f = dx0;
    backward.accumulate = 1;
    kernel_test_launch(test, KERN_OP_RMSNORM_BACKWARD, &backward);
    for (size_t i = 0; i < count; i++)
        sum_want[i] += c->dx[i];
    kernel_test_assert_norm(dx0, sum_want, count, 2e-6);
    backward.dx = backward.dy, backward.accumulate = 0; // in place
    kernel_test_launch(test, KERN_OP_RMSNORM_BACKWARD, &backward);
    kernel_test_assert_same(c->dy, dx, count);
}

static void check_rms(kernel_test *test, rms_kind kind, int32_t tokens, int32_t groups, int32_t width) {
    rms_case c = make_rms(test, kind, tokens, groups, width);
    float *y = kernel_test_zero_floats(test, c.count);
    some_rows(test, tokens);
    kern_rmsnorm_args forward = forward_args(&c, y);
    kernel_test_launch(test, KERN_OP_RMSNORM, &forward);
    kernel_test_assert_norm(y, c.y, kind.center && width == 1 ? 0 : c.count, 1e-6);
    check_rms_backward(test, &c);
    forward.y.f = c.x; // in place
    kernel_test_launch(test, KERN_OP_RMSNORM, &forward);
    kernel_test_assert_same(c.x, y, c.count);
}

START_TEST(rmsnorm_equals_reference) {
    for (int s = 0; s < SHAPES; s++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        for (int k = 0; k < KINDS; k++)
            check_rms(&test, kinds[k], shape[s].tokens, shape[s].groups, shape[s].width);
        kernel_test_close(&test);
    }
}
END_TEST

static void check_l2(kernel_test *test, int32_t tokens, int32_t groups, int32_t width) {
    size_t vectors = (size_t)tokens * (size_t)groups, count = vectors * (size_t)width;
    float *x = kernel_test_floats(test, count, -1, 1), *dy = kernel_test_floats(test, count, -1, 1);
    double *wide_x = kernel_test_widened(test, x, count), *wide_dy = kernel_test_widened(test, dy, count);
    double *y = kernel_test_zero_doubles(test, count), *dx = kernel_test_zero_doubles(test, count);
    const float eps = 1e-6f;
    for (size_t i = 0; i < count; i += (size_t)width) {
        kern_ref_l2norm(wide_x + i, y + i, (size_t)width, (double)eps);
        kern_ref_l2norm_backward(wide_x + i, wide_dy + i, dx + i, (size_t)width, (double)eps);
    }
    some_rows(test, tokens);
    kern_l2norm_backward_args backward = {{x}, {dy}, {dy}, groups, width, eps}; // dx is dy
    kernel_test_launch(test, KERN_OP_L2NORM_BACKWARD, &backward);
    kernel_test_assert_norm(dy, dx, width > 1 ? count : 0, 2e-6);
    kern_l2norm_args forward = {{x}, {x}, groups, width, eps}; // y is x
    kernel_test_launch(test, KERN_OP_L2NORM, &forward);
    kernel_test_assert_norm(x, y, count, 5e-7);
}

START_TEST(l2norm_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int s = 0; s < SHAPES; s++)
        check_l2(&test, shape[s].tokens, shape[s].groups, shape[s].width);
    kernel_test_close(&test);
}
END_TEST

// A token alone and at any place of a batch; one, two and three threads.
START_TEST(bits_are_free_of_batch_and_threads) {
    enum { TOKENS = 333, GROUPS = 3, WIDTH = 77, COUNT = TOKENS * GROUPS * WIDTH };
    float *first_dx[KINDS] = {NULL}, *first_grad[KINDS] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        kernel_test test;
        kernel_test_threads(threads);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        for (int k = 0; k < KINDS; k++) {
            test.seed = 3;
            rms_case c = make_rms(&test, kinds[k], TOKENS, GROUPS, WIDTH);
            float *y = kernel_test_zero_floats(&test, COUNT), *alone = kernel_test_zero_floats(&test, COUNT);
            float *dx = kernel_test_zero_floats(&test, COUNT), *sum = kernel_test_zero_floats(&test, c.weights);
            kern_rmsnorm_args forward = forward_args(&c, y);
            kern_rmsnorm_backward_args backward = backward_args(&c, dx, NULL, c.weight ? sum : NULL);
            some_rows(&test, TOKENS);
            kernel_test_launch(&test, KERN_OP_RMSNORM, &forward);
            if (!test.cuda)
                kernel_test_launch(&test, KERN_OP_RMSNORM_BACKWARD, &backward);
            some_rows(&test, 1);
            for (int t = 0; t < TOKENS; t++) {
                kern_rmsnorm_args one = forward;
                one.x.f += t * GROUPS * WIDTH;
                if (one.gate.f)
                    one.gate.f += t * GROUPS * WIDTH;
                one.y.f = alone + t * GROUPS * WIDTH;
                kernel_test_launch(&test, KERN_OP_RMSNORM, &one);
            }
            kernel_test_assert_same(y, alone, COUNT);
            if (threads == 1) {
                first_dx[k] = memcpy(malloc(COUNT * sizeof *dx), dx, COUNT * sizeof *dx);
                first_grad[k] = memcpy(malloc(c.weights * sizeof *sum), sum, c.weights * sizeof *sum);
            }
            kernel_test_assert_same(dx, first_dx[k], COUNT);
            kernel_test_assert_same(sum, first_grad[k], c.weights);
        }
        kernel_test_close(&test);
    }
    for (int k = 0; k < KINDS; k++) {
        free(first_dx[k]);
        free(first_grad[k]);
    }
}
END_TEST

// Very many vectors, which a device may go about otherwise, and the same ones a few at a time.
START_TEST(bits_are_free_of_the_number_of_vectors) {
    enum { TOKENS = 300, GROUPS = 8, WIDTH = 260, FEW = 5, COUNT = TOKENS * GROUPS * WIDTH };
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int k = 0; k < KINDS; k++) {
        rms_case c = make_rms(&test, kinds[k], TOKENS, GROUPS, WIDTH);
        float *y = kernel_test_zero_floats(&test, COUNT), *few = kernel_test_zero_floats(&test, COUNT);
        const kern_rmsnorm_args all = forward_args(&c, y);
        some_rows(&test, TOKENS);
        kernel_test_launch(&test, KERN_OP_RMSNORM, &all);
        some_rows(&test, FEW);
        for (int t = 0; t < TOKENS; t += FEW) {
            kern_rmsnorm_args some = all;
            some.x.f += t * GROUPS * WIDTH;
            if (some.gate.f)
                some.gate.f += t * GROUPS * WIDTH;
            some.y.f = few + t * GROUPS * WIDTH;
            kernel_test_launch(&test, KERN_OP_RMSNORM, &some);
        }
        kernel_test_assert_same(y, few, COUNT);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(nan_stays) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    rms_case c = make_rms(&test, kinds[SILU_KIND], 2, 1, 40);
    float *y = kernel_test_zero_floats(&test, 80);
    c.x[3] = NAN;
    c.gate[79] = NAN;
    some_rows(&test, 2);
    kern_rmsnorm_args args = forward_args(&c, y);
    kernel_test_launch(&test, KERN_OP_RMSNORM, &args);
    for (int i = 0; i < 40; i++)
        ck_assert(isnan(y[i]));
    ck_assert(isnan(y[79]) && isfinite(y[40]));
    kernel_test_close(&test);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_rmsnorm_args args = {{place}, {place}, {NULL}, {place}, 0, 4, 1e-5f, 0, KERN_SILU, 0, 0, 0};
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM, &args, KERN_INVALID);
    args.groups = 1, args.width = 0;
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM, &args, KERN_INVALID);
    args.width = 4, args.eps = NAN;
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM, &args, KERN_INVALID);
    kern_rmsnorm_backward_args backward = {{place}, {place}, {NULL}, {place}, {place},   {place}, {place}, 1,
                                           4,       1e-5f,   0,      0,       KERN_SILU, 0,       0,       0};
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM_BACKWARD, &backward, KERN_INVALID); // dgate without gate
    backward.gate = backward.x, backward.grad_weight.p = NULL; // a weight without its gradient
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM_BACKWARD, &backward, KERN_INVALID);
    args.eps = 0, args.gate_first = 1; // without gate
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM, &args, KERN_INVALID);
    args.gate = args.x, args.activation = KERN_ACTIVATIONS;
    kernel_test_assert_refused(&test, KERN_OP_RMSNORM, &args, KERN_INVALID);
    kern_l2norm_args l2 = {{place}, {NULL}, 1, 4, 1e-6f};
    kernel_test_assert_refused(&test, KERN_OP_L2NORM, &l2, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ----------------------------------------------------------------------------------------- references, by differences

enum { WIDTH = 11 };
static struct {
    double x[WIDTH], weight[WIDTH], gate[WIDTH], dy[WIDTH];
    kern_ref_norm norm;
    bool l2;
} point;

static double loss(void *context) {
    (void)context;
    double y[WIDTH];
    if (point.l2)
        kern_ref_l2norm(point.x, y, WIDTH, 1e-3);
    else
        kern_ref_rmsnorm(point.norm, point.x, point.weight, point.gate, y);
    return kernel_test_dot(y, point.dy, WIDTH);
}

START_TEST(reference_gradients) {
    double dx[WIDTH], dgate[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        point.x[i] = sin(i + 1.0), point.weight[i] = cos(3.0 * i), point.gate[i] = 2 * sin(5.0 * i);
        point.dy[i] = cos(7.0 * i + 1);
    }
    for (int kind = 0; kind < 4; kind++) {
        double dweight[WIDTH] = {0};
        point.norm = (kern_ref_norm){WIDTH, 1e-3, 0.5, KERN_SILU, kind & 1, kind & 2};
        kern_ref_rmsnorm_backward(point.norm, point.x, point.weight, point.gate, point.dy, dx, dgate, dweight);
        kernel_test_gradient("rms dx", loss, NULL, point.x, dx, WIDTH, 1e-8);
        kernel_test_gradient("rms dgate", loss, NULL, point.gate, dgate, WIDTH, 1e-8);
        kernel_test_gradient("rms dweight", loss, NULL, point.weight, dweight, WIDTH, 1e-8);
    }
    point.l2 = true;
    kern_ref_l2norm_backward(point.x, point.dy, dx, WIDTH, 1e-3);
    kernel_test_gradient("l2 dx", loss, NULL, point.x, dx, WIDTH, 1e-8);
}
END_TEST

static Suite *norm_suite(void) {
    Suite *suite = suite_create("norm");
    TCase *tests = tcase_create("norm");
    tcase_add_loop_test(tests, rmsnorm_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, l2norm_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_batch_and_threads, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_the_number_of_vectors, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, nan_stays, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, shapes_are_checked);
    tcase_add_test(tests, reference_gradients);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(norm_suite)

// SPDX-License-Identifier: Apache-2.0
// Gates of every law against their reference: also element by element, because a decay near one is summed over long
// horizons.
//
// Far ends, every cap that is allowed, gradients of the laws' own parameters, bits free of batch and threads, the
// reference by finite differences.
#include "kernels/ref/gates.h"
#include "tests/kernels/kernel_test.h"

static void rows_of(kernel_test *test, int32_t tokens) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_PROMPT, -1, tokens, 0);
    kernel_test_prepare(test);
}

static kern_gates sigmoid_gates(int32_t heads, float cap) {
    return (kern_gates){.heads = heads,
                        .channels = 1,
                        .decay_law = KERN_DECAY_LAW_SIGMOID,
                        .write_law = KERN_WRITE_LAW_SIGMOID,
                        .divisor = 1,
                        .gamma_cap = cap,
                        .write_factor = 1};
}

// Mesa with its caps, GLA with and without clamp, gated DeltaNet, KDA twice, Mamba-2 with and without limits, DeltaNet
// with eigenvalues down to -1, and without beta.
static const kern_gates laws[] = {
    {1, 1, KERN_DECAY_LAW_SIGMOID, KERN_WRITE_LAW_SIGMOID, .divisor = 1, .gamma_cap = 1, .write_factor = 1},
    {1, 1, KERN_DECAY_LAW_SIGMOID, KERN_WRITE_LAW_SIGMOID, .divisor = 1, .gamma_cap = 0.9975f, .write_factor = 1},
    {1, 1, KERN_DECAY_LAW_SIGMOID, KERN_WRITE_LAW_SIGMOID, .divisor = 1, .gamma_cap = 0.5f, .write_factor = 1},
    {1, 20, KERN_DECAY_LAW_SIGMOID, KERN_WRITE_LAW_NONE, .divisor = 16, .gamma_cap = 1},
    {1, 5, KERN_DECAY_LAW_SIGMOID, KERN_WRITE_LAW_NONE, .divisor = 16, .gamma_cap = 1, .clamp_min = -0.1f},
    {1, 1, KERN_DECAY_LAW_EXPONENTIAL, KERN_WRITE_LAW_SIGMOID, .write_factor = 2},
    {1, 19, KERN_DECAY_LAW_EXPONENTIAL, KERN_WRITE_LAW_SIGMOID, .write_factor = 1},
    {1, 33, KERN_DECAY_LAW_BOUNDED, KERN_WRITE_LAW_SIGMOID, .lower_bound = -5, .write_factor = 2},
    {1, 1, KERN_DECAY_LAW_BOUNDED, KERN_WRITE_LAW_NONE, .lower_bound = -3},
    {1, 1, KERN_DECAY_LAW_STEP, KERN_WRITE_LAW_STEP, .step_max = INFINITY},
    {1, 1, KERN_DECAY_LAW_STEP, KERN_WRITE_LAW_STEP, .step_min = 0.05f, .step_max = 1.5f},
    {1, 1, KERN_DECAY_LAW_NONE, KERN_WRITE_LAW_SIGMOID, .write_factor = 2},
    {1, 1, KERN_DECAY_LAW_NONE, KERN_WRITE_LAW_CONSTANT, .write_factor = 2},
};
enum { LAWS = sizeof laws / sizeof laws[0] };

// Operands that the law does not use are NULL.
typedef struct gates_data {
    kern_gates gates;
    size_t decays, writes, channels; // floats of g, of beta, of dt_bias
    float *a, *b, *A_log, *dt_bias, *g, *beta, *dg, *dbeta, *da, *db, *grad_A_log, *grad_dt_bias;
} gates_data;

static bool has_parameters(const kern_gates *f) {
    return f->decay_law == KERN_DECAY_LAW_EXPONENTIAL || f->decay_law == KERN_DECAY_LAW_BOUNDED ||
           f->decay_law == KERN_DECAY_LAW_STEP;
}

static gates_data make_data(kernel_test *test, kern_gates gates, int32_t tokens, int32_t heads, double range) {
    gates_data d = {.gates = gates};
    d.gates.heads = heads;
    d.writes = (size_t)tokens * (size_t)heads;
    d.channels = (size_t)heads * (size_t)gates.channels;
    d.decays = (size_t)tokens * d.channels;
    if (gates.decay_law != KERN_DECAY_LAW_NONE) {
        d.a = kernel_test_floats(test, d.decays, -range, range);
        d.g = kernel_test_zero_floats(test, d.decays);
        d.dg = kernel_test_floats(test, d.decays, -1, 1);
        d.da = kernel_test_zero_floats(test, d.decays);
    }
    if (gates.write_law != KERN_WRITE_LAW_NONE) {
        d.beta = kernel_test_zero_floats(test, d.writes);
        d.dbeta = kernel_test_floats(test, d.writes, -1, 1);
    }
    if (gates.write_law == KERN_WRITE_LAW_SIGMOID) {
        d.b = kernel_test_floats(test, d.writes, -range, range);
        d.db = kernel_test_zero_floats(test, d.writes);
    }
    if (has_parameters(&gates)) {
        d.A_log = kernel_test_floats(test, (size_t)heads, -1, 2);
        d.dt_bias = kernel_test_floats(test, d.channels, -2, 1);
        d.grad_A_log = kernel_test_floats(test, (size_t)heads, -1, 1);
        d.grad_dt_bias = kernel_test_floats(test, d.channels, -1, 1);
    }
    return d;
}

static kern_gates_args forward_args(const gates_data *d) {
    return (kern_gates_args){{d->a}, {d->b}, {d->A_log}, {d->dt_bias}, {d->g}, {d->beta}, d->gates};
}

static kern_gates_backward_args backward_args(const gates_data *d) {
    return (kern_gates_backward_args){{d->a},  {d->b},  {d->A_log},      {d->dt_bias},      {d->dg}, {d->dbeta},
                                      {d->da}, {d->db}, {d->grad_A_log}, {d->grad_dt_bias}, d->gates};
}

static double *widened(kernel_test *test, const float *x, size_t count) {
    return x ? kernel_test_widened(test, x, count) : NULL;
}

static void check_close(const char *what, const float *got, const double *want, size_t count, double tolerance) {
    for (size_t i = 0; got && i < count; i++)
        ck_assert_msg(fabs((double)got[i] - want[i]) <= tolerance * fabs(want[i]) + 1e-37, "%s[%zu] = %.9g, not %.9g",
                      what, i, (double)got[i], want[i]);
}

static void check_gates(kernel_test *test, int law, int32_t tokens, int32_t heads, double range) {
    gates_data d = make_data(test, laws[law], tokens, heads, range);
    kern_ref_gates_input in = {widened(test, d.a, d.decays), widened(test, d.b, d.writes),
                               widened(test, d.A_log, (size_t)heads), widened(test, d.dt_bias, d.channels)};
    double *g = kernel_test_zero_doubles(test, d.decays), *beta = kernel_test_zero_doubles(test, d.writes);
    double *dg = widened(test, d.dg, d.decays), *dbeta = widened(test, d.dbeta, d.writes);
    kern_ref_gates_gradient out = {kernel_test_zero_doubles(test, d.decays), kernel_test_zero_doubles(test, d.writes),
                                   widened(test, d.grad_A_log, (size_t)heads),
                                   widened(test, d.grad_dt_bias, d.channels)};
    for (size_t t = 0; t < (size_t)tokens; t++) {
        size_t at = t * d.channels, write = t * (size_t)heads;
        kern_ref_gates_input token = {in.a ? in.a + at : NULL, in.b ? in.b + write : NULL, in.A_log, in.dt_bias};
        kern_ref_gates(&d.gates, token, g + at, beta + write);
        kern_ref_gates_backward(&d.gates, token, dg ? dg + at : NULL, dbeta ? dbeta + write : NULL,
                                (kern_ref_gates_gradient){out.da + at, out.db + write, out.dA_log, out.ddt_bias});
    }
    rows_of(test, tokens);
    kern_gates_args forward = forward_args(&d);
    kernel_test_launch(test, KERN_OP_GATES, &forward);
    check_close("g", d.g, g, d.decays, has_parameters(&d.gates) ? 1e-5 : 2e-6); // e^A_log z may be a hundred
    check_close("beta", d.beta, beta, d.writes, 1e-6);
    kern_gates_backward_args backward = backward_args(&d);
    backward.da = backward.dg, backward.db = d.b ? backward.dbeta : backward.db; // in place
    kernel_test_launch(test, KERN_OP_GATES_BACKWARD, &backward);
    if (d.a)
        kernel_test_assert_norm(d.dg, out.da, d.decays, 1e-6);
    if (d.b)
        kernel_test_assert_norm(d.dbeta, out.db, d.writes, 1e-6);
    if (d.A_log) {
        kernel_test_assert_norm(d.grad_A_log, out.dA_log, (size_t)heads, 3e-6);
        kernel_test_assert_norm(d.grad_dt_bias, out.ddt_bias, d.channels, 3e-6);
    }
}

START_TEST(gates_equal_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    for (int law = 0; law < LAWS; law++) {
        check_gates(&test, law, 1, 1, 5);
        check_gates(&test, law, 3, 7, 5);
        check_gates(&test, law, 257, 17, has_parameters(&laws[law]) ? 12 : 80);
    }
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float a[6] = {-1e30f, -200, 200, 1e30f, 0, NAN}, b[6] = {-1e30f, -200, 200, 1e30f, NAN, 0}, g[6], beta[6];
    kernel_test_lend(&test, a, sizeof a);
    kernel_test_lend(&test, b, sizeof b);
    kernel_test_lend(&test, g, sizeof g);
    kernel_test_lend(&test, beta, sizeof beta);
    rows_of(&test, 6);
    kern_gates_args args = {.a.f = a, .b.f = b, .g.f = g, .beta.f = beta, .gates = sigmoid_gates(1, 0.9975f)};
    kernel_test_launch(&test, KERN_OP_GATES, &args);
    ck_assert(g[0] == -1e30f && g[1] == -200);
    const double cap_term = log(0.9975);
    ck_assert_double_le(fabs((double)g[2] - cap_term), 1e-8);
    ck_assert_double_le(fabs((double)g[3] - cap_term), 1e-8);
    ck_assert(beta[0] >= 0 && beta[0] < 1e-37f && beta[2] == 1 && beta[3] == 1);
    ck_assert(isnan(g[5]) && isnan(beta[4]) && isnan(g[4]));
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends_of_the_laws_with_parameters) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float a[3] = {-1000, 1000, NAN}, A_log[1] = {0}, dt_bias[1] = {0}, g[3], beta[3];
    kernel_test_lend(&test, a, sizeof a);
    kernel_test_lend(&test, A_log, sizeof A_log);
    kernel_test_lend(&test, dt_bias, sizeof dt_bias);
    kernel_test_lend(&test, g, sizeof g);
    kernel_test_lend(&test, beta, sizeof beta);
    rows_of(&test, 3);
    kern_gates_args args = {.a.f = a, .A_log.f = A_log, .dt_bias.f = dt_bias, .g.f = g, .gates = laws[8]};
    kernel_test_launch(&test, KERN_OP_GATES, &args); // bounded
    ck_assert(g[0] <= 0 && g[0] > -1e-35f && g[1] == -3 && isnan(g[2]));
    args.beta.f = beta, args.gates = laws[9];
    kernel_test_launch(&test, KERN_OP_GATES, &args); // step
    ck_assert(g[0] <= 0 && g[0] > -1e-35f && g[1] == -1000 && beta[1] == 1000 && isnan(g[2]) && isnan(beta[2]));
    args.gates = laws[10]; // with limits
    kernel_test_launch(&test, KERN_OP_GATES, &args);
    ck_assert(g[0] == -0.05f && beta[0] == 0.05f && g[1] == -1.5f && beta[1] == 1.5f && isnan(g[2]));
    kernel_test_close(&test);
}
END_TEST

// A token alone and in a batch; the sums of one, two and three threads.
START_TEST(bits_are_free_of_batch_and_threads) {
    enum { TOKENS = 900, HEADS = 13 };
    float *sums[LAWS] = {NULL};
    for (int threads = 1; threads <= 3; threads++) {
        kernel_test test;
        kernel_test_threads(threads);
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        for (int law = 0; law < LAWS; law++) {
            test.seed = 3;
            gates_data d = make_data(&test, laws[law], TOKENS, HEADS, 9);
            gates_data alone = d;
            alone.g = kernel_test_zero_floats(&test, d.decays);
            rows_of(&test, TOKENS);
            kern_gates_args args = forward_args(&d);
            kern_gates_backward_args backward = backward_args(&d);
            kernel_test_launch(&test, KERN_OP_GATES, &args);
            kernel_test_launch(&test, KERN_OP_GATES_BACKWARD, &backward);
            rows_of(&test, 1);
            for (int t = 0; d.g && t < TOKENS; t += 37) {
                kern_gates_args one = forward_args(&alone);
                one.a.f += t * d.channels, one.g.f += t * d.channels;
                if (one.b.f)
                    one.b.f += t * HEADS;
                kernel_test_launch(&test, KERN_OP_GATES, &one);
                kernel_test_assert_same(one.g.f, d.g + t * d.channels, d.channels);
            }
            if (!d.A_log)
                continue;
            if (threads == 1)
                sums[law] = memcpy(malloc(sizeof(float) * d.channels), d.grad_dt_bias, sizeof(float) * d.channels);
            kernel_test_assert_same(d.grad_dt_bias, sums[law], d.channels);
        }
        kernel_test_close(&test);
    }
    for (int law = 0; law < LAWS; law++)
        free(sums[law]);
}
END_TEST

START_TEST(shapes_are_checked) {
    kernel_test test;
    float place[4] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_gates_args args = {.a.f = place, .b.f = place, .g.f = place, .beta.f = place, .gates = sigmoid_gates(0, 1)};
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.heads = 4, args.gates.gamma_cap = 0;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.gamma_cap = 1.5f;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.gamma_cap = 0.25f;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_UNSUPPORTED);
    args.gates.gamma_cap = 0.75f, args.gates.write_factor = 2; // a cap knows beta below 1 only
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.gamma_cap = 1, args.beta.p = NULL;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.beta.f = place, args.gates.decay_law = KERN_DECAY_LAW_EXPONENTIAL; // without its parameters
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.A_log.f = args.dt_bias.f = place, args.gates.write_law = KERN_WRITE_LAW_STEP; // of another decay law
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    args.gates.decay_law = 9;
    kernel_test_assert_refused(&test, KERN_OP_GATES, &args, KERN_INVALID);
    kern_gates_backward_args backward = {
        .a.f = place, .b.f = place, .dg.f = place, .dbeta.f = place, .da.f = place, .gates = sigmoid_gates(4, 1)};
    kernel_test_assert_refused(&test, KERN_OP_GATES_BACKWARD, &backward, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ------------------------------------------------------------------------------------------ reference, by differences

enum { HEADS = 3, MOST = HEADS * 33 };
static struct {
    kern_gates gates;
    double a[MOST], b[HEADS], A_log[HEADS], dt_bias[MOST], dg[MOST], dbeta[HEADS];
} point;

static double loss(void *context) {
    (void)context;
    double g[MOST] = {0}, beta[HEADS] = {0};
    kern_ref_gates(&point.gates, (kern_ref_gates_input){point.a, point.b, point.A_log, point.dt_bias}, g, beta);
    return kernel_test_dot(g, point.dg, MOST) + kernel_test_dot(beta, point.dbeta, HEADS);
}

START_TEST(reference_gradients) {
    double da[MOST] = {0}, db[HEADS] = {0}, dA_log[HEADS] = {0}, ddt_bias[MOST] = {0};
    point.gates = laws[_i];
    point.gates.heads = HEADS;
    for (int i = 0; i < MOST; i++)
        point.a[i] = 4 * sin(i + 1.0), point.dt_bias[i] = cos(3.0 * i), point.dg[i] = cos(7.0 * i + 1);
    for (int i = 0; i < HEADS; i++)
        point.b[i] = 2 * cos(i + 2.0), point.A_log[i] = sin(4.0 * i), point.dbeta[i] = sin(i + 0.5);
    kern_ref_gates_backward(&point.gates, (kern_ref_gates_input){point.a, point.b, point.A_log, point.dt_bias},
                            point.dg, point.dbeta, (kern_ref_gates_gradient){da, db, dA_log, ddt_bias});
    kernel_test_gradient("a", loss, NULL, point.a, da, (size_t)(HEADS * point.gates.channels), 1e-7);
    kernel_test_gradient("b", loss, NULL, point.b, db, HEADS, 1e-7);
    kernel_test_gradient("A_log", loss, NULL, point.A_log, dA_log, HEADS, 1e-7);
    kernel_test_gradient("dt_bias", loss, NULL, point.dt_bias, ddt_bias, (size_t)(HEADS * point.gates.channels), 1e-7);
}
END_TEST

static Suite *gates_suite(void) {
    Suite *suite = suite_create("gates");
    TCase *tests = tcase_create("gates");
    tcase_add_loop_test(tests, gates_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends_of_the_laws_with_parameters, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, bits_are_free_of_batch_and_threads, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, shapes_are_checked);
    tcase_add_loop_test(tests, reference_gradients, 0, LAWS);
    tcase_set_timeout(tests, 60);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(gates_suite)

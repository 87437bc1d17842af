// SPDX-License-Identifier: Apache-2.0
// Where a looped model's token is read: by threshold and bound of its row, against the reference.
//
// Rows of both kinds with all the ways to say it; a gate that is no number. The losses of gates against references,
// their derivatives against differences, and where the best gate is known.
#include "kernels/ref/exit.h"
#include "tests/kernels/kernel_test.h"

enum { LOOPS = 5, TOKENS = 90, STRIDE = 96, WIDTH = 37 };

static const kern_exit wanted[] = {{0.5f, 5}, {0, 5}, {0.9f, 3}, {1, 5}, {0.3f, 0}, {0.7f, 99}, {1, 2}, {0.2f, 1}};
enum { ROWS = sizeof wanted / sizeof wanted[0] };

static void place_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    for (int r = 0; r < ROWS; r++)
        kernel_test_row(test, r < 3 ? KERN_ROW_GENERATED : KERN_ROW_PROMPT, -1, r + 1 < ROWS ? 7 : TOKENS - 49, 0)
            ->exit = wanted[r];
    kernel_test_prepare(test);
}

// All but a sum that meets the threshold to the last digits, where the next loop is as right.
static void check_token(const kernel_test *test, int t, const float *x, const float *z, const float *y, int32_t loop) {
    const kern_exit *exit = &test->rows->row[test->rows->token_row[t]].exit;
    const int most = exit->max_loops > 0 && exit->max_loops < LOOPS ? exit->max_loops : LOOPS;
    double own[LOOPS];
    for (int r = 0; r < LOOPS; r++)
        own[r] = (double)z[r * STRIDE + t];
    const double threshold = exit->max_loops == 0 || exit->threshold >= 1 ? INFINITY : (double)exit->threshold;
    const int low = kern_ref_exit_loop(LOOPS, own, threshold - 1e-6, most),
              high = kern_ref_exit_loop(LOOPS, own, threshold + 1e-6, most);
    ck_assert_msg(loop >= low && loop <= high, "token %d is read at %d, not %d", t, loop, low);
    ck_assert_mem_eq(y + (size_t)t * WIDTH, x + ((size_t)(loop - 1) * STRIDE + (size_t)t) * WIDTH, WIDTH * sizeof *y);
}

START_TEST(read_equals_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const float *x = kernel_test_floats(&test, LOOPS * STRIDE * WIDTH, -1, 1);
    float *z = kernel_test_floats(&test, LOOPS * STRIDE, -4, 3), *y = kernel_test_zero_floats(&test, TOKENS * WIDTH);
    int32_t *loop = kernel_test_bytes(&test, TOKENS * sizeof *loop), seen[LOOPS] = {0};
    kern_exit_read_args args = {{(void *)x}, {z}, {y}, {loop}, WIDTH, LOOPS, STRIDE};
    place_rows(&test);
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    for (int t = 0; t < TOKENS; t++) {
        check_token(&test, t, x, z, y, loop[t]);
        seen[loop[t] - 1]++;
    }
    for (int r = 0; r < LOOPS; r++)
        ck_assert_int_gt(seen[r], 0);
    args.z.p = NULL; // no gate: the bound alone
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    for (int r = 0; r < ROWS; r++)
        ck_assert_int_eq(loop[test.rows->row[r].token0],
                         wanted[r].max_loops > 0 && wanted[r].max_loops < LOOPS ? wanted[r].max_loops : LOOPS);
    kernel_test_close(&test);
}
END_TEST

START_TEST(far_ends_and_refusals) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float x[3] = {1, 2, 3}, z[3] = {-1e30f, 1e30f, 0}, y[1];
    int32_t loop[1];
    kernel_test_lend(&test, x, sizeof x);
    kernel_test_lend(&test, z, sizeof z);
    kernel_test_lend(&test, y, sizeof y);
    kernel_test_lend(&test, loop, sizeof loop);
    kern_exit_read_args args = {{x}, {z}, {y}, {loop}, 1, 3, 1};
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, 1, 0)->exit = (kern_exit){0.999f, 3};
    kernel_test_prepare(&test);
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    ck_assert(loop[0] == 2 && y[0] == 2);
    z[0] = z[1] = NAN; // never leaves
    kernel_test_launch(&test, KERN_OP_EXIT_READ, &args);
    ck_assert(loop[0] == 3 && y[0] == 3);
    args.loops = 0;
    kernel_test_assert_refused(&test, KERN_OP_EXIT_READ, &args, KERN_INVALID);
    args.loops = 3;
    args.y.p = x;
    kernel_test_assert_refused(&test, KERN_OP_EXIT_READ, &args, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- losses

static const float sharpness = 5, margin = 0.05F, entropy[] = {0.3F};

// What the device says of all tokens, and what the reference does: losses, and their derivatives by differences.
typedef struct gate {
    int objective;
    double z[LOOPS], losses[LOOPS], constant[LOOPS];
} gate;

static double reference(const gate *g) {
    if (g->objective == KERN_EXIT_EXPECTED)
        return kern_ref_exit_expected(LOOPS, g->z, g->losses, (double)entropy[0], g->constant);
    if (g->objective != KERN_EXIT_WEIGHTED)
        return kern_ref_exit_improvement(LOOPS, g->z, g->losses, (double)sharpness, (double)margin,
                                         g->objective == KERN_EXIT_PREVIOUS);
    double sum = 0;
    for (int r = 0; r < LOOPS; r++)
        sum += g->constant[r] * g->losses[r];
    return sum;
}

static double difference(gate *g, int loop) {
    const double at = g->z[loop], h = 1e-5;
    g->z[loop] = at + h;
    const double above = reference(g);
    g->z[loop] = at - h;
    const double below = reference(g);
    g->z[loop] = at;
    return (above - below) / (2 * h);
}

static void check_objective(kernel_test *test, kern_exit_loss_args *args) {
    kernel_test_launch(test, KERN_OP_EXIT_LOSS, args);
    for (int t = 0; t < TOKENS; t++) {
        gate g = {.objective = args->objective};
        for (int r = 0; r < LOOPS; r++) {
            g.z[r] = args->z.f ? (double)args->z.f[r * STRIDE + t] : 0;
            g.losses[r] = (double)args->losses.f[r * STRIDE + t];
            g.constant[r] = (double)args->constant[r];
        }
        const bool counts = test->rows->target[t] >= 0;
        ck_assert_double_eq_tol((double)args->loss.f[t], counts ? reference(&g) : 0, 1e-6);
        for (int r = 0; args->dz.f && r < LOOPS; r++)
            ck_assert_double_eq_tol((double)args->dz.f[r * STRIDE + t],
                                    counts ? (double)test->rows->target_weight[t] * difference(&g, r) : 0, 1e-6);
    }
}

START_TEST(losses_equal_reference) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float *losses = kernel_test_floats(&test, LOOPS * STRIDE, 0, 4);
    float *z = kernel_test_floats(&test, LOOPS * STRIDE, -4, 4), *p = kernel_test_zero_floats(&test, LOOPS * STRIDE);
    kern_exit_loss_args args = {.losses.f = losses,
                                .loss.f = kernel_test_zero_floats(&test, TOKENS),
                                .loops = LOOPS,
                                .stride = STRIDE,
                                .sharpness = sharpness,
                                .margin = margin,
                                .constant = {0.5F, 0, 0.25F, 2, 1}};
    place_rows(&test);
    for (int t = 0; t < TOKENS; t++) {
        test.rows->target[t] = t % 5 == 2 ? -1 : 1;
        test.rows->target_weight[t] = 0.1F + (float)(t % 3);
    }
    kernel_test_prepare(&test);
    check_objective(&test, &args);
    args.z.f = z;
    args.dz.f = kernel_test_zero_floats(&test, LOOPS * STRIDE);
    kernel_test_assert_refused(&test, KERN_OP_EXIT_LOSS, &args, KERN_INVALID); // WEIGHTED has no gate
    for (args.objective = KERN_EXIT_EXPECTED; args.objective <= KERN_EXIT_PREVIOUS; args.objective++) {
        args.entropy.f = args.objective == KERN_EXIT_EXPECTED ? kernel_test_copy(&test, entropy, 1) : NULL;
        check_objective(&test, &args);
    }
    const kern_exit_probability_args probability = {{z}, {p}, LOOPS, STRIDE};
    kernel_test_launch(&test, KERN_OP_EXIT_PROBABILITY, &probability);
    for (int t = 0; t < TOKENS; t++) {
        double own[LOOPS], want[LOOPS];
        for (int r = 0; r < LOOPS; r++)
            own[r] = (double)z[r * STRIDE + t];
        kern_ref_exit_probability(LOOPS, own, want);
        for (int r = 0; r < LOOPS; r++)
            ck_assert_double_eq_tol((double)p[r * STRIDE + t], want[r], 1e-6);
    }
    kernel_test_close(&test);
}
END_TEST

// Loops that are equally good: the best gate is p = softmax(-L / entropy), which is where its gradient is zero.
START_TEST(the_best_gate_of_known_losses) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    float losses[3] = {1.0F, 1.2F, 0.7F}, z[3] = {0}, dz[3], loss[1], beta[1] = {0.3F};
    double p[3], sum = 0, left = 1;
    for (int r = 0; r < 3; r++)
        sum += p[r] = exp(-(double)losses[r] / (double)beta[0]);
    for (int r = 0; r < 2; r++) { // s(z) = p / what is left
        const double leaves = p[r] / sum / left;
        z[r] = (float)log(leaves / (1 - leaves));
        left -= p[r] / sum;
    }
    kern_exit_loss_args args = {.losses.f = losses,
                                .z.f = z,
                                .entropy.f = beta,
                                .loss.f = loss,
                                .dz.f = dz,
                                .loops = 3,
                                .stride = 1,
                                .objective = KERN_EXIT_EXPECTED};
    float *const lent[] = {losses, z, dz, loss, beta};
    for (int i = 0; i < 5; i++)
        kernel_test_lend(&test, lent[i], sizeof(float) * (i < 3 ? 3 : 1));
    kernel_test_clear_rows(&test);
    kernel_test_row(&test, KERN_ROW_PROMPT, -1, 1, 0);
    test.rows->target[0] = 0;
    test.rows->target_weight[0] = 1;
    kernel_test_prepare(&test);
    kernel_test_launch(&test, KERN_OP_EXIT_LOSS, &args);
    for (int r = 0; r < 3; r++)
        ck_assert_double_eq_tol((double)dz[r], 0, 1e-6);
    ck_assert_double_eq_tol((double)loss[0], -(double)beta[0] * log(sum), 1e-6);
    args.loops = 1; // one loop has no choice
    kernel_test_launch(&test, KERN_OP_EXIT_LOSS, &args);
    ck_assert_float_eq(loss[0], losses[0]);
    ck_assert_float_eq(dz[0], 0);
    kernel_test_close(&test);
}
END_TEST

static Suite *exit_suite(void) {
    Suite *suite = suite_create("exit");
    TCase *tests = tcase_create("exit");
    tcase_add_loop_test(tests, read_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, far_ends_and_refusals, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, losses_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, the_best_gate_of_known_losses, 0, KERNEL_TEST_DEVICES);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(exit_suite)

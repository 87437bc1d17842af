// SPDX-License-Identifier: Apache-2.0
// What `check` says of gradients, on errors that are known beforehand: the same in every batch, of changing sign, at
// right angles; of length or of direction; nothing against something; not a number.
#include "trainer/gradient_error.h"

#include <math.h>

#include "tests/check_main.h"

enum { COUNT = 32, BATCHES = 16 };

static const float zero[COUNT];

// A gradient of norm `size`, the same values in every batch.
static void fill(float *gradient, double size) {
    for (int i = 0; i < COUNT; i++)
        gradient[i] = (float)(size / sqrt(COUNT) * (i % 2 ? -1 : 1));
}

typedef enum kind { SHARED, ALTERNATING, INDEPENDENT } kind;

// BATCHES of them, whose errors have norm `off`: always the same one, one that changes its sign, one at right angles
// to all others.
static double left_of(kind kind, double off, trn_gradient_error *sum) {
    float mine[COUNT], reference[COUNT];
    double shared[COUNT] = {0};
    trn_gradient_error_begin(sum);
    for (int b = 0; b < BATCHES; b++) {
        fill(reference, 2);
        fill(mine, 2);
        mine[kind == INDEPENDENT ? b : 0] += (float)(kind == ALTERNATING && b % 2 ? -off : off);
        trn_gradient_error_add(sum, mine, reference, COUNT);
        for (int i = 0; i < COUNT; i++)
            shared[i] += (double)mine[i] - (double)reference[i];
    }
    return trn_gradient_error_left(sum, shared, COUNT);
}

START_TEST(a_bias_is_told_from_noise) {
    static const double wanted[] = {[SHARED] = 1, [ALTERNATING] = 0, [INDEPENDENT] = 0.25};
    for (int i = 0; i < 3; i++) {
        trn_gradient_error sum;
        ck_assert_double_eq_tol(left_of((kind)i, 0.02, &sum), wanted[i], 1e-5);
        ck_assert_int_eq(sum.batches, BATCHES);
        ck_assert_double_eq_tol(trn_gradient_error_relative(&sum), 0.01, 1e-6);
        ck_assert_double_eq_tol(sum.worst, 0.01, 1e-6);
        ck_assert_double_eq_tol(sqrt(sum.norm / BATCHES), 2, 1e-6);
    }
}
END_TEST

START_TEST(length_and_direction_are_two_things) {
    float reference[COUNT], mine[COUNT], turned[COUNT];
    trn_gradient_error sum;
    fill(reference, 1);
    fill(mine, 1.5);
    fill(turned, -1);
    trn_gradient_error_begin(&sum);
    trn_gradient_error_add(&sum, mine, reference, COUNT);
    ck_assert_double_eq_tol(sum.worst, 0.5, 1e-6);
    ck_assert_double_eq_tol(sum.cosine, 1, 1e-12);
    trn_gradient_error_add(&sum, turned, reference, COUNT);
    trn_gradient_error_add(&sum, reference, reference, COUNT);
    ck_assert_double_eq_tol(sum.worst, 2, 1e-6);
    ck_assert_double_eq_tol(sum.cosine, -1, 1e-12);
    ck_assert_double_eq_tol(trn_gradient_error_relative(&sum), sqrt((0.25 + 4 + 0) / 3), 1e-6);
    ck_assert_double_eq_tol(trn_relative_error(mine, reference, COUNT), 0.5, 1e-6);
}
END_TEST

START_TEST(nothing_against_something) {
    float one[COUNT];
    const double shared[COUNT] = {0};
    trn_gradient_error sum;
    fill(one, 1);
    trn_gradient_error_begin(&sum);
    trn_gradient_error_add(&sum, zero, zero, COUNT);
    ck_assert(sum.cosine == 1 && sum.worst == 0 && trn_gradient_error_relative(&sum) == 0);
    ck_assert(trn_gradient_error_left(&sum, shared, COUNT) == 0);
    trn_gradient_error_add(&sum, zero, one, COUNT);
    ck_assert(sum.cosine == 0);
    ck_assert_double_eq_tol(sum.worst, 1, 1e-6);
    ck_assert_double_eq_tol(trn_relative_error(one, zero, COUNT), 1, 1e-6);
}
END_TEST

// Whatever comes behind it.
START_TEST(a_nan_stays) {
    float bad[COUNT], good[COUNT];
    trn_gradient_error sum;
    fill(bad, 1);
    fill(good, 1);
    bad[7] = NAN;
    trn_gradient_error_begin(&sum);
    trn_gradient_error_add(&sum, good, good, COUNT);
    trn_gradient_error_add(&sum, bad, good, COUNT);
    trn_gradient_error_add(&sum, zero, good, COUNT);
    ck_assert(isnan(sum.worst) && isnan(sum.cosine) && isnan(trn_gradient_error_relative(&sum)));
}
END_TEST

static Suite *gradient_error_suite(void) {
    Suite *suite = suite_create("gradient_error");
    TCase *cases = tcase_create("cases");
    tcase_add_test(cases, a_bias_is_told_from_noise);
    tcase_add_test(cases, length_and_direction_are_two_things);
    tcase_add_test(cases, nothing_against_something);
    tcase_add_test(cases, a_nan_stays);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(gradient_error_suite)

// SPDX-License-Identifier: Apache-2.0
// Learning rates at the borders of warm-up, of the flat part and of the end, against values computed by hand.
// The expected values are worked out by hand; a shared formula would share its faults.
#include "trainer/schedule.h"

#include "tests/check_main.h"

static void expect(const trn_schedule *schedule, int64_t step, double rate) {
    ck_assert_double_eq_tol(trn_schedule_rate(schedule, step), rate, 1e-12);
}

START_TEST(cosine_starts_and_ends_where_it_says) {
    const trn_schedule schedule = {.kind = TRN_COSINE, .peak = 2e-3, .min_ratio = 0.1, .warmup = 4, .steps = 12};
    expect(&schedule, 0, 0.5e-3);
    expect(&schedule, 2, 1.5e-3);
    expect(&schedule, 3, 2e-3);                // the last warm-up step has the peak
    expect(&schedule, 7, 0.5 * (2e-3 + 2e-4)); // half way: 4 of 8 steps
    expect(&schedule, 11, 2e-4);               // the last step has the floor
}
END_TEST

START_TEST(cosine_without_warmup_starts_below_the_peak) {
    const trn_schedule schedule = {.kind = TRN_COSINE, .peak = 1, .min_ratio = 0, .warmup = 0, .steps = 2};
    expect(&schedule, 0, 0.5);
    expect(&schedule, 1, 0);
}
END_TEST

START_TEST(wsd_is_flat_and_then_linear) {
    const trn_schedule schedule = {
        .kind = TRN_WSD, .peak = 1, .min_ratio = 0.2, .warmup = 2, .steps = 20, .decay_fraction = 0.25};
    expect(&schedule, 0, 0.5);
    expect(&schedule, 1, 1);
    expect(&schedule, 14, 1); // 15 steps without decay
    expect(&schedule, 15, 1 - 0.8 / 5);
    expect(&schedule, 17, 1 - 3 * 0.8 / 5);
    expect(&schedule, 19, 0.2);
}
END_TEST

START_TEST(decay_never_begins_inside_warmup) {
    const trn_schedule schedule = {
        .kind = TRN_WSD, .peak = 1, .min_ratio = 0, .warmup = 5, .steps = 10, .decay_fraction = 1};
    expect(&schedule, 4, 1);
    expect(&schedule, 5, 0.8);
    expect(&schedule, 9, 0);
}
END_TEST

START_TEST(warmup_as_long_as_the_run) {
    const trn_schedule schedule = {.kind = TRN_COSINE, .peak = 1, .min_ratio = 0.1, .warmup = 4, .steps = 4};
    expect(&schedule, 3, 1);
}
END_TEST

static Suite *schedule_suite(void) {
    Suite *suite = suite_create("schedule");
    TCase *cases = tcase_create("rates");
    tcase_add_test(cases, cosine_starts_and_ends_where_it_says);
    tcase_add_test(cases, cosine_without_warmup_starts_below_the_peak);
    tcase_add_test(cases, wsd_is_flat_and_then_linear);
    tcase_add_test(cases, decay_never_begins_inside_warmup);
    tcase_add_test(cases, warmup_as_long_as_the_run);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(schedule_suite)

// SPDX-License-Identifier: Apache-2.0
// Quantiles are what their definition says: each is found a second time by counting.
// With ties, at whole ranks, and where there are too few samples to tell.
#include "clients/cli/samples.h"

#include "tests/check_main.h"

// The smallest sample that at least numerator / denominator of all samples do not exceed.
static int64_t by_counting(const int64_t *value, size_t count, size_t numerator, size_t denominator) {
    int64_t best = INT64_MAX;
    for (size_t i = 0; i < count; i++) {
        size_t below = 0;
        for (size_t k = 0; k < count; k++)
            below += value[k] <= value[i];
        if (below * denominator >= numerator * count && value[i] < best)
            best = value[i];
    }
    return best;
}

START_TEST(test_quantiles) {
    static const struct {
        size_t numerator, denominator;
        double q;
    } asked[] = {{1, 2, 0.5}, {9, 10, 0.9}, {99, 100, 0.99}, {999, 1000, 0.999}, {1, 1, 1}};
    uint32_t random = 1;

    for (size_t count = 1; count < 400; count = count < 120 ? count + 1 : count + 37) {
        cli_samples samples = {0};
        int64_t value[400];
        for (size_t i = 0; i < count; i++) {
            random = random * 1664525 + 1013904223;
            value[i] = random >> 24; // with ties
            cli_samples_add(&samples, value[i]);
        }
        for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
            const int64_t wanted = by_counting(value, count, asked[i].numerator, asked[i].denominator);
            ck_assert_int_eq(cli_samples_quantile(&samples, asked[i].q), wanted);
        }
        cli_samples_free(&samples);
    }
}
END_TEST

START_TEST(test_whole_ranks) {
    cli_samples samples = {0};

    for (int64_t i = 1000; i >= 1; i--)
        cli_samples_add(&samples, i);
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.5), 500);
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.9), 900);
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.99), 990);
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.999), 999);
    ck_assert_int_eq(cli_samples_quantile(&samples, 1), 1000);
    ck_assert_double_eq_tol(cli_samples_mean(&samples), 500.5, 1e-9);
    cli_samples_add(&samples, 0); // after a quantile, out of order
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.0005), 0);
    cli_samples_free(&samples);
}
END_TEST

START_TEST(test_many) {
    cli_samples samples = {0}, more = {0};

    cli_samples_add_many(&samples, 0, 97);
    cli_samples_add_many(&more, 5, 3);
    cli_samples_add_all(&samples, &more);
    cli_samples_add_many(&samples, 9, 0);
    ck_assert_uint_eq(samples.count, 100);
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.97), 0);
    ck_assert_int_eq(cli_samples_quantile(&samples, 0.98), 5);
    ck_assert_double_eq_tol(cli_samples_mean(&samples), 0.15, 1e-12);
    cli_samples_free(&samples);
    cli_samples_free(&more);
}
END_TEST

START_TEST(test_resolution) {
    cli_samples samples = {0};

    ck_assert_int_eq(cli_samples_quantile(&samples, 0.5), 0);
    ck_assert_double_eq(cli_samples_mean(&samples), 0);
    cli_samples_add_many(&samples, 1, 99);
    ck_assert(cli_samples_resolve(&samples, 0.9));
    ck_assert(!cli_samples_resolve(&samples, 0.99));
    cli_samples_add(&samples, 1);
    ck_assert(cli_samples_resolve(&samples, 0.99));
    ck_assert(!cli_samples_resolve(&samples, 0.999));
    cli_samples_free(&samples);
}
END_TEST

static Suite *samples_suite(void) {
    Suite *suite = suite_create("samples");
    TCase *all = tcase_create("samples");
    tcase_add_test(all, test_quantiles);
    tcase_add_test(all, test_whole_ranks);
    tcase_add_test(all, test_many);
    tcase_add_test(all, test_resolution);
    suite_add_tcase(suite, all);
    return suite;
}

MESA_TEST_MAIN(samples_suite)

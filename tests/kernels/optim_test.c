// SPDX-License-Identifier: Apache-2.0
// AdamW over several tensors and steps against its reference, the sum of squares in double, the clipping scale.
//
// Weights that are rounded to bf16 at random have exactly the bits that Philox gives, and drift as they would
// unrounded; compensated ones lose nothing. A norm that is of no use must make the scale no number, and that the update
// must leave out; a sum must not know the number of threads.
#include "kernels/philox.h"
#include "kernels/ref/elementwise.h"
#include "tests/kernels/kernel_test.h"

enum { TENSORS = 4, STEPS = 5 };

typedef struct tensor {
    int32_t first, count; // of the vectors that lie behind one another
    double decay;
} tensor;

// One element, a length that no vector of floats divides, a whole run, and one that needs several.
static const tensor tensors[TENSORS] = {
    {0, 1, 0.1}, {16, 37, 0}, {64, KERN_ADAMW_RUN, 0}, {64 + KERN_ADAMW_RUN + 3, 20011, 0.1}};
enum { FLOATS = 64 + KERN_ADAMW_RUN + 3 + 20011 + 5, RUNS = 1 + 1 + 1 + 5 };

// The vectors that a device updates, as the test's memory has them.
typedef struct vectors {
    float *parameter, *grad, *m, *v, *rest;
} vectors;

static vectors make_vectors(kernel_test *test) {
    return (vectors){kernel_test_floats(test, FLOATS, -1, 1), kernel_test_floats(test, FLOATS, -1, 1),
                     kernel_test_zero_floats(test, FLOATS), kernel_test_zero_floats(test, FLOATS),
                     kernel_test_zero_floats(test, FLOATS)};
}

// Of the elements of all tensors, in which they need not lie as here.
static int64_t number_of(int t, int32_t at) {
    return 32768 * (int64_t)t + at;
}

static kern_adamw_run *make_runs(kernel_test *test, const vectors *x) {
    kern_adamw_run *run = kernel_test_bytes(test, RUNS * sizeof *run);
    int32_t runs = 0;
    for (int t = 0; t < TENSORS; t++)
        for (int32_t at = 0; at < tensors[t].count; at += KERN_ADAMW_RUN) {
            const int32_t first = tensors[t].first + at, left = tensors[t].count - at;
            run[runs++] = (kern_adamw_run){.parameter = (float *)kernel_test_on_device(test, x->parameter + first),
                                           .grad = (float *)kernel_test_on_device(test, x->grad + first),
                                           .m = (float *)kernel_test_on_device(test, x->m + first),
                                           .v = (float *)kernel_test_on_device(test, x->v + first),
                                           .rest = (float *)kernel_test_on_device(test, x->rest + first),
                                           .first = number_of(t, at),
                                           .count = left < KERN_ADAMW_RUN ? left : KERN_ADAMW_RUN,
                                           .weight_decay = (float)tensors[t].decay};
        }
    ck_assert_int_eq(runs, RUNS);
    return run;
}

static kern_adamw_args adamw_args(kern_adamw_run *run, float *grad_scale, int step) {
    return (kern_adamw_args){.run.p = run,
                             .grad_scale.f = grad_scale,
                             .count = 1 + 37 + KERN_ADAMW_RUN + 20011,
                             .runs = RUNS,
                             .lr = 1e-2f,
                             .beta1 = 0.9f,
                             .beta2 = 0.98f,
                             .eps = 1e-8f,
                             .correction1 = (float)(1 - pow((double)0.9f, step)),
                             .correction2 = (float)(1 - pow((double)0.98f, step))};
}

// The runs tell a device where the vectors are: they go over and come back beside the operands.
static void launch_adamw(kernel_test *test, const vectors *x, const kern_adamw_args *args) {
    float *const all[] = {x->parameter, x->grad, x->m, x->v, x->rest};
    for (size_t i = 0; test->cuda && i < sizeof all / sizeof *all; i++)
        kernel_test_send(test, kernel_test_find(test, all[i]));
    kernel_test_launch(test, KERN_OP_ADAMW, args);
    for (size_t i = 0; test->cuda && i < sizeof all / sizeof *all; i++)
        ck_assert_int_eq(
            kern_download(test->stream, all[i], kernel_test_on_device(test, all[i]), FLOATS * sizeof(float)), KERN_OK);
    ck_assert_int_eq(kern_synchronize(test->stream), KERN_OK);
}

typedef struct wanted {
    double *parameter, *m, *v;
} wanted;

static void step_reference(const wanted *want, const float *grad, double scale, int step) {
    for (int t = 0; t < TENSORS; t++) {
        const kern_ref_adamw rule = {
            (double)1e-2f, (double)0.9f, (double)0.98f, (double)1e-8f, (double)(float)tensors[t].decay, step};
        for (int32_t i = tensors[t].first; i < tensors[t].first + tensors[t].count; i++)
            kern_ref_adamw_step(rule, scale * (double)grad[i], &want->parameter[i], &want->m[i], &want->v[i]);
    }
}

static void check_adamw(kernel_test *test, bool scaled) {
    const vectors x = make_vectors(test);
    kern_adamw_run *run = make_runs(test, &x);
    const wanted want = {kernel_test_widened(test, x.parameter, FLOATS), kernel_test_zero_doubles(test, FLOATS),
                         kernel_test_zero_doubles(test, FLOATS)};
    float *grad_scale = kernel_test_floats(test, 1, 0.25, 0.25);
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < FLOATS; i++)
            x.grad[i] = (float)(2 * kernel_test_uniform(test) - 1);
        const kern_adamw_args args = adamw_args(run, scaled ? grad_scale : NULL, step);
        launch_adamw(test, &x, &args);
        step_reference(&want, x.grad, scaled ? 0.25 : 1, step);
    }
    for (int t = 0; t < TENSORS; t++) {
        const int32_t first = tensors[t].first;
        const size_t count = (size_t)tensors[t].count;
        kernel_test_assert_norm(x.m + first, want.m + first, count, 1e-6);
        kernel_test_assert_norm(x.v + first, want.v + first, count, 1e-6);
        kernel_test_assert_norm(x.parameter + first, want.parameter + first, count, 1e-6);
    }
    for (int i = 0; i < FLOATS; i++) // what belongs to no tensor is left alone
        ck_assert((float)want.parameter[i] != x.parameter[i] || want.m[i] != 0 || x.m[i] == 0);
}

START_TEST(adamw_equals_reference) {
    for (int scaled = 0; scaled < 2; scaled++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        check_adamw(&test, scaled);
        kernel_test_close(&test);
    }
}
END_TEST

// -------------------------------------------------------------------------------------------------------- rounding

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// What an update that rounds at random leaves of the same update's float.
static float rounded_at_random(float x, uint64_t seed, uint32_t update, int64_t number) {
    const kern_philox quad = kern_philox_rounding(seed, (uint64_t)number / 4, update);
    return float_of((bits_of(x) + (quad.word[number % 4] >> 16)) & 0xFFFF0000u);
}

static void check_random_bits(kernel_test *test, const vectors *start, const vectors *x, kern_adamw_run *run,
                              uint64_t seed, uint32_t update) {
    kern_adamw_args args = adamw_args(run, NULL, 1);
    const size_t bytes = FLOATS * sizeof(float);
    float *plain = kernel_test_zero_floats(test, FLOATS);
    for (int rounding = KERN_ROUND_NONE; rounding <= KERN_ROUND_STOCHASTIC; rounding++) {
        memcpy(x->parameter, start->parameter, bytes), memcpy(x->grad, start->grad, bytes);
        memset(x->m, 0, bytes), memset(x->v, 0, bytes);
        args.rounding = rounding, args.seed = seed, args.update = update;
        launch_adamw(test, x, &args);
        if (rounding == KERN_ROUND_NONE)
            memcpy(plain, x->parameter, bytes);
    }
    for (int t = 0; t < TENSORS; t++)
        for (int32_t i = 0; i < tensors[t].count; i++) {
            const float want = rounded_at_random(plain[tensors[t].first + i], seed, update, number_of(t, i));
            ck_assert_uint_eq(bits_of(x->parameter[tensors[t].first + i]), bits_of(want));
        }
}

START_TEST(random_rounding_follows_seed_update_and_place) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const vectors start = make_vectors(&test), x = make_vectors(&test);
    kern_adamw_run *run = make_runs(&test, &x);
    check_random_bits(&test, &start, &x, run, 7, 1);
    check_random_bits(&test, &start, &x, run, 7, 2);
    check_random_bits(&test, &start, &x, run, 7 + ((uint64_t)1 << 32), 2);
    kernel_test_close(&test);
}
END_TEST

enum { DRIFT_STEPS = 64 };

// Weights of 1 that lose 2^-12 a step, far less than the distance 2^-8 of bf16 numbers below 1; the mean of weights and
// rests of all tensors.
static double drift(kernel_test *test, const vectors *x, kern_rounding rounding) {
    kern_adamw_args args = adamw_args(make_runs(test, x), NULL, 1);
    double sum = 0;
    args.lr = 0x1p-12f, args.beta1 = args.beta2 = 0, args.eps = 0, args.correction1 = args.correction2 = 1;
    args.rounding = (int32_t)rounding, args.seed = 3;
    for (int r = 0; r < RUNS; r++)
        ((kern_adamw_run *)args.run.p)[r].weight_decay = 0;
    for (int i = 0; i < FLOATS; i++)
        x->parameter[i] = x->grad[i] = 1;
    for (int step = 1; step <= DRIFT_STEPS; step++) {
        args.update = (uint32_t)step;
        launch_adamw(test, x, &args);
    }
    for (int t = 0; t < TENSORS; t++)
        for (int32_t i = tensors[t].first; i < tensors[t].first + tensors[t].count; i++) {
            ck_assert_uint_eq(bits_of(x->parameter[i]) & 0xFFFFu, 0);
            sum += (double)x->parameter[i] + (double)x->rest[i];
        }
    return sum / (double)args.count;
}

// Each weight walks with the variance 2^-8 - 2^-12 of a step's 2^-12, so the mean's deviation is 2^-7 / sqrt(24145).
START_TEST(small_steps_are_not_lost) {
    kernel_test test;
    const double want = 1 - DRIFT_STEPS * 0x1p-12;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const vectors random = make_vectors(&test), compensated = make_vectors(&test);
    ck_assert_double_eq_tol(drift(&test, &random, KERN_ROUND_STOCHASTIC), want, 5 * 0x1p-7 / sqrt(24145));
    ck_assert(drift(&test, &compensated, KERN_ROUND_COMPENSATED) == want); // 2^-12 and its multiples are exact
    kernel_test_close(&test);
}
END_TEST

// A weight and its rest are the weight as it would be in more than float; the weight is that, rounded.
START_TEST(compensated_weights_lose_nothing) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const vectors x = make_vectors(&test);
    kern_adamw_run *run = make_runs(&test, &x);
    const wanted want = {kernel_test_widened(&test, x.parameter, FLOATS), kernel_test_zero_doubles(&test, FLOATS),
                         kernel_test_zero_doubles(&test, FLOATS)};
    for (int step = 1; step <= 4 * STEPS; step++) {
        for (int i = 0; i < FLOATS; i++)
            x.grad[i] = (float)(2 * kernel_test_uniform(&test) - 1);
        kern_adamw_args args = adamw_args(run, NULL, step);
        args.rounding = KERN_ROUND_COMPENSATED;
        launch_adamw(&test, &x, &args);
        step_reference(&want, x.grad, 1, step);
    }
    for (int t = 0; t < TENSORS; t++) {
        const int32_t first = tensors[t].first, end = first + tensors[t].count;
        double error = 0, size = 0;
        for (int32_t i = first; i < end; i++) {
            const float power = float_of(bits_of(x.parameter[i]) & 0x7F800000u); // the largest below
            const double whole = (double)x.parameter[i] + (double)x.rest[i];
            error += (whole - want.parameter[i]) * (whole - want.parameter[i]);
            size += want.parameter[i] * want.parameter[i];
            ck_assert((bits_of(x.parameter[i]) & 0xFFFFu) == 0 && fabsf(x.rest[i]) <= 0x1p-8f * power);
        }
        ck_assert_double_le(sqrt(error), 1e-6 * sqrt(size));
    }
    kernel_test_close(&test);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- rest

// A scale that is not a number, and no runs at all.
START_TEST(adamw_may_be_off) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const vectors x = make_vectors(&test);
    const float *parameter = kernel_test_copy(&test, x.parameter, FLOATS);
    const float *zeros = kernel_test_zero_floats(&test, FLOATS);
    float *grad_scale = kernel_test_floats(&test, 1, 1, 1);
    kern_adamw_args args = adamw_args(make_runs(&test, &x), grad_scale, 1);
    *grad_scale = NAN;
    launch_adamw(&test, &x, &args);
    *grad_scale = 1;
    args.runs = 0, args.count = 0;
    launch_adamw(&test, &x, &args);
    kernel_test_assert_same(x.parameter, parameter, FLOATS);
    kernel_test_assert_same(x.m, zeros, FLOATS);
    kernel_test_assert_same(x.v, zeros, FLOATS);
    kernel_test_close(&test);
}
END_TEST

START_TEST(square_sum_is_double_and_fixed) {
    static const int64_t counts[] = {1, 15, 16384, 16385, 300001};
    for (int i = 0; i < 5; i++) {
        double first = 0;
        for (int threads = 1; threads <= 3; threads++) {
            kernel_test test;
            kernel_test_threads(threads);
            if (!kernel_test_open(&test, _i, "cpu"))
                MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
            float *x = kernel_test_floats(&test, (size_t)counts[i], -1e-3, 1e3);
            long double exact = 7; // a plain sum in double is less accurate than the blocks are
            double sum = 7;
            for (int64_t j = 0; j < counts[i]; j++)
                exact += (long double)x[j] * (long double)x[j];
            const double want = (double)exact;
            kernel_test_lend(&test, &sum, sizeof sum);
            kern_square_sum_args args = {{x}, {&sum}, counts[i]};
            kernel_test_launch(&test, KERN_OP_SQUARE_SUM, &args);
            ck_assert_double_le(fabs(sum - want), 1e-14 * want);
            if (threads == 1)
                first = sum;
            kernel_test_assert_same(&sum, &first, 1);
            kernel_test_close(&test);
        }
    }
}
END_TEST

static float scale_of(kernel_test *test, double sum, float clip) {
    float scale = -1;
    kernel_test_lend(test, &sum, sizeof sum);
    kernel_test_lend(test, &scale, sizeof scale);
    kern_clip_scale_args args = {{&sum}, {&scale}, clip};
    kernel_test_launch(test, KERN_OP_CLIP_SCALE, &args);
    return scale;
}

START_TEST(clip_scale) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    ck_assert(scale_of(&test, 0, 1) == 1);
    ck_assert(scale_of(&test, 0.25, 1) == 1);
    ck_assert_double_le(fabs((double)scale_of(&test, 16, 1) - 0.25), 1e-6);
    ck_assert(scale_of(&test, 16, 0) == 1 && scale_of(&test, 16, -1) == 1);
    ck_assert(isnan(scale_of(&test, (double)NAN, 1)) && isnan(scale_of(&test, (double)NAN, 0)));
    ck_assert(isnan(scale_of(&test, (double)INFINITY, 1)));
    ck_assert(scale_of(&test, 1e40, 1) > 0 && isnan(scale_of(&test, 1e40, 0))); // whose square is no float
    kernel_test_close(&test);
}
END_TEST

START_TEST(arguments_are_checked) {
    kernel_test test;
    float place[4] = {0};
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    kern_adamw_args args = {.run.f = place, .runs = 1, .count = 1, .correction2 = 1}; // correction1 0: step 0
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_INVALID);
    args.correction1 = 1;
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_OK);
    args.runs = -1;
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_INVALID);
    args.runs = 1, args.rounding = KERN_ROUNDINGS;
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_INVALID);
    args.rounding = KERN_ROUND_NONE, args.run.p = NULL;
    kernel_test_assert_refused(&test, KERN_OP_ADAMW, &args, KERN_INVALID);
    kern_square_sum_args sum = {{place}, {place}, -1};
    kernel_test_assert_refused(&test, KERN_OP_SQUARE_SUM, &sum, KERN_INVALID);
    kern_clip_scale_args clip = {{NULL}, {place}, 1};
    kernel_test_assert_refused(&test, KERN_OP_CLIP_SCALE, &clip, KERN_INVALID);
    kernel_test_close(&test);
}
END_TEST

static Suite *optim_suite(void) {
    Suite *suite = suite_create("optim");
    TCase *tests = tcase_create("optim");
    tcase_set_timeout(tests, 60);
    tcase_add_loop_test(tests, adamw_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, random_rounding_follows_seed_update_and_place, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, small_steps_are_not_lost, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, compensated_weights_lose_nothing, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, adamw_may_be_off, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, square_sum_is_double_and_fixed, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tests, clip_scale, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tests, arguments_are_checked);
    suite_add_tcase(suite, tests);
    return suite;
}

MESA_TEST_MAIN(optim_suite)

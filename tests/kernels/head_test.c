// SPDX-License-Identifier: Apache-2.0
// The output head: logits with soft cap and finite flags, cross entropy, divergence from a teacher and gradients by
// tiles, independence of threads.
#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/ref/head.h"
#include "tests/kernels/kernel_test.h"

enum { WIDTH = 70, VOCABULARY = 403, TOKENS = 57, X = TOKENS * WIDTH, W = VOCABULARY * WIDTH };

typedef struct head {
    float *x, *w;
    uint16_t *halves;
    kern_weight *weight;
} head;

static head make_head(kernel_test *test, kern_dtype dtype) {
    head h = {.x = kernel_test_floats(test, X, -1, 1), .w = kernel_test_floats(test, W, -1, 1)};
    h.halves = kernel_test_bytes(test, W * sizeof *h.halves);
    if (test->fast)
        kernel_test_cut_to_bf16(h.x, X);
    for (int i = 0; i < W; i++) { // values that bf16 holds exactly
        uint32_t bits;
        memcpy(&bits, &h.w[i], sizeof bits);
        h.halves[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        memcpy(&h.w[i], &bits, sizeof bits);
    }
    const kern_weight_desc desc = {
        .dtype = dtype, .rows = VOCABULARY, .cols = WIDTH, .host = dtype == KERN_BF16 ? (const void *)h.halves : h.w};
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &h.weight), KERN_OK);
    return h;
}

// One generated row and two prompts. Every third token has no target; all of the tokens 20 .. 39 have none.
static void place_rows(kernel_test *test) {
    kernel_test_clear_rows(test);
    kernel_test_row(test, KERN_ROW_GENERATED, 0, 2, 7);
    kernel_test_row(test, KERN_ROW_PROMPT, 1, 40, 0);
    kernel_test_row(test, KERN_ROW_PROMPT, 2, TOKENS - 42, 3);
    for (int t = 0; t < TOKENS; t++) {
        bool counted = t % 3 != 1 && (t < 20 || t >= 40);
        test->rows->target[t] = counted ? (int32_t)(kernel_test_uniform(test) * VOCABULARY) : -1;
        test->rows->target_weight[t] = (float)(0.5 + kernel_test_uniform(test));
    }
    kernel_test_prepare(test);
}

static double *logits_want(kernel_test *test, const head *h, double soft_cap) {
    double *want = kernel_test_zero_doubles(test, TOKENS * VOCABULARY);
    kern_ref_head_logits(TOKENS, VOCABULARY, WIDTH, soft_cap, kernel_test_widened(test, h->x, X),
                         kernel_test_widened(test, h->w, W), want);
    return want;
}

START_TEST(logits_equal_reference) {
    static const int32_t wanted[] = {56, 0, 1, 41, 41, 30, 2, 3, 4, 5, 6};
    enum { WANTED = sizeof wanted / sizeof wanted[0] };
    for (int variant = 0; variant < 4; variant++) {
        const float soft_cap = variant & 1 ? 4.0f : 0.0f;
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        head h = make_head(&test, variant & 2 ? KERN_BF16 : KERN_F32);
        place_rows(&test);
        memcpy(test.rows->logits_token, wanted, sizeof wanted);
        test.rows->n_logits = WANTED;
        kernel_test_prepare(&test);
        float *logits = kernel_test_zero_floats(&test, WANTED * VOCABULARY);
        int32_t finite[WANTED];
        kernel_test_lend(&test, finite, sizeof finite);
        const kern_head_logits_args args = {.x.f = h.x,
                                            .weight.w = h.weight,
                                            .logits.f = logits,
                                            .finite.i = finite,
                                            .width = WIDTH,
                                            .vocabulary = VOCABULARY,
                                            .soft_cap = soft_cap};
        kernel_test_launch(&test, KERN_OP_HEAD_LOGITS, &args);
        const double *want = logits_want(&test, &h, (double)soft_cap);
        const double tolerance = test.cuda && variant & 2 ? 5e-6 : 1e-6; // activations as pairs of bf16
        for (int i = 0; i < WANTED; i++) {
            kernel_test_assert_norm(logits + i * VOCABULARY, want + wanted[i] * VOCABULARY, VOCABULARY, tolerance);
            ck_assert_int_eq(finite[i], 1);
        }
        kernel_test_assert_same(logits + 3 * VOCABULARY, logits + 4 * VOCABULARY, VOCABULARY);
        kern_weight_free(h.weight);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(not_finite_is_told) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    head h = make_head(&test, KERN_F32);
    place_rows(&test);
    h.x[0] = NAN;
    h.x[WIDTH] = INFINITY;
    float *logits = kernel_test_zero_floats(&test, 3 * VOCABULARY);
    int32_t finite[3];
    kernel_test_lend(&test, finite, sizeof finite);
    for (int i = 0; i < 3; i++)
        test.rows->logits_token[i] = i;
    test.rows->n_logits = 3;
    kernel_test_prepare(&test);
    const kern_head_logits_args args = {.x.f = h.x,
                                        .weight.w = h.weight,
                                        .logits.f = logits,
                                        .finite.i = finite,
                                        .width = WIDTH,
                                        .vocabulary = VOCABULARY,
                                        .soft_cap = 30}; // which would hide an infinity
    kernel_test_launch(&test, KERN_OP_HEAD_LOGITS, &args);
    ck_assert_int_eq(finite[0], 0);
    ck_assert_int_eq(finite[1], 0);
    ck_assert_int_eq(finite[2], 1);
    kern_weight_free(h.weight);
    kernel_test_close(&test);
}
END_TEST

typedef struct loss_run {
    float *loss, *dx, *dw;
    int32_t *best;
} loss_run;

static loss_run run_scaled(kernel_test *test, const head *h, int tile_tokens, float soft_cap, bool gradients,
                           float *factor, float scale) {
    loss_run r = {.loss = kernel_test_floats(test, TOKENS, -1, 1),
                  .best = kernel_test_bytes(test, TOKENS * sizeof *r.best)};
    if (gradients) {
        r.dx = kernel_test_floats(test, X, -1, 1);
        r.dw = kernel_test_zero_floats(test, W);
        for (int i = 0; i < W; i++)
            r.dw[i] = (float)(i % 5) * 0.25f; // must be kept
    }
    const kern_head_loss_args args = {.x.f = h->x,
                                      .weight.w = h->weight,
                                      .loss.f = r.loss,
                                      .best.i = r.best,
                                      .dx.f = r.dx,
                                      .grad_weight.f = r.dw,
                                      .factor.f = factor,
                                      .tile.f = kernel_test_zero_floats(test, (size_t)tile_tokens * VOCABULARY),
                                      .width = WIDTH,
                                      .vocabulary = VOCABULARY,
                                      .tile_tokens = tile_tokens,
                                      .soft_cap = soft_cap,
                                      .scale = scale};
    kernel_test_launch(test, KERN_OP_HEAD_LOSS, &args);
    return r;
}

static loss_run run_loss(kernel_test *test, const head *h, int tile_tokens, float soft_cap, bool gradients) {
    return run_scaled(test, h, tile_tokens, soft_cap, gradients, NULL, 0);
}

// The likeliest id by the reference's logits, or one that rounding cannot tell from it.
static void check_best(kernel_test *test, const head *h, const int32_t *best, double soft_cap) {
    const double *logits = logits_want(test, h, soft_cap);
    for (int t = 0; t < TOKENS; t++) {
        const double *row = logits + t * VOCABULARY;
        if (test->rows->target[t] < 0) {
            ck_assert_int_eq(best[t], -1);
            continue;
        }
        ck_assert(best[t] >= 0 && best[t] < VOCABULARY);
        for (int id = 0; id < VOCABULARY; id++)
            ck_assert(row[id] <= row[best[t]] + 2e-6 * fabs(row[best[t]]));
    }
}

// tolerance: of the gradients; 0: none are asked for.
static void check_loss(kernel_test *test, const head *h, int tile_tokens, float soft_cap, double tolerance) {
    const loss_run got = run_loss(test, h, tile_tokens, soft_cap, tolerance > 0);
    double *loss = kernel_test_zero_doubles(test, TOKENS), *dx = kernel_test_zero_doubles(test, X);
    double *dw = kernel_test_zero_doubles(test, W);
    for (int i = 0; i < W; i++)
        dw[i] = (i % 5) * 0.25;
    kern_ref_head_loss(TOKENS, VOCABULARY, WIDTH, (double)soft_cap, kernel_test_widened(test, h->x, X),
                       kernel_test_widened(test, h->w, W), test->rows->target,
                       kernel_test_widened(test, test->rows->target_weight, TOKENS), loss, dx, dw);
    kernel_test_assert_norm(got.loss, loss, TOKENS, 1e-6);
    check_best(test, h, got.best, (double)soft_cap);
    for (int t = 0; t < TOKENS; t++)
        if (test->rows->target[t] < 0)
            ck_assert_float_eq(got.loss[t], 0.0f);
    if (tolerance > 0) {
        kernel_test_assert_norm(got.dx, dx, X, tolerance);
        kernel_test_assert_norm(got.dw, dw, W, tolerance);
    }
}

START_TEST(loss_equals_reference) {
    static const int tile_tokens[] = {1, 7, 64};
    for (int variant = 0; variant < 12; variant++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        head h = make_head(&test, KERN_F32);
        place_rows(&test);
        check_loss(&test, &h, tile_tokens[variant % 3], variant / 3 & 1 ? 5.0f : 0.0f, variant / 6 & 1 ? 2e-6 : 0);
        kern_weight_free(h.weight);
        kernel_test_close(&test);
    }
}
END_TEST

START_TEST(bf16_loss_without_gradient) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    head h = make_head(&test, KERN_BF16);
    place_rows(&test);
    check_loss(&test, &h, 16, 0, 0);
    kern_weight_free(h.weight);
    kernel_test_close(&test);
}
END_TEST

// Where products round their operands: losses of vectors that bf16 holds are exact, gradients are of a rounded dl.
START_TEST(fast_loss) {
    for (int variant = 0; variant < 4; variant++) {
        const bool bf16 = variant & 1;
        kernel_test test;
        if (!kernel_test_open_fast(&test))
            MESA_TEST_SKIP("no device %s", "cuda:0");
        head h = make_head(&test, bf16 ? KERN_BF16 : KERN_F32);
        place_rows(&test);
        check_loss(&test, &h, 16, variant & 2 ? 5.0f : 0.0f, bf16 ? 0 : 4e-3);
        kern_weight_free(h.weight);
        kernel_test_close(&test);
    }
}
END_TEST

// A vocabulary whose rows are aligned, where dl is written rounded as well.
START_TEST(fast_gradients_of_an_even_vocabulary) {
    enum { EVEN = VOCABULARY + 5, COUNT = EVEN * WIDTH };
    kernel_test test;
    if (!kernel_test_open_fast(&test))
        MESA_TEST_SKIP("no device %s", "cuda:0");
    float *x = kernel_test_floats(&test, X, -1, 1), *w = kernel_test_floats(&test, COUNT, -1, 1);
    float *loss = kernel_test_zero_floats(&test, TOKENS), *dx = kernel_test_zero_floats(&test, X);
    double *loss_want = kernel_test_zero_doubles(&test, TOKENS), *dx_want = kernel_test_zero_doubles(&test, X);
    double *dw_want = kernel_test_zero_doubles(&test, COUNT);
    kern_weight *weight = NULL;
    kernel_test_cut_to_bf16(x, X);
    kernel_test_cut_to_bf16(w, COUNT);
    const kern_weight_desc desc = {.dtype = KERN_F32, .rows = EVEN, .cols = WIDTH, .host = w};
    ck_assert_int_eq(kern_weight_create(test.device, &desc, &weight), KERN_OK);
    place_rows(&test);
    kern_ref_head_loss(TOKENS, EVEN, WIDTH, 0, kernel_test_widened(&test, x, X), kernel_test_widened(&test, w, COUNT),
                       test.rows->target, kernel_test_widened(&test, test.rows->target_weight, TOKENS), loss_want,
                       dx_want, dw_want);
    for (int tile_tokens = 16; tile_tokens >= 11; tile_tokens -= 5) { // where zeros are rounded others stood before
        float *dw = kernel_test_zero_floats(&test, COUNT);
        const kern_head_loss_args args = {.x.f = x,
                                          .weight.w = weight,
                                          .loss.f = loss,
                                          .dx.f = dx,
                                          .grad_weight.f = dw,
                                          .tile.f = kernel_test_zero_floats(&test, (size_t)tile_tokens * EVEN),
                                          .width = WIDTH,
                                          .vocabulary = EVEN,
                                          .tile_tokens = tile_tokens};
        kernel_test_launch(&test, KERN_OP_HEAD_LOSS, &args);
        kernel_test_assert_norm(loss, loss_want, TOKENS, 1e-6);
        kernel_test_assert_norm(dx, dx_want, X, 4e-3);
        kernel_test_assert_norm(dw, dw_want, COUNT, 4e-3);
    }
    kern_weight_free(weight);
    kernel_test_close(&test);
}
END_TEST

// Logits of +-1000: an exponential without its maximum taken off would not be finite.
START_TEST(large_logits_stay_finite) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    head h = make_head(&test, KERN_F32);
    place_rows(&test);
    for (int i = 0; i < X; i++)
        h.x[i] *= 100;
    check_loss(&test, &h, 16, 0, true);
    kern_weight_free(h.weight);
    kernel_test_close(&test);
}
END_TEST

// ----------------------------------------------------------------------------------------------------------- teacher

typedef struct teacher {
    float *x, *w;
    kern_weight *weight;
    int width;
    float soft_cap;
} teacher;

static teacher make_teacher(kernel_test *test, int width, kern_dtype dtype, float soft_cap) {
    const size_t count = (size_t)VOCABULARY * (size_t)width;
    teacher t = {.x = kernel_test_floats(test, TOKENS * (size_t)width, -1, 1),
                 .w = kernel_test_floats(test, count, -1, 1),
                 .width = width,
                 .soft_cap = soft_cap};
    uint16_t *halves = kernel_test_bytes(test, count * sizeof *halves);
    for (size_t i = 0; i < count; i++) { // values that bf16 holds exactly
        uint32_t bits;
        memcpy(&bits, &t.w[i], sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
        bits &= 0xffff0000u;
        memcpy(&t.w[i], &bits, sizeof bits);
    }
    const kern_weight_desc desc = {
        .dtype = dtype, .rows = VOCABULARY, .cols = width, .host = dtype == KERN_BF16 ? (const void *)halves : t.w};
    ck_assert_int_eq(kern_weight_create(test->device, &desc, &t.weight), KERN_OK);
    return t;
}

typedef struct distilling {
    int tile_tokens;
    float soft_cap, temperature, loss_share, divergence_share;
    bool gradients;
} distilling;

typedef struct taught_run {
    loss_run run;
    float *divergence;
} taught_run;

static taught_run run_taught(kernel_test *test, const head *h, const teacher *from, const distilling *d) {
    const size_t tile = (size_t)d->tile_tokens * VOCABULARY;
    taught_run r = {{.loss = kernel_test_floats(test, TOKENS, -1, 1)}, kernel_test_floats(test, TOKENS, -1, 1)};
    if (d->gradients)
        r.run.dx = kernel_test_floats(test, X, -1, 1), r.run.dw = kernel_test_zero_floats(test, W);
    const kern_head_loss_args args = {.x.f = h->x,
                                      .weight.w = h->weight,
                                      .loss.f = r.run.loss,
                                      .dx.f = r.run.dx,
                                      .grad_weight.f = r.run.dw,
                                      .tile.f = kernel_test_zero_floats(test, tile),
                                      .teacher_x.f = from->x,
                                      .teacher_weight.w = from->weight,
                                      .divergence.f = r.divergence,
                                      .teacher_tile.f = kernel_test_zero_floats(test, tile),
                                      .width = WIDTH,
                                      .vocabulary = VOCABULARY,
                                      .tile_tokens = d->tile_tokens,
                                      .soft_cap = d->soft_cap,
                                      .teacher_width = from->width,
                                      .teacher_soft_cap = from->soft_cap,
                                      .temperature = d->temperature,
                                      .loss_share = d->loss_share,
                                      .divergence_share = d->divergence_share};
    kernel_test_launch(test, KERN_OP_HEAD_LOSS, &args);
    return r;
}

// The reference of both losses, each with its share of the tokens' weights.
static void check_taught(kernel_test *test, const head *h, const teacher *from, const distilling *d) {
    const taught_run got = run_taught(test, h, from, d);
    double *loss = kernel_test_zero_doubles(test, TOKENS), *divergence = kernel_test_zero_doubles(test, TOKENS);
    double *dx = kernel_test_zero_doubles(test, X), *dw = kernel_test_zero_doubles(test, W);
    double share[2][TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        share[0][t] = (double)test->rows->target_weight[t] * (double)d->loss_share;
        share[1][t] = (double)test->rows->target_weight[t] * (double)d->divergence_share;
    }
    const kern_ref_head own = {WIDTH, (double)d->soft_cap, kernel_test_widened(test, h->x, X),
                               kernel_test_widened(test, h->w, W)};
    const kern_ref_head other = {from->width, (double)from->soft_cap,
                                 kernel_test_widened(test, from->x, (size_t)(TOKENS * from->width)),
                                 kernel_test_widened(test, from->w, (size_t)(VOCABULARY * from->width))};
    kern_ref_head_loss(TOKENS, VOCABULARY, WIDTH, own.soft_cap, own.x, own.weight, test->rows->target, share[0], loss,
                       dx, dw);
    kern_ref_head_divergence(TOKENS, VOCABULARY, &own, &other, (double)d->temperature, test->rows->target, share[1],
                             divergence, dx, dw);
    kernel_test_assert_norm(got.run.loss, loss, TOKENS, 1e-6);
    kernel_test_assert_norm(got.divergence, divergence, TOKENS, 5e-6);
    for (int t = 0; t < TOKENS; t++)
        ck_assert(test->rows->target[t] < 0 ? got.divergence[t] == 0 : got.divergence[t] > 0);
    if (d->gradients) {
        kernel_test_assert_norm(got.run.dx, dx, X, 5e-6);
        kernel_test_assert_norm(got.run.dw, dw, W, 5e-6);
    }
}

START_TEST(divergence_equals_reference) {
    static const distilling all[] = {
        {64, 0, 1, 1, 1, true}, {7, 0, 2.5f, 0, 1, true}, {1, 5, 0.5f, 0.25f, 0.75f, true},
        {16, 5, 1, 1, 0, true}, {16, 0, 2, 1, 1, false},
    };
    for (int variant = 0; variant < 5; variant++) {
        kernel_test test;
        if (!kernel_test_open(&test, _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        const head h = make_head(&test, KERN_F32);
        const teacher from = make_teacher(&test, variant % 2 ? 45 : 96, variant == 3 ? KERN_BF16 : KERN_F32,
                                          variant % 3 == 1 ? 3.0f : 0.0f);
        place_rows(&test);
        check_taught(&test, &h, &from, &all[variant]);
        kern_weight_free(h.weight);
        kern_weight_free(from.weight);
        kernel_test_close(&test);
    }
}
END_TEST

// A student that is its teacher diverges by nothing and learns nothing; one that nearly is, by almost nothing, which
// never comes out negative.
START_TEST(the_teacher_itself_does_not_diverge) {
    const distilling d = {16, 0, 1, 0, 1, true};
    const float *zeros;
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const head h = make_head(&test, KERN_F32);
    teacher same = {.x = h.x, .w = h.w, .weight = h.weight, .width = WIDTH};
    place_rows(&test);
    zeros = kernel_test_zero_floats(&test, W);
    const taught_run own = run_taught(&test, &h, &same, &d);
    for (int t = 0; t < TOKENS; t++)
        ck_assert(own.divergence[t] == 0);
    for (int i = 0; i < X; i++)
        ck_assert(own.run.dx[i] == 0);
    kernel_test_assert_norm(own.run.dw, kernel_test_widened(&test, zeros, W), W, 0);
    for (double distance = 1e-6; distance < 1e-2; distance *= 10) {
        same.x = kernel_test_copy(&test, h.x, X);
        for (int i = 0; i < X; i++)
            same.x[i] += (float)((2 * kernel_test_uniform(&test) - 1) * distance);
        const taught_run near = run_taught(&test, &h, &same, &d);
        double *want = kernel_test_zero_doubles(&test, TOKENS);
        const kern_ref_head heads[] = {
            {WIDTH, 0, kernel_test_widened(&test, h.x, X), kernel_test_widened(&test, h.w, W)},
            {WIDTH, 0, kernel_test_widened(&test, same.x, X), kernel_test_widened(&test, h.w, W)}};
        kern_ref_head_divergence(TOKENS, VOCABULARY, &heads[0], &heads[1], 1, test.rows->target, NULL, want, NULL,
                                 NULL);
        for (int t = 0; t < TOKENS; t++)
            ck_assert(near.divergence[t] >= 0 && fabs((double)near.divergence[t] - want[t]) <= 1e-8 + 1e-2 * want[t]);
    }
    kern_weight_free(h.weight);
    kernel_test_close(&test);
}
END_TEST

// Logits of +-1000 of both.
START_TEST(divergence_of_large_logits_is_finite) {
    const distilling d = {16, 0, 1, 1, 1, true};
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const head h = make_head(&test, KERN_F32);
    const teacher from = make_teacher(&test, 96, KERN_F32, 0);
    place_rows(&test);
    for (int i = 0; i < X; i++)
        h.x[i] *= 100;
    for (int i = 0; i < TOKENS * 96; i++)
        from.x[i] *= 100;
    check_taught(&test, &h, &from, &d);
    kern_weight_free(h.weight);
    kern_weight_free(from.weight);
    kernel_test_close(&test);
}
END_TEST

#ifdef _OPENMP
START_TEST(threads_do_not_matter) {
    loss_run run[2];
    taught_run taught[2];
    kernel_test test[2];
    for (int i = 0; i < 2; i++) {
        omp_set_num_threads(i + 1);
        if (!kernel_test_open(&test[i], _i, "cpu"))
            MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
        head h = make_head(&test[i], KERN_F32);
        place_rows(&test[i]);
        const teacher from = make_teacher(&test[i], 45, KERN_F32, 0);
        run[i] = run_loss(&test[i], &h, 16, 0, true);
        taught[i] = run_taught(&test[i], &h, &from, &(distilling){16, 0, 2, 1, 1, true});
        kern_weight_free(h.weight);
        kern_weight_free(from.weight);
    }
    kernel_test_assert_same(taught[0].divergence, taught[1].divergence, TOKENS);
    kernel_test_assert_same(taught[0].run.dx, taught[1].run.dx, X);
    kernel_test_assert_same(taught[0].run.dw, taught[1].run.dw, W);
    kernel_test_assert_same(run[0].loss, run[1].loss, TOKENS);
    kernel_test_assert_same(run[0].dx, run[1].dx, X);
    kernel_test_assert_same(run[0].dw, run[1].dw, W);
    kernel_test_close(&test[0]);
    kernel_test_close(&test[1]);
}
END_TEST
#endif

// The reference's own backward against central differences of its forward.
enum { REF_TOKENS = 3, REF_VOCABULARY = 7, REF_WIDTH = 4 };
typedef struct ref_problem {
    double x[REF_TOKENS * REF_WIDTH], w[REF_VOCABULARY * REF_WIDTH], soft_cap;
} ref_problem;
static const int ref_target[REF_TOKENS] = {2, -1, 6};
static const double ref_target_weight[REF_TOKENS] = {0.5, 9, 2};

static double ref_loss(void *context) {
    const ref_problem *p = context;
    double loss[REF_TOKENS];
    kern_ref_head_loss(REF_TOKENS, REF_VOCABULARY, REF_WIDTH, p->soft_cap, p->x, p->w, ref_target, ref_target_weight,
                       loss, NULL, NULL);
    return kernel_test_dot(loss, ref_target_weight, REF_TOKENS);
}

START_TEST(reference_backward_equals_differences) {
    kernel_test test = {.seed = 3};
    for (int capped = 0; capped < 2; capped++) {
        ref_problem p = {.soft_cap = capped ? 1.5 : 0};
        double loss[REF_TOKENS], dx[REF_TOKENS * REF_WIDTH], dw[REF_VOCABULARY * REF_WIDTH] = {0};
        for (int i = 0; i < REF_TOKENS * REF_WIDTH; i++)
            p.x[i] = kernel_test_uniform(&test) - 0.5;
        for (int i = 0; i < REF_VOCABULARY * REF_WIDTH; i++)
            p.w[i] = kernel_test_uniform(&test) - 0.5;
        kern_ref_head_loss(REF_TOKENS, REF_VOCABULARY, REF_WIDTH, p.soft_cap, p.x, p.w, ref_target, ref_target_weight,
                           loss, dx, dw);
        kernel_test_gradient("dx", ref_loss, &p, p.x, dx, REF_TOKENS * REF_WIDTH, 1e-8);
        kernel_test_gradient("dw", ref_loss, &p, p.w, dw, REF_VOCABULARY * REF_WIDTH, 1e-8);
    }
}
END_TEST

typedef struct ref_teaching {
    ref_problem own, other;
} ref_teaching;

static void ref_divergence(const ref_teaching *p, double *divergence, double *dx, double *dw) {
    const kern_ref_head own = {REF_WIDTH, p->own.soft_cap, p->own.x, p->own.w};
    const kern_ref_head other = {REF_WIDTH, p->other.soft_cap, p->other.x, p->other.w};
    kern_ref_head_divergence(REF_TOKENS, REF_VOCABULARY, &own, &other, 1.75, ref_target, ref_target_weight, divergence,
                             dx, dw);
}

static double ref_teaching_loss(void *context) {
    double divergence[REF_TOKENS];
    ref_divergence(context, divergence, NULL, NULL);
    return kernel_test_dot(divergence, ref_target_weight, REF_TOKENS);
}

START_TEST(reference_divergence_equals_differences) {
    kernel_test test = {.seed = 5};
    for (int capped = 0; capped < 2; capped++) {
        ref_teaching p = {{.soft_cap = capped ? 1.5 : 0}, {.soft_cap = capped ? 2.5 : 0}};
        double divergence[REF_TOKENS], dx[REF_TOKENS * REF_WIDTH] = {0}, dw[REF_VOCABULARY * REF_WIDTH] = {0};
        for (int i = 0; i < REF_TOKENS * REF_WIDTH; i++)
            p.own.x[i] = kernel_test_uniform(&test) - 0.5, p.other.x[i] = 4 * kernel_test_uniform(&test) - 2;
        for (int i = 0; i < REF_VOCABULARY * REF_WIDTH; i++)
            p.own.w[i] = kernel_test_uniform(&test) - 0.5, p.other.w[i] = kernel_test_uniform(&test) - 0.5;
        ref_divergence(&p, divergence, dx, dw);
        ck_assert(divergence[0] > 0 && divergence[1] == 0);
        kernel_test_gradient("dx", ref_teaching_loss, &p, p.own.x, dx, REF_TOKENS * REF_WIDTH, 1e-8);
        kernel_test_gradient("dw", ref_teaching_loss, &p, p.own.w, dw, REF_VOCABULARY * REF_WIDTH, 1e-8);
    }
}
END_TEST

START_TEST(refuses_what_it_cannot_do) {
    kernel_test test;
    ck_assert(kernel_test_open(&test, 0, "cpu"));
    head h = make_head(&test, KERN_BF16);
    place_rows(&test);
    kern_head_loss_args args = {.x.f = h.x,
                                .weight.w = h.weight,
                                .loss.f = kernel_test_zero_floats(&test, TOKENS),
                                .tile.f = kernel_test_zero_floats(&test, VOCABULARY),
                                .width = WIDTH,
                                .vocabulary = VOCABULARY,
                                .tile_tokens = 1};
    kernel_test_launch(&test, KERN_OP_HEAD_LOSS, &args);
    test.rows->target[0] = VOCABULARY; // no such id
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_HEAD_LOSS, test.rows, &args), KERN_INVALID);
    test.rows->target[0] = 0;
    args.dx.f = kernel_test_zero_floats(&test, X); // bf16 has no backward
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOSS, &args, KERN_OK);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_HEAD_LOSS, test.rows, &args), KERN_UNSUPPORTED);
    args.dx.f = NULL, args.teacher_x.f = h.x, args.teacher_weight.w = h.weight, args.teacher_width = WIDTH;
    args.temperature = 1, args.divergence = args.loss, args.teacher_tile = args.tile;
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOSS, &args, KERN_OK);
    args.teacher_width = WIDTH + 1; // not the weight's
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOSS, &args, KERN_OK);
    ck_assert_int_eq(kern_launch(test.stream, KERN_OP_HEAD_LOSS, test.rows, &args), KERN_INVALID);
    args.temperature = 0;
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOSS, &args, KERN_INVALID);
    args.temperature = 1, args.divergence.f = NULL;
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOSS, &args, KERN_INVALID);
    args.divergence = args.loss, args.tile_tokens = 0;
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOSS, &args, KERN_INVALID);
    kern_head_logits_args logits = {.x.f = h.x, .weight.w = h.weight, .width = WIDTH, .vocabulary = VOCABULARY};
    kernel_test_assert_refused(&test, KERN_OP_HEAD_LOGITS, &logits, KERN_INVALID);
    kern_weight_free(h.weight);
    kernel_test_close(&test);
}
END_TEST

START_TEST(factor_and_scale_are_weights) {
    kernel_test test;
    if (!kernel_test_open(&test, _i, "cpu"))
        MESA_TEST_SKIP("no device %s", kernel_test_device_name(_i));
    const head h = make_head(&test, KERN_F32);
    float *factor = kernel_test_floats(&test, TOKENS, 0, 2);
    place_rows(&test);
    const loss_run scaled = run_scaled(&test, &h, 16, 0, true, factor, 0.5f);
    for (int t = 0; t < TOKENS; t++)
        test.rows->target_weight[t] *= factor[t] * 0.5f;
    const loss_run weighed = run_loss(&test, &h, 16, 0, true);
    kernel_test_assert_same(scaled.loss, weighed.loss, TOKENS);
    kernel_test_assert_norm(scaled.dx, kernel_test_widened(&test, weighed.dx, X), X, 1e-6);
    kernel_test_assert_norm(scaled.dw, kernel_test_widened(&test, weighed.dw, W), W, 1e-6);
    kern_weight_free(h.weight);
    kernel_test_close(&test);
}
END_TEST

static Suite *head_suite(void) {
    Suite *suite = suite_create("kernels/head");
    TCase *tcase = tcase_create("head");
    tcase_set_timeout(tcase, 60);
    tcase_add_loop_test(tcase, logits_equal_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, not_finite_is_told, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, loss_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, bf16_loss_without_gradient, 0, KERNEL_TEST_DEVICES);
    tcase_add_test(tcase, fast_loss);
    tcase_add_test(tcase, fast_gradients_of_an_even_vocabulary);
    tcase_add_loop_test(tcase, large_logits_stay_finite, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, divergence_equals_reference, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, the_teacher_itself_does_not_diverge, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, divergence_of_large_logits_is_finite, 0, KERNEL_TEST_DEVICES);
    tcase_add_loop_test(tcase, factor_and_scale_are_weights, 0, KERNEL_TEST_DEVICES);
#ifdef _OPENMP
    tcase_add_loop_test(tcase, threads_do_not_matter, 0, KERNEL_TEST_ISAS);
#endif
    tcase_add_test(tcase, reference_backward_equals_differences);
    tcase_add_test(tcase, reference_divergence_equals_differences);
    tcase_add_test(tcase, refuses_what_it_cannot_do);
    suite_add_tcase(suite, tcase);
    return suite;
}

MESA_TEST_MAIN(head_suite)

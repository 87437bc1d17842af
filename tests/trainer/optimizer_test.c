// SPDX-License-Identifier: Apache-2.0
// AdamW over the tensor table against the formula in double, clipping, decay groups, and moments in files.
// The reference keeps its own moments and parameters in double from the first update on.
#include "trainer/optimizer.h"

#include <string.h>

#include "engine/files.h"
#include "engine/safetensors.h"
#include "tests/check_main.h"
#include "tests/trainer/run_support.h"

typedef struct fixture {
    kern_device *device;
    kern_stream *stream;
    eng_model *model;
    eng_weights *weights;
    trn_optimizer optimizer;
} fixture;

static void setup(fixture *f, const trn_adamw *adamw) {
    static const char json[] =
        "{\"model_type\": \"mesa_net\", \"vocab_size\": 61, \"hidden_size\": 32, "
        "\"num_hidden_layers\": 1, \"num_heads\": 2, \"head_dim\": 16, \"intermediate_size\": 64}";
    eng_config config;
    f->device = open_device();
    ck_assert_int_eq(kern_stream_open(f->device, &f->stream), KERN_OK);
    ck_assert_int_eq(eng_config_parse(json, sizeof json - 1, "test", &config, NULL), ENG_OK);
    ck_assert_int_eq(eng_model_create(&config, &f->model, NULL), ENG_OK);
    ck_assert_int_eq(eng_weights_init(f->model, f->device, 3, false, &f->weights, NULL), ENG_OK);
    ck_assert_int_eq(trn_optimizer_create(f->weights, f->stream, adamw, NULL, NULL, &f->optimizer, NULL), ENG_OK);
}

static void teardown(fixture *f) {
    trn_optimizer_free(&f->optimizer);
    eng_weights_free(f->weights);
    eng_model_free(f->model);
    kern_stream_close(f->stream);
    kern_device_close(f->device);
}

static void fill_gradients(const fixture *f, int step) {
    for (int32_t t = 0; t < f->model->tensors; t++)
        for (int64_t i = 0; i < f->model->tensor[t].count; i++)
            f->weights->grad[t][i] = 1e-3F * (float)((i * 37 + t * 11 + step * 5) % 101 - 50);
}

static double true_norm(const fixture *f) {
    double sum = 0;
    for (int32_t t = 0; t < f->model->tensors; t++)
        for (int64_t i = 0; i < f->model->tensor[t].count; i++)
            sum += (double)f->weights->grad[t][i] * (double)f->weights->grad[t][i];
    return sqrt(sum);
}

// Norm, update and outcome as a step has them.
static double update(fixture *f, double rate) {
    double norm = 0;
    bool usable = false;
    ck_assert_int_eq(trn_optimizer_norm(&f->optimizer, NULL), ENG_OK);
    ck_assert_int_eq(trn_optimizer_update(&f->optimizer, rate, NULL), ENG_OK);
    ck_assert_int_eq(trn_optimizer_outcome(&f->optimizer, &norm, &usable, NULL), ENG_OK);
    ck_assert(usable);
    return norm;
}

typedef struct reference {
    double parameter, m, v;
} reference;

static void expect_updates(double clip) {
    const trn_adamw adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.1, .clip = clip};
    const double rate = 0.01;
    fixture f = {0};
    setup(&f, &adamw);
    reference *expected = calloc((size_t)f.weights->count, sizeof *expected);
    for (int64_t i = 0; i < f.weights->count; i++)
        expected[i].parameter = (double)f.weights->masters[i];
    for (int step = 1; step <= 3; step++) {
        fill_gradients(&f, step);
        double wanted_norm = true_norm(&f), scale = clip > 0 ? fmin(1, clip / (wanted_norm + 1e-6)) : 1;
        ck_assert_double_eq_tol(update(&f, rate), wanted_norm, 1e-9 * wanted_norm);
        ck_assert_int_eq(f.optimizer.updates, step);
        for (int32_t t = 0; t < f.model->tensors; t++) {
            const eng_tensor *tensor = &f.model->tensor[t];
            reference *r = expected + (f.weights->master[t] - f.weights->masters);
            for (int64_t i = 0; i < tensor->count; i++, r++) {
                double g = scale * (double)f.weights->grad[t][i];
                r->m = 0.9 * r->m + 0.1 * g;
                r->v = 0.98 * r->v + 0.02 * g * g;
                double m = r->m / (1 - pow(0.9, step)), v = r->v / (1 - pow(0.98, step));
                r->parameter -= rate * (m / (sqrt(v) + 1e-8) + (tensor->decay ? 0.1 : 0) * r->parameter);
                ck_assert_msg(fabs((double)f.weights->master[t][i] - r->parameter) < 2e-6, "%s[%lld] update %d",
                              tensor->name, (long long)i, step);
            }
        }
    }
    free(expected);
    teardown(&f);
}

START_TEST(updates_follow_the_formula) {
    expect_updates(0);
}
END_TEST

START_TEST(long_gradients_are_clipped) {
    expect_updates(0.5); // the norm is about 3
}
END_TEST

START_TEST(only_linear_weights_decay) {
    const trn_adamw adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.5};
    fixture f = {0};
    setup(&f, &adamw);
    int linear = 0;
    float *before = malloc(sizeof *before * (size_t)f.weights->count);
    memcpy(before, f.weights->masters, sizeof *before * (size_t)f.weights->count);
    ck_assert_int_eq(trn_optimizer_zero_gradients(&f.optimizer, NULL), ENG_OK);
    ck_assert(update(&f, 0.1) == 0); // no gradient: decay alone
    for (int32_t t = 0; t < f.model->tensors; t++) {
        const eng_tensor *tensor = &f.model->tensor[t];
        const float *old = before + (f.weights->master[t] - f.weights->masters);
        bool is_linear = strstr(tensor->name, "_proj.weight") || strcmp(tensor->name, "lm_head.weight") == 0;
        ck_assert_msg(tensor->decay == is_linear, "%s", tensor->name);
        linear += is_linear;
        for (int64_t i = 0; i < tensor->count; i++)
            ck_assert_float_eq_tol(f.weights->master[t][i], is_linear ? 0.95F * old[i] : old[i], 1e-7F);
    }
    ck_assert_int_eq(linear, 6 + 3 + 1); // q k v a b o, the MLP, the head
    free(before);
    teardown(&f);
}
END_TEST

// The update was launched before anybody knew; it leaves weights and moments alone, and is not counted.
START_TEST(a_gradient_that_is_of_no_use_updates_nothing) {
    const trn_adamw adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8};
    fixture f = {0};
    setup(&f, &adamw);
    const float bad[] = {NAN, INFINITY, -INFINITY, 1e30f}; // the last one's square is infinite
    size_t bytes = sizeof(float) * (size_t)f.weights->count;
    float *before = malloc(bytes);
    memcpy(before, f.weights->masters, bytes);
    for (int i = 0; i < 4; i++) {
        double norm = 0;
        bool usable = true;
        fill_gradients(&f, 0);
        f.weights->grad[f.model->tensors - 1][5] = bad[i];
        ck_assert_int_eq(trn_optimizer_norm(&f.optimizer, NULL), ENG_OK);
        ck_assert_int_eq(trn_optimizer_update(&f.optimizer, 0.1, NULL), ENG_OK);
        ck_assert_int_eq(trn_optimizer_outcome(&f.optimizer, &norm, &usable, NULL), ENG_OK);
        ck_assert(isfinite(norm) == (i == 3) && !usable);
        ck_assert_mem_eq(before, f.weights->masters, bytes);
        ck_assert(f.optimizer.m[0] == 0 && f.optimizer.v[0] == 0);
        ck_assert_int_eq(f.optimizer.updates, 0);
    }
    free(before);
    teardown(&f);
}
END_TEST

START_TEST(the_gate_may_be_updated_alone) {
    const trn_adamw adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .gate_alone = true};
    fixture f = {0};
    setup(&f, &adamw); // which has no gate
    size_t bytes = sizeof(float) * (size_t)f.weights->count;
    float *before = malloc(bytes);
    memcpy(before, f.weights->masters, bytes);
    fill_gradients(&f, 1);
    update(&f, 0.1);
    ck_assert_mem_eq(before, f.weights->masters, bytes);
    free(before);
    teardown(&f);
}
END_TEST

static eng_status load_from(trn_optimizer *optimizer, const char *name, eng_error *error) {
    const char *path = temp_path(name);
    return trn_optimizer_load(optimizer, &path, 1, error);
}

START_TEST(moments_come_back_from_a_file) {
    const trn_adamw adamw = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8};
    fixture a = {0}, b = {0};
    setup(&a, &adamw);
    setup(&b, &adamw);
    fill_gradients(&a, 1);
    update(&a, 0.01);
    ck_assert_int_eq(trn_optimizer_save(&a.optimizer, temp_path("o.safetensors"), NULL), ENG_OK);
    ck_assert_int_eq(load_from(&b.optimizer, "o.safetensors", NULL), ENG_OK);
    size_t bytes = sizeof(float) * (size_t)a.weights->count;
    ck_assert_mem_eq(a.optimizer.m, b.optimizer.m, bytes);
    ck_assert_mem_eq(a.optimizer.v, b.optimizer.v, bytes);
    ck_assert(a.optimizer.v[0] != 0);

    const float one = 1;
    const eng_st_source lone = {.name = "m.model.norm.weight", .dtype = ENG_F32, .ndim = 1, .shape = {1}, .data = &one};
    eng_error error = {0};
    ck_assert_int_eq(eng_st_write(temp_path("p.safetensors"), &lone, 1, NULL, NULL), ENG_OK);
    ck_assert_int_eq(load_from(&b.optimizer, "p.safetensors", &error), ENG_FORMAT);
    ck_assert_ptr_nonnull(strstr(error.text, "missing"));
    ck_assert_int_eq(load_from(&b.optimizer, "q.safetensors", NULL), ENG_NOT_FOUND);
    teardown(&a);
    teardown(&b);
}
END_TEST

static bool all_bf16(const fixture *f) {
    uint32_t bits, low = 0;
    for (int64_t i = 0; i < f->weights->count; i++) {
        memcpy(&bits, &f->weights->masters[i], sizeof bits);
        low |= bits & 0xFFFF;
    }
    return low == 0;
}

// Every update leaves bf16 numbers; what stands beside compensated ones goes into files, and is neither dropped nor
// missed in silence.
START_TEST(weights_may_be_rounded) {
    const trn_adamw plain = {.beta1 = 0.9, .beta2 = 0.98, .eps = 1e-8, .weight_decay = 0.1};
    trn_adamw random = plain, compensated = plain;
    random.rounding = KERN_ROUND_STOCHASTIC, compensated.rounding = KERN_ROUND_COMPENSATED;
    const trn_adamw *all[] = {&plain, &random, &compensated, &compensated};
    fixture f[4] = {0};
    eng_error error = {0};
    for (int i = 0; i < 4; i++) {
        setup(&f[i], all[i]);
        fill_gradients(&f[i], 1);
        update(&f[i], 0.01);
        ck_assert(all_bf16(&f[i]) == (i > 0));
    }
    double lost = 0;
    for (int32_t t = 0; t < f[0].model->tensors; t++)
        for (int64_t i = 0; i < f[0].model->tensor[t].count; i++) { // the same weight, in two parts
            const int64_t at = f[0].weights->master[t] - f[0].weights->masters + i;
            const double whole = (double)f[2].weights->masters[at] + (double)f[2].optimizer.rest[at];
            ck_assert_double_eq_tol(whole, (double)f[0].weights->masters[at], 1e-6);
            lost = fmax(lost, fabs((double)f[2].optimizer.rest[at]));
        }
    ck_assert(lost > 1e-5);
    ck_assert_int_eq(trn_optimizer_save(&f[0].optimizer, temp_path("plain.safetensors"), NULL), ENG_OK);
    ck_assert_int_eq(trn_optimizer_save(&f[2].optimizer, temp_path("rests.safetensors"), NULL), ENG_OK);
    const size_t bytes = sizeof(float) * (size_t)f[3].optimizer.moments;
    memset(f[3].optimizer.rest, 0, bytes);
    ck_assert_int_eq(load_from(&f[3].optimizer, "rests.safetensors", NULL), ENG_OK);
    ck_assert_mem_eq(f[3].optimizer.rest, f[2].optimizer.rest, bytes);
    ck_assert_int_eq(load_from(&f[0].optimizer, "rests.safetensors", &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "rests.safetensors: optim.rounding was compensated, and is not any more"));
    error = (eng_error){0};
    ck_assert_int_eq(load_from(&f[3].optimizer, "plain.safetensors", &error), ENG_INVALID);
    ck_assert_ptr_nonnull(strstr(error.text, "plain.safetensors: optim.rounding was not compensated, and is so now"));
    for (int i = 0; i < 4; i++)
        teardown(&f[i]);
}
END_TEST

static Suite *optimizer_suite(void) {
    Suite *suite = suite_create("optimizer");
    TCase *cases = tcase_create("adamw");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, updates_follow_the_formula);
    tcase_add_test(cases, long_gradients_are_clipped);
    tcase_add_test(cases, only_linear_weights_decay);
    tcase_add_test(cases, a_gradient_that_is_of_no_use_updates_nothing);
    tcase_add_test(cases, the_gate_may_be_updated_alone);
    tcase_add_test(cases, moments_come_back_from_a_file);
    tcase_add_test(cases, weights_may_be_rounded);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(optimizer_suite)

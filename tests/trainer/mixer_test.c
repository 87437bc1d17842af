// SPDX-License-Identifier: Apache-2.0
// Every mixer and its variants: the chunk form equals the step form, and gradients are those of the loss.
//
// One small model a variant, one block of each kind, random weights. Gradients of every tensor are compared with a
// central difference along random signs, which would notice a component that is missing. The values themselves are
// compared with independent implementations by mesa-trainer check, for the variants that the golden models have.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/mixer_variants.h"
#include "trainer/probe.h"

enum { TOKENS = 76, SPLIT = 41, VOCABULARY = MIXER_VOCABULARY };

static const kern_solver solver = {.mode = KERN_SOLVE_EXACT};

static void open_variant(int which, small_world *world, trn_probe *probe, int32_t ids[TOKENS]) {
    small_world_open(&mixer_variants[which], "cpu", world);
    *probe = (trn_probe){.device = world->device, .model = world->model, .weights = world->weights};
    mixer_prompt(7, ids, TOKENS);
}

START_TEST(prompt_equals_generated) {
    small_world world;
    trn_probe probe;
    int32_t ids[TOKENS];
    open_variant(_i, &world, &probe, ids);
    static float chunks[TOKENS * VOCABULARY], steps[TOKENS * VOCABULARY];
    eng_error error = {0};
    ck_assert_msg(trn_probe_logits(&probe, ids, TOKENS, TOKENS, solver, chunks, &error) == ENG_OK, "%s: %s",
                  mixer_variants[_i].name, error.text);
    ck_assert_int_eq(trn_probe_logits(&probe, ids, TOKENS, SPLIT, solver, steps, &error), ENG_OK);
    double difference = 0, norm = 0;
    for (int32_t i = 0; i < TOKENS * VOCABULARY; i++) {
        difference += pow((double)chunks[i] - (double)steps[i], 2);
        norm += pow((double)chunks[i], 2);
    }
    ck_assert_msg(norm > 0.1 && sqrt(difference / norm) < 1e-5, "%s: %g of %g", mixer_variants[_i].name,
                  sqrt(difference), sqrt(norm));
    small_world_close(&world);
}
END_TEST

static double loss_of(trn_probe *probe, const int32_t *ids) {
    double loss = 0;
    eng_error error = {0};
    ck_assert_msg(trn_probe_gradients(probe, ids, TOKENS, solver, &loss, &error) == ENG_OK, "%s", error.text);
    return loss;
}

// The loss with `step` added to every element, signs by the seed.
static double loss_beside(trn_probe *probe, const int32_t *ids, int32_t tensor, const float *signs, float step) {
    int64_t count = probe->model->tensor[tensor].count;
    float *values = probe->weights->master[tensor], *kept = malloc(sizeof *kept * (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        kept[i] = values[i];
        values[i] += signs[i] < 0 ? -step : step;
    }
    double loss = loss_of(probe, ids);
    for (int64_t i = 0; i < count; i++)
        values[i] = kept[i];
    free(kept);
    return loss;
}

// A wide step where the loss is smooth, else a narrow one, which kinks of relu do not reach but rounding does.
static void check_tensor(trn_probe *probe, const int32_t *ids, int32_t t, const float *gradient, const char *variant) {
    static const struct {
        float step;
        double noise;
    } tries[] = {{1e-3F, 3e-4}, {3e-5F, 1e-2}};
    const eng_tensor *tensor = &probe->model->tensor[t];
    float *signs = malloc(sizeof *signs * (size_t)tensor->count);
    eng_normals(3, (uint64_t)t, 0, tensor->count, 1, signs);
    double slope = 0, norm = 0, difference = 0;
    for (int64_t i = 0; i < tensor->count; i++) {
        slope += (double)(signs[i] < 0 ? -gradient[i] : gradient[i]);
        norm += (double)gradient[i] * (double)gradient[i];
    }
    bool equal = false;
    for (size_t i = 0; i < sizeof tries / sizeof *tries && !equal; i++) {
        double above = loss_beside(probe, ids, t, signs, tries[i].step);
        double below = loss_beside(probe, ids, t, signs, -tries[i].step);
        difference = (above - below) / (2 * (double)tries[i].step);
        equal = fabs(difference - slope) <= 0.02 * sqrt(norm) + tries[i].noise;
    }
    ck_assert_msg(equal, "%s: %s: slope %g, difference %g, norm %g", variant, tensor->name, slope, difference,
                  sqrt(norm));
    free(signs);
}

START_TEST(gradients_are_differences) {
    small_world world;
    trn_probe probe;
    int32_t ids[TOKENS];
    open_variant(_i, &world, &probe, ids);
    loss_of(&probe, ids);
    size_t bytes = sizeof(float) * (size_t)probe.weights->count;
    float *gradients = malloc(bytes);
    memcpy(gradients, probe.weights->grads, bytes);
    for (int32_t t = 0; t < probe.model->tensors; t++)
        check_tensor(&probe, ids, t, gradients + (probe.weights->grad[t] - probe.weights->grads),
                     mixer_variants[_i].name);
    free(gradients);
    small_world_close(&world);
}
END_TEST

static Suite *mixer_suite(void) {
    Suite *suite = suite_create("mixer");
    TCase *equal = tcase_create("variants");
    tcase_set_timeout(equal, 60);
    tcase_add_loop_test(equal, prompt_equals_generated, 0, MIXER_VARIANTS);
    tcase_add_loop_test(equal, gradients_are_differences, 0, MIXER_VARIANTS);
    suite_add_tcase(suite, equal);
    return suite;
}

MESA_TEST_MAIN(mixer_suite)

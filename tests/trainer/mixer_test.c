// SPDX-License-Identifier: Apache-2.0
// Every mixer and its variants: the chunk form equals the step form, gradients are those of the loss, packed documents
// are documents alone, and computing activations again changes no bit.
//
// One small model a variant, one block of each kind, random weights. Gradients of every tensor are compared with a
// central difference along random signs, which would notice a component that is missing. The values themselves are
// compared with independent implementations by mesa-trainer check and tests/models.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/mixer_variants.h"
#include "trainer/probe.h"
#include "trainer/runner.h"

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
    free(probe.gradients);
    small_world_close(&world);
}
END_TEST

// ------------------------------------------------------------------------------------------------ packing, recomputing

enum { CHUNK = 16, DOCUMENTS = 7, PAIRS = 1 + 2 + 3 + 15 + 16 + 17 + 34 };

// On the grid and off it, two and more in one chunk.
static const int32_t document_pairs[DOCUMENTS] = {1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 2};

typedef struct outcome {
    float loss[PAIRS];
    float *gradients;
    int64_t count;
} outcome;

static void add_row(trn_runner *runner, const int32_t *ids, int32_t count) {
    eng_error error = {0};
    int32_t first = runner->rows->n_tokens;
    ck_assert_msg(trn_runner_add_row(runner, KERN_ROW_PROMPT, -1, 0, ids, count, solver, &error) == ENG_OK, "%s",
                  error.text);
    for (int32_t i = 0; i < count; i++) {
        runner->rows->target[first + i] = (ids[i] * 5 + first + i) % VOCABULARY;
        runner->rows->target_weight[first + i] = 1.0F / PAIRS;
    }
}

// The documents one behind another in ids, as rows of their own or as one row.
static outcome run_documents(const small_world *world, const int32_t *ids, bool packed, eng_recompute recompute) {
    trn_runner runner = {0};
    eng_error error = {0};
    trn_runner_options options = {
        .plan = {.kind = ENG_PLAN_TRAIN, .max_tokens = PAIRS, .max_rows = DOCUMENTS, .recompute = recompute},
        .max_boundaries = DOCUMENTS};
    ck_assert_msg(trn_runner_create(world->weights, &options, &runner, &error) == ENG_OK, "%s", error.text);
    kern_rows *rows = runner.rows;
    rows->merge = true;
    if (packed)
        add_row(&runner, ids, PAIRS);
    for (int32_t d = 0, first = 0; d < DOCUMENTS; first += document_pairs[d++]) {
        if (!packed)
            add_row(&runner, ids + first, document_pairs[d]);
        else if (d > 0)
            rows->boundary[rows->n_boundaries++] = first;
    }
    rows->row[0].boundaries = rows->n_boundaries;
    outcome out = {.count = world->weights->count};
    size_t bytes = sizeof(float) * (size_t)out.count;
    ck_assert_int_eq(kern_zero(runner.stream, world->weights->grads, bytes), KERN_OK);
    ck_assert_msg(trn_runner_run(&runner, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(trn_runner_read(&runner, runner.plan->loss, out.loss, sizeof out.loss, NULL), ENG_OK);
    out.gradients = malloc(bytes);
    memcpy(out.gradients, world->weights->grads, bytes);
    trn_runner_free(&runner);
    return out;
}

static double distance(const float *got, const float *want, int64_t count) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += pow((double)got[i] - (double)want[i], 2);
        norm += pow((double)want[i], 2);
    }
    return sqrt(difference / norm);
}

static void open_documents(int which, small_world *world, int32_t ids[PAIRS]) {
    small_world_open(&mixer_variants[which], "cpu:16", world);
    mixer_prompt(11, ids, PAIRS);
}

START_TEST(packed_documents_are_documents_alone) {
    small_world world;
    int32_t ids[PAIRS];
    open_documents(_i, &world, ids);
    outcome packed = run_documents(&world, ids, true, ENG_RECOMPUTE_NONE);
    outcome alone = run_documents(&world, ids, false, ENG_RECOMPUTE_NONE);
    double losses = distance(packed.loss, alone.loss, PAIRS);
    ck_assert_msg(losses < 2e-6, "%s: losses differ by %g", mixer_variants[_i].name, losses);
    for (int32_t t = 0; t < world.model->tensors; t++) {
        int64_t first = world.weights->grad[t] - world.weights->grads, count = world.model->tensor[t].count;
        double off = distance(packed.gradients + first, alone.gradients + first, count);
        ck_assert_msg(!(off > 3e-5), "%s: gradients of %s differ by %g", mixer_variants[_i].name,
                      world.model->tensor[t].name, off);
    }
    free(packed.gradients);
    free(alone.gradients);
    small_world_close(&world);
}
END_TEST

START_TEST(a_document_does_not_reach_the_next) {
    small_world world;
    int32_t ids[PAIRS], last = 1 + 2 + 3 + (CHUNK - 1) - 1;
    open_documents(_i, &world, ids);
    outcome before = run_documents(&world, ids, true, ENG_RECOMPUTE_NONE);
    float target = before.loss[last];
    ids[last] = (ids[last] + 1) % VOCABULARY;
    outcome after = run_documents(&world, ids, true, ENG_RECOMPUTE_NONE);
    ck_assert_msg(target != after.loss[last], "%s", mixer_variants[_i].name);
    after.loss[last] = target;
    ck_assert_msg(memcmp(before.loss, after.loss, sizeof after.loss) == 0, "%s", mixer_variants[_i].name);
    free(before.gradients);
    free(after.gradients);
    small_world_close(&world);
}
END_TEST

START_TEST(computing_again_changes_no_bit) {
    small_world world;
    int32_t ids[PAIRS];
    open_documents(_i, &world, ids);
    outcome kept = run_documents(&world, ids, true, ENG_RECOMPUTE_NONE);
    for (eng_recompute recompute = ENG_RECOMPUTE_MIXER; recompute <= ENG_RECOMPUTE_BLOCK; recompute++) {
        outcome again = run_documents(&world, ids, true, recompute);
        ck_assert_msg(memcmp(kept.loss, again.loss, sizeof kept.loss) == 0 &&
                          memcmp(kept.gradients, again.gradients, sizeof(float) * (size_t)kept.count) == 0,
                      "%s: recompute %d", mixer_variants[_i].name, recompute);
        free(again.gradients);
    }
    free(kept.gradients);
    small_world_close(&world);
}
END_TEST

static Suite *mixer_suite(void) {
    Suite *suite = suite_create("mixer");
    TCase *equal = tcase_create("variants");
    tcase_set_timeout(equal, 60);
    tcase_add_loop_test(equal, prompt_equals_generated, 0, MIXER_VARIANTS);
    tcase_add_loop_test(equal, gradients_are_differences, 0, MIXER_VARIANTS);
    tcase_add_loop_test(equal, packed_documents_are_documents_alone, 0, MIXER_VARIANTS);
    tcase_add_loop_test(equal, a_document_does_not_reach_the_next, 0, MIXER_VARIANTS);
    tcase_add_loop_test(equal, computing_again_changes_no_bit, 0, MIXER_VARIANTS);
    suite_add_tcase(suite, equal);
    return suite;
}

MESA_TEST_MAIN(mixer_suite)

// SPDX-License-Identifier: Apache-2.0
// Looped models are the models that their loops written out as layers would be.
//
// For every mixer, between a softmax layer and itself: the same logits bit for bit in chunks and in steps, the same
// bytes of state and pages; gradients are the sums over the copies, whatever is computed again, and those of the last
// copies when only they are differentiated. With embeddings and gates, and for every objective over the loops: a step
// against the gradient lowers the loss by what the gradient says.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/export.h"
#include "engine/mixer.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/engine/temp_folder.h"
#include "trainer/probe.h"
#include "trainer/runner.h"

enum { TOKENS = 80, PAIRS = TOKENS - 1, SPLIT = 41, VOCABULARY = 24, LAYERS = 4, LOOPS = 3, COPIES = 2 + 2 * LOOPS };

#define COMMON                                                                                                      \
    "\"model_type\": \"mesa_net\", \"hidden_size\": 32, \"vocab_size\": 24, \"initializer_range\": 0.2,"            \
    "\"bos_token_id\": 0, \"eos_token_id\": 1, \"intermediate_size\": 48, \"num_heads\": 2, \"head_dim\": 16,"      \
    "\"norm_eps\": 0.01, \"mamba2\": {\"expand\": 1, \"state_size\": 8}, \"rglru\": {\"num_attention_heads\": 4}, " \
    "\"attn\": {\"num_heads\": 4, \"num_kv_heads\": 2},"                                                            \
    "\"recurrence\": {\"decay\": \"channel\", \"update\": \"delta\"},"

static const kern_solver solver = {.mode = KERN_SOLVE_EXACT};

static int mixer_count(void) {
    int count = 0;
    while (eng_mixer_at((size_t)count))
        count++;
    return count;
}

static void open_world(const char *name, const char *config, small_world *world) {
    small_model small = {name, config, false, false};
    small_world_open(&small, "cpu", world);
}

static void make_ids(int32_t *ids) {
    small_prompt(7, ids, TOKENS);
    for (int32_t i = 0; i < TOKENS; i++)
        ids[i] = (ids[i] + (i > 30 ? ids[i - 30] : 0)) % VOCABULARY;
}

// The layer of the looped model [0] [1 2] x LOOPS [3] that stands at place `copy` when it is written out.
static int original(int copy) {
    return copy == 0 ? 0 : copy == COPIES - 1 ? LAYERS - 1 : 1 + (copy - 1) % 2;
}

static void open_pair(const char *mixer, small_world *looped, small_world *plain) {
    char config[1280], types[512];
    snprintf(config, sizeof config,
             "{" COMMON "\"num_hidden_layers\": 4, \"num_loops\": 3, \"loop_blocks\": [1, 2],"
             "\"layer_types\": [\"%s\", \"%s\", \"attention\", \"%s\"]}",
             mixer, mixer, mixer);
    open_world(mixer, config, looped);
    int at = 0;
    for (int i = 0; i < COPIES; i++)
        at += snprintf(types + at, sizeof types - (size_t)at, "%s\"%s\"", i ? ", " : "",
                       original(i) == 2 ? "attention" : mixer);
    snprintf(config, sizeof config, "{" COMMON "\"num_hidden_layers\": %d, \"layer_types\": [%s]}", COPIES, types);
    open_world(mixer, config, plain);
}

// The looped model's tensor of which tensor `index` of the written-out model is a copy.
static int32_t original_tensor(const small_world *looped, const small_world *plain, int32_t index) {
    static const char prefix[] = "model.layers.";
    const eng_tensor *copy = &plain->model->tensor[index];
    char name[ENG_NAME_SIZE + 16];
    if (copy->layer < 0)
        snprintf(name, sizeof name, "%s", copy->name);
    else
        snprintf(name, sizeof name, "%s%d%s", prefix, original(copy->layer), strchr(copy->name + strlen(prefix), '.'));
    int32_t found = eng_model_find(looped->model, name);
    ck_assert_msg(found >= 0, "no %s", name);
    return found;
}

static void copy_weights(const small_world *looped, const small_world *plain) {
    for (int32_t i = 0; i < plain->model->tensors; i++)
        memcpy(plain->weights->master[i], looped->weights->master[original_tensor(looped, plain, i)],
               sizeof(float) * (size_t)plain->model->tensor[i].count);
}

static void read_logits(const small_world *world, int32_t split, float *logits) {
    int32_t ids[TOKENS];
    eng_error error = {0};
    trn_probe probe = {.device = world->device, .model = world->model, .weights = world->weights};
    make_ids(ids);
    ck_assert_msg(trn_probe_logits(&probe, ids, TOKENS, split, solver, logits, &error) == ENG_OK, "%s", error.text);
}

// The mean loss and its gradients into world->weights->grads.
static double take_gradients(const small_world *world, eng_plan_options plan) {
    int32_t ids[TOKENS];
    float loss[PAIRS];
    double sum = 0;
    eng_error error = {0};
    trn_runner runner;
    plan.kind = ENG_PLAN_TRAIN;
    plan.max_tokens = PAIRS;
    plan.max_rows = 1;
    make_ids(ids);
    ck_assert_msg(trn_runner_create(world->weights, &(trn_runner_options){.plan = plan}, &runner, &error) == ENG_OK,
                  "%s", error.text);
    ck_assert_int_eq(trn_runner_add_row(&runner, KERN_ROW_PROMPT, -1, 0, ids, PAIRS, solver, &error), ENG_OK);
    for (int32_t i = 0; i < PAIRS; i++) {
        runner.rows->target[i] = ids[i + 1];
        runner.rows->target_weight[i] = 1.0F / PAIRS;
    }
    if (runner.plan->entropy.ref)
        *(float *)eng_plan_address(&runner.memory, runner.plan->entropy) = 0.2F;
    memset(world->weights->grads, 0, sizeof(float) * (size_t)world->weights->count);
    ck_assert_msg(trn_runner_run(&runner, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(trn_runner_read(&runner, runner.plan->loss, loss, sizeof loss, &error), ENG_OK);
    for (int32_t i = 0; i < PAIRS; i++)
        sum += (double)loss[i] / PAIRS;
    trn_runner_free(&runner);
    return sum;
}

// ---------------------------------------------------------------------------------------------- beside the written-out

START_TEST(loops_are_layers) {
    const char *mixer = eng_mixer_at((size_t)_i)->name;
    static float looped_logits[TOKENS * VOCABULARY], plain_logits[TOKENS * VOCABULARY];
    small_world looped, plain;
    open_pair(mixer, &looped, &plain);
    copy_weights(&looped, &plain);
    ck_assert_uint_eq(looped.model->final_offset, plain.model->final_offset); // the states of all layers
    ck_assert_uint_eq(looped.model->page_bytes, plain.model->page_bytes);
    ck_assert_double_eq_tol(eng_model_flops(looped.model, 50, 3), eng_model_flops(plain.model, 50, 3), 1);
    for (int32_t split = SPLIT; split <= TOKENS; split += TOKENS - SPLIT) {
        read_logits(&looped, split, looped_logits);
        read_logits(&plain, split, plain_logits);
        ck_assert_msg(memcmp(looped_logits, plain_logits, sizeof plain_logits) == 0, "%s: %d ids as prompt", mixer,
                      split);
    }
    small_world_close(&looped);
    small_world_close(&plain);
}
END_TEST

// Adds the copies' gradients up as the looped model's, those of the copies in loops before `from_loop` apart.
static float *sum_copies(const small_world *looped, const small_world *plain, int from_loop) {
    float *sum = calloc((size_t)looped->weights->count, sizeof *sum);
    for (int32_t i = 0; i < plain->model->tensors; i++) {
        const eng_tensor *copy = &plain->model->tensor[i];
        bool loops = copy->layer > 0 && copy->layer < COPIES - 1;
        if (loops && (copy->layer - 1) / 2 < from_loop)
            continue;
        int32_t to = original_tensor(looped, plain, i);
        int64_t offset = looped->weights->grad[to] - looped->weights->grads;
        for (int64_t j = 0; j < copy->count; j++)
            sum[offset + j] += plain->weights->grad[i][j];
    }
    return sum;
}

static void same_gradients(const small_world *looped, const float *wanted, int32_t first, int32_t end,
                           const char *what) {
    for (int32_t i = 0; i < looped->model->tensors; i++) {
        const eng_tensor *tensor = &looped->model->tensor[i];
        if (tensor->layer < first || tensor->layer >= end)
            continue;
        const float *got = looped->weights->grad[i], *want = wanted + (got - looped->weights->grads);
        double difference = 0, norm = 0;
        for (int64_t j = 0; j < tensor->count; j++) {
            difference += pow((double)got[j] - (double)want[j], 2);
            norm += pow((double)want[j], 2);
        }
        ck_assert_msg(sqrt(difference) <= 2e-5 * sqrt(norm) + 1e-9, "%s: gradient of %s is off by %g of %g", what,
                      tensor->name, sqrt(difference), sqrt(norm));
    }
}

START_TEST(gradients_are_sums_over_the_copies) {
    const char *mixer = eng_mixer_at((size_t)_i)->name;
    small_world looped, plain;
    open_pair(mixer, &looped, &plain);
    copy_weights(&looped, &plain);
    double loss = take_gradients(&plain, (eng_plan_options){0});
    float *all = sum_copies(&looped, &plain, 0), *last = sum_copies(&looped, &plain, LOOPS - 1);
    float *kept = malloc(sizeof *kept * (size_t)looped.weights->count);
    for (int recompute = ENG_RECOMPUTE_NONE; recompute <= ENG_RECOMPUTE_BLOCK; recompute++) {
        double own = take_gradients(&looped, (eng_plan_options){.recompute = (eng_recompute)recompute});
        ck_assert_double_eq(own, loss);
        same_gradients(&looped, all, -1, LAYERS, mixer);
        if (recompute == ENG_RECOMPUTE_NONE)
            memcpy(kept, looped.weights->grads, sizeof *kept * (size_t)looped.weights->count);
        ck_assert_int_eq(memcmp(kept, looped.weights->grads, sizeof *kept * (size_t)looped.weights->count), 0);
        take_gradients(&looped, (eng_plan_options){.recompute = (eng_recompute)recompute, .backward_loops = 1});
        same_gradients(&looped, last, 1, LAYERS, mixer);
        take_gradients(&looped, (eng_plan_options){.backward_loops = LOOPS});
        same_gradients(&looped, all, -1, LAYERS, mixer);
    }
    free(all);
    free(last);
    free(kept);
    small_world_close(&looped);
    small_world_close(&plain);
}
END_TEST

// ------------------------------------------------------------------------------------------------ embeddings and gates

static void open_told_apart(const char *mixer, small_world *world) {
    char config[1280];
    snprintf(config, sizeof config,
             "{" COMMON "\"num_hidden_layers\": 2, \"num_loops\": 3, \"loop_blocks\": [0, 1], \"loop_embedding\": true,"
             "\"loop_residual_gate\": true, \"exit_gate\": true, \"layer_types\": [\"%s\", \"attention\"]}",
             mixer);
    open_world(mixer, config, world);
    float *embedding = small_tensor(world, "loop_embedding.weight"),
          *gate = small_tensor(world, "loop_residual_gate.weight");
    for (int i = 0; i < LOOPS * 32; i++) {
        ck_assert_float_eq(embedding[i], 0);
        ck_assert_float_eq(gate[i], 0);
        embedding[i] = 0.3F * sinf((float)i);
        gate[i] = 0.2F * cosf(1.7F * (float)i);
    }
    for (int i = 0; i < 32; i++)
        small_tensor(world, "exit_gate.weight")[i] = 0.4F * sinf(2.1F * (float)i);
    *small_tensor(world, "exit_gate.bias") = -0.3F;
}

static double gradient_norm(const small_world *world, const char *name) {
    const eng_tensor *tensor = &world->model->tensor[eng_model_find(world->model, name)];
    const float *grad = world->weights->grad[tensor - world->model->tensor];
    double square = 0;
    for (int64_t i = 0; i < tensor->count; i++)
        square += pow((double)grad[i], 2);
    return sqrt(square);
}

// A step of length `step` along the gradient of these tensors (NULL: all) changes the loss by -step |g|.
static void check_step(const small_world *world, eng_plan_options plan, const char *name, double step) {
    eng_weights *weights = world->weights;
    int32_t only = name ? eng_model_find(world->model, name) : -1;
    double before = take_gradients(world, plan), square = 0;
    float *masters = malloc(sizeof *masters * (size_t)weights->count);
    memcpy(masters, weights->masters, sizeof *masters * (size_t)weights->count);
    for (int32_t i = 0; i < world->model->tensors; i++)
        for (int64_t j = 0; (only < 0 || i == only) && j < world->model->tensor[i].count; j++)
            square += pow((double)weights->grad[i][j], 2);
    double norm = sqrt(square);
    ck_assert_msg(norm > 1e-4 && isfinite(norm), "%s: gradient of norm %g", name ? name : "all", norm);
    for (int32_t i = 0; i < world->model->tensors; i++)
        for (int64_t j = 0; (only < 0 || i == only) && j < world->model->tensor[i].count; j++)
            weights->master[i][j] -= (float)(step / norm * (double)weights->grad[i][j]);
    double change = (before - take_gradients(world, plan)) / (step * norm);
    ck_assert_msg(fabs(change - 1) < 0.25, "%s: the loss falls by %g of what it should", name ? name : "all", change);
    memcpy(weights->masters, masters, sizeof *masters * (size_t)weights->count);
    free(masters);
}

START_TEST(told_apart) {
    const char *mixer = eng_mixer_at((size_t)_i)->name;
    static float chunks[TOKENS * VOCABULARY], steps[TOKENS * VOCABULARY], again[TOKENS * VOCABULARY];
    small_world world;
    eng_error error = {0};
    open_told_apart(mixer, &world);
    read_logits(&world, TOKENS, chunks);
    read_logits(&world, SPLIT, steps);
    double difference = 0, norm = 0;
    for (int i = 0; i < TOKENS * VOCABULARY; i++) {
        difference += pow((double)chunks[i] - (double)steps[i], 2);
        norm += pow((double)chunks[i], 2);
    }
    ck_assert_msg(norm > 0.1 && sqrt(difference / norm) < 1e-5, "%s: %g of %g", mixer, sqrt(difference), sqrt(norm));
    check_step(&world, (eng_plan_options){0}, NULL, 3e-3);
    check_step(&world, (eng_plan_options){0}, "loop_embedding.weight", 3e-3);
    check_step(&world, (eng_plan_options){0}, "loop_residual_gate.weight", 3e-3);
    ck_assert_double_eq(gradient_norm(&world, "exit_gate.weight"), 0);
    ck_assert_msg(eng_checkpoint_save(temp_path("model"), world.weights, ENG_F32, NULL, &error) == ENG_OK, "%s",
                  error.text);
    small_world loaded = {0};
    trn_probe probe;
    ck_assert_msg(trn_probe_open(temp_path("model"), "cpu", true, KERN_STORE_F32, &probe, &error) == ENG_OK, "%s",
                  error.text);
    loaded.device = probe.device;
    loaded.model = (eng_model *)probe.model;
    loaded.weights = probe.weights;
    read_logits(&loaded, TOKENS, again);
    ck_assert_msg(memcmp(again, chunks, sizeof again) == 0, "%s: the saved model is another one", mixer);
    trn_probe_close(&probe);
    small_world_close(&world);
}
END_TEST

// ------------------------------------------------------------------------------------------- losses of all the loops

START_TEST(every_objective_has_its_gradient) {
    const char *mixer = eng_mixer_at((size_t)_i)->name;
    small_world world;
    open_told_apart(mixer, &world);
    eng_plan_options plan = {.loop_loss = ENG_LOOP_LOSS_WEIGHTED, .loop_constant = {0.5F, 0, 0.7F}};
    check_step(&world, plan, NULL, 3e-3);
    plan = (eng_plan_options){
        .loop_loss = ENG_LOOP_LOSS_EXPECTED, .recompute = ENG_RECOMPUTE_BLOCK, .loop_constant = {-1.2F, -0.9F, -1.2F}};
    check_step(&world, plan, NULL, 3e-3);
    check_step(&world, plan, "exit_gate.weight", 3e-3);
    check_step(&world, plan, "exit_gate.bias", 3e-3);
    check_step(&world, plan, "loop_embedding.weight", 3e-3);
    plan.loop_loss = ENG_LOOP_LOSS_NEXT;
    plan.gate_sharpness = 3;
    plan.gate_margin = 0.05F;
    for (; plan.loop_loss <= ENG_LOOP_LOSS_PREVIOUS; plan.loop_loss++) {
        check_step(&world, plan, NULL, 3e-3);
        for (int32_t i = 0; i < world.model->tensors; i++)
            ck_assert((gradient_norm(&world, world.model->tensor[i].name) > 0) ==
                      (i == world.model->exit_gate || i == world.model->exit_bias));
    }
    small_world_close(&world);
}
END_TEST

// A weight on the last loop alone is the last loop's loss; the losses of the loops are those that scoring tells.
START_TEST(the_last_loops_weight_is_its_loss) {
    small_world world;
    open_told_apart("mesa_net", &world);
    double loss = take_gradients(&world, (eng_plan_options){0});
    size_t bytes = sizeof(float) * (size_t)world.weights->count;
    float *final = malloc(bytes);
    memcpy(final, world.weights->grads, bytes);
    double own =
        take_gradients(&world, (eng_plan_options){.loop_loss = ENG_LOOP_LOSS_WEIGHTED, .loop_constant = {0, 0, 1}});
    ck_assert_double_eq_tol(own, loss, 1e-7);
    same_gradients(&world, final, -1, LAYERS, "the last loop's weight");
    free(final);
    small_world_close(&world);
}
END_TEST

START_TEST(losses_of_loops_need_them) {
    static const struct {
        const char *keys, *words;
        eng_loop_loss loss;
    } cases[] = {
        {"\"num_hidden_layers\": 2", "ends with its loop", ENG_LOOP_LOSS_WEIGHTED},
        {"\"num_hidden_layers\": 2, \"num_loops\": 2, \"loop_blocks\": [0]", "ends with its loop",
         ENG_LOOP_LOSS_EXPECTED},
        {"\"num_hidden_layers\": 2, \"num_loops\": 2", "exit gate", ENG_LOOP_LOSS_NEXT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[1024];
        small_world world;
        trn_runner runner;
        eng_error error = {0};
        snprintf(config, sizeof config, "{" COMMON "\"layer_types\": [\"gla\", \"mesa_net\"], %s}", cases[i].keys);
        open_world("refused", config, &world);
        const trn_runner_options options = {
            .plan = {.kind = ENG_PLAN_TRAIN, .max_tokens = 9, .max_rows = 1, .loop_loss = cases[i].loss}};
        ck_assert_int_eq(trn_runner_create(world.weights, &options, &runner, &error), ENG_UNSUPPORTED);
        ck_assert_msg(strstr(error.text, cases[i].words), "%s", error.text);
        small_world_close(&world);
    }
}
END_TEST

// What other programs would read as the plain model is not written as theirs.
START_TEST(exported_as_it_is_alone) {
    small_world world;
    eng_error error = {0};
    open_told_apart("mesa_net", &world);
    ck_assert_int_eq(eng_checkpoint_export(temp_path("fla"), world.weights, ENG_FORM_FLA, ENG_F32, NULL, &error),
                     ENG_UNSUPPORTED);
    ck_assert_msg(strstr(error.text, "num_loops"), "%s", error.text);
    ck_assert_int_eq(eng_checkpoint_export(temp_path("mesa"), world.weights, ENG_FORM_MESA, ENG_F32, NULL, &error),
                     ENG_OK);
    small_world_close(&world);
}
END_TEST

static Suite *loops_suite(void) {
    Suite *suite = suite_create("loops");
    TCase *table = tcase_create("table");
    tcase_add_checked_fixture(table, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(table, 60);
    tcase_add_loop_test(table, loops_are_layers, 0, mixer_count());
    tcase_add_loop_test(table, gradients_are_sums_over_the_copies, 0, mixer_count());
    tcase_add_loop_test(table, told_apart, 0, mixer_count());
    tcase_add_loop_test(table, every_objective_has_its_gradient, 0, mixer_count());
    tcase_add_test(table, the_last_loops_weight_is_its_loss);
    tcase_add_test(table, losses_of_loops_need_them);
    tcase_add_test(table, exported_as_it_is_alone);
    suite_add_tcase(suite, table);
    return suite;
}

MESA_TEST_MAIN(loops_suite)

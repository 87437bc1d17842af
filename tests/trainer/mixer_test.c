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
#include "tests/engine/small_models.h"
#include "trainer/probe.h"

enum { TOKENS = 76, SPLIT = 41, VOCABULARY = 24 };

#define SMALL \
    "\"hidden_size\": 32, \"vocab_size\": 24, \"initializer_range\": 0.2, \"bos_token_id\": 0, \"eos_token_id\": 1,"
// The large epsilon keeps norms of nearly empty read-outs smooth, which a difference needs.
#define FLA SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 1, \"norm_eps\": 0.01, "

static const small_model variants[] = {
    {"linear_attn: elementwise product", "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2}", false, false},
    {"linear_attn: hedgehog, tied, normaliser, shared keys",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"feature_map\": \"hedgehog\","
     "\"tie_feature_map_qk\": true, \"norm_feature_map\": true}",
     false, false},
    {"linear_attn: t2r, divided by sums",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2, \"feature_map\": \"t2r\", \"norm_q\": true,"
     "\"norm_k\": true}",
     false, false},
    {"linear_attn: dpfp", "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2, \"feature_map\": \"dpfp\"}",
     false, false},
    {"linear_attn: elu, shared keys, expanded",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"feature_map\": \"elu\","
     "\"expand_v\": 2, \"expand_k\": 0.5}",
     false, false},
    {"retnet: shared keys, feature map",
     "{\"model_type\": \"retnet\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"feature_map\": \"relu\"}", false,
     false},
    {"retnet: no gate", "{\"model_type\": \"retnet\", " FLA "\"num_heads\": 2, \"use_output_gate\": false}", false,
     false},
    {"gla: convolution, shared keys, clamp",
     "{\"model_type\": \"gla\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"use_short_conv\": true,"
     "\"clamp_min\": -0.05}",
     false, false},
    {"gla: feature map, no gate",
     "{\"model_type\": \"gla\", " FLA "\"num_heads\": 2, \"feature_map\": \"sigmoid\", \"use_output_gate\": false}",
     false, false},
    {"delta_net: relu, gate, negative eigenvalues",
     "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"qk_activation\": \"relu\", \"use_gate\": true,"
     "\"allow_neg_eigval\": true}",
     false, false},
    {"delta_net: divided by sums, no convolution",
     "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"qk_norm\": \"sum\", \"qk_activation\": \"elu\","
     "\"use_short_conv\": false}",
     false, false},
    {"delta_net: no beta", "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"use_beta\": false}", false,
     false},
    {"delta_net: no beta, negative eigenvalues",
     "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"use_beta\": false, \"allow_neg_eigval\": true}", false,
     false},
    {"gated_deltanet: value groups, expanded",
     "{\"model_type\": \"gated_deltanet\", " FLA "\"num_heads\": 2, \"num_v_heads\": 4, \"head_dim\": 8,"
     "\"allow_neg_eigval\": true}",
     false, false},
    {"gated_deltanet: no gate, no convolution",
     "{\"model_type\": \"gated_deltanet\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"use_gate\": false,"
     "\"use_short_conv\": false}",
     false, false},
    {"kda: value groups, bounded decay",
     "{\"model_type\": \"kda\", " FLA "\"num_heads\": 2, \"num_v_heads\": 4, \"head_dim\": 8, \"lower_bound\": -5,"
     "\"safe_gate\": true}",
     false, false},
    {"kda", "{\"model_type\": \"kda\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"expand_v\": 0.5}", false, false},
    {"mamba2: groups",
     "{\"model_type\": \"mamba2\", " SMALL "\"num_hidden_layers\": 2, \"num_heads\": 8,"
     "\"head_dim\": 8, \"state_size\": 16, \"n_groups\": 2, \"time_step_limit\": [0.0, Infinity]}",
     false, false},
    {"mamba2: groups, norm a group, biases, limits",
     "{\"model_type\": \"mamba2\", " SMALL "\"num_hidden_layers\": 1, \"norm_eps\": 1e-5, \"head_dim\": 8,"
     "\"state_size\": 16, \"n_groups\": 2, \"norm_before_gate\": true, \"D_has_hdim\": true, \"use_bias\": true,"
     "\"dt_limit\": [0.01, 0.5]}",
     false, false},
    {"mamba2: no norm, no bias of the convolution",
     "{\"model_type\": \"mamba2\", " SMALL "\"num_hidden_layers\": 1, \"norm_eps\": 1e-5, \"head_dim\": 16,"
     "\"state_size\": 8, \"rmsnorm\": false, \"use_conv_bias\": false}",
     false, false},
    {"xlstm", "{\"model_type\": \"xlstm\", " SMALL "\"num_hidden_layers\": 1, \"num_heads\": 2}", false, false},
    {"recurrent_gemma: recurrent and attention",
     "{\"model_type\": \"recurrent_gemma\", " SMALL "\"num_hidden_layers\": 3, \"intermediate_size\": 64,"
     "\"num_attention_heads\": 4, \"num_key_value_heads\": 1, \"attention_window_size\": 20, \"lru_width\": 48,"
     "\"attention_bias\": true}",
     false, false},
    {"recurrence: none", "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16}", false, false},
    {"recurrence: head, no norms, no convolution",
     "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"recurrence\": {\"decay\": \"head\","
     "\"conv\": false, \"qk_norm\": false, \"out_norm\": false, \"out_gate\": true}}",
     false, false},
    {"recurrence: scalar, input gate",
     "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"recurrence\": {\"decay\":"
     "\"scalar\", \"input_gate\": true, \"out_gate\": true}}",
     false, false},
    {"recurrence: channel, delta",
     "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"recurrence\": {\"decay\":"
     "\"channel\", \"update\": \"delta\"}}",
     false, false},
    {"a hybrid of named layers",
     "{\"model_type\": \"mesa_net\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 3, \"num_heads\": 2,"
     "\"head_dim\": 16, \"layer_types\": [\"gated_deltanet\", \"attention\", \"recurrence\"]}",
     false, false},
};

static const kern_solver solver = {.mode = KERN_SOLVE_EXACT};

static void open_variant(int which, small_world *world, trn_probe *probe, int32_t ids[TOKENS]) {
    small_world_open(&variants[which], "cpu", world);
    *probe = (trn_probe){.device = world->device, .model = world->model, .weights = world->weights};
    small_prompt(7, ids, TOKENS);
    for (int32_t i = 0; i < TOKENS; i++)
        ids[i] = (ids[i] + (i > 30 ? ids[i - 30] : 0)) % VOCABULARY;
}

START_TEST(prompt_equals_generated) {
    small_world world;
    trn_probe probe;
    int32_t ids[TOKENS];
    open_variant(_i, &world, &probe, ids);
    static float chunks[TOKENS * VOCABULARY], steps[TOKENS * VOCABULARY];
    eng_error error = {0};
    ck_assert_msg(trn_probe_logits(&probe, ids, TOKENS, TOKENS, solver, chunks, &error) == ENG_OK, "%s: %s",
                  variants[_i].name, error.text);
    ck_assert_int_eq(trn_probe_logits(&probe, ids, TOKENS, SPLIT, solver, steps, &error), ENG_OK);
    double difference = 0, norm = 0;
    for (int32_t i = 0; i < TOKENS * VOCABULARY; i++) {
        difference += pow((double)chunks[i] - (double)steps[i], 2);
        norm += pow((double)chunks[i], 2);
    }
    ck_assert_msg(norm > 0.1 && sqrt(difference / norm) < 1e-5, "%s: %g of %g", variants[_i].name, sqrt(difference),
                  sqrt(norm));
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
        check_tensor(&probe, ids, t, gradients + (probe.weights->grad[t] - probe.weights->grads), variants[_i].name);
    free(gradients);
    small_world_close(&world);
}
END_TEST

static Suite *mixer_suite(void) {
    Suite *suite = suite_create("mixer");
    TCase *equal = tcase_create("variants");
    tcase_set_timeout(equal, 60);
    tcase_add_loop_test(equal, prompt_equals_generated, 0, (int)(sizeof variants / sizeof *variants));
    tcase_add_loop_test(equal, gradients_are_differences, 0, (int)(sizeof variants / sizeof *variants));
    suite_add_tcase(suite, equal);
    return suite;
}

MESA_TEST_MAIN(mixer_suite)

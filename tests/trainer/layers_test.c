// SPDX-License-Identifier: Apache-2.0
// layer_types: every mixer of the table beside every other, in the common block.
//
// Each pair is saved, opened again as it was, gives the same logits in chunks and in steps, and learns: a step against
// the gradient lowers the loss by what the gradient says. Then: where a layer's keys may stand.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/mixer.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/engine/temp_folder.h"
#include "trainer/probe.h"

enum { TOKENS = 72, SPLIT = 37, VOCABULARY = 24 };

#define COMMON                                                                                                      \
    "\"model_type\": \"mesa_net\", \"hidden_size\": 32, \"vocab_size\": 24, \"initializer_range\": 0.2,"            \
    "\"bos_token_id\": 0, \"eos_token_id\": 1, \"intermediate_size\": 48, \"num_heads\": 2, \"head_dim\": 16,"      \
    "\"norm_eps\": 0.01, \"mamba2\": {\"expand\": 1, \"state_size\": 8}, \"rglru\": {\"num_attention_heads\": 4}, " \
    "\"attn\": {\"num_heads\": 4, \"num_kv_heads\": 2, \"window_size\": 20},"                                       \
    "\"recurrence\": {\"decay\": \"channel\", \"update\": \"delta\"},"

static const kern_solver solver = {.mode = KERN_SOLVE_EXACT};

static size_t mixer_count(void) {
    size_t count = 0;
    while (eng_mixer_at(count))
        count++;
    return count;
}

static void make_ids(int32_t *ids) {
    small_prompt(7, ids, TOKENS);
    for (int32_t i = 0; i < TOKENS; i++)
        ids[i] = (ids[i] + (i > 30 ? ids[i - 30] : 0)) % VOCABULARY;
}

static void read_logits(trn_probe *probe, const int32_t *ids, int32_t split, float *logits) {
    eng_error error = {0};
    ck_assert_msg(trn_probe_logits(probe, ids, TOKENS, split, solver, logits, &error) == ENG_OK, "%s", error.text);
}

static void check_forms(trn_probe *probe, const int32_t *ids, const float *chunks, const char *name) {
    static float steps[TOKENS * VOCABULARY];
    read_logits(probe, ids, SPLIT, steps);
    double difference = 0, norm = 0;
    for (int32_t i = 0; i < TOKENS * VOCABULARY; i++) {
        difference += pow((double)chunks[i] - (double)steps[i], 2);
        norm += pow((double)chunks[i], 2);
    }
    ck_assert_msg(norm > 0.1 && sqrt(difference / norm) < 1e-5, "%s: %g of %g", name, sqrt(difference), sqrt(norm));
}

static void check_saved(const float *chunks, const int32_t *ids, const char *name) {
    static float again[TOKENS * VOCABULARY];
    trn_probe probe;
    eng_error error = {0};
    ck_assert_msg(trn_probe_open(temp_path("model"), "cpu", true, KERN_STORE_F32, &probe, &error) == ENG_OK, "%s: %s",
                  name, error.text);
    read_logits(&probe, ids, TOKENS, again);
    ck_assert_msg(memcmp(again, chunks, sizeof again) == 0, "%s: the saved model is another one", name);
    trn_probe_close(&probe);
}

static double loss_of(trn_probe *probe, const int32_t *ids) {
    double loss = 0;
    eng_error error = {0};
    ck_assert_msg(trn_probe_gradients(probe, ids, TOKENS, solver, &loss, &error) == ENG_OK, "%s", error.text);
    return loss;
}

// A step of length `step` along the gradient g changes the loss by -step |g|.
static void check_step(trn_probe *probe, const int32_t *ids, const char *name) {
    static const double step = 3e-3;
    double before = loss_of(probe, ids), square = 0;
    for (int64_t i = 0; i < probe->weights->count; i++)
        square += pow((double)probe->weights->grads[i], 2);
    double norm = sqrt(square);
    ck_assert_msg(norm > 1e-3 && isfinite(norm), "%s: gradient of norm %g", name, norm);
    for (int64_t i = 0; i < probe->weights->count; i++)
        probe->weights->masters[i] -= (float)(step / norm * (double)probe->weights->grads[i]);
    double change = (before - loss_of(probe, ids)) / (step * norm);
    ck_assert_msg(fabs(change - 1) < 0.25, "%s: the loss falls by %g of what it should", name, change);
}

START_TEST(pairs) {
    size_t count = mixer_count();
    const char *first = eng_mixer_at((size_t)_i / count)->name, *second = eng_mixer_at((size_t)_i % count)->name;
    char config[1024], name[64];
    snprintf(config, sizeof config, "{" COMMON "\"num_hidden_layers\": 2, \"layer_types\": [\"%s\", \"%s\"]}", first,
             second);
    snprintf(name, sizeof name, "%s, %s", first, second);
    small_model small = {name, config, false, false};
    small_world world;
    int32_t ids[TOKENS];
    static float chunks[TOKENS * VOCABULARY];
    small_world_open(&small, "cpu", &world);
    ck_assert_str_eq(world.model->config.layer[0].mixer->name, first);
    ck_assert_str_eq(world.model->config.layer[1].mixer->name, second);
    ck_assert(world.model->layer[0].mlp_norm >= 0 && world.model->layer[1].down_proj >= 0);
    trn_probe probe = {.device = world.device, .model = world.model, .weights = world.weights};
    make_ids(ids);
    read_logits(&probe, ids, TOKENS, chunks);
    check_forms(&probe, ids, chunks, name);
    eng_error error = {0};
    ck_assert_msg(eng_checkpoint_save(temp_path("model"), world.weights, ENG_F32, NULL, &error) == ENG_OK, "%s",
                  error.text);
    check_saved(chunks, ids, name);
    check_step(&probe, ids, name);
    free(probe.gradients);
    small_world_close(&world);
}
END_TEST

static eng_config parse(const char *json) {
    eng_config config;
    eng_error error = {0};
    ck_assert_msg(eng_config_parse(json, strlen(json), "config.json", &config, &error) == ENG_OK, "%s", error.text);
    return config;
}

// In the entry, else in the object called like the mixer, else at the top.
START_TEST(where_keys_stand) {
    eng_config config =
        parse("{" COMMON "\"num_hidden_layers\": 6, \"layer_types\": [\"rglru\", \"mesa_net\","
              "{\"mixer\": \"attention\", \"window_size\": null, \"rope_theta\": 500}, \"attention\","
              "{\"mixer\": \"mamba2\", \"state_size\": 4}, {\"mixer\": \"gated_deltanet\", \"num_heads\": 1}]}");
    const eng_layer_config *layer = config.layer;
    ck_assert_int_eq(layer[0].rglru.blocks, 4);
    ck_assert_int_eq(layer[1].recurrent.heads, 2);
    ck_assert_int_eq(layer[2].attention.window, 0);
    ck_assert_double_eq(layer[2].attention.rope_theta, 500);
    ck_assert_int_eq(layer[2].attention.kv_heads, 2);
    ck_assert_int_eq(layer[3].attention.window, 20);
    ck_assert_double_eq(layer[3].attention.rope_theta, 10000);
    ck_assert_int_eq(layer[4].recurrent.key_width, 4);
    ck_assert_int_eq(layer[4].recurrent.heads, 2);
    ck_assert_int_eq(layer[5].recurrent.heads, 1);
    ck_assert_int_eq(layer[5].recurrent.key_width, 16);
    eng_config_free(&config);
}
END_TEST

START_TEST(refusals_name_the_place) {
    static const struct {
        const char *types, *words;
    } cases[] = {
        {"[\"mesa_net\", \"rwkv7\"]", "layer_types: entry 1 ('rwkv7')"},
        {"[\"mesa_net\", {\"mixer\": 3}]", "layer_types: entry 1 ('no name')"},
        {"[\"mesa_net\", 3]", "layer_types: entry 1 ('no name')"},
        {"[\"mesa_net\", {\"mixer\": \"gla\", \"expand_k\": -1}]", "layer_types: expand_k: is -1"},
        {"[\"mesa_net\", {\"mixer\": \"attention\", \"num_heads\": 5}]", "layer_types: num_heads: 5 does not divide"},
        {"[\"mesa_net\", \"mamba2\"], \"head_dim\": 5", "head_dim: 5 does not divide the 32"},
        {"[\"mesa_net\", \"rglru\"], \"rglru\": {\"num_attention_heads\": 5}", "rglru.num_attention_heads: 5"},
        {"[\"mesa_net\", \"gla\"], \"gla\": 7", "gla: must be an object"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[512];
        eng_config config;
        eng_error error = {0};
        snprintf(
            json, sizeof json,
            "{\"model_type\": \"mesa_net\", \"hidden_size\": 32, \"num_hidden_layers\": 2, \"mamba2\": {\"expand\": 1},"
            "\"layer_types\": %s}",
            cases[i].types);
        ck_assert_int_ne(eng_config_parse(json, strlen(json), "config.json", &config, &error), ENG_OK);
        ck_assert_msg(strstr(error.text, cases[i].words), "%s: %s", json, error.text);
    }
}
END_TEST

static Suite *layers_suite(void) {
    Suite *suite = suite_create("layers");
    TCase *table = tcase_create("table");
    tcase_add_checked_fixture(table, temp_folder_make, temp_folder_remove);
    int count = (int)mixer_count();
    tcase_add_loop_test(table, pairs, 0, count * count);
    suite_add_tcase(suite, table);
    TCase *keys = tcase_create("keys");
    tcase_add_test(keys, where_keys_stand);
    tcase_add_test(keys, refusals_name_the_place);
    suite_add_tcase(suite, keys);
    return suite;
}

MESA_TEST_MAIN(layers_suite)

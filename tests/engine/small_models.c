// SPDX-License-Identifier: Apache-2.0
// The models of small_models.h, their folders and their tokenizer.
//
// Configurations are texts, read as a folder's would be. Failures in here end the test case.
#include "tests/engine/small_models.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"

#define COMMON                                                                                                \
    "\"hidden_size\": 64, \"intermediate_size\": 96, \"vocab_size\": 272, \"max_position_embeddings\": 2048," \
    "\"initializer_range\": 0.15, \"bos_token_id\": 256, \"eos_token_id\": 257, \"tie_word_embeddings\": false"

const small_model small_models[SMALL_MODELS] = {
    [SMALL_MESA] = {"mesa",
                    "{\"model_type\": \"mesa_net\", \"num_heads\": 2, \"head_dim\": 32, \"num_hidden_layers\": 2,"
                    "\"use_output_gate\": true," COMMON "}",
                    false, true},
    [SMALL_HYBRID] = {"hybrid",
                      "{\"model_type\": \"mesa_net\", \"num_heads\": 2, \"head_dim\": 32, \"num_hidden_layers\": 3,"
                      "\"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 2, \"window_size\": 24}," COMMON
                      "}",
                      false, true},
    [SMALL_LLAMA] = {"llama",
                     "{\"model_type\": \"llama\", \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
                     "\"num_hidden_layers\": 2, \"hidden_act\": \"silu\"," COMMON "}",
                     true, false},
    [SMALL_LOOPED] = {"looped",
                      "{\"model_type\": \"mesa_net\", \"num_heads\": 2, \"head_dim\": 32, \"num_hidden_layers\": 3,"
                      "\"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 2}, \"num_loops\": 3,"
                      "\"loop_blocks\": [1, 2], \"exit_gate\": true, \"mesa\": {\"exit_threshold\": 0.6}," COMMON "}",
                      true, true},
};

static eng_model *make_model(const small_model *small) {
    eng_config config;
    eng_model *model = NULL;
    eng_error error = {0};
    eng_status status = eng_config_parse(small->config, strlen(small->config), small->name, &config, &error);
    if (status == ENG_OK)
        status = eng_model_create(&config, &model, &error);
    ck_assert_msg(status == ENG_OK, "%s: %s", small->name, error.text);
    return model;
}

// Of random weights the tokens would leave at one loop.
static void vary_exits(const small_world *world) {
    const int32_t gate = world->model->exit_gate;
    if (gate < 0)
        return;
    const size_t count = (size_t)world->model->tensor[gate].count;
    float *values = malloc(count * sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)((i * 37 + 11) % 64) / 256 - 0.125F;
    ck_assert_int_eq(kern_upload(world->stream, world->weights->master[gate], values, count * sizeof *values), KERN_OK);
    ck_assert_int_eq(kern_synchronize(world->stream), KERN_OK);
    free(values);
}

void small_world_open(const small_model *small, const char *device, small_world *out) {
    eng_error error = {0};
    char reason[256] = "";
    *out = (small_world){.model = make_model(small)};
    ck_assert_msg(kern_device_open(&(kern_device_options){.name = device}, &out->device, reason, sizeof reason) ==
                      KERN_OK,
                  "%s", reason);
    ck_assert_int_eq(kern_stream_open(out->device, &out->stream), KERN_OK);
    ck_assert_msg(eng_weights_init(out->model, out->device, 20, false, &out->weights, &error) == ENG_OK, "%s",
                  error.text);
    vary_exits(out);
}

void small_world_close(small_world *world) {
    eng_weights_free(world->weights);
    kern_stream_close(world->stream);
    kern_device_close(world->device);
    eng_model_free(world->model);
}

float *small_tensor(const small_world *world, const char *name) {
    int32_t index = eng_model_find(world->model, name);
    ck_assert_msg(index >= 0, "no tensor %s", name);
    return world->weights->master[index];
}

void small_prompt(uint64_t seed, int32_t *ids, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        uint32_t word[4];
        eng_philox(seed, 7, (uint64_t)i, word);
        ids[i] = (int32_t)(word[0] % 256);
    }
}

// ------------------------------------------------------------------------------------------------------ the tokenizer

static bool is_printed_as_itself(int byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

// The character that byte-level vocabularies write for a byte, inside a JSON string.
static void write_byte(FILE *file, int byte) {
    int point = byte;
    if (!is_printed_as_itself(byte)) {
        point = 256;
        for (int earlier = 0; earlier < byte; earlier++)
            point += !is_printed_as_itself(earlier);
    }
    fprintf(file, "\"\\u%04x\": %d", point, byte);
}

static void write_tokenizer(const char *dir) {
    char path[512];
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    FILE *file = fopen(path, "wb");
    ck_assert_ptr_nonnull(file);
    fprintf(file,
            "{\"added_tokens\": [{\"id\": %d, \"content\": \"<s>\", \"special\": true},"
            "{\"id\": %d, \"content\": \"</s>\", \"special\": true}], \"normalizer\": null,"
            "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": true},"
            "\"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\"},"
            "\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {",
            SMALL_BOS, SMALL_EOS);
    for (int byte = 0; byte < 256; byte++) {
        fputs(byte ? ", " : "", file);
        write_byte(file, byte);
    }
    fputs("}}}", file);
    ck_assert_int_eq(fclose(file), 0);
}

void small_checkpoint(const char *dir, const small_model *small, void (*edit)(small_world *), bool tokenizer) {
    small_world world;
    eng_error error = {0};
    small_world_open(small, "cpu", &world);
    if (edit)
        edit(&world);
    eng_status status = eng_checkpoint_save(dir, world.weights, ENG_F32, NULL, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
    if (tokenizer)
        write_tokenizer(dir);
    small_world_close(&world);
}

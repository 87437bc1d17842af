// SPDX-License-Identifier: Apache-2.0
// Hawk and Griffin as transformers writes them, model_type recurrent_gemma (models.md 13): blocks, windowed attention,
// and the order of the layers, beside what the rglru mixer reads itself.
#include "engine/config_internal.h"

#include <string.h>

#include "engine/mixer.h"

void eng_config_gemma_backbone(eng_keys *keys, eng_config *config) {
    int64_t twice = eng_keys_integer(keys, "intermediate_size", 3 * (int64_t)config->hidden_size, 2, 1 << 20);
    if (twice % 2 != 0)
        eng_keys_fail(keys, ENG_FORMAT, "intermediate_size", "is %lld, must be even", (long long)twice);
    config->intermediate_size = (int32_t)(twice / 2);
    config->mlp_bias = true;
    config->scale_embeddings = config->round_scale = true;
    config->norm_offset = 1;
    config->logits_soft_cap = (float)eng_keys_number(keys, "logits_soft_cap", 30, 0, 1e6);
    static const eng_choice activations[] = {{"gelu_pytorch_tanh", KERN_GELU_TANH}};
    config->mlp_activation = eng_config_choice(keys, "hidden_activation", activations, 1);
}

static void read_rotary(eng_keys *keys, eng_attention_config *attention) {
    const json_t *object = eng_keys_value(keys, "rope_parameters");
    eng_keys rope = *keys;
    attention->rope_theta = eng_keys_number(&rope, "rope_theta", 10000, 1, 1e12);
    double share = eng_keys_number(&rope, "partial_rotary_factor", 0.5, 0, 1);
    if (object) {
        rope.object = object;
        rope.scope = "rope_parameters.";
        if (!json_is_object(object))
            eng_keys_fail(keys, ENG_FORMAT, "rope_parameters", "must be an object");
        attention->rope_theta = eng_keys_number(&rope, "rope_theta", attention->rope_theta, 1, 1e12);
        share = eng_keys_number(&rope, "partial_rotary_factor", share, 0, 1);
        static const eng_choice types[] = {{"default", 0}};
        eng_config_choice(&rope, "rope_type", types, 1);
    }
    attention->rope_factor = 1;
    attention->rotary = (int32_t)(attention->head_width * share);
    if (rope.status == ENG_OK && (attention->rotary < 2 || attention->rotary % 2 != 0))
        eng_keys_fail(&rope, ENG_UNSUPPORTED, "partial_rotary_factor", "rotates %d of %d channels, must be even",
                      attention->rotary, attention->head_width);
    if (keys->status == ENG_OK)
        keys->status = rope.status;
}

static eng_attention_config read_local_attention(eng_keys *keys, int32_t hidden, int32_t heads) {
    eng_attention_config attention = {.heads = heads, .output_bias = true};
    attention.kv_heads = eng_config_heads(keys, "num_key_value_heads", heads);
    eng_config_divides(keys, "num_key_value_heads", attention.kv_heads, heads, "query heads");
    attention.head_width = (int32_t)eng_keys_integer(keys, "head_dim", hidden / heads, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    attention.window = (int32_t)eng_keys_integer(keys, "attention_window_size", 2048, 1, ENG_CONFIG_MAX_WINDOW);
    attention.qkv_bias = eng_keys_flag(keys, "attention_bias", false);
    read_rotary(keys, &attention);
    return attention;
}

void eng_config_gemma_layers(eng_keys *keys, eng_config *config) {
    static const char *const usual[] = {"recurrent", "recurrent", "attention"};
    int32_t heads = eng_config_heads(keys, "num_attention_heads", 10);
    eng_layer_config recurrent = {.mixer = &eng_mixer_rglru}, attention = {.mixer = &eng_mixer_attention};
    recurrent.mixer->read(keys, config, &recurrent);
    attention.attention = read_local_attention(keys, config->hidden_size, heads);
    const json_t *types = eng_keys_value(keys, "block_types");
    size_t count = types ? json_array_size(types) : 3;
    if (count == 0)
        eng_keys_fail(keys, ENG_FORMAT, "block_types", "must be a list of names");
    for (int32_t i = 0; keys->status == ENG_OK && i < config->layers; i++) {
        size_t entry = (size_t)i % count;
        const char *name = types ? json_string_value(json_array_get(types, entry)) : usual[entry];
        bool attends = name && strcmp(name, "attention") == 0;
        if (!attends && (!name || strcmp(name, "recurrent") != 0))
            eng_keys_fail(keys, ENG_UNSUPPORTED, "block_types", "'%.32s' is not supported (recurrent, attention)",
                          name ? name : "no string");
        config->layer[i] = attends ? attention : recurrent;
    }
}

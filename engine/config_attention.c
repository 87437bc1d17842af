// SPDX-License-Identifier: Apache-2.0
// Softmax layers of a config.json: flash-linear-attention's Transformer and hybrids, Llama and its rotations.
//
// Defaults are the public configuration classes' own (models.md 1.5, 9). Kinds of rotation that are not computed here
// are refused by the key's name.
#include "engine/config_internal.h"

#include <string.h>

#include "engine/mixer.h"

static void check_rotary_width(eng_keys *keys, const char *key, int32_t head_width) {
    if (head_width % 2 != 0 || head_width > ENG_CONFIG_MAX_HEAD_WIDTH)
        eng_keys_fail(keys, ENG_UNSUPPORTED, key, "a softmax head of width %d, must be even and at most %d", head_width,
                      ENG_CONFIG_MAX_HEAD_WIDTH);
}

static void read_kv_heads(eng_keys *keys, const char *key, eng_attention_config *attention) {
    attention->kv_heads = (int32_t)eng_keys_integer(keys, key, attention->heads, 1, ENG_CONFIG_MAX_HEADS);
    if (keys->status == ENG_OK && attention->heads % attention->kv_heads != 0)
        eng_keys_fail(keys, ENG_FORMAT, key, "%d does not divide the %d query heads", attention->kv_heads,
                      attention->heads);
}

static void read_hidden_share(eng_keys *keys, const char *key, int32_t hidden, eng_attention_config *attention) {
    if (keys->status == ENG_OK && hidden % attention->heads != 0)
        eng_keys_fail(keys, ENG_FORMAT, key, "%d does not divide hidden_size %d", attention->heads, hidden);
    attention->head_width = hidden / attention->heads;
    check_rotary_width(keys, key, attention->head_width);
}

eng_attention_config eng_config_attention(eng_keys *keys, int32_t hidden, int32_t default_heads) {
    eng_attention_config attention = {.heads = 1};
    if (default_heads == 0 && !eng_keys_value(keys, "num_heads"))
        eng_keys_fail(keys, ENG_FORMAT, "num_heads", "is missing");
    attention.heads = (int32_t)eng_keys_integer(keys, "num_heads", default_heads, 1, ENG_CONFIG_MAX_HEADS);
    if (keys->status != ENG_OK)
        return attention;
    read_hidden_share(keys, "num_heads", hidden, &attention);
    read_kv_heads(keys, "num_kv_heads", &attention);
    attention.window = (int32_t)eng_keys_integer(keys, "window_size", 0, 1, ENG_CONFIG_MAX_WINDOW);
    attention.qkv_bias = eng_keys_flag(keys, "qkv_bias", false);
    attention.qk_norm = eng_keys_flag(keys, "qk_norm", false);
    attention.rope_theta = eng_keys_number(keys, "rope_theta", 10000, 1, 1e12);
    attention.rope_factor = 1;
    attention.rotary = attention.head_width;
    return attention;
}

static void read_llama3(eng_keys *rope, eng_attention_config *attention) {
    static const char *const required[] = {"factor", "low_freq_factor", "high_freq_factor",
                                           "original_max_position_embeddings"};
    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++) {
        if (!eng_keys_value(rope, required[i]))
            eng_keys_fail(rope, ENG_FORMAT, required[i], "is missing");
    }
    attention->rope_scaling = ENG_ROPE_LLAMA3;
    attention->rope_factor = eng_keys_number(rope, "factor", 1, 1, 1e6);
    attention->rope_low = eng_keys_number(rope, "low_freq_factor", 1, 1e-6, 1e6);
    attention->rope_high = eng_keys_number(rope, "high_freq_factor", 4, 1e-6, 1e6);
    attention->rope_original_length = eng_keys_number(rope, "original_max_position_embeddings", 1, 1, 1e12);
    if (rope->status == ENG_OK && attention->rope_high <= attention->rope_low)
        eng_keys_fail(rope, ENG_FORMAT, "high_freq_factor", "must be above low_freq_factor");
}

static void refuse_partial_rotation(eng_keys *keys) {
    if (eng_keys_number(keys, "partial_rotary_factor", 1, 0, 1) != 1)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "partial_rotary_factor", "only 1 is supported");
}

// rope: rope_parameters or rope_scaling.
static void read_rope(eng_keys *rope, eng_attention_config *attention) {
    attention->rope_theta = eng_keys_number(rope, "rope_theta", attention->rope_theta, 1, 1e12);
    refuse_partial_rotation(rope);
    const char *key = eng_keys_value(rope, "rope_type") ? "rope_type" : "type";
    const char *type = eng_keys_text(rope, key, "default");
    if (strcmp(type, "linear") == 0) {
        attention->rope_scaling = ENG_ROPE_LINEAR;
        if (!eng_keys_value(rope, "factor"))
            eng_keys_fail(rope, ENG_FORMAT, "factor", "is missing");
        attention->rope_factor = eng_keys_number(rope, "factor", 1, 1, 1e6);
    } else if (strcmp(type, "llama3") == 0) {
        read_llama3(rope, attention);
    } else if (strcmp(type, "default") != 0) {
        eng_keys_fail(rope, ENG_UNSUPPORTED, key, "'%.32s' is not supported", type);
    }
}

static void read_llama_rope(eng_keys *keys, eng_attention_config *attention) {
    attention->rope_factor = 1;
    attention->rope_theta = eng_keys_number(keys, "rope_theta", 10000, 1, 1e12);
    refuse_partial_rotation(keys);
    const json_t *parameters = eng_keys_value(keys, "rope_parameters"), *scaling = eng_keys_value(keys, "rope_scaling");
    if (parameters && scaling)
        eng_keys_fail(keys, ENG_FORMAT, "rope_scaling", "stands beside rope_parameters");
    const json_t *object = parameters ? parameters : scaling;
    if (!object || keys->status != ENG_OK)
        return;
    if (!json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, parameters ? "rope_parameters" : "rope_scaling", "must be an object");
        return;
    }
    eng_keys rope = eng_keys_of(keys, object, parameters ? "rope_parameters." : "rope_scaling.");
    read_rope(&rope, attention);
    keys->status = rope.status;
}

// Newer writers list "full_attention" for each layer; any other kind is another model.
static void check_llama_layer_types(eng_keys *keys, int32_t layers) {
    const json_t *types = eng_keys_value(keys, "layer_types");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *name = json_string_value(json_array_get(types, i));
        if (!name || strcmp(name, "full_attention") != 0)
            eng_keys_fail(keys, ENG_UNSUPPORTED, "layer_types", "entry %zu ('%.32s'): only full_attention", i,
                          name ? name : "no string");
    }
    if (types && json_array_size(types) != (size_t)layers)
        eng_keys_fail(keys, ENG_FORMAT, "layer_types", "must be a list of %d names, one a layer", layers);
}

void eng_config_llama_layers(eng_keys *keys, eng_config *config) {
    eng_layer_config layer = {.mixer = &eng_mixer_attention};
    eng_attention_config *attention = &layer.attention;
    attention->heads = (int32_t)eng_keys_integer(keys, "num_attention_heads", 32, 1, ENG_CONFIG_MAX_HEADS);
    read_kv_heads(keys, "num_key_value_heads", attention);
    if (eng_keys_value(keys, "head_dim")) {
        attention->head_width = (int32_t)eng_keys_integer(keys, "head_dim", 2, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
        check_rotary_width(keys, "head_dim", attention->head_width);
    } else {
        read_hidden_share(keys, "num_attention_heads", config->hidden_size, attention);
    }
    attention->rotary = attention->head_width;
    attention->qkv_bias = attention->output_bias = eng_keys_flag(keys, "attention_bias", false);
    check_llama_layer_types(keys, config->layers);
    read_llama_rope(keys, attention);
    eng_config_set_layers(config, &layer);
}

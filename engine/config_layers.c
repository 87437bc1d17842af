// SPDX-License-Identifier: Apache-2.0
// The mixers of a config.json: Mesa layers, softmax layers, and which layer is which (recurrent ones:
// config_recurrent.c).
//
// Two ways to write a hybrid are read. FLA's: an `attn` object, or a list of them, each with the layers that it turns
// into softmax layers. This project's: `layer_types`, one mixer name a layer, where recurrent layers take the top-level
// keys and softmax layers those of an `attn` object without `layers`, or the top-level ones of model_type transformer.
// Defaults are the public configuration classes' own.
#include "engine/config_internal.h"

#include <string.h>

#include "engine/mixer.h"

enum { MAX_MESA_HEAD_WIDTH = 128, MAX_TAPS = 16, MAX_STEPS = 256 };

static const int32_t fla_default_heads = 32;

static void read_mesa(eng_keys *keys, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    layer->mixer = &eng_mixer_mesa;
    own->heads = own->query_heads = own->key_heads = own->value_heads =
        (int32_t)eng_keys_integer(keys, "num_heads", 16, 1, ENG_CONFIG_MAX_HEADS);
    own->key_width = own->value_width = (int32_t)eng_keys_integer(keys, "head_dim", 128, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    if (own->key_width > MAX_MESA_HEAD_WIDTH)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "head_dim", "is %d, Mesa layers take at most %d", own->key_width,
                      MAX_MESA_HEAD_WIDTH);
    own->taps = (int32_t)eng_keys_integer(keys, "conv_size", 4, 1, MAX_TAPS);
    own->plain_values = true;
    own->key_activation = KERN_SILU;
    own->value_activation = KERN_IDENTITY;
    own->qk_norm = true;
    own->decay = KERN_DECAY_SCALAR;
    own->update = KERN_UPDATE_ADD;
    own->weighted = true;
    own->write_factor = 1;
    own->output_gate = eng_keys_flag(keys, "use_output_gate", false);
    layer->mesa = (eng_mesa_config){
        .lambda_bound = (float)eng_keys_number(keys, "lambda_lower_bound", 0.25, 0, 1e6),
        .cg_steps_training = (int32_t)eng_keys_integer(keys, "max_cg_step_training", 30, 0, MAX_STEPS),
        .cg_steps_decoding = (int32_t)eng_keys_integer(keys, "max_cg_step_decoding", 30, 0, MAX_STEPS),
        .gamma_cap = (float)eng_keys_number(keys, "gamma_cap_b", 1, 0, 1),
    };
}

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

// The keys of model_type transformer, which those of an `attn` object are a part of. default_heads 0: required.
static eng_attention_config read_fla_attention(eng_keys *keys, int32_t hidden, int32_t default_heads) {
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

static eng_keys keys_of(const eng_keys *parent, const json_t *object, const char *scope) {
    return (eng_keys){
        .object = object, .path = parent->path, .scope = scope, .status = parent->status, .error = parent->error};
}

void eng_config_set_layers(eng_config *config, const eng_layer_config *layer) {
    for (int32_t i = 0; i < config->layers; i++)
        config->layer[i] = *layer;
}

// One `attn` object of a FLA hybrid.
static void apply_attn(eng_keys *keys, eng_config *config, const json_t *object) {
    if (!json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, "attn", "must be null, an object or a list of objects");
        return;
    }
    eng_keys attn = keys_of(keys, object, "attn.");
    eng_layer_config layer = {.mixer = &eng_mixer_attention};
    layer.attention = read_fla_attention(&attn, config->hidden_size, 0);
    const json_t *list = eng_keys_value(&attn, "layers");
    if (!json_is_array(list))
        eng_keys_fail(&attn, ENG_FORMAT, "layers", "must be a list of layer numbers");
    for (size_t i = 0; attn.status == ENG_OK && i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        json_int_t index = json_is_integer(entry) ? json_integer_value(entry) : -1;
        if (index < 0 || index >= config->layers)
            eng_keys_fail(&attn, ENG_FORMAT, "layers", "entry %zu must be a layer number from 0 to %d", i,
                          config->layers - 1);
        else if (config->layer[index].mixer == &eng_mixer_attention)
            eng_keys_fail(&attn, ENG_FORMAT, "layers", "names layer %d twice", (int)index);
        else
            config->layer[index] = layer;
    }
    keys->status = attn.status;
}

static void read_layer_types_attention(eng_keys *keys, eng_config *config, eng_layer_config *layer) {
    layer->mixer = &eng_mixer_attention;
    const json_t *object = eng_keys_value(keys, "attn");
    if (!object) {
        layer->attention = read_fla_attention(keys, config->hidden_size, fla_default_heads);
        return;
    }
    eng_keys attn = keys_of(keys, object, "attn.");
    if (!json_is_object(object))
        eng_keys_fail(keys, ENG_FORMAT, "attn", "must be one object beside layer_types");
    else if (eng_keys_value(&attn, "layers"))
        eng_keys_fail(&attn, ENG_FORMAT, "layers", "stands beside layer_types");
    else
        layer->attention = read_fla_attention(&attn, config->hidden_size, 0);
    if (keys->status == ENG_OK)
        keys->status = attn.status;
}

// The layer that a name of layer_types stands for, read from the top-level keys.
static bool read_named_layer(eng_keys *keys, eng_config *config, const char *name, eng_layer_config *layer) {
    *layer = (eng_layer_config){0};
    if (strcmp(name, eng_mixer_attention.name) == 0) {
        read_layer_types_attention(keys, config, layer);
        return true;
    }
    if (strcmp(name, eng_mixer_mesa.name) == 0) {
        read_mesa(keys, layer);
        return true;
    }
    return eng_config_recurrent_layer(keys, config, name, layer);
}

static void apply_layer_types(eng_keys *keys, eng_config *config, const json_t *list) {
    if (!json_is_array(list) || json_array_size(list) != (size_t)config->layers) {
        eng_keys_fail(keys, ENG_FORMAT, "layer_types", "must be a list of %d names, one a layer", config->layers);
        return;
    }
    for (int32_t i = 0; keys->status == ENG_OK && i < config->layers; i++) {
        const char *name = json_string_value(json_array_get(list, (size_t)i));
        if (!name || !read_named_layer(keys, config, name, &config->layer[i]))
            eng_keys_fail(keys, ENG_UNSUPPORTED, "layer_types", "entry %d ('%.32s') is no mixer of this version", i,
                          name ? name : "no string");
    }
}

void eng_config_fla_layers(eng_keys *keys, eng_config *config) {
    const json_t *types = eng_keys_value(keys, "layer_types");
    if (types) {
        apply_layer_types(keys, config, types);
        return;
    }
    eng_layer_config layer;
    read_named_layer(keys, config, config->model_type, &layer);
    eng_config_set_layers(config, &layer);
    const json_t *attn = eng_keys_value(keys, "attn");
    if (!json_is_array(attn)) {
        if (attn)
            apply_attn(keys, config, attn);
        return;
    }
    for (size_t i = 0; keys->status == ENG_OK && i < json_array_size(attn); i++)
        apply_attn(keys, config, json_array_get(attn, i));
}

void eng_config_transformer_layers(eng_keys *keys, eng_config *config) {
    const json_t *types = eng_keys_value(keys, "layer_types");
    if (types) {
        apply_layer_types(keys, config, types);
        return;
    }
    eng_layer_config layer = {.mixer = &eng_mixer_attention};
    layer.attention = read_fla_attention(keys, config->hidden_size, fla_default_heads);
    eng_config_set_layers(config, &layer);
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

// rope: rope_parameters or rope_scaling.
static void read_rope(eng_keys *rope, eng_attention_config *attention) {
    attention->rope_theta = eng_keys_number(rope, "rope_theta", attention->rope_theta, 1, 1e12);
    if (eng_keys_number(rope, "partial_rotary_factor", 1, 0, 1) != 1)
        eng_keys_fail(rope, ENG_UNSUPPORTED, "partial_rotary_factor", "only 1 is supported");
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
    eng_keys rope = keys_of(keys, object, parameters ? "rope_parameters." : "rope_scaling.");
    read_rope(&rope, attention);
    keys->status = rope.status;
}

// Newer writers list "full_attention" for each layer; any other kind is another model.
static void check_llama_layer_types(eng_keys *keys) {
    const json_t *types = eng_keys_value(keys, "layer_types");
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *name = json_string_value(json_array_get(types, i));
        if (!name || strcmp(name, "full_attention") != 0)
            eng_keys_fail(keys, ENG_UNSUPPORTED, "layer_types", "entry %zu ('%.32s'): only full_attention", i,
                          name ? name : "no string");
    }
    if (types && !json_is_array(types))
        eng_keys_fail(keys, ENG_FORMAT, "layer_types", "must be a list of names");
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
    check_llama_layer_types(keys);
    read_llama_rope(keys, attention);
    eng_config_set_layers(config, &layer);
}

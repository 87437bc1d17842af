// SPDX-License-Identifier: Apache-2.0
// Mamba-2 in its three public spellings (models.md 10.1).
//
// transformers and flash-linear-attention share a model_type and are told apart by the key of the norm's epsilon;
// mamba_ssm's files have no model_type at all. Nothing is guessed: a file that fits two of them, or none, is refused.
#include "engine/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/mixer.h"

// dt_limit or time_step_limit: two numbers, the second may be Infinity.
static void read_step_limits(eng_keys *keys, const char *key, eng_recurrent_config *own) {
    const json_t *pair = eng_keys_value(keys, key);
    own->step_max = INFINITY;
    if (!pair)
        return;
    if (json_array_size(pair) != 2) {
        eng_keys_fail(keys, ENG_FORMAT, key, "must be a list of two numbers");
        return;
    }
    json_t *named = json_pack("{sOsO}", "0", json_array_get(pair, 0), "1", json_array_get(pair, 1));
    if (!named) {
        eng_keys_fail(keys, ENG_NO_MEMORY, key, "no memory to read it");
        return;
    }
    char scope[32];
    snprintf(scope, sizeof scope, "%.24s.", key);
    eng_keys ends = eng_keys_of(keys, named, scope);
    own->step_min = (float)eng_keys_number(&ends, "0", 0, 0, 1e6);
    own->step_max = (float)eng_keys_number(&ends, "1", INFINITY, own->step_min, INFINITY);
    keys->status = ends.status;
    json_decref(named);
}

// What a spelling calls its keys. NULL: it has none.
typedef struct spelling {
    const char *heads, *width, *state, *groups, *taps, *bias, *conv_bias, *limits;
    bool options; // rmsnorm, norm_before_gate, D_has_hdim; a norm a group
    int32_t usual_groups;
} spelling;

static const spelling fla = {"num_heads", "head_dim",      "state_size", "n_groups", "conv_kernel",
                             "use_bias",  "use_conv_bias", "dt_limit",   true,       1};
static const spelling transformers = {"num_heads", "head_dim",      "state_size",      "n_groups", "conv_kernel",
                                      "use_bias",  "use_conv_bias", "time_step_limit", false,      8};
static const spelling state_spaces = {NULL,   "headdim",   "d_state",  "ngroups", "d_conv",
                                      "bias", "conv_bias", "dt_limit", true,      1};

static int32_t read_heads(eng_keys *keys, const spelling *names, int64_t inner, int32_t width) {
    bool told = names->heads && eng_keys_value(keys, names->heads);
    if (!told && names->options)
        eng_config_divides(keys, names->width, width, inner, "inner channels");
    int64_t fitting = inner / width;
    if (names->options && fitting > ENG_CONFIG_MAX_HEADS)
        eng_keys_fail(keys, ENG_UNSUPPORTED, names->width, "gives %lld heads, at most %d", (long long)fitting,
                      ENG_CONFIG_MAX_HEADS);
    int32_t heads = !names->heads    ? (int32_t)fitting
                    : names->options ? eng_config_heads(keys, names->heads, (int32_t)fitting)
                                     : eng_config_heads(keys, names->heads, 128);
    if (keys->status == ENG_OK && (int64_t)heads * width != inner)
        eng_keys_fail(keys, ENG_FORMAT, names->heads ? names->heads : names->width,
                      "%d heads of width %d are not the %lld inner channels", heads, width, (long long)inner);
    return heads;
}

static void read_layer(eng_keys *keys, const eng_config *config, const spelling *names, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    layer->mixer = &eng_mixer_mamba2;
    int64_t inner = (int64_t)(config->hidden_size * eng_keys_number(keys, "expand", 2, 1e-3, 64));
    own->value_width = (int32_t)eng_keys_integer(keys, names->width, 64, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    own->heads = own->value_heads = read_heads(keys, names, inner, own->value_width);
    own->key_width = (int32_t)eng_keys_integer(keys, names->state, 128, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    own->key_heads = own->query_heads = eng_config_heads(keys, names->groups, names->usual_groups);
    eng_config_divides(keys, names->groups, own->key_heads, own->heads, "heads");
    own->taps = eng_config_taps(keys, names->taps);
    own->key_activation = own->value_activation = KERN_SILU;
    own->conv_bias = eng_keys_flag(keys, names->conv_bias, true);
    own->linear_bias = eng_keys_flag(keys, names->bias, false);
    own->decay = KERN_DECAY_SCALAR;
    own->weighted = true;
    own->write_factor = 1;
    own->output_norm = !names->options || eng_keys_flag(keys, "rmsnorm", true);
    own->norm_groups = names->options ? own->key_heads : 1;
    own->norm_before_gate = names->options && eng_keys_flag(keys, "norm_before_gate", false);
    own->skip_per_channel = names->options && eng_keys_flag(keys, "D_has_hdim", false);
    read_step_limits(keys, names->limits, own);
}

void eng_config_mamba2(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    read_layer(keys, config, &fla, layer);
}

// ---- mamba_ssm

bool eng_config_is_state_spaces(const eng_keys *keys) {
    return !eng_keys_value(keys, "model_type") && eng_keys_value(keys, "d_model") && eng_keys_value(keys, "ssm_cfg");
}

// The object of the mixer's keys; refused by name: what would be another model.
static eng_keys state_spaces_keys(eng_keys *keys) {
    const json_t *object = eng_keys_value(keys, "ssm_cfg");
    eng_keys inner = eng_keys_of(keys, object, "ssm_cfg.");
    if (!json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, "ssm_cfg", "must be an object");
        return inner;
    }
    const char *layer = eng_keys_text(&inner, "layer", "Mamba1"); // as in mamba_ssm
    if (strcmp(layer, "Mamba2") != 0)
        eng_keys_fail(&inner, ENG_UNSUPPORTED, "layer", "'%.32s' is not supported (Mamba2)", layer);
    return inner;
}

static void state_spaces_backbone(eng_keys *keys, eng_config *config) {
    config->norm_eps = 1e-5F;
    config->hidden_size = (int32_t)eng_keys_integer(keys, "d_model", 0, 1, ENG_CONFIG_MAX_HIDDEN);
    config->layers = (int32_t)eng_keys_integer(keys, "n_layer", 64, 1, ENG_CONFIG_MAX_LAYERS);
    config->tied = eng_keys_flag(keys, "tie_embeddings", true);
    int32_t grain = (int32_t)eng_keys_integer(keys, "pad_vocab_size_multiple", 8, 1, 1 << 16);
    config->vocab_size = (config->vocab_size + grain - 1) / grain * grain;
    if (json_array_size(eng_keys_value(keys, "attn_layer_idx")) > 0)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "attn_layer_idx", "attention layers of mamba_ssm are not supported");
    if (eng_keys_integer(keys, "d_intermediate", 0, 0, 1 << 20) != 0)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "d_intermediate", "blocks with an MLP of mamba_ssm are not supported");
    if (!eng_keys_flag(keys, "rms_norm", true))
        eng_keys_fail(keys, ENG_UNSUPPORTED, "rms_norm", "blocks with LayerNorm are not supported");
}

static void state_spaces_layers(eng_keys *keys, eng_config *config) {
    eng_layer_config layer = {0};
    eng_keys inner = state_spaces_keys(keys);
    if (keys->status == ENG_OK)
        keys->status = inner.status;
    if (keys->status != ENG_OK)
        return;
    read_layer(&inner, config, &state_spaces, &layer);
    int64_t channels = (int64_t)layer.recurrent.heads * layer.recurrent.value_width;
    if (eng_keys_integer(&inner, "d_ssm", channels, 1, INT32_MAX) != channels)
        eng_keys_fail(&inner, ENG_UNSUPPORTED, "d_ssm", "a part of the inner channels alone is not supported");
    keys->status = inner.status;
    eng_config_set_layers(config, &layer);
}

// ---- the family

static bool is_fla(eng_keys *keys) {
    bool own = eng_keys_value(keys, "norm_eps"), other = eng_keys_value(keys, "layer_norm_epsilon");
    if (own && other)
        eng_keys_fail(keys, ENG_FORMAT, "norm_eps",
                      "stands beside layer_norm_epsilon: flash-linear-attention has the one, transformers the other");
    else if (!own && !other)
        eng_keys_fail(keys, ENG_FORMAT, "layer_norm_epsilon",
                      "is missing (transformers), and so is norm_eps (flash-linear-attention)");
    return own;
}

void eng_config_mamba2_backbone(eng_keys *keys, eng_config *config) {
    if (config->dialect == ENG_DIALECT_STATE_SPACES) {
        state_spaces_backbone(keys, config);
        return;
    }
    bool own = is_fla(keys);
    config->norm_eps = (float)eng_keys_number(keys, own ? "norm_eps" : "layer_norm_epsilon", 1e-5, 1e-30, 1);
    if (!own)
        return;
    // defaults of flash-linear-attention's class
    config->vocab_size = (int32_t)eng_keys_integer(keys, "vocab_size", 32000, 1, config->vocab_size);
    config->hidden_size = (int32_t)eng_keys_integer(keys, "hidden_size", 2048, 1, config->hidden_size);
    config->layers = (int32_t)eng_keys_integer(keys, "num_hidden_layers", 48, 1, config->layers);
}

void eng_config_mamba2_layers(eng_keys *keys, eng_config *config) {
    if (config->dialect == ENG_DIALECT_STATE_SPACES) {
        state_spaces_layers(keys, config);
        return;
    }
    eng_layer_config layer = {0};
    read_layer(keys, config, is_fla(keys) ? &fla : &transformers, &layer);
    eng_config_set_layers(config, &layer);
}

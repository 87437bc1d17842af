// SPDX-License-Identifier: Apache-2.0
// The keys of config.json in the forms of other projects.
//
// A config that is in its form already keeps its own text, apart from what only this project reads. Between forms the
// keys are written anew from the config. Whether the result says the same is the caller's to check, by reading it.
#include "engine/export_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/mixer.h"

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "no memory to write config.json");
}

// ---- pieces

static json_t *number(double value) {
    return isinf(value) ? json_string("\1Infinity") : json_real(value); // eng_json_write's mark of the bare word
}

// A float32 value by the shortest decimal that gives it, since the double behind it would show its noise.
static json_t *single(float value) {
    char text[32];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    return number(isinf(value) ? INFINITY : strtod(text, NULL));
}

static json_t *id_or_null(int32_t id) {
    return id >= 0 ? json_integer(id) : json_null();
}

static json_t *eos_ids(const eng_config *config) {
    if (config->eos_count <= 1)
        return id_or_null(config->eos_count == 1 ? config->eos_id[0] : -1);
    json_t *list = json_array();
    for (int32_t i = 0; i < config->eos_count; i++)
        json_array_append_new(list, json_integer(config->eos_id[i]));
    return list;
}

// What every family calls the same.
static json_t *common_keys(const eng_config *config, const char *model_type) {
    return json_pack("{ss si si si sb so so so so si}", "model_type", model_type, "vocab_size", config->vocab_size,
                     "hidden_size", config->hidden_size, "num_hidden_layers", config->layers, "tie_word_embeddings",
                     config->tied, "bos_token_id", id_or_null(config->bos_id), "eos_token_id", eos_ids(config),
                     "pad_token_id", id_or_null(config->pad_id), "initializer_range", single(config->initializer_range),
                     "max_position_embeddings", (int)config->max_positions);
}

static json_t *extend(json_t *root, json_t *more) {
    if (!root || !more || json_object_update(root, more) != 0) {
        json_decref(root);
        root = NULL;
    }
    json_decref(more);
    return root;
}

// ---- mamba2

static json_t *expansion(const eng_config *config) {
    const eng_recurrent_config *own = &config->layer[0].recurrent;
    double expand = (double)own->heads * own->value_width / config->hidden_size;
    return expand == floor(expand) ? json_integer((json_int_t)expand) : json_real(expand);
}

static json_t *mamba2_shared(const eng_config *config) {
    const eng_recurrent_config *own = &config->layer[0].recurrent;
    return json_pack("{si si si si si so sb sb ss sb si}", "num_heads", own->heads, "head_dim", own->value_width,
                     "state_size", own->key_width, "n_groups", own->key_heads, "conv_kernel", own->taps, "expand",
                     expansion(config), "use_bias", own->linear_bias, "use_conv_bias", own->conv_bias, "hidden_act",
                     "silu", "residual_in_fp32", 1, "chunk_size", 256);
}

static json_t *limits(const eng_recurrent_config *own) {
    return json_pack("[oo]", single(own->step_min), single(own->step_max));
}

static json_t *mamba2_transformers(const eng_config *config) {
    json_t *root = extend(common_keys(config, "mamba2"), mamba2_shared(config));
    return extend(root, json_pack("{so so sb}", "layer_norm_epsilon", single(config->norm_eps), "time_step_limit",
                                  limits(&config->layer[0].recurrent), "rms_norm", 1));
}

static json_t *mamba2_fla(const eng_config *config) {
    const eng_recurrent_config *own = &config->layer[0].recurrent;
    json_t *root = extend(common_keys(config, "mamba2"), mamba2_shared(config));
    return extend(root, json_pack("{so so sb sb sb}", "norm_eps", single(config->norm_eps), "dt_limit", limits(own),
                                  "rmsnorm", own->output_norm, "norm_before_gate", own->norm_before_gate, "D_has_hdim",
                                  own->skip_per_channel));
}

static json_t *mamba2_state_spaces(const eng_config *config) {
    const eng_recurrent_config *own = &config->layer[0].recurrent;
    int32_t grain = 16;
    while (config->vocab_size % grain != 0)
        grain /= 2;
    json_t *inner = json_pack("{ss si si so si si sb sb sb sb sb so}", "layer", "Mamba2", "d_state", own->key_width,
                              "d_conv", own->taps, "expand", expansion(config), "headdim", own->value_width, "ngroups",
                              own->key_heads, "bias", own->linear_bias, "conv_bias", own->conv_bias, "rmsnorm",
                              own->output_norm, "norm_before_gate", own->norm_before_gate, "D_has_hdim",
                              own->skip_per_channel, "dt_limit", limits(own));
    return json_pack("{si si si si so s[] s{} sb sb sb si sb so so so}", "d_model", config->hidden_size,
                     "d_intermediate", 0, "n_layer", config->layers, "vocab_size", config->vocab_size, "ssm_cfg", inner,
                     "attn_layer_idx", "attn_cfg", "rms_norm", 1, "residual_in_fp32", 1, "fused_add_norm", 1,
                     "pad_vocab_size_multiple", grain, "tie_embeddings", config->tied, "bos_token_id",
                     id_or_null(config->bos_id), "eos_token_id", eos_ids(config), "pad_token_id",
                     id_or_null(config->pad_id));
}

// ---- transformers

static json_t *attention_fla(const eng_attention_config *attention) {
    return json_pack("{si si sb so so}", "num_heads", attention->heads, "num_kv_heads", attention->kv_heads, "qkv_bias",
                     attention->qkv_bias, "window_size",
                     attention->window > 0 ? json_integer(attention->window) : json_null(), "rope_theta",
                     number(attention->rope_theta));
}

static json_t *transformer_fla(const eng_config *config) {
    json_t *root = extend(common_keys(config, "transformer"), attention_fla(&config->layer[0].attention));
    return extend(root, json_pack("{si so ss sb}", "intermediate_size", config->intermediate_size, "norm_eps",
                                  single(config->norm_eps), "hidden_act", "swish", "qk_norm",
                                  config->layer[0].attention.qk_norm));
}

static json_t *llama_transformers(const eng_config *config) {
    const eng_attention_config *attention = &config->layer[0].attention;
    return extend(common_keys(config, "llama"),
                  json_pack("{si si si si so ss sb sb so}", "num_attention_heads", attention->heads,
                            "num_key_value_heads", attention->kv_heads, "head_dim", attention->head_width,
                            "intermediate_size", config->intermediate_size, "rms_norm_eps", single(config->norm_eps),
                            "hidden_act", "silu", "attention_bias", attention->output_bias, "mlp_bias",
                            config->mlp_bias, "rope_theta", number(attention->rope_theta)));
}

// ---- hybrids of flash-linear-attention

static bool same_attention(const eng_config *config, int32_t left, int32_t right) {
    eng_config a = *config, b = *config;
    a.layers = b.layers = 1;
    a.layer = &config->layer[left];
    b.layer = &config->layer[right];
    return eng_export_difference(&a, &b) == NULL;
}

// One object for each kind of softmax layer; with a single kind that object alone.
static json_t *attn_objects(const eng_config *config) {
    json_t *list = json_array();
    for (int32_t i = 0; list && i < config->layers; i++) {
        bool first = config->layer[i].mixer == &eng_mixer_attention;
        for (int32_t j = 0; first && j < i; j++)
            first = !same_attention(config, j, i);
        if (!first)
            continue;
        json_t *object = attention_fla(&config->layer[i].attention), *layers = json_array();
        for (int32_t j = i; j < config->layers; j++) {
            if (same_attention(config, i, j))
                json_array_append_new(layers, json_integer(j));
        }
        json_object_set_new(object, "layers", layers);
        json_array_append_new(list, object);
    }
    return list;
}

// The keys of the one recurrent mixer at the top, its softmax layers in attn.
static eng_status flatten(const eng_config *config, json_t *root, eng_error *error) {
    int32_t first = 0;
    while (first < config->layers && config->layer[first].mixer == &eng_mixer_attention)
        first++;
    if (first == config->layers)
        return ENG_OK;
    const char *name = config->layer[first].mixer->name;
    json_t *types = json_object_get(root, "layer_types"), *entry = json_array_get(types, (size_t)first);
    json_t *own = json_object_get(root, name), *attn = types ? attn_objects(config) : NULL;
    int failed = types && !attn;
    if (json_is_object(own))
        failed |= json_object_update(root, own);
    if (json_is_object(entry))
        failed |= json_object_update(root, entry);
    json_object_del(root, "mixer");
    if (types && json_array_size(attn) > 0)
        failed |= json_object_set(root, "attn", json_array_size(attn) == 1 ? json_array_get(attn, 0) : attn);
    else if (types)
        json_object_del(root, "attn");
    json_decref(attn);
    failed |= json_object_set_new(root, "model_type", json_string(name));
    for (size_t i = 0; eng_mixer_at(i); i++)
        json_object_del(root, eng_mixer_at(i)->name);
    json_object_del(root, "layer_types");
    json_object_del(root, "architectures");
    return failed ? no_memory(error) : ENG_OK;
}

// ---- which form a config is in, and the way to another

static bool all_attention(const eng_config *config) {
    for (int32_t i = 0; i < config->layers; i++) {
        if (config->layer[i].mixer != &eng_mixer_attention)
            return false;
    }
    return true;
}

// Mixers that flash-linear-attention has in its blocks.
static bool is_fla_block(const eng_config *config) {
    static const eng_mixer *const others[] = {&eng_mixer_mamba2, &eng_mixer_mlstm, &eng_mixer_rglru,
                                              &eng_mixer_recurrence};
    for (int32_t i = 0; i < config->layers; i++) {
        for (size_t j = 0; j < sizeof others / sizeof *others; j++) {
            if (config->layer[i].mixer == others[j])
                return false;
        }
    }
    return true;
}

typedef enum family { BLOCKS, TRANSFORMER, MAMBA2, OTHER } family;

static family family_of(const eng_config *config) {
    switch (config->dialect) {
    case ENG_DIALECT_MAMBA2:
    case ENG_DIALECT_STATE_SPACES:
        return MAMBA2;
    case ENG_DIALECT_LLAMA:
        return TRANSFORMER;
    case ENG_DIALECT_FLA:
        return all_attention(config) ? TRANSFORMER : BLOCKS;
    default:
        return OTHER;
    }
}

static json_t *rewritten(const eng_config *config, eng_form form) {
    family family = family_of(config);
    if (family == MAMBA2 && form == ENG_FORM_TRANSFORMERS)
        return mamba2_transformers(config);
    if (family == MAMBA2 && form == ENG_FORM_STATE_SPACES)
        return mamba2_state_spaces(config);
    if (family == MAMBA2)
        return mamba2_fla(config);
    return form == ENG_FORM_FLA ? transformer_fla(config) : llama_transformers(config);
}

static bool is_known(const eng_config *config, eng_form form) {
    family family = family_of(config);
    switch (form) {
    case ENG_FORM_MESA:
        return true;
    case ENG_FORM_TRANSFORMERS:
        return family != BLOCKS;
    case ENG_FORM_FLA:
        return family != OTHER && (family != BLOCKS || is_fla_block(config));
    default:
        return family == MAMBA2;
    }
}

// Whether the config's own text is in the form.
static bool stays(const eng_config *config, const json_t *root, eng_form form) {
    switch (form) {
    case ENG_FORM_MESA:
        return config->dialect != ENG_DIALECT_STATE_SPACES;
    case ENG_FORM_TRANSFORMERS:
        return config->dialect == ENG_DIALECT_LLAMA || family_of(config) == OTHER ||
               (config->dialect == ENG_DIALECT_MAMBA2 && json_object_get(root, "layer_norm_epsilon"));
    case ENG_FORM_FLA:
        return family_of(config) == BLOCKS ||
               (strcmp(config->model_type, "transformer") == 0 && !json_object_get(root, "layer_types")) ||
               (config->dialect == ENG_DIALECT_MAMBA2 && json_object_get(root, "norm_eps"));
    default:
        return config->dialect == ENG_DIALECT_STATE_SPACES;
    }
}

eng_status eng_export_keys(const eng_config *config, eng_form form, json_t **root, eng_error *error) {
    if (!is_known(config, form))
        return eng_fail(error, ENG_UNSUPPORTED, "model_type: %s has no model like this '%s'", eng_form_name(form),
                        config->model_type);
    json_t *own;
    eng_status status = eng_json_parse(config->json, strlen(config->json), "config.json", &own, error);
    if (status != ENG_OK)
        return status;
    if (!stays(config, own, form)) {
        json_decref(own);
        own = rewritten(config, form);
        status = own ? ENG_OK : no_memory(error);
    } else if (form == ENG_FORM_FLA && family_of(config) == BLOCKS) {
        status = flatten(config, own, error);
    }
    if (status == ENG_OK)
        *root = own;
    else
        json_decref(own);
    return status;
}

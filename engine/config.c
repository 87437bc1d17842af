// SPDX-License-Identifier: Apache-2.0
// config.json to eng_config: the keys that all families share, what is refused, the knob defaults.
//
// A family is one row of a table: its dialect, its defaults and who reads its layers (config_layers.c). Unknown keys
// are ignored, as the public loaders do, except those that would change the mathematics and are not built: these are
// refused by name, because a model that silently computes something else is worse than one that does not load.
// Sizes are bounded here, so that no later product of them can overflow. No state; any thread.
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/config_internal.h"
#include "engine/config_json.h"
#include "engine/mixer.h"

enum {
    MAX_VOCABULARY = 1 << 24,
    MAX_INTERMEDIATE = 1 << 20,
    MAX_KNOB_STEPS = 256,
    INTERMEDIATE_GRAIN = 256,
};

static const int64_t max_positions = (int64_t)1 << 40;
static const double default_tolerance = 1e-4;

enum { NO_MLP = -1, OWN_MLP = -2 };

typedef struct family {
    const char *model_type, *architecture;
    eng_dialect dialect;
    const char *norm_eps;
    int32_t vocab_size, hidden_size, layers;
    int32_t intermediate_size; // 0: from hidden_ratio; OWN_MLP: read_backbone sets it
    double hidden_ratio;
    bool tied;
    void (*read_backbone)(eng_keys *keys, eng_config *config); // may be NULL
    void (*read_layers)(eng_keys *keys, eng_config *config);
} family;

#define FLA_FAMILY(type, architecture, layers, ratio)                                                \
    {                                                                                                \
        type, architecture, ENG_DIALECT_FLA, "norm_eps", 32000, 2048, layers, 0, ratio, false, NULL, \
            eng_config_fla_layers                                                                    \
    }

static const family families[] = {
    FLA_FAMILY("mesa_net", "MesaNetForCausalLM", 24, 4),
    FLA_FAMILY("gated_deltanet", "GatedDeltaNetForCausalLM", 21, 4),
    FLA_FAMILY("delta_net", "DeltaNetForCausalLM", 24, 4),
    FLA_FAMILY("gla", "GLAForCausalLM", 24, 4),
    FLA_FAMILY("kda", "KDAForCausalLM", 24, 4),
    FLA_FAMILY("retnet", "RetNetForCausalLM", 24, 2),
    FLA_FAMILY("linear_attn", "LinearAttentionForCausalLM", 24, 4),
    FLA_FAMILY("recurrence", "RecurrenceForCausalLM", 24, 4),
    FLA_FAMILY("transformer", "TransformerForCausalLM", 24, 4),
    {"llama", "LlamaForCausalLM", ENG_DIALECT_LLAMA, "rms_norm_eps", 32000, 4096, 32, 11008, 4, false, NULL,
     eng_config_llama_layers},
    {"mamba2", "Mamba2ForCausalLM", ENG_DIALECT_MAMBA2, "norm_eps", 32768, 4096, 64, NO_MLP, 0, false,
     eng_config_mamba2_backbone, eng_config_mamba2_layers},
    {"xlstm", "xLSTMForCausalLM", ENG_DIALECT_XLSTM, "norm_eps", 50304, 4096, 32, OWN_MLP, 0, false,
     eng_config_xlstm_backbone, eng_config_xlstm_layers},
    {"recurrent_gemma", "RecurrentGemmaForCausalLM", ENG_DIALECT_GEMMA, "rms_norm_eps", 256000, 2560, 26, OWN_MLP, 0,
     true, eng_config_gemma_backbone, eng_config_gemma_layers},
};

// mamba_ssm's files, which name no model_type; the rest is as in mamba2.
static const family state_spaces = {
    "mamba2", "MambaLMHeadModel",         ENG_DIALECT_STATE_SPACES, "norm_eps", 50277, 1, 1, NO_MLP, 0,
    true,     eng_config_mamba2_backbone, eng_config_mamba2_layers};

static void refuse_type(eng_keys *keys, const char *type) {
    char known[192] = "";
    size_t written = 0;
    for (size_t i = 0; i < sizeof families / sizeof families[0] && written < sizeof known; i++)
        written +=
            (size_t)snprintf(known + written, sizeof known - written, "%s%s", i ? ", " : "", families[i].model_type);
    eng_keys_fail(keys, ENG_UNSUPPORTED, "model_type", "'%.32s' is not supported (%s)", type, known);
}

static const family *find_family(eng_keys *keys) {
    const char *type = eng_keys_text(keys, "model_type", NULL);
    if (eng_config_is_state_spaces(keys))
        return &state_spaces;
    if (!type) {
        eng_keys_fail(keys, ENG_FORMAT, "model_type", "is missing");
        return NULL;
    }
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++) {
        if (strcmp(families[i].model_type, type) == 0)
            return &families[i];
    }
    refuse_type(keys, type);
    return NULL;
}

static bool asks_for_something(const json_t *value) {
    bool zero = json_is_number(value) && json_number_value(value) == 0;
    return value && !zero && !json_is_false(value);
}

static void refuse_unbuilt(eng_keys *keys) {
    static const struct {
        const char *key, *what;
    } unbuilt[] = {
        {"attnres_block_size", "attention residuals are not supported"},
        {"num_experts", "mixture of experts is not supported"},
        {"num_local_experts", "mixture of experts is not supported"},
        {"n_routed_experts", "mixture of experts is not supported"},
        {"num_experts_per_tok", "mixture of experts is not supported"},
        {"moe_intermediate_size", "mixture of experts is not supported"},
        {"moe_num_experts", "mixture of experts is not supported"},
    };
    for (size_t i = 0; i < sizeof unbuilt / sizeof unbuilt[0]; i++) {
        if (asks_for_something(eng_keys_value(keys, unbuilt[i].key)))
            eng_keys_fail(keys, ENG_UNSUPPORTED, unbuilt[i].key, "%s", unbuilt[i].what);
    }
    const char *activation = eng_keys_text(keys, "hidden_act", "silu");
    if (strcmp(activation, "silu") != 0 && strcmp(activation, "swish") != 0)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "hidden_act", "'%.32s' is not supported (swish, silu)", activation);
}

// Of other methods and sizes of blocks no tensor can be read.
static void read_quantization(eng_keys *keys, eng_config *config) {
    const json_t *value = eng_keys_value(keys, "quantization_config");
    if (!asks_for_something(value))
        return;
    eng_keys own = eng_keys_of(keys, value, "quantization_config.");
    const char *method = json_is_object(value) ? eng_keys_text(&own, "quant_method", "") : "";
    const int64_t bits = eng_keys_integer(&own, "bits", 0, 0, 64),
                  block = eng_keys_integer(&own, "block", 0, 0, 1 << 20);
    if (strcmp(method, "mesa") != 0)
        eng_keys_fail(&own, ENG_UNSUPPORTED, "quant_method", "'%.32s' is not supported (mesa)", method);
    else if ((bits != 8 && bits != 4) || block != KERN_QUANT_BLOCK)
        eng_keys_fail(&own, ENG_UNSUPPORTED, "bits",
                      "%lld in blocks of %lld are not supported (8 or 4 in blocks of %d)", (long long)bits,
                      (long long)block, (int)KERN_QUANT_BLOCK);
    keys->status = own.status;
    config->quantised = true;
}

json_t *eng_config_quantization(int bits) {
    return json_pack("{s:s, s:i, s:i}", "quant_method", "mesa", "bits", bits, "block", (int)KERN_QUANT_BLOCK);
}

// FLA's rule: truncate, then round up to a multiple of 256.
static int64_t intermediate_from_ratio(eng_keys *keys, int32_t hidden, double fallback) {
    bool none = json_is_null(json_object_get(keys->object, "hidden_ratio")); // the public code's own 4, whatever class
    double ratio = eng_keys_number(keys, "hidden_ratio", none ? 4 : fallback, 1e-3, 64);
    int64_t width = (int64_t)(hidden * ratio * 2 / 3);
    return (width + INTERMEDIATE_GRAIN - 1) / INTERMEDIATE_GRAIN * INTERMEDIATE_GRAIN;
}

static void read_sizes(eng_keys *keys, const family *family, eng_config *config) {
    config->vocab_size = (int32_t)eng_keys_integer(keys, "vocab_size", family->vocab_size, 1, MAX_VOCABULARY);
    config->hidden_size = (int32_t)eng_keys_integer(keys, "hidden_size", family->hidden_size, 1, ENG_CONFIG_MAX_HIDDEN);
    config->layers = (int32_t)eng_keys_integer(keys, "num_hidden_layers", family->layers, 1, ENG_CONFIG_MAX_LAYERS);
    int64_t intermediate = family->intermediate_size;
    if (intermediate == 0 && !eng_keys_value(keys, "intermediate_size")) {
        intermediate = intermediate_from_ratio(keys, config->hidden_size, family->hidden_ratio);
        if (intermediate < 1 || intermediate > MAX_INTERMEDIATE)
            eng_keys_fail(keys, ENG_FORMAT, "hidden_ratio", "gives an intermediate size of %lld",
                          (long long)intermediate);
    }
    if (intermediate >= 0)
        config->intermediate_size =
            (int32_t)eng_keys_integer(keys, "intermediate_size", intermediate, 1, MAX_INTERMEDIATE);
    config->mlp_activation = KERN_SILU;
    config->max_positions = eng_keys_integer(keys, "max_position_embeddings", 2048, 1, max_positions);
    config->trained_length = eng_keys_integer(keys, "trained_length", config->max_positions, 1, max_positions);
}

static void read_backbone(eng_keys *keys, const family *family, eng_config *config) {
    config->norm_eps = (float)eng_keys_number(keys, family->norm_eps, 1e-6, FLT_MIN, 1);
    config->tied = eng_keys_flag(keys, "tie_word_embeddings", family->tied);
    config->scale_embeddings = eng_keys_flag(keys, "scale_embeddings", false);
    config->mlp_bias = family->dialect == ENG_DIALECT_LLAMA && eng_keys_flag(keys, "mlp_bias", false);
    config->logits_soft_cap = (float)eng_keys_number(keys, "logits_soft_cap", 0, 0, 1e6);
    config->initializer_range = (float)eng_keys_number(keys, "initializer_range", 0.02, 0, 10);
    const char *init = eng_keys_text(keys, "init", NULL);
    if (init && strcmp(init, "fla") != 0)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "init", "'%.32s' is not supported (fla, or absent)", init);
    config->init_fla = init != NULL;
}

// An absent id has the public default, null and -1 mean none.
static int32_t read_id(eng_keys *keys, const char *key, int32_t fallback, int32_t vocabulary) {
    if (!json_object_get(keys->object, key))
        return fallback < vocabulary ? fallback : -1;
    return (int32_t)eng_keys_integer(keys, key, -1, -1, vocabulary - 1);
}

static void add_eos(eng_keys *keys, const json_t *value, eng_config *config) {
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    if (id < 0 || id >= config->vocab_size)
        eng_keys_fail(keys, ENG_FORMAT, "eos_token_id", "each must be an id below the vocab_size %d",
                      config->vocab_size);
    else if (config->eos_count == ENG_MAX_EOS)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "eos_token_id", "more than %d ids", ENG_MAX_EOS);
    else
        config->eos_id[config->eos_count++] = (int32_t)id;
}

void eng_config_set_eos(eng_keys *keys, eng_config *config) {
    config->eos_count = 0;
    const json_t *eos = eng_keys_value(keys, "eos_token_id");
    if (!json_is_array(eos)) {
        int32_t id = read_id(keys, "eos_token_id", 2, config->vocab_size);
        if (id >= 0)
            config->eos_id[config->eos_count++] = id;
        return;
    }
    for (size_t i = 0; keys->status == ENG_OK && i < json_array_size(eos); i++)
        add_eos(keys, json_array_get(eos, i), config);
}

// A padding id outside the vocabulary is common (and never read by a model), so it counts as none.
static void read_ids(eng_keys *keys, eng_config *config) {
    config->bos_id = read_id(keys, "bos_token_id", 1, config->vocab_size);
    int64_t pad = eng_keys_integer(keys, "pad_token_id", -1, INT32_MIN, INT32_MAX);
    config->pad_id = pad >= 0 && pad < config->vocab_size ? (int32_t)pad : -1;
    eng_config_set_eos(keys, config);
}

static eng_cg_mode read_mode(eng_keys *keys) {
    const char *mode = eng_keys_text(keys, "cg_mode", "tolerance");
    if (strcmp(mode, "steps") == 0)
        return ENG_CG_STEPS;
    if (strcmp(mode, "exact") == 0)
        return ENG_CG_EXACT;
    if (strcmp(mode, "tolerance") != 0)
        eng_keys_fail(keys, ENG_FORMAT, "cg_mode", "'%.32s' must be tolerance, steps or exact", mode);
    return ENG_CG_TOLERANCE;
}

static void read_knobs(eng_keys *keys, eng_config *config) {
    eng_knobs *knobs = &config->knobs;
    int32_t steps = 30;
    for (int32_t i = 0; i < config->layers; i++) {
        if (config->layer[i].mixer == &eng_mixer_mesa) {
            steps = config->layer[i].mesa.cg_steps_decoding;
            break;
        }
    }
    const int32_t loops = config->loop.loops;
    *knobs = (eng_knobs){ENG_CG_TOLERANCE, (float)default_tolerance, steps, 1, loops};
    const json_t *object = eng_keys_value(keys, "mesa");
    if (!object)
        return;
    if (!json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, "mesa", "must be an object");
        return;
    }
    eng_keys mesa = {.object = object, .path = keys->path, .scope = "mesa.", .error = keys->error};
    knobs->cg_mode = read_mode(&mesa);
    knobs->cg_tolerance = (float)eng_keys_number(&mesa, "cg_tolerance", default_tolerance, 0, 1);
    knobs->cg_max_steps = (int32_t)eng_keys_integer(&mesa, "cg_max_steps", steps, 0, MAX_KNOB_STEPS);
    knobs->exit_threshold = (float)eng_keys_number(&mesa, "exit_threshold", 1, 0, 1);
    knobs->max_loops = (int32_t)eng_keys_integer(&mesa, "max_loops", loops, 1, loops);
    if (knobs->cg_mode == ENG_CG_TOLERANCE && knobs->cg_tolerance == 0)
        knobs->cg_mode = ENG_CG_EXACT;
    keys->status = mesa.status;
}

static void read_all(eng_keys *keys, eng_config *config) {
    const family *family = find_family(keys);
    if (!family)
        return;
    strcpy(config->model_type, family->model_type);
    config->architecture = family->architecture;
    config->dialect = family->dialect;
    refuse_unbuilt(keys);
    read_sizes(keys, family, config);
    read_backbone(keys, family, config);
    read_ids(keys, config);
    read_quantization(keys, config);
    if (family->read_backbone)
        family->read_backbone(keys, config);
    if (keys->status != ENG_OK)
        return;
    config->layer = calloc((size_t)config->layers, sizeof *config->layer);
    if (!config->layer) {
        eng_keys_fail(keys, ENG_NO_MEMORY, "num_hidden_layers", "no memory for %d layers", config->layers);
        return;
    }
    family->read_layers(keys, config);
    eng_config_loop(keys, config);
    if (keys->status == ENG_OK)
        read_knobs(keys, config);
}

eng_status eng_config_parse(const char *json, size_t length, const char *path, eng_config *out, eng_error *error) {
    json_t *root;
    eng_status status = eng_json_parse(json, length, path, &root, error);
    if (status != ENG_OK)
        return status;
    eng_config config = {0};
    eng_keys keys = {.object = root, .path = path, .scope = "", .error = error};
    read_all(&keys, &config);
    config.json = malloc(length + 1);
    if (config.json) {
        memcpy(config.json, json, length);
        config.json[length] = '\0';
    } else {
        eng_keys_fail(&keys, ENG_NO_MEMORY, "config", "no memory to keep its text");
    }
    json_decref(root);
    if (keys.status == ENG_OK)
        *out = config;
    else
        eng_config_free(&config);
    return keys.status;
}

void eng_config_free(eng_config *config) {
    if (!config)
        return;
    free(config->layer);
    free(config->json);
    memset(config, 0, sizeof *config);
}

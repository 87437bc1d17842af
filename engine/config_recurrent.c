// SPDX-License-Identifier: Apache-2.0
// The recurrent mixers of a config.json, and the backbones that come with some of them.
//
// Each reader takes the keys of one public configuration class, with its defaults (models.md 3-8, 10, 12, 13). What a
// key asks for and this version does not compute is refused by the key's name.
#include "engine/config_internal.h"

#include <math.h>
#include <string.h>

#include "engine/mixer.h"

enum { MAX_TAPS = 16 };

static int32_t read_heads(eng_keys *keys, const char *key, int32_t fallback) {
    return (int32_t)eng_keys_integer(keys, key, fallback, 1, ENG_CONFIG_MAX_HEADS);
}

static void check_divides(eng_keys *keys, const char *key, int64_t part, int64_t whole, const char *what) {
    if (keys->status == ENG_OK && whole % part != 0)
        eng_keys_fail(keys, ENG_FORMAT, key, "%lld does not divide the %lld %s", (long long)part, (long long)whole,
                      what);
}

// The width of a head: int(base * key) / heads.
static int32_t read_expanded(eng_keys *keys, const char *key, double fallback, int32_t base, int32_t heads) {
    double factor = eng_keys_number(keys, key, fallback, 1e-6, 64);
    int64_t width = (int64_t)(base * factor);
    if (keys->status == ENG_OK && (width % heads != 0 || width < heads))
        eng_keys_fail(keys, ENG_FORMAT, key, "gives a width of %lld for %d heads", (long long)width, heads);
    int64_t head = width / heads;
    if (keys->status == ENG_OK && head > ENG_CONFIG_MAX_HEAD_WIDTH)
        eng_keys_fail(keys, ENG_UNSUPPORTED, key, "heads of width %lld, at most %d", (long long)head,
                      ENG_CONFIG_MAX_HEAD_WIDTH);
    return (int32_t)head;
}

static void set_equal_heads(eng_recurrent_config *own, int32_t heads) {
    own->heads = own->query_heads = own->key_heads = own->value_heads = heads;
}

static int32_t read_taps(eng_keys *keys, bool fallback) {
    int32_t taps = (int32_t)eng_keys_integer(keys, "conv_size", 4, 1, MAX_TAPS);
    return eng_keys_flag(keys, "use_short_conv", fallback) ? taps : 0;
}

static void refuse(eng_keys *keys, const char *key, const char *value, const char *known) {
    eng_keys_fail(keys, ENG_UNSUPPORTED, key, "'%.32s' is not supported (%s)", value, known);
}

// feature_map of gla and retnet: an activation of the public table.
static int32_t read_plain_map(eng_keys *keys) {
    const char *name = eng_keys_text(keys, "feature_map", NULL);
    if (!name || strcmp(name, "identity") == 0)
        return KERN_IDENTITY;
    if (strcmp(name, "relu") == 0)
        return KERN_RELU;
    if (strcmp(name, "sigmoid") == 0)
        return KERN_SIGMOID;
    if (strcmp(name, "silu") != 0 && strcmp(name, "swish") != 0)
        refuse(keys, "feature_map", name, "relu, silu, sigmoid, identity");
    return KERN_SILU;
}

// The keys that gla, retnet and linear_attn share; the number of states is theirs.
static void read_grouped(eng_keys *keys, const eng_config *config, double expand_k, double expand_v, int32_t heads,
                         eng_recurrent_config *own) {
    own->query_heads = read_heads(keys, "num_heads", heads);
    own->key_heads = own->value_heads = read_heads(keys, "num_kv_heads", own->query_heads);
    check_divides(keys, "num_kv_heads", own->key_heads, own->query_heads, "query heads");
    own->key_width = read_expanded(keys, "expand_k", expand_k, config->hidden_size, own->query_heads);
    own->value_width = read_expanded(keys, "expand_v", expand_v, config->hidden_size, own->query_heads);
    own->update = KERN_UPDATE_ADD;
    own->write_factor = 1;
    own->output_gate = eng_keys_flag(keys, "use_output_gate", true);
    own->plain_norm_name = !own->output_gate || !eng_keys_flag(keys, "fuse_norm", true);
}

static void read_gla(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    layer->mixer = &eng_mixer_gla;
    read_grouped(keys, config, 0.5, 1, 4, own);
    own->decay = KERN_DECAY_CHANNEL;
    own->heads = own->key_heads;
    own->taps = read_taps(keys, false);
    own->key_activation = own->value_activation = own->taps > 0 ? KERN_SILU : KERN_IDENTITY;
    int32_t map = read_plain_map(keys);
    if (own->taps > 0 && map != KERN_IDENTITY)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "feature_map", "is not supported beside use_short_conv");
    if (own->taps == 0)
        own->key_activation = map;
    if (eng_keys_value(keys, "clamp_min")) {
        own->clamp_min = (float)eng_keys_number(keys, "clamp_min", 0, -1e6, 0);
        if (own->clamp_min == 0)
            eng_keys_fail(keys, ENG_UNSUPPORTED, "clamp_min", "must be below 0");
    }
}

static void read_retnet(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    layer->mixer = &eng_mixer_retnet;
    read_grouped(keys, config, 1, 2, 8, own);
    own->decay = KERN_DECAY_HEAD;
    own->heads = own->query_heads;
    own->key_activation = read_plain_map(keys);
    if (keys->status == ENG_OK && own->key_width % 2 != 0)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "expand_k", "gives rotated heads of odd width %d", own->key_width);
}

static void read_linear_attn(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    static const struct {
        const char *name;
        eng_feature_map map;
        int32_t activation;
    } maps[] = {
        {"elementwise_product", ENG_FEATURE_MAP_PRODUCT, KERN_IDENTITY},
        {"hedgehog", ENG_FEATURE_MAP_HEDGEHOG, KERN_IDENTITY},
        {"t2r", ENG_FEATURE_MAP_T2R, KERN_RELU},
        {"dpfp", ENG_FEATURE_MAP_DPFP, KERN_IDENTITY},
        {"elu", ENG_FEATURE_MAP_NONE, KERN_ELU1},
        {"relu", ENG_FEATURE_MAP_NONE, KERN_RELU},
        {"identity", ENG_FEATURE_MAP_NONE, KERN_IDENTITY},
    };
    eng_recurrent_config *own = &layer->recurrent;
    layer->mixer = &eng_mixer_linear_attn;
    read_grouped(keys, config, 1, 1, 4, own);
    own->output_gate = false;
    own->heads = own->key_heads;
    const char *name = eng_keys_text(keys, "feature_map", "elementwise_product");
    size_t i = 0;
    while (i < sizeof maps / sizeof maps[0] && strcmp(maps[i].name, name) != 0)
        i++;
    if (i == sizeof maps / sizeof maps[0]) {
        refuse(keys, "feature_map", name, "elementwise_product, hedgehog, t2r, dpfp, elu, relu, identity");
        return;
    }
    own->feature_map = maps[i].map;
    own->key_activation = maps[i].activation;
    own->shared_map = eng_keys_flag(keys, "tie_feature_map_qk", false);
    own->norm_q = eng_keys_flag(keys, "norm_q", false);
    own->norm_k = eng_keys_flag(keys, "norm_k", false);
    own->normalise = eng_keys_flag(keys, "norm_feature_map", false);
}

// Convolutions with silu, L2, a delta update with a write gate.
static void set_delta(eng_keys *keys, eng_recurrent_config *own) {
    own->update = KERN_UPDATE_DELTA;
    own->weighted = true;
    own->write_factor = eng_keys_flag(keys, "allow_neg_eigval", false) ? 2 : 1;
    own->taps = read_taps(keys, true);
    own->key_activation = own->value_activation = KERN_SILU;
    own->qk_norm = true;
}

static void read_delta_net(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    layer->mixer = &eng_mixer_delta_net;
    set_equal_heads(own, read_heads(keys, "num_heads", 16));
    own->key_width = read_expanded(keys, "expand_k", 1, config->hidden_size, own->heads);
    own->value_width = read_expanded(keys, "expand_v", 1, config->hidden_size, own->heads);
    set_delta(keys, own);
    own->output_gate = eng_keys_flag(keys, "use_gate", false);
    if (!eng_keys_flag(keys, "use_beta", true)) {
        own->constant_write = own->write_factor != 1;
        own->weighted = own->constant_write;
    }
    const char *norm = eng_keys_text(keys, "qk_norm", "l2");
    own->qk_norm_sums = strcmp(norm, "sum") == 0;
    if (!own->qk_norm_sums && strcmp(norm, "l2") != 0)
        refuse(keys, "qk_norm", norm, "l2, sum");
    const char *activation = eng_keys_text(keys, "qk_activation", "silu");
    if (strcmp(activation, "relu") == 0)
        own->key_activation = KERN_RELU;
    else if (strcmp(activation, "elu") == 0)
        own->key_activation = KERN_ELU1;
    else if (strcmp(activation, "identity") == 0)
        own->key_activation = KERN_IDENTITY;
    else if (strcmp(activation, "silu") != 0)
        refuse(keys, "qk_activation", activation, "silu, relu, elu, identity");
}

// The keys that gated_deltanet and kda share: value heads over query and key heads.
static void read_value_groups(eng_keys *keys, int32_t heads, int32_t head_width, double expand_v,
                              eng_recurrent_config *own) {
    own->query_heads = own->key_heads = read_heads(keys, "num_heads", heads);
    own->heads = own->value_heads = read_heads(keys, "num_v_heads", own->query_heads);
    check_divides(keys, "num_heads", own->query_heads, own->heads, "value heads");
    own->key_width = (int32_t)eng_keys_integer(keys, "head_dim", head_width, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    own->value_width = read_expanded(keys, "expand_v", expand_v, own->key_width, 1);
    set_delta(keys, own);
}

static void read_gated_deltanet(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    (void)config;
    layer->mixer = &eng_mixer_gated_deltanet;
    read_value_groups(keys, 6, 256, 2, &layer->recurrent);
    layer->recurrent.decay = KERN_DECAY_SCALAR;
    layer->recurrent.output_gate = eng_keys_flag(keys, "use_gate", true);
}

static void read_kda(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    (void)config;
    layer->mixer = &eng_mixer_kda;
    read_value_groups(keys, 16, 128, 1, &layer->recurrent);
    layer->recurrent.decay = KERN_DECAY_CHANNEL;
    layer->recurrent.output_gate = true;
    layer->recurrent.lower_bound = (float)eng_keys_number(keys, "lower_bound", 0, -1e6, -1e-6);
}

static int32_t read_name(eng_keys *keys, const char *key, const char *const *names, int32_t count) {
    const char *name = eng_keys_text(keys, key, names[0]);
    for (int32_t i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0)
            return i;
    }
    eng_keys_fail(keys, ENG_UNSUPPORTED, key, "'%.32s' is not one of this version's", name);
    return 0;
}

static void read_recurrence(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    static const char *const decays[] = {"none", "head", "scalar", "channel"}; // as kern_decay
    static const char *const updates[] = {"add", "delta"};                     // as kern_update
    eng_recurrent_config *own = &layer->recurrent;
    const json_t *object = eng_keys_value(keys, "recurrence");
    layer->mixer = &eng_mixer_recurrence;
    if (object && !json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, "recurrence", "must be an object");
        return;
    }
    eng_keys inner = {.object = object, .path = keys->path, .scope = "recurrence.", .error = keys->error};
    set_equal_heads(own, read_heads(keys, "num_heads", 16));
    own->key_width = own->value_width = (int32_t)eng_keys_integer(keys, "head_dim", 128, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    int32_t taps = (int32_t)eng_keys_integer(keys, "conv_size", 4, 1, MAX_TAPS);
    if (keys->status != ENG_OK)
        return;
    (void)config;
    own->decay = read_name(&inner, "decay", decays, 4);
    own->update = read_name(&inner, "update", updates, 2);
    own->weighted = eng_keys_flag(&inner, "input_gate", own->update == KERN_UPDATE_DELTA);
    own->write_factor = 1;
    own->taps = eng_keys_flag(&inner, "conv", true) ? taps : 0;
    own->key_activation = own->value_activation = own->taps > 0 ? KERN_SILU : KERN_IDENTITY;
    own->qk_norm = eng_keys_flag(&inner, "qk_norm", true);
    own->output_norm = eng_keys_flag(&inner, "out_norm", true);
    own->output_gate = eng_keys_flag(&inner, "out_gate", false);
    if (!own->qk_norm && own->update == KERN_UPDATE_DELTA)
        eng_keys_fail(&inner, ENG_UNSUPPORTED, "qk_norm", "a delta update of keys without norm does not stay bounded");
    keys->status = inner.status;
}

static const struct {
    const char *name;
    void (*read)(eng_keys *keys, const eng_config *config, eng_layer_config *layer);
} readers[] = {
    {"linear_attn", read_linear_attn},
    {"retnet", read_retnet},
    {"gla", read_gla},
    {"delta_net", read_delta_net},
    {"gated_deltanet", read_gated_deltanet},
    {"kda", read_kda},
    {"recurrence", read_recurrence},
};

bool eng_config_recurrent_layer(eng_keys *keys, const eng_config *config, const char *name, eng_layer_config *layer) {
    for (size_t i = 0; i < sizeof readers / sizeof readers[0]; i++) {
        if (strcmp(readers[i].name, name) == 0) {
            readers[i].read(keys, config, layer);
            return true;
        }
    }
    return false;
}

// ---- mamba2

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
    eng_keys ends = {.object = named, .path = keys->path, .scope = scope, .error = keys->error};
    own->step_min = (float)eng_keys_number(&ends, "0", 0, 0, 1e6);
    own->step_max = (float)eng_keys_number(&ends, "1", INFINITY, own->step_min, INFINITY);
    keys->status = ends.status;
    json_decref(named);
}

static bool is_fla_mamba2(const eng_keys *keys) {
    return eng_keys_value(keys, "norm_eps") != NULL;
}

void eng_config_mamba2_backbone(eng_keys *keys, eng_config *config) {
    const char *key = is_fla_mamba2(keys) ? "norm_eps" : "layer_norm_epsilon";
    config->norm_eps = (float)eng_keys_number(keys, key, 1e-5, 1e-30, 1);
    if (strcmp(key, "norm_eps") != 0)
        return;
    // defaults of flash-linear-attention's class
    config->vocab_size = (int32_t)eng_keys_integer(keys, "vocab_size", 32000, 1, config->vocab_size);
    config->hidden_size = (int32_t)eng_keys_integer(keys, "hidden_size", 2048, 1, config->hidden_size);
    config->layers = (int32_t)eng_keys_integer(keys, "num_hidden_layers", 48, 1, config->layers);
}

void eng_config_mamba2_layers(eng_keys *keys, eng_config *config) {
    bool fla = is_fla_mamba2(keys);
    eng_layer_config layer = {.mixer = &eng_mixer_mamba2};
    eng_recurrent_config *own = &layer.recurrent;
    int64_t inner = (int64_t)(config->hidden_size * eng_keys_number(keys, "expand", 2, 1e-3, 64));
    own->value_width = (int32_t)eng_keys_integer(keys, "head_dim", 64, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    if (fla && !eng_keys_value(keys, "num_heads"))
        check_divides(keys, "head_dim", own->value_width, inner, "inner channels");
    own->heads = own->value_heads = read_heads(keys, "num_heads", fla ? (int32_t)(inner / own->value_width) : 128);
    if (keys->status == ENG_OK && (int64_t)own->heads * own->value_width != inner)
        eng_keys_fail(keys, ENG_FORMAT, "num_heads", "%d heads of width %d are not the %lld inner channels", own->heads,
                      own->value_width, (long long)inner);
    own->key_width = (int32_t)eng_keys_integer(keys, "state_size", 128, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    own->key_heads = own->query_heads = read_heads(keys, "n_groups", fla ? 1 : 8);
    check_divides(keys, "n_groups", own->key_heads, own->heads, "heads");
    own->taps = (int32_t)eng_keys_integer(keys, "conv_kernel", 4, 1, MAX_TAPS);
    own->key_activation = own->value_activation = KERN_SILU;
    own->conv_bias = eng_keys_flag(keys, "use_conv_bias", true);
    own->linear_bias = eng_keys_flag(keys, "use_bias", false);
    own->decay = KERN_DECAY_SCALAR;
    own->update = KERN_UPDATE_ADD;
    own->weighted = true;
    own->write_factor = 1;
    own->output_norm = !fla || eng_keys_flag(keys, "rmsnorm", true);
    own->norm_groups = fla ? own->key_heads : 1;
    own->norm_before_gate = eng_keys_flag(keys, "norm_before_gate", false);
    own->skip_per_channel = eng_keys_flag(keys, "D_has_hdim", false);
    read_step_limits(keys, fla ? "dt_limit" : "time_step_limit", own);
    eng_config_set_layers(config, &layer);
}

// ---- xlstm

static int64_t read_grain(eng_keys *keys, int32_t hidden) {
    double factor = eng_keys_number(keys, "ffn_proj_factor", 2.667, 1e-3, 64);
    int64_t grain = eng_keys_integer(keys, "ffn_round_up_to_multiple_of", 64, 1, 1 << 16);
    return (int64_t)((hidden * factor + (double)(grain - 1)) / (double)grain) * grain;
}

void eng_config_xlstm_backbone(eng_keys *keys, eng_config *config) {
    if (!eng_keys_value(keys, "hidden_size"))
        config->hidden_size =
            (int32_t)eng_keys_integer(keys, "embedding_dim", config->hidden_size, 1, ENG_CONFIG_MAX_HIDDEN);
    if (!eng_keys_value(keys, "num_hidden_layers"))
        config->layers = (int32_t)eng_keys_integer(keys, "num_blocks", config->layers, 1, ENG_CONFIG_MAX_LAYERS);
    config->intermediate_size = (int32_t)read_grain(keys, config->hidden_size);
    config->logits_soft_cap = (float)eng_keys_number(keys, "output_logit_soft_cap", 30, 0, 1e6);
    if (eng_keys_flag(keys, "use_bias", false))
        eng_keys_fail(keys, ENG_UNSUPPORTED, "use_bias", "biases of linears and norms are not supported");
    if (!eng_keys_flag(keys, "add_out_norm", true))
        eng_keys_fail(keys, ENG_UNSUPPORTED, "add_out_norm", "models without output norm are not supported");
    const char *mode = eng_keys_text(keys, "weight_mode", "single");
    if (strcmp(mode, "single") != 0)
        refuse(keys, "weight_mode", mode, "single");
}

void eng_config_xlstm_layers(eng_keys *keys, eng_config *config) {
    eng_layer_config layer = {.mixer = &eng_mixer_mlstm};
    eng_recurrent_config *own = &layer.recurrent;
    set_equal_heads(own, read_heads(keys, "num_heads", 8));
    own->key_width = read_expanded(keys, "qk_dim_factor", 0.5, config->hidden_size, own->heads);
    own->value_width = read_expanded(keys, "v_dim_factor", 1, config->hidden_size, own->heads);
    own->decay = KERN_DECAY_SCALAR;
    own->update = KERN_UPDATE_ADD;
    own->weighted = true;
    own->write_factor = 1;
    own->gate_soft_cap = (float)eng_keys_number(keys, "gate_soft_cap", 15, 0, 1e6);
    own->cell_eps = (float)eng_keys_number(keys, "eps", 1e-6, 0, 1);
    eng_config_set_layers(config, &layer);
}

// ---- recurrent_gemma

void eng_config_gemma_backbone(eng_keys *keys, eng_config *config) {
    int64_t twice = eng_keys_integer(keys, "intermediate_size", 3 * (int64_t)config->hidden_size, 2, 1 << 20);
    if (twice % 2 != 0)
        eng_keys_fail(keys, ENG_FORMAT, "intermediate_size", "is %lld, must be even", (long long)twice);
    config->intermediate_size = (int32_t)(twice / 2);
    config->mlp_bias = true;
    config->scale_embeddings = config->round_scale = true;
    config->norm_offset = 1;
    config->logits_soft_cap = (float)eng_keys_number(keys, "logits_soft_cap", 30, 0, 1e6);
    config->mlp_activation = KERN_GELU_TANH;
    const char *activation = eng_keys_text(keys, "hidden_activation", "gelu_pytorch_tanh");
    if (strcmp(activation, "gelu_pytorch_tanh") != 0)
        refuse(keys, "hidden_activation", activation, "gelu_pytorch_tanh");
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
        const char *type = eng_keys_text(&rope, "rope_type", "default");
        if (strcmp(type, "default") != 0)
            refuse(&rope, "rope_type", type, "default");
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
    attention.kv_heads = read_heads(keys, "num_key_value_heads", heads);
    check_divides(keys, "num_key_value_heads", attention.kv_heads, heads, "query heads");
    attention.head_width = (int32_t)eng_keys_integer(keys, "head_dim", hidden / heads, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    attention.window = (int32_t)eng_keys_integer(keys, "attention_window_size", 2048, 1, ENG_CONFIG_MAX_WINDOW);
    attention.qkv_bias = eng_keys_flag(keys, "attention_bias", false);
    read_rotary(keys, &attention);
    return attention;
}

void eng_config_gemma_layers(eng_keys *keys, eng_config *config) {
    static const char *const usual[] = {"recurrent", "recurrent", "attention"};
    int32_t heads = read_heads(keys, "num_attention_heads", 10);
    eng_layer_config recurrent = {.mixer = &eng_mixer_rglru}, attention = {.mixer = &eng_mixer_attention};
    recurrent.rglru.width = (int32_t)eng_keys_integer(keys, "lru_width", config->hidden_size, 1, ENG_CONFIG_MAX_HIDDEN);
    recurrent.rglru.blocks = heads;
    recurrent.rglru.taps = (int32_t)eng_keys_integer(keys, "conv1d_width", 4, 1, MAX_TAPS);
    check_divides(keys, "num_attention_heads", heads, recurrent.rglru.width, "channels of lru_width");
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
            refuse(keys, "block_types", name ? name : "no string", "recurrent, attention");
        config->layer[i] = attends ? attention : recurrent;
    }
}

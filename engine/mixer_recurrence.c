// SPDX-License-Identifier: Apache-2.0
// The plain recurrent mixer: one line of configuration a rival, so that models differ by their recurrence alone
// (models.md 1.8; the matched rivals of the MesaNet paper, arXiv 2506.05233).
//
//   q, k, v = [L2 of q and k] [silu(conv] (W x)   decay none, 1 - 2^(-5-h), or s(W x + b) a head or a key channel
//   beta = s(W x + b) or 1   additive or delta update   o = S^T q / sqrt(K)   y = W_o ([RMS(o)] [silu(W_g x)])
//
// State of a layer: S (H, K, V), then the inputs of the convolutions.
#include "engine/mixer_recurrent.h"

// Log decays of heads that keep their decay, as retention spaces them.
static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    static const eng_choice decays[] = {{"none", KERN_DECAY_NONE},
                                        {"head", KERN_DECAY_HEAD},
                                        {"scalar", KERN_DECAY_SCALAR},
                                        {"channel", KERN_DECAY_CHANNEL}};
    static const eng_choice updates[] = {{"add", KERN_UPDATE_ADD}, {"delta", KERN_UPDATE_DELTA}};
    (void)config;
    eng_config_equal_heads(own, eng_config_heads(keys, "num_heads", 16));
    own->key_width = own->value_width = (int32_t)eng_keys_integer(keys, "head_dim", 128, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    int32_t taps = eng_config_taps(keys, "conv_size");
    own->decay = eng_config_choice(keys, "decay", decays, sizeof decays / sizeof *decays);
    own->update = eng_config_choice(keys, "update", updates, sizeof updates / sizeof *updates);
    own->weighted = eng_keys_flag(keys, "input_gate", own->update == KERN_UPDATE_DELTA);
    own->write_factor = 1;
    own->taps = eng_keys_flag(keys, "conv", true) ? taps : 0;
    own->key_activation = own->value_activation = own->taps > 0 ? KERN_SILU : KERN_IDENTITY;
    own->qk_norm = eng_keys_flag(keys, "qk_norm", true);
    own->output_norm = eng_keys_flag(keys, "out_norm", true);
    own->output_gate = eng_keys_flag(keys, "out_gate", false);
    if (!own->qk_norm && own->update == KERN_UPDATE_DELTA)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "qk_norm", "a delta update of keys without norm does not stay bounded");
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, o = (int64_t)own->heads * own->value_width;
    bool channel = own->decay == KERN_DECAY_CHANNEL, decays = channel || own->decay == KERN_DECAY_SCALAR;
    int64_t a = channel ? (int64_t)own->heads * own->key_width : own->heads;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0);
    eng_init horizon = eng_init_horizon(config, ENG_INIT_HORIZON, own->heads, 1);
    const eng_tensor_row rows[] = {
        {ENG_A_PROJ, decays, "a_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {a, d}},
        {ENG_A_BIAS, decays, "a_proj.bias", NULL, ENG_ROLE_VECTOR, horizon, 1, {a}},
        {ENG_B_PROJ, own->weighted, "b_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {own->heads, d}},
        {ENG_B_BIAS, own->weighted, "b_proj.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {own->heads}},
        {ENG_G_PROJ, own->output_gate, "g_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {o, d}},
        {ENG_O_NORM,
         own->output_norm,
         "o_norm.weight",
         NULL,
         ENG_ROLE_VECTOR,
         eng_init_constant(1),
         1,
         {own->value_width}},
    };
    eng_status status = eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, own->key_width,
                                          own->value_width, error);
    if (status == ENG_OK && own->decay == KERN_DECAY_HEAD)
        status = eng_declare_head_decays(model, layer, &model->layer[layer].constant, error);
    return status;
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    if (own->decay == KERN_DECAY_SCALAR || own->decay == KERN_DECAY_CHANNEL)
        out->gates.decay_law = KERN_DECAY_LAW_SIGMOID;
    if (own->decay == KERN_DECAY_HEAD)
        out->decay = model->tensors + model->layer[layer].constant;
    out->norm = own->output_norm;
}

const eng_mixer eng_mixer_recurrence = {.name = "recurrence",
                                        .read = read,
                                        .declare = declare,
                                        .forward = eng_recurrent_forward,
                                        .backward = eng_recurrent_backward,
                                        .flops = eng_recurrent_flops,
                                        .describe = describe};

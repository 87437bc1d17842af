// SPDX-License-Identifier: Apache-2.0
// Gated linear attention (Yang et al. 2023, arXiv 2312.06635; flash-linear-attention's names; models.md 5).
//
//   q, k, v = W x, or silu(conv(W x))   log a = max(logsigmoid(W_2 W_1 x + b) / 16, clamp_min)
//   S = diag(a) S + k v^T   o = S^T q / sqrt(K)   y = W_o (RMS(o) silu(W_g x))
//
// Grouped keys, values and decays share their states. State of a layer: S (key heads, K, V), then the inputs of the
// convolutions.
#include "engine/mixer_recurrent.h"

enum { GATE_RANK = 16 };

static const float logit_divisor = 16;

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    eng_config_grouped(keys, config, 0.5, 1, 4, own);
    own->decay = KERN_DECAY_CHANNEL;
    own->heads = own->key_heads;
    own->taps = eng_config_short_conv(keys, false);
    own->value_activation = own->taps > 0 ? KERN_SILU : KERN_IDENTITY;
    own->key_activation = own->value_activation;
    own->key_map = eng_config_plain_map(keys);
    if (eng_keys_value(keys, "clamp_min")) {
        own->clamp_min = (float)eng_keys_number(keys, "clamp_min", 0, -1e6, 0);
        if (own->clamp_min == 0)
            eng_keys_fail(keys, ENG_UNSUPPORTED, "clamp_min", "must be below 0");
    }
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    const char *const names[] = {"g_norm_swish_gate.weight", "g_norm.weight"};
    int64_t d = config->hidden_size, o = (int64_t)own->query_heads * own->value_width;
    int64_t k = (int64_t)own->heads * own->key_width;
    eng_init normal = eng_init_normal(config);
    eng_init horizon = eng_init_horizon(config, ENG_INIT_HORIZON, own->heads, logit_divisor);
    const eng_tensor_row rows[] = {
        {ENG_A_DOWN, true, "gk_proj.0.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {GATE_RANK, d}},
        {ENG_A_PROJ, true, "gk_proj.1.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {k, GATE_RANK}},
        {ENG_A_BIAS, true, "gk_proj.1.bias", NULL, ENG_ROLE_VECTOR, horizon, 1, {k}},
        {ENG_G_PROJ, own->output_gate, "g_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {o, d}},
        {ENG_O_NORM,
         !own->unweighted_norm,
         names[own->plain_norm_name],
         names[!own->plain_norm_name],
         ENG_ROLE_VECTOR,
         eng_init_constant(1),
         1,
         {own->value_width}},
    };
    return eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, own->key_width, own->value_width,
                             error);
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    out->gates.decay_law = KERN_DECAY_LAW_SIGMOID;
    out->gates.divisor = logit_divisor;
    out->gates.clamp_min = own->clamp_min;
}

const eng_mixer eng_mixer_gla = {.name = "gla",
                                 .read = read,
                                 .declare = declare,
                                 .forward = eng_recurrent_forward,
                                 .backward = eng_recurrent_backward,
                                 .flops = eng_recurrent_flops,
                                 .describe = describe};

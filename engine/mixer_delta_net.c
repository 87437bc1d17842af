// SPDX-License-Identifier: Apache-2.0
// DeltaNet (Schlag et al. 2021; Yang et al. 2024, arXiv 2406.06484; flash-linear-attention's names; models.md 4).
//
//   q, k = norm(act(conv(W x)))   v = silu(conv(W x))   beta = sigmoid(W x) [times 2]
//   S += beta k (v - S^T k)^T   o = S^T q / sqrt(K)   y = W_o (RMS(o) [silu(W_g x)])
//
// State of a layer: S (H, K, V), then the last W - 1 inputs of the three convolutions.
#include "engine/mixer_recurrent.h"

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    static const eng_choice norms[] = {{"l2", false}, {"sum", true}};
    static const eng_choice activations[] = {
        {"silu", KERN_SILU}, {"relu", KERN_RELU}, {"elu", KERN_ELU1}, {"identity", KERN_IDENTITY}};
    eng_config_equal_heads(own, eng_config_heads(keys, "num_heads", 16));
    own->key_width = eng_config_expanded(keys, "expand_k", 1, config->hidden_size, own->heads);
    own->value_width = eng_config_expanded(keys, "expand_v", 1, config->hidden_size, own->heads);
    eng_config_delta(keys, own);
    own->output_gate = eng_keys_flag(keys, "use_gate", false);
    if (!eng_keys_flag(keys, "use_beta", true)) {
        own->constant_write = own->write_factor != 1;
        own->weighted = own->constant_write;
    }
    own->qk_norm_sums = eng_config_choice(keys, "qk_norm", norms, sizeof norms / sizeof *norms);
    own->key_activation =
        eng_config_choice(keys, "qk_activation", activations, sizeof activations / sizeof *activations);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, o = (int64_t)own->heads * own->value_width;
    eng_init normal = eng_init_normal(config);
    bool beta = own->weighted && !own->constant_write;
    const eng_tensor_row rows[] = {
        {ENG_B_PROJ, beta, "b_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {own->heads, d}},
        {ENG_G_PROJ, own->output_gate, "g_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {o, d}},
        {ENG_O_NORM, true, "o_norm.weight", NULL, ENG_ROLE_VECTOR, eng_init_constant(1), 1, {own->value_width}},
    };
    return eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, own->key_width, own->value_width,
                             error);
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    if (own->constant_write)
        out->gates.write_law = KERN_WRITE_LAW_CONSTANT;
}

const eng_mixer eng_mixer_delta_net = {.name = "delta_net",
                                       .read = read,
                                       .declare = declare,
                                       .forward = eng_recurrent_forward,
                                       .backward = eng_recurrent_backward,
                                       .flops = eng_recurrent_flops,
                                       .describe = describe};

// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464; flash-linear-attention's names; models.md 3).
//
//   q, k = L2(silu(conv(W x)))   v = silu(conv(W x))   beta = sigmoid(W x) [times 2]
//   g = -e^A_log softplus(W x + dt_bias)   S~ = e^g S   S = S~ + beta k (v - S~^T k)^T   o = S^T q / sqrt(K)
//   y = W_o (RMS(o) [silu(W_g x)])
//
// Value heads share query and key heads. State of a layer: S (value heads, K, V), then the inputs of the convolutions.
#include "engine/mixer_recurrent.h"

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    (void)config;
    eng_config_value_groups(keys, 6, 256, 2, own);
    own->decay = KERN_DECAY_SCALAR;
    own->output_gate = eng_keys_flag(keys, "use_gate", true);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, o = (int64_t)own->heads * own->value_width;
    eng_init normal = eng_init_normal(config), A = eng_init_constant(0);
    eng_init dt = eng_init_horizon(config, ENG_INIT_HORIZON_STEP, own->heads, 1);
    if (config->init_fla) {
        A = (eng_init){.kind = ENG_INIT_LOG_UNIFORM, .low = 0, .value = 16};
        dt = (eng_init){.kind = ENG_INIT_STEP, .low = 1e-3F, .value = 0.1F};
    }
    const eng_tensor_row rows[] = {
        {ENG_A_PROJ, true, "a_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {own->heads, d}},
        {ENG_B_PROJ, true, "b_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {own->heads, d}},
        {ENG_A_LOG, true, "A_log", NULL, ENG_ROLE_VECTOR, A, 1, {own->heads}},
        {ENG_DT_BIAS, true, "dt_bias", NULL, ENG_ROLE_VECTOR, dt, 1, {own->heads}},
        {ENG_G_PROJ, own->output_gate, "g_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {o, d}},
        {ENG_O_NORM, true, "o_norm.weight", NULL, ENG_ROLE_VECTOR, eng_init_constant(1), 1, {own->value_width}},
    };
    return eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, own->key_width, own->value_width,
                             error);
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    eng_recurrent_begin(model, layer, out);
    out->gates.decay_law = KERN_DECAY_LAW_EXPONENTIAL;
}

const eng_mixer eng_mixer_gated_deltanet = {.name = "gated_deltanet",
                                            .read = read,
                                            .declare = declare,
                                            .forward = eng_recurrent_forward,
                                            .backward = eng_recurrent_backward,
                                            .flops = eng_recurrent_flops,
                                            .describe = describe};

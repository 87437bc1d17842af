// SPDX-License-Identifier: Apache-2.0
// Kimi delta attention (Kimi Team 2025, arXiv 2510.26692; flash-linear-attention's names; models.md 6).
//
//   q, k = L2(silu(conv(W x)))   v = silu(conv(W x))   beta = sigmoid(W x) [times 2]   f = W_2 W_1 x + dt_bias
//   log a = -e^A_log softplus(f), or lower_bound sigmoid(e^A_log f)
//   S~ = diag(a) S   S = S~ + beta k (v - S~^T k)^T   o = S^T q / sqrt(K)   y = W_o (RMS(o) sigmoid(W_4 W_3 x + b))
//
// State of a layer: S (value heads, K, V), then the inputs of the convolutions.
#include "engine/mixer_recurrent.h"

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    (void)config;
    eng_config_value_groups(keys, 16, 128, 1, own);
    own->decay = KERN_DECAY_CHANNEL;
    own->output_gate = true;
    own->lower_bound = (float)eng_keys_number(keys, "lower_bound", 0, -1e6, -1e-6);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, o = (int64_t)own->heads * own->value_width;
    int64_t k = (int64_t)own->heads * own->key_width, rank = own->value_width;
    bool bounded = own->lower_bound < 0;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), A = zero;
    eng_init dt = eng_init_horizon(config, bounded ? ENG_INIT_HORIZON_BOUNDED : ENG_INIT_HORIZON_STEP, own->heads,
                                   bounded ? -own->lower_bound : 1);
    if (config->init_fla) {
        if (!bounded)
            A = (eng_init){.kind = ENG_INIT_LOG_UNIFORM, .low = 1, .value = 16};
        dt = (eng_init){.kind = ENG_INIT_STEP, .low = 1e-3F, .value = 0.1F};
    }
    const eng_tensor_row rows[] = {
        {ENG_A_DOWN, true, "f_proj.0.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {rank, d}},
        {ENG_A_PROJ, true, "f_proj.1.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {k, rank}},
        {ENG_B_PROJ, true, "b_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {own->heads, d}},
        {ENG_A_LOG, true, "A_log", NULL, ENG_ROLE_VECTOR, A, 1, {own->heads}},
        {ENG_DT_BIAS, true, "dt_bias", NULL, ENG_ROLE_VECTOR, dt, 1, {k}},
        {ENG_G_DOWN, true, "g_proj.0.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {rank, d}},
        {ENG_G_PROJ, true, "g_proj.1.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {o, rank}},
        {ENG_G_BIAS, true, "g_proj.1.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {o}},
        {ENG_O_NORM, true, "o_norm.weight", NULL, ENG_ROLE_VECTOR, eng_init_constant(1), 1, {own->value_width}},
    };
    return eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, own->key_width, own->value_width,
                             error);
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    out->gates.decay_law = own->lower_bound < 0 ? KERN_DECAY_LAW_BOUNDED : KERN_DECAY_LAW_EXPONENTIAL;
    out->gates.lower_bound = own->lower_bound;
    out->gate_activation = KERN_SIGMOID;
}

const eng_mixer eng_mixer_kda = {.name = "kda",
                                 .read = read,
                                 .declare = declare,
                                 .forward = eng_recurrent_forward,
                                 .backward = eng_recurrent_backward,
                                 .flops = eng_recurrent_flops,
                                 .describe = describe};

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
         true,
         names[own->plain_norm_name],
         names[!own->plain_norm_name],
         ENG_ROLE_VECTOR,
         eng_init_constant(1),
         1,
         {own->value_width}},
    };
    eng_status status = eng_declare_branches(model, layer, prefix, error);
    if (status == ENG_OK)
        status = eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
    eng_declare_recurrent_state(model, layer, own->key_width, own->value_width);
    return status;
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    out->gates.decay_law = KERN_DECAY_LAW_SIGMOID;
    out->gates.divisor = logit_divisor;
    out->gates.clamp_min = own->clamp_min;
}

const eng_mixer eng_mixer_gla = {.name = "gla",
                                 .declare = declare,
                                 .forward = eng_recurrent_forward,
                                 .backward = eng_recurrent_backward,
                                 .flops = eng_recurrent_flops,
                                 .describe = describe};

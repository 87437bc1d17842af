// SPDX-License-Identifier: Apache-2.0
// The mLSTM of xLSTM 7B (Beck et al. 2025, arXiv 2503.13427; names of the public checkpoints; models.md 12).
//
//   q, k, v = W x   i = cap(W x + b)   f = cap(W x + b)   m = max(log s(f) + m, i)
//   [C | n] = e^(log s(f) + m' - m) [C | n] + e^(i - m) k [v | 1]^T   h = C^T q / (max(|n q|, e^-m) + eps)
//   y = W_o (LayerNorm(h) sigmoid(W x))
//
// q is divided by sqrt(K), so the state is that of the public code. State of a layer: [C | n] (H, K, V + 1), then m
// (H).
#include "engine/mixer_recurrent.h"

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, heads = own->heads;
    int64_t k = heads * own->key_width, v = heads * own->value_width;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), residual = eng_init_residual(config);
    eng_init forget = {.kind = ENG_INIT_LINEAR, .low = 3, .value = 6}, input = eng_init_constant(-10);
    const eng_tensor_row rows[] = {
        {ENG_Q_PROJ, true, "q.weight", "query.weight", ENG_ROLE_MATRIX, normal, 2, {k, d}},
        {ENG_K_PROJ, true, "k.weight", "key.weight", ENG_ROLE_MATRIX, normal, 2, {k, d}},
        {ENG_V_PROJ, true, "v.weight", "value.weight", ENG_ROLE_MATRIX, normal, 2, {v, d}},
        {ENG_G_PROJ, true, "ogate_preact.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {v, d}},
        {ENG_B_PROJ, true, "igate_preact.weight", NULL, ENG_ROLE_MATRIX, zero, 2, {heads, d}},
        {ENG_B_BIAS, true, "igate_preact.bias", NULL, ENG_ROLE_VECTOR, input, 1, {heads}},
        {ENG_A_PROJ, true, "fgate_preact.weight", NULL, ENG_ROLE_MATRIX, zero, 2, {heads, d}},
        {ENG_A_BIAS, true, "fgate_preact.bias", NULL, ENG_ROLE_VECTOR, forget, 1, {heads}},
        {ENG_O_NORM, true, "multihead_norm.weight", NULL, ENG_ROLE_VECTOR, eng_init_constant(1), 1, {v}},
        {ENG_O_PROJ, true, "out_proj.weight", NULL, ENG_ROLE_MATRIX, residual, 2, {d, v}},
    };
    eng_declare_recurrent_state(model, layer, own->key_width, own->value_width + 1);
    eng_model_add_state(model, layer, sizeof(float) * (size_t)heads);
    return eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    out->max_plus = true;
    out->gate_soft_cap = own->gate_soft_cap;
    out->stabiliser = model->layer[layer].state_part[1];
    out->family.unit_column = true;
    out->normalise = true;
    out->normaliser_eps = own->cell_eps;
    out->center = out->group_weights = true;
    out->gate_activation = KERN_SIGMOID;
}

const eng_mixer eng_mixer_mlstm = {.name = "mlstm",
                                   .declare = declare,
                                   .forward = eng_recurrent_forward,
                                   .backward = eng_recurrent_backward,
                                   .flops = eng_recurrent_flops,
                                   .describe = describe};

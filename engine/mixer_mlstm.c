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

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    eng_config_equal_heads(own, eng_config_heads(keys, "num_heads", 8));
    own->key_width = eng_config_expanded(keys, "qk_dim_factor", 0.5, config->hidden_size, own->heads);
    own->value_width = eng_config_expanded(keys, "v_dim_factor", 1, config->hidden_size, own->heads);
    own->decay = KERN_DECAY_SCALAR;
    own->weighted = true;
    own->write_factor = 1;
    own->linear_bias = eng_keys_flag(keys, "use_bias", false);
    own->gate_soft_cap = (float)eng_keys_number(keys, "gate_soft_cap", 15, 0, 1e6);
    own->cell_eps = (float)eng_keys_number(keys, "eps", 1e-6, 0, 1);
}

// weight_mode fused: rows q, k, v, o of one tensor, i, f of another. k, v: rows of keys and of values.
static void add_fused(eng_model *model, int32_t layer, const char *prefix, int64_t k, int64_t v) {
    const int64_t heads = model->config.layer[layer].recurrent.heads, all = 2 * k + 2 * v;
    const struct {
        int32_t which;
        const char *leaf;
        int64_t row, rows;
    } parts[] = {
        {ENG_Q_PROJ, "qkv_opreact.weight", 0, all},         {ENG_K_PROJ, "qkv_opreact.weight", k, all},
        {ENG_V_PROJ, "qkv_opreact.weight", 2 * k, all},     {ENG_G_PROJ, "qkv_opreact.weight", 2 * k + v, all},
        {ENG_B_PROJ, "ifgate_preact.weight", 0, 2 * heads}, {ENG_A_PROJ, "ifgate_preact.weight", heads, 2 * heads},
        {ENG_Q_BIAS, "qkv_opreact.bias", 0, all},           {ENG_K_BIAS, "qkv_opreact.bias", k, all},
        {ENG_V_BIAS, "qkv_opreact.bias", 2 * k, all},       {ENG_G_BIAS, "qkv_opreact.bias", 2 * k + v, all},
        {ENG_B_BIAS, "ifgate_preact.bias", 0, 2 * heads},   {ENG_A_BIAS, "ifgate_preact.bias", heads, 2 * heads},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        int32_t tensor = model->layer[layer].mixer[parts[i].which];
        if (tensor >= 0)
            eng_model_add_whole(model, tensor, prefix, parts[i].leaf, parts[i].row, parts[i].rows);
    }
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, heads = own->heads;
    int64_t k = heads * own->key_width, v = heads * own->value_width;
    bool bias = own->linear_bias;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), residual = eng_init_residual(config);
    eng_init forget = {.kind = ENG_INIT_LINEAR, .low = 3, .value = 6}, input = eng_init_constant(-10);
    const eng_tensor_row rows[] = {
        {ENG_Q_PROJ, true, "q.weight", "query.weight", ENG_ROLE_MATRIX, normal, 2, {k, d}},
        {ENG_K_PROJ, true, "k.weight", "key.weight", ENG_ROLE_MATRIX, normal, 2, {k, d}},
        {ENG_V_PROJ, true, "v.weight", "value.weight", ENG_ROLE_MATRIX, normal, 2, {v, d}},
        {ENG_Q_BIAS, bias, "q.bias", "query.bias", ENG_ROLE_VECTOR, zero, 1, {k}},
        {ENG_K_BIAS, bias, "k.bias", "key.bias", ENG_ROLE_VECTOR, zero, 1, {k}},
        {ENG_V_BIAS, bias, "v.bias", "value.bias", ENG_ROLE_VECTOR, zero, 1, {v}},
        {ENG_G_BIAS, bias, "ogate_preact.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {v}},
        {ENG_G_PROJ, true, "ogate_preact.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {v, d}},
        {ENG_B_PROJ, true, "igate_preact.weight", NULL, ENG_ROLE_MATRIX, zero, 2, {heads, d}},
        {ENG_B_BIAS, true, "igate_preact.bias", NULL, ENG_ROLE_VECTOR, input, 1, {heads}},
        {ENG_A_PROJ, true, "fgate_preact.weight", NULL, ENG_ROLE_MATRIX, zero, 2, {heads, d}},
        {ENG_A_BIAS, true, "fgate_preact.bias", NULL, ENG_ROLE_VECTOR, forget, 1, {heads}},
        {ENG_O_NORM, true, "multihead_norm.weight", NULL, ENG_ROLE_VECTOR, eng_init_constant(1), 1, {v}},
        {ENG_O_NORM_BIAS, bias, "multihead_norm.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {v}},
        {ENG_O_BIAS, bias, "out_proj.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {d}},
        {ENG_O_PROJ, true, "out_proj.weight", NULL, ENG_ROLE_MATRIX, residual, 2, {d, v}},
    };
    eng_declare_recurrent_state(model, layer,
                                (eng_state_matrix){own->heads, own->key_width, own->value_width + 1, false});
    eng_model_add_state(model, layer, sizeof(float) * (size_t)heads);
    eng_status status = eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
    if (status == ENG_OK && config->fused_weights)
        add_fused(model, layer, prefix, k, v);
    return status;
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
                                   .read = read,
                                   .declare = declare,
                                   .forward = eng_recurrent_forward,
                                   .backward = eng_recurrent_backward,
                                   .flops = eng_recurrent_flops,
                                   .describe = describe};

// SPDX-License-Identifier: Apache-2.0
// Mamba-2 (Dao and Gu 2024, arXiv 2405.21060; one tensor layout in all public dialects; models.md 10).
//
//   [z | x | B | C | dt] = W x   [x | B | C] = silu(conv(.) + b)   dt = clamp(softplus(dt + dt_bias))
//   S = e^(-e^A_log dt) S + dt B x^T   o = S^T C + D x   y = W_o RMS(o silu(z)), or RMS(o) silu(z), or o silu(z)
//
// x is the value, B the key, C the query; heads share B and C by groups. One projection and one convolution run as
// parts by rows and channels. State of a layer: S (H, N, P), then the inputs of the convolution for C, B and x.
#include "engine/mixer_recurrent.h"

typedef struct widths {
    int32_t inner, group; // of x and z; of B and C
} widths;

static widths widths_of(const eng_recurrent_config *own) {
    return (widths){own->heads * own->value_width, own->key_heads * own->key_width};
}

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_config_mamba2(keys, config, layer);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    widths width = widths_of(own);
    int64_t d = config->hidden_size, channels = (int64_t)width.inner + 2 * (int64_t)width.group;
    int64_t in = channels + width.inner + own->heads;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), one = eng_init_constant(1), A = zero;
    eng_init dt = eng_init_horizon(config, ENG_INIT_HORIZON_STEP, own->heads, 1), residual = eng_init_residual(config);
    if (config->init_fla) {
        A = (eng_init){.kind = ENG_INIT_LOG_UNIFORM, .low = 1, .value = 16};
        dt = (eng_init){.kind = ENG_INIT_STEP, .low = 1e-3F, .value = 0.1F};
    }
    const eng_tensor_row rows[] = {
        {ENG_V_PROJ, true, "in_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {in, d}},
        {ENG_IN_BIAS, own->linear_bias, "in_proj.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {in}},
        {ENG_V_CONV, true, "conv1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {channels, 1, own->taps}},
        {ENG_CONV_BIAS, own->conv_bias, "conv1d.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {channels}},
        {ENG_DT_BIAS, true, "dt_bias", NULL, ENG_ROLE_VECTOR, dt, 1, {own->heads}},
        {ENG_A_LOG, true, "A_log", NULL, ENG_ROLE_VECTOR, A, 1, {own->heads}},
        {ENG_SKIP, true, "D", NULL, ENG_ROLE_VECTOR, one, 1, {own->skip_per_channel ? width.inner : own->heads}},
        {ENG_O_NORM, own->output_norm, "norm.weight", NULL, ENG_ROLE_VECTOR, one, 1, {width.inner}},
        {ENG_O_PROJ, true, "out_proj.weight", NULL, ENG_ROLE_MATRIX, residual, 2, {d, width.inner}},
        {ENG_O_BIAS, own->linear_bias, "out_proj.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {d}},
    };
    eng_declare_recurrent_state(model, layer, (eng_state_matrix){own->heads, own->key_width, own->value_width, false});
    return eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
}

static void set_part(const eng_model *model, int32_t layer, eng_branch *branch, int32_t row0, int32_t channel0) {
    const int32_t *tensor = model->layer[layer].mixer;
    branch->projection.weight = tensor[ENG_V_PROJ];
    branch->projection.bias = tensor[ENG_IN_BIAS];
    branch->projection.rows = branch->heads * branch->width;
    branch->projection.row0 = row0;
    branch->conv = tensor[ENG_V_CONV];
    branch->conv_bias = tensor[ENG_CONV_BIAS];
    branch->channel0 = channel0;
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    widths width = widths_of(own);
    set_part(model, layer, &out->v, width.inner, 0);
    set_part(model, layer, &out->k, 2 * width.inner, width.inner);
    set_part(model, layer, &out->q, 2 * width.inner + width.group, width.inner + width.group);
    out->gate = out->a = out->v.projection;
    out->gate.row0 = 0;
    out->a.row0 = 2 * (width.inner + width.group);
    out->a.rows = own->heads;
    out->gates.decay_law = KERN_DECAY_LAW_STEP;
    out->gates.write_law = KERN_WRITE_LAW_STEP;
    out->gates.step_min = own->step_min;
    out->gates.step_max = own->step_max;
    out->family.scale = 1;
    out->family.skip_width = own->skip_per_channel ? own->value_width : 1;
    out->norm = own->output_norm;
    out->norm_groups = own->norm_groups;
    out->group_weights = true;
    out->gate_first = !own->norm_before_gate;
}

const eng_mixer eng_mixer_mamba2 = {.name = "mamba2",
                                    .read = read,
                                    .declare = declare,
                                    .forward = eng_recurrent_forward,
                                    .backward = eng_recurrent_backward,
                                    .flops = eng_recurrent_flops,
                                    .describe = describe};

// SPDX-License-Identifier: Apache-2.0
// The plain recurrent mixer: one line of configuration a rival, so that models differ by their recurrence alone
// (models.md 1.8; the matched rivals of the MesaNet paper, arXiv 2506.05233).
//
//   q, k, v = [L2 of q and k] [silu(conv] (W x)   decay none, 1 - 2^(-5-h), or s(W x + b) a head or a key channel
//   beta = s(W x + b) or 1   additive or delta update   o = S^T q / sqrt(K)   y = W_o ([RMS(o)] [silu(W_g x)])
//
// State of a layer: S (H, K, V), then the inputs of the convolutions.
#include "engine/mixer_recurrent.h"

#include <math.h>
#include <stdlib.h>

// Log decays of heads that keep their decay, as retention spaces them.
static eng_status add_decays(eng_model *model, int32_t layer, eng_error *error) {
    int32_t heads = model->config.layer[layer].recurrent.heads;
    float *decay = malloc(sizeof *decay * (size_t)heads);
    for (int32_t h = 0; decay && h < heads; h++)
        decay[h] = (float)log1p(-exp2(-5.0 - h));
    model->layer[layer].constant = decay ? eng_model_add_constant(model, decay, heads) : -1;
    return model->layer[layer].constant >= 0 ? ENG_OK
                                             : eng_fail(error, ENG_NO_MEMORY, "out of memory for a layer's constants");
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
    eng_status status = eng_declare_branches(model, layer, prefix, error);
    if (status == ENG_OK)
        status = eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
    eng_declare_recurrent_state(model, layer, own->key_width, own->value_width);
    if (status == ENG_OK && own->decay == KERN_DECAY_HEAD)
        status = add_decays(model, layer, error);
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
                                        .declare = declare,
                                        .forward = eng_recurrent_forward,
                                        .backward = eng_recurrent_backward,
                                        .flops = eng_recurrent_flops,
                                        .describe = describe};

// SPDX-License-Identifier: Apache-2.0
// Retention (Sun et al. 2023, arXiv 2307.08621; as flash-linear-attention computes it, without xPos; models.md 7).
//
//   q, k = RoPE(W x)   v = W x   S = (1 - 2^(-5-h)) S + k v^T   o = S^T q / sqrt(K)   y = W_o (RMS(o) silu(W_g x))
//
// The decay follows the query head, so grouped keys and values still need a state a query head. State of a layer:
// S (H, K, V). Its constants are the angular frequencies, then the log decays.
#include "engine/mixer_recurrent.h"

#include <math.h>
#include <stdlib.h>

static const double theta = 10000;

static eng_status add_constants(eng_model *model, int32_t layer, eng_error *error) {
    int32_t pairs = model->config.layer[layer].recurrent.key_width / 2, decays;
    float *frequency = malloc(sizeof *frequency * (size_t)pairs);
    for (int32_t i = 0; frequency && i < pairs; i++)
        frequency[i] = (float)pow(theta, -(double)i / pairs);
    model->layer[layer].constant = frequency ? eng_model_add_constant(model, frequency, pairs) : -1;
    if (model->layer[layer].constant < 0)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a layer's constants");
    return eng_declare_head_decays(model, layer, &decays, error); // the constant behind
}

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    eng_config_grouped(keys, config, 1, 2, 8, own);
    own->decay = KERN_DECAY_HEAD;
    own->heads = own->query_heads;
    own->key_map = eng_config_plain_map(keys);
    if (keys->status == ENG_OK && own->key_width % 2 != 0)
        eng_keys_fail(keys, ENG_UNSUPPORTED, "expand_k", "gives rotated heads of odd width %d", own->key_width);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    const char *const names[] = {"g_norm_swish_gate.weight", "g_norm.weight"};
    int64_t o = (int64_t)own->heads * own->value_width;
    const eng_tensor_row rows[] = {
        {ENG_G_PROJ,
         own->output_gate,
         "g_proj.weight",
         NULL,
         ENG_ROLE_MATRIX,
         eng_init_normal(config),
         2,
         {o, config->hidden_size}},
        {ENG_O_NORM,
         !own->unweighted_norm,
         names[own->plain_norm_name],
         names[!own->plain_norm_name],
         ENG_ROLE_VECTOR,
         eng_init_constant(1),
         1,
         {own->value_width}},
    };
    eng_status status = eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, own->key_width,
                                          own->value_width, error);
    return status == ENG_OK ? add_constants(model, layer, error) : status;
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    eng_recurrent_begin(model, layer, out);
    int32_t constant = model->tensors + model->layer[layer].constant;
    out->q.frequency = out->k.frequency = constant;
    out->decay = constant + 1;
}

const eng_mixer eng_mixer_retnet = {.name = "retnet",
                                    .read = read,
                                    .declare = declare,
                                    .forward = eng_recurrent_forward,
                                    .backward = eng_recurrent_backward,
                                    .flops = eng_recurrent_flops,
                                    .describe = describe};

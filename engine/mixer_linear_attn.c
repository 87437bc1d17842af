// SPDX-License-Identifier: Apache-2.0
// Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236; tensor names of flash-linear-attention; models.md 8).
//
//   q, k = phi(W x) [/ their sum]   v = W x   S += k v^T   o = S^T q / sqrt(K') [/ its normaliser]
//   y = W_o RMS(o)
//
// phi is an activation, or a map that every head of q, or of k, shares. State of a layer: S (H, K', V), with a
// normaliser one column more.
#include "engine/mixer_recurrent.h"

#include <math.h>

static int32_t map_width(const eng_recurrent_config *own) {
    return own->feature_map == ENG_FEATURE_MAP_HEDGEHOG ? kern_feature_width(KERN_FEATURE_HEDGEHOG, own->key_width)
           : own->feature_map == ENG_FEATURE_MAP_DPFP   ? kern_feature_width(KERN_FEATURE_DPFP, own->key_width)
                                                        : own->key_width;
}

// The maps of a head: learned ones, and activations alone.
enum { PRODUCT, HEDGEHOG, T2R, DPFP, ELU, RELU, IDENTITY };

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_recurrent_config *own = &layer->recurrent;
    static const eng_choice names[] = {{"elementwise_product", PRODUCT},
                                       {"hedgehog", HEDGEHOG},
                                       {"t2r", T2R},
                                       {"dpfp", DPFP},
                                       {"elu", ELU},
                                       {"relu", RELU},
                                       {"identity", IDENTITY}};
    static const struct {
        eng_feature_map map;
        int32_t activation;
    } maps[] = {[PRODUCT] = {ENG_FEATURE_MAP_PRODUCT, KERN_IDENTITY},
                [HEDGEHOG] = {ENG_FEATURE_MAP_HEDGEHOG, KERN_IDENTITY},
                [T2R] = {ENG_FEATURE_MAP_T2R, KERN_RELU},
                [DPFP] = {ENG_FEATURE_MAP_DPFP, KERN_IDENTITY},
                [ELU] = {ENG_FEATURE_MAP_NONE, KERN_ELU1},
                [RELU] = {ENG_FEATURE_MAP_NONE, KERN_RELU},
                [IDENTITY] = {ENG_FEATURE_MAP_NONE, KERN_IDENTITY}};
    eng_config_grouped(keys, config, 1, 1, 4, own);
    own->output_gate = false;
    own->heads = own->key_heads;
    int32_t which = eng_config_choice(keys, "feature_map", names, sizeof names / sizeof *names);
    own->feature_map = maps[which].map;
    own->key_map = maps[which].activation;
    own->shared_map = eng_keys_flag(keys, "tie_feature_map_qk", false);
    own->norm_q = eng_keys_flag(keys, "norm_q", false);
    own->norm_k = eng_keys_flag(keys, "norm_k", false);
    own->normalise = eng_keys_flag(keys, "norm_feature_map", false);
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t width = own->key_width;
    bool product = own->feature_map == ENG_FEATURE_MAP_PRODUCT, hedgehog = own->feature_map == ENG_FEATURE_MAP_HEDGEHOG;
    bool one = hedgehog || own->feature_map == ENG_FEATURE_MAP_T2R, two = !own->shared_map;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), unit = eng_init_constant(1);
    const char *const k1 = two ? NULL : "feature_map_k.layer1.weight", *const k1b =
                                                                           two ? NULL : "feature_map_k.layer1.bias";
    const char *const k2 = two ? NULL : "feature_map_k.layer2.weight", *const k2b =
                                                                           two ? NULL : "feature_map_k.layer2.bias";
    const char *const k = two ? NULL : "feature_map_k.layer.weight", *const kb =
                                                                         two ? NULL : "feature_map_k.layer.bias";
    const eng_tensor_row rows[] = {
        {ENG_O_NORM, !own->unweighted_norm, "norm.weight", NULL, ENG_ROLE_VECTOR, unit, 1, {own->value_width}},
        {ENG_Q_MAP, product, "feature_map_q.layer1.weight", k1, ENG_ROLE_MATRIX, normal, 2, {width, width}},
        {ENG_Q_MAP + 1, product, "feature_map_q.layer1.bias", k1b, ENG_ROLE_VECTOR, zero, 1, {width}},
        {ENG_Q_MAP + 2, product, "feature_map_q.layer2.weight", k2, ENG_ROLE_MATRIX, normal, 2, {width, width}},
        {ENG_Q_MAP + 3, product, "feature_map_q.layer2.bias", k2b, ENG_ROLE_VECTOR, zero, 1, {width}},
        {ENG_Q_MAP, one, "feature_map_q.layer.weight", k, ENG_ROLE_MATRIX, normal, 2, {width, width}},
        {ENG_Q_MAP + 1, hedgehog, "feature_map_q.layer.bias", kb, ENG_ROLE_VECTOR, zero, 1, {width}},
        {ENG_K_MAP, product && two, "feature_map_k.layer1.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, width}},
        {ENG_K_MAP + 1, product && two, "feature_map_k.layer1.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {width}},
        {ENG_K_MAP + 2,
         product && two,
         "feature_map_k.layer2.weight",
         NULL,
         ENG_ROLE_MATRIX,
         normal,
         2,
         {width, width}},
        {ENG_K_MAP + 3, product && two, "feature_map_k.layer2.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {width}},
        {ENG_K_MAP, one && two, "feature_map_k.layer.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, width}},
        {ENG_K_MAP + 1, hedgehog && two, "feature_map_k.layer.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {width}},
    };
    return eng_declare_layer(model, layer, prefix, rows, sizeof rows / sizeof *rows, map_width(own),
                             own->value_width + own->normalise, error);
}

static void set_map(eng_branch *branch, const eng_recurrent_config *own, const int32_t *map, bool divided) {
    static const float sum_eps = 1e-4F;
    branch->map = map[0];
    branch->map_bias = map[1];
    branch->product = map[2];
    branch->product_bias = map[3];
    if (own->feature_map == ENG_FEATURE_MAP_HEDGEHOG)
        branch->feature = KERN_FEATURE_HEDGEHOG;
    if (own->feature_map == ENG_FEATURE_MAP_DPFP)
        branch->feature = KERN_FEATURE_DPFP;
    if (divided) {
        branch->norm = ENG_VECTOR_NORM_SUM;
        branch->eps = sum_eps;
    }
}

static void describe(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_recurrent_begin(model, layer, out);
    const int32_t *tensor = model->layer[layer].mixer;
    set_map(&out->q, own, tensor + ENG_Q_MAP, own->norm_q);
    set_map(&out->k, own, tensor + (own->shared_map ? ENG_Q_MAP : ENG_K_MAP), own->norm_k);
    out->family.key_width = map_width(own);
    out->family.scale = 1.0F / sqrtf((float)map_width(own));
    out->family.unit_column = out->normalise = own->normalise;
    out->normaliser_eps = 1e-10F;
}

const eng_mixer eng_mixer_linear_attn = {.name = "linear_attn",
                                         .read = read,
                                         .declare = declare,
                                         .forward = eng_recurrent_forward,
                                         .backward = eng_recurrent_backward,
                                         .flops = eng_recurrent_flops,
                                         .describe = describe};

// SPDX-License-Identifier: Apache-2.0
// Whether two configs are one model, field by field, told with the key that the field comes from.
//
// Left out: how files spell it (dialect, model_type, names), ids and knobs, which are written as they are, and start
// values, which a trained model no longer has.
#include <stddef.h>
#include <string.h>

#include "engine/export_internal.h"
#include "engine/mixer.h"

typedef struct field {
    size_t offset, size;
    const char *key;
} field;

#define MODEL(member, key) \
    { offsetof(eng_config, member), sizeof(((eng_config *)0)->member), key }
#define LAYER(member, key) \
    { offsetof(eng_layer_config, member), sizeof(((eng_layer_config *)0)->member), key }

static const field model_fields[] = {
    MODEL(vocab_size, "vocab_size"),
    MODEL(hidden_size, "hidden_size"),
    MODEL(layers, "num_hidden_layers"),
    MODEL(intermediate_size, "intermediate_size"),
    MODEL(mlp_activation, "hidden_act"),
    MODEL(norm_eps, "norm_eps"),
    MODEL(norm_offset, "norm_offset"),
    MODEL(tied, "tie_word_embeddings"),
    MODEL(scale_embeddings, "scale_embeddings"),
    MODEL(round_scale, "scale_embeddings"),
    MODEL(mlp_bias, "mlp_bias"),
    MODEL(norm_bias, "use_bias"),
    MODEL(logits_soft_cap, "logits_soft_cap"),
    MODEL(loop.loops, "num_loops"),
    MODEL(loop.first, "loop_blocks"),
    MODEL(loop.layers, "loop_blocks"),
    MODEL(loop.embedding, "loop_embedding"),
    MODEL(loop.residual_gate, "loop_residual_gate"),
    MODEL(loop.exit_gate, "exit_gate"),
};

static const field attention_fields[] = {
    LAYER(attention.heads, "num_heads"),
    LAYER(attention.kv_heads, "num_kv_heads"),
    LAYER(attention.head_width, "head_dim"),
    LAYER(attention.window, "window_size"),
    LAYER(attention.rotary, "partial_rotary_factor"),
    LAYER(attention.qkv_bias, "qkv_bias"),
    LAYER(attention.output_bias, "attention_bias"),
    LAYER(attention.qk_norm, "qk_norm"),
    LAYER(attention.rope_theta, "rope_theta"),
    LAYER(attention.rope_scaling, "rope_scaling"),
    LAYER(attention.rope_factor, "rope_scaling"),
    LAYER(attention.rope_low, "rope_scaling"),
    LAYER(attention.rope_high, "rope_scaling"),
    LAYER(attention.rope_original_length, "rope_scaling"),
};

static const field rglru_fields[] = {
    LAYER(rglru.width, "lru_width"),
    LAYER(rglru.blocks, "num_attention_heads"),
    LAYER(rglru.taps, "conv1d_width"),
};

static const field recurrent_fields[] = {
    LAYER(recurrent.decay, "decay"),
    LAYER(recurrent.update, "update"),
    LAYER(recurrent.heads, "num_heads"),
    LAYER(recurrent.query_heads, "num_heads"),
    LAYER(recurrent.key_heads, "num_kv_heads"),
    LAYER(recurrent.value_heads, "num_v_heads"),
    LAYER(recurrent.key_width, "head_dim"),
    LAYER(recurrent.value_width, "expand_v"),
    LAYER(recurrent.taps, "conv_size"),
    LAYER(recurrent.plain_values, "use_short_conv"),
    LAYER(recurrent.key_activation, "qk_activation"),
    LAYER(recurrent.value_activation, "use_short_conv"),
    LAYER(recurrent.key_map, "feature_map"),
    LAYER(recurrent.qk_norm, "qk_norm"),
    LAYER(recurrent.qk_norm_sums, "qk_norm"),
    LAYER(recurrent.weighted, "use_beta"),
    LAYER(recurrent.constant_write, "use_beta"),
    LAYER(recurrent.write_factor, "allow_neg_eigval"),
    LAYER(recurrent.output_norm, "rmsnorm"),
    LAYER(recurrent.output_gate, "use_output_gate"),
    LAYER(recurrent.unweighted_norm, "elementwise_affine"),
    LAYER(recurrent.feature_map, "feature_map"),
    LAYER(recurrent.shared_map, "tie_feature_map_qk"),
    LAYER(recurrent.norm_q, "norm_q"),
    LAYER(recurrent.norm_k, "norm_k"),
    LAYER(recurrent.normalise, "norm_feature_map"),
    LAYER(recurrent.clamp_min, "clamp_min"),
    LAYER(recurrent.lower_bound, "lower_bound"),
    LAYER(recurrent.conv_bias, "use_conv_bias"),
    LAYER(recurrent.linear_bias, "use_bias"),
    LAYER(recurrent.skip_per_channel, "D_has_hdim"),
    LAYER(recurrent.norm_before_gate, "norm_before_gate"),
    LAYER(recurrent.norm_groups, "n_groups"),
    LAYER(recurrent.step_min, "dt_limit"),
    LAYER(recurrent.step_max, "dt_limit"),
    LAYER(recurrent.gate_soft_cap, "gate_soft_cap"),
    LAYER(recurrent.cell_eps, "eps"),
};

static const field mesa_fields[] = {
    LAYER(mesa.lambda_bound, "lambda_lower_bound"),
    LAYER(mesa.gamma_cap, "gamma_cap_b"),
};

static const char *differing(const void *left, const void *right, const field *fields, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const char *a = (const char *)left + fields[i].offset, *b = (const char *)right + fields[i].offset;
        if (memcmp(a, b, fields[i].size) != 0)
            return fields[i].key;
    }
    return NULL;
}
#define DIFFERING(left, right, fields) differing(left, right, fields, sizeof(fields) / sizeof *(fields))

static const char *layer_difference(const eng_layer_config *left, const eng_layer_config *right) {
    if (left->mixer != right->mixer)
        return "layer_types";
    if (left->mixer == &eng_mixer_attention)
        return DIFFERING(left, right, attention_fields);
    if (left->mixer == &eng_mixer_rglru)
        return DIFFERING(left, right, rglru_fields);
    const char *key = DIFFERING(left, right, recurrent_fields);
    if (!key && left->mixer == &eng_mixer_mesa)
        key = DIFFERING(left, right, mesa_fields);
    return key;
}

const char *eng_export_difference(const eng_config *left, const eng_config *right) {
    const char *key = DIFFERING(left, right, model_fields);
    for (int32_t i = 0; !key && i < left->layers; i++)
        key = layer_difference(&left->layer[i], &right->layer[i]);
    return key;
}

// SPDX-License-Identifier: Apache-2.0
// The table of mixer_variants.h: one block of each kind with random weights.
//
// Sizes are small and mostly no multiple of a vector or of each other.
#include "tests/engine/mixer_variants.h"

#define SMALL \
    "\"hidden_size\": 32, \"vocab_size\": 24, \"initializer_range\": 0.2, \"bos_token_id\": 0, \"eos_token_id\": 1,"
// The large epsilon keeps norms of nearly empty read-outs smooth, which a difference needs.
#define FLA SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 1, \"norm_eps\": 0.01, "

const small_model mixer_variants[] = {
    {"linear_attn: elementwise product", "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2}", false, false},
    {"linear_attn: elementwise product with a normaliser, output norm without weights",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2, \"norm_feature_map\": true, \"expand_v\": 0.5,"
     "\"elementwise_affine\": false}",
     false, false},
    {"linear_attn: hedgehog, tied, normaliser, shared keys",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"feature_map\": \"hedgehog\","
     "\"tie_feature_map_qk\": true, \"norm_feature_map\": true}",
     false, false},
    {"linear_attn: t2r, divided by sums",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2, \"feature_map\": \"t2r\", \"norm_q\": true,"
     "\"norm_k\": true}",
     false, false},
    {"linear_attn: dpfp", "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 2, \"feature_map\": \"dpfp\"}",
     false, false},
    {"linear_attn: elu, shared keys, expanded",
     "{\"model_type\": \"linear_attn\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"feature_map\": \"elu\","
     "\"expand_v\": 2, \"expand_k\": 0.5}",
     false, false},
    {"retnet: shared keys, feature map",
     "{\"model_type\": \"retnet\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"feature_map\": \"relu\"}", false,
     false},
    {"retnet: no gate", "{\"model_type\": \"retnet\", " FLA "\"num_heads\": 2, \"use_output_gate\": false}", false,
     false},
    {"gla: convolution, shared keys, clamp",
     "{\"model_type\": \"gla\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"use_short_conv\": true,"
     "\"clamp_min\": -0.05}",
     false, false},
    {"gla: feature map behind a convolution, norm without weights",
     "{\"model_type\": \"gla\", " FLA "\"num_heads\": 2, \"feature_map\": \"sigmoid\", \"use_short_conv\": true,"
     "\"elementwise_affine\": false}",
     false, false},
    {"gla: feature map, no gate",
     "{\"model_type\": \"gla\", " FLA "\"num_heads\": 2, \"feature_map\": \"sigmoid\", \"use_output_gate\": false}",
     false, false},
    {"delta_net: relu, gate, negative eigenvalues",
     "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"qk_activation\": \"relu\", \"use_gate\": true,"
     "\"allow_neg_eigval\": true}",
     false, false},
    {"delta_net: divided by sums, no convolution",
     "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"qk_norm\": \"sum\", \"qk_activation\": \"elu\","
     "\"use_short_conv\": false}",
     false, false},
    {"delta_net: no beta", "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"use_beta\": false}", false,
     false},
    {"delta_net: no beta, negative eigenvalues",
     "{\"model_type\": \"delta_net\", " FLA "\"num_heads\": 2, \"use_beta\": false, \"allow_neg_eigval\": true}", false,
     false},
    {"gated_deltanet: value groups, expanded",
     "{\"model_type\": \"gated_deltanet\", " FLA "\"num_heads\": 2, \"num_v_heads\": 4, \"head_dim\": 8,"
     "\"allow_neg_eigval\": true}",
     false, false},
    {"gated_deltanet: no gate, no convolution",
     "{\"model_type\": \"gated_deltanet\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"use_gate\": false,"
     "\"use_short_conv\": false}",
     false, false},
    {"kda: value groups, bounded decay",
     "{\"model_type\": \"kda\", " FLA "\"num_heads\": 2, \"num_v_heads\": 4, \"head_dim\": 8, \"lower_bound\": -5,"
     "\"safe_gate\": true}",
     false, false},
    {"kda", "{\"model_type\": \"kda\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"expand_v\": 0.5}", false, false},
    {"mamba2: groups",
     "{\"model_type\": \"mamba2\", " SMALL "\"num_hidden_layers\": 2, \"num_heads\": 8,"
     "\"head_dim\": 8, \"state_size\": 16, \"n_groups\": 2, \"layer_norm_epsilon\": 1e-5,"
     "\"time_step_limit\": [0.0, Infinity]}",
     false, false},
    {"mamba2: groups, norm a group, biases, limits",
     "{\"model_type\": \"mamba2\", " SMALL "\"num_hidden_layers\": 1, \"norm_eps\": 1e-5, \"head_dim\": 8,"
     "\"state_size\": 16, \"n_groups\": 2, \"norm_before_gate\": true, \"D_has_hdim\": true, \"use_bias\": true,"
     "\"dt_limit\": [0.01, 0.5]}",
     false, false},
    {"mamba2: no norm, no bias of the convolution",
     "{\"model_type\": \"mamba2\", " SMALL "\"num_hidden_layers\": 1, \"norm_eps\": 1e-5, \"head_dim\": 16,"
     "\"state_size\": 8, \"rmsnorm\": false, \"use_conv_bias\": false}",
     false, false},
    {"mamba2: the spelling of mamba_ssm",
     "{\"d_model\": 32, \"n_layer\": 2, \"vocab_size\": 23, \"pad_vocab_size_multiple\": 8, \"initializer_range\": 0.2,"
     "\"ssm_cfg\": {\"layer\": \"Mamba2\", \"headdim\": 8, \"d_state\": 16, \"ngroups\": 2, \"d_conv\": 3,"
     "\"norm_before_gate\": true, \"dt_limit\": [0.01, Infinity]}}",
     false, false},
    {"xlstm", "{\"model_type\": \"xlstm\", " SMALL "\"num_hidden_layers\": 1, \"num_heads\": 2}", false, false},
    {"recurrent_gemma: recurrent and attention",
     "{\"model_type\": \"recurrent_gemma\", " SMALL "\"num_hidden_layers\": 3, \"intermediate_size\": 64,"
     "\"num_attention_heads\": 4, \"num_key_value_heads\": 1, \"attention_window_size\": 20, \"lru_width\": 48,"
     "\"attention_bias\": true}",
     false, false},
    {"recurrence: none", "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16}", false, false},
    {"recurrence: head, no norms, no convolution",
     "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"recurrence\": {\"decay\": \"head\","
     "\"conv\": false, \"qk_norm\": false, \"out_norm\": false, \"out_gate\": true}}",
     false, false},
    {"recurrence: scalar, input gate",
     "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"recurrence\": {\"decay\":"
     "\"scalar\", \"input_gate\": true, \"out_gate\": true}}",
     false, false},
    {"recurrence: channel, delta",
     "{\"model_type\": \"recurrence\", " FLA "\"num_heads\": 2, \"head_dim\": 16, \"recurrence\": {\"decay\":"
     "\"channel\", \"update\": \"delta\"}}",
     false, false},
    {"a hybrid of named layers",
     "{\"model_type\": \"mesa_net\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 3, \"num_heads\": 2,"
     "\"head_dim\": 16, \"layer_types\": [\"gated_deltanet\", \"attention\", \"recurrence\"]}",
     false, false},
    {"mesa_net: heads that are no multiple of a vector",
     "{\"model_type\": \"mesa_net\", " FLA "\"num_heads\": 3, \"head_dim\": 9, \"use_output_gate\": true}", false,
     true},
    {"mesa_net: cap on the forget gate, hybrid with a window",
     "{\"model_type\": \"mesa_net\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 2, \"num_heads\": 2,"
     "\"head_dim\": 16, \"gamma_cap_b\": 0.9, \"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 2,"
     "\"window_size\": 20}}",
     false, true},
    {"transformer: norms of queries and keys, biases",
     "{\"model_type\": \"transformer\", " FLA "\"num_heads\": 4, \"num_kv_heads\": 2, \"qk_norm\": true,"
     "\"qkv_bias\": true}",
     true, false},
    {"transformer: window", "{\"model_type\": \"transformer\", " FLA "\"num_heads\": 2, \"window_size\": 20}", false,
     false},
    {"llama: biases, scaled rotation",
     "{\"model_type\": \"llama\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 1,"
     "\"num_attention_heads\": 4, \"num_key_value_heads\": 1, \"head_dim\": 10, \"attention_bias\": true,"
     "\"mlp_bias\": true, \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4}}",
     true, false},
    {"xlstm: biases",
     "{\"model_type\": \"xlstm\", " SMALL "\"num_hidden_layers\": 2, \"num_heads\": 2, \"use_bias\": true}", false,
     false},
    {"looped: Mesa and attention, read where the gate says",
     "{\"model_type\": \"mesa_net\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 3, \"num_heads\": 2,"
     "\"head_dim\": 16, \"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 2}, \"num_loops\": 3,"
     "\"loop_blocks\": [1, 2], \"exit_gate\": true, \"mesa\": {\"exit_threshold\": 0.6}}",
     true, true},
    {"looped: a hybrid that goes on behind its loop",
     "{\"model_type\": \"gated_deltanet\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 3,"
     "\"num_heads\": 2, \"head_dim\": 16, \"attn\": {\"layers\": [1], \"num_heads\": 2, \"window_size\": 20},"
     "\"num_loops\": 2, \"loop_blocks\": [0, 1], \"loop_residual_gate\": true}",
     false, false},
    {"looped: a hybrid whole, without a gate",
     "{\"model_type\": \"mesa_net\", " SMALL "\"intermediate_size\": 48, \"num_hidden_layers\": 2, \"num_heads\": 2,"
     "\"head_dim\": 16, \"layer_types\": [\"mesa_net\", \"gla\"], \"num_loops\": 2, \"loop_embedding\": true}",
     false, true},
};

void mixer_prompt(uint64_t seed, int32_t *ids, int32_t count) {
    small_prompt(seed, ids, count);
    for (int32_t i = 0; i < count; i++)
        ids[i] = (ids[i] + (i > 30 ? ids[i - 30] : 0)) % MIXER_VOCABULARY;
}

_Static_assert(sizeof mixer_variants / sizeof *mixer_variants == MIXER_VARIANTS, "their count");

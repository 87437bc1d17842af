// SPDX-License-Identifier: Apache-2.0
// config.json: what is accepted with which values, what is refused with which key, bare Infinity, and the tensor table.
//
// Expected defaults are those of the public configuration classes. Every refusal must leave the output untouched.
#include <stdlib.h>
#include <string.h>

#include "engine/mixer.h"
#include "engine/model.h"
#include "tests/check_main.h"

static eng_status parse(const char *json, eng_config *config, eng_error *error) {
    return eng_config_parse(json, strlen(json), "folder/config.json", config, error);
}

static eng_config accept(const char *json) {
    eng_config config;
    eng_error error = {0};
    ck_assert_msg(parse(json, &config, &error) == ENG_OK, "%s: %s", json, error.text);
    return config;
}

static eng_model *model_of(const char *json) {
    eng_config config = accept(json);
    eng_model *model = NULL;
    ck_assert_int_eq(eng_model_create(&config, &model, NULL), ENG_OK);
    return model;
}

// ---- accepted

START_TEST(defaults_of_mesa_net) {
    eng_config config = accept("{\"model_type\": \"mesa_net\"}");
    ck_assert_str_eq(config.model_type, "mesa_net");
    ck_assert_int_eq(config.dialect, ENG_DIALECT_FLA);
    ck_assert_int_eq(config.vocab_size, 32000);
    ck_assert_int_eq(config.hidden_size, 2048);
    ck_assert_int_eq(config.layers, 24);
    ck_assert_int_eq(config.intermediate_size, 5632); // int(2048 * 4 * 2 / 3) = 5461, up to a multiple of 256
    ck_assert_float_eq(config.norm_eps, 1e-6F);
    ck_assert(!config.tied && !config.scale_embeddings && !config.mlp_bias && !config.init_fla);
    ck_assert_float_eq(config.logits_soft_cap, 0);
    ck_assert_float_eq(config.initializer_range, 0.02F);
    ck_assert_int_eq(config.max_positions, 2048);
    ck_assert_int_eq(config.trained_length, 2048);
    ck_assert_int_eq(config.bos_id, 1);
    ck_assert_int_eq(config.pad_id, -1);
    ck_assert_int_eq(config.eos_count, 1);
    ck_assert_int_eq(config.eos_id[0], 2);
    for (int i = 0; i < config.layers; i++) {
        ck_assert_ptr_eq(config.layer[i].mixer, &eng_mixer_mesa);
        const eng_mesa_config *mesa = &config.layer[i].mesa;
        const eng_recurrent_config *own = &config.layer[i].recurrent;
        ck_assert_int_eq(own->heads, 16);
        ck_assert_int_eq(own->key_width, 128);
        ck_assert_int_eq(own->taps, 4);
        ck_assert(!own->output_gate);
        ck_assert_float_eq(mesa->lambda_bound, 0.25F);
        ck_assert_int_eq(mesa->cg_steps_training, 30);
        ck_assert_int_eq(mesa->cg_steps_decoding, 30);
        ck_assert_float_eq(mesa->gamma_cap, 1);
    }
    ck_assert_int_eq(config.knobs.cg_mode, ENG_CG_TOLERANCE);
    ck_assert_float_eq(config.knobs.cg_tolerance, 1e-4F);
    ck_assert_int_eq(config.knobs.cg_max_steps, 30);
    ck_assert_float_eq(config.knobs.exit_threshold, 1);
    ck_assert_int_eq(config.knobs.max_loops, 1);
    eng_config_free(&config);
    ck_assert_ptr_null(config.layer);
}
END_TEST

// retnet's class has 2, and takes null for 4.
START_TEST(a_null_ratio_is_four) {
    static const struct {
        const char *key;
        int32_t width;
    } rows[] = {{"", 1536}, {", \"hidden_ratio\": null", 2816}, {", \"hidden_ratio\": 3", 2048}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char json[128];
        snprintf(json, sizeof json, "{\"model_type\": \"retnet\", \"hidden_size\": 1024%s}", rows[i].key);
        eng_config config = accept(json);
        ck_assert_int_eq(config.intermediate_size, rows[i].width);
        eng_config_free(&config);
    }
}
END_TEST

START_TEST(own_keys) {
    eng_config config = accept(
        "{\"model_type\": \"mesa_net\", \"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_heads\": 3, \"head_dim\": "
        "32,"
        "\"use_output_gate\": true, \"conv_size\": 2, \"lambda_lower_bound\": 0.5, \"max_cg_step_training\": 12,"
        "\"max_cg_step_decoding\": 9, \"gamma_cap_b\": 0.9975, \"scale_embeddings\": true, \"logits_soft_cap\": 30,"
        "\"tie_word_embeddings\": true, \"trained_length\": 1024, \"init\": \"fla\", \"num_loops\": 6,"
        "\"loop_blocks\": [1], \"loop_embedding\": true, \"loop_residual_gate\": true, \"exit_gate\": true,"
        "\"mesa\": {\"cg_tolerance\": 0.01, \"cg_mode\": \"steps\", \"exit_threshold\": 0.5, \"max_loops\": 5},"
        "\"bos_token_id\": null, \"pad_token_id\": -1, \"eos_token_id\": [7, 9], \"hidden_act\": \"silu\"}");
    const eng_mesa_config *mesa = &config.layer[1].mesa;
    const eng_recurrent_config *own = &config.layer[1].recurrent;
    ck_assert_int_eq(own->heads, 3);
    ck_assert_int_eq(own->key_width, 32);
    ck_assert(own->output_gate && config.scale_embeddings && config.tied && config.init_fla);
    ck_assert_int_eq(own->taps, 2);
    ck_assert_float_eq(mesa->lambda_bound, 0.5F);
    ck_assert_int_eq(mesa->cg_steps_training, 12);
    ck_assert_float_eq(mesa->gamma_cap, 0.9975F);
    ck_assert_float_eq(config.logits_soft_cap, 30);
    ck_assert_int_eq(config.trained_length, 1024);
    ck_assert_int_eq(config.max_positions, 2048);
    ck_assert_int_eq(config.knobs.cg_mode, ENG_CG_STEPS);
    ck_assert_int_eq(config.knobs.max_loops, 5);
    ck_assert_int_eq(config.loop.loops, 6);
    ck_assert_int_eq(config.loop.first, 1);
    ck_assert_int_eq(config.loop.layers, 1);
    ck_assert(config.loop.embedding && config.loop.residual_gate && config.loop.exit_gate);
    ck_assert_float_eq(config.knobs.cg_tolerance, 0.01F);
    ck_assert_int_eq(config.knobs.cg_max_steps, 9); // max_cg_step_decoding
    ck_assert_float_eq(config.knobs.exit_threshold, 0.5F);
    ck_assert_int_eq(config.bos_id, -1);
    ck_assert_int_eq(config.pad_id, -1);
    ck_assert_int_eq(config.eos_count, 2);
    ck_assert_int_eq(config.eos_id[1], 9);
    eng_config_free(&config);
}
END_TEST

START_TEST(tolerance_zero_is_exact) {
    eng_config config = accept("{\"model_type\": \"mesa_net\", \"mesa\": {\"cg_tolerance\": 0}}");
    ck_assert_int_eq(config.knobs.cg_mode, ENG_CG_EXACT);
    eng_config_free(&config);
}
END_TEST

START_TEST(hybrid_by_attn_object_and_list) {
    static const char *const spellings[] = {
        "{\"model_type\": \"mesa_net\", \"hidden_size\": 128, \"num_hidden_layers\": 3, \"attn\": {\"layers\": [1],"
        "\"num_heads\": 4, \"num_kv_heads\": 2, \"window_size\": 48, \"rope_theta\": 5000, \"qkv_bias\": true}}",
        "{\"model_type\": \"mesa_net\", \"hidden_size\": 128, \"num_hidden_layers\": 3, \"attn\": [{\"layers\": [1],"
        "\"num_heads\": 4, \"num_kv_heads\": 2, \"window_size\": 48, \"rope_theta\": 5000, \"qkv_bias\": true}]}",
        "{\"model_type\": \"mesa_net\", \"hidden_size\": 128, \"num_hidden_layers\": 3,"
        "\"layer_types\": [\"mesa_net\", \"attention\", \"mesa_net\"], \"attn\": {"
        "\"num_heads\": 4, \"num_kv_heads\": 2, \"window_size\": 48, \"rope_theta\": 5000, \"qkv_bias\": true}}",
    };
    for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
        eng_config config = accept(spellings[i]);
        ck_assert_ptr_eq(config.layer[0].mixer, &eng_mixer_mesa);
        ck_assert_ptr_eq(config.layer[1].mixer, &eng_mixer_attention);
        ck_assert_ptr_eq(config.layer[2].mixer, &eng_mixer_mesa);
        const eng_attention_config *attention = &config.layer[1].attention;
        ck_assert_int_eq(attention->heads, 4);
        ck_assert_int_eq(attention->kv_heads, 2);
        ck_assert_int_eq(attention->head_width, 32);
        ck_assert_int_eq(attention->window, 48);
        ck_assert_double_eq(attention->rope_theta, 5000);
        ck_assert(attention->qkv_bias && !attention->output_bias && !attention->qk_norm);
        eng_config_free(&config);
    }
}
END_TEST

START_TEST(transformer_keys) {
    eng_config config = accept("{\"model_type\": \"transformer\", \"hidden_size\": 1024, \"qk_norm\": true}");
    ck_assert_int_eq(config.layers, 24);
    const eng_attention_config *attention = &config.layer[23].attention;
    ck_assert_int_eq(attention->heads, 32);
    ck_assert_int_eq(attention->kv_heads, 32);
    ck_assert_int_eq(attention->head_width, 32);
    ck_assert_int_eq(attention->window, 0);
    ck_assert_double_eq(attention->rope_theta, 10000);
    ck_assert(attention->qk_norm && !attention->qkv_bias);
    eng_config_free(&config);
}
END_TEST

START_TEST(llama_keys) {
    eng_config config = accept("{\"model_type\": \"llama\"}");
    ck_assert_int_eq(config.dialect, ENG_DIALECT_LLAMA);
    ck_assert_int_eq(config.hidden_size, 4096);
    ck_assert_int_eq(config.intermediate_size, 11008);
    ck_assert_int_eq(config.layers, 32);
    ck_assert_int_eq(config.layer[0].attention.heads, 32);
    ck_assert_int_eq(config.layer[0].attention.head_width, 128);
    eng_config_free(&config);
    config =
        accept("{\"model_type\": \"llama\", \"hidden_size\": 96, \"num_attention_heads\": 4, \"num_hidden_layers\": 1,"
               "\"num_key_value_heads\": 1, \"head_dim\": 64, \"attention_bias\": true, \"mlp_bias\": true,"
               "\"rms_norm_eps\": 1e-5, \"layer_types\": [\"full_attention\"]}");
    const eng_attention_config *attention = &config.layer[0].attention;
    ck_assert_int_eq(attention->head_width, 64);
    ck_assert_int_eq(attention->kv_heads, 1);
    ck_assert(attention->qkv_bias && attention->output_bias && config.mlp_bias);
    ck_assert_float_eq(config.norm_eps, 1e-5F);
    eng_config_free(&config);
}
END_TEST

START_TEST(llama_rope_in_both_spellings) {
    static const char *const spellings[] = {
        "{\"model_type\": \"llama\", \"rope_theta\": 500000.0, \"rope_scaling\": {\"rope_type\": \"llama3\", "
        "\"factor\": 8,"
        "\"low_freq_factor\": 1, \"high_freq_factor\": 4, \"original_max_position_embeddings\": 8192}}",
        "{\"model_type\": \"llama\", \"rope_parameters\": {\"rope_theta\": 500000.0, \"rope_type\": \"llama3\", "
        "\"factor\": 8,"
        "\"low_freq_factor\": 1, \"high_freq_factor\": 4, \"original_max_position_embeddings\": 8192}}",
    };
    for (size_t i = 0; i < sizeof spellings / sizeof spellings[0]; i++) {
        eng_config config = accept(spellings[i]);
        const eng_attention_config *attention = &config.layer[0].attention;
        ck_assert_int_eq(attention->rope_scaling, ENG_ROPE_LLAMA3);
        ck_assert_double_eq(attention->rope_theta, 500000);
        ck_assert_double_eq(attention->rope_factor, 8);
        ck_assert_double_eq(attention->rope_low, 1);
        ck_assert_double_eq(attention->rope_high, 4);
        ck_assert_double_eq(attention->rope_original_length, 8192);
        eng_config_free(&config);
    }
    eng_config config =
        accept("{\"model_type\": \"llama\", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}}");
    ck_assert_int_eq(config.layer[0].attention.rope_scaling, ENG_ROPE_LINEAR);
    ck_assert_double_eq(config.layer[0].attention.rope_factor, 2.5);
    ck_assert_double_eq(config.layer[0].attention.rope_theta, 10000);
    eng_config_free(&config);
}
END_TEST

START_TEST(bare_infinity) {
    // Words inside strings, also behind an escaped quote, stay as they are.
    const char *text =
        "{\"model_type\": \"mesa_net\", \"time_step_limit\": [0.0, Infinity], \"low\": -Infinity, \"n\":NaN,"
        "\"note\": \"a \\\" Infinity NaN\", \"object\": {\"__float__\": \"Infinity\"}, \"vocab_size\": 64.0}";
    eng_config config = accept(text);
    ck_assert_int_eq(config.vocab_size, 64);
    ck_assert_str_eq(config.json, text);
    eng_config_free(&config);
}
END_TEST

// ---- refused

#define MESA "{\"model_type\": \"mesa_net\", "
#define PLAIN "{\"model_type\": \"transformer\", \"hidden_size\": 64, "
#define HF_MAMBA2 "{\"model_type\": \"mamba2\", \"layer_norm_epsilon\": 1e-5, "
#define STATE_SPACES "{\"d_model\": 128, \"n_layer\": 2, \"vocab_size\": 250, "
#define LLAMA "{\"model_type\": \"llama\", "

static const struct refusal {
    const char *json;
    eng_status status;
    const char *words; // in the error's text
} refusals[] = {
    {"", ENG_FORMAT, "config.json: line"},
    {"[]", ENG_FORMAT, "not a JSON object"},
    {"{\"model_type\": \"mesa_net\"} x", ENG_FORMAT, "line 1"},
    {"{\"model_type\": \"mesa_net\", \"model_type\": \"llama\"}", ENG_FORMAT, "duplicate"},
    {"{\"model_type\": \"mesa_net\", \"a\": Infinityx}", ENG_FORMAT, "line 1"},
    {"{\"model_type\": \"mesa_net\", \"a\": \"Infinity", ENG_FORMAT, "line 1"},
    {"{}", ENG_FORMAT, "model_type: is missing"},
    {"{\"model_type\": 3}", ENG_FORMAT, "model_type: is 3, must be a string"},
    {"{\"model_type\": \"rwkv7\"}", ENG_UNSUPPORTED, "model_type: 'rwkv7'"},
    {"{\"model_type\": \"a_name_of_thirty_two_characters__\"}", ENG_UNSUPPORTED, "(mesa_net, "},
    {"{\"model_type\": \"a_name_of_thirty_two_characters__\"}", ENG_UNSUPPORTED, ", recurrent_gemma)"},
    {MESA "\"vocab_size\": -1}", ENG_FORMAT, "vocab_size: is -1, must be an integer from 1"},
    {MESA "\"vocab_size\": 1e300}", ENG_FORMAT, "vocab_size"},
    {MESA "\"vocab_size\": 9223372036854775807}", ENG_FORMAT, "vocab_size"},
    {MESA "\"vocab_size\": \"256\"}", ENG_FORMAT, "vocab_size: is \"256\""},
    {MESA "\"vocab_size\": 256.5}", ENG_FORMAT, "vocab_size"},
    {MESA "\"vocab_size\": Infinity}", ENG_FORMAT, "vocab_size: is Infinity"},
    {MESA "\"hidden_size\": 0}", ENG_FORMAT, "hidden_size"},
    {MESA "\"hidden_size\": true}", ENG_FORMAT, "hidden_size"},
    {MESA "\"num_hidden_layers\": 100000}", ENG_FORMAT, "num_hidden_layers"},
    {MESA "\"intermediate_size\": -5}", ENG_FORMAT, "intermediate_size"},
    {MESA "\"hidden_ratio\": 0}", ENG_FORMAT, "hidden_ratio"},
    {MESA "\"hidden_ratio\": NaN}", ENG_FORMAT, "hidden_ratio: is NaN"},
    {MESA "\"norm_eps\": 0}", ENG_FORMAT, "norm_eps"},
    {MESA "\"norm_eps\": {\"__float__\": \"Infinity\"}}", ENG_FORMAT, "must be a number from"},
    {MESA "\"tie_word_embeddings\": 1}", ENG_FORMAT, "tie_word_embeddings: is 1, must be true or false"},
    {MESA "\"num_heads\": 0}", ENG_FORMAT, "num_heads"},
    {MESA "\"head_dim\": 256}", ENG_UNSUPPORTED, "head_dim: is 256, Mesa layers take at most 128"},
    {MESA "\"conv_size\": 0}", ENG_FORMAT, "conv_size"},
    {MESA "\"lambda_lower_bound\": -1}", ENG_FORMAT, "lambda_lower_bound"},
    {MESA "\"gamma_cap_b\": 1.5}", ENG_FORMAT, "gamma_cap_b"},
    {MESA "\"gamma_cap_b\": 0.49}", ENG_FORMAT, "gamma_cap_b"},
    {MESA "\"gamma_cap_b\": 0}", ENG_FORMAT, "gamma_cap_b"},
    {MESA "\"hidden_act\": \"gelu\"}", ENG_UNSUPPORTED, "hidden_act: 'gelu'"},
    {MESA "\"attnres_block_size\": 4}", ENG_UNSUPPORTED, "attnres_block_size"},
    {MESA "\"num_experts\": 8}", ENG_UNSUPPORTED, "num_experts"},
    {LLAMA "\"num_local_experts\": 8}", ENG_UNSUPPORTED, "num_local_experts"},
    {MESA "\"quantization_config\": {\"bits\": 4}}", ENG_UNSUPPORTED, "quantization_config"},
    {MESA "\"num_loops\": 0}", ENG_FORMAT, "num_loops"},
    {MESA "\"num_loops\": 33}", ENG_FORMAT, "num_loops"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": 3}", ENG_FORMAT, "loop_blocks: must be a list"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": []}", ENG_FORMAT, "loop_blocks: must be a list"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": [23, 24]}", ENG_FORMAT, "loop_blocks: entry 1"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": [-1]}", ENG_FORMAT, "loop_blocks: entry 0"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": [1, 3]}", ENG_UNSUPPORTED, "loop_blocks: entry 1 is layer 3"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": [2, 1]}", ENG_UNSUPPORTED, "loop_blocks: entry 1 is layer 1"},
    {MESA "\"num_loops\": 2, \"loop_blocks\": [1, 2], \"exit_gate\": true}", ENG_UNSUPPORTED, "exit_gate: layers 3"},
    {MESA "\"num_loops\": 2, \"exit_gate\": 1}", ENG_FORMAT, "exit_gate"},
    {MESA "\"num_loops\": 2, \"mesa\": {\"max_loops\": 3}}", ENG_FORMAT, "mesa.max_loops"},
    {MESA "\"init\": \"orthogonal\"}", ENG_UNSUPPORTED, "init: 'orthogonal'"},
    {MESA "\"eos_token_id\": [1, 40000]}", ENG_FORMAT, "eos_token_id"},
    {MESA "\"eos_token_id\": 32000}", ENG_FORMAT, "eos_token_id"},
    {MESA "\"eos_token_id\": [0,1,2,3,4,5,6,7,8]}", ENG_UNSUPPORTED, "eos_token_id: more than 8"},
    {MESA "\"bos_token_id\": 32000}", ENG_FORMAT, "bos_token_id"},
    {MESA "\"mesa\": 3}", ENG_FORMAT, "mesa: must be an object"},
    {MESA "\"mesa\": {\"cg_tolerance\": 2}}", ENG_FORMAT, "mesa.cg_tolerance"},
    {MESA "\"mesa\": {\"cg_max_steps\": 257}}", ENG_FORMAT, "mesa.cg_max_steps"},
    {MESA "\"mesa\": {\"cg_mode\": \"fixed\"}}", ENG_FORMAT, "mesa.cg_mode"},
    {MESA "\"attn\": 3}", ENG_FORMAT, "attn: must be"},
    {MESA "\"attn\": {\"layers\": [1]}}", ENG_FORMAT, "attn.num_heads: is missing"},
    {MESA "\"attn\": {\"num_heads\": 4}}", ENG_FORMAT, "attn.layers"},
    {MESA "\"attn\": {\"layers\": [24], \"num_heads\": 4}}", ENG_FORMAT, "attn.layers: entry 0"},
    {MESA "\"attn\": {\"layers\": [1, 1], \"num_heads\": 4}}", ENG_FORMAT, "attn.layers: names layer 1 twice"},
    {MESA "\"attn\": [{\"layers\": [1], \"num_heads\": 4}, 3]}", ENG_FORMAT, "attn: must be"},
    {MESA "\"attn\": {\"layers\": [1], \"num_heads\": 3}}", ENG_FORMAT,
     "attn.num_heads: 3 does not divide hidden_size"},
    {MESA "\"attn\": {\"layers\": [1], \"num_heads\": 4, \"num_kv_heads\": 3}}", ENG_FORMAT, "attn.num_kv_heads"},
    {MESA "\"layer_types\": [\"mesa_net\"]}", ENG_FORMAT, "layer_types: must be a list of 24 names"},
    {MESA "\"num_hidden_layers\": 1, \"layer_types\": [\"mamba\"]}", ENG_UNSUPPORTED, "layer_types: entry 0 ('mamba')"},
    {PLAIN "\"num_heads\": 64}", ENG_UNSUPPORTED, "num_heads: a softmax head of width 1"},
    {PLAIN "\"num_heads\": 5}", ENG_FORMAT, "num_heads: 5 does not divide hidden_size 64"},
    {PLAIN "\"num_heads\": 4, \"num_kv_heads\": 3}", ENG_FORMAT, "num_kv_heads: 3 does not divide"},
    {PLAIN "\"num_heads\": 4, \"window_size\": -3}", ENG_FORMAT, "window_size"},
    {LLAMA "\"num_attention_heads\": 30}", ENG_FORMAT, "num_attention_heads"},
    {LLAMA "\"num_key_value_heads\": 5}", ENG_FORMAT, "num_key_value_heads"},
    {LLAMA "\"head_dim\": 33}", ENG_UNSUPPORTED, "head_dim"},
    {LLAMA "\"layer_types\": [\"sliding_attention\"]}", ENG_UNSUPPORTED, "layer_types"},
    {LLAMA "\"layer_types\": [\"full_attention\"]}", ENG_FORMAT, "layer_types: must be a list of 32 names"},
    {LLAMA "\"layer_types\": []}", ENG_FORMAT, "layer_types: must be a list of 32 names"},
    {LLAMA "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}}", ENG_UNSUPPORTED,
     "rope_scaling.rope_type: 'yarn'"},
    {LLAMA "\"rope_scaling\": {\"type\": \"linear\"}}", ENG_FORMAT, "rope_scaling.factor: is missing"},
    {LLAMA "\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 8}}", ENG_FORMAT, "rope_scaling.low_freq_factor"},
    {LLAMA "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}}", ENG_UNSUPPORTED, "partial_rotary_factor"},
    {LLAMA "\"partial_rotary_factor\": 0.5}", ENG_UNSUPPORTED, "partial_rotary_factor"},
    {LLAMA "\"rope_parameters\": {}, \"rope_scaling\": {}}", ENG_FORMAT, "stands beside rope_parameters"},
    {LLAMA "\"rope_theta\": \"big\"}", ENG_FORMAT, "rope_theta"},
    {"{\"model_type\": \"gla\", \"num_heads\": 3}", ENG_FORMAT, "expand_k: gives a width of 1024 for 3 heads"},
    {"{\"model_type\": \"gla\", \"num_kv_heads\": 3}", ENG_FORMAT, "num_kv_heads: 3 does not divide the 4"},
    {"{\"model_type\": \"gla\", \"feature_map\": \"gelu\"}", ENG_UNSUPPORTED, "feature_map: 'gelu'"},
    {"{\"model_type\": \"gla\", \"clamp_min\": 0}", ENG_UNSUPPORTED, "clamp_min"},
    {"{\"model_type\": \"retnet\", \"hidden_act\": \"gelu\"}", ENG_UNSUPPORTED, "hidden_act: 'gelu'"},
    {"{\"model_type\": \"linear_attn\", \"feature_map\": \"cosformer\"}", ENG_UNSUPPORTED, "'cosformer'"},
    {"{\"model_type\": \"delta_net\", \"qk_norm\": \"rms\"}", ENG_UNSUPPORTED, "qk_norm: 'rms'"},
    {"{\"model_type\": \"delta_net\", \"qk_activation\": \"gelu\"}", ENG_UNSUPPORTED, "qk_activation: 'gelu'"},
    {"{\"model_type\": \"gated_deltanet\", \"num_v_heads\": 8}", ENG_FORMAT, "num_heads: 6 does not divide the 8"},
    {"{\"model_type\": \"gated_deltanet\", \"head_dim\": 24, \"expand_v\": 1.3}", ENG_FORMAT,
     "expand_v: gives heads of width 31.2"},
    {"{\"model_type\": \"kda\", \"lower_bound\": 5}", ENG_FORMAT, "lower_bound: is 5"},
    {HF_MAMBA2 "\"num_heads\": 100}", ENG_FORMAT, "num_heads: 100 heads of width 64"},
    {HF_MAMBA2 "\"n_groups\": 3}", ENG_FORMAT, "n_groups: 3 does not divide the 128 heads"},
    {HF_MAMBA2 "\"time_step_limit\": [1]}", ENG_FORMAT, "time_step_limit"},
    {HF_MAMBA2 "\"time_step_limit\": [1, 0.5]}", ENG_FORMAT, "time_step_limit.1"},
    {"{\"model_type\": \"mamba2\"}", ENG_FORMAT, "layer_norm_epsilon: is missing"},
    {HF_MAMBA2 "\"norm_eps\": 1e-5}", ENG_FORMAT, "norm_eps: stands beside layer_norm_epsilon"},
    {"{\"model_type\": \"xlstm\", \"weight_mode\": \"sparse\"}", ENG_UNSUPPORTED, "weight_mode: 'sparse'"},
    {STATE_SPACES "\"ssm_cfg\": {}}", ENG_UNSUPPORTED, "ssm_cfg.layer: 'Mamba1'"},
    {STATE_SPACES "\"ssm_cfg\": 3}", ENG_FORMAT, "ssm_cfg: must be an object"},
    {STATE_SPACES "\"ssm_cfg\": {\"layer\": \"Mamba2\", \"d_ssm\": 64}}", ENG_UNSUPPORTED, "ssm_cfg.d_ssm"},
    {STATE_SPACES "\"ssm_cfg\": {\"layer\": \"Mamba2\", \"headdim\": 48}}", ENG_FORMAT, "ssm_cfg.headdim: 48 does not"},
    {STATE_SPACES "\"ssm_cfg\": {\"layer\": \"Mamba2\"}, \"attn_layer_idx\": [1]}", ENG_UNSUPPORTED, "attn_layer_idx"},
    {STATE_SPACES "\"ssm_cfg\": {\"layer\": \"Mamba2\"}, \"d_intermediate\": 64}", ENG_UNSUPPORTED, "d_intermediate"},
    {STATE_SPACES "\"ssm_cfg\": {\"layer\": \"Mamba2\"}, \"rms_norm\": false}", ENG_UNSUPPORTED, "rms_norm"},
    {"{\"model_type\": \"xlstm\", \"use_bias\": 1}", ENG_FORMAT, "use_bias: is 1"},
    {"{\"model_type\": \"xlstm\", \"add_out_norm\": false}", ENG_UNSUPPORTED, "add_out_norm"},
    {"{\"model_type\": \"recurrent_gemma\", \"block_types\": [\"mlp\"]}", ENG_UNSUPPORTED, "block_types: 'mlp'"},
    {"{\"model_type\": \"recurrent_gemma\", \"intermediate_size\": 7}", ENG_FORMAT, "intermediate_size"},
    {"{\"model_type\": \"recurrence\", \"recurrence\": {\"decay\": \"slow\"}}", ENG_UNSUPPORTED,
     "recurrence.decay: 'slow'"},
};

START_TEST(refused) {
    const struct refusal *wanted = &refusals[_i];
    eng_config config = {.vocab_size = -77};
    eng_error error = {0};
    eng_status status = parse(wanted->json, &config, &error);
    ck_assert_msg(status == wanted->status, "%s: status %d, wanted %d (%s)", wanted->json, status, wanted->status,
                  error.text);
    ck_assert_int_eq(error.code, status);
    ck_assert_msg(strstr(error.text, wanted->words), "%s: '%s' does not hold '%s'", wanted->json, error.text,
                  wanted->words);
    ck_assert_msg(strstr(error.text, "folder/config.json") != NULL, "%s names no file", error.text);
    ck_assert_int_eq(config.vocab_size, -77);
    ck_assert_int_eq(parse(wanted->json, &config, NULL), wanted->status);
}
END_TEST

// ---- the tensor table

#define SMALL \
    "\"vocab_size\": 32, \"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_heads\": 2,"

START_TEST(table_of_mesa_net) {
    eng_model *model = model_of(MESA SMALL "\"head_dim\": 4, \"use_output_gate\": true, \"trained_length\": 64}");
    int64_t mixer = 4 * 8 * 16 + 2 * (2 * 16 + 2) + 8 + 2 * 8 * 4 + 4 + 16 * 8; // q k v g, a b, lambda, convs, norm, o
    int64_t layer = mixer + 2 * 16 + 3 * 24 * 16;
    ck_assert_int_eq(model->parameters, 2 * 32 * 16 + 2 * layer + 16);
    ck_assert_int_eq(eng_model_find(model, "model.embeddings.weight"), model->embed);
    ck_assert_int_eq(eng_model_find(model, "lm_head.weight"), model->head);
    ck_assert_int_eq(eng_model_find(model, "model.norm.weight"), model->final_norm);
    ck_assert_int_eq(eng_model_find(model, "model.layers.1.attn_norm.weight"), model->layer[1].mixer_norm);
    ck_assert_int_eq(eng_model_find(model, "model.layers.1.mlp_norm.weight"), model->layer[1].mlp_norm);
    ck_assert_int_eq(eng_model_find(model, "model.layers.1.mlp.down_proj.weight"), model->layer[1].down_proj);
    ck_assert_int_ge(eng_model_find(model, "model.layers.0.attn.g_proj.weight"), 0);
    ck_assert_int_eq(eng_model_find(model, "model.layers.2.attn.q_proj.weight"), -1);
    const eng_tensor *conv = &model->tensor[eng_model_find(model, "model.layers.0.attn.k_conv1d.weight")];
    ck_assert(conv->ndim == 3 && conv->shape[0] == 8 && conv->shape[1] == 1 && conv->shape[2] == 4 && !conv->decay);
    const eng_tensor *down = &model->tensor[model->layer[0].down_proj];
    ck_assert(down->decay && down->role == ENG_ROLE_MATRIX && down->shape[0] == 16 && down->shape[1] == 24);
    ck_assert_float_eq_tol(down->init.value, 0.02F / 2, 1e-8F); // 1 / sqrt(2 * 2 layers)
    ck_assert(!model->tensor[model->embed].decay && model->tensor[model->head].decay);
    ck_assert(model->tensor[model->final_norm].role == ENG_ROLE_VECTOR);
    ck_assert(model->layer[0].gate_bias == -1 && model->layer[0].page_bytes == 0);
    ck_assert(model->layer[1].state_offset % 64 == 0 && model->layer[1].state_offset >= model->layer[0].state_bytes);
    ck_assert_uint_ge(model->layer[0].state_bytes, 4 * (2 * 2 * 4 * 4 + 2 * 3 * 8));
    ck_assert_uint_eq(model->final_offset, model->layer[1].state_offset + model->layer[1].state_bytes);
    ck_assert_uint_eq(model->state_bytes, model->final_offset + 64); // what the next id is drawn from
    ck_assert(eng_model_has_mesa(model) && !eng_model_has_pages(model));
    eng_model_free(model);
}
END_TEST

// Parameters and state of the other families, counted by hand. Every state part begins at a multiple of 64 bytes.
START_TEST(table_of_recurrent_families) {
    static const struct {
        const char *json;
        int64_t mixer; // parameters of a layer's mixer
        size_t state;  // bytes of a layer
        const char *tensor;
        int ndim;
        int64_t shape[3];
    } wanted[] = {
        {"{\"model_type\": \"linear_attn\", \"feature_map\": \"hedgehog\"," SMALL "\"hidden_act\": \"swish\"}",
         4 * 16 * 16 + 8 + 2 * (8 * 8 + 8),
         4 * 2 * 16 * 8,
         "model.layers.1.attn.feature_map_k.layer.bias",
         1,
         {8}},
        {"{\"model_type\": \"retnet\"," SMALL "\"fuse_norm\": false}",
         2 * 16 * 16 + 3 * 16 * 32 + 16,
         4 * 2 * 8 * 16,
         "model.layers.0.attn.g_norm.weight",
         1,
         {16}},
        {"{\"model_type\": \"gla\"," SMALL "\"num_kv_heads\": 1}",
         8 * 16 + 4 * 16 + 8 * 16 + 16 * 16 + 4 * 16 + 4 + 16 * 16 + 8 + 16 * 16,
         4 * 4 * 8,
         "model.layers.0.attn.g_norm_swish_gate.weight",
         1,
         {8}},
        {"{\"model_type\": \"delta_net\"," SMALL "\"qk_norm\": \"sum\"}",
         4 * 16 * 16 + 3 * 16 * 4 + 2 * 16 + 8,
         4 * 2 * 8 * 8 + 3 * 4 * 3 * 16,
         "model.layers.0.attn.v_conv1d.weight",
         3,
         {16, 1, 4}},
        {"{\"model_type\": \"gated_deltanet\"," SMALL "\"head_dim\": 8, \"num_v_heads\": 4}",
         2 * 16 * 16 + 3 * 64 * 16 + 2 * 4 * 16 + 2 * 4 + (2 * 16 + 64) * 4 + 16,
         4 * 4 * 8 * 16 + 4 * 3 * (2 * 16 + 64),
         "model.layers.0.attn.A_log",
         1,
         {4}},
        {"{\"model_type\": \"kda\"," SMALL "\"head_dim\": 8}",
         4 * 16 * 16 + 2 * 16 + 2 * (8 * 16 + 16 * 8) + 2 + 16 + 16 + 3 * 16 * 4 + 8,
         4 * 2 * 8 * 8 + 4 * 3 * 3 * 16,
         "model.layers.0.attn.g_proj.1.bias",
         1,
         {16}},
        {"{\"model_type\": \"recurrence\"," SMALL "\"head_dim\": 8, \"recurrence\": {\"decay\": \"channel\"}}",
         4 * 16 * 16 + 16 * 16 + 16 + 3 * 16 * 4 + 8,
         4 * 2 * 8 * 8 + 4 * 3 * 3 * 16,
         "model.layers.0.attn.a_proj.bias",
         1,
         {16}},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        eng_model *model = model_of(wanted[i].json);
        int64_t layer = wanted[i].mixer + 2 * 16 + 3 * 24 * 16;
        ck_assert_msg(model->parameters == (uint64_t)(2 * 32 * 16 + 2 * layer + 16), "%s: %llu parameters, wanted %lld",
                      wanted[i].json, (unsigned long long)model->parameters, (long long)(2 * 32 * 16 + 2 * layer + 16));
        ck_assert_msg(model->layer[0].state_bytes == wanted[i].state, "%s: %zu bytes of state", wanted[i].json,
                      model->layer[0].state_bytes);
        int32_t index = eng_model_find(model, wanted[i].tensor);
        ck_assert_msg(index >= 0, "%s: no %s", wanted[i].json, wanted[i].tensor);
        ck_assert_int_eq(model->tensor[index].ndim, wanted[i].ndim);
        for (int d = 0; d < wanted[i].ndim; d++)
            ck_assert_int_eq(model->tensor[index].shape[d], wanted[i].shape[d]);
        ck_assert(!model->tensor[index].decay);
        ck_assert_double_gt(eng_model_flops(model, 0, 0), 0);
        eng_model_free(model);
    }
}
END_TEST

START_TEST(table_of_other_backbones) {
    eng_model *mamba =
        model_of("{\"model_type\": \"mamba2\", \"layer_norm_epsilon\": 1e-5, \"vocab_size\": 32, \"hidden_size\": 16,"
                 "\"num_hidden_layers\": 2, \"num_heads\": 4, \"head_dim\": 8, \"state_size\": 4,"
                 "\"n_groups\": 2, \"time_step_limit\": [0.0, Infinity]}");
    int64_t in = 2 * 32 + 2 * 8 + 4;
    ck_assert_int_eq(mamba->parameters,
                     2 * 32 * 16 + 16 + 2 * (16 + in * 16 + 48 * 4 + 48 + 3 * 4 + 32 + 16 * 32)); // no MLP
    ck_assert_int_eq(mamba->config.intermediate_size, 0);
    ck_assert_int_ge(eng_model_find(mamba, "backbone.layers.1.mixer.in_proj.weight"), 0);
    ck_assert_str_eq(mamba->tensor[mamba->embed].alias, "backbone.embedding.weight");
    ck_assert_float_eq(mamba->config.norm_eps, 1e-5F);
    ck_assert_uint_eq(mamba->layer[0].state_bytes, 4 * 4 * 8 * 4 + 4 * 3 * 32 + 2 * 128); // 96 bytes lie in 128
    eng_model_free(mamba);

    eng_model *xlstm = model_of("{\"model_type\": \"xlstm\", \"vocab_size\": 32, \"embedding_dim\": 64,"
                                "\"num_blocks\": 2, \"num_heads\": 2}");
    ck_assert_int_eq(xlstm->config.layers, 2);
    ck_assert_int_eq(xlstm->config.hidden_size, 64);
    ck_assert_int_eq(xlstm->config.intermediate_size, 192); // 64 * 2.667 = 170.7, up to a multiple of 64
    ck_assert_float_eq(xlstm->config.logits_soft_cap, 30);
    int32_t q = eng_model_find(xlstm, "backbone.blocks.0.mlstm_layer.q.weight");
    ck_assert_int_ge(q, 0);
    ck_assert_str_eq(xlstm->tensor[q].alias, "backbone.blocks.0.mlstm_layer.query.weight");
    ck_assert_uint_eq(xlstm->layer[0].state_bytes, 4 * 2 * 16 * 33 + 64); // C and n, then m
    eng_model_free(xlstm);

    eng_model *gemma = model_of("{\"model_type\": \"recurrent_gemma\", \"vocab_size\": 32, \"hidden_size\": 16,"
                                "\"num_hidden_layers\": 4, \"num_attention_heads\": 2, \"intermediate_size\": 48}");
    ck_assert_int_eq(gemma->config.intermediate_size, 24);
    ck_assert_ptr_eq(gemma->config.layer[1].mixer, &eng_mixer_rglru);
    ck_assert_ptr_eq(gemma->config.layer[2].mixer, &eng_mixer_attention);
    ck_assert_ptr_eq(gemma->config.layer[3].mixer, &eng_mixer_rglru);
    ck_assert_int_eq(gemma->config.layer[2].attention.rotary, 4);
    ck_assert_int_eq(gemma->config.layer[2].attention.window, 2048);
    ck_assert(gemma->config.tied && gemma->config.round_scale && gemma->head == gemma->embed);
    ck_assert_float_eq(gemma->config.norm_offset, 1);
    ck_assert_float_eq(gemma->tensor[gemma->final_norm].init.value, 0); // multiplies by 1 + 0
    ck_assert_uint_eq(gemma->layer[0].state_bytes, 64 + 4 * 3 * 16);
    ck_assert_int_eq(gemma->layer[2].page_bytes, 0);
    eng_model_free(gemma);
}
END_TEST

START_TEST(table_of_llama) {
    eng_model *model =
        model_of(LLAMA SMALL "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"mlp_bias\": true,"
                             "\"attention_bias\": true, \"tie_word_embeddings\": true}");
    int64_t layer = 2 * 16 * 16 + 2 * 8 * 16 + 16 + 8 + 8 + 16 + 2 * 16 + 3 * 24 * 16 + 24 + 24 + 16;
    ck_assert_int_eq(model->parameters, 32 * 16 + 2 * layer + 16); // the tied head is counted once
    ck_assert_int_eq(model->head, model->embed);
    ck_assert_int_eq(eng_model_find(model, "model.embed_tokens.weight"), model->embed);
    ck_assert_int_eq(eng_model_find(model, "lm_head.weight"), -1);
    ck_assert_int_eq(eng_model_find(model, "model.layers.0.input_layernorm.weight"), model->layer[0].mixer_norm);
    ck_assert_int_eq(eng_model_find(model, "model.layers.0.post_attention_layernorm.weight"), model->layer[0].mlp_norm);
    ck_assert_int_eq(eng_model_find(model, "model.layers.0.mlp.gate_proj.bias"), model->layer[0].gate_bias);
    ck_assert_int_ge(eng_model_find(model, "model.layers.1.self_attn.o_proj.bias"), 0);
    ck_assert_uint_eq(model->page_bytes, 2 * 2 * 2 * 64 * 4 * 4); // layers, k and v, kv heads, tokens, width, float
    ck_assert(eng_model_has_pages(model) && !eng_model_has_mesa(model));
    eng_model_free(model);
}
END_TEST

START_TEST(start_values) {
    eng_model *model = model_of(MESA SMALL "\"head_dim\": 4, \"init\": \"fla\", \"scale_embeddings\": true}");
    ck_assert_float_eq(model->tensor[model->layer[0].down_proj].init.value, 0.02F);
    ck_assert_float_eq(model->tensor[model->embed].init.value, 0.25F); // hidden^-1/2
    ck_assert_float_eq(model->tensor[model->head].init.value, 0.02F);
    ck_assert_int_eq(model->tensor[model->final_norm].init.kind, ENG_INIT_CONSTANT);
    ck_assert_float_eq(model->tensor[model->final_norm].init.value, 1);
    eng_model_free(model);
}
END_TEST

START_TEST(states_in_half_the_bytes) {
    static const struct {
        const char *json;
        size_t full, half; // of a layer's matrices
    } models[] = {
        {"{\"model_type\": \"mesa_net\", \"num_heads\": 2, \"head_dim\": 30, \"hidden_size\": 60}", 2 * 2 * 30 * 30 * 4,
         2 * (468 * 4 + 30 * 30 * 2)}, // 465 of a triangle, padded
        {"{\"model_type\": \"gated_deltanet\", \"num_heads\": 3, \"head_dim\": 32, \"hidden_size\": 96, "
         "\"expand_v\": 2}",
         3 * 32 * 64 * 4, 3 * 32 * 64 * 2},
        {"{\"model_type\": \"llama\"}", 0, 0},
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        eng_model *model = model_of(models[i].json);
        const eng_layer *layer = &model->layer[1];
        const size_t whole = model->state_bytes, offset = layer->state_offset, bytes = layer->state_bytes;
        const size_t full = (models[i].full + 63) / 64 * 64, half = (models[i].half + 63) / 64 * 64;
        ck_assert(layer->state_parts == 0 || layer->state_part[1] == full);
        eng_model_store_states(model, KERN_STORE_BF16);
        ck_assert(layer->state_parts == 0 || layer->state_part[1] == half);
        ck_assert_uint_eq(layer->state_bytes, bytes - full + half);
        ck_assert_uint_eq(layer->state_offset, layer->state_parts == 0 ? 0 : layer->state_bytes);
        ck_assert_uint_eq(model->state_bytes, whole - (size_t)model->config.layers * (full - half));
        eng_model_store_states(model, KERN_STORE_F32);
        ck_assert_uint_eq(model->state_bytes, whole);
        ck_assert_uint_eq(layer->state_offset, offset);
        eng_model_free(model);
    }
}
END_TEST

START_TEST(flops_grow_with_what_is_used) {
    eng_model *mesa = model_of(MESA SMALL "\"head_dim\": 4}");
    double products = 0;
    for (int32_t i = 0; i < mesa->tensors; i++) {
        if (mesa->tensor[i].role == ENG_ROLE_MATRIX && i != mesa->embed)
            products += 2.0 * (double)mesa->tensor[i].count;
    }
    ck_assert_double_gt(eng_model_flops(mesa, 0, 0), products);
    ck_assert_double_gt(eng_model_flops(mesa, 0, 20), eng_model_flops(mesa, 0, 10));
    ck_assert_double_eq(eng_model_flops(mesa, 0, 10), eng_model_flops(mesa, 5000, 10));
    eng_model_free(mesa);
    eng_model *plain = model_of(PLAIN "\"num_heads\": 4}");
    ck_assert_double_gt(eng_model_flops(plain, 5000, 10), eng_model_flops(plain, 0, 10));
    eng_model_free(plain);
}
END_TEST

static Suite *config_suite(void) {
    Suite *suite = suite_create("config");
    TCase *accepted = tcase_create("accepted");
    tcase_add_test(accepted, defaults_of_mesa_net);
    tcase_add_test(accepted, own_keys);
    tcase_add_test(accepted, a_null_ratio_is_four);
    tcase_add_test(accepted, tolerance_zero_is_exact);
    tcase_add_test(accepted, hybrid_by_attn_object_and_list);
    tcase_add_test(accepted, transformer_keys);
    tcase_add_test(accepted, llama_keys);
    tcase_add_test(accepted, llama_rope_in_both_spellings);
    tcase_add_test(accepted, bare_infinity);
    suite_add_tcase(suite, accepted);
    TCase *refusal = tcase_create("refused");
    tcase_add_loop_test(refusal, refused, 0, (int)(sizeof refusals / sizeof refusals[0]));
    suite_add_tcase(suite, refusal);
    TCase *table = tcase_create("table");
    tcase_add_test(table, table_of_mesa_net);
    tcase_add_test(table, table_of_llama);
    tcase_add_test(table, table_of_recurrent_families);
    tcase_add_test(table, table_of_other_backbones);
    tcase_add_test(table, start_values);
    tcase_add_test(table, states_in_half_the_bytes);
    tcase_add_test(table, flops_grow_with_what_is_used);
    suite_add_tcase(suite, table);
    return suite;
}

MESA_TEST_MAIN(config_suite)

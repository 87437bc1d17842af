// SPDX-License-Identifier: Apache-2.0
// xLSTM 7B's family, model_type xlstm (models.md 12): its blocks, beside what the mlstm mixer reads itself.
//
// weight_mode says how a file holds the linear maps, not what they compute: fused ones are parts of larger tensors, and
// a model that is saved again has them one by one.
#include "engine/config_internal.h"

#include "engine/mixer.h"

static int64_t feed_forward_width(eng_keys *keys, int32_t hidden) {
    double factor = eng_keys_number(keys, "ffn_proj_factor", 2.667, 1e-3, 64);
    int64_t grain = eng_keys_integer(keys, "ffn_round_up_to_multiple_of", 64, 1, 1 << 16);
    return (int64_t)((hidden * factor + (double)(grain - 1)) / (double)grain) * grain;
}

void eng_config_xlstm_backbone(eng_keys *keys, eng_config *config) {
    static const eng_choice modes[] = {{"single", false}, {"fused", true}};
    if (!eng_keys_value(keys, "hidden_size"))
        config->hidden_size =
            (int32_t)eng_keys_integer(keys, "embedding_dim", config->hidden_size, 1, ENG_CONFIG_MAX_HIDDEN);
    if (!eng_keys_value(keys, "num_hidden_layers"))
        config->layers = (int32_t)eng_keys_integer(keys, "num_blocks", config->layers, 1, ENG_CONFIG_MAX_LAYERS);
    config->intermediate_size = (int32_t)feed_forward_width(keys, config->hidden_size);
    config->logits_soft_cap = (float)eng_keys_number(keys, "output_logit_soft_cap", 30, 0, 1e6);
    config->fused_weights = eng_config_choice(keys, "weight_mode", modes, sizeof modes / sizeof *modes);
    config->mlp_bias = config->norm_bias = eng_keys_flag(keys, "use_bias", false);
    if (!eng_keys_flag(keys, "add_out_norm", true))
        eng_keys_fail(keys, ENG_UNSUPPORTED, "add_out_norm", "models without output norm are not supported");
}

void eng_config_xlstm_layers(eng_keys *keys, eng_config *config) {
    eng_layer_config layer = {.mixer = &eng_mixer_mlstm};
    layer.mixer->read(keys, config, &layer);
    eng_config_set_layers(config, &layer);
}

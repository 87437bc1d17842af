// SPDX-License-Identifier: Apache-2.0
// What the readers of config files share. For config*.c and checkpoint*.c only.
//
// The layer readers fill config->layer[0 .. layers), which is allocated and zeroed; hidden_size and layers are set and
// checked. Faults go to keys (config_json.h).
#ifndef ENGINE_CONFIG_INTERNAL_H
#define ENGINE_CONFIG_INTERNAL_H

#include "engine/config_json.h"
#include "engine/model.h"

// Bounds that keep every product of sizes below 2^63 and every width in an int32_t.
enum {
    ENG_CONFIG_MAX_LAYERS = 1024,
    ENG_CONFIG_MAX_HIDDEN = 1 << 17,
    ENG_CONFIG_MAX_HEADS = 4096,
    ENG_CONFIG_MAX_HEAD_WIDTH = 1024,
    ENG_CONFIG_MAX_WINDOW = 1 << 20,
    ENG_CONFIG_MAX_TAPS = 16,
};

// Families: the layers of a model_type, and what differs from the common keys before they are read.
void eng_config_fla_layers(eng_keys *keys, eng_config *config);   // the mixer of that model_type and its hybrids
void eng_config_llama_layers(eng_keys *keys, eng_config *config); // model_type llama
void eng_config_mamba2_layers(eng_keys *keys, eng_config *config);
void eng_config_xlstm_layers(eng_keys *keys, eng_config *config);
void eng_config_gemma_layers(eng_keys *keys, eng_config *config); // model_type recurrent_gemma
void eng_config_mamba2_backbone(eng_keys *keys, eng_config *config);
void eng_config_xlstm_backbone(eng_keys *keys, eng_config *config);
void eng_config_gemma_backbone(eng_keys *keys, eng_config *config);
void eng_config_loop(eng_keys *keys, eng_config *config); // config->loop; layers are set
bool eng_config_is_state_spaces(const eng_keys *keys);    // mamba_ssm's config.json, which has no model_type

// An object inside another, its faults named with scope; nothing around it is looked at.
eng_keys eng_keys_of(const eng_keys *parent, const json_t *object, const char *scope);

// quantization_config for matrices in blocks of so many bits, as it is read; new, NULL without memory.
json_t *eng_config_quantization(int bits);

// ---- what the mixers read their keys with

typedef struct eng_choice {
    const char *name;
    int32_t value;
} eng_choice;

// The value of the name that the key holds; the first choice is the default. Other names are refused with the list.
int32_t eng_config_choice(eng_keys *keys, const char *key, const eng_choice *choice, size_t choices);
int32_t eng_config_heads(eng_keys *keys, const char *key, int32_t fallback);
void eng_config_divides(eng_keys *keys, const char *key, int64_t part, int64_t whole, const char *what);
// The width of a head: int(base * key) / heads.
int32_t eng_config_expanded(eng_keys *keys, const char *key, double fallback, int32_t base, int32_t heads);
int32_t eng_config_taps(eng_keys *keys, const char *key);
int32_t eng_config_short_conv(eng_keys *keys, bool fallback); // taps, 0 without use_short_conv
void eng_config_equal_heads(eng_recurrent_config *own, int32_t heads);
// The keys that gla, retnet and linear_attn share; the number of states is theirs.
void eng_config_grouped(eng_keys *keys, const eng_config *config, double expand_k, double expand_v, int32_t heads,
                        eng_recurrent_config *own);
int32_t eng_config_plain_map(eng_keys *keys); // feature_map of gla and retnet
// Convolutions with silu, L2, a delta update with a write gate: delta_net, gated_deltanet, kda.
void eng_config_delta(eng_keys *keys, eng_recurrent_config *own);
// The keys that gated_deltanet and kda share: value heads over query and key heads, then those of a delta update.
void eng_config_value_groups(eng_keys *keys, int32_t heads, int32_t head_width, double expand_v,
                             eng_recurrent_config *own);
// Keys of a mamba2 layer in the spelling of flash-linear-attention.
void eng_config_mamba2(eng_keys *keys, const eng_config *config, eng_layer_config *layer);
// The keys of model_type transformer, which those of an `attn` object are a part of. default_heads 0: required.
eng_attention_config eng_config_attention(eng_keys *keys, int32_t hidden, int32_t default_heads);

void eng_config_set_layers(eng_config *config, const eng_layer_config *layer); // all alike

// Sets the end-of-text ids from eos_token_id (a number, a list or null), which must be there. The ids of
// generation_config.json replace those of config.json, as in the public loaders.
void eng_config_set_eos(eng_keys *keys, eng_config *config);

#endif

// SPDX-License-Identifier: Apache-2.0
// What the readers of config files share. For config*.c and checkpoint.c only.
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
};

void eng_config_fla_layers(eng_keys *keys, eng_config *config);         // the mixer of that model_type, and its hybrids
void eng_config_transformer_layers(eng_keys *keys, eng_config *config); // model_type transformer and its hybrids
void eng_config_llama_layers(eng_keys *keys, eng_config *config);       // model_type llama
void eng_config_mamba2_layers(eng_keys *keys, eng_config *config);
void eng_config_xlstm_layers(eng_keys *keys, eng_config *config);
void eng_config_gemma_layers(eng_keys *keys, eng_config *config); // model_type recurrent_gemma

// What differs from the common keys before the layers are read.
void eng_config_mamba2_backbone(eng_keys *keys, eng_config *config);
void eng_config_xlstm_backbone(eng_keys *keys, eng_config *config);
void eng_config_gemma_backbone(eng_keys *keys, eng_config *config);

// Reads the top-level keys of one of flash-linear-attention's recurrent mixers, or of `recurrence`; false: not one of
// these names.
bool eng_config_recurrent_layer(eng_keys *keys, const eng_config *config, const char *name, eng_layer_config *layer);
void eng_config_set_layers(eng_config *config, const eng_layer_config *layer); // all alike

// Sets the end-of-text ids from eos_token_id (a number, a list or null), which must be there. The ids of
// generation_config.json replace those of config.json, as in the public loaders.
void eng_config_set_eos(eng_keys *keys, eng_config *config);

#endif

// SPDX-License-Identifier: Apache-2.0
// The models that are measured without having been trained; see bench.h.
//
// Their names stand for figures that were published, so an entry never changes.
#include <string.h>

#include "trainer/bench.h"

static const struct {
    const char *name, *config;
} random_models[] = {
    {"30m", "{\"model_type\": \"mesa_net\", \"vocab_size\": 32000, \"hidden_size\": 384, \"num_hidden_layers\": 8, "
            "\"num_heads\": 6, \"head_dim\": 64, \"intermediate_size\": 1024, \"tie_word_embeddings\": true}"},
    {"tiny", "{\"model_type\": \"mesa_net\", \"vocab_size\": 512, \"hidden_size\": 64, \"num_hidden_layers\": 2, "
             "\"num_heads\": 2, \"head_dim\": 32, \"intermediate_size\": 128, \"tie_word_embeddings\": true}"},
    {"mesa-a", "{\"model_type\": \"mesa_net\", \"vocab_size\": 32000, \"hidden_size\": 768, \"num_hidden_layers\": 14, "
               "\"num_heads\": 6, \"head_dim\": 128, \"intermediate_size\": 2048, \"tie_word_embeddings\": false}"},
    {"gdn-a", "{\"model_type\": \"gated_deltanet\", \"vocab_size\": 32000, \"hidden_size\": 768, "
              "\"num_hidden_layers\": 14, \"num_heads\": 6, \"head_dim\": 128, \"expand_v\": 1, "
              "\"intermediate_size\": 2048, \"tie_word_embeddings\": false}"},
    {"s135", "{\"model_type\": \"llama\", \"vocab_size\": 49152, \"hidden_size\": 576, \"num_hidden_layers\": 30, "
             "\"num_attention_heads\": 9, \"num_key_value_heads\": 3, \"intermediate_size\": 1536, "
             "\"max_position_embeddings\": 8192, \"rms_norm_eps\": 1e-5, \"rope_theta\": 100000, "
             "\"tie_word_embeddings\": true}"},
};

eng_status trn_random_model_create(const char *name, eng_model **out, eng_error *error) {
    for (size_t i = 0; i < sizeof random_models / sizeof *random_models; i++) {
        const char *json = random_models[i].config;
        eng_config config;
        if (strcmp(random_models[i].name, name) != 0)
            continue;
        eng_status status = eng_config_parse(json, strlen(json), name, &config, error);
        return status == ENG_OK ? eng_model_create(&config, out, error) : status;
    }
    return eng_fail(error, ENG_INVALID, "--random: \"%.20s\" is not 30m, s135, mesa-a, gdn-a or tiny", name);
}

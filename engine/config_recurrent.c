// SPDX-License-Identifier: Apache-2.0
// What the recurrent mixers read their keys of config.json with.
//
// A mixer's own read function takes the keys of one public configuration class, with its defaults (models.md 3-8); what
// several classes share is here. What a key asks for and this version does not compute is refused by the key's name.
#include "engine/config_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

int32_t eng_config_choice(eng_keys *keys, const char *key, const eng_choice *choice, size_t choices) {
    const char *name = eng_keys_text(keys, key, choice[0].name);
    char known[96] = "";
    for (size_t i = 0; i < choices; i++) {
        if (strcmp(choice[i].name, name) == 0)
            return choice[i].value;
        size_t length = strlen(known);
        snprintf(known + length, sizeof known - length, "%s%s", i ? ", " : "", choice[i].name);
    }
    eng_keys_fail(keys, ENG_UNSUPPORTED, key, "'%.32s' is not supported (%s)", name, known);
    return choice[0].value;
}

int32_t eng_config_heads(eng_keys *keys, const char *key, int32_t fallback) {
    return (int32_t)eng_keys_integer(keys, key, fallback, 1, ENG_CONFIG_MAX_HEADS);
}

void eng_config_divides(eng_keys *keys, const char *key, int64_t part, int64_t whole, const char *what) {
    if (keys->status == ENG_OK && whole % part != 0)
        eng_keys_fail(keys, ENG_FORMAT, key, "%lld does not divide the %lld %s", (long long)part, (long long)whole,
                      what);
}

int32_t eng_config_expanded(eng_keys *keys, const char *key, double fallback, int32_t base, int32_t heads) {
    double factor = eng_keys_number(keys, key, fallback, 1e-6, 64);
    int64_t width = (int64_t)(base * factor);
    if (keys->status == ENG_OK && (width % heads != 0 || width < heads))
        eng_keys_fail(keys, ENG_FORMAT, key, "gives a width of %lld for %d heads", (long long)width, heads);
    int64_t head = width / heads;
    if (keys->status == ENG_OK && head > ENG_CONFIG_MAX_HEAD_WIDTH)
        eng_keys_fail(keys, ENG_UNSUPPORTED, key, "heads of width %lld, at most %d", (long long)head,
                      ENG_CONFIG_MAX_HEAD_WIDTH);
    return (int32_t)head;
}

void eng_config_equal_heads(eng_recurrent_config *own, int32_t heads) {
    own->heads = own->query_heads = own->key_heads = own->value_heads = heads;
}

int32_t eng_config_taps(eng_keys *keys, const char *key) {
    return (int32_t)eng_keys_integer(keys, key, 4, 1, ENG_CONFIG_MAX_TAPS);
}

int32_t eng_config_short_conv(eng_keys *keys, bool fallback) {
    int32_t taps = eng_config_taps(keys, "conv_size");
    return eng_keys_flag(keys, "use_short_conv", fallback) ? taps : 0;
}

void eng_config_grouped(eng_keys *keys, const eng_config *config, double expand_k, double expand_v, int32_t heads,
                        eng_recurrent_config *own) {
    own->query_heads = eng_config_heads(keys, "num_heads", heads);
    own->key_heads = own->value_heads = eng_config_heads(keys, "num_kv_heads", own->query_heads);
    eng_config_divides(keys, "num_kv_heads", own->key_heads, own->query_heads, "query heads");
    own->key_width = eng_config_expanded(keys, "expand_k", expand_k, config->hidden_size, own->query_heads);
    own->value_width = eng_config_expanded(keys, "expand_v", expand_v, config->hidden_size, own->query_heads);
    own->update = KERN_UPDATE_ADD;
    own->write_factor = 1;
    own->output_gate = eng_keys_flag(keys, "use_output_gate", true);
    own->unweighted_norm = !eng_keys_flag(keys, "elementwise_affine", true);
    own->plain_norm_name = !own->output_gate || !eng_keys_flag(keys, "fuse_norm", true);
}

int32_t eng_config_plain_map(eng_keys *keys) {
    static const eng_choice maps[] = {{"identity", KERN_IDENTITY},
                                      {"relu", KERN_RELU},
                                      {"silu", KERN_SILU},
                                      {"swish", KERN_SILU},
                                      {"sigmoid", KERN_SIGMOID}};
    return eng_config_choice(keys, "feature_map", maps, sizeof maps / sizeof *maps);
}

void eng_config_delta(eng_keys *keys, eng_recurrent_config *own) {
    own->update = KERN_UPDATE_DELTA;
    own->weighted = true;
    own->write_factor = eng_keys_flag(keys, "allow_neg_eigval", false) ? 2 : 1;
    own->taps = eng_config_short_conv(keys, true);
    own->key_activation = own->value_activation = KERN_SILU;
    own->qk_norm = true;
}

void eng_config_value_groups(eng_keys *keys, int32_t heads, int32_t head_width, double expand_v,
                             eng_recurrent_config *own) {
    own->query_heads = own->key_heads = eng_config_heads(keys, "num_heads", heads);
    own->heads = own->value_heads = eng_config_heads(keys, "num_v_heads", own->query_heads);
    eng_config_divides(keys, "num_heads", own->query_heads, own->heads, "value heads");
    own->key_width = (int32_t)eng_keys_integer(keys, "head_dim", head_width, 1, ENG_CONFIG_MAX_HEAD_WIDTH);
    own->value_width = eng_config_expanded(keys, "expand_v", expand_v, own->key_width, 1);
    double exact = own->key_width * eng_keys_number(keys, "expand_v", expand_v, 1e-6, 64);
    if (keys->status == ENG_OK && fabs(exact - own->value_width) > 1e-5 * exact) // as the public code refuses it
        eng_keys_fail(keys, ENG_FORMAT, "expand_v", "gives heads of width %g", exact);
    eng_config_delta(keys, own);
}

// SPDX-License-Identifier: Apache-2.0
// Which layer of a config.json is which mixer, and where each mixer's keys stand.
//
// Two ways to write a hybrid are read. FLA's: an `attn` object, or a list of them, each with the layers that it turns
// into softmax layers. This project's: `layer_types`, one entry a layer, a mixer's name or an object with its name
// under "mixer" and keys of that layer. A key is looked for in the entry, then in the object called like the mixer
// ("attn" for softmax layers), then at the top level, so that layers of one kind are written once and exceptions where
// they are.
#include "engine/config_internal.h"

#include <string.h>

#include "engine/mixer.h"

eng_keys eng_keys_of(const eng_keys *parent, const json_t *object, const char *scope) {
    return (eng_keys){
        .object = object, .path = parent->path, .scope = scope, .status = parent->status, .error = parent->error};
}

void eng_config_set_layers(eng_config *config, const eng_layer_config *layer) {
    for (int32_t i = 0; i < config->layers; i++)
        config->layer[i] = *layer;
}

// One `attn` object of a FLA hybrid.
static void apply_attn(eng_keys *keys, eng_config *config, const json_t *object) {
    if (!json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, "attn", "must be null, an object or a list of objects");
        return;
    }
    eng_keys attn = eng_keys_of(keys, object, "attn.");
    eng_layer_config layer = {.mixer = &eng_mixer_attention};
    layer.attention = eng_config_attention(&attn, config->hidden_size, 0);
    const json_t *list = eng_keys_value(&attn, "layers");
    if (!json_is_array(list))
        eng_keys_fail(&attn, ENG_FORMAT, "layers", "must be a list of layer numbers");
    for (size_t i = 0; attn.status == ENG_OK && i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        json_int_t index = json_is_integer(entry) ? json_integer_value(entry) : -1;
        if (index < 0 || index >= config->layers)
            eng_keys_fail(&attn, ENG_FORMAT, "layers", "entry %zu must be a layer number from 0 to %d", i,
                          config->layers - 1);
        else if (config->layer[index].mixer == &eng_mixer_attention)
            eng_keys_fail(&attn, ENG_FORMAT, "layers", "names layer %d twice", (int)index);
        else
            config->layer[index] = layer;
    }
    keys->status = attn.status;
}

static const char *object_name(const eng_mixer *mixer) {
    return mixer == &eng_mixer_attention ? "attn" : mixer->name;
}

// A layer of the mixer; entry: keys of this layer alone, or NULL.
static void read_layer(eng_keys *keys, const eng_config *config, const eng_mixer *mixer, const json_t *entry,
                       eng_layer_config *layer) {
    const json_t *object = eng_keys_value(keys, object_name(mixer));
    if (object && !json_is_object(object)) {
        eng_keys_fail(keys, ENG_FORMAT, object_name(mixer), "must be an object");
        return;
    }
    char scope[48];
    snprintf(scope, sizeof scope, "%s.", object_name(mixer));
    eng_keys kind = eng_keys_of(keys, object, scope), own = eng_keys_of(keys, entry, "layer_types: ");
    kind.outer = keys;
    own.outer = &kind;
    if (object && mixer == &eng_mixer_attention && eng_keys_value(&own, "layers"))
        eng_keys_fail(&own, ENG_FORMAT, "layers", "stands beside layer_types");
    *layer = (eng_layer_config){.mixer = mixer};
    mixer->read(&own, config, layer);
    keys->status = own.status;
}

static void read_entry(eng_keys *keys, eng_config *config, int32_t index, const json_t *entry) {
    const json_t *inner = json_is_object(entry) ? entry : NULL;
    const char *name = json_string_value(inner ? json_object_get(inner, "mixer") : entry);
    const eng_mixer *mixer = name ? eng_mixer_find(name) : NULL;
    if (mixer)
        read_layer(keys, config, mixer, inner, &config->layer[index]);
    else
        eng_keys_fail(keys, ENG_UNSUPPORTED, "layer_types", "entry %d ('%.32s') is no mixer of this version", index,
                      name ? name : "no name");
}

static void apply_layer_types(eng_keys *keys, eng_config *config, const json_t *list) {
    if (!json_is_array(list) || json_array_size(list) != (size_t)config->layers) {
        eng_keys_fail(keys, ENG_FORMAT, "layer_types", "must be a list of %d names, one a layer", config->layers);
        return;
    }
    for (int32_t i = 0; keys->status == ENG_OK && i < config->layers; i++)
        read_entry(keys, config, i, json_array_get(list, (size_t)i));
}

void eng_config_fla_layers(eng_keys *keys, eng_config *config) {
    const json_t *types = eng_keys_value(keys, "layer_types");
    if (types) {
        apply_layer_types(keys, config, types);
        return;
    }
    bool plain = strcmp(config->model_type, "transformer") == 0;
    const eng_mixer *mixer = plain ? &eng_mixer_attention : eng_mixer_find(config->model_type);
    const json_t *attn = plain ? NULL : eng_keys_value(keys, "attn");
    eng_layer_config layer = {.mixer = mixer};
    if (plain)
        mixer->read(keys, config, &layer);
    else
        read_layer(keys, config, mixer, NULL, &layer);
    eng_config_set_layers(config, &layer);
    if (!json_is_array(attn)) {
        if (attn)
            apply_attn(keys, config, attn);
        return;
    }
    for (size_t i = 0; keys->status == ENG_OK && i < json_array_size(attn); i++)
        apply_attn(keys, config, json_array_get(attn, i));
}

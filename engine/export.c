// SPDX-License-Identifier: Apache-2.0
// Export: the keys of the form, read back as a model; that model's names on these weights.
//
// Tensors of one model come in one order whatever their names, so the i-th tensor here is the i-th there; their shapes
// are compared all the same.
#include "engine/export.h"

#include <stdlib.h>
#include <string.h>

#include "engine/checkpoint_internal.h"
#include "engine/export_internal.h"
#include "engine/mixer.h"

static const char *const form_names[] = {[ENG_FORM_MESA] = "mesa",
                                         [ENG_FORM_TRANSFORMERS] = "transformers",
                                         [ENG_FORM_FLA] = "fla",
                                         [ENG_FORM_STATE_SPACES] = "state-spaces"};

const char *eng_form_name(eng_form form) {
    return form_names[form];
}

bool eng_form_find(const char *name, eng_form *form) {
    for (size_t i = 0; i < sizeof form_names / sizeof *form_names; i++) {
        if (strcmp(form_names[i], name) == 0) {
            *form = (eng_form)i;
            return true;
        }
    }
    return false;
}

// A key of this project's alone that the public classes would not see, though it changes what is computed.
static const char *own_key(const eng_config *config) {
    if (config->loop.loops > 1)
        return "num_loops";
    bool common = config->dialect != ENG_DIALECT_XLSTM && config->dialect != ENG_DIALECT_GEMMA;
    if (common && config->scale_embeddings)
        return "scale_embeddings";
    if (common && config->logits_soft_cap != 0)
        return "logits_soft_cap";
    for (int32_t i = 0; i < config->layers; i++) {
        const eng_layer_config *layer = &config->layer[i];
        if (layer->mixer == &eng_mixer_mesa && layer->mesa.gamma_cap != 1)
            return "gamma_cap_b";
        if (layer->mixer == &eng_mixer_attention && layer->attention.qk_norm &&
            strcmp(config->model_type, "transformer") != 0)
            return "qk_norm";
    }
    return NULL;
}

static eng_status read_back(const eng_config *config, const json_t *root, eng_form form, eng_config *out,
                            eng_error *error) {
    char *text = eng_json_write(root);
    if (!text)
        return eng_fail(error, ENG_NO_MEMORY, "no memory to write config.json");
    eng_status status = eng_config_parse(text, strlen(text), "config.json", out, error);
    free(text);
    if (status != ENG_OK)
        return status;
    const char *key = form == ENG_FORM_MESA ? NULL : own_key(out);
    if (!key)
        key = eng_export_difference(config, out);
    if (!key)
        return ENG_OK;
    eng_config_free(out);
    return eng_fail(error, ENG_UNSUPPORTED, "%s: %s has nothing equal to what this model has there", key,
                    eng_form_name(form));
}

static eng_status target_model(const eng_model *model, eng_form form, eng_model **out, eng_error *error) {
    json_t *root = NULL;
    eng_config config;
    eng_status status = eng_export_keys(&model->config, form, &root, error);
    if (status == ENG_OK)
        status = read_back(&model->config, root, form, &config, error);
    json_decref(root);
    if (status == ENG_OK)
        status = eng_model_create(&config, out, error);
    return status;
}

static eng_status check_table(const eng_model *model, const eng_model *target, eng_error *error) {
    bool same = model->tensors == target->tensors;
    for (int32_t i = 0; same && i < model->tensors; i++) {
        const eng_tensor *from = &model->tensor[i], *to = &target->tensor[i];
        same = from->ndim == to->ndim && memcmp(from->shape, to->shape, (size_t)from->ndim * sizeof *from->shape) == 0;
    }
    return same ? ENG_OK : eng_fail(error, ENG_UNSUPPORTED, "the tensors of the two forms differ");
}

eng_status eng_checkpoint_export(const char *dir, const eng_weights *weights, eng_form form, eng_dtype dtype,
                                 const char *tokenizer_dir, eng_error *error) {
    eng_model *target = NULL;
    eng_status status = target_model(weights->model, form, &target, error);
    if (status == ENG_OK)
        status = check_table(weights->model, target, error);
    if (status == ENG_OK)
        status = eng_checkpoint_save_as(dir, weights, target, dtype, tokenizer_dir, error);
    eng_model_free(target);
    return status;
}

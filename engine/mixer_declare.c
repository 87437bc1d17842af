// SPDX-License-Identifier: Apache-2.0
// What recurrent layers declare: rows of tensors, start values, state parts.
//
// Start values are models.md 1.8's: linear weights N(0, initializer_range), what writes into the residual stream
// divided by sqrt(2 blocks), decay horizons log-spaced over the heads; "init": "fla" leaves both out.
#include "engine/mixer_recurrent.h"

#include <math.h>
#include <stdlib.h>

eng_init eng_init_residual(const eng_config *config) {
    eng_init init = eng_init_normal(config);
    if (!config->init_fla)
        init.value /= sqrtf(2.0F * (float)eng_config_depth(config));
    return init;
}

eng_init eng_init_horizon(const eng_config *config, eng_init_kind kind, int32_t groups, float divisor) {
    if (config->init_fla)
        return eng_init_constant(0);
    float context = (float)(config->trained_length > 0 ? config->trained_length : 2048);
    return (eng_init){.kind = kind, .value = context, .groups = groups, .divisor = divisor};
}

eng_status eng_declare_rows(eng_model *model, int32_t layer, const char *prefix, const eng_tensor_row *row, size_t rows,
                            eng_error *error) {
    for (size_t i = 0; i < rows; i++) {
        if (!row[i].present)
            continue;
        int32_t index = eng_model_add_tensor(model, layer, prefix, row[i].leaf, row[i].role,
                                             row[i].role == ENG_ROLE_MATRIX, row[i].init, row[i].ndim, row[i].shape);
        if (index < 0)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for the tensor table");
        if (row[i].alias)
            eng_model_add_alias(model, index, prefix, row[i].alias);
        model->layer[layer].mixer[row[i].which] = index;
    }
    return ENG_OK;
}

static eng_status declare_branches(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_recurrent_config *own = &config->layer[layer].recurrent;
    int64_t d = config->hidden_size, q = (int64_t)own->query_heads * own->key_width;
    int64_t k = (int64_t)own->key_heads * own->key_width, v = (int64_t)own->value_heads * own->value_width;
    int64_t heads = own->query_heads > own->heads ? own->query_heads : own->heads, o = heads * own->value_width;
    bool conv = own->taps > 0;
    eng_init normal = eng_init_normal(config);
    const eng_tensor_row rows[] = {
        {ENG_Q_PROJ, true, "q_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {q, d}},
        {ENG_K_PROJ, true, "k_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {k, d}},
        {ENG_V_PROJ, true, "v_proj.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {v, d}},
        {ENG_Q_CONV, conv, "q_conv1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {q, 1, own->taps}},
        {ENG_K_CONV, conv, "k_conv1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {k, 1, own->taps}},
        {ENG_V_CONV, conv, "v_conv1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {v, 1, own->taps}},
        {ENG_O_PROJ, true, "o_proj.weight", NULL, ENG_ROLE_MATRIX, eng_init_residual(config), 2, {d, o}},
    };
    return eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
}

void eng_declare_recurrent_state(eng_model *model, int32_t layer, eng_state_matrix matrix) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    eng_model_add_matrix(model, layer, matrix);
    if (own->taps < 2)
        return;
    size_t column = sizeof(float) * (size_t)(own->taps - 1);
    eng_model_add_state(model, layer, column * (size_t)own->query_heads * (size_t)own->key_width);
    eng_model_add_state(model, layer, column * (size_t)own->key_heads * (size_t)own->key_width);
    if (!own->plain_values)
        eng_model_add_state(model, layer, column * (size_t)own->value_heads * (size_t)own->value_width);
}

eng_status eng_declare_layer(eng_model *model, int32_t layer, const char *prefix, const eng_tensor_row *row,
                             size_t rows, int32_t key_width, int32_t columns, eng_error *error) {
    eng_status status = declare_branches(model, layer, prefix, error);
    if (status == ENG_OK)
        status = eng_declare_rows(model, layer, prefix, row, rows, error);
    const int32_t heads = model->config.layer[layer].recurrent.heads;
    eng_declare_recurrent_state(model, layer, (eng_state_matrix){heads, key_width, columns, false});
    return status;
}

eng_status eng_declare_head_decays(eng_model *model, int32_t layer, int32_t *constant, eng_error *error) {
    int32_t heads = model->config.layer[layer].recurrent.heads;
    float *decay = malloc(sizeof *decay * (size_t)heads);
    for (int32_t h = 0; decay && h < heads; h++)
        decay[h] = (float)log1p(-exp2(-5.0 - h));
    *constant = decay ? eng_model_add_constant(model, decay, heads) : -1;
    return *constant >= 0 ? ENG_OK : eng_fail(error, ENG_NO_MEMORY, "out of memory for a layer's constants");
}

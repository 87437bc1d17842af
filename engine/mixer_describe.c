// SPDX-License-Identifier: Apache-2.0
// The description of a recurrent layer, as far as config and tensor roles say it by themselves, and its operations.
//
// Made anew for every plan; the mixer's own describe function says the rest.
#include "engine/mixer_recurrent.h"

#include <math.h>

static const float l2_eps = 1e-6F; // models.md trap 7

eng_recurrent eng_recurrent_describe(const eng_model *model, int32_t layer) {
    eng_recurrent description;
    model->config.layer[layer].mixer->describe(model, layer, &description);
    return description;
}

int32_t eng_readers(const kern_recurrence *family) {
    return family->query_heads > family->heads ? family->query_heads : family->heads;
}

int32_t eng_columns(const kern_recurrence *family) {
    return family->value_width + (family->unit_column ? 1 : 0);
}

static eng_projection projection(const eng_model *model, int32_t layer, int weight, int bias, int down) {
    const int32_t *tensor = model->layer[layer].mixer;
    eng_projection made = {
        .down = down < 0 ? -1 : tensor[down], .weight = tensor[weight], .bias = bias < 0 ? -1 : tensor[bias]};
    if (made.weight >= 0)
        made.rows = (int32_t)model->tensor[made.weight].shape[0];
    return made;
}

static eng_branch branch(const eng_model *model, int32_t layer, int weight, int conv, int part) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    bool value = weight == ENG_V_PROJ;
    int bias = value ? ENG_V_BIAS : weight == ENG_Q_PROJ ? ENG_Q_BIAS : ENG_K_BIAS;
    return (eng_branch){.projection = projection(model, layer, weight, bias, -1),
                        .heads = value                  ? own->value_heads
                                 : weight == ENG_Q_PROJ ? own->query_heads
                                                        : own->key_heads,
                        .width = value ? own->value_width : own->key_width,
                        .conv = model->layer[layer].mixer[conv],
                        .conv_bias = -1,
                        .taps = value && own->plain_values ? 0 : own->taps,
                        .window = model->layer[layer].state_part[part],
                        .activation = value ? own->value_activation : own->key_activation,
                        .map = -1,
                        .map_bias = -1,
                        .product = -1,
                        .product_bias = -1,
                        .map_activation = value ? KERN_IDENTITY : own->key_map,
                        .feature = -1,
                        .norm = value               ? ENG_VECTOR_NORM_NONE
                                : own->qk_norm_sums ? ENG_VECTOR_NORM_SUM
                                : own->qk_norm      ? ENG_VECTOR_NORM_L2
                                                    : ENG_VECTOR_NORM_NONE,
                        .eps = own->qk_norm_sums ? 0 : l2_eps,
                        .frequency = -1};
}

void eng_recurrent_begin(const eng_model *model, int32_t layer, eng_recurrent *out) {
    const eng_recurrent_config *own = &model->config.layer[layer].recurrent;
    const int32_t *tensor = model->layer[layer].mixer;
    int32_t heads = own->query_heads > own->heads ? own->query_heads : own->heads;
    *out = (eng_recurrent){
        .q = branch(model, layer, ENG_Q_PROJ, ENG_Q_CONV, 1),
        .k = branch(model, layer, ENG_K_PROJ, ENG_K_CONV, 2),
        .v = branch(model, layer, ENG_V_PROJ, ENG_V_CONV, 3),
        .a = projection(model, layer, ENG_A_PROJ, ENG_A_BIAS, ENG_A_DOWN),
        .b = projection(model, layer, ENG_B_PROJ, ENG_B_BIAS, -1),
        .gates = {.heads = own->heads,
                  .channels = own->decay == KERN_DECAY_CHANNEL ? own->key_width : 1,
                  .divisor = 1,
                  .gamma_cap = 1,
                  .write_law = own->weighted ? KERN_WRITE_LAW_SIGMOID : KERN_WRITE_LAW_NONE,
                  .write_factor = own->write_factor},
        .A_log = tensor[ENG_A_LOG],
        .dt_bias = tensor[ENG_DT_BIAS],
        .skip = tensor[ENG_SKIP],
        .decay = -1,
        .family = {.decay = own->decay,
                   .update = own->update,
                   .weighted = own->weighted,
                   .heads = own->heads,
                   .query_heads = own->query_heads,
                   .key_heads = own->key_heads,
                   .value_heads = own->value_heads,
                   .key_width = own->key_width,
                   .value_width = own->value_width,
                   .scale = 1.0F / sqrtf((float)own->key_width),
                   .storage = model->state_storage},
        .norm = true,
        .norm_weight = tensor[ENG_O_NORM],
        .norm_bias = tensor[ENG_O_NORM_BIAS],
        .norm_groups = heads,
        .norm_eps = model->config.norm_eps,
        .gate = projection(model, layer, ENG_G_PROJ, ENG_G_BIAS, ENG_G_DOWN),
        .gate_activation = KERN_SILU,
        .out = projection(model, layer, ENG_O_PROJ, ENG_O_BIAS, -1),
    };
}

// A token's decay, rank-one update, error of the delta rule and reads; learned feature maps of all heads but one, which
// the tensor table counts.
double eng_recurrent_flops(const eng_model *model, int32_t layer, double position, double cg_steps) {
    eng_recurrent d = eng_recurrent_describe(model, layer);
    const kern_recurrence *family = &d.family;
    double state = (double)family->heads * family->key_width * eng_columns(family);
    double a_state = 2.0 + (family->decay != KERN_DECAY_NONE) + (family->update == KERN_UPDATE_DELTA ? 2.0 : 0.0);
    double flops = state * (a_state + 2.0 * eng_readers(family) / family->heads);
    const eng_branch *const branches[] = {&d.q, &d.k, &d.v};
    for (int i = 0; i < 3; i++) {
        int maps = (branches[i]->map >= 0) + (branches[i]->product >= 0);
        flops += 2.0 * maps * (branches[i]->heads - 1) * branches[i]->width * branches[i]->width;
    }
    (void)position;
    (void)cg_steps;
    return flops;
}

// SPDX-License-Identifier: Apache-2.0
// The recurrent block of Hawk and Griffin (De et al. 2024, arXiv 2402.19427; names of recurrent_gemma; models.md 13).
//
//   c = conv(W_x x + b) + b   i, r = W_b c_b + b, block by block   h = RG-LRU(c, i, r)
//   y = W_out (h gelu_tanh(W_y x + b)) + b
//
// State of a layer: h (R), then the last W - 1 inputs of the convolution.
#include "engine/mixer_recurrent.h"

enum rglru_tensor {
    X_PROJ,
    X_BIAS,
    Y_PROJ,
    Y_BIAS,
    OUT_PROJ,
    OUT_BIAS,
    CONV,
    CONV_BIAS,
    PARAM,
    INPUT_GATE,
    INPUT_BIAS,
    RECURRENT_GATE,
    RECURRENT_BIAS
};

typedef struct layer_kept {
    eng_branch_kept x;
    kern_ptr input, recurrent, h, y, out;
} layer_kept;

_Static_assert(sizeof(layer_kept) <= ENG_MAX_KEPT * sizeof(kern_ptr), "kept references");

static layer_kept *kept_of(eng_emit *emit, int32_t layer) {
    return (layer_kept *)emit->kept[layer];
}

static void read(eng_keys *keys, const eng_config *config, eng_layer_config *layer) {
    eng_rglru_config *own = &layer->rglru;
    own->width = (int32_t)eng_keys_integer(keys, "lru_width", config->hidden_size, 1, ENG_CONFIG_MAX_HIDDEN);
    own->blocks = eng_config_heads(keys, "num_attention_heads", 10);
    own->taps = eng_config_taps(keys, "conv1d_width");
    eng_config_divides(keys, "num_attention_heads", own->blocks, own->width, "channels of lru_width");
}

static eng_status declare(eng_model *model, int32_t layer, const char *prefix, eng_error *error) {
    const eng_config *config = &model->config;
    const eng_rglru_config *own = &config->layer[layer].rglru;
    int64_t d = config->hidden_size, width = own->width, blocks = own->blocks, inner = width / blocks;
    eng_init normal = eng_init_normal(config), zero = eng_init_constant(0), residual = eng_init_residual(config);
    eng_init decay = {.kind = ENG_INIT_RGLRU, .low = 0.81F, .value = 0.998F};
    const eng_tensor_row rows[] = {
        {X_PROJ, true, "linear_x.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, d}},
        {X_BIAS, true, "linear_x.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {width}},
        {Y_PROJ, true, "linear_y.weight", NULL, ENG_ROLE_MATRIX, normal, 2, {width, d}},
        {Y_BIAS, true, "linear_y.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {width}},
        {OUT_PROJ, true, "linear_out.weight", NULL, ENG_ROLE_MATRIX, residual, 2, {d, width}},
        {OUT_BIAS, true, "linear_out.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {d}},
        {CONV, true, "conv_1d.weight", NULL, ENG_ROLE_VECTOR, normal, 3, {width, 1, own->taps}},
        {CONV_BIAS, true, "conv_1d.bias", NULL, ENG_ROLE_VECTOR, zero, 1, {width}},
        {PARAM, true, "rg_lru.recurrent_param", NULL, ENG_ROLE_VECTOR, decay, 1, {width}},
        {INPUT_GATE, true, "rg_lru.input_gate_weight", NULL, ENG_ROLE_MATRIX, normal, 3, {blocks, inner, inner}},
        {INPUT_BIAS, true, "rg_lru.input_gate_bias", NULL, ENG_ROLE_VECTOR, zero, 2, {blocks, inner}},
        {RECURRENT_GATE,
         true,
         "rg_lru.recurrent_gate_weight",
         NULL,
         ENG_ROLE_MATRIX,
         normal,
         3,
         {blocks, inner, inner}},
        {RECURRENT_BIAS, true, "rg_lru.recurrent_gate_bias", NULL, ENG_ROLE_VECTOR, zero, 2, {blocks, inner}},
    };
    eng_model_add_state(model, layer, sizeof(float) * (size_t)width);
    if (own->taps > 1)
        eng_model_add_state(model, layer, sizeof(float) * (size_t)width * (size_t)(own->taps - 1));
    return eng_declare_rows(model, layer, prefix, rows, sizeof rows / sizeof *rows, error);
}

static eng_branch x_branch(const eng_model *model, int32_t layer) {
    const eng_rglru_config *own = &model->config.layer[layer].rglru;
    const int32_t *tensor = model->layer[layer].mixer;
    return (eng_branch){
        .projection = {.down = -1, .weight = tensor[X_PROJ], .bias = tensor[X_BIAS], .rows = own->width},
        .heads = 1,
        .width = own->width,
        .conv = tensor[CONV],
        .conv_bias = tensor[CONV_BIAS],
        .taps = own->taps,
        .window = model->layer[layer].state_part[1],
        .activation = KERN_IDENTITY,
        .map = -1,
        .map_bias = -1,
        .product = -1,
        .product_bias = -1,
        .map_activation = KERN_IDENTITY,
        .feature = -1,
        .frequency = -1};
}

static kern_ptr emit_gate(eng_emit *emit, int32_t layer, kern_ptr x, enum rglru_tensor weight, enum rglru_tensor bias) {
    const eng_rglru_config *own = &emit->model->config.layer[layer].rglru;
    const int32_t *tensor = emit->model->layer[layer].mixer;
    kern_ptr y = eng_emit_activation(emit, own->width);
    eng_emit_op(emit, KERN_OP_BLOCK_LINEAR,
                &(kern_block_linear_args){.x = x,
                                          .weight = eng_param(tensor[weight]),
                                          .bias = eng_param(tensor[bias]),
                                          .y = y,
                                          .blocks = own->blocks,
                                          .width = own->width / own->blocks});
    return y;
}

static void forward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr residual, kern_ptr y) {
    const int32_t *tensor = emit->model->layer[layer].mixer;
    int32_t width = emit->model->config.layer[layer].rglru.width;
    layer_kept *kept = kept_of(emit, layer);
    eng_branch branch = x_branch(emit->model, layer);
    eng_emit_branch(emit, layer, &branch, x, &kept->x);
    kept->input = emit_gate(emit, layer, kept->x.ready, INPUT_GATE, INPUT_BIAS);
    kept->recurrent = emit_gate(emit, layer, kept->x.ready, RECURRENT_GATE, RECURRENT_BIAS);
    kept->h = eng_emit_activation(emit, width);
    eng_emit_op(emit, KERN_OP_RGLRU,
                &(kern_rglru_args){.x = kept->x.ready,
                                   .input_gate = kept->input,
                                   .recurrence_gate = kept->recurrent,
                                   .recurrent_param = eng_param(tensor[PARAM]),
                                   .state = eng_emit_state(emit, layer, 0),
                                   .h = kept->h,
                                   .width = width});
    kept->y = eng_emit_activation(emit, width);
    kept->out = eng_emit_activation(emit, width);
    eng_emit_linear(emit, x, tensor[Y_PROJ], tensor[Y_BIAS], eng_null(), kept->y);
    eng_emit_op(
        emit, KERN_OP_GLU,
        &(kern_glu_args){.gate = kept->y, .up = kept->h, .y = kept->out, .width = width, .activation = KERN_GELU_TANH});
    if (y.ref != 0)
        eng_emit_linear(emit, kept->out, tensor[OUT_PROJ], tensor[OUT_BIAS], residual, y);
}

// Adds to dx, the gradient of the gates' common input.
static void emit_gate_backward(eng_emit *emit, int32_t layer, enum rglru_tensor weight, enum rglru_tensor bias,
                               kern_ptr dy, kern_ptr dx) {
    const eng_rglru_config *own = &emit->model->config.layer[layer].rglru;
    const int32_t *tensor = emit->model->layer[layer].mixer;
    eng_emit_op(emit, KERN_OP_BLOCK_LINEAR_BACKWARD,
                &(kern_block_linear_backward_args){.x = kept_of(emit, layer)->x.ready,
                                                   .weight = eng_param(tensor[weight]),
                                                   .dy = dy,
                                                   .dx = dx,
                                                   .grad_weight = eng_grad(tensor[weight]),
                                                   .grad_bias = eng_grad(tensor[bias]),
                                                   .blocks = own->blocks,
                                                   .width = own->width / own->blocks,
                                                   .accumulate = true});
}

static void backward(eng_emit *emit, int32_t layer, kern_ptr x, kern_ptr dy, kern_ptr dx) {
    const int32_t *tensor = emit->model->layer[layer].mixer;
    int32_t width = emit->model->config.layer[layer].rglru.width;
    const layer_kept *kept = kept_of(emit, layer);
    kern_ptr dh = eng_emit_scratch(emit, width), d_y = eng_emit_scratch(emit, width);
    kern_ptr d_input = eng_emit_scratch(emit, width), d_recurrent = eng_emit_scratch(emit, width);
    eng_emit_linear_backward(emit, kept->out, tensor[OUT_PROJ], tensor[OUT_BIAS], dy, dh, false);
    eng_emit_op(emit, KERN_OP_GLU_BACKWARD,
                &(kern_glu_backward_args){.gate = kept->y,
                                          .up = kept->h,
                                          .dy = dh,
                                          .dgate = d_y,
                                          .dup = dh,
                                          .width = width,
                                          .activation = KERN_GELU_TANH});
    eng_emit_linear_backward(emit, x, tensor[Y_PROJ], tensor[Y_BIAS], d_y, dx, false);
    eng_emit_op(emit, KERN_OP_RGLRU_BACKWARD,
                &(kern_rglru_backward_args){.x = kept->x.ready,
                                            .input_gate = kept->input,
                                            .recurrence_gate = kept->recurrent,
                                            .recurrent_param = eng_param(tensor[PARAM]),
                                            .h = kept->h,
                                            .dh = dh,
                                            .dx = dh,
                                            .dinput_gate = d_input,
                                            .drecurrence_gate = d_recurrent,
                                            .grad_recurrent_param = eng_grad(tensor[PARAM]),
                                            .width = width});
    emit_gate_backward(emit, layer, INPUT_GATE, INPUT_BIAS, d_input, dh);
    emit_gate_backward(emit, layer, RECURRENT_GATE, RECURRENT_BIAS, d_recurrent, dh);
    eng_branch branch = x_branch(emit->model, layer);
    eng_emit_branch_backward(emit, &branch, &kept->x, x, dh, dx, true);
}

// A channel: the decay's product, the input's two, the sum.
static double flops(const eng_model *model, int32_t layer, double position, double cg_steps) {
    (void)position;
    (void)cg_steps;
    return 4.0 * model->config.layer[layer].rglru.width;
}

const eng_mixer eng_mixer_rglru = {
    .name = "rglru", .read = read, .declare = declare, .forward = forward, .backward = backward, .flops = flops};

// SPDX-License-Identifier: Apache-2.0
// What tells one loop of a model from another: its embedding, and the first loop's input that joins its output.
//
// Both are products and sums channel by channel, written as convolutions of one tap whose weights are a row of the
// loops' table. Nothing is emitted where the model has neither.
#include "engine/forward_internal.h"

static kern_ptr ones(const eng_emit *emit) {
    return eng_param(emit->model->tensors + emit->model->ones);
}

static int32_t channel0(const eng_emit *emit) {
    return emit->level * emit->model->config.hidden_size;
}

static void emit_channels(eng_emit *emit, kern_ptr x, kern_ptr weight, kern_ptr bias, kern_ptr y) {
    eng_emit_op(emit, KERN_OP_SHORT_CONV,
                &(kern_short_conv_args){.x = x,
                                        .weight = weight,
                                        .bias = bias,
                                        .y = y,
                                        .channels = emit->model->config.hidden_size,
                                        .taps = 1,
                                        .activation = KERN_IDENTITY,
                                        .channel0 = channel0(emit)});
}

static void emit_add(eng_emit *emit, kern_ptr x, kern_ptr y) {
    eng_emit_op(emit, KERN_OP_ADD, &(kern_add_args){.x = x, .y = y, .width = emit->model->config.hidden_size});
}

kern_ptr eng_emit_loop_input(eng_emit *emit, kern_ptr stream) {
    const eng_model *model = emit->model;
    if (model->loop_embedding < 0)
        return stream;
    uint64_t bytes = sizeof(float) * (uint64_t)model->config.hidden_size * (uint64_t)emit->tokens;
    kern_ptr input = eng_emit_saved_bytes(emit, bytes);
    emit_channels(emit, stream, ones(emit), eng_param(model->loop_embedding), input);
    return input;
}

void eng_emit_loop_output(eng_emit *emit, kern_ptr start, kern_ptr stream) {
    const eng_model *model = emit->model;
    if (model->loop_residual_gate < 0)
        return;
    uint64_t mark = emit->scratch;
    kern_ptr joined = eng_emit_scratch(emit, model->config.hidden_size);
    emit_channels(emit, start, eng_param(model->loop_residual_gate), eng_null(), joined);
    emit_add(emit, joined, stream);
    emit->scratch = mark;
}

static void emit_channels_backward(eng_emit *emit, kern_ptr x, kern_ptr weight, kern_ptr bias, kern_ptr dy, kern_ptr dx,
                                   kern_ptr grad_weight, kern_ptr grad_bias) {
    eng_emit_op(emit, KERN_OP_SHORT_CONV_BACKWARD,
                &(kern_short_conv_backward_args){.x = x,
                                                 .weight = weight,
                                                 .bias = bias,
                                                 .dy = dy,
                                                 .dx = dx,
                                                 .grad_weight = grad_weight,
                                                 .grad_bias = grad_bias,
                                                 .channels = emit->model->config.hidden_size,
                                                 .taps = 1,
                                                 .activation = KERN_IDENTITY,
                                                 .channel0 = channel0(emit)});
}

// The ones have no gradient to keep.
void eng_emit_loop_input_backward(eng_emit *emit, kern_ptr stream, kern_ptr d_residual) {
    const eng_model *model = emit->model;
    const eng_config *config = &model->config;
    if (model->loop_embedding < 0)
        return;
    uint64_t mark = emit->scratch;
    kern_ptr unused = eng_emit_scratch(emit, config->hidden_size);
    kern_ptr d_ones =
        eng_emit_scratch_bytes(emit, sizeof(float) * (uint64_t)config->hidden_size * (uint64_t)config->loop.loops);
    emit_channels_backward(emit, stream, ones(emit), eng_param(model->loop_embedding), d_residual, unused, d_ones,
                           eng_grad(model->loop_embedding));
    emit->scratch = mark;
}

void eng_emit_loop_output_backward(eng_emit *emit, kern_ptr start, kern_ptr d_residual, kern_ptr d_start) {
    const eng_model *model = emit->model;
    if (model->loop_residual_gate < 0)
        return;
    uint64_t mark = emit->scratch;
    kern_ptr d_joined = eng_emit_scratch(emit, model->config.hidden_size);
    emit_channels_backward(emit, start, eng_param(model->loop_residual_gate), eng_null(), d_residual, d_joined,
                           eng_grad(model->loop_residual_gate), eng_null());
    emit_add(emit, d_joined, d_start);
    emit->scratch = mark;
}

kern_ptr eng_emit_loop_start_gradient(eng_emit *emit) {
    if (emit->model->loop_residual_gate < 0)
        return eng_null();
    kern_ptr d_start = eng_emit_scratch(emit, emit->model->config.hidden_size);
    eng_emit_op(emit, KERN_OP_CLEAR, &(kern_clear_args){.y = d_start, .width = emit->model->config.hidden_size});
    return d_start;
}

void eng_emit_loop_start_backward(eng_emit *emit, kern_ptr d_start, kern_ptr d_residual) {
    if (d_start.ref != 0)
        emit_add(emit, d_start, d_residual);
}

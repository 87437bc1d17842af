// SPDX-License-Identifier: Apache-2.0
// The emitter's buffers and the operations that every block uses, and the memory that a plan runs in.
// Offsets only: nothing is allocated until eng_memory_create, whose sizes are the peaks that emission reached.
#include "engine/forward_internal.h"

#include <stdio.h>
#include <string.h>

void eng_emit_op(eng_emit *emit, kern_op op, const void *args) {
    if (emit->status != ENG_OK)
        return;
    kern_status status = kern_plan_add(emit->plan->plan, op, args);
    if (status != KERN_OK)
        emit->status = eng_fail_kernel(emit->error, status, kern_op_name(op));
}

static uint64_t align64(uint64_t bytes) {
    return (bytes + 63) & ~UINT64_C(63);
}

kern_ptr eng_emit_saved_bytes(eng_emit *emit, uint64_t bytes) {
    kern_ptr reference = kern_ref(KERN_CLASS_SAVED, emit->saved);
    emit->saved += align64(bytes);
    return reference;
}

kern_ptr eng_emit_scratch_bytes(eng_emit *emit, uint64_t bytes) {
    kern_ptr reference = kern_ref(KERN_CLASS_SCRATCH, emit->scratch);
    emit->scratch += align64(bytes);
    if (emit->scratch > emit->scratch_peak)
        emit->scratch_peak = emit->scratch;
    return reference;
}

kern_ptr eng_emit_activation_bytes(eng_emit *emit, uint64_t bytes) {
    return emit->keep ? eng_emit_saved_bytes(emit, bytes) : eng_emit_scratch_bytes(emit, bytes);
}

kern_ptr eng_emit_activation(eng_emit *emit, int64_t width) {
    return eng_emit_activation_bytes(emit, sizeof(float) * (uint64_t)width * (uint64_t)emit->tokens);
}

kern_ptr eng_emit_scratch(eng_emit *emit, int64_t width) {
    return eng_emit_scratch_bytes(emit, sizeof(float) * (uint64_t)width * (uint64_t)emit->tokens);
}

kern_ptr eng_emit_state(const eng_emit *emit, int32_t layer, size_t offset) {
    if (!eng_serves(emit))
        return eng_null();
    const eng_layer *own = &emit->model->layer[layer];
    return kern_ref(KERN_CLASS_STATE, own->state_offset + own->state_bytes * (size_t)emit->level + offset);
}

void eng_emit_linear(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr residual, kern_ptr y) {
    const eng_tensor *tensor = &emit->model->tensor[weight];
    eng_emit_op(emit, KERN_OP_LINEAR,
                &(kern_linear_args){.x = x,
                                    .weight = eng_param(weight),
                                    .bias = eng_param(bias),
                                    .residual = residual,
                                    .y = y,
                                    .cols = (int32_t)tensor->shape[1],
                                    .rows = (int32_t)tensor->shape[0]});
}

void eng_emit_linear_backward(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr dy, kern_ptr dx,
                              bool accumulate) {
    const eng_tensor *tensor = &emit->model->tensor[weight];
    int32_t cols = (int32_t)tensor->shape[1], rows = (int32_t)tensor->shape[0];
    if (dx.ref != 0)
        eng_emit_op(
            emit, KERN_OP_LINEAR_BACKWARD_INPUT,
            &(kern_linear_backward_input_args){
                .dy = dy, .weight = eng_param(weight), .dx = dx, .cols = cols, .rows = rows, .accumulate = accumulate});
    eng_emit_op(emit, KERN_OP_LINEAR_BACKWARD_WEIGHT,
                &(kern_linear_backward_weight_args){.x = x,
                                                    .dy = dy,
                                                    .grad_weight = eng_grad(weight),
                                                    .grad_bias = eng_grad(bias),
                                                    .cols = cols,
                                                    .rows = rows});
}

void eng_emit_norm(eng_emit *emit, kern_ptr x, int32_t weight, kern_ptr gate, kern_ptr y, int32_t groups, float eps) {
    eng_emit_op(emit, KERN_OP_RMSNORM,
                &(kern_rmsnorm_args){.x = x,
                                     .weight = eng_param(weight),
                                     .gate = gate,
                                     .y = y,
                                     .groups = groups,
                                     .width = (int32_t)emit->model->tensor[weight].shape[0],
                                     .eps = eps,
                                     .weight_offset = emit->model->config.norm_offset,
                                     .activation = KERN_SILU});
}

void eng_emit_norm_backward(eng_emit *emit, kern_ptr x, int32_t weight, kern_ptr gate, kern_ptr dy, kern_ptr dx,
                            kern_ptr dgate, int32_t groups, float eps, bool accumulate) {
    eng_emit_op(emit, KERN_OP_RMSNORM_BACKWARD,
                &(kern_rmsnorm_backward_args){.x = x,
                                              .weight = eng_param(weight),
                                              .gate = gate,
                                              .dy = dy,
                                              .dx = dx,
                                              .dgate = dgate,
                                              .grad_weight = eng_grad(weight),
                                              .groups = groups,
                                              .width = (int32_t)emit->model->tensor[weight].shape[0],
                                              .eps = eps,
                                              .weight_offset = emit->model->config.norm_offset,
                                              .accumulate = accumulate,
                                              .activation = KERN_SILU});
}

// A convolution of one tap.
void eng_emit_affine(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr y) {
    eng_emit_op(emit, KERN_OP_SHORT_CONV,
                &(kern_short_conv_args){.x = x,
                                        .weight = eng_param(weight),
                                        .bias = eng_param(bias),
                                        .y = y,
                                        .channels = (int32_t)emit->model->tensor[weight].count,
                                        .taps = 1,
                                        .activation = KERN_IDENTITY});
}

void eng_emit_affine_backward(eng_emit *emit, kern_ptr x, int32_t weight, int32_t bias, kern_ptr dy, kern_ptr dx) {
    eng_emit_op(emit, KERN_OP_SHORT_CONV_BACKWARD,
                &(kern_short_conv_backward_args){.x = x,
                                                 .weight = eng_param(weight),
                                                 .bias = eng_param(bias),
                                                 .dy = dy,
                                                 .dx = dx,
                                                 .grad_weight = eng_grad(weight),
                                                 .grad_bias = eng_grad(bias),
                                                 .channels = (int32_t)emit->model->tensor[weight].count,
                                                 .taps = 1,
                                                 .activation = KERN_IDENTITY});
}

eng_status eng_memory_create(kern_device *device, const eng_weights *weights, size_t saved_bytes, size_t scratch_bytes,
                             void *state, void *pages, kern_memory *out, eng_error *error) {
    kern_memory memory = {.param = weights->param, .grad = weights->grad, .state = state, .pages = pages};
    kern_status status = kern_alloc(device, saved_bytes, &memory.saved);
    if (status == KERN_OK)
        status = kern_alloc(device, scratch_bytes, &memory.scratch);
    if (status != KERN_OK) {
        eng_memory_free(device, &memory);
        return eng_fail_kernel(error, status, "allocating activations");
    }
    *out = memory;
    return ENG_OK;
}

void eng_memory_free(kern_device *device, kern_memory *memory) {
    kern_free(device, memory->saved);
    kern_free(device, memory->scratch);
    memset(memory, 0, sizeof *memory);
}

void *eng_plan_address(const kern_memory *memory, kern_ptr reference) {
    uint64_t offset = reference.ref & ((UINT64_C(1) << 56) - 1);
    kern_class class_ = (kern_class)(reference.ref >> 56);
    if (class_ == KERN_CLASS_SAVED)
        return (char *)memory->saved + offset;
    return class_ == KERN_CLASS_SCRATCH ? (char *)memory->scratch + offset : NULL;
}

eng_status eng_open_device(const kern_device_options *options, char *why, size_t why_size, kern_device **out,
                           eng_error *error) {
    char reason[256] = "";
    const kern_status status = kern_device_open(options, out, reason, sizeof reason);
    if (why)
        snprintf(why, why_size, "%s", reason);
    if (status == KERN_OK)
        return ENG_OK;
    const char *text = reason[0] ? reason : kern_status_text(status);
    if (status == KERN_INVALID)
        return eng_fail(error, ENG_INVALID, "%s", text);
    return eng_fail(error, status == KERN_NO_MEMORY ? ENG_NO_MEMORY : ENG_DEVICE, "device %s: %s", options->name, text);
}

eng_status eng_fail_kernel(eng_error *error, kern_status status, const char *doing) {
    switch (status) {
    case KERN_OK:
        return ENG_OK;
    case KERN_NO_MEMORY:
        return eng_fail(error, ENG_NO_MEMORY, "%s: %s", doing, kern_status_text(status));
    case KERN_UNSUPPORTED:
        return eng_fail(error, ENG_UNSUPPORTED, "%s: %s", doing, kern_status_text(status));
    case KERN_NO_DEVICE:
    case KERN_DEVICE_LOST:
    case KERN_SELF_TEST:
        return eng_fail(error, ENG_DEVICE, "%s: %s", doing, kern_status_text(status));
    case KERN_INVALID:
        break;
    }
    return eng_fail(error, ENG_INTERNAL, "%s: %s", doing, kern_status_text(status));
}

void eng_add_solves(const kern_solve_sum *solves, int32_t tokens, eng_compute *sum) {
    for (int32_t t = 0; solves && t < tokens; t++) {
        sum->solves += solves[t].solves;
        sum->steps += solves[t].steps;
        sum->unconverged += solves[t].unconverged;
        if ((int32_t)solves[t].steps_max > sum->steps_max)
            sum->steps_max = (int32_t)solves[t].steps_max;
    }
}

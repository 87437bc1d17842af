// SPDX-License-Identifier: Apache-2.0
// AdamW, gradient norm and clipping; see optimizer.h.
// One launch a tensor, since decay differs by tensor; the norm is one launch over all gradients, in fixed blocks.
#include "trainer/optimizer.h"

#include <math.h>
#include <string.h>

#include "engine/forward.h"

static kern_square_sum_args square_arguments(const trn_optimizer *optimizer) {
    return (kern_square_sum_args){
        .x.f = optimizer->weights->grads, .sum.p = optimizer->squares, .count = optimizer->weights->count};
}

eng_status trn_optimizer_create(const eng_weights *weights, kern_stream *stream, const trn_adamw *adamw,
                                trn_optimizer *out, eng_error *error) {
    trn_optimizer optimizer = {.weights = weights, .stream = stream, .adamw = *adamw};
    void **memory[] = {(void **)&optimizer.m, (void **)&optimizer.v, (void **)&optimizer.squares,
                       (void **)&optimizer.scale};
    size_t moments = sizeof(float) * (size_t)weights->count;
    const size_t bytes[] = {moments, moments, sizeof *optimizer.squares, sizeof *optimizer.scale};
    kern_status made = KERN_OK;
    for (size_t i = 0; made == KERN_OK && i < sizeof bytes / sizeof *bytes; i++) {
        void *block = NULL;
        made = kern_alloc(weights->device, bytes[i], &block);
        memcpy(memory[i], &block, sizeof block);
    }
    if (made == KERN_OK) {
        kern_square_sum_args squares = square_arguments(&optimizer);
        made = kern_reserve(weights->device, KERN_OP_SQUARE_SUM, &squares);
    }
    if (made != KERN_OK) {
        trn_optimizer_free(&optimizer);
        return eng_fail_kernel(error, made, "allocating the optimizer's moments");
    }
    *out = optimizer;
    return ENG_OK;
}

void trn_optimizer_free(trn_optimizer *optimizer) {
    if (!optimizer->weights)
        return;
    kern_device *device = optimizer->weights->device;
    kern_free(device, optimizer->m);
    kern_free(device, optimizer->v);
    kern_free(device, optimizer->squares);
    kern_free(device, optimizer->scale);
    memset(optimizer, 0, sizeof *optimizer);
}

eng_status trn_optimizer_zero_gradients(trn_optimizer *optimizer, eng_error *error) {
    const eng_weights *weights = optimizer->weights;
    kern_status status = kern_zero(optimizer->stream, weights->grads, sizeof(float) * (size_t)weights->count);
    return eng_fail_kernel(error, status, "clearing gradients");
}

static kern_status sum_squares(trn_optimizer *optimizer, const kern_square_sum_args *squares, double *sum) {
    kern_status status = kern_zero(optimizer->stream, optimizer->squares, sizeof *optimizer->squares);
    if (status == KERN_OK)
        status = kern_launch(optimizer->stream, KERN_OP_SQUARE_SUM, NULL, squares);
    if (status == KERN_OK)
        status = kern_download(optimizer->stream, sum, optimizer->squares, sizeof *sum);
    if (status == KERN_OK)
        status = kern_synchronize(optimizer->stream);
    return status;
}

eng_status trn_optimizer_norm(trn_optimizer *optimizer, double *norm, eng_error *error) {
    double sum = 0;
    kern_square_sum_args squares = square_arguments(optimizer);
    kern_status status = sum_squares(optimizer, &squares, &sum);
    *norm = sqrt(sum);
    return eng_fail_kernel(error, status, "computing the gradient's norm");
}

eng_status trn_optimizer_find_not_finite(trn_optimizer *optimizer, const float *block, int32_t *tensor,
                                         eng_error *error) {
    const eng_weights *weights = optimizer->weights;
    kern_status status = KERN_OK;
    *tensor = -1;
    for (int32_t i = weights->model->tensors - 1; status == KERN_OK && *tensor < 0 && i >= 0; i--) {
        double sum = 0;
        kern_square_sum_args squares = {.x.f = (float *)block + (weights->master[i] - weights->masters),
                                        .sum.p = optimizer->squares,
                                        .count = weights->model->tensor[i].count};
        status = sum_squares(optimizer, &squares, &sum);
        if (!isfinite(sum))
            *tensor = i;
    }
    return eng_fail_kernel(error, status, "looking for a value that is not finite");
}

static kern_adamw_args adamw_arguments(const trn_optimizer *optimizer, int32_t index, double rate) {
    const eng_weights *weights = optimizer->weights;
    const eng_tensor *tensor = &weights->model->tensor[index];
    const trn_adamw *adamw = &optimizer->adamw;
    int64_t offset = weights->master[index] - weights->masters;
    double update = (double)optimizer->updates;
    return (kern_adamw_args){.parameter.f = weights->master[index],
                             .grad.f = weights->grad[index],
                             .m.f = optimizer->m + offset,
                             .v.f = optimizer->v + offset,
                             .grad_scale.f = optimizer->scale,
                             .count = tensor->count,
                             .lr = (float)rate,
                             .beta1 = (float)adamw->beta1,
                             .beta2 = (float)adamw->beta2,
                             .eps = (float)adamw->eps,
                             .weight_decay = tensor->decay ? (float)adamw->weight_decay : 0,
                             .correction1 = (float)(1 - pow((float)adamw->beta1, update)),
                             .correction2 = (float)(1 - pow((float)adamw->beta2, update))};
}

eng_status trn_optimizer_update(trn_optimizer *optimizer, double rate, eng_error *error) {
    kern_clip_scale_args clip = {
        .sum.p = optimizer->squares, .scale.f = optimizer->scale, .clip = (float)optimizer->adamw.clip};
    kern_status status = kern_launch(optimizer->stream, KERN_OP_CLIP_SCALE, NULL, &clip);
    optimizer->updates++;
    const eng_model *model = optimizer->weights->model;
    for (int32_t i = 0; status == KERN_OK && i < model->tensors; i++) {
        if (optimizer->gate_alone && i != model->exit_gate && i != model->exit_bias)
            continue;
        kern_adamw_args arguments = adamw_arguments(optimizer, i, rate);
        status = kern_launch(optimizer->stream, KERN_OP_ADAMW, NULL, &arguments);
    }
    return eng_fail_kernel(error, status, "updating the weights");
}

// SPDX-License-Identifier: Apache-2.0
// AdamW, gradient norm and clipping; see optimizer.h.
// One launch a tensor, since decay differs by tensor; the norm is one launch over the gradients of each block, which of
// a process alone is all of them. Whatever waits for the device waits as one of the ranks.
#include "trainer/optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"

enum { ALIGNMENT = 16 };

static int64_t padded(int64_t floats) {
    return (floats + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

// What a block's part, of the parameters laid out, has of a tensor.
static trn_piece cut(const eng_weights *weights, int32_t tensor, trn_part part) {
    const int64_t first = weights->master[tensor] - weights->masters, count = weights->model->tensor[tensor].count;
    const int64_t from = part.first > first ? part.first : first;
    const int64_t end = part.first + part.count < first + count ? part.first + part.count : first + count;
    return (trn_piece){.tensor = tensor, .first = from - first, .count = end - from};
}

static eng_status make_pieces(trn_optimizer *optimizer, eng_error *error) {
    const eng_weights *weights = optimizer->weights;
    optimizer->piece = calloc((size_t)weights->model->tensors, sizeof *optimizer->piece);
    if (!optimizer->piece)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the pieces of an optimizer");
    for (int32_t b = 0; b < optimizer->blocks.count; b++)
        for (int32_t i = 0; i < weights->model->tensors; i++) {
            trn_piece piece = cut(weights, i, trn_blocks_own(&optimizer->blocks, b));
            if (piece.count <= 0)
                continue;
            piece.block = b;
            piece.moment = optimizer->moments;
            optimizer->moments += padded(piece.count);
            optimizer->piece[optimizer->pieces++] = piece;
        }
    return ENG_OK;
}

static kern_square_sum_args square_arguments(const trn_optimizer *optimizer, const float *x, int64_t count) {
    return (kern_square_sum_args){.x.f = (float *)x, .sum.p = optimizer->squares, .count = count};
}

static kern_status allocate(trn_optimizer *optimizer) {
    kern_device *device = optimizer->weights->device;
    void **memory[] = {(void **)&optimizer->m, (void **)&optimizer->v, (void **)&optimizer->squares,
                       (void **)&optimizer->scale};
    size_t moments = sizeof(float) * (size_t)optimizer->moments;
    const size_t bytes[] = {moments, moments, sizeof *optimizer->squares, sizeof *optimizer->scale};
    kern_status made = KERN_OK;
    for (size_t i = 0; made == KERN_OK && i < sizeof bytes / sizeof *bytes; i++) {
        void *block = NULL;
        made = kern_alloc(device, bytes[i], &block);
        memcpy(memory[i], &block, sizeof block);
    }
    if (made != KERN_OK)
        return made;
    kern_square_sum_args squares = square_arguments(optimizer, optimizer->weights->grads, optimizer->weights->count);
    return kern_reserve(device, KERN_OP_SQUARE_SUM, &squares);
}

eng_status trn_optimizer_create(const eng_weights *weights, kern_stream *stream, const trn_adamw *adamw,
                                const kern_plan *plan, trn_ranks *ranks, trn_optimizer *out, eng_error *error) {
    trn_optimizer optimizer = {.weights = weights, .stream = stream, .adamw = *adamw};
    eng_status status = trn_blocks_create(weights, plan, ranks, &optimizer.blocks, error);
    if (status == ENG_OK)
        status = make_pieces(&optimizer, error);
    if (status == ENG_OK)
        status = eng_fail_kernel(error, allocate(&optimizer), "allocating the optimizer's moments");
    if (status != ENG_OK) {
        trn_optimizer_free(&optimizer);
        return status;
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
    trn_blocks_free(&optimizer->blocks);
    free(optimizer->piece);
    memset(optimizer, 0, sizeof *optimizer);
}

eng_status trn_optimizer_zero_gradients(trn_optimizer *optimizer, eng_error *error) {
    const eng_weights *weights = optimizer->weights;
    kern_status status = kern_zero(optimizer->stream, weights->grads, sizeof(float) * (size_t)weights->count);
    return eng_fail_kernel(error, status, "clearing gradients");
}

eng_status trn_optimizer_sum(trn_optimizer *optimizer, int32_t block, eng_error *error) {
    const trn_block *whole = &optimizer->blocks.block[block];
    return trn_ranks_sum(optimizer->blocks.ranks, optimizer->stream, optimizer->weights->grads + whole->first,
                         whole->count, error);
}

// ---------------------------------------------------------------------------------------------------------------- norm

static kern_status begin_squares(const trn_optimizer *optimizer) {
    return kern_zero(optimizer->stream, optimizer->squares, sizeof *optimizer->squares);
}

static kern_status add_squares(const trn_optimizer *optimizer, const float *x, int64_t count) {
    kern_square_sum_args squares = square_arguments(optimizer, x, count);
    return kern_launch(optimizer->stream, KERN_OP_SQUARE_SUM, NULL, &squares);
}

static eng_status read_squares(trn_optimizer *optimizer, kern_status launched, double *sum, const char *doing,
                               eng_error *error) {
    if (launched == KERN_OK)
        launched = kern_download(optimizer->stream, sum, optimizer->squares, sizeof *sum);
    eng_status status = eng_fail_kernel(error, launched, doing);
    return status == ENG_OK ? trn_ranks_wait(optimizer->blocks.ranks, optimizer->stream, error) : status;
}

// Every rank adds what all ranks have in the ranks' order, and so gets the same bits.
static eng_status add_up(trn_optimizer *optimizer, double own, eng_error *error) {
    trn_ranks *ranks = optimizer->blocks.ranks;
    double *all = malloc(sizeof *all * (size_t)trn_ranks_count(ranks));
    eng_status status = all ? trn_ranks_exchange(ranks, &own, sizeof own, all, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for the gradient's norm");
    optimizer->sum = 0;
    for (int32_t r = 0; status == ENG_OK && r < trn_ranks_count(ranks); r++)
        optimizer->sum += all[r];
    free(all);
    if (status != ENG_OK || !ranks)
        return status;
    kern_status sent = kern_upload(optimizer->stream, optimizer->squares, &optimizer->sum, sizeof optimizer->sum);
    return eng_fail_kernel(error, sent, "computing the gradient's norm");
}

eng_status trn_optimizer_norm(trn_optimizer *optimizer, double *norm, eng_error *error) {
    const trn_blocks *blocks = &optimizer->blocks;
    double own = 0;
    eng_status status = trn_ranks_join(blocks->ranks, optimizer->stream, error);
    kern_status launched = status == ENG_OK ? begin_squares(optimizer) : KERN_OK;
    for (int32_t b = 0; status == ENG_OK && launched == KERN_OK && b < blocks->count; b++) {
        const trn_part part = trn_blocks_own(blocks, b);
        launched = add_squares(optimizer, optimizer->weights->grads + part.first, part.count);
    }
    if (status == ENG_OK)
        status = read_squares(optimizer, launched, &own, "computing the gradient's norm", error);
    if (status == ENG_OK)
        status = add_up(optimizer, own, error);
    *norm = sqrt(optimizer->sum);
    return status;
}

// The last of what the ranks have found.
static eng_status latest(trn_ranks *ranks, int32_t *tensor, eng_error *error) {
    int32_t *all = malloc(sizeof *all * (size_t)trn_ranks_count(ranks));
    eng_status status = all ? trn_ranks_exchange(ranks, tensor, sizeof *tensor, all, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for what ranks have found");
    for (int32_t r = 0; status == ENG_OK && r < trn_ranks_count(ranks); r++)
        *tensor = all[r] > *tensor ? all[r] : *tensor;
    free(all);
    return status;
}

eng_status trn_optimizer_find_not_finite(trn_optimizer *optimizer, const float *block, int32_t *tensor,
                                         eng_error *error) {
    const eng_weights *weights = optimizer->weights;
    eng_status status = ENG_OK;
    *tensor = -1;
    for (int32_t i = 0; status == ENG_OK && i < optimizer->pieces; i++) {
        const trn_piece *piece = &optimizer->piece[i];
        double sum = 0;
        if (piece->tensor < *tensor)
            continue;
        kern_status launched = begin_squares(optimizer);
        if (launched == KERN_OK)
            launched = add_squares(
                optimizer, block + (weights->master[piece->tensor] - weights->masters) + piece->first, piece->count);
        status = read_squares(optimizer, launched, &sum, "looking for a value that is not finite", error);
        if (!isfinite(sum))
            *tensor = piece->tensor;
    }
    return status == ENG_OK ? latest(optimizer->blocks.ranks, tensor, error) : status;
}

// -------------------------------------------------------------------------------------------------------------- update

static kern_adamw_args adamw_arguments(const trn_optimizer *optimizer, const trn_piece *piece, double rate) {
    const eng_weights *weights = optimizer->weights;
    const trn_adamw *adamw = &optimizer->adamw;
    double update = (double)optimizer->updates;
    return (kern_adamw_args){.parameter.f = weights->master[piece->tensor] + piece->first,
                             .grad.f = weights->grad[piece->tensor] + piece->first,
                             .m.f = optimizer->m + piece->moment,
                             .v.f = optimizer->v + piece->moment,
                             .grad_scale.f = optimizer->scale,
                             .count = piece->count,
                             .lr = (float)rate,
                             .beta1 = (float)adamw->beta1,
                             .beta2 = (float)adamw->beta2,
                             .eps = (float)adamw->eps,
                             .weight_decay =
                                 weights->model->tensor[piece->tensor].decay ? (float)adamw->weight_decay : 0,
                             .correction1 = (float)(1 - pow((float)adamw->beta1, update)),
                             .correction2 = (float)(1 - pow((float)adamw->beta2, update))};
}

static bool is_trained(const trn_optimizer *optimizer, int32_t tensor) {
    const eng_model *model = optimizer->weights->model;
    return !optimizer->gate_alone || tensor == model->exit_gate || tensor == model->exit_bias;
}

// Updates this rank's part of the weights of a block, whose pieces begin with *next, and gathers the others.
static eng_status update_block(trn_optimizer *optimizer, int32_t block, int32_t *next, double rate, eng_error *error) {
    const trn_block *whole = &optimizer->blocks.block[block];
    kern_status status = KERN_OK;
    for (; status == KERN_OK && *next < optimizer->pieces && optimizer->piece[*next].block == block; ++*next) {
        const trn_piece *piece = &optimizer->piece[*next];
        kern_adamw_args arguments = adamw_arguments(optimizer, piece, rate);
        if (is_trained(optimizer, piece->tensor))
            status = kern_launch(optimizer->stream, KERN_OP_ADAMW, NULL, &arguments);
    }
    if (status != KERN_OK)
        return eng_fail_kernel(error, status, "updating the weights");
    return trn_ranks_gather(optimizer->blocks.ranks, optimizer->stream, optimizer->weights->masters + whole->first,
                            whole->count, error);
}

eng_status trn_optimizer_update(trn_optimizer *optimizer, double rate, eng_error *error) {
    trn_ranks *ranks = optimizer->blocks.ranks;
    kern_clip_scale_args clip = {
        .sum.p = optimizer->squares, .scale.f = optimizer->scale, .clip = (float)optimizer->adamw.clip};
    eng_status status =
        eng_fail_kernel(error, kern_launch(optimizer->stream, KERN_OP_CLIP_SCALE, NULL, &clip), "updating the weights");
    optimizer->updates++;
    int32_t next = 0;
    for (int32_t b = 0; status == ENG_OK && b < optimizer->blocks.count; b++)
        status = update_block(optimizer, b, &next, rate, error);
    if (status != ENG_OK || !ranks)
        return status;
    status = trn_ranks_join(ranks, optimizer->stream, error);
    return status == ENG_OK ? trn_ranks_wait(ranks, optimizer->stream, error) : status;
}

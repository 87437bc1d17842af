// SPDX-License-Identifier: Apache-2.0
// AdamW, gradient norm and clipping; see optimizer.h.
// The update is one launch a block, over a table of runs that stays the same; so is the norm. A process alone has one
// block. Whatever waits for the device waits as one of the ranks.
#include "trainer/optimizer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"
#include "trainer/progress.h"

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

// ---------------------------------------------------------------------------------------------------------------- runs

static bool is_trained(const trn_optimizer *optimizer, int32_t tensor) {
    const eng_model *model = optimizer->weights->model;
    return !optimizer->adamw.gate_alone || tensor == model->exit_gate || tensor == model->exit_bias;
}

static size_t count_runs(trn_optimizer *optimizer) {
    size_t runs = 0;
    for (int32_t i = 0; i < optimizer->pieces; i++) {
        trn_piece *piece = &optimizer->piece[i];
        const int64_t own = (piece->count + KERN_ADAMW_RUN - 1) / KERN_ADAMW_RUN;
        piece->runs = is_trained(optimizer, piece->tensor) ? (int32_t)own : 0;
        runs += (size_t)piece->runs;
    }
    return runs;
}

static kern_adamw_run run_of(const trn_optimizer *optimizer, const trn_piece *piece, int32_t run) {
    const eng_weights *weights = optimizer->weights;
    const int64_t at = (int64_t)run * KERN_ADAMW_RUN, left = piece->count - at, first = piece->first + at;
    const bool decays = weights->model->tensor[piece->tensor].decay;
    return (kern_adamw_run){.parameter = weights->master[piece->tensor] + first,
                            .grad = weights->grad[piece->tensor] + first,
                            .m = optimizer->m + piece->moment + at,
                            .v = optimizer->v + piece->moment + at,
                            .rest = optimizer->rest ? optimizer->rest + piece->moment + at : NULL,
                            .first = weights->master[piece->tensor] - weights->masters + first,
                            .count = (int32_t)(left < KERN_ADAMW_RUN ? left : KERN_ADAMW_RUN),
                            .weight_decay = decays ? (float)optimizer->adamw.weight_decay : 0};
}

static kern_status send_runs(trn_optimizer *optimizer, size_t runs, kern_adamw_run *host) {
    size_t next = 0;
    for (int32_t i = 0; i < optimizer->pieces; i++)
        for (int32_t run = 0; run < optimizer->piece[i].runs; run++)
            host[next++] = run_of(optimizer, &optimizer->piece[i], run);
    kern_status status = kern_upload(optimizer->stream, optimizer->run, host, runs * sizeof *host);
    return status == KERN_OK ? kern_synchronize(optimizer->stream) : status;
}

static kern_status make_runs(trn_optimizer *optimizer) {
    const size_t runs = count_runs(optimizer), bytes = (runs + 1) * sizeof *optimizer->run; // never an empty one
    kern_adamw_run *host = malloc(bytes);
    void *device = NULL;
    kern_status status = host ? kern_alloc(optimizer->weights->device, bytes, &device) : KERN_NO_MEMORY;
    optimizer->run = device;
    if (status == KERN_OK)
        status = send_runs(optimizer, runs, host);
    free(host);
    return status;
}

// --------------------------------------------------------------------------------------------------------------- whole

static kern_square_sum_args square_arguments(const trn_optimizer *optimizer, const float *x, int64_t count) {
    return (kern_square_sum_args){.x.f = (float *)x, .sum.p = &optimizer->norm->squares, .count = count};
}

static kern_status allocate(trn_optimizer *optimizer) {
    kern_device *device = optimizer->weights->device;
    const size_t moments = sizeof(float) * (size_t)optimizer->moments;
    void *m = NULL, *v = NULL, *rest = NULL, *norm = NULL, *told = NULL;
    kern_status made = kern_alloc(device, moments, &m);
    if (made == KERN_OK)
        made = kern_alloc(device, moments, &v);
    if (made == KERN_OK && optimizer->adamw.rounding == KERN_ROUND_COMPENSATED)
        made = kern_alloc(device, moments, &rest);
    if (made == KERN_OK)
        made = kern_alloc(device, sizeof *optimizer->norm, &norm);
    if (made == KERN_OK)
        made = kern_alloc_host(device, sizeof *optimizer->told, &told);
    optimizer->m = m, optimizer->v = v, optimizer->rest = rest, optimizer->norm = norm, optimizer->told = told;
    if (made == KERN_OK)
        made = kern_event_create(device, &optimizer->known);
    if (made != KERN_OK)
        return made;
    kern_square_sum_args squares = square_arguments(optimizer, optimizer->weights->grads, optimizer->weights->count);
    made = kern_reserve(device, KERN_OP_SQUARE_SUM, &squares);
    return made == KERN_OK ? make_runs(optimizer) : made;
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
    kern_free(device, optimizer->rest);
    kern_free(device, optimizer->run);
    kern_free(device, optimizer->norm);
    kern_free_host(device, optimizer->told);
    kern_event_free(optimizer->known);
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
    return kern_zero(optimizer->stream, &optimizer->norm->squares, sizeof optimizer->norm->squares);
}

static kern_status add_squares(const trn_optimizer *optimizer, const float *x, int64_t count) {
    kern_square_sum_args squares = square_arguments(optimizer, x, count);
    return kern_launch(optimizer->stream, KERN_OP_SQUARE_SUM, NULL, &squares);
}

static eng_status read_squares(trn_optimizer *optimizer, double *sum, eng_error *error) {
    kern_status read = kern_download(optimizer->stream, sum, &optimizer->norm->squares, sizeof *sum);
    eng_status status = eng_fail_kernel(error, read, "reading a sum of squares");
    return status == ENG_OK ? trn_ranks_wait(optimizer->blocks.ranks, optimizer->stream, error) : status;
}

// Every rank adds what all ranks have in the ranks' order, and so gets the same bits.
static eng_status add_ranks(trn_optimizer *optimizer, eng_error *error) {
    trn_ranks *ranks = optimizer->blocks.ranks;
    double own = 0, *sum = &optimizer->told->squares, *all = malloc(sizeof *all * (size_t)trn_ranks_count(ranks));
    eng_status status =
        all ? read_squares(optimizer, &own, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for the norm");
    if (status == ENG_OK)
        status = trn_ranks_exchange(ranks, &own, sizeof own, all, error);
    *sum = 0;
    for (int32_t r = 0; status == ENG_OK && r < trn_ranks_count(ranks); r++)
        *sum += all[r];
    free(all);
    if (status != ENG_OK)
        return status;
    kern_status sent = kern_upload(optimizer->stream, &optimizer->norm->squares, sum, sizeof *sum);
    return eng_fail_kernel(error, sent, "adding the norms of ranks");
}

// The scale from the squares, and both to the host.
static kern_status finish_norm(trn_optimizer *optimizer) {
    kern_stream *stream = optimizer->stream;
    const kern_clip_scale_args clip = {
        .sum.p = &optimizer->norm->squares, .scale.f = &optimizer->norm->scale, .clip = (float)optimizer->adamw.clip};
    kern_status status = kern_launch(stream, KERN_OP_CLIP_SCALE, NULL, &clip);
    if (status == KERN_OK)
        status = kern_download(stream, optimizer->told, optimizer->norm, sizeof *optimizer->told);
    return status == KERN_OK ? kern_event_record(stream, optimizer->known) : status;
}

eng_status trn_optimizer_norm(trn_optimizer *optimizer, eng_error *error) {
    static const char doing[] = "computing the gradient's norm";
    const trn_blocks *blocks = &optimizer->blocks;
    eng_status status = trn_ranks_join(blocks->ranks, optimizer->stream, error);
    if (status != ENG_OK)
        return status;
    kern_status launched = begin_squares(optimizer);
    for (int32_t b = 0; launched == KERN_OK && b < blocks->count; b++) {
        const trn_part part = trn_blocks_own(blocks, b);
        launched = add_squares(optimizer, optimizer->weights->grads + part.first, part.count);
    }
    status = eng_fail_kernel(error, launched, doing);
    if (status == ENG_OK && blocks->ranks)
        status = add_ranks(optimizer, error);
    return status == ENG_OK ? eng_fail_kernel(error, finish_norm(optimizer), doing) : status;
}

eng_status trn_optimizer_outcome(trn_optimizer *optimizer, double *norm, bool *usable, eng_error *error) {
    eng_status status = eng_fail_kernel(error, kern_event_wait(optimizer->known), "reading the gradient's norm");
    *norm = trn_unsigned_nan(sqrt(optimizer->told->squares));
    *usable = status == ENG_OK && !isnan(optimizer->told->scale);
    optimizer->updates += *usable && optimizer->updating;
    optimizer->updating = false;
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
        status = eng_fail_kernel(error, launched, "looking for a value that is not finite");
        if (status == ENG_OK)
            status = read_squares(optimizer, &sum, error);
        if (!isfinite(sum))
            *tensor = piece->tensor;
    }
    return status == ENG_OK ? latest(optimizer->blocks.ranks, tensor, error) : status;
}

// -------------------------------------------------------------------------------------------------------------- update

static kern_adamw_args adamw_arguments(const trn_optimizer *optimizer, double rate) {
    const trn_adamw *adamw = &optimizer->adamw;
    const int64_t number = optimizer->updates + 1;
    const double update = (double)number;
    return (kern_adamw_args){.run.p = optimizer->run,
                             .grad_scale.f = &optimizer->norm->scale,
                             .lr = (float)rate,
                             .beta1 = (float)adamw->beta1,
                             .beta2 = (float)adamw->beta2,
                             .eps = (float)adamw->eps,
                             .correction1 = (float)(1 - pow((float)adamw->beta1, update)),
                             .correction2 = (float)(1 - pow((float)adamw->beta2, update)),
                             .rounding = (int32_t)adamw->rounding,
                             .update = (uint32_t)number,
                             .seed = adamw->seed};
}

// Updates this rank's part of the weights of a block, whose pieces begin with *next, and gathers the others. arguments:
// its runs begin where those of the block before have ended.
static eng_status update_block(trn_optimizer *optimizer, int32_t block, int32_t *next, kern_adamw_args *arguments,
                               eng_error *error) {
    const trn_block *whole = &optimizer->blocks.block[block];
    arguments->runs = 0, arguments->count = 0;
    for (; *next < optimizer->pieces && optimizer->piece[*next].block == block; ++*next) {
        const trn_piece *piece = &optimizer->piece[*next];
        arguments->runs += piece->runs;
        arguments->count += piece->runs > 0 ? piece->count : 0;
    }
    kern_status status = kern_launch(optimizer->stream, KERN_OP_ADAMW, NULL, arguments);
    arguments->run.p = (kern_adamw_run *)arguments->run.p + arguments->runs;
    if (status != KERN_OK)
        return eng_fail_kernel(error, status, "updating the weights");
    return trn_ranks_gather(optimizer->blocks.ranks, optimizer->stream, optimizer->weights->masters + whole->first,
                            whole->count, error);
}

eng_status trn_optimizer_update(trn_optimizer *optimizer, double rate, eng_error *error) {
    trn_ranks *ranks = optimizer->blocks.ranks;
    kern_adamw_args arguments = adamw_arguments(optimizer, rate);
    eng_status status = ENG_OK;
    int32_t next = 0;
    for (int32_t b = 0; status == ENG_OK && b < optimizer->blocks.count; b++)
        status = update_block(optimizer, b, &next, &arguments, error);
    optimizer->updating = status == ENG_OK;
    if (status != ENG_OK || !ranks)
        return status;
    status = trn_ranks_join(ranks, optimizer->stream, error);
    return status == ENG_OK ? trn_ranks_wait(ranks, optimizer->stream, error) : status;
}

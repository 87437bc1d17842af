// SPDX-License-Identifier: Apache-2.0
// Cutting parameters into blocks; see blocks.h.
// Their borders follow from the tensor table alone, so that all ranks have the same. Links want large blocks, and what
// is left to do when backward ends wants small ones: an eighth of the model, up to 32 MiB.
#include "trainer/blocks.h"

#include <stdlib.h>
#include <string.h>

enum { LEAST_FLOATS = 4096, MOST_FLOATS = 8 << 20, PARTS = 8 };

static int64_t size_of(const eng_weights *weights, const trn_ranks *ranks) {
    int64_t floats = weights->count / PARTS;
    if (trn_ranks_count(ranks) == 1)
        return weights->count;
    return floats < LEAST_FLOATS ? LEAST_FLOATS : floats > MOST_FLOATS ? MOST_FLOATS : floats;
}

static int64_t end_of(const eng_weights *weights, int32_t tensor) {
    const bool last = tensor + 1 == weights->model->tensors;
    return last ? weights->count : weights->master[tensor + 1] - weights->masters;
}

static int earlier_first(const void *left, const void *right) {
    const trn_block *a = left, *b = right;
    if (a->final != b->final)
        return a->final < b->final ? -1 : 1;
    return a->first < b->first ? 1 : -1;
}

eng_status trn_blocks_create(const eng_weights *weights, const kern_plan *plan, trn_ranks *ranks, trn_blocks *out,
                             eng_error *error) {
    const int64_t floats = size_of(weights, ranks);
    trn_blocks blocks = {.block = calloc((size_t)weights->model->tensors, sizeof *blocks.block), .ranks = ranks};
    trn_block open = {0};
    if (!blocks.block)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the blocks of the parameters");
    for (int32_t i = 0; i < weights->model->tensors; i++) {
        const size_t final = plan ? kern_plan_last_use(plan, kern_ref(KERN_CLASS_GRAD, (uint64_t)i)) : 0;
        open.count = end_of(weights, i) - open.first;
        open.final = final > open.final ? final : open.final;
        if (open.count >= floats || i + 1 == weights->model->tensors) {
            blocks.block[blocks.count++] = open;
            open = (trn_block){.first = open.first + open.count};
        }
    }
    qsort(blocks.block, (size_t)blocks.count, sizeof *blocks.block, earlier_first);
    *out = blocks;
    return ENG_OK;
}

void trn_blocks_free(trn_blocks *blocks) {
    free(blocks->block);
    memset(blocks, 0, sizeof *blocks);
}

trn_part trn_blocks_own(const trn_blocks *blocks, int32_t block) {
    const trn_block *whole = &blocks->block[block];
    trn_part part = trn_rank_part(whole->count, trn_ranks_own(blocks->ranks), trn_ranks_count(blocks->ranks));
    part.first += whole->first;
    return part;
}

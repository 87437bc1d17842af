// SPDX-License-Identifier: Apache-2.0
// A model's parameters, laid out one behind the other (engine/checkpoint.h), cut into blocks: what ranks sum, update
// and gather at once. A block begins and ends at tensors.
//
// Of each block every rank owns a part (trn_rank_part): it alone has the moments of those weights and updates them.
#ifndef TRAINER_BLOCKS_H
#define TRAINER_BLOCKS_H

#include "engine/checkpoint.h"
#include "trainer/ranks.h"

typedef struct trn_block {
    int64_t first, count; // floats of weights->masters and weights->grads
    size_t final;         // operations of the training plan after which nothing is added to its gradients
} trn_block;

typedef struct trn_blocks {
    trn_block *block; // in the order in which backward ends with them
    int32_t count;
    trn_ranks *ranks; // borrowed
} trn_blocks;

// One block where the ranks are one (plan may be NULL then), else blocks of about a size that suits their links.
ENG_CHECKED eng_status trn_blocks_create(const eng_weights *weights, const kern_plan *plan, trn_ranks *ranks,
                                         trn_blocks *out, eng_error *error);
void trn_blocks_free(trn_blocks *blocks);
// This rank's part of a block, in floats of the whole.
trn_part trn_blocks_own(const trn_blocks *blocks, int32_t block);

#endif

// SPDX-License-Identifier: Apache-2.0
// Learns the merges of byte-pair encoding from counted pieces (Sennrich, Haddow, Birch, "Neural Machine Translation of
// Rare Words with Subword Units", 2016, over bytes).
//
// The result depends on the counts alone, not on the order of the pieces: of equally frequent pairs the one with the
// lowest ids (left, then right) is merged first. One thread; memory grows with the distinct pieces.
#ifndef TRAINER_MERGE_LEARNER_H
#define TRAINER_MERGE_LEARNER_H

#include <stddef.h>
#include <stdint.h>

#include "trainer/piece_map.h"

typedef struct trn_merge {
    int32_t left, right, result;
} trn_merge;

typedef struct trn_learned {
    int32_t first_byte;   // id of byte 0; the other bytes follow, the learned tokens after byte 255
    trn_piece_map tokens; // in the order of ids from first_byte on
    trn_merge *merges;    // in the order in which they were learned, one for each token
    size_t merge_count;
} trn_learned;

typedef struct trn_learn_options {
    int32_t first_byte;     // id of byte 0
    int32_t vocab_size;     // all ids together, those before first_byte included
    uint64_t min_count;     // rarer pairs are not merged
    size_t max_token_bytes; // no longer token is made
    void (*progress)(void *context, uint64_t done, uint64_t total, const char *text); // may be NULL
    void *context;
} trn_learn_options;

// pieces: values are the counts. ENG_INVALID: the pieces give fewer tokens than vocab_size. *learned is the caller's
// (trn_learned_free), also after a failure.
ENG_CHECKED eng_status trn_learn_merges(const trn_piece_map *pieces, const trn_learn_options *options,
                                        trn_learned *learned, eng_error *error);
void trn_learned_free(trn_learned *learned);

#endif

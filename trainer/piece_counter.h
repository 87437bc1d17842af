// SPDX-License-Identifier: Apache-2.0
// Counts the pieces of text files: what a tokenizer is learned from.
//
// Files are read in blocks and handed over document by document; long documents are cut at line ends. One thread.
#ifndef TRAINER_PIECE_COUNTER_H
#define TRAINER_PIECE_COUNTER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/pretokenize.h"
#include "trainer/piece_map.h"

typedef struct trn_piece_counter {
    const eng_pretokenizer *pretokenizer; // borrowed
    const char *separator;                // a line that ends a document; borrowed
    size_t max_pieces;                    // distinct pieces
    void (*progress)(void *context, uint64_t done, uint64_t total, const char *text); // may be NULL
    void *context;
    uint64_t done, total; // bytes, for progress
    trn_piece_map pieces; // the result: piece -> how often; the caller's (trn_piece_map_free)
} trn_piece_counter;

// Adds one file. When there are more than max_pieces, the rarest are dropped until at most half as many are left.
ENG_CHECKED eng_status trn_count_file(trn_piece_counter *counter, const char *path, eng_error *error);

#endif

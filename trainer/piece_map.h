// SPDX-License-Identifier: Apache-2.0
// Byte strings to 64-bit values: the counts of pieces in a corpus, the ids of tokens being made.
//
// Open addressing over an arena of keys, kept at most half full. A zeroed struct is an empty map. One thread.
#ifndef TRAINER_PIECE_MAP_H
#define TRAINER_PIECE_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "engine/buffer.h"
#include "engine/status.h"

typedef struct trn_piece {
    size_t offset; // of the key in keys
    uint32_t length;
    uint64_t value;
} trn_piece;

typedef struct trn_piece_map {
    trn_piece *pieces; // in the order of their first appearance
    size_t count, capacity;
    uint32_t *slots; // 1 + index of a piece, 0: free
    size_t slot_count;
    eng_buffer keys;
} trn_piece_map;

// The piece of that key, a new one of value 0 if there was none; valid until the next call. NULL: out of memory.
trn_piece *trn_piece_map_at(trn_piece_map *map, const char *key, size_t length);
// Removes the pieces whose value is below least.
ENG_CHECKED eng_status trn_piece_map_prune(trn_piece_map *map, uint64_t least);
void trn_piece_map_free(trn_piece_map *map); // leaves an empty map

#endif

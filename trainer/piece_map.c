// SPDX-License-Identifier: Apache-2.0
// The map behind piece counting: a table of indices over an array of pieces over an arena of keys.
//
// Indices are 32 bits: at most 2^31 pieces, more is ENG_NO_MEMORY. Dropping pieces keeps the order of the others, so
// what is kept does not depend on the table's size. One thread.
#include "trainer/piece_map.h"

#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"

static size_t find_slot(const trn_piece_map *map, const char *key, size_t length) {
    size_t mask = map->slot_count - 1;
    size_t slot = (size_t)eng_hash_bytes(key, length) & mask;
    for (;; slot = (slot + 1) & mask) {
        uint32_t index = map->slots[slot];
        if (index == 0)
            return slot;
        const trn_piece *piece = &map->pieces[index - 1];
        if (piece->length == length && memcmp(map->keys.bytes + piece->offset, key, length) == 0)
            return slot;
    }
}

static eng_status rebuild_slots(trn_piece_map *map, size_t slot_count) {
    uint32_t *slots = calloc(slot_count, sizeof *slots);
    if (!slots)
        return ENG_NO_MEMORY;
    free(map->slots);
    map->slots = slots;
    map->slot_count = slot_count;
    for (size_t i = 0; i < map->count; i++) {
        const trn_piece *piece = &map->pieces[i];
        map->slots[find_slot(map, map->keys.bytes + piece->offset, piece->length)] = (uint32_t)i + 1;
    }
    return ENG_OK;
}

static eng_status make_room(trn_piece_map *map) {
    if (map->count == map->capacity) {
        size_t capacity = map->capacity ? map->capacity * 2 : 1024;
        if (capacity > INT32_MAX)
            return ENG_NO_MEMORY;
        trn_piece *pieces = realloc(map->pieces, capacity * sizeof *pieces);
        if (!pieces)
            return ENG_NO_MEMORY;
        map->pieces = pieces;
        map->capacity = capacity;
    }
    if (map->count * 2 < map->slot_count)
        return ENG_OK;
    return rebuild_slots(map, map->slot_count ? map->slot_count * 2 : 4096);
}

trn_piece *trn_piece_map_at(trn_piece_map *map, const char *key, size_t length) {
    if (make_room(map) != ENG_OK || length > UINT32_MAX)
        return NULL;
    size_t slot = find_slot(map, key, length);
    if (map->slots[slot])
        return &map->pieces[map->slots[slot] - 1];
    size_t offset = map->keys.length;
    if (eng_buffer_append(&map->keys, key, length) != ENG_OK)
        return NULL;
    trn_piece *piece = &map->pieces[map->count++];
    *piece = (trn_piece){.offset = offset, .length = (uint32_t)length};
    map->slots[slot] = (uint32_t)map->count;
    return piece;
}

eng_status trn_piece_map_prune(trn_piece_map *map, uint64_t least) {
    size_t kept = 0, used = 0;
    for (size_t i = 0; i < map->count; i++) {
        trn_piece piece = map->pieces[i];
        if (piece.value < least)
            continue;
        memmove(map->keys.bytes + used, map->keys.bytes + piece.offset, piece.length);
        piece.offset = used;
        used += piece.length;
        map->pieces[kept++] = piece;
    }
    map->count = kept;
    map->keys.length = used;
    return map->slot_count ? rebuild_slots(map, map->slot_count) : ENG_OK;
}

void trn_piece_map_free(trn_piece_map *map) {
    free(map->pieces);
    free(map->slots);
    eng_buffer_free(&map->keys);
    *map = (trn_piece_map){0};
}

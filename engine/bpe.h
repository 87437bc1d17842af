// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one piece of text: the merge of lowest rank first, of equal ones the leftmost.
//
// Symbols are token ids. A byte-level vocabulary starts from the piece's bytes; a character-level one from its
// characters, or from their bytes where the vocabulary lacks a character (byte fallback). A short piece is merged by
// scanning, a long one by a heap of candidate merges over a linked list: n log n for any piece. Immutable once
// finished, shared by threads; working memory belongs to a thread.
#ifndef ENGINE_BPE_H
#define ENGINE_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/buffer.h"
#include "engine/status.h"

typedef struct eng_bpe eng_bpe;

typedef struct eng_bpe_options {
    bool byte_level;       // otherwise by characters
    bool ignore_merges;    // a piece that is a token is that token, whatever the merges say
    size_t tokens, merges; // how many will be added at most
} eng_bpe_options;

ENG_CHECKED eng_status eng_bpe_create(const eng_bpe_options *options, eng_bpe **out);
void eng_bpe_free(eng_bpe *bpe);

// A token's bytes as they stand in a piece; no two tokens may have the same.
ENG_CHECKED eng_status eng_bpe_add_token(eng_bpe *bpe, const char *bytes, size_t length, int32_t id);
// The token of a single byte (byte-level: of the byte; character-level: its fallback).
void eng_bpe_set_byte(eng_bpe *bpe, uint8_t byte, int32_t id);
// A merge of two tokens; the lower rank goes first. Of one pair the last that is added counts.
void eng_bpe_add_merge(eng_bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t result);
// The last call of the building.
ENG_CHECKED eng_status eng_bpe_finish(eng_bpe *bpe);

// What encoding did, for tests of its cost: merges made, merge rules looked up, steps inside the heap.
typedef struct eng_bpe_work {
    uint64_t merges, lookups, heap_steps;
} eng_bpe_work;

typedef struct eng_bpe_memory {
    int32_t *symbols; // -1: merged into the one before
    uint32_t *previous, *next;
    uint64_t *heap; // rank << 32 | position
    size_t capacity, heap_count;
    uint8_t missing; // after ENG_UNSUPPORTED: the byte
    eng_bpe_work work;
} eng_bpe_memory; // zeroed: empty

void eng_bpe_memory_free(eng_bpe_memory *memory);

// Appends the ids of a piece of valid UTF-8 (byte-level: of any bytes). ENG_TOO_LONG: 2^31 bytes or more;
// ENG_UNSUPPORTED: the vocabulary has no token for one of the bytes.
ENG_CHECKED eng_status eng_bpe_encode(const eng_bpe *bpe, eng_bpe_memory *memory, const char *piece, size_t length,
                                      eng_ids *ids);

#endif

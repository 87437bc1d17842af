// SPDX-License-Identifier: Apache-2.0
// Merge rules and tokens in open-addressed tables, and the two ways of merging.
//
// Most pieces of ordinary text are whole tokens. Which tokens the merges build from their own bytes is found once, when
// the vocabulary is finished; such a piece then costs one lookup. Both ways of merging give the same ids: they always
// apply the lowest (rank, position). Reading only after eng_bpe_finish.
#include "engine/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"
#include "engine/utf8.h"

enum { SHORT_PIECE = 24 };
#define NO_RANK UINT32_MAX
#define END UINT32_MAX

typedef struct token {
    size_t offset; // in bytes
    uint32_t length;
    int32_t id;
    bool whole; // a piece of these bytes encodes to this one id
} token;

typedef struct merge {
    uint64_t key;  // left << 32 | right
    uint32_t rank; // NO_RANK: free slot
    int32_t result;
} merge;

struct eng_bpe {
    bool byte_level, ignore_merges;
    eng_buffer bytes;
    token *tokens;
    size_t token_count, longest;
    uint32_t *token_slots; // 1 + index of a token
    size_t token_mask;
    merge *merges;
    size_t merge_mask;
    int32_t byte_ids[256];
};

// A power of two of which at most half will be used.
static size_t table_size(size_t entries) {
    size_t size = 16;
    while (size < entries * 2)
        size *= 2;
    return size;
}

eng_status eng_bpe_create(const eng_bpe_options *options, eng_bpe **out) {
    size_t token_slots = table_size(options->tokens), merge_slots = table_size(options->merges);
    eng_bpe *bpe = calloc(1, sizeof *bpe);
    if (!bpe)
        return ENG_NO_MEMORY;
    bpe->byte_level = options->byte_level;
    bpe->ignore_merges = options->ignore_merges;
    bpe->tokens = calloc(options->tokens + 1, sizeof *bpe->tokens);
    bpe->token_slots = calloc(token_slots, sizeof *bpe->token_slots);
    bpe->token_mask = token_slots - 1;
    bpe->merges = calloc(merge_slots, sizeof *bpe->merges);
    bpe->merge_mask = merge_slots - 1;
    if (!bpe->tokens || !bpe->token_slots || !bpe->merges) {
        eng_bpe_free(bpe);
        return ENG_NO_MEMORY;
    }
    for (size_t i = 0; i < merge_slots; i++)
        bpe->merges[i].rank = NO_RANK;
    for (int i = 0; i < 256; i++)
        bpe->byte_ids[i] = -1;
    *out = bpe;
    return ENG_OK;
}

void eng_bpe_free(eng_bpe *bpe) {
    if (!bpe)
        return;
    eng_buffer_free(&bpe->bytes);
    free(bpe->tokens);
    free(bpe->token_slots);
    free(bpe->merges);
    free(bpe);
}

static size_t token_slot(const eng_bpe *bpe, const char *bytes, size_t length) {
    size_t slot = (size_t)eng_hash_bytes(bytes, length) & bpe->token_mask;
    for (;; slot = (slot + 1) & bpe->token_mask) {
        uint32_t index = bpe->token_slots[slot];
        if (index == 0)
            return slot;
        const token *t = &bpe->tokens[index - 1];
        if (t->length == length && memcmp(bpe->bytes.bytes + t->offset, bytes, length) == 0)
            return slot;
    }
}

static const token *find_token(const eng_bpe *bpe, const char *bytes, size_t length) {
    if (length > bpe->longest)
        return NULL;
    uint32_t index = bpe->token_slots[token_slot(bpe, bytes, length)];
    return index ? &bpe->tokens[index - 1] : NULL;
}

static merge *merge_slot(const eng_bpe *bpe, uint64_t key) {
    size_t slot = (size_t)eng_hash_mix(key) & bpe->merge_mask;
    while (bpe->merges[slot].rank != NO_RANK && bpe->merges[slot].key != key)
        slot = (slot + 1) & bpe->merge_mask;
    return &bpe->merges[slot];
}

static merge find_merge(const eng_bpe *bpe, eng_bpe_memory *memory, int32_t left, int32_t right) {
    memory->work.lookups++;
    return *merge_slot(bpe, (uint64_t)(uint32_t)left << 32 | (uint32_t)right);
}

// ---- building -------------------------------------------------------------------------------------------------------

eng_status eng_bpe_add_token(eng_bpe *bpe, const char *bytes, size_t length, int32_t id) {
    size_t slot = token_slot(bpe, bytes, length), offset = bpe->bytes.length;
    eng_status status = eng_buffer_append(&bpe->bytes, bytes, length);
    if (status != ENG_OK)
        return status;
    bpe->tokens[bpe->token_count++] = (token){.offset = offset, .length = (uint32_t)length, .id = id};
    bpe->token_slots[slot] = (uint32_t)bpe->token_count;
    if (length > bpe->longest)
        bpe->longest = length;
    return ENG_OK;
}

void eng_bpe_set_byte(eng_bpe *bpe, uint8_t byte, int32_t id) {
    bpe->byte_ids[byte] = id;
}

void eng_bpe_add_merge(eng_bpe *bpe, int32_t left, int32_t right, uint32_t rank, int32_t result) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    *merge_slot(bpe, key) = (merge){.key = key, .rank = rank, .result = result};
}

static eng_status merge_piece(const eng_bpe *bpe, eng_bpe_memory *memory, const char *piece, size_t length,
                              eng_ids *ids);

eng_status eng_bpe_finish(eng_bpe *bpe) {
    eng_bpe_memory memory = {0};
    eng_ids ids = {0};
    eng_status status = ENG_OK;
    for (size_t i = 0; i < bpe->token_count && status == ENG_OK; i++) {
        token *t = &bpe->tokens[i];
        ids.count = 0;
        status = merge_piece(bpe, &memory, bpe->bytes.bytes + t->offset, t->length, &ids);
        t->whole = bpe->ignore_merges || (status == ENG_OK && ids.count == 1 && ids.ids[0] == t->id);
        if (status == ENG_UNSUPPORTED)
            status = ENG_OK; // a token that no text reaches
    }
    eng_ids_free(&ids);
    eng_bpe_memory_free(&memory);
    return status;
}

// ---- encoding -------------------------------------------------------------------------------------------------------

void eng_bpe_memory_free(eng_bpe_memory *memory) {
    free(memory->symbols);
    free(memory->previous);
    free(memory->next);
    free(memory->heap);
    *memory = (eng_bpe_memory){0};
}

static eng_status reserve(eng_bpe_memory *memory, size_t count) {
    if (memory->capacity >= count)
        return ENG_OK;
    if (count < memory->capacity * 2)
        count = memory->capacity * 2;
    // A merge takes one candidate from the heap and adds at most two: never more than 2 n.
    int32_t *symbols = realloc(memory->symbols, count * sizeof *symbols);
    memory->symbols = symbols ? symbols : memory->symbols;
    uint32_t *previous = realloc(memory->previous, count * sizeof *previous);
    memory->previous = previous ? previous : memory->previous;
    uint32_t *next = realloc(memory->next, count * sizeof *next);
    memory->next = next ? next : memory->next;
    uint64_t *heap = realloc(memory->heap, 2 * count * sizeof *heap);
    memory->heap = heap ? heap : memory->heap;
    if (!symbols || !previous || !next || !heap)
        return ENG_NO_MEMORY;
    memory->capacity = count;
    return ENG_OK;
}

// Writes the symbols of the piece's bytes; false: one has none.
static bool split_bytes(const eng_bpe *bpe, eng_bpe_memory *memory, const char *bytes, size_t length,
                        int32_t *symbols) {
    for (size_t i = 0; i < length; i++) {
        symbols[i] = bpe->byte_ids[(uint8_t)bytes[i]];
        if (symbols[i] < 0) {
            memory->missing = (uint8_t)bytes[i];
            return false;
        }
    }
    return true;
}

// The first symbols of a piece, at most one a byte.
static eng_status split_symbols(const eng_bpe *bpe, eng_bpe_memory *memory, const char *piece, size_t length,
                                size_t *count) {
    int32_t *symbols = memory->symbols;
    *count = length;
    if (bpe->byte_level)
        return split_bytes(bpe, memory, piece, length, symbols) ? ENG_OK : ENG_UNSUPPORTED;
    *count = 0;
    for (size_t at = 0; at < length;) {
        uint32_t code;
        size_t size = eng_utf8_decode(piece + at, length - at, &code);
        if (size == 0)
            return ENG_INVALID;
        const token *whole = find_token(bpe, piece + at, size);
        if (whole)
            symbols[(*count)++] = whole->id;
        else if (split_bytes(bpe, memory, piece + at, size, symbols + *count))
            *count += size;
        else
            return ENG_UNSUPPORTED;
        at += size;
    }
    return ENG_OK;
}

static size_t merge_short(const eng_bpe *bpe, eng_bpe_memory *memory, int32_t *symbols, size_t count) {
    merge candidates[SHORT_PIECE]; // of each symbol with the next
    for (size_t i = 0; i + 1 < count; i++)
        candidates[i] = find_merge(bpe, memory, symbols[i], symbols[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            if (candidates[i].rank < candidates[best].rank)
                best = i;
        }
        if (candidates[best].rank == NO_RANK)
            break;
        memory->work.merges++;
        symbols[best] = candidates[best].result;
        count--;
        size_t behind = count - best - 1; // symbols behind the merged one
        memmove(symbols + best + 1, symbols + best + 2, behind * sizeof *symbols);
        if (behind > 0)
            memmove(candidates + best + 1, candidates + best + 2, (behind - 1) * sizeof *candidates);
        if (behind > 0)
            candidates[best] = find_merge(bpe, memory, symbols[best], symbols[best + 1]);
        if (best > 0)
            candidates[best - 1] = find_merge(bpe, memory, symbols[best - 1], symbols[best]);
    }
    return count;
}

static void push(eng_bpe_memory *memory, uint64_t candidate) {
    size_t at = memory->heap_count++;
    for (; at > 0 && candidate < memory->heap[(at - 1) / 2]; at = (at - 1) / 2) {
        memory->heap[at] = memory->heap[(at - 1) / 2];
        memory->work.heap_steps++;
    }
    memory->heap[at] = candidate;
}

static uint64_t pop(eng_bpe_memory *memory) {
    uint64_t top = memory->heap[0], last = memory->heap[--memory->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < memory->heap_count; at = child) {
        if (child + 1 < memory->heap_count && memory->heap[child + 1] < memory->heap[child])
            child++;
        if (last <= memory->heap[child])
            break;
        memory->heap[at] = memory->heap[child];
        memory->work.heap_steps++;
    }
    memory->heap[at] = last;
    return top;
}

static void push_candidate(const eng_bpe *bpe, eng_bpe_memory *memory, uint32_t at) {
    if (at == END || memory->next[at] == END)
        return;
    merge found = find_merge(bpe, memory, memory->symbols[at], memory->symbols[memory->next[at]]);
    if (found.rank != NO_RANK)
        push(memory, (uint64_t)found.rank << 32 | at);
}

static size_t merge_long(const eng_bpe *bpe, eng_bpe_memory *memory, size_t count) {
    memory->heap_count = 0;
    for (size_t i = 0; i < count; i++) {
        memory->previous[i] = i > 0 ? (uint32_t)i - 1 : END;
        memory->next[i] = i + 1 < count ? (uint32_t)i + 1 : END;
    }
    for (size_t i = 0; i < count; i++)
        push_candidate(bpe, memory, (uint32_t)i);
    while (memory->heap_count) {
        uint64_t candidate = pop(memory);
        uint32_t at = (uint32_t)candidate, next = memory->next[at];
        if (memory->symbols[at] < 0 || next == END)
            continue;
        merge found = find_merge(bpe, memory, memory->symbols[at], memory->symbols[next]);
        if (found.rank != candidate >> 32)
            continue; // one of the two has been merged since
        memory->work.merges++;
        memory->symbols[at] = found.result;
        memory->symbols[next] = -1;
        memory->next[at] = memory->next[next];
        if (memory->next[at] != END)
            memory->previous[memory->next[at]] = at;
        push_candidate(bpe, memory, at);
        push_candidate(bpe, memory, memory->previous[at]);
    }
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (memory->symbols[i] >= 0)
            memory->symbols[kept++] = memory->symbols[i];
    }
    return kept;
}

static eng_status merge_piece(const eng_bpe *bpe, eng_bpe_memory *memory, const char *piece, size_t length,
                              eng_ids *ids) {
    if (length > INT32_MAX)
        return ENG_TOO_LONG;
    eng_status status = reserve(memory, length);
    if (status != ENG_OK)
        return status;
    size_t count;
    status = split_symbols(bpe, memory, piece, length, &count);
    if (status != ENG_OK)
        return status;
    count = count <= SHORT_PIECE ? merge_short(bpe, memory, memory->symbols, count) : merge_long(bpe, memory, count);
    status = eng_ids_reserve(ids, count);
    if (status != ENG_OK)
        return status;
    memcpy(ids->ids + ids->count, memory->symbols, count * sizeof *ids->ids);
    ids->count += count;
    return ENG_OK;
}

eng_status eng_bpe_encode(const eng_bpe *bpe, eng_bpe_memory *memory, const char *piece, size_t length, eng_ids *ids) {
    const token *whole = find_token(bpe, piece, length);
    if (whole && whole->whole)
        return eng_ids_append(ids, whole->id);
    return merge_piece(bpe, memory, piece, length, ids);
}

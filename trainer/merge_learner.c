// SPDX-License-Identifier: Apache-2.0
// Incremental pair counting: a merge touches only the pieces that hold the pair, and only the pairs beside it.
//
// Each pair keeps its count and the pieces in which it (once) occurred; a heap orders pairs by count. Heap entries are
// not updated when counts fall: an entry whose count is out of date is put back with the true one when it comes up.
// Counts rise only in the step that makes a pair's token, and then a fresh entry is pushed.
#include "trainer/merge_learner.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/hash.h"

typedef struct pair {
    uint64_t key; // left << 32 | right
    int64_t count;
    uint32_t *pieces; // indices, perhaps out of date
    uint32_t piece_count, piece_capacity;
    bool raised; // listed in learner.raised
} pair;

typedef struct word {
    size_t start; // in learner.symbols
    uint32_t length;
    int64_t count;
} word;

typedef struct entry {
    int64_t count;
    uint64_t key;
} entry;

typedef struct learner {
    int32_t *symbols;
    word *words;
    size_t word_count;
    pair *pairs;
    size_t pair_count, pair_capacity;
    uint32_t *slots; // 1 + index of a pair
    size_t slot_count;
    entry *heap;
    size_t heap_count, heap_capacity;
    uint32_t *raised; // pairs whose count rose in this step
    size_t raised_count, raised_capacity;
} learner;

static uint64_t pair_key(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static eng_status grow(void **memory, size_t *capacity, size_t element) {
    size_t wanted = *capacity ? *capacity * 2 : 1024;
    void *larger = reallocarray(*memory, wanted, element);
    if (!larger)
        return ENG_NO_MEMORY;
    *memory = larger;
    *capacity = wanted;
    return ENG_OK;
}
#define GROW(array, capacity) grow((void **)&(array), &(capacity), sizeof *(array))

// ---- pairs ----------------------------------------------------------------------------------------------------------

static size_t find_slot(const learner *l, uint64_t key) {
    size_t mask = l->slot_count - 1;
    size_t slot = (size_t)eng_hash_mix(key) & mask;
    while (l->slots[slot] && l->pairs[l->slots[slot] - 1].key != key)
        slot = (slot + 1) & mask;
    return slot;
}

static eng_status rebuild_slots(learner *l, size_t slot_count) {
    uint32_t *slots = calloc(slot_count, sizeof *slots);
    if (!slots)
        return ENG_NO_MEMORY;
    free(l->slots);
    l->slots = slots;
    l->slot_count = slot_count;
    for (size_t i = 0; i < l->pair_count; i++)
        l->slots[find_slot(l, l->pairs[i].key)] = (uint32_t)i + 1;
    return ENG_OK;
}

static pair *pair_at(learner *l, uint64_t key) {
    if (l->pair_count * 2 >= l->slot_count && rebuild_slots(l, l->slot_count ? l->slot_count * 2 : 65536) != ENG_OK)
        return NULL;
    size_t slot = find_slot(l, key);
    if (l->slots[slot])
        return &l->pairs[l->slots[slot] - 1];
    if (l->pair_count == l->pair_capacity && GROW(l->pairs, l->pair_capacity) != ENG_OK)
        return NULL;
    l->pairs[l->pair_count++] = (pair){.key = key};
    l->slots[slot] = (uint32_t)l->pair_count;
    return &l->pairs[l->pair_count - 1];
}

static eng_status raise_pair(learner *l, int32_t left, int32_t right, uint32_t piece, int64_t count) {
    pair *p = pair_at(l, pair_key(left, right));
    if (!p)
        return ENG_NO_MEMORY;
    p->count += count;
    if (!p->raised) {
        if (l->raised_count == l->raised_capacity && GROW(l->raised, l->raised_capacity) != ENG_OK)
            return ENG_NO_MEMORY;
        l->raised[l->raised_count++] = (uint32_t)(p - l->pairs);
        p->raised = true;
    }
    if (p->piece_count && p->pieces[p->piece_count - 1] == piece)
        return ENG_OK;
    if (p->piece_count == p->piece_capacity) {
        uint32_t capacity = p->piece_capacity ? p->piece_capacity * 2 : 4;
        uint32_t *pieces = reallocarray(p->pieces, capacity, sizeof *pieces);
        if (!pieces)
            return ENG_NO_MEMORY;
        p->pieces = pieces;
        p->piece_capacity = capacity;
    }
    p->pieces[p->piece_count++] = piece;
    return ENG_OK;
}

static void lower_pair(learner *l, int32_t left, int32_t right, int64_t count) {
    l->pairs[l->slots[find_slot(l, pair_key(left, right))] - 1].count -= count;
}

// ---- heap -----------------------------------------------------------------------------------------------------------

static bool before(entry a, entry b) {
    return a.count != b.count ? a.count > b.count : a.key < b.key;
}

static eng_status push(learner *l, entry e) {
    if (l->heap_count == l->heap_capacity && GROW(l->heap, l->heap_capacity) != ENG_OK)
        return ENG_NO_MEMORY;
    size_t at = l->heap_count++;
    for (; at > 0 && before(e, l->heap[(at - 1) / 2]); at = (at - 1) / 2)
        l->heap[at] = l->heap[(at - 1) / 2];
    l->heap[at] = e;
    return ENG_OK;
}

static entry pop(learner *l) {
    entry top = l->heap[0], last = l->heap[--l->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < l->heap_count; at = child) {
        if (child + 1 < l->heap_count && before(l->heap[child + 1], l->heap[child]))
            child++;
        if (!before(l->heap[child], last))
            break;
        l->heap[at] = l->heap[child];
    }
    l->heap[at] = last;
    return top;
}

static eng_status push_raised(learner *l, uint64_t min_count) {
    eng_status status = ENG_OK;
    for (size_t i = 0; i < l->raised_count && status == ENG_OK; i++) {
        pair *p = &l->pairs[l->raised[i]];
        p->raised = false;
        if (p->count >= (int64_t)min_count)
            status = push(l, (entry){.count = p->count, .key = p->key});
    }
    l->raised_count = 0;
    return status;
}

// The most frequent pair, still counted rightly; false: none is left.
static bool next_pair(learner *l, uint64_t min_count, entry *best, eng_status *status) {
    while (l->heap_count) {
        entry top = pop(l);
        int64_t count = l->pairs[l->slots[find_slot(l, top.key)] - 1].count;
        if (count == top.count) {
            *best = top;
            return true;
        }
        if (count >= (int64_t)min_count && (*status = push(l, (entry){.count = count, .key = top.key})) != ENG_OK)
            return false;
    }
    return false;
}

// ---- merging --------------------------------------------------------------------------------------------------------

static eng_status load_words(learner *l, const trn_piece_map *pieces, int32_t first_byte) {
    l->symbols = malloc((pieces->keys.length + 1) * sizeof *l->symbols);
    l->words = malloc((pieces->count + 1) * sizeof *l->words);
    if (!l->symbols || !l->words || pieces->count > UINT32_MAX)
        return ENG_NO_MEMORY;
    l->word_count = pieces->count;
    for (size_t i = 0; i < pieces->count; i++) {
        const trn_piece *piece = &pieces->pieces[i];
        word *w = &l->words[i];
        *w = (word){.start = piece->offset, .length = piece->length, .count = (int64_t)piece->value};
        int32_t *symbols = l->symbols + w->start;
        for (uint32_t k = 0; k < w->length; k++)
            symbols[k] = first_byte + (uint8_t)pieces->keys.bytes[piece->offset + k];
        for (uint32_t k = 1; k < w->length; k++) {
            eng_status status = raise_pair(l, symbols[k - 1], symbols[k], (uint32_t)i, w->count);
            if (status != ENG_OK)
                return status;
        }
    }
    return ENG_OK;
}

static eng_status merge_in_word(learner *l, uint32_t index, trn_merge merge) {
    word *w = &l->words[index];
    int32_t *symbols = l->symbols + w->start;
    uint32_t kept = 0;
    for (uint32_t at = 0; at < w->length; at++) {
        if (symbols[at] != merge.left || at + 1 == w->length || symbols[at + 1] != merge.right) {
            symbols[kept++] = symbols[at];
            continue;
        }
        lower_pair(l, merge.left, merge.right, w->count);
        eng_status status = ENG_OK;
        if (kept > 0) {
            lower_pair(l, symbols[kept - 1], merge.left, w->count);
            status = raise_pair(l, symbols[kept - 1], merge.result, index, w->count);
        }
        if (status == ENG_OK && at + 2 < w->length) {
            lower_pair(l, merge.right, symbols[at + 2], w->count);
            status = raise_pair(l, merge.result, symbols[at + 2], index, w->count);
        }
        if (status != ENG_OK)
            return status;
        symbols[kept++] = merge.result;
        at++;
    }
    w->length = kept;
    return ENG_OK;
}

static eng_status apply(learner *l, trn_merge merge) {
    pair *p = pair_at(l, pair_key(merge.left, merge.right));
    if (!p)
        return ENG_NO_MEMORY;
    uint32_t *pieces = p->pieces, count = p->piece_count;
    p->pieces = NULL;
    p->piece_count = p->piece_capacity = 0;
    eng_status status = ENG_OK;
    for (uint32_t i = 0; i < count && status == ENG_OK; i++)
        status = merge_in_word(l, pieces[i], merge);
    free(pieces);
    return status;
}

static eng_status join_tokens(trn_learned *learned, trn_merge *merge, size_t max_bytes, bool *fits) {
    trn_piece_map *tokens = &learned->tokens;
    const trn_piece *left = &tokens->pieces[merge->left - learned->first_byte];
    const trn_piece *right = &tokens->pieces[merge->right - learned->first_byte];
    size_t length = (size_t)left->length + right->length;
    *fits = length <= max_bytes;
    if (!*fits)
        return ENG_OK;
    char *joined = malloc(length);
    if (!joined)
        return ENG_NO_MEMORY;
    memcpy(joined, tokens->keys.bytes + left->offset, left->length);
    memcpy(joined + left->length, tokens->keys.bytes + right->offset, right->length);
    trn_piece *token = trn_piece_map_at(tokens, joined, length);
    free(joined);
    if (!token)
        return ENG_NO_MEMORY;
    merge->result = learned->first_byte + (int32_t)(token - tokens->pieces);
    return ENG_OK;
}

static eng_status add_bytes(trn_learned *learned) {
    for (int byte = 0; byte < 256; byte++) {
        char key = (char)byte;
        if (!trn_piece_map_at(&learned->tokens, &key, 1))
            return ENG_NO_MEMORY;
    }
    return ENG_OK;
}

static eng_status learn(learner *l, const trn_learn_options *options, trn_learned *learned, eng_error *error) {
    size_t wanted = (size_t)(options->vocab_size - options->first_byte), merge_capacity = 0;
    eng_status status = push_raised(l, options->min_count);
    entry best;
    while (status == ENG_OK && learned->tokens.count < wanted) {
        if (!next_pair(l, options->min_count, &best, &status))
            return status != ENG_OK
                       ? status
                       : eng_fail(error, ENG_INVALID, "the text gives %zu of %d tokens; ask for fewer",
                                  learned->tokens.count + (size_t)options->first_byte, options->vocab_size);
        trn_merge merge = {.left = (int32_t)(best.key >> 32), .right = (int32_t)(uint32_t)best.key};
        bool fits;
        status = join_tokens(learned, &merge, options->max_token_bytes, &fits);
        if (status != ENG_OK || !fits)
            continue;
        if (learned->merge_count == merge_capacity && GROW(learned->merges, merge_capacity) != ENG_OK)
            return ENG_NO_MEMORY;
        learned->merges[learned->merge_count++] = merge;
        status = apply(l, merge);
        if (status == ENG_OK)
            status = push_raised(l, options->min_count);
        if (options->progress && (learned->merge_count % 64 == 0 || learned->tokens.count == wanted))
            options->progress(options->context, learned->tokens.count, wanted, "merging");
    }
    return status;
}

static void free_learner(learner *l) {
    for (size_t i = 0; i < l->pair_count; i++)
        free(l->pairs[i].pieces);
    free(l->pairs);
    free(l->symbols);
    free(l->words);
    free(l->slots);
    free(l->heap);
    free(l->raised);
}

eng_status trn_learn_merges(const trn_piece_map *pieces, const trn_learn_options *options, trn_learned *learned,
                            eng_error *error) {
    *learned = (trn_learned){.first_byte = options->first_byte};
    learner l = {0};
    eng_status status = add_bytes(learned);
    if (status == ENG_OK)
        status = load_words(&l, pieces, options->first_byte);
    if (status == ENG_OK)
        status = learn(&l, options, learned, error);
    free_learner(&l);
    return status == ENG_OK ? status : eng_fail(error, status, "training the tokenizer: %s", eng_status_text(status));
}

void trn_learned_free(trn_learned *learned) {
    trn_piece_map_free(&learned->tokens);
    free(learned->merges);
    *learned = (trn_learned){0};
}

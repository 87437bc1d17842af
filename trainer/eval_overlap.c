// SPDX-License-Identifier: Apache-2.0
// Word sequences in common; see eval_overlap.h.
//
// The items' hashes are sorted once. A sequence of the training text is looked up in a table of bits first, which most
// do not pass, then by bisection. Sequences are hashed as polynomials, so the next one costs one step whatever its
// length. One thread.
#include "trainer/eval_overlap.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/hash.h"
#include "trainer/shard.h"

#define BASE UINT64_C(0x9e3779b97f4a7c15)

typedef struct place {
    uint64_t hash;
    int64_t item;
} place;

struct trn_overlap {
    place *place;
    size_t places, capacity;
    bool *marked;
    int64_t items, marked_capacity;
    uint64_t *bits; // NULL: not sorted yet
    uint64_t bit_mask;
    uint64_t oldest; // BASE^(words - 1)
};

// The last words of a text under way.
typedef struct window {
    uint64_t word[TRN_OVERLAP_WORDS], hash;
    int64_t words;
} window;

eng_status trn_overlap_create(trn_overlap **out, eng_error *error) {
    trn_overlap *overlap = calloc(1, sizeof *overlap);
    if (!overlap)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for overlaps");
    overlap->oldest = 1;
    for (int i = 0; i < TRN_OVERLAP_WORDS - 1; i++)
        overlap->oldest *= BASE;
    *out = overlap;
    return ENG_OK;
}

void trn_overlap_free(trn_overlap *overlap) {
    if (!overlap)
        return;
    free(overlap->place);
    free(overlap->marked);
    free(overlap->bits);
    free(overlap);
}

static bool in_word(unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c >= 0x80;
}

// The next word's hash; *at moves behind it. false: there is none.
static bool next_word(const char *text, size_t length, size_t *at, uint64_t *hash) {
    size_t i = *at;
    while (i < length && !in_word((unsigned char)text[i]))
        i++;
    if (i == length)
        return false;
    *hash = BASE;
    for (; i < length && in_word((unsigned char)text[i]); i++) {
        unsigned char c = (unsigned char)text[i];
        *hash = eng_hash_mix(*hash ^ (c >= 'A' && c <= 'Z' ? c + 32u : c));
    }
    *at = i;
    return true;
}

// Adds a word; true: `hash` is that of a whole sequence.
static bool slide(const trn_overlap *overlap, window *w, uint64_t word) {
    uint64_t *slot = &w->word[w->words % TRN_OVERLAP_WORDS];
    if (w->words >= TRN_OVERLAP_WORDS)
        w->hash -= *slot * overlap->oldest;
    w->hash = w->hash * BASE + word;
    *slot = word;
    w->words++;
    return w->words >= TRN_OVERLAP_WORDS;
}

static bool add_place(trn_overlap *overlap, uint64_t hash) {
    if (overlap->places == overlap->capacity) {
        size_t capacity = overlap->capacity ? 2 * overlap->capacity : 4096;
        place *grown = realloc(overlap->place, sizeof *grown * capacity);
        if (!grown)
            return false;
        overlap->place = grown;
        overlap->capacity = capacity;
    }
    overlap->place[overlap->places++] = (place){hash, overlap->items};
    return true;
}

eng_status trn_overlap_add(trn_overlap *overlap, const char *text, size_t length, eng_error *error) {
    window w = {.words = 0};
    uint64_t word;
    bool done = true;
    for (size_t at = 0; done && next_word(text, length, &at, &word);)
        if (slide(overlap, &w, word))
            done = add_place(overlap, eng_hash_mix(w.hash));
    if (done && overlap->items == overlap->marked_capacity) {
        int64_t capacity = overlap->marked_capacity ? 2 * overlap->marked_capacity : 1024;
        bool *grown = realloc(overlap->marked, sizeof *grown * (size_t)capacity);
        done = grown != NULL;
        if (done) {
            overlap->marked = grown;
            overlap->marked_capacity = capacity;
        }
    }
    if (!done)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for overlaps");
    overlap->marked[overlap->items++] = false;
    return ENG_OK;
}

static int by_hash(const void *a, const void *b) {
    uint64_t x = ((const place *)a)->hash, y = ((const place *)b)->hash;
    return (x > y) - (x < y);
}

static eng_status sort(trn_overlap *overlap, eng_error *error) {
    uint64_t bits = 1 << 16;
    while (bits < 16 * (uint64_t)overlap->places)
        bits *= 2;
    overlap->bits = calloc(bits / 64, sizeof *overlap->bits);
    if (!overlap->bits)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for overlaps");
    overlap->bit_mask = bits - 1;
    if (overlap->places > 0)
        qsort(overlap->place, overlap->places, sizeof *overlap->place, by_hash);
    for (size_t i = 0; i < overlap->places; i++) {
        uint64_t bit = overlap->place[i].hash & overlap->bit_mask;
        overlap->bits[bit / 64] |= UINT64_C(1) << bit % 64;
    }
    return ENG_OK;
}

static void mark(trn_overlap *overlap, uint64_t hash) {
    uint64_t bit = hash & overlap->bit_mask;
    if (!(overlap->bits[bit / 64] >> bit % 64 & 1))
        return;
    size_t low = 0, high = overlap->places;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (overlap->place[middle].hash < hash)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < overlap->places && overlap->place[low].hash == hash; low++)
        overlap->marked[overlap->place[low].item] = true;
}

eng_status trn_overlap_scan(trn_overlap *overlap, const char *text, size_t length, eng_error *error) {
    eng_status status = overlap->bits ? ENG_OK : sort(overlap, error);
    window w = {.words = 0};
    uint64_t word;
    for (size_t at = 0; status == ENG_OK && next_word(text, length, &at, &word);)
        if (slide(overlap, &w, word))
            mark(overlap, eng_hash_mix(w.hash));
    return status;
}

static eng_status scan_document(trn_overlap *overlap, const trn_shard *shard, uint64_t index,
                                const eng_tokenizer *tokenizer, eng_error *error) {
    trn_document document = trn_shard_document(shard, index);
    int32_t *ids = malloc(sizeof *ids * ((size_t)document.ids + 1));
    char *text = NULL;
    size_t length = 0;
    eng_status status =
        ids ? trn_shard_read(shard, document.first, document.ids, eng_tokenizer_size(tokenizer), ids, NULL, error)
            : eng_fail(error, ENG_NO_MEMORY, "out of memory for a document");
    if (status == ENG_OK)
        status = eng_tokenizer_decode(tokenizer, ids, document.ids, true, &text, &length, error);
    if (status == ENG_OK)
        status = trn_overlap_scan(overlap, text, length, error);
    free(text);
    free(ids);
    return status;
}

eng_status trn_overlap_scan_shards(trn_overlap *overlap, const char *name, const eng_tokenizer *tokenizer,
                                   eng_error *error) {
    eng_status status = ENG_OK;
    for (int i = 0; status == ENG_OK; i++) {
        trn_shard *shard = NULL;
        char *path = trn_shard_name(name, i);
        if (path && i > 0 && access(path, F_OK) != 0) {
            free(path);
            break;
        }
        status =
            path ? trn_shard_open(path, &shard, error) : eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
        if (status == ENG_OK &&
            memcmp(trn_shard_tokenizer(shard), eng_tokenizer_digest(tokenizer), TRN_TOKENIZER_DIGEST) != 0)
            status = eng_fail(error, ENG_INVALID, "%s: packed by another tokenizer than the model's", path);
        for (uint64_t d = 0; status == ENG_OK && d < trn_shard_documents(shard); d++)
            status = scan_document(overlap, shard, d, tokenizer, error);
        trn_shard_close(shard);
        free(path);
    }
    return status;
}

bool trn_overlap_marked(const trn_overlap *overlap, int64_t item) {
    return overlap->marked[item];
}

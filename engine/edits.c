// SPDX-License-Identifier: Apache-2.0
// The list of edits.h: made by marking ids over the vocabulary, kept sorted by insertion.
//
// A sorted array of 16-byte edits is what the kernels read, what a search finds an id in, and what a step copies; ids
// that enter later move those above them, which is a few kilobytes for a completion of any usual length.
#include "engine/edits.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int32_t place_of(const eng_edits *edits, int32_t id) {
    int32_t low = 0, high = edits->count;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (edits->edit[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool holds(const eng_edits *edits, int32_t place, int32_t id) {
    return place < edits->count && edits->edit[place].id == id;
}

static bool reserve(eng_edits *edits, int32_t capacity) {
    kern_logit_edit *edit = reallocarray(edits->edit, (size_t)capacity, sizeof *edit);
    if (edit)
        edits->edit = edit;
    eng_edit_source *source = reallocarray(edits->source, (size_t)capacity, sizeof *source);
    if (source)
        edits->source = source;
    if (!edit || !source)
        return false;
    edits->capacity = capacity;
    return true;
}

static void put(eng_edits *edits, int32_t place, int32_t id) {
    edits->edit[place] = (kern_logit_edit){.id = id, .repetition = 1};
    edits->source[place] = (eng_edit_source){0};
}

// Every id that the request changes from the start, once.
static bool collect(eng_edits *edits, const eng_request *request, const eng_edit_bans *bans, int32_t vocab_size) {
    bool *marked = calloc((size_t)vocab_size, sizeof *marked);
    if (!marked)
        return false;
    for (size_t i = 0; i < request->bias_count; i++)
        marked[request->biases[i].id] = true;
    for (int32_t i = 0; i < bans->ending_count; i++)
        marked[bans->ending[i]] = true;
    for (int32_t i = 0; i < bans->banned_count; i++)
        marked[bans->banned[i]] = true;
    for (size_t i = 0; i < request->count && edits->repetition != 1; i++)
        marked[request->ids[i]] = true;
    int32_t count = 0;
    for (int32_t id = 0; id < vocab_size; id++)
        count += marked[id];
    bool made = reserve(edits, count + 16);
    for (int32_t id = 0; made && id < vocab_size; id++)
        if (marked[id])
            put(edits, edits->count++, id);
    free(marked);
    return made;
}

eng_status eng_edits_create(const eng_request *request, const eng_edit_bans *bans, int32_t vocab_size, eng_edits *out) {
    eng_edits edits = {.presence = request->presence_penalty,
                       .frequency = request->frequency_penalty,
                       .repetition = request->repetition_penalty == 0 ? 1 : request->repetition_penalty};
    if (request->bias_count == 0 && bans->ending_count == 0 && bans->banned_count == 0 && edits.repetition == 1) {
        *out = edits;
        return ENG_OK;
    }
    if (!collect(&edits, request, bans, vocab_size)) {
        eng_edits_free(&edits);
        return ENG_NO_MEMORY;
    }
    for (size_t i = 0; i < request->count && edits.repetition != 1; i++)
        edits.edit[place_of(&edits, request->ids[i])].repetition = edits.repetition;
    for (size_t i = 0; i < request->bias_count; i++) {
        int32_t place = place_of(&edits, request->biases[i].id);
        edits.edit[place].bias = edits.source[place].bias = request->biases[i].bias;
    }
    for (int32_t i = 0; i < bans->ending_count; i++)
        edits.edit[place_of(&edits, bans->ending[i])].bias = -INFINITY;
    for (int32_t i = 0; i < bans->banned_count; i++) {
        int32_t place = place_of(&edits, bans->banned[i]);
        edits.edit[place].bias = edits.source[place].bias = -INFINITY;
    }
    *out = edits;
    return ENG_OK;
}

void eng_edits_free(eng_edits *edits) {
    free(edits->edit);
    free(edits->source);
    *edits = (eng_edits){0};
}

bool eng_edits_follow(const eng_edits *edits) {
    return edits->presence != 0 || edits->frequency != 0 || edits->repetition != 1;
}

eng_status eng_edits_drawn(eng_edits *edits, int32_t id) {
    if (!eng_edits_follow(edits))
        return ENG_OK;
    int32_t place = place_of(edits, id);
    if (!holds(edits, place, id)) {
        if (edits->count == edits->capacity && !reserve(edits, edits->capacity ? 2 * edits->capacity : 64))
            return ENG_NO_MEMORY;
        size_t above = (size_t)(edits->count - place);
        memmove(edits->edit + place + 1, edits->edit + place, sizeof *edits->edit * above);
        memmove(edits->source + place + 1, edits->source + place, sizeof *edits->source * above);
        edits->count++;
        put(edits, place, id);
    }
    kern_logit_edit *edit = &edits->edit[place];
    edit->repetition = edits->repetition;
    edit->penalty = edits->presence + edits->frequency * (float)++edits->source[place].drawn;
    return ENG_OK;
}

void eng_edits_allow(eng_edits *edits, const int32_t *ids, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        int32_t place = place_of(edits, ids[i]);
        if (holds(edits, place, ids[i]))
            edits->edit[place].bias = edits->source[place].bias;
    }
}

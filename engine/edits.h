// SPDX-License-Identifier: Apache-2.0
// What a request changes about its logits: bias, bans and penalties, as the one list that the kernels apply.
//
// The list holds the ids that are changed, ascending, at most the vocabulary. It is made once from the request and then
// kept up to date id by id as they are drawn, so a step costs a copy of it and never a walk over what was written.
// A request that asks for nothing of this has an empty list and pays nothing. It belongs to the engine's thread.
#ifndef ENGINE_EDITS_H
#define ENGINE_EDITS_H

#include "engine/engine.h"
#include "kernels/kernels.h"

typedef struct eng_edit_source {
    float bias;    // the caller's; -INFINITY: banned for good
    int32_t drawn; // how often the id stands in the completion
} eng_edit_source;

// Zeroed is empty.
typedef struct eng_edits {
    kern_logit_edit *edit;   // (count), ascending ids
    eng_edit_source *source; // (count)
    int32_t count, capacity;
    float presence, frequency, repetition; // repetition 1: off
} eng_edits;

// request has been checked against the vocabulary; its penalties, biases and prompt are read. ending ids are banned
// until eng_edits_allow, banned ids for good.
typedef struct eng_edit_bans {
    const int32_t *ending, *banned;
    int32_t ending_count, banned_count;
} eng_edit_bans;
ENG_CHECKED eng_status eng_edits_create(const eng_request *request, const eng_edit_bans *bans, int32_t vocab_size,
                                        eng_edits *out);
void eng_edits_free(eng_edits *edits);

// Whether the list depends on which ids are drawn.
bool eng_edits_follow(const eng_edits *edits);
// An id was drawn: its penalties grow. ENG_NO_MEMORY: the list is as it was.
ENG_CHECKED eng_status eng_edits_drawn(eng_edits *edits, int32_t id);
// Lifts the ban of ids that were banned for a while.
void eng_edits_allow(eng_edits *edits, const int32_t *ids, int32_t count);

#endif

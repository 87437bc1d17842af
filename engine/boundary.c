// SPDX-License-Identifier: Apache-2.0
// References, and the question whether a reader may begin there; see boundary.h.
//
// The logprob of the id behind a state comes from the last id that the state has read, which nobody reads again: it is
// part of the block, and the block serves a reader only if that id is its own too.
#include "engine/boundary.h"

#include <stdlib.h>

// -------------------------------------------------------------------------------------------------------------- scores

uint64_t eng_scores_bytes(size_t count, int32_t top) {
    return sizeof(eng_scores) + count * (sizeof(eng_token) + sizeof(eng_alternative) * (uint64_t)top);
}

eng_scores *eng_scores_create(size_t count, const eng_scoring *scoring, uint64_t *sum) {
    eng_scores *scores = malloc(sizeof *scores);
    if (!scores)
        return NULL;
    *scores = (eng_scores){.references = 1,
                           .scoring = *scoring,
                           .bytes = eng_scores_bytes(count, scoring->top),
                           .sum = sum,
                           .list = {.top_each = scoring->top}};
    *sum += scores->bytes;
    if (!eng_token_list_reserve(&scores->list, count)) {
        eng_scores_release(scores);
        return NULL;
    }
    return scores;
}

void eng_scores_retain(eng_scores *scores) {
    scores->references++;
}

void eng_scores_release(eng_scores *scores) {
    if (!scores || --scores->references > 0)
        return;
    *scores->sum -= scores->bytes;
    eng_token_list_free(&scores->list);
    free(scores);
}

void eng_scores_add(eng_scores *scores, const eng_token_list *from) {
    if (scores->list.count < scores->list.capacity)
        (void)eng_token_list_copy(&scores->list, from, from->count - 1);
}

bool eng_scores_cover(const eng_scores *scores, const eng_scoring *scoring) {
    const eng_scoring *told = &scores->scoring;
    return told->top >= scoring->top && (told->compute || !scoring->compute) &&
           told->exit_threshold == scoring->exit_threshold && told->max_loops == scoring->max_loops;
}

// ---------------------------------------------------------------------------------------------------------- boundaries

eng_boundary *eng_boundary_create(int64_t read, eng_snapshot *snapshot) {
    eng_boundary *boundary = malloc(sizeof *boundary);
    if (!boundary) {
        eng_snapshot_release(snapshot);
        return NULL;
    }
    *boundary = (eng_boundary){.references = 1, .read = read, .snapshot = snapshot};
    return boundary;
}

void eng_boundary_retain(eng_boundary *boundary) {
    boundary->references++;
}

void eng_boundary_release(eng_boundary *boundary) {
    if (!boundary || --boundary->references > 0)
        return;
    eng_snapshot_release(boundary->snapshot);
    eng_scores_release(boundary->scores);
    free(boundary);
}

static bool scores_serve(const eng_scores *scores, int64_t read, const eng_boundary_need *need) {
    return scores && eng_scores_cover(scores, &need->scoring) && scores->list.count > (size_t)read &&
           scores->list.token[read].id == need->ids[read];
}

bool eng_boundary_serves(const eng_boundary *boundary, const eng_boundary_need *need) {
    return boundary->snapshot && !(need->converged && boundary->unconverged) &&
           (!need->scored || scores_serve(boundary->scores, boundary->read, need));
}

// SPDX-License-Identifier: Apache-2.0
// A canonical state at a boundary of the grid, and what the model said about the prompt on the way to it.
//
// A state is canonical when every id was read as a prompt from position 0 on: then it depends on the ids, the solver's
// knobs, the model and the numeric profile alone, so whoever reads the same ids may begin from it. Beside the state
// stands what a reader that begins behind the ids could not tell any more: whether every solve converged and, where a
// reader wanted them, the logprobs. These are a block that the boundaries along one reading share; it never grows.
// All on the engine's thread.
#ifndef ENGINE_BOUNDARY_H
#define ENGINE_BOUNDARY_H

#include "engine/snapshot.h"
#include "engine/token_list.h"

// How logprobs of a prompt are told.
typedef struct eng_scoring {
    int32_t top;  // alternatives of each token
    bool compute; // with solver figures
    float exit_threshold;
    int32_t max_loops; // 0, like the threshold, where no loops are read
} eng_scoring;

// Logprobs of a prompt's first tokens, as they were told: token i by what was read before it.
typedef struct eng_scores {
    int32_t references;
    int32_t kept; // boundaries of a cache that refer to it
    eng_scoring scoring;
    uint64_t bytes;      // of all of it
    uint64_t *sum;       // of the bytes of all blocks; borrowed
    eng_token_list list; // its capacity stays
} eng_scores;

// Room for `count` tokens. NULL: no memory.
eng_scores *eng_scores_create(size_t count, const eng_scoring *scoring, uint64_t *sum);
uint64_t eng_scores_bytes(size_t count, int32_t top); // that it would take
void eng_scores_retain(eng_scores *scores);
void eng_scores_release(eng_scores *scores); // NULL is accepted
// The last token of the list, if there is room.
void eng_scores_add(eng_scores *scores, const eng_token_list *from);
// Whether they tell everything that is to be told.
bool eng_scores_cover(const eng_scores *scores, const eng_scoring *scoring);

typedef struct eng_boundary {
    int32_t references;
    int64_t read;           // ids, whole chunks of them
    eng_snapshot *snapshot; // a reference; NULL: there is none (yet)
    eng_scores *scores;     // a reference; NULL: nobody wanted them. Of more than `read` tokens if they serve
    bool unconverged;       // a solve on the way hit its bound, or may have
    bool used;              // somebody began from it
    int64_t stored_ms;      // when a store was known to have it, by eng_store_clock; 0: never
} eng_boundary;

// What a reader needs of a boundary that it begins from.
typedef struct eng_boundary_need {
    const int32_t *ids; // its prompt from position 0 on; one more than it may begin behind
    bool converged;     // it would have failed otherwise
    bool scored;        // logprobs, told as
    eng_scoring scoring;
} eng_boundary_need;

// With one reference; the snapshot's is taken. NULL: no memory, and the snapshot is released.
eng_boundary *eng_boundary_create(int64_t read, eng_snapshot *snapshot);
void eng_boundary_retain(eng_boundary *boundary);
void eng_boundary_release(eng_boundary *boundary); // NULL is accepted
bool eng_boundary_serves(const eng_boundary *boundary, const eng_boundary_need *need);

#endif

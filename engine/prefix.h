// SPDX-License-Identifier: Apache-2.0
// Canonical states that are kept for prompts that begin alike.
//
// A tree of boundaries of the grid: its root is who asks and how Mesa layers solve, an edge one chunk of ids. Each node
// is found by a digest over everything from the root on (SHA-256: taken to have no collisions), so ids are not kept. A
// node costs some bytes and tells that a prompt went this way; a few have a state. Everything counts in one budget, to
// the byte, and what was used least recently goes first, the end of a way before its beginning.
//
// A state lies in a slot of the pool while one is free, which costs next to nothing. To the host go those that are
// worth the transfer: of long prompts, where a second prompt came by, or that somebody began from. Others give their
// slot up when it is needed.
//
// Jobs may hold a boundary that the tree does not, or no longer, have: requests that wait for one state to begin from.
// Those states count in bounds of their own beside the budget. Everything belongs to the engine's thread.
#ifndef ENGINE_PREFIX_H
#define ENGINE_PREFIX_H

#include "engine/boundary.h"
#include "engine/digest.h"
#include "engine/engine.h"
#include "engine/state.h"

typedef struct eng_prefix eng_prefix;

typedef struct eng_prefix_options {
    eng_snapshots *snapshots; // borrowed; for nobody else
    kern_stream *stream;      // borrowed
    const eng_state_key *key; // borrowed; a part of every digest
    uint64_t budget;          // bytes; 0: nothing is kept
    uint64_t shared;          // bytes of states that the tree does not have, beside the budget
    int32_t chunk;            // C
    int32_t spacing;          // ids between states along a way, at least
    bool has_solver;          // the model's states depend on the solver's knobs
} eng_prefix_options;

// How far along its way somebody is.
typedef struct eng_chain {
    unsigned char digest[ENG_DIGEST_BYTES]; // at 0: the root
    int64_t read;
} eng_chain;

typedef struct eng_prefix_sums {
    uint64_t states, bytes, budget; // in the tree
    uint64_t evictions;             // of states
} eng_prefix_sums;

ENG_CHECKED eng_status eng_prefix_create(const eng_prefix_options *options, eng_prefix **out, eng_error *error);
void eng_prefix_free(eng_prefix *prefix); // after all boundaries that jobs hold were released
eng_snapshots *eng_prefix_snapshots(const eng_prefix *prefix);
bool eng_prefix_keeps(const eng_prefix *prefix); // whether it has a budget
void eng_prefix_sum(const eng_prefix *prefix, eng_prefix_sums *out);

// The root for an owner's prompts; name: ENG_NAME_BYTES of the owner's beyond the process, then `owner` does not enter;
// NULL: there is none. Equal roots and equal ids, equal states, in whatever process.
ENG_CHECKED eng_status eng_prefix_root(const eng_prefix *prefix, uint64_t owner, const unsigned char *name,
                                       const eng_knobs *knobs, eng_chain *out);
// One chunk of `ids`, which begin at position 0, further. False: the hash function failed.
bool eng_prefix_extend(const eng_prefix *prefix, eng_chain *chain, const int32_t *ids);
// The deepest boundary at or above `limit` ids that serves, borrowed, and the chain is moved there; NULL: none, and the
// chain stays. *known: how far others went the same way. Counts as a use.
eng_boundary *eng_prefix_find(eng_prefix *prefix, const eng_boundary_need *need, int64_t limit, eng_chain *chain,
                              int64_t *known);
// Ids up to the boundary `read` were read behind the chain, which is moved there.
void eng_prefix_pass(eng_prefix *prefix, eng_chain *chain, const int32_t *ids, int64_t read);
// Ids between the states that a prompt of so many ids leaves behind: all of them take a part of the budget.
int64_t eng_prefix_spacing(const eng_prefix *prefix, int64_t count);

// How much a state is wanted.
typedef enum eng_want {
    ENG_WANT_CHEAP,  // if it costs little, or is of a long prompt
    ENG_WANT_KEPT,   // if the tree has room
    ENG_WANT_NEEDED, // beside the budget as well
} eng_want;

// A boundary where the session is, which goes on: with a copy of its state, or one that the tree has; without any where
// it is not wanted enough. NULL: no memory, or no room for a state that is needed.
eng_boundary *eng_prefix_leave(eng_prefix *prefix, const eng_chain *chain, const eng_session *session, eng_want want);
// The boundary is what it says: the tree takes a reference, or what is new of it, if it has room.
void eng_prefix_add(eng_prefix *prefix, const eng_chain *chain, eng_boundary *boundary);
// A slot of the pool becomes free: a state moves to the host, or goes. False: none is on the device, or no memory.
bool eng_prefix_spill(eng_prefix *prefix);
void eng_prefix_purge(eng_prefix *prefix); // everything, nothing of it right
// The boundary with a state that the tree has there, borrowed; NULL: none.
eng_boundary *eng_prefix_at(const eng_prefix *prefix, const unsigned char digest[ENG_DIGEST_BYTES]);
// A state that others read, as eng_snapshot_read_in takes it, behind the first `read` of `ids` from the root on. The
// tree's; NULL: no room, or no memory.
eng_boundary *eng_prefix_bring_in(eng_prefix *prefix, const eng_chain *root, const int32_t *ids, int64_t read,
                                  const void *bytes, bool unconverged);

// A block of logprobs within the bounds of what jobs hold. NULL: no room, or no memory.
eng_scores *eng_prefix_scores(eng_prefix *prefix, size_t count, const eng_scoring *scoring);

#endif

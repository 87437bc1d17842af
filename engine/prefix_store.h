// SPDX-License-Identifier: Apache-2.0
// What prompts have in common, kept in a store as well: another engine, or this one after a restart, begins from it.
//
// The tree of prefix.h decides what is kept; here is what of it goes to the store and comes from there. A state goes
// there when somebody began from it: what nobody shares is not worth the bytes. It is named by its digest in the tree,
// which tells owner, ids, solver knobs, model and numeric profile, so whatever has that name is the state that reading
// the ids here gives, bit for bit; its bytes hold the ids too, and are compared with the prompt. What cannot be
// believed is deleted and never begun from.
//
// A prompt that would read many ids asks, while it waits for its turn, which of its boundaries is the deepest that the
// store has; that state is brought into the tree, and the prompt finds it there like any other. Nobody waits longer
// than a moment, and after one that did in vain nobody waits at all until the store has answered again; what comes too
// late is for those who come later.
//
// Writes are made when nobody is read, or a long while after they could have been, one at a time, and nobody waits for
// them. What finds no room in the store, or does not reach it, is not written: the next who begins from it asks again.
// Everything belongs to the engine's thread. A store of NULL, as of an engine that has none, does nothing.
#ifndef ENGINE_PREFIX_STORE_H
#define ENGINE_PREFIX_STORE_H

#include "engine/log.h"
#include "engine/prefix.h"
#include "engine/request.h"
#include "engine/store.h"

typedef struct eng_prefix_store eng_prefix_store;

typedef struct eng_prefix_store_options {
    eng_store *store; // borrowed, as all that is pointed to
    eng_prefix *prefix;
    const eng_pool *pool;
    const eng_state_key *key;
    int32_t vocab, chunk;
    int64_t context;             // -1: unbounded
    int64_t least;               // ids that a state must have read, and that it must save, above 0
    void (*wake)(void *context); // eng_options.wake
    void *wake_context;
    eng_logger log;
} eng_prefix_store_options;

ENG_CHECKED eng_status eng_prefix_store_create(const eng_prefix_store_options *options, eng_prefix_store **out,
                                               eng_error *error);
// Waits for what is under way; after all jobs are gone, before the tree goes. NULL is accepted.
void eng_prefix_store_free(eng_prefix_store *all);

// Who begins from a state, or would.
typedef struct eng_prefix_user {
    const unsigned char *owner; // ENG_NAME_BYTES
    const eng_knobs *knobs;
    eng_prompt *prompt; // its ids from position 0 on
} eng_prefix_user;

// Whether it is of use to ask for a state between the first `present` ids, which need not be read, and `limit`.
bool eng_prefix_store_helps(const eng_prefix_store *all, int64_t present, int64_t limit);
// Asks for it; the root is the user's, the chain somewhere on its way up to `present`. A reference: to be waited for
// and released. NULL: there is nothing to wait for.
eng_lookup *eng_prefix_store_look(eng_prefix_store *all, const eng_prefix_user *user, const eng_chain *root,
                                  const eng_chain *chain, int64_t present, int64_t limit);
bool eng_lookup_waits(const eng_lookup *lookup); // NULL: no
void eng_lookup_release(eng_lookup *lookup);     // NULL is accepted

// Somebody began from the boundary, which the tree has at the end of the chain.
void eng_prefix_store_note(eng_prefix_store *all, const eng_prefix_user *user, const eng_chain *chain,
                           eng_boundary *boundary);
// The state there was wrong though its digests were right: it is deleted, and the store neither asked nor written to
// any more.
void eng_prefix_store_distrust(eng_prefix_store *all, const unsigned char owner[ENG_NAME_BYTES],
                               const unsigned char digest[ENG_DIGEST_BYTES]);

// Takes replies, goes on with what is under way. quiet: nobody is read now. *worked is left alone unless a reply came.
void eng_prefix_store_poll(eng_prefix_store *all, bool quiet, bool *worked);
int64_t eng_prefix_store_idle_ms(const eng_prefix_store *all); // eng_idle_ms
void eng_prefix_store_gauges(const eng_prefix_store *all, eng_gauges *out);

#endif

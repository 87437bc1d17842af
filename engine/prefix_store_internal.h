// SPDX-License-Identifier: Apache-2.0
// The store of prefix states itself: questions under way, writes that wait.
//
// prefix_store.c asks and brings in, prefix_store_write.c writes.
#ifndef ENGINE_PREFIX_STORE_INTERNAL_H
#define ENGINE_PREFIX_STORE_INTERNAL_H

#include "engine/prefix_store.h"
#include "engine/store_internal.h"

enum {
    ENG_PREFIX_STORE_WAIT_MS = 500,      // that a prompt waits
    ENG_PREFIX_STORE_PATIENCE_MS = 5000, // that a write waits for a moment when nobody is read
    ENG_PREFIX_STORE_RETRY_MS = 10000,   // without writes after one that failed
    ENG_PREFIX_STORE_FRESH_MS = 3600000, // after which a state that is begun from is written again
    ENG_PREFIX_STORE_LIFE_MS = 86400000, // of a record since it was written
    ENG_PREFIX_STORE_WRITES = 16,        // that wait
};

typedef enum eng_lookup_step { ENG_LOOKUP_FIND, ENG_LOOKUP_GET, ENG_LOOKUP_DONE } eng_lookup_step;

struct eng_lookup {
    eng_lookup *next;
    int references; // of jobs, and of the list
    eng_lookup_step step;
    bool asked; // a reply is awaited
    bool over;  // nobody waits for it any more
    int64_t deadline;
    unsigned char owner[ENG_NAME_BYTES];
    eng_chain root;
    eng_prompt *prompt;                    // a reference
    unsigned char (*id)[ENG_DIGEST_BYTES]; // (ids) candidates, the deepest first
    int64_t ids, deepest;
    int64_t chosen; // which is to be fetched
};

// A state that waits to be written.
typedef struct eng_prefix_write {
    unsigned char owner[ENG_NAME_BYTES], digest[ENG_DIGEST_BYTES];
    eng_knobs knobs;
    eng_prompt *prompt; // a reference
    int64_t read, since;
} eng_prefix_write;

struct eng_prefix_store {
    eng_prefix_store_options options;
    eng_store_client *client;
    eng_lookup *lookups;
    eng_prefix_write write[ENG_PREFIX_STORE_WRITES];
    int writes;
    bool writing;      // the first of them is on its way
    int64_t retry_at;  // no write before
    uint64_t underway; // requests to the store
    bool silent;       // somebody waited in vain, and the store has not answered since
    bool distrusted;
    int64_t wait_ms;
    uint64_t stored, fetched, damaged;
};

// Submits; ENG_FULL: later.
ENG_CHECKED eng_status eng_prefix_store_ask(eng_prefix_store *all, eng_store_request *request);
eng_store_request eng_prefix_store_about(eng_store_op op, const unsigned char owner[ENG_NAME_BYTES],
                                         const unsigned char digest[ENG_DIGEST_BYTES]);
// It cannot be believed.
void eng_prefix_store_delete(eng_prefix_store *all, const unsigned char owner[ENG_NAME_BYTES],
                             const unsigned char digest[ENG_DIGEST_BYTES]);

// ---- prefix_store_write.c

bool eng_prefix_store_was_unconverged(const eng_store_meta *meta); // as its record says
void eng_prefix_store_write(eng_prefix_store *all, bool quiet);
void eng_prefix_store_take_write(eng_prefix_store *all, const eng_store_reply *reply);
void eng_prefix_store_drop_writes(eng_prefix_store *all);       // those that wait
int64_t eng_prefix_store_write_at(const eng_prefix_store *all); // INT64_MAX: not by itself

#endif

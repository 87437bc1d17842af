// SPDX-License-Identifier: Apache-2.0
// A timeline as bytes: ids and how they were read from some position on, and states along the way.
//
// The bytes are a fixed header, the runs, the ids, then of each state the slot (with what the next id is drawn from)
// and the pages that its ids fill; floats are float32, those of matrix states as the model stores them, numbers
// little-endian. The header names its version, that storage, all sizes, and a fingerprint that the caller chooses: what
// must be equal for a state to mean the same (model, tokenizer). It also tells the numeric profile, under which alone
// going on gives the same bits. A SHA-256 covers everything, unless the bytes go where others see to that. Bytes
// without a state say how a timeline goes on, or how to read one from nothing. For the engine's thread.
#ifndef ENGINE_STATE_H
#define ENGINE_STATE_H

#include "engine/digest.h"
#include "engine/session.h"
#include "engine/timeline.h"

// What must be equal, and what should be.
typedef struct eng_state_key {
    unsigned char fingerprint[ENG_DIGEST_BYTES], profile[ENG_DIGEST_BYTES];
} eng_state_key;

enum { ENG_STATE_PARTS = 2 };

typedef struct eng_state {
    int64_t begin;    // where ids and runs begin
    int64_t read;     // ids up to here were read
    int64_t position; // read .. position: the tail. The runs go so far
    const eng_run *run;
    int32_t runs;
    const int32_t *ids; // (position - begin)
    int32_t states;
    int64_t at[ENG_STATE_PARTS];          // ids that each state has read, ascending, begin .. read
    const void *content[ENG_STATE_PARTS]; // of each the slot, then the pages
    bool profile_changed;                 // what they hold began under another profile than the key's
} eng_state;

// Bytes of such a state.
size_t eng_state_measure(const eng_pool *pool, const eng_state *state);
void *eng_state_content(const eng_pool *pool, const eng_state *state, int32_t part,
                        void *out); // where a content belongs
// Writes everything but the contents, which are not looked at.
void eng_state_write(const eng_pool *pool, const eng_state_key *key, const eng_state *state, void *out);
// The digest over all that was written, contents included.
ENG_CHECKED eng_status eng_state_seal(const eng_pool *pool, const eng_state *state, void *out, eng_error *error);
// The digest that sealed bytes have.
void eng_state_read_digest(const void *bytes, unsigned char digest[ENG_DIGEST_BYTES]);
// What the bytes hold; contents and ids are borrowed from them, *run is new memory: free(). ENG_FORMAT: not such bytes,
// or damaged (sealed: the digest is looked at); ENG_UNSUPPORTED: of another version, model or layout. ids lie below
// vocab.
ENG_CHECKED eng_status eng_state_open(const eng_pool *pool, const eng_state_key *key, int32_t vocab, bool sealed,
                                      const void *bytes, size_t count, eng_state *out, eng_run **run, eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// A timeline as bytes: a state at one moment, and the ids from there on with how they were read.
//
// The bytes are a fixed header, the runs, the ids, the state slot, then the pages that `read` tokens fill; floats are
// float32, those of matrix states as the model stores them, numbers little-endian. The header names its version, that
// storage, all sizes, and a fingerprint that the caller chooses: what must be equal for the state to mean the same
// (model, tokenizer). It also tells the numeric profile, under which alone going on gives the same bits. A SHA-256
// covers everything. For the engine's thread.
#ifndef ENGINE_STATE_H
#define ENGINE_STATE_H

#include "engine/digest.h"
#include "engine/session.h"
#include "engine/timeline.h"

// What must be equal, and what should be.
typedef struct eng_state_key {
    unsigned char fingerprint[ENG_DIGEST_BYTES], profile[ENG_DIGEST_BYTES];
} eng_state_key;

typedef struct eng_state {
    int64_t begin;    // ids that the state itself has read
    int64_t read;     // that were read by the runs, begin .. read
    int64_t position; // read .. position: the tail
    const eng_run *run;
    int32_t runs;
    const int32_t *ids;   // (position - begin)
    const void *content;  // the slot, then the pages
    bool profile_changed; // the bytes name another profile than the key
} eng_state;

// Bytes of such a state.
size_t eng_state_measure(const eng_pool *pool, const eng_state *state);
void *eng_state_content(const eng_state *state, void *out); // where its content belongs in them
// Writes everything but the content, which is there already (state->content is not read), and the digest over all.
ENG_CHECKED eng_status eng_state_seal(const eng_pool *pool, const eng_state_key *key, const eng_state *state, void *out,
                                      eng_error *error);
// The digest that sealed bytes have.
void eng_state_read_digest(const void *bytes, unsigned char digest[ENG_DIGEST_BYTES]);
// What the bytes hold; content and ids are borrowed from them, *run is new memory: free(). ENG_FORMAT: not such bytes,
// or damaged; ENG_UNSUPPORTED: of another version, model or layout. ids lie below vocab.
ENG_CHECKED eng_status eng_state_open(const eng_pool *pool, const eng_state_key *key, int32_t vocab, const void *bytes,
                                      size_t count, eng_state *out, eng_run **run, eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// A session as bytes: its state, its KV pages and what it has read, at a step boundary.
//
// The bytes are a fixed header, the state slot, then the pages that `read` tokens fill; floats are float32, those of
// matrix states as the model stores them, numbers little-endian. The header names its version, that storage, both
// sizes, and a fingerprint that the caller chooses: what must be equal for the state to mean the same (model,
// tokenizer). A SHA-256 covers everything. Continuing an imported session gives the bits that continuing the exported
// one gives. For the engine's thread.
#ifndef ENGINE_STATE_H
#define ENGINE_STATE_H

#include "engine/digest.h"
#include "engine/session.h"

size_t eng_state_bytes(const eng_session *session);
// Writes eng_state_bytes(session) bytes to out; the session stays as it is.
ENG_CHECKED eng_status eng_state_export(const eng_session *session, kern_stream *stream,
                                        const unsigned char fingerprint[ENG_DIGEST_BYTES], void *out, eng_error *error);
// A new session with room for max_length tokens that has read what the exported one had. ENG_FORMAT: not such bytes, or
// damaged; ENG_UNSUPPORTED: of another version, model or layout; ENG_FULL and ENG_TOO_LONG as eng_session_open.
ENG_CHECKED eng_status eng_state_import(eng_pool *pool, kern_stream *stream, int64_t max_length,
                                        const unsigned char fingerprint[ENG_DIGEST_BYTES], const void *bytes,
                                        size_t count, eng_session *out, eng_error *error);

#endif

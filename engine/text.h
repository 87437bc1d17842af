// SPDX-License-Identifier: Apache-2.0
// From drawn ids to text that may be sent: UTF-8 assembly and stop strings.
//
// An eng_text_out belongs to one request. Bytes go in as tokens are drawn; what comes out is always whole characters
// and never any part of a stop string (unless stop strings are to be included): bytes that may still become one are
// held back. Concatenating everything that came out gives the same text however the tokens were cut (streamed = plain).
// Stop strings match on the bytes before UTF-8 repair, by Aho-Corasick or an equivalent of linear time.
#ifndef ENGINE_TEXT_H
#define ENGINE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/engine.h"
#include "engine/status.h"

typedef struct eng_text_out eng_text_out;

// stops: borrowed for the call, each at least one byte. include_stop: the text ends behind the stop string, not before
// it. *out: eng_text_free (NULL is accepted).
ENG_CHECKED eng_status eng_text_create(const eng_text *stops, size_t stop_count, bool include_stop, eng_text_out **out,
                                       eng_error *error);
void eng_text_free(eng_text_out *text);

// Adds a token's bytes. *stopped: a stop string is complete; nothing more comes out after the text before (or with) it.
ENG_CHECKED eng_status eng_text_push(eng_text_out *text, const char *bytes, size_t length, bool *stopped);
// The end of generation: what was held back comes out, an incomplete character as one U+FFFD.
ENG_CHECKED eng_status eng_text_finish(eng_text_out *text);
// What may be sent now; borrowed until the next call on this object. Taking it removes it.
void eng_text_take(eng_text_out *text, const char **bytes, size_t *length);
// Number of pushed tokens whose text has wholly come out (or was cut by a stop string).
size_t eng_text_settled(const eng_text_out *text);
// Of these, the tokens that no stop string cut: all of their text has come out.
size_t eng_text_whole(const eng_text_out *text);

// Whether bytes are well-formed UTF-8 (no surrogates, no overlong forms); *offset: the first fault. offset may be NULL.
bool eng_utf8_valid(const char *bytes, size_t length, size_t *offset);

#endif

// SPDX-License-Identifier: Apache-2.0
// Finds a set of byte strings in a text in one pass (Aho and Corasick, "Efficient string matching", CACM 18(6), 1975).
//
// Used for added tokens in prompts and for stop strings in generated text. Immutable after it is made, any thread.
#ifndef ENGINE_MATCHER_H
#define ENGINE_MATCHER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"
#include "engine/status.h"

typedef struct eng_matcher eng_matcher;

// patterns: copied, each at least one byte (else ENG_INVALID), together below 2^31 bytes. Of two equal ones the first
// counts. Zero patterns make a matcher that finds nothing.
ENG_CHECKED eng_status eng_matcher_create(const eng_text *patterns, size_t count, eng_matcher **out);
void eng_matcher_free(eng_matcher *matcher);

// Byte by byte: state 0 is the start; each step costs O(1) on average over a text.
uint32_t eng_matcher_step(const eng_matcher *matcher, uint32_t state, uint8_t byte);
// How many of the last bytes may still become a pattern: the longest suffix that begins one.
uint32_t eng_matcher_depth(const eng_matcher *matcher, uint32_t state);
// The longest pattern that ends here and its length; false: none.
bool eng_matcher_ends(const eng_matcher *matcher, uint32_t state, size_t *pattern, size_t *length);

// The leftmost, among those the longest, occurrence at or after from; false: none.
bool eng_matcher_find(const eng_matcher *matcher, const char *text, size_t length, size_t from, size_t *start,
                      size_t *end, size_t *pattern);

#endif

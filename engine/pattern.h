// SPDX-License-Identifier: Apache-2.0
// Regular expressions of tokenizer files, run by PCRE2.
//
// The files are written for Oniguruma. Where the two dialects mean different things (\s, \w, \v, \u, script names) the
// pattern is rewritten; what cannot be rewritten (&&, nested classes, \b, \h, ...) is refused by name. A compiled
// pattern is immutable and shared by threads; each thread brings its own match data. Searching is bounded by PCRE2's
// match and heap limits, so that a pathological pattern fails instead of hanging. Text must be valid UTF-8.
#ifndef ENGINE_PATTERN_H
#define ENGINE_PATTERN_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/buffer.h"
#include "engine/status.h"

typedef struct eng_pattern eng_pattern;
typedef struct eng_match eng_match; // a thread's working memory, for any pattern

// literal: the text itself is searched for. ENG_UNSUPPORTED: not built; ENG_FORMAT: no regular expression.
ENG_CHECKED eng_status eng_pattern_compile(const char *text, size_t length, bool literal, eng_pattern **out,
                                           eng_error *error);
void eng_pattern_free(eng_pattern *pattern);

ENG_CHECKED eng_status eng_match_create(eng_match **out);
void eng_match_free(eng_match *match);

// The first occurrence at or after from, as [*start, *end). *found is false when there is none. ENG_TOO_LONG: a limit.
ENG_CHECKED eng_status eng_pattern_find(const eng_pattern *pattern, eng_match *match, const char *text, size_t length,
                                        size_t from, bool *found, size_t *start, size_t *end, eng_error *error);

// The rewriting alone.
ENG_CHECKED eng_status eng_pattern_translate(const char *text, size_t length, eng_buffer *out, eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// Pre-tokenization: text is cut into the pieces within which BPE may merge.
//
// A pre-tokenizer is a row of stages, each run on the pieces of the one before, as in Hugging Face's tokenizers. It is
// immutable once built and shared by threads; a thread's working memory is an eng_pretokenize_memory. Text must be
// valid UTF-8. Time is linear in the text for patterns that backtrack a bounded number of times over each character.
#ifndef ENGINE_PRETOKENIZE_H
#define ENGINE_PRETOKENIZE_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/pattern.h"
#include "engine/status.h"

// What becomes of the matches of a Split (the names of tokenizer.json).
typedef enum eng_split {
    ENG_SPLIT_ISOLATED,
    ENG_SPLIT_REMOVED,
    ENG_SPLIT_MERGED_WITH_PREVIOUS,
    ENG_SPLIT_MERGED_WITH_NEXT,
    ENG_SPLIT_CONTIGUOUS,
} eng_split;

typedef enum eng_prepend { ENG_PREPEND_NEVER, ENG_PREPEND_FIRST, ENG_PREPEND_ALWAYS } eng_prepend;

enum { ENG_MAX_STAGES = 16 };

extern const char eng_pattern_gpt2[];         // ByteLevel's own pattern (use_regex)
extern const char eng_pattern_llama3[];       // digits in groups of up to 3
extern const char eng_pattern_llama3_digit[]; // the same, each digit alone

typedef struct eng_pretokenizer eng_pretokenizer;

ENG_CHECKED eng_status eng_pretokenizer_create(eng_pretokenizer **out);
void eng_pretokenizer_free(eng_pretokenizer *pretokenizer);

// Each adds a stage. ENG_UNSUPPORTED beyond ENG_MAX_STAGES.
ENG_CHECKED eng_status eng_pretokenizer_add_split(eng_pretokenizer *pretokenizer, const char *pattern, size_t length,
                                                  bool literal, eng_split behavior, bool invert, eng_error *error);
// A space in front of every piece that does not begin with one (ByteLevel's add_prefix_space).
ENG_CHECKED eng_status eng_pretokenizer_add_prefix_space(eng_pretokenizer *pretokenizer, eng_error *error);
// Spaces become mark; mark in front of pieces that do not begin with it, as prepend says.
ENG_CHECKED eng_status eng_pretokenizer_add_metaspace(eng_pretokenizer *pretokenizer, const char *mark,
                                                      eng_prepend prepend, eng_error *error);

typedef struct eng_pretokenize_memory {
    eng_match *match;
    eng_buffer texts[ENG_MAX_STAGES]; // of the stages that change the text
} eng_pretokenize_memory;

ENG_CHECKED eng_status eng_pretokenize_memory_init(eng_pretokenize_memory *memory);
void eng_pretokenize_memory_free(eng_pretokenize_memory *memory);

typedef eng_status (*eng_piece_fn)(void *context, const char *bytes, size_t length);

// Calls emit for each piece in order (never an empty one). first: text begins where the whole text begins. Stops at the
// first failure, of emit's too.
ENG_CHECKED eng_status eng_pretokenize(const eng_pretokenizer *pretokenizer, eng_pretokenize_memory *memory,
                                       const char *text, size_t length, bool first, eng_piece_fn emit, void *context,
                                       eng_error *error);

#endif

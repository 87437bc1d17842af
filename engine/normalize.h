// SPDX-License-Identifier: Apache-2.0
// Normalization of text before it is cut: Unicode forms (utf8proc), a text put in front, replacements.
//
// Time is linear in the text; utf8proc's own reordering of combining marks, which is quadratic in a long row of them,
// is not used. Forms are those of utf8proc's Unicode version. Immutable once built, shared by threads; working memory
// belongs to a thread. Text must be valid UTF-8.
#ifndef ENGINE_NORMALIZE_H
#define ENGINE_NORMALIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/buffer.h"
#include "engine/pattern.h"
#include "engine/status.h"

typedef enum eng_form { ENG_NFC, ENG_NFD, ENG_NFKC, ENG_NFKD } eng_form;

enum { ENG_MAX_NORMALIZERS = 16 };

typedef struct eng_normalizer eng_normalizer;

ENG_CHECKED eng_status eng_normalizer_create(eng_normalizer **out);
void eng_normalizer_free(eng_normalizer *normalizer);

// Each adds a step. ENG_UNSUPPORTED beyond ENG_MAX_NORMALIZERS.
ENG_CHECKED eng_status eng_normalizer_add_form(eng_normalizer *normalizer, eng_form form, eng_error *error);
ENG_CHECKED eng_status eng_normalizer_add_prepend(eng_normalizer *normalizer, const char *text, eng_error *error);
ENG_CHECKED eng_status eng_normalizer_add_replace(eng_normalizer *normalizer, const char *pattern, size_t length,
                                                  bool literal, const char *content, eng_error *error);

typedef struct eng_normalize_memory {
    eng_buffer texts[2]; // steps read one and write the other
    int32_t *codes, *sorted;
    size_t code_capacity, sorted_capacity;
} eng_normalize_memory; // zeroed: empty

void eng_normalize_memory_free(eng_normalize_memory *memory);

// *out, *out_length: the normalized text, borrowed from memory until its next use, or text itself when nothing changes
// it.
ENG_CHECKED eng_status eng_normalize(const eng_normalizer *normalizer, eng_normalize_memory *memory, eng_match *match,
                                     const char *text, size_t length, const char **out, size_t *out_length,
                                     eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// The bound on a safetensors header before it meets the JSON library; shared by the reader and the writer.
//
// A JSON tree takes many times the memory of its text, so the text is measured first: nesting and the number of
// objects, arrays and commas. The same walk tells which top-level key a byte belongs to, for error texts.
#ifndef ENGINE_SAFETENSORS_HEADER_H
#define ENGINE_SAFETENSORS_HEADER_H

#include <stddef.h>

enum { ENG_ST_LENGTH_FIELD = 8 }; // bytes before the header
#define ENG_ST_METADATA_KEY "__metadata__"

typedef struct eng_st_measure {
    const char *fault; // NULL: within the bounds
    size_t end;        // bytes walked
    const char *key;   // of the top-level entry at end, as written between its quotes; NULL: none
    size_t key_length;
} eng_st_measure;

// Walks length bytes of JSON text; it need not be well-formed or complete.
eng_st_measure eng_st_measure_header(const char *text, size_t length);

#endif

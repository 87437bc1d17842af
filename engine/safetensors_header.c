// SPDX-License-Identifier: Apache-2.0
// One pass over a safetensors header that counts what a JSON tree of it would hold.
//
// It knows strings, escapes and brackets and nothing else: whether the text is JSON at all is the JSON library's
// question, asked only when this walk found no excess. No allocation, linear time.
#include "engine/safetensors_header.h"

#include "engine/safetensors.h"

enum {
    MAX_DEPTH = 3, // header, entry, shape or data_offsets
    MAX_OBJECTS = ENG_ST_MAX_TENSORS + 2,
    MAX_ARRAYS = 2 * ENG_ST_MAX_TENSORS,
    // A tensor takes at most 1 comma before it, 2 inside it, 7 in its shape, 1 in its offsets.
    MAX_COMMAS = 11 * ENG_ST_MAX_TENSORS + ENG_ST_MAX_METADATA,
};

typedef struct counts {
    int depth;
    size_t objects, arrays, commas;
} counts;

static const char *count_mark(counts *seen, char mark) {
    switch (mark) {
    case '{':
        seen->objects++;
        seen->depth++;
        break;
    case '[':
        seen->arrays++;
        seen->depth++;
        break;
    case '}':
    case ']':
        seen->depth--;
        break;
    case ',':
        seen->commas++;
        break;
    default:
        return NULL;
    }
    if (seen->depth > MAX_DEPTH)
        return "nested too deep";
    if (seen->objects > MAX_OBJECTS || seen->arrays > MAX_ARRAYS || seen->commas > MAX_COMMAS)
        return "too many tensors or values";
    return NULL;
}

// Index of the quote that closes the string opened before at; length when none does.
static size_t string_end(const char *text, size_t at, size_t length) {
    while (at < length && text[at] != '"')
        at += text[at] == '\\' ? 2 : 1;
    return at < length ? at : length;
}

eng_st_measure eng_st_measure_header(const char *text, size_t length) {
    eng_st_measure found = {0};
    counts seen = {0};
    for (size_t at = 0; at < length; at++) {
        if (text[at] == '"') {
            size_t begin = at + 1;
            at = string_end(text, begin, length);
            if (seen.depth == 1) {
                found.key = text + begin;
                found.key_length = at - begin;
            }
            continue;
        }
        found.fault = count_mark(&seen, text[at]);
        if (found.fault) {
            found.end = at;
            return found;
        }
    }
    found.end = length;
    return found;
}

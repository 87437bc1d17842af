// SPDX-License-Identifier: Apache-2.0
// Growable memory for bytes and for ids. Capacity at least doubles, so appending n elements costs O(n) in all.
//
// A zeroed struct is an empty buffer. Failure is ENG_NO_MEMORY and leaves the buffer as it was.
#ifndef ENGINE_BUFFER_H
#define ENGINE_BUFFER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct eng_buffer {
    char *bytes;
    size_t length, capacity;
} eng_buffer;

ENG_CHECKED eng_status eng_buffer_reserve(eng_buffer *buffer, size_t more); // room behind length
ENG_CHECKED eng_status eng_buffer_append(eng_buffer *buffer, const void *bytes, size_t length);
void eng_buffer_free(eng_buffer *buffer); // leaves an empty buffer

typedef struct eng_ids {
    int32_t *ids;
    size_t count, capacity;
} eng_ids;

ENG_CHECKED eng_status eng_ids_reserve(eng_ids *ids, size_t more);
ENG_CHECKED eng_status eng_ids_append(eng_ids *ids, int32_t id);
void eng_ids_free(eng_ids *ids);

#endif

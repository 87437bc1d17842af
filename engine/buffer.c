// SPDX-License-Identifier: Apache-2.0
// Growth by doubling. Sizes are checked against half of the address space, so that no product or sum of sizes wraps and
// a caller may add small constants to a capacity. No state; any thread.
#include "engine/buffer.h"

#include <stdlib.h>
#include <string.h>

static eng_status grow(void **memory, size_t *capacity, size_t used, size_t more, size_t element) {
    size_t limit = SIZE_MAX / 2 / element;
    if (used > limit || more > limit - used)
        return ENG_NO_MEMORY;
    size_t wanted = *capacity < limit / 2 ? *capacity * 2 : limit;
    if (wanted < used + more)
        wanted = used + more;
    if (wanted < 64)
        wanted = 64;
    void *larger = realloc(*memory, wanted * element);
    if (!larger)
        return ENG_NO_MEMORY;
    *memory = larger;
    *capacity = wanted;
    return ENG_OK;
}

eng_status eng_buffer_reserve(eng_buffer *buffer, size_t more) {
    if (buffer->capacity - buffer->length >= more)
        return ENG_OK;
    void *memory = buffer->bytes;
    eng_status status = grow(&memory, &buffer->capacity, buffer->length, more, 1);
    buffer->bytes = memory;
    return status;
}

eng_status eng_buffer_append(eng_buffer *buffer, const void *bytes, size_t length) {
    if (length == 0)
        return ENG_OK;
    eng_status status = eng_buffer_reserve(buffer, length);
    if (status != ENG_OK)
        return status;
    memcpy(buffer->bytes + buffer->length, bytes, length);
    buffer->length += length;
    return ENG_OK;
}

void eng_buffer_free(eng_buffer *buffer) {
    free(buffer->bytes);
    *buffer = (eng_buffer){0};
}

eng_status eng_ids_reserve(eng_ids *ids, size_t more) {
    if (ids->capacity - ids->count >= more)
        return ENG_OK;
    void *memory = ids->ids;
    eng_status status = grow(&memory, &ids->capacity, ids->count, more, sizeof *ids->ids);
    ids->ids = memory;
    return status;
}

eng_status eng_ids_append(eng_ids *ids, int32_t id) {
    eng_status status = eng_ids_reserve(ids, 1);
    if (status == ENG_OK)
        ids->ids[ids->count++] = id;
    return status;
}

void eng_ids_free(eng_ids *ids) {
    free(ids->ids);
    *ids = (eng_ids){0};
}

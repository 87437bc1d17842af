// SPDX-License-Identifier: Apache-2.0
// Growth of token lists. Any thread, each on its own lists.
// What fails is remembered, so that the caller asks once.
#include "server/token_list.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "server/limits.h"

enum { FIRST_CAPACITY = 16 };

// Room for count more elements; the new address or NULL.
static void *reserve(void *data, size_t size, size_t used, size_t count, size_t *capacity) {
    size_t wanted = *capacity ? *capacity : FIRST_CAPACITY;

    if (count <= *capacity - used)
        return data;
    if (count > SRV_MAX_TOKEN_BYTES / size || used + count > SRV_MAX_TOKEN_BYTES / size)
        return NULL;
    while (wanted < used + count)
        wanted *= 2;
    void *grown = realloc(data, wanted * size);
    if (grown)
        *capacity = wanted;
    return grown;
}

void srv_token_list_add(srv_token_list *list, const eng_token *tokens, size_t count) {
    size_t tops = 0;

    if (list->failed || count == 0)
        return;
    for (size_t i = 0; i < count; i++)
        tops += (size_t)tokens[i].top_count;
    eng_token *grown = reserve(list->tokens, sizeof *grown, list->count, count, &list->capacity);
    if (grown)
        list->tokens = grown;
    eng_alternative *more = NULL;
    if (tops && (more = reserve(list->tops, sizeof *more, list->top_count, tops, &list->top_capacity)))
        list->tops = more;
    if (!grown || (tops && !more)) {
        list->failed = true;
        return;
    }
    memcpy(list->tokens + list->count, tokens, count * sizeof *tokens);
    list->count += count;
    for (size_t i = 0; i < count; i++) {
        if (tokens[i].top_count)
            memcpy(list->tops + list->top_count, tokens[i].top, (size_t)tokens[i].top_count * sizeof *tokens[i].top);
        list->top_count += (size_t)tokens[i].top_count;
    }
}

void srv_token_list_seal(srv_token_list *list) {
    size_t at = 0;

    for (size_t i = 0; i < list->count; i++) {
        list->tokens[i].top = list->tokens[i].top_count ? list->tops + at : NULL;
        at += (size_t)list->tokens[i].top_count;
    }
}

void srv_token_list_free(srv_token_list *list) {
    free(list->tokens);
    free(list->tops);
    *list = (srv_token_list){0};
}

size_t srv_token_list_bytes(size_t count, size_t tops) {
    return count * (sizeof(eng_token) + tops * sizeof(eng_alternative));
}

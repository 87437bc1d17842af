// SPDX-License-Identifier: Apache-2.0
// The list of token_list.h: two arrays that grow together.
// It belongs to one request and so to the engine's thread; a failed growth leaves it as it was.
#include "engine/token_list.h"

#include <stdlib.h>
#include <string.h>

void eng_token_list_free(eng_token_list *list) {
    free(list->token);
    free(list->top);
    *list = (eng_token_list){.top_each = list->top_each};
}

bool eng_token_list_reserve(eng_token_list *list, size_t capacity) {
    if (capacity <= list->capacity)
        return true;
    eng_token *token = reallocarray(list->token, capacity, sizeof *token);
    if (!token)
        return false;
    list->token = token;
    if (list->top_each > 0) {
        eng_alternative *top = reallocarray(list->top, capacity, sizeof *top * (size_t)list->top_each);
        if (!top)
            return false;
        list->top = top;
    }
    list->capacity = capacity;
    return true;
}

eng_token *eng_token_list_add(eng_token_list *list) {
    if (list->count == list->capacity && !eng_token_list_reserve(list, list->capacity ? 2 * list->capacity : 16))
        return NULL;
    eng_token *token = &list->token[list->count++];
    *token = (eng_token){.id = -1};
    return token;
}

static eng_alternative *top_of(const eng_token_list *list, size_t index) {
    return list->top_each > 0 ? list->top + index * (size_t)list->top_each : NULL;
}

eng_alternative *eng_token_list_top(eng_token_list *list) {
    return top_of(list, list->count - 1);
}

bool eng_token_list_copy(eng_token_list *list, const eng_token_list *from, size_t index) {
    eng_token *token = eng_token_list_add(list);
    if (!token)
        return false;
    *token = from->token[index];
    if (token->top_count > list->top_each)
        token->top_count = list->top_each;
    if (token->top_count > 0)
        memcpy(eng_token_list_top(list), top_of(from, index), sizeof *list->top * (size_t)token->top_count);
    return true;
}

const eng_token *eng_token_list_view(eng_token_list *list) {
    static const eng_token none = {.id = -1};
    for (size_t i = 0; i < list->count; i++)
        list->token[i].top = top_of(list, i);
    return list->count ? list->token : &none;
}

void eng_token_list_drop(eng_token_list *list, size_t count) {
    if (count == 0)
        return;
    list->count -= count;
    memmove(list->token, list->token + count, sizeof *list->token * list->count);
    if (list->top_each > 0)
        memmove(list->top, top_of(list, count), sizeof *list->top * (size_t)list->top_each * list->count);
}

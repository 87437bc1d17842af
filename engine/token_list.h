// SPDX-License-Identifier: Apache-2.0
// Tokens that no event has told yet, oldest first, each with its alternatives.
//
// The alternatives lie in an array of their own, top_each a token, so that a request without them pays for none; the
// pointers that lead there are written when the list is shown, since adding may move it.
#ifndef ENGINE_TOKEN_LIST_H
#define ENGINE_TOKEN_LIST_H

#include "engine/engine.h"

// Zeroed is empty; top_each is set before the first token is added and stays.
typedef struct eng_token_list {
    eng_token *token;     // (capacity)
    eng_alternative *top; // (capacity, top_each)
    size_t count, capacity;
    int32_t top_each;
} eng_token_list;

void eng_token_list_free(eng_token_list *list);
bool eng_token_list_reserve(eng_token_list *list, size_t capacity); // at least; false: no memory
// A new last token, zeroed; NULL: no memory.
eng_token *eng_token_list_add(eng_token_list *list);
// A copy of another list's token, with as many of its alternatives as this one has room for. False: no memory.
bool eng_token_list_copy(eng_token_list *list, const eng_token_list *from, size_t index);
// Room for top_each alternatives of the last token.
eng_alternative *eng_token_list_top(eng_token_list *list);
// All of them, never NULL; borrowed until the list changes.
const eng_token *eng_token_list_view(eng_token_list *list);
// Drops the first `count`.
void eng_token_list_drop(eng_token_list *list, size_t count);

#endif

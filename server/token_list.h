// SPDX-License-Identifier: Apache-2.0
// Tokens that outlive the engine's callback: copies of eng_token with their alternatives.
//
// A list grows by doubling up to a bound in bytes; what does not fit leaves it failed. Alternatives lie in one block,
// in the order of the tokens, and the tokens point into it only once the list is sealed. One owner at a time.
#ifndef SERVER_TOKEN_LIST_H
#define SERVER_TOKEN_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/engine.h"

typedef struct srv_token_list {
    eng_token *tokens; // top is valid after srv_token_list_seal
    eng_alternative *tops;
    size_t count, capacity, top_count, top_capacity;
    bool failed;
} srv_token_list; // all zero: empty

void srv_token_list_add(srv_token_list *list, const eng_token *tokens, size_t count);
void srv_token_list_seal(srv_token_list *list);
void srv_token_list_free(srv_token_list *list);
// Memory of count tokens with that many alternatives each.
size_t srv_token_list_bytes(size_t count, size_t tops);

#endif

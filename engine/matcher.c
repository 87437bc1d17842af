// SPDX-License-Identifier: Apache-2.0
// Aho-Corasick automaton over bytes: a trie with sibling lists and failure links, a dense table at the root.
//
// Sibling lists keep a node at 24 bytes, so thousands of added tokens cost kilobytes, not megabytes; text outside any
// pattern is handled by the dense table alone. Depths grow by at most one a byte and failure links lower them, which
// bounds the steps over a text. Reading only; no locks needed.
#include "engine/matcher.h"

#include <stdlib.h>

typedef struct node {
    uint32_t child, sibling, failure; // 0: none (the root is nobody's child)
    uint32_t depth;
    uint32_t pattern; // 1 + the longest pattern that ends here, 0: none
    uint8_t byte;
} node;

struct eng_matcher {
    node *nodes;
    uint32_t *lengths; // of the patterns
    uint32_t root[256];
    uint32_t count;
};

static uint32_t find_child(const eng_matcher *matcher, uint32_t parent, uint8_t byte) {
    if (parent == 0)
        return matcher->root[byte];
    uint32_t child = matcher->nodes[parent].child;
    while (child && matcher->nodes[child].byte != byte)
        child = matcher->nodes[child].sibling;
    return child;
}

static uint32_t add_child(eng_matcher *matcher, uint32_t parent, uint8_t byte) {
    uint32_t child = matcher->count++;
    matcher->nodes[child] =
        (node){.byte = byte, .sibling = matcher->nodes[parent].child, .depth = matcher->nodes[parent].depth + 1};
    matcher->nodes[parent].child = child;
    if (parent == 0)
        matcher->root[byte] = child;
    return child;
}

static void add_pattern(eng_matcher *matcher, eng_text pattern, size_t index) {
    uint32_t at = 0;
    for (size_t i = 0; i < pattern.length; i++) {
        uint8_t byte = (uint8_t)pattern.bytes[i];
        uint32_t next = find_child(matcher, at, byte);
        at = next ? next : add_child(matcher, at, byte);
    }
    if (matcher->nodes[at].pattern == 0)
        matcher->nodes[at].pattern = (uint32_t)index + 1;
    matcher->lengths[index] = (uint32_t)pattern.length;
}

// Breadth first: the failure of a node lies nearer to the root, so it is complete when it is needed.
static eng_status link_failures(eng_matcher *matcher) {
    uint32_t *queue = malloc(matcher->count * sizeof *queue);
    if (!queue)
        return ENG_NO_MEMORY;
    size_t head = 0, tail = 0;
    queue[tail++] = 0;
    while (head < tail) {
        uint32_t parent = queue[head++];
        for (uint32_t child = matcher->nodes[parent].child; child; child = matcher->nodes[child].sibling) {
            node *at = &matcher->nodes[child];
            if (parent != 0)
                at->failure = eng_matcher_step(matcher, matcher->nodes[parent].failure, at->byte);
            if (at->pattern == 0)
                at->pattern = matcher->nodes[at->failure].pattern;
            queue[tail++] = child;
        }
    }
    free(queue);
    return ENG_OK;
}

eng_status eng_matcher_create(const eng_text *patterns, size_t count, eng_matcher **out) {
    size_t total = 1;
    for (size_t i = 0; i < count; i++) {
        if (patterns[i].length == 0 || patterns[i].length > INT32_MAX - total)
            return ENG_INVALID;
        total += patterns[i].length;
    }
    eng_matcher *matcher = calloc(1, sizeof *matcher);
    if (!matcher)
        return ENG_NO_MEMORY;
    matcher->nodes = calloc(total, sizeof *matcher->nodes);
    matcher->lengths = calloc(count ? count : 1, sizeof *matcher->lengths);
    eng_status status = matcher->nodes && matcher->lengths ? ENG_OK : ENG_NO_MEMORY;
    if (status == ENG_OK) {
        matcher->count = 1;
        for (size_t i = 0; i < count; i++)
            add_pattern(matcher, patterns[i], i);
        status = link_failures(matcher);
    }
    if (status != ENG_OK) {
        eng_matcher_free(matcher);
        return status;
    }
    *out = matcher;
    return ENG_OK;
}

void eng_matcher_free(eng_matcher *matcher) {
    if (!matcher)
        return;
    free(matcher->nodes);
    free(matcher->lengths);
    free(matcher);
}

uint32_t eng_matcher_step(const eng_matcher *matcher, uint32_t state, uint8_t byte) {
    for (;;) {
        uint32_t next = find_child(matcher, state, byte);
        if (next || state == 0)
            return next;
        state = matcher->nodes[state].failure;
    }
}

uint32_t eng_matcher_depth(const eng_matcher *matcher, uint32_t state) {
    return matcher->nodes[state].depth;
}

bool eng_matcher_ends(const eng_matcher *matcher, uint32_t state, size_t *pattern, size_t *length) {
    uint32_t found = matcher->nodes[state].pattern;
    if (found == 0)
        return false;
    *pattern = found - 1;
    *length = matcher->lengths[found - 1];
    return true;
}

bool eng_matcher_find(const eng_matcher *matcher, const char *text, size_t length, size_t from, size_t *start,
                      size_t *end, size_t *pattern) {
    bool found = false;
    uint32_t state = 0;
    for (size_t at = from; at < length; at++) {
        state = eng_matcher_step(matcher, state, (uint8_t)text[at]);
        // Once no pattern that begins at or before the match in hand is still possible, that match is the leftmost.
        if (found && at + 1 - matcher->nodes[state].depth > *start)
            return true;
        size_t which, size;
        if (!eng_matcher_ends(matcher, state, &which, &size))
            continue;
        size_t begin = at + 1 - size;
        if (found && begin > *start)
            continue;
        found = true;
        *start = begin;
        *end = at + 1;
        *pattern = which;
    }
    return found;
}

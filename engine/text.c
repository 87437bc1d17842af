// SPDX-License-Identifier: Apache-2.0
// Two filters in a row: stop strings over the raw bytes, then UTF-8 assembly.
//
// The first holds back exactly the bytes that may still become a stop string (the depth of the matcher's state), the
// second those of a character under way. Both work byte by byte, so the cut of the bytes into tokens cannot show. The
// stop that is complete first wins; of several that end at one byte the longest, so that no part of one is sent. Tokens
// are remembered by where their bytes end until everything up to there has come out. One owner at a time; no locks.
#include "engine/text.h"

#include <stdlib.h>
#include <string.h>

#include "engine/buffer.h"
#include "engine/matcher.h"
#include "engine/utf8.h"

typedef struct token_ends {
    uint64_t *ends; // in bytes pushed since the start, of the tokens not yet settled
    size_t first, count, capacity;
} token_ends;

struct eng_text_out {
    eng_matcher *stops; // NULL: none
    uint32_t state;
    eng_buffer held; // pushed bytes, those before held_from are gone
    size_t held_from;
    eng_utf8 character;
    eng_buffer out;
    size_t out_from;   // what was taken before the last take
    uint64_t released; // bytes that have passed the stop filter
    uint64_t pushed;
    token_ends tokens;
    size_t settled, whole; // whole: of a text that was stopped
    bool include_stop, stopped, finished;
};

eng_status eng_text_create(const eng_text *stops, size_t stop_count, bool include_stop, eng_text_out **out,
                           eng_error *error) {
    for (size_t i = 0; i < stop_count; i++) {
        if (stops[i].length == 0)
            return eng_fail(error, ENG_INVALID, "stop string %zu is empty", i);
    }
    eng_text_out *text = calloc(1, sizeof *text);
    if (!text)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the text of a request");
    eng_status status = stop_count ? eng_matcher_create(stops, stop_count, &text->stops) : ENG_OK;
    if (status != ENG_OK) {
        free(text);
        return eng_fail(error, status, "stop strings: %s", eng_status_text(status));
    }
    text->include_stop = include_stop;
    *out = text;
    return ENG_OK;
}

void eng_text_free(eng_text_out *text) {
    if (!text)
        return;
    eng_matcher_free(text->stops);
    eng_buffer_free(&text->held);
    eng_buffer_free(&text->out);
    free(text->tokens.ends);
    free(text);
}

static void drop_taken(eng_text_out *text) {
    if (text->out_from == 0)
        return;
    size_t rest = text->out.length - text->out_from;
    memmove(text->out.bytes, text->out.bytes + text->out_from, rest);
    text->out.length = rest;
    text->out_from = 0;
}

// Everything that a push can need, so that it either happens whole or not at all.
static eng_status reserve(eng_text_out *text, size_t length) {
    token_ends *tokens = &text->tokens;
    if (tokens->first > 0 && tokens->first >= tokens->count - tokens->first) {
        tokens->count -= tokens->first;
        memmove(tokens->ends, tokens->ends + tokens->first, tokens->count * sizeof *tokens->ends);
        tokens->first = 0;
    }
    if (tokens->count == tokens->capacity) {
        size_t capacity = tokens->capacity ? tokens->capacity * 2 : 16;
        uint64_t *ends = reallocarray(tokens->ends, capacity, sizeof *ends);
        if (!ends)
            return ENG_NO_MEMORY;
        tokens->ends = ends;
        tokens->capacity = capacity;
    }
    if (text->held_from > 0 && text->held_from >= text->held.length - text->held_from) {
        text->held.length -= text->held_from;
        memmove(text->held.bytes, text->held.bytes + text->held_from, text->held.length);
        text->held_from = 0;
    }
    size_t held = text->held.length - text->held_from;
    if (length > SIZE_MAX / 8 - held)
        return ENG_NO_MEMORY;
    eng_status status = eng_buffer_reserve(&text->held, length);
    return status == ENG_OK ? eng_buffer_reserve(&text->out, (held + length + 1) * 3 + ENG_UTF8_PUSH_MAX) : status;
}

// Lets count held bytes through to the characters.
static void release(eng_text_out *text, size_t count) {
    const char *bytes = text->held.bytes + text->held_from;
    for (size_t i = 0; i < count; i++)
        text->out.length += eng_utf8_push(&text->character, (uint8_t)bytes[i], text->out.bytes + text->out.length);
    text->held_from += count;
    text->released += count;
}

static void settle(eng_text_out *text) {
    token_ends *tokens = &text->tokens;
    uint64_t written = text->released - text->character.length;
    while (tokens->first < tokens->count && (tokens->ends[tokens->first] <= written || text->finished)) {
        tokens->first++;
        text->settled++;
    }
}

static void end(eng_text_out *text) {
    text->out.length += eng_utf8_finish(&text->character, text->out.bytes + text->out.length);
    text->finished = true;
    settle(text);
}

eng_status eng_text_push(eng_text_out *text, const char *bytes, size_t length, bool *stopped) {
    if (text->finished && !text->stopped)
        return ENG_INVALID;
    *stopped = text->stopped;
    if (text->stopped) {
        text->settled++;
        return ENG_OK;
    }
    drop_taken(text);
    eng_status status = reserve(text, length);
    if (status != ENG_OK)
        return status;
    size_t seen = text->held.length - text->held_from; // bytes that the matcher knows
    if (length > 0)
        memcpy(text->held.bytes + text->held.length, bytes, length);
    text->held.length += length;
    text->pushed += length;
    text->tokens.ends[text->tokens.count++] = text->pushed;
    for (size_t i = 0; i < length && text->stops; i++) {
        size_t stop, size;
        text->state = eng_matcher_step(text->stops, text->state, (uint8_t)bytes[i]);
        if (!eng_matcher_ends(text->stops, text->state, &stop, &size))
            continue;
        release(text, seen + i + 1 - (text->include_stop ? 0 : size));
        *stopped = text->stopped = true;
        settle(text);
        text->whole = text->settled;
        end(text);
        return ENG_OK;
    }
    size_t held_back = text->stops ? eng_matcher_depth(text->stops, text->state) : 0;
    release(text, seen + length - held_back);
    settle(text);
    return ENG_OK;
}

eng_status eng_text_finish(eng_text_out *text) {
    if (text->finished)
        return ENG_OK;
    drop_taken(text);
    size_t held = text->held.length - text->held_from;
    eng_status status = eng_buffer_reserve(&text->out, (held + 1) * 3 + ENG_UTF8_PUSH_MAX);
    if (status != ENG_OK)
        return status;
    release(text, held);
    end(text);
    return ENG_OK;
}

void eng_text_take(eng_text_out *text, const char **bytes, size_t *length) {
    drop_taken(text);
    *bytes = text->out.length ? text->out.bytes : "";
    *length = text->out.length;
    text->out_from = text->out.length;
}

size_t eng_text_settled(const eng_text_out *text) {
    return text->settled;
}

size_t eng_text_whole(const eng_text_out *text) {
    return text->stopped ? text->whole : text->settled;
}

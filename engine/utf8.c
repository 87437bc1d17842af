// SPDX-License-Identifier: Apache-2.0
// One recogniser of UTF-8 for everything: the state machine that assembles characters also validates whole texts.
//
// eng_utf8_valid is declared in engine/text.h, the header that servers include. No state, any thread.
#include "engine/utf8.h"

#include <string.h>

#include "engine/text.h"

static size_t replacement(char *out) {
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

// Begins a character; false: the byte begins none.
static bool begin(eng_utf8 *state, uint8_t byte) {
    if (byte < 0xc2 || byte > 0xf4)
        return false;
    state->bytes[0] = byte;
    state->length = 1;
    state->wanted = byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    state->low = byte == 0xe0 ? 0xa0 : byte == 0xf0 ? 0x90 : 0x80;
    state->high = byte == 0xed ? 0x9f : byte == 0xf4 ? 0x8f : 0xbf;
    return true;
}

size_t eng_utf8_push(eng_utf8 *state, uint8_t byte, char *out) {
    size_t written = 0;
    if (state->length) {
        if (byte >= state->low && byte <= state->high) {
            state->bytes[state->length++] = byte;
            state->low = 0x80;
            state->high = 0xbf;
            if (state->length < state->wanted)
                return 0;
            memcpy(out, state->bytes, state->wanted);
            state->length = 0;
            return state->wanted;
        }
        state->length = 0;
        written = replacement(out);
    }
    if (byte < 0x80) {
        out[written] = (char)byte;
        return written + 1;
    }
    if (begin(state, byte))
        return written;
    return written + replacement(out + written);
}

size_t eng_utf8_finish(eng_utf8 *state, char *out) {
    if (!state->length)
        return 0;
    state->length = 0;
    return replacement(out);
}

size_t eng_utf8_decode(const char *bytes, size_t length, uint32_t *code) {
    uint8_t lead = (uint8_t)bytes[0];
    if (lead < 0x80) {
        *code = lead;
        return 1;
    }
    eng_utf8 state = {0};
    if (!begin(&state, lead) || length < state.wanted)
        return 0;
    uint32_t value = lead & (0x7fu >> state.wanted);
    for (size_t i = 1; i < state.wanted; i++) {
        uint8_t byte = (uint8_t)bytes[i];
        if (byte < state.low || byte > state.high)
            return 0;
        state.low = 0x80;
        state.high = 0xbf;
        value = value << 6 | (byte & 0x3f);
    }
    *code = value;
    return state.wanted;
}

size_t eng_utf8_encode(uint32_t code, char *out) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)((0xf00u >> length & 0xf0) | code);
    return length;
}

// Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
static bool stands_for_itself(uint32_t code) {
    return (code >= 0x21 && code <= 0x7e) || (code >= 0xa1 && code <= 0xac) || (code >= 0xae && code <= 0xff);
}

uint32_t eng_byte_level_character(uint8_t byte) {
    if (stands_for_itself(byte))
        return byte;
    return byte < 0x21 ? 0x100u + byte : byte < 0xa1 ? 0x121u + byte - 0x7f : 0x143;
}

int eng_byte_level_byte(uint32_t character) {
    if (stands_for_itself(character))
        return (int)character;
    if (character < 0x100 || character > 0x143)
        return -1;
    uint32_t index = character - 0x100;
    return (int)(index < 0x21 ? index : index < 0x43 ? index - 0x21 + 0x7f : 0xad);
}

bool eng_utf8_valid(const char *bytes, size_t length, size_t *offset) {
    size_t at = 0;
    while (at < length) {
        if ((uint8_t)bytes[at] < 0x80) {
            at++;
            continue;
        }
        uint32_t code;
        size_t size = eng_utf8_decode(bytes + at, length - at, &code);
        if (size == 0) {
            if (offset)
                *offset = at;
            return false;
        }
        at += size;
    }
    return true;
}

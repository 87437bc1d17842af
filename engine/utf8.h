// SPDX-License-Identifier: Apache-2.0
// UTF-8: validation, single characters, and assembly of characters from bytes that arrive one at a time.
//
// Well-formed is what table 3-7 of the Unicode standard says: no overlong forms, no surrogates, nothing above U+10FFFF.
// Repair replaces each maximal subpart of an ill-formed sequence by one U+FFFD (Unicode 15, section 3.9, "U+FFFD
// Substitution of Maximal Subparts"; the same as the WHATWG decoder), and does not depend on how the bytes were cut.
#ifndef ENGINE_UTF8_H
#define ENGINE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ENG_UTF8_PUSH_MAX = 6 }; // bytes that one pushed byte can bring out: two U+FFFD

// A character under way; zeroed = none.
typedef struct eng_utf8 {
    uint8_t bytes[4];
    uint8_t length, wanted; // bytes held, bytes of the whole character
    uint8_t low, high;      // range of the next byte
} eng_utf8;

// Adds a byte; writes what it completes to out (room for ENG_UTF8_PUSH_MAX) and returns how many bytes that is.
size_t eng_utf8_push(eng_utf8 *state, uint8_t byte, char *out);
// The end of the bytes: an incomplete character becomes one U+FFFD. Returns 0 or 3.
size_t eng_utf8_finish(eng_utf8 *state, char *out);

// Length of the well-formed character at bytes (length > 0 bytes are there), 0 if there is none; *code: its number.
size_t eng_utf8_decode(const char *bytes, size_t length, uint32_t *code);
// Writes a scalar value (no surrogate, at most 0x10ffff) to out, 1..4 bytes; returns how many.
size_t eng_utf8_encode(uint32_t code, char *out);

// The printable character that stands for a byte in byte-level vocabularies (Radford et al., GPT-2, 2019).
uint32_t eng_byte_level_character(uint8_t byte);
// The byte of such a character, -1 if it is none.
int eng_byte_level_byte(uint32_t character);

#endif

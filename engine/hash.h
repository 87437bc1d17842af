// SPDX-License-Identifier: Apache-2.0
// Hashing for the open-addressed tables of the tokenizer and its trainer.
//
// The tables are keyed by a tokenizer file or a training corpus, never by a client's text, so no secret seed is needed;
// what is stored decides the length of every probe, and lookups of foreign text only read.
#ifndef ENGINE_HASH_H
#define ENGINE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Finaliser of MurmurHash3 (Appleby, public domain): every input bit reaches every output bit.
static inline uint64_t eng_hash_mix(uint64_t value) {
    value ^= value >> 33;
    value *= 0xff51afd7ed558ccdu;
    value ^= value >> 33;
    value *= 0xc4ceb9fe1a85ec53u;
    return value ^ value >> 33;
}

static inline uint64_t eng_hash_bytes(const char *bytes, size_t length) {
    uint64_t hash = 0x9e3779b97f4a7c15u ^ length, word;
    for (; length >= sizeof word; bytes += sizeof word, length -= sizeof word) {
        memcpy(&word, bytes, sizeof word);
        hash = eng_hash_mix(hash ^ word);
    }
    word = 0;
    for (size_t i = 0; i < length; i++)
        word = word << 8 | (uint8_t)bytes[i];
    return eng_hash_mix(hash ^ word);
}

#endif

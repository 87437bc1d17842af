// SPDX-License-Identifier: Apache-2.0
// The layout of a token shard, shared by its reader and its writer; nobody else includes it.
// Everything is little-endian and 8-aligned, so that a mapped file is read as it lies.
#ifndef TRAINER_SHARD_FORMAT_H
#define TRAINER_SHARD_FORMAT_H

#include <stdint.h>

#include "trainer/shard.h"

enum { TRN_SHARD_VERSION = 1, TRN_SHARD_MASKED = 1, TRN_SHARD_TARGETS = 2 };

static const uint8_t trn_shard_magic[8] = {'M', 'E', 'S', 'A', 'T', 'O', 'K', 0};

typedef struct trn_shard_header {
    uint16_t version, flags;
    uint32_t width; // bytes an id
    uint64_t ids, documents;
    uint8_t tokenizer[TRN_TOKENIZER_DIGEST];
} trn_shard_header;

static inline uint64_t trn_align8(uint64_t offset) {
    return (offset + 7) & ~UINT64_C(7);
}

static inline uint16_t trn_get16(const uint8_t *at) {
    return (uint16_t)(at[0] | at[1] << 8);
}
static inline uint32_t trn_get32(const uint8_t *at) {
    return trn_get16(at) | (uint32_t)trn_get16(at + 2) << 16;
}
static inline uint64_t trn_get64(const uint8_t *at) {
    return trn_get32(at) | (uint64_t)trn_get32(at + 4) << 32;
}
static inline void trn_put(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

#endif

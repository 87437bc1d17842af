// SPDX-License-Identifier: Apache-2.0
// Token shards: files NAME-00000.tok, NAME-00001.tok ... that hold the ids of many documents.
//
// Little-endian: a header of 64 bytes {"MESATOK\0", u16 version 1, u16 flags (bit 0: mask, bit 1: targets), u32 bytes
// an id (2 or 4), u64 ids, u64 documents, SHA-256 of tokenizer.json}; the ids; if flagged as many targets; a mask byte
// an id if flagged (1: its loss counts); then, at the next multiple of 8, a row a document {u64 first id, u32 ids, u32
// bytes of its text, u64 first 8 bytes of SHA-256(text)}.
//
// With targets a document is an *example*: a whole row of training of its own, ids in, targets out at the same places
// (neither BOS nor EOS is added). Without, the target of a place is the next id. Ids that come from no tokenizer have a
// digest of zeros.
//
// Written whole or not at all. Read by mapping; sizes, offsets and the table are checked when the file is opened, ids
// against a vocabulary when they are read. A shard that changes while it is mapped is the caller's fault. Readers may
// be shared.
#ifndef TRAINER_SHARD_H
#define TRAINER_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

enum { TRN_SHARD_HEADER = 64, TRN_SHARD_ROW = 24, TRN_TOKENIZER_DIGEST = 32 };

typedef struct trn_document {
    uint64_t first;      // its first id in the shard
    uint32_t ids;        // how many
    uint32_t text_bytes; // UTF-8 bytes of the text
    uint64_t hash;       // the first 8 bytes of SHA-256(text), as a little-endian number
} trn_document;

typedef struct trn_shard trn_shard;

ENG_CHECKED eng_status trn_shard_open(const char *path, trn_shard **out, eng_error *error);
void trn_shard_close(trn_shard *shard);
const char *trn_shard_path(const trn_shard *shard);
uint64_t trn_shard_documents(const trn_shard *shard);
uint64_t trn_shard_ids(const trn_shard *shard);
bool trn_shard_masked(const trn_shard *shard);
bool trn_shard_has_targets(const trn_shard *shard);
const uint8_t *trn_shard_tokenizer(const trn_shard *shard); // 32 bytes
trn_document trn_shard_document(const trn_shard *shard, uint64_t index);
// Ids [first, first + count) of the shard, and their mask (NULL: not wanted; all 1 where the shard has none). An id at
// or above vocabulary is ENG_FORMAT with file and offset.
ENG_CHECKED eng_status trn_shard_read(const trn_shard *shard, uint64_t first, uint32_t count, int32_t vocabulary,
                                      int32_t *ids, uint8_t *mask, eng_error *error);
// Targets [first, first + count) of a shard that has them, -1 where the mask is 0.
ENG_CHECKED eng_status trn_shard_read_targets(const trn_shard *shard, uint64_t first, uint32_t count,
                                              int32_t vocabulary, int32_t *targets, eng_error *error);

// The path of shard number `index` of a name: "NAME-00000.tok". Returns new (free); NULL: out of memory.
char *trn_shard_name(const char *name, int index);

// Collects documents and writes NAME's shards one after the other, each of at most `limit` bytes of ids (a longer
// document has one of its own). Memory is bounded by the limit and the longest document.
typedef struct trn_shard_writer trn_shard_writer;
ENG_CHECKED eng_status trn_shard_writer_create(const char *name, const uint8_t tokenizer[TRN_TOKENIZER_DIGEST],
                                               int32_t vocabulary, uint64_t limit, trn_shard_writer **out,
                                               eng_error *error);
ENG_CHECKED eng_status trn_shard_writer_add(trn_shard_writer *writer, const int32_t *ids, uint32_t count,
                                            uint32_t text_bytes, uint64_t hash, eng_error *error);
// An example: targets (count), -1 where no loss counts. All documents of a writer are of one kind.
ENG_CHECKED eng_status trn_shard_writer_add_example(trn_shard_writer *writer, const int32_t *ids,
                                                    const int32_t *targets, uint32_t count, uint64_t hash,
                                                    eng_error *error);
// Writes the last shard; a name without documents gets none. *shards, *documents, *ids (may be NULL) tell what was
// written.
ENG_CHECKED eng_status trn_shard_writer_finish(trn_shard_writer *writer, int *shards, uint64_t *documents,
                                               uint64_t *ids, eng_error *error);
// Frees the writer; without a finish before, the shards that it wrote are removed.
void trn_shard_writer_free(trn_shard_writer *writer);

#endif

// SPDX-License-Identifier: Apache-2.0
// Training rows from token shards (models.md 11.6).
//
// A document of n ids gives n + 1 pairs: inputs BOS, ids; targets ids, EOS. The pairs of all documents, in the order of
// the shards, are cut into rows of `context` pairs (the last may be short); a document that goes on in another row goes
// on from a zero state. So every target is in exactly one row. Shards of examples (shard.h) give one row an example,
// with as many pairs as ids; `context` must hold the longest. Rows are reached by index, from one number a document
// kept in memory. A *window* is a piece of one document, for evaluation. Immutable once open; may be shared by threads.
#ifndef TRAINER_DATASET_H
#define TRAINER_DATASET_H

#include <stdint.h>

#include "trainer/shard.h"

typedef struct trn_dataset trn_dataset;

typedef struct trn_dataset_options {
    const char *const *name; // NAME of the shards NAME-00000.tok ...
    int names;
    int32_t context;                    // pairs a row
    int32_t bos_id, eos_id, vocab_size; // examples need no bos_id and eos_id
    const uint8_t *tokenizer;           // SHA-256 that the shards must have; NULL: any, but all the same
} trn_dataset_options;

// One row or window. The arrays are the caller's, of `context` entries each.
typedef struct trn_row {
    int32_t *id;       // inputs
    int32_t *target;   // -1: no loss (masked)
    int32_t *boundary; // places > 0 at which a document starts
    int32_t length, boundaries, counted;
} trn_row;

// No document at all is ENG_INVALID.
ENG_CHECKED eng_status trn_dataset_open(const trn_dataset_options *options, trn_dataset **out, eng_error *error);
void trn_dataset_close(trn_dataset *dataset);

int64_t trn_dataset_rows(const trn_dataset *dataset);  // of an epoch
int64_t trn_dataset_pairs(const trn_dataset *dataset); // of an epoch
int64_t trn_dataset_documents(const trn_dataset *dataset);
bool trn_dataset_has_examples(const trn_dataset *dataset);
// SHA-256 over lengths and hashes of all documents: equal for the same texts in the same order.
ENG_CHECKED eng_status trn_dataset_digest(const trn_dataset *dataset, uint8_t digest[32], eng_error *error);
const uint8_t *trn_dataset_tokenizer(const trn_dataset *dataset); // 32 bytes

// Fills row with row `index` of 0..rows-1.
ENG_CHECKED eng_status trn_dataset_row(const trn_dataset *dataset, int64_t index, trn_row *row, eng_error *error);
// The row at `place` 0, 1, 2 ... of training: epoch after epoch, each in its own order.
int64_t trn_dataset_order(const trn_dataset *dataset, uint64_t seed, int64_t place);

int64_t trn_dataset_document_pairs(const trn_dataset *dataset, int64_t document);
int64_t trn_dataset_document_bytes(const trn_dataset *dataset, int64_t document); // UTF-8
// Fills row with pairs [first, first + count) of a document.
ENG_CHECKED eng_status trn_dataset_window(const trn_dataset *dataset, int64_t document, int64_t first, int32_t count,
                                          trn_row *row, eng_error *error);

// A row with arrays of `context` entries in one allocation; freed with trn_row_free.
ENG_CHECKED eng_status trn_row_create(int32_t context, trn_row *out, eng_error *error);
void trn_row_free(trn_row *row);

#endif

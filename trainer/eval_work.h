// SPDX-License-Identifier: Apache-2.0
// One item on its way through the model: its texts as ids, and what the readings say about it.
//
// A context and its continuation are encoded together, behind the examples if there are any; a token that lies across
// the border belongs to the continuation. Where no id stands before what is scored, BOS does (without one, the end of
// text). A text is BOS, ids, end of text, in windows of at most `context` pairs, each from a zero state, as token
// shards are.
#ifndef TRAINER_EVAL_WORK_H
#define TRAINER_EVAL_WORK_H

#include "engine/tokenizer.h"
#include "trainer/eval_item.h"
#include "trainer/eval_result.h"

typedef struct trn_encoder {
    const eng_tokenizer *tokenizer;
    const eng_config *config;
    const char *examples; // before every context; "": none
    int32_t context;      // pairs of a text's window
    int64_t most;         // ids of a reading; longer ones lose their beginning. -1: any number
} trn_encoder;

typedef struct trn_work {
    trn_passage passage; // first, so that a passage leads to its work
    trn_item item;
    int64_t place; // in the row
    int32_t **owned;
    int32_t owned_count;
    int32_t scored, truncated; // readings that score (the one that generates comes behind), readings that were cut
} trn_work;

// Takes the item, also on failure. *out: trn_work_free.
ENG_CHECKED eng_status trn_work_create(const trn_encoder *encoder, trn_item *item, int64_t place, trn_work **out,
                                       eng_error *error);
void trn_work_free(trn_work *work); // NULL: nothing
// Whether what was drawn so far decides the item: an accepted answer, or a line with text.
bool trn_work_stops(const trn_encoder *encoder, const trn_work *work, const trn_reading *reading);
// Writes the item's values into the row. After the last one trn_work_finish settles what guessing gives and which
// metric stands for the row: bits per byte of texts and targets, `contains` of answers, `acc` of choices that are
// labels, have no context or contexts of their own or were made here, otherwise `acc_norm`. ENG_NO_MEMORY.
ENG_CHECKED eng_status trn_work_record(const trn_encoder *encoder, const trn_work *work, trn_result_row *row,
                                       eng_error *error);
void trn_work_finish(trn_result_row *row);

#endif

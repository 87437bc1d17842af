// SPDX-License-Identifier: Apache-2.0
// Which items overlap with training text: any sequence of 13 words that both have.
//
// Words are runs of letters and digits, ASCII in lower case, bytes beyond ASCII as they are; so the marks do not depend
// on the tokenizer that packed the text. Items of fewer words cannot be told and are never marked. Sequences are
// compared by 64-bit hashes.
#ifndef TRAINER_EVAL_OVERLAP_H
#define TRAINER_EVAL_OVERLAP_H

#include "engine/tokenizer.h"

enum { TRN_OVERLAP_WORDS = 13 };

typedef struct trn_overlap trn_overlap;

ENG_CHECKED eng_status trn_overlap_create(trn_overlap **out, eng_error *error);
void trn_overlap_free(trn_overlap *overlap); // NULL: nothing
// The sequences of a text are those of the item with the next number, 0, 1, 2 ...
ENG_CHECKED eng_status trn_overlap_add(trn_overlap *overlap, const char *text, size_t length, eng_error *error);
// Marks the items that share a sequence with this text; every item has been added. May be called for many texts.
ENG_CHECKED eng_status trn_overlap_scan(trn_overlap *overlap, const char *text, size_t length, eng_error *error);
// The same with every document of the shards NAME-00000.tok ..., which the tokenizer must have made.
ENG_CHECKED eng_status trn_overlap_scan_shards(trn_overlap *overlap, const char *name, const eng_tokenizer *tokenizer,
                                               eng_error *error);
bool trn_overlap_marked(const trn_overlap *overlap, int64_t item);

#endif

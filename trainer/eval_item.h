// SPDX-License-Identifier: Apache-2.0
// One item of an evaluation: texts whose continuations are scored, and what a record of a JSONL file says.
//
// An item has *variants*, each a context and its continuation. Of several one is right (multiple choice); a single one
// is a target (last word, translation, an answer), or, without a context, a text. Where `generate` is set the right
// variant's context is continued as well and the result searched for an accepted answer. Every string is the item's.
#ifndef TRAINER_EVAL_ITEM_H
#define TRAINER_EVAL_ITEM_H

#include "trainer/jsonl.h"

typedef struct trn_item {
    char **context, **continuation; // (variants)
    int32_t *bytes;                 // (variants) UTF-8 bytes of the continuation as the record has it
    int32_t variants, gold;
    bool is_text;     // one variant without a context: losses by position
    int32_t generate; // most ids to draw; 0: none
    char **accepted;  // any of them in what is drawn is right
    int32_t accepted_count;
    char group[48]; // "": none
} trn_item;

// Records: {"ctx","choices","gold"}, with "ctxs" and "cont" scored as p(cont | ctxs[i]); {"ctx","target"};
// {"ctx","question","answer"} with "answers" or "aliases"; {"src_lang","tgt_lang","src","tgt"}; {"text"}. A group is
// taken from "uid", "category" or the target language. Anything else is ENG_FORMAT. *out: trn_item_free, also on
// failure.
ENG_CHECKED eng_status trn_item_read(const trn_json *record, trn_item *out, eng_error *error);
void trn_item_free(trn_item *item);

// Adds a variant. Spaces at the end of the context move to the continuation; where neither side of the border is white
// space, a space is put in front of the continuation.
ENG_CHECKED eng_status trn_item_add(trn_item *item, const char *context, const char *continuation, eng_error *error);
ENG_CHECKED eng_status trn_item_accept(trn_item *item, const char *answer, eng_error *error);
// A text as it stands.
ENG_CHECKED eng_status trn_item_add_text(trn_item *item, const char *text, size_t length, eng_error *error);
// "CONTEXT\n\nKey: ..." as the key-value retrieval of Liu et al., "Lost in the middle" (2023), asks. New (free).
char *trn_item_key_prompt(const char *object, const char *key);

// A printf into new memory; NULL: out of memory.
__attribute__((format(printf, 1, 2))) char *trn_format(const char *format, ...);

#endif

// SPDX-License-Identifier: Apache-2.0
// A task: a numbered list of items, from a file or made here.
//
// Files are JSONL (eval_item.h) or text whose documents are separated as documents.h says. A file is checked from end
// to end when it is opened, so a bad record ends the command before a model has read anything. Needles and key-value
// retrieval are made from a seed, a length in tokens and a number: item i does not depend on the others, and its depth
// is in fifth i mod 5.
#ifndef TRAINER_EVAL_TASK_H
#define TRAINER_EVAL_TASK_H

#include "engine/tokenizer.h"
#include "trainer/eval_item.h"

typedef struct trn_task {
    char *name;      // "hellaswag_val", "needle essay number 1024"
    char digest[65]; // SHA-256 of what the items are made from, in hexadecimal
    int64_t items;
    int64_t length; // in tokens, of made items; 0: a file
    bool is_text;
    eng_status (*make)(const struct trn_task *task, int64_t index, trn_item *out, eng_error *error);
    void (*release)(struct trn_task *task);
    void *data;
} trn_task;

// *out: trn_task_close. Errors name file and line.
ENG_CHECKED eng_status trn_task_open_file(const char *path, trn_task *out, eng_error *error);

typedef enum trn_value_kind { TRN_VALUE_NUMBER, TRN_VALUE_WORD, TRN_VALUE_UUID } trn_value_kind;

typedef struct trn_made_options {
    const eng_tokenizer *tokenizer; // counts the tokens; borrowed for the task's life
    const char *haystack;           // a file of texts; NULL: noise. Needles alone
    trn_value_kind value;           // needles alone
    int64_t length;                 // tokens of prompt and answer
    int64_t items;
    uint64_t seed;
} trn_made_options;

// One sentence that tells a value, hidden in a text (Hsieh et al., "RULER", 2024), and one pair of a JSON object (Liu
// et al., "Lost in the middle", 2023). ENG_TOO_LONG: the length has no room for the question, or the texts have not
// that many tokens. Of ten variants one tells the true value.
ENG_CHECKED eng_status trn_task_make_needles(const trn_made_options *options, trn_task *out, eng_error *error);
ENG_CHECKED eng_status trn_task_make_pairs(const trn_made_options *options, trn_task *out, eng_error *error);
void trn_task_close(trn_task *task); // a zeroed one is accepted

// Item `index`; *out: trn_item_free.
ENG_CHECKED eng_status trn_task_item(const trn_task *task, int64_t index, trn_item *out, eng_error *error);

#endif

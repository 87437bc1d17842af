// SPDX-License-Identifier: Apache-2.0
// Trains a byte-level BPE tokenizer on text files and writes it in Hugging Face's format.
//
// Text is cut by the pattern of Llama 3 (contractions, words with the space before them, digits in groups of up to
// three or alone, punctuation, white space); merges never cross these pieces. Any text can be encoded: each byte is a
// token. Ids: the special tokens first, `<|endoftext|>` as 0, then the 256 bytes in order, then the merges in the order
// in which they were learned. `<|endoftext|>` is both BOS and EOS. The same files and options give the same tokenizer.
#ifndef TRAINER_TOKENIZER_H
#define TRAINER_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

#define TRN_END_OF_TEXT "<|endoftext|>"

typedef struct trn_tokenizer_options {
    int32_t digits;             // digits that a piece may hold: 1 or 3; 0: 3
    size_t max_token_bytes;     // no longer token is made; 0: 64
    uint64_t min_count;         // rarer pairs are not merged; 0: 2
    size_t max_pieces;          // distinct pieces kept; above it the rarest are forgotten; 0: 2^22
    const char *const *special; // special tokens after <|endoftext|>
    size_t special_count;
    // Called now and then: done of total (bytes read, then tokens made) and what is being done. May be NULL.
    void (*progress)(void *context, uint64_t done, uint64_t total, const char *text);
    void *context;
} trn_tokenizer_options;

// Reads count UTF-8 files whose documents are separated by a line holding only <|endoftext|>, trains a vocabulary of
// exactly vocab_size ids, writes out_dir/tokenizer.json and out_dir/tokenizer_config.json (out_dir is made if it is not
// there, its parent must be). options may be NULL. ENG_INVALID: an option, a file that is not UTF-8 (with the offset),
// or text that gives fewer tokens. One thread; memory is bounded by max_pieces and the longest line.
ENG_CHECKED eng_status trn_tokenizer_train(const char *const *paths, size_t count, int32_t vocab_size,
                                           const trn_tokenizer_options *options, const char *out_dir, eng_error *error);

#endif

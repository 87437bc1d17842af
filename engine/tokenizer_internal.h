// SPDX-License-Identifier: Apache-2.0
// The parts of a tokenizer and who fills them: tokenizer_load.c the vocabulary, the merges and the added tokens,
// tokenizer_pipeline.c what stands around the model in tokenizer.json, tokenizer.c uses them.
#ifndef ENGINE_TOKENIZER_INTERNAL_H
#define ENGINE_TOKENIZER_INTERNAL_H

#include <jansson.h>

#include "engine/bpe.h"
#include "engine/buffer.h"
#include "engine/matcher.h"
#include "engine/normalize.h"
#include "engine/pretokenize.h"
#include "engine/tokenizer.h"

enum { ENG_MAX_TOKENS = 1 << 24 }; // ids of a vocabulary; holes count

// A string that is found in the text before BPE sees it.
typedef struct eng_added_token {
    char *content;
    int32_t id;
    bool single_word;    // only where no word character touches it
    bool lstrip, rstrip; // takes the white space before, behind
    bool normalized;     // looked for after normalization
    bool special;
} eng_added_token;

// One of the two passes over a text: added tokens by their place in the pass's matcher.
typedef struct eng_added_pass {
    eng_matcher *matcher; // NULL: the pass has no tokens
    const eng_added_token **tokens;
} eng_added_pass;

typedef struct eng_token_text {
    size_t offset; // in eng_tokenizer.texts
    uint32_t length;
    bool known, special;
} eng_token_text;

struct eng_tokenizer {
    int32_t size; // 1 + the highest id
    int32_t bos;
    uint8_t digest[32];
    bool byte_level;        // the vocabulary is written in the byte-level alphabet
    bool byte_fallback;     // model option
    int32_t template_bos;   // what the post-processor puts in front, -1: nothing
    uint32_t strip;         // spaces that decoding removes in front of a whole text
    eng_token_text *tokens; // size of them
    eng_buffer texts;
    eng_added_token *added;
    size_t added_count;
    eng_added_pass raw, normalized; // before and after normalization
    eng_added_pass control;         // all special ones as they are written
    eng_normalizer *normalizer;
    eng_pretokenizer *pretokenizer;
    eng_bpe *bpe;
};

// What the decoder in tokenizer.json does to each token's text.
enum { ENG_MAX_REPLACEMENTS = 8 };
typedef struct eng_decoder {
    bool byte_level, byte_fallback;
    const char *replaced[ENG_MAX_REPLACEMENTS], *replacement[ENG_MAX_REPLACEMENTS]; // borrowed from the JSON
    size_t replacements;
} eng_decoder;

// Reads normalizer, pre_tokenizer, post_processor and decoder of tokenizer.json; what is not built is
// ENG_UNSUPPORTED with its name. added tokens must have been read (a template names one of them).
ENG_CHECKED eng_status eng_tokenizer_read_pipeline(eng_tokenizer *tokenizer, const json_t *root, eng_decoder *decoder,
                                                   eng_error *error);

// Encodes and tells the work that merging was.
ENG_CHECKED eng_status eng_tokenizer_encode_counted(const eng_tokenizer *tokenizer, const char *text, size_t length,
                                                    bool special, bool add_bos, int32_t **ids, size_t *count,
                                                    eng_bpe_work *work, eng_error *error);

#endif

// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE as Hugging Face's tokenizer.json describes it (GPT-2, Llama 3, digit-splitting pre-tokenizers).
//
// A tokenizer is immutable after it is opened and may be shared by any number of threads. Encoding takes time linear in
// the text (a heap of merges inside a piece: n log n at worst), whatever the text. What the file asks for and this
// code does not build (another model type, normalizer, pre-tokenizer, post-processor) is refused by name at load.
#ifndef ENGINE_TOKENIZER_H
#define ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct eng_tokenizer eng_tokenizer;

// Reads DIR/tokenizer.json, and tokenizer_config.json beside it if there (add_bos_token, bos_token). ENG_NOT_FOUND: no
// tokenizer.json. vocab_size: ids at or above it in the file are an error (the model has no row for them); 0: any.
ENG_CHECKED eng_status eng_tokenizer_open(const char *dir, int32_t vocab_size, eng_tokenizer **out, eng_error *error);
// The same from memory (borrowed for the call); config_json may be NULL.
ENG_CHECKED eng_status eng_tokenizer_parse(const char *json, size_t length, const char *config_json,
                                           size_t config_length, int32_t vocab_size, eng_tokenizer **out,
                                           eng_error *error);
void eng_tokenizer_close(eng_tokenizer *tokenizer);

int32_t eng_tokenizer_size(const eng_tokenizer *tokenizer); // 1 + the highest id
int32_t eng_tokenizer_bos(const eng_tokenizer *tokenizer);  // the id that encoding puts in front; -1: none
// The id of an added token by its exact text, -1 if there is none.
int32_t eng_tokenizer_special(const eng_tokenizer *tokenizer, const char *content);
// 32 bytes: SHA-256 of tokenizer.json as read.
const uint8_t *eng_tokenizer_digest(const eng_tokenizer *tokenizer);

// Text to ids. special: added tokens flagged special that are written in the text become their ids (otherwise they are
// plain text, and plain text never gives such an id); other added tokens are always found. add_bos: the tokenizer's BOS
// in front where it has one. *ids is new memory. ENG_INVALID: not UTF-8, with the offset; ENG_UNSUPPORTED: a byte for
// which the vocabulary has no token; ENG_TOO_LONG: a pattern of the file ran into its limit on this text.
ENG_CHECKED eng_status eng_tokenizer_encode(const eng_tokenizer *tokenizer, const char *text, size_t length,
                                            bool special, bool add_bos, int32_t **ids, size_t *count, eng_error *error);

// The same for a text of two origins: where plain[i] is not 0, byte i came from somebody who may not write special
// tokens. Such a token is found only within the bytes of the others; merges do not see the border. No BOS in front.
ENG_CHECKED eng_status eng_tokenizer_encode_marked(const eng_tokenizer *tokenizer, const char *text, size_t length,
                                                   const uint8_t *plain, int32_t **ids, size_t *count,
                                                   eng_error *error);

// The bytes of one id (borrowed; not NUL-terminated); special tokens give their text. Unknown id: *length 0.
const char *eng_tokenizer_bytes(const eng_tokenizer *tokenizer, int32_t id, size_t *length);
bool eng_tokenizer_is_special(const eng_tokenizer *tokenizer, int32_t id);

// Ids to UTF-8 text, invalid sequences as U+FFFD (one a maximal subpart, as the Unicode standard says). *text is new
// memory, NUL after *length bytes. An id outside the vocabulary (a hole counts) is ENG_INVALID. Where the file's
// decoder strips a space at the start (Llama 2), it is stripped here, from a whole text; eng_tokenizer_bytes keeps it.
ENG_CHECKED eng_status eng_tokenizer_decode(const eng_tokenizer *tokenizer, const int32_t *ids, size_t count,
                                            bool keep_special, char **text, size_t *length, eng_error *error);

#endif

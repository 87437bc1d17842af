// SPDX-License-Identifier: Apache-2.0
// The parts of an import from GGUF; nobody else includes it.
//
// import.c lays out the folder, config_gguf.c turns the architecture's keys into config.json, tokenizer_gguf.c the
// vocabulary into tokenizer.json. Texts are new memory: free.
#ifndef ENGINE_IMPORT_INTERNAL_H
#define ENGINE_IMPORT_INTERNAL_H

#include "engine/gguf.h"
#include "engine/safetensors.h"

// Reports "FILE: key 'KEY': text"; returns code.
eng_status eng_gguf_fail(const eng_gguf *file, eng_status code, const char *key, eng_error *error, const char *format,
                         ...) ENG_PRINTF(5, 6);

// Typed keys: a key that is not there leaves *out as it was, one of another kind or out of range is an error.
ENG_CHECKED eng_status eng_gguf_read_integer(const eng_gguf *file, const char *key, int64_t least, int64_t most,
                                             int64_t *out, eng_error *error);
ENG_CHECKED eng_status eng_gguf_read_real(const eng_gguf *file, const char *key, double *out, eng_error *error);
ENG_CHECKED eng_status eng_gguf_read_flag(const eng_gguf *file, const char *key, bool *out, eng_error *error);
// *out is new memory, or as it was; text with a NUL in it is refused.
ENG_CHECKED eng_status eng_gguf_read_text(const eng_gguf *file, const char *key, char **out, eng_error *error);

// config.json of the Llama family, for weights of that type, and matrices in blocks of 8 or 4 bits; 0: there are none.
ENG_CHECKED eng_status eng_import_config(const eng_gguf *file, eng_dtype dtype, int bits, char **config,
                                         eng_error *error);

// tokenizer.json and tokenizer_config.json. Both NULL: the file holds no tokenizer. *chat_template: the latter holds
// one.
ENG_CHECKED eng_status eng_import_tokenizer(const eng_gguf *file, char **tokenizer, char **tokenizer_config,
                                            bool *chat_template, eng_error *error);

#endif

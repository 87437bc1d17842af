// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4) of bytes, of streams and of files.
//
// The identity of models, tokenizers and checkpoints, and the guard of stored sessions. GnuTLS computes it.
#ifndef ENGINE_DIGEST_H
#define ENGINE_DIGEST_H

#include <stddef.h>

#include "engine/status.h"

enum { ENG_DIGEST_BYTES = 32, ENG_DIGEST_HEX = 65 };

typedef struct eng_digest eng_digest;

ENG_CHECKED eng_status eng_digest_begin(eng_digest **out); // returns new
ENG_CHECKED eng_status eng_digest_add(eng_digest *digest, const void *data, size_t length);
void eng_digest_end(eng_digest *digest, unsigned char out[ENG_DIGEST_BYTES]); // takes digest
void eng_digest_free(eng_digest *digest);                                     // abandons; NULL: nothing

ENG_CHECKED eng_status eng_digest_bytes(const void *data, size_t length, unsigned char out[ENG_DIGEST_BYTES]);
// A regular file of any size, in pieces.
ENG_CHECKED eng_status eng_digest_file(const char *path, unsigned char out[ENG_DIGEST_BYTES], eng_error *error);

void eng_digest_hex(const unsigned char digest[ENG_DIGEST_BYTES], char out[ENG_DIGEST_HEX]); // lower case, NUL

#endif

// SPDX-License-Identifier: Apache-2.0
// The documents of a text file, one after the other, in memory one at a time.
//
// Documents are separated by a line that holds only <|endoftext|>; the line end before a separator, and the last one of
// the file, belong to no document. Text must be UTF-8. One thread.
#ifndef TRAINER_DOCUMENTS_H
#define TRAINER_DOCUMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct trn_documents trn_documents;

ENG_CHECKED eng_status trn_documents_open(const char *path, trn_documents **out, eng_error *error);
void trn_documents_close(trn_documents *documents);
// The next document (may be empty), valid until the next call; *text NULL at the end of the file. Text that is not
// UTF-8, or a document beyond 1 GiB, is an error with file and offset.
ENG_CHECKED eng_status trn_documents_next(trn_documents *documents, const char **text, size_t *length,
                                          eng_error *error);
uint64_t trn_documents_size(const trn_documents *documents); // bytes of the file
uint64_t trn_documents_done(const trn_documents *documents); // bytes of the file that were read

#endif

// SPDX-License-Identifier: Apache-2.0
// Block-wise splitting of a text file into documents; see documents.h.
// Blocks are read until a separator line is in hand; a line end is looked for only once in each byte.
#include "trainer/documents.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/buffer.h"
#include "engine/files.h"
#include "engine/text.h"
#include "trainer/tokenizer.h"

enum { BLOCK_BYTES = 1 << 20, MAX_DOCUMENT_BYTES = 1 << 30 };

static const char separator[] = TRN_END_OF_TEXT;

struct trn_documents {
    char *path;
    int fd;
    uint64_t size, done; // of the file
    eng_buffer text;     // in hand: bytes [done - text.length, done) of the file
    size_t start;        // the document in hand begins here
    size_t line;         // the line in hand begins here
    size_t searched;     // no line end in [line, searched)
};

eng_status trn_documents_open(const char *path, trn_documents **out, eng_error *error) {
    trn_documents *documents = calloc(1, sizeof *documents);
    if (documents)
        documents->path = strdup(path);
    if (!documents || !documents->path) {
        free(documents);
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", eng_path_tail(path));
    }
    eng_status status = eng_open_regular(path, &documents->fd, &documents->size, error);
    if (status != ENG_OK) {
        free(documents->path);
        free(documents);
        return status;
    }
    *out = documents;
    return ENG_OK;
}

void trn_documents_close(trn_documents *documents) {
    if (!documents)
        return;
    close(documents->fd);
    eng_buffer_free(&documents->text);
    free(documents->path);
    free(documents);
}

uint64_t trn_documents_size(const trn_documents *documents) {
    return documents->size;
}

uint64_t trn_documents_done(const trn_documents *documents) {
    return documents->done;
}

static void drop_taken(trn_documents *d) {
    memmove(d->text.bytes, d->text.bytes + d->start, d->text.length - d->start);
    d->text.length -= d->start;
    d->line -= d->start;
    d->searched -= d->start;
    d->start = 0;
}

static eng_status read_block(trn_documents *d, eng_error *error) {
    uint64_t left = d->size - d->done;
    size_t block = left < BLOCK_BYTES ? (size_t)left : BLOCK_BYTES;
    if (d->start > 0)
        drop_taken(d);
    if (d->text.length + block > MAX_DOCUMENT_BYTES)
        return eng_fail(error, ENG_TOO_LONG, "%s: byte %llu: a document longer than 1 GiB", eng_path_tail(d->path),
                        (unsigned long long)(d->done - d->text.length));
    eng_status status = eng_buffer_reserve(&d->text, block);
    if (status != ENG_OK)
        return eng_fail(error, status, "%s: out of memory", eng_path_tail(d->path));
    status = eng_read_at(d->fd, d->path, d->done, d->text.bytes + d->text.length, block, error);
    if (status != ENG_OK)
        return status;
    d->text.length += block;
    d->done += block;
    return ENG_OK;
}

static bool is_separator(const trn_documents *d, size_t end) {
    return end - d->line == sizeof separator - 1 &&
           memcmp(d->text.bytes + d->line, separator, sizeof separator - 1) == 0;
}

// Hands out the document in hand, which ends at `end`; what follows begins at `next`.
static eng_status take(trn_documents *d, size_t end, size_t next, const char **text, size_t *length, eng_error *error) {
    if (end > d->start && d->text.bytes[end - 1] == '\n')
        end--;
    size_t fault = 0, start = d->start;
    if (!eng_utf8_valid(d->text.bytes + start, end - start, &fault))
        return eng_fail(error, ENG_INVALID, "%s: not UTF-8 at byte %llu", eng_path_tail(d->path),
                        (unsigned long long)(d->done - d->text.length + start + fault));
    *text = d->text.bytes + start;
    *length = end - start;
    d->start = d->line = d->searched = next;
    return ENG_OK;
}

eng_status trn_documents_next(trn_documents *d, const char **text, size_t *length, eng_error *error) {
    *text = NULL;
    *length = 0;
    for (;;) {
        const char *from = d->text.bytes + d->searched;
        const char *end = d->searched < d->text.length ? memchr(from, '\n', d->text.length - d->searched) : NULL;
        if (end) {
            size_t at = (size_t)(end - d->text.bytes);
            if (is_separator(d, at))
                return take(d, d->line, at + 1, text, length, error);
            d->line = d->searched = at + 1;
            continue;
        }
        d->searched = d->text.length;
        if (d->done < d->size) {
            eng_status status = read_block(d, error);
            if (status != ENG_OK)
                return status;
            continue;
        }
        size_t last = d->text.length;
        if (d->start == last)
            return ENG_OK;
        return take(d, is_separator(d, last) ? d->line : last, last, text, length, error);
    }
}

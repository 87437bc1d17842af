// SPDX-License-Identifier: Apache-2.0
// Block-wise reading of a corpus file, one document (or 8 MiB of one) in memory at a time.
//
// What is in hand always begins at the start of a document or behind a line end. Pieces longer than PIECE_BYTES (no
// words of a language) are counted in parts, so that one odd line cannot fill the memory with merges.
#include "trainer/piece_counter.h"

#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "engine/files.h"
#include "engine/text.h"

enum { BLOCK_BYTES = 1 << 20, DOCUMENT_BYTES = 8 << 20, PIECE_BYTES = 256 };

typedef struct reader {
    trn_piece_counter *counter;
    const char *path;
    eng_pretokenize_memory memory;
    eng_buffer text;  // in hand
    size_t document;  // where the document in hand begins
    size_t line;      // where the line in hand begins
    bool mid_line;    // its beginning was counted already
    uint64_t removed; // bytes of the file before text
    eng_error *error;
} reader;

static eng_status drop_rare(trn_piece_counter *counter) {
    for (uint64_t least = 2; counter->pieces.count > counter->max_pieces / 2; least *= 2) {
        eng_status status = trn_piece_map_prune(&counter->pieces, least);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static eng_status count_piece(void *context, const char *bytes, size_t length) {
    trn_piece_counter *counter = context;
    while (length) {
        size_t part = length < PIECE_BYTES ? length : PIECE_BYTES;
        trn_piece *piece = trn_piece_map_at(&counter->pieces, bytes, part);
        if (!piece)
            return ENG_NO_MEMORY;
        piece->value++;
        bytes += part;
        length -= part;
        if (counter->pieces.count > counter->max_pieces) {
            eng_status status = drop_rare(counter);
            if (status != ENG_OK)
                return status;
        }
    }
    return ENG_OK;
}

static eng_status count_text(reader *r, size_t start, size_t end) {
    const char *text = r->text.bytes + start;
    size_t length = end - start, offset;
    if (!eng_utf8_valid(text, length, &offset))
        return eng_fail(r->error, ENG_INVALID, "%s: not UTF-8 at byte %llu", eng_path_tail(r->path),
                        (unsigned long long)(r->removed + start + offset));
    return eng_pretokenize(r->counter->pretokenizer, &r->memory, text, length, true, count_piece, r->counter, r->error);
}

// The document in hand ends at end; its last line end belongs to the separator.
static eng_status end_document(reader *r, size_t end) {
    size_t start = r->document;
    if (end > start && r->text.bytes[end - 1] == '\n')
        end--;
    return end > start ? count_text(r, start, end) : ENG_OK;
}

// The line in hand, up to end, is a separator.
static bool is_separator(const reader *r, size_t end) {
    size_t length = strlen(r->counter->separator);
    return !r->mid_line && end - r->line == length &&
           memcmp(r->text.bytes + r->line, r->counter->separator, length) == 0;
}

static eng_status take_lines(reader *r) {
    for (;;) {
        const char *line = r->text.bytes + r->line;
        const char *end = memchr(line, '\n', r->text.length - r->line);
        if (!end)
            return ENG_OK;
        size_t next = r->line + (size_t)(end - line) + 1;
        if (is_separator(r, next - 1)) {
            eng_status status = end_document(r, r->line);
            if (status != ENG_OK)
                return status;
            r->document = next;
        }
        r->line = next;
        r->mid_line = false;
    }
}

// Keeps what is in hand below DOCUMENT_BYTES: counts the whole lines, or of a longer line the whole characters.
static eng_status bound_document(reader *r) {
    if (r->text.length - r->document < DOCUMENT_BYTES)
        return ENG_OK;
    size_t end = r->line;
    if (end == r->document) {
        end = r->text.length;
        for (int i = 0; i < 3 && ((unsigned char)r->text.bytes[end - 1] & 0xc0) == 0x80; i++)
            end--;
        if ((unsigned char)r->text.bytes[end - 1] >= 0xc0)
            end--;
        r->line = end;
        r->mid_line = true;
    }
    eng_status status = count_text(r, r->document, end);
    r->document = end;
    return status;
}

static void drop_counted(reader *r) {
    size_t rest = r->text.length - r->document;
    memmove(r->text.bytes, r->text.bytes + r->document, rest);
    r->text.length = rest;
    r->line -= r->document;
    r->removed += r->document;
    r->document = 0;
}

static eng_status read_file(reader *r, int fd, uint64_t size) {
    for (uint64_t offset = 0; offset < size;) {
        size_t block = size - offset < BLOCK_BYTES ? (size_t)(size - offset) : BLOCK_BYTES;
        eng_status status = eng_buffer_reserve(&r->text, block);
        if (status == ENG_OK)
            status = eng_read_at(fd, r->path, offset, r->text.bytes + r->text.length, block, r->error);
        if (status != ENG_OK)
            return status;
        r->text.length += block;
        offset += block;
        status = take_lines(r);
        if (status == ENG_OK)
            status = bound_document(r);
        if (status != ENG_OK)
            return status;
        drop_counted(r);
        r->counter->done += block;
        if (r->counter->progress)
            r->counter->progress(r->counter->context, r->counter->done, r->counter->total, "counting pieces");
    }
    size_t end = r->text.length;
    return end_document(r, is_separator(r, end) ? r->line : end);
}

eng_status trn_count_file(trn_piece_counter *counter, const char *path, eng_error *error) {
    reader r = {.counter = counter, .path = path, .error = error};
    int fd = -1;
    uint64_t size = 0;
    eng_status status = eng_open_regular(path, &fd, &size, error);
    if (status != ENG_OK)
        return status;
    status = eng_pretokenize_memory_init(&r.memory);
    if (status == ENG_OK && size > 0)
        status = read_file(&r, fd, size);
    close(fd);
    eng_pretokenize_memory_free(&r.memory);
    eng_buffer_free(&r.text);
    return status == ENG_OK ? status : eng_fail(error, status, "%s: %s", eng_path_tail(path), eng_status_text(status));
}

// SPDX-License-Identifier: Apache-2.0
// Reader of token shards; see shard.h. The writer is in shard_write.c.
//
// Every number of the header is checked against the file's size with arithmetic that cannot overflow before anything is
// read by it, and every row of the table against the ids.
#include "trainer/shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "engine/files.h"
#include "trainer/shard_format.h"

struct trn_shard {
    char *path;
    const uint8_t *map;
    size_t size;
    trn_shard_header header;
    const uint8_t *ids, *targets, *mask, *table; // targets, mask NULL: none
};

static eng_status malformed(const trn_shard *shard, uint64_t offset, const char *what, eng_error *error) {
    return eng_fail(error, ENG_FORMAT, "%s: byte %llu: %s", eng_path_tail(shard->path), (unsigned long long)offset,
                    what);
}

static eng_status read_header(trn_shard *shard, eng_error *error) {
    if (shard->size < TRN_SHARD_HEADER)
        return malformed(shard, shard->size, "shorter than a shard's header", error);
    const uint8_t *at = shard->map;
    trn_shard_header *header = &shard->header;
    *header = (trn_shard_header){.version = trn_get16(at + 8),
                                 .flags = trn_get16(at + 10),
                                 .width = trn_get32(at + 12),
                                 .ids = trn_get64(at + 16),
                                 .documents = trn_get64(at + 24)};
    memcpy(header->tokenizer, at + 32, sizeof header->tokenizer);
    if (memcmp(at, trn_shard_magic, sizeof trn_shard_magic) != 0)
        return malformed(shard, 0, "not a token shard (MESATOK)", error);
    if (header->version != TRN_SHARD_VERSION)
        return malformed(shard, 8, "a version of the format that is not supported", error);
    if (header->flags & ~(TRN_SHARD_MASKED | TRN_SHARD_TARGETS))
        return malformed(shard, 10, "unknown flags", error);
    if (header->width != 2 && header->width != 4)
        return malformed(shard, 12, "bytes an id are not 2 or 4", error);
    uint64_t numbers = header->flags & TRN_SHARD_TARGETS ? 2 : 1;
    uint64_t bytes_each = numbers * header->width + ((header->flags & TRN_SHARD_MASKED) ? 1 : 0);
    if (header->ids > shard->size / bytes_each)
        return malformed(shard, 16, "more ids than the file can hold", error);
    if (header->documents > shard->size / TRN_SHARD_ROW)
        return malformed(shard, 24, "more documents than the file can hold", error);
    uint64_t table = trn_align8(TRN_SHARD_HEADER + header->ids * bytes_each);
    if (table + header->documents * TRN_SHARD_ROW != shard->size)
        return malformed(shard, shard->size, "the file does not end where its header says", error);
    shard->ids = at + TRN_SHARD_HEADER;
    shard->targets = numbers == 2 ? shard->ids + header->ids * header->width : NULL;
    shard->mask = header->flags & TRN_SHARD_MASKED ? shard->ids + numbers * header->ids * header->width : NULL;
    shard->table = at + table;
    return ENG_OK;
}

static eng_status check_table(const trn_shard *shard, eng_error *error) {
    for (uint64_t i = 0; i < shard->header.documents; i++) {
        trn_document document = trn_shard_document(shard, i);
        if (document.first > shard->header.ids || document.ids > shard->header.ids - document.first)
            return malformed(shard, (uint64_t)(shard->table - shard->map) + i * TRN_SHARD_ROW,
                             "a document beyond the ids of the file", error);
    }
    return ENG_OK;
}

static eng_status map_file(trn_shard *shard, eng_error *error) {
    int fd = -1;
    uint64_t size = 0;
    eng_status status = eng_open_regular(shard->path, &fd, &size, error);
    if (status != ENG_OK)
        return status;
    shard->size = size;
    if (size > 0) {
        void *map = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED)
            status = eng_fail(error, ENG_IO, "%s: cannot be mapped", eng_path_tail(shard->path));
        else
            shard->map = map;
    }
    close(fd);
    return status;
}

eng_status trn_shard_open(const char *path, trn_shard **out, eng_error *error) {
    trn_shard *shard = calloc(1, sizeof *shard);
    if (shard)
        shard->path = strdup(path);
    if (!shard || !shard->path) {
        free(shard);
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory", eng_path_tail(path));
    }
    eng_status status = map_file(shard, error);
    if (status == ENG_OK)
        status = read_header(shard, error);
    if (status == ENG_OK)
        status = check_table(shard, error);
    if (status == ENG_OK)
        *out = shard;
    else
        trn_shard_close(shard);
    return status;
}

void trn_shard_close(trn_shard *shard) {
    if (!shard)
        return;
    if (shard->map)
        munmap((void *)shard->map, shard->size);
    free(shard->path);
    free(shard);
}

const char *trn_shard_path(const trn_shard *shard) {
    return shard->path;
}

uint64_t trn_shard_documents(const trn_shard *shard) {
    return shard->header.documents;
}

uint64_t trn_shard_ids(const trn_shard *shard) {
    return shard->header.ids;
}

bool trn_shard_masked(const trn_shard *shard) {
    return shard->mask != NULL;
}

bool trn_shard_has_targets(const trn_shard *shard) {
    return shard->targets != NULL;
}

const uint8_t *trn_shard_tokenizer(const trn_shard *shard) {
    return shard->header.tokenizer;
}

trn_document trn_shard_document(const trn_shard *shard, uint64_t index) {
    const uint8_t *row = shard->table + index * TRN_SHARD_ROW;
    return (trn_document){.first = trn_get64(row),
                          .ids = trn_get32(row + 8),
                          .text_bytes = trn_get32(row + 12),
                          .hash = trn_get64(row + 16)};
}

static eng_status read_numbers(const trn_shard *shard, const uint8_t *numbers, uint64_t first, uint32_t count,
                               int32_t vocabulary, int32_t *out, eng_error *error) {
    uint32_t width = shard->header.width;
    if (first > shard->header.ids || count > shard->header.ids - first)
        return eng_fail(error, ENG_INVALID, "%s: ids beyond the shard's end", eng_path_tail(shard->path));
    const uint8_t *at = numbers + first * width;
    for (uint32_t i = 0; i < count; i++, at += width) {
        uint32_t id = width == 2 ? trn_get16(at) : trn_get32(at);
        if (id >= (uint32_t)vocabulary)
            return eng_fail(error, ENG_FORMAT, "%s: byte %llu: id %u is not below the vocabulary's %d",
                            eng_path_tail(shard->path), (unsigned long long)(at - shard->map), id, vocabulary);
        out[i] = (int32_t)id;
    }
    return ENG_OK;
}

eng_status trn_shard_read(const trn_shard *shard, uint64_t first, uint32_t count, int32_t vocabulary, int32_t *ids,
                          uint8_t *mask, eng_error *error) {
    eng_status status = read_numbers(shard, shard->ids, first, count, vocabulary, ids, error);
    for (uint32_t i = 0; status == ENG_OK && mask && i < count; i++)
        mask[i] = shard->mask ? shard->mask[first + i] != 0 : 1;
    return status;
}

eng_status trn_shard_read_targets(const trn_shard *shard, uint64_t first, uint32_t count, int32_t vocabulary,
                                  int32_t *targets, eng_error *error) {
    eng_status status = read_numbers(shard, shard->targets, first, count, vocabulary, targets, error);
    for (uint32_t i = 0; status == ENG_OK && shard->mask && i < count; i++)
        if (!shard->mask[first + i])
            targets[i] = -1;
    return status;
}

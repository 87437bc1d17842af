// SPDX-License-Identifier: Apache-2.0
// Writer of token shards; see shard.h.
//
// The header counts what follows it, and files here are only appended to, so a shard is collected in memory and written
// in one go. A name that already has a shard is refused: shards left from an earlier, longer packing would be read with
// the new ones.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/buffer.h"
#include "engine/files.h"
#include "trainer/shard_format.h"

enum { MAX_SHARDS = 100000 };

struct trn_shard_writer {
    char *name;
    uint8_t tokenizer[TRN_TOKENIZER_DIGEST];
    uint32_t width;
    uint64_t limit;
    eng_buffer ids, targets, mask, table; // targets and mask: of examples
    int shards;
    uint64_t documents, total_ids; // of finished shards
    bool finished;
};

char *trn_shard_name(const char *name, int index) {
    size_t size = strlen(name) + 16;
    char *path = malloc(size);
    if (path)
        snprintf(path, size, "%s-%05d.tok", name, index);
    return path;
}

static eng_status refuse_existing(const char *name, eng_error *error) {
    char *path = trn_shard_name(name, 0);
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    bool exists = access(path, F_OK) == 0;
    eng_status status =
        exists ? eng_fail(error, ENG_INVALID, "%s: exists; remove the shards of that name or choose another", path)
               : ENG_OK;
    free(path);
    return status;
}

eng_status trn_shard_writer_create(const char *name, const uint8_t tokenizer[TRN_TOKENIZER_DIGEST], int32_t vocabulary,
                                   uint64_t limit, trn_shard_writer **out, eng_error *error) {
    eng_status status = refuse_existing(name, error);
    if (status != ENG_OK)
        return status;
    trn_shard_writer *writer = calloc(1, sizeof *writer);
    if (writer)
        writer->name = strdup(name);
    if (!writer || !writer->name) {
        free(writer);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the shards of %s", name);
    }
    memcpy(writer->tokenizer, tokenizer, sizeof writer->tokenizer);
    writer->width = vocabulary <= 65536 ? 2 : 4;
    writer->limit = limit;
    *out = writer;
    return ENG_OK;
}

static eng_status write_parts(const trn_shard_writer *writer, eng_output *output, eng_error *error) {
    uint8_t header[TRN_SHARD_HEADER] = {0};
    static const uint8_t padding[8];
    const eng_buffer *part[] = {&writer->ids, &writer->targets, &writer->mask};
    uint64_t end = TRN_SHARD_HEADER + writer->ids.length + writer->targets.length + writer->mask.length;
    bool examples = writer->targets.length > 0;
    memcpy(header, trn_shard_magic, sizeof trn_shard_magic);
    trn_put(header + 8, TRN_SHARD_VERSION, 2);
    trn_put(header + 10, examples ? TRN_SHARD_MASKED | TRN_SHARD_TARGETS : 0, 2);
    trn_put(header + 12, writer->width, 4);
    trn_put(header + 16, writer->ids.length / writer->width, 8);
    trn_put(header + 24, writer->table.length / TRN_SHARD_ROW, 8);
    memcpy(header + 32, writer->tokenizer, sizeof writer->tokenizer);
    eng_status status = eng_output_write(output, header, sizeof header, error);
    for (size_t i = 0; status == ENG_OK && i < sizeof part / sizeof *part; i++)
        status = eng_output_write(output, part[i]->bytes, part[i]->length, error);
    if (status == ENG_OK)
        status = eng_output_write(output, padding, (size_t)(trn_align8(end) - end), error);
    if (status == ENG_OK)
        status = eng_output_write(output, writer->table.bytes, writer->table.length, error);
    return status;
}

static eng_status write_shard(trn_shard_writer *writer, eng_error *error) {
    if (writer->shards == MAX_SHARDS)
        return eng_fail(error, ENG_TOO_LONG, "%s: more than %d shards", writer->name, MAX_SHARDS);
    char *path = trn_shard_name(writer->name, writer->shards);
    if (!path)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
    eng_output *output = NULL;
    eng_status status = eng_output_open(path, &output, error);
    if (status == ENG_OK) {
        status = write_parts(writer, output, error);
        if (status == ENG_OK)
            status = eng_output_commit(output, error);
        else
            eng_output_discard(output);
    }
    free(path);
    if (status != ENG_OK)
        return status;
    writer->shards++;
    writer->documents += writer->table.length / TRN_SHARD_ROW;
    writer->total_ids += writer->ids.length / writer->width;
    writer->ids.length = writer->targets.length = writer->mask.length = writer->table.length = 0;
    return ENG_OK;
}

static eng_status append_numbers(eng_buffer *buffer, const int32_t *values, uint32_t count, uint32_t width) {
    eng_status status = eng_buffer_reserve(buffer, (size_t)count * width);
    if (status != ENG_OK)
        return status;
    uint8_t *to = (uint8_t *)buffer->bytes + buffer->length;
    for (uint32_t i = 0; i < count; i++)
        trn_put(to + (size_t)i * width, values[i] < 0 ? 0 : (uint32_t)values[i], (int)width);
    buffer->length += (size_t)count * width;
    return ENG_OK;
}

static eng_status append_targets(trn_shard_writer *writer, const int32_t *targets, uint32_t count) {
    eng_status status = append_numbers(&writer->targets, targets, count, writer->width);
    if (status == ENG_OK)
        status = eng_buffer_reserve(&writer->mask, count);
    for (uint32_t i = 0; status == ENG_OK && i < count; i++)
        writer->mask.bytes[writer->mask.length++] = targets[i] >= 0;
    return status;
}

static eng_status append_row(trn_shard_writer *writer, uint32_t count, uint32_t text_bytes, uint64_t hash) {
    uint8_t row[TRN_SHARD_ROW];
    trn_put(row, writer->ids.length / writer->width, 8);
    trn_put(row + 8, count, 4);
    trn_put(row + 12, text_bytes, 4);
    trn_put(row + 16, hash, 8);
    return eng_buffer_append(&writer->table, row, sizeof row);
}

// Ends the shard that another `count` ids would make too large.
static eng_status make_room(trn_shard_writer *writer, uint32_t count, eng_error *error) {
    bool full = writer->ids.length > 0 && writer->ids.length + (uint64_t)count * writer->width > writer->limit;
    return full ? write_shard(writer, error) : ENG_OK;
}

static eng_status append(trn_shard_writer *writer, const int32_t *ids, const int32_t *targets, uint32_t count,
                         uint32_t text_bytes, uint64_t hash, eng_error *error) {
    eng_status status = make_room(writer, count, error);
    if (status != ENG_OK)
        return status;
    if (writer->ids.length > 0 && (targets != NULL) != (writer->targets.length > 0))
        return eng_fail(error, ENG_INVALID, "%s: examples and text in one shard", writer->name);
    status = append_row(writer, count, text_bytes, hash);
    if (status == ENG_OK)
        status = append_numbers(&writer->ids, ids, count, writer->width);
    if (status == ENG_OK && targets)
        status = append_targets(writer, targets, count);
    return status == ENG_OK ? status : eng_fail(error, status, "%s: out of memory for a shard", writer->name);
}

eng_status trn_shard_writer_add(trn_shard_writer *writer, const int32_t *ids, uint32_t count, uint32_t text_bytes,
                                uint64_t hash, eng_error *error) {
    return append(writer, ids, NULL, count, text_bytes, hash, error);
}

eng_status trn_shard_writer_add_example(trn_shard_writer *writer, const int32_t *ids, const int32_t *targets,
                                        uint32_t count, uint64_t hash, eng_error *error) {
    return append(writer, ids, targets, count, 0, hash, error);
}

eng_status trn_shard_writer_finish(trn_shard_writer *writer, int *shards, uint64_t *documents, uint64_t *ids,
                                   eng_error *error) {
    if (writer->table.length > 0) {
        eng_status status = write_shard(writer, error);
        if (status != ENG_OK)
            return status;
    }
    writer->finished = true;
    if (shards)
        *shards = writer->shards;
    if (documents)
        *documents = writer->documents;
    if (ids)
        *ids = writer->total_ids;
    return ENG_OK;
}

static void remove_shards(const trn_shard_writer *writer) {
    for (int i = 0; i < writer->shards; i++) {
        char *path = trn_shard_name(writer->name, i);
        if (path)
            unlink(path);
        free(path);
    }
}

void trn_shard_writer_free(trn_shard_writer *writer) {
    if (!writer)
        return;
    if (!writer->finished)
        remove_shards(writer);
    eng_buffer_free(&writer->ids);
    eng_buffer_free(&writer->targets);
    eng_buffer_free(&writer->mask);
    eng_buffer_free(&writer->table);
    free(writer->name);
    free(writer);
}

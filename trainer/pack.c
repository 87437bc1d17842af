// SPDX-License-Identifier: Apache-2.0
// mesa-trainer pack --tokenizer DIR --out NAME [--holdout A/B] FILE...: text files to token shards (shard.h).
//
// Documents are read one after the other, gathered into batches, encoded by the compute team and written in the order
// in which they were read: the shards do not depend on the number of threads. A document goes to NAME-valid when the
// number made of the first 8 bytes of its SHA-256 is below A modulo B: the choice is a property of the text, so the
// same document is held out whatever else is packed, and duplicates never lie on both sides.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/digest.h"
#include "engine/files.h"
#include "engine/tokenizer.h"
#include "trainer/commands.h"
#include "trainer/documents.h"
#include "trainer/options.h"
#include "trainer/progress.h"
#include "trainer/shard.h"
#include "trainer/shard_format.h"

enum { MAX_FILES = 4096, BATCH_DOCUMENTS = 1024, BATCH_BYTES = 8 << 20 };

typedef struct pack_options {
    const char *tokenizer, *out, *holdout;
    int64_t shard_bytes;
} pack_options;

typedef struct item {
    char *text;
    size_t length;
    const char *path; // of the file, for errors
    int32_t *ids;
    size_t count;
    uint64_t hash;
    eng_status status;
    eng_error error;
} item;

typedef struct packer {
    const eng_tokenizer *tokenizer;
    uint64_t holdout_share, holdout_of; // 0, 1: nothing is held out
    trn_shard_writer *train, *valid;    // valid NULL: no holdout
    item *items;
    size_t count, bytes;
    uint64_t empty, text_bytes;
    uint64_t done, total; // bytes of the files, for progress
    trn_progress progress;
} packer;

static eng_status parse_holdout(const char *text, uint64_t *share, uint64_t *of, eng_error *error) {
    unsigned long a = 0, b = 0;
    char rest = 0;
    if (sscanf(text, "%lu/%lu%c", &a, &b, &rest) != 2 || a < 1 || b <= a || b > 1000000)
        return eng_fail(error, ENG_INVALID, "--holdout: \"%.40s\" is not A/B with 1 <= A < B <= 1000000", text);
    *share = a;
    *of = b;
    return ENG_OK;
}

static void encode(const eng_tokenizer *tokenizer, item *item) {
    unsigned char digest[ENG_DIGEST_BYTES];
    item->status = eng_digest_bytes(item->text, item->length, digest);
    if (item->status != ENG_OK) {
        eng_fail(&item->error, item->status, "%s: computing a digest", eng_path_tail(item->path));
        return;
    }
    item->hash = trn_get64(digest);
    item->status =
        eng_tokenizer_encode(tokenizer, item->text, item->length, false, false, &item->ids, &item->count, &item->error);
    if (item->status == ENG_OK && item->count > UINT32_MAX)
        item->status =
            eng_fail(&item->error, ENG_TOO_LONG, "%s: a document of too many ids", eng_path_tail(item->path));
}

static eng_status write_item(packer *packer, const item *item, eng_error *error) {
    if (item->status != ENG_OK)
        return eng_fail(error, item->status, "%s", item->error.text);
    bool held_out = packer->valid && item->hash % packer->holdout_of < packer->holdout_share;
    packer->text_bytes += item->length;
    return trn_shard_writer_add(held_out ? packer->valid : packer->train, item->ids, (uint32_t)item->count,
                                (uint32_t)item->length, item->hash, error);
}

static eng_status flush(packer *packer, eng_error *error) {
    long count = (long)packer->count;
    eng_status status = ENG_OK;
#pragma omp parallel for schedule(dynamic)
    for (long i = 0; i < count; i++)
        encode(packer->tokenizer, &packer->items[i]);
    for (long i = 0; i < count; i++) {
        if (status == ENG_OK)
            status = write_item(packer, &packer->items[i], error);
        free(packer->items[i].text);
        free(packer->items[i].ids);
    }
    packer->count = packer->bytes = 0;
    return status;
}

static eng_status add_document(packer *packer, const char *path, const char *text, size_t length, eng_error *error) {
    char *copy = malloc(length);
    if (!copy)
        return eng_fail(error, ENG_NO_MEMORY, "%s: out of memory for a document", eng_path_tail(path));
    memcpy(copy, text, length);
    packer->items[packer->count++] = (item){.text = copy, .length = length, .path = path};
    packer->bytes += length;
    return packer->count == BATCH_DOCUMENTS || packer->bytes >= BATCH_BYTES ? flush(packer, error) : ENG_OK;
}

static eng_status pack_file(packer *packer, const char *path, eng_error *error) {
    trn_documents *documents = NULL;
    eng_status status = trn_documents_open(path, &documents, error);
    while (status == ENG_OK) {
        const char *text = NULL;
        size_t length = 0;
        status = trn_documents_next(documents, &text, &length, error);
        if (status != ENG_OK || !text)
            break;
        if (length == 0)
            packer->empty++;
        else
            status = add_document(packer, path, text, length, error);
        trn_progress_part(&packer->progress, packer->done + trn_documents_done(documents), packer->total, "packing");
    }
    if (status == ENG_OK)
        packer->done += trn_documents_done(documents);
    trn_documents_close(documents);
    return status;
}

static eng_status measure(const char *const *file, int files, uint64_t *total, eng_error *error) {
    for (int i = 0; i < files; i++) {
        trn_documents *documents = NULL;
        eng_status status = trn_documents_open(file[i], &documents, error);
        if (status != ENG_OK)
            return status;
        *total += trn_documents_size(documents);
        trn_documents_close(documents);
    }
    return ENG_OK;
}

static eng_status finish_name(trn_shard_writer *writer, const char *name, const char *suffix, eng_error *error) {
    int shards = 0;
    uint64_t documents = 0, ids = 0;
    eng_status status = trn_shard_writer_finish(writer, &shards, &documents, &ids, error);
    if (status == ENG_OK)
        printf("%s%s: %llu documents, %llu ids, %d shards\n", name, suffix, (unsigned long long)documents,
               (unsigned long long)ids, shards);
    return status;
}

static eng_status create_writers(packer *packer, const pack_options *o, eng_error *error) {
    const uint8_t *digest = eng_tokenizer_digest(packer->tokenizer);
    int32_t size = eng_tokenizer_size(packer->tokenizer);
    uint64_t limit = (uint64_t)o->shard_bytes;
    eng_status status = trn_shard_writer_create(o->out, digest, size, limit, &packer->train, error);
    if (status != ENG_OK || packer->holdout_share == 0)
        return status;
    size_t length = strlen(o->out) + sizeof "-valid";
    char *valid = malloc(length);
    if (!valid)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a name");
    snprintf(valid, length, "%s-valid", o->out);
    status = trn_shard_writer_create(valid, digest, size, limit, &packer->valid, error);
    free(valid);
    return status;
}

static eng_status pack(packer *packer, const pack_options *o, const char *const *file, int files, eng_error *error) {
    packer->items = calloc(BATCH_DOCUMENTS, sizeof *packer->items);
    if (!packer->items)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a batch of documents");
    trn_progress_begin(&packer->progress);
    eng_status status = measure(file, files, &packer->total, error);
    if (status == ENG_OK)
        status = create_writers(packer, o, error);
    for (int i = 0; status == ENG_OK && i < files; i++)
        status = pack_file(packer, file[i], error);
    if (status == ENG_OK)
        status = flush(packer, error);
    trn_progress_end(&packer->progress);
    if (status == ENG_OK && packer->text_bytes == 0)
        status = eng_fail(error, ENG_INVALID, "%s: no text in %d files", eng_path_tail(file[0]), files);
    if (status == ENG_OK)
        status = finish_name(packer->train, o->out, "", error);
    if (status == ENG_OK && packer->valid)
        status = finish_name(packer->valid, o->out, "-valid", error);
    for (size_t i = 0; i < packer->count; i++)
        free(packer->items[i].text);
    free(packer->items);
    trn_shard_writer_free(packer->train);
    trn_shard_writer_free(packer->valid);
    if (status == ENG_OK && packer->empty > 0)
        printf("%llu empty documents were left out\n", (unsigned long long)packer->empty);
    return status;
}

static eng_status check_options(const pack_options *o, packer *packer, eng_error *error) {
    if (!o->tokenizer || !o->out)
        return eng_fail(error, ENG_INVALID, "--tokenizer and --out are needed");
    if (o->shard_bytes < 1 || o->shard_bytes > (int64_t)1 << 40)
        return eng_fail(error, ENG_INVALID, "--shard-bytes: not in 1..2^40");
    return o->holdout ? parse_holdout(o->holdout, &packer->holdout_share, &packer->holdout_of, error) : ENG_OK;
}

int trn_command_pack(int argc, char **argv) {
    pack_options o = {.shard_bytes = 256 << 20};
    const trn_option options[] = {
        {"tokenizer", "DIR", TRN_STRING, &o.tokenizer, "folder with tokenizer.json"},
        {"out", "NAME", TRN_STRING, &o.out, "writes NAME-00000.tok, NAME-00001.tok ..."},
        {"holdout", "A/B", TRN_STRING, &o.holdout, "A of B documents, chosen by their digest, go to NAME-valid"},
        {"shard-bytes", "N", TRN_INTEGER, &o.shard_bytes, "most bytes of ids a shard (default 268435456)"},
    };
    const trn_command_line line = {"pack --tokenizer DIR --out NAME FILE... [options]",
                                   "Encodes UTF-8 text files, whose documents are separated by a line that holds only\n"
                                   "<|endoftext|>, into token shards.",
                                   options,
                                   sizeof options / sizeof *options,
                                   1,
                                   MAX_FILES};
    const char *file[MAX_FILES];
    bool helped = false;
    int files = 0;
    eng_error error = {0};
    packer packer = {.holdout_of = 1};
    eng_tokenizer *tokenizer = NULL;
    eng_status status = trn_options_parse(&line, argc, argv, file, &files, &helped, &error);
    if (helped)
        return TRN_EXIT_OK;
    if (status == ENG_OK)
        status = check_options(&o, &packer, &error);
    if (status == ENG_OK)
        status = eng_tokenizer_open(o.tokenizer, 0, &tokenizer, &error);
    if (status == ENG_OK) {
        packer.tokenizer = tokenizer;
        status = pack(&packer, &o, file, files, &error);
    }
    eng_tokenizer_close(tokenizer);
    return trn_command_end("pack", status, &error);
}

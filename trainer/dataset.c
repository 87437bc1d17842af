// SPDX-License-Identifier: Apache-2.0
// Rows of pairs from token shards; see dataset.h.
//
// start[d] is the number of pairs before document d, so that the documents of a row are found by binary search; shards
// are found the same way by their first document.
#include "trainer/dataset.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/digest.h"
#include "engine/files.h"
#include "trainer/permutation.h"

enum { MAX_SHARDS = 65536 };

struct trn_dataset {
    trn_shard **shard;
    int64_t *shard_document; // (shards + 1) the first document of each
    int shards;
    int64_t *start; // (documents + 1) pairs before each document
    int64_t documents;
    int32_t context, bos_id, eos_id, vocab_size;
    bool examples; // every document is a row
};

// ------------------------------------------------------------------------------------------------------------ opening

static eng_status append_shard(trn_dataset *dataset, const char *path, eng_error *error) {
    if (dataset->shards == MAX_SHARDS)
        return eng_fail(error, ENG_TOO_LONG, "more than %d shards", MAX_SHARDS);
    trn_shard **grown = realloc(dataset->shard, sizeof *grown * ((size_t)dataset->shards + 1));
    if (!grown)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the list of shards");
    dataset->shard = grown;
    eng_status status = trn_shard_open(path, &grown[dataset->shards], error);
    if (status == ENG_OK)
        dataset->shards++;
    return status;
}

static eng_status open_name(trn_dataset *dataset, const char *name, eng_error *error) {
    eng_status status = ENG_OK;
    for (int index = 0; status == ENG_OK; index++) {
        char *path = trn_shard_name(name, index);
        if (!path)
            return eng_fail(error, ENG_NO_MEMORY, "out of memory for a path");
        bool last = index > 0 && access(path, F_OK) != 0;
        if (!last)
            status = append_shard(dataset, path, error);
        free(path);
        if (last)
            break;
    }
    return status;
}

static eng_status check_tokenizers(const trn_dataset *dataset, const uint8_t *wanted, eng_error *error) {
    for (int i = 0; i < dataset->shards; i++) {
        const uint8_t *expected = wanted ? wanted : trn_shard_tokenizer(dataset->shard[0]);
        if (memcmp(trn_shard_tokenizer(dataset->shard[i]), expected, TRN_TOKENIZER_DIGEST) != 0)
            return eng_fail(error, ENG_INVALID, "%s: packed with another tokenizer than %s",
                            eng_path_tail(trn_shard_path(dataset->shard[i])),
                            wanted ? "the model's" : eng_path_tail(trn_shard_path(dataset->shard[0])));
    }
    return ENG_OK;
}

static eng_status check_kinds(trn_dataset *dataset, const trn_dataset_options *o, eng_error *error) {
    dataset->examples = trn_shard_has_targets(dataset->shard[0]);
    for (int i = 1; i < dataset->shards; i++)
        if (trn_shard_has_targets(dataset->shard[i]) != dataset->examples)
            return eng_fail(error, ENG_INVALID, "%s: examples and text in one data set",
                            eng_path_tail(trn_shard_path(dataset->shard[i])));
    if (!dataset->examples &&
        (o->bos_id < 0 || o->bos_id >= o->vocab_size || o->eos_id < 0 || o->eos_id >= o->vocab_size))
        return eng_fail(error, ENG_INVALID, "training needs bos_token_id and eos_token_id inside the vocabulary");
    return ENG_OK;
}

static eng_status check_example(const trn_dataset *dataset, int shard, const trn_document *document, eng_error *error) {
    if (document->ids >= 1 && document->ids <= (uint32_t)dataset->context)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "%s: an example of %u ids, and a context of %d",
                    eng_path_tail(trn_shard_path(dataset->shard[shard])), document->ids, dataset->context);
}

static eng_status build_index(trn_dataset *dataset, eng_error *error) {
    dataset->shard_document = calloc((size_t)dataset->shards + 1, sizeof *dataset->shard_document);
    if (!dataset->shard_document)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the index of shards");
    for (int i = 0; i < dataset->shards; i++)
        dataset->shard_document[i + 1] = dataset->shard_document[i] + (int64_t)trn_shard_documents(dataset->shard[i]);
    dataset->documents = dataset->shard_document[dataset->shards];
    if (dataset->documents == 0)
        return eng_fail(error, ENG_INVALID, "%s: no documents", eng_path_tail(trn_shard_path(dataset->shard[0])));
    dataset->start = malloc(sizeof *dataset->start * ((size_t)dataset->documents + 1));
    if (!dataset->start)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the index of %lld documents",
                        (long long)dataset->documents);
    int64_t pairs = 0, document = 0;
    for (int i = 0; i < dataset->shards; i++)
        for (uint64_t d = 0; d < trn_shard_documents(dataset->shard[i]); d++) {
            trn_document entry = trn_shard_document(dataset->shard[i], d);
            eng_status status = dataset->examples ? check_example(dataset, i, &entry, error) : ENG_OK;
            if (status != ENG_OK)
                return status;
            dataset->start[document++] = pairs;
            pairs += (int64_t)entry.ids + (dataset->examples ? 0 : 1);
        }
    dataset->start[document] = pairs;
    return ENG_OK;
}

static eng_status check_options(const trn_dataset_options *o, eng_error *error) {
    if (o->names < 1 || o->context < 1)
        return eng_fail(error, ENG_INVALID, "a data set needs a name and a context of at least one token");
    return ENG_OK;
}

eng_status trn_dataset_open(const trn_dataset_options *options, trn_dataset **out, eng_error *error) {
    eng_status status = check_options(options, error);
    if (status != ENG_OK)
        return status;
    trn_dataset *dataset = calloc(1, sizeof *dataset);
    if (!dataset)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a data set");
    dataset->context = options->context;
    dataset->bos_id = options->bos_id;
    dataset->eos_id = options->eos_id;
    dataset->vocab_size = options->vocab_size;
    for (int i = 0; status == ENG_OK && i < options->names; i++)
        status = open_name(dataset, options->name[i], error);
    if (status == ENG_OK)
        status = check_tokenizers(dataset, options->tokenizer, error);
    if (status == ENG_OK)
        status = check_kinds(dataset, options, error);
    if (status == ENG_OK)
        status = build_index(dataset, error);
    if (status == ENG_OK)
        *out = dataset;
    else
        trn_dataset_close(dataset);
    return status;
}

void trn_dataset_close(trn_dataset *dataset) {
    if (!dataset)
        return;
    for (int i = 0; i < dataset->shards; i++)
        trn_shard_close(dataset->shard[i]);
    free(dataset->shard);
    free(dataset->shard_document);
    free(dataset->start);
    free(dataset);
}

// ------------------------------------------------------------------------------------------------------------ reading

int64_t trn_dataset_pairs(const trn_dataset *dataset) {
    return dataset->start[dataset->documents];
}

int64_t trn_dataset_rows(const trn_dataset *dataset) {
    if (dataset->examples)
        return dataset->documents;
    return (trn_dataset_pairs(dataset) + dataset->context - 1) / dataset->context;
}

int64_t trn_dataset_documents(const trn_dataset *dataset) {
    return dataset->documents;
}

bool trn_dataset_has_examples(const trn_dataset *dataset) {
    return dataset->examples;
}

eng_status trn_dataset_digest(const trn_dataset *dataset, uint8_t digest[32], eng_error *error) {
    eng_digest *sum = NULL;
    eng_status status = eng_digest_begin(&sum);
    for (int i = 0; status == ENG_OK && i < dataset->shards; i++)
        for (uint64_t d = 0; status == ENG_OK && d < trn_shard_documents(dataset->shard[i]); d++) {
            const trn_document document = trn_shard_document(dataset->shard[i], d);
            const uint64_t facts[] = {document.ids, document.text_bytes, document.hash};
            status = eng_digest_add(sum, facts, sizeof facts);
        }
    if (status == ENG_OK) {
        eng_digest_end(sum, digest);
        return ENG_OK;
    }
    eng_digest_free(sum);
    return eng_fail(error, status, "out of memory for the digest of a data set");
}

const uint8_t *trn_dataset_tokenizer(const trn_dataset *dataset) {
    return trn_shard_tokenizer(dataset->shard[0]);
}

int64_t trn_dataset_order(const trn_dataset *dataset, uint64_t seed, int64_t place) {
    uint64_t rows = (uint64_t)trn_dataset_rows(dataset), at = (uint64_t)place;
    return (int64_t)trn_permute(rows, seed, at / rows, at % rows);
}

// The last index i with first[i] <= value; first is ascending and first[0] <= value.
static int64_t find_last(const int64_t *first, int64_t count, int64_t value) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (first[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static trn_document find_document(const trn_dataset *dataset, int64_t document, const trn_shard **shard) {
    int64_t index = find_last(dataset->shard_document, dataset->shards, document);
    *shard = dataset->shard[index];
    return trn_shard_document(*shard, (uint64_t)(document - dataset->shard_document[index]));
}

// Marks the targets whose mask is 0. The end of a document counts as its last id does.
static eng_status apply_mask(const trn_shard *shard, const trn_document *document, int64_t first, int32_t count,
                             int32_t *target, eng_error *error) {
    for (int32_t i = 0; i < count && document->ids > 0; i++) {
        int64_t place = first + i < (int64_t)document->ids ? first + i : (int64_t)document->ids - 1;
        int32_t id = 0;
        uint8_t counts = 1;
        eng_status status = trn_shard_read(shard, document->first + (uint64_t)place, 1, INT32_MAX, &id, &counts, error);
        if (status != ENG_OK)
            return status;
        if (!counts)
            target[i] = -1;
    }
    return ENG_OK;
}

// Appends pairs [first, first + count) of a document. Pair j has input j == 0 ? BOS : ids[j - 1], target j == n ? EOS :
// ids[j].
static eng_status append_pairs(const trn_dataset *dataset, int64_t index, int64_t first, int32_t count, trn_row *row,
                               eng_error *error) {
    const trn_shard *shard;
    trn_document document = find_document(dataset, index, &shard);
    int32_t *id = row->id + row->length, *target = row->target + row->length;
    bool ends = first + count > (int64_t)document.ids;
    uint32_t read = (uint32_t)(count - (ends ? 1 : 0));
    eng_status status =
        trn_shard_read(shard, document.first + (uint64_t)first, read, dataset->vocab_size, target, NULL, error);
    if (status == ENG_OK && first > 0)
        status = trn_shard_read(shard, document.first + (uint64_t)first - 1, 1, dataset->vocab_size, id, NULL, error);
    if (status != ENG_OK)
        return status;
    if (first == 0)
        id[0] = dataset->bos_id;
    memcpy(id + 1, target, sizeof *id * (size_t)(count - 1));
    if (ends)
        target[count - 1] = dataset->eos_id;
    if (trn_shard_masked(shard))
        status = apply_mask(shard, &document, first, count, target, error);
    for (int32_t i = 0; i < count; i++)
        row->counted += target[i] >= 0;
    row->length += count;
    return status;
}

static eng_status append_example(const trn_dataset *dataset, int64_t index, int64_t first, int32_t count, trn_row *row,
                                 eng_error *error) {
    const trn_shard *shard;
    trn_document document = find_document(dataset, index, &shard);
    uint64_t place = document.first + (uint64_t)first;
    eng_status status =
        trn_shard_read(shard, place, (uint32_t)count, dataset->vocab_size, row->id + row->length, NULL, error);
    if (status == ENG_OK)
        status = trn_shard_read_targets(shard, place, (uint32_t)count, dataset->vocab_size, row->target + row->length,
                                        error);
    for (int32_t i = 0; status == ENG_OK && i < count; i++)
        row->counted += row->target[row->length + i] >= 0;
    row->length += count;
    return status;
}

static void clear_row(trn_row *row) {
    row->length = row->boundaries = row->counted = 0;
}

eng_status trn_dataset_row(const trn_dataset *dataset, int64_t index, trn_row *row, eng_error *error) {
    int64_t first = index * dataset->context, end = first + dataset->context;
    if (index < 0 || index >= trn_dataset_rows(dataset))
        return eng_fail(error, ENG_INVALID, "row %lld: the data set has %lld", (long long)index,
                        (long long)trn_dataset_rows(dataset));
    clear_row(row);
    if (dataset->examples)
        return append_example(dataset, index, 0, (int32_t)trn_dataset_document_pairs(dataset, index), row, error);
    if (end > trn_dataset_pairs(dataset))
        end = trn_dataset_pairs(dataset);
    for (int64_t document = find_last(dataset->start, dataset->documents, first); first < end; document++) {
        int64_t next = dataset->start[document + 1] < end ? dataset->start[document + 1] : end;
        if (row->length > 0)
            row->boundary[row->boundaries++] = row->length;
        eng_status status =
            append_pairs(dataset, document, first - dataset->start[document], (int32_t)(next - first), row, error);
        if (status != ENG_OK)
            return status;
        first = next;
    }
    return ENG_OK;
}

int64_t trn_dataset_document_pairs(const trn_dataset *dataset, int64_t document) {
    return dataset->start[document + 1] - dataset->start[document];
}

int64_t trn_dataset_document_bytes(const trn_dataset *dataset, int64_t document) {
    const trn_shard *shard;
    return find_document(dataset, document, &shard).text_bytes;
}

eng_status trn_dataset_window(const trn_dataset *dataset, int64_t document, int64_t first, int32_t count, trn_row *row,
                              eng_error *error) {
    if (document < 0 || document >= dataset->documents || first < 0 || count < 1 || count > dataset->context ||
        first > trn_dataset_document_pairs(dataset, document) - count)
        return eng_fail(error, ENG_INVALID, "a window of %d pairs at %lld is not inside document %lld", count,
                        (long long)first, (long long)document);
    clear_row(row);
    return dataset->examples ? append_example(dataset, document, first, count, row, error)
                             : append_pairs(dataset, document, first, count, row, error);
}

eng_status trn_row_create(int32_t context, trn_row *out, eng_error *error) {
    int32_t *memory = malloc(3 * sizeof *memory * (size_t)context);
    if (!memory)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a row of %d pairs", context);
    *out = (trn_row){.id = memory, .target = memory + context, .boundary = memory + 2 * (size_t)context};
    return ENG_OK;
}

void trn_row_free(trn_row *row) {
    free(row->id);
    *row = (trn_row){0};
}

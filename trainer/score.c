// SPDX-License-Identifier: Apache-2.0
// Losses over windows of documents; see score.h. Windows are packed into batches as ragged rows, each a row of its own.
// Nothing is carried between windows: each starts from a zero state, and its loss does not depend on its neighbours.
#include "trainer/score.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/permutation.h"
#include "trainer/progress.h"

enum { FIRST_BUCKET = 64 };

// ------------------------------------------------------------------------------------------------------------- windows

static int64_t windows_of(const trn_dataset *dataset, int64_t document, int32_t context) {
    return (trn_dataset_document_pairs(dataset, document) + context - 1) / context;
}

static trn_window window_at(const trn_dataset *dataset, int64_t document, int64_t first, int32_t context) {
    int64_t left = trn_dataset_document_pairs(dataset, document) - first;
    return (trn_window){document, first, (int32_t)(left < context ? left : context)};
}

// UTF-8 bytes of a window that is not a whole document: of its targets but the end of text.
static eng_status count_bytes(const trn_dataset *dataset, const trn_window *window, const eng_tokenizer *tokenizer,
                              trn_row *row, int64_t *bytes, eng_error *error) {
    eng_status status = trn_dataset_window(dataset, window->document, window->first, window->count, row, error);
    if (status != ENG_OK)
        return status;
    bool ends = window->first + window->count == trn_dataset_document_pairs(dataset, window->document);
    for (int32_t i = 0; i < row->length - (ends ? 1 : 0); i++) {
        size_t length = 0;
        eng_tokenizer_bytes(tokenizer, row->target[i], &length);
        *bytes += (int64_t)length;
    }
    return ENG_OK;
}

static eng_status add_bytes(const trn_dataset *dataset, const eng_tokenizer *tokenizer, trn_row *row,
                            trn_windows *windows, eng_error *error) {
    eng_status status = ENG_OK;
    for (int64_t i = 0; status == ENG_OK && i < windows->count && windows->bytes >= 0; i++) {
        const trn_window *window = &windows->window[i];
        if (window->count == trn_dataset_document_pairs(dataset, window->document))
            windows->bytes += trn_dataset_document_bytes(dataset, window->document);
        else if (tokenizer)
            status = count_bytes(dataset, window, tokenizer, row, &windows->bytes, error);
        else
            windows->bytes = -1;
    }
    return status;
}

static void choose_all(const trn_dataset *dataset, int32_t context, trn_windows *windows) {
    for (int64_t document = 0; document < trn_dataset_documents(dataset); document++) {
        for (int64_t i = 0; i < windows_of(dataset, document, context); i++)
            windows->window[windows->count++] = window_at(dataset, document, i * context, context);
        windows->bytes += trn_dataset_document_bytes(dataset, document);
    }
}

eng_status trn_windows_choose(const trn_dataset *dataset, int32_t context, int64_t limit,
                              const eng_tokenizer *tokenizer, trn_windows *out, eng_error *error) {
    int64_t documents = trn_dataset_documents(dataset), most = 0;
    for (int64_t document = 0; document < documents; document++)
        most += windows_of(dataset, document, context);
    if (limit > 0)
        most = limit < documents ? limit : documents;
    trn_windows windows = {.window = malloc(sizeof *windows.window * (size_t)most)};
    trn_row row = {0};
    eng_status status = windows.window
                            ? trn_row_create(context, &row, error)
                            : eng_fail(error, ENG_NO_MEMORY, "out of memory for %lld windows", (long long)most);
    if (status == ENG_OK && limit <= 0)
        choose_all(dataset, context, &windows);
    if (status == ENG_OK && limit > 0) {
        for (; windows.count < most; windows.count++) {
            int64_t document = (int64_t)trn_permute((uint64_t)documents, 0, 0, (uint64_t)windows.count);
            windows.window[windows.count] = window_at(dataset, document, 0, context);
        }
        status = add_bytes(dataset, tokenizer, &row, &windows, error);
    }
    trn_row_free(&row);
    if (status == ENG_OK)
        *out = windows;
    else
        trn_windows_free(&windows);
    return status;
}

void trn_windows_free(trn_windows *windows) {
    free(windows->window);
    *windows = (trn_windows){0};
}

// ------------------------------------------------------------------------------------------------------------- scoring

int trn_bucket_of(int32_t place) {
    int bucket = 0;
    for (int64_t end = FIRST_BUCKET; place >= end && bucket < TRN_BUCKETS - 1; end *= 2)
        bucket++;
    return bucket;
}

void trn_bucket_range(int bucket, int64_t *first, int64_t *last) {
    *last = (int64_t)FIRST_BUCKET << bucket;
    *first = bucket == 0 ? 1 : *last / 2 + 1;
}

static void add_loss(trn_document_score *document, double loss, int bucket) {
    document->loss += loss;
    document->targets++;
    document->bucket_loss[bucket] += loss;
    document->bucket_targets[bucket]++;
}

// window: that of the batch's first row.
static void collect(const trn_batch *batch, const trn_window *window, trn_document_score *document,
                    trn_scores *scores) {
    const kern_rows *rows = batch->runner->rows;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        int64_t before = scores->targets;
        for (int32_t i = 0; i < row->length; i++) {
            if (rows->target[row->token0 + i] < 0)
                continue;
            double loss = (double)batch->loss[row->token0 + i];
            int bucket = trn_bucket_of(i);
            scores->loss += loss;
            scores->targets++;
            scores->loops += batch->loops[row->token0 + i];
            scores->bucket_loss[bucket] += loss;
            scores->bucket_targets[bucket]++;
            if (document)
                add_loss(&document[window[r].document], loss, bucket);
        }
        scores->windows += scores->targets > before;
    }
    scores->divergence += trn_batch_divergence(batch);
    trn_batch_hits(batch, &scores->hits);
    scores->solves.solves += batch->solves.solves;
    scores->solves.steps += batch->solves.steps;
    scores->solves.unconverged += batch->solves.unconverged;
    if (batch->solves.steps_max > scores->solves.steps_max)
        scores->solves.steps_max = batch->solves.steps_max;
}

static eng_status run_batch(trn_batch *batch, const trn_window *window, trn_document_score *document,
                            trn_scores *scores, eng_error *error) {
    double start = trn_seconds();
    eng_status status = trn_batch_run(batch, error);
    scores->seconds += trn_seconds() - start;
    if (status == ENG_OK)
        collect(batch, window, document, scores);
    return status;
}

static bool fits(const trn_batch *batch, const trn_window *window) {
    const kern_rows *rows = batch->runner->rows;
    return rows->n_rows < rows->max_rows && window->count <= rows->max_tokens - rows->n_tokens;
}

eng_status trn_score_windows(trn_batch *batch, const trn_dataset *dataset, const trn_windows *windows,
                             kern_solver solver, trn_document_score *document,
                             void (*progress)(void *context, uint64_t done, uint64_t total, const char *text),
                             void *context, trn_scores *scores, eng_error *error) {
    trn_row row = {0};
    int64_t first = 0; // window of the batch
    *scores = (trn_scores){0};
    if (document)
        memset(document, 0, sizeof *document * (size_t)trn_dataset_documents(dataset));
    eng_status status = trn_row_create(batch->runner->rows->max_tokens, &row, error);
    trn_batch_clear(batch);
    for (int64_t i = 0; status == ENG_OK && i < windows->count; i++) {
        const trn_window *window = &windows->window[i];
        if (!fits(batch, window)) {
            status = run_batch(batch, &windows->window[first], document, scores, error);
            trn_batch_clear(batch);
            first = i;
            if (progress)
                progress(context, (uint64_t)i, (uint64_t)windows->count, "scoring");
        }
        if (status == ENG_OK)
            status = trn_dataset_window(dataset, window->document, window->first, window->count, &row, error);
        if (status == ENG_OK)
            status = trn_batch_add(batch, &row, 0, solver, error);
    }
    if (status == ENG_OK && batch->runner->rows->n_rows > 0)
        status = run_batch(batch, &windows->window[first], document, scores, error);
    trn_row_free(&row);
    return status;
}

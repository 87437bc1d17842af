// SPDX-License-Identifier: Apache-2.0
// Documents' scores as results; see eval_documents.h. An item is a document in the order of the shards; one without a
// target, or of which no window was chosen, has no values.
#include "trainer/eval_documents.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/digest.h"

static eng_status no_memory(eng_error *error) {
    return eng_fail(error, ENG_NO_MEMORY, "out of memory for results");
}

static eng_status put_positions(const trn_document_score *document, int64_t item, trn_result_row *row,
                                eng_error *error) {
    for (int b = 0; b < TRN_BUCKETS; b++) {
        if (document->bucket_targets[b] == 0)
            continue;
        trn_metric *position = trn_result_position(row, b);
        if (!position)
            return no_memory(error);
        position->value[item] = document->bucket_loss[b];
        position->weight[item] = (double)document->bucket_targets[b];
    }
    return ENG_OK;
}

static eng_status put_documents(const trn_evaluation *e, bool whole, trn_result_row *row, eng_error *error) {
    eng_status status = ENG_OK;
    if (whole && !trn_result_metric(row, "bits_per_byte", true))
        return no_memory(error);
    if (!trn_result_metric(row, "loss", true))
        return no_memory(error);
    trn_metric *loss = &row->metric[row->metrics - 1];
    for (int64_t i = 0; i < row->items && status == ENG_OK; i++) {
        const trn_document_score *document = &e->document[i];
        if (document->targets == 0)
            continue;
        loss->value[i] = document->loss;
        loss->weight[i] = (double)document->targets;
        if (whole) {
            row->metric[0].value[i] = document->loss / log(2);
            row->metric[0].weight[i] = (double)trn_dataset_document_bytes(e->dataset, i);
        }
        status = put_positions(document, i, row, error);
    }
    snprintf(row->primary, sizeof row->primary, "%s", row->metric[0].name);
    return status;
}

// Every pair of every document stands in a window.
static bool reads_all(const trn_evaluation *e) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < e->windows.count; i++)
        pairs += e->windows.window[i].count;
    return pairs == trn_dataset_pairs(e->dataset) && !trn_dataset_has_examples(e->dataset);
}

eng_status trn_documents_row(const trn_evaluation *e, const trn_strings *data, const trn_setting *setting,
                             const trn_scores *scores, trn_result_row *out, eng_error *error) {
    char task[128];
    uint8_t digest[ENG_DIGEST_BYTES];
    const char *path = data->item[0], *slash = strrchr(path, '/');
    snprintf(task, sizeof task, "%.64s%s %d", slash ? slash + 1 : path, data->count > 1 ? " and others" : "",
             e->context);
    eng_status status = trn_result_row_create(task, trn_dataset_documents(e->dataset), out, error);
    if (status == ENG_OK)
        status = trn_dataset_digest(e->dataset, digest, error);
    if (status != ENG_OK)
        return status;
    eng_digest_hex(digest, out->digest);
    out->setting = *setting;
    out->figures = (trn_reading_figures){
        .tokens = scores->targets, .unshared = scores->targets, .solves = scores->solves, .seconds = scores->seconds};
    return put_documents(e, reads_all(e), out, error);
}

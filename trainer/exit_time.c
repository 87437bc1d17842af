// SPDX-License-Identifier: Apache-2.0
// The time of generated tokens at loops that are chosen; see exit_data.h.
// The ids are those of the data, whatever is drawn, so that all settings read the same.
#include "engine/batch.h"
#include "trainer/exit_data.h"

typedef struct generating {
    trn_evaluation *e;
    const eng_knobs *knobs;
    eng_pool *pool;
    eng_batch *batch;
    kern_stream *stream;
} generating;

static eng_status read_window(generating *g, const trn_row *row, int64_t *left, eng_error *error) {
    eng_session session = {0};
    eng_status status = eng_session_open(g->pool, g->stream, row->length, &session, error);
    const int32_t count = row->length < *left ? row->length : (int32_t)*left;
    for (int32_t i = 0; status == ENG_OK && i < count; i++) {
        int32_t index;
        const eng_piece piece = {.session = &session,
                                 .kind = KERN_ROW_GENERATED,
                                 .ids = row->id + i,
                                 .count = 1,
                                 .knobs = *g->knobs,
                                 .logits = true};
        eng_batch_clear(g->batch);
        status = eng_batch_add(g->batch, &piece, &index, error);
        if (status == ENG_OK)
            status = eng_batch_run(g->batch, error);
    }
    *left -= count;
    if (status == ENG_OK) // what waits at the end is paid too
        status = eng_session_settle(&session, error);
    eng_session_close(&session);
    return status;
}

static eng_status read_number(generating *g, int64_t number, trn_row *row, int64_t *left, eng_error *error) {
    const trn_window *window = &g->e->windows.window[number];
    eng_status status = trn_dataset_window(g->e->dataset, window->document, window->first, window->count, row, error);
    return status == ENG_OK ? read_window(g, row, left, error) : status;
}

static eng_status read_all(generating *g, int64_t tokens, int64_t *read, double *seconds, eng_error *error) {
    trn_row row = {0};
    int64_t left = tokens;
    eng_status status = trn_row_create(g->e->context, &row, error);
    if (status == ENG_OK) // for the caches
        status = read_number(g, 0, &row, &left, error);
    const double start = trn_seconds();
    left = tokens;
    for (int64_t i = 0; status == ENG_OK && i < g->e->windows.count && left > 0; i++)
        status = read_number(g, i, &row, &left, error);
    *seconds = trn_seconds() - start;
    *read = tokens - left;
    trn_row_free(&row);
    return status;
}

eng_status trn_exit_time(trn_evaluation *e, const eng_knobs *knobs, int64_t tokens, int64_t *read, double *seconds,
                         eng_error *error) {
    generating g = {.e = e, .knobs = knobs, .stream = e->runner.stream};
    const int32_t chunk = kern_device_describe(e->device)->chunk;
    const int32_t pages = eng_model_has_pages(e->model) ? e->context / KERN_PAGE_TOKENS + 1 : 0;
    eng_status status = eng_pool_create(e->model, e->device, 1, pages, &g.pool, error);
    if (status == ENG_OK)
        status = eng_batch_create(e->weights, g.pool, g.stream, 1, chunk + 1, &g.batch, error);
    if (status == ENG_OK)
        status = read_all(&g, tokens, read, seconds, error);
    eng_batch_free(g.batch);
    eng_pool_free(g.pool);
    return status;
}

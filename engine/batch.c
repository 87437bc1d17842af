// SPDX-License-Identifier: Apache-2.0
// Steps: one serving plan over the pieces that were added, and what came out of it.
//
// One plan of the largest size serves every step, since its operations run over the tokens that the row table counts;
// an idle row costs nothing. Two steps may be under way: everything that a step leaves on the host is there twice, and
// on the device the stream's order keeps them apart, ids drawn by one included, which the next reads before it draws
// its own. After creation neither the device nor the host allocates. A piece is refused when it is added, never when
// the step runs: whatever fails in a run is a fault of the device or of this code, not of one request.
#include "engine/batch.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/batch_internal.h"
#include "engine/loop.h"

enum { PAGE_SHARES = 4 }; // sessions on average that a page may stand in the row table for

static bool allocate_flight(const eng_batch *batch, eng_flight *flight) {
    const eng_plan *plan = batch->plan;
    size_t rows = (size_t)batch->max_rows, top = (size_t)batch->max_logits * KERN_MAX_TOP;
    kern_device *device = batch->weights->device;
    flight->piece = calloc(rows, sizeof *flight->piece);
    flight->logits = malloc(sizeof *flight->logits * rows * (size_t)batch->weights->model->config.vocab_size);
    if (!flight->piece || !flight->logits || kern_event_create(device, &flight->done) ||
        kern_alloc_host(device, plan->results_bytes, &flight->results) ||
        kern_alloc_host(device, top * (sizeof *flight->top_id + sizeof *flight->top_logprob), &flight->top))
        return false;
    flight->finite = eng_plan_result(plan, flight->results, plan->finite);
    flight->sampled = eng_plan_result(plan, flight->results, plan->sampled);
    flight->logprob = eng_plan_result(plan, flight->results, plan->logprob);
    flight->loops = eng_plan_result(plan, flight->results, plan->loops);
    flight->solves = eng_plan_result(plan, flight->results, plan->solves);
    flight->top_id = flight->top;
    flight->top_logprob = (float *)flight->top + top;
    return true;
}

static bool allocate_host(eng_batch *batch) {
    batch->slot_fill = calloc((size_t)eng_pool_slots(batch->pool, NULL), sizeof *batch->slot_fill);
    bool done = batch->slot_fill != NULL;
    for (int i = 0; i < ENG_FLIGHTS; i++)
        done = done && allocate_flight(batch, &batch->flight[i]);
    return done;
}

static void free_flight(kern_device *device, eng_flight *flight) {
    kern_event_free(flight->done);
    kern_free_host(device, flight->results);
    kern_free_host(device, flight->top);
    free(flight->piece);
    free(flight->logits);
}

// Logits of a step: a row each and one chunk more.
static eng_plan_options plan_options(const kern_device *device, int32_t max_rows, int32_t max_tokens) {
    int64_t logits = (int64_t)max_rows + kern_device_describe(device)->chunk;
    return (eng_plan_options){.kind = ENG_PLAN_SERVE,
                              .max_tokens = max_tokens,
                              .max_rows = max_rows,
                              .max_logits = logits < max_tokens ? (int32_t)logits : max_tokens};
}

eng_status eng_batch_measure(const eng_model *model, kern_device *device, int32_t max_rows, int32_t max_tokens,
                             uint64_t *bytes, eng_error *error) {
    eng_plan *plan = NULL;
    eng_plan_options options = plan_options(device, max_rows, max_tokens);
    eng_status status = eng_plan_create(model, device, &options, &plan, error);
    if (status == ENG_OK)
        *bytes = (uint64_t)plan->saved_bytes + plan->scratch_bytes;
    eng_plan_free(plan);
    uint64_t loops = 0;
    if (status == ENG_OK && eng_model_reads_loops(model))
        status = eng_loops_measure(model, device, &options, &loops, error);
    uint64_t resume = 0;
    if (status == ENG_OK)
        status = eng_resume_measure(model, device, max_rows, &resume, error);
    if (status == ENG_OK)
        *bytes += loops + resume;
    return status;
}

// Places for pages in the row table. A page stands there once for every session that shares it; what does not fit waits
// for the next step, and one session always fits.
static int32_t table_pages(const eng_pool *pool) {
    int64_t pages = (int64_t)PAGE_SHARES * eng_pool_page_count(pool, NULL);
    return pages < INT32_MAX ? (int32_t)pages : INT32_MAX;
}

static eng_status allocate_device(eng_batch *batch, eng_error *error) {
    const eng_weights *weights = batch->weights;
    eng_plan_options options = plan_options(weights->device, batch->max_rows, batch->max_tokens);
    eng_status status = eng_plan_create(weights->model, weights->device, &options, &batch->plan, error);
    if (status != ENG_OK)
        return status;
    status = eng_memory_create(weights->device, weights, batch->plan->saved_bytes, batch->plan->scratch_bytes,
                               eng_pool_states(batch->pool), eng_pool_pages(batch->pool), &batch->memory, error);
    if (status != ENG_OK)
        return status;
    kern_status made = kern_rows_create(weights->device, batch->max_rows, batch->max_tokens, batch->max_logits, 0,
                                        table_pages(batch->pool), batch->max_edits, &batch->rows);
    if (made)
        return eng_fail_kernel(error, made, "allocating the row table");
    batch->rows->slot_stride = eng_pool_slot_pitch(batch->pool);
    batch->rows->page_stride = eng_pool_page_stride(batch->pool);
    return ENG_OK;
}

// A piece with edits of the whole vocabulary always finds room in an empty step.
static void bound_step(eng_batch *batch) {
    int32_t vocab = batch->weights->model->config.vocab_size;
    int64_t edits = (int64_t)batch->max_rows * (vocab < ENG_ROW_EDITS ? vocab : ENG_ROW_EDITS);
    batch->max_logits = plan_options(batch->weights->device, batch->max_rows, batch->max_tokens).max_logits;
    batch->max_edits = edits < vocab ? vocab : edits < INT32_MAX ? (int32_t)edits : INT32_MAX;
}

eng_status eng_batch_create(const eng_weights *weights, eng_pool *pool, kern_stream *stream, int32_t max_rows,
                            int32_t max_tokens, eng_batch **out, eng_error *error) {
    if (max_rows < 1 || max_tokens < max_rows)
        return eng_fail(error, ENG_INVALID, "a batch needs at least one row and a token for each row");
    eng_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the batch");
    batch->weights = weights;
    batch->pool = pool;
    batch->stream = stream;
    batch->chunk = kern_device_describe(weights->device)->chunk;
    batch->max_rows = max_rows;
    batch->max_tokens = max_tokens;
    batch->fill = 1;
    bound_step(batch);
    eng_status status = allocate_device(batch, error);
    if (status == ENG_OK && !allocate_host(batch))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the batch's results");
    if (status == ENG_OK)
        status = eng_resume_create(batch, error);
    if (status == ENG_OK && eng_model_reads_loops(weights->model))
        status = eng_loops_create(batch, &batch->loops, error);
    if (status != ENG_OK) {
        eng_batch_free(batch);
        return status;
    }
    *out = batch;
    return ENG_OK;
}

void eng_batch_free(eng_batch *batch) {
    if (!batch)
        return;
    kern_status idle = kern_synchronize(batch->stream); // a lost device does nothing any more
    (void)idle;
    eng_loops_free(batch->loops);
    eng_resume_free(batch);
    for (int i = 0; i < ENG_FLIGHTS; i++)
        free_flight(batch->weights->device, &batch->flight[i]);
    free(batch->slot_fill);
    kern_rows_free(batch->rows);
    eng_memory_free(batch->weights->device, &batch->memory);
    eng_plan_free(batch->plan);
    free(batch);
}

void eng_batch_clear(eng_batch *batch) {
    eng_batch_filling(batch)->pieces = 0;
    batch->tokens = batch->logits_rows = batch->edits = batch->pages = batch->most_top = 0;
    batch->resumed = batch->resumed_edits = 0;
    batch->unsampled = false;
    batch->fill++;
}

int32_t eng_batch_piece_length(const eng_batch *batch, const eng_session *session, int64_t left) {
    int64_t to_grid = batch->chunk - session->read % batch->chunk;
    return (int32_t)(left < to_grid ? left : to_grid);
}

static eng_status check_id(const eng_batch *batch, int32_t id, eng_error *error) {
    int32_t vocab = batch->weights->model->config.vocab_size;
    if (id >= 0 && id < vocab)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "id %" PRId32 " is outside the vocabulary of %" PRId32, id, vocab);
}

// Of the ids that the piece reads.
static eng_status check_ids(const eng_batch *batch, const eng_piece *piece, eng_error *error) {
    const eng_flight *previous = eng_batch_previous(batch);
    eng_status status = ENG_OK;
    for (int32_t i = 0; piece->ids && i < piece->count + (piece->scored && !piece->logits) && status == ENG_OK; i++)
        status = check_id(batch, piece->ids[i], error);
    if (piece->ids || eng_piece_resumes(piece))
        return status;
    if (piece->count != 1 || piece->kind != KERN_ROW_GENERATED || piece->scored || piece->after < 0 ||
        piece->after >= previous->pieces || !previous->piece[piece->after].piece.logits ||
        previous->piece[piece->after].piece.session != piece->session)
        return eng_fail(error, ENG_INVALID, "the step before drew no id for this piece to read");
    return ENG_OK;
}

static eng_status check_piece(const eng_batch *batch, const eng_piece *piece, eng_error *error) {
    const eng_session *session = piece->session;
    if (!session || session->pool != batch->pool)
        return eng_fail(error, ENG_INVALID, "the session is not open in the batch's pool");
    if (piece->count < 0 || (piece->count == 0 && (!piece->logits || piece->scored || session->read == 0)))
        return eng_fail(error, ENG_INVALID, "a piece holds at least one id, or draws behind what was read");
    if (piece->top < 0 || piece->top > KERN_MAX_TOP)
        return eng_fail(error, ENG_INVALID, "%" PRId32 " likeliest ids are wanted; the limit is %d", piece->top,
                        KERN_MAX_TOP);
    if (batch->slot_fill[session->slot] == batch->fill)
        return eng_fail(error, ENG_INVALID, "a session has one piece a step");
    eng_status status = check_ids(batch, piece, error);
    if (status == ENG_OK && piece->edits > 0)
        status = check_id(batch, piece->edit[0].id, error);
    if (status == ENG_OK && piece->edits > 0)
        status = check_id(batch, piece->edit[piece->edits - 1].id, error);
    return status;
}

// Pages that the piece's session has when it has read it.
static int64_t pages_with(const eng_batch *batch, const eng_piece *piece) {
    int64_t pages = eng_pool_pages_for(batch->pool, piece->session->read + piece->count);
    return pages > piece->session->pages ? pages : piece->session->pages;
}

// The places of a step that a piece takes in the batch's own rows, or beside them.
typedef struct places {
    int32_t tokens;
    int64_t pages;
    int32_t edits, resumed, resumed_edits;
} places;

static places places_of(const eng_batch *batch, const eng_piece *piece) {
    return eng_piece_resumes(piece)
               ? (places){.tokens = 1, .resumed = 1, .resumed_edits = piece->edits}
               : (places){.tokens = piece->count, .pages = pages_with(batch, piece), .edits = piece->edits};
}

static eng_status check_room(const eng_batch *batch, const eng_piece *piece, eng_error *error) {
    const places wanted = places_of(batch, piece);
    const kern_rows *resume = batch->resume.rows;
    if (batch->flight[batch->started % ENG_FLIGHTS].pieces == batch->max_rows)
        return eng_fail(error, ENG_FULL, "all %" PRId32 " rows of the step are taken", batch->max_rows);
    if (wanted.tokens > batch->max_tokens - batch->tokens)
        return eng_fail(error, ENG_FULL, "%" PRId32 " of the step's %" PRId32 " tokens are left",
                        batch->max_tokens - batch->tokens, batch->max_tokens);
    if (eng_piece_logits(piece) > batch->max_logits - batch->logits_rows)
        return eng_fail(error, ENG_FULL, "%" PRId32 " of the step's %" PRId32 " rows of logits are left",
                        batch->max_logits - batch->logits_rows, batch->max_logits);
    if (wanted.pages > batch->rows->max_pages - batch->pages)
        return eng_fail(error, ENG_FULL, "%" PRId32 " of the step's %" PRId32 " places for pages are left",
                        batch->rows->max_pages - batch->pages, batch->rows->max_pages);
    if (wanted.edits > batch->max_edits - batch->edits)
        return eng_fail(error, ENG_FULL, "%" PRId32 " of the step's %" PRId32 " edits of logits are left",
                        batch->max_edits - batch->edits, batch->max_edits);
    if (wanted.resumed > resume->max_rows - batch->resumed ||
        wanted.resumed_edits > resume->max_edits - batch->resumed_edits)
        return eng_fail(error, ENG_FULL, "%" PRId32 " sessions that draw without reading are in the step already",
                        batch->resumed);
    return ENG_OK;
}

eng_status eng_batch_add(eng_batch *batch, const eng_piece *piece, int32_t *index, eng_error *error) {
    eng_flight *flight = eng_batch_filling(batch);
    eng_status status = check_piece(batch, piece, error);
    if (status == ENG_OK)
        status = check_room(batch, piece, error);
    if (status == ENG_OK)
        status = eng_session_grow(piece->session, batch->stream, piece->session->read + piece->count, error);
    if (status != ENG_OK)
        return status;
    const places taken = places_of(batch, piece);
    flight->piece[flight->pieces] = (eng_batch_piece){.piece = *piece, .logits_row = -1};
    batch->slot_fill[piece->session->slot] = batch->fill;
    batch->tokens += taken.tokens;
    batch->logits_rows += eng_piece_logits(piece);
    batch->edits += taken.edits;
    batch->pages += (int32_t)taken.pages;
    batch->resumed += taken.resumed;
    batch->resumed_edits += taken.resumed_edits;
    batch->most_top = piece->top > batch->most_top ? piece->top : batch->most_top;
    batch->unsampled = batch->unsampled || (piece->logits && !piece->sampling);
    *index = flight->pieces++;
    return ENG_OK;
}

static kern_status download(eng_batch *batch, kern_ptr from, void *to, size_t bytes) {
    return bytes ? kern_download(batch->stream, to, eng_plan_address(&batch->memory, from), bytes) : KERN_OK;
}

static kern_status download_logits(eng_batch *batch, eng_flight *flight) {
    size_t vocab = (size_t)batch->weights->model->config.vocab_size;
    const float *logits = eng_plan_address(&batch->memory, batch->plan->logits);
    for (int32_t i = 0; i < flight->pieces; i++) {
        const eng_batch_piece *entry = &flight->piece[i];
        if (!entry->piece.logits || entry->piece.sampling)
            continue;
        kern_status status = kern_download(batch->stream, flight->logits + vocab * (size_t)i,
                                           logits + vocab * (size_t)entry->logits_row, sizeof *logits * vocab);
        if (status)
            return status;
    }
    return KERN_OK;
}

// Of plan->results: the sums of solves stand last, one a token.
static size_t used_results(const eng_batch *batch) {
    const eng_plan *plan = batch->plan;
    if (!plan->solves.ref)
        return plan->results_bytes;
    return (size_t)(plan->solves.ref - plan->results.ref) + sizeof(kern_solve_sum) * (size_t)batch->tokens;
}

static kern_status download_results(eng_batch *batch, eng_flight *flight) {
    const eng_plan *plan = batch->plan;
    size_t top = batch->most_top > 0 ? (size_t)batch->logits_rows * KERN_MAX_TOP : 0;
    kern_status status = download(batch, plan->results, flight->results, used_results(batch));
    if (status == KERN_OK)
        status = download(batch, plan->top_id, flight->top_id, sizeof *flight->top_id * top);
    if (status == KERN_OK)
        status = download(batch, plan->top_logprob, flight->top_logprob, sizeof *flight->top_logprob * top);
    return status ? status : download_logits(batch, flight);
}

int eng_batch_underway(const eng_batch *batch) {
    return (int)(batch->started - batch->finished);
}

// What runs whole comes first: its own plan's outputs would overwrite those of the others.
static eng_status run_pieces(eng_batch *batch, const eng_flight *flight, eng_error *error) {
    eng_status settled = ENG_OK;
    if (batch->loops)
        settled = eng_loops_choose(batch->loops, error);
    for (int32_t i = 0; settled == ENG_OK && i < flight->pieces; i++)
        if (!flight->piece[i].deferred)
            settled = eng_session_settle(flight->piece[i].piece.session, error);
    if (settled != ENG_OK)
        return settled;
    eng_batch_fill_rows(batch);
    kern_status status = KERN_OK;
    if (batch->rows->n_rows > 0)
        status = kern_rows_prepare(batch->stream, batch->rows);
    if (status)
        return eng_fail_kernel(error, status, "preparing the rows of a step");
    if (batch->rows->n_rows > 0)
        status = kern_plan_run(batch->plan->plan, batch->stream, batch->rows, &batch->memory);
    if (status)
        return eng_fail_kernel(error, status, "running a step");
    if (batch->loops)
        settled = eng_loops_run(batch->loops, error);
    if (settled == ENG_OK)
        status = eng_resume_run(batch);
    return status ? eng_fail_kernel(error, status, "going on from what was read") : settled;
}

eng_status eng_batch_start(eng_batch *batch, eng_error *error) {
    eng_flight *flight = eng_batch_filling(batch);
    if (flight->pieces == 0)
        return ENG_OK;
    if (eng_batch_underway(batch) == ENG_FLIGHTS)
        return eng_fail(error, ENG_INVALID, "two steps are under way");
    eng_status ran = run_pieces(batch, flight, error);
    if (ran != ENG_OK)
        return ran;
    kern_status status = download_results(batch, flight);
    if (status == KERN_OK)
        status = kern_event_record(batch->stream, flight->done);
    if (status)
        return eng_fail_kernel(error, status, "running a step");
    for (int32_t i = 0; i < flight->pieces; i++)
        flight->piece[i].piece.session->read += flight->piece[i].piece.count;
    batch->started++;
    return ENG_OK;
}

eng_status eng_batch_finish(eng_batch *batch, eng_error *error) {
    if (eng_batch_underway(batch) == 0)
        return eng_fail(error, ENG_INVALID, "no step is under way");
    batch->finished++;
    kern_status status = kern_event_wait(eng_batch_read(batch)->done);
    if (status)
        return eng_fail_kernel(error, status, "running a step");
    if (batch->loops)
        eng_loops_note(batch->loops, eng_batch_read(batch));
    return ENG_OK;
}

eng_status eng_batch_run(eng_batch *batch, eng_error *error) {
    if (eng_batch_filling(batch)->pieces == 0)
        return ENG_OK;
    eng_status status = eng_batch_start(batch, error);
    return status == ENG_OK ? eng_batch_finish(batch, error) : status;
}

// ------------------------------------------------------------------------------------------------------------ warm up

static const eng_sampling likeliest = {.top_p = 1};

// The first `count` of the sessions read one id each, at the first loop where others are left for later.
static eng_status run_generated(eng_batch *batch, eng_session *session, int32_t count, bool whole, eng_error *error) {
    static const int32_t id = 0;
    eng_knobs knobs = batch->weights->model->config.knobs;
    knobs.max_loops = 1;
    eng_batch_clear(batch);
    for (int32_t i = 0; i < count; i++) {
        int32_t index;
        eng_piece piece = {.session = &session[i],
                           .kind = KERN_ROW_GENERATED,
                           .ids = &id,
                           .count = 1,
                           .knobs = knobs,
                           .logits = true,
                           .sampling = &likeliest,
                           .whole = whole};
        eng_status status = eng_batch_add(batch, &piece, &index, error);
        if (status != ENG_OK)
            return status;
    }
    return eng_batch_run(batch, error);
}

static eng_status run_prompt(eng_batch *batch, eng_error *error) {
    int32_t index, count = batch->chunk < batch->max_tokens ? batch->chunk : batch->max_tokens;
    eng_session session = {0};
    int32_t *ids = calloc((size_t)count, sizeof *ids);
    if (!ids)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the first steps");
    eng_piece piece = {.session = &session,
                       .kind = KERN_ROW_PROMPT,
                       .ids = ids,
                       .count = count,
                       .knobs = batch->weights->model->config.knobs,
                       .logits = true,
                       .sampling = &likeliest};
    eng_status status = eng_session_open(batch->pool, batch->stream, count, &session, error);
    for (int i = 0; status == ENG_OK && i < 2; i++) { // the second draws again
        eng_batch_clear(batch);
        status = eng_batch_add(batch, &piece, &index, error);
        if (status == ENG_OK)
            status = eng_batch_run(batch, error);
        piece.count = 0;
        piece.ids = NULL;
    }
    eng_session_close(&session);
    free(ids);
    return status;
}

// Sessions up to `wanted`; fewer when the pool holds no more at once, as then no step ever has more.
static eng_status open_sessions(eng_batch *batch, eng_session *session, int32_t wanted, int32_t *opened,
                                eng_error *error) {
    while (*opened < wanted) {
        eng_error full = {0};
        eng_status status = eng_session_open(batch->pool, batch->stream, KERN_PAGE_TOKENS, &session[*opened], &full);
        if (status == ENG_FULL)
            return ENG_OK;
        if (status != ENG_OK)
            return eng_fail(error, status, "%s", full.text);
        ++*opened;
    }
    return ENG_OK;
}

eng_status eng_batch_warm_up(eng_batch *batch, eng_error *error) {
    if (!kern_plan_is_captured(batch->plan->plan))
        return ENG_OK;
    eng_session *session = calloc((size_t)batch->max_rows, sizeof *session);
    if (!session)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the first steps");
    int32_t opened = 0;
    eng_status status = run_prompt(batch, error);
    for (int32_t count = 1, run = 0; status == ENG_OK && run < batch->max_rows; count *= 2) {
        int32_t wanted = count < batch->max_rows ? count : batch->max_rows;
        status = open_sessions(batch, session, wanted, &opened, error);
        if (status == ENG_OK && opened > run)
            status = run_generated(batch, session, opened, true, error);
        if (status == ENG_OK && opened > run && batch->loops)
            status = run_generated(batch, session, opened, false, error);
        run = opened < wanted ? batch->max_rows : opened;
    }
    if (status == ENG_OK && batch->loops)
        status = eng_loops_warm_up(batch->loops, &session[0], error);
    while (opened > 0)
        eng_session_close(&session[--opened]);
    free(session);
    eng_batch_clear(batch);
    return status;
}

// ------------------------------------------------------------------------------------------------------------ results

static void add_solves(const eng_flight *flight, int32_t token0, int32_t tokens, eng_compute *sum) {
    if (flight->solves)
        eng_add_solves(flight->solves + token0, tokens, sum);
}

static int32_t loop_of(const eng_flight *flight, int32_t token) {
    return flight->loops ? flight->loops[token] : 0;
}

void eng_batch_result(const eng_batch *batch, int32_t index, eng_piece_result *out) {
    const eng_model *model = batch->weights->model;
    const eng_flight *flight = eng_batch_read(batch);
    const eng_batch_piece *entry = &flight->piece[index];
    *out = (eng_piece_result){.position = entry->position, .count = entry->piece.count, .finite = true, .id = -1};
    add_solves(flight, entry->token0, entry->piece.count, &out->compute);
    for (int32_t i = 0; i < eng_piece_logits(&entry->piece); i++)
        out->finite = out->finite && flight->finite[entry->logits_row - i];
    if (!entry->piece.logits)
        return;
    out->id = flight->sampled[entry->logits_row];
    out->loop = loop_of(flight, entry->token0 + entry->piece.count - 1);
    out->logprob = flight->logprob[entry->logits_row];
    if (!entry->piece.sampling)
        out->logits = flight->logits + (size_t)index * (size_t)model->config.vocab_size;
}

void eng_batch_prediction(const eng_batch *batch, int32_t index, int32_t token, eng_prediction *out) {
    const eng_flight *flight = eng_batch_read(batch);
    const eng_batch_piece *entry = &flight->piece[index];
    int32_t vocab = batch->weights->model->config.vocab_size;
    size_t row = (size_t)(entry->logits_row - (entry->piece.count - 1 - token));
    *out = (eng_prediction){.id = flight->sampled[row],
                            .logprob = flight->logprob[row],
                            .loop = loop_of(flight, entry->token0 + token),
                            .top = entry->piece.top < vocab ? entry->piece.top : vocab,
                            .top_id = flight->top_id + row * KERN_MAX_TOP,
                            .top_logprob = flight->top_logprob + row * KERN_MAX_TOP};
}

void eng_batch_compute(const eng_batch *batch, int32_t index, int32_t token, eng_compute *out) {
    *out = (eng_compute){0};
    const eng_flight *flight = eng_batch_read(batch);
    add_solves(flight, flight->piece[index].token0 + token, 1, out);
}

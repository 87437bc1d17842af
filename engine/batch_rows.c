// SPDX-License-Identifier: Apache-2.0
// From the pieces of a step to the kernels' row table.
//
// The table wants all generated rows before all prompt rows; within a kind the order of adding is kept. A row's results
// do not depend on where it stands. What is written here is checked once more, as a whole, by kern_rows_prepare.
#include <string.h>

#include "engine/batch_internal.h"

int32_t eng_batch_add_pages(kern_rows *rows, const eng_session *session) {
    if (session->pages == 0)
        return -1;
    int32_t page0 = rows->n_pages;
    memcpy(rows->page + page0, session->page, sizeof *rows->page * (size_t)session->pages);
    rows->n_pages += session->pages;
    return page0;
}

static int32_t add_edits(kern_rows *rows, const eng_piece *piece) {
    int32_t edit0 = rows->n_edits;
    if (piece->edits > 0)
        memcpy(rows->edit + edit0, piece->edit, sizeof *rows->edit * (size_t)piece->edits);
    rows->n_edits += piece->edits;
    return edit0;
}

// The sampler of the id after the piece's token number `token`.
static kern_sampler sampler_of(kern_rows *rows, const eng_piece *piece, int32_t token) {
    static const eng_sampling greedy = {.temperature = 0, .top_p = 1};
    const eng_sampling *sampling = piece->sampling ? piece->sampling : &greedy;
    kern_sampler sampler = {.forced = -1, .top = piece->top};
    if (token + 1 < piece->count || !piece->logits) {
        sampler.forced = piece->ids[token + 1];
        return sampler;
    }
    sampler = eng_sampler(sampling, piece->session->read + piece->count);
    sampler.top = piece->top;
    sampler.edit0 = add_edits(rows, piece);
    sampler.edits = piece->edits;
    return sampler;
}

// The row of the last token; -1: none.
int32_t eng_batch_add_logits(kern_rows *rows, const eng_piece *piece, int32_t token0) {
    for (int32_t token = piece->count - eng_piece_logits(piece); token < piece->count; token++) {
        rows->logits_token[rows->n_logits] = token0 + token;
        rows->sampler[rows->n_logits] = sampler_of(rows, piece, token);
        rows->n_logits++;
    }
    return eng_piece_logits(piece) > 0 ? rows->n_logits - 1 : -1;
}

static void add_ids(kern_rows *rows, const eng_piece *piece, const eng_flight *previous) {
    if (piece->ids)
        memcpy(rows->id + rows->n_tokens, piece->ids, sizeof *rows->id * (size_t)piece->count);
    else
        rows->id[rows->n_tokens] = -1 - previous->piece[piece->after].logits_row;
    rows->n_tokens += piece->count;
    if (piece->kind == KERN_ROW_GENERATED)
        rows->n_generated += piece->count;
}

static void add_row(kern_rows *rows, eng_batch_piece *entry, const eng_flight *previous) {
    const eng_piece *piece = &entry->piece;
    const eng_session *session = piece->session;
    entry->token0 = rows->n_tokens;
    entry->position = session->read;
    rows->row[rows->n_rows++] = (kern_row){.kind = piece->kind,
                                           .slot = session->slot,
                                           .token0 = rows->n_tokens,
                                           .length = piece->count,
                                           .position = session->read,
                                           .page0 = eng_batch_add_pages(rows, session),
                                           .solver = eng_solver(&piece->knobs),
                                           .exit = eng_exit(&piece->knobs)};
    add_ids(rows, piece, previous);
    entry->logits_row = eng_batch_add_logits(rows, piece, entry->token0);
}

static bool is_elsewhere(const eng_batch_piece *entry) {
    return entry->deferred || eng_piece_resumes(&entry->piece);
}

// A piece without ids has the place of a token, behind which it begins.
static void place_rest(eng_flight *flight, int32_t *token, int32_t *row, bool resumes) {
    for (int32_t i = 0; i < flight->pieces; i++) {
        eng_batch_piece *entry = &flight->piece[i];
        if (!is_elsewhere(entry) || eng_piece_resumes(&entry->piece) != resumes)
            continue;
        entry->token0 = (*token)++ + resumes;
        entry->logits_row = (*row)++;
        entry->position = entry->piece.session->read;
    }
}

void eng_batch_fill_rows(eng_batch *batch) {
    static const kern_row_kind order[] = {KERN_ROW_GENERATED, KERN_ROW_PROMPT};
    eng_flight *flight = eng_batch_filling(batch);
    kern_rows *rows = batch->rows;
    rows->n_rows = rows->n_tokens = rows->n_generated = rows->n_logits = 0;
    rows->n_boundaries = rows->n_pages = rows->n_edits = 0;
    for (size_t kind = 0; kind < sizeof order / sizeof *order; kind++)
        for (int32_t i = 0; i < flight->pieces; i++)
            if (flight->piece[i].piece.kind == order[kind] && !is_elsewhere(&flight->piece[i]))
                add_row(rows, &flight->piece[i], eng_batch_previous(batch));
    int32_t token = rows->n_tokens, row = rows->n_logits;
    place_rest(flight, &token, &row, false);
    place_rest(flight, &token, &row, true);
}

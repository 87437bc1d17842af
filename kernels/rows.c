// SPDX-License-Identifier: Apache-2.0
// The row table: allocation for fixed capacities, the checks on the caller's part, and the derived part.
//
// Launchers index by what stands in the table without looking again, so every index is checked here, once a step: row
// order and ranges, boundaries, pages, logits, edits. Not checked here, because it is not known here: ids against a
// vocabulary (embed and head check them against their weight), those that only the device knows, and slots against the
// number of slots. A table belongs to
// the thread that runs the steps.
#include <math.h>
#include <stdlib.h>

#include "kernels/backend.h"

// A row of L tokens touches at most 2 + (L - 2) / C chunks of the grid, and never more than L.
static int32_t chunk_capacity(int32_t chunk, int32_t max_rows, int32_t max_tokens) {
    int64_t bound = 2 * (int64_t)max_rows + max_tokens / chunk;
    return (int32_t)(bound < max_tokens ? bound : max_tokens);
}

static void free_arrays(kern_rows *rows) {
    free(rows->row);
    free(rows->boundary);
    free(rows->page);
    free(rows->id);
    free(rows->target);
    free(rows->target_weight);
    free(rows->logits_token);
    free(rows->sampler);
    free(rows->edit);
    free(rows->chunk);
    free(rows->token_row);
    free(rows->token_start);
    free(rows->token_position);
}

static void *zeroed(int32_t count, size_t size) {
    return calloc(count > 0 ? (size_t)count : 1, size);
}

static bool allocate_arrays(kern_rows *rows) {
    rows->row = zeroed(rows->max_rows, sizeof *rows->row);
    rows->boundary = zeroed(rows->max_boundaries, sizeof *rows->boundary);
    rows->page = zeroed(rows->max_pages, sizeof *rows->page);
    rows->id = zeroed(rows->max_tokens, sizeof *rows->id);
    rows->target = zeroed(rows->max_tokens, sizeof *rows->target);
    rows->target_weight = zeroed(rows->max_tokens, sizeof *rows->target_weight);
    rows->logits_token = zeroed(rows->max_logits, sizeof *rows->logits_token);
    rows->sampler = zeroed(rows->max_logits, sizeof *rows->sampler);
    rows->edit = zeroed(rows->max_edits, sizeof *rows->edit);
    rows->chunk = zeroed(rows->max_chunks, sizeof *rows->chunk);
    rows->token_row = zeroed(rows->max_tokens, sizeof *rows->token_row);
    rows->token_start = zeroed(rows->max_tokens, sizeof *rows->token_start);
    rows->token_position = zeroed(rows->max_tokens, sizeof *rows->token_position);
    return rows->row && rows->boundary && rows->page && rows->id && rows->target && rows->target_weight &&
           rows->logits_token && rows->sampler && rows->edit && rows->chunk && rows->token_row && rows->token_start &&
           rows->token_position;
}

kern_status kern_rows_create(kern_device *device, int32_t max_rows, int32_t max_tokens, int32_t max_logits,
                             int32_t max_boundaries, int32_t max_pages, int32_t max_edits, kern_rows **out) {
    *out = NULL;
    if (max_rows < 1 || max_tokens < max_rows || max_logits < 0 || max_boundaries < 0 || max_pages < 0 || max_edits < 0)
        return KERN_INVALID;
    kern_rows_owner *owner = calloc(1, sizeof *owner);
    if (!owner)
        return KERN_NO_MEMORY;
    owner->device = device;
    kern_rows *rows = &owner->rows;
    rows->max_rows = max_rows;
    rows->max_tokens = max_tokens;
    rows->max_logits = max_logits;
    rows->max_boundaries = max_boundaries;
    rows->max_pages = max_pages;
    rows->max_edits = max_edits;
    rows->max_chunks = chunk_capacity(device->info.chunk, max_rows, max_tokens);
    kern_status status = allocate_arrays(rows) ? KERN_OK : KERN_NO_MEMORY;
    if (!status && device->backend->mirror_create)
        status = device->backend->mirror_create(device, rows, &owner->mirror);
    if (status) {
        kern_rows_free(rows);
        return status;
    }
    *out = rows;
    return KERN_OK;
}

// The layout of a followed table is that of all its capacities, sent once.
kern_status kern_rows_create_followed(kern_stream *stream, int32_t max_rows, int32_t max_tokens, int32_t max_pages,
                                      kern_rows **out) {
    kern_status status = kern_rows_create(stream->device, max_rows, max_tokens, 0, 0, max_pages, 0, out);
    if (status)
        return status;
    kern_rows *rows = *out;
    kern_rows_owner *owner = kern_rows_owner_of(rows);
    rows->followed = true;
    owner->now = *rows;
    owner->now.followed = false;
    rows->n_rows = max_rows;
    rows->n_tokens = rows->n_generated = max_tokens;
    rows->n_pages = max_pages;
    if (owner->mirror)
        status = stream->device->backend->mirror_send(stream, rows, owner->mirror);
    if (status) {
        kern_rows_free(rows);
        *out = NULL;
    }
    return status;
}

void kern_rows_free(kern_rows *rows) {
    if (!rows)
        return;
    kern_rows_owner *owner = kern_rows_owner_of(rows);
    if (owner->mirror)
        owner->device->backend->mirror_free(owner->mirror);
    free_arrays(rows);
    free(owner);
}

// ------------------------------------------------------------------------------------------------------------ checks

static bool within(int32_t count, int32_t capacity) {
    return count >= 0 && count <= capacity;
}

static bool range_within(int32_t first, int32_t count, int32_t size) {
    return first >= 0 && count >= 0 && (int64_t)first + count <= size;
}

static bool counts_are_valid(const kern_rows *rows) {
    return within(rows->n_rows, rows->max_rows) && within(rows->n_tokens, rows->max_tokens) &&
           within(rows->n_logits, rows->max_logits) && within(rows->n_boundaries, rows->max_boundaries) &&
           within(rows->n_pages, rows->max_pages) && within(rows->n_edits, rows->max_edits);
}

static bool boundaries_are_valid(const kern_rows *rows, const kern_row *row) {
    if (row->boundaries == 0)
        return true;
    if (!range_within(row->boundary0, row->boundaries, rows->n_boundaries))
        return false;
    int32_t before = row->token0, end = row->token0 + row->length;
    for (int32_t i = 0; i < row->boundaries; i++) {
        int32_t boundary = rows->boundary[row->boundary0 + i];
        if (boundary <= before || boundary >= end)
            return false;
        before = boundary;
    }
    return true;
}

static bool pages_are_valid(const kern_rows *rows, const kern_row *row) {
    if (row->page0 == -1)
        return true;
    int64_t pages = (row->position + row->length + KERN_PAGE_TOKENS - 1) / KERN_PAGE_TOKENS;
    if (row->page0 < 0 || pages > rows->n_pages - row->page0)
        return false;
    for (int64_t i = 0; i < pages; i++)
        if (rows->page[row->page0 + i] < 0)
            return false;
    return true;
}

static bool row_is_valid(const kern_rows *rows, const kern_row *row, int32_t token0) {
    const kern_solver *solver = &row->solver;
    if (row->kind != KERN_ROW_GENERATED && row->kind != KERN_ROW_PROMPT)
        return false;
    if (row->slot < -1 || row->token0 != token0 || row->length < 1 || row->length > rows->n_tokens - token0)
        return false;
    if (row->position < 0 || row->position > INT64_MAX - INT32_MAX)
        return false;
    if (solver->mode < KERN_SOLVE_TOLERANCE || solver->mode > KERN_SOLVE_FIXED || solver->max_steps < 0 ||
        !(solver->tolerance >= 0))
        return false;
    return boundaries_are_valid(rows, row) && pages_are_valid(rows, row);
}

// Rows in order without gaps, generated ones first, their tokens counted.
static bool rows_are_valid(const kern_rows *rows) {
    int32_t token = 0, generated = 0;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        const kern_row *row = &rows->row[r];
        if (!row_is_valid(rows, row, token))
            return false;
        if (row->kind == KERN_ROW_GENERATED) {
            if (generated != token)
                return false;
            generated += row->length;
        }
        token += row->length;
    }
    return token == rows->n_tokens && generated == rows->n_generated;
}

static bool tokens_are_valid(const kern_rows *rows) {
    int32_t lowest_id = 0, lowest_target = 0;
    for (int32_t t = 0; t < rows->n_tokens; t++) {
        lowest_id = rows->id[t] < lowest_id ? rows->id[t] : lowest_id;
        lowest_target = rows->target[t] < lowest_target ? rows->target[t] : lowest_target;
    }
    return lowest_id >= -rows->max_logits && lowest_target >= -1;
}

static bool sampler_is_valid(const kern_rows *rows, const kern_sampler *sampler) {
    if (!(sampler->temperature >= 0) || isinf(sampler->temperature) || isnan(sampler->top_p) || isnan(sampler->min_p))
        return false;
    if (sampler->forced < -1 || sampler->top < 0 || sampler->top > KERN_MAX_TOP)
        return false;
    if (sampler->edits == 0)
        return true;
    if (!range_within(sampler->edit0, sampler->edits, rows->n_edits))
        return false;
    for (int32_t i = 0; i < sampler->edits; i++)
        if (rows->edit[sampler->edit0 + i].id < 0)
            return false;
    return true;
}

static bool logits_are_valid(const kern_rows *rows) {
    for (int32_t i = 0; i < rows->n_logits; i++)
        if (rows->logits_token[i] < 0 || rows->logits_token[i] >= rows->n_tokens ||
            !sampler_is_valid(rows, &rows->sampler[i]))
            return false;
    return true;
}

// ----------------------------------------------------------------------------------------------------------- derived

static void place_tokens(kern_rows *rows, int32_t r) {
    const kern_row *row = &rows->row[r];
    int32_t start = row->token0, next = 0;
    int64_t start_position = row->position;
    for (int32_t t = row->token0; t < row->token0 + row->length; t++) {
        if (next < row->boundaries && rows->boundary[row->boundary0 + next] == t) {
            start = t;
            start_position = 0;
            next++;
        }
        rows->token_row[t] = r;
        rows->token_start[t] = start;
        rows->token_position[t] = start_position + (t - start);
    }
}

// Cuts at multiples of C of the absolute position; false when the capacity does not suffice, which create rules out.
static bool cut_row(kern_rows *rows, int32_t r, int32_t chunk) {
    const kern_row *row = &rows->row[r];
    int32_t done = 0;
    while (done < row->length) {
        int64_t position = row->position + done;
        int32_t to_grid = chunk - (int32_t)(position % chunk);
        int32_t length = row->length - done < to_grid ? row->length - done : to_grid;
        if (rows->n_chunks == rows->max_chunks)
            return false;
        rows->chunk[rows->n_chunks++] = (kern_chunk){r, row->token0 + done, length, position};
        done += length;
    }
    return true;
}

kern_status kern_rows_prepare(kern_stream *stream, kern_rows *rows) {
    if (rows->followed || !counts_are_valid(rows) || !rows_are_valid(rows) || !tokens_are_valid(rows) ||
        !logits_are_valid(rows))
        return KERN_INVALID;
    rows->n_chunks = 0;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        place_tokens(rows, r);
        if (rows->row[r].kind == KERN_ROW_PROMPT && !cut_row(rows, r, stream->device->info.chunk))
            return KERN_INVALID;
    }
    void *mirror = kern_rows_owner_of(rows)->mirror;
    return mirror ? stream->device->backend->mirror_send(stream, rows, mirror) : KERN_OK;
}

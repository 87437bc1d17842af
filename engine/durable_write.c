// SPDX-License-Identifier: Apache-2.0
// Which write is due, and what became of it; leases renewed. See durable.h for why it is right.
//
// A write is decided anew each time: what failed leaves a mark, not a request to repeat.
#include "engine/durable_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/store_internal.h"

const char eng_durable_lost_text[] = "the session is in use by another server";

// ------------------------------------------------------------------------------------------------------------- what is

bool eng_named_is_behind(const eng_named *named) {
    return named->whole || named->timeline->changes != named->has.changes;
}

bool eng_named_wants_state(const eng_named *named) {
    eng_timeline_piece piece;
    eng_timeline_piece_near(named->timeline, &piece);
    return !named->too_large && piece.state.begin - named->has.state >= ENG_DURABLE_WORTH_IDS;
}

static size_t entry_bytes(const eng_durable *durable, const eng_named *named, eng_timeline_piece *piece) {
    eng_timeline_piece_since(named->timeline, named->timeline->low, piece);
    return eng_state_measure(durable->options.pool, &piece->state);
}

// An entry cannot say it, or should not.
static bool needs_whole(const eng_durable *durable, const eng_named *named) {
    const eng_timeline *timeline = named->timeline;
    eng_timeline_piece piece;
    if (named->whole || timeline->low < named->has.first || timeline->low < timeline->first)
        return true;
    return named->has.bytes + entry_bytes(durable, named, &piece) > ENG_STORE_JOURNAL_BYTES / 2;
}

// ------------------------------------------------------------------------------------------------------------- writes

static eng_store_request request_of(const eng_durable *durable, const eng_named *named, eng_store_op op) {
    eng_store_request request = eng_durable_about(&named->name, op);
    const eng_stored_note note = {.position = named->timeline->position, .ttl_ms = named->ttl_ms};
    memcpy(request.meta.note, &note, sizeof note);
    memcpy(request.meta.note + offsetof(eng_stored_note, note), named->note, sizeof named->note);
    memcpy(request.meta.fingerprint, durable->options.key->fingerprint, sizeof request.meta.fingerprint);
    memcpy(request.meta.profile, durable->options.key->profile, sizeof request.meta.profile);
    request.meta.position = (int64_t)named->making.number;
    request.epoch = named->epoch;
    request.ttl_ms = named->ttl_ms;
    return request;
}

static void fail(eng_durable *durable, eng_named *named, eng_status status, const char *text) {
    snprintf(durable->fault, sizeof durable->fault, "the store did not take the session: %.200s",
             text[0] ? text : eng_status_text(status));
    durable->failures++;
    named->failures++;
    named->failure = status;
    if (eng_named_is_behind(named))
        named->retry_at = eng_store_clock() + ENG_DURABLE_RETRY_MS;
    eng_durable_due(durable, named->retry_at);
}

// What is smaller may find room meanwhile.
static void put_off_state(eng_named *named) {
    named->state_at = eng_store_clock() + ENG_DURABLE_IDLE_MS;
}

static eng_status submit(eng_durable *durable, eng_named *named, eng_store_request *request) {
    eng_timeline *timeline = named->timeline;
    eng_error error = {0};
    eng_status status = eng_durable_ask(durable, request, &named->writing, &error);
    if (status == ENG_OK) {
        named->low = timeline->low;
        timeline->low = timeline->read;
    } else if (status != ENG_FULL) // which passes
        fail(durable, named, status, error.text);
    return status;
}

static void append(eng_durable *durable, eng_named *named) {
    eng_timeline_piece piece;
    const size_t size = entry_bytes(durable, named, &piece);
    void *bytes = malloc(size);
    eng_error error = {0};
    eng_status status =
        bytes ? eng_timeline_piece_write(durable->options.pool, durable->options.key, &piece, bytes, &error)
              : ENG_NO_MEMORY;
    if (status != ENG_OK) {
        free(bytes);
        fail(durable, named, status, error.text);
        return;
    }
    named->making = named->has;
    named->making.number++;
    named->making.changes = named->timeline->changes;
    named->making.bytes += size + sizeof(eng_store_frame);
    if (piece.state.begin < named->has.state) // which is passed over from now on
        named->making.state = named->has.first;
    eng_store_request request = request_of(durable, named, ENG_STORE_APPEND);
    request.entry = bytes;
    request.entry_bytes = size;
    const eng_status submitted = submit(durable, named, &request);
    (void)submitted; // what was not is tried again
    free(bytes);
}

// The most of the timeline that fits; false: nothing does.
static bool fit(const eng_durable *durable, const eng_timeline *timeline, bool state, eng_timeline_piece *out) {
    const eng_durable_options *options = &durable->options;
    const uint64_t room = durable->buffer_bytes - ENG_STORE_JOURNAL_BYTES;
    eng_timeline_piece_whole(timeline, state, out);
    if (eng_state_measure(options->pool, &out->state) > room)
        eng_timeline_piece_whole(timeline, false, out);
    if (eng_state_measure(options->pool, &out->state) > room)
        eng_timeline_piece_near(timeline, out);
    return eng_state_measure(options->pool, &out->state) <= room;
}

// Ids that the newest state in the piece has read.
static int64_t state_of(const eng_timeline_piece *piece) {
    return piece->state.states > 0 ? piece->state.at[piece->state.states - 1] : 0;
}

// NULL: not now.
static eng_store_buffer *fill_buffer(eng_durable *durable, eng_named *named, bool state, eng_timeline_piece *piece) {
    const eng_durable_options *options = &durable->options;
    eng_store_buffer *buffer = eng_store_take_buffer(durable->client);
    if (!buffer) {
        durable->starved = true;
        return NULL;
    }
    eng_timeline_piece near;
    eng_error error = {0};
    eng_timeline_piece_near(named->timeline, &near);
    eng_status status = fit(durable, named->timeline, state, piece) ? ENG_OK : ENG_TOO_LONG;
    named->too_large |= state && state_of(piece) < near.state.begin;
    if (status == ENG_OK)
        status = eng_timeline_piece_write(options->pool, options->key, piece, buffer->bytes, &error);
    if (status == ENG_OK) {
        buffer->length = eng_state_measure(options->pool, &piece->state);
        return buffer;
    }
    put_off_state(named);
    fail(durable, named, status, error.text);
    eng_store_return_buffer(durable->client, buffer);
    return NULL;
}

static void put(eng_durable *durable, eng_named *named, bool state) {
    eng_timeline_piece piece;
    eng_store_buffer *buffer = fill_buffer(durable, named, state, &piece);
    if (!buffer)
        return;
    named->making = (eng_written){.number = named->has.number + eng_named_is_behind(named),
                                  .changes = named->timeline->changes,
                                  .first = piece.state.begin,
                                  .state = state_of(&piece)};
    eng_store_request request = request_of(durable, named, ENG_STORE_PUT);
    request.buffer = buffer;
    if (submit(durable, named, &request) != ENG_OK)
        eng_store_return_buffer(durable->client, buffer);
}

void eng_named_write(eng_durable *durable, eng_named *named, bool state) {
    if (named->writing.waiting || named->lost || eng_store_clock() < named->retry_at)
        return;
    const bool behind = eng_named_is_behind(named);
    state |= named->timeline->position - named->has.state > ENG_DURABLE_JOURNAL_IDS ||
             named->has.bytes > ENG_STORE_JOURNAL_BYTES / 2;
    state = state && eng_store_clock() >= named->state_at && eng_named_wants_state(named);
    if (state || (behind && needs_whole(durable, named)))
        put(durable, named, state);
    else if (behind)
        append(durable, named);
}

static void written(eng_durable *durable, eng_named *named, const eng_store_reply *reply) {
    eng_durable_read_meta(durable, &reply->meta, &named->record);
    if (reply->op == ENG_STORE_APPEND && reply->meta.payload_bytes == 0) {
        named->whole = true; // the record's time was over: this entry stands alone
    } else {
        named->has = named->making;
        named->whole &= reply->op != ENG_STORE_PUT;
        durable->states += reply->op == ENG_STORE_PUT && named->has.state > 0;
    }
    eng_durable_due(durable, named->used + ENG_DURABLE_IDLE_MS);
    eng_named_write(durable, named, false);
}

static void not_written(eng_durable *durable, eng_named *named, const eng_store_reply *reply) {
    eng_timeline *timeline = named->timeline;
    const eng_status status = reply->status;
    if (reply->op == ENG_STORE_PUT)
        put_off_state(named);
    if (named->low < timeline->low)
        timeline->low = named->low;
    fail(durable, named, status, reply->error.text);
    if (status == ENG_CONFLICT || status == ENG_NOT_FOUND)
        eng_durable_lose(durable, named);
    else if (status != ENG_FULL && named->making.number != named->has.number)
        named->whole = true; // it may be there
}

void eng_named_take_write(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_named *named = waiter->of;
    if (reply->buffer)
        eng_store_return_buffer(durable->client, reply->buffer);
    durable->failing = reply->status == ENG_IO;
    if (!named->timeline)
        eng_named_free_if_done(named);
    else if (reply->status == ENG_OK) {
        written(durable, named, reply);
        eng_named_hand_over(durable, named);
    } else
        not_written(durable, named, reply);
}

// ------------------------------------------------------------------------------------------------------------- leases

void eng_named_take_lease(eng_durable *durable, eng_named *named, uint64_t epoch, int64_t asked) {
    named->epoch = epoch;
    named->until = asked + durable->options.lease_ms;
    named->renew_at = asked + durable->options.lease_ms / 3;
    eng_durable_due(durable, named->renew_at);
}

void eng_named_renew(eng_durable *durable, eng_named *named) {
    if (named->renewal.waiting)
        return;
    eng_store_request request = eng_durable_about(&named->name, ENG_STORE_LEASE);
    request.epoch = named->epoch;
    request.ttl_ms = durable->options.lease_ms;
    named->asked = eng_store_clock();
    const eng_status asked = eng_durable_ask(durable, &request, &named->renewal, NULL);
    (void)asked; // what was not is tried again
}

void eng_named_take_renewal(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_named *named = waiter->of;
    if (!named->timeline)
        eng_named_free_if_done(named);
    else if (reply->status == ENG_OK)
        eng_named_take_lease(durable, named, reply->epoch, named->asked);
    else if (reply->status == ENG_CONFLICT || reply->status == ENG_NOT_FOUND)
        eng_durable_lose(durable, named);
    else
        eng_durable_due(durable, named->renew_at = eng_store_clock() + durable->options.lease_ms / 15);
}

// SPDX-License-Identifier: Apache-2.0
// A timeline made of what the store has: the whole, then the entries of the journal in their order; see durable.h.
//
// Bytes are believed as far as the store believes them: what they say is still compared with the model and with what
// stands before them.
#include "engine/durable_internal.h"

#include <stdlib.h>
#include <string.h>

void eng_durable_read_meta(const eng_durable *durable, const eng_store_meta *meta, eng_record *out) {
    eng_stored_note note;
    memcpy(&note, meta->note, sizeof note);
    *out = (eng_record){
        .position = note.position,
        .ttl_ms = note.ttl_ms,
        .created_ms = meta->created_ms,
        .expires_ms = meta->expires_ms,
        .bytes = meta->payload_bytes,
        .foreign = memcmp(meta->fingerprint, durable->options.key->fingerprint, sizeof meta->fingerprint) != 0};
    memcpy(out->name.id, meta->id, sizeof out->name.id);
    memcpy(out->name.owner, meta->owner, sizeof out->name.owner);
    memcpy(out->note, note.note, sizeof out->note);
}

static eng_status open_bytes(const eng_durable *durable, const void *bytes, size_t count, eng_state *out, eng_run **run,
                             eng_error *error) {
    const eng_durable_options *options = &durable->options;
    return eng_state_open(options->pool, options->key, options->vocab, false, bytes, count, out, run, error);
}

static eng_status read_whole(const eng_durable *durable, uint64_t owner, const eng_store_reply *reply,
                             eng_timeline **out, eng_written *has, eng_error *error) {
    eng_state state;
    eng_run *run = NULL;
    eng_status status =
        open_bytes(durable, reply->buffer->bytes, (size_t)reply->meta.payload_bytes, &state, &run, error);
    if (status == ENG_OK)
        status = eng_timeline_bring_in(durable->options.timelines, owner, &state, out, error);
    if (status == ENG_OK)
        *has = (eng_written){.number = (uint64_t)reply->meta.position,
                             .first = state.begin,
                             .state = state.states > 0 ? state.at[state.states - 1] : 0,
                             .bytes = reply->journal_bytes};
    free(run);
    return status;
}

static eng_status read_journal(const eng_durable *durable, const eng_store_reply *reply, eng_timeline *timeline,
                               eng_written *has, eng_error *error) {
    eng_status status = ENG_OK;
    eng_store_entry entry;
    for (size_t at = 0; status == ENG_OK && eng_store_next_entry(reply, &at, &entry);) {
        eng_state state;
        eng_run *run = NULL;
        status = open_bytes(durable, entry.bytes, entry.length, &state, &run, error);
        if (status == ENG_OK)
            status = eng_timeline_go_on(timeline, &state, error);
        free(run);
        if (status != ENG_OK)
            break;
        if (state.begin < has->state)
            has->state = has->first;
    }
    return status;
}

static eng_status build(eng_durable *durable, const eng_name *name, uint64_t owner, const eng_store_reply *reply,
                        eng_named **out, eng_error *error) {
    eng_timeline *timeline = NULL;
    eng_written has = {0};
    eng_status status = read_whole(durable, owner, reply, &timeline, &has, error);
    if (status != ENG_OK)
        return status;
    timeline->busy = true; // nobody may take it for one to make room with
    status = read_journal(durable, reply, timeline, &has, error);
    if (status == ENG_OK && !(*out = eng_durable_add(durable, name, timeline)))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a name");
    timeline->busy = false;
    if (status != ENG_OK) {
        const eng_status removed = eng_timelines_remove(timeline, NULL);
        (void)removed; // nobody uses it
        return status;
    }
    timeline->low = timeline->read;
    has.changes = timeline->changes;
    (*out)->has = has;
    return ENG_OK;
}

eng_status eng_durable_recover(eng_durable *durable, const eng_name *name, uint64_t owner, const eng_store_reply *reply,
                               eng_named **out, eng_error *error) {
    eng_error reason;
    eng_status status;
    do {
        reason = (eng_error){0};
        status = build(durable, name, owner, reply, out, &reason);
    } while (status == ENG_FULL && eng_durable_evict(durable, NULL));
    if (status != ENG_OK)
        return eng_fail(error, status, "%s", reason.text);
    eng_named *named = *out;
    eng_durable_read_meta(durable, &reply->meta, &named->record);
    named->ttl_ms = named->record.ttl_ms;
    memcpy(named->note, named->record.note, sizeof named->note);
    named->kept = true;
    return ENG_OK;
}

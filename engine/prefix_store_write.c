// SPDX-License-Identifier: Apache-2.0
// Which states go to the store, and when; see prefix_store.h.
//
// What waits names a state, and holds none: one that has left the tree meanwhile is not written.
#include <string.h>

#include "engine/prefix_store_internal.h"

// What the record says beside the state.
typedef struct stored_note {
    uint32_t unconverged;
    unsigned char spare[ENG_STORE_NOTE_BYTES - sizeof(uint32_t)];
} stored_note;

_Static_assert(sizeof(stored_note) == ENG_STORE_NOTE_BYTES, "a note is full");

bool eng_prefix_store_was_unconverged(const eng_store_meta *meta) {
    stored_note note;
    memcpy(&note, meta->note, sizeof note);
    return note.unconverged != 0;
}

static bool waits_already(const eng_prefix_store *all, const unsigned char digest[ENG_DIGEST_BYTES]) {
    for (int i = 0; i < all->writes; i++)
        if (memcmp(all->write[i].digest, digest, ENG_DIGEST_BYTES) == 0)
            return true;
    return false;
}

void eng_prefix_store_note(eng_prefix_store *all, const eng_prefix_user *user, const eng_chain *chain,
                           eng_boundary *boundary) {
    const int64_t now = eng_store_clock();
    if (!all || all->distrusted || chain->read != boundary->read || boundary->read < all->options.least ||
        (boundary->stored_ms && now < boundary->stored_ms + ENG_PREFIX_STORE_FRESH_MS) || now < all->retry_at ||
        all->writes == ENG_PREFIX_STORE_WRITES || waits_already(all, chain->digest))
        return;
    eng_prefix_write *write = &all->write[all->writes];
    *write = (eng_prefix_write){.knobs = *user->knobs, .read = boundary->read, .since = now};
    write->prompt = eng_prompt_create(user->prompt->ids, (size_t)boundary->read);
    if (!write->prompt)
        return;
    memcpy(write->owner, user->owner, sizeof write->owner);
    memcpy(write->digest, chain->digest, sizeof write->digest);
    all->writes++;
}

static void drop_first(eng_prefix_store *all) {
    eng_prompt_release(all->write[0].prompt);
    all->writes--;
    memmove(all->write, all->write + 1, sizeof *all->write * (size_t)all->writes);
}

void eng_prefix_store_drop_writes(eng_prefix_store *all) {
    while (all->writes > 0)
        drop_first(all);
}

static eng_state state_of(const eng_prefix_write *write, const eng_run *run) {
    return (eng_state){.read = write->read,
                       .position = write->read,
                       .run = run,
                       .runs = 1,
                       .ids = write->prompt->ids,
                       .states = 1,
                       .at = {write->read}};
}

// ENG_TOO_LONG: it does not fit.
static eng_status fill(const eng_prefix_store *all, const eng_prefix_write *write, const eng_boundary *boundary,
                       eng_store_buffer *buffer) {
    const eng_prefix_store_options *options = &all->options;
    const eng_run run = {.end = write->read, .kind = KERN_ROW_PROMPT, .knobs = write->knobs};
    const eng_state state = state_of(write, &run);
    const size_t bytes = eng_state_measure(options->pool, &state);
    if (bytes > buffer->capacity)
        return ENG_TOO_LONG;
    eng_status status =
        eng_snapshot_write_out(boundary->snapshot, eng_state_content(options->pool, &state, 0, buffer->bytes), NULL);
    if (status == ENG_OK)
        eng_state_write(options->pool, options->key, &state, buffer->bytes);
    buffer->length = bytes;
    return status;
}

static eng_status put(eng_prefix_store *all, const eng_prefix_write *write, const eng_boundary *boundary,
                      eng_store_buffer *buffer) {
    const stored_note note = {.unconverged = boundary->unconverged};
    eng_store_request request = eng_prefix_store_about(ENG_STORE_PUT, write->owner, write->digest);
    memcpy(request.meta.fingerprint, all->options.key->fingerprint, sizeof request.meta.fingerprint);
    memcpy(request.meta.profile, all->options.key->profile, sizeof request.meta.profile);
    memcpy(request.meta.note, &note, sizeof note);
    request.meta.position = write->read;
    request.ttl_ms = ENG_PREFIX_STORE_LIFE_MS;
    request.buffer = buffer;
    eng_status status = fill(all, write, boundary, buffer);
    return status == ENG_OK ? eng_prefix_store_ask(all, &request) : status;
}

// Whether the first is on its way or has to wait; otherwise it is gone.
static bool write_first(eng_prefix_store *all) {
    const eng_prefix_write *write = &all->write[0];
    const eng_boundary *boundary = eng_prefix_at(all->options.prefix, write->digest);
    eng_store_buffer *buffer = boundary ? eng_store_take_buffer(all->client) : NULL;
    if (boundary && !buffer)
        return true;
    const eng_status status = boundary ? put(all, write, boundary, buffer) : ENG_NOT_FOUND;
    all->writing = status == ENG_OK;
    if (buffer && status != ENG_OK)
        eng_store_return_buffer(all->client, buffer);
    if (status == ENG_OK || status == ENG_FULL)
        return true;
    drop_first(all);
    return false;
}

void eng_prefix_store_write(eng_prefix_store *all, bool quiet) {
    const int64_t now = eng_store_clock();
    while (all->writes > 0 && !all->writing && (quiet || now >= all->write[0].since + ENG_PREFIX_STORE_PATIENCE_MS) &&
           !write_first(all)) {
    }
}

void eng_prefix_store_take_write(eng_prefix_store *all, const eng_store_reply *reply) {
    eng_boundary *boundary = eng_prefix_at(all->options.prefix, all->write[0].digest);
    all->writing = false;
    if (reply->status == ENG_OK && boundary)
        boundary->stored_ms = eng_store_clock();
    all->stored += reply->status == ENG_OK;
    if (reply->status == ENG_FORMAT) // what has its name
        eng_prefix_store_delete(all, all->write[0].owner, all->write[0].digest);
    drop_first(all);
    if (reply->status == ENG_OK || reply->status == ENG_FORMAT)
        return;
    all->retry_at = eng_store_clock() + ENG_PREFIX_STORE_RETRY_MS;
    eng_prefix_store_drop_writes(all);
}

int64_t eng_prefix_store_write_at(const eng_prefix_store *all) {
    return all->writes > 0 && !all->writing ? all->write[0].since + ENG_PREFIX_STORE_PATIENCE_MS : INT64_MAX;
}

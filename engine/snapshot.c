// SPDX-License-Identifier: Apache-2.0
// States at rest and where they lie; see snapshot.h.
//
// Transfers run in the stream's order, after the steps that were started before and before those that come: a block of
// host memory may be taken again at once, as the device reads it before anything new is sent there. The host's own
// reading and writing waits for the stream, and a state that goes back for its way out, which is long over as a rule.
// Free blocks are listed beside them, never inside, for the same reason.
#include "engine/snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"

// Host blocks of one size.
typedef struct block_pool {
    size_t bytes;
    void **free;
    int64_t count, made, capacity; // free ones, all that were made
} block_pool;

struct eng_snapshots {
    eng_pool *pool;
    kern_device *device;
    kern_stream *stream;
    kern_event *moved;   // behind the last transfer to the host
    uint64_t sent, done; // transfers to the host: asked for, known to be over
    block_pool slots, pages;
    eng_snapshot *head, *tail;
    eng_snapshot_sums sums;
};

// ------------------------------------------------------------------------------------------------------------- blocks

static void *take_block(eng_snapshots *all, block_pool *blocks) {
    if (blocks->count > 0)
        return blocks->free[--blocks->count];
    void *block = NULL;
    if (blocks->made == blocks->capacity) { // room to give every one back
        int64_t capacity = blocks->capacity ? 2 * blocks->capacity : 16;
        void **grown = reallocarray(blocks->free, (size_t)capacity, sizeof *grown);
        if (!grown)
            return NULL;
        blocks->free = grown;
        blocks->capacity = capacity;
    }
    if (kern_alloc_host(all->device, blocks->bytes, &block))
        return NULL;
    blocks->made++;
    return block;
}

static void give_block(block_pool *blocks, void *block) {
    if (block)
        blocks->free[blocks->count++] = block;
}

static void free_blocks(const eng_snapshots *all, block_pool *blocks) {
    while (blocks->count > 0)
        kern_free_host(all->device, blocks->free[--blocks->count]);
    free(blocks->free);
}

static int64_t pages_of(const eng_snapshots *all, int64_t read) {
    return eng_pool_pages_for(all->pool, read);
}

static void give_host(eng_snapshots *all, eng_snapshot *snapshot) {
    give_block(&all->slots, snapshot->slot);
    for (int64_t i = 0; snapshot->page && i < pages_of(all, snapshot->read); i++)
        give_block(&all->pages, snapshot->page[i]);
    free(snapshot->page);
    snapshot->slot = NULL;
    snapshot->page = NULL;
}

static bool take_host(eng_snapshots *all, eng_snapshot *snapshot) {
    const int64_t pages = pages_of(all, snapshot->read);
    bool done = true;
    if (all->slots.bytes)
        done = (snapshot->slot = take_block(all, &all->slots)) != NULL;
    if (pages > 0)
        done = done && (snapshot->page = calloc((size_t)pages, sizeof *snapshot->page)) != NULL;
    for (int64_t i = 0; done && i < pages; i++)
        done = (snapshot->page[i] = take_block(all, &all->pages)) != NULL;
    if (!done)
        give_host(all, snapshot);
    return done;
}

// --------------------------------------------------------------------------------------------------------------- life

eng_status eng_snapshots_create(eng_pool *pool, kern_device *device, kern_stream *stream, eng_snapshots **out,
                                eng_error *error) {
    eng_snapshots *all = calloc(1, sizeof *all);
    if (!all)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for states at rest");
    *all = (eng_snapshots){.pool = pool,
                           .device = device,
                           .stream = stream,
                           .slots = {.bytes = eng_pool_slot_stride(pool)},
                           .pages = {.bytes = eng_pool_page_stride(pool)}};
    const kern_status made = kern_event_create(device, &all->moved);
    if (made) {
        free(all);
        return eng_fail_kernel(error, made, "making an event");
    }
    *out = all;
    return ENG_OK;
}

void eng_snapshots_free(eng_snapshots *all) {
    if (!all)
        return;
    kern_status idle = kern_synchronize(all->stream); // a lost device does nothing any more
    (void)idle;
    free_blocks(all, &all->slots);
    free_blocks(all, &all->pages);
    kern_event_free(all->moved);
    free(all);
}

eng_pool *eng_snapshots_pool(const eng_snapshots *all) {
    return all->pool;
}

eng_snapshot *eng_snapshots_oldest(const eng_snapshots *all) {
    return all->head;
}

uint64_t eng_snapshot_bytes(const eng_snapshots *all, int64_t read) {
    return eng_pool_slot_stride(all->pool) + (uint64_t)pages_of(all, read) * eng_pool_page_stride(all->pool);
}

static void link_newest(eng_snapshots *all, eng_snapshot *snapshot) {
    snapshot->previous = all->tail;
    snapshot->next = NULL;
    *(all->tail ? &all->tail->next : &all->head) = snapshot;
    all->tail = snapshot;
}

static void unlink_snapshot(eng_snapshots *all, eng_snapshot *snapshot) {
    *(snapshot->previous ? &snapshot->previous->next : &all->head) = snapshot->next;
    *(snapshot->next ? &snapshot->next->previous : &all->tail) = snapshot->previous;
}

static eng_snapshot *make(eng_snapshots *all, int64_t read) {
    eng_snapshot *snapshot = calloc(1, sizeof *snapshot);
    if (snapshot)
        *snapshot = (eng_snapshot){.all = all, .references = 1, .read = read};
    return snapshot;
}

static eng_snapshot *enter(eng_snapshots *all, eng_snapshot *snapshot) {
    link_newest(all, snapshot);
    all->sums.bytes += eng_snapshot_bytes(all, snapshot->read);
    if (snapshot->session.pool)
        all->sums.device++;
    else
        all->sums.host++;
    return snapshot;
}

static void leave_device(eng_snapshots *all, eng_snapshot *snapshot) {
    all->sums.device--;
    eng_session_close(&snapshot->session);
}

eng_snapshot *eng_snapshot_keep(eng_snapshots *all, eng_session *session) {
    eng_snapshot *snapshot = eng_session_settle(session, NULL) == ENG_OK ? make(all, session->read) : NULL;
    if (!snapshot)
        return NULL;
    eng_session_rest(session);
    snapshot->session = *session;
    *session = (eng_session){.slot = -1};
    return enter(all, snapshot);
}

void eng_snapshot_retain(eng_snapshot *snapshot) {
    snapshot->references++;
}

void eng_snapshot_release(eng_snapshot *snapshot) {
    if (!snapshot || --snapshot->references > 0)
        return;
    eng_snapshots *all = snapshot->all;
    unlink_snapshot(all, snapshot);
    all->sums.bytes -= eng_snapshot_bytes(all, snapshot->read);
    if (snapshot->session.pool)
        leave_device(all, snapshot);
    else
        all->sums.host--;
    give_host(all, snapshot);
    free(snapshot);
}

// ---------------------------------------------------------------------------------------------------------- transfers

static kern_status download(const eng_snapshots *all, const eng_session *session, void *slot, void *const *page) {
    const int64_t pages = pages_of(all, session->read);
    kern_status status = KERN_OK;
    if (slot)
        status = kern_download(all->stream, slot, eng_pool_slot(all->pool, session->slot), all->slots.bytes);
    for (int64_t i = 0; status == KERN_OK && i < pages; i++)
        status = kern_download(all->stream, page[i], eng_pool_page(all->pool, session->page[i]), all->pages.bytes);
    return status;
}

// To the snapshot's own blocks.
static kern_status send_out(eng_snapshots *all, const eng_session *session, eng_snapshot *snapshot) {
    kern_status status = download(all, session, snapshot->slot, snapshot->page);
    if (status == KERN_OK)
        status = kern_event_record(all->stream, all->moved);
    snapshot->sent = ++all->sent;
    return status;
}

// Until it lies on the host whole: what sends it back may read it before the stream comes to that.
static kern_status wait_for(eng_snapshots *all, const eng_snapshot *snapshot) {
    if (snapshot->sent <= all->done)
        return KERN_OK;
    const kern_status status = kern_event_wait(all->moved);
    if (status == KERN_OK)
        all->done = all->sent;
    return status;
}

static kern_status upload(const eng_snapshots *all, const eng_snapshot *snapshot, const eng_session *session) {
    kern_status status = KERN_OK;
    if (snapshot->slot)
        status = kern_upload(all->stream, eng_pool_slot(all->pool, session->slot), snapshot->slot, all->slots.bytes);
    for (int32_t i = 0; status == KERN_OK && i < session->pages; i++)
        status =
            kern_upload(all->stream, eng_pool_page(all->pool, session->page[i]), snapshot->page[i], all->pages.bytes);
    return status;
}

eng_snapshot *eng_snapshot_copy(eng_snapshots *all, const eng_session *session) {
    eng_snapshot *snapshot = eng_session_settle(session, NULL) == ENG_OK ? make(all, session->read) : NULL;
    if (!snapshot)
        return NULL;
    if (take_host(all, snapshot) && send_out(all, session, snapshot) == KERN_OK)
        return enter(all, snapshot);
    give_host(all, snapshot);
    free(snapshot);
    return NULL;
}

bool eng_snapshots_spill(eng_snapshots *all) {
    eng_snapshot *snapshot = all->head;
    while (snapshot && !snapshot->session.pool)
        snapshot = snapshot->next;
    if (!snapshot || !take_host(all, snapshot))
        return false;
    if (send_out(all, &snapshot->session, snapshot)) {
        give_host(all, snapshot);
        return false;
    }
    leave_device(all, snapshot);
    all->sums.host++;
    return true;
}

static eng_status open_from_host(eng_snapshot *snapshot, int64_t max_length, eng_session *out, eng_error *error) {
    eng_snapshots *all = snapshot->all;
    eng_session session = {0};
    eng_status status = eng_session_open(all->pool, all->stream, max_length, &session, error);
    if (status != ENG_OK)
        return status;
    status = eng_session_grow(&session, all->stream, snapshot->read, error);
    kern_status sent = status == ENG_OK ? wait_for(all, snapshot) : KERN_OK;
    if (status == ENG_OK && sent == KERN_OK)
        sent = upload(all, snapshot, &session);
    if (sent)
        status = eng_fail_kernel(error, sent, "bringing a state back");
    if (status != ENG_OK) {
        eng_session_close(&session);
        return status;
    }
    session.read = snapshot->read;
    *out = session;
    return ENG_OK;
}

eng_status eng_snapshot_open(eng_snapshot *snapshot, int64_t max_length, eng_session *out, eng_error *error) {
    eng_snapshots *all = snapshot->all;
    eng_status status = snapshot->session.pool
                            ? eng_session_fork(&snapshot->session, all->stream, max_length, out, error)
                            : open_from_host(snapshot, max_length, out, error);
    if (status != ENG_OK)
        return status;
    out->tail_count = 0;
    unlink_snapshot(all, snapshot);
    link_newest(all, snapshot);
    return ENG_OK;
}

// The parts of a copy that lies in one piece.
static void **parts_of(const eng_snapshots *all, int64_t read, void *bytes) {
    const int64_t pages = pages_of(all, read);
    void **page = malloc(sizeof *page * ((size_t)pages + 1));
    for (int64_t i = 0; page && i < pages; i++)
        page[i] = (char *)bytes + all->slots.bytes + (size_t)i * all->pages.bytes;
    return page;
}

static void copy_out(const eng_snapshot *snapshot, void *slot, void *const *page) {
    const eng_snapshots *all = snapshot->all;
    if (snapshot->slot)
        memcpy(slot, snapshot->slot, all->slots.bytes);
    for (int64_t i = 0; i < pages_of(all, snapshot->read); i++)
        memcpy(page[i], snapshot->page[i], all->pages.bytes);
}

eng_status eng_snapshot_write_out(const eng_snapshot *snapshot, void *out, eng_error *error) {
    const eng_snapshots *all = snapshot->all;
    void **page = parts_of(all, snapshot->read, out);
    if (!page)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a copy of a state");
    kern_status status = KERN_OK;
    if (snapshot->session.pool)
        status = download(all, &snapshot->session, all->slots.bytes ? out : NULL, page);
    if (status == KERN_OK)
        status = kern_synchronize(all->stream);
    if (status == KERN_OK && !snapshot->session.pool)
        copy_out(snapshot, out, page);
    free(page);
    return status ? eng_fail_kernel(error, status, "copying a state out") : ENG_OK;
}

eng_status eng_snapshot_compare(const eng_snapshot *a, const eng_snapshot *b, bool *equal, eng_error *error) {
    const size_t bytes = eng_snapshot_bytes(a->all, a->read);
    char *copy = malloc(2 * bytes + 1);
    if (!copy)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for two copies of a state");
    eng_status status = eng_snapshot_write_out(a, copy, error);
    if (status == ENG_OK)
        status = eng_snapshot_write_out(b, copy + bytes, error);
    if (status == ENG_OK)
        *equal = a->read == b->read && memcmp(copy, copy + bytes, bytes) == 0;
    free(copy);
    return status;
}

eng_snapshot *eng_snapshot_read_in(eng_snapshots *all, int64_t read, const void *bytes) {
    eng_snapshot *snapshot = make(all, read);
    if (!snapshot)
        return NULL;
    if (!take_host(all, snapshot) || kern_synchronize(all->stream)) {
        give_host(all, snapshot);
        free(snapshot);
        return NULL;
    }
    const char *from = bytes;
    if (snapshot->slot)
        memcpy(snapshot->slot, from, all->slots.bytes);
    for (int64_t i = 0; i < pages_of(all, read); i++)
        memcpy(snapshot->page[i], from + all->slots.bytes + (size_t)i * all->pages.bytes, all->pages.bytes);
    return enter(all, snapshot);
}

void eng_snapshots_sum(const eng_snapshots *all, eng_snapshot_sums *out) {
    *out = all->sums;
}

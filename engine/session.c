// SPDX-License-Identifier: Apache-2.0
// The pools of state slots and KV pages, and the sessions that borrow from them.
//
// Two device allocations for the life of the pool, two stacks of free indices on the host. Admission is by promise: a
// session's worst case of pages is counted when it opens, while the pages themselves are taken as it grows, so a
// session that was let in is never refused a page. Slots and pages are zeroed when they are taken: what the last owner
// left in them, its infinities included, reaches nobody. Everything here belongs to the engine's thread.
#include "engine/session.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"

struct eng_pool {
    kern_device *device;
    void *states, *pages;
    size_t slot_stride, slot_pitch, page_stride;
    kern_storage storage;
    int32_t slots, page_count;
    int32_t *free_slot, *free_page; // stacks
    int32_t free_slots, free_pages;
    int32_t *references;  // (page_count) sessions that hold the page
    int32_t promised;     // pages that open sessions may still take
    eng_pending *pending; // (slots); NULL: none
    eng_settle_fn settle;
    void *settle_context;
};

static size_t align64(size_t bytes) {
    return (bytes + 63) & ~(size_t)63;
}

// The stack 0, 1, 2 ... from the top.
static int32_t *full_stack(int32_t count) {
    int32_t *stack = malloc(sizeof *stack * ((size_t)count + 1));
    for (int32_t i = 0; stack && i < count; i++)
        stack[i] = count - 1 - i;
    return stack;
}

static eng_pending *nothing_waits(int32_t slots) {
    eng_pending *pending = calloc((size_t)slots, sizeof *pending);
    for (int32_t i = 0; pending && i < slots; i++)
        pending[i] = (eng_pending){.fresh = true, .life = 1};
    return pending;
}

static eng_status allocate(eng_pool *pool, const char *what, int32_t count, size_t stride, void **out,
                           eng_error *error) {
    if (count == 0 || stride == 0)
        return ENG_OK;
    if (stride > SIZE_MAX / (size_t)count)
        return eng_fail(error, ENG_NO_MEMORY, "%" PRId32 " %s of %zu bytes exceed the address space", count, what,
                        stride);
    size_t bytes = stride * (size_t)count;
    kern_status status = kern_alloc(pool->device, bytes, out);
    if (status == KERN_NO_MEMORY)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for %" PRId32 " %s of %zu bytes", count, what, stride);
    return status ? eng_fail_kernel(error, status, what) : ENG_OK;
}

eng_status eng_pool_create(const eng_model *model, kern_device *device, int32_t slots, int32_t pages, eng_pool **out,
                           eng_error *error) {
    if (slots < 1 || pages < 0)
        return eng_fail(error, ENG_INVALID, "a pool needs at least one state slot and no negative number of pages");
    eng_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the pool");
    pool->device = device;
    pool->storage = model->state_storage;
    pool->slot_stride = align64(model->state_bytes);
    pool->slot_pitch = pool->slot_stride + model->waiting_bytes;
    pool->page_stride = align64(model->page_bytes);
    pool->slots = pool->free_slots = slots;
    pool->page_count = pool->free_pages = pool->page_stride ? pages : 0;
    pool->free_slot = full_stack(slots);
    pool->free_page = full_stack(pool->page_count);
    pool->references = calloc((size_t)pool->page_count + 1, sizeof *pool->references);
    if (model->waiting_bytes > 0)
        pool->pending = nothing_waits(slots);
    eng_status status = ENG_OK;
    if (!pool->free_slot || !pool->free_page || !pool->references || (model->waiting_bytes > 0 && !pool->pending))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for the pool's lists");
    if (status == ENG_OK)
        status = allocate(pool, "state slots", slots, pool->slot_pitch, &pool->states, error);
    if (status == ENG_OK)
        status = allocate(pool, "KV pages", pool->page_count, pool->page_stride, &pool->pages, error);
    if (status != ENG_OK) {
        eng_pool_free(pool);
        return status;
    }
    *out = pool;
    return ENG_OK;
}

void eng_pool_free(eng_pool *pool) {
    if (!pool)
        return;
    kern_free(pool->device, pool->states);
    kern_free(pool->device, pool->pages);
    free(pool->pending);
    free(pool->free_slot);
    free(pool->free_page);
    free(pool->references);
    free(pool);
}

void eng_pool_set_settler(eng_pool *pool, eng_settle_fn settle, void *context) {
    pool->settle = settle;
    pool->settle_context = context;
}

eng_pending *eng_pool_pending(const eng_pool *pool, int32_t slot) {
    return pool->pending ? &pool->pending[slot] : NULL;
}

bool eng_session_waits(const eng_session *session) {
    return session->pool && session->pool->pending && session->pool->pending[session->slot].total > 0;
}

eng_status eng_session_settle(const eng_session *session, eng_error *error) {
    const eng_pool *pool = session->pool;
    if (!eng_session_waits(session))
        return ENG_OK;
    return pool->settle ? pool->settle(pool->settle_context, session, error)
                        : eng_fail(error, ENG_INTERNAL, "nobody can take a session's tokens through their loops");
}

void *eng_pool_states(const eng_pool *pool) {
    return pool->states;
}

void *eng_pool_pages(const eng_pool *pool) {
    return pool->pages;
}

void *eng_pool_slot(const eng_pool *pool, int32_t slot) {
    return (char *)pool->states + (size_t)slot * pool->slot_pitch;
}

void *eng_pool_page(const eng_pool *pool, int32_t page) {
    return (char *)pool->pages + (size_t)page * pool->page_stride;
}

kern_storage eng_pool_storage(const eng_pool *pool) {
    return pool->storage;
}

size_t eng_pool_slot_stride(const eng_pool *pool) {
    return pool->slot_stride;
}

size_t eng_pool_slot_pitch(const eng_pool *pool) {
    return pool->slot_pitch;
}

size_t eng_pool_page_stride(const eng_pool *pool) {
    return pool->page_stride;
}

int32_t eng_pool_slots(const eng_pool *pool, int32_t *used) {
    if (used)
        *used = pool->slots - pool->free_slots;
    return pool->slots;
}

int32_t eng_pool_page_count(const eng_pool *pool, int32_t *used) {
    if (used)
        *used = pool->page_count - pool->free_pages + pool->promised;
    return pool->page_count;
}

int64_t eng_pool_pages_for(const eng_pool *pool, int64_t length) {
    return pool->page_stride ? length / KERN_PAGE_TOKENS + (length % KERN_PAGE_TOKENS != 0) : 0;
}

// ---------------------------------------------------------------------------------------------------------- sessions

eng_status eng_pool_check_length(const eng_pool *pool, int64_t max_length, eng_error *error) {
    int64_t pages = eng_pool_pages_for(pool, max_length);
    if (pages <= pool->page_count)
        return ENG_OK;
    return eng_fail(error, ENG_TOO_LONG, "%" PRId64 " tokens need %.0f bytes of KV pages; the pool has %.0f",
                    max_length, (double)pages * (double)pool->page_stride,
                    (double)pool->page_count * (double)pool->page_stride);
}

// A slot and a promise of pages beside `shared` ones that others hold already; the slot's content is the caller's.
static eng_status reserve(eng_pool *pool, int64_t max_length, int32_t shared, eng_session *out, eng_error *error) {
    if (max_length < 1)
        return eng_fail(error, ENG_INVALID, "a session needs room for at least one token");
    eng_status fits = eng_pool_check_length(pool, max_length, error);
    if (fits != ENG_OK)
        return fits;
    int32_t pages = (int32_t)eng_pool_pages_for(pool, max_length);
    if (pool->free_slots == 0)
        return eng_fail(error, ENG_FULL, "all %" PRId32 " state slots are in use", pool->slots);
    if (pages - shared > pool->free_pages - pool->promised)
        return eng_fail(error, ENG_FULL, "%" PRId32 " KV pages are needed, %" PRId32 " are free", pages - shared,
                        pool->free_pages - pool->promised);
    int32_t *page = pages ? malloc(sizeof *page * (size_t)pages) : NULL;
    if (pages && !page)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a page table");
    pool->promised += pages - shared;
    *out =
        (eng_session){.pool = pool, .slot = pool->free_slot[--pool->free_slots], .page = page, .page_capacity = pages};
    return ENG_OK;
}

static void take_page(eng_session *session) {
    eng_pool *pool = session->pool;
    int32_t page = pool->free_page[--pool->free_pages];
    pool->promised--;
    pool->references[page] = 1;
    session->page[session->pages++] = page;
}

eng_status eng_session_open(eng_pool *pool, kern_stream *stream, int64_t max_length, eng_session *out,
                            eng_error *error) {
    eng_session session = {0};
    eng_status status = reserve(pool, max_length, 0, &session, error);
    if (status != ENG_OK)
        return status;
    kern_status cleared =
        pool->slot_stride ? kern_zero(stream, eng_pool_slot(pool, session.slot), pool->slot_stride) : KERN_OK;
    if (cleared) {
        eng_session_close(&session);
        return eng_fail_kernel(error, cleared, "clearing a state slot");
    }
    *out = session;
    return ENG_OK;
}

static kern_status copy_state(const eng_session *from, kern_stream *stream, eng_session *to) {
    eng_pool *pool = from->pool;
    kern_status status = KERN_OK;
    if (pool->slot_stride)
        status = kern_copy(stream, eng_pool_slot(pool, to->slot), eng_pool_slot(pool, from->slot), pool->slot_stride);
    if (status || !pool->page_stride || from->read % KERN_PAGE_TOKENS == 0)
        return status;
    take_page(to);
    return kern_copy(stream, eng_pool_page(pool, to->page[to->pages - 1]),
                     eng_pool_page(pool, from->page[to->pages - 1]), pool->page_stride);
}

eng_status eng_session_fork(const eng_session *from, kern_stream *stream, int64_t max_length, eng_session *out,
                            eng_error *error) {
    eng_pool *pool = from->pool;
    eng_session session = {0};
    if (max_length < from->read)
        return eng_fail(error, ENG_INVALID, "a fork needs room for the %" PRId64 " tokens that were read", from->read);
    int32_t shared = pool->page_stride ? (int32_t)(from->read / KERN_PAGE_TOKENS) : 0;
    eng_status status = eng_session_settle(from, error);
    if (status == ENG_OK)
        status = reserve(pool, max_length, shared, &session, error);
    if (status != ENG_OK)
        return status;
    session.read = from->read;
    session.tail[0] = from->tail[0];
    session.tail_count = from->tail_count;
    for (; session.pages < shared; session.pages++) {
        session.page[session.pages] = from->page[session.pages];
        pool->references[session.page[session.pages]]++;
    }
    kern_status copied = copy_state(from, stream, &session);
    if (copied) {
        eng_session_close(&session);
        return eng_fail_kernel(error, copied, "copying a state");
    }
    *out = session;
    return ENG_OK;
}

eng_status eng_session_grow(eng_session *session, kern_stream *stream, int64_t length, eng_error *error) {
    eng_pool *pool = session->pool;
    int64_t wanted = eng_pool_pages_for(pool, length);
    if (wanted > session->page_capacity)
        return eng_fail(error, ENG_TOO_LONG, "%" PRId64 " tokens exceed the %" PRId32 " pages reserved for the session",
                        length, session->page_capacity);
    while (session->pages < wanted) {
        int32_t page = pool->free_page[pool->free_pages - 1];
        kern_status status = kern_zero(stream, eng_pool_page(pool, page), pool->page_stride);
        if (status)
            return eng_fail_kernel(error, status, "clearing a KV page");
        take_page(session);
    }
    return ENG_OK;
}

void eng_session_rest(eng_session *session) {
    session->pool->promised -= session->page_capacity - session->pages;
    session->page_capacity = session->pages;
}

void eng_session_close(eng_session *session) {
    eng_pool *pool = session->pool;
    if (!pool)
        return;
    if (pool->pending) // and what waits goes with it
        pool->pending[session->slot] = (eng_pending){.fresh = true, .life = pool->pending[session->slot].life + 1};
    for (int32_t i = 0; i < session->pages; i++)
        if (--pool->references[session->page[i]] == 0)
            pool->free_page[pool->free_pages++] = session->page[i];
    pool->promised -= session->page_capacity - session->pages;
    pool->free_slot[pool->free_slots++] = session->slot;
    free(session->page);
    *session = (eng_session){.slot = -1};
}

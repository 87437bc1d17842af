// SPDX-License-Identifier: Apache-2.0
// Leases in a sorted array; see store_lease.h.
//
// Found by halving, kept in order by moving what stands behind: the array holds one entry a session that is at work, so
// moving costs less than a sync by far.
#include "engine/store_lease.h"

#include <stdlib.h>
#include <string.h>

typedef struct lease {
    unsigned char id[ENG_STORE_ID_BYTES], holder[ENG_STORE_HOLDER_BYTES];
    unsigned char wisher[ENG_STORE_OWNER_BYTES]; // the owner for whom another wants it
    uint64_t epoch;
    int64_t until, wished; // when it was wished for; 0: not since the holder was told
} lease;

struct eng_store_leases {
    lease *lease;
    size_t count, capacity;
    uint64_t epoch; // the last one given
};

static const int64_t day_ms = 86400000;

eng_store_leases *eng_store_leases_create(void) {
    return calloc(1, sizeof(eng_store_leases));
}

void eng_store_leases_free(eng_store_leases *leases) {
    if (!leases)
        return;
    free(leases->lease);
    free(leases);
}

// Where the id stands, or belongs.
static size_t place_of(const eng_store_leases *leases, const unsigned char *id) {
    size_t low = 0, high = leases->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memcmp(leases->lease[middle].id, id, ENG_STORE_ID_BYTES) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static lease *find(const eng_store_leases *leases, const unsigned char *id) {
    size_t at = place_of(leases, id);
    return at < leases->count && memcmp(leases->lease[at].id, id, ENG_STORE_ID_BYTES) == 0 ? &leases->lease[at] : NULL;
}

static lease *insert(eng_store_leases *leases, const unsigned char *id) {
    size_t at = place_of(leases, id);
    if (leases->count == leases->capacity) {
        size_t capacity = leases->capacity ? leases->capacity * 2 : 64;
        lease *grown = realloc(leases->lease, sizeof *grown * capacity);
        if (!grown)
            return NULL;
        leases->lease = grown;
        leases->capacity = capacity;
    }
    memmove(leases->lease + at + 1, leases->lease + at, sizeof(lease) * (leases->count++ - at));
    leases->lease[at] = (lease){0};
    memcpy(leases->lease[at].id, id, ENG_STORE_ID_BYTES);
    return &leases->lease[at];
}

eng_status eng_store_lease_take(eng_store_leases *leases, const eng_store_request *request, int64_t now,
                                eng_store_reply *reply) {
    const unsigned char *id = request->meta.id;
    lease *held = find(leases, id);
    if (request->epoch && (!held || held->epoch != request->epoch))
        return eng_fail(&reply->error, ENG_CONFLICT, "another has taken the session's lease since");
    if (!request->epoch && held && held->until > now &&
        memcmp(held->holder, request->holder, sizeof held->holder) != 0) {
        reply->lease_ms = held->until - now;
        held->wished = now;
        memcpy(held->wisher, request->meta.owner, sizeof held->wisher);
        return eng_fail(&reply->error, ENG_BUSY, "another holds the session's lease");
    }
    if (!held)
        held = insert(leases, id);
    if (!held)
        return eng_fail(&reply->error, ENG_NO_MEMORY, "out of memory for a lease");
    if (!request->epoch) {
        held->wished = 0;
        held->epoch = ++leases->epoch;
        memcpy(held->holder, request->holder, sizeof held->holder);
    }
    held->until = now + request->ttl_ms;
    reply->epoch = held->epoch;
    reply->lease_ms = request->ttl_ms;
    return ENG_OK;
}

eng_status eng_store_lease_wishes(eng_store_leases *leases, const eng_store_request *request, int64_t now,
                                  eng_store_reply *reply) {
    eng_status status = ENG_OK;
    for (size_t i = 0; i < leases->count && reply->count < ENG_STORE_PAGE && status == ENG_OK; i++) {
        lease *held = &leases->lease[i];
        if (!held->wished || memcmp(held->holder, request->holder, sizeof held->holder) != 0)
            continue;
        if (now - held->wished < ENG_STORE_WISH_MS)
            status = eng_store_list_wish(reply, held->id, held->wisher, &reply->error);
        held->wished = 0;
    }
    return status;
}

void eng_store_lease_end(eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES]) {
    lease *held = find(leases, id);
    if (!held)
        return;
    size_t at = (size_t)(held - leases->lease);
    memmove(held, held + 1, sizeof *held * (--leases->count - at));
}

void eng_store_lease_release(eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES], uint64_t epoch) {
    if (eng_store_lease_holds(leases, id, epoch))
        eng_store_lease_end(leases, id);
}

bool eng_store_lease_holds(const eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES], uint64_t epoch) {
    const lease *held = find(leases, id);
    return held && held->epoch == epoch;
}

bool eng_store_lease_lives(const eng_store_leases *leases, const unsigned char id[ENG_STORE_ID_BYTES], int64_t now) {
    const lease *held = find(leases, id);
    return held && held->until > now;
}

void eng_store_lease_sweep(eng_store_leases *leases, int64_t now) {
    size_t kept = 0;
    for (size_t i = 0; i < leases->count; i++)
        if (leases->lease[i].until > now - day_ms)
            leases->lease[kept++] = leases->lease[i];
    leases->count = kept;
}

// SPDX-License-Identifier: Apache-2.0
// The table of names, the clock that looks at them, and what the scheduler asks; see durable.h.
//
// All names are looked at a few times a second, which is often enough for leases and idle states; what a request waits
// for is done at once. A name whose timeline has left is out of the table, and its memory goes with the last reply.
#include "engine/durable_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "engine/forward.h"
#include "engine/hash.h"
#include "engine/store_internal.h"
#include "engine/timeline_internal.h"

enum { REQUESTS = 256, BUFFERS = 2, RUN_BYTES = 8 << 20, PAGE_BYTES = 256 << 20 };

// ------------------------------------------------------------------------------------------------------- create, free

// Room for the ids of a history, two states, and the journal behind them; of pages, what a long context takes.
static uint64_t buffer_bytes(const eng_durable_options *options) {
    const eng_timelines_options *timelines = eng_timelines_read_options(options->timelines);
    const uint64_t slot = eng_pool_slot_stride(options->pool), page = eng_pool_page_stride(options->pool);
    const int64_t context = timelines->context_length;
    uint64_t pages = context > 0 ? (uint64_t)eng_pool_pages_for(options->pool, context) * page : 0;
    pages = pages < PAGE_BYTES ? pages : PAGE_BYTES;
    const uint64_t ids = 2 * sizeof(int32_t) * (uint64_t)(timelines->history > context ? timelines->history : context);
    return (2 * slot + pages + ids + RUN_BYTES + ENG_STORE_JOURNAL_BYTES + 4095) / 4096 * 4096;
}

static eng_status open_client(eng_durable *durable, eng_error *error) {
    const eng_durable_options *options = &durable->options;
    durable->buffer_bytes = buffer_bytes(options);
    if (kern_device_describe(options->device)->asynchronous) {
        const kern_status status = kern_alloc_host(options->device, BUFFERS * durable->buffer_bytes, &durable->memory);
        if (status)
            return eng_fail_kernel(error, status, "staging buffers for a store");
    }
    const eng_store_client_options client = {.requests = REQUESTS,
                                             .buffers = BUFFERS,
                                             .buffer_bytes = durable->buffer_bytes,
                                             .memory = durable->memory,
                                             .notify = options->wake,
                                             .notify_context = options->wake_context};
    return eng_store_client_open(options->store, &client, &durable->client, error);
}

static eng_status draw_holder(eng_durable *durable, eng_error *error) {
    ssize_t drawn;
    do
        drawn = getrandom(durable->holder, sizeof durable->holder, 0);
    while (drawn < 0 && errno == EINTR);
    return drawn == (ssize_t)sizeof durable->holder ? ENG_OK : eng_fail(error, ENG_IO, "no random numbers");
}

static void take_wishes(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply);

eng_status eng_durable_create(const eng_durable_options *options, eng_durable **out, eng_error *error) {
    if (options->lease_ms < 0 || options->lease_ms > INT32_MAX)
        return eng_fail(error, ENG_INVALID, "lease_ms is %lld; its range is 1 to %d, or 0 for the default",
                        (long long)options->lease_ms, INT32_MAX);
    eng_durable *durable = calloc(1, sizeof *durable);
    if (!durable)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for names");
    durable->options = *options;
    durable->options.lease_ms = options->lease_ms ? options->lease_ms : ENG_DURABLE_LEASE_MS;
    durable->wait_ms = ENG_DURABLE_WAIT_MS;
    durable->last_task = &durable->tasks;
    durable->wishes = (eng_waiter){.take = take_wishes, .of = durable};
    durable->due = INT64_MAX;
    eng_status status = draw_holder(durable, error);
    if (status == ENG_OK)
        status = open_client(durable, error);
    if (status != ENG_OK) {
        eng_durable_free(durable);
        return status;
    }
    *out = durable;
    return ENG_OK;
}

static bool take_replies(eng_durable *durable) {
    bool any = false;
    for (eng_store_reply *reply; (reply = eng_store_poll(durable->client)) != NULL; any = true) {
        eng_waiter *waiter = reply->user;
        durable->underway--;
        if (waiter) {
            waiter->waiting = false;
            waiter->take(durable, waiter, reply);
        }
        eng_store_done(durable->client, reply);
    }
    return any;
}

static void wait_for_replies(eng_durable *durable) {
    const struct timespec moment = {.tv_nsec = 200000};
    if (!take_replies(durable))
        nanosleep(&moment, NULL);
}

static void give_back(eng_durable *durable, eng_named *named) {
    eng_store_request request = eng_durable_about(&named->name, ENG_STORE_RELEASE);
    request.epoch = named->epoch;
    while (request.epoch && !named->lost && eng_durable_ask(durable, &request, NULL, NULL) == ENG_FULL)
        wait_for_replies(durable);
}

void eng_durable_free(eng_durable *durable) {
    if (!durable)
        return;
    if (durable->client) {
        while (durable->first) {
            give_back(durable, durable->first);
            eng_durable_detach(durable, durable->first);
        }
        eng_durable_abandon_tasks(durable);
        while (durable->underway > 0)
            wait_for_replies(durable);
        eng_durable_free_tasks(durable);
    }
    eng_store_client_close(durable->client);
    kern_free_host(durable->options.device, durable->memory);
    free(durable);
}

// ----------------------------------------------------------------------------------------------------------- requests

eng_store_request eng_durable_about(const eng_name *name, eng_store_op op) {
    eng_store_request request = {.op = op, .meta = {.kind = ENG_STORE_SESSION}};
    memcpy(request.meta.id, name->id, sizeof request.meta.id);
    memcpy(request.meta.owner, name->owner, sizeof request.meta.owner);
    return request;
}

eng_status eng_durable_ask(eng_durable *durable, eng_store_request *request, eng_waiter *waiter, eng_error *error) {
    request->user = waiter;
    memcpy(request->holder, durable->holder, sizeof request->holder);
    eng_status status = eng_store_submit(durable->client, request, error);
    durable->starved |= status == ENG_FULL;
    if (status != ENG_OK)
        return status;
    durable->underway++;
    if (waiter)
        waiter->waiting = true;
    return ENG_OK;
}

// -------------------------------------------------------------------------------------------------------------- names

static size_t bucket_of(const eng_name *name) {
    return eng_hash_bytes((const char *)name->id, sizeof name->id) % ENG_DURABLE_BUCKETS;
}

eng_named *eng_durable_find(const eng_durable *durable, const eng_name *name) {
    eng_named *named = durable->bucket[bucket_of(name)];
    while (named && memcmp(&named->name, name, sizeof *name) != 0)
        named = named->next_of_bucket;
    return named;
}

eng_named *eng_durable_add(eng_durable *durable, const eng_name *name, eng_timeline *timeline) {
    eng_named *named = calloc(1, sizeof *named), **bucket = &durable->bucket[bucket_of(name)];
    if (!named)
        return NULL;
    named->timeline = timeline;
    named->name = *name;
    named->used = eng_store_clock();
    named->writing = (eng_waiter){.take = eng_named_take_write, .of = named};
    named->renewal = (eng_waiter){.take = eng_named_take_renewal, .of = named};
    named->next = durable->first;
    if (named->next)
        named->next->previous = named;
    durable->first = named;
    named->next_of_bucket = *bucket;
    *bucket = named;
    durable->names++;
    timeline->named = named;
    eng_durable_due(durable, durable->wishes_at);
    return named;
}

void eng_named_free_if_done(eng_named *named) {
    if (!named->timeline && !named->writing.waiting && !named->renewal.waiting)
        free(named);
}

void eng_durable_detach(eng_durable *durable, eng_named *named) {
    eng_named **place = &durable->bucket[bucket_of(&named->name)];
    while (*place != named)
        place = &(*place)->next_of_bucket;
    *place = named->next_of_bucket;
    *(named->previous ? &named->previous->next : &durable->first) = named->next;
    if (named->next)
        named->next->previous = named->previous;
    durable->names--;
    durable->lost -= named->lost;
    named->timeline->named = NULL;
    named->timeline = NULL;
    eng_named_free_if_done(named);
}

void eng_durable_remove(eng_durable *durable, eng_named *named) {
    eng_timeline *timeline = named->timeline;
    eng_durable_detach(durable, named);
    timeline->busy = false;
    const eng_status removed = eng_timelines_remove(timeline, NULL);
    (void)removed; // it is not busy
}

void eng_durable_lose(eng_durable *durable, eng_named *named) {
    durable->lost += !named->lost;
    named->lost = true;
}

// -------------------------------------------------------------------------------------------------------------- clock

// When the name has something to do by itself.
static int64_t due_at(const eng_named *named) {
    int64_t due = named->renewal.waiting || !named->kept ? INT64_MAX : named->renew_at, write = INT64_MAX;
    if (named->lost)
        return named->timeline->busy ? INT64_MAX : 0;
    if (named->kept && !named->writing.waiting && eng_named_is_behind(named))
        write = named->retry_at;
    else if (named->kept && !named->writing.waiting && eng_named_wants_state(named))
        write =
            named->state_at > named->used + ENG_DURABLE_IDLE_MS ? named->state_at : named->used + ENG_DURABLE_IDLE_MS;
    if (write < named->retry_at)
        write = named->retry_at;
    if (named->wished_until && !named->timeline->busy && !named->writing.waiting)
        due = 0;
    if (named->held && named->held_until < due)
        due = named->held_until;
    return write < due ? write : due;
}

static void look_at(eng_durable *durable, eng_named *named, int64_t now) {
    durable->behind += eng_named_is_behind(named);
    if (named->lost && !named->timeline->busy) {
        eng_durable_remove(durable, named);
        return;
    }
    if (!named->lost && named->kept) {
        if (now >= named->renew_at)
            eng_named_renew(durable, named);
        eng_named_write(durable, named, now >= named->used + ENG_DURABLE_IDLE_MS);
    }
    eng_durable_due(durable, due_at(named));
    eng_named_hand_over(durable, named);
}

void eng_durable_due(eng_durable *durable, int64_t at) {
    if (at < durable->due)
        durable->due = at;
}

// Once for all names; of what is under way nothing is missed.
static void ask_for_wishes(eng_durable *durable, int64_t now) {
    eng_store_request request = {.op = ENG_STORE_WISHES};
    if (now >= durable->wishes_at && !durable->wishes.waiting &&
        eng_durable_ask(durable, &request, &durable->wishes, NULL) == ENG_OK)
        durable->wishes_at = now + ENG_DURABLE_WISH_MS;
    eng_durable_due(durable, durable->wishes_at);
}

static void look_at_all(eng_durable *durable, int64_t now) {
    durable->tick_at = now + ENG_DURABLE_TICK_MS;
    durable->due = INT64_MAX;
    durable->seen = eng_timelines_changes(durable->options.timelines);
    durable->starved = false;
    durable->behind = 0;
    for (eng_named *named = durable->first, *next; named; named = next) {
        next = named->next;
        look_at(durable, named, now);
    }
    if (durable->first)
        ask_for_wishes(durable, now);
}

eng_status eng_durable_poll(eng_durable *durable, bool *worked, eng_error *error) {
    if (!durable)
        return ENG_OK;
    if (durable->polling)
        return eng_fail(error, ENG_INVALID, "a step may not be run from inside a step");
    durable->polling = true;
    const bool replied = take_replies(durable);
    *worked |= replied;
    const int64_t now = eng_store_clock();
    const int64_t soon = durable->tick_at - ENG_DURABLE_TICK_MS + ENG_DURABLE_SOON_MS;
    if (now >= durable->tick_at || (replied && durable->starved && now >= soon))
        look_at_all(durable, now);
    eng_durable_work(durable, worked);
    durable->polling = false;
    return ENG_OK;
}

int64_t eng_durable_idle_ms(const eng_durable *durable) {
    if (!durable)
        return -1;
    const bool changed = durable->first && eng_timelines_changes(durable->options.timelines) != durable->seen;
    const int64_t due = changed ? 0 : durable->due, work = eng_durable_work_at(durable);
    const int64_t look = due > durable->tick_at ? due : durable->tick_at, at = work < look ? work : look;
    if (at == INT64_MAX)
        return -1;
    const int64_t now = eng_store_clock();
    return at > now ? at - now : 0;
}

// -------------------------------------------------------------------------------------------------------- for requests

int64_t eng_durable_margin(const eng_durable *durable) {
    return durable->options.lease_ms * 2 / 15;
}

eng_status eng_durable_admit(const eng_durable *durable, const eng_timeline *timeline, eng_error *error) {
    const eng_named *named = timeline->named;
    if (!named)
        return ENG_OK;
    if (named->lost)
        return eng_fail(error, ENG_CONFLICT, "%s", eng_durable_lost_text);
    if (eng_store_clock() > named->until - eng_durable_margin(durable))
        return eng_fail(error, ENG_IO, "the store cannot be reached, and the session's lease is over");
    return ENG_OK;
}

bool eng_durable_hold(eng_durable *durable, eng_timeline *timeline) {
    eng_named *named = timeline->named;
    if (!named)
        return false;
    named->used = eng_store_clock();
    if (!named->lost) {
        eng_named_write(durable, named, false);
        if (!eng_named_is_behind(named) || durable->failing || named->retry_at > named->used)
            return false;
    }
    named->held = timeline->changes;
    named->held_failures = named->failures;
    named->held_until = named->used + durable->wait_ms;
    eng_durable_due(durable, named->held_until);
    timeline->busy = true;
    return true;
}

eng_settled eng_durable_settled(eng_durable *durable, eng_timeline *timeline) {
    const eng_named *named = timeline->named;
    eng_settled settled = ENG_SETTLED_PENDING;
    if (named->lost)
        settled = ENG_SETTLED_LOST;
    else if (named->has.changes >= named->held)
        settled = ENG_SETTLED_DURABLE;
    else if (named->failures != named->held_failures || durable->failing)
        settled = ENG_SETTLED_BEHIND;
    else if (eng_store_clock() >= named->held_until) {
        durable->failing = true; // nobody else waits so long
        settled = ENG_SETTLED_BEHIND;
    }
    if (settled != ENG_SETTLED_PENDING)
        eng_durable_release(timeline);
    return settled;
}

void eng_durable_release(eng_timeline *timeline) {
    timeline->named->held = 0;
    timeline->busy = false;
}

bool eng_durable_is_lost(const eng_timeline *timeline) {
    return timeline->named && timeline->named->lost;
}

bool eng_durable_has_lost(const eng_durable *durable) {
    return durable && durable->lost > 0;
}

bool eng_durable_has_all(const eng_timeline *timeline) {
    const eng_named *named = timeline->named;
    return named && named->kept && !named->lost && !eng_named_is_behind(named);
}

// The store has all of it.
static bool leave(eng_durable *durable, eng_named *named) {
    eng_store_request request = eng_durable_about(&named->name, ENG_STORE_RELEASE);
    request.epoch = named->epoch;
    if (eng_durable_ask(durable, &request, NULL, NULL) != ENG_OK)
        return false;
    eng_durable_remove(durable, named);
    durable->parked++;
    return true;
}

bool eng_durable_evict(eng_durable *durable, const eng_timeline *except) {
    eng_named *oldest = NULL;
    for (eng_named *named = durable ? durable->first : NULL; named; named = named->next)
        if (named->timeline != except && !named->timeline->busy && !named->writing.waiting &&
            eng_durable_has_all(named->timeline) && (!oldest || named->used < oldest->used))
            oldest = named;
    return oldest && leave(durable, oldest);
}

void eng_named_hand_over(eng_durable *durable, eng_named *named) {
    if (!named->wished_until || named->timeline->busy || named->writing.waiting || named->lost || !named->kept)
        return;
    if (named->failures != named->wished_failures || eng_store_clock() > named->wished_until) {
        named->wished_until = 0; // it stays; who still wants it says so again
        return;
    }
    const bool behind = eng_named_is_behind(named);
    if (!behind && (named->wished_put || !eng_named_wants_state(named))) {
        const bool left = leave(durable, named);
        (void)left; // otherwise at the next look
        return;
    }
    named->wished_put = true;
    eng_named_write(durable, named, true);
}

static void take_wishes(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    (void)waiter;
    for (size_t i = 0; reply->status == ENG_OK && i < reply->count; i++) {
        eng_name name;
        memcpy(name.id, reply->list[i].id, sizeof name.id);
        memcpy(name.owner, reply->list[i].owner, sizeof name.owner);
        eng_named *named = eng_durable_find(durable, &name);
        if (!named)
            continue;
        named->wished_until = eng_store_clock() + durable->options.lease_ms;
        named->wished_failures = named->failures;
        named->wished_put = false;
        eng_durable_due(durable, 0);
        eng_named_hand_over(durable, named);
    }
}

void eng_durable_gauges(const eng_durable *durable, eng_gauges *out) {
    if (!durable)
        return;
    out->named = durable->names;
    out->behind = durable->behind;
    out->parked = durable->parked;
    out->states_stored = durable->states;
    out->store_failures = durable->failures;
}

// SPDX-License-Identifier: Apache-2.0
// Errands and what they refuse, leases that are handed over or lost, timelines that make room, a store that is full.
//
// What goes on afterwards is compared with a twin, as in durable_test.c.
#include <stdatomic.h>
#include <string.h>

#include "engine/durable_internal.h"
#include "tests/check_main.h"
#include "tests/engine/redis_server.h"
#include "tests/engine/stored.h"
#include "tests/engine/straight.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

// ------------------------------------------------------------------------------------------------------------- errands

static void take(void *user, const eng_answer *answer) {
    (void)user;
    ck_abort_msg("an errand that was refused is answered: %s", answer->message);
}

// The case's last round has a server.
#define ON_SERVER_FROM(round)             \
    if (_i >= (round) && !start_server()) \
    MESA_TEST_SKIP("no redis-server is installed")

START_TEST(errands_say_what_is_wrong) {
    ON_SERVER_FROM(1);
    static outcome out;
    int32_t ids[20];
    uint64_t more;
    twins t = begin_letters(1);
    eng_error error = {0};
    plain_ids(1, ids, 20);
    eng_errand errand = about(ENG_ERRAND_FETCH, 1);
    ck_assert_int_eq(eng_send(t.engine, &errand, NULL), ENG_INVALID); // nobody to answer to
    errand.done = take;
    ck_assert_int_eq(eng_send(t.plain, &errand, &error), ENG_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(error.text, "no store"));
    uint64_t second = create(t.engine);
    refused(t.engine, keep_errand(second, 1), ENG_CONFLICT, "of that name");
    refused(t.engine, keep_errand(t.id, 2), ENG_CONFLICT, "another name");
    refused(t.engine, keep_errand(second + 7, 3), ENG_NOT_FOUND, "no such session");
    ck_assert(!info_of(t.engine, second).named);
    keep(t.engine, second, 2);
    park(t.engine, 2);
    uint64_t third = create(t.engine);
    refused(t.engine, keep_errand(third, 2), ENG_CONFLICT, "of that name");
    ck_assert(!info_of(t.engine, third).named && !info_of(t.engine, third).busy);
    refused(t.engine, about(ENG_ERRAND_FETCH, 9), ENG_NOT_FOUND, "");
    refused(t.engine, about(ENG_ERRAND_LOOK, 9), ENG_NOT_FOUND, "");
    refused(t.engine, about(ENG_ERRAND_PARK, 9), ENG_NOT_FOUND, "");
    refused(t.engine, about(ENG_ERRAND_DROP, 9), ENG_NOT_FOUND, "");
    refused(t.engine, about(ENG_ERRAND_TOUCH, 9), ENG_NOT_FOUND, "");
    errand.name = name_of(1, OWNER + 1);
    refused(t.engine, errand, ENG_NOT_FOUND, ""); // another owner's
    ck_assert_int_eq(eng_timeline_drop(t.engine, OWNER, t.id, NULL), ENG_CONFLICT);
    submit(t.engine, turn_of(t.engine, t.id, ids, 20, 3), &out);
    refused(t.engine, keep_errand(t.id, 1), ENG_BUSY, "in use");
    finish(t.engine, &out);
    submit(t.engine, turn_of(t.engine, t.id, ids, 20, 30), &out);
    step(t.engine);
    refused(t.engine, about(ENG_ERRAND_PARK, 1), ENG_BUSY, "in use");
    eng_cancel(t.engine, out.id);
    submit(t.engine, turn_of(t.engine, t.id, ids, 20, 30), &out);
    step(t.engine);
    refused(t.engine, about(ENG_ERRAND_DROP, 1), ENG_BUSY, "in use");
    finish(t.engine, &out);
    ck_assert_int_eq(eng_timeline_fork(t.engine, OWNER, t.id, -1, &more, NULL), ENG_OK);
    ck_assert(!info_of(t.engine, more).named); // a fork has no name
    must(t.engine, about(ENG_ERRAND_DROP, 1));
    refuse(t.engine, turn_of(t.engine, t.id, ids, 3, 3), ENG_NOT_FOUND, "no such session");
    refused(t.engine, about(ENG_ERRAND_FETCH, 1), ENG_NOT_FOUND, "");
    must(t.engine, about(ENG_ERRAND_DROP, 2)); // it was parked
    refused(t.engine, about(ENG_ERRAND_LOOK, 2), ENG_NOT_FOUND, "");
    end_both(&t);
}
END_TEST

START_TEST(many_at_once_are_answered_once_each) {
    ON_SERVER_FROM(1);
    enum { COUNT = 64 };
    static answered out[COUNT + 1];
    eng_errand errand = about(ENG_ERRAND_LOOK, 1);
    twins t = begin_letters(1);
    both(&t, 1, 9, 2, "before");
    park(t.engine, 1);
    for (int i = 0; i < COUNT; i++)
        send_errand(t.engine, about(i % 2 ? ENG_ERRAND_FETCH : ENG_ERRAND_LOOK, 1), &out[i]);
    errand.done = take;
    ck_assert_int_eq(eng_send(t.engine, &errand, NULL), ENG_FULL);
    for (int i = 0; i < COUNT; i++)
        while (out[i].times == 0)
            go(t.engine);
    for (int i = 0; i < 20; i++) // and not once more
        go(t.engine);
    for (int i = 0; i < COUNT; i++) {
        ck_assert_msg(out[i].times == 1 && out[i].answer.status == ENG_OK, "%d: %s", i, out[i].message);
        ck_assert_uint_eq(i % 2 ? out[i].answer.timeline : out[1].answer.timeline, out[1].answer.timeline);
        ck_assert_int_eq(out[i].answer.record.position, 11);
    }
    ck_assert_uint_eq(gauges_of(t.engine).timelines, 1);
    t.id = out[1].answer.timeline;
    both(&t, 2, 3, 2, "fetched once");
    send_errand(t.engine, about(ENG_ERRAND_LOOK, 1), &out[0]); // which eng_close overtakes
    step(t.engine);
    send_errand(t.engine, about(ENG_ERRAND_LOOK, 1), &out[1]);
    end_both(&t);
    ck_assert_int_eq(out[1].times, 0);
}
END_TEST

static void count_wake(void *wakes) {
    atomic_fetch_add((atomic_int *)wakes, 1);
}

// Steps only where something was done or the engine was woken.
static void go_when_woken(eng_engine *engine, const atomic_int *wakes, const int *until) {
    int seen = atomic_load(wakes);
    while (*until == 0) {
        if (step(engine))
            continue;
        for (int i = 0; *until == 0 && atomic_load(wakes) == seen; i++) {
            ck_assert_msg(i < 100000, "nobody wakes the engine");
            pass(1);
        }
        seen = atomic_load(wakes);
    }
}

START_TEST(nothing_waits_for_the_clock) {
    static const eng_errand_kind kinds[] = {ENG_ERRAND_KEEP, ENG_ERRAND_PARK,  ENG_ERRAND_FETCH, ENG_ERRAND_LOOK,
                                            ENG_ERRAND_LIST, ENG_ERRAND_TOUCH, ENG_ERRAND_USAGE, ENG_ERRAND_DROP};
    static atomic_int wakes;
    static answered out;
    static outcome ended;
    int32_t ids[80];
    open_store(0);
    eng_engine *engine = open_letters((eng_options){.store = store, .wake = count_wake, .wake_context = &wakes});
    uint64_t id = create(engine);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        eng_errand errand = about(kinds[i], 1);
        errand.timeline = id;
        step(engine); // and with it the look at all names, not to come again soon
        engine->durable->tick_at = INT64_MAX;
        send_errand(engine, errand, &out);
        go_when_woken(engine, &wakes, &out.times);
        ck_assert_msg(out.answer.status == ENG_OK, "errand %d: %s", (int)kinds[i], out.message);
        if (kinds[i] != ENG_ERRAND_KEEP && kinds[i] != ENG_ERRAND_FETCH)
            continue;
        id = out.answer.timeline;
        plain_ids(1, ids, 80);
        submit(engine, turn_of(engine, id, ids, 80, 2), &ended);
        go_when_woken(engine, &wakes, &ended.finals);
        ck_assert(ended.durable);
    }
    eng_close(engine);
    close_store();
}
END_TEST

START_TEST(records_are_listed_touched_and_run_out) {
    ON_SERVER_FROM(1);
    enum { COUNT = 70 };
    open_store(0);
    eng_engine *engine = open_letters((eng_options){.store = store});
    for (uint32_t i = 0; i < COUNT; i++)
        keep(engine, create(engine), 100 + i);
    eng_errand errand = about(ENG_ERRAND_LIST, 0);
    memset(errand.name.id, 0, sizeof errand.name.id);
    uint32_t seen = 0;
    for (bool more = true; more;) {
        const answered *out = must(engine, errand);
        for (size_t i = 0; i < out->answer.count; i++, seen++) {
            const eng_name want = name_of(100 + seen, OWNER);
            ck_assert_mem_eq(out->list[i].name.id, want.id, sizeof want.id);
            ck_assert_int_eq(out->list[i].ttl_ms, HOUR_MS);
            ck_assert(!out->list[i].foreign);
            errand.name = out->list[i].name;
        }
        more = out->answer.more;
    }
    ck_assert_uint_eq(seen, COUNT);
    ck_assert_uint_eq(gauges_of(engine).named, COUNT);
    ck_assert_uint_ge(must(engine, about(ENG_ERRAND_USAGE, 0))->answer.usage.sessions, COUNT);
    errand = about(ENG_ERRAND_TOUCH, 100);
    errand.ttl_ms = 1;
    ck_assert_int_eq(must(engine, errand)->answer.record.ttl_ms, 1);
    errand.name = name_of(101, OWNER);
    errand.ttl_ms = 2 * HOUR_MS;
    const answered *out = must(engine, errand);
    ck_assert_int_gt(out->answer.record.expires_ms, out->answer.record.created_ms + HOUR_MS);
    park(engine, 100);
    park(engine, 101);
    pass(20);
    refused(engine, about(ENG_ERRAND_FETCH, 100), ENG_NOT_FOUND, "");
    ck_assert_int_eq(must(engine, about(ENG_ERRAND_FETCH, 101))->answer.record.ttl_ms, 2 * HOUR_MS);
    for (uint32_t i = 1; i < COUNT; i++)
        must(engine, about(ENG_ERRAND_DROP, 100 + i));
    ck_assert_uint_eq(gauges_of(engine).named, 0);
    eng_close(engine);
    close_store();
}
END_TEST

// A server forgets it at its time, a folder as soon as nobody has it.
START_TEST(what_ran_out_while_it_is_here_is_written_anew) {
    ON_SERVER_FROM(1);
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store}), .plain = open_letters((eng_options){0})};
    eng_errand errand = keep_errand(create(t.engine), 1);
    errand.ttl_ms = 300;
    t.id = must(t.engine, errand)->answer.timeline;
    t.twin = create(t.plain);
    both(&t, 1, 20, 2, "before");
    pass(400);
    refused(t.engine, about(ENG_ERRAND_LOOK, 1), ENG_NOT_FOUND, "");
    errand.ttl_ms = HOUR_MS;
    both(&t, 2, 20, 2, "that had run out");
    errand.timeline = t.id;
    must(t.engine, errand);
    die_and_rise(&t, 1);
    both(&t, 3, 20, 2, "after a kill");
    end_both(&t);
}
END_TEST

START_TEST(another_models_timeline_is_refused_by_name) {
    twins t = begin_letters(1);
    both(&t, 1, 20, 2, "before");
    park(t.engine, 1);
    eng_engine *other = open_model(&small_models[SMALL_LLAMA], "other", true,
                                   (eng_options){.max_rows = 2, .store = store, .lease_ms = LEASE_MS});
    refused(other, about(ENG_ERRAND_FETCH, 1), ENG_UNSUPPORTED, "fingerprint");
    ck_assert(must(other, about(ENG_ERRAND_LOOK, 1))->answer.record.foreign);
    t.id = fetch(t.engine, 1); // it was left as it is, and its lease
    both(&t, 2, 4, 2, "after another model looked");
    eng_close(other);
    end_both(&t);
}
END_TEST

// ------------------------------------------------------------------------------------------------------ one at a time

// Who lost it finds out when it renews the lease, or else when it writes.
START_TEST(a_lease_is_handed_over_or_lost) {
    ON_SERVER_FROM(2);
    static outcome out;
    int32_t ids[40];
    open_store(0);
    const eng_options options = {.store = store, .lease_ms = HOUR_MS}, brief = {.store = store, .lease_ms = LEASE_MS};
    twins t = {.engine = open_letters(options), .plain = open_letters((eng_options){0})};
    eng_engine *other = open_letters(brief);
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    twins u = {.engine = other, .plain = t.plain, .twin = t.twin};
    plain_ids(3, ids, 40);
    both(&t, 1, 20, 3, "here");
    const answered *busy = ask(other, about(ENG_ERRAND_FETCH, 1));
    ck_assert_int_eq(busy->answer.status, ENG_BUSY);
    ck_assert(busy->answer.lease_ms > 0 && busy->answer.lease_ms <= HOUR_MS);
    ck_assert_int_eq(must(other, about(ENG_ERRAND_LOOK, 1))->answer.record.position, 23);
    while (gauges_of(t.engine).named > 0) // it was asked for
        go(t.engine);
    u.id = fetch(other, 1);
    eng_named *named = eng_timelines_find(other->timelines, OWNER, u.id, NULL)->named;
    named->until = INT64_MAX; // however slow this machine is
    both(&u, 2, 5, 3, "there");
    for (int renewals = 0; renewals < 3; go(other)) { // as long as it is here
        ck_assert_int_le(eng_idle_ms(other), LEASE_MS / 3 + 1);
        renewals += named->until != INT64_MAX;
        named->until = INT64_MAX;
    }
    submit(other, turn_of(other, u.id, ids, 40, 3), &out); // and one in the middle of a request
    step(other);
    ck_assert_int_eq(out.events, 0);
    if (_i == 1)
        named->renew_at = INT64_MAX;
    pass(LEASE_MS + 50);
    t.id = fetch(t.engine, 1);
    both(&t, 3, 4, 3, "taken over");
    while (out.finals == 0)
        go(other);
    ck_assert_int_eq(out.finish, ENG_FINISH_ERROR);
    ck_assert_int_eq(out.status, ENG_CONFLICT);
    ck_assert_str_eq(out.message, "the session is in use by another server");
    while (gauges_of(other).named > 0)
        go(other);
    refuse(other, turn_of(other, u.id, ids, 3, 3), ENG_NOT_FOUND, "no such session");
    ck_assert_uint_eq(gauges_of(other).timelines, 0);
    both(&t, 4, 4, 3, "still there");
    must(other, about(ENG_ERRAND_DROP, 1));                                          // by anybody who knows its name
    eng_timelines_find(t.engine->timelines, OWNER, t.id, NULL)->named->renew_at = 0; // it finds out
    while (gauges_of(t.engine).named > 0)
        go(t.engine);
    ck_assert_uint_eq(gauges_of(t.engine).timelines, 0);
    eng_close(other);
    end_both(&t);
}
END_TEST

// One that slept through its lease asks whether the timeline is still its own before it tells where it stands.
START_TEST(what_another_has_now_is_not_found_here) {
    ON_SERVER_FROM(1);
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store, .lease_ms = LEASE_MS}),
               .plain = open_letters((eng_options){0})};
    eng_engine *other = open_letters((eng_options){.store = store, .lease_ms = HOUR_MS});
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 20, 3, "here");
    pass(LEASE_MS + 50);
    twins u = {.engine = other, .plain = t.plain, .id = fetch(other, 1), .twin = t.twin};
    both(&u, 2, 5, 3, "there");
    ck_assert_int_eq(ask(t.engine, about(ENG_ERRAND_FETCH, 1))->answer.status, ENG_BUSY);
    ck_assert_uint_eq(gauges_of(t.engine).timelines, 0);
    both(&u, 3, 5, 3, "still there");
    eng_close(other);
    t.id = fetch(t.engine, 1);
    both(&t, 4, 5, 3, "here again");
    end_both(&t);
}
END_TEST

// Both run, as two servers would, until the errand is answered.
static const answered *fetch_from(eng_engine *holder, eng_engine *asking, uint32_t id, outcome *request) {
    static answered out;
    do {
        out = (answered){0};
        send_errand(asking, about(ENG_ERRAND_FETCH, id), &out);
        while (out.times == 0) {
            ck_assert(!request || request->finals > 0 || gauges_of(holder).named == 1);
            go(asking);
            go(holder);
        }
    } while (out.answer.status == ENG_BUSY);
    ck_assert_msg(out.answer.status == ENG_OK, "%s", out.message);
    return &out;
}

// Long before the lease is over, with its state; and not while a request is on it.
START_TEST(who_asks_gets_it) {
    ON_SERVER_FROM(1);
    static outcome running, straight;
    int32_t ids[40];
    open_store(0);
    const eng_options options = {.store = store, .lease_ms = HOUR_MS};
    eng_engine *engine[2] = {open_letters(options), open_letters(options)};
    twins t = {.engine = engine[0], .plain = open_letters((eng_options){0})};
    plain_ids(8, ids, 40);
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 90, 3, "at first");
    for (int i = 0; i < 6; i++) {
        eng_engine *holder = engine[i % 2], *asking = engine[(i + 1) % 2];
        const uint64_t parked = gauges_of(holder).parked;
        const answered *out = fetch_from(holder, asking, 1, NULL);
        ck_assert_uint_eq(gauges_of(holder).parked, parked + 1);
        ck_assert_uint_eq(gauges_of(holder).timelines, 0);
        ck_assert_int_eq(info_of(asking, out->answer.timeline).residence, ENG_RESIDENCE_HOST); // nothing is read again
        t.engine = asking;
        t.id = out->answer.timeline;
        both(&t, (uint64_t)i, 70, 3, i % 2 ? "back" : "there");
    }
    submit(t.engine, turn_of(t.engine, t.id, ids, 40, 30), &running);
    submit(t.plain, turn_of(t.plain, t.twin, ids, 40, 30), &straight);
    finish(t.plain, &straight);
    step(t.engine);
    ck_assert_int_eq(running.finals, 0);
    t.id = fetch_from(engine[0], engine[1], 1, &running)->answer.timeline;
    ck_assert_int_eq(running.finals, 1);
    ck_assert(running.durable);
    alike(&running, &straight, "which another waited for");
    t.engine = engine[1];
    both(&t, 9, 20, 3, "afterwards");
    eng_close(engine[0]);
    end_both(&t);
}
END_TEST

// An idle one finds out by itself, and one whose lease is over does not begin anything.
START_TEST(nothing_begins_when_the_lease_is_over) {
    enum { LONG_ENOUGH_MS = 4000 }; // for a turn in it, on a busy machine
    int32_t ids[4] = {'a', 'b', 'c', 'd'};
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store, .lease_ms = LONG_ENOUGH_MS}),
               .plain = open_letters((eng_options){0})};
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 20, 3, "before");
    stop_store();
    const outcome *got = turn(t.engine, t.id, ids, 4, 2);
    ck_assert(!got->durable && got->position == 29);
    ck_assert(!info_of(t.engine, t.id).durable);
    while (gauges_of(t.engine).behind != 1)
        go(t.engine);
    pass(LONG_ENOUGH_MS);
    refuse(t.engine, turn_of(t.engine, t.id, ids, 4, 2), ENG_IO, "lease");
    ck_assert_int_eq(info_of(t.engine, t.id).position, 29);
    const eng_answer *here = &must(t.engine, about(ENG_ERRAND_FETCH, 1))->answer;
    ck_assert(here->timeline == t.id && here->record.position == 29); // nobody says whose it is
    eng_close(t.engine);
    eng_close(t.plain);
    close_store();
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- room

START_TEST(those_that_are_idle_make_room) {
    ON_SERVER_FROM(1);
    enum { COUNT = 12 };
    static outcome running, straight;
    twins t = {0};
    uint64_t twin[COUNT];
    int32_t ids[20];
    eng_gauges gauges;
    open_store(0);
    t.plain = open_letters((eng_options){0});
    t.engine = open_letters((eng_options){.store = store, .session_budget = 4 * eng_pool_slot_stride(t.plain->pool)});
    uint64_t held = keep(t.engine, create(t.engine), 99); // and who is at work stays
    plain_ids(99, ids, 20);
    submit(t.engine, turn_of(t.engine, held, ids, 20, 9), &running);
    while (running.id_count < 3)
        step(t.engine);
    eng_pause(t.engine, running.id, true);
    for (uint32_t i = 0; i < COUNT; i++) {
        t.id = keep(t.engine, create(t.engine), i);
        t.twin = twin[i] = create(t.plain);
        both(&t, i, 20, 3, "one of many");
        gauges = gauges_of(t.engine);
        ck_assert_uint_le(gauges.kept_bytes, gauges.kept_bytes_total);
    }
    ck_assert_uint_ge(gauges.parked, COUNT - 4);
    ck_assert_uint_lt(gauges.timelines, 4);
    for (uint32_t i = 0; i < COUNT; i++) {
        t.id = fetch(t.engine, i);
        t.twin = twin[i];
        both(&t, 50 + i, 70, 3, "that had to go");
    }
    for (uint32_t i = 0; i < COUNT; i++) {
        t.id = fetch(t.engine, i);
        t.twin = twin[i];
        both(&t, 90 + i, 0, 3, "again");
    }
    eng_pause(t.engine, running.id, false);
    finish(t.engine, &running);
    submit(t.plain, turn_of(t.plain, create(t.plain), ids, 20, 9), &straight);
    alike(&running, finish(t.plain, &straight), "who was at work");
    ck_assert(running.durable);
    end_both(&t);
}
END_TEST

// Bytes in the store that are nobody's session but take the room.
static eng_store_client *fill_store(void) {
    static const eng_store_client_options options = {.buffers = 1, .buffer_bytes = 8192};
    eng_store_client *client;
    ck_assert_int_eq(eng_store_client_open(store, &options, &client, NULL), ENG_OK);
    eng_status status = ENG_OK;
    for (uint32_t i = 0; status == ENG_OK; i++)
        for (int write = 0; write < 2 && status == ENG_OK; write++) {
            static uint64_t epoch;
            eng_store_request request = {.op = write ? ENG_STORE_PUT : ENG_STORE_LEASE,
                                         .meta = {.kind = ENG_STORE_SESSION, .position = 1},
                                         .ttl_ms = HOUR_MS,
                                         .epoch = write ? epoch : 0};
            const eng_name name = name_of(1000 + i, 1);
            memcpy(request.meta.id, name.id, sizeof name.id);
            if (write) {
                request.buffer = eng_store_take_buffer(client);
                request.buffer->length = request.buffer->capacity;
                memset(request.buffer->bytes, 1, request.buffer->length);
            }
            ck_assert_int_eq(eng_store_submit(client, &request, NULL), ENG_OK);
            eng_store_reply *reply;
            while (!(reply = eng_store_poll(client)))
                pass(1);
            status = reply->status;
            epoch = reply->epoch;
            if (reply->buffer)
                eng_store_return_buffer(client, reply->buffer);
            eng_store_done(client, reply);
        }
    ck_assert_int_eq(status, ENG_FULL);
    return client;
}

START_TEST(a_full_store_catches_up) {
    int32_t ids[60];
    if (outside())
        return; // its bounds are not the test's
    open_store(1 << 20);
    twins t = {.engine = open_letters((eng_options){.store = store}), .plain = open_letters((eng_options){0})};
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 10, 2, "before");
    eng_store_client *client = fill_store();
    int turns = 0;
    for (bool durable = true; durable; turns++) { // what is set aside for journals goes first
        plain_ids((uint64_t)turns, ids, 60);
        const outcome *got = turn(t.engine, t.id, ids, 60, 1);
        durable = got->durable;
        alike(got, turn(t.plain, t.twin, ids, 60, 1), "with a full store");
    }
    for (int i = 0; i < 2; i++, turns++) {
        plain_ids((uint64_t)turns, ids, 60);
        ck_assert(!turn(t.engine, t.id, ids, 60, 1)->durable);
        turn(t.plain, t.twin, ids, 60, 1);
    }
    ck_assert_uint_gt(gauges_of(t.engine).store_failures, 0);
    both_back(&t, 12 + 61 * (turns - 1));
    refused(t.engine, about(ENG_ERRAND_PARK, 1), ENG_FULL, "did not take the session: ");
    refused(t.engine, keep_errand(create(t.engine), 2), ENG_FULL, "did not take");
    for (uint32_t i = 0; i < 20; i++) {
        eng_errand errand = about(ENG_ERRAND_DROP, 1000 + i);
        memset(errand.name.owner, 0, sizeof errand.name.owner);
        must(t.engine, errand);
    }
    wait_durable(t.engine, t.id);
    both(&t, 99, 5, 3, "with room again");
    eng_store_client_close(client);
    kill_all(t.engine);
    open_store(1 << 20);
    t.engine = open_letters((eng_options){.store = store});
    t.id = fetch(t.engine, 1);
    both(&t, 100, 5, 3, "and after a kill");
    end_both(&t);
}
END_TEST

START_TEST(a_server_that_died_catches_up) {
    int32_t ids[30];
    ON_SERVER_FROM(0);
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store, .lease_ms = HOUR_MS}),
               .plain = open_letters((eng_options){0})};
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 10, 2, "before");
    for (int kill = 0; kill < 2; kill++) {
        redis_server_kill();
        t.engine->durable->wait_ms = ENG_DURABLE_WAIT_MS;
        for (int i = 0; i < 3; i++) {
            plain_ids(2 + (uint64_t)i, ids, 30);
            const outcome *got = turn(t.engine, t.id, ids, 30, 2);
            ck_assert(!got->durable);
            alike(got, turn(t.plain, t.twin, ids, 30, 2), "without a server");
        }
        both_back(&t, info_of(t.plain, t.twin).position - 20);
        ck_assert(start_server());
        wait_durable(t.engine, t.id);
        t.engine->durable->wait_ms = HOUR_MS;
        both(&t, 9, 5, 3, "when it is back");
    }
    park(t.engine, 1);
    eng_close(t.engine);
    t.engine = open_letters((eng_options){.store = store});
    t.id = fetch(t.engine, 1);
    both(&t, 10, 5, 3, "out of it");
    end_both(&t);
}
END_TEST

typedef struct gate {
    atomic_bool open, reached; // reached: while it was shut
} gate;

// Called on the store's thread, which stalls as long as the gate is shut.
static void pass_gate(void *of) {
    gate *gate = of;
    while (!atomic_load(&gate->open)) {
        atomic_store(&gate->reached, true);
        pass(1);
    }
}

START_TEST(a_store_that_stalls_catches_up) {
    static gate gate;
    int32_t ids[30];
    enum { LIMIT_MS = 6000 };
    if (outside())
        return; // its time limit is the server's too
    atomic_store(&gate.open, true);
    open_hasty_store(LIMIT_MS);
    twins t = {.engine = open_letters((eng_options){.store = store, .wake = pass_gate, .wake_context = &gate}),
               .plain = open_letters((eng_options){0})};
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 10, 2, "before");
    atomic_store(&gate.open, false);
    t.engine->durable->wait_ms = ENG_DURABLE_WAIT_MS;
    answered looked;
    send_errand(t.engine, about(ENG_ERRAND_LOOK, 1),
                &looked); // this or another reply the store's thread cannot get past
    while (!atomic_load(&gate.reached))
        go(t.engine);
    for (int i = 0; i < 3; i++) { // only the first waits
        plain_ids(2 + (uint64_t)i, ids, 30);
        const outcome *got = turn(t.engine, t.id, ids, 30, 2);
        ck_assert(!got->durable);
        alike(got, turn(t.plain, t.twin, ids, 30, 2), "with a store that stalls");
    }
    both_back(&t, 80);
    ck_assert(!info_of(t.engine, t.id).durable);
    pass(LIMIT_MS - ENG_DURABLE_WAIT_MS + 100); // nobody knows what has become of the first
    atomic_store(&gate.open, true);
    wait_durable(t.engine, t.id);
    t.engine->durable->wait_ms = HOUR_MS;
    ck_assert_int_eq(looked.times, 1);
    ck_assert_uint_gt(gauges_of(t.engine).store_failures, 0);
    both(&t, 9, 5, 3, "when it goes on");
    die_and_rise(&t, 1);
    both(&t, 10, 5, 3, "and after a kill");
    end_both(&t);
}
END_TEST

static Suite *durable_errand_suite(void) {
    Suite *suite = suite_create("durable_errand");
    TCase *asked = tcase_create("errands"), *leases = tcase_create("leases"), *room = tcase_create("room");
    TCase *const all[] = {asked, leases, room};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        tcase_add_checked_fixture(all[i], temp_folder_make, end_case);
        tcase_set_timeout(all[i], 120);
        suite_add_tcase(suite, all[i]);
    }
    tcase_add_loop_test(asked, errands_say_what_is_wrong, 0, 2);
    tcase_add_loop_test(asked, many_at_once_are_answered_once_each, 0, 2);
    tcase_add_test(asked, nothing_waits_for_the_clock);
    tcase_add_loop_test(asked, records_are_listed_touched_and_run_out, 0, 2);
    tcase_add_loop_test(asked, what_ran_out_while_it_is_here_is_written_anew, 0, 2);
    tcase_add_test(asked, another_models_timeline_is_refused_by_name);
    tcase_add_loop_test(leases, a_lease_is_handed_over_or_lost, 0, 3);
    tcase_add_loop_test(leases, what_another_has_now_is_not_found_here, 0, 2);
    tcase_add_loop_test(leases, who_asks_gets_it, 0, 2);
    tcase_add_test(leases, nothing_begins_when_the_lease_is_over);
    tcase_add_loop_test(room, those_that_are_idle_make_room, 0, 2);
    tcase_add_test(room, a_full_store_catches_up);
    tcase_add_loop_test(room, a_server_that_died_catches_up, 0, 1);
    tcase_add_test(room, a_store_that_stalls_catches_up);
    return suite;
}

DEVICE_TEST_MAIN(durable_errand_suite)

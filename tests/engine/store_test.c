// SPDX-License-Identifier: Apache-2.0
// A store: records there and back, rules of writing, bounds, damage, and what is left after a kill.
//
// Each case has a folder and a store whose thread the test starts, as a program would; most run on both kinds, LMDB in
// that folder and a redis-server of the case's own. Damage is done to what is stored while the store is closed.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <hiredis/hiredis.h>
#include <lmdb.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tests/engine/redis_server.h"
#include "tests/engine/store_calls.h"
#include "tests/engine/temp_folder.h"

enum { LMDB, REDIS, KINDS };

static bool in_redis;

static bool choose(int kind) {
    in_redis = kind == REDIS;
    place = in_redis ? redis_server_place() : temp_path("store");
    return !in_redis || redis_server_start("");
}

// What every case on both begins with; the kind is the case's number in libcheck's loop.
#define ON_BOTH()    \
    if (!choose(_i)) \
    MESA_TEST_SKIP("no redis-server is installed")

// ----------------------------------------------------------------------------------------------------------- the cases

START_TEST(states_there_and_back) {
    ON_BOTH();
    static const size_t lengths[] = {1, 262127, 262128, 262129, 1 << 20, (1 << 20) + 1, BUFFER - 1000};
    start(64 << 20);
    for (uint32_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint64_t epoch = lease_of(i, 1, 10000);
        ck_assert_uint_gt(epoch, 0);
        ck_assert_int_eq(put_state(at_position(meta_of(ENG_STORE_SESSION, i, 1), 10 + i), epoch, lengths[i], 0),
                         ENG_OK);
    }
    for (int again = 0; again < 2; again++) {
        for (uint32_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            ck_assert_int_eq(fetch(meta_of(ENG_STORE_SESSION, i, 1)), ENG_OK);
            check_state(i, lengths[i]);
            ck_assert_int_eq(last.meta.position, 10 + i);
            ck_assert_int_eq(last.meta.tail, 10 + i);
            ck_assert_int_eq(last.meta.profile[0] == 8 && last.meta.note[0] == 9 && last.meta.fingerprint[0] == 7, 1);
        }
        stop();
        start(64 << 20);
    }
    eng_store_meta foreign = meta_of(ENG_STORE_SESSION, 0, 1);
    foreign.fingerprint[0] = 6;
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_GET, .meta = foreign, .buffer = other}), ENG_UNSUPPORTED);
    other->capacity = 1 << 20;
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_SESSION, 5, 1)), ENG_TOO_LONG);
    ck_assert_uint_eq(last.meta.payload_bytes, (1 << 20) + 1);
    stop();
}
END_TEST

START_TEST(journals) {
    ON_BOTH();
    start(16 << 20);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    uint64_t epoch = lease_of(1, 1, 10000);
    ck_assert_int_eq(append(at_position(meta, 20), epoch, "a"), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 40), epoch, "bb"), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 40), epoch, "bb"), ENG_OK); // again, as after a reply that got lost
    ck_assert_int_eq(append(at_position(meta, 40), epoch, "bc"), ENG_CONFLICT);
    ck_assert_int_eq(append(at_position(meta, 30), epoch, "c"), ENG_CONFLICT);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "20:a 40:bb ");
    ck_assert_int_eq(put_state(at_position(meta, 30), epoch, 5000, 0), ENG_OK); // in the middle of the second
    ck_assert_int_eq(last.meta.position, 40);
    ck_assert_int_eq(last.meta.tail, 40);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "40:bb ");
    check_state(1, 5000);
    ck_assert_int_eq(put_state(at_position(meta, 29), epoch, 5000, 0), ENG_CONFLICT);
    ck_assert_int_eq(append(at_position(meta, 41), epoch, "d"), ENG_OK);
    ck_assert_int_eq(put_state(at_position(meta, 41), epoch, 60, 0), ENG_OK);
    stop();
    start(16 << 20);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "");
    check_state(1, 60);
    eng_store_meta foreign = at_position(meta, 50);
    foreign.fingerprint[0] = 1;
    ck_assert_int_eq(append(foreign, lease_of(1, 1, 10000), "x"), ENG_CONFLICT);
    stop();
}
END_TEST

START_TEST(a_journal_is_bounded) {
    ON_BOTH();
    start(64 << 20);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    uint64_t epoch = lease_of(1, 1, 10000);
    size_t length = 3 << 20;
    for (int i = 1; i <= 3; i++) {
        memset(buffer->bytes, 'a' + i, length);
        eng_status status = call((eng_store_request){.op = ENG_STORE_APPEND,
                                                     .meta = at_position(meta, i),
                                                     .epoch = epoch,
                                                     .entry = buffer->bytes,
                                                     .entry_bytes = length});
        ck_assert_int_eq(status, i < 3 ? ENG_OK : ENG_FULL);
    }
    ck_assert_int_eq(put_state(at_position(meta, 2), epoch, 100, 0), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 3), epoch, "room again"), ENG_OK);
    stop();
}
END_TEST

START_TEST(one_writer) {
    ON_BOTH();
    start(16 << 20);
    eng_store_meta meta = at_position(meta_of(ENG_STORE_SESSION, 1, 1), 1);
    uint64_t first = lease_of(1, 1, 600000);
    ck_assert_uint_gt(first, 0);
    ck_assert_uint_eq(lease_of(1, 2, 600000), 0);
    ck_assert_int_eq(last.status, ENG_BUSY);
    ck_assert(last.lease_ms > 0 && last.lease_ms <= 600000);
    ck_assert_int_eq(append(meta, first + 1, "stale"), ENG_CONFLICT);
    renew_for(1, 1, first, 10);
    nap(100000);
    ck_assert_int_eq(append(meta, first, "late"), ENG_OK); // run out, but nobody took it
    uint64_t second = lease_of(1, 2, 600000);
    ck_assert_uint_gt(second, first);
    ck_assert_int_eq(append(at_position(meta, 2), first, "fenced"), ENG_CONFLICT);
    ck_assert_int_eq(put_state(at_position(meta, 2), first, 100, 0), ENG_CONFLICT);
    ck_assert_int_eq(put_state(at_position(meta, 2), first, 2 << 20, 0), ENG_CONFLICT);
    eng_store_request renew = {.op = ENG_STORE_LEASE, .meta = meta, .ttl_ms = 600000, .epoch = first, .holder = {1}};
    ck_assert_int_eq(call(renew), ENG_CONFLICT);
    renew.epoch = second;
    ck_assert_int_eq(call(renew), ENG_OK);
    ck_assert_uint_eq(last.epoch, second);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "1:late ");
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_RELEASE, .meta = meta, .epoch = first}), ENG_OK);
    ck_assert_uint_eq(lease_of(1, 3, 600000), 0);
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_RELEASE, .meta = meta, .epoch = second}), ENG_OK);
    uint64_t third = lease_of(1, 3, 600000);
    ck_assert_uint_gt(third, second);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 2), third, "deleted"), ENG_CONFLICT);
    ck_assert_int_eq(simple(ENG_STORE_GET, meta), ENG_NOT_FOUND);
    stop();
}
END_TEST

// A lease that was refused is told to who has it, once; nobody else hears of it, nor a later holder.
START_TEST(wishes_are_told) {
    ON_BOTH();
    start(16 << 20);
    const eng_store_request ask = {.op = ENG_STORE_WISHES, .holder = {1}},
                            other = {.op = ENG_STORE_WISHES, .holder = {2}};
    eng_store_meta first = meta_of(ENG_STORE_SESSION, 1, 1);
    ck_assert_int_eq(call(ask), ENG_OK);
    ck_assert_uint_eq(last.count, 0);
    for (uint32_t id = 1; id <= 3; id++)
        ck_assert_uint_gt(lease_of(id, 1, 100000), 0);
    for (int i = 0; i < 2; i++) {
        ck_assert_uint_eq(lease_of(1, 2, 100000), 0);
        ck_assert_uint_eq(lease_of(3, 2, 100000), 0);
    }
    ck_assert_int_eq(call(other), ENG_OK);
    ck_assert_uint_eq(last.count, 0);
    ck_assert_int_eq(call(ask), ENG_OK);
    ck_assert_uint_eq(last.count, 2);
    for (size_t i = 0; i < 2; i++) {
        const eng_store_meta third = meta_of(ENG_STORE_SESSION, 3, 1), *told = &listed[i];
        ck_assert_int_eq(told->kind, ENG_STORE_SESSION);
        ck_assert_mem_eq(told->owner, first.owner, sizeof first.owner);
        ck_assert(memcmp(told->id, first.id, sizeof first.id) == 0 || memcmp(told->id, third.id, sizeof first.id) == 0);
        ck_assert(memcmp(told->id, listed[1 - i].id, sizeof first.id) != 0);
    }
    ck_assert_int_eq(call(ask), ENG_OK);
    ck_assert_uint_eq(last.count, 0);
    stop();
}
END_TEST

START_TEST(owners_and_lists) {
    ON_BOTH();
    start(16 << 20);
    for (uint32_t i = 0; i < 150; i++)
        ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, i, 1 + (i % 50 == 7)), 0, 10 + i, 0), ENG_OK);
    eng_store_meta from = meta_of(ENG_STORE_PREFIX, 0, 1);
    memset(from.id, 0, sizeof from.id);
    uint32_t seen = 0, pages = 0;
    from.id[3] = 0; // the record of id 0 is named by zeros and so never listed behind itself
    do {
        ck_assert_int_eq(simple(ENG_STORE_LIST, from), ENG_OK);
        for (size_t i = 0; i < last.count; i++, seen++) {
            ck_assert_int_eq(memcmp(from.id, listed[i].id, sizeof from.id) < 0, 1);
            ck_assert_int_eq(listed[i].owner[0], 1);
            memcpy(from.id, listed[i].id, sizeof from.id);
        }
        pages++;
    } while (last.more);
    ck_assert_uint_eq(seen, 146);
    ck_assert_uint_eq(pages, 3);
    eng_store_meta thief = meta_of(ENG_STORE_PREFIX, 3, 2);
    ck_assert_int_eq(fetch(thief), ENG_NOT_FOUND);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, thief), ENG_NOT_FOUND);
    ck_assert_int_eq(simple(ENG_STORE_EXPIRE, thief), ENG_NOT_FOUND);
    ck_assert_int_eq(put_state(thief, 0, 10, 0), ENG_NOT_FOUND);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 3, 1)), ENG_OK);
    check_state(3, 13);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta_of(ENG_STORE_PREFIX, 3, 1)), ENG_OK);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta_of(ENG_STORE_PREFIX, 3, 1)), ENG_NOT_FOUND);
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    ck_assert_uint_eq(last.usage.prefixes, 149);
    ck_assert_uint_eq(last.usage.sessions, 0);
    stop();
}
END_TEST

static eng_status find(eng_store_kind kind, const uint32_t *ids, size_t count) {
    static unsigned char names[ENG_STORE_FIND_IDS][ENG_STORE_ID_BYTES];
    for (size_t i = 0; i < count; i++) {
        const eng_store_meta meta = meta_of(kind, ids[i], 1);
        memcpy(names[i], meta.id, sizeof meta.id);
    }
    return call((eng_store_request){
        .op = ENG_STORE_FIND, .meta = {.kind = kind}, .entry = names, .entry_bytes = count * ENG_STORE_ID_BYTES});
}

static void finds(const uint32_t *ids, size_t count, uint32_t first) {
    ck_assert_int_eq(find(ENG_STORE_PREFIX, ids, count), ENG_OK);
    const eng_store_meta meta = meta_of(ENG_STORE_PREFIX, first, 1);
    ck_assert_mem_eq(last.meta.id, meta.id, sizeof meta.id);
}

START_TEST(the_first_of_many) {
    ON_BOTH();
    static uint32_t ids[ENG_STORE_FIND_IDS];
    for (uint32_t i = 0; i < ENG_STORE_FIND_IDS; i++)
        ids[i] = 100000 - i;
    start(16 << 20);
    ck_assert_int_eq(find(ENG_STORE_PREFIX, ids, ENG_STORE_FIND_IDS), ENG_NOT_FOUND);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, ids[ENG_STORE_FIND_IDS - 1], 1), 0, 10, 0), ENG_OK);
    finds(ids, ENG_STORE_FIND_IDS, ids[ENG_STORE_FIND_IDS - 1]);
    ck_assert_int_eq(find(ENG_STORE_PREFIX, ids, ENG_STORE_FIND_IDS - 1), ENG_NOT_FOUND);
    ck_assert_int_eq(find(ENG_STORE_SESSION, ids, ENG_STORE_FIND_IDS), ENG_NOT_FOUND);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, ids[7], 2), 0, 10, 0), ENG_OK);
    finds(ids, ENG_STORE_FIND_IDS, ids[7]);
    finds(ids + 7, 1, ids[7]);
    finds(ids + 8, ENG_STORE_FIND_IDS - 8, ids[ENG_STORE_FIND_IDS - 1]);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta_of(ENG_STORE_PREFIX, ids[7], 2)), ENG_OK);
    finds(ids, ENG_STORE_FIND_IDS, ids[ENG_STORE_FIND_IDS - 1]);
    eng_store_request bad = {.op = ENG_STORE_FIND, .meta = {.kind = ENG_STORE_PREFIX}, .entry = ids};
    static const size_t wrong[] = {0, 31, 33, ENG_STORE_ID_BYTES * (ENG_STORE_FIND_IDS + 1)};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        bad.entry_bytes = wrong[i];
        ck_assert_int_eq(eng_store_submit(client, &bad, NULL), ENG_INVALID);
    }
    stop();
}
END_TEST

START_TEST(time_runs_out) {
    ON_BOTH();
    start(16 << 20);
    eng_store_meta kept = meta_of(ENG_STORE_PREFIX, 1, 1), gone = meta_of(ENG_STORE_PREFIX, 2, 1);
    ck_assert_int_eq(put_state(gone, 0, 10, 100), ENG_OK);
    do // a slow machine may be too late
        ck_assert_int_eq(put_state(kept, 0, 10, 1000), ENG_OK);
    while (call((eng_store_request){.op = ENG_STORE_EXPIRE, .meta = kept, .ttl_ms = 1000000}) == ENG_NOT_FOUND);
    ck_assert_int_eq(last.status, ENG_OK);
    nap(1050000);
    ck_assert_int_eq(fetch(kept), ENG_OK);
    ck_assert_int_eq(fetch(gone), ENG_NOT_FOUND);
    ck_assert_int_eq(simple(ENG_STORE_LIST, meta_of(ENG_STORE_PREFIX, 0, 1)), ENG_OK);
    ck_assert_uint_eq(last.count, 1);
    for (int i = 0; i < 1000; i++) {
        ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
        if (last.usage.prefixes == 1)
            break;
        nap(100000);
    }
    ck_assert_uint_eq(last.usage.prefixes, 1);
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_ge(gauges.expired, 1);
    stop();
}
END_TEST

START_TEST(a_budget) {
    ON_BOTH();
    start(16 << 20);
    uint64_t epoch = lease_of(1, 1, 100000);
    for (uint32_t i = 0; i < 40; i++) {
        ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, i, 1), 0, i % 2 ? 600000 : 1500000, 0), ENG_OK);
        ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 0, 1)), ENG_OK); // used all the time
    }
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 39, 1)), ENG_OK);
    check_state(39, 600000);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 1, 1)), ENG_NOT_FOUND);
    int kept = 0;
    for (uint32_t id = 1; id < 60; id++) { // sessions take all the room, and keep it
        epoch = lease_of(id, 1, 100000);
        eng_status status = put_state(at_position(meta_of(ENG_STORE_SESSION, id, 1), 5), epoch, 700000, 0);
        ck_assert(status == ENG_OK || status == ENG_FULL);
        kept += status == ENG_OK;
        ck_assert_msg(status == ENG_OK || kept > 10, "full with %d sessions: %s", kept, last.error.text);
        ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
        ck_assert_uint_le(last.usage.bytes, last.usage.budget);
    }
    ck_assert_int_lt(kept, 59);
    ck_assert_uint_eq(last.usage.prefixes, 0);
    ck_assert_uint_eq(last.usage.sessions, (uint64_t)kept);
    for (uint32_t id = 1; id <= (uint32_t)kept; id++) {
        ck_assert_int_eq(fetch(meta_of(ENG_STORE_SESSION, id, 1)), ENG_OK);
        check_state(id, 700000);
    }
    ck_assert_int_eq(append(at_position(meta_of(ENG_STORE_SESSION, 1, 1), 6), lease_of(1, 1, 1000), "still"), ENG_OK);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 77, 1), 0, 700000, 0), ENG_FULL);
    for (uint32_t id = 1; id <= (uint32_t)kept; id++)
        ck_assert_int_eq(simple(ENG_STORE_DELETE, meta_of(ENG_STORE_SESSION, id, 1)), ENG_OK);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 77, 1), 0, 3 << 20, 0), ENG_OK);
    stop();
}
END_TEST

START_TEST(a_full_disk) {
    choose(LMDB);
    start(32 << 20);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    uint64_t epoch = lease_of(1, 1, 100000);
    ck_assert_int_eq(put_state(at_position(meta, 5), epoch, 1500000, 0), ENG_OK);
    limit_file_size(3 << 20);
    eng_status status = put_state(at_position(meta, 6), epoch, 3000000, 0);
    ck_assert_msg(status == ENG_FULL || status == ENG_IO, "%s", last.error.text); // IO: LMDB's word for a part taken
    ck_assert_int_eq(fetch(meta), ENG_OK);
    check_state(1, 1500000);
    ck_assert_int_eq(last.meta.position, 5);
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_eq(gauges.failed, 1);
    ck_assert_uint_ne(strlen(gauges.fault), 0);
    stop();
}
END_TEST

START_TEST(requests_are_bounded) {
    ON_BOTH();
    ck_assert_int_eq(eng_store_open(&(eng_store_options){.place = place}, &store, NULL), ENG_OK);
    eng_store_client_options options = {.requests = 3, .entry_bytes = 10};
    ck_assert_int_eq(eng_store_client_open(store, &options, &client, NULL), ENG_OK);
    eng_store_request usage = {.op = ENG_STORE_USAGE},
                      entry = {.op = ENG_STORE_APPEND,
                               .meta = at_position(meta_of(ENG_STORE_SESSION, 1, 1), 1),
                               .epoch = 1,
                               .entry = "12345678",
                               .entry_bytes = 8};
    ck_assert_int_eq(eng_store_submit(client, &entry, NULL), ENG_OK);
    ck_assert_int_eq(eng_store_submit(client, &entry, NULL), ENG_FULL); // its bytes
    ck_assert_int_eq(eng_store_submit(client, &usage, NULL), ENG_OK);
    ck_assert_int_eq(eng_store_submit(client, &usage, NULL), ENG_OK);
    ck_assert_int_eq(eng_store_submit(client, &usage, NULL), ENG_FULL);
    entry.epoch = 0;
    ck_assert_int_eq(eng_store_submit(client, &entry, NULL), ENG_INVALID);
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_eq(gauges.queued, 3);
    ck_assert_int_eq(pthread_create(&thread, NULL, live, store), 0);
    eng_store_reply *first = await();
    ck_assert_int_eq(first->status, ENG_CONFLICT);
    ck_assert_int_eq(eng_store_submit(client, &usage, NULL), ENG_FULL); // until it is given back
    eng_store_done(client, first);
    ck_assert_int_eq(eng_store_submit(client, &usage, NULL), ENG_OK);
    eng_store_stop(store);
    pthread_join(thread, NULL);
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_eq(gauges.queued, 0); // what was submitted before is done
    for (int i = 0; i < 3; i++)
        eng_store_done(client, await());
    ck_assert_int_eq(eng_store_submit(client, &usage, NULL), ENG_CANCELLED);
    eng_store_client_close(client);
    eng_store_close(store);
}
END_TEST

// -------------------------------------------------------------------------------------------------------------- damage

static bool alter_lmdb(const char *table, size_t n) {
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    MDB_cursor *cursor;
    MDB_val name, value;
    ck_assert_int_eq(mdb_env_create(&env), 0);
    ck_assert_int_eq(mdb_env_set_maxdbs(env, 8), 0);
    ck_assert_int_eq(mdb_env_open(env, temp_path("store"), MDB_NOSYNC, 0600), 0);
    ck_assert_int_eq(mdb_txn_begin(env, NULL, 0, &txn), 0);
    ck_assert_int_eq(mdb_dbi_open(txn, table, 0, &dbi), 0);
    ck_assert_int_eq(mdb_cursor_open(txn, dbi, &cursor), 0);
    bool found = false;
    for (int rc = mdb_cursor_get(cursor, &name, &value, MDB_FIRST); !rc && !found;
         rc = mdb_cursor_get(cursor, &name, &value, MDB_NEXT)) {
        if (n >= value.mv_size) {
            n -= value.mv_size;
            continue;
        }
        unsigned char copy[4096];
        memcpy(copy, value.mv_data, value.mv_size);
        copy[n] ^= 1;
        value.mv_data = copy;
        ck_assert_int_eq(mdb_cursor_put(cursor, &name, &value, MDB_CURRENT), 0);
        found = true;
    }
    mdb_cursor_close(cursor);
    ck_assert_int_eq(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
    return found;
}

// The n-th byte of one of the values that a command lists, at or behind *n; NULL: it is further behind.
static redisReply *value_of(redisReply *values, size_t *n, size_t *which) {
    for (*which = 0; *which < values->elements; ++*which) {
        redisReply *value = values->element[*which];
        if (*n < value->len)
            return value;
        *n -= value->len;
    }
    return NULL;
}

static bool alter_redis(const char *table, size_t n) {
    static const char record[] = "{mesa}:s00000001"
                                 "00000000000000000000000000000000000000000000000000000000";
    redisContext *link = redis_server_connect();
    redisReply *generation = redis_server_ask(link, "HGET %s generation", record);
    redisReply *values = table[0] == 'h'   ? redis_server_ask(link, "HMGET %s head", record)
                         : table[0] == 'p' ? redis_server_ask(link, "HMGET %s:%s 0", record, generation->str)
                                           : redis_server_ask(link, "LRANGE %s:journal 0 -1", record);
    size_t which;
    redisReply *value = value_of(values, &n, &which), *done = NULL;
    if (value) {
        value->str[n] ^= 1;
        done = table[0] == 'h' ? redis_server_ask(link, "HSET %s head %b", record, value->str, value->len)
               : table[0] == 'p'
                   ? redis_server_ask(link, "HSET %s:%s 0 %b", record, generation->str, value->str, value->len)
                   : redis_server_ask(link, "LSET %s:journal %d %b", record, (int)which, value->str, value->len);
        freeReplyObject(done);
    }
    freeReplyObject(values);
    freeReplyObject(generation);
    redisFree(link);
    return value != NULL;
}

// The n-th byte of all values of a table changes its lowest bit, or goes back. False: there is no such byte.
static bool alter(const char *table, size_t n) {
    return in_redis ? alter_redis(table, n) : alter_lmdb(table, n);
}

// The pieces that the store holds also stand under another generation and another record, as a kill leaves them.
static void leave_pieces(void) {
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    MDB_val name, value;
    unsigned char bytes[256], copy[4096];
    ck_assert_int_eq(mdb_env_create(&env), 0);
    ck_assert_int_eq(mdb_env_set_maxdbs(env, 8), 0);
    ck_assert_int_eq(mdb_env_open(env, temp_path("store"), 0, 0600), 0);
    ck_assert_int_eq(mdb_txn_begin(env, NULL, 0, &txn), 0);
    ck_assert_int_eq(mdb_dbi_open(txn, "pieces", 0, &dbi), 0);
    MDB_cursor *cursor;
    ck_assert_int_eq(mdb_cursor_open(txn, dbi, &cursor), 0);
    ck_assert_int_eq(mdb_cursor_get(cursor, &name, &value, MDB_FIRST), 0);
    ck_assert(name.mv_size <= sizeof bytes && value.mv_size <= sizeof copy);
    size_t length = name.mv_size;
    memcpy(bytes, name.mv_data, length);
    memcpy(copy, value.mv_data, value.mv_size);
    mdb_cursor_close(cursor);
    for (size_t at = 1; at <= 33; at += 32) { // of the id, of the generation
        bytes[at] ^= 64;
        name = (MDB_val){length, bytes};
        value.mv_data = copy;
        ck_assert_int_eq(mdb_put(txn, dbi, &name, &value, 0), 0);
        bytes[at] ^= 64;
    }
    ck_assert_int_eq(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
}

static uint64_t bytes_used(void) {
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    return last.usage.bytes;
}

START_TEST(nothing_is_left_behind) {
    ON_BOTH();
    start(16 << 20);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 1, 1), 0, 4000, 0), ENG_OK);
    uint64_t used = bytes_used();
    for (int i = 0; i < 50; i++)
        ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 1, 1), 0, 4000, 0), ENG_OK);
    ck_assert_uint_eq(bytes_used(), used);
    stop();
    if (!in_redis) // there they end by themselves
        leave_pieces();
    start(16 << 20);
    ck_assert_uint_eq(bytes_used(), used);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 1, 1)), ENG_OK);
    check_state(1, 4000);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 1, 1), 0, 4000, 0), ENG_OK);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 1, 1)), ENG_OK);
    stop();
}
END_TEST

START_TEST(every_byte_altered) {
    ON_BOTH();
    static const char *const tables[] = {"heads", "pieces", "journal"};
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    start(1 << 20);
    uint64_t epoch = lease_of(1, 1, 10000);
    ck_assert_int_eq(put_state(at_position(meta, 3), epoch, 40, 0), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 4), epoch, "abc"), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 5), epoch, "d"), ENG_OK);
    stop();
    size_t altered = 0;
    for (int t = 0; t < 3; t++)
        for (size_t n = 0; alter(tables[t], n); n++, altered++) {
            start(1 << 20);
            eng_status status = fetch(meta);
            ck_assert_msg(status == ENG_FORMAT, "byte %zu of %s: %s", n, tables[t], eng_status_text(status));
            if (t == 0)
                ck_assert_int_eq(append(at_position(meta, 6), lease_of(1, 1, 10000), "no"), ENG_FORMAT);
            stop();
            ck_assert(alter(tables[t], n));
        }
    ck_assert_uint_eq(altered, 328 + 40 + 96 + 3 + 96 + 1);
    start(1 << 20);
    ck_assert_int_eq(fetch(meta), ENG_OK); // nothing of all that changed it
    ck_assert_str_eq(journal(), "4:abc 5:d ");
    stop();
    ck_assert(alter("heads", 100));
    start(1 << 20);
    ck_assert_int_eq(simple(ENG_STORE_LIST, meta_of(ENG_STORE_SESSION, 0, 1)), ENG_OK);
    ck_assert_uint_eq(last.count, 0);
    ck_assert_uint_eq(last.damaged, 1);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta_of(ENG_STORE_SESSION, 1, 2)), ENG_NOT_FOUND);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta), ENG_OK);
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    ck_assert_uint_eq(last.usage.sessions, 0);
    stop();
}
END_TEST

START_TEST(folders_that_are_refused) {
    choose(LMDB);
    eng_store *second;
    eng_error error = {0};
    eng_store_options options = {.place = place, .budget = 16 << 20};
    start(16 << 20);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 1, 1), 0, 2 << 20, 0), ENG_OK);
    ck_assert_int_eq(eng_store_open(&options, &second, &error), ENG_BUSY);
    stop();
    ck_assert_int_eq(truncate(temp_path("store/data.mdb"), 1 << 20), 0);
    ck_assert_int_eq(eng_store_open(&options, &second, NULL), ENG_FORMAT);
    temp_write("store/data.mdb", "this is no database, whatever its name may say, and it is short", 63);
    ck_assert_int_eq(eng_store_open(&options, &second, NULL), ENG_FORMAT);
    options.place = temp_path("no/such/folder");
    ck_assert_int_eq(eng_store_open(&options, &second, NULL), ENG_NOT_FOUND);
    options.place = "http://localhost";
    ck_assert_int_eq(eng_store_open(&options, &second, NULL), ENG_UNSUPPORTED);
    options = (eng_store_options){.place = temp_path("small"), .budget = 1000};
    ck_assert_int_eq(eng_store_open(&options, &second, NULL), ENG_INVALID);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- kills

enum { SESSIONS = 4, KILLS = 100 };

typedef struct progress { // shared with the child: what was acknowledged, and what was asked for last
    volatile int64_t acknowledged[SESSIONS], asked[SESSIONS];
} progress;

static void work_until_killed(progress *p) {
    start(32 << 20);
    uint64_t epoch[SESSIONS];
    for (uint32_t i = 0; i < SESSIONS; i++)
        epoch[i] = lease_of(i, 1, 100000);
    for (uint32_t turn = 0;; turn++) {
        uint32_t i = turn % SESSIONS;
        int64_t next = p->acknowledged[i] + 1;
        eng_store_meta meta = at_position(meta_of(ENG_STORE_SESSION, i, 1), next);
        char text[32];
        snprintf(text, sizeof text, "%u-%d", i, (int)next);
        p->asked[i] = next;
        eng_status status = append(meta, epoch[i], text);
        if (status == ENG_OK)
            p->acknowledged[i] = next;
        if (turn % 7 == 3)
            status = put_state(meta, epoch[i], turn % 2 ? 3000 : 1200000, 0);
        if (status != ENG_OK)
            _exit(1);
    }
}

static int64_t acknowledged(const progress *p) {
    int64_t sum = 0;
    for (int i = 0; i < SESSIONS; i++)
        sum += p->acknowledged[i];
    return sum;
}

static void check_after_kill(const progress *p, int kill) {
    for (uint32_t i = 0; i < SESSIONS; i++) {
        eng_status status = fetch(meta_of(ENG_STORE_SESSION, i, 1));
        if (status == ENG_NOT_FOUND && p->acknowledged[i] == 0)
            continue;
        ck_assert_msg(status == ENG_OK, "kill %d: %s", kill, last.error.text);
        ck_assert_msg(last.meta.position >= p->acknowledged[i] && last.meta.position <= p->asked[i],
                      "kill %d: session %u is at %d, acknowledged %d", kill, i, (int)last.meta.position,
                      (int)p->acknowledged[i]);
        check_state(i, last.meta.payload_bytes);
        size_t at = 0;
        eng_store_entry entry;
        while (eng_store_next_entry(&last, &at, &entry)) {
            char text[32];
            int length = snprintf(text, sizeof text, "%u-%d", i, (int)entry.position);
            ck_assert(entry.length == (size_t)length && memcmp(entry.bytes, text, entry.length) == 0);
        }
    }
}

START_TEST(a_hundred_kills) {
    ON_BOTH();
    progress *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(p, MAP_FAILED);
    srand(7);
    for (int kill_number = 0; kill_number < KILLS; kill_number++) {
        const int64_t before = acknowledged(p);
        pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0)
            work_until_killed(p);
        // At any moment, or when it has got somewhere, which may take a slow machine long.
        for (int i = 0; kill_number % 2 && acknowledged(p) == before; i++) {
            ck_assert_int_lt(i, 100000);
            nap(1000);
        }
        nap(1000 + rand() % 30000);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        ck_assert_msg(WIFSIGNALED(status), "the child ended by itself");
        start(32 << 20);
        check_after_kill(p, kill_number);
        ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
        ck_assert_uint_lt(last.usage.bytes, 7 << 20); // four states and journals: nothing half-written takes room
        for (uint32_t i = 0; i < SESSIONS; i++)       // what was asked for may have happened
            if (fetch(meta_of(ENG_STORE_SESSION, i, 1)) == ENG_OK)
                p->acknowledged[i] = last.meta.position;
        stop();
    }
    ck_assert_int_ge(acknowledged(p), KILLS / 2);
}
END_TEST

static Suite *store_suite(void) {
    Suite *suite = suite_create("store");
    TCase *cases = tcase_create("store");
    tcase_add_checked_fixture(cases, temp_folder_make, redis_server_end);
    tcase_add_loop_test(cases, states_there_and_back, 0, KINDS);
    tcase_add_loop_test(cases, journals, 0, KINDS);
    tcase_add_loop_test(cases, a_journal_is_bounded, 0, KINDS);
    tcase_add_loop_test(cases, one_writer, 0, KINDS);
    tcase_add_loop_test(cases, wishes_are_told, 0, KINDS);
    tcase_add_loop_test(cases, owners_and_lists, 0, KINDS);
    tcase_add_loop_test(cases, the_first_of_many, 0, KINDS);
    tcase_add_loop_test(cases, time_runs_out, 0, KINDS);
    tcase_add_loop_test(cases, a_budget, 0, KINDS);
    tcase_add_test(cases, a_full_disk);
    tcase_add_loop_test(cases, requests_are_bounded, 0, KINDS);
    tcase_add_loop_test(cases, nothing_is_left_behind, 0, KINDS);
    tcase_add_loop_test(cases, every_byte_altered, 0, KINDS);
    tcase_add_test(cases, folders_that_are_refused);
    tcase_add_loop_test(cases, a_hundred_kills, 0, KINDS);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(store_suite)

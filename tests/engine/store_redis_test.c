// SPDX-License-Identifier: Apache-2.0
// A store in Redis where it goes wrong: a server that is killed, hangs, is full, and several stores on one server.
//
// Each case has a redis-server of its own; a few talk to it through a thread that forwards bytes and cuts the
// connection after some of them.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "tests/engine/between.h"
#include "tests/engine/redis_server.h"
#include "tests/engine/store_calls.h"
#include "tests/engine/temp_folder.h"

enum { MIB = 1 << 20 };

// The other of two stores, each with its client and thread, becomes the one that everything below speaks to.
static void swap_stores(void) {
    static eng_store *store_of;
    static eng_store_client *client_of;
    static pthread_t thread_of;
    static eng_store_buffer *buffer_of, *other_of;
#define SWAP(type, a, b) \
    do {                 \
        type kept = a;   \
        a = b;           \
        b = kept;        \
    } while (0)
    SWAP(eng_store *, store, store_of);
    SWAP(eng_store_client *, client, client_of);
    SWAP(pthread_t, thread, thread_of);
    SWAP(eng_store_buffer *, buffer, buffer_of);
    SWAP(eng_store_buffer *, other, other_of);
}

static int64_t clock_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// ------------------------------------------------------------------------------------------------ killed in the middle

enum { SESSIONS = 4, KILLS = 10 };

// Submits one entry for every session, its number as its text.
static void submit_round(const uint64_t *epoch, const int64_t *position) {
    for (uint32_t i = 0; i < SESSIONS; i++) {
        char text[32];
        snprintf(text, sizeof text, "%u-%d", i, (int)position[i] + 1);
        eng_store_request request = {.op = ENG_STORE_APPEND,
                                     .meta = at_position(meta_of(ENG_STORE_SESSION, i, 1), position[i] + 1),
                                     .epoch = epoch[i],
                                     .entry = text,
                                     .entry_bytes = strlen(text)};
        ck_assert_int_eq(eng_store_submit(client, &request, NULL), ENG_OK);
    }
}

static void check_session(uint32_t i, int64_t position) {
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_SESSION, i, 1)), ENG_OK);
    ck_assert_int_eq(last.meta.position, position);
    size_t at = 0;
    eng_store_entry entry;
    int64_t expected = last.meta.state_position;
    while (eng_store_next_entry(&last, &at, &entry)) {
        char text[32];
        int length = snprintf(text, sizeof text, "%u-%d", i, (int)++expected);
        ck_assert(entry.position == expected && entry.length == (size_t)length &&
                  memcmp(entry.bytes, text, entry.length) == 0);
    }
    ck_assert_int_eq(expected, position);
}

START_TEST(a_server_killed_in_the_middle) {
    static const char options[] = "--appendonly yes --appendfsync always";
    uint64_t epoch[SESSIONS];
    int64_t position[SESSIONS] = {0};
    ON_REDIS(options);
    time_limit_ms = 200000;
    start(64 * MIB);
    for (uint32_t i = 0; i < SESSIONS; i++)
        epoch[i] = lease_of(i, 1, 600000);
    srand(3);
    eng_store_gauges gauges = {0};
    for (int n = 0; n < KILLS || (gauges.retries == 0 && n < 100); n++) {
        int64_t until = clock_ms() + rand() % 60;
        bool killed = false;
        for (int round = 0; !killed; round++) {
            submit_round(epoch, position);
            if (clock_ms() >= until) {
                redis_server_kill();
                killed = redis_server_start(options);
            }
            for (int i = 0; i < SESSIONS; i++) {
                eng_store_reply *reply = await();
                ck_assert_msg(reply->status == ENG_OK, "kill %d: %s", n, reply->error.text);
                position[reply->meta.id[3]]++;
                eng_store_done(client, reply);
            }
        }
        uint32_t one = (uint32_t)n % SESSIONS;
        ck_assert_int_eq(put_state(at_position(meta_of(ENG_STORE_SESSION, one, 1), position[one]), epoch[one],
                                   n % 2 ? 5000 : 2000000, 0),
                         ENG_OK);
        for (uint32_t i = 0; i < SESSIONS; i++)
            check_session(i, position[i]);
        eng_store_read_gauges(store, &gauges);
    }
    ck_assert_uint_eq(gauges.failed, 0);
    ck_assert_uint_gt(gauges.retries, 0);
    uint64_t again = lease_of(1, 2, 1000);
    ck_assert_uint_eq(again, 0); // the lease outlived the kills as well
    ck_assert_int_eq(last.status, ENG_BUSY);
    stop();
}
END_TEST

static void await_round(int64_t *position, eng_status expected, uint32_t other_one) {
    for (int i = 0; i < SESSIONS; i++) {
        eng_store_reply *reply = await();
        uint32_t id = reply->meta.id[3];
        eng_status status = id == other_one ? ENG_CONFLICT : expected;
        ck_assert_msg(reply->status == status, "%u: %s", id, reply->error.text);
        position[id] += status == ENG_OK;
        eng_store_done(client, reply);
    }
}

// Writes that come together go together, and each has its own outcome.
START_TEST(writes_in_groups) {
    uint64_t epoch[SESSIONS];
    int64_t position[SESSIONS] = {0};
    ON_REDIS("");
    start(64 * MIB);
    for (uint32_t i = 0; i < SESSIONS; i++)
        epoch[i] = lease_of(i, 1, 600000);
    redisContext *link = redis_server_connect();
    for (int round = 0; round < 40; round++) {
        if (round % 10 == 5)
            freeReplyObject(redis_server_ask(link, "SCRIPT FLUSH"));
        epoch[2] += round % 4 == 3; // which nobody was given
        submit_round(epoch, position);
        await_round(position, ENG_OK, round % 4 == 3 ? 2 : SESSIONS);
        epoch[2] -= round % 4 == 3;
    }
    freeReplyObject(redis_server_ask(link, "CONFIG SET maxmemory 1"));
    submit_round(epoch, position);
    await_round(position, ENG_FULL, SESSIONS);
    freeReplyObject(redis_server_ask(link, "CONFIG SET maxmemory 0"));
    submit_round(epoch, position);
    await_round(position, ENG_OK, SESSIONS);
    for (uint32_t i = 0; i < SESSIONS; i++)
        check_session(i, position[i]);
    ck_assert(position[0] == 41 && position[2] == 31);
    redisReply *stats = redis_server_ask(link, "INFO commandstats");
    ck_assert_ptr_nonnull(strstr(stats->str, "cmdstat_exec:"));
    freeReplyObject(stats);
    redisFree(link);
    stop();
}
END_TEST

// A server that keeps nothing: what it had is gone, the old epoch is good for nothing, and is not given again.
START_TEST(a_server_that_forgets) {
    ON_REDIS("");
    start(64 * MIB);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    uint64_t epoch = lease_of(1, 1, 100000);
    ck_assert_int_eq(append(at_position(meta, 1), epoch, "a"), ENG_OK);
    redis_server_kill();
    redis_server_start("");
    ck_assert_int_eq(append(at_position(meta, 2), epoch, "b"), ENG_CONFLICT);
    uint64_t next = lease_of(1, 1, 100000);
    ck_assert_uint_gt(next, epoch);
    ck_assert_int_eq(fetch(meta), ENG_NOT_FOUND);
    ck_assert_int_eq(append(at_position(meta, 2), next, "c"), ENG_OK);
    stop();
}
END_TEST

// A server that came back without the last second of writes: an entry does not go behind the gap.
START_TEST(acknowledged_and_lost) {
    ON_REDIS("");
    start(64 * MIB);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    static const char key[] = "{mesa}:s0000000100000000000000000000000000000000000000000000000000000000";
    uint64_t epoch = lease_of(1, 1, 100000);
    ck_assert_int_eq(append(at_position(meta, 1), epoch, "a"), ENG_OK);
    redisContext *link = redis_server_connect();
    redisReply *head = redis_server_ask(link, "HGET %s head", key);
    ck_assert_int_eq(append(at_position(meta, 2), epoch, "b"), ENG_OK);
    freeReplyObject(redis_server_ask(link, "HSET %s head %b", key, head->str, head->len));
    freeReplyObject(redis_server_ask(link, "RPOP %s:journal", key));
    freeReplyObject(head);
    redisFree(link);
    ck_assert_int_eq(append(at_position(meta, 3), epoch, "c"), ENG_IO);
    ck_assert_int_eq(put_state(at_position(meta, 3), epoch, 5000, 0), ENG_OK);
    ck_assert_int_eq(append(at_position(meta, 4), epoch, "d"), ENG_OK);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "4:d ");
    stop();
}
END_TEST

// ------------------------------------------------------------------------------------------------------- slow and dead

START_TEST(a_server_that_hangs) {
    ON_REDIS("");
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    time_limit_ms = 200000;
    start(64 * MIB);
    uint64_t epoch = lease_of(1, 1, 100000);
    ck_assert_int_eq(append(at_position(meta, 1), epoch, "a"), ENG_OK);
    stop();
    time_limit_ms = 400;
    start(64 * MIB);
    for (int i = 0; fetch(meta) != ENG_OK; i++)
        ck_assert_msg(i < 250, "%s", last.error.text);
    redis_server_signal(SIGSTOP);
    int64_t before = clock_ms();
    ck_assert_int_eq(append(at_position(meta, 2), epoch, "b"), ENG_IO);
    ck_assert_int_ge(clock_ms() - before, 399);
    ck_assert_int_eq(simple(ENG_STORE_DELETE, meta), ENG_IO);
    ck_assert_int_eq(fetch(meta), ENG_IO);
    ck_assert_uint_ne(strlen(last.error.text), 0);
    redis_server_signal(SIGCONT);
    time_limit_ms = 200000;
    swap_stores();
    start(64 * MIB);
    ck_assert_int_eq(fetch(meta), ENG_OK); // what the server found when it woke up had no effect
    ck_assert_str_eq(journal(), "1:a ");
    ck_assert_int_eq(append(at_position(meta, 2), epoch, "c"), ENG_OK);
    stop();
    swap_stores();
    for (int i = 0; fetch(meta) != ENG_OK; i++) // connected again by itself
        ck_assert_msg(i < 250, "%s", last.error.text);
    ck_assert_str_eq(journal(), "1:a 2:c ");
    redis_server_signal(SIGSTOP);
    eng_store_request request = {.op = ENG_STORE_GET, .meta = meta};
    ck_assert_int_eq(eng_store_submit(client, &request, NULL), ENG_OK);
    eng_store_stop(store);
    pthread_join(thread, NULL); // ends, however the server is
    eng_store_reply *reply = await();
    ck_assert_int_eq(reply->status, ENG_IO);
    eng_store_done(client, reply);
    eng_store_client_close(client);
    eng_store_close(store);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- no room

START_TEST(a_server_without_memory) {
    ON_REDIS("--maxmemory 24mb");
    start(512 * MIB);
    for (uint32_t i = 0; i < 30; i++)
        ck_assert_msg(put_state(meta_of(ENG_STORE_PREFIX, i, 1), 0, i % 3 ? 900000 : 2 * MIB, 0) == ENG_OK, "%u: %s", i,
                      last.error.text);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 29, 1)), ENG_OK);
    check_state(29, 900000);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 0, 1)), ENG_NOT_FOUND);
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_gt(gauges.evicted, 10);
    int kept = 0;
    eng_status status = ENG_OK;
    for (uint32_t i = 0; i < 40 && status == ENG_OK; i++, kept += status == ENG_OK) {
        uint64_t epoch = lease_of(i, 1, 100000);
        status = put_state(at_position(meta_of(ENG_STORE_SESSION, i, 1), 5), epoch, 1500000, 0);
    }
    ck_assert_msg(status == ENG_FULL && strstr(last.error.text, "maxmemory"), "%s", last.error.text);
    ck_assert_int_ge(kept, 8);
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    ck_assert_uint_eq(last.usage.prefixes, 0);
    for (uint32_t i = 0; i < (uint32_t)kept; i++) {
        ck_assert_int_eq(fetch(meta_of(ENG_STORE_SESSION, i, 1)), ENG_OK);
        check_state(i, 1500000);
        ck_assert_int_eq(simple(ENG_STORE_DELETE, meta_of(ENG_STORE_SESSION, i, 1)), ENG_OK);
    }
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    ck_assert_uint_eq(last.usage.bytes, 0);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 50, 1), 0, 2 * MIB, 0), ENG_OK);
    stop();
}
END_TEST

// --------------------------------------------------------------------------------------------------- two on one server

START_TEST(two_stores) {
    ON_REDIS("");
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    start(64 * MIB);
    swap_stores();
    start(16 * MIB);
    uint64_t first = lease_of(1, 1, 600000);
    ck_assert_int_eq(append(at_position(meta, 1), first, "one"), ENG_OK);
    swap_stores();
    ck_assert_uint_eq(lease_of(1, 2, 1000), 0);
    ck_assert_int_eq(last.status, ENG_BUSY);
    ck_assert(last.lease_ms > 0 && last.lease_ms <= 600000);
    swap_stores();
    renew_for(1, 1, first, 500);
    swap_stores();
    uint64_t second = 0;
    for (int i = 0; i < 1000 && !second; i++, nap(20000))
        second = lease_of(1, 2, 600000);
    ck_assert_uint_gt(second, first);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "1:one ");
    swap_stores();
    ck_assert_int_eq(append(at_position(meta, 2), first, "fenced"), ENG_CONFLICT);
    swap_stores();
    ck_assert_int_eq(append(at_position(meta, 2), second, "two"), ENG_OK);
    swap_stores();
    ck_assert_int_eq(append(at_position(meta, 2), first, "late"), ENG_CONFLICT);
    ck_assert_int_eq(put_state(at_position(meta, 2), first, 3 * MIB, 0), ENG_CONFLICT);
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_DELETE, .meta = meta, .epoch = first}), ENG_CONFLICT);
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_RELEASE, .meta = meta, .epoch = first}), ENG_OK);
    ck_assert_int_eq(fetch(meta), ENG_OK);
    ck_assert_str_eq(journal(), "1:one 2:two ");
    for (uint32_t i = 0; i < 20; i++) // of the smaller budget
        ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, i, 1), 0, 1500000, 0), ENG_OK);
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    ck_assert_uint_le(last.usage.bytes, 16 * MIB / 10 * 9);
    uint64_t bytes = last.usage.bytes, prefixes = last.usage.prefixes;
    swap_stores();
    ck_assert_int_eq(simple(ENG_STORE_USAGE, (eng_store_meta){0}), ENG_OK);
    ck_assert(last.usage.bytes == bytes && last.usage.prefixes == prefixes && prefixes == 10);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 0, 1)), ENG_NOT_FOUND);
    ck_assert_int_eq(fetch(meta_of(ENG_STORE_PREFIX, 10, 1)), ENG_OK);
    swap_stores();
    nap(10000);
    stop();
    swap_stores();
    stop();
}
END_TEST

static atomic_bool enough;

static void *replace_always(void *of) {
    eng_store_client *writer = of;
    eng_store_buffer *bytes = eng_store_take_buffer(writer);
    for (int i = 0; !enough; i++) {
        bytes->length = i % 2 ? 2 * MIB : 3 * MIB - 1;
        memset(bytes->bytes, i, bytes->length);
        eng_store_request request = {.op = ENG_STORE_PUT, .meta = meta_of(ENG_STORE_PREFIX, 1, 1), .buffer = bytes};
        if (eng_store_submit(writer, &request, NULL) != ENG_OK)
            return of;
        eng_store_reply *reply;
        while (!(reply = eng_store_poll(writer)))
            nap(100);
        bool well = reply->status == ENG_OK;
        eng_store_done(writer, reply);
        if (!well)
            return of;
    }
    return NULL;
}

// A reader sees one state or the other, whole.
START_TEST(read_while_it_is_replaced) {
    ON_REDIS("");
    start(64 * MIB);
    swap_stores();
    start(64 * MIB);
    ck_assert_int_eq(put_state(meta_of(ENG_STORE_PREFIX, 1, 1), 0, 2 * MIB, 0), ENG_OK);
    eng_store_client *writer;
    eng_store_client_options options = {.requests = 2, .buffers = 1, .buffer_bytes = BUFFER};
    ck_assert_int_eq(eng_store_client_open(store, &options, &writer, NULL), ENG_OK);
    pthread_t replacing;
    void *failed;
    ck_assert_int_eq(pthread_create(&replacing, NULL, replace_always, writer), 0);
    swap_stores();
    int lengths = 0;
    for (int i = 0; i < 100 || (lengths != 3 && i < 10000); i++) {
        ck_assert_msg(fetch(meta_of(ENG_STORE_PREFIX, 1, 1)) == ENG_OK, "%d: %s", i, last.error.text);
        lengths |= last.meta.payload_bytes == 2 * MIB ? 1 : 2;
    }
    enough = true;
    pthread_join(replacing, &failed);
    eng_store_client_close(writer);
    ck_assert_ptr_null(failed);
    ck_assert_int_eq(lengths, 3);
    stop();
    swap_stores();
    stop();
}
END_TEST

// --------------------------------------------------------------------------------------------------------- connections

// Everything that was put is there, nothing else: no key without a time but those of the records.
static void check_keys(uint32_t sessions) {
    redisContext *link = redis_server_connect();
    char cursor[32] = "0";
    size_t states = 0;
    do {
        redisReply *page = redis_server_ask(link, "SCAN %s MATCH {mesa}:s*:* COUNT 1000", cursor);
        snprintf(cursor, sizeof cursor, "%s", page->element[0]->str);
        for (size_t i = 0; i < page->element[1]->elements; i++) {
            const char *key = page->element[1]->element[i]->str;
            redisReply *left = redis_server_ask(link, "PTTL %s", key);
            states += left->integer == -1 && !strstr(key, ":journal");
            freeReplyObject(left);
        }
        freeReplyObject(page);
    } while (strcmp(cursor, "0") != 0);
    ck_assert_uint_eq(states, sessions);
    redisFree(link);
}

START_TEST(connections_that_are_cut) {
    ON_REDIS("");
    between b = {.forwards = true, .cuts = 25, .seed = 11};
    place = between_start(&b);
    time_limit_ms = 200000;
    start(64 * MIB);
    uint64_t epoch[3];
    for (uint32_t i = 0; i < 3; i++)
        ck_assert((epoch[i] = lease_of(i, 1, 600000)) > 0);
    for (int64_t turn = 1; b.cuts > 0 && turn < 400; turn++) {
        uint32_t i = (uint32_t)turn % 3;
        eng_store_meta meta = at_position(meta_of(ENG_STORE_SESSION, i, 1), turn);
        ck_assert_msg(append(meta, epoch[i], "entry") == ENG_OK, "%s", last.error.text);
        ck_assert_msg(put_state(meta, epoch[i], turn % 2 ? 2 * MIB + 5 : 700000, 0) == ENG_OK, "%s", last.error.text);
        ck_assert_msg(append(at_position(meta, turn + 1), epoch[i], "more") == ENG_OK, "%s", last.error.text);
        ck_assert_msg(fetch(meta) == ENG_OK, "%s", last.error.text);
        check_state(i, turn % 2 ? 2 * MIB + 5 : 700000);
        ck_assert_uint_eq(strlen(journal()), strlen(":more ") + (size_t)snprintf(NULL, 0, "%d", (int)turn + 1));
        ck_assert_int_eq(simple(ENG_STORE_DELETE, meta), ENG_OK);
        ck_assert((epoch[i] = lease_of(i, 1, 600000)) > 0);
        ck_assert_int_eq(append(at_position(meta, turn), epoch[i], "left"), ENG_OK);
        ck_assert_int_eq(put_state(meta, epoch[i], 2 * MIB, 0), ENG_OK);
    }
    ck_assert_int_eq(b.cuts, 0);
    stop();
    between_end(&b);
    check_keys(3);
}
END_TEST

// What a server answers is believed in nothing: no fault but a status, and what is stored stays right.
START_TEST(answers_that_are_altered) {
    ON_REDIS("");
    const char *server = place;
    between b = {.forwards = true, .alters = true, .seed = 5};
    place = between_start(&b);
    time_limit_ms = 300;
    start(64 * MIB);
    int well = 0, put = 0;
    for (int turn = 1; turn < 25 || ((well < 11 || put == 0) && turn < 400); turn++) {
        eng_store_meta meta = at_position(meta_of(ENG_STORE_SESSION, 1, 1), turn);
        uint64_t epoch = lease_of(1, 1, 600000);
        eng_status status[] = {
            last.status,
            append(meta, epoch ? epoch : 1, "entry"),
            put_state(meta, epoch ? epoch : 1, turn % 4 ? 3000 : 2 * MIB, 0), // 2
            simple(ENG_STORE_LIST, meta_of(ENG_STORE_SESSION, 0, 1)),
            simple(ENG_STORE_USAGE, (eng_store_meta){0}),
            call((eng_store_request){
                .op = ENG_STORE_FIND, .meta = meta, .entry = meta.id, .entry_bytes = sizeof meta.id}),
            fetch(meta)};
        put += status[2] == ENG_OK;
        if (last.status == ENG_OK)
            check_state(1, last.meta.payload_bytes);
        for (size_t i = 0; i < sizeof status / sizeof *status; i++, well += last.status == ENG_OK)
            ck_assert_msg(status[i] == ENG_OK || status[i] == ENG_IO || status[i] == ENG_FORMAT ||
                              status[i] == ENG_CONFLICT || status[i] == ENG_NOT_FOUND || status[i] == ENG_FULL,
                          "%s", eng_status_text(status[i]));
    }
    stop();
    between_end(&b);
    ck_assert_int_gt(well, 10);
    place = server;
    time_limit_ms = 200000;
    start(64 * MIB);
    ck_assert_msg(fetch(meta_of(ENG_STORE_SESSION, 1, 1)) == ENG_OK, "%s", last.error.text);
    check_state(1, last.meta.payload_bytes);
    stop();
}
END_TEST

static int64_t time_left(redisContext *link, const char *what) {
    redisReply *left =
        redis_server_ask(link, "PTTL {mesa}:s0000000100000000000000000000000000000000000000000000000000000000%s", what);
    int64_t ms = left->integer;
    freeReplyObject(left);
    return ms;
}

// Also where nobody sweeps, a record ends; but not while its lease lives.
START_TEST(records_end_by_themselves) {
    ON_REDIS("");
    start(64 * MIB);
    eng_store_meta meta = meta_of(ENG_STORE_SESSION, 1, 1);
    uint64_t epoch = lease_of(1, 1, 1000);
    ck_assert_int_eq(put_state(at_position(meta, 1), epoch, 100, 5000), ENG_OK);
    redisContext *link = redis_server_connect();
    ck_assert(time_left(link, "") > 60000 && time_left(link, "") <= 65000);
    eng_store_request renew = {.op = ENG_STORE_LEASE, .meta = meta, .epoch = epoch, .ttl_ms = 200000, .holder = {1}};
    ck_assert_int_eq(call(renew), ENG_OK);
    ck_assert(time_left(link, "") > 250000 && time_left(link, "") <= 260000);
    ck_assert_int_eq(append(at_position(meta, 2), epoch, "x"), ENG_OK); // ttl 0: never
    ck_assert_int_eq(time_left(link, ""), -1);
    ck_assert_int_eq(time_left(link, ":journal"), -1);
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_EXPIRE, .meta = meta, .ttl_ms = 1}), ENG_OK);
    nap(1300000); // a sweep has passed
    ck_assert_int_eq(fetch(meta), ENG_NOT_FOUND);
    ck_assert(time_left(link, "") > 0 && time_left(link, ":journal") > 0);
    ck_assert_int_eq(call((eng_store_request){.op = ENG_STORE_RELEASE, .meta = meta, .epoch = epoch}), ENG_OK);
    for (int i = 0; time_left(link, "") != -2; i++, nap(20000))
        ck_assert_int_lt(i, 1000);
    redisFree(link);
    stop();
}
END_TEST

// A process that is killed in the middle of a state leaves nothing that stays.
START_TEST(a_process_killed_in_the_middle) {
    ON_REDIS("");
    srand(5);
    for (int n = 0; n < 8; n++) {
        pid_t child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0) {
            start(64 * MIB);
            for (uint64_t epoch = lease_of(1, 1, 600000); epoch;)
                if (put_state(at_position(meta_of(ENG_STORE_SESSION, 1, 1), n), epoch, 3 * MIB, 0) != ENG_OK)
                    break;
            _exit(1);
        }
        nap(20000 + rand() % 20000);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        ck_assert_msg(WIFSIGNALED(status), "the child ended by itself");
    }
    start(64 * MIB);
    if (fetch(meta_of(ENG_STORE_SESSION, 1, 1)) == ENG_OK) {
        check_state(1, 3 * MIB);
        check_keys(1);
    } else {
        check_keys(0);
    }
    stop();
}
END_TEST

static Suite *store_redis_suite(void) {
    Suite *suite = suite_create("store_redis");
    TCase *cases = tcase_create("store_redis");
    tcase_add_checked_fixture(cases, temp_folder_make, redis_server_end);
    tcase_add_test(cases, a_server_killed_in_the_middle);
    tcase_add_test(cases, writes_in_groups);
    tcase_add_test(cases, a_server_that_forgets);
    tcase_add_test(cases, acknowledged_and_lost);
    tcase_add_test(cases, a_server_that_hangs);
    tcase_add_test(cases, a_server_without_memory);
    tcase_add_test(cases, two_stores);
    tcase_add_test(cases, read_while_it_is_replaced);
    tcase_add_test(cases, connections_that_are_cut);
    tcase_add_test(cases, answers_that_are_altered);
    tcase_add_test(cases, records_end_by_themselves);
    tcase_add_test(cases, a_process_killed_in_the_middle);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(store_redis_suite)

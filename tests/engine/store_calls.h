// SPDX-License-Identifier: Apache-2.0
// One store and one client of it, for the suites about stores: a request is submitted and its reply awaited.
//
// Everything is static, for a case is a process of its own. A case says where its store is (place) and starts it; the
// store's thread is the test's, as it would be a program's.
#ifndef TESTS_ENGINE_STORE_CALLS_H
#define TESTS_ENGINE_STORE_CALLS_H

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "engine/store.h"
#include "tests/check_main.h"

enum { BUFFER = 4 << 20 };

static const char *place;
static int32_t time_limit_ms;
static eng_store *store;
static eng_store_client *client;
static pthread_t thread;
static eng_store_buffer *buffer, *other;

static inline void nap(long microseconds) {
    nanosleep(&(struct timespec){.tv_sec = microseconds / 1000000, .tv_nsec = microseconds % 1000000 * 1000}, NULL);
}

static inline void *live(void *of) {
    eng_store_run(of);
    return NULL;
}

static inline void start(uint64_t budget) {
    eng_store_options how = {.place = place, .budget = budget, .time_limit_ms = time_limit_ms};
    ck_assert_int_eq(eng_store_open(&how, &store, NULL), ENG_OK);
    eng_store_client_options options = {.requests = 8, .buffers = 2, .buffer_bytes = BUFFER};
    ck_assert_int_eq(eng_store_client_open(store, &options, &client, NULL), ENG_OK);
    buffer = eng_store_take_buffer(client);
    other = eng_store_take_buffer(client);
    ck_assert(buffer && other && !eng_store_take_buffer(client));
    ck_assert_int_eq(pthread_create(&thread, NULL, live, store), 0);
}

static inline void stop(void) {
    eng_store_stop(store);
    pthread_join(thread, NULL);
    eng_store_client_close(client);
    eng_store_close(store);
}

static inline eng_store_reply *await(void) {
    eng_store_reply *reply;
    for (int i = 0; !(reply = eng_store_poll(client)); i++) {
        ck_assert_msg(i < 2000000, "no reply");
        nap(50);
    }
    return reply;
}

static eng_store_reply last; // its list is not kept
static eng_store_meta listed[ENG_STORE_PAGE];

static inline eng_status call(eng_store_request request) {
    eng_error error = {0};
    eng_status status = eng_store_submit(client, &request, &error);
    ck_assert_msg(status == ENG_OK, "%s", error.text);
    eng_store_reply *reply = await();
    last = *reply;
    if (reply->count)
        memcpy(listed, reply->list, sizeof *listed * reply->count);
    eng_store_done(client, reply);
    ck_assert_int_eq(last.status == ENG_OK, last.error.code == ENG_OK);
    return last.status;
}

static inline eng_store_meta meta_of(eng_store_kind kind, uint32_t id, int owner) {
    eng_store_meta meta = {.kind = kind, .fingerprint = {7}, .profile = {8}, .note = {9}};
    for (int i = 0; i < 4; i++)
        meta.id[i] = (unsigned char)(id >> (24 - 8 * i));
    meta.owner[0] = (unsigned char)owner;
    return meta;
}

static inline eng_store_meta at_position(eng_store_meta meta, int64_t position) {
    meta.position = position;
    meta.tail_count = 1;
    meta.tail = (int32_t)position;
    return meta;
}

// A lease that is held for so long from now on.
static inline void renew_for(uint32_t id, int holder, uint64_t epoch, int64_t ttl_ms) {
    eng_store_request request = {
        .op = ENG_STORE_LEASE, .meta = meta_of(ENG_STORE_SESSION, id, 1), .ttl_ms = ttl_ms, .epoch = epoch};
    request.holder[0] = (unsigned char)holder;
    ck_assert_int_eq(call(request), ENG_OK);
}

static inline uint64_t lease_of(uint32_t id, int holder, int64_t ttl_ms) {
    eng_store_request request = {.op = ENG_STORE_LEASE, .meta = meta_of(ENG_STORE_SESSION, id, 1), .ttl_ms = ttl_ms};
    request.holder[0] = (unsigned char)holder;
    return call(request) == ENG_OK ? last.epoch : 0;
}

// Bytes that tell their record and their place.
static inline unsigned char byte_at(uint32_t id, size_t i) {
    uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15u ^ (id + 1) * 0xff51afd7ed558ccdu;
    return (unsigned char)(mixed >> 40);
}

static inline eng_status put_state(eng_store_meta meta, uint64_t epoch, size_t length, int64_t ttl_ms) {
    uint32_t id = (uint32_t)meta.id[2] << 8 | meta.id[3];
    for (size_t i = 0; i < length; i++)
        buffer->bytes[i] = byte_at(id, i);
    buffer->length = length;
    return call(
        (eng_store_request){.op = ENG_STORE_PUT, .meta = meta, .epoch = epoch, .buffer = buffer, .ttl_ms = ttl_ms});
}

static inline eng_status append(eng_store_meta meta, uint64_t epoch, const char *text) {
    return call((eng_store_request){
        .op = ENG_STORE_APPEND, .meta = meta, .epoch = epoch, .entry = text, .entry_bytes = strlen(text)});
}

static inline eng_status simple(eng_store_op op, eng_store_meta meta) {
    return call((eng_store_request){.op = op, .meta = meta});
}

static inline eng_status fetch(eng_store_meta meta) {
    meta.fingerprint[0] = 0;
    return call((eng_store_request){.op = ENG_STORE_GET, .meta = meta, .buffer = other});
}

static inline void check_state(uint32_t id, size_t length) {
    ck_assert_uint_eq(last.meta.payload_bytes, length);
    for (size_t i = 0; i < length; i++)
        if (other->bytes[i] != byte_at(id, i))
            ck_abort_msg("byte %zu of %u differs", i, id);
}

// The journal of the last GET as "POSITION:TEXT " one after another.
static inline const char *journal(void) {
    static char text[512];
    size_t at = 0, length = 0;
    eng_store_entry entry;
    text[0] = 0;
    while (eng_store_next_entry(&last, &at, &entry))
        length += (size_t)snprintf(text + length, sizeof text - length, "%d:%.*s ", (int)entry.position,
                                   (int)entry.length, (const char *)entry.bytes);
    return text;
}

#endif

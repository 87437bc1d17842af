// SPDX-License-Identifier: Apache-2.0
// The parts of stored.h.
//
// The store's thread is the test's own, as it would be a program's.
#include "tests/engine/stored.h"

#include <check.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "engine/durable_internal.h"
#include "engine/engine_internal.h"
#include "tests/engine/mixer_variants.h"
#include "tests/engine/redis_server.h"
#include "tests/engine/straight.h"
#include "tests/engine/temp_folder.h"

eng_store *store;
static pthread_t store_thread;
static bool store_runs;

// -------------------------------------------------------------------------------------------------------------- stores

static bool has_server;

bool start_server(void) {
    has_server = redis_server_start("--appendonly yes --appendfsync always");
    return has_server;
}

void end_case(void) {
    redis_server_kill();
    temp_folder_remove();
}

const char *outside(void) {
    if (has_server)
        return redis_server_place();
    const char *place = getenv("MESA_TEST_STORE");
    return place && place[0] ? place : NULL;
}

static void *run_store(void *of) {
    eng_store_run(of);
    return NULL;
}

static void open_by(eng_store_options options) {
    eng_error error = {0};
    options.place = outside() ? outside() : temp_path("store");
    ck_assert_msg(eng_store_open(&options, &store, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(pthread_create(&store_thread, NULL, run_store, store), 0);
    store_runs = true;
}

void open_store(uint64_t budget) {
    open_by((eng_store_options){.budget = budget});
}

void open_hasty_store(int32_t time_limit_ms) {
    open_by((eng_store_options){.time_limit_ms = time_limit_ms});
}

void stop_store(void) {
    if (!store_runs)
        return;
    eng_store_stop(store);
    ck_assert_int_eq(pthread_join(store_thread, NULL), 0);
    store_runs = false;
}

void close_store(void) {
    stop_store();
    eng_store_close(store);
}

static int64_t lease_ms(void) {
    return outside() && !has_server ? LEASE_MS : HOUR_MS;
}

static eng_engine *be_patient(eng_engine *engine) {
    if (engine->durable)
        engine->durable->wait_ms = HOUR_MS;
    return engine;
}

eng_engine *open_mixer(int variant, bool stored) {
    return be_patient(
        open_model(&mixer_variants[variant], "variant", false,
                   (eng_options){.max_rows = ROWS, .store = stored ? store : NULL, .lease_ms = lease_ms()}));
}

eng_engine *open_letters(eng_options options) {
    options.max_rows = ROWS;
    options.lease_ms = options.lease_ms ? options.lease_ms : lease_ms();
    return be_patient(open_model(&small_models[SMALL_MESA], "letters", true, options));
}

void pass(int64_t ms) {
    const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

void go(eng_engine *engine) {
    if (!step(engine))
        pass(1);
}

// ------------------------------------------------------------------------------------------------------------- errands

static void take(void *user, const eng_answer *answer) {
    answered *out = user;
    out->times++;
    out->answer = *answer;
    snprintf(out->message, sizeof out->message, "%s", answer->message);
    for (size_t i = 0; i < answer->count; i++)
        out->list[i] = answer->list[i];
}

void send_errand(eng_engine *engine, eng_errand errand, answered *out) {
    eng_error error = {0};
    *out = (answered){0};
    errand.done = take;
    errand.user = out;
    ck_assert_msg(eng_send(engine, &errand, &error) == ENG_OK, "%s", error.text);
}

const answered *ask(eng_engine *engine, eng_errand errand) {
    static answered out;
    send_errand(engine, errand, &out);
    while (out.times == 0)
        go(engine);
    ck_assert_int_eq(out.times, 1);
    ck_assert_int_eq(out.answer.kind, errand.kind);
    return &out;
}

const answered *must(eng_engine *engine, eng_errand errand) {
    const answered *out = ask(engine, errand);
    ck_assert_msg(out->answer.status == ENG_OK, "errand %d: %s", (int)errand.kind, out->message);
    return out;
}

void refused(eng_engine *engine, eng_errand errand, eng_status want, const char *naming) {
    const answered *out = ask(engine, errand);
    ck_assert_msg(out->answer.status == want, "errand %d: %d, not %d: %s", (int)errand.kind, out->answer.status, want,
                  out->message);
    ck_assert_msg(strstr(out->message, naming) != NULL, "'%s' lacks '%s'", out->message, naming);
}

eng_name name_of(uint32_t id, uint32_t owner) {
    static unsigned char salt[ENG_NAME_BYTES];
    eng_name name = {{0}, {0}};
    if (salt[0] == 0)
        while (getrandom(salt, sizeof salt, 0) != (ssize_t)sizeof salt || salt[0] == 0) {
        }
    memcpy(name.id, salt, sizeof salt);
    memcpy(name.owner, salt, sizeof salt);
    for (int i = 0; i < 4; i++) {
        name.id[4 + i] = (unsigned char)(id >> 8 * (3 - i));
        name.owner[4 + i] = (unsigned char)(owner >> 8 * i);
    }
    return name;
}

eng_errand about(eng_errand_kind kind, uint32_t id) {
    return (eng_errand){.kind = kind, .name = name_of(id, OWNER), .owner = OWNER, .ttl_ms = HOUR_MS};
}

eng_errand keep_errand(uint64_t timeline, uint32_t id) {
    eng_errand errand = about(ENG_ERRAND_KEEP, id);
    errand.timeline = timeline;
    memcpy(errand.note, "a note of the program's", 24);
    return errand;
}

uint64_t create(eng_engine *engine) {
    uint64_t id;
    ck_assert_int_eq(eng_timeline_create(engine, OWNER, &id, NULL), ENG_OK);
    return id;
}

uint64_t keep(eng_engine *engine, uint64_t timeline, uint32_t id) {
    const answered *out = must(engine, keep_errand(timeline, id));
    ck_assert_uint_eq(out->answer.timeline, timeline);
    ck_assert_int_eq(out->answer.record.position, info_of(engine, timeline).position);
    ck_assert(info_of(engine, timeline).durable);
    return timeline;
}

uint64_t fetch(eng_engine *engine, uint32_t id) {
    const answered *out;
    do
        out = ask(engine, about(ENG_ERRAND_FETCH, id));
    while (out->answer.status == ENG_BUSY);
    ck_assert_msg(out->answer.status == ENG_OK, "%s", out->message);
    ck_assert_mem_eq(out->answer.record.note, "a note of the program's", 24);
    ck_assert_int_eq(out->answer.record.ttl_ms, HOUR_MS);
    const eng_timeline_info info = info_of(engine, out->answer.timeline);
    ck_assert(info.named && info.durable && !info.busy && info.position == out->answer.record.position);
    return out->answer.timeline;
}

void park(eng_engine *engine, uint32_t id) {
    must(engine, about(ENG_ERRAND_PARK, id));
}

// On the case's own server, so that nobody has to wait for those of the dead.
static void end_leases(void) {
    redisContext *link = redis_server_connect();
    redisReply *keys = redis_server_ask(link, "KEYS {mesa}:*:lease");
    for (size_t i = 0; i < keys->elements; i++)
        freeReplyObject(redis_server_ask(link, "HSET %s until 0", keys->element[i]->str));
    freeReplyObject(keys);
    redisFree(link);
}

void kill_all(eng_engine *engine) {
    stop_store();
    eng_close(engine);
    close_store();
    if (has_server)
        end_leases();
}

// --------------------------------------------------------------------------------------------------------------- twins

outcome *finish(eng_engine *engine, outcome *out) {
    while (out->finals == 0)
        go(engine);
    return out;
}

outcome *turn(eng_engine *engine, uint64_t id, const int32_t *ids, size_t count, int64_t drawn) {
    static outcome out[2];
    static int which;
    outcome *its = &out[which++ % 2];
    submit(engine, turn_of(engine, id, ids, count, drawn), its);
    finish(engine, its);
    ck_assert_msg(its->finish == ENG_FINISH_LENGTH, "%s", its->message);
    ck_assert(!info_of(engine, id).busy);
    return its;
}

void alike(const outcome *got, const outcome *want, const char *what) {
    ck_assert_uint_eq(got->id_count, want->id_count);
    ck_assert_int_eq(got->position, want->position);
    for (size_t i = 0; i < got->id_count; i++)
        ck_assert_msg(got->ids[i] == want->ids[i] && memcmp(&got->logprobs[i], &want->logprobs[i], sizeof(float)) == 0,
                      "%s, token %zu: %d at %.9g, not %d at %.9g", what, i, got->ids[i], (double)got->logprobs[i],
                      want->ids[i], (double)want->logprobs[i]);
}

void both(const twins *t, uint64_t seed, int32_t count, int32_t drawn, const char *what) {
    int32_t ids[256];
    plain_ids(seed, ids, count);
    const outcome *got = turn(t->engine, t->id, ids, (size_t)count, drawn);
    ck_assert_msg(got->durable, "%s", what);
    ck_assert_int_eq(got->position, info_of(t->engine, t->id).position);
    alike(got, turn(t->plain, t->twin, ids, (size_t)count, drawn), what);
}

void both_back(const twins *t, int64_t position) {
    ck_assert_int_eq(eng_timeline_rollback(t->engine, OWNER, t->id, position, NULL), ENG_OK);
    ck_assert_int_eq(eng_timeline_rollback(t->plain, OWNER, t->twin, position, NULL), ENG_OK);
}

void wait_durable(eng_engine *engine, uint64_t id) {
    while (!info_of(engine, id).durable)
        go(engine);
}

twins begin_letters(uint32_t id) {
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store}), .plain = open_letters((eng_options){0})};
    t.id = keep(t.engine, create(t.engine), id);
    t.twin = create(t.plain);
    return t;
}

void die_and_rise(twins *t, uint32_t id) {
    kill_all(t->engine);
    open_store(0);
    t->engine = open_letters((eng_options){.store = store});
    t->id = fetch(t->engine, id);
    ck_assert_int_eq(info_of(t->engine, t->id).position, info_of(t->plain, t->twin).position);
}

void end_both(twins *t) {
    eng_close(t->engine);
    eng_close(t->plain);
    close_store();
}

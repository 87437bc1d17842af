// SPDX-License-Identifier: Apache-2.0
// What prompts have in common, in a store: an engine that is new, or another one, begins from it with the bits of an
// answer that was read from nothing; of what is damaged, of somebody else or of other knobs nothing is begun from; and
// whatever becomes of the store, answers come as without it.
//
// The answers that are right come from an engine without a store that keeps nothing. Most cases run on a folder and on
// a redis-server of their own. Chunks are short (cpu:16).
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "engine/prefix_store_internal.h"
#include "tests/check_main.h"
#include "tests/engine/mixer_variants.h"
#include "tests/engine/redis_server.h"
#include "tests/engine/reply.h"
#include "tests/engine/stored.h"
#include "tests/engine/straight.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

enum { DRAWN = 3, LEAST = 32, PREFIX_BUDGET = 1 << 28 };

#define ON_BOTH()                   \
    if (_i == 1 && !start_server()) \
    MESA_TEST_SKIP("no redis-server is installed")

static const unsigned char somebody[ENG_NAME_BYTES] = {1, 2, 3}, another[ENG_NAME_BYTES] = {1, 2, 4};

// -------------------------------------------------------------------------------------------------------- both engines

typedef struct both_engines {
    eng_engine *cold, *warm;
} both_engines;

static eng_engine *open_warm(const small_model *model, eng_options options) {
    options.store = store;
    options.max_rows = 8;
    options.prefix_budget = options.prefix_budget ? options.prefix_budget : PREFIX_BUDGET;
    options.store_prefixes = LEAST;
    eng_engine *engine = open_model(model, "model", false, options);
    ck_assert_ptr_nonnull(engine->prefix_store);
    engine->prefix_store->wait_ms = HOUR_MS; // until the store has answered, however busy the machine
    return engine;
}

static both_engines open_engines(const small_model *model) {
    open_store(0);
    return (both_engines){.cold = open_model(model, "model", false, (eng_options){.max_rows = 1}),
                          .warm = open_warm(model, (eng_options){0})};
}

static void restart(both_engines *engines, const small_model *model) {
    eng_close(engines->warm);
    close_store();
    open_store(0);
    engines->warm = open_warm(model, (eng_options){0});
}

static void close_engines(both_engines engines) {
    eng_close(engines.cold);
    eng_close(engines.warm);
    close_store();
}

static eng_request asking(const eng_engine *engine, const int32_t *ids, int32_t count) {
    eng_request request = greedy(engine, ids, (size_t)count, DRAWN);
    request.ignore_eos = true;
    request.logprobs = 0;
    request.owner = OWNER;
    request.owner_name = somebody;
    return request;
}

static void listen(eng_engine *engine, const reply *to) {
    while (to->finish == ENG_FINISH_NONE)
        if (!reply_step(engine))
            pass(1);
}

// And whatever goes to the store is there.
static void settle(eng_engine *engine) {
    const eng_prefix_store *stored = engine->prefix_store;
    while (reply_step(engine) || stored->underway > 0 || stored->writes > 0)
        pass(1);
}

static const reply *answer_to(eng_engine *engine, eng_request request) {
    static reply to;
    reply_ask(engine, request, &to);
    listen(engine, &to);
    if (engine->prefix_store)
        settle(engine);
    return &to;
}

static int32_t below(const eng_engine *engine, int32_t count) {
    return (count - 1) / eng_info(engine)->chunk * eng_info(engine)->chunk;
}

static void check(both_engines engines, eng_request request, int64_t cached, const char *what) {
    static reply want;
    want = *answer_to(engines.cold, request);
    const reply *got = answer_to(engines.warm, request);
    reply_same(got, &want, what);
    ck_assert_msg(got->usage.cached_tokens == cached, "%s: %ld cached, not %ld", what, (long)got->usage.cached_tokens,
                  (long)cached);
}

// Twice: the second begins from what the first left, and so it goes to the store.
static void share(both_engines engines, eng_request request) {
    const uint64_t before = gauges_of(engines.warm).prefix_stored;
    check(engines, request, 0, "at first");
    check(engines, request, below(engines.warm, (int32_t)request.count), "again");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, before + 1);
}

// ----------------------------------------------------------------------------------------------------------- the cases

START_TEST(another_life_begins_from_it) {
    const small_model *model = &mixer_variants[_i];
    int32_t ids[120];
    both_engines engines = open_engines(model);
    const eng_request request = asking(engines.warm, ids, 83);
    plain_ids(1, ids, 120);
    share(engines, request);
    restart(&engines, model);
    check(engines, request, below(engines.warm, 83), model->name);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched, 1);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, 0); // it is there
    check(engines, asking(engines.warm, ids, 120), below(engines.warm, 83), "what goes on behind it");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched, 1);
    close_engines(engines);
}
END_TEST

// Engines of two stores, as two servers have them; of what the store has the deepest is taken that the prompt shares.
START_TEST(another_engine_begins_from_it) {
    ON_BOTH();
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[400], other[400];
    both_engines engines = open_engines(model);
    eng_engine *replica = open_warm(model, (eng_options){0});
    const both_engines there = {.cold = engines.cold, .warm = replica};
    plain_ids(1, ids, 400);
    memcpy(other, ids, sizeof ids);
    for (int i = 250; i < 400; i++)
        other[i] = 2 + (ids[i] + 1) % 20;
    share(engines, asking(engines.warm, ids, 83));
    share(engines, asking(engines.warm, other + 1, 90));
    check(engines, asking(engines.warm, ids, 300), below(replica, 83), "which goes on");
    check(engines, asking(engines.warm, ids, 300), below(replica, 300), "which goes on, again");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, 3);
    check(there, asking(replica, ids, 300), below(replica, 300), "the same");
    check(there, asking(replica, other, 400), below(replica, 83), "which parts between two");
    ck_assert_uint_eq(gauges_of(replica).prefix_fetched, 2);
    ck_assert_uint_eq(gauges_of(replica).prefix_damaged, 0);
    eng_close(replica);
    close_engines(engines);
}
END_TEST

// One fetches, and all begin from it.
START_TEST(a_crowd_fetches_once) {
    ON_BOTH();
    enum { CROWD = 12 };
    static reply to[CROWD];
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[600];
    both_engines engines = open_engines(model);
    const eng_request request = asking(engines.warm, ids, 200);
    plain_ids(1, ids, 600);
    share(engines, request);
    static reply want[CROWD];
    for (int i = 0; i < CROWD; i++)
        want[i] = *answer_to(engines.cold, asking(engines.cold, ids, 200 + i / 2 * 70));
    restart(&engines, model);
    for (int i = 0; i < CROWD; i++) // two equal ones, and others that go on
        reply_ask(engines.warm, asking(engines.warm, ids, 200 + i / 2 * 70), &to[i]);
    for (int i = 0; i < CROWD; i++) {
        listen(engines.warm, &to[i]);
        reply_same(&to[i], &want[i], "of a crowd");
        ck_assert_int_ge(to[i].usage.cached_tokens, below(engines.warm, 200));
    }
    settle(engines.warm);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched, 1);
    // Who does not wait for the answer any more leaves nothing behind.
    restart(&engines, model);
    eng_cancel(engines.warm, reply_ask(engines.warm, request, &to[0]));
    settle(engines.warm);
    ck_assert_uint_eq(gauges_of(engines.warm).queued_requests, 0);
    reply_ask(engines.warm, request, &to[0]); // nor who is cut off by the end
    close_engines(engines);
}
END_TEST

START_TEST(it_is_its_owners_its_knobs_and_its_profiles_alone) {
    ON_BOTH();
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[100];
    both_engines engines = open_engines(model);
    eng_request request = asking(engines.warm, ids, 100);
    plain_ids(1, ids, 100);
    share(engines, request);
    restart(&engines, model);
    eng_request others = request;
    others.owner_name = another;
    check(engines, others, 0, "of another owner");
    others.owner_name = NULL; // which is nobody's beyond this process
    check(engines, others, 0, "without a name");
    check(engines, others, below(engines.warm, 100), "without a name, again");
    others = request;
    others.knobs.cg_tolerance = 0.5F;
    check(engines, others, 0, "with other knobs");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched + gauges_of(engines.warm).prefix_stored, 0);
    check(engines, request, below(engines.warm, 100), "of its owner");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched, 1);
    others = request;
    others.logprobs = 1;
    others.prompt_logprobs = true;
    check(engines, others, 0, "with logprobs that are not there");
    restart(&engines, model);
    engines.warm->key.profile[0] ^= 1; // other kernels, say
    check(engines, request, 0, "under another profile");
    engines.warm->key.profile[0] ^= 1;
    request.owner = 1000; // which is the name's matter
    check(engines, request, below(engines.warm, 100), "its own");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched, 1);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_damaged, 0);
    close_engines(engines);
}
END_TEST

START_TEST(what_is_short_or_nobodys_stays_here) {
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[100];
    both_engines engines = open_engines(model);
    plain_ids(1, ids, 100);
    check(engines, asking(engines.warm, ids, LEAST), 0, "short");
    check(engines, asking(engines.warm, ids, LEAST), below(engines.warm, LEAST), "short, again");
    check(engines, asking(engines.warm, ids + 1, 100 - 1), 0, "read once");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, 0);
    close_engines(engines);
    open_store(0);
    eng_engine *engine = open_model(model, "model", false, (eng_options){.store = store, .prefix_budget = 1 << 20});
    ck_assert_ptr_null(engine->prefix_store);
    eng_close(engine);
    engine = open_model(model, "model", false, (eng_options){.store = store, .store_prefixes = 1});
    ck_assert_ptr_null(engine->prefix_store);
    eng_close(engine);
    close_store();
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- damage

// The record behind the last chunk, with a byte changed and digests that are right.
static void alter_record(both_engines engines, eng_request request, size_t from_end) {
    const int32_t last = below(engines.warm, (int32_t)request.count);
    eng_store_client *client;
    eng_chain chain;
    const eng_store_client_options options = {.buffers = 1, .buffer_bytes = 4 << 20};
    ck_assert_int_eq(eng_store_client_open(store, &options, &client, NULL), ENG_OK);
    ck_assert_int_eq(eng_prefix_root(engines.warm->prefix, 0, request.owner_name, &request.knobs, &chain), ENG_OK);
    while (chain.read < last)
        ck_assert(eng_prefix_extend(engines.warm->prefix, &chain, request.ids));
    eng_store_request ask = eng_prefix_store_about(ENG_STORE_GET, request.owner_name, chain.digest);
    ask.buffer = eng_store_take_buffer(client);
    for (int i = 0; i < 2; i++) {
        eng_store_reply *reply;
        ck_assert_int_eq(eng_store_submit(client, &ask, NULL), ENG_OK);
        while (!(reply = eng_store_poll(client)))
            pass(1);
        ck_assert_msg(reply->status == ENG_OK, "%s", reply->error.text);
        ask.op = ENG_STORE_PUT;
        ask.meta = reply->meta;
        const size_t length = ask.buffer->length;
        ask.buffer->bytes[from_end ? length - from_end : 192 + 32 + 4] ^= 1; // of the state, or of an id
        eng_store_done(client, reply);
    }
    eng_store_client_close(client);
}

static uint64_t records(void) {
    eng_store_client *client;
    eng_store_reply *reply;
    ck_assert_int_eq(eng_store_client_open(store, &(eng_store_client_options){0}, &client, NULL), ENG_OK);
    ck_assert_int_eq(eng_store_submit(client, &(eng_store_request){.op = ENG_STORE_USAGE}, NULL), ENG_OK);
    while (!(reply = eng_store_poll(client)))
        pass(1);
    const uint64_t prefixes = reply->usage.prefixes;
    eng_store_done(client, reply);
    eng_store_client_close(client);
    return prefixes;
}

static void count_warnings(void *context, eng_log_level level, const char *text) {
    *(int *)context += level == ENG_LOG_WARNING && strstr(text, "deleted");
}

static void found_and_deleted(both_engines *engines, eng_request request) {
    int warnings = 0;
    ck_assert_uint_eq(records(), 1);
    eng_close(engines->warm);
    engines->warm =
        open_warm(&small_models[SMALL_MESA], (eng_options){.log = count_warnings, .log_context = &warnings});
    check(*engines, request, 0, "what is damaged");
    ck_assert_int_eq(warnings, 1);
    ck_assert_uint_eq(gauges_of(engines->warm).prefix_damaged, 1);
    ck_assert_uint_eq(gauges_of(engines->warm).prefix_fetched, 0);
    ck_assert_uint_eq(records(), 0);
    check(*engines, request, below(engines->warm, (int32_t)request.count), "what was read again"); // goes there again
    ck_assert_uint_eq(records(), 1);
    restart(engines, &small_models[SMALL_MESA]);
    check(*engines, request, below(engines->warm, (int32_t)request.count), "and is well");
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_eq(gauges.failed, 0); // sessions are not concerned
}

START_TEST(what_is_damaged_is_deleted) {
    ON_BOTH();
    int32_t ids[100];
    both_engines engines = open_engines(&small_models[SMALL_MESA]);
    const eng_request request = asking(engines.warm, ids, 100);
    plain_ids(1, ids, 100);
    share(engines, request);
    alter_record(engines, request, 0);
    found_and_deleted(&engines, request);
    if (_i == 1) { // behind the store's back
        redisContext *link = redis_server_connect();
        redisReply *keys = redis_server_ask(link, "KEYS {mesa}:p*:*");
        ck_assert_uint_eq(keys->elements, 1);
        freeReplyObject(redis_server_ask(link, "HSET %s 0 nonsense", keys->element[0]->str));
        freeReplyObject(keys);
        redisFree(link);
        found_and_deleted(&engines, request);
    }
    close_engines(engines);
}
END_TEST

// With digests that are right only reading again finds it.
START_TEST(what_an_audit_finds_wrong_is_deleted) {
    ON_BOTH();
    int32_t ids[100];
    both_engines engines = open_engines(&small_models[SMALL_MESA]);
    const eng_request request = asking(engines.warm, ids, 100);
    plain_ids(1, ids, 100);
    share(engines, request);
    alter_record(engines, request, 101);
    eng_close(engines.warm);
    engines.warm = open_warm(&small_models[SMALL_MESA], (eng_options){.prefix_audit = 1});
    const reply *got = answer_to(engines.warm, request);
    ck_assert_int_eq(got->usage.cached_tokens, below(engines.warm, 100));
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_mismatches, 1);
    ck_assert_uint_eq(records(), 0);
    check(engines, request, 0, "after the audit");
    check(engines, request, below(engines.warm, 100), "after the audit, again");
    ck_assert_uint_eq(records(), 0); // whatever is kept here, the store is left alone
    close_engines(engines);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------- no room

// Whoever was begun from last is there.
START_TEST(a_small_store_keeps_what_was_used_last) {
    ON_BOTH();
    enum { PROMPTS = 40, COUNT = 2000 };
    static int32_t ids[COUNT];
    const small_model *model = &small_models[SMALL_MESA];
    open_store(1 << 20);
    both_engines engines = {.cold = open_model(model, "model", false, (eng_options){.max_rows = 1}),
                            .warm = open_warm(model, (eng_options){0})};
    const int32_t last = below(engines.warm, COUNT);
    for (int i = 0; i < PROMPTS; i++) {
        plain_ids((uint64_t)i, ids, COUNT);
        const eng_request request = asking(engines.warm, ids, COUNT);
        answer_to(engines.warm, request);
        ck_assert_int_eq(answer_to(engines.warm, request)->usage.cached_tokens, last);
    }
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, PROMPTS);
    ck_assert_uint_lt(records(), PROMPTS);
    ck_assert_uint_ge(records(), 1);
    eng_close(engines.warm);
    engines.warm = open_warm(model, (eng_options){0});
    check(engines, asking(engines.warm, ids, COUNT), last, "the last");
    plain_ids(0, ids, COUNT);
    check(engines, asking(engines.warm, ids, COUNT), 0, "the first");
    close_engines(engines);
}
END_TEST

// Sessions have filled it: nothing of a prefix goes there, and nothing else is the worse for it.
START_TEST(a_full_store_takes_none) {
    ON_BOTH();
    const size_t large = (size_t)(_i ? 955 : 890) << 10; // what a session may take, and leaves a snapshot nothing
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[100];
    eng_store_client *client;
    eng_store_reply *reply;
    open_store(1 << 20);
    both_engines engines = {.cold = open_model(model, "model", false, (eng_options){.max_rows = 1}),
                            .warm = open_warm(model, (eng_options){0})};
    const eng_store_client_options options = {.buffers = 1, .buffer_bytes = large};
    ck_assert_int_eq(eng_store_client_open(store, &options, &client, NULL), ENG_OK);
    eng_store_request ask = {.op = ENG_STORE_LEASE, .meta = {.kind = ENG_STORE_SESSION, .id = {1}}, .ttl_ms = HOUR_MS};
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(eng_store_submit(client, &ask, NULL), ENG_OK);
        while (!(reply = eng_store_poll(client)))
            pass(1);
        ck_assert_msg(reply->status == ENG_OK, "%s", reply->error.text);
        ask.op = ENG_STORE_PUT;
        ask.epoch = reply->epoch;
        ask.buffer = i == 0 ? eng_store_take_buffer(client) : NULL;
        if (ask.buffer)
            memset(ask.buffer->bytes, 7, ask.buffer->length = large);
        eng_store_done(client, reply);
    }
    eng_store_client_close(client);
    plain_ids(1, ids, 100);
    for (int i = 0; i < 3; i++)
        check(engines, asking(engines.warm, ids, 100), i ? below(engines.warm, 100) : 0, "with a full store");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, 0);
    ck_assert_uint_eq(records(), 0);
    eng_store_gauges gauges;
    eng_store_read_gauges(store, &gauges);
    ck_assert_uint_eq(gauges.failed, 0);
    close_engines(engines);
}
END_TEST

// A budget that holds no state, but more than none.
START_TEST(what_finds_no_room_here_is_read) {
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[100];
    both_engines engines = open_engines(model);
    const eng_request request = asking(engines.warm, ids, 100);
    plain_ids(1, ids, 100);
    share(engines, request);
    eng_close(engines.warm);
    engines.warm = open_warm(model, (eng_options){.prefix_budget = 4096});
    check(engines, request, 0, "without room");
    check(engines, request, 0, "without room, again");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_fetched, 0);
    close_engines(engines);
}
END_TEST

// ------------------------------------------------------------------------------------------------------ a store that

// One prompt waits a moment, and none after it; nothing waits for a write; what comes late is of use later.
START_TEST(does_not_answer) {
    if (!start_server())
        MESA_TEST_SKIP("no redis-server is installed");
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[100], other[100];
    both_engines engines = open_engines(model);
    const eng_request request = asking(engines.warm, ids, 100);
    plain_ids(1, ids, 100);
    plain_ids(2, other, 100);
    share(engines, request);
    restart(&engines, model);
    check(engines, asking(engines.warm, other, 100), 0, "of others");
    redis_server_signal(SIGSTOP);
    engines.warm->prefix_store->wait_ms = 1;
    static reply got, want;
    want = *answer_to(engines.cold, request);
    reply_ask(engines.warm, request, &got);
    ck_assert_int_ge(eng_idle_ms(engines.warm), 0);
    listen(engines.warm, &got);
    reply_same(&got, &want, "of a store that is silent");
    ck_assert_int_eq(got.usage.cached_tokens, 0);
    engines.warm->prefix_store->wait_ms = HOUR_MS;
    want = *answer_to(engines.cold, asking(engines.warm, ids + 1, 99));
    reply_ask(engines.warm, asking(engines.warm, ids + 1, 99), &got); // and would wait for an hour
    listen(engines.warm, &got);
    reply_same(&got, &want, "of a store that stays silent");
    want = *answer_to(engines.cold, asking(engines.warm, other, 100));
    reply_ask(engines.warm, asking(engines.warm, other, 100),
              &got); // begins from what is here, and that is to be written
    listen(engines.warm, &got);
    reply_same(&got, &want, "with a write that waits");
    ck_assert_int_eq(got.usage.cached_tokens, below(engines.warm, 100));
    ck_assert(engines.warm->prefix_store->silent);
    redis_server_signal(SIGCONT);
    settle(engines.warm);
    ck_assert(!engines.warm->prefix_store->silent);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, 1);
    redis_server_signal(SIGSTOP);
    engines.warm->prefix_store->silent = true; // what was asked has failed
    want = *answer_to(engines.cold, asking(engines.warm, ids + 2, 98));
    reply_ask(engines.warm, asking(engines.warm, ids + 2, 98), &got); // it is asked, and not waited for
    ck_assert_ptr_nonnull(engines.warm->prefix_store->lookups);
    listen(engines.warm, &got);
    reply_same(&got, &want, "of a store that was silent");
    redis_server_signal(SIGCONT);
    settle(engines.warm);
    ck_assert(!engines.warm->prefix_store->silent);
    close_engines(engines);
}
END_TEST

START_TEST(has_stopped) {
    const small_model *model = &small_models[SMALL_MESA];
    int32_t ids[100];
    both_engines engines = open_engines(model);
    const eng_request request = asking(engines.warm, ids, 100);
    plain_ids(1, ids, 100);
    stop_store();
    check(engines, request, 0, "without a store");
    check(engines, request, below(engines.warm, 100), "without a store, again");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_stored, 0);
    close_engines(engines);
}
END_TEST

static Suite *prefix_store_suite(void) {
    Suite *suite = suite_create("prefix_store");
    TCase *mixers = tcase_create("every mixer"), *found = tcase_create("what is found"),
          *wrong = tcase_create("what is wrong"), *room = tcase_create("room"), *without = tcase_create("a store that");
    TCase *const all[] = {mixers, found, wrong, room, without};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        tcase_add_checked_fixture(all[i], temp_folder_make, end_case);
        tcase_set_timeout(all[i], 120);
        suite_add_tcase(suite, all[i]);
    }
    tcase_add_loop_test(mixers, another_life_begins_from_it, 0, MIXER_VARIANTS);
    tcase_add_loop_test(found, another_engine_begins_from_it, 0, 2);
    tcase_add_loop_test(found, a_crowd_fetches_once, 0, 2);
    tcase_add_loop_test(found, it_is_its_owners_its_knobs_and_its_profiles_alone, 0, 2);
    tcase_add_test(found, what_is_short_or_nobodys_stays_here);
    tcase_add_loop_test(wrong, what_is_damaged_is_deleted, 0, 2);
    tcase_add_loop_test(wrong, what_an_audit_finds_wrong_is_deleted, 0, 2);
    tcase_add_loop_test(room, a_small_store_keeps_what_was_used_last, 0, 2);
    tcase_add_loop_test(room, a_full_store_takes_none, 0, 2);
    tcase_add_test(room, what_finds_no_room_here_is_read);
    tcase_add_test(without, does_not_answer);
    tcase_add_test(without, has_stopped);
    return suite;
}

DEVICE_TEST_MAIN(prefix_store_suite)

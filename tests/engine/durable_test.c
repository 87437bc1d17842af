// SPDX-License-Identifier: Apache-2.0
// Timelines that outlive the process: parked, closed, killed, rolled back, cancelled; each goes on with the bits of a
// twin that was never let go, from the position that was acknowledged last.
//
// Errands, leases and room: durable_errand_test.c.
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/durable_internal.h"
#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/mixer_variants.h"
#include "tests/engine/stored.h"
#include "tests/engine/straight.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

// --------------------------------------------------------------------------------------------------------- every mixer

START_TEST(parked_closed_and_killed_it_goes_on) {
    const char *what = mixer_variants[_i].name;
    open_store(0);
    twins t = {.engine = open_mixer(_i, true), .plain = open_mixer(_i, false)};
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    both(&t, 1, 19, 4, what);
    park(t.engine, 1); // so few ids are read again
    ck_assert_uint_eq(gauges_of(t.engine).timelines, 0);
    ck_assert_uint_eq(gauges_of(t.engine).states_stored, 0);
    t.id = fetch(t.engine, 1);
    both(&t, 2, 75, 3, what);
    park(t.engine, 1);
    ck_assert_uint_eq(gauges_of(t.engine).states_stored, 1);
    eng_close(t.engine);
    close_store();
    open_store(0);
    t.engine = open_mixer(_i, true);
    t.id = fetch(t.engine, 1);
    ck_assert_int_eq(info_of(t.engine, t.id).earliest, 0);
    both(&t, 3, 0, 3, what);
    both(&t, 4, 5, 2, what);
    kill_all(t.engine); // behind the state lies a journal
    open_store(0);
    t.engine = open_mixer(_i, true);
    t.id = fetch(t.engine, 1);
    both(&t, 5, 0, 2, what);
    both_back(&t, 30); // before the state
    both(&t, 6, 3, 2, what);
    kill_all(t.engine);
    open_store(0);
    t.engine = open_mixer(_i, true);
    t.id = fetch(t.engine, 1);
    both(&t, 7, 2, 2, what);
    end_both(&t);
}
END_TEST

// -------------------------------------------------------------------------------------------------------- what is kept

START_TEST(an_empty_timeline_is_there_after_a_kill) {
    twins t = begin_letters(1);
    die_and_rise(&t, 1);
    ck_assert_int_eq(info_of(t.engine, t.id).position, 0);
    both(&t, 1, 20, 3, "from nothing");
    end_both(&t);
}
END_TEST

START_TEST(what_was_before_the_name_is_kept_too) {
    int32_t ids[200];
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store}), .plain = open_letters((eng_options){0})};
    t.id = create(t.engine);
    t.twin = create(t.plain);
    plain_ids(1, ids, 200);
    ck_assert(!turn(t.engine, t.id, ids, 200, 3)->durable);
    turn(t.plain, t.twin, ids, 200, 3);
    keep(t.engine, t.id, 1);
    die_and_rise(&t, 1);
    both(&t, 2, 4, 3, "after a late name");
    end_both(&t);
}
END_TEST

START_TEST(going_back_is_stored_as_well) {
    twins t = begin_letters(1);
    both(&t, 1, 40, 6, "before");
    static const int64_t back[] = {45, 44, 40, 39, 17, 0};
    for (size_t i = 0; i < sizeof back / sizeof *back; i++) {
        both_back(&t, back[i]);
        must(t.engine, keep_errand(t.id, 1));
        die_and_rise(&t, 1);
        both(&t, 10 + i, 3, 3, "after a rollback that was kept");
        both_back(&t, back[i]);
        both(&t, 20 + i, 2, 1, "after one that was not");
        die_and_rise(&t, 1);
        while (step(t.engine)) {
        }
        both_back(&t, back[i]);
        ck_assert_int_le(eng_idle_ms(t.engine), ENG_DURABLE_TICK_MS); // which is when it is stored
        wait_durable(t.engine, t.id);
        die_and_rise(&t, 1);
        both(&t, 30 + i, 46 - (int32_t)back[i], 0, "behind it");
        both_back(&t, 46);
    }
    end_both(&t);
}
END_TEST

// The last id waits as the tail, is cut off, and another takes its place: nothing but the id tells them apart.
START_TEST(another_tail_is_another_timeline) {
    int32_t ids[1] = {'a'};
    outcome other;
    twins t = begin_letters(1);
    both(&t, 1, 20, 4, "before");
    for (int i = 0; i < 2; i++) {
        eng_engine *engine = i ? t.plain : t.engine;
        uint64_t id = i ? t.twin : t.id;
        ck_assert_int_eq(eng_timeline_rollback(engine, OWNER, id, 23, NULL), ENG_OK);
        eng_request request = turn_of(engine, id, ids, 0, 1);
        eng_logit_bias ban = {.id = eng_timelines_find(engine->timelines, OWNER, id, NULL)->ids[23], .bias = -INFINITY};
        request.biases = &ban;
        request.bias_count = 1;
        submit(engine, request, &other);
        ck_assert_int_eq(finish(engine, &other)->position, 24);
    }
    die_and_rise(&t, 1);
    both(&t, 2, 3, 3, "with another tail");
    end_both(&t);
}
END_TEST

START_TEST(what_was_cut_or_cancelled_is_not_there) {
    static outcome out[2];
    int32_t ids[30];
    twins t = begin_letters(1);
    plain_ids(3, ids, 30);
    for (size_t told = 0; told < 4; told++) {
        for (int i = 0; i < 2; i++) {
            eng_engine *engine = i ? t.plain : t.engine;
            submit(engine, turn_of(engine, i ? t.twin : t.id, ids, 30, 40), &out[i]);
            while (out[i].id_count < told)
                step(engine);
            eng_cancel(engine, out[i].id);
        }
        wait_durable(t.engine, t.id);
        die_and_rise(&t, 1);
        both(&t, 4, 2, 3, "after a cancellation");
    }
    char stop[2] = {0};
    both_back(&t, 0);
    const outcome *full = turn(t.plain, t.twin, ids, 30, 12);
    stop[0] = full->text[6];
    ck_assert_int_eq(eng_timeline_rollback(t.plain, OWNER, t.twin, 0, NULL), ENG_OK);
    for (int i = 0; i < 2; i++) {
        eng_engine *engine = i ? t.plain : t.engine;
        eng_request request = turn_of(engine, i ? t.twin : t.id, ids, 30, 12);
        request.stops = &(eng_text){stop, 1};
        request.stop_count = 1;
        submit(engine, request, &out[i]);
        ck_assert_int_eq(finish(engine, &out[i])->finish, ENG_FINISH_STOP);
    }
    ck_assert(out[0].durable);
    alike(&out[0], &out[1], "a stop string");
    eng_request request = turn_of(t.engine, t.id, ids, 3, 4);
    request.timeline_returns = true;
    submit(t.engine, request, &out[0]);
    ck_assert(finish(t.engine, &out[0])->durable);
    die_and_rise(&t, 1);
    both(&t, 5, 2, 3, "after a stop string and a request that returned");
    end_both(&t);
}
END_TEST

// While its last event waits for the store, which does not come to it.
START_TEST(cancelled_while_it_is_stored) {
    static outcome out;
    int32_t ids[30];
    twins t = begin_letters(1);
    plain_ids(3, ids, 30);
    both(&t, 1, 5, 2, "before");
    stop_store();
    submit(t.engine, turn_of(t.engine, t.id, ids, 30, 3), &out);
    for (int i = 0; i < 40 && out.finals == 0; i++)
        go(t.engine);
    ck_assert(out.finals == 1 && !out.durable); // refused at once: nothing to wait for
    ck_assert_int_eq(info_of(t.engine, t.id).position, 40);
    eng_close(t.engine);
    close_store();
    open_store(0);
    t.engine = open_letters((eng_options){.store = store});
    t.id = fetch(t.engine, 1);
    ck_assert_int_eq(info_of(t.engine, t.id).position, 7); // what was acknowledged
    both(&t, 2, 4, 2, "from the last that was acknowledged");
    submit(t.engine, turn_of(t.engine, t.id, ids, 3, 2), &out);
    while (gauges_of(t.engine).running + gauges_of(t.engine).queued_requests > 0)
        step(t.engine);
    if (out.finals == 0) { // only two of its ids, at most, are told
        const int64_t told = out.id_count > 0 ? 16 + (int64_t)out.id_count : 13;
        ck_assert(info_of(t.engine, t.id).busy);
        eng_cancel(t.engine, out.id);
        ck_assert_int_eq(info_of(t.engine, t.id).position, told);
        wait_durable(t.engine, t.id);
        kill_all(t.engine);
        open_store(0);
        t.engine = open_letters((eng_options){.store = store});
        t.id = fetch(t.engine, 1);
        ck_assert_int_eq(info_of(t.engine, t.id).position, told);
        ck_assert_int_eq(eng_timeline_rollback(t.engine, OWNER, t.id, 13, NULL), ENG_OK);
        both(&t, 3, 4, 2, "after a cancellation");
    }
    end_both(&t);
}
END_TEST

START_TEST(a_short_history_stays_what_it_is) {
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store, .session_history = 50}),
               .plain = open_letters((eng_options){.session_history = 50})};
    t.id = keep(t.engine, create(t.engine), 1);
    t.twin = create(t.plain);
    for (int i = 0; i < 6; i++)
        both(&t, 1 + (uint64_t)i, 18, 2, "long");
    ck_assert_int_eq(info_of(t.engine, t.id).earliest, 79);
    park(t.engine, 1);
    t.id = fetch(t.engine, 1);
    ck_assert_int_eq(info_of(t.engine, t.id).earliest, 79);
    both_back(&t, 90);
    both(&t, 9, 4, 3, "in what is known of it");
    kill_all(t.engine);
    open_store(0);
    t.engine = open_letters((eng_options){.store = store, .session_history = 50});
    t.id = fetch(t.engine, 1);
    both(&t, 10, 70, 3, "after a kill");
    both(&t, 11, 0, 3, "without a prompt");
    end_both(&t);
}
END_TEST

static int64_t stored_state(const twins *t) {
    return eng_timelines_find(t->engine->timelines, OWNER, t->id, NULL)->named->has.state;
}

START_TEST(states_follow_long_journals) {
    static int32_t ids[5000];
    twins t = begin_letters(1);
    plain_ids(1, ids, 5000);
    for (int i = 0; i < 2; i++)
        turn(i ? t.plain : t.engine, i ? t.twin : t.id, ids, 5000, 2);
    while (gauges_of(t.engine).states_stored == 0)
        go(t.engine);
    ck_assert_int_eq(stored_state(&t), 5001);
    both(&t, 2, 100, 2, "behind the state");
    for (int i = 0; i < 300; i++)
        go(t.engine);
    ck_assert_uint_eq(gauges_of(t.engine).states_stored, 1); // nothing presses
    die_and_rise(&t, 1);
    ck_assert_int_eq(stored_state(&t), 5001);
    both(&t, 3, 20, 2, "after a kill");
    ck_assert_uint_eq(gauges_of(t.engine).states_stored, 0);
    both_back(&t, 5000); // below the state
    must(t.engine, keep_errand(t.id, 1));
    ck_assert_int_eq(stored_state(&t), 0);
    both(&t, 4, 20, 2, "below a state");
    while (stored_state(&t) == 0) // another is put: the ids are too many
        go(t.engine);
    die_and_rise(&t, 1);
    both(&t, 5, 20, 2, "after another kill");
    end_both(&t);
}
END_TEST

// What the store did, its reply calls unknown.
static void take_as_unknown(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    waiter->take = eng_named_take_write;
    reply->status = ENG_IO;
    waiter->take(durable, waiter, reply);
}

START_TEST(a_write_that_may_have_happened_does_no_harm) {
    int32_t ids[40];
    twins t = begin_letters(1);
    both(&t, 1, 20, 2, "before");
    for (int whole = 0; whole < 2; whole++) {
        eng_named *named = eng_timelines_find(t.engine->timelines, OWNER, t.id, NULL)->named;
        named->writing.take = take_as_unknown;
        named->whole = whole;
        plain_ids(2, ids, 40);
        ck_assert(!turn(t.engine, t.id, ids, 20, 2)->durable);
        turn(t.plain, t.twin, ids, 20, 2);
        both_back(&t, 22 + 12 * whole); // the next write is another
        turn(t.engine, t.id, ids + 20, 10, 2);
        turn(t.plain, t.twin, ids + 20, 10, 2);
        wait_durable(t.engine, t.id);
        die_and_rise(&t, 1);
    }
    both(&t, 3, 20, 2, "after");
    end_both(&t);
}
END_TEST

// An entry in a record that is not there any more, but for the entry.
static void take_as_alone(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    waiter->take = eng_named_take_write;
    reply->meta.payload_bytes = 0;
    waiter->take(durable, waiter, reply);
}

START_TEST(an_entry_does_not_stand_alone) {
    twins t = begin_letters(1);
    both(&t, 1, 20, 2, "before");
    eng_named *named = eng_timelines_find(t.engine->timelines, OWNER, t.id, NULL)->named;
    named->writing.take = take_as_alone;
    both(&t, 2, 20, 2, "by the whole");
    ck_assert_uint_eq(named->has.bytes, 0); // there is no journal behind it
    die_and_rise(&t, 1);
    both(&t, 3, 20, 2, "after a kill");
    end_both(&t);
}
END_TEST

START_TEST(another_profile_is_told) {
    twins t = begin_letters(1);
    both(&t, 1, 20, 2, "before");
    t.engine->key.profile[0] ^= 1; // as an engine elsewhere has it
    both(&t, 2, 5, 2, "elsewhere");
    t.engine->key.profile[0] ^= 1;
    die_and_rise(&t, 1);
    ck_assert(info_of(t.engine, t.id).profile_changed);
    must(t.engine, keep_errand(t.id, 1));
    both(&t, 3, 100, 2, "here");
    park(t.engine, 1); // all of it is this profile's now, but for how it began
    t.id = fetch(t.engine, 1);
    ck_assert(info_of(t.engine, t.id).profile_changed);
    end_both(&t);
}
END_TEST

START_TEST(a_state_that_is_too_large_is_read_again) {
    twins t = begin_letters(1);
    t.engine->durable->buffer_bytes = ENG_STORE_JOURNAL_BYTES + 4096;
    both(&t, 1, 200, 2, "before");
    park(t.engine, 1);
    ck_assert_uint_eq(gauges_of(t.engine).states_stored, 0);
    t.id = fetch(t.engine, 1);
    ck_assert_int_eq(stored_state(&t), 0);
    both(&t, 2, 20, 2, "after");
    end_both(&t);
}
END_TEST

START_TEST(an_import_is_kept_when_asked) {
    void *bytes = NULL;
    size_t count = 0;
    twins t = begin_letters(1);
    both(&t, 1, 30, 3, "before");
    uint64_t other = create(t.plain);
    int32_t ids[90];
    plain_ids(7, ids, 90);
    turn(t.plain, other, ids, 90, 4);
    ck_assert_int_eq(eng_timeline_export(t.plain, OWNER, other, &bytes, &count, NULL), ENG_OK);
    ck_assert_int_eq(eng_timeline_import(t.engine, OWNER, t.id, bytes, count, NULL), ENG_OK);
    ck_assert_int_eq(eng_timeline_import(t.plain, OWNER, t.twin, bytes, count, NULL), ENG_OK);
    eng_free(bytes);
    must(t.engine, keep_errand(t.id, 1));
    die_and_rise(&t, 1);
    both(&t, 2, 4, 3, "what was imported");
    end_both(&t);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------------- hunt

static uint32_t draw(uint64_t *at) {
    uint32_t word[4];
    eng_philox(11, 4, (*at)++, word);
    return word[0];
}

// One timeline and its twin: turns, cancellations, ways back, parking and kills at random.
START_TEST(no_order_of_events_loses_anything) {
    static outcome out[2];
    int32_t ids[64];
    uint64_t at = (uint64_t)_i * 10000;
    twins t = begin_letters(1);
    for (int round = 0; round < 40; round++) {
        uint32_t what = draw(&at) % 6, seed = draw(&at), count = 1 + draw(&at) % 40, drawn = draw(&at) % 6;
        size_t told = draw(&at) % 3;
        int64_t position = info_of(t.engine, t.id).position;
        if (what <= 1)
            both(&t, seed, (int32_t)count, (int32_t)drawn, "at random");
        if (what == 2) {
            both_back(&t, draw(&at) % (uint32_t)(position + 1));
            if (draw(&at) % 2)
                must(t.engine, keep_errand(t.id, 1));
        }
        if (what == 3) {
            plain_ids(seed, ids, 64);
            for (int i = 0; i < 2; i++) {
                eng_engine *engine = i ? t.plain : t.engine;
                submit(engine, turn_of(engine, i ? t.twin : t.id, ids, count, 30), &out[i]);
                while (out[i].id_count < told)
                    step(engine);
                eng_cancel(engine, out[i].id);
            }
        }
        if (what == 4) {
            park(t.engine, 1);
            t.id = fetch(t.engine, 1);
        }
        ck_assert_int_eq(info_of(t.engine, t.id).position, info_of(t.plain, t.twin).position);
        if (what == 5 || draw(&at) % 4 == 0) {
            wait_durable(t.engine, t.id);
            die_and_rise(&t, 1);
        }
    }
    both(&t, 1, 9, 4, "at the end");
    end_both(&t);
}
END_TEST

// -------------------------------------------------------------------------------------------------------------- kill
// -9

// What comes next depends on the position alone.
static outcome *next_turn(eng_engine *engine, uint64_t id) {
    int32_t ids[24];
    const int64_t position = info_of(engine, id).position;
    const int32_t count = 1 + (int32_t)(position % 23);
    plain_ids((uint64_t)position + 1, ids, count);
    return turn(engine, id, ids, (size_t)count, 1 + position % 4);
}

// In a process of its own: makes the timeline, or goes on with it and tells every position that was acknowledged.
static pid_t live_apart(bool make, int tell) {
    const pid_t child = fork();
    ck_assert_int_ge(child, 0);
    if (child > 0)
        return child;
    open_store(0);
    eng_engine *engine = open_letters((eng_options){.store = store});
    uint64_t id = make ? keep(engine, create(engine), 1) : fetch(engine, 1);
    while (!make) {
        const outcome *out = next_turn(engine, id);
        if (!out->durable || write(tell, &out->position, sizeof out->position) != sizeof out->position)
            _exit(1);
    }
    eng_close(engine);
    close_store();
    _exit(0);
}

// Reads until that many have come, or no more will.
static void hear(int tell, int least, int64_t *last) {
    for (int64_t told; least > 0 && read(tell, &told, sizeof told) == sizeof told; least--) {
        ck_assert_int_gt(told, *last);
        *last = told;
    }
}

START_TEST(killed_at_any_moment_it_is_what_was_acknowledged) {
    enum { KILLS = 10 };
    uint64_t at = 0;
    int64_t last = 0;
    int status;
    if (!test_device_is_cpu())
        return;        // which no process can be started beside
    name_of(1, OWNER); // drawn here, for all of them
    ck_assert_int_eq(waitpid(live_apart(true, -1), &status, 0) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0, 1);
    for (int i = 0; i < KILLS; i++) {
        int pipes[2];
        ck_assert_int_eq(pipe(pipes), 0);
        const pid_t child = live_apart(false, pipes[1]);
        close(pipes[1]);
        hear(pipes[0], 1 + (int)(draw(&at) % 3), &last);
        pass(draw(&at) % 12);
        ck_assert_int_eq(kill(child, SIGKILL), 0);
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert(WIFSIGNALED(status));
        hear(pipes[0], INT32_MAX, &last);
        close(pipes[0]);
    }
    open_store(0);
    twins t = {.engine = open_letters((eng_options){.store = store}), .plain = open_letters((eng_options){0})};
    t.id = fetch(t.engine, 1);
    t.twin = create(t.plain);
    const int64_t position = info_of(t.engine, t.id).position;
    ck_assert_int_ge(position, last);
    while (info_of(t.plain, t.twin).position < position)
        next_turn(t.plain, t.twin);
    ck_assert_int_eq(info_of(t.plain, t.twin).position, position); // whole turns
    both(&t, 1, 20, 4, "after kills");
    end_both(&t);
}
END_TEST

static Suite *durable_suite(void) {
    Suite *suite = suite_create("durable");
    TCase *mixers = tcase_create("every mixer"), *kept = tcase_create("what is kept"), *hunt = tcase_create("hunt");
    TCase *const all[] = {mixers, kept, hunt};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        tcase_add_checked_fixture(all[i], temp_folder_make, temp_folder_remove);
        tcase_set_timeout(all[i], 120);
        suite_add_tcase(suite, all[i]);
    }
    tcase_add_loop_test(mixers, parked_closed_and_killed_it_goes_on, 0, MIXER_VARIANTS);
    tcase_add_test(kept, an_empty_timeline_is_there_after_a_kill);
    tcase_add_test(kept, what_was_before_the_name_is_kept_too);
    tcase_add_test(kept, going_back_is_stored_as_well);
    tcase_add_test(kept, another_tail_is_another_timeline);
    tcase_add_test(kept, what_was_cut_or_cancelled_is_not_there);
    tcase_add_test(kept, cancelled_while_it_is_stored);
    tcase_add_test(kept, a_short_history_stays_what_it_is);
    tcase_add_test(kept, states_follow_long_journals);
    tcase_add_test(kept, a_write_that_may_have_happened_does_no_harm);
    tcase_add_test(kept, an_entry_does_not_stand_alone);
    tcase_add_test(kept, another_profile_is_told);
    tcase_add_test(kept, a_state_that_is_too_large_is_read_again);
    tcase_add_test(kept, an_import_is_kept_when_asked);
    tcase_add_test(hunt, killed_at_any_moment_it_is_what_was_acknowledged);
    tcase_add_loop_test(hunt, no_order_of_events_loses_anything, 0, 3);
    return suite;
}

DEVICE_TEST_MAIN(durable_suite)

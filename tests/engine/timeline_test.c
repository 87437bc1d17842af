// SPDX-License-Identifier: Apache-2.0
// Timelines: whatever happens to one between two requests - parked on the host, forked, cut, cancelled, taken out as
// bytes, its states gone for want of room - it goes on with the bits of a session that was never let go.
//
// What is right comes from the batch itself, which is fed the ids by the way they were read. Chunks are short (cpu:16).
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/mixer_variants.h"
#include "tests/engine/straight.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

enum { ROWS = 3 };

static eng_engine *open_variant(int variant) {
    return open_model(&mixer_variants[variant], "variant", false, (eng_options){.max_rows = ROWS});
}

static eng_engine *open_letters(eng_options options) {
    if (options.max_rows == 0)
        options.max_rows = ROWS;
    return open_model(&small_models[SMALL_MESA], "letters", true, options);
}

static uint64_t create(eng_engine *engine) {
    uint64_t id;
    ck_assert_int_eq(eng_timeline_create(engine, OWNER, &id, NULL), ENG_OK);
    return id;
}

static uint64_t fork_at(eng_engine *engine, uint64_t id, int64_t position) {
    uint64_t fork;
    eng_error error = {0};
    ck_assert_msg(eng_timeline_fork(engine, OWNER, id, position, &fork, &error) == ENG_OK, "%s", error.text);
    return fork;
}

static void drop(eng_engine *engine, uint64_t id) {
    ck_assert_int_eq(eng_timeline_drop(engine, OWNER, id, NULL), ENG_OK);
}

static void run_all(eng_engine *engine) {
    while (step(engine)) {
    }
}

static const outcome *turn(eng_engine *engine, uint64_t id, const int32_t *ids, size_t count, int64_t max_tokens) {
    static outcome out;
    submit(engine, turn_of(engine, id, ids, count, max_tokens), &out);
    run_all(engine);
    ck_assert_msg(out.finals == 1 && out.finish == ENG_FINISH_LENGTH, "%s", out.message);
    ck_assert(!info_of(engine, id).busy);
    return &out;
}

// ------------------------------------------------------------------------------------------------------- every mixer

static void check_turn(eng_engine *engine, uint64_t id, const int32_t *ids, int32_t count, int32_t drawn,
                       const char *what) {
    static straight_answer want;
    const int64_t before = info_of(engine, id).position;
    go_on_straight(engine, id, ids, count, drawn, &want);
    const outcome *got = turn(engine, id, ids, (size_t)count, drawn);
    same(got, &want, drawn, what);
    ck_assert_int_eq(info_of(engine, id).position, before + count + drawn);
    ck_assert_int_eq(got->usage.prompt_tokens, count);
}

START_TEST(turns_are_one_straight_run) {
    static const int32_t prompts[] = {21, 7, 0, 40, 0, 1, 16, 0}, drawn[] = {5, 4, 3, 0, 3, 1, 0, 2};
    int32_t ids[64];
    eng_engine *engine = open_variant(_i);
    uint64_t id = create(engine);
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
        plain_ids(i + 1, ids, prompts[i]);
        if (i % 2)
            spill_all(engine);
        if (drawn[i] > 0)
            check_turn(engine, id, ids, prompts[i], drawn[i], mixer_variants[_i].name);
        else
            turn(engine, id, ids, (size_t)prompts[i], 0);
    }
    ck_assert_int_eq(info_of(engine, id).position, 21 + 5 + 7 + 4 + 3 + 40 + 3 + 1 + 1 + 16 + 2);
    eng_close(engine);
}
END_TEST

// Its ids are told apart from what follows by the runs, which a fork cuts.
START_TEST(a_fork_at_every_position_goes_on_as_its_own) {
    int32_t ids[40];
    straight_answer want;
    eng_engine *engine = open_variant(_i);
    uint64_t id = create(engine);
    plain_ids(1, ids, 40);
    turn(engine, id, ids, 19, 4);
    turn(engine, id, ids + 19, 12, 3);
    for (int64_t position = 1; position <= 38; position += position < 17 ? 4 : 1) {
        uint64_t fork = fork_at(engine, id, position);
        ck_assert_int_eq(info_of(engine, fork).position, position);
        go_on_straight(engine, fork, ids + 31, 5, 3, &want);
        same(turn(engine, fork, ids + 31, 5, 3), &want, 3, "with a prompt");
        drop(engine, fork);
        fork = fork_at(engine, id, position);
        go_on_straight(engine, fork, ids, 0, 3, &want);
        same(turn(engine, fork, ids, 0, 3), &want, 3, "without one");
        drop(engine, fork);
    }
    eng_close(engine);
}
END_TEST

START_TEST(bytes_go_on_in_another_engine) {
    int32_t ids[100];
    straight_answer want;
    eng_engine *engine = open_variant(_i), *other = open_variant(_i);
    plain_ids(1, ids, 100);
    for (int kind = 0; kind < 4; kind++) {
        uint64_t id = create(engine), there = create(other);
        void *bytes;
        size_t count;
        eng_error error = {0};
        if (kind > 0)
            turn(engine, id, ids, kind == 3 ? 80 : 20, kind == 1 ? 0 : 3);
        if (kind == 3)
            ck_assert_int_eq(eng_timeline_rollback(engine, OWNER, id, 82, NULL), ENG_OK);
        ck_assert_int_eq(eng_timeline_export(engine, OWNER, id, &bytes, &count, NULL), ENG_OK);
        ck_assert_msg(eng_timeline_import(other, OWNER, there, bytes, count, &error) == ENG_OK, "%s", error.text);
        eng_free(bytes);
        if (kind > 0) {
            ck_assert_int_eq(info_of(other, there).position, info_of(engine, id).position);
            uint64_t fork = fork_at(other, there, -1);
            go_on_straight(engine, id, ids, 0, 2, &want);
            same(turn(other, fork, ids, 0, 2), &want, 2, "without a prompt");
            drop(other, fork);
            go_on_straight(engine, id, ids + 20, 9, 3, &want);
            same(turn(other, there, ids + 20, 9, 3), &want, 3, "with one");
        } else
            ck_assert_int_eq(info_of(other, there).position, 0);
        drop(engine, id);
        drop(other, there);
    }
    eng_close(engine);
    eng_close(other);
}
END_TEST

// ---------------------------------------------------------------------------------------------------- ends of requests

static void goes_on_as(eng_engine *engine, uint64_t id, int64_t position, const char *what) {
    static int32_t ids[9];
    static straight_answer want;
    ck_assert_msg(info_of(engine, id).position == position, "%s: %ld", what, (long)info_of(engine, id).position);
    small_prompt(99, ids, 9);
    go_on_straight(engine, id, ids, 9, 4, &want);
    same(turn(engine, id, ids, 9, 4), &want, 4, what);
}

START_TEST(what_was_cut_was_never_read) {
    static outcome out;
    int32_t prompt[50];
    eng_engine *engine = open_letters((eng_options){0});
    small_prompt(3, prompt, 50);
    uint64_t id = create(engine), whole = create(engine);
    outcome full = *turn(engine, whole, prompt, 50, 12);
    for (int length = 1; length <= 3; length++) {
        for (int with = 0; with < 2; with++) {
            char stop[4] = {0};
            uint64_t cut = fork_at(engine, id, -1);
            memcpy(stop, full.text + 5, (size_t)length);
            eng_request request = turn_of(engine, cut, prompt, 50, 12);
            request.stops = &(eng_text){stop, (size_t)length};
            request.stop_count = 1;
            request.include_stop = with;
            submit(engine, request, &out);
            run_all(engine);
            ck_assert_int_eq(out.finish, ENG_FINISH_STOP);
            const char *found = strstr(full.text, stop);
            const int64_t kept = found - full.text + (with ? length : 0);
            ck_assert_int_eq((int64_t)out.text_length, kept);
            goes_on_as(engine, cut, 50 + kept, "a stop string");
        }
    }
    for (int with = 0; with < 2; with++) {
        uint64_t cut = fork_at(engine, id, -1);
        eng_request request = turn_of(engine, cut, prompt, 50, 12);
        request.stop_ids = full.ids + 4;
        request.stop_id_count = 1;
        request.include_stop = with;
        submit(engine, request, &out);
        run_all(engine);
        ck_assert_int_eq(out.finish, ENG_FINISH_STOP);
        goes_on_as(engine, cut, 50 + (int64_t)out.id_count - !with, "a stop id");
    }
    eng_close(engine);
}
END_TEST

START_TEST(a_cancelled_turn_keeps_what_was_told) {
    static outcome out;
    int32_t prompt[50];
    eng_engine *engine = open_letters((eng_options){0});
    small_prompt(3, prompt, 50);
    for (size_t told = 0; told < 5; told++) {
        uint64_t id = create(engine);
        turn(engine, id, prompt, 20, 2);
        submit(engine, turn_of(engine, id, prompt + 20, 30, 40), &out);
        if (told > 0)
            while (out.id_count < told)
                step(engine);
        eng_cancel(engine, out.id);
        run_all(engine);
        ck_assert_int_eq(out.finals, 0);
        goes_on_as(engine, id, out.id_count > 0 ? 52 + (int64_t)out.id_count : 22, "a cancellation");
    }
    static int32_t longer[1000];
    uint64_t id = create(engine);
    small_prompt(3, longer, 1000);
    submit(engine, turn_of(engine, id, longer, 1000, 4), &out);
    eng_cancel(engine, out.id); // waiting
    submit(engine, turn_of(engine, id, longer, 1000, 4), &out);
    step(engine);
    ck_assert_int_eq(out.events, 0); // in the middle of its prompt
    eng_cancel(engine, out.id);
    run_all(engine);
    goes_on_as(engine, id, 0, "a cancelled prompt");
    eng_close(engine);
}
END_TEST

static uint64_t brought_in(eng_engine *engine, uint64_t id) {
    uint64_t there = create(engine);
    void *bytes;
    size_t count;
    ck_assert_int_eq(eng_timeline_export(engine, OWNER, id, &bytes, &count, NULL), ENG_OK);
    ck_assert_int_eq(eng_timeline_import(engine, OWNER, there, bytes, count, NULL), ENG_OK);
    eng_free(bytes);
    return there;
}

// Whatever had read the last id before, and however the request before ended: for whoever goes on with other knobs it
// is read with those that it came with, as behind a request that drew so many and no more.
START_TEST(the_last_id_is_read_with_the_knobs_that_it_came_with) {
    enum { PROMPT = 150, ENDS = 6 };
    static outcome out, want, got;
    static const char *const ends[] = {"a stop id",  "a stop string", "a cancellation",
                                       "a rollback", "a fork",        "an import"};
    int32_t prompt[PROMPT];
    eng_engine *engine = open_letters((eng_options){0});
    small_prompt(3, prompt, PROMPT);
    const outcome full = *turn(engine, create(engine), prompt, PROMPT, 12);
    for (int end = 0; end < ENDS; end++) {
        for (int with = 0; with < 2; with++) { // a prompt
            uint64_t id = create(engine), straight = create(engine);
            eng_request request = turn_of(engine, id, prompt, PROMPT, end == 2 ? 40 : 12);
            eng_text stop = {full.text + 5, 2};
            request.stop_ids = full.ids + 4;
            request.stop_id_count = end == 0 || end == 5;
            request.stops = &stop;
            request.stop_count = end == 1;
            submit(engine, request, &out);
            while (end == 2 && out.id_count < 5)
                step(engine);
            if (end == 2)
                eng_cancel(engine, out.id);
            run_all(engine);
            if (end == 3)
                ck_assert_int_eq(eng_timeline_rollback(engine, OWNER, id, PROMPT + 5, NULL), ENG_OK);
            if (end == 5)
                id = brought_in(engine, id);
            id = end == 4 ? fork_at(engine, id, PROMPT + 6) : id;
            const int64_t position = info_of(engine, id).position;
            ck_assert_int_gt(position, PROMPT + 1);
            turn(engine, straight, prompt, PROMPT, position - PROMPT);
            eng_request others[] = {turn_of(engine, straight, prompt, with ? 7 : 0, 4),
                                    turn_of(engine, id, prompt, with ? 7 : 0, 4)};
            for (int i = 0; i < 2; i++) {
                others[i].knobs.cg_mode = ENG_CG_STEPS;
                others[i].knobs.cg_max_steps = 1;
                submit(engine, others[i], i ? &got : &want);
                run_all(engine);
            }
            ck_assert_uint_eq(got.id_count, 4);
            ck_assert_msg(memcmp(got.ids, want.ids, 4 * sizeof *got.ids) == 0 &&
                              memcmp(got.logprobs, want.logprobs, 4 * sizeof *got.logprobs) == 0,
                          "%s, %d: %.9g, not %.9g", ends[end], with, (double)got.logprobs[0], (double)want.logprobs[0]);
        }
    }
    eng_close(engine);
}
END_TEST

START_TEST(a_turn_that_returns_leaves_no_trace) {
    static outcome out;
    int32_t prompt[50];
    void *before, *after;
    size_t before_count, after_count;
    eng_engine *engine = open_letters((eng_options){0});
    small_prompt(3, prompt, 50);
    uint64_t id = create(engine);
    turn(engine, id, prompt, 20, 2);
    ck_assert_int_eq(eng_timeline_export(engine, OWNER, id, &before, &before_count, NULL), ENG_OK);
    eng_request request = turn_of(engine, id, prompt + 20, 30, 6);
    request.timeline_returns = true;
    submit(engine, request, &out);
    run_all(engine);
    ck_assert_uint_eq(out.id_count, 6);
    ck_assert_int_eq(eng_timeline_export(engine, OWNER, id, &after, &after_count, NULL), ENG_OK);
    ck_assert_uint_eq(before_count, after_count);
    ck_assert_mem_eq(before, after, before_count);
    eng_free(before);
    eng_free(after);
    goes_on_as(engine, id, 22, "a turn that returned");
    turn(engine, id, prompt, 0, 5);
    ck_assert_int_eq(eng_timeline_rollback(engine, OWNER, id, 31, NULL), ENG_OK);
    goes_on_as(engine, id, 31, "a rollback");
    ck_assert_int_eq(eng_timeline_rollback(engine, OWNER, id, 0, NULL), ENG_OK);
    goes_on_as(engine, id, 0, "a rollback to nothing");
    eng_close(engine);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ refusals

START_TEST(refusals_name_the_reason_and_change_nothing) {
    static outcome out;
    int32_t prompt[8] = {97, 98, 99, 100, 101, 102, 103, 104};
    uint64_t other;
    eng_engine *engine = open_letters((eng_options){0});
    uint64_t id = create(engine);
    refuse(engine, turn_of(engine, id, prompt, 0, 3), ENG_INVALID, "empty");
    refuse(engine, turn_of(engine, id + 1, prompt, 8, 3), ENG_NOT_FOUND, "no such session");
    eng_request request = turn_of(engine, id, prompt, 8, 3);
    request.owner = OWNER + 1;
    refuse(engine, request, ENG_NOT_FOUND, "no such session");
    request.owner = OWNER;
    request.choices = 2;
    refuse(engine, request, ENG_INVALID, "choices");
    request.choices = 1;
    request.timeline_position = 5;
    refuse(engine, request, ENG_CONFLICT, "position 0, not 5");
    request.timeline_position = 0;
    submit(engine, request, &out);
    refuse(engine, request, ENG_BUSY, "in use");
    ck_assert_int_eq(eng_timeline_drop(engine, OWNER, id, NULL), ENG_BUSY);
    ck_assert_int_eq(eng_timeline_rollback(engine, OWNER, id, 0, NULL), ENG_BUSY);
    ck_assert_int_eq(eng_timeline_import(engine, OWNER, id, prompt, 8, NULL), ENG_BUSY);
    ck_assert_int_eq(info_of(engine, fork_at(engine, id, -1)).position, 0); // as it was before the request
    run_all(engine);
    ck_assert_int_eq(info_of(engine, id).position, 11);
    ck_assert_int_eq(eng_timeline_fork(engine, OWNER, id, 12, &other, NULL), ENG_CONFLICT);
    ck_assert_int_eq(eng_timeline_fork(engine, OWNER + 1, id, 1, &other, NULL), ENG_NOT_FOUND);
    ck_assert_int_eq(eng_timeline_drop(engine, OWNER + 1, id, NULL), ENG_NOT_FOUND);
    ck_assert_uint_eq(eng_timeline_next(engine, OWNER + 1, 0), 0);
    ck_assert_uint_eq(eng_timeline_next(engine, OWNER, 0), id);
    drop(engine, id);
    ck_assert_int_eq(eng_timeline_drop(engine, OWNER, id, NULL), ENG_NOT_FOUND);
    eng_close(engine);
}
END_TEST

START_TEST(a_damaged_import_changes_nothing) {
    int32_t prompt[8] = {97, 98, 99, 100, 101, 102, 103, 104};
    void *bytes, *after;
    size_t count, after_count;
    eng_engine *engine = open_letters((eng_options){0});
    uint64_t id = create(engine), other = create(engine);
    turn(engine, id, prompt, 8, 3);
    turn(engine, other, prompt, 3, 2);
    ck_assert_int_eq(eng_timeline_export(engine, OWNER, id, &bytes, &count, NULL), ENG_OK);
    for (size_t i = 0; i < count; i += i < 300 ? 7 : count / 31) {
        ((unsigned char *)bytes)[i] ^= 1;
        eng_status status = eng_timeline_import(engine, OWNER, other, bytes, count, NULL);
        bool told = status == ENG_FORMAT || status == ENG_UNSUPPORTED;
        ck_assert_msg(told, "byte %zu: %d", i, status);
        ((unsigned char *)bytes)[i] ^= 1;
    }
    goes_on_as(engine, other, 5, "after refusals");
    ck_assert_int_eq(eng_timeline_import(engine, OWNER, other, bytes, count, NULL), ENG_OK);
    ck_assert_int_eq(eng_timeline_export(engine, OWNER, other, &after, &after_count, NULL), ENG_OK);
    ck_assert_uint_eq(count, after_count);
    ck_assert_mem_eq(bytes, after, count);
    unsigned char digest[ENG_TIMELINE_DIGEST_BYTES], same_digest[ENG_TIMELINE_DIGEST_BYTES];
    ck_assert_int_eq(eng_timeline_digest(engine, OWNER, id, digest, NULL), ENG_OK);
    ck_assert_int_eq(eng_timeline_digest(engine, OWNER, other, same_digest, NULL), ENG_OK);
    ck_assert_mem_eq(digest, same_digest, sizeof digest);
    turn(engine, other, prompt, 1, 0);
    ck_assert_int_eq(eng_timeline_digest(engine, OWNER, other, same_digest, NULL), ENG_OK);
    ck_assert_mem_ne(digest, same_digest, sizeof digest);
    eng_free(bytes);
    eng_free(after);
    eng_close(engine);
}
END_TEST

// -------------------------------------------------------------------------------------------------------------- memory

START_TEST(a_thousand_forks_are_a_thousand_states) {
    enum { FORKS = 1000 };
    static uint64_t fork[FORKS];
    int32_t prompt[30];
    eng_engine *engine = open_letters((eng_options){0});
    uint64_t state = eng_pool_slot_stride(engine->pool), id = create(engine);
    small_prompt(5, prompt, 30);
    turn(engine, id, prompt, 20, 2);
    uint64_t before = gauges_of(engine).kept_bytes;
    for (int i = 0; i < FORKS; i++)
        fork[i] = fork_at(engine, id, -1);
    eng_gauges gauges = gauges_of(engine);
    ck_assert_uint_eq(gauges.kept_on_device + gauges.kept_on_host, 1); // one state for all of them
    ck_assert_uint_lt(gauges.kept_bytes - before, FORKS * state / 8);
    for (int i = 0; i < FORKS; i++)
        turn(engine, fork[i], prompt + 20 + i % 5, 1, 1);
    gauges = gauges_of(engine);
    ck_assert_uint_eq(gauges.kept_on_device + gauges.kept_on_host, FORKS + 1);
    ck_assert_uint_le(gauges.kept_on_device, ROWS);
    ck_assert_uint_eq(gauges.timelines, FORKS + 1);
    ck_assert_uint_ge(gauges.kept_bytes, (FORKS + 1) * state);
    ck_assert_uint_lt(gauges.kept_bytes, (FORKS + 1) * (state + 1024));
    for (int i = 0; i < FORKS; i++)
        drop(engine, fork[i]);
    ck_assert_uint_eq(gauges_of(engine).kept_bytes, before);
    goes_on_as(engine, id, 22, "the one that was forked");
    drop(engine, id);
    gauges = gauges_of(engine);
    ck_assert_uint_eq(gauges.kept_bytes + gauges.kept_on_device + gauges.kept_on_host + gauges.timelines, 0);
    ck_assert_uint_eq(gauges.states_used, 0);
    eng_close(engine);
}
END_TEST

START_TEST(the_budget_holds_and_states_can_be_read_again) {
    int32_t prompt[10];
    uint64_t id[8], more;
    eng_engine *engine = open_letters((eng_options){0});
    uint64_t state = eng_pool_slot_stride(engine->pool);
    eng_close(engine);
    small_prompt(5, prompt, 10);
    engine = open_letters((eng_options){.session_budget = 6 * state + 6 * 4096});
    for (int i = 0; i < 5; i++) {
        id[i] = create(engine);
        for (int k = 0; k < 4; k++) // more states than there is room for
            turn(engine, id[i], prompt + k, 6, 2);
        eng_gauges gauges = gauges_of(engine);
        ck_assert_uint_le(gauges.kept_bytes, gauges.kept_bytes_total);
        ck_assert_uint_ge(gauges.kept_on_device + gauges.kept_on_host, (uint64_t)i + 1);
    }
    for (int i = 0; i < 5; i++) {
        uint64_t fork = fork_at(engine, id[i], 17 + i);
        goes_on_as(engine, fork, 17 + i, "a fork whose states are gone");
        drop(engine, fork);
    }
    id[5] = create(engine);
    turn(engine, id[5], prompt, 6, 2);
    more = create(engine);
    refuse(engine, turn_of(engine, more, prompt, 6, 2), ENG_FULL, "sessions hold");
    drop(engine, id[0]);
    turn(engine, more, prompt, 6, 2);
    eng_close(engine);
}
END_TEST

// With the least budget that a turn is taken with its ids have the room that they need and no more.
START_TEST(the_budget_holds_to_the_byte) {
    static outcome out;
    int32_t prompt[10];
    int taken = 0;
    small_prompt(5, prompt, 10);
    for (uint64_t budget = 4; taken < 8; budget += 4) {
        eng_engine *engine = open_letters((eng_options){.session_budget = budget});
        uint64_t id;
        eng_request request = {0};
        if (budget < 64)
            budget = eng_pool_slot_stride(engine->pool);
        else if (eng_timeline_create(engine, OWNER, &id, NULL) == ENG_OK) {
            request = turn_of(engine, id, prompt, 10, 15);
            request.user = &out;
            memset(&out, 0, sizeof out);
            const bool begun = eng_submit(engine, &request, &out.id, NULL) == ENG_OK;
            run_all(engine);
            const eng_gauges gauges = gauges_of(engine);
            ck_assert_msg(gauges.kept_bytes <= gauges.kept_bytes_total, "%lu of %lu bytes",
                          (unsigned long)gauges.kept_bytes, (unsigned long)gauges.kept_bytes_total);
            taken += begun && gauges.kept_bytes > budget / 2;
        }
        eng_close(engine);
        ck_assert_uint_lt(budget, 1 << 20);
    }
}
END_TEST

// Full attention: pages are shared by forks and go to the host with their state.
START_TEST(pages_are_shared_and_come_back) {
    int32_t prompt[150];
    eng_engine *engine = open_model(&small_models[SMALL_LLAMA], "pages", true,
                                    (eng_options){.max_rows = 3, .state_budget = 3 * 64 * 64 * 1024});
    small_prompt(5, prompt, 150);
    uint64_t total = gauges_of(engine).kv_pages_total, id = create(engine), fork[4];
    turn(engine, id, prompt, 140, 2);
    ck_assert_uint_eq(gauges_of(engine).kv_pages_used, 3);
    for (int i = 0; i < 4; i++) {
        fork[i] = fork_at(engine, id, -1);
        turn(engine, fork[i], prompt + i, 1, 2);
        if (i == 0)
            ck_assert_uint_eq(gauges_of(engine).kv_pages_used, 4); // two full ones are shared
    }
    ck_assert_uint_le(gauges_of(engine).kv_pages_used, total);
    for (int i = 0; i < 4; i++)
        goes_on_as(engine, fork[i], 145, "a fork with pages");
    goes_on_as(engine, id, 142, "the one that was forked");
    for (int i = 0; i < 4; i++)
        drop(engine, fork[i]);
    drop(engine, id);
    ck_assert_uint_eq(gauges_of(engine).kv_pages_used, 0);
    eng_close(engine);
}
END_TEST

START_TEST(a_history_is_bounded) {
    int32_t prompt[40];
    uint64_t fork;
    eng_error error = {0};
    eng_engine *engine = open_letters((eng_options){.session_history = 50});
    uint64_t id = create(engine);
    small_prompt(5, prompt, 40);
    for (int i = 0; i < 6; i++)
        turn(engine, id, prompt + i, 18, 2);
    eng_timeline_info info = info_of(engine, id);
    ck_assert_int_eq(info.position, 120);
    ck_assert_int_eq(info.earliest, 79); // where a state stands, the first with at most so much behind it
    ck_assert_int_eq(eng_timeline_fork(engine, OWNER, id, 78, &fork, &error), ENG_CONFLICT);
    ck_assert_ptr_nonnull(strstr(error.text, "from position 79"));
    fork = fork_at(engine, id, 90);
    turn(engine, fork, prompt, 0, 3);
    turn(engine, id, prompt, 0, 3);
    eng_close(engine);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------------- hunt

static uint32_t draw(uint64_t *at) {
    uint32_t word[4];
    eng_philox(4, 4, (*at)++, word);
    return word[0];
}

// Three timelines are used at random, two requests at a time; now and then one is compared with a straight run.
START_TEST(no_order_of_events_changes_a_bit) {
    static outcome out[3];
    int32_t prompt[64];
    uint64_t id[3], at = (uint64_t)_i * 10000;
    eng_engine *engine = open_letters((eng_options){.max_rows = 2});
    for (int i = 0; i < 3; i++)
        id[i] = create(engine);
    for (int round = 0; round < 60; round++) {
        int which = (int)(draw(&at) % 3), other = (which + 1) % 3;
        small_prompt(draw(&at), prompt, 64);
        for (int i = 0; i < 2; i++) {
            eng_request request = turn_of(engine, id[i ? other : which], prompt, 1 + draw(&at) % 40, draw(&at) % 6);
            request.stop_ids = prompt;
            request.stop_id_count = draw(&at) % 2;
            submit(engine, request, &out[i]);
        }
        for (uint32_t steps = draw(&at) % 8; steps > 0; steps--)
            step(engine);
        if (draw(&at) % 3 == 0)
            eng_cancel(engine, out[draw(&at) % 2].id);
        if (draw(&at) % 4 == 0)
            spill_all(engine);
        run_all(engine);
        int64_t position = info_of(engine, id[which]).position;
        if (draw(&at) % 3 == 0)
            ck_assert_int_eq(
                eng_timeline_rollback(engine, OWNER, id[which], draw(&at) % (uint32_t)(position + 1), NULL), ENG_OK);
        if (draw(&at) % 3 == 0) {
            drop(engine, id[other]);
            id[other] = fork_at(engine, id[which], -1);
        }
        if (draw(&at) % 3 == 0) {
            uint64_t fork = fork_at(engine, id[which], -1);
            goes_on_as(engine, fork, info_of(engine, id[which]).position, "at random");
            drop(engine, fork);
        }
    }
    for (int i = 0; i < 3; i++)
        drop(engine, id[i]);
    eng_gauges gauges = gauges_of(engine);
    ck_assert_uint_eq(gauges.kept_bytes + gauges.kept_on_device + gauges.kept_on_host + gauges.states_used, 0);
    eng_close(engine);
}
END_TEST

static Suite *timeline_suite(void) {
    Suite *suite = suite_create("timeline");
    TCase *mixers = tcase_create("every mixer"), *ends = tcase_create("ends"), *memory = tcase_create("memory");
    tcase_set_timeout(memory, 60);
    tcase_add_checked_fixture(mixers, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(mixers, turns_are_one_straight_run, 0, MIXER_VARIANTS);
    tcase_add_loop_test(mixers, a_fork_at_every_position_goes_on_as_its_own, 0, MIXER_VARIANTS);
    tcase_add_loop_test(mixers, bytes_go_on_in_another_engine, 0, MIXER_VARIANTS);
    suite_add_tcase(suite, mixers);
    tcase_add_checked_fixture(ends, temp_folder_make, temp_folder_remove);
    tcase_add_test(ends, what_was_cut_was_never_read);
    tcase_add_test(ends, a_cancelled_turn_keeps_what_was_told);
    tcase_add_test(ends, the_last_id_is_read_with_the_knobs_that_it_came_with);
    tcase_add_test(ends, a_turn_that_returns_leaves_no_trace);
    tcase_add_test(ends, refusals_name_the_reason_and_change_nothing);
    tcase_add_test(ends, a_damaged_import_changes_nothing);
    suite_add_tcase(suite, ends);
    tcase_add_checked_fixture(memory, temp_folder_make, temp_folder_remove);
    tcase_add_test(memory, a_thousand_forks_are_a_thousand_states);
    tcase_add_test(memory, the_budget_holds_and_states_can_be_read_again);
    tcase_add_test(memory, the_budget_holds_to_the_byte);
    tcase_add_test(memory, pages_are_shared_and_come_back);
    tcase_add_test(memory, a_history_is_bounded);
    tcase_add_loop_test(memory, no_order_of_events_changes_a_bit, 0, 4);
    suite_add_tcase(suite, memory);
    return suite;
}

DEVICE_TEST_MAIN(timeline_suite)

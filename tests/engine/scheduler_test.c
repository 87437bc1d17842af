// SPDX-License-Identifier: Apache-2.0
// What runs when: bounded queues, pages, cancelling and pausing in every phase, turns over owners, the share of prompts
// in a step.
//
// Time is counted in steps, never in seconds; where one runs ahead, what is submitted enters a step later. The random
// workload is the same in every run.
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

// Steps that are under way when a call of step has returned.
static int ahead(void) {
    return test_device_is_cpu() ? 0 : 1;
}

// Reads a chunk of prompts a step.
static eng_engine *open_chunk(int model) {
    return open_with(model, (eng_options){.max_rows = 8, .prompt_tokens = 1});
}

static void assert_idle(eng_engine *engine) {
    for (int i = 0; i < ahead(); i++)
        step(engine);
    ck_assert(!step(engine));
}

// ------------------------------------------------------------------------------------------------------------ waiting

START_TEST(the_queue_is_bounded) {
    static outcome out[4];
    int32_t prompt[100] = {0};
    uint64_t id;
    eng_engine *engine = open_with(SMALL_MESA, (eng_options){.max_rows = 1, .queue_requests = 2, .queue_tokens = 100});
    eng_request request = greedy(engine, prompt, 60, 3);
    submit(engine, request, &out[0]);
    ck_assert_int_eq(eng_submit(engine, &request, &id, NULL), ENG_FULL); // 120 ids
    request.count = 40;
    submit(engine, request, &out[1]);
    ck_assert_uint_eq(gauges_of(engine).queued_tokens, 100);
    request.count = 1;
    ck_assert_int_eq(eng_submit(engine, &request, &id, NULL), ENG_FULL); // two requests
    step(engine);
    ck_assert_uint_eq(gauges_of(engine).running, 1);
    ck_assert_uint_eq(gauges_of(engine).queued_requests, 1);
    submit(engine, request, &out[2]);
    drain(engine);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(out[i].finish, ENG_FINISH_LENGTH);
    ck_assert_int_lt(out[0].last_step, out[1].first_step); // one row: one after the other, in order
    ck_assert_int_lt(out[1].last_step, out[2].first_step);
    static int32_t longer[101];
    eng_request too_long = greedy(engine, longer, 101, 1);
    ck_assert_int_eq(eng_submit(engine, &too_long, &id, NULL), ENG_TOO_LONG);
    eng_close(engine);
}
END_TEST

START_TEST(requests_wait_for_pages_and_then_run) {
    static outcome first, second, third, want, want_second;
    int32_t prompt[150], other[150];
    small_prompt(4, prompt, 150);
    small_prompt(5, other, 150);
    eng_engine *engine = open_small(SMALL_LLAMA);
    uint64_t page = 64 * eng_info(engine)->kv_bytes_per_token, slot = eng_info(engine)->state_bytes;
    want = answer(engine, greedy(engine, prompt, 150, 20));
    want_second = answer(engine, greedy(engine, other, 150, 20));
    eng_close(engine);
    engine = open_with(SMALL_LLAMA, (eng_options){.max_rows = 4, .state_budget = 4 * slot + 5 * page});
    ck_assert_uint_eq(gauges_of(engine).kv_pages_total, 5);
    submit(engine, greedy(engine, prompt, 150, 20), &first); // 169 ids read: 3 pages
    submit(engine, greedy(engine, other, 150, 20), &second);
    submit(engine, greedy(engine, prompt, 10, 5), &third); // would fit, but comes after one that does not
    step(engine);
    ck_assert_uint_eq(gauges_of(engine).running, 1);
    ck_assert_uint_eq(gauges_of(engine).kv_pages_used, 3);
    ck_assert_uint_eq(gauges_of(engine).queued_requests, 2);
    drain(engine);
    ck_assert_str_eq(first.text, want.text);
    ck_assert_str_eq(second.text, want_second.text);
    ck_assert_int_lt(first.last_step, second.first_step);
    ck_assert_int_eq(third.finish, ENG_FINISH_LENGTH);
    refuse(engine, greedy(engine, prompt, 150, 172), ENG_TOO_LONG, "bytes"); // 321 ids are 6 pages
    outcome fits = answer(engine, greedy(engine, prompt, 150, 171));
    ck_assert_int_eq(fits.usage.completion_tokens, 171);
    eng_close(engine);
}
END_TEST

// --------------------------------------------------------------------------------------------------- cancel and pause

START_TEST(cancel_ends_it_in_each_phase) {
    static outcome victim, other;
    static int32_t prompt[1000];
    eng_engine *engine = open_with(SMALL_MESA, (eng_options){.max_rows = 2});
    small_prompt(6, prompt, 1000);
    submit(engine, greedy(engine, prompt, 1000, 5), &victim);
    eng_cancel(engine, victim.id); // waiting
    ck_assert_uint_eq(gauges_of(engine).queued_requests + gauges_of(engine).queued_tokens, 0);
    ck_assert(!step(engine));

    submit(engine, greedy(engine, prompt, 1000, 5), &victim);
    step(engine);
    ck_assert_uint_eq(gauges_of(engine).states_used, 1);
    eng_cancel(engine, victim.id); // reading
    ck_assert_uint_eq(gauges_of(engine).states_used + gauges_of(engine).running, 0);
    assert_idle(engine);

    submit(engine, greedy(engine, prompt, 3, 50), &victim);
    submit(engine, greedy(engine, prompt, 4, 8), &other);
    step(engine);
    step(engine);
    int events = victim.events;
    ck_assert_int_gt(events, 0);
    eng_cancel(engine, victim.id); // generating
    eng_cancel(engine, victim.id);
    eng_cancel(engine, 123456789);
    eng_pause(engine, victim.id, true);
    ck_assert_uint_eq(gauges_of(engine).running, 1);
    drain(engine);
    ck_assert_int_eq(victim.events, events);
    ck_assert_int_eq(other.usage.completion_tokens, 8); // exactly, whoever was cancelled beside it
    eng_cancel(engine, other.id);                       // finished
    eng_close(engine);
}
END_TEST

typedef struct interference {
    eng_engine *engine;
    outcome *first, *second;
    eng_request submitted;
    uint64_t submitted_id;
} interference;

// At its first event each of two requests cancels itself and the other, submits a third, and tries to step.
static void interfere(void *context, const eng_event *event) {
    interference *i = context;
    bool worked;
    if (event->id == i->submitted_id)
        return;
    ((outcome *)event->user)->events++;
    eng_cancel(i->engine, i->first->id);
    eng_cancel(i->engine, i->second->id);
    ck_assert_uint_eq(gauges_of(i->engine).states_used, 0); // at once
    if (i->submitted_id == 0)
        ck_assert_int_eq(eng_submit(i->engine, &i->submitted, &i->submitted_id, NULL), ENG_OK);
    ck_assert_int_eq(eng_step(i->engine, interfere, context, &worked, NULL), ENG_INVALID);
    ck_assert_uint_ge(event->usage->completion_tokens, 1); // the event is whole until the callback returns
    ck_assert_int_eq(event->tokens[0].id, event->text[0]);
}

START_TEST(callbacks_may_cancel_and_submit) {
    static outcome first, second;
    int32_t prompt[3] = {1, 2, 3};
    bool worked = true;
    eng_engine *engine = open_small(SMALL_MESA);
    submit(engine, greedy(engine, prompt, 3, 50), &first);
    submit(engine, greedy(engine, prompt, 2, 50), &second);
    interference context = {.engine = engine, .first = &first, .second = &second};
    context.submitted = greedy(engine, prompt, 1, 2);
    while (worked)
        ck_assert_int_eq(eng_step(engine, interfere, &context, &worked, NULL), ENG_OK);
    ck_assert_int_eq(first.events + second.events, 1);
    drain(engine);
    eng_close(engine);
}
END_TEST

START_TEST(a_paused_request_keeps_its_place) {
    static outcome paused, other;
    static int32_t prompt[100];
    small_prompt(3, prompt, 100);
    eng_engine *engine = open_small(SMALL_HYBRID);
    outcome want = answer(engine, greedy(engine, prompt, 100, 12));
    submit(engine, greedy(engine, prompt, 100, 12), &paused);
    submit(engine, greedy(engine, prompt, 50, 30), &other);
    for (int i = 0; i < 5; i++)
        step(engine);
    eng_pause(engine, paused.id, true);
    for (int i = 0; i < ahead(); i++)
        step(engine);
    int events = paused.events;
    while (!other.finals)
        ck_assert(step(engine));
    ck_assert_int_eq(paused.events, events);
    assert_idle(engine); // nothing to do but wait
    ck_assert_uint_eq(gauges_of(engine).states_used, 1);
    eng_pause(engine, paused.id, false);
    drain(engine);
    ck_assert_str_eq(paused.text, want.text);
    eng_close(engine);
}
END_TEST

// --------------------------------------------------------------------------------------------------------- scheduling

START_TEST(prompts_take_one_chunk_a_step_beside_a_client) {
    static outcome client, attacker[3];
    static int32_t prompt[1000];
    eng_engine *engine = open_chunk(SMALL_MESA);
    int32_t chunk = eng_info(engine)->chunk;
    small_prompt(3, prompt, 1000);
    submit(engine, greedy(engine, prompt, 3, 200), &client);
    step(engine);
    ck_assert_uint_eq(client.id_count, 1);
    int before = door_steps();
    for (int i = 0; i < 3; i++)
        submit(engine, greedy(engine, prompt + i, (size_t)(10 * chunk), 1), &attacker[i]);
    for (int i = 0; i < 30 + ahead(); i++) {
        step(engine);
        ck_assert_uint_eq(client.id_count, 2 + (size_t)i); // a token in every step
    }
    for (int i = 0; i < 3; i++) // thirty chunks in thirty steps, in turns
        ck_assert_int_eq(attacker[i].last_step, before + 28 + i + ahead());

    before = door_steps(); // short prompts share a chunk, four to a step
    for (int i = 0; i < 3; i++)
        submit(engine, greedy(engine, prompt, 2, 1), &attacker[i]);
    for (int i = 0; i < 1 + ahead(); i++)
        step(engine);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(attacker[i].last_step, before + 1 + ahead());
    eng_cancel(engine, client.id);

    before = door_steps(); // alone, several chunks a step
    submit(engine, greedy(engine, prompt, (size_t)(10 * chunk), 1), &attacker[0]);
    drain(engine);
    ck_assert_int_eq(attacker[0].last_step, before + 3 + ahead());
    eng_close(engine);
}
END_TEST

START_TEST(several_prompts_are_read_side_by_side) {
    static outcome client, reader[5];
    static int32_t prompt[1000];
    eng_engine *engine = open_with(SMALL_MESA, (eng_options){.max_rows = 8, .prompt_tokens = 1});
    int32_t chunk = eng_info(engine)->chunk;
    ck_assert_int_eq(eng_info(engine)->prompt_tokens, chunk);
    eng_close(engine);
    engine = open_with(SMALL_MESA, (eng_options){.max_rows = 8, .prompt_tokens = 3 * chunk - 1});
    ck_assert_int_eq(eng_info(engine)->prompt_tokens, 3 * chunk);
    const int each = eng_info(engine)->prompt_row_tokens / chunk;
    ck_assert(each == 1 || each == 3);
    small_prompt(3, prompt, 1000);
    submit(engine, greedy(engine, prompt, 3, 200), &client);
    step(engine);
    int before = door_steps();
    submit(engine, greedy(engine, prompt, (size_t)(6 * chunk), 1), &reader[0]);
    for (int i = 0; i < 6 / each + ahead(); i++) // one alone has what one may have
        step(engine);
    ck_assert_int_eq(reader[0].last_step, before + 6 / each + ahead());

    before = door_steps();
    eng_request exact = greedy(engine, prompt, (size_t)(6 * chunk), 1); // token by token everywhere
    exact.knobs.cg_mode = ENG_CG_EXACT;
    submit(engine, exact, &reader[0]);
    for (int i = 0; i < 6 + ahead(); i++)
        step(engine);
    ck_assert_int_eq(reader[0].last_step, before + 6 + ahead());

    before = door_steps();
    const size_t told = client.id_count;
    for (int i = 0; i < 5; i++)
        submit(engine, greedy(engine, prompt + i, (size_t)(6 * chunk), 1), &reader[i]);
    for (int i = 0; i < 10 + ahead(); i++) { // thirty chunks, three a step
        step(engine);
        ck_assert_uint_eq(client.id_count, told + 1 + (size_t)i);
    }
    for (int i = 0; i < 5; i++)
        ck_assert_int_ge(reader[i].last_step, before + 8 + ahead());
    ck_assert_int_eq(reader[4].last_step, before + 10 + ahead());
    eng_cancel(engine, client.id);
    drain(engine);

    before = door_steps(); // alone: four times what one may have beside a client, of the twelve that all may
    submit(engine, greedy(engine, prompt, (size_t)(12 * chunk), 1), &reader[0]);
    drain(engine);
    ck_assert_int_eq(reader[0].last_step, before + 12 / (4 * each));
    eng_close(engine);
}
END_TEST

START_TEST(prompts_with_states_in_bf16_are_read_by_a_chunk) {
    eng_engine *engine = open_with(SMALL_MESA, (eng_options){0}); // makes the checkpoint
    eng_close(engine);
    engine = NULL;
    const eng_options options = {.model_dir = temp_path(small_models[SMALL_MESA].name),
                                 .device = test_device("cpu"),
                                 .state_storage = ENG_STATE_BF16};
    if (eng_open(&options, &engine, NULL) != ENG_OK)
        MESA_TEST_SKIP("no states in bf16 on %s", options.device);
    ck_assert_int_eq(eng_info(engine)->prompt_row_tokens, eng_info(engine)->chunk);
    eng_close(engine);
}
END_TEST

// Whose penalties depend on the last id waits for it: every other step where it is one of few, and nobody runs ahead
// where they are many.
START_TEST(penalties_hold_up_no_more_than_they_must) {
    static outcome plain[2], penalised[3];
    int32_t prompt[3] = {1, 2, 3};
    eng_engine *engine = open_small(SMALL_MESA);
    eng_request request = greedy(engine, prompt, 3, 100);
    submit(engine, request, &plain[0]);
    submit(engine, request, &plain[1]);
    request.frequency_penalty = 0.5F;
    submit(engine, request, &penalised[0]);
    for (int i = 0; i < 20; i++)
        step(engine);
    ck_assert_uint_ge(plain[0].id_count, 19);
    ck_assert_uint_ge(plain[1].id_count, 19);
    ck_assert_uint_ge(penalised[0].id_count, test_device_is_cpu() ? 20 : 9);
    submit(engine, request, &penalised[1]);
    submit(engine, request, &penalised[2]);
    for (int i = 0; i < 4; i++)
        step(engine);
    const size_t before[] = {plain[0].id_count, penalised[0].id_count, penalised[1].id_count, penalised[2].id_count};
    for (int i = 0; i < 20; i++)
        step(engine);
    const size_t after[] = {plain[0].id_count, penalised[0].id_count, penalised[1].id_count, penalised[2].id_count};
    for (int i = 0; i < 4; i++)
        ck_assert_uint_eq(after[i] - before[i], 20);
    eng_close(engine);
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- turns

typedef struct arrival {
    uint64_t owner;
    int32_t priority;
    int after; // submitted when this many requests have ended
} arrival;

// One row: who is answered when. Writes the numbers of the requests in the order of their answers.
static void trace(const arrival *arrivals, int count, int *order) {
    static outcome out[32];
    int submitted = 0, ended = 0;
    eng_engine *engine = open_with(SMALL_MESA, (eng_options){.max_rows = 1});
    memset(out, 0, sizeof out);
    while (ended < count) {
        for (; submitted < count && arrivals[submitted].after <= ended; submitted++) {
            eng_request request = greedy(engine, (int32_t[]){1, 2}, 2, 2);
            request.owner = arrivals[submitted].owner;
            request.priority = arrivals[submitted].priority;
            submit(engine, request, &out[submitted]);
        }
        ck_assert(step(engine));
        for (int i = 0; i < submitted; i++)
            if (out[i].finals == 1 && out[i].last_step == door_steps())
                order[ended++] = i;
    }
    ck_assert(!step(engine));
    eng_close(engine);
}

static void assert_trace(const arrival *arrivals, const int *want, int count) {
    int got[32];
    trace(arrivals, count, got);
    for (int i = 0; i < count; i++)
        ck_assert_msg(got[i] == want[i], "answer %d went to request %d, not to %d", i, got[i], want[i]);
}

START_TEST(owners_take_turns) {
    // 7 has filled the queue before 8 and 9 come; 5 comes late, and each that waits already goes before it at most once
    static const arrival arrivals[] = {{7, 0, 0}, {7, 0, 0}, {7, 0, 0}, {7, 0, 0}, {7, 0, 0}, {8, 0, 0},
                                       {8, 0, 0}, {8, 0, 0}, {9, 0, 0}, {5, 0, 4}, {5, 0, 4}, {9, 0, 8}};
    static const int want[] = {0, 5, 8, 1, 6, 2, 9, 7, 3, 10, 11, 4};
    assert_trace(arrivals, want, sizeof want / sizeof *want);
}
END_TEST

START_TEST(priority_comes_before_turns) {
    static const arrival arrivals[] = {{7, 5, 0}, {7, 0, 0}, {7, 0, 0},  {8, 0, 0},         {8, -3, 0},
                                       {9, 5, 0}, {7, 5, 0}, {9, -3, 2}, {7, INT32_MIN, 3}, {8, INT32_MAX, 0}};
    static const int want[] = {4, 1, 7, 8, 3, 2, 5, 0, 6, 9};
    assert_trace(arrivals, want, sizeof want / sizeof *want);
}
END_TEST

START_TEST(prompts_are_read_in_turns_over_owners) {
    static outcome client, many[3], lone;
    static int32_t prompt[1000];
    eng_engine *engine = open_chunk(SMALL_MESA);
    int32_t chunk = eng_info(engine)->chunk;
    small_prompt(3, prompt, 1000);
    eng_request request = greedy(engine, prompt, (size_t)(10 * chunk), 1);
    submit(engine, greedy(engine, prompt, 3, 200), &client);
    step(engine);
    int before = door_steps();
    for (int i = 0; i < 3; i++) {
        request.owner = 1;
        request.ids = prompt + i;
        submit(engine, request, &many[i]);
    }
    request.owner = 2;
    submit(engine, request, &lone);
    for (int i = 0; i < 40 + ahead(); i++)
        step(engine);
    ck_assert_int_eq(lone.last_step, before + 20 + ahead()); // every second chunk is its own
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(many[i].last_step, before + 38 + i + ahead());
    eng_close(engine);
}
END_TEST

// Who waits for what another reads neither loses its turn by that nor gains one, and pays for a paused reader with
// nothing but its own reading.
START_TEST(followers_keep_their_turn) {
    static outcome reader, before, follower, after;
    static int32_t prompt[1000], other[1000];
    eng_engine *engine = open_with(SMALL_MESA, (eng_options){.max_rows = 1});
    const int32_t chunk = eng_info(engine)->chunk;
    small_prompt(3, prompt, 1000);
    small_prompt(4, other, 1000);
    eng_request slow = greedy(engine, prompt, (size_t)(9 * chunk + 5), 3), quick = slow;
    slow.priority = 5;
    quick.max_tokens = 1;
    submit(engine, slow, &reader);
    step(engine);
    slow.ids = quick.ids = other;
    submit(engine, slow, &after);
    submit(engine, quick, &before);
    quick.ids = prompt;
    submit(engine, quick, &follower);
    drain(engine);
    ck_assert_int_lt(reader.last_step, before.first_step);
    ck_assert_int_lt(before.last_step, follower.first_step);
    ck_assert_int_lt(follower.last_step, after.first_step);
    ck_assert_int_eq(follower.usage.cached_tokens, 9 * chunk);
    eng_close(engine);

    engine = open_with(SMALL_MESA, (eng_options){.max_rows = 2, .prompt_tokens = 1});
    submit(engine, quick, &reader);
    step(engine);
    submit(engine, quick, &follower);
    eng_pause(engine, reader.id, true);
    while (!follower.finals)
        ck_assert(step(engine));
    ck_assert_int_ge(follower.usage.cached_tokens, chunk);
    eng_pause(engine, reader.id, false);
    drain(engine);
    ck_assert_str_eq(follower.text, reader.text);
    eng_close(engine);
}
END_TEST

START_TEST(scored_prompts_share_a_step) {
    static outcome client, scored[5], plain;
    static int32_t prompt[1000];
    eng_engine *engine = open_chunk(SMALL_MESA);
    int32_t chunk = eng_info(engine)->chunk;
    small_prompt(3, prompt, 1000);
    eng_request request = greedy(engine, prompt, (size_t)(4 * chunk), 1);
    submit(engine, request, &plain);
    request.logprobs = 0;
    request.prompt_logprobs = true;
    int before = door_steps();
    for (int i = 0; i < 2; i++) {
        request.ids = prompt + 1 + i;
        submit(engine, request, &scored[i]);
    }
    drain(engine); // a chunk of logits a step between the two, and the plain one beside them
    ck_assert_int_eq(plain.last_step, before + 4);
    ck_assert_int_eq(scored[0].last_step, before + 7);
    ck_assert_int_eq(scored[1].last_step, before + 8);
    ck_assert_uint_eq(scored[1].prompt_count, (size_t)(4 * chunk));

    submit(engine, greedy(engine, prompt, 3, 100), &client);
    step(engine);
    for (int i = 0; i < 5; i++) {
        request.ids = prompt + 1 + i;
        submit(engine, request, &scored[i]);
    }
    for (int i = 0; i < 20 + ahead(); i++) {
        step(engine);
        ck_assert_uint_eq(client.id_count, 2 + (size_t)i);
    }
    for (int i = 0; i < 5; i++)
        ck_assert_int_eq(scored[i].finals, 1);
    eng_close(engine);
}
END_TEST

// -------------------------------------------------------------------------------------------------- a random workload

enum { LIVE = 24 };

typedef struct workload {
    eng_engine *engine;
    outcome out[LIVE];
    bool live[LIVE];
    uint64_t random, last_id;
    uint32_t words[4];
    unsigned word;
} workload;

static uint32_t draw(workload *w, uint32_t below) {
    if (w->word % 4 == 0)
        eng_philox(77, 1, w->random++, w->words);
    return w->words[w->word++ % 4] % below;
}

static void act(workload *w, const int32_t *prompt) {
    uint32_t i = draw(w, LIVE), what = draw(w, 10);
    outcome *out = &w->out[i];
    if (!w->live[i] && what < 6) {
        eng_request request = greedy(w->engine, prompt + draw(w, 50), 1 + draw(w, 150), draw(w, 12));
        request.owner = draw(w, 4);
        request.priority = (int32_t)draw(w, 3);
        request.logprobs = (int32_t)draw(w, 4) - 1;
        request.prompt_logprobs = request.logprobs > 0;
        request.repetition_penalty = draw(w, 2) ? 1.1F : 1;
        memset(out, 0, sizeof *out);
        request.user = out;
        eng_status status = eng_submit(w->engine, &request, &out->id, NULL);
        ck_assert(status == ENG_OK || status == ENG_FULL);
        w->live[i] = status == ENG_OK;
        if (w->live[i]) {
            ck_assert_uint_gt(out->id, w->last_id);
            w->last_id = out->id;
        }
    } else if (w->live[i] && what < 3) {
        eng_cancel(w->engine, out->id);
        out->finals = 1; // an event after this fails in collect
        w->live[i] = false;
    } else if (w->live[i]) {
        eng_pause(w->engine, out->id, what < 5);
    }
}

static void check_gauges(workload *w, uint64_t allocations) {
    eng_gauges gauges = gauges_of(w->engine);
    uint64_t live = 0;
    for (int i = 0; i < LIVE; i++) {
        if (w->live[i] && w->out[i].finals)
            w->live[i] = false;
        live += w->live[i];
    }
    ck_assert_uint_eq(gauges.queued_requests + gauges.running, live);
    ck_assert_uint_eq(gauges.states_used, gauges.running);
    ck_assert_uint_le(gauges.states_used, gauges.states_total);
    ck_assert_uint_le(gauges.kv_pages_used, gauges.kv_pages_total);
    ck_assert_uint_ge(gauges.kv_pages_used, gauges.running);
    ck_assert(gauges.queued_requests > 0 || gauges.queued_tokens == 0);
    ck_assert_uint_eq(gauges.device_allocations, allocations);
}

START_TEST(random_operations_keep_the_books) {
    static workload w;
    static int32_t prompt[250];
    memset(&w, 0, sizeof w);
    small_prompt(1, prompt, 250);
    w.engine = open_with(
        SMALL_LLAMA,
        (eng_options){.max_rows = 5, .queue_requests = 10, .state_budget = 5 * 256 + 12 * 64 * 512}); // slots, pages
    ck_assert_uint_eq(gauges_of(w.engine).kv_pages_total, 12);
    uint64_t allocations = gauges_of(w.engine).device_allocations;
    for (int i = 0; i < 400; i++) {
        act(&w, prompt);
        if (draw(&w, 2))
            step(w.engine);
        check_gauges(&w, allocations);
    }
    for (int i = 0; i < LIVE; i++)
        if (w.live[i])
            eng_pause(w.engine, w.out[i].id, false);
    drain(w.engine);
    for (int i = 0; i < LIVE; i++)
        ck_assert(!w.live[i] || w.out[i].finish == ENG_FINISH_LENGTH);
    eng_close(w.engine);
}
END_TEST

static Suite *scheduler_suite(void) {
    Suite *suite = suite_create("scheduler");
    TCase *cases = tcase_create("door");
    tcase_set_timeout(cases, 60);
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_test(cases, the_queue_is_bounded);
    tcase_add_test(cases, requests_wait_for_pages_and_then_run);
    tcase_add_test(cases, cancel_ends_it_in_each_phase);
    tcase_add_test(cases, callbacks_may_cancel_and_submit);
    tcase_add_test(cases, a_paused_request_keeps_its_place);
    tcase_add_test(cases, prompts_take_one_chunk_a_step_beside_a_client);
    tcase_add_test(cases, several_prompts_are_read_side_by_side);
    tcase_add_test(cases, prompts_with_states_in_bf16_are_read_by_a_chunk);
    tcase_add_test(cases, penalties_hold_up_no_more_than_they_must);
    tcase_add_test(cases, owners_take_turns);
    tcase_add_test(cases, priority_comes_before_turns);
    tcase_add_test(cases, prompts_are_read_in_turns_over_owners);
    tcase_add_test(cases, followers_keep_their_turn);
    tcase_add_test(cases, scored_prompts_share_a_step);
    tcase_add_test(cases, random_operations_keep_the_books);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(scheduler_suite)

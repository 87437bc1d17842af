// SPDX-License-Identifier: Apache-2.0
// What prompts that begin alike share: whatever a request began from - nothing, a state that was kept, one that another
// request left - its answer has the same bits; what is kept stays in its budget; what is wrong is found.
//
// The answers that are right come from an engine that keeps nothing and gets one request at a time. Chunks are short
// (cpu:16).
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/mixer_variants.h"
#include "tests/engine/reply.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

enum { MOST = REPLY_PROMPT, DRAWN = 3, ENOUGH = 1 << 30 };

static void count_errors(void *context, eng_log_level level, const char *text) {
    *(int *)context += level == ENG_LOG_ERROR && strstr(text, "prefix cache");
}

static eng_engine *open_model(const small_model *model, eng_options options) {
    eng_engine *engine = NULL;
    eng_error error = {0};
    if (!temp_exists("model"))
        small_checkpoint(temp_path("model"), model, NULL, false);
    options.model_dir = temp_path("model");
    options.device = test_device("cpu:16");
    options.max_rows = options.max_rows ? options.max_rows : 4;
    ck_assert_msg(eng_open(&options, &engine, &error) == ENG_OK, "%s: %s", model->name, error.text);
    return engine;
}

static eng_engine *open_mesa(eng_options options) {
    return open_model(&small_models[SMALL_MESA], options);
}

static int32_t chunk_of(const eng_engine *engine) {
    return eng_info(engine)->chunk;
}

// Of ids that no model ends with.
static void plain_ids(uint64_t seed, int32_t *ids, int32_t count) {
    mixer_prompt(seed, ids, count);
    for (int32_t i = 0; i < count; i++)
        ids[i] = ids[i] < 2 ? 2 : ids[i];
}

// ------------------------------------------------------------------------------------------------------------- replies

static eng_request asking(const eng_engine *engine, const int32_t *ids, int32_t count) {
    eng_request request = greedy(engine, ids, (size_t)count, DRAWN);
    request.ignore_eos = true;
    request.logprobs = 0;
    request.owner = 7;
    return request;
}

static eng_request scoring(const eng_engine *engine, const int32_t *ids, int32_t count, int32_t top) {
    eng_request request = asking(engine, ids, count);
    request.logprobs = top;
    request.prompt_logprobs = true;
    return request;
}

// To the end. Whatever is not kept was given back.
static void listen(eng_engine *engine) {
    eng_snapshot_sums resting;
    reply_listen(engine);
    const eng_gauges gauges = gauges_of(engine);
    ck_assert_uint_eq(gauges.states_used, 0);
    ck_assert_uint_le(gauges.prefix_bytes, gauges.prefix_bytes_total);
    eng_snapshots_sum(engine->prefix_snapshots, &resting);
    ck_assert_uint_eq(resting.device + resting.host, gauges.prefix_states);
}

static const reply *answer_to(eng_engine *engine, eng_request request) {
    const reply *got = reply_to(engine, request);
    listen(engine);
    return got;
}

static void cached(const reply *got, int64_t want, const char *what) {
    ck_assert_msg(got->usage.cached_tokens == want, "%s: %ld cached, not %ld", what, (long)got->usage.cached_tokens,
                  (long)want);
}

// ------------------------------------------------------------------------------------------------------- every mixer

// Both engines, the same folder.
typedef struct both {
    eng_engine *cold, *warm;
} both;

static both open_both(const small_model *model, eng_options options) {
    both engines = {.cold = open_model(model, (eng_options){.max_rows = 1})};
    engines.warm = open_model(model, options);
    return engines;
}

static void close_both(both engines) {
    eng_close(engines.cold);
    eng_close(engines.warm);
}

static int32_t below(const eng_engine *engine, int32_t count) {
    return (count - 1) / chunk_of(engine) * chunk_of(engine);
}

// A prompt that goes on behind what was read before, alone and beside two others, the second of which follows it.
static void check_length(both engines, const int32_t *ids, int32_t count, bool scored, const char *what) {
    static reply want, got[3];
    int32_t other[MOST];
    eng_request request = scored ? scoring(engines.warm, ids, count, 2) : asking(engines.warm, ids, count);
    want = *answer_to(engines.cold, request);
    const reply *alone = answer_to(engines.warm, request);
    reply_same(alone, &want, what);
    ck_assert_msg(alone->usage.cached_tokens >= 2 * chunk_of(engines.warm), "%s: not cached", what);
    plain_ids((uint64_t)count, other, count);
    reply_ask(engines.warm, asking(engines.warm, other, count), &got[0]);
    reply_ask(engines.warm, request, &got[1]);
    reply_ask(engines.warm, request, &got[2]);
    listen(engines.warm);
    for (int i = 1; i < 3; i++) {
        reply_same(&got[i], &want, what);
        cached(&got[i], below(engines.warm, count), what);
    }
}

// Residues of the grid; on longer grids the ends and some between.
static int32_t next_residue(int32_t residue, int32_t chunk) {
    return chunk <= 16 || residue < 2 || residue >= chunk - 3 ? residue + 1
           : residue + chunk / 8 < chunk - 3                  ? residue + chunk / 8
                                                              : chunk - 3;
}

START_TEST(a_hit_is_a_miss) {
    int32_t ids[MOST];
    const small_model *model = &mixer_variants[_i];
    both engines = open_both(model, (eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engines.warm);
    plain_ids(1, ids, 5 * chunk);
    answer_to(engines.warm, asking(engines.warm, ids, 2 * chunk + 1));
    for (int32_t residue = 0; residue < chunk; residue = next_residue(residue, chunk))
        check_length(engines, ids, 3 * chunk + residue, false, model->name);
    plain_ids(2, ids, 5 * chunk);
    answer_to(engines.warm, scoring(engines.warm, ids, 2 * chunk + 2, 3));
    for (int32_t residue = 1; residue < chunk; residue = next_residue(residue, chunk) + chunk / 8)
        check_length(engines, ids, 3 * chunk + residue, true, model->name);
    close_both(engines);
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ who hits

START_TEST(a_state_serves_its_owner_and_its_knobs_alone) {
    int32_t ids[MOST];
    both engines = open_both(&small_models[SMALL_MESA], (eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engines.warm), count = 3 * chunk + 5;
    plain_ids(1, ids, count);
    eng_request request = asking(engines.warm, ids, count);
    cached(answer_to(engines.warm, request), 0, "the first");
    cached(answer_to(engines.warm, request), 3 * chunk, "the same");
    request.owner = 8;
    cached(answer_to(engines.warm, request), 0, "another owner's");
    for (int kind = 0; kind < 4; kind++) {
        request = asking(engines.warm, ids, count);
        request.knobs = (eng_knobs[]){{ENG_CG_TOLERANCE, 1e-2F, 8, 1, 1},
                                      {ENG_CG_TOLERANCE, 1e-3F, 8, 1, 1},
                                      {ENG_CG_STEPS, 1e-3F, 8, 1, 1},
                                      {ENG_CG_EXACT, 0, 0, 1, 1}}[kind];
        reply want = *answer_to(engines.cold, request);
        const reply *got = answer_to(engines.warm, request);
        cached(got, 0, "other knobs");
        reply_same(got, &want, "other knobs");
        request.knobs.exit_threshold = 0.5F; // does not enter a state
        got = answer_to(engines.warm, request);
        cached(got, 3 * chunk, "the same knobs");
        reply_same(got, &want, "the same knobs");
    }
    request.sampling = (eng_sampling){.temperature = 1, .top_p = 1, .seed = 3}; // nor do these
    request.repetition_penalty = 1.3F;
    reply want = *answer_to(engines.cold, request);
    const reply *got = answer_to(engines.warm, request);
    cached(got, 3 * chunk, "other sampling");
    reply_same(got, &want, "other sampling");
    close_both(engines);
}
END_TEST

START_TEST(knobs_do_not_matter_where_nothing_is_solved) {
    int32_t ids[MOST] = {0};
    eng_engine *engine = open_model(&mixer_variants[15], (eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engine);
    eng_request request = asking(engine, ids, chunk + 1);
    answer_to(engine, request);
    request.knobs = (eng_knobs){ENG_CG_EXACT, 0, 0, 1, 1};
    cached(answer_to(engine, request), chunk, "knobs without a solver");
    eng_close(engine);
}
END_TEST

// Only what tells as much as is asked for serves a request that wants its prompt's logprobs.
START_TEST(logprobs_come_from_states_that_have_them) {
    int32_t ids[MOST];
    both engines = open_both(&small_models[SMALL_MESA], (eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engines.warm), count = 3 * chunk + 5;
    static const struct {
        int32_t top; // -1: no logprobs of the prompt
        bool compute, hits;
    } turns[] = {{-1, false, false}, {1, false, false}, {1, false, true},  {0, false, true},
                 {3, false, false},  {2, false, true},  {-1, false, true}, {1, true, false},
                 {3, false, true},   {3, true, false},  {2, true, true},   {3, false, true}};
    plain_ids(1, ids, count);
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        eng_request request =
            turns[i].top < 0 ? asking(engines.warm, ids, count) : scoring(engines.warm, ids, count, turns[i].top);
        char what[32];
        snprintf(what, sizeof what, "turn %zu", i);
        request.token_compute = turns[i].compute;
        reply want = *answer_to(engines.cold, request);
        const reply *got = answer_to(engines.warm, request);
        reply_same(got, &want, what);
        cached(got, turns[i].hits ? 3 * chunk : 0, what);
    }
    // the id behind the state is another: its logprob is not there
    ids[3 * chunk] = ids[3 * chunk] == 2 ? 3 : 2;
    reply want = *answer_to(engines.cold, scoring(engines.warm, ids, count, 1));
    const reply *got = answer_to(engines.warm, scoring(engines.warm, ids, count, 1));
    reply_same(got, &want, "another id behind the state");
    ck_assert_int_lt(got->usage.cached_tokens, 3 * chunk);
    close_both(engines);
}
END_TEST

// At which loop an output is read enters no state, but logprobs.
START_TEST(loops_share_states_and_no_logprobs) {
    static const struct {
        float threshold;
        int32_t loops;
        bool scored, hits;
    } turns[] = {{1, 3, false, false},  {0.3F, 3, false, true}, {1, 1, false, true},    {0.3F, 3, true, false},
                 {0.3F, 3, true, true}, {0.3F, 2, true, false}, {0.6F, 3, true, false}, {0.6F, 3, true, true}};
    int32_t ids[MOST];
    both engines = open_both(&small_models[SMALL_LOOPED], (eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engines.warm), count = 3 * chunk + 5;
    plain_ids(1, ids, count);
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        eng_request request = turns[i].scored ? scoring(engines.warm, ids, count, 1) : asking(engines.warm, ids, count);
        request.knobs.exit_threshold = turns[i].threshold;
        request.knobs.max_loops = turns[i].loops;
        reply want = *answer_to(engines.cold, request);
        const reply *got = answer_to(engines.warm, request);
        reply_same(got, &want, "loops");
        cached(got, turns[i].hits ? 3 * chunk : 0, "loops");
    }
    close_both(engines);
}
END_TEST

// A request that fails when a solve does not converge fails on what it would not read itself as well.
START_TEST(what_did_not_converge_fails_as_before) {
    static reply together[2];
    int32_t ids[MOST];
    eng_engine *engine = open_mesa((eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engine), count = 3 * chunk + 5;
    plain_ids(1, ids, count);
    eng_request request = asking(engine, ids, count);
    request.knobs = (eng_knobs){ENG_CG_TOLERANCE, 1e-7F, 1, 1, 1};
    answer_to(engine, request);
    cached(answer_to(engine, request), 3 * chunk, "one that does not mind");
    request.fail_unconverged = true;
    const reply *got = answer_to(engine, request);
    ck_assert_int_eq(got->status, ENG_UNCONVERGED);
    cached(got, 0, "one that fails");
    request.owner = 8; // while the prompt is read by one that does not mind
    request.fail_unconverged = false;
    reply_ask(engine, request, &together[0]);
    request.fail_unconverged = true;
    reply_ask(engine, request, &together[1]);
    listen(engine);
    ck_assert_int_eq(together[0].finish, ENG_FINISH_LENGTH);
    ck_assert_int_eq(together[1].status, ENG_UNCONVERGED);
    cached(&together[1], 0, "one that fails beside");
    request.knobs = eng_info(engine)->default_knobs;
    answer_to(engine, request);
    cached(answer_to(engine, request), 3 * chunk, "one that converges");
    eng_close(engine);
}
END_TEST

// -------------------------------------------------------------------------------------------------------- where to hit

START_TEST(prompts_that_part_share_what_is_alike) {
    int32_t ids[MOST];
    both engines = open_both(&small_models[SMALL_MESA], (eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engines.warm), count = 8 * chunk + 3;
    const int64_t want_cached[] = {0, 0, 4 * chunk, 4 * chunk};
    for (int i = 0; i < 4; i++) { // the first four chunks and a half are alike
        plain_ids(1, ids, count);
        plain_ids(10 + (uint64_t)i, ids + 4 * chunk + chunk / 2, 4 * chunk + 3 - chunk / 2);
        const eng_request request = asking(engines.warm, ids, count);
        reply want = *answer_to(engines.cold, request);
        const reply *got = answer_to(engines.warm, request);
        reply_same(got, &want, "a prompt that parts");
        cached(got, want_cached[i], "a prompt that parts");
        cached(answer_to(engines.warm, request), 8 * chunk, "the same again");
    }
    cached(answer_to(engines.warm, asking(engines.warm, ids, 4 * chunk + 1)), 4 * chunk, "a shorter one");
    cached(answer_to(engines.warm, asking(engines.warm, ids, 4 * chunk)), 0, "one with nothing left to read");
    cached(answer_to(engines.warm, asking(engines.warm, ids, chunk)), 0, "less than a chunk and an id");
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_hits, 7);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_misses, 3);
    close_both(engines);
}
END_TEST

START_TEST(states_stand_along_a_long_prompt) {
    int32_t ids[MOST];
    const int32_t chunk = test_device_is_cpu() ? 16 : 64, count = 20 * chunk + 3;
    eng_engine *engine =
        open_mesa((eng_options){.prefix_budget = ENOUGH, .snapshot_tokens = 4 * chunk, .prompt_tokens = 1});
    const uint64_t state = eng_pool_slot_stride(engine->pool);
    plain_ids(1, ids, count);
    answer_to(engine, asking(engine, ids, count)); // four chunks a step
    ck_assert_uint_eq(gauges_of(engine).prefix_states, 5);
    for (int32_t alike = 4; alike <= 16; alike += 4) {
        plain_ids(1, ids, count);
        ids[alike * chunk + 1] = 23;
        ids[alike * chunk + 2] = 22;
        cached(answer_to(engine, asking(engine, ids, (alike + 1) * chunk)), alike * chunk, "a part of it");
    }
    eng_close(engine);
    // as many as take a quarter of the budget
    engine = open_mesa((eng_options){.prefix_budget = 8 * state + 65536, .snapshot_tokens = 4 * chunk});
    plain_ids(1, ids, count);
    answer_to(engine, asking(engine, ids, count));
    ck_assert_uint_le(gauges_of(engine).prefix_states, 3);
    eng_close(engine);
}
END_TEST

START_TEST(a_first_turn_hits_and_goes_on) {
    static reply want;
    int32_t ids[MOST];
    both engines = open_both(&small_models[SMALL_HYBRID], (eng_options){.prefix_budget = ENOUGH, .max_rows = 8});
    const int32_t chunk = chunk_of(engines.warm), count = 3 * chunk + 5;
    plain_ids(1, ids, count + 9);
    answer_to(engines.warm, asking(engines.warm, ids, count));
    uint64_t id[2];
    eng_engine *const engine[2] = {engines.cold, engines.warm};
    for (int turn = 0; turn < 3; turn++)
        for (int i = 0; i < 2; i++) {
            eng_request request = asking(engine[i], turn ? ids + count : ids, turn ? 9 : count);
            if (turn == 0)
                ck_assert_int_eq(eng_timeline_create(engine[i], 7, &id[i], NULL), ENG_OK);
            request.timeline = id[i];
            request.timeline_position = -1;
            const reply *got = answer_to(engine[i], request);
            if (i == 0) {
                want = *got;
                continue;
            }
            reply_same(got, &want, "a turn");
            cached(got, turn == 0 ? 3 * chunk : 0, "a turn");
        }
    // and what its first turn has read serves others
    plain_ids(5, ids, count);
    ck_assert_int_eq(eng_timeline_create(engines.warm, 7, &id[0], NULL), ENG_OK);
    eng_request request = asking(engines.warm, ids, count);
    request.timeline = id[0];
    request.timeline_position = -1;
    answer_to(engines.warm, request);
    cached(answer_to(engines.warm, asking(engines.warm, ids, count)), 3 * chunk, "behind a turn");
    close_both(engines);
}
END_TEST

// -------------------------------------------------------------------------------------------------------------- budget

START_TEST(the_budget_holds_to_the_byte) {
    enum { PROMPTS = 12, STATES = 3 };
    int32_t ids[MOST];
    eng_engine *engine = open_mesa((eng_options){0});
    const uint64_t state = eng_pool_slot_stride(engine->pool);
    const int32_t chunk = chunk_of(engine), count = 2 * chunk + 5;
    eng_close(engine);
    engine = open_mesa((eng_options){.prefix_budget = STATES * state + 4096, .snapshot_tokens = 1});
    uint64_t nodes = 0;
    for (int i = 0; i < PROMPTS; i++) {
        plain_ids(100 + (uint64_t)i, ids, count);
        cached(answer_to(engine, asking(engine, ids, count)), 0, "a new one");
        const eng_gauges gauges = gauges_of(engine);
        const uint64_t rest = gauges.prefix_bytes - gauges.prefix_states * state;
        ck_assert_uint_eq(gauges.prefix_states, i < STATES ? (uint64_t)i + 1 : STATES);
        ck_assert_uint_eq(gauges.prefix_evictions, i < STATES ? 0 : (uint64_t)i + 1 - STATES);
        if (i == 0)
            nodes = rest;
        else if (i < STATES) // two nodes each beside the table, which has room for 64
            ck_assert_uint_eq(rest, nodes + (uint64_t)i * (nodes - 64 * sizeof(void *)));
        plain_ids(100, ids, count);
        cached(answer_to(engine, asking(engine, ids, count)), 2 * chunk, "one that is always used");
    }
    for (int i = PROMPTS - 1; i > 0; i--) {
        plain_ids(100 + (uint64_t)i, ids, count);
        const int64_t want = i > PROMPTS - STATES ? 2 * chunk : 0;
        const reply *got = answer_to(engine, asking(engine, ids, count));
        if (want > 0)
            cached(got, want, "one that was used recently");
        if (i == PROMPTS - STATES)
            cached(got, 0, "one that was not");
    }
    eng_prefix_purge(engine->prefix);
    ck_assert_uint_eq(gauges_of(engine).prefix_bytes + gauges_of(engine).prefix_states, 0);
    listen(engine);
    eng_close(engine);
    engine = open_mesa((eng_options){.prefix_budget = state, .snapshot_tokens = 1}); // not even one, with what names it
    answer_to(engine, asking(engine, ids, count));
    cached(answer_to(engine, asking(engine, ids, count)), 0, "no room");
    eng_close(engine);
}
END_TEST

// States of short prompts lie where they cost nothing. When their slot is needed they go, unless they were of use.
START_TEST(short_prompts_cost_no_transfer) {
    static reply many[4];
    int32_t ids[MOST];
    eng_snapshot_sums sums;
    eng_engine *engine = open_mesa((eng_options){.prefix_budget = ENOUGH});
    const int32_t chunk = chunk_of(engine), count = 2 * chunk + 5;
    for (int i = 0; i < 8; i++) {
        plain_ids(100 + (uint64_t)i, ids, count);
        answer_to(engine, asking(engine, ids, count));
        if (i < 2)
            cached(answer_to(engine, asking(engine, ids, count)), 2 * chunk, "again at once");
    }
    eng_snapshots_sum(engine->prefix_snapshots, &sums);
    ck_assert_uint_eq(sums.device, 3); // beside the slot of the last request
    ck_assert_uint_eq(sums.host, 0);
    ck_assert_uint_eq(gauges_of(engine).prefix_evictions, 5);
    for (int i = 0; i < 4; i++)
        reply_ask(engine, asking(engine, ids + i, count - chunk - 5), &many[i]);
    reply_step(engine);
    eng_snapshots_sum(engine->prefix_snapshots, &sums);
    ck_assert_uint_eq(sums.host, 2);
    ck_assert_uint_eq(gauges_of(engine).prefix_evictions, 6);
    listen(engine);
    const int64_t want[] = {2 * chunk, 2 * chunk, 0};
    for (int i = 0; i < 3; i++) {
        plain_ids(100 + (uint64_t)i, ids, count);
        cached(answer_to(engine, asking(engine, ids, count)), want[i], "later");
    }
    eng_close(engine);
}
END_TEST

// Blocks of logprobs count as well, once however many states along a prompt refer to them.
START_TEST(logprobs_count) {
    int32_t ids[MOST];
    eng_engine *engine = open_mesa((eng_options){.prefix_budget = ENOUGH});
    const uint64_t state = eng_pool_slot_stride(engine->pool);
    const int32_t chunk = chunk_of(engine), count = 6 * chunk + 5;
    plain_ids(1, ids, count);
    answer_to(engine, asking(engine, ids, count));
    const uint64_t without = gauges_of(engine).prefix_bytes;
    answer_to(engine, scoring(engine, ids, count, 2));
    ck_assert_uint_eq(gauges_of(engine).prefix_bytes - without, eng_scores_bytes(6 * (size_t)chunk + 1, 2));
    eng_close(engine);
    engine = open_mesa((eng_options){.prefix_budget = ENOUGH, .snapshot_tokens = chunk, .prompt_tokens = 1});
    answer_to(engine, scoring(engine, ids, count, 2));
    ck_assert_uint_eq(gauges_of(engine).prefix_states, 6);
    ck_assert_uint_eq(gauges_of(engine).prefix_bytes, without + 5 * state + eng_scores_bytes(6 * (size_t)chunk + 1, 2));
    eng_prefix_purge(engine->prefix);
    ck_assert_uint_eq(gauges_of(engine).prefix_bytes, 0);
    eng_close(engine);
}
END_TEST

// Full attention: pages are shared and come back, and never keep those out who run.
START_TEST(pages_make_room) {
    int32_t ids[MOST];
    const small_model *model = &small_models[SMALL_LLAMA];
    both engines = open_both(model, (eng_options){.max_rows = 3,
                                                  .state_budget = 3 * 256 + 8 * 64 * 512, // three slots, eight pages
                                                  .prefix_budget = ENOUGH,
                                                  .snapshot_tokens = 1});
    ck_assert_uint_eq(gauges_of(engines.warm).kv_pages_total, 8);
    for (int i = 0; i < 12; i++) {
        const int32_t count = 150 + 11 * i; // 3 to 5 pages
        plain_ids(1 + (uint64_t)(i % 4), ids, count);
        const eng_request request = asking(engines.warm, ids, count);
        reply want = *answer_to(engines.cold, request);
        const reply *got = answer_to(engines.warm, request);
        reply_same(got, &want, "with pages");
        if (i >= 4)
            ck_assert_int_ge(got->usage.cached_tokens, 128);
        ck_assert_uint_le(gauges_of(engines.warm).kv_pages_used, 8);
    }
    close_both(engines);
}
END_TEST

// ----------------------------------------------------------------------------------------------------------- together

// Whether anything is kept or not, and whatever the rows: one reads, the others begin where it had to stop.
START_TEST(a_hundred_equal_prompts_are_read_once) {
    enum { PROMPTS = 100 };
    static reply got[PROMPTS], want;
    int32_t ids[MOST];
    for (int kind = 0; kind < 4; kind++) {
        const bool scored = kind % 2;
        both engines =
            open_both(&small_models[SMALL_MESA], (eng_options){.max_rows = 8, .prefix_budget = kind < 2 ? 0 : ENOUGH});
        const int32_t count = 5 * chunk_of(engines.warm) + 3;
        plain_ids(1, ids, count);
        const eng_request request = scored ? scoring(engines.warm, ids, count, 1) : asking(engines.warm, ids, count);
        want = *answer_to(engines.cold, request);
        for (int i = 0; i < PROMPTS; i++)
            reply_ask(engines.warm, request, &got[i]);
        listen(engines.warm);
        for (int i = 0; i < PROMPTS; i++) {
            reply_same(&got[i], &want, "one of many");
            cached(&got[i], i > 0 ? below(engines.warm, count) : 0, "one of many");
        }
        ck_assert_uint_eq(gauges_of(engines.warm).prefix_hits, PROMPTS - 1);
        close_both(engines);
    }
}
END_TEST

// One context, many continuations, at once: the context is read once, and each continuation by itself.
START_TEST(choices_are_scored_behind_one_context) {
    enum { CONTINUATIONS = 6 };
    static reply got[CONTINUATIONS], want[CONTINUATIONS];
    int32_t ids[CONTINUATIONS][MOST];
    both engines = open_both(&small_models[SMALL_MESA], (eng_options){.max_rows = 3});
    const int32_t chunk = chunk_of(engines.warm);
    for (int32_t more = 0; more < 3; more += 2) { // the logprob of the id behind a state is not there for another id
        const int32_t context = 4 * chunk + more, count = context + chunk;
        for (int i = 0; i < CONTINUATIONS; i++) {
            plain_ids(1, ids[i], count);
            plain_ids(50 + (uint64_t)i, ids[i] + context, chunk);
            ids[i][context] = 2 + i;
            want[i] = *answer_to(engines.cold, scoring(engines.cold, ids[i], count, 1));
        }
        for (int i = 0; i < CONTINUATIONS; i++)
            reply_ask(engines.warm, scoring(engines.warm, ids[i], count, 1), &got[i]);
        listen(engines.warm);
        for (int i = 0; i < CONTINUATIONS; i++) {
            reply_same(&got[i], &want[i], "a continuation");
            cached(&got[i], i == 0 ? 0 : more ? 4 * chunk : 3 * chunk, "a continuation");
        }
    }
    close_both(engines);
}
END_TEST

// The one that is followed goes away at every moment; those behind it go on from what it had read.
START_TEST(a_reader_that_is_cancelled_leaves_what_it_has) {
    static reply got[3], want;
    int32_t ids[MOST];
    for (int kind = 0; kind < 3; kind++) { // plain, scored, nothing kept
        both engines =
            open_both(&small_models[SMALL_HYBRID],
                      (eng_options){.max_rows = 2, .prompt_tokens = 1, .prefix_budget = kind == 2 ? 0 : ENOUGH});
        const int32_t chunk = chunk_of(engines.warm), count = 9 * chunk + 3;
        for (int steps = 0; steps < 6; steps++) {
            plain_ids(10 + (uint64_t)steps, ids, count);
            const eng_request request =
                kind == 1 ? scoring(engines.warm, ids, count, 1) : asking(engines.warm, ids, count);
            want = *answer_to(engines.cold, request);
            for (int i = 0; i < 3; i++)
                reply_ask(engines.warm, request, &got[i]);
            for (int i = 0; i < steps; i++)
                reply_step(engines.warm);
            if (steps % 3 == 2)
                eng_pause(engines.warm, got[0].id, true); // as good as gone
            else
                eng_cancel(engines.warm, got[0].id);
            while (got[1].finish == ENG_FINISH_NONE || got[2].finish == ENG_FINISH_NONE)
                ck_assert(reply_step(engines.warm));
            reply_same(&got[1], &want, "behind one that is gone");
            reply_same(&got[2], &want, "behind one that is gone");
            cached(&got[2], 9 * chunk, "the last one");
            if (steps > 0 && steps < 3 && kind != 1) // logprobs of what is under way are not known
                ck_assert_int_ge(got[1].usage.cached_tokens, chunk);
            eng_pause(engines.warm, got[0].id, false);
            listen(engines.warm);
        }
        close_both(engines);
    }
}
END_TEST

// --------------------------------------------------------------------------------------------------------------- audit

START_TEST(an_audit_finds_nothing_where_nothing_is_wrong) {
    int32_t ids[MOST];
    int errors = 0;
    eng_engine *engine = open_mesa(
        (eng_options){.prefix_budget = ENOUGH, .prefix_audit = 3, .log = count_errors, .log_context = &errors});
    const int32_t count = 5 * chunk_of(engine) + 3;
    for (int i = 0; i < 13; i++) {
        plain_ids((uint64_t)(i % 2), ids, count);
        answer_to(engine, i % 4 == 3 ? scoring(engine, ids, count, 1) : asking(engine, ids, count));
    }
    const eng_gauges gauges = gauges_of(engine);
    ck_assert_uint_eq(gauges.prefix_audits, gauges.prefix_hits / 3);
    ck_assert_uint_ge(gauges.prefix_audits, 2);
    ck_assert_uint_eq(gauges.prefix_mismatches, 0);
    ck_assert_int_eq(errors, 0);
    eng_close(engine);
    engine = open_mesa((eng_options){.prefix_budget = ENOUGH, .prefix_audit = 1, .fast = true});
    for (int i = 0; i < 4; i++)
        answer_to(engine, asking(engine, ids, count));
    ck_assert_uint_eq(gauges_of(engine).prefix_hits, 3);
    ck_assert_uint_eq(gauges_of(engine).prefix_audits, 0); // bits are not promised
    eng_close(engine);
}
END_TEST

// One bit of the state on the host.
static void break_a_snapshot(eng_engine *engine) {
    while (eng_snapshots_spill(engine->prefix_snapshots)) {
    }
    ck_assert_int_eq(kern_synchronize(engine->stream), KERN_OK);
    eng_snapshot *snapshot = eng_snapshots_oldest(engine->prefix_snapshots);
    ck_assert_ptr_nonnull(snapshot);
    ((unsigned char *)snapshot->slot)[eng_pool_slot_stride(engine->pool) / 3] ^= 1;
}

START_TEST(an_audit_finds_a_broken_state) {
    static reply client;
    int32_t ids[MOST], other[MOST];
    int errors = 0;
    both engines = open_both(
        &small_models[SMALL_MESA],
        (eng_options){
            .prefix_budget = ENOUGH, .prefix_audit = 1, .log = count_errors, .log_context = &errors, .max_rows = 2});
    const int32_t count = 5 * chunk_of(engines.warm) + 3;
    plain_ids(1, ids, count);
    const eng_request request = asking(engines.warm, ids, count);
    reply want = *answer_to(engines.cold, request);
    answer_to(engines.warm, request);
    break_a_snapshot(engines.warm);
    plain_ids(2, other, count); // of somebody else: everything goes
    eng_request elsewhere = asking(engines.warm, other, count);
    elsewhere.owner = 8;
    answer_to(engines.warm, elsewhere);
    ck_assert_uint_eq(gauges_of(engines.warm).prefix_states, 2);
    answer_to(engines.warm, request);
    eng_gauges gauges = gauges_of(engines.warm);
    ck_assert_uint_eq(gauges.prefix_audits, 1);
    ck_assert_uint_eq(gauges.prefix_mismatches, 1);
    ck_assert_uint_eq(gauges.prefix_states + gauges.prefix_bytes, 0);
    ck_assert_int_eq(errors, 1);
    const reply *got = answer_to(engines.warm, request);
    cached(got, 0, "after the purge");
    reply_same(got, &want, "after the purge");
    reply_same(answer_to(engines.warm, request), &want, "and again");
    gauges = gauges_of(engines.warm);
    ck_assert_uint_eq(gauges.prefix_audits, 2);
    ck_assert_uint_eq(gauges.prefix_mismatches, 1);
    reply_ask(engines.warm, request, &client); // an audit gives its slot to those who wait
    for (int i = 0; i < 2; i++)
        reply_step(engines.warm);
    eng_cancel(engines.warm, client.id);
    listen(engines.warm);
    close_both(engines);
}
END_TEST

// ---------------------------------------------------------------------------------------------------------------- hunt

typedef struct hunt {
    both engines;
    uint64_t at;
    reply got[8], want[8];
    eng_request request[8];
    int32_t ids[8][MOST];
    bool gone[8];
} hunt;

static uint32_t draw(hunt *h, uint32_t under) {
    uint32_t word[4];
    eng_philox(9, 4, h->at++, word);
    return word[0] % under;
}

// Prompts out of few pieces, so that most begin like another.
static void compose(hunt *h, int i) {
    const int32_t chunk = chunk_of(h->engines.warm);
    const int32_t count = 1 + (int32_t)draw(h, (uint32_t)(5 * chunk));
    plain_ids(1, h->ids[i], count);
    const int32_t from = (int32_t)(1 + draw(h, 4)) * chunk - (int32_t)draw(h, 2) * chunk / 2;
    const uint64_t seed = 10 + draw(h, 2);
    if (from < count)
        plain_ids(seed, h->ids[i] + from, count - from);
    const bool scored = draw(h, 3) == 0;
    eng_request *request = &h->request[i];
    *request = scored ? scoring(h->engines.warm, h->ids[i], count, (int32_t)draw(h, 3))
                      : asking(h->engines.warm, h->ids[i], count);
    request->max_tokens = draw(h, 4);
    request->owner = draw(h, 8) == 0;
    request->priority = (int32_t)draw(h, 2);
    request->token_compute = draw(h, 3) == 0;
    if (draw(h, 8) == 0)
        request->knobs.cg_tolerance = 1e-2F;
}

static void disturb(hunt *h) {
    const int i = (int)draw(h, 8);
    if (h->got[i].finish != ENG_FINISH_NONE || h->gone[i])
        return;
    if (draw(h, 2)) {
        eng_cancel(h->engines.warm, h->got[i].id);
        h->gone[i] = true;
    } else {
        eng_pause(h->engines.warm, h->got[i].id, draw(h, 2));
    }
}

START_TEST(no_order_of_events_changes_a_bit) {
    static hunt h;
    int64_t hits = 0;
    h = (hunt){.at = (uint64_t)_i << 32};
    const small_model *model = &small_models[(const int[]){SMALL_MESA, SMALL_LLAMA, SMALL_HYBRID, SMALL_LOOPED}[_i]];
    h.engines.cold = open_model(model, (eng_options){.max_rows = 1});
    const eng_model_info *info = eng_info(h.engines.cold);
    const uint64_t budget = 3 * (info->state_bytes + 64 * info->kv_bytes_per_token) + 8192;
    h.engines.warm = open_model(
        model, (eng_options){.max_rows = 1 + _i, .prefix_budget = budget, .prefix_audit = 4, .snapshot_tokens = 32});
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < 8; i++) {
            compose(&h, i);
            h.want[i] = *reply_to(h.engines.cold, h.request[i]);
            h.gone[i] = false;
        }
        for (int i = 0; i < 8; i++) {
            reply_ask(h.engines.warm, h.request[i], &h.got[i]);
            for (uint32_t steps = draw(&h, 3); steps > 0; steps--)
                reply_step(h.engines.warm);
            if (draw(&h, 4) == 0)
                disturb(&h);
        }
        for (int i = 0; i < 8; i++)
            eng_pause(h.engines.warm, h.got[i].id, false);
        listen(h.engines.warm);
        for (int i = 0; i < 8; i++)
            if (!h.gone[i]) {
                reply_same(&h.got[i], &h.want[i], "at random");
                hits += h.got[i].usage.cached_tokens > 0;
            }
    }
    ck_assert_int_ge(hits, 20);
    ck_assert_uint_eq(gauges_of(h.engines.warm).prefix_mismatches, 0);
    close_both(h.engines);
}
END_TEST

static Suite *prefix_suite(void) {
    Suite *suite = suite_create("prefix");
    TCase *mixers = tcase_create("every mixer"), *cases = tcase_create("door");
    tcase_add_checked_fixture(mixers, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(mixers, 60);
    tcase_add_loop_test(mixers, a_hit_is_a_miss, 0, MIXER_VARIANTS);
    suite_add_tcase(suite, mixers);
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, a_state_serves_its_owner_and_its_knobs_alone);
    tcase_add_test(cases, knobs_do_not_matter_where_nothing_is_solved);
    tcase_add_test(cases, logprobs_come_from_states_that_have_them);
    tcase_add_test(cases, loops_share_states_and_no_logprobs);
    tcase_add_test(cases, what_did_not_converge_fails_as_before);
    tcase_add_test(cases, prompts_that_part_share_what_is_alike);
    tcase_add_test(cases, states_stand_along_a_long_prompt);
    tcase_add_test(cases, a_first_turn_hits_and_goes_on);
    tcase_add_test(cases, the_budget_holds_to_the_byte);
    tcase_add_test(cases, short_prompts_cost_no_transfer);
    tcase_add_test(cases, logprobs_count);
    tcase_add_test(cases, pages_make_room);
    tcase_add_test(cases, a_hundred_equal_prompts_are_read_once);
    tcase_add_test(cases, choices_are_scored_behind_one_context);
    tcase_add_test(cases, a_reader_that_is_cancelled_leaves_what_it_has);
    tcase_add_test(cases, an_audit_finds_nothing_where_nothing_is_wrong);
    tcase_add_test(cases, an_audit_finds_a_broken_state);
    tcase_add_loop_test(cases, no_order_of_events_changes_a_bit, 0, 4);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(prefix_suite)

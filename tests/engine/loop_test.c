// SPDX-License-Identifier: Apache-2.0
// Loops left for later: ids, logits and states are those of running all loops at once, bit for bit.
//
// For every mixer beside a softmax layer, random thresholds and bounds from token to token, sessions side by side, with
// forks, prompts in between and solvers that change; then whole requests with a cancellation and a store of the state.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/engine_internal.h"
#include "engine/mixer.h"
#include "engine/random.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

enum { SESSIONS = 3, STEPS = 150, LOOPS = 4, LENGTH = 400, VOCABULARY = 24, PROMPT = 21 };

static small_world world;
static eng_pool *pool;
static eng_batch *batch;

static int mixer_count(void) {
    int count = 0;
    while (eng_mixer_at((size_t)count))
        count++;
    return count;
}

static uint32_t draw(uint64_t stream, uint64_t place) {
    uint32_t word[4];
    eng_philox(5, stream, place, word);
    return word[0];
}

static void send(float *to, const float *from, size_t bytes) {
    ck_assert_int_eq(kern_upload(world.stream, to, from, bytes), KERN_OK);
    ck_assert_int_eq(kern_synchronize(world.stream), KERN_OK);
}

// Device memory of two places, whether it is the same.
static bool same_bytes(const void *a, const void *b, size_t bytes) {
    char *own = malloc(2 * bytes + 1);
    ck_assert_ptr_nonnull(own);
    ck_assert_int_eq(kern_download(world.stream, own, a, bytes), KERN_OK);
    ck_assert_int_eq(kern_download(world.stream, own + bytes, b, bytes), KERN_OK);
    ck_assert_int_eq(kern_synchronize(world.stream), KERN_OK);
    const bool same = memcmp(own, own + bytes, bytes) == 0;
    free(own);
    return same;
}

static void open_mixer(const char *mixer, const char *more, int32_t rows, int32_t tokens) {
    char config[1280];
    eng_error error = {0};
    snprintf(config, sizeof config,
             "{\"model_type\": \"mesa_net\", \"hidden_size\": 32, \"vocab_size\": 24, \"initializer_range\": 0.2,"
             "\"bos_token_id\": 0, \"eos_token_id\": 1, \"intermediate_size\": 48, \"num_heads\": 2, \"head_dim\": 16,"
             "\"mamba2\": {\"expand\": 1, \"state_size\": 8}, \"rglru\": {\"num_attention_heads\": 4},"
             "\"attn\": {\"num_heads\": 4, \"num_kv_heads\": 2},"
             "\"recurrence\": {\"decay\": \"channel\", \"update\": \"delta\"}, \"num_hidden_layers\": 3,"
             "\"layer_types\": [\"%s\", \"attention\", \"%s\"], \"num_loops\": 4, \"loop_blocks\": [1, 2]%s}",
             mixer, mixer, more);
    small_world_open(&(small_model){mixer, config, true, false}, test_device("cpu"), &world);
    float embedding[LOOPS * 32], gate[LOOPS * 32];
    for (int i = 0; i < LOOPS * 32; i++) {
        embedding[i] = 0.3F * sinf((float)i);
        gate[i] = 0.4F * cosf((float)i);
    }
    if (world.model->loop_embedding >= 0)
        send(small_tensor(&world, "loop_embedding.weight"), embedding, sizeof embedding);
    if (world.model->loop_residual_gate >= 0)
        send(small_tensor(&world, "loop_residual_gate.weight"), gate, sizeof gate);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, 2 * SESSIONS + 2, 80, &pool, NULL), ENG_OK);
    ck_assert_msg(eng_batch_create(world.weights, pool, world.stream, rows, tokens, &batch, &error) == ENG_OK, "%s",
                  error.text);
}

static void close_all(void) {
    eng_batch_free(batch);
    eng_pool_free(pool);
    small_world_close(&world);
}

static eng_session new_session(void) {
    eng_session session;
    ck_assert_int_eq(eng_session_open(pool, world.stream, LENGTH, &session, NULL), ENG_OK);
    return session;
}

static int32_t add(eng_session *session, kern_row_kind kind, const int32_t *ids, int32_t count, eng_knobs knobs,
                   bool whole) {
    int32_t index;
    eng_error error = {0};
    const eng_piece piece = {
        .session = session, .kind = kind, .ids = ids, .count = count, .knobs = knobs, .logits = true, .whole = whole};
    ck_assert_msg(eng_batch_add(batch, &piece, &index, &error) == ENG_OK, "%s", error.text);
    return index;
}

static void run(void) {
    eng_error error = {0};
    ck_assert_msg(eng_batch_run(batch, &error) == ENG_OK, "%s", error.text);
}

static eng_piece_result result_of(int32_t index) {
    eng_piece_result result;
    eng_batch_result(batch, index, &result);
    return result;
}

static int32_t waiting(const eng_session *session) {
    return eng_pool_pending(pool, session->slot)->total;
}

// Settles the first. Pages are compared by what sessions read of them.
static void same_states(const eng_session *deferred, const eng_session *whole, const char *mixer, int step) {
    eng_error error = {0};
    ck_assert_msg(eng_session_settle(deferred, &error) == ENG_OK, "%s", error.text);
    ck_assert_int_eq(waiting(deferred), 0);
    ck_assert_msg(
        same_bytes(eng_pool_slot(pool, deferred->slot), eng_pool_slot(pool, whole->slot), world.model->state_bytes),
        "%s: states differ after step %d", mixer, step);
    for (int32_t page = 0; page < deferred->pages; page++)
        ck_assert_msg(same_bytes(eng_pool_page(pool, deferred->page[page]), eng_pool_page(pool, whole->page[page]),
                                 world.model->page_bytes),
                      "%s: page %d differs after step %d", mixer, page, step);
}

typedef struct pair {
    eng_session deferred, whole;
    int32_t id;
} pair;

static void read_prompt(pair *p, uint64_t seed, int32_t count) {
    int32_t ids[PROMPT], index[2];
    const eng_knobs knobs = {ENG_CG_EXACT, 0, 0, 1, LOOPS};
    for (int32_t i = 0; i < count; i++)
        ids[i] = (int32_t)(draw(seed, (uint64_t)i) % VOCABULARY);
    eng_batch_clear(batch);
    index[0] = add(&p->deferred, KERN_ROW_PROMPT, ids, count, knobs, false);
    index[1] = add(&p->whole, KERN_ROW_PROMPT, ids, count, knobs, false);
    run();
    p->id = result_of(index[0]).id;
    ck_assert_int_eq(p->id, result_of(index[1]).id);
}

// From step to step another threshold, bound and, now and then, solver.
static eng_knobs knobs_at(int session, int step) {
    const uint32_t word = draw((uint64_t)session + 50, (uint64_t)step);
    return (eng_knobs){word % 16 == 0 ? ENG_CG_EXACT : ENG_CG_TOLERANCE, 1e-4F, 30, (float)(word / 16 % 100) / 99,
                       1 + (int32_t)(word / 1600 % (LOOPS + 1)) % LOOPS};
}

static void same_results(const eng_piece_result *a, const eng_piece_result *b, const char *mixer, int step) {
    ck_assert_msg(a->id == b->id && a->loop == b->loop && a->finite == b->finite &&
                      memcmp(&a->logprob, &b->logprob, sizeof a->logprob) == 0 &&
                      memcmp(a->logits, b->logits, sizeof *a->logits * VOCABULARY) == 0,
                  "%s: step %d reads loop %d and says %d, not loop %d and %d", mixer, step, a->loop, a->id, b->loop,
                  b->id);
}

static void check_step(pair *all, const char *mixer, int step, int *loops, int *most) {
    int32_t index[SESSIONS][2];
    eng_batch_clear(batch);
    for (int s = 0; s < SESSIONS; s++) {
        const eng_knobs knobs = knobs_at(s, step);
        index[s][0] = add(&all[s].deferred, KERN_ROW_GENERATED, &all[s].id, 1, knobs, false);
        index[s][1] = add(&all[s].whole, KERN_ROW_GENERATED, &all[s].id, 1, knobs, true);
    }
    run();
    for (int s = 0; s < SESSIONS; s++) {
        const eng_piece_result one = result_of(index[s][0]), other = result_of(index[s][1]);
        same_results(&one, &other, mixer, step);
        loops[one.loop]++;
        *most = waiting(&all[s].deferred) > *most ? waiting(&all[s].deferred) : *most;
    }
    for (int s = 0; s < SESSIONS; s++)
        all[s].id = (int32_t)(draw((uint64_t)s + 90, (uint64_t)step) % VOCABULARY);
}

static void go_on_with_a_fork(pair *p, const char *mixer, int step) {
    eng_session fork;
    eng_error error = {0};
    ck_assert_msg(eng_session_fork(&p->deferred, world.stream, LENGTH, &fork, &error) == ENG_OK, "%s", error.text);
    same_states(&fork, &p->whole, mixer, step);
    eng_session_close(&p->deferred);
    p->deferred = fork;
}

static void check_mixer(const char *mixer, const char *more, int32_t tokens) {
    pair all[SESSIONS];
    int loops[LOOPS + 1] = {0}, most = 0;
    open_mixer(mixer, more, 2 * SESSIONS, tokens);
    for (int s = 0; s < SESSIONS; s++) {
        all[s] = (pair){.deferred = new_session(), .whole = new_session()};
        read_prompt(&all[s], (uint64_t)s, s == 0 ? 1 : 5);
    }
    for (int step = 0; step < STEPS; step++) {
        check_step(all, mixer, step, loops, &most);
        if (step % 41 == 17)
            go_on_with_a_fork(&all[step % SESSIONS], mixer, step);
        if (step % 53 == 29)
            same_states(&all[1].deferred, &all[1].whole, mixer, step);
        if (step % 67 == 44)
            read_prompt(&all[2], (uint64_t)step, 5);
    }
    for (int s = 0; s < SESSIONS; s++) {
        same_states(&all[s].deferred, &all[s].whole, mixer, STEPS);
        eng_session_close(&all[s].deferred);
        eng_session_close(&all[s].whole);
    }
    for (int loop = 1; loop <= LOOPS; loop++)
        ck_assert_msg(loops[loop] > 5, "%s: %d tokens are read at loop %d", mixer, loops[loop], loop);
    ck_assert_int_gt(most, tokens > 100 ? 3 : 1);
    close_all();
}

START_TEST(deferred_is_whole) {
    check_mixer(eng_mixer_at((size_t)_i)->name, ", \"exit_gate\": true", 200);
}
END_TEST

// Told apart by embeddings; with what went into the first loop added; without a gate; steps so small that few tokens
// can wait.
START_TEST(deferred_is_whole_in_other_models) {
    check_mixer("gated_deltanet", ", \"exit_gate\": true, \"loop_embedding\": true", 200);
    check_mixer("gla", ", \"exit_gate\": true, \"loop_residual_gate\": true", 200);
    check_mixer("mesa_net", ", \"exit_gate\": true, \"loop_embedding\": true, \"loop_residual_gate\": true", 10);
    check_mixer("mesa_net", "", 200);
    check_mixer("mesa_net", ", \"exit_gate\": true", 10);
}
END_TEST

// Nothing but single tokens that leave at once: they wait until one finds the last place, then all go together.
// Loops that nobody goes through solve nothing, and what is caught up is solved then.
START_TEST(lists_are_bounded) {
    uint64_t solves[2] = {0, 0};
    open_mixer("mesa_net", ", \"exit_gate\": true", 2, 200);
    pair p = {.deferred = new_session(), .whole = new_session()};
    const eng_knobs first = {ENG_CG_EXACT, 0, 0, 0, LOOPS};
    read_prompt(&p, 3, 5);
    for (int i = 1; i <= 3 * ENG_PENDING_TOKENS; i++) {
        eng_batch_clear(batch);
        const int32_t one = add(&p.deferred, KERN_ROW_GENERATED, &p.id, 1, first, false),
                      other = add(&p.whole, KERN_ROW_GENERATED, &p.id, 1, first, true);
        run();
        const eng_piece_result left = result_of(one), all = result_of(other);
        solves[0] += left.compute.solves;
        solves[1] += all.compute.solves;
        ck_assert(i % ENG_PENDING_TOKENS == 0 ? solves[0] == solves[1] : left.compute.solves < all.compute.solves / 2);
        ck_assert_int_eq(left.loop, 1);
        ck_assert_int_eq(waiting(&p.deferred), i % ENG_PENDING_TOKENS);
        p.id = result_of(one).id;
        ck_assert_int_eq(p.id, result_of(other).id);
    }
    same_states(&p.deferred, &p.whole, "mesa_net", 3 * ENG_PENDING_TOKENS);
    eng_session_close(&p.deferred); // and what waits with a session goes with it
    eng_session_close(&p.whole);
    p.deferred = new_session();
    ck_assert_int_eq(waiting(&p.deferred), 0);
    eng_session_close(&p.deferred);
    close_all();
}
END_TEST

// A model without loops has no early output, nor has one that goes on behind them.
START_TEST(who_does_not_wait) {
    static const struct {
        const char *more;
        bool waits;
    } cases[] = {{"", true}, {", \"loop_residual_gate\": true", true}, {", \"num_loops\": 1", false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[640];
        snprintf(config, sizeof config,
                 "{\"model_type\": \"mesa_net\", \"hidden_size\": 32, \"vocab_size\": 24, \"num_hidden_layers\": 1,"
                 "\"num_heads\": 2, \"head_dim\": 16, \"bos_token_id\": 0, \"eos_token_id\": 1%s%s}",
                 strstr(cases[i].more, "num_loops") ? "" : ", \"num_loops\": 3", cases[i].more);
        small_world_open(&(small_model){"m", config, false, true}, "cpu", &world);
        ck_assert_int_eq(eng_pool_create(world.model, world.device, 1, 0, &pool, NULL), ENG_OK);
        ck_assert_int_eq(eng_batch_create(world.weights, pool, world.stream, 1, 64, &batch, NULL), ENG_OK);
        ck_assert((eng_pool_pending(pool, 0) != NULL) == cases[i].waits);
        close_all();
    }
}
END_TEST

// ------------------------------------------------------------------------------------------------------------ requests

typedef struct told {
    int32_t id[64], loop[64];
    float logprob[64];
    size_t count, stop_after; // cancel after so many; 0: never
    eng_engine *engine;
} told;

static void collect(void *context, const eng_event *event) {
    told *out = event->user;
    (void)context;
    ck_assert_msg(event->finish != ENG_FINISH_ERROR, "%s", event->message);
    for (size_t i = 0; i < event->token_count; i++) {
        out->id[out->count] = event->tokens[i].id;
        out->loop[out->count] = event->tokens[i].loop;
        out->logprob[out->count++] = event->tokens[i].logprob;
    }
    if (out->stop_after > 0 && out->count >= out->stop_after)
        eng_cancel(out->engine, event->id);
}

// token_compute tells what every token cost, so all loops run for it at once.
static void ask(eng_engine *engine, uint64_t timeline, bool whole, size_t stop_after, told *out) {
    int32_t ids[PROMPT];
    uint64_t id;
    bool worked = true;
    eng_error error = {0};
    small_prompt(9, ids, PROMPT);
    eng_request request = greedy(engine, ids, PROMPT, 40);
    request.logprobs = 0;
    request.ignore_eos = true;
    request.token_compute = whole;
    request.timeline = timeline;
    request.timeline_position = -1;
    *out = (told){.stop_after = stop_after, .engine = engine};
    request.user = out;
    ck_assert_msg(eng_submit(engine, &request, &id, &error) == ENG_OK, "%s", error.text);
    while (worked)
        ck_assert_msg(eng_step(engine, collect, NULL, &worked, &error) == ENG_OK, "%s", error.text);
}

START_TEST(requests_and_their_states) {
    static told out[2];
    void *bytes[2];
    size_t size[2];
    uint64_t timeline[2];
    eng_error error = {0};
    for (int i = 0; i < 2; i++) {
        eng_engine *engine = open_small(SMALL_LOOPED);
        ck_assert_int_eq(eng_timeline_create(engine, 0, &timeline[i], &error), ENG_OK);
        ask(engine, timeline[i], i == 1, 0, &out[i]);
        ask(engine, timeline[i], i == 1, 13, &out[i]); // goes on, and is cancelled with tokens that wait
        ask(engine, timeline[i], i == 1, 0, &out[i]);
        ck_assert_uint_eq(out[i].count, 40);
        ck_assert_int_eq(eng_timeline_export(engine, 0, timeline[i], &bytes[i], &size[i], &error), ENG_OK);
        eng_close(engine);
    }
    ck_assert_mem_eq(out[0].id, out[1].id, sizeof out[0].id);
    ck_assert_mem_eq(out[0].loop, out[1].loop, sizeof out[0].loop);
    ck_assert_mem_eq(out[0].logprob, out[1].logprob, sizeof out[0].logprob);
    ck_assert_uint_eq(size[0], size[1]);
    ck_assert_mem_eq(bytes[0], bytes[1], size[0]);
    eng_free(bytes[0]);
    eng_free(bytes[1]);
}
END_TEST

static int32_t all_waiting(const eng_engine *engine) {
    int32_t sum = 0;
    for (int32_t slot = 0; slot < eng_pool_slots(engine->pool, NULL); slot++)
        sum += eng_pool_pending(engine->pool, slot)->total;
    return sum;
}

// On a GPU so small a model runs all loops at once.
static bool leaves_loops(const eng_engine *engine) {
    return kern_device_describe(engine->device)->launch_bytes == 0;
}

// Two requests that are read at the first loop; those that stand still catch up, one a step, once nobody else reads.
START_TEST(who_stands_still_catches_up) {
    static told out[2][2];
    for (int still = 0; still < 2; still++) {
        eng_engine *engine = open_small(SMALL_LOOPED);
        uint64_t id[2];
        bool worked = true;
        int32_t ids[PROMPT];
        for (int i = 0; i < 2; i++) {
            small_prompt(9 + (uint64_t)i, ids, PROMPT);
            eng_request request = greedy(engine, ids, PROMPT, 40);
            request.knobs.max_loops = 1;
            request.logprobs = 0;
            request.ignore_eos = true;
            out[still][i] = (told){.engine = engine};
            request.user = &out[still][i];
            ck_assert_int_eq(eng_submit(engine, &request, &id[i], NULL), ENG_OK);
        }
        while (out[still][1].count < 9)
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
        if (still && leaves_loops(engine)) {
            eng_pause(engine, id[0], true);
            eng_pause(engine, id[1], true);
            if (!test_device_is_cpu()) // a step is under way, which ends first
                ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
            const int32_t before = all_waiting(engine);
            ck_assert_int_gt(before, 10);
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
            ck_assert(worked && all_waiting(engine) > 0 && all_waiting(engine) < before);
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
            ck_assert(worked && all_waiting(engine) == 0);
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
            ck_assert(!worked); // and then the engine rests
            eng_pause(engine, id[0], false);
            eng_pause(engine, id[1], false);
        }
        for (worked = true; worked;)
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
        eng_close(engine);
    }
    for (int i = 0; i < 2; i++) {
        ck_assert_uint_eq(out[1][i].count, 40);
        ck_assert_mem_eq(out[0][i].id, out[1][i].id, sizeof out[0][i].id);
        ck_assert_mem_eq(out[0][i].logprob, out[1][i].logprob, sizeof out[0][i].logprob);
    }
}
END_TEST

// Where a launch costs more than so small a loop, nothing waits.
START_TEST(a_loop_is_worth_its_launches) {
    static told out[2];
    for (int costly = 0; costly < 2; costly++) {
        setenv("PRETEND_LAUNCH_BYTES", costly ? "1000000" : "0", 1);
        eng_engine *engine = open_small(SMALL_LOOPED);
        int32_t ids[PROMPT], most = 0;
        uint64_t id;
        small_prompt(9, ids, PROMPT);
        eng_request request = greedy(engine, ids, PROMPT, 40);
        request.knobs.max_loops = 1;
        request.logprobs = 0;
        request.ignore_eos = true;
        out[costly] = (told){.engine = engine};
        request.user = &out[costly];
        ck_assert_int_eq(eng_submit(engine, &request, &id, NULL), ENG_OK);
        for (bool worked = true; worked;) {
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, NULL), ENG_OK);
            most = all_waiting(engine) > most ? all_waiting(engine) : most;
        }
        ck_assert(leaves_loops(engine) ? most > 10 : most == 0);
        eng_close(engine);
    }
    ck_assert_uint_eq(out[0].count, 40);
    ck_assert_mem_eq(out[0].id, out[1].id, sizeof out[0].id);
    ck_assert_mem_eq(out[0].logprob, out[1].logprob, sizeof out[0].logprob);
}
END_TEST

static Suite *loop_suite(void) {
    Suite *suite = suite_create("loop");
    TCase *cases = tcase_create("loop");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 120);
    tcase_add_loop_test(cases, deferred_is_whole, 0, mixer_count());
    tcase_add_test(cases, deferred_is_whole_in_other_models);
    tcase_add_test(cases, lists_are_bounded);
    tcase_add_test(cases, who_does_not_wait);
    tcase_add_test(cases, requests_and_their_states);
    tcase_add_test(cases, who_stands_still_catches_up);
    tcase_add_test(cases, a_loop_is_worth_its_launches);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(loop_suite)

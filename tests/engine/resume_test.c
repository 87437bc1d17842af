// SPDX-License-Identifier: Apache-2.0
// Pieces without ids: what a session keeps of the last token that it has read says what that token's logits said, bit
// for bit, whatever was done with the session since, who is beside it, and at whichever loop it is read.
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "tests/check_main.h"
#include "tests/engine/small_models.h"
#include "tests/engine/test_device.h"

enum { ROWS = 16, SESSIONS = 12, MAX_PROMPT = 150, MOST = 8, TOP = 5 };

static small_world world;
static eng_pool *pool;
static eng_batch *batch;
static int32_t chunk, vocab, ids[MAX_PROMPT];

static void open_batch(int model) {
    small_world_open(&small_models[model], test_device("cpu"), &world);
    chunk = kern_device_describe(world.device)->chunk;
    vocab = world.model->config.vocab_size;
    small_prompt(7, ids, MAX_PROMPT);
    ck_assert_int_eq(eng_pool_create(world.model, world.device, 2 * ROWS, 100, &pool, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_create(world.weights, pool, world.stream, ROWS, ROWS + 4 * chunk, &batch, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_warm_up(batch, NULL), ENG_OK);
    eng_batch_clear(batch);
}

static void close_batch(void) {
    eng_batch_free(batch);
    eng_pool_free(pool);
    small_world_close(&world);
}

// Everything that a prediction tells.
typedef struct prediction {
    eng_piece_result result;
    int32_t top_id[TOP];
    float top_logprob[TOP];
    float *logits;
} prediction;

static prediction prediction_of(int32_t index, int32_t token) {
    prediction out = {.logits = NULL};
    eng_prediction found;
    eng_batch_result(batch, index, &out.result);
    eng_batch_prediction(batch, index, token, &found);
    ck_assert(found.id == out.result.id && found.loop == out.result.loop);
    ck_assert_int_eq(found.top, TOP);
    memcpy(out.top_id, found.top_id, sizeof out.top_id);
    memcpy(out.top_logprob, found.top_logprob, sizeof out.top_logprob);
    if (out.result.logits) {
        out.logits = malloc(sizeof *out.logits * (size_t)vocab);
        memcpy(out.logits, out.result.logits, sizeof *out.logits * (size_t)vocab);
    }
    return out;
}

static void check_same(const prediction *got, const prediction *want, const char *what) {
    ck_assert_msg(got->result.id == want->result.id && got->result.finite, "%s: %d, not %d", what, got->result.id,
                  want->result.id);
    ck_assert_msg(memcmp(&got->result.logprob, &want->result.logprob, sizeof(float)) == 0, "%s: %.9g, not %.9g", what,
                  (double)got->result.logprob, (double)want->result.logprob);
    ck_assert_msg(got->result.loop == want->result.loop, "%s: loop %d, not %d", what, got->result.loop,
                  want->result.loop);
    ck_assert_mem_eq(got->top_id, want->top_id, sizeof got->top_id);
    ck_assert_mem_eq(got->top_logprob, want->top_logprob, sizeof got->top_logprob);
    ck_assert(!got->logits == !want->logits);
    if (got->logits)
        ck_assert_mem_eq(got->logits, want->logits, sizeof *got->logits * (size_t)vocab);
}

static eng_knobs knobs(float threshold, int32_t loops) {
    return (eng_knobs){ENG_CG_TOLERANCE, 1e-4F, 30, threshold, loops};
}

// count 0: without ids.
static eng_status add(eng_session *session, kern_row_kind kind, int32_t count, const eng_knobs *how,
                      const eng_sampling *sampling, int32_t *index) {
    static const kern_logit_edit edit = {.id = 3, .bias = 0.5F, .repetition = 1};
    const eng_piece piece = {.session = session,
                             .kind = kind,
                             .ids = count > 0 ? ids + session->read : NULL,
                             .count = count,
                             .knobs = *how,
                             .logits = true,
                             .sampling = sampling,
                             .edit = &edit,
                             .edits = 1,
                             .top = TOP};
    return eng_batch_add(batch, &piece, index, NULL);
}

static prediction read_piece(eng_session *session, kern_row_kind kind, int32_t count, const eng_knobs *how,
                             const eng_sampling *sampling) {
    int32_t index;
    eng_batch_clear(batch);
    ck_assert_int_eq(add(session, kind, count, how, sampling, &index), ENG_OK);
    ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
    return prediction_of(index, count - 1);
}

// `prompt` ids as a prompt and `generated` one by one.
static prediction read_all(eng_session *session, int32_t prompt, int32_t generated, const eng_knobs *how,
                           const eng_sampling *sampling) {
    prediction last = {.logits = NULL};
    ck_assert_int_eq(eng_session_open(pool, world.stream, MAX_PROMPT, session, NULL), ENG_OK);
    while (session->read < prompt + generated) {
        const bool reads = session->read < prompt;
        const int32_t count = reads ? eng_batch_piece_length(batch, session, prompt - session->read) : 1;
        free(last.logits);
        last = read_piece(session, reads ? KERN_ROW_PROMPT : KERN_ROW_GENERATED, count, how, sampling);
    }
    return last;
}

static eng_sampling sampling_of(int i) {
    return (eng_sampling){.temperature = i % 2 ? 0.8F : 0, .top_p = 1, .seed = (uint64_t)i};
}

static const int32_t lengths[SESSIONS][2] = {{1, 0},  {0, 1},  {15, 0},  {16, 3},  {63, 0},  {64, 0},
                                             {64, 1}, {65, 0}, {127, 2}, {128, 0}, {130, 1}, {20, 9}};

// All at once, as far as a step takes them, among others that read; twice, as drawing changes nothing.
START_TEST(the_last_token_says_it_again) {
    const eng_knobs how = knobs(0.6F, 99);
    eng_session session[SESSIONS], other[2];
    prediction want[SESSIONS], got;
    open_batch(_i);
    for (int i = 0; i < SESSIONS; i++) {
        const eng_sampling sampling = sampling_of(i);
        want[i] = read_all(&session[i], lengths[i][0], lengths[i][1], &how, i % 3 ? &sampling : NULL);
    }
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(eng_session_open(pool, world.stream, MAX_PROMPT, &other[i], NULL), ENG_OK);
    for (int turn = 0; turn < 4; turn++) {
        int32_t index[SESSIONS], taken = 0, beside;
        eng_sampling sampling[SESSIONS];
        eng_batch_clear(batch);
        if (turn > 0) // a step of nothing else before
            ck_assert_int_eq(add(&other[0], KERN_ROW_GENERATED, 1, &how, NULL, &beside), ENG_OK);
        for (; taken < MOST; taken++) {
            const int i = (MOST * turn + taken) % SESSIONS;
            sampling[taken] = sampling_of(i);
            ck_assert_int_eq(
                add(&session[i], KERN_ROW_GENERATED, 0, &how, i % 3 ? &sampling[taken] : NULL, &index[taken]), ENG_OK);
        }
        ck_assert_int_eq(add(&session[(MOST * turn + taken) % SESSIONS], KERN_ROW_GENERATED, 0, &how, NULL, &beside),
                         ENG_FULL);
        if (turn > 1)
            ck_assert_int_eq(add(&other[1], KERN_ROW_PROMPT, chunk / 2, &how, NULL, &beside), ENG_OK);
        ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
        for (int k = 0; k < taken; k++) {
            const int i = (MOST * turn + k) % SESSIONS;
            eng_compute compute;
            got = prediction_of(index[k], -1);
            check_same(&got, &want[i], small_models[_i].name);
            ck_assert(got.result.count == 0 && got.result.position == lengths[i][0] + lengths[i][1]);
            eng_batch_compute(batch, index[k], -1, &compute);
            ck_assert(compute.solves == 0 && got.result.compute.solves == 0);
            free(got.logits);
        }
    }
    for (int i = 0; i < SESSIONS; i++) {
        ck_assert_int_eq(session[i].read, lengths[i][0] + lengths[i][1]);
        eng_session_close(&session[i]);
        free(want[i].logits);
    }
    eng_session_close(&other[0]);
    eng_session_close(&other[1]);
    close_batch();
}
END_TEST

// What was drawn without reading goes on like what was drawn when the token was read, in a copy as well.
START_TEST(it_goes_on_from_there) {
    const eng_knobs how = knobs(0.6F, 99);
    eng_session straight, back, copy;
    open_batch(_i);
    prediction want = read_all(&straight, 70, 2, &how, NULL), got = read_all(&back, 70, 2, &how, NULL);
    free(got.logits);
    ck_assert_int_eq(eng_session_fork(&back, world.stream, MAX_PROMPT, &copy, NULL), ENG_OK);
    eng_session *const both[] = {&back, &copy};
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < 2; i++) {
            got = read_piece(both[i], KERN_ROW_GENERATED, 0, &how, NULL);
            check_same(&got, &want, small_models[_i].name);
            free(got.logits);
            got = read_piece(both[i], KERN_ROW_GENERATED, 1, &how, NULL);
            free(got.logits);
        }
        free(want.logits);
        want = read_piece(&straight, KERN_ROW_GENERATED, 1, &how, NULL);
    }
    free(want.logits);
    eng_session_close(&straight);
    eng_session_close(&back);
    eng_session_close(&copy);
    close_batch();
}
END_TEST

// Read at one loop, drawn from at another, with tokens that wait for theirs in between.
START_TEST(who_draws_chooses_the_loop) {
    static const struct {
        float threshold;
        int32_t loops;
    } wanted[] = {{1, 99}, {0.5F, 99}, {0.3F, 2}, {0, 99}, {1, 1}, {1, 2}};
    enum { WANTED = sizeof wanted / sizeof *wanted };
    int32_t seen[ENG_MAX_LOOPS + 1] = {0}, different = 0;
    open_batch(SMALL_LOOPED);
    for (int before = 0; before < WANTED; before++) {
        for (int after = 0; after < WANTED; after++) {
            eng_session straight, back;
            const eng_knobs first = knobs(wanted[before].threshold, wanted[before].loops),
                            second = knobs(wanted[after].threshold, wanted[after].loops);
            prediction want = read_all(&straight, 33, 5, &second, NULL), got = read_all(&back, 33, 5, &first, NULL);
            free(got.logits);
            got = read_piece(&back, KERN_ROW_GENERATED, 0, &second, NULL);
            check_same(&got, &want, "another loop");
            seen[got.result.loop]++;
            different += before != after;
            free(got.logits);
            free(want.logits);
            eng_session_close(&straight);
            eng_session_close(&back);
        }
    }
    ck_assert(seen[1] > 0 && seen[world.model->config.loop.loops] > 0 && different > 0);
    close_batch();
}
END_TEST

START_TEST(where_nothing_was_read_nothing_is_drawn) {
    const eng_knobs how = knobs(1, 1);
    eng_session session;
    int32_t index;
    open_batch(SMALL_MESA);
    ck_assert_int_eq(eng_session_open(pool, world.stream, MAX_PROMPT, &session, NULL), ENG_OK);
    eng_batch_clear(batch);
    ck_assert_int_eq(add(&session, KERN_ROW_GENERATED, 0, &how, NULL, &index), ENG_INVALID);
    const eng_piece one = {.session = &session, .kind = KERN_ROW_PROMPT, .ids = ids, .count = 1, .knobs = how};
    ck_assert_int_eq(eng_batch_add(batch, &one, &index, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
    eng_piece none = one;
    none.count = 0;
    eng_batch_clear(batch);
    ck_assert_int_eq(eng_batch_add(batch, &none, &index, NULL), ENG_INVALID); // for nothing
    none.scored = none.logits = true;
    ck_assert_int_eq(eng_batch_add(batch, &none, &index, NULL), ENG_INVALID);
    none.scored = false;
    ck_assert_int_eq(eng_batch_add(batch, &none, &index, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
    eng_session_close(&session);
    close_batch();
}
END_TEST

static Suite *resume_suite(void) {
    Suite *suite = suite_create("resume");
    TCase *cases = tcase_create("pieces without ids");
    tcase_set_timeout(cases, 60);
    tcase_add_loop_test(cases, the_last_token_says_it_again, 0, SMALL_MODELS);
    tcase_add_loop_test(cases, it_goes_on_from_there, 0, SMALL_MODELS);
    tcase_add_test(cases, who_draws_chooses_the_loop);
    tcase_add_test(cases, where_nothing_was_read_nothing_is_drawn);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(resume_suite)

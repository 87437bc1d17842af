// SPDX-License-Identifier: Apache-2.0
// What an evaluation harness reads from the engine, the logprobs of a prompt, against the trainer's own logits of the
// same ids: the same numbers by two ways, one through the scheduler's chunks, one through a runner's single row.
#include <stdlib.h>
#include <string.h>

#include "engine/batch.h"
#include "engine/engine.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/temp_folder.h"
#include "trainer/probe.h"

enum { IDS = 230 };

typedef struct scores {
    float logprob[IDS + 1];
    size_t count;
    bool done;
} scores;

static void hear(void *context, const eng_event *event) {
    scores *to = event->user;
    (void)context;
    for (size_t i = 0; i < event->prompt_count; i++)
        to->logprob[to->count++] = event->prompt[i].logprob;
    for (size_t i = 0; i < event->token_count; i++)
        to->logprob[to->count++] = event->tokens[i].logprob;
    to->done = event->finish == ENG_FINISH_LENGTH;
}

static double log_softmax(const float *logits, int32_t id) {
    double top = -INFINITY, sum = 0;
    for (int32_t i = 0; i < SMALL_VOCAB; i++)
        top = fmax(top, (double)logits[i]);
    for (int32_t i = 0; i < SMALL_VOCAB; i++)
        sum += exp((double)logits[i] - top);
    return (double)logits[id] - top - log(sum);
}

static void score(eng_engine *engine, const int32_t *ids, size_t count, int64_t max_tokens, scores *out) {
    uint64_t id;
    bool worked = true;
    eng_request request = greedy(engine, ids, count, max_tokens);
    request.logprobs = 1;
    request.prompt_logprobs = true;
    request.user = out;
    *out = (scores){0};
    ck_assert_int_eq(eng_submit(engine, &request, &id, NULL), ENG_OK);
    while (worked)
        ck_assert_int_eq(eng_step(engine, hear, NULL, &worked, NULL), ENG_OK);
    ck_assert(out->done);
    ck_assert_uint_eq(out->count, count + (size_t)max_tokens);
}

START_TEST(a_prompts_logprobs_are_those_of_the_trainers_logits) {
    static float logits[IDS * SMALL_VOCAB];
    int32_t ids[IDS];
    trn_probe probe;
    scores got;
    small_prompt(41, ids, IDS);
    small_checkpoint(temp_path("model"), &small_models[_i], NULL, false);
    eng_options options = {.model_dir = temp_path("model"), .device = "cpu", .max_rows = 3};
    eng_engine *engine = NULL;
    ck_assert_int_eq(eng_open(&options, &engine, NULL), ENG_OK);
    ck_assert_int_eq(trn_probe_open(temp_path("model"), "cpu", true, KERN_STORE_F32, &probe, NULL), ENG_OK);
    kern_solver solver = eng_solver(&probe.model->config.knobs);
    ck_assert_int_eq(trn_probe_logits(&probe, ids, IDS, IDS, solver, logits, NULL), ENG_OK);
    double sum = 0;
    score(engine, ids, IDS, 1, &got);
    ck_assert(isnan(got.logprob[0]));
    for (int32_t i = 1; i < IDS; i++) {
        double want = log_softmax(logits + (size_t)(i - 1) * SMALL_VOCAB, ids[i]);
        ck_assert_double_eq_tol((double)got.logprob[i], want, 1e-5);
        sum += (double)got.logprob[i];
    }
    double loss = trn_mean_cross_entropy(logits, ids, IDS, SMALL_VOCAB);
    ck_assert_double_eq_tol(-sum / (IDS - 1), loss, 1e-6);

    int32_t likeliest = 0; // greedy, so the token drawn at last is the best of the last row
    const float *last = logits + (size_t)(IDS - 1) * SMALL_VOCAB;
    for (int32_t id = 1; id < SMALL_VOCAB; id++)
        likeliest = last[id] > last[likeliest] ? id : likeliest;
    ck_assert_double_eq_tol((double)got.logprob[IDS], log_softmax(last, likeliest), 1e-5);

    scores alone = got;
    score(engine, ids, IDS, 0, &got); // nothing generated: exactly the prompt's entries
    ck_assert_mem_eq(got.logprob + 1, alone.logprob + 1, sizeof(float) * (IDS - 1));
    trn_probe_close(&probe);
    eng_close(engine);
}
END_TEST

static Suite *echo_suite(void) {
    Suite *suite = suite_create("trainer/echo");
    TCase *cases = tcase_create("echo");
    tcase_set_timeout(cases, 60);
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(cases, a_prompts_logprobs_are_those_of_the_trainers_logits, 0, SMALL_MODELS);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(echo_suite)

// SPDX-License-Identifier: Apache-2.0
// Answers are the same, bit for bit, whether steps run ahead of their results or not.
//
// A crowd of requests of every kind comes and goes over few rows, some ending by surprise, on a device that waits for
// each step (cpu:64) and on one that computes the same but works beside the host (tests/device/module.c).
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/temp_folder.h"

enum { CROWD = 44, KINDS = 10, ROWS = 6, CANCELLED = 11 };

// Its pointers lead into constants.
static eng_request member(const eng_engine *engine, const int32_t *prompt, int i) {
    static const eng_text stops[] = {{"q", 1}, {"ab", 2}, {"x", 1}};
    static const int32_t stop_ids[] = {'k', 'm', 'u'};
    static const eng_logit_bias biases[] = {{'e', 2}, {'z', -INFINITY}};
    eng_request request = greedy(engine, prompt + i, 1 + (size_t)(i * 37) % 150, 30 + i % 7);
    request.sampling = (eng_sampling){.temperature = i % 3 ? 1.5F : 0, .top_p = 1, .seed = (uint64_t)i};
    switch (i % KINDS) {
    case 1:
        request.stops = stops;
        request.stop_count = 3;
        break;
    case 2:
    case 3:
        request.stop_ids = stop_ids;
        request.stop_id_count = 3;
        request.min_tokens = i % KINDS == 3 ? 6 : 0;
        break;
    case 4:
        request.repetition_penalty = 1.2F;
        request.frequency_penalty = 0.3F;
        break;
    case 5:
        request.logprobs = 4;
        request.token_compute = true;
        break;
    case 6:
        request.max_tokens = i / KINDS % 3;
        break;
    case 7:
        request.logprobs = 0;
        request.prompt_logprobs = true;
        break;
    case 8:
        request.biases = biases;
        request.bias_count = 2;
        break;
    case 9:
        request.fail_unconverged = true;
        request.knobs.cg_max_steps = i / KINDS % 2 ? 1 : request.knobs.cg_max_steps;
        break;
    }
    return request;
}

// Two more a step; some are cancelled in the middle.
static void run_crowd(int model, const char *device, outcome *out) {
    static int32_t prompt[CROWD + 200];
    setenv("MESA_TEST_DEVICE", device, 1);
    small_prompt(5, prompt, CROWD + 200);
    eng_engine *engine = open_with(model, (eng_options){.max_rows = ROWS});
    const uint64_t allocations = gauges_of(engine).device_allocations;
    for (int i = 0; i < CROWD; i++) {
        submit(engine, member(engine, prompt, i), &out[i]);
        if (i % 2)
            ck_assert(step(engine));
        if (i % CANCELLED == 0 && i > 0)
            eng_cancel(engine, out[i - CANCELLED].id);
    }
    drain(engine);
    ck_assert_uint_eq(gauges_of(engine).device_allocations, allocations);
    eng_close(engine);
}

// Loops that are left for later are not caught up in the same steps, and so not with the same solves of a request.
static void assert_same(const outcome *a, const outcome *b, bool looped) {
    eng_usage left = a->usage, right = b->usage;
    if (looped)
        left.completion = right.completion = (eng_compute){0};
    ck_assert_int_eq(a->finals, 1);
    ck_assert_int_eq(b->finals, 1);
    ck_assert_int_eq(a->finish, b->finish);
    ck_assert_int_eq(a->status, b->status);
    ck_assert_str_eq(a->message, b->message);
    ck_assert_str_eq(a->text, b->text);
    ck_assert_uint_eq(a->id_count, b->id_count);
    ck_assert_uint_eq(a->prompt_count, b->prompt_count);
    ck_assert_mem_eq(a->ids, b->ids, sizeof *a->ids * a->id_count);
    ck_assert_mem_eq(a->logprobs, b->logprobs, sizeof *a->logprobs * a->id_count);
    ck_assert_mem_eq(&left, &right, sizeof left);
}

START_TEST(running_ahead_changes_no_bit) {
    static outcome waits[CROWD], ahead[CROWD];
    static const char folder[] = MESA_BINARY_DIR "/tests/device";
    setenv("MESA_LIBRARY_DIR", folder, 1);
    if (access(folder, R_OK) != 0)
        MESA_TEST_SKIP("no module that pretends");
    run_crowd(_i, "cpu:64", waits);
    run_crowd(_i, "cuda:0", ahead);
    int surprises = 0;
    for (int i = 0; i < CROWD; i++) {
        if (i % CANCELLED == 0 && i + CANCELLED < CROWD)
            continue;
        assert_same(&waits[i], &ahead[i], _i == SMALL_LOOPED);
        surprises += waits[i].finish != ENG_FINISH_LENGTH;
    }
    ck_assert_int_ge(surprises, 4);
}
END_TEST

static Suite *ahead_suite(void) {
    Suite *suite = suite_create("ahead");
    TCase *cases = tcase_create("door");
    tcase_set_timeout(cases, 60);
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_add_loop_test(cases, running_ahead_changes_no_bit, 0, SMALL_MODELS);
    suite_add_tcase(suite, cases);
    return suite;
}

MESA_TEST_MAIN(ahead_suite)

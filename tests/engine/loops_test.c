// SPDX-License-Identifier: Apache-2.0
// Looped models served: at which loop a token is read, what is told of it, and that nothing else depends on it.
//
// What is read at loop r is what a model of r loops with the same weights says. By threshold every token is what its
// own loop says, and the state is that of reading at the last.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "tests/check_main.h"
#include "tests/engine/door.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

enum { LOOPS = 3, PROMPT = 90, DRAWN = 25 };

static const float thresholds[] = {0.3F, 0.55F, 0.7F, 0.78F};
enum { THRESHOLDS = sizeof thresholds / sizeof thresholds[0] };

// What the events of one request told of its tokens, the prompt's first.
typedef struct trace {
    int32_t id[PROMPT + DRAWN], loop[PROMPT + DRAWN];
    float logprob[PROMPT + DRAWN];
    size_t count, drawn;
    eng_usage usage;
} trace;

static void collect(void *context, const eng_event *event) {
    trace *out = event->user;
    (void)context;
    ck_assert_msg(event->finish != ENG_FINISH_ERROR, "%s", event->message);
    for (size_t i = 0; i < event->prompt_count + event->token_count; i++) {
        const eng_token *token = i < event->prompt_count ? &event->prompt[i] : &event->tokens[i - event->prompt_count];
        out->id[out->count] = token->id;
        out->loop[out->count] = token->loop;
        out->logprob[out->count++] = token->logprob;
    }
    out->drawn += event->token_count;
    out->usage = *event->usage;
}

static eng_engine *open_folder(const char *dir) {
    eng_engine *engine = NULL;
    eng_error error = {0};
    const eng_options options = {.model_dir = dir, .device = test_device("cpu"), .max_rows = 4};
    ck_assert_msg(eng_open(&options, &engine, &error) == ENG_OK, "%s", error.text);
    return engine;
}

// Greedy; every token is told with its logprob.
static void run(eng_engine *engine, float threshold, int32_t max_loops, uint64_t timeline, trace *out) {
    int32_t ids[PROMPT];
    uint64_t id;
    bool worked = true;
    eng_error error = {0};
    small_prompt(3, ids, PROMPT);
    eng_request request = greedy(engine, ids, PROMPT, DRAWN);
    request.knobs.exit_threshold = threshold;
    request.knobs.max_loops = max_loops;
    request.logprobs = 0;
    request.prompt_logprobs = timeline == 0;
    request.timeline = timeline;
    request.timeline_position = -1;
    request.ignore_eos = true;
    *out = (trace){0};
    request.user = out;
    ck_assert_msg(eng_submit(engine, &request, &id, &error) == ENG_OK, "%s", error.text);
    while (worked)
        ck_assert_msg(eng_step(engine, collect, NULL, &worked, &error) == ENG_OK, "%s", error.text);
}

// ------------------------------------------------------------------------------------------------------ fixed bounds

// The looped model of small_models with `loops` loops and one start, which does not know how many there are.
static void write_with_loops(int loops, char *dir, size_t size) {
    char text[1024], name[32];
    const small_model *looped = &small_models[SMALL_LOOPED];
    const char *at = strstr(looped->config, "\"num_loops\": 3");
    ck_assert_ptr_nonnull(at);
    snprintf(text, sizeof text, "%.*s\"init\": \"fla\", \"num_loops\": %d%s", (int)(at - looped->config),
             looped->config, loops, at + strlen("\"num_loops\": 3"));
    snprintf(name, sizeof name, "loops-%d", loops);
    snprintf(dir, size, "%s", temp_path(name));
    small_checkpoint(dir, &(small_model){name, text, true, true}, NULL, true);
}

START_TEST(a_bound_reads_what_fewer_loops_say) {
    static trace bounded, fewer;
    char dir[512];
    write_with_loops(LOOPS, dir, sizeof dir);
    eng_engine *engine = open_folder(dir);
    for (int loops = 1; loops <= LOOPS; loops++) {
        write_with_loops(loops, dir, sizeof dir);
        eng_engine *other = open_folder(dir);
        ck_assert(eng_info(other)->has_loops == (loops > 1));
        run(engine, 1, loops, 0, &bounded);
        run(other, 1, loops, 0, &fewer);
        ck_assert_uint_eq(bounded.count, PROMPT + DRAWN);
        ck_assert_mem_eq(bounded.id, fewer.id, sizeof fewer.id);
        ck_assert_mem_eq(bounded.logprob + 1, fewer.logprob + 1, sizeof fewer.logprob - sizeof *fewer.logprob);
        ck_assert_int_eq(bounded.loop[0], 0); // nothing precedes it
        for (size_t i = 1; i < bounded.count; i++)
            ck_assert_int_eq(bounded.loop[i], loops);
        ck_assert_uint_eq(bounded.usage.exits[loops - 1], DRAWN);
        eng_close(other);
    }
    eng_close(engine);
}
END_TEST

// --------------------------------------------------------------------------------------------------------- thresholds

START_TEST(a_token_is_what_its_loop_says) {
    static trace at[LOOPS], own;
    eng_engine *engine = open_small(SMALL_LOOPED);
    const eng_model_info *info = eng_info(engine);
    ck_assert(info->has_loops && info->has_exit_gate && info->loops == LOOPS);
    ck_assert_float_eq(info->default_knobs.exit_threshold, 0.6F);
    ck_assert_int_eq(info->default_knobs.max_loops, LOOPS);
    double mean = 0;
    for (int loop = 0; loop < LOOPS; loop++)
        run(engine, 1, loop + 1, 0, &at[loop]);
    for (int i = 0; i < THRESHOLDS; i++) {
        uint32_t exits[LOOPS] = {0};
        double loops = 0;
        run(engine, thresholds[i], LOOPS, 0, &own);
        for (size_t t = 1; t < PROMPT; t++) { // the same ids before it, so each bound says what its loop does
            ck_assert_float_eq(own.logprob[t], at[own.loop[t] - 1].logprob[t]);
            loops += own.loop[t];
        }
        for (size_t t = PROMPT; t < own.count; t++)
            exits[own.loop[t] - 1]++;
        ck_assert_mem_eq(exits, own.usage.exits, sizeof exits);
        ck_assert_msg(loops >= mean, "%g loops at a threshold of %g", loops, (double)thresholds[i]);
        mean = loops;
    }
    ck_assert_msg(mean > PROMPT * 1.2 && mean < PROMPT * (LOOPS - 0.2), "the gate does not choose: %g", mean / PROMPT);
    eng_close(engine);
}
END_TEST

// The bytes of state and pages stand last in what is exported; ids and runs before them.
static void *export_state(eng_engine *engine, uint64_t timeline, size_t *size) {
    void *bytes;
    eng_error error = {0};
    ck_assert_msg(eng_timeline_export(engine, 0, timeline, &bytes, size, &error) == ENG_OK, "%s", error.text);
    return bytes;
}

START_TEST(what_is_read_changes_no_state) {
    static trace full, early;
    eng_error error = {0};
    uint64_t timeline[2];
    size_t size[2];
    void *bytes[2];
    size_t state = 0;
    int32_t ids[PROMPT + DRAWN];
    small_prompt(5, ids, PROMPT + DRAWN);
    for (int i = 0; i < 2; i++) {
        uint64_t id;
        bool worked = true;
        trace *out = i ? &early : &full;
        eng_engine *engine = open_small(SMALL_LOOPED); // an own one, which has nothing to share
        eng_request request = greedy(engine, ids, PROMPT + DRAWN, 0);
        state = eng_info(engine)->state_bytes + 2 * 64 * eng_info(engine)->kv_bytes_per_token;
        request.knobs.exit_threshold = i ? 0.3F : 1;
        ck_assert_int_eq(eng_timeline_create(engine, 0, &timeline[i], &error), ENG_OK);
        request.timeline = timeline[i];
        request.timeline_position = -1;
        request.user = out;
        ck_assert_msg(eng_submit(engine, &request, &id, &error) == ENG_OK, "%s", error.text);
        while (worked)
            ck_assert_int_eq(eng_step(engine, collect, NULL, &worked, &error), ENG_OK);
        bytes[i] = export_state(engine, timeline[i], &size[i]);
        eng_close(engine);
    }
    ck_assert_uint_eq(size[0], size[1]);
    ck_assert_uint_gt(size[0], state);
    ck_assert_mem_eq((char *)bytes[0] + size[0] - state, (char *)bytes[1] + size[1] - state, state);
    eng_free(bytes[0]);
    eng_free(bytes[1]);
}
END_TEST

START_TEST(bounds_beyond_the_loops_are_refused) {
    int32_t id = 1;
    eng_engine *engine = open_small(SMALL_LOOPED);
    eng_request request = greedy(engine, &id, 1, 1);
    request.knobs.max_loops = LOOPS + 1;
    refuse(engine, request, ENG_INVALID, "max_loops");
    request.knobs.max_loops = LOOPS;
    request.knobs.exit_threshold = 1.5F;
    refuse(engine, request, ENG_INVALID, "exit_threshold");
    eng_close(engine);
}
END_TEST

static Suite *loops_suite(void) {
    Suite *suite = suite_create("loops");
    TCase *cases = tcase_create("loops");
    tcase_add_checked_fixture(cases, temp_folder_make, temp_folder_remove);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, a_bound_reads_what_fewer_loops_say);
    tcase_add_test(cases, a_token_is_what_its_loop_says);
    tcase_add_test(cases, what_is_read_changes_no_state);
    tcase_add_test(cases, bounds_beyond_the_loops_are_refused);
    suite_add_tcase(suite, cases);
    return suite;
}

DEVICE_TEST_MAIN(loops_suite)

// SPDX-License-Identifier: Apache-2.0
// The shared parts of door.h.
//
// Steps are counted over the whole test case, so that outcomes of different requests can be compared in time.
#include "tests/engine/door.h"

#include <check.h>
#include <stdio.h>
#include <string.h>

#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

void speak_letters(small_world *world) {
    float *head = small_tensor(world, "lm_head.weight");
    size_t width = (size_t)world->model->config.hidden_size;
    for (int32_t id = 0; id < SMALL_VOCAB; id++)
        if (id < 'a' || id > 'z')
            memset(head + (size_t)id * width, 0, width * sizeof *head);
}

eng_engine *open_with(int model, eng_options options) {
    eng_engine *engine = NULL;
    eng_error error = {0};
    const char *dir = temp_path(small_models[model].name);
    if (!temp_exists(small_models[model].name))
        small_checkpoint(dir, &small_models[model], speak_letters, true);
    options.model_dir = dir;
    options.device = test_device("cpu");
    options.need_tokenizer = true;
    ck_assert_msg(eng_open(&options, &engine, &error) == ENG_OK, "%s", error.text);
    return engine;
}

eng_engine *open_small(int model) {
    return open_with(model, (eng_options){.max_rows = 8});
}

static int step_number;

static void collect(void *context, const eng_event *event) {
    outcome *out = event->user;
    (void)context;
    ck_assert_uint_eq(event->id, out->id);
    ck_assert_int_eq(out->finals, 0); // nothing follows the last event
    ck_assert(event->prompt_count > 0 || event->token_count > 0 || event->text_length > 0 ||
              event->finish != ENG_FINISH_NONE);
    for (size_t i = 0; i < event->token_count; i++) {
        out->logprobs[out->id_count] = event->tokens[i].logprob;
        out->ids[out->id_count++] = event->tokens[i].id;
    }
    out->prompt_count += event->prompt_count;
    memcpy(out->text + out->text_length, event->text, event->text_length);
    out->text_length += event->text_length;
    out->text[out->text_length] = '\0';
    out->finish = event->finish;
    out->usage = *event->usage;
    out->position = event->position;
    out->durable = event->durable;
    out->first_step = out->events++ ? out->first_step : step_number;
    out->last_step = step_number;
    if (event->finish == ENG_FINISH_NONE)
        return;
    out->finals++;
    out->status = event->status;
    snprintf(out->message, sizeof out->message, "%s", event->message ? event->message : "");
    ck_assert_uint_eq(out->id_count, (uint64_t)out->usage.completion_tokens);
}

eng_request greedy(const eng_engine *engine, const int32_t *ids, size_t count, int64_t max_tokens) {
    return (eng_request){.ids = ids,
                         .count = count,
                         .max_tokens = max_tokens,
                         .sampling = {.top_p = 1},
                         .knobs = eng_info(engine)->default_knobs,
                         .logprobs = -1};
}

void submit(eng_engine *engine, eng_request request, outcome *out) {
    eng_error error = {0};
    memset(out, 0, sizeof *out);
    request.user = out;
    ck_assert_msg(eng_submit(engine, &request, &out->id, &error) == ENG_OK, "%s", error.text);
    ck_assert_uint_ne(out->id, 0);
}

int door_steps(void) {
    return step_number;
}

bool step(eng_engine *engine) {
    bool worked;
    eng_error error = {0};
    step_number++;
    ck_assert_msg(eng_step(engine, collect, NULL, &worked, &error) == ENG_OK, "%s", error.text);
    return worked;
}

void drain(eng_engine *engine) {
    eng_gauges gauges;
    while (step(engine)) {
    }
    eng_read_gauges(engine, &gauges);
    ck_assert_uint_eq(gauges.queued_requests + gauges.queued_tokens + gauges.running, 0);
    ck_assert_uint_eq(gauges.states_used + gauges.kv_pages_used, 0);
}

eng_gauges gauges_of(const eng_engine *engine) {
    eng_gauges gauges;
    eng_read_gauges(engine, &gauges);
    return gauges;
}

outcome answer(eng_engine *engine, eng_request request) {
    static outcome out;
    submit(engine, request, &out);
    drain(engine);
    ck_assert_int_eq(out.finals, 1);
    return out;
}

void refuse(eng_engine *engine, eng_request request, eng_status want, const char *naming) {
    eng_error error = {0};
    uint64_t id = 77;
    ck_assert_int_eq(eng_submit(engine, &request, &id, &error), want);
    ck_assert_msg(strstr(error.text, naming) != NULL, "'%s' lacks '%s'", error.text, naming);
    ck_assert_uint_eq(id, 77);
}

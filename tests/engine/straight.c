// SPDX-License-Identifier: Apache-2.0
// The parts of straight.h: the batch is fed the ids by the way they were read.
//
// Failures in here end the test case.
#include "tests/engine/straight.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/mixer_variants.h"
#include "tests/engine/temp_folder.h"
#include "tests/engine/test_device.h"

eng_engine *open_model(const small_model *model, const char *name, bool tokenizer, eng_options options) {
    eng_engine *engine = NULL;
    eng_error error = {0};
    if (!temp_exists(name))
        small_checkpoint(temp_path(name), model, tokenizer ? speak_letters : NULL, tokenizer);
    options.model_dir = temp_path(name);
    options.device = test_device("cpu:16");
    ck_assert_msg(eng_open(&options, &engine, &error) == ENG_OK, "%s: %s", model->name, error.text);
    return engine;
}

eng_timeline_info info_of(const eng_engine *engine, uint64_t id) {
    eng_timeline_info info;
    ck_assert_int_eq(eng_timeline_read(engine, OWNER, id, &info, NULL), ENG_OK);
    return info;
}

eng_request turn_of(const eng_engine *engine, uint64_t id, const int32_t *ids, size_t count, int64_t max_tokens) {
    eng_request request = greedy(engine, ids, count, max_tokens);
    request.timeline = id;
    request.timeline_position = -1;
    request.owner = OWNER;
    request.ignore_eos = true;
    request.logprobs = 0;
    return request;
}

void spill_all(eng_engine *engine) {
    while (eng_snapshots_spill(engine->snapshots)) {
    }
    ck_assert_uint_eq(gauges_of(engine).kept_on_device, 0);
}

void plain_ids(uint64_t seed, int32_t *ids, int32_t count) {
    mixer_prompt(seed, ids, count);
    for (int32_t i = 0; i < count; i++)
        ids[i] = ids[i] < 2 ? 2 : ids[i];
}

// ------------------------------------------------------------------------------------------------- what would be right

typedef struct straight_run {
    eng_engine *engine;
    eng_session session;
} straight_run;

static eng_piece_result read_piece(straight_run *at, kern_row_kind kind, const int32_t *ids, int32_t count,
                                   const eng_sampling *sampling) {
    eng_batch *batch = at->engine->batch;
    const kern_logit_edit ban = {.id = at->engine->info.eos_id, .bias = -INFINITY, .repetition = 1};
    eng_piece_result result;
    int32_t index;
    const eng_piece piece = {.session = &at->session,
                             .kind = kind,
                             .ids = ids,
                             .count = count,
                             .knobs = at->engine->info.default_knobs,
                             .logits = sampling != NULL,
                             .sampling = sampling,
                             .edit = &ban,
                             .edits = sampling != NULL};
    eng_batch_clear(batch);
    ck_assert_int_eq(eng_batch_add(batch, &piece, &index, NULL), ENG_OK);
    ck_assert_int_eq(eng_batch_run(batch, NULL), ENG_OK);
    eng_batch_result(batch, index, &result);
    return result;
}

void go_straight(eng_engine *engine, const int32_t *ids, const eng_run *run, int32_t runs, int32_t count,
                 straight_answer *out) {
    static const eng_sampling likeliest = {.top_p = 1};
    eng_piece_result result = {.id = -1};
    straight_run at = {.engine = engine};
    spill_all(engine);
    ck_assert_int_eq(eng_session_open(engine->pool, engine->stream, run[runs - 1].end + count, &at.session, NULL),
                     ENG_OK);
    for (int32_t i = 0; i < runs; i++)
        while (at.session.read < run[i].end) {
            const int64_t left = run[i].end - at.session.read;
            const int32_t piece =
                run[i].kind == KERN_ROW_GENERATED ? 1 : eng_batch_piece_length(engine->batch, &at.session, left);
            const bool last = i == runs - 1 && piece == left;
            result = read_piece(&at, run[i].kind, ids + at.session.read, piece, last ? &likeliest : NULL);
        }
    for (int32_t i = 0; i < count; i++) {
        out->ids[i] = result.id;
        out->logprobs[i] = result.logprob;
        if (i + 1 < count)
            result = read_piece(&at, KERN_ROW_GENERATED, &out->ids[i], 1, &likeliest);
    }
    eng_session_close(&at.session);
}

void go_on_straight(eng_engine *engine, uint64_t id, const int32_t *ids, int32_t count, int32_t drawn,
                    straight_answer *out) {
    const eng_timeline *timeline = eng_timelines_find(engine->timelines, OWNER, id, NULL);
    const int64_t position = timeline->position;
    int32_t *all = malloc(sizeof *all * (size_t)(position + count + 1));
    eng_run *run = malloc(sizeof *run * (size_t)(timeline->runs + 1));
    int32_t runs = timeline->runs;
    ck_assert_int_eq(timeline->first, 0);
    if (position > 0)
        memcpy(all, timeline->ids, sizeof *all * (size_t)position);
    if (count > 0)
        memcpy(all + position, ids, sizeof *all * (size_t)count);
    if (runs > 0)
        memcpy(run, timeline->run, sizeof *run * (size_t)runs);
    if (count > 0)
        run[runs++] = (eng_run){position + count, KERN_ROW_PROMPT, engine->info.default_knobs};
    go_straight(engine, all, run, runs, drawn, out);
    free(all);
    free(run);
}

void same(const outcome *got, const straight_answer *want, int32_t count, const char *what) {
    ck_assert_uint_eq(got->id_count, (size_t)count);
    for (int32_t i = 0; i < count; i++)
        ck_assert_msg(got->ids[i] == want->ids[i] && memcmp(&got->logprobs[i], &want->logprobs[i], sizeof(float)) == 0,
                      "%s, token %d: %d at %.9g, not %d at %.9g", what, i, got->ids[i], (double)got->logprobs[i],
                      want->ids[i], (double)want->logprobs[i]);
}

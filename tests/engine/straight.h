// SPDX-License-Identifier: Apache-2.0
// What a timeline should say: its ids read without a break, by a session that was never let go.
//
// What is right comes from the batch itself, below everything that tests of timelines are about.
#ifndef TESTS_ENGINE_STRAIGHT_H
#define TESTS_ENGINE_STRAIGHT_H

#include "engine/engine_internal.h"
#include "tests/engine/door.h"

enum { OWNER = 7 };

// From a folder of the name, made where it is not there; chunks are short (cpu:16).
eng_engine *open_model(const small_model *model, const char *name, bool tokenizer, eng_options options);
eng_timeline_info info_of(const eng_engine *engine, uint64_t id);
eng_request turn_of(const eng_engine *engine, uint64_t id, const int32_t *ids, size_t count, int64_t max_tokens);
void spill_all(eng_engine *engine);                         // states at rest to the host
void plain_ids(uint64_t seed, int32_t *ids, int32_t count); // that no model ends with

typedef struct straight_answer {
    int32_t ids[64];
    float logprobs[64];
} straight_answer;

// The ids by the runs, then `count` ids, each the likeliest. Nothing else may be under way.
void go_straight(eng_engine *engine, const int32_t *ids, const eng_run *run, int32_t runs, int32_t count,
                 straight_answer *out);
// The timeline's own ids and runs, with more ids behind them as a prompt.
void go_on_straight(eng_engine *engine, uint64_t id, const int32_t *ids, int32_t count, int32_t drawn,
                    straight_answer *out);
void same(const outcome *got, const straight_answer *want, int32_t count, const char *what);

#endif

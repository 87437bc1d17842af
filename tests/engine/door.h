// SPDX-License-Identifier: Apache-2.0
// What the tests of the engine's door share: a small engine that speaks letters, requests, and what came of them.
//
// An outcome collects the events of one request and fails the test when they break a promise of engine.h: an event with
// nothing in it, an event after the last, ids that do not add up to the usage. Failures in here end the test case.
#ifndef TESTS_ENGINE_DOOR_H
#define TESTS_ENGINE_DOOR_H

#include "engine/engine.h"
#include "tests/engine/small_models.h"

enum { DOOR_IDS = 4096 };

typedef struct outcome {
    uint64_t id;
    int32_t ids[DOOR_IDS];
    float logprobs[DOOR_IDS];      // of the ids
    size_t id_count, prompt_count; // prompt_count: of the prompt's tokens, as told
    char text[DOOR_IDS];
    size_t text_length;
    eng_finish finish;
    eng_status status;
    char message[256];
    eng_usage usage;
    int64_t position;
    bool durable;
    int events, finals, first_step, last_step; // steps of its first and latest event, counted as door_steps does
} outcome;

// An edit for small_checkpoint: rows of the head other than those of 'a' to 'z' become zero, so texts are plain to
// read.
void speak_letters(small_world *world);

// Opens a small model from a folder that is made in the test's temporary folder when it is not there yet.
eng_engine *open_with(int model, eng_options options);
eng_engine *open_small(int model); // 8 rows

eng_request greedy(const eng_engine *engine, const int32_t *ids, size_t count, int64_t max_tokens);
void submit(eng_engine *engine, eng_request request, outcome *out); // *out becomes the request's user
// Expects the status, a message that holds `naming`, and no id.
void refuse(eng_engine *engine, eng_request request, eng_status want, const char *naming);
bool step(eng_engine *engine); // whether it worked
int door_steps(void);
void drain(eng_engine *engine); // steps to the end; everything must have been given back
outcome answer(eng_engine *engine, eng_request request);
eng_gauges gauges_of(const eng_engine *engine);

#endif

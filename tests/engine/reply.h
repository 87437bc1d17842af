// SPDX-License-Identifier: Apache-2.0
// Everything that events say about a request, token by token, so that two answers can be compared to the last bit.
//
// A reply is zeroed when its request is submitted. Failures in here end the test case.
#ifndef TESTS_ENGINE_REPLY_H
#define TESTS_ENGINE_REPLY_H

#include "engine/engine.h"

enum { REPLY_PROMPT = 1400, REPLY_DRAWN = 200 };

typedef struct told {
    eng_token token; // without its pointer
    eng_alternative top[ENG_MAX_TOP];
} told;

typedef struct reply {
    told prompt[REPLY_PROMPT], drawn[REPLY_DRAWN];
    size_t prompt_count, drawn_count, text_length;
    char text[1024];
    eng_finish finish;
    eng_status status;
    eng_usage usage;
    uint64_t id; // last, so that what stands before can be compared as bytes
} reply;

void reply_hear(void *context, const eng_event *event); // an eng_event_fn; each choice of a request has a reply
// to: one reply a choice. Returns its id.
uint64_t reply_ask(eng_engine *engine, eng_request request, reply *to);
bool reply_step(eng_engine *engine);                                    // whether it worked
void reply_listen(eng_engine *engine);                                  // steps to the end
const reply *reply_to(eng_engine *engine, eng_request request);         // until the next call
void reply_same(const reply *got, const reply *want, const char *what); // told, finish and status

#endif

// SPDX-License-Identifier: Apache-2.0
// Controls of the engine that server tests link instead of the real one (fake_engine.c, fake_request.c).
//
// A model folder's name chooses the kind: a name with "missing" cannot be opened, "plain" has no Mesa layers, "loops"
// has four loops, "short" a context of 64, "nobos" a tokenizer without BOS, "chat" a chat template. Ids below 256 are
// bytes; the others are FAKE_BOS, FAKE_EOS and FAKE_TWIN, which looks like the letter a. A bias of 50 or more makes its
// id the one drawn.
#ifndef TESTS_SERVER_FAKE_ENGINE_H
#define TESTS_SERVER_FAKE_ENGINE_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/engine.h"

enum { FAKE_BOS = 256, FAKE_EOS = 257, FAKE_TWIN = 258, FAKE_VOCABULARY = 259 };

typedef struct fake_engine_controls {
    // Set by tests.
    atomic_int hold_open;   // opening goes on once it is 0
    atomic_int refuse_open; // there is no memory for one more engine
    atomic_int revision;    // of the files in folders with "demo" in their name
    atomic_int stuck;       // a step lasts as long as it is set
    atomic_int held;        // number of the engine whose steps come and go with nothing read or drawn; 0: none
    atomic_int step_us;
    atomic_int text_bytes;        // letters: bytes of each token's text; 0: one
    atomic_int fail_step;         // the next step fails as a lost device does
    atomic_int numeric_at;        // every request fails at this token, counted from 1; 0: never
    atomic_int unconverged_at;    // requests with fail_unconverged fail at this token; 0: never
    atomic_int eos_at;            // the first token, counted from 1, that would be the end of text; 0: none
    _Atomic(const char *) script; // bytes to draw, a token each, again and again; NULL: letters
    // Counted by the engine.
    atomic_int opening, opened, closed;                        // engines: begun, done, gone
    atomic_int submitted, cancelled, finished, active, paused; // choices
    atomic_int steps, tokens, prompt_tokens;                   // the latter: that were read
    // Of the last request.
    atomic_int last_cg_tolerance;   // millionths
    atomic_int last_exit_threshold; // likewise
    atomic_int last_cg_mode, last_cg_max_steps, last_fail_unconverged, last_priority, last_owner, last_min_tokens;
    atomic_int last_bias_count, last_presence, last_frequency, last_repetition; // hundredths
    atomic_int last_logprobs, last_prompt_logprobs, last_choices;
} fake_engine_controls;

fake_engine_controls *fake_engine(void);
// The text that a request with this seed and choice generates for positions first .. first + count - 1.
void fake_engine_text(unsigned long long seed, unsigned choice, long first, long count, char *out);
float fake_engine_logprob(int32_t id, long position);

// ---- between fake_engine.c and fake_request.c ----

typedef struct fake_request fake_request;
struct fake_request {
    fake_request *next;
    uint64_t id;
    eng_request asked; // what it points to is copied
    int32_t *ids;
    int32_t choice;
    int64_t prompt_read, made;
    bool paused, dropped;
    int waited; // steps, for other choices to begin
    char stops[16][1025];
    eng_text stop_table[16];
    int32_t stop_ids[ENG_MAX_STOP_IDS];
    int32_t forced; // -1: none
    eng_usage usage;
    // Text and tokens that are not out yet.
    char *raw; // bytes
    size_t raw_count;
    uint64_t released; // bytes that have gone out
    struct fake_drawn {
        int32_t id;
        int64_t position;
        uint64_t end; // in bytes since the start
    } * drawn;
    size_t drawn_count;
};

fake_request *fake_request_create(const eng_request *from, uint64_t id, int32_t choice);
void fake_request_free(fake_request *request);
// One step of it. Not NONE: it has ended, and its last event was told.
eng_finish fake_request_advance(fake_request *request, int chunk, eng_event_fn on_event, void *context);

#endif

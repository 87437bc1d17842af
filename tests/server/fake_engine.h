// SPDX-License-Identifier: Apache-2.0
// Controls of the engine that server tests link instead of the real one (fake_engine.c).
//
// A model folder's name chooses the kind: a name with "missing" cannot be opened, "plain" has no Mesa layers, "loops"
// has four loops, "short" a context of 64, "nobos" a tokenizer without BOS. Ids are bytes, BOS is 256.
#ifndef TESTS_SERVER_FAKE_ENGINE_H
#define TESTS_SERVER_FAKE_ENGINE_H

#include <stdatomic.h>

typedef struct fake_engine_controls {
    // Set by tests.
    atomic_int load_ms, step_us;
    atomic_int text_bytes;     // bytes of each token's text; 0: one
    atomic_int fail_step;      // the next step fails as a lost device does
    atomic_int numeric_at;     // every request fails at this token, counted from 1; 0: never
    atomic_int unconverged_at; // requests with fail_unconverged fail at this token; 0: never
    // Counted by the engine.
    atomic_int submitted, cancelled, finished, active, paused, steps, tokens;
    atomic_int last_cg_mode, last_cg_max_steps, last_fail_unconverged;
} fake_engine_controls;

fake_engine_controls *fake_engine(void);
// The text that a request with this seed and choice generates for positions first .. first + count - 1.
void fake_engine_text(unsigned long long seed, unsigned choice, long first, long count, char *out);

#endif

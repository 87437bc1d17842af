// SPDX-License-Identifier: Apache-2.0
// What the suites about durable timelines share: a store and its thread, errands, and a timeline with its twin.
//
// The twin lives in an engine without a store, is never let go, and gets the same requests: what it says is right. A
// kill is a store whose thread has stopped before the engine is closed: nothing can be given back or written any more.
// MESA_TEST_STORE names another store than a folder of the case's own.
#ifndef TESTS_ENGINE_STORED_H
#define TESTS_ENGINE_STORED_H

#include "engine/store.h"
#include "tests/engine/door.h"

enum { ROWS = 3, LEASE_MS = 1500, HOUR_MS = 3600000 };

extern eng_store *store;

// A store that may be shared, whose leases outlive their holders: MESA_TEST_STORE, or a server of the case's own. NULL:
// a folder.
const char *outside(void);
bool start_server(void); // a redis-server that syncs, until end_case; or again. False: none is installed
void end_case(void);     // and its folder
void open_store(uint64_t budget);
void open_hasty_store(int32_t time_limit_ms);
void stop_store(void); // its thread
void close_store(void);
// Leases are long where nobody has to wait for one: a folder's die with its store, and kill_all ends those of a server
// of the case's own. And whoever waits for the store does so until it has answered, however busy the machine.
eng_engine *open_mixer(int variant, bool stored);
eng_engine *open_letters(eng_options options);
void pass(int64_t ms);
void go(eng_engine *engine); // one step, and a moment where there was nothing to do

typedef struct answered {
    int times;
    eng_answer answer;
    eng_record list[ENG_RECORD_PAGE];
    char message[256];
} answered;

eng_name name_of(uint32_t id, uint32_t owner); // of this case
eng_errand about(eng_errand_kind kind, uint32_t id);
eng_errand keep_errand(uint64_t timeline, uint32_t id);
void send_errand(eng_engine *engine, eng_errand errand, answered *out);
const answered *ask(eng_engine *engine, eng_errand errand);  // and waits for the answer
const answered *must(eng_engine *engine, eng_errand errand); // which is ENG_OK
void refused(eng_engine *engine, eng_errand errand, eng_status want, const char *naming);
uint64_t create(eng_engine *engine);
uint64_t keep(eng_engine *engine, uint64_t timeline, uint32_t id);
uint64_t fetch(eng_engine *engine, uint32_t id); // waits for the lease of one that was killed
void park(eng_engine *engine, uint32_t id);
void kill_all(eng_engine *engine); // and the store with it

outcome *finish(eng_engine *engine, outcome *out);
outcome *turn(eng_engine *engine, uint64_t id, const int32_t *ids, size_t count, int64_t drawn);
void alike(const outcome *got, const outcome *want, const char *what);
void wait_durable(eng_engine *engine, uint64_t id);

typedef struct twins {
    eng_engine *engine, *plain;
    uint64_t id, twin; // in each
} twins;

twins begin_letters(uint32_t id);
void both(const twins *t, uint64_t seed, int32_t count, int32_t drawn, const char *what); // the answer is durable
void both_back(const twins *t, int64_t position);
void die_and_rise(twins *t, uint32_t id);
void end_both(twins *t);

#endif

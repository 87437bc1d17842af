// SPDX-License-Identifier: Apache-2.0
// The store of sessions outside the process: opened before the engines, run by a thread of its own, closed after them.
// One for all models. What an engine does with it is engine.h's; here is its life, and how it does.
#ifndef SERVER_STORE_H
#define SERVER_STORE_H

#include "server/config.h"
#include "server/log.h"
#include "server/worker.h"

typedef struct srv_store srv_store;

// The folder or address that the configuration names, in new memory; NULL: none. environment: for `auto`.
char *srv_store_place(const srv_config *config, const char *state_directory);
// Opens it and starts its thread. *error names the place.
ENG_CHECKED eng_status srv_store_open(const srv_config *config, const char *place, srv_log *log, srv_store **out,
                                      eng_error *error);
eng_store *srv_store_engine(const srv_store *store); // for eng_options
bool srv_store_is_shared(const srv_store *store);    // by other servers, perhaps
// After every engine with it is closed: what was asked of it is done first. NULL is accepted.
void srv_store_close(srv_store *store);

// Loop thread. How it does: whether what was asked of it of late failed, or waits. behind: sessions that it has not
// wholly. Logs when that changes.
void srv_store_look(srv_store *store, uint64_t behind);
bool srv_store_failing(const srv_store *store);
// Asks through one of its engines what it holds, which is known a moment later; until then zeros, or what it held.
void srv_store_measure(srv_store *store, srv_worker *worker);
const eng_store_usage *srv_store_usage(const srv_store *store);
const eng_store_gauges *srv_store_gauges(const srv_store *store); // as of the last look

#endif

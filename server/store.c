// SPDX-License-Identifier: Apache-2.0
// The store's thread and its health.
//
// The engine tells only sums of what went well and what did not: it is failing from a look at which nothing more was
// done while more has failed, or something waits since the look before, to one at which more was done and nothing has
// failed.
#include "server/store.h"

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct srv_store {
    eng_store *engine;
    srv_log *log;
    pthread_t thread;
    eng_store_gauges seen;
    bool shared, failing, waits;
    // What it holds.
    srv_call call;
    bool asking;
    eng_store_usage held, usage; // as the call, and as the loop thread knows it
};

char *srv_store_place(const srv_config *config, const char *state_directory) {
    static const char below[] = "/sessions";

    if (strcmp(config->store, "none") == 0)
        return NULL;
    if (strcmp(config->store, "auto") != 0)
        return strdup(config->store);
    if (!state_directory || !*state_directory)
        return NULL;
    const size_t length = strcspn(state_directory, ":"); // of several folders the first
    char *place = malloc(length + sizeof below);
    if (place)
        snprintf(place, length + sizeof below, "%.*s%s", (int)length, state_directory, below);
    return place;
}

static void *run(void *context) {
    srv_store *store = context;

    eng_store_run(store->engine);
    return NULL;
}

eng_status srv_store_open(const srv_config *config, const char *place, srv_log *log, srv_store **out,
                          eng_error *error) {
    // What nobody answers is given up when a lease is renewed.
    const int64_t patience_ms = config->store_lease_ms / 3;
    const eng_store_options options = {.place = place,
                                       .budget = (uint64_t)config->store_budget,
                                       .time_limit_ms = patience_ms < 500 ? 500 : (int32_t)patience_ms,
                                       .log = srv_log_engine,
                                       .log_context = log};
    srv_store *store = calloc(1, sizeof *store);

    if (!store)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the store");
    store->log = log;
    store->shared = strstr(place, "://");
    eng_status status = eng_store_open(&options, &store->engine, error);
    if (!status && pthread_create(&store->thread, NULL, run, store) != 0) {
        status = eng_fail(error, ENG_NO_MEMORY, "the store's thread cannot be started");
        eng_store_close(store->engine);
    }
    if (status)
        free(store);
    else
        *out = store;
    return status;
}

eng_store *srv_store_engine(const srv_store *store) {
    return store->engine;
}

bool srv_store_is_shared(const srv_store *store) {
    return store->shared;
}

void srv_store_close(srv_store *store) {
    if (!store)
        return;
    eng_store_stop(store->engine);
    pthread_join(store->thread, NULL);
    eng_store_close(store->engine);
    free(store);
}

void srv_store_look(srv_store *store, uint64_t behind) {
    const eng_store_gauges before = store->seen;
    const bool was_failing = store->failing, waited = store->waits;

    eng_store_read_gauges(store->engine, &store->seen);
    store->waits = behind > 0 || store->seen.queued > 0;
    const bool failed = store->seen.failed + store->seen.retries > before.failed + before.retries;
    const bool done = store->seen.done > before.done, stuck = waited && store->waits && !done;
    if (stuck || failed != done)
        store->failing = stuck || failed;
    if (store->failing && !was_failing)
        srv_log_write(store->log, ENG_LOG_ERROR, "store", "the store of sessions fails: %s", store->seen.fault);
    else if (was_failing && !store->failing)
        srv_log_write(store->log, ENG_LOG_INFO, "store", "the store of sessions works again");
}

// ---- what it holds -------------------------------------------------------------------------------------------------

static void take_usage(void *user, const eng_answer *answer) {
    srv_store *store = user;

    if (!answer->status)
        store->held = answer->usage;
    srv_call_end(&store->call);
}

static void ask_usage(srv_call *call, eng_engine *engine) {
    srv_store *store = (srv_store *)((char *)call - offsetof(srv_store, call));
    const eng_errand errand = {.kind = ENG_ERRAND_USAGE, .done = take_usage, .user = store};

    if (engine && eng_send(engine, &errand, NULL) == ENG_OK)
        srv_call_wait(call);
}

static void know_usage(srv_call *call) {
    srv_store *store = (srv_store *)((char *)call - offsetof(srv_store, call));

    store->usage = store->held;
    store->asking = false;
}

void srv_store_measure(srv_store *store, srv_worker *worker) {
    if (store->asking)
        return;
    store->asking = true;
    store->call = (srv_call){.run = ask_usage, .done = know_usage};
    srv_worker_call(worker, &store->call);
}

const eng_store_usage *srv_store_usage(const srv_store *store) {
    return &store->usage;
}

bool srv_store_failing(const srv_store *store) {
    return store->failing;
}

const eng_store_gauges *srv_store_gauges(const srv_store *store) {
    return &store->seen;
}

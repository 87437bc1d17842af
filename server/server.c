// SPDX-License-Identifier: Apache-2.0
// The server's life: bind, load, serve, drain, end; and what it tells the service manager meanwhile.
//
// The addresses are bound before any model loads, so that a used port is known at once and health can be asked all the
// while. Draining: no new connections, idle ones closed, running requests finish; at the deadline they are told so and
// cut. Where a device is lost, requests on the others finish before that, within the same time. The loop ends when no
// connection and no work on the pool is left.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "server/server.h"

enum { NOTIFY_PERIOD_MS = 5000, EXTEND_TIMEOUT_S = 30 };

// ---- draining ------------------------------------------------------------------------------------------------------

static void begin_drain(srv_server *server, int exit_status, uint64_t patience_ms) {
    if (server->exit_status == 0)
        server->exit_status = exit_status;
    if (server->phase >= SRV_DRAINING)
        return;
    server->phase = SRV_DRAINING;
    srv_reload_free(server);
    server->drain_until_ms = srv_loop_now(server->loop) + patience_ms;
    srv_log_write(server->log, ENG_LOG_INFO, "drain", "no new requests; %zu connections are open",
                  srv_http_connections(server->http));
    sd_notify(0, "STOPPING=1");
    srv_http_quiesce(server->http);
    srv_timer_start(server->drain_timer, 0, SRV_DRAIN_POLL_MS);
}

// After the loss of a device: until nothing runs on the others.
static void begin_failing(srv_server *server) {
    server->exit_status = server->exit_status ? server->exit_status : 1;
    if (server->phase >= SRV_FAILING)
        return;
    server->phase = SRV_FAILING;
    srv_reload_free(server);
    server->drain_until_ms = srv_loop_now(server->loop) + (uint64_t)server->config->drain_time_ms;
    srv_timer_start(server->drain_timer, 0, SRV_DRAIN_POLL_MS);
}

static bool is_idle(const srv_server *server) {
    for (const srv_model *model = server->alive; model; model = model->next)
        if (srv_worker_places(model->worker) > 0)
            return false;
    return true;
}

// Within what is left of the drain time, and a little longer where that is over.
static bool have_parked(srv_server *server, uint64_t now) {
    const uint64_t drain = (uint64_t)server->config->drain_time_ms, least = drain < SRV_PARK_MS ? drain : SRV_PARK_MS;

    if (!server->store)
        return true;
    if (server->park_until_ms == 0)
        server->park_until_ms = server->drain_until_ms > now + least ? server->drain_until_ms : now + least;
    if (srv_sessions_park(server))
        return true;
    if (now < server->park_until_ms)
        return false;
    srv_log_write(server->log, ENG_LOG_WARNING, "drain", "not all sessions were parked in time; they are read again");
    return true;
}

static void on_drain_tick(void *context) {
    srv_server *server = context;
    const uint64_t now = srv_loop_now(server->loop), until = server->drain_until_ms;
    bool gave_up = false;

    if (server->phase == SRV_FAILING) {
        if (now >= until || is_idle(server))
            begin_drain(server, 1, now < until ? until - now : 0);
        return;
    }

    srv_http_quiesce(server->http); // connections that have become idle since
    if (now >= server->drain_until_ms && server->phase == SRV_DRAINING) {
        server->phase = SRV_ENDING;
        server->drain_until_ms = now + SRV_DRAIN_GRACE_MS;
        srv_http_abandon(server->http);
    } else if (now >= server->drain_until_ms) {
        srv_http_close(server->http);
        gave_up = now >= server->drain_until_ms + SRV_DRAIN_GRACE_MS;
    }
    if ((srv_http_connections(server->http) == 0 || gave_up) && srv_loop_offloaded(server->loop) == 0 &&
        have_parked(server, now))
        srv_loop_stop(server->loop);
}

static void on_stop(void *context) {
    srv_server *server = context;
    begin_drain(server, 0, (uint64_t)server->config->drain_time_ms);
}

static void on_signal(void *context) {
    srv_server *server = context;

    if (server->phase >= SRV_DRAINING) {
        srv_log_write(server->log, ENG_LOG_WARNING, "end", "second signal: ended at once");
        _exit(1);
    }
    on_stop(server);
}

static void on_reload(void *context) {
    srv_reload_begin(context);
}

// ---- service manager -----------------------------------------------------------------------------------------------

// Tells the watchdog only what is true: every engine is idle or inside a step that is younger than the watchdog's time.
static void on_notify_tick(void *context) {
    srv_server *server = context;
    uint64_t watchdog_us = 0;
    bool moving = true;

    if (server->phase == SRV_LOADING || server->reloading)
        sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%d000000", EXTEND_TIMEOUT_S);
    if (server->phase == SRV_LOADING)
        return;
    if (sd_watchdog_enabled(0, &watchdog_us) <= 0)
        return;
    for (const srv_model *model = server->alive; model; model = model->next)
        if (!model->ending && srv_worker_read_state(model->worker) != SRV_WORKER_LOADING &&
            srv_worker_busy_ms(model->worker) * 1000 >= watchdog_us)
            moving = false;
    if (moving)
        sd_notify(0, "WATCHDOG=1");
    else
        srv_log_repeated(server->log, ENG_LOG_ERROR, "stalled",
                         "an engine's step takes longer than the watchdog waits");
}

static void start_notifying(srv_server *server) {
    uint64_t watchdog_us = 0, period = NOTIFY_PERIOD_MS;

    if (!getenv("NOTIFY_SOCKET"))
        return;
    if (sd_watchdog_enabled(0, &watchdog_us) > 0 && watchdog_us / 2000 < period)
        period = watchdog_us / 2000 ? watchdog_us / 2000 : 1;
    srv_timer_start(server->notify_timer, 0, period);
}

// ---- models --------------------------------------------------------------------------------------------------------

static void describe_parameters(uint64_t count, char *text, size_t size) {
    const double value = (double)count;

    if (value >= 1e9)
        snprintf(text, size, "%.1fB", value / 1e9);
    else if (value >= 1e6)
        snprintf(text, size, "%.1fM", value / 1e6);
    else if (value >= 1e3)
        snprintf(text, size, "%.1fK", value / 1e3);
    else
        snprintf(text, size, "%llu", (unsigned long long)count);
}

// The one line for people, on standard output.
static void announce(const srv_server *server) {
    fputs("mesa-server " MESA_VERSION ": ", stdout);
    for (size_t i = 0; i < server->setup->model_count; i++) {
        const srv_model *model = server->setup->models[i];
        const eng_model_info *info = eng_info(srv_worker_engine(model->worker));
        char parameters[32];
        describe_parameters(info->parameters, parameters, sizeof parameters);
        printf("model %s (%s, %s parameters) on %s, %d rows, ", model->slot->name, info->mixers, parameters,
               info->device, info->max_rows);
    }
    fputs("listening on ", stdout);
    for (size_t i = 0; i < srv_http_count(server->http); i++)
        printf("%s%s", i ? ", " : "", srv_http_address(server->http, i));
    fputs("\n", stdout);
    fflush(stdout);
}

static void on_all_ready(srv_server *server) {
    if (server->announced || server->phase != SRV_LOADING)
        return;
    server->announced = true;
    server->phase = SRV_SERVING;
    server->metrics.configured = (int64_t)time(NULL);
    announce(server);
    sd_notify(0, "READY=1");
    if (server->reload_again) {
        server->reload_again = false;
        srv_reload_begin(server);
    }
}

static void on_state(srv_server *server, srv_model *model, srv_worker_state state) {
    const eng_error *error = srv_worker_error(model->worker);

    model->seen = state;
    switch (state) {
    case SRV_WORKER_LOADING:
    case SRV_WORKER_UNCHANGED:
        return;
    case SRV_WORKER_READY:
        model->loaded = (int64_t)time(NULL);
        if (model->retired)
            return; // the reload that wanted it was given up
        srv_log_write(server->log, ENG_LOG_INFO, "loaded", "model %s is ready, of fingerprint %.12s", model->slot->name,
                      srv_model_fingerprint(model));
        return;
    case SRV_WORKER_UNLOADABLE:
        if (model->retired || srv_reload_owns(server, model))
            return; // the reload tells
        srv_log_write(server->log, ENG_LOG_ERROR, "load", "model %s cannot be loaded: %s", model->slot->name,
                      error->text);
        begin_drain(server, error->code == ENG_INVALID ? 2 : 4, 0);
        return;
    case SRV_WORKER_FAILED:
        srv_log_write(server->log, ENG_LOG_ERROR, "engine", "model %s failed on %s: %s; the server will end",
                      model->slot->name, eng_info(srv_worker_engine(model->worker))->device, error->text);
        begin_failing(server);
        return;
    }
}

static bool all_are_ready(const srv_setup *setup) {
    for (size_t i = 0; i < setup->model_count; i++)
        if (!setup->models[i] || setup->models[i]->seen != SRV_WORKER_READY)
            return false;
    return true;
}

// Engines have events or a new state. Each may have been woken for several things, so all is taken every time.
static void on_events(void *context) {
    srv_server *server = context;

    for (srv_model *model = server->alive; model; model = model->next) {
        // State before events: what a failed engine had to say stands in its last events.
        const srv_worker_state state = srv_worker_read_state(model->worker);
        for (srv_event *event = srv_worker_take(model->worker), *next; event; event = next) {
            next = event->next;
            srv_completions_event(model->worker, event);
        }
        for (srv_call *call = srv_worker_take_calls(model->worker), *next; call; call = next) {
            next = call->next;
            call->done(call);
        }
        if (state != model->seen)
            on_state(server, model, state);
    }
    if (server->phase == SRV_LOADING && all_are_ready(server->setup))
        on_all_ready(server);
    srv_reload_go_on(server);
    srv_models_reap(server);
    srv_http_flush(server->http);
}

bool srv_server_refuses(const srv_server *server, srv_problem *problem) {
    if (server->phase == SRV_FAILING)
        srv_refuse(problem, 503, "unavailable", NULL, "a device failed; the server finishes what runs and ends");
    else if (server->phase > SRV_FAILING)
        srv_refuse(problem, 503, "draining", NULL, "the server is shutting down");
    return server->phase >= SRV_FAILING;
}

// ---- life ----------------------------------------------------------------------------------------------------------

static eng_status create_handles(srv_server *server) {
    eng_status status = srv_loop_create(&server->loop);
    if (!status)
        status = srv_wake_create(server->loop, on_events, server, &server->events);
    if (!status)
        status = srv_wake_create(server->loop, on_stop, server, &server->stop);
    if (!status)
        status = srv_wake_create(server->loop, on_reload, server, &server->reload);
    if (!status)
        status = srv_timer_create(server->loop, on_drain_tick, server, &server->drain_timer);
    if (!status)
        status = srv_timer_create(server->loop, on_notify_tick, server, &server->notify_timer);
    return status;
}

eng_status srv_server_create(const srv_config *config, srv_log *log, srv_server **out, eng_error *error) {
    srv_server *server = calloc(1, sizeof *server);
    if (!server)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the server");
    server->setup = srv_setup_create(config, false);
    server->config = config;
    server->log = log;
    server->started = (int64_t)time(NULL);
    eng_status status = server->setup ? create_handles(server) : ENG_NO_MEMORY;
    if (status)
        status = eng_fail(error, ENG_NO_MEMORY, "the event loop cannot be made");
    else if (config->keys)
        status = srv_keys_load(config->keys, &server->keys, error);
    if (!status)
        status = srv_http_create(server, &server->http, error);
    if (status) {
        srv_server_free(server);
        return status;
    }
    *out = server;
    return ENG_OK;
}

eng_status srv_server_handle_signals(srv_server *server) {
    const eng_status status = srv_loop_on_terminate(server->loop, on_signal, server);
    return status ? status : srv_loop_on_reload(server->loop, on_reload, server);
}

static void on_store_tick(void *context) {
    srv_server *server = context;
    uint64_t behind = 0;

    for (const srv_model *model = server->alive; model; model = model->next)
        behind += srv_counter_read(&srv_worker_stats(model->worker)->behind);
    srv_store_look(server->store, behind);
    if (server->phase == SRV_SERVING)
        srv_store_measure(server->store, server->setup->models[0]->worker);
}

static eng_status open_store(srv_server *server, eng_error *error) {
    char *place = srv_store_place(server->config, getenv("STATE_DIRECTORY"));

    if (!place)
        return ENG_OK;
    eng_status status = srv_store_open(server->config, place, server->log, &server->store, error);
    if (!status)
        status = srv_timer_create(server->loop, on_store_tick, server, &server->store_timer);
    if (!status) {
        srv_timer_start(server->store_timer, SRV_STORE_LOOK_MS, SRV_STORE_LOOK_MS);
        // An address may hold a password.
        srv_log_write(server->log, ENG_LOG_INFO, "store", "sessions are kept in %s",
                      srv_store_is_shared(server->store) ? "a store that other servers may share" : place);
    }
    free(place);
    return status;
}

int srv_server_run(srv_server *server) {
    eng_error error = {0};

    for (size_t i = 0; i < srv_http_count(server->http); i++)
        srv_log_write(server->log, ENG_LOG_INFO, "listen", "listening on %s", srv_http_address(server->http, i));
    if (open_store(server, &error)) {
        srv_log_write(server->log, ENG_LOG_ERROR, "store", "the store cannot be opened: %s", error.text);
        return error.code == ENG_INVALID || error.code == ENG_UNSUPPORTED ? 2 : 4;
    }
    for (size_t i = 0; i < server->setup->model_count; i++)
        if (srv_setup_open(server, server->setup, i, NULL, &error)) {
            srv_log_write(server->log, ENG_LOG_ERROR, "load", "%s", error.text);
            return 4;
        }
    start_notifying(server);
    srv_http_flush(server->http);
    srv_loop_run(server->loop);
    srv_log_write(server->log, ENG_LOG_INFO, "end", "ended with status %d", server->exit_status);
    return server->exit_status;
}

bool srv_server_loading(const srv_server *server) {
    for (const srv_model *model = server->alive; model; model = model->next)
        if (srv_worker_read_state(model->worker) == SRV_WORKER_LOADING)
            return true;
    return false;
}

void srv_server_stop(srv_server *server) {
    srv_wake_send(server->stop);
}

void srv_server_reload(srv_server *server) {
    srv_wake_send(server->reload);
}

const char *srv_server_address(const srv_server *server, size_t index) {
    return srv_http_address(server->http, index);
}

void srv_server_free(srv_server *server) {
    if (!server)
        return;
    srv_http_free(server->http); // its exchanges cancel their jobs
    srv_reload_free(server);
    for (const srv_model *model = server->alive; model; model = model->next)
        srv_worker_stop(model->worker); // until then it may wake the loop
    srv_sessions_free(server->sessions);
    srv_store_close(server->store);
    srv_wake_close(server->events);
    server->events = NULL;
    srv_wake_close(server->stop);
    srv_wake_close(server->reload);
    srv_timer_close(server->drain_timer);
    srv_timer_close(server->notify_timer);
    srv_timer_close(server->store_timer);
    srv_loop_free(server->loop); // what the pool held is let go
    srv_setup_release(server->setup);
    srv_models_free(server);
    srv_keys_free(server->keys);
    free(server);
}

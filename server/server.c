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
    server->drain_until_ms = srv_loop_now(server->loop) + (uint64_t)server->config->drain_time_ms;
    srv_timer_start(server->drain_timer, 0, SRV_DRAIN_POLL_MS);
}

static bool is_idle(const srv_server *server) {
    for (size_t i = 0; i < server->model_count; i++)
        if (srv_worker_places(server->models[i].worker) > 0)
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

static void reload_keys(srv_server *server) {
    eng_error error = {0};

    if (!server->config->keys)
        srv_log_write(server->log, ENG_LOG_INFO, "reload", "there is no key file to read again");
    else if (srv_keys_load(server->config->keys, server->keys, &server->keys, &error))
        srv_log_write(server->log, ENG_LOG_ERROR, "reload", "%s; the keys stay as they were", error.text);
    else
        srv_log_write(server->log, ENG_LOG_INFO, "reload", "%zu keys are read", srv_keys_count(server->keys));
}

static void reload_tls(srv_server *server) {
    eng_error error = {0};

    if (!server->config->tls_cert)
        return;
    if (srv_http_reload_tls(server->http, &error))
        srv_log_write(server->log, ENG_LOG_ERROR, "reload", "%s; the certificate stays as it was", error.text);
    else
        srv_log_write(server->log, ENG_LOG_INFO, "reload", "the certificate is read");
}

// Reads the files of keys and of TLS again; a bad one changes nothing.
static void on_reload(void *context) {
    srv_server *server = context;
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu",
               (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000);
    reload_keys(server);
    reload_tls(server);
    if (server->phase == SRV_SERVING)
        sd_notify(0, "READY=1");
}

// ---- service manager -----------------------------------------------------------------------------------------------

// Tells the watchdog only what is true: every engine is idle or inside a step that is younger than the watchdog's time.
static void on_notify_tick(void *context) {
    srv_server *server = context;
    uint64_t watchdog_us = 0;
    bool moving = true;

    if (server->phase == SRV_LOADING) {
        sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%d000000", EXTEND_TIMEOUT_S);
        return;
    }
    if (sd_watchdog_enabled(0, &watchdog_us) <= 0)
        return;
    for (size_t i = 0; i < server->model_count; i++)
        if (srv_worker_busy_ms(server->models[i].worker) * 1000 >= watchdog_us)
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
    for (size_t i = 0; i < server->model_count; i++) {
        const eng_model_info *info = eng_info(srv_worker_engine(server->models[i].worker));
        char parameters[32];
        describe_parameters(info->parameters, parameters, sizeof parameters);
        printf("model %s (%s, %s parameters) on %s, %d rows, ", server->models[i].path->name, info->mixers, parameters,
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
    announce(server);
    sd_notify(0, "READY=1");
}

static void on_state(srv_server *server, srv_model *model, srv_worker_state state) {
    const eng_error *error = srv_worker_error(model->worker);

    model->seen = state;
    switch (state) {
    case SRV_WORKER_LOADING:
        return;
    case SRV_WORKER_READY:
        model->created = (int64_t)time(NULL);
        srv_log_write(server->log, ENG_LOG_INFO, "loaded", "model %s is ready", model->path->name);
        return;
    case SRV_WORKER_UNLOADABLE:
        srv_log_write(server->log, ENG_LOG_ERROR, "load", "model %s cannot be loaded: %s", model->path->name,
                      error->text);
        begin_drain(server, error->code == ENG_INVALID ? 2 : 4, 0);
        return;
    case SRV_WORKER_FAILED:
        srv_log_write(server->log, ENG_LOG_ERROR, "engine", "model %s failed on %s: %s; the server will end",
                      model->path->name, eng_info(srv_worker_engine(model->worker))->device, error->text);
        begin_failing(server);
        return;
    }
}

// Engines have events or a new state. Each may have been woken for several things, so all is taken every time.
static void on_events(void *context) {
    srv_server *server = context;
    size_t ready = 0;

    for (size_t i = 0; i < server->model_count; i++) {
        srv_model *model = &server->models[i];
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
        ready += model->seen == SRV_WORKER_READY;
    }
    if (ready == server->model_count)
        on_all_ready(server);
    srv_http_flush(server->http);
}

static void wake_for_events(void *context) {
    srv_server *server = context;
    srv_wake_send(server->events);
}

static eng_status start_worker(srv_server *server, srv_model *model, eng_error *error) {
    const srv_config *config = server->config;
    const srv_worker_options options = {
        .engine = {.model_dir = model->path->folder,
                   .device = model->device,
                   .fast = config->fast,
                   .state_storage = (eng_state_storage)config->state_storage,
                   .max_rows = (int32_t)config->rows,
                   .prompt_tokens = (int32_t)config->prompt_tokens,
                   .state_budget = (uint64_t)config->state_budget,
                   .session_budget = (uint64_t)config->session_budget,
                   .session_history = config->session_history,
                   .store = server->store ? srv_store_engine(server->store) : NULL,
                   .lease_ms = config->store_lease_ms,
                   .prefix_budget = (uint64_t)config->prefix_budget,
                   .snapshot_tokens = (int32_t)config->snapshot_tokens,
                   .prefix_audit = (uint64_t)config->prefix_audit,
                   // The worker refuses first; cancelled jobs may linger in the engine for a step.
                   .queue_requests = (uint64_t)config->queue_requests * 2 + 2 * SRV_MAX_CHOICES + 4096,
                   .queue_tokens = (uint64_t)config->queue_tokens * 2,
                   .need_tokenizer = true,
                   .log = srv_log_engine,
                   .log_context = server->log},
        .queue_requests = (uint64_t)config->queue_requests,
        .queue_tokens = (uint64_t)config->queue_tokens,
        .wake = wake_for_events,
        .wake_context = server,
    };
    return srv_worker_start(&options, &model->worker, error);
}

// Each model on each device of the list.
static eng_status start_workers(srv_server *server, eng_error *error) {
    const srv_config *config = server->config;
    const size_t devices = srv_config_devices(config);

    for (size_t i = 0; i < config->model_count * devices; i++) {
        srv_model *model = &server->models[i];
        *model = (srv_model){.path = &config->models[i / devices], .replica = i % devices, .replicas = devices};
        srv_config_device(config, model->replica, model->device);
        const eng_status status = start_worker(server, model, error);
        if (status)
            return status;
        server->model_count++;
    }
    return ENG_OK;
}

const srv_model *srv_server_least_used(const srv_model *model) {
    const srv_model *const first = model - model->replica, *best = model;
    uint64_t least = srv_worker_places(model->worker);

    for (size_t i = 0; i < model->replicas; i++) {
        const bool ready = srv_worker_read_state(first[i].worker) == SRV_WORKER_READY;
        const uint64_t places = ready ? srv_worker_places(first[i].worker) : UINT64_MAX;
        best = places < least ? &first[i] : best;
        least = places < least ? places : least;
    }
    return best;
}

const srv_model *srv_server_model(const srv_server *server, const srv_key *key, const char *name,
                                  srv_problem *problem) {
    for (size_t i = 0; i < server->model_count; i++) {
        const srv_model *model = &server->models[i];
        if (name && strcmp(name, model->path->name) != 0)
            continue;
        const srv_worker_state state = srv_worker_read_state(model->worker);
        if (!srv_key_may_use(key, model->path->name)) {
            srv_refuse(problem, 403, "model_not_allowed", "model", "this key may not use this model");
            return NULL;
        }
        if (state == SRV_WORKER_READY)
            return model;
        if (state == SRV_WORKER_LOADING)
            srv_refuse(problem, 503, "loading", NULL, "the model is being loaded");
        else
            srv_refuse(problem, 503, "unavailable", NULL, "the model is not available");
        return NULL;
    }
    srv_refuse(problem, 404, "model_not_found", "model", "there is no such model");
    return NULL;
}

void srv_server_view(const srv_server *server, size_t index, srv_model_view *view) {
    const srv_model *model = &server->models[index];
    const bool ready = model->seen == SRV_WORKER_READY;

    *view = (srv_model_view){
        .name = model->path->name,
        .state = ready                               ? "ready"
                 : model->seen == SRV_WORKER_LOADING ? "loading"
                                                     : "failed",
        .created = model->created,
        .info = ready ? eng_info(srv_worker_engine(model->worker)) : NULL,
        .max_cg_steps = server->bounds.max_cg_steps,
        .max_loops = server->bounds.max_loops,
        .min_cg_tolerance = server->bounds.min_cg_tolerance,
        .allow_exact = server->bounds.allow_exact,
    };
}

bool srv_server_refuses(const srv_server *server, srv_problem *problem) {
    if (server->phase == SRV_FAILING)
        srv_refuse(problem, 503, "unavailable", NULL, "a device failed; the server finishes what runs and ends");
    else if (server->phase > SRV_FAILING)
        srv_refuse(problem, 503, "draining", NULL, "the server is shutting down");
    return server->phase >= SRV_FAILING;
}

// ---- life ----------------------------------------------------------------------------------------------------------

static srv_bounds bounds_of(const srv_config *config) {
    const int64_t ids =
        config->queue_tokens > config->max_prompt_tokens ? config->queue_tokens : config->max_prompt_tokens;
    return (srv_bounds){
        .max_tokens = config->max_tokens,
        .max_prompt_tokens = config->max_prompt_tokens,
        .max_prompts = config->max_prompts,
        .max_values = ids + SRV_SPARE_JSON_VALUES,
        .min_cg_tolerance = config->min_cg_tolerance,
        .max_cg_steps = config->max_cg_steps,
        .max_loops = config->max_loops,
        .allow_exact = config->allow_exact,
    };
}

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
    server->config = config;
    server->log = log;
    server->bounds = bounds_of(config);
    server->started = (int64_t)time(NULL);
    server->models = calloc(config->model_count * srv_config_devices(config), sizeof *server->models);
    eng_status status = server->models ? create_handles(server) : ENG_NO_MEMORY;
    if (status)
        status = eng_fail(error, ENG_NO_MEMORY, "the event loop cannot be made");
    else if (config->keys)
        status = srv_keys_load(config->keys, NULL, &server->keys, error);
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

    for (size_t i = 0; i < server->model_count; i++)
        behind += srv_counter_read(&srv_worker_stats(server->models[i].worker)->behind);
    srv_store_look(server->store, behind);
    if (server->phase == SRV_SERVING)
        srv_store_measure(server->store, server->models[0].worker);
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
        srv_log_write(server->log, ENG_LOG_ERROR, "store", "%s", error.text);
        return error.code == ENG_INVALID || error.code == ENG_UNSUPPORTED ? 2 : 4;
    }
    if (start_workers(server, &error)) {
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
    for (size_t i = 0; i < server->model_count; i++)
        if (srv_worker_read_state(server->models[i].worker) == SRV_WORKER_LOADING)
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
    for (size_t i = 0; i < server->model_count; i++)
        srv_worker_stop(server->models[i].worker); // until then it may wake the loop
    srv_sessions_free(server->sessions);
    srv_store_close(server->store); // until then it may wake the workers
    for (size_t i = 0; i < server->model_count; i++)
        srv_worker_free(server->models[i].worker);
    srv_wake_close(server->events);
    srv_wake_close(server->stop);
    srv_wake_close(server->reload);
    srv_timer_close(server->drain_timer);
    srv_timer_close(server->notify_timer);
    srv_timer_close(server->store_timer);
    srv_loop_free(server->loop);
    srv_keys_free(server->keys);
    free(server->models);
    free(server);
}

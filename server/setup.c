// SPDX-License-Identifier: Apache-2.0
// What the server runs with: a configuration, and for each of its models on each device an engine.
//
// A setup never changes once requests see it: a reload makes another and puts it in its place (reload.c). It is
// counted, and so is a model (one engine with its worker) and a slot (the name and device under which engines serve in
// turn, with what is counted of them). The present setup holds its models; what is prepared on the pool holds the setup
// that it began under; an exchange and a session hold their model. A model that is in no setup any more and that nobody
// holds is told to end: its own thread closes the engine, and the loop thread frees the rest when it has. Counting and
// freeing: loop thread; reading a setup that one holds: any.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/memory.h"
#include "server/server.h"

// ---- slots ---------------------------------------------------------------------------------------------------------

static srv_slot *make_slot(const char *name, const char *device, size_t replica, size_t replicas) {
    srv_slot *slot = calloc(1, sizeof *slot);
    char *copy = strdup(name);

    if (!slot || !copy) {
        free(slot);
        free(copy);
        return NULL;
    }
    *slot = (srv_slot){.references = 1, .name = copy, .replica = replica, .replicas = replicas};
    snprintf(slot->device, sizeof slot->device, "%s", device);
    return slot;
}

static void release_slot(srv_slot *slot) {
    if (--slot->references > 0)
        return;
    free(slot->name);
    free(slot);
}

// ---- models --------------------------------------------------------------------------------------------------------

const char *srv_model_fingerprint(const srv_model *model) {
    return eng_info(srv_worker_engine(model->worker))->fingerprint.states;
}

srv_model *srv_model_hold(const srv_model *model) {
    srv_model *held = (srv_model *)model;

    held->references++;
    return held;
}

void srv_model_release(const srv_model *model) {
    srv_model *held = (srv_model *)model;

    if (held && --held->references == 0 && held->server->events)
        srv_wake_send(held->server->events); // it may have to end
}

static void wake_for_events(void *context) {
    srv_server *server = context;
    srv_wake_send(server->events);
}

static srv_worker_options worker_options(const srv_server *server, const srv_config *config, const srv_model *model) {
    return (srv_worker_options){
        .engine = {.model_dir = model->folder,
                   .device = model->slot->device,
                   .fast = config->fast,
                   .state_storage = (eng_state_storage)config->state_storage,
                   .max_rows = (int32_t)config->rows,
                   .prompt_tokens = (int32_t)config->prompt_tokens,
                   .state_budget = (uint64_t)config->state_budget,
                   .session_budget = (uint64_t)config->session_budget,
                   .session_history = config->session_history,
                   .store = server->store ? srv_store_engine(server->store) : NULL,
                   .lease_ms = config->store_lease_ms,
                   .store_prefixes = config->store_prefixes,
                   .prefix_budget = (uint64_t)config->prefix_budget,
                   .snapshot_tokens = (int32_t)config->snapshot_tokens,
                   .prefix_audit = (uint64_t)config->prefix_audit,
                   // The worker refuses first, and its limits may change.
                   .queue_requests = UINT64_MAX / 2,
                   .queue_tokens = UINT64_MAX / 2,
                   .need_tokenizer = true,
                   .log = srv_log_engine,
                   .log_context = server->log},
        .queue_requests = (uint64_t)config->queue_requests,
        .queue_tokens = (uint64_t)config->queue_tokens,
        .wake = wake_for_events,
        .wake_context = (void *)server,
    };
}

bool srv_setup_same_engines(const srv_config *a, const srv_config *b) {
    return a->fast == b->fast && a->state_storage == b->state_storage && a->rows == b->rows &&
           a->prompt_tokens == b->prompt_tokens && a->state_budget == b->state_budget &&
           a->session_budget == b->session_budget && a->session_history == b->session_history &&
           a->prefix_budget == b->prefix_budget && a->snapshot_tokens == b->snapshot_tokens &&
           a->prefix_audit == b->prefix_audit && a->store_prefixes == b->store_prefixes;
}

static void free_model(srv_model *model) {
    srv_model **place = &model->server->alive;

    srv_worker_free(model->worker);
    while (*place && *place != model)
        place = &(*place)->next;
    if (*place)
        *place = model->next;
    if (model->slot)
        release_slot(model->slot);
    free(model->folder);
    free(model);
}

eng_status srv_setup_open(srv_server *server, srv_setup *setup, size_t index, const srv_model_again *again,
                          eng_error *error) {
    const size_t devices = srv_config_devices(&setup->config);
    const srv_model_path *path = &setup->config.models[index / devices];
    const srv_model *older = srv_setup_at(server->setup, path->name, index % devices);
    srv_model *model = calloc(1, sizeof *model);
    char device[SRV_DEVICE_BYTES];

    if (!model)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a model");
    model->server = server;
    model->folder = strdup(path->folder);
    srv_config_device(&setup->config, index % devices, device);
    if (older) {
        model->slot = older->slot;
        model->slot->references++;
    } else
        model->slot = make_slot(path->name, device, index % devices, devices);
    if (!model->folder || !model->slot) {
        free_model(model);
        return eng_fail(error, ENG_NO_MEMORY, "no memory for a model");
    }
    model->stamp = srv_folder_stamp(model->folder);
    srv_worker_options options = worker_options(server, &setup->config, model);
    if (again) {
        options.engine.memory_limit = again->memory_limit;
        options.reads_first = true;
        snprintf(options.known, sizeof options.known, "%s", again->known ? again->known : "");
    }
    const eng_status status = srv_worker_start(&options, &model->worker, error);
    if (status) {
        free_model(model);
        return status;
    }
    model->next = server->alive;
    server->alive = model;
    setup->models[index] = srv_model_hold(model);
    return ENG_OK;
}

void srv_setup_take(srv_setup *setup, size_t index, const srv_model *model) {
    setup->models[index] = srv_model_hold(model);
}

void srv_models_reap(srv_server *server) {
    for (srv_model *model = server->alive, *next; model; model = next) {
        next = model->next;
        if (!model->retired || model->references > 0)
            continue;
        if (!model->ending && srv_worker_is_quiet(model->worker)) {
            model->ending = true;
            srv_worker_end(model->worker);
        }
        if (!model->ending || !srv_worker_ended(model->worker))
            continue;
        srv_worker_stop(model->worker);
        if (srv_worker_engine(model->worker))
            srv_log_write(server->log, ENG_LOG_INFO, "retired", "an engine of model %s is closed", model->slot->name);
        free_model(model);
    }
}

void srv_models_free(srv_server *server) {
    while (server->alive)
        free_model(server->alive);
}

// ---- setups --------------------------------------------------------------------------------------------------------

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

srv_setup *srv_setup_create(const srv_config *config, bool owns) {
    srv_setup *setup = calloc(1, sizeof *setup);

    if (setup)
        *setup = (srv_setup){.references = 1,
                             .config = *config,
                             .owns = owns,
                             .bounds = bounds_of(config),
                             .model_count = config->model_count * srv_config_devices(config)};
    return setup;
}

srv_setup *srv_setup_hold(srv_setup *setup) {
    setup->references++;
    return setup;
}

void srv_setup_release(srv_setup *setup) {
    if (!setup || --setup->references > 0)
        return;
    for (size_t i = 0; i < setup->model_count; i++)
        srv_model_release(setup->models[i]);
    if (setup->owns)
        srv_config_free(&setup->config);
    free(setup);
}

const srv_model *srv_setup_at(const srv_setup *setup, const char *name, size_t replica) {
    for (size_t i = 0; setup && i < setup->model_count; i++)
        if (setup->models[i] && setup->models[i]->slot->replica == replica &&
            strcmp(setup->models[i]->slot->name, name) == 0)
            return setup->models[i];
    return NULL;
}

const srv_model *srv_setup_least_used(const srv_setup *setup, const srv_model *model) {
    const srv_model *best = model;
    uint64_t least = UINT64_MAX;

    for (size_t i = 0; i < setup->model_count; i++) {
        const srv_model *at = setup->models[i];
        if (strcmp(at->slot->name, model->slot->name) != 0 || srv_worker_read_state(at->worker) != SRV_WORKER_READY)
            continue;
        const uint64_t places = srv_worker_places(at->worker);
        best = places < least ? at : best;
        least = places < least ? places : least;
    }
    return best;
}

const srv_model *srv_setup_model(const srv_setup *setup, const srv_key *key, const char *name, srv_problem *problem) {
    for (size_t i = 0; i < setup->model_count; i++) {
        const srv_model *model = setup->models[i];
        if (name && strcmp(name, model->slot->name) != 0)
            continue;
        const srv_worker_state state = srv_worker_read_state(model->worker);
        if (!srv_key_may_use(key, model->slot->name)) {
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
    srv_refuse(problem, 404, "model_not_found", "model", "there is no such model; GET /v1/models lists them");
    return NULL;
}

void srv_setup_view(const srv_setup *setup, size_t index, srv_model_view *view) {
    const srv_model *model = setup->models[index];
    const bool ready = model->seen == SRV_WORKER_READY;

    *view = (srv_model_view){
        .name = model->slot->name,
        .state = ready                               ? "ready"
                 : model->seen == SRV_WORKER_LOADING ? "loading"
                                                     : "failed",
        .created = model->loaded,
        .info = ready ? eng_info(srv_worker_engine(model->worker)) : NULL,
        .max_cg_steps = setup->bounds.max_cg_steps,
        .max_loops = setup->bounds.max_loops,
        .min_cg_tolerance = setup->bounds.min_cg_tolerance,
        .allow_exact = setup->bounds.allow_exact,
    };
}

// SPDX-License-Identifier: Apache-2.0
// SIGHUP: configuration, keys, certificates and checkpoints are read again, all of it or nothing.
//
// First the files of configuration, keys and TLS are read and checked, those too that only a restart would take. Then a
// setup is made: a model whose folder and options are as they were is taken over with all that it holds; any other is
// opened beside the old one, one after the other, each on a worker's thread, against the memory that is left. Once all
// are ready the setup takes the place of the present one within one turn of the loop: what is asked from then on goes
// to the new engines, what is under way ends on the old ones, which setup.c ends after that. Whatever fails, the
// present setup stays as it is. A signal that comes meanwhile, or while the server starts, makes one more round after
// it; one that comes while it ends does nothing. The service manager is told when a round begins and when the last has
// ended. Loop thread.
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <time.h>

#include "server/memory.h"
#include "server/server.h"

enum { KEPT_BYTES = 256 };

// What stands in the files that the configuration names, read once: what was checked is what will hold.
typedef struct srv_files {
    srv_keys *keys;
    srv_tls *tls;
} srv_files;

struct srv_reload {
    srv_setup *fresh;
    srv_files files;
    size_t next; // of its models: those before are there
    size_t opened;
};

// ---- keys and certificates -----------------------------------------------------------------------------------------

static void free_files(srv_files *files) {
    srv_keys_free(files->keys);
    srv_tls_free(files->tls);
    *files = (srv_files){0};
}

static eng_status read_files(const srv_config *config, srv_files *out, eng_error *error) {
    *out = (srv_files){0};
    eng_status status = config->keys ? srv_keys_load(config->keys, &out->keys, error) : ENG_OK;
    if (!status && config->tls_cert)
        status = srv_tls_load(config->tls_cert, config->tls_key, &out->tls, error);
    if (status)
        free_files(out);
    return status;
}

eng_status srv_check_files(const srv_config *config, eng_error *error) {
    srv_files files;
    const eng_status status = read_files(config, &files, error);

    free_files(&files);
    return status;
}

// Those that only a restart would take are left.
static void take_files(srv_server *server, srv_files *files) {
    const srv_config *config = server->config;

    if (config->keys && files->keys) {
        srv_keys_replace(files->keys, server->keys);
        server->keys = files->keys;
        files->keys = NULL;
        srv_log_write(server->log, ENG_LOG_INFO, "reload", "%zu keys are read", srv_keys_count(server->keys));
    }
    if (config->tls_cert && files->tls) {
        srv_http_replace_tls(server->http, files->tls);
        files->tls = NULL;
        srv_log_write(server->log, ENG_LOG_INFO, "reload", "the certificate is read");
    }
}

// ---- the end of a round --------------------------------------------------------------------------------------------

// Models that are in no setup will end.
static void retire(srv_server *server, const srv_setup *setup) {
    for (size_t i = 0; i < setup->model_count; i++) {
        srv_model *model = setup->models[i];
        bool present = false;
        for (size_t k = 0; model && k < server->setup->model_count; k++)
            present = present || server->setup->models[k] == model;
        if (model)
            model->retired = !present;
    }
}

static void drop(srv_server *server) {
    srv_reload *reload = server->reloading;

    if (!reload)
        return;
    server->reloading = NULL;
    retire(server, reload->fresh);
    srv_setup_release(reload->fresh);
    free_files(&reload->files);
    free(reload);
}

static void end_round(srv_server *server, const eng_error *error) {
    drop(server);
    if (error) {
        server->metrics.failed_reloads++;
        srv_log_write(server->log, ENG_LOG_ERROR, "reload", "%s; nothing is changed", error->text);
    } else {
        server->metrics.reloads++;
        server->metrics.configured = (int64_t)time(NULL);
    }
    const bool again = server->reload_again;
    server->reload_again = false;
    if (again)
        srv_reload_begin(server);
    else
        sd_notifyf(0, "READY=1\nSTATUS=%s%s", error ? "Not reloaded: " : "", error ? error->text : "");
}

// ---- models --------------------------------------------------------------------------------------------------------

static const srv_model_path *path_of(const srv_setup *setup, size_t index) {
    return &setup->config.models[index / srv_config_devices(&setup->config)];
}

static const srv_model *present_of(const srv_server *server, const srv_setup *fresh, size_t index) {
    return srv_setup_at(server->setup, path_of(fresh, index)->name, index % srv_config_devices(&fresh->config));
}

// Neither its options nor anything in its folder.
static bool is_untouched(const srv_server *server, const srv_setup *fresh, size_t index, const srv_model *present) {
    return present && strcmp(present->folder, path_of(fresh, index)->folder) == 0 &&
           srv_setup_same_engines(&fresh->config, server->config) && present->stamp != 0 &&
           present->stamp == srv_folder_stamp(present->folder);
}

static eng_status open_next(srv_server *server, size_t index, const srv_model *present, eng_error *error) {
    srv_reload *reload = server->reloading;
    const bool same = present && srv_setup_same_engines(&reload->fresh->config, server->config);
    const srv_model_again again = {.memory_limit = srv_memory_left(),
                                   .known =
                                       same ? eng_info(srv_worker_engine(present->worker))->fingerprint.whole : NULL};

    return srv_setup_open(server, reload->fresh, index, &again, error);
}

// The folder was written to and holds the same.
static void take_unchanged(srv_server *server, size_t index) {
    srv_setup *fresh = server->reloading->fresh;
    srv_model *opened = fresh->models[index], *present = (srv_model *)present_of(server, fresh, index);

    if (strcmp(opened->folder, present->folder) == 0)
        present->stamp = opened->stamp;
    fresh->models[index] = NULL;
    srv_setup_take(fresh, index, present);
    opened->retired = true;
    srv_model_release(opened);
}

static void commit(srv_server *server) {
    srv_setup *old = server->setup, *fresh = server->reloading->fresh;
    const srv_config *config = &fresh->config;

    take_files(server, &server->reloading->files);
    srv_log_set_level(server->log, (eng_log_level)config->log_level);
    server->setup = srv_setup_hold(fresh);
    server->config = config;
    retire(server, old);
    for (size_t i = 0; i < fresh->model_count; i++)
        srv_worker_set_queue(fresh->models[i]->worker, (uint64_t)config->queue_requests,
                             (uint64_t)config->queue_tokens);
    srv_log_write(server->log, ENG_LOG_INFO, "reload", "the configuration holds; %zu of %zu engines are new",
                  server->reloading->opened, fresh->model_count);
    srv_setup_release(old);
    srv_sessions_move(server);
    end_round(server, NULL);
}

// False: its load goes on, or has failed.
static bool is_there(srv_server *server, size_t index, eng_error *error) {
    const srv_model *model = server->reloading->fresh->models[index];

    switch (model->seen) {
    case SRV_WORKER_READY:
        server->reloading->opened++;
        return true;
    case SRV_WORKER_UNCHANGED:
        take_unchanged(server, index);
        return true;
    case SRV_WORKER_LOADING:
        return false;
    case SRV_WORKER_UNLOADABLE:
    case SRV_WORKER_FAILED:
        break;
    }
    (void)eng_fail(error, srv_worker_error(model->worker)->code, "model %s cannot be loaded: %s", model->slot->name,
                   srv_worker_error(model->worker)->text);
    return false;
}

void srv_reload_go_on(srv_server *server) {
    srv_reload *reload = server->reloading;
    eng_error error = {0};

    while (reload && reload->next < reload->fresh->model_count && !error.code) {
        const size_t index = reload->next;
        const srv_model *present = present_of(server, reload->fresh, index);
        if (!reload->fresh->models[index] && is_untouched(server, reload->fresh, index, present))
            srv_setup_take(reload->fresh, index, present);
        else if (!reload->fresh->models[index] && open_next(server, index, present, &error))
            break;
        else if (reload->fresh->models[index] != present && !is_there(server, index, &error))
            break;
        reload->next++;
    }
    if (reload && error.code)
        end_round(server, &error);
    else if (reload && reload->next == reload->fresh->model_count)
        commit(server);
}

bool srv_reload_owns(const srv_server *server, const srv_model *model) {
    const srv_reload *reload = server->reloading;

    for (size_t i = 0; reload && i < reload->fresh->model_count; i++)
        if (reload->fresh->models[i] == model)
            return true;
    return false;
}

// ---- the beginning of a round --------------------------------------------------------------------------------------

static eng_status read_all(srv_server *server, eng_error *error) {
    srv_reload *reload = calloc(1, sizeof *reload);
    srv_files files = {0};
    char kept[KEPT_BYTES];
    srv_config config;

    eng_status status = srv_config_load_again(server->config, &config, error);
    if (!status) // also what waits for a restart, which would fail by it
        status = read_files(&config, &files, error);
    if (!status)
        status = srv_config_keep(server->config, &config, kept, sizeof kept, error);
    if (!status && !reload)
        status = eng_fail(error, ENG_NO_MEMORY, "no memory for a reload");
    srv_setup *fresh = status ? NULL : srv_setup_create(&config, true);
    if (!status && !fresh)
        status = eng_fail(error, ENG_NO_MEMORY, "no memory for a reload");
    if (status) {
        srv_config_free(&config);
        free_files(&files);
        free(reload);
        return status;
    }
    if (kept[0])
        srv_log_write(server->log, ENG_LOG_WARNING, "reload", "these stay as they are until a restart: %s", kept);
    reload->fresh = fresh;
    reload->files = files;
    server->reloading = reload;
    return ENG_OK;
}

static void tell_manager(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu",
               (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000);
}

void srv_reload_begin(srv_server *server) {
    eng_error error = {0};

    if (server->phase >= SRV_FAILING) {
        srv_log_write(server->log, ENG_LOG_WARNING, "reload", "nothing is read again: the server ends");
        return;
    }
    if (server->phase == SRV_LOADING || server->reloading) {
        server->reload_again = true;
        srv_log_write(server->log, ENG_LOG_INFO, "reload", "models are being loaded; all is read again after that");
        return;
    }
    tell_manager();
    if (read_all(server, &error))
        end_round(server, &error);
    else
        srv_reload_go_on(server);
}

void srv_reload_free(srv_server *server) {
    if (!server->reloading)
        return;
    server->reload_again = false;
    server->metrics.failed_reloads++;
    srv_log_write(server->log, ENG_LOG_WARNING, "reload", "given up: the server ends");
    drop(server);
}

// SPDX-License-Identifier: Apache-2.0
// The server's configuration: one struct, filled once, constant afterwards; a reload fills another.
//
// Every option is one row of a table in config.c and has three spellings: --queue-tokens N on the command line,
// MESA_QUEUE_TOKENS=N in the environment, queue_tokens = N in section [server] of the file named by --config. The
// command line wins over the environment, the environment over the file, the file over the default. A list (model,
// listen) of a stronger source replaces the weaker one's whole list. A value out of range and an unknown key are
// errors that name the place.
#ifndef SERVER_CONFIG_H
#define SERVER_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "engine/engine.h"
#include "server/limits.h"

typedef struct srv_model_path {
    char *name; // as requests spell it
    char *folder;
} srv_model_path;

typedef struct srv_config {
    srv_model_path models[SRV_MAX_MODELS];
    size_t model_count;
    char *listen[SRV_MAX_LISTENERS]; // "HOST:PORT", "[IPV6]:PORT" or "unix:PATH"
    size_t listen_count;
    char *admin_listen;              // as in listen; NULL: none
    char *keys, *tls_cert, *tls_key; // paths; NULL: none
    bool allow_anonymous;
    char *device;
    bool fast;
    int64_t state_storage; // eng_state_storage
    int64_t socket_mode;
    int64_t log_level; // eng_log_level
    int64_t rows, prompt_tokens, state_budget;
    int64_t session_budget, session_history;
    char *store; // "none", "auto" or a place
    int64_t store_budget, store_lease_ms, store_prefixes;
    int64_t prefix_budget, snapshot_tokens, prefix_audit;
    int64_t queue_requests, queue_tokens;
    double key_queue, degrade_queue; // shares of the queue
    int64_t max_body, body_memory, max_headers;
    int64_t header_time_ms, body_time_ms, idle_time_ms, drain_time_ms, ping_ms;
    int64_t connections;
    int64_t max_tokens, max_prompt_tokens, max_prompts;
    double min_cg_tolerance;
    int64_t max_cg_steps, max_loops;
    bool allow_exact;
    // Where it was read from; borrowed.
    int argument_count;
    char *const *arguments, *const *environment;
} srv_config;

typedef enum srv_config_action {
    SRV_CONFIG_RUN,
    SRV_CONFIG_CHECK,
    SRV_CONFIG_HELP,
    SRV_CONFIG_VERSION,
    SRV_CONFIG_HASH_KEY
} srv_config_action;

// Fills *config from all sources. environment: NULL-terminated "NAME=VALUE" strings. On failure *error names option,
// variable or file and line; *config needs srv_config_free either way. With HELP, VERSION and HASH_KEY *config is not
// filled. A path "credential:NAME" is NAME in the folder that the environment's CREDENTIALS_DIRECTORY names.
ENG_CHECKED eng_status srv_config_load(srv_config *config, int argument_count, char *const *arguments,
                                       char *const *environment, srv_config_action *action, eng_error *error);
void srv_config_free(srv_config *config);
// Reads the sources of old again, arguments and environment as they were then. On failure as srv_config_load.
ENG_CHECKED eng_status srv_config_load_again(const srv_config *old, srv_config *fresh, eng_error *error);
// Options that cannot change in a running server keep old's value; kept gets their names, separated by commas.
ENG_CHECKED eng_status srv_config_keep(const srv_config *old, srv_config *fresh, char *kept, size_t size,
                                       eng_error *error);
bool srv_config_is_fixed(const char *name); // one of those; of a path only whether there is one
// The names in config->device, and one of them.
size_t srv_config_devices(const srv_config *config);
void srv_config_device(const srv_config *config, size_t index, char out[SRV_DEVICE_BYTES]);
void srv_config_help(FILE *out);
// The effective values as an INI file that srv_config_load reads back to the same configuration.
void srv_config_print(const srv_config *config, FILE *out);

#endif

// SPDX-License-Identifier: Apache-2.0
// Private to server/: the server, an exchange, and who owns which field.
//
// Everything here belongs to the loop thread unless a field says otherwise. An exchange is one HTTP request and its
// answer. It is made and ended by the HTTP files; a handler gives it a task (what goes on behind it) and sooner or
// later one reply or one stream. It is counted: the HTTP files hold it until the library is done with the request, and
// work on the pool holds it until it is back, so that a client who leaves never frees what a thread still uses.
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/buf.h"
#include "server/config.h"
#include "server/keys.h"
#include "server/log.h"
#include "server/loop.h"
#include "server/metrics.h"
#include "server/problem.h"
#include "server/request.h"
#include "server/response.h"
#include "server/store.h"
#include "server/worker.h"

typedef struct srv_server srv_server;
typedef struct srv_exchange srv_exchange;
typedef struct srv_http srv_http;
typedef struct srv_sessions srv_sessions; // session.h

// ---- routes.c ----

typedef struct srv_route {
    const char *method, *path;    // a path that ends in "/" takes any rest, "*" any part without one; none is empty
    bool takes_body, takes_bytes; // JSON; bytes as they are
    bool is_public;               // without a key
    bool admin;                   // on the address for administration too, which has nothing else
    void (*handle)(srv_exchange *exchange); // the body is whole; must give a reply, a stream or a task
} srv_route;

typedef struct srv_route_match {
    const srv_route *route; // NULL: refused with 404, or with 405 and the methods that there are in allow
    const char *rest;       // of the path, from where it is free; NULL: none
    bool is_public;         // the path may be asked without a key, with whatever method
    char allow[64];
} srv_route_match;

// HEAD counts as GET.
void srv_route_find(const char *method, const char *path, bool admin, srv_route_match *match, srv_problem *problem);

// ---- http_exchange.c: what handlers and tasks may do ----

typedef struct srv_task_ops {
    void (*cancel)(void *task);  // the client is gone: nobody will read more. At most once
    void (*abandon)(void *task); // the server ends: finish now, with an error if need be
    // Streams: up to room bytes. 0 and not *end: nothing yet, srv_exchange_wake will follow. -1: a fault, cut it off.
    ssize_t (*read)(void *task, char *out, size_t room, bool *end);
    void (*free)(void *task);
} srv_task_ops;

struct srv_exchange {
    // Set by the HTTP files, constant for handlers.
    srv_server *server;
    const srv_route *route; // NULL: refused by problem
    const char *method;
    char *rest;   // of the path; NULL: none
    srv_key *key; // whose request it is; NULL: there are no keys, or none is needed
    srv_buf body;

    // Set by handlers and tasks.
    const srv_task_ops *ops; // with task; NULL: none
    void *task;
    const char *log_id;                               // lives as long as the task; for the log
    const struct srv_model *model;                    // held; NULL: not known. By srv_exchange_use alone
    int64_t log_prompt_tokens, log_completion_tokens; // -1: none

    // The HTTP files' own.
    struct srv_connection *connection; // NULL once the library is done with the request
    unsigned references;
    uint64_t started_ms;
    size_t reserved; // of the memory for bodies
    size_t dropped;  // bytes of a refused body
    char allow[64];
    srv_problem problem; // found before the body was whole
    bool expects_body, dispatched, suspended, streaming, queued, cancelled;
    bool admitted; // counts in its key's requests
    struct srv_reply {
        int status;       // 0: none yet
        const char *type; // NULL: JSON
        char *body;
        size_t length;
        int retry_after;
        bool never_retry;
    } reply;
};

void srv_exchange_attach(srv_exchange *exchange, const srv_task_ops *ops, void *task);
// Whether an answer can still reach anyone. After false, only srv_exchange_release.
bool srv_exchange_open(const srv_exchange *exchange);
// One of these, once. json is emptied; if it failed, the answer is 429 for want of memory.
void srv_exchange_reply(srv_exchange *exchange, int status, srv_buf *json);
void srv_exchange_refuse(srv_exchange *exchange, const srv_problem *problem);
void srv_exchange_stream(srv_exchange *exchange);
// The same with another media type, a constant text.
void srv_exchange_reply_as(srv_exchange *exchange, const char *type, srv_buf *text);
// The stream's read has something.
void srv_exchange_wake(srv_exchange *exchange);
// The model that works for it, as long as it lives or until it uses another. NULL is accepted: nothing changes.
void srv_exchange_use(srv_exchange *exchange, const struct srv_model *model);
void srv_exchange_hold(srv_exchange *exchange);
void srv_exchange_release(srv_exchange *exchange);   // NULL is accepted
void srv_exchange_drop_body(srv_exchange *exchange); // as soon as it is parsed

// ---- http.c ----

// Binds the addresses and starts serving when the loop runs. *error names the address.
ENG_CHECKED eng_status srv_http_create(srv_server *server, srv_http **out, eng_error *error);
// The certificate that listeners with TLS present, with its key (http_tls.c). *error names the file.
typedef struct srv_tls srv_tls;
ENG_CHECKED eng_status srv_tls_load(const char *cert_path, const char *key_path, srv_tls **out, eng_error *error);
void srv_tls_free(srv_tls *tls); // NULL is accepted
// tls takes the place of the listeners' pair, which is kept to the end: handshakes may be under way with it.
void srv_http_replace_tls(srv_http *http, srv_tls *tls);
void srv_http_free(srv_http *http); // NULL is accepted; ends what is open
size_t srv_http_count(const srv_http *http);
const char *srv_http_address(const srv_http *http, size_t index); // "http://127.0.0.1:8080", "unix:/run/mesa.sock"
// Runs the listeners for which something happened outside of them. At the end of every callback of the loop.
void srv_http_flush(srv_http *http);
void srv_http_quiesce(srv_http *http); // no new connections; idle ones are closed, the others after their answer
size_t srv_http_connections(const srv_http *http);
size_t srv_http_body_bytes(const srv_http *http); // memory that is reserved for bodies
void srv_http_abandon(srv_http *http);            // asks every task to finish at once
void srv_http_close(srv_http *http);              // closes every connection

// ---- listen.c ----

// A listening, non-blocking socket for "HOST:PORT", "[IPV6]:PORT" or "unix:PATH". address gets its URL, with the real
// port. A stale unix socket is replaced only if nobody listens on it, and nothing but a socket is ever removed.
ENG_CHECKED eng_status srv_listen(const char *where, int64_t mode, int *descriptor, char *address, size_t size,
                                  eng_error *error);
// Whether only this machine reaches the address.
ENG_CHECKED eng_status srv_listen_local(const char *where, bool *local, eng_error *error);

// ---- setup.c: what the server runs with, and who holds what of it ----

// The name and device under which engines serve in turn. Counted.
typedef struct srv_slot {
    unsigned references; // of models
    char *name;          // as requests spell it
    char device[SRV_DEVICE_BYTES];
    size_t replica, replicas;            // number among its model's, one a device, and how many these are
    uint64_t requests[SRV_STATUS_SLOTS]; // that ended (metrics.c)
    uint64_t degraded;
} srv_slot;

// One engine and its worker. Counted: by setups, exchanges and sessions.
typedef struct srv_model {
    srv_slot *slot;
    char *folder;
    srv_worker *worker;
    uint64_t stamp; // of the folder, before it was read
    // Loop thread.
    struct srv_server *server;
    struct srv_model *next; // of all that are alive
    unsigned references;
    srv_worker_state seen; // the state that was acted upon
    int64_t loaded;        // Unix seconds
    bool retired;          // in no setup any more: nothing new is begun on it
    bool ending;
} srv_model;

// Constant while anybody but its maker holds it.
typedef struct srv_setup {
    unsigned references; // loop thread
    srv_config config;
    bool owns; // what config points to
    srv_bounds bounds;
    size_t model_count;
    srv_model *models[SRV_MAX_MODELS]; // those of one name next to each other
} srv_setup;

// One holder's: the caller's. It takes config's members, also what they point to if it owns them; no model is in it
// yet. NULL: no memory.
srv_setup *srv_setup_create(const srv_config *config, bool owns);
srv_setup *srv_setup_hold(srv_setup *setup);
void srv_setup_release(srv_setup *setup); // NULL is accepted
// How a model is opened while another serves.
typedef struct srv_model_again {
    uint64_t memory_limit; // eng_options
    const char *known;     // srv_worker_options; NULL: none
} srv_model_again;
// Starts the worker of the model of this number; again NULL: at the start.
ENG_CHECKED eng_status srv_setup_open(srv_server *server, srv_setup *setup, size_t index, const srv_model_again *again,
                                      eng_error *error);
void srv_setup_take(srv_setup *setup, size_t index, const srv_model *model); // of another setup
// Whether engines of one folder would be the same under both.
bool srv_setup_same_engines(const srv_config *a, const srv_config *b);

// The functions that only read may be called on any thread by who holds the setup.
const srv_model *srv_setup_at(const srv_setup *setup, const char *name, size_t replica); // NULL: none
// The model of this name (NULL: the first) if it is ready and the key may use it; NULL with a refusal.
const srv_model *srv_setup_model(const srv_setup *setup, const srv_key *key, const char *name, srv_problem *problem);
// The same model on the device with the fewest choices that run or wait.
const srv_model *srv_setup_least_used(const srv_setup *setup, const srv_model *model);
void srv_setup_view(const srv_setup *setup, size_t index, srv_model_view *view); // loop thread

const char *srv_model_fingerprint(const srv_model *model); // of its states; it is loaded. Any thread
srv_model *srv_model_hold(const srv_model *model);
void srv_model_release(const srv_model *model); // NULL is accepted
// Ends the retired ones that nobody holds and nothing runs on, and frees those that have ended.
void srv_models_reap(srv_server *server);
void srv_models_free(srv_server *server); // all; their workers have stopped

// ---- reload.c ----

// What a start would find wrong with the files of keys and certificates.
ENG_CHECKED eng_status srv_check_files(const srv_config *config, eng_error *error);

typedef struct srv_reload srv_reload;
// Reads configuration, keys, certificates and checkpoints again, or once more when that is done.
void srv_reload_begin(srv_server *server);
void srv_reload_go_on(srv_server *server);                              // something has happened to a model
bool srv_reload_owns(const srv_server *server, const srv_model *model); // it is being opened
void srv_reload_free(srv_server *server);                               // gives up what is under way

// ---- server.c ----

// FAILING: a device is lost; no new requests, those on other devices finish, health can still be asked.
typedef enum srv_phase { SRV_LOADING, SRV_SERVING, SRV_FAILING, SRV_DRAINING, SRV_ENDING } srv_phase;

struct srv_server {
    srv_log *log;
    // Loop thread.
    srv_setup *setup;         // the present one
    const srv_config *config; // its
    srv_model *alive;         // all models, of whatever setup
    srv_reload *reloading;    // NULL: none is under way
    bool reload_again;        // once that is done, or the start
    bool moving;              // sessions go over to other engines (session_move.c)
    srv_keys *keys;           // NULL: none are needed
    srv_metrics metrics;
    srv_loop *loop;
    srv_http *http;
    srv_sessions *sessions;
    srv_store *store; // NULL: sessions live in memory
    srv_phase phase;
    int exit_status;
    bool announced;  // READY was said
    int64_t started; // Unix seconds
    uint64_t drain_until_ms;
    uint64_t park_until_ms; // 0: parking has not begun
    srv_timer *drain_timer, *notify_timer, *store_timer;
    // Any thread may send them.
    srv_wake *events, *stop, *reload;
};

// Binds the addresses; ENG_IO: cannot listen. config, what it was read from, and log outlive the server.
ENG_CHECKED eng_status srv_server_create(const srv_config *config, srv_log *log, srv_server **out, eng_error *error);
// The first of SIGTERM and SIGINT drains, the second ends the process with status 1; SIGHUP reloads.
ENG_CHECKED eng_status srv_server_handle_signals(srv_server *server);
// Loads the models and serves until it is drained. Returns the exit status (config.c's help lists them). Models that
// are still loading are left to it: srv_server_free waits for them.
int srv_server_run(srv_server *server);
bool srv_server_loading(const srv_server *server);                      // after run: a model's load is still in flight
void srv_server_stop(srv_server *server);                               // drain; any thread, until srv_server_free
void srv_server_reload(srv_server *server);                             // as SIGHUP; any thread, as srv_server_stop
void srv_server_free(srv_server *server);                               // NULL is accepted
const char *srv_server_address(const srv_server *server, size_t index); // NULL: none
// Whether no new completion is taken any more, and why.
bool srv_server_refuses(const srv_server *server, srv_problem *problem);

// ---- session.c ----

void srv_sessions_free(srv_sessions *sessions); // NULL is accepted; after the workers have stopped
// Parks those that the store has and nobody uses, some at a time; true: none is left.
bool srv_sessions_park(srv_server *server);
// Those of retired models that nobody uses go over to the present ones, some at a time (session_move.c).
void srv_sessions_move(srv_server *server);

// ---- handlers ----

void srv_handle_page(srv_exchange *exchange);                     // page.c
void srv_handle_openapi(srv_exchange *exchange);                  // openapi.c
void srv_handle_metrics(srv_exchange *exchange);                  // metrics.c
void srv_handle_health(srv_exchange *exchange);                   // models_api.c
void srv_handle_ready(srv_exchange *exchange);                    // models_api.c
void srv_handle_models(srv_exchange *exchange);                   // models_api.c
void srv_handle_model(srv_exchange *exchange);                    // models_api.c
void srv_handle_tokenizer_info(srv_exchange *exchange);           // models_api.c
void srv_handle_tokenize(srv_exchange *exchange);                 // tokenize.c
void srv_handle_detokenize(srv_exchange *exchange);               // tokenize.c
void srv_handle_session_create(srv_exchange *exchange);           // completions.c
void srv_handle_session_list(srv_exchange *exchange);             // session_list.c
void srv_handle_session_get(srv_exchange *exchange);              // session_api.c
void srv_handle_session_delete(srv_exchange *exchange);           // session_api.c
void srv_handle_session_fork(srv_exchange *exchange);             // completions.c
void srv_handle_session_rollback(srv_exchange *exchange);         // session_api.c
void srv_handle_session_export(srv_exchange *exchange);           // session_api.c
void srv_handle_session_import(srv_exchange *exchange);           // session_api.c
void srv_handle_chat(srv_exchange *exchange);                     // completions.c
void srv_handle_completions(srv_exchange *exchange);              // completions.c
void srv_completions_event(srv_worker *worker, srv_event *event); // completions.c; takes event

#endif

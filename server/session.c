// SPDX-License-Identifier: Apache-2.0
// The table of sessions, their time, and how one is brought back to what its client has got.
//
// A list that is walked once a second, and chains by name. It holds what fits the engines' budgets. At the end,
// sessions that the store has are parked: their states are written, so that whoever goes on with them need not read
// again. Where other servers share the store that is done as soon as one is made, and when it has been idle for most of
// a lease's time, for while it is here no other may have it.
#include "server/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

enum { RANDOM_BYTES = 16, PARK_AT_ONCE = 8, CHAINS = 1 << 12 };
static const char prefix[] = "sess-";

struct srv_sessions {
    srv_server *server;
    srv_session *first;
    srv_session *chain[CHAINS];
    size_t count, parking;
    srv_timer *sweep;
};

// What is asked of a session's engine without anyone waiting.
typedef enum quiet_action { CUT, DROP, TOUCH, PARK } quiet_action;
typedef struct quiet_call {
    srv_call call;
    quiet_action action;
    srv_server *server;
    srv_session *session; // of CUT and PARK
    uint64_t owner, timeline;
    int64_t position;
    bool stored, done;
    eng_errand errand;  // to the store, if it has the session
    srv_loop_fn parked; // NULL: nobody waits
    void *context;
} quiet_call;

uint64_t srv_session_owner(const srv_exchange *exchange) {
    return exchange->key ? exchange->key->id : 0;
}

srv_session *srv_session_first(const srv_server *server) {
    return server->sessions ? server->sessions->first : NULL;
}

// ---- names ---------------------------------------------------------------------------------------------------------

const unsigned char *srv_session_owner_name(const srv_exchange *exchange) {
    static const unsigned char nobody[ENG_NAME_BYTES] = "without keys";
    _Static_assert((int)ENG_NAME_BYTES == (int)SRV_DIGEST_BYTES, "an owner is a key's digest");

    return exchange->key ? exchange->key->digest : nobody;
}

static void set_owner(const srv_exchange *exchange, eng_name *name) {
    memcpy(name->owner, srv_session_owner_name(exchange), sizeof name->owner);
}

static int digit_of(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool srv_session_name(const srv_exchange *exchange, const char *id, size_t length, eng_name *out) {
    const size_t before = sizeof prefix - 1;

    *out = (eng_name){0};
    set_owner(exchange, out);
    if (length != before + 2 * RANDOM_BYTES || memcmp(id, prefix, before) != 0)
        return false;
    for (size_t i = 0; i < RANDOM_BYTES; i++) {
        const int high = digit_of(id[before + 2 * i]), low = digit_of(id[before + 2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        out->id[i] = (unsigned char)(high << 4 | low);
    }
    return true;
}

void srv_session_print_name(const eng_name *name, char id[SRV_SESSION_ID_BYTES]) {
    size_t length = sizeof prefix - 1;

    memcpy(id, prefix, sizeof prefix);
    for (size_t i = 0; i < RANDOM_BYTES; i++, length += 2)
        snprintf(id + length, SRV_SESSION_ID_BYTES - length, "%02x", name->id[i]);
}

// ---- whose, and for how long ---------------------------------------------------------------------------------------

// Names are random.
static srv_session **chain_of(srv_sessions *sessions, const eng_name *name) {
    return &sessions->chain[(name->id[0] | name->id[1] << 8) % CHAINS];
}

static srv_session *find_row(const srv_exchange *exchange, const char *id, size_t length) {
    srv_sessions *sessions = exchange->server->sessions;
    eng_name name;

    if (!sessions || !srv_session_name(exchange, id, length, &name))
        return NULL;
    srv_session *at = *chain_of(sessions, &name);
    while (at && (at->owner != srv_session_owner(exchange) || memcmp(at->name.id, name.id, sizeof name.id) != 0))
        at = at->chain;
    return at;
}

static bool is_over(const srv_server *server, const srv_session *session) {
    return !session->busy && session->expires_ms <= srv_loop_now(server->loop);
}

srv_session *srv_session_known(const srv_exchange *exchange, const char *id, size_t length) {
    srv_session *session = find_row(exchange, id, length);

    return session && !is_over(exchange->server, session) ? session : NULL;
}

bool srv_session_is_here(const srv_session *session, const srv_model *prepared) {
    return session->timeline && (!session->model->retired || session->model == prepared);
}

void srv_session_use(srv_session *session, const srv_model *model) {
    const srv_model *before = session->model;

    session->model = model ? srv_model_hold(model) : NULL;
    srv_model_release(before);
}

bool srv_session_take(srv_session *session, srv_problem *problem) {
    if (session->busy)
        srv_refuse_engine(problem, ENG_BUSY, "another request is on the session");
    else
        session->busy = true;
    return !problem->status;
}

void srv_session_let_go(srv_server *server, srv_session *session) {
    session->busy = false;
    session->expires_ms = srv_loop_now(server->loop) + (uint64_t)session->ttl_s * 1000;
}

int64_t srv_session_expires_at(const srv_server *server, const srv_session *session) {
    const uint64_t now = srv_loop_now(server->loop);
    const uint64_t left = session->busy               ? (uint64_t)session->ttl_s * 1000
                          : session->expires_ms > now ? session->expires_ms - now
                                                      : 0;
    return (int64_t)time(NULL) + (int64_t)(left / 1000);
}

// ---- calls that nobody waits for -----------------------------------------------------------------------------------

// What fails is seen in the store's figures.
static void end_errand(void *user, const eng_answer *answer) {
    quiet_call *quiet = user;

    quiet->done = answer->status == ENG_OK || answer->status == ENG_NOT_FOUND;
    srv_call_end(&quiet->call);
}

static void send_quietly(quiet_call *quiet, eng_engine *engine) {
    quiet->errand.timeline = quiet->timeline;
    quiet->errand.done = end_errand;
    quiet->errand.user = quiet;
    if (eng_send(engine, &quiet->errand, NULL) == ENG_OK)
        srv_call_wait(&quiet->call);
}

// What was cut is written to the store at once: a kill must not bring it back.
static void cut_quietly(quiet_call *quiet, eng_engine *engine) {
    eng_timeline_info info;

    if (eng_timeline_read(engine, quiet->owner, quiet->timeline, &info, NULL) != ENG_OK)
        return;
    const bool beyond = info.position > quiet->position;
    if (beyond && eng_timeline_rollback(engine, quiet->owner, quiet->timeline, quiet->position, NULL) != ENG_OK)
        return;
    if (!beyond)
        quiet->position = info.position;
    else if (quiet->stored)
        send_quietly(quiet, engine);
}

// One that has left the engine may be another server's by now: the store ends it in its time.
static void drop_quietly(quiet_call *quiet, eng_engine *engine) {
    eng_timeline_info info;
    const eng_status here = eng_timeline_read(engine, quiet->owner, quiet->timeline, &info, NULL);

    if (here == ENG_OK && info.named)
        send_quietly(quiet, engine);
    else if (here == ENG_OK && eng_timeline_drop(engine, quiet->owner, quiet->timeline, NULL) != ENG_OK)
        return; // a request is on it, and nobody's: it stays
}

static void run_quietly(srv_call *call, eng_engine *engine) {
    quiet_call *quiet = (quiet_call *)call;

    if (!engine)
        return;
    if (quiet->action == CUT)
        cut_quietly(quiet, engine);
    else if (quiet->action == DROP)
        drop_quietly(quiet, engine);
    else
        send_quietly(quiet, engine);
}

static void end_quietly(srv_call *call) {
    quiet_call *quiet = (quiet_call *)call;

    if (quiet->action == CUT) {
        quiet->session->position = quiet->position;
        srv_session_let_go(quiet->server, quiet->session);
    } else if (quiet->action == PARK) {
        quiet->server->sessions->parking--;
        if (quiet->done || quiet->server->phase >= SRV_DRAINING)
            srv_session_remove(quiet->server, quiet->session);
        else
            quiet->session->busy = false; // it is tried again
        if (quiet->parked)
            quiet->parked(quiet->context);
    }
    free(quiet);
}

static bool call_quietly(srv_server *server, const srv_session *session, const quiet_call *what) {
    static const eng_errand_kind kinds[] = {
        [CUT] = ENG_ERRAND_KEEP, [DROP] = ENG_ERRAND_DROP, [TOUCH] = ENG_ERRAND_TOUCH, [PARK] = ENG_ERRAND_PARK};
    quiet_call *quiet = malloc(sizeof *quiet);

    if (!quiet)
        return false;
    *quiet = *what;
    quiet->call = (srv_call){.run = run_quietly, .done = end_quietly};
    quiet->server = server;
    quiet->owner = session->owner;
    quiet->timeline = session->timeline;
    quiet->stored = session->stored;
    if (session->stored)
        srv_session_errand(session, kinds[what->action], &quiet->errand);
    srv_worker_call(session->model->worker, &quiet->call);
    return true;
}

// Without memory for the call the session stays taken: what it stands at is not known.
void srv_session_settle(srv_server *server, srv_session *session, int64_t position) {
    (void)call_quietly(server, session, &(quiet_call){.action = CUT, .session = session, .position = position});
}

void srv_session_touch(srv_server *server, const srv_session *session) {
    if (session->stored)
        (void)call_quietly(server, session, &(quiet_call){.action = TOUCH});
}

// Without memory for the call it is dropped in its time.
void srv_session_drop(srv_server *server, srv_session *session) {
    if (call_quietly(server, session, &(quiet_call){.action = DROP}))
        srv_session_remove(server, session);
    else
        srv_session_let_go(server, session);
}

void srv_session_write(const srv_server *server, const srv_session *session, const eng_timeline_info *info,
                       const unsigned char *digest, srv_buf *out) {
    const srv_model *model = session->model; // NULL: its state went with its engine a moment ago

    srv_write_session(
        out, &(srv_session_view){.id = session->id,
                                 .model = model ? model->slot->name : session->foreign->model,
                                 .position = info ? info->position : session->position,
                                 .state_bytes = model ? eng_info(srv_worker_engine(model->worker))->state_bytes : 0,
                                 .expires_at = srv_session_expires_at(server, session),
                                 .info = info,
                                 .digest = digest});
}

// ---- the table -----------------------------------------------------------------------------------------------------

static void park(srv_sessions *sessions, srv_session *session) {
    session->busy = call_quietly(sessions->server, session, &(quiet_call){.action = PARK, .session = session});
    sessions->parking += session->busy;
}

static bool may_park(const srv_sessions *sessions, const srv_session *session) {
    return session->stored && session->timeline && !session->busy && sessions->parking < PARK_AT_ONCE;
}

static uint64_t idle_ms(const srv_session *session, uint64_t now) {
    const uint64_t since = session->expires_ms - (uint64_t)session->ttl_s * 1000;
    return now > since ? now - since : 0;
}

bool srv_session_park(srv_server *server, srv_session *session, srv_loop_fn parked, void *context) {
    const quiet_call quiet = {.action = PARK, .session = session, .parked = parked, .context = context};

    if (!call_quietly(server, session, &quiet))
        return false;
    server->sessions->parking++;
    return true;
}

static void on_sweep(void *context) {
    srv_sessions *sessions = context;
    const srv_server *server = sessions->server;
    const bool shares = server->store && srv_store_is_shared(server->store) && !srv_store_failing(server->store);
    const uint64_t patience = (uint64_t)server->config->store_lease_ms * 2 / 3;

    for (srv_session *at = sessions->first, *next; at; at = next) {
        next = at->next;
        if (at->calls > 0 || at->busy)
            continue;
        if (is_over(server, at) && at->timeline)
            srv_session_drop(sessions->server, at);
        else if (is_over(server, at))
            srv_session_remove(sessions->server, at);
        else if (shares && idle_ms(at, srv_loop_now(server->loop)) >= patience && may_park(sessions, at))
            park(sessions, at);
    }
    srv_sessions_move(sessions->server);
}

static srv_sessions *sessions_of(srv_server *server) {
    if (server->sessions)
        return server->sessions;
    srv_sessions *sessions = calloc(1, sizeof *sessions);
    if (!sessions)
        return NULL;
    sessions->server = server;
    if (srv_timer_create(server->loop, on_sweep, sessions, &sessions->sweep)) {
        free(sessions);
        return NULL;
    }
    srv_timer_start(sessions->sweep, SRV_SESSION_SWEEP_MS, SRV_SESSION_SWEEP_MS);
    return server->sessions = sessions;
}

// A row of this name, taken; NULL with a refusal.
static srv_session *add_row(srv_exchange *exchange, const eng_name *name, const srv_model *model,
                            srv_problem *problem) {
    srv_sessions *sessions = sessions_of(exchange->server);
    srv_session *session = sessions ? calloc(1, sizeof *session) : NULL;

    if (sessions && sessions->count == SRV_MAX_SESSIONS)
        srv_refuse(problem, 429, "sessions_full", NULL, "there are %d sessions, as many as may be", SRV_MAX_SESSIONS);
    else if (!session)
        srv_refuse_engine(problem, ENG_NO_MEMORY, NULL);
    if (problem->status) {
        free(session);
        return NULL;
    }
    srv_session_print_name(name, session->id);
    session->owner = srv_session_owner(exchange);
    session->name = *name;
    srv_session_use(session, model);
    session->ttl_s = SRV_SESSION_TTL_S;
    session->stored = exchange->server->store;
    session->busy = true;
    session->next = sessions->first;
    if (session->next)
        session->next->previous = session;
    sessions->first = session;
    session->chain = *chain_of(sessions, name);
    *chain_of(sessions, name) = session;
    sessions->count++;
    return session;
}

srv_session *srv_session_add(srv_exchange *exchange, const srv_model *model, int64_t ttl_s, srv_problem *problem) {
    eng_name name = {0};

    set_owner(exchange, &name);
    if (getrandom(name.id, RANDOM_BYTES, 0) != (ssize_t)RANDOM_BYTES) {
        srv_refuse_engine(problem, ENG_NO_MEMORY, NULL);
        return NULL;
    }
    srv_session *session = add_row(exchange, &name, model, problem);
    if (session && ttl_s)
        session->ttl_s = ttl_s;
    return session;
}

// The first that the key may use.
static const srv_model *first_model(const srv_exchange *exchange) {
    const srv_setup *setup = exchange->server->setup;

    for (size_t i = 0; i < setup->model_count; i++)
        if (srv_key_may_use(exchange->key, setup->models[i]->slot->name) &&
            srv_worker_read_state(setup->models[i]->worker) == SRV_WORKER_READY)
            return srv_setup_least_used(setup, setup->models[i]);
    return NULL;
}

srv_session *srv_session_find(srv_exchange *exchange, const char *id, size_t length, const srv_model *model,
                              srv_problem *problem) {
    srv_session *session = find_row(exchange, id, length);
    eng_name name;

    if (session && session->foreign) {
        if (!srv_session_refuse_foreign(exchange->server, session->foreign, problem))
            srv_session_refuse(problem, ENG_NOT_FOUND, NULL, 0);
        return NULL;
    }
    if (session && !is_over(exchange->server, session))
        return session;
    if (!model)
        model = first_model(exchange);
    if (session || !exchange->server->store || !model || !srv_session_name(exchange, id, length, &name)) {
        srv_session_refuse(problem, ENG_NOT_FOUND, NULL, 0);
        return NULL;
    }
    session = add_row(exchange, &name, model, problem);
    if (session) {
        session->busy = false; // it is taken next
        session->known = true; // if it is in the store: lists show it while it comes from there
    }
    return session;
}

static void free_session(srv_session *session) {
    srv_session_use(session, NULL);
    free(session->foreign);
    free(session);
}

void srv_session_release(srv_session *session) {
    if (--session->calls == 0 && session->gone)
        free_session(session);
}

void srv_session_remove(srv_server *server, srv_session *session) {
    srv_sessions *sessions = server->sessions;
    srv_session **place = chain_of(sessions, &session->name);

    while (*place != session)
        place = &(*place)->chain;
    *place = session->chain;
    if (session->previous)
        session->previous->next = session->next;
    else
        sessions->first = session->next;
    if (session->next)
        session->next->previous = session->previous;
    sessions->count--;
    session->gone = true;
    session->calls++;
    srv_session_release(session);
}

bool srv_sessions_park(srv_server *server) {
    srv_sessions *sessions = server->sessions;
    bool left = false;

    for (srv_session *at = srv_session_first(server); at; at = at->next)
        if (may_park(sessions, at)) {
            park(sessions, at);
            left = true;
        }
    return !left && (!sessions || sessions->parking == 0);
}

void srv_sessions_free(srv_sessions *sessions) {
    if (!sessions)
        return;
    for (srv_session *at = sessions->first, *next; at; at = next) {
        next = at->next;
        free_session(at);
    }
    srv_timer_close(sessions->sweep);
    free(sessions);
}

// SPDX-License-Identifier: Apache-2.0
// The table of sessions, their time, and how one is brought back to what its client has got.
//
// A list: it is walked once a request and once a second, and holds what fits the engines' budgets.
#include "server/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

struct srv_sessions {
    srv_server *server;
    srv_session *first;
    size_t count;
    srv_timer *sweep;
};

// What is asked of a session's engine without anyone waiting: to cut it, or to drop it.
typedef struct quiet_call {
    srv_call call;
    srv_server *server;
    srv_session *session; // NULL: drop
    uint64_t owner, timeline;
    int64_t position;
} quiet_call;

uint64_t srv_session_owner(const srv_exchange *exchange) {
    return exchange->key ? exchange->key->id : 0;
}

srv_session *srv_session_first(const srv_server *server) {
    return server->sessions ? server->sessions->first : NULL;
}

srv_session *srv_session_find(const srv_exchange *exchange, const char *id, size_t length, srv_problem *problem) {
    const uint64_t now = srv_loop_now(exchange->server->loop);

    for (srv_session *at = srv_session_first(exchange->server); at; at = at->next)
        if (at->owner == srv_session_owner(exchange) && strlen(at->id) == length && memcmp(at->id, id, length) == 0 &&
            (at->busy || at->expires_ms > now))
            return at;
    srv_refuse(problem, 404, "session_not_found", "session", "there is no such session");
    return NULL;
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

static void run_quietly(srv_call *call, eng_engine *engine) {
    quiet_call *quiet = (quiet_call *)call;
    eng_timeline_info info;
    eng_status status = engine ? ENG_OK : ENG_DEVICE;

    if (!status && !quiet->session)
        status = eng_timeline_drop(engine, quiet->owner, quiet->timeline, NULL);
    else if (!status)
        status = eng_timeline_read(engine, quiet->owner, quiet->timeline, &info, NULL);
    if (!status && quiet->session && info.position > quiet->position)
        status = eng_timeline_rollback(engine, quiet->owner, quiet->timeline, quiet->position, NULL);
    else if (!status && quiet->session)
        quiet->position = info.position;
}

static void end_quietly(srv_call *call) {
    quiet_call *quiet = (quiet_call *)call;

    if (quiet->session) {
        quiet->session->position = quiet->position;
        srv_session_let_go(quiet->server, quiet->session);
    }
    free(quiet);
}

static bool call_quietly(srv_server *server, const srv_session *session, const quiet_call *what) {
    quiet_call *quiet = malloc(sizeof *quiet);

    if (!quiet)
        return false;
    *quiet = *what;
    quiet->call = (srv_call){.run = run_quietly, .done = end_quietly};
    quiet->server = server;
    quiet->owner = session->owner;
    quiet->timeline = session->timeline;
    srv_worker_call(session->model->worker, &quiet->call);
    return true;
}

// Without memory for the call the session stays taken: what it stands at is not known.
void srv_session_settle(srv_server *server, srv_session *session, int64_t position) {
    (void)call_quietly(server, session, &(quiet_call){.session = session, .position = position});
}

// Without memory for the call it is dropped in its time.
void srv_session_drop(srv_server *server, srv_session *session) {
    if (call_quietly(server, session, &(quiet_call){0}))
        srv_session_remove(server, session);
    else
        srv_session_let_go(server, session);
}

void srv_session_write(const srv_server *server, const srv_session *session, const eng_timeline_info *info,
                       srv_buf *out) {
    srv_write_session(
        out, &(srv_session_view){.id = session->id,
                                 .model = session->model->path->name,
                                 .position = info ? info->position : session->position,
                                 .state_bytes = eng_info(srv_worker_engine(session->model->worker))->state_bytes,
                                 .expires_at = srv_session_expires_at(server, session),
                                 .info = info});
}

// ---- the table -----------------------------------------------------------------------------------------------------

static void on_sweep(void *context) {
    srv_sessions *sessions = context;
    const uint64_t now = srv_loop_now(sessions->server->loop);

    for (srv_session *at = sessions->first, *next; at; at = next) {
        next = at->next;
        if (!at->busy && at->calls == 0 && at->expires_ms <= now &&
            call_quietly(sessions->server, at, &(quiet_call){0}))
            srv_session_remove(sessions->server, at);
    }
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

srv_session *srv_session_add(srv_exchange *exchange, const srv_model *model, int64_t ttl_s, srv_problem *problem) {
    srv_sessions *sessions = sessions_of(exchange->server);
    srv_session *session = sessions ? calloc(1, sizeof *session) : NULL;
    uint64_t random[2];

    if (sessions && sessions->count == SRV_MAX_SESSIONS)
        srv_refuse(problem, 429, "sessions_full", NULL, "there are %d sessions, as many as may be", SRV_MAX_SESSIONS);
    else if (!session || getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        srv_refuse_engine(problem, ENG_NO_MEMORY, NULL);
    if (problem->status) {
        free(session);
        return NULL;
    }
    snprintf(session->id, sizeof session->id, "sess-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    session->owner = srv_session_owner(exchange);
    session->model = model;
    session->ttl_s = ttl_s ? ttl_s : SRV_SESSION_TTL_S;
    session->busy = true;
    session->next = sessions->first;
    sessions->first = session;
    sessions->count++;
    return session;
}

void srv_session_remove(srv_server *server, srv_session *session) {
    srv_session **place = &server->sessions->first;

    while (*place != session)
        place = &(*place)->next;
    *place = session->next;
    server->sessions->count--;
    free(session);
}

void srv_sessions_free(srv_sessions *sessions) {
    if (!sessions)
        return;
    for (srv_session *at = sessions->first, *next; at; at = next) {
        next = at->next;
        free(at);
    }
    srv_timer_close(sessions->sweep);
    free(sessions);
}

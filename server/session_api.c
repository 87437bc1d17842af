// SPDX-License-Identifier: Apache-2.0
// /v1/sessions: list, look at, drop, roll back, take out as bytes and bring in; session_make.c makes and forks.
//
// Each is one call to the session's engine. The call is its own memory and outlives a client that leaves: what was
// begun is finished, and nobody is told. Bodies are small and parsed here. Loop thread, but for the calls' run.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/session.h"

typedef enum action { LOOK, DROP, ROLLBACK, EXPORT, IMPORT } action;

typedef struct session_call {
    srv_call call;
    action action;
    srv_server *server;
    srv_exchange *exchange; // NULL: the client has left
    srv_session *session;   // taken, but for LOOK and EXPORT
    uint64_t owner, timeline;
    int64_t position; // of a rollback
    char *bytes;      // in and out
    size_t count;
    eng_timeline_info info;
    eng_status status;
    eng_error error;
} session_call;

// What changes a session has it to itself meanwhile.
static bool takes(action action) {
    return action != LOOK && action != EXPORT;
}

// ---- engine thread -------------------------------------------------------------------------------------------------

static eng_status act(session_call *call, eng_engine *engine) {
    void *bytes = NULL;

    switch (call->action) {
    case LOOK:
        return ENG_OK;
    case DROP:
        return eng_timeline_drop(engine, call->owner, call->timeline, &call->error);
    case ROLLBACK:
        return eng_timeline_rollback(engine, call->owner, call->timeline, call->position, &call->error);
    case EXPORT: {
        const eng_status status =
            eng_timeline_export(engine, call->owner, call->timeline, &bytes, &call->count, &call->error);
        call->bytes = bytes;
        return status;
    }
    case IMPORT:
        return eng_timeline_import(engine, call->owner, call->timeline, call->bytes, call->count, &call->error);
    }
    return ENG_INTERNAL;
}

static void run(srv_call *base, eng_engine *engine) {
    session_call *call = (session_call *)base;

    call->status = engine ? act(call, engine) : ENG_DEVICE;
    if (call->status || call->action == DROP)
        return;
    call->status = eng_timeline_read(engine, call->owner, call->timeline, &call->info, &call->error);
}

// ---- answers -------------------------------------------------------------------------------------------------------

// An import is of other bytes than this model's: that is the client's choice of session, not the server's fault.
static void refuse(session_call *call, srv_problem *problem) {
    if (call->action == IMPORT && call->status == ENG_FORMAT)
        srv_refuse(problem, 400, "invalid_state", NULL, "%s", call->error.text);
    else if (call->action == IMPORT && call->status == ENG_UNSUPPORTED) {
        srv_refuse(problem, 409, "foreign_state", NULL, "%s", call->error.text);
        problem->never_retry = true;
    } else if (call->status == ENG_FULL)
        srv_refuse(problem, 429, "sessions_full", NULL, "%s", call->error.text);
    else
        srv_refuse_engine(problem, call->status, call->error.text);
}

static void answer(session_call *call) {
    srv_exchange *exchange = call->exchange;
    srv_problem problem = {0};
    srv_buf out;

    srv_buf_init(&out, call->count + SRV_MAX_ANSWER_BYTES);
    refuse(call, &problem);
    if (problem.status) {
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    if (call->action == EXPORT) {
        srv_buf_append(&out, call->bytes, call->count);
        srv_exchange_reply_as(exchange, "application/octet-stream", &out);
        return;
    }
    if (call->action != DROP)
        srv_session_write(call->server, call->session, &call->info, &out);
    srv_exchange_reply(exchange, call->action == DROP ? 204 : 200, &out);
}

static void settle_table(session_call *call) {
    const bool done = call->status == ENG_OK;

    if ((call->action == IMPORT || call->action == ROLLBACK) && done) {
        call->session->position = call->info.position;
        call->session->profile_changed = call->info.profile_changed;
    }
    if (takes(call->action))
        srv_session_let_go(call->server, call->session);
}

static void finish(srv_call *base) {
    session_call *call = (session_call *)base;

    settle_table(call);
    call->session->calls--;
    if (call->exchange) {
        call->exchange->task = NULL;
        answer(call);
    }
    if (call->action == DROP && call->status == ENG_OK)
        srv_session_remove(call->server, call->session);
    eng_free(call->bytes);
    free(call);
}

// ---- the task ------------------------------------------------------------------------------------------------------

static void leave(void *context) {
    session_call *call = context;

    if (call)
        call->exchange = NULL;
}

static void abandon(void *context) {
    session_call *call = context;
    srv_problem problem = {0};

    if (!call || !call->exchange)
        return;
    srv_exchange *exchange = call->exchange;
    call->exchange = NULL;
    exchange->task = NULL;
    srv_refuse(&problem, 503, "draining", NULL, "the server is shutting down");
    srv_exchange_refuse(exchange, &problem);
}

// The call takes the bytes, if any, also on failure.
static void ask(srv_exchange *exchange, const session_call *what, const srv_model *model) {
    static const srv_task_ops ops = {.cancel = leave, .abandon = abandon, .free = leave};
    session_call *call = malloc(sizeof *call);
    srv_problem problem = {0};

    exchange->model = model;
    if (!call) {
        if (takes(what->action))
            srv_session_let_go(exchange->server, what->session);
        free(what->bytes);
        srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    *call = *what;
    call->call = (srv_call){.run = run, .done = finish};
    call->server = exchange->server;
    call->exchange = exchange;
    call->owner = srv_session_owner(exchange);
    call->timeline = what->session->timeline;
    call->session->calls++;
    srv_exchange_attach(exchange, &ops, call);
    srv_worker_call(model->worker, &call->call);
}

// ---- handlers ------------------------------------------------------------------------------------------------------

// Whether sessions can be used now at all, and the body parsed here.
static bool may_begin(const srv_exchange *exchange, srv_problem *problem) {
    if (srv_server_refuses(exchange->server, problem))
        return false;
    if (exchange->route->takes_body && exchange->body.length > SRV_SESSION_BODY_BYTES)
        srv_refuse(problem, 413, "body_too_large", NULL, "the body is larger than %d bytes", SRV_SESSION_BODY_BYTES);
    return !problem->status;
}

// The session that the path names.
static srv_session *find(const srv_exchange *exchange, srv_problem *problem) {
    return may_begin(exchange, problem)
               ? srv_session_find(exchange, exchange->rest, strcspn(exchange->rest, "/"), problem)
               : NULL;
}

static void finish_early(srv_exchange *exchange, const srv_problem *problem) {
    if (problem->status)
        srv_exchange_refuse(exchange, problem);
}

void srv_handle_session_list(srv_exchange *exchange) {
    const uint64_t now = srv_loop_now(exchange->server->loop);
    const char *separator = "";
    srv_buf out;

    srv_buf_init(&out, SRV_MAX_ANSWER_BYTES);
    srv_buf_puts(&out, "{\"object\":\"list\",\"data\":[");
    for (const srv_session *at = srv_session_first(exchange->server); at; at = at->next) {
        if (at->owner != srv_session_owner(exchange) || (!at->busy && at->expires_ms <= now) || !at->known)
            continue;
        srv_buf_puts(&out, separator);
        srv_session_write(exchange->server, at, NULL, &out);
        separator = ",";
    }
    srv_buf_puts(&out, "]}");
    srv_exchange_reply(exchange, 200, &out);
}

static void look(srv_exchange *exchange, action action) {
    srv_problem problem = {0};
    srv_session *session = find(exchange, &problem);

    if (session)
        ask(exchange, &(session_call){.action = action, .session = session}, session->model);
    finish_early(exchange, &problem);
}

void srv_handle_session_get(srv_exchange *exchange) {
    look(exchange, LOOK);
}

void srv_handle_session_export(srv_exchange *exchange) {
    look(exchange, EXPORT);
}

void srv_handle_session_delete(srv_exchange *exchange) {
    srv_problem problem = {0};
    srv_session *session = find(exchange, &problem);

    if (session && srv_session_take(session, &problem))
        ask(exchange, &(session_call){.action = DROP, .session = session}, session->model);
    finish_early(exchange, &problem);
}

void srv_handle_session_rollback(srv_exchange *exchange) {
    srv_problem problem = {0};
    srv_request request = {0};
    srv_session *session = find(exchange, &problem);

    if (session &&
        !srv_session_parse(SRV_REQUEST_ROLLBACK, exchange->body.data, exchange->body.length, &exchange->server->bounds,
                           &request, &problem) &&
        srv_session_take(session, &problem))
        ask(exchange, &(session_call){.action = ROLLBACK, .session = session, .position = request.session_position},
            session->model);
    srv_request_free(&request);
    finish_early(exchange, &problem);
}

void srv_handle_session_import(srv_exchange *exchange) {
    srv_problem problem = {0};
    srv_session *session = find(exchange, &problem);

    if (session && srv_session_take(session, &problem)) {
        size_t count = 0;
        char *bytes = srv_buf_take(&exchange->body, &count);
        ask(exchange, &(session_call){.action = IMPORT, .session = session, .bytes = bytes, .count = count},
            session->model);
    }
    finish_early(exchange, &problem);
}

// SPDX-License-Identifier: Apache-2.0
// /v1/sessions/{id}: look at it, drop it, roll it back, take it out as bytes and bring it in; session_make.c makes and
// forks, session_list.c lists.
//
// Each is one call to the session's engine, after one that brings it from the store if it is there alone. The call is
// its own memory and outlives a client that leaves: what was begun is finished, and nobody is told. Bodies are small
// and parsed here. Loop thread, but for the calls' run.
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
    srv_session *session;   // NULL: of LOOK and DROP, one that may be in the store
    bool taken;
    eng_name name;   // of one that is not in the table
    unsigned sought; // so often it was looked for in the store
    uint64_t owner, timeline;
    int64_t position; // of a rollback
    char *bytes;      // in and out
    size_t count;
    bool stored;
    eng_errand errand; // to the store, if there is one
    eng_timeline_info info;
    unsigned char digest[ENG_TIMELINE_DIGEST_BYTES];
    bool has_info, has_digest;
    eng_record in_store; // of one that is not here
    eng_status status;
    eng_error error;
} session_call;

// ---- engine thread -------------------------------------------------------------------------------------------------

static void answered(void *user, const eng_answer *answer) {
    session_call *call = user;
    const bool tells = call->action == LOOK || call->action == DROP || answer->status == ENG_CONFLICT;

    call->in_store = answer->record;
    // What was rolled back or brought in is so, whether the store has it already or not.
    call->info.durable = answer->status == ENG_OK;
    if (tells)
        call->status = answer->status;
    if (call->status)
        (void)eng_fail(&call->error, call->status, "%s", answer->message ? answer->message : "");
    srv_call_end(&call->call);
}

static void send(session_call *call, eng_engine *engine) {
    call->errand.timeline = call->timeline;
    call->errand.done = answered;
    call->errand.user = call;
    const eng_status status = eng_send(engine, &call->errand, &call->error);
    if (status == ENG_OK)
        srv_call_wait(&call->call);
    else if (call->action == LOOK || call->action == DROP)
        call->status = status;
}

static eng_status export(session_call *call, eng_engine *engine) {
    void *bytes = NULL;
    const eng_status status =
        eng_timeline_export(engine, call->owner, call->timeline, &bytes, &call->count, &call->error);

    call->bytes = bytes;
    return status;
}

static eng_status look(session_call *call, eng_engine *engine) {
    if (!call->timeline)
        return eng_fail(&call->error, ENG_NOT_FOUND, "there is no such session");
    const eng_status status = eng_timeline_read(engine, call->owner, call->timeline, &call->info, &call->error);
    call->has_info = status == ENG_OK;
    return status;
}

static eng_status act(session_call *call, eng_engine *engine) {
    switch (call->action) {
    case LOOK:
        call->has_digest =
            call->timeline && !eng_timeline_digest(engine, call->owner, call->timeline, call->digest, NULL);
        return ENG_OK;
    case DROP:
        return eng_timeline_drop(engine, call->owner, call->timeline, &call->error);
    case ROLLBACK:
        return eng_timeline_rollback(engine, call->owner, call->timeline, call->position, &call->error);
    case EXPORT:
        return export(call, engine);
    case IMPORT:
        return eng_timeline_import(engine, call->owner, call->timeline, call->bytes, call->count, &call->error);
    }
    return ENG_INTERNAL;
}

static void run(srv_call *base, eng_engine *engine) {
    session_call *call = (session_call *)base;

    if (!engine) {
        call->status = ENG_DEVICE;
        return;
    }
    call->status = ENG_OK;
    if (call->action == DROP && call->stored) {
        send(call, engine);
        return;
    }
    call->status = act(call, engine);
    if (!call->status && call->action != DROP)
        call->status = look(call, engine);
    if (call->action == LOOK && call->status == ENG_NOT_FOUND && call->stored)
        send(call, engine);
    else if (!call->status && call->stored && (call->action == ROLLBACK || call->action == IMPORT))
        send(call, engine);
}

// ---- answers -------------------------------------------------------------------------------------------------------

// An import is of other bytes than this model's: that is the client's choice of session, not the server's fault.
static void refuse(const session_call *call, srv_problem *problem) {
    if (call->action == IMPORT && call->status == ENG_FORMAT)
        srv_refuse(problem, 400, "invalid_state", NULL, "%s", call->error.text);
    else if (call->action == IMPORT && call->status == ENG_UNSUPPORTED) {
        srv_refuse(problem, 409, "foreign_state", NULL, "%s", call->error.text);
        problem->never_retry = true;
    } else
        srv_session_refuse(problem, call->status, call->error.text, 0);
}

static void answer(session_call *call) {
    srv_exchange *exchange = call->exchange;
    srv_buf out;

    srv_buf_init(&out, call->count + SRV_MAX_ANSWER_BYTES);
    if (call->action == EXPORT) {
        srv_buf_append(&out, call->bytes, call->count);
        srv_exchange_reply_as(exchange, "application/octet-stream", &out);
        return;
    }
    if (call->action != DROP && call->has_info)
        srv_session_write(call->server, call->session, &call->info, call->has_digest ? call->digest : NULL, &out);
    else if (call->action != DROP)
        srv_session_write_stored(call->server, &call->in_store, &out);
    srv_exchange_reply(exchange, call->action == DROP ? 204 : 200, &out);
}

// The client is told, and the session let go.
static void finish(session_call *call, const srv_problem *problem) {
    srv_session *session = call->session;

    if (call->exchange) {
        call->exchange->task = NULL;
        if (problem->status)
            srv_exchange_refuse(call->exchange, problem);
        else
            answer(call);
    }
    if (call->taken) {
        srv_session_let_go(call->server, session);
        if (call->action == DROP && (!call->status || call->status == ENG_NOT_FOUND))
            srv_session_remove(call->server, session);
    }
    if (session)
        srv_session_release(session);
    eng_free(call->bytes);
    free(call);
}

static void begin(session_call *call);

static bool may_seek(const session_call *call) {
    return call->stored && call->action != DROP && call->action != LOOK;
}

static void done(srv_call *base) {
    session_call *call = (session_call *)base;
    srv_session *session = call->session;
    srv_problem problem = {0};

    if (!call->status && call->has_info && call->taken) {
        session->position = call->info.position;
        session->profile_changed = call->info.profile_changed;
    }
    if (call->status == ENG_NOT_FOUND && may_seek(call) && call->sought >= SRV_SESSION_SEEKS)
        call->status = eng_fail(&call->error, ENG_FULL, "%s", "");
    if (call->status == ENG_NOT_FOUND && may_seek(call)) {
        if (!call->taken && !(call->taken = srv_session_take(session, &problem))) {
            finish(call, &problem);
            return;
        }
        session->timeline = 0; // it has left the engine: it is in the store
        begin(call);
        return;
    }
    refuse(call, &problem);
    finish(call, &problem);
}

// A session that was looked for in the store is here, or not.
static void reached(void *context, srv_session *session, const srv_problem *problem) {
    session_call *call = context;

    if (session)
        begin(call);
    else {
        call->taken = false; // it is out of the table
        finish(call, problem);
    }
}

// What the store is told of a session: as it is now that it is here, with its knobs and its time.
static void prepare_errand(session_call *call) {
    static const eng_errand_kind kinds[] = {[LOOK] = ENG_ERRAND_LOOK,
                                            [DROP] = ENG_ERRAND_DROP,
                                            [ROLLBACK] = ENG_ERRAND_KEEP,
                                            [EXPORT] = ENG_ERRAND_LOOK,
                                            [IMPORT] = ENG_ERRAND_KEEP};

    if (call->session)
        srv_session_errand(call->session, kinds[call->action], &call->errand);
    else
        call->errand = (eng_errand){.kind = kinds[call->action], .name = call->name, .owner = call->owner};
}

static void begin(session_call *call) {
    srv_session *session = call->session;
    srv_problem problem = {0};

    if (session && call->taken && call->action != DROP && !srv_session_is_here(session, NULL)) {
        call->sought++;
        if (srv_session_reach(call->server, session, reached, call))
            return;
        srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
        finish(call, &problem);
        return;
    }
    call->timeline = session ? session->timeline : 0;
    prepare_errand(call);
    srv_worker_call((session ? session->model : call->exchange->model)->worker, &call->call);
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

// The call takes the bytes, if any, also on failure. name: of a session that is not in the table.
static void ask(srv_exchange *exchange, const session_call *what, const eng_name *name) {
    static const srv_task_ops ops = {.cancel = leave, .abandon = abandon, .free = leave};
    session_call *call = malloc(sizeof *call);
    srv_problem problem = {0};

    if (!call) {
        if (what->taken)
            srv_session_let_go(exchange->server, what->session);
        free(what->bytes);
        srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    *call = *what;
    call->call = (srv_call){.run = run, .done = done};
    call->server = exchange->server;
    call->exchange = exchange;
    call->owner = srv_session_owner(exchange);
    call->stored = exchange->server->store;
    if (call->session) {
        srv_exchange_use(exchange, call->session->model);
        call->session->calls++;
    }
    if (name)
        call->name = *name;
    srv_exchange_attach(exchange, &ops, call);
    begin(call);
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

static void finish_early(srv_exchange *exchange, const srv_problem *problem) {
    if (problem->status)
        srv_exchange_refuse(exchange, problem);
}

// One that the path names and that is taken; NULL with a problem.
static srv_session *take(srv_exchange *exchange, srv_problem *problem) {
    srv_session *session = srv_session_find(exchange, exchange->rest, strcspn(exchange->rest, "/"), NULL, problem);

    return session && srv_session_take(session, problem) ? session : NULL;
}

// Of one whose state went with its engine there is only the name.
static void handle_foreign(srv_exchange *exchange, action action, srv_session *session, srv_problem *problem) {
    srv_buf nothing;

    if (action == DROP) {
        srv_session_remove(exchange->server, session);
        srv_buf_init(&nothing, 1);
        srv_exchange_reply(exchange, 204, &nothing);
        return;
    }
    if (!srv_session_refuse_foreign(exchange->server, session->foreign, problem))
        srv_session_refuse(problem, ENG_NOT_FOUND, NULL, 0);
    finish_early(exchange, problem);
}

// What looks at a session or drops it need not bring it here.
static void handle(srv_exchange *exchange, action action) {
    srv_problem problem = {0};
    const size_t length = strcspn(exchange->rest, "/");
    eng_name name;

    if (may_begin(exchange, &problem)) {
        srv_session *session = srv_session_known(exchange, exchange->rest, length);
        const bool can_be = srv_session_name(exchange, exchange->rest, length, &name) && exchange->server->store;
        if (session && session->foreign) {
            handle_foreign(exchange, action, session, &problem);
            return;
        }
        if (!session && can_be)
            srv_exchange_use(exchange, srv_setup_model(exchange->server->setup, NULL, NULL, &problem));
        else if (!session)
            srv_session_refuse(&problem, ENG_NOT_FOUND, NULL, 0);
        const bool takes = session && action == DROP && srv_session_take(session, &problem);
        if (!problem.status)
            ask(exchange, &(session_call){.action = action, .session = session, .taken = takes}, &name);
    }
    finish_early(exchange, &problem);
}

void srv_handle_session_get(srv_exchange *exchange) {
    handle(exchange, LOOK);
}

void srv_handle_session_delete(srv_exchange *exchange) {
    handle(exchange, DROP);
}

// What is here can be taken out while a request is on it: as it was before that.
void srv_handle_session_export(srv_exchange *exchange) {
    srv_problem problem = {0};

    if (may_begin(exchange, &problem)) {
        srv_session *session = srv_session_known(exchange, exchange->rest, strcspn(exchange->rest, "/"));
        const bool here = session && session->timeline;
        if (!here)
            session = take(exchange, &problem);
        if (session)
            ask(exchange, &(session_call){.action = EXPORT, .session = session, .taken = !here}, NULL);
    }
    finish_early(exchange, &problem);
}

void srv_handle_session_rollback(srv_exchange *exchange) {
    srv_problem problem = {0};
    srv_request request = {0};

    if (may_begin(exchange, &problem) &&
        !srv_session_parse(SRV_REQUEST_ROLLBACK, exchange->body.data, exchange->body.length,
                           &exchange->server->setup->bounds, &request, &problem)) {
        srv_session *session = take(exchange, &problem);
        if (session)
            ask(exchange,
                &(session_call){
                    .action = ROLLBACK, .session = session, .taken = true, .position = request.session_position},
                NULL);
    }
    srv_request_free(&request);
    finish_early(exchange, &problem);
}

void srv_handle_session_import(srv_exchange *exchange) {
    srv_problem problem = {0};
    srv_session *session = may_begin(exchange, &problem) ? take(exchange, &problem) : NULL;

    if (session) {
        size_t count = 0;
        char *bytes = srv_buf_take(&exchange->body, &count);
        ask(exchange,
            &(session_call){.action = IMPORT, .session = session, .taken = true, .bytes = bytes, .count = count}, NULL);
    }
    finish_early(exchange, &problem);
}

// SPDX-License-Identifier: Apache-2.0
// Sessions whose engine a reload has replaced.
//
// Where the new engine is of the same checkpoint they go over to it: through the store where there is one, else as the
// bytes of an export, and go on with the same bits. Of another checkpoint they are parked in the store, from where they
// come back if that checkpoint does; without a store their state goes with the engine, and their name stays for its
// time, so that who asks is told. A session is taken meanwhile. Loop thread, but for the call's run.
#include <stdlib.h>
#include <string.h>

#include "server/session.h"

enum { MOVES_AT_ONCE = 16 };

typedef enum step { PARK, EXPORT, IMPORT, DROP } step;

typedef struct move {
    srv_call call;
    step step;
    srv_server *server;
    srv_session *session; // taken
    srv_model *to;        // held; NULL: there is none that could go on with it
    srv_foreign *foreign; // to NULL: what it becomes
    srv_reached *moved;
    void *context;
    uint64_t owner, timeline;
    eng_errand errand;
    void *bytes;
    size_t count;
    eng_status status;
    eng_error error;
} move;

// ---- those of another checkpoint -----------------------------------------------------------------------------------

static srv_foreign *make_foreign(const srv_model *model) {
    const size_t length = strlen(model->slot->name) + 1;
    srv_foreign *foreign = malloc(sizeof *foreign + length);

    if (!foreign)
        return NULL;
    memcpy(foreign->fingerprint, srv_model_fingerprint(model), sizeof foreign->fingerprint);
    memcpy(foreign->model, model->slot->name, length);
    return foreign;
}

bool srv_session_refuse_foreign(const srv_server *server, const srv_foreign *foreign, srv_problem *problem) {
    const srv_model *now = srv_setup_at(server->setup, foreign->model, 0);

    if (!now)
        srv_refuse(problem, 409, "foreign_state", "session",
                   "the session is of fingerprint %.12s of the model %s, which is not served any more",
                   foreign->fingerprint, foreign->model);
    else if (strcmp(srv_model_fingerprint(now), foreign->fingerprint) == 0)
        return false;
    else
        srv_refuse(problem, 409, "foreign_state", "session",
                   "the session is of another checkpoint: its fingerprint is %.12s, that of the model %s is %.12s",
                   foreign->fingerprint, foreign->model, srv_model_fingerprint(now));
    problem->never_retry = true;
    return true;
}

// ---- engine thread -------------------------------------------------------------------------------------------------

static void parked(void *user, const eng_answer *answer) {
    move *move = user;

    move->status = answer->status;
    if (answer->status)
        (void)eng_fail(&move->error, answer->status, "%s", answer->message ? answer->message : "");
    srv_call_end(&move->call);
}

static void import(move *move, eng_engine *engine) {
    move->status = eng_timeline_create(engine, move->owner, &move->timeline, &move->error);
    if (move->status)
        return;
    move->status = eng_timeline_import(engine, move->owner, move->timeline, move->bytes, move->count, &move->error);
    if (move->status && eng_timeline_drop(engine, move->owner, move->timeline, NULL) != ENG_OK)
        move->status = ENG_INTERNAL;
}

static void run(srv_call *call, eng_engine *engine) {
    move *move = (struct move *)call;

    if (!engine) {
        move->status = ENG_DEVICE;
        return;
    }
    switch (move->step) {
    case PARK:
        move->status = eng_send(engine, &move->errand, &move->error);
        if (!move->status)
            srv_call_wait(call);
        return;
    case EXPORT:
        move->status =
            eng_timeline_export(engine, move->owner, move->timeline, &move->bytes, &move->count, &move->error);
        return;
    case IMPORT:
        import(move, engine);
        return;
    case DROP:
        move->status = eng_timeline_drop(engine, move->owner, move->timeline, &move->error);
        return;
    }
}

// ---- loop thread ---------------------------------------------------------------------------------------------------

static void finish(move *move, srv_session *session, const srv_problem *problem) {
    srv_model_release(move->to);
    free(move->foreign);
    eng_free(move->bytes);
    move->moved(move->context, session, problem);
    free(move);
}

// It stays where it is, and is tried again.
static void fail(move *move) {
    srv_problem problem = {0};

    srv_session_refuse(&problem, move->status, move->error.text, 0);
    move->session->busy = false;
    finish(move, NULL, &problem);
}

static void lose(move *move) {
    srv_problem problem = {0};

    srv_session_refuse(&problem, ENG_NOT_FOUND, NULL, 0);
    srv_session_remove(move->server, move->session);
    finish(move, NULL, &problem);
}

// Without a store the name stays.
static void end_foreign(move *move) {
    srv_session *session = move->session;
    srv_problem problem = {0};

    if (!srv_session_refuse_foreign(move->server, move->foreign, &problem)) // it is back already
        srv_session_refuse(&problem, ENG_NOT_FOUND, NULL, 0);
    if (move->step == PARK)
        srv_session_remove(move->server, session);
    else {
        session->foreign = move->foreign;
        move->foreign = NULL;
        session->timeline = 0;
        session->busy = false;
        srv_session_use(session, NULL);
    }
    finish(move, NULL, &problem);
}

static void go_over(move *move, uint64_t timeline) {
    move->session->timeline = timeline;
    srv_session_use(move->session, move->to);
    finish(move, move->session, &(srv_problem){0});
}

static void done(srv_call *call) {
    move *move = (struct move *)call;
    const bool left = move->status == ENG_NOT_FOUND; // the engine already: for the store, if there is one

    if (move->status && !left)
        fail(move);
    else if (move->foreign)
        end_foreign(move);
    else if (move->step == PARK)
        go_over(move, 0);
    else if (left)
        lose(move);
    else if (move->step == IMPORT)
        go_over(move, move->timeline);
    else {
        move->step = IMPORT;
        srv_worker_call(move->to->worker, call);
    }
}

static bool goes_on_with(const srv_model *now, const srv_model *model) {
    return now && strcmp(srv_model_fingerprint(now), srv_model_fingerprint(model)) == 0;
}

// A present engine of the same checkpoint, of the same name if there is one.
static const srv_model *successor(const srv_server *server, const srv_model *model) {
    const srv_setup *setup = server->setup;
    const srv_model *now = srv_setup_at(setup, model->slot->name, 0);

    for (size_t i = 0; i < setup->model_count && !goes_on_with(now, model); i++)
        now = setup->models[i];
    return goes_on_with(now, model) ? srv_setup_least_used(setup, now) : NULL;
}

bool srv_session_move(srv_server *server, srv_session *session, srv_reached *moved, void *context) {
    const srv_model *from = session->model, *to = successor(server, from);
    move *move = calloc(1, sizeof *move);

    if (!move || (!to && !(move->foreign = make_foreign(from)))) {
        free(move);
        return false;
    }
    move->call = (srv_call){.run = run, .done = done};
    move->step = session->stored ? PARK : to ? EXPORT : DROP;
    move->server = server;
    move->session = session;
    move->to = to ? srv_model_hold(to) : NULL;
    move->moved = moved;
    move->context = context;
    move->owner = session->owner;
    move->timeline = session->timeline;
    srv_session_errand(session, ENG_ERRAND_PARK, &move->errand);
    move->errand.done = parked;
    move->errand.user = move;
    srv_worker_call(from->worker, &move->call);
    return true;
}

// ---- all of them ---------------------------------------------------------------------------------------------------

typedef struct sweep {
    srv_server *server;
    size_t under_way;
    bool go_on;
} sweep;

static void moved_quietly(void *context, srv_session *session, const srv_problem *problem) {
    sweep *sweep = context;

    if (session)
        session->busy = false; // its time goes on
    // What failed is tried again with the next look; else there may be more.
    sweep->go_on = sweep->go_on && (session || problem->status == 404 || problem->never_retry);
    if (--sweep->under_way > 0)
        return;
    srv_server *server = sweep->server;
    const bool go_on = sweep->go_on;
    free(sweep);
    server->moving = false;
    if (go_on)
        srv_sessions_move(server);
}

void srv_sessions_move(srv_server *server) {
    sweep *sweep = NULL;

    if (server->moving || server->phase >= SRV_FAILING)
        return;
    for (srv_session *at = srv_session_first(server), *next; at; at = next) {
        next = at->next;
        if (at->busy || at->calls > 0 || !at->model || !at->model->retired)
            continue;
        if (!at->timeline) { // it is in the store alone
            srv_session_use(at, server->setup->models[0]);
            continue;
        }
        if (!sweep)
            sweep = calloc(1, sizeof *sweep);
        if (!sweep || sweep->under_way == MOVES_AT_ONCE)
            break;
        sweep->server = server;
        sweep->go_on = true;
        at->busy = srv_session_move(server, at, moved_quietly, sweep);
        sweep->under_way += at->busy;
    }
    server->moving = sweep && sweep->under_way > 0;
    if (!server->moving)
        free(sweep);
}

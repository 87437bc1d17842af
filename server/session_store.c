// SPDX-License-Identifier: Apache-2.0
// Sessions and the store: what it is told of them, and how one comes from there.
//
// A session's note holds the knobs of its completions and the model that it is of, so that a server that never heard of
// it goes on as the one that made it. Which of several models that is, is tried: an engine refuses a session of another
// model by its fingerprint. Loop thread, but for the call's run.
#include <stdlib.h>
#include <string.h>

#include "server/session.h"

// ---- notes ---------------------------------------------------------------------------------------------------------

enum { NOTE_VERSION = 1 };

static void put32(unsigned char **at, const void *value) {
    uint32_t bits;

    memcpy(&bits, value, sizeof bits);
    for (int i = 0; i < 4; i++)
        *(*at)++ = (unsigned char)(bits >> 8 * i);
}

static void get32(const unsigned char **at, void *value) {
    uint32_t bits = 0;

    for (int i = 0; i < 4; i++)
        bits |= (uint32_t) * (*at)++ << 8 * i;
    memcpy(value, &bits, sizeof bits);
}

// FNV-1a: tells the names of one server's models apart.
static uint32_t hash_name(const char *name) {
    uint32_t hash = 2166136261u;

    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return hash;
}

static void write_note(const srv_session *session, unsigned char note[ENG_NOTE_BYTES]) {
    const srv_knobs *knobs = &session->knobs;
    const uint32_t model = hash_name(session->model->slot->name);
    unsigned char *at = note;

    memset(note, 0, ENG_NOTE_BYTES);
    *at++ = NOTE_VERSION;
    *at++ = (unsigned char)knobs->given;
    *at++ = (unsigned char)knobs->cg_mode;
    *at++ = knobs->fail_unconverged;
    *at++ = (unsigned char)knobs->degrade.given;
    put32(&at, &model);
    put32(&at, &knobs->cg_tolerance);
    put32(&at, &knobs->exit_threshold);
    put32(&at, &knobs->cg_max_steps);
    put32(&at, &knobs->max_loops);
    put32(&at, &knobs->degrade.cg_tolerance);
    put32(&at, &knobs->degrade.exit_threshold);
    put32(&at, &knobs->degrade.cg_max_steps);
}

// Of a note that this version did not write there are no knobs.
static uint32_t read_note(const unsigned char note[ENG_NOTE_BYTES], srv_knobs *knobs) {
    const unsigned char *at = note;
    uint32_t model;

    *knobs = (srv_knobs){.cg_mode = ENG_CG_TOLERANCE};
    if (*at++ != NOTE_VERSION)
        return 0;
    knobs->given = *at++;
    knobs->cg_mode = (eng_cg_mode)*at++;
    knobs->fail_unconverged = *at++;
    knobs->degrade.given = *at++;
    get32(&at, &model);
    get32(&at, &knobs->cg_tolerance);
    get32(&at, &knobs->exit_threshold);
    get32(&at, &knobs->cg_max_steps);
    get32(&at, &knobs->max_loops);
    get32(&at, &knobs->degrade.cg_tolerance);
    get32(&at, &knobs->degrade.exit_threshold);
    get32(&at, &knobs->degrade.cg_max_steps);
    return model;
}

void srv_session_errand(const srv_session *session, eng_errand_kind kind, eng_errand *out) {
    *out = (eng_errand){.kind = kind,
                        .name = session->name,
                        .owner = session->owner,
                        .timeline = session->timeline,
                        .ttl_ms = session->ttl_s * 1000};
    write_note(session, out->note);
}

void srv_session_restore(srv_session *session, const eng_record *stored) {
    session->position = stored->position;
    session->ttl_s = stored->ttl_ms / 1000;
    session->known = true;
    (void)read_note(stored->note, &session->knobs);
}

const srv_model *srv_session_model(const srv_server *server, const eng_record *stored) {
    srv_knobs knobs;
    const uint32_t model = read_note(stored->note, &knobs);

    for (size_t i = 0; i < server->setup->model_count; i++)
        if (hash_name(server->setup->models[i]->slot->name) == model)
            return server->setup->models[i];
    return NULL;
}

void srv_session_write_stored(const srv_server *server, const eng_record *stored, srv_buf *out) {
    const srv_model *model = srv_session_model(server, stored);
    char id[SRV_SESSION_ID_BYTES];

    srv_session_print_name(&stored->name, id);
    srv_write_session(
        out, &(srv_session_view){.id = id,
                                 .model = model ? model->slot->name : NULL,
                                 .position = stored->position,
                                 .state_bytes = model ? eng_info(srv_worker_engine(model->worker))->state_bytes : 0,
                                 .expires_at = stored->expires_ms / 1000,
                                 .in_store = true});
}

// ---- refusals ------------------------------------------------------------------------------------------------------

void srv_session_refuse(srv_problem *problem, eng_status status, const char *text, int64_t lease_ms) {
    switch (status) {
    case ENG_NOT_FOUND:
        srv_refuse(problem, 404, "session_not_found", "session", "there is no such session");
        break;
    case ENG_BUSY:
        srv_refuse_engine(problem, status, lease_ms ? "another server has the session" : text);
        if (lease_ms) // it was asked to hand it over, and does so as soon as no request is on it
            problem->retry_after = lease_ms < 1000 ? 1 : 2;
        break;
    case ENG_UNSUPPORTED:
        srv_refuse(problem, 409, "foreign_state", "session", "%s", text);
        problem->never_retry = true;
        break;
    case ENG_FORMAT:
        srv_refuse(problem, 409, "damaged_state", "session", "%s", text);
        problem->never_retry = true;
        break;
    case ENG_FULL:
        srv_refuse(problem, 429, "sessions_full", NULL, "%s",
                   text && *text ? text : "there is no room for the session in memory at this moment");
        break;
    case ENG_IO:
        srv_refuse(problem, 503, "store_unavailable", NULL, "the store of sessions cannot be reached");
        break;
    default:
        srv_refuse_engine(problem, status, text);
    }
}

// ---- from the store ------------------------------------------------------------------------------------------------

struct srv_reach {
    srv_call call;
    srv_server *server;
    srv_session *session; // taken
    srv_reached *reached; // NULL: nobody waits
    void *context;
    const eng_engine *engine;
    eng_errand errand;
    size_t tried; // of the server's models
    // The answer.
    uint64_t timeline;
    eng_record stored;
    int64_t lease_ms;
    bool profile_changed;
    eng_status status;
    eng_error error;
};

static void fetched(void *user, const eng_answer *answer) {
    srv_reach *reach = user;
    eng_timeline_info info;

    reach->status = answer->status;
    reach->timeline = answer->timeline;
    reach->stored = answer->record;
    reach->lease_ms = answer->lease_ms;
    if (answer->status)
        (void)eng_fail(&reach->error, answer->status, "%s",
                       answer->message ? answer->message : eng_status_text(answer->status));
    else if (eng_timeline_read(reach->engine, reach->session->owner, answer->timeline, &info, NULL) == ENG_OK)
        reach->profile_changed = info.profile_changed;
    srv_call_end(&reach->call);
}

static void run(srv_call *call, eng_engine *engine) {
    srv_reach *reach = (srv_reach *)call;

    reach->engine = engine;
    reach->status = engine ? eng_send(engine, &reach->errand, &reach->error) : ENG_DEVICE;
    if (!reach->status)
        srv_call_wait(call);
}

// Another of this server's models; NULL: all were tried.
static const srv_model *next_model(srv_reach *reach) {
    const srv_setup *setup = reach->server->setup;

    while (reach->tried < setup->model_count) {
        const srv_model *model = setup->models[reach->tried++];
        if (strcmp(model->slot->name, reach->session->model->slot->name) != 0 && model->slot->replica == 0 &&
            srv_worker_read_state(model->worker) == SRV_WORKER_READY)
            return srv_setup_least_used(setup, model);
    }
    return NULL;
}

// session NULL: it is the caller's no more.
static void finish(srv_reach *reach, srv_session *session, const srv_problem *problem) {
    if (reach->reached)
        reach->reached(reach->context, session, problem);
    else if (session)
        srv_session_let_go(reach->server, session);
    free(reach);
}

static void done(srv_call *call) {
    srv_reach *reach = (srv_reach *)call;
    srv_session *session = reach->session;
    const srv_model *other = reach->status == ENG_UNSUPPORTED ? next_model(reach) : NULL;
    srv_problem problem = {0};

    if (other) {
        srv_session_use(session, other);
        srv_worker_call(other->worker, call);
        return;
    }
    if (reach->status) {
        srv_session_refuse(&problem, reach->status, reach->error.text, reach->lease_ms);
        srv_session_remove(reach->server, session);
        session = NULL;
    } else {
        session->timeline = reach->timeline;
        session->profile_changed = reach->profile_changed;
        srv_session_restore(session, &reach->stored);
    }
    finish(reach, session, &problem);
}

static void fetch(srv_reach *reach) {
    srv_session *session = reach->session;

    if (session->model->retired) { // the engine that has its place, or any: it says whose the session is
        const srv_setup *setup = reach->server->setup;
        const srv_model *now = srv_setup_at(setup, session->model->slot->name, 0);
        srv_session_use(session, srv_setup_least_used(setup, now ? now : setup->models[0]));
    }
    srv_session_errand(session, ENG_ERRAND_FETCH, &reach->errand);
    reach->errand.done = fetched;
    reach->errand.user = reach;
    srv_worker_call(session->model->worker, &reach->call);
}

static void moved(void *context, srv_session *session, const srv_problem *problem) {
    srv_reach *reach = context;

    if (session && !session->timeline)
        fetch(reach);
    else
        finish(reach, session, problem);
}

srv_reach *srv_session_reach(srv_server *server, srv_session *session, srv_reached *reached, void *context) {
    srv_reach *reach = calloc(1, sizeof *reach);

    if (!reach)
        return NULL;
    *reach = (srv_reach){.call = {.run = run, .done = done},
                         .server = server,
                         .session = session,
                         .reached = reached,
                         .context = context};
    if (!session->timeline)
        fetch(reach);
    else if (!srv_session_move(server, session, moved, reach)) {
        free(reach);
        return NULL;
    }
    return reach;
}

void srv_session_unreach(srv_reach *reach) {
    if (reach)
        reach->reached = NULL;
}

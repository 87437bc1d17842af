// SPDX-License-Identifier: Apache-2.0
// POST /v1/sessions and /v1/sessions/{id}/fork: a session of its own, and what is read before its answer.
//
// Both are completions (completions.c) that generate nothing: the body is prepared on the pool, a call on the engine's
// thread makes the timeline, which gets its name in the store if there is one, and then one job reads the prompt, or
// what a fork at an earlier position has to read again until its state stands there. A fork has its original to itself
// until it is made. The call is its own memory: what it has made for a client that left meanwhile, or could not be told
// of it, is dropped, for nobody knows its name. Loop thread, but for the call's run.
#include <stdlib.h>
#include <string.h>

#include "server/completion.h"

typedef struct srv_making {
    srv_call call;
    srv_server *server;
    srv_completion *completion; // NULL: the client has left
    srv_session *session;       // taken
    srv_session *original;      // of a fork; taken
    uint64_t owner, from;       // from: the original's timeline; 0: none
    int64_t position;           // of a fork; -1: the present one
    bool stored;
    eng_errand keep;
    uint64_t timeline; // 0: none was made
    eng_timeline_info info;
    eng_status status;
    eng_error error;
} making;

bool srv_completion_makes(const srv_completion *completion) {
    return completion->kind == SRV_REQUEST_SESSION || completion->kind == SRV_REQUEST_FORK;
}

static void kept(void *user, const eng_answer *answer) {
    making *making = user;

    making->status = answer->status;
    if (answer->status)
        (void)eng_fail(&making->error, answer->status, "%s",
                       answer->message ? answer->message : eng_status_text(answer->status));
    srv_call_end(&making->call);
}

static void run(srv_call *base, eng_engine *engine) {
    making *making = (struct srv_making *)base;

    if (!engine) {
        making->status = ENG_DEVICE;
        return;
    }
    if (making->from)
        making->status =
            eng_timeline_fork(engine, making->owner, making->from, making->position, &making->timeline, &making->error);
    else
        making->status = eng_timeline_create(engine, making->owner, &making->timeline, &making->error);
    if (!making->status)
        making->status = eng_timeline_read(engine, making->owner, making->timeline, &making->info, &making->error);
    if (making->status || !making->stored)
        return;
    making->keep.timeline = making->timeline;
    making->keep.done = kept;
    making->keep.user = making;
    making->status = eng_send(engine, &making->keep, &making->error);
    if (!making->status)
        srv_call_wait(base);
}

static void refuse(srv_completion *completion, const making *making) {
    const bool left = making->status == ENG_NOT_FOUND && making->stored; // the original did, each time

    srv_session_refuse(&completion->problem, left ? ENG_FULL : making->status, left ? NULL : making->error.text, 0);
    srv_completion_fail(completion, &completion->problem);
}

// A fork that was taken before the present end has to read up to where it stands.
static bool reads(const srv_completion *completion, const making *making) {
    return completion->kind == SRV_REQUEST_SESSION
               ? completion->request.prompt_count > 0
               : making->info.position > 0 && making->info.position < making->original->position;
}

// The job that reads has no ids of its own then.
static bool add_empty_prompt(srv_completion *completion) {
    if (completion->request.prompt_count)
        return true;
    completion->prompts = calloc(1, sizeof *completion->prompts);
    completion->request.prompts = calloc(1, sizeof *completion->request.prompts);
    completion->request.prompt_count = completion->prompts && completion->request.prompts ? 1 : 0;
    return completion->request.prompt_count;
}

static void go_on(srv_completion *completion, const making *making) {
    completion->making = NULL;
    completion->session = making->status ? NULL : making->session;
    if (completion->ended)
        return;
    if (making->status)
        refuse(completion, making);
    else if (!reads(completion, making))
        srv_completion_answer(completion);
    else {
        if (!add_empty_prompt(completion))
            srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
        srv_completion_start(completion);
    }
}

static bool seek_original(making *making);

static void made(srv_call *base) {
    making *making = (struct srv_making *)base;
    srv_session *session = making->session;

    if (making->status == ENG_NOT_FOUND && making->completion && seek_original(making)) {
        srv_session_remove(making->server, session);
        free(making);
        return;
    }
    session->timeline = making->timeline;
    if (!making->status) {
        session->position = making->info.position;
        session->profile_changed = making->info.profile_changed;
    }
    if (making->completion)
        go_on(making->completion, making);
    if (making->status && making->timeline) // it could not be kept in the store
        srv_session_drop(making->server, session);
    else if (making->status)
        srv_session_remove(making->server, session);
    else if (!making->completion)
        srv_session_drop(making->server, session);
    if (making->original)
        srv_session_let_go(making->server, making->original);
    free(making);
}

void srv_session_unmake(srv_completion *completion) {
    if (completion->making)
        completion->making->completion = NULL;
    completion->making = NULL;
}

static void present(void *context) {
    srv_completion *completion = context;
    srv_exchange *exchange = completion->exchange;

    if (srv_exchange_open(exchange))
        srv_exchange_reply(exchange, 201, &completion->answer);
    srv_exchange_release(exchange);
}

// Where servers share the store, the next request may come to another: there it is before the answer.
void srv_session_present(srv_completion *completion) {
    srv_exchange *exchange = completion->exchange;
    srv_server *server = exchange->server;
    srv_session *session = completion->session;

    session->known = true;
    srv_session_write(server, session, NULL, NULL, &completion->answer);
    srv_exchange_hold(exchange);
    if (server->store && srv_store_is_shared(server->store) && srv_session_park(server, session, present, completion))
        completion->session = NULL;
    else
        present(completion);
}

static void begin(srv_completion *completion, srv_session *original) {
    srv_exchange *exchange = completion->exchange;
    making *making = malloc(sizeof *making);

    if (making) {
        *making = (struct srv_making){
            .call = {.run = run, .done = made},
            .server = exchange->server,
            .completion = completion,
            .original = original,
            .owner = srv_session_owner(exchange),
            .from = original ? original->timeline : 0,
            .position = completion->request.session_position,
            .stored = exchange->server->store,
            .session =
                srv_session_add(exchange, completion->model, completion->request.session_ttl_s, &completion->problem),
        };
    } else
        srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
    if (completion->problem.status) {
        if (original)
            srv_session_let_go(exchange->server, original);
        free(making);
        srv_completion_fail(completion, &completion->problem);
        return;
    }
    making->session->knobs = completion->request.knobs;
    srv_session_errand(making->session, ENG_ERRAND_KEEP, &making->keep);
    completion->making = making;
    srv_worker_call(completion->model->worker, &making->call);
}

// The original is here, and taken.
static void begin_fork(srv_completion *completion, srv_session *original) {
    srv_completion_use(completion, original->model);
    completion->request.knobs = original->knobs;
    if (completion->request.session_ttl_s == 0)
        completion->request.session_ttl_s = original->ttl_s;
    srv_completion_settle(completion);
    begin(completion, original);
}

static void reached(void *context, srv_session *original, const srv_problem *problem) {
    srv_completion *completion = context;

    completion->reach = NULL;
    if (problem->status)
        completion->problem = *problem;
    if (original && completion->ended)
        srv_session_let_go(completion->exchange->server, original);
    else if (original)
        begin_fork(completion, original);
    else
        srv_completion_fail(completion, &completion->problem);
}

static void seek(srv_completion *completion, srv_session *original) {
    srv_server *server = completion->exchange->server;

    completion->sought++;
    completion->reach = srv_session_reach(server, original, reached, completion);
    if (completion->reach)
        return;
    srv_session_remove(server, original);
    srv_refuse_engine(&completion->problem, ENG_NO_MEMORY, NULL);
    srv_completion_fail(completion, &completion->problem);
}

// The original has left the engine: it is in the store, once.
static bool seek_original(making *making) {
    srv_completion *completion = making->completion;

    if (!making->original || !making->original->stored || completion->sought >= SRV_SESSION_SEEKS)
        return false;
    completion->making = NULL;
    making->original->timeline = 0;
    if (completion->ended)
        srv_session_let_go(making->server, making->original);
    else
        seek(completion, making->original);
    return true;
}

static void fork_session(srv_completion *completion) {
    srv_exchange *exchange = completion->exchange;
    srv_problem *problem = &completion->problem;
    srv_session *original = srv_session_find(exchange, exchange->rest, strcspn(exchange->rest, "/"), NULL, problem);

    if (!original || !srv_session_take(original, problem))
        srv_completion_fail(completion, problem);
    else if (srv_session_is_here(original, NULL))
        begin_fork(completion, original);
    else
        seek(completion, original);
}

void srv_session_make(srv_completion *completion) {
    if (completion->kind == SRV_REQUEST_FORK) {
        fork_session(completion);
        return;
    }
    srv_completion_use(completion, srv_setup_least_used(completion->setup, completion->model));
    begin(completion, NULL);
}

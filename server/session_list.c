// SPDX-License-Identifier: Apache-2.0
// GET /v1/sessions: those of the key, here and in the store.
//
// With a store its list is the whole one, for it has every session; of those that are here the table knows more. It is
// read page by page on the engine's thread, and grows to what fits an answer. Loop thread, but for the call's run.
#include <stdlib.h>
#include <string.h>

#include "server/session.h"

typedef struct list_call {
    srv_call call;
    srv_exchange *exchange; // NULL: the client has left
    eng_engine *engine;
    eng_errand errand;
    eng_record *items;
    size_t count, capacity;
    eng_status status;
    eng_error error;
} list_call;

// ---- engine thread -------------------------------------------------------------------------------------------------

static void send(list_call *call);

static eng_status add(list_call *call, const eng_answer *page) {
    if (page->status)
        return eng_fail(&call->error, page->status, "%s", page->message ? page->message : "");
    if (call->count + page->count > SRV_MAX_SESSIONS)
        return eng_fail(&call->error, ENG_FULL, "there are more than %d sessions", SRV_MAX_SESSIONS);
    if (call->count + page->count > call->capacity) {
        const size_t capacity = 2 * call->capacity + page->count;
        eng_record *grown = reallocarray(call->items, capacity, sizeof *grown);
        if (!grown)
            return ENG_NO_MEMORY;
        call->items = grown;
        call->capacity = capacity;
    }
    if (page->count)
        memcpy(call->items + call->count, page->list, page->count * sizeof *page->list);
    call->count += page->count;
    return ENG_OK;
}

static void take_page(void *user, const eng_answer *page) {
    list_call *call = user;

    call->status = add(call, page);
    if (!call->status && page->more && page->count) {
        memcpy(call->errand.name.id, page->list[page->count - 1].name.id, sizeof call->errand.name.id);
        send(call);
    }
    if (call->status || !page->more || !page->count)
        srv_call_end(&call->call);
}

static void send(list_call *call) {
    call->status = eng_send(call->engine, &call->errand, &call->error);
}

static void run(srv_call *base, eng_engine *engine) {
    list_call *call = (list_call *)base;

    call->engine = engine;
    if (engine)
        send(call);
    else
        call->status = ENG_DEVICE;
    if (!call->status)
        srv_call_wait(base);
}

// ---- the answer ----------------------------------------------------------------------------------------------------

static bool is_listed(const srv_exchange *exchange, const srv_session *session) {
    return session->owner == srv_session_owner(exchange) && session->known && !session->foreign &&
           (session->busy || session->expires_ms > srv_loop_now(exchange->server->loop));
}

static void write_list(srv_exchange *exchange, const eng_record *items, size_t count) {
    const char *separator = "";
    srv_buf out;

    srv_buf_init(&out, SRV_MAX_ANSWER_BYTES);
    srv_buf_puts(&out, "{\"object\":\"list\",\"data\":[");
    for (const srv_session *at = srv_session_first(exchange->server); at && !exchange->server->store; at = at->next)
        if (is_listed(exchange, at)) {
            srv_buf_puts(&out, separator);
            srv_session_write(exchange->server, at, NULL, NULL, &out);
            separator = ",";
        }
    for (size_t i = 0; i < count; i++) {
        char id[SRV_SESSION_ID_BYTES];
        srv_session_print_name(&items[i].name, id);
        const srv_session *here = srv_session_known(exchange, id, strlen(id));
        if (here && !here->known)
            continue;
        srv_buf_puts(&out, separator);
        if (here && here->timeline)
            srv_session_write(exchange->server, here, NULL, NULL, &out);
        else
            srv_session_write_stored(exchange->server, &items[i], &out);
        separator = ",";
    }
    srv_buf_puts(&out, "]}");
    srv_exchange_reply(exchange, 200, &out);
}

static void done(srv_call *base) {
    list_call *call = (list_call *)base;
    srv_problem problem = {0};

    if (call->exchange) {
        call->exchange->task = NULL;
        srv_session_refuse(&problem, call->status, call->error.text, 0);
        if (call->status)
            srv_exchange_refuse(call->exchange, &problem);
        else
            write_list(call->exchange, call->items, call->count);
    }
    free(call->items);
    free(call);
}

// ---- the task ------------------------------------------------------------------------------------------------------

static void leave(void *context) {
    list_call *call = context;

    if (call)
        call->exchange = NULL;
}

static void abandon(void *context) {
    list_call *call = context;
    srv_problem problem = {0};

    if (!call || !call->exchange)
        return;
    srv_exchange *exchange = call->exchange;
    leave(call);
    exchange->task = NULL;
    srv_refuse(&problem, 503, "draining", NULL, "the server is shutting down");
    srv_exchange_refuse(exchange, &problem);
}

static void ask(srv_exchange *exchange, const srv_model *model) {
    static const srv_task_ops ops = {.cancel = leave, .abandon = abandon, .free = leave};
    list_call *call = calloc(1, sizeof *call);
    srv_problem problem = {0};

    if (!call) {
        srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    call->call = (srv_call){.run = run, .done = done};
    call->exchange = exchange;
    call->errand = (eng_errand){.kind = ENG_ERRAND_LIST, .done = take_page, .user = call};
    (void)srv_session_name(exchange, "", 0, &call->errand.name); // whose they are
    srv_exchange_attach(exchange, &ops, call);
    srv_worker_call(model->worker, &call->call);
}

void srv_handle_session_list(srv_exchange *exchange) {
    srv_problem problem = {0};
    const srv_model *model = NULL;

    if (!exchange->server->store) {
        write_list(exchange, NULL, 0);
        return;
    }
    if (!srv_server_refuses(exchange->server, &problem))
        model = srv_setup_model(exchange->server->setup, NULL, NULL, &problem);
    if (model)
        ask(exchange, model);
    else
        srv_exchange_refuse(exchange, &problem);
}

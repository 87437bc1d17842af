// SPDX-License-Identifier: Apache-2.0
// POST /tokenize and /detokenize. The body is parsed and converted on the pool; the loop thread only hands over. The
// task's fields belong to the pool's thread until `done` runs; the exchange is held meanwhile.
#include <stdlib.h>

#include "server/server.h"

typedef struct token_task {
    srv_exchange *exchange;
    bool detokenize;
    srv_setup *setup;       // under which it began; held
    const srv_model *model; // NULL: none was found
    srv_buf json;
    srv_problem problem;
    bool ended;
} token_task;

static void tokenize(const eng_engine *engine, const srv_token_request *request, srv_buf *json, srv_problem *problem) {
    int32_t *ids = NULL;
    size_t count = 0;
    eng_error error = {0};

    const eng_status status = eng_encode(engine, request->prompt.text, request->prompt.length,
                                         request->add_special_tokens, &ids, &count, &error);
    if (status) {
        srv_refuse_engine(problem, status, error.text);
        return;
    }
    srv_write_tokens(json, ids, count, eng_info(engine)->context_length);
    eng_free(ids);
}

static void detokenize(const eng_engine *engine, const srv_token_request *request, srv_buf *json,
                       srv_problem *problem) {
    const int32_t vocabulary = eng_info(engine)->vocab_size;
    char *text = NULL;
    size_t length = 0;
    eng_error error = {0};

    for (size_t i = 0; i < request->prompt.count; i++)
        if (request->prompt.ids[i] >= vocabulary) {
            srv_refuse(problem, 400, "out_of_range", "tokens",
                       "token id %d (at index %zu) is outside the vocabulary of %d", request->prompt.ids[i], i,
                       vocabulary);
            return;
        }
    const eng_status status =
        eng_decode(engine, request->prompt.ids, request->prompt.count, true, &text, &length, &error);
    if (status) {
        srv_refuse_engine(problem, status, error.text);
        return;
    }
    srv_write_text(json, text, length);
    eng_free(text);
}

static void work(void *context) {
    token_task *task = context;
    const srv_buf *body = &task->exchange->body;
    srv_token_request request;

    const eng_status status =
        srv_token_request_parse(task->detokenize ? SRV_REQUEST_DETOKENIZE : SRV_REQUEST_TOKENIZE, body->data,
                                body->length, &task->setup->bounds, &request, &task->problem);
    const srv_model *model =
        status ? NULL : srv_setup_model(task->setup, task->exchange->key, request.model, &task->problem);
    task->model = model;
    if (model && task->detokenize)
        detokenize(srv_worker_engine(model->worker), &request, &task->json, &task->problem);
    else if (model)
        tokenize(srv_worker_engine(model->worker), &request, &task->json, &task->problem);
    srv_token_request_free(&request);
}

static void done(void *context) {
    token_task *task = context;
    srv_exchange *exchange = task->exchange;
    srv_http *http = exchange->server->http;

    srv_exchange_drop_body(exchange);
    srv_exchange_use(exchange, task->model);
    if (srv_exchange_open(exchange) && !task->ended) {
        task->ended = true;
        if (task->problem.status)
            srv_exchange_refuse(exchange, &task->problem);
        else
            srv_exchange_reply(exchange, 200, &task->json);
    }
    srv_exchange_release(exchange);
    srv_http_flush(http);
}

static void cancel_task(void *context) {
    token_task *task = context;
    task->ended = true;
}

static void abandon_task(void *context) {
    token_task *task = context;
    srv_problem problem = {0};

    if (task->ended)
        return;
    task->ended = true;
    srv_refuse(&problem, 503, "draining", NULL, "the server is shutting down");
    srv_exchange_refuse(task->exchange, &problem);
}

static void free_task(void *context) {
    token_task *task = context;
    srv_setup_release(task->setup);
    srv_buf_free(&task->json);
    free(task);
}

static void handle(srv_exchange *exchange, bool is_detokenize) {
    static const srv_task_ops ops = {.cancel = cancel_task, .abandon = abandon_task, .free = free_task};
    token_task *task = calloc(1, sizeof *task);
    srv_problem problem = {0};

    if (task) {
        *task = (token_task){
            .exchange = exchange, .detokenize = is_detokenize, .setup = srv_setup_hold(exchange->server->setup)};
        srv_buf_init(&task->json, SRV_MAX_ANSWER_BYTES);
        srv_exchange_attach(exchange, &ops, task);
        srv_exchange_hold(exchange);
        if (srv_loop_offload(exchange->server->loop, work, done, task) == ENG_OK)
            return;
        srv_exchange_release(exchange); // the library still holds it
        task->ended = true;
    }
    srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
    srv_exchange_refuse(exchange, &problem);
}

void srv_handle_tokenize(srv_exchange *exchange) {
    handle(exchange, false);
}

void srv_handle_detokenize(srv_exchange *exchange) {
    handle(exchange, true);
}

// SPDX-License-Identifier: Apache-2.0
// What the server is: its models and its health. Answered at once on the loop thread, so that they stay true and quick
// while the engines are busy.
#include <string.h>

#include "server/server.h"

static size_t view_all(const srv_server *server, srv_model_view *views) {
    for (size_t i = 0; i < server->setup->model_count; i++)
        srv_setup_view(server->setup, i, &views[i]);
    return server->setup->model_count;
}

static const char *phase_name(const srv_server *server) {
    switch (server->phase) {
    case SRV_LOADING:
        return "loading";
    case SRV_SERVING:
        return "ok";
    case SRV_FAILING:
    case SRV_DRAINING:
    case SRV_ENDING:
        break;
    }
    return "draining";
}

static void write_health(const srv_server *server, srv_buf *json) {
    srv_model_view views[SRV_MAX_MODELS];
    const size_t count = view_all(server, views);

    srv_buf_init(json, SRV_MAX_ANSWER_BYTES);
    const char *store = !server->store ? NULL : srv_store_failing(server->store) ? "failing" : "ok";
    srv_write_health(json, phase_name(server), store, views, count);
}

void srv_handle_health(srv_exchange *exchange) {
    srv_buf json;

    write_health(exchange->server, &json);
    srv_exchange_reply(exchange, 200, &json);
}

void srv_handle_ready(srv_exchange *exchange) {
    const bool ready = exchange->server->phase == SRV_SERVING;
    srv_buf json;

    write_health(exchange->server, &json);
    if (!ready)
        exchange->reply.retry_after = SRV_RETRY_LOADING_S;
    srv_exchange_reply(exchange, ready ? 200 : 503, &json);
}

// The models that the exchange's key may use.
static size_t view_permitted(const srv_exchange *exchange, srv_model_view *views) {
    const srv_setup *setup = exchange->server->setup;
    size_t count = 0;

    for (size_t i = 0; i < setup->model_count; i++)
        if (setup->models[i]->slot->replica == 0 && srv_key_may_use(exchange->key, setup->models[i]->slot->name))
            srv_setup_view(setup, i, &views[count++]);
    return count;
}

void srv_handle_models(srv_exchange *exchange) {
    srv_model_view views[SRV_MAX_MODELS];
    const size_t count = view_permitted(exchange, views);
    srv_buf json;

    srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
    srv_write_models(&json, views, count);
    srv_exchange_reply(exchange, 200, &json);
}

void srv_handle_model(srv_exchange *exchange) {
    srv_model_view views[SRV_MAX_MODELS];
    const size_t count = view_permitted(exchange, views);

    for (size_t i = 0; i < count; i++) {
        srv_buf json;

        if (strcmp(views[i].name, exchange->rest) != 0)
            continue;
        srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
        srv_write_model(&json, &views[i]);
        srv_exchange_reply(exchange, 200, &json);
        return;
    }
    srv_problem problem = {0};
    srv_refuse(&problem, 404, "model_not_found", "model", "there is no such model; GET /v1/models lists them");
    srv_exchange_refuse(exchange, &problem);
}

void srv_handle_tokenizer_info(srv_exchange *exchange) {
    srv_problem problem = {0};
    const srv_model *model = srv_setup_model(exchange->server->setup, exchange->key, NULL, &problem);
    srv_buf json;

    if (!model) {
        srv_exchange_refuse(exchange, &problem);
        return;
    }
    srv_exchange_use(exchange, model);
    srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
    srv_write_tokenizer(&json, srv_worker_engine(model->worker));
    srv_exchange_reply(exchange, 200, &json);
}

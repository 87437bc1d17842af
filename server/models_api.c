// SPDX-License-Identifier: Apache-2.0
// What the server is: its models and its health. Answered at once on the loop thread, so that they stay true and quick
// while the engines are busy.
#include <string.h>

#include "server/server.h"

static size_t view_all(const srv_server *server, srv_model_view *views) {
    for (size_t i = 0; i < server->model_count; i++)
        srv_server_view(server, i, &views[i]);
    return server->model_count;
}

static const char *phase_name(const srv_server *server) {
    switch (server->phase) {
    case SRV_LOADING:
        return "loading";
    case SRV_SERVING:
        return "ok";
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
    srv_write_health(json, phase_name(server), views, count);
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

void srv_handle_models(srv_exchange *exchange) {
    srv_model_view views[SRV_MAX_MODELS];
    const size_t count = view_all(exchange->server, views);
    srv_buf json;

    srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
    srv_write_models(&json, views, count);
    srv_exchange_reply(exchange, 200, &json);
}

void srv_handle_model(srv_exchange *exchange) {
    srv_server *server = exchange->server;

    for (size_t i = 0; i < server->model_count; i++) {
        srv_model_view view;
        srv_buf json;

        if (strcmp(server->models[i].path->name, exchange->rest) != 0)
            continue;
        srv_server_view(server, i, &view);
        srv_buf_init(&json, SRV_MAX_ANSWER_BYTES);
        srv_write_model(&json, &view);
        srv_exchange_reply(exchange, 200, &json);
        return;
    }
    srv_problem problem = {0};
    srv_refuse(&problem, 404, "model_not_found", "model", "there is no such model");
    srv_exchange_refuse(exchange, &problem);
}

// SPDX-License-Identifier: Apache-2.0
// One request through libmicrohttpd: body in, reply or stream out, and what happens when the client leaves.
//
// The library calls on_request several times: once with the header (only refusals that spare a body are answered there,
// because an answer at that point closes the connection), once a piece of the body, once at its end, and once after
// every resume. At the end the route's handler runs; if it has no answer yet the connection is suspended, and its
// descriptor is watched for a hang-up, which the library does not see while it is suspended.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/http_private.h"

// ---- life ----------------------------------------------------------------------------------------------------------

void srv_exchange_hold(srv_exchange *exchange) {
    exchange->references++;
}

void srv_exchange_drop_body(srv_exchange *exchange) {
    srv_buf_free(&exchange->body);
    if (exchange->reserved) // none is once the body was parsed, and the HTTP files may be gone by then
        exchange->server->http->body_bytes -= exchange->reserved;
    exchange->reserved = 0;
}

void srv_exchange_release(srv_exchange *exchange) {
    if (!exchange || --exchange->references > 0)
        return;
    if (exchange->ops)
        exchange->ops->free(exchange->task);
    srv_exchange_drop_body(exchange);
    srv_model_release(exchange->model);
    free(exchange->reply.body);
    free(exchange->rest);
    free(exchange);
}

void srv_exchange_use(srv_exchange *exchange, const srv_model *model) {
    if (!model || model == exchange->model)
        return;
    srv_model_release(exchange->model);
    exchange->model = srv_model_hold(model);
}

void srv_exchange_attach(srv_exchange *exchange, const srv_task_ops *ops, void *task) {
    exchange->ops = ops;
    exchange->task = task;
}

bool srv_exchange_open(const srv_exchange *exchange) {
    return exchange->connection && !exchange->cancelled;
}

static void resume(srv_exchange *exchange) {
    if (!exchange->suspended)
        return;
    exchange->suspended = false;
    exchange->connection->listener->due = true;
    MHD_resume_connection(exchange->connection->mhd);
}

void srv_http_cancel(srv_exchange *exchange) {
    if (exchange->cancelled)
        return;
    exchange->cancelled = true;
    if (exchange->ops)
        exchange->ops->cancel(exchange->task);
    resume(exchange);
}

// ---- answers -------------------------------------------------------------------------------------------------------

static void set_reply(srv_exchange *exchange, int status, srv_buf *json) {
    if (exchange->reply.status || exchange->streaming)
        return;
    exchange->reply.status = status;
    exchange->reply.body = srv_buf_take(json, &exchange->reply.length);
    resume(exchange);
}

void srv_exchange_refuse(srv_exchange *exchange, const srv_problem *problem) {
    srv_buf json;

    srv_buf_init(&json, SRV_MAX_LOG_LINE);
    srv_write_error(&json, problem);
    exchange->reply.retry_after = problem->retry_after;
    exchange->reply.never_retry = problem->never_retry;
    set_reply(exchange, problem->status, &json);
}

void srv_exchange_reply(srv_exchange *exchange, int status, srv_buf *json) {
    if (srv_buf_ok(json)) {
        set_reply(exchange, status, json);
        return;
    }
    srv_problem problem = {0};
    srv_buf_free(json);
    srv_refuse_engine(&problem, ENG_NO_MEMORY, NULL);
    srv_exchange_refuse(exchange, &problem);
}

void srv_exchange_reply_as(srv_exchange *exchange, const char *type, srv_buf *text) {
    if (srv_buf_ok(text))
        exchange->reply.type = type;
    srv_exchange_reply(exchange, 200, text);
}

void srv_exchange_stream(srv_exchange *exchange) {
    exchange->streaming = true;
    resume(exchange);
}

void srv_exchange_wake(srv_exchange *exchange) {
    if (exchange->streaming)
        resume(exchange);
}

static void add_header(struct MHD_Response *response, const char *name, const char *value) {
    // Fails only for want of memory; an answer without one of these headers is still right.
    (void)MHD_add_response_header(response, name, value);
}

static void add_common_headers(const srv_exchange *exchange, struct MHD_Response *response) {
    if (exchange->server->phase >= SRV_FAILING)
        add_header(response, "Connection", "close");
    if (exchange->log_id)
        add_header(response, "X-Request-Id", exchange->log_id);
}

static enum MHD_Result queue_reply(srv_exchange *exchange) {
    struct srv_reply *reply = &exchange->reply;
    struct MHD_Response *response = MHD_create_response_from_buffer(reply->length, reply->body, MHD_RESPMEM_MUST_FREE);
    if (!response)
        return MHD_NO;
    reply->body = NULL;
    add_header(response, "Content-Type", reply->type ? reply->type : "application/json");
    add_common_headers(exchange, response);
    if (reply->status == MHD_HTTP_UNAUTHORIZED)
        add_header(response, "WWW-Authenticate", "Bearer realm=\"mesa\"");
    if (reply->retry_after) {
        char seconds[16];
        snprintf(seconds, sizeof seconds, "%d", reply->retry_after);
        add_header(response, "Retry-After", seconds);
    }
    if (reply->status == MHD_HTTP_CONFLICT && reply->retry_after)
        add_header(response, "X-Should-Retry", "true");
    if (reply->never_retry)
        add_header(response, "X-Should-Retry", "false");
    if (exchange->allow[0])
        add_header(response, "Allow", exchange->allow);
    const enum MHD_Result result = MHD_queue_response(exchange->connection->mhd, (unsigned)reply->status, response);
    MHD_destroy_response(response);
    exchange->queued = true;
    return result;
}

static bool watch_hangup(srv_connection *connection) {
    srv_loop *loop = connection->listener->http->server->loop;

    if (!connection->hangup && srv_watch_create(loop, connection->descriptor, SRV_WATCH_HANGUP, srv_http_on_hangup,
                                                connection, &connection->hangup))
        return false;
    return srv_watch_start(connection->hangup) == ENG_OK;
}

static void suspend(srv_exchange *exchange) {
    MHD_suspend_connection(exchange->connection->mhd);
    exchange->suspended = true;
}

static ssize_t read_stream(void *closure, uint64_t position, char *out, size_t room) {
    srv_exchange *exchange = closure;
    bool end = false;
    (void)position;

    if (exchange->cancelled)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    const ssize_t length = exchange->ops->read(exchange->task, out, room, &end);
    if (length < 0)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (length > 0)
        return length;
    if (end)
        return MHD_CONTENT_READER_END_OF_STREAM;
    suspend(exchange); // returning 0 without it would spin
    return 0;
}

static enum MHD_Result queue_stream(srv_exchange *exchange) {
    enum { UNCHUNKED_BLOCK = 1024 }; // allocated for HTTP/1.0 only

    struct MHD_Response *response =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, UNCHUNKED_BLOCK, read_stream, exchange, NULL);
    if (!response)
        return MHD_NO;
    add_header(response, "Content-Type", "text/event-stream");
    add_header(response, "Cache-Control", "no-cache");
    add_header(response, "X-Accel-Buffering", "no");
    add_common_headers(exchange, response);
    const enum MHD_Result result = MHD_queue_response(exchange->connection->mhd, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    exchange->queued = true;
    return result;
}

// The body is whole, or the connection was resumed.
static enum MHD_Result continue_exchange(srv_exchange *exchange) {
    if (exchange->cancelled)
        return MHD_NO;
    if (!exchange->dispatched) {
        exchange->dispatched = true;
        exchange->connection->deadline_ms = 0;
        if (exchange->problem.status)
            srv_exchange_refuse(exchange, &exchange->problem);
        else
            exchange->route->handle(exchange);
    }
    if (exchange->reply.status)
        return queue_reply(exchange);
    if (exchange->streaming)
        return queue_stream(exchange);
    if (!watch_hangup(exchange->connection))
        return MHD_NO;
    suspend(exchange);
    return MHD_YES;
}

// ---- the request ---------------------------------------------------------------------------------------------------

// Takes bytes of the memory for bodies, or refuses.
static bool reserve_body(srv_exchange *exchange, uint64_t bytes) {
    srv_http *http = exchange->server->http;
    const srv_config *config = exchange->server->config;

    if (bytes > (uint64_t)config->max_body - exchange->reserved)
        srv_refuse(&exchange->problem, 413, "body_too_large", NULL, "the body is larger than %lld bytes",
                   (long long)config->max_body);
    else if (bytes > (uint64_t)config->body_memory - http->body_bytes)
        srv_refuse(&exchange->problem, 429, "memory_full", NULL, "too many large bodies are being read");
    if (exchange->problem.status)
        return false;
    exchange->reserved += bytes;
    http->body_bytes += bytes;
    return true;
}

static srv_exchange *make_exchange(srv_connection *connection, const char *method) {
    srv_server *server = connection->listener->http->server;
    srv_exchange *exchange = calloc(1, sizeof *exchange);

    if (!exchange)
        return NULL;
    exchange->references = 1;
    exchange->server = server;
    exchange->connection = connection;
    exchange->started_ms = srv_loop_now(server->loop);
    exchange->method = method; // the library keeps it as long as the request
    exchange->log_prompt_tokens = exchange->log_completion_tokens = -1;
    srv_buf_init(&exchange->body, (size_t)server->config->max_body);
    connection->exchange = exchange;
    return exchange;
}

// Whether the refusal should not wait for a body that nobody will read.
static bool refuse_now(const srv_exchange *exchange, const srv_header_facts *facts) {
    return exchange->problem.status && (facts->dangerous || facts->chunked || facts->expects_continue ||
                                        facts->content_length > SRV_REFUSED_BODY_BYTES);
}

// Everything that the header alone decides; the first of these faults is told: framing, size, key, path, content,
// budget.
static void examine(srv_exchange *exchange, const char *url, const char *version, srv_header_facts *facts,
                    srv_route_match *match) {
    const srv_connection *connection = exchange->connection;
    srv_server *server = exchange->server;
    srv_problem content = {0}, path = {0};

    srv_route_find(exchange->method, connection->cut_path ? "" : url, connection->listener->admin, match, &path);
    exchange->route = match->route;
    srv_http_check_headers(connection->mhd, version, match->route && match->route->takes_body, facts, &content);
    if (facts->dangerous) {
        exchange->problem = content;
        return;
    }
    // The library's own bound is looser: its pool has room for an answer as well.
    if (facts->bytes + strlen(url) > (uint64_t)server->config->max_headers) {
        srv_refuse(&exchange->problem, 431, "headers_too_large", NULL, "the header is larger than %lld bytes",
                   (long long)server->config->max_headers);
        return;
    }
    if (server->keys && !match->is_public && !connection->listener->admin) {
        exchange->key = srv_http_authorize(server->keys, facts, &exchange->problem);
        if (!exchange->key)
            return;
    }
    if (path.status)
        memcpy(exchange->allow, match->allow, sizeof exchange->allow);
    exchange->problem = path.status ? path : content;
    if (!exchange->problem.status && exchange->key && match->route &&
        (match->route->takes_body || match->route->takes_bytes))
        exchange->admitted = srv_key_admit(exchange->key, srv_loop_now(server->loop), &exchange->problem);
}

static enum MHD_Result begin_exchange(srv_connection *connection, const char *url, const char *method,
                                      const char *version, void **slot) {
    srv_exchange *exchange = make_exchange(connection, method);
    srv_header_facts facts;
    srv_route_match match;

    if (!exchange)
        return MHD_NO;
    *slot = exchange;
    examine(exchange, url, version, &facts, &match);
    if (match.rest && !(exchange->rest = strdup(match.rest)))
        return MHD_NO;
    exchange->expects_body = facts.chunked || facts.content_length > 0;
    if (exchange->expects_body) {
        connection->deadline_ms =
            srv_loop_now(exchange->server->loop) + (uint64_t)exchange->server->config->body_time_ms;
        if (!exchange->problem.status && facts.content_length)
            reserve_body(exchange, facts.content_length);
    }
    if ((!exchange->expects_body && !facts.dangerous) || !refuse_now(exchange, &facts))
        return MHD_YES;
    exchange->dispatched = true;
    connection->deadline_ms = 0;
    srv_exchange_refuse(exchange, &exchange->problem);
    return queue_reply(exchange);
}

// A piece of the body. MHD_NO closes the connection.
static enum MHD_Result take_body(srv_exchange *exchange, const char *data, size_t *size) {
    const size_t length = *size;

    *size = 0;
    if (exchange->problem.status) { // read on for a while, so that the client gets to read why
        exchange->dropped += length;
        if (exchange->dropped <= SRV_REFUSED_BODY_BYTES)
            return MHD_YES;
        srv_http_tell(exchange, &exchange->problem);
        return MHD_NO;
    }
    const size_t held = exchange->body.length + length;
    if (held > exchange->reserved && !reserve_body(exchange, held - exchange->reserved)) {
        srv_exchange_drop_body(exchange);
        return MHD_YES;
    }
    srv_buf_append(&exchange->body, data, length);
    if (!srv_buf_ok(&exchange->body)) {
        srv_exchange_drop_body(exchange);
        srv_refuse_engine(&exchange->problem, ENG_NO_MEMORY, NULL);
    }
    return MHD_YES;
}

enum MHD_Result srv_http_on_request(void *closure, struct MHD_Connection *mhd, const char *url, const char *method,
                                    const char *version, const char *data, size_t *size, void **slot) {
    srv_exchange *exchange = *slot;
    (void)closure;

    if (!exchange) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
        if (!info || !info->socket_context)
            return MHD_NO;
        return begin_exchange(info->socket_context, url, method, version, slot);
    }
    if (*size)
        return take_body(exchange, data, size);
    return continue_exchange(exchange);
}

void srv_http_on_hangup(void *context) {
    srv_connection *connection = context;
    srv_exchange *exchange = connection->exchange;

    if (!exchange)
        return;
    const bool blocked = !exchange->suspended; // in a write that would wait for the timeout
    srv_http_cancel(exchange);
    if (blocked) {
        shutdown(connection->descriptor, SHUT_RDWR);
        connection->listener->due = true;
    }
    srv_http_flush(connection->listener->http);
}

static void log_exchange(const srv_exchange *exchange, bool left) {
    const srv_server *server = exchange->server;
    const srv_model *model = exchange->model;
    const srv_access access = {
        .level = exchange->log_id || exchange->reply.status >= 500 ? ENG_LOG_INFO : ENG_LOG_DEBUG,
        .id = exchange->log_id,
        .route = exchange->route ? exchange->route->path : "(none)",
        .method = exchange->route ? exchange->route->method : "(any)",
        .model = model ? model->slot->name : NULL,
        .key = exchange->key ? exchange->key->name : NULL,
        .status = left && !exchange->queued ? 0
                  : exchange->reply.status  ? exchange->reply.status
                                            : 200,
        .client_left = left,
        .milliseconds = srv_loop_now(server->loop) - exchange->started_ms,
        .prompt_tokens = exchange->log_prompt_tokens,
        .completion_tokens = exchange->log_completion_tokens,
    };
    srv_log_access(server->log, &access);
    srv_metrics_count(model ? model->slot->requests : exchange->server->metrics.requests, access.status);
}

void srv_http_on_completed(void *closure, struct MHD_Connection *mhd, void **slot,
                           enum MHD_RequestTerminationCode code) {
    srv_exchange *exchange = *slot;
    (void)closure;
    (void)mhd;

    if (!exchange)
        return;
    *slot = NULL;
    srv_connection *connection = exchange->connection;
    if (connection->hangup)
        srv_watch_stop(connection->hangup);
    connection->exchange = NULL;
    connection->deadline_ms = srv_loop_now(exchange->server->loop) + (uint64_t)exchange->server->config->idle_time_ms;
    const bool left = exchange->cancelled || code != MHD_REQUEST_TERMINATED_COMPLETED_OK;
    exchange->suspended = false; // the library has let go of it
    srv_http_cancel(exchange);
    log_exchange(exchange, left);
    if (exchange->admitted)
        srv_key_done(exchange->key);
    exchange->connection = NULL;
    srv_exchange_release(exchange);
}

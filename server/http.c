// SPDX-License-Identifier: Apache-2.0
// libmicrohttpd inside the loop: one daemon an address, run by the loop, with the remedies that this needs.
//
// The library's epoll descriptor is watched; its timeout is a timer of the loop (it answers 0 while it still holds
// ready connections, whose sockets are edge triggered); after a connection has ended it is run once more, because at
// its limit it listens again only at the start of a run; nobody but run_listener runs it, never from inside its
// callbacks. The library's timeout is one of idleness, so header and body deadlines are kept here and swept.
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/http_private.h"

// ---- running -------------------------------------------------------------------------------------------------------

static void run_listener(srv_listener *listener) {
    MHD_UNSIGNED_LONG_LONG milliseconds;

    listener->closed = 0;
    MHD_run(listener->daemon);
    if (listener->closed)
        MHD_run(listener->daemon);
    if (MHD_get_timeout(listener->daemon, &milliseconds) == MHD_YES)
        srv_timer_start(listener->timer, milliseconds, 0);
    else
        srv_timer_stop(listener->timer);
}

void srv_http_flush(srv_http *http) {
    for (size_t i = 0; i < http->count; i++) {
        srv_listener *listener = &http->listeners[i];
        if (!listener->due)
            continue;
        listener->due = false;
        run_listener(listener);
    }
}

static void on_listener(void *context) {
    srv_listener *listener = context;
    run_listener(listener);
    srv_http_flush(listener->http);
}

// ---- connections ---------------------------------------------------------------------------------------------------

static srv_connection *open_connection(srv_listener *listener, struct MHD_Connection *mhd) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
    srv_http *http = listener->http;
    srv_connection *connection = info ? calloc(1, sizeof *connection) : NULL;

    if (!connection)
        return NULL;
    *connection = (srv_connection){
        .listener = listener, .mhd = mhd, .descriptor = info->connect_fd, .idle_time_ms = listener->idle_time_ms};
    connection->deadline_ms = srv_loop_now(http->server->loop) + (uint64_t)http->server->config->header_time_ms;
    connection->next = listener->first;
    if (listener->first)
        listener->first->previous = connection;
    listener->first = connection;
    const int on = 1; // a peer that vanishes without a word is found in the end
    (void)setsockopt(connection->descriptor, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    if (http->connections++ == 0)
        srv_timer_start(http->sweep, SRV_SWEEP_MS, SRV_SWEEP_MS);
    return connection;
}

static void close_connection(srv_connection *connection) {
    srv_listener *listener = connection->listener;

    srv_watch_close(connection->hangup);
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        listener->first = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    listener->closed++;
    if (--listener->http->connections == 0)
        srv_timer_stop(listener->http->sweep);
    free(connection);
}

static void on_connection(void *closure, struct MHD_Connection *mhd, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        *context = open_connection(closure, mhd); // NULL: its first request is refused
    else if (*context) {
        close_connection(*context);
        *context = NULL;
    }
}

static unsigned whole_seconds(int64_t milliseconds) {
    return (unsigned)((milliseconds + 999) / 1000);
}

// The library learns of another time with the next request.
static void settle_idle_time(srv_connection *connection, int64_t idle_time_ms) {
    if (connection->idle_time_ms != idle_time_ms &&
        MHD_set_connection_option(connection->mhd, MHD_CONNECTION_OPTION_TIMEOUT, whole_seconds(idle_time_ms)))
        connection->idle_time_ms = idle_time_ms;
}

// The library hands paths over as strings, which end at a NUL.
static bool holds_nul(const char *uri) {
    const char *nul = strstr(uri, "%00");
    return nul && nul < uri + strcspn(uri, "?");
}

// The request line is there: from now on the header must come in time. Before it, a kept-alive connection is idle.
static void *on_request_line(void *closure, const char *uri, struct MHD_Connection *mhd) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    srv_listener *listener = closure;

    if (info && info->socket_context) {
        const srv_server *server = listener->http->server;
        srv_connection *connection = info->socket_context;
        connection->deadline_ms = srv_loop_now(server->loop) + (uint64_t)server->config->header_time_ms;
        connection->cut_path = holds_nul(uri);
        settle_idle_time(connection, server->config->idle_time_ms);
    }
    return NULL;
}

void srv_http_tell(srv_exchange *exchange, const srv_problem *problem) {
    const srv_connection *connection = exchange->connection;
    char text[1024];
    srv_buf json;

    exchange->reply.status = problem->status; // for the log
    exchange->queued = true;
    srv_buf_init(&json, sizeof text);
    srv_write_error(&json, problem);
    const int length = snprintf(text, sizeof text,
                                "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: application/json\r\n"
                                "Content-Length: %zu\r\n\r\n%s",
                                problem->status, MHD_get_reason_phrase_for((unsigned)problem->status), json.length,
                                json.data ? json.data : "");
    // Who does not take it is closed all the same.
    if (srv_buf_ok(&json) && length > 0 && (size_t)length < sizeof text) {
        if (connection->listener->tls)
            (void)srv_tls_send(connection->mhd, text, (size_t)length);
        else if (send(connection->descriptor, text, (size_t)length, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
            connection->listener->due = true;
    }
    srv_buf_free(&json);
}

static void drop(srv_connection *connection) {
    connection->deadline_ms = 0;
    shutdown(connection->descriptor, SHUT_RDWR);
    connection->listener->due = true;
}

static void expire(srv_connection *connection) {
    srv_exchange *exchange = connection->exchange;

    if (exchange && exchange->expects_body && !exchange->dispatched) {
        srv_problem problem = {0};
        srv_refuse(&problem, 408, "body_timeout", NULL, "the body did not arrive in time");
        srv_http_tell(exchange, &problem);
    }
    drop(connection);
}

// Where data and the end of input arrive together, the library reads the data, waits for news that will not come, and
// keeps the connection until its time is over.
static bool has_left(const srv_connection *connection) {
    char byte;
    const ssize_t got = recv(connection->descriptor, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

static void on_sweep(void *context) {
    srv_http *http = context;
    const uint64_t now = srv_loop_now(http->server->loop);
    const bool look = ++http->sweeps % SRV_SWEEPS_A_LOOK == 0;

    // Connections that wait for input; the others are watched, or are being written to.
    for (size_t i = 0; i < http->count; i++)
        for (srv_connection *at = http->listeners[i].first; at; at = at->next)
            if (at->deadline_ms && now >= at->deadline_ms)
                expire(at);
            else if (at->deadline_ms && look && has_left(at))
                drop(at);
    srv_http_flush(http);
}

// ---- start ---------------------------------------------------------------------------------------------------------

// The library's own messages: they may quote requests, so all but those on accepting are for debugging.
static void on_message(void *closure, const char *format, va_list arguments) {
    srv_listener *listener = closure;
    srv_log *log = listener->http->server->log;
    const bool accepting = strstr(format, "accept") || strstr(format, "Accept");
    char text[256];

    vsnprintf(text, sizeof text, format, arguments);
    text[strcspn(text, "\n")] = '\0';
    srv_log_repeated(log, accepting ? ENG_LOG_WARNING : ENG_LOG_DEBUG, accepting ? "accept" : "http", "%s", text);
}

static struct MHD_Daemon *start_daemon(srv_listener *listener) {
    const srv_config *config = listener->http->server->config;
    struct MHD_OptionItem extra[] = {
        srv_tls_option(),
        {MHD_OPTION_HTTPS_PRIORITIES, 0, (char *)"NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"},
        {MHD_OPTION_END, 0, NULL},
    };

    if (!listener->tls)
        extra[0] = extra[2];
    return MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG | (listener->tls ? MHD_USE_TLS : 0), 0, NULL, NULL,
        srv_http_on_request, listener, MHD_OPTION_EXTERNAL_LOGGER, on_message, listener, MHD_OPTION_LISTEN_SOCKET,
        listener->descriptor, MHD_OPTION_CONNECTION_LIMIT, (unsigned)config->connections, MHD_OPTION_CONNECTION_TIMEOUT,
        whole_seconds(config->idle_time_ms), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)config->max_headers + SRV_CONNECTION_SPARE_BYTES, MHD_OPTION_NOTIFY_COMPLETED, srv_http_on_completed,
        listener, MHD_OPTION_NOTIFY_CONNECTION, on_connection, listener, MHD_OPTION_URI_LOG_CALLBACK, on_request_line,
        listener, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_ARRAY, extra, MHD_OPTION_END);
}

// Without keys nobody but this machine may be listening to; what is for administration has no keys anyway.
static eng_status check_exposure(const srv_server *server, const char *where, bool admin, eng_error *error) {
    bool local = true;

    if (srv_listen_local(where, &local, error))
        return ENG_IO;
    if (local || admin || server->keys)
        return ENG_OK;
    if (server->config->allow_anonymous) {
        srv_log_write(server->log, ENG_LOG_WARNING, "listen", "%s: anyone who reaches this address may use the server",
                      where);
        return ENG_OK;
    }
    return eng_fail(error, ENG_INVALID,
                    "will not listen on %s, which other machines reach, without keys (--keys FILE, or "
                    "--allow-anonymous to let anyone in)",
                    where);
}

static eng_status start_listener(srv_http *http, const char *where, bool admin, eng_error *error) {
    srv_server *server = http->server;
    srv_listener *listener = &http->listeners[http->count];

    *listener = (srv_listener){.http = http, .descriptor = -1, .admin = admin};
    eng_status status = check_exposure(server, where, admin, error);
    if (!status)
        status = srv_listen(where, server->config->socket_mode, &listener->descriptor, listener->address,
                            sizeof listener->address, error);
    if (status)
        return status;
    listener->tls = http->tls && !admin && strncmp(listener->address, "http:", 5) == 0;
    if (listener->tls) {
        memmove(listener->address + 1, listener->address, sizeof listener->address - 2);
        memcpy(listener->address, "https", 5);
    }
    http->count++; // from here on srv_http_free cleans up
    listener->idle_time_ms = server->config->idle_time_ms;
    listener->daemon = start_daemon(listener);
    if (!listener->daemon)
        return eng_fail(error, ENG_IO, "the HTTP library does not start on %s", where);
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(listener->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    if (!info)
        return eng_fail(error, ENG_IO, "the HTTP library has no epoll descriptor");
    status =
        srv_watch_create(server->loop, info->epoll_fd, SRV_WATCH_READABLE, on_listener, listener, &listener->watch);
    if (!status)
        status = srv_watch_start(listener->watch);
    if (!status)
        status = srv_timer_create(server->loop, on_listener, listener, &listener->timer);
    if (status)
        return eng_fail(error, status, "the loop cannot watch %s", where);
    listener->due = true; // the first run is what makes it listen
    return ENG_OK;
}

eng_status srv_http_create(srv_server *server, srv_http **out, eng_error *error) {
    srv_http *http = calloc(1, sizeof *http);

    if (!http)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for the HTTP server");
    http->server = server;
    signal(SIGPIPE, SIG_IGN);
    const srv_config *config = server->config;
    eng_status status = srv_timer_create(server->loop, on_sweep, http, &http->sweep);
    if (!status && config->tls_cert)
        status = srv_tls_load(config->tls_cert, config->tls_key, &http->tls, error);
    if (http->tls && srv_tls_expired(http->tls))
        srv_log_write(server->log, ENG_LOG_WARNING, "tls", "%s: the certificate has expired", config->tls_cert);
    for (size_t i = 0; i < config->listen_count && !status; i++)
        status = start_listener(http, config->listen[i], false, error);
    if (!status && config->admin_listen)
        status = start_listener(http, config->admin_listen, true, error);
    if (status) {
        srv_http_free(http);
        return status;
    }
    *out = http;
    return ENG_OK;
}

size_t srv_http_count(const srv_http *http) {
    return http->count;
}

const char *srv_http_address(const srv_http *http, size_t index) {
    return index < http->count ? http->listeners[index].address : NULL;
}

// ---- end -----------------------------------------------------------------------------------------------------------

static void stop_listening(srv_listener *listener) {
    if (listener->quiet)
        return;
    listener->quiet = true;
    if (listener->daemon)
        MHD_quiesce_daemon(listener->daemon);
    if (strncmp(listener->address, "unix:", 5) == 0)
        unlink(listener->address + 5);
    close(listener->descriptor);
    listener->descriptor = -1;
}

void srv_http_quiesce(srv_http *http) {
    for (size_t i = 0; i < http->count; i++) {
        srv_listener *listener = &http->listeners[i];
        stop_listening(listener);
        for (srv_connection *at = listener->first; at; at = at->next)
            if (!at->exchange)
                shutdown(at->descriptor, SHUT_RD); // the library sees an end of input and closes
        listener->due = true;
    }
    srv_http_flush(http);
}

size_t srv_http_connections(const srv_http *http) {
    return http->connections;
}

size_t srv_http_body_bytes(const srv_http *http) {
    return http->body_bytes;
}

void srv_http_abandon(srv_http *http) {
    for (size_t i = 0; i < http->count; i++) {
        for (srv_connection *at = http->listeners[i].first; at; at = at->next)
            if (at->exchange && at->exchange->ops && !at->exchange->cancelled)
                at->exchange->ops->abandon(at->exchange->task);
        http->listeners[i].due = true;
    }
    srv_http_flush(http);
}

void srv_http_close(srv_http *http) {
    for (size_t i = 0; i < http->count; i++) {
        for (srv_connection *at = http->listeners[i].first; at; at = at->next) {
            if (at->exchange)
                srv_http_cancel(at->exchange);
            shutdown(at->descriptor, SHUT_RDWR);
        }
        http->listeners[i].due = true;
    }
    srv_http_flush(http);
}

static void free_listener(srv_listener *listener) {
    stop_listening(listener);
    srv_watch_close(listener->watch);
    srv_timer_close(listener->timer);
    // With a connection still suspended the library would end the process.
    for (srv_connection *at = listener->first; at; at = at->next)
        if (at->exchange)
            srv_http_cancel(at->exchange);
    if (listener->daemon) {
        MHD_run(listener->daemon);
        MHD_stop_daemon(listener->daemon);
    }
}

void srv_http_free(srv_http *http) {
    if (!http)
        return;
    for (size_t i = 0; i < http->count; i++)
        free_listener(&http->listeners[i]);
    srv_timer_close(http->sweep);
    srv_tls_free(http->tls);
    free(http);
}

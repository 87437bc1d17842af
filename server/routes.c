// SPDX-License-Identifier: Apache-2.0
// The table of routes. A path matches byte for byte; one that ends in "/" takes any rest that is not empty, a "*" any
// part without a "/" that is not empty.
// Stateless; loop thread.
#include <stdio.h>
#include <string.h>

#include "server/server.h"

enum { BODY = 1, PUBLIC = 2, ADMIN = 4, BYTES = 8 };
#define ROUTE(method, path, marks, handler) \
    { method, path, ((marks)&BODY) != 0, ((marks)&BYTES) != 0, ((marks)&PUBLIC) != 0, ((marks)&ADMIN) != 0, handler }
static const srv_route routes[] = {
    ROUTE("POST", "/v1/completions", BODY, srv_handle_completions),
    ROUTE("POST", "/v1/chat/completions", BODY, srv_handle_chat),
    ROUTE("GET", "/v1/models", 0, srv_handle_models),
    ROUTE("GET", "/v1/models/", 0, srv_handle_model),
    ROUTE("POST", "/v1/sessions", BODY, srv_handle_session_create),
    ROUTE("GET", "/v1/sessions", 0, srv_handle_session_list),
    ROUTE("GET", "/v1/sessions/*", 0, srv_handle_session_get),
    ROUTE("DELETE", "/v1/sessions/*", 0, srv_handle_session_delete),
    ROUTE("POST", "/v1/sessions/*/fork", BODY, srv_handle_session_fork),
    ROUTE("POST", "/v1/sessions/*/rollback", BODY, srv_handle_session_rollback),
    ROUTE("GET", "/v1/sessions/*/state", 0, srv_handle_session_export),
    ROUTE("PUT", "/v1/sessions/*/state", BYTES, srv_handle_session_import),
    ROUTE("POST", "/tokenize", BODY, srv_handle_tokenize),
    ROUTE("POST", "/detokenize", BODY, srv_handle_detokenize),
    ROUTE("GET", "/tokenizer_info", 0, srv_handle_tokenizer_info),
    ROUTE("GET", "/health", PUBLIC | ADMIN, srv_handle_health),
    ROUTE("GET", "/health/ready", PUBLIC | ADMIN, srv_handle_ready),
    ROUTE("GET", "/metrics", ADMIN, srv_handle_metrics),
    ROUTE("GET", "/openapi.json", 0, srv_handle_openapi),
    ROUTE("GET", "/", PUBLIC, srv_handle_page),
};

static bool matches(const srv_route *route, const char *path, const char **rest) {
    const size_t length = strlen(route->path), before = strcspn(route->path, "*");

    if (before < length) {
        const size_t part = strncmp(route->path, path, before) == 0 ? strcspn(path + before, "/") : 0;
        if (part == 0 || strcmp(path + before + part, route->path + before + 1) != 0)
            return false;
        *rest = path + before;
        return true;
    }
    if (length == 1 || route->path[length - 1] != '/')
        return strcmp(route->path, path) == 0;
    if (strncmp(route->path, path, length) != 0 || !path[length])
        return false;
    *rest = path + length;
    return true;
}

void srv_route_find(const char *method, const char *path, bool admin, srv_route_match *match, srv_problem *problem) {
    size_t written = 0;

    *match = (srv_route_match){0};
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const srv_route *route = &routes[i];
        if ((admin && !route->admin) || !matches(route, path, &match->rest))
            continue;
        match->is_public = match->is_public || route->is_public;
        const bool get = strcmp(route->method, "GET") == 0;
        if (strcmp(route->method, method) == 0 || (get && strcmp(method, "HEAD") == 0)) {
            match->route = route;
            return;
        }
        const size_t room = sizeof match->allow - written;
        const int length =
            snprintf(match->allow + written, room, "%s%s%s", written ? ", " : "", route->method, get ? ", HEAD" : "");
        if (length > 0 && (size_t)length < room)
            written += (size_t)length;
    }
    if (written)
        srv_refuse(problem, 405, "method_not_allowed", NULL, "this path takes %s", match->allow);
    else
        srv_refuse(problem, 404, "path_not_found", NULL,
                   "there is no such path; GET / and GET /openapi.json tell of those that there are");
}

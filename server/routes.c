// SPDX-License-Identifier: Apache-2.0
// The table of routes. A path matches byte for byte; one that ends in "/" takes any rest that is not empty.
// Stateless; loop thread.
#include <stdio.h>
#include <string.h>

#include "server/server.h"

static const srv_route routes[] = {
    {"POST", "/v1/completions", true, srv_handle_completions}, {"GET", "/v1/models", false, srv_handle_models},
    {"GET", "/v1/models/", false, srv_handle_model},           {"GET", "/health", false, srv_handle_health},
    {"GET", "/health/ready", false, srv_handle_ready},         {"POST", "/tokenize", true, srv_handle_tokenize},
    {"POST", "/detokenize", true, srv_handle_detokenize},
};

static bool matches(const srv_route *route, const char *path, const char **rest) {
    const size_t length = strlen(route->path);

    if (route->path[length - 1] != '/')
        return strcmp(route->path, path) == 0;
    if (strncmp(route->path, path, length) != 0 || !path[length])
        return false;
    *rest = path + length;
    return true;
}

const srv_route *srv_route_find(const char *method, const char *path, const char **rest, char *allow, size_t allow_size,
                                srv_problem *problem) {
    size_t written = 0;

    allow[0] = '\0';
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const srv_route *route = &routes[i];
        if (!matches(route, path, rest))
            continue;
        const bool get = strcmp(route->method, "GET") == 0;
        if (strcmp(route->method, method) == 0 || (get && strcmp(method, "HEAD") == 0)) {
            allow[0] = '\0';
            return route;
        }
        const int length = snprintf(allow + written, allow_size - written, "%s%s%s", written ? ", " : "", route->method,
                                    get ? ", HEAD" : "");
        if (length > 0 && (size_t)length < allow_size - written)
            written += (size_t)length;
    }
    if (written)
        srv_refuse(problem, 405, "method_not_allowed", NULL, "this path takes %s", allow);
    else
        srv_refuse(problem, 404, "path_not_found", NULL, "there is no such path");
    return NULL;
}

// SPDX-License-Identifier: Apache-2.0
// Refusals, and the one mapping of the engine's statuses to HTTP. A deterministic failure is never 5xx, except that
// non-finite numbers are the server's fault; those carry x-should-retry: false.
// Stateless; any thread.
#include "server/problem.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include "server/limits.h"

void srv_refuse(srv_problem *problem, int status, const char *code, const char *param, const char *format, ...) {
    if (problem->status)
        return;
    *problem = (srv_problem){.status = status, .code = code, .param = param};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(problem->message, sizeof problem->message, format, arguments);
    va_end(arguments);
    if (status == 429)
        problem->retry_after = SRV_RETRY_FULL_S;
    else if (status == 503)
        problem->retry_after = SRV_RETRY_LOADING_S;
}

void srv_refuse_engine(srv_problem *problem, eng_status status, const char *text) {
    if (!text || !*text)
        text = eng_status_text(status);
    switch (status) {
    case ENG_OK:
        return;
    case ENG_INVALID:
    case ENG_UNSUPPORTED:
        srv_refuse(problem, 400, "invalid_request", NULL, "%s", text);
        return;
    case ENG_TOO_LONG:
        srv_refuse(problem, 400, "context_length_exceeded", "prompt", "%s", text);
        return;
    case ENG_NOT_FOUND:
        srv_refuse(problem, 404, "not_found", NULL, "%s", text);
        return;
    case ENG_NO_MEMORY:
        srv_refuse(problem, 429, "memory_full", NULL, "the server is out of memory for this request");
        return;
    case ENG_FULL:
        srv_refuse(problem, 429, "queue_full", NULL, "too many requests are waiting");
        return;
    case ENG_BUSY:
        srv_refuse(problem, 409, "session_busy", "session", "%s", text);
        problem->retry_after = SRV_RETRY_FULL_S;
        return;
    case ENG_CONFLICT:
        srv_refuse(problem, 409, "session_conflict", "session", "%s", text);
        problem->never_retry = true;
        return;
    case ENG_UNCONVERGED:
        srv_refuse(problem, 422, "unconverged", "on_unconverged", "%s", text);
        return;
    case ENG_CANCELLED:
        srv_refuse(problem, 503, "cancelled", NULL, "the request was cancelled by the server");
        return;
    case ENG_NUMERIC:
        srv_refuse(problem, 500, "numeric", NULL, "%s", text);
        problem->never_retry = true;
        return;
    case ENG_FORMAT:
    case ENG_IO:
    case ENG_DEVICE:
    case ENG_INTERNAL:
        srv_refuse(problem, 500, "internal", NULL, "the engine failed: %s", eng_status_text(status));
        return;
    }
    srv_refuse(problem, 500, "internal", NULL, "the engine failed");
}

const char *srv_problem_type(int status) {
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    case 503:
        return "unavailable_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

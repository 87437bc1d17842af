// SPDX-License-Identifier: Apache-2.0
// A refusal on its way to the client: HTTP status and the four members of the error object.
//
// The message is made of our own words and of names and numbers out of the configuration; it never quotes bytes of a
// request. An engine's eng_error becomes a problem in one place, by a switch over all statuses.
#ifndef SERVER_PROBLEM_H
#define SERVER_PROBLEM_H

#include <stdbool.h>

#include "engine/status.h"

typedef struct srv_problem {
    int status; // HTTP; 0: none
    char message[320];
    const char *param; // a field's name; NULL: none. Constant text
    const char *code;  // NULL: none. Constant text
    int retry_after;   // seconds; 0: no header
    bool never_retry;  // x-should-retry: false, where a client's library would try again
} srv_problem;

// Fills *problem unless it already holds one; the first problem wins. code and param: constant texts or NULL.
void srv_refuse(srv_problem *problem, int status, const char *code, const char *param, const char *format, ...)
    ENG_PRINTF(5, 6);
// From an engine's failure; text may be NULL.
void srv_refuse_engine(srv_problem *problem, eng_status status, const char *text);
// The "type" member that goes with an HTTP status.
const char *srv_problem_type(int status);

#endif

// SPDX-License-Identifier: Apache-2.0
// One thread's event loop: libcurl transfers over epoll, one alarm, SIGINT and SIGTERM as an event.
//
// A step costs what is ready, not what is open, and each transfer's callback runs right after its socket was read.
#ifndef CLIENTS_CLI_LOOP_H
#define CLIENTS_CLI_LOOP_H

#include <curl/curl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct cli_loop cli_loop;

typedef struct cli_loop_calls {
    void (*done)(void *context, CURL *easy, CURLcode result); // the transfer is off the loop again
    void (*alarm)(void *context);                             // NULL: none
    void (*interrupted)(void *context);
} cli_loop_calls;

// From here to cli_loop_free both signals are blocked and only seen by the loop. NULL: the reason is on standard error.
cli_loop *cli_loop_create(const cli_loop_calls *calls, void *context);
// Transfers still on the loop are dropped; their handles stay the caller's.
void cli_loop_free(cli_loop *loop);

bool cli_loop_add(cli_loop *loop, CURL *easy);
void cli_loop_remove(cli_loop *loop, CURL *easy);
// One alarm at this time of cli_now(); 0: none.
void cli_loop_alarm(cli_loop *loop, int64_t at);
// Until cli_loop_stop.
void cli_loop_run(cli_loop *loop);
void cli_loop_stop(cli_loop *loop);

#endif

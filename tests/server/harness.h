// SPDX-License-Identifier: Apache-2.0
// A whole server in the test's process, on a port of its own, and a plain client to talk to it.
//
// The server runs in a thread with the fake engine. What is waited for is an event: a helper that does not get it
// within a time that no machine needs, however busy, fails the running test.
#ifndef TESTS_SERVER_HARNESS_H
#define TESTS_SERVER_HARNESS_H

#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "server/server.h"

typedef struct fixture {
    const char *arguments[40]; // the command line, for as long as it may be read again
    char *environment[1];
    srv_config config;
    srv_log *log;
    int log_file; // of the server's log, unlinked
    srv_server *server;
    pthread_t thread;
    int exit_status; // after fixture_stop
    char host[128];
    int port;
} fixture;

// options: command line words after "--model demo=/models/demo --listen 127.0.0.1:0", NULL-terminated; may be NULL.
void fixture_start(fixture *fixture, const char *const *options);
// The same with the model's folder; does not wait for readiness.
void fixture_start_model(fixture *fixture, const char *model, const char *const *options);
void fixture_run(fixture *fixture);  // with the configuration that was read into it
void fixture_wait(fixture *fixture); // for readiness
// Drains, waits, checks that the engine was left empty. Returns the exit status.
int fixture_stop(fixture *fixture);
// Waits for a server that ends by itself.
int fixture_join(fixture *fixture);
// The log so far, NUL-terminated; free().
char *fixture_log(const fixture *fixture);

typedef struct answer {
    int status;
    char head[16384];
    char *body; // decoded, NUL-terminated
    size_t length;
    bool chunked, closed; // closed: by the server, after this answer
} answer;

int client_connect(const fixture *fixture);
int client_connect_port(const fixture *fixture, int port);
int fixture_port(const fixture *fixture, size_t index); // of the listener of this number
// Sends a request; headers: whole lines with their ends; body NULL: none.
void client_ask(int client, const char *method, const char *path, const char *headers, const char *body);
void client_send(int client, const char *data, size_t length);
void client_puts(int client, const char *text);
// One answer, its body decoded. head_only: to a HEAD.
void client_read(int client, answer *out, bool head_only);
// Bytes up to and including needle, appended to text.
void client_read_until(int client, const char *needle, char *text, size_t size);
// Whether the server closes. What it sends before is dropped.
bool client_closed(int client);
bool client_open(int client, int milliseconds); // still, after that time
void answer_free(answer *answer);
bool answer_has(const answer *answer, const char *header); // "Allow: POST", case-insensitive

// One request on a connection of its own.
void fixture_post(const fixture *fixture, const char *path, const char *body, answer *out);
void fixture_get(const fixture *fixture, const char *path, answer *out);
void client_post(int client, const char *path, const char *body); // sends only
void fixture_ask(const fixture *fixture, const char *method, const char *path, const char *headers, const char *body,
                 answer *out);
// A sample of /metrics by its name and labels as they are written; -1: not there.
double metric(const fixture *fixture, const char *sample);
// The body as JSON; fails the test if it is none. json_decref.
json_t *answer_json(const answer *answer);
// "status" or "status param" of an error answer, checked for its form.
void expect_error(const answer *answer, int status, const char *param, const char *code);

// A stream's events.
typedef struct sse {
    json_t *events; // array, without [DONE]
    bool done;      // [DONE] was the last
} sse;
void sse_parse(const answer *answer, sse *out);
void sse_free(sse *sse);
// The text of one choice, put together; free().
char *sse_text(const sse *sse, int index);

void wait_for(bool (*condition)(void), const char *what);
void wait_engine_active(int choices); // at least so many run or wait in the engine
void wait_engine_tokens(int tokens);  // so many were drawn: where it is one more, the server was told of those before
void wait_engine_empty(void);
double now_s(void); // monotonic
void sleep_ms(int milliseconds);

#endif

// SPDX-License-Identifier: Apache-2.0
// What the files of the program `mesa` share: exit statuses, the list of commands, a byte buffer, the clock.
//
// The program knows nothing but the HTTP contract of the server. One thread; no global state: a signal is read from a
// descriptor by the loop (loop.h), never handled behind its back. Everything that is read from outside has a bound.
#ifndef CLIENTS_CLI_CLI_H
#define CLIENTS_CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
    CLI_EXIT_OK = 0,
    CLI_EXIT_REFUSED = 1,       // the server said no, or its answer is not one
    CLI_EXIT_USAGE = 2,         // the command line, or a file that it names
    CLI_EXIT_CONNECTION = 3,    // no connection, or it broke
    CLI_EXIT_INTERRUPTED = 130, // SIGINT or SIGTERM
};

#define CLI_COMMANDS(X)                              \
    X(complete, "let a model continue a text")       \
    X(chat, "talk with a model")                     \
    X(models, "list the models of the server")       \
    X(session, "make, copy, move and drop sessions") \
    X(bench, "measure a server under load")

#define CLI_COMMAND_DECLARATION(name, summary) int cli_command_##name(int argc, char **argv);
CLI_COMMANDS(CLI_COMMAND_DECLARATION)
#undef CLI_COMMAND_DECLARATION

// Prints "mesa: TEXT" on standard error.
void cli_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Monotonic time in nanoseconds.
int64_t cli_now(void);

// Bytes that grow up to a limit. Appending beyond it or without memory sets failed and changes nothing.
typedef struct cli_buf {
    char *data; // with a NUL after length bytes once something was appended
    size_t length, capacity, limit;
    bool failed;
} cli_buf;

void cli_buf_append(cli_buf *buf, const void *bytes, size_t length);
void cli_buf_free(cli_buf *buf);
// Appends a file to its end; false after a complaint that names it.
bool cli_read_all(FILE *file, const char *name, cli_buf *text);

#endif

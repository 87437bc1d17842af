// SPDX-License-Identifier: Apache-2.0
// Command lines: a command's own options in its table, and the fields of a completion request in the one table of
// fields.c. What --help prints and what is accepted come from the same rows.
//
// Numbers are only parsed here; their ranges are the server's business, whose refusal names the field.
#ifndef CLIENTS_CLI_OPTIONS_H
#define CLIENTS_CLI_OPTIONS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum cli_kind {
    CLI_FLAG,    // bool *: true when given
    CLI_TEXT,    // const char **: borrowed from argv
    CLI_INTEGER, // int64_t *
    CLI_REAL,    // double *
    CLI_SECONDS, // double *: 0 (none) to a million
    CLI_RANGE,   // cli_range *: N or LOW:HIGH, both positive
    CLI_LIST,    // cli_list *: numbers separated by commas
} cli_kind;

typedef struct cli_range {
    int64_t low, high;
} cli_range;

enum { CLI_MAX_LIST = 64 };
typedef struct cli_list {
    double value[CLI_MAX_LIST];
    size_t count;
} cli_list;

typedef struct cli_option {
    const char *name;       // without dashes
    const char *value_name; // NULL for a flag
    cli_kind kind;
    void *target; // holds the default
    const char *help;
} cli_option;

typedef struct cli_command_line {
    const char *usage, *summary;
    const cli_option *options;
    size_t option_count;
    bool takes_fields;               // the options of fields.h as well
    bool (*lists)(const char *name); // which of these --help lists, by the request's names; NULL: all
    int max_positional;
} cli_command_line;

typedef enum cli_parsed { CLI_PARSED, CLI_HELPED, CLI_WRONG } cli_parsed;

// Parses argv[1..]. Fields go into the object body (borrowed, may be NULL without takes_fields), the rest to targets
// and positional[0 .. max_positional). CLI_WRONG: the reason is on standard error.
cli_parsed cli_options_parse(const cli_command_line *line, int argc, char **argv, json_t *body, const char **positional,
                             int *positional_count);

// What a command that was not parsed ends with.
int cli_parsed_exit(cli_parsed parsed);

// The options that say where the server is, of every command.
#define CLI_ENDPOINT_OPTIONS(url, key_file)                                                                  \
    {"url", "URL", CLI_TEXT, &(url), "http://HOST:PORT, https://HOST or unix:PATH (default MESA_URL)"}, {    \
        "key-file", "FILE", CLI_TEXT, &(key_file), "the key is the file's first line (default MESA_API_KEY)" \
    }

// Whole-string numbers; the complaint begins with what is read.
bool cli_read_integer(const char *what, const char *text, int64_t *out);
bool cli_read_real(const char *what, const char *text, double *out);

// Column of explanations in --help.
void cli_print_option(const char *name, const char *value_name, const char *help);

#endif

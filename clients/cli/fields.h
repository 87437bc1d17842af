// SPDX-License-Identifier: Apache-2.0
// The fields of POST /v1/completions as command-line options: one row a field.
// Names are the contract's with '-' for '_'; --field NAME=JSON reaches any other.
#ifndef CLIENTS_CLI_FIELDS_H
#define CLIENTS_CLI_FIELDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "clients/cli/options.h"

typedef struct cli_field cli_field;

// NULL: no such field.
const cli_field *cli_field_find(const char *name, size_t length);
bool cli_field_takes_value(const cli_field *field);
// Puts the value into body; false: it does not parse, the reason is on standard error.
bool cli_field_set(const cli_field *field, const char *value, json_t *body);
// Rows of --help, without fields that a command's own options replace, or that it has no use for (lists NULL: none).
void cli_fields_print(const cli_option *own, size_t own_count, bool (*lists)(const char *name));

#endif

// SPDX-License-Identifier: Apache-2.0
// Command lines of the subcommands: a table of options that parses, checks and prints its own help.
// A subcommand declares its options once; what --help prints and what is accepted cannot differ.
#ifndef TRAINER_OPTIONS_H
#define TRAINER_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/status.h"

typedef enum trn_option_kind {
    TRN_FLAG,    // bool *: true when given
    TRN_STRING,  // const char **: borrowed from argv, not empty
    TRN_INTEGER, // int64_t *
    TRN_REAL,    // double *
    TRN_STRINGS, // trn_strings *: may be repeated
} trn_option_kind;

enum { TRN_MAX_STRINGS = 64 };

typedef struct trn_strings {
    const char *item[TRN_MAX_STRINGS];
    int count;
} trn_strings;

typedef struct trn_option {
    const char *name;       // without the dashes
    const char *value_name; // in the help; NULL for a flag
    trn_option_kind kind;
    void *target; // holds the default before parsing
    const char *help;
} trn_option;

typedef struct trn_command_line {
    const char *usage;   // "logits DIR [options]"
    const char *summary; // a sentence
    const trn_option *option;
    int options;
    int min_positional, max_positional;
} trn_command_line;

// Parses argv[1..]; positional arguments (borrowed) go to positional[0 .. max_positional). --help prints the help to
// stdout and sets *helped. Errors name the option.
ENG_CHECKED eng_status trn_options_parse(const trn_command_line *line, int argc, char **argv, const char **positional,
                                         int *positional_count, bool *helped, eng_error *error);

// Whole-string numbers; the error names what.
ENG_CHECKED eng_status trn_parse_integer(const char *what, const char *text, int64_t *out, eng_error *error);
ENG_CHECKED eng_status trn_parse_real(const char *what, const char *text, double *out, eng_error *error);

// What a subcommand ends with: prints a failure's words; the exit status is 2 where what was given is at fault and 1
// where the machine is.
int trn_command_end(const char *command, eng_status status, const eng_error *error);

#endif

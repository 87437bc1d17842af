// SPDX-License-Identifier: Apache-2.0
// Parses and prints command lines; see options.h.
// Options are "--name value" or "--name=value"; "--" ends them, and a lone "-" is positional.
#include "clients/cli/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/cli/cli.h"
#include "clients/cli/fields.h"

bool cli_read_integer(const char *what, const char *text, int64_t *out) {
    char *end = NULL;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno == ERANGE) {
        cli_complain("%s: \"%.40s\" is not an integer", what, text);
        return false;
    }
    *out = value;
    return true;
}

bool cli_read_real(const char *what, const char *text, double *out) {
    char *end = NULL;
    const double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value)) {
        cli_complain("%s: \"%.40s\" is not a number", what, text);
        return false;
    }
    *out = value;
    return true;
}

static bool read_range(const char *what, const char *text, cli_range *range) {
    const char *colon = strchr(text, ':');
    char low[32];

    if (!colon) {
        if (!cli_read_integer(what, text, &range->low))
            return false;
        range->high = range->low;
    } else {
        snprintf(low, sizeof low, "%.*s", (int)(colon - text), text);
        if (!cli_read_integer(what, low, &range->low) || !cli_read_integer(what, colon + 1, &range->high))
            return false;
    }
    if (range->low < 1 || range->high < range->low || range->high > 1 << 24) {
        cli_complain("%s: \"%.40s\" is neither N nor LOW:HIGH within 1..16777216", what, text);
        return false;
    }
    return true;
}

static bool read_list(const char *what, const char *text, cli_list *list) {
    list->count = 0;
    for (const char *at = text;; at++) {
        const size_t length = strcspn(at, ",");
        char item[64];
        if (list->count == CLI_MAX_LIST || length >= sizeof item) {
            cli_complain("%s: more than %d numbers, or too long a number", what, CLI_MAX_LIST);
            return false;
        }
        memcpy(item, at, length);
        item[length] = '\0';
        if (!cli_read_real(what, item, &list->value[list->count++]))
            return false;
        at += length;
        if (!*at)
            return true;
    }
}

static bool read_seconds(const char *what, const char *text, double *out) {
    enum { MOST = 1000000 };

    if (!cli_read_real(what, text, out))
        return false;
    if (*out >= 0 && *out <= MOST)
        return true;
    cli_complain("%s: not in 0..%d", what, MOST);
    return false;
}

static bool set_option(const cli_option *option, const char *value) {
    char word[64];

    snprintf(word, sizeof word, "--%s", option->name);
    switch (option->kind) {
    case CLI_FLAG:
        *(bool *)option->target = true;
        return true;
    case CLI_TEXT:
        *(const char **)option->target = value;
        return true;
    case CLI_INTEGER:
        return cli_read_integer(word, value, option->target);
    case CLI_REAL:
        return cli_read_real(word, value, option->target);
    case CLI_SECONDS:
        return read_seconds(word, value, option->target);
    case CLI_RANGE:
        return read_range(word, value, option->target);
    case CLI_LIST:
        return read_list(word, value, option->target);
    }
    return false;
}

void cli_print_option(const char *name, const char *value_name, const char *help) {
    enum { LEFT = 32, WIDTH = 100 };
    char left[64];
    size_t column = LEFT;

    snprintf(left, sizeof left, "  --%s %s", name, value_name ? value_name : "");
    printf("%-*s", LEFT - 1, left);
    while (*help) {
        const size_t length = strcspn(help, " ");
        if (column > LEFT && column + 1 + length > WIDTH) {
            printf("\n%*s", LEFT - 1, "");
            column = LEFT;
        }
        printf(" %.*s", (int)length, help);
        column += length + 1;
        help += length;
        help += strspn(help, " ");
    }
    putchar('\n');
}

static void print_help(const cli_command_line *line) {
    printf("usage: mesa %s\n\n%s\n\noptions:\n", line->usage, line->summary);
    for (size_t i = 0; i < line->option_count; i++)
        cli_print_option(line->options[i].name, line->options[i].value_name, line->options[i].help);
    cli_print_option("help", NULL, "print this and exit");
    if (line->takes_fields) {
        puts("\nfields of the request (ranges and defaults are the server's):");
        cli_fields_print(line->options, line->option_count, line->lists);
    }
}

typedef struct option_word {
    const char *name, *value; // value NULL: none after '='
    size_t length;
} option_word;

static const cli_option *find_option(const cli_command_line *line, const option_word *word) {
    for (size_t i = 0; i < line->option_count; i++)
        if (strlen(line->options[i].name) == word->length &&
            memcmp(line->options[i].name, word->name, word->length) == 0)
            return &line->options[i];
    return NULL;
}

// One option, its value perhaps in the next argument.
static bool take_option(const cli_command_line *line, const option_word *word, int argc, char **argv, int *at,
                        json_t *body) {
    const cli_option *option = find_option(line, word);
    const cli_field *field = !option && line->takes_fields ? cli_field_find(word->name, word->length) : NULL;
    const bool takes_value = option ? option->kind != CLI_FLAG : field && cli_field_takes_value(field);
    const char *value = word->value;

    if (!option && !field) {
        cli_complain("--%.*s: unknown option (see mesa %s --help)", (int)word->length, word->name, argv[0]);
        return false;
    }
    if (!takes_value && value) {
        cli_complain("--%.*s takes no value", (int)word->length, word->name);
        return false;
    }
    if (takes_value && !value) {
        if (*at + 1 == argc) {
            cli_complain("--%.*s needs a value", (int)word->length, word->name);
            return false;
        }
        value = argv[++*at];
    }
    return option ? set_option(option, value) : cli_field_set(field, value, body);
}

cli_parsed cli_options_parse(const cli_command_line *line, int argc, char **argv, json_t *body, const char **positional,
                             int *positional_count) {
    bool only_positional = false;

    *positional_count = 0;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (only_positional || strncmp(argument, "--", 2) != 0) {
            if (!only_positional && argument[0] == '-' && argument[1] && strcmp(argument, "-h") != 0) {
                cli_complain("%.20s: options begin with two dashes (a prompt that begins with one follows \"--\")",
                             argument);
                return CLI_WRONG;
            }
            if (!only_positional && strcmp(argument, "-h") == 0) {
                print_help(line);
                return CLI_HELPED;
            }
            if (*positional_count == line->max_positional) {
                cli_complain("unexpected argument \"%.60s\" (usage: mesa %s)", argument, line->usage);
                return CLI_WRONG;
            }
            positional[(*positional_count)++] = argument;
            continue;
        }
        if (strcmp(argument, "--") == 0) {
            only_positional = true;
            continue;
        }
        if (strcmp(argument, "--help") == 0) {
            print_help(line);
            return CLI_HELPED;
        }
        const char *name = argument + 2, *equals = strchr(name, '=');
        const option_word word = {.name = name,
                                  .value = equals ? equals + 1 : NULL,
                                  .length = equals ? (size_t)(equals - name) : strlen(name)};
        if (!take_option(line, &word, argc, argv, &i, body))
            return CLI_WRONG;
    }
    return CLI_PARSED;
}

int cli_parsed_exit(cli_parsed parsed) {
    return parsed == CLI_WRONG ? CLI_EXIT_USAGE : CLI_EXIT_OK;
}

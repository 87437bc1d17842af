// SPDX-License-Identifier: Apache-2.0
// Parses a subcommand's options from its table; see options.h.
//
// Options are "--name value" or "--name=value"; everything else is positional, and "--" ends the options.
#include "trainer/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/commands.h"

eng_status trn_parse_integer(const char *what, const char *text, int64_t *out, eng_error *error) {
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno == ERANGE)
        return eng_fail(error, ENG_INVALID, "%s: \"%.40s\" is not an integer", what, text);
    *out = value;
    return ENG_OK;
}

eng_status trn_parse_real(const char *what, const char *text, double *out, eng_error *error) {
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value))
        return eng_fail(error, ENG_INVALID, "%s: \"%.40s\" is not a number", what, text);
    *out = value;
    return ENG_OK;
}

static eng_status set_option(const trn_option *option, const char *value, eng_error *error) {
    char name[64];
    snprintf(name, sizeof name, "--%s", option->name);
    switch (option->kind) {
    case TRN_FLAG:
        *(bool *)option->target = true;
        return ENG_OK;
    case TRN_STRING:
        if (!value[0]) // often a variable of a shell that is not set
            return eng_fail(error, ENG_INVALID, "%s: empty", name);
        *(const char **)option->target = value;
        return ENG_OK;
    case TRN_INTEGER:
        return trn_parse_integer(name, value, option->target, error);
    case TRN_REAL:
        return trn_parse_real(name, value, option->target, error);
    case TRN_STRINGS: {
        trn_strings *strings = option->target;
        if (strings->count == TRN_MAX_STRINGS)
            return eng_fail(error, ENG_INVALID, "%s: given more than %d times", name, TRN_MAX_STRINGS);
        strings->item[strings->count++] = value;
        return ENG_OK;
    }
    }
    return eng_fail(error, ENG_INTERNAL, "%s: unknown kind of option", name);
}

static void print_help(const trn_command_line *line) {
    printf("usage: mesa-trainer %s\n\n%s\n", line->usage, line->summary);
    if (line->options > 0)
        printf("\noptions:\n");
    for (int i = 0; i < line->options; i++) {
        char left[64];
        const trn_option *option = &line->option[i];
        snprintf(left, sizeof left, "--%s %s", option->name, option->value_name ? option->value_name : "");
        printf("  %-28s %s\n", left, option->help);
    }
}

static const trn_option *find_option(const trn_command_line *line, const char *name, size_t length) {
    for (int i = 0; i < line->options; i++)
        if (strlen(line->option[i].name) == length && memcmp(line->option[i].name, name, length) == 0)
            return &line->option[i];
    return NULL;
}

// The words of a usage that name the command: "task mano" of "task mano --out DIR".
static int command_length(const char *usage) {
    const char *end = usage;
    while (islower((unsigned char)*end)) {
        end += strcspn(end, " ");
        if (*end == '\0' || !islower((unsigned char)end[1]))
            break;
        end++;
    }
    return (int)(end - usage);
}

eng_status trn_options_parse(const trn_command_line *line, int argc, char **argv, const char **positional,
                             int *positional_count, bool *helped, eng_error *error) {
    bool only_positional = false;
    int count = 0;
    *helped = false;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (only_positional || strncmp(argument, "--", 2) != 0) {
            if (count == line->max_positional)
                return eng_fail(error, ENG_INVALID, "unexpected argument \"%.60s\"; usage: mesa-trainer %s", argument,
                                line->usage);
            positional[count++] = argument;
            continue;
        }
        if (strcmp(argument, "--") == 0) {
            only_positional = true;
            continue;
        }
        if (strcmp(argument, "--help") == 0) {
            print_help(line);
            *helped = true;
            return ENG_OK;
        }
        const char *name = argument + 2, *equals = strchr(name, '=');
        const trn_option *option = find_option(line, name, equals ? (size_t)(equals - name) : strlen(name));
        if (!option)
            return eng_fail(error, ENG_INVALID, "unknown option \"%.60s\"; try mesa-trainer %.*s --help", argument,
                            command_length(line->usage), line->usage);
        if (option->kind == TRN_FLAG && equals)
            return eng_fail(error, ENG_INVALID, "--%s takes no value", option->name);
        const char *value = equals ? equals + 1 : NULL;
        if (option->kind != TRN_FLAG && !value) {
            if (i + 1 == argc)
                return eng_fail(error, ENG_INVALID, "--%s needs a value", option->name);
            value = argv[++i];
        }
        eng_status status = set_option(option, value, error);
        if (status != ENG_OK)
            return status;
    }
    if (count < line->min_positional)
        return eng_fail(error, ENG_INVALID, "too few arguments; usage: mesa-trainer %s", line->usage);
    *positional_count = count;
    return ENG_OK;
}

int trn_command_end(const char *command, eng_status status, const eng_error *error) {
    if (status == ENG_OK)
        return TRN_EXIT_OK;
    fprintf(stderr, "mesa-trainer %s: %s\n", command, error->text);
    bool given = status == ENG_INVALID || status == ENG_NOT_FOUND || status == ENG_FORMAT ||
                 status == ENG_UNSUPPORTED || status == ENG_TOO_LONG || status == ENG_CONFLICT;
    return given ? TRN_EXIT_USAGE : TRN_EXIT_FAILED;
}

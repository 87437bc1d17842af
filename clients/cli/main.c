// SPDX-License-Identifier: Apache-2.0
// mesa: finds the command and runs it.
// Exit statuses are listed in cli.h and in the manual page.
#include <stdio.h>
#include <string.h>

#include "clients/cli/cli.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
#define CLI_COMMAND_ROW(name, summary) {#name, summary, cli_command_##name},
    CLI_COMMANDS(CLI_COMMAND_ROW)
#undef CLI_COMMAND_ROW
};

static void print_usage(FILE *stream) {
    fputs("usage: mesa COMMAND [arguments]\n\ncommands:\n", stream);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(stream, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fputs(
        "\nmesa COMMAND --help tells more. The server is named by --url or MESA_URL (default http://127.0.0.1:8080).\n"
        "Exit status: 0 done, 1 the server said no, 2 usage, 3 no connection, 130 interrupted.\n",
        stream);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_usage(stderr);
        return CLI_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_usage(stdout);
        return CLI_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        puts("mesa " MESA_VERSION);
        return CLI_EXIT_OK;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    cli_complain("unknown command \"%.40s\" (see mesa --help)", argv[1]);
    return CLI_EXIT_USAGE;
}

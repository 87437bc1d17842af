// SPDX-License-Identifier: Apache-2.0
// mesa-trainer: the offline programs, one a subcommand (commands.h).
//
// This file only finds the subcommand and sets up the compute team's waiting: libgomp reads its environment when it is
// loaded, so the program sets it and executes itself once more. On few cores a waiting thread spins briefly (an
// operation's team is woken every few microseconds) and then sleeps, so that it never takes a core from the thread that
// works.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "trainer/commands.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
#define TRN_COMMAND_ROW(name, summary) {#name, summary, trn_command_##name},
    TRN_COMMANDS(TRN_COMMAND_ROW)
#undef TRN_COMMAND_ROW
};

static void set_team_waiting(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || sysconf(_SC_NPROCESSORS_ONLN) > 4)
        return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    setenv("GOMP_SPINCOUNT", "20000", 1);
    static const char self[] = "/proc/self/exe";
    char path[PATH_MAX];
    const ssize_t length = readlink(self, path, sizeof path - 1);
    if (length > 0) { // by its own path, so that the process keeps its name
        path[length] = '\0';
        execv(path, argv);
    }
    execv(self, argv); // when it fails the team waits as the library pleases
}

static void print_usage(FILE *stream) {
    fprintf(stream, "usage: mesa-trainer COMMAND [arguments]\n\ncommands:\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(stream, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(stream, "\nmesa-trainer COMMAND --help tells more.\n");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_usage(stderr);
        return TRN_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        print_usage(stdout);
        return TRN_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("mesa-trainer %s\n", MESA_VERSION);
        return TRN_EXIT_OK;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        if (strcmp(argv[1], commands[i].name) != 0)
            continue;
        set_team_waiting(argv);
        return commands[i].run(argc - 1, argv + 1);
    }
    fprintf(stderr, "mesa-trainer: unknown command \"%.40s\"\n", argv[1]);
    print_usage(stderr);
    return TRN_EXIT_USAGE;
}

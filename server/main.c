// SPDX-License-Identifier: Apache-2.0
// mesa-server: arguments, one re-execution for the compute team's sake, the server's life, exit status.
//
// Exit status: 0 ended as asked, 1 a fault while serving, 2 usage or configuration, 3 cannot listen, 4 a model cannot
// be loaded.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "server/config.h"
#include "server/keys.h"
#include "server/log.h"
#include "server/server.h"

enum { EXIT_FAULT = 1, EXIT_USAGE = 2, EXIT_LISTEN = 3, FEW_CORES = 4 };

// On few cores the compute team must not spin while it waits: the loop and the clients need the cores. The OpenMP
// library reads its environment when it is loaded, so the program starts itself again. OMP_WAIT_POLICY being set is
// what keeps this from happening twice.
static void settle_wait_policy(char **arguments) {
    if (getenv("OMP_WAIT_POLICY") || sysconf(_SC_NPROCESSORS_ONLN) > FEW_CORES)
        return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) != 0 || setenv("GOMP_SPINCOUNT", "20000", 0) != 0)
        return;
    static const char self[] = "/proc/self/exe";
    char path[PATH_MAX];
    const ssize_t length = readlink(self, path, sizeof path - 1);
    if (length > 0) { // by its own path, so that the process keeps its name
        path[length] = '\0';
        execv(path, arguments);
    }
    execv(self, arguments); // replaced on disk meanwhile
    // It runs without, too: only less smoothly.
}

// Each connection is a descriptor, and the soft limit is often 1024.
static void raise_descriptor_limit(void) {
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int print_config(const srv_config *config) {
    eng_error error = {0};

    if (srv_check_files(config, &error)) {
        fprintf(stderr, "mesa-server: %s\n", error.text);
        return EXIT_USAGE;
    }
    srv_config_print(config, stdout);
    return 0;
}

static int hash_key(void) {
    eng_error error = {0};

    if (srv_keys_print_hash(&error) == ENG_OK)
        return 0;
    fprintf(stderr, "mesa-server: %s\n", error.text);
    return EXIT_USAGE;
}

static int serve(const srv_config *config, srv_log *log) {
    srv_server *server = NULL;
    eng_error error = {0};

    raise_descriptor_limit();
    const eng_status status = srv_server_create(config, log, &server, &error);
    if (status) {
        srv_log_write(log, ENG_LOG_ERROR, "listen", "%s", error.text);
        return status == ENG_IO ? EXIT_LISTEN : status == ENG_INVALID ? EXIT_USAGE : EXIT_FAULT;
    }
    int result = EXIT_FAULT;
    if (srv_server_handle_signals(server))
        srv_log_write(log, ENG_LOG_ERROR, "signals", "signals cannot be handled");
    else
        result = srv_server_run(server);
    if (srv_server_loading(server))
        _exit(result); // a load cannot be interrupted, and nothing of it needs to be put away
    srv_server_free(server);
    return result;
}

int main(int argument_count, char **arguments) {
    extern char **environ;
    srv_config config;
    srv_config_action action;
    eng_error error = {0};

    if (srv_config_load(&config, argument_count, arguments, environ, &action, &error)) {
        fprintf(stderr, "mesa-server: %s\n", error.text);
        srv_config_free(&config);
        return EXIT_USAGE;
    }
    int result = 0;
    if (action == SRV_CONFIG_HELP)
        srv_config_help(stdout);
    else if (action == SRV_CONFIG_VERSION)
        puts("mesa-server " MESA_VERSION);
    else if (action == SRV_CONFIG_HASH_KEY)
        result = hash_key();
    else if (action == SRV_CONFIG_CHECK)
        result = print_config(&config);
    else {
        settle_wait_policy(arguments);
        srv_log *log = srv_log_create(STDERR_FILENO, (eng_log_level)config.log_level);
        result = log ? serve(&config, log) : EXIT_FAULT;
        srv_log_free(log);
    }
    srv_config_free(&config);
    return result;
}

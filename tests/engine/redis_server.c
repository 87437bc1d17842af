// SPDX-License-Identifier: Apache-2.0
// Starting, stopping and asking a redis-server; see redis_server.h.
//
// The server listens on no port, and keeps nothing on the disk unless the test's options say so.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/engine/redis_server.h"

#include <check.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/engine/temp_folder.h"

static pid_t server;

static bool installed(void) {
    char paths[4096];
    snprintf(paths, sizeof paths, "%s", getenv("PATH") ? getenv("PATH") : "");
    for (char *rest = paths, *folder; (folder = strsep(&rest, ":"));) {
        char file[4200];
        snprintf(file, sizeof file, "%s/redis-server", folder);
        if (access(file, X_OK) == 0)
            return true;
    }
    return false;
}

static void become_server(const char *options) {
    static char none[] = "";
    char command[1024], *words[64];
    int count = 0;
    snprintf(
        command, sizeof command,
        "redis-server --port 0 --unixsocket %s/redis.sock --dir %s --logfile redis.log --save , --appendonly no %s",
        temp_folder(), temp_folder(), options);
    for (char *rest = command, *word; count < 63 && (word = strsep(&rest, " "));)
        if (*word)
            words[count++] = strcmp(word, ",") == 0 ? none : word;
    words[count] = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int nowhere = open("/dev/null", O_RDWR);
    dup2(nowhere, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    execvp(words[0], words);
    _exit(127);
}

// An answer to PING that is no error: it listens and has read what it kept.
static bool answers(void) {
    char path[256];
    snprintf(path, sizeof path, "%s/redis.sock", temp_folder());
    redisContext *link = redisConnectUnixWithTimeout(path, (struct timeval){.tv_sec = 1});
    redisReply *reply = link && !link->err ? redisCommand(link, "PING") : NULL;
    bool well = reply && (reply->type == REDIS_REPLY_STATUS || strncmp(reply->str, "NOAUTH", 6) == 0);
    if (reply)
        freeReplyObject(reply);
    if (link)
        redisFree(link);
    return well;
}

bool redis_server_start(const char *options) {
    if (!installed())
        return false;
    server = fork();
    ck_assert_int_ge(server, 0);
    if (server == 0)
        become_server(options);
    for (int i = 0; !answers(); i++) {
        ck_assert_msg(i < 30000, "redis-server does not answer: %s", options);
        ck_assert_msg(waitpid(server, NULL, WNOHANG) == 0, "redis-server ended by itself: %s", options);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return true;
}

void redis_server_signal(int number) {
    ck_assert_int_eq(kill(server, number), 0);
}

void redis_server_kill(void) {
    if (server <= 0)
        return;
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    server = 0;
}

void redis_server_end(void) {
    redis_server_kill();
    temp_folder_remove();
}

const char *redis_server_place(void) {
    static char place[256];
    snprintf(place, sizeof place, "redis+unix://%s/redis.sock", temp_folder());
    return place;
}

redisContext *redis_server_connect(void) {
    char path[256];
    snprintf(path, sizeof path, "%s/redis.sock", temp_folder());
    redisContext *link = redisConnectUnix(path);
    ck_assert(link && !link->err);
    return link;
}

redisReply *redis_server_ask(redisContext *link, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    redisReply *reply = redisvCommand(link, format, arguments);
    va_end(arguments);
    ck_assert_msg(reply != NULL, "%s: %s", format, link->errstr);
    ck_assert_msg(reply->type != REDIS_REPLY_ERROR, "%s: %s", format, reply->str);
    return reply;
}

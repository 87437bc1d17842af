// SPDX-License-Identifier: Apache-2.0
// The thread of between.h.
//
// One connection at a time, waiting in short turns so that it can be ended at any moment.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/engine/between.h"

#include <check.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/engine/temp_folder.h"

static int unix_socket(const char *path, bool listening) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    const struct sockaddr *at = (const struct sockaddr *)&address;
    if (listening)
        ck_assert(bind(fd, at, sizeof address) == 0 && listen(fd, 8) == 0);
    else if (connect(fd, at, sizeof address) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool readable(const between *b, int fd) {
    while (!b->over) {
        struct pollfd at = {.fd = fd, .events = POLLIN};
        if (poll(&at, 1, 20) > 0)
            return true;
    }
    return false;
}

static bool send_all(int fd, const char *bytes, ssize_t count) {
    while (count > 0) {
        ssize_t sent = send(fd, bytes, (size_t)count, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        bytes += sent;
        count -= sent;
    }
    return true;
}

static void answer(between *b, int fd) {
    char bytes[65536];
    while (readable(b, fd) && recv(fd, bytes, sizeof bytes, 0) > 0)
        if (b->answer && !send_all(fd, b->answer, (ssize_t)strlen(b->answer)))
            break;
}

static int count_of(const char *bytes, size_t count, const char *word) {
    int found = 0;
    for (const char *at = bytes, *end = bytes + count; (at = memmem(at, (size_t)(end - at), word, strlen(word)));
         found++)
        at += strlen(word);
    return found;
}

static bool answer_instead(int fd, const char *text, const char *bytes, ssize_t count) {
    int commands = count_of(bytes, (size_t)count, "\nEVALSHA\r") + count_of(bytes, (size_t)count, "\nEVAL\r") +
                   count_of(bytes, (size_t)count, "\nTIME\r");
    for (int i = 0; i < commands; i++)
        if (!send_all(fd, text, (ssize_t)strlen(text)))
            return false;
    return true;
}

static void forward(between *b, int fd) {
    char bytes[16384];
    int server = unix_socket(temp_path("redis.sock"), false);
    ssize_t left = b->cuts > 0 ? rand_r(&b->seed) % 8000000 : INT32_MAX;
    while (server >= 0 && !b->over && left > 0) {
        struct pollfd at[2] = {{.fd = fd, .events = POLLIN}, {.fd = server, .events = POLLIN}};
        if (poll(at, 2, 20) <= 0)
            continue;
        ssize_t count = at[0].revents ? recv(fd, bytes, sizeof bytes, 0) : 0;
        const char *instead = b->instead;
        if (at[0].revents &&
            (count <= 0 || !(instead ? answer_instead(fd, instead, bytes, count) : send_all(server, bytes, count))))
            break;
        count = at[1].revents ? recv(server, bytes, sizeof bytes, 0) : 0;
        if (b->alters && count > 0 && rand_r(&b->seed) % 3 == 0)
            bytes[rand_r(&b->seed) % count] ^= (char)(1 << rand_r(&b->seed) % 8);
        if (at[1].revents && (count <= 0 || !send_all(fd, bytes, count < left ? count : left)))
            break;
        left -= count;
    }
    b->cuts -= left <= 0;
    if (server >= 0)
        close(server);
}

static void *stand_between(void *of) {
    between *b = of;
    while (readable(b, b->listener)) {
        int fd = accept(b->listener, NULL, NULL);
        b->accepted++;
        if (b->forwards)
            forward(b, fd);
        else
            answer(b, fd);
        close(fd);
    }
    return NULL;
}

const char *between_start(between *b) {
    static char at[256];
    b->listener = unix_socket(temp_path("between.sock"), true);
    snprintf(at, sizeof at, "redis+unix://%s", temp_path("between.sock"));
    ck_assert_int_eq(pthread_create(&b->thread, NULL, stand_between, b), 0);
    return at;
}

void between_end(between *b) {
    b->over = true;
    pthread_join(b->thread, NULL);
    close(b->listener);
    unlink(temp_path("between.sock"));
}

// SPDX-License-Identifier: Apache-2.0
// Listening sockets. A unix socket's path may be left over from a process that died: it is replaced only when it is a
// socket on which nobody answers. Main thread, before the loop runs.
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "server/server.h"

static bool is_unix(const char *where) {
    return strncmp(where, "unix:", 5) == 0;
}

static eng_status fail_at(eng_error *error, const char *where, const char *what, int number) {
    return eng_fail(error, ENG_IO, "cannot listen on %s: %s%s%s", where, what, number ? ": " : "",
                    number ? strerror(number) : "");
}

// Removes a socket that nobody listens on; a missing path is fine.
static eng_status clear_path(const char *where, const struct sockaddr_un *name, eng_error *error) {
    struct stat info;

    if (lstat(name->sun_path, &info) != 0)
        return errno == ENOENT ? ENG_OK : fail_at(error, where, "the path", errno);
    if (!S_ISSOCK(info.st_mode))
        return fail_at(error, where, "the path exists and is not a socket", 0);
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return fail_at(error, where, "socket", errno);
    const int result = connect(probe, (const struct sockaddr *)name, sizeof *name), fault = errno;
    close(probe);
    // EAGAIN: a listener with a full backlog.
    if (result == 0 || fault != ECONNREFUSED)
        return fail_at(error, where, "another process listens there", 0);
    if (unlink(name->sun_path) != 0)
        return fail_at(error, where, "the stale socket cannot be removed", errno);
    return ENG_OK;
}

static eng_status listen_unix(const char *where, int64_t mode, int *descriptor, eng_error *error) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    const char *path = where + strlen("unix:");

    if (strlen(path) >= sizeof name.sun_path)
        return fail_at(error, where, "the path is longer than a socket's may be (107 bytes)", 0);
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    if (clear_path(where, &name, error))
        return ENG_IO;
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return fail_at(error, where, "socket", errno);
    // No access between bind and chmod; this runs before there is another thread that could create files.
    const mode_t before = umask(0777);
    const int bound = bind(fd, (const struct sockaddr *)&name, sizeof name), fault = errno;
    umask(before);
    if (bound != 0) {
        close(fd);
        return fail_at(error, where, "bind", fault);
    }
    if (chmod(path, (mode_t)mode) != 0 || listen(fd, SRV_LISTEN_BACKLOG) != 0) {
        fail_at(error, where, "chmod or listen", errno);
        unlink(path);
        close(fd);
        return ENG_IO;
    }
    *descriptor = fd;
    return ENG_OK;
}

static bool is_loopback(const struct sockaddr *name) {
    if (name->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)name)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    if (name->sa_family != AF_INET6)
        return false;
    const struct in6_addr *address = &((const struct sockaddr_in6 *)name)->sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(address) || (IN6_IS_ADDR_V4MAPPED(address) && address->s6_addr[12] == IN_LOOPBACKNET);
}

static void print_address(int fd, char *address, size_t size) {
    struct sockaddr_storage name;
    socklen_t length = sizeof name;
    char host[NI_MAXHOST], port[NI_MAXSERV];

    snprintf(address, size, "http://?");
    if (getsockname(fd, (struct sockaddr *)&name, &length) == 0 &&
        getnameinfo((struct sockaddr *)&name, length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) == 0)
        snprintf(address, size, name.ss_family == AF_INET6 ? "http://[%s]:%s" : "http://%s:%s", host, port);
}

// The host without brackets and the port of "HOST:PORT"; config.c has checked the form.
static bool split_address(const char *where, char *host, size_t size, const char **port) {
    const char *colon = strrchr(where, ':');
    if (!colon)
        return false;
    size_t length = (size_t)(colon - where);
    if (length >= 2 && where[0] == '[' && where[length - 1] == ']') {
        where++;
        length -= 2;
    }
    if (length == 0 || length >= size)
        return false;
    memcpy(host, where, length);
    host[length] = '\0';
    *port = colon + 1;
    return true;
}

// The addresses that "HOST:PORT" stands for: freeaddrinfo.
static eng_status resolve(const char *where, struct addrinfo **found, eng_error *error) {
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    char host[256];
    const char *port;

    if (!split_address(where, host, sizeof host, &port))
        return fail_at(error, where, "not HOST:PORT", 0);
    const int result = getaddrinfo(strcmp(host, "*") == 0 ? NULL : host, port, &hints, found);
    return result == 0 ? ENG_OK : fail_at(error, where, gai_strerror(result), 0);
}

eng_status srv_listen_local(const char *where, bool *local, eng_error *error) {
    struct addrinfo *found = NULL;

    *local = true;
    if (is_unix(where))
        return ENG_OK;
    const eng_status status = resolve(where, &found, error);
    for (const struct addrinfo *at = found; at; at = at->ai_next)
        *local = *local && is_loopback(at->ai_addr);
    if (found)
        freeaddrinfo(found);
    return status;
}

static eng_status listen_tcp(const char *where, int *descriptor, char *address, size_t size, eng_error *error) {
    struct addrinfo *found = NULL;

    if (resolve(where, &found, error))
        return ENG_IO;
    int fd = -1, fault = 0;
    for (const struct addrinfo *at = found; at && fd < 0; at = at->ai_next) {
        fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol);
        const int on = 1;
        if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
            bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SRV_LISTEN_BACKLOG) == 0)
            break;
        fault = errno;
        if (fd >= 0)
            close(fd);
        fd = -1;
    }
    freeaddrinfo(found);
    if (fd < 0)
        return fail_at(error, where, "bind", fault);
    print_address(fd, address, size);
    *descriptor = fd;
    return ENG_OK;
}

eng_status srv_listen(const char *where, int64_t mode, int *descriptor, char *address, size_t size, eng_error *error) {
    if (!is_unix(where))
        return listen_tcp(where, descriptor, address, size, error);
    snprintf(address, size, "%s", where);
    return listen_unix(where, mode, descriptor, error);
}

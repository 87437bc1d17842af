// SPDX-License-Identifier: Apache-2.0
// Sockets between ranks; see rank_link.h.
// A host that vanishes is noticed by the system, which probes connections while they are idle. No limit is set for what
// is on its way: a rank that computes does not read.
#include "trainer/rank_link.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "trainer/progress.h"

enum { BACKLOG = 4096 };

static const double pause_seconds = 0.05; // between two attempts to connect

static void set_option(int fd, int level, int name, int value) {
    (void)setsockopt(fd, level, name, &value, sizeof value); // an option that is missing costs a later notice alone
}

static int prepare(int fd) {
    if (fd < 0)
        return -1;
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
    return fd;
}

void trn_link_close(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
    const struct in6_addr *six = &((const struct sockaddr_in6 *)address)->sin6_addr;
    return address->sa_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(six) || (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == 127));
}

static eng_status resolve(const char *address, int32_t port, int flags, struct addrinfo **out, eng_error *error) {
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags};
    int fault = getaddrinfo(address, service, &hints, out);
    if (fault == 0)
        return ENG_OK;
    return eng_fail(error, ENG_INVALID, "%.80s: %s", address, gai_strerror(fault));
}

static bool names_loopback(const char *address) {
    struct addrinfo *found = NULL;
    if (strcmp(address, "localhost") == 0)
        return true;
    if (resolve(address, 0, AI_NUMERICHOST, &found, NULL) != ENG_OK)
        return false;
    bool loopback = is_loopback(found->ai_addr);
    freeaddrinfo(found);
    return loopback;
}

static int try_listen(const struct addrinfo *at) {
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (at->ai_family == AF_INET6)
        set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int fault = errno;
    close(fd);
    errno = fault;
    return -1;
}

static int32_t port_of(int fd) {
    struct sockaddr_storage own = {0};
    socklen_t length = sizeof own;
    if (getsockname(fd, (struct sockaddr *)&own, &length) != 0)
        return 0;
    return own.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&own)->sin6_port)
                                     : ntohs(((struct sockaddr_in *)&own)->sin_port);
}

eng_status trn_link_listen(const char *address, int32_t *port, int *fd, eng_error *error) {
    struct addrinfo *found = NULL;
    const bool local = names_loopback(address);
    const char *at = local ? address : "::";
    eng_status status = resolve(at, *port, local ? 0 : AI_NUMERICHOST, &found, error);
    if (status != ENG_OK)
        return status;
    *fd = try_listen(found);
    freeaddrinfo(found);
    if (*fd < 0 && errno == EAFNOSUPPORT && !local &&
        resolve("0.0.0.0", *port, AI_NUMERICHOST, &found, NULL) == ENG_OK) {
        *fd = try_listen(found);
        freeaddrinfo(found);
    }
    if (*fd < 0)
        return eng_fail(error, ENG_IO, "%.80s port %d: cannot listen: %s%s", address, *port, strerror(errno),
                        errno == EADDRINUSE ? "; MASTER_PORT chooses another" : "");
    *port = port_of(*fd);
    return ENG_OK;
}

// -1 with errno where nobody is there.
static int try_connect(const struct addrinfo *at, double deadline) {
    int fd = prepare(socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int fault = 0;
    socklen_t length = sizeof fault;
    if (fd < 0)
        return -1;
    if (connect(fd, at->ai_addr, at->ai_addrlen) == 0)
        return fd;
    if (errno == EINPROGRESS) {
        struct pollfd one = {.fd = fd, .events = POLLOUT};
        double left = deadline - trn_seconds();
        int came = poll(&one, 1, left > 0 ? (int)(1000 * (left < 1000 ? left : 1000)) : 0);
        if (came <= 0)
            fault = ETIMEDOUT;
        else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &fault, &length) != 0)
            fault = errno;
        if (fault == 0)
            return fd;
        errno = fault;
    }
    fault = errno;
    close(fd);
    errno = fault;
    return -1;
}

eng_status trn_link_connect(const char *address, int32_t port, double deadline, int *fd, eng_error *error) {
    *fd = -1;
    for (;;) {
        struct addrinfo *found = NULL;
        eng_error unresolved = {0}; // a name may come up later than a rank
        eng_status status = resolve(address, port, 0, &found, &unresolved);
        int fault = 0;
        for (const struct addrinfo *at = found; status == ENG_OK && *fd < 0 && at; at = at->ai_next) {
            *fd = try_connect(at, deadline);
            fault = errno;
        }
        if (found)
            freeaddrinfo(found);
        if (*fd >= 0)
            return ENG_OK;
        if (trn_seconds() >= deadline)
            return eng_fail(error, ENG_IO, "%.80s port %d: nobody answers: %.80s", address, port,
                            status == ENG_OK ? strerror(fault) : unresolved.text);
        nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * pause_seconds)}, NULL);
    }
}

int trn_link_accept(int listener) {
    int fd = accept(listener, NULL, NULL);
    if (fd >= 0 && (fcntl(fd, F_SETFL, O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0))
        trn_link_close(&fd);
    return prepare(fd);
}

static bool would_block(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

eng_status trn_link_push(int fd, const void *data, size_t bytes, size_t *at) {
    ssize_t moved = *at < bytes ? send(fd, (const char *)data + *at, bytes - *at, MSG_NOSIGNAL) : 0;
    if (moved < 0)
        return would_block() ? ENG_OK : ENG_IO;
    *at += (size_t)moved;
    return ENG_OK;
}

eng_status trn_link_pull(int fd, void *data, size_t bytes, size_t *at) {
    if (*at == bytes)
        return ENG_OK;
    ssize_t moved = recv(fd, (char *)data + *at, bytes - *at, 0);
    if (moved < 0)
        return would_block() ? ENG_OK : ENG_IO;
    *at += (size_t)moved;
    return moved > 0 ? ENG_OK : ENG_IO;
}

static eng_status await(int fd, short events, double deadline) {
    struct pollfd one = {.fd = fd, .events = events};
    double left = deadline - trn_seconds();
    if (left <= 0)
        return ENG_BUSY;
    return poll(&one, 1, (int)(1000 * (left < 1000 ? left : 1000)) + 1) < 0 && errno != EINTR ? ENG_IO : ENG_OK;
}

eng_status trn_link_send(int fd, const void *data, size_t bytes, double deadline) {
    size_t at = 0;
    eng_status status = trn_link_push(fd, data, bytes, &at);
    while (status == ENG_OK && at < bytes) {
        status = await(fd, POLLOUT, deadline);
        if (status == ENG_OK)
            status = trn_link_push(fd, data, bytes, &at);
    }
    return status;
}

eng_status trn_link_receive(int fd, void *data, size_t bytes, double deadline) {
    size_t at = 0;
    eng_status status = trn_link_pull(fd, data, bytes, &at);
    while (status == ENG_OK && at < bytes) {
        status = await(fd, POLLIN, deadline);
        if (status == ENG_OK)
            status = trn_link_pull(fd, data, bytes, &at);
    }
    return status;
}

int trn_link_peek(int fd, void *data, size_t bytes) {
    ssize_t there = recv(fd, data, bytes, MSG_PEEK);
    if (there < 0)
        return would_block() ? 0 : -1;
    return there > 0 ? (int)there : -1;
}

bool trn_link_peer(int fd, char *text, size_t size) {
    static const char mapped[] = "::ffff:";
    struct sockaddr_storage peer = {0};
    socklen_t length = sizeof peer;
    text[0] = '\0';
    if (getpeername(fd, (struct sockaddr *)&peer, &length) != 0 || is_loopback((struct sockaddr *)&peer))
        return false;
    if (getnameinfo((struct sockaddr *)&peer, length, text, (socklen_t)size, NULL, 0, NI_NUMERICHOST) != 0)
        return false;
    if (strncmp(text, mapped, sizeof mapped - 1) == 0 && strchr(text, '.'))
        memmove(text, text + sizeof mapped - 1, strlen(text) - (sizeof mapped - 1) + 1);
    return true;
}

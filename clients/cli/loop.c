// SPDX-License-Identifier: Apache-2.0
// libcurl's socket interface on epoll, a timer descriptor and a signal descriptor; see loop.h.
// The descriptors of alarm and signals are told from sockets by their numbers.
#include "clients/cli/loop.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "clients/cli/cli.h"

enum { BATCH = 64, NEVER_MS = 1000 };

struct cli_loop {
    cli_loop_calls calls;
    void *context;
    CURLM *multi;
    int epoll, timer, signals;
    sigset_t previous;
    int64_t curl_due; // 0: libcurl waits for sockets alone
    bool stopped;
};

static int on_socket(CURL *easy, curl_socket_t socket, int what, void *context, void *of_socket) {
    cli_loop *loop = context;
    struct epoll_event event = {.data.fd = socket};

    (void)easy;
    (void)of_socket;
    if (what == CURL_POLL_REMOVE) {
        epoll_ctl(loop->epoll, EPOLL_CTL_DEL, socket, NULL);
        return 0;
    }
    if (what & CURL_POLL_IN)
        event.events |= EPOLLIN;
    if (what & CURL_POLL_OUT)
        event.events |= EPOLLOUT;
    if (epoll_ctl(loop->epoll, EPOLL_CTL_MOD, socket, &event) == 0)
        return 0;
    return epoll_ctl(loop->epoll, EPOLL_CTL_ADD, socket, &event) == 0 ? 0 : -1;
}

static int on_timer(CURLM *multi, long milliseconds, void *context) {
    cli_loop *loop = context;

    (void)multi;
    loop->curl_due = milliseconds < 0 ? 0 : cli_now() + (int64_t)milliseconds * 1000000;
    return 0;
}

static bool watch(cli_loop *loop, int descriptor) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = descriptor};
    return descriptor >= 0 && epoll_ctl(loop->epoll, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

static bool open_descriptors(cli_loop *loop) {
    sigset_t signals;

    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, &loop->previous);
    loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    loop->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    loop->signals = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    return loop->epoll >= 0 && watch(loop, loop->timer) && watch(loop, loop->signals);
}

cli_loop *cli_loop_create(const cli_loop_calls *calls, void *context) {
    cli_loop *loop = calloc(1, sizeof *loop);

    if (!loop) {
        cli_complain("out of memory");
        return NULL;
    }
    *loop = (cli_loop){.calls = *calls, .context = context, .epoll = -1, .timer = -1, .signals = -1};
    const bool opened = open_descriptors(loop);
    if (!opened)
        cli_complain("the event loop cannot be made: %s", strerror(errno));
    loop->multi = curl_multi_init();
    CURLMcode fault = loop->multi ? CURLM_OK : CURLM_OUT_OF_MEMORY;
    if (!fault) {
        fault |= curl_multi_setopt(loop->multi, CURLMOPT_SOCKETFUNCTION, on_socket);
        fault |= curl_multi_setopt(loop->multi, CURLMOPT_SOCKETDATA, loop);
        fault |= curl_multi_setopt(loop->multi, CURLMOPT_TIMERFUNCTION, on_timer);
        fault |= curl_multi_setopt(loop->multi, CURLMOPT_TIMERDATA, loop);
    }
    if (opened && !fault)
        return loop;
    cli_loop_free(loop);
    return NULL;
}

void cli_loop_free(cli_loop *loop) {
    if (!loop)
        return;
    curl_multi_cleanup(loop->multi);
    const int descriptors[] = {loop->signals, loop->timer, loop->epoll};
    for (size_t i = 0; i < sizeof descriptors / sizeof *descriptors; i++)
        if (descriptors[i] >= 0)
            close(descriptors[i]);
    sigprocmask(SIG_SETMASK, &loop->previous, NULL);
    free(loop);
}

bool cli_loop_add(cli_loop *loop, CURL *easy) {
    return curl_multi_add_handle(loop->multi, easy) == CURLM_OK;
}

void cli_loop_remove(cli_loop *loop, CURL *easy) {
    curl_multi_remove_handle(loop->multi, easy);
}

void cli_loop_alarm(cli_loop *loop, int64_t at) {
    const struct itimerspec when = {.it_value = {.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000}};
    timerfd_settime(loop->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

void cli_loop_stop(cli_loop *loop) {
    loop->stopped = true;
}

static void take_done(cli_loop *loop) {
    int left;
    for (CURLMsg *message; !loop->stopped && (message = curl_multi_info_read(loop->multi, &left));) {
        if (message->msg != CURLMSG_DONE)
            continue;
        CURL *easy = message->easy_handle;
        const CURLcode result = message->data.result;
        curl_multi_remove_handle(loop->multi, easy);
        loop->calls.done(loop->context, easy, result);
    }
}

static void take_event(cli_loop *loop, const struct epoll_event *event) {
    uint64_t expirations;
    struct signalfd_siginfo signal;
    int running;

    if (event->data.fd == loop->timer) {
        if (read(loop->timer, &expirations, sizeof expirations) > 0 && loop->calls.alarm)
            loop->calls.alarm(loop->context);
        return;
    }
    if (event->data.fd == loop->signals) {
        while (read(loop->signals, &signal, sizeof signal) > 0)
            loop->calls.interrupted(loop->context);
        return;
    }
    int ready = 0;
    if (event->events & EPOLLIN)
        ready |= CURL_CSELECT_IN;
    if (event->events & EPOLLOUT)
        ready |= CURL_CSELECT_OUT;
    if (event->events & (EPOLLERR | EPOLLHUP))
        ready |= CURL_CSELECT_IN | CURL_CSELECT_ERR;
    curl_multi_socket_action(loop->multi, event->data.fd, ready, &running);
}

void cli_loop_run(cli_loop *loop) {
    struct epoll_event events[BATCH];
    int running;

    while (!loop->stopped) {
        int wait = NEVER_MS;
        if (loop->curl_due) {
            const int64_t left = (loop->curl_due - cli_now() + 999999) / 1000000;
            wait = left < 0 ? 0 : left < NEVER_MS ? (int)left : NEVER_MS;
        }
        const int count = epoll_wait(loop->epoll, events, BATCH, wait);
        for (int i = 0; i < count && !loop->stopped; i++)
            take_event(loop, &events[i]);
        if (loop->curl_due && cli_now() >= loop->curl_due) {
            loop->curl_due = 0;
            curl_multi_socket_action(loop->multi, CURL_SOCKET_TIMEOUT, 0, &running);
        }
        take_done(loop);
    }
}

// SPDX-License-Identifier: Apache-2.0
// The event loop on libuv: the one file that knows libuv's types.
//
// Each handle is allocated with the caller's function beside it and freed in its close callback, as libuv's lifetime
// law asks: after a successful init it must be closed, and its memory may go only then.
#include "server/loop.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <uv.h>

enum { MOST_SIGNALS = 3 };

struct srv_loop {
    uv_loop_t uv;
    struct signal_watch {
        uv_signal_t uv;
        srv_loop_fn fn;
        void *context;
    } signals[MOST_SIGNALS];
    int signals_ready; // initialised, to be closed
    unsigned offloaded;
};

struct srv_watch {
    uv_poll_t uv;
    srv_watch_kind kind;
    srv_loop_fn fn;
    void *context;
};

struct srv_timer {
    uv_timer_t uv;
    srv_loop_fn fn;
    void *context;
};

// An eventfd of its own instead of libuv's: that one lets the loop thread spin until the sender is out of its call, and
// a sender is often put off the processor right there, by the thread that it woke.
struct srv_wake {
    uv_poll_t uv;
    int descriptor;
    srv_loop_fn fn;
    void *context;
};

typedef struct offload {
    uv_work_t uv;
    srv_loop *loop;
    srv_loop_fn work, done;
    void *context;
} offload;

static eng_status status_of(int result) {
    if (result == 0)
        return ENG_OK;
    return result == UV_ENOMEM ? ENG_NO_MEMORY : ENG_IO;
}

static void free_handle(uv_handle_t *handle) {
    free(handle->data);
}

// ---- loop ----------------------------------------------------------------------------------------------------------

eng_status srv_loop_create(srv_loop **out) {
    srv_loop *loop = calloc(1, sizeof *loop);
    if (!loop)
        return ENG_NO_MEMORY;
    const eng_status status = status_of(uv_loop_init(&loop->uv));
    if (status) {
        free(loop);
        return status;
    }
    *out = loop;
    return ENG_OK;
}

void srv_loop_run(srv_loop *loop) {
    uv_run(&loop->uv, UV_RUN_DEFAULT);
}

void srv_loop_stop(srv_loop *loop) {
    uv_stop(&loop->uv);
}

void srv_loop_free(srv_loop *loop) {
    if (!loop)
        return;
    for (int i = 0; i < loop->signals_ready; i++)
        uv_close((uv_handle_t *)&loop->signals[i].uv, NULL);
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    uv_loop_close(&loop->uv);
    free(loop);
}

uint64_t srv_loop_now(const srv_loop *loop) {
    return uv_now(&loop->uv);
}

static void on_signal(uv_signal_t *handle, int number) {
    const struct signal_watch *watch = handle->data;
    (void)number;
    watch->fn(watch->context);
}

static eng_status watch_signal(srv_loop *loop, int number, srv_loop_fn fn, void *context) {
    if (loop->signals_ready == MOST_SIGNALS)
        return ENG_FULL;
    struct signal_watch *watch = &loop->signals[loop->signals_ready];
    const eng_status status = status_of(uv_signal_init(&loop->uv, &watch->uv));
    if (status)
        return status;
    loop->signals_ready++;
    watch->uv.data = watch;
    watch->fn = fn;
    watch->context = context;
    return status_of(uv_signal_start(&watch->uv, on_signal, number));
}

eng_status srv_loop_on_terminate(srv_loop *loop, srv_loop_fn fn, void *context) {
    const eng_status status = watch_signal(loop, SIGTERM, fn, context);
    return status ? status : watch_signal(loop, SIGINT, fn, context);
}

eng_status srv_loop_on_reload(srv_loop *loop, srv_loop_fn fn, void *context) {
    return watch_signal(loop, SIGHUP, fn, context);
}

// ---- watches -------------------------------------------------------------------------------------------------------

eng_status srv_watch_create(srv_loop *loop, int descriptor, srv_watch_kind kind, srv_loop_fn fn, void *context,
                            srv_watch **out) {
    srv_watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        return ENG_NO_MEMORY;
    const eng_status status = status_of(uv_poll_init(&loop->uv, &watch->uv, descriptor));
    if (status) {
        free(watch);
        return status;
    }
    watch->uv.data = watch;
    watch->kind = kind;
    watch->fn = fn;
    watch->context = context;
    *out = watch;
    return ENG_OK;
}

static void on_poll(uv_poll_t *handle, int status, int events) {
    srv_watch *watch = handle->data;
    (void)status; // a reset may come as an error: the same news
    (void)events;
    if (watch->kind == SRV_WATCH_HANGUP)
        uv_poll_stop(handle);
    watch->fn(watch->context);
}

eng_status srv_watch_start(srv_watch *watch) {
    return status_of(uv_poll_start(&watch->uv, watch->kind == SRV_WATCH_HANGUP ? UV_DISCONNECT : UV_READABLE, on_poll));
}

void srv_watch_stop(srv_watch *watch) {
    uv_poll_stop(&watch->uv);
}

void srv_watch_close(srv_watch *watch) {
    if (watch)
        uv_close((uv_handle_t *)&watch->uv, free_handle);
}

// ---- timers --------------------------------------------------------------------------------------------------------

eng_status srv_timer_create(srv_loop *loop, srv_loop_fn fn, void *context, srv_timer **out) {
    srv_timer *timer = calloc(1, sizeof *timer);
    if (!timer)
        return ENG_NO_MEMORY;
    uv_timer_init(&loop->uv, &timer->uv); // cannot fail
    timer->uv.data = timer;
    timer->fn = fn;
    timer->context = context;
    *out = timer;
    return ENG_OK;
}

static void on_timer(uv_timer_t *handle) {
    srv_timer *timer = handle->data;
    timer->fn(timer->context);
}

void srv_timer_start(srv_timer *timer, uint64_t milliseconds, uint64_t repeat) {
    uv_timer_start(&timer->uv, on_timer, milliseconds, repeat);
}

void srv_timer_stop(srv_timer *timer) {
    uv_timer_stop(&timer->uv);
}

void srv_timer_close(srv_timer *timer) {
    if (timer)
        uv_close((uv_handle_t *)&timer->uv, free_handle);
}

// ---- wakes ---------------------------------------------------------------------------------------------------------

static void on_wake(uv_poll_t *handle, int status, int events) {
    srv_wake *wake = handle->data;
    eventfd_t count;
    (void)status;
    (void)events;
    if (eventfd_read(wake->descriptor, &count) == 0)
        wake->fn(wake->context);
}

static void free_wake(uv_handle_t *handle) {
    srv_wake *wake = handle->data;
    close(wake->descriptor);
    free(wake);
}

eng_status srv_wake_create(srv_loop *loop, srv_loop_fn fn, void *context, srv_wake **out) {
    srv_wake *wake = calloc(1, sizeof *wake);
    if (!wake)
        return ENG_NO_MEMORY;
    wake->fn = fn;
    wake->context = context;
    wake->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake->descriptor < 0 || uv_poll_init(&loop->uv, &wake->uv, wake->descriptor)) {
        if (wake->descriptor >= 0)
            close(wake->descriptor);
        free(wake);
        return ENG_IO;
    }
    wake->uv.data = wake;
    if (uv_poll_start(&wake->uv, UV_READABLE, on_wake)) {
        srv_wake_close(wake);
        return ENG_IO;
    }
    *out = wake;
    return ENG_OK;
}

void srv_wake_send(srv_wake *wake) {
    (void)eventfd_write(wake->descriptor, 1); // cannot fail below 2^64 - 1 sends
}

void srv_wake_close(srv_wake *wake) {
    if (wake)
        uv_close((uv_handle_t *)&wake->uv, free_wake);
}

// ---- work off the loop ---------------------------------------------------------------------------------------------

static void on_work(uv_work_t *request) {
    offload *job = request->data;
    job->work(job->context);
}

static void on_done(uv_work_t *request, int status) {
    offload *job = request->data;
    const offload copy = *job;
    (void)status; // work is never cancelled
    free(job);
    copy.loop->offloaded--;
    copy.done(copy.context);
}

eng_status srv_loop_offload(srv_loop *loop, srv_loop_fn work, srv_loop_fn done, void *context) {
    offload *job = malloc(sizeof *job);
    if (!job)
        return ENG_NO_MEMORY;
    *job = (offload){.loop = loop, .work = work, .done = done, .context = context};
    job->uv.data = job;
    const eng_status status = status_of(uv_queue_work(&loop->uv, &job->uv, on_work, on_done));
    if (status) {
        free(job);
        return status;
    }
    loop->offloaded++;
    return ENG_OK;
}

unsigned srv_loop_offloaded(const srv_loop *loop) {
    return loop->offloaded;
}

// SPDX-License-Identifier: Apache-2.0
// The event loop, without the types of the library beneath it.
//
// A loop is run by one thread, the loop thread. Watches, timers and wakes live on it: every function here belongs to
// the loop thread, except srv_wake_send, which any thread may call. A closed handle may be forgotten at once; its
// memory goes when the loop has let go of it. srv_loop_offload runs work on a small pool of threads and reports back on
// the loop thread; nothing that takes longer than a moment runs on the loop thread itself.
#ifndef SERVER_LOOP_H
#define SERVER_LOOP_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/status.h"

typedef struct srv_loop srv_loop;
typedef struct srv_watch srv_watch;
typedef struct srv_timer srv_timer;
typedef struct srv_wake srv_wake;
typedef void (*srv_loop_fn)(void *context);

ENG_CHECKED eng_status srv_loop_create(srv_loop **out);
void srv_loop_run(srv_loop *loop);  // until srv_loop_stop
void srv_loop_stop(srv_loop *loop); // at the end of the present turn
// Lets the loop deliver what is closing and frees it. Every handle must be closed, no work may be in flight.
void srv_loop_free(srv_loop *loop);
uint64_t srv_loop_now(const srv_loop *loop); // milliseconds; of the start of the present turn

// Calls fn while the descriptor is readable, or once its peer has hung up or half closed it (then the watch has
// stopped itself: the condition lasts).
typedef enum srv_watch_kind { SRV_WATCH_READABLE, SRV_WATCH_HANGUP } srv_watch_kind;
ENG_CHECKED eng_status srv_watch_create(srv_loop *loop, int descriptor, srv_watch_kind kind, srv_loop_fn fn,
                                        void *context, srv_watch **out);
ENG_CHECKED eng_status srv_watch_start(srv_watch *watch);
void srv_watch_stop(srv_watch *watch);
void srv_watch_close(srv_watch *watch); // NULL is accepted; before the descriptor is closed

ENG_CHECKED eng_status srv_timer_create(srv_loop *loop, srv_loop_fn fn, void *context, srv_timer **out);
void srv_timer_start(srv_timer *timer, uint64_t milliseconds, uint64_t repeat); // repeat 0: once
void srv_timer_stop(srv_timer *timer);
void srv_timer_close(srv_timer *timer); // NULL is accepted

// fn runs on the loop thread some time after a send; several sends may give one call.
ENG_CHECKED eng_status srv_wake_create(srv_loop *loop, srv_loop_fn fn, void *context, srv_wake **out);
void srv_wake_send(srv_wake *wake);  // any thread, until the wake is closed
void srv_wake_close(srv_wake *wake); // NULL is accepted

// Calls fn for SIGTERM and SIGINT, or for SIGHUP, from now on until the loop is freed.
ENG_CHECKED eng_status srv_loop_on_terminate(srv_loop *loop, srv_loop_fn fn, void *context);
ENG_CHECKED eng_status srv_loop_on_reload(srv_loop *loop, srv_loop_fn fn, void *context);

// work(context) on a thread of the pool, then done(context) on the loop thread.
ENG_CHECKED eng_status srv_loop_offload(srv_loop *loop, srv_loop_fn work, srv_loop_fn done, void *context);
unsigned srv_loop_offloaded(const srv_loop *loop); // still in flight

#endif

// SPDX-License-Identifier: Apache-2.0
// A thread that stands between a store and its server, or in the server's place.
//
// It listens on a unix socket in the case's folder and takes one connection after another: answers with a text or with
// silence, or forwards to the case's redis-server, cuts each connection after some bytes of its answers, alters some of
// them, or gives another answer instead.
#ifndef TESTS_ENGINE_BETWEEN_H
#define TESTS_ENGINE_BETWEEN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

typedef struct between {
    const char *answer; // to whatever is read; NULL: silence
    bool forwards, alters;
    _Atomic(const char *) instead; // to every script and TIME, which are not forwarded then
    atomic_int cuts;               // that are still to be made
    unsigned seed;
    atomic_int accepted;
    atomic_bool over;
    pthread_t thread;
    int listener;
} between;

const char *between_start(between *b); // its place, as a store's
void between_end(between *b);

#endif

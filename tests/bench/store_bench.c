// SPDX-License-Identifier: Apache-2.0
// Rates of a store: entries appended one after another and many at once, states put and read back.
//
// One client in this thread, the store in another, as a server has them. Every measurement runs for about as long as it
// is told and counts replies with ENG_OK alone. Prints rows of a Markdown table: what, a second, MB/s, and the median
// and 99th percentile of the time from submitting to the reply.
//
//   bench_store PLACE [SECONDS]     SECONDS a measurement, default 3
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/store.h"

enum { RECORDS = 64, MOST_BUFFERS = 8, MOST_TIMES = 1 << 20 };

static const size_t most_payload = 16 << 20;

typedef struct bench {
    eng_store *store;
    eng_store_client *client;
    uint64_t epoch[RECORDS];
    int64_t position[RECORDS];
    double begun[RECORDS];
    double *times;
    size_t count;
    pthread_mutex_t lock;
    pthread_cond_t replied;
    bool news;
} bench;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void *live(void *store) {
    eng_store_run(store);
    return NULL;
}

static void notify(void *context) {
    bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->news = true;
    pthread_cond_signal(&b->replied);
    pthread_mutex_unlock(&b->lock);
}

static void fail(const char *what, const char *why) {
    fprintf(stderr, "bench_store: %s: %s\n", what, why);
    exit(1);
}

static eng_store_reply *await(bench *b) {
    for (;;) {
        eng_store_reply *reply = eng_store_poll(b->client);
        if (reply)
            return reply;
        pthread_mutex_lock(&b->lock);
        while (!b->news)
            pthread_cond_wait(&b->replied, &b->lock);
        b->news = false;
        pthread_mutex_unlock(&b->lock);
    }
}

static void submit(bench *b, int record, eng_store_request *request) {
    eng_error error = {0};
    request->meta.kind = ENG_STORE_SESSION;
    request->meta.id[0] = (unsigned char)record;
    request->epoch = b->epoch[record];
    request->user = (void *)(intptr_t)record;
    b->begun[record] = now();
    if (eng_store_submit(b->client, request, &error) != ENG_OK)
        fail("submitting", error.text);
}

// The record whose request was answered; counts its time.
static int settle(bench *b, uint64_t *epoch) {
    eng_store_reply *reply = await(b);
    int record = (int)(intptr_t)reply->user;
    if (reply->status != ENG_OK)
        fail("a request", reply->error.text);
    if (b->count < MOST_TIMES)
        b->times[b->count++] = now() - b->begun[record];
    if (reply->buffer)
        eng_store_return_buffer(b->client, reply->buffer);
    if (epoch)
        *epoch = reply->epoch;
    eng_store_done(b->client, reply);
    return record;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(bench *b, const char *what, size_t bytes, int at_once, double seconds) {
    double rate = (double)b->count / seconds;
    qsort(b->times, b->count, sizeof *b->times, by_value);
    printf("| %s of %zu bytes, %d at once | %.0f | %.1f | %.3f | %.3f |\n", what, bytes, at_once, rate,
           rate * (double)bytes / 1e6, 1e3 * b->times[b->count / 2], 1e3 * b->times[b->count * 99 / 100]);
    fflush(stdout);
}

static void send_one(bench *b, eng_store_op op, int record, const void *bytes, size_t length) {
    eng_store_request request = {.op = op, .entry = bytes, .entry_bytes = length};
    if (op == ENG_STORE_LEASE)
        request.ttl_ms = 86400000;
    if (op == ENG_STORE_APPEND || op == ENG_STORE_PUT)
        request.meta.position = ++b->position[record];
    if (op == ENG_STORE_PUT || op == ENG_STORE_GET)
        request.buffer = eng_store_take_buffer(b->client);
    if (op == ENG_STORE_PUT) {
        memcpy(request.buffer->bytes, bytes, length);
        request.buffer->length = length;
    }
    submit(b, record, &request);
}

static void measure(bench *b, eng_store_op op, const char *what, const void *bytes, size_t length, int at_once,
                    double limit) {
    double begin = now();
    int under_way = 0;
    b->count = 0;
    for (; under_way < at_once; under_way++)
        send_one(b, op, under_way, bytes, length);
    while (under_way > 0) {
        int record = settle(b, NULL);
        if (now() - begin < limit)
            send_one(b, op, record, bytes, length);
        else
            under_way--;
    }
    print(b, what, length, at_once, now() - begin);
}

static void open_all(bench *b, const char *place, pthread_t *thread) {
    eng_error error = {0};
    eng_store_options options = {.place = place};
    eng_store_client_options client = {.requests = RECORDS,
                                       .buffers = MOST_BUFFERS,
                                       .buffer_bytes = most_payload + ENG_STORE_JOURNAL_BYTES,
                                       .notify = notify,
                                       .notify_context = b};
    b->times = malloc(sizeof *b->times * MOST_TIMES);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->replied, NULL);
    if (!b->times || eng_store_open(&options, &b->store, &error) != ENG_OK ||
        eng_store_client_open(b->store, &client, &b->client, &error) != ENG_OK ||
        pthread_create(thread, NULL, live, b->store) != 0)
        fail(place, error.text[0] ? error.text : "no memory");
    for (int i = 0; i < RECORDS; i++) {
        send_one(b, ENG_STORE_LEASE, i, NULL, 0);
        settle(b, &b->epoch[i]);
    }
}

int main(int count, char **words) {
    static bench b;
    static const size_t lengths[] = {65536, 4 << 20, 16 << 20};
    pthread_t thread;
    if (count < 2)
        fail("usage", "bench_store PLACE [SECONDS]");
    double limit = count > 2 ? atof(words[2]) : 3;
    unsigned char *bytes = malloc(most_payload);
    if (!bytes)
        fail("memory", "none");
    for (size_t i = 0; i < most_payload; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    open_all(&b, words[1], &thread);
    measure(&b, ENG_STORE_APPEND, "entries", bytes, 256, 1, limit);
    measure(&b, ENG_STORE_APPEND, "entries", bytes, 256, RECORDS, limit);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int at_once = 1; at_once <= MOST_BUFFERS; at_once *= MOST_BUFFERS) {
            measure(&b, ENG_STORE_PUT, "states put", bytes, lengths[i], at_once, limit);
            measure(&b, ENG_STORE_GET, "states read", bytes, lengths[i], at_once, limit);
        }
    eng_store_stop(b.store);
    pthread_join(thread, NULL);
    eng_store_client_close(b.client);
    eng_store_close(b.store);
    return 0;
}

// SPDX-License-Identifier: Apache-2.0
// What it costs that timelines outlive the process: the end of a request, parking and fetching, many that are idle.
//
// One engine in this thread and its store in another, as a server has them. Prints rows of a Markdown table: what,
// median and 99th percentile in ms, and bytes a second where bytes are moved. The same requests on a timeline without a
// name, and the prompt read anew, stand beside.
//
//   bench_durable MODEL PLACE [TOKENS [NAMES]]     TOKENS of a prompt, default 4000; NAMES at once, default 1000
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine.h"

enum { ROUNDS = 7, TURNS = 100, HANDED = 40, MOST_TIMES = 1 << 16, LEASE_MS = 15000 };

typedef struct bench {
    eng_engine *engine;
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool woken;
    bool ended, durable;
    bool answered;
    eng_answer answer;
    double times[MOST_TIMES];
    size_t count;
} bench;

static double now_ms(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return 1e3 * (double)at.tv_sec + 1e-6 * (double)at.tv_nsec;
}

static void *live(void *store) {
    eng_store_run(store);
    return NULL;
}

static void wake(void *context) {
    bench *b = context;
    pthread_mutex_lock(&b->lock);
    b->woken = true;
    pthread_cond_signal(&b->news);
    pthread_mutex_unlock(&b->lock);
}

_Noreturn static void stop(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void on_event(void *context, const eng_event *event) {
    bench *b = context;
    b->ended |= event->finish != ENG_FINISH_NONE;
    b->durable = event->durable;
    if (event->finish == ENG_FINISH_ERROR)
        stop("a request", event->message);
}

static void on_answer(void *user, const eng_answer *answer) {
    bench *b = user;
    b->answered = true;
    b->answer = *answer;
    if (answer->status)
        stop("an errand", answer->message);
}

// As a server's loop: waits where nothing runs.
static void step(bench *b) {
    eng_error error = {0};
    bool worked;
    if (eng_step(b->engine, on_event, b, &worked, &error))
        stop("a step", error.text);
    const int64_t patience = worked ? 0 : eng_idle_ms(b->engine);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t ns = until.tv_nsec + (patience < 0 ? 100 : patience) * 1000000;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    pthread_mutex_lock(&b->lock);
    while (patience != 0 && !b->woken && !pthread_cond_timedwait(&b->news, &b->lock, &until)) {
    }
    b->woken = false;
    pthread_mutex_unlock(&b->lock);
}

static void note(bench *b, double since) {
    if (b->count < MOST_TIMES)
        b->times[b->count++] = now_ms() - since;
}

static int by_time(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// bytes: of one; 0: nothing is moved.
static void print(bench *b, const char *what, double bytes) {
    qsort(b->times, b->count, sizeof *b->times, by_time);
    const double median = b->times[b->count / 2];
    printf("| %s | %.2f | %.2f |", what, median, b->times[b->count - 1 - b->count / 100]);
    if (bytes > 0)
        printf(" %.1f MB, %.0f MB/s |\n", bytes / 1e6, bytes / 1e3 / median);
    else
        printf(" |\n");
    b->count = 0;
}

static void send(bench *b, eng_errand errand, uint32_t id) {
    eng_error error = {0};
    memcpy(errand.name.id, &id, sizeof id);
    errand.name.owner[0] = 1;
    errand.owner = 1;
    errand.ttl_ms = 3600000;
    errand.done = on_answer;
    errand.user = b;
    b->answered = false;
    if (eng_send(b->engine, &errand, &error))
        stop("an errand", error.text);
}

static eng_answer ask(bench *b, eng_errand errand, uint32_t id) {
    send(b, errand, id);
    while (!b->answered)
        step(b);
    return b->answer;
}

static uint64_t create(bench *b, uint32_t name) {
    uint64_t id;
    eng_error error = {0};
    if (eng_timeline_create(b->engine, 1, &id, &error))
        stop("a timeline", error.text);
    if (name)
        (void)ask(b, (eng_errand){.kind = ENG_ERRAND_KEEP, .timeline = id}, name);
    return id;
}

static void turn(bench *b, uint64_t timeline, const int32_t *ids, size_t count, int64_t drawn) {
    eng_error error = {0};
    const eng_request request = {.ids = ids,
                                 .count = count,
                                 .max_tokens = drawn,
                                 .sampling = {.top_p = 1},
                                 .knobs = eng_info(b->engine)->default_knobs,
                                 .logprobs = -1,
                                 .ignore_eos = true,
                                 .timeline = timeline,
                                 .timeline_position = -1,
                                 .owner = 1};
    uint64_t id;
    b->ended = false;
    if (eng_submit(b->engine, &request, &id, &error))
        stop("a request", error.text);
    while (!b->ended)
        step(b);
}

static void measure_turns(bench *b, const int32_t *ids) {
    const uint64_t named = create(b, 1), plain = create(b, 0);
    int behind = 0;
    for (int kind = 0; kind < 2; kind++) {
        for (int i = 0; i < TURNS; i++) {
            const double since = now_ms();
            turn(b, kind ? named : plain, ids + i % 16, 1, 1);
            note(b, since);
            behind += kind && !b->durable;
        }
        print(b, kind ? "a request of one token, named" : "a request of one token, without a name", 0);
    }
    if (behind > 0)
        printf("| of these not durable: %d | | | |\n", behind);
    (void)ask(b, (eng_errand){.kind = ENG_ERRAND_DROP}, 1);
}

static void measure_parking(bench *b, const int32_t *ids, size_t tokens) {
    double spent[3][ROUNDS], bytes = 0;
    for (int i = 0; i < ROUNDS; i++) {
        const double begun = now_ms();
        turn(b, create(b, 2), ids, tokens, 1);
        spent[0][i] = now_ms() - begun;
        double since = now_ms();
        (void)ask(b, (eng_errand){.kind = ENG_ERRAND_PARK}, 2);
        spent[1][i] = now_ms() - since;
        since = now_ms();
        const eng_answer answer = ask(b, (eng_errand){.kind = ENG_ERRAND_FETCH}, 2);
        turn(b, answer.timeline, ids, 1, 1);
        spent[2][i] = now_ms() - since;
        bytes = (double)answer.record.bytes;
        (void)ask(b, (eng_errand){.kind = ENG_ERRAND_DROP}, 2);
    }
    static const char *const what[] = {"the prompt read", "parked", "fetched, and one token read"};
    for (int kind = 0; kind < 3; kind++) {
        memcpy(b->times, spent[kind], sizeof spent[kind]);
        b->count = ROUNDS;
        print(b, what[kind], kind > 0 ? bytes : 0);
    }
}

static void step_both(bench *a, bench *b) {
    bench *const all[] = {a, b};
    eng_error error = {0};
    bool any = false;
    for (int i = 0; i < 2; i++) {
        bool worked;
        if (eng_step(all[i]->engine, on_event, all[i], &worked, &error))
            stop("a step", error.text);
        any |= worked;
    }
    if (!any)
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

// Two engines on one store, each asking for what the other has and does not use, at any moment.
static void measure_handing_over(bench *b, const eng_options *options, const int32_t *ids, size_t tokens) {
    static bench other;
    bench *has = b, *wants = &other;
    eng_error error = {0};
    if (eng_open(options, &other.engine, &error))
        stop(options->model_dir, error.text);
    turn(b, create(b, 3), ids, tokens, 1);
    for (int i = 0; i < HANDED; i++) {
        for (const double until = now_ms() + 7 * i; now_ms() < until;)
            step_both(has, wants);
        const double since = now_ms();
        send(wants, (eng_errand){.kind = ENG_ERRAND_FETCH}, 3);
        while (!wants->answered)
            step_both(has, wants);
        note(b, since);
        turn(wants, wants->answer.timeline, ids, 1, 1);
        bench *const had = has;
        has = wants;
        wants = had;
    }
    print(b, "asked for by another engine, until it is there", 0);
    (void)ask(has, (eng_errand){.kind = ENG_ERRAND_DROP}, 3);
    eng_close(other.engine);
}

static void measure_names(bench *b, uint32_t names) {
    for (uint32_t i = 0; i < names; i++) {
        const double since = now_ms();
        (void)create(b, 10 + i);
        note(b, since);
    }
    print(b, "an empty timeline gets a name", 0);
    const double begun = now_ms();
    struct timespec from, to;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
    while (now_ms() - begun < 2 * LEASE_MS)
        step(b);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
    eng_gauges gauges;
    eng_read_gauges(b->engine, &gauges);
    printf("| %u names idle for two leases | | | %.2f %% of the engine's thread; %llu still here |\n", names,
           100 * ((double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec)) / (2e-3 * LEASE_MS),
           (unsigned long long)gauges.named);
}

int main(int argc, char **argv) {
    static bench b = {.lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER};
    eng_store *store;
    pthread_t thread;
    eng_error error = {0};
    if (argc < 3)
        stop("usage", "bench_durable MODEL PLACE [TOKENS [NAMES]]");
    const size_t tokens = argc > 3 ? strtoul(argv[3], NULL, 10) : 4000;
    const unsigned long names = argc > 4 ? strtoul(argv[4], NULL, 10) : 1000;
    int32_t *ids = malloc(sizeof *ids * (tokens + 16));
    const eng_store_options place = {.place = argv[2], .budget = (uint64_t)4 << 30};
    if (!ids || tokens == 0 || eng_store_open(&place, &store, &error))
        stop(argv[2], error.text);
    if (pthread_create(&thread, NULL, live, store) != 0)
        stop("the store's thread", "cannot be started");
    const eng_options options = {
        .model_dir = argv[1], .store = store, .lease_ms = LEASE_MS, .wake = wake, .wake_context = &b};
    if (eng_open(&options, &b.engine, &error))
        stop(argv[1], error.text);
    for (size_t i = 0; i < tokens + 16; i++)
        ids[i] = (int32_t)(i * 7919 % (size_t)eng_info(b.engine)->vocab_size);
    printf("| %s, %zu tokens | median, ms | 99 %%, ms | |\n|---|---|---|---|\n", eng_info(b.engine)->model_type,
           tokens);
    measure_turns(&b, ids);
    measure_parking(&b, ids, tokens);
    measure_handing_over(&b, &options, ids, tokens);
    measure_names(&b, (uint32_t)names);
    eng_close(b.engine);
    eng_store_stop(store);
    pthread_join(thread, NULL);
    eng_store_close(store);
    free(ids);
    return 0;
}

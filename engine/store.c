// SPDX-License-Identifier: Apache-2.0
// Queue, clients and buffers of a store, and the loop that its thread lives in; see store.h.
//
// A request is a *job*: one of a fixed number that its client was made with. It goes from the client's free list into
// the store's queue, through the backend, into the client's replies, and back when the caller has looked at it; so
// nothing on the way can overflow or get lost. One mutex guards queue, replies and gauges, and is never held while
// bytes are moved or a disk or network is waited for. A client's free lists belong to its thread.
#include "engine/store_internal.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 64, IDLE_MS = 1000, DEFAULT_TIME_LIMIT_MS = 10000, DEFAULT_REQUESTS = 64 };

static const uint64_t default_budget = (uint64_t)1 << 30;

struct eng_store {
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_cond_t told; // a client's notify has returned
    eng_store_backend backend;
    eng_store_job *first, **last; // queue
    bool stopping;
    eng_store_gauges gauges;
    int32_t time_limit_ms;
    eng_logger log;
};

struct eng_store_client {
    eng_store *store;
    eng_store_client_options options;
    eng_store_job *jobs, *free_jobs;
    eng_store_job *first_reply, **last_reply; // under the store's lock
    int32_t notifying;                        // calls of its notify under way; likewise
    uint64_t entry_bytes;                     // of entries under way
    unsigned char *memory;                    // its own, of the buffers
    eng_store_buffer *buffers, **free_buffers;
    int32_t free_count;
};

// -------------------------------------------------------------------------------------------------------------- clocks

static int64_t clock_ms(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int64_t eng_store_clock(void) {
    return clock_ms(CLOCK_MONOTONIC);
}

int64_t eng_store_wall_clock(void) {
    return clock_ms(CLOCK_REALTIME);
}

// ------------------------------------------------------------------------------------------------- opening and closing

static eng_status open_backend(const eng_store_options *options, eng_store *store, eng_error *error) {
    return strstr(options->place, "://") ? eng_store_redis_open(options, store, &store->backend, error)
                                         : eng_store_lmdb_open(options, store, &store->backend, error);
}

static eng_status make_locks(eng_store *store) {
    pthread_condattr_t attributes;
    if (pthread_mutex_init(&store->lock, NULL) != 0)
        return ENG_NO_MEMORY;
    bool made = pthread_condattr_init(&attributes) == 0;
    if (made) {
        made = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
               pthread_cond_init(&store->work, &attributes) == 0;
        pthread_condattr_destroy(&attributes);
    }
    if (made && pthread_cond_init(&store->told, NULL) == 0)
        return ENG_OK;
    if (made)
        pthread_cond_destroy(&store->work);
    pthread_mutex_destroy(&store->lock);
    return ENG_NO_MEMORY;
}

eng_status eng_store_open(const eng_store_options *options, eng_store **out, eng_error *error) {
    if (!options->place || !options->place[0])
        return eng_fail(error, ENG_INVALID, "a store needs a place");
    if (options->time_limit_ms < 0)
        return eng_fail(error, ENG_INVALID, "a store's time limit cannot be negative");
    eng_store *store = calloc(1, sizeof *store);
    if (!store || make_locks(store) != ENG_OK) {
        free(store);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store");
    }
    store->last = &store->first;
    store->log = (eng_logger){options->log, options->log_context};
    store->time_limit_ms = options->time_limit_ms ? options->time_limit_ms : DEFAULT_TIME_LIMIT_MS;
    eng_store_options settled = *options;
    settled.budget = options->budget ? options->budget : default_budget;
    settled.time_limit_ms = store->time_limit_ms;
    eng_status status = open_backend(&settled, store, error);
    if (status != ENG_OK) {
        eng_store_close(store);
        return status;
    }
    *out = store;
    return ENG_OK;
}

void eng_store_close(eng_store *store) {
    if (!store)
        return;
    if (store->backend.close)
        store->backend.close(store->backend.self);
    pthread_cond_destroy(&store->told);
    pthread_cond_destroy(&store->work);
    pthread_mutex_destroy(&store->lock);
    free(store);
}

// ------------------------------------------------------------------------------------------------------------ the loop

static int take_jobs(eng_store *store, eng_store_job **jobs, int most) {
    int count = 0;
    for (; count < most && store->first; count++) {
        jobs[count] = store->first;
        store->first = store->first->next;
    }
    if (!store->first)
        store->last = &store->first;
    return count;
}

static eng_status prepare(eng_store_job *job) {
    const eng_store_buffer *buffer = job->request.buffer;
    if (eng_store_clock() > job->deadline)
        return eng_fail(&job->reply.error, ENG_IO, "the store did not come to it within its time limit");
    if (job->request.op == ENG_STORE_PUT &&
        eng_digest_bytes(buffer->bytes, buffer->length, job->payload_digest) != ENG_OK)
        return eng_fail(&job->reply.error, ENG_INTERNAL, "SHA-256 failed");
    return ENG_OK;
}

// Keeps those that the backend has to do.
static int prepare_all(eng_store *store, eng_store_job **jobs, int count) {
    int kept = 0;
    for (int i = 0; i < count; i++) {
        eng_status status = prepare(jobs[i]);
        if (status == ENG_OK)
            jobs[kept++] = jobs[i];
        else
            eng_store_finish(store, jobs[i], status);
    }
    return kept;
}

int eng_store_take(eng_store *store, eng_store_job **jobs, int most, bool *stopping) {
    pthread_mutex_lock(&store->lock);
    int count = take_jobs(store, jobs, most);
    *stopping = store->stopping && !store->first;
    pthread_mutex_unlock(&store->lock);
    return prepare_all(store, jobs, count);
}

static void wait_until(eng_store *store, int64_t time_ms) {
    struct timespec until = {.tv_sec = time_ms / 1000, .tv_nsec = time_ms % 1000 * 1000000};
    pthread_cond_timedwait(&store->work, &store->lock, &until);
}

void eng_store_run(eng_store *store) {
    eng_store_job *jobs[BATCH];
    int64_t idle_at = eng_store_clock() + IDLE_MS;
    if (store->backend.run) {
        store->backend.run(store->backend.self);
        return;
    }
    pthread_mutex_lock(&store->lock);
    for (bool working = true; working;) {
        int count = take_jobs(store, jobs, BATCH);
        bool leaving = count == 0 && store->stopping, idle = leaving || eng_store_clock() >= idle_at;
        if (count == 0 && !idle) {
            wait_until(store, idle_at);
            continue;
        }
        pthread_mutex_unlock(&store->lock);
        count = prepare_all(store, jobs, count);
        if (count)
            store->backend.work(store->backend.self, jobs, count);
        if (idle) {
            store->backend.idle(store->backend.self);
            idle_at = eng_store_clock() + IDLE_MS;
        }
        pthread_mutex_lock(&store->lock);
        working = !leaving;
    }
    pthread_mutex_unlock(&store->lock);
}

// Under the lock, so that the store cannot be closed meanwhile.
static void wake(eng_store *store) {
    if (store->backend.wake)
        store->backend.wake(store->backend.self);
    else
        pthread_cond_signal(&store->work);
}

void eng_store_stop(eng_store *store) {
    pthread_mutex_lock(&store->lock);
    store->stopping = true;
    wake(store);
    pthread_mutex_unlock(&store->lock);
}

// Snapshots are kept where there is room, and made again where they are damaged.
static bool is_failure(const eng_store_request *request, eng_status status) {
    return status == ENG_IO || ((status == ENG_FULL || status == ENG_FORMAT) && request->meta.kind != ENG_STORE_PREFIX);
}

void eng_store_finish(eng_store *store, eng_store_job *job, eng_status status) {
    eng_store_client *client = job->client;
    job->reply.status = status;
    job->reply.buffer = job->request.buffer;
    if (status == ENG_OK && job->request.op == ENG_STORE_GET && job->request.buffer)
        job->request.buffer->length = (size_t)job->reply.meta.payload_bytes + job->reply.journal_bytes;
    job->next = NULL;
    pthread_mutex_lock(&store->lock);
    store->gauges.queued--;
    store->gauges.done += status == ENG_OK;
    store->gauges.failed += is_failure(&job->request, status);
    *client->last_reply = job;
    client->last_reply = &job->next;
    client->notifying++; // it is not closed before that is over
    pthread_mutex_unlock(&store->lock);
    if (client->options.notify)
        client->options.notify(client->options.notify_context);
    pthread_mutex_lock(&store->lock);
    if (--client->notifying == 0)
        pthread_cond_broadcast(&store->told);
    pthread_mutex_unlock(&store->lock);
}

// -------------------------------------------------------------------------------------------------------------- gauges

void eng_store_read_gauges(eng_store *store, eng_store_gauges *out) {
    pthread_mutex_lock(&store->lock);
    *out = store->gauges;
    pthread_mutex_unlock(&store->lock);
}

void eng_store_tell_fault(eng_store *store, const char *text) {
    pthread_mutex_lock(&store->lock);
    snprintf(store->gauges.fault, sizeof store->gauges.fault, "%s", text);
    pthread_mutex_unlock(&store->lock);
}

void eng_store_tell_retry(eng_store *store) {
    pthread_mutex_lock(&store->lock);
    store->gauges.retries++;
    pthread_mutex_unlock(&store->lock);
}

void eng_store_tell_dropped(eng_store *store, uint64_t evicted, uint64_t expired) {
    pthread_mutex_lock(&store->lock);
    store->gauges.evicted += evicted;
    store->gauges.expired += expired;
    pthread_mutex_unlock(&store->lock);
}

eng_logger eng_store_logger(const eng_store *store) {
    return store->log;
}

// ------------------------------------------------------------------------------------------------------------ a client

static bool make_buffers(eng_store_client *client) {
    const eng_store_client_options *o = &client->options;
    size_t count = (size_t)o->buffers;
    unsigned char *memory = o->memory;
    client->buffers = calloc(count + 1, sizeof *client->buffers);
    client->free_buffers = calloc(count + 1, sizeof(eng_store_buffer *));
    if (!client->buffers || !client->free_buffers)
        return false;
    if (count && !memory) {
        memory = client->memory = malloc(count * o->buffer_bytes);
        if (!memory)
            return false;
    }
    for (size_t i = 0; i < count; i++) {
        client->buffers[i].bytes = memory + i * o->buffer_bytes;
        client->buffers[i].capacity = o->buffer_bytes;
        client->free_buffers[client->free_count++] = &client->buffers[i];
    }
    return true;
}

static eng_status check_client(const eng_store_client_options *o, eng_error *error) {
    if (o->requests < 0 || o->requests > 1 << 20 || o->buffers < 0)
        return eng_fail(error, ENG_INVALID, "a store's client cannot have %d requests and %d buffers", o->requests,
                        o->buffers);
    if (o->buffers && (o->buffer_bytes == 0 || o->buffer_bytes > SIZE_MAX / 2 / (size_t)o->buffers))
        return eng_fail(error, ENG_INVALID, "%d staging buffers of %" PRIu64 " bytes", o->buffers, o->buffer_bytes);
    return ENG_OK;
}

eng_status eng_store_client_open(eng_store *store, const eng_store_client_options *options, eng_store_client **out,
                                 eng_error *error) {
    eng_status status = check_client(options, error);
    if (status != ENG_OK)
        return status;
    eng_store_client *client = calloc(1, sizeof *client);
    if (!client)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store's client");
    client->store = store;
    client->options = *options;
    client->last_reply = &client->first_reply;
    if (client->options.requests == 0)
        client->options.requests = DEFAULT_REQUESTS;
    if (client->options.entry_bytes == 0)
        client->options.entry_bytes = (uint64_t)2 * ENG_STORE_JOURNAL_BYTES;
    client->jobs = calloc((size_t)client->options.requests, sizeof *client->jobs);
    if (!client->jobs || !make_buffers(client)) {
        eng_store_client_close(client);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store's requests and buffers");
    }
    for (int32_t i = client->options.requests; i-- > 0;) {
        client->jobs[i].client = client;
        client->jobs[i].next = client->free_jobs;
        client->free_jobs = &client->jobs[i];
    }
    *out = client;
    return ENG_OK;
}

void eng_store_client_close(eng_store_client *client) {
    if (!client)
        return;
    pthread_mutex_lock(&client->store->lock);
    while (client->notifying > 0)
        pthread_cond_wait(&client->store->told, &client->store->lock);
    pthread_mutex_unlock(&client->store->lock);
    for (int32_t i = 0; client->jobs && i < client->options.requests; i++) {
        free(client->jobs[i].entry);
        free(client->jobs[i].reply.list);
    }
    free(client->jobs);
    free(client->buffers);
    free(client->free_buffers);
    free(client->memory);
    free(client);
}

eng_store_buffer *eng_store_take_buffer(eng_store_client *client) {
    if (client->free_count == 0)
        return NULL;
    eng_store_buffer *buffer = client->free_buffers[--client->free_count];
    buffer->length = 0;
    return buffer;
}

void eng_store_return_buffer(eng_store_client *client, eng_store_buffer *buffer) {
    client->free_buffers[client->free_count++] = buffer;
}

// ------------------------------------------------------------------------------------------------------------ requests

static eng_status check_write(const eng_store_request *request, eng_error *error) {
    const eng_store_meta *meta = &request->meta;
    bool put = request->op == ENG_STORE_PUT;
    if (meta->position < 0 || meta->position > INT64_MAX / 1024 || meta->tail_count < 0 || meta->tail_count > 1)
        return eng_fail(error, ENG_INVALID, "a stored position or tail is out of range");
    if (meta->kind == ENG_STORE_SESSION && request->epoch == 0)
        return eng_fail(error, ENG_INVALID, "a session is written under a lease; the epoch is missing");
    if (put && (!request->buffer || request->buffer->length == 0))
        return eng_fail(error, ENG_INVALID, "what is put has no payload");
    if (put)
        return ENG_OK;
    if (meta->kind != ENG_STORE_SESSION)
        return eng_fail(error, ENG_INVALID, "only sessions have a journal");
    if (!request->entry || request->entry_bytes == 0)
        return eng_fail(error, ENG_INVALID, "a journal's entry cannot be empty");
    if (request->entry_bytes > ENG_STORE_JOURNAL_BYTES - sizeof(eng_store_frame))
        return eng_fail(error, ENG_TOO_LONG, "an entry of %zu bytes exceeds a journal of %d", request->entry_bytes,
                        ENG_STORE_JOURNAL_BYTES);
    return ENG_OK;
}

static eng_status check_ids(const eng_store_request *request, eng_error *error) {
    const size_t bytes = request->entry_bytes;
    return request->entry && bytes > 0 && bytes % ENG_STORE_ID_BYTES == 0 &&
                   bytes / ENG_STORE_ID_BYTES <= ENG_STORE_FIND_IDS
               ? ENG_OK
               : eng_fail(error, ENG_INVALID, "%zu bytes of ids to find", bytes);
}

static eng_status check(const eng_store_request *request, eng_error *error) {
    eng_store_op op = request->op;
    eng_store_kind kind = request->meta.kind;
    bool lease = op == ENG_STORE_LEASE || op == ENG_STORE_RELEASE;
    if (request->buffer && op != ENG_STORE_PUT && op != ENG_STORE_GET)
        return eng_fail(error, ENG_INVALID, "only putting and getting take a buffer");
    if (op == ENG_STORE_USAGE || op == ENG_STORE_WISHES)
        return ENG_OK;
    if (kind != ENG_STORE_SESSION && (lease || kind != ENG_STORE_PREFIX))
        return eng_fail(error, ENG_INVALID, "a record of kind %d cannot be asked for that", (int)kind);
    if (request->ttl_ms < 0 || request->ttl_ms > INT64_MAX / 1024 || (op == ENG_STORE_LEASE && request->ttl_ms == 0))
        return eng_fail(error, ENG_INVALID, "a time to live of %" PRId64 " ms", request->ttl_ms);
    if (op == ENG_STORE_RELEASE && request->epoch == 0)
        return eng_fail(error, ENG_INVALID, "a lease is released by its epoch");
    if (op == ENG_STORE_FIND)
        return check_ids(request, error);
    return op == ENG_STORE_PUT || op == ENG_STORE_APPEND ? check_write(request, error) : ENG_OK;
}

static eng_status copy_entry(eng_store_client *client, const eng_store_request *request, eng_store_job *job,
                             eng_error *error) {
    if (request->op != ENG_STORE_APPEND && request->op != ENG_STORE_FIND)
        return ENG_OK;
    if (request->entry_bytes > client->options.entry_bytes - client->entry_bytes)
        return eng_fail(error, ENG_FULL, "entries of %" PRIu64 " bytes are under way to the store",
                        client->entry_bytes);
    char *copy = malloc(sizeof(eng_store_frame) + request->entry_bytes);
    if (!copy)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a journal's entry");
    memcpy(copy + sizeof(eng_store_frame), request->entry, request->entry_bytes);
    job->entry = copy;
    job->request.entry = copy + sizeof(eng_store_frame);
    client->entry_bytes += request->entry_bytes;
    return ENG_OK;
}

eng_status eng_store_submit(eng_store_client *client, const eng_store_request *request, eng_error *error) {
    eng_store *store = client->store;
    eng_status status = check(request, error);
    if (status != ENG_OK)
        return status;
    eng_store_job *job = client->free_jobs;
    if (!job)
        return eng_fail(error, ENG_FULL, "%d requests are under way to the store", client->options.requests);
    eng_store_job *next = job->next;
    *job = (eng_store_job){.request = *request,
                           .reply = {.op = request->op, .user = request->user, .meta = request->meta},
                           .client = client,
                           .deadline = eng_store_clock() + store->time_limit_ms,
                           .next = next};
    status = copy_entry(client, request, job, error);
    if (status != ENG_OK)
        return status;
    pthread_mutex_lock(&store->lock);
    bool stopped = store->stopping;
    if (!stopped) {
        client->free_jobs = next;
        job->next = NULL;
        *store->last = job;
        store->last = &job->next;
        store->gauges.queued++;
        wake(store);
    }
    pthread_mutex_unlock(&store->lock);
    if (!stopped)
        return ENG_OK;
    if (job->entry)
        client->entry_bytes -= request->entry_bytes;
    free(job->entry);
    job->entry = NULL;
    return eng_fail(error, ENG_CANCELLED, "the store has been stopped");
}

eng_store_reply *eng_store_poll(eng_store_client *client) {
    pthread_mutex_lock(&client->store->lock);
    eng_store_job *job = client->first_reply;
    if (job) {
        client->first_reply = job->next;
        if (!job->next)
            client->last_reply = &client->first_reply;
    }
    pthread_mutex_unlock(&client->store->lock);
    return job ? &job->reply : NULL;
}

void eng_store_done(eng_store_client *client, eng_store_reply *reply) {
    eng_store_job *job = (eng_store_job *)((char *)reply - offsetof(eng_store_job, reply));
    if (job->entry)
        client->entry_bytes -= job->request.entry_bytes;
    free(job->entry);
    free(job->reply.list);
    job->entry = NULL;
    job->reply.list = NULL;
    job->next = client->free_jobs;
    client->free_jobs = job;
}

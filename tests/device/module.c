// SPDX-License-Identifier: Apache-2.0
// A CUDA module that pretends: cuda:0 and cuda:1 compute on the CPU with C = 64, count what they hand out, and fail on
// request. With it, whatever a device may do to its users is tested without one.
//
// It is as late as an asynchronous device may be: what a stream is given is put down, row tables included, and done
// when somebody waits for it or gives memory back. Who looks at a result too early finds the old one.
//
// The environment says what happens. PRETEND_REFUSAL: opening fails with this sentence. PRETEND_MEMORY: bytes of
// memory; what is given back does not return. PRETEND_LAUNCH_BYTES: what a launch costs. PRETEND_LOST: the devices are
// lost from the moment when this file exists. PRETEND_LOST_AFTER ("cuda:1 100"): this device is lost once it has run so
// many plans. Sizes of batch that a plan meets for the first time count as allocations, as graphs do. Processes form
// groups through shared memory; a part that is not a member's own is not a number after a sum, and who does not join a
// group before waiting is refused.
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/backend.h"

enum { ORDINALS = 2 };

static struct kern_backend backend;     // made when the module is opened, before any of its devices
static atomic_bool made;                // says so to ThreadSanitizer, which does not see the loader's lock
static atomic_uint_fast64_t handed_out; // bytes, of all devices

static atomic_uint_fast64_t plans_run[ORDINALS];

static int ordinal_of(const char *name) {
    return name[strlen("cuda:")] - '0';
}

static uint64_t memory(void) {
    const char *text = getenv("PRETEND_MEMORY");
    return text ? strtoull(text, NULL, 10) : UINT64_C(1) << 40;
}

static uint64_t launch_bytes(void) {
    const char *text = getenv("PRETEND_LAUNCH_BYTES");
    return text ? strtoull(text, NULL, 10) : 0;
}

static bool is_lost(const kern_device *device) {
    const char *path = getenv("PRETEND_LOST"), *after = getenv("PRETEND_LOST_AFTER");
    const char *name = device->info.name, *space = after ? strchr(after, ' ') : NULL;
    if (path && access(path, F_OK) == 0)
        return true;
    return space && strncmp(after, name, strlen(name)) == 0 && after + strlen(name) == space &&
           plans_run[ordinal_of(name)] >= strtoull(space, NULL, 10);
}

static kern_status open_device(const kern_device_options *options, kern_device **out, char *reason,
                               size_t reason_size) {
    const char *name = options->name;
    const char *refusal = getenv("PRETEND_REFUSAL");
    int ordinal = ordinal_of(name);
    if (refusal || ordinal < 0 || ordinal >= ORDINALS || name[strlen("cuda:0")]) {
        kern_set_reason(reason, reason_size, refusal ? "%.128s" : "device \"%.64s\": this host has 2 CUDA devices",
                        refusal ? refusal : name);
        return KERN_NO_DEVICE;
    }
    kern_status status = kern_cpu_backend.open(&(kern_device_options){.name = "cpu:64"}, out, reason, reason_size);
    if (status)
        return status;
    kern_device_info *info = &(*out)->info;
    snprintf(info->name, sizeof info->name, "cuda:%d", ordinal);
    snprintf(info->description, sizeof info->description, "cuda:%d (pretended)", ordinal);
    info->default_rows = 256;
    info->row_chunks = 8;
    info->launch_bytes = launch_bytes();
    info->asynchronous = true;
    info->memory_total = info->memory_free = memory();
    return KERN_OK;
}

static bool hand_out(size_t bytes) {
    if (bytes > memory() - handed_out)
        return false;
    handed_out += bytes;
    return true;
}

static kern_status allocate(kern_device *device, size_t bytes, void **out) {
    return hand_out(bytes) ? kern_cpu_backend.alloc(device, bytes, out) : KERN_NO_MEMORY;
}

static kern_status weight_create(kern_device *device, const kern_weight_desc *desc, kern_weight **out) {
    size_t each = desc->master ? 0 : desc->dtype == KERN_BF16 ? 2 : 4;
    if (!hand_out((size_t)desc->rows * (size_t)desc->cols * each))
        return KERN_NO_MEMORY;
    return kern_cpu_backend.weight_create(device, desc, out);
}

// ----------------------------------------------------------------------------------------------------------- streams

// Something to be done: a plan with its row table, or bytes that are copied (from) or cleared (from NULL).
typedef struct work {
    const kern_call *call; // NULL: bytes
    size_t calls;
    void *memory; // the row table's arrays, or bytes to upload; freed when it is done
    kern_rows rows;
    const kern_rows *followed; // as it stands when its turn comes; rows has its bounds
    void *to;
    const void *from;
    size_t bytes;
} work;

typedef struct late_stream {
    kern_stream stream;
    struct late_stream *next;
    work *work;
    size_t count, capacity;
    uint64_t given, done; // since the stream was opened
    kern_status fault;    // the first of what was done; sticks
} late_stream;

typedef struct late_event {
    kern_event event;
    late_stream *stream; // NULL: not recorded
    uint64_t place;
    kern_event *clock; // of the CPU
} late_event;

static late_stream *streams; // of all devices
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static late_stream *late(kern_stream *stream) {
    return (late_stream *)stream;
}

static kern_status give(kern_stream *stream, work item) {
    late_stream *to = late(stream);
    if (to->count == to->capacity) {
        size_t capacity = to->capacity ? 2 * to->capacity : 64;
        work *larger = realloc(to->work, capacity * sizeof *larger);
        if (!larger) {
            free(item.memory);
            return KERN_NO_MEMORY;
        }
        to->work = larger;
        to->capacity = capacity;
    }
    to->work[to->count++] = item;
    to->given++;
    return KERN_OK;
}

static kern_status do_work(kern_stream *stream, const work *item) {
    kern_status status = KERN_OK;
    if (!item->call && item->from)
        return kern_cpu_backend.copy(stream, item->to, item->from, item->bytes);
    if (!item->call)
        return kern_cpu_backend.zero(stream, item->to, item->bytes);
    const kern_rows *rows = item->followed ? kern_rows_now(item->followed) : &item->rows;
    if (item->followed && (rows->n_rows > item->rows.n_rows || rows->n_tokens > item->rows.n_tokens))
        return KERN_INVALID; // a GPU would leave out what is beyond the bounds
    if (item->followed && rows->n_tokens == 0)
        return KERN_OK;
    for (size_t i = 0; i < item->calls && !status; i++)
        status = kern_cpu_backend.launch(stream, item->call[i].op, rows, item->call[i].args);
    return status;
}

static kern_status do_until(late_stream *stream, uint64_t place) {
    size_t taken = 0;
    for (; stream->done < place; stream->done++, taken++) {
        kern_status status = do_work(&stream->stream, &stream->work[taken]);
        stream->fault = stream->fault ? stream->fault : status;
        free(stream->work[taken].memory);
    }
    stream->count -= taken;
    if (taken > 0)
        memmove(stream->work, stream->work + taken, stream->count * sizeof *stream->work);
    return is_lost(stream->stream.device) ? KERN_DEVICE_LOST : stream->fault;
}

static kern_status synchronize(kern_stream *stream) {
    return do_until(late(stream), late(stream)->given);
}

// As the giving back of memory waits for whatever may use it.
static void synchronize_all(const kern_device *device) {
    pthread_mutex_lock(&streams_lock);
    for (late_stream *stream = streams; stream; stream = stream->next)
        if (stream->stream.device == device)
            (void)do_until(stream, stream->given);
    pthread_mutex_unlock(&streams_lock);
}

static kern_status stream_open(kern_device *device, kern_stream **out) {
    late_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return KERN_NO_MEMORY;
    stream->stream.device = device;
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    *out = &stream->stream;
    return KERN_OK;
}

static void stream_close(kern_stream *stream) {
    (void)synchronize(stream);
    pthread_mutex_lock(&streams_lock);
    late_stream **place = &streams;
    while (*place != late(stream))
        place = &(*place)->next;
    *place = late(stream)->next;
    pthread_mutex_unlock(&streams_lock);
    free(late(stream)->work);
    free(stream);
}

static kern_status event_create(kern_device *device, bool timed, kern_event **out) {
    late_event *event = calloc(1, sizeof *event);
    if (!event)
        return KERN_NO_MEMORY;
    event->event.device = device;
    if (timed && kern_cpu_backend.event_create(device, true, &event->clock) != KERN_OK) {
        free(event);
        return KERN_NO_MEMORY;
    }
    *out = &event->event;
    return KERN_OK;
}

static void event_free(kern_event *event) {
    free(((late_event *)event)->clock);
    free(event);
}

static kern_status event_record(kern_stream *stream, kern_event *event) {
    ((late_event *)event)->stream = late(stream);
    ((late_event *)event)->place = late(stream)->given;
    kern_event *clock = ((late_event *)event)->clock;
    return clock ? kern_cpu_backend.event_record(stream, clock) : KERN_OK;
}

static kern_status event_elapsed(const kern_event *from, const kern_event *to, double *seconds) {
    const late_event *a = (const late_event *)from, *b = (const late_event *)to;
    return kern_cpu_backend.event_elapsed(a->clock, b->clock, seconds);
}

static kern_status event_wait(kern_event *event) {
    const late_event *waits = (const late_event *)event;
    return waits->stream ? do_until(waits->stream, waits->place) : KERN_OK;
}

// Memory that transfers do not reach by themselves is copied at once.
static kern_status upload(kern_stream *stream, void *to, const void *from, size_t bytes) {
    void *copy = malloc(bytes);
    if (!copy)
        return KERN_NO_MEMORY;
    memcpy(copy, from, bytes);
    return give(stream, (work){.memory = copy, .to = to, .from = copy, .bytes = bytes});
}

static kern_status copy(kern_stream *stream, void *to, const void *from, size_t bytes) {
    return give(stream, (work){.to = to, .from = from, .bytes = bytes});
}

static kern_status zero(kern_stream *stream, void *to, size_t bytes) {
    return give(stream, (work){.to = to, .bytes = bytes});
}

static void release(kern_device *device, void *memory) {
    synchronize_all(device);
    kern_cpu_backend.free(device, memory);
}

static void release_host(kern_device *device, void *memory) {
    synchronize_all(device);
    kern_cpu_backend.free_host(device, memory);
}

static kern_status launch(kern_stream *stream, kern_op op, const kern_rows *rows, const void *args) {
    kern_status status = synchronize(stream);
    return status ? status : kern_cpu_backend.launch(stream, op, rows, args);
}

// ------------------------------------------------------------------------------------------------------------- plans

// Moves an array of the table into the copy; with no copy it only measures.
static void keep(char *memory, size_t *used, void *array, size_t bytes) {
    void *from;
    memcpy(&from, array, sizeof from);
    if (memory) {
        void *to = memory + *used;
        if (bytes > 0)
            memcpy(to, from, bytes);
        memcpy(array, &to, sizeof to);
    }
    *used += (bytes + 15) & ~(size_t)15;
}

static size_t keep_all(char *memory, kern_rows *rows) {
    const size_t tokens = (size_t)rows->n_tokens, logits = (size_t)rows->n_logits;
    size_t used = 0;
    keep(memory, &used, &rows->row, sizeof *rows->row * (size_t)rows->n_rows);
    keep(memory, &used, &rows->boundary, sizeof *rows->boundary * (size_t)rows->n_boundaries);
    keep(memory, &used, &rows->page, sizeof *rows->page * (size_t)rows->n_pages);
    keep(memory, &used, &rows->id, sizeof *rows->id * tokens);
    keep(memory, &used, &rows->target, sizeof *rows->target * tokens);
    keep(memory, &used, &rows->target_weight, sizeof *rows->target_weight * tokens);
    keep(memory, &used, &rows->logits_token, sizeof *rows->logits_token * logits);
    keep(memory, &used, &rows->sampler, sizeof *rows->sampler * logits);
    keep(memory, &used, &rows->edit, sizeof *rows->edit * (size_t)rows->n_edits);
    keep(memory, &used, &rows->chunk, sizeof *rows->chunk * (size_t)rows->n_chunks);
    keep(memory, &used, &rows->token_row, sizeof *rows->token_row * tokens);
    keep(memory, &used, &rows->token_start, sizeof *rows->token_start * tokens);
    keep(memory, &used, &rows->token_position, sizeof *rows->token_position * tokens);
    return used;
}

// calls->made: a bit for each size, a power of two.
static kern_status meet(const kern_rows *rows, kern_calls *calls) {
    if (rows->n_generated != rows->n_tokens || (rows->n_rows != rows->n_tokens && !rows->followed))
        return KERN_OK;
    uint64_t *sizes = calls->made, size = 1;
    if (!sizes && !(calls->made = sizes = calloc(1, sizeof *sizes)))
        return KERN_NO_MEMORY;
    while (size < (uint64_t)rows->n_tokens)
        size *= 2;
    calls->device->allocations += !(*sizes & size);
    *sizes |= size;
    return KERN_OK;
}

static kern_status calls_run(kern_stream *stream, const kern_rows *rows, kern_calls *calls) {
    kern_status status = meet(rows, calls);
    plans_run[ordinal_of(calls->device->info.name)]++;
    if (status)
        return status;
    if (calls->mark) { // nothing is late where it is timed
        status = synchronize(stream);
        return status ? status : kern_cpu_backend.calls_run(stream, rows, calls);
    }
    if (rows->followed)
        return give(stream, (work){.call = calls->call, .calls = calls->count, .rows = *rows, .followed = rows});
    work item = {.call = calls->call, .calls = calls->count, .rows = *rows};
    item.memory = malloc(keep_all(NULL, &item.rows) + 1);
    if (!item.memory)
        return KERN_NO_MEMORY;
    keep_all(item.memory, &item.rows);
    return give(stream, item);
}

static void calls_forget(kern_calls *calls) {
    synchronize_all(calls->device);
    free(calls->made);
    calls->made = NULL;
}

// ------------------------------------------------------------------------------------------------------------ groups

enum { GROUP_MEMBERS = 8, GROUP_FLOATS = 1 << 18 };

// What the members of a group share, under the group's name until all have come.
typedef struct meeting {
    atomic_int ready;
    pthread_barrier_t barrier;
    float block[GROUP_MEMBERS][GROUP_FLOATS];
} meeting;

typedef struct late_group {
    kern_group group;
    int32_t member, members;
    meeting *meeting;
    bool behind; // calls were made that no stream has joined
} late_group;

static kern_status group_name(kern_device *device, unsigned char id[KERN_GROUP_ID], char *reason, size_t reason_size) {
    (void)device, (void)reason, (void)reason_size;
    memset(id, 0, KERN_GROUP_ID);
    snprintf((char *)id, KERN_GROUP_ID, "/mesa-pretended-%ld", (long)getpid());
    return KERN_OK;
}

static meeting *attach(const char *name, int32_t member, int32_t members) {
    int fd;
    while ((fd = shm_open(name, member == 0 ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600)) < 0 && errno == ENOENT)
        sched_yield(); // member 0 makes it
    struct stat facts = {0};
    if (fd < 0 || (member == 0 && ftruncate(fd, sizeof(meeting)) != 0))
        return NULL;
    while (fstat(fd, &facts) == 0 && facts.st_size < (off_t)sizeof(meeting))
        sched_yield();
    meeting *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == MAP_FAILED)
        return NULL;
    pthread_barrierattr_t attributes;
    if (member == 0) {
        pthread_barrierattr_init(&attributes);
        pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&shared->barrier, &attributes, (unsigned)members);
        atomic_store(&shared->ready, 1);
    }
    while (!atomic_load(&shared->ready))
        sched_yield();
    return shared;
}

static kern_status group_open(kern_device *device, const unsigned char id[KERN_GROUP_ID], int32_t member,
                              int32_t members, kern_group **out, char *reason, size_t reason_size) {
    late_group *group = members <= GROUP_MEMBERS ? calloc(1, sizeof *group) : NULL;
    if (!group)
        return KERN_NO_MEMORY;
    *group = (late_group){{device}, member, members, attach((const char *)id, member, members), false};
    if (!group->meeting) {
        kern_set_reason(reason, reason_size, "%s: cannot be attached to", (const char *)id);
        free(group);
        return KERN_NO_DEVICE;
    }
    if (pthread_barrier_wait(&group->meeting->barrier) == PTHREAD_BARRIER_SERIAL_THREAD)
        shm_unlink((const char *)id);
    *out = &group->group;
    return KERN_OK;
}

static void group_close(kern_group *handle) {
    munmap(((late_group *)handle)->meeting, sizeof(meeting));
    free(handle);
}

// All members show their block, and take what they want of the others'.
static kern_status group_work(kern_group *handle, kern_stream *stream, float *data, size_t part, size_t rest,
                              bool sum) {
    late_group *group = (late_group *)handle;
    const size_t members = (size_t)group->members, floats = part * members + rest;
    const kern_status status = floats <= GROUP_FLOATS ? synchronize(stream) : KERN_UNSUPPORTED;
    if (status)
        return status;
    memcpy(group->meeting->block[group->member], data, floats * sizeof *data);
    pthread_barrier_wait(&group->meeting->barrier);
    for (size_t i = 0; i < floats; i++) {
        const size_t owner = i < part * members ? i / part : members - 1;
        float total = 0;
        for (size_t m = 0; m < members; m++)
            total += group->meeting->block[m][i];
        if (!sum)
            data[i] = group->meeting->block[owner][i];
        else
            data[i] = owner == (size_t)group->member ? total : NAN;
    }
    pthread_barrier_wait(&group->meeting->barrier);
    group->behind = true;
    return KERN_OK;
}

static kern_status group_sum(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest) {
    return group_work(group, stream, data, part, rest, true);
}

static kern_status group_gather(kern_group *group, kern_stream *stream, float *data, size_t part, size_t rest) {
    return group_work(group, stream, data, part, rest, false);
}

static kern_status group_join(kern_group *group, kern_stream *stream) {
    ((late_group *)group)->behind = false;
    return stream->device == group->device ? KERN_OK : KERN_INVALID;
}

// Waiting for a stream that was not joined would be a fault of the caller.
static kern_status group_poll(kern_group *group, kern_stream *stream, bool *done) {
    *done = !((late_group *)group)->behind;
    return *done ? synchronize(stream) : KERN_INVALID;
}

__attribute__((constructor)) static void make_backend(void) {
    backend = kern_cpu_backend;
    backend.open = open_device;
    backend.alloc = allocate;
    backend.weight_create = weight_create;
    backend.free = release;
    backend.free_host = release_host;
    backend.stream_open = stream_open;
    backend.stream_close = stream_close;
    backend.synchronize = synchronize;
    backend.event_create = event_create;
    backend.event_free = event_free;
    backend.event_record = event_record;
    backend.event_wait = event_wait;
    backend.event_elapsed = event_elapsed;
    backend.upload = upload;
    backend.download = copy;
    backend.copy = copy;
    backend.zero = zero;
    backend.launch = launch;
    backend.calls_run = calls_run;
    backend.calls_forget = calls_forget;
    backend.group_name = group_name;
    backend.group_open = group_open;
    backend.group_close = group_close;
    backend.group_sum = group_sum;
    backend.group_gather = group_gather;
    backend.group_join = group_join;
    backend.group_poll = group_poll;
    atomic_store(&made, true);
}

__attribute__((visibility("default"))) kern_module_function kern_module_v1;

const struct kern_backend *kern_module_v1(const kern_host *caller) {
    return atomic_load(&made) && caller->abi == KERN_ABI ? &backend : NULL;
}

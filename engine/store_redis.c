// SPDX-License-Identifier: Apache-2.0
// A store in a Redis server that several processes share; the loop of its thread, and the tasks in it.
//
// Every request is a *task* that goes its own way through a few steps (store_redis_write.c, store_redis_read.c), many
// at once over one connection; those of one record one after another. A write is planned here, by the rules and digests
// of store_record.c, from the head as it was last seen, and a script in the server makes it so if the head is still
// that one and the lease's epoch is the writer's; otherwise it is planned again. So whatever gets lost on the way, a
// task can begin anew: a write that had happened is recognised or does no harm. Writes that are ready together share a
// transaction, each with its own outcome, and so a sync.
//
// A connection that breaks sends its tasks back to the start. A task ends with ENG_IO when it gets no further for the
// store's time limit, whatever the server does; what that one still comes to later has no effect
// (store_redis_scripts.c).
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/store_redis.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "engine/hash.h"

enum { SWEEP_MS = 1000, SWEEP = 64, ATTEMPTS = 64 };

static const uint64_t least_budget = 1 << 20;

// ------------------------------------------------------------------------------------------------------- small matters

void eng_redis_hex(const unsigned char *bytes, size_t count, char *out) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < count; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * count] = 0;
}

bool eng_redis_is_text(const redisReply *reply, const char *text) {
    return reply && (reply->type == REDIS_REPLY_STRING || reply->type == REDIS_REPLY_STATUS) &&
           reply->len == strlen(text) && memcmp(reply->str, text, reply->len) == 0;
}

const redisReply *eng_redis_element(const redisReply *reply, size_t i) {
    return reply->type == REDIS_REPLY_ARRAY && i < reply->elements ? reply->element[i] : NULL;
}

int64_t eng_redis_number(const redisReply *reply) {
    if (reply && reply->type == REDIS_REPLY_INTEGER)
        return reply->integer;
    return reply && reply->type == REDIS_REPLY_STRING ? strtoll(reply->str, NULL, 10) : 0;
}

// ------------------------------------------------------------------------------------------------- heads and last uses

static eng_redis_hint *hint_place(eng_redis *r, const char *name) {
    return &r->hint[eng_hash_bytes(name, ENG_REDIS_NAME - 1) % ENG_REDIS_HINTS];
}

eng_redis_hint *eng_redis_hint_of(eng_redis *r, const char *name) {
    eng_redis_hint *hint = hint_place(r, name);
    return strcmp(hint->name, name) == 0 ? hint : NULL;
}

void eng_redis_remember(eng_redis *r, const char *name, const eng_store_head *head) {
    eng_redis_hint *hint = hint_place(r, name);
    if (head) {
        memcpy(hint->name, name, sizeof hint->name);
        hint->head = *head;
    } else if (strcmp(hint->name, name) == 0) {
        hint->name[0] = 0;
    }
}

void eng_redis_send_touches(eng_redis *r) {
    for (int i = 0; i < r->touches;) {
        eng_redis_args args = {0};
        for (int n = 0; n < 16 && i < r->touches; n++)
            eng_redis_add_text(&args, r->touched[i++]);
        eng_redis_due due = {.task = -1, .step = ENG_REDIS_STEP_IGNORE};
        eng_redis_call(&r->link, ENG_REDIS_TOUCH, "used", &args, due);
    }
    r->touches = 0;
}

// The order of last uses is the order in the list.
void eng_redis_touch(eng_redis *r, const char *name) {
    int at = 0;
    while (at < r->touches && strcmp(r->touched[at], name) != 0)
        at++;
    if (at < r->touches)
        memmove(r->touched[at], r->touched[at + 1], sizeof r->touched[0] * (size_t)(--r->touches - at));
    if (r->touches == ENG_REDIS_TOUCHES)
        eng_redis_send_touches(r);
    memcpy(r->touched[r->touches++], name, ENG_REDIS_NAME);
}

// --------------------------------------------------------------------------------------------------------------- tasks

eng_redis_due eng_redis_due_of(const eng_redis *r, const eng_redis_task *task, uint32_t index) {
    return (eng_redis_due){.task = (int)(task - r->task),
                           .serial = task->serial,
                           .step = (int)task->step,
                           .index = index,
                           .script = ENG_REDIS_SCRIPTS};
}

static void clear_reply(eng_redis_task *task) {
    eng_store_job *job = task->job;
    free(job->reply.list);
    job->reply = (eng_store_reply){.op = job->request.op, .user = job->request.user, .meta = job->request.meta};
    if (task->kept)
        freeReplyObject(task->kept);
    task->kept = NULL;
}

static void begin(eng_redis *r, eng_redis_task *task) {
    clear_reply(task);
    eng_redis_drop_staged(r, task);
    task->serial++; // answers to what was before are nobody's
    task->pending = 0;
    task->sent = task->done = 0;
    task->fresh = task->staged = false;
    eng_redis_begin(r, task);
}

void eng_redis_finish(eng_redis *r, eng_redis_task *task, eng_status status) {
    eng_store_job *job = task->job;
    int next = task->next;
    if (status != ENG_OK)
        eng_redis_drop_staged(r, task);
    if (task->kept)
        freeReplyObject(task->kept);
    task->kept = NULL;
    task->serial++;
    task->job = NULL;
    r->live--;
    if (status == ENG_IO || status == ENG_FULL || status == ENG_FORMAT)
        eng_store_tell_fault(r->store, job->reply.error.text);
    eng_store_finish(r->store, job, status);
    if (next >= 0) {
        r->task[next].waiting = false;
        begin(r, &r->task[next]);
    }
}

void eng_redis_again(eng_redis *r, eng_redis_task *task, int64_t delay_ms, const char *why) {
    if (++task->attempts > ATTEMPTS) {
        clear_reply(task);
        eng_redis_finish(r, task, eng_fail(&task->job->reply.error, ENG_IO, "the store: %s", why));
        return;
    }
    eng_store_tell_retry(r->store);
    task->retry_at = delay_ms ? eng_store_clock() + delay_ms : 0;
    begin(r, task);
}

void eng_redis_progress(eng_redis *r, eng_redis_task *task, uint32_t pieces) {
    task->done += pieces;
    if (task->done <= task->furthest)
        return;
    task->furthest = task->done;
    task->deadline = eng_store_clock() + r->link.time_limit_ms;
}

void eng_redis_strange(eng_redis *r, eng_redis_task *task) {
    eng_redis_finish(r, task, eng_fail(&task->job->reply.error, ENG_IO, "the store: Redis answers in another form"));
}

void eng_redis_add_until(eng_redis *r, const eng_redis_task *task, eng_redis_args *args) {
    eng_redis_add_number(args, task->deadline + r->link.clock);
}

bool eng_redis_is_late(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    if (!eng_redis_is_text(eng_redis_element(reply, 0), "late"))
        return false;
    r->link.clock = eng_redis_number(eng_redis_element(reply, 1)) - eng_store_clock(); // it may have been set
    eng_redis_again(r, task, 1, "Redis comes to requests too late, or its clock runs otherwise");
    return true;
}

static void make_name(const eng_store_job *job, char out[ENG_REDIS_NAME]) {
    eng_store_op op = job->request.op;
    out[0] = 0;
    if (op == ENG_STORE_LIST || op == ENG_STORE_USAGE || op == ENG_STORE_WISHES || op == ENG_STORE_FIND)
        return;
    out[0] = job->request.meta.kind == ENG_STORE_PREFIX ? 'p' : 's';
    eng_redis_hex(job->request.meta.id, ENG_STORE_ID_BYTES, out + 1);
}

// The last task on the record, or -1.
static int behind_which(const eng_redis *r, const char *name) {
    for (int i = 0; i < ENG_REDIS_TASKS; i++)
        if (name[0] && r->task[i].job && r->task[i].next < 0 && strcmp(r->task[i].name, name) == 0)
            return i;
    return -1;
}

static void admit(eng_redis *r, eng_store_job *job) {
    char name[ENG_REDIS_NAME];
    int at = 0;
    make_name(job, name);
    int before = behind_which(r, name);
    while (r->task[at].job)
        at++;
    eng_redis_task *task = &r->task[at];
    *task = (eng_redis_task){.job = job, .serial = task->serial + 1, .deadline = job->deadline, .next = -1};
    memcpy(task->name, name, sizeof name);
    memcpy(task->after, job->request.meta.id, sizeof task->after);
    r->live++;
    if (before >= 0) {
        task->waiting = true;
        r->task[before].next = at;
    } else {
        begin(r, task);
    }
}

// ------------------------------------------------------------------------------------------------------------- answers

typedef struct fault {
    const char *word;
    int64_t delay_ms; // until it is tried again; 0: it is not
    eng_status status;
} fault;

static void fail_by(eng_redis *r, eng_redis_task *task, const redisReply *reply) {
    static const fault faults[] = {
        {"LOADING", 250, ENG_IO},     {"BUSY", 250, ENG_IO},         {"TRYAGAIN", 250, ENG_IO},
        {"MASTERDOWN", 250, ENG_IO},  {"CLUSTERDOWN", 250, ENG_IO},  {"NOREPLICAS", 250, ENG_IO},
        {"WRONGTYPE", 0, ENG_FORMAT}, {"MOVED", 0, ENG_UNSUPPORTED}, {"ASK", 0, ENG_UNSUPPORTED},
    };
    char text[160];
    snprintf(text, sizeof text, "Redis: %.140s", reply->str);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (eng_redis_says(reply, faults[i].word)) {
            if (faults[i].delay_ms)
                eng_redis_again(r, task, faults[i].delay_ms, text);
            else
                eng_redis_finish(r, task, eng_fail(&task->job->reply.error, faults[i].status, "the store: %s", text));
            return;
        }
    bool full = strstr(reply->str, "No space left") != NULL;
    eng_redis_finish(r, task, eng_fail(&task->job->reply.error, full ? ENG_FULL : ENG_IO, "the store: %s", text));
}

static void take_error(eng_redis *r, eng_redis_task *task, const eng_redis_due *due, const redisReply *reply) {
    if (!due->whole && eng_redis_says(reply, "NOSCRIPT"))
        return;                              // nothing is pending now: the step is sent again by itself, as text
    if (eng_redis_says(reply, "READONLY")) { // it has become a replica
        eng_redis_link_fail(&r->link, "is a replica, which cannot be written");
    } else if (eng_redis_says(reply, "OOM") && task->reliefs < 8) {
        task->reliefs++;
        task->force = true;
        eng_redis_again(r, task, 0, "Redis is full");
    } else if (eng_redis_says(reply, "OOM")) {
        eng_redis_finish(r, task,
                         eng_fail(&task->job->reply.error, ENG_FULL, "the store: Redis has reached maxmemory"));
    } else {
        fail_by(r, task, reply);
    }
}

// True: the reply is kept.
static bool dispatch(eng_redis *r, const eng_redis_due *due, redisReply *reply) {
    eng_redis_task *task = &r->task[due->task];
    if (!task->job || task->serial != due->serial)
        return false;
    task->pending--;
    if (reply->type == REDIS_REPLY_ERROR)
        take_error(r, task, due, reply);
    else if (due->step <= ENG_REDIS_STEP_LAST)
        eng_redis_take_write(r, task, due, reply);
    else
        return eng_redis_take_read(r, task, due, reply);
    return false;
}

static void take_member(eng_redis *r, const eng_redis_due *due, redisReply *reply) {
    eng_redis_due member = *due;
    member.step = ENG_REDIS_STEP_WRITE;
    if (reply->type == REDIS_REPLY_ERROR) // which ends the group, too
        dispatch(r, &member, reply);
    else if (r->grouped < ENG_REDIS_TASKS)
        r->group[r->grouped++] = member;
}

// The group's answers, or that nothing was done; then each goes alone.
static void take_group(eng_redis *r, const redisReply *reply) {
    uint32_t count = r->grouped;
    bool done = reply->type == REDIS_REPLY_ARRAY && reply->elements == count;
    r->grouped = 0;
    for (uint32_t i = 0; i < count; i++) {
        const eng_redis_due *member = &r->group[i];
        eng_redis_task *task = &r->task[member->task];
        if (done && !member->whole && eng_redis_says(reply->element[i], "NOSCRIPT"))
            r->link.loaded[member->script] = false;
        if (done)
            dispatch(r, member, reply->element[i]);
        else if (task->job && task->serial == member->serial)
            eng_redis_again(r, task, 0, "Redis refuses a group of writes");
        if (r->link.state != ENG_REDIS_READY) // all have begun again
            return;
    }
}

static void take(void *context, const eng_redis_due *due, redisReply *reply) {
    eng_redis *r = context;
    bool kept = false;
    if (due->step == ENG_REDIS_STEP_MEMBER)
        take_member(r, due, reply);
    else if (due->task >= 0)
        kept = dispatch(r, due, reply);
    else if (due->step == ENG_REDIS_STEP_EXEC)
        take_group(r, reply);
    else if (due->step == ENG_REDIS_STEP_SWEEP)
        eng_store_tell_dropped(r->store, 0, (uint64_t)eng_redis_number(reply));
    if (!kept)
        freeReplyObject(reply);
}

static void lost(void *context) {
    eng_redis *r = context;
    r->grouped = 0;
    for (int i = 0; i < ENG_REDIS_TASKS; i++) {
        eng_redis_task *task = &r->task[i];
        if (!task->job || task->waiting)
            continue;
        task->sent_before |= task->pending > 0;
        eng_redis_again(r, task, 0, "the connection to Redis breaks again and again");
    }
}

// ------------------------------------------------------------------------------------------------------------ the loop

static bool may_send(const eng_redis_task *task, int64_t now) {
    return task->job && !task->waiting && task->retry_at <= now;
}

static bool may_join(const eng_redis_task *task, int64_t now) {
    return may_send(task, now) && task->step == ENG_REDIS_STEP_WRITE && task->pending == 0 && task->attempts == 0;
}

static void send_word(eng_redis *r, const char *word, eng_redis_step step) {
    eng_redis_args args = {0};
    eng_redis_add_text(&args, word);
    eng_redis_command(&r->link, &args, (eng_redis_due){.task = -1, .step = (int)step, .script = ENG_REDIS_SCRIPTS});
}

// Writes that are ready together go as one transaction: a server that syncs always does so once for all of them.
static void send_writes(eng_redis *r, int64_t now, int count) {
    if (count > 1 && r->touches)
        eng_redis_send_touches(r);
    if (count > 1)
        send_word(r, "MULTI", ENG_REDIS_STEP_IGNORE);
    r->grouping = count > 1;
    for (int i = 0; i < ENG_REDIS_TASKS && eng_redis_link_is_open(&r->link); i++)
        if (may_join(&r->task[i], now))
            eng_redis_send_write(r, &r->task[i]);
    r->grouping = false;
    if (count > 1)
        send_word(r, "EXEC", ENG_REDIS_STEP_EXEC);
}

static void send_large(eng_redis *r, int64_t now) {
    for (int i = 0; i < ENG_REDIS_TASKS && eng_redis_link_has_room(&r->link); i++) {
        eng_redis_task *task = &r->task[(r->turn + i) % ENG_REDIS_TASKS];
        if (may_send(task, now) && task->step == ENG_REDIS_STEP_STAGE)
            eng_redis_send_write(r, task);
        else if (may_send(task, now) && task->step == ENG_REDIS_STEP_PIECE)
            eng_redis_send_read(r, task);
    }
    r->turn = (r->turn + 1) % ENG_REDIS_TASKS;
}

// Pieces of large states come last, so that nothing small waits for more of them than are on their way.
static void send_tasks(eng_redis *r, int64_t now) {
    int writes = 0;
    for (int i = 0; i < ENG_REDIS_TASKS && eng_redis_link_is_open(&r->link); i++) {
        eng_redis_task *task = &r->task[i];
        bool large = task->step == ENG_REDIS_STEP_STAGE || task->step == ENG_REDIS_STEP_PIECE;
        if (may_join(task, now))
            writes++;
        else if (may_send(task, now) && !large && task->step <= ENG_REDIS_STEP_LAST)
            eng_redis_send_write(r, task);
        else if (may_send(task, now) && !large)
            eng_redis_send_read(r, task);
    }
    if (writes && eng_redis_link_is_open(&r->link))
        send_writes(r, now, writes);
    send_large(r, now);
}

static void expire_tasks(eng_redis *r, int64_t now) {
    for (int i = 0; i < ENG_REDIS_TASKS; i++) {
        eng_redis_task *task = &r->task[i];
        if (!task->job || now < task->deadline)
            continue;
        if (task->waiting) { // leaves the chain
            int before = 0;
            while (r->task[before].next != i || !r->task[before].job)
                before++;
            r->task[before].next = task->next;
            task->next = -1;
        }
        clear_reply(task);
        bool ready = r->link.state == ENG_REDIS_READY || !r->link.why[0];
        eng_redis_finish(r, task,
                         ready ? eng_fail(&task->job->reply.error, ENG_IO,
                                          "Redis at %.100s: no answer within the time limit", r->link.place.name)
                               : eng_fail(&task->job->reply.error, ENG_IO, "%s", r->link.why));
    }
}

static void maintain(eng_redis *r, int64_t now) {
    if (r->link.state != ENG_REDIS_READY || now < r->sweep_at || !eng_redis_link_is_open(&r->link))
        return;
    eng_redis_args sweep = {0};
    r->sweep_at = now + SWEEP_MS;
    send_word(r, "TIME", ENG_REDIS_STEP_TIME);
    eng_redis_send_touches(r);
    eng_redis_add_number(&sweep, SWEEP);
    eng_redis_call(&r->link, ENG_REDIS_SWEEP, "expiry", &sweep,
                   (eng_redis_due){.task = -1, .step = ENG_REDIS_STEP_SWEEP});
}

static int64_t next_alarm(const eng_redis *r, int64_t now) {
    int64_t at = eng_redis_link_alarm(&r->link);
    if (r->link.state == ENG_REDIS_READY && r->sweep_at < at)
        at = r->sweep_at;
    for (int i = 0; i < ENG_REDIS_TASKS; i++) {
        const eng_redis_task *task = &r->task[i];
        if (task->job && task->deadline < at)
            at = task->deadline;
        if (task->job && task->retry_at > now && task->retry_at < at)
            at = task->retry_at;
    }
    return at;
}

static void wait_and_work(eng_redis *r) {
    int64_t now = eng_store_clock(), at = next_alarm(r, now), wait = at > now ? at - now : 0;
    struct pollfd fds[2] = {{.fd = r->wake, .events = POLLIN}, {.fd = -1}};
    short events = eng_redis_link_events(&r->link);
    if (events)
        fds[1] = (struct pollfd){.fd = r->link.context->fd, .events = events};
    if (poll(fds, 2, wait > 1000 ? 1000 : (int)wait) <= 0)
        return;
    uint64_t count;
    if (fds[0].revents && read(r->wake, &count, sizeof count) < 0 && errno != EAGAIN)
        eng_log(eng_store_logger(r->store), ENG_LOG_ERROR, "a store's eventfd: %s", strerror(errno));
    if (events)
        eng_redis_link_work(&r->link, fds[1].revents);
}

static void run(void *self) {
    eng_redis *r = self;
    for (bool stopping = false;;) {
        eng_store_job *jobs[ENG_REDIS_TASKS];
        int count = eng_store_take(r->store, jobs, ENG_REDIS_TASKS - r->live, &stopping);
        for (int i = 0; i < count; i++)
            admit(r, jobs[i]);
        if (stopping && r->live == 0)
            return;
        int64_t now = eng_store_clock();
        eng_redis_link_drive(&r->link, now);
        expire_tasks(r, now);
        send_tasks(r, now);
        maintain(r, now);
        wait_and_work(r);
    }
}

static void wake(void *self) {
    eng_redis *r = self;
    uint64_t one = 1;
    while (write(r->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

// ------------------------------------------------------------------------------------------------- opening and closing

static void close_store(void *self) {
    eng_redis *r = self;
    if (!r)
        return;
    eng_redis_link_close(&r->link);
    if (r->wake >= 0)
        close(r->wake);
    free(r->hint);
    free(r);
}

static eng_status make(eng_redis *r, eng_error *error) {
    r->hint = calloc(ENG_REDIS_HINTS, sizeof *r->hint);
    if (!r->hint)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store");
    r->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (r->wake < 0)
        return eng_fail(error, ENG_IO, "a store's eventfd: %s", strerror(errno));
    if (getrandom(&r->generation, sizeof r->generation, 0) != sizeof r->generation)
        return eng_fail(error, ENG_IO, "no random number for a store: %s", strerror(errno));
    r->link.jitter = (uint32_t)r->generation;
    return eng_redis_link_open(&r->link, error);
}

eng_status eng_store_redis_open(const eng_store_options *options, eng_store *store, eng_store_backend *out,
                                eng_error *error) {
    eng_redis_place place;
    eng_status status = eng_redis_read_place(options->place, &place, error);
    if (status != ENG_OK)
        return status;
    if (options->budget < least_budget || options->budget > (uint64_t)1 << 50)
        return eng_fail(error, ENG_INVALID, "a store needs a budget of at least 1 MiB");
    eng_redis *r = calloc(1, sizeof *r);
    if (!r)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a store");
    r->store = r->link.store = store;
    r->wake = -1;
    r->budget = options->budget;
    r->link.place = place;
    r->link.time_limit_ms = options->time_limit_ms;
    r->link.take = take;
    r->link.lost = lost;
    r->link.context_of = r;
    status = make(r, error);
    if (status != ENG_OK) {
        close_store(r);
        return status;
    }
    *out = (eng_store_backend){.self = r, .run = run, .wake = wake, .close = close_store};
    return ENG_OK;
}

// SPDX-License-Identifier: Apache-2.0
// Errands: each a few steps, one request to the store at a time; see engine.h for what they do.
//
// A step runs when no reply is awaited; it submits a request, or looks whether what it waits for has come, or is done.
// What a step finds full is tried again with the next poll. Answers are given one after the other at the end of a poll,
// when nothing here points to the answered errand any more: a callback may send another.
#include <stdlib.h>
#include <string.h>

#include "engine/durable_internal.h"
#include "engine/store_internal.h"

typedef void (*task_step)(eng_durable *durable, eng_task *task);

struct eng_task {
    eng_task *next;
    eng_errand errand;
    eng_waiter waiter;
    task_step step;
    bool done;
    eng_named *named; // whose timeline is busy for it
    bool is_new;      // KEEP: the name is; DROP: the timeline was here
    bool put;         // PARK: the state was tried
    bool renewed;     // FETCH: the lease of what is here was asked for
    uint64_t failures;
    uint64_t epoch; // FETCH: of the lease
    int64_t asked;
    int64_t begun, not_before; // FETCH: when another was asked for it first; when it is asked again
    eng_answer answer;
    eng_error error;
    eng_record *list;
};

// -------------------------------------------------------------------------------------------------------------- common

static void finish(eng_task *task, eng_status status, const char *text) {
    task->done = true;
    task->answer.status = status;
    if (status != ENG_OK)
        (void)eng_fail(&task->error, status, "%s", text);
}

// Submits; the reply goes to `take`. False: the step is run again, as there was no room, or the task is done.
static bool ask(eng_durable *durable, eng_task *task, eng_store_request *request, eng_reply_fn take) {
    eng_error error = {0};
    eng_status status = eng_durable_ask(durable, request, &task->waiter, &error);
    task->waiter.take = take;
    if (status != ENG_OK && status != ENG_FULL)
        finish(task, status == ENG_CANCELLED ? ENG_IO : status, error.text);
    return status == ENG_OK;
}

static void finish_as_told(eng_task *task, const eng_store_reply *reply) {
    finish(task, reply->status, reply->error.text);
}

static eng_store_request lease_request(const eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_LEASE);
    request.ttl_ms = durable->options.lease_ms;
    task->asked = eng_store_clock();
    return request;
}

// Nobody waits for it: a lease that is not given back runs out.
static void release(eng_durable *durable, const eng_name *name, uint64_t epoch, eng_store_op op) {
    eng_store_request request = eng_durable_about(name, op);
    request.epoch = epoch;
    const eng_status asked = eng_durable_ask(durable, &request, NULL, NULL);
    (void)asked;
}

static void occupy(eng_task *task, eng_named *named) {
    task->named = named;
    task->failures = named->failures;
    named->errand = named->timeline->busy = true;
    named->retry_at = 0;
}

static void vacate(eng_task *task) {
    task->named->errand = task->named->timeline->busy = false;
    task->named = NULL;
}

// ---------------------------------------------------------------------------------------------------------------- keep

// It had no name before.
static void undo_keep(eng_durable *durable, eng_task *task, eng_store_op op) {
    eng_named *named = task->named;
    if (named->epoch && !named->lost)
        release(durable, &named->name, named->epoch, op);
    vacate(task);
    eng_durable_detach(durable, named);
}

static void fail_keep(eng_durable *durable, eng_task *task, eng_status status, const char *text) {
    if (task->is_new)
        undo_keep(durable, task, ENG_STORE_DELETE);
    else
        vacate(task);
    finish(task, status, text);
}

static void keep_written(eng_durable *durable, eng_task *task) {
    eng_named *named = task->named;
    if (named->lost)
        fail_keep(durable, task, ENG_CONFLICT, eng_durable_lost_text);
    else if (named->writing.waiting)
        return;
    else if (!eng_named_is_behind(named)) {
        named->kept = true;
        task->answer.timeline = named->timeline->id;
        task->answer.record = named->record;
        vacate(task);
        finish(task, ENG_OK, "");
    } else if (named->failures != task->failures)
        fail_keep(durable, task, named->failure, durable->fault);
    else
        eng_named_write(durable, named, named->timeline->read > ENG_DURABLE_JOURNAL_IDS);
}

static void keep_looked(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    if (reply->status == ENG_NOT_FOUND) {
        task->named->whole = true;
        task->step = keep_written;
        return;
    }
    undo_keep(durable, task, ENG_STORE_RELEASE);
    if (reply->status == ENG_OK)
        finish(task, ENG_CONFLICT, "there is a session of that name");
    else
        finish_as_told(task, reply);
}

static void keep_look(eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_GET);
    if (!ask(durable, task, &request, keep_looked) && task->done)
        undo_keep(durable, task, ENG_STORE_RELEASE);
}

static void keep_leased(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    if (reply->status == ENG_OK) {
        eng_named_take_lease(durable, task->named, reply->epoch, task->asked);
        task->step = keep_look;
        return;
    }
    undo_keep(durable, task, ENG_STORE_RELEASE);
    finish_as_told(task, reply);
    task->answer.lease_ms = reply->lease_ms;
}

static void keep_lease(eng_durable *durable, eng_task *task) {
    eng_store_request request = lease_request(durable, task);
    if (!ask(durable, task, &request, keep_leased) && task->done)
        undo_keep(durable, task, ENG_STORE_RELEASE);
}

static void describe(eng_task *task, eng_named *named) {
    const eng_errand *errand = &task->errand;
    if (named->ttl_ms != errand->ttl_ms || memcmp(named->note, errand->note, sizeof named->note) != 0)
        eng_timeline_changed(named->timeline);
    named->ttl_ms = errand->ttl_ms;
    memcpy(named->note, errand->note, sizeof named->note);
}

static void begin_keep(eng_durable *durable, eng_task *task) {
    const eng_errand *errand = &task->errand;
    eng_timeline *timeline =
        eng_timelines_find(durable->options.timelines, errand->owner, errand->timeline, &task->error);
    if (!timeline) {
        finish(task, ENG_NOT_FOUND, "");
        return;
    }
    eng_named *named = timeline->named, *other = eng_durable_find(durable, &errand->name);
    if (timeline->busy)
        finish(task, ENG_BUSY, "the session is in use by another request");
    else if (other != named)
        finish(task, ENG_CONFLICT, named ? "the session has another name" : "there is a session of that name");
    else if (named) {
        describe(task, named);
        occupy(task, named);
        task->step = keep_written;
    } else if (!(named = eng_durable_add(durable, &errand->name, timeline)))
        finish(task, ENG_NO_MEMORY, "out of memory for a name");
    else {
        task->is_new = true;
        describe(task, named);
        occupy(task, named);
        task->step = keep_lease;
    }
}

// --------------------------------------------------------------------------------------------------------------- fetch

static void found(eng_task *task, eng_named *named) {
    named->used = eng_store_clock();
    task->answer.timeline = named->timeline->id;
    task->answer.record = named->record;
    task->answer.record.position = named->timeline->position; // what was not written yet counts
    finish(task, ENG_OK, "");
}

static void fetched(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    const eng_errand *errand = &task->errand;
    eng_named *named = NULL;
    eng_error error = reply->error;
    eng_status status = reply->status;
    if (status == ENG_OK)
        status = eng_durable_recover(durable, &errand->name, errand->owner, reply, &named, &error);
    if (reply->buffer)
        eng_store_return_buffer(durable->client, reply->buffer);
    if (status == ENG_OK) {
        eng_named_take_lease(durable, named, task->epoch, task->asked);
        found(task, named);
        return;
    }
    release(durable, &errand->name, task->epoch, ENG_STORE_RELEASE);
    finish(task, status, error.text);
}

static void fetch_read(eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_GET);
    request.buffer = eng_store_take_buffer(durable->client);
    if (!request.buffer)
        return;
    memcpy(request.meta.fingerprint, durable->options.key->fingerprint, sizeof request.meta.fingerprint);
    if (!ask(durable, task, &request, fetched))
        eng_store_return_buffer(durable->client, request.buffer);
}

static void fetch_again(eng_durable *durable, eng_task *task);

static void fetch_leased(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    if (reply->status == ENG_OK) {
        task->epoch = reply->epoch;
        task->step = fetch_read;
        return;
    }
    if (reply->status == ENG_BUSY && task->begun == 0)
        task->begun = task->asked;
    if (reply->status == ENG_BUSY && eng_store_clock() - task->begun < eng_durable_margin(durable)) {
        task->not_before = eng_store_clock() + ENG_DURABLE_AGAIN_MS;
        task->step = fetch_again;
        return;
    }
    finish_as_told(task, reply);
    task->answer.lease_ms = reply->lease_ms;
}

// Who has it was told that it is wanted, and hands it over unless a request is on it.
static void fetch_again(eng_durable *durable, eng_task *task) {
    eng_store_request request = lease_request(durable, task);
    if (eng_store_clock() < task->not_before)
        return;
    task->not_before = 0;
    ask(durable, task, &request, fetch_leased);
}

// One that was sent before and fetches the same: what it brings is found here then.
static bool is_fetched_already(const eng_durable *durable, const eng_task *task) {
    for (const eng_task *other = durable->tasks; other != task; other = other->next)
        if (other->errand.kind == ENG_ERRAND_FETCH && !other->done &&
            memcmp(&other->errand.name, &task->errand.name, sizeof task->errand.name) == 0)
            return true;
    return false;
}

// What had a lease that is over may be another's by now: the store is asked once.
static bool is_in_doubt(eng_durable *durable, eng_task *task, eng_named *named) {
    if (!task->renewed && named->kept && eng_store_clock() >= named->until) {
        task->renewed = true;
        task->not_before = eng_store_clock() + ENG_DURABLE_AGAIN_MS;
        eng_named_renew(durable, named);
    }
    return task->renewed && named->renewal.waiting;
}

static void begin_fetch(eng_durable *durable, eng_task *task) {
    eng_named *named = eng_durable_find(durable, &task->errand.name);
    if (is_fetched_already(durable, task) || (named && (named->errand || named->lost)))
        return; // until it is here, or not
    if (named && named->timeline->owner == task->errand.owner) {
        if (!is_in_doubt(durable, task, named))
            found(task, named);
        return;
    }
    if (named) {
        finish(task, ENG_NOT_FOUND, "there is no such session");
        return;
    }
    eng_store_request request = lease_request(durable, task);
    ask(durable, task, &request, fetch_leased);
}

// ---------------------------------------------------------------------------------------------------------------- park

static void parked(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    (void)reply; // a lease that was not given back runs out
    eng_named *named = task->named;
    vacate(task);
    eng_durable_remove(durable, named);
    finish(task, ENG_OK, "");
}

static void park(eng_durable *durable, eng_task *task) {
    eng_named *named = task->named;
    const bool behind = eng_named_is_behind(named), failed = named->failures != task->failures;
    if (named->writing.waiting) {
        task->put = true;
        return;
    }
    if (named->lost || (behind && failed)) {
        const eng_status status = named->lost ? ENG_CONFLICT : named->failure;
        finish(task, status, named->lost ? eng_durable_lost_text : durable->fault);
        vacate(task);
        return;
    }
    if (behind || (!task->put && !failed && eng_named_wants_state(named))) {
        task->put = !behind;
        eng_named_write(durable, named, true);
        return;
    }
    eng_store_request request = eng_durable_about(&named->name, ENG_STORE_RELEASE);
    request.epoch = named->epoch;
    if (!ask(durable, task, &request, parked) && task->done)
        vacate(task);
}

static void begin_park(eng_durable *durable, eng_task *task) {
    eng_named *named = eng_durable_find(durable, &task->errand.name);
    if (!named)
        finish(task, ENG_NOT_FOUND, "there is no such session here");
    else if (named->timeline->busy)
        finish(task, ENG_BUSY, "the session is in use by another request");
    else {
        occupy(task, named);
        task->step = park;
    }
}

// --------------------------------------------------------------------------------------------------- drop, touch, look

static void dropped(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    (void)durable;
    if (reply->status == ENG_NOT_FOUND && task->is_new)
        finish(task, ENG_OK, "");
    else
        finish_as_told(task, reply);
}

static void begin_drop(eng_durable *durable, eng_task *task) {
    eng_named *named = eng_durable_find(durable, &task->errand.name);
    if (named && named->timeline->busy) {
        finish(task, ENG_BUSY, "the session is in use by another request");
        return;
    }
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_DELETE);
    request.epoch = named && !named->lost ? named->epoch : 0;
    if (!ask(durable, task, &request, dropped) || !named)
        return;
    task->is_new = true;
    eng_durable_remove(durable, named);
}

static void looked(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    if (reply->status == ENG_OK)
        eng_durable_read_meta(durable, &reply->meta, &task->answer.record);
    finish_as_told(task, reply);
}

static void begin_look(eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_GET);
    ask(durable, task, &request, looked);
}

static void touched(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    eng_named *named = eng_durable_find(durable, &task->errand.name);
    looked(durable, waiter, reply);
    task->answer.record.ttl_ms = task->errand.ttl_ms;
    if (reply->status == ENG_OK && named && named->ttl_ms != task->errand.ttl_ms) {
        named->ttl_ms = task->errand.ttl_ms;
        eng_timeline_changed(named->timeline); // the record tells it
    }
}

static void begin_touch(eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_EXPIRE);
    request.ttl_ms = task->errand.ttl_ms;
    ask(durable, task, &request, touched);
}

// --------------------------------------------------------------------------------------------------------- list, usage

static void listed(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    if (reply->status == ENG_OK && reply->count > 0 && !(task->list = calloc(reply->count, sizeof *task->list))) {
        finish(task, ENG_NO_MEMORY, "out of memory for a list");
        return;
    }
    for (size_t i = 0; task->list && i < reply->count; i++)
        eng_durable_read_meta(durable, &reply->list[i], &task->list[i]);
    task->answer.list = task->list;
    task->answer.count = task->list ? reply->count : 0;
    task->answer.damaged = reply->damaged;
    task->answer.more = reply->more;
    finish_as_told(task, reply);
}

static void begin_list(eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_LIST);
    ask(durable, task, &request, listed);
}

static void told_usage(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    eng_task *task = waiter->of;
    (void)durable;
    task->answer.usage = reply->usage;
    finish_as_told(task, reply);
}

static void begin_usage(eng_durable *durable, eng_task *task) {
    eng_store_request request = eng_durable_about(&task->errand.name, ENG_STORE_USAGE);
    ask(durable, task, &request, told_usage);
}

// ------------------------------------------------------------------------------------------------------------- errands

static const task_step beginnings[] = {
    [ENG_ERRAND_KEEP] = begin_keep, [ENG_ERRAND_FETCH] = begin_fetch, [ENG_ERRAND_LOOK] = begin_look,
    [ENG_ERRAND_PARK] = begin_park, [ENG_ERRAND_DROP] = begin_drop,   [ENG_ERRAND_TOUCH] = begin_touch,
    [ENG_ERRAND_LIST] = begin_list, [ENG_ERRAND_USAGE] = begin_usage,
};

eng_status eng_durable_send(eng_durable *durable, const eng_errand *errand, eng_error *error) {
    if (!durable)
        return eng_fail(error, ENG_UNSUPPORTED, "the engine has no store");
    if ((size_t)errand->kind >= sizeof beginnings / sizeof *beginnings || !errand->done)
        return eng_fail(error, ENG_INVALID, "an errand of kind %d, or without a callback", (int)errand->kind);
    if (errand->ttl_ms < 0 || errand->ttl_ms > INT64_MAX / 1024)
        return eng_fail(error, ENG_INVALID, "a time to live of %lld ms", (long long)errand->ttl_ms);
    if (durable->task_count == ENG_DURABLE_TASKS)
        return eng_fail(error, ENG_FULL, "%d errands are under way to the store", ENG_DURABLE_TASKS);
    eng_task *task = calloc(1, sizeof *task);
    if (!task)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for an errand");
    task->errand = *errand;
    task->waiter.of = task;
    task->step = beginnings[errand->kind];
    task->answer = (eng_answer){.kind = errand->kind, .user = errand->user};
    *durable->last_task = task;
    durable->last_task = &task->next;
    durable->task_count++;
    return ENG_OK;
}

static eng_task *take_done(eng_durable *durable) {
    eng_task **place = &durable->tasks, *task;
    while (*place && !(*place)->done)
        place = &(*place)->next;
    if (!(task = *place))
        return NULL;
    *place = task->next;
    if (!task->next)
        durable->last_task = place;
    durable->task_count--;
    return task;
}

static void free_task(eng_task *task) {
    free(task->list);
    free(task);
}

// As far as it goes without a reply.
static void go_on(eng_durable *durable, eng_task *task) {
    for (task_step step = NULL; !task->done && !task->waiter.waiting && task->step != step;) {
        step = task->step;
        step(durable, task);
    }
}

void eng_durable_work(eng_durable *durable, bool *worked) {
    for (eng_task *task = durable->tasks; task; task = task->next)
        go_on(durable, task);
    for (eng_task *task; (task = take_done(durable)) != NULL; *worked = true) {
        task->answer.message = task->error.text;
        task->errand.done(task->errand.user, &task->answer);
        free_task(task);
    }
}

int64_t eng_durable_work_at(const eng_durable *durable) {
    int64_t at = INT64_MAX;
    for (const eng_task *task = durable->tasks; task; task = task->next)
        if (!task->done && !task->waiter.waiting && task->not_before < at)
            at = task->not_before;
    return at;
}

static void take_nothing(eng_durable *durable, eng_waiter *waiter, eng_store_reply *reply) {
    (void)waiter;
    if (reply->buffer)
        eng_store_return_buffer(durable->client, reply->buffer);
}

void eng_durable_abandon_tasks(eng_durable *durable) {
    for (eng_task *task = durable->tasks; task; task = task->next)
        task->waiter.take = take_nothing;
}

void eng_durable_free_tasks(eng_durable *durable) {
    for (eng_task *task = durable->tasks, *next; task; task = next) {
        next = task->next;
        free_task(task);
    }
}

// SPDX-License-Identifier: Apache-2.0
// The queue, the running jobs and the composition of a step (scheduler.h).
//
// Two lists: waiting and running. Who was served goes to the end of the running list, which is all that taking turns
// needs within an owner; between owners the lower stamp of a clock goes first. Lists are walked whole: they hold a few
// hundred jobs, and a step takes milliseconds. Callbacks may submit, pause and cancel: a job cancelled inside a step
// leaves its list and gives its slot back at once, but its memory lives until the step has ended, as events and the
// batch point into it.
#include "engine/scheduler.h"

#include <inttypes.h>
#include <stdlib.h>

typedef struct job_list {
    eng_job *head, *tail;
    uint64_t count;
} job_list;

// Lives as long as one of its jobs.
struct eng_owner {
    eng_owner *next;
    uint64_t name, jobs;
    uint64_t admitted, read; // when it was last served, by the scheduler's clock
};

struct eng_scheduler {
    eng_scheduler_options options;
    job_list waiting, running;
    eng_owner *owners;
    uint64_t clock;
    uint64_t step; // number of the present step
    uint64_t waiting_tokens, last_id;
    bool stepping;
    eng_job *buried;   // ended while stepping, linked by next
    eng_job **stepped; // (slots) by the index of their piece
    int32_t stepped_count;
    eng_error fault; // of the device; sticks
};

// -------------------------------------------------------------------------------------------------------------- lists

static void append(job_list *list, eng_job *job) {
    job->previous = list->tail;
    job->next = NULL;
    if (list->tail)
        list->tail->next = job;
    else
        list->head = job;
    list->tail = job;
    list->count++;
}

static void unlink_job(job_list *list, eng_job *job) {
    *(job->previous ? &job->previous->next : &list->head) = job->next;
    *(job->next ? &job->next->previous : &list->tail) = job->previous;
    job->previous = job->next = NULL;
    list->count--;
}

static eng_job *find(const job_list *list, uint64_t id) {
    eng_job *job = list->head;
    while (job && job->id != id)
        job = job->next;
    return job;
}

static void move_to_end(job_list *list, eng_job *job) {
    unlink_job(list, job);
    append(list, job);
}

// The job's owner, found or made; it comes to the end of the turns. False: no memory.
static bool join_owner(eng_scheduler *scheduler, eng_job *job, uint64_t name) {
    eng_owner *owner = scheduler->owners;
    while (owner && owner->name != name)
        owner = owner->next;
    if (!owner) {
        owner = malloc(sizeof *owner);
        if (!owner)
            return false;
        uint64_t now = ++scheduler->clock;
        *owner = (eng_owner){.next = scheduler->owners, .name = name, .admitted = now, .read = now};
        scheduler->owners = owner;
    }
    owner->jobs++;
    job->owner = owner;
    return true;
}

static void leave_owner(eng_scheduler *scheduler, eng_job *job) {
    if (--job->owner->jobs > 0)
        return;
    eng_owner **place = &scheduler->owners;
    while (*place != job->owner)
        place = &(*place)->next;
    *place = job->owner->next;
    free(job->owner);
    job->owner = NULL;
}

static void free_chain(eng_job *job) {
    while (job) {
        eng_job *next = job->next;
        eng_job_free(job);
        job = next;
    }
}

// Out of its list; its memory goes now or, inside a step, at the step's end.
static void bury(eng_scheduler *scheduler, job_list *list, eng_job *job) {
    unlink_job(list, job);
    leave_owner(scheduler, job);
    if (!scheduler->stepping) {
        eng_job_free(job);
        return;
    }
    job->next = scheduler->buried;
    scheduler->buried = job;
}

// ------------------------------------------------------------------------------------------------------- create, free

eng_status eng_scheduler_create(const eng_scheduler_options *options, eng_scheduler **out, eng_error *error) {
    eng_scheduler *scheduler = calloc(1, sizeof *scheduler);
    size_t slots = (size_t)eng_pool_slots(options->pool, NULL);
    if (scheduler)
        scheduler->stepped = calloc(slots, sizeof(eng_job *));
    if (!scheduler || !scheduler->stepped) {
        free(scheduler);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the scheduler");
    }
    scheduler->options = *options;
    *out = scheduler;
    return ENG_OK;
}

void eng_scheduler_free(eng_scheduler *scheduler) {
    if (!scheduler)
        return;
    free_chain(scheduler->waiting.head);
    free_chain(scheduler->running.head);
    free_chain(scheduler->buried);
    for (eng_owner *owner = scheduler->owners, *next; owner; owner = next) {
        next = owner->next;
        free(owner);
    }
    free(scheduler->stepped);
    free(scheduler);
}

// -------------------------------------------------------------------------------------------------- submit and cancel

static eng_status check_room(const eng_scheduler *scheduler, const eng_job *job, eng_error *error) {
    const eng_scheduler_options *options = &scheduler->options;
    uint64_t tokens = (uint64_t)job->prompt_count;
    eng_status status = eng_pool_check_length(options->pool, eng_job_length(job), error);
    if (status != ENG_OK)
        return status;
    if (tokens > options->queue_tokens)
        return eng_fail(error, ENG_TOO_LONG, "a prompt of %" PRIu64 " ids; the queue holds %" PRIu64, tokens,
                        options->queue_tokens);
    if (scheduler->waiting.count >= options->queue_requests)
        return eng_fail(error, ENG_FULL, "%" PRIu64 " requests are waiting already", scheduler->waiting.count);
    if (tokens > options->queue_tokens - scheduler->waiting_tokens)
        return eng_fail(error, ENG_FULL, "%" PRIu64 " of the queue's %" PRIu64 " prompt ids are taken",
                        scheduler->waiting_tokens, options->queue_tokens);
    return ENG_OK;
}

eng_status eng_scheduler_submit(eng_scheduler *scheduler, const eng_request *request, uint64_t *id, eng_error *error) {
    eng_job *job;
    eng_status status = eng_job_create(&scheduler->options.rules, request, scheduler->last_id + 1, &job, error);
    if (status != ENG_OK)
        return status;
    status = check_room(scheduler, job, error);
    if (status == ENG_OK && !join_owner(scheduler, job, request->owner))
        status = eng_fail(error, ENG_NO_MEMORY, "out of memory for a request");
    if (status != ENG_OK) {
        eng_job_free(job);
        return status;
    }
    append(&scheduler->waiting, job);
    scheduler->waiting_tokens += (uint64_t)job->prompt_count;
    *id = ++scheduler->last_id;
    return ENG_OK;
}

void eng_scheduler_cancel(eng_scheduler *scheduler, uint64_t id) {
    eng_job *job = find(&scheduler->running, id);
    job_list *list = &scheduler->running;
    if (!job) {
        list = &scheduler->waiting;
        job = find(list, id);
        if (!job)
            return;
        scheduler->waiting_tokens -= (uint64_t)job->prompt_count;
    }
    eng_job_cancel(job);
    bury(scheduler, list, job);
}

void eng_scheduler_pause(eng_scheduler *scheduler, uint64_t id, bool paused) {
    eng_job *job = find(&scheduler->running, id);
    if (!job)
        job = find(&scheduler->waiting, id);
    if (job)
        job->paused = paused;
}

// ---------------------------------------------------------------------------------------------- composition of a step

// By priority, turn of the owner, place in the list.
static eng_job *next_waiting(const eng_scheduler *scheduler) {
    eng_job *best = scheduler->waiting.head;
    for (eng_job *job = best; job; job = job->next)
        if (job->priority < best->priority ||
            (job->priority == best->priority && job->owner->admitted < best->owner->admitted))
            best = job;
    return best;
}

// At most ENG_STEP_ADMISSIONS: a slot that is opened is cleared, which takes time from those that generate.
static eng_status admit(eng_scheduler *scheduler, eng_error *error) {
    const eng_scheduler_options *options = &scheduler->options;
    for (int admitted = 0; scheduler->waiting.head && admitted < ENG_STEP_ADMISSIONS; admitted++) {
        eng_job *job = next_waiting(scheduler);
        eng_error reason = {0};
        eng_status status =
            eng_session_open(options->pool, options->stream, eng_job_length(job), &job->session, &reason);
        if (status == ENG_FULL)
            return ENG_OK;
        if (status != ENG_OK)
            return eng_fail(error, status, "%s", reason.text);
        unlink_job(&scheduler->waiting, job);
        scheduler->waiting_tokens -= (uint64_t)job->prompt_count;
        job->owner->admitted = ++scheduler->clock;
        job->phase = ENG_PHASE_READING;
        append(&scheduler->running, job);
    }
    return ENG_OK;
}

// *added is false when the step has no room left for it. Who was served goes to the end.
static eng_status add_piece(eng_scheduler *scheduler, eng_job *job, int32_t count, bool *added, eng_error *error) {
    int32_t index;
    eng_error reason = {0};
    const eng_piece piece = eng_job_piece(job, count);
    eng_status status = eng_batch_add(scheduler->options.batch, &piece, &index, &reason);
    *added = status == ENG_OK;
    if (status == ENG_FULL)
        return ENG_OK;
    if (status != ENG_OK)
        return eng_fail(error, status, "%s", reason.text);
    scheduler->stepped[index] = job;
    scheduler->stepped_count++;
    move_to_end(&scheduler->running, job);
    return ENG_OK;
}

static eng_status add_generating(eng_scheduler *scheduler, eng_error *error) {
    eng_job *next, *job = scheduler->running.head;
    for (uint64_t left = scheduler->running.count; left > 0; left--, job = next) {
        bool added;
        next = job->next;
        if (job->paused || job->phase != ENG_PHASE_GENERATING)
            continue;
        eng_status status = add_piece(scheduler, job, 1, &added, error);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static bool reads(const eng_job *job) {
    return !job->paused && job->phase == ENG_PHASE_READING;
}

static int64_t count_readers(const eng_scheduler *scheduler) {
    int64_t readers = 0;
    for (const eng_job *job = scheduler->running.head; job; job = job->next)
        readers += reads(job);
    return readers;
}

// Of those not yet examined in this step: by turn of the owner, place in the list. NULL: none is left.
static eng_job *next_reader(const eng_scheduler *scheduler) {
    eng_job *best = NULL;
    for (eng_job *job = scheduler->running.head; job; job = job->next)
        if (reads(job) && job->examined != scheduler->step && (!best || job->owner->read < best->owner->read))
            best = job;
    return best;
}

// The ids a prompt reads in this step: to the next grid boundary and, with a larger share, whole chunks beyond it.
static int32_t prompt_piece(const eng_scheduler *scheduler, const eng_job *job, int64_t share) {
    int64_t left = job->prompt_count - job->session.read;
    int64_t count = eng_batch_piece_length(scheduler->options.batch, &job->session, left);
    if (!job->prompt_logprobs) // whose logits have room for one chunk
        count += (share - 1) * scheduler->options.chunk;
    return (int32_t)(count < left ? count : left);
}

// Prompts in turns until the step's budget is spent. However few its ids, a piece costs a pass over the weights: it
// counts as a quarter of a chunk at least.
static eng_status add_prompts(eng_scheduler *scheduler, eng_error *error) {
    int32_t chunk = scheduler->options.chunk;
    int64_t readers = count_readers(scheduler);
    int64_t chunks = scheduler->stepped_count > 0 ? 1 : ENG_IDLE_CHUNKS;
    int64_t budget = chunks * chunk, share = readers > 0 && chunks > readers ? chunks / readers : 1;
    for (eng_job *job; (job = next_reader(scheduler)) != NULL;) {
        bool added;
        int32_t count = prompt_piece(scheduler, job, share), cost = count < chunk / 4 ? chunk / 4 : count;
        if (cost > budget)
            break;
        job->examined = scheduler->step;
        eng_status status = add_piece(scheduler, job, count, &added, error);
        if (status != ENG_OK)
            return status;
        if (!added)
            continue;
        budget -= cost;
        job->owner->read = ++scheduler->clock;
    }
    return ENG_OK;
}

static eng_status run_batch(eng_scheduler *scheduler, eng_error *error) {
    scheduler->stepped_count = 0;
    scheduler->step++;
    eng_batch_clear(scheduler->options.batch);
    eng_status status = admit(scheduler, error);
    if (status == ENG_OK)
        status = add_generating(scheduler, error);
    if (status == ENG_OK)
        status = add_prompts(scheduler, error);
    return status == ENG_OK ? eng_batch_run(scheduler->options.batch, error) : status;
}

// ------------------------------------------------------------------------------------------------------------ results

static void tell(eng_scheduler *scheduler, eng_job *job, eng_event_fn on_event, void *context) {
    eng_event event;
    bool ended = job->phase == ENG_PHASE_ENDED;
    if (ended)
        bury(scheduler, &scheduler->running, job);
    if (!eng_job_event(job, &event))
        return;
    on_event(context, &event);
    eng_job_told(job, &event);
}

eng_status eng_scheduler_step(eng_scheduler *scheduler, eng_event_fn on_event, void *context, bool *worked,
                              eng_error *error) {
    *worked = false;
    if (scheduler->stepping)
        return eng_fail(error, ENG_INVALID, "a step may not be run from inside a step");
    if (scheduler->fault.code != ENG_OK)
        return eng_fail(error, scheduler->fault.code, "%s", scheduler->fault.text);
    if (run_batch(scheduler, &scheduler->fault) != ENG_OK)
        return eng_fail(error, scheduler->fault.code, "%s", scheduler->fault.text);
    scheduler->stepping = true;
    for (int32_t i = 0; i < scheduler->stepped_count; i++) {
        eng_job *job = scheduler->stepped[i];
        if (job->phase == ENG_PHASE_ENDED) // cancelled by an event of this step
            continue;
        eng_job_accept(&scheduler->options.rules, job, scheduler->options.batch, i);
        tell(scheduler, job, on_event, context);
    }
    scheduler->stepping = false;
    free_chain(scheduler->buried);
    scheduler->buried = NULL;
    *worked = scheduler->stepped_count > 0;
    return ENG_OK;
}

void eng_scheduler_gauges(const eng_scheduler *scheduler, eng_gauges *out) {
    int32_t slots_used, pages_used;
    out->queued_requests = scheduler->waiting.count;
    out->queued_tokens = scheduler->waiting_tokens;
    out->running = scheduler->running.count;
    out->states_total = (uint64_t)eng_pool_slots(scheduler->options.pool, &slots_used);
    out->states_used = (uint64_t)slots_used;
    out->kv_pages_total = (uint64_t)eng_pool_page_count(scheduler->options.pool, &pages_used);
    out->kv_pages_used = (uint64_t)pages_used;
}

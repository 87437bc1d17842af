// SPDX-License-Identifier: Apache-2.0
// The queue, the running jobs and the composition of a step (scheduler.h).
//
// Two lists: waiting and running. Who was served goes to the end of the running list, which is all that taking turns
// needs within an owner; between owners the lower stamp of a clock goes first. Lists are walked whole: they hold a few
// hundred jobs, and a step takes milliseconds. Callbacks may submit, pause and cancel: a job that has ended leaves its
// list and gives its slot back at once, but its memory lives until the present step and those under way for it have
// ended, as events and the steps' lists point into it.
#include <inttypes.h>
#include <stdlib.h>

#include "engine/scheduler_internal.h"
#include "engine/sharing.h"
#include "engine/storing.h"

// -------------------------------------------------------------------------------------------------------------- lists

void eng_scheduler_append(eng_job_list *list, eng_job *job) {
    job->previous = list->tail;
    job->next = NULL;
    if (list->tail)
        list->tail->next = job;
    else
        list->head = job;
    list->tail = job;
    list->count++;
}

void eng_scheduler_unlink(eng_job_list *list, eng_job *job) {
    *(job->previous ? &job->previous->next : &list->head) = job->next;
    *(job->next ? &job->next->previous : &list->tail) = job->previous;
    job->previous = job->next = NULL;
    list->count--;
}

static eng_job *find(const eng_job_list *list, const eng_job *after, uint64_t id) {
    eng_job *job = after ? after->next : list->head;
    while (job && job->id != id)
        job = job->next;
    return job;
}

static void move_to_end(eng_job_list *list, eng_job *job) {
    eng_scheduler_unlink(list, job);
    eng_scheduler_append(list, job);
}

bool eng_scheduler_join_owner(eng_scheduler *scheduler, eng_job *job, uint64_t name) {
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

void eng_scheduler_bury(eng_scheduler *scheduler, eng_job_list *list, eng_job *job) {
    eng_scheduler_unlink(list, job);
    scheduler->owed = scheduler->owed == job ? NULL : scheduler->owed;
    eng_share_unfollow(job);
    eng_share_let_go(scheduler, job, false);
    leave_owner(scheduler, job);
    if (!scheduler->stepping && job->underway == 0) {
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
    bool made = scheduler != NULL;
    for (int i = 0; made && i < ENG_FLIGHTS; i++)
        made = (scheduler->steps[i].job = calloc(slots, sizeof(eng_job *))) != NULL;
    if (!made) {
        eng_scheduler_free(scheduler);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for the scheduler");
    }
    scheduler->options = *options;
    *out = scheduler;
    return ENG_OK;
}

void eng_scheduler_free(eng_scheduler *scheduler) {
    if (!scheduler)
        return;
    eng_audit_stop(scheduler);
    free_chain(scheduler->waiting.head);
    free_chain(scheduler->running.head);
    free_chain(scheduler->storing.head);
    free_chain(scheduler->buried);
    for (eng_owner *owner = scheduler->owners, *next; owner; owner = next) {
        next = owner->next;
        free(owner);
    }
    for (int i = 0; i < ENG_FLIGHTS; i++)
        free(scheduler->steps[i].job);
    free(scheduler);
}

// -------------------------------------------------------------------------------------------------- submit and cancel

// prompt_end: position behind the request's own ids. What a timeline reads again does not count in the queue.
static eng_status check_room(const eng_scheduler *scheduler, const eng_request *request, int64_t prompt_end,
                             eng_error *error) {
    const eng_scheduler_options *options = &scheduler->options;
    eng_status status =
        eng_pool_check_length(options->pool, eng_request_length(prompt_end, request->max_tokens), error);
    if (status != ENG_OK)
        return status;
    if (request->count > options->queue_tokens)
        return eng_fail(error, ENG_TOO_LONG, "a prompt of %zu ids; the queue holds %" PRIu64, request->count,
                        options->queue_tokens);
    if (scheduler->waiting.count >= options->queue_requests)
        return eng_fail(error, ENG_FULL, "%" PRIu64 " requests are waiting already", scheduler->waiting.count);
    if (request->count > options->queue_tokens - scheduler->waiting_tokens)
        return eng_fail(error, ENG_FULL, "%" PRIu64 " of the queue's %" PRIu64 " prompt ids are taken",
                        scheduler->waiting_tokens, options->queue_tokens);
    return ENG_OK;
}

static eng_status enqueue(eng_scheduler *scheduler, const eng_request *request, eng_prompt *prompt, int32_t choice,
                          bool counts, eng_error *error) {
    eng_job *job;
    eng_status status =
        eng_job_create(&scheduler->options.rules, request, prompt, scheduler->last_id + 1, choice, &job, error);
    if (status != ENG_OK)
        return status;
    if (!eng_scheduler_join_owner(scheduler, job, request->owner)) {
        eng_job_free(job);
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a request");
    }
    job->queued_tokens = counts ? (int64_t)request->count : 0; // the prompt is there once
    scheduler->waiting_tokens += (uint64_t)job->queued_tokens;
    eng_scheduler_append(&scheduler->waiting, job);
    return ENG_OK;
}

// Timelines that the store has make room.
static eng_status begin_turn(const eng_scheduler *scheduler, const eng_request *request, eng_turn *turn,
                             eng_error *error) {
    eng_timelines *timelines = scheduler->options.timelines;
    eng_error reason;
    eng_status status;
    do {
        reason = (eng_error){0};
        status = eng_turn_begin(timelines, request, turn, &reason);
    } while (status == ENG_FULL &&
             eng_durable_evict(scheduler->options.durable,
                               eng_timelines_find(timelines, request->owner, request->timeline, NULL)));
    return status == ENG_OK ? ENG_OK : eng_fail(error, status, "%s", reason.text);
}

static eng_status submit_turn(eng_scheduler *scheduler, const eng_request *request, uint64_t *id, eng_error *error) {
    eng_turn turn = {0};
    eng_status status = begin_turn(scheduler, request, &turn, error);
    if (status != ENG_OK)
        return status;
    status = eng_durable_admit(scheduler->options.durable, turn.timeline, error);
    if (status == ENG_OK)
        status = check_room(scheduler, request, turn.prompt_end, error);
    if (status == ENG_OK)
        status = enqueue(scheduler, request, turn.prompt, 0, true, error);
    if (status == ENG_OK) {
        eng_job_take_turn(scheduler->waiting.tail, &turn);
        status = eng_share_enter(scheduler, scheduler->waiting.tail, error);
        if (status != ENG_OK)
            eng_scheduler_cancel(scheduler, scheduler->last_id + 1);
        else
            *id = ++scheduler->last_id;
    } else {
        eng_session none = {0};
        eng_turn_end(&turn, turn.timeline->position, &none);
    }
    return status;
}

// All choices or none. The limit of the queue may be passed by the choices of one request.
eng_status eng_scheduler_submit(eng_scheduler *scheduler, const eng_request *request, uint64_t *id, eng_error *error) {
    eng_status status = eng_request_check(&scheduler->options.rules, request, error);
    if (status == ENG_OK && request->timeline != 0)
        return submit_turn(scheduler, request, id, error);
    if (status == ENG_OK)
        status = check_room(scheduler, request, (int64_t)request->count, error);
    if (status != ENG_OK)
        return status;
    eng_prompt *prompt = eng_prompt_create(request->ids, request->count);
    if (!prompt)
        return eng_fail(error, ENG_NO_MEMORY, "out of memory for a prompt of %zu ids", request->count);
    int32_t choices = request->choices > 1 ? request->choices : 1;
    for (int32_t choice = 0; choice < choices && status == ENG_OK; choice++) {
        status = enqueue(scheduler, request, prompt, choice, choice == 0, error);
        if (status == ENG_OK)
            status = eng_share_enter(scheduler, scheduler->waiting.tail, error);
    }
    eng_prompt_release(prompt);
    if (status != ENG_OK)
        eng_scheduler_cancel(scheduler, scheduler->last_id + 1);
    else
        *id = ++scheduler->last_id;
    return status;
}

void eng_scheduler_drop(eng_scheduler *scheduler, eng_job_list *list, eng_job *job) {
    eng_share_let_go(scheduler, job, true);
    eng_job_cancel(job);
    eng_scheduler_bury(scheduler, list, job);
}

void eng_scheduler_cancel(eng_scheduler *scheduler, uint64_t id) {
    eng_job *job;
    if (id == 0) // the audit's
        return;
    while ((job = find(&scheduler->waiting, NULL, id)) != NULL) {
        scheduler->waiting_tokens -= (uint64_t)job->queued_tokens;
        eng_scheduler_drop(scheduler, &scheduler->waiting, job);
    }
    while ((job = find(&scheduler->running, NULL, id)) != NULL)
        eng_scheduler_drop(scheduler, &scheduler->running, job);
    while ((job = find(&scheduler->storing, NULL, id)) != NULL)
        eng_storing_cancel(scheduler, job);
}

void eng_scheduler_pause(eng_scheduler *scheduler, uint64_t id, bool paused) {
    const eng_job_list *const lists[] = {&scheduler->running, &scheduler->waiting};
    for (int i = 0; i < 2; i++)
        for (eng_job *job = NULL; id > 0 && (job = find(lists[i], job, id)) != NULL;) {
            job->paused = paused;
            if (paused)
                eng_share_let_go(scheduler, job, true);
        }
}

// ---------------------------------------------------------------------------------------------- composition of a step

// By priority, turn of the owner, place in the list, of those who follow nobody and wait for no store.
static eng_job *next_waiting(const eng_scheduler *scheduler) {
    eng_job *best = NULL;
    for (eng_job *job = scheduler->waiting.head; job; job = job->next) {
        if (job->share.leader || eng_lookup_waits(job->share.lookup))
            continue;
        if (!best || job->priority < best->priority ||
            (job->priority == best->priority && job->owner->admitted < best->owner->admitted))
            best = job;
    }
    return best;
}

static eng_status open_session(const eng_scheduler *scheduler, eng_job *job, eng_error *error) {
    const eng_scheduler_options *options = &scheduler->options;
    eng_snapshot *from = job->turn.from ? job->turn.from : job->share.start ? job->share.start->snapshot : NULL;
    return from ? eng_snapshot_open(from, eng_job_length(job), &job->session, error)
                : eng_session_open(options->pool, options->stream, eng_job_length(job), &job->session, error);
}

// Those that can be read again go to the host first.
static bool spill(const eng_scheduler *scheduler) {
    return eng_prefix_spill(scheduler->options.prefix) ||
           eng_snapshots_spill(eng_timelines_snapshots(scheduler->options.timelines));
}

eng_status eng_scheduler_make_session(const eng_scheduler *scheduler, eng_job *job, eng_error *error) {
    eng_status status;
    do {
        *error = (eng_error){0};
        status = open_session(scheduler, job, error);
    } while (status == ENG_FULL && spill(scheduler));
    return status;
}

static uint64_t resting(const eng_scheduler *scheduler) {
    eng_snapshot_sums prefix, timelines;
    eng_snapshots_sum(eng_prefix_snapshots(scheduler->options.prefix), &prefix);
    eng_snapshots_sum(eng_timelines_snapshots(scheduler->options.timelines), &timelines);
    return prefix.device + timelines.device;
}

static bool has_slot(const eng_scheduler *scheduler) {
    int32_t used;
    return eng_pool_slots(scheduler->options.pool, &used) > used || resting(scheduler) > 0;
}

// Its session, from the best that there is to begin from.
static eng_status let_in(eng_scheduler *scheduler, eng_job *job, eng_error *error) {
    if (!has_slot(scheduler) && !eng_audit_runs(scheduler))
        return ENG_FULL;
    eng_share_choose(scheduler, job);
    eng_status status = eng_scheduler_make_session(scheduler, job, error);
    if (status == ENG_FULL && eng_audit_runs(scheduler)) {
        eng_audit_stop(scheduler);
        status = eng_scheduler_make_session(scheduler, job, error);
    }
    return status;
}

// At most ENG_CHUNK_ADMISSIONS for each chunk: a slot that is opened is cleared, which takes time from those that
// generate.
static eng_status admit(eng_scheduler *scheduler, eng_error *error) {
    for (int i = 0; i < ENG_CHUNK_ADMISSIONS * scheduler->options.prompt_chunks; i++) {
        eng_job *job = next_waiting(scheduler);
        eng_error reason = {0};
        if (!job)
            return ENG_OK;
        eng_status status = let_in(scheduler, job, &reason);
        if (status == ENG_FULL)
            return ENG_OK;
        if (status != ENG_OK)
            return eng_fail(error, status, "%s", reason.text);
        eng_scheduler_unlink(&scheduler->waiting, job);
        scheduler->waiting_tokens -= (uint64_t)job->queued_tokens;
        job->owner->admitted = ++scheduler->clock;
        job->phase = ENG_PHASE_READING;
        eng_scheduler_append(&scheduler->running, job);
        scheduler->admitted++;
        status = eng_share_begin(scheduler, job, error);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static eng_step_jobs *composing(eng_scheduler *scheduler) {
    return &scheduler->steps[scheduler->started % ENG_FLIGHTS];
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
    eng_step_jobs *step = composing(scheduler);
    step->job[index] = job;
    step->count++;
    move_to_end(&scheduler->running, job);
    return ENG_OK;
}

// *waited_for: somebody's next token comes after this step, whether or not it is in it.
static eng_status add_generating(eng_scheduler *scheduler, bool *waited_for, eng_error *error) {
    eng_job *next, *job = scheduler->running.head;
    for (uint64_t left = scheduler->running.count; left > 0; left--, job = next) {
        bool added;
        next = job->next;
        if (job->paused || !eng_job_generates(job))
            continue;
        *waited_for = true;
        if (!eng_job_runs_ahead(job))
            continue;
        eng_status status = add_piece(scheduler, job, 1, &added, error);
        if (status != ENG_OK)
            return status;
    }
    return ENG_OK;
}

static bool reads(const eng_scheduler *scheduler, const eng_job *job) {
    return !job->paused && job->phase == ENG_PHASE_READING && !eng_job_generates(job) && job != scheduler->audit.job;
}

static int64_t count_readers(const eng_scheduler *scheduler) {
    int64_t readers = 0;
    for (const eng_job *job = scheduler->running.head; job; job = job->next)
        readers += reads(scheduler, job);
    return readers;
}

// Of those not yet examined in this step: by turn of the owner, place in the list. NULL: none is left.
static eng_job *next_reader(const eng_scheduler *scheduler) {
    eng_job *best = NULL;
    for (eng_job *job = scheduler->running.head; job; job = job->next)
        if (reads(scheduler, job) && job->examined != scheduler->step &&
            (!best || job->owner->read < best->owner->read))
            best = job;
    return best;
}

// The ids a prompt reads in this step: to the next grid boundary and, with a larger share, whole chunks beyond it.
static int32_t prompt_piece(const eng_scheduler *scheduler, const eng_job *job, int64_t share) {
    const eng_run *run = eng_job_run(job);
    int64_t end = run && run->end < job->prompt_count ? run->end : job->prompt_count;
    const int64_t stop = eng_share_stop(scheduler, job);
    end = stop < end ? stop : end;
    int64_t left = end - job->session.read;
    if (run && run->kind == KERN_ROW_GENERATED)
        return (int32_t)(left < scheduler->options.chunk ? left : scheduler->options.chunk);
    int64_t count = eng_batch_piece_length(scheduler->options.batch, &job->session, left);
    if (!job->prompt_logprobs) // whose logits have room for one chunk
        count += (share - 1) * scheduler->options.chunk;
    return (int32_t)(count < left ? count : left);
}

// However few its ids, a piece costs a pass over the weights: it counts as a quarter of a chunk at least.
static int64_t prompt_cost(const eng_scheduler *scheduler, int32_t count) {
    int32_t least = scheduler->options.chunk / 4;
    return count < least ? least : count;
}

// What finds no room comes first in the next step, before those that generate.
static eng_status add_prompt(eng_scheduler *scheduler, eng_job *job, int32_t count, int64_t *budget, eng_error *error) {
    bool added;
    job->examined = scheduler->step;
    eng_share_leave(scheduler, job);
    eng_status status = add_piece(scheduler, job, count, &added, error);
    if (status != ENG_OK)
        return status;
    if (added) {
        *budget -= prompt_cost(scheduler, count);
        job->owner->read = ++scheduler->clock;
    } else if (!scheduler->owed) {
        scheduler->owed = job;
    }
    return ENG_OK;
}

static eng_status add_owed(eng_scheduler *scheduler, int64_t *budget, eng_error *error) {
    eng_job *job = scheduler->owed;
    scheduler->owed = NULL;
    if (!job || !reads(scheduler, job))
        return ENG_OK;
    return add_prompt(scheduler, job, prompt_piece(scheduler, job, 1), budget, error);
}

// Chunks of one prompt; those of exact solves follow one another on every device.
static int64_t most_chunks(const eng_scheduler *scheduler, const eng_job *job, int64_t factor) {
    const eng_run *run = eng_job_run(job);
    const eng_knobs *knobs = run ? &run->knobs : &job->knobs;
    return knobs->cg_mode == ENG_CG_EXACT ? factor : factor * scheduler->options.row_chunks;
}

static eng_status add_audit(eng_scheduler *scheduler, int64_t factor, int64_t *budget, eng_error *error) {
    eng_job *job = scheduler->audit.job;
    if (!eng_audit_runs(scheduler) || job->session.read == scheduler->audit.boundary->read)
        return ENG_OK;
    const int64_t share = most_chunks(scheduler, job, factor);
    return add_prompt(scheduler, job, prompt_piece(scheduler, job, share), budget, error);
}

// Prompts in turns until the step's budget is spent.
static eng_status add_prompts(eng_scheduler *scheduler, int64_t factor, int64_t budget, eng_error *error) {
    const int64_t readers = count_readers(scheduler), chunks = factor * scheduler->options.prompt_chunks;
    const int64_t share = readers > 0 && chunks > readers ? chunks / readers : 1;
    for (eng_job *job; (job = next_reader(scheduler)) != NULL;) {
        const int64_t most = most_chunks(scheduler, job, factor);
        int32_t count = prompt_piece(scheduler, job, share < most ? share : most);
        if (prompt_cost(scheduler, count) > budget)
            break;
        eng_status status = add_prompt(scheduler, job, count, &budget, error);
        if (status != ENG_OK)
            return status;
    }
    return readers == 0 ? add_audit(scheduler, factor, &budget, error) : ENG_OK;
}

static eng_status compose(eng_scheduler *scheduler, eng_error *error) {
    int64_t budget = 0;
    eng_status status = admit(scheduler, error);
    if (status == ENG_OK)
        status = eng_audit_admit(scheduler, error);
    if (status == ENG_OK)
        status = add_owed(scheduler, &budget, error);
    bool waited_for = false;
    if (status == ENG_OK)
        status = add_generating(scheduler, &waited_for, error);
    const int64_t factor = waited_for ? 1 : ENG_IDLE_FACTOR;
    budget += factor * scheduler->options.prompt_chunks * scheduler->options.chunk;
    return status == ENG_OK ? add_prompts(scheduler, factor, budget, error) : status;
}

// Composes a step and starts it; with nobody in it there is none.
static eng_status start(eng_scheduler *scheduler, bool *started, eng_error *error) {
    eng_step_jobs *step = composing(scheduler);
    step->count = 0;
    scheduler->step++;
    eng_batch_clear(scheduler->options.batch);
    eng_status status = compose(scheduler, error);
    if (status == ENG_OK)
        status = eng_batch_start(scheduler->options.batch, error);
    if (status != ENG_OK)
        return status;
    for (int32_t i = 0; i < step->count; i++)
        eng_job_started(step->job[i], i);
    *started = step->count > 0;
    scheduler->started += *started;
    return ENG_OK;
}

static uint64_t underway(const eng_scheduler *scheduler) {
    return scheduler->started - scheduler->finished;
}

// Whether more jobs would be left out of a step that runs ahead than go on in it.
static bool most_must_wait(const eng_scheduler *scheduler) {
    int64_t waiting = 0, going = 0;
    for (const eng_job *job = scheduler->running.head; job; job = job->next)
        if (!job->paused && eng_job_generates(job))
            *(eng_job_follows(job) ? &waiting : &going) += 1;
    return waiting > going;
}

// One step more than what is to be finished, where steps run ahead.
static eng_status start_steps(eng_scheduler *scheduler, eng_error *error) {
    bool started = true;
    eng_status status = underway(scheduler) == 0 ? start(scheduler, &started, error) : ENG_OK;
    if (status == ENG_OK && started && scheduler->options.ahead && !most_must_wait(scheduler))
        status = start(scheduler, &started, error);
    return status;
}

// ------------------------------------------------------------------------------------------------------------ results

void eng_scheduler_tell(eng_scheduler *scheduler, eng_job_list *list, eng_job *job, eng_event_fn on_event,
                        void *context) {
    eng_event event;
    if (job->phase == ENG_PHASE_ENDED)
        eng_scheduler_bury(scheduler, list, job);
    if (!eng_job_event(job, &event))
        return;
    on_event(context, &event);
    eng_job_told(job, &event);
}

// While there is nobody to be read: who stands still takes the tokens that it left for later through their loops, one
// session a step.
static eng_status catch_up(const eng_scheduler *scheduler, bool *worked, eng_error *error) {
    const eng_job *job = scheduler->running.head;
    while (job && !eng_session_waits(&job->session))
        job = job->next;
    *worked = job != NULL;
    return job ? eng_session_settle(&job->session, error) : ENG_OK;
}

// Those that no step points to any more.
static void free_buried(eng_scheduler *scheduler) {
    eng_job **place = &scheduler->buried;
    while (*place) {
        eng_job *job = *place;
        if (job->underway > 0) {
            place = &job->next;
            continue;
        }
        *place = job->next;
        eng_job_free(job);
    }
}

static eng_status finish(eng_scheduler *scheduler, eng_event_fn on_event, void *context, eng_error *error) {
    eng_status status = eng_batch_finish(scheduler->options.batch, error);
    if (status != ENG_OK)
        return status;
    const eng_step_jobs *step = &scheduler->steps[scheduler->finished++ % ENG_FLIGHTS];
    scheduler->stepping = true;
    for (int32_t i = 0; i < step->count; i++) {
        eng_job *job = step->job[i];
        bool ended = job->phase == ENG_PHASE_ENDED; // by an event of this step, or since it was started
        eng_job_accept(&scheduler->options.rules, job, scheduler->options.batch, i);
        eng_share_accepted(scheduler, job);
        if (job == scheduler->audit.job)
            status = status == ENG_OK ? eng_audit_accepted(scheduler, error) : status;
        else if (!ended && !eng_storing_hold(scheduler, job))
            eng_scheduler_tell(scheduler, &scheduler->running, job, on_event, context);
    }
    scheduler->stepping = false;
    free_buried(scheduler);
    return status;
}

static bool is_quiet(const eng_scheduler *scheduler) {
    return !scheduler->running.head && !scheduler->waiting.head && !scheduler->storing.head;
}

eng_status eng_scheduler_step(eng_scheduler *scheduler, eng_event_fn on_event, void *context, bool *worked,
                              eng_error *error) {
    *worked = false;
    if (scheduler->stepping)
        return eng_fail(error, ENG_INVALID, "a step may not be run from inside a step");
    if (scheduler->fault.code != ENG_OK)
        return eng_fail(error, scheduler->fault.code, "%s", scheduler->fault.text);
    bool stored = false;
    eng_status status = eng_durable_poll(scheduler->options.durable, &stored, error);
    if (status != ENG_OK)
        return status;
    eng_prefix_store_poll(scheduler->options.prefix_store, is_quiet(scheduler), &stored);
    scheduler->stepping = true;
    stored |= eng_storing_tell(scheduler, on_event, context);
    scheduler->stepping = false;
    free_buried(scheduler);
    scheduler->admitted = 0;
    status = start_steps(scheduler, &scheduler->fault);
    *worked = stored || underway(scheduler) > 0 || scheduler->admitted > 0;
    if (status == ENG_OK && !*worked)
        status = catch_up(scheduler, worked, &scheduler->fault);
    if (status == ENG_OK && underway(scheduler) > 0)
        status = finish(scheduler, on_event, context, &scheduler->fault);
    return status == ENG_OK ? ENG_OK : eng_fail(error, scheduler->fault.code, "%s", scheduler->fault.text);
}

static void gauge_prefix(const eng_scheduler *scheduler, eng_gauges *out) {
    eng_prefix_sums sums;
    eng_prefix_sum(scheduler->options.prefix, &sums);
    out->prefix_hits = scheduler->prefix_hits;
    out->prefix_misses = scheduler->prefix_misses;
    out->prefix_states = sums.states;
    out->prefix_bytes = sums.bytes;
    out->prefix_bytes_total = sums.budget;
    out->prefix_evictions = sums.evictions;
    out->prefix_audits = scheduler->audit.audits;
    out->prefix_mismatches = scheduler->audit.mismatches;
}

void eng_scheduler_gauges(const eng_scheduler *scheduler, eng_gauges *out) {
    int32_t slots_used, pages_used;
    eng_snapshot_sums kept;
    eng_snapshots_sum(eng_timelines_snapshots(scheduler->options.timelines), &kept);
    out->queued_requests = scheduler->waiting.count;
    out->queued_tokens = scheduler->waiting_tokens;
    out->running = scheduler->running.count - eng_audit_runs(scheduler);
    out->states_total = (uint64_t)eng_pool_slots(scheduler->options.pool, &slots_used);
    out->states_used = (uint64_t)slots_used - resting(scheduler);
    out->kv_pages_total = (uint64_t)eng_pool_page_count(scheduler->options.pool, &pages_used);
    out->kv_pages_used = (uint64_t)pages_used;
    out->timelines = (uint64_t)eng_timelines_count(scheduler->options.timelines);
    out->kept_on_device = kept.device;
    out->kept_on_host = kept.host;
    out->kept_bytes = eng_timelines_bytes(scheduler->options.timelines, &out->kept_bytes_total);
    gauge_prefix(scheduler, out);
}

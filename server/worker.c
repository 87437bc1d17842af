// SPDX-License-Identifier: Apache-2.0
// The engine thread and the two queues between it and the loop thread.
//
// One mutex guards everything both sides touch; it is held for a few pointer operations and never while the engine
// computes. Inbox: a list of jobs with marks for what is wanted of them (submit, cancel, resume); a job stands in it
// once however many marks it has, so the inbox needs no memory of its own and a cancellation cannot fail. Outbox: a
// list of events that one step filled and one lock moves over; the loop is woken when it was empty.
#include "server/worker_private.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t monotonic_ms(void) {
    return srv_clock_us() / 1000;
}

// ---- under the lock ------------------------------------------------------------------------------------------------

static void put_in_inbox(srv_worker *worker, srv_job *job) {
    if (job->in_inbox)
        return;
    job->in_inbox = true;
    job->inbox_next = NULL;
    srv_job_retain(job);
    if (worker->inbox_tail)
        worker->inbox_tail->inbox_next = job;
    else
        worker->inbox_head = job;
    worker->inbox_tail = job;
    pthread_cond_signal(&worker->news);
}

static void uncount(srv_worker *worker, srv_job *job) {
    srv_queue_start(worker, job, 0);
    srv_queue_free(worker, job, job->places);
}

// ---- loop thread ---------------------------------------------------------------------------------------------------

// All of them enter the queue, or none.
static eng_status enter(srv_worker *worker, srv_job *const *jobs, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (srv_queue_enter(worker, jobs[i])) {
            while (i-- > 0)
                uncount(worker, jobs[i]);
            return ENG_NO_MEMORY;
        }
    for (size_t i = 0; i < count; i++) {
        jobs[i]->wants_submit = true;
        put_in_inbox(worker, jobs[i]);
    }
    return ENG_OK;
}

eng_status srv_worker_submit(srv_worker *worker, srv_job *const *jobs, size_t count, double share, srv_no_room *why) {
    srv_room room = {.owner = jobs[0]->request.owner, .share = share};
    eng_status status;

    for (size_t i = 0; i < count; i++) {
        room.tokens += jobs[i]->request.count;
        room.places += jobs[i]->choice_count;
    }
    pthread_mutex_lock(&worker->lock);
    if (worker->failed)
        status = ENG_DEVICE;
    else if (!srv_queue_has_room(worker, &room, why))
        status = ENG_FULL;
    else
        status = enter(worker, jobs, count);
    pthread_mutex_unlock(&worker->lock);
    return status;
}

void srv_worker_call(srv_worker *worker, srv_call *call) {
    call->next = NULL;
    call->worker = worker;
    call->waits = false;
    worker->calls++;
    pthread_mutex_lock(&worker->lock);
    *worker->asked_end = call;
    worker->asked_end = &call->next;
    pthread_cond_signal(&worker->news);
    pthread_mutex_unlock(&worker->lock);
}

srv_call *srv_worker_take_calls(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    srv_call *calls = worker->answered;
    worker->answered = NULL;
    worker->answered_end = &worker->answered;
    pthread_mutex_unlock(&worker->lock);
    for (const srv_call *call = calls; call; call = call->next)
        worker->calls--;
    return calls;
}

bool srv_worker_has_room(srv_worker *worker, const srv_room *room, srv_no_room *why) {
    pthread_mutex_lock(&worker->lock);
    const bool has_room = srv_queue_has_room(worker, room, why);
    pthread_mutex_unlock(&worker->lock);
    return has_room;
}

double srv_worker_load(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    const double load = srv_queue_load(worker);
    pthread_mutex_unlock(&worker->lock);
    return load;
}

uint64_t srv_worker_places(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    const uint64_t places = worker->places;
    pthread_mutex_unlock(&worker->lock);
    return places;
}

bool srv_worker_is_quiet(srv_worker *worker) {
    return worker->calls == 0 && srv_worker_places(worker) == 0;
}

void srv_worker_set_queue(srv_worker *worker, uint64_t requests, uint64_t tokens) {
    pthread_mutex_lock(&worker->lock);
    worker->options.queue_requests = requests;
    worker->options.queue_tokens = tokens;
    pthread_mutex_unlock(&worker->lock);
}

void srv_worker_cancel(srv_worker *worker, srv_job *job) {
    job->owner = NULL;
    pthread_mutex_lock(&worker->lock);
    // What counts no more has ended.
    if (job->places) {
        srv_counter_add(&worker->stats.cancelled, job->places);
        job->wants_cancel = true;
        put_in_inbox(worker, job);
    }
    uncount(worker, job);
    pthread_mutex_unlock(&worker->lock);
}

srv_event *srv_worker_take(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    srv_event *events = worker->outbox_head;
    worker->outbox_head = worker->outbox_tail = NULL;
    pthread_mutex_unlock(&worker->lock);
    return events;
}

void srv_event_free(srv_worker *worker, srv_event *event) {
    srv_job *job = event->job;

    pthread_mutex_lock(&worker->lock);
    job->unread -= event->size;
    if (job->paused && job->places && job->unread <= job->window / 2) {
        job->paused = false;
        job->wants_resume = true;
        put_in_inbox(worker, job);
    }
    pthread_mutex_unlock(&worker->lock);
    srv_job_release(job);
    srv_token_list_free(&event->prompt);
    srv_token_list_free(&event->drawn);
    free(event);
}

srv_worker_state srv_worker_read_state(const srv_worker *worker) {
    return atomic_load_explicit(&worker->state, memory_order_acquire);
}

const eng_engine *srv_worker_engine(const srv_worker *worker) {
    return atomic_load_explicit(&worker->published, memory_order_acquire);
}

const eng_error *srv_worker_error(const srv_worker *worker) {
    return &worker->error;
}

uint64_t srv_worker_busy_ms(const srv_worker *worker) {
    const uint64_t since = atomic_load_explicit(&worker->busy_since, memory_order_relaxed);
    const uint64_t now = monotonic_ms();
    return since && now > since ? now - since : 0;
}

// ---- engine thread: events -----------------------------------------------------------------------------------------

static void activate(srv_worker *worker, srv_job *job) {
    srv_job_retain(job);
    job->active_previous = NULL;
    job->active_next = worker->active;
    if (worker->active)
        worker->active->active_previous = job;
    worker->active = job;
}

static void deactivate(srv_worker *worker, srv_job *job) {
    if (job->active_previous)
        job->active_previous->active_next = job->active_next;
    else
        worker->active = job->active_next;
    if (job->active_next)
        job->active_next->active_previous = job->active_previous;
    job->id = 0;
    srv_job_release(job);
}

// What an event brings beside what the engine says of it. The lists are taken, also on failure.
typedef struct content {
    const char *text;
    size_t length;
    srv_token_list prompt, drawn;
} content;

static void drop_content(content *content) {
    srv_token_list_free(&content->prompt);
    srv_token_list_free(&content->drawn);
}

static srv_event *make_event(srv_job *job, const eng_event *from, content *content) {
    const char *message =
        from->finish == ENG_FINISH_ERROR ? (from->message ? from->message : eng_status_text(from->status)) : "";
    const size_t message_bytes = strlen(message) + 1, length = content->length;
    srv_event *event =
        content->prompt.failed || content->drawn.failed ? NULL : malloc(sizeof *event + length + message_bytes);
    if (!event) {
        drop_content(content);
        return NULL;
    }
    *event = (srv_event){
        .job = job,
        .choice = from->choice,
        .finish = from->finish,
        .status = from->status,
        .position = from->position,
        .durable = from->durable,
        .prompt = content->prompt,
        .drawn = content->drawn,
        .size = sizeof *event + length + message_bytes + srv_token_list_bytes(content->prompt.count, 0) +
                srv_token_list_bytes(content->drawn.count, 0) +
                (content->prompt.top_count + content->drawn.top_count) * sizeof(eng_alternative),
        .text_length = length,
        .message = event->text + length,
    };
    if (from->usage)
        event->usage = *from->usage;
    if (length)
        memcpy(event->text, content->text, length);
    memcpy(event->text + length, message, message_bytes);
    srv_token_list_seal(&event->prompt);
    srv_token_list_seal(&event->drawn);
    srv_job_retain(job);
    return event;
}

static void add_to_step(srv_worker *worker, srv_event *event) {
    event->next = NULL;
    if (worker->step_tail)
        worker->step_tail->next = event;
    else
        worker->step_head = event;
    worker->step_tail = event;
}

// Without memory for an event there is none to say so either: the text is short then, hence the smallest error event,
// and when even that fails the whole engine counts as failed (see run_step).
static eng_status report(srv_worker *worker, srv_job *job, const eng_event *from, content *content) {
    srv_event *event = make_event(job, from, content);
    if (!event) {
        const eng_event short_of_memory = {
            .choice = from->choice, .finish = ENG_FINISH_ERROR, .status = ENG_NO_MEMORY, .usage = from->usage};
        event = make_event(job, &short_of_memory, &(struct content){0});
    }
    if (!event)
        return ENG_NO_MEMORY;
    if (event->finish != ENG_FINISH_NONE) {
        job->choices[event->choice].ended = true;
        job->finished++;
    }
    job->ended = job->finished == job->choice_count || event->finish == ENG_FINISH_ERROR;
    add_to_step(worker, event);
    return ENG_OK;
}

static eng_status report_piece(srv_worker *worker, srv_job *job, const eng_event *from) {
    content content = {.text = from->text, .length = from->text_length};

    if (job->keep_tokens) {
        srv_token_list_add(&content.prompt, from->prompt, from->prompt_count);
        srv_token_list_add(&content.drawn, from->tokens, from->token_count);
    } else if (!from->text_length && from->finish == ENG_FINISH_NONE)
        return ENG_OK;
    return report(worker, job, from, &content);
}

// Not streamed: collected until the last event, or an error.
static eng_status collect(srv_worker *worker, srv_job *job, const eng_event *from) {
    const eng_event too_long = {
        .choice = from->choice, .finish = ENG_FINISH_ERROR, .status = ENG_NO_MEMORY, .usage = from->usage};
    srv_job_choice *choice = &job->choices[from->choice];

    srv_buf_append(&choice->text, from->text, from->text_length);
    if (job->keep_tokens) {
        srv_token_list_add(&choice->prompt, from->prompt, from->prompt_count);
        srv_token_list_add(&choice->drawn, from->tokens, from->token_count);
    }
    if (!srv_buf_ok(&choice->text) || choice->prompt.failed || choice->drawn.failed)
        return report(worker, job, &too_long, &(content){0});
    if (from->finish == ENG_FINISH_NONE)
        return ENG_OK;
    content all = {
        .text = choice->text.data, .length = choice->text.length, .prompt = choice->prompt, .drawn = choice->drawn};
    choice->prompt = choice->drawn = (srv_token_list){0};
    return report(worker, job, from, &all);
}

static void on_engine_event(void *context, const eng_event *from) {
    srv_worker *worker = context;
    srv_job *job = from->user;

    srv_job_choice *choice = &job->choices[from->choice];

    if (job->ended)
        return;
    if (!choice->started) {
        choice->started = worker->step_started = true;
        job->started++;
    }
    job->prompt_told += from->prompt_count;
    srv_worker_note_event(worker, job, choice, from);
    const eng_status status = job->window ? report_piece(worker, job, from) : collect(worker, job, from);
    if (status)
        eng_fail(&worker->error, status, "no memory for an event");
    // By a fault: other choices run on, or the one itself does because the fault is not the engine's.
    if (job->ended && (job->finished < job->choice_count || from->finish == ENG_FINISH_NONE))
        eng_cancel(worker->engine, job->id);
}

// Whether choices have begun whose events the reader keeps back until the first has told the whole prompt. A pause
// would keep the first from doing so. It has nearly done: the others begin where its last chunk does.
static bool must_run(const srv_job *job) {
    return job->request.prompt_logprobs && job->started > 1 && job->prompt_told < job->request.count;
}

// Under the lock: what the step's events mean for the counts and windows.
static void account_step(srv_worker *worker) {
    for (srv_job *job = worker->step_started ? worker->active : NULL; job; job = job->active_next)
        if (job->started && job->waiting)
            srv_queue_start(worker, job, job->choice_count - job->started);
    worker->step_started = false;
    for (srv_event *event = worker->step_head; event; event = event->next) {
        srv_job *job = event->job;
        job->unread += event->size;
        if (job->ended)
            uncount(worker, job);
        else if (event->finish != ENG_FINISH_NONE && job->places)
            srv_queue_free(worker, job, 1);
        if (!job->ended && job->window && !job->paused && job->unread > job->window && !must_run(job)) {
            job->paused = true;
            eng_pause(worker->engine, job->id, true); // sets a mark, so the lock may be held
        }
    }
}

// Moves the events of a step of this many seconds over and takes ended jobs out of the active ones.
static void publish(srv_worker *worker, double seconds) {
    if (!worker->step_head && !worker->step_started && seconds <= 0)
        return;
    pthread_mutex_lock(&worker->lock);
    account_step(worker);
    srv_queue_pace(worker, seconds);
    const bool wake = worker->step_head && !worker->outbox_head;
    if (worker->outbox_head)
        worker->outbox_tail->next = worker->step_head;
    else
        worker->outbox_head = worker->step_head;
    if (worker->step_tail)
        worker->outbox_tail = worker->step_tail;
    worker->step_head = worker->step_tail = NULL;
    pthread_mutex_unlock(&worker->lock);
    for (srv_job *job = worker->active, *next; job; job = next) {
        next = job->active_next;
        if (job->ended)
            deactivate(worker, job);
    }
    if (wake)
        worker->options.wake(worker->options.wake_context);
}

// ---- engine thread: calls -----------------------------------------------------------------------------------------

static void answer_call(srv_call *call) {
    srv_worker *worker = call->worker;

    call->next = NULL;
    pthread_mutex_lock(&worker->lock);
    *worker->answered_end = call;
    worker->answered_end = &call->next;
    pthread_mutex_unlock(&worker->lock);
    worker->options.wake(worker->options.wake_context);
}

void srv_call_wait(srv_call *call) {
    srv_worker *worker = call->worker;

    call->waits = true;
    call->previous = NULL;
    call->next = worker->waiting_calls;
    if (call->next)
        call->next->previous = call;
    worker->waiting_calls = call;
}

void srv_call_end(srv_call *call) {
    if (call->previous)
        call->previous->next = call->next;
    else
        call->worker->waiting_calls = call->next;
    if (call->next)
        call->next->previous = call->previous;
    call->waits = false;
    answer_call(call);
}

// The engine answers no more.
static void end_waiting_calls(srv_worker *worker) {
    while (worker->waiting_calls) {
        srv_call *call = worker->waiting_calls;
        call->run(call, NULL);
        srv_call_end(call);
    }
}

// Under the lock: all that were asked for.
static srv_call *take_asked(srv_worker *worker) {
    srv_call *asked = worker->asked;

    worker->asked = NULL;
    worker->asked_end = &worker->asked;
    return asked;
}

// One after the other; engine NULL: they are told that there is none.
static void run_calls(srv_call *call, eng_engine *engine) {
    for (srv_call *next; call; call = next) {
        next = call->next;
        call->run(call, engine);
        if (!call->waits)
            answer_call(call);
    }
}

static void refuse_calls(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    srv_call *asked = take_asked(worker);
    pthread_mutex_unlock(&worker->lock);
    run_calls(asked, NULL);
}

// ---- engine thread: the loop ---------------------------------------------------------------------------------------

static void fail_job(srv_worker *worker, srv_job *job, eng_status status, const char *message) {
    const eng_event failure = {.finish = ENG_FINISH_ERROR, .status = status, .message = message};
    if (job->ended)
        return;
    // Without memory the client's answer never comes; the worker fails right after this, and the server ends.
    if (report(worker, job, &failure, &(content){0}))
        eng_fail(&worker->error, ENG_NO_MEMORY, "no memory for an event");
}

static void submit(srv_worker *worker, srv_job *job) {
    eng_error error = {0};

    activate(worker, job);
    const eng_status status = eng_submit(worker->engine, &job->request, &job->id, &error);
    if (status)
        fail_job(worker, job, status, error.code ? error.text : NULL);
}

// One job out of the inbox, with the marks it had when it was taken.
static void handle(srv_worker *worker, srv_job *job, bool wants_submit, bool wants_cancel, bool wants_resume) {
    if (wants_cancel) {
        if (!wants_submit && !job->ended) {
            job->ended = true;
            eng_cancel(worker->engine, job->id);
            deactivate(worker, job);
        }
        return;
    }
    if (wants_submit)
        submit(worker, job);
    else if (wants_resume && !job->ended)
        eng_pause(worker->engine, job->id, false);
}

// Under the lock: until there is news, or the engine wants a step for what it has to do in time.
static void wait_for_news(srv_worker *worker) {
    const int64_t patience_ms = eng_idle_ms(worker->engine);
    const uint64_t until_us = srv_clock_us() + (uint64_t)(patience_ms < 0 ? 0 : patience_ms) * 1000;
    const struct timespec until = {.tv_sec = (time_t)(until_us / 1000000),
                                   .tv_nsec = (long)(until_us % 1000000 * 1000)};
    bool late = false;

    atomic_store_explicit(&worker->busy_since, 0, memory_order_relaxed);
    while (!late && !worker->poked && !worker->inbox_head && !worker->asked && !worker->stop) {
        if (patience_ms < 0)
            pthread_cond_wait(&worker->news, &worker->lock);
        else
            late = pthread_cond_timedwait(&worker->news, &worker->lock, &until) != 0;
    }
}

// Empties the inbox; waits for it while the engine has nothing to do. False: stop.
static bool take_inbox(srv_worker *worker, bool idle) {
    pthread_mutex_lock(&worker->lock);
    if (idle)
        wait_for_news(worker);
    worker->poked = false;
    while (worker->inbox_head && !worker->stop) {
        srv_job *job = worker->inbox_head;
        worker->inbox_head = job->inbox_next;
        if (!worker->inbox_head)
            worker->inbox_tail = NULL;
        const bool wants_submit = job->wants_submit, wants_cancel = job->wants_cancel;
        const bool wants_resume = job->wants_resume;
        job->in_inbox = job->wants_submit = job->wants_cancel = job->wants_resume = false;
        pthread_mutex_unlock(&worker->lock);
        handle(worker, job, wants_submit, wants_cancel, wants_resume);
        srv_job_release(job);
        pthread_mutex_lock(&worker->lock);
    }
    const bool stop = worker->stop;
    // Now that the inbox is empty: a call comes after the cancellation that was asked for before it.
    srv_call *asked = stop ? NULL : take_asked(worker);
    pthread_mutex_unlock(&worker->lock);
    run_calls(asked, worker->engine);
    return !stop;
}

static void serve(srv_worker *worker) {
    bool worked = false;

    while (take_inbox(worker, !worked)) {
        const uint64_t began_us = srv_clock_us();
        atomic_store_explicit(&worker->busy_since, began_us / 1000, memory_order_relaxed);
        const eng_status status = eng_step(worker->engine, on_engine_event, worker, &worked, &worker->error);
        if (status && !worker->error.code)
            eng_fail(&worker->error, status, "%s", eng_status_text(status));
        if (worker->error.code)
            return;
        publish(worker, srv_worker_note_step(worker, began_us, worked));
    }
}

// The engine is unusable: everyone who waits is told, and later submissions are refused.
static void fail_all(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->failed = true;
    pthread_mutex_unlock(&worker->lock);
    for (;;) { // what was submitted before the mark
        pthread_mutex_lock(&worker->lock);
        srv_job *job = worker->inbox_head;
        const bool fresh = job && job->wants_submit;
        if (job) {
            worker->inbox_head = job->inbox_next;
            job->in_inbox = job->wants_submit = false;
        }
        pthread_mutex_unlock(&worker->lock);
        if (!job)
            break;
        if (fresh)
            activate(worker, job);
        srv_job_release(job);
    }
    worker->inbox_tail = NULL;
    for (srv_job *job = worker->active; job; job = job->active_next)
        fail_job(worker, job, worker->error.code, worker->error.text);
    publish(worker, 0);
}

static void drop_all(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    for (srv_job *job = worker->inbox_head, *next; job; job = next) {
        next = job->inbox_next;
        srv_job_release(job);
    }
    worker->inbox_head = worker->inbox_tail = NULL;
    pthread_mutex_unlock(&worker->lock);
    while (worker->active)
        deactivate(worker, worker->active);
}

static void set_state(srv_worker *worker, srv_worker_state state) {
    atomic_store_explicit(&worker->state, state, memory_order_release);
    worker->options.wake(worker->options.wake_context);
}

// The engine's own data may be in use by other threads until the worker is stopped.
static void wait_for_stop(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    while (!worker->stop) {
        pthread_mutex_unlock(&worker->lock);
        refuse_calls(worker);
        pthread_mutex_lock(&worker->lock);
        if (!worker->stop && !worker->asked)
            pthread_cond_wait(&worker->news, &worker->lock);
    }
    pthread_mutex_unlock(&worker->lock);
}

// Opens the engine of a folder that is not as it was known, and that stays the same meanwhile.
static srv_worker_state open_engine(srv_worker *worker) {
    const srv_worker_options *options = &worker->options;
    eng_fingerprint found;

    if (options->reads_first && eng_read_fingerprint(options->engine.model_dir, &found, &worker->error))
        return SRV_WORKER_UNLOADABLE;
    if (options->reads_first && strcmp(found.whole, options->known) == 0)
        return SRV_WORKER_UNCHANGED;
    if (eng_open(&options->engine, &worker->engine, &worker->error))
        return SRV_WORKER_UNLOADABLE;
    if (options->reads_first && strcmp(found.whole, eng_info(worker->engine)->fingerprint.whole) != 0) {
        eng_close(worker->engine);
        worker->engine = NULL;
        eng_fail(&worker->error, ENG_CONFLICT, "%s: changed while it was read", options->engine.model_dir);
        return SRV_WORKER_UNLOADABLE;
    }
    return SRV_WORKER_READY;
}

static void live(srv_worker *worker) {
    atomic_store_explicit(&worker->busy_since, monotonic_ms(), memory_order_relaxed);
    const srv_worker_state state = open_engine(worker);
    if (state != SRV_WORKER_READY) {
        atomic_store_explicit(&worker->busy_since, 0, memory_order_relaxed);
        set_state(worker, state);
        return;
    }
    pthread_mutex_lock(&worker->lock);
    worker->rows = (uint64_t)eng_info(worker->engine)->max_rows;
    pthread_mutex_unlock(&worker->lock);
    srv_worker_note_gauges(worker);
    atomic_store_explicit(&worker->published, worker->engine, memory_order_release);
    set_state(worker, SRV_WORKER_READY);
    serve(worker);
    atomic_store_explicit(&worker->busy_since, 0, memory_order_relaxed);
    if (worker->error.code) {
        fail_all(worker);
        end_waiting_calls(worker);
        set_state(worker, SRV_WORKER_FAILED);
        wait_for_stop(worker);
    }
    drop_all(worker);
    eng_close(worker->engine);
    end_waiting_calls(worker);
}

static void *engine_thread(void *context) {
    srv_worker *worker = context;

    live(worker);
    atomic_store_explicit(&worker->ended, true, memory_order_release);
    worker->options.wake(worker->options.wake_context);
    return NULL;
}

// Any thread.
static void poke(void *context) {
    srv_worker *worker = context;

    pthread_mutex_lock(&worker->lock);
    worker->poked = true;
    pthread_cond_signal(&worker->news);
    pthread_mutex_unlock(&worker->lock);
}

static int make_condition(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    int fault = pthread_condattr_init(&monotonic);

    if (fault)
        return fault;
    fault = pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    if (!fault)
        fault = pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return fault;
}

eng_status srv_worker_start(const srv_worker_options *options, srv_worker **out, eng_error *error) {
    srv_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return eng_fail(error, ENG_NO_MEMORY, "no memory for an engine thread");
    worker->options = *options;
    worker->options.engine.wake = poke;
    worker->options.engine.wake_context = worker;
    worker->asked_end = &worker->asked;
    worker->answered_end = &worker->answered;
    if (pthread_mutex_init(&worker->lock, NULL) != 0)
        goto free_worker;
    if (make_condition(&worker->news) != 0)
        goto destroy_lock;
    if (pthread_create(&worker->thread, NULL, engine_thread, worker) != 0)
        goto destroy_news;
    *out = worker;
    return ENG_OK;

destroy_news:
    pthread_cond_destroy(&worker->news);
destroy_lock:
    pthread_mutex_destroy(&worker->lock);
free_worker:
    free(worker);
    return eng_fail(error, ENG_NO_MEMORY, "an engine thread cannot be started");
}

void srv_worker_end(srv_worker *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->stop = true;
    pthread_cond_signal(&worker->news);
    pthread_mutex_unlock(&worker->lock);
}

bool srv_worker_ended(const srv_worker *worker) {
    return atomic_load_explicit(&worker->ended, memory_order_acquire);
}

void srv_worker_stop(srv_worker *worker) {
    if (!worker)
        return;
    srv_worker_end(worker);
    pthread_join(worker->thread, NULL);
    srv_call *calls;
    while (refuse_calls(worker), (calls = srv_worker_take_calls(worker)) != NULL)
        for (srv_call *call = calls, *next; call; call = next) { // which may ask for more
            next = call->next;
            call->done(call);
        }
    for (srv_event *event = srv_worker_take(worker), *next; event; event = next) {
        next = event->next;
        srv_event_free(worker, event);
    }
}

void srv_worker_free(srv_worker *worker) {
    if (!worker)
        return;
    for (srv_holder *holder = worker->holders, *next; holder; holder = next) {
        next = holder->next;
        free(holder);
    }
    pthread_cond_destroy(&worker->news);
    pthread_mutex_destroy(&worker->lock);
    free(worker);
}

// SPDX-License-Identifier: Apache-2.0
// Private to the worker's files: a job and a worker, and which thread owns which field.
//
// worker.c runs the threads and the lists between them, worker_queue.c counts who finds room, worker_job.c makes and
// frees jobs, worker_stats.c draws the figures.
#ifndef SERVER_WORKER_PRIVATE_H
#define SERVER_WORKER_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "server/buf.h"
#include "server/limits.h"
#include "server/worker.h"

// One answer of a job. Engine thread.
typedef struct srv_job_choice {
    bool started; // an event came: it waits no more
    bool ended;
    // Not streamed: everything so far.
    srv_buf text;
    srv_token_list prompt, drawn;
    // As of its last event, for the figures.
    uint64_t last_token_us; // 0: no token yet
    eng_usage seen;
} srv_job_choice;

// What one owner's jobs hold; there while they hold anything. Under the lock.
typedef struct srv_holder {
    struct srv_holder *next;
    uint64_t owner, places, waiting_tokens;
} srv_holder;

// How fast room has become free of late: sums that fade, over the time in which the engine worked. Under the lock.
typedef struct srv_pace {
    double seconds, places, tokens;
    double new_places, new_tokens; // since the last step
} srv_pace;

struct srv_job {
    atomic_int references;
    // Constant after creation.
    int32_t *ids;
    eng_request request; // its pointers lead into this job
    eng_text *stops;     // one block: the table, then the bytes
    int32_t *stop_ids;
    eng_logit_bias *biases;
    bool keep_tokens;
    size_t window;
    uint64_t created_us;
    size_t choice_count;
    // Loop thread.
    void *owner;
    // Under the lock.
    bool wants_submit, wants_cancel, wants_resume;
    bool in_inbox;
    size_t places, waiting; // choices that have not ended, that have not started; 0 once it is cancelled
    uint64_t waiting_tokens;
    srv_holder *holder; // while it has places
    bool paused;
    size_t unread; // bytes of events not yet freed by the loop
    srv_job *inbox_next;
    // Engine thread.
    uint64_t id;              // 0: not in the engine
    size_t started, finished; // choices
    size_t prompt_told;       // tokens, with prompt_logprobs
    bool ended;
    srv_job *active_previous, *active_next;
    srv_job_choice choices[];
};

enum { SRV_CALENDAR_TENTHS = 10 * (SRV_RETRY_MOST_S + 1) };

struct srv_worker {
    srv_worker_options options;
    pthread_t thread;
    _Atomic(srv_worker_state) state;
    atomic_bool ended; // the thread has nothing left to do
    size_t calls;      // asked, not yet taken back; loop thread
    _Atomic(const eng_engine *) published;
    atomic_uint_least64_t busy_since; // 0: idle
    eng_error error;                  // written before the state that makes it readable

    pthread_mutex_t lock;
    pthread_cond_t news; // inbox or stop
    // Under the lock.
    srv_job *inbox_head, *inbox_tail;
    srv_event *outbox_head, *outbox_tail;
    srv_call *asked, **asked_end; // oldest first
    srv_call *answered, **answered_end;
    uint64_t places, waiting, waiting_tokens; // as in a job, of all of them
    uint64_t rows;                            // of the engine; 0 until it is open
    srv_holder *holders;
    srv_pace pace;
    double calendar[SRV_CALENDAR_TENTHS]; // seconds of work promised for each tenth of a second from calendar_from on
    uint64_t calendar_from;               // in tenths of the clock
    bool owes;                            // something is promised
    bool stop, failed;
    bool poked; // by the engine's store: there is something for a step

    // Written by the engine thread, read by any.
    srv_stats stats;
    srv_counter step_us;        // a step's time, smoothed
    srv_counter soonest_tokens; // that the job nearest to its end may still make

    // Engine thread.
    eng_engine *engine;
    srv_call *waiting_calls;
    srv_job *active;
    srv_event *step_head, *step_tail; // events of the present step
    bool step_started;                // a choice's first event is among what happened in it
    uint64_t event_us;                // of its events; 0: not yet taken
    uint64_t worked_until_us;         // the last step's end; 0: it had nothing to do
};

void srv_job_retain(srv_job *job); // worker_job.c

uint64_t srv_clock_us(void); // worker_stats.c

// worker_queue.c: under the lock.
bool srv_queue_has_room(srv_worker *worker, const srv_room *room, srv_no_room *why);
ENG_CHECKED eng_status srv_queue_enter(srv_worker *worker, srv_job *job); // ENG_NO_MEMORY
// This many of its choices wait from now on, at most as many as before; the first that starts takes the prompt.
void srv_queue_start(srv_worker *worker, srv_job *job, size_t waiting);
void srv_queue_free(srv_worker *worker, srv_job *job, size_t places);
void srv_queue_pace(srv_worker *worker, double seconds); // of work have passed
double srv_queue_load(const srv_worker *worker);

// worker_stats.c: engine thread.
void srv_worker_note_event(srv_worker *worker, const srv_job *job, srv_job_choice *choice, const eng_event *event);
// Returns the seconds since the last step, or since this one began after idleness; 0: nothing was to be done.
double srv_worker_note_step(srv_worker *worker, uint64_t began_us, bool worked);
// The engine's gauges, after a step and before the first.
void srv_worker_note_gauges(srv_worker *worker);

#endif

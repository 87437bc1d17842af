// SPDX-License-Identifier: Apache-2.0
// One model, its engine and the thread that owns them.
//
// The engine thread opens the engine, loops on eng_step and closes it, when it is told to end. The loop thread hands
// jobs over whole and takes events back whole; nothing else is shared. A job is one engine request with one or more
// choices: the loop thread makes it, submits it, may cancel it and may tell what it has consumed; the engine thread
// runs it. The fault of one choice ends the job. Both hold a reference, and so does every event on its way, so a late
// event of a cancelled job finds a job that nobody owns any more and is dropped.
//
// Bounds: choices and prompt tokens that wait are counted at submission, and what is too much is refused at once
// (ENG_FULL). A streamed job whose unread events outgrow its window is paused in the engine until half of them are
// read. A job that is not streamed collects its text on the engine thread and sends one event a choice.
#ifndef SERVER_WORKER_H
#define SERVER_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/engine.h"
#include "server/stats.h"
#include "server/token_list.h"

typedef struct srv_worker srv_worker;
typedef struct srv_job srv_job;

typedef struct srv_worker_options {
    eng_options engine;      // wake is the worker's own
    uint64_t queue_requests; // choices beyond the engine's rows
    uint64_t queue_tokens;   // prompt tokens not yet read
    // The folder's fingerprint is read first: the engine is not opened where that is `known`, whole, and counts as
    // unloadable where it has become another meanwhile.
    bool reads_first;
    char known[ENG_FINGERPRINT_BYTES]; // empty: none
    // Called on the engine thread when events or a new state are there to be taken after there were none.
    void (*wake)(void *context);
    void *wake_context;
} srv_worker_options;

typedef enum srv_worker_state {
    SRV_WORKER_LOADING,
    SRV_WORKER_READY,
    SRV_WORKER_UNCHANGED,  // the folder is as it was known: there is no engine
    SRV_WORKER_UNLOADABLE, // the engine could not be opened
    SRV_WORKER_FAILED,     // the engine failed while serving; every job got its error event
} srv_worker_state;

// Starts the thread. The strings of options.engine are borrowed for the worker's life.
ENG_CHECKED eng_status srv_worker_start(const srv_worker_options *options, srv_worker **out, eng_error *error);
// Ends the thread after its present step (or load), closes the engine, drops what is left. NULL is accepted. No call of
// srv_worker_engine's result may be in flight.
void srv_worker_stop(srv_worker *worker);
void srv_worker_free(srv_worker *worker); // after srv_worker_stop. NULL is accepted
// The same without waiting: asks the thread to end, which closes the engine; wakes when it has, and then
// srv_worker_stop returns at once. Nobody may ask anything of the worker any more.
void srv_worker_end(srv_worker *worker);
bool srv_worker_ended(const srv_worker *worker);

// Any thread.
srv_worker_state srv_worker_read_state(const srv_worker *worker);
// For eng_info, eng_encode, eng_decode; NULL until READY.
const eng_engine *srv_worker_engine(const srv_worker *worker);
// Why it is UNLOADABLE or FAILED; constant from then on.
const eng_error *srv_worker_error(const srv_worker *worker);
// Milliseconds that the present step or load has taken; 0: the engine is idle.
uint64_t srv_worker_busy_ms(const srv_worker *worker);

const srv_stats *srv_worker_stats(const srv_worker *worker);

// ---- jobs: loop thread ----

typedef struct srv_job_options {
    eng_request request; // ids are taken, also on failure: free(); all else is copied; user is the job's own
    bool keep_tokens;    // events carry the tokens
    size_t window;       // bytes of unread events before a pause; 0: not streamed
    void *owner;
} srv_job_options;

// NULL: no memory.
srv_job *srv_job_create(const srv_job_options *options);
// Drops the caller's reference. NULL is accepted.
void srv_job_release(srv_job *job);
// What srv_job_options.owner said, NULL after srv_worker_cancel.
void *srv_job_owner(const srv_job *job);

// What a request asks of the queue.
typedef struct srv_room {
    uint64_t owner;          // eng_request.owner
    double share;            // of what may wait that one owner may hold; 1: all
    uint64_t places, tokens; // choices, prompt tokens
} srv_room;
// Why there is none.
typedef struct srv_no_room {
    bool of_share;   // the owner's share is full, not the queue
    int retry_after; // seconds after which its turn should have come, by the pace of late
} srv_no_room;
// Whether a submission would find room. Each refusal counts as one who comes back after the time that *why says.
bool srv_worker_has_room(srv_worker *worker, const srv_room *room, srv_no_room *why);
// How full the queue is beyond the rows: the larger share of its requests or tokens, 0 to 1 or a little more.
double srv_worker_load(srv_worker *worker);
// Choices that run or wait.
uint64_t srv_worker_places(srv_worker *worker);
// Nothing runs or waits, and every call was answered.
bool srv_worker_is_quiet(srv_worker *worker);
// Other limits, as in the options, for what comes from now on.
void srv_worker_set_queue(srv_worker *worker, uint64_t requests, uint64_t tokens);
// Submits all, of one owner, or none. ENG_FULL: too much waits, *why says the rest; ENG_DEVICE: the engine has failed.
ENG_CHECKED eng_status srv_worker_submit(srv_worker *worker, srv_job *const *jobs, size_t count, double share,
                                         srv_no_room *why);
// Ends a job wherever it is; its owner hears no more of it. A job that has ended is no fault.
void srv_worker_cancel(srv_worker *worker, srv_job *job);

// Something to be done with the engine between two of its steps. Made by whoever asks, which frees it in done.
typedef struct srv_call {
    struct srv_call *next, *previous;
    srv_worker *worker;
    bool waits;
    void (*run)(struct srv_call *call, eng_engine *engine); // engine thread; engine NULL: there is none any more
    void (*done)(struct srv_call *call);                    // loop thread
} srv_call;
// Engine thread. Said in run: the call ends later, by srv_call_end out of a callback of the engine. Where the engine
// ends before, run is called once more, without one.
void srv_call_wait(srv_call *call);
void srv_call_end(srv_call *call);
// After the submissions and cancellations that were asked for before.
void srv_worker_call(srv_worker *worker, srv_call *call);
// Those that have run.
srv_call *srv_worker_take_calls(srv_worker *worker);

typedef struct srv_event {
    struct srv_event *next;
    srv_job *job;
    int32_t choice;
    void *receiver;      // free for whoever took it
    eng_finish finish;   // ENG_FINISH_ERROR: the job's last event, else the choice's
    eng_status status;   // with ENG_FINISH_ERROR
    const char *message; // with ENG_FINISH_ERROR; in this event's memory
    eng_usage usage;
    int64_t position;             // eng_event.position
    bool durable;                 // eng_event.durable
    srv_token_list prompt, drawn; // with keep_tokens: since the last event, sealed
    size_t size;                  // what it counts in the job's window
    size_t text_length;
    char text[];
} srv_event;

// The events that are there, oldest first. Each is freed by srv_event_free, which also counts it as read.
srv_event *srv_worker_take(srv_worker *worker);
void srv_event_free(srv_worker *worker, srv_event *event);

#endif

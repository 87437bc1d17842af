// SPDX-License-Identifier: Apache-2.0
// The scheduler itself, for its own files: lists of jobs, who asks, the steps under way.
//
// scheduler.c owns the lists and composes steps, sharing.c knows what one job may begin from that another has read,
// audit.c reads again what was begun from.
#ifndef ENGINE_SCHEDULER_INTERNAL_H
#define ENGINE_SCHEDULER_INTERNAL_H

#include "engine/audit.h"
#include "engine/scheduler.h"

typedef struct eng_job_list {
    eng_job *head, *tail;
    uint64_t count;
} eng_job_list;

// Who is in a step.
typedef struct eng_step_jobs {
    eng_job **job; // (slots) by the index of their piece
    int32_t count;
} eng_step_jobs;

// Lives as long as one of its jobs.
struct eng_owner {
    eng_owner *next;
    uint64_t name, jobs;
    uint64_t admitted, read; // when it was last served, by the scheduler's clock
};

struct eng_scheduler {
    eng_scheduler_options options;
    eng_job_list waiting, running;
    eng_job_list storing; // ended, their last events wait for the store
    eng_owner *owners;
    uint64_t clock;
    uint64_t step; // number of the present step
    int admitted;  // in the steps that the present call composed
    eng_job *owed; // a prompt that found no room in the last step, though it was its turn
    uint64_t waiting_tokens, last_id;
    bool stepping;
    eng_job *buried;                     // ended while stepping or with a step under way, linked by next
    eng_step_jobs steps[ENG_FLIGHTS];    // by turns
    uint64_t started, finished;          // steps
    uint64_t prefix_hits, prefix_misses; // prompts of a whole chunk at least, by whether they began from a state
    eng_audit audit;
    eng_error fault; // of the device; sticks
};

// The job's owner, found or made; it comes to the end of the turns. False: no memory.
bool eng_scheduler_join_owner(eng_scheduler *scheduler, eng_job *job, uint64_t name);
void eng_scheduler_append(eng_job_list *list, eng_job *job);
void eng_scheduler_unlink(eng_job_list *list, eng_job *job);
// Out of its list, as it has ended; its memory goes now or with the steps that point to it.
void eng_scheduler_bury(eng_scheduler *scheduler, eng_job_list *list, eng_job *job);
// Tells what there is to tell of it; one that has ended is buried.
void eng_scheduler_tell(eng_scheduler *scheduler, eng_job_list *list, eng_job *job, eng_event_fn on_event,
                        void *context);
// Its session, with states at rest making room. ENG_FULL: not now.
ENG_CHECKED eng_status eng_scheduler_make_session(const eng_scheduler *scheduler, eng_job *job, eng_error *error);
// Ends it without a word and takes it out of its list; its memory goes now or with the steps that point to it.
void eng_scheduler_drop(eng_scheduler *scheduler, eng_job_list *list, eng_job *job);

#endif

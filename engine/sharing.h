// SPDX-License-Identifier: Apache-2.0
// Prompts that begin alike are read once: what a job may begin from, and what it leaves for others.
//
// A job begins from the deepest state that serves it: of the prefix cache, or one that another job leaves. A job that
// waits and shares whole chunks with a prompt that is being read *follows* that reader to the last boundary both have;
// there the reader leaves a copy of its state and goes on, stopping for nobody. The copy is there until the last who
// follows has begun from it. Only running jobs are followed, so nobody waits in a circle; each time a job follows
// anew it begins further behind, so nobody does for ever. A reader that ends or is paused before it came there sets its
// followers free: what it has read by then they keep if it was cancelled.
//
// With a budget a reader also leaves states for those who come later: at the last boundary below its prompt's end,
// where it parted from a way that was known, and now and then between.
#ifndef ENGINE_SHARING_H
#define ENGINE_SHARING_H

#include "engine/request.h"
#include "engine/scheduler.h"

// A job that begins to wait, its turn taken. ENG_INTERNAL or ENG_OK.
ENG_CHECKED eng_status eng_share_enter(eng_scheduler *scheduler, eng_job *job, eng_error *error);
// Before the session of the job whose turn it is is opened: what it begins from, job->share.start (NULL: nothing).
void eng_share_choose(eng_scheduler *scheduler, eng_job *job);
// The session is open and the job runs. ENG_NO_MEMORY.
ENG_CHECKED eng_status eng_share_begin(eng_scheduler *scheduler, eng_job *job, eng_error *error);
// The next position behind what the job has read where it stops for a state; INT64_MAX: none.
int64_t eng_share_stop(const eng_scheduler *scheduler, const eng_job *job);
// The job is about to read on from where its session is.
void eng_share_leave(eng_scheduler *scheduler, eng_job *job);
// Results of the job came.
void eng_share_accepted(eng_scheduler *scheduler, eng_job *job);
// Nobody follows the job any more. handing: they get the state that it has come to.
void eng_share_let_go(eng_scheduler *scheduler, eng_job *job, bool handing);
void eng_share_unfollow(eng_job *job);

#endif

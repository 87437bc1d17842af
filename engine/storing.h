// SPDX-License-Identifier: Apache-2.0
// Requests that have ended on a named timeline, and whose last events wait until the store has what they added.
//
// Such a job has given slot and turn back and costs nothing but its memory; the timeline stays busy for it. All on the
// engine's thread.
#ifndef ENGINE_STORING_H
#define ENGINE_STORING_H

#include "engine/scheduler_internal.h"

// After a step, of a running job: whether it has ended and waits now. If it has ended and need not, event.durable is
// known.
bool eng_storing_hold(eng_scheduler *scheduler, eng_job *job);
// Tells those that need not wait any more, and the jobs whose timelines were lost to another engine. Whether there were
// any.
bool eng_storing_tell(eng_scheduler *scheduler, eng_event_fn on_event, void *context);
// Of one that waits: its timeline goes back to what was told.
void eng_storing_cancel(eng_scheduler *scheduler, eng_job *job);

#endif

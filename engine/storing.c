// SPDX-License-Identifier: Apache-2.0
// The list of those that wait for the store; see storing.h.
//
// Callbacks may cancel any of them: after each event the list is looked through from its head.
#include "engine/storing.h"

#include "engine/sharing.h"

bool eng_storing_hold(eng_scheduler *scheduler, eng_job *job) {
    eng_timeline *timeline = job->past.timeline;
    if (job->phase != ENG_PHASE_ENDED || !timeline)
        return false;
    if (!eng_durable_hold(scheduler->options.durable, timeline)) {
        job->durable = eng_durable_has_all(timeline);
        return false;
    }
    eng_share_let_go(scheduler, job, false);
    eng_scheduler_unlink(&scheduler->running, job);
    eng_scheduler_append(&scheduler->storing, job);
    return true;
}

static bool tell_settled(eng_scheduler *scheduler, eng_event_fn on_event, void *context) {
    for (eng_job *job = scheduler->storing.head; job; job = job->next) {
        const eng_settled settled = eng_durable_settled(scheduler->options.durable, job->past.timeline);
        if (settled == ENG_SETTLED_PENDING)
            continue;
        job->durable = settled == ENG_SETTLED_DURABLE;
        if (settled == ENG_SETTLED_LOST)
            eng_job_fail(job, ENG_CONFLICT, eng_durable_lost_text);
        eng_scheduler_tell(scheduler, &scheduler->storing, job, on_event, context);
        return true;
    }
    return false;
}

static bool tell_lost(eng_scheduler *scheduler, eng_job_list *list, eng_event_fn on_event, void *context) {
    for (eng_job *job = list->head; job; job = job->next) {
        if (!job->turn.timeline || !eng_durable_is_lost(job->turn.timeline))
            continue;
        if (list == &scheduler->waiting)
            scheduler->waiting_tokens -= (uint64_t)job->queued_tokens;
        eng_share_let_go(scheduler, job, true);
        eng_job_fail(job, ENG_CONFLICT, eng_durable_lost_text);
        eng_scheduler_tell(scheduler, list, job, on_event, context);
        return true;
    }
    return false;
}

bool eng_storing_tell(eng_scheduler *scheduler, eng_event_fn on_event, void *context) {
    bool any = false;
    while (tell_settled(scheduler, on_event, context))
        any = true;
    while (eng_durable_has_lost(scheduler->options.durable) &&
           (tell_lost(scheduler, &scheduler->running, on_event, context) ||
            tell_lost(scheduler, &scheduler->waiting, on_event, context)))
        any = true;
    return any;
}

void eng_storing_cancel(eng_scheduler *scheduler, eng_job *job) {
    const eng_turn_past *past = &job->past;
    const int64_t told = job->told > 0 ? past->prompt_end + (int64_t)job->told : past->began;
    eng_durable_release(past->timeline);
    if (!past->returns && told < past->timeline->position) {
        const eng_status cut = eng_timeline_cut(past->timeline, told, NULL);
        (void)cut; // it is not busy, and was there
    }
    eng_scheduler_bury(scheduler, &scheduler->storing, job);
}
